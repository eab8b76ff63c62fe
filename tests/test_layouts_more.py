"""More of test_layouts.py, by hand with --full: every layout in fp16, with less state, with other kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
from parity import table as parity
from test_layouts import assert_within_the_bars


@pytest.mark.full
def test_layouts_train_in_fp16_as_one_process_does(tmp_path: Path) -> None:
    jobs = parity.cells("float16", 0.0, [name for name, (n, _) in parity.LAYOUTS.items() if n < 8], accumulations=(4,))
    assert_within_the_bars(parity.measure([replace(cell, steps=2) for cell in jobs if cell.tied], tmp_path))


@pytest.mark.full
def test_layouts_train_with_less_state_as_one_process_does(tmp_path: Path) -> None:
    jobs = parity.cells("float64", 0.0, [name for name, (n, _) in parity.LAYOUTS.items() if n < 8], accumulations=(4,))
    jobs = [replace(cell, steps=2, state="8bit", master="bf16_sr") for cell in jobs if cell.tied]
    assert_within_the_bars(parity.measure(jobs, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["chunked", "eager"])
def test_layouts_train_alike_with_every_backend_of_attention(backend: str, tmp_path: Path) -> None:
    jobs = parity.cells("float64", 0.0, ["FSDP2 x2", "TP2", "PP2 1F1B"], accumulations=(2,))
    jobs = [replace(cell, steps=2, layers=2, backend=backend) for cell in jobs if cell.tied]
    assert_within_the_bars(parity.measure(jobs, tmp_path))


@pytest.mark.full
def test_a_layout_trains_with_our_kernel(tmp_path: Path) -> None:
    """In Triton's interpreter, two steps."""
    pytest.importorskip("triton")
    (cell, *_) = parity.cells("float32", 0.0, ["FSDP2 x2"], accumulations=(2,))
    assert_within_the_bars(parity.measure([replace(cell, steps=2, layers=2, backend="triton")], tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_layouts_train_alike_with_the_kernels_between_products(family: str, tmp_path: Path) -> None:
    """Two layouts against one process without the kernels. In Triton's interpreter, two steps."""
    pytest.importorskip("triton")
    jobs = parity.cells("float32", 0.0, ["FSDP2 x2", "TP2"], accumulations=(1,), family=family)
    jobs = [replace(cell, steps=2, layers=2, fused=("elementwise",)) for cell in jobs if cell.tied]
    assert_within_the_bars(parity.measure(jobs, tmp_path))
