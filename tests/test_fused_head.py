"""The kernels of the head's loss in Triton's interpreter, against fp64."""

from typing import Any

import pytest
import torch
from conftest import REPO, torchrun
from interpreted import DEVICE
from step_counts import Counted, total
from torch import Tensor

from titan_mi100.model import loss
from titan_mi100.model.fused import head_launch
from titan_mi100.model.fused.running import only
from titan_mi100.model.loss import IGNORE, HeadMemory
from titan_mi100.planning.memory import HEAD_BLOCK

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BARS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 4e-6}  # of the largest number
VOCABULARY = 5000  # two blocks in 16 bits, five in fp32; the last one ends inside a tile
KEPT = 1 << 25


def case(
    rows: int, k: int, dtype: torch.dtype, weights_dtype: torch.dtype | None = None, vocabulary: int = VOCABULARY
) -> tuple[Tensor, ...]:
    """hidden, weight, ids and the factors of the losses."""
    draw = torch.Generator().manual_seed(rows + k)
    hidden = torch.randn(rows, 48, generator=draw).to(dtype)
    weight = (torch.randn(vocabulary, 48, generator=draw) / 4).to(weights_dtype or dtype)
    ids, factors = torch.randint(vocabulary, (rows, k), generator=draw), torch.rand(rows, k, generator=draw) + 0.5
    ids[0, 0], ids[rows // 2, -1] = 0, vocabulary - 1
    if rows > 6:
        ids[1] = IGNORE
        ids[2, -1], ids[3], ids[4] = IGNORE, 17, 2559  # repeated, if there are several; the last of a block
        ids[5, 0] = 2560
    return tuple(x.to(DEVICE) for x in (hidden, weight, ids, factors))


def results(
    tensors: tuple[Tensor, ...],
    kinds: tuple[str, ...] = ("head",),
    kept: int = 0,
    is_frozen: bool = False,
    block: int = 1,
) -> list[Tensor]:
    """losses, best, and the gradients."""
    hidden, weight, ids, factors = tensors
    leaves = [x.detach().requires_grad_() for x in ((hidden,) if is_frozen else (hidden, weight))]
    with only(kinds):
        losses, best = loss._BlockedCrossEntropy.apply(
            leaves[0], weight if is_frozen else leaves[1], ids, loss._Shard(None), HeadMemory(block, kept)
        )
        return [losses.detach(), best, *torch.autograd.grad((losses * factors.to(losses.dtype)).sum(), leaves)]


def in_fp64(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The same from the logits of all tokens."""
    hidden, weight = (x.double().requires_grad_() for x in tensors[:2])
    _, _, ids, factors = tensors
    scores = (hidden @ weight.T).log_softmax(-1)
    losses = -torch.where(ids != IGNORE, scores.gather(1, ids.clamp(min=0)), 0.0)
    return [losses.detach(), scores.detach().amax(1), *torch.autograd.grad((losses * factors).sum(), (hidden, weight))]


def assert_near(found: list[Tensor], exact: list[Tensor], bar: float) -> None:
    for name, ours, theirs in zip(("losses", "best", "hidden", "weight"), found, exact, strict=False):
        error = ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()
        assert error <= bar, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "k", "kept", "is_frozen"),
    [
        (1, 1, 0, False),
        (7, 1, KEPT, True),
        (33, 1, 0, False),
        (1, 3, KEPT, False),
        (7, 3, 0, True),
        (33, 3, KEPT, False),
    ],
)
def test_loss_and_gradients_equal_fp64(rows: int, k: int, kept: int, is_frozen: bool, dtype: torch.dtype) -> None:
    tensors = case(rows, k, dtype)
    found = results(tensors, kept=kept, is_frozen=is_frozen)
    assert len(found) == 4 - is_frozen and found[2].dtype == dtype
    assert_near(found, in_fp64(tensors), BARS[dtype])
    known = tensors[2] != IGNORE
    assert not found[0][~known].any() and not found[2][~known.any(1)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_a_row_of_several_tiles_equals_fp64(k: int, dtype: torch.dtype) -> None:
    tensors = case(3, k, dtype, vocabulary=21_003)
    # one product sums 21,003 numbers: in fp32 its error depends on the CPU's library
    bar = 4 * BARS[dtype] if dtype == torch.float32 else BARS[dtype]
    assert_near(results(tensors, block=1 << 25), in_fp64(tensors), bar)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_the_gradient_of_each_logit_is_rounded_once(k: int, dtype: torch.dtype) -> None:
    """Small ones too, which a gradient's largest number would hide; the block begins at column 5,000."""
    draw, start = torch.Generator().manual_seed(k), 5000
    logits = torch.randn(4, 17_003, generator=draw).to(dtype).to(DEVICE)
    ids = (torch.randint(17_003, (4, k), generator=draw) + start).to(DEVICE)
    ids[0, 0], ids[1] = start - 1, start + 8192  # an id of another block; repeated ones
    grad, log_sum = (torch.rand(2, 4, k, generator=draw) + 0.5).to(DEVICE)
    log_sum = log_sum[:, 0] + 4
    column, inside = (ids - start).clamp(min=0), ids >= start
    target, scale = torch.where(inside, logits.float().gather(1, column), 0.0), grad.sum(1)
    exact = (logits.double() - log_sum[:, None]).exp() * scale[:, None]
    exact.scatter_add_(1, column, -torch.where(inside, grad, 0.0).double())
    head_launch.subtract(logits, start, ids, scale, log_sum)
    if k > 1:
        head_launch.subtract_several(logits, start, ids, grad, scale, log_sum, target)
    torch.testing.assert_close(logits.double(), exact, rtol=0.51 * torch.finfo(dtype).eps + 2e-6, atol=3.1e-8)


@pytest.mark.parametrize("k", [1, 3])
def test_a_weight_in_fp32_is_cast_block_by_block(k: int) -> None:
    tensors = case(7, k, torch.bfloat16, torch.float32)
    found = results(tensors)
    assert found[3].dtype == torch.float32
    rounded = (tensors[0], tensors[1].bfloat16(), *tensors[2:])
    assert_near(found, in_fp64(rounded), BARS[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_gradients_are_as_near_to_fp64_as_those_of_plain_operations(k: int, dtype: torch.dtype) -> None:
    tensors = case(33, k, dtype)
    exact = in_fp64(tensors)
    fused, plain = (
        [(x.double() - y).norm() for x, y in zip(results(tensors, kinds), exact, strict=True)]
        for kinds in (("head",), ())
    )
    for ours, theirs, of in zip(fused, plain, exact, strict=True):
        assert ours <= 1.05 * theirs + 1e-7 * of.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_the_bits_are_the_same_again_and_if_logits_are_kept(k: int, dtype: torch.dtype) -> None:
    first, again, kept = (results(case(7, k, dtype), kept=kept) for kept in (0, 0, KEPT))
    assert all(map(torch.equal, first, again)) and all(map(torch.equal, first, kept))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kept", [0, KEPT])
def test_backward_can_run_twice(kept: int, k: int) -> None:
    """As with retain_graph; the first call overwrites kept logits."""
    hidden, weight, ids, factors = case(7, k, torch.bfloat16)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with only(["head"]):
        losses, _ = loss._BlockedCrossEntropy.apply(*leaves, ids, loss._Shard(None), HeadMemory(1, kept))
        summed = (losses * factors).sum()
        first, second = (torch.autograd.grad(summed, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_as_large_as_they_come_overflow_nothing(dtype: torch.dtype) -> None:
    hidden, weight, *others = case(7, 1, dtype)
    found = results((hidden, weight * 1000, *others))
    plain = results((hidden, weight * 1000, *others), ())
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-6, atol=1e-3)


def test_an_overflow_is_seen_in_the_loss_and_in_the_gradients() -> None:
    """A step of fp16 with such logits is left out, see loss_scale."""
    for wrong in (float("inf"), float("nan")):
        hidden, *others = case(7, 1, torch.float16)
        hidden[6] = wrong
        losses, best, of_hidden, of_weight = results((hidden, *others))
        assert losses[:, 0].isnan().tolist() == best.isnan().tolist() == [False] * 6 + [True]
        assert of_hidden[:6].isfinite().all()
        assert not of_hidden[6].isfinite().any() and not of_weight.isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_passes(dtype: torch.dtype) -> None:
    assert loss.trial(DEVICE, dtype) == ""


def test_very_many_ids_are_left_to_plain_operations() -> None:
    hidden = torch.zeros(2, 4, dtype=torch.bfloat16)
    with only(["head"]):
        forms = [loss._form(hidden, torch.zeros(2, k, dtype=torch.long)).__name__ for k in (1, 1024, 1025)]
        assert loss._form(hidden.double(), torch.zeros(2, 1, dtype=torch.long)) is loss._Blocks
    assert forms == ["_FusedBlocks", "_FusedBlocks", "_Blocks"]


class _Traffic(Counted):
    """Counts the sizes of new buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func.__name__.startswith("new_empty"):
            self.buffers.append(made.nbytes)
        return made


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_a_step_of_06b_moves_at_most_8_bytes_a_logit(kept: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,324 tokens, in bf16, in the blocks of a GPU. Plain operations move 47 times 2 bytes a logit in 890 launches."""
    rows, vocabulary, width = 5324, 151_936, 1024
    with torch.device("meta"):
        hidden = torch.zeros(rows, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
        ids, grad = torch.zeros(rows, k, dtype=torch.long), torch.zeros(rows, k)
    with only(["head"]), _Traffic() as traffic:
        monkeypatch.setattr(head_launch, "launch", traffic.launch)
        losses, _ = loss._BlockedCrossEntropy.apply(
            hidden, weight, ids, loss._Shard(None), HeadMemory(HEAD_BLOCK, kept)
        )
        torch.autograd.grad(losses, (hidden, weight), grad)
    counts, every = traffic.counts, total(traffic.counts, "launches")
    ours = sum(n for (what, name), n in counts.items() if what == "launches" and name.endswith("_kernel"))
    times = total(counts, "bytes") / (2 * rows * vocabulary)
    assert times <= 3.5 and ours == (18 if k == 1 else 36)
    assert max(traffic.buffers) <= (2 * rows * vocabulary if kept else 6 * HEAD_BLOCK) and len(traffic.buffers) <= 2
    assert every - ours <= 25 and (k > 1 or every <= 42)  # two are the zeros of torch.where, filled on the card


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_block_takes_the_memory_of_a_plain_one(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Its logits, and where the weight is cast, the copy of its part and that part's gradient."""
    for rows in (1, 100, 2048, 5324, 40_000):
        hidden = torch.empty(rows, 1024, dtype=dtype, device="meta")
        weight = torch.empty(151_936, 1024, dtype=weight_dtype, device="meta")
        copies = 0 if weight_dtype == dtype else 2 * 1024 * dtype.itemsize
        plain, fused = (form(hidden, weight, HeadMemory(HEAD_BLOCK)) for form in (loss._Blocks, loss._FusedBlocks))
        bytes_of_plain = plain._size * (rows * (dtype.itemsize + (4 if dtype != torch.float32 else 0)) + copies)
        sizes = [stop - start for start, stop in fused]
        assert sizes[0] * (rows * dtype.itemsize + copies) <= bytes_of_plain
        assert sum(sizes) == 151_936 and all(size % 128 == 0 for size in sizes)


@pytest.mark.full
def test_two_shards_of_the_vocabulary_equal_fp64() -> None:
    torchrun(str(REPO / "tests/gloo/job_head.py"), processes=2, timeout=600)
