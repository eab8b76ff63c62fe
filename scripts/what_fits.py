"""Print README's table of what fits on one card, and that of docs/MODELS.md of the longest rows: by the planner."""

import io
import re
from contextlib import redirect_stdout

from titan_mi100.config.bundled import FOLDER
from titan_mi100.config.load import load_config
from titan_mi100.planning.longest import CARD_SIZES, METHODS
from titan_mi100.planning.plan import GIB, make_plan
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.tools import plan

MODELS = (
    *("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B"),
    *("qwen3.5-0.8B", "qwen3.5-2B", "qwen3.5-4B", "qwen3.5-9B", "qwen3.6-27B", "qwen3.6-35B-A3B"),
)
OF_LENGTHS = ("0.6B", "4B", "8B", "14B", "30B-A3B", "qwen3.5-4B", "qwen3.5-9B")


def table() -> list[str]:
    """One line per model: the smallest card of each method, and the GiB that the planner says it needs at most."""
    lines = [f"| model | {' | '.join(METHODS)} |", "|---" * (1 + len(METHODS)) + "|"]
    for model in MODELS:
        start = ["--job.config_file", str(FOLDER / "finetune.toml"), "--model.flavor", model]
        config = load_config(start, 1, with_files=False)
        needs = [
            make_plan(Workload.of(with_settings(config, change), 1), card=0).most / GIB for change in METHODS.values()
        ]
        cells = [next((f"{card} GB ({need:.1f})" for card in CARD_SIZES if need <= card), "-") for need in needs]
        name = model.replace("qwen", "Qwen") if model.startswith("qwen") else f"Qwen3-{model}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def longest() -> list[str]:
    """One line per model and method: what `titan-mi100 plan --longest` prints for cards of several sizes."""
    lines = [f"| model | method | {' | '.join(f'{card} GB' for card in CARD_SIZES)} |"]
    lines.append("|---" * (2 + len(CARD_SIZES)) + "|")
    for model in OF_LENGTHS:
        with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as output:
            plan.main(["--model.flavor", model, "--longest"])
            output.seek(0)
            rows = [re.split(r"\s{2,}", line) for line in output.read().splitlines()[2:-1]]
        lines += [f"| {model} | {' | '.join(row)} |" for row in rows if {*row[1:]} != {"-"}]
    return lines


if __name__ == "__main__":
    print("\n".join([*table(), "", *longest()]))
