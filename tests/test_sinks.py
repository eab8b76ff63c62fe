"""TensorBoard and W&B get the same values, and what explains a run once; W&B can neither stop nor slow a run."""

import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from test_metrics import RESULT, explained

from titan_mi100.config.check import check
from titan_mi100.config.settings import Config, MetricsConfig
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.parallel.distributed import World
from titan_mi100.run import sinks
from titan_mi100.run.metrics import Reporter, RunFigures
from titan_mi100.run.sinks import Explanation, open_sinks

ABOUT = Explanation({"training.steps": 4, "data.format": "auto"}, {"config": "[job]", "layout": "FSDP2 over 2"})
WANDB_ALONE = MetricsConfig(enable_tensorboard=False, enable_wandb=True)


class FakeRun:
    """What wandb.init returns; `fails` names the methods that raise."""

    def __init__(self, options: dict[str, Any], fails: set[str]) -> None:
        self.options, self.fails = options, fails
        self.rows: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.ended: int | None = None

    def _may_fail(self, name: str) -> None:
        if name in self.fails:
            raise ConnectionError(f"{name} failed")

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._may_fail("define_metric")
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self._may_fail("log")
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self._may_fail("finish")
        if "slow" in self.fails:
            time.sleep(30)
        self.ended = exit_code


