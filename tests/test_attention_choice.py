"""The trial of a backend in a process of its own, and the choice that follows from it."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_rows import packed
from test_loss_scale import SPEC
from torch import Tensor

from titan_mi100.attention import choice, trial
from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import NO_KERNEL, Backend, Documents, Shape
from titan_mi100.attention.choice import Choice, choose
from titan_mi100.attention.torch_backends import Eager, Sdpa
from titan_mi100.attention.trial import Case, Trial, judge, try_backend
from titan_mi100.config.settings import Config, DataConfig, ModelConfig, TrainingConfig
from titan_mi100.errors import UserError
from titan_mi100.open_run.rows import usual_lengths
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.workshop.made_up import made_up

CPU = torch.device("cpu")
SHAPE = Shape(2, 40, 4, 2, 16, "float32")
LENGTHS = (9, 11, 20)  # of the documents of each row: a token's document has 15 tokens on average


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
    verdict = judge("faulty", SHAPE, LENGTHS, CPU, "cpu", "")
    assert verdict.refused.startswith(said) and bool(verdict.refused) == bool(said)
    if not said:
        assert verdict.repeatable == (fault == "") and verdict.ms > 0
        assert verdict.kernel == "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["sdpa", "chunked", "eager"])
def test_what_is_right_passes_in_every_dtype(name: str, dtype: str) -> None:
    assert judge(name, replace(SHAPE, dtype=dtype), LENGTHS, CPU, "cpu", "").refused == ""


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
    assert try_backend("sdpa", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path), patience=patience).refused == said


def test_a_verdict_is_remembered_for_the_machine_and_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = try_backend("sdpa", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path))  # a real child
    assert first.refused == "" and first.ms > 0
    asked: list[dict[str, Any]] = []

    def ask(question: dict[str, Any], _: float) -> Trial:
        asked.append(question)
        return Trial("asked")

    monkeypatch.setattr(trial, "_ask_child", ask)
    assert try_backend("sdpa", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path)) == first
    (note,) = (tmp_path / "attention").iterdir()
    for same in ((20, 11, 9), (6, 8, 10, 16)):  # of the same class
        assert try_backend("sdpa", Case(SHAPE, same, CPU, "cpu", tmp_path)) == first
    for other in ((40,), (10,) * 4, (1,) * 40):
        assert try_backend("sdpa", Case(SHAPE, other, CPU, "cpu", tmp_path)).refused == "asked"
    assert [question["lengths"] for question in asked] == [[40], [10] * 4, [1] * 40]
    for change in ({"seq": 48}, {"dtype": "float64"}, {"heads": 2}):
        assert try_backend("sdpa", Case(replace(SHAPE, **change), LENGTHS, CPU, "cpu", tmp_path)).refused == "asked"
    monkeypatch.setattr(trial, "_machine", lambda _: {"torch": "another"})
    assert try_backend("sdpa", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path)).refused == "asked"
    monkeypatch.undo()
    monkeypatch.setattr(trial, "_ask_child", ask)
    note.write_text('{"refused": 1}')
    assert try_backend("sdpa", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path)).refused == "asked"  # damaged: asked again
    assert len(asked) == 8
    (tmp_path / "file").touch()
    assert (
        try_backend("sdpa", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path / "file")).refused == "asked"
    )  # nothing can be kept there


def test_values_are_of_awkward_documents_and_times_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, timed = list[Documents](), list[Documents]()
    times = trial.milliseconds

    def milliseconds(backend: Backend, tensors: list[Tensor], documents: Documents, rounds: int) -> list[float]:
        timed.append(documents)
        return times(backend, tensors, documents, rounds)

    class Seen(trial.Reference):
        def __init__(self, tensors: list[Tensor], documents: Documents) -> None:
            judged.append(documents)
            super().__init__(tensors, documents)

    monkeypatch.setattr(trial, "milliseconds", milliseconds)
    monkeypatch.setattr(trial, "Reference", Seen)
    assert judge("sdpa", SHAPE, LENGTHS, CPU, "cpu", "").refused == ""
    assert judged == [trial.random_documents(SHAPE)] and timed == [Documents(2, 40, LENGTHS * 2)]


def test_the_lengths_are_those_of_the_runs_rows_and_a_resume_tries_nothing_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(trial, "_ask_child", lambda question, _: (asked.append(question["lengths"]), Trial(ms=1.0))[1])
    monkeypatch.setattr(choice, "FASTEST", {"cpu": "eager"})  # so that SDPA needs a trial on a CPU

    def opened(cut: tuple[int, ...]) -> Run:
        tokens, supervised = np.arange(40), np.ones(40, dtype=bool)
        documents = [(part, supervised[: len(part)]) for _ in range(4) for part in np.split(tokens, cut)]
        config = Config(
            training=TrainingConfig(seq_len=40, steps=2, mixed_precision_param="float32"),
            model=ModelConfig(attention_backend="sdpa"),
            data=DataConfig(cache_folder=str(tmp_path / "cache")),
        )
        return open_run(config, world, tmp_path / f"run-{len(cut)}", spec=SPEC, data=made_up(packed(documents, 40)))

    for cut, lengths in (((13,), [13, 27]), ((), [40])):
        (tmp_path / f"run-{len(cut)}").mkdir()
        run = opened(cut)
        assert sorted(asked.pop()) == lengths and asked == []
        run.step()
        run.save()
        run.close()
        again = opened(cut)
        assert again.progress.step == 1 and again.about["chosen"]["attention"]["name"] == "sdpa"
        assert asked == []
        again.close()


@pytest.mark.parametrize(
    ("weights", "lengths"), [((0.0, 0.0), [4] * 8), ((9.0, 1.0), [16, 16]), ((1.0, 9.0), [4] * 8)], ids=str
)
def test_a_mixtures_usual_row_is_one_of_the_source_with_most_of_its_rows(
    weights: tuple[float, float], lengths: list[int]
) -> None:
    ones = np.ones(16, dtype=bool)
    long, short = (packed([(np.arange(n), ones[:n])] * (rows * 32 // n), 32) for n, rows in ((16, 2), (4, 6)))
    sources = [
        replace(made_up(rows).sources[0], weight=weight) for rows, weight in zip((long, short), weights, strict=True)
    ]
    assert usual_lengths(replace(made_up(long), sources=sources)) == lengths


def test_padding_counts_as_a_document() -> None:
    rows = packed([(np.arange(5), np.ones(5, dtype=bool))], 16)
    assert sorted(usual_lengths(made_up(rows))) == [5, 11]


def verdicts(monkeypatch: pytest.MonkeyPatch, found: dict[str, Trial]) -> list[tuple[str, str]]:
    asked = []

    def answer(name: str, case: Case, launch: str = "", patience: float = 0) -> Trial:
        asked.append((name, launch))
        return found[name]

    monkeypatch.setattr(choice, "try_backend", answer)
    return asked


TRIED = {
    "triton": Trial(ms=2.0, kernel="titan_mi100::attention", launch="64.64.4.1 64.64.4.1 64.64.4.1"),
    "varlen": Trial("it crashed (SIGSEGV): no message"),
    "flash_attn": Trial(ms=1.0, repeatable=False, kernel="flash_attn"),
    "sdpa": Trial(ms=0.5, kernel=NO_KERNEL),
    "chunked": Trial(ms=9.0, kernel="explicit scores of a few hundred queries at a time"),
}


def test_on_a_cpu_the_measured_fastest_runs_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdicts(monkeypatch, {})
    assert choose("auto", SHAPE, LENGTHS, CPU, "cpu", tmp_path) == (
        Choice("sdpa", "measured fastest on cpu", "cpu"),
        [],
    )
    assert choose("eager", SHAPE, LENGTHS, CPU, "cpu", tmp_path)[0].why == "reference implementation"
    assert choose("chunked", SHAPE, LENGTHS, CPU, "cpu", tmp_path)[0].why == "chosen by name"
    assert asked == []


def test_where_nobody_measured_the_fastest_that_is_right_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts(monkeypatch, TRIED)
    chosen, said = choose("auto", SHAPE, LENGTHS, CPU, "gfx908:sramecc+:xnack-", tmp_path)
    assert chosen == Choice("triton", chosen.why, "gfx908", TRIED["triton"].launch)
    assert chosen.why == (
        "fastest in a trial before this run, per layer: triton 2.0 ms, chunked 9.0 ms; there is no earlier measurement "
        "on gfx908"
    )
    assert [line.split(": ", 1)[1] for line in said] == [
        "varlen is refused: it crashed (SIGSEGV): no message",
        "flash_attn is refused: the same call gives other bits each time, so a resumed run would differ; name it to "
        "use it anyway",
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
    chosen, said = choose("auto", SHAPE, LENGTHS, CPU, "gfx908", tmp_path)
    assert asked == [("triton", 180), ("varlen", 80), ("flash_attn", 30)] and clock == [180]
    assert chosen.name == "triton" and sum("the next run's start tries it" in line for line in said) == 3
    asked.clear()
    choose("auto", SHAPE, LENGTHS, CPU, "gfx908", tmp_path)
    assert asked == [("flash_attn", 180)]  # the first two are remembered


def test_a_named_backend_is_tried_and_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, TRIED)
    assert choose("flash_attn", SHAPE, LENGTHS, CPU, "gfx908", tmp_path)[0].why == "chosen by name"
    assert choose("triton", SHAPE, LENGTHS, CPU, "gfx908", tmp_path)[0].launch == TRIED["triton"].launch
    with pytest.raises(UserError, match=r"attention_backend = varlen: varlen is refused on this machine: it crashed"):
        choose("varlen", SHAPE, LENGTHS, CPU, "gfx908", tmp_path)


def test_a_resumed_run_keeps_its_backend_as_long_as_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdicts(monkeypatch, TRIED)
    before = Choice("triton", "fastest then", "gfx908", "32.32.4.1 32.32.4.1 32.32.4.1")
    for wanted in ("auto", "triton"):
        assert choose(wanted, SHAPE, LENGTHS, CPU, "gfx908", tmp_path, before) == (before, [])
    assert asked == [("triton", before.launch)] * 2
    assert choose("chunked", SHAPE, LENGTHS, CPU, "gfx908", tmp_path, before)[0].name == "chunked"
    assert choose("auto", SHAPE, LENGTHS, CPU, "cpu", tmp_path, before)[0].name == "sdpa"  # another machine
    gone = replace(before, name="flex")  # older versions had it
    assert choose("auto", SHAPE, LENGTHS, CPU, "gfx908", tmp_path, gone)[0].name == "triton"
    monkeypatch.setitem(TRIED, "triton", Trial("it crashed"))
    chosen, said = choose("auto", SHAPE, LENGTHS, CPU, "gfx908", tmp_path, before)
    assert chosen.name == "chunked"
    assert said[0] == "attention: triton, which the run used until now, is refused here: it crashed"


@pytest.mark.parametrize("name", ["varlen", "flash_attn", "triton"])
def test_kernels_of_a_gpu_are_refused_where_they_cannot_run(name: str) -> None:
    """Ours on an architecture without a launch table: on a CPU the tests have Triton's interpreter."""
    assert judge(name, SHAPE, LENGTHS, CPU, "gfx1100" if name == "triton" else "cpu", "").refused


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
    assert judge("flash_attn", SHAPE, LENGTHS, CPU, "cpu", "").refused == ""
    backend: Backend = make_backend("flash_attn", "cpu")
    q, k, v = (torch.randn(2, 5, heads, 16) for heads in (4, 2, 2))
    documents = Documents(2, 5, (2, 3, 5))
    expected = Eager()(q, k, v, Eager().prepare(documents, CPU))
    torch.testing.assert_close(backend(q, k, v, backend.prepare(documents, CPU)), expected)


