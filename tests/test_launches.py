"""The tables of launch settings: what was compiled, which cards have which, and what is said where there is none."""

import csv
from itertools import product

import pytest
from conftest import ASSETS

from titan_mi100.attention.launches import EMPTY, TABLES, Launch, Tile, candidates, options
from titan_mi100.errors import UserError

TRITONS = ("3.4.0", "3.6.0", "3.7.1")  # of torch 2.8, 2.11 and 2.13
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
SHARED = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm120": 101_376, "sm90": 232_448, "sm100": 232_448}
# Bytes of registers per thread that are kept in memory. Of the two tiles for the gradients of k and v on a 7900 XTX the
# first fits with Triton 3.4, the second with 3.7, none with 3.6; the trial on the card decides.
SPILLED = {
    ("3.4.0", "gfx1100", "16.32.16.1.2"): 8,
    ("3.6.0", "gfx1100", "16.32.8.1.2"): 100,
    ("3.6.0", "gfx1100", "16.32.16.1.2"): 12,
    ("3.6.0", "gfx1151", "16.32.16.1.2"): 8,
    ("3.6.0", "sm90", "16.64.8.2"): 20,  # fp32
    ("3.6.0", "sm80", "turn_backward_kernel"): 4,
    ("3.4.0", "sm80", "chunks_kernel"): 36,
    ("3.7.1", "gfx1100", "16.32.8.1.2"): 104,
}
CARDS = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", *SHARED)


@pytest.mark.parametrize("version", TRITONS)
def test_every_launch_of_the_tables_was_compiled_and_fits(version: str) -> None:
    """tests/compile_report.py --store has written the file; it must be made anew when a launch changes."""
    with (ASSETS / f"compiled-{version}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    compiled = {(r["arch"], r["kernel"], r["dtype"], int(r["head_dim"]), r["tile"]): r for r in rows}
    assert len(compiled) == len(rows)
    wanted = {
        (arch, kernel, dtype, dim, str(tile))
        for (arch, most, size), dtype, dim in product(TABLES, BYTES, (64, 128, 256))
        if arch != "cpu" and BYTES[dtype] == size and most == (128 if dim <= 128 else 256)
        if size == 2 or dim == 128
        for kernel, tiles in zip(
            ("forward", "queries_gradient", "keys_gradient"), candidates(arch, dim, size), strict=True
        )
        for tile in tiles
    }
    assert compiled.keys() == wanted
    for name, row in compiled.items():
        kept = SPILLED.get((version, name[0], name[-1]), 0)
        assert int(row["spilled"]) <= kept and int(row["shared"]) <= (SHARED | {"gfx950": 163_840}).get(
            name[0], 65_536
        ), name
        assert int(row["matrix_instructions"]) > 0 or name[2] == "fp32", name


def test_each_card_has_launches_or_a_reason() -> None:
    cells = {(arch, dim, size) for arch, dim, size in product(CARDS, (128, 256), (2, 4)) if (dim, size) != (256, 4)}
    assert {row for row in TABLES if row[0] != "cpu"} | EMPTY.keys() == cells and not EMPTY.keys() & TABLES.keys()
    assert all(EMPTY.values())


@pytest.mark.parametrize(
    ("arch", "like"),
    [("sm87", "sm86"), ("sm103", "sm100"), ("sm121", "sm120"), ("gfx906", "gfx908"), ("gfx940", "gfx908"),
     ("gfx1102", "gfx1100"), ("gfx1150", "gfx1151"), ("gfx1200", "gfx1201")],
)  # fmt: skip
def test_an_architecture_without_a_table_has_its_familys(arch: str, like: str) -> None:
    assert candidates(arch, 128, 2) == candidates(like, 128, 2)


@pytest.mark.parametrize(
    ("arch", "dim", "size", "said"),
    [
        ("sm75", 128, 2, "no launch for sm75, head size 128, 16 bits"),
        ("gfx1030", 64, 2, "no launch for gfx1030, head size 64, 16 bits"),
        ("gfx1100", 256, 2, "no launch for gfx1100, head size 256, 16 bits: the gradient of q keeps registers"),
        ("gfx1101", 256, 2, "head size 256, 16 bits: the gradient of q keeps registers"),
        ("gfx1201", 128, 4, "32 bits: it has no matrix instructions"),
        ("sm90", 256, 4, "no launch for sm90, head size 256, 32 bits"),
        ("sm90", 512, 2, "no launch for sm90, head size 512, 16 bits"),
    ],
)
def test_where_there_is_none_it_is_said_for_what_and_why(arch: str, dim: int, size: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        candidates(arch, dim, size)


def test_a_launch_survives_its_text_also_of_old_checkpoints() -> None:
    old = "128.64.4.1 128.32.4.1 32.128.4.1"
    assert str(Launch.parse(old)) == old and Launch.parse(old).keys == Tile(32, 128, 4, 1)
    for row in TABLES:
        assert Launch.parse(str(Launch.first_of(candidates(*row)))) == Launch.first_of(candidates(*row))
    assert str(Launch.first_of(candidates("gfx1151", 128, 2))).endswith("16.32.16.1.2")
    for wrong in ("", "1.2.3.4", "1.2.3.4 1.2 1.2.3.4", "a.b.c.d 1.2.3.4 1.2.3.4", "1.2.3.4 1.2.3.4 1.2.3.4.5.6"):
        with pytest.raises((ValueError, TypeError)):
            Launch.parse(wrong)


def test_options_of_amds_compiler_go_to_cdna_and_two_reads_where_they_are_right() -> None:
    small, large = Tile(16, 64, 2, 1), Tile(32, 64, 4, 1)
    for arch in ("sm89", "gfx1100", "gfx1201", "cpu", ""):
        assert options(large, arch) == {"num_warps": 4, "num_stages": 1}
    for arch, kpack in {"gfx908": 2, "gfx90a": 2, "gfx942": 2, "gfx950": 1, "gfx906": 1}.items():
        assert options(large, arch) == {"num_warps": 4, "num_stages": 1, "matrix_instr_nonkdim": 16, "kpack": kpack}
        assert options(small, arch)["kpack"] == 1  # Triton miscompiles two reads in small blocks
