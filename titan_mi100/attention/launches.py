"""Launch settings of our Triton kernels, by architecture, head size and dtype. Needs neither Triton nor torch.

tests/compile_report.py compiles every launch for the cards that it is for: none needs more shared memory than there is,
and none spills registers, except on RDNA 3 and with Triton 3.6. docs/PERFORMANCE.md says which. A trial on the card
decides between them (trial.py), and refuses one that is wrong there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from titan_mi100.errors import UserError


class Tile(NamedTuple):
    """Launch settings of one kernel. The two block sizes decide the order of additions."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    parts: int = 1  # 2: the gradients of k and v in a launch each, where both together need too many registers

    def __str__(self) -> str:
        return ".".join(map(str, self[:4] if self.parts == 1 else self))


class Launch(NamedTuple):
    """Launch settings of the three kernels. Operators, caches and checkpoints hold it as text."""

    forward: Tile
    queries: Tile  # the gradient of q
    keys: Tile  # the gradients of k and v

    @classmethod
    def parse(cls, text: str) -> "Launch":
        """Parse the text of a Launch.

        Raises:
            ValueError: the text is not a Launch.
        """
        forward, queries, keys = map(_tile, text.split())
        return cls(forward, queries, keys)

    @classmethod
    def first_of(cls, options: Sequence[Sequence[Tile]]) -> "Launch":
        """The first of the tiles that `candidates` returned."""
        return cls._make(tiles[0] for tiles in options)

    def __str__(self) -> str:
        return " ".join(map(str, self))


