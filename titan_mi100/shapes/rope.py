"""Scaling of the rotary embedding as data: for documents longer than those a model was first trained on. No torch.

Source: Peng et al., 2023 (YaRN); config.json is read as transformers reads it, and a test compares the tables.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from titan_mi100.files.schema import validated

LINEAR, DYNAMIC, YARN = "linear", "dynamic", "yarn"
_MOST = 256.0  # a larger factor makes of any model more positions than numbers have digits for


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary angles. The fields have the names of config.json.

    Attributes:
        rope_type: linear: all angles are divided by `factor`; yarn: those that turn slowly; dynamic: plain angles up to
            max_position_embeddings, beyond which a model would read them from the whole batch.
        original_max_position_embeddings: yarn: positions that were trained before; else 0.
        attention_factor: yarn: cosines and sines are multiplied by it; None: what its paper suggests for the factor.
        beta_fast, beta_slow: turns in the original positions above which an angle stays, and below which it is divided.
        truncate: whether the two borders are whole dimensions.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """The size of cosines and sines."""
        usual = _magnitude(self.factor) if self.rope_type == YARN else 1.0
        return usual if self.attention_factor is None else self.attention_factor

    @property
    def reach(self) -> int:
        """Positions that it makes possible; 0: as many as max_position_embeddings says."""
        return int(self.factor * self.original_max_position_embeddings)

    def ramp(self, dim: int, theta: float) -> tuple[float, float]:
        """Pairs of dimensions between which YaRN passes from plain angles to divided ones. Args: dim: that rotate."""
        lengths = (self.original_max_position_embeddings / (n * 2 * math.pi) for n in (self.beta_fast, self.beta_slow))
        low, high = ((dim * math.log(length)) / (2 * math.log(theta)) for length in lengths)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 * (low == high)

    def written(self) -> dict[str, Any]:
        """The keys of config.json that describe it, without defaults."""
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) != f.default}

    def problems(self, positions: int, theta: float) -> list[str]:
        """What is wrong with the values, one clause each. Args: positions: max_position_embeddings."""
        original, is_yarn = self.original_max_position_embeddings, self.rope_type == YARN
        betas = f"beta_fast = {self.beta_fast} and beta_slow = {self.beta_slow}"
        length = f"original_max_position_embeddings = {original} must be above 0 and at most max_position_embeddings"
        checks = {
            f"rope type {self.rope_type!r} is not known here": self.rope_type in TYPES,
            f"factor = {self.factor} must be from 1 to {_MOST:.0f}": 1 <= self.factor <= _MOST,
            f"attention_factor = {self.attention_factor} must be above 0; remove it": 0 < self.magnitude < _MOST,
            f"{betas} must fall, from 1e6 to 1e-6; remove both": 1e-6 <= self.beta_slow <= self.beta_fast <= 1e6,
            f"{length} = {positions}; it is the length before scaling": not is_yarn or 0 < original <= positions,
            f"rope_theta = {theta} must be above 1 for yarn": not is_yarn or theta > 1,
        }
        return [problem for problem, is_right in checks.items() if not is_right]


# type of scaling -> its keys in config.json
TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (), LINEAR: ("factor",), DYNAMIC: ("factor",),
    YARN: (*[field.name for field in fields(RopeScaling)][1:], "mscale", "mscale_all_dim"),
}  # fmt: skip


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_scaling(rope: Mapping[str, Any], kind: str, positions: int) -> RopeScaling | None:
    """The scaling that the rotary embedding's dict describes; None: there is none.

    Args:
        rope: of config.json, whose keys are known. kind: its type, one of TYPES. positions: max_position_embeddings.

    Raises:
        ValueError: a value is of the wrong type, or a key is missing.
    """
    if kind == "default":
        return None
    types = {field.name: field.type for field in fields(RopeScaling)}
    # null is as if a key were left out, except for truncate, where transformers takes it for false
    keys = [key for key in TYPES[kind] if rope.get(key) is not None or (key == "truncate" and key in rope)]
    read: dict[str, Any] = {key: validated(rope[key], types.get(key, float), key) for key in keys}
    if not {"factor", "original_max_position_embeddings"} & read.keys():
        raise ValueError("factor is missing: how many times longer documents may be")
    original = read.setdefault("original_max_position_embeddings", positions if kind == YARN else 0)
    factor = read.setdefault("factor", positions / max(original, 1))
    if all(scales := (read.pop("mscale", 0), read.pop("mscale_all_dim", 0))):
        read.setdefault("attention_factor", _magnitude(factor, scales[0]) / _magnitude(factor, scales[1]))
    return RopeScaling(kind, **read)
