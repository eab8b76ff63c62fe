"""Rows 2 to 5: a save that dies or is refused at each of its operations; checkpoints that are not what they were."""

import errno
import io
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from chaos.case import Case, Outcome
from chaos.runs import Job, metrics
from chaos.worker import switch_off

from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.settings import Config, TrainingConfig
from titan_mi100.errors import SaveError
from titan_mi100.log import log
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, random_rows

SPEC = Qwen3Spec(256, 32, 64, 1, 2, 1, 16, True, rope_theta=10_000.0)
STEPS = (1, 2)  # saved before the one that something happens to
KEEP = 2
PATIENCE = 240  # seconds for a job to end, on a machine that has other things to do


class Operations:
    """Counts what a process does to the files below a folder, in order; at operation `at`, does something else."""

    def __init__(self, folder: Path, at: int, do: Callable[[str, Any], None]) -> None:
        self._folder, self._at, self._do = str(folder), at, do
        self.names: list[str] = []
        self._descriptors: dict[int, str] = {}

    def happens(self, kind: str, path: Any, file: Any = None) -> None:
        name = self._descriptors.get(path, "") if isinstance(path, int) else os.fspath(path)
        needed = kind != "mkdir" or not os.path.isdir(name)  # to make a folder that is there may fail
        if needed and isinstance(name, str) and name.startswith(self._folder):
            self.names.append(f"{kind} {os.path.basename(name)}")
            if len(self.names) == self._at:
                self._do(self.names[-1], file)

    def _where(self, path: Any, options: dict[str, Any]) -> Any:
        if options.get("dir_fd") is None:
            return path if isinstance(path, int) else os.fspath(path)
        return os.path.join(self._descriptors.get(options["dir_fd"], ""), os.fspath(path))  # rmtree's way

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Python's own calls are replaced: whatever writes a checkpoint goes through them."""
        real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")}
        real_open = io.open

        def os_open(path: Any, *arguments: Any, **options: Any) -> int:
            where = self._where(path, options)
            self.happens("open", where)
            descriptor = real["open"](path, *arguments, **options)
            self._descriptors[descriptor] = where
            return descriptor

        def by_path(kind: str) -> Callable[..., Any]:
            def call(path: Any, *arguments: Any, **options: Any) -> Any:
                self.happens(kind, self._where(path, options))
                return real[kind](path, *arguments, **options)

            return call

        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            is_ours = set(mode) & set("wax+") and not isinstance(path, int)
            if is_ours:
                self.happens("open", path)
            file = real_open(path, mode, *arguments, **options)
            if is_ours:
                self._descriptors[file.fileno()] = os.fspath(path)
                return _Watched(file, os.fspath(path), self) if "b" in mode else file
            return file

        io.open = opened  # type: ignore[assignment]
        os.open = os_open  # type: ignore[assignment]
        for kind in real:
            if kind != "open":
                setattr(os, kind, by_path(kind))
        try:
            yield
        finally:
            io.open = real_open
            for kind, call in real.items():
                setattr(os, kind, call)


