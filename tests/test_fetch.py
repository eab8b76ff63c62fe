"""scripts/corpora/fetch.py with a stand-in for huggingface_hub; revision, files and sizes are made up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, job_environment

HUB = """
import os
if os.environ["STATUS"] == "-1":
    raise ImportError("not installed")
from types import SimpleNamespace as Found
class HfApi:
    def dataset_info(self, repository, revision, files_metadata):
        if status := os.environ["STATUS"]:
            error = OSError("refused")
            error.response = Found(status_code=int(status)) if status != "0" else None
            raise error
        files = [("finemath-3plus/a.parquet", 1500), ("finemath-3plus/b.parquet", 2500), ("other/README.md", 7)]
        return Found(id=repository, sha="c0ffee", last_modified="2026-01-01", gated=False,
                     siblings=[Found(rfilename=name, size=size) for name, size in files])
"""


def fetch(tmp_path: Path, status: str = "", *more: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "hub").mkdir(parents=True)
    (tmp_path / "hub" / "huggingface_hub.py").write_text(HUB)
    (tmp_path / "work").mkdir()
    command = [sys.executable, str(REPO / "scripts/corpora/fetch.py"), "finemath", *(more or ("--dry_run",))]
    path = os.pathsep.join([str(tmp_path / "hub"), str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = {**job_environment(), "PYTHONPATH": path, "STATUS": status}
    return subprocess.run(command, env=environment, cwd=tmp_path / "work", capture_output=True, text=True, timeout=300)


def test_a_dry_run_prints_what_the_hub_says_and_writes_nothing(tmp_path: Path) -> None:
    done = fetch(tmp_path)
    assert done.returncode == 0 and "revision c0ffee" in done.stdout, done.stderr
    assert "finemath-3plus: 2 files, 4.0 kB" in done.stdout and "2 of 3 files, 4.0 kB" in done.stdout
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(("status", "remedy"), [("403", "accept the repository's terms"), ("404", "check the repos")])
def test_the_remedy_follows_from_the_hubs_answer(status: str, remedy: str, tmp_path: Path) -> None:
    done = fetch(tmp_path, status)
    assert done.returncode == 2 and remedy in done.stderr, done.stderr


def test_without_the_hub_a_dry_run_shows_the_recipe_and_a_download_fails(tmp_path: Path) -> None:
    for status, remedy in (("0", "OSError: refused; the hub did not answer"), ("-1", "pip install huggingface_hub")):
        done = fetch(tmp_path / status / "dry", status)
        assert done.returncode == 0 and remedy in done.stdout and "finemath-3plus/*.parquet of Hugging" in done.stdout
        assert "number and size of the files are not known\ncolumn for --text_column: text" in done.stdout
        done = fetch(tmp_path / status, status, "--output_dir", "out")
        assert done.returncode == 2 and remedy in done.stderr and not list((tmp_path / status / "work").iterdir())
