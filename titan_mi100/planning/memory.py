"""Predicted peak memory of a step on each card: the largest of a few moments of the step. Imports no torch.

tests/test_memory.py compares the prediction with workshop/rehearsal/counter.py. Sizes are bytes of one rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_mi100.config.layout import (
    SCHEDULES,
    Batch,
    Layout,
    Stage,
    received_per_microbatch,
    split_layers,
    stages_of,
    stages_on,
)
from titan_mi100.config.settings import NF4_BLOCK, Config
from titan_mi100.planning.costs import stage_costs
from titan_mi100.shapes.base import EXPERTS, LayerShape, ModelSpec, ValuesPerToken

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, HEAD_LOSS, COMMUNICATION = "activations", "head loss", "communication"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD_LOSS, COMMUNICATION)
# Largest relative error of the plan against the counter, above and below, over the configs of tests/test_memory.py.
ABOVE, BELOW = 0.10, 0.03
# Memory that the counter does not see: the driver's context, buffers of the communication library, fragmentation.
# Assumed, not measured on any card.
_CONTEXT, _LOST = 0.75 * (1 << 30), 0.02
_SPARE = 0.05  # a card is almost full if less than this share of it would be left
HOST = "host"  # besides these categories: memory that is not on the device

_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_AT_A_TIME, _UPDATE_BYTES = 1 << 22, 40  # optim/lean.py: values, and bytes a value, on a GPU without Triton
_ON_THE_WAY = 1 << 30  # bytes of gradients that wait to be copied to the host, see parallel/offload.py
# model/loss.py: logits in one block; a GPU of n bytes may keep n / 64 logits, in 16 bits 1/32 of its memory
HEAD_BLOCK, HEAD_SHARE = 1 << 25, 64


@dataclass(frozen=True)
class Memory:
    """The peak of a rank.

    Attributes:
        moment: when it is reached, for messages.
        categories: bytes, by the names in CATEGORIES.
        host: bytes of the host's memory that the rank's process takes besides.
    """

    moment: str
    categories: dict[str, float]
    host: float = 0.0

    @property
    def peak(self) -> float:
        return sum(self.categories.values())


def estimate(config: Config, ranks: int, device_memory: int, spec: ModelSpec | None = None) -> list[Memory]:
    """The peak of each pipeline rank. Without a pipeline one entry: all ranks are alike.

    Args:
        device_memory: bytes of a card; 0: a CPU.
        spec: the model's shape; None: the config's.
    """
    spec = spec or config.spec()
    return _peaks(config, spec, ranks, device_memory, layers_per_stage(config, spec, ranks, 1.0, device_memory))


def _peaks(config: Config, spec: ModelSpec, ranks: int, device_memory: int, counts: Sequence[int]) -> list[Memory]:
    """As estimate. Args: counts: layers of each stage."""
    layout, batch, peaks = config.layout(ranks), config.batch(ranks), []
    cuts = stages_of(counts)
    for rank, numbers in enumerate(_on_ranks(config, layout.pp, len(cuts))):
        one = _RankMemory(config, spec, layout, batch, device_memory, rank, [cuts[index] for index in numbers])
        moments = (Memory(*moment, one.on_host()) for moment in one.moments())
        peaks.append(max(moments, key=lambda memory: memory.peak))
    return peaks


def with_overhead(peak: float) -> float:
    """Bytes that a card needs for a counted peak: with the memory that the counter does not see."""
    return peak * (1 + _LOST) + _CONTEXT


def _on_ranks(config: Config, pp: int, stages: int) -> list[list[int]]:
    """The numbers of each pipeline rank's stages."""
    is_v_shaped = SCHEDULES[config.parallelism.pipeline_parallel_schedule].v_shaped
    return [stages_on(rank, pp, stages, is_v_shaped) for rank in range(pp)]


