"""Byte-level BPE as in Qwen, run by tiktoken, which is several times as fast as the `tokenizers` library.

The ids equal those of `tokenizers`. Three differences between the two are handled: which pairs may merge
(`merges_are_exact`), the Unicode version of NFC (`_UNKNOWN_TO_HF_NFC`), and very long runs of spaces
(`BpeTokenizer._encode_segment`).
"""

import hashlib
import json
import re
import unicodedata
from itertools import groupby
from typing import Any

import numpy as np
import tiktoken

from titan_mi100.text.base import AddedToken, Ends, Segments, Tokenizer, TokenizerConfig
from titan_mi100.text.classes import QWEN2, QWEN3_5

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# class -> pattern. In Qwen3.5's a letter's marks belong to its piece: Qwen2's cuts Hindi words at their vowels.
PATTERNS = {
    QWEN2: QWEN2_PATTERN,
    QWEN3_5: QWEN2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"),
}
_NFC = {"type": "NFC"}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def _pre_tokenizer(pattern: str, trims: bool) -> dict[str, Any]:
    steps = [{**_SPLIT, "pattern": {"Regex": pattern}}, {**_BYTE_LEVEL, "trim_offsets": trims}]
    return {"type": "Sequence", "pretokenizers": steps}


# two variants of each: `trim_offsets` does not change the ids
_PRE_TOKENIZERS = {
    kind: [_pre_tokenizer(pattern, trims) for trims in (False, True)] for kind, pattern in PATTERNS.items()
}
# HF's byte-level files write each byte as a printable character: bytes that are visible in Latin-1 as that character,
# the others as U+0100, U+0101, ...
_VISIBLE, _OTHERS = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, iter(range(0x100, 0x200))
BYTE_OF = {chr(byte if byte in _VISIBLE else next(_OTHERS)): bytes([byte]) for byte in range(256)}
# Options of a BPE model that do not change the ids here. `ignore_merges` encodes a piece that is a token as that token;
# BPE gives the same for every token in `_ranks`. `fuse_unk` is for unknown bytes; a byte-level vocabulary has none.
_HARMLESS = ("type", "vocab", "merges", "ignore_merges", "fuse_unk")

# \s in both regex engines (Unicode's White_Space), without line breaks, which `\s*[\r\n]+` matches. Python's own \s
# would add U+001C to U+001F.
_SPACE = "[\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LONG = 1 << 16  # fancy-regex's backtracking stack overflows at a million characters, and kills the process
# The part of a long run of spaces that `\s+(?!\S)` matches as one piece: all spaces, or all but the last one if a
# visible character follows, because that space belongs to the next piece. No piece crosses the run's beginning, since
# the run begins the text or follows a visible character or a line break. A run before a line break is not included:
# `\s*[\r\n]+` matches it without backtracking.
_LONG_RUN = re.compile(f"((?<!{_SPACE}){_SPACE}{{{_LONG},}}(?:\\Z|(?={_SPACE}(?!{_SPACE})[^\r\n])))")

# Code points added in Unicode 10 to 18 that have a combining class or take part in a composition; the ranges also
# include some neighbours that normalisation leaves alone. Python's tables reorder and compose them, but `tokenizers`
# uses the tables of Unicode 9, which do not know them.
_UNKNOWN_TO_HF_NFC = """
    5C8-5C9 7FD 897-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1AF0 1DF6-1DFA A82C 105C9-105E4 10D24-10F85 11070 1133B
    11382-113D0 1145E 11839-11A99 11D42-1612F 16D63-16FF1 1D127-1D128 1D250-1D281 1E08F-1E6F5"""
_HF_NFC_BARRIER = re.compile("([" + re.sub("[0-9A-F]+", lambda code: chr(int(code[0], 16)), _UNKNOWN_TO_HF_NFC) + "])")

_MAYBE_MARKS = re.compile("[^\0-\u02ff]{100,}")  # the first combining mark is U+0300


