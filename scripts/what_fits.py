"""Print README's table of what fits on one card: by the planner, with the settings that `config new` tries."""

from titan_mi100.config.bundled import FOLDER
from titan_mi100.config.load import load_config
from titan_mi100.planning.plan import GIB, make_plan
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.tools.new_config import METHODS

CARDS = (8, 12, 16, 24, 32, 64, 80)  # GiB
MODELS = (
    *("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B"),
    *("qwen3.5-0.8B", "qwen3.5-2B", "qwen3.5-4B", "qwen3.5-9B", "qwen3.6-27B", "qwen3.6-35B-A3B"),
)
COLUMNS = {
    "all weights": METHODS["full"][0][1],
    "8-bit": METHODS["full"][2][1],
    "8-bit, on the host": METHODS["full"][3][1],
    "LoRA": METHODS["lora"][0][1],
    "QLoRA": METHODS["qlora"][0][1],
}


def table() -> list[str]:
    """One line per model: the smallest card of each method, and the GiB that the planner says it needs at most."""
    lines = [f"| model | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for model in MODELS:
        start = ["--job.config_file", str(FOLDER / "finetune.toml"), "--model.flavor", model]
        config = load_config(start, 1, with_files=False)
        needs = [
            make_plan(Workload.of(with_settings(config, change), 1), card=0).most / GIB for change in COLUMNS.values()
        ]
        cells = [next((f"{card} GB ({need:.1f})" for card in CARDS if need <= card), "-") for need in needs]
        name = model.replace("qwen", "Qwen") if model.startswith("qwen") else f"Qwen3-{model}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
