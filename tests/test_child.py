"""Files from strangers take little memory and time, whatever they hold: they are looked into by a limited process."""

import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jinja2
import pytest
from chaos import hostile_pickles as pickles
from conftest import REPO

from titan_mi100.errors import UserError
from titan_mi100.files import child
from titan_mi100.files.child import TOO_MUCH
from titan_mi100.files.stored import open_dcp, open_safetensors, open_torch
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer
from titan_mi100.text.traced import TracingEnvironment

ASSETS = REPO / "tests" / "assets" / "tokenizer"


def doubling_pickle(depth: int = 40) -> bytes:
    """Few opcodes that make a tuple of 2^40 items when it is looked at, and never end where it is hashed."""
    twice = b"".join(pickle.BINPUT + bytes([n]) + pickle.BINGET + bytes([n]) + pickle.TUPLE2 for n in range(depth))
    return b"\x80\x02" + pickle.EMPTY_TUPLE + twice


def torch_zip(payload: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return written.getvalue()


def torch_memo(folder: Path) -> object:
    """torch.load(weights_only=True) keeps every memo entry: 1 kB of opcodes grows without end."""
    (folder / "a.pt").write_bytes(torch_zip(b"\x80\x02" + pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff."))
    return open_torch(folder / "a.pt")


def torch_bytearray(folder: Path) -> object:
    """torch.load(weights_only=True) makes what it asks for."""
    payload = b"\x80\x02cbuiltins\nbytearray\n" + pickle.LONG1 + b"\5\0\0\0\0\1" + pickle.TUPLE1 + pickle.REDUCE + b"."
    (folder / "a.pt").write_bytes(torch_zip(payload))
    return open_torch(folder / "a.pt")


def torch_hash(folder: Path) -> object:
    payload = doubling_pickle() + pickle.NONE
    (folder / "a.pt").write_bytes(torch_zip(payload.replace(b"\x80\x02", b"\x80\x02}", 1) + pickle.SETITEM + b"."))
    return open_torch(folder / "a.pt")


def torch_repeated(folder: Path) -> object:
    """Strings joined by nothing but their number: 60,000 texts of 60 kB, each made anew by a call."""
    text = b"X" + struct.pack("<I", 60_000) + b"a" * 60_000
    call = pickle.BINGET + b"\1" + pickle.BINGET + b"\0" + pickle.TUPLE1 + pickle.REDUCE
    head = text + pickle.BINPUT + b"\0" + pickle.POP + b"c_codecs\nencode\n" + pickle.BINPUT + b"\1" + pickle.POP
    (folder / "a.pt").write_bytes(torch_zip(b"\x80\x02" + head + pickle.EMPTY_LIST + b"(" + call * 60_000 + b"e."))
    return open_torch(folder / "a.pt")


def metadata_opcodes(folder: Path) -> object:
    """An object for every byte."""
    (pickles.genuine(folder) / ".metadata").write_bytes(b"\x80\x02](" + b"}" * (24 << 20) + b"e.")
    return open_dcp(folder / "ck")


def metadata_chunks(folder: Path) -> object:
    """Chunks of which each has to be compared with all before it."""
    with pickles.edited(folder) as metadata:
        entry = pickles.tensor_of(metadata)
        entry.size = pickles.torch.Size((2, 30_000))
        entry.chunks[:] = [
            pickles.ChunkStorageMetadata(pickles.torch.Size((0, n)), pickles.torch.Size((2, 1))) for n in range(30_000)
        ]
        place = pickles.info_of(metadata, "model.a")
        for chunk in entry.chunks:
            metadata.storage_data[pickles.MetadataIndex("model.a", chunk.offsets)] = place
    return open_dcp(folder / "ck")


def deep_header(folder: Path) -> object:
    content = b'{"a": ' + b"[" * (1 << 22)
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    return open_safetensors(folder / "a.safetensors")


def rows_of_lists(folder: Path) -> object:
    """60 MB of JSON of which Python makes 46 times as much."""
    content = b'{"a": [' + b"[]," * (20 << 20) + b"[]]}"
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    return open_safetensors(folder / "a.safetensors")


def template(source: str) -> Callable[[Path], object]:
    def build(folder: Path) -> object:
        (folder / "tokenizer_config.json").write_text((ASSETS / "tokenizer_config.json").read_text())
        (folder / "chat_template.jinja").write_text(source)
        return ChatTemplate.from_folder(folder)

    return build


DOUBLE = "{% macro d(x, n) %}{{ d(x + x, n - 1) if n else x }}{% endmacro %}{{ d('aaaaaaaa', 40) }}"


def many_slow_parts(folder: Path) -> object:
    """A pickle of 200 bytes that takes a second: here the hash of a tuple that is doubled 24 times."""
    whole = pickles.saved(pickles.torch.zeros(3))
    slow = b"\x80\x02})" + b"2\x86" * 24 + b"Ns0" + pickles.zip_pickle(whole)[2:]
    metadata = pickles.Metadata({}, {}, {})
    (folder / "ck").mkdir()
    with (folder / "ck" / "a").open("wb") as file:
        for number in range(30):
            begin, offset = file.tell(), pickles.torch.Size([0])
            file.write(pickles.with_pickle(whole, slow))
            place = pickles._StorageInfo("a", begin, file.tell() - begin)
            metadata.storage_data[pickles.MetadataIndex(f"t{number}", offset)] = place
            metadata.state_dict_metadata[f"t{number}"] = pickles.TensorStorageMetadata(
                pickles.TensorProperties(dtype=pickles.torch.float32),
                pickles.torch.Size([3]),
                [pickles.ChunkStorageMetadata(offset, pickles.torch.Size([3]))],
            )
    (folder / "ck" / ".metadata").write_bytes(pickle.dumps(metadata))
    stored = open_dcp(folder / "ck")
    return [stored.read(name, (0,), (3,)) for name in stored.kinds]


def sparse_template(folder: Path) -> object:
    """A file that is not read must not raise the limits for those that are."""
    shutil.copytree(ASSETS, folder / "tok")
    definition = json.loads((ASSETS / "tokenizer.json").read_text())
    double = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    definition["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
    (folder / "tok" / "tokenizer.json").unlink()
    (folder / "tok" / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tok" / "chat_template.jinja").touch()
    os.truncate(folder / "tok" / "chat_template.jinja", 1 << 40)
    return load_tokenizer(folder / "tok")


def prompted(condition: str) -> Callable[[Path], object]:
    """A template that is harmless when it is tried."""
    source = "{% if " + condition + " %}{{ 'a' * 4000000000 }}{% endif %}"
    return lambda folder: template(source)(folder).render_prompt([{"role": "user", "content": "zebra"}], tools=None)


HUNGRY = {
    "a text of 4 GB before it is compiled": template("{% autoescape 'a' * 4000000000 %}{% endautoescape %}"),
    "a text of 4 GB before an answer": prompted("add_generation_prompt"),
    "a text of 4 GB at a word": prompted("'zebra' in messages[0].content"),
    "a text of 4 MB of a few words": template("{{ 'a' * 4000000 }}"),
    "a tokenizer beside a template of a terabyte": sparse_template,
    "a pickle with a memo of four billion": torch_memo,
    "a bytearray of 4 GB": torch_bytearray,
    "a text of 4 GB": template("{{ 'a' * 4000000000 }}"),
    "a text of 4 GB by ljust": template("{{ 'a'.ljust(4000000000) }}"),
    "a text that a macro doubles": template(DOUBLE),
}
SLOW = {
    "parts that take a second each": many_slow_parts,
    "a key whose hash never ends": torch_hash,
    "loops in loops": template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
}
LARGE = {
    "a call for every 5 bytes": torch_repeated,
    "an object for every byte of .metadata": metadata_opcodes,
    "30,000 chunks": metadata_chunks,
    "a header nested without end": deep_header,
    "60 MB of lists": rows_of_lists,
}


def peak_of_child() -> int:
    process = child._process
    if process is None or process.poll() is not None:
        return 0  # it was ended
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def check(build: Callable[[Path], object], folder: Path, seconds: float) -> None:
    before = time.process_time()
    child.end()
    with pytest.raises(UserError) as caught:
        build(folder)
    assert str(folder) in str(caught.value)
    assert peak_of_child() < 2 << 30
    assert time.process_time() - before < seconds


@pytest.mark.parametrize("name", HUNGRY)
def test_a_small_file_that_wants_much_memory_is_refused(name: str, tmp_path: Path) -> None:
    check(HUNGRY[name], tmp_path, seconds=10)


@pytest.mark.parametrize("name", [*SLOW, *LARGE])
def test_a_small_file_that_takes_long_is_refused(name: str, tmp_path: Path, full: bool, request) -> None:
    if name in LARGE and not full:
        pytest.skip("makes a large file; with --full")
    if name in SLOW:
        request.getfixturevalue("one_second")
    check((SLOW | LARGE)[name], tmp_path, seconds=10)


def test_the_limits_are_a_base_and_a_share_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 99))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.update({kind: pair[0]}))
    for name, value in (("_limited", False), ("_granted", 0), ("_began", 0), ("_held", 0)):
        monkeypatch.setattr(child, name, value)  # what they are comes back afterwards
    child.raise_limits(1)
    assert limits == {}
    monkeypatch.setattr(child, "_memory", lambda field: 7 if field == 5 else 0)
    monkeypatch.setattr(time, "process_time", lambda: 3.5)
    for call, granted in (
        (child.limit, 0),
        (lambda: child.raise_limits(1 << 20), 1),
        (lambda: child.raise_limits(3 << 20), 4),
    ):
        call()
        assert limits == {
            resource.RLIMIT_DATA: 7 + (1 << 30) + (granted << 24), resource.RLIMIT_CPU: 3 + 5 + granted
        }  # fmt: skip
    limits.clear()


def test_the_child_is_started_once_and_again_after_it_was_ended(tmp_path: Path) -> None:
    def ask() -> None:
        with pytest.raises(UserError, match="no such file"):
            open_torch(tmp_path / "none.pt")

    ask()
    first = child._process
    ask()
    assert first is not None and child._process is first
    os.kill(first.pid, signal.SIGTERM)  # sent to all of a job: its parent decides
    ask()
    assert child._process is first
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    ask()
    assert child._process is not first


def test_a_process_that_was_forked_has_a_child_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        open_torch(tmp_path / "none.pt")
    first = child._process
    if (pid := os.fork()) == 0:
        os._exit(0 if child._process is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert child._process is first and first is not None and first.poll() is None


def test_the_child_imports_no_torch(tmp_path: Path) -> None:
    ChatTemplate.from_folder(ASSETS)
    assert child._process is not None
    maps = Path(f"/proc/{child._process.pid}/maps").read_text()
    assert "libtorch" not in maps and "python" in maps


def test_an_answer_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert open_safetensors(tmp_path / "a.safetensors").kinds == {}
    monkeypatch.setattr(child, "_LARGEST_ANSWER", 10)
    with pytest.raises(UserError, match=TOO_MUCH):
        open_safetensors(tmp_path / "a.safetensors")
    assert child._process is None


@pytest.mark.parametrize(
    "source",
    ["{{ 'a' * 4000000 }}", "{{ 'a'|center(4000000) }}", "{% set x = 'a' * 4000000 %}", "{{ f('a'|center(4000000)) }}"],
)
def test_nothing_is_computed_when_a_template_is_compiled(source: str) -> None:
    """Not all of a template runs when it is tried, but all of it is compiled, also where no limits hold."""
    assert len(TracingEnvironment().compile("{% if never %}" + source + "{% endif %}", raw=True)) < 10_000
    assert len(jinja2.Environment().compile("{% if never %}" + source + "{% endif %}", raw=True)) > 4_000_000


def test_a_pools_processes_end_with_their_parent() -> None:
    code = (
        "import os, time\nfrom titan_mi100.files.pool import forked_pool\nwith forked_pool(1, killed='') as pool:\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n    pool.submit(time.sleep, 99)\n    time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = Path("/proc", parent.stdout.readline().strip())
        assert worker.exists()
        parent.kill()
    until = time.monotonic() + 60
    with suppress(OSError):  # it is gone
        while ") Z " not in (worker / "stat").read_text():
            assert time.monotonic() < until, "it outlives its parent"
            time.sleep(0.05)
