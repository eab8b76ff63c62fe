"""What became of every row of input, with its reason and file:line."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.files import BROKEN_ARRAY
from titan_mi100.data.origins import label
from titan_mi100.data.sft import DROPPED, DUPLICATE, KEPT, LOST_REASONING, OVERLONG, REJECTED, STATUSES
from titan_mi100.data.tokenise import Chunk, Source

_SHOWN, _SHOWN_OF_A_KIND = 20, 5  # bad rows in a message before the rest are only counted
_DETAILS = 100_000  # reasons kept word for word; of later rows only their kind
_MANY_OVERLONG = 0.1  # of all rows: warned of
_SETS = ("", "train", "validation")
NO_SET, TRAIN, VALIDATION = range(len(_SETS))


class _Columns(NamedTuple):
    """What is known of consecutive rows of input, an entry for each."""

    files: np.ndarray  # int32: its number among the sources
    numbers: np.ndarray  # (rows, 2) int64: the line, and in a JSON array the element
    statuses: np.ndarray  # uint8: of sft.STATUSES
    tokens: np.ndarray  # int64: before anything was cut off
    documents: np.ndarray  # int64: how many it gave
    supervised: np.ndarray  # int64: tokens of these
    kinds: np.ndarray  # uint16: of the reason, among the ledger's kinds; 0: there is none
    hashes: np.ndarray  # (rows, 2) uint64: of the content


class Ledger:
    """Collects the rows of input chunk by chunk; `close` makes the arrays, one entry per row."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._chunks: list[_Columns] = []
        self._kinds: list[str] = [""]
        self._details: dict[int, str] = {}
        self._rows = 0

    def add(self, chunk: Chunk) -> None:
        kinds = np.zeros(len(chunk.numbers), dtype=np.uint16)
        for place, (kind, detail) in chunk.reasons.items():
            if kind not in self._kinds:
                self._kinds.append(kind)
            kinds[place] = self._kinds.index(kind)
            if len(self._details) < _DETAILS:
                self._details[self._rows + place] = detail
        first = np.concatenate(([0], np.cumsum(chunk.supervised)))
        stops = np.cumsum(chunk.documents)
        supervised = first[stops] - first[stops - chunk.documents]
        files = np.full(len(kinds), chunk.file, dtype=np.int32)
        self._chunks.append(
            _Columns(
                files, chunk.numbers, chunk.statuses, chunk.tokens, chunk.documents, supervised, kinds, chunk.hashes
            )
        )
        self._rows += len(kinds)

    def close(self) -> None:
        """After the last chunk: make the arrays and find duplicates."""
        assert self._chunks, "files without a row are refused before"
        columns = _Columns(*map(np.concatenate, zip(*self._chunks, strict=True)))
        self._chunks = []
        self.files, self.numbers, self.statuses, self.tokens, self.documents, self.supervised = columns[:6]
        self.kinds, self.hashes = columns[6:]
        self.sets = np.zeros(len(self.files), dtype=np.uint8)  # of _SETS: where its documents are used
        self.original = self._find_originals()
        self.statuses[self.original >= 0] = DUPLICATE

    def _find_originals(self) -> np.ndarray:
        """For each row the first one with the same content, if that came before; else -1. (rows,) int64.

        Only rows that gave documents count: what was rejected twice is rejected, and no duplicate.
        """
        used = np.flatnonzero(self.documents)
        order = used[np.lexsort(self.hashes[used].T)]  # equal content side by side, in the order of the files (stable)
        repeats = np.zeros(len(order), dtype=bool)  # whether a row of `order` has the content of the one before
        repeats[1:] = (self.hashes[order[1:]] == self.hashes[order[:-1]]).all(axis=1)
        # For each place in `order` the place of the last row that repeats nothing: the first one with this content.
        first = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
        originals = np.full(len(self.files), -1, dtype=np.int64)
        originals[order[repeats]] = order[first[repeats]]
        return originals

    def where(self, row: int) -> str:
        """Its file:line."""
        return f"{self._sources[self.files[row]].path}:{label(*self.numbers[row].tolist())}"

    def reason(self, row: int) -> str:
        kind, detail = self._kinds[self.kinds[row]], self._details.get(row, "")
        reason = detail if kind in detail else f"{kind}: {detail}" if detail else kind
        if self.documents[row] and not self.sets[row] and self.statuses[row] != DUPLICATE:
            reason = f"{reason}; not in an epoch's part of its file" if reason else "not in an epoch's part of its file"
        if self.statuses[row] == DUPLICATE:
            again = f"of {self.where(self.original[row])}" + ("" if self.sets[row] else ", left out")
            return f"{again}; {reason}" if reason else again
        return reason

    def refusal(self, config: DataConfig) -> str:
        """Why nothing is trained on these files, a line per bad row and in the end their numbers; "": nothing is."""
        bad = np.flatnonzero(self.statuses == REJECTED)
        never = {BROKEN_ARRAY, OVERLONG}  # the second is a bad row only under data.overlong = "error"
        unskippable = not never.isdisjoint(self._kinds[kind] for kind in set(self.kinds[bad]))
        if not bad.size or (config.on_bad_row == "skip" and len(bad) <= config.max_bad_rows and not unskippable):
            return ""
        counts = self._count_kinds(bad)
        examples = [bad[self.kinds[bad] == self._kinds.index(kind)][:_SHOWN_OF_A_KIND] for kind in counts]
        shown = np.sort(np.concatenate(examples))[:_SHOWN].tolist()
        lines = [f"{self.where(row)}: {self.reason(row)}" for row in shown]
        if len(bad) > len(shown):
            listed = ", ".join(f"{kind}: {number:,}" for kind, number in counts.most_common(_SHOWN))
            lines.append(f"... and {len(bad) - len(shown):,} more; {len(bad):,} bad rows in all ({listed})")
        if config.on_bad_row == "skip" and not unskippable:
            lines.append(
                f"more than [data] max_bad_rows = {config.max_bad_rows} rows are bad; correct them or raise it"
            )
        elif not unskippable and len(bad) < len(self.files):
            lines.append('correct these rows, or leave them out with data.on_bad_row = "skip"')
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """Totals, and a line for each status but kept that occurs."""
        kept = np.count_nonzero(self.statuses == KEPT)
        read = f"{len(self.files):,} rows read, {int(self.tokens.sum()):,} tokens"
        lines = [f"ledger: {read}; {kept:,} rows kept"]
        for status, name in enumerate(STATUSES):
            rows = np.flatnonzero(self.statuses == status)
            if not rows.size or status == KEPT:
                continue
            why = self._count_kinds(rows).most_common(4)
            reasons = ", ".join(f"{kind}: {number:,}" for kind, number in why if kind)
            if status == DUPLICATE:
                used = {name: np.count_nonzero(self.sets[rows] == i) for i, name in enumerate(_SETS)}
                said = (("left out", used[""]), ("trained on again", used["train"]), ("validation", used["validation"]))
                reasons = ", ".join(f"{name}: {number:,}" for name, number in said if number)
            first = f", the first at {self.where(rows[0])}" if status in (DROPPED, DUPLICATE, REJECTED) else ""
            line = f"  {name}: {len(rows):,} row{'s' * (len(rows) != 1)}, {int(self.tokens[rows].sum()):,} tokens"
            lines.append(line + (f" ({reasons}{first})" if reasons or first else ""))
        return lines

    def _count_kinds(self, rows: np.ndarray) -> Counter[str]:
        counts = np.bincount(self.kinds[rows], minlength=len(self._kinds)).tolist()
        return Counter({kind: number for kind, number in zip(self._kinds, counts, strict=True) if number})

    def warnings(self, config: DataConfig) -> list[str]:
        """What is no mistake by itself, but easily one of the user's."""
        lines = self._straddling()
        kinds = self._count_kinds(np.arange(len(self.kinds)))
        share = kinds.get(OVERLONG, 0) / len(self.files)
        if share > _MANY_OVERLONG and config.overlong in ("drop", "truncate"):
            what = {"drop": "dropped", "truncate": "cut"}[config.overlong]
            lines.append(f"{share:.0%} of all rows are too long and {what}; see training.seq_len and data.overlong")
        if lost := kinds.get(LOST_REASONING, 0):
            first = np.flatnonzero(self.kinds == self._kinds.index(LOST_REASONING))[0]
            lines.append(
                f"{lost:,} rows have reasoning in earlier turns that the template leaves out, the first at "
                f"{self.where(first)}; data.earlier_thinking decides whether such turns are learned all the same"
            )
        return lines

    def _straddling(self) -> list[str]:
        """Validation rows that stand in the training files too (only those of separate files can)."""
        twice = np.flatnonzero((self.original >= 0) & (self.sets == VALIDATION))
        twice = twice[self.sets[self.original[twice]] == TRAIN]
        if not twice.size:
            return []
        first = f"{self.where(twice[0])} is {self.where(self.original[twice[0]])}"
        return [f"{len(twice):,} validation rows are training rows too: the validation loss flatters ({first})"]

    def write(self, path: Path) -> None:
        """All rows as CSV: file, line, status, set, tokens, supervised, documents, reason."""
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("file", "line", "status", "set", "tokens", "supervised", "documents", "reason"))
            writer.writerows(self._lines())

    def _lines(self) -> Iterator[tuple[object, ...]]:
        names = [source.path for source in self._sources]
        columns = (self.files, self.numbers, self.statuses, self.sets, self.tokens, self.supervised, self.documents)
        for start in range(0, len(self.files), 65536):  # lists of Python numbers, but not of all rows at once
            block = zip(*(column[start : start + 65536].tolist() for column in columns), strict=True)
            for row, (file, number, status, used_in, tokens, supervised, documents) in enumerate(block, start):
                plain = status != DUPLICATE and not self.kinds[row] and (used_in or not documents)
                reason = "" if plain else self.reason(row)
                yield (
                    names[file], label(*number), STATUSES[status], _SETS[used_in], tokens, supervised, documents, reason
                )  # fmt: skip
