"""Held-out prompts that are answered during training: which, with which words, and that training does not notice.

That all layouts answer alike is a column of the parity table (test_layouts.py)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ASSETS, random_documents
from gloo.job_parity import open_split
from packed_rows import packed
from test_corpus import TOKENIZER, write
from test_generate import SPECS, reference, said_by_transformers
from test_metrics import open_reporter
from torch._dynamo.utils import counters

from titan_mi100.config.load import load_config
from titan_mi100.data.corpora.corpus import CorpusRows, read_corpus
from titan_mi100.data.prompts import Prompt, held_out_prompts, prompt_of
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.open_run import start as open_run
from titan_mi100.open_run.run import Supervision
from titan_mi100.parallel.distributed import World
from titan_mi100.run.metrics import sample_line
from titan_mi100.run.samples import answer_greedily, until_stop
from titan_mi100.run.sinks import Explanation, TensorBoard
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools import prepare_corpus


@pytest.mark.parametrize(
    ("supervised", "asked"),
    [
        ("..##.##.", 2),  # a conversation of two turns: the first
        ("....####", 4),
        ("#######.", None),  # a text, learned from its beginning
        (".#######", None),
        ("########", None),
        ("#..##...", 3),  # nothing predicts a first token, so it is never learned
    ],
)
def test_the_prompt_is_what_comes_before_the_first_turn(supervised: str, asked: int | None) -> None:
    ids, marks = np.arange(10, 18), np.array([mark == "#" for mark in supervised])
    stop = len(supervised) if asked is None else asked + len(supervised[asked:].split(".")[0])
    start = 4 if asked is None else asked
    assert prompt_of(ids, marks) == Prompt(list(range(10, 10 + start)), list(range(10 + start, 10 + stop)))


def test_sets_are_asked_in_turn_and_in_the_order_of_their_input() -> None:
    lengths = [5, 20, 9, 31, 4]
    one, other = (packed(random_documents(300, lengths[:n], seed=n), 32) for n in (5, 2))
    assert one.documents_of(0)[0] == 3  # the longest opens a row
    found = held_out_prompts([one, other], 6)
    assert held_out_prompts([one, other], 100)[:6] == found
    assert len(held_out_prompts([one, other], 100)) == 7
    whole = [np.array([*prompt.ids, *prompt.reference]) for prompt in found]
    for place, (rows, number) in enumerate([(one, 0), (other, 0), (one, 1), (other, 1), (one, 2), (one, 3)]):
        document = rows.documents[number] >> 1
        assert (document[: len(whole[place])] == whole[place]).all()


def test_a_text_of_a_corpus_is_continued_from_its_half(tmp_path: Path) -> None:
    texts = [" ".join(["seven"] * count) for count in (8, 3, 6)]
    arguments = ["--input", str(write(tmp_path / "a.jsonl", texts)), "--tokenizer", TOKENIZER]
    assert prepare_corpus.main([*arguments, "--output_dir", str(tmp_path / "corpus")]) == 0
    corpus, tokenizer = read_corpus(tmp_path / "corpus")[0], load_tokenizer(TOKENIZER)
    for concatenated in (False, True):
        rows = CorpusRows(tmp_path / "corpus", corpus, 256, range(1), concatenated)
        prompts = held_out_prompts([rows], 3)
        assert len(prompts) == (1 if concatenated else 3)
        if not concatenated:
            assert [tokenizer.decode(prompt.ids + prompt.reference) for prompt in prompts] == [
                text + "<|endoftext|>" for text in texts
            ]
        assert all(0 <= len(prompt.reference) - len(prompt.ids) <= 1 for prompt in prompts)


@pytest.mark.parametrize("is_whole", [True, False])
def test_answers_are_those_of_transformers(is_whole: bool, world: World) -> None:
    """With and without a cache, with a stop token, with limits of their own, and with prompts that share forwards."""
    spec = SPECS["tied"]
    hf = reference(spec)
    weights = {name: value for name, value in hf.state_dict().items() if name != "lm_head.weight"}
    case = {"spec": spec, "weights": weights, "documents": random_documents(720, [40, 30]), "seq_len": 64}
    run = open_split(world, case, {"local_batch_size": 2, "accumulation": 1})
    generator = torch.Generator().manual_seed(3)
    lengths, limits = [1, 13, 40, 70, 5], [12, 12, 1, 9, 12]
    prompts = [torch.randint(0, 720, (length,), generator=generator).tolist() for length in lengths]
    free = [said_by_transformers(hf, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    assert run.model.is_whole and answer_greedily(run.model, prompts, limits, (), run.stream) == free
    run.model.is_whole = is_whole
    assert answer_greedily(run.model, prompts, limits, (), run.stream) == free
    assert len({tuple(answer) for answer in free}) == len(free) and len(free[0]) == 12

    stop = free[0][5]
    stopped = answer_greedily(run.model, prompts, limits, {stop}, run.stream)
    assert stopped == [until_stop(answer, {stop}) for answer in free] and len(stopped[0]) <= 5

    most = max(free[0]) - 1  # a tokenizer that lacks the model's last ids
    within = answer_greedily(run.model, prompts, limits, (), run.stream, vocabulary=most)
    assert within is not None and within != free and max(map(max, within)) < most


def test_answers_are_given_up_when_a_process_is_told_to_stop(world: World) -> None:
    spec = SPECS["tied"]
    weights = {name: value for name, value in reference(spec).state_dict().items() if name != "lm_head.weight"}
    case = {"spec": spec, "weights": weights, "documents": random_documents(720, [40, 30]), "seq_len": 64}
    run = open_split(world, case, {"local_batch_size": 2, "accumulation": 1})
    asked = iter([False, False, True])
    found = answer_greedily(run.model, [[1, 2]], [9], (), run.stream, stop=lambda: next(asked))
    assert found is None and list(asked) == []
    assert run.model.parts[0].training


def settings(folder: Path, **more: str) -> list[str]:
    given = {
        "model.flavor": "debug", "model.tokenizer_path": TOKENIZER, "data.path": str(ASSETS / "arithmetic.jsonl"),
        "data.validation_fraction": "0.02", "optimizer.lr": "2e-3", "job.run_folder": str(folder),
        "training.seq_len": "128", "training.steps": "3", "training.gradient_accumulation_steps": "2",
        "training.mixed_precision_param": "float32", **more,
    }  # fmt: skip
    return [word for key, value in given.items() for word in (f"--{key}", value)]


def trained(world: World, folder: Path, **more: str) -> dict[str, Any]:
    """Three steps with a validation after each: weights, its losses, torch's random state, what was compiled."""
    folder.mkdir(parents=True)
    torch._dynamo.reset()
    counters.clear()
    run = open_run.open_run(load_config(settings(folder, **more), 1), world, folder)
    for _ in range(3):
        run.step()
        run.validate()
    run.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    found["losses"] = torch.tensor([line.get("validation_loss", line.get("loss")) for line in lines])
    found["graphs"] = torch.tensor(counters["stats"]["unique_graphs"])
    return {**found, "random state": torch.get_rng_state()}


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_training_does_not_notice_samples(compiled: bool, world: World, tmp_path: Path) -> None:
    """Rows of other lengths must not make compiled code that the next step would run."""
    more = {"lora.rank": "4", "lora.dropout": "0.2"}
    if compiled:
        more |= {"compile.enable": "true", "compile.backend": "aot_eager"}
    without = trained(world, tmp_path / "without", **more)
    assert bool(without["graphs"]) == compiled and not (tmp_path / "without/samples.jsonl").exists()
    found = trained(world, tmp_path / "with", **more, **{"validation.prompts": "3", "validation.prompt_tokens": "4"})
    samples = [json.loads(line) for line in (tmp_path / "with/samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(sample["prompt"][0]["content"].startswith("<|im_start|>user\n") for sample in samples)
    assert all("####" in sample["reference"] and "<|im_end|>" not in sample["reference"] for sample in samples)
    assert found.keys() == without.keys()
    for name, value in without.items():
        assert torch.equal(found[name], value), name


def test_a_validation_whose_samples_were_given_up_is_still_due(world: World, tmp_path: Path) -> None:
    config = load_config(settings(tmp_path, **{"validation.prompts": "2"}), 1)
    told = iter([False, *[True] * 9])  # while the loss is computed, then while samples are
    run = open_run.open_run(config, world, tmp_path)
    run.supervision = Supervision(wants_to_stop=lambda: next(told))
    assert run.validate() is False and run.progress.validation_due
    run.close()
    assert not (tmp_path / "samples.jsonl").exists() and (tmp_path / "metrics.jsonl").read_text() == ""


def test_samples_that_are_made_again_are_recorded_once(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"prompt": [{"role": "prompt", "content": "é" * 100_000}], "reference": "b"}
    for last_step, due, step in ((0, False, 2), (2, False, 4), (2, False, 6), (2, True, 2)):
        reporter = open_reporter(tmp_path, 9, last_step, due)
        reporter.samples(step, [{**entry, "answer": str(step)}])
        reporter.close()
        lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == ([2] if due or not last_step else [2, step])


def test_samples_are_shown_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = open_reporter(tmp_path, 9)
    reporter._sinks = [TensorBoard(tmp_path / "tensorboard", Explanation({}, {}), 0)]
    entry = {"prompt": [{"role": "prompt", "content": "2 + 2\n="}], "reference": "4", "answer": "five"}
    reporter.samples(3, [entry])
    reporter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [shown] = events.Tensors("samples/1/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 3 and "    2 + 2\n    =" in text and "five" in text


def test_prompts_need_a_validation_set() -> None:
    given = settings(Path("x"), **{"validation.prompts": "2"})
    place = given.index("--data.validation_fraction")
    with pytest.raises(UserError, match=r"validation.prompts = 2 needs data.validation_path or"):
        load_config(given[:place] + given[place + 2 :], 1)
    with pytest.raises(UserError, match="prompt_tokens = 9 has no effect"):
        load_config(settings(Path("x"), **{"validation.prompt_tokens": "9"}), 1)


def test_the_log_shows_question_and_answer_and_where_they_differ_what_was_expected() -> None:
    prompt = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    entry = {"prompt": [{"role": "prompt", "content": prompt}], "reference": "4.", "answer": "4."}
    assert sample_line(1, entry) == "prompt 1: '2 + 2?'  answer: '4.'  (as expected)"
    assert sample_line(2, {**entry, "answer": "4"}) == "prompt 2: '2 + 2?'  answer: '4'  (expected: '4.')"
    text = {**entry, "prompt": [{"role": "prompt", "content": "a" * 500 + "the end"}]}
    assert sample_line(1, text).startswith("prompt 1: 'aaa") and "the end'  answer" in sample_line(1, text)


def test_the_log_counts_the_answers_that_are_as_expected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = open_reporter(tmp_path, 9)
    entry = {"prompt": [{"role": "prompt", "content": "2 + 2 ="}], "reference": "4", "answer": "4"}
    log.propagate = True
    try:
        with caplog.at_level("INFO"):
            reporter.samples(3, [entry, {**entry, "answer": "5"}])
    finally:
        log.propagate = False
        reporter.close()
    assert caplog.messages[-1] == "step 3  1 of 2 held-out prompts are answered exactly as expected"
