"""`titan-mi100 config new`: five answers, a config that the planner has checked, and nothing written otherwise."""

import importlib.util
import json
import multiprocessing
import re
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, TrainingConfig
from titan_mi100.data.packing import pack_rows
from titan_mi100.data.survey import Survey
from titan_mi100.errors import UserError
from titan_mi100.planning.plan import GIB, make_plan
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.tools import new_config as new
from titan_mi100.wording import plural

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in a folder with models and data; its code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["titan-mi100 config new"])
    for name in ("0.6B", "8B"):
        shutil.copytree(REPO / "train_configs/debug/tokenizer", tmp_path / f"Qwen3-{name}")
        (tmp_path / f"Qwen3-{name}" / "config.json").write_text(json.dumps(to_hf_config(PRESETS[name])))
        (tmp_path / f"Qwen3-{name}" / "model.safetensors").write_bytes(b"")
    rows = (REPO / "train_configs/debug/additions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:500]))

    def command(*options: str, typed: tuple[str, ...] | None = None) -> tuple[int, str, str]:
        lines = iter(typed or ())

        def answer(_: str) -> str:
            line = next(lines, None)
            if line == "^C":
                raise KeyboardInterrupt
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: typed is not None)
        code = new.main(options)
        found = capsys.readouterr()
        return code, found.out, found.err

    return command


def test_options_alone_write_a_config_that_fits_and_name_the_next_commands(run: Run, tmp_path: Path) -> None:
    given = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "2", "--memory", "32GB")
    code, out, err = run(*given, "--method", "full", "--output", "mine.toml")
    assert (code, err) == (0, "") and "changed" not in out and " of 32 GiB on each card" in out
    for word in ("inspect", "plan", "train"):
        assert f" {word} --job.config_file mine.toml" in out
    config = load_config(["--job.config_file", "mine.toml"], 2)
    assert config.data.path == (str(tmp_path / "train.jsonl"),) and not config.lora.rank
    assert "chosen for them: " in out and config.data.validation_fraction == 0.1
    plan = make_plan(Workload.of(config, 2), 32 * GIB)
    assert plan.fits and f"{plan.most / GIB:.1f} of 32 GiB" in out and "no GPU is here" not in out
    if not new.count_gpus():
        assert "for 1 process on the CPU" in run(*given[:4], "--output", "cpu.toml")[1]
    before = Path("mine.toml").read_bytes()
    code, _, err = run(*given, "--output", "mine.toml")
    assert (
        code == 2
        and "mine.toml: exists already, and is not overwritten; name another file with --output" in err
        and Path("mine.toml").read_bytes() == before
    )
    assert run(*given)[0] == 0 and run(*given)[0] == 0
    assert Path("qwen3-0.6b-full.toml").exists() and Path("qwen3-0.6b-full-2.toml").exists()


GIVEN = ("--model", "Qwen3-0.6B", "--data", "train.jsonl")
CARDS = ("--gpus", "2", "--memory", "32GB")


def test_the_config_names_its_run_folder_and_export_and_a_folder_that_is_there_is_refused(
    run: Run, tmp_path: Path
) -> None:
    """So the same command resumes, from any folder."""
    assert run(*GIVEN, *CARDS, "--output", "mine.toml")[0] == 0
    config = load_config(["--job.config_file", "mine.toml"], 2)
    assert config.job.run_folder == str(tmp_path / "outputs/mine") and config.checkpoint.export_hf
    assert f'run_folder = "{tmp_path}/outputs/mine"' in Path("mine.toml").read_text()
    Path("outputs/other").mkdir(parents=True)
    Path("outputs/other/run_state.json").write_text("{}")
    code, _, err = run(*GIVEN, *CARDS, "--output", "other.toml")
    assert code == 2 and not Path("other.toml").exists() and "outputs/other: exists already, so the run would" in err
    Path("outputs/qwen3-0.6b-full").mkdir()
    assert run(*GIVEN, *CARDS)[0] == 0 and Path("qwen3-0.6b-full-2.toml").exists()


