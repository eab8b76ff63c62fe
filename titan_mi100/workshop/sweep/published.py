"""Nine rows that owners of two MI100s have published. They were not measured with this trainer.

Source: the owners' own results table of their DeepSpeed pipeline: Qwen3-0.6B, rows of 1,024 tokens, a pipeline of two
MI100 (32 GB, PCIe). They timed RCCL with a profiler of their own; GB are decimal. They have published no row of FSDP.
"""

from typing import NamedTuple


class Theirs(NamedTuple):
    step_ms: int
    comm_ms: int
    tokens_per_second: int
    memory_gb: float

    def cells(self) -> list[str]:
        return [f"{self.step_ms:,}", f"{self.comm_ms:,}", f"{self.tokens_per_second:,}", f"{self.memory_gb:g}"]


CARD, ROW = "MI100", {"processes": 2, "model": "0.6B", "seq": 1024}
COLUMNS = ("published: step_ms", "comm_ms", "toks/s", "GB")
# (batch, ga, checkpointing, dtype)
PUBLISHED: dict[tuple[int, int, str, str], Theirs] = {
    (1, 1, "none", "float32"): Theirs(477, 226, 2239, 9.1),
    (1, 1, "full", "bfloat16"): Theirs(596, 294, 1790, 8.41),
    (4, 8, "full", "bfloat16"): Theirs(5998, 679, 5485, 13.6),
    (4, 8, "full", "float32"): Theirs(7184, 681, 4574, 17),
    (4, 8, "none", "float32"): Theirs(5404, 517, 6085, 27.3),
    (8, 1, "full", "bfloat16"): Theirs(2187, 988, 3775, 17.8),
    (8, 4, "full", "bfloat16"): Theirs(5669, 1004, 5800, 20.16),
    (8, 8, "full", "bfloat16"): Theirs(10418, 1094, 6303, 20.16),
    (8, 8, "full", "float32"): Theirs(14264, 1618, 5065, 28.35),
}
