"""The seven formats of training records, and those of preferences (answers.py). Each record is read into an Example,
or refused with the reason.
"""

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.config.layout import IGNORE
from titan_mi100.config.settings import DataConfig
from titan_mi100.data import samples
from titan_mi100.data.answers import LABEL_KEYS, LABELS, OPTIONAL, PAIR_KEYS, PAIRS, PROMPTS, label_of, read_pair
from titan_mi100.data.blocks import joined_text
from titan_mi100.data.columns import (
    HOLD_MESSAGES,
    INSTEAD,
    LISTS,
    Findings,
    check_keys,
    check_unused,
    follow_masks,
    is_flags,
)
from titan_mi100.data.conversation import (
    Message,
    check_order,
    drop_keys,
    last_of,
    message_list,
    read_message,
    require_answer,
    settle_nulls,
    tool_list,
)
from titan_mi100.data.files import Record, read_records
from titan_mi100.data.samples import SAMPLES, Kept
from titan_mi100.data.strict_json import BadRecord, expect, kind_of, listed, parse, parse_text, shown
from titan_mi100.errors import UserError

_LARGEST_ID = 2**31 - 1  # a stored value is 2 * id + supervised in 32 bits
# Column names that `auto` recognises; with an instruction the last pair is alpaca's.
_COLUMN_PAIRS = (("question", "answer"), ("prompt", "response"), ("input", "output"))
_SHAREGPT_ROLES = INSTEAD["role"]
_SPEAKERS = [*_SHAREGPT_ROLES, "function_call"]
_REPR = re.compile(  # Python's and numpy's form of messages
    rf"\s*(?:\w+\(|[\[(])*\s*\{{(?=.*'(?:content|value)': ).*'(?:role|from)': '(?:{'|'.join(_SPEAKERS)})'", re.DOTALL
)
_OF_MESSAGES = ("messages", "sharegpt", "prompt_completion", "pairs")  # formats that read lists of messages


class Example(NamedTuple):
    """One record, independent of its format. Exactly one of messages, text and input_ids is set."""

    messages: list[Message] | None = None  # as returned by `conversation.read_message`
    tools: list[Any] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    labels: list[int] | None = None  # per id: IGNORE, or the id itself (not shifted); None: all ids are learned
    rejected: list[Message] | None = None  # of a pair; `messages` has the chosen answer
    label: int = 0  # of a single answer: 1 wanted, -1 not
    idle: str = ""  # why a pair, or a group of samples, teaches nothing
    notes: tuple[str, ...] = ()  # what was found in it, see Findings.notes
    samples: tuple[tuple[int, list[int]], ...] = ()  # of a group: number and ids of each answer that is learned

    def tokens(self) -> tuple[list[int], list[bool]]:
        """Of a record that is tokenised already: its ids, and which of them are learned."""
        assert self.input_ids is not None
        ids, labels = self.input_ids, self.labels
        return ids, [True] * len(ids) if labels is None else [label != IGNORE for label in labels]


@dataclass(frozen=True)
class Format:
    """How records are read. `read` turns a parsed record into an Example, or raises BadRecord."""

    name: str
    description: str
    read: Callable[[dict[str, Any]], Example]
    keys: frozenset[str]  # required keys; `auto` recognises the format by them
    optional: frozenset[str] = frozenset()  # further keys that `read` uses

    def read_row(
        self, row: dict[str, Any], ignored: frozenset[str], findings: Findings, nulls: str = "kept"
    ) -> Example:
        """Drop the ignored keys of a row, follow its masks, then `read` it.

        Args:
            ignored: keys that the user ignores (data.ignored_keys); harmless keys are ignored as well.
            findings: updated.
            nulls: see `conversation.settle_nulls`.

        Raises:
            BadRecord: from `read`, or the row has a key that this format does not read, and that matters.
        """
        if named := self.keys & ignored:
            raise BadRecord("missing key", f"data.ignored_keys names {listed(named)}, which format {self.name} reads")
        in_messages: Counter[str] = Counter()
        row, notes = _unpacked(row, self)
        unread = (row.keys() - self.keys - self.optional) | (row.keys() & ignored)
        unread = {key for key in unread if row[key] not in (None, "", [], {})}
        check_keys(self.name, row, unread - ignored)
        holds = HOLD_MESSAGES | (self.keys if self.name == "pairs" else set())
        kept = {key: value for key, value in row.items() if key not in ignored}
        kept = drop_keys(kept, ignored, in_messages, holds)
        kept = follow_masks(self.name, kept, unread - ignored, holds, findings)
        unread -= row.keys() - kept.keys() - ignored
        findings.ignored.update(f"{key} (flags)" if is_flags(row[key]) else key for key in unread)
        findings.ignored.update({f"{key} in messages": number for key, number in in_messages.items()})
        example = self.read(kept)
        answers = [*(example.messages or []), *(example.rejected or [])]
        settle_nulls(answers, nulls, findings.nulls)
        if example.input_ids is None:
            check_unused(self.name, kept, self.keys | self.optional, unread - ignored, findings)
        learned = (message for message in pairwise(answers) if message[0].get("weight") != 0)
        if any(one["role"] == later["role"] == "assistant" for one, later in learned):
            notes.append("two_answers")
        return example._replace(notes=tuple(notes))


