"""Scorers of sampled answers: what each compares, and where a row has its gold answer.

A scorer gives 1.0 or 0.0; `length` a number between them. None: the row has nothing to compare with, so that a gold
answer that is missing never pays.
"""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object, without_contradictions
from titan_mi100.text.judge import exact_value, judge_of
from titan_mi100.wording import shown

SCORERS = "number, text, tool_calls, length:TOKENS, regex:PATTERN, schema:FILE.json"
_TEXTS = ("output", "completion")  # of rows of training
_GOLD_KEYS = ("answer", "solution", "ground_truth", "reward_model.ground_truth", *_TEXTS)
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)  # as Qwen3.5 writes a call
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Judged(NamedTuple):
    """What scorers see."""

    text: str  # without thinking
    tokens: int
    gold: Any  # see gold_of
    row: dict[str, Any]


def scorer_of(name: str) -> Callable[[Judged], float | None]:
    """The scorer of a name in SCORERS. Raises ValueError: there is none; UserError: its file cannot be used."""
    kind, _, rest = name.partition(":")
    if name == "tool_calls":
        return lambda judged: float(_same_calls(judged.text, calls)) if (calls := calls_of(judged.row)) else None
    if kind == "length" and re.fullmatch("[1-9][0-9]{0,8}", rest):
        return lambda judged: max(0.0, min(1.0, 2 - judged.tokens / int(rest)))
    if kind == "schema" and rest:
        return partial(_is_valid, _validator(Path(rest)))
    if name not in ("number", "text") and kind != "regex":
        raise ValueError(f"is no scorer; there are {SCORERS}")
    return partial(_equals, exact_value if name == "number" else judge_of(name), kind == "regex")


def without_thinking(text: str, is_open: bool = False) -> str:
    """What of an answer is judged. Args: is_open: the prompt has begun the thinking."""
    _, closed, after = text.rpartition("</think>")
    return "" if is_open and not closed else after.partition("<think>")[0]


def last_answer(row: dict[str, Any]) -> dict[str, Any]:
    """The last of the row's messages, if it is the assistant's: then it was no part of the prompt."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last if isinstance(last, dict) and last.get("role") == "assistant" else {}


def gold_of(row: dict[str, Any], key: str = "") -> Any:
    """The gold answer of a row; of a text what is behind its last ####. None: it is missing or empty.

    Args:
        key: where it is, dotted; "": one of the usual keys, or the last message.

    Raises:
        ValueError: several are there, and they differ.
    """
    golds = dict[str, Any]()
    for name in (key,) if key else (*_GOLD_KEYS, "messages"):
        text = last_answer(row).get("content")
        gold: Any = row if key or name != "messages" else {name: text if isinstance(text, str) else None}
        for part in name.split("."):
            gold = gold.get(part) if isinstance(gold, dict) else None
        if isinstance(gold, str):
            gold = (without_thinking(gold) if name == "messages" else gold).rpartition("####")[2].strip()
        if gold not in (None, "", [], {}) and (key or name not in _TEXTS or isinstance(gold, str)):
            golds[name] = gold
    if len({str(gold) for gold in golds.values()}) > 1:
        differing = ", ".join(f"{name} = {shown(gold)}" for name, gold in golds.items())
        raise ValueError(f"{differing}: these differ; name the gold answer's key, such as --gold {next(iter(golds))}")
    return next(iter(golds.values()), None)


def _equals(part_of: Callable[[str], str | None], or_whole: bool, judged: Judged) -> float | None:
    """Args: or_whole: a gold answer without such a part is compared as a whole."""
    gold = str(judged.gold).strip() if type(judged.gold) in (str, int, float) else ""
    right = part_of(gold) or (gold if or_whole else None)
    return float(part_of(judged.text) == right) if right else None


def _json(text: str) -> Any:
    """Raises ValueError, RecursionError: it is no JSON, or has a key twice. 1.0 and 1 are one number."""
    return json.loads(text, object_pairs_hook=without_contradictions, parse_constant=_finite, parse_float=_finite)


def _finite(word: str) -> float:
    if not math.isfinite(number := float(word)):
        raise ValueError(word)
    return int(number) if number.is_integer() else number


def calls_of(row: dict[str, Any]) -> list[Any]:
    """The gold tool calls of a row, each with name and arguments. Raises ValueError: they are no calls."""
    calls = last_answer(row).get("tool_calls") or row.get("tool_calls") or []
    try:
        calls = _json(calls if isinstance(calls, str) else json.dumps(calls))
        calls = [(call.get("function", call)["name"], call.get("function", call)["arguments"]) for call in calls]
        calls = [{"name": name, "arguments": _json(own) if isinstance(own, str) else own} for name, own in calls]
        if all(type(call["arguments"]) is dict for call in calls):
            return calls
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        pass
    raise ValueError("tool_calls must be a list of calls with name and arguments; correct it")


def _same_calls(text: str, gold: list[Any]) -> bool:
    """Whether the answer's calls are the gold ones, in their order."""
    blocks = _CALL.findall(text)
    with suppress(ValueError, RecursionError):
        if len(blocks) == text.count("<tool_call>") == len(gold):
            calls = [_call(block, own["arguments"]) for block, own in zip(blocks, gold, strict=True)]
            return json.dumps(calls, sort_keys=True) == json.dumps(gold, sort_keys=True)
    return False


def _call(block: str, gold: dict[str, Any]) -> Any:
    """The call of a block. Qwen3.5's has no quotes, so its values have the types of the gold arguments."""
    if not (written := _FUNCTION.fullmatch(block)):
        return _json(block)
    pairs = list[tuple[str, Any]]()
    for key, text in _PARAMETER.findall(written[2]):
        own = gold.get(key)
        pairs.append((key, text if isinstance(own, str) else own if text == str(own) else _json(text)))
    return {"name": written[1], "arguments": without_contradictions(pairs)}


def _validator(path: Path) -> Any:
    schema = read_object(path, "name a JSON schema")
    try:
        from jsonschema import validators
        from referencing import Registry

        kind = validators.validator_for(schema, default=validators.Draft202012Validator)
        kind.check_schema(schema)
        return kind(schema, registry=Registry())  # which fetches no $ref
    except ImportError:
        raise UserError(f"schema:{path} needs jsonschema: pip install 'titan-mi100[schema]'") from None
    except Exception as error:
        raise UserError(f"{path}: is no JSON schema ({shown(str(error))}); correct it") from None


def _is_valid(validator: Any, judged: Judged) -> float:
    try:
        parsed = _json((_FENCED.findall(judged.text) or [judged.text])[-1])
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(parsed))
