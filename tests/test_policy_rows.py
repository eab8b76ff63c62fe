"""Scored samples from their rows to a run: what is read and refused, the sampler's check, resumes, warnings."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_samples
import numpy as np
import pytest
from conftest import ASSETS

from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, DataConfig
from titan_mi100.data.answers import ADVANTAGE, SAMPLER, SCORE
from titan_mi100.data.columns import Findings
from titan_mi100.data.formats import choose_format
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.samples import Answer, Group, GroupStore, Sampled, Scored, advantages
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import Preempted, UserError
from titan_mi100.open_run.reference import check_sampler
from titan_mi100.open_run.run import Supervision
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.run.answers import PolicyWatch
from titan_mi100.tools import inspect_data

POLICY = "samples mask 0 0 0"
ANSWER = {"ids": [5, 6], "log_p": [-1.0, -2.0], "finish": "stop", "text": "a", "score": 1.0, "scores": {"number": 1.0}}
ROW = {"prompt": 0, "where": "f:1", "row": {"answer": "#### 1"}, "prompt_ids": [1, 2],
       "answers": [ANSWER, {**ANSWER, "score": 0.0}]}  # fmt: skip


def with_answer(**more: Any) -> dict[str, Any]:
    return {**ROW, "answers": [{**ANSWER, **more}, ANSWER]}


REFUSED = {
    "another key": ({**ROW, "rewards": [1, 0]}, "unknown key: rewards in a row of samples"),
    "no answers": ({**ROW, "answers": []}, "wrong number: 0 answers; expected 1 to 100"),
    "too many": ({**ROW, "answers": [ANSWER] * 101}, "wrong number: 101 answers"),
    "no prompt": ({key: own for key, own in ROW.items() if key != "prompt_ids"}, "missing key"),
    "an empty prompt": ({**ROW, "prompt_ids": []}, "bad token id: prompt_ids must be token ids, at least one"),
    "a negative id": ({**ROW, "prompt_ids": [-1]}, "bad token id"),
    "a boolean id": (with_answer(ids=[True, 2]), "bad token id: answer 1, ids"),
    "an empty answer": (with_answer(ids=[], log_p=[]), "bad token id: answer 1, ids"),
    "log p of other tokens": (with_answer(log_p=[-1.0]), "bad log p: answer 1: 1 log p for 2 ids"),
    "a probability": (with_answer(log_p=[0.5, -1.0]), "bad log p: answer 1: log_p[0] is 0.5"),
    "no log p": (with_answer(log_p=[None, -1.0]), "bad log p: answer 1: log_p[0] is None"),
    "another end": (with_answer(finish="eos"), "bad answer: answer 1: finish is 'eos'"),
    "a word as score": (with_answer(score="1"), "bad score: answer 1: 'score' is '1'"),
    "a yes as score": (with_answer(score=True), "bad score"),
    "a key of others": (with_answer(reward=1.0), "bad answer: answer 1: reward is missing or unknown"),
    "a text as answer": ({**ROW, "answers": ["a"]}, "bad answer: answer 1: no object"),
    "not scored": ({**ROW, "answers": [{k: v for k, v in ANSWER.items() if k not in ("score", "scores")}] * 2},
                   "no score: no answer has a score; run titan-mi100 score first"),
    "a number of a prompt": ({**ROW, "prompt": -1}, "wrong type: prompt must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_are_refused(case: str) -> None:
    row, words = REFUSED[case]
    with pytest.raises(BadRecord) as refused:
        choose_format("", DataConfig(), POLICY).read_row(row, frozenset(), Findings())
    assert words in str(refused.value), refused.value


def read(row: dict[str, Any], words: str = POLICY) -> tuple[list[int], str]:
    example = choose_format("", DataConfig(), words).read_row(row, frozenset(), Findings())
    return [number for number, _ in example.samples], example.idle


def test_which_answers_are_learned() -> None:
    cut, unscored = {**ANSWER, "finish": "length", "score": 0.3}, {**ANSWER, "score": None, "scores": {"number": None}}
    row = {**ROW, "answers": [ANSWER, cut, unscored, {**ANSWER, "score": 0.0}]}
    assert read(row) == ([0, 3], "") and read(row, "samples keep 0 0 0") == ([0, 1, 3], "")
    same = {**ROW, "answers": [ANSWER, cut | {"score": 1.0}]}
    assert read(same) == ([], "all answers have the same score") and read(same, "samples mask 0 0 1") == ([0], "")
    # of 2 tokens each; with 3 as the longest answer the last one costs a point
    assert read({**ROW, "answers": [ANSWER, {**ANSWER, "ids": [5, 6, 7], "log_p": [-1.0] * 3}]}, "samples shape 3 1 0")[
        0
    ] == [0, 1]
    with pytest.raises(BadRecord, match="longer than longest_answer: 2 tokens"):
        read(ROW, "samples mask 1 0 0")
    assert read({**ROW, "answers": [unscored] * 2}) == ([], "no answer could be scored")
    assert read({**ROW, "answers": [cut, {**cut, "score": 0.1}]}) == ([], "all answers with a score were cut off")


def test_advantages_of_equal_scores_are_zero_whatever_their_size() -> None:
    for how in ("mean", "std", "leave_one_out", "whitened"):
        assert advantages([1e8 + 0.1] * 5, how) == [0.0] * 5 and advantages([0.7], how) == [0.0]
        assert sum(advantages([0.1, 0.7, None, 0.3], how)) == pytest.approx(0, abs=1e-12)
    assert advantages([1.0, None, 0.0], "leave_one_out") == [1.0, 0.0, -1.0]


def config_of(tmp_path: Path, made: list[Group] | None = None, **more: str) -> Config:
    path = tmp_path / "samples.jsonl"
    if made is not None or not path.exists():
        made_samples.write(path, made or made_samples.groups(300, 24, 12))
    given = {
        "model.flavor": "debug", "model.tokenizer_path": str(ASSETS / "tokenizer"), "data.path": str(path),
        "data.cache_folder": str(tmp_path / "cache"), "training.seq_len": "64", "training.steps": "4",
        "training.gradient_accumulation_steps": "1", "training.mixed_precision_param": "float32",
        "job.run_folder": str(tmp_path / "run"), "objective.name": "policy", "objective.most_apart": "50",
        "metrics.enable_tensorboard": "false", "training.local_batch_size": "2", "optimizer.lr": "1e-2", **more,
    }  # fmt: skip
    return load_config([word for key, own in given.items() for word in (f"--{key}", own)], 1)


def test_rows_keep_the_ids_and_the_numbers_of_their_answers(tmp_path: Path, world: World) -> None:
    made = made_samples.groups(300, 24, 12)
    config = config_of(tmp_path, made, **{"data.validation_fraction": "0.3"})
    data = prepare_run(config, None)
    folder = tmp_path / "run"
    folder.mkdir()
    run = open_run(config, world, folder)
    table, seen = data.sources[0].rows.documents, 0  # type: ignore[attr-defined]
    for source in (*run.data.sources, *run.data.validation):
        for number in range(len(source.rows)):
            row = source.rows.row(number)
            for place, document in enumerate(source.rows.documents_of(number).tolist()):  # type: ignore[attr-defined]
                where = table.origins.where(document)
                group = made[int(where.rpartition(":")[2]) - 1]
                answer = group.answers[table.labels[document] - 1]
                inside = row.document_ids == place
                assert row.input_ids[inside].tolist() == group.prompt_ids + answer.ids
                learned = inside & (row.labels != -100)
                assert row.labels[learned].tolist() == answer.ids
                assert row.more[SAMPLER][learned].tolist() == answer.log_p
                expected = advantages([each.score for each in group.answers], "mean")[table.labels[document] - 1]
                assert {*row.more[ADVANTAGE][learned]} == {expected} and {*row.more[SCORE][learned]} == {answer.score}
                seen += 1
    assert seen == len(table.starts) - 1 > 40
    run.close()


@pytest.mark.full
def test_the_pass_goes_on_after_a_stop_and_a_resume_reads_it(world: World, tmp_path: Path, small_parts: None) -> None:
    config, folder = config_of(tmp_path), tmp_path / "run"
    folder.mkdir()
    stops = iter([False, False, True])
    with pytest.raises(Preempted, match=r"the sampler is complete in 2 of [0-9]+ parts, which are kept"):
        open_run(config, world, folder, Supervision(wants_to_stop=lambda: next(stops, False)))
    kept = {path: path.stat().st_mtime_ns for path in (folder / "sampler").glob("part-*")}
    assert len(kept) == 2
    run = open_run(config, world, folder)
    assert abs(run.step().measures["log_ratio"]) < 1e-6
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert abs(run.step().measures["log_ratio"]) > 1e-5
    run.save()
    straight = run.step().loss
    run.close()
    again = open_run(config, world, folder)  # resumes at step 2; the log p are those of step 0
    assert again.step().loss == straight
    again.close()
    with pytest.raises(UserError, match=r"differs from it: .*objective.advantage \(mean, now std\)"):
        open_run(config_of(tmp_path, **{"objective.advantage": "std"}), world, folder)
    made = made_samples.groups(300, 24, 12)
    better = made[0]._replace(answers=[Answer(**{**vars(a), "score": 9.0 - i}) for i, a in enumerate(made[0].answers)])
    with pytest.raises(UserError, match="data"):  # other scores are other data
        open_run(config_of(tmp_path, [better, *made[1:]]), world, folder)


def test_samples_of_another_model_stop_the_run(tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"apart on average, .* above objective.most_apart = 0.1; train the weights"):
        open_run(config_of(tmp_path, **{"objective.most_apart": "0.1"}), world, None)
    own = np.array([-1.0, np.nan, -2.0])
    with caplog.at_level("INFO"):
        check_sampler(own, np.array([-1.05, 7.0, -2.01]), 0.1)
    assert "log p of 2 sampled tokens" in caplog.text and "0.03 apart on average, 0.05 at most" in caplog.text


def test_a_file_that_changes_after_it_was_prepared_is_refused(tmp_path: Path, world: World) -> None:
    made, config = made_samples.groups(300, 24, 12), config_of(tmp_path)
    data = prepare_run(config, None)
    changes: list[tuple[list[Group], str]] = [
        (made[:-1], "has fewer rows than when it was prepared"),
        ([made[0]._replace(prompt_ids=[7]), *made[1:]], "has changed since it was prepared"),
        ([made[0]._replace(answers=made[0].answers[:1]), *made[1:]], "has changed since it was prepared"),
    ]
    for changed, words in changes:
        made_samples.write(tmp_path / "samples.jsonl", changed)
        with pytest.raises(UserError, match=words):
            open_run(config, world, None, data=data)


CONFIGS = {
    "k1": ({"objective.kl_weight": "1", "objective.kl": "k1"}, "k1 in the loss has no gradient on average"),
    "k3": ({"objective.kl_weight": "1", "objective.kl": "k3"}, "must be one of k2, ratio_k3; the gradient of k3"),
    "a kl that is off": ({"objective.kl": "ratio_k3"}, "no effect with kl_weight = 0"),
    "length": ({"objective.divisor": "length"}, "longest_answer is not set"),
    "shape": ({"objective.cut_off": "shape", "objective.longest_answer": "9"}, "cut_off_tokens is not set"),
    "a shape beyond": ({"objective.cut_off": "shape", "objective.longest_answer": "9",
                        "objective.cut_off_tokens": "10"}, "= 10 must be at most longest_answer = 9"),
    "clip": ({"objective.clip_low": "1.5"}, "must be at most 1"),
    "cispo": ({"objective.ratio": "cispo", "objective.clip_low": "0.1"}, 'no effect with ratio = "cispo"'),
    "of sft": ({"objective.name": "sft", "objective.most_apart": "0.1", "objective.divisor": "length"},
               'no effect with name = "sft"'),
    "dropout": ({"lora.rank": "2", "lora.dropout": "0.1"}, "= 0.1 disturbs the sums"),
    "cut": ({"data.overlong": "split"}, "would cut answers"),
    "format": ({"data.format": "tokens"}, "no effect with sampled answers, which are token ids"),
    "spikes": ({"training.skip_loss_spikes": "true"}, "the loss of a policy has no level"),
    "think blocks": ({"data.empty_think": "supervised"}, "no effect with sampled answers"),
    "duplicates": ({"data.duplicates": "drop"}, "equal ones are samples too; use keep"),
    "best": ({"checkpoint.keep_best": "true", "data.validation_fraction": "0.1"}, "the loss of a policy has no level"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_do_not_fit_each_other(case: str, tmp_path: Path) -> None:
    more, words = CONFIGS[case]
    with pytest.raises(UserError) as refused:
        config_of(tmp_path, **more)
    assert words in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        ((0.2, 0.1, 1.0), "log ratio 0.19, 10% of the tokens clipped (means of 20 steps); sample again from here"),
        ((0.01, 0.5, 1.0), "48% of the tokens clipped"),
        ((0.01, 0.1, 0.01), "its samples hardly differ, so their scores will not either"),
        ((0.01, 0.1, 1.0), ""),
    ],
)
def test_a_run_warns_once_of_what_goes_wrong(
    measures: tuple[float, ...], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = PolicyWatch()
    for step in range(1, 40):
        own = (0.0, 0.0, 0.2) if step == 1 else measures
        named = dict(zip(("log_ratio", "clipped", "entropy"), own, strict=True))
        watch.after_step(step, SimpleNamespace(skipped=False, measures=named))  # type: ignore[arg-type]
    said = [record.message for record in caplog.records]
    assert len(said) == bool(words) and all(words in message for message in said), said


SAMPLED = Sampled("samples", "w", "p", "t", 40, 2, 0, 12, [1], "float32", 8)


def stored(folder: Path) -> GroupStore:
    """A store of 40 prompts in two parts."""
    store = GroupStore(folder, SAMPLED)
    store.begin()
    made = [made_samples.groups(300, 1, 12, n)[0]._replace(prompt=n) for n in range(40)]
    for number in range(store.count):
        store.write(number, [made[n] for n in store.prompts_of(number)])
    return store


HARMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "other bytes": (lambda f: part(f).write_bytes(part(f).read_bytes()[:-1] + b" "), "is damaged; delete it"),
    "another part's name": (
        lambda f: part(f).rename(f / "part-00007-0123456789abcdef.jsonl"),
        "is no part of the samples",
    ),
    "two of a number": (
        lambda f: (f / "part-00000-0123456789abcdef.jsonl").write_text(""),
        "has the number of part-00000",
    ),
    "a stray": (lambda f: (f / "more.jsonl").write_text(""), "is no part of the samples in this folder"),
    "no store.json": (lambda f: (f / "store.json").unlink(), "holds no store.json"),
    "another format": (lambda f: change(f, format=2), "format = 2; name a folder with samples"),
    "other scores": (lambda f: change(f, kind="scores"), "kind = 'scores'"),
    "another key": (lambda f: change(f, more=1), "unknown key"),
    "a word as k": (lambda f: change(f, k="8"), "k = '8' must be a whole number"),
    "fewer prompts": (lambda f: change(f, count=39), "has other prompts than part"),
}


def part(folder: Path) -> Path:
    return sorted(folder.glob("part-*"))[-1]


def change(folder: Path, **more: Any) -> None:
    (folder / "store.json").write_text(json.dumps({**json.loads((folder / "store.json").read_text()), **more}))


@pytest.mark.parametrize("case", HARMED)
def test_a_store_that_was_harmed_is_refused(case: str, tmp_path: Path) -> None:
    harm, words = HARMED[case]
    folder = tmp_path / "samples"
    before = [group for number in range(2) for group in stored(folder).read(number)]
    again = GroupStore.open(folder, Sampled)
    assert again.is_complete and [group for number in range(2) for group in again.read(number)] == before
    with pytest.raises(UserError, match="made with another k"):
        GroupStore(folder, Sampled(**{**vars(SAMPLED), "k": 3}))
    with pytest.raises(UserError, match="name a folder with scores"):
        GroupStore.open(folder, Scored)
    harm(folder)
    with pytest.raises(UserError) as refused:
        [GroupStore.open(folder, Sampled).read(number) for number in range(2)]
    assert words in str(refused.value), refused.value


def test_the_data_page_has_the_scores_and_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_samples.groups(300, 24, 12)
    config = config_of(tmp_path, made)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert inspect_data.main(["--job.config_file", str(path), "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    every = [answer.score for group in made for answer in group.answers]
    scores = [score for score in every if score is not None]
    assert "Scores" in html and f"{len(every)} answers to 24 prompts" in html and f"best: <bdi>{max(scores):g} " in html
    assert f"{sum(scores) / len(scores):.3f}" in html
