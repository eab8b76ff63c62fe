"""The rows of run.py that are whole runs: killed, told to stop, resumed, moved to other layouts, given NaN."""

import atexit
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from chaos.case import Case, Outcome
from conftest import ASSETS, MINIMAL, REPO, job_environment
from parity import table as parity

from titan_mi100.checkpoint import sealed

WORKER = Path(__file__).with_name("worker.py")
CONFIG = f"""{MINIMAL}seq_len = 128
gradient_accumulation_steps = 2
mixed_precision_param = "float32"
[optimizer]
lr = 2e-3
[lr_scheduler]
decay_type = "constant"
warmup_steps = 1
[checkpoint]
keep_latest_k = 0
[metrics]
enable_tensorboard = false
"""
POWERSGD = {"zero_stage": 0, "powersgd_rank": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **parity.LAYOUTS,
    "one process": (1, {}),
    "PowerSGD x2": (2, {**POWERSGD, "powersgd_start_step": 2}),
    "PowerSGD x2, cold, from step 5": (2, {**POWERSGD, "powersgd_start_step": 5, "powersgd_warm_start": "false"}),
}
ASYNC = ("--checkpoint.async_mode", "async")
PATIENCE = 240  # seconds for a run to end
GONE = 45  # seconds for its processes to be gone; without their launcher they have 30


