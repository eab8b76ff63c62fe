"""PyTorch's attention with kernels that repeat."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mi100.attention import choice
from titan_mi100.attention.base import Documents, Shape
from titan_mi100.attention.torch_backends import Chunked, Sdpa

CPU = torch.device("cpu")


class Settings(TorchDispatchMode):
    """Notes for each operator whether deterministic algorithms are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func.name(), torch.are_deterministic_algorithms_enabled()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("warn_only", [None, False, True])
def test_deterministic_algorithms_are_on_in_attention_alone(
    warn_only: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_mi100.attention.torch_backends.differs", lambda _: True)  # as a CUDA device
    q, k, v = (torch.randn(1, 8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    documents = Documents(1, 8, (3, 5))
    before = warn_only is not None
    torch.use_deterministic_algorithms(before, warn_only=bool(warn_only))
    try:
        with Settings() as seen:
            out = Sdpa()(q * 2, k, v, Sdpa().prepare(documents, CPU)) * 2
            out.sum().backward()
        assert torch.are_deterministic_algorithms_enabled() is before
        assert torch.is_deterministic_algorithms_warn_only_enabled() is bool(warn_only)
        assert torch.utils.deterministic.fill_uninitialized_memory is True  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
    attention = [name for name, _ in seen.found if "attention" in name]
    assert len(attention) == 4 and sum("backward" in name for name in attention) == 2
    for name, is_on in seen.found:
        assert is_on or "attention" not in name, name
        if not before and "attention" not in name:
            assert not is_on or name in _AROUND, name


def test_explicit_scores_are_not_asked_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS, which computes them on CUDA, refuses; their sums have one order anyway."""
    monkeypatch.setattr("titan_mi100.attention.torch_backends.differs", lambda _: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **mask: 0)  # SDPBackend.MATH
    with Settings() as seen:
        q = torch.randn(1, 8, 2, 16, requires_grad=True)
        Sdpa()(q, q, q, Documents(1, 8, (8,))).sum().backward()
    assert not any(is_on for name, is_on in seen.found if "attention" in name) and len(seen.found) > 5


_AROUND = {
    "aten::detach",
    "aten::empty",
    "aten::_fused_sdp_choice",
    "aten::expand",
    "aten::view",
    "aten::transpose.int",
}


def test_on_a_cpu_nothing_is_asked_for() -> None:
    with Settings() as seen:
        q = torch.randn(1, 8, 2, 16, requires_grad=True)
        Sdpa()(q, q, q, Documents(1, 8, (8,))).sum().backward()
    assert not any(is_on for _, is_on in seen.found)


@pytest.mark.parametrize(("kernel", "expected"), [("_flash_attention_forward", Sdpa), ("", Chunked)])
def test_generation_takes_sdpa_where_torch_has_a_kernel_for_it(
    kernel: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sdpa(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # on a MI100 torch has none
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0] if kernel else q + k + v

    functional = SimpleNamespace(scaled_dot_product_attention=sdpa)
    monkeypatch.setattr("titan_mi100.attention.torch_backends.F", functional)
    assert type(choice.without_trial(Shape(1, 64, 4, 2, 16, "float32"), CPU)) is expected
