"""Cost of the delta rule of model/delta_rule.py: the size of its parts, and its products. Imports no torch."""

CHUNK = 64  # tokens of a chunk; a power of two
AT_ONCE = 1 << 15  # tokens x value heads that are computed at once: this bounds the temporaries
SUBSTITUTED = 16  # rows of a block that is inverted without splitting it


def tokens_at_once(rows: int, v_heads: int, chunk: int) -> int:
    """Tokens of a row that are computed at once."""
    return max(AT_ONCE // (rows * v_heads) // chunk, 1) * chunk


def products_of_chunk(k_heads: int, v_heads: int, key: int, value: int, chunk: int) -> int:
    """Multiplications of a chunk in forward. Args: key, value: sizes of a head."""
    pairs, block = chunk**2, min(chunk, SUBSTITUTED)
    inverse = 2 * chunk * block**2 * max(block.bit_length() - 2, 0)
    while block < chunk:  # a merge has two products
        inverse += chunk * block**2
        block *= 2
    # the states and their outputs; pairs of values; sums of g, and the inverse; q k^T and k k^T
    of_values = 3 * chunk * key * value + 2 * pairs * value + pairs + inverse
    return v_heads * of_values + 2 * k_heads * pairs * key
