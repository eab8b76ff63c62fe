"""One launch of each kernel under NVIDIA's compute-sanitizer. `python -m gpu_check.sanitizer` is what it watches."""

import os
import shutil
import subprocess
import sys
from typing import Any

from titan_mi100.errors import UserError


def check(tool: str, tiny: bool) -> dict[str, Any]:
    """Run one of its tools. Raises UserError: it is not installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(program):
        raise UserError("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "10", sys.executable, "-m", __name__]
    # memory from the driver, block by block: torch's allocator would hide what lies behind a tensor's end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")][:12]
    problem = f"exit code {done.returncode}" if done.returncode else ""
    ran = [line for line in done.stdout.splitlines() if not line.startswith("=========")]
    return {"lines": lines, "problem": problem, "said": (ran or done.stderr.splitlines() or ["no output"])[-1][:200]}


def launch() -> str:
    """Launch each kernel once, at sizes that are no multiple of a tile. Returns what ran."""
    import torch

    from gpu_check.attention import device_and_arch, tiles_of
    from gpu_check.kernels import KERNELS, values
    from titan_mi100.attention.backends import make_backend
    from titan_mi100.attention.base import Documents, Shape
    from titan_mi100.attention.trial import forward_backward, inputs
    from titan_mi100.config.kernels import OWN
    from titan_mi100.config.settings import OptimizerConfig
    from titan_mi100.device import accelerator
    from titan_mi100.optim.lean import choose_kernel

    device, _ = device_and_arch()
    ran = []
    for dim in (128, 256) if accelerator.is_gpu(device) else (32,):
        try:
            launch = str(tiles_of(dim, "bfloat16").first())
        except UserError as error:
            ran.append(str(error))
            continue
        tensors = inputs(Shape(1, 203, 4, 2, dim, "bfloat16"), device)
        forward_backward(make_backend(OWN, "", "", launch), tensors, Documents(1, 203, (1, 77, 125)))
        ran.append(f"attention {dim}")
    ran.append(choose_kernel(OptimizerConfig(state="8bit", master="bf16_sr"), device)[1])
    for name, kernel in KERNELS.items():
        values(name, kernel.dtypes[0], tiny=True)
        ran.append(name)
    accelerator.synchronize(device)
    assert torch.is_grad_enabled()
    return ", ".join(ran)


if __name__ == "__main__":
    print(launch(), flush=True)
    os._exit(0)
