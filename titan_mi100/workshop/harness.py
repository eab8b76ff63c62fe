"""Evaluate a model with lm_eval, the lm-evaluation-harness. From any folder:

  titan-mi100 evaluate harness CKPT TASKS [lm_eval arguments]

or from the checkout, which finds or makes the environment: scripts/evaluate.sh CKPT TASKS [lm_eval arguments]

CKPT   an HF folder, or an input of `convert dcp-to-hf`, such as RUN/checkpoint/step-500. The
       latter is exported to CKPT-hf first. The export is kept: the next evaluation, vLLM and
       transformers can read it.
TASKS  names of lm_eval's tasks, separated by commas; or a YAML file or folder with tasks of your
       own. These are read without network, and paths of data files in them are relative to their
       folder.

All other arguments go to lm_eval: --limit 100, --batch_size 16, --apply_chat_template for a chat model, --model_args
dtype=float32. The results are written to CKPT-eval, or to --output_path.
Exit codes: 0 done; 1 the export or lm_eval failed; 2 the arguments or the checkpoint are wrong.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from titan_mi100 import cli
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object
from titan_mi100.text.assets import PromptSettings, prompt_settings, read_assets

_CHAT, _SYSTEM = "--apply_chat_template", "--system_instruction"  # options of lm_eval
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # for local tasks, whose data are local as well


def main(argv: Sequence[str] | None = None) -> int:
    return cli.exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(cli.reflowed(__doc__) + cli.example_of("titan-mi100 evaluate harness"), end="")
        return 0
    options, rest = parser().parse_known_args(arguments)
    if len(rest) < 2 or any(argument.startswith("-") for argument in rest[:2]):
        raise UserError("name a checkpoint and tasks; see --help")
    checkpoint, tasks, *rest = Path(os.path.abspath(rest[0])), *rest[1:]
    if "," in str(checkpoint):
        raise UserError(f"{checkpoint}: lm_eval cannot use a path with a comma; rename it, or make a link to it")
    # Absolute paths, because lm_eval runs in the folder of the tasks.
    results, folder = Path(os.path.abspath(options.output_path or f"{checkpoint}-eval")), None
    if tasks.endswith(".yaml") or any(Path(tasks).glob("*.yaml")):
        if not os.path.exists(tasks):
            raise UserError(f"{tasks}: no such file")
        tasks = os.path.abspath(tasks)
        folder = tasks if os.path.isdir(tasks) else os.path.dirname(tasks)
        rest = ["--include_path", folder, *rest]
    if not getattr(find_spec("lm_eval"), "origin", None):
        raise UserError("lm_eval is not installed; pip install 'lm-eval[hf]'")
    model = _hf_folder(checkpoint)
    trained = prompt_settings(read_assets(model), model)
    model_args = ",".join([f"pretrained={model}", *options.model_args])
    rest += _system_as_trained(trained, rest)
    command = ["--model", "hf", "--model_args", model_args, "--tasks", tasks, "--output_path", str(results), *rest]
    return _evaluate(command, results, folder)


def parser() -> argparse.ArgumentParser:
    """Of lm_eval's options those that we extend."""
    known = cli.Parser(prog="titan-mi100 evaluate harness", add_help=False)
    known.add_argument("-o", "--output_path", default="")
    known.add_argument("-a", "--model_args", nargs="*", action="extend", default=[])  # separated by commas or spaces
    return known


def _hf_folder(checkpoint: Path) -> Path:
    """The checkpoint itself if it is an HF folder, otherwise its export CKPT-hf, made if needed.

    Exits if the export fails.
    """
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
            raise UserError(f"{export}: is older than {checkpoint}; remove it, and it is exported again")
        _say(f"using the export {export}")
        return export
    # In a process of its own, so that its memory is free again when lm_eval loads the model.
    paths = "--input_dir", str(checkpoint), "--output_dir", str(export)
    command = [sys.executable, "-m", "titan_mi100", "convert", "dcp-to-hf", *paths]
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(2 if code == 2 else 1)
    return export


def _system_as_trained(trained: PromptSettings, rest: Sequence[str]) -> list[str]:
    """lm_eval's option for the system message of training, unless the arguments hold one."""
    prompt = trained.system_prompt
    if _CHAT not in rest or not prompt or any(argument.startswith(_SYSTEM) for argument in rest):
        return []
    _say(f"system message {prompt!r}, as the model was trained (titan_mi100.json); {_SYSTEM} TEXT overrides")
    return [_SYSTEM, prompt]


def _evaluate(arguments: Sequence[str], results: Path, folder: str | None) -> int:
    """Run lm_eval. Args: folder: of local tasks, in which lm_eval runs. None: no local tasks."""
    # Safe path: lm_eval must not import Python files that lie in the folder of the tasks.
    own = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", **(_OFFLINE if folder else {})}
    results.mkdir(parents=True, exist_ok=True)  # before the hours, not after them
    code = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments], cwd=folder, env={**os.environ, **own}
    ).returncode
    _say(f"lm_eval failed with exit code {code}; its last lines say why" if code else f"results: {results}")
    return code if code in (0, 2) else 1


def _say(words: str) -> None:
    print(f"evaluate: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
