"""Opens a model by its path: an HF folder, a DCP folder (such as a run's checkpoint) or a file of torch.save."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import Any

from titan_mi100.checkpoint import sealed
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.errors import UserError
from titan_mi100.files.model import DCP, TORCH, weights_format
from titan_mi100.files.patterns import nearby
from titan_mi100.files.plain import parse_object
from titan_mi100.files.stored import open_hf
from titan_mi100.log import log
from titan_mi100.model.lora import base_fingerprint
from titan_mi100.shapes.base import DRAFT, ModelSpec, differences, draft_shapes, parameter_shapes, stored_shapes
from titan_mi100.shapes.families import of_fingerprint, read_hf_config
from titan_mi100.text import assets as asset_files
from titan_mi100.text.assets import Assets
from titan_mi100.weights.base import StoredWeights, Weights
from titan_mi100.weights.dcp import DCPWeights, read_torch_weights
from titan_mi100.weights.draft_head import WithDraftHead
from titan_mi100.weights.pieces import joined

_HEAD_ALONE = "draft_head"  # key of the manifest of a checkpoint that holds one alone


def open_weights(path: str | Path, only_weights: bool = True) -> Weights:
    """Open weights in any of the formats. Only headers and metadata are read, no values.

    Args:
        path: folder or file.
        only_weights: leave out the optimizer state and per-rank state of a run's checkpoint.

    Raises:
        UserError: there are no weights, or they cannot be read safely; or of an HF folder the index names other tensors
            than the shards hold.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder or file{nearby(str(path))}")
    kind = weights_format(path)
    if kind == DCP:
        manifest = read_manifest(path)
        is_head_alone = only_weights and _HEAD_ALONE in manifest
        return open_source(path).weights if is_head_alone else DCPWeights(path, only_weights, manifest.get("files"))
    return read_torch_weights(path) if kind == TORCH else StoredWeights(path, open_hf(path))


def read_manifest(path: Path, read: Callable[[Path], dict[str, Any]] = sealed.read_manifest) -> dict[str, Any]:
    """The manifest of a DCP folder; empty if there is none, because another program wrote the folder.

    Args:
        read: sealed.read_manifest, or sealed.verify, which also compares the folder's files with it.

    Raises:
        UserError: the checkpoint is damaged.
    """
    if not all(lexists(path / name) for name in (".metadata", sealed.MANIFEST)):
        return {}
    try:
        return read(path)
    except (sealed.DamagedError, OSError) as error:
        raise UserError(f"damaged checkpoint: {error}; use another one") from None


