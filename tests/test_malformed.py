"""Input that is wrong: each bad row is named with file:line and the reason, and nothing else ever comes of one."""

import functools
import gzip
import io
import json
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.columns import Findings
from titan_mi100.data.conversation import ROLES
from titan_mi100.data.file_type import BYTE_ORDER_MARK
from titan_mi100.data.files import read_records
from titan_mi100.data.formats import FORMATS, BadRecord, Example, Format, choose_format, example_hash, parse
from titan_mi100.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
PART = {"type": "text", "text": "a"}
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

GOOD: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": [USER, ASSISTANT]},
        {
            "messages": [
                {"role": "system", "content": "be kind \U0001f600"},
                {"role": "user", "content": [{"type": "text", "text": "2+2?"}, {"type": "text", "text": " now"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
                {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"},
                {"role": "assistant", "content": "4", "reasoning_content": "easy", "weight": 1},
            ],
            "tools": [TOOL],
        },
    ],
    "sharegpt": [
        {"conversations": [HUMAN, GPT]},
        {
            "system": "be kind",
            "tools": json.dumps([TOOL]),
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "4", "weight": 1},
            ],
        },
    ],
    "alpaca": [
        {"instruction": "add", "output": "4"},
        {"instruction": "add", "input": "2 2", "output": "4", "system": "be kind", "history": [["1+1?", "2"]]},
    ],
    "prompt_completion": [
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT], "tools": [TOOL]},
    ],
    "columns": [{"question": "2+2?", "answer": "4"}, {"question": "größe \u2028", "answer": "4 { [", "id": 7}],
    "text": [{"text": "two and two are four"}],
    "tokens": [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "attention_mask": [1, 1, 1]},
    ],
}


def form(name: str) -> Format:
    columns = {"prompt_column": "question", "response_column": "answer"} if name == "columns" else {}
    return choose_format("", DataConfig(format=name, **columns))


def gather(path: Path, form: Format) -> tuple[dict[int, Example], list[str]]:
    """What training would read of a file: the rows by their number, and of the bad ones `file:line: reason`."""
    rows, reasons = {}, []
    for record in read_records(str(path)):
        try:
            if record.problem:
                raise BadRecord(*record.problem.split(": ", 1))
            rows[record.number] = form.read_row(parse(record.raw), frozenset(), Findings())
        except BadRecord as bad:
            reasons.append(f"{path}:{record.number}: {bad}")
    return rows, reasons


def said(*messages: Any, **keys: Any) -> dict[str, Any]:
    return {"messages": [*messages], **keys}


def shared(*messages: Any, **keys: Any) -> dict[str, Any]:
    return {"conversations": [*messages], **keys}


def asking(content: Any) -> dict[str, Any]:
    return said({"role": "user", "content": content}, ASSISTANT)


def calling(*calls: Any) -> dict[str, Any]:
    return said(USER, {"role": "assistant", "content": "", "tool_calls": [*calls]})


def function(**keys: Any) -> dict[str, Any]:
    return calling({"function": keys})


def columns(answer: str) -> bytes:
    return b'{"question": "a", "answer": %s}' % answer.encode()


