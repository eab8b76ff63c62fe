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
from titan_mi100.data.formats import choose_format
from titan_mi100.data.loader import RowStream
from titan_mi100.data.mixture import Mixture
from titan_mi100.data.prepare import open_sources
from titan_mi100.errors import UserError
from titan_mi100.text.load import load_tokenizer

PAGE = (REPO / "docs" / "DATA.md").read_text(encoding="utf-8")
RECIPES = read_toml(REPO / "scripts" / "corpora" / "recipes.toml")
FILES = {  # recipe -> its files in the repository
    "dclm": ["data/dclm_crossdeduped/global-shard_01_of_10/local-shard_0_of_10/0.parquet"],
    "fineweb-edu": ["data/fwe3/CC-MAIN-2013-20/a.parquet", "data/fwe3/CC-MAIN-2024-10/b.parquet"],
    "dolma": ["data/dolma-cc_crossdeduped-filtered/0.parquet"],
    "zyda": ["data/zyda_crossdeduped-filtered /zyda_c4-en/0.parquet"],  # with the space
    "stack-v2": [f"data/train-0000{number}-of-00002.parquet" for number in range(2)],
    "finemath": ["finemath-3plus/train-00000-of-00128.parquet"],
}
OTHERS = ["Zyphra/Zyda-2/sample/100BT/0.parquet", "HuggingFaceTB/finemath/finemath-4plus/0.parquet"]


def write_hub(hub: Path) -> dict[str, bytes]:
    """Write the repositories. Returns the bucket: blob_id -> packed code."""
    bucket: dict[str, bytes] = {}
    for seed, (name, files) in enumerate(FILES.items()):
        for number, file in enumerate(files):
            path = hub / RECIPES[name]["repository"] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            documents = texts(60, 10 * seed + number)
            table: dict[str, Any] = {"text": documents, "url": ["https://example.org"] * 60}
            if name == "stack-v2":
                codes: list[dict[str, str]] = []
                for text, encoding in zip(documents, ("UTF-8", "UTF-16") * 30, strict=True):
                    codes.append({"blob_id": f"{len(bucket):040x}", "path": "/a.c", "src_encoding": encoding})
                    bucket[codes[-1]["blob_id"]] = gzip.compress(text.encode(encoding))
                table = {"repo_name": ["a/b"] * 20, "files": [codes[i : i + 3] for i in range(0, 60, 3)]}
            parquet.write_table(pyarrow.table(table), path)
    for file in OTHERS:
        (hub / file).parent.mkdir(parents=True, exist_ok=True)
        (hub / file).write_bytes(b"not wanted")
    return bucket


