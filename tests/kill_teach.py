"""Kills `titan-mi100 teach` at random moments and starts it again: the folder must be as if nobody had disturbed it.

Byte for byte, with nothing left beside it.

    python tests/kill_teach.py [--kills 14] [--seed 0] [--folder WORK]

A kill takes the launcher alone, the trainer alone, or all processes. Takes about a minute a kill on two busy cores.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parents[1]
PROGRAM = str(Path(sys.executable).with_name("titan-mi100"))
CONFIG = [*("--job.config_file", str(REPO / "train_configs" / "debug.toml"))]
ROWS = ["--training.seq_len", "64", "--training.local_batch_size", "4", "--model.attention_backend", "sdpa"]
_LIMIT = 300.0  # seconds that a start may take


def environment(work: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "XDG_CACHE_HOME": str(work / "cache")}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1"}


def run(work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(
        [PROGRAM, *words], cwd=work, env=environment(work), capture_output=True, text=True, timeout=_LIMIT
    )


def make_model(work: Path) -> None:
    """A model of three steps, which is the teacher."""
    done = run(
        work, "train", *CONFIG, "--job.run_folder", "model", "--training.steps", "3", "--training.local_batch_size", "4"
    )
    assert done.returncode == 0, done.stderr


def teach(out: Path) -> list[str]:
    return [
        "teach",
        *CONFIG,
        "--model",
        "model/checkpoint/step-3",
        "--out",
        str(out),
        "--top_k",
        "8",
        "--nproc_per_node",
        "1",
        *ROWS,
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith((".safetensors", "store.json"))
    }


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(word) for word in found.read_text().split()] if found.exists() else []
    return [*own, *(each for child in own for each in children(child))]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_once(work: Path, out: Path, after: float, who: str) -> str:
    """Start it, and kill it after so many seconds; how it ended."""
    process = subprocess.Popen(
        [PROGRAM, *teach(out)], cwd=work, env=environment(work), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(after)
        return "ended before"
    except subprocess.TimeoutExpired:
        pass
    below = children(process.pid)
    trainers = [each for each in below if b"titan_mi100.teacher" in command_of(each)]
    targets = {"launcher": [process.pid], "trainer": trainers or below[-1:], "all": [process.pid, *below]}[who]
    for target in targets or [process.pid]:
        try:
            os.kill(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return ended(process, below)


def ended(process: subprocess.Popen[bytes], below: list[int]) -> str:
    """How a killed command has ended, when none of its processes is left."""
    process.wait(_LIMIT)
    until, stats = time.monotonic() + 60, [Path(f"/proc/{each}/stat") for each in below]
    while any(stat.exists() and " Z " not in stat.read_text() for stat in stats):
        assert time.monotonic() < until, "a process of the killed command is left"
        time.sleep(0.1)
    return f"exit {process.returncode}"


def read_options(description: str, kills: int) -> tuple[argparse.Namespace, Path]:
    """The options, and the folder to work in."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="work here, and keep it")
    options = parser.parse_args()
    work = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    work.mkdir(parents=True, exist_ok=True)
    return options, work


def main() -> int:
    options, work = read_options(__doc__.splitlines()[0], 14)
    draw, failures = random.Random(options.seed), 0
    if not (work / "model").exists():
        make_model(work)
    shutil.rmtree(work / "undisturbed", ignore_errors=True)
    started = time.monotonic()
    done = run(work, *teach(work / "undisturbed"))
    assert done.returncode == 0, done.stderr
    seconds, wanted = time.monotonic() - started, content(work / "undisturbed")
    print(f"undisturbed: {seconds:.0f} s, {len(wanted) - 1} parts", flush=True)
    assert len(wanted) > 2
    for number in range(options.kills):
        out = work / f"killed-{number}"
        shutil.rmtree(out, ignore_errors=True)
        said = []
        for _ in range(draw.choice((1, 1, 2))):
            after, who = draw.uniform(0.02, 1.1) * seconds, draw.choice(("launcher", "trainer", "all"))
            said.append(f"{who} after {after:.1f} s: {kill_once(work, out, after, who)}")
        parts = len(list(out.glob("part-*"))) if out.exists() else 0
        done = run(work, *teach(out))
        found = content(out) if out.exists() else {}
        left = (
            [path.name for path in out.iterdir() if path.name.startswith(".") and path.name != ".lock"]
            if out.exists()
            else []
        )
        is_raw = "Traceback" in done.stderr or "unexpected error" in done.stderr
        verdict = "equal" if (found == wanted and not done.returncode and not left and not is_raw) else "DIFFERS"
        failures += verdict != "equal"
        print(f"{number}: {'; '.join(said)}; {parts} parts were there; {verdict} {left}", flush=True)
        if verdict != "equal":
            print(done.stdout[-2000:], done.stderr[-2000:], sorted(found), sep="\n", flush=True)
        else:
            shutil.rmtree(out)
    print(f"{options.kills} kills, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
