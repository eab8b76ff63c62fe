"""Thirty steps of the real command, against the same thirty written by hand around transformers and torch's AdamW.

The reference knows nothing of the trainer: documents one after the other instead of packed rows, `loss.backward()`
instead of a step of microbatches, a learning rate and a clipping written out here. A step reads the whole set, so the
order of the rows does not matter. All is in float64; what is left is transformers' rotary embedding in float32.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_model
import test_qwen3_5
import torch
from conftest import ASSETS, fork_server, job_environment, random_documents
from torch import Tensor

from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.weights.source import open_source

SPEC = dataclasses.replace(
    PRESETS["debug"], hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.2,
)  # fmt: skip
SPEC_3_5 = dataclasses.replace(test_qwen3_5.SPECS["tied"], vocab_size=768, hidden_size=32, num_hidden_layers=2,
                               layer_types=("linear_attention", "full_attention"), pad_token_id=None)  # fmt: skip


class Family(NamedTuple):
    """A model of transformers: how it is made and computes logits, and how near ours must come at the end."""

    spec: ModelSpec
    reference: Callable[[Any], Any]
    logits: Callable[[Any, Tensor], Tensor]
    bar: float


# The first one's norms and softmax are in fp32.
FAMILIES = {
    "qwen3": Family(SPEC, test_model.reference, lambda model, ids: model(ids).logits, 2e-6),
    "qwen3.5": Family(SPEC_3_5, test_qwen3_5.reference, test_qwen3_5.lifted, 1e-8),
}
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


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen3.5", marks=pytest.mark.full)])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def documents() -> tuple[Documents, Documents]:
    """To train on, to validate on."""
    train, held_out = (random_documents(TOKENS, [*n], seed) for seed, n in enumerate((LENGTHS, HELD_OUT)))
    for _, supervised in train + held_out:
        supervised[-1] = True  # a document without any would be refused
    return train, held_out


@pytest.fixture(scope="module")
def ours(family: Family, documents: tuple[Documents, Documents], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command's run, as its folder tells it."""
    folder = tmp_path_factory.mktemp("reference")
    for name, some in zip(("train", "held_out"), documents, strict=True):
        rows = ({"input_ids": ids.tolist(), "labels": np.where(learned, ids, -100).tolist()} for ids, learned in some)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(CONFIG)
    family.reference(family.spec).float().save_pretrained(folder / "hf")
    command = ["-m", "titan_mi100.train", "--job.config_file", "run.toml", "--job.run_folder", "run"]
    code, output, errors = fork_server().run(command, 1, job_environment(), folder, timeout=300)
    assert code == 0, output[-3000:] + errors[-3000:]
    entries = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in entries if "loss" in entry] == list(range(1, STEPS + 1)), "not a set a step"
    checkpoint = open_source(folder / "run" / "checkpoint" / f"step-{STEPS}").weights
    return Run(
        [entry for entry in entries if "loss" in entry],
        {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry},
        {name: checkpoint.tensor(name) for name in checkpoint.kinds},
    )


@pytest.fixture(scope="module")
def expected(family: Family, documents: tuple[Documents, Documents]) -> Run:
    """The same by hand."""
    model = family.reference(family.spec).float().double()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},  # norms, and rates of decay
        ],
        lr=LR, betas=BETAS, eps=EPS,
    )  # fmt: skip
    train, held_out = documents
    run = Run([], {}, {})
    for step in range(1, STEPS + 1):
        done = (step - 1 - WARMUP) / (STEPS - WARMUP)
        cosine = MIN_FACTOR + (1 - MIN_FACTOR) * (1 + math.cos(math.pi * done)) / 2
        lr = LR * (step / WARMUP if step <= WARMUP else cosine)
        loss, supervised = mean_loss(family, model, train)
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
        if step % VALIDATED_EVERY == 0 or step == STEPS // 20:  # the first validation comes early
            with torch.no_grad():
                run.validation[step] = mean_loss(family, model, held_out)[0].item()
    run.weights = {name: parameter.detach() for name, parameter in named.items()}
    return run


def mean_loss(family: Family, model: torch.nn.Module, documents: Documents) -> tuple[Tensor, int]:
    """Mean cross-entropy over the supervised tokens of all documents, and how many these are."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, supervised in documents:
        logits = family.logits(model, torch.from_numpy(ids.astype(np.int64))[None])[0]
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
    assert ours.validation == pytest.approx(expected.validation, rel=1e-5) and len(ours.validation) == 4


def test_the_weights_after_thirty_steps_are_those_of_plain_adamw(family: Family, ours: Run, expected: Run) -> None:
    assert ours.weights.keys() == {name for name in expected.weights if name != "lm_head.weight"}
    for name, weight in ours.weights.items():
        exact = expected.weights[name]
        assert (weight - exact).norm() <= family.bar * exact.norm(), name
