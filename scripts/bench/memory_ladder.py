"""Peak memory per card of Qwen3-8B (or another size) on two cards, and how much each technique saves.

Each of the first rows adds one technique to the rows above it. Each of the others is an alternative of its own.
The first three of these have the weights, optimizer state and reduction of the row "+ gradients reduced in bf16". The
peak is counted by category on fake tensors (titan_mi100/workshop/rehearsal/counter.py), not measured on a GPU.
--png draws it (needs matplotlib).
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_mi100.cli import exit_code
from titan_mi100.config.settings import Config, ModelConfig, OptimizerConfig, TrainingConfig
from titan_mi100.planning.memory import CATEGORIES
from titan_mi100.planning.plan import GIB, with_settings
from titan_mi100.workshop.rehearsal.counter import Count, count, ranks_of_stages

CARD = 32 * GIB
COLORS = ("#2f6db5", "#e08a2e", "#3f9b5c", "#c4453c", "#8b6bb1", "#8d8d8d")  # one per category
_BF16 = {"state": "8bit", "master": "bf16_sr"}
STEPS: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("FSDP2, AdamW in fp32", {"activation_checkpoint": {"mode": "none"}}),
    ("+ recompute all but attention", {"activation_checkpoint": {"mode": "selective"}}),
    ("+ recompute everything", {"activation_checkpoint": {"mode": "full"}}),
    ("+ AdamW state in 8 bits", {"optimizer": {"state": "8bit"}}),
    ("+ weights in 24 bits", {"optimizer": {"state": "8bit", "master": "24bit"}}),
    ("+ weights in bf16 in place of 24 bits (stochastic rounding)", {"optimizer": _BF16}),
    ("+ gradients reduced in bf16", {"training": {"mixed_precision_reduce": "bfloat16"}}),
]
WAYS: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("a pipeline of 2 in place of FSDP2", {"optimizer": _BF16, "parallelism": {"pipeline_parallel_degree": 2}}),
    (
        "FSDP2 with gradients and state on the host",
        {"optimizer": _BF16, "memory": {"offload": "optimizer"}},
    ),
    (
        "FSDP2 with weights, gradients and state on the host",
        {"optimizer": _BF16, "memory": {"offload": "weights"}},
    ),
    ("LoRA of rank 16 in place of all weights", {"lora": {"rank": 16}}),
    ("QLoRA of rank 16 in place of all weights", {"lora": {"rank": 16, "base": "nf4"}}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", default="8B", help="of Qwen3 (default 8B)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per row (default 1024)")
    parser.add_argument("--batch", type=int, default=1, help="rows per forward and card (default 1)")
    parser.add_argument("--ga", type=int, default=8, help="forwards per step (default 8)")
    parser.add_argument("--json", action="store_true", help="print a JSON object per row, sizes in bytes")
    parser.add_argument("--png", type=Path, help="write the picture to this file")
    options = parser.parse_args()
    if options.png:
        import matplotlib  # noqa: F401 (before the minutes of counting)
    rows = []
    if not options.json:
        print(f"| Qwen3-{options.flavor}, 2 cards | {' | '.join(CATEGORIES)} | peak, GiB | host |")
        print("|---" * (len(CATEGORIES) + 3) + "|")
    for name, config in ladder(options):
        counts = [count(config, 2, rank, CARD) for rank in ranks_of_stages(config.layout(2))]
        worst = max(counts, key=lambda counted: counted.peak)
        rows.append((name, worst))
        if options.json:
            print(json.dumps({"name": name, "peak": worst.peak, "host": worst.host, **worst.categories}), flush=True)
        else:
            sizes = " | ".join(f"{worst.categories[category] / GIB:.1f}" for category in CATEGORIES)
            print(f"| {name} | {sizes} | {worst.peak / GIB:.1f} | {worst.host / GIB:.1f} |", flush=True)
    if options.png:
        draw(rows, options.png, f"Qwen3-{options.flavor} on two cards, seq {options.seq}, batch {options.batch}")


def ladder(options: argparse.Namespace) -> list[tuple[str, Config]]:
    training = TrainingConfig(
        seq_len=options.seq, local_batch_size=options.batch, gradient_accumulation_steps=options.ga
    )
    config = Config(model=ModelConfig(flavor=options.flavor), training=training)
    found = []
    for name, change in STEPS:
        config = with_settings(config, change)
        found.append((name, config))
    for name, change in WAYS:
        plain = config if "optimizer" in change else replace(config, optimizer=OptimizerConfig())
        found.append((name, with_settings(plain, change)))
    return found


def draw(rows: list[tuple[str, Count]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.2, 0.42 * len(rows) + 1.4), layout="constrained")
    names, left = [name for name, _ in rows], [0.0] * len(rows)
    axes.axvline(CARD / GIB, color="#b00020", linestyle="--", linewidth=1.2, label="32 GiB, as an MI100 has", zorder=0)
    for category, color in zip(CATEGORIES, COLORS, strict=True):
        sizes = [counted.categories[category] / GIB for _, counted in rows]
        axes.barh(names, sizes, left=left, label=category, color=color, height=0.7)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for number, size in enumerate(left):
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # so that the dashed line does not cross it
        axes.text(size + 0.6, number, f"{size:.1f}", va="center", weight="bold", bbox=plate)
    axes.axhline(len(STEPS) - 0.5, color="#8d8d8d", linewidth=0.8)  # above it: steps; below it: alternatives
    axes.margins(x=0.08, y=0.02)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="GiB per card at the peak of a step (counted, not measured)", title=title)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(exit_code(main))
