"""Where a step's time went: pure functions over the events of a Chrome trace written by torch.profiler.

Times of events are microseconds. Categories: "kernel", "gpu_memcpy" and "gpu_memset" run on a GPU, "cuda_runtime" (on
ROCm too, with HIP's names) are the host's calls of the driver, "cpu_op" torch's operators on the host,
"user_annotation" named sections of code. Imports no torch.
"""

import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_plain
from titan_mi100.run.intervals import Interval, subtract, union
from titan_mi100.wording import shortened

STEP = "titan_mi100 step "  # begins the name of the section around a traced step
_LONGEST = 1e18  # microseconds: no real time is as large, and sums stay finite
_LARGEST = 1 << 30  # bytes of a trace; parsed, it takes some ten times as much
_TOP = 10  # lines of each list
_NAME = 90  # characters of a kernel's name

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE_KERNEL = re.compile("nccl|rccl", re.IGNORECASE)  # in its name
_COLLECTIVE_ON_HOST = re.compile("(gloo|mpi|ucc):")  # sections on the threads of these libraries
# calls in which the host waits for the device; a hipMemcpyWithStream waits, unlike its Async form
_SYNCHRONISATION = re.compile(
    "(cuda|cu|hip)((Device|Stream|Event|Ctx)Synchronize|Memcpy(2D|WithStream)?|Memcpy(DtoH|HtoD)(_v2)?)"
)


class Span(NamedTuple):
    """An event with a duration."""

    name: str
    category: str
    thread: tuple[str, str]
    start: float
    stop: float


class Entry(NamedTuple):
    """All events of a name."""

    name: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """A traced step; times in seconds. Compute, communication and copies may overlap each other.

    Attributes:
        on_gpu: times are those of a GPU's kernels; else of operators on the host.
        exposed: communication while nothing is computed.
        idle: the device does none of the three.
        top: kernels, or operators by their own time, without that of operators inside them.
        collectives: communication by name.
        waits: calls in which the host waited for the device, with the operator that called.
    """

    on_gpu: bool
    seconds: float
    compute: float
    communication: float
    exposed: float
    copies: float
    idle: float
    top: tuple[Entry, ...]
    collectives: tuple[Entry, ...]
    waits: tuple[Entry, ...]

    def shares(self) -> list[str]:
        """Where the time went, a line each."""

        def line(name: str, seconds: float, what: str = "") -> str:
            share = seconds / self.seconds if self.seconds else 0.0
            return f"  {name:<14} {seconds * 1e3:>10.2f} ms {share:>6.1%}  {what}".rstrip()

        found = [f"{self.seconds * 1e3:,.2f} ms, on the {'GPU' if self.on_gpu else 'CPU'}:"]
        found += [line("compute", self.compute), line("communication", self.communication)]
        found += [line("- exposed", self.exposed, "not behind compute")]
        if not self.on_gpu:
            return [*found, line("idle", self.idle, "neither: Python, data, waiting"), "  host waits     none: no GPU"]
        waited, times = sum(entry.seconds for entry in self.waits), sum(entry.times for entry in self.waits)
        found += [line("copies", self.copies), line("idle", self.idle, "none of these")]
        return [*found, line("host waits", waited, f"{times} times the host waited for the device")]

    def lists(self) -> list[str]:
        """The names behind the shares, the largest first."""
        found = []
        lists = [("the host waits in", self.waits), ("collectives", self.collectives)]
        lists.append(("kernels" if self.on_gpu else "operators, by their own time", self.top))
        for title, entries in lists:
            found += [f"{title}:"] if entries else []
            for name, times, seconds in entries[:_TOP]:
                found.append(f"  {seconds * 1e3:>10.2f} ms {times:>7,} x  {shortened(name, _NAME)}")
            if len(entries) > _TOP:
                rest = sum(entry.seconds for entry in entries[_TOP:])
                found.append(f"  {rest * 1e3:>10.2f} ms            {len(entries) - _TOP} others")
        return found


def read_trace(path: Path) -> list[Any]:
    """The events of a trace file, .json or .json.gz. Raises UserError: it is no such file, or cannot be read."""
    try:
        data = read_plain(path.resolve(), _LARGEST)
        if data[:2] == b"\x1f\x8b":
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_LARGEST + 1)
            if len(data) > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST:,} bytes")
        content = json.loads(data)
        events = content["traceEvents"] if isinstance(content, dict) else content
        if not isinstance(events, list):
            raise ValueError("traceEvents is no list")
    except UserError:
        raise
    except (ValueError, KeyError, EOFError, RecursionError, zlib.error, gzip.BadGzipFile) as error:
        what = f"is no Chrome trace ({shortened(str(error), 100)}); name a .json or .json.gz of torch.profiler"
        raise UserError(f"{path}: {what}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; name a trace of torch.profiler") from None
    return events


