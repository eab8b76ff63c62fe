"""Conformance with `transformers`: the same text, the same tokens, and the same tokens supervised, in every mode.

The conversations are our own (assets/conversations.jsonl). What is supervised is reckoned here a second time, from
`transformers` alone (`Reference`): assistant turns from `{% generation %}` marks set into the template, other messages
and lost reasoning from a second rendering in which they are replaced by private-use characters. It shares no code with
`titan_mi100`, and marks characters in an array where that works with spans.

Markers inside of contents make nothing ambiguous: `transformers` counts the characters that have been rendered when a
mark opens and closes, and never searches the text. Tokens are where two ways are thinkable: a turn that begins with a
line break shares the token "\\n\\n" with its header, and an emoji can be several tokens of one character. Here a token
is supervised if it holds a supervised character, which is also what `transformers` does at a span's beginning; at its
end it takes only the first token of the last character, but an assistant's turn ends with the end token.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import as_shown, transformers_tokenizer

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.encode import Encoder, rounds, supervise, supervised_spans
from titan_mi100.data.formats import BadRecord, Example, choose_format, parse
from titan_mi100.errors import UserError
from titan_mi100.text.chat_template import ChatTemplate, Rendered
from titan_mi100.text.load import load_tokenizer
from titan_mi100.text.turns import Turn

transformers = pytest.importorskip("transformers")

ASSETS = Path(__file__).parent / "assets"
QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "qwen3_tokenizer"
END = "<|im_end|>"

LOSSES = ("assistant", "last", "last_round", "all", "weight")
EMPTY_THINK, EARLIER = (False, True), ("template", "mask", "unroll")
MODES = list(itertools.product(LOSSES, EMPTY_THINK, EARLIER))

# What the template would take, but the readers of files refuse: nothing to learn, or arguments that are no JSON.
REFUSED_BY_READERS = {
    "a closing think tag alone in the answer",
    "arguments as text that is no JSON",
    "blank contents",
    "empty answer",
    "empty answer earlier",
    "an opened think tag in the answer",
    "ends in a user turn without any answer",
    "only a user",
    "reasoning and nothing else",
    "system only",
    "weight 1 on empty messages",
}

# Of two think blocks the templates drop what stands between them, and a server would misread tags in a text, so such
# rows are refused when they are encoded.
CHANGED_BY_TEMPLATES = {
    "several think blocks in an answer",
    "an opened think tag in the answer",
    "reasoning that holds the tags",
    "quotes and backslashes in arguments",
    "arguments as text that is no JSON",
}

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
Mode = tuple[str, bool, str]  # loss, whether empty think blocks are learned, earlier thinking
Conversation = dict[str, Any]  # name, messages, tools
Document = tuple[str, np.ndarray]  # text; (characters,) bool: supervised


def hand_written() -> list[Conversation]:
    lines = (ASSETS / "conversations.jsonl").read_text(encoding="utf-8").split("\n")
    return [{"tools": None, **json.loads(line)} for line in lines if line]


# -- the reference --


class Marking(NamedTuple):
    """Where a template writes an assistant's turn, and in its words, whether and what thought it shows there."""

    opening: str  # what stands from here up to `calls` is written anew
    calls: str
    closing: str
    header: str
    shows: str
    thought: str
    content: str


MARKINGS = {
    "qwen3": Marking(
        opening="{%- if loop.index0 > ns.last_query_index %}",
        calls="{%- if message.tool_calls %}",
        closing="{{- '<|im_end|>\\n' }}",
        header="<|im_start|>assistant\\n",
        shows="loop.index0 > ns.last_query_index and (loop.last or reasoning_content)",
        thought="reasoning_content.strip('\\n')",
        content="content.lstrip('\\n') if shows else content",
    ),
    "asset": Marking(
        opening="{%- if loop.index0 > ns.last_user",
        calls="{%- for call in message.tool_calls",
        closing="{{- '<|im_end|>\\n' -}}",
        header="",
        shows="loop.index0 > ns.last_user and (loop.last or thought)",
        thought="thought.strip('\\n')",
        content="text",
    ),
}


