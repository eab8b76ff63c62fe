"""The plan before a run: what the command says, what is refused before the start, what is said when memory runs out."""

import dataclasses
import json
import re
import runpy
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, ending_of

from titan_mi100.config.check import check
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    Config,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.errors import is_out_of_memory
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.cards import DEVICES
from titan_mi100.planning.longest import METHODS as ON_CARDS
from titan_mi100.planning.longest import longest
from titan_mi100.planning.memory import ABOVE, BELOW, piece_tokens, with_overhead
from titan_mi100.planning.plan import GIB, make_plan, search
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.run import forecast
from titan_mi100.tools import plan as planner
from titan_mi100.workshop.rehearsal.counter import as_rank
from titan_mi100.workshop.sweep.published import PUBLISHED

SFT = ["--job.config_file", str(REPO / "train_configs" / "qwen3_0.6b_sft.toml")]
LEAN = ["--optimizer.state", "8bit", "--optimizer.master", "bf16_sr", "--training.mixed_precision_reduce", "bfloat16"]
BIG = [*SFT, "--model.flavor", "8B", "--training.local_batch_size", "1"]


def test_it_says_whether_a_run_fits_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main([*BIG, *LEAN, "--tokens", "1e7"]) == 0
    said = capsys.readouterr().out
    assert "fits: 28" in said and "2 x MI100, 32.0 GiB each" in said and "assumed, not measured" in said
    assert "10,000,000 tokens take" in said
    assert planner.main(BIG) == 1
    said = capsys.readouterr().out
    assert "does not fit: " in said and "what helps most: keep optimizer state in 8 bits and weights in bf16" in said
    assert planner.main([*BIG, *LEAN, "--memory", "26GB"]) == 1
    assert "what helps most: keep gradients and optimizer state in the host's memory" in capsys.readouterr().out
    assert planner.main([*BIG, *LEAN, "--memory", "8GB"]) == 1
    assert "what helps most: keep all in the host's memory" in capsys.readouterr().out
    assert planner.main([*BIG, *LEAN, "--memory", "3GB"]) == 1
    assert "GiB, still too much" in capsys.readouterr().out


