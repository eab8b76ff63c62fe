"""A teacher's pass: `python -m titan_mi100.teacher --job.config_file FOLDER/teach.toml`.

`titan-mi100 teach` writes that file and starts this module.
"""

from titan_mi100.run.process_start import start_process

if __name__ == "__main__":
    started = start_process()  # before torch is imported

from titan_mi100.open_run.run import Supervision
from titan_mi100.open_run.teacher import write_teacher
from titan_mi100.process import Job, run_process

AGAIN = "start titan-mi100 teach with the same options again: it continues"


def write(job: Job) -> tuple[str, str]:
    """Write the teacher's folder, which is the run folder. Returns and raises: as of write_teacher."""
    job.again = AGAIN
    supervision = Supervision(job.heartbeat, lambda: bool(job.preemption.reason))
    return write_teacher(job.config, job.world, job.folder.path, supervision)


if __name__ == "__main__":
    run_process(*started, write, of_teacher=True)
