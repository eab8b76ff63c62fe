"""The model against transformers' Qwen3, and the isolation of documents."""

import dataclasses

import pytest
import torch
from conftest import documents_of, supervised_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents
from titan_mi100.attention.torch_backends import document_mask
from titan_mi100.model import layers
from titan_mi100.model.init import initial_values
from titan_mi100.model.layers import multiply
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.shapes.base import ModelSpec, parameter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.shapes.qwen3 import Qwen3Spec

BACKENDS = ["eager", "chunked", "sdpa"]
PAD = 208  # a token of these tests' documents
SPECS = {
    "tied": Qwen3Spec(311, 64, 96, 3, 4, 2, 16, True, rope_theta=1e4, pad_token_id=PAD),
    "untied": Qwen3Spec(311, 64, 96, 3, 4, 2, 16, False, rope_theta=1e6, pad_token_id=PAD),
    "one key head": Qwen3Spec(311, 48, 80, 2, 6, 1, 8, True, rope_theta=1e6),
    "as many key heads": Qwen3Spec(311, 48, 80, 2, 3, 3, 16, False, rope_theta=1e6),
    "wide heads": Qwen3Spec(311, 40, 64, 2, 4, 2, 32, True, rope_theta=1e6, rms_norm_eps=1e-5),
}


def reference(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    settings = {k: v for k, v in to_hf_config(spec).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**settings, attn_implementation="eager")).to(dtype)
    with torch.no_grad():  # norms of ones would hide a weight that is not applied
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def ours(spec: ModelSpec, hf: Qwen3ForCausalLM, backend: str) -> Qwen3:
    model = Qwen3(spec, make_backend(backend, "cpu"))
    weights = hf.state_dict()
    if spec.tie_word_embeddings:
        del weights["lm_head.weight"]
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_logits_loss_and_every_gradient_equal_transformers(name: str, backend: str) -> None:
    spec = SPECS[name]
    hf = reference(spec)
    model = ours(spec, hf, backend)
    ids = torch.randint(0, spec.vocab_size, (2, 29), generator=torch.Generator().manual_seed(2))
    labels = torch.randint(0, spec.vocab_size, ids.shape, generator=torch.Generator().manual_seed(3))
    labels[0, :11] = -100
    expected = hf(ids).logits
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=0)

    count = int((labels != -100).sum())
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()) * count
    (expected_loss / count).backward()
    loss = model(ids, labels=labels, supervised=supervised_of(labels))
    assert loss.shape == (1,)
    (loss / count).sum().backward()
    torch.testing.assert_close(loss[0] / count, expected_loss / count, atol=1e-5, rtol=0)
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[parameter_name], atol=1e-5, rtol=0, msg=parameter_name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_changing_one_document_leaves_the_others_bit_identical(backend: str) -> None:
    spec = SPECS["tied"]
    model = ours(spec, reference(spec), backend)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, spec.vocab_size, (2, 40), generator=generator)
    ids_of = torch.tensor([[0] * 13 + [1] * 9 + [2] * 11 + [-1] * 7, [0] * 30 + [1] * 10])
    documents = model.model.prepare(documents_of(ids_of), ids.device)
    positions = torch.cat([torch.arange(n) for n in (13, 9, 11, 7, 30, 10)]).view(2, 40)
    before = model(ids, positions, documents)
    for row, start, stop in ((0, 0, 13), (0, 13, 22), (0, 22, 33), (0, 33, 40), (1, 0, 30), (1, 30, 40)):
        for place in (start, (start + stop) // 2, stop - 1):
            changed = ids.clone()
            changed[row, place] = (changed[row, place] + 1) % spec.vocab_size
            after = model(changed, positions, documents)
            same = torch.ones_like(ids, dtype=torch.bool)
            same[row, start:stop] = False
            assert torch.equal(after[same], before[same])
            assert not torch.equal(after[row, place:stop], before[row, place:stop])  # the change does arrive
            assert torch.equal(after[row, start:place], before[row, start:place])  # and only from there on


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_have_the_logits_they_have_alone(backend: str) -> None:
    spec = SPECS["untied"]
    model = ours(spec, reference(spec), backend)
    lengths = (7, 1, 16)
    ids = torch.randint(0, spec.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    documents = model.model.prepare(Documents(1, sum(lengths), lengths), ids.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, positions, documents)[0]
    alone = torch.cat([model(part[None])[0] for part in ids[0].split(list(lengths))])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def test_a_misspelt_argument_is_refused() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(TypeError, match="neither the model nor its objective reads postions"):
        Qwen3(SPECS["tied"])(ids, postions=ids)


def test_documents_that_come_back_with_the_same_id_are_two() -> None:
    documents = documents_of(torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]))
    assert documents == Documents(2, 5, (2, 1, 2, 5))
    assert document_mask(documents, torch.device("cpu"))[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_carry_hf_names_and_are_all_there_is(tied: bool) -> None:
    spec = dataclasses.replace(PRESETS["debug"], tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Qwen3(spec)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(spec)
    assert not list(model.buffers())
    hf_names = set(reference(spec).state_dict()) - ({"lm_head.weight"} if tied else set())
    assert hf_names == set(parameter_shapes(spec))


def test_initial_values_do_not_depend_on_who_draws_which_part() -> None:
    spec, shape, w = PRESETS["debug"], torch.Size((3000, 8)), "model.embed_tokens.weight"
    whole = initial_values(spec, 7, w, shape, (0, 0), (3000, 8))
    parts = [initial_values(spec, 7, w, shape, (row, 0), (size, 8)) for row, size in ((0, 1001), (1001, 1999))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(initial_values(spec, 7, w, shape, (1500, 2), (100, 3)), whole[1500:1600, 2:5])
    assert abs(whole.std().item() - spec.initializer_range) < 0.02 * spec.initializer_range
    assert not torch.equal(initial_values(spec, 8, w, shape, (0, 0), (3000, 8)), whole)
    assert not torch.equal(
        initial_values(spec, 7, "model.layers.0.mlp.up_proj.weight", shape, (0, 0), (3000, 8)), whole
    )
    assert not torch.equal(whole[:1024], whole[1024:2048])


@pytest.mark.parametrize(("on_amd", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize("outputs", [512, 511])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (3, 4), (32, 1), (33, 1)])
def test_products_of_few_rows_are_those_of_many(
    shape: tuple[int, ...], outputs: int, on_amd: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without gradients another order of the factors is used; 2^17 elements are many enough for all cores."""
    monkeypatch.setattr(layers, "_ON_AMD", on_amd)
    x, weight = torch.randn(*shape, 256).to(dtype), torch.randn(outputs, 256).to(dtype)
    expected = x.double() @ weight.double().t()
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.1}
    torch.testing.assert_close(multiply(x, weight).double(), expected, **near)
    with torch.no_grad():
        found = multiply(x, weight)
    assert found.shape == (*shape, outputs) and found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **near)
