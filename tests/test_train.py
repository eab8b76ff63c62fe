"""The trainer as a user runs it: whole processes, real files, exit codes, and a resume that is bit-identical."""

import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ASSETS, MINIMAL, REPO, torchrun
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config

CONFIG = f"""{MINIMAL}seq_len = 128
local_batch_size = 1
steps = 20
mixed_precision_param = "float32"
[optimizer]
lr = 2e-3
[lr_scheduler]
decay_type = "constant"
[checkpoint]
interval = 10
keep_latest_k = 0
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(CONFIG)
    return path


def train(config: Path, run_folder: Path, *arguments: str, processes: int = 2, check: bool = True, **options: Any):
    return torchrun(
        "-m", "titan_mi100.train", "--job.config_file", str(config), "--job.run_folder", str(run_folder), *arguments,
        processes=processes, check=check, **options,
    )  # fmt: skip


def metrics(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    return [entry["loss"] for entry in metrics(run_folder) if "loss" in entry]


def checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in saved.values()), "something is pickled"
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def uninterrupted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps at once on two processes, started as users do."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    given = ("--job.config_file", str(config), "--job.run_folder", str(folder))
    more = ("--data.validation_fraction", "0.05", "--validation.freq", "10")
    path, temporary = f"{Path(sys.executable).parent}:{os.environ['PATH']}", folder.with_name("tmp [x y")
    temporary.mkdir()
    environment = {**os.environ, "PATH": path, "NGPU": "2", "TMPDIR": str(temporary)}
    result = subprocess.run(
        [str(REPO / "run_train.sh"), *given, *more], cwd=config.parent, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    # torch's cache of compiled code is made there where no process before has named another
    assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")] == []
    (folder / "stdout.txt").write_text(result.stdout)
    return folder


def test_loss_falls_and_the_folder_explains_the_run(uninterrupted: Path) -> None:
    steps = [entry for entry in metrics(uninterrupted) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 21))
    assert steps[-1]["loss"] < 0.75 * steps[0]["loss"]
    assert all(entry["tokens"] > entry["supervised_tokens"] > 0 and entry["mfu"] is None for entry in steps)
    validation = [entry for entry in metrics(uninterrupted) if "validation_loss" in entry]
    assert [entry["step"] for entry in validation] == [1, 10, 20]  # the first one is early
    assert validation[2]["validation_loss"] < validation[1]["validation_loss"] < validation[0]["validation_loss"]

    text = (uninterrupted / "stdout.txt").read_text()
    for expected in ("step  1/20  loss ", "grad_norm", "lr ", "tok/s", "supervised tok/s", "mfu(fp32) n/a", "mem ",
                     "data wait", "step 20  validation loss", "attention: sdpa",
                     "_scaled_dot_product_flash_attention_for_cpu",
                     " in 20 steps", "how good", "how to use it", "try next"):  # fmt: skip
        assert expected in text, expected
    phases = ("preparing the data", "loading torch", "meeting the other ranks, 2 in all", "drawing random weights")
    places = [text.index(f" {phase} ...\n") for phase in phases] + [text.index(" training: step 1 of 20 ...\n")]
    assert places == sorted(places) and text.count("preparing the data") == 1
    state = json.loads((uninterrupted / "run_state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("done", 0)
    environment = json.loads((uninterrupted / "environment.json").read_text())
    assert (environment["processes"], environment["compute_dtype"]) == (2, "fp32")
    assert environment["attention_kernel"] == "_scaled_dot_product_flash_attention_for_cpu"
    assert "seq_len = 128" in (uninterrupted / "config.toml").read_text()
    assert "NoneType: None" not in (uninterrupted / "train.log").read_text()  # a crash that was none

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(uninterrupted / "tensorboard")).Reload()
    shown = events.Scalars("train/loss")
    assert [point.step for point in shown] == list(range(1, 21))
    assert [point.value for point in shown] == pytest.approx([entry["loss"] for entry in steps])
    assert {"train/grad_norm", "train/lr", "train/tokens_per_second", "train/peak_memory_gib", "train/data_wait",
            "train/supervised_tokens_per_second", "validation/loss",
            "validation/bits_per_byte"} <= set(events.Tags()["scalars"])  # fmt: skip


def test_the_checkpoint_holds_hf_names_and_no_pickles(uninterrupted: Path) -> None:
    tensors = checkpoint_tensors(uninterrupted / "checkpoint" / "step-20")
    shapes = parameter_shapes(PRESETS["debug"])
    assert {name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("optimizer.")} == shapes
    state = {f"optimizer.{name}.{key}" for name in shapes for key in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == shapes.keys() | state
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert tensors["optimizer.model.norm.weight.step"] == 20
    assert sorted(path.name for path in (uninterrupted / "checkpoint").iterdir()) == ["step-10", "step-20"]


@pytest.mark.full
def test_ten_steps_a_resume_and_ten_more_are_bit_identical_to_twenty(
    config: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ("--data.validation_fraction", "0.05", "--validation.freq", "0")  # and no early validation
    # the warmup of 3% of 20 steps, which 10 steps alone would not have
    train(config, folder, *more, "--training.steps", "10", "--lr_scheduler.warmup_steps", "1")
    resumed = train(config, folder, *more)
    assert f"resumed from {folder / 'checkpoint' / 'step-10'}" in resumed.stdout
    assert "steps = 10" in (folder / "config-until-step-10.toml").read_text()
    assert "steps = 20" in (folder / "config.toml").read_text()
    assert losses(folder) == losses(uninterrupted)
    assert [e["grad_norm"] for e in metrics(folder) if "loss" in e] == [
        e["grad_norm"] for e in metrics(uninterrupted) if "loss" in e
    ]
    expected = checkpoint_tensors(uninterrupted / "checkpoint" / "step-20")
    for name, tensor in checkpoint_tensors(folder / "checkpoint" / "step-20").items():
        assert torch.equal(tensor, expected[name]), name


def test_data_is_prepared_by_one_process_for_a_layout_of_several(config: Path, tmp_path: Path) -> None:
    """As run_train.sh does it, before it starts the others."""
    degrees = ("--parallelism.pipeline_parallel_degree", "2", "--training.gradient_accumulation_steps", "2")
    command = [sys.executable, "-m", "titan_mi100.data.prepare", "--job.config_file", str(config), *degrees]
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run(
        [*command, "--job.run_folder", str(tmp_path)], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ledger.csv").exists()


@pytest.mark.full  # by default test_layouts does it, without the launcher
def test_a_pipeline_goes_on_where_shards_stopped(config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    more = ("--data.validation_fraction", "0.05", "--training.steps", "22", "--checkpoint.interval", "1")
    pipeline = ("--parallelism.pipeline_parallel_degree", "2", "--training.gradient_accumulation_steps", "2")
    result = train(config, folder, *more, *pipeline)
    assert "layout: pipeline of 2; a step is 2 rows" in result.stdout
    assert "pipeline: 1F1B, 2 microbatches, layers per stage 2, 2" in result.stdout
    manifest = json.loads((folder / "checkpoint" / "step-22" / "manifest.json").read_text())
    assert manifest["chosen"]["stages"] == [2, 2]
    assert "Warning" not in result.stderr
    assert f"resumed from {folder / 'checkpoint' / 'step-20'}" in result.stdout
    shards = tmp_path / "shards"
    shutil.copytree(uninterrupted, shards)
    train(config, shards, *more)
    assert losses(folder)[20:] == pytest.approx(losses(shards)[20:], rel=1e-5)
    shutil.rmtree(folder / "checkpoint" / "step-22")
    back = train(config, folder, *more)
    assert f"resumed from {folder / 'checkpoint' / 'step-21'}" in back.stdout and len(losses(folder)) == 22


@pytest.mark.full
def test_what_may_change_on_a_resume_does(config: Path, uninterrupted: Path, full: bool, tmp_path: Path) -> None:
    """The right-hand column of docs/CHECKPOINTS.md; the left one is refused in the tests below and test_checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    changed = {
        "training.steps": "22", "training.max_norm": "0.5", "training.max_nonfinite_steps": "7",
        "training.mixed_precision_param": "bfloat16", "optimizer.lr": "1e-3", "optimizer.beta2": "0.9",
        "optimizer.eps": "1e-6", "optimizer.weight_decay": "0.2", "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.warmup_steps": "0", "lr_scheduler.min_lr_factor": "0.5", "checkpoint.interval": "1",
        "checkpoint.keep_latest_k": "3", "checkpoint.keep_best": "true", "checkpoint.async_mode": "async",
        "validation.freq": "1", "metrics.log_freq": "2", "metrics.enable_tensorboard": "false",
        "activation_checkpoint.mode": "full", "compile.enable": str(full).lower(),
        **({"compile.backend": "aot_eager"} if full else {}),
        "model.attention_backend": "eager", "parallelism.tensor_parallel_degree": "2",
        "training.local_batch_size": "2", "data.validation_fraction": "0.05",
    }  # fmt: skip
    result = train(config, folder, *(word for name, value in changed.items() for word in (f"--{name}", value)))
    assert f"resumed from {folder / 'checkpoint' / 'step-20'}" in result.stdout
    assert len(losses(folder)) == 22 and losses(folder)[:20] == losses(uninterrupted)
    assert {path.name for path in (folder / "checkpoint").iterdir()} >= {"step-20", "step-21", "step-22", "best"}
    allowed = ("--checkpoint.allow_changed", "seed,global_batch_size", "--training.seed", "9")
    more = ("--training.steps", "23", "--data.validation_fraction", "0.05", "--training.local_batch_size", "3")
    result = train(config, folder, *more, *allowed)
    assert "a step is 6 rows" in result.stdout and len(losses(folder)) == 23


