"""The report says what the run folder says, whatever is in it, and its page needs nothing else."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPO

from titan_mi100.checkpoint import sealed
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import MetricsConfig
from titan_mi100.run import forecast
from titan_mi100.run.folder import Outcome, write_run_state
from titan_mi100.run.metrics import Reporter, RunFigures
from titan_mi100.trainer import StepResult
from titan_mi100.watch.outcome import append_to_log
from titan_mi100.workshop.columns import FIGURES, SETTINGS
from titan_mi100.workshop.pages import collect as collecting
from titan_mi100.workshop.pages import long_files as tables
from titan_mi100.workshop.pages.charts import ticks
from titan_mi100.workshop.pages.collect import collect
from titan_mi100.workshop.pages.long_files import Summary, usable
from titan_mi100.workshop.pages.verdict import findings, state_of
from titan_mi100.workshop.report import main

HOSTILE = "<script>alert(1)</script></pre><img src=x onerror=alert(2)>'\"&amp; \x1b[31m \u202eevil 😀 مرحبا \ud800"
VOID = {"meta", "br", "img", "link", "input"}


def result(step: int, loss: float) -> StepResult:
    return StepResult(
        first_row=4 * step - 4, next_row=4 * step, lr=1e-3 / step, grad_norm=1.0 + 1 / step, tokens=1000,
        supervised=600, attention_pairs=9, seconds=0.5, waited=0.005, loss=loss, peak_memory_gib=1.5,
    )  # fmt: skip


def write_lines(path: Path, *entries: object) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def write_run(folder: Path, steps: int = 100, loss: Callable[[int], float] = lambda step: 2 + 4 / step) -> Path:
    """A run folder, its metrics and its state written by the trainer's own code, the rest by hand."""
    folder.mkdir(parents=True)
    figures = RunFigures(steps, 40, lambda step: 10**9 / step.seconds / 1e11, "bf16")
    reporter = Reporter(folder, MetricsConfig(enable_tensorboard=False, log_freq=10**9), figures)
    for step in range(1, steps + 1):
        reporter.after_step(step, result(step, loss(step)))
        if step % (steps // 5 or 1) == 0:
            reporter.validation(
                step, {"loss": 3 - step / steps}, 0.5, {"web": 3.25 - step / steps, "code": 2.5 - step / steps}
            )
    reporter.close()
    write_run_state(folder, Outcome(0, "", steps, "done", "to train on, raise training.steps or epochs"))
    config = load_config(["--job.config_file", str(REPO / "train_configs" / "debug.toml")])
    (folder / "config.toml").write_text(to_toml(config))
    environment = {
        "device": "CPU",
        "processes": 2,
        "layout": "FSDP2 over 2 (ZeRO-1)",
        "torch": "2.13.0",
        "hip": None,
        "command": ["train.py", "--x y"],
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    plan = {"memory": [], "least": 2.0**30, "most": 2.0**31, "card": 2**35, "step_seconds": 0.4, "mfu": 0.375}
    (folder / "plan.json").write_text(json.dumps({**plan, "bubble": 0.0, "sent": {}}))
    (folder / "train.log").write_text(
        "2026-11-23 22:00:00,000 INFO begins\n2026-11-23 22:00:01,000 WARNING twice\n"
        "2026-11-23 22:00:02,000 WARNING twice\n2026-11-23 22:30:00,000 ERROR once\n"
    )
    checkpoints = folder / "checkpoint"
    checkpoints.mkdir()
    for step in (50, 100):
        aside = sealed.begin(checkpoints, step)
        (aside / "weights").write_bytes(b"w" * 2_000_000)
        sealed.seal(aside, {"weights": (2_000_000, "0" * 64)}, {"step": step})
    sealed.mark_best(checkpoints / "step-100")
    return folder


# the mean of the last ten losses of write_run
LAST_LOSS = f"{sum(2 + 4 / step for step in range(91, 101)) / 10:.4f}"
FILES = (
    *("metrics.jsonl", "run_state.json", "config.toml", "environment.json", "plan.json", "train.log"),
    "checkpoint",
)


class Reading(HTMLParser):
    """Checks that each element is closed in its turn, and collects what a browser would run, fetch or show."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text, self.scripts, self.attributes = "", list[str](), list[tuple[str, str]]()
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> inside {self.open}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data + "\n"


class Report:
    """Runs the command in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self._capsys = folder / "page.html", capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        assert main([str(argument) for argument in arguments]) == code
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err and (err == "" if code == 0 else out == "")
        return err if code else out

    def page(self, run: Path) -> Reading:
        self(run, "--output", self.file)
        return Reading(self.file.read_text(encoding="utf-8"))

    def json(self, run: Path) -> dict[str, Any]:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        return json.loads(self(run, "--json"), parse_constant=refuse)


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    return Report(tmp_path, capsys)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = write_run(tmp_path / "run")
    capsys.readouterr()
    return folder


# numbers


@pytest.mark.parametrize("steps", [1, 9, 100, 1000])
def test_a_summary_is_that_of_all_values_and_of_the_last_ten(steps: int) -> None:
    values = {step: math.sin(step) * step for step in range(1, steps + 1)}
    summary = Summary(1, values[1])
    for step, value in values.items():
        summary.add(step, value)
    found, (lowest, highest) = summary.as_dict(), [extreme(values, key=values.__getitem__) for extreme in (min, max)]
    assert (found["lowest"], found["highest"]) == ((lowest, values[lowest]), (highest, values[highest]))
    assert (found["first"], found["last"]) == ((1, values[1]), (steps, values[steps]))
    assert found["count"] == steps and found["sum"] == pytest.approx(sum(values.values()))
    assert found["mean"] == pytest.approx(found["sum"] / steps)
    last = list(values.values())[-10:]
    assert found["recent"] == (pytest.approx(sum(last) / len(last)), len(last))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, True, None, "1", [1], 10**400])
