"""The plan of a run: memory on each card, FLOPs, communication, time; and a search for the best layout. No torch."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_mi100.config.check import check
from titan_mi100.config.layout import ALL_SHARDED, SCHEDULES, Batch, Layout
from titan_mi100.config.settings import Config
from titan_mi100.planning.cards import Gpu
from titan_mi100.planning.costs import flops_of_steps, recomputed_flops
from titan_mi100.planning.memory import ABOVE, BELOW, Memory, estimate, piece_tokens, with_overhead
from titan_mi100.planning.scaling import REACHED, bubble_share, exposed_seconds, reached
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import draft_shapes, parameter_shapes

GIB = 1 << 30
Change = dict[str, dict[str, Any]]  # section -> key -> value
# share of the peak rate that a step reaches while it computes: assumed, as long as nothing was measured
EFFICIENCY = 0.35
# Seconds of the host per layer and microbatch, forward and backward, without recomputation: of plain operations, and
# with our fused kernels, which run where nothing is compiled. By the base of adapters; "": all weights. Launches and
# views are counted (tests/step_counts.py); 6 us for a launch, 20 for one of ours and 1.2 for a view are assumed.
HOST_LAYER = {"": (0.66e-3, 0.60e-3), "whole": (0.83e-3, 0.76e-3), "nf4": (1.17e-3, 1.09e-3)}
# Seconds per weight of an update on the CPU, measured on 2 cores: False: torch's AdamW, True: ours.
_HOST_UPDATE = {False: 0.6e-9, True: 8.5e-9}


@dataclass(frozen=True)
class Plan:
    """A run, one process on each card. Times are seconds, for full rows of which every token is learned.

    Attributes:
        memory: the peak of each pipeline rank.
        card: bytes of a card's memory.
        flops: FLOPs of a step on all ranks together, recomputation not counted.
        sent: bytes that a rank sends in a step: for data parallel, tensor parallel, pipeline, context parallel.
        bubble: share of the step in which a pipeline's rank waits.
        step: seconds of a step; None: the device's speed is not known.
        tokens: tokens of a step.
        hidden_from: tokens per forward from which computation overlaps all copies between host and device; 0: there
            are no copies, or the device's speed is not known.
        update: seconds of the update with offloading: copies, or work of the CPU; part of `step`.
        enough: tokens per forward from which a card computes longer than its host launches; 0: its speed is not known.
    """

    workload: Workload
    memory: Sequence[Memory]
    card: int
    flops: float
    sent: dict[str, float]
    bubble: float
    step: float | None
    tokens: int
    hidden_from: float = 0.0
    update: float = 0.0
    enough: float = 0.0

    @property
    def config(self) -> Config:
        return self.workload.config

    @property
    def ranks(self) -> int:
        return self.workload.ranks

    @property
    def fullest(self) -> Memory:
        """The peak of the rank that needs most."""
        return max(self.memory, key=lambda memory: memory.peak)

    @property
    def host(self) -> float:
        """Bytes of the host's memory for a card, at most."""
        return max(memory.host for memory in self.memory)

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if the device's speed is not known."""
        return math.inf if self.step is None else self.step

    @property
    def least(self) -> float:
        """Bytes that a card needs at least: the plan, if it is too high by its largest known error."""
        return self.fullest.peak / (1 + ABOVE)

    @property
    def most(self) -> float:
        """Bytes that a card needs at most: the plan, if it is too low by its largest known error, with the unseen."""
        return with_overhead(self.fullest.peak * (1 + BELOW))

    @property
    def fits(self) -> bool:
        return self.most <= self.card


