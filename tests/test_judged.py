"""Validation by exact match: what is judged, what is refused; only the choice of the best depends on it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import torchrun
from test_corpus import TOKENIZER

from titan_mi100.config.load import load_config
from titan_mi100.errors import Preempted, UserError
from titan_mi100.open_run.run import Supervision
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.run import samples
from titan_mi100.run.progress import Progress
from titan_mi100.text.judge import judge_of
from titan_mi100.tools import exact_match
from titan_mi100.train import train

STEPS, FREQ = 12, 4


@pytest.mark.parametrize(
    ("judge", "text", "expected"),
    [
        ("number", "12 - 5 = 7", "7"),
        ("number", "none", None),
        ("text", " a b\n", "a b"),
        ("text", "", ""),
        ("regex:[A-D]", "A or B", "B"),
        ("regex:answer: ([a-z]+)( or)?", "answer: red, answer: blue or", "blue"),
        ("regex:(x)?y", "y", None),
        ("regex:[A-D]", "none", None),
    ],
)
def test_what_of_an_answer_is_compared(judge: str, text: str, expected: str | None) -> None:
    assert judge_of(judge)(text) == expected


def data(folder: Path) -> tuple[Path, Path]:
    """Rows whose answer is nearly always 7, and held-out ones of which five of eight are."""
    for name, count, other in (("train", 64, 16), ("held", 8, 3)):
        rows = [
            {"messages": [
                {"role": "user", "content": f"What is {n} and {name}?"},
                {"role": "assistant", "content": f"#### {8 if n % other == 1 else 7}"},
            ]}
            for n in range(count)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl", folder / "held.jsonl"


def settings(folder: Path, **more: object) -> list[str]:
    train_file, held = data(folder.parent)
    given = {
        "model.flavor": "debug", "model.tokenizer_path": TOKENIZER, "data.path": train_file, "optimizer.lr": "1e-2",
        "data.validation_path": held, "job.run_folder": folder, "training.seq_len": "96", "training.steps": STEPS,
        "training.gradient_accumulation_steps": 2, "training.mixed_precision_param": "float32",
        "validation.freq": FREQ, "metrics.enable_tensorboard": "false", "metrics.log_freq": 100,
        "checkpoint.keep_best": "true", "checkpoint.interval": 0, **more,
    }  # fmt: skip
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


JUDGED = {"validation.metric": "exact_match", "validation.prompts": 8, "validation.prompt_tokens": 12}


class Never:
    reason = ""


def trained(world: World, folder: Path, stop_at: int = 0, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = Supervision(wants_to_stop=lambda: bool(stop_at) and run.progress.step >= stop_at)
    run = open_run(load_config(settings(folder, **more), 1), world, folder, told)
    train(run, Never())  # type: ignore[arg-type]


def measured(folder: Path, key: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def state(folder: Path, step: int) -> Any:
    return json.loads((folder / f"checkpoint/step-{step}/trainer.json").read_text())["progress"]


EXPORTED = {**JUDGED, "checkpoint.export_hf": "true", "checkpoint.export_dtype": "float32"}


def folders(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name / "run" for name in names]


def weights(folder: Path) -> bytes:
    return (folder / f"checkpoint/step-{STEPS}/__0_0.distcp").read_bytes()


def test_the_best_is_chosen_by_right_answers_as_the_command_counts_them_and_training_does_not_notice(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, plain = folders(tmp_path, "judged", "plain")
    trained(world, judged, **EXPORTED)
    trained(world, plain)
    matches = measured(judged, "validation_exact_match")
    assert list(matches) == [1, FREQ, 2 * FREQ, STEPS] and 0 < matches[STEPS] < 1
    # what the samples say, by a judge of the test's own
    lines = [json.loads(line) for line in (judged / "samples.jsonl").read_text().splitlines()]
    for step, share in matches.items():
        pairs = [(line["answer"], line["reference"]) for line in lines if line["step"] == step]
        numbers = [[re.findall(r"\d+", text)[-1:] for text in pair] for pair in pairs]
        assert len(numbers) == 8 and share == sum(a == b for a, b in numbers) / 8
    # the command, on the export
    held = judged.parent / "gsm8k.jsonl"
    rows = [json.loads(line)["messages"] for line in (judged.parent / "held.jsonl").read_text().splitlines()]
    held.write_text("".join(json.dumps({"question": q["content"], "answer": a["content"]}) + "\n" for q, a in rows))
    capsys.readouterr()
    options = ["--model", str(judged / f"hf-step-{STEPS}"), "--data", str(held), "--max_new_tokens", "12", "--json"]
    assert exact_match.main([*options, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == matches[STEPS]

    counting = {step: share for step, share in matches.items() if step != 1}  # the early one does not count
    best = max(counting, key=lambda step: (counting[step], -step))
    kept = state(judged, STEPS)
    assert (kept["best_step"], kept["best_match"]) == (best, matches[best])
    assert kept["best_loss"] == measured(judged, "validation_loss")[best]
    assert (judged / "checkpoint/best").readlink() == Path(f"step-{best}")

    assert measured(plain, "validation_exact_match") == {} and "best_match" not in state(plain, STEPS)
    assert measured(plain, "loss") == measured(judged, "loss") and weights(plain) == weights(judged)


@pytest.mark.full
def test_it_resumes_to_the_bit_and_from_a_checkpoint_that_has_no_match(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, stopped, plain = folders(tmp_path, "judged", "stopped", "plain")
    trained(world, judged, **JUDGED)
    with pytest.raises(Preempted):
        trained(world, stopped, stop_at=FREQ + 2, **JUDGED)
    trained(world, stopped, **JUDGED)
    assert weights(stopped) == weights(judged) and state(stopped, STEPS) == state(judged, STEPS)
    for key in ("loss", "validation_exact_match"):
        assert measured(stopped, key) == measured(judged, key)

    trained(world, plain)
    said: list[str] = []
    monkeypatch.setattr("titan_mi100.open_run.rows.log.warning", said.append)
    trained(world, plain, **JUDGED, **{"training.steps": STEPS + FREQ})
    assert "the prepared rows, or what validation measures, have changed: the best so far is discarded" in said
    assert state(plain, STEPS + FREQ)["best_step"] == STEPS + FREQ


@pytest.mark.full
def test_early_stopping_and_the_export_follow_the_match(world: World, tmp_path: Path) -> None:
    """With a learning rate of 0 nothing gets better: the first one that counts stays the best."""
    [folder] = folders(tmp_path, "still")
    trained(world, folder, **EXPORTED, **{"optimizer.lr": 0, "validation.patience": 2})
    assert list(measured(folder, "validation_exact_match")) == [1, FREQ, 2 * FREQ, STEPS]
    assert (folder / f"hf-step-{FREQ}").is_dir() and (folder / "checkpoint/best").readlink() == Path(f"step-{FREQ}")


def test_the_highest_match_is_the_best_and_equal_ones_are_no_progress() -> None:
    progress, found = Progress(), list[bool]()
    for progress.step, (loss, match) in enumerate([(3.0, 0.0), (2.0, 0.5), (1.0, 0.5), (4.0, 0.75), (0.5, 0.25)], 1):
        found.append(progress.after_validation(loss, match=match))
    assert found == [True, True, False, True, False]
    assert (progress.best_step, progress.best_match, progress.best_loss) == (4, 0.75, 4.0)
    assert not progress.has_stopped_improving(2) and progress.has_stopped_improving(1)
    assert progress.describe_early_stop(9) == (
        "stopped early after step 5 of 9: step 4 has the highest exact match, 75.0%; "
        "1 validations in a row were not higher"
    )
    again = Progress.of_trainer_state(json.loads(json.dumps(progress.trainer_state())), Path("x"))
    assert again == progress
    assert "best_match" not in Progress(best_loss=1.0).trainer_state()["progress"]


NEEDS = 'validation.metric = "exact_match" needs '


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"validation.freq": 0}, f"{NEEDS}validation.freq, the steps between validations"),
        (
            {"validation.prompts": 0, "validation.prompt_tokens": 128},
            "needs validation.prompts, the number of held-out prompts",
        ),
        ({"validation.judge": "regex:("}, "validation.judge = 'regex:(' is no pattern of Python's re: missing ), unt"),
        ({"validation.judge": "regex:"}, 'must be "number", "text" or "regex:PATTERN"'),
        ({"validation.judge": "numbers"}, 'must be "number", "text" or "regex:PATTERN"'),
        ({"validation.metric": "accuracy"}, "must be one of: loss, exact_match"),
        ({"objective.name": "preference"}, 'pairs, labels, texts and loss = "all" have no right one; use "loss"'),
        ({"data.loss": "all"}, 'pairs, labels, texts and loss = "all" have no right one; use "loss"'),
        ({"data.format": "text"}, 'pairs, labels, texts and loss = "all" have no right one; use "loss"'),
        ({"validation.metric": "loss", "validation.judge": "text"}, 'has no effect with metric = "loss"'),
    ],
)
def test_a_metric_that_cannot_be_measured_is_refused(more: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(settings(tmp_path / "run", **{**JUDGED, **more}), 1)


def test_a_metric_needs_held_out_rows(tmp_path: Path) -> None:
    given = settings(tmp_path / "run", **JUDGED)
    at = given.index("--data.validation_path")
    with pytest.raises(UserError, match=re.escape(f"{NEEDS}data.validation_path or data.validation_fraction")):
        load_config(given[:at] + given[at + 2 :], 1)


def test_what_the_judge_does_not_find_is_left_out_and_said_and_the_cost_is_said_before(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(samples.log, level, said.append)
    folder = tmp_path / "run"
    run = open_run(load_config(settings(folder, **JUDGED, **{"validation.judge": "regex:#### 8"}), 1), world)
    assert run.sampler is not None and len(run.sampler.prompts) == 3
    key = '[validation] metric = "exact_match"'
    assert [line for line in said if line.startswith(key)] == [
        f"{key}: 5 of 8 prompts are left out: the judge finds nothing in the answer",
        f"{key}: each validation generates up to 3 prompts x 12 = 36 tokens",
    ]
    said.clear()
    open_run(load_config(settings(folder, **JUDGED | {"validation.prompt_tokens": 2}), 1), world)
    text = "8 of 8 right answers are longer than prompt_tokens = 2, so answers like them count as wrong; the longest"
    assert any(line.startswith(f"{key}: {text} has ") for line in said)
    with pytest.raises(UserError, match='no held-out answer has what judge = "regex:#### 9" compares; set another'):
        open_run(load_config(settings(folder, **JUDGED, **{"validation.judge": "regex:#### 9"}), 1), world)
    (tmp_path / "texts.jsonl").write_text('{"text": "one two three"}\n' * 20)
    texts = {"data.path": tmp_path / "texts.jsonl", "data.validation_path": tmp_path / "texts.jsonl"}
    with pytest.raises(UserError, match="no held-out row is a conversation; hold out others, or metric"):
        open_run(load_config(settings(folder, **JUDGED, **texts), 1), world)


@pytest.mark.full
def test_two_processes_measure_the_same(world: World, tmp_path: Path) -> None:
    """Of the same weights, which are not trained further: rounding grows in training."""
    before, alone = tmp_path / "before", tmp_path / "alone"
    trained(world, before, **EXPORTED)
    start = {"model.flavor": "", "checkpoint.initial_load_path": before / f"hf-step-{STEPS}", "optimizer.lr": "0"}
    start |= {"training.steps": 2, "validation.freq": 2}
    trained(world, alone, **{**JUDGED, **start})
    assert 0 < measured(alone, "validation_exact_match")[2] < 1
    for name in ("", "pipeline_parallel_degree", "tensor_parallel_degree"):
        both, layout = tmp_path / (name or "data"), {f"parallelism.{name}": 2} if name else {}
        accumulation = {"training.gradient_accumulation_steps": 2 if layout else 1}
        torchrun("-m", "titan_mi100.train", *settings(both, **{**JUDGED, **start, **layout, **accumulation}))
        assert measured(both, "validation_exact_match") == measured(alone, "validation_exact_match"), name
        assert measured(both, "loss") == pytest.approx(measured(alone, "loss"), rel=1e-4), name
