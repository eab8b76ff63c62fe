"""The text part of Qwen3.5's mixtures of experts (35B-A3B; 3.6) as data: Qwen3.5 with experts. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from titan_mi100.shapes import experts, qwen3_5
from titan_mi100.shapes.base import EXPERTS, LayerShape
from titan_mi100.shapes.qwen3_5 import Qwen3_5Spec, every_fourth

LINEARS = (*qwen3_5.LINEARS[:-3], EXPERTS)  # without the MLP's


@dataclass(frozen=True)
class Qwen3_5MoeSpec(experts.MixtureSpec, Qwen3_5Spec):
    """The shape of a Qwen3.5 with experts.

    Attributes:
        intermediate_size: of the shared expert, through which every token goes besides.
    """

    model_type: ClassVar[str] = "qwen3_5_moe"
    of_files: ClassVar[Collection[str]] = (*Qwen3_5Spec.of_files, "experts_fused")
    architecture: ClassVar[str] = "Qwen3_5Moe"
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({"shared_expert_intermediate_size": "intermediate_size"})
    moe_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    experts_fused: bool = True

    def layer(self, kind: str) -> LayerShape:
        return experts.with_experts(self, super().layer(kind), kind, is_shared=True)


# Source: the config.json of each repository.
_35B = Qwen3_5MoeSpec(248_320, 2048, 512, 40, 16, 2, 16, 32, False, every_fourth(40))
PRESETS: Mapping[str, Qwen3_5MoeSpec] = dict.fromkeys(("qwen3.5-35B-A3B", "qwen3.6-35B-A3B"), _35B)


def read(path: Path, raw: Mapping[str, Any]) -> Qwen3_5Spec:
    """Reads a config.json, see qwen3_5.read."""
    return qwen3_5.read(path, raw, Qwen3_5MoeSpec)
