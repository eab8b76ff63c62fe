"""The draft head against one built of transformers' own layer, norms and linear, in fp64."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ASSETS
from lifted import lifting
from parity.table import ROWS, Cell, config_of, dataset, spec_of
from test_qwen3_5 import SPECS
from test_qwen3_5 import reference as dense
from test_qwen3_5_moe import SPEC as MIXTURE
from test_qwen3_5_moe import reference as mixture
from test_qwen3_moe import Tensors
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from titan_mi100.attention.backends import make_backend
from titan_mi100.config.layout import IGNORE
from titan_mi100.data.microbatch import Microbatch, collate, with_draft
from titan_mi100.data.rows import PADDING_DOCUMENT, Row
from titan_mi100.model.families import MODELS
from titan_mi100.model.loss import HeadMemory
from titan_mi100.objectives.sft import SFT
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.base import describe_on_host
from titan_mi100.parallel.distributed import World, fill_parameters
from titan_mi100.shapes.base import DRAFT
from titan_mi100.shapes.qwen3_5 import Qwen3_5Spec
from titan_mi100.weights.pieces import joined, read_pieces
from titan_mi100.workshop.made_up import made_up

CPU = torch.device("cpu")
KINDS: dict[str, tuple[Qwen3_5Spec, Callable[..., Any], Any, str]] = {
    "tied": (SPECS["tied"], dense, modeling_qwen3_5, "Qwen3_5"),
    "untied": (SPECS["untied, as many value heads"], dense, modeling_qwen3_5, "Qwen3_5"),
    "experts": (MIXTURE, mixture, modeling_qwen3_5_moe, "Qwen3_5Moe"),
}
LENGTHS = (37, 1, 2, 3, 20)


class Reference(nn.Module):
    """The head by transformers' parts, of one document at a time."""

    def __init__(self, hf: Any, module: Any, prefix: str) -> None:
        super().__init__()
        config = copy.deepcopy(hf.config)
        norm = partial(getattr(module, f"{prefix}RMSNorm"), config.hidden_size, eps=config.rms_norm_eps)
        config.layer_types[0] = "full_attention"
        self.layers = nn.ModuleList([getattr(module, f"{prefix}DecoderLayer")(config, 0)])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.double()
        draw = torch.Generator().manual_seed(5)
        for parameter in self.parameters():  # random norms: with fresh ones several mistakes do not show
            parameter.data.normal_(0, 0.5 if parameter.ndim == 1 else 0.1, generator=draw)

    def forward(self, hf: Any, ids: Tensor, halves: int = 1, before_norm: bool = False) -> Tensor:
        """Logits of slots 0 to n - 2, (n - 1, V)."""
        seen: list[Tensor] = []
        hook = hf.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        hidden = hf.model(ids[None]).last_hidden_state
        hook.remove()
        hidden = (seen[0] if before_norm else hidden)[:, :-1].detach()
        embedded = hf.model.embed_tokens(ids[None, 1:]).detach()
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)][::halves]
        x = self.fc(torch.cat(both, dim=-1))
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        tables = hf.model.rotary_emb(x, positions[None].expand(3, 1, -1))
        x = self.layers[0](x, position_embeddings=tables, attention_mask=mask, position_ids=positions)
        return F.linear(self.norm(x), hf.lm_head.weight.detach())[0]  # type: ignore[no-any-return]


def row_of(documents: list[np.ndarray], learned: list[np.ndarray], padding: int = 4) -> Row:
    ids, labels, positions, numbers = [], [], [], []
    for number, (own, wanted) in enumerate(zip(documents, learned, strict=True)):
        ids.append(own)
        labels.append(np.append(np.where(wanted[1:], own[1:], IGNORE), IGNORE))
        positions.append(np.arange(len(own)))
        numbers.append(np.full(len(own), number))
    ends = np.zeros(padding, dtype=np.int64)
    parts = (
        [*ids, ends],
        [*labels, ends + IGNORE],
        [*positions, np.arange(padding)],
        [*numbers, ends + PADDING_DOCUMENT],
    )
    return Row(*map(np.concatenate, parts))


