"""Corpora for pretraining: prepared from any input, in parts, after kills, the same bytes; read row by row."""

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ASSETS, job_environment

from titan_mi100.config.layout import IGNORE
from titan_mi100.config.settings import DataConfig, SourceConfig
from titan_mi100.data.corpora import making, shards
from titan_mi100.data.corpora.corpus import Corpus, CorpusRows, read_corpus
from titan_mi100.data.corpora.shards import cut_into_units
from titan_mi100.data.prepare import open_sources
from titan_mi100.data.prepared import PADDING_ROW
from titan_mi100.data.rows import PADDING_DOCUMENT
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools import prepare_corpus

TOKENIZER = str(ASSETS / "tokenizer")
WORDS = ["one", "two", "three", "été", "再见", "🙂", "<|im_end|>", "12", "+", "30\n"]


def in_small_units(path: Path, folder: Path) -> list[str]:
    """A command that prepares a file in units of 16 KiB."""
    code = "from titan_mi100.data.corpora import shards; shards._SMALLEST = 1 << 14; import sys\n"
    code += "from titan_mi100.tools.prepare_corpus import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, "--input", str(path), "--tokenizer", TOKENIZER, "--output_dir", str(folder)]


def kill_when(command: list[str], is_time: Callable[[], bool]) -> None:
    """Start it, and end it and all that it has started with SIGKILL as soon as it is time."""
    with subprocess.Popen(command, env=job_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          start_new_session=True) as process:  # fmt: skip
        while process.poll() is None and not is_time():
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZER)


def texts(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 60))) for _ in range(count)]


def write(path: Path, documents: list[str], pack=lambda data: data) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "id": number}) for number, text in enumerate(documents)]
    path.write_bytes(pack("\n".join(lines).encode()))
    return path