# Tiles for the output | for the gradient of q | for the gradients of k and v.
_CDNA2 = "128.64.4.1 128.64.8.1 | 128.32.4.1 128.32.8.1 | 32.128.4.1 32.64.4.1 32.64.8.1"
# 16.32.8.1 is not the first: Triton 3.4 and 3.6 forget wait states there (fp16, gfx90a, gfx942), see test_machine_code
_CDNA_256 = "64.32.8.1 64.64.8.1 | 64.32.8.1 32.32.8.1 | 16.32.4.1 16.32.8.1"
_CDNA_FP32 = "64.32.8.1 64.64.8.1 | 32.32.8.1 64.16.8.1 | 16.32.4.1"
_RDNA3 = "32.32.8.1 32.16.4.1 | 32.16.8.1 | 16.32.16.1.2"
_SM86 = "128.64.8.2 64.32.4.2 128.32.8.3 | 64.64.8.2 64.32.4.2 | 32.64.8.1 16.64.8.2"
_SM80_256 = "64.32.8.2 64.32.8.1 | 16.32.4.1 16.32.8.1 | 32.32.8.1 16.32.8.1"
_CUDA_FP32 = "32.32.8.1 | 16.16.8.1 | 32.32.8.1 16.64.8.2"
# (architecture, head size up to, bytes of an element). "cpu" is Triton's interpreter, for the tests.
TABLES: Mapping[tuple[str, int, int], str] = {
    ("gfx908", 128, 2): "128.64.4.1 64.32.2.1 128.64.8.1 128.32.8.1 | 128.32.4.1 128.32.8.1 64.32.8.1 | "
    "32.128.4.1 16.64.2.1 32.64.8.1",
    **{(arch, 128, 2): _CDNA2 for arch in ("gfx90a", "gfx942")},
    ("gfx950", 128, 2): "128.64.8.1 128.64.4.1 | 128.32.8.1 128.32.4.1 | 32.64.8.1 32.128.4.1 32.64.4.1",
    # Of its tiles for keys the first fits with Triton 3.4 and the second with 3.7, where the other version spills.
    ("gfx1100", 128, 2): _RDNA3.replace("16.32.16.1.2", "16.32.8.1.2 16.32.16.1.2"),
    ("gfx1151", 128, 2): _RDNA3,
    ("gfx1201", 128, 2): "64.32.8.1 32.32.4.1 | 64.32.8.1 32.32.4.1 | 16.32.8.1 16.16.4.1",
    ("sm80", 128, 2): "128.64.8.2 64.64.4.2 | 64.64.8.2 64.32.4.2 64.32.4.3 | 32.64.8.1 16.64.8.2",
    **{(arch, 128, 2): _SM86 for arch in ("sm86", "sm89", "sm120")},
    # With two stages and more the gradient of keys loads its next tiles while it computes (cp.async).
    ("sm90", 128, 2): "128.64.8.2 128.64.8.3 128.128.8.2 64.64.4.3 | 128.64.8.2 128.64.8.3 64.64.4.2 64.32.4.3 | "
    "32.128.8.1 32.128.8.2 32.128.8.3 64.64.8.1 32.64.4.1",
    ("sm100", 128, 2): "128.64.8.2 64.64.4.2 | 128.64.8.2 64.64.8.2 | 32.32.8.1 32.32.4.1",
    ("gfx908", 256, 2): "64.32.8.1 64.32.4.1 | 64.32.8.1 32.32.8.1 | 16.32.8.1 16.32.4.1",
    **{(arch, 256, 2): _CDNA_256 for arch in ("gfx90a", "gfx942", "gfx950")},
    ("gfx1201", 256, 2): "32.16.8.1 16.32.8.1 | 16.16.8.1 | 16.16.16.1.2",
    **{(arch, 256, 2): _SM80_256 for arch in ("sm80", "sm86", "sm89", "sm120")},
    # Tiles of 64 keys would use wgmma, but Triton 3.4 keeps 128 bytes of registers a thread in memory with them.
    ("sm90", 256, 2): "64.64.8.2 128.32.8.2 64.32.8.2 | 64.32.8.2 64.32.8.1 | 32.32.8.1 16.32.8.1",
    ("sm100", 256, 2): "64.64.8.2 128.32.8.2 | 64.64.8.1 64.32.8.2 | 32.32.8.1 16.32.8.1",
    **{(arch, 128, 4): _CDNA_FP32 for arch in ("gfx908", "gfx90a", "gfx942", "gfx950")},
    **{(arch, 128, 4): _CUDA_FP32 for arch in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")},
    **{("cpu", dim, size): "32.16.4.1 | 32.16.4.1 | 16.32.4.1" for dim in (128, 256) for size in (2, 4, 8)},
}
# Cells that stay empty, and why, with Triton 3.4.0 and 3.7.1: no tile that was compiled fits.
_SPILLS = "the gradient of q keeps registers in memory with every tile that was compiled"
EMPTY: Mapping[tuple[str, int, int], str] = {
    **{(arch, 256, 2): _SPILLS for arch in ("gfx1100", "gfx1151")},
    **{(arch, 128, 4): f"it has no matrix instructions, and {_SPILLS}" for arch in ("gfx1100", "gfx1151", "gfx1201")},
}
# An architecture without a table uses that of its nearest relative, with the least shared memory of them.
_FAMILIES = {
    "sm8": "sm86", "sm10": "sm100", "sm12": "sm120",
    "gfx9": "gfx908", "gfx110": "gfx1100", "gfx115": "gfx1151", "gfx120": "gfx1201",
}  # fmt: skip


def candidates(arch: str, head_dim: int, itemsize: int) -> list[list[Tile]]:
    """The tiles of each kernel, in the order of Launch, to try; `trial.py` times them.

    Args:
        arch: "gfx908", "sm90", "cpu".
        itemsize: bytes of an element of q, k and v.

    Returns:
        Of each kernel the most promising first.

    Raises:
        UserError: no launch fits; the message says why.
    """
    known = {arch for arch, _, _ in TABLES}
    family = next((name for start, name in _FAMILIES.items() if arch not in known and arch.startswith(start)), arch)
    row = (family, 128 if head_dim <= 128 else 256, itemsize)
    if head_dim > 256 or row not in TABLES:
        reason = "" if head_dim > 256 else EMPTY.get(row, "")
        problem = f"the kernels have no launch for {arch}, head size {head_dim}, {8 * itemsize} bits"
        raise UserError(problem + (f": {reason}" if reason else ""))
    return [[*map(_tile, tiles.split())] for tiles in TABLES[row].split("|")]


def options(tile: Tile, arch: str) -> dict[str, int]:
    """Options for the compiler. On CDNA: matrix instructions of 16 x 16, and two of them per read of shared memory.

    With a block below 32, Triton 3.4, 3.6 and 3.7 miscompile kpack = 2: they halve the whole accumulator in each
    iteration (triton-lang/triton, pull request 10290). There, and where the compiler has no such option any more
    (gfx950), each instruction has a read of its own.
    """
    two_reads = arch in ("gfx908", "gfx90a", "gfx942") and min(tile.block_q, tile.block_k) >= 32
    cdna = {"matrix_instr_nonkdim": 16, "kpack": 2 if two_reads else 1} if arch.startswith("gfx9") else {}
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **cdna}


def _tile(text: str) -> Tile:
    """Raises: ValueError, TypeError: the text is not a Tile."""
    return Tile(*map(int, text.split(".")))
