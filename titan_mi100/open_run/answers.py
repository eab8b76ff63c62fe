"""What an objective needs beside the rows: a reference's sums, a teacher's distributions; and the pass that reads them.

The pass runs in the run's layout before training, over all rows, a part after the other. Every rank makes the same
calls.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import torch

from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import Config
from titan_mi100.data.answer_store import (
    IMPORT,
    VLLM,
    Arrays,
    Column,
    Identity,
    LogprobStore,
    Wanted,
    WithColumns,
    by_document,
    teacher_columns,
    tokens_hash,
)
from titan_mi100.data.answers import LABEL, LABELS, REFERENCE
from titan_mi100.data.loader import validation_batches
from titan_mi100.data.prepare import cache_folder
from titan_mi100.data.prepared import PADDING_ROW, PackedDataset, Prepared, SourceRows
from titan_mi100.data.rows import Row
from titan_mi100.errors import Preempted, UserError
from titan_mi100.files.durable import sha256_of
from titan_mi100.log import ByteProgress, log
from titan_mi100.objectives.record import Record
from titan_mi100.open_run.run import Run
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import World, from_rank_zero, gather_values, raise_together
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.watch.heartbeat import VALIDATION
from titan_mi100.weights.load import base_identity
from titan_mi100.wording import bytes_in_words

FOLDER = "reference"  # in a run folder
_COMPARED = 64  # rows that another layout's reference is compared in
_APART = 1e-3  # difference of a sum of log p above which another layout's reference is warned of


def with_columns(data: Prepared, columns: Mapping[str, Column]) -> Prepared:
    """The data with further arrays in each row. Args: columns: may be filled later."""

    def wrapped(sources: list[SourceRows]) -> list[SourceRows]:
        return [replace(source, rows=WithColumns(_packed(source), columns)) for source in sources]

    return replace(data, sources=wrapped(data.sources), validation=wrapped(data.validation))


def _packed(source: SourceRows) -> PackedDataset:
    assert isinstance(source.rows, PackedDataset), "config.check refuses corpora"
    return source.rows


class _ConcatenatedRows:
    """The rows of several sets, one after the other, or a part of them; a RowSet as far as validation_batches reads."""

    def __init__(self, sets: Sequence[PackedDataset], part: range | None = None) -> None:
        self.sets = sets
        self._ends = list(accumulate(map(len, sets)))
        self.part = range(self._ends[-1]) if part is None else part

    def __len__(self) -> int:
        return len(self.part)

    def _place(self, index: int) -> tuple[PackedDataset, int]:
        number = self.part[index]
        which = next(i for i, end in enumerate(self._ends) if number < end)
        return self.sets[which], number - self._ends[which] + len(self.sets[which])

    def row(self, index: int) -> Row:
        rows, number = (self.sets[0], PADDING_ROW) if index == PADDING_ROW else self._place(index)
        return rows.row(number)

    def documents_of(self, index: int) -> np.ndarray:
        rows, number = self._place(index)
        return rows.documents_of(number)


def _adapters_of(config: Config) -> str:
    """Identifies how a LoRA run's model begins, beside its base: the base's format and the adapter's files."""
    lora = config.lora
    if not lora.rank:
        return ""
    files = sorted(Path(lora.initial_load_path).glob("*.safetensors")) if lora.initial_load_path else []
    return " ".join(["", lora.base, *map(sha256_of, files)])


