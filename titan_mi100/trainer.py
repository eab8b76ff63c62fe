"""Runs optimizer steps: forward, backward, gradient norm, clipping, update."""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_mi100.data.loader import RowStream
from titan_mi100.data.microbatch import Microbatch, drafted, sizes
from titan_mi100.device import accelerator
from titan_mi100.device.accelerator import to_device
from titan_mi100.optim.loss_scale import LossScale
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import gather_values


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Counts are sums over all ranks; times are this rank's, in seconds."""

    first_row: int  # number of the step's first row
    next_row: int  # number of the next step's first row
    lr: float  # learning rate of the first parameter group
    loss: float  # mean over what the objective counts; sft: supervised tokens
    grad_norm: float  # before clipping
    tokens: int  # real ones: no padding
    supervised: int
    attention_pairs: int  # (query, key) inside documents, key <= query
    seconds: float  # the whole step: data, forward, backward, update
    waited: float  # part of `seconds` spent waiting for rows
    peak_memory_gib: float  # most memory so far on any rank; see the function peak_memory_gib
    gradient_bytes: int | None = None  # gradient bytes that this rank passed to collectives; None: not counted
    skipped: bool = False  # the weights were not updated: loss or gradients not finite, or a skipped spike
    nonfinite_microbatches: Sequence[int] = ()  # this rank's microbatches whose loss is not finite
    loss_scale: float | None = None  # loss scale used in the step; None: not fp16
    overflowed: bool = False  # skipped only because the fp16 loss scale is still too large
    flags: frozenset[str] = frozenset()  # the hooks' flags that are set on any rank
    spike_above: float | None = None  # the step is a spike: its loss is finite but above this; None: no spike
    worst_microbatches: Sequence[int] = ()  # in a spike: this rank's microbatch with the highest loss
    measures: Mapping[str, float] = field(default_factory=dict)  # what the objective makes of its sums
    has_level: bool = True  # of the loss, see Objective


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: reserved by the allocator on a GPU, resident set size of the process on a CPU."""
    if accelerator.is_gpu(device):
        return accelerator.peak_memory(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Hooks:
    """Questions of a step to the run around it. These do nothing; a run has its own."""

    def begin(self, part: str) -> None:
        """Called when a part of a step begins. Args: part: its name."""

    def flags(self) -> Mapping[str, bool]:
        """This rank's flags by name, the same names in each step. In the result a flag is set if any rank's is."""
        return {}

    def spike_above(self) -> float:
        """The loss above which a step is a spike; the same on all ranks."""
        return math.inf


@dataclass(frozen=True)
class UpdateRules:
    """Rules by which a step's gradient becomes an update.

    Attributes:
        max_norm: clip the gradient's global norm to this; 0: off.
        skip_spikes: do not update the weights in a step that is a spike.
        loss_scale: the loss scale of fp16, which every step updates; None: not fp16.
        draft_weight: of the loss of a draft head that is trained along.
        draft_loss_scale: its own.
    """

    max_norm: float
    skip_spikes: bool = False
    loss_scale: LossScale | None = None
    draft_weight: float = 0.0
    draft_loss_scale: LossScale | None = None

    def clip(self, norm: float) -> float:
        """The factor of gradients with this norm."""
        return self.max_norm / norm if 0 < self.max_norm < norm else 1.0


class _Part:
    """What a step decides about a part of the model, the trunk or a draft head that is trained along, all by itself.

    Attributes:
        mean, scale: factors of its loss: 1 / what is counted; the loss scale.
        weight: of its loss in backward.
        factor: of its gradients; None: it is not updated.
    """

    def __init__(self, rules: UpdateRules, loss_scale: LossScale | None, count: int, share: float = 1.0) -> None:
        """Args: count: see Objective. share: a further factor of its loss."""
        self._rules, self._loss_scale = rules, loss_scale
        self.mean, self.scale = 1 / count if count else 0.0, loss_scale.value if loss_scale else 1.0
        self.weight = share * self.mean * self.scale

    def decide(self, squares: float, not_finite: float, loss: float) -> None:
        """Args: squares, not_finite: of its gradients. loss: the sum; all of all ranks."""
        self.norm, self.loss = math.sqrt(squares) / self.scale, loss * self.mean
        self.is_broken = not_finite > 0 or not math.isfinite(squares + loss)
        can_fall = self._loss_scale is not None and self._loss_scale.can_fall()
        self.overflowed = can_fall and self.is_broken and math.isfinite(loss)
        self.factor = None if self.is_broken else self._rules.clip(self.norm) / self.scale

    def adapt_scale(self) -> None:
        if self._loss_scale is not None:
            self._loss_scale.after_step(self.overflowed)

    def measures(self) -> dict[str, float]:
        """What is reported of a draft head."""
        measures = {"draft_loss": self.loss, "draft_grad_norm": self.norm, "draft_skipped": float(self.is_broken)}
        if self._loss_scale is None:
            return measures
        return measures | {"draft_loss_scale": self.scale, "draft_overflowed": float(self.overflowed)}


class Trainer:
    """Runs optimizer steps. Besides the layout's, each has one collective: what all ranks must agree on."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: NamedState,
        stream: RowStream,
        rules: UpdateRules,
        first_row: int = 0,
        hooks: Hooks | None = None,
    ) -> None:
        """Read the first step's rows. A collective.

        Args:
            first_row: number of the first step's first row.
            hooks: of the run; None: none.
        """
        self._model, self._optimizer, self._stream, self._rules = model, optimizer, stream, rules
        self._hooks = hooks or Hooks()
        self._row = first_row
        self._microbatches = stream.step(first_row)
        # started in the first step, read from the third on
        self._next_step: Callable[[], list[Microbatch]] | None = None
        # The counts of every later step are exchanged in the collective of the step before it.
        self._counts = gather_values(self._count(self._microbatches), model.device).sum(0).tolist()

    def step(self, update: bool = True) -> StepResult:
        """Run forward and backward for all microbatches, then update the weights.

        If a loss or a gradient is not finite on any rank, all ranks skip the update; weights and optimizer state do not
        change.

        Args:
            update: false: compute loss and gradients only, change nothing.
        """
        started = time.perf_counter()
        model, rules, first_row, microbatches = self._model, self._rules, self._row, self._microbatches
        tokens, supervised, pairs, count, drafts = map(round, self._counts)
        # Divide the loss by the count of the whole step, over all ranks, before the first backward (for sft: of the
        # supervised tokens). Then the gradient is the same for every split of the rows over ranks and microbatches.
        parts = [trunk := _Part(rules, rules.loss_scale, count)]
        if model.draft == "along":
            parts.append(_Part(rules, rules.draft_loss_scale, drafts, rules.draft_weight))
        losses = model.forward_backward(microbatches, *(part.weight for part in parts))
        self._hooks.begin("reading the next step's rows")
        waited = self._read_ahead()
        self._hooks.begin("meeting the other ranks with loss and gradients")
        gradients = [model.measure_gradients(part is not trunk) for part in parts]

        # Every rank decides from the same gathered values, a row per rank.
        each = [number for own in gradients for number in (own.squares, (~own.finite).double())]
        on_device = torch.cat([torch.stack(each), losses.sum(0)])
        flags = self._hooks.flags()
        on_host = [*self._next_counts, peak_memory_gib(model.device), *map(float, flags.values())]
        both = torch.cat([on_device, to_device(torch.tensor(on_host, dtype=torch.float64), model.device)])
        sizes_of = [len(on_device) + len(self._next_counts), 1, len(flags)]
        summed, memory, raised = gather_values(both, model.device).split(sizes_of, dim=1)
        numbers = summed.sum(0).tolist()
        of_parts, rest = numbers[: len(each)], numbers[len(each) :]
        loss_sum, *sums = rest[: model.outputs]
        measures, self._counts = dict(zip(model.objective.measures, sums, strict=False)), rest[model.outputs :]
        self._hooks.begin("update of the weights")
        for part, squares, not_finite in zip(parts, of_parts[::2], of_parts[1::2], strict=True):
            part.decide(squares, not_finite, loss_sum if part is trunk else sums[-2])
        limit = self._hooks.spike_above()
        is_spike = not trunk.is_broken and trunk.loss > limit
        for part in parts if is_spike and rules.skip_spikes else ():
            part.factor = None
        if update and any(part.factor is not None for part in parts):
            self._optimizer.update(*(part.factor for part in parts))
            model.after_update()
        for part in parts if update else ():
            part.adapt_scale()
        model.clear_gradients()
        losses, of_draft = losses[:, 0], parts[1].measures() if parts[1:] else {}
        nonfinite = losses.isfinite().logical_not().nonzero().flatten().tolist() if trunk.is_broken else []
        are_up = (raised > 0).any(0).tolist()
        return StepResult(
            first_row=first_row,
            next_row=self._row,
            lr=self._optimizer.param_groups[0]["lr"],
            loss=trunk.loss,
            measures=model.objective.means(measures, lambda total: total * trunk.mean) | of_draft,
            has_level=model.objective.has_level,
            grad_norm=trunk.norm,
            tokens=tokens,
            supervised=supervised,
            attention_pairs=pairs,
            seconds=time.perf_counter() - started,
            waited=waited,
            peak_memory_gib=memory.max().item(),
            gradient_bytes=model.gradient_bytes,
            skipped=trunk.factor is None,
            nonfinite_microbatches=nonfinite,
            loss_scale=None if rules.loss_scale is None else trunk.scale,
            overflowed=trunk.overflowed,
            flags=frozenset(name for name, on in zip(flags, are_up, strict=True) if on),
            spike_above=limit if is_spike else None,
            worst_microbatches=self._worst(losses, microbatches) if is_spike else [],
        )

    def _worst(self, losses: Tensor, microbatches: list[Microbatch]) -> list[int]:
        """The microbatch with the highest mean loss; empty on a pipeline stage that does not compute the loss."""
        if not self._model.counts_loss:
            return []
        counts = torch.tensor([self._model.objective.count(microbatch) for microbatch in microbatches])
        return [int((losses.cpu() / counts.clamp(min=1)).argmax())]

    def _read_ahead(self) -> float:
        """Fetch the next step's rows, which a thread has read during this step; the seconds waited for them."""
        started = time.perf_counter()
        self._row += self._stream.batch.global_batch_size
        if self._next_step is None:  # the first step does not wait for the threads: they begin with the third's rows
            behind = self._row + self._stream.batch.global_batch_size
            self._next_step = self._stream.ahead(behind, pinned=accelerator.is_gpu(self._model.device))
            self._microbatches = self._stream.step(self._row)
        else:
            self._microbatches = self._next_step()
        self._next_counts = self._count(self._microbatches).tolist()
        return time.perf_counter() - started

    def _count(self, microbatches: list[Microbatch]) -> Tensor:
        """The microbatches' sizes, the objective's count and the draft head's; zeros where another rank counts."""
        counts = torch.zeros(5, dtype=torch.float64)
        for microbatch in microbatches if self._model.counts_rows else ():
            counts[:3] += sizes(microbatch)
            counts[3] += self._model.objective.count(microbatch)
            counts[4] += drafted(microbatch) if self._model.draft == "along" else 0
        return counts
