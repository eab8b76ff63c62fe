"""Fetches models and data sets of the Hugging Face hub into the hub's own cache, and checks every file by its hash.

`huggingface_hub` is imported only if a name of the hub is given. Beside a repository's snapshots a record of ours holds
the listing of each commit and what was hashed, so that later starts make no request and hash nothing again.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.files.hub_files import CARD, TRAIN, VALIDATION, HubName, by_hand, model_files, one_pattern, split_files
from titan_mi100.files.plain import LARGEST_TABLE, read_object
from titan_mi100.files.tables import INDEX
from titan_mi100.wording import bytes_in_words, plural, shown, some

_LOGIN, _BAD_TOKEN = "log in: hf auth login, or set HF_TOKEN", "Invalid credentials"
# X-Error-Code, or status, of an answer -> why, and the remedy
_REASONS: dict[str | int, str] = {
    "GatedRepo": "is gated; accept its terms at {page}, then {login}",
    "RevisionNotFound": "has no revision {revision!r}; {page} lists them",
    _BAD_TOKEN: "cannot be fetched: your token is refused; {login}",
    "RepoNotFound": (missing := "is no {type}, or a private one; check the name, or {login}"),
    **dict.fromkeys((401, 404), missing),
    403: "cannot be fetched: your token does not allow it; {login}",
    429: "cannot be fetched: too many requests (429); wait {wait}, or {login}",
    0: "cannot be fetched: the answer of {page} is {status}; try again later",
}
_RECORDS = "titan_mi100"  # folder of our records, in a repository's folder in the cache
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

Commits = MutableMapping[str, str]  # "models/OWNER/NAME@REVISION" -> commit


def fetch(name: HubName, kind: str, commits: Commits) -> list[str]:
    """The paths of what a name on the hub names; what the hub's cache lacks is downloaded.

    Args:
        kind: what it is named for, see hub_files.
        commits: those to use, without asking the hub. A commit that the hub was asked for is added.

    Raises:
        UserError: why it cannot be had, as the end of a message.
    """
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UserError("is not looked for without huggingface_hub: pip install huggingface_hub") from None
    repository = _Repository(name, kind in (TRAIN, VALIDATION), commits)
    try:
        return repository.paths(kind)
    except UserError:
        raise
    except Exception as error:
        if reason := repository.reason(error):
            raise UserError(reason) from None
        raise


class _Repository:
    """A repository of the hub at one commit, and its folder in the hub's cache."""

    def __init__(self, name: HubName, is_data: bool, commits: Commits) -> None:
        from huggingface_hub import constants

        self._name, self._is_data, self._commits = name, is_data, commits
        self._type, self._revision = "dataset" if is_data else "model", name.revision or "main"
        self._is_offline, self._endpoint = constants.HF_HUB_OFFLINE, constants.ENDPOINT
        cache = Path(os.path.abspath(os.path.expanduser(constants.HF_HUB_CACHE)))  # HF_HOME may be relative
        folder = f"{self._type}s--{'--'.join(name[0].split('/'))}"
        self._folder, self._locks = cache / folder, cache / ".locks" / folder
        self._commit, self._files, self._hashed = "", dict[str, list[Any]](), dict[str, list[int] | None]()
        self._is_listed = True  # false: the files are those that the cache happens to have

    @property
    def _snapshot(self) -> Path:
        return self._folder / "snapshots" / self._commit

    def paths(self, kind: str) -> list[str]:
        """See `fetch`."""
        key, name = f"{self._type}s/{self._name.repository}@{self._revision}", self._name
        if not self._is_data and (name.config or name.split):
            raise UserError("names a model; :CONFIG and [SPLIT] are for data sets")
        self._commit = str(self._commits.get(key, "") or self._commit_of_revision())
        if not re.fullmatch("[0-9a-f]{40}", self._commit):
            raise UserError(f"has the commit {shown(self._commit)}, which is none; check HF_ENDPOINT")
        self._read_record()
        if self._is_data:
            files = split_files(name, self._configs(), self._files, kind)
        else:
            try:
                files = model_files(self._files, kind, self._index)
            except UserError:
                if self._is_listed:
                    raise
                raise UserError(self._not_in_cache(["the weights"])) from None
        self._ensure(files)
        with suppress(OSError):  # a cache that may not be written; without the network the branch is found by it
            if key not in self._commits and self._commit != self._revision and not self._is_offline:
                (ref := self._folder / "refs" / self._revision).parent.mkdir(parents=True, exist_ok=True)
                durable.replace(ref, self._commit)
        self._commits[key] = self._commit
        if not self._is_data:
            return [str(self._snapshot)]
        patterns, root = one_pattern(files, self._files), str(self._snapshot)
        root = glob.escape(root) if len(patterns) < len(files) else root
        return [os.path.join(root, pattern) for pattern in patterns]

    def _commit_of_revision(self) -> str:
        if re.fullmatch("[0-9a-f]{40}", self._revision):
            return self._revision
        if not self._is_offline:
            from huggingface_hub import HfApi

            return str(HfApi().repo_info(self._name.repository, repo_type=self._type, revision=self._revision).sha)
        with suppress(OSError):
            return (self._folder / "refs" / self._revision).read_text().strip()
        raise UserError(self._not_in_cache([]))

    def _read_record(self) -> None:
        """The commit's files, by the record, the hub, or without the network the files of the snapshot."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(self._record.read_bytes())
            self._files, self._hashed = dict(record["files"]), dict(record["hashed"])
            return
        if self._is_offline:  # in the cache a file is a link to its hash
            links = [link for link in self._snapshot.rglob("*") if link.is_symlink() and link.exists()]
            self._files = {str(f.relative_to(self._snapshot)): [os.readlink(f).rpartition("/")[2], 0] for f in links}
            self._is_listed = False
            if self._is_data:
                self._say("WARNING HF_HUB_OFFLINE is set, and its files are taken to be those that the cache has")
            return
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        name, commit = self._name.repository, self._commit
        listed = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type=self._type)
        files = [f for f in listed if isinstance(f, RepoFile) and not {"", ".."} & {*f.path.split("/")}]
        self._files = {file.path: [file.lfs.sha256 if file.lfs else file.blob_id, file.size] for file in files}

    @property
    def _record(self) -> Path:
        return self._folder / _RECORDS / f"{self._commit}.json"

    def _configs(self) -> Any:
        """What the card has as `configs`; None: there is none."""
        if CARD not in self._files:
            return None
        import yaml  # the hub's library has it
        from huggingface_hub import RepoCard

        self._ensure([CARD])
        try:
            text = (self._snapshot / CARD).read_text(encoding="utf-8")
            return RepoCard(text, ignore_metadata_errors=True).data.get("configs")
        except (ValueError, yaml.YAMLError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"has a card whose metadata cannot be read: {text}; {by_hand(self._name)}") from None

    def _index(self) -> dict[str, Any]:
        self._ensure([INDEX])
        return read_object(self._snapshot / INDEX, "name another revision", LARGEST_TABLE)

    def _ensure(self, files: Sequence[str]) -> None:
        """Let the cache hold these files with the bytes of the commit.

        Raises:
            UserError: the network is not to be used, or what it gave is wrong twice.
        """
        stale = [file for file in files if self._stamp(file) != self._hashed.get(file, [])]
        if not stale:
            return
        self._remove_strays()
        for _ in range(2):
            if absent := [file for file in stale if not (self._snapshot / file).exists()]:
                self._download(absent)
            with ThreadPoolExecutor(4) as pool:
                is_right = dict(zip(stale, pool.map(self._has_right_bytes, stale), strict=True))
            self._hashed |= {file: self._stamp(file) for file in stale if is_right[file]}
            stale = [file for file in stale if not is_right[file]]
            for path in (self._snapshot / file for file in stale):
                self._say(f"WARNING {path.name} has other bytes than in the commit; it is deleted")
                if (blob := path.resolve()).parent == (self._folder / "blobs").resolve():
                    blob.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            if not stale:
                break
        with suppress(OSError):  # without a record it is hashed again the next time
            if self._is_listed:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                durable.replace(self._record, json.dumps({"files": self._files, "hashed": self._hashed}))
        if stale:
            problem = f"was sent with other bytes than its commit {self._commit[:12]} has, twice: {some(stale)}"
            raise UserError(f"{problem}; they were deleted; try again later, or another network")

    def _stamp(self, file: str) -> list[int] | None:
        """Changes with each write of a file; None: it is not there."""
        with suppress(OSError):
            status = (self._snapshot / file).stat()
            return [status.st_size, status.st_mtime_ns]
        return None

    def _download(self, files: Sequence[str]) -> None:
        if self._is_offline:
            raise UserError(self._not_in_cache(files))
        from huggingface_hub import snapshot_download

        size = bytes_in_words(sum(self._files[file][1] for file in files))
        self._say(f"fetching {plural(len(files), 'file')}, {size}, of commit {self._commit} ...")
        patterns = [glob.escape(file) for file in files]
        snapshot_download(self._name.repository, repo_type=self._type, revision=self._commit, allow_patterns=patterns)

    def _has_right_bytes(self, file: str) -> bool:
        """Whether a file has the hash of the listing: SHA-256 in git-lfs, else git's SHA-1 of a blob."""
        path, expected = self._snapshot / file, self._files.get(file, [""])[0]
        if not path.exists():
            return False
        is_lfs = len(expected) == 64
        digest = hashlib.sha256() if is_lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        return durable.hash_of(path, digest) == expected

    def _say(self, text: str) -> None:
        print(f"{self._name.repository}: {text}", file=sys.stderr, flush=True)  # stdout may be a pipe to the launcher

    def _remove_strays(self) -> None:
        """Remove what killed downloads have left: files that no process has locked as the hub's library does."""
        for stray in (self._folder / "blobs").glob("*.incomplete"):
            with suppress(OSError), (self._locks / f"{stray.name.partition('.')[0]}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stray.unlink()

    def _not_in_cache(self, files: Sequence[str]) -> str:
        """Why the cache does not do, and the command that fills it."""
        options = f"--revision {self._commit or self._revision}{' --repo-type dataset' * self._is_data}"
        lacking = f"lacks {some(files, 4)} of it" if files else f"does not know its {self._revision}"
        command = f"hf download {self._name.repository} {options}"
        problem = f"is not complete: the hub's cache, {self._folder.parent}, {lacking}, and HF_HUB_OFFLINE is set"
        return f"{problem}; unset it, or fetch it: {command}"

    def reason(self, error: BaseException) -> str:
        """What an error of the hub's library means, and the remedy; "": it is not about the network or the disk."""
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        response = next((r for link in chain if (r := getattr(link, "response", None)) is not None), None)
        if response is not None:
            code, status = response.headers.get("X-Error-Code", ""), response.status_code
            code = _BAD_TOKEN if _BAD_TOKEN in response.headers.get("X-Error-Message", "") else code
            wait = f"{response.headers.get('Retry-After', 'a few hundred')} s"
            page = f"{self._endpoint}/{'datasets/' * self._is_data}{self._name.repository}"
            facts = {"type": self._type, "revision": self._commit or self._revision, "page": page, "wait": wait}
            reason = _REASONS.get(code) or _REASONS.get(status) or _REASONS[0]
            return reason.format(**facts, status=status, login=_LOGIN)
        if disk := next(
            (e for e in chain if isinstance(e, OSError) and (e.filename or e.errno in _DISK_IS_FULL)), None
        ):
            return f"cannot be kept in {self._folder.parent}: {disk.strerror}; set HF_HOME to another folder"
        if not any(isinstance(e, OSError) or type(e).__module__.startswith("httpx") for e in chain):
            return ""
        remedy = "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 takes what is in the cache"
        return f"cannot be fetched: {self._endpoint} gave no complete answer ({chain[-1]}); {remedy}"
