"""Our Triton kernels in Triton's interpreter: against fp64, isolation to the bit, as operators, and in a whole step."""

import functools
from typing import Any

import pytest
import torch
from conftest import documents_of
from interpreted import DEVICE, triton_backend
from test_model import SPECS
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from titan_mi100.attention import trial
from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Backend, Documents, Shape, boundaries
from titan_mi100.attention.launches import TABLES, Launch, Tile, candidates
from titan_mi100.attention.torch_backends import Eager, Sdpa
from titan_mi100.attention.trial import judge
from titan_mi100.model.qwen3 import Qwen3

BARS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# tiles (forward, gradient of queries, gradients of keys), batch, documents, heads, head_dim
CASES = {
    "one token and odd lengths": ("32.16 32.16 16.32", 1, (1, 16, 15, 32, 1, 29), (4, 2), 64),
    "one document over many tiles": ("16.32 16.32 32.16", 1, (97,), (2, 2), 64),
    "boundaries on tile edges": ("32.32 16.16 32.32", 2, (32, 32, 16, 16, 32), (3, 1), 64),
    "several documents inside a tile": ("64.64 64.32 32.64", 1, (3, 5, 1, 1, 2, 20, 9, 30), (2, 1), 64),
    "eight heads per key head": ("16.16 16.16 16.16", 1, (20, 13), (8, 1), 64),
    "head_dim 128": ("32.16 32.16 16.32", 2, (30, 10, 40), (2, 1), 128),
    "head_dim 256, keys and values apart": ("32.16 16.16 16.32.4.1.2", 1, (30, 10, 40), (2, 1), 256),
    "fewer tokens than a tile": ("64.32 64.32 32.64", 1, (2, 5), (2, 1), 64),
}


def launch(tiles: str) -> str:
    return " ".join(tile if tile.count(".") > 1 else f"{tile}.4.1" for tile in tiles.split())


