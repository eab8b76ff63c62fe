"""DDP and PowerSGD on two real gloo processes: what is sent, what comes out, and resumes from every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import REPO, torchrun
from gloo.job_ddp import RANK_1, SPEC, START, config_of, run

from titan_mi100.config.check import check
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import parameter_count
from titan_mi100.wording import bytes_in_words

RANKS = (0, 1)
WARNING = "PowerSGD: the checkpoint has no PowerSGD state for this layout"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ddp")
    torchrun(str(REPO / "tests/gloo/job_ddp.py"), str(path))
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """By rank, each run's record."""
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in RANKS]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys() and first
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
def test_steps_before_the_start_are_those_of_plain_ddp_and_later_ones_are_not(runs: list) -> None:
    for found in runs:
        plain, lossy = found["ddp"], found["rank 1"]
        assert all(plain["losses"][step] == lossy["losses"][step] for step in range(1, START + 1))
        assert equal(plain["kept"][START - 1]["weights"], lossy["kept"][START - 1]["weights"])
        assert not equal(plain["kept"][START]["weights"], lossy["kept"][START]["weights"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("rank 4", 50),
        ("rank 1", 12),
        ("cold", 12),
        ("FSDP2 to rank 1", 14),
    ],
)
def test_ranks_hold_the_same_weights_after_lossy_steps(name: str, step: int, runs: list) -> None:
    kept = [found[name]["kept"][step] for found in runs]
    assert equal(kept[0]["weights"], kept[1]["weights"])
    errors = [record["memory"]["error.model.layers.0"] for record in kept]
    assert not torch.equal(*errors)  # each rank's own: a resume that mixed them up would be seen


@pytest.mark.full
def test_the_loss_falls_and_after_50_steps_is_at_most_5_percent_above_plain_ddps(runs: list) -> None:
    last = {name: found["loss on all rows"] for name, found in runs[0].items()}
    assert last["rank 4"] < 0.25 * runs[0]["rank 4"]["losses"][1]
    assert 0.85 * last["ddp"] <= last["rank 4"] <= 1.05 * last["ddp"]  # from random weights chance has its part
    # fine-tuning: from weights that have learned something rank 1 does too, from random ones it does not
    assert last["ddp to rank 1"] == pytest.approx(last["ddp on"], rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(("whole", "step"), [("rank 1", 3), ("rank 1", 9), ("cold", 9)])
def test_a_resume_before_or_after_the_start_is_bit_identical(whole: str, step: int, runs: list) -> None:
    for found in runs:
        again = found[f"{whole} from {step}"]
        assert min(again["losses"]) == step + 1
        assert all(found[whole]["losses"][number] == loss for number, loss in again["losses"].items())
        for what in ("weights", "memory"):
            assert equal(again["kept"][12][what], found[whole]["kept"][12][what])
        assert not any(WARNING in line for line in again["messages"])


@pytest.mark.full
def test_the_bytes_reported_are_those_given_to_all_reduce(runs: list) -> None:
    whole = 4 * parameter_count(SPEC)
    for name, found in runs[0].items():
        for step, reported in found["bytes"].items():
            if name in ("ddp", "ddp on", "rank 1 to FSDP2"):
                assert reported == (None if "FSDP2" in name else whole)  # neither goes through Python
            else:
                assert reported == found["reduced"][step], (name, step)
    assert set(runs[0]["bf16"]["bytes"].values()) == {whole / 2}
    sent = runs[0]["rank 1"]["bytes"]
    vectors = 2 * (2 * 64 + 2 * 16) + 64
    # a layer's q, o: 64 x 64; k, v: 64 x 32; gate, up: 128 x 64; down: 64 x 128; the embedding: 320 x 64
    compressed = 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (128 + 64)) + (320 + 64)
    assert {sent[START - 1], sent[START]} == {whole, 4 * (vectors + compressed)}


@pytest.mark.full
def test_other_layouts_and_settings_go_on_without_the_memory_and_say_so(runs: list) -> None:
    found = runs[0]
    as_before = [name for name in ("rank 1", "rank 1 to FSDP2", "rank 2 from 10") if name in found]
    assert not any(WARNING in line for name in as_before for line in found[name]["messages"])
    for name in ("FSDP2 to rank 1", "rank 1 to rank 2"):
        assert sum(WARNING in line for line in found[name]["messages"]) == 1
        assert all(count < 4 * parameter_count(SPEC) / 10 for count in found[name]["bytes"].values())  # goes on lossy
    assert found["rank 1 to FSDP2"]["losses"][10] == pytest.approx(found["rank 1"]["losses"][10], rel=1e-5)


@pytest.mark.full
def test_another_number_of_processes_goes_on_without_the_memory_and_says_so(
    folder: Path, runs: list, world: World, tmp_path: Path
) -> None:
    config = config_of({**RANK_1, "data_parallel_shard_degree": -1})
    one = run(world, tmp_path, config, 10, resume=folder / "rank-1" / "step-9")
    assert sum(WARNING in line for line in one["messages"]) == 1 and one["bytes"][10] < 4 * parameter_count(SPEC) / 10


@pytest.mark.full
def test_the_checkpoint_names_the_memory_by_rank_and_has_none_before_the_start(folder: Path, runs: list) -> None:
    def memory(step: int) -> set[str]:
        saved = dcp.FileSystemReader(folder / "rank-1" / f"step-{step}").read_metadata().state_dict_metadata
        return {name for name in saved if name.startswith("powersgd.")}

    names = {f"powersgd.rank-{rank}.{name}" for rank in RANKS for name in runs[rank]["rank 1"]["kept"][9]["memory"]}
    assert memory(3) == set() and memory(9) == names and "powersgd.rank-1.error.model.layers.0" in names


def test_powersgd_refuses_what_it_would_round() -> None:
    lean = replace(config := config_of(RANK_1), optimizer=replace(config.optimizer, master="bf16_sr"))
    for wrong, key in (
        (config_of(RANK_1, reduce="bfloat16"), "training.mixed_precision_reduce"),
        (lean, "optimizer.master"),
    ):
        assert [key in one.about for one in check(wrong, 2) if "powersgd" in one.key] == [True]


def test_bytes_in_words() -> None:
    assert [bytes_in_words(size) for size in (0, 999, 1000, 3_420_000, 2_384_000_000)] == [
        "0.0 B", "999.0 B", "1.0 kB", "3.4 MB", "2.4 GB",
    ]  # fmt: skip


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_one_process_sends_nothing(reduce: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one has no group of the device. Its gradients are rounded all the same, if bf16 is asked for."""
    config = config_of({"zero_stage": 0}, reduce=reduce)
    before = run(world, tmp_path / "sent", config, 2, keep_at=(2,))
    all_reduce = torch.distributed.all_reduce

    def of_the_host(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        assert tensor.numel() <= 64, "a collective of gradients"
        return all_reduce(tensor, *rest, **named)

    monkeypatch.setattr(torch.distributed, "all_reduce", of_the_host)
    found = run(world, tmp_path / "not", config, 2, keep_at=(2,))
    assert found["losses"] == before["losses"] and equal(found["kept"][2]["weights"], before["kept"][2]["weights"])
