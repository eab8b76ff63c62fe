"""The kernels of the delta rule's convolution in Triton's interpreter, against the plain form in fp64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compile_report import Launched
from interpreted import DEVICE
from machine_code.launches import Call, Emulated, Fused, compile_all
from test_fused_elementwise import BARS, DTYPES, drawn, gradients, made, noting
from test_qwen3_5 import SPECS
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_mi100.attention.base import Documents
from titan_mi100.model import delta_rule
from titan_mi100.model.delta_rule import convolved, document_ids
from titan_mi100.model.fused import convolution_launch, elementwise_launch, running
from titan_mi100.model.fused.running import only
from titan_mi100.parallel.distributed import World

LENGTHS = [[1], [2, 1], [15, 1, 16, 3, 30], [300], [125, 1, 2, 3, 4, 165]]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the interpreter is quick, and each program sums several steps."""
    for name, number in {"TOKENS": 64, "BLOCK": 128, "PROGRAMS": 2}.items():
        monkeypatch.setattr(convolution_launch, name, number)


def case(lengths: Sequence[int], channels: Sequence[int], dtype: torch.dtype, rows: int = 1) -> list[Tensor]:
    """ids, then queries, keys and values, then their weights."""
    ids = document_ids(Documents(rows, sum(lengths), (*lengths,) * rows), DEVICE)
    parts = [drawn(rows, sum(lengths), n, dtype=dtype, seed=place) for place, n in enumerate(channels)]
    return [ids, *parts, *(drawn(n, 4, dtype=dtype, seed=place) for place, n in enumerate(channels))]


def run(ids: Tensor, *inputs: Tensor, kinds: Sequence[str] = ("delta",)) -> list[Tensor]:
    """Outputs, and gradients of the inputs."""
    with only(kinds):
        return gradients(lambda *leaves: convolved(leaves[:3], leaves[3:], ids), inputs)


def agrees(ids: Tensor, *inputs: Tensor) -> None:
    ours, expected = run(ids, *inputs), run(ids, *(x.double() for x in inputs))
    for x, y in zip(ours, expected, strict=True):
        assert x.shape == y.shape and torch.isfinite(x).all()
        error = ((x.double() - y).abs() / y.abs().clamp_min(y.abs().max() / 8)).max().item()
        assert error <= BARS[x.dtype], error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "+".join(map(str, lengths)))
def test_values_and_gradients(lengths: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents end at the edge of a program's tokens, before and behind it; channels fill no program's columns."""
    monkeypatch.setattr(convolution_launch, "BLOCK", 64 if sum(lengths) < 100 else 128)
    agrees(*case(lengths, (5, 5, 77), dtype, rows=2 if sum(lengths) < 100 else 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_merged_product_bits_that_repeat_and_frozen_weights(dtype: torch.dtype) -> None:
    ids, *inputs = case([60, 10], (32, 32, 96), dtype)
    ours = run(ids, *inputs)
    merged = torch.cat([*inputs[:3], inputs[0]], -1)
    parts = merged.split([32, 32, 96, 32], -1)[:3]
    with only(["delta"]):
        outputs = convolved([x.requires_grad_() for x in parts], inputs[3:], ids)
        weights = [drawn(*y.shape, seed=9 + n).mul(8).round().to(y.dtype) for n, y in enumerate(outputs)]
        again = [*outputs, *torch.autograd.grad(outputs, parts, weights)]
    assert all(torch.equal(*pair) for pair in zip(ours[:6], again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(ours, run(ids, *inputs), strict=True))


def test_no_bit_of_a_document_depends_on_another() -> None:
    lengths = [30, 2, 33, 1, 4]
    ids, *inputs = case(lengths, (8, 8, 8), torch.float32)
    for other in (0.0, torch.nan):
        first, last = (slice(0, 30), slice(66, 70)), slice(30, 65)
        changed = [x.clone() for x in inputs]
        for x in changed[:3]:
            for part in first:
                x[:, part] = other
        ours, others = run(ids, *inputs)[:6], run(ids, *changed)[:6]
        assert all(
            torch.equal(a[:, last], b[:, last]) and not torch.equal(a, b) for a, b in zip(ours, others, strict=True)
        )


def test_where_the_kernels_do_not_run_the_bits_are_the_plain_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()
    monkeypatch.setattr(convolution_launch, "launch", noting(launched, None))
    ids, *inputs = case([3, 9], (4, 4, 4), torch.float64)
    narrow = [*inputs[:3], *(weight[:, :3] for weight in inputs[3:])]
    for some in (inputs, [x.float() for x in narrow]):
        assert all(torch.equal(*pair) for pair in zip(run(ids, *some), run(ids, *some, kinds=()), strict=True))
    assert not launched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_finds_nothing_wrong_here_and_other_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert delta_rule.trial_of_inputs(DEVICE, dtype) == ""

    def wrong(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        q, k, v, _, *others = arguments
        running.launch(kernel, programs, q, k, v, *others[:1], *others, **constants)

    monkeypatch.setattr(convolution_launch, "launch", wrong)
    assert delta_rule.trial_of_inputs(DEVICE, dtype) == "the convolution differs from that of plain operations"


@pytest.mark.parametrize("layout", ["alone", "recomputed", "sharded"])
def test_a_model_gives_the_gradients_of_plain_operations(
    layout: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, computed, launched = SPECS["tied"], [], list[str]()
    ids = torch.randint(0, spec.vocab_size, (2, 21), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    monkeypatch.setattr(convolution_launch, "launch", noting(launched, running.launch))
    for kinds in ((), ("delta",)):
        model = made(spec, layout)
        with only(kinds):
            logits = model(ids)
            logits.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(grads) == len(list(model.parameters()))
        computed.append({"logits": logits.detach(), **grads})
    forward, backward = ["convolution_kernel"] * 3, ["convolution_backward_kernel"] * 3
    assert sorted(launched) == sorted((*forward, *backward, *(forward if layout == "recomputed" else ())))
    for name, plain in computed[0].items():
        plain, ours = (x.full_tensor() if isinstance(x, DTensor) else x for x in (plain, computed[1][name]))
        assert (ours - plain).abs().max() <= 1e-5 * plain.abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ["gfx908", "gfx90a"])
def test_the_machine_code_is_right(arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()

    def execute(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        (compiled,) = compile_all([Fused(arch, Launched.of(kernel, arguments, constants))])
        Emulated(compiled, "reversed").run(Call(programs, arguments))
        ran.append(kernel.__name__)

    for module in (convolution_launch, elementwise_launch):
        monkeypatch.setattr(module, "launch", execute)
    for name, number in {"TOKENS": 16, "BLOCK": 64}.items():  # as on a card
        monkeypatch.setattr(convolution_launch, name, number)
    agrees(*case([13, 4, 20], (12, 12, 70), dtype))
    assert ran == ["convolution_kernel", "convolution_backward_kernel", "sum_kernel"]