@functools.cache
def session() -> Path:
    """A folder for what the cases share: prepared data, runs to compare with, and a run_train.sh with our worker."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-session-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "small.toml").write_text(CONFIG)
    few = (ASSETS / "arithmetic.jsonl").read_text().splitlines(keepends=True)[:30]
    (folder / "few.jsonl").write_text("".join(few))  # some twenty rows
    script = (REPO / "run_train.sh").read_text()
    launch = folder / "launch.py"
    main = f"sys.exit(launcher.main(sys.argv[1:], program=({str(WORKER)!r},)))"
    launch.write_text(f"import sys\n\nfrom titan_mi100.launch import launcher\n\n{main}\n")
    for mine, others in ((r"^REPO=.*", f"REPO='{REPO}'"), (r"-m titan_mi100\.launch\.launcher\b", f"'{launch}'")):
        script, replaced = re.subn(mine, others, script, flags=re.MULTILINE)
        assert replaced == 1, f"run_train.sh has {mine} {replaced} times"
    (folder / "run_train.sh").write_text(script)
    (folder / "run_train.sh").chmod(0o755)
    return folder


class Job:
    """A run in real processes. All of them have a mark in their environment, by which they are found."""

    def __init__(self, run_folder: Path, layout: str, *arguments: str, by_script: bool = False, **plan: Any) -> None:
        """Start it.

        Args:
            by_script: with run_train.sh instead of torchrun; a layout of one process needs neither.
            plan: `actions` and other things for worker.py.
        """
        self.processes, parallelism = LAYOUTS[layout]
        degrees = [word for key, value in parallelism.items() for word in (f"--parallelism.{key}", str(value))]
        given = ["--job.config_file", str(session() / "small.toml"), "--job.run_folder", str(run_folder)]
        own = uuid.uuid4().hex[:12]
        self.folder, self._mark = run_folder, f"CHAOS_JOB={own}".encode()
        self._events, self._output = (run_folder.with_name(f"{kind}-{own}") for kind in ("events", "output"))
        workers = [str(WORKER), *given, *degrees, *arguments]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += [f"--nproc_per_node={self.processes}", *workers]
        if by_script:
            command = [str(session() / "run_train.sh"), f"--nproc_per_node={self.processes}", *workers[1:]]
        elif self.processes == 1:
            command = [sys.executable, *workers]
        environment = {
            **job_environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPO),
            "XDG_CACHE_HOME": str(session() / "cache"),
            "CHAOS_JOB": own,
            "CHAOS": json.dumps({"events": str(self._events), **plan}),
        }
        run_folder.parent.mkdir(exist_ok=True)
        with self._output.open("wb") as output:
            self.launcher = subprocess.Popen(
                command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def end(self, patience: float = PATIENCE) -> int:
        """Wait until nothing is left of it; the launcher's exit code.

        Raises:
            TimeoutError: something is.
        """
        try:
            code = self.launcher.wait(patience)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end after {patience} s: {self.said()}") from None
        until = time.monotonic() + GONE
        while left := self._left():
            if time.monotonic() > until:
                raise TimeoutError(f"{len(left)} orphans: {self.said()}")
            time.sleep(0.1)
        return code

    def wait_for(self, event: str, number: int) -> None:
        """Until rank 0 has come to it."""
        until = time.monotonic() + PATIENCE
        while (0, event, number) not in self.events():
            if time.monotonic() > until or self.launcher.poll() is not None:
                raise TimeoutError(f"it did not come to {event} {number}: {self.said()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End whatever is left of it."""
        for _ in range(3):  # what was being started while we looked
            for process in self._left():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.launcher.wait()

    def _left(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # gone, or another user's
                if self._mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def events(self) -> list[tuple[int, str, int]]:
        """(rank, event, number) in their order; a line that a kill has cut is none."""
        text = self._events.read_text(errors="replace") if self._events.exists() else ""
        return [(int(r), name, int(n)) for r, name, n in re.findall(r"^(\d+) (\S+) (\d+)\n", text, re.MULTILINE)]

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def said(self) -> str:
        """Its last words, but not torchrun's page about its workers."""
        return " | ".join(self.output().partition("torch/distributed/elastic")[0].splitlines()[-6:])[-600:]

    def state(self) -> dict[str, Any]:
        path = self.folder / "run_state.json"
        return json.loads(path.read_text()) if path.exists() else {}


class Trial:
    """A case under way: its folder, its processes, what was tried and what did not hold."""

    def __init__(self, folder: Path, without: tuple[str, ...]) -> None:
        self._without, self._jobs = without, list[Job]()
        self.run_folder, self.tried, self.wrong = folder / "run", 0, list[str]()
        self.figures = dict[str, Any]()

    def start(self, layout: str, *arguments: str, **plan: Any) -> Job:
        self._jobs.append(Job(self.run_folder, layout, *arguments, without=self._without, **plan))
        return self._jobs[-1]

    def finish(self, layout: str, *arguments: str, **plan: Any) -> Job:
        """A run that should come to its end."""
        job = self.start(layout, *arguments, **plan)
        code = job.end()
        self.check((code, job.state().get("state")) == (0, "done"), f"ended with code {code}: {job.said()}")
        return job

    def check(self, holds: bool, words: str) -> None:
        if not holds:
            self.wrong.append(words)

    def clear(self) -> None:
        for job in self._jobs:
            job.kill()


def case(name: str, story: Callable[..., None], *arguments: Any, **options: Any) -> Case:
    """A story becomes a case: nothing of it is left, and whatever stops it is something wrong."""

    def run(folder: Path, without: tuple[str, ...]) -> Outcome:
        trial = Trial(folder, without)
        try:
            story(trial, *arguments, **options)
        except Exception as error:  # a product that is broken anyhow
            trial.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            trial.clear()
        return Outcome(max(trial.tried, 1), trial.wrong, trial.figures)

    return Case(name, run)


@functools.cache
def uninterrupted(layout: str, *arguments: str) -> Path:
    """The folder of a run that nothing happened to; made once."""
    job = Job(session() / uuid.uuid4().hex / "run", layout, *arguments)
    try:
        code = job.end()
    finally:
        job.kill()
    if code:
        raise RuntimeError(f"without anything going wrong, code {code}: {job.said()}")
    return job.folder


def checkpoints(run_folder: Path) -> dict[int, Path]:
    return {sealed.step_of(path): path for path in sealed.list_checkpoints(run_folder / "checkpoint")}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name in their order."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is
    reader = dcp.FileSystemReader(path)
    saved: dict[str, Any] = dict(sorted(reader.read_metadata().state_dict_metadata.items()))
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def sha_of(path: Path) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors_of(path).items():
        found.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Without what a clock or a memory said."""
    path = run_folder / "metrics.jsonl"
    entries = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    kept = ("step", "loss", "grad_norm", "validation_loss", "lr", "tokens", "supervised_tokens", "skipped")
    return [{key: entry[key] for key in kept if key in entry} for entry in entries]


def steps_of(run_folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in metrics(run_folder) if "loss" in entry]


# Row 1


def kills(quick: bool) -> Iterator[Case]:
    layouts = ("FSDP2 x2", "DDP x2", "PP2 1F1B", "TP2", "HSDP 2x2")
    stories = [("FSDP2 x2", "async")] if quick else list(itertools.product(layouts, ("disabled", "async")))
    # from 110: of the first story's three, a step kills rank 1, a save rank 0, a load the launcher
    for number, (layout, mode) in enumerate(stories, start=110):
        yield case(f"{layout}, async_mode {mode}", killed, layout, mode, 3 if quick else 10, random.Random(number))
    for layout, name in () if quick else (("FSDP2 x2", "preference"), ("PP2 1F1B", "preference"), ("TP2", "distill")):
        yield case(f"{layout}, {name}", killed, layout, "disabled", 5, random.Random(len(layout)), objective(name))
    for layout, name in () if quick else (("FSDP2 x2", "experts"), ("TP2", "adapters of experts")):
        yield case(f"{layout}, {name}", killed, layout, "async", 6, random.Random(len(name)), EXPERTS[name])


EXPERTS: dict[str, tuple[str, ...]] = {
    "experts": ("--model.flavor", "moe-debug", "--training.train_router", "true"),
    "adapters of experts": (
        *("--model.flavor", "moe-debug", "--lora.rank", "4", "--lora.target_modules", "q_proj", "experts"),
        *("--lora.expert_rank", "2", "--lora.dropout", "0.1", "--optimizer.state", "8bit"),
    ),
}


def objective(name: str) -> tuple[str, ...]:
    """The arguments of a run that learns from pairs of answers, or from a teacher; their data are made once."""
    pairs, teacher = session() / "pairs.jsonl", session() / "teacher"
    if name == "preference":
        rows = [{"prompt": f"{i} + 7?", "chosen": str(i + 7), "rejected": str(i)} for i in range(200)]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ("--objective.name", name, "--data.path", str(pairs))
    if not teacher.exists():
        model = checkpoints(uninterrupted("one process", "--training.steps", "4"))[4]
        words = [
            "teach",
            "--job.config_file",
            session() / "small.toml",
            "--model",
            model,
            "--out",
            teacher,
            "--top_k",
            "8",
        ]
        subprocess.run([sys.executable, "-m", "titan_mi100", *map(str, words), "--nproc_per_node", "1"], check=True,
                       cwd=REPO, env={**job_environment(), "XDG_CACHE_HOME": str(session() / "cache")})  # fmt: skip
    return ("--objective.name", name, "--objective.teacher", str(teacher))


def killed(trial: Trial, layout: str, mode: str, times: int, dice: random.Random, more: tuple[str, ...] = ()) -> None:
    """A run is killed so many times, and goes on each time; then it comes to its end."""
    steps = 6 + 8 * times
    arguments = ("--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "2", "--training.steps", str(steps))
    arguments += more
    expected = uninterrupted(layout, *arguments)
    arguments += ("--checkpoint.async_mode", mode)
    while trial.tried < times:
        here = checkpoints(trial.run_folder)
        phase = ("step", "save", "load")[trial.tried % 3]
        at, number = dice.choice(("step", "stepped")), dice.randint(2, 4)
        if phase == "save":
            at = dice.choice(("save", "write", "written", "seal") + (("remove",) if len(here) > 1 else ()))
            number = dice.randint(1, 2)
        elif phase == "load":
            at, number = dice.choice(("load", "loaded") if here else ("build",)), 1
        whom, delay = dice.choice((0, 1, 0, 1, "launcher")), dice.choice((0.0, dice.uniform(0.0, 0.05)))
        if more and trial.tried == 0:  # while the reference is read, or the weights
            at, number, delay = "build", 1, dice.uniform(0.2, 1.0)
        does = f"kill {trial.tried + 1}, of {whom} at {at} {number} + {1000 * delay:.0f} ms"
        job = trial.start(layout, *arguments, actions=[
            {"at": at, "number": number, "do": "KILL", "to": whom, "delay": delay}
        ])  # fmt: skip
        job.end()
        events = job.events()
        if not any(name == "does" for _, name, _ in events):
            trial.check(job.state().get("state") == "done", f"{does}: ended before it: {job.said()}")
            break
        trial.tried += 1
        removed = {step for _, name, step in events if name == "remove"}
        left = checkpoints(trial.run_folder)
        lost = {*here, *(step for _, name, step in events if name == "sealed")} - removed - set(left)
        trial.check(not lost, f"{does}: lost {sorted(lost)}")
        for path in left.values():
            try:
                sealed.verify(path)
            except sealed.DamagedError as error:
                trial.wrong.append(f"{does}: {error}")
    trial.finish(layout, *arguments)
    aside = sealed.damaged(trial.run_folder / "checkpoint")
    trial.check(not aside, f"set aside as damaged: {[path.name for path in aside]}")
    trial.check(steps_of(trial.run_folder) == steps_of(expected), "metrics.jsonl is not as uninterrupted")
    shas = [sha_of(checkpoints(folder)[steps]) for folder in (trial.run_folder, expected)]
    trial.check(shas[0] == shas[1], f"final SHA {shas[0][:12]}, uninterrupted {shas[1][:12]}")


# Row 6

PHASES = {
    "step": (("step", 4), ("stepped", 4)),
    "save": (("save", 1), ("write", 2), ("written", 1)),
    "validation": (("validate", 1), ("validate", 2)),
    "warm-up": (("import", 1), ("start", 1), ("build", 1)),
}


def signals(quick: bool) -> Iterator[Case]:
    whom = ("every rank", "one rank", "launcher", "script")
    every = [
        (name, phase, to)
        for name, phase, to in itertools.product(("TERM", "USR1"), PHASES, whom)
        if (name, to) != ("USR1", "launcher")  # torchrun does not know it, and dies
    ]
    every += [("INT", phase, "script") for phase in ("step", "save", "validation")]  # the first Ctrl-C
    told = [("FSDP2 x2", *how) for how in every] + [("PP2 1F1B", *how) for how in every[: 50 - len(every)]]
    if quick:
        some = zip(("TERM", "USR1", "TERM", "USR1"), PHASES, whom, strict=True)
        told = [("FSDP2 x2", *how) for how in (*some, ("INT", "step", "script"))]
    for number, (layout, name, phase, to) in enumerate(told):
        yield case(f"{layout}: {name} to {to} in {phase}", stopped, layout, name, phase, to, random.Random(number))


def stopped(trial: Trial, layout: str, name: str, phase: str, to: str, dice: random.Random) -> None:
    """A run is told to stop, saves and stops."""
    # torchrun passes it on to ranks that do not listen yet; the script does not
    at, number = dice.choice(PHASES[phase][to == "launcher" and phase == "warm-up" :])
    action = {"at": at, "number": number, "do": name, "delay": dice.choice((0.0, dice.uniform(0.0, 0.03)))}
    ranks = range(LAYOUTS[layout][0]) if to == "every rank" else [1] if to == "one rank" else [0]
    job = trial.start(
        layout, "--training.steps", "60", "--checkpoint.interval", "3", "--data.validation_fraction", "0.1",
        "--validation.freq", "2", *(ASYNC if dice.random() < 0.5 else ()), by_script=to == "script",
        actions=[{**action, "rank": rank, "to": to if to in ("launcher", "script") else rank} for rank in ranks],
    )  # fmt: skip
    code, state = job.end(), job.state()
    trial.tried += 1
    trial.check(state.get("exit_code") == 3, f"run_state.json: {state}; {job.said()}")
    trial.check(code == (3 if to == "script" else 1), f"the launcher's exit code is {code}: {job.said()}")
    newest = max(checkpoints(trial.run_folder), default=0)
    last = max((entry["step"] for entry in steps_of(trial.run_folder)), default=0)
    trial.check(newest == last, f"the newest checkpoint is of step {newest}, the last step {last}")
    # torchrun and the script pass it on: in what step it then comes to the ranks
    known = "told" if to in ("launcher", "script") else "does"
    before = list(itertools.takewhile(lambda event: event[1] != known, job.events()))
    begun = max((n for _, event, n in before if event == "step"), default=0)
    trial.check(len(before) < len(job.events()), f"nobody was told: {job.said()}")
    trial.check(last <= begun + 1, f"told in step {begun}, stopped after {last}")


# Row 7


def resumes(quick: bool) -> Iterator[Case]:
    bf16 = ("--training.mixed_precision_param", "bfloat16")
    chosen: list[tuple[str, tuple[str, ...]]] = [
        ("FSDP2 x2", (*ASYNC, "--checkpoint.keep_best", "true")),
        ("FSDP2 x2", bf16),
        ("FSDP2 x2, ZeRO-2", ()),
        ("FSDP2 x2, ZeRO-1", (*bf16, *ASYNC)),
        ("DDP x2", ("--training.mixed_precision_reduce", "bfloat16")),
        ("PowerSGD x2", ASYNC),
        ("PowerSGD x2, cold, from step 5", ()),
        ("PP2 1F1B", ASYNC),
        ("TP2", ()),
        ("HSDP 2x2", ()),
        ("PP2 x FSDP2", bf16),
        ("one process", ("--checkpoint.keep_best", "true")),
    ]
    for layout, arguments in chosen[:1] if quick else chosen:
        yield case(" ".join((layout, *arguments)), resumed_twice, layout, arguments)


def resumed_twice(trial: Trial, layout: str, arguments: Sequence[str]) -> None:
    """Three steps, three times, are nine."""
    arguments = (
        *arguments, "--checkpoint.interval", "3", "--data.validation_fraction", "0.1", "--validation.freq", "3"
    )  # fmt: skip
    expected = uninterrupted(layout, *arguments, "--training.steps", "9")
    for steps in (3, 6, 9):
        job = trial.finish(layout, *arguments, "--training.steps", str(steps))
        if steps > 3:
            trial.check(f"step-{steps - 3}" in job.output(), f"it did not go on from step {steps - 3}")
    trial.tried += 1
    pairs = itertools.zip_longest(metrics(trial.run_folder), metrics(expected))
    differing = [f"{mine}, uninterrupted {other}" for mine, other in pairs if mine != other]
    trial.check(not differing, f"metrics.jsonl, {len(differing)} lines, the first: {differing[:1]}")
    mine, others = checkpoints(trial.run_folder), checkpoints(expected)
    trial.check(mine.keys() == others.keys(), f"checkpoints {list(mine)}, uninterrupted {list(others)}")
    for step in mine.keys() & others.keys():
        tensors, wanted = tensors_of(mine[step]), tensors_of(others[step])
        trial.check(tensors.keys() == wanted.keys(), f"step-{step}: other names")
        odd = [name for name in tensors.keys() & wanted.keys() if not torch.equal(tensors[name], wanted[name])]
        trial.check(not odd, f"step-{step}: {len(odd)} tensors differ, the first {odd[:1]}")
        for path in sorted(others[step].glob("*.json")):
            same = path.name == sealed.MANIFEST or path.read_bytes() == (mine[step] / path.name).read_bytes()
            trial.check(same, f"step-{step}: {path.name} differs")


# Row 8

Leg = tuple[str, int]  # a layout, and the accumulation that the config asks for there


def reshards(quick: bool) -> Iterator[Case]:
    stories: list[list[Leg]] = [
        [("FSDP2 x2", 2), ("PP2 1F1B", 2), ("one process", 4)],
        [("FSDP2 x4", 1), ("FSDP2 x2", 1), ("FSDP2 x4", 1)],
        [("PP2 1F1B", 4), ("one process", 4), ("PP2 1F1B", 4)],
        [("DDP x2", 2), ("HSDP 2x2", 1), ("TP2", 1)],
        [("TP2 x FSDP2", 2), ("PP2 x FSDP2", 2), ("FSDP2 x2, ZeRO-1", 2)],
    ]
    LAYOUTS["FSDP2 x4"] = (4, {})
    for legs in stories[:1] if quick else stories:
        yield case(" -> ".join(layout for layout, _ in legs), moved, legs)


def moved(trial: Trial, legs: list[Leg]) -> None:
    """Three steps in each layout, some rows' epochs long: each row in its turn, and the losses of one process."""
    rows = LAYOUTS[legs[0][0]][0] * legs[0][1] // _share(legs[0][0])
    arguments = (
        "--data.path", str(session() / "few.jsonl"), "--optimizer.lr", "1e-3", "--optimizer.eps", "1e-3"
    )  # fmt: skip
    whole = ("--training.steps", str(3 * len(legs)), "--training.gradient_accumulation_steps", str(rows))
    expected = steps_of(uninterrupted("one process", *arguments, *whole))
    for leg, (layout, accumulation) in enumerate(legs):
        until = ("--training.steps", str(3 * leg + 3), "--training.gradient_accumulation_steps", str(accumulation))
        job = trial.finish(layout, *arguments, *until)
        steps, read = Counter[int](), dict[int, Counter[int]]()
        for rank, event, number in job.events():
            steps[rank] += event == "step"
            if event == "trained":  # not "row": threads read some steps ahead
                read.setdefault(3 * leg + steps[rank], Counter())[number] += 1
        for step in range(3 * leg + 1, 3 * leg + 4):
            wanted = dict.fromkeys(range(rows * (step - 1), rows * step), _share(layout))
            found = dict(sorted(read.get(step, Counter()).items()))
            trial.check(found == wanted, f"{layout}: step {step} read {found}, not {wanted}")
        trial.tried += 1
    found = steps_of(trial.run_folder)
    trial.check(len(found) == len(expected), f"{len(found)} steps, not {len(expected)}")
    for kind, key in (("loss", "loss"), ("norm", "grad_norm")):
        worst = max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(found, expected, strict=False))
        trial.check(worst < parity.BARS["float32"][kind], f"{kind}: {worst:.1e} from one process's")


