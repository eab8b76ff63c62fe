"""Lists the test files that know private names of the package; test_names.py asserts that they only become fewer.

    python tests/private_names.py

A file knows one if it imports it, takes it from an imported module or class, or replaces it by its text.
"""

import ast
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
NAMED_TUPLE = {"_fields", "_replace", "_asdict", "_make"}  # public in spite of the underscore


def defined(folder: Path = REPO / "titan_mi100") -> set[str]:
    """The private names of functions, classes and variables in the package, or in a folder of it."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - NAMED_TUPLE


def uses(source: str, private: set[str]) -> list[str]:
    """The private names that a test file knows, once for each use."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    aliases = [alias for node in imports if node.module.startswith("titan_mi100") for alias in node.names]
    modules = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    known = {alias.asname or alias.name for alias in aliases + modules}
    names = [alias.name for alias in aliases if alias.name in private]
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in private:
            names += [ast.unparse(node)] if ast.unparse(node.value) in known - {"os", "torch"} else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr"):
            texts = [one.value for one in node.args[:2] if isinstance(one, ast.Constant)]
            names += [text for text in texts if isinstance(text, str) and text.rsplit(".")[-1] in private]
    return names


def files() -> dict[str, list[str]]:
    """The test files that know private names, with the names."""
    private = defined()
    known = {path: uses(path.read_text(encoding="utf-8"), private) for path in sorted((REPO / "tests").rglob("*.py"))}
    return {path.relative_to(REPO).as_posix(): names for path, names in known.items() if names}


if __name__ == "__main__":
    listed = files()
    print("\n".join(f"{path}: {', '.join(names)}" for path, names in listed.items()), len(listed), sep="\n")
