"""Checkpoint folders as files: what is sealed is found again, what is damaged is told, what is old goes last."""

import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.resume import TRAINER, find_checkpoint, rename_later_checkpoints
from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.parallel.distributed import World


def seal(folder: Path, step: int, content: str = "data") -> Path:
    aside = sealed.begin(folder, step)
    durable.write_synced(aside / "part", content)
    size_and_hash = (len(content), durable.sha256_of(aside / "part"))
    return sealed.seal(aside, {"part": size_and_hash}, {"step": step})


def test_a_sealed_folder_is_whole_and_its_manifest_says_what_is_in_it(tmp_path: Path) -> None:
    path = seal(tmp_path, 7)
    manifest = sealed.verify(path)
    assert path.name == "step-7" and manifest["step"] == 7
    assert manifest["files"] == {"part": {"bytes": 4, "sha256": durable.sha256_of(path / "part")}}
    assert (path / "manifest.sha256").read_text() == f"{durable.sha256_of(path / 'manifest.json')}  manifest.json\n"
    with pytest.raises(FileExistsError, match="never overwritten"):
        seal(tmp_path, 7)
    assert sealed.verify(path) == manifest


def test_every_single_bit_counts(tmp_path: Path) -> None:
    path = seal(tmp_path, 1)
    for file in path.iterdir():
        content = file.read_bytes()
        for place in range(len(content)):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises(sealed.DamagedError, match=file.name):
                sealed.verify(path)
        file.write_bytes(content)
    sealed.verify(path)


def hash_line(manifest: str) -> str:
    """The content of manifest.sha256, as sha256sum writes it."""
    return f"{hashlib.sha256(manifest.encode()).hexdigest()}  manifest.json\n"


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "sub/part", ".", ""])
def test_a_manifest_that_names_files_elsewhere_is_none(name: str, tmp_path: Path) -> None:
    path = seal(tmp_path, 1)
    text = json.dumps({"format": 1, "step": 1, "files": {name: {"bytes": 4, "sha256": "0"}}})
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(hash_line(text))
    with pytest.raises(sealed.DamagedError):
        sealed.verify(path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1, "step": 1, "files": 3}', "[" * 100_000, "\x00", "1e999"])
