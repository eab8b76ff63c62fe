"""The ledger: the outcome of every input record, with its reason and file:line."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.answers import PROMPT_AGAIN
from titan_mi100.data.columns import INSTEAD, MANY_WORDS, Findings
from titan_mi100.data.encode import (
    DROPPED,
    DUPLICATE,
    JOINED,
    KEPT,
    LOST_LAST,
    LOST_REASONING,
    OVERLONG,
    REJECTED,
    STATUSES,
    Chunk,
    Source,
)
from titan_mi100.data.files import BROKEN_ARRAY, label
from titan_mi100.data.strict_json import listed
from titan_mi100.errors import UserError
from titan_mi100.files.durable import copy
from titan_mi100.wording import plural, some

LEDGER, REFUSED_LEDGER = "ledger.csv", "ledger.refused.csv"  # in a run folder
_SHOWN, _SHOWN_OF_A_KIND = 20, 5  # bad records listed in a message, in all and per kind; the others are counted
_DETAILS = 100_000  # records whose full reason is kept; for later ones only the kind of reason, to bound memory
_MUCH_LOST = 0.2  # share of a path's rows or tokens lost to seq_len that causes a warning
_IGNORED_SHOWN = 12  # ignored keys listed in the summary
_SETS = ("", "train", "validation")
NO_SET, TRAIN, VALIDATION = range(len(_SETS))
_WRITTEN = ["file", "line", "element", "status", "set", "tokens", "supervised", "documents", "kind"]


class Ledger:
    """Collects the input records chunk by chunk. `close` joins them and finds duplicates; then the rest can be used."""

    def __init__(self, sources: Sequence[Source], paths: Sequence[str] = (), can_split: bool = True) -> None:
        """
        Args:
            sources: the input files; `Source.pattern` is an index in `paths`.
            paths: the paths and globs of the config, for messages.
            can_split: rows may be cut into pieces.
        """
        self._can_split = can_split
        self._sources, self._paths = sources, paths
        self._chunks: list[np.ndarray] = []
        self._kinds: list[str] = [""]  # kinds of reasons; index 0: no reason
        self._details: dict[int, str] = {}  # record number -> full reason
        self._added = 0  # records so far
        self._findings = Findings()

    def add(self, chunk: Chunk) -> None:
        """Add the next records; chunks come in the order of the files. Fills in the chunk's "kind"."""
        for index, (kind, detail) in chunk.reasons.items():
            if kind not in self._kinds:
                self._kinds.append(kind)
            chunk.records["kind"][index] = self._kinds.index(kind)
            if len(self._details) < _DETAILS:
                self._details[self._added + index] = detail
        if len(self._findings.ignored) < _DETAILS:
            self._findings.add(chunk.findings, self._added)
        self._chunks.append(chunk.records)
        self._added += len(chunk.records)

    def close(self) -> None:
        """Call it after the last chunk. Sets `records`, (records,) encode.RECORD, and marks duplicates in it."""
        assert self._chunks, "RecordReader refuses files without a record"
        self.records = np.concatenate(self._chunks)
        self._chunks = []
        self.original = self._find_originals()
        self.records["status"][self.original >= 0] = DUPLICATE

    def _find_originals(self) -> np.ndarray:
        """For each record the number of the first record with the same content, or -1 if it is the first itself.

        Only records with documents are compared: a row that is rejected twice counts as rejected, not as a duplicate.

        Returns:
            (records,) int64.
        """
        used = np.flatnonzero(self.records["documents"])
        hashes = self.records["hash"][used]
        order = np.lexsort(hashes.T)  # stable: equal hashes become neighbours and keep the order of the files
        repeats = np.zeros(len(order), dtype=bool)  # whether order[i] has the same content as order[i - 1]
        repeats[1:] = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
        # For each index in `order` the last index at or before it that repeats nothing, which is the first record with
        # this content.
        first = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
        originals = np.full(len(self.records), -1, dtype=np.int64)
        originals[used[order[repeats]]] = used[order[first[repeats]]]
        return originals

    def patterns(self) -> np.ndarray:
        """(records,) int64: the index in `sets.patterns` of each record's path."""
        return np.array([source.pattern for source in self._sources])[self.records["file"]]

    def where(self, number: int) -> str:
        """The `file:line` of a record."""
        record = self.records[number]
        return f"{self._sources[record['file']].path}:{label(record['line'], record['element'])}"

    def reason(self, number: int) -> str:
        """Why a record was not kept unchanged; "" if it was."""
        record, detail = self.records[number], self._details.get(number, "")
        kind, duplicate = self._kinds[record["kind"]], record["status"] == DUPLICATE
        reason = detail if kind in detail else f"{kind}: {detail}" if detail else kind
        parts = [reason] if reason else []
        if duplicate:
            parts.insert(0, f"of {self.where(self.original[number])}" + ("" if record["set"] else ", left out"))
        return "; ".join(parts)

    def refusal(self, config: DataConfig) -> str:
        """Why these files are refused: one line per bad record, then totals and the remedy. "" if they are accepted."""
        kinds = self.records["kind"]
        bad = np.flatnonzero(self.records["status"] == REJECTED)
        counts = self._count_kinds(bad)
        # Two kinds are never skipped: a broken array, because the rows after the error are unknown; and a row that is
        # too long, which is bad only if the user asked to stop for it (data.overlong = "error").
        never_skipped = BROKEN_ARRAY in counts or OVERLONG in counts
        skippable = config.on_bad_row == "skip" and not never_skipped
        if not bad.size or (skippable and len(bad) <= config.max_bad_rows):
            return ""
        examples = [bad[kinds[bad] == self._kinds.index(kind)][:_SHOWN_OF_A_KIND] for kind in counts]
        shown = np.sort(np.concatenate(examples))[:_SHOWN].tolist()
        lines = [f"{self.where(number)}: {self.reason(number)}" for number in shown]
        if (rest := len(bad) - len(shown)) > 0:
            lines.append(f"... and {rest:,} more; {len(bad):,} bad rows in total ({_top_kinds(counts, _SHOWN)})")
        if skippable:
            most = config.max_bad_rows
            lines.append(f"more than [data] max_bad_rows = {most} rows are bad; correct them or raise it")
        elif config.on_bad_row != "skip" and not never_skipped and len(bad) < len(kinds):
            lines.append("correct these rows, or skip them with --data.on_bad_row skip")
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """Lines for the log: totals, one line for each status other than kept that occurs, and the ignored keys."""
        statuses, tokens = self.records["status"], self.records["tokens"]
        read = f"{plural(len(statuses), 'row')} read, {plural(int(tokens.sum()), 'token')}"
        lines = [f"ledger: {read}; {plural(int(np.count_nonzero(statuses == KEPT)), 'row')} kept"]
        for status, name in enumerate(STATUSES):
            of_status = np.flatnonzero(statuses == status)
            if not of_status.size or status == KEPT:
                continue
            reasons = _top_kinds(self._count_kinds(of_status), 4)
            if status == DUPLICATE:
                left_out, train, validation = np.bincount(self.records["set"][of_status], minlength=len(_SETS)).tolist()
                used = {"left out": left_out, "repeated in training": train, "repeated in validation": validation}
                reasons = ", ".join(f"{name}: {number:,}" for name, number in used.items() if number)
            first = f", the first at {self.where(of_status[0])}" if status in (DROPPED, DUPLICATE, REJECTED) else ""
            line = f"  {name}: {plural(len(of_status), 'row')}, {plural(int(tokens[of_status].sum()), 'token')}"
            lines.append(line + (f" ({reasons}{first})" if reasons or first else ""))
        if self._findings.ignored:
            counted = sorted(self._findings.ignored.items(), key=lambda item: (-item[1], item[0]))
            keys = some((f"{listed([key])}: {number:,}" for key, number in counted), _IGNORED_SHOWN)
            lines.append(f"  keys that were ignored: {keys}")
        if masks := self._findings.followed:
            keys = some(f"{listed([key])}: {number:,}" for key, number in sorted(masks.items()))
            lines.append(f"  masks that were followed (1 is learned): {keys}")
        lines += ["  " + line for line in self._noted(False)]
        return lines

    def lost(self) -> list[tuple[float, float, str]]:
        """Losses to seq_len of each path that has any.

        Returns:
            Per path: share of its rows that are dropped, share of its tokens that are cut off, and a message with
            both and the remedy. Rejected rows do not count.
        """
        losses, numbers, records = [], self.patterns(), self.records
        for number, path in enumerate(self._paths):
            own = records[(numbers == number) & (records["tokens"] > 0)]  # rejected rows have no tokens
            if not own["lost"].any():
                continue
            is_dropped = (own["status"] == DROPPED) & (own["lost"] > 0)
            rows, tokens = float(np.mean(is_dropped)), float(own["lost"].sum() / own["tokens"].sum())
            most = int(np.quantile(own["tokens"], 0.95, method="higher"))
            text = f"{path}: {rows:.1%} of the rows and {tokens:.1%} of the tokens are lost to training.seq_len"
            which = f"95% of the rows have at most {most:,} tokens"
            if most < own["tokens"][own["lost"] > 0].min():  # few rows are long: that number would not help
                which = f"the longest row has {own['tokens'].max():,} tokens"
            remedy = f"{which}: raise it" + ', or set data.overlong = "split"' * self._can_split
            losses.append((rows, tokens, f"{text}; {remedy}"))
        return losses

    def _count_kinds(self, chosen: np.ndarray) -> Counter[str]:
        counts = np.bincount(self.records["kind"][chosen], minlength=len(self._kinds)).tolist()
        return Counter({kind: number for kind, number in zip(self._kinds, counts, strict=True) if number})

    def warnings(self, config: DataConfig) -> list[str]:
        """Facts that may be intended, but often are mistakes of the user."""
        lines = []
        # validation_fraction puts duplicates into the same set, so only separate validation files can cause this.
        twice = np.flatnonzero((self.original >= 0) & (self.records["set"] == VALIDATION))
        twice = twice[self.records["set"][self.original[twice]] == TRAIN]
        if twice.size:
            first = f"{self.where(twice[0])} is {self.where(self.original[twice[0]])}"
            lines.append(
                f"{len(twice):,} validation rows are training rows too, so the validation loss is too low ({first})"
            )
        for key, unused in sorted(self._findings.unused.items(), key=lambda item: -item[1].words)[:_SHOWN]:
            if unused.words > MANY_WORDS * unused.rows:
                mean = f"{unused.rows:,} rows have {unused.words / unused.rows:.0f} words there on average"
                lines.append(
                    f"{listed([key])} is not used: {mean}, such as {unused.example} at {self.where(unused.record)}; "
                    "name it in one of data.prompt_column, response_column, system_column and text_column, or, if it "
                    "does not matter, in data.ignored_keys"
                )
        if (nulls := self._findings.nulls) and not config.null_arguments:
            counted = some(f"{number:,} {name}" for name, number in sorted(nulls.items()))
            remedy = 'set data.null_arguments to "keep" or "drop"'
            lines.append(f"{nulls.total():,} tool calls have nulls in their arguments ({counted}); {remedy}")
        lines += [text for *shares, text in self.lost() if max(shares) > _MUCH_LOST]
        kinds = self._count_kinds(np.arange(len(self.records)))
        for kind in filter(kinds.get, (LOST_LAST, LOST_REASONING, PROMPT_AGAIN, JOINED)):
            first = np.flatnonzero(self.records["kind"] == self._kinds.index(kind))[0]
            self._findings.notes[kind.replace(" ", "_")] = kinds[kind], int(first)
        return lines + self._noted(True)

    def _noted(self, with_remedy: bool) -> list[str]:
        lines = []
        for note, (rows, record) in sorted(self._findings.notes.items()):
            text, semicolon, remedy = INSTEAD["note"][note].partition(";")
            if bool(remedy) == with_remedy:
                lines.append(f"{plural(rows, 'row')} with {text}, the first at {self.where(record)}{semicolon}{remedy}")
        return lines

    def write(self, path: Path) -> None:
        """All records as CSV: file, line, status, set, tokens, supervised, documents, reason."""
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("file", "line", "status", "set", "tokens", "supervised", "documents", "reason"))
            # in blocks: tolist() takes much more memory than the array
            for start in range(0, len(self.records), 65536):
                writer.writerows(self._lines(start, self.records[_WRITTEN][start : start + 65536].tolist()))

    def _lines(self, start: int, records: list[tuple[int, ...]]) -> Iterator[tuple[object, ...]]:
        for number, record in enumerate(records, start):
            file, line, element, status, used_in, tokens, supervised, documents, kind = record
            plain = status != DUPLICATE and not kind and (used_in or not documents)
            reason = "" if plain else self.reason(number)
            first_columns = (self._sources[file].path, label(line, element), STATUSES[status], _SETS[used_in])
            yield (*first_columns, tokens, supervised, documents, reason)


def _top_kinds(kinds: Counter[str], most: int) -> str:
    """The `most` frequent kinds of reasons, with their counts."""
    return ", ".join(f"{kind}: {number:,}" for kind, number in kinds.most_common(most) if kind)


def has_trained(folder: Path) -> bool:
    """Whether the ledger in a run folder belongs to steps that were trained: a refused start must not change it."""
    return (folder / "metrics.jsonl").exists()


def copy_ledger(ledger: Path, target: Path) -> None:
    """Copy a ledger into a run folder. Raises UserError: it cannot be written."""
    try:
        copy(ledger, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None
