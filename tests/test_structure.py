"""The package's folders: imports between them go downwards only, as docs/DESIGN.md draws them."""

import ast
import re
from pathlib import Path

from conftest import REPO

PACKAGE = REPO / "titan_mi100"


def module_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """The package's modules that a file imports anywhere, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the folder"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "titan_mi100":
                while len(parts) > 1 and not PACKAGE.joinpath(*parts[1:]).with_suffix(".py").is_file():
                    parts.pop()  # the name of a function or a class
                assert len(parts) > 1, f"{path} imports {name}, which is no module"
                found.add(tuple(parts[1:]))
    return found


def drawn_levels() -> dict[str, int]:
    """The place of each folder, and of each module at the top, in DESIGN.md's table: the lowest is 0."""
    text = (REPO / "docs" / "DESIGN.md").read_text(encoding="utf-8")
    table = text.split("## Layout")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (`[^|]+) \|", table, re.MULTILINE)
    return {name: int(level) for level, names in rows for name in re.findall(r"`(\w+)/?`", names)}


def test_the_map_names_each_folder_and_file_of_the_package_and_nothing_that_is_gone() -> None:
    text = (REPO / "docs" / "DESIGN.md").read_text(encoding="utf-8").split("## Map")[1].split("\n## ")[0]
    repository, *package = (
        {name for line in table.splitlines() if line.startswith("| `") for name in re.findall("`(.+?)/?`", cell(line))}
        for table in text.split("|---|---|")[1:]
    )
    assert set[str]().union(*package) == {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__pycache__"}
    assert [name for name in repository if not (REPO / name).exists()] == []


def cell(line: str) -> str:
    return line.split(" | ")[0]


def test_imports_go_downwards_between_the_folders_that_the_design_draws() -> None:
    levels, files = drawn_levels(), [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    assert {module_of(path)[0] for path in files} == levels.keys(), "the table in docs/DESIGN.md names other folders"
    upwards = [
        f"{'.'.join(module_of(path))} imports {'.'.join(target)}"
        for path in files
        for target in imports_of(path)
        if target[0] != module_of(path)[0] and levels[target[0]] >= levels[module_of(path)[0]]
    ]
    assert not upwards, upwards


def test_no_module_imports_itself_around_a_circle() -> None:
    graph = {module_of(path): imports_of(path) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], way: list[tuple[str, ...]]) -> None:
        assert module not in way, f"a circle: {[*way[way.index(module) :], module]}"
        if module not in done:
            for target in graph[module]:
                visit(target, [*way, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    assert len(done) == len(graph) > 80


def test_cuda_is_named_in_one_place() -> None:
    """Another accelerator must not need a change in more files. torch_build asks a build of torch for the doctor."""
    words = re.compile(r"""torch\.cuda\.|["']cuda["':]|\.is_cuda\b(?!\()|cudart|version\.(hip|cuda)\b""")
    known = {"device/accelerator.py", "launch/torch_build.py"}
    naming = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if words.search(path.read_text())}
    assert naming == known
    assert len((PACKAGE / "device/accelerator.py").read_text().splitlines()) <= 120