def example_hash(example: Example) -> bytes:
    """A hash of 16 bytes. The order of keys does not matter; 1 and 1.0 differ, because templates render them so."""
    told = example[:8] if example.rejected or example.label else example[:5]  # as before there were preferences
    return hashlib.blake2b(_CANONICAL.encode(told).encode(), digest_size=16).digest()


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), check_circular=False)


def choose_format(path: str, config: DataConfig, answers: str = "") -> Format:
    """The format of a file's records. `auto` decides by the keys of the first readable record.

    Args:
        path: the file; it is read only if the config does not determine the format.
        config: already validated, so its columns are consistent with each other and with its format.
        answers: see ObjectiveConfig.answers.

    Raises:
        UserError: the keys fit no known format.
    """
    if answers == PAIRS:
        return _pairs(config)
    if answers.startswith(SAMPLES):
        kept = Kept.of(answers)
        samples.check_sealed(Path(path), kept.by_teacher)
        read = partial(_read_samples, kept)
        return Format("samples", "sampled answers with scores", read, samples.KEYS, samples.OPTIONAL)
    if answers == LABELS:
        return _labelled(choose_format(path, config), config.label_column)
    name, prompt_column, text_column = config.format, config.prompt_column, config.text_column
    if name == "auto" and prompt_column:
        name = "columns"
    elif name == "auto" and text_column not in ("", "text"):  # "text" is the default, so it does not choose the format
        name = "text"
    assert name in ("auto", *FORMATS)
    if name in _FIXED:
        return _FIXED[name]
    if name == "text":
        return _text_format(text_column or "text")
    if prompt_column:
        return _columns_format(prompt_column, config.response_column, config.system_column)
    keys = first_keys(path)
    for known in _FIXED.values():
        if name == "auto" and keys >= known.keys:
            return known
    for pair in _COLUMN_PAIRS:
        if keys >= set(pair):
            return _columns_format(*pair, "")
    if name == "auto" and "text" in keys:
        return _text_format("text")
    raise UserError(
        f"{path}: rows have the keys {listed(keys)}; expected messages, conversations, instruction and output, prompt "
        "and completion, question and answer, prompt and response, input and output, text, or input_ids; or name "
        "two columns in [data] prompt_column and response_column, or one in text_column; for pairs of answers "
        '(chosen, rejected) set [objective] name = "preference" and loss = "dpo"'
    )


def first_keys(path: str) -> set[str]:
    """The keys of the first readable record that have a value. Raises UserError: none can be read.

    Unreadable records before it raise nothing here; they are reported later with all others.
    """
    first_reason = ""
    for record in read_records(path):
        try:
            return {key for key, value in parse_record(record).items() if value is not None}
        except BadRecord as bad:
            first_reason = first_reason or f"{path}:{record.number}: {bad}"
    raise UserError(f"{first_reason.replace('FILE', shlex.quote(path))}; no row of the file can be read")


def parse_record(record: Record) -> dict[str, Any]:
    """Decode a record. Raises BadRecord: it has a problem, or it is not a valid JSON object."""
    if record.problem:
        raise BadRecord(*record.problem.split(": ", 1))
    return parse(record.raw)