class _Watched:
    """A file whose writes are counted."""

    def __init__(self, file: Any, path: str, operations: Operations) -> None:
        self._file, self._path, self._operations = file, path, operations

    def write(self, data: Any) -> int:
        self._operations.happens("write", self._path, (self._file, data))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def kill(_: str, file: Any) -> None:
    """In the middle of a write, which the disk already has a half of."""
    if file is not None:
        stream, data = file
        stream.write(bytes(data)[: len(bytes(data)) // 2])
        stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number: int, name: str, _: Any) -> None:
    raise OSError(number, os.strerror(number), name)


def job(
    folder: Path, processes: int, in_background: bool, work: Callable[[World, Checkpointer], None]
) -> list[tuple[int, str]]:
    """Fork a job whose processes do some work with a small model's Checkpointer; their exit codes and last words.

    Codes: 0 done, 7 a SaveError, 8 something else, negative a signal. To be called where no other thread runs, or a
    fork may inherit a lock that nobody will release: the tests come here through `main`.
    """
    outside = folder.parent / f"job-{time.monotonic_ns()}"
    outside.mkdir(parents=True)
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            _child(folder, processes, in_background, work, rank, outside)
        children.append(child)
    codes, deadline = {}, time.monotonic() + PATIENCE
    while len(codes) < processes:
        for child in set(children) - set(codes):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                for left in set(children) - set(codes):
                    os.kill(left, signal.SIGKILL)
                    os.waitpid(left, 0)
                raise TimeoutError(f"a save did not end in {PATIENCE} s")  # not to be taken for a kill that was meant
        time.sleep(0.005)
    words = [path.read_text() if (path := outside / str(rank)).exists() else "" for rank in range(processes)]
    return [(codes[child], said) for child, said in zip(children, words, strict=True)]


def _child(
    folder: Path,
    processes: int,
    in_background: bool,
    work: Callable[[World, Checkpointer], None],
    rank: int,
    outside: Path,
) -> NoReturn:
    code = 0
    log.disabled = True
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(outside / "store"), processes), rank=rank, world_size=processes
        )
        world = World(rank, processes, torch.device("cpu"))
        data = made_up(random_rows(processes, 8, SPEC.vocab_size, supervised_share=0.5))
        run = open_run(Config(training=TrainingConfig(seq_len=8)), world, spec=SPEC, data=data)
        layout = run.config.layout(processes)
        work(world, Checkpointer(folder, run.model, run.optimizer, world, layout, KEEP, in_background))
    except BaseException as error:
        code = 7 if isinstance(error, SaveError) else 8
        (outside / str(rank)).write_text(repr(error))
    os._exit(code)


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"step": step}, about={})
    checkpointer.judge("")
    checkpointer.wait()


def base(folder: Path, processes: int) -> Path:
    """A folder with the checkpoints of STEPS."""

    def work(_: World, checkpointer: Checkpointer) -> None:
        for step in STEPS:
            save(checkpointer, step)

    ended = job(folder / "base", processes, False, work)
    assert all(code == 0 for code, _ in ended), ended
    return folder / "base"


def save_base(processes: int, folder: Path, _: tuple[str, ...]) -> Outcome:
    """`base`, for `main`."""
    return Outcome(len(sealed.list_checkpoints(base(folder, processes))), [])


def disturbed(
    folder: Path, processes: int, in_background: bool, rank: int, at: int, do: Callable[[str, Any], None]
) -> tuple[list[tuple[int, str]], list[str]]:
    """Save one more step while operation `at` of this rank goes wrong; how the processes ended, and its operations."""
    record = folder.parent / "operations"
    record.unlink(missing_ok=True)

    def work(world: World, checkpointer: Checkpointer) -> None:
        if world.rank != rank:
            return save(checkpointer, STEPS[-1] + 1)
        operations = Operations(folder, at, do)
        with operations.watched():
            save(checkpointer, STEPS[-1] + 1)
        record.write_text("\n".join(operations.names))
        return None

    ended = job(folder, processes, in_background, work)
    return ended, record.read_text().splitlines() if record.exists() else []


def whole(folder: Path) -> list[int]:
    """The steps whose checkpoints are what was written."""
    found = []
    for path in sealed.list_checkpoints(folder):
        with suppress(sealed.DamagedError):
            sealed.verify(path)
            found.append(sealed.step_of(path))
    return found


# --- row 2 ---


def kill_points(quick: bool) -> Iterator[Case]:
    for in_background in (False, True):
        name = "async" if in_background else "sync"
        yield Case(f"{name} save", partial(kill_everywhere, in_background, 1 if quick else 0))


