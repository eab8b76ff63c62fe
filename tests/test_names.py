"""Names that say nothing, and shapes that are hard to read, only become fewer; scripts/count_names.py counts them."""

import ast

import count_names
import pytest

MOST = {
    "empty names": 10, "weak names": 135, "found": 3, "splatted tuples": 4, "take the whole Config": 42,
    "eight or more parameters": 6,
}  # fmt: skip


def test_hard_names_and_shapes_only_become_fewer() -> None:
    counts = count_names.counts()
    assert counts.keys() == MOST.keys()
    assert {name: count for name, count in counts.items() if count > MOST[name]} == {}


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "def f(config: Config, a, b, c, d, e, *, g, h):\n    found = a, b\n    found = found\n    g(*found)\n"
        "    def inner(): value = 1\n@triton.jit\ndef kernel(a, b, c, d, e, f, g, h): said = [1]; a(*said)\n"
    )
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    monkeypatch.setattr(count_names, "functions", lambda: (("x.py:1", function) for function in functions))
    assert count_names.counts() == {
        "empty names": 2, "weak names": 1, "found": 1, "splatted tuples": 1, "take the whole Config": 1,
        "eight or more parameters": 1,
    }  # fmt: skip
