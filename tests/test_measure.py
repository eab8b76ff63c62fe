"""Certificates: parts that go wrong are named, verdicts follow from numbers."""

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPO
from gpu_check.page import page
from torch.distributed import TCPStore

from titan_mi100.parallel import distributed
from titan_mi100.run import machine
from titan_mi100.run.machine import Machine, describe
from titan_mi100.workshop.measure import children, products, training
from titan_mi100.workshop.measure.children import Task, reserved_port
from titan_mi100.workshop.measure.parts import Header, Part, best_dtype, conclusions, parity, rankings, read, summary

CPU = torch.device("cpu")
SHAPE = {"batch": 2, "seq": 40, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
TWO = Machine("MI100", "gfx908:sramecc+", 120, 32 << 30, 2, "", "2.8.0+rocm6.4", "hip 6.4", "", "", "", "")
SDPA = Task(
    "attention/sdpa/debug/float32/40",
    "gpu_check.backends:measure",
    {"name": "sdpa", "shape": SHAPE},
)


def faulty(name: str, function: str, **options: Any) -> Task:
    return Task(name, f"faulty_parts:{function}", **options)


WRONG = faulty("attention/bad/debug/float32/40", "wrong_kernel", arguments={"shape": SHAPE, "fault": "wrong gradient"})
FAULTS = [  # a part, its verdict, and the beginning of what is said
    (faulty("bandwidth/crash", "crash"), "fail", "killed: SIGABRT"),
    (faulty("bandwidth/killed", "killed"), "fail", "killed: SIGKILL, most likely because memory ran out"),
    (faulty("bandwidth/hang", "hang", seconds=1), "fail", "hung: did not end within 1 s"),
    (faulty("bandwidth/leave", "leave"), "fail", "crashed: exit code 3 without a result: no device"),
    (faulty("bandwidth/wrong", "wrong_numbers"), "fail", "5 elements are wrong; copy 1 GB/s"),
    (faulty("bandwidth/hangs", "one_rank_hangs", processes=2, seconds=1), "fail", "hung: did not end within 1 s"),
    (faulty("bandwidth/crashes", "one_rank_crashes", processes=2), "fail", "killed: rank 1: SIGABRT"),
    (faulty("bandwidth/fail", "fail"), "fail", "failed: RuntimeError: no kernel image"),
    (faulty("bandwidth/memory", "out_of_memory"), "fail", "out of memory: MemoryError: 16 GiB"),
    (
        faulty("bandwidth/nan", "not_a_number"),
        "fail",
        "crashed: exit code 1 without a result: ValueError: Out of range",
    ),
    (faulty("attention/fails/a/b", "fail", optional=True), "unavailable", "RuntimeError: no kernel image"),
    (faulty("attention/absent/a/b", "refuse"), "unavailable", "its package is not installed"),
    (WRONG, "fail", "wrong: its results differ from explicit attention by "),
    (SDPA, "pass", "error "),
]


@pytest.mark.parametrize(("task", "verdict", "words"), FAULTS)
def test_each_fault_is_named(task: Task, verdict: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_GRACE", 0.5)
    part = children.run(task)
    assert part.verdict == verdict and part.said.startswith(words), part.said


@pytest.mark.parametrize("fault", ["knows no documents", "not a number", "leaks a little"])
def test_a_planted_wrong_kernel_fails(fault: str) -> None:
    import faulty_parts

    problem = faulty_parts.wrong_kernel(SHAPE, fault)["problem"]
    assert ("the content of another document" if fault == "leaks a little" else "differ from explicit") in problem


@pytest.mark.parametrize(("mantissa", "verdict"), [(23, "pass"), (10, "fail")])
def test_products_in_fewer_bits_than_the_dtypes_are_found_out(mantissa: int, verdict: str) -> None:
    """TF32 in the place of fp32, say."""
    a, b = torch.randn(128, 4096), torch.randn(4096, 128)

    def cut(x: torch.Tensor) -> torch.Tensor:  # rounded to so many bits
        less = 23 - mantissa
        half = (1 << less) // 2
        return ((x.view(torch.int32) + half) & -(1 << less)).view(torch.float32)

    exact = a.double() @ b.double()
    error = ((exact - cut(a) @ cut(b)).abs().max() / exact.abs().max()).item()
    found = products.judged([product(error=error)], "float32", None)
    assert ("is wrong by" in found["problem"]) == (verdict == "fail")


# what a certificate says


def product(**other: Any) -> dict[str, Any]:
    sizes = {"m": 128, "k": 4096, "n": 128, "count": 1}
    return {"name": "q", **sizes, "error": 0.0, "times": [1.0], **other}


def step(**other: Any) -> dict[str, Any]:
    plan = {"least": 1 << 30, "most": 2 << 30, "seconds": 4.0}
    row = {"model": "0.6B", "method": "full", "N": "2", "bf16": "yes"}
    return {
        "row": row, "tokens": 16000, "seconds": 2.0, "mfu": 0.5, "losses": [1.0], "peak_memory_gib": 1.5,
        "plan": plan, **other,
    }  # fmt: skip


def losses(name: str = "the trainer", **other: Any) -> dict[str, Any]:
    return {"name": name, "losses": [2.0, 1.0], "norms": [1.0, 1.0], **other}


JUDGED: list[tuple[Callable[[], str], str]] = [
    (lambda: products.judged([product()], "float32", 1e3)["problem"], ""),
    (lambda: products.judged([product(error=9.0)], "float32", None)["problem"], "is wrong by 9.0e+00"),
    (lambda: products.judged([product(error=None)], "float32", None)["problem"], "is wrong by inf"),
    (lambda: products.judged([product(times=[1e-9])], "float32", 989.4)["problem"], "above the data sheet's 989.4"),
    (lambda: training.judged(step(), True)["problem"], ""),
    (lambda: training.judged(step(losses=[1.0, None]), True)["problem"], "not finite"),
    (lambda: training.judged(step(peak_memory_gib=2.5), True)["problem"], "more than the 2.00 that were planned"),
    (lambda: training.judged(step(peak_memory_gib=2.5), False)["problem"], ""),
    (lambda: training.judged(step(mfu=1.1), True)["problem"], "faster than the data sheet allows"),
    (lambda: parity([losses(), losses("the loop")])[0], ""),
    (lambda: parity([losses(), losses("the loop", losses=[2.0, 1.0001])])[0], "losses of the loop and the trainer"),
    (lambda: parity([losses(), losses("the loop", norms=[1.0, 1.01])])[0], "norms of the loop"),
    (lambda: parity([losses(), losses("the loop", losses=[2.0, None])])[0], "differ by inf"),
    (lambda: parity([losses(), losses("the loop", losses=[2.0])])[0], "differ by inf"),
]


@pytest.mark.parametrize(("problem", "expected"), JUDGED)
def test_a_number_beyond_its_limit_fails(problem: Callable[[], str], expected: str) -> None:
    assert expected in problem() if expected else problem() == ""


def test_what_is_said_has_the_rates() -> None:
    assert products.judged([product()], "float32", None)["tflops"] == 2e-12 * 128 * 4096 * 128
    said = training.judged(step(), True)["said"]
    assert said.startswith("step_ms 2,000, toks/s 8,000, mfu 50.0%, peak_mem 1.50, planned_ms 4,000, ")


def passed(name: str, **found: Any) -> Part:
    return Part(name, "pass", "", 1.0, found)


def test_the_widest_dtype_that_is_hardly_slower_is_recommended_unless_it_is_wrong() -> None:
    rates = {"bfloat16": 10.9, "float16": 10.5, "float32": 10.0}
    gemms = [passed(f"gemm/0.6B/{dtype}", dtype=dtype, tflops=rate) for dtype, rate in rates.items()]
    assert best_dtype(gemms)[0] == "float32"
    assert best_dtype([*gemms[:2], replace(gemms[2], verdict="fail")])[0] == "bfloat16"
    assert best_dtype([]) == ("", {})


def test_the_fastest_backend_is_right_repeatable_and_needs_no_explicit_scores() -> None:
    def backend(name: str, ms: float, group: str = "0.6B/float32/1024", **other: Any) -> Part:
        found = {"repeatable": True, "explicit": False, **other}
        return passed(f"attention/{name}/{group}", backend=name, ms=ms, **found)

    parts = [
        backend("chunked", 3.0), backend("eager", 0.1, explicit=True), backend("sdpa", 1.0),
        backend("flex", 0.1, repeatable=False), backend("flash", 0.1, "0.6B/float32/4096"),
        backend("sdpa", 0.1, "0.6B/float16/1024"), replace(backend("triton", 0.1), verdict="fail"),
    ]  # fmt: skip
    assert [one["backend"] for one in rankings(parts)["0.6B/float32/1024"]] == ["sdpa", "chunked"]
    found = conclusions([replace(parts[-1], name="attention/a/b/float32/1")])[0]
    assert (found.name, found.verdict) == ("conclusion/attention/b/float32/1", "fail")


def test_a_machine_is_described_by_its_cards_or_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "device_name", lambda _: ("AMD MI100", "gfx908:sramecc+", 120))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=32 << 30))
    monkeypatch.setattr(machine, "_driver", lambda: "amdgpu 6.4")
    card, cpu = describe(torch.device("cuda"), 3), describe(CPU, 3)
    assert (card.device, card.arch, card.compute_units) == ("AMD MI100", "gfx908:sramecc+", 120)
    assert (card.memory, card.cards, card.driver) == (32 << 30, 3, "amdgpu 6.4")
    assert cpu.device.startswith("CPU: ") and (cpu.memory, cpu.cards, cpu.driver) == (0, 2, "")


