"""The exceptions that end a run with their message and no traceback."""

import difflib
import errno
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_BEGINNING, _END = 20_000, 2_000  # characters of a message that are shown


class UserError(ValueError):
    """A mistake in the config or the input. The message names file, line or key, what is wrong, and the remedy."""

    def __str__(self) -> str:
        text = super().__str__()  # a name in a file can have megabytes
        return text if len(text) <= _BEGINNING + _END else f"{text[:_BEGINNING]} ... {text[-_END:]}"


@contextmanager
def read_or_refuse(path: object) -> Iterator[None]:
    """Turn an error of the file system into a UserError: the file `path` cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


class Preempted(Exception):
    """The run received a signal to stop. The message says what of it is saved."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. Those that were there are as before."""


class ExportError(SaveError):
    """A run's steps are all saved, but its export could not be written.

    Attributes:
        again: how to export.
    """

    def __init__(self, message: str, again: str) -> None:
        super().__init__(message)
        self.again = again


class NumericalError(RuntimeError):
    """Loss, gradients, weights or optimizer state are not finite, and the run cannot go on. Nothing of it was saved.

    Args:
        remedy: what the user can do about it; "": the cause is not known.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


# In messages of a plain RuntimeError: torch's host allocator, then the runtimes and libraries of devices, whose memory
# does not come from torch's device allocator (NCCL: "Cuda failure 2 'out of memory'").
_OUT_OF_MEMORY = (
    *("DefaultCPUAllocator", "CUDA error: out of memory", "HIP error: out of memory", "hipErrorOutOfMemory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("HIPBLAS_STATUS_ALLOC_FAILED", "rocblas_status_memory_error", "miopenStatusAllocFailed"),
    *("failure 2 'out of memory'", "failure 'out of memory'"),
)


def memory_limit() -> int:
    """Bytes of address space that this process may have; 0: there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out. Only torch's device allocator has a class of its own for this."""
    is_known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    is_known |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    # of torch's libraries; without a limit it is a disk that is mounted noexec
    is_known |= isinstance(error, ImportError) and "failed to map segment" in str(error) and memory_limit() > 0
    return is_known or any(name in str(error) for name in _OUT_OF_MEMORY)


def did_you_mean(
    word: str, known: Iterable[str], prefix: str = "", otherwise: str = "; --help lists them", cutoff: float = 0.6
) -> str:
    """The end of a message about an unknown word. Args: otherwise: the end where no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{close[0]}?" if close else otherwise
