"""The fused kernels between products in Triton's interpreter, against the plain forms in fp64."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from test_model import SPECS as QWEN3
from test_qwen3_5 import SPECS as QWEN3_5
from test_qwen3_moe import TIED as MOE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from titan_mi100.config.layout import Layout
from titan_mi100.config.settings import TrainingConfig
from titan_mi100.model import elementwise
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.families import MODELS
from titan_mi100.model.fused import elementwise_launch, running
from titan_mi100.model.fused.running import only
from titan_mi100.model.layers import RMSNorm
from titan_mi100.model.qwen3_5 import ZeroCentredNorm
from titan_mi100.parallel.build import apply_activation_checkpointing
from titan_mi100.parallel.distributed import World
from titan_mi100.parallel.fsdp import apply_fsdp
from titan_mi100.parallel.tensor_parallel import apply_tensor_parallel
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.rope import RopeScaling

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["elementwise"]
NORMS = [
    *((RMSNorm, torch.bfloat16), (RMSNorm, torch.float32), (ZeroCentredNorm, torch.float16)),
    pytest.param(RMSNorm, torch.float16, marks=pytest.mark.full),
    *(pytest.param(ZeroCentredNorm, dtype, marks=pytest.mark.full) for dtype in (torch.bfloat16, torch.float32)),
]
# Rounded once: half of eps relative to the element. The largest element may be twice as far from its neighbours.
BARS = {torch.bfloat16: 0.51 * 2**-7, torch.float16: 0.51 * 2**-10, torch.float32: 3e-6}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each program sums several blocks of rows."""
    monkeypatch.setattr(elementwise_launch, "PROGRAMS", 3)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def gradients(function: Callable[..., object], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of all inputs of a weighted sum of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]  # type: ignore[misc]
    weights = [drawn(*y.shape, seed=9 + n).mul(8).round().to(y.dtype) for n, y in enumerate(outputs)]  # exact in each
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, weights)]


def agrees(function: Callable[..., object], inputs: Sequence[Tensor], factor: float = 1.0) -> None:
    """The kernels against the plain form in fp64; and the same bits again."""
    ours: list[list[Tensor]] = []
    for _ in range(2):
        with only(KINDS):
            ours.append(gradients(function, inputs))
    assert all(torch.equal(*pair) for pair in zip(*ours, strict=True))
    expected = gradients(function, [x.double() for x in inputs])
    for x, y in zip(ours[0], expected, strict=True):
        assert x.shape == y.shape and torch.isfinite(x).all()
        error = ((x.double() - y).abs() / y.abs().clamp_min(y.abs().max() / 8)).max().item()
        assert error <= factor * BARS[x.dtype], error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 64), (2, 5, 1100), (7, 192)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = 3 * drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=2)
    agrees(elementwise.swiglu, (gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(dtype: torch.dtype) -> None:
    gate = 3 * drawn(2, 3, 4, 80, dtype=dtype)
    agrees(elementwise.gated, (drawn(2, 3, 4, 40, dtype=dtype, seed=2), gate[..., 40:]))


def test_swiglu_of_parts_of_a_merged_product_of_no_rows_and_of_large_gates() -> None:
    merged = drawn(2, 3, 128)
    with only(KINDS):
        ours = elementwise.swiglu(*merged.chunk(2, dim=-1))
        assert torch.equal(elementwise.swiglu(merged[..., :64].contiguous(), merged[..., 64:]), ours)
        assert elementwise.swiglu(merged[:, :0], merged[:, :0]).shape == (2, 0, 128)
    torch.testing.assert_close(ours, elementwise.swiglu(*merged.chunk(2, dim=-1)))
    agrees(elementwise.swiglu, (torch.tensor([[-80.0, -20.0, 20.0, 1e4]], device=DEVICE), drawn(1, 4)))


def norm_of(kind: type[RMSNorm], size: int) -> RMSNorm:
    norm = kind(size, 1e-6).to(DEVICE)
    norm.weight.data += 0.3 * drawn(size)
    return norm


def with_gains(norms: Sequence[RMSNorm], function: Callable[..., object]) -> Callable[..., object]:
    """The function with the norms' gains as its last arguments, whose gradients are compared too."""

    def call(*inputs: Tensor) -> object:
        for norm, gain in zip(norms, inputs[-len(norms) :], strict=True):
            del norm.weight
            norm.weight = gain  # type: ignore[assignment]
        return function(*inputs[: -len(norms)])

    return call


@pytest.mark.parametrize(("kind", "dtype"), NORMS)
@pytest.mark.parametrize("shape", [(5, 13, 64), (2, 7, 192), (1, 5, 1024), (1, 3, 2560)])
def test_norm_with_and_without_a_sum(shape: tuple[int, ...], kind: type[RMSNorm], dtype: torch.dtype) -> None:
    norm, x = norm_of(kind, shape[-1]), drawn(*shape, dtype=dtype)
    gain = norm.weight.detach().to(dtype)
    agrees(with_gains([norm], norm), (x, gain))
    x, added = (drawn(*shape, seed=n).mul(8).round().div(8).to(dtype) for n in (5, 6))  # a sum that is exact
    agrees(with_gains([norm], norm), (x, added, gain))


def test_the_gradient_of_a_gain_from_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise_launch, "PROGRAMS", 50)
    norm = norm_of(RMSNorm, 1024)  # a row at a time, so 45 sums: more than the second stage has at once
    agrees(with_gains([norm], norm), (drawn(1, 45, 1024), norm.weight.detach()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 96, 128])
def test_gated_norm(size: int, dtype: torch.dtype) -> None:
    shape = (1, 13, 3, size)
    x, gate, gain = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=3), 1 + 0.3 * drawn(size)
    agrees(lambda *inputs: elementwise.gated_norm(*inputs, 1e-6), (x, gate, gain))


