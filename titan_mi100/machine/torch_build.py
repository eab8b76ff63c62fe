"""How torch was built: from its files, which takes a millisecond; or asked, in a process of its own.

Importing torch takes seconds, and the first call of the driver may hang or crash.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_mi100.files.schema import checked
from titan_mi100.wording import shortened

PATIENCE = 120.0  # seconds; torch on a slow network file system needs half of that
_MARK = "titan_mi100 torch: "  # libraries print to standard output too


@dataclass(frozen=True)
class Torch:
    """A build of torch. None: not known, or not asked."""

    version: str = ""  # "": not installed
    hip: str | None = None  # ROCm's version that it was built for, as torch.version has it; None: not for ROCm
    cuda: str | None = None
    archs: tuple[str, ...] | None = None  # that its kernels were compiled for: gfx908, sm_90, compute_90
    blas_archs: tuple[str, ...] | None = None  # that the rocBLAS in its folder has kernels for
    usable: int | None = None  # cards that it can use
    card_archs: tuple[str, ...] | None = None  # of those cards: gfx908, sm_90
    problem: str = ""  # why asking it failed


def installed(wants_blas: bool, environ: Mapping[str, str]) -> Torch:
    """What torch's files say, without importing it.

    Args:
        wants_blas: also list the files of rocBLAS, a thousand or more.
    """
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            folder = Path(spec.origin).parent
            asks = wants_blas and "ROCBLAS_TENSILE_LIBPATH" not in environ
            return from_files(folder, folder / "lib/rocblas/library" if asks else None)
    return Torch()


def from_files(folder: Path, blas: Path | None) -> Torch:
    """What version.py in torch's folder says, and the names of rocBLAS's files: one library per architecture."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Torch(problem=f"{folder / 'version.py'} cannot be read")
    values = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    archs: set[str] = set()
    if blas is not None:
        with suppress(OSError):  # AMD's own wheels have it elsewhere
            archs = {found for name in os.listdir(blas) for found in re.findall(r"gfx[0-9a-f]{3,4}", name)}
    return Torch(
        version=values.get("__version__", "unknown"),
        hip=values.get("hip") or None,
        cuda=values.get("cuda") or None,
        blas_archs=tuple(sorted(archs)) if archs else None,
    )


def ask(known: Torch, environ: Mapping[str, str], patience: float = PATIENCE) -> Torch:
    """What torch itself says, with what its files said. It uses the driver, in a process that may crash or hang.

    Args:
        environ: of that process.
        patience: seconds to wait.
    """
    command = [sys.executable, "-m", "titan_mi100.machine.torch_build"]
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return replace(known, problem=f"did not answer in {patience:.0f} seconds: the GPU driver may hang")
    except OSError as error:
        return replace(known, problem=f"could not be started: {error.strerror}")
    lines = done.stdout.decode(errors="replace").splitlines()
    answer = next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), "")
    try:
        found: Torch = checked(json.loads(answer), Torch)
    except ValueError:
        return replace(known, problem=_last_words(done))
    return replace(found, blas_archs=known.blas_archs)


def _last_words(done: "subprocess.CompletedProcess[bytes]") -> str:
    if done.returncode < 0:
        return f"was killed by {signal.Signals(-done.returncode).name} when it was asked for its cards"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return shortened(lines[-1], 300) if lines else f"ended with code {done.returncode}"


def _answer() -> Torch:
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # get_arch_list() is empty where no card is usable
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem, archs = "", list[str]()
    if usable == 0 and (torch.version.cuda or torch.version.hip):
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            problem = shortened(" ".join(str(error).split()), 300)
    for number in range(usable):
        properties = torch.cuda.get_device_properties(number)
        # without the features: gfx908:sramecc+:xnack-. In a CUDA build gcnArchName is the card's name
        arch = properties.gcnArchName.partition(":")[0] if torch.version.hip else ""
        archs.append(arch or f"sm_{properties.major}{properties.minor}")
    return Torch(
        torch.__version__, torch.version.hip, torch.version.cuda, tuple(flags.split()) if flags else None,
        usable=usable, card_archs=tuple(archs), problem=problem,
    )  # fmt: skip


if __name__ == "__main__":
    print(_MARK + json.dumps(asdict(_answer())))
