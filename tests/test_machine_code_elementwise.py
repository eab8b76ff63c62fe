"""The machine code that Triton makes of the kernels between products for an MI100, executed without one."""

from typing import Any

import pytest
import torch
from compile_report import Launched
from machine_code.cases import DTYPES
from machine_code.launches import ORDERS, Call, Emulated, Fused, compile_all
from test_fused_elementwise import agrees, drawn, norm_of, with_gains
from torch import Tensor

from titan_mi100.model import elementwise
from titan_mi100.model.fused import elementwise_launch
from titan_mi100.model.layers import RMSNorm
from titan_mi100.model.qwen3_5 import ZeroCentredNorm


def emulate(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let machine code run in place of the kernels. Returns the names of those that ran."""
    emulated: dict[str, Emulated] = {}
    ran = set[str]()

    def run(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched = Launched.of(kernel, arguments, constants)
        if str(launched) not in emulated:
            (compiled,) = compile_all([Fused("gfx908", launched)])
            emulated[str(launched)] = Emulated(compiled, list(ORDERS)[len(emulated) % len(ORDERS)])
        emulated[str(launched)].run(Call(programs, arguments))
        ran.add(kernel.__name__)

    monkeypatch.setattr(elementwise_launch, "launch", run)
    return ran


@pytest.mark.parametrize("name", DTYPES)
def test_every_kernel_between_products_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, ran = DTYPES[name], emulate(monkeypatch)
    agrees(elementwise.swiglu, (2 * drawn(2, 1100, dtype=dtype), drawn(2, 1100, dtype=dtype, seed=2)))
    for kind, size in ((RMSNorm, 192), (ZeroCentredNorm, 2560)):
        norm, (x, y) = norm_of(kind, size), (drawn(3, size, seed=n).mul(8).round().div(8).to(dtype) for n in (5, 6))
        agrees(with_gains([norm], norm), (x, y, norm.weight.detach().to(dtype)))
    x, gate = drawn(1, 3, 3, 128, dtype=dtype), drawn(1, 3, 3, 128, dtype=dtype, seed=3)
    agrees(lambda *inputs: elementwise.gated_norm(*inputs, 1e-6), (x, gate, 1 + 0.3 * drawn(128)))
    for kind, size, rotated in ((RMSNorm, 128, 128), (ZeroCentredNorm, 256, 64)):
        norms = norm_of(kind, size), norm_of(kind, size)
        cos, sin = elementwise.rotary_tables(torch.arange(5)[None], rotated, 1e4)

        def turned(q: Tensor, k: Tensor, norms: Any = norms, tables: Any = (cos, sin)) -> tuple[Tensor, Tensor]:
            return elementwise.norm_and_rotate(q, k, norms, *tables)

        q, k, gain = drawn(1, 5, 3, size, dtype=dtype), drawn(1, 5, 2, size, dtype=dtype), norms[0].weight.detach()
        agrees(with_gains(norms, turned), (q, k, gain.to(dtype), gain.to(dtype).roll(1)), 1.1)
    assert len(ran) == 7