@pytest.mark.parametrize(("kind", "dtype"), NORMS)
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (128, 128), (256, 64), (96, 24)])
def test_norm_and_rotation(size: int, rotated: int, kind: type[RMSNorm], dtype: torch.dtype) -> None:
    tokens = (1, 37) if size == 64 else (2, 7)
    norms = norm_of(kind, size), norm_of(kind, size)
    positions = torch.arange(tokens[1], device=DEVICE).expand(tokens)
    cos, sin = elementwise.rotary_tables(positions, rotated, 1e4, RopeScaling("yarn", 4.0, 16))
    q = drawn(*tokens, 3, 2 * size, dtype=dtype)  # in two parts, as Qwen3.5's queries and gates are
    k, gain = drawn(*tokens, 2, size, dtype=dtype), norms[0].weight.detach().to(dtype)

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return elementwise.norm_and_rotate(q.chunk(2, dim=-1)[0], k, norms, cos, sin)

    agrees(with_gains(norms, turned), (q, k, gain, gain.roll(1)), 1.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_passes(dtype: torch.dtype) -> None:
    assert elementwise.trial(DEVICE, dtype) == ""


def made(spec: ModelSpec, layout: str) -> CausalLM:
    """A model with random weights: alone, with recomputation, or as a rank of FSDP2 and tensor parallel."""
    model = MODELS[spec.model_type](spec).to(DEVICE)
    for parameter in model.parameters():
        start, spread = (parameter.data, 0.3) if parameter.ndim == 1 else (0.0, 0.08)
        parameter.data = start + spread * drawn(*parameter.shape)
    if layout == "sharded":
        mesh = init_device_mesh(DEVICE.type, (1, 1), mesh_dim_names=("dp_shard", "tp"))
        apply_tensor_parallel(model, mesh["tp"])
        apply_fsdp(model, mesh, TrainingConfig(mixed_precision_param="float32"), Layout(zero_stage=3))
    elif layout == "recomputed":
        apply_activation_checkpointing(model, "full", False, False)
    return model


@pytest.mark.parametrize("layout", ["alone", "recomputed", "sharded"])
@pytest.mark.parametrize("spec", [QWEN3["tied"], QWEN3_5["tied"], MOE], ids=lambda spec: spec.model_type)
def test_a_model_gives_the_gradients_of_plain_operations(
    spec: ModelSpec, layout: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 has centred and gated norms, and turns a part of each head; experts may have no rows."""
    ids = torch.randint(0, spec.vocab_size, (2, 21), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    computed, launched = [], list[str]()
    monkeypatch.setattr(elementwise_launch, "launch", noting(launched, running.launch))
    for kinds in ([], KINDS):
        model = made(spec, layout)
        with only(kinds):
            logits = model(ids)
            logits.square().sum().backward()
        assert bool(launched) == bool(kinds)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(grads) == len(list(model.parameters()))
        computed.append({"logits": logits.detach(), **grads})
    for name, plain in computed[0].items():
        plain, ours = (x.full_tensor() if isinstance(x, DTensor) else x for x in (plain, computed[1][name]))
        assert (ours - plain).abs().max() <= 1e-5 * plain.abs().max(), name


def noting(launched: list[str], launch: Callable[..., None] | None) -> Callable[..., None]:
    """In place of the launch of a kernel: notes its name. Args: launch: does it; None: nothing does."""

    def note(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        if launch is not None:
            launch(kernel, programs, *arguments, **constants)

    return note
