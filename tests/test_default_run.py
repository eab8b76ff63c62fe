"""The default run, `./run_train.sh` without arguments: what it trained for is what it can do at the end."""

import json
from pathlib import Path

import pytest
from conftest import REPO, torchrun


@pytest.mark.full
def test_the_default_run_answers_sums_that_it_was_not_trained_on(tmp_path: Path) -> None:
    config = (
        "--job.config_file",
        str(REPO / "train_configs" / "debug.toml"),
        "--job.run_folder",
        str(tmp_path / "run"),
    )
    # one process with the rows of two, because the test shares the machine's cores with others
    less = (
        "--training.local_batch_size",
        "2",
        "--validation.prompts",
        "100",
        "--validation.freq",
        "0",
        "--checkpoint.export_hf",
        "false",
    )
    torchrun("-m", "titan_mi100.train", *config, *less, processes=1)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 100
    assert sum(sample["answer"] == sample["reference"] for sample in samples) >= 93
