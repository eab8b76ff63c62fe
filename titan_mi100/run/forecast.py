"""The planned memory and time of a step: refuses a run that does not fit."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from titan_mi100.config.settings import MemoryConfig
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.log import log, write_or_say
from titan_mi100.parallel.distributed import World, data_sheet, raise_together
from titan_mi100.planning.costs import flops_of_steps
from titan_mi100.planning.memory import CATEGORIES
from titan_mi100.planning.plan import GIB, make_plan, remedy
from titan_mi100.planning.workload import Workload
from titan_mi100.trainer import StepResult

FILE = "plan.json"
_OWN = 1 << 30  # bytes that this process may hold on the card before the model: its context and libraries


class Forecast:
    """The plan of a run's memory and time. An observer of steps."""

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
        self._flops = flops_of_steps(workload.spec, config.lora, config.draft_head.train)
        self._peak_flops = tflops * 1e12 * world.size
        self._card, self._folder = card, folder if world.rank == 0 else None
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
        """Write the plan after the first step: a run that is refused leaves its folder as it was."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        plan = self.plan
        record = {
            "memory": [asdict(memory) for memory in plan.memory], "least": plan.least, "most": plan.most,
            "card": self._card, "flops": plan.flops, "sent": plan.sent, "bubble": plan.bubble,
            "step_seconds": plan.step, "mfu": plan.flops / plan.step / self._peak_flops if plan.step else None,
        }  # fmt: skip
        with write_or_say(folder / FILE):
            replace(folder / FILE, json.dumps(record, indent=1) + "\n")

    def mfu(self, result: StepResult) -> float | None:
        """A step's share of the data sheet's rate; None: the device is not known."""
        flops = self._flops(result.tokens, result.supervised, result.attention_pairs)
        return flops / result.seconds / self._peak_flops if self._peak_flops else None

    def describe(self, measured_gib: float) -> str:
        """The plan's categories and what was measured, for when memory has run out."""
        worst = self.plan.fullest
        parts = ", ".join(f"{name} {worst.categories[name] / GIB:.2f}" for name in CATEGORIES)
        return f"planned {worst.peak / GIB:.2f} GiB ({worst.moment}): {parts}; measured so far {measured_gib:.2f} GiB"