def _unpacked(row: dict[str, Any], form: Format) -> tuple[dict[str, Any], list[str]]:
    """The row with lists of messages where it has their JSON text, and notes on that.

    The columns of other formats are learned as they stand.

    Raises:
        BadRecord: a text is Python's form of such a list.
    """
    row, notes = {**row}, list[str]()
    for key in (form.keys | form.optional & {*PROMPTS}) & row.keys() if form.name not in ("text", "tokens") else ():
        if not isinstance(text := row[key], str):
            continue
        is_whole = key in LISTS.values() or text.rstrip()[-1:] in ("}", "]", ")")  # else: a text about such a list
        if form.name in _OF_MESSAGES and is_whole and _REPR.match(text):
            detail = f"{listed([key])} is Python's form of a list of messages, not JSON"
            raise BadRecord("not JSON", f"{detail}; write the list itself, or its JSON text (json.dumps)")
        with suppress(BadRecord):
            parsed = parse_text(text, "", "") if text.lstrip()[:1] in ("[", "{", '"') else None
            parsed = parse_text(parsed, "", "") if isinstance(parsed, str) else parsed
            parsed = [parsed] if isinstance(parsed, dict) else parsed
            if isinstance(parsed, list) and (key in LISTS.values() or (parsed and all(map(_is_message, parsed)))):
                notes.append("json_text" if form.name in _OF_MESSAGES else "left_text")
                row[key] = parsed if form.name in _OF_MESSAGES else text
    return row, notes


def _is_message(item: Any) -> bool:
    """Whether it is certainly a message: answers can be JSON by nature, even with a key such as role."""
    pairs = (("role", "content"), ("from", "value"))
    return isinstance(item, dict) and any(content in item and item.get(role) in _SPEAKERS for role, content in pairs)


def _column(record: dict[str, Any], name: str, remedy: str = "") -> Any:
    if name not in record:
        raise BadRecord("missing key", f"the row has no {shown(name)}, only {listed(record)}{remedy}")
    return record[name]


def _text(record: dict[str, Any], name: str) -> str:
    return expect(_column(record, name), str, f"{name} must be a text")


def _answer(record: dict[str, Any], name: str) -> str:
    """A text that is learned, so it must not be blank."""
    text = _text(record, name)
    if not text.strip():
        raise BadRecord("nothing to learn", f"{name} is blank")
    return text


def _with_system(messages: list[Message], record: dict[str, Any], name: str) -> list[Message]:
    """Put the text of the record's key `name`, if any, before the messages as a system message."""
    if isinstance(record.get(name), list) and record[name]:
        record = record | {name: joined_text(record[name], name)}
    if record.get(name) is None or not _text(record, name).strip():
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"].strip() == record[name].strip():
            return messages
        raise BadRecord("two system messages", f"one is {name}, the other the first message; delete one")
    return [{"role": "system", "content": record[name]}, *messages]


