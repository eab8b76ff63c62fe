"""Records of files: by content and not by name, numbered right, streamed in bounded memory, with progress."""

import glob
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_mi100.data import files, json_array
from titan_mi100.data.files import Record, RecordReader, expand_patterns, read_records
from titan_mi100.data.formats import parse
from titan_mi100.data.strict_json import UNREAD, BadRecord, expect
from titan_mi100.errors import UserError
from titan_mi100.files import child, patterns
from titan_mi100.files.patterns import matching_files, nearby

ROWS = [
    {"question": f"{n} größe \U0001f600", "answer": '"\\[{' * (n % 7), "more": [n, {"x": None}]} for n in range(300)
]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def pretty(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=2, ensure_ascii=False).encode()


RECORDS = [Record(number, line, "") for number, line in enumerate(LINES, 1)]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_is_a_record_with_its_number(end: bytes, tmp_path: Path) -> None:
    assert list(read_records(write(tmp_path / "rows.whatever", b"\n".join(LINES) + end))) == RECORDS


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = '{"a": "\u2028 \u2029 \u0085 \x0b \x0c \x1c"}'.encode()
    assert [record.raw for record in read_records(write(tmp_path / "a", text + b"\n" + text))] == [text, text]


@pytest.mark.parametrize("members", [1, 2, 50])
@pytest.mark.parametrize("chunk", [1, 7, 1000, 2**20])
def test_gzip_is_read_with_all_its_members_and_padding(
    members: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", chunk)
    data = b"\n".join(LINES)
    pieces = [data[len(data) * i // members : len(data) * (i + 1) // members] for i in range(members)]
    path = write(tmp_path / "rows.jsonl", b"".join(gzip.compress(piece) for piece in pieces) + bytes(1000))
    assert list(read_records(path)) == RECORDS


def test_gzip_that_unpacks_to_far_more_than_it_is_comes_out_whole(tmp_path: Path) -> None:
    line = b'{"a": "%s"}' % (b"b" * 500_000)
    path = write(tmp_path / "rows.gz", gzip.compress(line + b"\n" + line))
    assert [record.raw == line for record in read_records(path)] == [True, True]


@pytest.mark.parametrize("members", [1, 4])
def test_gzip_that_unpacks_without_end_is_refused(members: int, tmp_path: Path) -> None:
    content = gzip.compress(b"{}\n" * ((4 << 20) // members)) * members
    assert len(content) < 1 << 17
    found = read_records(write(tmp_path / "rows.gz", content))
    with pytest.raises(UserError, match=r"rows.gz: the gzip data .* \(over 100 times its size; if that is right"):
        assert all(record.number < 1 << 21 for record in found)


def test_rows_before_the_damage_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    data = gzip.compress(b"\n".join(LINES) + b"\n")
    read: list[Record] = []
    with pytest.raises(UserError, match=r"rows.gz: the gzip data is damaged or truncated after line 300 \("):
        read.extend(read_records(write(tmp_path / "rows.gz", data[:-8])))
    assert [record.raw for record in read] == LINES
    read.clear()
    with pytest.raises(UserError, match=r"truncated after line \d+ \(Compr.*\); copy or write the file again"):
        read.extend(read_records(write(tmp_path / "rows.gz", data[: len(data) // 2])))
    assert 0 < len(read) < 300 and [record.raw for record in read] == LINES[: len(read)]  # no half line


@pytest.mark.parametrize("packed", [False, True])
def test_an_array_gives_its_elements_with_the_line_where_each_begins(packed: bool, tmp_path: Path) -> None:
    rows = ROWS[:30]
    tight = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    for text in (pretty(rows), tight, b" \n\t" + pretty(rows) + b"\n \n", pretty(rows).replace(b"\n", b"\r\n")):
        found = list(read_records(write(tmp_path / "rows", gzip.compress(text) if packed else text)))
        assert [parse(record.raw) for record in found] == rows
        assert not any(record.problem for record in found)
        lines = text.split(b"\n")
        for record in found:
            assert record.raw.split(b"\n")[0].rstrip() in lines[record.number - 1]
        if text is not tight:
            firsts = [number for number, line in enumerate(lines, 1) if line.strip(b"\r,") == b"  {"]
            assert [record.number for record in found] == firsts


def test_elements_of_an_array_may_be_of_any_type(tmp_path: Path) -> None:
    elements = rb'-1.5e+30 true false null "\ud83d\ude00\\" [-Infinity] [1e5,-0.5,true] {} 12'.split()
    path = write(tmp_path / "rows", b"[" + b" ,".join(elements) + b"\n]")
    assert list(read_records(path)) == [Record(1, element, "", number) for number, element in enumerate(elements, 1)]


def test_a_mistake_in_an_array_ends_it_and_so_does_too_large_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.json", b'[{"a": 1},\n{"a": 1,},\n{"a": 1}]')
    first, (number, raw, problem, *_) = read_records(path)
    assert first == Record(1, b'{"a": 1}', "", 1)
    assert (number, raw) == (2, b"") and problem.startswith("broken JSON array: ")
    monkeypatch.setattr(json_array, "LARGEST", 20)
    [(number, raw, problem, *_)] = read_records(path)
    assert (number, raw) == (1, b"") and problem.startswith("broken JSON array: over 20 bytes; the rest of the file")


def read_and_measured(path: str) -> tuple[list[Record], int]:
    """The records, and how many bytes it took at most."""
    tracemalloc.start()
    found = list(read_records(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found, peak


def test_a_line_over_the_limit_is_passed_over_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    monkeypatch.setattr(files, "CHUNK", 4096)
    monkeypatch.setattr(files, "HEAD", 4096)
    path = tmp_path / "rows.jsonl"
    fits = b'{"a": "%s"}' % (b"b" * 991)
    assert len(fits) == 1000
    with path.open("wb") as file:
        file.write(fits + b"\n")
        for _ in range(40):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + fits + b"\n" + fits + b" \n" + fits)
    records, peak = read_and_measured(str(path))
    found = [(record.number, record.raw == fits, record.problem) for record in records]
    too_long = "row too long: over 1,000 bytes; cut its text into several rows, or is a line end missing?"
    good = [(number, True, "") for number in (1, 3, 5)]
    assert found == [good[0], (2, False, too_long), good[1], (4, False, too_long), good[2]]
    assert peak < 200_000


def test_an_array_element_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    rows = b'[{"a": 1},\n{"a": "%s"},\n{"a": 2}]'
    found = list(read_records(write(tmp_path / "rows", rows % (b"b" * 1200))))
    assert [(r.number, r.raw) for r in found] == [(1, b'{"a": 1}'), (2, b""), (3, b'{"a": 2}')]
    assert found[1].problem.startswith("row too long: over 1,000 bytes")


def test_the_first_lines_may_be_long_or_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HEAD", 100)
    long = json.dumps({"a": "b" * 500}).encode()
    for first in (long, b"x\n" + long, b'{"a": [', b'{"a": "b"', b"\n\n" + long, b"\xef\xbb\xbf" + long):
        found = list(read_records(write(tmp_path / "rows", first + b"\n" + b'{"c": 1}\n' * 9)))
        assert [record.raw for record in found[-9:]] == [b'{"c": 1}'] * 9
        assert found[-1].number == 10 + first.count(b"\n") and len(found) == 10 + len(first.strip().split(b"\n")) - 1


def parquet(path: Path, row_group_size: int = 100, **columns: Any) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return str(path)


def test_parquet_rows_come_as_json(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": f"ü{n}"}, {"role": "assistant", "content": None}] for n in range(700)]
    scores = [n / 7 if n % 2 else None for n in range(700)]
    path = parquet(tmp_path / "rows.json", messages=messages, score=scores, ids=[[n, n + 1] for n in range(700)])
    found = list(read_records(path))
    assert [record.number for record in found] == list(range(1, 701))
    rows = [parse(record.raw) for record in found]
    for message in (message for row in messages for message in row):
        if message["content"] is None:  # parquet cannot tell it from a key that was not there
            del message["content"]
    assert [row["messages"] for row in rows] == messages
    assert [row.get("score") for row in rows] == scores
    assert rows[3]["ids"] == [3, 4]


def test_parquet_of_every_type_is_read_without_what_json_cannot_hold(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    text = pyarrow.array(["a", "b"])
    columns = {
        "large": text.cast(pyarrow.large_string()),
        "view": text.cast(pyarrow.string_view()),
        "dictionary": text.dictionary_encode(),
        "map": pyarrow.array([[("k", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "null": pyarrow.nulls(2),
        "small": pyarrow.array([1, 2], pyarrow.uint8()),
        "flag": [True, None],
        "binary": [b"\xff", b"a"],
        "when": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
        "image": [{"bytes": b"\xff", "path": "a"}] * 2,
    }
    rows = [parse(record.raw) for record in read_records(parquet(tmp_path / "rows", **columns))]
    unread = {"binary": "binary", "when": "timestamp[ns]", "image": "struct<bytes: binary, path: string>"}
    read = {"large": "a", "view": "a", "dictionary": "a", "map": [["k", 1]], "small": 1}
    read |= {name: {UNREAD: kind} for name, kind in unread.items()}  # so that such keys are counted or refused
    assert rows == [
        {**read, "flag": True},
        {**read, "large": "b", "view": "b", "dictionary": "b", "map": [], "small": 2},
    ]
    with pytest.raises(BadRecord, match=r"must be a list, is parquet's timestamp\[ns\], which no JSON value is"):
        expect(rows[0]["when"], list, "messages must be a list")
    what = r"rows: is parquet without a column of text, numbers or lists of them \(bin is binary\); write"
    with pytest.raises(UserError, match=what):
        list(read_records(parquet(tmp_path / "rows", bin=[b"a"])))
    with pytest.raises(UserError, match="has no rows"):
        list(read_records(parquet(tmp_path / "rows", text=pyarrow.array([], pyarrow.string()))))
    table = pyarrow.Table.from_arrays([text, text], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "rows")
    with pytest.raises(UserError, match="two columns of one name"):
        list(read_records(str(tmp_path / "rows")))


def test_bad_values_in_parquet_are_refused_by_their_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    offsets = pyarrow.py_buffer(b"".join(n.to_bytes(4, "little") for n in range(6)))
    text = pyarrow.Array.from_buffers(pyarrow.string(), 5, [None, offsets, pyarrow.py_buffer(b"ab\xffcd")])
    with pytest.raises(UserError, match=r"is parquet that cannot be read: 'utf-8' codec .*; write it again"):
        list(read_records(parquet(tmp_path / "rows", text=text)))
    long = "\U0001f600" * (5 << 20)  # 20 MiB as UTF-8, 60 MiB as the ASCII that the child process answers
    found = list(read_records(parquet(tmp_path / "rows", text=["a", long, "b"])))
    assert [record.raw for record in found] == [b'{"text": "a"}', b"", b'{"text": "b"}']
    assert found[1].problem.startswith("row too long: over 16,777,216 bytes")


def test_a_cut_off_parquet_file_and_missing_pyarrow_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "rows.parquet", text=[str(n) for n in range(1000)])
    data = Path(path).read_bytes()
    for size in (5, 100, len(data) // 2, len(data) - 1):
        Path(path).write_bytes(data[:size])
        with pytest.raises(UserError, match=r"is parquet that cannot be read: .*; write it again"):
            list(read_records(path))
    Path(path).write_bytes(data)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"which needs pyarrow: pip install pyarrow"):
        files.unpack_parquet(path, 0)


@pytest.mark.full
def test_small_parquet_files_that_unpack_to_much_are_refused(tmp_path: Path) -> None:
    """What is too large for the memory of the child process, or in sum."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def repeated(text: str, times: int) -> Any:
        indices = pyarrow.array([0]).take(pyarrow.array([0] * times))
        return pyarrow.DictionaryArray.from_arrays(indices, [text])

    for told, column in (
        ("need far more memory", repeated("x" * (20 << 20), 2000)),
        ("over 100 times its size", repeated("x" * 10_000, 50_000)),
        ("need far more memory", pyarrow.ListArray.from_arrays([0, 50_000_000], np.zeros(50_000_000, np.int8))),
    ):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "rows", compression="zstd")
        assert (tmp_path / "rows").stat().st_size < 2_000_000, told
        with pytest.raises(UserError, match=told):
            raise UserError(next(record.problem for record in read_records(str(tmp_path / "rows")) if record.problem))


@pytest.mark.full
def test_long_rows_of_parquet_are_read_by_one_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one page, as pyarrow writes them: 320 MB are in use in the child process until the last row has been read."""
    characters = np.random.default_rng(0).integers(0xC0, 0x17F, (256, 150_000)).astype("<u4")
    texts = [row.tobytes().decode("utf-32-le") for row in characters]
    path = parquet(tmp_path / "rows", text=texts, row_group_size=256)
    child.end()
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **how: started.append(popen(*given, **how)) or started[-1])
    for text, record in zip(texts, read_records(path), strict=True):
        assert json.loads(record.raw) == {"text": text}
        assert len(started) == 1 and started[0].poll() is None


def test_a_good_parquet_file_of_any_name_is_read_after_a_damaged_one_in_the_same_child_process(tmp_path: Path) -> None:
    texts = [str(n) * 5000 for n in range(700)]
    good = parquet(tmp_path / "good", text=texts, ids=[[n, n + 1] for n in range(700)])
    os.rename(good, odd := os.fsdecode(os.fsencode(good) + b"\xff"))
    (tmp_path / "bad").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    child.end()
    with pytest.raises(UserError, match="is parquet that cannot be read"):
        list(read_records(str(tmp_path / "bad")))
    assert [parse(record.raw)["text"] for record in read_records(odd)] == texts


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs /proc")
def test_files_of_the_kernel_are_refused_unread() -> None:
    for path in ("/proc/kmsg", "/proc/self/environ"):
        with pytest.raises(UserError, match="is not a regular file"):
            list(read_records(path))


def test_rows_of_parquet_are_the_same_from_a_child_process_that_had_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "rows", text=[str(n) * 5000 for n in range(300)])
    whole = [record.raw for record in read_records(path)]
    asked = files.call_in_child

    def forgetful(*question: Any) -> Any:
        child.end()
        return asked(*question)

    monkeypatch.setattr(files, "call_in_child", forgetful)
    assert [record.raw for record in read_records(path)] == whole
    assert [json.loads(raw) for raw in whole] == [{"text": str(n) * 5000} for n in range(300)]


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet"])
def test_progress_counts_up_to_the_bytes_on_disk(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 1000)
    monkeypatch.setattr(files, "HEAD", 1000)
    path = tmp_path / "rows"
    if kind == "parquet":
        parquet(path, text=[str(row) for row in ROWS])
    else:
        text = b"\n".join(b'{"a": "%s"}' % os.urandom(2000).hex().encode() for _ in range(300))
        path.write_bytes({"jsonl": text, "gz": gzip.compress(text)}[kind])
    reader = RecordReader(str(path))
    assert reader.consumed == 0
    for _ in range(2):  # a reader can be used again
        seen = [reader.consumed for _ in reader]
        assert len(seen) == 300 and seen == sorted(seen)
        assert len(set(seen)) > 3 and seen[0] < path.stat().st_size // 2
        assert seen[-1] == path.stat().st_size == reader.consumed
    records = iter(reader)
    next(records)
    records.close()
    assert reader.consumed == reader.size  # given up: nothing is left to wait for


def test_globs_stand_for_their_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d/e/f.jsonl", "d/a.jsonl", "x[1].jsonl", "x1.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")
    Path("folder.jsonl").mkdir()
    assert expand_patterns(["c.txt", "[ab].jsonl"]) == [["c.txt"], ["a.jsonl", "b.jsonl"]]
    assert expand_patterns(["d/**/*.jsonl"]) == [["d/a.jsonl", "d/e/f.jsonl"]]
    assert expand_patterns(["**"]) == [
        ["a.jsonl", "b.jsonl", "c.txt", "d/a.jsonl", "d/e/f.jsonl", "x1.jsonl", "x[1].jsonl"]
    ]
    assert expand_patterns(["x[1].jsonl"]) == [["x[1].jsonl"]]  # a file of that name wins over the glob
    assert expand_patterns([]) == []


@pytest.mark.parametrize(
    "pattern",
    [
        "d*/*.jsonl",
        "**/*.jsonl",
        "d/**",
        "**/e/*.jsonl",
        "./d/../d/**/[a-f].jsonl",
        "d/*/",
        ".*/*.jsonl",
        "**/.h/*",
        "?/e",
    ],
)
def test_a_glob_finds_what_pythons_does(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "d/a.jsonl", "d/e/f.jsonl", "d/.h/a.jsonl", ".h/a.jsonl", "d/.i.jsonl", "d1/b.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")
    Path("d1/link.jsonl").symlink_to("b.jsonl")
    theirs = {file for file in glob.glob(pattern, recursive=True) if not Path(file).is_dir()}
    assert matching_files(pattern)[0] == sorted(theirs)


def test_a_glob_ends_however_many_folders_and_links_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "up").symlink_to(tmp_path)  # glob follows each, 40 deep
        (tmp_path / str(number) / "itself").symlink_to("itself")
    (tmp_path / "3" / "a.jsonl").write_text("{}\n")
    (tmp_path / "linked").symlink_to(tmp_path / "3")  # where the pattern names a folder, it may be a link
    assert matching_files(f"{tmp_path}/**/*.jsonl") == ([f"{tmp_path}/3/a.jsonl"], [])
    assert caplog.text.count("** follows no links: name the folders") == 1 and f"{tmp_path}/0/up" in caplog.text
    files, [problem] = matching_files(f"{tmp_path}/**/b.jsonl")
    assert not files and "matches no file; ** follows no links: name the folders" in problem
    assert matching_files(f"{tmp_path}/l*/*.jsonl") == ([f"{tmp_path}/linked/a.jsonl"], [])
    for limit in ("_MOST_ENTRIES", "_MOST_SECONDS"):
        with monkeypatch.context() as patch:
            patch.setattr(patterns, limit, 0)
            files, [problem] = matching_files(f"{tmp_path}/**/*.jsonl")
        assert not files and "files and folders to look at" in problem and "name a folder further down" in problem


def test_a_file_that_is_one_large_hole_is_refused_unread(tmp_path: Path) -> None:
    for content in (b"", b'{"text": "a"}\n'):
        with open(tmp_path / "a.jsonl", "wb") as file:
            file.write(content)
            file.truncate(100 << 30)
        assert "nearly none is on the disk" in matching_files(str(tmp_path / "a.jsonl"))[1][0]


def test_all_patterns_without_a_readable_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text("{}\n")
    Path("secret.jsonl").write_text("{}\n")
    Path("folder").mkdir()
    Path("dangling.jsonl").symlink_to("nowhere")
    os.mkfifo("pipe")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "secret" not in str(path) and access(path, mode))
    given = ["*.parquet", "good.jsonl", "none.jsonl", "folder", "fold*", "dangling.jsonl", "pipe", "se*", ""]
    with pytest.raises(UserError) as caught:
        expand_patterns(given)
    assert str(caught.value).splitlines() == [
        "*.parquet: matches no file",
        "none.jsonl: cannot be read: No such file or directory",
        "folder: is a folder; name its files, e.g. folder/*.jsonl",
        "fold*: matches no file",
        "dangling.jsonl: cannot be read: No such file or directory",
        "pipe: is not a regular file (a pipe?); it is read more than once, so write its content to disk first",
        "secret.jsonl: cannot be read: Permission denied",
        ": cannot be read: No such file or directory",
    ]
    for path, reason in (("none.jsonl", "No such file"), ("folder", "is a folder"), ("secret.jsonl", "Permission")):
        with pytest.raises(UserError, match=f"{path}: .*{reason}"):
            list(read_records(path))


def test_what_was_read_is_told_to_the_line(tmp_path: Path) -> None:
    """Not what is in a buffer: `config new` counts the tokens of a part of the data, and needs its share."""
    line = json.dumps({"text": "x" * 1000}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 3000)
    reader = RecordReader(str(tmp_path / "a.jsonl"))
    for number, _ in zip(range(1, 1500), reader, strict=False):
        assert reader.consumed == number * len(line)


def test_reading_needs_no_torch() -> None:
    code = "import sys, titan_mi100.data.formats; sys.exit(bool({'torch', 'numpy', 'pyarrow'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_file_is_answered_with_a_similar_name_or_the_missing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").touch()
    similar, missing = str(tmp_path / "trian.jsonl"), str(tmp_path / "data" / "*.jsonl")
    none, no_folder = "No such file or directory", "is no folder, or may not be entered"
    for path, said in (
        (similar, f"cannot be read: {none}; did you mean {tmp_path / 'train.jsonl'}?"),
        (missing, f"matches no file; {tmp_path / 'data'} {no_folder}"),
        (str(tmp_path / "x"), f"cannot be read: {none}"),
    ):
        assert matching_files(path)[1] == [f"{path}: {said}"]
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and Path(path) != tmp_path)  # as for no root
    assert nearby(similar) == f"; {tmp_path} {no_folder}"
