"""The pictures of the README.

    ./run_train.sh --job.run_folder outputs/tiny
    python scripts/bench/readme_pictures.py --run outputs/tiny

Writes two files to docs/assets (needs matplotlib). first_run.png: on the left the tokens of a training row, the trained
ones coloured, as `inspect_data` shows them; on the right the losses of the finished run. memory_ladder.png: the peak
memory of Qwen3-8B per card (scripts/bench/memory_ladder.py, some minutes).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.cli import exit_code
from titan_mi100.errors import UserError
from titan_mi100.pages.bins import Bins, smoothed

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS, COLUMNS = 3, 46  # shown of the row; characters of a line
TRAINED, PLAIN = "#bfe6c8", "#f0f1f3"  # backgrounds of tokens


class Token(NamedTuple):
    text: str
    is_trained: bool
    document: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run of debug.toml")
    parser.add_argument("--output_dir", type=Path, default=REPO / "docs" / "assets", help="default: docs/assets")
    parser.add_argument("--only", choices=("first_run", "memory_ladder"), help="default: both")
    options = parser.parse_args()
    if options.only != "memory_ladder":
        draw_first_run(options.run, options.output_dir / "first_run.png")
    if options.only != "first_run":
        picture = options.output_dir / "memory_ladder.png"
        subprocess.run([sys.executable, Path(__file__).with_name("memory_ladder.py"), "--png", picture], check=True)


def read_losses(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Training and validation loss by step."""
    file = run / "metrics.jsonl"
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    if not file.is_file():
        raise UserError(f"{file}: no such file; name a finished run: ./run_train.sh --job.run_folder outputs/tiny")
    for entry in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        for losses, key in zip(found, ("loss", "validation_loss"), strict=True):
            if entry.get(key) is not None:
                losses[entry["step"]] = entry[key]
    return found


def read_tokens(run: Path) -> list[Token]:
    """The first documents of a training row, from `inspect_data --json`."""
    command = [sys.executable, "-m", "titan_mi100.inspect_data", "--job.config_file", str(run / "config.toml")]
    said = subprocess.run([*command, "--row", "0", "--json"], check=True, capture_output=True, text=True).stdout
    row: dict[str, Any] = json.loads(said)["shown"][0]
    tokens = [Token(*values) for values in zip(row["text"], row["supervised"], row["document"], strict=True)]
    return [token for token in tokens if 0 <= token.document < DOCUMENTS]


def placed(tokens: list[Token]) -> Iterator[tuple[int, int, Token]]:
    """Line and column of each token: a new line after a line break or a full line, an empty one between documents."""
    line = column = 0
    for number, token in enumerate(tokens):
        if number and token.document != tokens[number - 1].document:
            line, column = line + 1 + (column > 0), 0
        elif column + len(token.text) > COLUMNS:
            line, column = line + 1, 0
        yield line, column, token
        column += len(token.text)
        if token.text.endswith("↵"):
            line, column = line + 1, 0


def draw_first_run(run: Path, path: Path) -> None:
    try:
        import matplotlib
        from PIL import Image  # comes with matplotlib
    except ImportError:
        raise UserError("this needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (data, curve) = pyplot.subplots(1, 2, figsize=(9.2, 4.6), layout="constrained", width_ratios=(1.2, 1))
    draw_tokens(data, read_tokens(run))
    losses, validation = read_losses(run)
    bins = Bins(most=len(losses))
    for step, loss in losses.items():
        bins.add(step, loss)
    curve.plot(list(losses), list(losses.values()), color="#9dbfe3", linewidth=0.7)
    curve.plot(list(losses), smoothed(bins.bins()), color="#1f5fa8", linewidth=1.8, label="training")
    curve.plot(list(validation), list(validation.values()), "o-", color="#d9731a", label="validation (held out)")
    curve.set(yscale="log", xlabel="optimizer step", ylabel="loss", title="Loss, logarithmic scale")
    curve.spines[["top", "right"]].set_visible(False)
    curve.grid(alpha=0.25)
    curve.legend()
    figure.savefig(path, dpi=150)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes


def draw_tokens(axes: Any, tokens: list[Token]) -> None:
    from matplotlib.patches import FancyBboxPatch

    lines = 0
    for line, column, token in placed(tokens):
        width, color = len(token.text), TRAINED if token.is_trained else PLAIN
        style = "round,pad=0,rounding_size=0.2"
        axes.add_patch(FancyBboxPatch((column + 0.06, line + 0.12), width - 0.12, 0.78, style, fc=color, ec="none"))
        for place, character in enumerate(token.text):  # one by one: the boxes fit in every font
            ink = "#14532d" if token.is_trained else "#555b66"
            at = (column + place + 0.5, line + 0.52)
            axes.text(*at, character, color=ink, family="monospace", ha="center", va="center", fontsize=9.6)
        lines = line + 1
    axes.set(xlim=(0, COLUMNS), ylim=(lines + 0.2, -0.2), title="What trains: the green tokens")
    axes.axis("off")


if __name__ == "__main__":
    sys.exit(exit_code(main))
