"""Every key of a folder's config.json is honoured, known to be without effect, or refused by name.

Each case changes one folder. Either it is refused, by the key; or the logits and all gradients in training mode, in
fp64, are those of transformers reading the same folder.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_model import PAD, SPECS, reference
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from titan_mi100.attention.torch_backends import Eager
from titan_mi100.errors import UserError
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.families import PRESETS, fingerprint, of_fingerprint, read_hf_config, to_hf_config
from titan_mi100.shapes.hf_config import ONLY, ROPES, WITHOUT_EFFECT
from titan_mi100.shapes.rope import TYPES
from titan_mi100.weights.source import open_weights

BASE = to_hf_config(SPECS["tied"])
NO_THETA = object()  # a case without the base's rope_theta
FULL = ["full_attention"]
# the change in config.json, and what the refusal says; empty: the folder is read, and computes what transformers does
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, ""),
    "another theta": ({"rope_theta": 300.0}, ""),
    "an int for a theta": ({"rope_theta": 300}, ""),
    "no theta: the default": ({"rope_theta": NO_THETA}, ""),
    "rope_parameters": ({"rope_theta": NO_THETA, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, ""),
    "rope_scaling of type default": (
        {"rope_theta": NO_THETA, "rope_scaling": {"type": "default", "rope_theta": 300.0}, "rope_parameters": {}},
        "",
    ),
    "rope_scaling without a theta": (
        {"rope_theta": 300.0, "rope_scaling": {"rope_type": "default", "factor": None}},
        "",
    ),
    "linear": ({"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 3}}, ""),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2}},
        "",
    ),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, ""),
    "no padding token": ({"pad_token_id": None}, ""),
    "another padding token": ({"pad_token_id": 0}, ""),
    "layer_types": ({"layer_types": FULL * 3}, ""),
    "a window that is off": ({"use_sliding_window": False, "sliding_window": 2, "max_window_layers": 0}, ""),
    "all that has no effect": (
        {"torch_dtype": "bfloat16", "use_cache": False, "temperature": 0.1, "suppress_tokens": [1], "bos_token_id": 3}
        | {"return_dict": True, "output_hidden_states": True, "id2label": {"0": "x"}, "unheard_of": None},
        "",
    ),
    # -- refused
    "two thetas": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        "rope_theta is 10000.0, and 300.0 in rope_para",
    ),
    "rope_scaling beside rope_parameters": (
        {"rope_theta": NO_THETA, "rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 300.0}},
        "rope_scaling and rope_parameters are both set",
    ),
    "per layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 300.0}}},
        "rope_parameters: full_attention = {",
    ),
    "llama3": (
        {"rope_scaling": {"type": "llama3", "factor": 4.0}},
        "rope_scaling: rope type 'llama3' is not supported",
    ),
    "linear without a factor": ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor is missing"),
    "two types": (
        {"rope_scaling": {"type": "linear", "rope_type": "default"}},
        "rope_type is 'default', and type is 'linear'",
    ),
    "a factor of no type": ({"rope_parameters": {"factor": 4.0}}, "rope_parameters: factor = 4.0 is not known"),
    "no object": ({"rope_parameters": 5}, "rope_parameters = 5 is not a JSON object"),
    "not causal": ({"is_causal": False}, "is_causal = False is not supported; only True"),
    "is_causal of null": ({"is_causal": None}, "is_causal = None is not supported"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported; only 0.0"),
    "a bias": ({"attention_bias": True}, "attention_bias = True is not supported"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    "a window": ({"use_sliding_window": True, "sliding_window": 2}, "use_sliding_window = True is not supported"),
    "layers with a window": (
        {"layer_types": [*FULL, "sliding_attention", *FULL]},
        "layer_types = ['full_attention', 's",
    ),
    "too many layer_types": ({"layer_types": FULL * 4}, "layer_types = ["),
    "too few layer_types": ({"layer_types": FULL * 2}, "layer_types = ["),
    "layer_types that is no list": ({"layer_types": 3}, "layer_types = 3 is not supported"),
    "tied or not": ({"tie_word_embeddings": None}, "tie_word_embeddings = None is not true or false"),
    "tied by an int": ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 is not true or false"),
    "a default head_dim of 128": ({"head_dim": NO_THETA}, "has shape (64, 64), but the model needs (512, 64)"),
    "head_dim of null": ({"head_dim": None}, "head_dim = None is not an int"),
    "layers as a float": ({"num_hidden_layers": 3.0}, "num_hidden_layers = 3.0 is not an int"),
    "heads as a bool": ({"num_key_value_heads": True}, "num_key_value_heads = True is not an int"),
    "a padding token outside": ({"pad_token_id": 311}, "pad_token_id = 311 is not in the vocabulary"),
    "a padding token of -1": ({"pad_token_id": -1}, "pad_token_id = -1 is not in the vocabulary"),
    "a padding token as a float": ({"pad_token_id": 3.0}, "pad_token_id = 3.0 is not an int or null"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config (None): quantized weights are not"),
    "settings of a layer": ({"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config = {"),
    "a key that is not known": ({"attention_sinks": 4}, "attention_sinks = 4 is not known here; remove it if"),
    "a false one": ({"use_qk_norm": False}, "use_qk_norm = False is not known here"),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    reference(SPECS["tied"]).double().save_pretrained(folder)
    return folder / "model.safetensors"


def folder_of(path: Path, weights: Path, change: dict[str, Any]) -> Path:
    os.link(weights, path / weights.name)
    config = {key: value for key, value in {**BASE, **change}.items() if value is not NO_THETA}
    (path / "config.json").write_text(json.dumps(config))
    return path


def computed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The logits of some tokens in training mode, and all gradients of a loss."""
    ids = torch.tensor([[PAD, 7, 0, 300, PAD, 7, 19, 2, 2, 45, 0, 130]])
    logits = model.train()(ids)
    logits = getattr(logits, "logits", logits)
    F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), **gradients}  # type: ignore[dict-item]


