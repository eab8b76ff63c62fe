"""Chat messages and tools of a record, checked and brought into the form that chat templates read (OpenAI's)."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any

from titan_mi100.data.blocks import as_openai, joined_text, own_keys, tool_as_openai
from titan_mi100.data.columns import HOLD_MESSAGES, INSTEAD
from titan_mi100.data.files import without_nulls
from titan_mi100.data.strict_json import IF_IDLE, BadRecord, expect, kind_of, listed, parse_text, shown

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")

_REASONING_ALIASES = ("reasoning", "thinking")
_TEXT_KEYS = ("reasoning_content", "tool_call_id", "name")
_KEYS = {"role", "content", "tool_calls", "weight", *_TEXT_KEYS}
_OPENED = re.compile("^[ \\t]*<think>", re.MULTILINE)  # not within a sentence
_CALL_KEYS = {"id", "type", "index"}
_FUNCTION_KEYS = {"name", "arguments"}
_HARMLESS = {*INSTEAD["harmless"]}
# Keys whose values are messages, content parts or tool calls. In a tool call only keys that the user names are dropped,
# because `id` and `index` of a call mean something there.
_HOLD_CALLS = {"tool_calls", "function", "function_call"}
_HOLD = HOLD_MESSAGES | _HOLD_CALLS | {"content"}


def drop_keys(
    given: Message, named: Collection[str], counts: Counter[str], holds: Set[str] = _HOLD, here: Set[str] = frozenset()
) -> Message:
    """Copy a row without the ignored keys of its messages, content parts and tool calls.

    Args:
        given: the row, or an object inside it (the function calls itself).
        named: keys that the user ignores (data.ignored_keys); harmless metadata is ignored as well.
        counts: how often each key was dropped; updated.
        holds: keys whose values are messages, content parts or tool calls.
        here: keys to drop from `given` itself.
    """
    kept, here = {}, here - own_keys(given)
    for key, value in given.items():
        if key in here:
            counts[key] += 1
            continue
        if key in holds:
            below = {*named} if key in _HOLD_CALLS else _HARMLESS.union(named)
            drop = partial(drop_keys, named=named, counts=counts, here=below)
            if isinstance(value, list):
                value = [drop(item) if type(item) is dict else item for item in value]
            elif isinstance(value, dict):
                value = drop(value)
        kept[key] = value
    return kept


def message_list(given: Any, name: str, read: Callable[[Any], Message] | None = None) -> list[Message]:
    """Check a record's list of messages.

    Args:
        given: the value of the record's key `name`.
        name: the key, for error messages.
        read: checks one message; default `read_message`.

    Raises:
        BadRecord: names the message by its number, from 1.
    """
    if not expect(given, list, f"{name} must be a list"):
        raise BadRecord("no messages", f"{name} is an empty list")
    read, number = read or read_message, 0
    messages, numbers, calls = list[Message](), list[int](), set[str]()
    try:
        for number, raw in enumerate(given, 1):
            for message in map(read, as_openai(raw, calls)):
                if messages and _continues(messages[-1], message):
                    messages[-1] = _joined(messages[-1], message)
                else:
                    messages.append(message)
                    numbers.append(number)
        for number, message in zip(numbers, messages, strict=True):
            check_answer(message, "value" if "value" in given[number - 1] else "content")
    except BadRecord as bad:
        where = f"message {number}" if name != "prompt" else f"message {number} of the prompt"
        raise BadRecord(bad.kind, f"{where}: {bad.detail}") from None
    return messages


def _continues(message: Message, later: Message) -> bool:
    """Whether both are one turn of the assistant: some traces write a text and its calls as several messages."""
    same = all(message.get(key) == later.get(key) for key in ("role", "weight", "name"))
    return same and "tool_calls" in later and not _apart(later)[1].strip()


def _apart(message: Message) -> tuple[str, str]:
    """Reasoning and answer."""
    before, tag, behind = message["content"].partition("</think>")
    if "reasoning_content" in message or not tag:
        return message.get("reasoning_content", ""), message["content"]
    return before.strip().removeprefix("<think>").strip("\n"), behind.lstrip("\n")


def _joined(message: Message, later: Message) -> Message:
    (thought, content), (later_thought, _) = _apart(message), _apart(later)
    calls = [*message.get("tool_calls", ()), *later["tool_calls"]]
    if not later_thought:
        return {**message, "tool_calls": calls}
    rest = {key: value for key, value in message.items() if key not in _REASONING_ALIASES}
    thoughts = "\n\n".join(filter(None, (thought, later_thought)))
    return {**rest, "content": content, "reasoning_content": thoughts, "tool_calls": calls}


def require_answer(messages: list[Message]) -> list[Message]:
    """Return the messages unchanged. Raises BadRecord: none of them is an assistant's."""
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("no assistant message", "nothing to learn from the others; add the answer")
    return messages