def stand_in(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    patch.setitem(sys.modules, name, module)


def stand_in_for_the_hub(patch: pytest.MonkeyPatch, hub: Path) -> None:
    def names(repository: str) -> list[str]:
        return [str(f.relative_to(hub / repository)) for f in sorted((hub / repository).rglob("*")) if f.is_file()]

    def dataset_info(repository: str, **_: Any) -> SimpleNamespace:
        files = [SimpleNamespace(rfilename=name, size=1000) for name in names(repository)]
        return SimpleNamespace(id=repository, sha="c0ffee", last_modified="", gated=False, siblings=files)

    def snapshot_download(repository: str, allow_patterns: list[str], local_dir: str, **_: Any) -> None:
        for name in names(repository):
            if any(fnmatch(name, pattern) for pattern in allow_patterns):  # as huggingface_hub chooses
                (Path(local_dir) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(hub / repository / name, Path(local_dir) / name)

    api = SimpleNamespace(dataset_info=dataset_info)
    stand_in(patch, "huggingface_hub", HfApi=lambda: api, snapshot_download=snapshot_download)


def run_the_pages_script(patch: pytest.MonkeyPatch, bucket: dict[str, bytes], read: list[str]) -> None:
    """Run the script of docs/DATA.md in the current folder. Args: read: gets the keys that it asks the bucket for."""
    [script] = re.findall(r"```python\n(.*?)```", PAGE.partition("#### The Stack v2")[2], re.S)

    def get_object(Bucket: str, Key: str) -> dict[str, Any]:  # boto3's names
        assert Bucket == "softwareheritage"
        read.append(Key)
        return {"Body": SimpleNamespace(read=lambda: bucket[Key.removeprefix("content/")])}

    stand_in(patch, "boto3", client=lambda *_, **__: SimpleNamespace(get_object=get_object))
    stand_in(patch, "botocore", UNSIGNED=None)
    stand_in(patch, "botocore.config", Config=lambda **_: None)
    exec(compile(script, "docs/DATA.md", "exec"), {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With raw/ and corpora/, as the page's commands make them, and a copy of the bundled config."""
    folder = tmp_path_factory.mktemp("six")
    bucket = write_hub(folder / "hub")
    shutil.copy(REPO / "train_configs" / "qwen3_8b_mixture_64nodes.toml", folder / "mine.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stand_in_for_the_hub(patch, folder / "hub")
        main = runpy.run_path(str(REPO / "scripts" / "corpora" / "fetch.py"))["main"]
        for name in RECIPES:
            patch.setattr(sys, "argv", ["fetch.py", name, "--output_dir", f"raw/{name}"])
            assert main() == 0
        run_the_pages_script(patch, bucket, [])
        for name, recipe in RECIPES.items():
            source, kind = (f"raw/{name}", "*.parquet") if name != "stack-v2" else ("raw/stack-v2-code", "*.zst")
            given = ("--input", source, "--include", kind, "--text_column", recipe["text_column"], "--workers", "2")
            prepare(*given, "--output_dir", f"corpora/{name}")
        yield folder


def test_a_recipe_fetches_its_corpus_and_no_text_of_another(folder: Path) -> None:
    for name, files in FILES.items():
        fetched = (file.relative_to(folder / "raw" / name) for file in (folder / "raw" / name).rglob("*.*"))
        assert sorted(map(str, fetched)) == files


def test_identifiers_are_refused_and_their_code_is_fetched(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path = folder / "raw" / "stack-v2" / FILES["stack-v2"][0]
    said = prepare("--input", path, "--output_dir", tmp_path / "out", code=2)
    assert f"{path}:1: missing key: the row has no text, only " in said
    with pytest.raises(UserError, match=f"^{path}: rows have the keys .*files"):
        choose_format(str(path), DataConfig())
    rows = rows_of(folder / "corpora" / "stack-v2", 4096)
    text = load_tokenizer(ASSETS / "tokenizer").decode(rows.row(0).input_ids.tolist())
    assert text.startswith("\n\n".join(texts(60, 40)[:3])) and sum(rows.corpus.documents) == 40
    done, read = sorted((folder / "raw" / "stack-v2-code").iterdir()), list[str]()
    done[1].rename(done[1].with_suffix(".part"))  # it was stopped in the second file
    run_the_pages_script(monkeypatch, write_hub(tmp_path / "hub"), read)
    assert done == sorted(done[0].parent.iterdir()) and len(read) == 60


def test_the_bundled_mixture_reads_all_six_and_resumes_on_other_numbers_of_processes(folder: Path) -> None:
    given = ["--job.config_file", str(folder / "mine.toml"), "--model.tokenizer_path", str(ASSETS / "tokenizer")]
    config = load_config(given, 512)
    assert [source.name for source in config.data.sources] == [*RECIPES] == [*FILES]
    sources = open_sources(config.data, None, load_tokenizer(ASSETS / "tokenizer").fingerprint, 16).sources
    mixture = Mixture(sources, 0, config.data.on_exhausted, in_documents=config.data.weights_in == "documents")

    def steps(batch: Batch, first: int, last: int) -> list[list[tuple[int, ...]]]:
        """The tokens of each step's rows, over all processes."""
        streams = [RowStream(mixture, batch, rank) for rank in range(batch.dp_degree)]
        each = [[part for stream in streams for part in stream.step(step * 1344)] for step in range(first, last)]
        return [sorted(tuple(row.tolist()) for part in step for row in part["input_ids"]) for step in each]

    at_once = steps(config.batch(512), 0, 3)  # of 21 rows on each of 64 data-parallel ranks
    assert steps(Batch(7, 6, 32), 1, 3) == at_once[1:] and steps(Batch(14, 1, 96), 1, 3) == at_once[1:]
    # of the documents that are read, each source has the share that the config says
    rows = Counter(mixture.find(number)[0].name for number in range(10 * 1344))
    corpora = {name: rows_of(folder / "corpora" / name, 16).corpus for name in RECIPES}
    documents = np.array([rows[name] * sum(c.documents) / sum(c.tokens) for name, c in corpora.items()])
    weights = [0.40, 0.44, 0.03, 0.02, 0.10, 0.01]
    assert documents / documents.sum() == pytest.approx(weights, abs=0.002)
    table = re.findall(r"^\| `([\w-]+)` \|.*\| 0\.(\d\d) \|$", PAGE, re.M)
    assert [(name, int(weight) / 100) for name, weight in table] == [*zip(RECIPES, weights, strict=True)]


@pytest.mark.full
def test_a_run_on_the_six_corpora_resumes_on_another_number_of_processes(folder: Path) -> None:
    tiny = f"""--model.flavor debug --model.tokenizer_path {ASSETS / "tokenizer"} --training.seq_len 64
        --training.steps 4 --training.mixed_precision_param float64 --parallelism.data_parallel_replicate_degree 1
        --checkpoint.interval 2 --parallelism.data_parallel_shard_degree -1 --parallelism.tensor_parallel_degree 1
        --validation.freq 2"""

    def losses(run: str, processes: int, *more: str) -> list[float]:
        given = ["--job.config_file", str(folder / "mine.toml"), "--job.run_folder", str(folder / run), *tiny.split()]
        given += ["--training.local_batch_size", str(8 // processes), "--checkpoint.keep_latest_k", "0", *more]
        done = torchrun("-m", "titan_mi100.train", *given, processes=processes, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        entries = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
        return [entry["loss"] for entry in entries if "loss" in entry]

    at_once = losses("at_once", 2)
    shutil.copytree(folder / "at_once", folder / "resumed")
    assert losses("resumed", 1, "--checkpoint.load_step", "2") == pytest.approx(at_once, rel=1e-10, abs=0)
