"""Messages as other programs write them, in the form that `conversation.read_message` reads: OpenAI's earlier form, and
Anthropic's, whose content is a list of blocks.
"""

from typing import Any

from titan_mi100.data.strict_json import IF_IDLE, BadRecord, expect, listed, shown

_KEYS = {  # type of a content part -> its keys
    "text": {"text"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}
_ORDER = {"assistant": ("thinking", "text", "tool_use"), "user": ("tool_result", "text")}  # of a message's parts


def own_keys(part: dict[str, Any]) -> set[str]:
    """Keys that a content part needs, so they are never dropped, whatever is ignored elsewhere in a row."""
    kind = part.get("type")
    return {"type", *_KEYS[kind]} - {"is_error"} if isinstance(kind, str) and kind in _KEYS else set()


def as_openai(given: Any, calls: set[str]) -> list[Any]:
    """A message in OpenAI's form; several if it holds results of tools as blocks. Anything else comes back unchanged.

    Args:
        calls: ids of the tool_use blocks that have no result so far; updated.

    Raises:
        BadRecord: a block is not known, stands in the wrong place, or says what the form cannot say.
    """
    if not isinstance(given, dict):
        return [given]
    message = {key: given[key] for key in given if (key, given[key]) != ("type", "message")}
    role, content = message.get("role"), message.get("content")
    if role == "function":
        return [message | {"role": "tool"}]
    if role == "assistant" and message.get("function_call") is not None:
        call = {"type": "function", "function": message.pop("function_call")}
        message = _joined(message, {"tool_calls": [call]})
    if role not in ("assistant", "user") or not isinstance(content, list):
        return [message]
    text, results, made = "", list[Any](), dict[str, Any]()
    for part in _checked(content, "content", _ORDER[role]):
        if part["type"] == "text":
            text += part["text"]
        elif part["type"] == "thinking":
            made["reasoning_content"] = "\n\n".join(filter(None, (made.get("reasoning_content"), part["thinking"])))
        elif part["type"] == "tool_use":
            calls.add(expect(part.get("id"), str, "id of a tool_use must be a text"))
            function = {"name": part.get("name"), "arguments": part.get("input")}
            made.setdefault("tool_calls", []).append({"id": part["id"], "type": "function", "function": function})
        else:
            results.append(message | _result(part, calls))
    return results if results and not text else [*results, _joined(message, made) | {"content": text}]


def tool_as_openai(tool: dict[str, Any]) -> dict[str, Any]:
    """The description of a tool, whose parameters Anthropic calls input_schema."""
    if "input_schema" not in tool:
        return tool
    kept = (key for key in tool if key not in ("type", "cache_control"))
    function = {"parameters" if key == "input_schema" else key: tool[key] for key in kept}
    return {"type": "function", "function": function}


def joined_text(parts: list[Any], name: str = "content") -> str:
    """The text of a list of parts, such as [{"type": "text", "text": "..."}]. Args: name: its key, for messages."""
    return "".join(part["text"] for part in _checked(parts, name, ("text",)))


def _joined(message: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    if twice := [key for key in made if message.get(key)]:
        raise BadRecord("contradiction", f"{listed(twice)} beside another form of it in the same message; keep one")
    return message | made


def _checked(parts: list[Any], name: str, order: tuple[str, ...]) -> list[dict[str, Any]]:
    """The parts without nulls. Raises BadRecord: their types are not in this order, or one has an unknown key."""
    if not parts:
        raise BadRecord("wrong type", f"{name} is an empty list; expected a text or text parts")
    checked = list[dict[str, Any]]()
    for number, part in enumerate(parts, 1):
        expect(part, dict, f"{name} part {number} must be an object")
        part = {key: part[key] for key in part if part[key] is not None}
        if (kind := part.get("type")) not in order:
            text = f"{name} part {number} has type {shown(kind)}, not {' or '.join(order)}"
            raise BadRecord("not a text part", f"{text}; only text is read, so leave out rows that need it")
        if checked and order.index(kind) < order.index(checked[-1]["type"]):
            text = f"{name} part {number}, {kind}, stands behind {checked[-1]['type']}, but is shown before it"
            raise BadRecord("wrong order", f"{text}; write {', '.join(order)} in this order")
        if unknown := part.keys() - {"type", *_KEYS[kind]}:
            where = f"in {name} part {number}; known are {listed({'type', *_KEYS[kind]})}"
            raise BadRecord("unknown key", f"{listed(unknown)} {where}; {IF_IDLE}")
        if kind in ("text", "thinking"):
            expect(part.get(kind), str, f"{name} part {number}: {kind} must be a text")
        if kind == "thinking" and not part[kind].strip():
            raise BadRecord("nothing to learn", "a thinking block is blank; delete it to learn the answer without it")
        checked.append(part)
    return checked


def _result(part: dict[str, Any], calls: set[str]) -> dict[str, Any]:
    """The message of role tool that says what a tool_result says."""
    answered, content = part.get("tool_use_id"), part.get("content", "")
    if not isinstance(answered, str) or answered not in calls:
        text = f"tool_use_id {shown(answered)} is not the id of a tool_use before it that has no result yet"
        raise BadRecord("wrong order", f"{text}; correct the id, or delete the result")
    calls.remove(answered)
    if part.get("is_error", False) is not False:
        text = f"is_error is {shown(part['is_error'])}, which no template shows; write it into the result's content"
        raise BadRecord("unknown key", f"{text}, and name is_error in data.ignored_keys")
    if not isinstance(content, str):
        expect(content, list, "content of a tool_result must be a text or text parts")
        content = joined_text(content) if content else ""
    return {"role": "tool", "content": content, "tool_call_id": answered}
