"""`titan-mi100 config new` asks five questions and writes a config that the planner has checked. Imports no torch.

Each answer can be given as an option; without a terminal nothing is asked. The config inherits from the bundled
finetune.toml. Rows per step, epochs and the share for validation follow from the number of tokens. What does not fit
the cards is changed step by step, or refused with what would fit. With --from a YAML config of another trainer says
what is trained, and how.
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from titan_mi100 import cli
from titan_mi100.config.as_text import toml_value
from titan_mi100.config.bundled import FOLDER
from titan_mi100.config.check import check
from titan_mi100.config.hub import hub_name, local_path
from titan_mi100.config.layout import Batch
from titan_mi100.config.load import load_config
from titan_mi100.config.problem import Problem
from titan_mi100.config.settings import Config, TrainingConfig
from titan_mi100.data.formats import first_keys
from titan_mi100.data.packing import pack_rows
from titan_mi100.data.survey import Survey, survey
from titan_mi100.doors import door
from titan_mi100.errors import UserError
from titan_mi100.files.durable import check_output, write_output
from titan_mi100.files.hub_files import TRAIN
from titan_mi100.files.patterns import matching_files
from titan_mi100.planning.device import positive, size_gib
from titan_mi100.planning.hardware import count_gpus, dtype_advice
from titan_mi100.planning.longest import METHODS as ON_CARDS
from titan_mi100.planning.plan import GIB, Change, Plan, make_plan, remedy
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.run.next_commands import command
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.text.assets import has_tokenizer
from titan_mi100.wording import as_key, plural

# method -> what to try in this order, each with a word about what it changes; the first that fits is taken
METHODS: dict[str, tuple[tuple[str, Change], ...]] = {
    "full": (
        ("", {}),
        ("optimizer state in 8 bits", {"optimizer": {"state": "8bit"}}),
        ("optimizer state in 8 bits, weights in bf16 with stochastic rounding", ON_CARDS["8-bit"]),
        ("the same, with gradients and optimizer state in the host's memory", ON_CARDS["8-bit, on the host"]),
    ),
    "lora": (("", ON_CARDS["LoRA"]), ("the frozen weights in 4 bits (QLoRA)", ON_CARDS["QLoRA"])),
    "qlora": (("", ON_CARDS["QLoRA"]),),
}


_PRECISION = "training.mixed_precision_param"
_SECONDS = 10.0  # of reading the data; of more data a sample is read
_SPARE = 0.1  # share of a card's memory that larger forwards leave
_LEAST_STEPS, _MOST_EPOCHS, _MOST_PADDING = 30, 10, 0.1  # of a run, if its data allow that


class UserChoices(NamedTuple):
    model: str
    data: tuple[str, ...]
    gpus: int
    memory: float  # GiB of a card
    method: str
    is_here: bool = False  # for this machine's CPU


class Size(NamedTuple):
    """The size of a run."""

    seq_len: int
    rows: int  # of an epoch
    epochs: int
    step: int  # rows

    @property
    def steps(self) -> int:
        return self.epochs * math.ceil(self.rows / self.step)

    @property
    def padding(self) -> float:
        """Share of an epoch's rows."""
        return 1 - self.rows * self.epochs / (self.steps * self.step)


class Question(NamedTuple):
    text: str
    default: str  # "": there is none
    read: Callable[[str], Any]  # the answer's value; raises UserError or ArgumentTypeError


def main(argv: Sequence[str] | None = None) -> int:
    return cli.exit_code(lambda: _new(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="titan-mi100 config new",
        description="Write a config for fine-tuning: asks for what the options leave open, on a terminal, and checks "
        "that the run fits the cards before it writes.",
    )
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="Hugging Face folder or name, such as Qwen/Qwen3-0.6B")
    add("--data", metavar="FILE", nargs="+", help="training data: files, globs or names")
    add("--gpus", metavar="N", help="GPUs, one process each; on a CPU: processes")
    add("--memory", metavar="32GB", help="of each card")
    add("--method", metavar="|".join(METHODS), help="train all weights, adapters, or adapters on 4-bit weights")
    add("--output", metavar="X.toml", help="file to write; never overwritten")
    add("--from", dest="yaml", metavar="X.yaml", help="a config of axolotl, LLaMA-Factory or TRL, to carry it over")
    add("--trainer", metavar="NAME", help="whose config X.yaml is, if its keys do not say it")
    return parser