def marked(source: str, marking: Marking, empty_think: bool) -> str:
    """The template with `{% generation %}` around each assistant's turn, an empty think block included or not."""
    opening = source.index(marking.opening)
    calls = source.index(marking.calls, opening)
    closing = source.index(marking.closing, calls)
    before, after = ("not shows", "shows") if empty_think else ("shows and not shown", "shows and shown")
    parts = [
        source[:opening],
        "{%- set shows = " + marking.shows + " %}{%- set shown = " + marking.thought + " %}",
        "{{- '" + marking.header + "' }}",
        "{%- if " + before + " and shows %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
        "{%- generation %}{%- if " + after + " %}{{- '<think>\\n' ~ shown ~ '\\n</think>\\n\\n' }}{%- endif %}",
        "{{- " + marking.content + " }}",
        source[calls:closing],
        "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}",
        source[closing + len(marking.closing) :],
    ]
    return "".join(parts)


class Described(NamedTuple):
    """A rendered conversation: for each message its characters, with and without the empty think block."""

    text: str
    whole: list[tuple[int, int]]
    answers: list[tuple[int, int]]
    lost: set[int]


class Reference:
    """What `transformers` makes of conversations, and what follows from that alone."""

    def __init__(self, folder: Path, marking: Marking) -> None:
        self.tokenizer = transformers_tokenizer(folder)
        source = self.tokenizer.chat_template
        self.marked = {empty_think: marked(source, marking, empty_think) for empty_think in (False, True)}

    def render(self, messages: list[Any], tools: Any, **variables: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables)

    def documents(self, messages: list[Any], tools: Any) -> Iterator[tuple[Mode, list[Document]]]:
        """Each mode with the documents that it trains on."""
        whole = self._described(messages, tools)
        # A cut comes behind each assistant turn where, of assistant and user, the user speaks next.
        roles = "".join(message["role"][0] for message in messages)
        cuts = [i + 1 for i, role in enumerate(roles) if role == "a" and re.match("[^au]*u", roles[i + 1 :])]
        cuts = [0, *(cuts if whole.lost else []), len(messages)]
        unrolled = [(self._described(messages[:stop], tools), first) for first, stop in itertools.pairwise(cuts[:-1])]
        unrolled.append((whole, cuts[-2]))
        for mode in MODES:
            cut = unrolled if mode[2] == "unroll" else [(whole, 0)]
            yield mode, [(each.text, self._supervised(each, messages, first, *mode)) for each, first in cut]

    def tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _supervised(
        self, each: Described, messages: list[Any], first: int, loss: str, empty_think: bool, earlier: str
    ) -> np.ndarray:
        on = np.zeros(len(each.text), dtype=bool)
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if loss == "all":
            on[each.whole[first - 1][1] if first else 0 :] = True
        for i in range(first, len(each.whole)):
            role, weight = messages[i]["role"], messages[i].get("weight")
            if earlier != "template" and i in each.lost:
                weight = 0
            start, stop = each.whole[i] if empty_think or loss == "all" else each.answers[i]
            if loss == "all" and weight == 0:
                on[start:stop] = False
            if loss == "weight" and weight == 1:
                on[start:stop] = True
            later = [message["role"] for message in messages[i:]]
            chosen = {"assistant": True, "last": i == last, "last_round": "user" not in later}.get(loss, False)
            if chosen and role == "assistant" and weight != 0:
                on[start:stop] = True
        return on

    def _described(self, messages: list[Any], tools: Any) -> Described:
        text = self.render(messages, tools)
        others, (whole, answers) = self._others(messages, tools, text), self._assistants(messages, tools, text)
        both = []
        for turns in (iter(whole), iter(answers)):
            both.append([next(turns) if m["role"] == "assistant" else others[i] for i, m in enumerate(messages)])
            assert next(turns, None) is None
        return Described(text, both[0], both[1], self._lost(messages, tools))

    def _assistants(self, messages: list[Any], tools: Any, text: str) -> list[list[tuple[int, int]]]:
        """The assistant's turns in order, with and without the empty think block."""
        found = []
        for empty_think in (True, False):
            texts, spans = transformers.utils.chat_template_utils.render_jinja_template(
                [as_shown(messages)],
                tools=tools,
                chat_template=self.marked[empty_think],
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
            assert texts == [text]  # the marks changed nothing else
            found.append(spans[0])
        return found

    def _others(self, messages: list[Any], tools: Any, text: str) -> list[tuple[int, int]]:
        """The characters of the messages that are not the assistant's, and an end token directly behind them."""
        replaced, contents = [], []
        for i, message in enumerate(messages):
            # A user's turn that is a tool's result is no question to Qwen3's template, so those tags have to stay.
            before, content, behind = ("", message["content"], "")
            if content.startswith("<tool_response>") and content.endswith("</tool_response>"):
                before, content, behind = "<tool_response>", content[15:-16], "</tool_response>"
            contents.append((before, content, behind))
            own = message["role"] != "assistant" and message["content"]
            replaced.append({**message, "content": f"{before}\ue000{i}\ue001{behind}"} if own else message)
        spans, at, rebuilt = [(0, 0)] * len(messages), 0, ""
        pieces = re.split("\ue000([0-9]+)\ue001", self.render(replaced, tools))
        for piece, number, follows in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
            before, content, behind = contents[int(number)]
            rebuilt += piece + content
            at = len(rebuilt)
            ended = len(END) if follows.removeprefix(behind).startswith(END) else 0
            spans[int(number)] = (at - len(content) - len(before), at + len(behind) + ended)
        assert rebuilt + pieces[-1] == text
        return spans

    def _lost(self, messages: list[Any], tools: Any) -> set[int]:
        """The assistant's messages whose reasoning is missing from the text."""
        replaced, reasoned = [], set()
        for i, message in enumerate(messages):
            sign, reasoning = f"\ue002{i}\ue003", message_reasoning(message)
            if reasoning is not None and reasoning.strip():
                message = {**message, "reasoning_content": sign}
                reasoned.add(i)
            elif message["role"] == "assistant":
                content = re.sub(THOUGHT, rf"\g<tag>{sign}</think>", message["content"])
                if content != message["content"]:
                    reasoned.add(i)
                message = {**message, "content": content}
            replaced.append(message)
        text = self.render(replaced, tools) if reasoned else ""
        return {i for i in reasoned if f"\ue002{i}\ue003" not in text}


# What a think block holds that says something; the first may lack its opening tag.
THOUGHT = re.compile(r"(?s)(?P<tag>\A|<think>)(?=(?:(?!</?think>)\s)*(?!</?think>)\S)(?:(?!</?think>).)+</think>")


def message_reasoning(message: dict[str, Any]) -> str | None:
    if message["role"] != "assistant":
        return None
    return next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)


