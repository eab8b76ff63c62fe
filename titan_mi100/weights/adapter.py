"""A LoRA adapter on its base: found in a PEFT folder or a run's checkpoint, and merged as the weights are read."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from titan_mi100.config.model_spec import adapter_shapes, parameter_shapes
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.errors import UserError
from titan_mi100.logging import log
from titan_mi100.model.lora import base_fingerprint
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.base import Weights
from titan_mi100.weights.source import ModelSource, open_source, verify_files


def lora_of(source: ModelSource) -> LoRAConfig | None:
    """The settings of a LoRA run's checkpoint, which holds the adapter only; None: it is a whole model."""
    if source.manifest is None or "lora" not in source.manifest:
        return None
    saved = source.manifest["lora"]
    return LoRAConfig(saved["rank"], saved["alpha"], saved["dropout"], tuple(saved["target_modules"]))


def adapter_tensors(source: ModelSource, lora: LoRAConfig) -> dict[str, Tensor]:
    """The matrices of a LoRA run's checkpoint, by name.

    Raises:
        UserError: it is damaged, or they are not those of its settings.
    """
    assert source.spec is not None, "a run's checkpoint says its model's shape"
    verify_files(source.path)
    source.weights.check(adapter_shapes(source.spec, lora.rank, lora.target_modules))
    return {name: source.weights.tensor(name) for name in source.weights.kinds}


def merged(base: ModelSource, adapter: str | Path) -> ModelSource:
    """The base with an adapter's products added.

    Args:
        adapter: a PEFT folder, or a checkpoint of a LoRA run.

    Raises:
        UserError: one of them cannot be read, or the adapter is another model's.
    """
    if base.spec is None:
        raise UserError(f"{base.path}: has no config.json; name the base's HF folder")
    if lora_of(base) is not None:
        raise UserError(f"{base.path}: is an adapter; name the base that it was trained on, and this as the adapter")
    names = base.names()
    if (Path(adapter) / peft_io.CONFIG).exists():
        lora, tensors = peft_io.read_adapter(adapter)
        named = peft_io.base_of(adapter)
        if named and Path(named).is_dir() and not base.path.samefile(named):
            log.warning(f"{adapter}: was trained on {named}, and is merged into {base.path}")
    else:
        source = open_source(adapter)
        found = lora_of(source)
        if found is None:
            raise UserError(f"{adapter}: is neither a PEFT folder ({peft_io.CONFIG}) nor a checkpoint of a LoRA run")
        lora, tensors = found, adapter_tensors(source, found)
        assert source.manifest is not None
        trained_on = source.manifest["fingerprints"]["base"]
        if source.manifest["lora"]["base"] and trained_on != base_fingerprint(
            base.weights.read, parameter_shapes(base.spec)
        ):
            raise UserError(
                f"{adapter}: was trained on other weights than those in {base.path}; name the base that it was trained "
                f"on ({source.manifest['lora']['base']})"
            )
    shapes = adapter_shapes(base.spec, lora.rank, lora.target_modules)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes.get(name):
            raise UserError(
                f"{adapter}: {name} has shape {tuple(tensor.shape)}, {base.path} wants {shapes.get(name)}; it is of "
                "another model"
            )
    weights = MergedWeights(base.weights, names, tensors, lora.alpha / lora.rank)
    return replace(base, weights=weights)


class MergedWeights(Weights):
    """W + scale * B A, in fp32, where there is an adapter; the base's own elsewhere."""

    def __init__(self, base: Weights, names: list[str], adapter: Mapping[str, Tensor], scale: float) -> None:
        self.source, self._base, self._adapter, self._scale = base.source, base, adapter, scale
        self.kinds = {name: base.kinds[name] for name in names}

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        part = self._base.read(name, shape, offset, size)
        stem = name.removesuffix("weight")
        if (a := self._adapter.get(f"{stem}lora_A.weight")) is None:
            return part
        b = self._adapter[f"{stem}lora_B.weight"]
        rows, columns = (slice(start, start + length) for start, length in zip(offset, size, strict=True))
        return part.float() + self._scale * (b[rows].float() @ a[:, columns].float())
