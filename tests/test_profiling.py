"""Profiles: what a trace's summary says, and that training does not notice."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, torchrun
from test_metrics import RESULT
from test_samples import settings
from test_train import CONFIG, checkpoint_tensors, losses, train

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import TRACED_STEP
from titan_mi100.errors import UserError
from titan_mi100.open_run import start as open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.run import profiling
from titan_mi100.run.next_commands import command, shown_path
from titan_mi100.workshop.measure.communication import communication
from titan_mi100.workshop.summarise_trace import Summary, main, read_any_trace, summarise


def event(category: str, name: str, start: float, stop: float, thread: object = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "pid": 7, "tid": thread}


STEP_3 = event("user_annotation", f"{TRACED_STEP}3", 100, 1100)


def of_gpu(prefix: str, collective: str) -> list[dict[str, Any]]:
    """Two streams, 7 and 20; the step lasts from 100 to 1100, its last kernel until 1200."""
    return [
        STEP_3,
        event("gpu_user_annotation", f"{TRACED_STEP}3", 100, 1200, "stream 7"),  # no work
        event("kernel", "of_the_step_before", 10, 90, "stream 7"),
        event("kernel", "gemm", 150, 350, "stream 7"),
        event("kernel", collective, 300, 500, "stream 20"),  # 150 exposed
        event("kernel", "gemm", 600, 700, "stream 7"),
        event("kernel", "norm", 650, 660, "stream 21"),  # inside the other
        event("kernel", collective, 620, 690, "stream 20"),  # hidden
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 800, 850, "stream 7"),
        event("gpu_memset", "Memset (Device)", 840, 860, "stream 7"),
        event("kernel", "adamw", 1150, 1200, "stream 7"),  # the host was done before
        event("cpu_op", "aten::item", 700, 900),
        event("cpu_op", "aten::_local_scalar_dense", 710, 890),
        event("cuda_runtime", f"{prefix}MemcpyAsync", 720, 730),
        event("cuda_runtime", f"{prefix}StreamSynchronize", 740, 880),
        event("cuda_runtime", f"{prefix}EventSynchronize", 950, 960),  # called from Python
        event("cuda_runtime", f"{prefix}EventQuery", 970, 980),
        event("cuda_runtime", f"{prefix}DeviceSynchronize", 1210, 1300),  # the profiler's own
        event("cuda_runtime", f"{prefix}LaunchKernel", 140, 145),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 140, "pid": 7, "tid": 1},
    ]


@pytest.mark.parametrize(
    ("prefix", "collective"),
    [("cuda", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
     ("hip", "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"), ("hip", "rcclKernel_AllGather")],
)  # fmt: skip
def test_a_gpu_trace_is_summed_up(prefix: str, collective: str) -> None:
    found = summarise(of_gpu(prefix, collective))
    assert found == Summary(
        on_gpu=True,
        seconds=pytest.approx(1100e-6),
        compute=pytest.approx(350e-6),
        communication=pytest.approx(270e-6),
        exposed=pytest.approx(150e-6),
        copies=pytest.approx(60e-6),
        idle=pytest.approx(540e-6),
    )
    text = "\n".join(found.shares())
    for line in ("1.10 ms, on the GPU:", "- exposed            0.15 ms  13.6%", "idle                 0.54 ms  49.1%"):
        assert line in text, text


def test_a_cpu_trace_is_summed_up() -> None:
    """An operator that starts a collective may wait for it; what else is in it computes."""
    found = summarise([
        STEP_3,
        event("cpu_op", "aten::linear", 100, 400),
        event("cpu_op", "aten::mm", 150, 350),
        event("cpu_op", "titan_mi100::gather_sequence", 400, 800),
        event("cpu_op", "aten::empty", 410, 430),
        event("cpu_op", "c10d::_allgather_base_", 440, 450),
        event("cpu_op", "aten::cat", 750, 800),
        event("user_annotation", "gloo:all_gather", 445, 740, "gloo 1"),
        event("cpu_op", "aten::copy_", 500, 600, "gloo 1"),  # a part of the collective
        event("user_annotation", "FSDP::pre_forward", 100, 1000),
        event("cpu_op", "aten::mm", 900, 950, "another thread"),
        event("python_function", "forward", 100, 1000),
    ])  # fmt: skip
    assert found == Summary(
        on_gpu=False,
        seconds=pytest.approx(1000e-6),
        compute=pytest.approx((300 + 20 + 50 + 50) * 1e-6),
        communication=pytest.approx(295e-6),
        exposed=pytest.approx(295e-6),
        copies=0.0,
        idle=pytest.approx((1000 - 420 - 295) * 1e-6),
    )


def test_a_pipeline_on_a_cpu_posts_from_the_computing_thread_and_waits_inside_of_operators() -> None:
    found = summarise([
        event("user_annotation", f"{TRACED_STEP}1", 0, 100),
        event("user_annotation", "gloo:all_reduce", 10, 40, "gloo 1"),
        event("user_annotation", "gloo:recv", 50, 120),
        event("user_annotation", "gloo:send", 60, 110),  # in flight at once: counted once
        event("cpu_op", "aten::mm", 5, 20),
        event("cpu_op", "aten::copy_", 20, 40, "gloo 1"),  # gloo's own thread: no computation
        event("cpu_op", "aten::view", 50, 80),  # of a tensor that is still on its way: most of it is the wait
        event("cpu_op", "_c10d_functional::wait_tensor", 52, 79),
        event("cpu_op", "c10d::allreduce_", 10, 11),
        event("user_annotation", "FSDP::post_backward_reduce", 0, 100),
    ])  # fmt: skip
    assert (found.communication, found.exposed) == (pytest.approx(80e-6), pytest.approx((20 + 27 + 20) * 1e-6))
    assert found.compute == pytest.approx((15 + 3) * 1e-6)


def test_shares_are_those_of_a_count_of_every_microsecond() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        lines = {kind: [False] * 300 for kind in ("gemm", "nccl", "copy")}
        events = [event("user_annotation", f"{TRACED_STEP}1", 50, 250)]
        for _ in range(draw.randrange(1, 25)):
            kind, start = draw.choice(list(lines)), draw.randrange(290)
            stop = draw.randrange(start, 300)
            if start >= 250 or stop <= 50:  # of another step: the device would be done before the next one begins
                continue
            stop = min(stop, 250)
            lines[kind][start:stop] = [True] * (stop - start)
            events.append(event("gpu_memcpy" if kind == "copy" else "kernel", kind, start, stop, draw.randrange(3)))
        found = summarise(events)
        marks = list(zip(*(lines[kind][50:250] for kind in ("gemm", "nccl", "copy")), strict=True))
        if not found.on_gpu:
            assert len(events) == 1
            continue
        assert found.compute * 1e6 == pytest.approx(sum(gemm for gemm, _, _ in marks))
        assert found.communication * 1e6 == pytest.approx(sum(nccl for _, nccl, _ in marks))
        assert found.exposed * 1e6 == pytest.approx(sum(nccl and not gemm for gemm, nccl, _ in marks))
        assert found.idle * 1e6 == pytest.approx(sum(not any(mark) for mark in marks))


def test_events_without_a_duration_do_not_count() -> None:
    odd = [event("Trace", "PyTorch Profiler (0)", 0, 9000), {"ph": "M", "name": "process_name", "pid": 7}]
    found = summarise([*odd, event("kernel", "a", 100, 200), event("cpu_op", "b", 50, 300)])
    assert (found.seconds, found.compute) == (pytest.approx(250e-6), pytest.approx(100e-6))
    with pytest.raises(ValueError, match="no event has a duration"):
        summarise(odd)


def test_the_command_counts_no_odd_events(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    odd = [None, 3, [], {"ph": "X"}, event("kernel", 3, 0, 1), event("kernel", "nan", 0, float("nan"))]  # type: ignore[arg-type]
    odd += [event("Trace", "PyTorch Profiler (0)", 0, 9000), {**event("kernel", "x", 0, 1), "ts": "0"}]
    events = [*odd, event("kernel", "a", 100, 200), event("cpu_op", "b", 50, 300)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    assert main([str(tmp_path / "a.json")]) == 0
    assert "0.25 ms, on the GPU:" in capsys.readouterr().out


def test_the_command_sums_up_a_trace_and_says_what_is_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good, plain = tmp_path / "a.json.gz", tmp_path / "b.json"
    content = json.dumps({"traceEvents": of_gpu("hip", "ncclKernel")}).encode()
    good.write_bytes(gzip.compress(content))
    plain.write_bytes(content)
    assert main([str(good), str(plain)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("1.10 ms, on the GPU:") == 2
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(good.read_bytes()[:200])
    bad = tmp_path / "bad.json"
    for path, text in ((bad, "[1]"), (bad, "{}"), (bad, "x"), (bad, "[" * 100_000), (cut, ""), (tmp_path / "gone", "")):
        if path is bad:
            path.write_text(text)
        assert main([str(path)]) == 2, text
        said = capsys.readouterr().err
        assert said.startswith(f"ERROR {path}: ") and "; name a" in said and len(said.splitlines()) == 1


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.toml"
    text = CONFIG.replace("steps = 20", "steps = 3").replace("interval = 10", "interval = 0")
    path.write_text(text + "[lora]\nrank = 4\ndropout = 0.1\n[metrics]\nenable_tensorboard = false\n")
    return path


@pytest.mark.full
def test_chosen_steps_of_chosen_ranks_are_traced_and_training_does_not_notice(config: Path, tmp_path: Path) -> None:
    """On two processes; step 3 has no step to warm up in, because the one before is traced."""
    train(config, tmp_path / "plain")
    chosen = ("--profiling.enable_profiling", "true", "--profiling.profile_steps", "2,3,9")
    job = train(config, tmp_path / "traced", *chosen, "--profiling.profile_ranks", "1,0")
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")
    plain, traced = (checkpoint_tensors(tmp_path / name / "checkpoint/step-3") for name in ("plain", "traced"))
    assert plain.keys() == traced.keys() and all(torch.equal(plain[name], traced[name]) for name in plain)

    folder = tmp_path / "traced/profile_traces"
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    assert found == [f"step-{n}/rank-{rank}.json.gz" for n in (2, 3) for rank in (0, 1)]
    for path in folder.rglob("*.json.gz"):
        events, step = read_any_trace(path), path.parent.name.removeprefix("step-")
        named = [e["name"] for e in events if str(e.get("name")).startswith(TRACED_STEP)]
        assert named == [f"{TRACED_STEP}{step}"], "the trace holds another step"
        summary = summarise(events)
        parts = summary.compute, summary.exposed, summary.idle
        assert not summary.on_gpu and min(parts) > 0 and sum(parts) == pytest.approx(summary.seconds)
        assert summary.exposed * 0.999 <= summary.communication <= summary.seconds
    summary = command("profile", shown_path(folder / "step-3" / "rank-1.json.gz"))
    assert f"step 3: traces of rank 1, 0; where its time went: {summary}" in job.stdout


def open_profiled(world: World, folder: Path, **more: str) -> open_run.Run:
    config = load_config(settings(folder, **more), 1)
    folder.mkdir(exist_ok=True)
    return open_run.open_run(config, world, folder)


@pytest.mark.full
def test_other_steps_run_without_a_profiler(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    run = open_profiled(world, tmp_path, **{"profiling.enable_profiling": "true", "profiling.profile_freq": "3"})
    real = profiling.profile
    monkeypatch.setattr(profiling, "profile", lambda **options: made.append(run.progress.step + 1) or real(**options))
    seen = []
    for _ in range(3):
        run.step()
        seen.append(torch.autograd._profiler_enabled())
    run.close()
    assert made == [2] and not seen[0] and not seen[2]
    assert open_profiled(world, tmp_path / "off").profiler is None


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_profiled(world, tmp_path, **{"profiling.enable_profiling": "true", "profiling.profile_steps": "1"})
    (tmp_path / "profile_traces").write_text("a file")
    run.step()
    run.step()
    assert f"{tmp_path}/profile_traces/step-1/rank-0.json.gz: cannot be written" in caplog.text


def test_snapshots_are_written_after_a_traced_step_and_when_memory_runs_out(config: Path, tmp_path: Path) -> None:
    on = ("--profiling.enable_memory_snapshot", "true", "--profiling.profile_ranks", "1", "--training.steps", "4")
    on += ("--profiling.enable_profiling", "true", "--profiling.profile_steps", "2")
    given = ("--job.config_file", str(config), "--job.run_folder", str(tmp_path / "run"), *on)
    job = torchrun(str(REPO / "tests/gloo/job_snapshot.py"), *given, check=False)
    found = {str(path.relative_to(tmp_path / "run/memory_snapshot")) for path in tmp_path.rglob("*.pickle")}
    assert "remembers 100000" in job.stdout
    assert {name for name in found if "out-of-memory" not in name} == {"step-2/rank-1.pickle"}
    # any rank that finds memory full writes one, unless the launcher ends it first
    full = found - {"step-2/rank-1.pickle"}
    assert full and full <= {f"step-2-out-of-memory/rank-{rank}.pickle" for rank in (0, 1)}
    state = json.loads((tmp_path / "run/run_state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("out_of_memory", 6)


def test_snapshots_need_a_gpu(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[profiling\] enable_memory_snapshot = true needs a GPU"):
        open_profiled(world, tmp_path, **{"profiling.enable_memory_snapshot": "true"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"profile_freq": "5"}, "profile_freq = 5 has no effect with enable_profiling = false"),
        ({"enable_profiling": "true", "profile_ranks": "0,2"}, "profile_ranks names 2, but the ranks are 0 to 1"),
        ({"profile_ranks": "1"}, r"profile_ranks = \[1\] has no effect with enable_profiling and"),
        ({"enable_profiling": "true", "profile_ranks": "[]"}, "profile_ranks is empty"),
        ({"enable_profiling": "true", "save_traces_folder": "../x"}, "must be a name for a folder in the run folder"),
        ({"enable_profiling": "true", "save_traces_folder": "checkpoint"}, "other than checkpoint, tensorboard"),
        ({"enable_profiling": "true", "save_traces_folder": "logs"}, "must be a name for a folder"),
        ({"enable_profiling": "true", "profile_steps": "2", "profile_freq": "5"}, "no effect with profile_steps"),
        ({"enable_profiling": "true", "profile_steps": "0"}, "profile_steps = .* must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(settings(tmp_path, **{f"profiling.{key}": value for key, value in given.items()}), 2)


def test_steps_that_the_run_does_not_have_are_said(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_profiled(world, tmp_path, **{"profiling.enable_profiling": "true"})  # every 10 of 3 steps
    assert "none of the steps to trace is among the run's 3: nothing will be traced" in caplog.text


def test_a_profiled_step_takes_the_mean_of_the_steps(world: World) -> None:
    assert communication(lambda: replace(RESULT, seconds=0.25), world)["profiled_step_ms"] == 250
