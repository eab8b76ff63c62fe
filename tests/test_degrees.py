"""How degrees, batches and stages follow from the config."""

import itertools
import random
from collections.abc import Sequence

import pytest

from titan_mi100.config.layout import (
    SCHEDULES,
    Batch,
    Layout,
    accumulation_for,
    check_schedule,
    resolve_batch,
    resolve_layout,
    split_layers,
    stages_of,
    stages_on,
)
from titan_mi100.planning.costs import stage_costs
from titan_mi100.shapes.base import AttentionShape
from titan_mi100.shapes.families import PRESETS


def test_a_run_keeps_its_rows_per_step_on_other_ranks_or_is_told_what_fits() -> None:
    saved = Batch(2, 3, 4)
    assert [accumulation_for(24, batch, saved) for batch in (Batch(2, 1, 2), Batch(1, 9, 1), Batch(6, 1, 4))] == [
        6,
        24,
        1,
    ]
    assert accumulation_for(24, saved, saved) == 3
    with pytest.raises(ValueError, match=r"= 2 makes steps of 16 rows, but this run's have 24; use 3"):
        accumulation_for(24, Batch(2, 2, 4), saved)
    with pytest.raises(
        ValueError, match=r"local_batch_size = 5 on 4 .* what does: local_batch_size 1, 2, 3, 6 on these ranks"
    ):
        accumulation_for(24, Batch(5, 1, 4), saved)
    with pytest.raises(ValueError, match=r"what does: local_batch_size 1, 2, 3, 4, 6, 8, 12, 24 on these ranks"):
        accumulation_for(24, Batch(5, 1, 1), saved)
    with pytest.raises(ValueError, match="what does: 1, 2, 3, 4, 6, 8, 12, 24 data-parallel ranks"):
        accumulation_for(24, Batch(1, 1, 5), saved)


def test_degrees_fill_the_processes_or_say_what_would() -> None:
    assert resolve_layout(4) == Layout(dp_shard=4, zero_stage=3)
    assert resolve_layout(8, dp_replicate=2) == resolve_layout(8, 4, 2) == Layout(dp_shard=4, dp_replicate=2)
    assert resolve_layout(8, dp_replicate=2).dp_degree == 8
    assert resolve_layout(8, pp=2, tp=2) == Layout(dp_shard=2, tp=2, pp=2, zero_stage=1)
    assert resolve_layout(8, pp=2, tp=2).dp_degree == 2
    ddp = Layout(dp_replicate=4, zero_stage=0)
    assert resolve_layout(4, zero_stage=0) == resolve_layout(4, dp_shard=1, dp_replicate=4) == ddp
    for options, remedy in (
        ({"world_size": 2, "dp_shard": 3}, "--nproc_per_node 3"),
        ({"world_size": 2, "dp_shard": 0}, "must be -1"),
        ({"world_size": 4, "dp_replicate": 3}, "data_parallel_replicate_degree = 3 does not divide the 4 started"),
        ({"world_size": 4, "dp_shard": 2, "dp_replicate": 4}, "does not fill the 4 started processes; .* 8"),
        ({"world_size": 2, "pp": 2, "tp": 2}, "pipeline_parallel_degree = 2 x tensor_parallel_degree = 2 does not"),
        ({"world_size": 4, "pp": 2, "zero_stage": 3}, "zero_stage = 3 does not go with a pipeline.*use 1"),
        ({"world_size": 2, "tp": 2, "zero_stage": 0}, "does not go with tensor_parallel_degree = 2; leave it out"),
        ({"world_size": 2, "cp": 4}, "context_parallel_degree = 4 does not divide the 2 started"),
        ({"world_size": 2, "dp_shard": 2, "zero_stage": 0}, "shards nothing, but data_parallel_shard_degree = 2"),
    ):
        with pytest.raises(ValueError, match=remedy):
            resolve_layout(**options)  # type: ignore[arg-type]


