"""Ranks that agree: on mistakes, on what rank 0 decides, on sums; and on what hardware is refused."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, free_port, job_environment, torchrun
from torch import nn

from titan_mi100.errors import UserError
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World, measure_gradients


def test_a_mistake_on_one_rank_ends_all_alike(tmp_path: Path) -> None:
    torchrun(str(REPO / "tests/gloo/job_together.py"), str(tmp_path))
    said = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    crashed = [lines.pop(5) for lines in said]
    assert crashed == ["KeyError 'a bug'", "RuntimeError rank 0 failed: 'a bug'"]
    assert said[0] == said[1]
    assert said[0] == [
        "rank 0 has no such file",
        "rank 1 has no such file",
        "nothing",
        "made by 0",
        "cannot be made",
        "met",
        "met",
        str([2.0, 2.0 * (2**53 - 1)]),
    ]


LOST = """
import os, signal
from titan_mi100.parallel import distributed
world = distributed.init_distributed()
distributed.wait_for_all()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    distributed.wait_for_all()
except RuntimeError as error:
    print(distributed.is_about_a_lost_process(error), flush=True)
os._exit(0)
"""


@pytest.mark.full
def test_a_rank_that_is_killed_ends_the_wait_of_the_others() -> None:
    # without a launcher, which would end them
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOST], env={**job_environment(), **place, "RANK": rank}, stdout=subprocess.PIPE
        )
        for rank in "01"
    ]
    try:
        assert ranks[0].communicate(timeout=60)[0].endswith(b"True\n")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_gpus_that_torch_cannot_use_and_too_many_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "count_gpus", lambda is_rocm: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"this machine has GPUs \(2\), but torch .* cannot use them"):
        distributed.init_distributed()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 processes, usable GPUs: 2; start with --nproc_per_node 2"):
        distributed.init_distributed()


def test_the_device_of_two_tasks_is_refused(no_process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task meets a store in which the others have noted theirs; a task sees one card."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "HashStore", lambda: store)
    monkeypatch.setattr(distributed, "count_gpus", lambda **_: 1)
    card = SimpleNamespace(uuid="", name="a card")
    accelerator = SimpleNamespace(
        count=lambda: 1, is_rocm=lambda: False, select=lambda _: torch.device("cpu"), properties=lambda _: card
    )
    monkeypatch.setattr(distributed, "accelerator", accelerator)

    def start(rank: int, uuid: str) -> None:
        card.uuid = uuid
        monkeypatch.setenv("RANK", str(rank))
        if dist.is_initialized():
            dist.destroy_process_group()
        distributed.init_distributed()

    start(0, "one")  # alone on its node
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    start(0, "one")
    start(1, "two")
    with pytest.raises(UserError, match="rank 2: another process uses the same GPU"):
        start(2, "one")


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    for dtype, bar in ((torch.float32, 1e-6), (torch.bfloat16, 1e-5)):
        parameter = nn.Parameter(torch.empty(3, 1 << 22, dtype=dtype))
        parameter.grad = torch.randn_like(parameter)
        squares = measure_gradients([parameter]).squares
        assert abs(squares / parameter.grad.double().square().sum() - 1) < bar


@pytest.mark.parametrize(
    ("hip", "name", "units", "gib", "arch", "sheet"),
    [
        (None, "NVIDIA GeForce RTX 4090", 128, 23.5, "sm89", "RTX 4090"),  # in CUDA builds gcnArchName is the name
        ("6.4", "gfx908:sramecc+:xnack-", 120, 32, "gfx908:sramecc+:xnack-", "MI100"),
        ("6.4", "gfx1100", 48, 45, "gfx1100", "Radeon PRO W7900"),  # the 7900 XTX's chip with twice its memory
        ("6.4", "gfx1036", 1, 16, "gfx1036", None),
    ],
)
def test_a_card_is_known_by_its_architecture_never_by_its_name(
    hip: str | None, name: str, units: int, gib: float, arch: str, sheet: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(
        name="a card", gcnArchName=name, major=8, minor=9, total_memory=gib * 2**30, multi_processor_count=units
    )
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert distributed.device_name(torch.device("cuda"))[1:] == (arch, units)
    found = distributed.data_sheet(torch.device("cuda"))
    assert (found and found.name) == sheet and distributed.data_sheet(torch.device("cpu")) is None


def test_a_world_of_one_uses_gloo_without_a_network_and_sends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a collective")

    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(dist, name, refused, raising=False)
    monkeypatch.setattr(distributed, "all_gather_tensor", refused)
    mine = torch.tensor([0.1, torch.inf], dtype=torch.float64)
    assert torch.equal(distributed.gather_values(mine, world.device), mine[None])
    assert distributed.sum_over_ranks([0.1, True], world.device) == [0.1, 1.0]
    assert distributed.any_rank("x", world.device) and not distributed.any_rank("", world.device)
    distributed.sum_in_place(mine)


@pytest.mark.parametrize("is_own", [False, True])
def test_only_torchs_own_collectives_need_the_devices_library(
    is_own: bool, no_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under torchrun: its store is not asked."""
    found = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(distributed.accelerator, "group_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: found.append((backend, *options)))
    assert distributed.init_distributed(has_own_collectives=is_own).size == 1
    assert found == [("cpu:gloo,cuda:nccl" if is_own else "gloo", "store", "rank", "world_size")]
