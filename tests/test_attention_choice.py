"""The trial of a backend in a process of its own, and the choice that follows from it."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_mi100.attention import choice, trial
from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import NO_KERNEL, Backend, Documents, Shape
from titan_mi100.attention.choice import Choice, choose
from titan_mi100.attention.torch_backends import Eager, Sdpa
from titan_mi100.attention.trial import Trial, judge, try_backend
from titan_mi100.errors import UserError

CPU = torch.device("cpu")
SHAPE = Shape(2, 40, 4, 2, 16, "float32")


class Faulty(Sdpa):
    """Wrong in the way that `fault` says."""

    name = "faulty"
    fault = ""
    calls = 0

    def prepare(self, documents: Documents, device: torch.device) -> Documents:
        if self.fault == "knows no documents":
            return Documents.one_per_row(documents.batch, documents.seq)
        return documents

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Documents) -> Tensor:
        if self.fault == "raises":
            raise RuntimeError("no kernel image\nfor this device")
        Faulty.calls += 1
        if self.fault == "wrong gradient":
            k = k * 0.9 + k.detach() * 0.1
        if self.fault == "not a number":
            q = q / 0
        if self.fault == "leaks a little":  # too little to be found by the comparison of values
            v = v + 1e-7 * v.mean(dim=1, keepdim=True)
        if self.fault == "other bits":
            v = v * (1 + 1.2e-7 * (Faulty.calls % 2))
        return super().__call__(q, k, v, prepared)


def test_a_time_is_of_layers_that_share_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step. Not as many block masks as there are timed calls."""
    calls: list[str] = []
    prepare, layer = Sdpa.prepare, Sdpa.__call__
    monkeypatch.setattr(Sdpa, "prepare", lambda *given: (calls.append("prepare"), prepare(*given))[1])
    monkeypatch.setattr(Sdpa, "__call__", lambda *given: (calls.append("layer"), layer(*given))[1])
    times = trial.milliseconds(Sdpa(), trial.inputs(SHAPE, CPU), trial.random_documents(SHAPE), 5)
    assert len(times) == 5 and min(times) > 0
    assert calls == ["prepare", *["layer"] * 6]  # the first is a warm-up


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("raises", "RuntimeError: no kernel image"),
        ("knows no documents", "wrong: its results differ"),
        ("wrong gradient", "wrong: its results differ"),
        ("not a number", "wrong: its results differ from explicit attention by nan"),
        ("leaks a little", "wrong: the content of another document changes its results"),
        ("other bits", ""),
    ],
)
def test_a_trial_refuses_what_is_wrong(fault: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    monkeypatch.setattr(trial, "make_backend", lambda *_: Faulty())
    verdict = judge("faulty", SHAPE, CPU, "cpu", "")
    assert verdict.refused.startswith(said) and bool(verdict.refused) == bool(said)
    if not said:
        assert verdict.repeatable == (fault == "") and verdict.ms > 0
        assert verdict.kernel == "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["sdpa", "chunked", "eager"])
def test_what_is_right_passes_in_every_dtype(name: str, dtype: str) -> None:
    assert judge(name, replace(SHAPE, dtype=dtype), CPU, "cpu", "").refused == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "it crashed (SIGSEGV): no message"),
        ("import sys; sys.exit('no device')", "it crashed (exit code 1): no device"),
        ("print('no JSON')", "it crashed (exit code 0): no message"),
        ("import time; time.sleep(60)", "it hung: no answer within 1 s"),
    ],
)
def test_a_child_that_crashes_or_hangs_is_a_refusal(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial.isolated, "command", lambda _: [sys.executable, "-c", code])
    patience = 1 if "sleep" in code else 60
    monkeypatch.setattr(trial, "PATIENCE", patience)
    assert try_backend("sdpa", SHAPE, CPU, "cpu", tmp_path, patience=patience).refused == said