def test_what_is_no_number_is_not_drawn(value: object) -> None:
    assert not usable(value)
    assert usable(0) and usable(-1.5)


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7, 40, 99, 100, 12_345, 10**9])
def test_ticks_are_round_inside_and_few(most: int) -> None:
    found = ticks(most)
    assert 2 <= len(found) <= 6 and found[0] == 0 and most - found.step < found[-1] <= most
    assert str(found.step).rstrip("0") in ("1", "2", "5")


# the page


def test_a_run_of_preferences_may_have_the_measure_under_its_old_name(run: Path, report: Report) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    new = [
        {**line, "margin": 0.1, "accuracy": 0.9, "kl" if line["step"] < 50 else "below_reference": -1.5}
        for line in lines
    ]
    write_lines(run / "metrics.jsonl", *new)
    assert "below_reference\n" in report.page(run).text


def test_the_page_says_what_the_files_say(run: Path, report: Report) -> None:
    text = report.page(run).text
    for shown in (
        *("Done", LAST_LOSS, "Lowest validation\n2.0000", "Steps\n100", "toks/s\n2,000", "2.0%"),
        *("step-50", "step-100", "4.0 MB"[1:], "best validation"),
        *("1 error in train.log", "2 warnings in train.log"),
    ):
        assert shown in text, shown
    assert "Restarts\n0" in text


def test_the_page_fetches_nothing_and_runs_no_script(run: Path, report: Report) -> None:
    state = {"state": "crashed", "exit_code": 1, "message": HOSTILE, "next": "https://example.org/x.js"}
    (run / "run_state.json").write_text(json.dumps(state))
    page = report.page(run)
    assert not page.tags & {"img", "link", "iframe", "object", "embed", "base", "form", "audio", "video", "a", "image"}
    assert not {name for name, _ in page.attributes} & {"src", "href", "action", "srcset", "data", "poster"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not page.scripts
    [policy] = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    style = re.search("<style>(.*?)</style>", report.file.read_text(encoding="utf-8"), re.S)[1]  # type: ignore[index]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


@pytest.mark.parametrize("file", FILES)
def test_each_file_may_be_missing(file: str, run: Path, report: Report) -> None:
    if file == "checkpoint":
        (run / file).rename(run / "elsewhere")
    else:
        (run / file).unlink()
    page, found = report.page(run), report.json(run)
    assert found["problems"] == []
    assert file != "checkpoint" or "Checkpoints" not in page.text


def test_a_folder_with_nothing_but_a_config_is_a_run_that_has_just_begun(run: Path, report: Report) -> None:
    for file in set(FILES) - {"config.toml", "checkpoint"}:
        (run / file).unlink()
    text = report.page(run).text
    assert "How it ended is not known" in text and "No step is in metrics.jsonl" in text and "Metrics" not in text


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 26)  # without taking any place


