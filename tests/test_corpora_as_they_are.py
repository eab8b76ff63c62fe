"""The six corpora of the mixture as they are on the hub, in tiny: from a recipe to the rows of every process.

The hub and the bucket of Software Heritage are stand-ins; names of folders, columns and identifiers are the real ones.
"""

import gzip
import json
import re
import runpy
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from conftest import ASSETS, REPO, torchrun
from pyarrow import parquet
from test_corpus import prepare, rows_of, texts

from titan_mi100.config.layout import Batch
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import DataConfig
from titan_mi100.config.toml_file import read_toml
from titan_mi100.data.corpus import read_corpus
from titan_mi100.data.formats import choose_format
from titan_mi100.data.loader import RowStream
from titan_mi100.data.mixture import Mixture
from titan_mi100.data.sources import open_sources
from titan_mi100.errors import UserError
from titan_mi100.text.load import load_tokenizer

CONFIG = REPO / "train_configs" / "qwen3_8b_mixture_64nodes.toml"
RECIPES = read_toml(REPO / "scripts" / "corpora" / "recipes.toml")
ZYDA, STACK, FINEMATH = "Zyphra/Zyda-2", "bigcode/the-stack-v2-train-smol-ids", "HuggingFaceTB/finemath"
FILES = {  # recipe -> its files in the repository
    "dclm": ["data/dclm_crossdeduped/global-shard_01_of_10/local-shard_0_of_10/0.parquet"],
    "fineweb-edu": ["data/fwe3/CC-MAIN-2013-20/a.parquet", "data/fwe3/CC-MAIN-2024-10/b.parquet"],
    "dolma": ["data/dolma-cc_crossdeduped-filtered/0.parquet"],
    "zyda": ["data/zyda_crossdeduped-filtered /zyda_c4-en/0.parquet"],  # with the space
    "stack-v2": [f"data/train-0000{number}-of-00002.parquet" for number in range(2)],
    "finemath": ["finemath-3plus/train-00000-of-00128.parquet"],
}
OTHERS = {ZYDA: ["README.md", "sample/100BT/0.parquet"], FINEMATH: ["finemath-4plus/train-00000-of-00064.parquet"]}
IDENTIFIERS = "identifiers, not code: .*blob_id.*Software Heritage.*the script is in docs/DATA.md, The Stack v2"


def write_hub(hub: Path) -> dict[str, bytes]:
    """Write the repositories. Returns the bucket: blob_id -> packed code."""
    bucket: dict[str, bytes] = {}
    for seed, (name, files) in enumerate(FILES.items()):
        for number, file in enumerate(files):
            path = hub / RECIPES[name]["repository"] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            documents = texts(60, 10 * seed + number)
            table: dict[str, Any] = {"text": documents, "url": [f"https://example.org/{i}" for i in range(60)]}
            if name == "stack-v2":
                rows = []
                for start in range(0, 60, 3):  # three files of each repository
                    rows.append([])
                    for text in documents[start : start + 3]:
                        encoding = "UTF-8" if len(bucket) % 2 else "UTF-16"
                        blob = f"{len(bucket):040x}"
                        bucket[blob] = gzip.compress(text.encode(encoding))
                        rows[-1].append({"blob_id": blob, "path": "/src/a.c", "src_encoding": encoding})
                table = {"repo_name": [f"a/{i}" for i in range(20)], "files": rows, "num_files": [3] * 20}
            parquet.write_table(pyarrow.table(table), path)
    for repository, files in OTHERS.items():
        for file in files:
            (hub / repository / file).parent.mkdir(parents=True, exist_ok=True)
            (hub / repository / file).write_bytes(b"not wanted")
    return bucket


