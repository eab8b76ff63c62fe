"""MLflow, Trackio and SwanLab get what TensorBoard gets; a resumed run goes on in the same run; none ends or slows one.

Stand-ins keep what is used of the packages. Where a package is installed, the same run is recorded by the real one.
"""

import json
import re
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import REPO
from test_metrics import RESULT

from titan_mi100.config import settings as config_settings
from titan_mi100.config.check import check
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, MetricsConfig
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.run import sinks
from titan_mi100.run.metrics import Reporter, RunFigures
from titan_mi100.run.sinks import TRACKERS, Explanation, open_sinks

NAMES = tuple(TRACKERS)
FIRST = {"training.steps": 4, "data.format": "auto", "metrics.enable_wandb": False}
TITLES = {"mlflow": "MLflow", "trackio": "Trackio", "swanlab": "SwanLab"}
Values = dict[tuple[str, int], float]


@dataclass
class Store:
    """What a service keeps, over all starts. `fails`: calls that raise; `slow`: seconds of each call."""

    values: Values = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    fails: set[str] = field(default_factory=set)
    slow: float = 0

    def call(self, name: str) -> None:
        if name in self.fails:
            raise ConnectionError(f"{name} failed")
        if name == "log":
            time.sleep(self.slow)

    def log(self, data: dict[str, float], step: int) -> None:
        self.call("log")
        assert all(type(value) is float for value in data.values())
        self.values |= {(tag, step): value for tag, value in data.items()}


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Pair(NamedTuple):  # Param, RunTag
    key: str
    value: str


def fake_mlflow(store: Store) -> types.ModuleType:
    class MlflowClient:
        def create_run(self, experiment_id: str, run_name: str) -> Any:
            store.call("init")
            assert experiment_id == "7" and run_name == "run"
            store.runs.add("0123abcd")
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="0123abcd"))

        def update_run(self, run_id: str, status: str) -> None:
            store.call("init")
            assert run_id in store.runs and status == "RUNNING"

        def get_run(self, run_id: str) -> Any:
            return types.SimpleNamespace(data=types.SimpleNamespace(params=dict(store.settings)))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
            assert run_id in store.runs
            if any(store.settings.get(key, value) != value for key, value in params):
                raise ValueError("Changing param values is not allowed.")
            store.settings |= dict(params)
            store.tags |= dict(tags)
            for metric in metrics:
                assert set(metric.key) <= {*"abcdefghijklmnopqrstuvwxyz0123456789_-./: "} and metric.timestamp > 1e12
                store.log({metric.key: metric.value}, metric.step)

        def set_terminated(self, run_id: str, status: str) -> None:
            store.call("finish")
            store.ended.append(status)

    def set_experiment(experiment_name: str) -> Any:
        assert experiment_name == "titan_mi100"
        return types.SimpleNamespace(experiment_id="7")

    module: Any = types.ModuleType("mlflow")
    module.MlflowClient, module.set_experiment = MlflowClient, set_experiment
    module.entities = types.ModuleType("mlflow.entities")
    module.entities.Metric, module.entities.Param, module.entities.RunTag = Metric, Pair, Pair
    return module  # type: ignore[no-any-return]


class FakeRun:
    def __init__(self, store: Store) -> None:
        self._store = store

    def log(self, data: dict[str, float], step: int) -> None:
        self._store.log(data, step)

    def finish(self, state: str = "") -> None:
        self._store.call("finish")
        self._store.ended.append(state)


def fake_trackio(store: Store) -> types.ModuleType:
    def init(
        project: str,
        name: str,
        config: dict[str, Any],
        resume: str,
        embed: bool,
        auto_log_cpu: bool,
        auto_log_gpu: bool,
    ) -> FakeRun:
        store.call("init")
        assert project == "titan_mi100" and resume == "allow" and not (embed or auto_log_cpu or auto_log_gpu)
        store.runs.add(name)
        store.settings |= config
        return FakeRun(store)

    module: Any = types.ModuleType("trackio")
    module.init = init
    return module  # type: ignore[no-any-return]


