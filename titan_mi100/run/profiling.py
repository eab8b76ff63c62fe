"""Profiles of chosen steps: Chrome traces, and snapshots of a GPU's memory. See docs/REPORT.md."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, schedule

from titan_mi100.config.settings import TRACED_STEP, ProfilingConfig
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.log import log, write_or_say
from titan_mi100.parallel.distributed import World, any_rank
from titan_mi100.run.next_commands import command, shown_path

_MOST_ENTRIES = 100_000  # allocations and frees that are remembered


def open_profiler(folder: Path, config: ProfilingConfig, world: World, last: int) -> "Profiler | None":
    """None: nothing is to be profiled. Args: as Profiler's. Raises UserError, on all ranks."""
    if not config.enable_profiling and not config.enable_memory_snapshot:
        return None
    if config.enable_memory_snapshot and not accelerator.is_cuda(world.device):
        reason = "needs a GPU: torch keeps no history of a CPU's memory; set it to false"
        raise UserError(f"[profiling] enable_memory_snapshot = true {reason}")
    return Profiler(folder, config, world, last)


class Profiler:
    """The profiler of one rank. Steps that are not to be traced run without it."""

    def __init__(self, folder: Path, config: ProfilingConfig, world: World, last: int) -> None:
        """Start recording allocations, if snapshots are enabled. Args: last: the run's last step."""
        self._folder, self._config, self._world, self._last = folder, config, world, last
        self._is_chosen_rank = world.rank in config.profile_ranks
        self._warm: profile | None = None
        if config.enable_memory_snapshot:
            self._write_allocations = accelerator.remember_allocations(_MOST_ENTRIES)
        if config.enable_profiling and not any(map(self.traces, range(1, last + 1))):
            log.warning(f"[profiling] none of the steps to trace is among the run's {last}: nothing will be traced")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace what happens inside, if this is a chosen step. The step before a chosen one warms the profiler up."""
        if self.traces(step):
            if self._is_chosen_rank:
                yield from self._traced(step)
                if self._config.enable_memory_snapshot:
                    self.write_snapshot(f"step-{step}")
            else:
                yield
            # Synchronise all ranks, or the time for writing the trace would be part of the other ranks' next step.
            # wait_for_all is not used, as its ranks sleep for up to two seconds. The default group has a long time-out.
            any_rank(False, self._world.device)
            ranks = self._config.profile_ranks
            summary = command("profile", shown_path(self._trace(step, ranks[0])))
            log.info(f"step {step}: traces of rank {', '.join(map(str, ranks))}; where its time went: {summary}")
            return
        if self._is_chosen_rank and self.traces(step + 1) and step < self._last:
            self._warm = self._profile(schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
            self._warm.start()
        yield

    def at_out_of_memory(self, step: int | None) -> None:
        """Write a snapshot, whatever rank this is. Args: step: the last finished one."""
        if self._config.enable_memory_snapshot:
            with suppress(Exception):  # the run ends with the message about memory, not with one about this
                self.write_snapshot(f"step-{step or 0}-out-of-memory")

    def write_snapshot(self, name: str) -> None:
        """Write current and recent allocations, for pytorch.org/memory_viz."""
        path = self._folder / self._config.save_memory_snapshot_folder / name / f"rank-{self._world.rank}.pickle"
        with write_or_say(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write_allocations(str(path))
            log.info(f"memory snapshot: {path}")

    def traces(self, step: int) -> bool:
        """Whether the config asks for a trace of this step, on some ranks."""
        config = self._config
        if not config.enable_profiling:
            return False
        return step in config.profile_steps if config.profile_steps else step % config.profile_freq == 0

    def _trace(self, step: int, rank: int) -> Path:
        return self._folder / self._config.save_traces_folder / f"step-{step}" / f"rank-{rank}.json.gz"

    def _profile(self, **options: Any) -> profile:
        return profile(activities=accelerator.activities(self._world.device), acc_events=True, **options)

    def _traced(self, step: int) -> Iterator[None]:
        accelerator.synchronize(self._world.device)  # kernels of the step before must not appear in this one's trace
        tracer, self._warm = self._warm, None
        if tracer is not None:
            tracer.step()
        else:
            tracer = self._profile()
            tracer.start()
        with record_function(f"{TRACED_STEP}{step}"):
            yield
        accelerator.synchronize(self._world.device)
        tracer.stop()
        path = self._trace(step, self._world.rank)
        with write_or_say(path, log.error):  # a full disk does not end the run
            path.parent.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(path))