def _share(layout: str) -> int:
    """Ranks that read the same rows."""
    degrees = LAYOUTS[layout][1]
    return degrees.get("pipeline_parallel_degree", 1) * degrees.get("tensor_parallel_degree", 1)


# Row 9

NONFINITE = 3  # steps in a row that end a run


def nans(quick: bool) -> Iterator[Case]:
    layouts = ("FSDP2 x2", "PP2 1F1B", "DDP x2", "PowerSGD x2", "TP2", "HSDP 2x2", "PP2 x FSDP2")
    kinds = ("loss", "gradient", "activation")
    chosen = [("FSDP2 x2", "gradient"), ("PP2 1F1B", "activation")] if quick else itertools.product(layouts, kinds)
    for layout, kind in chosen:
        yield case(f"{layout}: {kind}", not_finite, layout, kind)


def not_finite(trial: Trial, layout: str, kind: str) -> None:
    """Each rank in turn is at fault in one step less than ends a run; then the last rank in as many as do."""
    ranks = LAYOUTS[layout][0]
    faulty: dict[int, int] = {}  # step -> rank
    for rank in (*range(ranks), ranks - 1):
        first = max(faulty, default=0) + 2
        faulty |= dict.fromkeys(range(first, first + NONFINITE - 1), rank)
    end = max(faulty) + 1
    faulty[end] = ranks - 1
    job = trial.start(
        layout, "--training.steps", str(end + 3), "--training.max_nonfinite_steps", str(NONFINITE),
        "--checkpoint.interval", "0",
        actions=[{"at": "step", "number": step, "rank": rank, "do": f"nan {kind}"} for step, rank in faulty.items()],
    )  # fmt: skip
    job.end()
    trial.tried += len(faulty)
    state, steps = job.state(), steps_of(trial.run_folder)
    trial.check(state.get("exit_code") == 4, f"run_state.json: {state}; {job.said()}")
    trial.check(len(steps) == end, f"ended after step {len(steps)}, not {end}")
    skipped = [entry["step"] for entry in steps if entry["skipped"]]
    trial.check(skipped == sorted(faulty), f"skipped {skipped}, not {sorted(faulty)}")
    for rank in range(ranks):
        kept = {step for who, event, step in job.events() if (who, event) == (rank, "unchanged")}
        changed = {step for who, event, step in job.events() if (who, event) == (rank, "changed")}
        odd = sorted(changed & faulty.keys())
        trial.check(not odd, f"rank {rank}: weights or optimizer changed in steps {odd}")
        good = set(range(1, end + 1)) - faulty.keys()
        trial.check((kept, changed) == (set(faulty), good), f"rank {rank}: changed in {changed}, kept in {kept}")
    place = rf"{re.escape(str(ASSETS / 'arithmetic.jsonl'))}:\d+"
    trial.check(bool(re.search(place, state.get("message", ""))), f"no row is named: {state.get('message')}")
    recorded = (trial.run_folder / "nonfinite_rows.csv").read_text().splitlines()
    named = {int(step) for step in re.findall(r"^(\d+),", "\n".join(recorded), re.MULTILINE)}
    trial.check(named == set(faulty), f"nonfinite_rows.csv has steps {sorted(named)}")


