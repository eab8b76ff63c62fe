"""Gradients, optimizer state, weights and blocks' inputs in the host's memory: the same bits as on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO
from parity.table import LAYOUTS, Cell, launch
from torch import nn

from titan_mi100.config.load import load_config
from titan_mi100.device import pinned
from titan_mi100.errors import UserError
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel import offload
from titan_mi100.parallel.distributed import measure_gradients, sum_of_squares
from titan_mi100.parallel.offload import HostGradients, inputs_on_host

CPU = torch.device("cpu")


LEAN = ("8bit", "bf16_sr")


def cell(
    layout: str, offload: str, tied: bool = False, precision: str = "float32", kind: tuple[str, str] = LEAN, **more: Any
) -> Cell:
    """Full recomputation, and inputs on the host, where untied."""
    options = {"steps": 4, "state": kind[0], "master": kind[1], **more}
    return Cell(layout, *LAYOUTS[layout], tied, 2, precision, offload=offload, **options)


def weights(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: tensor for record in records for name, tensor in record["weights"]}


MORE = ("FSDP2 x2", "FSDP2 x2, ZeRO-1", "TP2", "HSDP 2x2")


@pytest.mark.parametrize("layout", ["one process", *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_run_has_the_same_bits_wherever_things_are_and_goes_on_elsewhere(
    layout: str, full: bool, tmp_path: Path
) -> None:
    """Four steps with each kind of offload; and two, then a checkpoint from which another kind goes on. By default
    half as many."""
    steps = 4 if full else 2
    kinds = ["nothing", "optimizer", "weights"]
    if layout in ("TP2", "one process"):  # where weights on the host are refused, or need the wrapper that one
        kinds.pop()  # process does not have otherwise
    saved = [cell(layout, kind, save_to=str(tmp_path / kind), steps=steps) for kind in kinds]
    going_on = list(zip(kinds, [*kinds[1:], kinds[0]], strict=True))
    jobs = [cell(layout, kind, steps=steps) for kind in kinds] + saved
    jobs += [cell(layout, to, load_from=f"{tmp_path / start}/step-{steps // 2}", steps=steps) for start, to in going_on]
    found = [weights(records) for records in launch(jobs, tmp_path / "jobs")]
    whole, resumed = found[: len(kinds)], found[2 * len(kinds) :]
    for what, other in zip([*kinds, *going_on], [*whole, *resumed], strict=True):
        assert other.keys() == whole[0].keys()
        for name, tensor in other.items():
            assert torch.equal(tensor, whole[0][name]), (what, name)


@pytest.mark.parametrize("layout", [pytest.param("one process", marks=pytest.mark.full), "FSDP2 x2"])
def test_so_it_is_with_tied_weights_in_bf16_with_clipping_and_every_optimizer(
    layout: str, full: bool, tmp_path: Path
) -> None:
    kinds = ["nothing", "optimizer", "weights"][: 2 if layout == "one process" else 3]
    default = ("fp32", "fp32")
    models = [(True, "float32", default), (False, "bfloat16", default), (True, "bfloat16", LEAN)]
    if layout != "one process" and not full:
        del models[1]
    jobs = [cell(layout, kind, *model, steps=2, layers=2, max_norm=0.05) for model in models for kind in kinds]
    found = [weights(records) for records in launch(jobs, tmp_path)]
    for number, model in enumerate(models):
        here, *there = found[number * len(kinds) : (number + 1) * len(kinds)]
        for kind, other in zip(kinds[1:], there, strict=True):
            assert [name for name in here if not torch.equal(here[name], other[name])] == [], (model, kind)


class Model(nn.Module):
    """Matrices and a vector, as HostGradients finds them in a model."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList(torch.randn(16, 8, generator=generator) for _ in range(4))
        self.vector = nn.Parameter(torch.randn(8, generator=generator))
        self.model = nn.Module()
        self.model.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix.T @ matrix) * self.vector
        return self.model.norm(x).square().sum()


def as_part(model: Model) -> Qwen3:
    return model  # type: ignore[return-value]


def test_sums_are_autograds_and_no_gradient_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_PIECE", 3 * 8)  # rows that do not divide the matrices
    here, there = Model(), Model()
    sums = HostGradients([as_part(there)], CPU)
    inputs = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        here.zero_grad()
        there.zero_grad()
        sums.begin_step()
        for x in inputs:
            here(x).backward()
            there(x).backward()
        for mine, theirs in zip(here.matrices, there.matrices, strict=True):
            assert theirs.grad is None and torch.equal(mine.grad, sums[theirs])  # type: ignore[arg-type]
            assert torch.equal(sum_of_squares(mine.grad), sums._sums[theirs].squares)  # type: ignore[arg-type]
        assert there.vector not in sums and torch.equal(here.vector.grad, there.vector.grad)  # type: ignore[arg-type]


