"""The families of models, and the shape of a model on disk. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object, refuse_code
from titan_mi100.files.schema import validated
from titan_mi100.shapes import qwen3, qwen3_5, qwen3_5_moe, qwen3_moe
from titan_mi100.shapes.base import EXPERTS, ModelSpec
from titan_mi100.shapes.hf_config import problems_of
from titan_mi100.wording import shown


class Family(NamedTuple):
    """A family of models.

    Attributes:
        spec: the class of its shapes.
        presets: published shapes by their short names (model.flavor).
        adapted: names of the linear layers that LoRA can adapt.
        not_adapted: names of others that people ask for -> why not.
        read: (path, content of config.json) -> the shape. Raises UserError for what the family does not compute.
        to_hf: the shape -> the `config.json` that transformers reads back into the same model.
    """

    spec: type[ModelSpec]
    presets: Mapping[str, ModelSpec]
    adapted: tuple[str, ...]
    read: Callable[[Path, Mapping[str, Any]], ModelSpec]
    to_hf: Callable[[Any], dict[str, Any]]
    not_adapted: Mapping[str, str] = MappingProxyType({})


_QWEN3_5 = Family(
    qwen3_5.Qwen3_5Spec, qwen3_5.PRESETS, qwen3_5.LINEARS, qwen3_5.read, qwen3_5.to_hf, qwen3_5.NOT_ADAPTED
)
_QWEN3_5_MOE = _QWEN3_5._replace(
    spec=qwen3_5_moe.Qwen3_5MoeSpec, presets=qwen3_5_moe.PRESETS, adapted=qwen3_5_moe.LINEARS, read=qwen3_5_moe.read
)
FAMILIES = {  # by HF's model_type; the class of its layers is in model/families.py
    "qwen3": Family(qwen3.Qwen3Spec, qwen3.PRESETS, qwen3.LINEARS, qwen3.read, qwen3.to_hf),
    "qwen3_moe": Family(qwen3_moe.Qwen3MoeSpec, qwen3_moe.PRESETS, qwen3_moe.LINEARS, qwen3_moe.read, qwen3_moe.to_hf),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
PRESETS = {name: spec for family in FAMILIES.values() for name, spec in family.presets.items()}
ADAPTED = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.adapted))
LINEARS = tuple(name for name in ADAPTED if name != EXPERTS)  # experts have adapters on request only: they are large
_FIRST = "qwen3"  # fingerprints of its models are without model_type, as there was no other family


def read_hf_config(folder: str | Path) -> ModelSpec:
    """Read the model's shape from `folder/config.json`.

    Raises:
        UserError: no such file, a model of another family, one with its own code, or a key that its family refuses.
    """
    path = Path(folder) / "config.json"
    raw = read_object(path, "download the model, or name its folder; for weights in another format set model.flavor")
    refuse_code(path, raw)
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        only = ", ".join(map(repr, FAMILIES))
        raise UserError(f"{path}: model_type = {shown(raw.get('model_type'))}; only {only} are supported")
    return family.read(path, raw)


def own_name(name: str) -> str:
    """ModelSpec.own_name, whatever the family."""
    for family in FAMILIES.values():
        name = family.spec.own_name(name)
    return name


def known_fields() -> list[str]:
    """The keys of all families' fingerprints."""
    names = (field.name for family in FAMILIES.values() for field in fields(family.spec))
    return list(dict.fromkeys(names))


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` that transformers reads back into the same model."""
    return FAMILIES[spec.model_type].to_hf(spec)


def fingerprint(spec: ModelSpec) -> dict[str, Any]:
    """The shape as JSON, for a checkpoint's manifest."""
    as_json = {name: list(x) if isinstance(x, tuple) else x for name, x in spec.as_dict().items()}
    return ({} if spec.model_type == _FIRST else {"model_type": spec.model_type}) | as_json


def of_fingerprint(saved: Mapping[str, Any]) -> ModelSpec:
    """The shape that `fingerprint` has stored. Raises ValueError: not a stored shape."""
    model_type = saved.get("model_type", _FIRST)
    if model_type not in FAMILIES:
        raise ValueError(f"fingerprints.model: model_type = {shown(model_type)} is not known here")
    rest = {name: field for name, field in saved.items() if name != "model_type"}
    spec: ModelSpec = validated(rest, FAMILIES[model_type].spec, "fingerprints.model")
    if problems := problems_of(spec):
        raise ValueError(f"fingerprints.model: {problems[0]}")
    return spec
