"""The text part of the dense Qwen3.5 (3.6, 3.8) as data: presets, HF `config.json`, layers. Imports no torch.

Three of four layers mix positions by the gated delta rule, the fourth by attention with a gate on its output.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from titan_mi100.shapes import hf_config, qwen3
from titan_mi100.shapes.base import DRAFT, DRAFT_FIELDS, INPUTS, OUTPUTS, WHOLE, LayerShape, ModelSpec, Parameter, Split
from titan_mi100.shapes.delta_rule import CHUNK, products_of_chunk
from titan_mi100.shapes.qwen3 import of_attention, with_mlp
from titan_mi100.shapes.rope import RopeScaling
from titan_mi100.shapes.saved import FP32, MIX, PROJECT, Saved, ValuesPerToken
from titan_mi100.wording import shortened, shown

LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
_SMALL = "some servers silently drop its adapter, and it is small"
NOT_ADAPTED = {
    "in_proj_a": _SMALL, "in_proj_b": _SMALL, "conv1d": "a convolution of single channels has no adapter",
}  # fmt: skip
FULL, LINEAR = "full_attention", "linear_attention"  # kinds of layers, as config.json names them
_WRAPPED = "model.language_model."  # begins the names in folders with a vision tower


@dataclass(frozen=True)
class Qwen3_5Spec(ModelSpec):
    """The shape of a dense Qwen3.5.

    Attributes:
        layer_types: FULL or LINEAR, for each layer.
        partial_rotary_factor: the share of a head's dimensions that is rotated.
        is_wrapped: config.json has the text part under `text_config`, as in folders with a vision tower; files then
            name its tensors `model.language_model.X` instead of `model.X`.
    """

    model_type: ClassVar[str] = "qwen3_5"
    norm_start: ClassVar[str] = "zeros"  # its gain is 1 + weight
    of_files: ClassVar[Collection[str]] = ("is_wrapped", *DRAFT_FIELDS)
    kernels: ClassVar[Collection[str]] = ("delta",)
    architecture: ClassVar[str] = "Qwen3_5"  # begins the names of transformers' classes
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({})  # keys of config.json -> our fields
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    head_dim: int = 256
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262_144
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    rope_scaling: RopeScaling | None = None
    is_wrapped: bool = False
    has_draft_head: bool = False
    draft_experts_fused: bool = False

    @property
    def keys(self) -> int:
        """Values of all keys of the delta rule, of a token; as many as of its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """The same of its values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the delta rule, a power of two: 64 for the published models. Small heads are fastest
        with fewer.
        """
        return min(1 << max(self.linear_key_head_dim // 2, 16).bit_length() - 1, CHUNK)

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        kinds = {kind: self.layer(kind) for kind in (FULL, LINEAR)}
        return tuple(kinds[kind] for kind in self.layer_types)

    def layer(self, kind: str) -> LayerShape:
        """A layer of a kind."""
        return self._attention() if kind == FULL else self._delta()

    @cached_property
    def draft_layer(self) -> LayerShape:
        return self.layer(FULL)

    def _attention(self) -> LayerShape:
        hidden = self.hidden_size
        q, k = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        parameters = of_attention(self, per_query=2)  # of each head its query and its gate
        saved = (  # up to a quarter more than autograd saves in 16 bits; tests/test_memory.py compares
            Saved("normed input in fp32", hidden, PROJECT, FP32, True, 0),
            Saved("normed input", hidden, PROJECT),
            *(Saved(f"{name} in fp32", q, PROJECT, FP32, left=left) for name, left in (("q", q), ("normed q", 0))),
            *(Saved(f"{name} in fp32", k, PROJECT, FP32, left=left) for name, left in (("k", k), ("normed k", 0))),
            *(Saved("q", q, MIX), Saved("k", k, MIX), Saved("v", k, MIX), Saved("gate", q, MIX)),
            Saved("attention's output", q, MIX),
            # computed after the mixing; "selective" is planned without them
            *(Saved("sigmoid(gate)", q, PROJECT, left=0), Saved("gated output", q, PROJECT)),
        )
        return with_mlp(self, FULL, parameters, qwen3.LINEARS, saved, 4 * q, (Saved("gradient of the gate", q),))

    def _delta(self) -> LayerShape:
        hidden, heads = self.hidden_size, self.linear_num_value_heads
        keys, values, dims = self.keys, self.values, (self.linear_key_head_dim, self.linear_value_head_dim)
        parts = Split(0, (keys, keys, values))  # queries, keys, values
        channels, each_head = 2 * keys + values, Parameter((heads,), OUTPUTS, "other", "ones")
        parameters = {
            "linear_attn.in_proj_qkv.weight": Parameter((channels, hidden), parts),
            "linear_attn.in_proj_z.weight": Parameter((values, hidden), OUTPUTS),
            "linear_attn.in_proj_b.weight": Parameter((heads, hidden), OUTPUTS, "other"),
            "linear_attn.in_proj_a.weight": Parameter((heads, hidden), OUTPUTS, "other"),
            "linear_attn.conv1d.weight": Parameter((channels, 1, self.linear_conv_kernel_dim), parts, "other"),
            "linear_attn.A_log": each_head._replace(start="decay", held_as="decay.A_log", in_fp32=True),
            "linear_attn.dt_bias": each_head._replace(held_as="decay.dt_bias"),
            "linear_attn.norm.weight": Parameter((dims[1],), WHOLE, "norm", "ones", in_fp32=True),
            "linear_attn.out_proj.weight": Parameter((hidden, values), INPUTS),
        }
        rule = products_of_chunk(self.linear_num_key_heads, heads, *dims, self.chunk) // self.chunk  # of a token
        states = heads * dims[0] * dims[1] // self.chunk  # one for each chunk
        saved = (
            Saved("normed input in fp32", hidden, PROJECT, FP32, True, 0),
            Saved("normed input", hidden, PROJECT),
            *(Saved(name, channels, MIX) for name in ("qkv before the convolution", "qkv")),
            Saved("qkv before silu", channels, MIX, left=0),
            *(Saved(name, values, MIX) for name in ("z", "the rule's output")),
            Saved("states of the rule", states, MIX, FP32),
            Saved("decays and betas, and what they are of", 4 * heads, MIX, FP32),
            # computed after the mixing; "selective" is planned without them
            *(Saved("normed output", values, PROJECT, left=0), Saved("gated output", values, PROJECT)),
            *(Saved(f"{name} in fp32", values, PROJECT, FP32, left=0) for name in ("the rule's output", "z")),
        )
        adapted = ("in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj")
        temporaries = (
            Saved("qkv in fp32", 3 * channels, MIX, FP32, left=0),
            Saved("states again", 2 * states, MIX, FP32, left=0),
        )
        layer = with_mlp(self, LINEAR, parameters, adapted, saved, 0, temporaries)
        mixed = ValuesPerToken(channels + heads + values, heads)  # with the strengths, and the decays in fp32
        return replace(layer, products=layer.products + rule, mixed=mixed)

    @property
    def per_forward(self) -> ValuesPerToken:
        return ValuesPerToken(0, 2 * self.rotated)  # cos and sin

    def passes_through(self, name: str) -> bool:
        return name.startswith("model.visual.") or (name.startswith(DRAFT) and not self.has_draft_head)

    @staticmethod
    def own_name(name: str) -> str:  # some folders of text alone have the prefix, too
        return name.replace(_WRAPPED, "model.", 1) if name.startswith(_WRAPPED) else name

    def stored_name(self, name: str) -> str:
        is_inside = self.is_wrapped and name.startswith("model.") and not self.passes_through(name)
        return name.replace("model.", _WRAPPED, 1) if is_inside else name

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.linear_num_key_heads, **super().tensor_parallel_sizes()}

    def mixing_heads(self) -> dict[str, int]:
        return {**super().mixing_heads(), "linear_num_key_heads": self.linear_num_key_heads}

    def input_sizes(self) -> dict[str, tuple[int, bool]]:
        return {**super().input_sizes(), "linear_num_value_heads x linear_value_head_dim": (self.values, True)}

    def problems(self) -> list[str]:
        messages = super().problems()
        if not messages:
            messages += self.uneven("num_attention_heads", "num_key_value_heads")
            messages += self.uneven("linear_num_value_heads", "linear_num_key_heads")
        kinds = {*self.layer_types}
        if len(self.layer_types) != self.num_hidden_layers or not kinds <= {FULL, LINEAR}:
            problem = f"layer_types names {len(self.layer_types)} layers of {', '.join(map(shown, sorted(kinds)[:4]))}"
            messages.append(f"{problem}; it must have {FULL!r} or {LINEAR!r} for each of num_hidden_layers")
        if self.linear_conv_kernel_dim != 4:
            messages.append(f"linear_conv_kernel_dim = {self.linear_conv_kernel_dim} is not supported; only 4")
        if not messages and (self.rotated % 2 or not 0 < self.rotated <= self.head_dim):
            problem = f"rotates {self.rotated} of head_dim = {self.head_dim} dimensions; they must be pairs"
            messages.append(f"partial_rotary_factor = {self.partial_rotary_factor} {problem}")
        return messages


def every_fourth(layers: int, interval: int = 4) -> tuple[str, ...]:
    """The kinds of layers, of which each `interval`-th is attention."""
    return tuple(LINEAR if number % interval else FULL for number in range(1, layers + 1))


def _qwen3_5(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, values: int, tied: bool) -> Qwen3_5Spec:
    return Qwen3_5Spec(248_320, hidden, mlp, layers, heads, kv_heads, 16, values, tied, every_fourth(layers))


# Source: the config.json of each Qwen/Qwen3.5-* repository; 3.6-27B and 3.8-27B have the shape of 3.5-27B.
_27B = _qwen3_5(5120, 17408, 64, 24, 4, 48, False)
PRESETS: Mapping[str, Qwen3_5Spec] = {
    "qwen3.5-debug": Qwen3_5Spec(
        768, 128, 384, 4, 4, 2, 2, 4, True, every_fourth(4), 32, 32, 32, rope_theta=10_000.0,
        max_position_embeddings=4096,
    ),
    "qwen3.5-0.8B": _qwen3_5(1024, 3584, 24, 8, 2, 16, True),
    "qwen3.5-2B": _qwen3_5(2048, 6144, 24, 8, 2, 16, True),
    "qwen3.5-4B": _qwen3_5(2560, 9216, 32, 16, 4, 32, True),
    "qwen3.5-9B": _qwen3_5(4096, 12288, 32, 16, 4, 32, False),
    **dict.fromkeys(("qwen3.5-27B", "qwen3.6-27B", "qwen3.8-27B"), _27B),
}  # fmt: skip

# transformers' defaults for keys that config.json may leave out
_DEFAULTS = {
    "tie_word_embeddings": False, "head_dim": 256, "max_position_embeddings": 32768, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
_ONLY = {**hf_config.ONLY, "attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []}
# The vision tower's and the draft head's, which are passed through; the delta rule's dtype, which is fp32 here anyway.
_WITHOUT_EFFECT = (
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "unsloth_fixed_mtp",
)  # fmt: skip
_OF_WRAPPER = (
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "language_model_only", "tie_word_embeddings", "pad_token_id",
)  # fmt: skip
# For text all three rows of positions are equal, so these change nothing.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def read(path: Path, raw: Mapping[str, Any], family: type[Qwen3_5Spec] = Qwen3_5Spec) -> Qwen3_5Spec:
    """The shape that a `config.json` describes, of a folder with or without a vision tower; see
    families.read_hf_config.

    Args:
        path: of the file, for messages. raw: its content.

    Raises:
        UserError: a key that makes transformers compute something else than this model, or might.
    """
    text, problems, is_wrapped = raw, [], "text_config" in raw
    of_text = f"{family.model_type}_text"
    if is_wrapped:
        inner = raw["text_config"]
        text = inner if isinstance(inner, dict) else {}
        if text is not inner:
            problems.append(f"text_config = {shown(inner)} is not a JSON object")
        problems += hf_config.unsupported(raw, _OF_WRAPPER, {})
        # as transformers: its class for images and text reads this key beside text_config, where the default is false
        outer, own = raw.get("tie_word_embeddings") or False, text.get("tie_word_embeddings")
        if own is not None and outer != own:
            problem = f"tie_word_embeddings is {outer!r}, and {own!r} in text_config"
            problems.append(f"{problem}; give both the value that fits the weights: untied folders have lm_head.weight")
        text = {**text, "tie_word_embeddings": outer}
        kind = text.get("model_type", of_text)
        if kind != of_text:
            problems.append(f"text_config: model_type = {shown(kind)} is not supported; only {of_text!r}")
    text = {family.renamed.get(key, key): setting for key, setting in text.items()}
    known = [field.name for field in fields(family) if field.name not in family.of_files]
    problems += hf_config.unsupported(text, [*known, *_WITHOUT_EFFECT, "full_attention_interval", *_OF_IMAGES], _ONLY)
    rope = hf_config.read_rope(text, ["rope_theta", "partial_rotary_factor"], problems, _OF_IMAGES)
    settings = {**_DEFAULTS, **text, **rope, "is_wrapped": is_wrapped}
    settings["layer_types"] = _layer_types(text, problems)
    return hf_config.build(path, family, settings, problems)


def _layer_types(text: Mapping[str, Any], found: list[str]) -> tuple[str, ...]:
    """The kinds of layers, listed or by their interval. Args: found: receives problems."""
    listed, count, every = (text.get(key) for key in ("layer_types", "num_hidden_layers", "full_attention_interval"))
    if listed is not None:
        if isinstance(listed, list) and all(isinstance(kind, str) for kind in listed):
            return tuple(listed)
        found.append(f"layer_types = {shortened(repr(listed))} is not a list of texts")
    every = 4 if every is None else every
    if type(every) is not int or every < 1:
        found.append(f"full_attention_interval = {shown(every)} is not a number above 0")
    elif type(count) is int and 0 < count <= hf_config.MOST_LAYERS:
        return every_fourth(count, every)
    return ()


def to_hf(spec: Qwen3_5Spec) -> dict[str, Any]:
    """The `config.json` that transformers reads back into the same model; without what it says of a vision tower."""
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta, "partial_rotary_factor": spec.partial_rotary_factor}
    own = {**spec.as_dict(), "layer_types": list(spec.layer_types)}
    rope |= own.pop("rope_scaling", {})
    text = {"model_type": f"{spec.model_type}_text", "hidden_act": "silu", "attention_bias": False}
    text["rope_parameters"] = rope
    stored = {name: key for key, name in spec.renamed.items()}
    text |= {stored.get(name, name): v for name, v in own.items() if name not in (*rope, *spec.of_files)}
    if not spec.is_wrapped:
        return {"architectures": [f"{spec.architecture}ForCausalLM"], **text}
    outer = {"model_type": spec.model_type, "tie_word_embeddings": spec.tie_word_embeddings, "text_config": text}
    return {"architectures": [f"{spec.architecture}ForConditionalGeneration"], **outer}
