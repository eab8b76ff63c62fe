"""What is installed, and what the doctor says."""

import subprocess
import sys
from typing import Any

from titan_mi100.cli import version_of
from titan_mi100.config.kernels import KERNELS, OWN
from titan_mi100.device.compiler import cannot_compile
from titan_mi100.parallel.distributed import data_sheet, init_distributed

_NEEDED = ("torch", "torchdata", "numpy", "tokenizers", "tiktoken", "safetensors", "jinja2", "tqdm")
_OF_CHECKS = ("transformers", "tensorboard", "sentencepiece")


def packages() -> dict[str, Any]:
    """Versions, whether Triton can build kernels, and the card's data sheet."""
    triton = next(filter(None, map(version_of, KERNELS[OWN].packages)), "")
    versions = {name: version_of(name) for name in (*_NEEDED, *_OF_CHECKS)} | {"triton": triton}
    missing = [name for name in _NEEDED if not versions[name]]
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += filter(None, [cannot_compile()[0]])
    sheet = data_sheet(init_distributed().device)
    words = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    return {"versions": versions, "problem": "; ".join(problems),
            "said": f"{words}; data sheet: {sheet.name if sheet else 'not known'}"}  # fmt: skip


def doctor() -> dict[str, Any]:
    """The doctor's lines. A failed check is one of this part, too."""
    command = [sys.executable, "-m", "titan_mi100.tools.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return {"lines": lines, "problem": f"exit code {done.returncode}" if done.returncode else "", "said": ""}
