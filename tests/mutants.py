"""Mutants of the package: one wrong operator, constant, argument or statement each. Do the default tests notice?

    python tests/executed.py     # once: which test executes which line; ten minutes
    python tests/mutants.py [--sample 100] [--seed 0] [--only FILE ...] [--jobs 2] [--output mutants.jsonl] [--list]
        [--budget 60]

Every mutant lives in a copy of the tree, where the tests that execute its line are run up to the first failure, those
that execute least first, for at most --budget seconds by their usual times. A test that fails without the mutant, too,
does not count. Results are lines of the output file, so a run that is stopped goes on where it was. Prints the score,
every survivor, and the mutants that no default test executes; exit code 1 if less than 90% were killed. Messages,
annotations, asserts, what is logged, and arguments that change nothing here (_NO_CHANGE) are left alone.
"""

import argparse
import ast
import copy
import json
import random
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from breaks.copies import REPO, Verdict, copy_tree, run_tests
from executed import MAP

BUDGET = 60.0  # seconds of tests for a mutant, by their times under coverage
TIME_LIMIT = 240  # seconds a mutant: what never ends is noticed
WANTED = 0.9  # share of the mutants that should be killed

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_WORDS = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)  # nothing in these is mutated
_SAYING = ("log.", "print", "parser.", "warnings.", "field", "_key")  # nor in calls of these
# Arguments that change nothing: zip's `strict` with equal lists, the values of a load where it is masked, the encoding
# where it is UTF-8 anyway, a thread's end with the process, how a file is buffered.
_NO_CHANGE = {"strict", "other", "encoding", "daemon", "buffering"}


