"""The dense Qwen3 as data: presets, HF `config.json`, its layers. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from titan_mi100.shapes import hf_config
from titan_mi100.shapes.base import INPUTS, OUTPUTS, WHOLE, LayerShape, ModelSpec, Parameter
from titan_mi100.shapes.rope import RopeScaling
from titan_mi100.shapes.saved import FP32, MIX, PROJECT, Saved, ValuesPerToken
from titan_mi100.wording import shortened

# The linear layers of a layer, in the order of the computation: those that LoRA can adapt.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Qwen3Spec(ModelSpec):
    """The shape of a dense Qwen3."""

    model_type: ClassVar[str] = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    rope_scaling: RopeScaling | None = None

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        hidden = self.hidden_size
        q, k = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        saved = (
            Saved("input in fp32", 2 * hidden, PROJECT, left=0),  # norms are in fp32
            Saved("normed input in fp32", hidden, PROJECT, FP32, is_for_norm=True, left=0),
            Saved("normed input", hidden, PROJECT),
            Saved("q in fp32", q, PROJECT, FP32, left=q),
            Saved("normed q in fp32", q, PROJECT, FP32, is_for_norm=True, left=0),
            Saved("k in fp32", k, PROJECT, FP32, left=k),
            Saved("normed k in fp32", k, PROJECT, FP32, is_for_norm=True, left=0),
            *(Saved("q", q, MIX), Saved("k", k, MIX), Saved("v", k, MIX), Saved("attention's output", q, MIX)),
        )
        layer = with_mlp(self, "attention", of_attention(self), LINEARS, saved, 4 * q)
        return (layer,) * self.num_hidden_layers

    @property
    def per_forward(self) -> ValuesPerToken:
        return ValuesPerToken(0, 2 * self.head_dim)  # cos and sin

    def problems(self) -> list[str]:
        messages = super().problems() or self.uneven("num_attention_heads", "num_key_value_heads")
        if not messages and self.head_dim % 2:
            messages.append(f"head_dim = {self.head_dim} is odd; rotary embeddings rotate pairs")
        return messages


def of_attention(spec: ModelSpec, per_query: int = 1) -> dict[str, Parameter]:
    """The parameters of attention. Args: per_query: outputs of q_proj for each value of a query."""
    q, k, hidden = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim, spec.hidden_size
    norm, keys = Parameter((spec.head_dim,), WHOLE, "norm", spec.norm_start), Parameter((k, hidden), OUTPUTS)
    return {
        "self_attn.q_proj.weight": Parameter((per_query * q, hidden), OUTPUTS),
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": keys,
        "self_attn.o_proj.weight": Parameter((hidden, q), INPUTS),
        "self_attn.q_norm.weight": norm,
        "self_attn.k_norm.weight": norm,
    }


def with_mlp(
    spec: ModelSpec, kind: str, parameters: Mapping[str, Parameter], adapted: tuple[str, ...], saved: tuple[Saved, ...],
    pair_flops: int, temporaries: tuple[Saved, ...] = (),
) -> LayerShape:  # fmt: skip
    """A layer that mixes positions, then SwiGLU, each behind a norm and added to the residual stream.

    Args:
        parameters, saved, temporaries: those of the mixing; `saved` has those of the norm before it, too.
    """
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    norm = Parameter((hidden,), WHOLE, "norm", spec.norm_start)
    parameters = {
        **parameters,
        "mlp.gate_proj.weight": Parameter((mlp, hidden), OUTPUTS),
        "mlp.up_proj.weight": Parameter((mlp, hidden), OUTPUTS),
        "mlp.down_proj.weight": Parameter((hidden, mlp), INPUTS),
        "input_layernorm.weight": norm,
        "post_attention_layernorm.weight": norm,
    }
    saved = (
        *saved,
        Saved("residual in fp32", 2 * hidden, left=hidden),  # norms are in fp32
        Saved("normed residual in fp32", hidden, dtype=FP32, is_for_norm=True, left=0),
        Saved("normed residual", hidden),
        *(Saved(f"mlp.{name}", mlp, left=0) for name in ("gate", "up", "silu(gate)", "silu(gate) x up")),
    )
    gradients = Saved("mlp.gradients", 2 * (mlp + hidden), left=2 * hidden)  # of gate and up, and of two hidden states
    products = sum(parameter.size for parameter in parameters.values() if len(parameter.shape) == 2)
    return LayerShape(
        kind=kind, parameters=parameters, adapted=adapted, products=products, last_product=hidden * mlp,
        pair_flops=pair_flops, input=hidden, saved=saved, temporaries=(gradients, *temporaries),
    )  # fmt: skip


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> Qwen3Spec:
    return Qwen3Spec(151936, hidden, intermediate, layers, heads, 8, 128, tied)


# Source: the config.json of each Qwen/Qwen3-* repository.
PRESETS: Mapping[str, Qwen3Spec] = {
    "debug": Qwen3Spec(768, 128, 384, 4, 4, 2, 32, True, rope_theta=10_000.0, max_position_embeddings=4096),
    "0.6B": _qwen3(1024, 3072, 28, 16, True),
    "1.7B": _qwen3(2048, 6144, 28, 16, True),
    "4B": _qwen3(2560, 9728, 36, 32, True),
    "8B": _qwen3(4096, 12288, 36, 32, False),
    "14B": _qwen3(5120, 17408, 40, 40, False),
    "32B": _qwen3(5120, 25600, 64, 64, False),
}


# transformers' defaults for keys that a Qwen3's config.json may leave out
DEFAULTS = {"tie_word_embeddings": False, "head_dim": 128, "rope_theta": 10_000.0, "max_position_embeddings": 32768}


def read(path: Path, raw: Mapping[str, Any]) -> Qwen3Spec:
    """The shape that a `config.json` describes; see families.read_hf_config.

    rope_theta may be a key of its own (transformers 4) or in the dict `rope_parameters` (transformers 5).

    Args:
        path: of the file, for messages. raw: its content.

    Raises:
        UserError: a key that makes transformers compute something else than this model, or might.
    """
    only = {**hf_config.ONLY, "partial_rotary_factor": 1.0}
    problems = hf_config.unsupported(raw, [field.name for field in fields(Qwen3Spec)], only)
    return hf_config.build(path, Qwen3Spec, {**DEFAULTS, **raw, **checked_rope(raw, problems)}, problems)


def checked_rope(raw: Mapping[str, Any], found: list[str]) -> dict[str, Any]:
    """Reads the rotary embedding's dict. Args: found: receives problems, also of layer_types."""
    layers, count = raw.get("layer_types"), raw.get("num_hidden_layers")
    is_full = isinstance(layers, list) and len(layers) == count and {*map(str, layers)} == {"full_attention"}
    if layers is not None and not is_full:
        problem = f"layer_types = {shortened(repr(layers))} is not supported"
        found.append(f"{problem}; only 'full_attention' for each of the num_hidden_layers")
    return hf_config.read_rope(raw, ["rope_theta"], found)


def to_hf(spec: Qwen3Spec) -> dict[str, Any]:
    """The `config.json` that transformers reads back into the same model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": spec.model_type,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        **spec.as_dict(),
    }
