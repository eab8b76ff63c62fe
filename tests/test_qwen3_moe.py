"""Qwen3 with experts against transformers' in fp64, with its casts to fp32 lifted, and what experts must keep."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPO, random_documents, supervised_of, torchrun
from gloo.job_parity import open_split, run_split
from lifted import lifted
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.experts import ExpertLinear, Mixture, Routes, choose_products, keeping_routes
from titan_mi100.model.init import initial_values
from titan_mi100.model.layers import Linear
from titan_mi100.model.lora import LoRAExpertLinear, LoRALinear, _dropped, lora_values
from titan_mi100.model.qwen3_moe import Qwen3Moe
from titan_mi100.parallel.build import apply_activation_checkpointing
from titan_mi100.parallel.distributed import World, fill_parameters
from titan_mi100.run.expert_load import ExpertLoad
from titan_mi100.shapes.base import adapter_shapes
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3_moe import LINEARS, Qwen3MoeSpec
from titan_mi100.weights.base import Kind, Weights
from titan_mi100.weights.pieces import joined

SIZES = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e4}
TIED = Qwen3MoeSpec(311, 64, 96, 3, 4, 2, 32, True, **SIZES, norm_topk_prob=True, pad_token_id=208)
SPECS = {
    "tied": TIED,
    "untied, weights not normalised": replace(TIED, tie_word_embeddings=False, norm_topk_prob=False),
    "every second layer": replace(TIED, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(3,)),
    "all experts": replace(TIED, num_experts=4, num_experts_per_tok=4),
}


class Tensors(Weights):
    """Tensors in memory as a folder's."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.source, self.tensors = Path("memory"), tensors
        self.kinds = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(
        self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...], exactly: bool = False
    ) -> Tensor:
        return self.tensors[name][tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]


def reference(spec: Qwen3MoeSpec) -> Any:
    settings = {k: v for k, v in to_hf_config(spec).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, attn_implementation="eager"))
    model.set_experts_implementation("eager")
    with torch.no_grad():  # norms as they start would hide a weight that is not applied
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.08)
    return model.double()


def in_fp64(hf: Any, ids: Tensor) -> Tensor:
    return lifted(hf, ids, modeling_qwen3_moe, "Qwen3MoeRotaryEmbedding")


