"""Write what a teacher thinks of a run's rows: `titan-mi100 teach --job.config_file STUDENT.toml --model TEACHER`.

The rows are those of the student's config. For each learned token the folder keeps the teacher's likeliest ids and
their log probabilities; the student learns from them with [objective] name = "distill". Started again, it goes on.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import (
    CheckpointConfig,
    Config,
    JobConfig,
    LoRAConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    ObjectiveConfig,
)
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace as write
from titan_mi100.log import setup_logging

_OWN = "teach.toml"  # in the teacher's folder


def main(argv: Sequence[str] | None = None) -> int:
    options, settings = _parser().parse_known_args(argv)
    path = ""
    if options.from_vllm or options.ids:
        from titan_mi100.tools.vllm_answers import read_answers, write_ids

        if options.ids:
            return tool.exit_code(lambda: write_ids(_student(options), Path(options.ids)))
        return tool.exit_code(
            lambda: read_answers(_student(options), Path(options.from_vllm), _out(options), options.top_k)
        )

    def prepare() -> None:
        nonlocal path
        path = str(_write_config(options))

    code = tool.exit_code(prepare)
    if code:
        return code
    from titan_mi100.launch import launcher

    signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS)
    return launcher.main(["--job.config_file", path, *settings])


def _parser() -> argparse.ArgumentParser:
    example = "e.g. titan-mi100 teach --job.config_file student.toml --model Qwen3-8B"
    epilog = "Other options go to the pass, as of titan-mi100 train: --nproc_per_node 2, --lora.base nf4 ..."
    description = __doc__.split("\n", 1)[0].replace("`", "")
    parser = tool.Parser(prog="titan-mi100 teach", description=description, epilog=epilog, example=example)
    add = parser.add_argument
    add("--job.config_file", dest="config", required=True, metavar="STUDENT.toml", help="the student's config")
    add("--model", default="", metavar="TEACHER", help="HF folder or checkpoint of the teacher")
    add("--out", default="", metavar="FOLDER", help="default: the config's objective.teacher")
    add("--top_k", type=int, default=32, metavar="K", help="ids kept per learned token: 8 bytes each (default 32)")
    add("--ids", default="", metavar="FILE.jsonl", help="only write the rows' token ids, for vLLM")
    add("--from_vllm", default="", metavar="FILE.jsonl", help="read the answers of vLLM instead (docs/PREFERENCES.md)")
    return parser


def _student(options: argparse.Namespace) -> Config:
    setup_logging(0)
    return load_config(["--job.config_file", options.config], world_size=None)


def _out(options: argparse.Namespace) -> Path:
    out = options.out or _student(options).objective.teacher
    if not out:
        raise UserError("--out FOLDER is missing, and the config has no objective.teacher")
    return Path(os.path.abspath(out))


def _write_config(options: argparse.Namespace) -> Path:
    """The config of the teacher's pass, whose run folder is the teacher's folder."""
    if not options.model:
        raise UserError("--model TEACHER is missing: an HF folder, or another run's checkpoint/step-N")
    if options.top_k < 1:
        raise UserError(f"--top_k {options.top_k}: must be 1 or more; the usual is 32")
    student, out = _student(options), _out(options)
    if student.objective.answers:
        raise UserError('[objective] name = "preference": a teacher is for rows of sft and distill')
    training = replace(student.training, steps=1, epochs=0, target_tokens_per_step=0, gradient_accumulation_steps=1)
    training = replace(training, train_router=False)
    load = CheckpointConfig(initial_load_path=os.path.abspath(options.model))
    # A frozen base in the computation's dtype, and adapters that change nothing: their matrix B is zero. A pipeline
    # wants one in each layer.
    outputs = ("o_proj", "out_proj")
    kinds = {tuple(layer.adapted) for layer in Config(checkpoint=load).spec().layers}
    idle = LoRAConfig(rank=1, target_modules=tuple({*outputs} & {name for kind in kinds for name in kind}))
    config = Config(
        job=JobConfig(run_folder=str(out)),
        model=ModelConfig(tokenizer_path=student.tokenizer_path(), chat_template=student.model.chat_template),
        data=student.data,
        training=training,
        lr_scheduler=LRSchedulerConfig(warmup_steps=0),
        lora=idle,
        checkpoint=load,
        objective=ObjectiveConfig(name="teach", teacher=str(out), top_k=options.top_k),
        metrics=MetricsConfig(enable_tensorboard=False),
    )
    out.mkdir(parents=True, exist_ok=True)
    write(out / _OWN, to_toml(config))
    return out / _OWN


if __name__ == "__main__":
    sys.exit(main())