def fake_swanlab(store: Store) -> types.ModuleType:
    def init(*, project: str, name: str, id: str, resume: str, config: Any, log_dir: str, settings: Any) -> FakeRun:
        store.call("init")
        assert project == "titan_mi100" and name == "run" and resume == "allow" and settings["interactive"] is False
        assert settings["terminal"] == {"proxy_type": "none"} and Path(log_dir).name == "swanlog"
        store.runs.add(id)
        store.settings |= config
        return FakeRun(store)

    module: Any = types.ModuleType("swanlab")
    module.init, module.Settings = init, dict
    return module  # type: ignore[no-any-return]


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Store]:
    made = {name: Store() for name in NAMES}
    makers: list[Callable[[Store], types.ModuleType]] = [fake_mlflow, fake_trackio, fake_swanlab]
    for name, make in zip(NAMES, makers, strict=True):
        module: Any = make(made[name])
        monkeypatch.setitem(sys.modules, name, module)
        if name == "mlflow":
            monkeypatch.setitem(sys.modules, "mlflow.entities", module.entities)
    for name in ("EXPERIMENT_ID", "EXPERIMENT_NAME", "RUN_NAME"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    return made


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(log, "warning", said.append)
    return said


def record(
    folder: Path, names: tuple[str, ...], first: int, last: int, settings: Any = FIRST, loss: float = 1
) -> Values:
    """Steps `first` to `last` of a run of 4, with a validation after the last of them; what metrics.jsonl has of it."""
    metrics = MetricsConfig(enable_tensorboard=False, report_to=names)
    opened = open_sinks(folder, metrics, Explanation(settings, {}), first - 1)
    reporter = Reporter(folder, metrics, RunFigures(4, 64, lambda _: None, "fp32"), first - 1, False, opened)
    for step in range(first, last + 1):
        reporter.after_step(step, replace(RESULT, loss=loss + step / 10))
    reporter.validation(last, {"loss": loss}, None, {"a b/c": loss}, 0.25)
    reporter.close()
    written: Values = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kind = "train/" if "lr" in line else "validation/"
        named = {kind + key.removeprefix("validation_"): value for key, value in line.items() if key != "step"}
        written |= {(tag, line["step"]): float(v) for tag, v in named.items() if isinstance(v, int | float | bool)}
    return written


def recorded_twice(folder: Path, names: tuple[str, ...]) -> Values:
    """A run that is killed after step 3, and resumes from a checkpoint of step 1 with other settings."""
    folder.mkdir()
    before = record(folder, names, 1, 3)
    ids = {name: (folder / f"{name}_id").read_text() for name in names}
    after = record(folder, names, 2, 4, {**FIRST, "training.steps": 9}, loss=2)
    assert ids == {name: (folder / f"{name}_id").read_text() for name in names}
    return before | after


def test_all_get_what_metrics_jsonl_has_and_a_resumed_run_goes_on_in_the_same_run(
    stores: dict[str, Store], tmp_path: Path, warnings: list[str]
) -> None:
    expected = recorded_twice(tmp_path / "run", NAMES)
    assert warnings == [] and expected["train/loss", 3] == 2.3 and expected["validation/exact_match", 4] == 0.25
    for name, store in stores.items():
        assert store.values == expected and len(store.runs) == 1, name
        known = FIRST if name == "mlflow" else {**FIRST, "training.steps": 9}  # which refuses to change a parameter
        assert store.settings == ({key: str(value) for key, value in known.items()} if name == "mlflow" else known)
    assert stores["mlflow"].tags == {"training.steps": "9"}
    ended = {name: store.ended for name, store in stores.items()}
    assert ended == {"mlflow": ["KILLED", "FINISHED"], "trackio": ["", ""], "swanlab": ["aborted", "success"]}
    assert stores["trackio"].runs == {"run-" + (tmp_path / "run/trackio_id").read_text().strip()}


@pytest.mark.parametrize("call", ["import", "init", "log", "finish"])
@pytest.mark.parametrize("name", NAMES)
def test_what_fails_in_a_tracker_is_said_once_and_the_run_goes_on(
    name: str, call: str, stores: dict[str, Store], tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores[name].fails = {call}
    if call == "import":
        monkeypatch.setitem(sys.modules, name, None)
    folder = tmp_path / "run"
    folder.mkdir()
    written = record(folder, NAMES, 1, 4)
    [warning] = warnings
    assert warning.startswith(f"{TITLES[name]}: ") and warning.endswith(
        "; the run goes on, metrics.jsonl has everything"
    )
    assert call == "import" or f"ConnectionError: {call} failed" in warning
    for other in {*NAMES} - {name}:
        assert stores[other].values == written, other


def test_a_disk_that_is_full_or_an_id_that_is_none_ends_no_run(
    stores: dict[str, Store], tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "swanlab_id").write_text("../x\n")
    with monkeypatch.context() as patch:
        patch.setattr(sinks, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        record(folder, NAMES, 1, 4)
    assert sorted(line.split(":")[0] for line in warnings) == ["MLflow", "SwanLab", "Trackio"]
    assert any("swanlab_id: holds no id of a run; remove it" in line for line in warnings)


def test_a_tracker_that_hangs_costs_no_step_and_is_not_waited_for(
    stores: dict[str, Store], tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_FINISH_SECONDS", 0.1)
    monkeypatch.setattr(sinks, "_WAITING", 2)
    stores["trackio"].slow, started = 20, time.perf_counter()
    record(tmp_path, ("trackio",), 1, 4)
    assert time.perf_counter() - started < 5
    assert [line.split(";")[0] for line in warnings] == [
        "Trackio: 2 steps and validations wait to be sent", "Trackio has not taken everything within 0 s"]  # fmt: skip


def test_missing_packages_and_wrong_names_are_mistakes_of_the_config_all_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert config_settings.TRACKERS == NAMES
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(types.__file__).parent)])
        wrong = check(Config(metrics=MetricsConfig(report_to=("mlflow", "swanlab", "mlflow"), enable_wandb=True)), 1)
        listed = '= ["mlflow", "swanlab", "mlflow"]:'
        assert [(one.key, one.text) for one in wrong if "pip install" in one.text] == [
            ("metrics.report_to", f"{listed} mlflow is not installed; pip install mlflow, or leave it out"),
            ("metrics.report_to", f"{listed} swanlab is not installed; pip install swanlab, or leave it out"),
            ("metrics.enable_wandb", "= true: wandb is not installed; pip install wandb, or set it to false"),
        ]
        without_files = check(Config(metrics=MetricsConfig(report_to=NAMES)), 1, with_files=False)
        assert "metrics.report_to" not in [one.key for one in without_files]
    for given, hint in (("wandb", "metrics.enable_wandb = true"), ("mlfow", "mlflow"), ("comet", "must be one of: ")):
        with pytest.raises(UserError, match=r"report_to.*must be one of: mlflow, trackio, swanlab") as refused:
            load_config(["--metrics.report_to", "trackio", given], 1)
        assert hint in str(refused.value)


def test_the_page_s_line_is_a_config() -> None:
    text = (REPO / "docs/REPORT.md").read_text(encoding="utf-8").split("## Other trackers")[1].split("\n## ")[0]
    [line] = [line for line in text.splitlines() if line.startswith("report_to = ")]
    assert json.loads(line.removeprefix("report_to = ").split("  #")[0]) == list(NAMES)
    assert all(f"`{title}`" in text or title in text for title in TITLES.values())


@pytest.mark.full
def test_the_real_mlflow_has_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient, set_tracking_uri

    set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks, "_FINISH_SECONDS", 120)
    expected = recorded_twice(tmp_path / "run", ("mlflow",))
    client = MlflowClient()
    [experiment] = [one for one in client.search_experiments() if one.name == "titan_mi100"]
    [run] = client.search_runs([experiment.experiment_id])
    assert warnings == [] and run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params == {key: str(value) for key, value in FIRST.items()}
    assert run.data.tags["training.steps"] == "9"
    values = {
        (point.key, point.step): point.value  # of a step that was repeated, the later one
        for tag in {tag for tag, _ in expected}
        for point in client.get_metric_history(run.info.run_id, tag)
    }
    assert values == expected


