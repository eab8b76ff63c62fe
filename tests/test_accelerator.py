"""Which device a run computes on: a card of CUDA or ROCm, one that a torch.backends entry point registered, the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_mi100.device import accelerator


def device(count: int) -> Any:
    return SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count, set_device=lambda _: None)


@pytest.mark.parametrize(
    ("cuda", "registered", "kind", "count", "backend"),
    [
        (0, None, "cpu", 0, "gloo"),
        (2, None, "cuda", 2, "cpu:gloo,cuda:nccl"),
        (0, 3, "pretend", 3, "cpu:gloo,pretend:pretendccl"),
        (0, 0, "cpu", 0, "gloo"),  # registered, but not there
        (1, 3, "cuda", 1, "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_run_takes_a_card_then_what_is_registered_then_the_cpu(
    cuda: int, registered: int | None, kind: str, count: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    name = "privateuseone" if registered is None else "pretend"
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)
    if registered is not None:
        monkeypatch.setattr(torch, "pretend", device(registered), raising=False)
        monkeypatch.setattr(accelerator, "module", lambda kind: getattr(torch, kind))
        known = {**dist.Backend.default_device_backend_map, "pretend": "pretendccl"}
        monkeypatch.setattr(dist.Backend, "default_device_backend_map", known)
    assert (accelerator.kind(), accelerator.count(), accelerator.group_backend()) == (kind, count, backend)


def test_the_cpu_and_fake_tensors_are_no_gpu() -> None:
    for name, is_gpu, is_cuda in (("cpu", False, False), ("meta", False, False), ("cuda", True, True)):
        found = torch.device(name)
        assert (accelerator.is_gpu(found), accelerator.is_cuda(found)) == (is_gpu, is_cuda)
    accelerator.synchronize(torch.device("cpu"))
    with accelerator.device_guard(torch.device("cpu")):
        assert accelerator.to_device(torch.ones(2), torch.device("cpu")).tolist() == [1, 1]
