"""placeholder"""

CHUNK = 64
AT_ONCE = 1 << 15
