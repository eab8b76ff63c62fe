"""Names of a checkpoint's tensors that are no weights: optimizer state, and what each rank keeps for itself."""

import re

OPTIMIZER = "optimizer."  # begins `optimizer.<parameter>.<state>`
_OF_A_RANK = re.compile(r"(\w+)\.rank-(\d+)\.")


def rank_prefix(kind: str, rank: int) -> str:
    """Begins the names of one rank's own tensors of a kind, which only the same rank of as many ranks reads again."""
    return f"{kind}.rank-{rank}."


def rank_of(name: str) -> tuple[str, int] | None:
    """(kind, rank) of a tensor that one rank keeps for itself; None: it belongs to the whole job."""
    found = _OF_A_RANK.match(name)
    return (found[1], int(found[2])) if found else None


def parameter_of(name: str) -> str:
    """The parameter's name, from its own or that of its optimizer state."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else name


def is_weight(name: str) -> bool:
    return not name.startswith(OPTIMIZER) and rank_of(name) is None
