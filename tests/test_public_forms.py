"""Rows in the form of public data sets and of other trainers' examples, written for this test: what of each is
learned, or the words of its refusal.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_chat_template import say
from test_what_rows_say import END as E
from test_what_rows_say import call as C
from test_what_rows_say import outcome

CALL = '<tool_call>\n{"name": "w", "arguments": {"c": "P"}}\n</tool_call>'
SOLVED = "<|begin_of_thought|>x<|end_of_thought|>\n\n<|begin_of_solution|>4<|end_of_solution|>"
TOOLS = [{"type": "function", "function": {"name": "w", "description": "d", "parameters": {"type": "object"}}}]


class Form(NamedTuple):
    row: dict[str, Any]
    expected: list[str] | str | None  # learned texts; words of the refusal; None: only the notes are compared
    notes: tuple[str, ...]
    answers: str
    options: dict[str, Any]


FORMS: dict[str, Form] = {}


def F(name: str, row: dict[str, Any], expected: Any, notes: Any = (), answers: str = "", **options: Any) -> None:
    FORMS[name] = Form(row, expected, tuple(notes), answers, options)


def U(text: Any, **more: Any) -> dict[str, Any]:
    return say("user", text, **more)


def A(text: Any, **more: Any) -> dict[str, Any]:
    return say("assistant", text, **more)


def T(result: Any) -> dict[str, Any]:
    return say("tool", result)


def H(text: str, **more: Any) -> dict[str, Any]:
    return {"from": "human", "value": text, **more}


def G(text: str, **more: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": text, **more}


# plain sets
F(
    "OpenHermes",
    {
        "conversations": [H("q"), G("a")],
        "source": "airoboros2.2",
        "category": "orca",
        "skip_prompt_formatting": False,
        "model": None,
        "hash": None,
        "avatarUrl": None,
        "views": None,
        "idx": None,
    },
    ["a" + E],
)
F("OpenHermes system_prompt", {"conversations": [H("q"), G("a")], "system_prompt": "Be brief."}, "rename it to system")
F(
    "UltraChat 200k",
    {"prompt": "q", "prompt_id": "x", "messages": [U("q"), A("a"), U("r"), A("b")]},
    ["a" + E + "b" + E],
)
F("Tulu 3", {"id": "x", "messages": [U("q"), A("a")], "source": "ai2"}, ["a" + E])
F("Tulu user last", {"messages": [U("q"), A("a"), U("thanks")]}, ["a" + E])
F(
    "no robots",
    {
        "prompt": "q",
        "prompt_id": "1",
        "messages": [{"role": "system", "content": "s"}, U("q"), A("a")],
        "category": "Chat",
    },
    ["a" + E],
)
F(
    "Magpie",
    {
        "uuid": "x",
        "model": "m",
        "gen_input_configs": {"temperature": 1},
        "instruction": "q",
        "response": "a",
        "conversations": [H("q"), G("a")],
        "task_category": "Math",
        "difficulty": "easy",
        "intent": "The user wants to know the sum of two numbers in a list",
        "min_neighbor_distance": 0.1,
        "reward": 0.3,
        "language": "EN",
    },
    ["a" + E],
)
F(
    "SmolTalk2 chat_template_kwargs",
    {
        "messages": [U("q"), A("a")],
        "source": "x",
        "chat_template_kwargs": {
            "enable_thinking": False,
            "custom_instructions": "",
            "python_tools": None,
            "xml_tools": None,
        },
    },
    "set data.enable_thinking",
)
F("alpaca-cleaned", {"instruction": "q", "input": "i", "output": "a"}, ["a" + E])
F("ShareGPT weight axolotl", {"conversations": [H("q"), G("bad", weight=0), H("r"), G("good", weight=1)]}, ["good" + E])
F(
    "axolotl train",
    {"messages": [{**U("q"), "train": False}, {**A("bad"), "train": False}, U("r"), {**A("good"), "train": True}]},
    ["good" + E],
)
F(
    "axolotl training",
    {"messages": [U("q"), {**A("bad"), "training": False}, U("r"), {**A("good"), "training": True}]},
    ["good" + E],
)
F(
    "axolotl train_detail",
    {"messages": [U("q"), {**A("half bad"), "train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}]},
    "bad mask",
)
F(
    "axolotl training_detail",
    {
        "messages": [
            U("q"),
            {**A("half bad"), "training_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
        ]
    },
    "bad mask",
)
F(
    "axolotl masked",
    {"messages": [U("q"), {**A("bad"), "masked": True}, U("r"), {**A("good"), "masked": False}]},
    ["good" + E],
)
F(
    "axolotl message_field_training custom",
    {"messages": [U("q"), {**A("bad"), "should_train": 0}, U("r"), A("good")]},
    ["good" + E],
)
F(
    "ms-swift loss",
    {"messages": [U("q"), {**A("bad"), "loss": False}, U("r"), {**A("good"), "loss": True}]},
    ["good" + E],
)
F("ms-swift loss float", {"messages": [U("q"), {**A("bad"), "loss": 0.3}]}, "bad mask")
F("ms-swift loss_scale", {"messages": [U("q"), {**A("a"), "loss_scale": 1.0}]}, "bad mask")
F("mistral weight", {"messages": [U("q"), A("bad", weight=0), U("r"), A("good", weight=1)]}, ["good" + E])
F(
    "openai weight + parallel_tool_calls",
    {"messages": [U("q"), A("a", weight=1)], "parallel_tool_calls": False},
    ["a" + E],
)
F("xtuner loss in row", {"messages": [U("q"), A("a")], "loss": [0, 1]}, ["a" + E])
F("mask list bools", {"messages": [U("q"), A("a"), U("r"), A("b")], "assistant_masks": [0, 0, 0, 1]}, ["b" + E])
F("mask camel", {"messages": [U("q"), A("a"), U("r"), A("b")], "trainMask": [False, False, False, True]}, ["b" + E])
F("mask of answers only", {"messages": [U("q"), A("a"), U("r"), A("b")], "loss_mask": [0, 1]}, "bad mask")
F("detached flags", {"messages": [U("q"), A("a"), U("r"), A("b")], "hide_from_loss": [0, 1, 0, 0]}, "bad mask")
F("prompt mask 1 means prompt", {"messages": [U("q"), A("a")], "prompt_mask": [1, 0]}, "bad mask")
F("gradient_stop", {"messages": [U("q"), A("a")], "gradient_stop": [0, 1]}, "bad mask")
F("flags toxic", {"messages": [U("q"), A("a")], "toxic": [0, 1]}, ["a" + E])
F(
    "OpenR1 Math",
    {
        "problem": "q",
        "solution": "s",
        "answer": "4",
        "problem_type": "Algebra",
        "generations": ["<think>\nx\n</think>\n4"],
        "is_reasoning_complete": [True, False],
        "correctness_math_verify": [True, False],
        "messages": [U("q"), A("<think>\nx\n</think>\n\n4")],
    },
    ["<think>\nx\n</think>\n\n4" + E],
)
F(
    "Mixture-of-Thoughts",
    {"messages": [U("q"), A("<think>\nx\n</think>\n\n4")], "num_tokens": 3, "source": "s"},
    ["<think>\nx\n</think>\n\n4" + E],
)
F("MoT cut off", {"messages": [U("q"), A("<think>\nOkay, so I need")]}, "opens <think>")
F(
    "OpenThoughts",
    {
        "system": "Your role is ...",
        "conversations": [
            {"from": "user", "value": "q"},
            {
                "from": "assistant",
                "value": SOLVED,
            },
        ],
    },
    [SOLVED + E],
)
F(
    "reasoning column beside messages",
    {"messages": [U("q"), A("4")], "reasoning": "Two and two."},
    "put it into reasoning_content",
)
F("reasoning in msg under thought", {"messages": [U("q"), A("4", thought="x")]}, "rename it to reasoning_content")
F(
    "reasoning_details (openrouter)",
    {"messages": [U("q"), A("4", reasoning="x", reasoning_details=[{"type": "t"}])]},
    "unknown key",
)
# tools
F(
    "glaive sharegpt",
    {"conversations": [H("q"), G("a <|endoftext|>"), H("r"), G("b<|endoftext|>")]},
    ["a " + E + "b" + E],
    ["ends"],
)
F(
    "glaive v2 toolcall sharegpt (LF)",
    {
        "conversations": [
            H("q"),
            {"from": "function_call", "value": json.dumps({"name": "w", "arguments": {"c": "P"}})},
            {"from": "observation", "value": '{"t": 1}'},
            G("d"),
        ],
        "tools": json.dumps([{"name": "w", "parameters": {}}]),
    },
    [CALL + E + "d" + E],
)
F(
    "glaive functioncall text",
    {
        "conversations": [
            H("q"),
            G('<functioncall> {"name": "w", "arguments": \'{"c": "P"}\'} <|endoftext|>'),
            {"from": "tool", "value": "r"},
            G("d"),
        ]
    },
    None,
    ["ends"],
)
F(
    "Hermes FC v1",
    {
        "conversations": [
            {"from": "system", "value": "You ... <tools> [] </tools>"},
            H("q"),
            G("<tool_call>\n{'arguments': {'c': 'P'}, 'name': 'w'}\n</tool_call>\n"),
            {"from": "tool", "value": "<tool_response>\n{'t': 1}\n</tool_response>\n"},
            G("d"),
        ],
        "id": "1",
        "category": "c",
        "subcategory": "s",
        "task": "t",
        "schema": None,
    },
    ["<tool_call>\n{'arguments': {'c': 'P'}, 'name': 'w'}\n</tool_call>\n" + E + "d" + E],
    ["tags"],
)
F(
    "Hermes two responses",
    {
        "conversations": [
            H("q"),
            G('<tool_call>\n{"name": "w"}\n</tool_call>'),
            {"from": "tool", "value": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"},
            G("d"),
        ]
    },
    None,
    ["tags"],
)
F(
    "xLAM by columns",
    {
        "id": 0,
        "query": "q",
        "answers": json.dumps([{"name": "w", "arguments": {"c": "P"}}]),
        "tools": json.dumps([{"name": "w", "parameters": {}}]),
    },
    "write the row as messages, beside which tools",
    prompt_column="query",
    response_column="answers",
)
F(
    "ToolACE",
    {
        "system": "You are an expert in composing functions.",
        "conversations": [
            {"from": "user", "value": "q"},
            {"from": "assistant", "value": '[w(c="P")]'},
            {"from": "tool", "value": '[{"name": "w", "results": {"t": 1}}]'},
            {"from": "assistant", "value": "d"},
        ],
    },
    ['[w(c="P")]' + E + "d" + E],
)
F(
    "ToolACE list content",
    {
        "conversations": [
            {"from": "user", "value": "q"},
            {"from": "assistant", "value": "x"},
            {"from": "tool", "value": [{"name": "w", "results": {"t": 1}}]},
            {"from": "assistant", "value": "d"},
        ]
    },
    "write its JSON text",
)
F(
    "APIGen-MT",
    {
        "conversations": [
            H("q"),
            {"from": "function_call", "value": '{"name": "w", "arguments": {"c": "P"}}'},
            {"from": "observation", "value": '{"t": 1}'},
            G("d"),
            H("thx"),
            {"from": "gpt", "value": "bye"},
        ],
        "tools": '[{"name": "w"}]',
        "system": "policy",
    },
    [CALL + E + "d" + E + "bye" + E],
)
F(
    "parallel function_call",
    {
        "conversations": [
            H("q"),
            {"from": "function_call", "value": json.dumps({"name": "w", "arguments": {"c": "P"}})},
            {"from": "function_call", "value": json.dumps({"name": "w", "arguments": {"c": "P"}})},
            {"from": "observation", "value": "1"},
            {"from": "observation", "value": "2"},
            G("d"),
        ]
    },
    [CALL + "\n" + CALL + E + "d" + E],
)
F(
    "agent trace text+call+text",
    {
        "messages": [
            U("q"),
            A("Look."),
            A(None, tool_calls=[C("w", c="P")]),
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            A("Now done."),
        ],
        "tools": TOOLS,
    },
    ["Look.\n" + CALL + E + "Now done." + E],
)
F(
    "agent trace, text between calls",
    {
        "messages": [
            U("q"),
            A("", tool_calls=[C("w", c="P")]),
            A("And again."),
            A("", tool_calls=[C("w", c="P")]),
            T("r"),
            A("d"),
        ]
    },
    None,
    ["two_answers"],
)
F(
    "SWE agent parts",
    {
        "messages": [
            U([{"type": "text", "text": "q"}]),
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Look."}],
                "tool_calls": [
                    {"id": "t", "type": "function", "index": 0, "function": {"name": "w", "arguments": {"c": "P"}}}
                ],
            },
            {"role": "tool", "content": [{"type": "text", "text": "r"}], "name": "w", "tool_call_id": "t"},
            A("d"),
        ],
        "tools": TOOLS,
    },
    ["Look.\n" + CALL + E + "d" + E],
)
F(
    "anthropic tool_use",
    {
        "messages": [
            U("q"),
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "t", "name": "w", "input": {"c": "P"}},
                ],
            },
        ]
    },
    ["Look.\n" + CALL + E],
)
F(
    "anthropic tool_result in user",
    {"messages": [U("q"), A("a"), {"role": "user", "content": [{"type": "tool_result", "content": "r"}]}, A("b")]},
    "is not the id of a tool_use before it",
)
F(
    "function role",
    {
        "messages": [
            U("q"),
            A("", tool_calls=[C("w", c="P")]),
            {"role": "function", "name": "w", "content": "r"},
            A("d"),
        ]
    },
    [CALL + E + "d" + E],
)
F("developer role", {"messages": [{"role": "developer", "content": "s"}, U("q"), A("a")]}, "rename it to system")
F("tools list of texts", {"messages": [U("q"), A("a")], "tools": ['{"name": "w"}']}, "bad tools")
F("tool content null", {"messages": [U("q"), A("", tool_calls=[C("w")]), T(None), A("d")]}, "write its JSON text")
F(
    "messages json text (NVIDIA)",
    {"messages": json.dumps([U("q"), A("a")]), "tools": json.dumps(TOOLS)},
    ["a" + E],
    ["json_text"],
)
F("conversations json text", {"conversations": json.dumps([H("q"), G("a")])}, ["a" + E], ["json_text"])
F("list of json texts", {"messages": [json.dumps(U("q")), json.dumps(A("a"))]}, "must be an object")
F(
    "numpy repr",
    {"prompt": "[{'content': 'q', 'role': 'user'}\n {'content': 's', 'role': 'system'}]", "completion": "a"},
    "Python's form",
)
# preferences
BOTH = {"chosen": [U("q"), A("a")], "rejected": [U("q"), A("b")]}
F(
    "UltraFeedback binarized",
    {
        "prompt": "q",
        "prompt_id": "x",
        **BOTH,
        "messages": [U("q"), A("a")],
        "score_chosen": 9.0,
        "score_rejected": 4.0,
    },
    ["a" + E, "b" + E],
    answers="pairs",
)
F(
    "orca dpo pairs",
    {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
    ["a" + E, "b" + E],
    answers="pairs",
)
F(
    "HH-RLHF",
    {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    "expected one of",
    answers="pairs",
)
F(
    "nectar",
    {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": [{"answer": "a", "model": "m", "rank": 1.0}], "turns": 1},
    "missing key",
    answers="pairs",
)
F(
    "distilabel capybara",
    {
        "source": "x",
        "conversation": [{"input": "q", "output": "a"}],
        "original_response": "a",
        **BOTH,
        "rating_chosen": 5,
        "rating_rejected": 4,
    },
    ["a" + E, "b" + E],
    answers="pairs",
)
F(
    "notebook chatml pairs",
    {
        "prompt": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
        "chosen": "a<|im_end|>\n",
        "rejected": "b<|im_end|>\n",
    },
    "write the rendered dialogue",
    answers="pairs",
)
F(
    "notebook end only",
    {"prompt": "q", "chosen": "a<|im_end|>\n", "rejected": "b<|im_end|>\n"},
    ["a" + E, "b" + E],
    ["ends"],
    answers="pairs",
)
F(
    "SHP",
    {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_A": 3},
    "missing key",
    answers="pairs",
)
F(
    "stack exchange paired",
    {"qid": 1, "question": "q", "date": "d", "response_j": "a", "response_k": "b"},
    ["a" + E, "b" + E],
    answers="pairs",
    chosen_column="response_j",
    rejected_column="response_k",
)
F(
    "helpsteer pair json",
    {"prompt": json.dumps([U("q")]), "chosen": json.dumps([A("a")]), "rejected": json.dumps([A("b")])},
    ["a" + E, "b" + E],
    ["json_text"],
    answers="pairs",
)
F("kto mix", {"prompt": [U("q")], "completion": [A("a")], "label": True}, ["a" + E], answers="labels")
F("kto int label", {"prompt": "q", "completion": "a", "label": 1}, "must be true or false", answers="labels")
F(
    "pair with tools",
    {"prompt": [U("q")], "chosen": [A("", tool_calls=[C("w", c="P")])], "rejected": [A("no")], "tools": TOOLS},
    [CALL + E, "no" + E],
    answers="pairs",
)
F("LF ranking", {"conversations": [H("q")], "chosen": G("a"), "rejected": G("b")}, ["a" + E, "b" + E], answers="pairs")
F("pair masks", {"prompt": "q", "chosen": "a", "rejected": "b", "loss_mask": [0, 1]}, "bad mask", answers="pairs")
F("trl prompt only list + text", {"prompt": [U("q")], "completion": "a"}, ["a" + E])
F("completion ends mid", {"prompt": "q", "completion": "Use <|im_end|> to end."}, "special token")
F("doc on chat format", {"prompt": "q", "completion": "<|im_start|>user\nhi<|im_end|>"}, "write the rendered dialogue")
F(
    "doc, as text",
    {"prompt": "Explain <|im_start|>.", "completion": "It begins; <|im_end|> ends it."},
    ["It begins; <|im_end|> ends it." + E],
    special_in_content="text",
)
F("system twice same", {"messages": [{"role": "system", "content": "s"}, U("q"), A("a")], "system": "s"}, ["a" + E])
F("system beside messages", {"messages": [U("q"), A("a")], "system": "s"}, ["a" + E])
F("role play", {"messages": [U("q"), A("a"), A("b")]}, ["a" + E + "b" + E], ["two_answers"])
F("user twice", {"messages": [U("q"), U("r"), A("a")]}, ["a" + E])


@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_this_form_is_learned_as_it_says_or_refused(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    made = outcome(form.row, tmp_path, answers=form.answers, **form.options)
    if isinstance(form.expected, str):
        assert not made.learned and form.expected in made.reason, made
        return
    assert made.learned and made.notes == {*form.notes}, made
    if form.expected is not None:
        assert made.learned == form.expected
