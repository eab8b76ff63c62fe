"""Runs a function of the user's own on sampled answers, in a process of its own with limits on time and memory.

This is no sandbox: the function can read and write what its user can. It may crash, hang, print or start processes;
what it started is killed with it. Where the kernel allows it, the process has no network, and it has a space of
processes of its own, whose end ends all in it, daemons too; elsewhere a daemon with a session of its own survives.
"""

import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import IO, Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.isolated import command, ended
from titan_mi100.wording import shortened, shown, some

FORMS = (
    "score(prompt, answer, row), f(prompts, completions, **columns) as in TRL, or "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) as in verl"
)
HIGHEST = 1e9  # above any score
_OWN, _VERL = {"prompt", "answer", "row"}, {"data_source", "solution_str", "ground_truth", "extra_info"}
LOADING = 60.0  # seconds to start, and to import the file
_LONGEST, _SHOWN = 1 << 20, 2000  # bytes that are kept of all scores of a part, and of what the function has printed
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
    seconds: float  # for an answer; the answers to a prompt share them
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
        try:
            for reader in readers:
                reader.start()
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([*self[:5], questions]).encode() + b"\n")
                process.stdin.flush()  # left open: its end tells the process that this one was killed
            how = ended(process.wait(LOADING + self.seconds * sum(counts)))
        except subprocess.TimeoutExpired:
            how = f"took longer than {self.seconds:g} s an answer (--timeout)"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join(2)  # not longer: a daemon may hold the other end
        problem, scores = f"ended without scores: {how}", list[Any]()
        with suppress(ValueError, RecursionError, TypeError):  # what it has replied can be anything
            problem, scores = json.loads(bytes(replied))
            if not problem and [*map(len, scores)] == counts:
                return [[*map(_number, own)] for own in scores]
        output = printed.decode(errors="replace").strip()
        text = f"{self.path}:{self.name}: {shortened(str(problem), 1000)}; correct it, and start again"
        raise UserError(f"{text}; it has printed:\n{output}" if output else text)


def _keep_end(pipe: IO[bytes], kept: bytearray, most: int) -> None:
    for block in iter(partial(os.read, pipe.fileno(), 1 << 16), b""):
        kept += block
        del kept[:-most]


@cache
def namespaces(with_network: bool) -> tuple[str, ...]:
    """The words before a command that give it a space of processes, and no network; (): the kernel allows none."""
    for flags in ("-p", "-rp") if with_network else ("-np", "-rnp"):  # -r: without the rights of root
        words = ("unshare", flags, "--fork", "--kill-child")
        if shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    return ()


def serve() -> None:
    """The main function of the process: (problem, scores of each prompt) as JSON."""
    asked, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what it prints is kept apart from the scores
    path, name, source, seconds, gib, questions = json.loads(asked.readline())
    threading.Thread(target=_end_with_parent, args=(asked,), daemon=True).start()
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # no Exception, which functions catch to return 0
    sys.argv, sys.path[:0] = [path], [os.path.dirname(path)]
    problem, scores = "", list[list[float | None]]()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30),) * 2)
        ask = _loaded(path, name, source)
        for question in map(Question._make, questions):
            signal.setitimer(signal.ITIMER_REAL, seconds * len(question.answers))
            scores.append([])
            for score in ask(question):
                scores[-1].append(_number(score))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        known: dict[type, str] = {MemoryError: f"needs more than {gib:g} GiB (--memory)", UserError: str(error)}
        known[KeyboardInterrupt] = f"took longer than {seconds:g} s an answer (--timeout)"
        where = f"{questions[len(scores) - 1][0]}, answer {len(scores[-1]) + 1}: " if scores else ""
        problem = where + known.get(type(error), f"raised {shown(error)}")
        if type(error) not in known:
            traceback.print_exc(limit=-1)
    with replies:
        replies.write(json.dumps((problem, scores)).encode())
    os._exit(0)  # without waiting for threads that it has started


def _end_with_parent(asked: IO[bytes]) -> None:
    asked.read(1)  # until the other end is closed
    os.kill(0, signal.SIGKILL)  # its group; not the first process of a space of processes
    os._exit(1)


def _loaded(path: str, name: str, source: str) -> Callable[[Question], Iterator[Any]]:
    """What asks the function for scores. Raises UserError: it has none of the three forms."""
    module = sys.modules["user_function"] = types.ModuleType("user_function")  # where pickle looks for its classes
    module.__file__ = path
    exec(compile(source, path, "exec"), vars(module))
    if not callable(function := getattr(module, name, None)):
        raise UserError("is no function of this file")
    every = inspect.signature(function).parameters.values()
    names = {each.name for each in every if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    needed = names - {each.name for each in every if each.default is not each.empty}
    if not ("completions" in needed or needed == _OWN or {"solution_str", "ground_truth"} <= needed <= _VERL):
        raise UserError(f"has the parameters {some(sorted(names)) or 'none'}; expected {FORMS}")
    return partial(_ask, function, names, len(names) < len(every))


def _ask(function: Any, names: set[str], takes_all: bool, asked: Question) -> Iterator[Any]:
    """The scores of the answers to a prompt, as the function returns them."""
    row, count = asked.row, len(asked.answers)
    if "completions" in names:
        columns: dict[str, Any] = {key: [cell] * count for key, cell in row.items()}
        columns |= {"prompts": [asked.prompt] * count, "completions": asked.answers}
        scores = function(**{key: each for key, each in columns.items() if takes_all or key in names})
        if not isinstance(scores, list | tuple) or len(scores) != count:
            raise UserError(f"returned {shown(scores)}; expected a list of {count} scores")
        yield from scores
        return
    arguments = {"prompt": asked.prompt, "row": row, "ground_truth": asked.gold}
    arguments |= {key: row.get(key) for key in ("data_source", "extra_info")}
    for answer in asked.answers:
        arguments |= {"answer": answer, "solution_str": answer}
        is_missing = "ground_truth" in names and asked.gold is None  # which never pays
        score = None if is_missing else function(**{key: arguments[key] for key in names & arguments.keys()})
        yield score["score"] if isinstance(score, dict) else score


def _number(score: Any) -> float | None:
    if score is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(score, str | bytes) and abs(number := float(score)) < HIGHEST:
            return number
    raise UserError(f"returned {shown(score)}; expected None, or a finite number below {HIGHEST:g}")
