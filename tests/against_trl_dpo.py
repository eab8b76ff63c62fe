"""Preference training beside TRL's DPOTrainer, by hand: TRL is no dependency of ours.

    python tests/against_trl_dpo.py losses          # 5 steps of each loss in fp32: relative differences
    python tests/against_trl_dpo.py speed 10m 5     # tokens/s of interleaved steps, TRL at 1, 2, 4 and 8 pairs a batch
    python tests/against_trl_dpo.py memory ours|trl # peak memory of the process

Both get the same ids. Needs trl 1.16, datasets and accelerate.
"""

import resource
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from packed_rows import packed
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer

from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    Config,
    LRSchedulerConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainingConfig,
)
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.shapes.base import parameter_count
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up

SHAPES = {
    "tiny": Qwen3Spec(512, 64, 128, 2, 4, 2, 16, True),
    "10m": Qwen3Spec(8192, 256, 768, 8, 4, 2, 64, True),
    "100m": Qwen3Spec(16384, 768, 2304, 12, 12, 4, 64, True),
}
THEIRS = {"dpo": "sigmoid", "ipo": "ipo", "dpo_norm": "sigmoid_norm", "apo_zero_unpaired": "apo_zero", "simpo": ""}


def make_pairs(count: int, vocabulary: int, longest: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected) of random ids; lengths as of a skewed distribution, both answers uneven."""
    random, found = np.random.default_rng(0), []
    while len(found) < count:
        sizes = [int(x) for x in np.clip(random.lognormal([4.0, 4.4, 4.6], 0.6), 4, longest // 4)]
        found.append(tuple(random.integers(1, vocabulary, size).tolist() for size in sizes))
    return found  # type: ignore[return-value]


def save_model(spec: Qwen3Spec, folder: Path) -> None:
    torch.manual_seed(0)
    given = {key: value for key, value in to_hf_config(spec).items() if key not in ("architectures", "model_type")}
    Qwen3ForCausalLM(Qwen3Config(**given)).float().save_pretrained(folder)


@cache
def world() -> distributed.World:
    return distributed.init_distributed()


def ours(spec: Qwen3Spec, folder: Path, pairs: list, loss: str, seq_len: int, rows: int) -> Run:
    documents = []
    for prompt, *answers in pairs:
        for answer in answers:
            learned = np.array([False] * len(prompt) + [True] * len(answer))
            documents.append((np.array(prompt + answer, dtype=np.int32), learned))
    paired = loss != "apo_zero_unpaired"
    table = packed(documents, seq_len, together=2)
    object.__setattr__(table.documents, "labels", np.array([1, -1] * len(pairs), dtype=np.int8))
    assert paired or len(documents) == 2 * len(pairs)
    config = Config(
        training=TrainingConfig(seq_len=seq_len, local_batch_size=rows, mixed_precision_param="float32", steps=10**4),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, beta2=0.999),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        activation_checkpoint=ActivationCheckpointConfig("none"),
        checkpoint=CheckpointConfig(initial_load_path=str(folder)),
        objective=ObjectiveConfig(name="preference", loss=loss),
    )
    return open_run(config, world(), spec=spec, data=made_up(table))


class Trainer(DPOTrainer):
    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset  # the ids are ready


def theirs(folder: Path, pairs: list, loss: str, beta: float, batch: int, precompute: bool) -> DPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    columns = dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), zip(*pairs, strict=True), strict=True))
    rows = Dataset(InMemoryTable.from_pydict(columns), fingerprint=f"{folder.name}-{len(pairs)}")  # its own fails here
    word = Tokenizer(models.WordLevel({"a": 0}))
    config = DPOConfig(
        output_dir=tempfile.mkdtemp(), loss_type=[loss or "sigmoid"], beta=beta, per_device_train_batch_size=batch,
        precompute_ref_log_probs=precompute, gradient_checkpointing=False, max_length=None, learning_rate=1e-4,
        weight_decay=0.0, report_to="none", save_strategy="no", use_cpu=True, bf16=False, disable_dropout=True,
        disable_tqdm=True,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word, pad_token="a", eos_token="a")
    return Trainer(model, args=config, train_dataset=rows, processing_class=tokenizer)


def losses() -> None:
    spec, pairs = SHAPES["tiny"], make_pairs(40, 512, 256)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(spec, folder)
        for loss, kind in THEIRS.items():
            run = ours(spec, folder, pairs, loss, 512, 2)
            usual = run.config.objective.factors
            trainer = theirs(folder, pairs, kind, usual.beta, 2, precompute=False)
            optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-4, weight_decay=0.0, betas=(0.9, 0.999))
            apart = []
            for _ in range(5):
                numbers = [run.stream.source.index(run.progress.rows_consumed + i) for i in range(2)]  # type: ignore[attr-defined]
                documents = np.concatenate([run.data.sources[0].rows.documents_of(n) for n in numbers])  # type: ignore[attr-defined]
                result = run.step()
                batch = trainer.data_collator([trainer.train_dataset[int(i) // 2] for i in documents[::2]])
                if kind:
                    value = trainer._compute_loss(trainer.model, batch, False)
                else:
                    value = simpo(trainer, batch, usual.beta, usual.gamma)
                value = value / 2 if loss == "apo_zero_unpaired" else value  # theirs adds both answers of a pair
                optimizer.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
                optimizer.step()
                apart.append(abs(result.loss / value.item() - 1))
            print(f"{loss}: largest relative difference of 5 steps {max(apart):.1e}", flush=True)


def simpo(trainer: DPOTrainer, batch: dict, beta: float, gamma: float) -> torch.Tensor:
    mask = batch["completion_mask"][:, 1:]
    logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    log_p = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0] * mask
    chosen, rejected = (log_p.sum(1) / mask.sum(1)).chunk(2)
    settings = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=gamma, beta=beta, label_smoothing=0.0, accelerator=trainer.accelerator
    )
    return CPOTrainer.cpo_loss(settings, chosen, rejected)[0].mean()


def speed(which: str, rounds: int) -> None:
    spec = SHAPES[which]
    pairs = make_pairs(240, spec.vocab_size, 1024)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(spec, folder)
        run = ours(spec, folder, pairs, "dpo", 1024, 4)
        trainers = {}
        for batch in (1, 2, 4, 8):
            trainer = theirs(folder, pairs, "sigmoid", 0.1, batch, precompute=True)
            trainer.create_optimizer()
            trainer.current_gradient_accumulation_steps = 1  # its train() would set it
            trainers[batch] = (trainer, iter(trainer.get_train_dataloader()))
        print(f"{parameter_count(spec):,} parameters, {len(pairs)} pairs", flush=True)
        ratios: dict[int, list[float]] = {batch: [] for batch in trainers}
        padded = dict.fromkeys(trainers, 0.0)
        for number in range(rounds + 1):
            for batch, (trainer, batches) in trainers.items():
                began = time.perf_counter()
                result = run.step()
                mine = result.tokens / (time.perf_counter() - began)
                taken, real, whole = [], 0, 0
                while real < result.tokens:
                    taken.append(next(batches))
                    real += int(taken[-1]["attention_mask"].sum())
                    whole += taken[-1]["attention_mask"].numel()
                began = time.perf_counter()
                trainer.optimizer.zero_grad()
                for each in taken:
                    trainer.training_step(trainer.model, each)
                torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
                trainer.optimizer.step()
                if number:  # the first is a warm-up
                    ratios[batch].append(mine / (real / (time.perf_counter() - began)))
                    padded[batch] = whole / real
        for batch, found in ratios.items():
            print(f"batch {batch}: ours / TRL {statistics.median(found):.2f} {[round(x, 2) for x in found]}, "
                  f"TRL's padded / real tokens {padded[batch]:.2f}")  # fmt: skip


def memory(whose: str) -> None:
    """Peak of a process with 100M parameters after two steps of four pairs; TRL with its reference in memory."""
    spec, folder = SHAPES["100m"], Path(tempfile.mkdtemp())
    pairs = [([5] * 100, [6] * 100, [7] * 100)] * 8  # rows of 512 hold one pair, as TRL's batches
    save_model(spec, folder)
    if whose == "ours":
        run = ours(spec, folder, pairs, "dpo", 512, 1)
        run.step()
        run.step()
    else:
        trainer = theirs(folder, pairs, "sigmoid", 0.1, 1, precompute=False)
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        for batch in [*trainer.get_train_dataloader()][:4]:
            trainer.training_step(trainer.model, batch)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{whose}: peak {peak:.2f} GiB; weights {parameter_count(spec) * 4 / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "losses":
        losses()
    elif sys.argv[1] == "memory":
        memory(sys.argv[2])
    else:
        speed(sys.argv[2], int(sys.argv[3]))
