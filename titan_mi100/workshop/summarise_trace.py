"""Summarise a trace of torch.profiler: `titan-mi100 profile TRACE.json.gz`.

A trace is Chrome's: times of events are microseconds; of their categories "kernel", "gpu_memcpy" and "gpu_memset" run
on a GPU, "cpu_op" are torch's operators on the host, "user_annotation" named sections of code. Imports no torch.
"""

import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100 import cli as tool
from titan_mi100.config.settings import TRACED_STEP
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_plain
from titan_mi100.wording import printable, shortened

_LONGEST = 1e18  # microseconds: no real time is as large, and sums stay finite
_LARGEST = 1 << 30  # bytes of a trace; parsed, it takes some ten times as much
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COLLECTIVE_KERNEL = re.compile("nccl|rccl", re.IGNORECASE)  # in its name
_COLLECTIVE_ON_HOST = re.compile("(gloo|mpi|ucc):")  # sections on the threads of these libraries


class Span(NamedTuple):
    """An event with a duration."""

    name: str
    category: str
    thread: tuple[str, str]
    start: float
    stop: float


@dataclass(frozen=True)
class Summary:
    """A traced step; times in seconds. Compute, communication and copies may overlap each other.

    Attributes:
        on_gpu: times are those of a GPU's kernels; else of operators on the host.
        exposed: communication while nothing is computed.
        idle: the device does none of the three.
    """

    on_gpu: bool
    seconds: float
    compute: float
    communication: float
    exposed: float
    copies: float
    idle: float

    def shares(self) -> list[str]:
        """Where the time went, a line each."""

        def line(name: str, seconds: float, what: str = "") -> str:
            share = seconds / self.seconds if self.seconds else 0.0
            return f"  {name:<14} {seconds * 1e3:>10.2f} ms {share:>6.1%}  {what}".rstrip()

        lines = [f"{self.seconds * 1e3:,.2f} ms, on the {'GPU' if self.on_gpu else 'CPU'}:"]
        lines += [line("compute", self.compute), line("communication", self.communication)]
        lines += [line("- exposed", self.exposed, "not behind compute")]
        if not self.on_gpu:
            return [*lines, line("idle", self.idle, "neither: Python, data, waiting")]
        return [
            *lines,
            line("copies", self.copies),
            line("idle", self.idle, "none of these: the GPU waits for the host"),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(argv))


def _show(argv: Sequence[str] | None) -> None:
    parser = tool.Parser(prog="titan-mi100 profile", description=__doc__.splitlines()[0])
    parser.add_argument("trace", metavar="TRACE", nargs="+", help="a Chrome trace, .json or .json.gz")
    for name in parser.parse_args(argv).trace:
        try:
            shares = summarise(filter(_has_duration, read_any_trace(Path(name)))).shares()
        except OSError as error:
            raise UserError(
                f"{name}: cannot be read: {error.strerror or error}; name a trace of torch.profiler"
            ) from None
        except (ValueError, KeyError, EOFError, RecursionError, zlib.error) as error:
            reason = f"is no Chrome trace ({shortened(str(error), 100)}); name a .json or .json.gz of torch.profiler"
            raise error if isinstance(error, UserError) else UserError(f"{name}: {reason}") from None
        print(printable("\n".join([f"{name}: {shares[0]}", *shares[1:]])))


def read_any_trace(path: Path, largest: int = _LARGEST) -> list[Any]:
    """The events of a trace file that any program may have written. Raises ValueError and others: it is no trace."""
    raw = read_plain(path.resolve(), largest)
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(largest + 1)
        if len(raw) > largest:
            raise ValueError(f"it has more than {largest:,} bytes")
    content = json.loads(raw)
    events = content["traceEvents"] if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError("traceEvents is no list")
    return events