def test_where_every_trial_is_refused_the_scores_are_explicit_and_the_reasons_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts(monkeypatch, {name: Trial(refused="out of memory") for name in (*TRIED, "sdpa")})
    chosen, said = choose("auto", SHAPE, LENGTHS, CPU, "gfx1100", tmp_path)
    assert (chosen.name, chosen.why) == ("chunked", "every trial was refused; it needs no kernel")
    assert "attention: chunked is refused: out of memory" in said


def test_launch_settings_that_are_not_used_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "_ask_child", lambda *_: Trial(ms=1.0, launch="x", passed_over="keys 16.64.2.1: wrong"))
    try_backend("triton", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path))
    assert "triton does not use these launch settings: keys 16.64.2.1: wrong" in caplog.text


def test_without_a_compiler_the_remedy_is_named_and_the_refusal_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_ask_child", lambda *_: Trial("RuntimeError: Failed to find C compiler."))
    monkeypatch.setattr(trial, "cannot_compile", lambda: ("no gcc or clang in PATH", "sudo apt install gcc"))
    for name, remedy in (("triton", "no gcc or clang in PATH: sudo apt install gcc"), ("varlen", "C compiler.")):
        assert try_backend(name, Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path)).refused.endswith(remedy)
    monkeypatch.setattr(trial, "_ask_child", lambda *_: Trial())
    assert try_backend("triton", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path)).refused  # remembered
    monkeypatch.setattr(trial, "cannot_compile", lambda: ("", ""))
    assert not try_backend(
        "triton", Case(SHAPE, LENGTHS, CPU, "cpu", tmp_path)
    ).refused  # gcc is there now: tried again
