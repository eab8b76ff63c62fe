"""A run leaves in its folder what docs/RUN_FOLDER.md says; at its end it names commands that work; early stopping."""

import errno
import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ASSETS, REPO

from titan_mi100 import train as train_module
from titan_mi100.__main__ import COMMANDS
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, LoRAConfig, ValidationConfig
from titan_mi100.errors import ExportError, Preempted, UserError
from titan_mi100.launch import launcher as launch
from titan_mi100.open_run import record
from titan_mi100.open_run.run import Run, Supervision
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.run.folder import RunFolder
from titan_mi100.run.next_commands import _serve, after_run, command, shown_path, to_resume
from titan_mi100.run.progress import Progress
from titan_mi100.tools import generate, inspect_data
from titan_mi100.tools.convert import dcp_to_hf
from titan_mi100.train import train
from titan_mi100.watch.outcome import Outcome, Restarts, write_run_state
from titan_mi100.weights import convert
from titan_mi100.weights.source import open_source
from titan_mi100.workshop import report

PLACEHOLDERS = re.compile(r"\b(N|R|HOST|NAME)\b")  # of the tables
NEVER = SimpleNamespace(reason="")  # a run that is not told to stop


def table(heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading of RUN_FOLDER.md: each name in the first cell -> the other cells."""
    text = (REPO / "docs" / "RUN_FOLDER.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")][2:]
    found = {name: [cell.strip() for cell in row[1:]] for row in rows for name in re.findall("`([^`]+)`", row[0])}
    assert len(found) > 4
    return found


def strings(pattern: str) -> str:
    """Source code, with `*` for the fields of its formatted texts."""
    text = "\n".join(path.read_text() for path in sorted((REPO / "titan_mi100").glob(pattern)))
    return re.sub(r"\{[\w.:]*\}", "*", text)


def any_name(name: str) -> str:
    return PLACEHOLDERS.sub("*", name.strip("/"))


class Recorder:
    """A sink that remembers tags."""

    def __init__(self) -> None:
        self.tags: set[str] = set()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.tags |= values.keys()

    def text(self, tag: str, markdown: str, step: int) -> None:
        pass

    def close(self, is_done: bool) -> None:
        assert is_done


def settings(folder: Path, **more: object) -> list[str]:
    given: dict[str, object] = {
        "model.flavor": "debug", "model.tokenizer_path": ASSETS / "tokenizer", "data.path": ASSETS / "arithmetic.jsonl",
        "data.validation_fraction": 0.02, "job.run_folder": folder, "training.seq_len": 256, "training.steps": 3,
        "training.gradient_accumulation_steps": 1, "training.mixed_precision_param": "float32", "validation.freq": 1,
        **more,
    }  # fmt: skip
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def run_to_its_end(world: World, folder: Path, **more: object) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    return train(open_run(load_config(settings(folder, **more), 1), world, folder), NEVER)  # type: ignore[arg-type]


def steps(folder: Path, key: str = "loss") -> list[int]:
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [entry["step"] for entry in entries if key in entry]


def test_the_tables_of_a_run_folder_are_complete_and_name_nothing_that_does_not_exist(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Recorder()
    monkeypatch.setattr(record, "open_sinks", lambda *_: [sink])
    folder = tmp_path / "run"
    config = load_config(
        settings(folder, **{"validation.prompts": 1, "validation.prompt_tokens": 2, "checkpoint.keep_best": True}), 1
    )
    taken = RunFolder(config.job, False, world)
    run = open_run(config, world, folder)
    run.observers.append(taken)
    write_run_state(folder, Outcome(0, train(run, NEVER)[0], taken.step, "done"))  # type: ignore[arg-type]
    report.main([str(folder)])

    files = table("Files")
    documented = {any_name(name) for name in files}
    written = {any_name(re.sub("[0-9]+", "N", path.name)) for path in folder.iterdir()} - {"checkpoint"}
    written |= {any_name(re.sub("[0-9]+", "N", f"checkpoint/{path.name}")) for path in folder.glob("checkpoint/*")}
    assert {"checkpoint/best", "checkpoint/step-*", "samples.jsonl", "plan.json", ".lock"} <= written <= documented
    code = strings("**/*.py")
    assert [name for name in documented if f'{name.rpartition("/")[2]}"' not in code] == []

    keys, code = table("metrics.jsonl and TensorBoard"), strings("run/*.py") + strings("trainer.py")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {key for line in lines for key in line} <= keys.keys()
    names = {key: any_name(key.replace("validation_draft", "draft")) for key in keys}
    assert [key for key, name in names.items() if f'"{name}"' not in code and f"{key}=" not in code] == []
    tags = {key: re.findall("`([^`]+)`", row[0]) for key, row in keys.items()}
    for key, row in keys.items():
        prefix = {"step": "train/", "validation": "validation/"}.get(row[3].split(",")[0])
        assert tags[key] == ([prefix + key.removeprefix("validation_")] if prefix else [])
        in_steps, in_validations = ("loss" in line for line in lines if key in line), row[3].startswith("validation")
        assert row[3] == "all" or not any(is_step == in_validations for is_step in in_steps), key
    assert {"train/loss", "validation/perplexity"} <= sink.tags <= {tag for found in tags.values() for tag in found}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)

    environment = json.loads((folder / "environment.json").read_text())
    assert (
        list(environment.keys() - table("environment.json"))
        == []
        == list(table("environment.json") - environment.keys())
    )
    state = table("run_state.json")
    assert json.loads((folder / "run_state.json").read_text()).keys() <= state.keys()
    assert [
        key
        for key in state
        if f'"{key}"' not in strings("watch/outcome.py") and f"    {key}: " not in strings("watch/outcome.py")
    ] == []
    assert [name for name in re.findall("`([^`]+)`", state["state"][0]) if f'"{name}"' not in strings("**/*.py")] == []


def test_code_and_machine_are_told_without_git(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    found = record.code_and_machine(world)
    assert found["host"] and found["version"] and found["gpus"] == []
    if (REPO / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found["commit"])
    monkeypatch.setenv("PATH", "/nonexistent")
    assert record.code_and_machine(world) == {**found, "commit": ""}


def test_the_commands_at_the_end_of_a_run_work(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no environment is active
    folder = tmp_path / "a b"
    run_to_its_end(world, folder, **{"training.steps": 1, "metrics.enable_tensorboard": False})
    config = load_config(settings(folder, **{"training.steps": 1}), 1)

    commands = dict(after_run(folder, config, 1))
    assert list(commands) == ["ask", "export", "report", "data page", "curves"]
    assert commands["curves"].endswith("/tensorboard --logdir 'a b/tensorboard'")
    generated = ["--max_new_tokens", "2", "--device", "cpu"]
    for purpose, program, more in (
        ("ask", generate.main, generated),
        ("report", report.main, []),
        ("data page", inspect_data.main, []),
    ):
        ours, *words = shlex.split(commands[purpose])
        assert f"titan_mi100.{COMMANDS[words[0]][0]}" == program.__module__
        assert Path(ours) == Path(sys.executable).parent / "titan-mi100"
        assert program([*words[1:], *more]) == 0, capsys.readouterr().err
    assert (folder / "report.html").exists() and (folder / "data.html").exists()
    monkeypatch.setattr(sys, "argv", ["x", *shlex.split(commands["export"])[3:], "--verify", "bytes"])
    dcp_to_hf()

    with_export = dict(after_run(folder, config, 1))  # which is what is used from now on, and not made again
    assert "export" not in with_export and "titan-mi100 generate --model 'a b/hf-step-1' --p" in with_export["ask"]


def test_only_commands_that_can_work_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lora: dict[str, Any] = {"lora.rank": 2, "metrics.enable_tensorboard": "false"}
    assert list(dict(after_run(tmp_path, load_config(settings(tmp_path, **lora), 1), 3))) == [
        "export",
        "report",
        "data page",
    ]
    base = tmp_path / "base"
    base.mkdir()
    config = load_config(settings(tmp_path, **lora, **{"checkpoint.initial_load_path": base}), 1, with_files=False)
    asks = dict(after_run(tmp_path, config, 3))["ask"]
    assert asks.endswith("titan-mi100 generate --model base --adapter checkpoint/step-3 --prompt Hello")
    two = settings(tmp_path, **{"data.path": f"{ASSETS}/arithmetic.jsonl,{ASSETS}/chat.jsonl", "data.weights": "1,2"})
    assert "--source arithmetic" in dict(after_run(tmp_path, load_config(two, 1), 3))["data page"]
    for rank, served in ((1, 8), (8, 8), (9, 16), (65, 128), (512, 512), (600, 512)):
        assert f"--max-lora-rank {served} " in _serve(LoRAConfig(rank=rank), "base", "export")
    assert shown_path(tmp_path / "x") == "x" and shown_path("/usr") == "/usr"
    assert shown_path(tmp_path / "-x") == str(tmp_path / "-x")  # else it would be read as an option


@pytest.mark.full
def test_a_run_that_has_stopped_names_the_command_to_resume_it(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    before = to_resume(folder, 1, 1)
    assert before.startswith("to resume, start again with job.run_folder = ")
    stopping = load_config(settings(folder, **{"checkpoint.load_step": -1}), 1)
    run = open_run(stopping, world, folder, Supervision(wants_to_stop=lambda: True))
    with pytest.raises(Preempted, match="stopped after step 1 of 3; all steps are saved in step-1"):
        train(run, SimpleNamespace(reason=""))  # type: ignore[arg-type]
    assert to_resume(folder, 4, 2) == before  # several nodes have no one command
    words = shlex.split(to_resume(folder, 1, 1).removeprefix("to resume: "))
    at = words.index("train")
    assert words[:at] == shlex.split(command("")) and at in (1, 3)
    processes, arguments, _ = launch.parse(words[at + 1 :])
    assert processes == 1
    train(open_run(load_config(arguments, 1), world, folder), NEVER)  # type: ignore[arg-type]
    assert steps(folder) == [1, 2, 3]


def test_an_export_that_fails_says_that_all_is_saved_and_how_to_export(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "a b"
    with monkeypatch.context() as patch:
        patch.setattr(convert, "to_hf", full)
        with pytest.raises(ExportError, match=r"^all steps are saved, but .*No space left") as failed:
            run_to_its_end(world, folder, **{"training.steps": 1, "checkpoint.export_hf": True})
    again = shlex.split(failed.value.again.removeprefix("fix the problem above, then "))
    assert again[:-4] == shlex.split(command("convert dcp-to-hf"))
    assert Restarts(4).next(Outcome(1, str(failed.value), 1, "export_failed")) == ""
    convert.to_hf(open_source(again[-3]), Path(again[-1]), verify="bytes")
    assert Path(again[-1]) == folder / "hf-step-1" and open_source(again[-1]).spec is not None


@pytest.mark.full
def test_a_run_stops_after_validations_without_a_lower_loss_and_keeps_the_best_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate of 0 every validation has the same loss, and the first one stays the best."""
    folder, same = tmp_path / "run", {"optimizer.lr": 0, "checkpoint.keep_latest_k": 1, "validation.patience": 2}
    checkpoints, exported = folder / "checkpoint", list[int]()
    monkeypatch.setattr("titan_mi100.train.export", lambda _, step, *others: exported.append(step))
    assert run_to_its_end(world, folder, **same, **{"training.steps": 2})[0] == ""  # its last step, not early
    said, remedy = run_to_its_end(world, folder, **same, **{"training.steps": 9, "checkpoint.export_hf": True})
    assert said.startswith(
        "stopped early after step 3 of 9: step 1 has the lowest validation loss, 6."
    )  # 1 was counted before
    assert said.endswith("2 validations in a row were not lower") and "raise validation.patience" in remedy
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-1", "step-3"]
    assert (checkpoints / "best").readlink() == Path("step-1")
    assert exported == [1]

    assert run_to_its_end(world, folder, **same, **{"training.steps": 9})[0] == said  # nothing more to do
    assert steps(folder) == [1, 2, 3]
    run_to_its_end(world, folder, **{**same, "validation.patience": 4}, **{"training.steps": 9})
    assert steps(folder) == steps(folder, "perplexity") == [1, 2, 3, 4, 5]


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
def test_a_first_validation_comes_early_and_once_and_no_bit_of_the_run_depends_on_it(
    compiled: bool, world: World, tmp_path: Path
) -> None:
    same: dict[str, object] = {"training.steps": 2, "checkpoint.keep_best": True, "validation.prompts": 1}
    same |= {"validation.prompt_tokens": 2, "lora.rank": 2, "lora.dropout": 0.1}  # dropout draws random numbers
    same |= {"metrics.enable_tensorboard": False, "optimizer.lr": 0.5}  # the loss rises: the early one is the lowest
    same |= {"compile.enable": True, "compile.backend": "aot_eager"} if compiled else {}
    early, stopped, _ = folders = [tmp_path / name for name in ("early", "stopped", "without")]
    stopped.mkdir()
    config = load_config(settings(stopped, **same, **{"validation.freq": 9}), 1)
    told = Supervision(wants_to_stop=lambda: run.progress.step == 1)  # while it validates
    run = open_run(config, world, stopped, told)
    with pytest.raises(Preempted, match="stopped after step 1 of 2"):
        train(run, NEVER)  # type: ignore[arg-type]
    for folder, freq in zip(folders, (9, 9, 0), strict=True):
        run_to_its_end(world, folder, **same, **{"validation.freq": freq})
    assert [steps(folder, "perplexity") for folder in folders] == [[1, 2], [1, 2], [2]]
    lines = map(json.loads, (early / "metrics.jsonl").read_text().splitlines())
    first, last = (line["validation_loss"] for line in lines if "validation_loss" in line)
    assert first < last
    assert len((early / "samples.jsonl").read_text().splitlines()) == 2
    for file in ("__0_0.distcp", "trainer.json"):  # weights and optimizer; the best loss and its step
        assert len({(folder / "checkpoint/step-2" / file).read_bytes() for folder in folders}) == 1, file
    assert [folder.joinpath("checkpoint/best").readlink() for folder in folders] == [Path("step-2")] * 3


def test_the_early_validation_comes_before_a_twentieth_of_the_steps_where_the_others_do_not() -> None:
    def validated(steps: int, freq: int) -> list[int]:
        run = Run.__new__(Run)
        run.steps, run.config, run.progress = steps, Config(validation=ValidationConfig(freq=freq)), Progress()
        found = []
        for run.progress.step in range(1, steps + 1):
            found += [-run.progress.step if run.is_early else run.progress.step] * run.validates
        return found  # below 0: the early one, which does not count

    assert validated(1000, 250) == [-50, 250, 500, 750, 1000] and validated(1000, 0) == [1000]
    assert validated(1000, 50)[:2] == [50, 100] and validated(119, 100) == [-5, 100, 119]
    assert validated(15, 10) == [-1, 10, 15] and validated(1, 9) == [1] and validated(2, 9) == [-1, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data.validation_fraction": 0}, "patience = 2 needs data.validation_path or data.validation_fraction"),
        ({"validation.freq": 0}, "patience = 2 needs validation.freq, the steps between validations"),
    ],
)
def test_early_stopping_needs_validations(more: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(settings(tmp_path, **{"validation.patience": 2, **more}), 1)


def test_the_first_steps_state_does_not_replace_that_of_a_rank_that_fails_meanwhile(
    world: World, tmp_path: Path
) -> None:
    """Between rank 0's look at the state and its own words another rank writes why it failed."""
    folder = RunFolder(load_config(settings(tmp_path / "run"), 1).job, False, world)
    folder._write_running()
    alone = Outcome(1, "rank 1: a bug", state="crashed", next="again")
    crash = threading.Thread(target=folder.note_crash, args=[alone])
    running = folder._is_running

    def slowly() -> bool:
        folder._is_running = running  # type: ignore[method-assign]
        found = running()
        crash.start()
        crash.join(1)
        return found

    folder._is_running = slowly  # type: ignore[method-assign]
    folder.after_step(1, None)
    crash.join()
    assert json.loads((tmp_path / "run/run_state.json").read_text())["state"] == "crashed"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Renames:
    """An observer that renames the run folder after a step. `replaced`: it puts another run's folder in its place."""

    def __init__(self, folder: Path, step: int, replaced: bool) -> None:
        self.folder, self.step, self.replaced = folder, step, replaced

    def after_step(self, step: int, _: object) -> None:
        if step == self.step:
            self.folder.rename(self.folder.with_name("renamed"))
            if self.replaced:
                shutil.copytree(self.folder.with_name("renamed"), self.folder)
                self.left = content(self.folder)


@pytest.mark.parametrize(
    ("at", "replaced"),
    [
        pytest.param(2, False, marks=pytest.mark.full),
        (2, True),
        (4, False),  # after the last step
        pytest.param(4, True, marks=pytest.mark.full),
    ],
)
def test_a_run_whose_folder_was_renamed_stops_and_writes_nothing_elsewhere(
    replaced: bool, at: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also nothing is removed there: `keep_latest_k` would remove another run's checkpoints."""
    folder, renamed = tmp_path / "run", tmp_path / "renamed"
    more = {"training.steps": 4, "checkpoint.interval": 1, "checkpoint.keep_latest_k": 1, "validation.freq": 0}
    renames = Renames(folder, at, replaced)

    def opened(config: Config, world: World, folder: Path, supervision: Supervision) -> Run:
        run = open_run(config, world, folder, Supervision(moved=supervision.moved))
        run.observers.append(renames)
        return run

    def exit_process(code: int, _: bool) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(train_module, "open_run", opened)
    monkeypatch.setattr(distributed, "init_distributed", lambda **_: world)
    monkeypatch.setattr(distributed, "exit_process", exit_process)
    heartbeat: Any = SimpleNamespace(note=lambda _: None, is_in=lambda _: None)
    with pytest.raises(SystemExit) as ended:
        train_module.main(load_config(settings(folder, **more), 1), NEVER, heartbeat)  # type: ignore[arg-type]
    state = json.loads((renamed / "run_state.json").read_text())
    assert (ended.value.code, state["state"]) == (2, "bad_input")
    assert f"it is now {renamed}. Rename it back, or start again with --job.run_folder" in state["message"]
    assert content(folder) == renames.left if replaced else not folder.exists()
    assert sorted(path.name for path in (renamed / "checkpoint").glob("step-*")) == [f"step-{at - 1}"]
    assert json.loads((renamed / "metrics.jsonl").read_text().splitlines()[-1])["step"] == at


def test_a_folder_that_was_renamed_after_the_launcher_made_it_is_not_made_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the data are prepared. A run that resumes would begin anew."""
    monkeypatch.setenv("TITAN_RUN_FOLDER", str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"run/checkpoint: cannot be written to \(No such file or directory\)"):
        RunFolder(load_config(settings(tmp_path / "run"), 1).job, False, world)
    assert not (tmp_path / "run").exists()


def test_no_run_trains_in_a_teachers_folder(world: World, tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "teach.toml").touch()
    job = load_config(settings(tmp_path / "teacher"), 1).job
    with pytest.raises(UserError, match="is a teacher's folder, which titan-mi100 teach continues; name another"):
        RunFolder(job, False, world)
    assert os.listdir(tmp_path / "teacher") == ["teach.toml"]
    assert RunFolder(job, False, world, of_teacher=True).path == tmp_path / "teacher"