OTHER_THINGS = '[1, 2]\n"x"\nnull\n7\n{"step": -1}\n{"step": 1e999}\n{"step": true}\n'
NOT_NUMBERS = '{"step": 1, "loss": NaN, "lr": -Infinity, "tokens": "9", "mfu": 1e400}\n'
HUGE_NUMBERS = (
    '{"step": 9223372036854775807, "loss": 9e99, "lr": -9e99, "mfu": 5e-324}\n{"step": 1, "loss": 1e-320, "mfu": 0}\n'
    f'{{"step": 2, "lr": {"9" * 5000}}}\n'
)
RUINS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 999),
    "deep": lambda path: path.write_text('{"step": 1, "loss": ' + "[" * 30_000),
    "one long line": lambda path: path.write_text('{"step": "' + "x" * 3_000_000),
    "open quote": lambda path: path.write_text('a.jsonl,1,kept,train,1,1,1,"' + "x," * 300_000),
    "other things": lambda path: path.write_text(OTHER_THINGS),
    "not numbers": lambda path: path.write_text(NOT_NUMBERS),
    "huge numbers": lambda path: path.write_text(HUGE_NUMBERS),
    "link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "huge": make_huge,
}  # fmt: skip


@pytest.mark.parametrize("ruin", RUINS)
def test_ruined_files_are_named_and_the_rest_is_shown(ruin: str, run: Path, report: Report) -> None:
    files = [file for file in FILES if file != "checkpoint"]
    for file in files:
        RUINS[ruin](run / file)
    page, found = report.page(run), report.json(run)
    assert "step-100" in page.text
    if ruin in ("link", "dangling link", "folder", "pipe"):
        assert len(found["problems"]) >= len(files)
        assert not [file for file in files if not any(file in line for line in found["problems"])]
    if ruin == "cut off":
        assert found["metrics"]["unreadable"] == 1 and found["metrics"]["last_step"] == 100
    assert "root:" not in page.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_that_may_not_be_read_are_named(run: Path, report: Report) -> None:
    (run / "metrics.jsonl").chmod(0)
    assert "cannot be read: Permission denied" in report.page(run).text


def test_hostile_texts_are_only_text(tmp_path: Path, report: Report) -> None:
    run = write_run(tmp_path / "<b>&'\"\u202e\n")
    restarts = [{"state": HOSTILE, "message": HOSTILE, "step": 5, "attempt": "x", "time": HOSTILE}, HOSTILE, None]
    state = {"state": HOSTILE, "exit_code": 10**30, "message": HOSTILE, "next": HOSTILE, "restarts": restarts}
    (run / "run_state.json").write_text(json.dumps(state))
    (run / "train.log").write_text("2026-11-23 22:00:00,000 WARNING <script>\n")
    config = (
        f"big = 0x{'f' * 5000}\n" + '"<script>" = "</style>"\n[a]\nb = inf\nc = 2026-01-01\nd = [[nan], [{e = 1}]]\n'
    )
    (run / "config.toml").write_text(config)
    losses = {"loss": 1.0, "validation_loss": 1}
    lines = ({"step": step, **losses, "validation_loss/</path>\"'><script>": step} for step in (1, 2))
    write_lines(run / "metrics.jsonl", *lines)
    page = report.page(run)
    assert not page.scripts and not page.tags & {"img", "i"}
    text = report.file.read_text(encoding="utf-8")
    assert not set("\x1b\u202e\x00") & set(text) and "\\u202eevil" in page.text and "😀 مرحبا" in page.text
    assert report.json(run)["state"]["exit_code"] is None


