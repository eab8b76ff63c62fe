"""Integer arithmetic of a layout: degrees of parallelism, the pipeline's stages, and the batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from titan_mi100.config.problem import ConfigError, Problem
from titan_mi100.shapes.base import AttentionShape


class Axis(NamedTuple):
    """An axis of the mesh of ranks."""

    key: str  # its degree in [parallelism]
    traffic: str  # what its ranks send to each other is counted as
    reads_rows: bool = False  # its ranks read different rows


# From the outermost to the innermost: ranks that communicate most are next to each other. Tensor parallel sends most; a
# pipeline sends least, so neighbouring stages may be on different nodes.
AXES = {
    "pp": Axis("pipeline_parallel_degree", "pipeline"),
    "dp_replicate": Axis("data_parallel_replicate_degree", "data parallel", reads_rows=True),
    "dp_shard": Axis("data_parallel_shard_degree", "data parallel", reads_rows=True),
    "cp": Axis("context_parallel_degree", "context parallel"),
    "tp": Axis("tensor_parallel_degree", "tensor parallel"),
}
ALL_SHARDED = {AXES["dp_shard"].key: -1, AXES["dp_replicate"].key: 1}  # no replicas
PIPELINE = "pp"  # the outermost axis
DATA_PARALLEL = [name for name, axis in AXES.items() if axis.reads_rows]
CONTEXT_PARALLEL = "cp"  # in the mesh a part of the axis before it: its ranks share weights as dp_shard's do
_DEGREES = (*(f"parallelism.{axis.key}" for axis in AXES.values()), "parallelism.zero_stage")
IGNORE = -100  # label of a token that is not learned, as in PyTorch and Hugging Face


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule of torch.distributed.pipelining, by its name there."""

    stages_per_rank: int = 1  # the least number; `looped` schedules allow more
    looped: bool = False
    forwards_first: bool = False  # all forwards run before the first backward, so all microbatches are kept


SCHEDULES = {
    "1F1B": Schedule(),
    "GPipe": Schedule(forwards_first=True),
    "Interleaved1F1B": Schedule(2, looped=True),
}