# -- the candidate --


class Candidate:
    """`titan_mi100`."""

    def __init__(self, folder: Path) -> None:
        self.template, self.tokenizer = ChatTemplate.from_folder(folder), load_tokenizer(folder)

    def documents(self, messages: list[Any], tools: Any, modes: list[Mode]) -> list[list[tuple[str, np.ndarray]]]:
        """As the reference's, per mode; those without a supervised character are left out."""
        once = RenderedOnce(self.template)
        found = []
        for mode in modes:
            documents = []
            for rendered, spans in supervise(once, messages, *mode, tools=tools):
                on = np.zeros(len(rendered.text), dtype=bool)
                for start, stop in spans:
                    assert start < stop and not on[start:stop].any()
                    on[start:stop] = True
                documents.append((rendered.text, on))
            found.append(documents)
        return found

    def tokens(self, messages: list[Any], tools: Any, mode: Mode) -> list[tuple[list[int], list[bool]]]:
        """Token ids, and which are supervised, of every document, as training gets them."""
        loss, empty_think, earlier = mode
        empty = "supervised" if empty_think else "masked"
        config = DataConfig(loss=loss, empty_think=empty, earlier_thinking=earlier)
        encoder = Encoder(self.tokenizer, self.template, config, 1 << 20)
        # The reference takes special tokens in messages for what they are; here such rows are refused before.
        encoder._without_marks = lambda messages, tools: (messages, tools, [])  # type: ignore[method-assign]
        try:
            encoded = encoder.encode(Example(messages=messages, tools=tools))
        except BadRecord as error:
            if error.kind != "nothing is supervised":
                raise
            return []
        return [((values >> 1).tolist(), (values & 1).astype(bool).tolist()) for values in encoded.documents]


