"""Summarise a trace of torch.profiler: `titan-mi100 profile TRACE.json.gz`. Imports no torch."""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_mi100 import cli as tool
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_plain
from titan_mi100.run.trace_summary import summarise
from titan_mi100.wording import printable, shortened

_LONGEST = 1e18  # microseconds: no real time is as large, and sums stay finite
_LARGEST = 1 << 30  # bytes of a trace; parsed, it takes some ten times as much


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


if __name__ == "__main__":
    sys.exit(main())
