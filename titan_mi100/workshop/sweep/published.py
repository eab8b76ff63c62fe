"""Steps that others have published, to stand beside ours. None was measured with this trainer. Imports no torch."""

from typing import NamedTuple


class PublishedStep(NamedTuple):
    """One row: milliseconds of a step and of RCCL in it, tokens/s, peak memory in (decimal) GB."""

    step_ms: int
    comm_ms: int
    tokens_per_second: int
    peak_gb: float


# Source: the owners' own results table of a DeepSpeed pipeline: Qwen3-0.6B, rows of 1,024 tokens, two MI100 (32 GB,
# PCIe). They timed RCCL with a profiler of their own. They have published no row of FSDP.
CARD, RANKS, FLAVOR, SEQ_LEN = "mi100", 2, "0.6B", 1024
# (rows per forward, forwards per step, activation checkpointing, dtype)
PUBLISHED: dict[tuple[int, int, str, str], PublishedStep] = {
    (1, 1, "none", "float32"): PublishedStep(477, 226, 2239, 9.1),
    (1, 1, "full", "bfloat16"): PublishedStep(596, 294, 1790, 8.41),
    (4, 8, "full", "bfloat16"): PublishedStep(5998, 679, 5485, 13.6),
    (4, 8, "full", "float32"): PublishedStep(7184, 681, 4574, 17),
    (4, 8, "none", "float32"): PublishedStep(5404, 517, 6085, 27.3),
    (8, 1, "full", "bfloat16"): PublishedStep(2187, 988, 3775, 17.8),
    (8, 4, "full", "bfloat16"): PublishedStep(5669, 1004, 5800, 20.16),
    (8, 8, "full", "bfloat16"): PublishedStep(10418, 1094, 6303, 20.16),
    (8, 8, "full", "float32"): PublishedStep(14264, 1618, 5065, 28.35),
}