def _new(options: argparse.Namespace) -> None:
    if options.output:
        check_output(Path(options.output), "--output")
    if options.yaml:
        return _carry_over(options)
    if options.trainer:
        raise UserError("--trainer is for --from X.yaml; leave it out")
    questions = _questions()
    missing = [f"--{name}" for name, asked in questions.items() if not asked.default and not getattr(options, name)]
    if missing and not sys.stdin.isatty():
        problem = f"{' and '.join(missing)} must be given, as there is no terminal to ask for answers"
        raise UserError(f"{problem}; e.g. titan-mi100 config new --model Qwen3-0.6B --data train.jsonl")
    answers = UserChoices(**{name: _answer(name, question, options) for name, question in questions.items()})
    answers = answers._replace(is_here=_is_here(options, answers.memory))
    plan, changed, about_data = fitting_plan(answers)
    lines = [about_data, *_about_memory(answers, plan, changed[0])]
    return _write(options.output, answers, changed[1], lines)


def _is_here(options: argparse.Namespace, memory: float) -> bool:
    """Whether the config is for this machine's CPU: there is no GPU, and nobody has described one."""
    return not count_gpus() and not options.memory and f"{memory:g}GB" == _questions()["memory"].default


def _dtype(is_here: bool) -> str:
    """float32 for a CPU that computes many times more slowly in bfloat16."""
    return "float32" if is_here and dtype_advice("bfloat16", None, is_cpu=True) else "bfloat16"


def _carry_over(options: argparse.Namespace) -> None:
    """Write the config that a YAML of another trainer stands for, and say what it cannot stand for."""
    if options.method:
        raise UserError("--method: the YAML of --from says what is trained; leave --method out, or change the YAML")
    carry = door("config new --from")
    read = {name: _answer(name, asked, options) for name, asked in _questions().items() if getattr(options, name)}
    theirs = carry(options.yaml, options.trainer or "", read.get("model", ""), read.get("data", ()))
    cards, memory = (_answer(name, _questions()[name], options) for name in ("gpus", "memory"))
    lines, surveyed, is_here = list[str](), None, _is_here(options, memory)
    if theirs.checked(cards).training.mixed_precision_param == "bfloat16" != _dtype(is_here):
        theirs.settings[_PRECISION], theirs.sources[_PRECISION] = ("float32",), "this CPU has no bfloat16"
    if theirs.has_model and _model(theirs.model) and theirs.has_data:
        try:
            surveyed = survey(theirs.checked(cards), _SECONDS)
        except UserError as error:
            lines.append(f"WARNING the tokens were not counted: {error}")
    if surveyed and not len(surveyed.lengths):
        lines, surveyed = ["WARNING no row can be learned, as titan-mi100 inspect shows"], None
    lines += [*theirs.sized(cards, surveyed), *(_about_refused(surveyed) if surveyed else ())]
    config = theirs.checked(cards)
    method = ("qlora" if config.lora.base == "nf4" else "lora") if config.lora.rank else "full"
    answers = UserChoices(theirs.model, config.data.path, cards, memory, method, is_here)
    change = theirs.change(config)
    change["checkpoint"].pop("fresh", None)  # the run folder is a new one, and the same command resumes
    if theirs.has_model:
        plan, (words, change) = _first_fitting(config, method, answers, change)
        lines += _about_memory(answers, plan, words)
        lines += [f"WARNING that is too much; {remedy(plan)}"] * (not plan.fits)
    else:
        lines.append("the memory is not predicted, as the model is not here; titan-mi100 plan does that")
    _write(options.output, answers, change, [*theirs.report(), *lines], theirs)


def _about_memory(answers: UserChoices, plan: Plan, changed: str) -> list[str]:
    peak = f"predicted peak: {plan.most / GIB:.1f} of {answers.memory:g} GiB on each card (docs/MEMORY.md)"
    return [f"changed so that it fits: {changed}"] * bool(changed) + [peak]


