"""The memory counter against what the allocator really does, and the plan's arithmetic against the counter."""

import gc
import random
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import REPO
from made_up_family import MadeUpSpec
from torch.profiler import ProfilerActivity, profile

from titan_mi100.attention.base import Backend
from titan_mi100.attention.torch_backends import Sdpa
from titan_mi100.config.check import check
from titan_mi100.config.layout import stages_of
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.optim.formats import SIGNED, UNSIGNED, values_on
from titan_mi100.optim.lean import LeanAdamW
from titan_mi100.parallel import distributed, offload
from titan_mi100.planning import memory
from titan_mi100.planning.memory import ABOVE, BELOW, CATEGORIES, estimate
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.shapes.qwen3_5 import FULL as FULL_ATTENTION
from titan_mi100.shapes.qwen3_5 import every_fourth
from titan_mi100.shapes.saved import ValuesPerToken
from titan_mi100.workshop.rehearsal import counter, saved
from titan_mi100.workshop.rehearsal.counter import Count, as_rank, ranks_of_stages

pytestmark = pytest.mark.usefixtures("no_process_group")
LEAN = {"optimizer.state": "8bit", "optimizer.master": "bf16_sr", "training.mixed_precision_reduce": "bfloat16"}
FULL = {"activation_checkpoint.mode": "full"}
PP = {"parallelism.pipeline_parallel_degree": 2}
TP = {"parallelism.tensor_parallel_degree": 2}
CP = {"parallelism.context_parallel_degree": 2}
STATE_ON_HOST, INPUTS_ON_HOST = {"memory.offload": "optimizer"}, {"memory.offload_activations": True}
PIECES = {"memory.piece_tokens": 2048, "training.seq_len": 16384}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
ALONG, AFTER = ({**FULL, "draft_head.train": train} for train in ("along", "after"))
GPU = 32 << 30