class RenderedOnce(ChatTemplate):
    """A template that keeps what it rendered: the modes differ in what they do with it only."""

    def __init__(self, template: ChatTemplate) -> None:
        self._real, self._kept = template, {}  # type: ignore[var-annotated]

    def render_turns(self, messages: Any, **variables: Any) -> Rendered:
        if len(messages) not in self._kept:
            self._kept[len(messages)] = self._real.render_turns(messages, **variables)
        return self._kept[len(messages)]


# -- the comparison --


CHANGED = "the chat template changes it"  # the kind of a row that loses text in its rendering


class Pair(NamedTuple):
    reference: Reference
    candidate: Candidate
    quotes: bool  # the template writes arguments that are JSON text in quotes, as one text
    changed: set[str]  # conversations that were refused as CHANGED

    def is_changed(self, conversation: Conversation) -> bool:
        """Whether the template drops text of the conversation, or quotes arguments."""
        calls = [call for message in conversation["messages"] for call in message.get("tool_calls") or ()]
        as_text = any(isinstance(call.get("function", call)["arguments"], str) for call in calls)
        return conversation["name"] in CHANGED_BY_TEMPLATES or (self.quotes and as_text)

    def texts_differ(self, messages: list[Any], tools: Any, all_variables: bool) -> bool:
        """Whether a way to render gives another text."""
        thinking: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True}]
        ways = [{}, *({"add_generation_prompt": True, **each} for each in thinking), *thinking[1:]]
        return any(
            self.candidate.template.render(messages, tools=tools, **way)
            != self.reference.render(messages, tools, **way)
            for way in ways[: None if all_variables else 3]
        )

    def modes_that_differ(
        self,
        messages: list[Any],
        tools: Any,
        in_tokens: list[Mode],
        read: tuple[list[Any], Any] | None = None,
    ) -> list[Mode]:
        """Modes in which documents differ: their texts, which characters are supervised, for some which tokens.

        `read`: messages and tools as a format's reader gives them, for the candidate.
        """
        differ = []
        ours_messages, ours_tools = read or (messages, tools)
        found = self.candidate.documents(ours_messages, ours_tools, MODES)
        for (mode, documents), ours in zip(self.reference.documents(messages, tools), found, strict=True):
            expected = [(text, on) for text, on in documents if on.any()]
            same = [(text, on.tolist()) for text, on in expected] == [(text, on.tolist()) for text, on in ours]
            if same and mode in in_tokens:
                try:
                    same = self._with_tokens(expected) == self.candidate.tokens(ours_messages, ours_tools, mode)
                except BadRecord as error:
                    if error.kind != CHANGED:
                        raise
                    self.changed.add(json.dumps(messages))
            if not same:
                differ.append(mode)
        return differ

    def _with_tokens(self, documents: list[Document]) -> list[tuple[list[int], list[bool]]]:
        """The reference's tokens; a document's first is never learned, so it alone is nothing to learn."""
        encoded = []
        for text, on in documents:
            ids, offsets = self.reference.tokens(text)
            supervised = [bool(on[start:stop].any()) for start, stop in offsets]
            if any(supervised[1:]):
                encoded.append((ids, supervised))
        return encoded


REAL = [pytest.mark.skipif(not QWEN3.exists(), reason="no real Qwen3 tokenizer here"), pytest.mark.full]


@pytest.fixture(scope="module", params=["asset", pytest.param("qwen3", marks=REAL)])
def pair(request: pytest.FixtureRequest) -> Pair:
    folder = ASSETS / "tokenizer" if request.param == "asset" else QWEN3
    is_ours = request.param == "asset"
    return Pair(Reference(folder, MARKINGS[request.param]), Candidate(folder), is_ours, set())


def test_every_conversation_is_rendered_and_tokenised_as_transformers_does_it(pair: Pair) -> None:
    conversations = hand_written()
    assert len(conversations) >= 100 and len({each["name"] for each in conversations}) == len(conversations)
    for name, messages, tools in ((each["name"], each["messages"], each["tools"]) for each in conversations):
        assert not pair.texts_differ(messages, tools, all_variables=True), name
        for prompt in (False, True):
            text = pair.candidate.template.render(messages, add_generation_prompt=prompt, tools=tools)
            theirs = pair.reference.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, return_dict=True
            )
            assert pair.candidate.tokenizer.encode(text) == theirs["input_ids"], name