def _write(given: str | None, answers: UserChoices, change: Change, lines: Sequence[str], theirs: Any = None) -> None:
    """Write the config, with a run folder and an export; print what is to know of it, and the next commands."""
    output = Path(given or _free_name(f"{Path(answers.model).name}-{answers.method}".lower()))
    folder = os.path.abspath(change.get("job", {}).get("run_folder") or f"outputs/{output.stem}")
    if os.path.lexists(folder):
        problem = "exists already, so the run would resume there, or mix with what is in it"
        raise UserError(f"{folder}: {problem}; move it away, or name another file with --output")
    saved = {"initial_load_path": answers.model, "export_hf": True, **change.get("checkpoint", {})}
    change = {**change, "job": {**change.get("job", {}), "run_folder": folder}, "checkpoint": saved}
    origin = (f" from {as_key(theirs.path)}", theirs.sources) if theirs else ()
    write_output(output, [as_toml(answers, change, *origin)], "--output")
    print(f"{output}: {answers.method} fine-tuning of {answers.model} on {answers.gpus} x {answers.memory:g} GiB")
    if answers.is_here:
        print(f"no GPU is here: for {plural(answers.gpus, 'process')} on the CPU; for others: --gpus and --memory")
    commands = [*(theirs.fetch if theirs else ()), *_next_commands(output, answers)]
    print("\n".join([*lines, "", "next:", *(f"  {line}" for line in commands)]))


def _questions() -> dict[str, Question]:
    gpus = count_gpus()
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    memory = "32GB" if gpus else f"{host:.0f}GB"
    return {
        "model": Question("The model: its folder, or its name on the Hugging Face hub", "", _model),
        "data": Question("Training data: files, globs or names on the hub, separated by spaces", "", _data),
        "gpus": Question("Number of GPUs, or of processes on a CPU", str(gpus or 1), positive),
        "memory": Question("Memory of each", memory, size_gib),
        "method": Question("Train all weights: full; adapters: lora; on 4-bit weights: qlora", "full", _method),
    }


def _answer(name: str, question: Question, options: argparse.Namespace) -> Any:
    """From the option, else from the terminal, else the default. A wrong answer on a terminal is asked for again."""
    option = getattr(options, name)
    option = shlex.join(option) if isinstance(option, list) else option
    option = question.default if option is None and not sys.stdin.isatty() else option
    while True:
        try:
            default = f" [{question.default}]" if question.default else ""
            answer = input(f"{question.text}{default}: ") or question.default if option is None else option
            return question.read(answer)
        except EOFError:
            raise UserError("the input has ended; nothing was written") from None
        except (UserError, argparse.ArgumentTypeError) as error:
            if option is not None:
                raise UserError(f"--{name}: {error}") from None
            cli.say(error)


def _model(text: str) -> str:
    text = text.strip()
    path = os.path.abspath(os.path.expanduser(local_path(text))) if text else ""
    if not os.path.isdir(path):
        raise UserError(f"{text or 'no answer'}: is no folder; name a model's folder, or Qwen/Qwen3-0.6B of the hub")
    read_hf_config(path)
    if not has_tokenizer(path):
        raise UserError(f"{text}: has no tokenizer; download the whole folder again")
    if not any(Path(path).glob("*.safetensors")):
        raise UserError(f"{text}: has no *.safetensors; download the whole folder again")
    return text if hub_name(text) else path


def _data(text: str) -> tuple[str, ...]:
    try:
        named = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: {error}") from None
    paths = tuple(path if hub_name(path) else os.path.abspath(os.path.expanduser(path)) for path in named)
    problems = [problem for path in paths for problem in matching_files(local_path(path, TRAIN))[1]]
    if problems or not paths:
        raise UserError("; ".join(problems) or "name at least one file, such as train.jsonl")
    return paths


def _method(text: str) -> str:
    if (method := text.lower()) not in METHODS:
        raise UserError(f"{text!r} is none of {', '.join(METHODS)}")
    return method