def test_a_batch_comes_nearest_to_the_token_target() -> None:
    assert resolve_batch(1, 0, 100_000, 1024, 2).gradient_accumulation_steps == 49
    assert resolve_batch(1, 0, 100_000, 1024, 2).global_batch_size == 98
    assert resolve_batch(4, 0, 10, 1024, 2).gradient_accumulation_steps == 1
    assert resolve_batch(4, 6, 0, 1024, 2).global_batch_size == 48


def test_a_schedule_that_cannot_run_says_why() -> None:
    assert check_schedule("1F1B", 2, 2) is None
    assert "needs at least 4 microbatches, but gets 2" in str(check_schedule("1F1B", 4, 2))
    assert 'or use "GPipe"' in str(check_schedule("1F1B", 4, 2))
    assert check_schedule("GPipe", 4, 1) is None
    assert check_schedule("Interleaved1F1B", 2, 6) is None
    assert "in rounds of 4 or more" in str(check_schedule("Interleaved1F1B", 4, 9))
    assert "needs at least 4 microbatches" in str(check_schedule("Interleaved1F1B", 4, 2))  # torch 2.8 would hang


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_split_of_the_layers_has_a_cheaper_costliest_stage(stages: int) -> None:
    for first, last in ((0.5, 4.9), (0.2, 1.8), (0.0, 0.0), (3.3, 0.1), (0.5, 20.0)):

        def costliest(counts: Sequence[int], first: float = first, last: float = last) -> float:
            return max(n + first * (i == 0) + last * (i == stages - 1) for i, n in enumerate(counts))

        every = [counts for counts in itertools.product(range(1, 10), repeat=stages) if sum(counts) == 9]
        counts = split_layers([1.0] * 9, first, last, stages)
        assert tuple(counts) in every
        assert costliest(counts) == min(map(costliest, every))


@pytest.mark.parametrize(("stages", "first", "last"), [(2, 0.0, 0.0), (3, 0.5, 2.5), (4, 0.0, 1.0)])
def test_layers_of_unequal_cost_are_cut_where_the_dearest_stage_is_cheapest(
    stages: int, first: float, last: float
) -> None:
    costs = [1.0, *random.Random(stages).choices((0.25, 0.5, 1.0), k=8)]
    cuts = itertools.combinations(range(1, 9), stages - 1)
    every = [[stop - start for start, stop in itertools.pairwise((0, *cut, 9))] for cut in cuts]

    def dearest(counts: list[int]) -> float:
        edges = [0, *itertools.accumulate(counts)]
        of_stages = [sum(costs[start:stop]) for start, stop in itertools.pairwise(edges)]
        of_stages[0], of_stages[-1] = of_stages[0] + first, of_stages[-1] + last
        return max(of_stages)

    found = split_layers(costs, first, last, stages)
    assert sum(found) == 9 and dearest(found) == pytest.approx(min(map(dearest, every)))


def test_stages_cover_the_layers_in_order_and_lie_as_the_schedules_want() -> None:
    stages = stages_of([3, 2, 4])
    assert [list(stage.layers) for stage in stages] == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    assert [(stage.first, stage.last) for stage in stages] == [(True, False), (False, False), (False, True)]
    assert [stages_on(rank, 2, 4) for rank in (0, 1)] == [[0, 2], [1, 3]]


def test_the_head_costs_as_many_layers_as_its_supervised_tokens_make_it() -> None:
    spec = PRESETS["0.6B"]
    block = 2048 * 1024 * 2 + 1024 * 1024 * 2 + 3 * 1024 * 3072  # its matrices: 15.7M; the head has 155.6M
    layers, first, last = stage_costs(spec, 64, 1024, 1.0, recompute=True)
    assert layers == [1.0] * 28
    logits = 151936 * 60 * 40 / 8  # their way through memory, as multiplications of four passes
    assert last == pytest.approx((151936 * 1024 + logits) / (block + 2 * 16 * 128 * 1024 / 2), rel=0.01)
    assert first < 0.02  # 64 rows share the traffic of the weight's gradient
    half = stage_costs(spec, 64, 1024, 0.5, recompute=True)[1:]
    assert half[0] == first and half[1] == pytest.approx(last / 2, rel=0.01)
    # of frozen weights a block makes 3 products instead of 4, and so does the head
    _, first, frozen = stage_costs(spec, 64, 1024, 1.0, recompute=True, frozen=True)
    unit = block + 2 * 16 * 128 * 1024 / 2
    assert first == 0 and frozen * 3 == pytest.approx((3 * 151936 * 1024 + 4 * logits) / unit, rel=0.01)


