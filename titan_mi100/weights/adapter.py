"""Merges a LoRA adapter (a PEFT folder or a run's checkpoint) into its base while the weights are read."""

from dataclasses import replace
from os.path import lexists
from pathlib import Path

import torch
from torch import Tensor

from titan_mi100.config.hub import cached_model, is_hub_name
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.model.lora import base_fingerprint
from titan_mi100.shapes.base import DRAFT, EXPERTS, ROWS, ModelSpec, draft_shapes, parameter_shapes
from titan_mi100.text.assets import (
    PROMPTS,
    Assets,
    ending_turns,
    eos_token,
    prompt_settings,
    prompting_by_default,
    read_assets,
)
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.base import Box, Weights, box
from titan_mi100.weights.draft_head import open_head
from titan_mi100.weights.source import ModelSource, open_source, verify_files, with_head


def merged_source(base: ModelSource, adapter: str | Path) -> ModelSource:
    """A model whose weights are W + scale B A, with the adapter's rows of tokens.

    Args:
        base: the model that the adapter was trained on.
        adapter: a PEFT folder, or a checkpoint of a LoRA run.

    Raises:
        UserError: one of them cannot be read, or the adapter belongs to another model.
    """
    if base.spec is None:
        raise UserError(f"{base.path}: has no config.json; name the base's HF folder")
    if base.lora is not None:
        raise UserError(f"{base.path}: is an adapter; name its base model here, and this folder as the adapter")
    lora, matrices, trained, head = _open_adapter(Path(adapter), base, base.spec)
    matrices.check(lora.shapes(trained) | (draft_shapes(trained.with_draft_head()) if head is matrices else {}))
    if beyond := [token for token in lora.token_ids if token >= base.spec.vocab_size]:
        raise UserError(f"{adapter}: trains row {beyond[0]}, but {base.path} has {base.spec.vocab_size}; name its base")
    base = replace(base, assets=_assets_as_trained(base, Path(adapter)), spec=trained)
    base = with_head(base, head) if head is not None else base
    return replace(base, weights=MergedWeights(base.weights, matrices, lora))


def _assets_as_trained(base: ModelSource, adapter: Path) -> Assets:
    """The base's files with what the adapter's run has learned: how to prompt, and which token ends a turn."""
    assets, trained = base.assets, read_assets(adapter)
    if PROMPTS in trained:
        assets = assets | {PROMPTS: trained[PROMPTS]}
        assets = prompting_by_default(assets, prompt_settings(trained, adapter).variables)
    token, before = eos_token(trained), eos_token(assets)
    if token == before or not (token and before):
        return assets
    end = load_tokenizer(base.assets_folder).id_of(token)
    return ending_turns(assets, token, end) if end >= 0 else assets


def _open_adapter(
    path: Path, base: ModelSource, spec: ModelSpec
) -> tuple[LoRAConfig, Weights, ModelSpec, Weights | None]:
    """An adapter's settings and matrices, the base's shape with the rope scaling that a run has added, and the draft
    head that was trained with it.

    A run's checkpoint stores a fingerprint of its base, so it is refused on other weights. A PEFT folder names its base
    only, so there is only a warning.
    """
    if lexists(path / peft_io.CONFIG):
        named, cached = peft_io.base_of(path), cached_model(base.path)[0]
        is_other = cached not in ("", named) and is_hub_name(named)
        if not base.path.samefile(named) if named and Path(named).is_dir() else is_other:
            log.warning(f"{path}: was trained on {named}, but is merged into {base.path}")
        return *peft_io.read_adapter(path), spec, open_head(path, spec)
    source = open_source(path)
    if source.lora is None:
        raise UserError(f"{path}: is neither a PEFT folder ({peft_io.CONFIG}) nor a checkpoint of a LoRA run")
    verify_files(path)
    named, trained_on = source.manifest["lora"]["base"], source.manifest["fingerprints"]["base"]
    # named is empty if the run started from random weights; then there is nothing to compare with
    if named and trained_on != base_fingerprint(base.weights.read, parameter_shapes(spec.with_draft_head(False))):
        raise UserError(f"{path}: was not trained on the weights in {base.path}; name its base ({named})")
    if source.spec is not None and source.spec.rope_scaling:
        own = {name: getattr(source.spec, name) for name in ("rope_scaling", "max_position_embeddings")}
        spec = replace(spec, **own)  # type: ignore[type-var]
    has_head = spec.draft_layer is not None and any(name.startswith(DRAFT) for name in source.weights.kinds)
    return source.lora, source.weights, spec, source.weights if has_head else None


class MergedWeights(Weights):
    """W + scale B A in fp32 for matrices that have an adapter, tables with their trained rows; the base's own tensor
    otherwise.

    Attributes:
        base, adapter, lora: the base's tensors, the adapter's, and its settings.
    """

    def __init__(self, base: Weights, adapter: Weights, lora: LoRAConfig) -> None:
        self.source, self.kinds = base.source, base.kinds
        self.base, self.adapter, self.lora = base, adapter, lora

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        # Only the requested part is merged, so a rank that reads its shard never holds a whole matrix of the base.
        part = self.base.read(name, shape, offset, size, exactly and name.startswith(DRAFT))
        if (rows_name := name.removesuffix(".weight") + ROWS) in self.adapter.kinds:
            trained, part = self.adapter.tensor(rows_name), part.float()
            for token, row in zip(self.lora.token_ids, trained, strict=True):
                if offset[0] <= token < offset[0] + size[0]:
                    part[token - offset[0]] = row[offset[1] : offset[1] + size[1]]
            return part
        a, b = (f"{name.removesuffix('weight')}lora_{matrix}.weight" for matrix in "AB")
        if b not in self.adapter.kinds:
            return part
        (rows, columns), is_expert = box(offset, size), f".{EXPERTS}." in name
        scale = (self.lora.of_experts if is_expert else self.lora).scale
        if is_expert:
            return part.float() + scale * self._of_experts(a, b, shape, rows, columns)
        # Only the part's rows of B (out, rank) and columns of A (rank, in) are multiplied.
        product = self.adapter.tensor(b)[rows].float() @ self.adapter.tensor(a)[:, columns].float()
        return part.float() + scale * product

    def _of_experts(self, a: str, b: str, shape: torch.Size, rows: slice, columns: slice) -> Tensor:
        """B A of the experts in these rows, as the base has it: of gate and up transposed."""
        first, second = self.adapter.tensor(a.replace(".up_proj.", ".gate_proj.")), self.adapter.tensor(b)
        by_row, by_column = (second, first) if ".down_proj." in a else (first, second)
        each = by_row.shape[1]  # rows of an expert
        start, end, rank = rows.start // each, -(-rows.stop // each), len(first) * each // shape[0]
        left, right = (x[start * rank : end * rank].float().unflatten(0, (-1, rank)) for x in (by_row, by_column))
        product = torch.bmm(left.mT, right[:, :, columns]).flatten(0, 1)
        return product[rows.start - start * each : rows.stop - start * each]
