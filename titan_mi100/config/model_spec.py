"""Which Qwen3 it is: presets, HF `config.json`, parameter and FLOP counts. Imports no torch."""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object, refuse_code
from titan_mi100.wording import shortened, shown


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a dense Qwen3. Field names are those of HF's `config.json`."""

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

    def problems(self) -> list[str]:
        """What makes this shape impossible, one clause each; empty when it is sound."""
        found = [
            f"{name} = {value} must be positive"
            for name, value in asdict(self).items()
            if not isinstance(value, bool) and value <= 0
        ]
        if not found and self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if not found and self.head_dim % 2:
            found.append(f"head_dim = {self.head_dim} is odd; rotary embeddings rotate pairs")
        return found


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelSpec:
    return ModelSpec(151936, hidden, intermediate, layers, heads, 8, 128, tied)


# Source: the config.json of each Qwen/Qwen3-* repository.
PRESETS: Mapping[str, ModelSpec] = {
    "debug": ModelSpec(768, 128, 384, 4, 4, 2, 32, True, rope_theta=10_000.0, max_position_embeddings=4096),
    "0.6B": _qwen3(1024, 3072, 28, 16, True),
    "1.7B": _qwen3(2048, 6144, 28, 16, True),
    "4B": _qwen3(2560, 9728, 36, 32, True),
    "8B": _qwen3(4096, 12288, 36, 32, False),
    "14B": _qwen3(5120, 17408, 40, 40, False),
    "32B": _qwen3(5120, 25600, 64, 64, False),
}


# transformers' own for a Qwen3 whose config.json leaves these out
_DEFAULTS = {"tie_word_embeddings": False, "head_dim": 128, "rope_theta": 10_000.0, "max_position_embeddings": 32768}

_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_LARGEST_COUNT, _LARGEST_SIZE = 10_000, 10**8

# a field's type -> the types of JSON values that it takes, and what they are in words
_TYPES: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float)}
_WORDS: dict[Any, str] = {bool: "true or false", int: "an int", float: "a finite float"}


def read_hf_config(folder: str | Path) -> ModelSpec:
    """Read the model's shape from `folder/config.json`.

    The rotary fields are taken in both forms that transformers has written: flat (`rope_theta`, `rope_scaling`) and
    nested (`rope_parameters`).

    Raises:
        UserError: no such file, not a dense Qwen3, code of its own, or a feature that this model does not have.
    """
    path = Path(folder) / "config.json"
    raw = read_object(path, "name an HF folder, which has a config.json, or for other weights model.flavor")
    refuse_code(path, raw)
    for key, kind in (("rope_parameters", dict), ("rope_scaling", dict), ("layer_types", list)):
        if not isinstance(raw.get(key) or kind(), kind):
            raise UserError(f"{path}: {key} = {raw[key]!r} is not a JSON {'object' if kind is dict else 'list'}")
    found = _unsupported(raw)
    rope = raw.get("rope_parameters") or {}
    values: dict[str, Any] = _DEFAULTS | {f.name: raw[f.name] for f in fields(ModelSpec) if raw.get(f.name) is not None}
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    for field in fields(ModelSpec):
        value = values.get(field.name, field.default)
        if value is MISSING:
            found.append(f"{field.name} is missing")
        elif type(value) not in _TYPES[field.type] or (field.type is float and not abs(value) < 1e300):
            found.append(f"{field.name} = {shown(value)} is not {_WORDS[field.type]}")
    if not found:
        spec = ModelSpec(**values)
        found = spec.problems()
        # what counts the layers would not come to an end, and what multiplies sizes would overflow
        for field in fields(ModelSpec):
            most = _LARGEST_COUNT if field.name in _COUNTS else _LARGEST_SIZE
            if field.type is int and (value := getattr(spec, field.name)) > most:
                found.append(f"{field.name} = {shortened(str(value))} is more than any model has")
    if found:
        raise UserError("\n".join(f"{path}: {problem}" for problem in found))
    return spec


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    """Settings of a config.json under which this model would compute something else."""
    found = []
    if raw.get("model_type") != "qwen3":
        found.append(f"model_type = {raw.get('model_type')!r}; only 'qwen3' (dense) is supported")
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if raw.get(key, only) != only:
            found.append(f"{key} = {raw[key]!r} is not supported; only {only!r}")
    if raw.get("quantization_config"):
        found.append("quantization_config: quantized weights are not supported; use the model's unquantized folder")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        found.append("layer_types holds more than 'full_attention', which is not supported")
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            found.append(f"{key}: rope type {kind!r} is not supported; only 'default'")
    return found


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` that transformers reads back into the same model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        **asdict(spec),
    }


def differences(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Fields that change what a model computes or its tensors' shapes, as `name: a's value, b's value`."""
    same = {"initializer_range": 0.0, "max_position_embeddings": 0}  # neither changes the computation of given weights
    left, right = asdict(replace(a, **same)), asdict(replace(b, **same))  # type: ignore[arg-type]
    return [f"{name}: {left[name]}, {right[name]}" for name in left if left[name] != right[name]]


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter's HF name and shape, a tied weight once."""
    hidden, q = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    kv, mlp = spec.num_key_value_heads * spec.head_dim, spec.intermediate_size
    block: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_hidden_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in block.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


# The linear layers of a block, in the order of the computation: those that LoRA can adapt.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_shapes(spec: ModelSpec, rank: int, targets: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every LoRA matrix beside the linear layers of these names (of LINEARS)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in targets:
            shapes[f"{module}.lora_A.weight"] = (rank, shape[1])
            shapes[f"{module}.lora_B.weight"] = (shape[0], rank)
    return shapes


def parameter_count(spec: ModelSpec) -> int:
    """Number of trained values, a tied weight counted once."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec).values())
