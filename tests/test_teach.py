"""The command `teach`: the words that it takes, what it compares before it writes, and the files that it writes."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from conftest import ASSETS

from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config
from titan_mi100.launch import launcher
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.tools import teach


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a student's config, rows, and a teacher: its shape and its tokenizer, no weights."""
    for name, count in (("rows.jsonl", 12), ("few.jsonl", 3)):
        rows = [{"prompt": f"{i} + 3?", "completion": str(i + 3)} for i in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "model.flavor": "debug", "model.tokenizer_path": str(ASSETS / "tokenizer"), "training.seq_len": "64",
        "data.path": str(tmp_path / "rows.jsonl"), "data.cache_folder": str(tmp_path / "cache"), "training.steps": "2",
    }  # fmt: skip
    config = load_config([word for key, value in given.items() for word in (f"--{key}", value)], 1)
    (tmp_path / "student.toml").write_text(to_toml(config))
    shutil.copytree(ASSETS / "tokenizer", tmp_path / "teacher-model")
    (tmp_path / "teacher-model" / "config.json").write_text(json.dumps(to_hf_config(PRESETS["debug"])))
    return tmp_path


def command(files: Path, *words: str) -> list[str]:
    return ["--job.config_file", str(files / "student.toml"), *words]


def refused(files: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one message of a command that is refused; nothing is written."""
    before = {path: path.lstat().st_mtime_ns for path in files.rglob("*") if "cache" not in path.parts}
    capsys.readouterr()
    assert teach.main(command(files, *words)) == 2
    assert {path: path.lstat().st_mtime_ns for path in files.rglob("*") if "cache" not in path.parts} == before
    message = capsys.readouterr().err.strip()
    assert message.startswith("ERROR ") and "\n" not in message, message
    return message


def test_no_file_of_others_is_overwritten(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, link, gone = files / "rows.jsonl", files / "link.jsonl", files / "gone.jsonl"
    link.symlink_to(rows)
    gone.symlink_to(files / "nothing")
    assert "exists already, and is not overwritten" in refused(files, capsys, "--ids", str(rows))
    assert "is a link" in refused(files, capsys, "--ids", str(link))
    assert "is a link" in refused(files, capsys, "--ids", str(gone))
    assert "is no regular file" in refused(files, capsys, "--ids", str(files / "teacher-model"))
    assert "No such file or directory" in refused(files, capsys, "--ids", str(files / "no" / "ids.jsonl"))
    (files / "disk").mkdir()
    (files / "linked").symlink_to(files / "disk")
    assert teach.main(command(files, "--ids", str(files / "linked" / "ids.jsonl"))) == 0
    text = (files / "disk" / "ids.jsonl").read_text()
    assert len(text.splitlines()) == 12 and os.listdir(files / "disk") == ["ids.jsonl"]
    os.mkfifo(files / "pipe")
    read = list[str]()
    reader = threading.Thread(target=lambda: read.append((files / "pipe").read_text()))
    reader.start()
    assert teach.main(command(files, "--ids", str(files / "pipe"))) == 0
    reader.join()
    assert read == [text]


def test_every_word_has_an_effect_or_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids, answers = files / "ids.jsonl", files / "answers.jsonl"
    assert teach.main(command(files, "--ids", str(ids), "--data.path", str(files / "few.jsonl"))) == 0
    assert len(ids.read_text().splitlines()) == 3
    answers.write_text("{}\n")
    new, vllm = ("--ids", str(files / "new.jsonl")), ("--from_vllm", str(answers), "--out", str(files / "out"))
    for words, said in (
        ((*new, "--bogus", "1"), "--bogus has no effect with --ids"),
        ((*new, "--lora.base", "nf4"), "--lora.base has no effect with --ids"),
        ((*new, "--data.bogus", "1"), "--data.bogus' is not an option"),
        ((*new, "--model", "teacher"), "--model has no effect with --ids"),
        ((*new, "--top_k", "3"), "--top_k has no effect with --ids"),
        ((*new, "--out", "teacher"), "--out has no effect with --ids"),
        ((*new, "few.jsonl"), "'few.jsonl' is not an option; only a list takes several values"),
        ((*new, *vllm), "has no effect with --ids"),
        ((*vllm, "--bogus", "1"), "--bogus has no effect with --from_vllm"),
        ((*vllm, "--model", "teacher"), "--model has no effect with --from_vllm"),
        ((*vllm, "--nproc_per_node", "2"), "--nproc_per_node has no effect with --from_vllm"),
        ((*vllm, "--top_k", "0"), "--top_k 0: must be 1 or more"),
        (vllm, "answers.jsonl:1: prompt_token_ids must be a list"),
        (("--model", "x", "--optimizer.lr", "1"), "--optimizer.lr has no effect with titan-mi100 teach"),
        (("--model", "x", "--objective.top_k", "5"), "--top_k is the number of ids"),
        (("--model", "x", "--top_k", "-2", "--out", "y"), "--top_k -2: must be 1 or more"),
        (("--model", "x"), "--out FOLDER is missing"),
    ):
        assert said in refused(files, capsys, *words), words


def test_a_pass_compares_tokenizers_and_spares_other_folders(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(launcher, "main", lambda arguments, program: started.append(list(arguments)) or 0)
    model, out = files / "teacher-model", files / "out"
    wanted = ("--model", str(model), "--out", str(out))
    run = files / "run"
    run.mkdir()
    (run / "run_state.json").write_text('{"state": "done"}')
    for words, said in (
        (("--model", str(model), "--out", str(run)), "run: exists already, and is no teacher's folder"),
        (("--model", str(model), "--out", str(files / "rows.jsonl")), "exists already, and is no teacher's folder"),
        ((*wanted, "--model.allow_other_tokenizer", "true"), "has no effect with titan-mi100 teach"),
        (("--model", str(files), "--out", str(out)), "config.json: no such file; name an HF folder, or another run's"),
        (
            ("--model", str(files / "no"), "--out", str(out)),
            "no': no such folder or file; name an HF folder, or another",
        ),
    ):
        assert said in refused(files, capsys, *words), words
    assert teach.main(command(files, *wanted)) == 0
    assert started.pop() == ["--job.config_file", str(out / "teach.toml")]
    layout = ("--nproc_per_node", "2", "--parallelism.pipeline_parallel_degree=2", "--lora.base", "nf4")
    assert teach.main(command(files, *wanted, *layout)) == 0  # again: it goes on
    assert started.pop()[2:] == [*layout, "--training.gradient_accumulation_steps", "2"]
    load_config(
        ["--job.config_file", str(out / "teach.toml"), *layout[2:], "--training.gradient_accumulation_steps", "2"], 2
    )
    shutil.rmtree(out)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    first, second = list(tokens)[40:42]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused(files, capsys, *wanted)
    assert "has another tokenizer than the student" in message and "allow_other_tokenizer" not in message
    (model / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refused(files, capsys, *wanted)
    assert not started
