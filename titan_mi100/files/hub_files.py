"""Decides which files of a repository of the Hugging Face hub a run needs: of a model, or of a split of a data set.

Decided by the names in the repository and the card's `configs` alone. Where programs guess, this refuses.
"""

import fnmatch
import glob
import os
import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.files.model import DRAFT_FILE
from titan_mi100.wording import shown, some

MODEL, SHAPE, TOKENIZER, ADAPTER = "model", "shape", "tokenizer", "adapter"  # what a model's repository is named for
TRAIN, VALIDATION = "train", "validation"  # what a data set is named for: its split where the name has none
CARD = "README.md"
_SPLITS = (TRAIN, VALIDATION, "test")
_CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps its own conversion of a data set
_TEXT = ("tokenizer*.json", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
_TOKENIZER = (*_TEXT, "*.jinja", "additional_chat_templates/*.jinja", "config.json")
_WITH_WEIGHTS = ("generation_config.json", "titan_mi100.json", "*processor_config.json", "model.safetensors.index.json")
_OF_KIND = {
    MODEL: (*_TOKENIZER, *_WITH_WEIGHTS),
    SHAPE: ("config.json",),
    TOKENIZER: _TOKENIZER,
    ADAPTER: (*_TOKENIZER, "adapter_config.json", DRAFT_FILE),
}
_READ = re.compile(r"\.(jsonl?|parquet)(\.gz|\.zst)?$")
_ABOUT = re.compile(  # files that hold no rows
    r"(^|/)((README|LICENSE|NOTICE|dataset_infos?|dataset_dict|config)\b[^/]*|[^/.]+)$"
    r"|\.(md|py|sh|ipynb|png|jpe?g|gif|svg|pdf|ya?ml|toml|cff|bib)$"
)
_common = os.path.commonprefix  # of characters, as is meant here
_GLOB = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class HubName(NamedTuple):
    """OWNER/NAME:CONFIG@REVISION[SPLIT]; "": not given."""

    repository: str
    config: str
    revision: str
    split: str


def parse_name(text: str) -> HubName | None:
    """The parts of a name on the hub; None: it is none."""
    part = r"[A-Za-z0-9][\w.-]*"
    match = re.fullmatch(
        rf"({part}/{part})(?::([\w.+-]+))?(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?(?:\[([\w.]+)\])?", text, re.ASCII
    )
    return HubName(*(group or "" for group in match.groups())) if match else None


def model_files(paths: Collection[str], kind: str, index: Callable[[], Mapping[str, Any]]) -> list[str]:
    """The files of a model, a tokenizer or an adapter.

    Args:
        paths: all files of the repository.
        index: reads the index of the shards; called if there is one.

    Raises:
        UserError: its weights are in no form that is read.
    """
    patterns = _OF_KIND[kind]
    files = [p for p in paths if any(fnmatch.fnmatchcase(p, g) and g.count("/") == p.count("/") for g in patterns)]
    weights = {MODEL: ["model.safetensors"], ADAPTER: ["adapter_model.safetensors"]}.get(kind, [])
    if kind == MODEL and "model.safetensors.index.json" in paths:
        weights = sorted({str(file) for file in index().get("weight_map", {}).values()})
    if missing := [file for file in weights if file not in paths]:
        others = sorted(path for path in paths if re.search(r"\.(bin|pth?|gguf|safetensors|h5|msgpack)$", path))
        problem = f"has no {some(missing, 2)}{f', only {some(others, 4)}' if others else ''}"
        raise UserError(f"{problem}; name a repository or a revision with safetensors; pickles are not fetched")
    return [*files, *weights]


def split_files(name: HubName, card: Any, paths: Collection[str], purpose: str) -> list[str]:
    """The files of one split of a data set.

    Args:
        card: what the card's metadata has as `configs`; None: nothing.
        paths: all files of the repository.
        purpose: TRAIN or VALIDATION, the split where the name has none.

    Raises:
        UserError: the card and the names do not say which files they are; a script makes the rows.
    """
    if (script := f"{name.repository.partition('/')[2]}.py") in paths:
        remedy = f"take the hub's own conversion: {name.repository}:CONFIG@{_CONVERTED}"
        raise UserError(f"makes its rows by a script, {script}, and scripts are not run; {remedy}")
    config = _config(name, card)
    folder = _inside(config.get("data_dir", "")) if config else ""
    if patterns := config.get("data_files"):
        splits = {split: _matching(own, folder, paths) for split, own in _patterns(patterns).items()}
    else:
        splits = _splits_by_name(name, folder, [path for path in paths if not _is_aside(path, "")], bool(config))
    split = name.split or purpose
    if split not in splits:
        example = f"{name.repository}[{next(iter(splits))}]"
        raise UserError(f"has no split {split!r}, but {', '.join(splits)}; write {example}")
    if unread := [path for path in splits[split] if not _READ.search(path)]:
        raise UserError(f"[{split}] is {some(unread, 4)}, which is neither JSON nor parquet; {by_hand(name)}")
    return splits[split]


def one_pattern(files: Sequence[str], paths: Collection[str]) -> list[str]:
    """A glob that matches these files of the repository and no others; the files themselves if there is none."""
    start = _common(files)
    end = _common([file[len(start) :][::-1] for file in files])[::-1]
    matched = [p for p in paths if p.startswith(start) and p.endswith(end) and "/" not in p[len(start) :]]
    is_exact = len(files) > 1 and sorted(files) == sorted(matched) and not glob.has_magic(start + end)
    is_exact &= not any(file[len(start) :].startswith(".") for file in files)  # the star matches no hidden file
    return [f"{start}*{end}"] if is_exact else [*files]


def by_hand(name: HubName) -> str:
    """The remedy where the card does not say which files to read."""
    return f"fetch it, hf download {name.repository} --repo-type dataset --local-dir FOLDER, and name files or globs"


def _config(name: HubName, card: Any) -> dict[str, Any]:
    """The entry of the card's `configs` that is named, or else the default one; {}: the card has none."""
    if not card:
        return {}
    entries = [part for part in card if isinstance(part, dict)] if isinstance(card, list) else []
    if len(entries) != len(card) or not all(isinstance(part.get("config_name"), str) for part in entries):
        raise UserError(f"has a card whose configs are no list of entries with a config_name; {by_hand(name)}")
    named = {config["config_name"]: config for config in entries}
    if name.config:
        chosen = [name.config] if name.config in named else []
    else:
        chosen = [key for key, config in named.items() if len(named) == 1 or key == "default" or config.get("default")]
    if len(chosen) != 1:
        problem = f"has no config {name.config!r}" if name.config else "has several configs"
        raise UserError(f"{problem}; name one of {some(named, 40)}, such as {name.repository}:{next(iter(named))}")
    return named[chosen[0]]


def _patterns(data_files: Any) -> dict[str, list[str]]:
    """The patterns of each split, as a card writes them: a text, a list of texts, or a list of splits and paths."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    if all(isinstance(part, str) for part in entries):
        return {TRAIN: entries}
    splits = dict[str, list[Any]]()
    for part in entries:
        split, path = (part.get("split"), part.get("path")) if isinstance(part, dict) else (None, None)
        own = path if isinstance(path, list) else [path]
        is_sound = bool(own) and all(isinstance(pattern, str) for pattern in own)
        if not isinstance(split, str) or split in splits or not is_sound:
            raise UserError(f"has a card whose data_files are not understood: {shown(part)}")
        splits[split] = own
    return splits


def _inside(path: str) -> str:
    """A path or a pattern of a card, as the repository writes it. Raises UserError: it leaves the repository."""
    if "://" in str(path) or str(path).startswith("/") or ".." in str(path).split("/"):
        raise UserError(f"has a card that names {shown(path)}, outside the repository; this is never fetched")
    return posixpath.normpath(str(path)) if path else ""


def _matching(patterns: Sequence[str], folder: str, paths: Collection[str]) -> list[str]:
    """The files that a card's patterns match, in their order."""
    files = list[str]()
    for pattern in (posixpath.join(folder, _inside(pattern)) for pattern in patterns):
        parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", pattern)
        regex = "".join(_GLOB.get(p) or (p.replace("[!", "[^") if p[:1] == "[" else re.escape(p)) for p in parts)
        try:
            matched = [path for path in sorted(paths) if re.fullmatch(regex, path) and not _is_aside(path, pattern)]
        except re.error:
            raise UserError(f"has a card that names {pattern!r}, which is no pattern") from None
        if not matched or re.search(r"[^/]\*\*|\*\*[^/]", pattern):
            there = some((path for path in sorted(paths) if not _is_aside(path, "")), 12)
            raise UserError(f"has a card that names {pattern!r}, which matches no file; it has {there}")
        files += [path for path in matched if path not in files]
    return files


def _is_aside(path: str, pattern: str) -> bool:
    """Whether a file is hidden, or is about the data, and the pattern does not ask for it."""
    if path == pattern:
        return False
    hidden = [sum(part.startswith((".", "__")) for part in text.split("/")) for text in (path, pattern)]
    return hidden[0] != hidden[1] or bool(_ABOUT.search(path))


def _splits_by_name(name: HubName, folder: str, paths: Sequence[str], has_config: bool) -> dict[str, list[str]]:
    """The splits of files that are called train, validation and test, with -NNNNN-of-NNNNN, or in a folder so called.

    Raises:
        UserError: a file has another name, a shard is missing, or a split is there in two forms.
    """
    tops = {path.partition("/")[0] for path in paths}
    if not has_config:  # a config without a card is a folder
        alone = {"data", "default"} if name.revision == _CONVERTED else {"data"}
        folder = name.config or (next(iter(tops)) if len(tops) == 1 and tops <= alone else "")
    own = [path for path in paths if not folder or path.startswith(f"{folder}/")]
    splits, forms, others = dict[str, list[str]](), dict[str, set[tuple[str, ...]]](), list[str]()
    pattern = rf"({'|'.join(_SPLITS)})(?:(/).+?|-(\d{{5}})-of-(\d{{5}}))?(\.[a-z]+(?:\.gz|\.zst)?)"
    for path in sorted(own):
        match = re.fullmatch(pattern, path.removeprefix(f"{folder}/") if folder else path)
        if match is None:
            others.append(path)
            continue
        splits.setdefault(match[1], []).append(path)
        forms.setdefault(match[1], set()).add((match[2] or "", match[4] or "", match[5]))
    for split, files in splits.items():
        [(is_folder, total, _), *other_forms] = forms[split]
        if other_forms or (not is_folder and len(files) != int(total or 1)):
            others += files
    if others or not splits:
        form = "with -NNNNN-of-NNNNN or in a folder, each complete"
        problem = f"has files that are not called {', '.join(_SPLITS)}, {form}"
        problem = f"has no config or folder {name.config!r}" if name.config and not own else problem
        raise UserError(f"{problem}: {some(others or sorted(paths), 12)}; {by_hand(name)}")
    return splits
