"""Sees what a process does while it opens a hostile file: in the test's own process, and in the child of it that reads.

Imports no torch, as the child.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
SEEN = "WHILE READING: "  # before what the child did, in its answer
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); sys.dont_write_bytecode = True; "
    "from chaos.watch import serve; serve()"
)


class Watch:
    """An audit hook, of which a process cannot get rid: while `folder` is set, what happens outside of it is kept."""

    HARM = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen")
    HARM += ("pty.spawn", "socket.connect", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir", "os.link")
    HARM += ("os.symlink", "os.chmod", "pickle.find_class", "webbrowser.open")
    ELSEWHERE = (sys.prefix, sys.base_prefix, str(REPO / "titan_mi100"), "/proc", "/sys", "/dev/null")
    ELSEWHERE += tuple(path for path in sys.path if path.endswith("-packages"))

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in self.HARM:
            ours = event == "subprocess.Popen" and START in arguments[1]
            if not ours and (event, *arguments) != ("ctypes.dlopen", None):  # as each import of ctypes does
                self.seen.append(f"{event} {arguments}"[:200])
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path != os.devnull and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.seen.append(f"wrote {path}")
            inside = path.startswith(f"{self.folder}/") and not path.startswith(f"{self.folder}/outside")
            if not inside and not path.startswith(self.ELSEWHERE) and os.path.exists(path):
                self.seen.append(f"opened {path}")


def serve() -> None:
    """The child of titan_mi100.files.child, watched: what it does beside answering is its answer."""
    from titan_mi100.files import child

    watch, answer = Watch(), child._answer

    def watched(function: str, path: str, *arguments: Any) -> str:
        watch.seen, watch.folder = [], Path(path).parent.resolve()
        found = answer(function, path, *arguments)
        watch.folder = None
        if watch.seen:
            return json.dumps({"found": None, "refused": SEEN + "; ".join(watch.seen), "full": False})
        return found

    child._answer = watched
    child.SECONDS = 2  # so that the cases without an end cost the suite little; test_child.py has the real limit
    child.serve()
