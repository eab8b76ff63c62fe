"""Certificates: parts that go wrong are named and end nothing else, verdicts follow from numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPO, job_environment

from titan_mi100.parallel import distributed
from titan_mi100.run import machine
from titan_mi100.run.machine import Machine, describe
from titan_mi100.tools import certify
from titan_mi100.tools.measure import children, collectives, products, tasks, training
from titan_mi100.tools.measure.children import Task
from titan_mi100.tools.measure.page import page
from titan_mi100.tools.measure.parts import Certificate, Part, best_dtype, conclusions, parity, ranking

CPU = torch.device("cpu")
SHAPE = {"batch": 2, "seq": 40, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
SDPA = Task(
    "attention/sdpa/debug/float32", "titan_mi100.tools.measure.attention:measure", {"name": "sdpa", "shape": SHAPE}
)


def faulty(name: str, function: str, **options: Any) -> Task:
    return Task(name, f"faulty_parts:{function}", **options)


def wrong(fault: str) -> Task:
    arguments = {"shape": SHAPE, "fault": fault}
    return faulty(f"attention/{fault}/debug/float32", "wrong_kernel", arguments=arguments)


FAULTS = [
    faulty("bandwidth/crash", "crash"),
    faulty("bandwidth/killed", "killed"),
    faulty("bandwidth/hang", "hang", seconds=1),
    faulty("bandwidth/leave", "leave"),
    faulty("bandwidth/wrong", "wrong_numbers"),
    faulty("bandwidth/one rank hangs", "one_rank_hangs", processes=2, seconds=1),
    faulty("bandwidth/one rank crashes", "one_rank_crashes", processes=2, seconds=60),
    faulty("bandwidth/fail", "fail"),
    faulty("attention/fails/debug/float32", "fail", optional=True),
    faulty("attention/absent/debug/bfloat16", "refuse"),
    faulty("attention/absent/debug/float32", "crash"),  # not started: what is absent is absent in every dtype
    wrong("wrong gradient"),
    SDPA,
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Exit code and folder of the command, on parts of which most go wrong."""
    folder = tmp_path_factory.mktemp("made") / "certificate"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "before_steps", lambda *_: FAULTS)
        patch.setattr(tasks, "steps", lambda *_: [])
        patch.setattr(children, "_GRACE", 0.5)
        patch.setattr(certify, "machine_here", lambda: describe(CPU, 1))  # a child's answer takes seconds
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        return certify.main(["--output", str(folder), "--minutes", "5"]), folder


def test_each_fault_is_named_and_the_rest_is_measured(made: tuple[int, Path]) -> None:
    code, folder = made
    assert code == 1
    certificate = parsed(folder)
    said = {part.name: (part.verdict, part.said) for part in (*certificate.parts, *certificate.conclusions)}
    assert said["bandwidth/crash"] == ("fail", "killed: SIGABRT")
    assert said["bandwidth/killed"] == ("fail", "killed: SIGKILL, most likely because memory ran out")
    assert said["bandwidth/hang"] == ("fail", "hung: did not end within 1 s")
    assert said["bandwidth/leave"] == ("fail", "crashed: exit code 3 without a result: no device")
    assert said["bandwidth/wrong"] == ("fail", "5 elements are wrong; copy 1 GB/s")
    assert said["bandwidth/one rank hangs"] == ("fail", "hung: did not end within 1 s")
    assert said["bandwidth/one rank crashes"] == ("fail", "killed: rank 1: SIGABRT")
    assert said["bandwidth/fail"] == ("fail", "failed: RuntimeError: no kernel image")
    assert said["attention/fails/debug/float32"] == ("unavailable", "RuntimeError: no kernel image")
    for dtype in ("bfloat16", "float32"):
        assert said[f"attention/absent/debug/{dtype}"] == ("unavailable", "its package is not installed")
    verdict, words = said["attention/wrong gradient/debug/float32"]
    assert verdict == "fail" and "differ from explicit attention by " in words
    assert said[SDPA.name][0] == "pass"
    assert said["conclusion/attention/float32"][1].startswith("the fastest that is right: sdpa ")
    assert page(certificate) == (folder / "certificate.md").read_text()


