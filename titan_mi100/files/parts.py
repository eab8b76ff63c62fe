"""A folder of numbered parts, each sealed: its name, with its hash, appears when all of it is on the disk.

Work that takes hours is cut into parts of fixed content; after any kill the parts that are there are kept.

| file | content |
|---|---|
| store.json | what the parts were made of, a dataclass as JSON |
| part-00012-HASH.SUFFIX | a part; HASH begins its SHA-256 |
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace, sha256_of
from titan_mi100.files.plain import plain_path, read_checked

STORE = "store.json"
_PART = re.compile(r"part-(\d{5,10})-([0-9a-f]{16})\.(\w+)")


class SealedParts:
    """Opens a folder of parts, or begins it.

    Attributes:
        about: what the parts are made of: the folder's own if it is begun.
        parts: paths of those that are there, by number.
    """

    def __init__(self, folder: Path, about: Any, suffix: str) -> None:
        """Args: about: a dataclass, with the kind of the folder.

        Raises:
            UserError: the folder cannot be read, or holds parts that are none of it.
        """
        self.folder, self.about, self._suffix, self.parts = folder, about, suffix, dict[int, Path]()
        try:
            names = sorted(os.listdir(folder)) if os.path.lexists(folder) else []
        except OSError as error:
            raise UserError(f"{folder}: cannot be read ({error.strerror}); name another folder") from None
        self.is_begun, strays = STORE in names, list[str]()
        if self.is_begun:
            self.about = self.read_about()
        for path in (folder / name for name in names if name.endswith(f".{suffix}")):
            match = _PART.fullmatch(path.name)
            number, problem = int(match[1]) if match else -1, ""
            if not self.is_begun:
                problem = f"is without its {STORE}, which says what it was made of"
            elif not 0 <= number < self.count:
                problem = f"is no part of the {self.about.kind} in this folder"
            elif number in self.parts:
                problem = f"has the number of {self.parts[number].name}"
            if problem:
                strays.append(f"{path}: {problem}; move it out of the folder, and start again")
            self.parts.setdefault(number, path)
        if strays:
            raise UserError("\n".join(strays))

    def read_about(self) -> Any:
        """What store.json says. Raises UserError: it is damaged, or of something else."""
        return read_checked(self.folder / STORE, type(self.about), "name another folder, or delete this one")

    @property
    def count(self) -> int:
        """The number of parts when it is complete."""
        return int(self.about.parts)

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.count

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.parts]

    def begin(self) -> None:
        """Write what it is made of, and remove what a killed writer left. Raises UserError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in (*self.folder.glob(".part-*"), *self.folder.glob(f".{STORE}.*")):
                left.unlink()
            if not self.is_begun:
                replace(self.folder / STORE, json.dumps(asdict(self.about), indent=1), is_synced=True)
                self.is_begun = True
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> UserError:
        return UserError(f"{self.folder}: cannot be written ({error.strerror}); free some space, or correct the path")

    def seal(self, number: int, content: bytes) -> None:
        """Write a part. Raises UserError: it cannot be written."""
        path = self.folder / f"part-{number:05}-{hashlib.sha256(content).hexdigest()[:16]}.{self._suffix}"
        try:
            replace(path, content, is_synced=True)
        except OSError as error:
            raise self._cannot(error) from None
        self.parts[number] = path

    def check_hash(self, number: int, remedy: str, hash_of: Callable[[Path], str] = sha256_of) -> str:
        """The SHA-256 of a part. Raises UserError: it is not what its name says, or cannot be read."""
        path = self.parts[number]
        try:
            digest = hash_of(plain_path(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); correct that, or {remedy}") from None
        match = _PART.fullmatch(path.name)
        if match is None or digest[:16] != match[2]:
            raise UserError(f"{path}: is damaged; {remedy}")
        return digest
