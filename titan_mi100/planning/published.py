"""Steps that others have published, to stand beside a plan. None was measured with this trainer. Imports no torch."""

from typing import NamedTuple

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.planning.cards import DEVICES, Gpu
from titan_mi100.planning.costs import flops_of_steps
from titan_mi100.shapes.families import PRESETS


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


def beside(gpu: Gpu, dtype: str, ranks: int, flops_per_token: float) -> str:
    """The fastest published step of a device and dtype, and what another run would do at its share of the peak rate.

    Args:
        flops_per_token: of the other run, recomputation not counted.

    Returns:
        A line; "" if nothing was published.
    """
    rate = max((step.tokens_per_second for (*_, own), step in PUBLISHED.items() if own == dtype), default=0)
    if gpu != DEVICES[CARD] or not rate:
        return ""
    peak = gpu.tflops[dtype] * 1e12
    own_flops = flops_of_steps(PRESETS[FLAVOR], LoRAConfig())(SEQ_LEN, SEQ_LEN, SEQ_LEN * (SEQ_LEN + 1) // 2) / SEQ_LEN
    share = rate * own_flops / (RANKS * peak)
    scaled = share * peak * ranks / flops_per_token
    text = f"published for {gpu.name} in {dtype} (DeepSpeed, a pipeline of two, Qwen3-{FLAVOR})"
    return f"{text}: {rate:,} tokens/s, {share:.0%} of the data sheet's rate; at that share here {scaled:,.0f} tokens/s"
