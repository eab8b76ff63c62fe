"""Parts of a certificate and rows of a sweep that go wrong, for tests: each runs in a child process."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from titan_mi100.config.toml_file import read_toml


def wrong_kernel(shape: dict[str, Any], fault: str) -> dict[str, Any]:
    """What gpu_check.backends.measure returns for a backend that is wrong as `fault` says."""
    import torch
    from gpu_check.backends import judged
    from torch import Tensor

    from titan_mi100.attention.base import Documents, Shape
    from titan_mi100.attention.torch_backends import Sdpa

    class Wrong(Sdpa):
        def prepare(self, documents: Documents, device: torch.device) -> Documents:
            if fault == "knows no documents":
                return Documents.one_per_row(documents.batch, documents.seq)
            return documents

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Documents) -> Tensor:
            if fault == "wrong gradient":
                k = k * 0.9 + k.detach() * 0.1
            if fault == "not a number":
                q = q / 0
            if fault == "leaks a little":  # too little to be found by the comparison with fp64
                v = v + 1e-7 * v.mean(dim=1, keepdim=True)
            return super().__call__(q, k, v, prepared)

    return {"backend": "wrong", "launch": "", **judged(Wrong(), Shape(**shape), torch.device("cpu"))}


def machine() -> dict[str, Any]:
    """A machine with a CPU, without torch, which takes seconds."""
    texts = ("driver", "torch", "runtime", "triton", "python", "version", "commit")
    return {"device": "CPU", "arch": "cpu", "compute_units": 0, "memory": 0, "cards": 2, **dict.fromkeys(texts, "")}


def not_a_number() -> dict[str, Any]:
    return {"size": float("nan")}


def asks_for_another() -> dict[str, Any]:
    """A task of the GPU check that asks for a further one."""
    return {"tasks": [{"name": "wrong", "target": "faulty_parts:wrong_numbers"}], "problem": "", "said": "one more"}


def crash() -> None:
    os.abort()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def leave() -> None:
    os.write(2, b"no device\n")
    os._exit(3)


def out_of_memory() -> None:
    raise MemoryError("16 GiB")


def fail() -> None:
    raise RuntimeError("no kernel image\nfor this device")


def refuse() -> None:
    from titan_mi100.errors import UserError

    raise UserError("its package is not installed")


def wrong_numbers() -> dict[str, Any]:
    return {"size": 8, "problem": "5 elements are wrong", "said": "copy 1 GB/s"}


def one_rank_hangs() -> None:
    hang() if os.environ["RANK"] == "1" else None


def one_rank_crashes() -> None:
    crash() if os.environ["RANK"] == "1" else hang()


def sweep_row(config_file: str, steps: int, warmup: int) -> dict[str, Any]:
    """What sweep.worker.measure returns: for 2 rows per forward memory runs out, for 4 it hangs if the current folder
    says so."""
    rows = read_toml(Path(config_file))["training"]["local_batch_size"]
    if rows == 2:
        raise MemoryError("Unable to allocate 80 GiB")
    if rows == 4 and Path("hang").exists():
        Path("hangs").touch()
        time.sleep(600)
    return {**sweep_figures(2), "profiled_step_ms": float(os.environ.get("GIVEN", "1"))}


def sweep_figures(processes: int) -> dict[str, Any]:
    """What sweep.worker.measure returns, made up."""
    times = dict(
        zip(("step_ms_min", "step_ms_q1", "step_ms", "step_ms_q3", "step_ms_max"), range(900, 1101, 50), strict=True)
    )
    figures = {**times, "tokens_per_second": 3000, "peak_memory_gib": 2, "comm_ms": 2000, "comm_exposed_ms": 3000}
    floats = {key: float(figure) for key, figure in {**figures, "profiled_step_ms": 1100}.items()}
    ranks = {f"{key}_by_rank": [floats[key]] * processes for key in ("comm_ms", "comm_exposed_ms")}
    return {**floats, **ranks, "tokens": 3000, "mfu": None}
