"""Predicted peak memory of a step on each card: the largest of a few moments of the step. Imports no torch.

tests/test_memory.py compares the prediction with workshop/rehearsal/counter.py. What a layer saves for
backward is in shapes/ (`LayerShape.saved`). Sizes are bytes of one rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_mi100.config.check_layout import uncuttable
from titan_mi100.config.layout import (
    SCHEDULES,
    Stage,
    received_per_microbatch,
    split_layers,
    stages_of,
    stages_on,
)
from titan_mi100.config.settings import NF4_BLOCK
from titan_mi100.planning.costs import stage_costs
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import EXPERTS, ROWS, LayerShape
from titan_mi100.shapes.saved import ValuesPerToken

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, HEAD_LOSS, COMMUNICATION = "activations", "head loss", "communication"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD_LOSS, COMMUNICATION)
# Largest relative error of the plan against the counter, above and below, over the configs of tests/test_memory.py.
ABOVE, BELOW = 0.10, 0.03
# Memory that the counter does not see: the driver's context, buffers of the communication library, fragmentation.
# Assumed, not measured on any card.
_CONTEXT, _LOST = 0.75 * (1 << 30), 0.02
_FROM_PIECE = 0.02  # share of the peak by which the chosen piece may raise it
_SPARE = 0.05  # a card is almost full if less than this share of it would be left
Moments = Iterator[tuple[str, dict[str, float]]]  # names, and bytes by category
HOST = "host"  # besides these categories: memory that is not on the device

_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_ON_THE_WAY = 1 << 30  # bytes of gradients that wait to be copied to the host; the same in parallel/offload.py
# Values that a GPU updates at a time (optim/lean.py reads it), and bytes of each in buffers, without Triton
UPDATED_AT_ONCE, _UPDATE_BYTES = 1 << 22, 40
# Read by model/loss.py: logits of a block on a GPU, and on a CPU, into whose caches 4 MiB in fp32 fit; columns that a
# block has at least, as narrower products are slow; bytes of a GPU's memory for each logit that it may keep, so that
# logits of 16 bits take at most 1/32 of the memory.
HEAD_BLOCK, HEAD_BLOCK_CPU, HEAD_COLUMNS, HEAD_BYTES_PER_LOGIT = 1 << 25, 1 << 20, 1024, 64


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


def estimate(workload: Workload, device_memory: int) -> list[Memory]:
    """The peak of each pipeline rank. Without a pipeline one entry: all ranks are alike.

    Args:
        device_memory: bytes of a card; 0: a CPU.
    """
    workload = _with_pieces(workload, piece_tokens(workload, device_memory))
    counts = layers_per_stage(workload, 1.0, device_memory)
    return _peaks(workload, device_memory, counts, shares_copies(workload, device_memory))


def piece_tokens(workload: Workload, device_memory: int) -> int:
    """Tokens of a piece that MLPs and norms compute at a time; 0: all of a forward. If the config leaves it open, all
    where a step then fits; else the largest piece that the peak hardly depends on.

    Args: device_memory: see estimate.
    """
    training, asked = workload.config.training, workload.config.memory.piece_tokens
    tokens = training.local_batch_size * training.seq_len // workload.layout.context_ranks
    if asked >= 0:
        return asked if asked < tokens else 0
    sizes = [1 << n for n in range(10, 17) if 1 << n < tokens]
    if not device_memory or not sizes or any(uncuttable(workload.config.compile, workload.config.lora)):
        return 0

    def peak(size: int) -> float:
        return max(memory.peak for memory in estimate(_with_pieces(workload, size), device_memory))

    if with_overhead(peak(0) * (1 + BELOW)) <= device_memory:
        return 0
    least = peak(sizes[0])
    return max(size for size in sizes if peak(size) <= least * (1 + _FROM_PIECE))


def _with_pieces(workload: Workload, tokens: int) -> Workload:
    return workload.changed({"memory": {"piece_tokens": tokens}})


def shares_copies(workload: Workload, device_memory: int) -> bool:
    """Whether the forwards of a step share one copy of each weight in the dtype of the computation: where that saves
    casts, and a card has room for all copies. Without recomputation a forward keeps them for its backward anyhow.

    Args: device_memory: see estimate.
    """
    config, layout, mode = workload.config, workload.layout, workload.config.activation_checkpoint.mode
    is_alone = layout.gradient_ranks == 1 and layout.zero_stage > 0 and config.memory.offload == "nothing"
    is_cast = config.optimizer.master_bytes[0] > _BYTES[config.training.mixed_precision_param]
    is_plain = is_alone and is_cast and not config.compile.enable
    if mode == "none" or not is_plain:
        return is_plain and workload.batch.gradient_accumulation_steps > 1
    workload = _with_pieces(workload, piece_tokens(workload, device_memory))
    counts = layers_per_stage(workload, 1.0, device_memory)
    peaks = [memory.peak for memory in _peaks(workload, device_memory, counts, shares_copies=True)]
    return with_overhead(max(peaks) * (1 + BELOW)) <= device_memory


def _peaks(workload: Workload, device_memory: int, counts: Sequence[int], shares_copies: bool = False) -> list[Memory]:
    """Computes `estimate` for a split into stages. Args: counts: layers of each stage."""
    cuts, peaks = stages_of(counts), []
    for rank, numbers in enumerate(_on_ranks(workload, len(cuts))):
        here = _RankMemory(workload, device_memory, rank, [cuts[index] for index in numbers], shares_copies)
        moments = (Memory(*moment, here.on_host()) for moment in here.moments())
        peaks.append(max(moments, key=lambda memory: memory.peak))
    return peaks


def with_overhead(peak: float) -> float:
    """Bytes that a card needs for a counted peak: with the memory that the counter does not see."""
    return peak * (1 + _LOST) + _CONTEXT


def _on_ranks(workload: Workload, stages: int) -> list[list[int]]:
    """The numbers of each pipeline rank's stages."""
    ranks = workload.layout.pipeline_ranks
    return [stages_on(rank, ranks, stages) for rank in range(ranks)]


