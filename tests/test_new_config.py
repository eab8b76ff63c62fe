"""`titan-mi100 config new`: five answers, a config that the planner has checked, and nothing written otherwise."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

from titan_mi100.config import new
from titan_mi100.config.load import load_config
from titan_mi100.config.model_spec import PRESETS, to_hf_config
from titan_mi100.config.plan import GIB, make_plan

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
    shutil.copy(REPO / "train_configs/debug/additions.jsonl", tmp_path / "train.jsonl")

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
    given = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--cards", "2", "--memory", "32GB")
    code, out, err = run(*given, "--method", "full", "--output", "mine.toml")
    assert (code, err) == (0, "") and "changed" not in out and " of 32 GiB on each card" in out
    for word in ("inspect", "plan", "train"):
        assert f" {word} --job.config_file mine.toml" in out
    config = load_config(["--job.config_file", "mine.toml"], 2)
    assert config.data.path == (str(tmp_path / "train.jsonl"),) and config.training.epochs == 3 and not config.lora.rank
    plan = make_plan(config, 2, 32 * GIB)
    assert plan.fits and f"{plan.most / GIB:.1f} of 32 GiB" in out
    before = Path("mine.toml").read_bytes()
    code, _, err = run(*given, "--output", "mine.toml")
    assert code == 2 and "mine.toml: exists already" in err and Path("mine.toml").read_bytes() == before
    assert run(*given)[0] == 0 and run(*given)[0] == 0
    assert Path("qwen3-0.6b-full.toml").exists() and Path("qwen3-0.6b-full-2.toml").exists()


@pytest.mark.parametrize(
    ("cards", "memory", "method", "said", "expected"),
    [
        ("2", "32GB", "full", "optimizer state in 8 bits, weights in bf16", {"optimizer.master": "bf16_sr"}),
        ("1", "32GB", "full", "in the host's memory", {"memory.offload": "optimizer"}),
        ("2", "24GB", "lora", "predicted peak", {"lora.rank": 16, "lora.base": "whole", "optimizer.lr": 2e-4}),
        ("1", "16GB", "lora", "(QLoRA)", {"lora.base": "nf4"}),
        ("1", "16GB", "qlora", "predicted peak", {"lora.base": "nf4"}),
    ],
)
def test_settings_change_until_the_run_fits(
    cards: str, memory: str, method: str, said: str, expected: dict[str, object], run: Run
) -> None:
    options = ("--model", "Qwen3-8B", "--data", "train.jsonl", "--cards", cards, "--memory", memory)
    code, out, err = run(*options, "--method", method, "--output", "x.toml")
    assert (code, err) == (0, "") and said in out
    config = load_config(["--job.config_file", "x.toml"], int(cards))
    for name, value in expected.items():
        section, key = name.split(".")
        assert getattr(getattr(config, section), key) == value
    assert make_plan(config, int(cards), int(memory.removesuffix("GB")) * GIB).fits


def test_what_fits_in_no_way_is_refused_with_what_would(run: Run) -> None:
    options = ("--model", "Qwen3-8B", "--data", "train.jsonl", "--cards", "1")
    code, _, err = run(*options, "--memory", "12GB", "--output", "x.toml")
    assert code == 2 and "full fine-tuning of " in err and "; --method lora fits" in err
    code, _, err = run(*options, "--memory", "4GB", "--output", "x.toml")
    assert code == 2 and "use more cards, or a smaller model" in err and not Path("x.toml").exists()


def test_a_method_that_is_not_for_the_model_is_refused_only_where_it_was_asked_for(run: Run) -> None:
    shape = json.loads(Path("Qwen3-0.6B/config.json").read_text())
    small = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}
    Path("Qwen3-0.6B/config.json").write_text(json.dumps({**shape, **small, "head_dim": 32}))
    options = ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--cards", "2", "--memory", "32GB")
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
            "--model and --data must be given, as there is no terminal to ask for answers; e.g. python -m",
        ),
        (("--model", "gone"), None, 2, "--data must be given"),
        (
            ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--cards", "zero"),
            None,
            2,
            "a whole number from 1 to 1,048,576, such",
        ),
        (("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--method", "All"), None, 2, "'All' is none of full, lora"),
        (("--model", "gone"), (), 2, "--model: gone: is no folder"),
        (("--model", "Qwen3-0.6B", "--data", "*.csv"), None, 2, "--data: "),
        (
            ("--model", "Qwen3-0.6B", "--data", "train.jsonl", "--cards", "0"),
            None,
            2,
            "--cards: '0' must be a whole number",
        ),
    ],
)
def test_what_is_missing_or_wrong_leaves_nothing(
    options: tuple[str, ...], typed: tuple[str, ...] | None, code: int, said: str, run: Run
) -> None:
    found = run(*options, typed=typed)
    assert found[0] == code and said in found[2] and not list(Path().glob("*.toml"))