@pytest.mark.parametrize("fault", ["knows no documents", "not a number", "leaks a little"])
def test_a_planted_wrong_kernel_fails(fault: str) -> None:
    import faulty_parts

    problem = faulty_parts.wrong_kernel(SHAPE, fault)["problem"]
    assert ("the content of another document" if fault == "leaks a little" else "differ from explicit") in problem


def test_running_out_of_memory_is_a_result_of_its_own() -> None:
    ended = children.run(faulty("bandwidth/memory", "out_of_memory"), time.monotonic() + 60)
    assert (ended.verdict, ended.said) == ("fail", "out of memory: MemoryError: 16 GiB")


def test_what_has_no_time_left_is_named_and_what_is_cut_off_is_no_hang() -> None:
    late = children.run(SDPA, time.monotonic() - 1)
    assert (late.verdict, late.seconds) == ("not run", 0.0)
    cut = children.run(faulty("bandwidth/hang", "hang", seconds=60), time.monotonic() + 0.5)
    assert cut.verdict == "not run" and "because the time for this kind of part ended" in cut.said
    assert children.run(replace(SDPA, refused="one card"), time.monotonic() + 60).verdict == "unavailable"


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_that_moves_nothing_is_found_out(operation: str, world: Any) -> None:
    _, check = collectives._collective(operation, 0, 2, 8, CPU)
    wrong, seconds = collectives._times(lambda: None, check, CPU)
    assert wrong > 0 and len(seconds) == 5
    call, check = collectives._collective(operation, 0, 1, 8, CPU)
    assert collectives._times(call, check, CPU)[0] == 0
    if operation != "all_reduce":  # what is left of an earlier round is no result; a sum over one rank needs no call
        rounds = iter([call])
        assert collectives._times(lambda: next(rounds, lambda: None)(), check, CPU)[0] > 0


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


