"""Qwen3's mixtures of experts (30B-A3B, Coder, 2507) as data: presets, HF `config.json`, layers. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from titan_mi100.shapes import experts, hf_config, qwen3
from titan_mi100.shapes.base import EXPERTS, LayerShape
from titan_mi100.wording import shown

LINEARS = (*qwen3.LINEARS[:4], EXPERTS)
SPARSE = "sparse"  # kind of the layers with experts; the others are Qwen3's


@dataclass(frozen=True)
class Qwen3MoeSpec(experts.MixtureSpec, qwen3.Qwen3Spec):
    """The shape of a Qwen3 with experts.

    Attributes:
        intermediate_size: of the layers without experts.
        decoder_sparse_step: each layer whose number, from 1, is a multiple of it has experts.
        mlp_only_layers: numbers, from 0, of layers that have none nevertheless.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    of_files: ClassVar[Collection[str]] = ("experts_fused",)
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    experts_fused: bool = False

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        dense, step = super().layers[0], self.decoder_sparse_step
        sparse = experts.with_experts(self, dense, SPARSE)
        dense = replace(dense, adapted=sparse.adapted[:-1])
        is_dense = (n in self.mlp_only_layers or (n + 1) % step for n in range(self.num_hidden_layers))
        return tuple(dense if each else sparse for each in is_dense)

    def problems(self) -> list[str]:
        messages = super().problems()
        if wrong := [n for n in self.mlp_only_layers if not 0 <= n < self.num_hidden_layers]:
            messages.append(f"mlp_only_layers names layer {wrong[0]}, but there are {self.num_hidden_layers}, from 0")
        return messages


# Source: the config.json of Qwen3-30B-A3B, its 2507 variants, and Qwen3-Coder-30B-A3B.
_30B = Qwen3MoeSpec(151_936, 2048, 6144, 48, 32, 4, 128, False, norm_topk_prob=True)
_2507 = replace(_30B, rope_theta=10_000_000.0, max_position_embeddings=262_144)
PRESETS: Mapping[str, Qwen3MoeSpec] = {
    "moe-debug": Qwen3MoeSpec(
        768, 128, 384, 4, 4, 2, 32, True, rope_theta=10_000.0, max_position_embeddings=4096, moe_intermediate_size=64,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "30B-A3B": _30B,
    "30B-A3B-2507": _2507,
    "Coder-30B-A3B": replace(_2507, intermediate_size=5472),
}  # fmt: skip

_ONLY = {
    **hf_config.ONLY, "partial_rotary_factor": 1.0, "qkv_bias": False, "use_qk_norm": True,
    "shared_expert_intermediate_size": 0,
}  # fmt: skip


def read(path: Path, raw: Mapping[str, Any]) -> Qwen3MoeSpec:
    """The shape that a `config.json` describes; see qwen3.read."""
    known = [field.name for field in fields(Qwen3MoeSpec) if field.name not in Qwen3MoeSpec.of_files]
    problems = hf_config.unsupported(raw, [*known, "num_local_experts"], _ONLY)
    settings = {**qwen3.DEFAULTS, **raw, **qwen3.checked_rope(raw, problems)}
    if "num_local_experts" in raw:  # as transformers 5 names it
        settings.setdefault("num_experts", raw["num_local_experts"])
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if raw.get("head_dim") is None and type(hidden) is type(heads) is int and heads:
        settings["head_dim"] = hidden // heads
    dense = raw.get("mlp_only_layers") or []
    if not (isinstance(dense, list) and all(type(number) is int for number in dense)):
        problems.append(f"mlp_only_layers = {shown(dense)} is not a list of the numbers of layers")
    settings["mlp_only_layers"] = tuple(dense) if isinstance(dense, list) else ()
    return hf_config.build(path, Qwen3MoeSpec, settings, problems)


def to_hf(spec: Qwen3MoeSpec) -> dict[str, Any]:
    """The `config.json` that transformers reads back into the same model."""
    content = {**qwen3.to_hf(spec), "architectures": ["Qwen3MoeForCausalLM"], "output_router_logits": False}
    content["mlp_only_layers"] = list(spec.mlp_only_layers)
    return {name: setting for name, setting in content.items() if name not in spec.of_files}