def layers_per_stage(
    config: Config, spec: ModelSpec, ranks: int, supervised_share: float, card: int = 0
) -> Sequence[int]:
    """Layers of each pipeline stage: as configured, or balanced by the estimated cost of a microbatch per stage. Where
    that would almost fill a card, the peak of the fullest card is lowered instead.

    Args:
        ranks: of the run. A schedule with several stages per rank has more stages than the pipeline has ranks.
        supervised_share: supervised tokens per token of a row; the head runs on these only.
        card: bytes of a card's memory; 0: the cost alone counts.
    """
    parallelism, training, recompute = config.parallelism, config.training, config.activation_checkpoint.mode != "none"
    pp = config.layout(ranks).pp
    if pp == 1:
        return [spec.num_hidden_layers]
    if parallelism.pipeline_parallel_layers_per_stage:
        return parallelism.pipeline_parallel_layers_per_stage
    rows, is_frozen = training.local_batch_size, config.lora.rank > 0
    costs = stage_costs(spec, rows, training.seq_len, supervised_share, recompute, is_frozen)
    counts = split_layers(*costs, pp * SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank)
    return _by_bytes(config, spec, ranks, card, counts) if card else counts


def _by_bytes(config: Config, spec: ModelSpec, ranks: int, card: int, counts: list[int]) -> list[int]:
    """Move layers from the fullest card to the emptiest, until the fullest has room or nothing helps any more."""

    def peaks(counts: list[int]) -> list[float]:
        return [memory.peak for memory in _peaks(config, spec, ranks, card, counts)]

    now, stages = peaks(counts), _on_ranks(config, config.layout(ranks).pp, len(counts))
    while with_overhead(max(now) * (1 + BELOW)) > card * (1 - _SPARE):
        full, empty = stages[now.index(max(now))], stages[now.index(min(now))]
        moves = [(source, target) for source in full for target in empty if counts[source] > 1]
        moved = [[n - (i == source) + (i == target) for i, n in enumerate(counts)] for source, target in moves]
        best = min(moved, key=lambda other: max(peaks(other)), default=counts)
        after = peaks(best)
        if max(after) >= max(now):
            break
        counts, now = best, after
    return counts