class BpeTokenizer(Tokenizer):
    """Byte-level BPE that splits text by the pattern of one of Qwen's classes, run by tiktoken."""

    def __init__(
        self,
        ranks: dict[bytes, int],
        added: list[AddedToken],
        nfc: bool,
        ends: Ends,
        kind: str = QWEN2,
        unmade: dict[bytes, int] | None = None,
    ) -> None:
        """
        Args:
            ranks: bytes -> id, the 256 single bytes first, then by merge priority.
            added: added tokens.
            nfc: whether text is normalised to NFC first.
            ends: see `Ends`.
            kind: the class whose pattern splits the text.
            unmade: bytes -> id, of tokens that no text is encoded to.
        """
        digest = hashlib.sha256(np.array(list(ranks.values()), dtype="<i8").tobytes())
        digest.update(np.array(list(map(len, ranks)), dtype="<i8").tobytes() + b"".join(ranks))
        digest.update(json.dumps([sorted(token[:4] for token in added), PATTERNS[kind], nfc]).encode())
        spelled = {token_id: token for token, token_id in (ranks | (unmade or {})).items()}
        special = [token.content for token in added if token.special]
        super().__init__(spelled, {token.content: token.id for token in added}, ends, digest.hexdigest(), special)
        self._nfc = nfc
        # Special tokens are cut out by `_segments`, not by tiktoken: if two begin alike, HF takes the longer one, while
        # tiktoken may take either.
        self._bpe = tiktoken.Encoding("titan_mi100", pat_str=PATTERNS[kind], mergeable_ranks=ranks, special_tokens={})
        self._byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)  # (n_vocab,); unused ids keep 0, and never occur
        self._byte_lengths[list(self._bytes)] = list(map(len, self._bytes.values()))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(self.encode(text), dtype=np.int32)
        return ids, np.cumsum(self._byte_lengths[ids])

    def _segments(self, text: str) -> Segments:
        # Segments are normalised one by one, as in HF: an added token never composes with the text after it.
        for token_id, segment in super()._segments(text):
            # Most text is in NFC already. Text in NFC by newer tables is in NFC by older ones, too (Unicode's stability
            # policy). For HF's older tables an unknown code point is inert: nothing is reordered across it or composed
            # with it. So the text is split at such code points, and the parts are normalised separately.
            if token_id is None and self._nfc and not unicodedata.is_normalized("NFC", segment):
                segment = "".join(map(nfc, _HF_NFC_BARRIER.split(segment)))
            yield token_id, segment

    def _encode_segment(self, segment: str) -> list[int]:
        if len(segment) < _LONG:
            return self._bpe.encode_ordinary(segment)
        # Every second part is a long run. It must not go through the regex, so it is encoded as a single piece. Only a
        # private method of tiktoken does that; its name is unchanged since the first release.
        encoders = (self._bpe.encode_ordinary, self._bpe._encode_single_piece)
        return [token for i, part in enumerate(_LONG_RUN.split(segment)) for token in encoders[i % 2](part)]


def nfc(text: str) -> str:
    """Normalise a text to NFC in linear time.

    Python sorts combining marks by swapping neighbours, which takes quadratic time for long runs of marks. So long runs
    are decomposed and sorted here first.
    """

    def decomposed(run: re.Match[str]) -> str:
        characters = "".join(unicodedata.normalize("NFD", character) for character in run[0])
        groups = groupby(characters, lambda character: unicodedata.combining(character) > 0)
        return "".join(mark for _, marks in groups for mark in sorted(marks, key=unicodedata.combining))

    return unicodedata.normalize("NFC", _MAYBE_MARKS.sub(decomposed, text))


def read_bpe(definition: dict[str, Any], config: TokenizerConfig) -> BpeTokenizer | None:
    """Build a tokenizer from tokenizer.json. Returns None if tiktoken may give other ids than `tokenizers`."""
    model = definition["model"]
    added = [AddedToken.read(entry) for entry in definition.get("added_tokens", [])]
    ids = {token.content: token.id for token in added}
    # post_processor, truncation and padding are not checked: they act after the ids of the text are known.
    if (
        not (kind := class_like({**definition, "normalizer": definition.get("normalizer") or _NFC}))
        or any(token.normalized or not token.plain for token in added)
        # `tokenizers` ignores the ids of added tokens in the file, and numbers them itself.
        or [token.id for token in added] != list(range(len(model["vocab"]), len({*model["vocab"], *ids})))
        or (ranks := _ranks(model["vocab"], model["merges"])) is None
        or (len(ranks) < len(model["vocab"]) and model.get("ignore_merges"))
    ):
        return None
    made = {*ranks.values()}
    unmade = {b"".join(map(BYTE_OF.__getitem__, t)): i for t, i in model["vocab"].items() if i not in made}
    return BpeTokenizer(ranks, added, definition.get("normalizer") is not None, config.ends(ids), kind, unmade)


