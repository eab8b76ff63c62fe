"""Rows from several sources by weight: which source a row is from, and which of the source's rows it is.

Both follow from the seed, the row's number and the weights, so that any rank can read any row at any time. A mixture
may change while a run goes on: a segment is the part of a run with the same sources and weights. A new one begins with
how many rows of each source were read before, so nothing is read twice and nothing is left out.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from titan_mi100.data.prepared import PADDING_ROW, Row, SourceRows
from titan_mi100.data.schedule import Schedule, shares_of
from titan_mi100.errors import UserError

_MANY_EPOCHS, _TOO_MANY_EPOCHS = 10, 1000  # of a source in a run: warned of, refused


@dataclass(frozen=True)
class Segment:
    """A part of a run with the same mixture, as the run's checkpoints keep it.

    Attributes:
        first_row: number of the run's row that it begins with.
        consumed: by source (`SourceRows.identity`), also those that the run had earlier: rows that were read before.
        shares: by source: rows of a period of the schedule.
        rows: by source: how many it gives until it is exhausted.
        on_exhausted: as data.on_exhausted.
    """

    first_row: int
    consumed: dict[str, int]
    shares: dict[str, int]
    rows: dict[str, int]
    on_exhausted: str

    def is_same(self, other: "Segment") -> bool:
        """Whether both read the same rows from there on, except for where they begin."""
        return (self.shares, self.rows, self.on_exhausted) == (other.shares, other.rows, other.on_exhausted)


class _Phase(NamedTuple):
    """A part of a segment in which no source drops out; the lists are by the source's place in the schedule."""

    first_row: int
    schedule: Schedule
    sources: list[str]
    consumed: list[int]  # rows that were read before

    def read(self, source: int, number: int) -> int:
        """Rows of a source that are read before row `number` of the run."""
        return self.consumed[source] + self.schedule.count(source, number - self.first_row)


class Mixture:
    """A `RowSource`: rows of several sources. In every beginning of a segment, as long as no source has dropped out,
    each source has its weight's share of the rows, rounded up or down.
    """

    rows_per_epoch = None  # sources have epochs of their own

    def __init__(
        self,
        sources: Sequence[SourceRows],
        seed: int,
        on_exhausted: str,
        in_documents: bool = False,
        epochs: int = 1,
        segments: Sequence[Segment] = (),
        first_row: int = 0,
    ) -> None:
        """
        Args:
            on_exhausted: repeat, drop or stop; see data.on_exhausted.
            in_documents: the weights are shares of the documents, converted by each source's mean length.
            epochs: multiplies the sources' own.
            segments: of the run so far; a new one begins at `first_row` if the mixture has changed.
        """
        sources = sorted(sources, key=lambda source: source.identity)  # in whatever order the config has them
        self.sources, self._seed = {source.identity: source for source in sources}, seed
        rows = {key: max(1, int(source.epochs * epochs * len(source.rows))) for key, source in self.sources.items()}
        shares = dict(zip(rows, shares_of(_weights(sources, rows, in_documents)), strict=True))
        now = Segment(first_row, dict.fromkeys(rows, 0), shares, rows, on_exhausted)
        self.segments = [*segments]
        if not segments:
            self.segments.append(now)
        elif not segments[-1].is_same(now):
            before = consumed_at(segments[-1], seed, first_row)
            self.segments.append(replace(now, consumed={**now.consumed, **before}))
        self._phases, self._end = _phases(self.segments[-1], seed)
        self._starts = [phase.first_row for phase in self._phases]

    @property
    def fingerprint(self) -> str:
        """Of the sources and their shares: what must not change unless the user allows it."""
        return hashlib.sha256(json.dumps(self.segments[-1].shares).encode()).hexdigest()

    @property
    def end(self) -> int:
        """The row number at which the data end."""
        end = self._end
        if end is None:  # all sources are read again and again: when each was read as often as it is to be
            [phase], rows = self._phases, self.segments[-1].rows
            left = [rows[key] - phase.consumed[i] for i, key in enumerate(phase.sources)]
            places = [phase.schedule.place_of(i, number - 1) + 1 for i, number in enumerate(left) if number > 0]
            end = phase.first_row + max(places, default=0)
        return end

    def row(self, number: int) -> Row:
        source, index = self.find(number)
        return source.rows.row(index)

    def where(self, number: int) -> list[str]:
        source, index = self.find(number)
        return source.rows.where(index)

    def find(self, number: int) -> tuple[SourceRows, int]:
        """The source of row `number` of the run, and which of its rows it is; PADDING_ROW behind the end."""
        if self._end is not None and number >= self._end:
            return next(iter(self.sources.values())), PADDING_ROW
        assert number >= self._starts[0], "rows of earlier segments are not read again"
        phase = self._phases[bisect_right(self._starts, number) - 1]
        place = phase.schedule.source(number - phase.first_row)
        source = self.sources[phase.sources[place]]
        epoch, at = divmod(phase.read(place, number), len(source.rows))
        # by name: the same order whatever other sources there are
        seed = (self._seed, int.from_bytes(hashlib.sha256(source.name.encode()).digest()[:8], "big"))
        return source, source.rows.shuffled(seed, epoch, at)

    def describe(self, stop: int) -> tuple[list[str], list[str]]:
        """Lines for the log, and warnings. Args: stop: the row number at which the run ends.

        Raises:
            UserError: a source would be read over and over.
        """
        said, warnings, segment = [], list[str](), self.segments[-1]
        consumed, period = consumed_at(segment, self._seed, stop), sum(segment.shares.values())
        for key, source in self.sources.items():
            times = consumed[key] / len(source.rows)
            line = f"{source.name}: {segment.shares[key] / period:.4%} of the rows; {len(source.rows):,} rows, "
            line += f"{_times(times)} by the end of the run"
            said.append(f"source {line}")
            if times > _TOO_MANY_EPOCHS:
                raise UserError(f"{line}; more than {_TOO_MANY_EPOCHS:,} times: lower its weight, or leave it out")
            if times > _MANY_EPOCHS:
                warnings.append(f"{line}: the model will know it by heart")
        return said, warnings