class _RankMemory:
    """What one rank holds, and when."""

    def __init__(
        self, config: Config, spec: ModelSpec, layout: Layout, batch: Batch, device_memory: int, rank: int,
        stages: list[Stage],
    ) -> None:  # fmt: skip
        self.config, self.spec, self.layout, self.batch = config, spec, layout, batch
        self.stages, self.rank, self.device_memory = stages, rank, device_memory
        training = config.training
        self.tokens = training.local_batch_size * training.seq_len
        self.compute = _BYTES[training.mixed_precision_param]
        self.first, self.last = any(s.first for s in stages), any(s.last for s in stages)
        self.mode, numbers = config.activation_checkpoint.mode, {n for stage in stages for n in stage.layers}
        self.layers = [spec.layers[number] for number in sorted(numbers)]
        self.tied, self.lora = spec.tie_word_embeddings, config.lora.rank
        self.offload, self.inputs_on_host = config.memory.offload, config.memory.offload_activations
        self.is_fsdp = layout.zero_stage > 0 and (layout.dp_degree > 1 or self.offload == "weights")
        self.shard = layout.dp_shard if self.is_fsdp else 1
        self.weights = sum(layer.size for layer in self.layers) / layout.tp
        small = (p.size for layer in self.layers for p in layer.parameters.values() if p.role == "router")
        self.routers = 0.0 if training.train_router else sum(small) / layout.tp  # not trained
        self.block = max((layer.size for layer in self.layers), default=0) / layout.tp
        self.vocabulary = spec.vocab_size * spec.hidden_size / layout.tp
        self.ends = self.first + self.last - (self.tied and self.first and self.last and len(stages) == 1)
        # bytes in the dtype in which they are gathered and multiplied
        self.is_nf4 = config.lora.base == "nf4"
        self.bytes_each = 0.5 + self.compute / NF4_BLOCK if self.is_nf4 else self.compute
        self.block_bytes = self.block * self.bytes_each
        self.end_bytes = self.vocabulary * self.compute
        adapters = config.lora.shapes(spec) if self.lora else {}
        adapter_sizes = [math.prod(shape) for name, shape in adapters.items() if int(name.split(".")[2]) in numbers]
        self.adapters = sum(adapter_sizes) / layout.tp
        largest = [layer.largest / layout.tp for layer in self.layers] + [self.vocabulary] * (self.ends > 0)
        self.largest = max(adapter_sizes if self.lora else largest, default=0)  # values of the largest trained matrix
        master, self.beside = config.optimizer.master_bytes
        self.master = max(master, self.compute) if self.compute > 4 else master
        # bytes of a gradient value where it is reduced
        self.reduce = max(_BYTES[training.mixed_precision_reduce], 8 if self.compute == 8 else 2)

    def moments(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The moments of the last microbatch and of the update at which the peak can be, with their categories."""
        trained, weights, state = self._held()
        sums = self._gradient_sums(trained)
        is_all_here = self.offload == "nothing"
        # ZeRO-1 keeps gradients until the last microbatch; so does FSDP2 with replicas, after its reduction.
        stay_so_long = is_all_here or (self.is_fsdp and (self.layout.zero_stage == 1 or self.layout.dp_replicate > 1))
        held = {
            PARAMETERS: weights if self.offload != "weights" else 0.0, OPTIMIZER: state if is_all_here else 0.0,
            COMMUNICATION: self._received(), HEAD_LOSS: 0.0, GRADIENTS: 0.0, ACTIVATIONS: 0.0,
        }  # fmt: skip
        several = self.batch.gradient_accumulation_steps > 1
        before = sums if several and stay_so_long else 0.0
        # bytes of each weight's copy in the dtype of the computation, if FSDP2 does not gather them
        is_cast = not self.is_fsdp and not self.lora and self.master != self.compute
        copies = self.compute if is_cast else 0.0
        is_kept = self.mode == "none"
        some = self.layers[-2 if self.inputs_on_host else 0 :]
        by_layer = [self._bytes(layer.kept[self.mode]) + self._for_lora(layer, "none") for layer in some]
        kept = sum(by_layer) * self._in_flight() + self._rotary()
        kept += self.weights * copies if is_kept else 0.0

        def at(**more: float) -> dict[str, float]:
            names = {name.replace(" ", "_"): name for name in CATEGORIES}
            return {**held, **{names[key]: held[names[key]] + value for key, value in more.items()}}

        if len(self.layers) > 2 and self.layout.zero_stage == 3:  # one block computes, two are on their way
            gathered = self._gathered(3 * self.block_bytes)
            yield "forward of a block", at(gradients=before, activations=kept, communication=gathered)
        # the gradient of a vocabulary matrix, before its reduction
        end = 0.0 if self.lora else self.vocabulary * (self.compute if self.is_fsdp else self.master)
        if self.last:
            final = 24 * self.spec.hidden_size * self.tokens / self.layout.tp
            loss = {"gradients": before, "activations": kept + final}
            gathered = self._gathered(self.end_bytes + self.block_bytes, 0.0 if self.tied else self.end_bytes)
            yield "forward of the head", at(**loss, head_loss=self._head(), communication=gathered)
            gathered = self._gathered(self.end_bytes + self.block_bytes)
            yield "backward of the head", at(**loss, head_loss=self._head() + end, communication=gathered)
            if self.is_fsdp and not self.tied and self.layout.zero_stage > 1:
                yield "reduction of the head's gradient", at(
                    gradients=before + end, activations=kept,
                    communication=self._reduced(self.vocabulary) + self._gathered(self.block_bytes),
                )  # fmt: skip
            if self.layout.tp > 1 and not self.is_fsdp:  # autograd adds DTensors out of place
                yield "sum of the head's gradient", at(gradients=before + 3 * end, activations=kept)
        # the head's gradient waits for the embedding's: one weight
        waiting = end if self.tied and self.first and self.last else 0.0
        if self.first and end and not stay_so_long:  # the embedding's gradient is not there yet
            sums = self._gradient_sums(trained - self.vocabulary)
        if self.layers:
            inside = max(map(self._inside, self.layers)) + (0.0 if is_kept else self.block * copies)
            one = 0.0 if self.lora else self.block * self.compute
            gathered = self._gathered(2 * self.block_bytes, self.end_bytes if self.tied else 0.0)
            gathered += self._reduced(self.block)
            of_head = self._gradient_sums(self.vocabulary) if self.last and not self.tied and not self.lora else 0.0
            first = max(before, of_head) + waiting + one
            last = at(gradients=first, activations=kept + inside, communication=gathered)
            yield "backward of the last block", last
            # From here on as many gradients wait as may, while each block frees what it has kept; else the last moment.
            behind = int(sums / self._gradient_sums(self.block)) if self.offload == "optimizer" else len(by_layer)
            for name, left in (("a block in the middle", max(1, len(by_layer) - behind)), ("the first block", 1)):
                yield f"backward of {name}", at(
                    gradients=sums + waiting + one, activations=kept - sum(by_layer[left:]) + inside,
                    communication=gathered,
                )  # fmt: skip
        if self.first and end:
            several_ends = 3 if waiting else 1  # head's, embedding's and their sum
            yield "backward of the embedding", at(
                gradients=sums + several_ends * end, activations=self._rotary(),
                communication=self._gathered(self.end_bytes if self.tied else 0.0),
            )  # fmt: skip
            if self.is_fsdp:
                one = 0.0 if several else self._gradient_sums(self.vocabulary)
                reduced = self._reduced(self.vocabulary)
                more = at(gradients=sums - one + end, activations=self._rotary(), communication=reduced)
                yield "reduction of the embedding's gradient", more
        has_buffers = self.offload == "optimizer" or (self.config.optimizer.is_lean and is_all_here)
        buffers = min(_AT_A_TIME, self.largest / self.shard) * _UPDATE_BYTES if has_buffers else 0.0
        yield "update", at(gradients=sums if is_all_here else 0.0, optimizer=buffers)

    def _held(self) -> tuple[float, float, float]:
        """Trained elements; bytes of this rank's weights and of its optimizer state."""
        trained = self.adapters if self.lora else self.weights - self.routers + self.ends * self.vocabulary
        frozen = max(4, self.compute) * self.routers
        if self.lora:
            frozen = self.weights * self.bytes_each + self.ends * self.end_bytes
        state = trained * (self.config.optimizer.state_bytes + self.beside)
        return trained, (trained * self.master + frozen) / self.shard, state / self.shard

    def on_host(self) -> float:
        """Bytes that are in the host's memory instead of the device's."""
        trained, weights, state = self._held()
        each = (self._pinned(self._bytes(layer.kept[self.mode])) for layer in self.layers)
        total = sum(each) * self._in_flight() if self.inputs_on_host else 0.0
        if self.offload == "optimizer":
            total += trained * self.master / self.shard + state
        if self.offload == "weights":
            is_added = self.batch.gradient_accumulation_steps > 1 and self.layout.zero_stage > 1 and not self.lora
            coming = max(self.block, self.ends and self.vocabulary) * self.master / self.shard
            rounded = self._weights_pinned() / weights if self.device_memory else 1.0
            total += rounded * (weights + (trained * self.master / self.shard) + (coming if is_added else 0.0)) + state
        return total

    def _pinned(self, size: float) -> float:
        """Bytes of pinned host memory for a tensor: torch rounds up to a power of two."""
        return 2.0 ** math.ceil(math.log2(size)) if self.device_memory and size else size

    def _weights_pinned(self) -> float:
        """Pinned bytes of all weights: each matrix is rounded up separately."""
        bytes_each = (self.compute if self.lora else self.master) / self.shard / self.layout.tp
        matrices = (parameter.size for parameter in self.spec.parameters.values() if parameter.role != "norm")
        return sum(self._pinned(size * bytes_each) for size in matrices)

    def _gradient_sums(self, trained: float) -> float:
        """Bytes of gradients that are accumulated over microbatches, or wait to be copied to the host."""
        if self.is_fsdp and self.layout.zero_stage == 1 and self.batch.gradient_accumulation_steps > 1:
            return trained * max(self.reduce, self.compute)
        twice = self.layout.zero_stage == 0 and self.batch.gradient_accumulation_steps > 1
        limit = {"nothing": math.inf, "optimizer": _ON_THE_WAY, "weights": 0.0}[self.offload]
        limit = math.inf if self.is_fsdp and self.layout.dp_replicate > 1 else limit
        return min(limit, trained * self.master / self.shard * (2 if twice else 1))

    def _in_flight(self) -> int:
        """Microbatches whose activations wait for their backward."""
        pp, microbatches = self.layout.pp, self.batch.gradient_accumulation_steps
        if pp == 1:
            return 1
        schedule = SCHEDULES[self.config.parallelism.pipeline_parallel_schedule]
        if schedule.forwards_first:
            return microbatches
        if schedule.stages_per_rank > 1:
            return min(microbatches, pp + 1)
        return min(microbatches, pp - self.rank)

    def _bytes(self, values: ValuesPerToken) -> float:
        """Bytes on this rank of values per token."""
        return self.tokens * (values.compute * self.compute + values.fp32 * 4) / self.layout.tp

    def _for_lora(self, layer: LayerShape, mode: str) -> float:
        """Bytes that a mode holds more with LoRA: what dropout leaves, and its mask; less for the norms' weights."""
        if not self.lora or self.mode != mode:
            return 0.0
        targets = self.config.lora.target_modules if self.config.lora.dropout else ()
        dropped = 0.0  # where outputs are split, each rank has all inputs
        for name, p in layer.parameters.items():
            if p.experts and EXPERTS in targets:
                inputs = p.shape[0] / p.experts if p.is_transposed else p.shape[1] / self.layout.tp
                dropped += 1.5 * layer.slots * inputs  # half: the gradient of one, which waits for its mask
            elif name.split(".")[-2] in targets and not p.experts:
                dropped += p.shape[1] / (self.layout.tp if p.split.dim == 1 else 1)
        return self.tokens * dropped * (self.compute + 1) - self._bytes(layer.for_norms)

    def _inside(self, layer: LayerShape) -> float:
        """Bytes that a layer's backward needs besides what was kept."""
        total = self._bytes(layer.inside[self.mode]) + self._for_lora(layer, "full")
        # one dequantised matrix, and the indices of its lookup
        return total + (layer.largest / self.layout.tp * (self.compute + 2) if self.is_nf4 else 0.0)

    def _rotary(self) -> float:
        return self._bytes(self.spec.per_forward) * self.layout.tp  # each rank has all of it

    def _received(self) -> float:
        """Bytes of receive buffers: torch's pipeline keeps hidden states and gradients of each microbatch."""
        one = self.tokens * self.compute * self.spec.hidden_size / self.layout.tp
        return self.batch.gradient_accumulation_steps * received_per_microbatch(self.stages) * one

    def _head(self) -> float:
        """Buffers of the head's loss, see model/loss.py."""
        c, logits = self.compute, self.tokens * self.spec.vocab_size // self.layout.tp
        block = min(max(1024 * self.tokens, HEAD_BLOCK if self.device_memory else 1 << 20), logits)
        wide, kept = max(4, c), self.device_memory // HEAD_SHARE
        schedule = SCHEDULES[self.config.parallelism.pipeline_parallel_schedule]
        keeps_all = schedule.forwards_first and self.layout.pp > 1
        waiting = self.batch.gradient_accumulation_steps if keeps_all else 1
        rows = self.tokens * self.spec.hidden_size * (2 * c + 4)
        if logits <= kept // waiting:
            return rows + waiting * (logits * c + block * wide)
        return rows + block * (c + (wide if c < 4 else 0))

    def _gathered(self, by_group: float, more: float = 0.0) -> float:
        """Bytes of the weights that FSDP2 has gathered.

        Args:
            by_group: if each group is freed after use (ZeRO-3); more: still in the buffer of the last all-gather.
        """
        if not self.is_fsdp:
            return 0.0
        if self.layout.zero_stage < 3:
            return self.weights * self.bytes_each + self.ends * self.end_bytes
        return by_group + more

    def _reduced(self, elements: float) -> float:
        """Bytes of FSDP2's buffers: it copies a group's gradients into one, reduces into a second, casts the second."""
        if not self.is_fsdp or self.lora or self.layout.pp > 1:
            return 0.0
        other = self.master if self.master != self.reduce else 0
        return elements * (self.reduce + (self.reduce + other) / self.shard)
