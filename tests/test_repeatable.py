"""PyTorch's attention with kernels that repeat, and FlexAttention's mask made from the documents' lengths."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mi100.attention import choice
from titan_mi100.attention.base import Documents, Shape
from titan_mi100.attention.external_backends import Flex, key_blocks
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


LAYOUTS = {
    "one document": Documents(1, 256, (256,)),
    "many": Documents(2, 384, (100, 1, 27, 128, 128, 3, 5, 376)),
    "cut off": Documents(2, 300, (200, 100, 128, 172)),
    "shorter than a block": Documents(1, 40, (7, 33)),
    "edges": Documents(1, 512, (128, 256, 128)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_flex_has_the_blocks_that_looking_at_all_pairs_finds(name: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    documents = LAYOUTS[name]
    number = torch.from_numpy(np.repeat(np.arange(len(documents.lengths)), documents.lengths)).view(documents.batch, -1)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (number[batch, query] == number[batch, key])

    theirs = create_block_mask(visible, documents.batch, None, documents.seq, documents.seq, device="cpu")
    ours = Flex("").prepare(documents, CPU)
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        count, mine = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert torch.equal(count, getattr(theirs, f"{kind}_num_blocks")), kind
        used = torch.arange(mine.shape[-1]) < count[..., None]
        assert torch.equal(mine[used], getattr(theirs, f"{kind}_indices")[used]), kind


def test_the_mask_of_a_long_row_is_made_without_its_pairs() -> None:
    seq = 1 << 17  # all pairs would be 16 GiB of bool
    partial, _, whole, _ = key_blocks(Documents(1, seq, (seq - 5, 5)), 128)
    rows = seq // 128  # of the last one no block is whole: its last query sees nothing of the long document
    assert partial.sum() == rows - 1 + rows and whole.sum() == (rows - 1) * (rows - 2) // 2


@pytest.mark.parametrize(("kernel", "expected"), [("_flash_attention_forward", Sdpa), ("", Chunked)])
def test_generation_takes_sdpa_where_torch_has_a_kernel_for_it(
    kernel: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sdpa(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # on a MI100 torch has none
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0] if kernel else q + k + v

    functional = SimpleNamespace(scaled_dot_product_attention=sdpa)
    monkeypatch.setattr("titan_mi100.attention.torch_backends.F", functional)
    assert type(choice.without_trial(Shape(1, 64, 4, 2, 16, "float32"), CPU)) is expected