def make_plan(workload: Workload, card: int, gpu: Gpu | None = None) -> Plan:
    """Plan a run, one process on each card.

    Args:
        card: bytes of a card's memory.
        gpu: its speed; None: not known.
    """
    config, ranks, spec = workload.config, workload.ranks, workload.spec
    layout, batch = workload.layout, workload.batch
    training = config.training
    rows = batch.global_batch_size
    tokens = rows * training.seq_len
    pairs = rows * training.seq_len * (training.seq_len + 1) // 2
    flops = float(flops_of_steps(spec, config.lora, config.draft_head.train)(tokens, tokens, pairs))
    is_cut = piece_tokens(workload, card) > 0
    draft, mode = config.draft_head.train, config.activation_checkpoint.mode
    done = flops + recomputed_flops(spec, tokens, pairs, mode, is_cut, draft)
    sent, sent_at_once = _sent(workload)
    microbatches = batch.gradient_accumulation_steps
    bubble = bubble_share(config.parallelism.pipeline_parallel_schedule, layout.pipeline_ranks, microbatches)
    step, hidden_from, update = None, 0.0, 0.0
    enough = 0.0
    rate = gpu.tflops.get(training.mixed_precision_param) if gpu else None
    if gpu and rate:
        computing = done / ranks / (rate * 1e12 * EFFICIENCY) / (1 - bubble)
        passes = done / flops  # of a microbatch's forward and backward, with what is computed again
        of_layer = HOST_LAYER[config.lora.base if config.lora.rank else ""][not config.compile.enable]
        layers = spec.num_hidden_layers / (3 if draft == "after" else 1) + (draft != "no")
        launching = microbatches * passes * layers / layout.pipeline_ranks * of_layer
        enough = training.local_batch_size * training.seq_len * launching / computing
        computing = max(computing, launching)
        data_parallel = reached(layout.along("data parallel"), gpu)
        with_host, update = (size / (gpu.host_gbs * 1e9 * REACHED) for size in _moved(workload))
        hiding = computing * (1 if config.memory.offload == "weights" else 1 - flops / done / 3)  # backward
        hidden_from = training.local_batch_size * training.seq_len * with_host / hiding
        if config.memory.offload == "weights":
            updated = sum(map(math.prod, _trained(workload).values())) / layout.weight_shards
            update = updated * _HOST_UPDATE[config.optimizer.is_lean]
        computing = max(computing, computing - hiding + with_host)
        once, spread = sent_at_once / data_parallel, (sent["data parallel"] - sent_at_once) / data_parallel
        waits = exposed_seconds(once, spread, computing, microbatches)
        others = sum(size / reached(layout.along(kind), gpu) for kind, size in sent.items() if kind != "data parallel")
        step = computing + waits + others + update
    memory = estimate(workload, card)
    return Plan(workload, memory, card, flops, sent, bubble, step, tokens, hidden_from, update, enough)


def _trained(workload: Workload) -> dict[str, tuple[int, ...]]:
    """Shapes of what is trained, by name."""
    config, spec = workload.config, workload.spec
    if config.lora.rank or config.draft_head.train == "after":
        return config.lora.shapes(spec) | draft_shapes(spec)
    return parameter_shapes(spec)


def _moved(workload: Workload) -> tuple[float, float]:
    """Bytes between a card and the host's memory in a step: during forward and backward, and for the update."""
    config, layout, optimizer = workload.config, workload.layout, workload.config.optimizer
    microbatches = workload.batch.gradient_accumulation_steps
    weights = sum(map(math.prod, parameter_shapes(workload.spec).values())) / layout.weight_shards / layout.matrix_parts
    master, beside = optimizer.master_bytes
    reductions = 1 if layout.zero_stage == 1 else microbatches
    if config.memory.offload == "optimizer":  # each sum but the first goes there and back
        trained = sum(map(math.prod, _trained(workload).values())) / layout.weight_shards / layout.matrix_parts
        return (2 * reductions - 1) * trained * master, trained * (master + optimizer.state_bytes + beside)
    if config.memory.offload == "weights":
        fetched = {1: 1, 2: 1, 3: 2 * microbatches}[layout.zero_stage]
        if config.lora.rank or config.draft_head.train == "after":  # frozen weights are in the dtype of the computation
            return weights * (4 if config.training.mixed_precision_param == "float32" else 2) * fetched, 0.0
        return weights * master * (fetched + reductions), 0.0
    return 0.0, 0.0