def test_a_verdict_is_remembered_for_the_machine_and_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = try_backend("sdpa", SHAPE, CPU, "cpu", tmp_path)  # a real child
    assert first.refused == "" and first.ms > 0
    asked: list[dict[str, Any]] = []

    def ask(question: dict[str, Any], _: float) -> Trial:
        asked.append(question)
        return Trial("asked")

    monkeypatch.setattr(trial, "_ask_child", ask)
    assert try_backend("sdpa", SHAPE, CPU, "cpu", tmp_path) == first
    (note,) = (tmp_path / "attention").iterdir()
    for change in ({"seq": 48}, {"dtype": "float64"}, {"heads": 2}):
        assert try_backend("sdpa", replace(SHAPE, **change), CPU, "cpu", tmp_path).refused == "asked"
    monkeypatch.setattr(trial, "_machine", lambda _: {"torch": "another"})
    assert try_backend("sdpa", SHAPE, CPU, "cpu", tmp_path).refused == "asked"
    monkeypatch.undo()
    monkeypatch.setattr(trial, "_ask_child", ask)
    note.write_text('{"refused": 1}')
    assert try_backend("sdpa", SHAPE, CPU, "cpu", tmp_path).refused == "asked"  # damaged: asked again
    assert len(asked) == 5
    (tmp_path / "file").touch()
    assert try_backend("sdpa", SHAPE, CPU, "cpu", tmp_path / "file").refused == "asked"  # nothing can be kept there


def verdicts(monkeypatch: pytest.MonkeyPatch, found: dict[str, Trial]) -> list[tuple[str, str]]:
    asked = []

    def answer(name: str, shape: Shape, device: torch.device, arch: str, cache: Path, launch: str, _: float) -> Trial:
        asked.append((name, launch))
        return found[name]

    monkeypatch.setattr(choice, "try_backend", answer)
    return asked


TRIED = {
    "triton": Trial(ms=2.0, kernel="titan_mi100::attention", launch="64.64.4.1 64.64.4.1 64.64.4.1"),
    "varlen": Trial("needs torch 2.10 or later"),
    "flash_attn": Trial(ms=1.0, repeatable=False, kernel="flash_attn"),
    "flex": Trial("it crashed (SIGSEGV): no message"),
    "sdpa": Trial(ms=0.5, kernel=NO_KERNEL),
    "chunked": Trial(ms=9.0, kernel="explicit scores of a few hundred queries at a time"),
}


def test_on_a_cpu_the_measured_fastest_runs_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdicts(monkeypatch, {})
    assert choose("auto", SHAPE, CPU, "cpu", tmp_path) == (Choice("sdpa", "measured fastest on cpu", "cpu"), [])
    assert choose("eager", SHAPE, CPU, "cpu", tmp_path)[0].why == "reference implementation"
    assert choose("chunked", SHAPE, CPU, "cpu", tmp_path)[0].why == "chosen by name"
    assert asked == []


def test_where_nobody_measured_the_fastest_that_is_right_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts(monkeypatch, TRIED)
    chosen, said = choose("auto", SHAPE, CPU, "gfx908:sramecc+:xnack-", tmp_path)
    assert chosen == Choice("triton", chosen.why, "gfx908", TRIED["triton"].launch)
    assert chosen.why == (
        "fastest in a trial before this run, per layer: triton 2.0 ms, chunked 9.0 ms; there is no earlier measurement "
        "on gfx908"
    )
    assert [line.split(": ", 1)[1] for line in said] == [
        "varlen is refused: needs torch 2.10 or later",
        "flash_attn is refused: the same call gives other bits each time, so a resumed run would differ; name it to "
        "use it anyway",
        "flex is refused: it crashed (SIGSEGV): no message",
        f"sdpa is refused: it runs as {NO_KERNEL}",
    ]


def test_a_start_spends_three_minutes_in_trials_and_the_next_one_tries_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = [0.0], []

    def ask(question: dict[str, Any], patience: float) -> Trial:
        asked.append((question["name"], patience))
        took = {"triton": 100.0, "varlen": 50.0}.get(question["name"], 1000.0)
        clock[0] += min(took, patience)
        return TRIED[question["name"]] if took <= patience else Trial(f"it hung: no answer within {patience:.0f} s")

    monkeypatch.setattr(choice.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(trial, "_ask_child", ask)
    chosen, said = choose("auto", SHAPE, CPU, "gfx908", tmp_path)
    assert asked == [("triton", 180), ("varlen", 80), ("flash_attn", 30)] and clock == [180]
    assert chosen.name == "triton" and sum("the next run's start tries it" in line for line in said) == 4
    asked.clear()
    choose("auto", SHAPE, CPU, "gfx908", tmp_path)
    assert asked == [("flash_attn", 180)]  # the first two are remembered


def test_a_named_backend_is_tried_and_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, TRIED)
    assert choose("flash_attn", SHAPE, CPU, "gfx908", tmp_path)[0].why == "chosen by name"
    assert choose("triton", SHAPE, CPU, "gfx908", tmp_path)[0].launch == TRIED["triton"].launch
    with pytest.raises(UserError, match=r"attention_backend = flex: flex is refused on this machine: it crashed"):
        choose("flex", SHAPE, CPU, "gfx908", tmp_path)