# Row 11


def exits(quick: bool) -> Iterator[Case]:
    yield case("two runs with one folder", two_with_one_folder)
    layouts = ("FSDP2 x2", "one process", "DDP x2", "PP2 1F1B", "TP2", "PowerSGD x2", "HSDP 2x2")
    for number in range(3 if quick else 100):
        layout, by_script, in_background = layouts[number % len(layouts)], number % 4 == 2, number % 2 == 0
        how = f"{layout}{', run_train.sh' if by_script else ''}{', async' if in_background else ''}"
        yield case(f"{number + 1}: {how}", finished, layout, by_script, ASYNC if in_background else ())


def finished(trial: Trial, layout: str, by_script: bool, arguments: Sequence[str]) -> None:
    more = ("--training.steps", "2", "--checkpoint.interval", "1", "--data.validation_fraction", "0.1")
    job = trial.finish(layout, *more, *arguments, by_script=by_script)
    trial.tried += 1
    noise = re.findall(r".*(?:Traceback|[Aa]bort|terminate called|SIGABRT|core dumped|leaked).*", job.output())
    trial.check(not noise, f"said {noise[:3]}")
    trial.check(set(checkpoints(trial.run_folder)) == {1, 2}, f"checkpoints {list(checkpoints(trial.run_folder))}")


def two_with_one_folder(trial: Trial) -> None:
    """The second is refused, and the first does not notice."""
    arguments = ("--training.steps", "600", "--checkpoint.interval", "5")
    first = trial.start("FSDP2 x2", *arguments)
    first.wait_for("sealed", 5)
    files = [trial.run_folder / "config.toml", *checkpoints(trial.run_folder)[5].iterdir()]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    second = trial.start("one process", "--training.steps", "5", lock_patience=1)
    code = second.end()
    trial.tried += 1
    trial.check(code == 2, f"the second ended with code {code}: {second.said()}")
    trial.check("is used by another run" in second.output(), f"the second said {second.said()}")
    trial.check(first.state().get("state") == "running", f"run_state.json: {first.state()}")
    after = [(path.read_bytes(), path.stat().st_mtime_ns) if path.exists() else None for path in files]
    trial.check(before == after, "the first one's files were touched")
    first.launcher.terminate()
    first.end()
    trial.check(first.state().get("exit_code") == 3, f"the first ended with {first.state()}")
    found = [entry["step"] for entry in steps_of(trial.run_folder)]
    trial.check(found == list(range(1, len(found) + 1)), f"metrics.jsonl has steps {found}")
