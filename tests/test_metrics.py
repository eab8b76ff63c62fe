"""What is printed and recorded of a step."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_mi100.config.settings import CheckpointConfig, Config, MetricsConfig, ModelConfig, TrainingConfig
from titan_mi100.log import log
from titan_mi100.open_run import record
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.parallel.distributed import World
from titan_mi100.run.metrics import Reporter, RunFigures
from titan_mi100.run.progress import Progress
from titan_mi100.run.sinks import Explanation
from titan_mi100.trainer import StepResult
from titan_mi100.workshop.columns import figures
from titan_mi100.workshop.made_up import made_up, random_rows

RESULT = StepResult(
    first_row=0,
    next_row=16,
    lr=1e-4,
    loss=1.5,
    grad_norm=0.25,
    tokens=2000,
    supervised=500,
    attention_pairs=10_000,
    seconds=0.5,
    waited=0.01,
    peak_memory_gib=1.25,
)


def open_reporter(
    folder: Path, steps: int, last_step: int = 0, validation_due: bool = False, mfu: float | None = None,
    log_freq: int = 1,
) -> Reporter:  # fmt: skip
    config = MetricsConfig(enable_tensorboard=False, log_freq=log_freq)
    return Reporter(folder, config, RunFigures(steps, 64, lambda _: mfu, "bf16"), last_step, validation_due)


def explained(world: World, folder: Path, config: Config, step: int = 0, processes: int = 1) -> Explanation:
    """Opens the record of a run that starts after this step; what sinks are told of it."""
    told: list[Explanation] = []
    config = replace(config, model=ModelConfig(flavor="debug"))
    data = made_up(random_rows(1, 16, 64, supervised_share=1.0))
    world = replace(world, size=processes)
    inputs = RunInputs(config, processes, config.spec(), world, folder, data, {}, None, Progress(step=step))
    part = SimpleNamespace(model=SimpleNamespace(backend=None))
    model: Any = SimpleNamespace(parts=[part], objective=SimpleNamespace(printed=()), draft="no")
    rows: Any = SimpleNamespace(row=lambda _: data.train.row(0), rows_per_epoch=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "running_kernel", lambda *_: "none")
        patch.setattr(record, "open_sinks", lambda *given: told.append(given[2]) or ())
        record.open_record(inputs, model, rows, 9, lambda _: None)
    return told[0]


def report(
    folder: Path, mfu: float | None, first_step: int = 1, steps: int = 2, validation_due: bool = False
) -> list[dict]:
    reporter = open_reporter(folder, steps, first_step - 1, validation_due, mfu)
    for step in range(first_step, steps + 1):
        reporter.after_step(step, RESULT)
    reporter.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rates_are_per_second_over_all_ranks(tmp_path: Path) -> None:
    first = report(tmp_path, 0.0625)[0]
    assert (first["tokens_per_second"], first["supervised_tokens_per_second"]) == (4000, 1000)
    assert first["data_wait"] == pytest.approx(0.02) and first["epoch"] == 0.25
    assert first["mfu"] == 0.0625


def test_figures_have_the_keys_that_tables_read(tmp_path: Path) -> None:
    reporter = open_reporter(tmp_path, 2)
    reporter.after_step(1, RESULT)
    reporter.add(1, comm_ms=120.5, comm_exposed_ms=20.25)
    reporter.close()
    measured: dict = {}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        measured |= json.loads(line)
    assert figures(measured) == {
        "step_ms": "500", "comm_ms": "120", "exposed_ms": "20.2", "toks/s": "4,000", "peak GiB": "1.25",
        "peak GB": "1.34", "MFU": "n/a",
    }  # fmt: skip
    assert figures({"mfu": 0.1234})["MFU"] == "12.3%" and figures({})["step_ms"] == ""


def test_the_first_step_of_each_start_is_printed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "info", said.append)
    for last_step, steps in ((0, 7), (2, 3), (5, 9)):
        reporter = open_reporter(tmp_path, 9, last_step, log_freq=4)
        for step in range(last_step + 1, steps + 1):
            reporter.after_step(step, RESULT)
        reporter.close()
    assert [line[:8] for line in said] == [f"step {step}/9" for step in (1, 4, 3, 6, 8, 9)]


def test_unknown_hardware_has_no_mfu(tmp_path: Path) -> None:
    assert report(tmp_path, None)[0]["mfu"] is None


def test_steps_that_are_trained_again_are_recorded_once(tmp_path: Path) -> None:
    report(tmp_path, None, steps=5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a kill in the middle of a line
    assert [entry["step"] for entry in report(tmp_path, None, first_step=4, steps=6)] == [1, 2, 3, 4, 5, 6]


def test_a_validation_that_is_done_again_is_recorded_once_and_one_that_is_not_finite_is_null(tmp_path: Path) -> None:
    for step, due, loss in ((0, False, float("nan")), (0, False, 2.0), (1, False, 3.0), (1, True, 1.0)):
        reporter = open_reporter(tmp_path, 9, step, due)
        reporter.validation(1, {"loss": loss}, loss / 2, {"chats": loss})
        reporter.close()
        found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        values = [entry["validation_loss"] for entry in found]
        assert values == {(0, 2.0): [2.0], (1, 3.0): [2.0, 3.0], (1, 1.0): [1.0]}.get((step, loss), [None])
        assert [entry["bits_per_byte"] for entry in found] == [value and value / 2 for value in values]
        assert [entry["validation_loss/chats"] for entry in found] == values


def test_a_validation_with_a_draft_head_shows_it_behind_the_objective_s_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    figures = RunFigures(9, 64, lambda _: None, "bf16", ("kl", "draft_loss"))
    reporter = Reporter(tmp_path, MetricsConfig(enable_tensorboard=False), figures)
    drafts = {"draft_acceptance": 0.5, "draft_loss": 1.5, "draft_slots": 8.0}
    for measures in ({"kl": 0.25}, {}):
        reporter.validation(1, {"loss": 2.0, **measures, **drafts}, None, {})
    reporter.close()
    with_kl, alone = lines
    assert "kl 0.2500  draft acceptance 50.0%" in with_kl and "perplexity 7.389" in alone and "50.0%" in alone
    entry = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {f"validation_{name}" for name in drafts} < entry.keys()


def test_a_full_disk_is_said_once_and_leaves_the_end_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", said.append)
    reporter = open_reporter(tmp_path, 9)
    reporter._file = Path("/dev/full").open("w")  # noqa: SIM115
    for step in (1, 2):
        reporter.after_step(step, RESULT)
    reporter.close()
    assert said == ["/dev/full: cannot be written to: No space left on device"]


def test_a_config_that_is_not_this_start_s_is_kept(world: World, tmp_path: Path) -> None:
    """A user's own config.toml in the run's folder; then the settings that made a checkpoint, not those that failed."""
    own, kept = tmp_path / "config.toml", [tmp_path / f"config-until-step-{step}.toml" for step in (0, 5)]
    own.write_bytes(b"# my own, caf\xe9\n")
    back = CheckpointConfig(load_step=5, fresh=True)
    for steps, last_step in ((1, 0), (2, 0), (3, 5), (4, 5)):
        explained(world, tmp_path, Config(training=TrainingConfig(steps=steps), checkpoint=back), last_step)
        assert f"steps = {steps} " in own.read_text()
    assert kept[0].read_bytes() == b"# my own, caf\xe9\n"
    assert "steps = 2 " in kept[1].read_text()
    assert "load_step = -1 " in own.read_text() and "fresh = false " in own.read_text()  # for the next start


@pytest.mark.parametrize("line", ['{"step": ' + "9" * 5000 + "}", '{"step": 2, "lo', "[" * 100_000, "\udc80"])
def test_a_line_that_cannot_be_read_is_dropped_and_the_log_says_so(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n", errors="surrogateescape")
    open_reporter(tmp_path, 9, last_step=5)
    assert path.read_text() == '{"step": 1}\n'
    assert "cannot be read; it is left out" in caplog.text
