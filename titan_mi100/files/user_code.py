"""Runs a function of the user's own on sampled answers, in a process of its own with limits on time and memory.

This is no sandbox: the function can read and write what its user can. It may crash, hang, print or start processes;
what it started is killed with it. Where the kernel allows it, the process has no network, and it has a space of
processes of its own, whose end ends all in it, daemons too; elsewhere a daemon with a session of its own survives.
"""

import inspect
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.isolated import command, ended
from titan_mi100.wording import shortened, shown, some

_OWN, _VERL = {"prompt", "answer", "row"}, {"data_source", "solution_str", "ground_truth", "extra_info"}
FORMS = (
    "score(prompt, answer, row), f(prompts, completions, **columns) as in TRL, or "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) as in verl"
)
_LOADING = 60.0  # seconds to start, and to import the file
_LONGEST = 1 << 20  # bytes of all scores of a part
_SHOWN = 2000  # bytes of what it has printed, in a message
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread takes address space


class Question(NamedTuple):
    """A prompt and its answers, with what the three forms need."""

    where: str
    prompt: Any  # a text, or messages
    answers: list[str]
    gold: Any
    row: dict[str, Any]


class UserCode(NamedTuple):
    """A function in a file. `source` is what runs, even if the file changes."""

    path: str
    name: str
    source: str
    seconds: float  # for an answer; after those of all answers the process is killed
    gib: float
    with_network: bool

    def scores(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """The scores of the answers to each prompt. Raises UserError: what is wrong with the function."""
        counts, replied, printed = [len(question.answers) for question in questions], bytearray(), bytearray()
        words = [*namespaces(self.with_network), *command("files.user_code:serve")]
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process: Any = subprocess.Popen(words, start_new_session=True, env={**os.environ, **_ONE_THREAD}, **streams)
        pipes = ((process.stdout, replied, _LONGEST), (process.stderr, printed, _SHOWN))
        readers = [threading.Thread(target=_keep_end, args=each, daemon=True) for each in pipes]
        for reader in readers:
            reader.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([*self[:5], questions]).encode() + b"\n")
                process.stdin.flush()  # left open: its end tells the process that this one was killed
            how = ended(process.wait(_LOADING + self.seconds * sum(counts)))
        except subprocess.TimeoutExpired:
            how = f"killed, as it took longer than {self.seconds:g} s an answer (--timeout)"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for reader in readers:
                reader.join(2)  # not longer: a daemon may hold the other end
        where = f"{self.path}:{self.name}"
        problem, scores = f"{where}: its process ended without scores: {how}", list[Any]()
        with suppress(ValueError, RecursionError, TypeError):  # what it replied can be anything
            problem, scores = json.loads(bytes(replied))
            if not problem and [*map(len, scores)] == counts:
                return [[_number(score, where) for score in own] for own in scores]
            problem = problem or f"{where}: wrote what are no scores"
        said = printed.decode(errors="replace").strip()
        text = f"{shortened(str(problem), 1000)}; correct it, and start again"
        raise UserError(f"{text}; it has printed:\n{said}" if said else text)


def _keep_end(pipe: IO[bytes], kept: bytearray, most: int) -> None:
    for block in iter(partial(os.read, pipe.fileno(), 1 << 16), b""):
        kept += block
        del kept[:-most]


@cache
def namespaces(with_network: bool) -> tuple[str, ...]:
    """The words before a command that give it a space of processes, and no network; (): the kernel allows none."""
    for flags in ("-p", "-rp") if with_network else ("-np", "-rnp"):  # -r: without the rights of root
        words = ("unshare", flags, "--fork", "--kill-child")
        with suppress(OSError, subprocess.SubprocessError):
            if subprocess.run([*words, "true"], capture_output=True, timeout=10).returncode == 0:
                return words
    return ()


