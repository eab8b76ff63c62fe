"""Thirty steps of the real command, against the same thirty written by hand around transformers and torch's AdamW.

The reference knows nothing of the trainer: documents one after the other instead of packed rows, `loss.backward()`
instead of a step of microbatches, a learning rate and a clipping written out here. A step reads the whole set, so the
order of the rows does not matter. All is in float64; what is left is transformers' rotary embedding in float32.
"""

import dataclasses
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import ASSETS, fork_server, job_environment, random_documents
from safetensors.torch import load_file
from test_model import reference
from torch import Tensor

from titan_mi100.shapes.families import PRESETS

SPEC = dataclasses.replace(
    PRESETS["debug"], hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.2,
)  # fmt: skip
STEPS, WARMUP, VALIDATED_EVERY = 30, 4, 10
LR, MIN_FACTOR, BETAS, EPS, DECAY = (
    2e-3,
    0.1,
    (0.8, 0.97),
    1e-2,
    0.5,
)  # eps: large enough for a gradient's scale to show
MAX_NORM = 1.75  # between the greatest and the least norm of the run
LENGTHS, HELD_OUT = (64, 60, 50, 10, 3, 40, 20, 33, 30), (64, 41, 7, 20)  # five rows of 64, and a sixth that is padding
CONFIG = f"""
[model]
tokenizer_path = "{ASSETS / "tokenizer"}"
[data]
path = "train.jsonl"
validation_path = "held_out.jsonl"
[training]
seq_len = 64
local_batch_size = 2
gradient_accumulation_steps = 3
steps = {STEPS}
max_norm = {MAX_NORM}
mixed_precision_param = "float64"
[validation]
freq = {VALIDATED_EVERY}
[optimizer]
lr = {LR}
beta1 = {BETAS[0]}
beta2 = {BETAS[1]}
eps = {EPS}
weight_decay = {DECAY}
[lr_scheduler]
warmup_steps = {WARMUP}
decay_type = "cosine"
min_lr_factor = {MIN_FACTOR}
[checkpoint]
initial_load_path = "hf"
export_hf = true
export_dtype = "float32"
[metrics]
enable_tensorboard = false
"""
TOKENS = 700  # the ids are below it; the tokenizer has 709
Documents = list[tuple[np.ndarray, np.ndarray]]  # token ids; which of them are supervised


@dataclass
class Run:
    """What thirty steps were."""

    steps: list[dict[str, float]]  # loss, grad_norm, lr, tokens, supervised_tokens
    validation: dict[int, float]  # step -> loss
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def documents() -> tuple[Documents, Documents]:
    """To train on, to validate on."""
    train, held_out = (random_documents(TOKENS, [*n], seed) for seed, n in enumerate((LENGTHS, HELD_OUT)))
    for _, supervised in train + held_out:
        supervised[-1] = True  # a document without any would be refused
    return train, held_out


@pytest.fixture(scope="module")
def ours(documents: tuple[Documents, Documents], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command's run, as its folder tells it."""
    folder = tmp_path_factory.mktemp("reference")
    for name, some in zip(("train", "held_out"), documents, strict=True):
        rows = ({"input_ids": ids.tolist(), "labels": np.where(learned, ids, -100).tolist()} for ids, learned in some)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(CONFIG)
    reference(SPEC).save_pretrained(folder / "hf")
    command = ["-m", "titan_mi100.train", "--job.config_file", "run.toml", "--job.run_folder", "run"]
    code, output, errors = fork_server().run(command, 1, job_environment(), folder, timeout=300)
    assert code == 0, output[-3000:] + errors[-3000:]
    entries = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in entries if "loss" in entry] == list(range(1, STEPS + 1)), "not a set a step"
    return Run(
        [entry for entry in entries if "loss" in entry],
        {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry},
        load_file(folder / "run" / f"hf-step-{STEPS}" / "model.safetensors"),
    )


@pytest.fixture(scope="module")
def expected(documents: tuple[Documents, Documents]) -> Run:
    """The same by hand."""
    model = reference(SPEC).double()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in named.items() if "norm" not in name], "weight_decay": DECAY},
            {"params": [p for name, p in named.items() if "norm" in name], "weight_decay": 0.0},
        ],
        lr=LR, betas=BETAS, eps=EPS,
    )  # fmt: skip
    train, held_out = documents
    run = Run([], {}, {})
    for step in range(1, STEPS + 1):
        done = (step - 1 - WARMUP) / (STEPS - WARMUP)
        cosine = MIN_FACTOR + (1 - MIN_FACTOR) * (1 + math.cos(math.pi * done)) / 2
        lr = LR * (step / WARMUP if step <= WARMUP else cosine)
        loss, supervised = mean_loss(model, train)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in named.values() if p.grad is not None]
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, MAX_NORM / norm))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        counts = {"tokens": sum(LENGTHS), "supervised_tokens": supervised}
        run.steps.append({"loss": loss.item(), "grad_norm": norm, "lr": lr, **counts})
        if step % VALIDATED_EVERY == 0:
            with torch.no_grad():
                run.validation[step] = mean_loss(model, held_out)[0].item()
    run.weights = {name: parameter.detach() for name, parameter in named.items()}
    return run


def mean_loss(model: torch.nn.Module, documents: Documents) -> tuple[Tensor, int]:
    """Mean cross-entropy over the supervised tokens of all documents, and how many these are."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, supervised in documents:
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        labels = torch.from_numpy(np.where(supervised[1:], ids[1:], -100).astype(np.int64))
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int(supervised[1:].sum())
    return total / count, count


def test_the_learning_rate_of_every_step_is_the_warmup_and_the_cosine_of_the_config(ours: Run, expected: Run) -> None:
    assert [step["lr"] for step in ours.steps] == pytest.approx([step["lr"] for step in expected.steps], rel=1e-12)


def test_tokens_are_those_of_the_documents_and_no_padding(ours: Run, expected: Run) -> None:
    for key in ("tokens", "supervised_tokens"):
        assert [step[key] for step in ours.steps] == [step[key] for step in expected.steps]


def test_every_loss_and_every_norm_before_clipping_is_that_of_plain_torch(ours: Run, expected: Run) -> None:
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in ours.steps] == pytest.approx([step[key] for step in expected.steps], rel=1e-5)
    clipped = [step["grad_norm"] > MAX_NORM for step in expected.steps]
    assert any(clipped) and not all(clipped)  # both were tried


def test_validation_gives_the_mean_loss_of_the_held_out_documents(ours: Run, expected: Run) -> None:
    assert ours.validation == pytest.approx(expected.validation, rel=1e-5) and len(ours.validation) == 3


def test_the_weights_after_thirty_steps_are_those_of_plain_adamw(ours: Run, expected: Run) -> None:
    assert ours.weights.keys() == {name for name in expected.weights if name != "lm_head.weight"}
    for name, weight in ours.weights.items():
        exact = expected.weights[name]
        assert (weight.double() - exact).norm() <= 2e-6 * exact.norm(), name
