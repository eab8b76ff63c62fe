"""Warnings and errors carry their level in every line that is printed or logged; information stays as it is."""

import io
import logging
import re
import sys
import time
from pathlib import Path

import pytest

from titan_mi100 import cli
from titan_mi100.config.load import config_from_command_line
from titan_mi100.errors import UserError
from titan_mi100.log import ByteProgress, log, log_errors_to_file, log_to_file, setup_logging


def bad() -> None:
    raise UserError("file:1: wrong\nfile:2: wrong")


def test_a_ranks_errors_go_to_a_file_that_is_made_for_the_first_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(17)
    log_errors_to_file(tmp_path / "logs" / "rank-00017.log")
    log.warning("every rank comes to it")
    assert list(tmp_path.iterdir()) == []
    log.error("one\ntwo")
    lines = (tmp_path / "logs" / "rank-00017.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["ERROR one", "ERROR two"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("place", ["file/rank-00017.log", "logs/full.log"])
def test_a_ranks_errors_are_printed_where_its_file_cannot_be_written(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # its folder cannot be made, as on a disk that has become read-only
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "full.log").symlink_to("/dev/full")
    setup_logging(17)
    log_errors_to_file(tmp_path / place)
    log.error("the cause")  # without a traceback of logging's own
    assert capsys.readouterr().err.rstrip().endswith("ERROR the cause")


@pytest.mark.parametrize(("rank", "prefix"), [(0, ""), (1, "rank 1 ")])
def test_the_log(rank: int, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank)
    log_to_file(tmp_path / "train.log")
    log.info("plain")
    log.warning("one\ntwo")
    log.error("three\n\nfour")
    printed = capsys.readouterr()
    shown = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in (printed.out + printed.err).splitlines()]
    errors = [f"{prefix}ERROR {line}" for line in ("three", "", "four")]
    assert shown == (errors if rank else ["plain", "WARNING one", "WARNING two", *errors])
    kept = (tmp_path / "train.log").read_text().splitlines()
    levels = ["INFO plain"] * (not rank) + ["WARNING one", "WARNING two"] * (not rank)
    assert [re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+ ", "", line) for line in kept] == [
        *levels, "ERROR three", "ERROR ", "ERROR four"]  # fmt: skip
    assert logging.getLogger("titan_mi100") is log


def test_a_message_that_UTF8_cannot_hold_or_of_megabytes_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(0)
    log_to_file(tmp_path / "train.log")
    log.error("a tensor named \ud800")
    log.error(str(UserError(f"a: {'x' * 10**7}; remove it")))
    kept = (tmp_path / "train.log").read_text()
    assert "a tensor named \\ud800" in kept and "Traceback" not in capsys.readouterr().err
    assert len(kept) < 30_000 and kept.endswith("x; remove it\n")


def test_what_commands_print_themselves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.exit_code(bad) == 2
    assert capsys.readouterr().err == "ERROR file:1: wrong\nERROR file:2: wrong\n"
    with pytest.raises(SystemExit):
        cli.run(bad)
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["ERROR file:1: wrong", "ERROR file:2: wrong"]
    monkeypatch.setattr(sys, "argv", ["train", "--no.such", "1", "--nor.this", "2"])
    with pytest.raises(SystemExit):
        config_from_command_line()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and all(line.startswith("ERROR ") for line in lines)


def test_progress_that_is_no_terminals_is_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((100.0, 105.0, 120.0, 125.0, 130.5, 140.0, 150.0, 150.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO), ByteProgress("reading", 1000) as progress:
        for size in (100, 200, 100, 100, 300, 200):
            progress.advance(size)
    assert caplog.messages == [
        "reading: 30%, 47 s left", "reading: 50%, 30 s left", "reading: 100%, 0 s left"
    ]  # fmt: skip


class Gone(io.StringIO):
    """A terminal that is gone."""

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_log_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(0)
    (tmp_path / "full.log").symlink_to("/dev/full")
    log_to_file(tmp_path / "full.log")
    log.info("to a full disk")  # logging itself would print a traceback
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stdout", Gone())
    log.info("into the void")