def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_mi100.tools.certify", "--output", str(tmp_path / "made")]
    with subprocess.Popen(command, cwd=tmp_path, env=job_environment(), stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not (started := children_of(process.pid)):
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors
    assert list(tmp_path.iterdir()) == []
    while any(map(is_running, started)):  # one that was just being started finds its parent gone
        assert time.monotonic() < limit
        time.sleep(0.05)


def children_of(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


# what a certificate says


def parsed(folder: Path) -> Certificate:
    content = json.loads((folder / "certificate.json").read_text())
    parts, conclusions = ([Part(**part) for part in content.pop(key)] for key in ("parts", "conclusions"))
    return Certificate(**{**content, "machine": Machine(**content["machine"])}, parts=parts, conclusions=conclusions)


def product(**other: Any) -> dict[str, Any]:
    sizes = {"m": 128, "k": 4096, "n": 128, "count": 1}
    return {"name": "q", **sizes, "error": 0.0, "times": [1.0], **other}


def transfer(**other: Any) -> dict[str, Any]:
    return {"size": 1 << 20, "ranks": [0, 1], "wrong": 0, "times": [1.0], **other}


def step(**other: Any) -> dict[str, Any]:
    plan = {"least": 1 << 30, "most": 2 << 30, "seconds": 4.0}
    return {
        "model": "0.6B", "layout": "fsdp2", "ranks": 2, "batch": 1, "ga": 8, "seq": 1024, "checkpointing": "full",
        "dtype": "bfloat16", "attention": "sdpa", "tokens": 16000, "flops": 1e14, "times": [1.0, 2.0, 9.0],
        "losses": [1.0], "peak_memory_gib": 1.5, "comm_ms": [3.0, 5.0], "exposed_ms": [1.0, 2.0], "plan": plan, **other,
    }  # fmt: skip


def losses(name: str = "fsdp2 on 2", **other: Any) -> dict[str, Any]:
    return {"name": name, "ranks": 2, "losses": [2.0, 1.0], "norms": [1.0, 1.0], **other}


JUDGED: list[tuple[Callable[[], str], str]] = [
    (lambda: products.judged([product()], "float32", 1e3)["problem"], ""),
    (lambda: products.judged([product(error=9.0)], "float32", None)["problem"], "is wrong by 9.0e+00"),
    (lambda: products.judged([product(error=None)], "float32", None)["problem"], "is wrong by inf"),
    (lambda: products.judged([product(times=[1e-9])], "float32", 989.4)["problem"], "above the data sheet's 989.4"),
    (lambda: collectives.judged("all_reduce", [transfer()])["problem"], ""),
    (lambda: collectives.judged("send_recv", [transfer(), transfer(wrong=1)])["problem"], "1 elements are wrong"),
    (lambda: training.judged(step(), 184.6, True)["problem"], ""),
    (lambda: training.judged(step(losses=[1.0, None]), None, True)["problem"], "not finite"),
    (lambda: training.judged(step(peak_memory_gib=2.5), None, True)["problem"], "more than the 2.00 that were planned"),
    (lambda: training.judged(step(peak_memory_gib=2.5), None, False)["problem"], ""),
    (lambda: training.judged(step(flops=1e15), 184.6, True)["problem"], "faster than the data sheet allows"),
    (lambda: parity([losses(), losses("ddp on 2")])[0], ""),
    (lambda: parity([losses(), losses("ddp on 2", losses=[2.0, 1.0001])])[0], "losses of ddp on 2 and fsdp2 on 2"),
    (lambda: parity([losses(), losses("ddp on 2", norms=[1.0, 1.01])])[0], "norms of ddp on 2"),
    (lambda: parity([losses(), losses("ddp on 2", losses=[2.0, None])])[0], "differ by inf"),
    (lambda: parity([losses(), losses("ddp on 2", losses=[2.0])])[0], "differ by inf"),
]


@pytest.mark.parametrize(("problem", "expected"), JUDGED)
def test_a_number_beyond_its_limit_fails(problem: Callable[[], str], expected: str) -> None:
    assert expected in problem() if expected else problem() == ""


def test_what_is_said_has_the_rates() -> None:
    assert products.judged([product()], "float32", None)["tflops"] == 2e-12 * 128 * 4096 * 128
    said = collectives.judged("all_reduce", [transfer(), transfer(times=[0.5])])["said"]
    assert said == "bus bandwidth 1.0 MB: 0.00105 to 0.0021 GB/s"
    rates = [
        collectives.bus_gbs(name, 4 << 30, 4, [1.0]) / 2**32 * 1e9 for name in ("all_reduce", "all_gather", "send_recv")
    ]
    assert rates == [1.5, 0.75, 1.0]
    said = training.judged(step(), None, True)["said"]
    assert "2,000 ms a step, 8,000 tokens/s" in said and "(-50%)" in said
    assert "1.50 GiB at the peak, planned 1.00 to 2.00" in said and "5 ms in collectives, 2 exposed" in said


def passed(name: str, **found: Any) -> Part:
    return Part(name, "pass", "", 1.0, found)


def test_the_widest_dtype_that_is_hardly_slower_is_recommended_unless_it_is_wrong() -> None:
    rates = {"bfloat16": 10.9, "float16": 10.5, "float32": 10.0}
    gemms = [passed(f"gemm/0.6B/{dtype}", model="0.6B", dtype=dtype, tflops=rate) for dtype, rate in rates.items()]
    assert best_dtype(gemms)[0] == "float32"
    assert best_dtype([*gemms[:2], replace(gemms[2], verdict="fail")])[0] == "bfloat16"
    other = passed("gemm/device 1", model="0.6B", dtype="bfloat16", tflops=99.0, card=1)
    assert best_dtype([*gemms, other]) == best_dtype(gemms)
    assert best_dtype([]) == ("", {})


def test_the_fastest_backend_is_right_repeatable_and_needs_no_explicit_scores() -> None:
    def backend(name: str, ms: float, **other: Any) -> Part:
        found = {"dtype": "float32", "heads": 4, "head_dim": 16, "repeatable": True, "explicit": False, **other}
        return passed(f"attention/{name}", backend=name, ms=ms, **found)

    parts = [
        backend("chunked", 3.0), backend("eager", 0.1, explicit=True), backend("sdpa", 1.0),
        backend("flex", 0.1, repeatable=False), backend("flash", 0.1, head_dim=32),
        backend("sdpa", 0.1, dtype="float16"), replace(backend("triton", 0.1), verdict="fail"),
    ]  # fmt: skip
    assert [one["backend"] for one in ranking(parts, "float32")] == ["sdpa", "chunked"]
    assert [(part.name, part.verdict) for part in conclusions([replace(parts[-1], name="attention/a/b/float32")])] == [
        ("conclusion/attention/float32", "fail")
    ]


def test_a_machine_is_described_by_its_cards_or_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "device_name", lambda _: ("AMD MI100", "gfx908:sramecc+", 120))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=32 << 30))
    monkeypatch.setattr(machine, "_driver", lambda: "amdgpu 6.4")
    card, cpu = describe(torch.device("cuda"), 3), describe(CPU, 3)
    assert (card.device, card.arch, card.compute_units) == ("AMD MI100", "gfx908:sramecc+", 120)
    assert (card.memory, card.cards, card.driver) == (32 << 30, 3, "amdgpu 6.4")
    assert cpu.device.startswith("CPU: ") and (cpu.memory, cpu.cards, cpu.driver) == (0, 2, "")


