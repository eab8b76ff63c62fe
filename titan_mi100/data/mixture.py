"""Mixes rows of several sources by weight: maps a row number of the run to a source and to one of the source's rows.

Both are pure functions of the seed, the row number and the weights, so any rank can read any row at any time. The
mixture of a run may change when it resumes. A segment is the part of a run with the same sources and weights. A new
segment stores how many rows of each source were read before it, so no row is repeated or skipped.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from titan_mi100.data.mixture_schedule import RowSchedule, shares_of
from titan_mi100.data.prepared import PADDING_ROW, SourceRows
from titan_mi100.data.rows import Row
from titan_mi100.errors import UserError
from titan_mi100.wording import plural

_MANY_EPOCHS, _TOO_MANY_EPOCHS = 10, 1000  # epochs of a source in a run: more are warned of, or refused


@dataclass(frozen=True)
class Segment:
    """A part of a run with one mixture. Checkpoints store the segments of their run.

    Attributes:
        first_row: the row number of the run at which the segment begins.
        consumed: source (`SourceRows.identity`) -> rows read before the segment; also for sources of earlier segments.
        shares: source -> rows per period of the schedule.
        rows: source -> rows until it is exhausted.
        on_exhausted: data.on_exhausted.
    """

    first_row: int
    consumed: dict[str, int]
    shares: dict[str, int]
    rows: dict[str, int]
    on_exhausted: str

    def is_same(self, other: "Segment") -> bool:
        """Whether both have the same mixture, regardless of where they begin."""
        return (self.shares, self.rows, self.on_exhausted) == (other.shares, other.rows, other.on_exhausted)


class _Phase(NamedTuple):
    """A part of a segment with the same active sources. The lists are indexed by a source's number in the schedule."""

    first_row: int
    schedule: RowSchedule
    sources: list[str]  # identities
    consumed: list[int]  # rows read before the phase

    def read(self, source: int, number: int) -> int:
        """Rows of a source that are read before row `number` of the run."""
        return self.consumed[source] + self.schedule.count(source, number - self.first_row)