def _times(times: float) -> str:
    return f"read {times:,.2f} times" if times >= 0.01 else "less than 1% of them read"


def consumed_at(segment: Segment, seed: int, number: int) -> dict[str, int]:
    """Rows of each source that are read before row `number` of the run, which is in this segment."""
    phases, end = _phases(segment, seed)
    if not phases:  # every source was exhausted before
        return dict(segment.consumed)
    number = number if end is None else min(number, end)
    consumed = dict(segment.consumed)
    for phase, stop in zip(phases, [*(later.first_row for later in phases[1:]), number], strict=True):
        if phase.first_row < number:
            consumed |= {key: phase.read(i, min(stop, number)) for i, key in enumerate(phase.sources)}
    return consumed


def _phases(segment: Segment, seed: int) -> tuple[list[_Phase], int | None]:
    """The phases of a segment, and the row number at which it ends; None: never."""
    phases, first, consumed = list[_Phase](), segment.first_row, dict(segment.consumed)
    if segment.on_exhausted == "repeat":
        keys = list(segment.shares)
        schedule = Schedule(list(segment.shares.values()), seed)
        return [_Phase(first, schedule, keys, [consumed[key] for key in keys])], None
    while active := [key for key in segment.shares if consumed[key] < segment.rows[key]]:
        if segment.on_exhausted == "stop" and len(active) < len(segment.shares):
            break
        schedule = Schedule([segment.shares[key] for key in active], seed)
        phases.append(_Phase(first, schedule, active, [consumed[key] for key in active]))
        left = [segment.rows[key] - consumed[key] for key in active]
        places = min(schedule.place_of(i, number - 1) + 1 for i, number in enumerate(left))
        consumed |= {key: consumed[key] + schedule.count(i, places) for i, key in enumerate(active)}
        first += places
    return phases, first


def _weights(sources: Sequence[SourceRows], rows: dict[str, int], in_documents: bool) -> list[float]:
    """In rows: as given, or by the rows that each source gives."""
    if not any(source.weight for source in sources):
        return list(map(float, rows.values()))
    lengths = [source.counts.tokens / source.counts.documents if in_documents else 1.0 for source in sources]
    return [source.weight * length for source, length in zip(sources, lengths, strict=True)]