@dataclass(frozen=True)
class Layout:
    """The degrees of the mesh axes; their product is the world size."""

    dp_shard: int = 1
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 3
    cp: int = 1

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows."""
        return self.degree("data parallel")

    # What others ask of a layout, by meaning: an axis that is added changes these, not those who ask.

    @property
    def weight_shards(self) -> int:
        """Ranks over which FSDP2 shards each weight."""
        return self.dp_shard * self.cp

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients of a weight are summed."""
        return self.dp_degree * self.cp

    @property
    def replicas(self) -> int:
        """Copies of each shard, whose gradients are summed."""
        return self.dp_replicate

    @property
    def matrix_parts(self) -> int:
        """Parts of a matrix, one of which a rank multiplies with."""
        return self.tp

    @property
    def row_parts(self) -> int:
        """Parts of a row's hidden states, one of which a rank keeps."""
        return self.tp * self.cp

    @property
    def context_ranks(self) -> int:
        """Ranks among which the tokens of a row are divided, in attention its heads."""
        return self.cp

    @property
    def pipeline_ranks(self) -> int:
        """Ranks among which the layers are divided; also the fewest microbatches with which every schedule runs."""
        return self.pp

    @property
    def is_pipeline(self) -> bool:
        return self.pp > 1

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage, which are neighbours: the pipeline is the outermost axis."""
        return math.prod(self.shape()) // self.pp

    @property
    def inside_a_node(self) -> int:
        """Ranks whose traffic needs the links of a node."""
        return self.tp

    def along(self, traffic: str) -> range:
        """The ranks that send each other this traffic, of the group with rank 0."""
        degrees = dict(zip((axis.traffic for axis in AXES.values()), accumulate(self.shape(), mul), strict=True))
        inside = math.prod(self.shape()) // degrees[traffic]  # ranks of the axes within it
        return range(0, inside * self.degree(traffic), inside)

    def degree(self, traffic: str) -> int:
        """How many ranks send each other this traffic."""
        return math.prod(getattr(self, name) for name, axis in AXES.items() if axis.traffic == traffic)

    def local(self, attention: AttentionShape) -> AttentionShape:
        """The heads that each rank has."""
        kv_heads = max(1, attention.kv_heads // self.tp // self.cp)  # fewer than the ranks: each rank has a copy of one
        return attention._replace(heads=attention.heads // self.tp // self.cp, kv_heads=kv_heads)

    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of AXES."""
        return tuple(getattr(self, name) for name in AXES)

    def mesh(self) -> dict[str, int]:
        """The axes of the mesh and their sizes: context-parallel ranks are neighbours on the axis dp_shard."""
        sizes = dict(zip(AXES, self.shape(), strict=True))
        sizes["dp_shard"] *= sizes.pop(CONTEXT_PARALLEL)
        return sizes

    def twin(self, rank: int) -> int:
        """The rank in the first replica that holds the same shard; the rank itself if it is in the first replica."""
        replica = self.dp_shard * self.cp * self.tp  # ranks of a replica in one pipeline stage
        return rank - rank // replica % self.dp_replicate * replica

    def describe(self) -> str:
        """In words, for the log."""
        parts = []
        if self.pp > 1:
            parts.append(f"pipeline of {self.pp}")
        if self.zero_stage == 0:
            parts.append(f"DDP over {self.dp_replicate}")
        elif self.dp_replicate > 1 and self.weight_shards == 1:
            parts.append(f"{self.dp_replicate} replicas")
        elif self.dp_replicate > 1:
            parts.append(
                f"HSDP, {self.dp_replicate} replicas of FSDP2 over {self.weight_shards} (ZeRO-{self.zero_stage})"
            )
        elif self.weight_shards > 1 or (self.pp == 1 and self.tp == 1):
            parts.append(f"FSDP2 over {self.weight_shards} (ZeRO-{self.zero_stage})")
        if self.cp > 1:
            parts[-1] += f", {self.cp} of them context parallel"
        if self.tp > 1:
            parts.append(f"tensor parallel over {self.tp}")
        return " x ".join(parts)


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step: local_batch_size rows per forward and data-parallel rank."""

    local_batch_size: int
    gradient_accumulation_steps: int
    dp_degree: int

    @property
    def global_batch_size(self) -> int:
        return self.local_batch_size * self.gradient_accumulation_steps * self.dp_degree


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage. The first stage also has the embedding, the last the final norm and head."""

    layers: range
    first: bool = True
    last: bool = True


def resolve_layout(
    world_size: int,
    dp_shard: int = -1,
    dp_replicate: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero_stage: int = -1,
    cp: int = 1,
) -> Layout:
    """The layout of `world_size` processes; dp_shard = -1: all processes that the other degrees leave.

    Args:
        zero_stage: -1 means 3; under a pipeline 1; and 0 (DDP) where there are replicas of one process each.

    Raises:
        ConfigError: the product of the degrees is not the world size.
    """
    if dp_shard == 0:
        raise _refused("data_parallel_shard_degree", "= 0 must be -1 (all processes) or at least 1")
    if zero_stage == 0:
        dp_shard, dp_replicate = _replicas_only(world_size, dp_shard, dp_replicate, {"tp": tp, "pp": pp, "cp": cp})
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "cp": cp, "tp": tp}
    used_degrees = [(AXES[name].key, degree) for name, degree in degrees.items() if degree > 1]
    others = "".join(f" x {name} = {degree}" for name, degree in used_degrees)
    product = math.prod(degrees.values())
    processes = f"{world_size} started process{'es' if world_size > 1 else ''}"
    if dp_shard == -1:
        if world_size % product:
            text = f"{others.removeprefix(f' x {used_degrees[0][0]} ')} does not divide the {processes}; start with "
            text += f"./run_train.sh --nproc_per_node {product} or a multiple of it, or lower a degree"
            raise _refused(used_degrees[0][0], text)
        dp_shard = world_size // product
    if product * dp_shard != world_size:
        text = f"= {dp_shard}{others} does not fill the {processes}; use -1 (all that the others leave) or start with "
        raise _refused("data_parallel_shard_degree", f"{text}./run_train.sh --nproc_per_node {product * dp_shard}")
    if zero_stage == -1:
        only_replicas = dp_shard == 1 and dp_replicate > 1 and tp * cp == 1
        zero_stage = 1 if pp > 1 else 0 if only_replicas else 3
    elif pp > 1 and zero_stage != 1:
        text = f"= {zero_stage} does not go with a pipeline, which keeps weights and gradients whole "
        raise _refused("zero_stage", f"{text}until the end of the step; use 1, or leave it out")
    return Layout(dp_shard, dp_replicate, tp, pp, zero_stage, cp)


