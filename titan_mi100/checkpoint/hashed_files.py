"""The file layer below DCP's writer: it syncs each file, and computes its size and SHA-256 while it is written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from titan_mi100.checkpoint.sealed import Written
from titan_mi100.files.durable import HashingStream


class HashedFiles(FileSystem):
    """Writes files for DCP and this package. `written` maps each file's name to its size and SHA-256."""

    def __init__(self) -> None:
        self.written: Written = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            stream = HashingStream(file)  # type: ignore[arg-type]
            try:
                yield stream
            except Exception as error:  # torch.save reports a full disk less precisely than the stream does
                raise stream.error or error from None
            file.flush()
            os.fsync(file.fileno())  # before the manifest is written, which vouches for this file
        self.written[Path(path).name] = stream.size, stream.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)  # DCP renames .metadata.tmp to .metadata
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def write(self, path: Path, content: bytes) -> None:
        with self.create_stream(path, "wb") as stream:
            stream.write(content)
