"""Does training with less optimizer state end where fp32 AdamW ends? One process, a small model, real data.

    python scripts/bench/convergence.py DATA.jsonl TOKENIZER [--steps 300] [--seeds 1 2 3] [--output FOLDER]

First a model is trained from random weights in fp32; then, from its weights, once per kind and seed. A seed decides the
order of the rows and the noise. Of each run the validation loss at the end, beside fp32's with the same seed.
`plain bf16` rounds weights to the nearest: what stochastic rounding is there to avoid; no config asks for it.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.cli import exit_code
from titan_mi100.config.settings import (
    CheckpointConfig,
    Config,
    DataConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from titan_mi100.data.prepare import prepare_data
from titan_mi100.open_run.start import open_run
from titan_mi100.optim import lean
from titan_mi100.parallel import distributed
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.text.load import load_tokenizer

KINDS = {
    "fp32": ("fp32", "fp32"),
    "8bit, bf16_sr": ("8bit", "bf16_sr"),
    "8bit, 24bit": ("8bit", "24bit"),
    "plain bf16": ("fp32", "bf16_sr"),
}


def config_of(options: argparse.Namespace, kind: str, seed: int, source: str = "") -> Config:
    state, master = KINDS[kind]
    return Config(
        model=ModelConfig(tokenizer_path=options.tokenizer),
        data=DataConfig(path=(options.data,), validation_fraction=0.05),
        training=TrainingConfig(
            seq_len=options.seq,
            gradient_accumulation_steps=options.accumulation,
            steps=options.steps,
            seed=seed,
            mixed_precision_param=options.dtype,
        ),
        optimizer=OptimizerConfig(lr=options.lr if source else options.first_lr, state=state, master=master),
        lr_scheduler=LRSchedulerConfig(min_lr_factor=0.1),
        checkpoint=CheckpointConfig(initial_load_path=source),
    )


def train(config: Config, spec: ModelSpec, world: distributed.World, plain: bool, save_to: Path | None = None) -> float:
    """The validation loss at the end."""
    to_nearest = patch.object(lean, "_round_to_bf16", lambda value, out, noise: out.copy_(value))
    if plain:
        to_nearest.start()
    try:
        data = prepare_data(config.data, config.model.tokenizer_path, "", config.training.seq_len)
        run = open_run(config, world, spec=spec, data=data)
        for _ in range(run.steps):
            run.step()
        loss = run.validation_losses()[0]
        if save_to is not None:
            checkpointer = Checkpointer(save_to, 0, run.model, run.optimizer, world, run.config.layout(world.size))
            checkpointer.save(run.progress.step, run.progress.trainer_state(), run.about)
    finally:
        if plain:
            to_nearest.stop()
    assert loss is not None
    return loss


def measure(options: argparse.Namespace, folder: Path, world: distributed.World) -> dict[str, Any]:
    vocabulary = load_tokenizer(options.tokenizer).n_vocab
    spec = Qwen3Spec(
        -(-vocabulary // 128) * 128, options.hidden, 3 * options.hidden, options.layers, options.hidden // 64,
        options.hidden // 128, 64, True, rope_theta=1e6,
    )  # fmt: skip
    before = train(config_of(options, "fp32", 0), spec, world, False, folder / "first")
    source = str(folder / "first" / f"step-{options.steps}")
    print(f"{spec}\ntorch {torch.__version__}, {options}\nafter {options.steps} steps from random: {before:.4f}")
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in options.seeds:
        for kind, found in losses.items():
            found.append(train(config_of(options, kind, seed, source), spec, world, kind == "plain bf16"))
            print(f"seed {seed}, {kind}: {found[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("tokenizer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--first_lr", type=float, default=1e-3, help="of the training from random weights")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", action="store_true", help="print the losses as JSON at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = measure(options, Path(folder), distributed.init_distributed())
    print("\n| kind | loss by seed | mean of fp32's | greatest difference |\n|---|---|---|---|")
    for kind, found in losses.items():
        ratios = [loss / exact - 1 for loss, exact in zip(found, losses["fp32"], strict=True)]
        each = ", ".join(f"{loss:.4f}" for loss in found)
        print(f"| {kind} | {each} | {statistics.mean(ratios):+.2%} | {max(map(abs, ratios)):.2%} |")
    if options.json:
        print(json.dumps(losses))


if __name__ == "__main__":
    sys.exit(exit_code(main))
