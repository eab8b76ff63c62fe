"""Who writes files: files/durable.py alone, and the places of the table, each for its reason.

`durable.write_output` is for every file that an option of a command names: new or of the command's own kind, atomic,
never through a link as the last part of its path.
"""

import ast
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_mi100.errors import UserError
from titan_mi100.files.durable import check_output, replace, write_output

PACKAGE = Path(__file__).parents[1] / "titan_mi100"
_WRITES = {
    "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "copyfile", "copy2", "copytree", "mkstemp",
    "save_file", "savez", "savetxt", "tofile", "FileHandler", "SummaryWriter", "export_chrome_trace", "symlink",
    "truncate", "np.save", "torch.save", "shutil.move", "os.link",
}  # fmt: skip
_NEW = "in a folder that is new, by durable.atomic_output_folder"
_RUN = "in the run folder, which is locked and was looked through for links"
ELSEWHERE = {  # file -> why it writes by itself
    "checkpoint/hashed_files.py": "DCP's own writer, in a folder that is renamed when it is sealed",
    "checkpoint/sealed.py": "the link `best` in the run folder",
    "cli.py": "the traceback of a crash: a temporary file, or the run's log",
    "data/build.py": _NEW,
    "data/cache.py": "the lock beside a prepared folder",
    "data/ledger.py": _NEW,
    "data/corpora/shards.py": "large files of a corpus: under a random name, locked, renamed when they are complete",
    "files/child.py": "standard output of the child becomes /dev/null",
    "files/durable.py": "this is the place",
    "files/user_code.py": "standard output of its process, which are the scores",
    "files/hub.py": "the lock of a download, as the library of the hub takes it",
    "generation/batch.py": "the end that a kill left incomplete is cut off, of rows that are our own",
    "log.py": _RUN,
    "workshop/measure/communication.py": "in a temporary folder",
    "run/faults.py": _RUN,
    "run/metrics.py": _RUN,
    "run/profiling.py": _RUN,
    "run/sinks.py": _RUN,
    "streams.py": "standard streams that are closed become /dev/null",
    "text/assets.py": "in a temporary folder",
    "workshop/measure/children.py": "in a temporary folder",
    "workshop/sweep/command.py": "in a temporary folder",
    "watch/heartbeat.py": "in node-local memory",
    "watch/outcome.py": _RUN,
    "watch/watchdog.py": _RUN,
    "weights/convert.py": _NEW,
    "weights/dcp.py": _NEW,
    "weights/hf.py": _NEW,
    "weights/peft.py": _NEW,
}


def writers(text: str) -> Iterator[str]:
    """Each call that can make or change a file."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        module = getattr(getattr(function, "value", None), "id", "")
        if {name, f"{module}.{name}"} & _WRITES or (name in ("open", "fdopen") and _opens_to_write(node)):
            yield name


def _opens_to_write(call: ast.Call) -> bool:
    words = [word.value for word in [*call.args, *(k.value for k in call.keywords)] if isinstance(word, ast.Constant)]
    modes = [word for word in words if isinstance(word, str) and 0 < len(word) <= 3 and {*word} <= {*"wax+rbt"}]
    names = {each.id for each in call.args if isinstance(each, ast.Name)}
    flags = {each.attr for each in ast.walk(call) if isinstance(each, ast.Attribute)}
    return any({*mode} & {*"wax+"} for mode in modes) or bool(
        flags & {"O_WRONLY", "O_RDWR", "O_CREAT"} or "mode" in names
    )


def test_files_are_written_in_one_place() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if [*writers(path.read_text())]}
    assert found == {*ELSEWHERE}, "write with files/durable.py, or say here why not"
    for text in ("path.write_text('')", "open(p, 'wb')", "p.open('a')", "os.open(p, os.O_WRONLY)", "np.save(p, x)"):
        assert [*writers(text)], text
    assert not [*writers("open(p)\np.open('rb')\nos.open(p, os.O_RDONLY)\n'a'.replace('b', 'c')")]


def test_an_output_is_new_or_our_own_and_never_through_a_link(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def is_ours(start: bytes) -> bool:
        return start.startswith(b"ours")

    write_output(ours, ["ours", " 1"], "--out", is_ours)
    write_output(ours, ["ours", " 2"], "--out", is_ours)
    assert ours.read_text() == "ours 2" and os.listdir(tmp_path) == ["ours"]
    theirs.write_text("data")
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    for name, target in (
        ("to ours", ours),
        ("to theirs", theirs),
        ("to nothing", tmp_path / "none"),
        ("to itself", tmp_path / "to itself"),
    ):
        (tmp_path / name).symlink_to(target)
    for name, words in (
        ("theirs", "exists already"), ("folder", "is no regular file"), ("to ours", "is a link"),
        ("to theirs", "is a link"), ("to nothing", "is a link"), ("to itself", "is a link"), ("linked", "is a link"),
        ("ours/below", "Not a directory"), ("none/below", "No such file"), ("n" * 300, "File name too long"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            write_output(tmp_path / name, ["ours 3"], "--out", is_ours)
    assert (ours.read_text(), theirs.read_text()) == ("ours 2", "data")
    write_output(tmp_path / "linked" / "new", ["x"], "--out")
    assert (tmp_path / "folder" / "new").read_text() == "x"
    with pytest.raises(UserError, match="exists already, and is not overwritten; name another file with --out"):
        check_output(ours, "--out")


def test_an_output_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "half"
        raise OSError(28, "No space left on device")

    (tmp_path / "ours").write_text("ours")
    with pytest.raises(UserError, match="cannot be written \\(No space left on device\\)"):
        write_output(tmp_path / "ours", broken(), "--out", lambda start: True)

    def other_was_first() -> Iterator[str]:
        (tmp_path / "new").write_text("theirs")
        yield "ours"

    with pytest.raises(UserError, match="exists already"):
        write_output(tmp_path / "new", other_was_first(), "--out")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"ours": "ours", "new": "theirs"}
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    replace(tmp_path / "link", "of a run")  # a file of our own folders: the link goes, its target stays
    assert (tmp_path / "ours").read_text() == "ours" and not (tmp_path / "link").is_symlink()


def test_an_output_may_be_a_pipe_or_a_device(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)  # as /dev/stdout is one
    for path in (pipe, tmp_path / "link"):
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
        reader.start()
        write_output(path, ["a", "b"], "--out")
        reader.join()
    assert read == ["ab", "ab"]
    write_output(Path(os.devnull), ["x"], "--out")
