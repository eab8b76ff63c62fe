"""As test_machine_code.py: MI200, MI300, RDNA3, and the kernels of the optimizer and of the head's loss.

A file of its own, for a second worker.
"""

import itertools
import os

import pytest
from conftest import FULL
from machine_code.cases import are_right, equals_plain_torch, head_is_right, only_full, table
from test_lean_optimizer import KINDS

RDNA = ("gfx1100", "gfx1151")
SOME_OF_RDNA = {
    ("gfx1100", "fp16", 64),
    ("gfx1151", "bf16", 128),
    ("gfx1100", ("8bit", "24bit")),
    ("gfx1151", KINDS[0]),
}


def marked(*cells: tuple) -> list:
    """With --full-of, only some of RDNA3, which has no card here that a table is for."""
    is_by_hand = [cell[0] in RDNA and cell not in SOME_OF_RDNA for cell in cells]
    return [pytest.param(*cell, marks=[only_full] * by_hand) for cell, by_hand in zip(cells, is_by_hand, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"),
    [
        *itertools.product(("gfx90a", "gfx942"), ("bf16", "fp16"), (64, 128, 256)),
        *marked(*itertools.product(RDNA, ("bf16", "fp16"), (64, 128))),
        *(pytest.param(arch, "fp32", 128, marks=only_full) for arch in ("gfx90a", "gfx942")),
    ],
)
def test_the_launches_are_right(arch: str, dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones, with --full all."""
    rows = table(arch, dtype, head_dim)
    are_right(arch, dtype, head_dim, rows if FULL in os.environ else rows[:1], monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "kind"),
    [*itertools.product(("gfx908", "gfx90a", "gfx942"), KINDS), *marked(*itertools.product(RDNA, KINDS))],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_the_optimizer_leaves_the_bits_of_plain_torch(
    arch: str, kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    equals_plain_torch(kind, arch, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *itertools.product(("gfx908", "gfx90a", "gfx942"), ("bf16", "fp16")),
        *marked(*itertools.product(RDNA, ("bf16",))),
    ],
)
def test_the_loss_is_right(arch: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head_is_right(arch, dtype, monkeypatch)
