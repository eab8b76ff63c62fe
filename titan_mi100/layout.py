"""How many processes do what: degrees, their product, and the batch that follows from them. Pure integers."""

from dataclasses import dataclass

IGNORE = -100  # the label of a token without supervision, as PyTorch and Hugging Face write it


@dataclass(frozen=True)
class Layout:
    """The degrees of the mesh axes; their product is the world size."""

    dp_shard: int
    dp_replicate: int = 1

    @property
    def dp_degree(self) -> int:
        """Ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """In words, for the log."""
        if self.dp_replicate > 1:
            return f"HSDP, {self.dp_replicate} replicas of FSDP2 over {self.dp_shard}"
        return f"FSDP2 over {self.dp_shard}"


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step: local_batch_size rows per forward and data-parallel rank."""

    local_batch_size: int
    gradient_accumulation_steps: int
    dp_degree: int

    @property
    def global_batch_size(self) -> int:
        return self.local_batch_size * self.gradient_accumulation_steps * self.dp_degree


def resolve_layout(dp_shard: int, dp_replicate: int, world_size: int) -> Layout:
    """The layout that fills `world_size` processes; dp_shard = -1 takes what the others leave.

    Raises:
        ValueError: the degrees do not multiply to the world size; the message names key and remedy.
    """
    processes = f"{world_size} started process{'es' if world_size > 1 else ''}"
    if dp_shard == 0:
        raise ValueError("[parallelism] data_parallel_shard_degree = 0 must be -1 (all processes) or at least 1")
    if dp_shard == -1:
        if world_size % dp_replicate:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ValueError(
                f"[parallelism] data_parallel_replicate_degree = {dp_replicate} does not divide the {processes}; use "
                f"one of {divisors}, or start with --nproc_per_node {dp_replicate}"
            )
        dp_shard = world_size // dp_replicate
    if dp_replicate * dp_shard != world_size:
        product = f" x data_parallel_replicate_degree = {dp_replicate}" if dp_replicate > 1 else ""
        raise ValueError(
            f"[parallelism] data_parallel_shard_degree = {dp_shard}{product} does not fill the {processes}; use -1 "
            f"(all of them) or start with --nproc_per_node {dp_replicate * dp_shard}"
        )
    return Layout(dp_shard, dp_replicate)


def resolve_batch(
    local_batch_size: int, gradient_accumulation_steps: int, target_tokens_per_step: int, seq_len: int, dp_degree: int
) -> Batch:
    """Rows per step: with the given accumulation (0: one forward), or the one that comes nearest to a token target."""
    accumulation = gradient_accumulation_steps or 1
    if target_tokens_per_step:
        accumulation = max(1, round(target_tokens_per_step / (seq_len * local_batch_size * dp_degree)))
    return Batch(local_batch_size, accumulation, dp_degree)
