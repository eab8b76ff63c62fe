"""What the delta rule of model/delta_rule.py costs: its products, and its bytes. Imports no torch."""

from typing import NamedTuple

CHUNK = 64  # tokens of a chunk; a power of two
AT_ONCE = 1 << 15  # tokens x value heads that are computed at once: this bounds the temporaries
SUBSTITUTED = 16  # rows of a block that is inverted without splitting it


class DeltaRuleCost(NamedTuple):
    """The cost of one call of `delta_rule`.

    Attributes:
        k_heads, v_heads: on this rank.
        key, value: sizes of a head.
        wide: bytes of a value in its computation: 4; 8 for fp64.
    """

    rows: int
    seq: int
    k_heads: int
    v_heads: int
    key: int
    value: int
    chunk: int = CHUNK
    wide: int = 4

    @property
    def at_once(self) -> int:
        """Tokens of a row that are computed at once."""
        return max(AT_ONCE // (self.rows * self.v_heads) // self.chunk, 1) * self.chunk

    @property
    def _chunks(self) -> int:
        return self.rows * -(-self.seq // self.chunk)

    @property
    def _common(self) -> int:
        """Multiplications per chunk for key and value heads alike: sums of g, q k^T, k k^T, and the inverse."""
        chunk, block = self.chunk, min(self.chunk, SUBSTITUTED)
        inverse = 2 * chunk * block**2 * max(block.bit_length() - 2, 0)
        while block < chunk:  # a merge has two products
            inverse += chunk * block**2
            block *= 2
        return self.v_heads * (chunk**2 + inverse) + 2 * self.k_heads * chunk**2 * self.key

    @property
    def forward_flops(self) -> int:
        """FLOPs of the products, two per multiplication."""
        states, pairs = self.chunk * self.key * self.value, self.chunk**2 * self.value
        return 2 * self._chunks * (self.v_heads * (3 * states + 2 * pairs) + self._common)

    @property
    def state_bytes(self) -> int:
        """Kept for backward besides the arguments: the states at each chunk, and the last one of each part."""
        states = self._chunks + self.rows * -(-self.seq // self.at_once)
        return states * self.v_heads * self.key * self.value * self.wide
