"""A draft head in every layout: it trains as on one process, and beside it the model trains as without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.table import LAYOUTS, Cell, by_processes, cells, holds, launch, measure, resume

from titan_mi100.config.layout import SCHEDULES
from titan_mi100.shapes.base import DRAFT

WITHOUT_CONTEXT = [name for name in LAYOUTS if not name.startswith("CP") and LAYOUTS[name][0] <= 4]
# further settings of a run, in which the trunk's bits must stay, too: where steps differ most
OTHERS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "float16"},
    "bf16": {"precision": "bfloat16"},
    "8-bit states": {"state": "8bit", "master": "bf16_sr"},
    "24 bits": {"state": "bf16", "master": "24bit"},
    "states on the host": {"offload": "optimizer"},
    "weights on the host": {"offload": "weights"},
}


def cells_of(layout: str, family: str = "qwen3.5", **changes: Any) -> list[Cell]:
    chosen = cells(changes.pop("precision", "float32"), 0.05, [layout], accumulations=(2,), family=family)
    return [replace(cell, draft="along", **changes) for cell in chosen]


def with_even_stages(cell: Cell) -> Cell:
    if not (ranks := cell.parallelism.get("pipeline_parallel_degree")):
        return cell
    stages = ranks * SCHEDULES[cell.parallelism.get("pipeline_parallel_schedule", "1F1B")].stages_per_rank
    layers = (cell.layers // stages,) * stages
    return replace(cell, parallelism={**cell.parallelism, "pipeline_parallel_layers_per_stage": layers})


def assert_trunk_stays(chosen: list[Cell], folder: Path, steps: int = 20) -> None:
    """Weights after so many steps, with clipping, bit for bit; of a pipeline with the same layers per stage, which
    decide the order in which squares of gradients are added.
    """
    for group in by_processes([replace(with_even_stages(cell), steps=steps) for cell in chosen]):
        alone = launch([replace(cell, draft="no") for cell in group], folder / "without")
        beside = launch(group, folder / "with")
        for cell, expected, found in zip(group, alone, beside, strict=True):
            for own, other in zip(expected, found, strict=True):
                weights = dict(own["weights"])
                trunk = {name: tensor for name, tensor in other["weights"] if not name.startswith(DRAFT)}
                if "PP" in cell.layout:  # the copy of the last stage
                    weights |= {name: tensor for name, tensor in expected[0]["weights"] if name in trunk}
                assert trunk.keys() == weights.keys()
                assert all(torch.equal(trunk[name], weights[name]) for name in weights), cell
                norms = np.array(own["norm"])  # not finite where fp16 overflows
                assert np.array_equal(norms, other["norm"][::2], equal_nan=True) and np.nanmin(norms) > 0.05


def test_the_model_beside_it_has_the_bits_that_it_has_alone(tmp_path: Path, full: bool) -> None:
    chosen = [cell for name in (WITHOUT_CONTEXT if full else ["FSDP2 x2", "PP2 1F1B"]) for cell in cells_of(name)]
    assert_trunk_stays(chosen if full else [cell for cell in chosen if not cell.tied], tmp_path, 20 if full else 6)


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_does_with_other_numbers_and_states(name: str, tmp_path: Path) -> None:
    layouts = ["one process", "FSDP2 x2"] + ["PP2 x FSDP2", "TP2"] * ("host" not in name)
    assert_trunk_stays([cell for layout in layouts for cell in cells_of(layout, **OTHERS[name])], tmp_path)


@pytest.mark.full
def test_so_it_does_beside_experts(tmp_path: Path) -> None:
    chosen = [cell for layout in ("FSDP2 x2", "PP2 1F1B", "TP2") for cell in cells_of(layout, "qwen3.5_moe")]
    assert_trunk_stays(chosen, tmp_path)


@pytest.mark.full
def test_so_it_does_where_more_than_two_ranks_split_the_matrices(tmp_path: Path) -> None:
    """A sum of four depends on the order in which a collective adds, and that on what is sent with it."""
    (tied, untied) = cells_of("TP2", kv_heads=4)
    four = {"processes": 4, "parallelism": {"tensor_parallel_degree": 4}}
    assert_trunk_stays([replace(tied, **four), replace(untied, **four)], tmp_path)


def test_it_trains_as_on_one_process(tmp_path: Path, full: bool) -> None:
    families = ("qwen3.5", "qwen3.5_moe") if full else ("qwen3.5",)
    every = [cell for family in families for cell in cells("float64", 0.0, WITHOUT_CONTEXT, (2,), family)]
    chosen = [replace(cell, draft=draft) for cell in every for draft in ("along", "after")]
    few = {("PP2 1F1B", False, "along"), ("TP2", True, "along"), ("FSDP2 x2", False, "after")}
    chosen = [cell for cell in chosen if full or (cell.layout, cell.tied, cell.draft) in few]
    for cell, found in measure(chosen, tmp_path):
        assert isinstance(found, dict) and holds(cell, found), (cell, found)


@pytest.mark.full
@pytest.mark.parametrize("draft", ["along", "after"])
def test_it_resumes_in_other_layouts(draft: str, tmp_path: Path) -> None:
    pairs = [("FSDP2 x2", "PP2 1F1B"), ("PP2 1F1B", "TP2"), ("TP2", "DDP x2"), ("DDP x2", "FSDP2 x2")]
    for cell, found in resume("float64", tmp_path, pairs=pairs, family="qwen3.5", draft=draft):
        assert isinstance(found, dict) and holds(cell, found), (cell, found)
