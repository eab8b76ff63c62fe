"""A folder of prepared data is whole or not there, whoever builds, waits, fails or is killed."""

import errno
import fcntl
import multiprocessing
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from titan_mi100.data import cache
from titan_mi100.errors import UserError


def is_whole(folder: Path) -> bool:
    return (folder / "done").exists()


def opened(folder: Path) -> str:
    if not is_whole(folder):
        raise cache.DamagedFolder(f"{folder}: is damaged")
    return folder.name


def make(aside: Path) -> None:
    (aside / "part").write_text("one")
    (aside / "done").write_text("")


def fork(target, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def test_it_is_made_once_with_the_users_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    before = os.umask(0o022)
    try:
        assert cache.open_or_build_folder(folder, opened, make) == ("key", False)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755  # others may use a shared cache
    assert cache.open_or_build_folder(folder, opened, lambda _: pytest.fail("made again")) == ("key", True)


def test_a_failed_attempt_leaves_nothing_and_those_who_waited_fail_alike(tmp_path: Path) -> None:
    folder = tmp_path / "key"

    def fail(aside: Path) -> None:
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        (aside / "part").write_text("half")
        while len(list(tmp_path.glob("here*"))) < 4:
            time.sleep(0.01)
        time.sleep(0.5)  # now they wait for this attempt
        raise UserError("line 7 is bad")

    def attempt(number: int) -> None:
        (tmp_path / f"here{number}").touch()
        try:
            cache.open_or_build_folder(folder, opened, fail)
        except UserError as error:
            (tmp_path / f"said{number}").write_text(str(error))

    processes = [fork(attempt, number) for number in range(4)]
    for process in processes:
        process.join(30)
    assert (tmp_path / "attempts").read_text() == "x"
    assert [(tmp_path / f"said{number}").read_text() for number in range(4)] == ["line 7 is bad"] * 4
    assert not folder.exists() and not list(tmp_path.glob(".*"))
    assert not cache.open_or_build_folder(folder, opened, make)[1]  # a later start tries again


def test_without_locks_all_build_and_one_result_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def slow(aside: Path) -> None:
        (aside / "part").write_text("one")
        time.sleep(0.5)
        make(aside)

    processes = [fork(cache.open_or_build_folder, tmp_path / "key", opened, slow) for _ in range(3)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert is_whole(tmp_path / "key") and not list(tmp_path.glob(".*"))


def test_what_a_killed_build_left_is_removed_but_not_another_nodes(tmp_path: Path) -> None:
    mine, other = (tmp_path / f".key.{host}.1.incomplete" for host in (socket.gethostname(), "elsewhere"))
    mine.mkdir()
    other.mkdir()
    cache.open_or_build_folder(tmp_path / "key", opened, make)
    assert not mine.exists() and other.exists()


def test_several_that_find_damage_make_it_once_and_a_kill_in_between_leaves_it_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "key"

    def damage() -> None:
        folder.mkdir()
        (folder / "part").write_text("damaged")

    def count(aside: Path) -> None:
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        time.sleep(0.1)
        make(aside)

    def killed(aside: Path) -> None:
        (aside / "part").write_text("half")
        os._exit(9)

    damage()
    (tmp_path / ".key.damaged.1").mkdir()  # of a kill just before it was removed
    process = fork(cache.open_or_build_folder, folder, opened, killed)
    process.join(30)
    assert process.exitcode == 9 and not folder.exists()
    damage()
    processes = [fork(cache.open_or_build_folder, folder, opened, count) for _ in range(3)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert (tmp_path / "attempts").read_text() == "x"
    assert (folder / "part").read_text() == "one" and not list(tmp_path.glob(".*"))