def test_values_and_sources_are_bounded(run: Path, report: Report) -> None:
    losses = {f"validation_loss/{i}": 1.0 for i in range(1000)} | {"validation_loss/" + "x" * 999: 1}
    write_lines(run / "metrics.jsonl", {"step": 1, "loss": 1.0, **losses})
    (run / "train.log").write_text("".join(f"2026-11-23 22:00:00,000 WARNING {i}\n" for i in range(999)))
    found = report.json(run)
    assert len(found["metrics"]["series"]) == 64 and found["log"]["warnings"] == 999
    report.page(run)
    assert report.file.stat().st_size < 600_000


def test_a_page_of_many_steps_stays_small(tmp_path: Path, report: Report) -> None:
    steps = ({"step": step, "loss": 2 + step % 5, "mfu": 0.3, "seconds": 1} for step in range(1, 15_001))
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "metrics.jsonl", *steps)
    assert "15,000" in report.page(tmp_path / "run").text and report.file.stat().st_size < 20_000


def test_no_line_is_held_whole_that_is_longer_than_ours(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"x" * 1_000_000 + b"\n{}\n")
    pieces = list(tables.lines(tmp_path / "metrics.jsonl"))
    assert max(map(len, pieces)) == 65_536 and sum(map(len, pieces)) == 1_000_004


# what it says of a run


def test_restarts_are_listed(run: Path, report: Report) -> None:
    first = {"time": "2026-11-23T22:15:10Z", "attempt": 1, "state": "crashed", "exit_code": 1, "step": 30}
    first["message"] = "boom\nno progress\nstacks of all"
    entries = [first, {**first, "attempt": 2, "step": None, "state": "hung", "exit_code": 5, "new_key": 1}]
    state = json.loads((run / "run_state.json").read_text())
    (run / "run_state.json").write_text(json.dumps({**state, "restarts": entries}))
    text = report.page(run).text
    assert "2 restarts; train.log has all about them: boom, boom" in text and "stacks" not in text
    assert [(each["attempt"], each["exit_code"], each["step"]) for each in collect(run)["restarts"]] == [
        (1, 1, 30), (2, 5, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        ({"state": "running", "exit_code": 1, "message": "still"}, "neutral", "and metrics.jsonl is "),
        ({"state": "crashed", "exit_code": 1, "message": "boom\nmore"}, "bad", "boom\nmore (exit code 1)\nnext: "),
        ({"state": "preempted", "exit_code": 3, "message": "SIGTERM"}, "warn", "SIGTERM (exit code 3)"),
        ({"state": "out_of_memory", "exit_code": 6, "message": "planned 9"}, "bad", "planned 9 (exit code 6)"),
        ({"state": "new_state", "exit_code": 0}, "bad", "New state (exit code 0)"),
        ({"state": None}, "warn", ""),
    ],
)
def test_how_it_ended_is_the_first_thing(change: dict[str, Any], level: str, said: str, run: Path) -> None:
    state = json.loads((run / "run_state.json").read_text())
    (run / "run_state.json").write_text(json.dumps({**state, **change}))
    found = collect(run)
    assert state_of(found).level == level
    assert any(said in finding.text for finding in findings(found))


def test_what_to_look_at(tmp_path: Path, run: Path) -> None:
    def of(**change: Any) -> str:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        write_lines(run / "metrics.jsonl", *({**line, **change} for line in lines))
        return "\n".join(finding.text for finding in findings(collect(run)))

    text = of()
    for absent in ("did not fall", "overfitting", "waiting for data", "skipped", "nearly full", "suspect", "rejected"):
        assert absent not in text
    assert "Memory was nearly full: 31.0 of 32.0 GiB" in of(peak_memory_gib=31.0)
    assert "10.0% of the time was spent waiting for data" in of(data_wait=0.1)
    assert "100 steps were skipped" in of(skipped=True)
    assert "The loss did not fall: 9 at first, now 9" in of(loss=9.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "validation_loss": 20.0}\n')
    assert "Validation loss was lowest at step 100 (2.0000; 20.0000 at the end, +900.0%)" in of()
    sealed.mark_suspect(run / "checkpoint" / "step-50", "its loss is high")
    (run / "checkpoint" / "step-100" / "manifest.json").write_text("{}")
    (run / "checkpoint" / "damaged-step-10-abc").mkdir()
    text = of()
    assert "suspect: a run resumes from them only if asked to: step-50" in text
    assert "as damaged: damaged-step-10" in text
    assert "not as written: step-100" in text
    [old, new] = collect(run)["checkpoints"]["listed"]
    assert (old["suspect"], old["is_best"], new["is_best"]) == ("its loss is high", False, True)
    assert old["bytes"] > 2_000_000 and "has changed since it was written" in new["problem"]
    assert "Validation losses that were not finite: " in of(validation_loss=None)