def kill_everywhere(in_background: bool, every: int, folder: Path, _: tuple[str, ...]) -> Outcome:
    """A save is killed at each operation on its files; `every` above 0: at one in `every` of _sites."""
    before = base(folder, 1)
    _, names = disturbed(_copy(before, folder / "counted"), 1, in_background, 0, 0, kill)
    wrong = []
    places = _sites(names)[::every] if every else range(1, len(names) + 1)
    for at in places:
        target = _copy(before, folder / "killed")
        ended, _ = disturbed(target, 1, in_background, 0, at, kill)
        left = whole(target)
        if ended[0][0] != -signal.SIGKILL or STEPS[-1] not in left:
            wrong.append(f"{names[at - 1]}: ended {ended}, whole afterwards {left}")
        if (named := [sealed.step_of(path) for path in sealed.list_checkpoints(target)]) != left:
            wrong.append(f"{names[at - 1]}: {named} have a checkpoint's name, but only {left} are whole")
        sealed.clear(target)
        if list(target.glob(".*")):
            wrong.append(f"{names[at - 1]}: leftovers stay: {list(target.glob('.*'))}")
    kinds = Counter(name.split()[0] for name in names)
    return Outcome(len(places), wrong, {"operations": dict(kinds)})


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


# --- row 5 ---


def faults(quick: bool) -> Iterator[Case]:
    for in_background in (False, True):
        for number in (errno.ENOSPC, errno.EIO, errno.EACCES):
            name = f"{errno.errorcode[number]}, {'async' if in_background else 'sync'}"
            yield Case(name, partial(fail_everywhere, in_background, number, 8 if quick else 1))


def fail_everywhere(in_background: bool, number: int, every: int, folder: Path, _: tuple[str, ...]) -> Outcome:
    before = base(folder, 2)
    tried, wrong = 0, []
    for rank in (0, 1):
        _, names = disturbed(_copy(before, folder / "counted"), 2, in_background, rank, 0, kill)
        # the rename, and the opening and syncing of the parent folder, end the save
        renamed = [at for at, name in enumerate(names, start=1) if name.startswith("rename .step-3.")]
        sealed_at = renamed[0] + 2 if renamed else len(names)
        for at in _sites(names)[::every]:
            target = _copy(before, folder / "failed")
            ended, _ = disturbed(target, 2, in_background, rank, at, partial(refuse, number))
            left, name = whole(target), f"rank {rank}, {names[at - 1]}"
            tried += 1
            if at > sealed_at:  # only the removal of an old one is refused: said, and the run goes on
                if [code for code, _ in ended] != [0, 0] or STEPS[-1] + 1 not in left:
                    wrong.append(f"{name}, removing: ended {ended}, whole afterwards {left}")
                continue
            if [code for code, _ in ended] != [7, 7]:
                wrong.append(f"{name}: ended {ended}")
            elif number == errno.ENOSPC and not all("the disk is full" in said for _, said in ended):
                wrong.append(f"{name}: not said plainly: {ended}")
            if STEPS[-1] not in left:
                wrong.append(f"{name}: whole afterwards {left}")
    return Outcome(tried, wrong)