def last_of(role: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """The index of the last message of a role; -1: there is none. Results of tools are no user messages."""
    return max((i for i, message in enumerate(messages) if message["role"] == role), default=-1)


def with_system_prompt(messages: list[Message], prompt: str) -> list[Message]:
    """Add a system message with this text ("": none), unless the messages have one."""
    if not prompt or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


def check_order(messages: list[Message]) -> list[Message]:
    """Return the messages unchanged. Raises BadRecord: their order is certainly wrong.

    Refused are a leading tool message, and an assistant's calls behind its own text. Other unusual orders (two user
    messages in a row, no user message) occur in real data, and the chat template decides about them.
    """
    first = next((message["role"] for message in messages if message["role"] != "system"), "")
    if first == "tool":
        raise BadRecord("wrong order", "it begins with a tool message; such a message answers an assistant's call")
    for message, later in pairwise(messages):
        if message["role"] == later["role"] == "assistant" and "tool_calls" in later and not later["content"].strip():
            text = "an assistant's message and its calls are two messages that cannot be joined; write them as one, or"
            raise BadRecord("wrong order", f"{text} give both the same weight and name")
    return messages


def read_message(given: Any, content_name: str = "content", context: bool = False) -> Message:
    """Check one message: role, content (a text), and optionally reasoning_content, tool_calls, weight, tool_call_id ...

    Keys whose value is null are dropped, text parts are joined, and other names of reasoning_content are copied to it.
    All other keys are kept, because templates may read them.

    Args:
        given: the message, as parsed from JSON.
        content_name: the row's key of the content, for error messages.
        context: the message is context only and not learned: an assistant's message gets weight 0.

    Raises:
        BadRecord: what is wrong with the message.
    """
    message = _without_nulls(expect(given, dict, "must be an object"))
    role = message.get("role")
    if role not in ROLES:
        if role is None:
            raise BadRecord("missing key", f"role is missing; the message has {listed(given)}")
        other = {"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system"}
        as_here = other.get(str(role))
        remedy = f"; rename it to {as_here}, or use ShareGPT's keys: conversations, from, value" if as_here else ""
        raise BadRecord("unknown role", f"role is {shown(role)}; known are {', '.join(ROLES)}{remedy}")
    if len(message) != 2 or "content" not in message:  # the common case, role and content, needs no further checks
        _check_optional(message)
    content = message.get("content")
    if role == "tool" and not isinstance(content, str) and not _are_parts(content):
        raise BadRecord("wrong type", f"{content_name} of a tool is {kind_of(content)}; write its JSON text")
    if isinstance(content, list):
        message["content"] = joined_text(content)
    elif content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        message["content"] = ""  # OpenAI's format has null here; templates that add texts need a text
    else:
        expect(content, str, f"{content_name} must be a text or a list of text parts")
    if role == "assistant" and context:
        message["weight"] = 0
    return message


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _check_optional(message: Message) -> None:
    """Check and normalise all keys but role and content, in place."""
    for alias in _REASONING_ALIASES:
        if alias in message:
            reasoning = message[alias]
            if message.setdefault("reasoning_content", reasoning) != reasoning:
                raise BadRecord("contradiction", f"{alias} and another key hold different reasoning; keep one")
    if unknown := message.keys() - _KEYS - {*_REASONING_ALIASES}:
        remedies = [remedy for key, remedy in INSTEAD["message"].items() if key in unknown]
        instead = [*remedies, f"known are {listed(_KEYS)}"][0]
        raise BadRecord("unknown key", f"{listed(unknown)} in a message; {instead}; {IF_IDLE}")
    for key in _TEXT_KEYS:
        if key in message:
            expect(message[key], str, f"{key} must be a text")
    if "weight" in message:
        message["weight"] = _weight(message["weight"])
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
    if message["role"] != "assistant":
        if message.get("reasoning_content") == "":  # exports write this key into every message
            del message["reasoning_content"]
        for key in ("tool_calls", "reasoning_content"):
            if key in message:
                where = f"in a {message['role']} message; only an assistant message may have it"
                raise BadRecord("unknown key", f"{key} {where}")


def check_answer(message: Message, content_name: str) -> None:
    """Refuse an assistant message that says nothing, unless it is not learned (weight 0), and doubtful think tags."""
    if message["role"] != "assistant":
        return
    before, tag, behind = message["content"].partition("</think>")
    if tag and "<think>" not in before and "reasoning_content" not in message and behind.split("\n")[0].strip():
        problem = "</think> inside a line, and no <think> before it, so a template takes the text before it for"
        remedy = 'reasoning; if it is none, add "reasoning_content": "", else begin with <think>'
        raise BadRecord("odd thinking", f"{content_name} has {problem} {remedy}")
    last = message["content"].rpartition("</think>")[2]
    if _OPENED.search(last) and "reasoning_content" not in message and message.get("weight") != 0:
        remedy = 'close it before the answer, or, if the tag is text, add "reasoning_content": ""'
        raise BadRecord("odd thinking", f"{content_name} opens <think>, and no </think> follows; {remedy}")
    if not last.strip() and "tool_calls" not in message and message.get("weight") != 0:
        thinks = before.strip(" \n<think>") + message.get("reasoning_content", "").strip()
        why = "the assistant only thinks; add its answer," if thinks else f"the assistant's {content_name} is blank;"
        raise BadRecord("nothing to learn", f"{why} delete the message, or give it weight 0")


def _weight(weight: Any) -> int:
    if isinstance(weight, int | float) and not isinstance(weight, bool) and weight in (0, 1):  # a bool is an int
        return int(weight)
    raise BadRecord("bad weight", f"weight must be 0 (not learned) or 1 (learned), is {shown(weight)}")


def _tool_calls(calls: Any) -> list[Message]:
    checked = []
    for number, call in enumerate(expect(calls, list, "tool_calls must be a list", "bad tool call"), 1):
        try:
            checked.append(_tool_call(call))
        except BadRecord as bad:
            raise BadRecord("bad tool call", f"call {number}: {bad.detail}") from None
    return checked


def _tool_call(given: Any) -> Message:
    """Check a call: {"function": {"name", "arguments"}} or bare {"name", "arguments"}.

    The call is returned unchanged, as transformers hands it to the template.
    """
    call = function = _without_nulls(expect(given, dict, "must be an object", "bad tool call"))
    unknown = call.keys() - _CALL_KEYS - _FUNCTION_KEYS
    if "function" in call:
        function = _without_nulls(expect(call["function"], dict, "function must be an object", "bad tool call"))
        unknown = (call.keys() - _CALL_KEYS - {"function"}) | (function.keys() - _FUNCTION_KEYS)
    if unknown:
        expected = "expected function with name and arguments"
        raise BadRecord("bad tool call", f"{listed(unknown)} is not known; {expected}; {IF_IDLE}")
    if call.get("type", "function") != "function":
        raise BadRecord("bad tool call", f"type is {shown(call['type'])}; only function is known")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise BadRecord("bad tool call", f"the function's name must be a text, is {shown(function.get('name'))}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_text(arguments, "bad tool call", "arguments must hold JSON")
    if not isinstance(arguments, dict):
        raise BadRecord("bad tool call", f"arguments must be an object, or its JSON text, not {kind_of(arguments)}")
    return given


def settle_nulls(messages: list[Message], how: str, counts: Counter[str]) -> None:
    """Keep or leave out, in place, the nulls in the arguments of tool calls.

    Args:
        how: "keep" or "drop" (data.null_arguments). Otherwise the file's type decides, see `files.Record.nulls`:
            arguments that are JSON text keep them.
        counts: "kept" and "left out" -> how many calls have nulls; updated.
    """
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        function = call.get("function") or call
        original = arguments = function["arguments"]
        if isinstance(original, str):
            arguments = parse_text(original, "bad tool call", "arguments must hold JSON") if "null" in original else {}
        if (without := without_nulls(arguments)) == arguments:
            continue
        drop = how == "drop" or (how == "left out" and original is arguments)
        counts["left out" if drop else "kept"] += 1
        if drop:
            function["arguments"] = without if original is arguments else json.dumps(without, ensure_ascii=False)


def tool_list(given: Any) -> list[Any] | None:
    """The tools of a record. Args: given: a list of descriptions, or its JSON text. Returns None if there are none."""
    if isinstance(given, str):
        given = parse_text(given, "bad tools", "tools must hold JSON") if given.strip() else None
    if given is None or given == []:
        return None
    tools = []
    for number, tool in enumerate(expect(given, list, "tools must be a list, or the JSON text of one", "bad tools"), 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name.strip():
            problem = f"must be an object with the name of a function, is {shown(tool)}"
            raise BadRecord("bad tools", f"tool {number} {problem}")
        tools.append(tool_as_openai(tool))
    return tools
