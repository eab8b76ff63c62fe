"""Runs a model's own chat template in a sandbox, and finds each message in the rendered text.

Messages are found by provenance, not by searching the text: each string of a message enters the template as a `Traced`,
which keeps the source of each character through the template's string operations. So text in a message that looks like
a turn's header cannot mislead it.
"""

import json
import os
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, cycle, pairwise
from pathlib import Path
from typing import Any

import jinja2

from titan_mi100.errors import UserError
from titan_mi100.files.child import call_in_child
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain, refuse_code
from titan_mi100.files.templates import read_template, template_files
from titan_mi100.text.base import named_tokens
from titan_mi100.text.traced import MIXED, Source, Traced, TracingEnvironment, runs_of, trace
from titan_mi100.wording import shortened

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names that `transformers` accepts, by priority
_REASONING = _REASONING_FIELDS[0]  # `Source.field` of all reasoning, also of think blocks in the content
_PROBE = ({"role": "user", "content": "Hello"},)
_MOST_TRIED = 1 << 20  # characters that a template may render from _TRIED
_TRIED = ({"role": "system", "content": "Be brief."}, *_PROBE, {"role": "assistant", "content": "Hello!"}, *_PROBE)


@dataclass(frozen=True)
class Turn:
    """The characters `[start, stop)` of one message in the text; empty if the template shows nothing of it."""

    message: int  # index
    role: str
    start: int  # assistant: after the turn's header; others: their first own character (not that of the role)
    stop: int  # assistant: after the turn's eos_token; others: after their last own character and an eos_token there
    answer: int  # `start`, or the end of an empty think block that the template itself wrote there
    lost_reasoning: bool  # the assistant's message has reasoning, but the template left it out of the text
    reasons: bool = False  # the text shows reasoning of the assistant's message
    # Spans of characters that the template marks with {% generation %}; None: the template has no such marks.
    marked: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and a turn for each of its messages."""

    text: str
    turns: list[Turn]


@dataclass(frozen=True)
class _Prompt:
    header: str  # begins an assistant's turn
    empty_think: str  # follows the header if enable_thinking is False; "" if the template does not know the variable


class ChatTemplate:
    """A folder's Jinja chat template, run as `transformers` runs it. Build it with `from_folder`."""

    _render_in_child: Callable[..., str]  # renders a prompt in the child process

    def __init__(self, file: Path, sources: Mapping[str, str], special_tokens: dict[str, str]) -> None:
        """
        Args:
            file: where the template came from, for messages.
            sources: Jinja texts: "default", and optionally "tool_use" for conversations with tools.
            special_tokens: variables of the template, such as eos_token.
        """
        self._file = file
        self._special_tokens = special_tokens
        self.is_dated = any("strftime_now" in source for source in sources.values())
        try:
            self._templates = {name: TracingEnvironment().from_string(source) for name, source in sources.items()}
        except Exception as error:  # from Jinja, or from Python for code that it cannot compile
            reason = str(error) or type(error).__name__
            raise UserError(f"{file}: the chat template is not valid Jinja: {reason}; correct or replace it") from error
        self._probed = lru_cache(maxsize=256)(self._probe)

    @classmethod
    def from_folder(cls, path: str | Path, template: str | Path = "", eos_token: str = "") -> "ChatTemplate":
        """Read a folder's templates: `chat_template.jinja` and `additional_chat_templates/`, or if there are none,
        those in `tokenizer_config.json`.

        Args:
            path: an HF tokenizer folder, or a tokenizer file in such a folder.
            template: a Jinja file to use instead, for all conversations.
            eos_token: the tokenizer's end token, in case `tokenizer_config.json` is missing or does not name it.

        Returns:
            The compiled template, with the special tokens of `tokenizer_config.json` as its variables.

        Raises:
            UserError: a file is missing or malformed, there is no template, or it needs too much memory or time.
        """
        call_in_child("text.chat_template:try_template", Path(path), str(template), eos_token)
        made = cls._read(path, template, eos_token)
        made._render_in_child = partial(
            call_in_child, "text.chat_template:render_apart", Path(path), str(template), eos_token
        )
        return made

    @classmethod
    def _read(cls, path: str | Path, template: str | Path, eos_token: str) -> "ChatTemplate":
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        config_file = folder / "tokenizer_config.json"
        # A link that the user names is followed. A link inside a model folder is not: it came with the folder.
        files = {"default": Path(os.path.realpath(template))} if template else template_files(folder)
        try:
            # A folder must have a tokenizer_config.json; beside a single tokenizer file it is optional.
            needed = folder == Path(path) or os.path.lexists(config_file)
            config = json.loads(read_plain(config_file, LARGEST_CONFIG).decode("utf-8")) if needed else {}
            refuse_code(config_file, config)
            sources = config.get("chat_template")
            if isinstance(sources, list):
                sources = {entry["name"]: entry["template"] for entry in sources}
            elif not isinstance(sources, dict):
                sources = {"default": sources}
            special_tokens = named_tokens(config)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{config_file}: cannot be used ({error!r}); copy the checkpoint's tokenizer files"
            raise UserError(what) from error
        if files:
            sources = {name: read_template(file) for name, file in files.items()}
        used = {name: sources[name] for name in ("default", "tool_use") if name in sources}
        if "default" not in used or not all(isinstance(source, str) for source in used.values()):
            raise UserError(
                f"{config_file}: no (default) chat_template, and no chat_template.jinja; add one of them, or name a "
                "Jinja file in model.chat_template"
            )
        if eos_token:
            special_tokens.setdefault("eos_token", eos_token)
        return cls(Path(template) if template else files.get("default", config_file), used, special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Render a conversation, byte for byte as `apply_chat_template(tokenize=False)` does.

        Args:
            messages: dicts of JSON values, with a `role` and all other keys that the template reads.
            add_generation_prompt: end with the header of an assistant's turn.
            variables: further variables of the template, such as `tools` or `enable_thinking`.

        Returns:
            The text.

        Raises:
            UserError: the template refuses the conversation, or fails.
        """
        return str.__str__(self._run(self._prepared(messages), add_generation_prompt, variables))

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """`render` with add_generation_prompt, in the child process with limits on memory and time."""
        return self._render_in_child(messages, variables)

    def render_turns(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        """Render a conversation and find each message in the text.

        Args:
            messages, variables: see `render`.

        Returns:
            The same text as from `render`, and one turn per message, in order.

        Raises:
            UserError: from `render`; or the template rewrites an assistant's message so that the source of its
                characters is lost. (Rewritten text of other messages counts as the template's own.)
        """
        prepared, environment = self._prepared(messages), self._template(variables).environment
        assert isinstance(environment, TracingEnvironment)
        environment.issued.clear()
        text = self._run([_traced(i, message) for i, message in enumerate(prepared)], False, variables)
        finder = _TurnFinder(text, self._special_tokens.get("eos_token") or "")
        if environment.issued != {number for _, _, number in finder.marks}:
            raise UserError(f"{self._file}: rewrites or drops text inside {{% generation %}}; mark the final text")
        prompt: _Prompt | None = None
        turns: list[Turn] = []
        for i, message in enumerate(prepared):
            if message.get("role") != "assistant":
                turns.append(finder.other(i, str(message.get("role", ""))))
                continue
            if not finder.eos_token:
                config_file = self._file.parent / "tokenizer_config.json"
                raise UserError(f"{config_file}: eos_token is missing; add the token that ends a turn")
            prompt = prompt or self._prompt(prepared[:i], variables)
            try:
                turns.append(finder.assistant(i, message, prompt))
            except _Untraceable as problem:
                raise UserError(
                    f"{self._file}: message {i}: {problem}, so the assistant's own text cannot be located; "
                    "use a template that writes each assistant message as Qwen3's does"
                ) from problem
        if environment.has_marks:
            turns = self._marked(turns, finder)
        return Rendered(finder.text, turns)

    def _marked(self, turns: list[Turn], finder: "_TurnFinder") -> list[Turn]:
        """The turns, with the spans that the template marks in each assistant turn.

        Raises:
            UserError: a mark covers text outside a single assistant turn.
        """
        own = [turn for turn in turns if turn.role == "assistant"]  # ascending and disjoint, so bisect finds owners
        starts, stops = [turn.start for turn in own], [turn.stop for turn in own]
        marks: dict[int, list[tuple[int, int]]] = {turn.message: [] for turn in own}
        for start, stop, _ in finder.marks:
            owners = {turn.message for turn in own[bisect_right(stops, start) : bisect_left(starts, stop)]}
            if len(owners) != 1 or not finder.messages_between(start, stop) <= owners:
                raise UserError(
                    f"{self._file}: {{% generation %}} marks {shortened(repr(finder.text[start:stop]))}, which is "
                    "not a single assistant message; use a template that marks each of them separately"
                )
            marks[owners.pop()].append((start, stop))
        return [replace(turn, marked=tuple(marks[turn.message])) if turn.message in marks else turn for turn in turns]

    def _prompt(self, prefix: list[dict[str, Any]], variables: dict[str, Any]) -> "_Prompt":
        """The generation prompt with these variables.

        It does not depend on the conversation. So it is rendered for a fixed conversation, once per set of variables;
        only if the template refuses that one, for the beginning of this conversation.
        """
        variables = {key: value for key, value in variables.items() if key != "enable_thinking"}
        try:
            prompt = self._probed(json.dumps(variables))
        except (TypeError, ValueError):  # a variable is not JSON, so it cannot be a key of the cache
            prompt = None
        return prompt or self._prompt_after(prefix or list(_PROBE), variables)

    def _probe(self, variables: str) -> "_Prompt | None":
        try:
            return self._prompt_after(list(_PROBE), json.loads(variables))
        except UserError:
            return None

    def _prompt_after(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> "_Prompt":
        """The generation prompt after some messages: the difference between renderings with and without it."""
        without = self.render(messages, **variables)
        opened = self.render(messages, add_generation_prompt=True, **variables)
        unthinking = self.render(messages, add_generation_prompt=True, **{**variables, "enable_thinking": False})
        if not opened.startswith(without) or len(opened) == len(without):
            raise UserError(f"{self._file}: add_generation_prompt does not append a header; use Qwen3's template")
        return _Prompt(opened[len(without) :], unthinking[len(opened) :] if unthinking.startswith(opened) else "")

    def _prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as `transformers` passes them to a template: no null keys, reasoning under its usual names."""
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise UserError(f"{self._file}: a conversation is a list of at least one message, each an object")
        prepared = []
        for message in messages:
            present = {key: value for key, value in message.items() if value is not None}
            names = [name for name in _REASONING_FIELDS if name in present]
            if names:
                reasoning = present[names[0]]
                present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
            prepared.append(present)
        return prepared

    def _template(self, variables: dict[str, Any]) -> jinja2.Template:
        """The template that `transformers` would choose."""
        has_tools = variables.get("tools") is not None
        return self._templates["tool_use" if has_tools and "tool_use" in self._templates else "default"]

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        context = {"tools": None, "documents": None, **self._special_tokens, **variables, **fixed}
        try:
            return self._template(variables).render(context)
        except Exception as error:  # the template is data, so each of its errors is reported to the user
            reason = str(error) or type(error).__name__
            raise UserError(f"{self._file}: the chat template refuses this conversation: {reason}") from error


def try_template(path: str, template: str, eos_token: str) -> None:
    """Runs in the child process, with limits on time and memory: render a conversation in all ways that are used.

    A template may refuse this conversation; that is no error.
    """
    tried = ChatTemplate._read(path, template, eos_token)
    prompted: Callable[..., str] = partial(tried.render, add_generation_prompt=True, enable_thinking=False, tools=[])
    for render in (tried.render, tried.render_turns, prompted):
        try:
            if len(str(render(_TRIED))) > _MOST_TRIED:
                raise MemoryError
        except UserError as error:
            if isinstance(error.__cause__, MemoryError):
                raise MemoryError from None


_read_once = lru_cache(ChatTemplate._read)


def render_apart(path: str, template: str, eos_token: str, messages: list[Any], variables: dict[str, Any]) -> str:
    """Runs in the child process, for `render_prompt`."""
    return _read_once(path, template, eos_token).render(messages, add_generation_prompt=True, **variables)


def _traced(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with all its strings as `Traced`. Reasoning inside the content gets the field _REASONING."""
    traced = {
        key: trace(value, Source(index, _REASONING if key in _REASONING_FIELDS else key))
        for key, value in message.items()
    }
    if thoughts := _reasoning_spans(message):
        content = message["content"]
        parts = zip(pairwise([0, *chain(*thoughts), len(content)]), cycle(("content", _REASONING)), strict=False)
        traced["content"] = Traced(content, [(stop - start, Source(index, field)) for (start, stop), field in parts])
    return traced


def _reasoning_spans(message: dict[str, Any]) -> list[tuple[int, int]]:
    """Spans of reasoning in an assistant's content: its think blocks that are not blank.

    None if the message has a reasoning field. The first block may lack its opening tag, because the prompts of some
    models end with that tag.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or _has_text(message.get(_REASONING)):
        return []
    thoughts, position = [], 0
    for before in content.split("</think>")[:-1]:
        opened, stop = before.rfind("<think>"), position + len(before)
        if opened >= 0 or position == 0:
            start = position + opened + len("<think>") if opened >= 0 else 0
            if _has_text(content[start:stop]):
                thoughts.append((start, stop))
        position = stop + len("</think>")
    return thoughts


def _has_text(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


class _Untraceable(Exception):
    """The sources of the characters do not determine where an assistant's turn begins or ends."""


class _TurnFinder:
    """Finds the turns of a rendered text by the sources of its characters. Call it for the messages in order."""

    def __init__(self, text: str, eos_token: str) -> None:
        self.text, self.eos_token = str.__str__(text), eos_token
        self.marks: list[tuple[int, int, int]] = []  # (begin, end, number) of {% generation %} blocks, in order
        self._spans: list[tuple[int, int, Source]] = []  # (begin, end, source) of text from messages, in order
        self._of_message: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # message -> (begin, end, field)
        end = 0
        for length, source in runs_of(text):
            begin, end = end, end + length
            if source is not None and source.mark:
                # Adjacent runs with the same number belong to one block.
                last = self.marks.pop() if self.marks and self.marks[-1][1:] == (begin, source.mark) else (begin,)
                self.marks.append((last[0], end, source.mark))
            if source is not None and source.message >= 0:
                self._spans.append((begin, end, source))
                self._of_message[source.message].append((begin, end, source.field))
        self._begins = [begin for begin, _, _ in self._spans]
        self._ends = [end for _, end, _ in self._spans]
        self._last_stop = 0  # end of the last turn
        self._last_assistant_stop = 0  # end of the last assistant turn

    def other(self, index: int, role: str) -> Turn:
        """The turn of a message that is not the assistant's."""
        own = [(begin, end) for begin, end, field in self._of_message[index] if field != "role"]
        start, stop = (own[0][0], own[-1][1]) if own else (self._last_stop, self._last_stop)
        if own and self.eos_token and self._is_literal(stop, self.eos_token):
            stop += len(self.eos_token)
        self._last_stop = stop
        return Turn(index, role, start, stop, start, False)

    def assistant(self, index: int, message: dict[str, Any], prompt: _Prompt) -> Turn:
        """The turn of an assistant's message. Raises _Untraceable."""
        spans = self._of_message[index]
        fields = {field for _, _, field in spans}
        start = self._header_end(spans, message["role"], prompt.header)
        answer = start + len(prompt.empty_think) if self._is_literal(start, prompt.empty_think) else start
        content = message.get("content")
        answered = _has_text(content.split("</think>")[-1] if isinstance(content, str) else content)
        if answered and not fields & {"content", MIXED}:
            raise _Untraceable("the template drops or rewrites its content")
        if _has_text(message.get("tool_calls")) and not fields & {"tool_calls", MIXED}:
            raise _Untraceable("the template drops or rewrites its tool_calls")
        last = max([answer, *(end for _, end, _ in spans)])
        found = self.text.find(self.eos_token, last)
        if found < 0:
            raise _Untraceable(f"no {self.eos_token!r} ends the turn")
        stop = found + len(self.eos_token)
        if not self.messages_between(start, stop) <= {index}:
            raise _Untraceable("text of another message is inside its turn")
        reasoned = _has_text(message.get(_REASONING)) or bool(_reasoning_spans(message))
        lost = reasoned and not fields & {_REASONING, MIXED}
        self._last_stop = self._last_assistant_stop = stop
        return Turn(index, message["role"], start, stop, answer, lost, reasoned and not lost)

    def _header_end(self, spans: list[tuple[int, int, str]], role: str, header: str) -> int:
        """The end of the turn's header, which the template wrote around this message's role.

        The header is the generation prompt, or the prompt up to the end of a line after the role: a prompt can open a
        think block in further lines, which turns without reasoning lack. The longest match counts.
        """
        readings = []  # ways to split the prompt: (text before the role, lines after it), the longest first
        for match in re.finditer(re.escape(role), header):
            lines = header[match.end() :].splitlines(keepends=True) or [""]
            readings += [(header[: match.start()], behind) for behind in reversed([*accumulate(lines)])]
        for begin, end, field in spans:
            if field == "role" and begin >= self._last_assistant_stop and self.text[begin:end] == role:
                for before, behind in readings:
                    if self._is_literal(begin - len(before), before) and self._is_literal(end, behind):
                        return end + len(behind)
        raise _Untraceable("the template does not write its role between the lines of the generation prompt")

    def _is_literal(self, position: int, expected: str) -> bool:
        """Whether `expected` is at this position, written by the template itself and not by a message."""
        stop = position + len(expected)
        return position >= 0 and self.text[position:stop] == expected and not self.messages_between(position, stop)

    def messages_between(self, start: int, stop: int) -> set[int]:
        """Indices of the messages that characters in `[start, stop)` came from."""
        first, last = bisect_right(self._ends, start), bisect_left(self._begins, stop)
        return {source.message for _, _, source in self._spans[first:last]}
