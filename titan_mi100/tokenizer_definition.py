"""What a tokenizer's files say: an HF folder, read and checked whole, or refused with the reason.

HF's BPE merges listed pairs, tiktoken any neighbours that spell a token: `find_inexact_merge` tells where that differs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.errors import UserError
from titan_mi100.plain_file import read_plain, refuse_code

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Only patterns whose pieces were compared, code point by code point, between tiktoken's regex engine (fancy-regex) and
# that of `tokenizers` (Oniguruma) are accepted.
_PATTERNS = (QWEN2_PATTERN, GPT2_PATTERN)
QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")

_BYTES = 256


@dataclass(frozen=True)
class AddedToken:
    """A token that is cut out of the text before BPE; `normalized` ones are looked for after the normaliser."""

    id: int
    content: str
    normalized: bool
    special: bool


@dataclass(frozen=True)
class BpeDefinition:
    """All that decides the ids of a text: tiktoken gets them exactly right from these fields."""

    file: Path
    tokens: list[bytes]  # the 256 single bytes first, then in the order in which BPE prefers them
    ids: np.ndarray  # (tokens,) integers
    added: list[AddedToken]
    pattern: str
    nfc: bool
    eos_token: str
    pad_token: str | None


def read_hf_folder(folder: Path) -> BpeDefinition:
    """Read `tokenizer.json`, or `vocab.json` with `merges.txt`, and the special tokens of `tokenizer_config.json`.

    Args:
        folder: as `save_pretrained` or a download of a Qwen3 checkpoint leaves it.

    Returns:
        The tokenizer by which tiktoken gives the ids of the `tokenizers` library on any text.

    Raises:
        UserError: a file is missing or malformed, or says something that tiktoken cannot reproduce exactly.
    """
    config_file, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config = read_config(config_file)
    if file.is_file():
        with laid_out(file):
            merged = _from_tokenizer_json(file, read_json(file))
    else:
        file = folder / "vocab.json"
        with laid_out(file):
            merged = _from_vocab_and_merges(folder, config, config_file)
    with laid_out(file):
        tokens, ids = _check_vocabulary(merged)
    eos_token, pad_token = end_and_padding(config_file, config)
    if eos_token is None:
        raise UserError(f"{config_file}: eos_token is missing; name the token that ends a turn, such as <|im_end|>")
    return BpeDefinition(file, tokens, ids, merged.added, merged.pattern, merged.nfc, eos_token, pad_token)


def end_and_padding(file: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """`eos_token` and `pad_token` of a `tokenizer_config.json`, where it has them."""
    names = []
    for key in ("eos_token", "pad_token"):
        token = config.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and not isinstance(name, str):
            raise UserError(f"{file}: {key} is {token!r}, not the name of a token; write it as a string")
        names.append(name)
    return names[0], names[1]


def added_tokens(file: Path, config: dict[str, Any]) -> list[AddedToken]:
    """`added_tokens_decoder` of a `tokenizer_config.json`, by id; empty where it has none."""
    with laid_out(file):
        tokens = [_added_token(file, int(key), token) for key, token in config.get("added_tokens_decoder", {}).items()]
        return sorted(tokens, key=lambda token: token.id)


def read_bytes(file: Path) -> bytes:
    """A file's content, or a `UserError`."""
    try:
        return read_plain(file)
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; copy the checkpoint's tokenizer files to that folder") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error}); download it again") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or a `UserError`."""
    try:
        data = json.loads(_read_text(file))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds a {type(data).__name__} instead of an object; download it again")
    return data


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in a `tokenizer_config.json` that asks for no code of its own, or a `UserError`."""
    config = read_json(file)
    refuse_code(file, config)
    return config


@contextmanager
def laid_out(file: Path) -> Iterator[None]:
    """Turn what goes wrong in reading a file's values, because they are not what they should be, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not laid out as a tokenizer file ({error!r}); download it again") from error


@dataclass(frozen=True)
class _Merged:
    """What an HF folder says; everything outside of these fields has been checked to be absent."""

    file: Path
    vocab: dict[str, int]
    merges: list[list[str]]
    added: list[AddedToken]
    pattern: str
    nfc: bool