def test_several_parts_together_give_conclusions() -> None:
    found = conclusions([passed("gemm/x", dtype="float32", tflops=3.0)])
    assert [(part.name, part.verdict) for part in found] == [("conclusion/dtype", "pass"), ("conclusion/end", "pass")]
    assert found[0].said.startswith('training.mixed_precision_param = "float32" is recommended')
    ended = conclusions(
        [passed("a"), replace(passed("b"), verdict="fail"), replace(passed("c"), verdict="not run")], True
    )
    assert summary(ended) == "unfinished: it was interrupted; 1 failed: b; 1 not run: c"
    assert [part.said for part in conclusions([passed("a")])] == ["all passed"] != [summary([passed("a")])]


def test_the_page_has_a_row_for_each_step_and_the_stored_certificate_is_of_this_format(tmp_path: Path) -> None:
    parts = [passed(f"steps/{seconds}", **training.judged(step(seconds=seconds), True)) for seconds in (4.0, 2.0, 8.0)]
    lines = [asdict(Header(4, "2027-01-31 10:00 UTC", 25, TWO)), *map(asdict, parts)]
    (tmp_path / "certificate.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "certificate.jsonl") == (Header(4, "2027-01-31 10:00 UTC", 25, TWO), parts)
    assert " 2,000 | 8,000 | 50.0% | 1.50 | 4,000 | 1.00 to 2.00 |" in page(Header(4, "", 25, TWO), parts)
    for stored in (REPO / "certificates").glob("*/certificate.jsonl"):
        header, parts = read(stored)
        assert page(header, parts) == stored.with_name("certificate.md").read_text()


def test_products_and_bandwidth_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "init_distributed", lambda: SimpleNamespace(device=CPU))
    monkeypatch.setitem(products._ARRAY, False, 1 << 12)
    gemm = products.gemm("debug", 8, "float32")
    assert {one["name"] for one in gemm["products"]} == {"forward", "input's gradient", "weight's gradient"}
    assert (gemm["model"], gemm["problem"], products.bandwidth()["problem"]) == ("debug", "", "")


def test_a_reserved_port_is_for_the_server_that_names_it_alone() -> None:
    """Once a port was only asked for; before rank 0 listened on it, the kernel had given it to another job."""
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        TCPStore("127.0.0.1", port, is_master=False).set("name", "value")
        assert store.get("name") == b"value"