def by_us(folder: Path) -> dict[str, torch.Tensor]:
    spec = read_hf_config(folder)
    stored = open_weights(folder)
    stored.check(parameter_shapes(spec))
    model = Qwen3(spec, Eager()).double()
    model.load_state_dict({name: stored.tensor(name) for name in parameter_shapes(spec)})
    return computed(model)


def by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    return computed(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa"))


# Small files whose numbers would take all memory or time, or that no one can mean.
HARM: dict[str, tuple[str, str]] = {
    "experts": ('"model_type": "qwen3_moe", "num_experts": 99999999', "num_experts = 99999999 is more than any model"),
    "layers": ('"num_hidden_layers": 9999', "num_hidden_layers = 9999 is more than any model has"),
    "a list": (
        f'"model_type": "qwen3_moe", "mlp_only_layers": [{"0," * 2000}0]',
        "the length of mlp_only_layers = 2001 is more than any model has",
    ),
    "NaN": ('"rope_theta": NaN', "cannot be read as JSON: NaN is not a finite number"),
    "-Infinity": ('"unheard_of": [{"a": -Infinity}]', "-Infinity is not a finite number"),
    "1e999": ('"rope_theta": 1e999', "1e999 is not a finite number"),
}


@pytest.mark.parametrize("name", HARM)
def test_numbers_that_do_harm_are_refused_before_anything_is_made_of_them(name: str, tmp_path: Path) -> None:
    change, expected = HARM[name]
    kept = {key: value for key, value in BASE.items() if f'"{key}"' not in change}
    (tmp_path / "config.json").write_text(f"{json.dumps(kept)[:-1]}, {change}}}")
    with pytest.raises(UserError, match=re.escape(expected)):
        read_hf_config(tmp_path)


def test_more_experts_than_the_folder_can_have_are_refused_before_their_names_are_made() -> None:
    spec = dataclasses.replace(PRESETS["moe-debug"], num_hidden_layers=1000, num_experts=4096)
    names = [f"model.layers.0.mlp.experts.{n}.{kind}_proj.weight" for n in range(8) for kind in ("gate", "up", "down")]
    with pytest.raises(
        UserError, match=r"num_experts = 4096 in 1,000 layers makes 12,288,000 tensors, but the weights"
    ):
        spec.as_stored(names, {})


def test_a_checkpoints_shape_has_the_same_bounds() -> None:
    saved = fingerprint(PRESETS["moe-debug"])
    assert of_fingerprint(saved) == PRESETS["moe-debug"]
    for change in ({"num_experts": 10**8}, {"num_hidden_layers": 10**7}, {"hidden_size": 10**9}):
        with pytest.raises(ValueError, match="is more than any model has"):
            of_fingerprint(saved | change)


@pytest.fixture
def fp64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norm goes through fp32 in every dtype."""
    norm = lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)  # noqa: E731
    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-13, rtol=1e-10, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_computes_what_it_does_in_transformers_or_is_refused_by_name(
    name: str, weights: Path, tmp_path: Path, fp64_norms: None
) -> None:
    change, refused = CASES[name]
    folder = folder_of(tmp_path, weights, change)
    if refused:
        with pytest.raises(UserError) as caught:
            by_us(folder)
        assert refused in str(caught.value) and str(folder) in str(caught.value)
    else:
        assert_equal(by_us(folder), by_transformers(folder))


def test_the_cases_can_fail(weights: Path, tmp_path: Path, fp64_norms: None) -> None:
    """Each effect that a case is about is far above the tolerance."""
    (tmp_path / "base").mkdir()
    base = by_transformers(folder_of(tmp_path / "base", weights, {}))
    for name, key in (("another theta", "logits"), ("no padding token", "model.embed_tokens.weight")):
        (tmp_path / name).mkdir()
        changed = by_transformers(folder_of(tmp_path / name, weights, CASES[name][0]))
        assert (changed[key] - base[key]).abs().max() > 1e-6


VALUES = (None, False, True, 0, 1, -1, 2, 0.5, 1e9, "", "silu", "default", [], ["full_attention"] * 3, {}, {"a": 1})


@pytest.mark.full
@pytest.mark.parametrize(
    "key", [*BASE, *ONLY, "partial_rotary_factor", *ROPES, "layer_types", *sorted(WITHOUT_EFFECT), "unheard_of"]
)
def test_no_value_of_any_key_makes_a_difference_in_silence(
    key: str, weights: Path, tmp_path: Path, fp64_norms: None
) -> None:
    values = VALUES if key not in WITHOUT_EFFECT else (None, "silu", [])
    if key in ROPES:
        values += tuple({name: value} for name in ("rope_type", "type", "rope_theta", "factor") for value in VALUES)
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
        values += tuple({**yarn, name: value} for name in TYPES["yarn"] for value in VALUES)
    for number, value in enumerate(values):
        (tmp_path / str(number)).mkdir()
        folder = folder_of(tmp_path / str(number), weights, {key: value})
        try:
            found = by_us(folder)
        except UserError:
            continue
        try:
            expected = by_transformers(folder)
        except Exception:  # refused there: nothing to compare with
            continue
        assert_equal(found, expected)
