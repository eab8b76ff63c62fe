"""Lists the messages of the package that have a remedy, and draws some of them: see test_remedies.py."""

import ast
import random
import re
from collections.abc import Iterator

from conftest import REPO

SEED = 20261
Message = tuple[str, str]  # file, first words: lines may move without changing a draw
_RAISED = ("UserError", "Problem", "ValueError", "SaveError", "NumericalError", "ConfigError")
# The remedies about columns and formats of rows, unknown keys and answers have tests of their own.
_ELSEWHERE = {
    *("data/answers", "data/answer_store", "data/columns", "data/formats", "data/conversation", "config/unknown"),
    *(
        "open_run/columns",
        "open_run/logprob_pass",
        "open_run/reference",
        "open_run/teacher",
        "tools/teach",
        "workshop/vllm_answers",
    ),
}
_IMPERATIVE = re.compile(
    r"(?:[;:,]|\bor|\band|\bthen) (use|set|write|delete|choose|install|run|give|lower|raise|name|leave|keep|start|free"
    r"|correct|download|make|remove|move|copy|convert|train|add|try|put|take|rename|ask|resume|merge|load|save)\b"
)


def _constants(node: ast.AST) -> Iterator[str]:
    yield from (
        " ".join(each.value.split())
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def _text(call: ast.Call, assigned: list[ast.Assign]) -> str:
    """The constant texts of a message: its own, then those of the local variables in it as they were set last."""
    texts = [*_constants(call)]
    names = dict.fromkeys(
        each.id for each in ast.walk(call) if isinstance(each, ast.Name)
    )  # by place: names may change
    for name in (name for name in names if name not in ("path", "name", "self")):
        sets = [each for each in assigned if name in [getattr(target, "id", "") for target in each.targets]]
        sets = [each for each in sets if each.lineno < call.lineno]
        own = _constants(max(sets, key=lambda each: each.lineno).value) if sets else ()
        texts += (text for text in own if any(map(str.isalpha, text)))
    return " ".join(texts)


def messages(called: tuple[str, ...] = _RAISED, only: str = "") -> list[Message]:
    """Those with a remedy. Args: only: a file whose messages are all listed."""
    found = set()
    for path in (REPO / "titan_mi100").rglob("*.py"):
        file = str(path.relative_to(REPO / "titan_mi100").with_suffix(""))
        if file == only or (not only and file not in _ELSEWHERE):
            tree = ast.parse(path.read_text())
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in called and node.args:
                        text = _text(node, assigned)
                        if only or _IMPERATIVE.search(text):
                            found.add((file, " ".join(text.strip(" ;:,=").split()[:6])))
    return sorted(found)


def rank(message: Message) -> float:
    """The place in the draw: another message changes it for itself only."""
    return random.Random(f"{SEED} {message}").random()
