"""How the commands end: nothing but one message, whatever a program raises."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ASSETS

from titan_mi100 import __main__ as console
from titan_mi100 import __version__, cli, process, train
from titan_mi100.config.as_text import help_text
from titan_mi100.config.settings import Config
from titan_mi100.errors import UserError
from titan_mi100.log import log, setup_logging
from titan_mi100.text import load
from titan_mi100.tools import exact_match, generate, inspect_data
from titan_mi100.watch.outcome import Outcome, write_run_state
from titan_mi100.wording import printable, shown


def raises(error: BaseException) -> Callable[..., Any]:
    def program(*_: object, **__: object) -> None:
        raise error

    return program


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handlers, handler = log.handlers, signal.getsignal(signal.SIGTERM)
    yield
    log.handlers = handlers
    log.setLevel(logging.NOTSET)
    signal.signal(signal.SIGTERM, handler)


def traceback_named_in(line: str) -> str:
    return Path(line.rpartition("the traceback is in ")[2]).read_text()


def test_a_command_ends_with_one_message_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert [cli.exit_code(lambda code=code: code) for code in (None, 0, 3)] == [0, 0, 3]  # type: ignore[misc]
    assert cli.exit_code(raises(UserError("no\x1b[31m:\nother"))) == 2
    assert cli.exit_code(raises(PermissionError(13, "Permission denied", "a\x1b"))) == 2
    assert capsys.readouterr().err == "ERROR no\\x1b[31m:\nERROR other\nERROR a\\x1b: Permission denied\n"
    for error in (KeyError("a\nb\x1b"), RuntimeError("x" * 9999), RecursionError(), AssertionError()):
        assert cli.exit_code(raises(error)) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ERROR unexpected error, {type(error).__name__}: ") and len(line) < 1000
        assert "in program" in traceback_named_in(line) and "\x1b" not in line
    for full in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError(12, "Cannot")):
        assert cli.exit_code(raises(full)) == (2 if isinstance(full, OSError) else 6)
    assert capsys.readouterr().err.count("ERROR out of memory; use a machine with more, or end other programs (") == 2


def test_a_converter_ends_in_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyError("name"), TypeError(), OverflowError("too large")):
        with pytest.raises(SystemExit) as ended:
            cli.run(raises(error))
        [line] = capsys.readouterr().err.splitlines()
        assert ended.value.code == 1 and f"unexpected error, {type(error).__name__}: " in line
        assert "in program" in traceback_named_in(line)


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (SystemExit(143), 143, ""),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError(), 1, "unexpected pos; nothing"),
    ],
)
def test_an_error_that_a_signal_has_caused_ends_with_the_signals_code(
    asked: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def save() -> None:
        try:
            raise asked
        finally:
            raise RuntimeError("unexpected pos")  # as torch.save does where it cannot end its file

    with pytest.raises(SystemExit) as ended:
        cli.run(save)
    assert ended.value.code == code and said in (err := capsys.readouterr().err) and bool(err) == bool(said)


@pytest.mark.parametrize(
    ("main", "option", "others"),
    [
        (exact_match.main, "--data", ["--model", "m"]),
        (generate.main, "--seed", ["--model", "m", "--prompt", "a", "--prompt", "b"]),
        (inspect_data.main, "--row", []),
    ],
)
def test_an_option_that_is_given_twice_is_refused(
    main: Callable[[list[str]], int], option: str, others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([option, "1", *others, f"{option}=1"]) == 2
    assert f"{option} is given twice; keep one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (inspect_data, "--html a.html --json", "--json has no effect with --html"),
    ],
)  # fmt: skip
def test_no_command_takes_a_word_that_it_does_not_use(
    command: Any, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words.split()) == 2
    assert f"ERROR {said}" in capsys.readouterr().err


def test_where_no_file_can_be_written_the_traceback_itself_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert cli.message_of(KeyError("name")) == "KeyError: 'name'\n"


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        (generate, "_run", ["--model", "m", "--prompt", "p"]),
        (exact_match, "_run", ["--model", "m", "--data", "d"]),
        (inspect_data, "_show", []),
    ],
)
def test_every_command_is_guarded(
    module: Any, name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, name, raises(KeyError("name")))
    assert module.main(arguments) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "unexpected error, KeyError: 'name'; " in line and "Traceback" in traceback_named_in(line)


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_crash_of_the_trainer_is_one_line(
    has_folder: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def exit_process(code: int, together: bool) -> None:
        assert not together
        raise SystemExit(code)

    crashes: list[Any] = []
    (tmp_path / "launcher").mkdir()
    monkeypatch.setenv("TITAN_OUTCOME", str(tmp_path / "launcher/outcome"))
    folder = SimpleNamespace(
        path=tmp_path, step=None, own_log=lambda: tmp_path / "train.log", note_crash=crashes.append, moved=str
    )
    monkeypatch.setattr(process, "RunFolder", lambda *_: folder if has_folder else raises(KeyError("name"))())
    monkeypatch.setattr(train, "open_run", raises(KeyError("name")))
    monkeypatch.setattr(process.distributed, "init_distributed", lambda **_: SimpleNamespace(size=1))
    monkeypatch.setattr(process.distributed, "exit_process", exit_process)
    with pytest.raises(SystemExit) as ended:
        train.main(Config(), SimpleNamespace(reason=""), SimpleNamespace(note=lambda _: None, is_in=lambda _: None))  # type: ignore[arg-type]
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and "unexpected error, KeyError: 'name'; " in line
    assert "Traceback" in traceback_named_in(line)
    assert [crash.code for crash in crashes] == [1] * has_folder
    assert (tmp_path / "train.log").exists() == has_folder
    told = tmp_path / "launcher/outcome"  # where the folder was not taken, nothing else tells the launcher
    assert has_folder or json.loads(told.read_text())["exit_code"] == 1


def test_what_a_launcher_prints_holds_no_control_characters(tmp_path: Path) -> None:
    write_run_state(tmp_path, Outcome(2, "a\x1b[31m.jsonl:1\nnot JSON", state="bad_input", next="again"))
    state = json.loads((tmp_path / "run_state.json").read_text())
    assert (state["exit_code"], state["message"]) == (2, "a\\x1b[31m.jsonl:1\nnot JSON")


def test_the_log_holds_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    log.warning("a file \x1b[2J\x9b\x7f\r\u202e called\tso\nand so")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING a file \\x1b[2J\\x9b\\x7f\\r\\u202e called\tso") and second.endswith(" and so")
    assert printable("żółć 你好 \U0001f600 \xa0") == "żółć 你好 \U0001f600 \xa0"
    assert shown(1 << 99_999) == "a number of thousands of digits" and len(shown("x" * 9999)) < 200


def test_an_options_text_stands_below_it() -> None:
    [(head, text)] = re.findall(r"^(  --training\.steps .*)\n      (\S.*)", help_text("training"), re.MULTILINE)
    assert head.startswith("  --training.steps  int = ") and text.startswith("optimizer steps")


@pytest.mark.parametrize("arguments", ["", *console.COMMANDS])
def test_help_fits_100_columns_and_a_closed_pipe_and_every_command_has_a_version(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for option in ("--help", "--version"):
        if arguments == "train":  # its signals are blocked: in a process of its own
            subprocess.run([sys.executable, "-m", "titan_mi100", "train", option], check=True)
            said = capfd.readouterr().out
        else:
            monkeypatch.setattr(sys, "argv", ["titan-mi100", *arguments.split(), option])
            with suppress(SystemExit):
                console.main()
            said = capfd.readouterr().out
        assert said and max(map(len, said.splitlines())) <= (100 if option == "--help" else 200)
    assert said.startswith(f"titan_mi100 {__version__} in ") and "\nPython 3." in said


@pytest.mark.parametrize(
    "words", ["config.load", "__main__ doctor", pytest.param("__main__ convert inspect-dcp", marks=pytest.mark.full)]
)
def test_help_whose_reader_is_gone_ends_quietly(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", *f"titan_mi100.{words}".split(), "--help"]
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        found = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (found.returncode, found.stderr) == (0, "")


def test_too_little_memory_is_no_damaged_file_and_no_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "read_object", raises(MemoryError()))
    assert cli.exit_code(lambda: load.load_tokenizer(ASSETS / "tokenizer")) == 6
    assert (
        capsys.readouterr().err == "ERROR out of memory; use a machine with more, or end other programs (MemoryError)\n"
    )
