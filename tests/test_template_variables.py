"""Templates of Qwen3.5 to 3.8: rendered as transformers does, masks, their variables in training and afterwards."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ASSETS, SHARED_DATA, transformers_tokenizer
from test_chat_template import SMALL, folder_with, say

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.encode import supervise
from titan_mi100.data.prepare import prepare_data
from titan_mi100.errors import UserError
from titan_mi100.generation.batch import command_parser, template_variables
from titan_mi100.generation.engine import PromptBuilder
from titan_mi100.shapes.families import PRESETS
from titan_mi100.text.assets import PROMPTS, prompt_settings, read_assets, run_assets
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools import inspect_data

REAL = sorted((SHARED_DATA / "templates").glob("qwen3_[568]*.jinja"))
NAMES = ["qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"]
needs_real = pytest.mark.skipif(not REAL, reason="the real templates are not on this machine")
# Our own words for what is new in Qwen3.5 to 3.8: prompts open the think block, earlier reasoning can stay, the
# effort is written first.
OFF = "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
KEEPING = """\
{%- set effort = reasoning_effort | default('high') %}
{%- if effort not in ('high', 'low') %}{{ raise_exception('Unexpected effort ' ~ effort) }}{% endif %}
{{- '<|im_start|>system\\nEffort: ' ~ effort ~ '.<|im_end|>\\n' }}
{%- if messages[-1].role == 'system' %}{{ raise_exception('Ends with a system message.') }}{% endif %}
""" + SMALL.replace("loop.index0 > last_user.index", "loop.index0 > last_user.index or preserve_thinking")
KEEPING = KEEPING.replace(OFF, OFF.replace("{% endif %}", "{% else %}{{ '<think>\\n' }}{% endif %}"))
ARGUMENTS = {"n": 1, "list": [1, "zwei é"], "on": True, "text": "a\nb", "none": None, "map": {"k": "v"}}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


ROUNDS = [say("user", "q"), say("assistant", "a", reasoning_content="why"), say("user", "r")]
ROUNDS.append(say("assistant", "b", reasoning_content="because"))
CALLS = [say("assistant", "Let me see.", reasoning_content="why", tool_calls=[call(ARGUMENTS), call({})])]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "rounds": [say("system", " Be brief. "), *ROUNDS],
    "calls": [say("user", "q"), *CALLS, say("tool", "1"), say("tool", "2"), say("assistant", "a"), *ROUNDS],
    "thoughts in the content": [say("user", "q"), say("assistant", "<think>\nwhy\n</think>\n\na"), say("user", "r")],
    "parts": [say("user", [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]), say("assistant", "a")],
    "no user": [say("system", "s"), say("assistant", "a")],
    "a late system message": [*ROUNDS, say("system", "s")],
}
VARIABLES: list[dict[str, Any]] = [
    *({}, {"enable_thinking": True}, {"enable_thinking": False}, {"preserve_thinking": True}),
    *({"preserve_thinking": False, "enable_thinking": True}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
]


def chat(name: str, folder: Path = ASSETS / "tokenizer") -> ChatTemplate:
    return ChatTemplate.from_folder(folder, SHARED_DATA / "templates" / f"{name}.jinja")


def rendered(render: Any, *arguments: Any, **variables: Any) -> str:
    """The text, or why the template refuses."""
    try:
        return str(render(*arguments, **variables))
    except Exception as error:
        return str(error).rpartition("refuses this conversation: ")[2]


@needs_real
@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_as_transformers_renders_it(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    ours, source, texts = chat(name), (SHARED_DATA / "templates" / f"{name}.jinja").read_text(), set()

    def theirs(messages: Any, **how: Any) -> str:
        tools = how.pop("tools", None)
        return utils.render_jinja_template([messages], tools=tools, chat_template=source, **how)[0][0]  # type: ignore[no-any-return]

    for messages, variables, tools in product(CONVERSATIONS.values(), VARIABLES, (None, TOOLS)):
        for how in (variables, {**variables, "add_generation_prompt": True}):
            text = rendered(ours.render, messages, tools=tools, **how)
            assert text == rendered(theirs, messages, tools=tools, **how)
            texts.add(text)
    assert {"No user query found in messages.", "System message must be at the beginning."} < texts
    as_text = [
        {**m, "tool_calls": [call(json.dumps(ARGUMENTS)), call("{}")]} if "tool_calls" in m else m
        for m in CONVERSATIONS["calls"]
    ]
    assert "item pairs from a mapping" in rendered(theirs, as_text)  # so the texts are given as objects
    assert ours.render(as_text, tools=TOOLS) == theirs(CONVERSATIONS["calls"], tools=TOOLS)


CALLED = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
A, B, WHY = "a<|im_end|>", "because\n</think>\n\nb<|im_end|>", "why\n</think>\n\na<|im_end|>"
THINK = {"preserve_thinking": True}
MASKS: list[tuple[str, list[Any], dict[str, Any], list[list[str]]]] = [
    *((name, ROUNDS, {}, [[A, B]]) for name in NAMES[:3]),
    *((name, ROUNDS, {"earlier_thinking": "mask"}, [[B]]) for name in NAMES[:3]),
    *((name, ROUNDS, {"earlier_thinking": "context"}, [[B]]) for name in NAMES[:3]),
    *((name, ROUNDS, {"earlier_thinking": "unroll"}, [[WHY], [B]]) for name in NAMES[:3]),
    *((name, ROUNDS, THINK, [[WHY, B]]) for name in NAMES[2:]),
    *((name, ROUNDS, {**THINK, "earlier_thinking": "context"}, [[A, B]]) for name in NAMES[2:]),
    *((name, ROUNDS, {**THINK, "earlier_thinking": "context", "loss": "last"}, [[B]]) for name in NAMES[2:]),
    ("qwen3_8", ROUNDS, {}, [[WHY, B]]),
    ("qwen3_8", ROUNDS, {"preserve_thinking": False, "reasoning_effort": "low"}, [[A, B]]),
    *(
        (
            name,
            [say("user", "q"), say("assistant", "", tool_calls=[call(x)]), say("tool", "r"), say("assistant", "a")],
            {},
            [[CALLED, A]],
        )
        for name in NAMES
        for x in ({"x": 1}, '{"x": 1}')
    ),
]


@needs_real
def test_what_the_assistant_generates_is_learned_and_shown_reasoning_can_be_context() -> None:
    chats = {name: chat(name) for name in NAMES}
    for name, messages, how, expected in MASKS:
        found = supervise(chats[name], messages, **how)
        assert [[each.text[a:b] for a, b in spans] for each, spans in found] == expected, (name, how)
        assert not any(turn.problem for each, _ in found for turn in each.turns), (name, how)


# -- with our own words --


def test_reasoning_that_stays_is_context_only_before_the_last_question(tmp_path: Path) -> None:
    ours = ChatTemplate.from_folder(folder_with(tmp_path, KEEPING))
    for kind in (ROUNDS, [ROUNDS[0], say("assistant", "<think>\nwhy\n</think>\n\na"), *ROUNDS[2:]]):
        for loss, before in (("assistant", []), ("all", ["<|im_start|>"])):
            [(one, spans)] = supervise(ours, kind, loss, earlier_thinking="context", preserve_thinking=True)
            learned = "".join(one.text[start:stop] for start, stop in spans)
            assert "<think>\nwhy\n</think>\n\na" in one.text and "why" not in learned and A in learned and B in learned
            assert learned.startswith((*before, A))


def prepare(folder: Path, rows: list[Any], **settings: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return prepare_data(DataConfig(path=(str(path),), **settings), str(folder), "", 1024)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((ASSETS / "tokenizer" / "tokenizer.json").read_bytes())
    return folder_with(tmp_path, KEEPING, **PLAIN)


def test_the_variables_are_stored_and_followed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepare(model, [ROUNDS], preserve_thinking="true", reasoning_effort="low", enable_thinking="false")
    bare = prepare(model, [ROUNDS])
    assert data.facts.plan != bare.facts.plan and bare.facts.enable_thinking is True
    assert data.facts.enable_thinking is False and not {"preserve_thinking"} & bare.facts.made_of.keys()
    variables: dict[str, Any] = {"preserve_thinking": True, "reasoning_effort": "low"}
    assert data.facts.variables == variables and bare.facts.variables == {}
    assets = run_assets(PRESETS["debug"], "", str(model), "", False, "", data.facts.variables)
    assert json.loads(assets[PROMPTS]) == {**variables, "enable_thinking": False}
    export = tmp_path / "export"
    export.mkdir()
    for name, content in assets.items():
        (export / name).write_bytes(content)
    assert run_assets(PRESETS["debug"], str(export), str(export), "", False, None, variables) == assets
    told = read_assets(export)

    ours = ChatTemplate.from_folder(model)
    given: dict[str, Any] = {"add_generation_prompt": True}
    wanted = ours.render(ROUNDS[:3], **given, **variables, enable_thinking=False)
    assert "Effort: low" in wanted and "why" in wanted and wanted.endswith("<think>\n\n</think>\n\n")
    theirs = transformers_tokenizer(export)
    assert theirs.apply_chat_template(ROUNDS[:3], tokenize=False, **given) == wanted
    high = theirs.apply_chat_template(ROUNDS[:3], tokenize=False, reasoning_effort="high", **given)
    assert high == wanted.replace("low", "high")
    # generate and exact_match, with the model's own file beside a template without defaults
    stub: Any = SimpleNamespace(tokenizer=load_tokenizer(model), template=ours, prompts=prompt_settings(told, export))
    assert PromptBuilder(stub, None, None)("p", ROUNDS[:3]).text == wanted
    said = capsys.readouterr().err
    assert 'reasoning_effort = "low", as the model was trained (titan_mi100.json); --reasoning_effort overrides' in said
    options = command_parser("generate", "").parse_args(
        ["--model", "m", "--reasoning_effort", "high", "--no-preserve_thinking"]
    )
    asked = PromptBuilder(stub, None, template_variables(options))("p", ROUNDS[:3]).text
    assert asked == ours.render(ROUNDS[:3], **given, reasoning_effort="high", enable_thinking=False)
    stub.template = chat_of(tmp_path)
    with pytest.raises(UserError, match="does not read reasoning_effort"):
        PromptBuilder(stub, None, {"reasoning_effort": "low"})


def test_the_page_of_the_data_shows_the_masks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(model, [ROUNDS])
    given = ["--model.flavor", "debug", "--model.tokenizer_path", str(model), "--data.path", str(model / "rows.jsonl")]
    context = ["--data.preserve_thinking", "true", "--data.earlier_thinking", "context"]
    for more, shown in (
        ([], ["⟦a<|im_end|>⟧", "⟦because"]),
        (["--data.preserve_thinking", "true"], ["⟦why", "⟦because"]),
        (context, ["why↵\n</think>↵\n↵\n⟦a<|im_end|>⟧", "⟦because"]),
    ):
        assert inspect_data.main([*given, *more, "--where", f"{model / 'rows.jsonl'}:1"]) == 0
        page = capsys.readouterr().out
        assert all(part in page for part in shown), page


def chat_of(folder: Path) -> ChatTemplate:
    (folder / "small.jinja").write_text(SMALL)
    return ChatTemplate.from_folder(folder, folder / "small.jinja")


def test_what_a_template_does_not_read_or_refuses_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match="refuses this conversation: Unexpected effort max"):
        prepare(model, [ROUNDS], reasoning_effort="max")
    with pytest.raises(UserError, match=r"rows.jsonl:2\b.*Ends with a system message"):
        prepare(model, [ROUNDS, [*ROUNDS, say("system", "s")]])
    folder_with(model, SMALL, **PLAIN)
    for name in ("preserve_thinking", "reasoning_effort"):
        with pytest.raises(UserError, match=f"the chat template does not read {name}; leave it out"):
            prepare(model, [ROUNDS], **{name: "true"})


def test_the_settings_are_true_false_or_not_set(model: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    for given, expected in (("true", True), ('"false"', False), ('""', None), ('"yes"', "must be one of: true, false")):
        toml.write_text(
            f'[model]\nflavor = "debug"\ntokenizer_path = "{model}"\n[data]\npath = "x"\npreserve_thinking = {given}\n'
        )
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                load_config(["--job.config_file", str(toml)], with_files=False)
        else:
            data = load_config(["--job.config_file", str(toml)], with_files=False).data
            assert data.variables.get("preserve_thinking") is expected
    with pytest.raises(UserError, match=r'preserve_thinking.* has no effect with format = "text"'):
        load_config(
            ["--job.config_file", str(toml), "--data.preserve_thinking", "true", "--data.format", "text"],
            with_files=False,
        )