def test_the_recommended_dtype_is_a_conclusion() -> None:
    found = conclusions([passed("gemm/x", model="x", dtype="float32", tflops=3.0)])
    assert [(part.name, part.verdict) for part in found] == [("conclusion/dtype", "pass")]
    assert found[0].said.startswith('training.mixed_precision_param = "float32" is recommended')


def test_one_rank_and_several_are_compared() -> None:
    alone = passed("parity/one rank", runs=[losses("one rank", ranks=1, losses=[2.0, 1.1])])
    (found,) = conclusions([alone, passed("parity/2 ranks", runs=[losses()])])
    assert (found.name, found.verdict) == ("conclusion/parity", "fail")
    assert conclusions([alone]) == []


def test_the_page_has_the_columns_of_the_first_user() -> None:
    machine = Machine("MI100", "gfx908:sramecc+", 120, 32 << 30, 2, "", "", "", "", "", "", "")
    part = passed("steps/0.6B", **training.judged(step(), None, True))
    lines = page(Certificate(3, "today", 10.0, machine, [part], [])).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| model | layout"))
    assert lines[at].split(" | ")[3:11] == ["m", "step_ms", "toks/s", "peak_mem", "ckpt", "bf16", "GA", "comm_ms"]
    assert (
        lines[at + 2] == "| 0.6B | fsdp2 | 2 | 1 | 2,000 | 8,000 | 1.50 | full | yes | 8 | 5 | 4,000 | 1.00 to 2.00 |"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "qwen3-0.6"], "did you mean qwen3-0.6b?"),
        (["--minutes", "0"], "must be a number of minutes above 0"),
        (["--output", str(REPO / "docs")], "exists already, and is not overwritten"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_card_gets_the_rows_that_fit_it_by_plan() -> None:
    two = Machine("MI100", "gfx908:sramecc+", 120, 32 << 30, 2, "", "", "", "", "", "", "")
    rows = {task.name: task for task in tasks.steps(two, ["0.6B"], {"bfloat16": "chunked"})}
    row = rows["steps/0.6B/pp m=1 GA=8 full bfloat16"]
    assert row.processes == 2 and not row.refused and row.arguments["row"]["attention"] == "chunked"
    assert rows["steps/0.6B/fsdp2 m=1 GA=8 full float16"].arguments["row"]["attention"] == "auto"
    refused = [task.refused for task in tasks.steps(two, ["8B"], {})]
    assert refused[0].startswith("does not fit: ") and refused[0].endswith("GiB by plan, of 32.0")
    one = [task.name for task in tasks.steps(replace(two, cards=1), ["0.6B"], {})]
    assert one[0] == "steps/0.6B/one card m=1 GA=8 full bfloat16" and len(set(one)) == len(one)
    alone = {task.name: task.refused for task in tasks.before_steps(replace(two, cards=1), ["0.6B"])}
    for machine_, largest in ((two, 1 << 28), (replace(two, memory=0), 1 << 24)):
        sent = [task.arguments["sizes"] for task in tasks.before_steps(machine_, ["0.6B"]) if "sizes" in task.arguments]
        assert len(sent) == 4 and all(sizes == sorted(sizes) and sizes[-1] == largest for sizes in sent)
    assert alone["collective/all_reduce"] == "needs two cards; this machine has one" and not alone["parity/one rank"]


def test_memory_and_a_product_are_measured_on_each_card() -> None:
    three = Machine("MI100", "gfx908:sramecc+", 120, 32 << 30, 3, "", "", "", "", "", "", "")
    found = [(task.name, task.arguments.get("card", 0)) for task in tasks.before_steps(three, ["0.6B"])]
    for name in ("bandwidth/device {}", "gemm/device {}"):
        assert [each for each in found if each[0].startswith(name[:-2])] == [
            (name.format(card), card) for card in range(name.startswith("gemm"), 3)
        ]
    assert not [task for task in tasks.before_steps(replace(three, memory=0), ["debug"]) if "device 1" in task.name]


def test_each_pair_of_ranks_sends_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "use_device", lambda: CPU)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collectives, "_times", lambda *_: (0, [1.0]))
    found = collectives.measure("send_recv", [64])["transfers"]
    assert [transfer["ranks"] for transfer in found] == [[0, 1], [1, 0]]


