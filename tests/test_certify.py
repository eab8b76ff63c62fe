"""Certificates: parts that go wrong are named and end nothing else, verdicts follow from numbers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPO, job_environment
from torch.distributed import TCPStore

from titan_mi100.config.srun import reserved_port
from titan_mi100.parallel import distributed
from titan_mi100.run import machine
from titan_mi100.run.machine import Machine, describe
from titan_mi100.workshop import certify
from titan_mi100.workshop.measure import children, collectives, products, tasks, training
from titan_mi100.workshop.measure.children import Task
from titan_mi100.workshop.measure.page import page
from titan_mi100.workshop.measure.parts import Header, Part, best_dtype, conclusions, parity, rankings, read, summary

CPU = torch.device("cpu")
SHAPE = {"batch": 2, "seq": 40, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
TWO = Machine("MI100", "gfx908:sramecc+", 120, 32 << 30, 2, "", "2.8.0+rocm6.4", "hip 6.4", "", "", "", "")
SDPA = Task(
    "attention/sdpa/debug/float32/40",
    "titan_mi100.workshop.measure.attention:measure",
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


def test_each_fault_is_named_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "certificate"
    monkeypatch.setattr(tasks, "tasks", lambda *_: [task for task, *_ in FAULTS])
    monkeypatch.setattr(children, "_GRACE", 0.5)
    monkeypatch.setattr(children, "MACHINE", faulty("machine", "machine"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own handlers stay
    assert certify.main(["--output", str(folder), "--minutes", "5"]) == 1
    header, parts = read(folder / "certificate.jsonl")
    said = {part.name: (part.verdict, part.said) for part in parts}
    for task, verdict, words in FAULTS:
        assert said[task.name][0] == verdict and said[task.name][1].startswith(words), said[task.name]
    assert said["conclusion/attention/debug/float32/40"][1].startswith("the fastest that is right: sdpa ")
    assert said["conclusion/end"][0] == "fail" and "11 failed: bandwidth/crash, " in said["conclusion/end"][1]
    assert page(header, parts) == (folder / "certificate.md").read_text()


@pytest.mark.parametrize("fault", ["knows no documents", "not a number", "leaks a little"])
def test_a_planted_wrong_kernel_fails(fault: str) -> None:
    import faulty_parts

    problem = faulty_parts.wrong_kernel(SHAPE, fault)["problem"]
    assert ("the content of another document" if fault == "leaks a little" else "differ from explicit") in problem


def test_what_has_no_time_left_is_named_and_what_is_cut_off_is_no_hang() -> None:
    late = children.run(SDPA, lambda: -1)
    assert (late.verdict, late.seconds) == ("not run", 0.0)
    left = iter([1.0, 1.0])
    cut = children.run(faulty("bandwidth/hang", "hang", seconds=60), lambda: next(left, 0.0))
    assert cut.verdict == "not run" and "because the time for this kind of part ended" in cut.said
    assert children.run(replace(SDPA, refused="one card"), lambda: 60).verdict == "unavailable"


def test_a_slow_kind_leaves_the_others_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, parts = [0.0], list[Part]()

    def run(task: Task, time_left: Callable[[], float]) -> Part:  # 100 seconds each
        took = min(100.0, max(0.0, time_left()))
        clock[0] += took
        return Part(task.name, "pass" if took else "not run", "", took)

    monkeypatch.setattr(certify, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(children, "run", run)
    slow = [Task(f"{kind}/a/{number}", "") for kind in tasks.SHARES for number in range(9)]
    certify.measure(slow, 25, tmp_path, parts, [])
    ran = [sum(part.verdict == "pass" for part in parts if part.kind == kind) for kind in tasks.SHARES]
    assert ran == [6, 2, 1, 5, 2, 2] and clock == [1500]
    assert "; 36 not run: attention/a/6, attention/a/7, " in summary(parts)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "send_recv"])
def test_a_collective_that_moves_nothing_is_found_out(operation: str, world: Any) -> None:
    nothing = collectives._transfer(operation, (1, 0), 0, 8, CPU)._replace(call=lambda: None)
    wrong, seconds = collectives._times(nothing, CPU)
    assert wrong > 0 and len(seconds) == 5
    transfer = collectives._transfer(operation, (0,), 0, 8, CPU)
    if operation != "send_recv":
        assert collectives._times(transfer, CPU)[0] == 0
    if operation in ("all_gather", "reduce_scatter"):  # what is left of an earlier round is no result
        rounds = iter([transfer.call])
        late = transfer._replace(call=lambda: next(rounds, lambda: None)())
        assert collectives._times(late, CPU)[0] > 0


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_command_that_ends_early_keeps_what_it_measured(number: int, code: int, tmp_path: Path) -> None:
    program = (
        "import sys; from titan_mi100.workshop import certify\n"
        "from titan_mi100.workshop.measure.children import Task as T\n"
        "one, *rest = [T(f'bandwidth/{n}', f'faulty_parts:{n}') for n in ('machine','wrong_numbers','hang','fail')]\n"
        "certify.children.MACHINE, certify.tasks.tasks = one, lambda *_: rest; sys.exit(certify.main(sys.argv[1:]))"
    )
    command, path = [sys.executable, "-c", program, "--output", "made"], tmp_path / "made" / "certificate.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=job_environment(), stderr=subprocess.PIPE, text=True) as process:
        limit, running = time.monotonic() + 60, Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not path.exists() or path.read_text().count("\n") < 2 or not (started := running.read_text().split()):
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    while any(map(is_running, started)):  # one that was just being started finds its parent gone
        assert time.monotonic() < limit
        time.sleep(0.05)
    with path.open("a") as file:
        file.write('{"name": "cut o')
    header, parts = read(path)
    assert parts[0].said == "5 elements are wrong; copy 1 GB/s" and summary(parts).startswith("unfinished: ")
    if number == signal.SIGKILL:
        assert len(parts) == 1 and "**unfinished: the command was killed.**" in page(header, parts)
    else:
        assert [(part.verdict, part.said) for part in parts[1:3]] == [("not run", "interrupted")] * 2
        assert "**unfinished: it was interrupted; 1 failed: " in (tmp_path / "made" / "certificate.md").read_text()


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


# what a certificate says


def product(**other: Any) -> dict[str, Any]:
    sizes = {"m": 128, "k": 4096, "n": 128, "count": 1}
    return {"name": "q", **sizes, "error": 0.0, "times": [1.0], **other}


def transfer(**other: Any) -> dict[str, Any]:
    return {"size": 1 << 20, "ranks": [0, 1], "wrong": 0, "times": [1.0], **other}


def step(**other: Any) -> dict[str, Any]:
    plan = {"least": 1 << 30, "most": 2 << 30, "seconds": 4.0}
    row = {"model": "0.6B", "method": "full", "N": "2", "bf16": "yes"}
    return {
        "row": row, "tokens": 16000, "seconds": 2.0, "mfu": 0.5, "losses": [1.0], "peak_memory_gib": 1.5,
        "comm_ms": 5.0, "plan": plan, **other,
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
    (lambda: training.judged(step(), True)["problem"], ""),
    (lambda: training.judged(step(losses=[1.0, None]), True)["problem"], "not finite"),
    (lambda: training.judged(step(peak_memory_gib=2.5), True)["problem"], "more than the 2.00 that were planned"),
    (lambda: training.judged(step(peak_memory_gib=2.5), False)["problem"], ""),
    (lambda: training.judged(step(mfu=1.1), True)["problem"], "faster than the data sheet allows"),
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
    names = ("all_reduce", "all_gather", "send_recv")
    assert [collectives.bus_gbs(name, 4 * 10**9, 4, [1.0]) for name in names] == [6, 3, 4]
    said = training.judged(step(), True)["said"]
    assert said.startswith("step_ms 2,000, toks/s 8,000, mfu 50.0%, peak_mem 1.50, comm_ms 5, planned_ms 4,000, ")


def passed(name: str, **found: Any) -> Part:
    return Part(name, "pass", "", 1.0, found)


METHODS = ("full", "full, lean", "LoRA", "QLoRA")
SHORT = passed("attention/sdpa/0.6B/bfloat16/1024", backend="sdpa", ms=1.0, repeatable=True, explicit=False)


def test_the_widest_dtype_that_is_hardly_slower_is_recommended_unless_it_is_wrong() -> None:
    rates = {"bfloat16": 10.9, "float16": 10.5, "float32": 10.0}
    gemms = [passed(f"gemm/0.6B/{dtype}", model="0.6B", dtype=dtype, tflops=rate) for dtype, rate in rates.items()]
    assert best_dtype(gemms)[0] == "float32"
    assert best_dtype([*gemms[:2], replace(gemms[2], verdict="fail")])[0] == "bfloat16"
    other = passed("gemm/device 1", model="", dtype="bfloat16", tflops=99.0)
    assert best_dtype([*gemms, other]) == best_dtype(gemms)
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
    found = conclusions([passed("gemm/x", model="x", dtype="float32", tflops=3.0)])
    assert [(part.name, part.verdict) for part in found] == [("conclusion/dtype", "pass"), ("conclusion/end", "pass")]
    assert found[0].said.startswith('training.mixed_precision_param = "float32" is recommended')
    alone = passed("parity/one rank", runs=[losses("one rank", ranks=1, losses=[2.0, 1.1])])
    found = conclusions([alone, passed("parity/2 ranks", runs=[losses()])])
    assert (found[0].name, found[0].verdict) == ("conclusion/parity", "fail")
    assert [part.said for part in conclusions([alone])] == ["all passed"]


def test_the_page_has_a_row_for_each_step_and_the_stored_certificate_is_of_this_format(tmp_path: Path) -> None:
    parts = [passed(f"steps/{seconds}", **training.judged(step(seconds=seconds), True)) for seconds in (4.0, 2.0, 8.0)]
    lines = [asdict(Header(4, "2027-01-31 10:00 UTC", 25, TWO)), *map(asdict, parts)]
    (tmp_path / "certificate.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "certificate.jsonl") == (Header(4, "2027-01-31 10:00 UTC", 25, TWO), parts)
    assert " 2,000 | 8,000 | 50.0% | 1.50 | 5 | 4,000 | 1.00 to 2.00 |" in page(Header(4, "", 25, TWO), parts)
    for stored in (REPO / "certificates").glob("*/certificate.jsonl"):
        header, parts = read(stored)
        assert page(header, parts) == stored.with_name("certificate.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "qwen3-0.6"], "invalid choice: 'qwen3-0.6'"),
        (["--minutes", "0"], "must be a number above 0"),
        (["--output", "/proc/here"], "cannot be written to (No such file or directory); name another --output"),
        (["--output", str(REPO / "docs")], "exists already, and is not overwritten"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_what_matters_most_is_measured_first() -> None:
    every = list(tasks.tasks(TWO, [], []))
    names = [task.name for task in every]
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(name.split("/")[0] for name in names)) == list(tasks.SHARES)
    attention = [name.split("/", 3)[3] for name in names if name.startswith("attention/")]
    assert list(dict.fromkeys(attention)) == [
        *(f"{dtype}/{seq}" for dtype in ("bfloat16", "float16") for seq in (1024, 4096, 16384)), "float32/1024",
    ]  # fmt: skip
    steps = [task for task in every if task.name.startswith("steps/")]
    assert tuple(task.name.split("/")[2] for task in steps[:4]) == METHODS
    cards = [(task.name, task.card) for task in tasks.tasks(replace(TWO, cards=3), [], []) if "/device " in task.name]
    assert cards[:3] == [("bandwidth/device 0", 0), ("gemm/device 1", 1), ("bandwidth/device 1", 1)] and len(cards) == 5


def test_a_card_gets_the_models_that_fit_it_by_plan() -> None:
    one = replace(TWO, cards=1)
    rows = [(*task.name.split("/")[1:], task.refused) for task in tasks.tasks(one, [], []) if "steps/" in task.name]
    methods = rows[: -len(tasks._VARIANTS) + 2]  # without pipeline and DDP, which need several cards
    fitting = [[model for model, method, _, refused in methods if method == name and not refused] for name in METHODS]
    assert fitting == [["0.6B", "1.7B"], ["0.6B", "4B"], ["0.6B", "8B"], ["0.6B", "8B"]]
    refused = [(model, method) for model, method, _, refused in methods if refused.startswith("does not fit: ")]
    assert refused == [("4B", "full"), ("8B", "full"), ("8B", "full, lean")]
    every = {task.name: task for task in tasks.tasks(TWO, ["0.6B", "1.7B", "4B"], [SHORT])}
    row = every["steps/4B/full, lean/pp m=1 GA=8 full bfloat16"]  # the largest that fits
    assert row.processes == 2 and row.arguments["changes"][-1] == {"model": {"attention_backend": "sdpa"}}
    assert sum(name.startswith("steps/") for name in every) == 12 + len(tasks._VARIANTS)
    alone = {task.name: task.refused for task in tasks.tasks(one, [], [])}
    assert alone["collective/all_reduce"] == "needs two cards; this machine has one" and not alone["parity/one rank"]


def test_a_backend_gets_long_rows_after_short_ones() -> None:
    explicit = replace(SHORT, found={**(SHORT.found or {}), "explicit": True})
    for short, why in ((SHORT, ""), (explicit, "S x S scores"), (replace(SHORT, verdict="fail"), "fail")):
        found = {task.name: task.refused for task in tasks.tasks(TWO, [], [short])}
        assert found["attention/sdpa/0.6B/bfloat16/16384"].removeprefix("not tried in longer rows: ") == why
        assert found["attention/sdpa/0.6B/float16/4096"] == ""
    names = [task.name for task in tasks.tasks(TWO, [], [replace(SHORT, verdict="unavailable")])]
    assert not {f"attention/sdpa/0.6B/bfloat16/{seq}" for seq in (4096, 16384)} & {*names}


def test_a_step_of_each_method_runs(monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
    monkeypatch.setattr(training, "init_distributed", lambda: world)
    alone = replace(TWO, memory=0, cards=1)
    every = [task.arguments for task in tasks.tasks(alone, [], []) if task.name.startswith("steps/")]
    assert tuple(one["row"]["method"] for one in every[:4]) == METHODS
    for asked in every:
        found = training.steps(asked["row"], [*asked["changes"], {"training": {"seq_len": 32}}])
        assert found["problem"] == "" and found["tokens_per_second"] > 0 and found["tokens"] == 64


def test_each_pair_of_ranks_sends_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "init_distributed", lambda: SimpleNamespace(device=CPU, rank=0, size=2))
    monkeypatch.setattr(collectives, "_times", lambda *_: (0, [1.0]))
    found = collectives.measure("send_recv", [64])["transfers"]
    assert [transfer["ranks"] for transfer in found] == [[0, 1], [1, 0]]


def test_a_product_of_another_card_is_not_the_models_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "init_distributed", lambda: SimpleNamespace(device=CPU))
    monkeypatch.setitem(products._ARRAY, False, 1 << 12)
    whole = products.gemm("debug", 8, "float32")
    other = products.gemm("debug", 8, "float32", most_frequent=True)
    assert len(other["products"]) == 3 and (whole["model"], other["model"]) == ("debug", "")
    assert [found["problem"] for found in (whole, other, products.bandwidth())] == [""] * 3


def test_the_command_itself_imports_no_torch() -> None:
    """A broken driver can crash or hang the process that imports it."""
    code = "import sys, titan_mi100.workshop.certify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=job_environment()).returncode == 0


@pytest.mark.full
def test_the_whole_command_on_a_cpu(tmp_path: Path) -> None:
    # the last part of each kind; every part is a process that imports torch
    code = "import sys; from titan_mi100.workshop.measure import tasks; every = tasks.tasks\n"
    code += "tasks.tasks = lambda *a: {t.name.split('/')[0]: t for t in every(*a)}.values()\n"
    code += "from titan_mi100.workshop.certify import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--output", str(tmp_path / "made"), "--minutes", "8"]
    environment = job_environment()
    environment.pop("TRITON_INTERPRET", None)  # the tests' own
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    _, parts = read(tmp_path / "made" / "certificate.jsonl")
    # whether this machine computes right is the certificate's matter, not the test's
    assert ended.returncode == (0 if summary(parts) == "all passed" else 1), ended.stdout + ended.stderr
    assert {part.kind for part in parts if part.found} == tasks.SHARES.keys()
    assert os.listdir(tmp_path) == ["made"]


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
