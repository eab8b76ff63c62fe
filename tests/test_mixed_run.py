"""Runs on a mixture of corpora and files, as whole processes: resumed on other processes, or with other weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS, torchrun
from test_corpus import prepare, texts, write

from titan_mi100.tools import inspect_data

CONFIG = """
[model]
flavor = "debug"
tokenizer_path = "{tokenizer}"
[data]
validation_fraction = 0.05
[[data.source]]
path = "{folder}/a"
weight = {weight}
[[data.source]]
path = "{arithmetic}"
name = "chats"
weight = 0.25
{more}
[training]
seq_len = 192
local_batch_size = {local}
steps = 8
seed = 3
mixed_precision_param = "float64"
[lr_scheduler]
decay_type = "constant"
[checkpoint]
interval = 4
keep_latest_k = 0
[metrics]
enable_tensorboard = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two corpora."""
    folder = tmp_path_factory.mktemp("mixed")
    for number, name in enumerate("ab"):
        prepare("--input", write(folder / f"{name}.jsonl", texts(300, number)), "--output_dir", folder / name)
    return folder


def train(folder: Path, run: str, processes: int, *arguments: str, **changes: Any):
    values = {"weight": 0.75, "more": "", "local": 4 // processes, **changes}
    path = folder / f"{run}.toml"
    path.write_text(
        CONFIG.format(tokenizer=ASSETS / "tokenizer", folder=folder, arithmetic=ASSETS / "arithmetic.jsonl", **values)
    )
    given = ("--job.config_file", str(path), "--job.run_folder", str(folder / run), *arguments)
    return torchrun("-m", "titan_mi100.train", *given, processes=processes, check=False)


def metrics(run: Path, key: str) -> list[Any]:
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [entry[key] for entry in entries if key in entry]


def segments(run: Path, step: int) -> list[dict[str, Any]]:
    return json.loads((run / "checkpoint" / f"step-{step}" / "trainer.json").read_text())["progress"]["segments"]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Eight steps at once on two processes."""
    result = train(folder, "whole", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("a: corpus of 300 documents", "source a: 75.0000% of the rows", "source chats: 25.0000%"):
        assert words in result.stdout
    return folder / "whole"


def resumed(folder: Path, whole: Path, run: str, processes: int, *arguments: str, **changes: Any):
    """A copy of the run, gone on with from its step 4."""
    shutil.copytree(whole, folder / run, dirs_exist_ok=True)
    return train(folder, run, processes, "--checkpoint.load_step", "4", *arguments, **changes)


@pytest.mark.full
def test_a_resume_on_another_number_of_processes_goes_on_with_the_same_rows(folder: Path, whole: Path) -> None:
    result = resumed(folder, whole, "one", 1)
    assert result.returncode == 0, result.stderr
    assert metrics(folder / "one", "loss") == pytest.approx(metrics(whole, "loss"), rel=1e-10, abs=0)
    assert segments(folder / "one", 8) == segments(whole, 8) != []
    for name in ("validation_loss", "validation_loss/a", "validation_loss/chats"):
        assert metrics(folder / "one", name)[-1] == pytest.approx(metrics(whole, name)[-1], rel=1e-10)


@pytest.mark.full
def test_a_number_of_processes_that_does_not_divide_a_step_is_refused_with_those_that_do(
    folder: Path, whole: Path
) -> None:
    result = train(folder, "whole", 2, local=3)
    assert result.returncode == 2
    assert (
        "does not divide this run's steps of 4 rows; what does: local_batch_size 1, 2 on these ranks" in result.stderr
    )
    result = train(folder, "whole", 2, local=4)
    assert "what does: 1 data-parallel ranks with this local_batch_size; or local_batch_size 1, 2" in result.stderr


@pytest.mark.full
def test_another_mixture_needs_leave_and_is_recorded(folder: Path, whole: Path) -> None:
    other = {"weight": 0.5, "more": f'[[data.source]]\npath = "{folder}/b"\nweight = 0.25'}
    result = resumed(folder, whole, "changed", 1, **other)
    assert result.returncode == 2 and "checkpoint.allow_changed" in result.stderr
    assert "weight of a (0.75, now 0.5)" in result.stderr
    result = train(folder, "changed", 1, "--checkpoint.load_step", "4", "--checkpoint.allow_changed", "data", **other)
    assert result.returncode == 0, result.stderr
    assert "the mixture changes from row 16 on, step 4" in result.stderr
    first, second = segments(folder / "changed", 8)
    assert first == segments(whole, 8)[0] and second["first_row"] == 16
    assert sorted(second["consumed"].values()) == [0, 4, 12]
    assert [key.split()[0] for key in second["shares"]] == ["a", "b", "chats"]
    assert list(second["shares"].values()) == [2, 1, 1]


@pytest.mark.parametrize("concatenate", ["false", "true"])
def test_rows_of_a_corpus_are_shown(
    folder: Path, whole: Path, concatenate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--job.config_file", str(folder / "whole.toml"), "--data.concatenate", concatenate, "--json"]
    assert inspect_data.main([*given, "--source", "a", "--row", "3"]) == 0
    [row] = json.loads(capsys.readouterr().out)["shown"]
    assert len(row["id"]) == 192 and row["padding"] == 0
    files = [document["where"].split(":")[0] for document in row["documents"]]
    assert {*files} == {str(folder / "a.jsonl")} and (len(files) == 1) == (concatenate == "true")
    assert inspect_data.main([*given, "--row", "3"]) == 2
    assert "there are several sources; name one of them with --source: a, chats" in capsys.readouterr().err
    assert inspect_data.main([*given, "--source", "a"]) == 2
    assert "is a corpus; only single rows can be shown, with --row N" in capsys.readouterr().err
    page = folder / f"{concatenate}.html"
    assert inspect_data.main([*given[:-1], "--html", str(page)]) == 0
    shown = page.read_text()  # all sources in the list, and the documents of those that are no corpora
    assert "<li><bdi>a: corpus of 300 documents" in shown and shown.count("<h2><bdi>Lengths") == 1