def _from_tokenizer_json(file: Path, data: dict[str, Any]) -> _Merged:
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refusal(file, f"model.type is {model['type']!r}, not BPE")
    # `ignore_merges` may be set: it turns a piece that is a token into that token at once, and every token that passes
    # `_check_vocabulary` is what BPE makes of its bytes anyway.
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _refusal(file, f"model.{key} is {model[key]!r}")
    for processor in _flatten(data.get("post_processor"), "processors"):
        pieces = processor.get("single", []) if processor["type"] == "TemplateProcessing" else []
        if processor["type"] not in ("ByteLevel", "TemplateProcessing") or any("Sequence" not in p for p in pieces):
            raise _refusal(file, f"the post_processor {processor['type']} adds tokens to every text")
    if (data.get("decoder") or {"type": "ByteLevel"})["type"] != "ByteLevel":
        raise _refusal(file, f"the decoder is {data['decoder']['type']}, not ByteLevel")
    # Truncation and padding, which a training script may have left in the file, are properties of a batch, not of ids.
    added = [_added_token(file, token["id"], token) for token in data.get("added_tokens", [])]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    _check_merges_are_pairs(file, merges)
    _check_added(file, model["vocab"], added, bool(model.get("ignore_merges")))
    normalizers = _flatten(data.get("normalizer"), "normalizers")
    unknown = [step["type"] for step in normalizers if step["type"] != "NFC"]
    if unknown:
        raise _refusal(file, f"the normalizer has {unknown[0]}, not only NFC")
    pattern = _pre_tokenizer_pattern(file, data.get("pre_tokenizer"))
    return _Merged(file, model["vocab"], merges, added, pattern, bool(normalizers))


def _from_vocab_and_merges(folder: Path, config: dict[str, Any], config_file: Path) -> _Merged:
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    for file in (vocab_file, merges_file):
        if not file.is_file():
            raise UserError(
                f"{folder}: neither tokenizer.json nor {file.name} is there; copy the checkpoint's tokenizer files"
            )
    name = config.get("tokenizer_class")
    if name not in QWEN2_CLASSES:
        # These two files do not say how to split and normalise a text; the class does, and this one is known.
        raise _refusal(config_file, f"without tokenizer.json, tokenizer_class {name!r} (not Qwen2Tokenizer) is unknown")
    if config.get("add_prefix_space"):
        raise _refusal(config_file, "add_prefix_space is set")
    vocab = read_json(vocab_file)
    lines = _read_text(merges_file).rstrip("\n").split("\n")
    merges = [line.rstrip("\r").split(" ") for line in lines if not line.startswith("#version")]
    _check_merges_are_pairs(merges_file, merges)
    added = added_tokens(config_file, config)
    _check_added(config_file, vocab, added, ignore_merges=False)
    return _Merged(vocab_file, vocab, merges, added, QWEN2_PATTERN, nfc=True)


def _pre_tokenizer_pattern(file: Path, pre_tokenizer: dict[str, Any] | None) -> str:
    steps = _flatten(pre_tokenizer, "pretokenizers")
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or kinds[:-1] not in ([], ["Split"]):
        raise _refusal(file, f"the pre_tokenizer is {kinds}, not a Split and ByteLevel")
    byte_level = steps[-1]
    if byte_level["add_prefix_space"]:
        raise _refusal(file, "the pre_tokenizer has add_prefix_space")
    if byte_level.get("use_regex", True) != (len(kinds) == 1):
        raise _refusal(file, "the pre_tokenizer splits twice or not at all (use_regex)")
    if len(kinds) == 1:
        return GPT2_PATTERN
    split = steps[0]
    if split["behavior"] != "Isolated" or split["invert"]:
        raise _refusal(file, f"the pre_tokenizer's Split has behavior {split['behavior']}, invert {split['invert']}")
    pattern = split["pattern"].get("Regex")
    if pattern not in _PATTERNS:
        raise _refusal(file, f"the pre_tokenizer's pattern {split['pattern']} is neither Qwen2's nor GPT-2's")
    return pattern


def _added_token(file: Path, token_id: int, token: dict[str, Any]) -> AddedToken:
    content, special = token["content"], bool(token.get("special", False))
    if not isinstance(content, str):
        raise TypeError(f"the added token {token_id} is {content!r}")
    for flag in ("lstrip", "rstrip", "single_word"):
        if token.get(flag):
            raise UserError(
                f"{file}: the added token {content!r} has {flag}, which is not supported; use the tokenizer files "
                f"of a Qwen3 checkpoint"
            )
    return AddedToken(token_id, content, bool(token.get("normalized", not special)), special)  # HF's own defaults


def _check_merges_are_pairs(file: Path, merges: list[list[str]]) -> None:
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise UserError(f"{file}: merge {number} is {' '.join(merge)!r}, not two tokens; download the file again")


def _check_added(file: Path, vocab: dict[str, int], added: list[AddedToken], ignore_merges: bool) -> None:
    """`tokenizers` does not read an added token's id, it counts: refuse a file in which the two differ."""
    taken: dict[str, int] = {}
    for token in added:
        counted = vocab.get(token.content, max([len(vocab), *(known + 1 for known in taken.values())]))
        if not token.content or token.content in taken or token.id != counted:
            raise _refusal(
                file,
                f"the added token {token.content!r} has id {token.id}, empty, listed twice or not the next ({counted})",
            )
        if ignore_merges and token.content in vocab and token.normalized:
            raise _refusal(file, f"with ignore_merges, the added token {token.content!r} is also in the vocabulary")
        taken[token.content] = token.id


