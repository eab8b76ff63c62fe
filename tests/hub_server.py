"""A small server on loopback with the parts of the Hugging Face hub that a download uses.

`python tests/hub_server.py FOLDER PORT` serves FOLDER/models/OWNER/NAME and FOLDER/datasets/OWNER/NAME.
"""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep  # the real one, also where tests replace time.sleep
from urllib.parse import unquote, urlsplit

LFS_FROM = 10_000  # bytes from which a file is in git-lfs


@dataclass
class Hub:
    """What the server answers.

    Attributes:
        repositories: "models/OWNER/NAME" -> path -> content.
        requests: method and path of each request so far.
        token: that every request needs; "": none.
        refusals: part of a path -> status, X-Error-Code; such requests are refused.
        broken: path of a file -> how often it is sent with other bytes of the same size.
        cut: path of a file -> how often it is cut off in the middle.
        rate: bytes per second; 0: as fast as it goes.
        held: paths of files whose second half is not sent.
    """

    repositories: dict[str, dict[str, bytes]]
    requests: list[str] = field(default_factory=list)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    token: str = ""
    broken: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    rate: float = 0
    held: set[str] = field(default_factory=set)
    endpoint: str = ""

    def commit(self, repository: str) -> str:
        """Follows from the content, so that a change moves `main`."""
        parts = sorted((path, hash_of(content)) for path, content in self.repositories[repository].items())
        return hashlib.sha1(repr(parts).encode()).hexdigest()


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if len(content) >= LFS_FROM else git_oid(content)


def entry(path: str, content: bytes) -> dict[str, object]:
    """A file in a tree listing."""
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
    if len(content) >= LFS_FROM:
        entry |= {"lfs": {"oid": hash_of(content), "size": len(content), "pointerSize": 130}, "oid": "0" * 40}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer's content waits 40 ms for the receipt of its headers
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.token and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self.answer(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        for part, (status, code) in self.hub.refusals.items():
            if part in path:
                return self.answer(status, b"{}", {"X-Error-Code": code, "Retry-After": "60"} if code else {})
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        if api:
            repository, what, revision = f"{api[1]}/{api[2]}", api[3] or "revision", api[4] or "main"
            if not self.is_known(repository, revision):
                return None
            if what == "tree":
                files = [entry(*item) for item in self.hub.repositories[repository].items()]
                return self.answer(200, json.dumps(files).encode())
            about = {"id": api[2], "sha": self.hub.commit(repository), "siblings": [], "private": False, "tags": []}
            return self.answer(200, json.dumps(about | {"downloads": 0, "likes": 0}).encode())
        match = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/(refs/convert/parquet|[^/]+)/(.+)", path)
        if match is None:
            return self.answer(404, b"{}")
        repository = f"{match[1] or 'models/'}{match[2]}"
        if not self.is_known(repository, match[3]):
            return None
        content = self.hub.repositories[repository].get(match[4])
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{hash_of(content)}"', "X-Repo-Commit": self.hub.commit(repository)}
        if self.command == "GET" and self.hub.broken.get(match[4], 0):
            self.hub.broken[match[4]] -= 1
            content = bytes(len(content))
        is_cut = self.command == "GET" and self.hub.cut.get(match[4], 0) > 0
        self.hub.cut[match[4]] = self.hub.cut.get(match[4], 0) - is_cut
        return self.answer(200, content, headers, is_cut)

    def is_known(self, repository: str, revision: str) -> bool:
        if repository not in self.hub.repositories:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return False
        if revision not in ("main", "v1", "refs/convert/parquet", self.hub.commit(repository)):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return False
        return True

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_cut:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        block = 1 << 16
        for start in range(0, len(content), block):
            while start >= len(content) // 2 and any(self.path.endswith(name) for name in self.hub.held):
                sleep(0.05)
            self.wfile.write(content[start : start + block])
            if self.hub.rate:
                sleep(block / self.hub.rate)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no error."""


@contextmanager
def serving(hub: Hub, port: int = 0) -> Iterator[Hub]:
    """The hub at `hub.endpoint`, until the end of the block."""
    server = _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with serving(Hub({str(d.relative_to(root)): files_below(d) for d in root.glob("*/*/*")}), int(sys.argv[2])) as made:
        made.rate = float(sys.argv[3]) if len(sys.argv) > 3 else 0
        print(made.endpoint, flush=True)
        threading.Event().wait()
