"""How torch was built and which cards it can use.

`installed` reads torch's files, which takes a millisecond. `ask` imports torch in a process of its own: importing takes
seconds, and the first call of the GPU driver may hang or crash.
"""

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan_mi100.files import isolated
from titan_mi100.files.schema import validated
from titan_mi100.wording import shortened

PATIENCE = 120.0  # seconds; importing torch from a slow network file system takes half of that
_MARK = "titan_mi100 torch: "  # begins the answer's line; libraries print to standard output too


@dataclass(frozen=True)
class Torch:
    """A build of torch. None: not known, or torch was not asked."""

    version: str = ""  # "": not installed
    hip: str | None = None  # the ROCm version it was built for, as torch.version.hip; None: not built for ROCm
    cuda: str | None = None  # the CUDA version it was built for; None: not built for CUDA
    archs: tuple[str, ...] | None = None  # architectures its kernels were compiled for: gfx908, sm_90
    blas_archs: tuple[str, ...] | None = None  # architectures that the rocBLAS in its folder has kernels for
    usable: int | None = None  # number of cards that it can use
    problem: str = ""  # why torch could not be asked


def installed(wants_blas: bool, environ: Mapping[str, str]) -> Torch:
    """Read torch's files, without importing it.

    Args:
        wants_blas: also list rocBLAS's files (a thousand or more) to find its architectures.
        environ: if it has ROCBLAS_TENSILE_LIBPATH, rocBLAS reads other files, so these are not listed.
    """
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            folder = Path(spec.origin).parent
            asks = wants_blas and "ROCBLAS_TENSILE_LIBPATH" not in environ
            return from_files(folder, folder / "lib/rocblas/library" if asks else None)
    return Torch()


def from_files(folder: Path, blas: Path | None) -> Torch:
    """Read version.py in torch's folder, and the architectures in the names of rocBLAS's files.

    Args:
        folder: torch's package folder.
        blas: the folder of rocBLAS's libraries, one per architecture; None: do not look.
    """
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Torch(problem=f"{folder / 'version.py'} cannot be read")
    versions = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    archs: set[str] = set()
    if blas is not None:
        with suppress(OSError):  # AMD's own wheels have this folder elsewhere
            archs = {arch for name in os.listdir(blas) for arch in re.findall(r"gfx[0-9a-f]{3,4}", name)}
    return Torch(
        version=versions.get("__version__", "unknown"),
        hip=versions.get("hip") or None,
        cuda=versions.get("cuda") or None,
        blas_archs=tuple(sorted(archs)) if archs else None,
    )


def ask(known: Torch, environ: Mapping[str, str], patience: float = PATIENCE) -> Torch:
    """Import torch in a child process and ask it about its build and the cards. The child may crash or hang.

    Args:
        known: the result of `installed`.
        environ: environment of the child process.
        patience: seconds to wait for the answer.

    Returns:
        The answer together with `known`'s rocBLAS architectures; or `known` with `problem` set.
    """
    child, options = isolated.command("launch.torch_build:main"), {"capture_output": True, "check": False}
    try:
        done = subprocess.run(child, env=dict(environ), stdin=subprocess.DEVNULL, timeout=patience, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return replace(known, problem=f"did not answer within {patience:.0f} seconds; the GPU driver may hang")
    except OSError as error:
        return replace(known, problem=f"could not be started: {error.strerror}")
    lines = done.stdout.decode(errors="replace").splitlines()
    answer = next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), "")
    try:
        build: Torch = validated(json.loads(answer), Torch)
    except ValueError:
        return replace(known, problem=_last_words(done))
    return replace(build, blas_archs=known.blas_archs)


def _last_words(done: "subprocess.CompletedProcess[bytes]") -> str:
    if done.returncode < 0:
        return f"was killed by {isolated.ended(done.returncode)} while it counted its cards"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return shortened(lines[-1], 300) if lines else f"ended with {isolated.ended(done.returncode)}"


def _answer() -> Torch:
    """The child's part."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # get_arch_list() is empty if no card is usable
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = ""
    if usable == 0 and (torch.version.cuda or torch.version.hip):
        try:  # device_count() hides the reason; init() raises it
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            problem = shortened(" ".join(str(error).split()), 300)
    archs = tuple(flags.split()) if flags else None
    return Torch(torch.__version__, torch.version.hip, torch.version.cuda, archs, usable=usable, problem=problem)


def main() -> None:
    print(_MARK + json.dumps(asdict(_answer())))
