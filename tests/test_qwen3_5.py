"""Qwen3.5 against transformers' in fp64, with its casts to fp32 lifted, and the isolation of documents."""

from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import supervised_of
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents
from titan_mi100.model.qwen3_5 import Qwen3_5
from titan_mi100.parallel.distributed import fill_parameters
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3_5 import FULL, LINEAR, Qwen3_5Spec, every_fourth
from titan_mi100.weights.pieces import read_pieces

HEADS = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "rope_theta": 1e4}
SPECS = {
    "tied": Qwen3_5Spec(311, 64, 96, 4, 4, 2, 2, 4, True, every_fourth(4), **HEADS, pad_token_id=208),
    "untied, as many value heads": Qwen3_5Spec(311, 48, 80, 3, 6, 1, 3, 3, False, (FULL, LINEAR, LINEAR), **HEADS),
}


class _Wide(ModuleType):
    """torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def lifted(hf: Any, ids: Tensor) -> Tensor:
    """Logits of transformers' model, whose layers compute in the dtype of their weights; only the rotary tables stay in
    fp32, as ours.
    """
    narrow, rotary = Tensor.float, modeling_qwen3_5.Qwen3_5TextRotaryEmbedding.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Tensor, "float", narrow)
            inside.setattr(modeling_qwen3_5, "torch", torch)
            return rotary(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_5, "torch", _Wide("torch"))
        patch.setattr(modeling_qwen3_5.Qwen3_5TextRotaryEmbedding, "forward", forward)
        patch.setattr(Tensor, "float", Tensor.double)
        return hf(ids).logits


def reference(spec: Qwen3_5Spec) -> Any:
    settings = {k: v for k, v in to_hf_config(spec).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(1)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings, attn_implementation="eager"))
    with torch.no_grad():  # norms as they start would hide a weight that is not applied
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.uniform_(-0.5, 0.5)
            elif parameter.ndim > 1:
                parameter.mul_(4)
    return model.double()


def held(spec: Qwen3_5Spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by HF's names as the model holds them."""
    model = Qwen3_5(spec).double().requires_grad_(False)

    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]

    fill_parameters(model.named_parameters(), read_pieces(spec, read))
    return dict(model.named_parameters())


def ours(spec: Qwen3_5Spec, hf: Any, backend: str = "eager") -> Qwen3_5:
    model = Qwen3_5(spec, make_backend(backend, "", "cpu")).double()
    model.load_state_dict(held(spec, hf.state_dict()))
    return model


def draw(spec: Qwen3_5Spec, *shape: int) -> Tensor:
    return torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", SPECS)
def test_logits_and_every_gradient_equal_transformers(name: str) -> None:
    spec = SPECS[name]
    hf = reference(spec)
    model, ids = ours(spec, hf), draw(spec, 2, 131)
    labels = ids.roll(-1, 1)
    labels[0, :11] = -100
    expected = lifted(hf, ids)
    assert (model(ids) - expected).abs().max() < 1e-10 * expected.abs().max()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(ids, labels=labels, supervised=supervised_of(labels)).sum().backward()
    exact = held(spec, {name: parameter.grad for name, parameter in hf.named_parameters()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-10, (name, error)


def test_packed_documents_are_as_alone_and_see_no_other() -> None:
    spec = SPECS["tied"]
    model, lengths = ours(spec, reference(spec)), (2, 61, 1, 1, 64, 66, 5)
    ids = draw(spec, 1, sum(lengths))
    documents = model.model.prepare(Documents(1, sum(lengths), lengths), ids.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, positions, documents)[0]
    alone = torch.cat([model(part[None])[0] for part in ids[0].split(list(lengths))])
    assert (packed - alone).abs().max() < 1e-12 * alone.abs().max()
    changed = ids.clone()
    changed[0, 2:63] = draw(spec, 1, 62)[0, 1:]
    after = model(changed, positions, documents)[0]
    assert torch.equal(after[:2], packed[:2]) and torch.equal(after[63:], packed[63:])
    assert not torch.equal(after[2:63], packed[2:63])
