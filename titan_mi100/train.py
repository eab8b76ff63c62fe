"""The trainer: `python -m titan_mi100.train --job.config_file X.toml`, under torchrun or alone.

`train` is the training loop; `main` runs it and exits with a code of docs/DESIGN.md. open_run/ builds everything that
the loop needs, and trainer.py runs one step.
"""

import os

from titan_mi100.config.load import config_from_command_line
from titan_mi100.log import log, setup_logging
from titan_mi100.run.preemption import Preemption
from titan_mi100.watch.heartbeat import ENDED, SAVE, Heartbeat

if __name__ == "__main__":
    preemption = Preemption()  # first: a signal to stop may arrive while torch is imported
    config = config_from_command_line()  # before torch is imported: --help and config errors are printed at once
    heartbeat = Heartbeat.of_process(config.watchdog)
    setup_logging(int(os.environ.get("RANK", "0")))
    log.info("loading torch ...")

import socket
import sys
from dataclasses import replace

from titan_mi100.checkpoint.sealed import list_checkpoints
from titan_mi100.cli import message_of
from titan_mi100.config.settings import Config
from titan_mi100.errors import ExportError, NumericalError, Preempted, SaveError, UserError, is_out_of_memory
from titan_mi100.open_run.answers import teach
from titan_mi100.open_run.record import log_summary, step_to_use
from titan_mi100.open_run.run import NO_FINITE_STEP, Run
from titan_mi100.open_run.start import SAVE_FAILED, STOP, open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import any_rank
from titan_mi100.planning.plan import remedy
from titan_mi100.run.folder import RunFolder
from titan_mi100.run.next_commands import to_export, to_resume
from titan_mi100.run.time_limit import TimeLimit, end_of_job
from titan_mi100.trainer import peak_memory_gib
from titan_mi100.watch.outcome import INTERRUPTED, LOST, RunState, launcher_is_told, write_run_state
from titan_mi100.weights.convert import export
from titan_mi100.wording import shortened, with_level


def main(config: Config, preemption: Preemption, heartbeat: Heartbeat) -> None:
    """Run the job and end the process with the exit code of docs/DESIGN.md."""
    rank = int(os.environ.get("RANK", "0"))
    folder: RunFolder | None = None
    run: Run | None = None
    again, all_ranks = "start again", True  # all_ranks: every rank ends for the same reason
    setup_logging(rank)
    try:
        heartbeat.note("meeting the other ranks")
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            log.info(f"meeting the other ranks, {ranks} in all ...")
        own = config.memory.offload == "weights" or config.parallelism.powersgd_rank > 0
        world = distributed.init_distributed(has_own_collectives=own)
        folder = RunFolder(config, world)
        heartbeat.is_in(folder.path)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        again = to_resume(folder.path, world.size, local_size)
        path, moved = folder.path, folder.moved
        run = open_run(
            config, world, path, heartbeat=heartbeat, wants_to_stop=lambda: bool(preemption.reason), moved=moved
        )
        again = to_resume(path, world.size, local_size)  # now the run's config.toml is there to start from
        run.observers += [folder, distributed.CollectiveTimeouts(run.mesh, bool(config.watchdog.seconds))]
        if rank == 0 and (end := end_of_job(os.environ)):  # the others are told by the step's collective
            run.observers.append(TimeLimit(end, preemption, run.checkpointer))
        ended = RunState("done", 0, *(teach(run) if config.objective.name == "teach" else train(run, preemption)))
    except (Exception, KeyboardInterrupt) as error:
        ended, all_ranks = _ended(error, rank, folder, run, again)
    if folder is not None:
        ended = replace(ended, step=folder.step)
    if all_ranks and ended.exit_code and (rank == 0 or ended.exit_code == 1):
        for line in ended.message.splitlines():
            (log.warning if ended.exit_code == 3 else log.error)(line)
        log.info(ended.next)
    if all_ranks and rank == 0:
        write_run_state(folder.place() if folder else None, ended)
    elif folder is None and rank == 0:  # the launcher may have read that it is running
        write_run_state(None, ended)
    elif folder is not None and not all_ranks and folder.note_crash(ended):
        message = with_level("ERROR", ended.message) + "\n" if rank else ""  # ranks but 0 log only to a file
        print(f"{message}{ended.next}", file=sys.stderr, flush=True)
    heartbeat.note(ENDED)
    # Our launcher reads the exit code from a file. Exiting with 0 avoids torchrun's page about failed workers; also if
    # the launcher was killed (preemption.py takes the file's name away then).
    was_killed = "TITAN_LAUNCHER_PID" in os.environ and "TITAN_OUTCOME" not in os.environ
    distributed.leave(0 if all_ranks and (was_killed or launcher_is_told()) else ended.exit_code, all_ranks)


