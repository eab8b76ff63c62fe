"""How many processes do what: degrees, their product, and the batch that follows from them. Pure integers."""

from dataclasses import dataclass

IGNORE = -100  # the label of a token without supervision, as PyTorch and Hugging Face write it


@dataclass(frozen=True)
class Layout:
    """The degrees of the mesh axes; their product is the world size."""

    dp_shard: int

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows."""
        return self.dp_shard


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step: local_batch_size rows per forward and data-parallel rank."""

    local_batch_size: int
    gradient_accumulation_steps: int
    dp_degree: int

    @property
    def global_batch_size(self) -> int:
        return self.local_batch_size * self.gradient_accumulation_steps * self.dp_degree


def resolve_layout(dp_shard: int, world_size: int) -> Layout:
    """The layout that fills `world_size` processes; a degree of -1 takes what the others leave.

    Raises:
        ValueError: the degrees do not multiply to the world size; the message names key and remedy.
    """
    if dp_shard == 0:
        raise ValueError("[parallelism] data_parallel_shard_degree = 0 must be -1 (all processes) or at least 1")
    if dp_shard not in (-1, world_size):
        raise ValueError(
            f"[parallelism] data_parallel_shard_degree = {dp_shard} does not fill the {world_size} started "
            f"process{'es' if world_size > 1 else ''}; use -1 (all of them) or start with --nproc_per_node {dp_shard}"
        )
    return Layout(dp_shard=world_size)


def resolve_batch(
    local_batch_size: int, gradient_accumulation_steps: int, target_tokens_per_step: int, seq_len: int, dp_degree: int
) -> Batch:
    """Rows per step: with the given accumulation (0: one forward), or the one that comes nearest to a token target."""
    accumulation = gradient_accumulation_steps or 1
    if target_tokens_per_step:
        accumulation = max(1, round(target_tokens_per_step / (seq_len * local_batch_size * dp_degree)))
    return Batch(local_batch_size, accumulation, dp_degree)