def class_like(definition: dict[str, Any]) -> str:
    """The class of transformers that always splits and normalises text as this tokenizer.json does; "": none."""
    model, kinds = definition["model"], _PRE_TOKENIZERS.items()
    fits = (
        model.get("type", "BPE") == "BPE"
        and not any(value for option, value in model.items() if option not in _HARMLESS)
        and definition.get("normalizer") == _NFC
        and (definition.get("decoder") or _BYTE_LEVEL)["type"] == "ByteLevel"
    )
    return next((kind for kind, steps in kinds if fits and definition.get("pre_tokenizer") in steps), "")


def _ranks(vocab: dict[str, int], merges: list[Any]) -> dict[bytes, int] | None:
    """Bytes -> id of all tokens that BPE can make: single bytes first, then in merge order.

    Qwen3.5's vocabulary has some that no merge makes, and merges of these: a text never gets their ids.

    Args:
        vocab: token in printable characters -> id.
        merges: pairs of tokens, by priority.

    Returns:
        None if tiktoken would give other ids than HF's BPE.
    """
    tokens = list(BYTE_OF.values())
    number = {character: byte for byte, character in enumerate(BYTE_OF)}
    lefts, rights, idle = list[int](), list[int](), list[tuple[str, str]]()
    for merge in merges:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        left, right, product = number.get(first), number.get(second), first + second
        if left is None or right is None:
            idle.append((first, second))
            continue
        if product in number:
            return None  # the merge makes a token that exists already
        lefts.append(left)
        rights.append(right)
        number[product] = len(tokens)
        tokens.append(tokens[left] + tokens[right])
    if any(first in number and second in number for first, second in idle):
        return None  # a merge before those that make its parts
    ids = [vocab.get(token, -1) for token in number]
    # tiktoken merges by rank, and the rank is the id. So ids must ascend in merge order.
    fit = {*map(type, vocab.values())} == {int} and sorted(vocab.values()) == [*range(len(vocab))] and min(ids) >= 0
    fit = fit and ids[256:] == sorted(ids[256:]) and BYTE_OF.keys() >= {*"".join(vocab)}
    exact = fit and merges_are_exact(np.array(lefts, dtype=np.int64), np.array(rights, dtype=np.int64))
    return dict(zip(tokens, ids, strict=True)) if exact else None


def merges_are_exact(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether tiktoken and HF's BPE give the same ids for every text.

    HF merges only the listed pairs. tiktoken merges any neighbours whose bytes together are a token. They agree if and
    only if BPE on the bytes of each token ends with the two tokens that its merge lists.

    Args:
        left, right: int64, `(merges,)`: the two tokens of each merge, in merge order. A token is a byte (0..255), or
            256 + the number of the merge that makes it, which must come earlier.

    BPE on the bytes of (a, b) ends with a and b if a and b are themselves built as listed, and no merge across the
    boundary between them ever has priority over a merge that is needed inside a or b. The boundary is checked backwards
    in time: undo the later of the two tokens that meet there, and test whether the two tokens that met before would
    have merged first. (H. van Antwerpen and A. Neubeck, "So many tokens, so little time", GitHub, 2024.) All merges are
    checked at once.
    """
    n_tokens = 256 + len(left)
    keys = left * n_tokens + right
    order = np.argsort(keys)
    left_part, right_part = (np.concatenate([np.arange(256), side]) for side in (left, right))  # a byte is its own part
    # (merges,): the tokens left and right of the boundary; and the token whose merge comes next inside them.
    a, b, limit = left, right, np.arange(256, n_tokens)
    while limit.size:
        key = a * n_tokens + b
        merged = order[np.minimum(np.searchsorted(keys, key, sorter=order), len(keys) - 1)]
        if ((keys[merged] == key) & (merged + 256 < limit)).any():
            return False
        # Among equal merges the leftmost is first: a merge at the boundary comes after one in `a`, before one in `b`.
        undo_left = a > b
        limit = np.where(undo_left, a, b + 1)
        a, b = np.where(undo_left, right_part[a], a), np.where(undo_left, b, left_part[b])
        a, b, limit = (x[limit > 256] for x in (a, b, limit))  # otherwise both are single bytes: nothing left to undo
    return True