def held(spec: Qwen3MoeSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors as the model holds them."""
    model = Qwen3Moe(spec).double().requires_grad_(False)
    fill_parameters(model.named_parameters(), joined(Tensors(tensors), spec).read)
    return dict(model.named_parameters())


def ours(spec: Qwen3MoeSpec, hf: Any) -> Qwen3Moe:
    model = Qwen3Moe(spec, make_backend("eager", "cpu")).double()
    model.load_state_dict(held(spec, hf.state_dict()))
    return model


def draw(spec: Qwen3MoeSpec, *shape: int) -> Tensor:
    return torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", SPECS)
def test_logits_and_every_gradient_equal_transformers(name: str) -> None:
    spec = SPECS[name]
    hf = reference(spec)
    model, ids = ours(spec, hf), draw(spec, 2, 61)
    labels = ids.roll(-1, 1)
    labels[0, :11] = -100
    expected = in_fp64(hf, ids)
    assert (model(ids) - expected).abs().max() < 1e-10 * expected.abs().max()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(ids, labels=labels, supervised=supervised_of(labels)).sum().backward()
    exact = held(spec, {name: parameter.grad for name, parameter in hf.named_parameters()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-10, (name, error)


def dense(mixture: Mixture, x: Tensor) -> Tensor:
    """Every expert computes every token, and what a token did not choose is left out."""
    probabilities, experts = mixture.gate(x), mixture.gate.weight.shape[0]
    chosen = probabilities >= probabilities.topk(mixture.slots).values[:, -1:]
    weights = probabilities * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up, down = (
        layer.weight.view(experts, -1, layer.weight.shape[1])
        for layer in (mixture.experts.gate_proj, mixture.experts.up_proj, mixture.experts.down_proj)
    )
    inside = torch.nn.functional.silu(x @ gate) * (x @ up)
    return torch.einsum("te,eti,ehi->th", weights, inside, down)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_rows_by_expert_equal_a_dense_loop_also_for_experts_with_all_tokens_or_none(slots: int) -> None:
    torch.manual_seed(slots)
    mixture = Mixture(16, 24, 5, slots, is_normalised=True).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    x = torch.randn(40, 16, dtype=torch.float64)
    x[:, 0] = 1
    with torch.no_grad():
        mixture.gate.weight[3, 0], mixture.gate.weight[1, 0] = (
            30,
            -30,
        )  # one has all tokens; one none, but for slots = 5
    results = []
    for compute in (lambda x: mixture(x[None])[0], lambda x: dense(mixture, x)):
        own = x.clone().requires_grad_()
        y = compute(own)
        y.square().sum().backward()
        results.append([y.detach(), own.grad, *(p.grad for p in mixture.parameters())])
        mixture.zero_grad()
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert mixture.load is not None
    load = mixture.load.tolist()
    assert sum(load) == 40 * slots and load[3] == 40 and (load[1] == 0) == (slots < 5)
    if slots < 5:
        assert all(not grad.view(5, -1)[1].any() for grad in results[0][3:])  # zeros, not None


def test_packed_documents_are_as_alone_and_see_no_other() -> None:
    spec = SPECS["tied"]
    model, lengths = ours(spec, reference(spec)), (2, 61, 1, 64, 66, 5)
    ids = draw(spec, 1, sum(lengths))
    documents = model.model.prepare(Documents(1, sum(lengths), lengths), ids.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    first, again = keeping_routes()
    with first:
        packed = model(ids, positions, documents)[0]
    alone = torch.cat([model(part[None])[0] for part in ids[0].split(list(lengths))])
    assert (packed - alone).abs().max() < 1e-12 * alone.abs().max()
    changed = ids.clone()
    changed[0, 2:63] = draw(spec, 1, 62)[0, 1:]
    # A library may round a product of 12 rows otherwise than one of 13 (MKL does, with AVX2). So another document may
    # change the last bits of this one, through the number of rows that an expert gets, and nothing else:
    after = model(changed, positions, documents)[0]
    others = [slice(2), slice(63, None)]
    assert all((after[part] - packed[part]).abs().max() < 1e-12 * packed.abs().max() for part in others)
    assert (after - packed)[2:63].abs().max() > 1e-3 * packed.abs().max()
    with again:  # the routes of before, so every product has the shape that it had
        after = model(changed, positions, documents)[0]
    assert all(torch.equal(after[part], packed[part]) for part in others)
    assert not torch.equal(after[2:63], packed[2:63])


def test_equal_probabilities_choose_the_lower_experts() -> None:
    mixture = Mixture(8, 8, 6, 3, is_normalised=False)
    torch.nn.init.zeros_(mixture.gate.weight)
    with torch.no_grad():
        mixture.gate.weight[4, 0] = 1.0
        mixture.gate.weight[1] = -0.0
    x = torch.zeros(5, 8)
    x[0, 0], x[1, 0], x[2:, 1] = 1, -0.0, -1
    chosen = mixture._routes(mixture.gate(x)).index
    assert chosen.tolist() == [[4, 0, 1], *[[0, 1, 2]] * 4]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_takes_the_routes_of_forward(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["tied"]
    hf = reference(spec)
    plain, model, ids = ours(spec, hf), ours(spec, hf), draw(spec, 2, 30)
    apply_activation_checkpointing(model, mode, is_random=False, on_host=False)
    plain(ids).square().sum().backward()
    loss = model(ids).square().sum()
    made = []
    monkeypatch.setattr(Routes, "__init__", lambda *_: made.append(1))
    loss.backward()
    assert not made  # neither chosen nor counted again
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    loads = [layer.mlp.load.tolist() for layer in model.model.blocks()]  # type: ignore[union-attr]
    assert [sum(load) for load in loads] == [ids.numel() * 2] * 3


def test_decoding_a_batch_is_as_each_prompt_alone_and_as_without_a_cache() -> None:
    spec = SPECS["every second layer"]
    model = ours(spec, reference(spec)).requires_grad_(False)
    prompts = [draw(spec, length).tolist() for length in (70, 1, 3, 64)]
    for prompt, answer in zip(prompts, generate(model, prompts, Sampling(), (), 6), strict=True):
        (alone,) = generate(model, [prompt], Sampling(), (), 6)
        rows = list(prompt)
        for token in answer.ids:
            assert token == model(torch.tensor([rows]))[0, -1].argmax().item()
            rows.append(token)
        assert alone.ids == answer.ids


WIDE = Qwen3MoeSpec(  # for blocks of 64 values, also if two ranks split them
    320, 128, 128, 2, 4, 2, 32, False, 1e4, initializer_range=0.1, moe_intermediate_size=128, num_experts=4,
    num_experts_per_tok=2, norm_topk_prob=True,
)  # fmt: skip


def wide_case() -> dict[str, Any]:
    documents = []
    for row in range(8):
        documents += random_documents(320, ([32], [17, 15], [20, 8, 4], [1, 2, 29])[row % 4], seed=row)
    read = lambda *where: initial_values(WIDE, 1, *where)  # noqa: E731
    weights = {
        n: read(n, torch.Size(p.shape), (0,) * len(p.shape), p.shape).double() for n, p in WIDE.parameters.items()
    }
    for name, shape in adapter_shapes(WIDE, 4, LINEARS).items():
        weights[name] = lora_values(2, name.replace("lora_B", "lora_A"), torch.Size(shape), (0, 0), shape)
    return {"spec": WIDE, "weights": weights, "documents": documents, "seq_len": 32}


@pytest.mark.full
def test_adapters_and_small_states_are_the_same_in_every_layout(tmp_path: Path, world: World) -> None:
    lora, of_attention = {"rank": 4, "target_modules": LINEARS}, {"rank": 4, "base": "nf4"}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {  # layouts that it meets, and its options
        "lora": ("fsdp tp pp ddp", {"lora": lora, "param": "float64"}),
        "nf4": ("fsdp tp pp", {"lora": {**lora, "base": "nf4"}, "param": "float32"}),
        "nf4 below attention's": ("fsdp tp", {"lora": of_attention, "param": "float32", "checkpointing": "full"}),
        "8bit": ("fsdp tp pp", {"optimizer": {"state": "8bit"}, "param": "float32"}),
        "compiled": ("fsdp tp", {"compile": True, "param": "float64", "checkpointing": "selective"}),
        "dropout": ("tp", {"lora": {**lora, "dropout": 0.2, "expert_rank": 2}, "param": "float64"}),
        "recomputed": ("tp ddp", {"checkpointing": "selective", "param": "float64"}),
        "on the host": ("fsdp", {"checkpointing": "full", "param": "float64", "memory": {"offload": "optimizer"}}),
    }
    tp, pp = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
    layouts = {"fsdp": (2, {}), "tp": (1, tp), "pp": (1, pp), "ddp": (2, {"zero_stage": 0})}
    case, runs = wide_case(), {}
    for kind, (names, options) in kinds.items():
        for layout in names.split():
            ranks, degrees = layouts[layout]
            size = {"local_batch_size": 4 // ranks, "accumulation": 2, "backend": "eager"}
            runs[f"{kind} {layout}"] = {"case": "wide", **size, "parallelism": degrees, **options, "stop": 3}
    random = {
        "case": "wide",
        "local_batch_size": 2,
        "accumulation": 2,
        "backend": "eager",
        **kinds["dropout"][1],
        "stop": 3,
    }
    for layout, more in {
        "fsdp": {},
        "ddp": {"parallelism": {"zero_stage": 0}},
        "again": {"checkpointing": "full"},
    }.items():
        runs[f"dropped {layout}"] = {**random, **more}
    job = tmp_path / "job.pt"
    torch.save({"cases": {"wide": case}, "splits": [], "runs": runs}, job)
    torchrun(str(REPO / "tests/gloo/job_lora.py"), str(job), str(tmp_path), processes=2, timeout=900)
    records = torch.load(tmp_path / "rank-0.pt", weights_only=False)["runs"]
    torch._dynamo.reset()
    for kind, (names, options) in kinds.items():
        split = {"case": "wide", "local_batch_size": 4, "accumulation": 2, "backend": "eager", "max_norm": 1.0}
        run = open_split(world, case, {**split, **options})
        alone = [run.step().loss for _ in range(3)]
        assert alone[2] < alone[0]
        for name in (f"{kind} {layout}" for layout in names.split()):
            bar = {"8bit": 1e-3}.get(kind, 5e-6 if options["param"] == "float32" else 1e-11)
            assert records[name]["losses"] == pytest.approx(alone, rel=bar), name
    for layout in ("ddp", "again"):  # of the same data-parallel ranks
        assert records[f"dropped {layout}"]["losses"] == pytest.approx(records["dropped fsdp"]["losses"], rel=1e-11)


@pytest.mark.parametrize("experts", [True, False])
def test_dropout_keeps_the_mean_and_ranks_that_split_the_inputs_drop_as_one(experts: bool) -> None:
    routes, lora = Routes(torch.tensor([[0, 2], [1, 0]]), 3), LoRAConfig(rank=2, alpha=2.0, dropout=0.25)
    torch.manual_seed(0)
    base: Any = ExpertLinear(16, 3 * 8, 3, False) if experts else Linear(16, 8)
    layer: Any = (LoRAExpertLinear if experts else LoRALinear)(base, lora)
    x, args = torch.randn(4, 16), (routes,) if experts else ()
    drawn = torch.stack([layer(x, *args) for _ in range(1500)])
    plain = layer.eval()(x, *args)
    assert drawn.std(0).max() > 0.05 and (drawn.mean(0) - plain).abs().max() < 0.1 * plain.abs().max()
    layer.train()
    parts = []
    for part in range(2):
        torch.manual_seed(1)
        layer.part = part, 2
        parts.append(_dropped(x[:, 8 * part :][:, :8], layer))
    torch.manual_seed(1)
    layer.part = 0, 1
    whole = _dropped(x, layer)
    assert torch.equal(torch.cat(parts, 1), whole) and 0 < (whole == 0).sum() < whole.numel() / 2


def test_recomputation_drops_what_the_forward_dropped(world: World) -> None:
    lora, case = {"rank": 4, "target_modules": LINEARS, "dropout": 0.3}, wide_case()
    split = {"case": "wide", "local_batch_size": 4, "accumulation": 1, "param": "float64", "lora": lora}
    plain, *others = (run_split(world, case, {**split, "checkpointing": m}) for m in ("none", "selective", "full"))
    for other in others:
        assert other["loss"] == plain["loss"] and other["grad_norm"] == pytest.approx(plain["grad_norm"], 1e-12)
    assert abs(run_split(world, case, {**split, "seed": 4})["loss"] / plain["loss"] - 1) > 1e-4


@pytest.mark.parametrize("problem", ["", "fails", "differs"])
def test_torchs_grouped_product_is_taken_where_it_computes_the_same(
    problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def grouped(x: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
        if problem == "fails":
            raise RuntimeError("no kernel\nfor this")
        parts = x.split(offs.diff(prepend=offs.new_zeros(1)).tolist())
        y = torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
        return y * 1.01 if problem else y

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped, raising=False)
    torch.manual_seed(0)
    mixture, x = Mixture(64, 32, 5, 2, is_normalised=True), torch.randn(3, 20, 64)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    expected = mixture(x)
    with caplog.at_level("INFO"):
        choose_products(mixture, torch.float32, x.device)
    words = {"": "grouped by torch, as a trial showed", "fails": "fails: no kernel)", "differs": "differs by 1e-02)"}
    assert f"products of experts: {'a loop' if problem else 'grouped'}" in caplog.text and words[problem] in caplog.text
    monkeypatch.setattr(Routes, "counts", property(lambda _: pytest.fail("the host waits")))
    assert mixture.experts.down_proj.by_kernel == (not problem)
    if not problem:
        assert (mixture(x) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_products_that_are_chosen_here_have_the_loops_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixture = Mixture(64, 32, 5, 2, is_normalised=True).to(dtype)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    results, x = [], torch.randn(3, 20, 64, dtype=dtype)
    for _ in range(2):
        mixture.zero_grad()
        own = x.clone().requires_grad_()
        mixture(own).square().sum().backward()
        results.append([own.grad, *(p.grad for p in mixture.parameters())])
        choose_products(mixture, dtype, x.device)  # for the second time
    bar = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 0.0}[dtype]
    has_kernel = hasattr(torch.nn.functional, "grouped_mm") and dtype != torch.float64
    assert all(layer.by_kernel == has_kernel for layer in mixture.experts.children())
    for one, other in zip(*results, strict=True):
        assert one is not None and (one - other).abs().max() <= bar * one.abs().max()


def test_the_load_of_experts_is_reported(world: World) -> None:
    spec = replace(SPECS["every second layer"], mlp_only_layers=())  # layers 1 and 3 have experts
    model = Qwen3Moe(spec)
    lines: list[tuple[int, float, int]] = []  # step, the busiest expert's share, experts without rows
    reporter = SimpleNamespace(
        add=lambda step, busiest_expert, idle_experts: lines.append((step, busiest_expert, idle_experts))
    )
    layout = SimpleNamespace(parts=[model], device=world.device, tp_degree=1)
    load = ExpertLoad(reporter, layout, spec, log_freq=60, last=130)  # type: ignore[arg-type]
    for step in range(1, 131):
        for layer in model.model.blocks():
            if isinstance(layer.mlp, Mixture):
                counts = torch.tensor([4, 1, 1, 1, 1, 0, int(step == 130), 0])
                layer.mlp.load = counts if layer.mlp.load is None else layer.mlp.load + counts
        load.after_step(step, None)  # type: ignore[arg-type]
    assert lines[:2] == [(60, 4.0, 6), (120, 4.0, 6)] and lines[2][::2] == (130, 4)