def test_a_manifest_of_another_kind_is_none(text: str, tmp_path: Path) -> None:
    path = seal(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(hash_line(text))
    with pytest.raises(sealed.DamagedError, match=r"manifest\.json"):
        sealed.read_manifest(path)


@pytest.mark.parametrize("newer", [{"format": 2, "parts": {}}, {"sharding": "v2"}, {"format": "1.1"}])
def test_a_checkpoint_of_a_newer_version_is_named_and_stays(
    newer: dict[str, Any], world: World, tmp_path: Path
) -> None:
    for step in (1, 2):
        aside = sealed.begin(tmp_path, step)
        durable.write_synced(aside / TRAINER, "{}")
        sealed.seal(aside, {TRAINER: (2, durable.sha256_of(aside / TRAINER))}, {"step": step})
    text = json.dumps({"format": 1, "step": 2, "files": {}} | newer)
    (tmp_path / "step-2" / "manifest.json").write_text(text)
    (tmp_path / "step-2" / "manifest.sha256").write_text(hash_line(text))
    with pytest.raises(UserError, match=rf"step-2/manifest.json: is intact, but .*({'|'.join(newer)}).*load_step N"):
        find_checkpoint(tmp_path, world)
    assert steps(tmp_path) == [1, 2] and not sealed.damaged(tmp_path)
    found = find_checkpoint(tmp_path, world, step=1)
    assert found is not None and found.path.name == "step-1"
    sealed.Retention(tmp_path, 1).remove_old()
    assert steps(tmp_path) == [1, 2]  # it does not replace one that this version can read


STATES = ("whole", "damaged", "newer", "suspect", "suspect, damaged")


def run_with(folder: Path, states: Sequence[str]) -> None:
    """Checkpoints of steps 1, 2 ... in these states."""
    for step, state in enumerate(states, 1):
        aside = sealed.begin(folder, step)
        durable.write_synced(aside / TRAINER, "{}")
        path = sealed.seal(aside, {TRAINER: (2, durable.sha256_of(aside / TRAINER))}, {"step": step})
        if "suspect" in state:
            sealed.mark_suspect(path, "a spike")
        if "damaged" in state:
            (path / TRAINER).write_text("[]")
        if state == "newer":
            (path / "manifest.json").write_text(json.dumps({"format": 2}))
            (path / "manifest.sha256").write_text(hash_line((path / "manifest.json").read_text()))


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of folders: they need not be on the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.mark.usefixtures("unsynced")
def test_every_combination_is_resumed_from_its_newest_sound_checkpoint(
    world: World, tmp_path: Path, full: bool
) -> None:
    for states in itertools.product(STATES, repeat=3 if full else 2):
        folder = tmp_path / "-".join(states)
        folder.mkdir()
        run_with(folder, states)
        tried = [(step, state) for step, state in enumerate(states, 1) if "suspect" not in state]
        set_aside = []
        while len(tried) > 1 and tried[-1][1] == "damaged":
            set_aside.append(tried.pop()[0])
        if tried and tried[-1][1] == "whole":
            found = find_checkpoint(folder, world)
            assert found is not None and sealed.step_of(found.path) == tried[-1][0], states
            rename_later_checkpoints(found.path)
            assert [*map(sealed.step_of, sealed.all_checkpoints(folder))] == [*range(1, tried[-1][0] + 1)], states
            later = {*range(tried[-1][0] + 1, len(states) + 1)} - {*set_aside}
            assert {int(path.name.split("-")[2]) for path in folder.glob("later-*")} == later, states
        else:
            why = {"newer": "is intact, but", "damaged": "damaged checkpoint"}
            with pytest.raises(UserError, match=why[tried[-1][1]] if tried else "has only suspect checkpoints"):
                find_checkpoint(folder, world)
            kept = {*range(1, len(states) + 1)} - {*set_aside}
            assert {*map(sealed.step_of, sealed.all_checkpoints(folder))} == kept, states
        assert [int(path.name.split("-")[2]) for path in sealed.damaged(folder)] == sorted(set_aside), states


@pytest.mark.usefixtures("unsynced")
def test_of_every_combination_the_newest_sound_ones_are_kept(tmp_path: Path, full: bool) -> None:
    """And what is newer than these, what is suspect, and the one before it."""
    for states in itertools.product(STATES, repeat=4 if full else 3):
        folder = tmp_path / "-".join(states)
        folder.mkdir()
        run_with(folder, states)
        numbered = [*enumerate(states, 1)]
        sound = [step for step, state in numbered if state == "whole"]
        others = [step for step, state in numbered if "suspect" not in state]
        wanted = {step for step in others if step >= (sound or [0])[-1]}
        for step, state in numbered:
            if "suspect" in state:
                wanted |= {step, *[other for other in others if other < step][-1:]}
        sealed.Retention(folder, 1).remove_old()
        assert {*map(sealed.step_of, sealed.all_checkpoints(folder))} == wanted, states


def test_a_step_under_another_name_and_linked_files_are_refused(tmp_path: Path) -> None:
    path = seal(tmp_path, 1)
    other = path.rename(tmp_path / "step-2")
    with pytest.raises(sealed.DamagedError, match="step-2"):
        sealed.verify(other)
    path = other.rename(tmp_path / "step-1")
    (path / "part").rename(tmp_path / "elsewhere")
    (path / "part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sealed.DamagedError, match="part"):
        sealed.verify(path)


def test_shares_together_read_every_file(tmp_path: Path) -> None:
    aside = sealed.begin(tmp_path, 1)
    written = {}
    for number in range(5):
        durable.write_synced(aside / str(number), "x" * number)
        written[str(number)] = (number, durable.sha256_of(aside / str(number)))
    path = sealed.seal(aside, written, {"step": 1})
    for name in written:
        content = (path / name).read_bytes()
        (path / name).write_bytes(b"y" * len(content) + b"y")
        found = []
        for share in range(3):
            try:
                sealed.verify(path, share, 3)
            except sealed.DamagedError:
                found.append(share)
        assert len(found) == 1, name
        (path / name).write_bytes(content)


def steps(folder: Path) -> list[int]:
    return [sealed.step_of(path) for path in sealed.list_checkpoints(folder)]


def test_retention_does_not_count_what_is_damaged_and_keeps_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        path = seal(tmp_path, step)
        if step in (3, 4):
            (path / "part").write_text("atad")
    sealed.Retention(tmp_path, 2).remove_old()
    assert steps(tmp_path) == [2, 3, 4, 5]  # 5 and 2 are whole; 3 and 4 lie between
    retention = sealed.Retention(tmp_path, 2)
    retention.note(seal(tmp_path, 6))
    retention.remove_old(keep_also=tmp_path / "step-2")
    assert steps(tmp_path) == [2, 5, 6]
    sealed.Retention(tmp_path, 0).remove_old()
    assert steps(tmp_path) == [2, 5, 6]


def test_a_removed_checkpoint_is_not_the_best_any_more(tmp_path: Path) -> None:
    sealed.mark_best(seal(tmp_path, 1))
    sealed.remove(seal(tmp_path, 2))
    assert (tmp_path / "best").resolve() == tmp_path / "step-1"
    sealed.remove(tmp_path / "step-1")
    assert not (tmp_path / "best").is_symlink()


def test_a_verified_checkpoint_that_changes_afterwards_is_read_again(tmp_path: Path) -> None:
    retention = sealed.Retention(tmp_path, 1)
    for step in (1, 2):
        retention.note(seal(tmp_path, step))
    (tmp_path / "step-2" / "part").write_text("atad")
    retention.remove_old()
    assert steps(tmp_path) == [1, 2]


def test_what_killed_saves_and_removals_leave_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    seal(tmp_path, 1)
    sealed.set_aside(seal(tmp_path, 2), "damaged")
    sealed.begin(tmp_path, 3)
    (tmp_path / ".step-4.0a.removed").mkdir()
    os.mkfifo(tmp_path / ".step-5.0a.removed")
    (tmp_path / ".probe-0").touch()
    sealed.clear(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[:2] == [".probe-0", left[1]] and left[1].startswith("damaged-step-2-") and left[2:] == ["step-1"]


def test_a_folder_is_locked_against_another_process_until_its_holder_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    context = multiprocessing.get_context("fork")
    taken, may_end = context.Event(), context.Event()

    def hold() -> None:
        lock = durable.FolderLock(tmp_path, 0)
        taken.set()
        may_end.wait(30)
        assert lock

    holder = context.Process(target=hold)
    holder.start()
    assert taken.wait(30)
    with pytest.raises(UserError, match=rf"used by another run \(process {holder.pid} on "):
        durable.FolderLock(tmp_path, 0.3)
    assert caplog.text.count("waiting for up to 0 s") == 1
    holder.kill()
    holder.join()
    assert durable.FolderLock(tmp_path, 5)


def test_what_a_killed_writer_left_is_removed_and_what_one_at_work_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", synced.append)
    final = tmp_path / "out"
    left = tmp_path / f".out.{socket.gethostname()}.0123456789ab.incomplete"
    left.mkdir()
    with durable.atomic_output_folder(final) as aside:
        assert not left.exists()
        (aside / "a").write_text("a")
        with durable.atomic_output_folder(final):
            assert aside.exists()
        final.rename(tmp_path / "first")
    assert (final / "a").read_text() == "a" and synced[-2:] == [aside, tmp_path]  # the folder before its name
    with durable.atomic_output_folder(tmp_path / "**[x"):  # no pattern
        pass
    (tmp_path / "**[x").rmdir()
    with pytest.raises(OSError, match="the disk"), durable.atomic_output_folder(tmp_path / "third"):
        raise OSError("the disk is full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out"]
    for folder in (final, tmp_path / "first"):  # no lock is left on what has been written
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_a_lock_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"\.lock: cannot be written to \(Is a directory\)"):
        durable.FolderLock(tmp_path)


def test_nothing_is_written_through_a_link_in_somebody_elses_run_folder(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("precious")
    (tmp_path / "roomy").mkdir()
    (run := tmp_path / "run").mkdir()
    (run / "checkpoint").symlink_to("../roomy")
    for name in (".lock", "train.log", "ledger.csv", "anything"):
        (run / name).symlink_to(victim)
        with pytest.raises(UserError, match=rf"run/{name}: is a link or not a regular file, and would be written to"):
            durable.FolderLock(run)
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(UserError, match=rf"run/{name}: is a link or not a regular file"):
            durable.FolderLock(run)
        (run / name).unlink()
    assert victim.read_text() == "precious" and durable.FolderLock(run)


def test_a_mark_that_a_kill_cut_off_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f".{sealed.BEST}.tmp").symlink_to("step-1")
    sealed.mark_best(seal(tmp_path, 2))
    assert (tmp_path / sealed.BEST).readlink() == Path("step-2")


def test_files_and_links_of_a_checkpoints_name_are_none(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("")
    seal(tmp_path, 2)
    (tmp_path / "step-3").symlink_to("step-2")
    assert steps(tmp_path) == [2]


def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = seal(tmp_path, 1)

    def refuse(_: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(sealed, "sha256_of", refuse)
    with pytest.raises(OSError, match="Stale"):
        sealed.verify(path)


def test_the_name_of_the_best_one_goes_with_it(tmp_path: Path) -> None:
    seal(tmp_path, 1)
    best = seal(tmp_path, 2)
    sealed.mark_best(tmp_path / "step-1")
    sealed.mark_best(best)
    assert (tmp_path / "best").resolve() == best
    sealed.set_aside(tmp_path / "step-1", "damaged")
    assert (tmp_path / "best").resolve() == best
    sealed.set_aside(best, "damaged")
    assert not (tmp_path / "best").is_symlink()


def test_without_locks_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    durable.FolderLock(tmp_path, 0)
    assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("call", ["open", "fsync", "rename", "unlink"])
def test_a_folder_that_cannot_do_what_a_checkpoint_needs_is_told(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    durable.probe(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UserError, match="Read-only file system"):
        durable.probe(tmp_path)


def test_a_folders_sync_that_the_file_system_lacks_is_no_error_but_a_failing_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int):
        def call(_: int) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    durable.sync(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        durable.sync(tmp_path)
