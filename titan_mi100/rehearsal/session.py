"""Rehearses a rank of a run: the trainer's own step on the real model and mesh, on tensors without values."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from titan_mi100 import trainer
from titan_mi100.config.layout import Batch
from titan_mi100.config.model_spec import ModelSpec
from titan_mi100.config.settings import Config
from titan_mi100.config.traffic import Work, extrapolated
from titan_mi100.data.loader import Microbatch
from titan_mi100.memory.counter import CPU, Count, FakeRank, FusedKernel, as_rank, enough_microbatches, inputs
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.parallel.distributed import Gradients, gather_values
from titan_mi100.rehearsal.tally import Tally

_FLAGS = ("stop", "save failed")  # a run's, which travel with each step


@dataclass(frozen=True)
class Rehearsed:
    """What one rank does in a step.

    Attributes:
        memory: at the step's peak.
        work: FLOPs and collectives of a step, the second of a start.
    """

    rank: int
    memory: Count
    work: Work


def rehearse(config: Config, ranks: int, rank: int, device_memory: int, spec: ModelSpec | None = None) -> Rehearsed:
    """Take two steps as one rank of a run; of many microbatches, as many as make a difference, the rest multiplied.

    This process must be in no process group. Args: see memory.counter.as_rank.
    """
    wanted, more = config.batch(ranks).gradient_accumulation_steps, enough_microbatches(config, ranks)
    few = max(1, config.layout(ranks).pp)  # what every schedule takes
    memory, found = _second_step(config, ranks, rank, more, device_memory, spec)
    if more == 1 or (wanted == more and few >= more):
        return Rehearsed(rank, memory, Work(found.flops, found.traffic, {}))
    _, fewer = _second_step(config, ranks, rank, few, device_memory, spec)
    traffic = extrapolated(fewer.traffic, found.traffic, (few, more), wanted)
    one_more = extrapolated(fewer.traffic, found.traffic, (few, more), few + 1)
    added = {transfer: count - fewer.traffic[transfer] for transfer, count in one_more.items()}
    flops = fewer.flops + (found.flops - fewer.flops) * (wanted - few) // (more - few)
    return Rehearsed(rank, memory, Work(flops, traffic, added))


class _Attention(FusedKernel):
    """Counts the FLOPs of causal attention over rows of one document each."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: None) -> Tensor:
        batch, seq, heads, head_dim = q.shape
        flops = 4 * head_dim * heads * batch * (seq * (seq + 1) // 2)  # two products of each query with keys up to it
        self._add(flops)
        out = super().__call__(q, k, v, prepared)
        if out.requires_grad:
            out.register_hook(functools.partial(self._add, 2 * flops))
        return out

    def _add(self, flops: int, gradient: Tensor | None = None) -> None:
        self.flops += flops


def _second_step(
    config: Config, ranks: int, rank: int, microbatches: int, device_memory: int, spec: ModelSpec | None
) -> tuple[Count, Tally]:
    """The first step is the one whose memory is counted."""
    attention = _Attention()
    with as_rank(config, ranks, rank, microbatches, device_memory, attention, spec) as fake:
        memory = fake.count_step()
        tally = Tally(config.layout(ranks))
        gather = functools.partial(_everyone_alike, tally)
        with unset_fake_temporarily(), patch.object(trainer, "gather_values", gather):
            step = _trainer_of(fake).step
            attention.flops = 0
            with tally:
                step()
        tally.flops += attention.flops
    return memory, tally


def _trainer_of(fake: FakeRank) -> trainer.Trainer:
    """The run's trainer. It reads values, so it gets real ones; model and optimizer work on those without."""
    config, model = fake.config, fake.model
    named, seed = model.trained_parameters(), config.training.seed
    with fake.mode:
        optimizer = build_optimizer(named, config.optimizer, seed, CPU, model.host_gradients)
    forward_backward, measure, update = model.forward_backward, model.measure_gradients, optimizer.update

    def in_fake_mode(call: Callable[..., Any], result: Callable[[], Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            with fake.mode:
                call(*arguments)
            return result()

        return called

    losses = functools.partial(torch.zeros, fake.microbatches, dtype=torch.float64)
    model.forward_backward = in_fake_mode(forward_backward, losses)  # type: ignore[method-assign]
    model.measure_gradients = in_fake_mode(measure, _no_gradient)  # type: ignore[method-assign]
    optimizer.update = in_fake_mode(update, lambda: None)  # type: ignore[method-assign]
    batch = replace(config.batch(fake.ranks), gradient_accumulation_steps=fake.microbatches)
    flags = {name: lambda: False for name in _FLAGS}
    return trainer.Trainer(model, optimizer, _Rows(config, batch), config.training.max_norm, 0, flags)  # type: ignore[arg-type]


def _no_gradient() -> Gradients:
    return Gradients(torch.zeros((), dtype=torch.float64), torch.tensor(True))


def _everyone_alike(tally: Tally, mine: Tensor, device: torch.device) -> Tensor:
    """gather_values, if all ranks had this one's."""
    tally.is_beside_mesh = True
    ranks = len(gather_values(mine, device))
    tally.is_beside_mesh = False
    return mine.double().expand(ranks, -1)


class _Rows:
    """A stream of rows that hold one document each."""

    def __init__(self, config: Config, batch: Batch) -> None:
        self.batch, self._config = batch, config

    def ahead(self, first_row: int, pinned: bool) -> Callable[[], list[Microbatch]]:
        return lambda: self.step(first_row)

    def step(self, first_row: int) -> list[Microbatch]:
        found = inputs(self._config, self.batch.gradient_accumulation_steps)
        return [{**microbatch, "document_ids": torch.zeros_like(microbatch["labels"])} for microbatch in found]
