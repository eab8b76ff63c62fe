"""Loss and bits per byte on held-out rows."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ASSETS, REPO, torchrun

from titan_mi100.config.layout import IGNORE
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.prepare import prepare_data
from titan_mi100.data.prepared import SetFacts
from titan_mi100.run.evaluate import bits_per_byte
from titan_mi100.text.load import load_tokenizer

TEXTS = ("größer 🙂", "再见！", "plain words of a text", "été, forêt")
CHAT = [
    {"messages": [{"role": "user", "content": text[::-1]}, {"role": "assistant", "content": text}]} for text in TEXTS
]
PLAIN = [{"text": text * n} for n, text in enumerate(TEXTS, start=1)]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def validated(rows: Sequence[str], folder: Path, processes: int) -> dict[str, float]:
    """Start one step of training without a change of the weights, and export them; what validation said."""
    torchrun(
        *("-m", "titan_mi100.train", "--job.config_file", str(REPO / "train_configs" / "debug.toml")),
        *("--job.run_folder", str(folder), "--training.steps", "1", "--optimizer.lr", "0", "--training.seq_len", "64"),
        *("--data.max_lost_share", "1", "--validation.prompts", "0"),
        *("--data.validation_fraction", "0", "--data.validation_path", ",".join(rows), "--metrics.enable_tensorboard"),
        *("false", "--training.mixed_precision_param", "float32", "--checkpoint.export_hf", "true"),
        processes=processes,
    )
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.full
def test_bits_per_byte_are_those_of_transformers_and_text_on_one_process_and_two(tmp_path: Path) -> None:
    paths = write(tmp_path / "chat.jsonl", CHAT), write(tmp_path / "plain.jsonl", PLAIN)
    found = [validated(paths, tmp_path / str(n), n) for n in (1, 2)]

    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    rows = prepare_data(DataConfig(path=paths), str(ASSETS / "tokenizer"), "", 64).train
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "1" / "hf-step-1", dtype=torch.float32)
    nats, spelled = 0.0, 0
    for index in range(len(rows)):
        row = rows.row(index)
        for number in range(row.document_ids.max() + 1):
            ids, labels = (array[row.document_ids == number] for array in (row.input_ids, row.labels))
            with torch.no_grad():
                log_p = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0].double(), -1)
            for place, label in enumerate(labels.tolist()):
                if label != IGNORE:
                    nats -= log_p[place, label].item()
                    spelled += len(tokenizer.token_bytes(label)) if label != tokenizer.eos_token_id else 0
    for each in found:
        assert each["bits_per_byte"] == pytest.approx(nats / math.log(2) / spelled, rel=1e-5)
    assert found[0]["bits_per_byte"] == pytest.approx(found[1]["bits_per_byte"], rel=1e-6)
    unlearned = sum(len(tokenizer.token_bytes(tokenizer.encode(text)[0])) for text in TEXTS)  # a text's first token
    assert spelled == sum(len(text.encode()) * (1 + n) for n, text in enumerate(TEXTS, start=1)) - unlearned


def test_where_nothing_is_spelled_there_are_no_bits_per_byte() -> None:
    assert bits_per_byte(2.0, SetFacts(1, 3, 3, 0, 1)) is None
    assert bits_per_byte(math.log(2), SetFacts(1, 8, 8, 2, 1)) == pytest.approx(4)
