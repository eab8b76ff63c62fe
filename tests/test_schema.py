"""What is read back is what was written, key by key; of something else the file and the key are named."""

import gzip
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from test_metrics import explained, open_reporter
from test_sinks import FakeWandB

from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.resume import check_is_run_checkpoint, open_checkpoint
from titan_mi100.config.layout import Batch, accumulation_for
from titan_mi100.config.settings import Config, MetricsConfig
from titan_mi100.errors import UserError
from titan_mi100.files.plain import open_plain, read_checked
from titan_mi100.files.schema import validated
from titan_mi100.parallel.distributed import World
from titan_mi100.run.faults import FaultWatch
from titan_mi100.run.progress import Progress
from titan_mi100.run.sinks import Explanation, open_sinks
from titan_mi100.text.assets import GENERATION, stop_ids
from titan_mi100.watch.outcome import Outcome, note_restart, read_outcome, restarts_of
from titan_mi100.workshop import summarise_trace


class Place(TypedDict, total=False):
    file: str
    line: int | None


@dataclass(frozen=True)
class Facts:
    count: int
    share: float
    pair: tuple[int, str]
    places: list[Place]
    done: bool = False
    more: dict[str, Any] | None = None


GOOD = {"count": 3, "share": 1, "pair": [1, "a"], "places": [{"file": "x", "line": None}, {}]}


def test_what_fits_is_built_and_a_whole_number_is_a_number() -> None:
    assert validated(GOOD, Facts) == Facts(3, 1.0, (1, "a"), [{"file": "x", "line": None}, {}])
    assert validated({**GOOD, "more": {"a": [1]}}, Facts).more == {"a": [1]}
    assert validated([1, 2], tuple[int, ...]) == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": -1}, "count = -1 must be a whole number from 0 below 2^63"),
        ({"count": 2**63}, f"count = {2**63} must be a whole"),
        ({"count": True}, "count = True must be a whole"),
        ({"count": 1.0}, "count = 1.0 must be a whole"),
        ({"count": None}, "count = None must be"),
        ({"share": float("nan")}, "share = nan must be a finite number"),
        ({"share": 10**400}, "share = 1000"),
        ({"share": "1"}, "share = '1' must be a finite number"),
        ({"pair": [1]}, "pair must be a list of 2, not of 1"),
        ({"pair": [1, 2]}, "pair[1] = 2 must be a text"),
        ({"places": {}}, "places = {} must be a list"),
        ({"places": [{"line": "2"}]}, "places[0].line = '2' must be"),
        ({"places": [{"lines": 2}]}, "places[0] has the unknown key lines"),
        ({"places": [{"file": "a" * 2**20 + "a"}]}, "places[0].file = 'aaa"),
        ({"done": 1}, "done = 1 must be true or false"),
        ({"more": []}, "more = [] must be an object"),
        ({"other": 1}, "it has the unknown key other"),
    ],
)
def test_what_does_not_fit_is_named_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown") as caught:
        validated({**GOOD, **change}, Facts)
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 200


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it lacks count, share"):
        validated({"pair": [1, "a"], "places": []}, Facts)
    (tmp_path / "a.json").write_text(json.dumps({**GOOD, "pair": 3}))
    with pytest.raises(UserError, match=r"a.json: pair = 3 must be a list of at most 1,048,576; mend it"):
        read_checked(tmp_path / "a.json", Facts, "mend it")


# ---- a checkpoint's files


PROGRESS = Progress(step=3, best_loss=1.5, best_step=2, plan="ab", rows_consumed=12)


def checkpoint(folder: Path, texts: dict[str, str], **about: Any) -> Path:
    folder.mkdir(exist_ok=True)
    aside = sealed.begin(folder, 3)
    for name, text in texts.items():
        (aside / name).write_text(text)
    written = {name: (len(text), "0") for name, text in texts.items()}
    return sealed.seal(aside, written, {"step": 3, **about})


