"""Requests to stop: SIGTERM or SIGUSR1 (a scheduler's time limit, a preemption), or the launcher has ended.

Imports no torch: the signal handlers must be set before torch is imported, which takes seconds.
"""

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress

_GRACE = 30  # seconds for a last checkpoint after the launcher has ended; torchrun gives its workers the same
_POLL = 0.5  # seconds


class Preemption:
    """Remembers a request to stop. The run stops after its current step.

    Attributes:
        reason: why the run is to stop; "": it is not.
    """

    def __init__(self) -> None:
        """Set the signal handlers; to be called in the main thread."""
        self.reason = ""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._told)
        watched = {os.getppid()} if "TORCHELASTIC_RUN_ID" in os.environ else set()  # else: nohup may outlive its shell
        if re.fullmatch("[0-9]{1,9}", launcher := os.environ.pop("TITAN_LAUNCHER_PID", ""), re.ASCII):
            watched.add(int(launcher))
            os.environ["TITAN_LAUNCHER_PID"] = launcher
        if watched:
            threading.Thread(target=self._watch, args=(watched,), daemon=True).start()

    def _told(self, number: int, _: object) -> None:
        # Our launcher passes every signal to stop on as SIGUSR1, so the name would not be the one that the user sent.
        by_launcher = number == signal.SIGUSR1 and "TITAN_LAUNCHER_PID" in os.environ
        self.reason = self.reason or ("the launcher was told to stop" if by_launcher else signal.Signals(number).name)

    def _watch(self, launchers: set[int]) -> None:
        """End this process after its launcher has ended, even if it hangs."""
        while all(_is_there(process) for process in launchers):
            time.sleep(_POLL)
        self.reason = self.reason or "the launcher is gone"
        time.sleep(_GRACE)
        with suppress(OSError):
            text = "ERROR the launcher is gone, and the run did not come to its next step: ended"
            print(text, file=sys.stderr, flush=True)
        os._exit(1)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's; or without /proc, where a zombie counts as there
        return True
