"""The process pool of preparation: `encode_records` in all cores, in the order of the files, a few chunks at a time."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from titan_mi100.data.encode import Chunk, Encoder, Source, encode_records
from titan_mi100.data.files import Record, RecordReader
from titan_mi100.data.formats import Format
from titan_mi100.errors import UserError
from titan_mi100.files.child import allow, limit

_CHUNK_BYTES, _CHUNK_RECORDS = 1 << 19, 1024
_ALONE_BYTES = 1 << 20  # less than this is not worth starting more than one process for
_ALLOWED = 64  # times as much memory and time for a record as for a file that is only looked into


def tokenise(
    sources: Sequence[Source], encoder: Encoder, workers: int, progress: Callable[[int], None]
) -> Iterator[Chunk]:
    """All records of all sources, in order.

    Args:
        workers: processes that tokenise, with limits on memory and time: template and tokenizer are somebody else's.
        progress: called with the bytes that were read since the last call.

    Raises:
        UserError: a file cannot be read, or a process was killed.
    """
    chunks = _read(sources, progress)
    workers = 1 if sum(source.bytes for source in sources) < _ALONE_BYTES else workers
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
                what = f"cannot start {workers} processes ({error.strerror}); set fewer data.workers"
                raise UserError(what) from None
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        what = "memory was full, or the chat template or the tokenizer took too much of it or too long"
        remedy = "set fewer data.workers, or use a sound tokenizer folder"
        raise UserError(f"a process that tokenised was killed: {what}; {remedy}") from None
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
            if size >= _CHUNK_BYTES or len(records) >= _CHUNK_RECORDS:
                yield file, records
                records, size = [], 0
                progress(reader.consumed - said)
                said = reader.consumed
        if records:
            yield file, records
        progress(source.bytes - said)
        source.passed_over.update(reader.passed_over)


_state: tuple[Encoder, list[Format]]  # of a worker process


def _start(encoder: Encoder, formats: list[Format], parent: int) -> None:
    global _state
    _state = encoder, formats
    follow_parent(parent)


def follow_parent(parent: int) -> None:
    """In a worker process: leave signals to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training run's handler, that comes with a fork, is not for us
    if sys.platform == "linux":  # die with the parent, whatever kills it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _work_in_process(file: int, records: list[Record]) -> Chunk:
    encoder, formats = _state
    limit()
    allow(_ALLOWED * sum(len(record.raw) + 512 for record in records))
    return encode_records(encoder, formats[file], file, records)
