"""Every layout against one process over some AdamW steps, in fp64, and each one's checkpoint in another: a part of the
table of tests/parity/table.py, with --full all of it, on real processes."""

from dataclasses import replace
from pathlib import Path

import pytest
from parity import table as parity

from titan_mi100.config.layout import SCHEDULES


def assert_within_the_bars(results: list[parity.Result]) -> None:
    for cell, found in results:
        assert not isinstance(found, str) and parity.holds(cell, found), (cell, found)


def cells_of_two_steps(family: str = "qwen3") -> list[parity.Cell]:
    """The table's cells, with as few layers as their pipelines need; the untied models with clipping."""
    return [
        replace(
            cell,
            steps=2,
            max_norm=0.0 if cell.tied else 0.05,
            layers=SCHEDULES[cell.schedule].stages_per_rank
            * max(2, cell.parallelism.get("pipeline_parallel_degree", 2)),
        )
        for cell in parity.cells("float64", 0.0, list(parity.LAYOUTS), family=family)
    ]


# (layout, tied, accumulation): each axis with another. test_parity has the axes alone, of Qwen3; CI has every layout.
CHOSEN = {
    "qwen3": {("PP2 Interleaved1F1B", True, 4), ("TP2 x FSDP2", False, 2), ("HSDP 2x2", True, 2), ("CP4", True, 1)},
    "qwen3.5": {("FSDP2 x2", False, 2), ("DDP x2", False, 2), ("PP2 1F1B", True, 2), ("TP2 x PP2", True, 2)},
    "qwen3_moe": {("FSDP2 x2", False, 2), ("PP2 Interleaved1F1B", False, 4), ("CP2 x TP2", False, 1)},
    "qwen3.5_moe": {("CP2 x PP2", True, 2)},
}  # fmt: skip
# of context parallel each product once: rows that ranks share differ neither by the microbatches nor by a tied head
SHARED = {("CP2 x FSDP2", False, 2), ("CP2 x HSDP", True, 1), ("CP2 x TP2", False, 2), ("CP2 x PP2", True, 2)}
# in pieces of the tokens
CUT = {("FSDP2 x2", False, 2), ("TP2", False, 2), ("PP2 1F1B", False, 2)}
BY_DEFAULT = ("TP2", "qwen3.5_moe")


def test_layouts_train_as_one_process_does(full: bool, tmp_path: Path) -> None:
    """With --full every layout of Qwen3 twice: tied with the most microbatches, untied with the fewest, of eight
    processes both with two; of the family that has delta rule and experts each layout of fewer processes once, of the
    others those of two. The whole tables are made by hand, see docs/TESTING.md.
    """
    others = ("qwen3.5", "qwen3_moe", "qwen3.5_moe")
    jobs, more = cells_of_two_steps(), [cell for family in others for cell in cells_of_two_steps(family)]
    fewest = {cell.layout: cell.accumulation for cell in reversed(jobs)}
    chosen = [c for c in (*jobs, *more) if (c.layout, c.tied, c.accumulation) in CHOSEN.get(c.family, ())]
    assert len(chosen) == sum(map(len, CHOSEN.values()))
    if full:
        for cell in jobs:
            wanted = 2 if cell.processes == 8 else 4 if cell.tied else fewest[cell.layout]
            is_wanted = cell.accumulation == wanted
            if "CP" in cell.layout:
                is_wanted = (cell.layout, cell.tied, cell.accumulation) in SHARED
            chosen += [cell] if is_wanted and cell not in chosen else []
        for cell in more:
            is_small = cell.processes < (8 if cell.family == "qwen3.5_moe" else 4)
            is_wanted = is_small and (cell.accumulation, cell.tied) == (4, True)
            chosen += [cell] if is_wanted and cell not in chosen else []
    # Both kinds of layers with chunks of the published length: tensor parallel splits each. By default of the family
    # that has all of it, delta rule and experts.
    long = [replace(c, seq_len=parity.LONG_ROW) for c in more if (c.layout, c.tied, c.accumulation) == ("TP2", True, 4)]
    chosen += long if full else [c for c in long if c.family == "qwen3.5_moe"]
    cut = [replace(c, pieces=20) for c in (*jobs, *more) if (c.layout, c.tied, c.accumulation) in CUT]
    chosen += [c for c in cut if c.family in ("qwen3", "qwen3.5_moe") and (full or (c.layout, c.family) == BY_DEFAULT)]
    results = parity.measure(chosen, tmp_path)
    assert len(results) == len(chosen)
    assert_within_the_bars(results)


@pytest.mark.full
def test_a_checkpoint_of_each_layout_goes_on_in_another(tmp_path: Path) -> None:
    """In any other, and in itself; with untied weights in the next one."""
    ring = list(zip(parity.RESUMED, (*parity.RESUMED[1:], parity.RESUMED[0]), strict=True))
    for pairs, is_tied in ((parity.EVERY_PAIR, True), (ring, False)):
        folder = tmp_path / str(is_tied)
        results = parity.resume("float64", folder, pairs=pairs, models=(is_tied,), steps=2, layers=2)
        assert len(results) == len(pairs)
        assert_within_the_bars(results)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3_moe"])
def test_a_checkpoint_of_another_family_goes_on_in_another_layout(family: str, tmp_path: Path) -> None:
    pairs = [("FSDP2 x2", "TP2")]
    assert_within_the_bars(
        parity.resume("float64", tmp_path, pairs=pairs, models=(True,), steps=2, layers=2, family=family)
    )
