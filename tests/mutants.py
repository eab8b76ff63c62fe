"""Mutants of the core: one wrong operator, constant, argument or statement each. Do the tests of its module notice?

    python tests/mutants.py [--sample 300] [--seed 0] [--only FILE ...] [--jobs 2] [--output mutants.jsonl] [--list]

Every mutant lives in a copy of the tree, where the tests that TESTS names for its module are run up to the first
failure. Results are lines of the output file, so a run that is stopped goes on where it was. Prints the score and every
survivor; exit code 1 if less than 90% were killed. Messages, annotations, asserts and what is logged are left alone.
"""

import argparse
import ast
import copy
import json
import random
import runpy
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from breaks.copies import REPO, copy_tree, run_tests

# Tests of each module, by its name, the fastest first. A module that is not here has those of its folder.
_STEP = ("test_reference_run.py", "test_parity.py::test_every_split_on_one_process_equals_fp64")
_LAYOUTS = "test_layouts.py::test_layouts_train_as_one_process_does"
_SPLITS = "test_parity.py::test_every_split_on_two_processes_equals_fp64"
_RESUMED = "test_layouts.py"
_SAVED = ("test_sealed.py", "test_checkpoint.py")
TESTS: dict[str, tuple[str, ...]] = {
    "assets": ("test_convert_refusals.py", "test_reference_run.py", "test_convert.py"),
    "costs": ("test_degrees.py", "test_model_spec.py", "test_metrics.py"),
    "hardware": ("test_model_spec.py", "test_distributed.py", "test_scripts.py"),
    "layout": ("test_degrees.py", "test_config.py", "test_loader.py"),
    "loss": ("test_loss.py", "test_model.py", _LAYOUTS),
    "lora": ("test_lora.py",),
    "decode": ("test_generate.py",),
    "ddp": ("test_ddp.py", _LAYOUTS),
    "tensor_parallel": (_LAYOUTS, _SPLITS),
    "pipeline": (_LAYOUTS, _RESUMED),
    "fsdp": (_LAYOUTS, _SPLITS),
    "base": ("test_attention.py", *_STEP, _LAYOUTS),
    "build": ("test_parallelize.py", _LAYOUTS, _SPLITS),
    "distributed": ("test_distributed.py", "test_checkpoint.py", "test_reference_run.py", _LAYOUTS, "test_train.py"),
    "evaluate": ("test_trainer.py", "test_reference_run.py", "test_evaluate.py"),
    "optimizer": ("test_model_spec.py", "test_trainer.py", "test_reference_run.py", "test_checkpoint.py"),
    "train": ("test_reference_run.py", "test_checkpoint.py", "test_train.py", "test_chaos.py"),
    "keys": ("test_ddp.py", "test_convert.py"),
    "durable": (*_SAVED, "test_chaos.py"),
    "qwen3": ("test_model.py", "test_trainer.py", *_STEP),
    "progress": ("test_trainer.py", "test_reference_run.py", "test_train.py"),
    "attention": ("test_model.py", "test_attention.py", *_STEP, "test_generate.py"),
    "choice": ("test_attention_choice.py", "test_train.py"),
    "sealed": ("test_sealed.py", "test_checkpoint.py", "test_chaos.py"),
    "resume": ("test_checkpoint.py", "test_train.py"),
    "shapes/base": (
        "test_made_up_family.py",
        "test_model_spec.py",
        "test_memory.py",
        "test_adapter.py",
        "test_model.py",
    ),
    "shapes/qwen3": ("test_model_spec.py", "test_hf_config.py", "test_memory.py", "test_config_inputs.py"),
    "objectives/base": ("test_objectives.py", *_STEP),
    "data/packing": ("test_packing.py", "test_objectives.py"),
    "open_run/data": ("test_trainer.py", "test_train.py"),
    "memory": ("test_memory.py", "test_planner.py"),
    "plan": ("test_planner.py", "test_memory.py"),
    # folders
    "shapes": ("test_hf_config.py", "test_model_spec.py", "test_made_up_family.py"),
    "objectives": ("test_objectives.py", *_STEP),
    "data": ("test_loader.py", "test_corpus.py", "test_objectives.py", "test_prepare.py", "test_mixture.py"),
    "weights": ("test_made_up_family.py", "test_hf_io.py", "test_convert.py", "test_lora.py"),
    "files": ("test_child.py", "test_corpus.py", "test_attention_choice.py", "test_machine.py", "test_certify.py"),
    "open_run": ("test_trainer.py", "test_sinks.py", "test_ruined_weights.py", "test_train.py"),
    "config": ("test_config.py", "test_model_spec.py", "test_degrees.py", "test_data_docs.py"),
    "model": ("test_model.py", "test_loss.py", *_STEP),
    "parallel": ("test_parallelize.py", *_STEP, _LAYOUTS),
    "checkpoint": (*_SAVED, "test_ddp.py", "test_train.py", "test_chaos.py", _RESUMED),
    "run": ("test_metrics.py", "test_preemption.py", "test_reference_run.py", "test_train.py"),
    "titan_mi100": ("test_trainer.py", *_STEP, *_SAVED, _LAYOUTS, "test_train.py"),
}
TIME_LIMIT = 600  # seconds a mutant
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


