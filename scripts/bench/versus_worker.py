"""One side of versus.py: takes a step whenever the other end of the pipes asks for one, and says what it took.

Both sides have the same weights, the same rows in the same order, and the same optimizer: their losses are to agree.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    LRSchedulerConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.data.loader import ShuffledEpochs
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.model.init import initial_values
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, random_rows

_LONG = {"rope_theta": 1e6, "max_position_embeddings": 40_960}
MODELS = {
    "103m": Qwen3Spec(151_936, 512, 1536, 8, 8, 4, 64, True, **_LONG),
    "281m": Qwen3Spec(151_936, 1024, 3072, 8, 16, 8, 128, True, **_LONG),
    "281m-4096": Qwen3Spec(4096, 1024, 3072, 8, 16, 8, 128, True, **_LONG),
    **PRESETS,
}
SEED = 7
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1)
MAX_NORM = 1.0


class Turns:
    """The steps that the other end asks for. Only the first process reads and writes; the others wait for it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._is_first = int(os.environ.get("RANK", "0")) == 0
        self._asks = open(options.asks) if self._is_first else None  # noqa: SIM115  # open until the process ends
        self._answers = open(options.answers, "w", buffering=1) if self._is_first else None  # noqa: SIM115
        self._started = 0.0

    def begin(self) -> None:
        if self._asks:
            self._asks.readline()
        self._wait()
        self._started = time.perf_counter()

    def end(self) -> None:
        self._wait()
        seconds = time.perf_counter() - self._started
        if self._answers:
            print(json.dumps({"seconds": seconds, "peak_gib": _peak_gib()}), file=self._answers)

    def losses(self, losses: list[float]) -> None:
        if self._asks and self._answers:
            self._asks.readline()
            print(json.dumps({"losses": losses}), file=self._answers)

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()


def _peak_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rows_of(options: argparse.Namespace) -> PackedDataset:
    per_step = options.batch * options.accumulation * int(os.environ.get("WORLD_SIZE", "1"))
    return random_rows(per_step * options.steps, options.seq, MODELS[options.model].vocab_size, 0.65)


def ours(options: argparse.Namespace) -> None:
    config = Config(
        training=TrainingConfig(
            seq_len=options.seq,
            local_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            steps=options.steps,
            seed=SEED,
            max_norm=MAX_NORM,
            mixed_precision_param=options.dtype,
        ),
        optimizer=OPTIMIZER,
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        activation_checkpoint=ActivationCheckpointConfig("full" if options.checkpointing else "none"),
        compile=CompileConfig(options.compile),
        parallelism=ParallelismConfig(zero_stage=options.zero_stage),
    )
    run = open_run(config, distributed.init_distributed(), spec=MODELS[options.model], data=made_up(rows_of(options)))
    turns, losses = Turns(options), []
    for _ in range(options.steps):
        turns.begin()
        losses.append(run.step().loss)
        turns.end()
    turns.losses(losses)
    distributed.exit_process(0)


def trl(options: argparse.Namespace) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    spec = MODELS[options.model]
    model = Qwen3ForCausalLM(Qwen3Config(**to_hf_config(spec), attn_implementation=options.trl_attention)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_values(spec, SEED, name, weight.shape, (0,) * weight.dim(), weight.shape))
    turns = Turns(options)

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end()

    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(options.folder),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            gradient_checkpointing=options.checkpointing,
            torch_compile=options.compile,
            max_length=None,
            padding_free=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="sequential",
            bf16=options.dtype == "bfloat16",
            fp16=options.dtype == "float16",
            learning_rate=OPTIMIZER.lr,
            adam_beta2=OPTIMIZER.beta2,
            weight_decay=OPTIMIZER.weight_decay,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list(list(_trl_rows(options))),
        processing_class=PreTrainedTokenizerFast(  # it is asked for, and not used
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0})), pad_token="a", eos_token="a"
        ),
        callbacks=[TakeTurns()],
    )
    trainer.train()
    turns.losses([line["loss"] for line in trainer.state.log_history if "loss" in line])


def _trl_rows(options: argparse.Namespace) -> Iterator[dict[str, list[int]]]:
    """The rows in the order in which our loader reads them."""
    packed = rows_of(options)
    order = ShuffledEpochs(packed, SEED, len(packed) // options.steps, made_up(packed).facts.plan)
    for number in range(len(packed)):
        documents = [packed.documents[document] for document in packed.documents_of(order.index(number))]
        values = [int(value) for document in documents for value in document]
        yield {
            "input_ids": [value >> 1 for value in values],
            "labels": [value >> 1 if value & 1 else -100 for value in values],
            "seq_lengths": [len(document) for document in documents],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["ours", "trl"])
    parser.add_argument("--asks", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, required=True, help="a JSON object, by versus.py")
    given = parser.parse_args()
    options = argparse.Namespace(asks=given.asks, answers=given.answers, **given.options)
    {"ours": ours, "trl": trl}[given.side](options)


if __name__ == "__main__":
    main()