@pytest.mark.full
def test_every_conversation_is_supervised_in_every_mode_as_the_reference_says(pair: Pair) -> None:
    conversations, different = hand_written(), []
    for each in conversations:
        differ = pair.modes_that_differ(each["messages"], each["tools"], MODES)
        different += [(each["name"], mode) for mode in differ]
    assert not different
    assert pair.changed == {json.dumps(each["messages"]) for each in conversations if pair.is_changed(each)}


SPEAKERS = {"user": "human", "assistant": "gpt"}  # of ShareGPT


def in_format(name: str, conversation: Conversation) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The conversation as a row of that format, and the messages that it means; None: the format cannot say it."""
    messages, tools = conversation["messages"], conversation["tools"]
    roles = "".join(message["role"][0] for message in messages)
    plain = all(message.keys() == {"role", "content"} for message in messages)
    turns = messages[1:] if roles[0] == "s" else messages
    system = {"system": messages[0]["content"]} if roles[0] == "s" and messages[0]["content"].strip() else {}
    alternating = plain and not tools and re.fullmatch("s?(ua)+", roles) and (roles[0] != "s" or system)
    if name == "messages":
        return {"messages": messages, "tools": tools}, messages
    if name == "sharegpt" and all(
        message.keys() <= {"role", "content", "weight"}
        or (message.keys() == {"role", "content", "tool_calls"} and not message["content"])
        for message in messages
    ):
        said = []
        for message in messages:
            speaker, value = SPEAKERS.get(message["role"], message["role"]), message["content"]
            if "tool_calls" in message:
                calls = [call.get("function", call) for call in message["tool_calls"]]
                speaker, value = "function_call", json.dumps(calls)
            said.append({"from": speaker, "value": value} | {k: message[k] for k in message.keys() & {"weight"}})
        return {"conversations": said, "tools": json.dumps(tools) if tools else None}, messages
    if name == "alpaca" and alternating:
        pairs = [(turns[i]["content"], turns[i + 1]["content"]) for i in range(0, len(turns), 2)]
        row = {"instruction": pairs[-1][0], "output": pairs[-1][1], "history": pairs[:-1], **system}
        return row, messages
    if name == "columns" and alternating and len(turns) == 2:
        return {"question": turns[0]["content"], "answer": turns[1]["content"], "system": "", **system}, messages
    if name == "prompt_completion" and roles[-1] == "a" and len(roles) > 1:
        meant = [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages[:-1]]
        return {"prompt": messages[:-1], "completion": messages[-1:], "tools": tools}, [*meant, messages[-1]]
    return None


@pytest.mark.parametrize("name", ["messages", "sharegpt", "alpaca", "columns", "prompt_completion"])
def test_every_format_means_the_same_conversation_in_every_mode(name: str, pair: Pair, tmp_path: Path) -> None:
    different, read, refused = [], 0, set()
    columns = {"prompt_column": "question", "response_column": "answer", "system_column": "system"}
    form = choose_format("", DataConfig(format=name, **(columns if name == "columns" else {})))
    for each in hand_written():
        if (said := in_format(name, each)) is None:
            continue
        row, meant = said
        try:
            example = form.read(parse(json.dumps(row).encode()))
        except BadRecord:
            refused.add(each["name"])
            continue
        read += 1
        differ = pair.modes_that_differ(meant, each["tools"], [], (example.messages, example.tools))
        different += [(each["name"], mode) for mode in differ]
    assert refused <= REFUSED_BY_READERS
    assert not different and read >= {"messages": 99, "sharegpt": 60, "alpaca": 20, "columns": 10}.get(name, 60)


def unweighted(conversation: Conversation) -> list[dict[str, Any]]:
    messages = conversation["messages"]
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def test_assistant_loss_is_transformers_own_mask(pair: Pair) -> None:
    """`return_assistant_tokens_mask` itself, with the marked template and nothing of ours in between."""
    kept = [each for each in hand_written() if not pair.is_changed(each)]
    for each, empty_think in itertools.product(kept, EMPTY_THINK):
        messages = unweighted(each)
        theirs = pair.reference.tokenizer.apply_chat_template(
            messages,
            tools=each["tools"],
            chat_template=pair.reference.marked[empty_think],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        expected = [(theirs["input_ids"], list(map(bool, theirs["assistant_masks"])))]
        ours = pair.candidate.tokens(messages, each["tools"], ("assistant", empty_think, "template"))
        assert ours == [document for document in expected if any(document[1])], each["name"]


def test_no_unrolled_turn_has_lost_its_reasoning_and_none_is_learned_twice(pair: Pair) -> None:
    unrolled = 0
    for each in hand_written():
        messages, template = unweighted(each), pair.candidate.template
        documents = supervise(template, messages, "assistant", False, "unroll", tools=each["tools"])
        learned = [
            turn for rendered, spans in documents for turn in rendered.turns if (turn.answer, turn.stop) in spans
        ]
        assert not any(turn.lost_reasoning for turn in learned), each["name"]
        for i, message in enumerate(messages):
            # Where no user asks, Qwen3's template shows no reasoning at all.
            is_shown = not template.render_turns(messages[: i + 1]).turns[i].lost_reasoning
            times = message["role"] == "assistant" and is_shown
            assert [turn.message for turn in learned].count(i) == times, each["name"]
        unrolled += len(documents) > 1
    assert unrolled > 10


# -- random conversations --

PIECES = [
    *("word", " word", "two words", "\n", "\n\n", " ", "\t", ".", "é", "e\u0301", "🙂", "漢", "مرحبا", "12", "-3.5"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", END, "<|im_start|>", "assistant", "user\n", "<tool_call>"),
    *("</tool_call>", "<tool_response>", "</tool_response>", "{{ x }}", "{% if %}", '"', "\\", "\\n", "'", "&lt;"),
    "<b>",
]
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": f'"é" {END}', "parameters": {"a": [1, None]}}}
]


def random_text(chance: random.Random) -> str:
    return "".join(chance.choices(PIECES, k=chance.choice((0, 1, 1, 2, 3, 5))))


def random_message(chance: random.Random, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": random_text(chance)}
    if role == "user" and chance.random() < 0.1:
        message["content"] = f"<tool_response>{random_text(chance)}</tool_response>"
    if role == "assistant":
        if chance.random() < 0.3:
            message["content"] = f"<think>{random_text(chance)}</think>{message['content']}"
        if chance.random() < 0.3:
            message[chance.choice(("reasoning_content", "reasoning_content", "thinking"))] = random_text(chance)
        if chance.random() < 0.3:
            arguments = [{random_text(chance): chance.choice((1, None, [random_text(chance)]))}, random_text(chance)]
            calls = [{"name": "look", "arguments": chance.choice(arguments)} for _ in range(chance.choice((1, 2)))]
            message["tool_calls"] = [chance.choice((call, {"function": call})) for call in calls]
    if chance.random() < 0.2:
        message["weight"] = chance.choice((0, 1))
    return message


def random_conversation(chance: random.Random) -> tuple[list[dict[str, Any]], Any]:
    roles = chance.choice(("", "", "s")) + "".join(
        chance.choice(("ua", "ua", "ua", "uata", "uatta", "a", "u", "s")) for _ in range(chance.choice((1, 1, 2, 2, 3)))
    )
    return [random_message(chance, ROLES[role]) for role in roles], chance.choice((None, None, TOOLS))


def test_random_conversations_agree_with_the_reference(pair: Pair, full: bool) -> None:
    chance, modes = random.Random(20261121), itertools.cycle(MODES)
    for number in range(1_000 if full else 100):
        messages, tools = random_conversation(chance)
        assert not pair.texts_differ(messages, tools, all_variables=False), (number, messages, tools)
        differ = pair.modes_that_differ(messages, tools, [next(modes)])
        assert not differ, (number, differ, messages, tools)


def test_what_transformers_refuses_is_refused(pair: Pair) -> None:
    for messages in ([{"role": "user"}], [{"role": "assistant", "tool_calls": [1]}], [{"content": "x"}]):
        try:
            expected = pair.reference.render(messages, None)
        except Exception:
            with pytest.raises(UserError):
                pair.candidate.template.render(messages)
        else:
            assert pair.candidate.template.render(messages) == expected


# -- decisions, by hand --

TEXT = "S|Q1|A1!|Q2|?A2!"  # the second answer stands behind an empty think block, "?"
TURNS = [
    Turn(0, "system", 0, 1, 0, False),
    Turn(1, "user", 2, 4, 2, False),
    Turn(2, "assistant", 5, 8, 5, True),
    Turn(3, "user", 9, 11, 9, False),
    Turn(4, "assistant", 12, 16, 13, False),
]


@pytest.mark.parametrize(
    ("weights", "how", "learned"),
    [
        ({}, {}, ["A1!", "A2!"]),
        ({}, {"empty_think": True}, ["A1!", "?A2!"]),
        ({}, {"earlier_thinking": "mask"}, ["A2!"]),
        ({}, {"first": 3}, ["A2!"]),
        ({4: 0}, {}, ["A1!"]),
        ({2: 1, 1: 1}, {}, ["A1!", "A2!"]),
        ({}, {"loss": "last"}, ["A2!"]),
        ({4: 0}, {"loss": "last"}, []),
        ({}, {"loss": "all"}, [TEXT]),
        ({0: 0, 2: 0}, {"loss": "all"}, ["|Q1|", "|Q2|?A2!"]),
        ({4: 0}, {"loss": "all"}, ["S|Q1|A1!|Q2|"]),
        ({}, {"loss": "all", "earlier_thinking": "mask"}, ["S|Q1|", "|Q2|?A2!"]),
        ({}, {"loss": "all", "first": 3}, ["|Q2|?A2!"]),
        ({}, {"loss": "weight"}, []),
        ({0: 1, 3: 1, 4: 1, 2: 0}, {"loss": "weight"}, ["S", "Q2", "A2!"]),
        ({3: 1, 4: 1}, {"loss": "weight", "empty_think": True, "first": 4}, ["?A2!"]),
    ],
)
def test_what_is_learned(weights: dict[int, int], how: dict[str, Any], learned: list[str]) -> None:
    messages: list[dict[str, Any]] = [{"role": turn.role, "content": "x"} for turn in TURNS]
    for message, weight in weights.items():
        messages[message]["weight"] = weight
    spans = supervised_spans(Rendered(TEXT, TURNS), messages, **how)
    assert [TEXT[start:stop] for start, stop in spans] == learned


@pytest.mark.parametrize(("loss", "weight"), [("weight", 1), ("all", 0)])
def test_a_weight_on_a_message_that_does_not_show_is_refused(loss: str, weight: int) -> None:
    hidden = Rendered("S", [Turn(0, "system", 0, 1, 0, False), Turn(1, "note", 1, 1, 1, False)])
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    messages.append({"role": "note", "content": "n", "weight": weight})
    with pytest.raises(UserError, match=rf"message 1 \(note\) has weight {weight}, .* drops or rewrites"):
        supervised_spans(hidden, messages, loss)
    messages[1]["content"] = " "
    assert supervised_spans(hidden, messages, loss) == ([] if loss == "weight" else [(0, 1)])


@pytest.mark.parametrize(
    ("roles", "cuts"),
    [
        ("ua", [(2, 0)]),
        ("suaua", [(3, 0), (5, 3)]),
        ("uatataua", [(6, 0), (8, 6)]),
        ("uatua", [(2, 0), (5, 2)]),
        ("uasuua", [(2, 0), (6, 2)]),
        ("aaua", [(2, 0), (4, 2)]),
        ("uau", [(2, 0), (3, 2)]),
        ("uuaa", [(4, 0)]),
        ("u", [(1, 0)]),
    ],
)
def test_a_round_ends_behind_the_last_answer_to_one_user(roles: str, cuts: list[tuple[int, int]]) -> None:
    messages = [{"role": ROLES[role]} for role in roles]
    for lost, expected in ((True, cuts), (False, [(len(roles), 0)])):
        turns = [Turn(i, message["role"], 0, 0, 0, lost and i == 0) for i, message in enumerate(messages)]
        assert rounds(messages, Rendered("", turns)) == expected