def fitting_plan(answers: UserChoices) -> tuple[Plan, tuple[str, Change], str]:
    """The plan of the first settings that fit the cards; what they change, in words and as settings; lines on the data.

    Raises:
        UserError: the settings are refused, or none fits: the message says what the least takes, and what would fit.
    """
    arguments = ["--job.config_file", str(FOLDER / "finetune.toml"), "--checkpoint.initial_load_path", answers.model]
    if {"chosen", "rejected"} <= first_keys(local_path(answers.data[0], TRAIN)):
        arguments += ["--objective.name", "preference"]
    config = load_config([*arguments, "--data.path", *answers.data], answers.gpus)
    try:
        sized, about_data = sized_run(config.training, config.batch(answers.gpus), survey(config, _SECONDS))
    except UserError as error:
        sized, about_data = {}, f"WARNING the tokens were not counted, so the size of the run may not fit them: {error}"
    if (dtype := _dtype(answers.is_here)) != config.training.mixed_precision_param:
        sized = {**sized, "training": {**sized.get("training", {}), "mixed_precision_param": dtype}}
    config = with_settings(config, sized)
    plan, (words, change) = _first_fitting(config, answers.method, answers)
    if plan.fits:
        plan = plan if answers.is_here else with_larger_forwards(plan)
        rows = {**sized.get("training", {}), "local_batch_size": plan.workload.batch.local_batch_size}
        return plan, (words, {**sized, "training": rows, **change}), about_data
    others = []
    for method in METHODS:
        with suppress(UserError):  # the method's settings are not for this model
            others += [method] * _first_fitting(config, method, answers)[0].fits
    better = f"--method {others[0]} fits" if others else "use more cards, or a smaller model"
    raise UserError(
        f"{answers.method} fine-tuning of {answers.model} takes at least {plan.most / GIB:.1f} GiB on each of "
        f"{answers.gpus} card{'s' * (answers.gpus > 1)}, with {answers.memory:g} each; {better}"
    )


def with_larger_forwards(plan: Plan) -> Plan:
    """The plan with as many rows per forward as fit with a tenth of the memory left, up to those of a step: a card
    computes few rows in the time in which its host launches them. Rows per step, and so the results, stay.
    """
    batch = plan.workload.batch
    each = batch.global_batch_size // batch.dp_degree  # rows of a step on a card
    for rows in (rows for rows in range(each, batch.local_batch_size, -1) if each % rows == 0):
        larger = make_plan(plan.workload.changed({"training": {"local_batch_size": rows}}), plan.card)
        is_same_step = larger.workload.batch.global_batch_size == batch.global_batch_size
        if is_same_step and larger.most <= (1 - _SPARE) * plan.card:
            return larger
    return plan


