"""The life of a process of a run: it meets the other ranks, works in the locked run folder, and ends with an exit code.

The trainer and a teacher's pass are such processes. How each error ends them is one table, ENDINGS.
"""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from titan_mi100.checkpoint.sealed import list_checkpoints
from titan_mi100.cli import message_of
from titan_mi100.config.settings import Config
from titan_mi100.errors import ExportError, NumericalError, Preempted, SaveError, UserError, is_out_of_memory
from titan_mi100.log import log, setup_logging
from titan_mi100.open_run.run import Run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.plan import remedy
from titan_mi100.run.folder import RunFolder
from titan_mi100.run.preemption import Preemption
from titan_mi100.trainer import peak_memory_gib
from titan_mi100.watch.heartbeat import ENDED, Heartbeat
from titan_mi100.watch.outcome import INTERRUPTED, LOST, Outcome, launcher_is_told, write_run_state
from titan_mi100.wording import shortened, with_level


@dataclass
class Job:
    """What a process works with, and what its end needs to know.

    Attributes:
        again: how to start it again, for its last line.
        run: the open run; None: there is none, or not yet.
    """

    config: Config
    world: World
    folder: RunFolder
    preemption: Preemption
    heartbeat: Heartbeat
    again: str = "start again"
    run: Run | None = None


def run_process(
    config: Config, preemption: Preemption, heartbeat: Heartbeat, work: Callable[[Job], tuple[str, str]],
    of_teacher: bool = False,
) -> None:  # fmt: skip
    """Do the work and end the process with the exit code of docs/DESIGN.md.

    Args:
        work: returns the last message and what to do next, as Outcome has them.
        of_teacher: the run folder is a teacher's, see RunFolder.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder: RunFolder | None = None
    job: Job | None = None
    all_ranks = True  # every rank ends for the same reason
    setup_logging(rank)
    try:
        heartbeat.note("meeting the other ranks")
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            log.info(f"meeting the other ranks, {ranks} in all ...")
        own = config.memory.offload == "weights" or config.parallelism.powersgd_rank > 0
        world = distributed.init_distributed(has_own_collectives=own)
        folder = RunFolder(config.job, config.checkpoint.fresh, world, of_teacher)
        job = Job(config, world, folder, preemption, heartbeat)
        heartbeat.is_in(folder.path)
        message, following = work(job)
        ended = Outcome(0, message, state="done", next=following)
    except (Exception, KeyboardInterrupt) as error:
        ended, all_ranks = _ended(error, rank, job)
    if folder is not None:
        ended = ended._replace(step=folder.step)
    if all_ranks and ended.code and (rank == 0 or ended.code == 1):
        for line in ended.message.splitlines():
            (log.warning if ended.code == 3 else log.error)(line)
        log.info(ended.next)
    if all_ranks and rank == 0:
        write_run_state(folder.place() if folder else None, ended)
    elif folder is None and rank == 0:  # the launcher may have read that it is running
        write_run_state(None, ended)
    elif folder is not None and not all_ranks and folder.note_crash(ended):
        message = with_level("ERROR", ended.message) + "\n" if rank else ""  # ranks but 0 log only to a file
        print(f"{message}{ended.next}", file=sys.stderr, flush=True)
    heartbeat.note(ENDED)
    # Our launcher reads the exit code from a file. Exiting with 0 avoids torchrun's page about failed workers.
    distributed.exit_process(0 if all_ranks and launcher_is_told() else ended.code, all_ranks)


_FIX = "fix the problem above"
# Errors that end all ranks together -> state, exit code and remedy; {again}: how to start the run again.
ENDINGS: dict[type[BaseException], tuple[str, int, str]] = {
    UserError: ("bad_input", 2, f"{_FIX} and start again"),
    Preempted: ("preempted", 3, "{again}"),
    NumericalError: ("numerical_abort", 4, "{way_back}{again}"),
    ExportError: ("export_failed", 1, "{again}"),
    SaveError: ("save_failed", 1, f"{_FIX}, then {{again}}"),
}


def _ended(error: BaseException, rank: int, job: Job | None) -> tuple[Outcome, bool]:
    """How an error ends the process, and whether it ends all ranks for the same reason. Args: job: None: not yet."""
    folder, run, again = (job.folder, job.run, job.again) if job else (None, None, "start again")
    kind = next((kind for kind in ENDINGS if isinstance(error, kind)), None)
    is_alone = kind is None
    if isinstance(error, KeyboardInterrupt):
        return Outcome(1, "interrupted", state=INTERRUPTED, next=again), False
    is_full = is_alone and is_out_of_memory(error)
    if kind not in (Preempted, NumericalError) and not is_full and folder and (why := folder.moved()):
        kind, error = UserError, UserError(why)  # the error that was raised follows from it
    if kind is not None:
        state, code, remedy = ENDINGS[kind]
        way_back = _remedy_after_nan(folder, error.remedy) if isinstance(error, NumericalError) else ""
        again = error.again if isinstance(error, ExportError) else again
        ended = Outcome(code, str(error), state=state, next=remedy.format(way_back=way_back, again=again))
    elif is_full:
        if run is not None and run.profiler is not None:
            run.profiler.at_out_of_memory(folder.step if folder else None)
        planned = _what_was_planned(error, _where(rank, folder), run)
        ended = Outcome(6, planned, state="out_of_memory", next=f"take less memory; {again}")
    else:
        state = LOST if distributed.is_about_a_lost_process(error) else "crashed"
        message = message_of(error, folder.own_log() if folder else None)
        ended = Outcome(1, f"{_where(rank, folder)}: {message}", state=state, next=again)
    if is_alone:
        log.error(ended.message)
    return ended, not is_alone


def _where(rank: int, folder: RunFolder | None) -> str:
    """Which process failed and when, for the error message."""
    step = folder.step if folder else None
    when = "before the first step" if step is None else f"after step {step}"
    return f"rank {rank} on {socket.gethostname()}, {when}"


def _what_was_planned(error: BaseException, where: str, run: Run | None) -> str:
    """The error message for out of memory: what was planned, and what uses less memory."""
    planned = "while the run was opened"
    if run is not None:
        planned = f"{run.forecast.describe(peak_memory_gib(run.world.device))}; {remedy(run.forecast.plan)}"
    return f"{where}: out of memory: {planned}\n{shortened(str(error).strip(), 1000)}".rstrip()


def _remedy_after_nan(folder: RunFolder | None, remedy: str) -> str:
    """What to do after a numerical abort. Args: remedy: for its cause; "": that is not known."""
    remedy = remedy or "lower optimizer.lr, or correct the rows and allow that with checkpoint.allow_changed = data; "
    checkpoints = list_checkpoints(folder.path / "checkpoint") if folder else []
    if not checkpoints:
        return f"{remedy}no sound checkpoint was made before; "
    return f"{remedy}the run resumes from {checkpoints[-1].name}, with --checkpoint.load_step N from an earlier one; "