def test_of_changes_that_suffice_it_names_the_mildest(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main([*SFT, "--activation_checkpoint.mode", "none", *WHOLE, "--memory", "16"]) == 1
    assert "what helps most: take one row at a time (training.local_batch_size = 1" in capsys.readouterr().out


METHODS: dict[str, dict[str, Any]] = {
    "full": {"optimizer": OptimizerConfig(state="8bit", master="bf16_sr")},
    "full, host": {
        "optimizer": OptimizerConfig(state="8bit", master="bf16_sr"),
        "memory": MemoryConfig(offload="optimizer"),
    },
    "LoRA": {"lora": LoRAConfig(rank=16, alpha=32.0, dropout=0.05)},
    "QLoRA": {
        "lora": LoRAConfig(rank=16, alpha=32.0, dropout=0.05, base="nf4"),
        "parallelism": ParallelismConfig(zero_stage=3),
    },
}
MODELS = ("0.6B", "1.7B", "4B", "8B", "14B")


def cell(method: str, model: str, gib: int) -> str:
    """The most rows that fit a card, and GiB of the host."""
    for rows in (32, 16, 8, 4, 2, 1):
        training = TrainingConfig(
            seq_len=1024, local_batch_size=rows, target_tokens_per_step=98_304, mixed_precision_reduce="bfloat16"
        )
        mode = ActivationCheckpointConfig(mode="full")
        config = Config(
            model=ModelConfig(flavor=model), training=training, activation_checkpoint=mode, **METHODS[method]
        )
        if (plan := make_plan(Workload.of(config, 1), gib << 30)).most <= gib << 30:
            return f"{rows} [{plan.host / 2**30:.0f}]" if method == "full, host" else str(rows)
    return "-"


def test_the_table_of_what_fits_one_card_is_the_planners() -> None:
    lines = ["| card | method | " + " | ".join(MODELS) + " |", "|---" * (2 + len(MODELS)) + "|"]
    for gib in (8, 12, 16, 24, 32):
        for method in METHODS:
            lines.append(f"| {gib} GB | {method} | " + " | ".join(cell(method, model, gib) for model in MODELS) + " |")
    assert "\n".join(lines) + "\n" in (REPO / "docs" / "MEMORY.md").read_text(), "\n".join(lines)


@pytest.mark.full
def test_the_table_of_the_longest_rows_is_the_planners() -> None:
    """No figure is written by hand: scripts/what_fits.py prints it. Of one model; all take minutes."""
    made = runpy.run_path(str(REPO / "scripts" / "what_fits.py"))
    made["longest"].__globals__["OF_LENGTHS"] = ("0.6B",)
    page = (REPO / "docs" / "MODELS.md").read_text().splitlines()
    assert [line for line in made["longest"]() if line not in page] == []


def test_a_cell_of_that_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    planner.main(["--model.flavor", "8B", "--longest", "--memory", "24GB"])
    printed = capsys.readouterr().out.splitlines()[6].removeprefix("QLoRA").strip()
    row = re.search(r"\| 8B \| QLoRA \|(.*)\|", (REPO / "docs" / "MODELS.md").read_text())
    assert row is not None and row[1].split("|")[3].strip() == printed


WHOLE = ["--memory.piece_tokens", "0"]
ONE_LONG = {"local_batch_size": 1, "gradient_accumulation_steps": 2, "target_tokens_per_step": 0}


def of_method(model: str, method: str, on_host: bool = False) -> Workload:
    config = load_config(["--model.flavor", model], None, with_files=False)
    change: dict[str, Any] = {"memory": {"offload_activations": True}} if on_host else {}
    return Workload.of(config, 1).changed(ON_CARDS[method]).changed(change)


@pytest.mark.parametrize(
    ("model", "method", "gib", "fitting"),
    [
        ("4B", "QLoRA", 12, [*range(1, 18)]),
        ("qwen3.5-0.8B", "8-bit", 8, [*range(1, 8)]),
        # rows of 4,096 and 5,120 tokens keep their logits, longer ones compute them again
        ("8B", "8-bit", 53, [1, 2, 3, 6]),
        ("8B", "8-bit", 40, []),
    ],
)
def test_the_longest_row_is_the_longest_of_all(model: str, method: str, gib: int, fitting: list[int]) -> None:
    full = {"activation_checkpoint": {"mode": "full"}}
    work = of_method(model, method).changed({"memory": {"piece_tokens": 0}})  # with pieces nearly all lengths fit

    def fits(count: int) -> bool:
        change = {"training": {**ONE_LONG, "seq_len": 1024 * count}, **full}
        return make_plan(work.changed(change), gib * GIB).fits

    assert [count for count in range(1, 100) if fits(count)] == fitting
    plan = longest(work, gib * GIB)
    assert (plan.config.training.seq_len if plan else 0) == 1024 * max(fitting, default=0)
    assert plan is None or not check(plan.config, 1, with_files=False)


def test_the_longest_rows_of_a_card_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--model.flavor", "4B", "--longest", "--memory", "24GB"]
    assert planner.main([*one, "--lora.rank", "64"]) == 0  # a method sets what is its own
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["24", "GB"] and [line[:20].rstrip() for line in lines[2:7]] == [*ON_CARDS]
    assert lines[2].split() == ["all", "weights", "-"] and lines[-1].startswith("*: beyond the 40,960 positions")
    assert planner.main([*one, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert all(entry["card"] == 24 * GIB and entry["most"] <= 24 * GIB for entry in entries)
    found = {(entry["method"], entry["inputs_on_host"]): entry for entry in entries}
    alone, moved = found["QLoRA", False], found["QLoRA", True]
    words = [f"{e['seq_len'] // 1024}k{'*' * (e['seq_len'] > 40960)}" for e in (alone, moved)]
    assert lines[6].split() == ["QLoRA", f"{words[0]},", words[1], f"[{moved['host'] / GIB:.0f}]"]
    assert moved["seq_len"] > alone["seq_len"] and moved["host"] > alone["host"] == 0
    assert planner.main(["--model.flavor", "32B", "--longest", "--memory", "8GB"]) == 1
    assert planner.main([*one, "--search", "--device", "mi100"]) == 2
    assert "--longest plans memory alone, of methods of its own; leave --search" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize(
    ("model", "method", "on_host", "gib"),
    [("4B", "QLoRA", False, 24), ("8B", "8-bit, on the host", True, 32), ("30B-A3B", "QLoRA", False, 32)],
)
def test_the_counter_finds_what_the_longest_rows_need(model: str, method: str, on_host: bool, gib: int) -> None:
    """Counted of four and five layers, as each more adds as much; of fewer, fewer gradients are on their way."""
    plan = longest(of_method(model, method, on_host), gib * GIB)
    assert plan is not None
    counted = []
    piece = piece_tokens(plan.workload, gib * GIB)  # that of all layers: so few would fit whole
    config = dataclasses.replace(plan.config, memory=dataclasses.replace(plan.config.memory, piece_tokens=piece))
    for layers in (4, 5):
        smaller = dataclasses.replace(plan.workload.spec, num_hidden_layers=layers)
        with as_rank(Workload(config, 1, smaller), 0, 2, gib * GIB) as fake:
            counted.append(fake.count_step().peak)
    whole = counted[1] + (plan.workload.spec.num_hidden_layers - 5) * (counted[1] - counted[0])
    assert 1 - BELOW <= plan.fullest.peak / whole <= 1 + ABOVE, (plan.fullest.peak / GIB, whole / GIB)
    assert with_overhead(whole) <= gib * GIB


@pytest.mark.parametrize("gib", [8, 12, 16, 24, 32])
def test_the_bundled_configs_for_one_card_fit_it_with_room(gib: int, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("full", "lora", "qlora"):
        config = str(REPO / "train_configs" / f"{gib}gb_{method}.toml")
        assert planner.main(["--job.config_file", config, "--gpus", "1", "--memory", f"{gib}GB", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["most"] <= (gib - 1) << 30  # a display takes some


ONE_ROW = ["--training.local_batch_size", "1", "--activation_checkpoint.mode", "full"]


@pytest.mark.parametrize(
    ("settings", "helps"),
    [
        # replicas on each card, where shards are enough
        (["--model.flavor", "1.7B", *ONE_ROW, "--parallelism.zero_stage", "0", "--memory", "20"],
         "(ZeRO-3) (parallelism.zero_stage = 3): "),
        (["--model.flavor", "1.7B", *ONE_ROW, "--parallelism.data_parallel_replicate_degree", "2", "--memory", "20"],
         "(ZeRO-3) (parallelism.zero_stage = 3, parallelism.data_parallel_replicate_degree = 1): "),
        # a single row of 32,768 tokens: its activations are what is large
        (["--model.flavor", "0.6B", *ONE_ROW, "--training.seq_len", "32768", *WHOLE, "--memory", "9"],
         "split each matrix over 2 cards (parallelism.tensor_parallel_degree = 2, "
         "training.gradient_accumulation_steps = 4, training.target_tokens_per_step = 0): "),
        (["--model.flavor", "14B", *ONE_ROW, "--lora.rank", "8", "--gpus", "1", "--memory", "24"],
         "base weights in 4 bits (QLoRA) (lora.base = nf4): "),
        (["--model.flavor", "8B", *ONE_ROW, "--parallelism.pipeline_parallel_degree", "2", "--memory", "10"],
         "(QLoRA) (lora.rank = 16, lora.base = nf4): "),
    ],
)  # fmt: skip
def test_the_changes_that_other_trainers_call_by_name_are_proposed(
    settings: list[str], helps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner.main([*SFT, *settings]) == 1
    said = capsys.readouterr().out
    assert helps in said and "still too much" not in said, said


def test_a_memory_without_a_device_has_no_name_and_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main([*SFT, "--memory", "32GB"]) == 0
    said = capsys.readouterr().out
    assert "2 x card, 32.0 GiB each" in said and "no time: it needs the speed of the card" in said
    assert "MI100" not in said and "tokens/s" not in said
    assert planner.main([*SFT, "--memory", "32GB", "--device", "mi100"]) == 0 and "tokens/s" in capsys.readouterr().out
    for needs_speed in (["--search"], ["--tokens", "1e6"]):
        assert planner.main([*SFT, "--memory", "32GB", *needs_speed]) == 2
        assert "need the speed of the card, too; add --device: mi50, mi100, " in capsys.readouterr().err


def test_for_scripts_it_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["--parallelism.pipeline_parallel_degree", "2"]
    assert planner.main([*BIG, *LEAN, *pipeline, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["memory"]) == 2 and found["fits"] is True and found["bubble"] == pytest.approx(1 / 97)
    assert found["sent"]["pipeline"] == 96 * 1024 * 4096 * 2 and found["sent"]["data parallel"] == 0
    assert all(sum(m["categories"].values()) == pytest.approx(m["peak"]) for m in found["memory"])


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, why in (
        (["--write", "x.toml"], "--write needs --search"),
        (["--count"], "--count"),
        (["--search", "--tokens", "1e9"], "--tokens is for one config"),
        (["--search", "--tokens", "1e9", "--write", str(tmp_path / "new.toml")], "--tokens is for one config"),
        (["--search", "--write", str(tmp_path)], "is no regular file"),
    ):
        assert planner.main([*BIG, *wrong]) == 2 and why in capsys.readouterr().err


@pytest.mark.full
def test_a_search_writes_a_config_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = tmp_path / "best.toml"
    assert planner.main([*BIG, "--search", "--write", str(best)]) == 0
    said = capsys.readouterr().out
    assert "of" in said and "tensor parallel over 2" in said
    assert planner.main(["--job.config_file", str(best)]) == 0
    before = best.read_bytes()
    assert planner.main([*BIG, "--search", "--write", str(best)]) == 2 and best.read_bytes() == before
    config = load_config(["--job.config_file", str(best)], 2, with_files=False)
    assert config.batch(2).global_batch_size == 96 and config.optimizer.master == "bf16_sr"
    named = [*BIG, "--search", "--device", "mi100"]
    assert planner.main([*named, "--memory", "8"]) == 0
    assert "weights on the host" in capsys.readouterr().out
    assert planner.main([*named, "--memory", "3"]) == 2
    assert "no layout fits 3.0 GiB; the smallest needs" in capsys.readouterr().err


def test_what_moves_to_the_host_and_back_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """8B on an MI100: 16.4 GB of gradients in bf16, 8.2 billion elements, a link of which half is reached."""
    alone = ["--gpus", "1", "--parallelism.zero_stage", "3", "--activation_checkpoint.mode", "full", "--json"]
    plans = {}
    for offload in ("nothing", "optimizer", "weights"):
        planner.main([*BIG, *LEAN, *alone, "--memory.offload", offload])
        plans[offload] = json.loads(capsys.readouterr().out)
    (memory,), gib = plans["optimizer"]["memory"], 1 << 30
    assert plans["optimizer"]["fits"] and memory["host"] / gib == pytest.approx(30.6, abs=0.1)
    assert plans["weights"]["memory"][0]["host"] / gib == pytest.approx(
        58.0, abs=1.0
    )  # weights and gradients in powers of two
    elements, link = 8.19e9, 16e9
    assert plans["optimizer"]["update"] == pytest.approx(elements * (2 + 2 + 2 / 256) / link, rel=0.01)
    # GFLOP per token: forward of blocks, attention and head; the blocks' second one lacks each one's last matrix
    forward, again = 13.89 + 0.30 + 1.24, 13.89 - 3.62 + 0.30
    backward = (2 * forward + again) / (3 * forward + again) * plans["nothing"]["step_seconds"] / 96
    hidden_from = 1024 * (2 - 1 / 96) * elements * 2 / link / backward
    assert plans["optimizer"]["hidden_from"] == pytest.approx(hidden_from, rel=0.01)
    assert plans["nothing"]["hidden_from"] == plans["nothing"]["update"] == 0
    seconds = [plans[offload]["step_seconds"] for offload in ("nothing", "optimizer", "weights")]
    assert seconds == sorted(seconds)


def test_the_host_launches_less_with_our_kernels() -> None:
    """They run where nothing is compiled. From so many tokens on a card computes longer than its host launches."""
    for lora in ({"rank": 0}, {"rank": 16}, {"rank": 16, "base": "nf4"}):
        settings = {"training": {"seq_len": 256, "gradient_accumulation_steps": 1}, "lora": lora}
        run = Workload.of(with_settings(Config(model=ModelConfig(flavor="0.6B")), settings), 1)
        ours, plain = (
            make_plan(run.changed({"compile": {"enable": is_compiled}}), 80 * GIB, DEVICES["h100"])
            for is_compiled in (False, True)
        )
        assert 256 < ours.enough < plain.enough and ours.seconds < plain.seconds


def test_one_card_may_be_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main([*SFT, "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 10 and {plan["ranks"] for plan in found} <= {1, 2}
    assert [plan["step_seconds"] for plan in found] == sorted(plan["step_seconds"] for plan in found)


PIPELINE = ["--job.config_file", str(REPO / "train_configs" / "qwen3_8b_pp2_8bit.toml")]


def test_a_search_starts_from_the_rows_of_the_config_on_all_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a layout that one card cannot have."""
    few = ["--model.flavor", "0.6B", "--training.target_tokens_per_step", "0", "--training.local_batch_size", "1"]
    few += ["--training.gradient_accumulation_steps", "2"]
    assert planner.main([*PIPELINE, *few, "--search", "--json"]) == 0
    of_two = json.loads(capsys.readouterr().out)
    of_one = search(
        Workload.of(load_config([*PIPELINE, *few], None, with_files=False), 1), 2, 32 * GIB, DEVICES["mi100"]
    )
    splits = [(plan.config.layout(plan.ranks), plan.config.batch(plan.ranks)) for plan in of_one]
    layouts = [*(plan["layout"] for plan in of_two), *(asdict(layout) | asdict(batch) for layout, batch in splits)]
    assert {one["local_batch_size"] * one["gradient_accumulation_steps"] * one["dp_degree"] for one in layouts} == {2}
    assert of_two[0]["ranks"] == 2 and layouts[-1]["dp_degree"] == 1


def test_the_page_has_the_plans_of_the_published_rows() -> None:
    page = (REPO / "docs" / "MEMORY.md").read_text()
    for (batch, ga, mode, dtype), theirs in PUBLISHED.items():
        config = load_config(
            [*PIPELINE[:1], str(REPO / "train_configs" / "qwen3_0.6b_pp2.toml")], None, with_files=False
        )
        schedule = "1F1B" if ga > 1 else "GPipe"
        training = {"local_batch_size": batch, "gradient_accumulation_steps": ga, "target_tokens_per_step": 0}
        change: dict[str, Any] = {
            "training": {**training, "mixed_precision_param": dtype, "seq_len": 1024},
            "activation_checkpoint": {"mode": mode}, "parallelism": {"pipeline_parallel_schedule": schedule},
        }  # fmt: skip
        worst = make_plan(Workload.of(with_settings(config, change), 2), 32 * GIB, DEVICES["mi100"]).fullest
        planned, kept = worst.peak / 1e9, worst.categories["activations"] / 1e9
        row = f"| {batch} | {ga} | {mode} | {dtype} | {theirs.peak_gb:g} | {planned:.2f} | {kept:.2f} |\n"
        assert row in page, row


def test_a_device_that_is_not_known_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (
        ("mi1OO", "did you mean mi"),
        ("9999x", "--help lists"),
        ("mine.toml", "--memory 24GB"),
    ):
        assert planner.main([*SFT, "--device", name]) == 2
        assert said in capsys.readouterr().err


def test_it_answers_without_torch() -> None:
    code = "import sys; from titan_mi100.tools import plan; plan.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *BIG, *LEAN], check=True, cwd=REPO, capture_output=True)


def run(folder: Path, *settings: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """The default run of a few steps in one process. Args: first: Python to run before it."""
    code = f"import runpy, sys\n{first}\nrunpy.run_module('titan_mi100.train', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "--job.run_folder", str(folder), "--training.steps", "4", *settings]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True)


@pytest.mark.full
def test_a_run_that_does_not_fit_is_refused_before_its_start(tmp_path: Path) -> None:
    refused = run(tmp_path / "a", "--memory.limit_gib", "0.01")
    assert refused.returncode == 2 and "what helps most: " in refused.stderr
    assert "step 1/" not in refused.stdout
    first = (
        "from titan_mi100.parallel import distributed\nfrom titan_mi100.planning.cards import Gpu\n"
        "distributed.data_sheet = lambda _: Gpu('made up', {'float32': 0.5}, 1, 1)"
    )
    warned = run(tmp_path / "b", "--memory.limit_gib", "0.01", "--memory.on_overflow", "warn", first=first)
    assert warned.returncode == 0 and "what helps most: " in warned.stderr and "step 4/4" in warned.stdout
    found = json.loads((tmp_path / "b" / forecast.FILE).read_text())
    assert found["card"] > 0 and found["mfu"] == pytest.approx(found["flops"] / found["step_seconds"] / 0.5e12)


def test_out_of_memory_before_a_run_is_open_has_no_plan(world: World, tmp_path: Path) -> None:
    state = ending_of(torch.OutOfMemoryError("tried to allocate 2.00 GiB"), world, tmp_path)
    where = f"rank 0 on {socket.gethostname()}, before the first step"
    assert state["message"] == f"{where}: out of memory: while the run was opened\ntried to allocate 2.00 GiB"
    assert (state["state"], state["exit_code"]) == ("out_of_memory", 6)


@pytest.mark.full
def test_out_of_memory_has_its_own_exit_code_and_says_what_was_planned(tmp_path: Path) -> None:
    first = (
        "import torch\nfrom titan_mi100.optim.optimizer import AdamW\n"
        "def update(*_): raise torch.OutOfMemoryError('tried to allocate 2.00 GiB')\nAdamW.update = update"
    )
    ended = run(tmp_path / "run", first=first)
    assert ended.returncode == 6
    assert (
        re.search(r"rank 0 on .*, .*: out of memory: planned 0\.", ended.stderr) and "activations 0.0" in ended.stderr
    )
    assert "measured so far" in ended.stderr and "tried to allocate 2.00 GiB" in ended.stderr
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert state["exit_code"] == 6 and state["state"] == "out_of_memory"


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(found.value) and is_out_of_memory(torch.OutOfMemoryError("x"))
    for message in (
        "HIP error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    ):
        assert is_out_of_memory(RuntimeError(message)), message
    assert not is_out_of_memory(RuntimeError("a size does not fit"))