def _check_vocabulary(definition: _Merged) -> tuple[list[bytes], np.ndarray]:
    """Bytes and ids of all tokens that BPE can make, bytes first and then in merge order; refuse what is not exact."""
    file, vocab = definition.file, definition.vocab
    tokens = [bytes([byte]) for byte in range(_BYTES)]
    rank = {char: byte for byte, char in enumerate(_byte_characters())}
    left: list[int] = []
    right: list[int] = []
    for number, (first, second) in enumerate(definition.merges):
        product = first + second
        if first not in rank or second not in rank:
            raise _refusal(file, f"merge {number} joins {first!r} and {second!r} before both are made")
        if product in rank:
            raise _refusal(file, f"merge {number} makes {product!r} a second time")
        left.append(rank[first])
        right.append(rank[second])
        rank[product] = len(tokens)
        tokens.append(tokens[left[-1]] + tokens[right[-1]])

    missing = [token for token in rank if token not in vocab]
    if missing:
        kind = "byte-level: it has no byte" if rank[missing[0]] < _BYTES else "complete: it has no merged token"
        raise _refusal(file, f"the vocabulary is not {kind} {missing[0]!r} ({len(missing)} missing)")
    if len(vocab) > len(rank):
        # Added tokens may be listed, as GPT-2's is: no text reaches them through BPE, and tiktoken does not get them.
        unmade = vocab.keys() - rank.keys() - {token.content for token in definition.added}
        if unmade:
            raise _refusal(file, f"no merge makes {min(unmade)!r} of the vocabulary ({len(unmade)} such tokens)")
    ids = np.array([vocab[token] for token in rank])
    if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 2**31 or len(set(vocab.values())) != len(vocab):
        raise _refusal(file, "the vocabulary's ids are not distinct integers of 0 to 2^31 - 1")
    falling = np.flatnonzero(np.diff(ids[_BYTES:]) <= 0)
    if falling.size:
        raise _refusal(file, f"merge {falling[0] + 1} makes a token with a lower id than the merge before it")
    inexact = find_inexact_merge(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64))
    if inexact is not None:
        first, second = definition.merges[inexact]
        raise _refusal(file, f"merge {inexact} joins {first!r} and {second!r}; BPE makes {first + second!r} otherwise")
    return tokens, ids


def find_inexact_merge(left: np.ndarray, right: np.ndarray) -> int | None:
    """Find a merge for which tiktoken and HF's BPE can disagree.

    HF merges listed pairs only; tiktoken any neighbours that together spell a token. They agree on every text if and
    only if each token, spelled out in bytes, is put together from the two tokens that its merge lists.

    Args:
        left: int64, `(merges,)`: the left token of each merge, in merge order. A token is a byte (0..255) or 256 plus
            the number of the merge that makes it, which must come earlier.
        right: the right tokens, alike.

    Returns:
        The number of a merge whose token BPE builds otherwise, or None if there is none.

    BPE builds (l, r) if l and r are themselves built as listed and no merge across the seam ever comes before one that
    is needed inside of l or r. The seam is walked back in time: undo the later of the two tokens that meet there, and
    see whether the two that met before would have merged first. (H. van Antwerpen and A. Neubeck, "So many tokens, so
    little time", GitHub, 2024.) All merges are walked at once.
    """
    n_tokens = _BYTES + len(left)
    keys = left * n_tokens + right
    order = np.argsort(keys)
    sorted_keys = keys[order]
    parts = [np.concatenate([np.arange(_BYTES), side]) for side in (left, right)]  # of each token; bytes have none

    token = np.arange(_BYTES, n_tokens)
    a, b, limit = left, right, token  # the tokens that meet at the seam, and the merge that comes next inside of them
    while token.size:
        key = a * n_tokens + b
        found = np.minimum(np.searchsorted(sorted_keys, key), len(keys) - 1)
        merged = order[found] + _BYTES
        stolen = (sorted_keys[found] == key) & (merged < limit)
        if stolen.any():
            return int(token[stolen].min()) - _BYTES
        # Of equal merges the leftmost comes first: the seam's comes after one in `a` but before one in `b`.
        undo_left = a > b
        limit = np.where(undo_left, a, b + 1)
        a, b = np.where(undo_left, parts[1][a], a), np.where(undo_left, b, parts[0][b])
        undone = limit > _BYTES  # else both were bytes already
        token, a, b, limit = token[undone], a[undone], b[undone], limit[undone]
    return None


def _byte_characters() -> list[str]:
    """The printable stand-ins for the bytes 0..255 in HF's byte-level files: Latin-1 where that is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(stand_ins)) for byte in range(_BYTES)]


def _flatten(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre_tokenizer or post_processor: none, one, or those of a (nested) Sequence."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step[key] for inner in _flatten(outer, key)]


def _read_text(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read ({error}); download it again") from error


def _refusal(file: Path, what: str) -> UserError:
    return UserError(
        f"{file}: {what}; tiktoken could not give the same ids as HF. Use the tokenizer files of a Qwen3 checkpoint"
    )