def _has_duration(event: Any) -> bool:
    """Whether the fields that a summary reads are as torch.profiler writes them."""
    if not isinstance(event, Mapping) or event.get("ph") != "X":
        return False
    if not (isinstance(event.get("name"), str) and isinstance(event.get("cat"), str)):
        return False
    start, length = event.get("ts"), event.get("dur")
    if not (isinstance(start, int | float) and isinstance(length, int | float)):
        return False
    return abs(start) < _LONGEST and 0 <= length < _LONGEST  # also refuses NaN


def summarise(events: Iterable[Mapping[str, Any]]) -> Summary:
    """Sum up the section of a traced step, or a whole trace that has no such section.

    Raises:
        ValueError: there is no event with a duration.
    """
    spans = [span for event in events if (span := _span(event)) is not None]
    if not spans:
        raise ValueError("no event has a duration")
    steps = [span for span in spans if span.category == "user_annotation" and span.name.startswith(TRACED_STEP)]
    start, stop = min(span.start for span in steps or spans), max(span.stop for span in steps or spans)
    on_device = [span for span in spans if span.category in _ON_DEVICE]
    if on_device:  # the host may be done with a step before the device is
        stop = max(stop, *(span.stop for span in on_device))
    inside = [span for span in spans if span.start < stop and span.stop > start]
    waits, copies = list[Span](), list[Span]()
    if on_device:
        kernels = [span for span in inside if span.category == "kernel"]
        collectives = [span for span in kernels if _COLLECTIVE_KERNEL.search(span.name)]
        computing = [span for span in kernels if not _COLLECTIVE_KERNEL.search(span.name)]
        copies = [span for span in inside if span.category in _ON_DEVICE[1:]]
    else:
        annotated = [span for span in inside if span.category == "user_annotation"]
        collectives = [span for span in annotated if _COLLECTIVE_ON_HOST.match(span.name)]
        # An operator that starts a collective may wait for it; those of ATen inside it compute. The library's own
        # threads hold parts of collectives. An ATen operator may wait for a tensor that is still on its way.
        others = {span.thread for span in collectives} - {step.thread for step in steps}
        computing = [span for span in inside if span.name.startswith("aten::") and span.thread not in others]
        waits = [span for span in inside if span.name.endswith("::wait_tensor")]
    shares = _shares((computing, collectives, copies, waits), start, stop)

    def seconds(counts: Callable[[bool, bool, bool], bool]) -> float:
        """Args: counts: what of (compute, communication, copies) runs; an operator that waits computes nothing."""
        return sum(share for (on, sent, copied, held), share in shares.items() if counts(on and not held, sent, copied))

    return Summary(
        on_gpu=bool(on_device),
        seconds=(stop - start) / 1e6,
        compute=seconds(lambda computed, sent, copied: computed),
        communication=seconds(lambda computed, sent, copied: sent),
        exposed=seconds(lambda computed, sent, copied: sent and not computed),
        copies=seconds(lambda computed, sent, copied: copied),
        idle=seconds(lambda computed, sent, copied: not (computed or sent or copied)),
    )


def _span(event: Mapping[str, Any]) -> Span | None:
    """None: it has no duration, or is the profiler's own."""
    if event.get("ph") != "X" or event.get("cat") == "Trace":
        return None
    thread = (str(event.get("pid")), str(event.get("tid")))
    return Span(event["name"], event.get("cat", ""), thread, event["ts"], event["ts"] + event["dur"])


def _shares(kinds: Sequence[Iterable[Span]], start: float, stop: float) -> dict[tuple[bool, ...], float]:
    """Of the time from start to stop: whether each kind of spans runs -> seconds."""
    spans = [(number, span) for number, kind in enumerate(kinds) for span in kind]
    edges = [(max(span.start, start), number, 1) for number, span in spans]
    edges += [(min(span.stop, stop), number, -1) for number, span in spans]
    running, shares, last = [0] * len(kinds), defaultdict[tuple[bool, ...], float](float), start
    for time, number, change in [*sorted(edges), (stop, 0, 0)]:
        shares[tuple(map(bool, running))] += (time - last) / 1e6
        running[number] += change
        last = time
    return shares
