"""One side of versus.py: takes a step whenever the other end of the pipes asks for one, and says what it took.

All sides have the same weights and optimizer. Ours and TRL's padding-free one have the same rows in the same order:
their losses are to agree. TRL unpacked has the documents of these rows, in batches of similar length.
"""

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
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
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Turns:
    """The steps that the other end asks for. Only the first process reads and writes; the others wait for it."""

    def __init__(self, options: argparse.Namespace, tokens: Iterable[int]) -> None:
        """Args: tokens: of each step, without padding."""
        self._tokens, self._clock = iter(tokens), time.process_time if options.cpu_time else time.perf_counter
        self._is_first = int(os.environ.get("RANK", "0")) == 0
        self._asks = open(options.asks) if self._is_first else None  # noqa: SIM115  # open until the process ends
        self._answers = open(options.answers, "w", buffering=1) if self._is_first else None  # noqa: SIM115
        self._started = 0.0

    def begin(self) -> None:
        if self._asks:
            self._asks.readline()
        self._wait()
        self._started = self._clock()

    def end(self) -> None:
        self._wait()
        speed = next(self._tokens) / (self._clock() - self._started)
        if self._answers:
            print(json.dumps({"tokens_per_second": speed, "peak_gib": _peak_gib()}), file=self._answers)

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
    rows = options.batch * options.accumulation * WORLD * options.steps
    return random_rows(rows, options.seq, MODELS[options.model].vocab_size, 0.65)


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
    turns, losses = Turns(options, itertools.repeat(options.batch * options.accumulation * WORLD * options.seq)), []
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
    examples, batch = _trl_examples(options), options.unpacked or options.batch
    steps = np.array_split(np.array([sum(map(len, example)) for example in examples]), options.steps)
    turns = Turns(options, [int(lengths.sum()) for lengths in steps])

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
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=len(steps[0]) // (batch * WORLD),
            gradient_checkpointing=options.checkpointing,
            torch_compile=options.compile,
            max_length=None,
            padding_free=not options.unpacked,
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
        train_dataset=Dataset.from_list([*map(_trl_row, examples)]),
        processing_class=PreTrainedTokenizerFast(  # it is asked for, and not used
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0})), pad_token="a", eos_token="a"
        ),
        callbacks=[TakeTurns()],
    )
    trainer.train()
    turns.losses([line["loss"] for line in trainer.state.log_history if "loss" in line])


def _trl_examples(options: argparse.Namespace) -> list[list[np.ndarray]]:
    """The documents of each example: the rows in the order in which our loader reads them, or one document each."""
    packed, steps = rows_of(options), options.steps
    if not options.unpacked:
        order = ShuffledEpochs(packed, SEED, len(packed) // steps, made_up(packed).facts.plan)
        return [[*map(packed.documents.__getitem__, packed.documents_of(order.index(n)))] for n in range(len(packed))]
    documents, batch = [*map(packed.documents.__getitem__, packed.packing.documents)], options.unpacked * WORLD
    per_step = max(1, round(len(documents) / (batch * steps)))  # batches; about the tokens of the other sides
    some = sorted(itertools.islice(itertools.cycle(documents), per_step * batch * steps), key=len)
    # Each step gets short and long batches, for about as many tokens in each; with one batch a step, the warm-up's is
    # the shortest.
    places = [n * steps + (steps - 1 - step if n % 2 else step) for step in range(steps) for n in range(per_step)]
    return [[document] for place in places for document in some[place * batch : (place + 1) * batch]]


def _trl_row(documents: list[np.ndarray]) -> dict[str, list[int]]:
    values = np.concatenate(documents).astype(np.int64)
    labels = np.where(values & 1, values >> 1, -100)
    return {
        "input_ids": (values >> 1).tolist(), "labels": labels.tolist(), "seq_lengths": [*map(len, documents)],
    }  # fmt: skip


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