def test_progress_is_read_back_and_anything_else_is_refused(tmp_path: Path) -> None:
    state, file = json.loads(json.dumps(PROGRESS.trainer_state())), tmp_path / "trainer.json"
    assert Progress.of_trainer_state(state, file) == PROGRESS
    for changed, message in (
        ({**state, "step": "3"}, "step = '3' must be a whole number"),
        ({**state, "loader": {}}, "loader lacks rows_consumed"),
        ({**state, "loader": {"rows_consumed": -1}}, "loader.rows_consumed = -1 must"),
        ({**state, "progress": []}, "progress = [] must be an object"),
        ({**state, "progress": {**state["progress"], "best_loss": "low"}}, "progress.best_loss = 'low' must be"),
        ({**state, "progress": {**state["progress"], "epoch": 1}}, "progress has the unknown key epoch"),
        ({**state, "step": 4}, "progress.step = 3 is not step = 4"),
        ({"step": 3}, "it lacks loader, progress"),
        ({}, "it lacks loader, progress, step"),
    ):
        with pytest.raises(UserError, match=r"trainer.json: ") as caught:
            Progress.of_trainer_state(changed, file)
        assert f"trainer.json: {message}" in str(caught.value)


def test_only_files_of_the_manifest_are_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"a.txt": "a"})
    (path / "trainer.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-3/manifest.json: does not list trainer.json; move this checkpoint"):
        open_checkpoint(path)


def test_a_converters_checkpoint_is_no_runs(tmp_path: Path) -> None:
    found = open_checkpoint(checkpoint(tmp_path, {"trainer.json": "{}"}, torch="2.8", rows=3))
    with pytest.raises(UserError, match=r"manifest.json: lacks layout, data, fingerprints, so it is not a run"):
        check_is_run_checkpoint(found)


def test_a_run_resumes_from_counts_above_0_only(tmp_path: Path) -> None:
    layout = {"local_batch_size": 1, "gradient_accumulation_steps": 2, "dp_degree": 2}
    good = {"layout": layout, "data": {}, "rows": 5, "fingerprints": {"global_batch_size": 4}}
    for number, (change, message) in enumerate(
        (
            ({}, ""),
            ({"rows": 0}, "rows must exist and be above 0"),
            ({"layout": {}}, "local_batch_size, gradient_accumulation_steps, dp_degree must exist"),
            ({"layout": {**layout, "dp_degree": 0}}, "dp_degree must exist"),
            ({"fingerprints": {}}, "global_batch_size must exist"),
        )
    ):
        found = open_checkpoint(checkpoint(tmp_path / str(number), {"trainer.json": '{"step": 3}'}, **good | change))
        if not message:
            check_is_run_checkpoint(found)
            found = found._replace(trainer_state={"step": 2})
            message = "step = 3 differs from the step in trainer.json"
        with pytest.raises(UserError, match=rf"step-3/manifest.json: {message}"):
            check_is_run_checkpoint(found)
    with pytest.raises(ValueError, match="does not divide this run's steps of 4611686018427387905 rows"):
        accumulation_for(2**62 + 1, Batch(2, 1, 2), Batch(1, 1, 1))  # in no time


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"rows": "many"}, "rows = 'many' must be a whole number"),
        ({"fingerprints": {"global_batch_size": 1.5}}, "fingerprints.global_batch_size = 1.5 must be"),
        ({"layout": {"tp": None}}, "layout.tp = None must be"),
        ({"lora": {"rank": 8}}, "lora lacks alpha, base, dropout, target_modules"),
        (
            {"lora": {"rank": 8, "alpha": 1, "dropout": 0, "base": "", "target_modules": 5}},
            "lora.target_modules = 5 must",
        ),
    ],
)
def test_a_manifest_says_what_a_manifest_can_say(about: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {}, **about)
    with pytest.raises(sealed.DamagedError) as caught:
        sealed.read_manifest(path)
    assert f"manifest.json: is not the manifest of step-3 in format 1: {message}" in str(caught.value)


# ---- what a run reads back of its own folder


def piped(file: Path) -> None:
    os.mkfifo(file)