def test_a_draft_head_costs_a_layer_an_fc_and_the_head_once_more() -> None:
    spec = PRESETS["qwen3.5-9B"]
    plain, beside, alone = (stage_costs(spec, 8, 1024, 1.0, recompute=True, draft=x) for x in ("no", "along", "after"))
    assert beside[:2] == plain[:2] and alone[1] == 0 and alone[0] == pytest.approx(plain[0])
    # in multiplications of a token: q with its gate, k, v, o, the MLP, attention; fc; head and logits as above
    layer = (3 * 4096 + 2 * 1024) * 4096 + 3 * 4096 * 12288 + 2 * 4096 * 1025 / 2
    more = 4 * (layer + 2 * 4096**2) + 248320 * (3 * 4096 + 60 * 40 / 2)
    unit = max(2 * x.products + x.pair_flops * 1025 / 2 for x in spec.layers) / 2
    assert 4 * (beside[2] - plain[2]) == pytest.approx(more / unit) and alone[2] == pytest.approx(more / unit)


def test_the_log_names_every_layout() -> None:
    words = {
        Layout(): "FSDP2 over 1 (ZeRO-3)",
        Layout(dp_shard=4, zero_stage=2): "FSDP2 over 4 (ZeRO-2)",
        Layout(dp_shard=2, dp_replicate=3): "HSDP, 3 replicas of FSDP2 over 2 (ZeRO-3)",
        Layout(dp_replicate=4, zero_stage=0): "DDP over 4",
        Layout(pp=2, dp_replicate=3, zero_stage=1): "pipeline of 2 x 3 replicas",
        Layout(pp=2, zero_stage=1): "pipeline of 2",
        Layout(tp=2): "tensor parallel over 2",
        Layout(tp=2, pp=4, dp_shard=2, zero_stage=1): "pipeline of 4 x FSDP2 over 2 (ZeRO-1) x tensor parallel over 2",
    }
    assert {layout: layout.describe() for layout in words} == words


def test_what_callers_ask_of_a_layout() -> None:
    layout = Layout(dp_shard=4, dp_replicate=2, tp=2, pp=3)
    assert (layout.ranks_per_stage, layout.pipeline_ranks, layout.inside_a_node) == (16, 3, 2)
    assert layout.is_pipeline and not Layout(dp_shard=4).is_pipeline
    assert (layout.weight_shards, layout.replicas, layout.matrix_parts, layout.row_parts) == (4, 2, 2, 2)
    along = {kind: list(layout.along(kind)) for kind in ("pipeline", "data parallel", "tensor parallel")}
    assert along == {"pipeline": [0, 16, 32], "data parallel": list(range(0, 16, 2)), "tensor parallel": [0, 1]}
    assert layout.local(AttentionShape(8, 4, 16)) == (4, 2, 16)
    assert [layout.twin(rank) for rank in (0, 7, 8, 15, 16, 25)] == [0, 7, 0, 7, 16, 17]


def test_schedules_are_what_torch_says_of_them() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    found = {name: (s.stages_per_rank, s.looped) for name, s in SCHEDULES.items()}
    assert found == {"1F1B": (1, False), "GPipe": (1, False), "Interleaved1F1B": (2, True)}
    for name, schedule in SCHEDULES.items():
        kind = schedules.get_schedule_class(name)
        assert issubclass(kind, schedules.PipelineScheduleMulti) == (schedule.stages_per_rank > 1)
