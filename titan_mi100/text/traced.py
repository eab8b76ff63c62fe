"""Strings that remember which message their characters came from, and a Jinja environment that keeps them so."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import count
from typing import Any, NamedTuple, SupportsIndex

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MIXED = "*"  # the field of a source where several fields of one message cannot be told apart


class Source(NamedTuple):
    """Where characters came from."""

    message: int  # its index; -1: of none, but the template's own inside of a mark
    field: str  # its key in the message, or MIXED
    mark: int = 0  # which `{% generation %}` block of the output it is in; 0: none


Run = tuple[int, Source | None]  # so many characters; None: the template's own


class Traced(str):
    """A string that knows from which message field its characters came: its `runs`, in order, neighbours distinct.

    Operations that keep characters keep their sources. Those that rewrite them (`replace`, `upper` ...) give the whole
    result one source if the string had one; else the result is a plain `str`, and whoever reads the runs finds them
    missing.
    """

    runs: tuple[Run, ...]

    def __new__(cls, text: str, runs: Iterable[Run] | None = None) -> "Traced":
        traced = super().__new__(cls, text)
        merged: list[Run] = []
        for run in [(len(text), None)] if runs is None else runs:
            if merged and merged[-1][1] == run[1]:
                merged[-1] = (merged[-1][0] + run[0], run[1])
            elif run[0]:
                merged.append(run)
        traced.runs = tuple(merged)
        return traced

    def __str__(self) -> str:
        return self  # `str(x)` around each output of a template must not lose the runs

    def __add__(self, other: str) -> str:
        return _concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return _concat((other, self))  # reached because str has no number protocol: Python asks the right operand first

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
        return Traced(text, runs)

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
    def method(self: Traced, *args: Any, **kwargs: Any) -> str:
        return _as_rewritten(self, getattr(str, name)(self, *args, **kwargs))

    return method


for _name in ("replace", "upper", "lower", "title", "capitalize", "swapcase", "casefold", "expandtabs", "__mul__"):
    setattr(Traced, _name, _rewriting(_name))


def _as_rewritten(origin: Traced, text: str) -> str:
    return _whole(text, {source for _, source in origin.runs})


def _whole(text: str, sources: set[Source | None]) -> str:
    """The text with one source for all of it, if they are of one message; else without any."""
    first = next(iter(sources), None)
    if first is None or any(source is None or source.message != first.message for source in sources):
        return text
    mixed = Source(first.message, MIXED, max(source.mark for source in sources if source is not None))
    return Traced(text, [(len(text), first if len(sources) == 1 else mixed)])


def _concat(pieces: Iterable[str]) -> str:
    parts = list(pieces)
    text = "".join(parts)
    if not any(isinstance(part, Traced) for part in parts):
        return text
    return Traced(text, [run for part in parts for run in runs_of(part)])


def runs_of(text: str) -> tuple[Run, ...]:
    """The runs of a string; of a plain one the template's own."""
    return text.runs if isinstance(text, Traced) else ((len(text), None),)


def trace(value: Any, source: Source) -> Any:
    """The JSON value with every string of it, keys too, as a `Traced`."""
    if isinstance(value, str):
        return Traced(value, [(len(value), source)])
    if isinstance(value, Mapping):
        return {trace(key, source): trace(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [trace(item, source) for item in value]
    return value


def _sources(value: Any) -> set[Source | None]:
    if isinstance(value, str):
        return {source for _, source in runs_of(value)}
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return set().union(*map(_sources, value)) if isinstance(value, list | tuple) else set()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter of `transformers`: no escaping of HTML. The JSON of one message's data is that message's as a whole,
    also where the template put keys of its own around them."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _whole(text, _sources(value) - {None})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, a tag of `transformers`: it marks what the assistant generates. Each
    block's output carries a number of its own."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        self.environment.has_marks = True  # type: ignore[attr-defined]
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        text, number = caller(), next(_MARKS)
        marked = [(n, source or Source(-1, "")) for n, source in runs_of(text)]
        if any(n and not source.mark for n, source in marked):  # what a mark inside of this one does not have
            self.environment.issued.add(number)  # type: ignore[attr-defined]
        return Traced(text, [(n, source._replace(mark=source.mark or number)) for n, source in marked])


_MARKS = count(1)


class _TracingCodeGenerator(CodeGenerator):
    """Jinja's `~` joins by a module's function; this one by the environment's `concat`, as all other output. And Jinja
    computes `'a' * 4000000000` when it compiles, where no limits hold, whether or not it is ever reached."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("{% autoescape %} is not supported", node.lineno)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")


class _Dict:
    """`dict` in a template. The class itself would give away its methods: `dict.update` changes what a row holds."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which `transformers` runs chat templates, keeping the runs of what it concatenates."""

    code_generator_class = _TracingCodeGenerator
    concat = staticmethod(_concat)
    has_marks = False

    def __init__(self) -> None:
        extensions = [_GenerationTag, ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.issued: set[int] = set()  # the numbers of all marks
        del self.filters["random"]  # a row is the same each time
        self.globals["lipsum"] = lambda *_, **__: _raise_exception("lipsum draws a text at random")
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["dict"] = _Dict()
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