def _turn(prompt: str, response: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _read_list(name: str, read: Callable[[Any], Message], record: dict[str, Any]) -> Example:
    messages = _with_system(message_list(_column(record, name), name, read), record, "system")
    return Example(require_answer(check_order(messages)), _tools(record))


def _tools(record: dict[str, Any]) -> list[Any] | None:
    """The tools of a row, also under the name that OpenAI gave them before."""
    if record.get("functions") in (None, "", []):
        return tool_list(record.get("tools"))
    if record.get("tools") not in (None, "", []):
        raise BadRecord("contradiction", "functions beside tools; keep one")
    functions = expect(record["functions"], list, "functions must be a list", "bad tools")
    return tool_list([{"type": "function", "function": function} for function in functions])


def _sharegpt_message(given: Any, context: bool = False) -> Message:
    if not isinstance(given, dict) or "from" not in given:
        return read_message(given, context=context)  # many "conversations" hold OpenAI's role and content
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    if mixed := rest.keys() & {"role", "content"}:
        raise BadRecord("unknown key", f"{listed(mixed)} beside from; use from and value, or role and content")
    speaker, value = given["from"], given.get("value")
    if speaker == "function_call":
        calling = {"role": "assistant", "content": "", "tool_calls": _function_calls(value)}
        return read_message({**rest, **calling}, "value", context)
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise BadRecord("unknown role", f"from is {shown(speaker)}; known are {', '.join(_SPEAKERS)}")
    return read_message({**rest, "role": _SHAREGPT_ROLES[speaker], "content": value}, "value", context)


def _function_calls(value: Any) -> list[Any]:
    """The calls of a ShareGPT message from "function_call": the JSON text of one call or of a list of calls."""
    kind, expected = "bad tool call", "value must be the JSON text of a call"
    calls = parse_text(expect(value, str, expected, kind), kind, expected)
    if calls == []:
        raise BadRecord(kind, "value is an empty list; expected a call")
    return calls if isinstance(calls, list) else [calls]


def _read_alpaca(record: dict[str, Any]) -> Example:
    prompt, response = _text(record, "instruction"), _answer(record, "output")
    if record.get("input") is not None and _text(record, "input").strip():
        prompt += "\n" + record["input"]  # the chat template replaces Alpaca's own prompt text
    return Example(_with_system(_history(record) + _turn(prompt, response), record, "system"))


def _history(record: dict[str, Any]) -> list[Message]:
    """The rounds before the last one, as Alpaca's key `history` has them."""
    messages: list[Message] = []
    history = [] if record.get("history") is None else record["history"]
    for number, pair in enumerate(expect(history, list, "history must be a list of pairs"), 1):
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            problem = "must be a list of two texts, the question and answer"
            raise BadRecord("wrong type", f"history, pair {number}: {problem}")
        if not pair[1].strip():
            raise BadRecord("nothing to learn", f"history, pair {number}: the answer is blank")
        messages += _turn(*pair)
    return messages


def _pairs(config: DataConfig) -> Format:
    """Pairs whose answers, and the prompt, may be in other columns than usual."""
    names = {"chosen": config.chosen_column, "rejected": config.rejected_column, "prompt": config.prompt_column}
    others = {usual: column for usual, column in names.items() if column not in ("", usual)}
    keys = {others.get(key, key) for key in PAIR_KEYS} | {others[key] for key in ("prompt",) if key in others}

    def read(record: dict[str, Any]) -> Example:
        moved = {usual: _column(record, name, f"; correct data.{usual}_column") for usual, name in others.items()}
        return _read_pair({key: value for key, value in record.items() if key not in others.values()} | moved)

    description = " and ".join(others.get(key, key) for key in ("chosen", "rejected"))
    return Format("pairs", description, read, frozenset(keys), OPTIONAL - others.keys())


def _read_pair(record: dict[str, Any]) -> Example:
    chosen, rejected, tools, why = read_pair(record, _prompt_of_pair, _sharegpt_message)
    return Example(check_order(chosen), tools, rejected=rejected, idle=why)


def _prompt_of_pair(record: dict[str, Any]) -> list[Message]:
    """The messages that texts make: system, history, and the prompt, if it is a text."""
    texts = [record[name] for name in ("prompt", "question", "instruction") if isinstance(record.get(name), str)]
    if texts and record.get("input") is not None and _text(record, "input").strip():
        texts[0] += "\n" + record["input"]
    messages = _history(record) + [{"role": "user", "content": text} for text in texts]
    return _with_system(messages, record, "system")


def _labelled(form: Format, column: str) -> Format:
    """The same format, whose rows also have a label of the answer. Args: column: its key; "": one of the usual ones."""
    names = (column,) if column else LABEL_KEYS

    def read(record: dict[str, Any]) -> Example:
        label, key = label_of(record, names)
        example = form.read({name: value for name, value in record.items() if name != key})
        messages = example.messages or []
        for message in messages[: max(0, last_of("user", messages))]:
            if message["role"] == "assistant":
                message["weight"] = 0  # the label is that of the last answer
        return example._replace(label=label)

    return replace(form, read=read, optional=form.optional | {*names})


def _read_prompt_completion(record: dict[str, Any]) -> Example:
    for key in ("prompt", "completion"):
        if not isinstance(_column(record, key), str | list):
            raise BadRecord("wrong type", f"{key} must be a text or a list of messages, is {kind_of(record[key])}")
    prompt, completion = record["prompt"], record["completion"]
    # Only the completion is learned, so assistant messages of the prompt get weight 0 (context=True).
    read = partial(_sharegpt_message, context=True)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else message_list(prompt, "prompt", read)
    if isinstance(completion, str):
        answer = [{"role": "assistant", "content": _answer(record, "completion")}]
    else:
        answer = require_answer(message_list(completion, "completion", _sharegpt_message))
    messages = _with_system(before + answer, record, "system")
    return Example(check_order(messages), tool_list(record.get("tools")))


def _read_columns(prompt: str, response: str, system: str, record: dict[str, Any]) -> Example:
    messages = _turn(_text(record, prompt), _answer(record, response))
    if system:
        _column(record, system)  # null or blank means no system message, but a missing column is probably misspelt
        messages = _with_system(messages, record, system)
    return Example(messages)


def _read_text(column: str, record: dict[str, Any]) -> Example:
    return Example(text=_answer(record, column))


def _read_tokens(record: dict[str, Any]) -> Example:
    ids = _integers(record, "input_ids")
    if not ids:
        raise BadRecord("nothing to learn", "input_ids is empty")
    if min(ids) < 0 or max(ids) > _LARGEST_ID:
        index = next(i for i, number in enumerate(ids) if not 0 <= number <= _LARGEST_ID)
        raise BadRecord("bad token id", f"input_ids[{index}] is {shown(ids[index])}; expected 0 to {_LARGEST_ID:,}")
    if record.get("attention_mask") is not None:
        mask = _integers(record, "attention_mask")
        if len(mask) != len(ids) or set(mask) != {1}:
            raise BadRecord("bad attention mask", "it must be 1 for each of input_ids; remove the padding")
    if record.get("labels") is None:
        return Example(input_ids=ids)
    labels = _integers(record, "labels")
    if len(labels) != len(ids):
        raise BadRecord("bad labels", f"{len(labels):,} labels for {len(ids):,} input_ids; expected as many")
    for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORE, token):
            wrong = f"labels[{index}] is {shown(label)}, input_ids[{index}] is {token}"
            raise BadRecord("bad labels", f"{wrong}; expected the same or {IGNORE} (labels are not shifted)")
    if all(label == IGNORE for label in labels[1:]):
        raise BadRecord("nothing to learn", f"all labels after the first are {IGNORE}")
    return Example(input_ids=ids, labels=None if labels == ids else labels)


