"""Builds the library of the pretended device, once for each source, compiler, Python and torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")


def why_not() -> str:
    """Why it cannot be built here; "": it can."""
    if not shutil.which("g++"):
        return "no g++ in PATH"
    return "" if Path(sysconfig.get_paths()["include"], "Python.h").is_file() else "Python.h is missing"


def library() -> Path:
    """Where the library is, or will be: a place for each source, compiler, Python and torch."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    what = [compiler, sys.version, version("torch"), *FLAGS, *(path.read_text() for path in sources)]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"titan-simgpu-{os.getuid()}", key)
    return folder / f"_simgpu{sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> Path:
    """The folder with the library; other processes wait while one builds it.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    file = library()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (file.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _compile(file)
    return file.parent


def _compile(file: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    names = ("c10", "torch_cpu", "torch", "torch_python")
    linked = [f"-L{root / 'lib'}", *(f"-l{name}" for name in names), f"-Wl,-rpath,{root / 'lib'}"]
    # torch 2.8: types of another compiler are unknown to pybind11 otherwise
    found = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    same = [f'-DPYBIND11_{name}="{value}"' for name, value in found.items() if value is not None]
    aside = file.with_suffix(".tmp")
    inputs = [*(f"-I{path}" for path in include), str(HERE / "module.cpp")]
    subprocess.run(["g++", *FLAGS, *same, *inputs, "-o", str(aside), *linked], check=True)
    aside.rename(file)


if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would find this folder
    sys.exit(why_not() or print(build()))
