"""Evaluate a model with lm_eval, the lm-evaluation-harness. From any folder:

  titan-mi100 evaluate harness CKPT TASKS [lm_eval arguments]

or from the checkout, where it finds or makes the environment: scripts/evaluate.sh CKPT TASKS [lm_eval arguments]

CKPT   an HF folder, or what `convert dcp-to-hf` takes, such as RUN/checkpoint/step-500. That is exported to CKPT-hf
       first, which is kept: the next evaluation, vLLM and transformers read the same folder.
TASKS  what lm_eval --tasks takes: names with commas between; or a file or a folder of YAML tasks of your own, which
       are read without network, and in which paths of data files count from their folder.

All else goes to lm_eval: --limit 100, --batch_size 16, --apply_chat_template for a chat model, --model_args
dtype=float32. Results and lm_eval's log are kept in CKPT-eval, or in --output_path.
Exit codes: 0 done; 1 the export or lm_eval failed; 2 the arguments or the checkpoint are wrong.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from titan_mi100 import cli
from titan_mi100.config.assets import prompt_settings, read_assets
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object

_CHAT, _SYSTEM = "--apply_chat_template", "--system_instruction"  # options of lm_eval
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class _Split(NamedTuple):
    """What comes behind CKPT and TASKS."""

    results: str  # --output_path
    model_args: list[str]
    rest: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    return cli.exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(cli.reflowed(__doc__), end="")
        return 0
    if "--version" in arguments:
        print(cli.versions())
        return 0
    if len(arguments) < 2 or any(argument.startswith("-") for argument in arguments[:2]):
        raise UserError("name a checkpoint and tasks; --help says how")
    checkpoint, tasks = Path(os.path.abspath(arguments[0])), arguments[1]
    if "," in str(checkpoint):
        raise UserError(f"{checkpoint}: lm_eval takes no path with a comma; rename it, or link to it")
    given = _split(arguments[2:], f"{checkpoint}-eval")
    results, rest, folder = Path(os.path.abspath(given.results)), given.rest, None
    if tasks.endswith(".yaml") or any(Path(tasks).glob("*.yaml")):
        if not os.path.exists(tasks):
            raise UserError(f"{tasks}: no such file")
        tasks = os.path.abspath(tasks)
        folder = tasks if os.path.isdir(tasks) else os.path.dirname(tasks)
        rest = ["--include_path", folder, *rest]
    if not getattr(find_spec("lm_eval"), "origin", None):
        raise UserError("lm_eval is not installed; pip install 'titan_mi100[eval]'")
    model = _hf_folder(checkpoint)
    model_args = ",".join([f"pretrained={model}", *given.model_args, *_as_trained(model, given)])
    rest += _system_as_trained(model, rest)
    command = ["--model", "hf", "--model_args", model_args, "--tasks", tasks, "--output_path", str(results), *rest]
    return _evaluate(command, results, folder)


def _split(arguments: Sequence[str], results: str) -> _Split:
    """Args: results: where the arguments name no folder for them."""
    rest, left, model_args = list[str](), list(arguments), list[str]()
    while left:
        argument = left.pop(0)
        name, has_value, value = argument.partition("=")
        if name in ("-o", "--output_path"):
            if not has_value and not left:
                raise UserError(f"{name} needs a folder")
            results = value if has_value else left.pop(0)
        elif name == "--model_args" and has_value:
            model_args.append(value)
        elif argument in ("-a", "--model_args"):
            while left and not left[0].startswith("-"):  # lm_eval takes commas and blanks between them
                model_args.append(left.pop(0))
        else:
            rest.append(argument)
    return _Split(results, model_args, rest)


def _hf_folder(checkpoint: Path) -> Path:
    """The HF folder of the checkpoint; made if it is not there. Exits if the export fails."""
    is_dcp = (checkpoint / ".metadata").exists()
    if not is_dcp and (checkpoint / "config.json").exists() and any(checkpoint.glob("model*.safetensors*")):
        return checkpoint
    manifest = checkpoint / "manifest.json"
    is_lora = manifest.exists() and "lora" in read_object(manifest, "name another checkpoint")
    if is_lora or (checkpoint / "adapter_config.json").exists():
        raise UserError(f"{checkpoint}: is a LoRA adapter; merge it first: titan-mi100 convert merge-lora --help")
    made_of = checkpoint / ".metadata" if checkpoint.is_dir() else checkpoint
    export = Path(f"{checkpoint}-hf")
    made = export / "config.json"
    if made.exists():
        if made_of.exists() and made_of.stat().st_mtime_ns > made.stat().st_mtime_ns:
            raise UserError(f"{export} is older than {checkpoint}; remove it")
        _say(f"using the export {export}")
        return export
    # a process of its own: what the export held in memory is the model's then
    paths = "--input_dir", str(checkpoint), "--output_dir", str(export)
    command = [sys.executable, "-m", "titan_mi100.convert.dcp_to_hf", *paths]
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(2 if code == 2 else 1)
    return export


def _as_trained(model: Path, given: _Split) -> list[str]:
    """The prompts that the model was trained with, unless the arguments say otherwise."""
    if _CHAT not in given.rest or any("enable_thinking" in argument for argument in given.model_args):
        return []
    thinking = prompt_settings(read_assets(model), model).enable_thinking
    if thinking is None:
        return []
    _say(
        f"enable_thinking = {str(thinking).lower()}, as the model was trained (titan_mi100.json); "
        "--model_args enable_thinking=... overrides"
    )
    return [f"enable_thinking={thinking}"]


def _system_as_trained(model: Path, rest: Sequence[str]) -> list[str]:
    """lm_eval's option for the system message of training, unless the arguments hold one."""
    prompt = prompt_settings(read_assets(model), model).system_prompt
    if _CHAT not in rest or not prompt or any(argument.startswith(_SYSTEM) for argument in rest):
        return []
    _say(f"system message {prompt!r}, as the model was trained (titan_mi100.json); {_SYSTEM} TEXT overrides")
    return [_SYSTEM, prompt]


def _evaluate(arguments: Sequence[str], results: Path, folder: str | None) -> int:
    """Run lm_eval; what it prints is shown and kept. Args: folder: of local tasks."""
    # only the installed lm_eval is meant, whatever lies in the folder of the tasks
    own = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", **(_OFFLINE if folder else {})}
    results.mkdir(parents=True, exist_ok=True)
    log = results / "lm_eval.log"
    said = bytearray()
    with (
        log.open("wb") as kept,
        subprocess.Popen(
            [sys.executable, "-m", "lm_eval", *arguments], cwd=folder, env={**os.environ, **own},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        while piece := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # as it comes: there is a bar
            for target in (kept, sys.stdout.buffer):
                target.write(piece)
                target.flush()
            said += piece
    if process.returncode == 0:
        _say(f"results: {results}")
        return 0
    if missing := re.findall(rb"Tasks not found.*", said):
        words = missing[-1].decode(errors="replace")  # the first may be a line of the traceback
        raise UserError(f"{words}; python -m lm_eval ls tasks lists them")
    cli.say(f"lm_eval failed with exit code {process.returncode}; all it said: {log}")
    return 2 if process.returncode == 2 else 1


def _say(words: str) -> None:
    print(f"evaluate: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
