"""Names of a checkpoint's tensors that are not weights: optimizer state, and per-rank state of a layout."""

import re

OPTIMIZER = "optimizer."  # prefix of `optimizer.<parameter>.<state>`
_OF_A_RANK = re.compile(r"(\w+)\.rank-(\d+)\.")  # no parameter has "rank-" in its name


def rank_prefix(kind: str, rank: int) -> str:
    """Prefix of a rank's own tensors. Only the same rank, among the same number of ranks, reads them again."""
    return f"{kind}.rank-{rank}."


def rank_of(name: str) -> tuple[str, int] | None:
    """Kind and rank of a tensor that is per-rank state; None: it belongs to the whole job."""
    match = _OF_A_RANK.match(name)
    return (match[1], int(match[2])) if match else None


def parameter_of(name: str) -> str:
    """The name of the parameter that a tensor is, or that its optimizer state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else name


def is_weight(name: str) -> bool:
    """Whether a tensor is a weight: neither optimizer state nor per-rank state."""
    return not name.startswith(OPTIMIZER) and rank_of(name) is None
