"""What a row may look like: every format's good rows come out as the same kind of Example, under the right format."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.columns import MANY_WORDS, Findings
from titan_mi100.data.formats import FORMATS, BadRecord, Example, Format, choose_format, example_hash, parse
from titan_mi100.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ARGUMENTS = '{"b": 2,  "a": 2.50, "n": null}'  # not as json.dumps would write it
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
BARE_CALL = {"name": "add", "arguments": {"b": 2, "a": None}}


def read(name: str, row: dict[str, Any], **columns: str) -> Example:
    form = choose("", name, **columns)
    return form.read_row(parse(json.dumps(row).encode()), frozenset(), Findings())._replace(notes=())


def choose(
    path: str | Path, name: str, prompt: str = "", response: str = "", system: str = "", text: str = "text"
) -> Format:
    columns = {"prompt_column": prompt, "response_column": response, "system_column": system, "text_column": text}
    return choose_format(str(path), DataConfig(format=name, **columns))


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


UNCHANGED = [
    [ASSISTANT],
    [SYSTEM, ASSISTANT, ASSISTANT, USER],
    [USER, SYSTEM, ASSISTANT],
    [{**USER, "content": ""}, ASSISTANT],
    [USER, {**ASSISTANT, "reasoning": "a", "reasoning_content": "a"}],
    [USER, {**ASSISTANT, "content": " ", "weight": 0}, USER, ASSISTANT],
]
# A template may write the whole call: as transformers gives it.
WHOLE_CALL = {"id": None, "function": {**BARE_CALL, "strict": None}}
ANSWERED = {"role": "tool", "content": "4", "tool_call_id": "c1"}
PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
CHANGED: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{**USER, "content": PARTS}, ASSISTANT], [USER, ASSISTANT]),
    (  # parquet fills a struct's missing keys with null
        [{**USER, "name": None, "tool_calls": None, "weight": None}, {**ASSISTANT, "tool_calls": []}],
        [USER, ASSISTANT],
    ),
    (
        [USER, {**calling(CALL), "content": None}, {"role": "tool", "content": ""}],
        [USER, calling(CALL), {"role": "tool", "content": ""}],
    ),
    ([{"role": "assistant", "tool_calls": [WHOLE_CALL]}], [calling(WHOLE_CALL)]),
    ([USER, {"role": "assistant", "tool_calls": [BARE_CALL]}], [USER, calling(BARE_CALL)]),
    *(
        ([USER, {**ASSISTANT, key: "think"}], [USER, {**ASSISTANT, "reasoning_content": "think", key: "think"}])
        for key in ("reasoning_content", "reasoning", "thinking")
    ),
    (
        [{**USER, "weight": 1, "reasoning_content": ""}, {**ASSISTANT, "weight": 0.0}],
        [{**USER, "weight": 1}, {**ASSISTANT, "weight": 0}],
    ),
    ([{**USER, "name": "Ann", "id": "m1"}, ASSISTANT, ANSWERED], [{**USER, "name": "Ann"}, ASSISTANT, ANSWERED]),
]


def by(speaker: str, value: str, **beside: Any) -> dict[str, Any]:
    """A message of ShareGPT."""
    return {"from": speaker, "value": value, **beside}


TURN = {"instruction": "2+2?", "output": "4"}
BLANK, SAID = {"role": "assistant", "content": ""}, [ASSISTANT, USER, ASSISTANT]
GOOD: list[tuple[str, dict[str, Any], Example]] = [
    ("messages", {"messages": [USER, ASSISTANT], "id": 7, "source": None}, Example([USER, ASSISTANT])),
    *(("messages", {"messages": messages}, Example(messages)) for messages in UNCHANGED),
    *(("messages", {"messages": given}, Example(expected)) for given, expected in CHANGED),
    *(
        ("messages", {"messages": [USER, ASSISTANT], "tools": given}, Example([USER, ASSISTANT], tools))
        for given, tools in (
            *(([TOOL], [TOOL]), (json.dumps([TOOL]), [TOOL]), ([{"name": "add"}], [{"name": "add"}])),
            *((none, None) for none in (None, [], "", "[]", "null")),
        )
    ),
    *(
        ("sharegpt", {"conversations": [by(a, "2+2?"), by(b, "4")]}, Example([USER, ASSISTANT]))
        for a, b in (("human", "gpt"), ("user", "assistant"), ("human", "chatgpt"), ("user", "bard"), ("human", "bing"))
    ),
    ("sharegpt", {"conversations": [USER, ASSISTANT]}, Example([USER, ASSISTANT])),
    (
        "sharegpt",
        {"system": "be kind", "conversations": [by("human", "2+2?", weight=0), by("gpt", "4", weight=1)]},
        Example([SYSTEM, {**USER, "weight": 0}, {**ASSISTANT, "weight": 1}]),
    ),
    (
        "sharegpt",
        {"system": " ", "conversations": [by("system", "be kind"), by("gpt", "4")]},
        Example([SYSTEM, ASSISTANT]),
    ),
    *(
        (
            "sharegpt",
            {
                "conversations": [USER, by("function_call", json.dumps(value)), by(answer, "4")],
                "tools": json.dumps([TOOL]),
            },
            Example([USER, calling(*calls), {"role": "tool", "content": "4"}], [TOOL]),
        )
        for value, calls, answer in (
            (BARE_CALL, [BARE_CALL], "tool"),
            ([BARE_CALL], [BARE_CALL], "observation"),
            ([BARE_CALL, BARE_CALL], [BARE_CALL, BARE_CALL], "function_response"),
        )
    ),
    ("alpaca", TURN, Example([USER, ASSISTANT])),
    ("alpaca", {**TURN, "input": " ", "system": "", "history": None}, Example([USER, ASSISTANT])),
    (
        "alpaca",
        {"instruction": "2+", "output": "4", "input": "2?"},
        Example([{**USER, "content": "2+\n2?"}, ASSISTANT]),
    ),
    (
        "alpaca",
        {**TURN, "system": "be kind", "history": [["a", "b"], ["c", "d"]]},
        Example([SYSTEM, *({**(USER, ASSISTANT)[i % 2], "content": "abcd"[i]} for i in range(4)), USER, ASSISTANT]),
    ),
    ("prompt_completion", {"prompt": "2+2?", "completion": "4"}, Example([USER, ASSISTANT])),
    ("prompt_completion", {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, Example([SYSTEM, USER, ASSISTANT])),
    (
        "prompt_completion",
        {"prompt": [USER, {**ASSISTANT, "weight": 1}, USER, BLANK], "completion": SAID, "tools": [TOOL]},
        Example([USER, {**ASSISTANT, "weight": 0}, USER, {**BLANK, "weight": 0}, *SAID], [TOOL]),
    ),
    ("text", {"text": " two \n", "url": "x"}, Example(text=" two \n")),
    ("tokens", {"input_ids": [0, 151935, 2**31 - 1]}, Example(input_ids=[0, 151935, 2**31 - 1])),
    ("tokens", {"input_ids": [5]}, Example(input_ids=[5])),
    ("tokens", {"input_ids": [5, 6], "labels": None, "attention_mask": [1, 1]}, Example(input_ids=[5, 6])),
    (
        "tokens",
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
        Example(input_ids=[5, 6, 7], labels=[-100, 6, -100]),
    ),
    ("tokens", {"input_ids": [5, 6], "labels": [5, 6]}, Example(input_ids=[5, 6])),  # the same as no labels
]


@pytest.mark.parametrize(("name", "row", "expected"), GOOD, ids=range(len(GOOD)))
def test_a_good_row_is_read(name: str, row: dict[str, Any], expected: Example) -> None:
    assert read(name, row) == expected


def test_columns_are_read_with_their_system_message() -> None:
    row = {"frage": "2+2?", "antwort": "4", "rolle": "be kind"}
    assert read("columns", row, prompt="frage", response="antwort") == Example([USER, ASSISTANT])
    assert read("auto", row, prompt="frage", response="antwort", system="rolle") == Example([SYSTEM, USER, ASSISTANT])
    for none in (None, "", " \n"):
        row["rolle"] = none  # type: ignore[assignment]
        assert read("columns", row, prompt="frage", response="antwort", system="rolle") == Example([USER, ASSISTANT])
    with pytest.raises(BadRecord, match="missing key: the row has no 'role', only antwort, frage, rolle"):
        read("columns", row, prompt="frage", response="antwort", system="role")
    assert read("text", {"body": "a"}, text="body") == Example(text="a")


def test_what_a_format_reads_is_not_ignored_and_what_changes_tokens_is_refused() -> None:
    for name, row in (("messages", {"messages": [USER, ASSISTANT]}), ("text", {"text": "a"})):
        with pytest.raises(BadRecord, match=f"data.ignored_keys names {next(iter(row))}, which format {name} reads"):
            choose("", name).read_row(row, frozenset(row), Findings())
    for key in ("cu_seqlens", "document_ids", "seq_idx"):
        with pytest.raises(BadRecord, match=f"unknown key: {key} in a row of format tokens"):
            read("tokens", {"input_ids": [1, 2, 3], key: [0, 1, 1]})
    with pytest.raises(BadRecord, match="the row has no 'messages', only 'messages '"):
        read("messages", {"messages ": [USER, ASSISTANT]})


def test_arguments_of_a_tool_call_keep_their_bytes() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, BARE_CALL]}]
    [first, second] = read("messages", {"messages": messages}).messages[1]["tool_calls"]  # type: ignore[index]
    assert first["function"]["arguments"] == ARGUMENTS
    assert list(second["arguments"].items()) == [("b", 2), ("a", None)]


def test_reading_leaves_the_row_as_it_was() -> None:
    for name, row, _ in GOOD:
        before = json.dumps(row)
        choose("", name).read_row(row, frozenset({"tool_call_id"}), Findings())
        assert json.dumps(row) == before


AUTO: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [USER, ASSISTANT], "prompt": "a", "prompt_id": "b"}, "messages", "OpenAI"),
    ({"conversations": [USER, ASSISTANT], "system": "a"}, "sharegpt", "conversations"),
    ({"instruction": "a", "input": "", "output": "b", "text": "a b"}, "alpaca", "instruction and output"),
    ({"prompt": "a", "completion": "b"}, "prompt_completion", "prompt and completion"),
    ({"question": "a", "answer": "b"}, "columns", "question and answer"),
    ({"prompt": "a", "response": "b"}, "columns", "prompt and response"),
    ({"input": "a", "output": "b"}, "columns", "input and output"),
    ({"instruction": None, "input": "a", "output": "b"}, "columns", "input and output"),
    ({"input": "a", "output": "b", "prompt": "a", "completion": "b"}, "prompt_completion", "prompt and completion"),
    ({"text": "a", "meta": {}}, "text", "column text"),
    ({"input_ids": [1], "labels": [1]}, "tokens", "input_ids"),
    ({"messages": None, "conversations": None, "text": "a"}, "text", "column text"),  # as parquet has it
]


@pytest.mark.parametrize(("row", "name", "description"), AUTO, ids=range(len(AUTO)))
def test_auto_goes_by_the_first_row_that_can_be_read(
    row: dict[str, Any], name: str, description: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    other = json.dumps({"messages" if name != "messages" else "text": "x"})
    bad = '\n{"messages": \n[]\n{"messages": 1, "messages": 2}\n'
    path.write_text(f"{bad}{json.dumps(row)}\n{other}\n")
    form = choose(path, "auto")
    assert (form.name, form.description) == (name, description)
    path.write_text(json.dumps([row, json.loads(other)]))
    assert choose(path, "auto").name == name
    assert choose(path, "columns").name == "columns" if name == "columns" else True


def test_named_columns_and_formats_win_over_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"  # not even looked at
    assert choose(path, "auto", prompt="q", response="a").description == "q and a"
    assert choose(path, "columns", "q", "a", "s").description == "q and a, system message from s"
    assert choose(path, "auto", text="body").description == "column body"
    assert choose(path, "text", text="").description == "column text"
    for name in set(FORMATS) - {"columns"}:
        assert choose(path, name).name == name


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"frage": "a", "antwort": "b"}\n')
    for name in ("auto", "columns"):
        with pytest.raises(UserError, match=r"rows.jsonl: rows have the keys antwort, frage; expected messages, conv"):
            choose(path, name)
    path.write_text('\n{"a": 1\n{"a": }\n')
    with pytest.raises(UserError) as caught:
        choose(path, "auto")
    assert str(caught.value).splitlines() == [
        f"{path}:2: not JSON: Expecting ',' delimiter (column 8); no row of the file can be read",
    ]


def shuffled(value: Any, chance: random.Random) -> Any:
    """The same JSON value with the keys of all objects in another order."""
    if isinstance(value, dict):
        keys = chance.sample(list(value), len(value))
        return {key: shuffled(value[key], chance) for key in keys}
    return [shuffled(item, chance) for item in value] if isinstance(value, list) else value


def test_equal_content_and_only_that_has_an_equal_hash() -> None:
    chance = random.Random(0)
    hashes: dict[bytes, str] = {}
    for name, row, expected in GOOD:
        found = example_hash(read(name, row))
        assert len(found) == 16 and found == example_hash(expected)
        canonical = json.dumps(expected, sort_keys=True)
        assert hashes.setdefault(found, canonical) == canonical
        for _ in range(5):
            assert example_hash(read(name, shuffled(row, chance))) == found
    assert len(hashes) == len({json.dumps(expected, sort_keys=True) for *_, expected in GOOD}) > 20
    different = [
        *(Example(text=text) for text in ("a", "a ", "[1]")),
        *(Example(input_ids=ids) for ids in ([1], [1, 2], [12])),
        Example(input_ids=[1, 2], labels=[-100, 2]),
        Example([ASSISTANT, USER]),
        *(Example([USER, ASSISTANT], tools) for tools in (None, [], [TOOL])),
        *(Example([USER, {**ASSISTANT, "weight": weight}]) for weight in (0, 1)),
        Example([USER, calling(CALL)]),
        *(Example([USER, calling({**BARE_CALL, "arguments": {"b": b, "a": None}})]) for b in (2, 2.0, True)),
        *(Example([USER, {**ASSISTANT, "content": e}]) for e in ("\u00e9", "e\u0301", "\\u00e9")),
    ]
    assert len({example_hash(example) for example in different}) == len(different)


def test_what_is_unusual_but_right_json_is_read() -> None:
    deep = b'{"b": [], "a": ' + b"[" * 99 + b"]" * 99 + b"}"
    assert parse(deep)["a"]
    assert parse(b'{"a": "' + b"[{" * 5000 + b'"}') == {"a": "[{" * 5000}  # brackets in a text are no levels
    assert parse(b'{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}
    assert parse(b'{"a": ' + b"7" * 4300 + b"}") == {"a": int("7" * 4300)}
    assert parse(b'{"a": "' + b"7" * 5000 + b'"}') == {"a": "7" * 5000}  # digits in a text are no integer
    assert parse(b'\t{"a": [1e300, -0.0, 1E-999, {"a": {"a": 1}}], "\\u0000": "\\u0000\xef\xbb\xbf"} ') == {
        "a": [1e300, -0.0, 0.0, {"a": {"a": 1}}],
        "\0": "\0\ufeff",
    }


MASKS: list[tuple[dict[str, Any], list[int] | str]] = [
    *(({key: [0, 1, 0, 0]}, [0, 1, 0, 0]) for key in ("loss_mask", "mask", "weights", "train_on_turn")),
    *(({key: [False, True, True, False]}, [0, 1, 1, 0]) for key in ("trainTurns", "is_trainable", "LOSS_MASK")),
    ({"turn_weights": [0.0, 1.0, 0, 1]}, [0, 1, 0, 1]),
    *(({key: [False, True, False, False]}, [0, 1, 0, 0]) for key in ("supervise", "is_target", "training")),
    ({"target": "a text", "skip": 3, "is_good": [1, 0, 1, 0]}, []),
    ({"mask": [0, 1, 0, 1], "weights": [0, 1, 0, 1]}, [0, 1, 0, 1]),
    ({"loss_mask": [], "weights": None}, []),
    ({"attention_mask": [1, 1, 0], "labels": [1, 0]}, []),
    ({"labels": [-100, -100, 7]}, "bad mask: labels in a row of format "),
    (
        {"mask": [0, 1, 0, 0], "weights": [0, 1, 0, 1]},
        "contradiction: weights differs from the weight of a message; keep one",
    ),
    *(
        ({"loss_mask": value}, "bad mask: loss_mask in a row of format ")
        for value in ([0, 1], [0, 1, 0, 1, 0], [0, 0.5, 0, 1], [0, 2, 0, 1], [0, None, 0, 1], ["0", "1"] * 2, "0101")
    ),
    *(({key: 1}, f"bad mask: {key} in") for key in ("weight", "sample_weight", "train", "learnable")),
    *(({key: [0, 1, 0, 1]}, f"bad mask: {key}") for key in ("mask_history", "train_on_inputs", "unmasked", "skip")),
]


@pytest.mark.parametrize(("keys", "expected"), MASKS, ids=range(len(MASKS)))
def test_a_mask_beside_the_messages_is_followed_or_the_row_is_refused(
    keys: dict[str, Any], expected: list[int] | str
) -> None:
    messages = [USER, ASSISTANT, USER, ASSISTANT]
    shared = [by(m["role"], m["content"]) for m in messages]
    for name, row in (("messages", {"messages": messages}), ("sharegpt", {"conversations": shared})):
        if isinstance(expected, str):
            with pytest.raises(BadRecord, match=re.escape(expected)):
                read(name, row | keys)
        else:
            weights = [message.get("weight") for message in read(name, row | keys).messages or ()]
            assert weights == (expected or [None] * 4)
        ignored = choose("", name).read_row(row | keys, frozenset(keys), Findings())._replace(notes=())
        assert ignored == read(name, row)
    for name, other in (("alpaca", {"instruction": "a", "output": "b"}), ("text", {"text": "a"})):
        if expected:
            with pytest.raises(BadRecord, match=f"bad mask: .* in a row of format {name}: no mask is followed; leave"):
                read(name, other | keys)


# Names under which 1 may mean that a message is not learned, or something else.
REFUSED_MASKS = [
    "dont_train", "do_not_train", "no_train", "notrain", "skip_train", "skip_training", "not_trained", "untrained",
    "untrainable", "is_untrainable", "exclude_from_training", "exclude_from_loss", "excluded_from_loss", "ignore_loss",
    "ignore_in_loss", "no_loss", "noLoss", "lossless", "loss_ignore_mask", "ignore_mask", "masked", "is_masked",
    "mask_out", "masking", "unmask", "unmasked", "mask_history", "mask_prompt", "mask_user", "mask_input",
    "padding_mask", "user_mask", "prompt_mask", "train_on_inputs", "train_on_prompt", "frozen", "freeze", "unfrozen",
    "freeze_turn", "unsupervised", "is_unsupervised", "unlearned", "unlearn", "dont_learn", "not_learned",
    "do_not_learn", "unweighted", "weighting", "negative_weight", "inverse_weight", "loss_off", "train_off",
    "training_disabled", "skip", "skipped", "ignore", "ignored", "excluded", "exclude", "omit", "discard", "drop",
    "dropped", "no_gradient", "no_backprop", "stop_gradient", "trainer_skip", "pretrain", "pretraining", "retrain",
    "learning",
]  # fmt: skip


def test_a_mask_of_another_name_is_refused_with_both_remedies() -> None:
    messages = [USER, {**ASSISTANT, "content": "bad"}, USER, ASSISTANT]
    assert len(REFUSED_MASKS) > 60
    for key in REFUSED_MASKS:
        row = {"messages": messages, key: [0, 1, 0, 0]}
        with pytest.raises(BadRecord, match="bad mask") as refused:
            read("messages", row)
        for remedy in ("if 1 is learned there, rename it to loss_mask", "name it in data.ignored_keys"):
            assert remedy in str(refused.value), key
        weights = [
            m.get("weight") for m in read("messages", {"messages": messages, "loss_mask": row[key]}).messages or ()
        ]
        assert weights == [0, 1, 0, 0]
        choose("", "messages").read_row(row, frozenset({key}), Findings())
        inside = {"messages": [USER, {**ASSISTANT, key: True}, USER, ASSISTANT]}
        if key in ("masked", "is_masked"):
            assert [m.get("weight") for m in read("messages", inside).messages or ()] == [None, 0, None, None]
        else:
            with pytest.raises(BadRecord, match=r"message 2: |in a message") as refused:
                read("messages", inside)
            assert "delete" not in str(refused.value)
    for key in ("trainer_version", "num_losses", "lossless_score"):  # counts and versions are no marks
        read("messages", {"messages": messages, key: 3})
    for key in ("untrainable", "learning_rate", "frozen"):  # for the whole row, whatever the number
        for number in (0, 1, True, 0.5):
            with pytest.raises(BadRecord, match=f"bad mask: {key} in a row of format messages: it may say"):
                read("messages", {"messages": messages, key: number})
    findings = Findings()
    others = {"toxic": [0, 1, 0, 0], "is_reasoning_complete": [True, False], "constraints": [1], "glossary": [0, 1]}
    choose("", "messages").read_row({"messages": messages, **others}, frozenset(), findings)
    assert {*findings.ignored} == {f"{key} (flags)" for key in others} and not findings.followed


@pytest.mark.parametrize("key", ["train", "training", "loss", "trainable", "masked"])
def test_a_mask_inside_a_message_becomes_its_weight(key: str) -> None:
    on, off = (0, 1) if key == "masked" else (1, 0)
    for one, other in ((bool(on), bool(off)), (on, off), (float(on), float(off))):
        findings = Findings()
        messages = [{**USER, key: other}, {**ASSISTANT, key: one}, USER, {**ASSISTANT, key: other, "weight": 0}]
        made = choose("", "messages").read_row({"messages": messages}, frozenset(), findings)
        assert [m.get("weight") for m in made.messages or ()] == [0, 1, None, 0]
        assert not any(key in message for message in made.messages or ())
        assert findings.followed == {f"{key} in messages": 3} and not findings.ignored
    with pytest.raises(BadRecord, match=f"contradiction: {key} differs from the weight of a message"):
        read("messages", {"messages": [USER, {**ASSISTANT, key: on, "weight": 0}]})
    for odd in (0.5, "yes", [1]):
        with pytest.raises(BadRecord, match=f"bad mask: message 2: {key} may say what is learned; write weight"):
            read("messages", {"messages": [USER, {**ASSISTANT, key: odd}]})
    pair = {"prompt": [USER], "completion": [{**ASSISTANT, key: off}, USER, ASSISTANT]}
    assert [m.get("weight") for m in read("prompt_completion", pair).messages or ()] == [None, 0, None, None]
    unmasked = choose("", "messages").read_row(
        {"messages": [USER, {**ASSISTANT, key: off}]}, frozenset({key}), Findings()
    )
    assert unmasked.messages == [USER, ASSISTANT]


def test_a_blank_answer_may_be_masked_and_a_weight_must_agree_with_the_mask() -> None:
    row = {"messages": [USER, BLANK, USER, {**ASSISTANT, "weight": 1}], "loss_mask": [0, 0, 1, 1]}
    assert [message["weight"] for message in read("messages", row).messages or ()] == [0, 0, 1, 1]
    with pytest.raises(BadRecord, match="contradiction: loss_mask differs from the weight of a message"):
        read("messages", row | {"loss_mask": [0, 0, 1, 0]})


LONG = "Ein Satz, der mehr als acht Wörter hat und sonst nirgends in der Zeile steht."
ADD = {"instruction": "Add.", "input": "2, 2", "output": "4"}
BY_INSTRUCTION = {"prompt": "instruction", "response": "response"}
DOLLY = {"instruction": "Who?", "context": "Ann wrote it.", "response": "Ann", "category": "closed_qa"}
# Rows in the shape of well-known data sets, written for this test; the columns that are named. Expected: the columns
# that are noted as unused, "!" before those long enough for a warning; or the column for which the row is refused.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, str], set[str] | str]] = {
    "UltraChat": ({"prompt": "2+2?", "prompt_id": "f0e1", "messages": [USER, ASSISTANT]}, {}, {"prompt", "prompt_id"}),
    "OpenR1": (
        {
            "problem": "2+2?",
            "solution": LONG,
            "answer": "4",
            "problem_type": "Algebra",
            "source": "olympiads",
            "is_reasoning_complete": [True, False],
            "generations": ["<think>\nTwo and two.\n</think>\n4", "5"],
            "correctness_math_verify": [True, False],
            "finish_reasons": None,
            "correctness_count": 1,
            "messages": [USER, {**ASSISTANT, "content": "<think>\nTwo and two.\n</think>\n4"}],
        },
        {},
        {"problem", "!solution", "answer", "problem_type", "source", "generations"},
    ),
    "OpenR1 by columns": (
        {"problem": "2+2?", "solution": "4", "messages": [USER, ASSISTANT], "problem_type": "Algebra"},
        {"prompt": "problem", "response": "solution"},
        {"messages", "problem_type"},
    ),
    "Alpaca": ({**ADD, "text": f"{LONG} ### Instruction: Add. ### Response: 4"}, {}, {"!text"}),
    "Alpaca with a rendered prompt": ({**ADD, "prompt": "### Add.\n### Input:\n2, 2\n### Output:\n4"}, {}, {"!prompt"}),
    "Alpaca by columns": ({"instruction": "Add.", "input": "2, 2", "response": "4"}, BY_INSTRUCTION, "input"),
    "MetaMath": (
        {"query": "2+2?", "response": "4", "type": "MATH_Rephrased", "original_question": LONG},
        {"prompt": "query", "response": "response"},
        {"type", "!original_question"},
    ),
    "Dolly": (DOLLY, BY_INSTRUCTION, "context"),
    "Dolly without a context": ({**DOLLY, "context": ""}, BY_INSTRUCTION, {"category"}),
    "Dolly, the context as system message": (DOLLY, {**BY_INSTRUCTION, "system": "context"}, {"category"}),
    "Tulu": ({"id": "personahub_1", "messages": [USER, ASSISTANT], "source": "ai2-adapt-dev/x"}, {}, {"id", "source"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_well_known_shapes_are_accepted_or_refused_for_a_part_that_would_be_lost(shape: str) -> None:
    row, columns, expected = SHAPES[shape]
    name = "columns" if columns else "alpaca" if "instruction" in row else "messages"
    findings, form = Findings(), choose("", name, **columns)
    if isinstance(expected, str):
        with pytest.raises(BadRecord, match=f"part not read: {expected} in a row of format {name} holds"):
            form.read_row(row, frozenset(), findings)
        form.read_row(row, frozenset({expected}), findings)
    else:
        form.read_row(row, frozenset(), findings)
        assert {"!" * (found.words > MANY_WORDS) + key for key, found in findings.unused.items()} == expected


QUESTION = {"question": "Where does Ann live?", "answer": "In Rome."}
ABOUT_THINKING = ("reasoning", "rationale", "deepseek_reasoning", "chain_of_thought", "cot")


@pytest.mark.parametrize(
    ("column", "value", "is_part"),
    [
        *(
            (key, "Rome is far.", True)
            for key in (*ABOUT_THINKING, "context", "gold_Passage", "CONTEXTS", "ragContext")
        ),
        *((key, "Bern", True) for key in ("input", "instruction", "A", "opa", "option_b", "choice2", "distractor1")),
        *((key, "And Bob?", True) for key in ("question_2", "prompt3", "problems1")),
        ("choices", ["Rome", "Bern"], True),
        ("choices", {"label": ["A", "B"], "text": ["Rome", "Bern"]}, True),
        ("options", {"A": 3, "B": 4}, True),
        ("contexts", [[{"text": "Ann moved."}]], True),
        ("context", "安住在罗马", True),
        ("context", "Where does\n Ann", False),  # contained
        ("context", "where does", True),
        ("choices", ["Ann", "In"], False),
        ("choices", ["An", "om"], True),  # not as words
        ("prompt", "Q: Where does Ann live?\nA: In Rome.", False),  # the whole row, rendered
        ("prompt", "Ann moved. Where does Ann live?", True),
        ("reasoning", True, False),
        ("context", {"n": None}, False),
        *((key, "Rome is far.", False) for key in ("context_id", "reasoning_effort", "choice_type", "first_question")),
    ],
)
def test_a_part_of_the_prompt_or_answer_in_a_column_of_its_own_is_refused(
    column: str, value: Any, is_part: bool
) -> None:
    form, row = choose("", "columns", "question", "answer"), {**QUESTION, column: value}
    if not is_part:
        form.read_row(row, frozenset(), Findings())
        return
    with pytest.raises(
        BadRecord,
        match=(
            "write the row as messages, with reasoning_content; if it does not matter, name it in data.ignored_keys"
            if column in ABOUT_THINKING
            else r"or name it in data\.system_column; if it does not matter, name it in data\.ignored_"
        ),
    ):
        form.read_row(row, frozenset(), Findings())
    form.read_row(row, frozenset({column}), Findings())
    read("text", {"text": "a", column: value})
    answer = {**ASSISTANT, "content": QUESTION["answer"]}
    if column in ABOUT_THINKING:
        with pytest.raises(BadRecord, match="put it into reasoning_content of its message; if it does"):
            read("messages", {"messages": [USER, answer], column: value})
        answer["reasoning_content"] = value
    read("messages", {"messages": [USER, answer], column: value})


def test_null_arguments_are_kept_or_left_out_alike_in_objects_and_texts() -> None:
    def arguments(nulls: str, given: Any) -> tuple[Any, dict[str, int]]:
        call, findings = {"id": None, "function": {"name": "f", "arguments": given}}, Findings()
        row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
        before = json.dumps(row)
        example = choose("", "messages").read_row(row, frozenset(), findings, nulls)
        assert json.dumps(row) == before
        [made] = example.messages[1]["tool_calls"]  # type: ignore[index]
        assert made["id"] is None and made["function"]["name"] == "f"
        return made["function"]["arguments"], dict(findings.nulls)

    given = {"a": None, "b": {"c": None, "d": [None, {"e": None}]}, "f": "null"}
    without = {"b": {"d": [None, {}]}, "f": "null"}
    text = json.dumps(given, indent=1)
    assert arguments("kept", given) == arguments("keep", given) == (given, {"kept": 1})
    assert arguments("drop", given) == arguments("left out", given) == (without, {"left out": 1})
    assert arguments("kept", text) == arguments("keep", text) == arguments("left out", text) == (text, {"kept": 1})
    assert arguments("drop", text) == (json.dumps(without), {"left out": 1})
    for plain in ({}, {"a": [None]}, '{"a":  "null"}', '{"ä": 1}'):
        assert all(arguments(nulls, plain) == (plain, {}) for nulls in ("kept", "keep", "drop", "left out"))
    assert arguments("drop", '{"ä": null, "ö": "ü"}')[0] == '{"ö": "ü"}'
    value = json.dumps({"name": "f", "arguments": {"a": None}})
    row = {"conversations": [USER, {"from": "function_call", "value": value}]}
    example = choose("", "sharegpt").read_row(row, frozenset(), Findings(), "drop")
    assert example.messages[1]["tool_calls"] == [{"name": "f", "arguments": {}}]  # type: ignore[index]
