"""The grouped products of experts in Triton's interpreter, against fp64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPO, torchrun
from gloo.job_parity import open_split, run_split
from interpreted import DEVICE
from test_qwen3_moe import wide_case
from torch import Tensor, nn

from titan_mi100.config.settings import Config, LoRAConfig
from titan_mi100.model import experts
from titan_mi100.model.experts import NF4ExpertLinear, Routes
from titan_mi100.model.fused import experts_launch
from titan_mi100.model.fused.running import only, use
from titan_mi100.model.lora import apply_lora
from titan_mi100.model.nf4 import NF4Linear, quantize
from titan_mi100.model.qwen3_5_moe import Qwen3_5Moe
from titan_mi100.model.qwen3_moe import Qwen3Moe
from titan_mi100.open_run import model as open_model
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import PRESETS
from titan_mi100.shapes.qwen3_5 import every_fourth
from titan_mi100.shapes.qwen3_5_moe import Qwen3_5MoeSpec
from titan_mi100.shapes.qwen3_moe import LINEARS, Qwen3MoeSpec

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = {
    "one without rows": [23, 0, 41, 1],
    "all to one": [0, 0, 70, 0],
    "whole tiles": [16, 32, 0, 64],
    "one row": [0, 1, 0, 0],
    "many experts": [3, 0, 0, 17, 1, 0, 15, 16, 0, 5, 0],
}


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=draw).to(DEVICE, dtype)


def assert_rounded_once(ours: Tensor, exact: Tensor, size: float) -> None:
    """Args: size: of the terms that were added in fp32."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=0.51 * eps, atol=max(1e-6 * size, 1e-7))


def check_against_fp64(counts: list[int], inner: int, columns: int, dtype: torch.dtype) -> None:
    """Both forms of products, also added, and the sums; each twice."""
    ends, experts, rows = ends_of(counts), len(counts), sum(counts)
    x, y = drawn(rows, inner, dtype=dtype), drawn(rows, columns, dtype=dtype)
    weight = drawn(experts, inner, columns, dtype=dtype)
    parts = [part.double() for part in x.split(counts)]
    exact = torch.cat([part @ matrix.double() for part, matrix in zip(parts, weight, strict=True)])
    for is_transposed, stored in ((True, weight.flatten(0, 1)), (False, weight.mT.reshape(-1, inner))):
        found = experts_launch.products(x, stored, ends, is_transposed)
        assert_rounded_once(found, exact, inner)
        assert torch.equal(experts_launch.products(x, stored, ends, is_transposed), found)
        added = experts_launch.products(x, stored, ends, is_transposed, 0.375, y.clone())
        assert_rounded_once(added, y.double() + 0.375 * exact, inner)
    found = experts_launch.sums(x, y, ends, 0.375)
    exact = torch.cat([0.375 * a.t() @ b.double() for a, b in zip(parts, y.split(counts), strict=True)])
    assert_rounded_once(found, exact, max(counts))
    assert torch.equal(experts_launch.sums(x, y, ends, 0.375), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("inner", "columns"), [(48, 72), (5, 33), (80, 3)])