def layers_per_stage(workload: Workload, supervised_share: float, card: int = 0) -> Sequence[int]:
    """Layers of each pipeline stage: as configured, or balanced by the estimated cost of a microbatch per stage. Where
    that would almost fill a card, the peak of the fullest card is lowered instead.

    Args:
        supervised_share: supervised tokens per token of a row; the head runs on these only.
        card: bytes of a card's memory; 0: the cost alone counts.
    """
    config, spec, ranks = workload.config, workload.spec, workload.layout.pipeline_ranks
    parallelism, training, recompute = config.parallelism, config.training, config.activation_checkpoint.mode != "none"
    if ranks == 1:
        return [spec.num_hidden_layers]
    if parallelism.pipeline_parallel_layers_per_stage:
        return parallelism.pipeline_parallel_layers_per_stage
    rows, is_frozen = training.local_batch_size, config.lora.rank > 0
    draft = config.draft_head.train
    costs = stage_costs(spec, rows, training.seq_len, supervised_share, recompute, is_frozen, draft)
    counts = split_layers(*costs, ranks * SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank)
    return _by_bytes(_with_pieces(workload, piece_tokens(workload, card)), card, counts) if card else counts


def _by_bytes(workload: Workload, card: int, counts: list[int]) -> list[int]:
    """Move layers from the fullest card to the emptiest, until the fullest has room or nothing helps any more."""

    def peaks(counts: list[int]) -> list[float]:
        return [memory.peak for memory in _peaks(workload, card, counts)]

    now, stages = peaks(counts), _on_ranks(workload, len(counts))
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


def _with(
    gradients: float, activations: float, communication: float = 0.0, head_loss: float = 0.0, optimizer: float = 0.0
) -> dict[str, float]:
    bytes_of = {GRADIENTS: gradients, ACTIVATIONS: activations, COMMUNICATION: communication}
    return {**bytes_of, HEAD_LOSS: head_loss, OPTIMIZER: optimizer}


