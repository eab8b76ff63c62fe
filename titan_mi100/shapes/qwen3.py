"""The dense Qwen3 as data: presets, HF `config.json`, its layers. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from titan_mi100.errors import UserError
from titan_mi100.shapes.base import INPUTS, OUTPUTS, WHOLE, AttentionShape, LayerShape, ModelSpec, Parameter, Values
from titan_mi100.wording import as_key, first_of, shortened, shown

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

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        hidden, mlp = self.hidden_size, self.intermediate_size
        q, k = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norm, norm_of_head = (Parameter((size,), WHOLE, "norm", "ones") for size in (hidden, self.head_dim))
        parameters = {
            "self_attn.q_proj.weight": Parameter((q, hidden), OUTPUTS),
            "self_attn.k_proj.weight": Parameter((k, hidden), OUTPUTS),
            "self_attn.v_proj.weight": Parameter((k, hidden), OUTPUTS),
            "self_attn.o_proj.weight": Parameter((hidden, q), INPUTS),
            "self_attn.q_norm.weight": norm_of_head,
            "self_attn.k_norm.weight": norm_of_head,
            "mlp.gate_proj.weight": Parameter((mlp, hidden), OUTPUTS),
            "mlp.up_proj.weight": Parameter((mlp, hidden), OUTPUTS),
            "mlp.down_proj.weight": Parameter((hidden, mlp), INPUTS),
            "input_layernorm.weight": norm,
            "post_attention_layernorm.weight": norm,
        }
        matrices = [parameter.size for parameter in parameters.values() if parameter.role == "matrix"]
        saved = Values(6 * hidden + 2 * q + 2 * k + 4 * mlp, 2 * (hidden + q + k))  # norms are in fp32
        moving = Values(2 * mlp + 2 * hidden)
        layer = LayerShape(
            kind="attention",
            parameters=parameters,
            adapted=LINEARS,
            products=sum(matrices),
            last_product=hidden * mlp,
            pair_flops=4 * q,
            kept={"none": saved, "selective": Values(hidden + 2 * q + 2 * k), "full": Values(hidden)},
            inside={"none": moving, "selective": Values(3 * hidden + 4 * mlp, hidden) + moving, "full": saved + moving},
            for_norms=Values(0, 2 * hidden + q + k),
        )
        return (layer,) * self.num_hidden_layers

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def per_forward(self) -> Values:
        return Values(0, 2 * self.head_dim)  # cos and sin

    def tensor_parallel_sizes(self) -> dict[str, int]:
        split = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        return {name: getattr(self, name) for name in split} | super().tensor_parallel_sizes()

    def input_sizes(self) -> dict[str, tuple[int, bool]]:
        heads = self.num_attention_heads * self.head_dim
        split = {"num_attention_heads x head_dim": (heads, True), "intermediate_size": (self.intermediate_size, True)}
        return super().input_sizes() | split

    def problems(self) -> list[str]:
        """What is wrong with this shape, one clause each; empty: nothing."""
        found = [
            f"{name} = {value} must be positive"
            for name, value in asdict(self).items()
            if name != "pad_token_id" and not isinstance(value, bool) and value <= 0
        ]
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            found.append(f"pad_token_id = {self.pad_token_id} is not in the vocabulary; set it to null")
        if not found and self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if not found and self.head_dim % 2:
            found.append(f"head_dim = {self.head_dim} is odd; rotary embeddings rotate pairs")
        return found


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
_DEFAULTS = {"tie_word_embeddings": False, "head_dim": 128, "rope_theta": 10_000.0, "max_position_embeddings": 32768}

_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_LARGEST_COUNT, _LARGEST_SIZE = 10_000, 10**8

# type of a field -> the types of JSON values that it accepts, and their name in messages
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"), int: ((int,), "an int"), float: ((int, float), "a finite float"),
    int | None: ((int, type(None)), "an int or null"),
}  # fmt: skip

# Other keys of config.json. transformers' Qwen3 computes the same as this model only with these values:
_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "is_causal": True,
    "attention_dropout": 0.0, "partial_rotary_factor": 1.0, "is_decoder": False, "is_encoder_decoder": False,
    "tie_encoder_decoder": False, "add_cross_attention": False, "chunk_size_feed_forward": 0, "pretraining_tp": 1,
    "pruned_heads": {},
}  # fmt: skip
# These keys change neither forward nor backward: bookkeeping, return values, classification, generation.
_WITHOUT_EFFECT = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version name_or_path _name_or_path _commit_hash
    tokenizer_class unsloth_version unsloth_fixed attn_implementation _attn_implementation _attn_implementation_autoset
    use_cache torchscript return_dict output_hidden_states output_attentions sliding_window max_window_layers
    bos_token_id eos_token_id sep_token_id decoder_start_token_id prefix finetuning_task task_specific_params
    problem_type num_labels id2label label2id
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens epsilon_cutoff eta_cutoff
    """.split()  # noqa: SIM905 (a list of that many strings hides the names)
)
_ROPES = ("rope_scaling", "rope_parameters")  # the rotary embedding's dict, as transformers 4 and 5 write it


