"""The optimizer's Triton kernel, in Triton's interpreter: the bits of plain torch operations."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from test_lean_optimizer import KINDS, dtype_of, optimizer_of, parameters, train
from torch import Tensor

from titan_mi100.optim import lean, triton_update


def trained(kind: tuple[str, str], kernel: Any) -> list[Tensor]:
    named = [(name, torch.nn.Parameter(x.detach().to(DEVICE))) for name, x in parameters(dtype_of(kind))]
    optimizer = optimizer_of(kind, named)
    optimizer._kernel = kernel
    train(optimizer, named, 4, factor=0.7)
    return [p.detach() for _, p in named] + [value for _, value in optimizer.named_state()]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_kernel_leaves_the_bits_of_plain_torch_operations(kind: tuple[str, str]) -> None:
    for plain, ours in zip(trained(kind, None), trained(kind, triton_update.update), strict=True):
        assert torch.equal(plain, ours)
    kernel, how = lean.choose_kernel(lean.OptimizerConfig(state=kind[0], master=kind[1]), DEVICE)
    assert kernel is triton_update.update and how == "one Triton kernel"


def test_it_is_not_compiled_again_for_numbers_that_change_with_each_step() -> None:
    code = (
        "from titan_mi100.optim.kernels import update_kernel; "
        "print(*[found.name for found in update_kernel.params if found.do_not_specialize])"
    )
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=compiled, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rows", "number", "whole", "key"]


def test_a_kernel_that_differs_by_a_bit_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(tensors: dict[str, Tensor], *others: Any) -> None:
        right(tensors, *others)
        if "residual" in tensors:
            tensors["residual"][0, 0] ^= 1

    right = triton_update.update
    monkeypatch.setattr(triton_update, "update", wrong)
    kernel, how = lean.choose_kernel(lean.OptimizerConfig(state="8bit", master="24bit"), DEVICE)
    assert kernel is None and how == "plain torch operations"
    assert "gives other bits" in caplog.text


def test_a_kernel_that_cannot_be_built_is_replaced_and_the_remedy_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unbuilt(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(triton_update, "update", unbuilt)
    monkeypatch.setenv("CC", "no-compiler")
    kernel, how = lean.choose_kernel(lean.OptimizerConfig(state="8bit", master="24bit"), DEVICE)
    assert kernel is None and how == "plain torch operations"
    assert "Failed to find C compiler" in caplog.text and "CC=no-compiler is no program: unset CC" in caplog.text