def _sent(workload: Workload) -> tuple[dict[str, float], float]:
    """Bytes that a rank sends in a step; and how many of data parallel's it sends during a single microbatch."""
    config, spec, layout, batch = workload.config, workload.spec, workload.layout, workload.batch
    training = config.training
    microbatches, c = batch.gradient_accumulation_steps, 4 if training.mixed_precision_param == "float32" else 2
    r = 2 if training.mixed_precision_reduce == "bfloat16" else 4
    is_drafting, is_alone = config.draft_head.train != "no", config.draft_head.train == "after"
    fc = is_drafting * 2 * spec.hidden_size**2 * (layout.matrix_parts - 1)  # of a draft head, whole on every rank
    own = sum(math.prod(shape) for name, shape in _trained(workload).items() if name in spec.parameters)
    sums = sum(map(math.prod, parameter_shapes(spec).values())) + fc, own + fc  # adapters are left out
    weights, trained = (x / layout.matrix_parts / layout.pipeline_ranks for x in sums)
    # A draft head reads an untied embedding once more: gathered again, or a copy at the other end of a pipeline.
    table = spec.vocab_size * spec.hidden_size / layout.matrix_parts * (is_drafting and not spec.tie_word_embeddings)
    again = table / layout.pipeline_ranks if layout.is_pipeline else table * microbatches * (layout.zero_stage == 3)
    others = (layout.weight_shards - 1) / layout.weight_shards
    gathers = {0: 0, 1: 1, 2: 1, 3: (1 if is_alone else 2) * microbatches}[layout.zero_stage]
    reductions = 1 if layout.zero_stage < 2 else microbatches
    among = layout.replicas
    gathered, reduced = others * (gathers * weights + again) * c, others * reductions * trained * r
    replicas = 2 * (among - 1) / among * trained * r / (layout.weight_shards if layout.zero_stage else 1)
    once = replicas + (gathered if layout.zero_stage < 3 else 0) + (reduced if layout.zero_stage < 2 else 0)
    hidden = batch.local_batch_size * training.seq_len // layout.context_ranks * spec.hidden_size * c
    passes = 3 if config.activation_checkpoint.mode != "none" else 2
    layers = (spec.num_hidden_layers * (1 if is_alone else passes) + passes * is_drafting) / layout.pipeline_ranks
    tensor = 4 * layers * microbatches * hidden * (layout.matrix_parts - 1) / layout.matrix_parts
    stages = layout.pipeline_ranks * SCHEDULES[config.parallelism.pipeline_parallel_schedule].stages_per_rank
    borders = (stages - 1) / layout.pipeline_ranks if layout.is_pipeline else 0.0  # for each rank
    pipeline = (1 if is_alone else 2) * borders * microbatches * hidden / layout.matrix_parts  # and their gradients
    is_copied = layout.is_pipeline and not is_alone and not config.lora.rank  # after each update
    pipeline += is_copied * table * config.optimizer.master_bytes[0] / layout.weight_shards / layout.pipeline_ranks
    by_axis = {"data parallel": gathered + reduced + replicas, "tensor parallel": tensor, "pipeline": pipeline}
    return {**by_axis, "context parallel": _exchanged(workload, c)}, once


def _exchanged(workload: Workload, compute_bytes: int) -> float:
    """Bytes that a rank sends in a step by context parallel's all-to-alls: in forward, backward and recomputation."""
    spec, layout, tokens = workload.spec, workload.layout, workload.config.training.seq_len
    if layout.context_ranks == 1:
        return 0.0
    ranks, heads_of = layout.context_ranks, layout.matrix_parts * layout.context_ranks
    each = [layer.exchanged(spec.attention, heads_of) for layer in spec.layers]
    of_token = sum(x.compute * compute_bytes + x.fp32 * 4 for x in each) / layout.matrix_parts / layout.pipeline_ranks
    rows = workload.batch.local_batch_size * workload.batch.gradient_accumulation_steps
    passes = 3 if workload.config.activation_checkpoint.mode == "full" else 2
    return passes * rows * tokens * of_token * (ranks - 1) / ranks**2


EIGHT_BITS = {"state": "8bit", "master": "bf16_sr"}