def _sites(names: list[str]) -> list[int]:
    """Every operation, from 1; of many writes into one file the first, a middle and the last."""
    places: dict[str, list[int]] = {}
    for at, name in enumerate(names, start=1):
        places.setdefault(name, []).append(at)
    chosen = {at for found in places.values() for at in (found[0], found[len(found) // 2], found[-1])}
    return sorted(chosen)


# --- rows 3 and 4 ---


def flips(quick: bool) -> Iterator[Case]:
    yield Case("in the files", partial(flip_files, 100 if quick else 2000))
    for number in range(1 if quick else 10):
        yield Case(f"end to end, {number}", partial(_flip_end_to_end, 1 if quick else 5, number))


def _flip(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    place, bit = random.randrange(len(content)), random.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.name}, byte {place}, bit {bit}"


def flip_files(times: int, folder: Path, without: tuple[str, ...]) -> Outcome:
    switch_off(list(without))
    return flip_bits(base(folder, 2), times)


def flip_bits(saved: Path, times: int) -> Outcome:
    """One bit after the other of the newest checkpoint in a folder that `base` made is flipped, and put back."""
    path = saved / f"step-{STEPS[-1]}"
    files, random, wrong = sorted(path.iterdir()), Random(0), []
    for number in range(times):
        file = files[number % len(files)] if number % 2 else random.choices(files, [f.stat().st_size for f in files])[0]
        kept = file.read_bytes()
        flip = _flip(file, random)
        try:
            sealed.verify(path)
            wrong.append(f"{flip}: not detected")
        except sealed.DamagedError as error:
            if file.name not in str(error):
                wrong.append(f"{flip}: not named: {error}")
        file.write_bytes(kept)
    sealed.verify(path)
    return Outcome(times, wrong, {"files": len(files)})


def _flip_end_to_end(times: int, seed: int, folder: Path, without: tuple[str, ...]) -> Outcome:
    """A run of two steps whose newest checkpoint has a flipped bit goes on from the one before, as if it was new."""
    run, random, wrong = folder / "run", Random(seed), []
    more = ("--training.steps", "2", "--checkpoint.interval", "1")
    first = Job(run, "one process", *more, without=without)
    if first.end():
        return Outcome(times, [f"the first run failed: {first.said()}"])
    exact = metrics(run)
    for _ in range(times):
        flip = _flip(random.choice(sorted((run / "checkpoint" / "step-2").iterdir())), random)
        job = Job(run, "one process", *more, without=without)
        code, said = job.end(), job.output()
        told = "DAMAGED CHECKPOINT" in said and f"resumed from {run / 'checkpoint' / 'step-1'}" in said
        if code or not told or metrics(run) != exact:
            wrong.append(f"{flip}: code {code}, fell back: {told}, {metrics(run)}, not {exact}")
    return Outcome(times, wrong)


def damage(quick: bool) -> Iterator[Case]:
    for kind in _DAMAGES:
        yield Case(kind, partial(damaged, kind, 6 if quick else 60))


def damaged(kind: str, times: int, folder: Path, without: tuple[str, ...]) -> Outcome:
    switch_off(list(without))
    return damage_copies(base(folder, 2), kind, times, folder)


def damage_copies(saved: Path, kind: str, times: int, folder: Path) -> Outcome:
    """Copies of the folder that `base` made, whose newest checkpoint is damaged in one of _DAMAGES' ways."""
    random, wrong = Random(0), []
    for number in range(times):
        target = _copy(saved, folder / "damaged")
        path = target / f"step-{STEPS[-1]}"
        files = sorted(path.iterdir())
        file = files[number % len(files)]
        named = _DAMAGES[kind](file, target, random)
        try:
            sealed.verify(path)
            wrong.append(f"{kind} {file.name}: not refused")
        except sealed.DamagedError as error:
            if not any(name in str(error) for name in named):
                wrong.append(f"{kind} {file.name}: not named: {error}")
    return Outcome(times, wrong)


def _truncate(file: Path, _: Path, random: Random) -> list[str]:
    file.write_bytes(file.read_bytes()[: random.randrange(file.stat().st_size)])
    return [file.name]


def _zero_tail(file: Path, _: Path, random: Random) -> list[str]:
    content = file.read_bytes()
    cut = random.randrange(len(content))
    file.write_bytes(content[:cut] + bytes(len(content) - cut))
    return [file.name]


def _remove(file: Path, _: Path, __: Random) -> list[str]:
    file.unlink()
    return [file.name]


def _swap(file: Path, _: Path, random: Random) -> list[str]:
    other = random.choice([path for path in file.parent.iterdir() if path.read_bytes() != file.read_bytes()])
    contents = file.read_bytes(), other.read_bytes()
    file.write_bytes(contents[1])
    other.write_bytes(contents[0])
    return [file.name, other.name]


def _of_another_step(file: Path, checkpoints: Path, _: Random) -> list[str]:
    older = checkpoints / f"step-{STEPS[0]}" / file.name
    if older.read_bytes() == file.read_bytes():  # random states are the same: nothing was drawn
        file.write_bytes(older.read_bytes() + b" ")
    else:
        shutil.copyfile(older, file)
    return [file.name]


_DAMAGES = {
    "truncated": _truncate,
    "zeroed tail": _zero_tail,
    "missing": _remove,
    "swapped": _swap,
    "of another step": _of_another_step,
}


def main() -> None:
    """One function of this module in a process of its own: its name, arguments (JSON), folder; prints the outcome."""
    name, arguments, folder = sys.argv[1:]
    print(json.dumps(globals()[name](*json.loads(arguments), Path(folder), ())))


if __name__ == "__main__":
    main()
