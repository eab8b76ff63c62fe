"""Strings that remember which message their characters came from, and a Jinja environment that preserves this."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, SupportsIndex

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

MIXED = "*"  # field of a source whose characters come from several fields of one message, in unknown order


class Origin(NamedTuple):
    """The origin of characters."""

    message: int  # index of the message
    field: str  # key in the message, or MIXED


Run = tuple[int, Origin | None]  # (number of characters, their source); None: the template's own text


class Traced(str):
    """A string with the source of each character: its `runs`, in order; neighbours have different sources.

    Operations that keep characters (slicing, strip, joining) keep their sources. Operations that rewrite characters
    (`replace`, `upper` ...) give the whole result one source, if all characters came from one message. Otherwise the
    result is a plain `str`; the turn finder then misses the source and refuses the template.
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
        return self  # Jinja calls `str(x)` on each output, which must not lose the runs

    def __add__(self, other: str) -> str:
        return _concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        # Also called for `"plain" + traced`: str implements + as a sequence only, so Python asks the right side first.
        return _concat((other, self))

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
        lines = self._located(super().splitlines(keepends=True), 0)
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(list(super().partition(sep)), 0))  # type: ignore[return-value]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return tuple(self._located(list(super().rpartition(sep)), 0))  # type: ignore[return-value]

    def _located(self, pieces: list[str], gap: int) -> list[str]:
        """Turn pieces of this string into slices of it, which keep their sources.

        Args:
            pieces: the pieces in order, without overlap.
            gap: characters between two pieces (the separator's length); 0: none or white space.
        """
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


def _whole(text: str, sources: set[Origin | None]) -> str:
    """The text with one source, if all sources belong to one message; otherwise a plain string."""
    first = next(iter(sources), None)
    if first is None or any(source is None or source.message != first.message for source in sources):
        return text
    return Traced(text, [(len(text), first if len(sources) == 1 else Origin(first.message, MIXED))])


def _concat(pieces: Iterable[str]) -> str:
    parts = list(pieces)
    text = "".join(parts)
    if not any(isinstance(part, Traced) for part in parts):
        return text
    return Traced(text, [run for part in parts for run in runs_of(part)])


def runs_of(text: str) -> tuple[Run, ...]:
    """The runs of a string. A plain string counts as the template's own text."""
    return text.runs if isinstance(text, Traced) else ((len(text), None),)


def trace(value: Any, source: Origin) -> Any:
    """Copy a JSON value with all its strings, including keys, as `Traced`."""
    if isinstance(value, str):
        return Traced(value, [(len(value), source)])
    if isinstance(value, Mapping):
        return {trace(key, source): trace(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [trace(item, source) for item in value]
    return value


def _sources(value: Any) -> set[Origin | None]:
    """The sources of all strings in a JSON value."""
    if isinstance(value, str):
        return {source for _, source in runs_of(value)}
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return set().union(*map(_sources, value)) if isinstance(value, list | tuple) else set()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` of `transformers`, which does not escape HTML. If all data in it come from one message, the
    whole JSON counts as that message's, including keys that the template adds."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _whole(text, _sources(value) - {None})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _TracingCodeGenerator(CodeGenerator):
    """Changes two things in the code that Jinja generates.

    `~` joins with a function of a Jinja module; here it uses the environment's `concat`, as all other output does. And
    constants are not folded: Jinja would compute `'a' * 4000000000` at compile time, where no memory limit is set.
    """

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
    """`dict` for templates. With Python's own class, a template could call `dict.update` and change a row's data."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's environment as `transformers` sets it up for chat templates; it keeps the runs of `Traced` strings."""

    code_generator_class = _TracingCodeGenerator
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols], optimized=False)
        del self.filters["random"]  # a row must render to the same text each time
        self.globals["lipsum"] = lambda *_, **__: _raise_exception("lipsum makes random text")
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["dict"] = _Dict()
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