@dataclass(frozen=True)
class Mutant:
    """Source between two places, (line, byte column) from 1 and 0, and what stands there instead."""

    path: str  # below the repository's root
    start: tuple[int, int]
    stop: tuple[int, int]
    old: str
    new: str
    statement: tuple[int, int] = (0, 0)  # first and last line of the statement that it is in

    @property
    def name(self) -> str:
        old, new = (" ".join(text.split())[:70] for text in (self.old, self.new))
        return f"{self.path}:{self.start[0]}:{self.start[1]}: {old}  ->  {new}"

    def applied(self, source: bytes) -> bytes:
        """The source with the mutant in it."""
        lines = source.splitlines(keepends=True)
        (first, begin), (last, end) = self.start, self.stop
        changed = lines[first - 1][:begin] + self.new.encode() + lines[last - 1][end:]
        return b"".join([*lines[: first - 1], changed, *lines[last:]])


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file that is still Python."""
    found = []
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node, instead in _walk(tree):
        text = instead if isinstance(instead, str) else ast.unparse(instead)
        if isinstance(node, ast.expr):
            text = f"({text})"
        if text in (old := ast.unparse(node), f"({old})"):
            continue
        place = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        around = [each for each in statements if each.lineno <= node.lineno and (each.end_lineno or 0) >= place[1][0]]
        inmost = min(around, key=lambda each: (each.end_lineno or 0) - each.lineno)
        mutant = Mutant(path, *place, old, text, (inmost.lineno, inmost.end_lineno or inmost.lineno))
        try:
            compile(mutant.applied(source), path, "exec")
        except SyntaxError:  # of an f-string inside, on a Python that cannot nest quotes
            continue
        found.append(mutant)
    return found


def _walk(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST | str]]:
    """(node, what stands there instead), in the order of the source."""
    said = node.value if isinstance(node, ast.Expr) else node
    if isinstance(node, _WORDS) or (isinstance(said, ast.Call) and ast.unparse(said.func).startswith(_SAYING)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    if isinstance(node, ast.expr | ast.stmt):
        for instead in _instead(node):
            yield node, instead
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        if isinstance(node, ast.keyword) and node.arg in _NO_CHANGE:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _instead(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    """A node's mutants."""

    def changed(**fields: object) -> ast.AST:
        twin = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(twin, name, value)
        return twin

    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield changed(ops=[_COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in _OPERATORS:
            yield changed(op=_OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield changed(op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield changed(value=value + 1)
        case ast.IfExp(body=body, orelse=other):
            yield changed(body=other, orelse=body)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield changed(value=ast.Constant(None))
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            yield changed(func=ast.Name(_FUNCTIONS[name]))
        case ast.Call(args=[first, second, *others]) if not isinstance(first, ast.Starred):
            if not isinstance(second, ast.Starred):
                yield changed(args=[second, first, *others])
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg not in (None, *_NO_CHANGE):
        yield changed(keywords=node.keywords[:-1])


def files_of(only: tuple[str, ...]) -> list[str]:
    """The package's Python files whose path ends like one of these; of none, all but the report's pages."""
    names = [file.relative_to(REPO).as_posix() for file in sorted((REPO / "titan_mi100").rglob("*.py"))]
    return [name for name in names if (name.endswith(only) if only else "/workshop/pages/" not in name)]


class Executed:
    """Which tests execute a mutant, by tests/executed.py."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text(encoding="utf-8"))
        self._tests, self._seconds, self._lines = found["tests"], found["seconds"], found["lines"]
        self._breadth = Counter(test for lines in self._lines.values() for tests in lines.values() for test in tests)

    def by(self, mutant: Mutant) -> set[int]:
        """The numbers of the tests that execute it."""
        lines = self._lines.get(mutant.path, {})
        own = self._of(lines, range(mutant.start[0], mutant.stop[0] + 1))
        return own or self._of(lines, range(mutant.statement[0], mutant.statement[1] + 1))

    def unseen(self, mutants: Iterable[Mutant]) -> Iterator[str]:
        """By folder: how many of the mutants no test executes. Lines that are executed at import alone do not count."""
        counts, unseen = Counter[str](), Counter[str]()
        for mutant in mutants:
            if not is_of_import(mutant):
                folder = mutant.path.rpartition("/")[0]
                counts[folder] += 1
                unseen[folder] += not self.by(mutant)
        count = counts.total()
        yield f"no default test executes {unseen.total():,} of {count:,}, {unseen.total() / count:.1%}"
        for folder, count in sorted(counts.items()):
            yield f"{unseen[folder] / count:>7.1%}  {unseen[folder]:>4} of {count:>5,}  {folder}"

    def tests(self, mutant: Mutant, budget: float = BUDGET) -> tuple[bool, list[str]]:
        """Whether a test executes it; and those that do, the most particular first, for so many seconds.

        Where none does, those that execute another line of its file or are in a file that names it: they notice a
        table, which is executed at import, and what coverage does not see, such as a process that is killed.
        """
        lines = self._lines.get(mutant.path, {})
        wanted = self.by(mutant)
        is_executed = bool(wanted) or is_of_import(mutant)
        wanted = wanted or self._of(lines, map(int, lines)) | self._naming(mutant.path)
        chosen, left = [], budget
        for test in sorted(wanted, key=lambda test: (self._breadth[test] * (1 + self._seconds[test]), test)):
            left -= self._seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(self._tests[test])
        return is_executed, chosen

    def _of(self, lines: dict[str, list[int]], numbers: Iterable[int]) -> set[int]:
        return {test for number in numbers for test in lines.get(str(number), ())}

    def _naming(self, path: str) -> set[int]:
        """Tests in files that name a file of the package, as an import does; of one that the package calls in a limited
        child, by "folder.file:function", those that execute the caller."""
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        parent, _, name = module.rpartition(".")
        named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b")
        files = {test.split("::")[0] for test in self._tests}
        naming = {file for file in files if named.search((REPO / file).read_text(encoding="utf-8"))}
        found = {number for number, test in enumerate(self._tests) if test.split("::")[0] in naming}
        called = f'"{module.removeprefix("titan_mi100.")}:'
        for caller in self._lines:
            if (REPO / caller).exists() and called in (REPO / caller).read_text(encoding="utf-8"):
                found |= self._of(self._lines[caller], map(int, self._lines[caller]))
        return found


@cache
def _functions(path: str) -> list[tuple[int, int]]:
    tree = ast.parse((REPO / path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    return [(node.lineno, node.end_lineno or 0) for node in functions]


def is_of_import(mutant: Mutant) -> bool:
    """Whether it is outside of functions."""
    return not any(first <= mutant.start[0] <= last for first, last in _functions(mutant.path))


class Trials:
    """Mutants tried, a thread each in its own copy, and their results in a file."""

    def __init__(self, folder: Path, output: Path, executed: Executed, budget: float) -> None:
        self._folder, self._output, self._executed, self._budget = folder, output, executed, budget
        self._local, self._lock = threading.local(), threading.Lock()
        self._sound: dict[str, bool] = {}  # tests that failed once -> whether they pass without a mutant

    def attempt(self, mutant: Mutant) -> None:
        is_executed, tests = self._executed.tests(mutant, self._budget)
        if not tests:
            self._note(mutant, Verdict("never", 0.0, "no default test executes a line of its file"))
            return
        if not hasattr(self._local, "copy"):
            self._local.copy = Path(tempfile.mkdtemp(dir=self._folder))
            copy_tree(self._local.copy)
        place = self._local.copy / mutant.path
        source = place.read_bytes()
        while True:
            place.write_bytes(mutant.applied(source))
            try:
                verdict = run_tests(self._local.copy, tests, TIME_LIMIT)
            finally:
                place.write_bytes(source)
            is_named = verdict.test in ("", *tests)  # else pytest itself failed
            if verdict.kind not in ("red", "error") or not is_named or self._is_sound(verdict.test, tests):
                break
            tests.remove(verdict.test)
            if not tests:
                verdict = Verdict("never", verdict.seconds, "all tests that execute it fail without it, too")
                break
        self._note(mutant, verdict if is_executed or verdict.kind != "green" else verdict._replace(kind="never"))

    def _is_sound(self, test: str, tests: list[str]) -> bool:
        """Whether a test that failed passes without the mutant. Raises RuntimeError: they cannot be collected there."""
        if not test:  # the module cannot be imported
            found = run_tests(self._local.copy, [*tests, "--collect-only"], TIME_LIMIT)
            if found.kind != "green":
                raise RuntimeError(found.words)
            return True
        if test not in self._sound:
            self._sound[test] = run_tests(self._local.copy, [test], TIME_LIMIT).kind == "green"
            if not self._sound[test]:
                print(f"fails without a mutant, and is left out: {test}", flush=True)
        return self._sound[test]

    def _note(self, mutant: Mutant, verdict: Verdict) -> None:
        record = {"name": mutant.name, **asdict(mutant), **verdict._asdict(), "seconds": round(verdict.seconds, 1)}
        with self._lock:
            with self._output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{verdict.kind:<6} {verdict.seconds:>4.0f} s  {mutant.name}", flush=True)


def read_results(path: Path) -> dict[str, dict[str, str]]:
    """By mutant; the line that a kill has cut is none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, help="mutants to try, drawn from all; 0: every one")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="files whose path ends like this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--output", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--executed", type=Path, default=MAP, help="what tests/executed.py has written")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of tests for a mutant")
    parser.add_argument("--list", action="store_true", help="only print them, and what no default test executes")
    options = parser.parse_args()
    files = files_of(tuple(options.only))
    every = [mutant for file in files for mutant in mutants_of(file, (REPO / file).read_bytes())]
    chosen = every
    if 0 < options.sample < len(every):
        chosen = random.Random(options.seed).sample(every, options.sample)
    print(f"{len(chosen)} of {len(every):,} mutants of {len(files)} files")
    if options.list:
        print(*(mutant.name for mutant in chosen), *Executed(options.executed).unseen(every), sep="\n")
        return 0
    done = read_results(options.output)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trials = Trials(Path(folder), options.output, Executed(options.executed), options.budget)
        list(pool.map(trials.attempt, [mutant for mutant in chosen if mutant.name not in done]))
    return report([read_results(options.output)[mutant.name] for mutant in chosen])


def report(results: list[dict[str, str]]) -> int:
    """Print the score; 1 if it is below what is wanted. What crashes or never ends is noticed too."""
    kinds = Counter(result["kind"] for result in results)
    killed = len(results) - kinds["green"] - kinds["never"]
    print(f"\n{killed} of {len(results)} killed, {killed / max(len(results), 1):.1%}: {dict(kinds)}")
    for kind, words in (("green", "survivors"), ("never", "no default test executes")):
        names = sorted(f"  {result['name']}" for result in results if result["kind"] == kind)
        print(f"{words}:", *names, sep="\n")
    return int(killed < WANTED * len(results))


if __name__ == "__main__":
    sys.exit(main())