def test_the_norm_is_that_of_all_gradients_and_a_wrong_value_is_seen() -> None:
    model = Model()
    sums = HostGradients([as_part(model)], CPU)
    parameters = list(model.parameters())
    for factor, is_finite in ((1.0, True), (torch.inf, False), (1.0, True)):
        model.zero_grad()
        sums.begin_step()
        only_its = model.matrices[2].register_hook(lambda gradient, by=factor: gradient * by)
        model(torch.ones(2, 8)).backward()
        only_its.remove()
        gradients = [sums.get(parameter, parameter.grad) for parameter in parameters]
        for copies in ([], [model.matrices[1]]):
            found = sums.measure(measure_gradients([model.vector]), copies, parameters)
            assert found.finite.item() == is_finite
            if is_finite:
                mine = [g for g, p in zip(gradients, parameters, strict=True) if all(p is not copy for copy in copies)]
                assert found.squares.item() == pytest.approx(sum(g.double().square().sum().item() for g in mine))  # type: ignore[union-attr]


def test_what_waits_for_its_way_is_limited_and_gone_before_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 16 * 8 * 4
    monkeypatch.setattr(offload, "_ON_THE_WAY", 2 * size)
    model = Model()
    sums = HostGradients([as_part(model)], CPU)
    waiting = []
    add = sums._add

    def noted(*arguments: Any) -> None:
        add(*arguments)
        waiting.append(sum(gradient.nbytes for _, gradient in sums._waiting) + size)

    monkeypatch.setattr(sums, "_add", noted)
    model(torch.ones(2, 8)).backward()
    assert max(waiting) == 2 * size and sums._waiting
    model(torch.ones(2, 8))
    assert not sums._waiting


def test_inputs_come_back_and_only_those_with_gradients_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[torch.Tensor] = []

    def noted(like: torch.Tensor) -> torch.Tensor:
        lent.append(torch.full_like(like, torch.nan).detach())
        return lent[-1]

    monkeypatch.setattr(offload.pinned, "pinned_like", noted)

    def block(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x * table).sin() * x

    x, table = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    recomputed = inputs_on_host(lambda *a: torch.utils.checkpoint.checkpoint(block, *a, use_reentrant=False))
    (expected,) = torch.autograd.grad(block(x, table).sum(), x)
    (found,) = torch.autograd.grad(recomputed(x, table).sum(), x)
    assert torch.equal(found, expected) and len(lent) == 1 and torch.equal(lent[0], x)


def test_whole_pages_are_zeros_of_exactly_the_size_and_of_their_own() -> None:
    found = pinned.whole_pages((3, 5), torch.bfloat16)
    assert found.shape == (3, 5) and not found.any() and found.data_ptr() % 4096 == 0
    found.fill_(2)
    assert not pinned.whole_pages((3, 5), torch.bfloat16).any() and found.sum() == 30
    assert pinned.whole_pages((0, 5), torch.int8).shape == (0, 5)
    with pytest.raises(MemoryError, match="the host cannot allocate"):
        pinned.whole_pages((1 << 46,), torch.float32)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--memory.offload=optimizer", "--parallelism.pipeline_parallel_degree=2"], "is not for a pipeline"),
        (["--memory.offload=weights", "--parallelism.tensor_parallel_degree=2"], "is not for tensor parallel"),
        (["--memory.offload=optimizer", "--parallelism.zero_stage=0"], "is not for DDP"),
        (["--memory.offload=optimizer", "--lora.rank=8"], "moves next to nothing"),
        (["--memory.offload=weights", "--lora.rank=8", "--lora.base=nf4"], "is not for .lora. base"),
        (["--memory.offload_activations=true", "--activation_checkpoint.mode=selective"], 'set .* mode = "full"'),
        (["--memory.offload=disk"], "nothing, optimizer, weights"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: list[str], said: str) -> None:
    config = str(REPO / "train_configs" / "qwen3_8b_fsdp2_8bit.toml")
    with pytest.raises(UserError, match=said):
        load_config(["--job.config_file", config, *settings], 2, with_files=False)