@dataclass(frozen=True)
class Mutant:
    """Source between two places, (line, byte column) from 1 and 0, and what stands there instead."""

    path: str  # below the repository's root
    start: tuple[int, int]
    stop: tuple[int, int]
    old: str
    new: str

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
    for node, instead in _walk(ast.parse(source)):
        text = instead if isinstance(instead, str) else ast.unparse(instead)
        if isinstance(node, ast.expr):
            text = f"({text})"
        if text in (old := ast.unparse(node), f"({old})"):
            continue
        place = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        mutant = Mutant(path, *place, old, text)
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
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg is not None:
        yield changed(keywords=node.keywords[:-1])


def files_of(only: tuple[str, ...]) -> list[str]:
    """The package's Python files whose path ends like one of these; of none, the core's, see scripts/count_lines.py."""
    entries = [""] if only else runpy.run_path(str(REPO / "scripts" / "count_lines.py"))["CORE"]
    paths = [REPO / "titan_mi100" / entry for entry in entries]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    names = [file.relative_to(REPO).as_posix() for file in files]
    return [name for name in names if name.endswith(only or ("",))]


def tests_of(path: str) -> list[str]:
    """The tests that should notice a mutant of this file."""
    file = Path(path)
    names = [f"{file.parent.name}/{file.stem}", file.stem, *(parent.name for parent in file.parents)]
    found = next(TESTS[name] for name in names if name in TESTS)
    return [f"tests/{test}" for test in dict.fromkeys(found)]


class Trials:
    """Mutants tried, a thread each in its own copy, and their results in a file."""

    def __init__(self, folder: Path, output: Path) -> None:
        self._folder, self._output = folder, output
        self._local, self._lock = threading.local(), threading.Lock()

    def attempt(self, mutant: Mutant) -> None:
        if not hasattr(self._local, "copy"):
            self._local.copy = Path(tempfile.mkdtemp(dir=self._folder))
            copy_tree(self._local.copy)
        place = self._local.copy / mutant.path
        source = place.read_bytes()
        place.write_bytes(mutant.applied(source))
        try:
            verdict = run_tests(self._local.copy, tests_of(mutant.path), TIME_LIMIT)
        finally:
            place.write_bytes(source)
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
    parser.add_argument("--sample", type=int, default=300, help="mutants to try, drawn from all; 0: every one")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="files whose path ends like this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--output", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--list", action="store_true", help="only print the mutants that would be tried")
    options = parser.parse_args()
    missing = {
        test for tests in TESTS.values() for test in tests if not (REPO / "tests" / test.split("::")[0]).is_file()
    }
    if missing:
        parser.error(f"TESTS names what does not exist: {', '.join(sorted(missing))}")
    files = files_of(tuple(options.only))
    every = [mutant for file in files for mutant in mutants_of(file, (REPO / file).read_bytes())]
    chosen = every
    if 0 < options.sample < len(every):
        chosen = random.Random(options.seed).sample(every, options.sample)
    print(f"{len(chosen)} of {len(every):,} mutants of {len(files)} files")
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    done = read_results(options.output)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trials = Trials(Path(folder), options.output)
        list(pool.map(trials.attempt, [mutant for mutant in chosen if mutant.name not in done]))
    return report([read_results(options.output)[mutant.name] for mutant in chosen])


def report(results: list[dict[str, str]]) -> int:
    """Print the score; 1 if it is below what is wanted. What crashes or never ends is noticed too."""
    kinds = Counter(result["kind"] for result in results)
    killed = len(results) - kinds["green"]
    print(f"\n{killed} of {len(results)} killed, {killed / max(len(results), 1):.1%}: {dict(kinds)}\nsurvivors:")
    print(*sorted(f"  {result['name']}" for result in results if result["kind"] == "green"), sep="\n")
    return int(killed < WANTED * len(results))


if __name__ == "__main__":
    sys.exit(main())