@pytest.mark.full
def test_on_a_cpu_without_bfloat16_it_is_float32_but_not_for_cards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "count_gpus", lambda: 0)
    Path("x.yaml").write_text("base_model: Qwen3-0.6B\ndatasets: [{path: train.jsonl}]\nbf16: true\n")
    ways = {"plain": GIVEN, "yaml": ("--from", "x.yaml")} if importlib.util.find_spec("yaml") else {"plain": GIVEN}
    for is_slow in (True, False):
        monkeypatch.setattr(new, "dtype_advice", lambda *_, is_slow=is_slow, **__: "slow" * is_slow)
        for way, given in ways.items():
            for cards in ((), ("--gpus", "1"), CARDS):
                file = f"{way}-{is_slow}-{len(cards)}.toml"
                code, out, err = run(*given, *cards, "--output", file)
                assert code == 0, out + err
                dtype = load_config(["--job.config_file", file], None).training.mixed_precision_param
                assert dtype == ("float32" if is_slow and cards != CARDS else "bfloat16"), file


def test_pairs_of_answers_get_their_objective_a_low_rate_and_no_dropout(run: Run) -> None:
    rows = [{"prompt": f"{i} + 1?", "chosen": str(i + 1), "rejected": str(i)} for i in range(200)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for method, rate in (("full", 1e-6), ("lora", 1e-5)):
        given = ("--model", "Qwen3-0.6B", "--data", "pairs.jsonl", "--gpus", "1", "--memory", "32GB")
        code, out, err = run(*given, "--method", method, "--output", f"{method}.toml")
        assert (code, err) == (0, "") and "counted: 200 documents" in out
        config = load_config(["--job.config_file", f"{method}.toml"], 1)
        assert config.objective.name == "preference" and config.optimizer.lr == rate and not config.lora.dropout


def test_a_config_that_cannot_be_written_whole_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it would be taken for a config: every key that is missing has a default."""
    before, whole = resource.getrlimit(resource.RLIMIT_FSIZE), new.as_toml

    def then_files_end_early(*arguments: Any) -> str:
        text = whole(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        return text

    monkeypatch.setattr(new, "as_toml", then_files_end_early)
    given = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "2", "--memory", "32GB")
    try:
        code, _, err = run(*given, "--output", "mine.toml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(Path().glob("*mine.toml*"))
    assert code == 2 and "mine.toml: cannot be written (File too large); name another file with --output" in err


FINETUNE = Config(training=TrainingConfig(target_tokens_per_step=32_768, epochs=3))  # as in finetune.toml


def rows_of(lengths: Sequence[int], share: float = 1.0, refused: int = 0) -> Survey:
    return Survey(np.array(lengths, np.int64), np.linspace(0, 1, len(lengths), endpoint=False), share, refused)


@pytest.mark.parametrize("cards", [1, 2, 4])
@pytest.mark.parametrize("rows", [50, 500, 5000])
def test_the_size_of_a_run_suits_its_tokens(rows: int, cards: int) -> None:
    """Rows of about GSM8K's lengths: at least 30 steps, and at most a tenth of padding."""
    config = FINETUNE
    lengths = np.random.default_rng(0).integers(100, 300, rows)
    change, lines = new.sized_run(config.training, config.batch(cards), rows_of(lengths))
    config = with_settings(config, change)
    kept = lengths[round(config.data.validation_fraction * rows) :]
    packed = len(pack_rows(kept, config.training.seq_len).starts) - 1
    batch = config.batch(cards)
    an_epoch = -(-packed // batch.global_batch_size)
    assert an_epoch * config.training.epochs >= 30 and packed / an_epoch / batch.global_batch_size >= 0.9
    assert (
        f"{an_epoch * config.training.epochs} steps" in lines
        and f"{plural(batch.global_batch_size, 'row')} of" in lines
    )
    assert config.validation.freq == -(-an_epoch * config.training.epochs // 5) and 0 < len(kept) < rows


def test_what_the_size_cannot_suit_is_said() -> None:
    config = FINETUNE
    change, lines = new.sized_run(config.training, config.batch(8), rows_of([1000] * 5))
    assert change["training"] == {"seq_len": 1024, "target_tokens_per_step": 8 * 1024, "epochs": 10}
    assert "10 steps, 50% padding; 1 of the documents for validation (share 10%)" in lines
    change, lines = new.sized_run(config.training, config.batch(1), rows_of([9], refused=3))
    assert "data" not in change and "; 0 of the documents" in lines and "WARNING refused: 3 rows" in lines
    _, lines = new.sized_run(config.training, config.batch(2), rows_of([1000] * 100, share=0.004))
    assert "in the first 0.4% of the data, read for 10 seconds" in lines and "32 rows of" in lines
    with pytest.raises(UserError, match="no row can be learned"):
        new.sized_run(config.training, config.batch(1), rows_of([]))


def test_short_rows_get_a_short_seq_len(run: Run) -> None:
    change, lines = new.sized_run(FINETUNE.training, FINETUNE.batch(2), rows_of([35] * 50))
    assert change["training"]["seq_len"] == 128 and int(re.findall(r"(\d+)% padding", lines)[0]) <= 10


def test_a_base_model_is_told_from_a_chat_model_where_conversations_are_learned(run: Run) -> None:
    file = Path("Qwen3-0.6B/tokenizer_config.json")
    config = json.loads(file.read_text())
    Path("texts.jsonl").write_text('{"text": "A text of some words."}\n' * 40)
    options = ("--model", "Qwen3-0.6B", "--gpus", "1", "--memory", "32GB", "--data")
    assert "a base model" not in run(*options, "train.jsonl")[1]
    file.write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))
    _, out, err = run(*options, "train.jsonl")
    assert "a base model: its eos_token ends no turn, <|im_end|> does" in out and err == ""
    assert "a base model" not in run(*options, "texts.jsonl")[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("documents", "share"),
    [(5000, 0.01), (4999, 0.05), (1000, 0.05), (999, 0.1), (10, 0.1), (9, 0.2), (4, 0.3), (3, 0)],
)
def test_the_share_for_validation_is_the_smallest_that_is_enough(documents: int, share: float) -> None:
    """50 documents below a tenth, else one, but never all."""
    survey = Survey(np.full(documents, 100), (np.arange(documents) + 1) / documents - 1e-9, 1.0, 0)
    change, _ = new.sized_run(FINETUNE.training, FINETUNE.batch(1), survey)
    assert change.get("data", {}).get("validation_fraction", 0) == share


@pytest.mark.full
def test_more_data_than_can_be_read_in_time_are_a_sample(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(text * (4_000_000 // len(text)))
    options = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "2", "--memory", "32GB")
    monkeypatch.setattr(new, "_SECONDS", 0.0)
    code, out, err = run(*options, "--output", "x.toml")
    pattern = r"counted: ([\d,]+) documents of .* in the first ([0-9.]+)% of the data, read for 0 seconds"
    [(counted, read)] = re.findall(pattern, out)
    rows = Path("train.jsonl").read_text().count("\n")
    assert (code, err) == (0, "")
    assert float(read) == pytest.approx(100 * int(counted.replace(",", "")) / rows, rel=0.03)
    assert not multiprocessing.active_children()


def test_data_that_cannot_be_counted_leave_the_usual_size(run: Run) -> None:
    options = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "2", "--memory", "32GB")
    Path("train.jsonl").write_text('{"a": 1}\n')
    code, out, err = run(*options, "--output", "x.toml")
    assert (code, err) == (0, "") and "WARNING the tokens were not counted, so the size of the run may not" in out
    assert "train.jsonl: rows have the keys a; expected messages" in out and "epochs" not in Path("x.toml").read_text()
    Path("train.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": 1, "answer": "b"}\n')
    assert (
        "WARNING refused: 1 row; titan-mi100 inspect names them; correct them, or leave them out with --data"
        in run(*options, "--output", "y.toml")[1]
    )


@pytest.mark.parametrize(
    ("cards", "memory", "method", "said", "expected"),
    [
        ("2", "32GB", "full", "optimizer state in 8 bits, weights in bf16", {"optimizer.master": "bf16_sr"}),
        ("1", "32GB", "full", "in the host's memory", {"memory.offload": "optimizer"}),
        pytest.param(
            "2",
            "24GB",
            "lora",
            "predicted peak",
            {"lora.rank": 16, "lora.base": "whole", "optimizer.lr": 2e-4},
            marks=pytest.mark.full,
        ),
        ("1", "16GB", "lora", "(QLoRA)", {"lora.base": "nf4"}),
        pytest.param("1", "16GB", "qlora", "predicted peak", {"lora.base": "nf4"}, marks=pytest.mark.full),
    ],
)
def test_settings_change_until_the_run_fits(
    cards: str, memory: str, method: str, said: str, expected: dict[str, object], run: Run
) -> None:
    options = ("--model", "Qwen3-8B", "--data", "train.jsonl", "--gpus", cards, "--memory", memory)
    code, out, err = run(*options, "--method", method, "--output", "x.toml")
    assert (code, err) == (0, "") and said in out
    config = load_config(["--job.config_file", "x.toml"], int(cards))
    answers = new.UserChoices(str(Path("Qwen3-8B").absolute()), config.data.path, int(cards), int(memory[:2]), method)
    planned = new.fitting_plan(answers)[0]
    saved = replace(config.checkpoint, export_hf=False)  # of the plan no run is made
    assert planned.config == replace(config, job=planned.config.job, notes=planned.config.notes, checkpoint=saved)
    for name, value in expected.items():
        section, key = name.split(".")
        assert getattr(getattr(config, section), key) == value
    assert make_plan(Workload.of(config, int(cards)), int(memory.removesuffix("GB")) * GIB).fits


def test_what_fits_in_no_way_is_refused_with_what_would(run: Run) -> None:
    options = ("--model", "Qwen3-8B", "--data", "train.jsonl", "--gpus", "1")
    code, _, err = run(*options, "--memory", "12GB", "--output", "x.toml")
    assert code == 2 and "full fine-tuning of " in err and "; --method lora fits" in err
    code, _, err = run(*options, "--memory", "4GB", "--output", "x.toml")
    assert code == 2 and "use more cards, or a smaller model" in err and not Path("x.toml").exists()


def test_a_method_that_is_not_for_the_model_is_refused_only_where_it_was_asked_for(run: Run) -> None:
    shape = json.loads(Path("Qwen3-0.6B/config.json").read_text())
    small = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}
    Path("Qwen3-0.6B/config.json").write_text(json.dumps({**shape, **small, "head_dim": 32}))
    options = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "2", "--memory", "32GB")
    assert run(*options, "--method", "full", "--output", "x.toml")[0] == 0
    code, _, err = run(*options, "--method", "qlora", "--output", "y.toml")
    assert code == 2 and "--method qlora is not for " in err and "blocks of 64 values" in err


