"""What a row of training data may look like: seven formats, each read into an Example or refused with the reason."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_mi100.config.layout import IGNORE
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.conversation import Message, answered, in_order, message_list, read_message, tool_list
from titan_mi100.data.files import read_records
from titan_mi100.data.strict_json import BadRow, kind_of, listed, parse, parse_text, shown
from titan_mi100.errors import UserError

_LARGEST_ID = 2**31 - 1  # ids are kept as int32
_COLUMN_PAIRS = (("question", "answer"), ("prompt", "response"))  # known without being named
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function_response", "observation"), "tool"),
    "system": "system",
}


class Example(NamedTuple):
    """One row, whatever its format; exactly one of messages, text and input_ids is set."""

    messages: list[Message] | None = None  # role, content, and the optional keys of `conversation.read_message`
    tools: list[Any] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    labels: list[int] | None = None  # per id: IGNORE, or the id itself (not shifted); None: all are learned


@dataclass(frozen=True)
class Format:
    """How rows are read: `read` turns a parsed row into an Example, or raises BadRow."""

    name: str
    description: str
    read: Callable[[dict[str, Any]], Example]


def content_hash(example: Example) -> bytes:
    """16 bytes, equal for equal content, in whatever order the keys stand; 1 and 1.0 differ, as they render."""
    return hashlib.blake2b(_CANONICAL.encode(example).encode(), digest_size=16).digest()


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), check_circular=False)


def choose_format(path: str, config: DataConfig) -> Format:
    """The format of a file's rows; `auto` goes by the keys of the file's first row that can be read.

    Args:
        path: read only where the format does not follow from the config.
        config: checked, so its columns go together and with its format.

    Raises:
        UserError: the keys fit no known format.
    """
    name, prompt_column, text_column = config.format, config.prompt_column, config.text_column
    if name == "auto" and prompt_column:
        name = "columns"
    elif name == "auto" and text_column not in ("", "text"):  # the default is no wish
        name = "text"
    assert name in ("auto", *FORMATS)
    if name in _FIXED:
        return _FIXED[name]
    if name == "text":
        return _text_format(text_column or "text")
    if prompt_column:
        return _columns_format(prompt_column, config.response_column, config.system_column)
    keys = _first_keys(path)
    for format_name, needed in _KEYS.items():
        if name == "auto" and keys >= needed:
            return _FIXED[format_name]
    for pair in _COLUMN_PAIRS:
        if keys >= set(pair):
            return _columns_format(*pair, "")
    if name == "auto" and "text" in keys:
        return _text_format("text")
    raise UserError(
        f"{path}: rows have the keys {listed(keys)}; expected messages, conversations, instruction and output, prompt "
        "and completion, question and answer, prompt and response, text, or input_ids; or name two columns in [data] "
        "prompt_column and response_column, or one in text_column"
    )


def _first_keys(path: str) -> set[str]:
    """The keys with a value of the first row that can be read; the others are reported when all rows are read."""
    first_reason = ""
    for record in read_records(path):
        try:
            if record.problem:
                raise BadRow(*record.problem.split(": ", 1))
            return {key for key, value in parse(record.raw).items() if value is not None}
        except BadRow as bad:
            first_reason = first_reason or f"{path}:{record.number}: {bad}"
    raise UserError(f"{first_reason}\n{path}: no row can be read, so its format is not known")


def _column(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise BadRow("missing key", f"there is no {shown(name)}; the row has {listed(row)}")
    return row[name]


def _text(row: dict[str, Any], name: str) -> str:
    value = _column(row, name)
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{name} must be a text, is {kind_of(value)}")
    return value


def _answer(row: dict[str, Any], name: str) -> str:
    value = _text(row, name)
    if not value.strip():
        raise BadRow("nothing to learn", f"{name} is blank")
    return value


def _with_system(messages: list[Message], row: dict[str, Any], name: str) -> list[Message]:
    if row.get(name) is None or not _text(row, name).strip():
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("two system messages", f"one is {name}, the other the first message; delete one")
    return [{"role": "system", "content": row[name]}, *messages]


def _turn(prompt: str, response: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _read_messages(row: dict[str, Any]) -> Example:
    messages = message_list(_column(row, "messages"), "messages")
    return Example(answered(in_order(messages)), tool_list(row.get("tools")))


def _read_sharegpt(row: dict[str, Any]) -> Example:
    messages = message_list(_column(row, "conversations"), "conversations", _sharegpt_message)
    messages = _with_system(messages, row, "system")
    return Example(answered(in_order(messages)), tool_list(row.get("tools")))


def _sharegpt_message(given: Any) -> Message:
    if not isinstance(given, dict) or "from" not in given:
        return read_message(given)
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    if mixed := rest.keys() & {"role", "content"}:
        raise BadRow("unknown key", f"{listed(mixed)} beside from; use from and value, or role and content")
    speaker, value = given["from"], given.get("value")
    if speaker == "function_call":
        return read_message({**rest, "role": "assistant", "content": "", "tool_calls": _function_calls(value)})
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        known = ", ".join([*_SHAREGPT_ROLES, "function_call"])
        raise BadRow("unknown role", f"from is {shown(speaker)}; known are {known}")
    return read_message({**rest, "role": _SHAREGPT_ROLES[speaker], "content": value}, content_name="value")


def _function_calls(value: Any) -> list[Any]:
    if not isinstance(value, str):
        raise BadRow("bad tool call", f"value must be the JSON text of a call, is {kind_of(value)}")
    try:
        calls = parse_text(value)
    except BadRow as bad:
        raise BadRow("bad tool call", f"value must be the JSON text of a call; {bad}") from None
    if calls == []:
        raise BadRow("bad tool call", "value is an empty list; expected a call")
    return calls if isinstance(calls, list) else [calls]


def _read_alpaca(row: dict[str, Any]) -> Example:
    prompt, response = _text(row, "instruction"), _answer(row, "output")
    if row.get("input") is not None and _text(row, "input").strip():
        prompt += "\n" + row["input"]
    history = row.get("history")
    if not isinstance(history, list | None):
        raise BadRow("wrong type", f"history must be a list of pairs, is {kind_of(history)}")
    messages: list[Message] = []
    for number, pair in enumerate(history or [], 1):
        if not isinstance(pair, list) or [type(item) for item in pair] != [str, str]:
            raise BadRow("wrong type", f"history, pair {number}: must be a list of two texts, the question and answer")
        if not pair[1].strip():
            raise BadRow("nothing to learn", f"history, pair {number}: the answer is blank")
        messages += _turn(*pair)
    return Example(_with_system(messages + _turn(prompt, response), row, "system"))


def _read_prompt_completion(row: dict[str, Any]) -> Example:
    prompt, completion = _column(row, "prompt"), _column(row, "completion")
    if isinstance(prompt, str):
        messages = _turn(prompt, _answer(row, "completion"))
    elif not isinstance(prompt, list):
        raise BadRow("wrong type", f"prompt must be a text or a list of messages, is {kind_of(prompt)}")
    else:
        before = message_list(prompt, "prompt", functools.partial(read_message, context=True))
        messages = in_order(before + answered(message_list(completion, "completion")))
    return Example(messages, tool_list(row.get("tools")))


def _read_columns(prompt: str, response: str, system: str, row: dict[str, Any]) -> Example:
    messages = _turn(_text(row, prompt), _answer(row, response))
    if system:
        _column(row, system)  # null and blank are no system message, but a column that is not there may be misspelt
        messages = _with_system(messages, row, system)
    return Example(messages)


def _read_text(column: str, row: dict[str, Any]) -> Example:
    return Example(text=_answer(row, column))


def _read_tokens(row: dict[str, Any]) -> Example:
    ids = _integers(row, "input_ids")
    if not ids:
        raise BadRow("nothing to learn", "input_ids is empty")
    if min(ids) < 0 or max(ids) > _LARGEST_ID:
        place = next(i for i, number in enumerate(ids) if not 0 <= number <= _LARGEST_ID)
        raise BadRow("bad token id", f"input_ids[{place}] is {shown(ids[place])}; expected 0 to {_LARGEST_ID:,}")
    if row.get("attention_mask") is not None:
        mask = _integers(row, "attention_mask")
        if len(mask) != len(ids) or set(mask) != {1}:
            raise BadRow("bad attention mask", "it must be 1 for each of input_ids; remove the padding")
    if row.get("labels") is None:
        return Example(input_ids=ids)
    labels = _integers(row, "labels")
    if len(labels) != len(ids):
        raise BadRow("bad labels", f"{len(labels):,} labels for {len(ids):,} input_ids; expected as many")
    for place, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORE, token):
            wrong = f"labels[{place}] is {shown(label)}, input_ids[{place}] is {token}"
            raise BadRow("bad labels", f"{wrong}; expected the same or {IGNORE} (labels are not shifted)")
    if all(label == IGNORE for label in labels[1:]):
        raise BadRow("nothing to learn", f"all labels behind the first are {IGNORE}")
    return Example(input_ids=ids, labels=None if labels == ids else labels)


def _integers(row: dict[str, Any], name: str) -> list[int]:
    values = _column(row, name)
    if not isinstance(values, list):
        raise BadRow("wrong type", f"{name} must be a list of integers, is {kind_of(values)}")
    if not set(map(type, values)) <= {int}:
        place = next(i for i, value in enumerate(values) if type(value) is not int)
        raise BadRow("wrong type", f"{name}[{place}] must be an integer, is {shown(values[place])}")
    return values


_FIXED = {
    "messages": Format("messages", "OpenAI", _read_messages),
    "sharegpt": Format("sharegpt", "conversations", _read_sharegpt),
    "alpaca": Format("alpaca", "instruction and output", _read_alpaca),
    "prompt_completion": Format("prompt_completion", "prompt and completion", _read_prompt_completion),
    "tokens": Format("tokens", "input_ids", _read_tokens),
}
_KEYS = {  # by which `auto` knows them, in this order: some rows of messages have a prompt, too
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "tokens": {"input_ids"},
    "alpaca": {"instruction", "output"},
    "prompt_completion": {"prompt", "completion"},
}
FORMATS = (*_FIXED, "columns", "text")


def _columns_format(prompt: str, response: str, system: str) -> Format:
    description = f"{prompt} and {response}" + (f", system message from {system}" if system else "")
    return Format("columns", description, functools.partial(_read_columns, prompt, response, system))


def _text_format(column: str) -> Format:
    return Format("text", f"column {column}", functools.partial(_read_text, column))
