"""What an objective needs beside the rows: labels, and a teacher's distributions."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titan_mi100.config.settings import DataConfig, ObjectiveConfig
from titan_mi100.data.answer_store import (
    IMPORT,
    SAMPLED,
    VLLM,
    ByLearnedToken,
    Column,
    Identity,
    LogprobStore,
    Wanted,
    WithColumns,
    by_document,
    placed,
    teacher_columns,
    tokens_hash,
)
from titan_mi100.data.answers import LABEL, LABELS, TEACHER
from titan_mi100.data.prepare import cache_folder
from titan_mi100.data.prepared import PackedDataset, Prepared, SourceRows
from titan_mi100.data.sample_columns import sample_columns
from titan_mi100.data.samples import Kept
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.parallel.distributed import World, from_rank_zero, raise_together
from titan_mi100.shapes.base import ModelSpec


def with_columns(data: Prepared, columns: Mapping[str, Column]) -> Prepared:
    """The data with further arrays in each row. Args: columns: may be filled later."""

    def wrapped(sources: list[SourceRows]) -> list[SourceRows]:
        return [replace(source, rows=WithColumns(packed(source), columns)) for source in sources]

    return replace(data, sources=wrapped(data.sources), validation=wrapped(data.validation))


def packed(source: SourceRows) -> PackedDataset:
    """The packed rows of a source of files."""
    assert isinstance(source.rows, PackedDataset), "config.check refuses corpora"
    return source.rows


def columns_of(
    objective: ObjectiveConfig, settings: DataConfig, world: World, data: Prepared, spec: ModelSpec
) -> dict[str, Column]:
    """The further arrays that are known before the model is. A collective.

    Raises:
        UserError: on all ranks; the teacher's folder does not fit.
    """
    columns = dict[str, Column]()
    if objective.answers == LABELS:
        labels = packed(data.sources[0]).documents.labels
        assert labels is not None
        columns[LABEL] = by_document(labels)
    is_policy = objective.name == "policy"
    if is_policy:
        with raise_together():
            columns |= sample_columns(
                packed(data.sources[0]).documents, Kept.of(objective.answers), objective.advantage
            )
    if objective.name == "distill" or (is_policy and objective.advantage == "teacher"):
        digest = from_rank_zero(lambda: tokens_hash(map(packed, data.sources)))
        with raise_together():
            store = open_teacher(Path(objective.teacher), data, digest, SAMPLED if is_policy else "teacher")
            sets = [packed(source) for source in (*data.sources, *data.validation)]
            expected = Wanted(sets, data.facts.n_vocab or spec.vocab_size)
            if world.rank == 0:
                store.verify(expected, cache_folder(settings) if data.facts.files else None)
            if is_policy:
                columns[TEACHER] = ByLearnedToken(
                    placed(map(store.load, store.parts), expected.starts), expected.starts
                )
            else:
                columns |= teacher_columns(store, sets)
            if world.rank == 0 and not is_policy:
                store.warn_of_mass()
        of = "log p of the sampled tokens" if is_policy else f"{store.about.k} ids per token"
        log.info(f"teacher: {of}, in {store.folder}, of {store.about.weights}")
    return columns


def open_teacher(folder: Path, data: Prepared, digest: str, kind: str = "teacher") -> LogprobStore:
    """Args: digest: tokens_hash of the data. Raises UserError: it is not complete, or of other rows."""
    count = len(packed(data.sources[0]).documents.starts) - 1
    seq_len = data.facts.seq_len
    about = Identity(kind, "", digest, data.facts.tokenizer, count, rows=0, seq_len=seq_len, k=0, dtype="")
    remedy = "make it of this run's data: titan-mi100 teach"
    store = LogprobStore(folder, about, remedy, only=("kind", "tokenizer", "tokens", "documents"))
    if not store.is_begun:
        raise UserError(f"objective.teacher = {str(folder)!r} holds no teacher's answers; {remedy}")
    if not store.is_complete:
        problem = f"{folder}: {len(store.parts)} of {store.about.parts} parts are there"
        remedy = IMPORT if store.about.dtype == VLLM else "run titan-mi100 teach again: it goes on"
        raise UserError(f"{problem}; {remedy}")
    return store