class LogprobPass:
    """Reads what the model thinks of all rows of the data."""

    def __init__(
        self, config: Config, world: World, spec: ModelSpec, data: Prepared, layout: Layout, batch: Batch, dp_rank: int
    ) -> None:
        self._config, self._world, self._spec = config, world, spec
        self._data, self._layout, self._batch = data, layout, batch
        self._dp_rank = dp_rank
        self._rows = _ConcatenatedRows([_packed(source) for source in (*data.sources, *data.validation)])
        self._vocabulary = data.facts.n_vocab or spec.vocab_size  # without the model's padding
        self.wanted = Wanted(self._rows.sets, self._vocabulary)

    def about(self, kind: str, k: int, attention: str) -> Identity:
        """A collective."""
        weights = from_rank_zero(partial(_adapters_of, self._config))
        weights = (
            base_identity(self._config.checkpoint.initial_load_path, self._config.training.seed, self._spec) + weights
        )
        dtype, layout = self._config.training.mixed_precision_param, self._layout.describe()
        tokenizer, make = self._data.facts.tokenizer, self.wanted.about
        about: Identity = from_rank_zero(lambda: make(kind, weights, tokenizer, k, dtype, attention, layout))
        return about

    def fill(
        self, model: ParallelModel, store: LogprobStore, stop: Callable[[], bool], beat: Callable[[], None], cache: Path
    ) -> None:
        """Make the parts that the store lacks; rank 0 writes them. A collective.

        Args:
            stop: whether this process was told to. beat: called for each microbatch. cache: see LogprobStore.verify.

        Raises:
            Preempted: told to stop; the parts before are kept.
            UserError: the store cannot be written.
        """
        about = store.about
        missing: list[int] = from_rank_zero(lambda: [n for n in range(about.parts) if n not in store.parts])
        with raise_together():
            if self._world.rank == 0:
                _make_room(store, self._size(about) * len(missing) // max(1, about.parts))
                store.begin()
                store.verify(self.wanted, cache)
        amount = f"{about.kind}: log probabilities of {len(self._rows):,} rows"
        log.info(f"{amount}, {len(missing)} of {about.parts} parts are to be made, in {store.folder}")
        with ByteProgress(about.kind, len(missing) * about.part_rows) as progress:
            for number in missing:
                first = number * about.part_rows
                part = range(first, min(first + about.part_rows, len(self._rows)))
                try:
                    arrays = self.read(model, part, about.k, beat, stop)
                except Preempted:
                    amount = f"{len(store.parts)} of {about.parts} parts, which are kept"
                    raise Preempted(f"stopped: the {about.kind} is complete in {amount}") from None
                with raise_together():
                    if self._world.rank == 0:
                        store.write(number, arrays, self.wanted)
                progress.advance(about.part_rows)

    def _size(self, about: Identity) -> int:
        """Bytes of a whole store, about."""
        learned = sum(source.counts.supervised for source in (*self._data.sources, *self._data.validation))
        return 24 * about.documents + 8 * about.k * learned

    def read(
        self,
        model: ParallelModel,
        part: range,
        k: int,
        beat: Callable[[], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> Arrays:
        """The arrays of a part of the rows, on rank 0; elsewhere empty. A collective.

        Raises:
            Preempted: a process was told to stop.
        """
        rows, width, arrays, done = _ConcatenatedRows(self._rows.sets, part), max(1, 2 * k), list[Arrays](), 0
        local, ranks = self._batch.local_batch_size, self._batch.dp_degree
        batches = validation_batches(rows, self._batch, self._dp_rank)  # type: ignore[arg-type]
        own = self._dp_rank if model.counts_loss else -1  # of each data-parallel rank one rank's values count
        with model.learning(Record(k, self._vocabulary)), model.evaluating():
            while some := list(islice(batches, 2 * self._layout.pp)):  # as many as keep a pipeline busy
                tensors = [torch.tensor([own, stop()], dtype=torch.float64)]
                for microbatch in some:
                    beat()
                    output = model.forward(microbatch)
                    size = microbatch["labels"].numel() * width
                    tensors.append(torch.zeros(size, dtype=torch.float64) if output is None else output.cpu())
                gathered = gather_values(torch.cat(tensors), self._world.device)
                if gathered[:, 1].any():
                    raise Preempted("while log probabilities were read")
                if self._world.rank == 0:
                    # a microbatch of data-parallel rank r begins at row r x local of its round
                    of_rank = {int(each[0]): each[2:].view(len(some), local, -1, width) for each in gathered}
                    dense = torch.stack([of_rank[rank] for rank in range(ranks)], dim=1).flatten(0, 2)
                    arrays.append(self._arrays(rows, range(done, min(done + len(dense), len(rows))), dense.numpy(), k))
                done += len(some) * local * ranks
        return {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]} if arrays else {}

    def _arrays(self, rows: _ConcatenatedRows, indices: range, dense: np.ndarray, k: int) -> Arrays:
        """Args: dense: (rows, seq, width), as Record returns it, of these rows, then of padding."""
        numbers, tokens, sums, chosen = list[int](), list[int](), list[float](), [np.zeros((0, 2 * k))]
        for place_of_row, index in enumerate(indices):
            row = rows.row(index)
            learned = row.supervised()[1:]  # of the position before: it predicts the token
            for position, document in enumerate(rows.documents_of(index).tolist()):
                mask = learned & (row.document_ids[:-1] == position)
                numbers.append(document)
                tokens.append(int(mask.sum()))
                if k:
                    chosen.append(dense[place_of_row, :-1][mask])
                else:
                    sums.append(float(dense[place_of_row, position, 0]))
        arrays: dict[str, np.ndarray] = {"documents": np.array(numbers, np.int64), "tokens": np.array(tokens, np.int64)}
        if not k:
            return {**arrays, "sums": np.array(sums)}
        every = np.concatenate(chosen)
        return {**arrays, "ids": every[:, :k].astype(np.int32), "log_p": every[:, k:].astype(np.float32)}


def _make_room(store: LogprobStore, size: int) -> None:
    there = store.folder
    while not os.path.isdir(there):
        there = there.parent
    if (free := shutil.disk_usage(there).free) < size:
        reason = f"{bytes_in_words(free)} are free, the {store.about.kind} takes {bytes_in_words(size)}"
        raise UserError(f"{store.folder}: {reason}; free some")
    log.info(f"{store.about.kind}: takes {bytes_in_words(size)}")


def teach(run: Run) -> tuple[str, str]:
    """Write the teacher's folder. Returns what RunState wants. A collective.

    Raises:
        Preempted: told to stop; the parts before are kept.
        UserError: the folder is that of another teacher or of other rows, or cannot be written.
    """
    config, folder = run.config, Path(run.config.objective.teacher)
    if config.objective.top_k > run.data.facts.n_vocab:
        problem = f"= {config.objective.top_k}: the tokenizer has {run.data.facts.n_vocab:,} ids"
        raise UserError(f"objective.top_k {problem}; the usual is 32")
    layout, batch = config.layout(run.world.size), run.stream.batch
    reading = LogprobPass(config, run.world, config.spec(), run.data, layout, batch, run.stream.dp_rank)
    about = reading.about("teacher", config.objective.top_k, run.about["chosen"]["attention"]["name"])
    with raise_together():
        store = LogprobStore(folder, about, "name another folder with --out, or delete this one")
    beat = partial(run.heartbeat.begin, VALIDATION, "teacher")
    reading.fill(run.model, store, run.wants_to_stop, beat, cache_folder(config.data))
    with raise_together():
        if run.world.rank == 0:
            store.warn_of_mass()
    log.info(f'teacher: {folder} is complete; learn from it: [objective] name = "distill", teacher = "{folder}"')
    return "", "the folder is complete"


class Reference:
    """The reference of a run: opens its store, decides whether a pass is needed, and gives the rows its sums."""

    def __init__(self, reading: LogprobPass, folder: Path | None, about: Identity, columns: dict[str, Column]) -> None:
        """A collective."""
        self._pass, self._columns, self._about = reading, columns, about
        self._store: LogprobStore | None = None
        with raise_together():
            if folder is not None:
                remedy = f"delete {folder / FOLDER}: it is made again from the weights that training starts from"
                self._store = LogprobStore(folder / FOLDER, about, remedy)
        before = self._store.about if self._store else about
        self._is_elsewhere = (before.layout, before.attention) != (about.layout, about.attention)
        self._is_complete = from_rank_zero(lambda: self._store is not None and self._store.is_complete)

    @property
    def needs_base(self) -> bool:
        """Whether the weights that training starts from must be loaded: to read the reference, or to compare."""
        return not self._is_complete or self._is_elsewhere

    def read(self, model: ParallelModel, stop: Callable[[], bool], beat: Callable[[], None], cache: Path) -> None:
        """With these weights in the model, if needs_base. A collective."""
        store, reading = self._store, self._pass
        if store is None:  # nothing is recorded: kept in memory
            arrays = reading.read(model, range(self._about.rows), 0, beat)
            sums = np.full(self._about.documents, np.nan)
            if arrays:
                sums[arrays["documents"]] = arrays["sums"]
            sums = from_rank_zero(lambda: sums)
        else:
            if not self._is_complete:
                reading.fill(model, store, stop, beat, cache)

            def read() -> np.ndarray:
                again = LogprobStore(store.folder, store.about, "start again")
                again.verify(reading.wanted, cache)
                return again.sums()

            sums = from_rank_zero(read)
            if self._is_elsewhere:
                self._compare(model, store.about, sums, beat)
        self._columns[REFERENCE] = by_document(sums)

    def _compare(self, model: ParallelModel, before: Identity, sums: np.ndarray, beat: Callable[[], None]) -> None:
        first = range(min(before.rows, _COMPARED))
        arrays = self._pass.read(model, first, 0, beat)
        if arrays:
            apart = float(np.abs(arrays["sums"] - sums[arrays["documents"]]).max(initial=0.0))
            message = f"the reference was made in another layout ({before.layout}, {before.attention}): "
            message += f"log p of the first answers differs by at most {apart:.2g} there"
            if apart > _APART:
                log.warning(f"{message}; delete {FOLDER}/ in the run folder to make it again here")
            else:
                log.info(message)


def columns_of(config: Config, world: World, data: Prepared, spec: ModelSpec) -> dict[str, Column]:
    """The further arrays that are known before the model is. A collective.

    Raises:
        UserError: on all ranks; the teacher's folder does not fit.
    """
    columns = dict[str, Column]()
    if config.objective.answers == LABELS:
        labels = _packed(data.sources[0]).documents.labels
        assert labels is not None
        columns[LABEL] = by_document(labels)
    if config.objective.name == "distill":
        digest = from_rank_zero(lambda: tokens_hash(map(_packed, data.sources)))
        with raise_together():
            store = open_teacher(Path(config.objective.teacher), data, digest)
            sets = [_packed(source) for source in (*data.sources, *data.validation)]
            if world.rank == 0:
                expected = Wanted(sets, data.facts.n_vocab or spec.vocab_size)
                store.verify(expected, cache_folder(config.data) if data.facts.files else None)
                store.warn_of_mass()
            columns |= teacher_columns(store, sets)
        log.info(f"teacher: {store.about.k} ids per token, in {store.folder}, of {store.about.weights}")
    return columns


def open_teacher(folder: Path, data: Prepared, digest: str) -> LogprobStore:
    """Args: digest: tokens_hash of the data. Raises UserError: it is not complete, or of other rows."""
    count = len(_packed(data.sources[0]).documents.starts) - 1
    seq_len = data.facts.seq_len
    about = Identity("teacher", "", digest, data.facts.tokenizer, count, rows=0, seq_len=seq_len, k=0, dtype="")
    remedy = "make it of this run's data: titan-mi100 teach"
    store = LogprobStore(folder, about, remedy, only=("kind", "tokenizer", "tokens", "documents"))
    if not store.is_begun:
        raise UserError(f"objective.teacher = {str(folder)!r} holds no teacher's answers; {remedy}")
    if not store.is_complete:
        problem = f"{folder}: {len(store.parts)} of {store.about.parts} parts are there"
        remedy = IMPORT if store.about.dtype == VLLM else "run titan-mi100 teach again: it goes on"
        raise UserError(f"{problem}; {remedy}")
    return store
