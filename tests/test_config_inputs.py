"""What a command line and a config file may hold: nothing dropped, nothing idle, and no traceback for any of it."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from config_fuzz import at_most, run
from conftest import ASSETS, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_mi100.config import load as load_module
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import config_from_command_line, load_config, make_run_folder
from titan_mi100.config.settings import Config, JobConfig
from titan_mi100.config.srun import RUN_FOLDER
from titan_mi100.config.toml_file import tomllib
from titan_mi100.errors import UserError
from titan_mi100.files.patterns import matching_files
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.workshop import other_trainers

DATA, TOKENIZER = str(ASSETS / "arithmetic.jsonl"), str(ASSETS / "tokenizer")
MINIMAL = f"""
[model]
flavor = "debug"
tokenizer_path = "{TOKENIZER}"
[data]
path = "{DATA}"
[training]
seq_len = 256
"""


def run_folder_of(config: Config) -> Path:
    return make_run_folder(config.job, config.checkpoint.fresh)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "my.toml"
    path.write_text(MINIMAL)
    return path


def load(file: Path, *arguments: str) -> Config:
    return load_config(["--job.config_file", str(file), *arguments])


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(argv)
    return str(caught.value)


# --- nothing is dropped


def test_a_list_takes_several_words_and_its_key_may_be_repeated(file: Path, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a.jsonl", "b, c.jsonl", "d.jsonl")]
    for name in names:
        name.write_text("{}")
    a, b, d = map(str, names)
    for arguments in (
        ["--data.path", a, b, d],
        ["--data.path", a, "--data.path", b, d],
        [f"--data.path={a}", f"--data.path={b}", "--optimizer.lr", "1e-4", f"--data.path={d}"],
        ["--data.path", a, b, "--checkpoint.export_hf", "--data.path", d],
    ):
        assert load(file, *arguments).data.path == (a, b, d), arguments
    assert load(file, "--data.path", f"{a},{d}", "--data.repeats", "2", "3").data.repeats == (2.0, 3.0)


@pytest.mark.parametrize("second", [("--training.seed", "8"), ("--training.seed=7",)])
def test_a_single_value_given_twice_is_refused(file: Path, second: tuple[str, ...]) -> None:
    message = refusal("--job.config_file", str(file), "--training.seed", "7", *second)
    assert message == f"command line: --training.seed is given twice, as '7' and '{second[-1][-1]}'; keep one of them"
    message = refusal("--job.config_file", str(file), "--optimizer.lr", "1", "2")
    assert message.startswith("command line: '2' is not an option; only a list takes several values (")


def test_the_launchers_folder_is_the_runs_whatever_the_config_names(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_folder_of(load(file, "--job.run_folder", str(tmp_path / "run"), "--checkpoint.fresh"))
    monkeypatch.setenv(RUN_FOLDER, str(made))
    config = load(file, "--job.run_folder", str(tmp_path / "run"), "--checkpoint.fresh")
    assert (config.job.run_folder, run_folder_of(config)) == (str(made), made)
    other = refusal("--job.config_file", str(file), "--job.run_folder", "a", "--job.run_folder", "b")
    assert "--job.run_folder is given twice" in other


def test_the_command_line_replaces_what_the_file_says_in_another_way(file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.toml"
    child.write_text(f'base = "{file}"\n[training]\nepochs = 3\ntarget_tokens_per_step = 9\n')
    config = load(child, "--training.steps", "7", "--training.gradient_accumulation_steps=4")
    assert (config.training.steps, config.training.epochs) == (7, 0)
    assert (config.training.gradient_accumulation_steps, config.training.target_tokens_per_step) == (4, 0)
    assert config.notes == (
        "--training.steps replaces [training] epochs = 3",
        "--training.gradient_accumulation_steps replaces [training] target_tokens_per_step = 9",
    )
    assert load(child, "--training.steps", "0").training.epochs == 3
    child.write_text(f'base = "{file}"\n[training]\nsteps = 3\n[data]\nvalidation_fraction = 0.5\n')
    config = load(child, "--training.epochs", "2", "--data.validation_path", DATA)
    assert (config.training.steps, config.training.epochs, config.data.validation_fraction) == (0, 2, 0.0)
    both = refusal("--job.config_file", str(child), "--training.epochs=1", "--training.steps=2")
    assert "steps and epochs are both set" in both


def test_the_debug_config_is_only_for_its_own_model_and_data(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "config.json").write_text(json.dumps(to_hf_config(PRESETS["0.6B"])))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((ASSETS / "tokenizer" / name).read_bytes())
    debug = load_config(["--training.steps", "4"])
    assert (debug.model.flavor, debug.training.steps, Path(debug.job.config_file).stem) == ("debug", 4, "debug")
    model = str(tmp_path / "model")
    tuned = load_config(["--checkpoint.initial_load_path", model, "--data.path", DATA])
    assert tuned.spec() == PRESETS["0.6B"] and tuned.tokenizer_path() == model
    assert (tuned.optimizer.lr, tuned.training.epochs, tuned.training.steps) == (2e-5, 3, 0)
    assert tuned.notes == (f"no --job.config_file is given: settings from {tuned.job.config_file}",)
    assert "[data] path is not set" in refusal("--checkpoint.initial_load_path", model)
    assert "[model] flavor is not set; name an HF folder in" in refusal("--data.path", DATA)


# --- nothing is idle

IDLE = {
    "lr_scheduler.min_lr_factor": ("0.1", ["--lr_scheduler.decay_type=constant"]),
    "lr_scheduler.decay_ratio": ("0.5", ["--lr_scheduler.decay_type=constant"]),
    "parallelism.pipeline_parallel_layers_per_stage": ("2 2", []),
    "parallelism.pipeline_parallel_schedule": ("GPipe", []),
    "parallelism.powersgd_start_step": ("9", []),
    "parallelism.powersgd_warm_start": ("false", []),
    "parallelism.powersgd_error_feedback": ("false", []),
    "lora.alpha": ("9", []),
    "lora.dropout": ("0.5", []),
    "lora.target_modules": ("q_proj", []),
    "compile.backend": ("aot_eager", []),
    "checkpoint.export_dtype": ("bfloat16", []),
    "training.mixed_precision_reduce": ("bfloat16", ["--training.mixed_precision_param=float64"]),
    "data.max_bad_rows": ("9", []),
    "data.weights": ("9", []),
    "data.loss": ("last", ["--data.format=text"]),
    "data.empty_think": ("supervised", ["--data.format=text"]),
    "data.earlier_thinking": ("mask", ["--data.format=tokens"]),
    "data.text_column": ("story", ["--data.format=messages"]),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_setting_that_another_one_makes_idle_is_refused(name: str, file: Path) -> None:
    value, because = IDLE[name]
    message = refusal("--job.config_file", str(file), f"--{name}", *value.split(), *because)
    assert message.startswith(f"--{name} = ") and " has no effect with " in message and "\n" not in message
    load(file, *because)


# --- no traceback


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (f"--training.seed={10**400}", "must be at most 9223372036854775807"),
        (f"--training.seed={2**70}", "must be at most 9223372036854775807"),
        ("--training.steps=" + "9" * 5000, "must be a whole number"),
        ("--training.seed=-1", "must be at least 0"),
        ("--data.workers=1000000", "must be at most 4096"),
        ("--training.gradient_accumulation_steps=1000000", "must be at most 65536"),
        ("--parallelism.tensor_parallel_degree=1000000000", "does not divide num_attention_heads = 4"),
        ("--parallelism.pipeline_parallel_degree=1000000000", "makes 1000000000 stages of 4 layers; lower it"),
        ("--optimizer.lr=1e999", "must be a finite number of at least 0"),
        ("--optimizer.lr=-1e-9", "must be a finite number of at least 0"),
        ("--data.weights=1e308", "must be a finite number of at least 0, below 1e+100"),
        ("--job.run_folder=" + "r" * 300, "cannot be a path: File name too long"),
        ("--checkpoint.initial_load_path=" + "m" * 300, "cannot be a path: File name too long"),
        ("--job.run_folder=a\0b", "holds control characters or is not UTF-8"),
        ("--job.run_folder=a\x1b[31mb", "holds control characters or is not UTF-8"),
        ("--data.path=~\0", "holds control characters or is not UTF-8"),
        ("--job.description=\udcff", "is not UTF-8"),
        ("--lr_scheduler.decay_ratio=0", "leaves no decay"),
        ("--lora.dropout=1", "must be a finite number of at least 0, below 1"),
        ("--objective.label_smoothing=0.5", "must be a finite number of at least 0, below 0.5"),
    ],
    ids=lambda value: value[:40].encode("ascii", "backslashreplace").decode(),
)
def test_a_value_out_of_all_bounds_is_refused_at_once(argument: str, words: str, file: Path) -> None:
    with at_most(2):
        message = refusal("--job.config_file", str(file), argument)
    name = argument.partition("=")[0]
    assert words in message and len(message) < 1000
    assert name in message or f"[{name[2:].replace('.', '] ')}" in message


def test_toml_numbers_of_any_size_are_refused(file: Path, tmp_path: Path) -> None:
    for value in ("1" + "0" * 400, "0x1" + "0" * 5000):
        path = tmp_path / "big.toml"
        path.write_text(f'base = "{file}"\n[optimizer]\nlr = {value}\n[training]\nseed = {value}\n')
        lines = refusal("--job.config_file", str(path)).splitlines()
        assert [line.partition(" = ")[0] for line in lines] == [f"{path}: [training] seed", f"{path}: [optimizer] lr"]


def test_a_config_that_is_no_regular_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reading, writing = os.pipe()
    os.write(writing, MINIMAL.encode())
    os.close(writing)
    kinds = {
        "is not a regular file": ("/dev/null", "/dev/zero", tmp_path / "fifo", f"/dev/fd/{reading}"),
        "is a folder": (tmp_path, ""),
        "no such file": (tmp_path / "gone",),
        "holds control characters": ("a\0b", tmp_path / "a\nb"),
        "File name too long": ("n" * 300,),
    }
    with at_most(2):
        for words, paths in kinds.items():
            for path in paths:
                message = refusal("--job.config_file", str(path), "--data.path", DATA)
                assert words in message and len(message.splitlines()) == 1, message
    os.close(reading)
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    assert "is larger than 1,048,576 bytes" in refusal("--job.config_file", str(tmp_path / "large.toml"))
    for content in (b"\xff\xfe", b"a = [" + b"[" * 50_000, b"\xef\xbb\xbf" * 2):
        (tmp_path / "bad.toml").write_bytes(content)
        assert "bad.toml: cannot be read as TOML: " in refusal("--job.config_file", str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"vocab_size": 10**400},
        {"hidden_size": 10**12},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {"max_position_embeddings": 10**400},
    ],
    ids=lambda change: str(change)[:40],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(change: dict, file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(PRESETS["debug"]) | change))
    with at_most(2):
        given = ("--checkpoint.initial_load_path", str(tmp_path), "--model.flavor", "")
        message = refusal("--job.config_file", str(file), *given, "--parallelism.tensor_parallel_degree=100000000")
    for name in change:
        assert f"{tmp_path / 'config.json'}: {name} = 1" in message
    assert "is more than any model has" in message and len(message) < 1000


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.text() | st.text("\x00\x1f\x7f\x85\u2028\ufeff\"'\\\n\r\t", max_size=8), st.floats(0, 1e308), st.booleans())
def test_a_text_comes_back_from_the_toml_that_was_written(text: str, number: float, flag: bool) -> None:
    before = Config()
    config = replace(
        before,
        job=JobConfig(description=text),
        optimizer=replace(before.optimizer, weight_decay=number),
        data=replace(before.data, path=(text, text)),
        metrics=replace(before.metrics, enable_tensorboard=flag),
    )
    read = tomllib.loads(to_toml(config).encode().decode())
    assert read["job"]["description"] == text and read["data"]["path"] == [text, text]
    assert read["optimizer"]["weight_decay"] == number and read["metrics"]["enable_tensorboard"] is flag


def test_what_a_command_prints_holds_no_control_characters(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = tmp_path / "my.toml"
    hostile.write_text('base = "\\u001b[31m"\n"\\u001b[2J\\n\\u202e" = 1\n[model]\nflavor = "\\u001b"')
    monkeypatch.setattr(sys, "argv", ["load", "--job.config_file", str(hostile)])
    with pytest.raises(SystemExit) as ended:
        config_from_command_line()
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert (
        "\x1b" not in shown
        and "\u202e" not in shown
        and "my.toml: \\x1b[2J\\n\\u202e = 1 is outside of any section" in shown
    )


def test_any_other_error_is_one_line_with_the_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug\x1b")

    monkeypatch.setattr(load_module, "load_config", fail)
    monkeypatch.setattr(sys, "argv", ["load"])
    with pytest.raises(SystemExit) as ended:
        config_from_command_line()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith(
        "ERROR unexpected error, KeyError: 'a bug\\x1b'; the traceback is in "
    )
    log = Path(line.rpartition(" ")[2])
    assert "Traceback" in log.read_text() and "in fail" in log.read_text()
    log.unlink()


def test_no_mutated_config_or_command_line_gives_a_traceback(full: bool) -> None:
    cases = 4000 if full else 100
    ends, failures = run(cases, seed=0)
    assert not failures, failures[0]
    assert ends["accepted"] >= cases // 25 and ends["refused"] >= cases // 2, ends


# --- paths


def test_an_empty_item_of_a_list_is_not_dropped(file: Path, tmp_path: Path) -> None:
    """An unset variable in quotes."""
    (tmp_path / "x.toml").write_text(f'base = "{file}"\n[data]\nvalidation_path = ["{DATA}", ""]\n')
    assert "[data] validation_path = " in refusal("--job.config_file", str(tmp_path / "x.toml"))
    for words in (["--data.path", "", DATA], ["--data.path=", "--data.path", DATA], ["--data.path", f"{DATA},"]):
        assert "has an empty item; leave it out" in refusal("--job.config_file", str(file), *words)
    assert load(file, "--data.validation_path", "").data.validation_path == ()


def test_a_glob_in_a_folder_with_brackets_finds_that_folder_s_files(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run[1]", "run1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path / "run[1]")
    (tmp_path / "run[1]" / "x.toml").write_text(f'base = "{file}"\n[data]\npath = "*.jsonl"\n')
    for config in (load(file, "--data.path", "*.jsonl"), load(tmp_path / "run[1]" / "x.toml")):
        [pattern] = config.data.path
        assert matching_files(pattern)[0] == [str(tmp_path / "run[1]" / "x.jsonl")]
    assert load(file, "--data.path", "x.jsonl").data.path == (str(tmp_path / "run[1]" / "x.jsonl"),)
    (below := tmp_path / "run[1]" / "configs").mkdir()
    (below / "x.toml").write_text(f'base = "{file}"\n[data]\npath = "../*.jsonl"\n')
    assert matching_files(load(below / "x.toml").data.path[0])[0] == [str(tmp_path / "run[1]" / "x.jsonl")]


def test_the_config_of_a_run_whose_folder_was_moved_says_how_to_resume_it(file: Path, tmp_path: Path) -> None:
    (moved := tmp_path / "moved").mkdir()
    (moved / "run_state.json").write_text("{}")
    (moved / "config.toml").write_text(f'base = "{file}"\n[job]\nrun_folder = "{tmp_path / "before"}"\n')
    given = ("--job.config_file", str(moved / "config.toml"))
    remedy = ("--job.run_folder", str(moved))
    assert refusal(*given).endswith(f"to resume the run that is here: {' '.join(remedy)}")
    assert load_config([*given, *remedy]).job.run_folder == str(moved)
    assert load_config([*given, "--job.run_folder", str(tmp_path / "new")]).job.run_folder == str(tmp_path / "new")


def test_two_dots_after_a_link_lead_where_the_system_says(file: Path, tmp_path: Path) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/sub")
    for folder, steps in ((tmp_path, 1), (tmp_path / "real", 2)):
        (folder / "x.jsonl").write_text("{}")
        (folder / "base.toml").write_text(f'base = "{file}"\n[training]\nsteps = {steps}\n')
    (tmp_path / "link" / "x.toml").write_text('base = "../base.toml"\n[data]\npath = "../x.jsonl"\n')
    config = load(tmp_path / "link" / "x.toml")
    assert (config.training.steps, config.data.path) == (2, (str(tmp_path / "real" / "x.jsonl"),))


# --- TOML


def test_a_byte_order_mark_is_none_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("\ufeff" + MINIMAL.replace("256", "128"), encoding="utf-8")
    assert load(tmp_path / "x.toml").training.seq_len == 128


def test_thousands_of_errors_are_fifty_lines(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("".join(f"[s{number}]\n" for number in range(1000)))
    lines = refusal("--job.config_file", str(tmp_path / "x.toml")).splitlines()
    assert len(lines) == 51 and lines[-1].startswith("config: 95")


def test_a_chain_of_bases_has_an_end(file: Path, tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    assert "10.toml: is one `base` too many" in refusal("--job.config_file", str(tmp_path / "0.toml"))
    (tmp_path / "10.toml").write_text(MINIMAL)
    assert "`base` too many" in refusal("--job.config_file", str(tmp_path / "0.toml"))
    assert load(tmp_path / "1.toml").training.seq_len == 256


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(".".join(["a"] * 400_000) + " = 1\n", marks=pytest.mark.full),  # it takes all the time it is given
        f"[{'.'.join('a' * 8000)}]\n" * 2,
    ],
)
def test_toml_that_takes_too_long_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with at_most(30):  # 5 s of CPU time
        said = refusal("--job.config_file", str(tmp_path / "x.toml"))
    assert said.startswith(f"{tmp_path / 'x.toml'}: ") and len(said) < 1000


def test_a_config_of_thousands_of_files_is_read_back(file: Path, tmp_path: Path) -> None:
    """As a shell writes them for an unquoted glob."""
    names = [tmp_path / f"{number}.jsonl" for number in range(500)]
    for name in names:
        name.touch()
    config = load(file, "--data.path", *map(str, names))
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert (tmp_path / "again.toml").stat().st_size > 1 << 15
    assert load(tmp_path / "again.toml").data == config.data
    (tmp_path / "again.toml").write_text(to_toml(config).replace("steps =", "steps ==", 1))
    assert "again.toml: cannot be read as TOML: Invalid value" in refusal(
        "--job.config_file", str(tmp_path / "again.toml")
    )


# --- run folders


@pytest.mark.parametrize("fresh", [(), ("--checkpoint.fresh",)])
def test_a_run_folder_that_cannot_be_made_is_said_at_once(file: Path, tmp_path: Path, fresh: tuple[str, ...]) -> None:
    (tmp_path / "gone").symlink_to("nowhere")  # such as a disk that is not mounted
    for folder in ("gone/run", "file/run"):
        (tmp_path / "file").touch()
        with at_most(5), pytest.raises(UserError, match=r"cannot be made \(.*set job.run_folder or job.dump_folder"):
            run_folder_of(load(file, "--job.run_folder", str(tmp_path / folder), *fresh))
    with pytest.raises(UserError, match=r"file/below/.*: cannot be made"):
        run_folder_of(load(file, "--job.dump_folder", str(tmp_path / "file" / "below")))


@pytest.mark.parametrize("name", ["train.log", "config.toml", "ledger.csv", ".lock"])
def test_a_run_writes_through_no_link_and_waits_for_no_pipe(file: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "shared").write_text("not the run's")
    for number, put in enumerate((lambda path: path.symlink_to(tmp_path / "shared"), os.mkfifo, os.mkdir)):
        folder = tmp_path / str(number)
        folder.mkdir()
        put(folder / name)
        with pytest.raises(UserError, match=f"{name}: is a link, a folder or a pipe, .*another job.run_folder"):
            run_folder_of(load(file, "--job.run_folder", str(folder)))
    with pytest.raises(UserError, match=r"shared: cannot be made \(File exists\)"):
        run_folder_of(load(file, "--job.run_folder", str(tmp_path / "shared")))


def test_a_file_replaces_what_its_base_says_in_another_way(file: Path, tmp_path: Path) -> None:
    base, mine = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text(f'base = "{file}"\n[training]\nsteps = 0\nepochs = 3\n')
    mine.write_text('base = "base.toml"\n[training]\nsteps = 5\n')
    config = load(mine)
    assert (config.training.steps, config.training.epochs) == (5, 0)
    assert f"{mine}: [training] steps replaces [training] epochs = 3" in config.notes
    mine.write_text('base = "base.toml"\n[training]\nsteps = 5\nepochs = 2\n')
    assert "steps and epochs are both set" in refusal("--job.config_file", str(mine))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('steps = "100"', r"\[training\] steps = '100' must be a whole number; write it without quotes"),
        ('steps = "ten"', r"\[training\] steps = 'ten' must be a whole number$"),
        ('data.path = ["x"]', r"\[training\] data is a table, .*; write \[data\] on a line of its own"),
    ],
)
def test_a_slip_in_toml_gets_the_words_that_correct_it(text: str, said: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{file}"\n[training]\n{text}\n')
    [line] = refusal("--job.config_file", str(tmp_path / "mine.toml")).splitlines()
    assert re.search(said, line)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            'path = "C:\\data\\x"',
            "in \"...\" a backslash begins an escape; write the text in '...', or / for each backslash",
        ),
        ("a = 1\na = 2", "a is given twice; delete one of them"),
        ("enable = True", "write enable = true"),
        ("path = None", "there is no None; delete the line"),
        ('path = ["a", "b"\n[training]\n', "write [section] or key = value, with texts in quotes and lists in [ ]"),
        ("path = a.jsonl", "write [section] or key = value, with texts in quotes and lists in [ ]"),
        ('path = "a\n', "add the missing quote at the end of the text"),
        ('[data]\npath = "a\u2028b"\nformat = True\n', "write format = true"),
        ("[data]\n\n\u00a0", "write [section] or key = value, with texts in quotes and lists in [ ]"),
        ("[training]\nsteps = 2020-01-01", "put it in quotes, as a text"),
    ],
)
def test_a_syntax_error_in_toml_names_its_repair(text: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"[compile]\n{text}")
    [line] = refusal("--job.config_file", str(tmp_path / "mine.toml")).splitlines()
    assert line.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("objective.loss", "sigmoid", 'here it is "dpo"'),
        ("objective.loss", "kto", 'nearest is objective.name = "preference" with objective.loss = "apo_zero_unpaired"'),
        ("objective.loss", "rpo", "it is dpo with sft_weight, which is its alpha"),
        ("objective.loss", "dppo", "did you mean dpo?"),
        ("objective.name", "dpo", 'write name = "preference"; its loss is dpo by default'),
        ("objective.name", "kto", "KTO subtracts a mean over the batch"),
        ("objective.name", "grpo", "there is no reinforcement learning"),
        ("lora.base", "4bit", 'here it is "nf4"'),
        ("data.overlong", "raise", 'here it is "error"'),
    ],
)
def test_a_value_of_another_trainer_is_no_spelling_mistake(key: str, value: str, said: str, file: Path) -> None:
    answer = refusal("--job.config_file", str(file), f"--{key}", value)
    assert said in answer and ("did you mean" in answer) == ("did you mean" in said)


def test_the_values_of_other_trainers_are_for_keys_that_exist() -> None:
    file = Path(other_trainers.__file__).with_suffix(".toml")
    for table in tomllib.loads(file.read_text())["all"]["values"]:
        theirs = {name for entry in other_trainers.entries() for name in entry.names}
        for key in table["keys"]:
            assert key in theirs | other_trainers.our_keys().keys(), key
            choices = other_trainers.our_keys()[key].metadata["choices"] if "." in key else ()
            assert not {*choices} & table.keys(), f"{key}: a value of ours needs no meaning"


def test_values_that_do_not_fit_are_answered_with_those_that_do(file: Path, tmp_path: Path) -> None:
    said = refusal("--job.config_file", str(file), "--training.mixed_precision_param", "bf16")
    assert said.endswith('must be one of: bfloat16, float16, float32, float64; here it is "bfloat16"')
    assert refusal("--job.config_file", str(file), "--lora.alpha", "4").endswith(
        "has no effect with rank = 0; delete it"
    )
    gone = f"{tmp_path / 'gone.toml'}: no such file; titan-mi100 config new writes one"
    assert refusal("--job.config_file", str(tmp_path / "gone.toml")) == gone
    (heir := tmp_path / "heir.toml").write_text('base = "gone.toml"')
    assert refusal("--job.config_file", str(heir)) == f"{heir}: base = 'gone.toml': {gone}"
    heir.write_bytes(b'[job]\ndescription = "\xe9"')
    assert refusal("--job.config_file", str(heir)).endswith("line 2 is not UTF-8; save the file as UTF-8")


def test_a_path_in_utf8_under_another_locale_is_no_reason_to_rename_it() -> None:
    """Python then decodes the bytes of a command line to surrogates."""
    assert "start with LC_ALL=C.UTF-8" in refusal("--data.path", "data/gr\udcc3\udcb6\udcc3\udc9fe.jsonl")
    rename = "holds control characters or is not UTF-8; rename it"
    for name in ("data/\ud8af.jsonl", "data/gr\udcf6e.jsonl"):  # a surrogate that stands for no byte; Latin-1
        assert f"{rename}\n" in refusal("--data.path", name)
    config = load_config(["--model.flavor", "debug", "--data.path", "data/größe.jsonl"], with_files=False)
    assert config.data.path == (str(Path.cwd() / "data/größe.jsonl"),)