# Lines that are wrong whatever the format, in a file of `columns`.
LINES: list[tuple[bytes, str]] = [
    (columns('"b"') + b"\0", "NUL byte"),
    (b"\0" * 100, "NUL byte"),
    (columns('"b\0"'), "NUL byte"),
    (columns('"b"').decode().encode("utf-16-le"), "NUL byte: the file is damaged, or not UTF-8 (UTF-16?)"),
    (columns('"b"')[:-1], "not JSON: Expecting ',' delimiter"),
    (columns('"b'), "not JSON: Unterminated string starting at (column 29)"),
    (columns('"b"') + b"}", "not JSON: there is more text after the value"),
    (columns('"b"') * 2, "not JSON: there is more text after the value"),
    (columns('"b"') + b",", "not JSON: there is more text after the value"),
    (columns('"b",'), "not JSON: "),
    (columns(""), "not JSON: Expecting value"),
    (columns("b"), "not JSON: Expecting value"),
    (columns("'b'"), "not JSON: Expecting value"),
    (b"{'question': 'a', 'answer': 'b'}", "not JSON: Expecting property name enclosed in double quotes (column 2)"),
    (b'{question: "a"}', "not JSON: Expecting property name"),
    (b'{"question" "a"}', "not JSON: Expecting ':' delimiter"),
    (b'{"question": "a" "answer": "b"}', "not JSON: Expecting ',' delimiter"),
    (b'{"question": "a",, "answer": "b"}', "not JSON: Expecting property name"),
    (b'{"question": "a", "answer": "b"} // why', "not JSON: there is more text"),
    (b'# {"question": "a"}', "not JSON: Expecting value (column 1)"),
    (columns('"b\tc"'), "not JSON: Invalid control character"),
    (columns('"b\x1b[0m"'), "not JSON: Invalid control character"),
    (columns('"b\rc"'), "not JSON: Invalid control character"),
    (columns('"\\x41"'), "not JSON: Invalid \\escape"),
    (columns('"\\u12"'), "not JSON: Invalid \\uXXXX escape"),
    (columns('"\\'), "not JSON: "),
    (columns("True"), "not JSON: Expecting value"),
    (columns("01"), "not JSON: "),
    (columns('"b"').replace(b" ", "\u00a0".encode()), "not JSON: "),
    (columns("NaN"), "not a number: NaN is not JSON"),
    (columns("Infinity"), "not a number: Infinity is not JSON"),
    (columns("-Infinity"), "not a number: -Infinity is not JSON"),
    (columns('"b", "score": NaN'), "not a number: NaN is not JSON"),
    (columns('"b", "score": 1e999'), "number too large: 1e999 is infinite"),
    (columns('"b", "score": -1e999'), "number too large: -1e999 is infinite"),
    (columns('"b", "id": ' + "7" * 4301), "number too large: an integer of over 4,300 digits"),
    (columns('"b", "id": [-' + "7" * 100_000 + "]"), "number too large: an integer of over 4,300 digits"),
    (columns('"b", "id": 1' + "0" * 400 + ".5"), "is infinite as a float"),
    (columns('"b", "question": "c"'), "duplicate key: 'question' occurs twice"),
    (columns('"b", "x": {"y": [{"z": 1, "z": 1}]}'), "duplicate key: 'z' occurs twice"),
    (columns('"b", "x\\u0079": 1, "xy": 2'), "duplicate key: 'xy' occurs twice"),
    (columns('"b", "": 1, "": 2'), "duplicate key: '' occurs twice"),
    (columns('"\\ud800"'), "lone surrogate: half of a surrogate pair"),
    (columns('"\\uDC00 b"'), "lone surrogate"),
    (columns('"\\ude00\\ud83d"'), "lone surrogate"),
    (columns('"\\ud83d \\ude00"'), "lone surrogate"),
    (columns('"b", "\\udfff": 1'), "lone surrogate"),
    (columns('"b", "meta": [{"x": ["\\udbff"]}]'), "lone surrogate"),
    (columns('"\xff"').replace("\xff".encode(), b"\xff"), "not UTF-8: at byte 30"),
    (columns('"b"').replace(b"b", b"\xc3"), "not UTF-8: at byte 30"),
    (columns('"b"').replace(b"b", b"\xed\xa0\x80"), "not UTF-8: at byte 30"),
    (columns('"b"').replace(b"b", b"\xc0\x80"), "not UTF-8"),
    (columns('"b"').replace(b"b", b"\xf5\x80\x80\x80"), "not UTF-8"),
    ('{"question": "a", "answer": "größe"}'.encode("latin-1"), "not UTF-8: at byte 32"),
    (columns('"b"') + b"\x80", "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (columns("[" * 5000 + "]" * 5000), "nested too deeply"),
    (columns('"b", "x": ' + "[" * 100 + "]" * 100), "nested too deeply: more than 100 levels"),
    (columns('"b", "x": ' + '{"y":' * 100 + "1" + "}" * 100), "nested too deeply"),
    (b"[]", "not an object: a row must be a JSON object, but is a list"),
    (b'["question", "answer"]', "not an object: a row must be a JSON object, but is a list"),
    (b'"question"', "not an object: a row must be a JSON object, but is a text"),
    (b"null", "not an object: a row must be a JSON object, but is null"),
    (b"true", "not an object: a row must be a JSON object, but is true or false"),
    (b"3", "not an object: a row must be a JSON object, but is a number"),
    (b"hello", "not JSON: Expecting value (column 1)"),
    (b"question,answer", "not JSON: Expecting value (column 1)"),
    (b"]", "not JSON: Expecting value"),
    (b"{", "not JSON: "),
    (b'{"question": "a', "not JSON: Unterminated string"),
    (b"<html>", "not JSON: Expecting value"),
    (b"\x80\x81", "not UTF-8: at byte 1"),
    (b"\x1f\x8b\x08", "not UTF-8: at byte 2"),
    (b"\x0c" + columns('"b"'), "not JSON: Expecting value (column 1)"),
]

# Rows that are JSON, but not of the format.
ROWS: dict[str, list[tuple[Any, str]]] = {
    "messages": [
        ({}, "missing key: the row has no 'messages', only none"),
        ({"conversations": []}, "missing key: the row has no 'messages', only conversations"),
        ({"messages": None}, "wrong type: messages must be a list, is null"),
        ({"messages": "hi"}, "wrong type: messages must be a list, is a text"),
        ({"messages": USER}, "wrong type: messages must be a list, is an object"),
        ({"messages": 1}, "wrong type: messages must be a list, is a number"),
        ({"messages": []}, "no messages: messages is an empty list"),
        (said("hi", ASSISTANT), "wrong type: message 1: must be an object, is a text"),
        (said(USER, None, ASSISTANT), "wrong type: message 2: must be an object, is null"),
        (said(USER, [ASSISTANT]), "wrong type: message 2: must be an object, is a list"),
        (said(USER, {}), "missing key: message 2: role is missing; the message has none"),
        (said(HUMAN, GPT), "missing key: message 1: role is missing; the message has from, value"),
        (said(USER, {"role": None, "content": "4"}), "missing key: message 2: role is missing"),
        (said({"role": "human", "content": "4"}, ASSISTANT), "role is 'human'; known are system, user, assistant, too"),
        (said(USER, {"role": "robot", "content": "4"}), "unknown role: message 2: role is 'robot'; known are system,"),
        (said(USER, {"role": "Assistant", "content": "4"}), "unknown role: message 2: role is 'Assistant'"),
        (said(USER, {"role": "assistant ", "content": "4"}), "unknown role: message 2: role is 'assistant '"),
        (said({"role": "developer", "content": "x"}, ASSISTANT), "unknown role: message 1: role is 'developer'"),
        (said({"role": "function", "content": "x"}, ASSISTANT), "wrong order: it begins with a tool message"),
        (said(USER, {"role": "", "content": "4"}), "unknown role: message 2: role is ''"),
        (said(USER, {"role": 1, "content": "4"}), "unknown role: message 2: role is 1"),
        (said(USER, {"role": ["assistant"], "content": "4"}), "unknown role: message 2: role is a list"),
        (said(USER, {"role": "r" * 100_000, "content": "4"}), f"unknown role: message 2: role is '{'r' * 39}...;"),
        (said({"role": "user"}, ASSISTANT), "wrong type: message 1: content must be a text or a list of text parts"),
        (asking(None), "wrong type: message 1: content must be a text"),
        (asking(4), "message 1: content must be a text or a list of text parts,"),
        (asking(True), "list of text parts, is true or false"),
        (asking({"text": "a"}), "list of text parts, is an object"),
        (said({"role": "system", "content": None}, USER, ASSISTANT), "wrong type: message 1: content must be a text"),
        (said(USER, {"role": "assistant"}), "wrong type: message 2: content must be a text"),
        (said(USER, {"role": "assistant", "content": None}), "wrong type: message 2: content must be a text"),
        (said(USER, {"role": "assistant", "content": None, "tool_calls": []}), "message 2: content must be a text"),
        (said(USER, {"role": "assistant", "content": None, "reasoning": ""}), "message 2: content must be a text"),
        (said(USER, {"role": "assistant", "content": None, "weight": 0}), "message 2: content must be a text"),
        (
            said(USER, ASSISTANT, {"role": "tool", "content": None}),
            "wrong type: message 3: content of a tool is null; write its JSON text",
        ),
        (said(USER, {"role": "assistant", "content": ""}), "nothing to learn: message 2: the assistant's content is"),
        (said(USER, {"role": "assistant", "content": " \n"}), "nothing to learn: message 2: the assistant's content"),
        (said(USER, ASSISTANT, USER, {"role": "assistant", "content": ""}), "nothing to learn: message 4: "),
        (said(USER, {"role": "assistant", "content": "", "reasoning": " "}), "nothing to learn: message 2: "),
        (said(USER, {"role": "assistant", "content": "", "weight": 1}), "delete the message, or give it weight 0"),
        (said(USER), "no assistant message: nothing to learn from the others"),
        (said({"role": "system", "content": "be kind"}, USER), "no assistant message"),
        (said({"role": "tool", "content": "4"}, ASSISTANT), "wrong order: it begins with a tool message"),
        (said({"role": "system", "content": "a"}, {"role": "tool", "content": "4"}, ASSISTANT), "wrong order"),
        (asking([]), "wrong type: message 1: content is an empty list"),
        (asking(["a"]), "message 1: content part 1 must be an object, is a text"),
        (asking([{"text": "a"}]), "not a text part: message 1: content part 1"),
        (asking([PART, {"type": "image_url"}]), "not a text part: message 1: content part 2 has type 'image_url'"),
        (asking([{"type": "text"}]), "content part 1: text must be a text, is n"),
        (asking([{"type": "text", "text": 1}]), "text must be a text, is a numb"),
        (asking([{**PART, "cache": 1}]), "unknown key: message 1: cache in content part 1; known are text, type"),
        (
            said(USER, {**ASSISTANT, "function_call": {}}),
            "bad tool call: message 2: call 1: the function's name must be a text, is None",
        ),
        (said({**USER, "x": 1, "y": 2}, ASSISTANT), "unknown key: message 1: x, y in a message"),
        (said({**USER, "images": []}, ASSISTANT), "unknown key: message 1: images"),
        (said({**USER, "name": 1}, ASSISTANT), "wrong type: message 1: name must be a text, is a number"),
        (said({**USER, "train": 0.5}, ASSISTANT), "bad mask: message 1: train may say what is learned; write weight"),
        (said(USER, ASSISTANT, images=["a.png"]), "unknown key: images in a row of format messages; only text is read"),
        (
            said(USER, ASSISTANT, system_prompt="a", tools=[TOOL]),
            "unknown key: system_prompt in a row of format messages",
        ),
        (said(USER, ASSISTANT, enable_thinking=False), "unknown key: enable_thinking in a row of format messages"),
        (said(USER, ASSISTANT, rejected_messages=[USER]), "preference: rejected_messages in a row of format messages"),
        (
            said(USER, ASSISTANT, label=False),
            "preference: label in a row of format messages; for answers with a label set",
        ),
        (said(USER, ASSISTANT, label=True), "preference: label in a row of format messages"),
        (said(USER, {**ASSISTANT, "tool_call_id": 3}), "wrong type: message 2: tool_call_id must be a text"),
        (said(USER, {**ASSISTANT, "reasoning_content": 3}), "message 2: reasoning_content must be a text, is a number"),
        (said(USER, {**ASSISTANT, "thinking": ["a"]}), "message 2: reasoning_content must be a text, is a list"),
        (said(USER, {**ASSISTANT, "thinking": "a", "reasoning": "b"}), "contradiction: message 2: thinking and anothe"),
        (said({**USER, "reasoning_content": "a"}, ASSISTANT), "message 1: reasoning_content in a user message; only"),
        (said({**USER, "tool_calls": [CALL]}, ASSISTANT), "unknown key: message 1: tool_calls in a user message; only"),
        (said(USER, {**ASSISTANT, "weight": 2}), "bad weight: message 2: weight must be 0 (not learned) or 1 (learned"),
        (said(USER, {**ASSISTANT, "weight": 0.5}), "bad weight: message 2: weight must be 0 (not learned) or 1 (learn"),
        (said(USER, {**ASSISTANT, "weight": True}), "bad weight: message 2: "),
        (said(USER, {**ASSISTANT, "weight": "1"}), "bad weight: message 2: "),
        (said({**USER, "weight": -1}, ASSISTANT), "bad weight: message 1: "),
        (said(USER, {**ASSISTANT, "weight": [1]}), "bad weight: message 2: "),
        (said(USER, {**ASSISTANT, "tool_calls": "add"}), "bad tool call: message 2: tool_calls must be a list, is a t"),
        (said(USER, {**ASSISTANT, "tool_calls": CALL}), "message 2: tool_calls must be a list, is an object"),
        (calling("add"), "bad tool call: message 2: call 1: must be an object, is a text"),
        (calling(CALL, None), "bad tool call: message 2: call 2: must be an object, is null"),
        (calling({}), "bad tool call: message 2: call 1: the function's name must be a text, is None"),
        (calling({**CALL, "type": "code"}), "call 1: type is 'code'; only function is known"),
        (calling({**CALL, "extra": 1}), "call 1: extra is not known; expected function with name and arguments"),
        (calling({**CALL, "name": "add"}), "call 1: name is not known"),
        (calling({"function": "add"}), "call 1: function must be an object, is a text"),
        (calling({"name": "add"}), "call 1: arguments must be an object, or its JSON text, not null"),
        (calling({"name": "add", "arguments": {}, "output": "4"}), "call 1: output is not known"),
        (function(name="add"), "call 1: arguments must be an object, or its JSON text, not null"),
        (function(arguments={}), "call 1: the function's name must be a text, is None"),
        (function(name="", arguments={}), "call 1: the function's name must be a text, is ''"),
        (function(name=7, arguments={}), "call 1: the function's name must be a text, is 7"),
        (function(name="add", arguments={}, strict=True), "call 1: strict is not known"),
        (function(name="add", arguments=[1]), "arguments must be an object, or its JSON text, not a list"),
        (function(name="add", arguments=7), "arguments must be an object, or its JSON text, not a number"),
        (function(name="add", arguments="[1]"), "arguments must be an object, or its JSON text, not a list"),
        (function(name="add", arguments=""), "call 1: arguments must hold JSON; not JSON: Expecting value (column 1)"),
        (function(name="add", arguments="{a: 1}"), "call 1: arguments must hold JSON; not JSON: Expecting property"),
        (function(name="add", arguments='{"a": 1, "a": 2}'), "arguments must hold JSON; duplicate key: 'a' occurs"),
        (function(name="add", arguments='{"a": NaN}'), "arguments must hold JSON; not a number: NaN"),
        (function(name="add", arguments='{"a": "\\ud800"}'), "arguments must hold JSON; lone surrogate"),
        (function(name="add", arguments="[" * 100_000), "arguments must hold JSON; nested too deeply"),
        (said(USER, ASSISTANT, tools="add"), "bad tools: tools must hold JSON; not JSON: Expecting value"),
        (said(USER, ASSISTANT, tools={}), "bad tools: tools must be a list, or the JSON text of one, is an object"),
        (said(USER, ASSISTANT, tools="{}"), "bad tools: tools must be a list, or the JSON text of one, is an object"),
        (said(USER, ASSISTANT, tools=7), "bad tools: tools must be a list, or the JSON text of one, is a number"),
        (said(USER, ASSISTANT, tools=["add"]), "bad tools: tool 1 must be an object with the name of a function"),
        (said(USER, ASSISTANT, tools=[TOOL, {}]), "bad tools: tool 2 must be an object with the name of a function"),
        (said(USER, ASSISTANT, tools=[{"function": {"name": 1}}]), "bad tools: tool 1 must be an object"),
        (said(USER, ASSISTANT, tools='[{"name": "a", "name": "b"}]'), "bad tools: tools must hold JSON; duplicate key"),
    ],
    "sharegpt": [
        ({"messages": [USER, ASSISTANT]}, "missing key: the row has no 'conversations', only messages"),
        ({"conversations": {}}, "wrong type: conversations must be a list, is an object"),
        ({"conversations": None}, "wrong type: conversations must be a list, is null"),
        (shared(), "no messages: conversations is an empty list"),
        (shared(HUMAN, "4"), "wrong type: message 2: must be an object, is a text"),
        (shared({"value": "a"}, GPT), "missing key: message 1: role is missing; the message has value"),
        (shared({"from": "robot", "value": "a"}, GPT), "unknown role: message 1: from is 'robot'; known are human, "),
        (shared({"from": "Human", "value": "a"}, GPT), "unknown role: message 1: from is 'Human'"),
        (shared({"from": None, "value": "a"}, GPT), "unknown role: message 1: from is None"),
        (shared({"from": {}, "value": "a"}, GPT), "unknown role: message 1: from is an object"),
        (shared({"from": "human"}, GPT), "wrong type: message 1: value must be a text or a list of text parts, is nul"),
        (shared({"from": "human", "value": 1}, GPT), "message 1: value must be a text or a list of text parts, is a n"),
        (shared(HUMAN, {"from": "gpt", "value": ""}), "nothing to learn: message 2: the assistant's value is blank"),
        (shared(HUMAN, {"from": "gpt", "value": "\t"}), "nothing to learn: message 2"),
        (shared(HUMAN, {"from": "gpt", "value": None}), "wrong type: message 2: value must be a text"),
        (shared(HUMAN, {**GPT, "weight": 3}), "bad weight: message 2"),
        (shared(HUMAN, {**GPT, "score": 3}), "unknown key: message 2: score in a message"),
        (shared({**HUMAN, "role": "user"}, GPT), "unknown key: message 1: role beside from; use from and value, or"),
        (shared({"from": "human", "content": "a"}, GPT), "unknown key: message 1: content beside from"),
        (shared(HUMAN), "no assistant message"),
        (shared({"from": "observation", "value": "4"}, GPT), "wrong order: it begins with a tool message"),
        (shared(HUMAN, GPT, kto_tag=False), "preference: kto_tag in a row of format sharegpt"),
        (shared(HUMAN, GPT, system=1), "wrong type: system must be a text, is a number"),
        (shared({"from": "system", "value": "a"}, HUMAN, GPT, system="b"), "two system messages: one is system, the"),
        (shared(HUMAN, GPT, tools="["), "bad tools: tools must hold JSON"),
        (shared(HUMAN, {"from": "function_call", "value": "add(2, 2)"}), "bad tool call: message 2: value must be the"),
        (shared(HUMAN, {"from": "function_call"}), "message 2: value must be the JSON text of a call, is null"),
        (shared(HUMAN, {"from": "function_call", "value": {}}), "value must be the JSON text of a call, is an object"),
        (shared(HUMAN, {"from": "function_call", "value": "[]"}), "bad tool call: message 2: value is an empty list"),
        (shared(HUMAN, {"from": "function_call", "value": "3"}), "bad tool call: message 2: call 1: must be an object"),
        (shared(HUMAN, {"from": "function_call", "value": '{"name": "a"}'}), "message 2: call 1: arguments must be an"),
        (shared(HUMAN, {"from": "function_call", "value": '{"a": Infinity}'}), "of a call; not a number: Infinity"),
    ],
    "alpaca": [
        ({"instruction": "a"}, "missing key: the row has no 'output', only instruction"),
        ({"output": "a"}, "missing key: the row has no 'instruction', only output"),
        ({"instruction": None, "output": "b"}, "wrong type: instruction must be a text, is null"),
        ({"instruction": ["a"], "output": "b"}, "wrong type: instruction must be a text, is a list"),
        ({"instruction": "a", "output": None}, "wrong type: output must be a text, is null"),
        ({"instruction": "a", "output": 4}, "wrong type: output must be a text, is a number"),
        ({"instruction": "a", "output": ""}, "nothing to learn: output is blank"),
        ({"instruction": "a", "output": "\u3000"}, "nothing to learn: output is blank"),
        ({"instruction": "a", "output": "b", "input": 2}, "wrong type: input must be a text, is a number"),
        ({"instruction": "a", "output": "b", "system": []}, "wrong type: system must be a text, is a list"),
        ({"instruction": "a", "output": "b", "history": "x"}, "wrong type: history must be a list of pairs, is a text"),
        ({"instruction": "a", "output": "b", "history": {}}, "wrong type: history must be a list of pairs, is an obj"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "history, pair 1: must be a list of two texts"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "history, pair 1: must be a list of two texts"),
        ({"instruction": "a", "output": "b", "history": [["x", "y"], ["x", None]]}, "history, pair 2: must be a list"),
        ({"instruction": "a", "output": "b", "history": [["x", "y", "z"]]}, "history, pair 1: must be a list of two"),
        ({"instruction": "a", "output": "b", "history": [["x", ""]]}, "nothing to learn: history, pair 1: the answer"),
    ],
    "prompt_completion": [
        ({"prompt": "a"}, "missing key: the row has no 'completion', only prompt"),
        ({"completion": "a"}, "missing key: the row has no 'prompt', only completion"),
        ({"prompt": 1, "completion": "b"}, "prompt must be a text or a list of messages, is a number"),
        ({"prompt": None, "completion": "b"}, "prompt must be a text or a list of messages, is null"),
        ({"prompt": USER, "completion": "b"}, "prompt must be a text or a list of messages, is an object"),
        ({"prompt": "a", "completion": [USER]}, "no assistant message"),
        ({"prompt": [USER], "completion": " "}, "nothing to learn: completion is blank"),
        ({"prompt": "a", "completion": ""}, "nothing to learn: completion is blank"),
        ({"prompt": "a", "completion": None}, "wrong type: completion must be a text or a list of messages, is null"),
        ({"prompt": [], "completion": [ASSISTANT]}, "no messages: prompt is an empty list"),
        ({"prompt": [USER], "completion": []}, "no messages: completion is an empty list"),
        ({"prompt": ["a"], "completion": [ASSISTANT]}, "wrong type: message 1 of the prompt: must be an object"),
        ({"prompt": [USER, {"role": "x"}], "completion": [ASSISTANT]}, "unknown role: message 2 of the prompt: role"),
        ({"prompt": [USER], "completion": [{"role": "x"}]}, "unknown role: message 1: role is 'x'"),
        ({"prompt": [USER, ASSISTANT], "completion": [USER]}, "no assistant message: nothing to learn"),
        ({"prompt": [USER], "completion": [{"role": "assistant", "content": ""}]}, "nothing to learn: message 1"),
        ({"prompt": [{"role": "tool", "content": "4"}], "completion": [ASSISTANT]}, "wrong order: it begins with a to"),
        ({"prompt": "a", "completion": "b", "tools": [1]}, "bad tools: tool 1 must be an object"),
    ],
    "columns": [
        ({}, "missing key: the row has no 'question', only none"),
        ({"question": "a"}, "missing key: the row has no 'answer', only question"),
        ({"answer": "b"}, "missing key: the row has no 'question', only answer"),
        ({"Question": "a", "Answer": "b"}, "missing key: the row has no 'question', only Answer, Question"),
        ({str(n): n for n in range(30)}, "and 10 more"),
        ({"a\nb": 1, "c" * 1000: 2}, r"only 'a\nb', 'ccc"),
        ({"question": None, "answer": "b"}, "wrong type: question must be a text, is null"),
        ({"question": "a", "answer": None}, "wrong type: answer must be a text, is null"),
        ({"question": "a", "answer": 3.5}, "wrong type: answer must be a text, is a number"),
        ({"question": "a", "answer": ""}, "nothing to learn: answer is blank"),
        ({"question": "a", "answer": "\u2028\u00a0"}, "nothing to learn: answer is blank"),
        ({"question": "a", "answer": "b", "system": "be kind"}, "unknown key: system in a row of format columns"),
        ({"question": "a", "answer": "b", "tools": [TOOL]}, "unknown key: tools in a row of format columns"),
        ({"prompt": "a", "response": "b", "system_prompt": "c"}, "unknown key: system_prompt in a row of format colum"),
        (
            {"prompt": "a", "response": "b", "rejected": "c"},
            "preference: rejected in a row of format columns; for pairs of answers set",
        ),
    ],
    "text": [
        ({}, "missing key: the row has no 'text', only none"),
        ({"content": "a"}, "missing key: the row has no 'text', only content"),
        ({"text": None}, "wrong type: text must be a text, is null"),
        ({"text": 1}, "wrong type: text must be a text, is a number"),
        ({"text": ["a"]}, "wrong type: text must be a text, is a list"),
        ({"text": ""}, "nothing to learn: text is blank"),
        ({"text": "\r\n "}, "nothing to learn: text is blank"),
    ],
    "tokens": [
        ({}, "missing key: the row has no 'input_ids', only none"),
        ({"ids": [1]}, "missing key: the row has no 'input_ids', only ids"),
        ({"input_ids": None}, "wrong type: input_ids must be a list of integers, is null"),
        ({"input_ids": "1 2"}, "wrong type: input_ids must be a list of integers, is a text"),
        ({"input_ids": 1}, "wrong type: input_ids must be a list of integers, is a number"),
        ({"input_ids": []}, "nothing to learn: input_ids is empty"),
        ({"input_ids": [1, "2"]}, "wrong type: input_ids[1] must be an integer, is '2'"),
        ({"input_ids": [1, 2.0]}, "wrong type: input_ids[1] must be an integer, is 2.0"),
        ({"input_ids": [True, 1]}, "wrong type: input_ids[0] must be an integer, is True"),
        ({"input_ids": [1, None]}, "wrong type: input_ids[1] must be an integer, is None"),
        ({"input_ids": [[1, 2]]}, "wrong type: input_ids[0] must be an integer, is a list"),
        ({"input_ids": [1, -1]}, "bad token id: input_ids[1] is -1; expected 0 to 2,147,483,647"),
        ({"input_ids": [1, -100]}, "bad token id: input_ids[1] is -100"),
        ({"input_ids": [2**31, 1]}, "bad token id: input_ids[0] is 2147483648"),
        ({"input_ids": [1, 10**900]}, f"bad token id: input_ids[1] is 1{'0' * 39}...;"),
        ({"input_ids": [1, 2], "labels": [2]}, "bad labels: 1 labels for 2 input_ids; expected as many"),
        ({"input_ids": [1, 2], "labels": []}, "bad labels: 0 labels for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": "2"}, "wrong type: labels must be a list of integers, is a text"),
        ({"input_ids": [1, 2], "labels": [1, True]}, "wrong type: labels[1] must be an integer, is True"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "bad labels: labels[0] is 2, input_ids[0] is 1; expected"),
        ({"input_ids": [1, 2], "labels": [-100, -1]}, "bad labels: labels[1] is -1, input_ids[1] is 2; expected the s"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "nothing to learn: all labels after the first are -100"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "nothing to learn: all labels after the first are -100"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "bad attention mask: it must be 1 for each of input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "bad attention mask"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "bad attention mask"),
        ({"input_ids": [1, 2], "attention_mask": [True, True]}, "wrong type: attention_mask[0] must be an integer"),
        ({"input_ids": [1, 2], "attention_mask": 1}, "wrong type: attention_mask must be a list of integers"),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, "unknown key: assistant_masks in a row of format tokens"),
        (
            {"input_ids": [1, 2], "position_ids": [0, 0]},
            "unknown key: position_ids in a row of format tokens; write one document a row",
        ),
    ],
}
ALL_ROWS = [(name, json.dumps(row).encode(), reason) for name, cases in ROWS.items() for row, reason in cases]
ALL_LINES = [*(("columns", line, reason) for line, reason in LINES), *ALL_ROWS]

