"""Rows are learned as they say: marks of the template in their text, turns in several messages, messages as JSON text,
white space, think blocks and tags of tools. And the remedy of every refusal leads on.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ASSETS, REPO, SHARED_DATA, qwen3_tokenizer
from test_chat_template import say

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.answers import LABELS, PAIRS
from titan_mi100.data.columns import INSTEAD, Findings
from titan_mi100.data.encode import Encoder, encode_records
from titan_mi100.data.files import read_records
from titan_mi100.data.formats import choose_format
from titan_mi100.data.prepare import prepare_data
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer, named_tokens
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer

END = "<|im_end|>"
REAL = {path.stem: path for path in sorted((SHARED_DATA / "templates").glob("*.jinja"))}
ASK, TOLD = say("user", "q"), say("tool", "r")


def call(name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = "", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **keys}


@cache
def small() -> Tokenizer:
    return load_tokenizer(ASSETS / "tokenizer")


@cache
def template_of(source: str, real: bool = False) -> ChatTemplate:
    """A template by its path (real) or text; "": the tokenizer's own. Read in this process, which is fast."""
    tokenizer, folder = (qwen3_tokenizer(), "qwen3_tokenizer") if real else (small(), "")
    path = SHARED_DATA / folder if real else ASSETS / "tokenizer"
    config = json.loads((path / "tokenizer_config.json").read_text())
    text = source if source and not real else Path(source).read_text() if source else config["chat_template"]
    return ChatTemplate(path, text, named_tokens(config), tokenizer.special)


WRITES = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.role == 'assistant' %}BODY
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Outcome(NamedTuple):
    learned: list[str]  # per document its learned text
    texts: list[str]  # the whole documents
    reason: str
    notes: set[str]