def _read_samples(kept: Kept, record: dict[str, Any]) -> Example:
    group = samples.read_group(record)
    learned, why = kept.learned(group)
    told = tuple((number, group.answers[number].ids) for number in learned)
    return Example(input_ids=group.prompt_ids, samples=told, idle="" if told else why)


def _integers(record: dict[str, Any], name: str) -> list[int]:
    numbers = expect(_column(record, name), list, f"{name} must be a list of integers")
    # One pass in C over all types, because a row has thousands of ids; bool is refused, since its type is not int.
    if not set(map(type, numbers)) <= {int}:
        index = next(i for i, number in enumerate(numbers) if type(number) is not int)
        raise BadRecord("wrong type", f"{name}[{index}] must be an integer, is {shown(numbers[index])}")
    return numbers


_read_sharegpt = partial(_read_list, "conversations", _sharegpt_message)
_FIXED = {  # in the order in which `auto` tries them; messages first, because some of those rows also have a prompt
    name: Format(name, description, read, frozenset(keys.split()), frozenset(optional.split()))
    for name, description, read, keys, optional in (
        ("messages", "OpenAI", partial(_read_list, "messages", read_message), "messages", "system tools functions"),
        ("sharegpt", "conversations", _read_sharegpt, "conversations", "system tools"),
        ("tokens", "input_ids", _read_tokens, "input_ids", "attention_mask labels"),
        ("alpaca", "instruction and output", _read_alpaca, "instruction output", "input history system"),
        ("prompt_completion", "prompt and completion", _read_prompt_completion, "prompt completion", "system tools"),
    )
}
FORMATS = (*_FIXED, "columns", "text")


def _columns_format(prompt: str, response: str, system: str) -> Format:
    description = f"{prompt} and {response}" + (f", system message from {system}" if system else "")
    read = partial(_read_columns, prompt, response, system)
    return Format("columns", description, read, frozenset({prompt, response}), frozenset({system}))


def _text_format(column: str) -> Format:
    return Format("text", f"column {column}", partial(_read_text, column), frozenset({column}))