QA = '{"question": "a", "answer": "b"}'

# Whole JSON arrays of question and answer: the text, the numbers of the good rows, the line and reason of each bad one.
ARRAYS: list[tuple[str, list[int], list[tuple[int, str]]]] = [
    (f"[{QA},\n{QA}\n{QA}]", [1, 2], [(3, "broken JSON array: Expecting ',' or ']'; the rest of the file was not")]),
    (f"[{QA},\n{QA},\n\n]", [1, 2], [(4, "broken JSON array: Expecting value")]),
    (f"[{QA},\n,{QA}]", [1], [(2, "broken JSON array: Expecting value")]),
    (f"[\n{QA},\n{QA}", [2, 3], [(3, "broken JSON array: Expecting ',' or ']'")]),
    (f"[{QA},\n", [1], [(2, "broken JSON array: Expecting value")]),
    (f"[{QA},\n" + '{"question":\n\n"a" "answer"}]', [1], [(4, "broken JSON array: Expecting ',' delimiter")]),
    (f"[{QA},\n" + '{"question": "a\n"}]', [1], [(2, "broken JSON array: Invalid control character at")]),
    (f"[{QA},\n" + '{"question": "a', [1], [(2, "broken JSON array: Unterminated string starting at")]),
    (f"[{QA},\n" + "{'question': 'a'}]", [1], [(2, "broken JSON array: Expecting property name")]),
    (f"[{QA}]\n{QA}", [1], [(2, "broken JSON array: there is more text after the closing bracket")]),
    (f"[{QA}]\n]", [1], [(2, "broken JSON array: there is more text")]),
    (f"[{QA},\n" + "[" * 100_000 + "]", [1], [(2, "broken JSON array: nested too deeply")]),
    (f"[{QA},\nnull,\n{QA}]", [1, 3], [(2, "not an object: a row must be a JSON object, but is null")]),
    (f"[{QA},\n1,\n2.5e3]", [1], [(2, "not an object"), (3, "but is a number")]),
    (f'[{QA},\n"a, b]",\n{QA}]', [1, 3], [(2, "not an object: a row must be a JSON object, but is a text")]),
    (f"[[{QA}],\n{QA}]", [2], [(1, "not an object: a row must be a JSON object, but is a list")]),
    (f"[{QA},\nbroken,\n{QA}]", [1], [(2, "broken JSON array: Expecting value")]),
    (f"[{QA},\n" + '{"question": "a"},\n' + f"{QA}]", [1, 3], [(2, "missing key: the row has no 'answer'")]),
    (f"[{QA},\n" + '{"a": NaN},\n' + f"{QA}]", [1, 3], [(2, "not a number: NaN")]),
    (f"[{QA},\n" + '{"a": 1,\n"a": 2},\n' + f"{QA}]", [1, 4], [(2, "duplicate key: 'a'")]),
    (f"[{QA},\n" + '{"a": "\\ud800"},\n' + f"{QA}]", [1, 3], [(2, "lone surrogate")]),
    (f"[{QA},\n" + '{"a": ' + "7" * 5000 + "},\n" + f"{QA}]", [1, 3], [(2, "number too large: an integer of over")]),
    (f"[{QA},\n" + '{"a": "\udcff"},\n' + f"{QA}]", [1, 3], [(2, "not UTF-8: at byte 8")]),
    (f"\ufeff[{QA},\n{QA},]", [1, 2], [(2, "broken JSON array: Expecting value")]),
    (f"[{QA}\0]", [1], [(1, "broken JSON array: Expecting ',' or ']'")]),
]