def read(path: Path, raw: Mapping[str, Any]) -> Qwen3Spec:
    """The shape that a `config.json` describes; see families.read_hf_config.

    rope_theta may be a key of its own (transformers 4) or in the dict `rope_parameters` (transformers 5).

    Args:
        path: of the file, for messages. raw: its content.

    Raises:
        UserError: a key that makes transformers compute something else than this model, or might.
    """
    found = _unsupported(raw)
    rope: dict[str, Any] = next((raw[key] for key in _ROPES if raw.get(key) and isinstance(raw[key], dict)), {})
    values = {**_DEFAULTS, "rope_theta": rope.get("rope_theta", _DEFAULTS["rope_theta"]), **raw}
    for field in fields(Qwen3Spec):
        value = values.get(field.name, field.default)
        types, words = _TYPES[field.type]
        if value is MISSING:
            found.append(f"{field.name} is missing")
        elif type(value) not in types or (field.type is float and not abs(value) < 1e300):
            found.append(f"{field.name} = {shown(value)} is not {words}")
    if not found:
        spec = Qwen3Spec(**{field.name: values[field.name] for field in fields(Qwen3Spec) if field.name in values})
        found = spec.problems()
        # larger counts would make loops over layers endless, larger sizes would overflow
        for field in fields(Qwen3Spec):
            most = _LARGEST_COUNT if field.name in _COUNTS else _LARGEST_SIZE
            if field.type is int and (value := getattr(spec, field.name)) > most:
                found.append(f"{field.name} = {shortened(str(value))} is more than any model has")
    if found:
        raise UserError(first_of([f"{path}: {problem}" for problem in found], str(path)))
    return spec


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that this model does not support, or that are unknown."""
    own = (field.name for field in fields(Qwen3Spec))
    found = _unknown(raw, {*own, *_ONLY, *_WITHOUT_EFFECT, *_ROPES, "layer_types", "quantization_config"})
    if raw.get("quantization_config") is not None:
        found.append("quantization_config: quantized weights are not supported; use the model's unquantized folder")
    for key, only in _ONLY.items():
        if (value := raw.get(key, only)) != only:
            found.append(f"{key} = {shortened(repr(value))} is not supported; only {only!r}")
    layers, count = raw.get("layer_types"), raw.get("num_hidden_layers")
    is_full = isinstance(layers, list) and len(layers) == count and {*map(str, layers)} == {"full_attention"}
    if layers is not None and not is_full:
        what = f"layer_types = {shortened(repr(layers))} is not supported"
        found.append(f"{what}; only 'full_attention' for each of the num_hidden_layers")
    ropes = {key: raw[key] for key in _ROPES if raw.get(key) not in (None, {})}
    if len(ropes) > 1:
        found.append(f"{' and '.join(_ROPES)} are both set, and programs read either; remove one")
    for key, rope in ropes.items():
        if not isinstance(rope, dict):
            found.append(f"{key} = {shortened(repr(rope))} is not a JSON object")
        elif kinds := [rope[name] for name in ("rope_type", "type") if rope.get(name, "default") != "default"]:
            found.append(f"{key}: rope type {shown(kinds[0])} is not supported; only 'default'")
        else:
            found += [f"{key}: {problem}" for problem in _unknown(rope, {"rope_type", "type", "rope_theta"})]
            if "rope_theta" in rope and rope["rope_theta"] != raw.get("rope_theta", rope["rope_theta"]):
                found.append(f"rope_theta is {raw['rope_theta']!r}, and {rope['rope_theta']!r} in {key}; remove one")
    return found


def _unknown(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [
        f"{as_key(key)} = {shown(given[key])} is not known here; remove it if the model is the same without it"
        for key in sorted(given.keys() - known)
        if given[key] is not None
    ]


def to_hf(spec: Qwen3Spec) -> dict[str, Any]:
    """The `config.json` that transformers reads back into the same model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": spec.model_type,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        **asdict(spec),
    }
