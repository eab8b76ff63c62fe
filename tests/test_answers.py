"""Rows of preference data: every form that people have, the traps, how they are packed, and the real commands."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ASSETS

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, DataConfig
from titan_mi100.data.answers import LABELS, PAIRS
from titan_mi100.data.columns import Findings
from titan_mi100.data.formats import choose_format
from titan_mi100.data.prepare import prepare_data, prepare_run
from titan_mi100.data.prepared import PackedDataset, Prepared
from titan_mi100.data.prompts import held_out_prompts
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import Preempted, UserError
from titan_mi100.open_run.run import Supervision
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.run.answers import PreferenceWatch
from titan_mi100.tools import inspect_data

ASK, GOOD, BAD = "2 + 3?", "5", "6"
USER = {"role": "user", "content": ASK}
SYSTEM = {"role": "system", "content": "Be brief."}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS = {
    "texts": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "messages": {"prompt": [USER], "chosen": [says(GOOD)], "rejected": [says(BAD)]},
    "no prompt": {"chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)]},
    "ultrafeedback": {
        "prompt": ASK, "prompt_id": "x", "chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)],
        "messages": [USER, says(GOOD)], "score_chosen": 8.0, "score_rejected": 3.5,
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": ASK}], "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "alpaca": {"instruction": "2 +", "input": "3?", "chosen": GOOD, "rejected": BAD},
    "axolotl": {"messages": [USER], "chosen": says(GOOD), "rejected": says(BAD)},
    "system beside a conversation": {
        "system": "Be brief.", "chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)],
        "chat_template_kwargs": {"enable_thinking": None},
    },
    "orca": {"system": "Be brief.", "question": ASK, "chosen": GOOD, "rejected": BAD},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair(form: str) -> None:
    example = choose_format("", DataConfig(), PAIRS).read_row(FORMS[form], frozenset(), Findings())
    prompt = [{"role": "user", "content": "2 +\n3?"}] if form == "alpaca" else [USER]
    prompt = [SYSTEM, *prompt] if "system" in FORMS[form] else prompt
    assert (example.messages, example.rejected) == ([*prompt, says(GOOD)], [*prompt, says(BAD)])
    assert example.idle == ""


REFUSED = {
    "no chosen": ({"prompt": ASK, "rejected": BAD}, "missing key: the row has no chosen"),
    "blank": ({"prompt": ASK, "chosen": GOOD, "rejected": " "}, "nothing to learn: rejected is blank"),
    "two prompts": ({"prompt": ASK, "question": "?", "chosen": GOOD, "rejected": BAD}, "two prompts: it is given in"),
    "none": ({"chosen": GOOD, "rejected": BAD}, "no prompt: expected one of"),
    "another one": (
        {"prompt": "4 + 4?", "chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)]},
        "two prompts: prompt is not the prompt that chosen and rejected begin with",
    ),
    "different questions": (
        {"chosen": [USER, says(GOOD)], "rejected": [{**USER, "content": "?"}, says(BAD)]},
        "other prompts: chosen and rejected begin differently",
    ),
    "ends with the user": (
        {"chosen": [USER, says(GOOD)], "rejected": [USER, USER]}, "no answer: rejected ends with the user",
    ),
    "scores": (
        {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "score_chosen": 1, "score_rejected": 2},
        "contradiction: score_chosen = 1 is below",
    ),
    "prompt ends with an answer": (
        {"messages": [USER, says("1")], "chosen": says(GOOD), "rejected": says(BAD)}, "two answers: the prompt ends",
    ),
    "a number": ({"prompt": ASK, "chosen": 5, "rejected": BAD}, "wrong type: chosen must be a text"),
    "a part": ({"prompt": ASK, "context": "sums", "chosen": GOOD, "rejected": BAD}, "part not read: context"),
    "history beside a conversation": (
        {"history": [["a", "b"]], "chosen": [USER, says(GOOD)], "rejected": [USER, says(BAD)]},
        "part not read: history beside the conversation",
    ),
    "input beside messages": (
        {"prompt": [USER], "input": "all of it", "chosen": GOOD, "rejected": BAD}, "part not read: input beside prompt",
    ),
    "two systems": (
        {"system": "A", "messages": [SYSTEM, USER], "chosen": GOOD, "rejected": BAD}, "two system messages: one is",
    ),
    "no message": ({"prompt": ASK, "chosen": [1], "rejected": BAD}, "chosen: message 1: must be an object"),
    "a label": (FORMS["texts"] | {"label": True}, "preference: label in a row of format pairs"),
    "by row": (
        {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "chat_template_kwargs": {"enable_thinking": False}},
        "unknown key: chat_template_kwargs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_traps_are_refused(case: str) -> None:
    row, words = REFUSED[case]
    with pytest.raises(BadRecord) as refused:
        choose_format("", DataConfig(), PAIRS).read_row(row, frozenset(), Findings())
    assert words in f"{refused.value.kind}: {refused.value.detail}"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(tmp_path: Path, rows: Sequence[dict[str, Any]], answers: str, seq_len: int = 64, **given: Any) -> Prepared:
    path = write(tmp_path / "rows.jsonl", rows)
    config = DataConfig(path=(str(path),), cache_folder=str(tmp_path / "cache"), **given)
    return prepare_data(config, str(ASSETS / "tokenizer"), "", seq_len, answers=answers)


def texts_of(data: Prepared) -> list[list[str]]:
    """Of each row the learned text of each document."""
    from titan_mi100.text.load import load_tokenizer

    tokenizer, rows = load_tokenizer(str(ASSETS / "tokenizer")), data.train
    found = [list(rows.row(index).documents()) for index in range(len(rows))]
    return [[tokenizer.decode(ids[learned].tolist()) for ids, learned in documents] for documents in found]


def test_pairs_share_rows_and_only_answers_are_learned(tmp_path: Path) -> None:
    early = {"chosen": [USER, says("a"), USER, says("b")], "rejected": [USER, says("c"), USER, says("d")]}
    same = {"prompt": ASK, "chosen": GOOD, "rejected": GOOD}
    long = {"prompt": "long " * 60, "chosen": GOOD, "rejected": BAD}
    rows = [FORMS["texts"], same, FORMS["ultrafeedback"] | {"score_rejected": 8}, early, long, FORMS["texts"]]
    data = prepared(tmp_path, [*rows, *[{**FORMS["texts"], "prompt": f"{i}?"} for i in range(9)]], PAIRS, 96)
    for texts in texts_of(data):
        assert len(texts) % 2 == 0
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            assert (chosen, rejected) in {
                ("5<|im_end|>", "6<|im_end|>"),
                ("a<|im_end|>b<|im_end|>", "c<|im_end|>d<|im_end|>"),
            }
    assert isinstance(data.train, PackedDataset) and data.train.documents.labels is not None
    assert data.train.documents.labels.tolist() == [1, -1] * 12
    told = "\n".join(data.facts.summary)
    for words in (
        "15 rows read", "both answers are the same: 1", "both answers have the same score: 1", "longer than seq_len: 1",
        "duplicate: 1 row",
    ):  # fmt: skip
        assert words in told, words
    assert "differ before the last turn" in data.ledger().read_text()


def test_answers_with_a_label(tmp_path: Path) -> None:
    rows = [{"prompt": ASK, "completion": GOOD, "label": True}, {"prompt": ASK, "completion": BAD, "label": False}]
    data = prepared(tmp_path, rows, LABELS)
    assert isinstance(data.train, PackedDataset) and data.train.documents.labels is not None
    assert data.train.documents.labels.tolist() == [1, -1]
    kto = [{"messages": [USER, says("first"), USER, says(GOOD)], "kto_tag": False}]
    assert texts_of(prepared(tmp_path, kto, LABELS)) == [["5<|im_end|>"]]  # the label is that of the last answer
    for row, words in (
        (rows[0] | {"label": 1}, "label must be true or false, is a number"),
        ({"prompt": ASK, "completion": GOOD}, r"expected label \(true or false\)"),
    ):
        with pytest.raises(UserError, match=words):
            prepared(tmp_path, [row], LABELS)


def test_pairs_that_teach_nothing_are_not_lost_to_seq_len_and_no_prompt_expects_a_rejected_answer(
    tmp_path: Path,
) -> None:
    ties = [
        {"prompt": f"{i}?", "chosen": GOOD, "rejected": BAD, "score_chosen": 1, "score_rejected": 1} for i in range(9)
    ]
    data = prepared(tmp_path, [*ties, FORMS["texts"], {"prompt": "long " * 60, "chosen": GOOD, "rejected": BAD}], PAIRS)
    assert data.train_counts.documents == 2 and not any("data.overlong" in line for line in data.facts.warnings)
    with pytest.raises(UserError, match=r"no row is left to train on") as refused:
        prepared(tmp_path, [{"prompt": "long " * 60, "chosen": GOOD, "rejected": BAD}], PAIRS)
    assert "raise training.seq_len" in str(refused.value) and "split" not in str(refused.value)
    [prompt] = held_out_prompts([data.train], 9)
    assert [*prompt.ids, *prompt.reference] == (data.train.documents[0] >> 1).tolist()[:-1]  # but the line end


def test_a_reference_belongs_to_the_form_of_its_base(world: World, tmp_path: Path) -> None:
    adapters = {"lora.rank": "2", "lora.dropout": "0"}
    open_run(config_of(tmp_path, **adapters), world, folder_of(config_of(tmp_path))).close()
    with pytest.raises(UserError, match=r"was made of other weights; delete .*reference"):
        open_run(config_of(tmp_path, **adapters, **{"lora.base": "nf4"}), world, folder_of(config_of(tmp_path)))


def test_a_pair_is_never_cut(tmp_path: Path) -> None:
    long = {"prompt": ASK, "chosen": "word " * 50, "rejected": BAD}
    with pytest.raises(UserError, match=r"tokens, seq_len is 64; raise it, or set data.overlong to drop"):
        prepared(tmp_path, [FORMS["texts"], long], PAIRS, overlong="error")
    data = prepared(tmp_path, [FORMS["texts"], long], PAIRS, max_lost_share=1.0)
    assert data.train_counts.documents == 2


def test_thinking_of_one_answer_makes_its_absence_a_part_of_the_other(tmp_path: Path) -> None:
    rows = [
        {"prompt": [USER], "chosen": [{**says(GOOD), "reasoning_content": "two and three"}], "rejected": [says(BAD)]}
    ]
    for given in (rows, [{**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}]):
        [texts] = texts_of(prepared(tmp_path, given, PAIRS, 128))
        assert sorted(texts) == [
            "<think>\n\n</think>\n\n6<|im_end|>",
            "<think>\ntwo and three\n</think>\n\n5<|im_end|>",
        ]
    [texts] = texts_of(prepared(tmp_path, [FORMS["texts"]], PAIRS, 128))
    assert texts == ["5<|im_end|>", "6<|im_end|>"]


def config_of(tmp_path: Path, **more: str) -> Config:
    rows = [{"prompt": f"{i} + 3?", "chosen": str(i + 3), "rejected": str(i)} for i in range(40)]
    path = write(tmp_path / "pairs.jsonl", rows)
    given = {
        "model.flavor": "debug", "model.tokenizer_path": str(ASSETS / "tokenizer"), "data.path": str(path),
        "data.cache_folder": str(tmp_path / "cache"), "data.validation_fraction": "0.2", "training.seq_len": "64",
        "training.steps": "4", "training.gradient_accumulation_steps": "1",
        "training.mixed_precision_param": "float32", "job.run_folder": str(tmp_path / "run"),
        "objective.name": "preference", "metrics.enable_tensorboard": "false", "training.local_batch_size": "2", **more,
    }  # fmt: skip
    return load_config([word for key, value in given.items() for word in (f"--{key}", value)], 1)


def folder_of(config: Config) -> Path:
    Path(config.job.run_folder).mkdir(exist_ok=True)
    return Path(config.job.run_folder)


@pytest.mark.full
def test_a_reference_is_made_once_goes_on_after_a_stop_and_is_refused_if_stale(
    world: World, tmp_path: Path, small_parts: None
) -> None:
    config = config_of(tmp_path)
    folder, stops = folder_of(config), iter([False, False, True])
    with pytest.raises(Preempted, match=r"the reference is complete in 2 of [0-9]+ parts, which are kept"):
        open_run(config, world, folder, Supervision(wants_to_stop=lambda: next(stops, False)))
    kept = {path: path.stat().st_mtime_ns for path in (folder / "reference").glob("part-*")}
    assert len(kept) == 2
    run = open_run(config, world, folder)
    first = run.step()
    assert first.loss == pytest.approx(np.log(2), abs=1e-7) and abs(first.measures["margin"]) < 1e-6
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    second = run.step()
    assert abs(second.measures["margin"]) > 1e-6
    run.save()
    straight = run.step().loss
    run.close()
    again = open_run(config, world, folder)  # resumes at step 2; the reference is that of step 0
    assert again.step().loss == straight
    again.close()
    with pytest.raises(UserError, match=r"differs from it: objective.beta \(0.1, now 0.3\)"):
        open_run(config_of(tmp_path, **{"objective.beta": "0.3"}), world, folder)
    for change, words in (({"weights": "x"}, "other weights"), ({"tokens": "x"}, "other rows")):
        about = folder / "reference" / "store.json"
        before = about.read_text()
        about.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(UserError, match=f"was made of {words}.*; delete .*reference: it is made again"):
            open_run(config, world, folder)
        about.write_text(before)
    for path in (folder / "reference").iterdir():
        path.unlink()
    (folder / "reference").rmdir()
    again = open_run(config, world, folder)  # made again from the weights that training started from
    assert again.step().loss == straight
    again.close()


CONFIGS = {
    "no teacher": ({"objective.name": "distill"}, "objective.teacher: is not set"),
    "no effect": ({"objective.gamma": "2"}, "objective.gamma: = 2.0 has no effect"),
    "of sft": ({"objective.name": "sft", "objective.beta": "1"}, "objective.beta: = 1.0 has no effect"),
    "cut": ({"data.overlong": "split"}, 'data.overlong: = "split" would cut answers'),
    "dropout": ({"lora.rank": "2", "lora.dropout": "0.1"}, "lora.dropout: = 0.1 disturbs"),
    "unrolled": ({"data.earlier_thinking": "unroll"}, 'data.earlier_thinking: = "unroll" makes several'),
    "format": ({"data.format": "messages"}, 'data.format: = "messages" has no effect with pairs of answers'),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_do_not_fit_each_other(case: str, tmp_path: Path) -> None:
    more, words = CONFIGS[case]
    with pytest.raises(UserError) as refused:
        config_of(tmp_path, **more)
    told = (
        str(refused.value).replace("[objective] ", "objective.").replace("[data] ", "data.").replace("[lora] ", "lora.")
    )
    assert words.replace(": ", " ", 1) in told or words in told, told


def measured(accuracy: float, chosen: float, margin: float, *kl: float) -> Any:
    names = ("accuracy", "reward_chosen", "margin", "below_reference")
    return SimpleNamespace(skipped=False, measures=dict(zip(names, (accuracy, chosen, margin, *kl), strict=False)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.0, 0.1, 0.1), "every pair was right within three steps"),
        ((0.7, -0.6, 0.2, 1.0), "the chosen answers have become less likely (reward -0.57"),
        ((0.9, 0.1, 25.0), "the margin is 24: nearly all pairs are learned"),
        ((0.9, 0.1, 1.0, 1.0), ""),
        ((0.0, 0.1, -1.0, 1.0), "2% of the answers are on the right side (mean of 20 steps; half is chance)"),
        ((0.9, -2.0, 1.0), ""),  # without a reference the reward is a level, not a change
    ],
)
def test_a_run_warns_once_of_what_goes_wrong(
    values: tuple[float, ...], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = PreferenceWatch()
    for step in range(1, 60):
        watch.after_step(step, measured(0.5, 0.0, 0.0) if step == 1 else measured(*values))
    said = [record.message for record in caplog.records]
    assert len(said) == bool(words) and all(words in message for message in said)


def arguments_of(config: Config) -> list[str]:
    folder, (path,) = config.tokenizer_path(), config.data.path
    given = {"model.flavor": "debug", "model.tokenizer_path": folder, "data.path": path, "training.seq_len": "64"}
    given["objective.name"] = "preference"
    return [word for key, value in given.items() for word in (f"--{key}", value)]


def test_rows_that_teach_something_else_are_warned_of(tmp_path: Path) -> None:
    def warned(rows: list[dict[str, Any]], **more: str) -> str:
        path = write(tmp_path / "rows.jsonl", rows)
        return "\n".join(prepare_run(config_of(tmp_path, **{"data.path": str(path), **more}), None).facts.warnings)

    single = {"objective.loss": "apo_zero_unpaired"}
    rows = [{"prompt": f"{i} + 3?", "completion": str(i + 3), "label": i % 2 == 0} for i in range(40)]
    assert "every label" not in warned(rows, **single)
    for label in (True, False):
        words = warned([{**row, "label": label} for row in rows], **single)
        assert f"every label is {str(label).lower()}: nothing is compared" in words
    pairs = [{"prompt": f"{i} + 3?", "chosen": str(i + 3), "rejected": str(i)} for i in range(40)]
    assert "begin with the question" not in warned(pairs)
    again = [row | {name: f"{row['prompt']}\n{row[name]}" for name in ("chosen", "rejected")} for row in pairs[:3]]
    messages = {"prompt": [{"role": "user", "content": "7 + 7?"}], "chosen": "7 + 7? 14", "rejected": "7 + 7? 15"}
    words = warned([*again, messages, *pairs[3:], {"prompt": "x", "chosen": "x is right", "rejected": "no"}])
    assert "4 rows with answers that both begin with the question" in words and "rows.jsonl:1;" in words


def test_the_data_page_shows_both_answers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments_of(config_of(tmp_path))
    assert inspect_data.main([*given, "--row", "0"]) == 0
    text = capsys.readouterr().out
    assert "── pair 0, chosen: " in text and "── pair 0, rejected: " in text
    assert inspect_data.main([*given, "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert html.count('<div class="pair"><div><h3>chosen: ') == html.count("</div><div><h3>rejected: ") > 0
    assert html.count("<small class=l>learned: answer</small>") == 2 * html.count('<div class="pair">')
