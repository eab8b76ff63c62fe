"""What an HF folder holds beside its weights: config, tokenizer and chat template, as they are. Imports no torch.

The same files lie in a checkpoint, so that it is a model by itself: a folder with weights in another form.
"""

import json
import os
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.model_spec import ModelSpec, read_hf_config, to_hf_config
from titan_mi100.plain_file import LARGEST_CONFIG, LARGEST_TABLE, read_plain

CONFIG, GENERATION = "config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", TEMPLATE),
)
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers since 5, and before

Assets = dict[str, bytes]  # file name -> content


def folder_of(path: str | Path) -> Path:
    """The folder of a model that is named by its folder, or by a file in it."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def read_assets(folder: Path) -> Assets:
    """Those of the files that are there.

    Raises:
        UserError: one is no regular file, or too large.
    """
    return read_files(folder, (CONFIG, GENERATION)) | tokenizer_files(folder)


def is_asset(name: str) -> bool:
    """Whether a folder's file of this name is one of them."""
    return name in (CONFIG, GENERATION) or is_tokenizer_file(name)


def is_tokenizer_file(name: str) -> bool:
    return name in _TOKENIZER or ("/" not in name and name.endswith((".tiktoken", ".model")))


def tokenizer_files(path: Path) -> Assets:
    """Those of a tokenizer that is named by its folder, or by one of the files that are not HF's."""
    if path.is_dir():
        own = [file.name for kind in ("*.tiktoken", "*.model") for file in sorted(path.glob(kind))]
        return read_files(path, (*_TOKENIZER, *own))
    return read_files(path.parent, (path.name, "tokenizer_config.json", TEMPLATE))


def read_files(folder: Path, names: tuple[str, ...]) -> Assets:
    found = {}
    for name in names:
        try:
            found[name] = read_plain(folder / name, LARGEST_TABLE)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read: {error.strerror}") from None
    return found


def run_assets(spec: ModelSpec, base: str, tokenizer: str, chat_template: str) -> Assets:
    """The files of the model that a run trains.

    Args:
        base: the folder or file that the run's weights come from; empty: none.
        tokenizer, chat_template: as the config names them.
    """
    assets = read_files(folder_of(base), (CONFIG, GENERATION)) if base else {}
    if CONFIG not in assets:
        assets[CONFIG] = _json(to_hf_config(spec))
    assets |= tokenizer_files(Path(tokenizer))
    if chat_template:
        assets[TEMPLATE] = read_plain(Path(os.path.realpath(chat_template)), LARGEST_CONFIG)
    return assets


def config_dtype(assets: Assets) -> str | None:
    """The dtype that config.json names, such as `bfloat16`."""
    config = _object(assets, CONFIG)
    return next((str(config[key]).removeprefix("torch.") for key in _DTYPE_KEYS if config.get(key)), None)


def export_assets(assets: Assets, spec: ModelSpec, dtype: str | None, ends: list[int]) -> Assets:
    """The files of an export: config.json with what is true of it, and a generation_config.json that ends turns.

    Args:
        dtype: of the exported weights; None: of several.
        ends: ids of tokens that end a text, that of a turn first; empty: unknown.
    """
    config = _object(assets, CONFIG) or to_hf_config(spec)
    config["architectures"] = to_hf_config(spec)["architectures"]
    if dtype is not None:
        known = [key for key in _DTYPE_KEYS if key in config]
        config |= dict.fromkeys(known or ["torch_dtype"], dtype)
    generation = _object(assets, GENERATION)
    named = generation.get("eos_token_id")
    stops = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(stop) is int for stop in stops):
        raise UserError(f"{GENERATION}: eos_token_id = {named!r} must be a token id or a list of such")
    if ends:
        if config.get("eos_token_id") is None:
            config["eos_token_id"] = ends[0]
        if ends[0] not in stops:
            generation["eos_token_id"] = [*ends, *(stop for stop in stops if stop not in ends)]
    made = {CONFIG: _json(config)}
    if generation:
        made[GENERATION] = _json(generation)
    return {name: content for name, content in assets.items() if name != GENERATION} | made


def spec_of(folder: Path, fingerprint: dict[str, Any] | None) -> ModelSpec | None:
    """The model's shape: by config.json, else by what a checkpoint's manifest says, if it does."""
    if (folder / CONFIG).exists():
        return read_hf_config(folder)
    return ModelSpec(**fingerprint) if fingerprint else None


def _object(assets: Assets, name: str) -> dict[str, Any]:
    try:
        value = json.loads(assets.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: cannot be read as JSON: {error}; mend it, or remove it") from None
    if not isinstance(value, dict):
        raise UserError(f"{name}: must hold one JSON object")
    return value


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