def test_a_resumed_run_keeps_its_backend_as_long_as_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdicts(monkeypatch, TRIED)
    before = Choice("triton", "fastest then", "gfx908", "32.32.4.1 32.32.4.1 32.32.4.1")
    for wanted in ("auto", "triton"):
        assert choose(wanted, SHAPE, CPU, "gfx908", tmp_path, before) == (before, [])
    assert asked == [("triton", before.launch)] * 2
    assert choose("chunked", SHAPE, CPU, "gfx908", tmp_path, before)[0].name == "chunked"
    assert choose("auto", SHAPE, CPU, "cpu", tmp_path, before)[0].name == "sdpa"  # another machine
    monkeypatch.setitem(TRIED, "triton", Trial("it crashed"))
    chosen, said = choose("auto", SHAPE, CPU, "gfx908", tmp_path, before)
    assert chosen.name == "chunked"
    assert said[0] == "attention: triton, which the run used until now, is refused here: it crashed"


@pytest.mark.parametrize("name", ["varlen", "flex", "flash_attn", "triton"])
def test_kernels_of_a_gpu_are_refused_where_they_cannot_run(name: str) -> None:
    """Ours on an architecture without a launch table: on a CPU the tests have Triton's interpreter."""
    assert judge(name, SHAPE, CPU, "gfx1100" if name == "triton" else "cpu", "").refused


def test_a_library_kernel_gets_each_document_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with flash_attn's interface, which is on no machine of ours."""

    def flash_attn_varlen_func(q, k, v, ends_q, ends_k, longest_q, longest_k, causal=False, deterministic=False):
        assert causal and deterministic and ends_q.dtype == torch.int32 and ends_q is ends_k
        limits = ends_q.tolist()
        assert longest_q == longest_k == max(b - a for a, b in itertools.pairwise(limits))
        alone = [
            Sdpa()(*(x[None, a:b] for x in (q, k, v)), Documents.one_per_row(1, b - a))[0]
            for a, b in itertools.pairwise(limits)
        ]
        return torch.cat(alone)

    module = type(sys)("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert judge("flash_attn", SHAPE, CPU, "cpu", "").refused == ""
    backend: Backend = make_backend("flash_attn", "", "cpu")
    q, k, v = (torch.randn(2, 5, heads, 16) for heads in (4, 2, 2))
    documents = Documents(2, 5, (2, 3, 5))
    expected = Eager()(q, k, v, Eager().prepare(documents, CPU))
    torch.testing.assert_close(backend(q, k, v, backend.prepare(documents, CPU)), expected)


def test_where_every_trial_is_refused_the_scores_are_explicit_and_the_reasons_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts(monkeypatch, {name: Trial(refused="out of memory") for name in (*TRIED, "sdpa")})
    chosen, said = choose("auto", SHAPE, CPU, "gfx1100", tmp_path)
    assert (chosen.name, chosen.why) == ("chunked", "every trial was refused; it needs no kernel")
    assert "attention: chunked is refused: out of memory" in said


def test_launch_settings_that_are_not_used_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "_ask_child", lambda *_: Trial(ms=1.0, launch="x", passed_over="keys 16.64.2.1: wrong"))
    try_backend("triton", SHAPE, CPU, "cpu", tmp_path)
    assert "triton does not use these launch settings: keys 16.64.2.1: wrong" in caplog.text


def test_without_a_compiler_the_remedy_is_named_and_the_refusal_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_ask_child", lambda *_: Trial("RuntimeError: Failed to find C compiler."))
    monkeypatch.setattr(trial, "cannot_compile", lambda: ("no gcc or clang in PATH", "sudo apt install gcc"))
    for name, remedy in (("triton", "no gcc or clang in PATH: sudo apt install gcc"), ("flex", "C compiler.")):
        assert try_backend(name, SHAPE, CPU, "cpu", tmp_path).refused.endswith(remedy)
    monkeypatch.setattr(trial, "_ask_child", lambda *_: Trial())
    assert try_backend("triton", SHAPE, CPU, "cpu", tmp_path).refused  # remembered
    monkeypatch.setattr(trial, "cannot_compile", lambda: ("", ""))
    assert not try_backend("triton", SHAPE, CPU, "cpu", tmp_path).refused  # gcc is there now: tried again
