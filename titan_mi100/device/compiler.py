"""What Triton builds kernels for, and whether it can on this machine."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping

import torch

from titan_mi100.device import accelerator


def cannot_compile(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Why Triton cannot build its kernels, and the remedy; two empty texts if it can.

    At a kernel's first launch Triton compiles a C file that includes Python.h, by the compiler that CC names, else by
    gcc or clang (triton/runtime/build.py).
    """
    compilers, missing, packages = ([environ["CC"]] if "CC" in environ else ["gcc", "clang"]), [], []
    if not any(shutil.which(name, path=environ.get("PATH")) for name in compilers):
        missing.append(f"CC={environ['CC']} is no program" if "CC" in environ else "no gcc or clang in PATH")
        packages += [] if "CC" in environ else ["gcc"]
    remedies = ["unset CC"] if missing and "CC" in environ else []
    scheme = sysconfig.get_default_scheme()  # Debian's own scheme posix_local names a folder without the headers
    header = f"{sysconfig.get_path('include', 'posix_prefix' if scheme == 'posix_local' else scheme)}/Python.h"
    if not os.path.exists(header):
        missing.append(f"{header} is missing")
        packages.append("python{}.{}-dev".format(*sys.version_info))
    remedies += [f"sudo apt install {' '.join(packages)}"] if packages else []
    return "; ".join(missing), "; ".join(remedies)


def architecture(device: torch.device) -> str:
    """The architecture of a GPU that kernels are compiled for: gfx908, sm90 ..."""
    card = accelerator.properties(device)
    name = card.gcnArchName if accelerator.is_rocm() else ""  # in a CUDA build of torch it is the card's name
    return name or f"sm{card.major}{card.minor}"
