"""A measurement's job of several processes: a script under torchrun, and how it ends."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

GRACE = 45  # seconds in which a job that is told to end may do so: torchrun gives its workers 30


def environment() -> dict[str, str]:
    """One thread per process, unless told otherwise: the processes share the cores."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def run(script: Path, arguments: list[str], processes: int, timeout: float | None = None) -> tuple[int, str]:
    """Run the script to its end; its exit code and what it said on stderr.

    Raises:
        TimeoutError: it took longer; nothing of it is left.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    job = subprocess.Popen(
        [*torchrun, str(script), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(),
    )
    try:
        _, errors = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no end after {timeout:g} s") from None
    finally:
        _end(job)
    return job.returncode, errors


def _end(job: subprocess.Popen[str]) -> None:
    """End a job that still runs: by its torchrun, whose workers end with it."""
    if job.poll() is None:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=GRACE)
        job.kill()
        job.wait()
