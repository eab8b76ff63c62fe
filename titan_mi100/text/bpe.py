"""Byte-level BPE as Qwen's, run by tiktoken, which is several times as fast as the `tokenizers` library.

The ids are that library's. What differs between the two is handled: which pairs may merge (`find_inexact_merge`), the
Unicode version behind NFC (`_UNKNOWN_TO_HF_NFC`), and very long runs of spaces (`BpeTokenizer._encode_segment`).
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_plain
from titan_mi100.text.base import AddedToken, Segments, Tokenizer, TokenizerConfig, Words

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
# Options of a BPE model that change no id here: `ignore_merges` turns a piece that is a token into that token at once,
# and every token in `_ranks` is what BPE makes of its bytes anyway; nothing is unknown to a byte-level vocabulary.
_HARMLESS = ("type", "vocab", "merges", "ignore_merges", "fuse_unk")

# Unicode's White_Space, which is what \s means to both regex engines, without line breaks: `\s*[\r\n]+` takes those.
# (Python's own \s adds U+001C to U+001F.)
_SPACE = "[\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LONG = 1 << 16  # fancy-regex's backtracking stack overflows at a million characters, and kills the process
_LONG_RUN = re.compile(f"(?<!{_SPACE}){_SPACE}{{{_LONG},}}")

# `tokenizers` normalises by the tables of Unicode 9. These are the code points of Unicode 10 to 18 that have a
# combining class or take part in a composition: Python's newer tables move and compose them, HF leaves them alone.
_UNKNOWN_TO_HF_NFC = """
    5C8-5C9 7FD 897-89F 8CA-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1AF0 1DF6-1DFA A82C 105C9 105D2 105DA 105E4 10D24-10D27
    10D69-10D6D 10EAB-10EAC 10ECB-10ECF 10EF0-10EFB 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382-11385 1138B
    1138E 11390-11391 113B8 113BB 113C2 113C5 113C7-113C9 113CE-113D0 1145E 11839-1183A 11930 11935 11938 1193D-1193E
    11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45 11D97 11F41-11F42 1611E-16129 1612F 16D63 16D67-16D6A 16FF0-16FF1
    1D127-1D128 1D250-1D252 1D25B-1D25C 1D25F 1D280-1D281 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF
    1E6E3 1E6E6 1E6EE-1E6EF 1E6F5"""
_HF_NFC_BARRIER = re.compile("([" + re.sub("[0-9A-F]+", lambda code: chr(int(code[0], 16)), _UNKNOWN_TO_HF_NFC) + "])")


class BpeTokenizer(Tokenizer):
    """Byte-level BPE that splits text by Qwen2's pattern, run by tiktoken."""

    def __init__(self, ranks: dict[bytes, int], added: list[AddedToken], nfc: bool, ends: tuple[str, int, int]) -> None:
        """`ranks`: bytes to id, the 256 single bytes first, then in the order in which BPE prefers them."""
        digest = hashlib.sha256(np.array(list(ranks.values()), dtype="<i8").tobytes())
        digest.update(np.array(list(map(len, ranks)), dtype="<i8").tobytes() + b"".join(ranks))
        flags = sorted((token.id, token.content, token.normalized, token.special) for token in added)
        digest.update(json.dumps([flags, QWEN2_PATTERN, nfc]).encode())
        spelled = {token_id: token for token, token_id in ranks.items()}
        spelled |= {token.id: token.content.encode() for token in added}
        super().__init__(spelled, {t.content: t.id for t in added if not t.normalized}, ends, digest.hexdigest())

        self._nfc = nfc
        normalized = {self._normalize(token.content): token.id for token in added if token.normalized}
        self._normalized = Words(normalized)
        # No special tokens: of two that start alike tiktoken would take either, HF takes the longer.
        self._bpe = tiktoken.Encoding("titan_mi100", pat_str=QWEN2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        # What a token takes up in the normalised text. An unused id keeps 0; no text encodes to it.
        self._byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        self._byte_lengths[list(spelled)] = list(map(len, spelled.values()))
        for content, token_id in normalized.items():
            self._byte_lengths[token_id] = len(content.encode())

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(self.encode(text), dtype=np.int32)
        return ids, np.cumsum(self._byte_lengths[ids])

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def _segments(self, text: str) -> Segments:
        """HF's two passes: an added token never composes with what follows it."""
        for raw_id, segment in super()._segments(text):
            if raw_id is not None:
                yield raw_id, segment
            else:
                yield from self._normalized.cut_out(self._normalize(segment))

    def _normalize(self, text: str) -> str:
        # Text that is NFC by newer tables is NFC by older ones (Unicode's stability policy), so most text returns here.
        if not self._nfc or unicodedata.is_normalized("NFC", text):
            return text
        # To HF's older tables a code point they do not know is inert: nothing moves across it or composes with it.
        return "".join(unicodedata.normalize("NFC", part) for part in _HF_NFC_BARRIER.split(text))

    def _encode_segment(self, segment: str) -> list[int]:
        # Long runs of spaces go around the regex. What `\s+(?!\S)` makes of a run is known: one piece, less the last
        # space where a visible character follows, which may belong to that one's piece. No piece crosses the run's
        # start: a run begins the text or follows a visible character or a line break, which ends a piece.
        ids: list[int] = []
        done = 0
        for run in _LONG_RUN.finditer(segment) if len(segment) >= _LONG else ():
            start, end = run.span()
            if segment[end : end + 1] in ("\r", "\n"):
                continue  # `\s*[\r\n]+` takes the run, without backtracking
            end -= end < len(segment)
            # The second is private, but the only way to hand tiktoken a piece; its name is that of the first release.
            ids += self._bpe.encode_ordinary(segment[done:start]) + self._bpe._encode_single_piece(segment[start:end])
            done = end
        return ids + self._bpe.encode_ordinary(segment[done:])


def read_definition(file: Path, config: TokenizerConfig) -> dict[str, Any]:
    """The JSON of a tokenizer.json, or the same made of a `vocab.json` with its merges.txt and config."""
    content: dict[str, Any] = json.loads(read_plain(file))
    if file.name == "tokenizer.json":
        return content
    if not config.is_qwen2() or config.content.get("add_prefix_space"):
        # These files do not say how to split and normalise a text; the class does, and only this one is known.
        raise UserError(
            f"{config.file}: without tokenizer.json, tokenizer_class must be Qwen2Tokenizer, not "
            f"{config.content.get('tokenizer_class')!r}, and add_prefix_space unset; save it with a tokenizer.json"
        )
    lines = read_plain(file.with_name("merges.txt")).decode().rstrip("\n").split("\n")
    return {
        "added_tokens": config.added_entries(),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTE_LEVEL]},
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": content, "merges": [x.rstrip("\r") for x in lines if x[:8] != "#version"]},
    }