def summarise(events: Iterable[Any]) -> Summary:
    """Sum up the section of a traced step, or a whole trace that has no such section.

    Raises:
        ValueError: there is no event with a duration.
    """
    spans = [span for event in events if (span := _span(event)) is not None]
    if not spans:
        raise ValueError("no event has a duration")
    steps = [span for span in spans if span.category == "user_annotation" and span.name.startswith(STEP)]
    start, stop = min(span.start for span in steps or spans), max(span.stop for span in steps or spans)
    on_device = [span for span in spans if span.category in _ON_DEVICE]
    if on_device:  # the host may be done with a step before the device is
        stop = max(stop, *(span.stop for span in on_device))
    inside = [span for span in spans if span.start < stop and span.stop > start]
    if on_device:
        kernels = [span for span in inside if span.category == "kernel"]
        collectives = [span for span in kernels if COLLECTIVE_KERNEL.search(span.name)]
        computing = [span for span in kernels if not COLLECTIVE_KERNEL.search(span.name)]
        copies = [span for span in inside if span.category in _ON_DEVICE[1:]]
        top, waits = _by_name((span.name, span.stop - span.start) for span in computing), _waits(inside)
    else:
        collectives = [span for span in inside if _is_on_host(span)]
        computing, own_times = _operators(inside)
        copies, top, waits = [], _by_name(own_times), ()
    compute, communication, copying = (_union(kind, start, stop) for kind in (computing, collectives, copies))
    return Summary(
        on_gpu=bool(on_device),
        seconds=(stop - start) / 1e6,
        compute=_length(compute),
        communication=_length(communication),
        exposed=_length(subtract(communication, compute)),
        copies=_length(copying),
        idle=_length(subtract([(start, stop)], [*compute, *communication, *copying])),
        top=top,
        collectives=_by_name((span.name, span.stop - span.start) for span in collectives),
        waits=waits,
    )


def _span(event: Any) -> Span | None:
    """None: it has no duration, or no category that counts."""
    if not isinstance(event, Mapping) or event.get("ph") != "X":
        return None
    name, category, start, length = (event.get(key) for key in ("name", "cat", "ts", "dur"))
    if not isinstance(name, str) or not isinstance(category, str) or category == "Trace":
        return None
    if not isinstance(start, int | float) or not isinstance(length, int | float):
        return None
    if not (abs(start) < _LONGEST and 0 <= length < _LONGEST):  # also refuses NaN
        return None
    return Span(name, category, (str(event.get("pid")), str(event.get("tid"))), start, start + length)


def _is_on_host(span: Span) -> bool:
    return span.category == "user_annotation" and _COLLECTIVE_ON_HOST.match(span.name) is not None


def _operators(spans: Sequence[Span]) -> tuple[list[Span], list[tuple[str, float]]]:
    """The operators that compute, and (name, self time in microseconds) of each.

    An operator that starts a collective may wait for it, so it does not count as computing, but other operators inside
    it do. Operators inside a collective belong to the collective.
    """
    computing: list[Span] = []
    own_times: list[tuple[str, float]] = []
    for tree in _trees(span for span in spans if span.category == "cpu_op" or _is_on_host(span)):
        communicates = [_is_on_host(span) or span.name.startswith("c10d::") for span, _ in tree]
        inside = list(communicates)
        for place, (_, parent) in enumerate(tree):  # a parent comes before what is in it
            inside[place] = inside[place] or (parent is not None and inside[parent])
        own = [span.stop - span.start for span, _ in tree]
        for place in reversed(range(len(tree))):
            span, parent = tree[place]
            if parent is not None:
                own[parent] -= span.stop - span.start
                communicates[parent] = communicates[parent] or communicates[place]
        for place, (span, _) in enumerate(tree):
            if not communicates[place] and not inside[place]:
                computing.append(span)
                own_times.append((span.name, own[place]))
    return computing, own_times


def _waits(spans: Sequence[Span]) -> tuple[Entry, ...]:
    """The host's waits for the device, by call and by the outermost operator around it."""
    found = []
    calls = (span for span in spans if span.category.endswith(("_runtime", "_driver")) or span.category == "cpu_op")
    for tree in _trees(calls):
        outermost: list[int] = []  # for each span: its outermost parent, or the span itself
        for place, (span, parent) in enumerate(tree):
            outermost.append(place if parent is None else outermost[parent])
            if span.category != "cpu_op" and _SYNCHRONISATION.fullmatch(span.name):
                caller = tree[outermost[place]][0]
                where = f" in {caller.name}" if caller.category == "cpu_op" else ""
                found.append((span.name + where, span.stop - span.start))
    return _by_name(found)


def _trees(spans: Iterable[Span]) -> list[list[tuple[Span, int | None]]]:
    """The spans of each thread, sorted by start, each with the index of its parent span."""
    threads: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    found = []
    for own in threads.values():
        own.sort(key=lambda span: (span.start, -span.stop))
        tree: list[tuple[Span, int | None]] = []
        open_: list[int] = []
        for place, span in enumerate(own):
            while open_ and tree[open_[-1]][0].stop < span.stop:
                open_.pop()
            tree.append((span, open_[-1] if open_ else None))
            open_.append(place)
        found.append(tree)
    return found


def _by_name(times: Iterable[tuple[str, float]]) -> tuple[Entry, ...]:
    """Sum microseconds by name, the largest first."""
    counts: dict[str, int] = defaultdict(int)
    totals: dict[str, float] = defaultdict(float)
    for name, microseconds in times:
        counts[name] += 1
        totals[name] += microseconds
    order = sorted(totals, key=lambda name: (-totals[name], name))
    return tuple(Entry(name, counts[name], totals[name] / 1e6) for name in order)


def _union(spans: Iterable[Span], start: float, stop: float) -> list[Interval]:
    return union((max(span.start, start), min(span.stop, stop)) for span in spans)


def _length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals in microseconds, in seconds."""
    return sum(stop - start for start, stop in intervals) / 1e6