def serve() -> None:
    """The main function of the process: (problem, scores of each prompt) as JSON."""
    asked, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what it prints is kept apart from the scores
    path, name, source, seconds, gib, questions = json.loads(asked.readline())
    threading.Thread(target=_end_with_parent, args=(asked,), daemon=True).start()
    sys.argv, sys.path[:0] = [path], [str(Path(path).parent)]
    where, problem, scores = f"{path}:{name}", "", list[list[float | None]]()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30),) * 2)
        function, names, takes_all = _loaded(path, name, source)
        signal.signal(signal.SIGALRM, _too_late)
        for question in (Question(*question) for question in questions):
            asked_at_once = len(question.answers) if "completions" in names else 1
            answers = _ask(function, names, takes_all, question)
            scores.append([])
            for number in range(1, len(question.answers) + 1):
                where = f"{question.where}, answer {number}: {path}:{name}"
                signal.setitimer(signal.ITIMER_REAL, seconds * asked_at_once)
                scores[-1].append(_number(next(answers), where))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except MemoryError:
        problem = f"{where} needs more than {gib:g} GiB of memory (--memory)"
    except UserError as error:
        problem = str(error)
    except BaseException as error:
        with suppress(Exception):
            traceback.print_exc()
        problem = f"{where} raised {shown(error)}"
    with replies:
        replies.write(json.dumps((problem, scores)).encode())
    os._exit(0)  # without waiting for threads that it has started


def _end_with_parent(asked: IO[bytes]) -> None:
    asked.read(1)  # until the other end is closed
    os.kill(0, signal.SIGKILL)  # its group; not the first process of a space of processes
    os._exit(1)


def _too_late(*_: Any) -> None:
    raise KeyboardInterrupt("too slow: see --timeout")  # no Exception, which functions catch to return 0


def _loaded(path: str, name: str, source: str) -> tuple[Any, set[str], bool]:
    """The function, the names that it can be given, and whether it takes others. Raises UserError: no known form."""
    module = sys.modules["user_function"] = types.ModuleType("user_function")  # where pickle looks for its classes
    module.__file__ = path
    exec(compile(source, path, "exec"), vars(module))
    if not callable(function := getattr(module, name, None)):
        raise UserError(f"{path}: has no function {name}")
    given = {key: each for key, each in inspect.signature(function).parameters.items() if each.kind not in (2, 4)}
    needed = {key for key, each in given.items() if each.default is each.empty}
    if not ("completions" in needed or needed == _OWN or {"solution_str", "ground_truth"} <= needed <= _VERL):
        raise UserError(f"{path}:{name} has the parameters {some(given) or 'none'}; expected {FORMS}")
    return function, {*given}, len(given) < len(inspect.signature(function).parameters)


def _ask(function: Any, names: set[str], takes_all: bool, asked: Question) -> Iterator[Any]:
    """The scores of the answers to a prompt, as the function returns them."""
    row, count = asked.row, len(asked.answers)
    if "completions" in names:
        given: dict[str, Any] = {key: [value] * count for key, value in row.items()} | {
            "prompts": [asked.prompt] * count
        }
        given = {key: each for key, each in given.items() if takes_all or key in names}
        scores = function(**given | {"completions": asked.answers})
        if not isinstance(scores, list | tuple) or len(scores) != count:
            raise ValueError(f"it must return a list of {count} scores")
        yield from scores
        return
    for answer in asked.answers:
        given = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info"), "ground_truth": asked.gold}
        given |= {"solution_str": answer, "answer": answer, "prompt": asked.prompt, "row": row}
        is_missing = "ground_truth" in names and asked.gold is None  # which never pays
        score = None if is_missing else function(**{key: given[key] for key in names & given.keys()})
        yield score["score"] if isinstance(score, dict) else score


def _number(score: Any, where: str) -> float | None:
    if score is None:
        return None
    with suppress(TypeError, ValueError):
        if not isinstance(score, str | bytes) and math.isfinite(number := float(score)):
            return number
    raise UserError(f"{where} returned {shown(score)}; expected a finite number or None")