def _refused(key: str, text: str) -> ConfigError:
    return ConfigError([Problem(f"parallelism.{key}", text, _DEGREES)])


def _replicas_only(world_size: int, dp_shard: int, dp_replicate: int, others: dict[str, int]) -> tuple[int, int]:
    if wrong := [f"{AXES[name].key} = {degree}" for name, degree in others.items() if degree > 1]:
        raise _refused("zero_stage", f"= 0 (DDP) does not go with {' and '.join(wrong)}; leave it out")
    if dp_shard > 1:
        text = f"(DDP) shards nothing, but data_parallel_shard_degree = {dp_shard}; leave one of them out"
        raise _refused("zero_stage", f"= 0 {text}")
    if dp_replicate not in (1, world_size):
        text = f"= 0 (DDP) with data_parallel_replicate_degree = {dp_replicate} does not fill the {world_size} "
        text += f"started processes; leave it out, or start with ./run_train.sh --nproc_per_node {dp_replicate}"
        raise _refused("zero_stage", text)
    return 1, world_size


def resolve_batch(
    local_batch_size: int, gradient_accumulation_steps: int, target_tokens_per_step: int, seq_len: int, dp_degree: int
) -> Batch:
    """Rows per step. The accumulation is given (0: one forward), or comes nearest to the target of tokens."""
    accumulation = gradient_accumulation_steps or 1
    if target_tokens_per_step:
        accumulation = max(1, round(target_tokens_per_step / (seq_len * local_batch_size * dp_degree)))
    return Batch(local_batch_size, accumulation, dp_degree)


def accumulation_for(global_batch_size: int, batch: Batch, saved: Batch) -> int:
    """The accumulation steps that keep a resumed run's global batch size when ranks or rows per forward change.

    Args:
        global_batch_size: that of the run so far.
        batch: from the config now.
        saved: from the checkpoint.

    Raises:
        ConfigError: no number of steps does, or the config asks for another global batch.
    """
    rows = batch.local_batch_size * batch.dp_degree
    if rows == saved.local_batch_size * saved.dp_degree and batch.global_batch_size != global_batch_size:
        text = f"= {batch.gradient_accumulation_steps} makes steps of "
        text += f"{batch.global_batch_size} rows, but this run's have {global_batch_size}; use "
        text += f"{saved.gradient_accumulation_steps}, or let it change with "
        text += 'checkpoint.allow_changed = ["global_batch_size"]'
        raise ConfigError([Problem("training.gradient_accumulation_steps", text)])
    if global_batch_size % rows:
        few = range(1, min(global_batch_size, 8192) + 1)  # a manifest can hold any number
        ranks = [n for n in few if not global_batch_size % (n * batch.local_batch_size)]
        sizes = [n for n in few if not global_batch_size % (n * batch.dp_degree)]
        fit = [f"{', '.join(map(str, ranks))} data-parallel ranks with this local_batch_size"] if ranks else []
        fit += [f"local_batch_size {', '.join(map(str, sizes))} on these ranks"] if sizes else []
        text = f"= {batch.local_batch_size} on {batch.dp_degree} data-parallel ranks does not divide this run's steps "
        text += f"of {global_batch_size} rows; what does: {'; or '.join(fit) or 'nothing near'}. Or let them change "
        text += 'with checkpoint.allow_changed = ["global_batch_size"]'
        raise ConfigError([Problem("training.local_batch_size", text)])
    return global_batch_size // rows


