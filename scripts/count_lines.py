"""Counts lines, lines of code and comments by folder, and the longest functions, against the budgets.

    python scripts/count_lines.py [--json]

Lines of code are those that hold code: no blank lines, comments or docstrings. "comments" is the share of all
lines that have a comment, whole-line or trailing. tests/test_line_budgets.py asserts the budgets below; a commit that
raises one says why.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from dataclasses import asdict, dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PRODUCT = ("titan_mi100", "checkpoint_tools", "scripts")  # what has budgets
COUNTED = (*PRODUCT, "tests")

# The core: config, attention, model, parallel, the loop, checkpoint. Folders and files below titan_mi100/.
CORE = (
    *("shapes", "config", "planning", "attention", "model", "optim", "parallel", "checkpoint"),
    "text/assets.py",  # once in config/
    *(
        "train.py",
        "process.py",
        "open_run/start.py",
        "open_run/fingerprints.py",
        "open_run/run.py",
        "open_run/model.py",
        "trainer.py",
        "run/evaluate.py",
        "run/progress.py",
    ),  # the loop
    "files/durable.py",  # how a checkpoint's files are written
)
BUDGETS = {"core": 12790, "titan_mi100": 31205, "scripts": 1980}  # lines of code
FOLDERS = {  # the same, of folders in titan_mi100/ with all below them
    "attention": 865, "checkpoint": 735, "config": 2220, "data": 4400, "device": 145, "files": 1730,
    "generation": 285, "launch": 785, "model": 3565, "objectives": 270, "open_run": 1195, "optim": 620,
    "parallel": 1295, "planning": 905, "run": 1375, "shapes": 1090, "text": 1500, "tools": 2030, "watch": 465,
    "weights": 1190, "workshop": 3680,
}  # fmt: skip
BUDGETS |= {f"titan_mi100/{folder}": budget for folder, budget in FOLDERS.items()}
LONG_FUNCTION, LONG_FILE = 80, 450  # lines above which a function or a file is named, as a reason to look at it


# tokens that are no code
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Function:
    """A function and its lines, from `def` to its last, docstring included."""

    name: str  # path:line name
    lines: int


@dataclass(frozen=True)
class File:
    path: str  # below the repository's root
    lines: int
    code: int
    functions: tuple[Function, ...] = ()
    comments: int = 0  # lines with a comment, whole-line or trailing


def count_python(path: Path, name: str) -> File:
    """Count one Python file, which the report calls `name`."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings: set[int] = set()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append(Function(f"{name}:{node.lineno} {node.name}", lines))
    code: set[int] = set()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token in tokens:
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    comments = sum(token.type == tokenize.COMMENT for token in tokens)  # a line has at most one
    return File(name, len(text.splitlines()), len(code - docstrings), tuple(functions), comments)


def count_shell(path: Path, name: str) -> File:
    lines = path.read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    comments = sum(line.lstrip().startswith("#") or " # " in line for line in lines)
    return File(name, len(lines), len(code), comments=comments)


def count(folders: tuple[str, ...] = COUNTED, repo: Path = REPO) -> list[File]:
    """Every Python and shell file of the folders."""
    found = []
    for folder in folders:
        for path in sorted((repo / folder).rglob("*")):
            if path.suffix in (".py", ".sh") and "__pycache__" not in path.parts:
                counted = count_python if path.suffix == ".py" else count_shell
                found.append(counted(path, path.relative_to(repo).as_posix()))
    return found


def code_of(files: list[File], part: str) -> int:
    """Lines of code of "core" or of a top-level folder; Python only, so that the budgets compare one language."""
    names = [f"titan_mi100/{entry}" for entry in CORE] if part == "core" else [part]
    python = [file for file in files if file.path.endswith(".py")]
    missing = [name for name in names if not any(_is_in(file.path, name) for file in python)]
    if missing:
        raise ValueError(f"scripts/count_lines.py: CORE names what does not exist: {', '.join(missing)}")
    return sum(file.code for file in python if any(_is_in(file.path, name) for name in names))


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def over_budget(files: list[File]) -> list[str]:
    """What is above a budget, in words."""
    return [
        f"{part}: {code_of(files, part):,} lines of code, budget {budget:,}"
        for part, budget in BUDGETS.items()
        if code_of(files, part) > budget
    ]


def long_ones(files: list[File]) -> list[str]:
    """Files and functions that are long, with their lines. No test asks for it."""
    product = [file for file in files if not file.path.startswith("tests/")]
    found = [f"{file.path}: {file.lines} lines" for file in product if file.lines > LONG_FILE]
    functions = [function for file in product for function in file.functions]
    return found + [f"{each.name}: {each.lines} lines" for each in functions if each.lines > LONG_FUNCTION]


def summary(files: list[File]) -> dict[str, object]:
    """Per folder: files directly in it, their lines, lines of code and comments; then budgets and longest functions."""
    folders: dict[str, dict[str, int]] = {}
    for file in files:
        entry = folders.setdefault(file.path.rpartition("/")[0], {"files": 0, "lines": 0, "code": 0, "comments": 0})
        entry["files"] += 1
        entry["lines"] += file.lines
        entry["code"] += file.code
        entry["comments"] += file.comments
    product = [file for file in files if not file.path.startswith("tests/")]
    longest = sorted((f for file in product for f in file.functions), key=lambda f: (-f.lines, f.name))
    return {
        "folders": dict(sorted(folders.items())),
        "budgets": {part: {"code": code_of(files, part), "budget": most} for part, most in BUDGETS.items()},
        "files on one level": max(
            folders.items(), key=lambda entry: (not entry[0].startswith("tests"), entry[1]["files"])
        ),
        "longest functions": [asdict(function) for function in longest[:5]],
        "long": long_ones(files),
        "over budget": over_budget(files),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    found = summary(count())
    if parser.parse_args().json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'folder':<32}{'files':>6}{'lines':>8}{'code':>8}{'comments':>10}")
    for folder, entry in found["folders"].items():  # type: ignore[attr-defined]
        share = entry["comments"] / entry["lines"]
        print(f"{folder:<32}{entry['files']:>6}{entry['lines']:>8,}{entry['code']:>8,}{share:>10.1%}")
    print()
    for part, entry in found["budgets"].items():  # type: ignore[attr-defined]
        print(f"{part}: {entry['code']:,} lines of code, budget {entry['budget']:,}")
    folder, entry = found["files on one level"]  # type: ignore[misc]
    print(f"most files on one level: {entry['files']} in {folder}/\n\nlongest functions:")
    for function in found["longest functions"]:  # type: ignore[attr-defined]
        print(f"{function['lines']:>5}  {function['name']}")
    print("\nlong:", *(found["long"] or ["nothing"]), sep="\n  ")  # type: ignore[misc]
    print("\nover budget:", *(found["over budget"] or ["nothing"]), sep="\n  ")  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    sys.exit(main())
