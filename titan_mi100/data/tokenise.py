"""Rows of files to tokens, in all cores and in the order of the files, holding a few chunks at a time."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from titan_mi100.data.files import Record, RecordReader
from titan_mi100.data.rows import BadRow, Format, content_hash, parse
from titan_mi100.data.sft import REJECTED, Encoder
from titan_mi100.errors import UserError

_CHUNK_BYTES, _CHUNK_ROWS = 1 << 19, 1024
_ALONE_BYTES = 1 << 20  # less than this is not worth starting processes for


class Source(NamedTuple):
    """A file of input."""

    path: str
    format: Format
    bytes: int


class Chunk(NamedTuple):
    """What became of consecutive rows of one file, and the tokens of their documents."""

    file: int  # its place among the sources
    numbers: np.ndarray  # (rows, 2) int64: the line, and in a JSON array the element
    statuses: np.ndarray  # (rows,) uint8: of sft.STATUSES
    tokens: np.ndarray  # (rows,) int64: before anything was cut off
    documents: np.ndarray  # (rows,) int64: how many it gave
    hashes: np.ndarray  # (rows, 2) uint64: of the content
    reasons: dict[int, tuple[str, str]]  # row in the chunk -> kind and detail, where there is something to say
    lengths: np.ndarray  # (documents,) int64
    supervised: np.ndarray  # (documents,) int64
    values: np.ndarray  # (tokens of all documents,) uint32: of sft.Document.values


def tokenise(
    sources: Sequence[Source], encoder: Encoder, workers: int, progress: Callable[[int], None]
) -> Iterator[Chunk]:
    """All rows of all sources, in order.

    Args:
        workers: processes that tokenise.
        progress: called with the bytes that were read since the last call.

    Raises:
        UserError: a file cannot be read, or a process was killed.
    """
    chunks = _read(sources, progress)
    if workers == 1 or sum(source.bytes for source in sources) < _ALONE_BYTES:
        yield from (_work(encoder, sources[file].format, file, records) for file, records in chunks)
        return
    # Forked, so that all share the tokenizer's tables. They run no torch code, only Python and the tokenizer's.
    context = multiprocessing.get_context("fork")
    state = (encoder, [source.format for source in sources], os.getpid())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=state)
    try:
        waiting: deque[Future[Chunk]] = deque()
        for file, records in chunks:
            try:
                waiting.append(pool.submit(_work_in_process, file, records))
            except OSError as error:
                for process in multiprocessing.active_children():  # some may run; nobody would end them
                    process.kill()
                raise UserError(
                    f"cannot start {workers} processes ({error.strerror}); set fewer data.workers"
                ) from None
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenised was killed, maybe for want of memory; start again with fewer data.workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _read(sources: Sequence[Source], progress: Callable[[int], None]) -> Iterator[tuple[int, list[Record]]]:
    for file, source in enumerate(sources):
        reader, said = RecordReader(source.path), 0
        records: list[Record] = []
        size = 0
        for record in reader:
            records.append(record)
            size += len(record.raw)
            if size >= _CHUNK_BYTES or len(records) >= _CHUNK_ROWS:
                yield file, records
                records, size = [], 0
                progress(reader.consumed - said)
                said = reader.consumed
        if records:
            yield file, records
        progress(source.bytes - said)


_state: tuple[Encoder, list[Format]]  # of a worker process


def _start(encoder: Encoder, formats: list[Format], parent: int) -> None:
    global _state
    _state = encoder, formats
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training run's handler, that comes with a fork, is not for us
    if sys.platform == "linux":  # die with the parent, whatever kills it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _work_in_process(file: int, records: list[Record]) -> Chunk:
    encoder, formats = _state
    return _work(encoder, formats[file], file, records)


def _work(encoder: Encoder, form: Format, file: int, records: list[Record]) -> Chunk:
    statuses, tokens, counts, hashes = [], [], [], []
    reasons, documents = {}, []
    for place, record in enumerate(records):
        digest, row_documents = bytes(16), []
        try:
            if record.problem:
                raise BadRow(*record.problem.split(": ", 1))
            example = form.read(parse(record.raw))
            digest = content_hash(example)
            encoded = encoder.encode(example)
            row_documents = encoded.documents
            status, row_tokens, reason = encoded.status, encoded.tokens, (encoded.kind, encoded.detail)
        except BadRow as bad:
            status, row_tokens, reason = REJECTED, 0, (bad.kind, str(bad))
        if reason[0]:
            reasons[place] = reason
        statuses.append(status)
        tokens.append(row_tokens)
        counts.append(len(row_documents))
        hashes.append(digest)
        documents += row_documents
    return Chunk(
        file,
        np.array([(record.number, record.element) for record in records], dtype=np.int64),
        np.array(statuses, dtype=np.uint8),
        np.array(tokens, dtype=np.int64),
        np.array(counts, dtype=np.int64),
        np.frombuffer(b"".join(hashes), dtype=">u8").astype(np.uint64).reshape(-1, 2),
        reasons,
        np.array([len(document.ids) for document in documents], dtype=np.int64),
        np.array([document.supervised[1:].sum() for document in documents], dtype=np.int64),
        np.concatenate([np.zeros(0, np.uint32), *(document.values() for document in documents)]),
    )