def config_of(spec: ModelSpec, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Config:
    config = Config()
    for name, value in {"training.gradient_accumulation_steps": 4, **settings}.items():
        section, key = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    monkeypatch.setattr(Config, "spec", lambda _: spec)
    return config


def count(config: Config, ranks: int, rank: int, device_memory: int = 0, backend: Backend | None = None) -> Count:
    """Count the memory of one rank in a step; see `as_rank` for the arguments."""
    schedule = config.parallelism.pipeline_parallel_schedule
    microbatches = counter.enough_microbatches(config.layout(ranks), config.batch(ranks), schedule)
    with as_rank(Workload.of(config, ranks), rank, microbatches, device_memory, backend) as fake:
        return fake.count_step()


def torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def allocated(config: Config, ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The peak by the CPU allocator's own events: the same step on real tensors, collectives without other ranks."""
    gc.collect()  # what a step before left behind is not freed while this one is watched
    with monkeypatch.context() as patched:
        patched.setattr(counter, "FakeTensorMode", lambda **_: nullcontext())
        patched.setattr(counter, "_PIECE", distributed.PIECE)
        update = LeanAdamW._update  # of all rows
        patched.setattr(counter, "_update_first_rows", lambda *arguments, seen: update(*arguments))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            count(config, ranks, rank, backend=Sdpa())
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


WIDE = replace(PRESETS["0.6B"], num_hidden_layers=3, vocab_size=20_000)
UNTIED = replace(WIDE, tie_word_embeddings=False, vocab_size=8_000)
NARROW = replace(WIDE, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
EXPERTS = replace(
    PRESETS["30B-A3B"],
    num_hidden_layers=2,
    vocab_size=8_000,
    hidden_size=512,
    num_experts=16,
    moe_intermediate_size=256,
)
QLORA, OF_EXPERTS = {"lora.rank": 8, "lora.base": "nf4"}, {"lora.target_modules": ("q_proj", "experts")}
REAL = {
    "one process": (WIDE, 1, {}),
    "one process, 8 bits": (UNTIED, 1, {**LEAN, **FULL}),
    "FSDP2": (WIDE, 2, {"optimizer.state": "bf16"}),
    "FSDP2, ZeRO-1": (NARROW, 2, {"parallelism.zero_stage": 1, "activation_checkpoint.mode": "none"}),
    "FSDP2, ZeRO-2, 24 bits": (UNTIED, 2, {"parallelism.zero_stage": 2, "optimizer.master": "24bit"}),
    "HSDP": (NARROW, 4, {"parallelism.data_parallel_replicate_degree": 2}),
    "DDP": (WIDE, 2, {"parallelism.zero_stage": 0}),
    "pipeline": (UNTIED, 2, {**PP, **LEAN}),
    # long, because a CPU's chunk_cat, by which FSDP2 fills its buffers, makes a copy that no mode sees
    "pipeline x FSDP2": (UNTIED, 4, {**PP, **FULL, "training.seq_len": 2048}),
    "tensor parallel": (WIDE, 2, TP),
    "4 bits": (UNTIED, 1, {"lora.rank": 8, "lora.base": "nf4", **FULL}),
    "state on the host": (UNTIED, 1, {**LEAN, **FULL, **STATE_ON_HOST}),
    "state on the host, FSDP2": (WIDE, 2, {**FULL, **STATE_ON_HOST}),
    "context parallel": (WIDE, 2, CP),
    "tensor parallel x FSDP2, LoRA": (WIDE, 4, {**TP, "lora.rank": 8}),
    "experts": (EXPERTS, 1, {**LEAN, "activation_checkpoint.mode": "none"}),
    "experts in 4 bits, with adapters": (EXPERTS, 1, {**QLORA, **OF_EXPERTS, **FULL}),
}


QUICK = ("LoRA", "draft head along, QLoRA", "draft head after, pipeline")


def mostly_full(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", mostly_full(REAL))
def test_the_count_is_what_the_allocator_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ranks, settings = REAL[name]
    config = config_of(spec, {"training.seq_len": 256, **settings}, monkeypatch)
    for rank in ranks_of_stages(config.layout(ranks)):
        counted = count(config, ranks, rank, backend=Sdpa())
        on_host = counted.host if config.memory.offload != "nothing" else 0  # all the time
        assert counted.peak + on_host == pytest.approx(allocated(config, ranks, rank, monkeypatch), rel=0.02)
        assert sum(counted.categories.values()) == counted.peak and min(counted.categories.values()) >= 0


PLANNED = {
    "FSDP2": ("8B", 2, {**LEAN, **FULL}),
    "FSDP2 without accumulation": ("8B", 2, {**LEAN, **FULL, "training.gradient_accumulation_steps": 1}),
    "FSDP2, fp32": ("8B", 2, FULL),
    "FSDP2, 24 bits": ("8B", 2, {**FULL, "optimizer.state": "8bit", "optimizer.master": "24bit"}),
    "one card": ("8B", 1, {**LEAN, **FULL}),
    "tensor parallel": ("8B", 2, {**LEAN, **TP}),
    "tensor parallel x FSDP2": ("8B", 4, {**LEAN, **FULL, **TP}),
    "pipeline": ("8B", 2, {**LEAN, **FULL, **PP}),
    "pipeline x FSDP2": ("8B", 4, {**LEAN, **FULL, **PP}),
    "interleaved x FSDP2": (
        "0.6B", 4, {**PP, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "training.local_batch_size": 4}
    ),
    "GPipe": (
        "4B", 2, {**PP, "optimizer.state": "bf16", "training.local_batch_size": 2,
                  "parallelism.pipeline_parallel_schedule": "GPipe"}
    ),
    "tied, batch 8": ("0.6B", 2, {**FULL, "training.local_batch_size": 8}),
    "tied, batch 8, selective": ("0.6B", 2, {"training.local_batch_size": 8}),
    "nothing recomputed": ("0.6B", 2, {"training.local_batch_size": 8, "activation_checkpoint.mode": "none"}),
    "one card, nothing recomputed": ("0.6B", 1, {"training.local_batch_size": 4, "activation_checkpoint.mode": "none"}),
    "pipeline, tied": ("0.6B", 2, {**PP, **FULL, "training.local_batch_size": 8}),
    "ZeRO-1": ("0.6B", 2, {"parallelism.zero_stage": 1, "training.local_batch_size": 4}),
    "ZeRO-2": ("0.6B", 2, {"parallelism.zero_stage": 2, "training.local_batch_size": 4}),
    "DDP": ("0.6B", 2, {"parallelism.zero_stage": 0, "training.local_batch_size": 4}),
    "HSDP": ("1.7B", 4, {**FULL, "parallelism.data_parallel_replicate_degree": 2, "training.local_batch_size": 4}),
    "LoRA": ("8B", 1, {**FULL, "lora.rank": 16, "training.local_batch_size": 2}),
    "LoRA, FSDP2": ("8B", 2, {**FULL, "lora.rank": 16}),
    "LoRA, FSDP2, tied": ("qwen3.5-4B", 2, {**FULL, "lora.rank": 16}),
    "LoRA, pipeline x FSDP2": ("qwen3.5-9B", 4, {**FULL, **PP, "lora.rank": 16}),
    "LoRA, tensor parallel x FSDP2": ("qwen3.5-4B", 4, {**FULL, **TP, "lora.rank": 16}),
    "LoRA with dropout": ("8B", 1, {**FULL, "lora.rank": 16, "lora.dropout": 0.1}),
    "LoRA, nothing recomputed": ("8B", 1, {"lora.rank": 16, "activation_checkpoint.mode": "none"}),
    "QLoRA, tied, FSDP2": ("0.6B", 2, {**FULL, "lora.rank": 16, "lora.base": "nf4", "training.local_batch_size": 4}),
    "LoRA, rows of tokens": ("8B", 1, {**FULL, "lora.rank": 16, "lora.trainable_tokens": ("one", "two")}),
    "QLoRA": ("8B", 1, {**FULL, "lora.rank": 16, "lora.base": "nf4"}),
    "QLoRA, FSDP2": ("8B", 2, {**FULL, "lora.rank": 16, "lora.base": "nf4", "training.local_batch_size": 4}),
    "state on the host": ("8B", 1, {**LEAN, **FULL, **STATE_ON_HOST}),
    "state on the host, tied": ("4B", 1, {**LEAN, **FULL, **STATE_ON_HOST}),
    "state on the host, FSDP2": ("8B", 2, {**LEAN, **FULL, **STATE_ON_HOST}),
    "state on the host, FSDP2, fp32": ("0.6B", 2, {**FULL, **STATE_ON_HOST, "training.local_batch_size": 4}),
    "inputs on the host": ("8B", 1, {**LEAN, **FULL, **STATE_ON_HOST, **INPUTS_ON_HOST, "training.seq_len": 8192}),
    "weights on the host": ("8B", 1, {**LEAN, **FULL, "memory.offload": "weights"}),
    "weights on the host, FSDP2": ("8B", 2, {**LEAN, **FULL, "memory.offload": "weights"}),
    "state on the host, HSDP": ("8B", 4, {**LEAN, **FULL, **STATE_ON_HOST, **HSDP}),
    "weights on the host, HSDP": ("8B", 4, {**LEAN, **FULL, "memory.offload": "weights", **HSDP}),
    "weights on the host, ZeRO-2": ("8B", 2, {**FULL, "memory.offload": "weights", "parallelism.zero_stage": 2}),
    "weights on the host, ZeRO-1": (
        "8B", 2, {**LEAN, **FULL, "memory.offload": "weights", "parallelism.zero_stage": 1}
    ),
    "experts, QLoRA": ("30B-A3B", 1, {**FULL, **QLORA}),
    "experts, QLoRA with adapters of theirs": ("30B-A3B", 1, {**FULL, **QLORA, **OF_EXPERTS}),
    "experts with a rank of their own, dropout": ("30B-A3B", 1, {
        **FULL, **QLORA, **OF_EXPERTS, "lora.expert_rank": 32, "lora.dropout": 0.1, "training.local_batch_size": 4,
    }),
    "experts, LoRA, FSDP2": ("30B-A3B", 2, {**FULL, "lora.rank": 16}),
    "experts, nothing recomputed": ("30B-A3B", 1, {"lora.rank": 8, "activation_checkpoint.mode": "none"}),
    "experts, selective": ("30B-A3B", 1, {"lora.rank": 8, "training.local_batch_size": 4}),
    "experts, all weights, FSDP2": ("30B-A3B", 2, {**LEAN, **FULL}),
    "experts, tensor parallel": ("30B-A3B", 2, {**FULL, **QLORA, **TP}),
    "shared experts, QLoRA": ("qwen3.5-35B-A3B", 1, {**FULL, **QLORA}),
    "fp32": ("0.6B", 2, {**FULL, "training.mixed_precision_param": "float32", "training.local_batch_size": 4}),
    "context parallel": ("8B", 4, {**LEAN, **FULL, **CP, "training.seq_len": 8192}),
    "context parallel, nothing recomputed": (
        "0.6B", 4, {**CP, "activation_checkpoint.mode": "none", "training.seq_len": 4096}
    ),
    "context parallel, Qwen3.5, LoRA": ("qwen3.5-9B", 2, {**FULL, **CP, "lora.rank": 16, "training.seq_len": 4096}),
    "context parallel, QLoRA with dropout, pieces": ("4B", 2, {**FULL, **QLORA, **PIECES, **CP, "lora.dropout": 0.1}),
    "pieces, QLoRA": ("8B", 1, {**FULL, **QLORA, **PIECES}),
    "pieces, LoRA with dropout": ("4B", 1, {**FULL, **PIECES, "lora.rank": 16, "lora.dropout": 0.1}),
    "pieces, all weights": ("8B", 1, {**LEAN, **FULL, **PIECES, **STATE_ON_HOST, **INPUTS_ON_HOST}),
    "pieces, FSDP2": ("8B", 2, {**LEAN, **FULL, **PIECES}),
    "pieces, tensor parallel, selective": ("8B", 2, {**LEAN, **PIECES, **TP}),
    "pieces, nothing recomputed": ("0.6B", 1, {**PIECES, "activation_checkpoint.mode": "none"}),
    "pieces, pipeline": ("8B", 2, {**LEAN, **FULL, **PP, **PIECES}),
    "pieces, delta rule": ("qwen3.5-9B", 1, {**FULL, **QLORA, **PIECES}),
    "pieces, delta rule, all weights": ("qwen3.5-9B", 2, {**LEAN, **FULL, **PIECES, **STATE_ON_HOST}),
    "pieces, experts": ("30B-A3B", 1, {**FULL, **QLORA, **PIECES}),
    "pieces, experts with adapters of theirs": ("30B-A3B", 1, {**FULL, **QLORA, **OF_EXPERTS, **PIECES}),
    "pieces, shared experts": ("qwen3.5-35B-A3B", 1, {**FULL, **QLORA, **PIECES}),
    "draft head along": ("qwen3.5-0.8B", 1, {**ALONG, "training.local_batch_size": 8}),
    "draft head along, nothing recomputed": (
        "qwen3.5-0.8B", 1, {**ALONG, "activation_checkpoint.mode": "none", "training.local_batch_size": 8}
    ),
    "draft head along, LoRA": ("qwen3.5-9B", 1, {**ALONG, "lora.rank": 16}),
    "draft head along, QLoRA": ("qwen3.5-9B", 1, {**ALONG, **QLORA}),
    "draft head along, QLoRA, pieces": ("qwen3.5-9B", 1, {**ALONG, **QLORA, **PIECES}),
    "draft head along, QLoRA, experts": ("qwen3.5-35B-A3B", 1, {**ALONG, **QLORA}),
    "draft head along, FSDP2": ("qwen3.5-9B", 2, {**ALONG, **LEAN}),
    "draft head along, FSDP2, pieces": ("qwen3.5-9B", 2, {**ALONG, **LEAN, **PIECES}),
    "draft head along, LoRA, FSDP2, tied": ("qwen3.5-4B", 2, {**ALONG, "lora.rank": 16}),
    "draft head along, ZeRO-1": (
        "qwen3.5-0.8B", 2, {**ALONG, "parallelism.zero_stage": 1, "training.local_batch_size": 4}
    ),
    "draft head along, LoRA, DDP": ("qwen3.5-9B", 2, {**ALONG, "lora.rank": 16, "parallelism.zero_stage": 0}),
    "draft head along, pipeline": ("qwen3.5-9B", 2, {**ALONG, **LEAN, **PP}),
    "draft head along, LoRA, pipeline x FSDP2": ("qwen3.5-9B", 4, {**ALONG, **PP, "lora.rank": 16}),
    "draft head along, pipeline x FSDP2, tied": ("qwen3.5-4B", 4, {**ALONG, **PP, "training.local_batch_size": 4}),
    "draft head along, tensor parallel": ("qwen3.5-9B", 2, {**ALONG, **LEAN, **TP}),
    "draft head along, state on the host": ("qwen3.5-9B", 1, {**ALONG, **LEAN, **STATE_ON_HOST}),
    "draft head after": ("qwen3.5-9B", 1, {**AFTER, "training.local_batch_size": 4}),
    "draft head after, nothing recomputed": (
        "qwen3.5-0.8B", 1, {**AFTER, "activation_checkpoint.mode": "none", "training.local_batch_size": 8}
    ),
    "draft head after, pieces": ("qwen3.5-9B", 1, {**AFTER, **PIECES}),
    "draft head after, experts, FSDP2": ("qwen3.5-35B-A3B", 2, {**AFTER, "training.local_batch_size": 4}),
    "draft head after, FSDP2, tied": ("qwen3.5-4B", 2, AFTER),
    "draft head after, pipeline": ("qwen3.5-9B", 2, {
        **AFTER, **PP, "training.local_batch_size": 4, "training.gradient_accumulation_steps": 32,
    }),
    "draft head after, pipeline x FSDP2": ("qwen3.5-9B", 4, {**AFTER, **PP}),
    "draft head after, tensor parallel x FSDP2": ("qwen3.5-4B", 4, {**AFTER, **TP}),
    "draft head after, state on the host": ("qwen3.5-9B", 1, {**AFTER, **STATE_ON_HOST, **INPUTS_ON_HOST}),
}  # fmt: skip


def compare(config: Config, ranks: int, least: float, most: float, apart: float) -> None:
    """The plan's peak against the count; a moment of the plan has every category where the count has it.

    Args:
        apart: of a category, as a share of the peak.
    """
    layout = config.layout(ranks)
    cuts = stages_of(memory.layers_per_stage(Workload.of(config, ranks), 1.0, GPU))
    mine = [[cuts[index] for index in numbers] for numbers in memory._on_ranks(Workload.of(config, ranks), len(cuts))]
    planned = zip(estimate(Workload.of(config, ranks), GPU), mine, strict=True)
    for number, ((peak, stages), rank) in enumerate(zip(planned, ranks_of_stages(layout), strict=True)):
        counted = count(config, ranks, rank, GPU)
        assert least <= peak.peak / counted.peak - 1 <= most, (peak, counted)
        workload = Workload.of(config, ranks)
        one = memory._RankMemory(workload, GPU, number, stages, memory.shares_copies(workload, GPU))
        off = [
            max(abs(at[name] - counted.categories[name]) for name in CATEGORIES) / counted.peak
            for _, at in one.moments()
        ]
        # what comes from the host counts as gathered, wherever it goes
        assert min(off) <= apart or config.memory.offload == "weights", (off, counted)
        if config.memory.offload == "weights":  # in powers of two
            assert counted.host <= 1.03 * peak.host <= 2.06 * counted.host
        else:
            assert peak.host == pytest.approx(counted.host, rel=0.03)
        assert set(peak.categories) == set(CATEGORIES)


@pytest.mark.parametrize("name", mostly_full(PLANNED))
def test_the_plan_is_near_the_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flavor, ranks, settings = PLANNED[name]
    layers = 8 if flavor == "0.6B" or PP.items() <= settings.items() else 4
    kinds = {"layer_types": every_fourth(layers)} if flavor.startswith("qwen3.5") else {}
    spec = replace(PRESETS[flavor], num_hidden_layers=layers, **kinds)
    spec = spec.with_draft_head("draft_head.train" in settings)
    config = config_of(spec, {"training.gradient_accumulation_steps": 8, **settings}, monkeypatch)
    compare(config, ranks, -0.03, 0.10, 0.17)


@pytest.mark.parametrize("name", ["4B", "30B-A3B", "qwen3.5-9B", "qwen3.5-35B-A3B", "made up"])
def test_a_familys_list_of_saved_tensors_is_what_autograd_saves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MadeUpSpec() if name == "made up" else PRESETS[name]
    if name == "made up":
        monkeypatch.setattr(saved, "_TOKENS", 63)  # it computes token by token
    counted, listed, by_kind = 0, 0, saved.saved_by_kind(spec)
    for layer in spec.layers:
        sums = ValuesPerToken.of(by_kind[layer.kind]), layer.kept["none"]
        count, known = (2 * values.compute + 4 * values.fp32 for values in sums)
        tolerance = 0.25 if layer.kind == FULL_ATTENTION else {"4B": 0.01, "30B-A3B": 0.01}.get(name, 0.03)
        assert known == pytest.approx(count, rel=tolerance), layer.kind
        counted, listed = counted + count, listed + known
    assert -BELOW <= listed / counted - 1 <= ABOVE


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_are_cut_by_bytes_where_a_card_would_be_almost_full(
    schedule: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5-9B, whose layers differ, on two cards."""
    settings = {**PP, **LEAN, **FULL, "parallelism.pipeline_parallel_schedule": schedule}
    config = config_of(PRESETS["qwen3.5-9B"], settings, monkeypatch)
    cut = "parallelism.pipeline_parallel_layers_per_stage"
    peaks = []
    for card in (0, 40 << 30, GPU):  # 0: by cost alone
        counts = tuple(memory.layers_per_stage(Workload.of(config, 2), 1.0, card))
        given = config_of(PRESETS["qwen3.5-9B"], {**settings, cut: counts}, monkeypatch)
        peaks.append((counts, max(m.peak for m in estimate(Workload.of(given, 2), GPU)), given))
    (by_cost, most, one), roomy, (by_bytes, less, other) = peaks
    assert sum(by_bytes) == 32 and roomy[0] == by_cost != by_bytes and less < most - (1 << 30)
    planned = [[m.peak for m in estimate(Workload.of(each, 2), GPU)] for each in (config, other)]
    assert planned[0] == planned[1]  # the plan knows it
    with as_rank(Workload.of(config, 2), 1, 2, GPU) as fake:  # and the counter, which builds as a run does
        assert sum(len(part.model.layers) for part in fake.model.parts) == sum(by_bytes[1::2])
    if full and schedule == "1F1B":
        short = [replace(c, training=replace(c.training, seq_len=64)) for c in (one, other)]  # quickly counted
        large, small = (count(c, 2, 0, GPU).peak for c in short)  # of the larger stage
        assert small < large - (1 << 30)


def test_a_pipelines_last_stage_has_fewer_layers_beside_a_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for train in ("no", "along", "after"):
        spec = PRESETS["qwen3.5-9B"].with_draft_head(train != "no")
        config = config_of(spec, {**PP, **FULL, "draft_head.train": train}, monkeypatch)
        counts.append(memory.layers_per_stage(Workload.of(config, 2), 1.0)[1])
    assert counts == [14, 11, 6]


def drawn(draws: random.Random, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, int]:
    """A config and its ranks, of any methods and layouts that go together."""
    choices = {
        "training.seq_len": (512, 1024), "training.local_batch_size": (1, 2, 4),
        "training.gradient_accumulation_steps": (1, 4), "training.mixed_precision_reduce": ("float32", "bfloat16"),
        "activation_checkpoint.mode": ("full", "selective", "none"), "optimizer.state": ("fp32", "bf16", "8bit"),
        "optimizer.master": ("fp32", "24bit", "bf16_sr"), "memory.offload": ("nothing", "nothing", "optimizer"),
        "parallelism.zero_stage": (0, 1, 2, 3), "parallelism.pipeline_parallel_degree": (1, 1, 2),
        "parallelism.tensor_parallel_degree": (1, 1, 2), "parallelism.data_parallel_replicate_degree": (1, 1, 2),
        "lora.rank": (0, 0, 8), "lora.base": ("whole", "nf4"), "lora.dropout": (0.0, 0.1),
    }  # fmt: skip
    while True:
        ranks, spec = draws.choice((1, 2, 4)), draws.choice((WIDE, UNTIED))
        settings = {key: draws.choice(values) for key, values in choices.items()}
        config = config_of(replace(spec, num_hidden_layers=6), settings, monkeypatch)
        if not check(config, ranks, with_files=False):
            return config, ranks


def test_the_plan_is_near_the_count_of_what_is_drawn(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few small layers what surrounds them weighs more than in a real model."""
    draws = random.Random(38)
    for _ in range(24 if full else 1):
        compare(*drawn(draws, monkeypatch), -0.08, 0.25, 0.30)


@pytest.mark.full
def test_a_pipelines_loss_keeps_nothing_of_the_microbatches_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's schedule keeps the outputs of all microbatches, and with them what the loss's autograd node holds."""
    counts: list[Count] = []
    for microbatches in (8, 16):
        settings = {**PP, **LEAN, "training.gradient_accumulation_steps": microbatches}
        config = config_of(UNTIED, settings, monkeypatch)
        monkeypatch.setattr(counter, "enough_microbatches", lambda *_, n=microbatches: n)
        counts.append(count(config, 2, 1, GPU))
    received = 8 * 1024 * UNTIED.hidden_size * 2  # torch keeps a buffer for each, 2.8 its gradient too
    received *= 1 if torch_version() >= (2, 13) else 2
    assert counts[1].peak - received == pytest.approx(counts[0].peak, rel=1e-3)
    monkeypatch.setattr(counter, "enough_microbatches", lambda *_: 8)
    assert count(config, 2, 1, GPU).peak == pytest.approx(counts[1].peak, rel=1e-3)  # counted with fewer


def test_counting_leaves_nothing_behind_that_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    count(config_of(replace(UNTIED, num_hidden_layers=1), LEAN, monkeypatch), 1, 0, GPU)
    for kind in (SIGNED, UNSIGNED):
        assert type(values_on(torch.device("cpu"), kind)) is torch.Tensor


def test_counting_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(replace(UNTIED, num_hidden_layers=1), LEAN, monkeypatch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        count(config, 1, 0, GPU)
    events = profiler.profiler.kineto_results.events()
    assert sum(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0) < 1 << 20
    assert not torch.distributed.is_initialized()


COUNTED = {
    path.stem: float(found[1])
    for path in sorted((REPO / "train_configs").glob("*.toml"))
    if (found := re.search(r"^# Counted peak: ([\d.]+) GiB per card", path.read_text(), re.MULTILINE))
}


# layers with which the peak comes where it comes with all: a pipeline is balanced, layers outweigh what has one size
ENOUGH = {
    "a3b_qlora_pp2": (4, 48),
    "_pp2": (6, 10),
    "qlora": (16, 32),
    "4b_fsdp2": (9, 10),
    "_offload": (16, 17),
    "gb_full": (16, 17),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_shipped_configs_peak_is_what_it_says(name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one_card = re.match(r"(\d+)gb_", name)  # of so many GB
    cards = 1 if name.endswith("_1gpu") or one_card else 2
    memory = int(one_card[1]) << 30 if one_card else GPU
    config = load_config(["--job.config_file", str(REPO / "train_configs" / f"{name}.toml")], cards, with_files=False)
    worst = max(each.peak for each in estimate(Workload.of(config, cards), memory)) / 2**30
    assert -0.03 <= worst / COUNTED[name] - 1 <= 0.10
    if full:  # counted of a few layers, as more of them add equally
        spec = config.spec()
        few, more = next((layers for part, layers in ENOUGH.items() if part in name), (2, 3))
        peaks = []
        for layers in (few, more):
            monkeypatch.setattr(Config, "spec", lambda _, n=layers: replace(spec, num_hidden_layers=n))
            peaks.append(
                max(count(config, cards, rank, memory).peak for rank in ranks_of_stages(config.layout(cards))) / 2**30
            )
        added = (peaks[1] - peaks[0]) / (more - few)
        assert peaks[1] + added * (spec.num_hidden_layers - more) == pytest.approx(COUNTED[name], rel=0.02)


def test_as_many_gradients_wait_as_the_planner_assumes() -> None:
    assert memory._ON_THE_WAY == offload._ON_THE_WAY


def test_the_goals_are_counted() -> None:
    assert {"qwen3_8b_fsdp2_8bit", "qwen3_8b_pp2_8bit", "qwen3_8b_lora", "qwen3_8b_qlora_1gpu"} <= COUNTED.keys()


def test_of_inputs_on_the_host_two_blocks_are_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = (config_of(replace(WIDE, num_hidden_layers=n), {**INPUTS_ON_HOST, **FULL}, monkeypatch) for n in (6, 12))
    few, many = (estimate(Workload.of(config, 1), 1 << 30)[0].categories["activations"] for config in deep)
    assert few == many
