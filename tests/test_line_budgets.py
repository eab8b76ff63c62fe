"""The code stays within its budgets of lines, which scripts/count_lines.py counts and prints."""

from pathlib import Path

import count_lines
import pytest


@pytest.fixture(scope="module")
def files() -> list[count_lines.File]:
    return count_lines.count(count_lines.PRODUCT)


@pytest.mark.parametrize("part", count_lines.BUDGETS)
def test_lines_of_code_stay_within_the_budget(part: str, files: list[count_lines.File]) -> None:
    assert count_lines.code_of(files, part) <= count_lines.BUDGETS[part]


def test_every_folder_has_a_budget() -> None:
    folders = {path.name for path in (count_lines.REPO / "titan_mi100").iterdir() if (path / "__init__.py").exists()}
    assert folders == count_lines.FOLDERS.keys()


def test_only_lines_with_code_count(tmp_path: Path) -> None:
    source = '"""Two\nlines."""\n\n# why\nx = """a\n\nb"""  # three\n\n\ndef f():\n    """Says."""\n    return x\n'
    (tmp_path / "a.py").write_text(source)
    found = count_lines.count_python(tmp_path / "a.py", "a.py")
    assert (found.lines, found.code) == (12, 5)
    assert found.functions == (count_lines.Function("a.py:10 f", 3),)


def test_what_is_over_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = count_lines.BUDGETS["core"]
    function = count_lines.Function("titan_mi100/train.py:1 f", 81)
    files = [
        count_lines.File("titan_mi100/train.py", 451, budget + 1, (function,)),
        count_lines.File("scripts/a.py", 1, 1),
    ]
    monkeypatch.setattr(count_lines, "CORE", ("train.py",))
    monkeypatch.setattr(count_lines, "BUDGETS", {"core": budget})
    assert count_lines.over_budget(files) == [f"core: {budget + 1:,} lines of code, budget {budget:,}"]
    long_ones = ["titan_mi100/train.py: 451 lines", "titan_mi100/train.py:1 f: 81 lines"]
    assert count_lines.long_ones(files) == long_ones
    monkeypatch.setattr(count_lines, "CORE", ("gone",))
    with pytest.raises(ValueError, match="CORE names what does not exist: titan_mi100/gone"):
        count_lines.code_of(files, "core")