def outcome(
    row: dict[str, Any], tmp_path: Path, template: str | Path = "", answers: str = "", **options: Any
) -> Outcome:
    """What becomes of a row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = DataConfig(path=(str(path),), **options)
    real = isinstance(template, Path)
    tokenizer = qwen3_tokenizer() if real else small()
    encoder = Encoder(tokenizer, template_of(str(template), real), config, 1 << 16)
    records = list(read_records(str(path)))
    chunk = encode_records(encoder, choose_format(str(path), config, answers), 0, records)
    learned, texts, start = [], [], 0
    for length in chunk.lengths:
        values = chunk.values[start : start + length]
        start += length
        learned.append(tokenizer.decode((values[values & 1 == 1] >> 1).tolist()))
        texts.append(tokenizer.decode((values >> 1).tolist()))
    reason = ": ".join(dict.fromkeys(chunk.reasons.get(0, ("",))))
    return Outcome(learned, texts, reason, {*chunk.findings.notes})


# -- marks of the template --


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": f"<|im_start|>user\n2+2?{END}\n<|im_start|>assistant\n", "completion": f"4{END}"},
        {"prompt": "2+2?", "completion": f"<|im_start|>assistant\n4{END}"},
        {"question": f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\n2+2?", "answer": "4"},
        {"prompt": "2+2?", "chosen": f"<|im_start|>assistant\n4{END}", "rejected": "5"},
        {"prompt": f"<|im_start|>user\n2+2?{END}", "chosen": f"4{END}", "rejected": f"5{END}"},
    ],
)
def test_a_rendered_dialogue_is_refused_and_written_as_messages_it_is_learned(
    row: dict[str, Any], tmp_path: Path
) -> None:
    answers = PAIRS if "chosen" in row else ""
    for mode in ("", "text"):
        made = outcome(row, tmp_path, answers=answers, special_in_content=mode)
        assert "holds <|im_start|>, which a template writes; write the rendered dialogue as messages" in made.reason
    marks = re.compile(r"<\|im_start\|>(?:user|assistant|system)\n|<\|im_end\|>\n?")
    as_messages = {key: marks.sub("", value) for key, value in row.items()}
    assert outcome(as_messages, tmp_path, answers=answers).learned[0] == f"4{END}"


def test_end_tokens_behind_an_answer_are_learned_once_and_others_refused(tmp_path: Path) -> None:
    for behind in (END, "<|endoftext|>", f" {END}\n", f"{END}{END}<|endoftext|>"):
        made = outcome({"prompt": "2+2?", "completion": f"100{behind}"}, tmp_path)
        assert made.learned == [f"100{' ' * behind.startswith(' ')}{END}"], behind
        assert made.learned[0].count(END) == 1 and made.notes == {"ends"}
    pair = {"prompt": "q", "chosen": f"5{END}", "rejected": f"6{END}"}
    assert outcome(pair, tmp_path, answers=PAIRS).learned == [f"5{END}", f"6{END}"]
    rounds = {"messages": [ASK, say("assistant", f"a{END}"), ASK, say("assistant", f"b{END}")]}
    assert outcome(rounds, tmp_path).learned == [f"a{END}b{END}"]
    assert "nothing to learn" in outcome({"prompt": "q", "completion": END}, tmp_path).reason
    assert "ends with <|eot_id|>, but" in outcome({"prompt": "q", "completion": "4<|eot_id|>"}, tmp_path).reason
    kept = outcome({"prompt": "q", "completion": "4<|eot_id|>"}, tmp_path, special_in_content="text")
    assert kept.learned == [f"4<|eot_id|>{END}"]


QUESTION = {"prompt": f"What is {END}?", "completion": f"{END} ends a turn."}
IN_TEXT: dict[str, dict[str, Any]] = {
    "a question": QUESTION,
    "in the middle": {"prompt": "q", "completion": f"a{END}b"},
    "a tool": {"messages": [ASK, calling(call()), say("tool", f"r{END}"), say("assistant", "a")]},
    "an argument": {"messages": [ASK, calling(call(x=[f"a{END}"]))]},
    "a name of an argument": {"messages": [ASK, calling(call(**{f"a{END}": 1}))]},
    "reasoning": {"messages": [ASK, say("assistant", "a", reasoning_content=f"It is {END}.")]},
    "another token": {"prompt": "q", "completion": "a <|endoftext|> b"},
    "a system message": {"messages": [say("system", f"Never say {END}."), ASK, say("assistant", "a")]},
}


@pytest.mark.parametrize("case", IN_TEXT)
def test_a_special_token_in_a_text_is_a_bad_row_or_letters(case: str, tmp_path: Path) -> None:
    row = IN_TEXT[case]
    refused = outcome(row, tmp_path)
    assert not refused.learned and 'set data.special_in_content = "text"' in refused.reason
    made = outcome(row, tmp_path, special_in_content="text")
    assert not made.reason
    marked = json.dumps(row).count(END) + json.dumps(row).count("<|endoftext|>")
    tokenizer, config = small(), DataConfig(special_in_content="text")
    encoder = Encoder(tokenizer, template_of(""), config, 1 << 16)
    path = tmp_path / "rows.jsonl"
    example = choose_format(str(path), DataConfig()).read_row(row, frozenset(), Findings())
    [document] = encoder.encode(example).documents
    ids = (document >> 1).tolist()
    text = tokenizer.decode(ids)
    special = [tokenizer.id_of(token) for token in tokenizer.special]
    written = sum(text.count(token) for token in tokenizer.special)
    assert sum(ids.count(token) for token in special) == written - marked  # those of the template, and no other
    assert "\ufdd0" not in text


def test_skipped_rows_with_special_tokens_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (QUESTION, {"prompt": "q", "completion": f"a{END}"})))
    config = DataConfig(path=(str(path),), on_bad_row="skip", cache_folder=str(tmp_path / "cache"))
    facts = prepare_data(config, str(ASSETS / "tokenizer"), "", 64).facts
    told = "\n".join(facts.summary)
    assert "rejected: 1 row" in told and "1 row with end tokens behind an answer, which were removed" in told


HERMES = {
    "conversations": [
        {"from": "system",
         "value": 'You call functions. <tools>[{"name": "f"}]</tools> Write <tool_call>\n{}\n</tool_call>'},
        {"from": "human", "value": "call it"},
        {"from": "gpt", "value": '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>'},
        {"from": "tool", "value": '<tool_response>\n{"a": 1}\n</tool_response>\n'},
        {"from": "gpt", "value": "It is 1."},
    ],
    "id": "x", "category": "IoT", "task": "t", "subcategory": "s",
}  # fmt: skip


def test_tags_of_calls_are_text_and_results_stand_in_one_pair_of_tags(tmp_path: Path) -> None:
    made = outcome(HERMES, tmp_path)
    assert made.learned == [
        '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call><|im_end|>It is 1.<|im_end|>'
    ]
    assert made.notes == {"tags"} and made.texts[0].count("<tool_response>") == 1
    assert '<tool_response>\n{"a": 1}\n</tool_response>' in made.texts[0]
    kept = outcome(HERMES, tmp_path, template=WRITES.replace("BODY", "{{ m.content }}"))
    assert not kept.notes  # this template writes no such tags


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2], [{"a": 1}], 3.5, True, None])
def test_the_result_of_a_tool_that_is_no_text_is_refused_and_its_json_text_taken(content: Any, tmp_path: Path) -> None:
    row = {"messages": [ASK, calling(call()), {"role": "tool", "content": content}, say("assistant", "a")]}
    assert "of a tool is" in (reason := outcome(row, tmp_path).reason) and "write its JSON text" in reason
    row["messages"][2] = {"role": "tool", "content": json.dumps(content)}
    assert not outcome(row, tmp_path).reason


# -- one turn in several messages --

JOINED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a text, then a call": (
        [say("assistant", "Let me look."), calling(call("f", x=1))],
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    ),
    "two calls": (
        [calling(call("f")), calling(call("g"), content=None)],
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    "thoughts alone, then a call": (
        [say("assistant", "", reasoning_content="why"), calling(call("f"))],
        '<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ),
    "a think block, then a call": (
        [say("assistant", "<think>\nwhy\n</think>\n"), calling(call("f"), content=" ")],
        '<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ),
    "thoughts in both": (
        [say("assistant", "<think>one</think>Look.", weight=1), calling(call("f"), content="<think>two</think>",
         weight=1)],
        '<think>\none\n\ntwo\n</think>\n\nLook.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ),
    "three messages": (
        [say("assistant", "Look."), calling(call("f"), reasoning="b"), calling(call("g"), thinking="c")],
        '<think>\nb\n\nc\n</think>\n\nLook.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", JOINED)
def test_a_text_and_its_calls_in_several_messages_are_one_turn(case: str, tmp_path: Path) -> None:
    turns, text = JOINED[case]
    made = outcome({"messages": [ASK, *turns]}, tmp_path)
    assert not made.reason and made.learned == [text.replace("<think>", "<think>") + END]
    assert made.texts[0].count("<|im_start|>assistant") == 1
    shared = {"conversations": [ASK, *turns]}
    assert outcome(shared, tmp_path).learned == made.learned


def test_parallel_calls_of_sharegpt_are_one_turn(tmp_path: Path) -> None:
    calls = [{"from": "function_call", "value": json.dumps({"name": name, "arguments": {}})} for name in "fg"]
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "Look."}, *calls]}
    made = outcome(row, tmp_path)
    assert made.texts[0].count("<|im_start|>assistant") == 1 and made.learned[0].count("<tool_call>") == 2


def test_messages_that_cannot_be_joined_are_refused_and_two_texts_counted(tmp_path: Path) -> None:
    for first, second in (({"weight": 0}, {}), ({}, {"weight": 0}), ({"name": "planner"}, {"name": "coder"})):
        row = {"messages": [ASK, say("assistant", "a", **first), calling(call(), **second)]}
        assert (
            "are two messages that cannot be joined; write them as one, or give both" in outcome(row, tmp_path).reason
        )
        row["messages"][2] = calling(call(), **first)
        assert "cannot be joined" not in outcome(row, tmp_path).reason
    prompt = {"prompt": [ASK, say("assistant", "a")], "completion": [calling(call()), TOLD, say("assistant", "b")]}
    assert "cannot be joined" in outcome(prompt, tmp_path).reason
    played = outcome({"messages": [ASK, say("assistant", "a"), say("assistant", "b")]}, tmp_path)
    assert played.notes == {"two_answers"} and played.learned[0].count(END) == 2
    assert outcome({"messages": [ASK, say("assistant", "a", weight=0), say("assistant", "b")]}, tmp_path).notes == set()


# -- messages as JSON text --

ROUND = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SHARED_ROUND = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
WORSE = [ROUND[0], {"role": "assistant", "content": "5"}]
AS_JSON: list[tuple[dict[str, Any], str]] = [
    ({"messages": ROUND}, ""),
    ({"conversations": SHARED_ROUND}, ""),
    ({"conversations": ROUND}, ""),
    ({"prompt": ROUND[:1], "completion": ROUND[1:]}, ""),
    ({"prompt": SHARED_ROUND[:1], "completion": SHARED_ROUND[1:]}, ""),
    ({"prompt": ROUND[:1], "chosen": ROUND[1:], "rejected": WORSE[1:]}, PAIRS),
    ({"chosen": ROUND, "rejected": WORSE}, PAIRS),
    ({"question": "2+2?", "chosen": ROUND[1], "rejected": WORSE[1]}, PAIRS),
]


@pytest.mark.parametrize(("row", "answers"), AS_JSON, ids=range(len(AS_JSON)))
def test_messages_as_json_text_are_read(row: dict[str, Any], answers: str, tmp_path: Path) -> None:
    plain = outcome(row, tmp_path, answers=answers)
    assert plain.learned[0] == f"4{END}" and not plain.notes
    for write in (json.dumps, lambda value: json.dumps(value, indent=1), lambda value: json.dumps(json.dumps(value))):
        packed = {key: value if isinstance(value, str) else write(value) for key, value in row.items()}
        made = outcome(packed, tmp_path, answers=answers)
        assert made[:3] == plain[:3] and made.notes == {"json_text"}
    printed = {key: str(value) for key, value in row.items()}
    if "question" not in row:
        reason = outcome(printed, tmp_path, answers=answers).reason
        assert "is Python's form of a list of messages, not JSON; write the list itself, or its JSON" in reason
    if isinstance(row.get("prompt"), str):  # a question about such a list
        assert outcome({**row, "prompt": f"{ROUND[:1]}\nWhy is this no JSON?"}, tmp_path, answers=answers).learned


def test_answers_that_are_json_by_nature_stay_text(tmp_path: Path) -> None:
    for answer in (
        '[{"role": "CEO", "name": "Ann"}]', '[{"role": "user", "name": "Ann"}]', "[]", "[1]", '{"role": "user"}',
        "[{'role': 'CEO', 'name': 'Ann'}]", '[{"from": "Rome", "value": 3}]', '[{"role": "user", "content": "a"}, 1]',
    ):  # fmt: skip
        for row, answers in (
            ({"prompt": "q", "completion": answer}, ""),
            ({"prompt": "q", "chosen": answer, "rejected": "none"}, PAIRS),
        ):
            made = outcome(row, tmp_path, answers=answers)
            assert made.learned[0] == answer + END and not made.notes
    text = json.dumps(ROUND)
    kept = outcome({"prompt": "q", "completion": text}, tmp_path, prompt_column="prompt", response_column="completion")
    assert kept.learned == [text + END] and kept.notes == {"left_text"}


# -- white space, think blocks, calls: as the template writes them, and as a server reads them --


def writes(body: str) -> str:
    """A template that writes an answer like this."""
    return WRITES.replace("BODY", body)


def test_white_space_that_a_template_trims_is_counted(tmp_path: Path) -> None:
    trims, keeps = writes("{{ m.content | trim }}"), writes("{{ m.content }}")
    for content in ("    return 1", "- a\n- b\n", "\n\na", "a "):
        row = {"messages": [ASK, say("assistant", content)]}
        assert outcome(row, tmp_path, template=trims).notes == {"trimmed"}
        assert outcome(row, tmp_path, template=keeps).notes == set()
    fenced = {"messages": [ASK, say("assistant", "```\n    return 1\n```")]}
    for row in (fenced, {"messages": [ASK, say("assistant", " a", weight=0), ASK, say("assistant", "b")]}):
        assert outcome(row, tmp_path, template=trims).notes == set()
    thinks = {"messages": [ASK, say("assistant", "<think>\nwhy\n</think>\n\nb")]}
    assert outcome(thinks, tmp_path).notes == set() and outcome(thinks, tmp_path, template=keeps).notes == set()


@pytest.mark.full
@pytest.mark.skipif(not REAL, reason="the real templates are not on this machine")
def test_an_indent_is_kept_by_qwen3_and_counted_with_qwen35(tmp_path: Path) -> None:
    row = {"messages": [ASK, say("assistant", "    return 1")]}
    assert outcome(row, tmp_path, REAL["qwen3"]).notes == set()
    for name in ("qwen3_5_nothink", "qwen3_6", "qwen3_8"):
        assert outcome(row, tmp_path, REAL[name]).notes == {"trimmed"}, name
        fenced = {"messages": [ASK, say("assistant", "```\n    return 1\n```")]}
        assert outcome(fenced, tmp_path, REAL[name]).notes == set()


THOUGHT = "{% if m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n' ~ (c.function | tojson) ~ '\\n</tool_call>' }}{% endfor %}"
)
XML = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' ~ k ~ '>\\n' ~ (v if v is string else v | tojson)"
    " ~ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"
)
THINKING = {"messages": [ASK, say("assistant", "4", reasoning_content="why")]}
TAG_INSIDE = {"messages": [ASK, say("assistant", "4", reasoning_content="a </think> b")]}
ONE, TWO = ({"messages": [ASK, calling(*calls)]} for calls in ([call(x=1)], [call(x=1), call("g")]))
A_CALL = {"messages": [ASK, calling(call(x=[1, None], y="a\nb", z=True, n={"k": "é"}), content="Look.\n")]}


@pytest.mark.parametrize(
    ("body", "row", "wrong"),
    [
        (THOUGHT + "{{ m.content }}", THINKING, ""),
        ("{{ '<think>\\n' ~ m.content ~ '\\n</think>\\n' }}", {"messages": [ASK, say("assistant", "4")]}, "reasoning"),
        ("{{ m.content ~ '<think>' ~ m.reasoning_content ~ '</think>' }}", THINKING, "order"),
        ("{{ '<think>' ~ m.content ~ '</think>' ~ m.reasoning_content }}", THINKING, "order"),
        ("{{ '<think>\\n\\n' ~ m.content }}", {"messages": [ASK, say("assistant", "4")]}, "reasoning"),
        (THOUGHT + "{{ m.content }}", TAG_INSIDE, "reasoning"),
        (CALLS, TWO, ""),
        ("{{ m.content }}" + CALLS, A_CALL, ""),
        ("{{ m.content }}" + XML, A_CALL, ""),
        (CALLS, {"messages": [ASK, calling(call(x="</tool_call>"))]}, "calls"),
        (XML, {"messages": [ASK, calling(call(x="a</parameter>b"))]}, "calls"),
        (XML, {"messages": [ASK, calling(call(x="</function>\n</tool_call>"))]}, "calls"),
        (CALLS.replace("c.function", "{'name': 'g', 'arguments': c.function.arguments}"), ONE, "calls"),
        (CALLS.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"), TWO, "calls"),
    ],
)  # fmt: skip
def test_a_learned_turn_is_read_as_a_server_reads_it(
    body: str, row: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    made = outcome(row, tmp_path, template=writes(body))
    if wrong:
        assert not made.learned
        words = {
            "order": "the template leaves out 'why'",
            "reasoning": "as its reasoning, which it is not",
            "calls": "a server would read other calls",
        }
        assert words[wrong] in made.reason, made.reason
    else:
        assert made.learned and not made.reason


def test_what_is_only_read_need_not_be_read_as_a_server_would(tmp_path: Path) -> None:
    turn = calling(call(x="</tool_call>"))
    row = {"messages": [ASK, turn, TOLD, say("assistant", "a")]}
    template = writes("{{ m.content }}" + CALLS)
    assert "a server would read other calls" in outcome(row, tmp_path, template=template).reason
    row["messages"][1] = {**turn, "weight": 0}
    assert outcome(row, tmp_path, template=template).learned == [f"a{END}"]


@pytest.mark.parametrize("content", ["<think>\nhm, 4", "<think>", "Sure.\n  <think>hm", "<think>a</think>b\n<think>c"])
def test_an_opened_think_block_is_a_bad_row(content: str, tmp_path: Path) -> None:
    row = {"messages": [ASK, say("assistant", content)]}
    assert "opens <think>, and no </think> follows; close it before the answer, or" in outcome(row, tmp_path).reason
    closed = {"messages": [ASK, say("assistant", "<think>\nhm\n</think>\n4")]}
    assert not outcome(closed, tmp_path).reason
    context = {"messages": [ASK, say("assistant", content, weight=0), ASK, say("assistant", "a")]}
    assert "opens <think>" not in outcome(context, tmp_path).reason
    mentioned = {"messages": [ASK, say("assistant", "The <think> tag opens a thought.")]}
    assert outcome(mentioned, tmp_path).learned == [f"The <think> tag opens a thought.{END}"]


def test_reasoning_of_the_last_turn_is_not_called_earlier(tmp_path: Path) -> None:
    drops = writes("{{ m.content }}")
    assert outcome(THINKING, tmp_path, template=drops).reason.startswith("reasoning of the last turn left out")
    rounds = {"messages": [*THINKING["messages"], ASK, say("assistant", "b")]}
    assert outcome(rounds, tmp_path).reason.startswith("earlier reasoning left out")


# -- the remedy of every refusal leads on --

ANSWER = say("assistant", "a")
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
ROWS = {  # a good row of each format
    "messages": {"messages": [ASK, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "output": "a"},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "columns": {"question": "q", "answer": "a"},
    "pairs": PAIR,
    "tokens": {"input_ids": [1, 2, 3]},
}
BY_COLUMNS = {"prompt_column": "question", "response_column": "answer"}
VALUES: dict[str, Any] = {
    "tools": [{"name": "f"}], "functions": [{"name": "f"}], "history": [["x", "y"]], "enable_thinking": True,
    "chat_template_kwargs": {"enable_thinking": False}, "label": True, "kto_tag": True,
    **{key: [0, 1, 1] for key in INSTEAD["tokens"]},
}  # fmt: skip
Fix = tuple[dict[str, Any], str, dict[str, Any]]  # the row, answers, options


def follow(remedy: str, key: str, row: dict[str, Any]) -> Fix:
    """What a user does who follows the remedy for a key of a row."""
    rest = {name: value for name, value in row.items() if name != key}
    if renamed := re.match(r"rename it to (\w+)", remedy):
        return rest | {renamed[1]: row[key]}, "", {}
    if "only text is read: leave out rows" in remedy or "put its text into the prompt" in remedy:
        return rest, "", {}
    if "write it as tool_calls" in remedy or "write the row as messages, beside which tools" in remedy:
        return {"messages": [ASK, calling(call())], "tools": [{"name": "f"}]}, "", {}
    if "set data.enable_thinking for all rows" in remedy:
        return row, "", {"enable_thinking": "true", "ignored_keys": (key,)}
    if "name it in data.system_column" in remedy:
        return row, "", {"system_column": key, **BY_COLUMNS}
    if "for pairs of answers set [objective]" in remedy:
        return row, PAIRS, {}
    if "name it instead in data.chosen_column" in remedy:
        wanted = {"chosen_column": "chosen_response", "rejected_column": "rejected_response"}
        return {"prompt": "q", "chosen_response": "a", "rejected_response": "b"}, PAIRS, wanted
    if "for answers with a label set" in remedy:
        return rest | {key: True}, LABELS, {}
    assert "write labels" in remedy or "write one document a row" in remedy, remedy
    return rest | ({"labels": [-100, 2, 3]} if "labels" in remedy else {}), "", {}


@pytest.mark.parametrize("name", ROWS)
def test_the_remedies_for_keys_of_a_row_lead_on(name: str, tmp_path: Path) -> None:
    kinds = ("tokens",) if name == "tokens" else ("conversation", "preference")
    refused = 0
    for key in {key: None for kind in kinds for key in INSTEAD[kind]}:
        if key in ROWS[name]:
            continue
        row = ROWS[name] | {key: VALUES.get(key, "a text")}
        answers = PAIRS if name == "pairs" else ""
        before = outcome(row, tmp_path, answers=answers)
        if not before.reason:  # the format reads it
            continue
        refused += 1
        assert "delete it" not in before.reason
        ignored = outcome(row, tmp_path, answers=answers, ignored_keys=(key,))
        assert ignored.learned, (key, ignored.reason)
        changed, answers, options = follow(before.reason.split("; ", 1)[1], key, row)
        try:
            after = outcome(changed, tmp_path, answers=answers or (PAIRS if "chosen" in changed else ""), **options)
        except UserError:  # another message, of the format
            assert "ignored_keys" in options or answers
        else:
            assert after.learned or after.reason != before.reason, (key, after.reason)
    assert refused >= 5


def without(key: str, row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def with_answer(**answer: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": "a", **answer}]}


def with_call(**function: Any) -> dict[str, Any]:
    return {"messages": [ASK, calling(function)]}


GOOD_CALL = with_call(name="f", arguments={})
CHAT = ROWS["messages"]
# Kind -> rows that are refused for it (with answers, options), words of the remedy, and what a user then does.
REMEDIES: dict[str, list[tuple[dict[str, Any], str, dict[str, Any], str, Fix]]] = {
    "unknown key": [
        (
            {"messages": [{**ASK, "function_call": {"name": "f", "arguments": {}}}, ANSWER]},
            "",
            {},
            "only an assistant's message may have it",
            (with_answer(function_call={"name": "f", "arguments": {}}), "", {}),
        ),
        (
            with_answer(thought="why"),
            "",
            {},
            "rename it to reasoning_content",
            (with_answer(reasoning_content="why"), "", {}),
        ),
        (
            with_answer(images=["x"]),
            "",
            {},
            "if it does not matter, name it in",
            (with_answer(images=["x"]), "", {"ignored_keys": ("images",)}),
        ),
        (with_answer(mood="x"), "", {}, "known are content", (with_answer(mood="x"), "", {"ignored_keys": ("mood",)})),
        (
            {"messages": [{**ASK, "reasoning_content": "x"}, ANSWER]},
            "",
            {},
            "only an assistant message may have it",
            (CHAT, "", {}),
        ),
        (
            {"messages": [{**ASK, "content": [{"type": "text", "text": "q", "cache": 1}]}, ANSWER]},
            "",
            {},
            "name it in data.ign",
            (
                {"messages": [{**ASK, "content": [{"type": "text", "text": "q", "cache": 1}]}, ANSWER]},
                "",
                {"ignored_keys": ("cache",)},
            ),
        ),
        (
            {"conversations": [{"from": "human", "value": "q", "role": "user"}, ANSWER]},
            "",
            {},
            "use from and value, or role and",
            (ROWS["sharegpt"], "", {}),
        ),
        (
            PAIR | {"chat_template_kwargs": {"a": 1}},
            PAIRS,
            {},
            "name the key in data.ignored_keys",
            (PAIR | {"chat_template_kwargs": {"a": 1}}, PAIRS, {"ignored_keys": ("chat_template_kwargs",)}),
        ),
    ],
    "preference": [
        (
            PAIR | {"label": True},
            PAIRS,
            {},
            "apo_zero_unpaired",
            ({"prompt": "q", "completion": "a", "label": True}, LABELS, {}),
        )
    ],
    "bad mask": [
        (CHAT | {"dont_train": [0, 1]}, "", {}, "rename it to loss_mask", (CHAT | {"loss_mask": [0, 1]}, "", {})),
        (
            CHAT | {"dont_train": [0, 1]},
            "",
            {},
            "name it in data.ignored_keys",
            (CHAT | {"dont_train": [0, 1]}, "", {"ignored_keys": ("dont_train",)}),
        ),
        (CHAT | {"mask": [0, 0.5]}, "", {}, "write such a list", (CHAT | {"mask": [0, 1]}, "", {})),
        (
            with_answer(train="no"),
            "",
            {},
            "write weight instead: 0 is not learned, 1 is",
            (with_answer(weight=1), "", {}),
        ),
        (
            ROWS["alpaca"] | {"weight": 1},
            "",
            {},
            "name it in data.ignored_keys",
            (ROWS["alpaca"] | {"weight": 1}, "", {"ignored_keys": ("weight",)}),
        ),
    ],
    "contradiction": [
        (with_answer(reasoning="x", thinking="y"), "", {}, "keep one", (with_answer(reasoning="x"), "", {})),
        (with_answer(train=True, weight=0), "", {}, "keep one of them", (with_answer(train=True), "", {})),
        (
            PAIR | {"score_chosen": 1, "score_rejected": 2},
            PAIRS,
            {},
            "swap answers and scores",
            (PAIR | {"score_chosen": 2, "score_rejected": 1}, PAIRS, {}),
        ),
        (
            PAIR | {"score_chosen": 1, "score_rejected": 2},
            PAIRS,
            {},
            "name both keys in data.ignored_keys",
            (
                PAIR | {"score_chosen": 1, "score_rejected": 2},
                PAIRS,
                {"ignored_keys": ("score_chosen", "score_rejected")},
            ),
        ),
    ],
    "part not read": [
        (
            ROWS["columns"] | {"rationale": "Because it is far."},
            "",
            {},
            "write the row as messages, with reasoning_content",
            (THINKING, "", {}),
        ),
        (
            ROWS["columns"] | {"context": "It is far."},
            "",
            {},
            "or name it in data.system_column",
            (ROWS["columns"] | {"context": "It is far."}, "", {"system_column": "context", **BY_COLUMNS}),
        ),
        (
            CHAT | {"reasoning": "It is far."},
            "",
            {},
            "put it into reasoning_content of its message",
            (THINKING, "", {}),
        ),
        ({"prompt": [ASK], "input": "x", "chosen": "a", "rejected": "b"}, PAIRS, {}, "put it there", (PAIR, PAIRS, {})),
    ],
    "two system messages": [
        (
            {"system": "x", "messages": [say("system", "y"), ASK, ANSWER]},
            "",
            {},
            "delete one",
            (CHAT | {"system": "x"}, "", {}),
        ),
    ],
    "missing key": [
        ({"messages": [{"content": "q"}, ANSWER]}, "", {}, "role is missing", (CHAT, "", {})),
        (
            without("chosen", PAIR) | {"better": "a"},
            PAIRS,
            {},
            "name its column in data.chosen_column",
            (without("chosen", PAIR) | {"better": "a"}, PAIRS, {"chosen_column": "better"}),
        ),
        (
            without("rejected", PAIR) | {"worse": "b"},
            PAIRS,
            {},
            "name its column in data.rejected_column",
            (without("rejected", PAIR) | {"worse": "b"}, PAIRS, {"rejected_column": "worse"}),
        ),
        (CHAT, "", {"ignored_keys": ("messages",)}, "which format messages reads", (CHAT, "", {})),
    ],
    "no label": [
        (
            ROWS["alpaca"] | {"good": True},
            LABELS,
            {},
            "name its column in data.label_column",
            (ROWS["alpaca"] | {"good": True}, LABELS, {"label_column": "good"}),
        ),
    ],
    "wrong type": [
        (
            ROWS["alpaca"] | {"label": 1},
            LABELS,
            {},
            "must be true or false",
            (ROWS["alpaca"] | {"label": True}, LABELS, {}),
        ),
        (
            {"messages": [ASK, calling(call()), say("tool", {"a": 1}), ANSWER]},
            "",
            {},
            "write its JSON text",
            ({"messages": [ASK, calling(call()), say("tool", '{"a": 1}'), ANSWER]}, "", {}),
        ),
        ({"messages": [{**ASK, "content": []}, ANSWER]}, "", {}, "expected a text or text parts", (CHAT, "", {})),
        (
            ROWS["alpaca"] | {"history": ["x"]},
            "",
            {},
            "must be a list of two texts",
            (ROWS["alpaca"] | {"history": [["x", "y"]]}, "", {}),
        ),
        ({"input_ids": [1, "2"]}, "", {}, "must be an integer", (ROWS["tokens"], "", {})),
    ],
    "other prompts": [
        (
            {"chosen": [ASK, ANSWER], "rejected": [say("user", "r"), ANSWER]},
            PAIRS,
            {},
            "begin both with the prompt",
            (PAIR, PAIRS, {}),
        )
    ],
    "no prompt": [(without("prompt", PAIR) | {"query": "q"}, PAIRS, {}, "expected one of", (PAIR, PAIRS, {}))],
    "two prompts": [(PAIR | {"question": "q"}, PAIRS, {}, "keep one", (PAIR, PAIRS, {}))],
    "no answer": [
        (
            {"chosen": [ASK, ANSWER], "rejected": [ASK, ASK]},
            PAIRS,
            {},
            "end it with the assistant's answer",
            (PAIR, PAIRS, {}),
        ),
    ],
    "two answers": [
        (
            {"messages": [ASK, ANSWER], "chosen": "a", "rejected": "b"},
            PAIRS,
            {},
            "end it with the user's",
            (PAIR, PAIRS, {}),
        )
    ],
    "nothing to learn": [
        (
            with_answer(content=" "),
            "",
            {},
            "delete the message, or give it weight 0",
            ({"messages": [ASK, say("assistant", " ", weight=0), ASK, ANSWER]}, "", {}),
        ),
        (with_answer(content="", reasoning_content="why"), "", {}, "add its answer", (THINKING, "", {})),
        (ROWS["alpaca"] | {"output": ""}, "", {}, "output is blank", (ROWS["alpaca"], "", {})),
    ],
    "bad weight": [(with_answer(weight=0.5), "", {}, "must be 0 (not learned) or 1", (with_answer(weight=1), "", {}))],
    "no messages": [({"messages": []}, "", {}, "is an empty list", (CHAT, "", {}))],
    "no assistant message": [({"messages": [ASK]}, "", {}, "add the answer", (CHAT, "", {}))],
    "wrong order": [
        (
            {"messages": [TOLD, ANSWER]},
            "",
            {},
            "such a message answers an assistant's call",
            ({"messages": [ASK, calling(call()), TOLD, ANSWER]}, "", {}),
        ),
        (
            {"messages": [ASK, say("assistant", "a", weight=0), calling(call())]},
            "",
            {},
            "give both the same weight",
            ({"messages": [ASK, say("assistant", "a"), calling(call())]}, "", {}),
        ),
    ],
    "unknown role": [
        ({"messages": [{"role": "human", "content": "q"}, ANSWER]}, "", {}, "rename it to user", (CHAT, "", {})),
        (
            {"conversations": [{"from": "me", "value": "q"}, ANSWER]},
            "",
            {},
            "known are human",
            (ROWS["sharegpt"], "", {}),
        ),
    ],
    "not a text part": [
        ({"messages": [{**ASK, "content": [{"type": "image"}]}, ANSWER]}, "", {}, "only text is read", (CHAT, "", {}))
    ],
    "odd thinking": [
        (
            with_answer(content="Close it by </think> then"),
            "",
            {},
            "else begin with <think>",
            (with_answer(content="<think>\nwhy\n</think>\nthen"), "", {}),
        ),
        (
            with_answer(content="<think>why"),
            "",
            {},
            "close it before the answer",
            (with_answer(content="<think>why</think>a"), "", {}),
        ),
        (
            with_answer(content="<think> opens it"),
            "",
            {},
            'if the tag is text, add "reasoning_content": ""',
            (with_answer(content="Write <think> first", reasoning_content=""), "", {}),
        ),
    ],
    "bad tool call": [
        (
            with_call(name="f", arguments={}, cost=1),
            "",
            {},
            "name it in data.ignored_keys",
            (with_call(name="f", arguments={}, cost=1), "", {"ignored_keys": ("cost",)}),
        ),
        (with_call(name="f", arguments="{"), "", {}, "arguments must hold JSON", (GOOD_CALL, "", {})),
        (with_call(name="", arguments={}), "", {}, "name must be a text", (GOOD_CALL, "", {})),
        (
            with_call(name="f", arguments=3),
            "",
            {},
            "arguments must be an object, or its JSON text",
            (with_call(name="f", arguments={}), "", {}),
        ),
    ],
    "bad tools": [
        (
            CHAT | {"tools": ["f"]},
            "",
            {},
            "must be an object with the name",
            (CHAT | {"tools": [{"name": "f"}]}, "", {}),
        )
    ],
    "special token": [
        (QUESTION, "", {}, "remove it", ({"prompt": "q", "completion": "a"}, "", {})),
        (QUESTION, "", {}, 'set data.special_in_content = "text"', (QUESTION, "", {"special_in_content": "text"})),
        (
            {"prompt": "<|im_start|>user\nq", "completion": "a"},
            "",
            {},
            "write the rendered dialogue as messages",
            (CHAT, "", {}),
        ),
    ],
    "other end token": [
        (
            {"prompt": "q", "completion": "a<end_of_turn>"},
            "",
            {},
            "remove it",
            ({"prompt": "q", "completion": "a"}, "", {}),
        ),
        (
            {"text": "a<end_of_turn>"},
            "",
            {},
            "end it with <|im_end|>, or write messages",
            ({"text": "a<|im_end|>"}, "", {}),
        ),
    ],
    "nothing is supervised": [(with_answer(weight=0), "", {}, "selects no turn", (CHAT, "", {}))],
    "not a conversation": [
        (
            {"text": "a", "label": True},
            LABELS,
            {},
            "not of texts or tokens",
            (ROWS["alpaca"] | {"label": True}, LABELS, {}),
        )
    ],
    "the chat template changes it": [
        (
            with_call(name="f", arguments={"x": "</tool_call>"}),
            "",
            {},
            "remove tags such as",
            (with_call(name="f", arguments={"x": "tag"}), "", {}),
        ),
        (with_call(name="f", arguments="{}"), "", {}, "make them an object", (GOOD_CALL, "", {})),
    ],
    "the chat template refuses it": [],  # its own words: test_chat_template
    "unknown token id": [
        ({"input_ids": [1, 10**6]}, "", {}, "was the file made with another tokenizer", (ROWS["tokens"], "", {}))
    ],
    "longer than seq_len": [],  # test_overlong_rows_are_dropped_cut_split_or_refused
    "bad token id": [({"input_ids": [1, -1]}, "", {}, "expected 0 to", (ROWS["tokens"], "", {}))],
    "bad labels": [
        (
            {"input_ids": [1, 2], "labels": [1, 3]},
            "",
            {},
            "expected the same or -100",
            ({"input_ids": [1, 2], "labels": [-100, 2]}, "", {}),
        )
    ],
    "bad attention mask": [
        (
            {"input_ids": [1, 2], "attention_mask": [1, 0]},
            "",
            {},
            "remove the padding",
            ({"input_ids": [1]} | {"input_ids": [1, 2]}, "", {}),
        )
    ],
    "not JSON": [
        (
            {"messages": str([ASK, ANSWER])},
            "",
            {},
            "its JSON text (json.dumps)",
            ({"messages": json.dumps([ASK, ANSWER])}, "", {}),
        )
    ],
}
# Kinds of lines that are no JSON rows: their remedies are in test_malformed.
OF_LINES = {
    *("not UTF-8", "not an object", "duplicate key", "not a number", "number too large", "lone surrogate"),
    "nested too deeply",
}


@pytest.mark.parametrize("kind", REMEDIES)
def test_the_remedies_of_a_bad_row_lead_on(kind: str, tmp_path: Path) -> None:
    for row, answers, options, words, (changed, after, more) in REMEDIES[kind]:
        before = outcome(row, tmp_path, answers=answers, **options)
        assert before.reason.startswith(kind) and words in before.reason, before.reason
        made = outcome(changed, tmp_path, answers=after, **more)
        assert made.learned, (before.reason, made.reason)


def test_every_kind_of_bad_row_has_a_remedy_that_was_followed() -> None:
    kinds = set()
    for name in ("answers", "blocks", "columns", "conversation", "encode", "formats", "strict_json"):
        tree = ast.parse((REPO / "titan_mi100" / "data" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "BadRecord":
                kinds |= {each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)}
    kinds = {kind for kind in kinds if isinstance(kind, str)} - {": "}
    assert kinds - OF_LINES <= REMEDIES.keys() and len(kinds) > 30


@pytest.mark.parametrize(
    ("row", "words", "answers", "options"),
    [
        (PAIR, 'set [objective] name = "preference"', PAIRS, {}),
        ({"prompt": "q", "chosen_response": "a", "rejected_response": "b"}, "pairs of answers", PAIRS,
         {"chosen_column": "chosen_response", "rejected_column": "rejected_response"}),
        ({"frage": "q", "antwort": "a"}, "prompt_column and response_column", "",
         {"prompt_column": "frage", "response_column": "antwort"}),
        ({"story": "Once."}, "or one in text_column", "", {"text_column": "story"}),
    ],
)  # fmt: skip
def test_the_remedies_for_unknown_columns_lead_on(
    row: dict[str, Any], words: str, answers: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        outcome(row, tmp_path)
    assert outcome(row, tmp_path, answers=answers, **options).learned


MOVED = {"chosen_column": "j", "rejected_column": "k"}
MOVED_PAIR, LABELLED = {"prompt": "q", "j": "a", "k": "b"}, {"question": "q", "answer": "a", "label": True}


@pytest.mark.parametrize(
    ("row", "answers", "options", "words", "after"),
    [  # settings of columns are there already: the remedy says what to do with them, not to set them
        (MOVED_PAIR | {"chosen": "c"}, PAIRS, MOVED, "if it is an answer, name it instead in data.chosen_column",
         (MOVED_PAIR | {"chosen": "c"}, PAIRS, MOVED | {"chosen_column": "chosen", "ignored_keys": ("j",)})),
        (MOVED_PAIR | {"chosen": "c"}, PAIRS, MOVED, "name it in data.ignored_keys",
         (MOVED_PAIR | {"chosen": "c"}, PAIRS, MOVED | {"ignored_keys": ("chosen",)})),
        (without("j", MOVED_PAIR) | {"l": "a"}, PAIRS, MOVED, "correct data.chosen_column",
         (without("j", MOVED_PAIR) | {"l": "a"}, PAIRS, MOVED | {"chosen_column": "l"})),
        (MOVED_PAIR | {"j": None}, PAIRS, MOVED, "chosen is null; delete the row", (MOVED_PAIR, PAIRS, MOVED)),
        (PAIR | {"rejected": None}, PAIRS, {}, "rejected is null; delete the row", (PAIR, PAIRS, {})),
        (without("label", LABELLED) | {"good": True}, LABELS, {"label_column": "god"}, "; correct data.label_column",
         (without("label", LABELLED) | {"good": True}, LABELS, {"label_column": "good"})),
        (LABELLED | {"label": None}, LABELS, {}, "label is null; delete the row", (LABELLED, LABELS, {})),
        (LABELLED | {"kto_tag": True}, LABELS, {"label_column": "label"}, "name it in data.ignored_keys",
         (LABELLED | {"kto_tag": True}, LABELS, {"label_column": "label", "ignored_keys": ("kto_tag",)})),
        (LABELLED | {"good": True}, LABELS, {"label_column": "good"}, "and name it in data.label_column",
         (LABELLED, LABELS, {"label_column": "label"})),
        (LABELLED | {"chosen": "c"}, LABELS, {}, 'for pairs of answers set [objective] name = "preference" and loss = ',
         (PAIR, PAIRS, {})),
    ],
)  # fmt: skip
def test_a_remedy_does_not_tell_what_is_done_already(
    row: dict[str, Any], answers: str, options: dict[str, Any], words: str, after: Fix, tmp_path: Path
) -> None:
    reason = outcome(row, tmp_path, answers=answers, **options).reason
    assert words in reason and "name its column" not in reason, reason
    changed, kind, more = after
    assert outcome(changed, tmp_path, answers=kind, **more).learned


def test_pairs_and_labels_in_columns_of_other_names(tmp_path: Path) -> None:
    columns = {"chosen_column": "response_j", "rejected_column": "response_k", "prompt_column": "qid"}
    row = {"qid": "q", "response_j": "a", "response_k": "b", "date": "x"}
    assert outcome(row, tmp_path, answers=PAIRS, **columns).learned == [f"a{END}", f"b{END}"]
    listed = [say("assistant", text, id=1, train=True) for text in "ab"]
    made = outcome({**row, "response_j": listed[:1], "response_k": listed[1:]}, tmp_path, answers=PAIRS, **columns)
    assert made.learned == [f"a{END}", f"b{END}"]
    reason = outcome(without("response_j", row), tmp_path, answers=PAIRS, **columns).reason
    assert "the row has no 'response_j', only date, qid, response_k" in reason
    odd = outcome(row | {"chosen": "c"}, tmp_path, answers=PAIRS, **columns).reason
    assert "chosen in a row of format pairs; if it is an answer, name it instead in data.chosen_column" in odd
    good = {"question": "q", "answer": "a", "is_good": False}
    assert outcome(good, tmp_path, answers=LABELS, label_column="is_good").learned == [f"a{END}"]
    for options, words in (
        ({"data.chosen_column": "x"}, 'chosen_column = "x" has no effect with an objective that reads no pairs'),
        ({"data.label_column": "x"}, 'label_column = "x" has no effect with an objective that reads no labels'),
        ({"data.prompt_column": "x", "data.chosen_column": "y", "objective.name": "preference"}, ""),
    ):
        path = tmp_path / "rows.jsonl"
        given = {"model.flavor": "debug", "model.tokenizer_path": str(ASSETS / "tokenizer"), "data.path": str(path)}
        words_of = [word for key, value in {**given, **options}.items() for word in (f"--{key}", value)]
        if words:
            with pytest.raises(UserError, match=re.escape(words)):
                load_config(words_of, 1)
        else:
            load_config(words_of, 1)
