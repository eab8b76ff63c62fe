"""The optimizer: the bits of its Triton kernel against plain operations, its updates against fp64, and its speed."""

from statistics import median
from typing import Any

import torch
from torch import nn

from gpu_check.attention import device_and_arch
from titan_mi100.config.settings import OptimizerConfig
from titan_mi100.optim.lean import LeanAdamW, choose_kernel
from titan_mi100.workshop.measure.products import samples

# state, master -> the largest error of three updates, of their norm: 8-bit moments, and rounding to a master's bits
FORMATS = {("8bit", "fp32"): 0.03, ("bf16", "fp32"): 0.01, ("8bit", "24bit"): 0.03, ("8bit", "bf16_sr"): 2.0}
_GROUP = {"lr": 1e-3, "weight_decay": 0.1}


def tasks(what: str, tiny: bool) -> dict[str, Any]:
    """A task for each format."""
    size = [64, 512] if tiny else [8192, 8192] if what == "speed" else [1024, 1024]
    listed = [
        {"name": f"{what}/optimizer/{state}, {master}", "target": f"gpu_check.optimizer:{what}",
         "arguments": {"state": state, "master": master, "size": size}}
        for state, master in FORMATS
    ]  # fmt: skip
    return {"tasks": listed, "problem": "", "said": f"{len(listed)} formats"}


def _optimizer(state: str, master: str, size: list[int]) -> tuple[nn.Parameter, LeanAdamW, str]:
    """A weight, its optimizer, and which kernel updates it."""
    device, _ = device_and_arch()
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    weight = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device, dtype))
    config = OptimizerConfig(state=state, master=master, eps=1e-8)
    made = LeanAdamW([{**_GROUP, "params": [weight], "param_names": ["weight"]}], config, 1, device)
    return weight, made, choose_kernel(config, device)[1]


def values(state: str, master: str, size: list[int]) -> dict[str, Any]:
    """Three updates, with a clip factor, against torch's AdamW in fp64."""
    weight, ours, kernel = _optimizer(state, master, size)
    exact = nn.Parameter(weight.detach().double())
    start = exact.detach().clone()
    betas = ours.defaults["betas"]
    reference = torch.optim.AdamW([exact], betas=betas, eps=ours.defaults["eps"], **_GROUP)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradient = torch.randn(size, generator=draw).to(weight.device, weight.dtype)
        weight.grad, exact.grad = gradient, gradient.double() * 0.5
        ours.update(0.5)
        reference.step()
    error = ((weight.double() - exact).norm() / (exact - start).norm()).item()
    problem = "" if error < FORMATS[state, master] else f"wrong: at most {FORMATS[state, master]} was expected"
    return {"error": error, "kernel": kernel, "problem": problem,
            "said": f"{kernel}; error of three updates {error:.1e} of their norm"}  # fmt: skip


def speed(state: str, master: str, size: list[int]) -> dict[str, Any]:
    """Milliseconds of an update, and of torch's fused AdamW on fp32."""
    weight, ours, kernel = _optimizer(state, master, size)
    weight.grad = torch.randn_like(weight)
    ms = 1000 * median(samples(lambda: ours.update(0.5), weight.device))
    held = sum(x.nbytes for x in ours.state[weight].values()) + weight.nbytes
    wide = nn.Parameter(weight.detach().float())
    wide.grad = wide.detach().clone()
    fused = torch.optim.AdamW([wide], fused=True)
    library = 1000 * median(samples(fused.step, weight.device))
    rate = (2 * held + weight.grad.nbytes) / ms / 1e6
    said = (
        f"{kernel}: {ms:.2f} ms ({rate:,.0f} GB/s) for {weight.numel():,} weights; torch's fused on fp32 {library:.2f}"
    )
    return {"ms": ms, "fused_ms": library, "kernel": kernel, "problem": "", "said": said}