def prepare(*arguments: object, code: int = 0) -> str:
    """Run the command; what it said on standard error."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # the command configures it
    with contextlib.redirect_stderr(said):
        tokenizer = ["--tokenizer", TOKENIZER]
        found = prepare_corpus.main([*tokenizer, *map(str, arguments)])
    text = said.buffer.getvalue().decode()
    assert found == code, text
    return text


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows_of(folder: Path, seq_len: int, concatenated: bool = False) -> CorpusRows:
    corpus, _ = read_corpus(folder)
    return CorpusRows(folder, corpus, seq_len, CorpusRows.split(corpus, seq_len, 0)[0], concatenated)


def expected(documents: list[str], tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.encode("<|endoftext|>")
    end = end if len(end) == 1 else [tokenizer.eos_token_id]
    return [token for text in documents for token in [*tokenizer.encode(text), *end]]


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "array", "text"])
def test_every_kind_of_input_gives_each_document_once_with_its_end(
    kind: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    documents, more = texts(40), []
    if kind == "text":
        for number, text in enumerate(documents):
            (tmp_path / "in" / str(number % 3)).mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / str(number % 3) / f"{number:03}.txt").write_text(text, encoding="utf-8")
        (tmp_path / "in" / "0" / "other.bin").write_bytes(b"\xff")
        (tmp_path / "in" / "2" / "blank.txt").write_text("\n")
        documents, more = [documents[i] for third in range(3) for i in range(third, 40, 3)], ["--include", "*.txt"]
        given = [tmp_path / "in", "--format", "text", *more]
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "in.parquet")
        given = [tmp_path / "in.parquet"]
    elif kind == "array":
        (tmp_path / "in.json").write_text(json.dumps([{"text": text} for text in documents]))
        given = [tmp_path / "in.json"]
    else:
        import zstandard

        pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(kind, lambda data: data)
        given = [
            write(tmp_path / "a" / "one.jsonl", documents[:25], pack),
            write(tmp_path / "two", documents[25:], pack),
        ]
    prepare("--input", *given, "--output_dir", tmp_path / "out")
    bad = (tmp_path / "out" / "bad_rows.csv").read_text().splitlines()[1:]
    assert bad == [f"{tmp_path / 'in/2/blank.txt'},1,nothing to learn,the text is blank"] * (kind == "text")
    rows = rows_of(tmp_path / "out", 16)
    everything = [rows.row(i) for i in range(len(rows))]
    real = [row.document_ids != PADDING_DOCUMENT for row in everything]
    read = [token for row, mask in zip(everything, real, strict=True) for token in row.input_ids[mask].tolist()]
    assert read == expected(documents, tokenizer)
    corpus, _ = read_corpus(tmp_path / "out")
    assert (sum(corpus.documents), sum(corpus.tokens)) == (40, len(read))
    starts = {0, *np.cumsum([len(expected([text], tokenizer)) for text in documents])[:-1].tolist()}
    edges = [0, *np.cumsum(corpus.tokens).tolist()]
    unlearned = starts.union(*(range(*edge, 16) for edge in pairwise(edges)))  # the first tokens of documents and rows
    assert sum(int((row.labels != IGNORE).sum()) for row in everything) == len(read) - len(unlearned)


def test_a_row_is_what_its_tokens_say(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = texts(30, seed=2)
    prepare("--input", write(tmp_path / "in.jsonl", documents), "--output_dir", tmp_path / "out")
    stream, ends = expected(documents, tokenizer), np.cumsum([len(expected([text], tokenizer)) for text in documents])
    isolated, together = (rows_of(tmp_path / "out", 32, concatenated) for concatenated in (False, True))
    assert len(isolated) == -(-len(stream) // 32)
    for index in range(len(isolated)):
        row, classic, start = isolated.row(index), together.row(index), 32 * index
        real = min(32, len(stream) - start)
        number = np.searchsorted(ends, np.arange(start, start + real), side="right")  # of the document of each token
        assert (row.document_ids[:real] == number - number[0]).all() and (row.document_ids[real:] == -1).all()
        begins = [np.flatnonzero(number == n)[0] for n in number]
        assert (row.positions[:real] == np.arange(real) - begins).all()
        assert (classic.document_ids[:real] == 0).all() and (classic.positions[:real] == np.arange(real)).all()
        for place in range(real):
            following = stream[start + place + 1] if place + 1 < real else IGNORE
            assert classic.labels[place] == following
            is_last = start + place + 1 in ends
            assert row.labels[place] == (IGNORE if is_last else following)
        files = dict.fromkeys(f"{tmp_path / 'in.jsonl'}:{n + 1}" for n in number.tolist())
        assert isolated.where(index) == list(files)
    padding = isolated.row(PADDING_ROW)
    assert (padding.labels == IGNORE).all() and (padding.document_ids == PADDING_DOCUMENT).all()
    assert isolated.where(PADDING_ROW) == []


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SMALLEST", 1 << 12)


def test_spans_of_a_file_give_each_line_once_with_its_number(tmp_path: Path, small_units: None) -> None:
    documents = texts(400, seed=3)
    path = write(tmp_path / "in.jsonl", documents)
    lines = path.read_bytes().split(b"\n")
    lines[100:100] = [b"", b"no json", b'{"text": 5}', b'{"text": " "}']  # line ends where spans do, and bad rows
    path.write_bytes(b"\r\n".join(lines) + b"\n\n")
    prepare("--input", path, "--output_dir", tmp_path / "out", "--max_bad_share", "1")
    corpus, _ = read_corpus(tmp_path / "out")
    assert len(corpus.tokens) > 10 and sum(corpus.documents) == 400
    rows = rows_of(tmp_path / "out", 64)
    places = [int(where.rsplit(":", 1)[1]) for i in range(len(rows)) for where in rows.where(i)]
    assert list(dict.fromkeys(places)) == [*range(1, 101), *range(105, 405)]
    bad = (tmp_path / "out" / "bad_rows.csv").read_text().splitlines()
    assert [line.split(",")[1:3] for line in bad[1:]] == [["102", "not JSON"], ["103", "wrong type"]]
    ledger = (tmp_path / "out" / "ledger.csv").read_text().splitlines()
    assert ledger == ["file,bytes,documents,tokens,not JSON,nothing to learn,wrong type",
                      f"{path},{path.stat().st_size},400,{sum(corpus.tokens)},1,1,1"]  # fmt: skip


def test_units_follow_from_the_input_alone(tmp_path: Path, small_units: None) -> None:
    path = write(tmp_path / "in.jsonl", texts(100))
    size = path.stat().st_size
    units = cut_into_units([str(path)] * 2, [size] * 2, is_text=False)
    spans = [unit.span for unit in units if unit.first == 0]
    assert spans[0][0] == 0 and spans[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(spans))
    grouped = cut_into_units(["x"] * 5, [3000, 3000, 10, 9000, 1], is_text=True)
    assert [(unit.first, unit.stop) for unit in grouped] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.full
def test_parts_and_other_numbers_of_workers_make_the_same_bytes(tmp_path: Path, small_units: None) -> None:
    path = write(tmp_path / "in.jsonl", texts(300, seed=4))
    prepare("--input", path, "--output_dir", tmp_path / "one", "--workers", "1")
    for part in (3, 1):
        prepare("--input", path, "--output_dir", tmp_path / "parts", "--part", f"{part}/3")
        assert not (tmp_path / "parts" / "corpus.json").exists()
    prepare("--input", path, "--output_dir", tmp_path / "parts", "--part", "2/3")
    assert hashes(tmp_path / "one") == hashes(tmp_path / "parts")


@pytest.mark.full
def test_a_killed_preparation_goes_on_and_leaves_the_same_bytes(tmp_path: Path) -> None:
    """Killed by SIGKILL after some shards, twice; `tests/chaos/kill_corpus.py` kills fifty at any moment."""
    path = write(tmp_path / "in.jsonl", texts(3000, seed=5))
    small, killed = tmp_path / "small", tmp_path / "killed"
    subprocess.run(in_small_units(path, small), env=job_environment(), check=True, capture_output=True)
    for _ in range(2):
        before = len(list(killed.rglob("0*.json")))
        kill_when(in_small_units(path, killed), lambda: len(list(killed.rglob("0*.json"))) > before + 1)  # noqa: B023
        assert not (killed / "corpus.json").exists()
    subprocess.run(in_small_units(path, killed), env=job_environment(), check=True, capture_output=True)
    assert hashes(killed) == hashes(small)
    assert len(read_corpus(small)[0].tokens) > 20


ONES = (
    pytest.param(name, marks=pytest.mark.full)
    for name in ("corpus.json", "plan.json", "000003.bad.jsonl", "000003.json")
)


@pytest.mark.parametrize("name", ["000003.bin", *ONES])
def test_killed_before_any_file_takes_its_name_nothing_of_it_stays(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", texts(600))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(in_small_units(path, whole), env=job_environment(), check=True, capture_output=True)
    die = "import os, pathlib\ndef end(self, target):\n    "
    die += f"os.killpg(0, 9) if target.name == {name!r} else os.rename(self, target)\n"
    die += "pathlib.Path.rename = pathlib.Path.replace = end\n"
    command = in_small_units(path, killed)
    command[2] = die + command[2]
    done = subprocess.run(command, env=job_environment(), capture_output=True, start_new_session=True)
    assert done.returncode == -signal.SIGKILL and hashes(killed) != hashes(whole)
    subprocess.run(in_small_units(path, killed), env=job_environment(), check=True, capture_output=True)
    assert hashes(killed) == hashes(whole)


def test_parts_read_copies_of_the_input_on_their_nodes(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has its own modification time, and the path may be written otherwise. Other sizes are refused."""
    path, out = write(tmp_path / "in.jsonl", texts(100)), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    prepare("--input", "in.jsonl", "--output_dir", out, "--part", "1/2")
    os.utime(path, (1, 1))
    prepare("--input", "./in.jsonl", "--output_dir", out, "--part", "2/2")
    assert sum(read_corpus(out)[0].documents) == 100
    path.write_text(path.read_text() + "\n")
    assert "different sizes of input files" in prepare(
        "--input", path.name, "--output_dir", out, "--part", "2/2", code=2
    )


