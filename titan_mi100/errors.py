"""The exceptions that end a run with their message and no traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the config or the input. The message names file, line or key, what is wrong, and the remedy."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. Those that were there are as before."""


class NumericalError(RuntimeError):
    """Loss, gradients, weights or optimizer state are not finite, and the run cannot go on. Nothing of it was saved."""


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown word."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else "; --help lists them"