class _RankMemory:
    """What one rank holds, and when."""

    def __init__(
        self, workload: Workload, device_memory: int, rank: int, stages: list[Stage], shares_copies: bool = False
    ) -> None:
        config, spec, layout = workload.config, workload.spec, workload.layout
        self.config, self.spec, self.layout, self.batch = config, spec, layout, workload.batch
        self.stages, self.rank, self.device_memory, self.shares_copies = stages, rank, device_memory, shares_copies
        training = config.training
        self.tokens = training.local_batch_size * training.seq_len
        self.own_tokens = self.tokens / layout.context_ranks  # that the rank computes with where it has all values
        asked = config.memory.piece_tokens
        self.piece = asked if 0 < asked < self.own_tokens else 0
        self.compute_bytes = _BYTES[training.mixed_precision_param]
        self.has_first, self.has_last = any(s.first for s in stages), any(s.last for s in stages)
        self.mode, numbers = config.activation_checkpoint.mode, {n for stage in stages for n in stage.layers}
        self.layers = [spec.layers[number] for number in sorted(numbers)]
        self.is_alone = config.draft_head.train == "after"  # the draft head learns alone: layers keep nothing
        self.learning = [] if self.is_alone else self.layers
        self.draft = spec.draft_layer if self.has_last and spec.has_draft_head else None
        self.tied, self.lora_rank = spec.tie_word_embeddings, config.lora.rank
        self.is_frozen = self.is_alone or self.lora_rank > 0  # all but adapters and draft head
        self.offload, self.inputs_on_host = config.memory.offload, config.memory.offload_activations
        self.is_fsdp = layout.zero_stage > 0 and (layout.gradient_ranks > 1 or self.offload == "weights")
        self.shards = layout.weight_shards if self.is_fsdp else 1
        self.layer_values = sum(layer.size for layer in self.layers) / layout.matrix_parts
        small = (p.size for layer in self.layers for p in layer.parameters.values() if p.role == "router")
        self.router_values = 0.0 if training.train_router else sum(small) / layout.matrix_parts  # not trained
        self.block_values = max((layer.size for layer in self.layers), default=0) / layout.matrix_parts
        self.vocab_values = spec.vocab_size * spec.hidden_size / layout.matrix_parts
        self.is_tied_here = self.tied and self.has_first and self.has_last
        self.vocab_matrices = self.has_first + self.has_last - (self.is_tied_here and len(stages) == 1)
        self.draft_values = self.replicated = self.copied = 0.0
        if self.draft is not None:
            self.replicated = sum(p.size for p in spec.draft_head.values()) - self.draft.size  # by tensor parallel
            self.draft_values = self.replicated + self.draft.size / layout.matrix_parts
            has_copy = not self.tied and any(stage.last and not stage.first for stage in stages)
            self.copied = self.vocab_values if has_copy else 0.0
            alone: dict[str, dict[str, Any]] = {"lora": {"rank": 0, "base": "whole"}, "draft_head": {"train": "no"}}
            self.of_draft = _RankMemory(workload.changed(alone), device_memory, rank, [], shares_copies)
        # bytes in the dtype in which they are gathered and multiplied
        self.is_nf4 = config.lora.base == "nf4"
        self.weight_bytes = 0.5 + self.compute_bytes / NF4_BLOCK if self.is_nf4 else self.compute_bytes
        self.block_bytes = self.block_values * self.weight_bytes
        self.vocab_bytes = self.vocab_values * self.compute_bytes
        self.trunk_bytes = self.layer_values * self.weight_bytes + self.vocab_matrices * self.vocab_bytes
        self.draft_bytes = self.draft_values * self.compute_bytes
        adapters = config.lora.shapes(spec) if self.lora_rank else {}
        matrices = {name: math.prod(shape) for name, shape in adapters.items() if not name.endswith(ROWS)}
        adapter_sizes = [size for name, size in matrices.items() if int(name.split(".")[2]) in numbers]
        rows = math.prod(next((shape for name, shape in adapters.items() if name.endswith(ROWS)), (0,)))
        self.adapter_values = sum(adapter_sizes) / layout.matrix_parts + rows * self.vocab_matrices
        largest: list[float] = [layer.largest / layout.matrix_parts for layer in self.layers]
        largest += [self.vocab_values][: self.vocab_matrices]
        largest = [*adapter_sizes] if self.is_frozen else largest
        largest += [self.draft.largest / layout.matrix_parts, self.replicated] if self.draft else []
        self.largest_trained = max(largest, default=0)  # values of a matrix
        master, self.residual_bytes = config.optimizer.master_bytes
        self.master_bytes = max(master, self.compute_bytes) if self.compute_bytes > 4 else master
        # bytes of a gradient value where it is reduced
        self.reduce_bytes = max(_BYTES[training.mixed_precision_reduce], 8 if self.compute_bytes == 8 else 2)

    def _held(self) -> tuple[float, float, float]:
        """Trained elements; bytes of this rank's weights and of its optimizer state."""
        trained, frozen = self.adapter_values, self.trunk_bytes
        if not self.is_frozen:
            trained = self.layer_values - self.router_values + self.vocab_matrices * self.vocab_values
            frozen = max(4, self.compute_bytes) * self.router_values
        trained += self.draft_values
        frozen += self.copied * (self.compute_bytes if self.is_frozen else self.master_bytes)
        state = trained * (self.config.optimizer.state_bytes + self.residual_bytes)
        return trained, (trained * self.master_bytes + frozen) / self.shards, state / self.shards

    def on_host(self) -> float:
        """Bytes that are in the host's memory instead of the device's."""
        trained, weights, state = self._held()
        with_draft = [*self.learning, *([self.draft] if self.draft else [])]
        each = (self._pinned(self._bytes(layer.kept["full"])) for layer in with_draft)
        total = sum(each) * self._in_flight() if self.inputs_on_host else 0.0
        if self.offload == "optimizer":
            total += trained * self.master_bytes / self.shards + state
        if self.offload == "weights":
            is_added = self.batch.gradient_accumulation_steps > 1 and self.layout.zero_stage > 1 and not self.is_frozen
            largest = max(self.block_values, self.vocab_matrices and self.vocab_values)
            coming = largest * self.master_bytes / self.shards if is_added else 0.0
            rounded = self._weights_pinned() / weights if self.device_memory else 1.0
            total += rounded * (weights + (trained * self.master_bytes / self.shards) + coming) + state
        return total

    def _pinned(self, size: float) -> float:
        """Bytes of pinned host memory for a tensor: torch rounds up to a power of two."""
        return 2.0 ** math.ceil(math.log2(size)) if self.device_memory and size else size

    def _weights_pinned(self) -> float:
        """Pinned bytes of all weights: each matrix is rounded up separately."""
        held = self.compute_bytes if self.is_frozen else self.master_bytes
        bytes_each = held / self.shards / self.layout.matrix_parts
        matrices = (parameter.size for parameter in self.spec.parameters.values() if parameter.role != "norm")
        return sum(self._pinned(size * bytes_each) for size in matrices)

    def _gradient_sums(self, trained: float) -> float:
        """Bytes of gradients that are accumulated over microbatches, or wait to be copied to the host."""
        if self.is_fsdp and self.layout.zero_stage == 1 and self.batch.gradient_accumulation_steps > 1:
            return trained * max(self.reduce_bytes, self.compute_bytes)
        twice = self.layout.zero_stage == 0 and self.batch.gradient_accumulation_steps > 1
        limit = {"nothing": math.inf, "optimizer": _ON_THE_WAY, "weights": 0.0}[self.offload]
        limit = math.inf if self.is_fsdp and self.layout.replicas > 1 else limit
        return min(limit, trained * self.master_bytes / self.shards * (2 if twice else 1))

    def _in_flight(self) -> int:
        """Microbatches whose activations wait for their backward."""
        ranks, microbatches = self.layout.pipeline_ranks, self.batch.gradient_accumulation_steps
        if ranks == 1 or self.is_alone:
            return 1
        schedule = SCHEDULES[self.config.parallelism.pipeline_parallel_schedule]
        if schedule.forwards_first:
            return microbatches
        if schedule.stages_per_rank > 1:
            return min(microbatches, ranks + 1)
        return min(microbatches, ranks - self.rank)

    def _bytes(self, values: ValuesPerToken) -> float:
        """Bytes on this rank of values per token."""
        return self.tokens * (values.compute * self.compute_bytes + values.fp32 * 4) / self.layout.row_parts

    def _added_by_lora(self, layer: LayerShape, mode: str) -> float:
        """Extra bytes under LoRA: dropout's outputs and masks, minus what frozen norms do not save.

        Args: mode: if activation checkpointing has another one, the result is 0.
        """
        if not self.lora_rank or self.mode != mode:
            return 0.0
        targets = self.config.lora.target_modules if self.config.lora.dropout else ()
        dropped = masks = 0.0  # where outputs are split, each rank has all inputs
        for name, p in layer.parameters.items():
            if p.experts and EXPERTS in targets:
                inputs = p.shape[0] / p.experts if p.is_transposed else p.shape[1] / self.layout.matrix_parts
                dropped += 1.5 * layer.slots * inputs  # half: the gradient of one, which waits for its mask
            elif name.split(".")[-2] in targets and not p.experts:
                inputs = p.shape[1] / (self.layout.matrix_parts if p.split.dim == 1 else 1)
                if self.piece and name.startswith("mlp."):
                    masks += inputs
                else:
                    dropped += inputs
        for_norms = ValuesPerToken.of(tensor for tensor in layer.saved if tensor.is_for_norm)
        return self.own_tokens * (dropped * (self.compute_bytes + 1) + masks) - self._bytes(for_norms)

    def _kept_by_draft(self) -> float:
        """Bytes that the draft head keeps for its backward: what its norms and fc read, and what its layer keeps."""
        if self.draft is None:
            return 0.0
        read = 12 * self.spec.hidden_size * self.tokens / self.layout.row_parts
        return read + self._bytes(self._uncut(self.draft).kept[self.mode])

    def _uncut(self, layer: LayerShape) -> LayerShape:
        """The layer as far as it does not compute in pieces, if it does."""
        return layer.in_pieces if self.piece else layer

    def _inside(self, layer: LayerShape) -> float:
        """Bytes that a layer's backward needs besides what was kept."""
        uncut, ranks = self._uncut(layer), self.layout.matrix_parts
        total = self._bytes(uncut.inside[self.mode]) + self._added_by_lora(uncut, "full")
        # one dequantised matrix, and the indices of its lookup; on a card all experts of a projection, by a kernel
        of_experts = layer.largest_stack * self.compute_bytes if self.device_memory else 0.0
        restored = max(layer.largest * (self.compute_bytes + 2), of_experts) / ranks if self.is_nf4 else 0.0
        if not self.piece:
            return total + restored
        matrices = [p for name, p in layer.parameters.items() if name.startswith("mlp.") and p.role == "matrix"]
        # an MLP's matrices, all dequantised; or sums of the pieces' gradients
        each = self.compute_bytes if self.is_nf4 else 0 if self.lora_rank else 4
        total += each * sum(p.size for p in matrices) / ranks
        of_tokens = self._bytes(layer.inside["full"]) - self._bytes(uncut.inside["full"])
        inputs = max((p.shape[1] for p in matrices if p.split.dim == 1 and not p.experts), default=0) / ranks
        is_random = self.lora_rank and self.config.lora.dropout
        drawn = 3 * inputs * self.tokens * self.compute_bytes if is_random else 0.0  # for all who share the tokens
        looked_up = 2 * max(layer.largest, layer.largest_stack) / ranks if self.is_nf4 else 0.0
        return total + max(of_tokens * self.piece / self.own_tokens, drawn, looked_up)  # one after the other

    def _received(self) -> float:
        """Bytes of receive buffers: torch's pipeline keeps hidden states and gradients of each microbatch."""
        if self.is_alone:
            return 0.0  # its forwards run without a schedule
        hidden_bytes = self.tokens * self.compute_bytes * self.spec.hidden_size / self.layout.row_parts
        return self.batch.gradient_accumulation_steps * received_per_microbatch(self.stages) * hidden_bytes

    def _head(self) -> float:
        """Buffers of the head's loss, see model/loss.py."""
        c, logits = self.compute_bytes, self.own_tokens * self.spec.vocab_size // self.layout.matrix_parts
        block = min(max(HEAD_COLUMNS * self.own_tokens, HEAD_BLOCK if self.device_memory else HEAD_BLOCK_CPU), logits)
        wide, kept_logits = max(4, c), self.device_memory // HEAD_BYTES_PER_LOGIT
        schedule = SCHEDULES[self.config.parallelism.pipeline_parallel_schedule]
        keeps_all = schedule.forwards_first and self.layout.is_pipeline
        microbatches = self.batch.gradient_accumulation_steps if keeps_all else 1
        is_twice = self.draft is not None and not self.is_alone  # the second pass keeps no logits
        rows = self.own_tokens * self.spec.hidden_size * ((4 if is_twice else 2) * c + 4)
        recomputed = block * (c + (wide if c < 4 else 0))
        if logits <= kept_logits // microbatches:
            return rows + microbatches * (logits * c + block * wide) + is_twice * recomputed
        return rows + recomputed

    def _gathered(self, by_group: float, more: float = 0.0) -> float:
        """Bytes of the weights that FSDP2 has gathered.

        Args:
            by_group: if each group is freed after use (ZeRO-3); more: still in the buffer of the last all-gather.
        """
        if not self.is_fsdp:
            return 0.0
        if self.layout.zero_stage < 3:
            every = self.trunk_bytes + self.draft_bytes + self.copied * self.compute_bytes
            return every + (more if self.is_frozen else 0.0)
        return by_group + more

    def _reduced(self, elements: float, of_draft: bool = False) -> float:
        """Bytes of FSDP2's buffers: it copies a group's gradients into one, reduces into a second, casts the second."""
        if not self.is_fsdp or (self.is_frozen and not of_draft) or self.layout.is_pipeline:
            return 0.0
        other = self.master_bytes if self.master_bytes != self.reduce_bytes else 0
        return elements * (self.reduce_bytes + (self.reduce_bytes + other) / self.shards)

    def _set_sums(self) -> None:
        """What is there always, and sums of gradients."""
        trained, weights, state = self._held()
        self.accumulates, self.is_all_here = self.batch.gradient_accumulation_steps > 1, self.offload == "nothing"
        self.always = {
            PARAMETERS: weights if self.offload != "weights" else 0.0, OPTIMIZER: state if self.is_all_here else 0.0,
            COMMUNICATION: self._received(), HEAD_LOSS: 0.0, GRADIENTS: 0.0, ACTIVATIONS: 0.0,
        }  # fmt: skip
        # ZeRO-1 keeps gradients until the last microbatch; so does FSDP2 with replicas, after its reduction.
        sums_stay = self.is_all_here or (self.is_fsdp and (self.layout.zero_stage == 1 or self.layout.replicas > 1))
        self.sums = self._gradient_sums(trained)
        if self.layout.zero_stage == 0 and self.accumulates and not self.is_alone:
            self.sums -= self.draft_values * self.master_bytes  # DDP's buckets have no copy of it
        self.earlier_sums = self.sums if self.accumulates and sums_stay else 0.0  # of the microbatches before the last
        # the gradient of a vocabulary matrix, before its reduction
        bytes_each = 0.0 if self.is_frozen else self.compute_bytes if self.is_fsdp else self.master_bytes
        self.vocab_gradient = self.vocab_values * bytes_each
        if self.has_first and self.vocab_gradient and not sums_stay:  # the embedding's gradient is not there yet
            self.sums = self._gradient_sums(trained - self.vocab_values)
        # the head's gradient waits for the embedding's: one weight
        self.waiting = self.vocab_gradient if self.is_tied_here else 0.0
        is_summed = self.has_last and not self.tied and not self.is_frozen
        self.head_sum = self._gradient_sums(self.vocab_values) if is_summed else 0.0
        is_reduced = is_summed and self.layout.zero_stage > 1 and self._reduced(self.block_values)
        self.head_reduced = self.vocab_values * self.reduce_bytes if is_reduced else 0.0  # until the next reduction

    def _set_kept(self) -> None:
        """What waits for backward: of each layer and the draft head, and of all microbatches together."""
        # bytes of each weight's copy in the dtype of the computation, if FSDP2 does not gather them
        is_cast = not self.is_fsdp and self.master_bytes != self.compute_bytes
        draft_copies = self.draft_bytes if is_cast else 0.0
        copy_bytes = self.compute_bytes if is_cast and not self.is_frozen else 0.0
        is_kept = self.mode == "none" or self.shares_copies
        on_card = [self._uncut(layer) for layer in self.learning[-2 if self.inputs_on_host else 0 :]]
        kept_by_layer = [self._bytes(x.kept[self.mode]) + self._added_by_lora(x, "none") for x in on_card]
        self.kept_by_layer = [*kept_by_layer, self._kept_by_draft()]
        self.rotary = self._bytes(self.spec.per_forward) * self.layout.matrix_parts  # of all tokens that its heads have
        self.kept = sum(self.kept_by_layer) * self._in_flight() + self.rotary
        self.kept += self.layer_values * copy_bytes + draft_copies if is_kept else 0.0
        self.kept += self.adapter_values * self.compute_bytes if self.shares_copies else 0.0
        # copies that are made in the backward of a block, and of the draft head
        self.block_copies = 0.0 if is_kept else self.block_values * copy_bytes
        self.draft_copies = 0.0 if is_kept else draft_copies

    def moments(self) -> Moments:
        """Each moment and its categories."""
        self._set_sums()
        self._set_kept()
        for part in (self._forward, self._head_pass, self._draft_pass, self._backward, self._embedding, self._update):
            for name, added in part():
                yield name, {category: size + added.get(category, 0.0) for category, size in self.always.items()}

    def _forward(self) -> Moments:
        if self.is_frozen and self.layers:
            table = self.vocab_bytes if self.tied else 0.0  # still in the buffer of its all-gather, too
            gathered = self._gathered(2 * self.block_bytes + table, table or self.block_bytes)
            inside = max(self._bytes(self._uncut(layer).inside["none"]) for layer in self.layers)
            yield "forward of the first block", _with(self.earlier_sums, self.rotary + inside, communication=gathered)
        if len(self.layers) > 2 and self.layout.zero_stage == 3:  # one block computes, two are on their way
            gathered = self._gathered(3 * self.block_bytes)
            yield "forward of a block", _with(self.earlier_sums, self.kept, communication=gathered)

    def _head_pass(self) -> Moments:
        if self.has_last:
            # the final norm's input, output and gradient; if it does not compute in pieces also copies in fp32
            around = 6.0 if self.piece else 8.0 if self.is_alone else 24.0
            around *= self.spec.hidden_size * self.tokens / self.layout.row_parts
            final = self.kept + around
            by_head, logits = self.vocab_bytes + self.block_bytes + self.draft_bytes, self._head()
            gathered = self._gathered(by_head, 0.0 if self.tied else self.vocab_bytes)
            yield "forward of the head", _with(self.earlier_sums, final, head_loss=logits, communication=gathered)
            gathered, logits = self._gathered(by_head), logits + self.vocab_gradient
            yield "backward of the head", _with(self.earlier_sums, final, head_loss=logits, communication=gathered)
            if self.is_fsdp and not self.tied and self.layout.zero_stage > 1:
                gradients = self.earlier_sums + self.vocab_gradient
                reduced = self._reduced(self.vocab_values) + self._gathered(self.block_bytes + self.draft_bytes)
                yield "reduction of the head's gradient", _with(gradients, self.kept, communication=reduced)
            if self.layout.matrix_parts > 1 and not self.is_fsdp:  # autograd adds DTensors out of place
                yield "sum of the head's gradient", _with(self.earlier_sums + 3 * self.vocab_gradient, self.kept)

    def _draft_pass(self) -> Moments:
        if self.draft is not None:
            computing = self.of_draft._inside(self.draft) + self.draft_copies
            # the last group that is reduced
            of_head = self.vocab_gradient if self.tied and self.is_fsdp else self.waiting
            gradients = max(self.earlier_sums, self.head_sum) + of_head + self.draft_bytes
            own = self.draft_bytes + (0.0 if self.is_alone else self.block_bytes)
            gathered = self._gathered(own, self.vocab_bytes if self.tied else 0.0)
            last = gathered + self.head_reduced
            yield "backward of the draft head", _with(gradients, self.kept + computing, communication=last)
            reduced = gathered + self._reduced(self.draft_values, of_draft=True)
            gradients -= self.draft_bytes
            yield "reduction of the draft head's gradients", _with(gradients, self.kept, communication=reduced)

    def _backward(self) -> Moments:
        if self.learning:
            computing = max(map(self._inside, self.layers)) + self.block_copies
            block_gradient = 0.0 if self.is_frozen else self.block_values * self.compute_bytes
            gathered = self._gathered(2 * self.block_bytes, self.vocab_bytes if self.tied else 0.0)
            block_reduced = self._reduced(self.block_values)
            gradients = max(self.earlier_sums, self.head_sum) + self.waiting + block_gradient
            last = gathered + max(block_reduced, self.head_reduced)
            activations = self.kept - self.kept_by_layer[-1] + computing
            yield "backward of the last block", _with(gradients, activations, communication=last)
            # From here on as many gradients wait as may, while each block frees what it has kept; else the last moment.
            count, gradients = len(self.kept_by_layer) - 1, self.sums + self.waiting + block_gradient
            done = int(self.sums / self._gradient_sums(self.block_values)) if self.offload == "optimizer" else count
            for name, left in (("a block in the middle", max(1, count - done)), ("the first block", 1)):
                activations = self.kept - sum(self.kept_by_layer[left:]) + computing
                communication = gathered + block_reduced
                yield f"backward of {name}", _with(gradients, activations, communication=communication)

    def _embedding(self) -> Moments:
        if self.has_first and self.vocab_gradient:
            each = 3 if self.waiting else 1  # head's, embedding's and their sum
            gradients = self.sums + each * self.vocab_gradient
            gathered = self._gathered(self.vocab_bytes if self.tied else 0.0)
            yield "backward of the embedding", _with(gradients, self.rotary, communication=gathered)
            if self.is_fsdp:
                of_table = 0.0 if self.accumulates else self._gradient_sums(self.vocab_values)
                gradients = self.sums - of_table + self.vocab_gradient
                reduced = self._reduced(self.vocab_values)
                yield "reduction of the embedding's gradient", _with(gradients, self.rotary, communication=reduced)

    def _update(self) -> Moments:
        has_buffers = self.offload == "optimizer" or (self.config.optimizer.is_lean and self.is_all_here)
        buffers = min(UPDATED_AT_ONCE, self.largest_trained / self.shards) * _UPDATE_BYTES if has_buffers else 0.0
        yield "update", _with(self.sums if self.is_all_here else 0.0, 0.0, optimizer=buffers)
