"""The process pool of preparation: runs `encode_records` on all cores, and returns chunks in the order of the files."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future

from titan_mi100.data.encode import Chunk, Encoder, Source, encode_records
from titan_mi100.data.files import Record, RecordReader
from titan_mi100.data.formats import Format
from titan_mi100.errors import UserError
from titan_mi100.files.child import limit, raise_limits
from titan_mi100.files.pool import forked_pool, with_state

_CHUNK_BYTES, _CHUNK_RECORDS = 1 << 19, 1024  # a chunk is sent to a worker when it reaches either limit
_ALONE_BYTES = 1 << 20  # input with fewer bytes is tokenised by one process: starting more takes longer
# Memory and time granted per byte of a record, as a multiple of what `child.raise_limits` grants per byte of a file:
# rendering and tokenising take much more than reading.
_ALLOWED = 64


def tokenise(
    sources: Sequence[Source], encoder: Encoder, workers: int, progress: Callable[[int], None]
) -> Generator[Chunk, None, None]:
    """Encode all records of all sources, in order. Close it to end its processes before it has ended.

    Args:
        workers: number of worker processes; 0: one per core. Their memory and time are limited, because the chat
            template and the tokenizer come from outside.
        progress: called with the bytes that were read since the last call.

    Raises:
        UserError: a file cannot be read, or a worker process was killed.
    """
    chunks = _read_chunks(sources, progress)
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    workers = 1 if sum(source.bytes for source in sources) < _ALONE_BYTES else workers
    killed = (
        "a tokenising process was killed: memory was full, or the chat template or the tokenizer took too much memory "
        "or time; set fewer data.workers, or use the tokenizer folder that came with the model"
    )
    with forked_pool(workers, encoder, [source.format for source in sources], killed=killed) as pool:
        waiting: deque[Future[Chunk]] = deque()
        for file, records in chunks:
            try:
                waiting.append(pool.submit(with_state, _work_in_process, file, records))
            except OSError as error:
                problem = f"cannot start {workers} processes ({error.strerror}); set fewer data.workers"
                raise UserError(problem) from None
            if len(waiting) > 2 * workers:  # bounds the chunks in memory, and keeps every worker busy
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_chunks(sources: Sequence[Source], progress: Callable[[int], None]) -> Iterator[tuple[int, list[Record]]]:
    """Read all files in the parent process. Yields (index of the source, records of a chunk)."""
    for file, source in enumerate(sources):
        reader, reported = RecordReader(source.path), 0
        records: list[Record] = []
        size = 0
        for record in reader:
            records.append(record)
            size += len(record.raw)
            if size >= _CHUNK_BYTES or len(records) >= _CHUNK_RECORDS:
                yield file, records
                records, size = [], 0
                progress(reader.consumed - reported)
                reported = reader.consumed
        if records:
            yield file, records
        progress(source.bytes - reported)


def _work_in_process(encoder: Encoder, formats: list[Format], file: int, records: list[Record]) -> Chunk:
    limit()
    raise_limits(_ALLOWED * sum(len(record.raw) + 512 for record in records))
    return encode_records(encoder, formats[file], file, records)
