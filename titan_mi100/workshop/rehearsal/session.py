"""Rehearses one rank of a run: the trainer's own step with the real model and mesh, on fake tensors (no values)."""

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
from titan_mi100.config.settings import Config
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.parallel.distributed import Gradients, gather_values
from titan_mi100.planning.workload import Workload
from titan_mi100.workshop.rehearsal.counter import (
    CPU,
    Count,
    FakeRank,
    FusedKernel,
    as_rank,
    enough_microbatches,
    first_rows_only,
    inputs,
)
from titan_mi100.workshop.rehearsal.tally import Tally
from titan_mi100.workshop.rehearsal.traffic import Work, extrapolated

_FLAGS = ("stop", "save failed", "moved")  # the flags that a real run gathers in each step


@dataclass(frozen=True)
class Rehearsed:
    """Memory and work of one rank in a step.

    Attributes:
        memory: what the counter found in the first step.
        work: FLOPs and collectives of the second step; the first one has set-up communication too.
    """

    rank: int
    memory: Count
    work: Work


def rehearse(workload: Workload, rank: int, device_memory: int) -> Rehearsed:
    """Run two steps as one rank of a run. This process must not be in a process group.

    With many microbatches, two smaller numbers of them are rehearsed, and FLOPs and collectives are extrapolated
    linearly.

    Args: see counter.as_rank.
    """
    layout, batch = workload.layout, workload.batch
    schedule = workload.config.parallelism.pipeline_parallel_schedule
    microbatches, many = batch.gradient_accumulation_steps, enough_microbatches(layout, batch, schedule)
    few = layout.pipeline_ranks  # every schedule runs with as many microbatches as pipeline ranks
    memory, work = _second_step(workload, rank, many, device_memory)
    if many == 1 or (microbatches == many and few >= many):
        return Rehearsed(rank, memory, Work(work.flops, work.traffic, {}))
    _, fewer = _second_step(workload, rank, few, device_memory)
    traffic = extrapolated(fewer.traffic, work.traffic, (few, many), microbatches)
    one_more = extrapolated(fewer.traffic, work.traffic, (few, many), few + 1)
    added = {transfer: count - fewer.traffic[transfer] for transfer, count in one_more.items()}
    flops = fewer.flops + (work.flops - fewer.flops) * (microbatches - few) // (many - few)
    return Rehearsed(rank, memory, Work(flops, traffic, added))


class _Attention(FusedKernel):
    """Counts the FLOPs of causal attention; each row is one document."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: None) -> Tensor:
        batch, seq, heads, head_dim = q.shape
        flops = 4 * head_dim * heads * batch * (seq * (seq + 1) // 2)  # two products, causal
        self._add(flops)
        output = super().__call__(q, k, v, prepared)
        if output.requires_grad:
            output.register_hook(functools.partial(self._add, 2 * flops))  # backward: four products
        return output

    def _add(self, flops: int, gradient: Tensor | None = None) -> None:
        self.flops += flops


def _second_step(workload: Workload, rank: int, microbatches: int, device_memory: int) -> tuple[Count, Tally]:
    """Run two steps: the memory of the first is counted, the operations of the second."""
    attention = _Attention()
    with as_rank(workload, rank, microbatches, device_memory, attention) as fake:
        memory = fake.count_step()
        tally = Tally(workload.layout)
        gather = functools.partial(_gather_same_values, tally)
        with unset_fake_temporarily(), patch.object(trainer, "gather_values", gather):
            step = _trainer_of(fake).step
            attention.flops = 0
            with tally, first_rows_only():
                step()
        tally.flops += attention.flops
    return memory, tally


def _trainer_of(fake: FakeRank) -> trainer.Trainer:
    """The run's trainer around the fake model.

    The trainer reads values (losses, norms), so it must get real tensors. Model and optimizer run in fake mode, and the
    wrappers below return real zeros in place of their results.
    """
    config, model = fake.workload.config, fake.model
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

    shape = fake.microbatches, model.outputs
    losses = functools.partial(torch.zeros, shape, dtype=torch.float64)
    model.forward_backward = in_fake_mode(forward_backward, losses)  # type: ignore[method-assign]
    no_gradient = Gradients(torch.zeros((), dtype=torch.float64), torch.tensor(True))
    model.measure_gradients = in_fake_mode(measure, lambda: no_gradient)  # type: ignore[method-assign]
    optimizer.update = in_fake_mode(update, lambda: None)  # type: ignore[method-assign]
    batch = replace(fake.workload.batch, gradient_accumulation_steps=fake.microbatches)
    rules = trainer.UpdateRules(config.training.max_norm)
    return trainer.Trainer(model, optimizer, _Rows(config, batch), rules, 0, _AsInARun())  # type: ignore[arg-type]


class _AsInARun(trainer.Hooks):
    """Flags of a real run, whose bytes are counted."""

    def flags(self) -> dict[str, bool]:
        return dict.fromkeys(_FLAGS, False)


def _gather_same_values(tally: Tally, mine: Tensor, device: torch.device) -> Tensor:
    """Replace gather_values: every rank has the same values as this one."""
    tally.is_beside_mesh = True
    ranks = len(gather_values(mine, device))
    tally.is_beside_mesh = False
    return mine.double().expand(ranks, -1)


class _Rows:
    """Replaces the loader: every row is one document."""

    def __init__(self, config: Config, batch: Batch) -> None:
        self.batch, self._config = batch, config

    def ahead(self, first_row: int, pinned: bool) -> Callable[[], list[Microbatch]]:
        return lambda: self.step(first_row)

    def step(self, first_row: int) -> list[Microbatch]:
        return inputs(self._config.training, self._config.objective, self.batch.gradient_accumulation_steps)