def test_a_product_of_another_card_is_not_the_models_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "use_device", lambda _: CPU)
    whole = products.gemm("debug", 8, "float32", None)
    other = products.gemm("debug", 8, "float32", None, card=1, only="down")
    assert len(other["products"]) == 3 and other["card"] == 1 and "card" not in whole
    assert not whole["problem"] and not other["problem"]


def test_the_command_itself_imports_no_torch() -> None:
    """A broken driver can crash or hang the process that imports it."""
    code = "import sys, titan_mi100.tools.certify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=job_environment()).returncode == 0


@pytest.mark.full
def test_the_whole_command_on_a_cpu(tmp_path: Path) -> None:
    # one part of each kind, in one dtype; every part is a process that imports torch
    code = "import sys; from titan_mi100.tools.measure import tasks; tasks.DTYPES = ('float32',)\n"
    code += "every = tasks.before_steps; tasks._ROWS_ON_CPU = tasks._ROWS_ON_CPU[:1]\n"
    code += "tasks.before_steps = lambda *a: [*{t.name.split('/')[0]: t for t in reversed(every(*a))}.values()][::-1]\n"
    code += "from titan_mi100.tools.certify import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--output", str(tmp_path / "made"), "--minutes", "8"]
    environment = job_environment()
    environment.pop("TRITON_INTERPRET", None)  # the tests' own
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    certificate = parsed(tmp_path / "made")
    # whether this machine computes right is the certificate's matter, not the test's
    assert ended.returncode == (0 if certificate.all_pass else 1), ended.stdout + ended.stderr
    assert {part.kind for part in certificate.parts if part.found} == tasks.SHARES.keys()
    assert os.listdir(tmp_path) == ["made"]