def verify_files(path: Path, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a DCP folder with its manifest. A folder without a manifest only causes a warning.

    Args:
        share, shares: see sealed.verify.

    Raises:
        UserError: a file has changed since it was written.
    """
    manifest = read_manifest(path, partial(sealed.verify, share=share, shares=shares))
    if base := manifest.get(_HEAD_ALONE, {}).get("base"):
        verify_files(Path(base), share, shares)
    if not manifest and lexists(path / ".metadata"):
        log.warning(f"{path}: has no {sealed.MANIFEST}, so its files cannot be checked for damage")


def warn_of_missing_draft(where: Path, assets: Assets, names: Iterable[str]) -> None:
    """Warn of a draft head that config.json promises, and the weights do not have. Args: where: for the message."""
    config = parse_object(assets.get(asset_files.CONFIG, b"{}"), asset_files.CONFIG, "")
    count = asset_files.text_part(config).get(asset_files.DRAFT_LAYERS)
    if count and not any(name.startswith(DRAFT) for name in names):
        message = f"config.json has mtp_num_hidden_layers = {count}, but the weights have no draft head (mtp.*)"
        log.warning(f"{where}: {message}; a server must be started without it, or set the key to 0")


@dataclass(frozen=True)
class ModelSource:
    """An opened model. Build it with `open_source`.

    Attributes:
        path: what the user named.
        weights: exactly the model's tensors, in its order.
        assets_folder: folder of config.json and tokenizer files.
        assets: their contents.
        spec: the model's shape; None: unknown, because there is no config.json and no manifest.
        manifest: the manifest of a sealed DCP folder; empty if there is none.
        lora: settings of a LoRA run's checkpoint, which holds the adapter only; None: it is a whole model.
    """

    path: Path
    weights: Weights
    assets_folder: Path
    assets: Assets
    spec: ModelSpec | None
    manifest: dict[str, Any] = field(repr=False)
    lora: LoRAConfig | None


def open_source(path: str | Path, assets_folder: str | Path = "", with_draft_head: bool = False) -> ModelSource:
    """Open a model, and compare its tensors with its config.json or manifest.

    Args:
        path: HF folder, DCP folder, or file of torch.save.
        assets_folder: folder of config.json and tokenizer files, if not the model's own.
        with_draft_head: a draft head is a part of the model, as in the checkpoints of a run that trains it.

    Raises:
        UserError: there is no model, a file cannot be read, or the tensors do not fit the config.
    """
    path = Path(path)
    if assets_folder and not Path(assets_folder).is_dir():
        raise UserError(f"{assets_folder}: is not a folder; name one with config.json and tokenizer files")
    manifest = read_manifest(path)
    if _HEAD_ALONE in manifest:
        return _with_base(path, manifest, assets_folder)
    folder = Path(assets_folder) if assets_folder else asset_files.folder_of(path)
    has_config = path.exists() and lexists(folder / asset_files.CONFIG)
    spec = read_hf_config(folder) if has_config else None  # first: it says if the weights are quantized
    weights = open_weights(path)
    if not weights.kinds:
        raise UserError(f"{path}: has no weights")
    trained = manifest.get("fingerprints", {}).get("model")
    saved = _shape_of(path, trained) if trained else None
    # config.json may have been copied from another model, so it must agree with what the run recorded.
    spec = spec or saved
    if spec is not None and saved is not None and (differing := differences(spec, saved)):
        raise UserError(
            f"{folder / asset_files.CONFIG}: does not describe the model that was trained ({folder}, {path}: "
            f"{'; '.join(differing)})"
        )
    adapter, lora = manifest.get("lora"), None
    if adapter:
        targets = tuple(adapter["target_modules"])
        own = {key: adapter[key] for key in ("expert_rank", "expert_alpha", "scaling") if key in adapter}
        own["token_ids"] = tuple(adapter.get("token_ids", ()))
        lora = LoRAConfig(adapter["rank"], adapter["alpha"], adapter["dropout"], targets, **own)
    if spec is not None:
        drafts = with_draft_head and spec.draft_layer and any(name.startswith(DRAFT) for name in weights.kinds)
        spec = spec.with_draft_head(bool(drafts) or (saved is not None and saved.has_draft_head))
        spec = spec.as_stored(weights.kinds, trained or {})
        weights = joined(weights, spec)
        shapes = lora.shapes(spec) | draft_shapes(spec) if lora else stored_shapes(spec, weights.kinds)
        weights.check(shapes)
        weights.kinds = {name: weights.kinds[name] for name in shapes}  # drops a tied head and old buffers
    # Files beside a single file of torch.save belong to the model only if one of them is a config.json.
    of_model = path.is_dir() or bool(assets_folder) or has_config
    assets = asset_files.read_assets(folder) if of_model else {}
    return ModelSource(path, weights, folder, assets, spec, manifest, lora)


def _shape_of(path: Path, fingerprint: Mapping[str, Any]) -> ModelSpec:
    """The shape that a manifest has. Raises UserError: it is none."""
    try:
        return of_fingerprint(fingerprint)
    except ValueError as error:
        raise UserError(f"{path / sealed.MANIFEST}: {error}; use another checkpoint") from None


def _with_base(path: Path, manifest: dict[str, Any], assets_folder: str | Path) -> ModelSource:
    """The model of a checkpoint that holds a draft head alone: its base, but for the head. Raises UserError: the base
    is not there, or another one by now.
    """
    named, trained = manifest[_HEAD_ALONE]["base"], manifest.get("fingerprints", {})
    if not lexists(named):
        raise UserError(f"{path}: holds the draft head of {named}, which is not there; put it back")
    base = open_source(named, assets_folder)
    base, spec = base if base.spec else open_source(named, path), _shape_of(path, trained.get("model", {}))
    head = DCPWeights(path, files=manifest.get("files"))
    head.check(draft_shapes(spec))
    if trained.get("base") != base_fingerprint(base.weights.read, parameter_shapes(spec.with_draft_head(False))):
        raise UserError(f"{path}: its draft head was not trained on the weights in {named}; put back those")
    return replace(with_head(base, head), path=path, spec=spec)


def with_head(base: ModelSource, head: Weights) -> ModelSource:
    """A model with another draft head, in the form and the dtypes of its own. Args: head: by our names."""
    assert base.spec is not None
    spec = base.spec.with_draft_head().as_stored(base.weights.kinds, base.spec.as_dict())
    return replace(base, weights=WithDraftHead(base.weights, head, spec), spec=spec)