@pytest.mark.full
def test_the_real_trackio_has_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    expected = recorded_twice(tmp_path / "run", ("trackio",))
    name = "run-" + (tmp_path / "run/trackio_id").read_text().strip()
    assert warnings == [] and SQLiteStorage.get_runs("titan_mi100") == [name]
    values: Values = {}
    for row in SQLiteStorage.get_logs("titan_mi100", name):
        values |= {(tag, row["step"]): value for tag, value in row.items() if tag not in ("step", "timestamp")}
    assert values == expected
    assert SQLiteStorage.get_run_config("titan_mi100", name)["training.steps"] in (4, 9)


@pytest.mark.full
def test_the_real_swanlab_keeps_both_starts_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    pytest.importorskip("swanlab")
    recorded_twice(tmp_path / "run", ("swanlab",))
    run_id = (tmp_path / "run/swanlab_id").read_text().strip()
    kept = sorted((tmp_path / "run/swanlog").glob(f"run-*-{run_id}/run-{run_id}.swanlab"))
    assert warnings == [] and len(kept) == 2
    first, second = (file.read_bytes() for file in kept)
    for tag in (b"train/loss", b"validation/exact_match"):
        assert tag in first and tag in second, tag
    for file, steps in zip(kept, (4, 9), strict=True):
        assert re.search(rf"training.steps:[^}}]*?value: {steps}\b", (file.parent / "files/config.yaml").read_text())
