"""placeholder"""

CHUNK = 64