class Mixture:
    """A `RowSource` that mixes several sources by weight.

    After any number of rows of a segment, each source has given its share of them, rounded up or down, as long as no
    source is exhausted.
    """

    rows_per_epoch = None  # each source has epochs of its own

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
            on_exhausted: "repeat", "drop" or "stop"; see data.on_exhausted.
            in_documents: the weights are shares of the documents; each source's mean length converts them to rows.
            epochs: factor for the sources' own numbers of epochs.
            segments: those of the run so far. If the mixture has changed since, a new one begins at `first_row`.
            first_row: the row number at which the run starts or resumes.
        """
        # Sorted, so that the order of the sources in the config does not change the rows.
        sources = sorted(sources, key=lambda source: source.identity)
        self.sources, self._seed = {source.identity: source for source in sources}, seed

        def segment(number: Callable[[float], Fraction | float]) -> Segment:
            rows = {s.identity: max(1, int(number(s.epochs) * epochs * len(s.rows))) for s in sources}
            shares = dict(zip(rows, shares_of(_weights(sources, rows, in_documents)), strict=True))
            return Segment(first_row, dict.fromkeys(rows, 0), shares, rows, on_exhausted)

        now = segment(lambda epochs: Fraction(repr(epochs)))  # repr: 0.29 becomes 29/100, not its binary value
        self.segments = [*segments]
        if not segments:
            self.segments.append(now)
        # float: a run of an earlier version, which took the binary value, goes on with its rows.
        elif not segments[-1].is_same(now) and not segments[-1].is_same(segment(float)):
            before = consumed_at(segments[-1], seed, first_row)
            self.segments.append(replace(now, consumed={**now.consumed, **before}))
        self._phases, self._end = _phases(self.segments[-1], seed)
        self._starts = [phase.first_row for phase in self._phases]
        self.on_exhausted = on_exhausted

    @property
    def fingerprint(self) -> str:
        """A hash of the sources and their shares, which must not change on resume unless the user allows it."""
        return hashlib.sha256(json.dumps(self.segments[-1].shares).encode()).hexdigest()

    @property
    def end(self) -> int:
        """The row number at which the data end."""
        end = self._end
        if end is None:  # "repeat" has no end by itself: stop when every source has been read for its number of epochs
            [phase], rows = self._phases, self.segments[-1].rows
            left = [rows[key] - phase.consumed[i] for i, key in enumerate(phase.sources)]
            places = [phase.schedule.place_of(i, number - 1) + 1 for i, number in enumerate(left) if number > 0]
            end = phase.first_row + max(places, default=0)
        return end

    def row(self, number: int) -> Row:
        source, index = self.find(number)
        return source.rows.row(index)

    def is_padding(self, number: int) -> bool:
        return self._end is not None and number >= self._end

    def where(self, number: int) -> list[str]:
        source, index = self.find(number)
        return source.rows.where(index)

    def resume_at(self, consumed: int, rows: int, global_batch_size: int) -> int:
        return consumed  # the segments know what was read of each source

    def find(self, number: int) -> tuple[SourceRows, int]:
        """The source of row `number` of the run, and the index of its row; PADDING_ROW after the end."""
        if self.is_padding(number):
            return next(iter(self.sources.values())), PADDING_ROW
        assert number >= self._starts[0], "rows of earlier segments are not read again"
        phase = self._phases[bisect_right(self._starts, number) - 1]
        source_index = phase.schedule.source(number - phase.first_row)
        source = self.sources[phase.sources[source_index]]
        epoch, at = divmod(phase.read(source_index, number), len(source.rows))
        # Seeded by the source's name, so that adding or removing other sources keeps this source's order.
        seed = (self._seed, int.from_bytes(hashlib.sha256(source.name.encode()).digest()[:8], "big"))
        return source, source.rows.shuffled(seed, epoch, at)

    def describe(self, stop: int) -> tuple[list[str], list[str]]:
        """Lines for the log, and warnings.

        Args:
            stop: the row number at which the run ends.

        Raises:
            UserError: a source would be repeated too often.
        """
        lines, warnings, segment = [], list[str](), self.segments[-1]
        consumed, period = consumed_at(segment, self._seed, stop), sum(segment.shares.values())
        for key, source in self.sources.items():
            times = consumed[key] / len(source.rows)
            line = f"{source.name}: {segment.shares[key] / period:.4%} of the rows; "
            read = f"read {times:,.2f} times" if times >= 0.01 else "less than 1% of them read"
            line += f"{plural(len(source.rows), 'row')}, {read} by the end of the run"
            lines.append(f"source {line}")
            if times > _TOO_MANY_EPOCHS:
                raise UserError(f"{line}; the limit is {_TOO_MANY_EPOCHS:,} times: lower its weight, or leave it out")
            if times > _MANY_EPOCHS:
                warnings.append(f"{line}: the model will memorise it")
        return lines, warnings


def consumed_at(segment: Segment, seed: int, number: int) -> dict[str, int]:
    """Rows of each source that are read before row `number` of the run, which lies in this segment."""
    phases, end = _phases(segment, seed)  # none: every source was exhausted before the segment began
    number = number if end is None else min(number, end)
    consumed = dict(segment.consumed)
    for phase, stop in zip(phases, [*(later.first_row for later in phases[1:]), number], strict=False):
        if phase.first_row < number:
            consumed |= {key: phase.read(i, min(stop, number)) for i, key in enumerate(phase.sources)}
    return consumed


def _phases(segment: Segment, seed: int) -> tuple[list[_Phase], int | None]:
    """The phases of a segment, and the row number at which it ends; None if it never ends ("repeat")."""
    phases, first, consumed = list[_Phase](), segment.first_row, dict(segment.consumed)
    if segment.on_exhausted == "repeat":
        keys = list(segment.shares)
        schedule = RowSchedule(list(segment.shares.values()), seed)
        return [_Phase(first, schedule, keys, [consumed[key] for key in keys])], None
    while active := [key for key in segment.shares if consumed[key] < segment.rows[key]]:
        if segment.on_exhausted == "stop" and len(active) < len(segment.shares):
            break
        schedule = RowSchedule([segment.shares[key] for key in active], seed)
        phases.append(_Phase(first, schedule, active, [consumed[key] for key in active]))
        left = [segment.rows[key] - consumed[key] for key in active]
        # The phase ends where the first active source gives its last row.
        places = min(schedule.place_of(i, number - 1) + 1 for i, number in enumerate(left))
        consumed |= {key: consumed[key] + schedule.count(i, places) for i, key in enumerate(active)}
        first += places
    return phases, first


def _weights(sources: Sequence[SourceRows], rows: dict[str, int], in_documents: bool) -> list[float]:
    """The weight of each source, in rows. Without weights in the config, each source weighs as much as it has rows."""
    if not any(source.weight for source in sources):
        return list(map(float, rows.values()))
    lengths = [source.counts.tokens / source.counts.documents if in_documents else 1.0 for source in sources]
    return [source.weight * length for source, length in zip(sources, lengths, strict=True)]
