"""A pool of forked processes, which share what their parent has read, such as the tokenizer's tables."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from titan_mi100.errors import UserError

T = TypeVar("T")


_state: tuple[Any, ...] = ()  # of a worker process, see forked_pool


@contextmanager
def forked_pool(
    workers: int, *state: Any, killed: str, begin: Callable[[], None] | None = None, method: str = "fork"
) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with the block, at once if it raises, and with this process. Forking a process with
    threads is safe if its workers run no torch.

    Args:
        state: what each process has, for `with_state`.
        killed: the message if one was killed.
        begin: called in each process before its first work.
        method: "spawn": start them afresh, for work with torch.

    Raises:
        UserError: there is no shared memory, or a process was killed.
    """
    check_shared_memory()
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(os.getpid(), begin, state))
    try:
        yield pool
    except BaseException as error:
        for process in multiprocessing.active_children():  # the pool itself does not end those that work
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(killed) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def with_state(work: Callable[..., T], *arguments: Any) -> T:
    """In a process of a pool: call a function with the pool's state and then the arguments."""
    return work(*_state, *arguments)


def check_shared_memory() -> None:
    """Raise UserError if no semaphore can be made. Pools of processes and torchdata's threads need some."""
    try:
        multiprocessing.Event()
    except OSError as error:
        raise UserError(
            f"/dev/shm: {error.strerror}; semaphores are kept there: free some space (a container has 64 MiB: start it "
            "with a larger --shm-size)"
        ) from None


def _begin(parent: int, begin: Callable[[], None] | None, state: tuple[Any, ...]) -> None:
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork inherited the training run's handler
    end_with_parent(parent)
    _state = state
    if begin is not None:
        begin()


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even by SIGKILL. Args: parent: its process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)