def case(name: str) -> tuple[Backend, Documents, tuple[int, int], int]:
    tiles, batch, lengths, heads, dim = CASES[name]
    return (
        make_backend("triton", "cpu", launch(tiles)),
        Documents(batch, sum(lengths) // batch, lengths),
        heads,
        dim,
    )


def inputs(documents: Documents, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, and the gradient of the output; some of them no plain rows of heads."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(documents.batch, documents.seq, count, dim, generator=generator).to(DEVICE, dtype)

    q, both, grad = draw(heads[0]), draw(2 * heads[1]), draw(heads[0])
    k, v = both.chunk(2, dim=2)  # as one projection of both would give them
    return [q, k, v, grad.transpose(1, 2).contiguous().transpose(1, 2)]


def results(backend: Backend, documents: Documents, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v, grad = (x.detach().requires_grad_() for x in tensors)
    out = backend(q, k, v, backend.prepare(documents, DEVICE))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("dtype", BARS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_explicit_attention_in_fp64(name: str, dtype: torch.dtype) -> None:
    equals_fp64(*case(name), dtype)


def equals_fp64(backend: Backend, documents: Documents, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    tensors = inputs(documents, heads, dim, dtype)
    expected = results(Eager(), documents, [x.double() for x in tensors])
    for what, ours, exact in zip(("out", "q", "k", "v"), results(backend, documents, tensors), expected, strict=True):
        assert ours.shape == exact.shape and ours.dtype == dtype
        difference = ((ours.double() - exact).abs().max() / exact.abs().max()).item()
        assert difference <= BARS[dtype], (what, difference)


@pytest.mark.parametrize("name", ["one token and odd lengths", "several documents inside a tile"])
def test_nothing_crosses_a_boundary(name: str) -> None:
    """Other contents and other lengths around a document leave its results as they are, to the bit."""
    backend, documents, heads, dim = case(name)
    tensors = inputs(documents, heads, dim, torch.float32)
    before = results(backend, documents, tensors)
    third = slice(sum(documents.lengths[:2]), sum(documents.lengths[:3]))
    outside = torch.ones(documents.seq, dtype=torch.bool, device=DEVICE)
    outside[third] = False
    for x in tensors:
        x[0, outside] *= -100
    merged = (sum(documents.lengths[:2]), documents.lengths[2], sum(documents.lengths[3:]))
    for lengths in (documents.lengths, merged):
        after = results(backend, Documents(1, documents.seq, lengths), tensors)
        for ours, theirs in zip(before, after, strict=True):
            assert torch.equal(ours[0, third], theirs[0, third])
            assert not torch.equal(ours[0, outside], theirs[0, outside])


def test_the_operator_is_what_torch_expects_of_one() -> None:
    documents = Documents(1, 16, (9, 7))
    q, k, v, _ = (x.requires_grad_() for x in inputs(documents, (2, 1), 16, torch.float32))
    limits = torch.from_numpy(boundaries(documents)).to(DEVICE)
    arguments = (q, k, v, limits, launch("16.16 16.16 16.16"))
    assert set(torch.library.opcheck(torch.ops.titan_mi100.attention.default, arguments).values()) == {"SUCCESS"}


def test_a_step_launches_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator costs the host about twice as much; who counts or traces operators sees it."""
    documents = Documents(1, 16, (9, 7))
    tensors, backend = inputs(documents, (2, 1), 16, torch.float32), make_backend("triton", "cpu")
    with FlopCounterMode(display=False):
        expected = results(backend, documents, tensors)
    monkeypatch.setattr(triton_backend.attention, "operator", None)
    monkeypatch.setattr(triton_backend.attention_backward, "operator", None)
    for ours, theirs in zip(results(backend, documents, tensors), expected, strict=True):
        assert torch.equal(ours, theirs)


def whole_step(backend: Backend, wrap: Any = None) -> list[torch.Tensor]:
    """Loss and gradients of a small model on rows of several documents."""
    torch.manual_seed(1)
    model = Qwen3(SPECS["tied"], backend).to(DEVICE)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    for layer in model.model.blocks():
        layer.forward = wrap(layer.forward) if wrap else layer.forward
    ids = torch.randint(0, 64, (2, 24)).to(DEVICE)
    documents = documents_of((torch.arange(24) >= 13).long().expand(2, 24).contiguous())
    prepared = model.model.prepare(documents, DEVICE)
    loss = model(ids, documents=prepared, labels=ids, supervised=torch.arange(48, device=DEVICE))
    loss.sum().backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    "wrap",
    [
        None,
        lambda forward: functools.partial(checkpoint, forward, use_reentrant=False),
        lambda forward: torch.compile(forward, backend="aot_eager", fullgraph=True),
        lambda forward: functools.partial(
            checkpoint, torch.compile(forward, backend="aot_eager", fullgraph=True), use_reentrant=False
        ),
    ],
    ids=["plain", "recomputed", "compiled as one graph", "compiled and recomputed"],
)
def test_a_whole_step_equals_the_reference(wrap: Any) -> None:
    torch.compiler.reset()
    expected = whole_step(Eager())
    for ours, theirs in zip(whole_step(make_backend("triton", "cpu"), wrap), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


def blocks() -> list[str]:
    """Every pair of block sizes of the tables, for all three kernels; those of keys also with two launches."""
    rows = [candidates(*row) for row in TABLES if row[0] != "cpu"]
    found = {(tile.block_q, tile.block_k, tile.parts) for row in rows for tiles in row for tile in tiles}
    return [f"{q}.{k}.4.1 {q}.{k}.4.1 {q}.{k}.4.1" + (".2" if parts == 2 else "") for q, k, parts in sorted(found)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("launch", blocks())
def test_every_block_size_of_the_tables_equals_fp64(launch: str, dim: int, dtype: torch.dtype) -> None:
    equals_fp64(make_backend("triton", "cpu", launch), Documents(1, 150, (70, 1, 33, 46)), (4, 2), dim, dtype)


@pytest.mark.parametrize("broken", Launch._fields)
@pytest.mark.parametrize("fault", ["cannot run", "is wrong", "gives other bits"])
def test_the_fastest_launch_passes_over_a_tile_that_fails(
    broken: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Tile(32, 16, 4, 1), Tile(16, 16, 2, 1)

    class Faulty(Sdpa):
        calls = 0

        def __init__(self, launch: str) -> None:
            self.is_bad = " " in launch and getattr(Launch.parse(launch), broken) == bad

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: Any) -> torch.Tensor:
            Faulty.calls += 1
            if self.is_bad and fault == "cannot run":
                raise RuntimeError("out of resource: shared memory")
            factor = 0.5 if fault == "is wrong" else 1 + 2e-7 * (Faulty.calls % 2)
            factor = factor if self.is_bad else 1
            if broken == "forward":
                return super().__call__(q, k, v, prepared) * factor
            q, v = (x * factor + x.detach() * (1 - factor) for x in (q, v))  # the same value, another gradient
            return super().__call__(q, k, v, prepared)

    # The bad tile is the first candidate, so that it takes part in the trials of the other kernels, too.
    tiles = [[bad, good] if kernel == broken else [good] for kernel in Launch._fields]
    monkeypatch.setattr(trial, "candidates", lambda *_: tiles)
    monkeypatch.setattr(triton_backend, "Triton", Faulty)
    shape, times, timed = Shape(2, 40, 4, 2, 16, "float32"), trial.milliseconds, list[Documents]()
    monkeypatch.setattr(trial, "milliseconds", lambda *given: (timed.append(given[2]), times(*given))[1])
    verdict = judge("triton", shape, (9, 31), DEVICE, "cpu", "")
    assert verdict.refused == "" and verdict.launch == str(Launch(good, good, good))
    assert timed == [Documents(2, 40, (9, 31) * 2)] * 4  # the run's, for each kernel's good tile and for the verdict
    reason = {"cannot run": "RuntimeError: out", "is wrong": "wrong: its", "gives other bits": "the same call"}
    assert verdict.passed_over.startswith(f"{broken} 16.16.2.1: {reason[fault]}")
    monkeypatch.setattr(trial, "candidates", lambda *_: [[bad]] * 3)
    verdict = judge("triton", shape, (9, 31), DEVICE, "cpu", "")
    assert bool(verdict.refused) == (fault != "gives other bits") and verdict.repeatable == bool(verdict.refused)
