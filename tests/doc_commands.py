"""Commands as the pages show them: what they start, and whether its own parser takes their arguments.

Nothing is started: a command's `main` runs in this process up to the end of its parser.
"""

import argparse
import importlib
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doc_pages import Command

from titan_mi100 import __main__ as console
from titan_mi100.config.load import load_config
from titan_mi100.errors import UserError
from titan_mi100.launch import launcher as launch
from titan_mi100.workshop import harness
from titan_mi100.workshop.sweep import command as sweep

# programs that are not ours: only for commands that are not run
OTHERS = {
    "pip", "hf", "git", "wandb", "tensorboard", "vllm", "docker", "curl", "tar", "rocm-smi", "amd-smi", "nvidia-smi",
    "sudo", "apt", "sbatch", "squeue", "scancel", "scontrol", "salloc", "ssh", "export", "read", "exec", "source", ".",
    "kill", "wait", "module", "ulimit", "bash",
}  # fmt: skip
SHELL = {"cat", "cp", "echo", "head", "ls", "mkdir", "mv", "rm", "sha256sum", "tail"}  # these are run
_LAUNCHERS = {"torchrun", "srun", "env", "exec", "timeout", "nohup"}  # in front of one of ours
_WHOLE = ("train", "data.prepare", "config.load")  # modules whose arguments are settings and nothing else


class Program(NamedTuple):
    """What a command starts.

    Attributes:
        kind: launch, module or script of ours; "" for a program that is not ours.
        name: of the module below titan_mi100, or the script's path.
    """

    kind: str
    name: str
    arguments: list[str]


class _Parsed(BaseException):
    """Raised where a parser has done its work, to end the command there."""

    def __init__(self, options: argparse.Namespace, rest: list[str]) -> None:
        self.options, self.rest = options, rest


def program_of(words: list[str]) -> Program:
    """Raises ValueError: a module or script that does not exist."""
    words = list(words)
    while words[0] in _LAUNCHERS and (place := _ours(words[1:])) is not None:
        words = words[1 + place :]
        words = ["python", *words] if words[0] == "-m" else words
    program, arguments = words[0].removeprefix("./"), words[1:]
    if program == "titan-mi100":
        return Program("launch", "", arguments[1:]) if arguments[:1] == ["train"] else _word(arguments)
    if program in ("python", "python3"):
        if arguments[:1] == ["-m"] and arguments[1] in ("titan_mi100", "titan_mi100.launch.launcher"):
            return program_of(["titan-mi100", *(["train"] if "." in arguments[1] else []), *arguments[2:]])
        if arguments[:1] == ["-m"] and arguments[1].startswith("titan_mi100."):
            return Program("module", arguments[1].removeprefix("titan_mi100."), arguments[2:])
        if arguments[:1] and arguments[0].endswith(".py"):
            return Program("script", arguments[0], arguments[1:])
    if program == "run_train.sh":
        return Program("launch", "", arguments)
    if program == "scripts/evaluate.sh":
        return Program("module", "workshop.harness", arguments)
    if program.startswith("scripts/"):
        return Program("script", program, arguments)
    return Program("", program, arguments)


def _ours(words: list[str]) -> int | None:
    """Where one of our programs begins, behind a launcher's own options."""
    for place, word in enumerate(words):
        is_module = word == "-m" and words[place + 1 : place + 2] and words[place + 1].startswith("titan_mi100")
        if is_module or word in ("python", "python3", "titan-mi100") or word.endswith("run_train.sh"):
            return place
    return None


def _word(arguments: list[str]) -> Program:
    """What a word of `titan-mi100` starts: found by its table, as the command itself does."""
    for count in (2, 1):
        if (name := " ".join(arguments[:count])) in console.COMMANDS and len(arguments) >= count:
            return Program("module", console.COMMANDS[name][0], arguments[count:])
    return Program("module", "__main__", arguments)  # --help, --version; else it says what is wrong


def check(command: Command, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with a command; "" if nothing is. In a folder that holds the names which the pages use."""
    words = [re.sub(r"\$\{?\w+(?::-[^}]*)?\}?", "1", word) for word in command.words]
    if command.is_marked:  # an ellipsis stands for more of them
        words = [word for word in words if word not in ("...", "…")]
    if not words:
        return ""
    program = program_of(words)
    if not program.kind:
        known = SHELL | (OTHERS if command.is_marked else set())
        return "" if program.name in known else f"{program.name} is no program of ours, and not marked as not run"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _check(program, patch, capsys)
    except UserError as error:
        return str(error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check(program: Program, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = program.arguments
    if program.kind == "launch" and not {"--help", "-h"} & set(arguments):
        if not any(argument.partition("=")[0] == "--rehearse" for argument in arguments):
            processes, settings, _ = launch.parse(arguments)
            is_given = any(argument.startswith(("--nproc_per_node", "--nproc-per-node")) for argument in arguments)
            load_config(settings, processes if is_given else None, with_files=False)
            return ""
        program = Program("module", "workshop.rehearse", arguments)
    if program.kind == "launch":
        return ""
    if program.name in _WHOLE:
        load_config(arguments, None, with_files=False)
        return ""
    if program.name == "workshop.harness" and not {"--help", "-h"} & set(arguments):
        harness.parser().parse_known_args(arguments[2:])  # what is left is lm_eval's
        is_wrong = len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-")
        return "names no checkpoint and tasks" if is_wrong else ""
    if program.name.endswith(".sh"):
        script = Path(program.name)
        return "" if script.is_file() else f"{script} does not exist"
    return _check_parser(program, patch, capsys)


def _check_parser(program: Program, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    parse, name = argparse.ArgumentParser.parse_known_args, program.name

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        raise _Parsed(*parse(self, args, namespace))

    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        options, rest = parse(self, args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        raise _Parsed(options, [])

    capsys.readouterr()
    with patch.context() as context:
        context.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        context.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        context.setattr(sys, "argv", [name, *program.arguments])
        code: Any = 0
        try:
            if program.kind == "script":
                runpy.run_path(name, run_name="__main__")
            else:
                module, _, function = name.partition(":")
                code = getattr(importlib.import_module(f"titan_mi100.{module}"), function or "main")()
        except _Parsed as found:
            _check_settings(name, found)
        except SystemExit as ended:
            code = ended.code
        except (ImportError, OSError) as error:
            return f"cannot be started: {error}"
    return f"ends with {code}: {capsys.readouterr().err.strip()}" if code else ""


def _check_settings(module: str, found: _Parsed) -> None:
    """What a command passes on to the config loader."""
    ranks = {"tools.plan": "gpus", "workshop.rehearse": "rehearse"}.get(module)
    world = getattr(found.options, ranks) if ranks and not getattr(found.options, "search", False) else None
    if module in ("tools.plan", "workshop.rehearse", "tools.inspect_data"):
        load_config(found.rest, world, with_files=False)
    if module == "workshop.sweep.command":
        sweep.asked_rows(found.options, found.rest)
