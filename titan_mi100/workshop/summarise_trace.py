"""Summarise a trace of torch.profiler: `titan-mi100 profile TRACE.json.gz`. Imports no torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.errors import UserError
from titan_mi100.run.trace_summary import read_trace, summarise
from titan_mi100.wording import printable


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(argv))


def _show(argv: Sequence[str] | None) -> None:
    parser = tool.Parser(prog="titan-mi100 profile", description=__doc__.splitlines()[0])
    parser.add_argument("trace", metavar="TRACE", nargs="+", help="a Chrome trace, .json or .json.gz")
    for name in parser.parse_args(argv).trace:
        try:
            summary = summarise(read_trace(Path(name)))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{name}: {error}; name a trace of torch.profiler") from None
        print(printable("\n".join([f"{name}: {summary.shares()[0]}", *summary.shares()[1:]])))


if __name__ == "__main__":
    sys.exit(main())