class FakeWandB(types.ModuleType):
    """The part of wandb that is used. `problems`: what the next calls of init raise."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.errors = types.ModuleType("wandb.errors")
        self.usage_error = self.errors.UsageError = type("UsageError", (Exception,), {})  # type: ignore[attr-defined]
        self.errors.AuthenticationError = type("AuthenticationError", (Exception,), {})  # type: ignore[attr-defined]
        self.problems: list[Exception] = []
        self.runs: list[FakeRun] = []
        self.fails: set[str] = set()
        self.teardowns = 0
        self.Settings = dict

    def init(self, **options: Any) -> FakeRun:
        if self.problems:
            raise self.problems.pop(0)
        self.runs.append(FakeRun(options, self.fails))
        return self.runs[-1]

    def teardown(self) -> None:
        self.teardowns += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    # TensorBoard reads files in the order of their names, where within a second 10 comes before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setitem(sys.modules, "wandb.errors", fake.errors)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", said.append)
    return said


def record(
    folder: Path,
    first: int,
    last: int,
    steps: int,
    tensorboard: bool = True,
    about: Explanation = ABOUT,
    loss: float = 1,
) -> None:
    """Steps `first` to `last` of a run of `steps` steps, then a validation."""
    opened = open_sinks(folder, MetricsConfig(enable_tensorboard=tensorboard, enable_wandb=True), about, first - 1)
    figures = RunFigures(steps, 64, lambda _: None, "fp32")
    reporter = Reporter(folder, MetricsConfig(), figures, first - 1, False, opened)
    for step in range(first, last + 1):
        reporter.after_step(step, replace(RESULT, loss=loss + step / 10))
    reporter.validation(last, {"loss": loss}, None, {"chats": loss})
    reporter.close()


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_both_get_the_same_values_under_the_same_tags_and_a_resumed_run_replaces_its_steps(
    tmp_path: Path, wandb: FakeWandB
) -> None:
    record(tmp_path, 1, 3, steps=4)
    record(tmp_path, 2, 4, steps=4, about=replace(ABOUT, is_known=True), loss=2)  # killed at 3, a checkpoint at 1
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"] and {run.options["resume"] for run in wandb.runs} == {"allow"}
    assert first.options["config"] == ABOUT.settings and first.options["dir"] == str(tmp_path)
    assert (first.options["project"], first.options["name"]) == ("titan_mi100", tmp_path.name)
    assert first.metrics == [("step", None), ("*", "step")]  # not wandb's own counter: that may not fall back
    assert [run.ended for run in wandb.runs] == [1, 0]
    board = events(tmp_path)
    shown = {
        (tag, point.step): pytest.approx(point.value, rel=1e-6)
        for tag in board.Tags()["scalars"]
        for point in board.Scalars(tag)
    }
    sent: dict[tuple[str, int], float] = {}
    for row in [*first.rows, *second.rows]:
        assert all(type(value) is float for tag, value in row.items() if tag != "step")
        sent |= {(tag, row["step"]): value for tag, value in row.items() if tag != "step"}
    for name in ("loss", "perplexity", "loss/chats"):  # TensorBoard drops all after the checkpoint
        del sent[f"validation/{name}", 3]
    assert sent == shown and sent["train/loss", 3] == 2.3
    assert {tag for tag, _ in sent} >= {"train/grad_norm", "validation/loss", "validation/loss/chats"}


def test_tensorboard_explains_a_run_once_in_its_own_folder_and_again_where_something_changed(
    tmp_path: Path, wandb: FakeWandB
) -> None:
    record(tmp_path, 1, 1, steps=4)
    record(tmp_path, 1, 2, steps=4, about=replace(ABOUT, is_known=True))
    record(tmp_path, 3, 3, steps=4, about=replace(ABOUT, texts={"config": "[job]", "layout": "PP2"}))
    record(tmp_path, 4, 4, steps=4, about=replace(ABOUT, texts={"config": "[job]", "layout": "PP2"}, is_known=True))
    board = events(tmp_path)
    texts = [(text.step, text.tensor_proto.string_val[0]) for text in board.Tensors("about/layout/text_summary")]
    assert texts == [(0, b"```\nFSDP2 over 2\n```"), (2, b"```\nPP2\n```")]
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 4 and all(file.name.startswith("events.out.tfevents.") for file in files)


def test_the_explanation_is_config_layout_and_environment_and_known_when_they_are_the_same(
    world: World, tmp_path: Path
) -> None:
    first, again = (explained(world, tmp_path, Config(), step, processes=2) for step in (0, 5))
    assert (first.is_known, again.is_known) == (False, True)
    assert (
        first.texts["config"] == (tmp_path / "config.toml").read_text()
        and first.texts["layout"] == Config().layout(2).describe()
    )
    assert first.texts["environment"] == (tmp_path / "environment.json").read_text()
    assert not explained(world, tmp_path, Config(), 5, processes=4).is_known
    assert not explained(world, tmp_path, Config(metrics=MetricsConfig(log_freq=2)), 5, processes=4).is_known
    flat = first.settings
    assert flat["training.seq_len"] == Config().training.seq_len and flat["layout.dp_degree"] == 2
    assert flat["layout.dp_shard"] == 2 and flat["data.path"] == "()" and flat["metrics.enable_wandb"] is False


def test_wandb_s_own_variables_come_before_our_defaults(
    tmp_path: Path, wandb: FakeWandB, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PROJECT", "NAME", "DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    open_sinks(tmp_path, WANDB_ALONE, ABOUT, 0)
    assert not {"project", "name", "dir"} & wandb.runs[0].options.keys()


@pytest.mark.parametrize("method", ["define_metric", "log", "finish"])
def test_what_fails_in_wandb_is_said_once_and_the_run_goes_on(
    method: str, tmp_path: Path, wandb: FakeWandB, warnings: list[str]
) -> None:
    wandb.fails = {method}
    record(tmp_path, 1, 3, steps=3, tensorboard=False)
    assert warnings == [f"W&B: ConnectionError: {method} failed; the run goes on, metrics.jsonl has everything"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_network_that_takes_nothing_at_the_end_is_not_waited_for(
    tmp_path: Path, wandb: FakeWandB, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert timeout is not None
            super().join(timeout / 300)

    monkeypatch.setattr(sinks, "threading", SimpleNamespace(Thread=Impatient))
    wandb.fails, started, before = {"slow"}, time.perf_counter(), threading.enumerate()
    record(tmp_path, 1, 1, steps=1, tensorboard=False)
    assert time.perf_counter() - started < 10 and warnings == [
        "W&B has not taken everything within 60 s; metrics.jsonl has it"
    ]
    assert all(thread.daemon for thread in threading.enumerate() if thread not in before)


def test_a_network_that_fails_at_the_start_leaves_an_offline_run(
    tmp_path: Path, wandb: FakeWandB, warnings: list[str]
) -> None:
    wandb.problems = [TimeoutError("no answer")]
    record(tmp_path, 1, 1, steps=1, tensorboard=False)
    assert wandb.runs[0].options["mode"] == "offline" and wandb.teardowns == 1  # else the id would be in use
    assert len(wandb.runs[0].rows) == 2 and "kept offline" in warnings[0] and "no answer" in warnings[0]


def test_what_a_user_can_correct_is_refused_before_training(
    tmp_path: Path, wandb: FakeWandB, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.problems = [wandb.usage_error("No API key configured.")]
    with pytest.raises(UserError, match=r"enable_wandb = true: No API key configured; log in with `wandb login`"):
        open_sinks(tmp_path, MetricsConfig(enable_wandb=True), ABOUT, 0)
    assert not (tmp_path / "tensorboard").exists()
    wandb.problems = [TimeoutError("no answer"), OSError("no space")]
    with pytest.raises(UserError, match="wandb cannot start: no space"):
        open_sinks(tmp_path, WANDB_ALONE, ABOUT, 0)
    (tmp_path / "wandb_id").write_text("../x\n")
    with pytest.raises(UserError, match="wandb_id: holds no id of a run; remove it"):
        open_sinks(tmp_path, WANDB_ALONE, ABOUT, 0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_sinks(tmp_path, WANDB_ALONE, ABOUT, 0)


def test_a_missing_wandb_is_a_mistake_of_the_config_even_where_wandb_has_left_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(metrics=MetricsConfig(enable_wandb=True))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(Path(types.__file__).parent)])
    sys.path_importer_cache.pop(str(tmp_path), None)
    for _ in range(2):
        assert [one.key for one in check(config, 1) if "pip install wandb" in one.text] == ["metrics.enable_wandb"]
        assert "metrics.enable_wandb" not in [one.key for one in check(config, 1, with_files=False)]  # nothing is sent
        (tmp_path / "wandb").mkdir(exist_ok=True)
        sys.path_importer_cache.pop(str(tmp_path), None)
    (tmp_path / "wandb" / "__init__.py").touch()
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert "metrics.enable_wandb" not in [one.key for one in check(config, 1)]
