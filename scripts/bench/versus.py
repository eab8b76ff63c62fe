"""Our step and TRL's: the same weights, data and optimizer, step by step in turn; ratios of tokens/s, and memory.

    python scripts/bench/versus.py [--model 103m 281m 281m-4096] [--rounds 5] [--processes 1] [--dtype float32]
    ... --unpacked 4 8               # TRL also with batches of 4 and of 8 documents, not packed, grouped by length
    ... --python OTHER/bin/python    # an environment that has trl, datasets and this package's dependencies

Each side is a job of its own; while one takes a step the others wait. `ratio` is the median of the ratios pair by pair.
TRL's fastest setting is in bold. Tokens are counted without padding. On a CPU the threads are shared out among the
processes. TRL runs as it comes: SFTTrainer, its own loss in chunks, AdamW fused, DDP where there are several processes;
once padding-free, with rows whose documents are apart, and once unpacked.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from versus_worker import MODELS

from titan_mi100.cli import exit_code
from titan_mi100.errors import UserError

OURS, TRL = SIDES = ("ours", "trl")
_WORKER = Path(__file__).with_name("versus_worker.py")
GRACE = 45  # seconds in which a job that is told to end may do so: torchrun gives its workers 30


class Side:
    """A job that takes steps when it is told to."""

    def __init__(self, name: str, options: argparse.Namespace, model: str, folder: Path, stack: ExitStack) -> None:
        asks, answers = folder / f"{name}.asks", folder / f"{name}.answers"
        os.mkfifo(asks)
        os.mkfifo(answers)
        keys = ("seq", "batch", "accumulation", "dtype", "checkpointing", "zero_stage", "trl_attention", "cpu_time")
        side, _, unpacked = name.partition(" unpacked ")
        given = {key: getattr(options, key) for key in keys} | {"compile": side in options.compile}
        given |= {
            "model": model,
            "steps": options.rounds + 1,
            "folder": str(folder / name),
            "unpacked": int(unpacked or 0),
        }
        python = options.python if side == TRL else sys.executable
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.processes}"]
        command = [python, *(torchrun if options.processes > 1 else []), str(_WORKER), side]
        command += ["--asks", str(asks), "--answers", str(answers), "--options", json.dumps(given)]
        threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
        self._log = folder / f"{name}.log"
        log = stack.enter_context(self._log.open("w"))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(_WORKER.parents[2])}
        self._job = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        stack.callback(self._end)
        # both ends at once, so that neither waits for a job that has ended
        self._asks = stack.enter_context(os.fdopen(os.open(asks, os.O_RDWR), "w", buffering=1))
        self._answers = stack.enter_context(os.fdopen(os.open(answers, os.O_RDWR)))

    def ask(self) -> dict[str, Any]:
        """For a step, or after the last one for the losses. One answer at a time is on its way."""
        print(file=self._asks)
        while not select.select([self._answers], [], [], 1)[0]:
            if self._job.poll() is not None:
                last = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
                raise UserError(f"the job of {self._log.stem} ended with code {self._job.returncode}:\n{last}")
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def _end(self) -> None:
        self._job.terminate()
        try:
            self._job.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._job.kill()
            self._job.wait()


def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Tokens per second of all sides, step by step in turn; the first step of each is a warm-up."""
    every = [*SIDES, *(f"{TRL} unpacked {batch}" for batch in options.unpacked)]
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in every}
    losses = {}
    for names in ([name] for name in every) if options.apart else (every,):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides = {name: Side(name, options, model, folder, stack) for name in names}
            for number in range(options.rounds + 1):
                for name in names if number % 2 else names[::-1]:
                    taken[name].append(sides[name].ask())
            losses |= {name: side.ask()["losses"] for name, side in sides.items()}
    speeds = {name: [took["tokens_per_second"] for took in steps[1:]] for name, steps in taken.items()}
    ratios = {name: [a / b for a, b in zip(speeds[OURS], speeds[name], strict=True)] for name in every[1:]}
    middle = {name: statistics.median(found) for name, found in ratios.items()}
    return {
        "model": model,
        "tokens_per_second": {name: statistics.median(speed) for name, speed in speeds.items()},
        "ratios": ratios,
        "ratio": middle,
        "fastest": min(middle, key=lambda name: middle[name]),
        "peak_gib": {name: steps[-1]["peak_gib"] for name, steps in taken.items()},
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["103m", "281m", "281m-4096"], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of steps")
    parser.add_argument("--processes", type=int, default=1, help="of each side")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1, help="rows per process and forward")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--unpacked", nargs="*", type=int, default=[8], help="documents per batch of TRL, unpacked")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="recompute nothing")
    parser.add_argument("--compile", nargs="+", default=[], choices=SIDES, help="the sides that use torch.compile")
    parser.add_argument("--zero_stage", type=int, default=-1, help="of our side; 0 is DDP, as TRL's")
    parser.add_argument("--apart", action="store_true", help="one side after the other: all at once need more memory")
    parser.add_argument("--trl_attention", default="sdpa", help="attn_implementation of transformers")
    parser.add_argument("--cpu_time", action="store_true", help="seconds of CPU: on a busy machine, with one thread")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for TRL's side")
    parser.add_argument("--json", action="store_true", help="a JSON object per model instead of a table")
    options = parser.parse_args()
    if not options.json:
        print("| model | side | tok/s | ours / TRL (range) | peak GiB | loss, first and last |")
        print("|---" * 6 + "|", flush=True)
    for model in options.model:
        found = measure(options, model)
        print(json.dumps(found) if options.json else "\n".join(_lines(found)), flush=True)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for name, losses in found["losses"].items():
        ratios = found["ratios"].get(name)
        ratio = f"{found['ratio'][name]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        side = f"**{name}**" if name == found["fastest"] else name
        speed, peak = found["tokens_per_second"][name], found["peak_gib"][name]
        cells = [found["model"], side, f"{speed:,.0f}", ratio, f"{peak:.2f}", f"{losses[0]:.4f}, {losses[-1]:.4f}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(exit_code(main))