@pytest.mark.full
def test_an_epoch_ends_with_its_rows_also_where_the_global_batch_changed(config: Path, tmp_path: Path) -> None:
    rows = (ASSETS / "arithmetic.jsonl").read_text().splitlines(keepends=True)[:40]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    folder = tmp_path / "run"
    more = ("--data.path", str(tmp_path / "rows.jsonl"), "--lr_scheduler.warmup_steps", "1")
    result = train(config, folder, *more, "--training.steps", "5", processes=1)
    in_all = int(re.search(r"in (\d+) rows of", result.stdout)[1])  # type: ignore[index]
    epoch = ("--training.steps", "0", "--training.epochs", "1", "--training.local_batch_size", "4")
    train(config, folder, *more, *epoch, "--checkpoint.allow_changed", "global_batch_size", processes=1)
    steps = 5 + -(-(in_all - 5) // 4)
    assert len(losses(folder)) == steps and metrics(folder)[-1]["epoch"] >= 1
    state = json.loads((folder / "checkpoint" / f"step-{steps}" / "trainer.json").read_text())
    assert in_all <= state["loader"]["rows_consumed"] < in_all + 4 + 4
    again = train(config, folder, *more, *epoch, processes=1)  # the same number of steps at every start
    assert f"step {steps} of {steps} was reached before" in again.stdout


@pytest.mark.full
def test_a_resume_drops_what_was_recorded_after_its_checkpoint_and_an_unfinished_one(
    config: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    checkpoints = folder / "checkpoint"
    # as a kill during the save after step 20 leaves it, and in the middle of a line
    (checkpoints / "step-20").rename(checkpoints / ".step-20.0123456789ab.incomplete")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    more = ("--data.validation_fraction", "0.05", "--validation.freq", "10", "--checkpoint.keep_latest_k", "1")
    # another split of the same global batch on one process: the same rows in the same order
    result = train(
        config, folder, *more, "--training.gradient_accumulation_steps", "2", "--training.steps", "12", processes=1
    )
    assert f"resumed from {checkpoints / 'step-10'}" in result.stdout
    assert [entry["step"] for entry in metrics(folder) if "loss" in entry] == list(range(1, 13))
    expected = losses(uninterrupted)
    assert losses(folder)[:10] == expected[:10]
    assert losses(folder)[10:] == pytest.approx(expected[10:12], rel=1e-5)
    assert [entry["step"] for entry in metrics(folder) if "validation_loss" in entry] == [1, 10, 12]
    assert [path.name for path in checkpoints.iterdir()] == ["step-12"]


@pytest.mark.full
def test_another_run_is_not_resumed_and_fresh_starts_beside_it(
    config: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    changing = ("run_state.json", "train.log", ".lock")
    before = {path.name: path.read_bytes() for path in uninterrupted.iterdir() if path.is_file()}
    other = ("--training.seed", "7", "--training.steps", "1", "--data.validation_fraction", "0.05")
    shorter = ("--training.seq_len", "64", "--data.max_lost_share", "1")
    refused = train(config, uninterrupted, *other, *shorter, processes=1, check=False)
    for words in (
        "the run now differs from it: ",
        "seed (42, now 7)",
        "; or allow it: --checkpoint.allow_changed data seed; or start over beside it: --checkpoint.fresh",
        "seq_len (128, now 64)",
    ):
        assert words in refused.stderr, words
    assert "gradient_accumulation_steps is 2 instead of 1, to keep the run's 2 rows per step" in refused.stderr
    more_rows = ("--data.validation_fraction", "0.05", "--training.gradient_accumulation_steps", "2")
    changed = train(config, uninterrupted, *more_rows, check=False)
    assert "makes steps of 4 rows, but this run's have 2; use 1" in changed.stderr
    odd = train(config, uninterrupted, *more_rows[:2], "--training.local_batch_size", "3", check=False)
    assert "does not divide this run's steps of 2 rows; what does: local_batch_size 1 on these ranks" in odd.stderr
    assert "--checkpoint.fresh" in refused.stderr and "Traceback" not in refused.stderr.split("torch/distributed")[0]
    assert json.loads((uninterrupted / "run_state.json").read_text())["exit_code"] == 2
    train(config, uninterrupted, *other, "--checkpoint.fresh", processes=1)
    assert len(losses(uninterrupted.parent / "run-2")) == 1
    after = {path.name: path.read_bytes() for path in uninterrupted.iterdir() if path.is_file()}
    assert before.keys() == after.keys()
    assert all(after[name] == before[name] for name in before if name not in changing)


@pytest.mark.full
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken_unless_there_is_none(
    config: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    path = folder / "checkpoint" / "step-20" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    more = ("--data.validation_fraction", "0.05", "--training.steps", "11")
    result = train(config, folder, *more)
    (aside,) = (folder / "checkpoint").glob("damaged-step-20-*")
    assert f"DAMAGED CHECKPOINT: {path}: has changed" in result.stderr and str(aside) in result.stderr
    assert f"resumed from {folder / 'checkpoint' / 'step-10'}" in result.stdout
    assert losses(folder)[10] == losses(uninterrupted)[10]
    for step in (10, 11):
        (folder / "checkpoint" / f"step-{step}" / "trainer.json").write_text("{}")
    refused = train(config, folder, *more, check=False)
    assert "step-10/trainer.json: has 2 bytes" in refused.stderr and "has no other checkpoint" in refused.stderr
    assert "--checkpoint.fresh" in refused.stderr and "Traceback" not in refused.stderr.split("torch/distributed")[0]
    assert json.loads((folder / "run_state.json").read_text())["exit_code"] == 2
    shutil.rmtree(folder / "checkpoint" / "step-10")  # without it, the run does not silently start over either
    refused = train(config, folder, *more, check=False, processes=1)
    assert "has only damaged checkpoints" in refused.stderr


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_written_is_a_crash_that_says_so(config: Path, tmp_path: Path) -> None:
    command = f"ulimit -f 2000; exec {sys.executable} -m titan_mi100.train --job.config_file {config} " + (
        f"--job.run_folder {tmp_path / 'run'} --training.steps 1 --metrics.enable_tensorboard false"
    )
    result = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "the checkpoint of step 1 could not be written: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((tmp_path / "run" / "run_state.json").read_text())["state"] == "save_failed"
    assert not list((tmp_path / "run" / "checkpoint").iterdir())


@pytest.mark.full
def test_bad_rows_stop_the_run_before_training_with_exit_code_2(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n{"question": "a"}\n')
    result = train(config, tmp_path / "run", "--data.path", str(path), check=False)
    assert f"{path}:2: missing key: the row has no 'answer'" in result.stderr
    rows = list(csv.DictReader((tmp_path / "run" / "ledger.csv").open()))
    assert [(row["line"], row["status"]) for row in rows] == [("1", "kept"), ("2", "rejected")]
    assert "Traceback" not in result.stderr.split("torch/distributed")[0]
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("bad_input", 2) and f"{path}:2" in state["message"]
    assert not list((tmp_path / "run" / "checkpoint").iterdir())


def test_weights_from_an_hf_folder_are_loaded_and_wrong_ones_refused(config: Path, tmp_path: Path) -> None:
    spec = PRESETS["debug"]
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in parameter_shapes(spec).items()}
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(spec)))
    save_file(weights, tmp_path / "model.safetensors")
    more = ("--checkpoint.initial_load_path", str(tmp_path), "--training.steps", "1", "--model.flavor", "")
    train(config, tmp_path / "run", *more)
    # a model of zeros says that all tokens are as likely
    assert losses(tmp_path / "run")[0] == pytest.approx(torch.tensor(spec.vocab_size).log().item(), rel=1e-4)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    refused = train(config, tmp_path / "run2", *more, check=False)
    assert f"{tmp_path}: missing: model.norm.weight" in refused.stderr
    assert not (tmp_path / "run2").exists()  # it is found before the run's folder is made


def test_an_unexpected_error_is_a_crash_in_the_run_state_and_the_log(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").touch()
    result = train(config, folder, processes=1, check=False)
    state = json.loads((folder / "run_state.json").read_text())
    assert (result.returncode, state["state"], state["exit_code"]) == (1, "crashed", 1)
    assert "FileExistsError" in state["message"] and "Traceback" in (folder / "train.log").read_text()


@pytest.mark.parametrize("how", ["a bug", pytest.param("killed", marks=pytest.mark.full)])
def test_the_rank_that_failed_first_is_named_and_the_others_write_to_files_of_their_own(
    how: str, config: Path, tmp_path: Path
) -> None:
    script, folder = str(REPO / "tests/gloo/job_crash.py"), tmp_path / "run"
    arguments = ("--job.config_file", str(config), "--job.run_folder", str(folder))
    result = torchrun(script, how, *arguments, check=False)
    state = json.loads((folder / "run_state.json").read_text())
    rank, kind = (1, "crashed") if how == "a bug" else (0, "lost_a_process")  # who is killed leaves no word
    assert (state["state"], state["exit_code"], state["step"]) == (kind, 1, 1)
    named = f"rank {rank} on {socket.gethostname()}, after step 1: unexpected error, "
    assert state["message"].startswith(named) and result.stderr.count(f"ERROR {named}") == 1
    logs = folder / "logs"
    assert [path.name for path in logs.glob("*")] == (["rank-00001.log"] if how == "a bug" else [])
    if how == "a bug":
        written = (logs / "rank-00001.log").read_text()
        assert "KeyError: 'a bug'" in written and "Traceback" in written and "after step 1" in written


def test_a_loss_that_is_not_finite_ends_the_run_with_code_4_and_keeps_the_checkpoints(
    config: Path, tmp_path: Path
) -> None:
    more = ("--optimizer.lr", "1e20", "--checkpoint.interval", "1", "--training.max_norm", "0")
    folder = tmp_path / "run"
    result = train(config, folder, *more, "--training.max_nonfinite_steps", "2", processes=1, check=False)
    state = json.loads((folder / "run_state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("numerical_abort", 4)
    steps = [entry for entry in metrics(folder) if "loss" in entry]
    assert [entry["skipped"] for entry in steps] == [False] * (len(steps) - 2) + [True, True]
    assert f"not finite in 2 steps in a row, up to step {len(steps)}" in state["message"] + result.stderr
    assert f"{ASSETS / 'arithmetic.jsonl'}:" in state["message"]
    named = list(csv.reader((folder / "nonfinite_rows.csv").open()))
    assert {int(step) for step, _, _ in named} == {len(steps) - 1, len(steps)}
    names = [path.name for path in (folder / "checkpoint").iterdir()]
    last = len(steps) - 2  # the skipped ones are not saved, and show what the last one is
    assert sorted(names) == sorted([*(f"step-{step}" for step in range(1, last + 1)), f"step-{last}.suspect"])
    assert "no sound checkpoint" in state["next"] if last == 1 else f"resumes from step-{last - 1}" in state["next"]
