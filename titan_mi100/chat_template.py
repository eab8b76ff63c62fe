"""The folder's own chat template, sandboxed; and which characters of its output the assistant generates itself.

The second is known by provenance, not by searching the text: each string of a message enters the template as a
`_Traced`, which remembers through the template's string operations where each character came from.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, SupportsIndex

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_mi100.errors import UserError

_Source = tuple[int, str]  # the message's index and the name of its field
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = ({"role": "user", "content": "Hello"},)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the character spans `[start, end)` of it that the assistant generates."""

    text: str
    supervised: list[tuple[int, int]]


class ChatTemplate:
    """A folder's Jinja chat template, run as `transformers` runs it. Build it with `from_folder`."""

    def __init__(self, file: Path, source: str, special_tokens: dict[str, str]) -> None:
        self._file = file
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{file}: the chat template is not valid Jinja: {error}; correct or replace it") from error

    @classmethod
    def from_folder(cls, path: str | Path) -> "ChatTemplate":
        """Read `chat_template.jinja`, else the (default) `chat_template` of `tokenizer_config.json`.

        Args:
            path: an HF tokenizer folder.

        Returns:
            The compiled template, with the special tokens of `tokenizer_config.json` as its variables.

        Raises:
            UserError: a file is missing or malformed, or there is no template.
        """
        folder = Path(path)
        config_file, jinja_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
            file = jinja_file if jinja_file.is_file() else config_file
            source = jinja_file.read_text(encoding="utf-8") if file is jinja_file else config.get("chat_template")
            if isinstance(source, list):
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            tokens = {key: config[key] for key in _SPECIAL_TOKENS if config.get(key) is not None}
            special_tokens = {key: t["content"] if isinstance(t, dict) else t for key, t in tokens.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{config_file}: cannot be used ({error!r}); copy the checkpoint's tokenizer files"
            ) from error
        if not isinstance(source, str):
            raise UserError(f"{config_file}: no (default) chat_template, and no {jinja_file.name}; add one of them")
        return cls(file, source, special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Render a conversation, byte for byte as `apply_chat_template(tokenize=False)` does.

        Args:
            messages: dicts of JSON values, with a `role` and what else the template reads.
            add_generation_prompt: end with the header of an assistant's turn.
            variables: further variables of the template, such as `tools` or `enable_thinking`.

        Returns:
            The text.

        Raises:
            UserError: the template refuses the conversation, or fails on it.
        """
        return self._run(self._prepared(messages), add_generation_prompt, variables)

    def render_supervised(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        """Render a conversation and say what of it the assistant generates: one span per assistant message.

        A span runs from behind the turn's header, and behind an empty think block that the template itself puts there,
        to the end of the turn's `eos_token`.

        Args:
            messages: as for `render`.
            variables: as for `render`.

        Returns:
            The text, the same as `render`'s, and its spans in the order of the messages.

        Raises:
            UserError: as `render`; or the template treats a message in a way that hides what came from where.
        """
        prepared = self._prepared(messages)
        traced = [
            {key: _trace(value, (i, key)) for key, value in message.items()} for i, message in enumerate(prepared)
        ]
        text = self._run(traced, False, variables)
        assistants = [i for i, message in enumerate(prepared) if message.get("role") == "assistant"]
        if not assistants:
            return Rendered(str.__str__(text), [])
        header, empty_think = self._generation_prompt(prepared[: assistants[0]] or list(_PROBE), variables)
        turns = _Turns(text if isinstance(text, _Traced) else _Traced(text), header, empty_think, self._eos_token())
        supervised: list[tuple[int, int]] = []
        for i in assistants:
            try:
                supervised.append(turns.supervised(i, prepared[i], supervised[-1][1] if supervised else 0))
            except _Untraceable as problem:
                raise UserError(
                    f"{self._file}: message {i}: {problem}, so what the assistant generates cannot be told apart; "
                    f"use a template that writes each assistant message as Qwen3's does"
                ) from problem
        return Rendered(str.__str__(text), supervised)

    def _generation_prompt(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, str]:
        """What opens an assistant's turn, and the empty think block that turning thinking off puts behind that."""
        plain = {key: value for key, value in variables.items() if key != "enable_thinking"}
        without = self._run(messages, False, plain)
        opened = self._run(messages, True, plain)
        unthinking = self._run(messages, True, {**plain, "enable_thinking": False})
        if not opened.startswith(without) or len(opened) == len(without):
            raise UserError(f"{self._file}: add_generation_prompt does not append a header; use Qwen3's template")
        return opened[len(without) :], unthinking[len(opened) :] if unthinking.startswith(opened) else ""

    def _eos_token(self) -> str:
        if not self._special_tokens.get("eos_token"):
            raise UserError(
                f"{self._file.parent / 'tokenizer_config.json'}: eos_token is missing; name what ends a turn"
            )
        return self._special_tokens["eos_token"]

    def _prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as `transformers` hands them to a template: keys without a value dropped, reasoning aliased."""
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise UserError(f"{self._file}: a conversation is a list of at least one message, each an object")
        prepared = []
        for message in messages:
            present = {key: value for key, value in message.items() if value is not None}
            names = [name for name in ("reasoning_content", "thinking", "reasoning") if name in present]
            if names:
                reasoning = present[names[0]]
                present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
            prepared.append(present)
        return prepared

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(
                {"tools": None, "documents": None, **self._special_tokens, **variables, **fixed}
            )
        except Exception as error:  # the template is data: whatever it does wrong is for its user to see
            reason = str(error) or type(error).__name__
            raise UserError(f"{self._file}: the chat template refuses this conversation: {reason}") from error


class _Untraceable(Exception):
    """What is known of the text's provenance does not settle where an assistant's turn begins or ends."""


class _Turns:
    """Finds assistant turns in a rendered text by where its characters came from."""

    def __init__(self, text: "_Traced", header: str, empty_think: str, eos_token: str) -> None:
        self._text = text
        self._header, self._empty_think, self._eos_token = header, empty_think, eos_token
        self._spans: list[tuple[int, int, _Source]] = []  # of characters that came from messages, in order
        position = 0
        for length, source in text.runs:
            if source is not None:
                self._spans.append((position, position + length, source))
            position += length

    def supervised(self, index: int, message: dict[str, Any], after: int) -> tuple[int, int]:
        """The span that the assistant generates in message `index`, which begins at or behind `after`."""
        start = self._header_end(index, message["role"], after)
        if self._literal(start, self._empty_think):
            start += len(self._empty_think)
        if str(message.get("content", "")).strip() and not any(s == (index, "content") for _, _, s in self._spans):
            raise _Untraceable("the template drops or rewrites its content")
        last = max([start, *(end for _, end, source in self._spans if source[0] == index)])
        found = str.find(self._text, self._eos_token, last)
        if found < 0:
            raise _Untraceable(f"no {self._eos_token!r} ends the turn")
        end = found + len(self._eos_token)
        if any(begin < end and stop > start and source[0] != index for begin, stop, source in self._spans):
            raise _Untraceable("text of another message stands inside of its turn")
        return start, end

    def _header_end(self, index: int, role: str, after: int) -> int:
        """Where the header ends that was written with this message's role: the generation prompt up to a line's end."""
        for begin, end, source in self._spans:
            if source != (index, "role") or begin < after or str.__getitem__(self._text, slice(begin, end)) != role:
                continue
            at = self._header.find(role)
            while at >= 0:
                before, behind = self._header[:at], self._header[at + len(role) :]
                if begin >= len(before) and self._literal(begin - len(before), before):
                    # A prompt can open a think block in further lines, which turns without reasoning do not have.
                    lines = behind.splitlines(keepends=True) or [""]
                    for count in range(len(lines), 0, -1):
                        if self._literal(end, "".join(lines[:count])):
                            return end + len("".join(lines[:count]))
                at = self._header.find(role, at + 1)
        raise _Untraceable("the template does not write its role between the lines of the generation prompt")

    def _literal(self, position: int, expected: str) -> bool:
        """Whether the template itself wrote `expected` there."""
        stop = position + len(expected)
        return str.startswith(self._text, expected, position) and not any(
            begin < stop and end > position for begin, end, _ in self._spans
        )


class _Traced(str):
    """A string that knows from which message field its characters came: runs of (length, source), in order.

    Operations that keep characters keep their sources. Those that rewrite them (`replace`, `upper` ...) keep the source
    of a string that has only one, else they give a plain `str`, and the checks of `_Turns` decide.
    """

    runs: tuple[tuple[int, _Source | None], ...]

    def __new__(cls, text: str, runs: Iterable[tuple[int, _Source | None]] | None = None) -> "_Traced":
        traced = super().__new__(cls, text)
        merged: list[tuple[int, _Source | None]] = []
        for length, source in [(len(text), None)] if runs is None else runs:
            if merged and merged[-1][1] == source:
                merged[-1] = (merged[-1][0] + length, source)
            elif length:
                merged.append((length, source))
        traced.runs = tuple(merged)
        return traced

    def __str__(self) -> str:
        return self  # `str(x)` around each output of a template must not lose the runs

    def __add__(self, other: str) -> str:
        return _concat([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return _concat([other, self])  # reached because str has no number protocol: Python asks the right operand first

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            start = key.__index__() % len(self)
            key = slice(start, start + 1)
        start, stop, step = key.indices(len(self))
        if step != 1:
            return _as_rewritten(self, text)
        runs, position = [], 0
        for length, source in self.runs:
            runs.append((max(0, min(position + length, stop) - max(position, start)), source))
            position += length
        return _Traced(text, runs)

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self[: len(super().rstrip(chars))].lstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._located(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._located(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:  # type: ignore[override]
        whole = self._located(super().splitlines(keepends=True), 0)
        return whole if keepends else [line[: len(str.splitlines(line)[0])] for line in whole]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(list(super().partition(sep)), 0)
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(list(super().rpartition(sep)), 0)
        return before, found, after

    def _located(self, pieces: list[str], gap: int) -> list[str]:
        """The pieces as slices of this string: in order, `gap` characters (or, for 0, spaces) left out between them."""
        located, position = [], 0
        for piece in pieces:
            position = super().find(piece, position)
            located.append(self[position : position + len(piece)])
            position += len(piece) + gap
        return located


def _rewriting(name: str) -> Callable[..., str]:
    def method(self: _Traced, *args: Any, **kwargs: Any) -> str:
        return _as_rewritten(self, getattr(str, name)(self, *args, **kwargs))

    return method


for _name in ("replace", "upper", "lower", "title", "capitalize", "swapcase", "casefold", "expandtabs", "__mul__"):
    setattr(_Traced, _name, _rewriting(_name))


def _as_rewritten(origin: _Traced, text: str) -> str:
    return _Traced(text, [(len(text), origin.runs[0][1])]) if len(origin.runs) == 1 else text


def _concat(pieces: Iterable[str]) -> str:
    parts = list(pieces)
    text = "".join(parts)
    if not any(isinstance(part, _Traced) for part in parts):
        return text
    runs = [run for p in parts for run in (p.runs if isinstance(p, _Traced) else ((len(p), None),))]
    return _Traced(text, runs)


def _trace(value: Any, source: _Source) -> Any:
    if isinstance(value, str):
        return _Traced(value, [(len(value), source)])
    if isinstance(value, Mapping):
        return {_trace(key, source): _trace(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_trace(item, source) for item in value]
    return value


def _sources(value: Any) -> set[_Source | None]:
    if isinstance(value, str):
        return {source for _, source in value.runs} if isinstance(value, _Traced) else {None}
    if isinstance(value, Mapping):
        return set().union(*map(_sources, value.keys()), *map(_sources, value.values()))
    return set().union(*map(_sources, value)) if isinstance(value, list | tuple) else set()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter of `transformers`: no escaping of HTML; the JSON of one message's data stays that message's."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    sources = _sources(value)
    return _Traced(text, [(len(text), sources.pop())]) if len(sources) == 1 else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationTag(ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`, a tag of `transformers`, as a plain scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TracingCodeGenerator(CodeGenerator):
    """Jinja's `~` joins by a module's function; this one by the environment's `concat`, as all other output."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _TracingCodeGenerator
    concat = staticmethod(_concat)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
