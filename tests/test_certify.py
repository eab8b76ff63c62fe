"""Certificates: parts that go wrong are named and end nothing else, verdicts follow from numbers."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, job_environment

from titan_mi100.files.schema import validated
from titan_mi100.run.machine import describe
from titan_mi100.tools import certify
from titan_mi100.tools.certificate import form
from titan_mi100.tools.certificate.form import Certificate, Machine
from titan_mi100.tools.certificate.page import page
from titan_mi100.tools.certificate.verdicts import all_pass, best_dtype, ranking, rates, verdicts
from titan_mi100.tools.measure import children, collectives, products, tasks
from titan_mi100.tools.measure.children import Task

CERTIFICATES = REPO / "certificates"
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
    faulty("bandwidth/no numbers", "no_numbers"),
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
    certificate = parsed(json.loads((folder / "certificate.json").read_text()))
    assert verdicts(certificate.machine, certificate.parts) == certificate.verdicts
    said = {verdict.of: (verdict.verdict, verdict.said) for verdict in certificate.verdicts}
    assert said["bandwidth/crash"] == ("fail", "killed: SIGABRT")
    assert said["bandwidth/killed"] == ("fail", "killed: SIGKILL, most likely because memory ran out")
    assert said["bandwidth/hang"] == ("fail", "hung: did not end within 1 s")
    assert said["bandwidth/leave"] == ("fail", "crashed: exit code 3 without a result: no device")
    assert said["bandwidth/no numbers"][0] == "fail" and "copy = 0.0 must be above 0" in said["bandwidth/no numbers"][1]
    assert said["bandwidth/one rank hangs"] == ("fail", "hung: did not end within 1 s")
    assert said["bandwidth/one rank crashes"] == ("fail", "killed: rank 1: SIGABRT")
    assert said["bandwidth/fail"] == ("fail", "failed: RuntimeError: no kernel image")
    assert said["attention/fails/debug/float32"] == ("unavailable", "RuntimeError: no kernel image")
    for dtype in ("bfloat16", "float32"):
        assert said[f"attention/absent/debug/{dtype}"] == ("unavailable", "its package is not installed")
    verdict, words = said["attention/wrong gradient/debug/float32"]
    assert verdict == "fail" and words.startswith("gradient of k is wrong by ")
    assert said[SDPA.name][0] == "pass"
    assert said["conclusion/attention/float32"][1].startswith("the fastest that is right: sdpa ")
    assert page(certificate) == (folder / "certificate.md").read_text()


@pytest.mark.parametrize("fault", ["knows no documents", "not a number", "leaks a little"])
def test_a_planted_wrong_kernel_fails(fault: str) -> None:
    import faulty_parts

    found = form.parse_found("attention", faulty_parts.wrong_kernel(SHAPE, fault), "attention/wrong")
    part = form.Part("attention/wrong", form.MEASURED, "", 1.0, found)
    (verdict, *_) = verdicts(describe(CPU, 1), [part])
    words = "what another document holds" if fault == "leaks a little" else "is wrong by"
    assert verdict.verdict == "fail" and words in verdict.said
    assert ranking([part], "float32") == []


def test_running_out_of_memory_is_a_result_of_its_own() -> None:
    ended = children.run(faulty("bandwidth/memory", "out_of_memory"), time.monotonic() + 60)
    assert (ended.status, ended.said) == ("out of memory", "MemoryError: 16 GiB")


def test_what_has_no_time_left_is_named_and_what_is_cut_off_is_no_hang() -> None:
    late = children.run(SDPA, time.monotonic() - 1)
    assert (late.status, late.seconds) == ("not run", 0.0)
    cut = children.run(faulty("bandwidth/hang", "hang", seconds=60), time.monotonic() + 0.5)
    assert cut.status == "not run" and "because the time for this kind of part ended" in cut.said
    assert children.run(replace(SDPA, refused="one card"), time.monotonic() + 60).status == "unavailable"


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
    error, scale = ((exact - cut(a) @ cut(b)).abs().max().item(), exact.abs().max().item())
    product = {"name": "q", "m": 128, "k": 4096, "n": 128, "count": 1, "error": error, "scale": scale, "seconds": [1.0]}
    found = form.parse_found("gemm", {"model": "debug", "dtype": "float32", "products": [product]}, "gemm")
    part = form.Part("gemm/debug/float32", form.MEASURED, "", 1.0, found)
    assert verdicts(describe(CPU, 1), [part])[0].verdict == verdict


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


def parsed(content: dict[str, Any]) -> Certificate:
    """A certificate read back; those of the project are of format 1, which had two more values."""
    machine = {key: value for key, value in content["machine"].items() if key != "kernels"}
    found = validated(
        {**{key: value for key, value in content.items() if key != "sha256"}, "machine": machine}, Certificate
    )
    typed = [
        replace(part, found=part.found and form.parse_found(part.kind, part.found, part.name)) for part in found.parts
    ]
    return replace(found, parts=typed)


@pytest.fixture
def content() -> dict[str, Any]:
    """Of a real certificate: every kind of part is in it."""
    found = json.loads(sorted(CERTIFICATES.rglob("*.json"))[0].read_text())
    assert {part["name"].split("/")[0] for part in found["parts"] if part["found"]} == form.KINDS.keys()
    return found


def first(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """The raw numbers of the first part of this kind that was measured."""
    return next(part["found"] for part in content["parts"] if part["found"] and part["name"].startswith(kind))


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *way, last = keys
        for key in way:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("attention", lambda found: put("error", value=9.0)(found["layouts"][0]["errors"][1])),
        ("attention", put("layouts", 0, "errors", 1, "error", value=None)),
        ("attention", put("layouts", 0, "others", value=1.0)),
        ("gemm", put("products", 3, "error", value=9.0)),
        ("bandwidth", put("wrong", value=5)),
        ("collective", put("transfers", 0, "wrong", value=1)),
        ("parity", lambda found: put("losses", 0, value=found["runs"][0]["losses"][0] + 0.01)(found["runs"][0])),
        ("steps", put("losses", 0, value=None)),
    ],
)
def test_a_number_beyond_its_limit_fails(
    kind: str, change: Callable[[dict[str, Any]], None], content: dict[str, Any]
) -> None:
    measured = [part for part in content["parts"] if part["found"] and part["name"].startswith(kind)]
    found = next(part for part in measured if kind != "parity" or len(part["found"]["runs"]) > 1)
    said = {one.of: one.verdict for one in verdicts(parsed(content).machine, parsed(content).parts)}
    assert said[found["name"]] == "pass"
    change(found["found"])
    said = {one.of: one.verdict for one in verdicts(parsed(content).machine, parsed(content).parts)}
    assert said[found["name"]] == "fail"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("dtype", value="int4"), "must be one of bfloat16, float16, float32"),
        (put("layouts", 0, "errors", 0, "scale", value=0), "scale = 0.0 must be above 0"),
        (put("layouts", value=[]), "layouts: is empty"),
        (put("ms", value=[1.0, -1.0]), "must not be below 0"),
        (put("ms", value=["1"]), "must be a finite number"),
        (put("layouts", 0, "errors", 0, "error", value=-1.0), "must not be below 0"),
        (put("host", value="node7"), "unknown key host"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    change: Callable[[dict[str, Any]], None], said: str, content: dict[str, Any]
) -> None:
    change(found := first(content, "attention"))
    with pytest.raises(ValueError, match=said):
        form.parse_found("attention", found, "attention")


def on_a_card(content: dict[str, Any]) -> Certificate:
    """The same numbers as if of a known card: made up, to see what verdicts say of one."""
    changed = copy.deepcopy(content)
    changed["machine"].update(arch="sm90", compute_units=132, memory=80 << 30)
    return parsed(changed)


def said_of(certificate: Certificate, kind: str) -> tuple[str, str]:
    found = next(one for one in verdicts(certificate.machine, certificate.parts) if one.of.startswith(kind))
    return found.verdict, found.said


def test_a_rate_above_the_data_sheets_is_a_wrong_time(content: dict[str, Any]) -> None:
    assert said_of(on_a_card(content), "gemm")[0] == "pass"
    first(content, "gemm")["products"][0]["seconds"] = [1e-9]
    verdict, said = said_of(on_a_card(content), "gemm")
    assert verdict == "fail" and "above the data sheet's 989.4: its time is wrong" in said


def test_steps_are_compared_with_their_plan(content: dict[str, Any]) -> None:
    steps = first(content, "steps")
    steps["plan"] = {"least": 1 << 30, "most": 2 << 30, "seconds": 2 * steps["seconds"][0]}
    steps["peak_memory_gib"], steps["seconds"] = 1.5, steps["seconds"][:1]
    verdict, said = said_of(on_a_card(content), "steps")
    assert verdict == "pass" and "(-50%)" in said and "1.50 GiB at the peak, planned 1.00 to 2.00" in said
    steps["peak_memory_gib"] = 2.5
    assert said_of(on_a_card(content), "steps")[0] == "fail"


def test_a_device_whose_own_products_are_wrong_does_not_set_the_limit(content: dict[str, Any]) -> None:
    for error in (one := first(content, "attention"))["layouts"][0]["errors"]:
        error["error"] = error["usual"] = error["scale"] / 2
    assert one["dtype"] == "bfloat16" and said_of(parsed(content), "attention")[0] == "fail"


def test_the_widest_dtype_that_is_hardly_slower_is_recommended_unless_it_is_wrong(content: dict[str, Any]) -> None:
    gemms = [part["found"] for part in content["parts"] if part["name"].startswith("gemm")]
    for gemm, seconds in zip(gemms, (1.0, 1.05, 1.09), strict=True):
        for product in gemm["products"]:
            product["seconds"] = [seconds]
    assert [gemm["dtype"] for gemm in gemms] == ["bfloat16", "float16", "float32"]
    assert best_dtype(parsed(content).parts) == "float32"
    gemms[2]["products"][0]["error"] = gemms[2]["products"][0]["scale"]
    assert best_dtype(parsed(content).parts) == "bfloat16"


def test_the_fastest_backend_is_right_repeatable_and_needs_no_explicit_scores(content: dict[str, Any]) -> None:
    sdpa = first(content, "attention/sdpa/debug/float32")
    dim, names = sdpa["head_dim"], lambda: [one.backend for one in ranking(parsed(content).parts, "float32", dim)]
    sdpa["ms"] = [1e-3]
    assert names() == ["sdpa", "chunked"]  # eager is explicit
    sdpa["repeatable"] = False
    assert names() == ["chunked"]
    assert ranking(parsed(content).parts, "float32", dim + 1) == []


def test_the_page_has_the_columns_of_the_first_user(content: dict[str, Any]) -> None:
    lines = page(parsed(content)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| model | layout"))
    assert lines[at].split(" | ")[3:11] == ["m", "step_ms", "toks/s", "peak_mem", "ckpt", "bf16", "GA", "comm_ms"]
    found, cells = first(content, "steps"), lines[at + 2].strip("| ").split(" | ")
    assert (cells[1], cells[3], cells[9]) == (found["layout"], str(found["batch"]), str(found["ga"]))
    assert float(cells[4].replace(",", "")) == round(1000 * sorted(found["seconds"])[1])
    assert float(cells[10].replace(",", "")) == round(max(found["comm_ms"]))
    assert cells[6] == f"{found['peak_memory_gib']:.2f}"


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


def test_a_product_of_another_card_has_a_verdict_and_is_not_the_models_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "use_device", lambda _: CPU)

    def part(name: str, seconds: float, **options: Any) -> form.Part:
        found = products.gemm("debug", 8, "float32", **options)
        for product in found["products"]:
            product["seconds"] = [seconds]
        return form.Part(name, form.MEASURED, "", 1.0, form.parse_found("gemm", found, name))

    whole, other = part("gemm/debug/float32", 1.0), part("gemm/device 1", 0.5, only="down")
    assert len(other.found.products) == 3 and rates([whole, other]) == rates([whole])
    assert [verdict.verdict for verdict in verdicts(describe(torch.device("cpu"), 1), [whole, other])][:2] == [
        "pass",
        "pass",
    ]


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
    certificate = parsed(json.loads((tmp_path / "made" / "certificate.json").read_text()))
    # whether this machine computes right is the certificate's matter, not the test's
    assert ended.returncode == (0 if all_pass(certificate.verdicts) else 1), ended.stdout + ended.stderr
    measured = {part.kind for part in certificate.parts if part.status == form.MEASURED}
    assert measured == form.KINDS.keys()
    assert os.listdir(tmp_path) == ["made"]