def test_names_of_files_are_those_that_the_run_writes() -> None:
    assert collecting.PLAN == forecast.FILE


def test_lines_of_the_launcher_are_in_the_report(run: Path) -> None:
    append_to_log(run, ["rank 1 is behind", "restart 1 of 3"])
    assert collect(run)["log"]["errors"] == 3


def test_skipped_spikes_are_told_from_steps_that_are_not_finite(run: Path, report: Report) -> None:
    lines = ('{"step": 98, "loss": null, "skipped": true}', '{"step": 99, "loss": 9.0, "skipped": true, "spike": true}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join((*lines, '{"step": 100, "loss": 9.0, "spike": true}\n')))
    found = collect(run)
    said = "2 steps were skipped because loss or gradients were not finite, or because of loss spikes (1): 98, 99"
    assert said in report.page(run).text
    found["metrics"] |= {"skipped": 1, "skipped_steps": [99]}
    assert "1 step was skipped because of loss spikes (1): 99" in {finding.text for finding in findings(found)}


def test_several_runs_are_a_table_with_what_to_look_at_and_the_settings_that_differ(
    run: Path, tmp_path: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "b" / "\x1b[31m", steps=50, loss=lambda step: 3.0)
    config = (run / "config.toml").read_text().replace("lr = 0.001", "lr = 0.5")
    (other / "config.toml").write_text(config.replace("tokens_per_step = 512", "tokens_per_step = 4096"))
    with (run / "metrics.jsonl").open("a") as file:  # a run that traced two steps
        for step, milliseconds in ((3, 10.0), (4, 30.0)):
            file.write(json.dumps({"step": step, "comm_ms": milliseconds, "comm_exposed_ms": 5.0}) + "\n")
    capsys.readouterr()
    text = report(run, other, run)
    assert "\x1b" not in text and not (tmp_path / "report.html").exists()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    [heads, _, *first] = rows[:4]
    assert heads[:5] == ["Run", "State", "Loss", "Lowest validation", "Steps"]
    shown = [dict(zip(heads, row, strict=True)) for row in first]
    assert [(each["Run"], each["State"], each["Loss"]) for each in shown] == [
        ("run", "Done", LAST_LOSS), ("\\x1b[31m", "Done", "3.0000"),
    ]  # fmt: skip
    assert [column for column in heads if column in (*SETTINGS, *FIGURES)] == [*SETTINGS, *FIGURES]
    assert [[each[name] for name in ("N", "B_micro", "GA", "T_eff", "ckpt", "dtype", "step_ms")] for each in shown] == [
        ["2", "1", "1", "512", "none", "float32", "500"], ["2", "1", "8", "4,096", "none", "float32", "500"],
    ]  # fmt: skip
    assert [(each["comm_ms"], each["exposed_ms"], each["peak GB"]) for each in shown] == [
        ("20.0", "5.0", "1.61"),
        ("", "", "1.61"),
    ]
    assert ["optimizer.lr", "0.001", "0.5"] in rows and "training.seq_len" not in text
    assert "[31m: The loss did not fall" in text
    assert [each["name"] for each in json.loads(report(run, other, "--json"))] == ["run", "\x1b[31m"]
    twin = tmp_path / "c" / "run"
    write_run(twin, steps=1)
    capsys.readouterr()
    assert f"| {run} " in report(run, twin)  # runs of one name are told apart by their folders
    assert "leave --output out" in report(run, twin, "--output", report.file, code=2)


# the command


def test_what_is_no_run_folder_is_refused(run: Path, tmp_path: Path, report: Report) -> None:
    assert "nowhere: no such folder" in report(tmp_path / "nowhere", code=2)
    assert "name the folder that it is in" in report(run / "metrics.jsonl", code=2)
    said = report(tmp_path, code=2)
    assert "is not a run folder: it has none of config.toml, metrics.jsonl, run_state.json" in said
    assert f"name one of those in it: {run}" in said
    (tmp_path / "empty").mkdir()
    assert "name the folder that a run printed" in report(tmp_path / "empty", code=2)
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_page_is_written_beside_the_run_and_over_pages_only(run: Path, tmp_path: Path, report: Report) -> None:
    said = report(run)
    assert said == f"{run / 'report.html'}: {(run / 'report.html').stat().st_size:,} bytes\n"
    report(run)  # again
    before = (run / "config.toml").read_bytes()
    assert "exists already, and is not overwritten" in report(run, "--output", run / "config.toml", code=2)
    (thesis := tmp_path / "thesis.html").write_text("<!DOCTYPE html>\n<title>My thesis</title>")
    assert "exists already, and is not overwritten" in report(run, "--output", thesis, code=2)
    assert "leave --output out" in report(run, "--json", "--output", tmp_path / "new.html", code=2)
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(run / "config.toml")
    assert "is a link" in report(run, code=2)
    assert (run / "config.toml").read_bytes() == before
    assert "cannot be written (No such file or directory)" in report(run, "--output", tmp_path / "a" / "b.html", code=2)
    assert "is no regular file" in report(run, "--output", tmp_path, code=2).replace("not a regular", "no regular")


def test_json_is_what_the_page_is_made_of(run: Path, report: Report) -> None:
    found = report.json(run)
    assert not (run / "report.html").exists()
    series = found["metrics"]["series"]["loss"]
    assert series["first"] == [1, 6.0] and series["last"] == [100, 2.04]
    assert found["environment"] == {"layout": "FSDP2 over 2 (ZeRO-1)", "processes": "2"}
    assert found["config"]["optimizer.lr"] == "0.001" and found["card"] == 2**35


def test_it_starts_without_torch_and_matplotlib(run: Path) -> None:
    code = (
        "import sys; from titan_mi100.workshop.report import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'matplotlib', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, cwd=REPO, stdout=subprocess.DEVNULL)


def test_a_run_names_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from titan_mi100.log import log
    from titan_mi100.open_run.summary import log_summary
    from titan_mi100.run.progress import Progress

    config = load_config(["--job.config_file", str(REPO / "train_configs" / "debug.toml")])
    log.propagate = True  # until the end of the test
    best, said = Progress(5, best_step=5, best_loss=0.7081), list[Any]()
    for progress, *said in (
        (Progress(5), "not measured on new rows", "--data.validation_fraction 0.05"),
        (Progress(5, best_step=5, best_loss=0.5), "loss 0.5000 on new rows", "more steps or epochs"),
        (Progress(5, best_step=3, best_loss=0.5, validations_since_best=1), "at best, after step 3", "fewer steps"),
        (best, {"accuracy": 0.8, "below_reference": 1.0}, "80% of the new answers on the right side", "more steps"),
        (best, {"accuracy": 0.0}, "0% of the new answers on the right side", "a lower optimizer.lr; look at pairs"),
        (best, {"accuracy": 0.9, "below_reference": 50.0}, "90% of the new answers", "objective.sft_weight = 0.2"),
        (best, {"agreement": 0.25, "kl": 1.5}, "25% of the teacher's likeliest ids, KL 1.5000 nats", "more steps"),
    ):
        caplog.clear()
        measured = said.pop(0) if isinstance(said[0], dict) else {}
        with caplog.at_level("INFO"):
            run = {"folder": tmp_path / "a b", "config": config, "progress": progress, "measured": measured}
            log_summary(SimpleNamespace(**run, model=SimpleNamespace(passed_through={}, draft="no")), 5)
        said.append("done: learned 0 packed rows in 5 steps")
        assert [part for part in said if part not in caplog.text] == []
        assert any(line.endswith(f"titan-mi100 report '{tmp_path}/a b'") for line in caplog.messages)