def test_metrics_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "validation_loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 3}]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 1, "lo')
    open_reporter(tmp_path, 9, 2, validation_due=True)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [lines[0], lines[2]]
    for line, message in (
        ("[]", "it = [] must be an object"),
        ('{"step": "x"}', "step = 'x' must be"),
        ("{}", "step = None"),
    ):
        file.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(UserError) as caught:
            open_reporter(tmp_path, 9, 2)
        assert f"metrics.jsonl: line 2: {message}" in str(caught.value)
    file.write_text("[" * 60_000 + "\n" + '{"step": 1}')
    open_reporter(tmp_path, 9, 2)
    assert file.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("content", ["one,a.jsonl,5\n", "9" * 5000, "\udcff", '1,"a', "1," + "a" * 200_000])
def test_rows_of_steps_that_were_not_finite_are_a_runs_or_refused(world: World, content: str, tmp_path: Path) -> None:
    file = tmp_path / "nonfinite_rows.csv"
    file.write_bytes(content.encode(errors="surrogateescape"))
    if content == '1,"a':  # csv takes it
        FaultWatch(None, tmp_path, world, Progress(step=1), 3, None)
        return
    with pytest.raises(UserError, match=r"nonfinite_rows.csv: line .*; remove it"):
        FaultWatch(None, tmp_path, world, Progress(step=1), 3, None)
    assert file.read_bytes() == content.encode(errors="surrogateescape")


@pytest.mark.parametrize(
    "make", [piped, lambda file: file.symlink_to("/dev/zero"), lambda file: file.symlink_to("/etc/passwd")]
)
def test_what_is_no_regular_file_of_the_folder_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"trainer.json": "{}"}, torch="2.8")
    for file, read in (
        (tmp_path / "metrics.jsonl", lambda: open_reporter(tmp_path, 9, 2)),
        (path / "trainer.json", lambda: open_checkpoint(path)),
        (path / "manifest.json", lambda: sealed.read_manifest(path)),
    ):
        file.unlink(missing_ok=True)
        make(file)
        with pytest.raises((UserError, sealed.DamagedError), match=file.name):
            read()


def test_what_takes_a_files_place_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(tmp_path / "a")
    monkeypatch.setattr("titan_mi100.files.plain.plain_path", lambda path: path)
    with open_plain(tmp_path / "a") as file:
        assert not file.read()
    (tmp_path / "b").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=r"Too many levels|symbolic"):
        open_plain(tmp_path / "b")


def test_a_file_of_a_run_that_has_become_huge_is_not_read_into_memory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = 1100 << 20  # sparse: it takes no space on the disk
    with (tmp_path / "run_state.json").open("wb") as file:
        file.truncate(huge)
    tracemalloc.start()
    assert read_outcome(tmp_path / "run_state.json") is None and restarts_of(tmp_path / "run_state.json") == []
    note_restart(tmp_path, Outcome(1))
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "wandb.errors", wandb.errors)
    readers: dict[str, Callable[[], object]] = {
        "loss_spikes.csv": lambda: FaultWatch(None, tmp_path, world, Progress(step=1), 3, None),
        "wandb_id": lambda: open_sinks(tmp_path, MetricsConfig(1, False, True), Explanation({}, {}, False), 0),
        "config.toml": lambda: explained(world, tmp_path, Config()),
    }
    for name, read in readers.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(huge)
        with pytest.raises(UserError, match=name):
            read()
        (tmp_path / name).unlink()
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    (tmp_path / "trace.json").write_bytes(gzip.compress(b" " * 5000))
    with pytest.raises(ValueError, match="more than 4,000 bytes"):
        summarise_trace.read_any_trace(tmp_path / "trace.json", 4000)


@pytest.mark.parametrize("named", [-1, 2**70, True, 7.0, "</s>", [[7]], ["x" * 10**7]])
def test_stop_tokens_are_token_ids(named: Any, tmp_path: Path) -> None:
    content = json.dumps({"eos_token_id": named}).encode()
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id = .* must be a token id") as caught:
        stop_ids({GENERATION: content}, tmp_path / GENERATION)
    assert len(str(caught.value)) < 500
    assert stop_ids({GENERATION: b'{"eos_token_id": [7, 2]}'}) == [7, 2]
