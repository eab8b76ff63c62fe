"""The planned memory and time of a step: refuses a run that does not fit; later compares the plan with a real step."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_mi100.config.settings import MemoryConfig
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.log import log
from titan_mi100.parallel.distributed import World, data_sheet, raise_together
from titan_mi100.planning.costs import flops_of_steps
from titan_mi100.planning.memory import CATEGORIES
from titan_mi100.planning.plan import GIB, make_plan, remedy
from titan_mi100.planning.workload import Workload
from titan_mi100.trainer import StepResult, peak_memory_gib

FILE = "plan.json"
_OWN = 1 << 30  # bytes that this process may hold on the card before the model: its context and libraries
_COMPARED = 3  # number of the step to compare with: the first two also allocate optimizer state and choose kernels


class Forecast:
    """The plan of a run's memory and time, and its comparison with a measured step. An observer of steps."""

    def __init__(self, workload: Workload, world: World, folder: Path | None) -> None:
        """Make the plan, and set the config's memory limit for the device. A collective.

        Args:
            folder: where rank 0 writes plan.json; None: nowhere.

        Raises:
            UserError: a step does not fit the device, on all ranks.
        """
        config, is_gpu = workload.config, accelerator.is_gpu(world.device)
        self._free, card = accelerator.memory(world.device) if is_gpu else (sys.maxsize, 0)
        if config.memory.limit_gib:
            limit = round(config.memory.limit_gib * GIB)
            if is_gpu and limit < card:
                accelerator.module(world.device).set_per_process_memory_fraction(limit / card, world.device)
            card = min(card or limit, limit)
        gpu = data_sheet(world.device)
        self.plan = make_plan(workload, card if is_gpu else 0, gpu)
        tflops = gpu.tflops.get(config.training.mixed_precision_param, 0) if gpu else 0
        self._flops, self._peak_flops = flops_of_steps(workload.spec, config.lora), tflops * 1e12 * world.size
        self._card, self._folder, self._steps = card, folder if world.rank == 0 else None, 0
        # memory of the process and its libraries before the model
        self._before = 0.0 if is_gpu else peak_memory_gib(world.device)
        with raise_together():  # cards may differ
            self._check_host()
            if card:
                self._check(config.memory)

    def _check_host(self) -> None:
        """Check that the host has enough memory for what is offloaded to it."""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed, has = processes * self.plan.host, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > has:
            reason = f"memory.offload takes {needed / GIB:.1f} GiB of the host's memory for all of its processes"
            raise UserError(f"{reason}, which has {has / GIB:.1f}; titan-mi100 plan --search looks for what takes less")

    def _check(self, memory: MemoryConfig) -> None:
        plan, card = self.plan, self._card
        needs = f"a step takes {plan.least / GIB:.1f} to {plan.most / GIB:.1f} GiB by plan, of {card / GIB:.1f}"
        if plan.most <= card:
            log.info(f"memory: {needs}")
            if plan.most > self._free + _OWN:
                log.warning(
                    f"only {self._free / GIB:.1f} GiB of the card are free: other programs, or a display, hold the "
                    "rest; nvidia-smi and rocm-smi list them"
                )
            return
        advice = f"what helps most: {remedy(plan)}"
        if plan.least > card and memory.on_overflow == "refuse":
            where = "titan-mi100 plan --search looks for a layout that fits"
            raise UserError(f'{needs}; {advice}; {where}; memory.on_overflow = "warn" starts all the same')
        log.warning(f"{needs}; {advice}")

    def after_step(self, step: int, result: StepResult) -> None:
        self._steps += 1
        if self._steps == 1:  # not before: a run that is refused leaves its folder as it was
            self._write({})
        if self._steps != _COMPARED:
            return
        peak, worst = result.peak_memory_gib - self._before, self.plan.fullest
        planned = (worst.peak + (worst.host if self._before else 0)) / GIB
        measured: dict[str, Any] = {"step": step, "peak_memory_gib": peak, "step_seconds": result.seconds}
        scope = ", of the process" if self._before else ""
        comparisons = [f"memory {planned:.2f} GiB planned, {peak:.2f} measured ({peak / planned - 1:+.0%}{scope})"]
        if self.plan.step:
            off = result.seconds / self.plan.step - 1
            comparisons.append(f"{self.plan.step:.2f} s per step planned, {result.seconds:.2f} measured ({off:+.0%})")
            measured["mfu"] = self.mfu(result)
            comparisons.append(f"mfu {self._planned_mfu():.1%} planned, {measured['mfu']:.1%} measured")
        if self._folder is not None and self._card:  # without a card, or a limit, there is nothing that it must fit
            log.info(f"plan: {'; '.join(comparisons)}")
        self._write(measured)

    def mfu(self, result: StepResult) -> float | None:
        """A step's share of the data sheet's rate; None: the device is not known."""
        flops = self._flops(result.tokens, result.supervised, result.attention_pairs)
        return flops / result.seconds / self._peak_flops if self._peak_flops else None

    def _planned_mfu(self) -> float | None:
        return self.plan.flops / self.plan.step / self._peak_flops if self.plan.step else None

    def describe(self, measured_gib: float) -> str:
        """The plan's categories and what was measured, for when memory has run out."""
        worst = self.plan.fullest
        parts = ", ".join(f"{name} {worst.categories[name] / GIB:.2f}" for name in CATEGORIES)
        return f"planned {worst.peak / GIB:.2f} GiB ({worst.moment}): {parts}; measured so far {measured_gib:.2f} GiB"

    def _write(self, measured: dict[str, Any]) -> None:
        if self._folder is None:
            return
        plan = self.plan
        record = {
            "memory": [asdict(memory) for memory in plan.memory], "least": plan.least, "most": plan.most,
            "card": self._card, "flops": plan.flops, "sent": plan.sent, "bubble": plan.bubble,
            "step_seconds": plan.step, "mfu": self._planned_mfu(), "measured": measured,
        }  # fmt: skip
        try:
            replace(self._folder / FILE, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            log.warning(f"{self._folder / FILE}: cannot be written to: {error.strerror}")