def test_products_and_sums_equal_fp64(inner: int, columns: int, name: str, dtype: torch.dtype) -> None:
    check_against_fp64(COUNTS[name], inner, columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_passes(dtype: torch.dtype) -> None:
    assert experts.trial(DEVICE, dtype) == ""


@pytest.mark.parametrize("fault", ["other bits", "a row of another expert", "no zeros"])
def test_the_trial_sees(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products, sums, calls = experts_launch.products, experts_launch.sums, []

    def changed(x: Tensor, weight: Tensor, ends: Tensor, *others: Any) -> Tensor:
        calls.append(1)
        if fault == "a row of another expert":
            ends = ends - (ends == 130).int()
        y = products(x, weight, ends, *others)
        return y * (1 + 1e-7 * len(calls)) if fault == "other bits" else y

    monkeypatch.setattr(experts_launch, "products", changed)
    if fault == "no zeros":
        monkeypatch.setattr(experts_launch, "sums", lambda *args: sums(*args).index_fill(0, torch.tensor([300]), 1.0))
    words = "other bits the second time" if fault == "other bits" else "differs from that of plain"
    assert words in experts.trial(DEVICE, torch.float32)


def test_a_run_records_them_if_it_has_experts_and_had_them_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_model, "choose_kinds", lambda trials, wanted, *_: sorted(wanted))
    monkeypatch.setattr(open_model, "use", lambda *_: None)
    monkeypatch.setattr(open_model, "from_rank_zero", lambda compute: compute())

    def chosen(flavor: str, **before: Any) -> bool:
        found = SimpleNamespace(manifest={"chosen": {"attention": {"arch": "gfx908"}, **before}}) if before else None
        world = SimpleNamespace(device=torch.device("cpu"))
        inputs: Any = SimpleNamespace(config=Config(), spec=PRESETS[flavor], found=found, world=world)
        return "experts" in open_model.choose_fused(inputs, "gfx908")["fused"]

    assert chosen("30B-A3B") and not chosen("0.6B")
    assert chosen("30B-A3B", fused=["experts"]) and not chosen("30B-A3B", fused=["head"])


def mixtures(kind: str, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter]]:
    """A mixture, with adapters, with its experts in 4 bits; and what is trained."""
    spec = Qwen3MoeSpec(
        64, 64, 64, 1, 2, 2, 32, True, 1e4, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Moe(spec)
        if kind != "all":
            apply_lora(model, LoRAConfig(rank=4, base="nf4" if "4 bits" in kind else "whole", target_modules=LINEARS,
                                         dropout=0.25 * ("dropout" in kind)), dtype)  # fmt: skip
    mixture = model.model.blocks()[0].mlp.to_empty(device=DEVICE)
    draw = torch.Generator().manual_seed(3)
    for module in mixture.modules():
        if isinstance(module, NF4Linear):
            matrix = torch.randn(module.out_features, module.in_features, generator=draw) / 8
            for target, source in zip((module.weight, module.largest), quantize(matrix, dtype), strict=True):
                target.data = source.to(DEVICE)
        for own in module.parameters(recurse=False) if not isinstance(module, NF4Linear) else ():
            own.data = (torch.randn(own.shape, generator=draw) / 4).to(DEVICE, dtype)
    return mixture, [own for own in mixture.parameters() if own.requires_grad]


@pytest.mark.parametrize("kind", ["all", "adapters", "adapters, 4 bits", "adapters, 4 bits, dropout"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_mixture_computes_what_the_loop_does(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, trained = mixtures(kind, dtype)
    x, computed = drawn(1, 40, 64, dtype=dtype), []
    for kinds in ((), ("experts", "nf4"), ("experts", "nf4")):
        rows = x.clone().requires_grad_()
        torch.manual_seed(5)
        with only(kinds), monkeypatch.context() as patched:
            if kinds:
                patched.setattr(Routes, "counts", property(lambda _: pytest.fail("the host waits")))
            y = mixture(rows)
            computed.append([y.detach(), *torch.autograd.grad(y, (rows, *trained), x.cos())])
    plain, ours, again = computed
    assert all(map(torch.equal, ours, again))
    bar = 5e-6 if dtype == torch.float32 else 3e-2
    for one, other in zip(plain, ours, strict=True):
        assert one.abs().max() > 0 and (one - other).abs().max() <= bar * one.abs().max()


OURS = {"kinds": ("experts", "nf4")}
SPLIT = {"case": "wide", "local_batch_size": 4, "accumulation": 2, "backend": "eager", "checkpointing": "full"}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": {"lora": {"rank": 4, "target_modules": LINEARS, "expert_rank": 2}},
    "adapters, 4 bits": {"lora": {"rank": 4, "base": "nf4", "target_modules": LINEARS}},
}


def of_qwen3_5() -> dict[str, Any]:
    spec = Qwen3_5MoeSpec(
        320, 64, 64, 4, 4, 2, 2, 4, False, every_fourth(4), head_dim=32, linear_key_head_dim=16,
        linear_value_head_dim=16, rope_theta=1e4, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=2,
    )  # fmt: skip
    draw, model, weights = torch.Generator().manual_seed(4), Qwen3_5Moe(spec), {}
    with torch.device("meta"):
        adapted = Qwen3_5Moe(spec)
        apply_lora(adapted, LoRAConfig(rank=4, target_modules=("q_proj", "experts")), torch.float32)
    for name, own in [*model.named_parameters(), *adapted.named_parameters()]:
        weights.setdefault(name, torch.randn(own.shape, generator=draw) / 8)
    case = wide_case()
    return {**case, "spec": spec, "weights": weights, "documents": case["documents"][:8]}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("trained", TRAINED)
def test_a_run_has_the_loops_loss_and_gradients(family: str, trained: str, world: World) -> None:
    """With full recomputation, two microbatches, and in qwen3_5_moe shared experts."""
    case, split = wide_case(), {**SPLIT, **TRAINED[trained], "local_batch_size": 1}
    if family == "qwen3_5_moe":
        case = of_qwen3_5()
        if "lora" in split:
            split["lora"] = {
                "rank": 4,
                "base": split["lora"].get("base", "whole"),
                "target_modules": ("q_proj", "experts"),
            }
    plain = run_split(world, case, split)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Routes, "counts", property(lambda _: pytest.fail("the host waits")))
            ours = run_split(world, case, {**split, **OURS})
    finally:
        use(())
    assert ours["loss"] == pytest.approx(plain["loss"], rel=2e-6)
    for (name, found), (_, expected) in zip(ours["gradients"], plain["gradients"], strict=True):
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max(), name


@pytest.mark.full
def test_every_layout_trains_as_the_loop_does(tmp_path: Path, world: World) -> None:
    degrees = {"fsdp": {}, "tp": {"tensor_parallel_degree": 2}, "pp": {"pipeline_parallel_degree": 2}}
    layouts = {"all": ("fsdp", "tp"), "adapters": ("tp",), "adapters, 4 bits": ("fsdp", "tp", "pp")}
    case, runs = wide_case(), {}
    for trained, options in TRAINED.items():
        for layout in layouts[trained]:
            size = {"local_batch_size": 1 if layout == "fsdp" else 2, "parallelism": degrees[layout], "stop": 2}
            runs[f"{trained} {layout}"] = {**SPLIT, **options, **size, **OURS}
    torch.save({"cases": {"wide": case}, "splits": [], "runs": runs}, tmp_path / "job.pt")
    torchrun(str(REPO / "tests/gloo/job_lora.py"), str(tmp_path / "job.pt"), str(tmp_path), processes=2, timeout=900)
    records = torch.load(tmp_path / "rank-0.pt", weights_only=False)["runs"]
    for trained, options in TRAINED.items():
        run = open_split(world, case, {**SPLIT, **options, "local_batch_size": 2, "max_norm": 1.0})
        alone = [run.step().loss for _ in range(2)]
        for layout in layouts[trained]:
            assert records[f"{trained} {layout}"]["losses"] == pytest.approx(alone, rel=5e-6), (trained, layout)


def test_few_rows_in_4_bits_are_left_to_the_loop() -> None:
    layer = NF4ExpertLinear(64, 64 * 128, 128, True)
    stored = layer.weight, layer.weight, layer.weight
    with only(["experts", "nf4"]):
        assert [layer.is_grouped(torch.empty(n, 64), stored) for n in (31, 32)] == [False, True]
        assert layer.is_grouped(torch.empty(1, 64), stored[:1])
        assert not layer.is_grouped(torch.empty(99, 64).double(), stored[:1])
    with only(["experts"]):
        assert not layer.is_grouped(torch.empty(32, 64), stored)
