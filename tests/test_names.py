"""Names that say nothing, and shapes that are hard to read, only become fewer; scripts/count_names.py counts them."""

import ast

import count_names
import private_names
import pytest

MOST = {
    "empty names": 10, "weak names": 135, "found": 3, "splatted tuples": 4, "take the whole Config": 42,
    "eight or more parameters": 6,
}  # fmt: skip
MOST_PRIVATE = 29  # test files that know private names of the package


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


@pytest.mark.full
def test_fewer_and_fewer_tests_know_private_names() -> None:
    assert len(known := private_names.files()) <= MOST_PRIVATE, known


def test_which_private_names_are_counted() -> None:
    source = (
        "import os\nimport torch\n"
        "from titan_mi100.data import files\nfrom titan_mi100.data.files import Reader, _size\n"
        "def test(monkeypatch):\n    files._open\n    Reader._size\n    os._open\n    torch._size\n    files._theirs\n"
        "    monkeypatch.setattr(files, '_size', 3)\n    monkeypatch.setattr('titan_mi100.data.files._open', 3)\n"
        "    monkeypatch.setattr(os, '_exit', 3)\n"
    )
    known = ["_size", "files._open", "Reader._size", "_size", "titan_mi100.data.files._open"]
    assert sorted(private_names.uses(source, {"_size", "_open"})) == sorted(known)
    defined = private_names.defined(private_names.REPO / "titan_mi100" / "data")
    assert {"_ROWS_OF_A_PART", "_read_manifest"} - defined == {"_read_manifest"}
