"""The machine code that Triton makes of the grouped products for an MI100 and MI200, executed without one."""

from typing import Any

import pytest
from compile_report import Launched, as_on
from machine_code.cases import DTYPES
from machine_code.launches import ORDERS, Call, Emulated, Fused, compile_all
from test_fused_experts import check_against_fp64

from titan_mi100.model.fused import experts_launch


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("arch", ["gfx908", "gfx90a"])
@pytest.mark.parametrize(("inner", "columns"), [(48, 144), (80, 8)])
def test_grouped_products_are_right(
    inner: int, columns: int, arch: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated: dict[str, Emulated] = {}

    def run(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched = Launched.of(kernel, arguments, constants)
        if str(launched) not in emulated:
            (compiled,) = compile_all([Fused(arch, launched)])
            emulated[str(launched)] = Emulated(compiled, list(ORDERS)[len(emulated) % len(ORDERS)])
        emulated[str(launched)].run(Call(programs, arguments))

    monkeypatch.setattr(experts_launch, "launch", run)
    with as_on(arch):
        check_against_fp64([66, 0, 1, 9], inner, columns, DTYPES[name])
    assert len(emulated) == 5