_FIX = "fix the problem above"
# Errors that end all ranks together -> state, exit code and remedy; {again}: how to start the run again.
_TOGETHER: dict[type[BaseException], tuple[str, int, str]] = {
    UserError: ("bad_input", 2, f"{_FIX} and start again"),
    Preempted: ("preempted", 3, "{again}"),
    NumericalError: ("numerical_abort", 4, "{way_back}{again}"),
    ExportError: ("export_failed", 1, "{again}"),
    SaveError: ("save_failed", 1, f"{_FIX}, then {{again}}"),
}


def _ended(
    error: BaseException, rank: int, folder: RunFolder | None, run: Run | None, again: str
) -> tuple[RunState, bool]:
    """How an error ends the run, and whether it ends all ranks for the same reason. Args: again: starts it again."""
    kind = next((kind for kind in _TOGETHER if isinstance(error, kind)), None)
    is_alone = kind is None
    if isinstance(error, KeyboardInterrupt):
        return RunState(INTERRUPTED, 1, "interrupted", again), False
    is_full = is_alone and is_out_of_memory(error)
    if kind not in (Preempted, NumericalError) and not is_full and folder and (why := folder.moved()):
        kind, error = UserError, UserError(why)  # the error that was raised follows from it
    if kind is not None:
        state, code, remedy = _TOGETHER[kind]
        way_back = _remedy_after_nan(folder, error.remedy) if isinstance(error, NumericalError) else ""
        again = error.again if isinstance(error, ExportError) else again
        ended = RunState(state, code, str(error), remedy.format(way_back=way_back, again=again))
    elif is_full:
        if run is not None and run.profiler is not None:
            run.profiler.at_out_of_memory(folder.step if folder else None)
        planned = _what_was_planned(error, _where(rank, folder), run)
        ended = RunState("out_of_memory", 6, planned, f"take less memory; {again}")
    else:
        state = LOST if distributed.is_about_a_lost_process(error) else "crashed"
        message = message_of(error, folder.own_log() if folder else None)
        ended = RunState(state, 1, f"{_where(rank, folder)}: {message}", again)
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


def train(run: Run, preemption: Preemption) -> tuple[str, str]:
    """From the first step to the last checkpoint and the export. All ranks take the same way through it.

    Returns:
        Why the run has ended before its last step ("": it has not), and how to train on.

    Raises:
        Preempted, NumericalError, SaveError, ExportError: on all ranks; everything that could be saved was.
    """
    progress, settings = run.progress, run.config.checkpoint
    saved = progress.step
    if progress.validation_due and run.validate() and run.keeps_best:
        run.checkpointer.mark_best(progress.step)
    stopping = any_rank(preemption.reason, run.world.device)
    if not (run.is_finished or stopping):
        slow = "" if run.world.device.type == "cpu" else ", which also chooses and loads kernels"
        slow = ", which also compiles the model: minutes at times" if run.config.compile.enable else slow
        log.info(f"training: step {progress.step + 1} of {run.steps}{slow} ...")
    try:
        while not (run.is_finished or stopping):
            result = run.step()
            is_best = run.validates and run.validate() and run.keeps_best
            if SAVE_FAILED in result.flags:
                run.checkpointer.wait()  # raises what went wrong
            stopping = STOP in result.flags or progress.validation_due
            # After a skipped step the weights may be bad, so they are not saved now.
            is_due = run.is_finished or (run.is_due(settings.interval) and not result.skipped)
            if stopping or is_best or is_due:
                run.save()
                saved = progress.step
        if saved == progress.step and run.is_finished and not stopping:
            run.judge_last_save()
    except NumericalError:
        run.checkpointer.judge(NO_FINITE_STEP)  # has no effect if a step since the last save was finite
        run.close()
        raise
    except SaveError:
        run.close()
        raise
    run.close()
    if stopping and (not run.is_finished or progress.validation_due):
        why = preemption.reason or "another process was told to stop"
        where = f"all steps are saved in step-{saved}" if saved else "nothing was trained yet"
        raise Preempted(f"{why}: stopped after step {progress.step} of {run.steps}; {where}")
    assert run.folder is not None
    message, remedy = "", "to train on, raise training.steps or epochs"
    if progress.step < run.steps:
        message = progress.describe_early_stop(run.steps)
        remedy = "to train on, raise validation.patience, or set it to 0"
        log.info(message)
    step = step_to_use(run.folder, run.config.validation, progress)
    run.heartbeat.begin(SAVE, "export")
    run.check_folder()
    if settings.export_hf:
        try:
            export(run.folder, step, settings.export_dtype, run.config.lora, run.world.rank)
        except (UserError, SaveError) as error:
            again = f"fix the problem above, then {to_export(run.folder, step, settings.export_dtype)}"
            raise ExportError(f"all steps are saved, but there is no export: {error}", again) from None
    if run.world.rank == 0:
        log_summary(run.folder, run.config, progress, step, run.measured)
    return message, remedy


if __name__ == "__main__":
    main(config, preemption, heartbeat)
