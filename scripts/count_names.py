"""Counts names and shapes that make code hard to read. tests/test_names.py asserts that they only fall.

    python scripts/count_names.py [--json] [--where NAME]

Local names that say nothing (a name counts once for each function that sets it), names that are as weak in their place,
tuples that are made to be splatted into arguments, functions that take the whole Config, and functions with eight or
more parameters (without kernels and custom operators, whose callers pass tensors).
"""

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
EMPTY = ("found", "what", "said", "mine", "more", "whole", "given", "place", "wanted")
WEAK = ("result", "value", "values", "data", "item", "items", "entry", "out")
MANY = 8  # parameters


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the package, with path:line."""
    for path in sorted((REPO / "titan_mi100").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(REPO)}:{node.lineno}", node


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [] if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)


def locals_of(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in _own(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _splatted(function: ast.FunctionDef) -> set[str]:
    """Local names that are set to a tuple, and passed as `*name`."""
    tuples = {
        target.id
        for node in _own(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = (node for node in _own(function) if isinstance(node, ast.Call))
    starred = (one.value for call in calls for one in call.args if isinstance(one, ast.Starred))
    return tuples & {one.id for one in starred if isinstance(one, ast.Name)}


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    listed = function.args
    return [*listed.posonlyargs, *listed.args, *listed.kwonlyargs]


def counts() -> dict[str, int]:
    """The counts by name; "empty names" and "weak names" are sums."""
    names, of = Counter[str](), Counter[str]()
    for _, function in functions():
        names.update(locals_of(function))
        parameters = _parameters(function)
        of["splatted tuples"] += len(_splatted(function))
        of["take the whole Config"] += any(ast.unparse(p.annotation) == "Config" for p in parameters if p.annotation)
        is_kernel = any(
            "jit" in ast.unparse(mark) or "custom_op" in ast.unparse(mark) for mark in function.decorator_list
        )
        of["eight or more parameters"] += len(parameters) >= MANY and not is_kernel
    sums = {"empty names": sum(names[name] for name in EMPTY), "weak names": sum(names[name] for name in WEAK)}
    return {**sums, "found": names["found"], **of}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--where", metavar="NAME", default="", help="list the functions that have this local name")
    options = parser.parse_args()
    if options.where:
        print("\n".join(f"{where} {f.name}" for where, f in functions() if options.where in locals_of(f)))
    else:
        print(json.dumps(counts()) if options.json else "\n".join(f"{n:>6}  {name}" for name, n in counts().items()))


if __name__ == "__main__":
    sys.exit(main())