def test_a_terminal_is_asked_again_until_the_answer_is_right(run: Run) -> None:
    answers = ("Qwen/Qwen3-0.6B", "Qwen3-0.6B", "gone.jsonl", "train.jsonl", "none", "", "lots", "24GB", "all", "lora")
    code, out, err = run("--output", "x.toml", typed=answers)
    assert code == 0 and "Qwen3-0.6b" not in out and "lora fine-tuning" in out and "x 24 GiB" in out
    wrong = (
        "hf download Qwen/Qwen3-0.6B",
        "gone.jsonl: cannot be read",
        "'none' must be a whole number",
        "'lots' is no size",
    )
    for line, part in zip(err.splitlines(), (*wrong, "'all' is none of full, lora, qlora"), strict=True):
        assert line.startswith("ERROR ") and part in line


@pytest.mark.parametrize(
    ("options", "typed", "code", "said"),
    [
        ((), ("Qwen3-0.6B",), 2, "the input has ended; nothing was written"),
        ((), ("Qwen3-0.6B", "^C"), 130, "interrupted"),
        (
            (),
            None,
            2,
            "--model and --data must be given, as there is no terminal to ask for answers; e.g. titan-mi100",
        ),
        (("--model", "gone"), None, 2, "--data must be given"),
        (
            ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "zero"),
            None,
            2,
            "a whole number from 1 to 1,048,576, such",
        ),
        (("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--method", "All"), None, 2, "'All' is none of full, lora"),
        (("--model", "gone"), (), 2, "--model: gone: is no folder"),
        (("--model", "Qwen3-0.6B", "--data", "*.csv"), None, 2, "--data: "),
        (
            ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--gpus", "0"),
            None,
            2,
            "--gpus: '0' must be a whole number",
        ),
    ],
)
def test_what_is_missing_or_wrong_leaves_nothing(
    options: tuple[str, ...], typed: tuple[str, ...] | None, code: int, said: str, run: Run
) -> None:
    found = run(*options, typed=typed)
    assert found[0] == code and said in found[2] and not list(Path().glob("*.toml"))