def read_bpe(definition: dict[str, Any], config: TokenizerConfig) -> BpeTokenizer | None:
    """The tokenizer of a tokenizer.json; None where tiktoken is not known to give the ids of `tokenizers`."""
    model, normalizers = definition["model"], _steps(definition.get("normalizer"), "normalizers")
    steps = [{**step, "trim_offsets": False} for step in _steps(definition.get("pre_tokenizer"), "pretokenizers")]
    added = [AddedToken.read(entry) for entry in definition.get("added_tokens", [])]
    contents = {token.content for token in added}
    # The post_processor, truncation and padding come after a text's own ids.
    if (
        model.get("type", "BPE") != "BPE"
        or any(value for option, value in model.items() if option not in _HARMLESS)
        or any(step["type"] != "NFC" for step in normalizers)
        or steps != [{**_SPLIT, "trim_offsets": False}, _BYTE_LEVEL]
        or (definition.get("decoder") or _BYTE_LEVEL)["type"] != "ByteLevel"
        or any(token.flag or not token.content or token.content in model["vocab"] for token in added)
        # `tokenizers` does not read an added token's id, it counts.
        or [token.id for token in added] != list(range(len(model["vocab"]), len(model["vocab"]) + len(contents)))
        or (ranks := _ranks(model["vocab"], model["merges"])) is None
    ):
        return None
    return BpeTokenizer(ranks, added, bool(normalizers), config.ends({token.content: token.id for token in added}))