def some_documents(spec: Qwen3_5Spec, seed: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    documents = [draw.integers(0, 207, length) for length in LENGTHS]
    return documents, [draw.random(length) < 0.8 for length in LENGTHS]


def opened(kind: str) -> tuple[Any, Any, Reference]:
    """Our model with the head, transformers' model, and the reference head; with equal weights."""
    spec, make, module, prefix = KINDS[kind]
    spec = replace(spec, has_draft_head=True)
    hf = make(spec)
    head = Reference(hf, module, prefix)
    model = MODELS[spec.model_type](spec, make_backend("eager", "cpu")).double()
    stored = {**hf.state_dict(), **{DRAFT + name: tensor for name, tensor in head.state_dict().items()}}
    read = read_pieces(spec, joined(Tensors(stored), spec).read)
    fill_parameters(model.named_parameters(), read)
    model.draft, model.head_loss = "along", partial(SFT, memory=HeadMemory())
    return model, hf, head


def inputs_of(model: Any, rows: list[Row]) -> Microbatch:
    microbatch = with_draft(collate(rows))
    del microbatch["document_ids"]
    return describe_on_host(model.model, microbatch, CPU)


def expected_loss(hf: Any, head: Reference, row: Row, ahead: int = 2, **mistake: Any) -> Tensor:
    """The summed loss of slots whose next two tokens are learned, document by document."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, learned in row.documents():
        if len(ids) < 3:
            continue
        logits = head(hf, torch.from_numpy(ids), **mistake)[: len(ids) - 2]
        targets = torch.from_numpy(ids)[ahead : ahead + len(logits)]
        wanted = torch.from_numpy(learned[1:-1] & learned[2:])
        total = total + F.cross_entropy(logits[wanted], targets[wanted], reduction="sum")
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient_equal_transformers_and_mistakes_do_not(kind: str) -> None:
    model, hf, head = opened(kind)
    spec, _, module, prefix = KINDS[kind]
    row = row_of(*some_documents(spec))
    loss, held = model(**inputs_of(model, [row]))[-2:]
    assert held == 0
    rotary = f"{prefix}TextRotaryEmbedding"
    with lifting(module, rotary):
        exact = expected_loss(hf, head, row)
        wrong = [
            expected_loss(hf, head, row, halves=-1),
            expected_loss(hf, head, row, before_norm=True),
            expected_loss(hf, head, row, ahead=1),
        ]
    assert abs(loss - exact) < 1e-10 * exact
    assert all(abs(loss - other) > 1e-3 * exact for other in wrong)
    exact.backward()
    loss.backward()
    expected = {**hf.state_dict(), **{DRAFT + name: p.grad for name, p in head.named_parameters()}}
    read = read_pieces(model.model.spec, joined(Tensors(expected), model.model.spec).read)
    for name, parameter in model.named_parameters():
        if not name.startswith(DRAFT):
            assert not parameter.grad.any(), name  # detached from the trunk, its embedding and its head
            continue
        wanted = read(name, parameter.shape, (0,) * parameter.ndim, tuple(parameter.shape))
        assert (parameter.grad - wanted).abs().max() < 1e-10 * wanted.abs().max(), name


def states_of(model: Any, row: Row) -> Tensor:
    inputs = inputs_of(model, [row])
    hidden = model.model(inputs["input_ids"], inputs["positions"], inputs["documents"])
    with torch.no_grad():
        return model.draft_states(hidden, inputs["next_ids"], inputs["positions"], inputs["documents"])[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_do_not_see_each_other(kind: str) -> None:
    model = opened(kind)[0]
    documents, learned = some_documents(KINDS[kind][0])
    together = states_of(model, row_of(documents, learned))
    others = [some_documents(KINDS[kind][0], seed=4)[0][0], *documents[1:]]
    changed = states_of(model, row_of(others, learned))
    apart = (together - changed)[LENGTHS[0] : sum(LENGTHS)].abs().max()
    assert apart == 0 or (kind == "experts" and apart < 1e-14)  # an expert's product has other rows
    assert not torch.equal(together[: LENGTHS[0]], changed[: LENGTHS[0]])
    start = 0
    for ids, wanted in zip(documents, learned, strict=True):
        alone = states_of(model, row_of([ids], [wanted], padding=0))
        assert (together[start : start + len(ids)] - alone).abs().max() < 1e-12
        start += len(ids)


def test_a_slot_is_learned_if_both_tokens_after_it_are() -> None:
    documents = [np.arange(10, 16), np.arange(20, 23)]
    learned = [np.array([0, 1, 1, 0, 1, 1], dtype=bool), np.array([1, 1, 1], dtype=bool)]
    row = with_draft(collate([row_of(documents, learned, padding=1)]))
    missing = IGNORE
    assert row["draft_labels"][0].tolist() == [
        12,
        missing,
        missing,
        15,
        missing,
        missing,
        22,
        missing,
        missing,
        missing,
    ]
    assert row["next_ids"][0].tolist() == [11, 12, 13, 14, 15, 15, 21, 22, 22, 0]  # the last of a document has itself
    assert row["draft_columns"][0].tolist()[:4] == [0, 3, 6, -1]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_what_breaks_the_head_skips_the_head_alone(precision: str, world: World) -> None:
    def after(draft: str, broken: bool = False) -> tuple[list[Any], dict[str, Tensor]]:
        cell = Cell("one process", 1, {}, True, 2, precision, 0.05, draft=draft)
        config, data = config_of(cell), made_up(dataset(cell.seq_len, 2 * ROWS))
        if broken:  # in fp16 the loss stays finite, and gradients overflow
            config = replace(config, draft_head=replace(config.draft_head, weight=1e6))
        run = open_run(config, world, spec=spec_of(replace(cell, family="qwen3.5")), data=data)
        if broken and precision == "float32":
            dict(run.model.named_parameters())["mtp.fc.weight"].data[0, 0] = torch.inf
        before = {name: p.detach().clone() for name, p in run.model.named_parameters() if name.startswith(DRAFT)}
        steps = [run.step() for _ in range(3)]
        return steps, {name: p.detach() - before.get(name, 0.0) for name, p in run.model.named_parameters()}

    expected, alone = after("no")
    steps, changed = after("along", broken=True)
    assert all(torch.equal(changed[name], alone[name]) for name in alone)
    assert [(s.skipped, s.loss_scale) for s in steps] == [(s.skipped, s.loss_scale) for s in expected]
    assert [step.measures["draft_skipped"] for step in steps] == [1.0] * 3
    assert not any(changed[name].nan_to_num().any() for name in changed if name.startswith(DRAFT))
    if precision == "float16":  # the head's scale falls alone
        assert [step.measures["draft_loss_scale"] for step in steps] == [65536.0, 32768.0, 16384.0]
    overflowed = [step.measures.get("draft_overflowed") for step in steps]
    assert overflowed == [1.0 if precision == "float16" else None] * 3
    assert not any(step.measures["draft_skipped"] for step in after("along")[0][precision == "float16" :])


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_drafts_are_counted_in_validation(kind: str) -> None:
    model, hf, head = opened(kind)
    _, _, module, prefix = KINDS[kind]
    row = row_of(*some_documents(KINDS[kind][0]))
    counts = 0
    with torch.no_grad(), lifting(module, f"{prefix}TextRotaryEmbedding"):
        for ids, learned in row.documents():
            if len(ids) > 2:
                trunk, drafts = hf(torch.from_numpy(ids)[None]).logits[0], head(hf, torch.from_numpy(ids))
                same = trunk.argmax(1)[1:-1] == drafts.argmax(1)[:-1]
                counts += int(same[torch.from_numpy(learned[1:-1] & learned[2:])].sum())
        assert counts == model(**inputs_of(model, [row]))[-1]
        # a head that gives the trunk's own state two tokens ahead would be accepted always
        inputs = inputs_of(model, [row])
        trunk = model.model(inputs["input_ids"], inputs["positions"], inputs["documents"])
        model.mtp.forward = lambda *_: trunk.roll(-1, 1)
        assert model(**inputs)[-1] == len(inputs["draft_supervised"]) > 20


@pytest.mark.parametrize("form", ["dense", "fused", "separate"])
def test_names_in_files_are_those_that_servers_read(form: str) -> None:
    lines = [line.split() for line in (ASSETS / "draft_head_names.txt").read_text().splitlines() if line[0] != "#"]
    forms = {"dense"} if form == "dense" else {"experts", form}
    expected = {line[-1] for line in lines if len(line) == 1 or line[0] in forms}
    spec = replace(SPECS["tied"] if form == "dense" else MIXTURE, has_draft_head=True)
    if form != "dense":
        spec = replace(spec, draft_experts_fused=form == "fused", num_experts=1, num_experts_per_tok=1)
    assert {name for name in spec.in_files(spec.parameters) if name.startswith(DRAFT)} == expected