def check_schedule(name: str, ranks: int, microbatches: int) -> Problem | None:
    """Why a pipeline of so many ranks cannot run that many microbatches per step under the schedule; None: it can."""
    wrong, how = "", "the forwards of a step, gradient_accumulation_steps, are its microbatches"
    # with fewer, torch 2.8 computes wrong gradients or hangs under an interleaved schedule
    if (name == "1F1B" or SCHEDULES[name].looped) and microbatches < ranks:
        wrong = f"over {ranks} ranks needs at least {ranks} microbatches, but gets {microbatches}: {how}; "
        wrong += 'raise it, or use "GPipe"'
    elif SCHEDULES[name].looped and microbatches % max(1, microbatches // ranks):
        wrong = f"over {ranks} ranks needs microbatches in rounds of {ranks} or more, but gets {microbatches}: {how}; "
        wrong += f"use {ranks} x n"
    read = (*_DEGREES, "training.gradient_accumulation_steps", "training.target_tokens_per_step")
    return Problem("parallelism.pipeline_parallel_schedule", f'= "{name}" {wrong}', read) if wrong else None


def received_per_microbatch(stages: Sequence[Stage]) -> int:
    """Number of hidden-state tensors that torch's pipeline keeps on a rank for each microbatch of a step.

    A rank keeps what it receives from the previous stage (up to torch 2.8 also its gradient) and from the next stage.
    """
    from_before = 2 if _torch_version() < (2, 13) else 1  # versions between 2.8 and 2.13 were not tried
    return sum(from_before * (not stage.first) + (not stage.last) for stage in stages)


@cache  # a search of plans asks thousands of times
def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, version("torch").split(".")[:2]))


def split_layers(layer_costs: Sequence[float], first_cost: float, last_cost: float, stages: int) -> list[int]:
    """Layers per stage that make the most expensive stage as cheap as possible; see costs.stage_costs.

    Args:
        layer_costs: cost of each layer, 1 for the dearest.
        first_cost, last_cost: cost of the embedding in the first stage and of the head in the last.
    """
    layers = len(layer_costs)
    assert layers >= stages
    if min(layer_costs) < 1:  # the smallest limit on a stage's cost with which all layers find a place
        low, high = 0.0, sum(layer_costs, first_cost + last_cost)
        for _ in range(60):
            middle = (low + high) / 2
            fits = _layers_within(middle, layer_costs, first_cost, last_cost, stages)
            low, high = (low, middle) if fits else (middle, high)
        return _layers_within(high, layer_costs, first_cost, last_cost, stages)
    counts, cost = [1] * stages, [1.0] * stages
    cost[0] += first_cost
    cost[-1] += last_cost
    for _ in range(layers - stages):
        # if stages are equal, the last one is taken: an earlier stage holds the activations of more microbatches
        cheapest = min(range(stages), key=lambda stage: (cost[stage], -stage))
        counts[cheapest] += 1
        cost[cheapest] += 1
    return counts


def _layers_within(limit: float, costs: Sequence[float], first: float, last: float, stages: int) -> list[int]:
    """Layers per stage so that none costs more than the limit, the last stages full; empty: there are none."""
    counts, left = list[int](), len(costs)
    for stage in range(stages - 1, -1, -1):
        cost, count = (last if stage == stages - 1 else 0.0) + (first if stage == 0 else 0.0), 0
        while left > stage and (count == 0 or stage == 0 or cost + costs[left - 1] <= limit):
            cost, count, left = cost + costs[left - 1], count + 1, left - 1
        if cost > limit:
            return []
        counts.insert(0, count)
    return counts


def stages_of(layers_per_stage: Sequence[int]) -> list[Stage]:
    """Consecutive stages with these numbers of layers."""
    edges = list(accumulate(layers_per_stage, initial=0))
    return [Stage(range(start, stop), start == 0, stop == edges[-1]) for start, stop in pairwise(edges)]


def stages_on(rank: int, ranks: int, stages: int) -> list[int]:
    """The stages of a pipeline rank, placed as torch's schedules expect: round-robin."""
    return list(range(rank, stages, ranks))