def packed(kind: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("rows.jsonl", data)
    else:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("rows.jsonl"))
    return buffer.getvalue()


def indented(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()


ROW = QA.encode() + b"\n"
NOISE = random.Random(0).randbytes(100_000)
GZ = gzip.compress(
    b"".join(b'{"question": "%d", "answer": "%s"}\n' % (i, NOISE[i : i + 30].hex().encode()) for i in range(9000))
)

# Files that are refused as a whole: name, bytes, reason.
FILES: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b"", "is empty; expected JSONL (one JSON object per line), a JSON array of objects, or parquet"),
    ("a.json", b"[]", "has no rows"),
    ("a.json", b"[\n]\n", "has no rows"),
    ("a.csv", b'question,answer\n"1, 2",3\n', "print(json.dumps(r)) for r in csv.DictReader(sys.stdin)]' < "),
    ("a.json", indented({"data": [{"a": 1}]}), "on one line: jq -c '.data[]' "),
    ("a.json", indented({"messages": [{"a": 1}]}) * 2, "on one line: jq -c . "),
    ("a.json", indented({"question": "a", "answer": "b"}), "JSON whose first object takes several"),
    ("a.json", b'{"data": [\n' + QA.encode() + b"\n]}", "takes several lines; write each row"),
    ("a.json", indented({"data": [{"a": "x" * 99}] * 9000}), "takes several lines; write each row"),
    ("a.json", b'{\n"rows": [\n' + QA.encode() + b"\n]\n}", "write each row on one line: jq -c '.rows[]'"),
    ("a.json", b'{\n"data": [\n' + b",\n".join([QA.encode()] * 3) + b"\n]}", "several lines; write each row on one"),
    ("a.json", b'\xef\xbb\xbf{\n"a": 1}', "takes several lines"),
    ("a.jsonl", (QA.encode() + b", \r\n") * 2 + QA.encode(), "cut the commas off: sed 's/,[[:space:]]*$//' /"),
    ("a.jsonl", (QA.encode() + b"\r") * 2, "lines end in CR alone; convert it: tr '\\r' '\\n' < "),
    ("a.json", (indented({"question": "a"}) + b"\n") * 3, "takes several lines"),
    ("a.txt", b"Once upon a time\nthere was\n", "parquet: its first line begins with 'Once upon a time'"),
    ("a.csv", b"question,answer\n1+1,2\n", "neither JSON nor parquet: its first line begins with 'question,answer'"),
    ("a.jsonl", b'"a"\n"b"\n', "neither JSON nor parquet: its first line begins with '\"a\"'"),
    ("a.jsonl", b"null", "neither JSON nor parquet"),
    ("a.bin", bytes(range(256)), "neither JSON nor parquet"),
    ("a.jsonl", NOISE[:1000].replace(b"{", b"").replace(b"[", b""), "neither JSON nor parquet"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + NOISE, "the zstd data is damaged"),
    ("a.jsonl.xz", b"\xfd7zXZ\0" + NOISE, "is xz-compressed; unpack it first (xz -d)"),
    ("a.jsonl.bz2", b"BZh9" + NOISE, "is bzip2-compressed; unpack it first (bzip2 -d)"),
    ("a.jsonl.lz4", b"\x04\x22\x4d\x18" + NOISE, "is lz4-compressed"),
    ("a.7z", b"7z\xbc\xaf\x27\x1c" + NOISE, "is a 7-Zip archive"),
    ("a.zip", packed("zip", ROW), "is a zip archive"),
    ("a.tar", packed("tar", ROW), "is a tar archive; unpack it first (tar -x)"),
    ("a.tar.gz", gzip.compress(packed("tar", ROW)), "is a tar archive"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(ROW)), "is gzipped twice; unpack it once (gzip -d)"),
    ("a.arrow", b"ARROW1\0\0" + NOISE, "is an Arrow file; save it as parquet or JSONL"),
    ("a.arrow", b"\xff\xff\xff\xff\x10" + NOISE, "is an Arrow stream"),
    ("a.npy", b"\x93NUMPY\x01" + NOISE, "is a NumPy array; write JSONL with input_ids"),
    ("a.h5", b"\x89HDF\r\n" + NOISE, "is HDF5"),
    ("a.db", b"SQLite format 3\0" + NOISE, "is an SQLite database"),
    ("a.jsonl", ROW.decode().encode("utf-16"), "is UTF-16 or UTF-32; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    ("a.jsonl", b"\xfe\xff" + ROW.decode().encode("utf-16-be"), "is UTF-16; convert it to UTF-8"),
    ("a.jsonl.gz", gzip.compress(b""), "is empty"),
    ("a.jsonl.gz", gzip.compress(b"hello\n"), "neither JSON nor parquet"),
    ("a.jsonl.gz", gzip.compress(b"PAR1" + NOISE), "is parquet inside gzip or zstd; unpack it first (gzip -d, z"),
    ("a.jsonl.gz", b"\x1f\x8b", "the gzip data is damaged or truncated after line 0 (Compressed file ended"),
    ("a.jsonl.gz", b"\x1f\x8b" + NOISE, "the gzip data is damaged or truncated after line 0 (Unknown"),
    ("a.jsonl.gz", GZ[:-8], "truncated after line 9000 (Compressed file ended before the end-of-stream marker"),
    ("a.jsonl.gz", GZ[:-4] + b"\1\2\3\4", "the gzip data is damaged or truncated after line 9000"),
    ("a.jsonl.gz", GZ[: len(GZ) // 2], "the gzip data is damaged or truncated after line 4"),
    ("a.jsonl.gz", GZ[: len(GZ) // 2] + bytes(100) + GZ[len(GZ) // 2 + 100 :], "is damaged or truncated after line"),
    ("a.jsonl.gz", GZ + b"garbage", "is damaged or truncated after line 9000 (Not a gzipped file"),
    ("a.json.gz", gzip.compress(f"[{QA},\n{QA}]".encode())[:-8], "the gzip data is damaged or truncated after line"),
    ("a.parquet", b"PAR1" + NOISE, "is parquet that cannot be read"),
    ("a.parquet", b"PAR1", "is parquet that cannot be read"),
    ("a.parquet", b"PAR1" + bytes(100) + b"PAR1", "is parquet that cannot be read"),
]


@pytest.mark.parametrize(("name", "line", "reason"), ALL_LINES, ids=range(len(ALL_LINES)))
def test_a_bad_line_is_named_and_the_lines_around_it_are_read(
    name: str, line: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD[name][0]).encode()
    path.write_bytes(b"\n".join([good, good, line, good]))
    rows, reasons = gather(path, form(name))
    assert sorted(rows) == [1, 2, 4]
    assert len(reasons) == 1 and reasons[0].startswith(f"{path}:3: ") and reason in reasons[0]
    assert "\n" not in reasons[0] and len(reasons[0]) < len(str(path)) + 1200


@pytest.mark.parametrize(("text", "good", "bad"), ARRAYS, ids=range(len(ARRAYS)))
def test_a_bad_element_of_an_array_is_named(
    text: str, good: list[int], bad: list[tuple[int, str]], tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    rows, reasons = gather(path, form("columns"))
    assert sorted(rows) == good
    assert len(reasons) == len(bad)
    for found, (line, reason) in zip(reasons, bad, strict=True):
        assert found.startswith(f"{path}:{line}: ") and reason in found


@pytest.mark.parametrize(("name", "data", "reason"), FILES, ids=range(len(FILES)))
def test_a_file_of_another_kind_or_a_damaged_one_is_refused(
    name: str, data: bytes, reason: str, tmp_path: Path
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        gather(path, form("columns"))
    assert str(caught.value).startswith(f"{path}: ") and reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tables_hold_at_least_three_hundred_different_inputs() -> None:
    different = {(name, line) for name, line, _ in ALL_LINES} | {text for text, *_ in ARRAYS} | set(FILES)
    assert len(different) == len(ALL_LINES) + len(ARRAYS) + len(FILES) >= 300


def check_well_formed(example: Example) -> None:
    """What the rest of the trainer relies on."""
    assert [example.messages, example.text, example.input_ids].count(None) == 2
    assert len(example_hash(example)) == 16
    for message in example.messages or []:
        assert message["role"] in ROLES and isinstance(message["content"], str)
        assert message.get("weight", 1) in (0, 1) and None not in message.values()
        for call in message.get("tool_calls", []):
            assert call.get("function", call)["name"].strip() and "arguments" in call.get("function", call)
    if example.messages is not None:
        assert any(message["role"] == "assistant" for message in example.messages)
    assert example.text is None or example.text.strip()
    if example.input_ids is not None:
        assert example.input_ids and all(type(number) is int and number >= 0 for number in example.input_ids)
        assert example.labels is None or len(example.labels) == len(example.input_ids)


INSERTED = (*(bytes([one]) for one in b'\0\n\r"\\{}[],\xff'), b"\xef\xbb\xbf", b"NaN", b"-1")


def mutated(random: random.Random, lines: list[bytes]) -> bytes:
    """A valid line with one to three bytes or pieces of it changed."""
    line = bytearray(random.choice(lines))
    for _ in range(random.randint(1, 3)):
        start, stop = sorted(random.randint(0, len(line)) for _ in range(2))
        piece = line[start : min(stop, start + random.choice((1, 2, 8, 200)))]
        stop = start + len(piece)
        change = random.randrange(8)
        if change == 0 and piece:
            line[start] ^= 1 << random.randrange(8)
        elif change == 1:
            del line[start:stop]
        elif change == 2:
            line[start:start] = random.choice(INSERTED)
        elif change == 3:
            del line[start:]
        elif change == 4:
            line[start:start] = piece * random.randint(1, 3)
        elif change == 5:
            line[start:stop] = piece[::-1]
        elif change == 6:
            other = random.choice(lines)
            cut = random.randint(0, len(other))
            line[start:] = other[cut:]
        else:
            for value in (b'"user"', b'"assistant"', b'"4"', b"1", b"null"):
                if value in line:
                    new = random.choice((b"null", b"[]", b"{}", b"true", b"1e9", b'""', b'"tool"', b'"\\ud800"'))
                    line[:] = line.replace(value, new, 1)
                    break
    return bytes(line)


def good_row(name: str, number: int) -> dict[str, Any]:
    """A row of the format that no other number gives."""
    row = json.dumps(GOOD[name][0])
    for old, new in (('"4"', f'"good {number}"'), ("four", f"good {number}"), ("3]", f"{number}]")):
        row = row.replace(old, new)
    return json.loads(row)


@pytest.mark.parametrize("count", [150, pytest.param(1500, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FORMATS)
def test_mutated_lines_are_each_read_or_refused_and_their_neighbours_are_read(
    name: str, count: int, tmp_path: Path
) -> None:
    chance = random.Random(name)
    lines = [json.dumps(row, ensure_ascii=chance.random() < 0.5).encode() for rows in GOOD.values() for row in rows]
    own = [json.dumps(row).encode() for row in GOOD[name]]
    path, content, expected, line_number = tmp_path / "rows.jsonl", [], {}, 1
    for number in range(count):
        row = good_row(name, number)
        expected[line_number] = form(name).read(row)
        bad = mutated(chance, own if chance.random() < 0.7 else lines)
        content += [json.dumps(row).encode(), bad]
        line_number += 2 + bad.count(b"\n")
    path.write_bytes(b"\n".join([*content, b'{"end": 1}\n']))
    rows, reasons = gather(path, form(name))
    blank = [line for line in path.read_bytes().split(b"\n")[:-1] if not line.removeprefix(BYTE_ORDER_MARK).strip()]
    assert len(rows) + len(reasons) + len(blank) == line_number
    assert len(reasons) > count / 4 and len(rows) > count  # some mutations do no harm
    assert {number: rows[number] for number in expected} == expected
    for example in rows.values():
        check_well_formed(example)
    others, kinds, said_on_one_line = [form(other) for other in FORMATS], set(), True
    for record in read_records(str(path)):
        for other in others:
            try:
                check_well_formed(other.read(parse(record.raw)))
            except BadRecord as bad:
                kinds.add(bad.kind)
                said_on_one_line &= "\n" not in str(bad)
    assert said_on_one_line and len(kinds) > 5 + count // 300 and all(len(kind) < 25 for kind in kinds)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in paths(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_any_value_in_any_place_is_read_or_refused() -> None:
    odd = [None, True, 0, 1, -1, 1.5, 10**30, "", " ", "x", "{}", "[]", "[1]", '"x"', [], {}, [[]], [None], ["x"], [1]]
    odd += [{"a": 1}, [{}], {"name": "f"}, {"name": "f", "arguments": {}}, {"type": "text"}, [USER, ASSISTANT], [HUMAN]]
    count = longest = 0
    for name, rows in GOOD.items():
        read = form(name).read
        for row, new in ((row, new) for row in rows for new in odd):
            for path in paths(row)[1:]:
                count += 1
                try:
                    check_well_formed(read(replaced(row, path, new)))
                except BadRecord as bad:
                    longest = max(longest, len(str(bad)))
    assert count > 2000 and 50 < longest < 1000


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.full)])
def test_mutated_arrays_and_gzip_files_give_their_first_rows_or_are_refused(count: int, tmp_path: Path) -> None:
    chance = random.Random(1)
    elements = [json.dumps(good_row("columns", number), indent=1).encode() for number in range(20)]
    read = form("columns").read
    path = tmp_path / "rows"
    for _ in range(2 * count):
        kept = chance.randrange(20)
        array = b"[\n" + b",\n".join([*elements[:kept], mutated(chance, elements), *elements[kept:]]) + b"\n]"
        path.write_bytes(array)
        rows, reasons = gather(path, form("columns"))
        first = dict(zip(range(2, 4 * kept + 2, 4), (read(good_row("columns", n)) for n in range(kept)), strict=True))
        assert {number: rows[number] for number in first} == first
        assert all(int(reason.split(":")[1]) >= 4 * kept + 2 for reason in reasons)
    whole = gzip.compress(b"".join(json.dumps(good_row("columns", n)).encode() + b"\n" for n in range(1000)))
    good = {n + 1: read(good_row("columns", n)) for n in range(1000)}
    outcomes = set()
    for _ in range(count):
        path.write_bytes(mutated(chance, [whole]))
        try:
            rows, reasons = gather(path, form("columns"))
            outcomes.add("read" if rows == good else "changed")
        except UserError as error:
            outcomes.add("damaged" if "the gzip data is damaged or truncated after line" in str(error) else "refused")
    assert "damaged" in outcomes and "changed" not in outcomes
    assert "read" in outcomes or count < 300  # some mutations do no harm


def test_the_reading_functions_are_what_the_trainer_can_send_to_processes() -> None:
    import pickle

    for name in FORMATS:
        again = pickle.loads(pickle.dumps(form(name)))
        assert again.read(GOOD[name][0]) == form(name).read(GOOD[name][0])
    bad = pickle.loads(pickle.dumps(BadRecord("kind", "detail")))
    assert (bad.kind, bad.detail, str(bad)) == ("kind", "detail", "kind: detail")
    assert isinstance(form("columns").read, functools.partial)
