"""The one exception for what a user causes: it ends a run with exit code 2 and its message, no traceback."""


class UserError(ValueError):
    """A mistake in the config or the input. The message names file, line or key, what is wrong, and the remedy."""
