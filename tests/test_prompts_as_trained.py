"""What a row teaches: nothing of it is lost in its rendering, and it begins with the tokens of the prompt."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS, SHARED_DATA, qwen3_tokenizer, transformers_tokenizer
from test_chat_template import SMALL, chatml, folder_with, needs_qwen3, say

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.encode import JOINED, Encoder
from titan_mi100.data.formats import BadRecord, Example, choose_format
from titan_mi100.files.templates import TEMPLATE
from titan_mi100.shapes.families import PRESETS
from titan_mi100.text.assets import run_assets
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer

REAL = sorted((SHARED_DATA / "templates").glob("*.jinja"))
# Our own words for two kinds of templates: one tells the model whether to think, one always opens a think block.
TELLING = "{{ '<|im_start|>system\\nThink.<|im_end|>\\n' if enable_thinking is undefined or enable_thinking }}" + SMALL
OPENING = SMALL.split("{%- if add_generation_prompt %}")[0] + (
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
TEMPLATES = {"small": SMALL, "telling": TELLING, **{file.stem: file for file in REAL}}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ROWS = {
    "an answer": ([say("user", "q"), say("assistant", "a")], None),
    "an answer with reasoning": ([say("user", "q"), say("assistant", "a", reasoning_content="why")], None),
    "reasoning in the content": ([say("user", "q"), say("assistant", "<think>\nwhy\n</think>\n\na")], None),
    "a system message, two rounds": (
        [say("system", "s"), say("user", "q"), say("assistant", "a"), say("user", "r"), say("assistant", "b")],
        None,
    ),
    "reasoning, then none": (
        [say("user", "q"), say("assistant", "a", reasoning_content="why"), say("user", "r"), say("assistant", "b")],
        None,
    ),
    "a call": ([say("user", "q"), say("assistant", "", tool_calls=[CALL])], [TOOL]),
    "an answer to a call": (
        [say("user", "q"), say("assistant", "", tool_calls=[CALL]), say("tool", "r"), say("assistant", "a")],
        [TOOL],
    ),
}


def encoder_for(tmp_path: Path, template: str | Path) -> Encoder:
    real = isinstance(template, Path)
    folder = SHARED_DATA / "qwen3_tokenizer" if real else folder_with(tmp_path, template, **PLAIN)
    if not real:
        (tmp_path / "tokenizer.json").write_bytes((ASSETS / "tokenizer" / "tokenizer.json").read_bytes())
    tokenizer = qwen3_tokenizer() if real else load_tokenizer(folder)
    return Encoder(
        tokenizer, ChatTemplate.from_folder(folder, str(template) if real else "", tokenizer), DataConfig(), 1 << 20
    )


@pytest.mark.parametrize(
    "name", ["small", "telling", *(pytest.param(file.stem, marks=pytest.mark.full) for file in REAL)]
)
def test_a_row_begins_with_the_tokens_of_the_prompt_that_generation_uses(name: str, tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path, TEMPLATES[name])
    assert encoder._template is not None
    for kind, (messages, tools) in ROWS.items():
        if (name, kind) == ("qwen3_8", "reasoning in the content"):  # this template leaves it there
            with pytest.raises(BadRecord, match="an empty think block before the content's"):
                encoder.encode(Example(messages=messages))
            continue
        encoded = encoder.encode(Example(messages=messages, tools=tools))
        mode = {"enable_thinking": encoded.thinking > 0} if encoded.thinking else {}
        asked = encoder._template.render(messages[:-1], add_generation_prompt=True, tools=tools, **mode)
        prompt, row = encoder.tokenizer.encode(asked), encoded.documents[-1]
        assert (row[: len(prompt)] >> 1).tolist() == prompt, kind
        learned = (row & 1).nonzero()[0]
        assert learned[-1] == len(row) - 2 and (learned >= len(prompt)).any(), kind
        if len([message for message in messages if message["role"] == "assistant"]) == 1:
            assert learned[0] == len(prompt), kind  # the answer, from its first token to its end, and nothing else


def test_a_row_without_reasoning_is_refused_where_every_prompt_opens_a_think_block(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path, OPENING)
    messages, _ = ROWS["an answer"]
    with pytest.raises(BadRecord, match="no reasoning, but the template's prompts open a think block"):
        encoder.encode(Example(messages=messages))
    assert encoder.encode(Example(messages=ROWS["an answer with reasoning"][0])).thinking == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("<think>one</think>first<think>two</think>second", "leaves out 'firsttwo'"),
        ("Well, <think>why</think>a", "leaves out 'Well,'"),
        ("The tags <think> and </think> mark it", "leaves out 'Thetags'"),
        ("Close it by </think> then", "inside a line"),
        ("<think>why</think>", "only thinks"),
        ("<think>why</think>\n", "only thinks"),
    ],
)
def test_thinking_in_odd_places_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path, SMALL)
    row = {"messages": [say("user", "q"), say("assistant", content)]}
    with pytest.raises(BadRecord, match=reason):
        encoder.encode(choose_format("", DataConfig(format="messages")).read(row))


def test_the_remedies_for_thinking_in_odd_places_work(tmp_path: Path) -> None:
    # As Qwen3's own template, a field of reasoning counts even if it is empty.
    as_qwen3 = SMALL.replace("if not thought and", "if m.reasoning_content is not string and")
    encoder, form = encoder_for(tmp_path, as_qwen3), choose_format("", DataConfig(format="messages"))
    for answer, shown in (
        (
            say("assistant", "Close it by </think> then", reasoning_content=""),
            "\n\nClose it by </think> then<|im_end|>",
        ),
        (say("assistant", "<think>why</think>", tool_calls=[CALL]), "why"),
        (say("assistant", "why\n</think>\n\na"), "why\n</think>\n\na<|im_end|>"),
        (say("assistant", "<think>why</think>a"), "why\n</think>\n\na<|im_end|>"),
    ):
        encoded = encoder.encode(form.read({"messages": [say("user", "q"), answer]}))
        assert shown in encoder.tokenizer.decode(encoded.documents[0] >> 1)


def test_a_template_that_takes_a_tag_out_of_the_answer_is_refused(tmp_path: Path) -> None:
    answer = say("assistant", "Close it by </think> then", reasoning_content="")
    with pytest.raises(BadRecord, match="leaves out '</think>'"):
        encoder_for(tmp_path, SMALL).encode(Example(messages=[say("user", "q"), answer]))


@needs_qwen3  # our small tokenizer has no token of two line breaks
def test_an_answer_that_joins_the_last_token_of_the_prompt_is_counted(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(chatml("{{ m.content }}"))
    encoder = encoder_for(tmp_path, tmp_path / "plain.jinja")
    kinds = [encoder.encode(Example(messages=[say("user", "q"), say("assistant", a)])).kind for a in ("a", "\n\na")]
    assert kinds == ["", JOINED]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{{ m.content if m.role != 'system' }}", "message 1: the template leaves out 's'"),
        ("{{ m.content }}{{ m.content if m.role == 'user' }}", "message 2: the template shows its text more than once"),
        ("{{ m.content[:3] if m.role == 'user' else m.content }}", "leaves out 'stion'"),
        ("{{ m.content | replace('nsw', '') }}", "message 3: the template rewrites its text; change the message"),
        ("{{ m.content | reverse }}", "message 3: the template rewrites its text"),
        ("{{ m.content | title if m.role == 'assistant' else m.content | upper }}", "drops or rewrites its content"),
    ],
)
def test_a_template_that_drops_or_repeats_a_message_is_refused(body: str, reason: str, tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path, chatml(body))
    messages: list[dict[str, Any]] = [say("system", "s"), say("user", "question"), say("assistant", "answer")]
    with pytest.raises(BadRecord, match=reason):
        encoder.encode(Example(messages=messages))


def test_arguments_that_a_template_writes_in_quotes_are_refused(tmp_path: Path) -> None:
    calls = '{% for c in m.tool_calls or [] %}{"arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    encoder = encoder_for(tmp_path, chatml("{{ m.content }}" + calls))
    call = {"function": {"name": "f", "arguments": '{"x": "}"}'}}
    messages = [say("user", 'is "}" right?'), say("assistant", "", tool_calls=[call])]
    with pytest.raises(BadRecord, match="it writes the arguments of a tool call, which are JSON text, in quotes"):
        encoder.encode(Example(messages=messages))
    call["function"]["arguments"] = {"x": "}"}
    assert encoder.encode(Example(messages=messages)).documents


def by_default(name: str, *chosen: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in ("small", "telling", *chosen) else (pytest.mark.full,)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("small", TEMPLATE),
        *(
            pytest.param(name, "tokenizer_config.json", marks=by_default(name, "qwen3_6"))
            for name in TEMPLATES
            if name != "qwen3_instruct_2507"  # it never thinks
        ),
    ],
)
def test_an_export_prompts_as_in_training_and_can_be_trained_again(
    name: str, thinks: bool, where: str, tmp_path: Path
) -> None:
    source = TEMPLATES[name] if isinstance(TEMPLATES[name], str) else Path(TEMPLATES[name]).read_text()
    base, export = tmp_path / "base", tmp_path / "export"
    base.mkdir(), export.mkdir()
    first = encoder_for(base, source)
    if where == TEMPLATE:
        folder_with(base, None, **PLAIN)
        (base / TEMPLATE).write_text(source)
    spec = PRESETS["debug"]
    assets = run_assets(spec, "", str(base), "", thinks)
    for file, content in assets.items():
        (export / file).write_bytes(content)
    assert run_assets(spec, str(export), str(export), "", thinks) == assets  # trained once more: the same files
    theirs = transformers_tokenizer(export)
    ask = [say("user", "q")]
    for given, means in (({}, thinks), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)):
        text = theirs.apply_chat_template(ask, tokenize=False, add_generation_prompt=True, **given)
        assert first._template is not None
        assert text == first._template.render(ask, add_generation_prompt=True, enable_thinking=means)
    for empty_think, earlier in itertools.product(("masked", "supervised"), ("template", "mask", "unroll")):
        config = DataConfig(empty_think=empty_think, earlier_thinking=earlier)
        learned = []
        for folder in (base, export):
            tokenizer = load_tokenizer(folder)
            encoder = Encoder(tokenizer, ChatTemplate.from_folder(folder, tokenizer=tokenizer), config, 1 << 20)
            learned.append([documents_or_reason(encoder, *row) for row in ROWS.values()])
        assert learned[0] == learned[1]


def documents_or_reason(encoder: Encoder, messages: list[Any], tools: Any) -> Any:
    try:
        return [document.tolist() for document in encoder.encode(Example(messages=messages, tools=tools)).documents]
    except BadRecord as bad:
        return bad.kind