def byte_characters() -> list[str]:
    """The printable stand-ins for the bytes 0..255 in HF's byte-level files: Latin-1 where that is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(stand_ins)) for byte in range(256)]


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre_tokenizer: none, one, or those of a Sequence."""
    return [] if step is None else step[key] if step["type"] == "Sequence" else [step]


def _ranks(vocab: dict[str, int], merges: list[Any]) -> dict[bytes, int] | None:
    """Bytes and ids of all tokens that BPE can make, single bytes first and then in merge order; None: not exact."""
    tokens = [bytes([byte]) for byte in range(256)]
    rank = {character: byte for byte, character in enumerate(byte_characters())}
    left, right = [], []
    for merge in merges:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        if first not in rank or second not in rank or (product := first + second) in rank:
            return None  # it joins what is not made yet, or makes what is
        left.append(rank[first])
        right.append(rank[second])
        rank[product] = len(tokens)
        tokens.append(tokens[left[-1]] + tokens[right[-1]])
    ids = np.array([vocab[token] for token in rank]) if rank.keys() == vocab.keys() else np.array([0.5])
    if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 2**31 or len(set(ids.tolist())) != len(ids):
        return None
    inexact = find_inexact_merge(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64))
    return dict(zip(tokens, ids.tolist(), strict=True)) if inexact is None and (np.diff(ids[256:]) > 0).all() else None


def find_inexact_merge(left: np.ndarray, right: np.ndarray) -> int | None:
    """The number of a merge for which tiktoken and HF's BPE can disagree, or None.

    HF merges listed pairs only; tiktoken any neighbours that together spell a token. They agree on every text if and
    only if each token, spelled out in bytes, is put together from the two tokens that its merge lists.

    Args:
        left, right: int64, `(merges,)`: the two tokens of each merge, in merge order. A token is a byte (0..255) or 256
            plus the number of the merge that makes it, which must come earlier.

    BPE builds (a, b) if a and b are themselves built as listed and no merge across the seam ever comes before one that
    is needed inside of a or b. The seam is walked back in time: undo the later of the two tokens that meet there, and
    see whether the two that met before would have merged first. (H. van Antwerpen and A. Neubeck, "So many tokens, so
    little time", GitHub, 2024.) All merges are walked at once.
    """
    n_tokens = 256 + len(left)
    keys = left * n_tokens + right
    order = np.argsort(keys)
    left_part, right_part = (np.concatenate([np.arange(256), side]) for side in (left, right))  # bytes have none
    token = np.arange(256, n_tokens)
    a, b, limit = left, right, token  # the tokens that meet at the seam, and the merge that comes next inside of them
    while token.size:
        key = a * n_tokens + b
        merged = order[np.minimum(np.searchsorted(keys, key, sorter=order), len(keys) - 1)]
        stolen = (keys[merged] == key) & (merged + 256 < limit)
        if stolen.any():
            return int(token[stolen].min()) - 256
        # Of equal merges the leftmost comes first: the seam's comes after one in `a` but before one in `b`.
        undo_left = a > b
        limit = np.where(undo_left, a, b + 1)
        a, b = np.where(undo_left, right_part[a], a), np.where(undo_left, b, left_part[b])
        token, a, b, limit = (x[limit > 256] for x in (token, a, b, limit))  # else both were bytes already
    return None