def sized_run(training: TrainingConfig, batch: Batch, found: Survey) -> tuple[Change, str]:
    """Rows per step, epochs and a share for validation that suit the number of tokens; and lines that say so.

    Raises:
        UserError: there are no tokens.
    """
    if not (documents := len(found.lengths)):
        raise UserError("no row can be learned, as titan-mi100 inspect shows")
    held_out = {share: int((found.places < share).sum()) for share in (0.01, 0.05, 0.1, 0.2, 0.3, 0.0)}
    share = next((s for s, held in held_out.items() if documents > held >= (50 if s < 0.1 else 1)), 0.0)
    kept, sizes = found.lengths[found.places >= share], list[Size]()
    for seq_len in (training.seq_len >> halvings for halvings in range(5)):
        if not sizes or found.lengths.max() <= seq_len:
            rows = math.ceil((len(pack_rows(kept, seq_len).starts) - 1) / found.share)
            steps = range(batch.global_batch_size, 0, -batch.local_batch_size * batch.dp_degree)
            epochs = range(training.epochs, _MOST_EPOCHS + 1)
            sizes += [Size(seq_len, rows, times, step) for times in epochs for step in steps]
    # The first that is good is taken: long rows, few epochs, large steps.
    good = [size for size in sizes if size.steps >= _LEAST_STEPS and size.padding <= _MOST_PADDING]
    size = good[0] if good else max(sizes, key=lambda size: (min(size.steps, _LEAST_STEPS), -size.padding))
    tokens = size.step * size.seq_len
    change: Change = {"training": {"seq_len": size.seq_len, "target_tokens_per_step": tokens, "epochs": size.epochs}}
    if share:
        change |= {"data": {"validation_fraction": share}, "validation": {"freq": -(-size.steps // 5)}}
    read = "" if found.share == 1 else f" in the first {found.share:.1%} of the data, read for {_SECONDS:.0f} seconds"
    lines = [
        f"counted: {plural(documents, 'document')} of {int(found.lengths.sum()):,} tokens{read}",
        f"chosen for them: {plural(size.step, 'row')} of {size.seq_len:,} tokens in a step, "
        f"{plural(size.epochs, 'epoch')}: {plural(size.steps, 'step')}, {size.padding:.0%} padding; "
        f"{held_out[share]:,} of the documents for validation (share {share:.0%})",
    ]
    lines += _about_refused(found)
    if end := found.own_end:
        lines.append(f"a base model: its eos_token ends no turn, {end} does, which such a model has hardly trained")
        lines.append("with few rows or LoRA start from the chat model (docs/HF.md, Base models)")
    return change, "\n".join(lines)


def _about_refused(found: Survey) -> list[str]:
    how = "titan-mi100 inspect names them; correct them, or leave them out with --data.on_bad_row skip"
    return [f"WARNING refused: {plural(found.refused, 'row')}; {how}"] * (found.refused > 0)


def _first_fitting(
    config: Config, method: str, answers: UserChoices, given: Change | None = None
) -> tuple[Plan, tuple[str, Change]]:
    """The first change of the method that fits; if none does, the one that takes least.

    Args:
        given: settings that stay as they are.

    Raises:
        UserError: each is refused.
    """
    plans, refused = [], list[Problem]()
    for words, change in METHODS[method]:
        if given:  # which has the adapters' settings, too
            rest = {
                name: settings.items() - ON_CARDS["LoRA"].get(name, {}).items() for name, settings in change.items()
            }
            change = {name: {**dict(rest.get(name, ())), **given.get(name, {})} for name in {**given, **rest}}
        elif config.objective.answers:
            change = _of_pairs(config.optimizer.lr, change)
        changed = with_settings(config, change)
        refused = check(changed, answers.gpus, with_files=False)
        if not refused:
            plans.append((make_plan(Workload.of(changed, answers.gpus), round(answers.memory * GIB)), (words, change)))
            if plans[-1][0].fits:
                return plans[-1]
    if not plans:
        raise UserError("\n".join([f"--method {method} is not for {answers.model}:", *map(str, refused)]))
    return min(plans, key=lambda candidate: candidate[0].most)


def _of_pairs(usual: float, change: Change) -> Change:
    """The same for pairs of answers: a twentieth of the learning rate, and no dropout, which disturbs their sums."""
    optimizer = change.get("optimizer", {})
    lr = {"lr": float(f"{optimizer.get('lr', usual) / 20:.2g}")}
    lora = {"lora": {**change["lora"], "dropout": 0.0}} if "lora" in change else {}
    return {"objective": {"name": "preference"}, **change, **lora, "optimizer": {**optimizer, **lr}}


def as_toml(
    answers: UserChoices, change: Change, origin: str = "", sources: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Args: origin: the file of another trainer. sources: "section.key" of ours -> its key there."""
    data_table = {"path": answers.data, **change.get("data", {})}
    settings: Change = {**change, "data": data_table}
    lines = [
        f"# {answers.method} fine-tuning on {answers.gpus} x {answers.memory:g} GiB; titan-mi100 config new{origin}",
        "# Every setting: titan-mi100 train --help. What is not here is as in the bundled finetune.toml.",
        'base = "finetune.toml"',
    ]
    for section, table in settings.items():
        lines += ["", f"[{section}]"]
        for key, setting in table.items():
            source = sources.get(f"{section}.{key}")
            lines.append(f"{key} = {toml_value(setting)}{f'  # {as_key(source)}' if source else ''}")
    return "\n".join(lines) + "\n"


def _free_name(stem: str) -> str:
    """A name for a file that is not there yet."""
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 10_000))
    return next(f"{n}.toml" for n in names if not any(map(os.path.lexists, (f"{n}.toml", f"outputs/{n}"))))


def _next_commands(output: Path, answers: UserChoices) -> list[str]:
    option, config, gpus = "--job.config_file", str(output), str(answers.gpus)
    return [
        command("inspect", option, config, "--html", "data.html"),
        command("plan", option, config, "--gpus", gpus, "--memory", f"{answers.memory:g}GB"),
        command("train", option, config, "--nproc_per_node", gpus),
    ]
