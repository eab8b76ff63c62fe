import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS, examples, transformers_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_mi100.errors import UserError
from titan_mi100.text.chat_template import ChatTemplate, Rendered
from titan_mi100.text.load import tokenizer_files as files_of_tokenizer

QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "qwen3_tokenizer"
needs_qwen3 = pytest.mark.skipif(not QWEN3.exists(), reason="the real Qwen3 tokenizer is not on this machine")

# Our own words for what Qwen3's template does: reasoning is taken apart from the content, shown in the last turn only,
# where an empty think block stands for none.
SMALL = """\
{%- set last_user = namespace(index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set last_user.index = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought, answer = m.reasoning_content or '', m.content or '' %}
        {%- if not thought and '</think>' in answer %}
            {%- set thought = answer.split('</think>')[0].split('<think>')[-1] %}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + m.role + '\\n' }}
        {%- if loop.index0 > last_user.index %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' ~ (call | tojson) ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' ~ m.content ~ '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
END = "<|im_end|>"


def folder_with(path: Path, template: Any, **config: Any) -> Path:
    values = {"eos_token": END, "pad_token": {"content": "<|endoftext|>"}, "bos_token": None, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps({**values, **config}), encoding="utf-8")
    return path


def template(path: Path, source: Any = SMALL, **config: Any) -> ChatTemplate:
    return ChatTemplate.from_folder(folder_with(path, source, **config))


def say(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


@pytest.fixture(scope="module", params=["small", pytest.param("qwen3", marks=needs_qwen3)])
def qwen_like(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.from_folder(QWEN3) if request.param == "qwen3" else template(tmp_path_factory.mktemp("small"))


CALL = {"type": "function", "function": {"name": "f", "arguments": {"text": "a <|im_end|>\n", "n": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <b> & 'quoted'", "parameters": {}}}]

ASK, AGAIN = say("user", "q"), [say("user", "r"), say("assistant", "b")]
THOUGHT = say("assistant", "a", reasoning_content="why")
IN_CONTENT = say("assistant", "<think>\nwhy\n</think>\n\na")
OTHER_TURN = f"{END}\n<|im_start|>user\nd"

# A conversation, and for each of its assistant messages what the assistant generates before the turn's end.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "one turn": ([say("user", "hi"), say("assistant", "hello")], ["hello"]),
    "identical contents": (
        [say("system", "x"), say("user", "x"), say("assistant", "x"), say("user", "x"), say("assistant", "x")],
        ["x", "x"],
    ),
    "contents that are roles": (
        [say("user", "assistant\n"), say("assistant", "user"), say("user", "assistant"), say("assistant", "assistant")],
        ["user", "assistant"],
    ),
    "the end token in contents": (
        [say("user", f"a{END}\n<|im_start|>assistant\nb"), say("assistant", f"c{OTHER_TURN}"), say("user")],
        [f"c{OTHER_TURN}"],
    ),
    "contents that end with the end token": (
        [say("user", END), say("assistant", END), say("user", END), say("assistant", f"a{END}{END}")],
        [END, f"a{END}{END}"],
    ),
    "line breaks after an earlier answer": (
        [say("user", "\n\nq\n\n"), say("assistant", "a\n\n"), say("user", "r")],
        ["a\n\n"],
    ),
    "reasoning in its own field": (
        [ASK, say("assistant", "a", reasoning_content="\nwhy\n")],
        [IN_CONTENT["content"]],
    ),
    "reasoning under another name": ([ASK, say("assistant", "a", thinking="why")], [IN_CONTENT["content"]]),
    "reasoning in the content": ([ASK, IN_CONTENT], [IN_CONTENT["content"]]),
    "reasoning of an earlier turn is dropped": ([ASK, IN_CONTENT, *AGAIN], ["a", "b"]),
    "an empty think block in the content": ([ASK, say("assistant", "<think>\n\n</think>\n\na")], ["a"]),
    "an empty answer": ([ASK, say("assistant"), *AGAIN], ["", "b"]),
    "no user": ([say("system", "s"), ASK, say("assistant", "a", name=None)], ["a"]),
    "no assistant": ([say("system", "s"), ASK], []),
}


def generated(rendered: Rendered) -> list[str]:
    """What the assistant generates itself, turn by turn."""
    return [rendered.text[turn.answer : turn.stop] for turn in rendered.turns if turn.role == "assistant"]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_answers_are_what_the_assistant_generates(qwen_like: ChatTemplate, name: str) -> None:
    messages, expected = CONVERSATIONS[name]
    rendered = qwen_like.render_turns(messages)
    assert generated(rendered) == [turn + END for turn in expected]
    assert rendered.text == qwen_like.render(messages) and type(rendered.text) is str
    assert [(turn.message, turn.role) for turn in rendered.turns] == [(i, m["role"]) for i, m in enumerate(messages)]
    for turn in rendered.turns:
        if turn.role == "assistant":
            assert rendered.text[: turn.start].endswith("<|im_start|>assistant\n")
            assert rendered.text[turn.start : turn.answer] in ("", "<think>\n\n</think>\n\n")
            assert rendered.text[turn.stop] == "\n"
        else:
            assert turn.answer == turn.start and not turn.lost_reasoning
            own = messages[turn.message]["content"]
            assert rendered.text[turn.start : turn.stop] == (own + END if own else "")


def test_tool_calls_are_supervised_and_tool_results_are_not(qwen_like: ChatTemplate) -> None:
    calling = say("assistant", "", tool_calls=[CALL, CALL])
    messages = [ASK, calling, say("tool", f"result{END}"), say("assistant", "done")]
    rendered = qwen_like.render_turns(messages, tools=TOOLS)
    called, done = generated(rendered)
    assert called.startswith("<tool_call>") and called.endswith("</tool_call>" + END)
    assert called.count("<tool_call>") == 2 and "result" not in called
    assert done == "done" + END
    assert rendered.text[rendered.turns[2].start : rendered.turns[2].stop] == f"result{END}"
    assert rendered.text == qwen_like.render(messages, tools=TOOLS)


CALLING = say("assistant", "<think>why</think>", tool_calls=[CALL])


@pytest.mark.parametrize(
    ("messages", "lost"),
    [
        ([say("user"), THOUGHT], []),
        ([say("user"), IN_CONTENT], []),
        ([say("user"), THOUGHT, *AGAIN], [1]),
        ([say("user"), say("assistant", "a", thinking="why"), *AGAIN], [1]),
        ([say("user"), IN_CONTENT, *AGAIN], [1]),
        ([say("user"), say("assistant", "why</think>a"), *AGAIN], [1]),
        ([say("user"), say("assistant", "<think>why</think>"), *AGAIN], [1]),
        ([say("user"), CALLING, say("tool", "r"), say("assistant", "b")], []),
        ([say("user"), CALLING, say("tool", "r"), THOUGHT, *AGAIN], [1, 3]),
        ([say("user"), say("assistant", "a", reasoning_content=" \n"), *AGAIN], []),
        ([say("user"), say("assistant", "<think>\n\n</think>\n\na"), *AGAIN], []),
        ([say("user"), say("assistant", "<think>x", reasoning_content=""), *AGAIN], []),
        # a field comes before the content, which then stands as it is
        ([say("user"), say("assistant", "<think>x</think>a", reasoning_content="why"), *AGAIN], [1]),
        ([say("user"), say("assistant", "<think>x</think>a", reasoning_content="why")], []),
        ([say("user", "<think>why</think>q"), say("system", "s", reasoning_content="why"), *AGAIN], []),
    ],
)
def test_reasoning_that_the_template_leaves_out_is_told(
    qwen_like: ChatTemplate, messages: list[dict[str, Any]], lost: list[int]
) -> None:
    rendered = qwen_like.render_turns(messages)
    assert [turn.message for turn in rendered.turns if turn.lost_reasoning] == lost
    assert rendered.text == qwen_like.render(messages)


def test_a_thought_that_the_template_rewrites_together_with_the_answer_is_not_lost(tmp_path: Path) -> None:
    chat = template(tmp_path, chatml("{{ m.content | replace('w', 'W') }}"))
    rendered = chat.render_turns([say("user", "q"), IN_CONTENT, *AGAIN])
    assert generated(rendered) == ["<think>\nWhy\n</think>\n\na" + END, "b" + END]
    assert not any(turn.lost_reasoning for turn in rendered.turns)


pieces = st.sampled_from(
    [END, "<|im_start|>", "assistant", "user", "\n", " ", "<think>", "</think>", "a", "é", "<think>\n\n</think>\n\n"]
)
contents = st.lists(pieces, max_size=6).map("".join)


@settings(deadline=None, max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=3), system=st.none() | contents)
def test_spans_of_any_contents_hold_them_whole(
    qwen_like: ChatTemplate, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = [] if system is None else [say("system", system)]
    for question, answer in turns:
        messages += [say("user", question), say("assistant", "|" + answer.replace("</think>", "") + "|")]
    rendered = qwen_like.render_turns(messages)
    assert generated(rendered) == [message["content"] + END for message in messages if message["role"] == "assistant"]
    assert rendered.text == qwen_like.render(messages)


# -- byte-equal to transformers --


@needs_qwen3
def test_qwen3s_template_renders_as_transformers_renders_it() -> None:
    ours, theirs = ChatTemplate.from_folder(QWEN3), transformers_tokenizer(QWEN3)
    conversations = [messages for messages, _ in CONVERSATIONS.values()]
    conversations.append([ASK, say("assistant", "", tool_calls=[CALL]), say("tool", "r"), say("tool", "s")])
    variants: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"tools": TOOLS}]
    for messages, variables, prompt in product(conversations, variants, (False, True)):
        how = {"add_generation_prompt": prompt, **variables}
        assert ours.render(messages, **how) == theirs.apply_chat_template(messages, tokenize=False, **how)


EVERY_FEATURE = """{# comment #}
  {% for message in messages %}
    {% if message.skip %}{% continue %}{% endif %}
{{ bos_token }}{{ message.role | upper }}: {{ message.content | trim }}{{ eos_token }}
  {% endfor %}
{{ pad_token }} {{ unk_token }} {{ undefined_name }} {{ tools is none }} {{ documents is none }}
{{ messages[2].nothing is defined }}
{{ {"b": "<é>", "a": [1, 2.5, none, true]} | tojson }} {{ [1] | tojson(indent=2) }}
{{ {"b": 1, "a": 2} | tojson(sort_keys=true) }}
{{ strftime_now("%Y") }} {{ extra }} {{ namespace(x=1).x }} {{ dict(a=1).a }} {{ range(3) | list }} {{ "a" ~ 1 ~ "b" }}
{%- macro shout(text) %}{{ text }}!{% endmacro %}{{ shout(messages[0].content) }}
{% set block %}[{{ messages[0].content }}]{% endset %}{{ block }}
{% if add_generation_prompt %}go{% endif %}
"""


@needs_qwen3
def test_every_feature_of_the_template_language_renders_as_transformers_renders_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(QWEN3 / "tokenizer.json")
    tokens = {"unk_token": None, "bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}
    ours = template(tmp_path, EVERY_FEATURE, tokenizer_class="Qwen2Tokenizer", **tokens)
    theirs = transformers_tokenizer(tmp_path)
    messages = [say("user", "  a <b>&'\"  "), say("user", "gone", skip=True), say("assistant", "c", nothing=None)]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, extra="more")
    assert ours.render(messages, add_generation_prompt=True, extra="more") == expected


# -- where the template comes from --


def test_tokens_of_the_config_are_variables(tmp_path: Path) -> None:
    assert template(tmp_path, "{{ eos_token }} {{ pad_token }}").render([say("user")]) == END + " <|endoftext|>"


def test_a_missing_or_broken_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_folder(tmp_path)


# -- the template's file: as transformers --

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}\r\n" + PLAIN
BOTH = {"default": PLAIN, "tool_use": WITH_TOOLS}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        *((source, "chat_template") for source in (None, [{"name": "default", "template": "x"}], [], 3, BOTH)),
        ("{% for %}", "not valid Jinja"),
        (
            "{% generation %}{{ messages[0].content }}{% endgeneration %}",
            "marks what is learned .* data.loss says here; remove the two tags",
        ),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
    ],
)
def test_a_folder_without_a_valid_template_is_refused(tmp_path: Path, source: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        template(tmp_path, source)


def whole_folder(path: Path, source: Any) -> Path:
    """A folder with a tokenizer, which `transformers` can load."""
    (path / "tokenizer.json").write_bytes((ASSETS / "tokenizer" / "tokenizer.json").read_bytes())
    return folder_with(path, source, tokenizer_class="PreTrainedTokenizerFast", pad_token=END)


def test_the_file_is_read_before_the_config_and_several_templates_are_refused(tmp_path: Path) -> None:
    folder, messages = whole_folder(tmp_path, "x"), [say("user", "q"), say("assistant", "a")]
    (folder / "chat_template.jinja").write_bytes(WITH_TOOLS.encode())
    ours, theirs = ChatTemplate.from_folder(folder), transformers_tokenizer(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.render(messages, tools=tools) == expected != "x"
    (folder / "own.jinja").write_text("own {{ tools is none }}")
    assert ChatTemplate.from_folder(folder, folder / "own.jinja").render(messages, tools=TOOLS) == "own False"
    (folder / "additional_chat_templates").mkdir()
    for read in (ChatTemplate.from_folder, files_of_tokenizer):
        with pytest.raises(UserError, match=r"additional_chat_templates: only one chat template is read"):
            read(folder)


# -- errors of a template --


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('Only users may speak') }}", "Only users may speak"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ lipsum() }}", "lipsum makes random text"),
        ("{{ dict.update(messages[0], content='y') }}", "has no attribute 'update'"),
        ("{{ [1] | tojson(indent=messages) }}", "list"),
    ],
)
def test_an_error_of_the_template_is_a_user_error_with_its_own_message(tmp_path: Path, source: str, told: str) -> None:
    chat = template(tmp_path, source)
    for render in (chat.render, chat.render_turns):
        with pytest.raises(UserError, match=told) as error:
            render([say("user", "x")])
        assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("messages", [[], ["text"], [["user", "text"]]])
def test_what_is_not_a_conversation_is_refused(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(UserError, match="conversation"):
        template(tmp_path).render(messages)


# -- provenance: kept, or refused --


def chatml(body: str, header: str = "'<|im_start|>' + m.role + '\\n'") -> str:
    return (
        "{% for m in messages %}{{ " + header + " }}" + body + "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content | string }}",
        "{{ m['content'] ~ '' }}",
        "{{ '' + m.content + '' }}",
        "{{ m.content[:3] }}{{ m.content[3:-1] ~ m.content[-1] }}",
        "{{ m.content.strip().rstrip('x').lstrip() }}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
        "{% for line in m.content.splitlines(true) %}{{ line }}{% endfor %}",
        "{% for w in m.content.split(' ') %}{{ w }}{{ ' ' if not loop.last }}{% endfor %}",
        "{% for w in m.content.split() %}{{ w }} {% endfor %}",
        "{% for w in m.content.rsplit(' ', 1) %}{{ w }}{{ ' ' if loop.first }}{% endfor %}",
        "{% for part in m.content.partition('b') %}{{ part }}{% endfor %}",
        "{% for part in m.content.rpartition('b') %}{{ part }}{% endfor %}",
        "{{ m.content.removeprefix('zz').removesuffix('zz') }}",
        "{{ m.content | replace('a', 'A') }}",
        "{{ m.content.upper().lower() }}",
        "{{ m.content * 2 }}",
        "{% set t = m.content %}{% set t = t + '' %}{{ t }}",
        "{% set t %}{{ m.content }}{% endset %}{{ t }}",
        "{%- macro show(t) %}{{ t }}{% endmacro %}{{ show(m.content) }}",
        "{{ m.content | tojson }}",
        "{{ (m.content, 'x') | first }}",
        "{{ m.content if m.content is string else m.content[0].text }}",
    ],
)
def test_string_operations_of_templates_keep_the_spans_right(tmp_path: Path, body: str) -> None:
    chat = template(tmp_path, chatml(body))
    content = f"a <|im_end|> b {END} c"  # the end token inside: only provenance tells it from the turn's end
    messages = [say("user", content), say("assistant", content), say("user", content)]
    rendered = chat.render_turns(messages)
    assert rendered.text == chat.render(messages)
    for turn, whole in zip(rendered.turns, rendered.text.split("<|im_start|>")[1:], strict=True):
        shown, rest = rendered.text[turn.start : turn.stop], ["\n"]
        if turn.role == "user":  # whose end token is part of the turn only where it follows the content directly
            rest.append(f" {END}\n")
        assert whole in [f"{turn.role}\n{shown}{behind}" for behind in rest]


def test_contents_made_of_parts_are_traced(tmp_path: Path) -> None:
    chat = template(tmp_path, chatml("{% for part in m.content %}{{ part.text }}{% endfor %}"))
    parts = [{"type": "text", "text": f"one{END}"}, {"type": "text", "text": "two"}]
    rendered = chat.render_turns([say("user", parts), say("assistant", parts)])
    assert [rendered.text[turn.start : turn.stop] for turn in rendered.turns] == [f"one{END}two{END}"] * 2


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_known_under_each_of_its_names(tmp_path: Path, given: str, read: str) -> None:
    chat = template(tmp_path, chatml("{% if m." + read + " %}{{ m." + read + " }}: {% endif %}{{ m.content }}"))
    rendered = chat.render_turns([say("user", "q"), say("assistant", "a", **{given: "why"})])
    shows = read in (given, "reasoning_content", "thinking")  # `transformers` copies it to these two
    assert generated(rendered) == ["why: a" + END if shows else "a" + END]
    assert rendered.turns[1].lost_reasoning is not shows


@pytest.mark.parametrize("with_reasoning", [True, False])
def test_a_think_block_that_the_prompt_opens_is_part_of_the_header_where_the_turn_has_it(
    tmp_path: Path, with_reasoning: bool
) -> None:
    source = chatml("{% if m.reasoning %}{{ '<think>\\n' + m.reasoning + '\\n</think>\\n' }}{% endif %}{{ m.content }}")
    chat = template(tmp_path, source.replace("assistant\\n'", "assistant\\n<think>\\n'"))
    answer = say("assistant", "<think>\na", reasoning="why" if with_reasoning else None)
    rendered = chat.render_turns([say("user", "q"), answer])
    expected = "why\n</think>\n<think>\na" if with_reasoning else "<think>\na"
    assert generated(rendered) == [expected + END]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (chatml("{{ m.content }}", header="'<|im_start|>' + (m.role == 'user' and 'user' or 'model') + '\\n'"), "role"),
        (chatml("{{ m.content }}", header="'<|im_start|>assistant\\n'"), "role"),
        (chatml("{{ m.content }}", header="'[' + m.role + ']'"), "role"),
        (chatml("{{ '%s.' % m.content }}"), "rewrites its content"),
        (chatml("{{ [m.content, ''] | join }}"), "rewrites its content"),
        (chatml("nothing"), "drops or rewrites its content"),
        (chatml("{{ messages | tojson }}"), "role|rewrites its content"),
        (chatml("{{ m.content }}").replace("{{ '<|im_end|>\\n' }}", "\n"), "ends the turn"),
        (chatml("{{ m.content }}").replace("{{ '<|im_end|>\\n' }}", "{{ m.content }}\n"), "ends the turn"),
        (chatml("{{ m.content }}{{ messages[0].content }}"), "another message"),
        (chatml("{{ messages[0].content }}{{ m.content }}"), "another message"),
        ("{% for m in messages %}{{ m.role ~ '\\n' ~ m.content ~ eos_token }}{% endfor %}", "add_generation_prompt"),
    ],
)
def test_a_template_that_hides_provenance_is_refused(tmp_path: Path, source: str, told: str) -> None:
    chat = template(tmp_path, source)
    messages = [say("user", f"q{END}"), say("assistant", f"a{END}b")]
    chat.render(messages)
    with pytest.raises(UserError, match=told):
        chat.render_turns(messages)


def test_a_template_that_drops_tool_calls_is_refused(tmp_path: Path) -> None:
    messages = [say("user", "q"), say("assistant", "a", tool_calls=[CALL])]
    with pytest.raises(UserError, match="message 1: the template drops or rewrites its tool_calls"):
        template(tmp_path, chatml("{{ m.content }}")).render_turns(messages)
    template(tmp_path, chatml("{{ m.content }}")).render_turns([*messages[:1], say("assistant", "a", tool_calls=[])])


@pytest.mark.parametrize(
    "body",
    [
        "{% for c in m.tool_calls %}{{ {'call': c.function.name, 'with': c.function.arguments} | tojson }}{% endfor %}",
        "{% for c in m.tool_calls %}{{ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}",
        "{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k ~ v }}{% endfor %}{% endfor %}",
        "{{ m | tojson }}",
    ],
)
def test_a_call_whose_arguments_hold_the_end_token_is_supervised_whole(tmp_path: Path, body: str) -> None:
    messages = [say("user", "q"), say("assistant", "", tool_calls=[CALL])]
    rendered = template(tmp_path, chatml("{% if m.tool_calls %}" + body + "{% endif %}")).render_turns(messages)
    (call,) = generated(rendered)
    assert rendered.text.endswith(f"<|im_start|>assistant\n{call}\n") and call.count(END) == 2


def test_a_message_that_does_not_show_has_an_empty_turn(tmp_path: Path) -> None:
    chat = template(tmp_path, "{% for m in messages if m.role != 'note' %}" + chatml("{{ m.content }}")[22:])
    rendered = chat.render_turns([say("user", "q"), say("note", "n"), say("assistant", "a"), say("user")])
    assert [rendered.text[turn.start : turn.stop] for turn in rendered.turns] == ["q" + END, "", "a" + END, ""]
    assert chat.render_turns([say("note", "n")]).turns[0].stop == 0


# -- the generation prompt --


def test_the_prompt_is_asked_for_once_per_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    real = ChatTemplate._run
    monkeypatch.setattr(ChatTemplate, "_run", lambda *given: runs.append(given) or real(*given))
    chat, messages = template(tmp_path), [say("user", "q"), say("assistant", "a"), *AGAIN]
    for _ in range(3):
        chat.render_turns(messages)
        chat.render_turns(messages, tools=[{"name": "unhashable"}], enable_thinking=True)
        chat.render_turns(messages, tools=[{"name": "unhashable"}], enable_thinking=False)
    assert len(runs) == 3 * 3 + 2 * 6 + 2  # a conversation is one, a prompt six; the end of a turn two, once


def test_the_prompt_does_not_depend_on_the_order_of_conversations(tmp_path: Path) -> None:
    # Behind the role's line the header has one that names the tools, and one that opens a thought if it shall be deep.
    lines = "{{ (tools | tojson) + '\n' }}{{ '<think>\n' if deep }}"
    source = chatml("{% if m.role == 'assistant' %}" + lines + "{% endif %}{{ m.content }}")
    source = source.removesuffix("{% endif %}") + lines + "{% endif %}"
    messages = [say("user", "q"), say("assistant", "a")]
    variables: list[dict[str, Any]] = [
        {"tools": [{"a": 1}], "deep": True},
        {"tools": [{"a": True}], "deep": 1},
        {"tools": [{"a": 1.0}]},
        {"tools": [{"a": 1, "b": 2}]},
        {"tools": [{"b": 2, "a": 1}]},
        {"tools": ({"a": 1},), "extra": "x"},
        {},
    ]
    alone = [template(tmp_path, source).render_turns(messages, **each) for each in variables]
    assert [generated(each) for each in alone] == [["a" + END]] * len(variables)
    together = template(tmp_path, source)
    for order in (variables, variables[::-1]):
        assert [together.render_turns(messages, **each) for each in order] == alone
        alone.reverse()


def test_a_template_that_refuses_the_probe_is_asked_behind_the_conversations_own_beginning(tmp_path: Path) -> None:
    demand = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    chat = template(tmp_path, demand + chatml("{{ m.content }}"))
    for _ in range(2):
        assert generated(chat.render_turns([say("system", "s"), *AGAIN])) == ["b" + END]
    with pytest.raises(UserError, match="no system"):
        chat.render_turns(AGAIN)


def test_supervision_needs_an_eos_token(tmp_path: Path) -> None:
    chat = template(tmp_path, eos_token=None)
    with pytest.raises(UserError, match="eos_token is missing"):
        chat.render_turns([say("user", "q"), say("assistant", "a")])


def test_rendering_leaves_the_messages_alone(tmp_path: Path) -> None:
    messages = [say("user", "q"), say("assistant", "a", thinking="t", tool_calls=[CALL], name=None)]
    before = json.dumps(messages)
    template(tmp_path).render_turns(messages)
    assert json.dumps(messages) == before