def test_a_run_parses_no_names_of_files_and_an_older_corpus_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text folder may have millions of files; older versions repeated their names in corpus.json."""
    monkeypatch.setattr("titan_mi100.files.schema.LONGEST", 100)
    for number in range(150):
        write(tmp_path / "in" / f"{number:03}", ["x"])
    given = ["--input", tmp_path / "in", "--output_dir", tmp_path / "out"]
    prepare(*given, "--format", "text")
    assert rows_of(tmp_path / "out", 4096).where(0)[0] == f"{tmp_path / 'in' / '000'}:1"
    copy = Path(shutil.copytree(tmp_path / "out", tmp_path / "copy"))
    (copy / "plan.json").unlink()  # it is trained on, but its log cannot name the files
    assert rows_of(copy, 4096).where(0)[0] == "input file 0:1"
    file = tmp_path / "out" / "corpus.json"
    file.write_text(json.dumps({"files": ["x"] * 150, **json.loads(file.read_text())}))
    before = read_corpus(tmp_path / "out")
    prepare(*given, "--format", "text")
    assert read_corpus(tmp_path / "out") == before  # with the same hash, which resuming runs compare
    monkeypatch.setattr("titan_mi100.data.corpora.making.LONGEST", 100)
    assert "makes 150 shards, 100 are possible" in prepare(*given[:3], tmp_path / "more", code=2)
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress])
def test_a_file_without_rows_has_0_documents_in_the_ledger(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(pack(b""))
    good, out = write(tmp_path / "b.jsonl", texts(5)), tmp_path / "out"
    said = prepare("--input", tmp_path / "a.jsonl", good, "--output_dir", out)
    assert f"{tmp_path / 'a.jsonl'}: no rows; counted as 0 documents" in said
    ledger = (out / "ledger.csv").read_text().splitlines()
    assert ledger[1] == f"{tmp_path / 'a.jsonl'},{len(pack(b''))},0,0" and ledger[2].startswith(f"{good},")
    rows = rows_of(out, 16)
    assert all(rows.where(row)[0].startswith(f"{good}:") for row in range(len(rows)))
    assert "no document is left" in prepare("--input", tmp_path / "a.jsonl", "--output_dir", tmp_path / "none", code=2)


def test_what_would_make_another_corpus_is_refused(tmp_path: Path, small_units: None) -> None:
    path = write(tmp_path / "in.jsonl", texts(50))
    out = tmp_path / "out"
    prepare("--input", path, "--output_dir", out)
    before = hashes(out)
    assert "was started with different eos" in prepare("--input", path, "--output_dir", out, "--eos", "none", code=2)
    later = path.stat().st_mtime + 60
    os.utime(path, (later, later))
    assert "have changed since" in prepare("--input", path, "--output_dir", out, code=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "is not empty and is not a corpus" in prepare("--input", path, "--output_dir", tmp_path / "other", code=2)
    assert hashes(out) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--eos", "no such token"], "--eos 'no such token': is not a single token of this tokenizer"),
        (["--part", "3/2"], "'3/2' must be i/N with 1 <= i <= N"),
        (["--text_column", "content"], "missing key: the row has no content, only id, text"),
        (["--input", "nothing*.jsonl"], "nothing*.jsonl: matches no file"),
        (["--workers", "-1"], "--workers -1"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--format", "text", "--include", "*.md"], "has no file *.md"),
        (["--input", "LICENSE"], "leave such files out (--include '*.jsonl')"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "x.jsonl", texts(5))
    given = [] if "--input" in arguments else ["--input", path.parent if "text" in arguments else path]
    assert said in prepare(*given, "--output_dir", tmp_path / "out", *arguments, code=2)
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_bad_rows_over_the_limit_stop_it_and_may_be_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", texts(50))
    path.write_text(path.read_text() + '\n{"text": "a", "text": "b"}\n{"text": " "}\n')
    out = tmp_path / "out"
    said = prepare("--input", path, "--output_dir", out, code=2)
    assert f"{path}:51: duplicate key" in said and "1 of 52 rows cannot be read (duplicate key: 1)" in said
    assert "cannot be read" in prepare("--input", path, "--output_dir", out, "--max_bad_share", "0", code=2)
    prepare("--input", path, "--output_dir", out, "--max_bad_share", "0.1")
    assert sum(read_corpus(out)[0].documents) == 50


def test_truncated_packed_files_are_refused_and_the_others_kept(tmp_path: Path) -> None:
    import zstandard

    path = write(tmp_path / "a.zst", texts(500), zstandard.compress)
    path.write_bytes(path.read_bytes()[:-5])
    good = write(tmp_path / "b.jsonl", texts(5))
    said = prepare("--input", path, good, "--output_dir", tmp_path / "out", code=2)
    assert f"{path}: the zstd data is damaged or truncated" in said
    assert not (tmp_path / "out" / "corpus.json").exists()
    assert (tmp_path / "out" / "shards" / "000" / "000001.json").exists()


def test_temporary_files_of_killed_processes_go_and_those_of_living_ones_and_of_the_user_stay(tmp_path: Path) -> None:
    names = [f"000000.bin.{letter * 32}.part" for letter in "ab"]
    for name in (*names, "movie.mp4.part"):
        (tmp_path / name).touch()
    with (tmp_path / names[0]).open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        shards.remove_temporary_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[0], "movie.mp4.part"]


def test_an_input_file_that_grows_stops_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cut = write(tmp_path / "in.jsonl", texts(50)), making.cut_into_units

    def cut_before_it_grows(files: list[str], sizes: list[int], is_text: bool) -> Any:
        with path.open("a") as file:
            file.write('{"text": "more"}\n')
        return cut(files, sizes, is_text)

    monkeypatch.setattr(making, "cut_into_units", cut_before_it_grows)
    said = prepare("--input", path, "--output_dir", tmp_path / "out", code=2)
    assert f"{path}: its size has changed since the start" in said


def test_what_a_folder_holds_is_read_or_named(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for name in ("a/1.txt", ".hid/x.txt", ".dot.txt", "../other/2.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("some words\n" * 5)
    given = ("--input", folder, "--format", "text", "--output_dir", tmp_path / "out")
    (folder / "linked").symlink_to(tmp_path / "other")
    (folder / "3.txt").symlink_to("/nowhere")
    said = prepare(*given, code=2)
    assert f"{folder / 'linked'}: is a link to a folder" in said and f"{folder / '3.txt'}: cannot be read" in said
    (folder / "linked").unlink()
    (folder / "3.txt").unlink()
    prepare(*given)
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["plan"]["files"] == [str(folder / "a" / "1.txt")]


def test_the_share_of_bad_rows_that_was_allowed_counts_in_each_start(tmp_path: Path) -> None:
    rows = ['{"text": 5}\n'] * 1100 + ['{"text": "good words"}\n'] * 100
    (tmp_path / "in.jsonl").write_text("".join(rows))
    given = ("--input", tmp_path / "in.jsonl", "--output_dir", tmp_path / "out")
    for _ in range(2):  # the second start finds the shard
        assert "of a shard cannot be read" in prepare(*given, code=2)
    prepare("--input", tmp_path / "in.jsonl", "--output_dir", tmp_path / "b", "--max_bad_share", "1")


def test_a_shard_says_its_hash_and_a_short_one_is_refused_when_it_is_read(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare("--input", write(tmp_path / "in.jsonl", texts(50)), "--output_dir", out)
    file = out / "shards" / "000" / "000000.bin"
    told = json.loads(file.with_suffix(".json").read_text())["sha256"]["bin"]
    assert told == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(OSError, match="its length differs from that in corpus"):
        rows_of(out, 16).row(0)
    (out / "corpus.json").write_text("{}")
    with pytest.raises(UserError, match="lacks"):
        read_corpus(out)


def test_an_epoch_reads_each_row_once_shuffled_by_shards_and_windows(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_mi100.data.corpora.corpus._WINDOW", 50)
    prepare("--input", write(tmp_path / "in.jsonl", texts(400)), "--output_dir", tmp_path / "out")
    corpus, _ = read_corpus(tmp_path / "out")
    train, held_out = CorpusRows.split(corpus, 16, 0.1)
    assert len(held_out) == -(-train.stop // 10) and held_out.stop == train.start
    for part in (train, held_out):
        rows = CorpusRows(tmp_path / "out", corpus, 16, part, False)
        orders = [[rows.shuffled((7, 1), epoch, place) for place in range(len(rows))] for epoch in (0, 1)]
        assert all(sorted(order) == list(range(len(rows))) for order in orders) and orders[0] != orders[1]
        assert rows.tokens == sum(int((rows.row(i).document_ids >= 0).sum()) for i in range(len(rows)))
        shard_of = np.repeat(np.arange(len(corpus.tokens)), [-(-tokens // 16) for tokens in corpus.tokens])
        assert orders[0][:50] != sorted(orders[0][:50])  # the rows of a window are not in order
        window = Counter(shard_of[part.start + index] for index in orders[0][:50])
        assert len(window) <= 50 // min(Counter(shard_of).values()) + 2  # a window reads few shards
    both = [CorpusRows(tmp_path / "out", corpus, 16, part, False).row(0) for part in (train, held_out)]
    assert not np.array_equal(both[0].input_ids, both[1].input_ids)


def test_the_order_of_a_corpus_stays_and_what_decides_its_rows_is_in_the_fingerprint(
    tmp_path: Path, small_units: None, tokenizer: Tokenizer
) -> None:
    """A run that was begun by an older version resumes in this order."""
    out = tmp_path / "out"
    prepare("--input", write(tmp_path / "in.jsonl", texts(400)), "--output_dir", out)
    rows = rows_of(out, 16)
    assert [rows.shuffled((7, 1), 0, place) for place in range(12)] == [
        297, 14, 1258, 229, 1705, 396, 707, 191, 1047, 202, 470, 1473,
    ]  # fmt: skip
    source = (SourceConfig((str(out),), "x"),)
    opened = [
        open_sources(DataConfig(source=source, concatenate=form), None, tokenizer.fingerprint, seq_len)
        for seq_len, form in ((16, False), (32, False), (16, True))
    ]
    assert len({data.sources[0].fingerprint for data in opened}) == 3


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = tmp_path / "out"
    prepare("--input", write(tmp_path / "in.jsonl", texts(5)), "--output_dir", out)
    config = DataConfig(source=(SourceConfig((str(out),), "x"),))
    data = open_sources(config, None, tokenizer.fingerprint, 32)
    assert data.sources[0].name == "x" and len(data.sources[0].rows) > 1 and not data.validation
    content = json.loads((out / "corpus.json").read_text())
    (out / "corpus.json").write_text(json.dumps({**content, "tokenizer": "another"}))
    with pytest.raises(UserError, match="was not tokenised with the model's tokenizer"):
        open_sources(config, None, tokenizer.fingerprint, 32)
    assert isinstance(read_corpus(out)[0], Corpus)
