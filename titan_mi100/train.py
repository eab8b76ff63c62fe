"""The trainer: `python -m titan_mi100.train --job.config_file X.toml`, under torchrun or alone.

`train` is the training loop; `main` runs it and exits with a code of docs/DESIGN.md. open_run/ builds everything that
the loop needs, and trainer.py runs one step.
"""

from titan_mi100.run.process_start import start_process

if __name__ == "__main__":
    started = start_process()  # before torch is imported

import os

from titan_mi100.config.settings import Config
from titan_mi100.errors import ExportError, NumericalError, Preempted, SaveError, UserError
from titan_mi100.log import log
from titan_mi100.open_run.run import NO_FINITE_STEP, Run, Supervision
from titan_mi100.open_run.start import SAVE_FAILED, STOP, open_run
from titan_mi100.open_run.summary import log_summary, step_to_use
from titan_mi100.parallel.distributed import any_rank
from titan_mi100.process import Job, run_process
from titan_mi100.run.next_commands import to_export, to_resume
from titan_mi100.run.preemption import Preemption
from titan_mi100.run.time_limit import TimeLimit, end_of_job
from titan_mi100.watch.heartbeat import SAVE, Heartbeat
from titan_mi100.weights.convert import export


def main(config: Config, preemption: Preemption, heartbeat: Heartbeat) -> None:
    """Run the job and end the process with the exit code of docs/DESIGN.md."""
    run_process(config, preemption, heartbeat, open_and_train)


def open_and_train(job: Job) -> tuple[str, str]:
    """Open the run and train it to its end. Returns and raises: as of train."""
    path, size = job.folder.path, job.world.size
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    job.again = to_resume(path, size, local_size)
    supervision = Supervision(job.heartbeat, lambda: bool(job.preemption.reason), job.folder.moved)
    job.run = run = open_run(job.config, job.world, path, supervision)
    job.again = to_resume(path, size, local_size)  # now the run's config.toml is there to start from
    run.observers.append(job.folder)
    if job.world.rank == 0 and (end := end_of_job(os.environ)):  # the others are told by the step's collective
        run.observers.append(TimeLimit(end, job.preemption, run.checkpointer))
    return train(run, job.preemption)


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
    if not (progress.step or stopping):
        run.log_drafts("before")
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
    if run.is_finished and not stopping:
        run.log_drafts("after")
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
    run.supervision.heartbeat.begin(SAVE, "export")
    run.check_folder()
    if settings.export_hf:
        try:
            export(run.folder, step, settings.export_dtype, run.config.lora, run.world.rank)
        except (UserError, SaveError) as error:
            again = f"fix the problem above, then {to_export(run.folder, step, settings.export_dtype)}"
            raise ExportError(f"all steps are saved, but there is no export: {error}", again) from None
    if run.world.rank == 0:
        log_summary(run, step)
    return message, remedy


if __name__ == "__main__":
    main(*started)
