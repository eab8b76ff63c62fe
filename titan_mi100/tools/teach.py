"""Write what a teacher thinks of a run's rows: `titan-mi100 teach --job.config_file STUDENT.toml --model TEACHER`.

The rows are those of the student's config. For each learned token the folder keeps the teacher's likeliest ids and
their log probabilities; the student learns from them with [objective] name = "distill". Started again, it goes on.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.hub import local_path
from titan_mi100.config.load import TEACHER_CONFIG, load_config
from titan_mi100.config.settings import Config, ObjectiveConfig
from titan_mi100.data.prepare import check_teacher
from titan_mi100.doors import door
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace as write
from titan_mi100.log import setup_logging
from titan_mi100.planning.workload import with_settings

_TOP_K = 32
# What settings may begin with: those that say which rows, and those that say how a pass is computed.
_OF_ROWS = ("--data.", "--model.tokenizer_path", "--model.chat_template", "--training.seq_len")
_OF_A_PASS = (
    *("--nproc_per_node", "--nproc-per-node", "--max_restarts", "--parallelism."),
    *("--memory.", "--compile.", "--watchdog.", "--model.attention_backend", "--lora.", "--training.seed"),
    *("--training.mixed_precision_param", "--training.local_batch_size", "--training.gradient_accumulation_steps"),
    *("--job.description", "--activation_checkpoint."),
)


def main(argv: Sequence[str] | None = None) -> int:
    options, settings = parser().parse_known_args(argv)
    config = ""

    def prepare() -> None:
        nonlocal config
        _check_words(options, settings)
        if options.ids or options.from_vllm:
            student = _student(options, settings)
            if options.ids:
                door("teach --ids")(student, Path(options.ids))
            else:
                folder = _out(options, student.objective.teacher)
                door("teach --from_vllm")(student, Path(options.from_vllm), folder, options.top_k or _TOP_K)
        else:
            config = str(write_config(options))

    code = tool.exit_code(prepare)
    if code or not config:
        return code
    from titan_mi100.launch import launcher

    signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS)
    words = ["--job.config_file", config, *settings, *_microbatches(settings)]
    return launcher.main(words, program=launcher.TEACHER)


def _check_words(options: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuse what would have no effect. The values of settings are checked where they are read."""
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top_k {options.top_k}: must be 1 or more; the usual is 32")
    mode = "--ids" * bool(options.ids) or "--from_vllm" * bool(options.from_vllm)
    used = {"--ids": ["ids"], "--from_vllm": ["from_vllm", "out", "top_k"], "": vars(options)}[mode]
    parser().check_used(options, mode, ["config", *used])
    taken = _OF_ROWS if mode else (*_OF_ROWS, *_OF_A_PASS)
    for word in (word for word in settings if word.startswith("--") and not word.startswith(taken)):
        instead = "; --top_k is the number of ids" * word.startswith("--objective.top_k")
        where = mode or "titan-mi100 teach"
        raise UserError(f"{word.partition('=')[0]} has no effect with {where}; leave it out{instead}")


def _microbatches(settings: Sequence[str]) -> list[str]:
    """A pipeline wants as many forwards of a step as it has stages, also where no step is taken."""
    pipeline, accumulation = "--parallelism.pipeline_parallel_degree", "--training.gradient_accumulation_steps"
    words = [word for setting in settings for word in setting.split("=", 1)]
    degree = words[words.index(pipeline) + 1 :][:1] if pipeline in words else []
    return [accumulation, *degree] if degree and accumulation not in words else []


def parser() -> tool.Parser:
    """Make the command's parser."""
    epilog = "Other options go to the pass, as of titan-mi100 train: --nproc_per_node 2, --lora.base nf4 ..."
    description = __doc__.split("\n", 1)[0].replace("`", "")
    made = tool.Parser(prog="titan-mi100 teach", description=description, epilog=epilog)
    add = made.add_argument
    add("--job.config_file", dest="config", required=True, metavar="STUDENT.toml", help="the student's config")
    add("--model", default="", metavar="TEACHER", help="HF folder or checkpoint of the teacher")
    add("--out", default="", metavar="FOLDER", help="default: the config's objective.teacher")
    add("--top_k", type=int, metavar="K", help="ids kept per learned token: 8 bytes each (default 32)")
    add("--ids", default="", metavar="FILE.jsonl", help="only write the rows' token ids, for vLLM")
    add("--from_vllm", default="", metavar="FILE.jsonl", help="read the answers of vLLM instead (docs/PREFERENCES.md)")
    return made


def _student(options: argparse.Namespace, settings: Sequence[str] = ()) -> Config:
    setup_logging(0)
    student = load_config(["--job.config_file", options.config, *settings], world_size=None)
    objective = student.objective
    is_judged = objective.name == "policy" and objective.advantage == "teacher"
    if objective.answers and not is_judged:
        remedy = 'rows of sft and distill, and sampled answers: name = "policy", advantage = "teacher"'
        raise UserError(f'[objective] name = "{objective.name}": a teacher is for {remedy}')
    if is_judged and (options.ids or options.from_vllm or options.top_k):
        raise UserError("--ids, --from_vllm, --top_k have no effect with sampled answers; leave them out")
    return student


def _out(options: argparse.Namespace, configured: str) -> Path:
    folder = options.out or configured
    if not folder:
        raise UserError("--out FOLDER is missing, and the config has no objective.teacher")
    return Path(os.path.abspath(folder))


def write_config(options: argparse.Namespace) -> Path:
    """The config of the teacher's pass, whose run folder is the teacher's folder."""
    if not options.model:
        raise UserError("--model TEACHER is missing: an HF folder, or another run's checkpoint/step-N")
    student = _student(options)
    folder = _out(options, student.objective.teacher)
    is_ours = (folder / TEACHER_CONFIG).exists() or (folder.is_dir() and not os.listdir(folder))
    if os.path.lexists(folder) and not is_ours:
        raise UserError(f"{folder}: exists already, and is no teacher's folder; name a new one with --out")
    training = replace(student.training, steps=1, epochs=0, target_tokens_per_step=0, gradient_accumulation_steps=1)
    training = replace(training, train_router=False)
    objective = ObjectiveConfig(name="distill", teacher=str(folder), top_k=options.top_k or _TOP_K)
    if student.objective.answers:
        objective = replace(student.objective, teacher=str(folder), correction="auto", correction_cap=0.0)
    config = Config(data=student.data, training=training, objective=objective)
    load = os.path.abspath(local_path(options.model))
    config = with_settings(config, {"checkpoint": {"initial_load_path": load}})
    try:
        adapted = {name for layer in config.spec().layers for name in layer.adapted}
    except UserError as error:
        problem = str(error).partition(";")[0].removeprefix("[checkpoint] initial_load_path = ")
        raise UserError(f"--model: {problem}; name an HF folder, or another run's checkpoint/step-N") from None
    model = {"tokenizer_path": student.tokenizer_path(), "chat_template": student.model.chat_template}
    # A frozen base in the computation's dtype, and adapters that change nothing: their matrix B is zero. A pipeline
    # wants one in each layer.
    idle = {"rank": 1, "target_modules": tuple({"o_proj", "out_proj"} & adapted)}
    config = with_settings(config, {"job": {"run_folder": str(folder)}, "model": model, "lora": idle})
    config = with_settings(config, {"lr_scheduler": {"warmup_steps": 0}, "metrics": {"enable_tensorboard": False}})
    check_teacher(load, config.tokenizer_path())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / TEACHER_CONFIG, to_toml(config))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder with --out") from None
    return folder / TEACHER_CONFIG
