"""The default run, `./run_train.sh` without arguments: what it trained for is what it can do at the end."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import REPO, torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer


def least_lead(folder: Path, question: str, answer: str) -> float:
    """How far the answer's tokens are ahead of any other token, in nats: the least over its tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    turns.append({"role": "assistant", "content": answer})
    ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False).rstrip()).input_ids
    before = len(tokenizer(prompt).input_ids)
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0, before - 1 : -1]
    right = torch.tensor(ids[before:])[:, None]
    leads = scores.gather(1, right)[:, 0] - scores.scatter(1, right, -torch.inf).amax(1)
    return leads.min().item()


@pytest.mark.full
def test_the_default_run_answers_sums_that_it_was_not_trained_on(tmp_path: Path) -> None:
    """Also with another torch and other numbers of threads; see docs/TESTING.md."""
    command = ["-m", "titan_mi100.train", "--job.config_file", str(REPO / "train_configs/debug.toml")]
    command += ["--job.run_folder", str(tmp_path / "run")]
    # one process with the rows of two, because the test shares the machine's cores with others
    command += ["--training.local_batch_size", "2", "--validation.prompts", "100", "--validation.freq", "0"]
    torchrun(*command, processes=1)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 100
    assert sum(sample["answer"] == sample["reference"] for sample in samples) >= 99

    (question,) = re.findall(r'hf-step-1000 --prompt "(.*)"', (REPO / "README.md").read_text())
    answer = re.search(rf"{re.escape(question)}\"\n```\n```\n.*\n(.*\.)\n", (REPO / "docs/TOUR.md").read_text())
    assert answer and least_lead(tmp_path / "run" / "hf-step-1000", question, answer[1]) >= 1