def _changes(layout: Layout, batch: Batch, rank: int) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Changes that save memory: words, and settings; first those that leave results unchanged, then by speed.

    Args:
        rank: of LoRA; 0: all weights are trained.
    """

    def rows(size: int, times: int) -> dict[str, Any]:  # the same rows per step
        forwards = batch.gradient_accumulation_steps * batch.local_batch_size // size * times
        return {"local_batch_size": size, "gradient_accumulation_steps": forwards, "target_tokens_per_step": 0}

    yield "take one row at a time", {"training": rows(1, 1)}
    yield "recompute activations", {"activation_checkpoint": {"mode": "full"}}
    shards = {"zero_stage": 3, **ALL_SHARDED}
    yield "shard weights, gradients and optimizer state over the cards (ZeRO-3)", {"parallelism": shards}
    yield "reduce gradients in bf16", {"training": {"mixed_precision_reduce": "bfloat16"}}
    yield "keep optimizer state in 8 bits", {"optimizer": {"state": "8bit"}}
    for times in [n for n in range(2, layout.dp_degree + 1) if layout.dp_degree % n == 0]:
        degree = layout.matrix_parts * times
        change = {"parallelism": {"tensor_parallel_degree": degree, **ALL_SHARDED}}
        yield f"split each matrix over {degree} cards", {**change, "training": rows(batch.local_batch_size, times)}
        degree = layout.context_ranks * times
        change = {"parallelism": {"context_parallel_degree": degree, **ALL_SHARDED}}
        words = f"share each row's tokens over {degree} cards"
        yield words, {**change, "training": rows(batch.local_batch_size, times)}
    lora = {"rank": rank or 16}
    quantised = "train adapters only, base weights in 4 bits (QLoRA)", {"lora": {**lora, "base": "nf4"}}
    if rank:
        yield quantised
    yield "keep optimizer state in 8 bits and weights in bf16, rounded at random", {"optimizer": EIGHT_BITS}
    host = {"memory": {"offload": "optimizer"}}
    yield "keep gradients and optimizer state in the host's memory", host
    words = "keep optimizer state in 8 bits and in the host's memory, weights in bf16, rounded at random"
    yield words, {"optimizer": EIGHT_BITS, **host}
    words = "keep all in the host's memory, optimizer state in 8 bits, weights in bf16, rounded at random"
    yield words, {"optimizer": EIGHT_BITS, "memory": {"offload": "weights"}}
    yield "train adapters only (LoRA)", {"lora": lora}
    yield quantised


def remedy(plan: Plan) -> str:
    """The change to propose, in words: the first after which the run fits; else the one that saves most memory."""
    config, least, best = plan.config, plan.most, "more cards, or a smaller model"
    for words, change in _changes(plan.workload.layout, plan.workload.batch, config.lora.rank):
        changed = plan.workload.changed(change)
        if changed.config == config or check(changed.config, plan.ranks, with_files=False):
            continue
        proposal = make_plan(changed, plan.card)
        if proposal.most >= least:
            continue
        settings = [(getattr(config, name), name, key, new) for name, of in change.items() for key, new in of.items()]
        keys = ", ".join(f"{name}.{key} = {new}" for old, name, key, new in settings if getattr(old, key) != new)
        least, best = proposal.most, f"{words} ({keys}): {proposal.most / GIB:.1f} GiB"
        if proposal.fits:
            return best
        best += ", still too much"
    return best


_KINDS = (  # optimizer.state, optimizer.master, memory.offload
    ("fp32", "fp32", "nothing"),
    ("8bit", "24bit", "nothing"),
    ("8bit", "bf16_sr", "nothing"),
    ("8bit", "bf16_sr", "optimizer"),
    ("8bit", "bf16_sr", "weights"),
)


def search(workload: Workload, rows: int, card: int, gpu: Gpu | None) -> Iterator[Plan]:
    """Plans of so many rows per step, in other layouts, batch sizes, with other recomputation and optimizer state."""
    ranks = workload.ranks
    degrees = [n for n in range(1, ranks + 1) if ranks % n == 0]
    sizes = [size for size in (1, 2, 4, 8, 16) if rows % size == 0]
    modes, reductions = ("none", "selective", "full"), ("float32", "bfloat16")
    kinds = _KINDS if not workload.config.lora.rank else _KINDS[:1]
    layouts = [x for x in itertools.product(degrees, repeat=3) if ranks % math.prod(x) == 0]
    for (pp, tp, cp), size, mode, kind, reduction in itertools.product(layouts, sizes, modes, kinds, reductions):
        per_forward = size * (ranks // (pp * tp * cp))
        is_reduced = ranks > pp * tp
        if cp > 1 < size:  # data parallel shares several rows without an exchange
            continue
        if rows % per_forward or (reduction == "bfloat16" and not is_reduced):
            continue
        training = {
            "local_batch_size": size, "target_tokens_per_step": 0, "gradient_accumulation_steps": rows // per_forward,
            "mixed_precision_reduce": reduction,
        }  # fmt: skip
        parallelism = {
            "pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "context_parallel_degree": cp,
            **ALL_SHARDED, "zero_stage": -1,
            "pipeline_parallel_layers_per_stage": (), "pipeline_parallel_schedule": "1F1B",
        }  # fmt: skip
        optimizer = {"state": kind[0], "master": kind[1]}
        change = {"training": training, "parallelism": parallelism, "optimizer": optimizer}
        change |= {"activation_checkpoint": {"mode": mode}, "memory": {"offload": kind[2]}}
        candidate = workload.changed(change)
        if not check(candidate.config, ranks, with_files=False):
            yield make_plan(candidate, card, gpu)