def stand_in_of_the_hub(hub: Path) -> ModuleType:
    def names(repository: str) -> list[str]:
        return [str(f.relative_to(hub / repository)) for f in sorted((hub / repository).rglob("*")) if f.is_file()]

    class HfApi:
        def dataset_info(self, repository: str, **_: Any) -> SimpleNamespace:
            siblings = [SimpleNamespace(rfilename=name, size=1000) for name in names(repository)]
            return SimpleNamespace(id=repository, sha="c0ffee", last_modified="", gated=False, siblings=siblings)

    def snapshot_download(repository: str, allow_patterns: list[str], local_dir: str, **_: Any) -> None:
        for name in names(repository):
            if any(fnmatch(name, pattern) for pattern in allow_patterns):  # as huggingface_hub chooses
                (Path(local_dir) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(hub / repository / name, Path(local_dir) / name)

    module = ModuleType("huggingface_hub")
    module.__dict__.update(HfApi=HfApi, snapshot_download=snapshot_download)
    return module


def run_the_pages_script(patch: pytest.MonkeyPatch, bucket: dict[str, bytes], read: list[str]) -> None:
    """Run the script of docs/DATA.md in the current folder. Args: read: gets the keys that it asks the bucket for."""
    page = (REPO / "docs" / "DATA.md").read_text(encoding="utf-8").partition("#### The Stack v2")[2]
    [script] = re.findall(r"```python\n(.*?)```", page, re.S)

    def get_object(Bucket: str, Key: str) -> dict[str, Any]:  # boto3's names
        assert Bucket == "softwareheritage"
        read.append(Key)
        return {"Body": SimpleNamespace(read=lambda: bucket[Key.removeprefix("content/")])}

    stand_ins = {
        "boto3": {"client": lambda *_, **__: SimpleNamespace(get_object=get_object)},
        "botocore": {"UNSIGNED": None}, "botocore.config": {"Config": lambda **_: None},
    }  # fmt: skip
    for name, content in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        patch.setitem(sys.modules, name, module)
    exec(compile(script, "docs/DATA.md", "exec"), {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With raw/ and corpora/, as the page's commands make them, and a copy of the bundled config."""
    folder = tmp_path_factory.mktemp("six")
    bucket = write_hub(folder / "hub")
    shutil.copy(CONFIG, folder / "mine.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "huggingface_hub", stand_in_of_the_hub(folder / "hub"))
        main = runpy.run_path(str(REPO / "scripts" / "corpora" / "fetch.py"))["main"]
        for name in RECIPES:
            patch.setattr(sys, "argv", ["fetch.py", name, "--output_dir", f"raw/{name}"])
            assert main() == 0
        run_the_pages_script(patch, bucket, [])
        for name, recipe in RECIPES.items():
            source, kind = (f"raw/{name}", "*.parquet") if name != "stack-v2" else ("raw/stack-v2-code", "*.zst")
            given = ("--input", source, "--include", kind, "--text_column", recipe["text_column"], "--workers", "1")
            prepare(*given, "--output_dir", f"corpora/{name}")
        yield folder


def test_a_recipe_fetches_its_corpus_and_no_text_of_another(folder: Path) -> None:
    for name, files in FILES.items():
        fetched = [str(f.relative_to(folder / "raw" / name)) for f in (folder / "raw" / name).rglob("*") if f.is_file()]
        assert sorted(fetched) == files, name
    every = [file for name, files in FILES.items() if RECIPES[name]["repository"] == ZYDA for file in files]
    assert len(set(every)) == len(every) == 5


def test_identifiers_are_named_and_the_pages_script_gets_their_code(folder: Path, tmp_path: Path) -> None:
    path = folder / "raw" / "stack-v2" / FILES["stack-v2"][0]
    for more in ([], ["--text_column", "files"]):
        said = prepare("--input", path, "--output_dir", tmp_path / "out", *more, code=2)
        assert re.search(f"{path}: {IDENTIFIERS}", said) and not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=f"^{path}: {IDENTIFIERS}"):
        choose_format(str(path), DataConfig())
    rows = [{"blob_id": "0" * 40, "path": "/a.c"}, {"files": [{"blob_id": "0" * 40, "content": "int a;"}]}]
    for row, is_named in zip(rows, (True, False), strict=True):
        (tmp_path / "row.jsonl").write_text(json.dumps(row))
        said = prepare("--input", tmp_path / "row.jsonl", "--output_dir", tmp_path / "other", code=2)
        assert ("identifiers, not code" in said) == is_named and ("missing key" in said) != is_named
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
    corpus = rows_of(folder / "corpora" / "stack-v2", 4096)
    first = corpus.row(0)
    text = load_tokenizer(ASSETS / "tokenizer").decode(first.input_ids[first.document_ids == 0].tolist())
    assert text.startswith("\n\n".join(texts(60, 40)[:3])) and sum(corpus.corpus.documents) == 40


def test_the_pages_script_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "raw", tmp_path / "raw")
    done = sorted((tmp_path / "raw" / "stack-v2-code").iterdir())
    before = [file.read_bytes() for file in done]
    done[1].rename(done[1].with_suffix(".part"))
    done[1].with_suffix(".part").write_bytes(before[1][:10])
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run_the_pages_script(patch, write_hub(tmp_path / "hub"), read)
    assert [file.read_bytes() for file in done] == before and len(read) == 60


def test_the_bundled_mixture_reads_all_six_and_resumes_on_other_numbers_of_processes(folder: Path) -> None:
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    given = ["--job.config_file", str(folder / "mine.toml"), "--model.tokenizer_path", str(ASSETS / "tokenizer")]
    config = load_config(given, 512)
    assert [source.name for source in config.data.sources] == [*RECIPES] == [*FILES]
    data = open_sources(config.data, None, tokenizer.fingerprint, 16)
    mixture = Mixture(data.sources, 0, config.data.on_exhausted, in_documents=True)
    batch = config.batch(512)
    assert batch == Batch(21, 1, 64)

    def steps(batch: Batch, first: int, last: int) -> list[list[tuple[int, ...]]]:
        """The tokens of each step's rows, over all processes."""
        streams = [RowStream(mixture, batch, rank) for rank in range(batch.dp_degree)]
        each = [[part for stream in streams for part in stream.step(step * 1344)] for step in range(first, last)]
        return [sorted(tuple(row.tolist()) for part in step for row in part["input_ids"]) for step in each]

    at_once = steps(batch, 0, 3)
    assert steps(Batch(7, 6, 32), 1, 3) == at_once[1:] and steps(Batch(14, 1, 96), 1, 3) == at_once[1:]
    for number in range(0, 2 * 1344, 7):  # each row is of the source that the schedule says
        source, _ = mixture.find(number)
        assert all(place.startswith(f"raw/{source.name}") for place in mixture.where(number))
    # of the documents that are read, each source has the share that the config says
    rows = Counter(mixture.find(number)[0].name for number in range(10 * 1344))
    corpora = {name: read_corpus(folder / "corpora" / name)[0] for name in RECIPES}
    documents = np.array([rows[name] * sum(c.documents) / sum(c.tokens) for name, c in corpora.items()])
    weights = [0.40, 0.44, 0.03, 0.02, 0.10, 0.01]
    assert documents / documents.sum() == pytest.approx(weights, abs=0.002)
    assert [source.weight for source in config.data.sources] == weights


@pytest.mark.full
def test_a_run_on_the_six_corpora_resumes_on_another_number_of_processes(folder: Path) -> None:
    tiny = {
        "model.flavor": "debug", "model.tokenizer_path": ASSETS / "tokenizer", "training.seq_len": 64,
        "training.steps": 4, "parallelism.data_parallel_replicate_degree": 1, "parallelism.tensor_parallel_degree": 1,
        "parallelism.data_parallel_shard_degree": -1, "checkpoint.interval": 2, "checkpoint.keep_latest_k": 0,
        "training.mixed_precision_param": "float64", "validation.freq": 2,
    }  # fmt: skip

    def losses(run: str, processes: int, *more: str) -> list[float]:
        given = [str(word) for key, value in tiny.items() for word in (f"--{key}", value)]
        given += ["--job.run_folder", str(folder / run), "--training.local_batch_size", str(8 // processes), *more]
        config = ("--job.config_file", str(folder / "mine.toml"))
        done = torchrun("-m", "titan_mi100.train", *config, *given, processes=processes, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        entries = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
        return [entry["loss"] for entry in entries if "loss" in entry]

    at_once = losses("at_once", 2)
    shutil.copytree(folder / "at_once", folder / "resumed")
    assert losses("resumed", 1, "--checkpoint.load_step", "2") == pytest.approx(at_once, rel=1e-10, abs=0)
