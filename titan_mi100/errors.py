"""The exceptions that end a run with their message and no traceback."""

import difflib
from collections.abc import Iterable

_BEGINNING, _END = 20_000, 2_000  # characters of a message that are shown


class UserError(ValueError):
    """A mistake in the config or the input. The message names file, line or key, what is wrong, and the remedy."""

    def __str__(self) -> str:
        text = super().__str__()  # a name in a file can have megabytes
        return text if len(text) <= _BEGINNING + _END else f"{text[:_BEGINNING]} ... {text[-_END:]}"


class Preempted(Exception):
    """The run received a signal to stop. The message says what of it is saved."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. Those that were there are as before."""


class NumericalError(RuntimeError):
    """Loss, gradients, weights or optimizer state are not finite, and the run cannot go on. Nothing of it was saved.

    Args:
        remedy: what the user can do about it; "": the cause is not known.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def did_you_mean(
    word: str, known: Iterable[str], prefix: str = "", otherwise: str = "; --help lists them", cutoff: float = 0.6
) -> str:
    """The end of a message about an unknown word. Args: otherwise: the end where no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{close[0]}?" if close else otherwise
