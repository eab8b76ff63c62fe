"""Rows as OpenAI's and Anthropic's APIs have them, against the same rows converted by hand and rendered by
transformers; and the last round of a conversation.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS, SHARED_DATA, transformers_tokenizer
from test_chat_template import say
from test_prepare import load, supervised_texts, write
from test_what_rows_say import END, REAL, call, calling, outcome

from titan_mi100.checkpoint.resume import differing
from titan_mi100.text.load import load_tokenizer

Row = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"c": {"type": "string"}}}
FUNCTION = {"name": "w", "description": "the weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CLAUDE_TOOLS = [{"name": "w", "description": "the weather", "input_schema": SCHEMA, "cache_control": {"type": "x"}}]


def text(words: str, **more: Any) -> Row:
    return {"type": "text", "text": words, **more}


def use(name: str, identity: str = "t1", **arguments: Any) -> Row:
    return {"type": "tool_use", "id": identity, "name": name, "input": arguments}


def result(content: Any, identity: str = "t1", **more: Any) -> Row:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def user(*parts: Any, **more: Any) -> Row:
    return {"role": "user", "content": list(parts), **more}


def assistant(*parts: Any, **more: Any) -> Row:
    return {"role": "assistant", "content": list(parts), **more}


def system(words: str) -> Row:
    return say("system", words)


CALLED = '<tool_call>\n{"name": "w", "arguments": {"c": "P"}}\n</tool_call>'
ONCE = [say("user", "q"), calling(call("w", c="P")), say("tool", "r"), say("assistant", "d")]
AS_TEXT = '{"c": "P"}'
LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "w", "arguments": {"c": "P"}}}
# Name -> a row, what it means in messages of OpenAI's form, its tools, and the texts that are learned.
FORMS: dict[str, tuple[Row, list[Row], list[Row] | None, str]] = {
    "openai weight, parts, parallel_tool_calls": (
        {"messages": [user(text("q"), text("!")), say("assistant", "a", weight=0), say("user", "r"),
                      assistant(text("b"), weight=1)], "parallel_tool_calls": False},
        [say("user", "q!"), say("assistant", "a"), say("user", "r"), say("assistant", "b")], None, f"b{END}"),
    "openai functions and function_call": (
        {"messages": [ONCE[0], LEGACY | {"function_call": {"name": "w", "arguments": AS_TEXT}},
                      {"role": "function", "name": "w", "content": "r"}, ONCE[3]],
         "functions": [FUNCTION]},
        ONCE, TOOLS, f"{CALLED}{END}d{END}"),
    "anthropic": (
        {"system": [text("Be ", cache_control={"type": "ephemeral"}), text("brief.")], "tools": CLAUDE_TOOLS,
         "messages": [say("user", "q"), assistant(text("Look."), use("w", c="P")), user(result("r")),
                      {"id": "m", "type": "message", "stop_reason": "end_turn", **assistant(text("d"))}]},
        [system("Be brief."), ONCE[0], ONCE[1] | {"content": "Look."}, *ONCE[2:]], TOOLS,
        f"Look.\n{CALLED}{END}d{END}"),
    "anthropic, parallel calls and a text beside their results": (
        {"messages": [say("user", "q"), assistant(use("w", c="P"), use("v", "t2")),
                      user(result([text("x"), text("y")]), result([], "t2", is_error=False), text("Go "), text("on.")),
                      say("assistant", "d")]},
        [ONCE[0], calling(call("w", c="P"), call("v")), say("tool", "xy"), say("tool", ""), say("user", "Go on."),
         ONCE[3]], None,
        f'{CALLED}\n<tool_call>\n{{"name": "v", "arguments": {{}}}}\n</tool_call>{END}d{END}'),
    "anthropic, thinking": (
        {"messages": [say("user", "q"), assistant({"type": "thinking", "thinking": "hm", "signature": "Eq"},
                                                  use("w", c="P")),
                      user({"type": "tool_result", "tool_use_id": "t1"}),
                      assistant({"type": "thinking", "thinking": "so"}, text("d"))]},
        [ONCE[0], ONCE[1] | {"reasoning_content": "hm"}, say("tool", ""), ONCE[3] | {"reasoning_content": "so"}],
        None, f"<think>\nhm\n</think>\n\n{CALLED}{END}<think>\nso\n</think>\n\nd{END}"),
    "anthropic, a block a message": (
        {"messages": [say("user", "q"), assistant(text("Look.")), assistant(use("w", c="P")), user(result("r")),
                      say("assistant", "d")]},
        [ONCE[0], ONCE[1] | {"content": "Look."}, *ONCE[2:]], None, f"Look.\n{CALLED}{END}d{END}"),
}  # fmt: skip
needs_real = pytest.mark.skipif(not REAL, reason="the real templates are not on this machine")


@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_another_form_is_learned_as_the_converted_one(name: str, tmp_path: Path) -> None:
    row, messages, tools, learned = FORMS[name]
    row = json.loads(json.dumps(row).replace(json.dumps(AS_TEXT), AS_TEXT))  # this template would quote the text
    made = outcome(row, tmp_path)
    assert made.learned == [learned] and not made.reason and not made.notes
    meant = outcome({"messages": messages, **({"tools": tools} if tools else {})}, tmp_path)
    assert made.texts == meant.texts


def theirs(template: str, messages: list[Row], tools: list[Row] | None, **variables: Any) -> str:
    """The text that transformers renders."""
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    source = REAL[template].read_text()
    return render([messages], tools=tools, chat_template=source, **variables)[0][0]


@needs_real
@pytest.mark.parametrize("name", FORMS)
def test_real_templates_show_it_as_transformers_shows_the_converted_one(name: str, tmp_path: Path) -> None:
    row, messages, tools, _ = FORMS[name]
    thinks = "thinking" in name
    for template in REAL:
        if template == "qwen3_5_think" and not thinks:  # its prompts lead to no answer without reasoning
            continue
        given = {"enable_thinking": thinks} if template == "qwen3_8" else {}
        made = outcome(row, tmp_path, REAL[template].read_text())
        assert made.texts == [theirs(template, messages, tools, **given)], (template, made.reason)
    # Each learned turn is what is between the prompt and the next message, as transformers renders both.
    kind = "qwen3_instruct_2507"
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = []
    for i in indices[1:] if "weight" in name else indices:
        prompt, upto = (
            theirs(kind, messages[:i], tools, add_generation_prompt=True),
            theirs(kind, messages[: i + 1], tools),
        )
        turns.append(upto.removeprefix(prompt).removesuffix("\n"))
    assert outcome(row, tmp_path, REAL[kind].read_text()).learned == ["".join(turns)]


@needs_real
@pytest.mark.full
@pytest.mark.parametrize("name", FORMS)
def test_the_tokens_of_qwen3_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    row, messages, tools, learned = FORMS[name]
    made = outcome(row, tmp_path, SHARED_DATA / "templates" / "qwen3.jinja")
    tokenizer = transformers_tokenizer(SHARED_DATA / "qwen3_tokenizer")
    shown = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert made.texts == [shown] and made.learned == [learned]


CALLING = [say("user", "q"), assistant(use("w", c="P"))]
REFUSED: list[tuple[Row, str, dict[str, Any], Row | None]] = [  # row, words, options and row of its remedy
    ({"messages": [*CALLING, user(result("r", "t9")), say("assistant", "d")]},
     "message 3: tool_use_id 't9' is not the id of a tool_use before it that has no result yet; correct the id", {},
     {"messages": [*CALLING, user(result("r")), say("assistant", "d")]}),
    ({"messages": [*CALLING, user(result("r"), result("s")), say("assistant", "d")]}, "or delete the result", {},
     {"messages": [*CALLING, user(result("r")), say("assistant", "d")]}),
    ({"messages": [*CALLING, user(result("No such city.", is_error=True)), say("assistant", "d")]},
     "is_error is True, which no template shows; write it into the result's content, and name is_error in data.ignored",
     {"ignored_keys": ("is_error",)}, None),
    ({"messages": [*CALLING, user(text("first"), result("r")), say("assistant", "d")]},
     "content part 2, tool_result, stands behind text, but is shown before it; write tool_result, text in this order",
     {}, {"messages": [*CALLING, user(result("r"), text("first")), say("assistant", "d")]}),
    ({"messages": [say("user", "q"), assistant(use("w"), text("a"))]}, "write thinking, text, tool_use in this order",
     {}, {"messages": [say("user", "q"), assistant(text("a"), use("w"))]}),
    ({"messages": [user(text("q"), {"type": "image", "source": {}}), say("assistant", "d")]},
     "content part 2 has type 'image', not tool_result or text; only text is read, so leave out rows that need it",
     {}, {"messages": [user(text("q")), say("assistant", "d")]}),
    ({"messages": [*CALLING, user(result([{"type": "image"}])), say("assistant", "d")]}, "has type 'image', not text;",
     {}, {"messages": [*CALLING, user(result([text("r")])), say("assistant", "d")]}),
    ({"messages": [say("user", "q"), assistant({"type": "redacted_thinking", "data": "x"}, text("a"))]},
     "has type 'redacted_thinking'", {}, {"messages": [say("user", "q"), assistant(text("a"))]}),
    ({"messages": [say("user", "q"), assistant({"type": "thinking", "thinking": ""}, text("a"))]},
     "a thinking block is blank; delete it", {}, {"messages": [say("user", "q"), assistant(text("a"))]}),
    ({"messages": [user(use("w")), say("assistant", "d")]}, "has type 'tool_use', not tool_result or text", {},
     {"messages": [user(text("q")), say("assistant", "d")]}),
    ({"messages": [say("user", "q"), assistant({**use("w"), "caller": {"type": "direct"}})]},
     "caller in content part 1; known are id, input, name, type; if it does not matter, name it in data.ignored_keys",
     {"ignored_keys": ("caller",)}, None),
    ({"messages": [say("user", "q"), assistant({**use("w"), "input": [1]})]}, "arguments must be an object", {},
     {"messages": CALLING}),
    ({"messages": [say("user", "q"), assistant({"type": "tool_use", "name": "w", "input": {}})]},
     "id of a tool_use must be a text", {}, {"messages": CALLING}),
    ({"messages": [say("user", "q"), assistant(use("w"), tool_calls=[call("w")])]},
     "tool_calls beside another form of it in the same message; keep one", {}, {"messages": CALLING}),
    ({"messages": [say("user", "q"), LEGACY | {"tool_calls": [call("w")]}]}, "keep one", {},
     {"messages": [say("user", "q"), LEGACY]}),
    ({"messages": [say("user", "q"), LEGACY | {"function_call": {"name": "w", "arguments": "{"}}]},
     "arguments must hold JSON", {}, {"messages": [say("user", "q"), LEGACY]}),
    ({"messages": [say("user", "q"), say("assistant", "a")], "functions": [FUNCTION], "tools": TOOLS},
     "functions beside tools; keep one", {"ignored_keys": ("functions",)}, None),
    ({"messages": [say("user", "q"), say("assistant", None, refusal="I must not.")]}, "write it as content", {},
     {"messages": [say("user", "q"), say("assistant", "I must not.")]}),
    ({"messages": [say("user", "q"), say("assistant", "a")], "system": [text("s"), {"type": "image"}]},
     "system part 2 has type 'image'", {}, {"messages": [say("user", "q"), say("assistant", "a")], "system": "s"}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_the_form_cannot_say_is_refused_and_the_remedy_leads_on(number: int, tmp_path: Path) -> None:
    row, words, options, changed = REFUSED[number]
    before = outcome(row, tmp_path)
    assert not before.learned and words in before.reason, before.reason
    assert outcome(changed or row, tmp_path, **options).learned


def test_ignored_keys_leave_what_a_block_needs_and_are_counted(tmp_path: Path) -> None:
    row = FORMS["anthropic"][0] | {"thinking": {"type": "enabled", "budget_tokens": 64}, "input": "x", "id": 1}
    learned = FORMS["anthropic"][3]
    assert "put it into reasoning_content" in outcome(row, tmp_path).reason
    assert outcome(row, tmp_path, ignored_keys=("thinking", "input", "id", "name", "type", "text")).learned == [learned]
    summary = load(write(tmp_path / "a.jsonl", FORMS["anthropic"][0])).facts.summary
    assert (
        "  keys that were ignored: cache_control in messages: 1, id in messages: 1, stop_reason in messages: 1"
        in summary
    )
    path = write(tmp_path / "b.jsonl", FORMS["openai weight, parts, parallel_tool_calls"][0])
    assert "  keys that were ignored: parallel_tool_calls: 1" in load(path).facts.summary


def test_masks_and_weights_hold_for_all_messages_that_one_becomes(tmp_path: Path) -> None:
    blocks = [
        say("user", "q"),
        assistant(use("w"), weight=0),
        user(result("r"), text("s"), weight=1),
        say("assistant", "d"),
    ]
    assert outcome({"messages": blocks}, tmp_path).learned == [f"d{END}"]
    assert outcome({"messages": blocks}, tmp_path, loss="weight").learned == [f"rs{END}"]
    masked = {"messages": FORMS["anthropic"][0]["messages"], "loss_mask": [0, 0, 0, 1]}
    assert outcome(masked, tmp_path).learned == [f"d{END}"]


def test_pairs_may_have_blocks_and_nulls_of_parquet_are_left_out_of_calls(tmp_path: Path) -> None:
    pair = {"prompt": [*CALLING, user(result("r"))], "chosen": assistant(text("a")), "rejected": say("assistant", "b")}
    assert outcome(pair, tmp_path, answers="pairs").learned == [f"a{END}", f"b{END}"]
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table, tokenizer = tmp_path / "a.parquet", load_tokenizer(ASSETS / "tokenizer")
    rows = [
        {"messages": [*CALLING, assistant(use("w", "t2", d=1))]},
        {"messages": [say("user", "x"), assistant(text("y"))]},
    ]
    rows = [{"messages": [m | {"content": [text(m["content"])]} if isinstance(m["content"], str) else m
                          for m in row["messages"]]} for row in rows]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), table)
    data = load(table)
    learned = "".join(supervised_texts(data.train, tokenizer))
    assert '{"c": "P"}' in learned and '{"d": 1}' in learned and "null" not in learned
    assert any("2 tool calls have nulls in their arguments (2 left out)" in line for line in data.facts.warnings)


# -- the last round --

FIRST = [say("user", "q"), say("assistant", "a", reasoning_content="hm"), say("user", "r")]
AGENT = [*FIRST, *ONCE[1:]]
ROUNDS: dict[str, tuple[list[Row], dict[str, Any], list[str]]] = {
    "calls and their results are of one round": (AGENT, {}, [f"{CALLED}{END}d{END}"]),
    "blocks, too": ([*FIRST, CALLING[1], user(result("r")), say("assistant", "d")], {}, [f"{CALLED}{END}d{END}"]),
    "a text beside results begins a round": (
        [*FIRST, CALLING[1], user(result("r"), text("s")), say("assistant", "d")], {}, [f"d{END}"]),
    "unrolled": (AGENT, {"earlier_thinking": "unroll"}, [f"{CALLED}{END}d{END}"]),
    "weight 0": ([*AGENT[:-1], say("assistant", "d", weight=0)], {}, [f"{CALLED}{END}"]),
    "no user": ([say("assistant", "a"), say("tool", "t"), say("assistant", "b")], {}, [f"a{END}b{END}"]),
    "a user at the end": ([*AGENT, say("user", "thanks")], {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDS)
def test_the_last_round_is_learned(name: str, tmp_path: Path) -> None:
    messages, options, learned = ROUNDS[name]
    made = outcome({"messages": messages}, tmp_path, loss="last_round", **options)
    assert made.learned == learned
    if not learned:
        assert made.reason.endswith("data.loss = 'last_round' selects no turn, or the selected turns have no text")


@needs_real
def test_the_last_round_is_what_transformers_renders_behind_the_last_users_prompt(tmp_path: Path) -> None:
    plain = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in AGENT]
    for kind in ("qwen3", "qwen3_instruct_2507"):
        shown, learned = theirs(kind, plain, None), ""
        for i in (3, 5):
            prompt = theirs(kind, plain[:i], None, add_generation_prompt=True, enable_thinking=i < 5 or kind != "qwen3")
            if kind == "qwen3" and i == 5:
                prompt = prompt.removesuffix("<think>\n\n</think>\n\n")
                prompt += "<think>\n\n</think>\n\n"  # the last turn's, which is not learned
            assert shown.startswith(prompt)
            learned += shown.removeprefix(prompt).partition(END)[0] + END
        made = outcome({"messages": plain}, tmp_path, REAL[kind].read_text(), loss="last_round")
        assert made.texts == [shown] and made.learned == [learned]


def test_the_last_round_of_preferences_and_of_columns(tmp_path: Path) -> None:
    pair = {"prompt": FIRST, "chosen": [calling(call("w", c="P")), *ONCE[2:]], "rejected": say("assistant", "b")}
    assert outcome(pair, tmp_path, answers="pairs", loss="last_round").learned == [f"{CALLED}{END}d{END}", f"b{END}"]
    labelled = {"messages": AGENT, "label": True}
    assert outcome(labelled, tmp_path, answers="labels", loss="last_round").learned == [f"{CALLED}{END}d{END}"]
    alpaca = {"instruction": "q", "output": "b", "history": [["x", "y"]]}
    assert outcome(alpaca, tmp_path, loss="last_round").learned == [f"b{END}"]


def test_the_last_round_is_packed_validated_and_part_of_the_datas_identity(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": AGENT}, {"messages": ONCE})
    plain, cut = (load(path, loss=loss, validation_path=(str(path),)) for loss in ("assistant", "last_round"))
    texts = supervised_texts(cut.train, load_tokenizer(ASSETS / "tokenizer"))
    assert texts == [f"{CALLED}{END}d{END}"] * 2
    for name in ("train", "validation"):
        assert 0 < cut.facts.sets[name].supervised < plain.facts.sets[name].supervised
    assert cut.folder != plain.folder and cut.facts.plan != plain.facts.plan
    assert [*differing(plain.facts.made_of, cut.facts.made_of).values()] == ["loss (assistant, now last_round)"]
    assert json.loads(json.dumps(cut.facts.made_of))["loss"] == "last_round"
