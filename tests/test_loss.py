"""The blocked loss against the plain one in fp64."""

import weakref

import pytest
import torch
from conftest import supervised_of

from titan_mi100.model.loss import IGNORE, HeadMemory, head_loss


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = hidden.double() @ weight.double().t()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def case(dtype: torch.dtype, tokens: int = 40, vocabulary: int = 5000) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 24, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, tokens), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.6] = IGNORE
    return hidden, weight, labels


FIVE_BLOCKS = HeadMemory(block_elements=1)
MEMORIES = {
    "five blocks": FIVE_BLOCKS, "one block": HeadMemory(1 << 25),
    "five blocks that are kept": HeadMemory(1, 1 << 25), "one that is kept": HeadMemory(1 << 25, 1 << 25),
}  # fmt: skip


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_loss_and_gradients_equal_fp64(memory: HeadMemory) -> None:
    hidden, weight, labels = case(torch.float32)
    labels[1, 3], labels[1, 4] = 1023, 1024  # the last and the first of a block
    result = head_loss(hidden, weight, labels, supervised_of(labels), memory=memory)
    (result / 7).sum().backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = plain(h, w, labels)
    (expected / 7).backward()
    torch.testing.assert_close(result[0].double(), expected, rtol=1e-6, atol=0)
    for ours, theirs in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_kept_changes_no_bit(dtype: torch.dtype) -> None:
    found = []
    for kept in (0, 1 << 25):
        hidden, weight, labels = case(dtype)
        result = head_loss(hidden, weight, labels, supervised_of(labels), memory=HeadMemory(1, kept))
        result.sum().backward()
        found.append((result, hidden.grad, weight.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kept", [0, 1 << 25])
def test_backward_can_run_twice(kept: int) -> None:
    """As with retain_graph."""
    hidden, weight, labels = case(torch.float32)
    loss = head_loss(hidden, weight, labels, supervised_of(labels), memory=HeadMemory(1, kept)).sum()
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, second)


def test_after_backward_the_loss_keeps_no_logits() -> None:
    """A pipeline keeps the outputs of all microbatches until its step ends."""
    hidden, weight, labels = case(torch.float32)
    result = head_loss(hidden, weight, labels, supervised_of(labels), memory=HeadMemory(1, 1 << 25))
    node = result.grad_fn
    while not hasattr(node, "blocks"):
        node = node.next_functions[0][0]
    buffer = weakref.ref(node.blocks.buffer(0, 1).untyped_storage())
    del node
    result.sum().backward()
    assert buffer() is None


def test_logits_as_large_as_they_come_overflow_nothing() -> None:
    """The greatest of a row is subtracted before the exponential, across blocks too."""
    hidden, weight, labels = case(torch.float32)
    large = (weight * 1000).detach().requires_grad_()
    result = head_loss(hidden, large, labels, supervised_of(labels), memory=FIVE_BLOCKS)
    result.sum().backward()
    torch.testing.assert_close(result[0].double(), plain(hidden, large, labels), rtol=1e-6, atol=0)
    assert hidden.grad.isfinite().all() and large.grad.isfinite().all()


@pytest.mark.parametrize("memory", [FIVE_BLOCKS, HeadMemory(1, 1 << 25)], ids=["computed again", "kept"])
def test_bf16_gradients_are_as_near_to_fp64_as_the_plain_loss_in_bf16(memory: HeadMemory) -> None:
    hidden, weight, labels = case(torch.bfloat16)
    head_loss(hidden, weight, labels, supervised_of(labels), memory=memory).sum().backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    plain(h, w, labels).backward()
    h16, w16 = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logits = (h16 @ w16.t()).float().flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
    for ours, usual, exact in ((hidden.grad, h16.grad, h.grad), (weight.grad, w16.grad, w.grad)):
        assert (ours.double() - exact).norm() <= 1.05 * (usual.double() - exact).norm()


@pytest.mark.parametrize("memory", [FIVE_BLOCKS, HeadMemory(1, 1 << 25)], ids=["computed again", "kept"])
def test_a_weight_in_fp32_is_cast_block_by_block_as_it_would_be_whole(memory: HeadMemory) -> None:
    hidden, weight, labels = case(torch.bfloat16)
    wide = (weight.detach().float() * 1.001).requires_grad_()  # not in bf16's values
    ours = head_loss(hidden, wide, labels, supervised_of(labels), memory=memory)
    found = torch.autograd.grad(ours.sum(), (hidden, wide))
    whole = head_loss(hidden, wide.bfloat16(), labels, supervised_of(labels), memory=memory)
    expected = torch.autograd.grad(whole.sum(), (hidden, wide))
    assert torch.equal(ours, whole) and found[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_microbatch_without_supervision_is_zero_and_still_reaches_the_parameters() -> None:
    hidden, weight, labels = case(torch.float32)
    labels = torch.full_like(labels, IGNORE)
    result = head_loss(hidden, weight, labels, supervised_of(labels))
    result.sum().backward()
    assert result.item() == 0
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def test_logits_of_all_tokens_never_exist() -> None:
    hidden, weight, labels = case(torch.float32, vocabulary=9000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape != weight.shape and out.shape != weight.t().shape:
                largest = max(largest, out.numel())
            return out

    with Watch():
        head_loss(hidden, weight, labels, supervised_of(labels), memory=FIVE_BLOCKS).sum().backward()
    supervised = int((labels != IGNORE).sum())
    assert largest <= supervised * 1024
