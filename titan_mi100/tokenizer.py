"""An HF tokenizer folder run by tiktoken: the ids that the `tokenizers` library gives, or a refusal that says why.

Three things differ between the two libraries and are handled here: which pairs may merge (`find_inexact_merge`),
the Unicode version behind NFC (`_UNKNOWN_TO_HF_NFC`), and very long runs of spaces (`Tokenizer._encode_ordinary`).
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from titan_mi100.errors import UserError

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Unicode's White_Space, which is what \s means to both regex engines; Python's own \s adds U+001C to U+001F.
_INLINE_SPACE = "\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

# Only patterns whose pieces were compared, code point by code point, between tiktoken's regex engine (fancy-regex) and
# that of `tokenizers` (Oniguruma) are accepted. Each comes with the characters of which `\s+(?!\S)` matches a long run:
# Qwen2's `\s*[\r\n]+` comes first and ends a piece after a run's last line break, so its run holds none.
_SPACE_RUNS = {_QWEN2_PATTERN: _INLINE_SPACE, _GPT2_PATTERN: _INLINE_SPACE + "\r\n"}
_LONG_RUN = 1 << 16  # fancy-regex's backtracking stack overflows at a million characters, and takes the process along

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

_BYTES = 256


@dataclass(frozen=True)
class _AddedToken:
    """A token that is cut out of the text before BPE; `normalized` ones are looked for after the normaliser."""

    id: int
    content: str
    normalized: bool
    special: bool


@dataclass(frozen=True)
class _Definition:
    """What a folder says about encoding; everything outside of these fields has been checked to be absent."""

    file: Path
    vocab: dict[str, int]
    merges: list[list[str]]
    added: list[_AddedToken]
    pattern: str
    nfc: bool


class Tokenizer:
    """Text to token ids and back, by the files of an HF tokenizer folder.

    Build it with `from_folder`. Instances can be pickled, so that data loader workers can have one.
    """

    def __init__(self, definition: _Definition, eos_token: str, pad_token: str | None) -> None:
        tokens, ids = _check_vocabulary(definition)
        by_content = {token.content: token.id for token in definition.added}
        for key, name in (("eos_token", eos_token), ("pad_token", pad_token)):
            if name is not None and name not in by_content:
                raise UserError(
                    f"{definition.file}: {key} {name!r} of tokenizer_config.json is not among the added tokens; "
                    f"add it there, or name one that is"
                )
        self.eos_token = eos_token
        self.eos_token_id = by_content[eos_token]
        self.pad_token_id = self.eos_token_id if pad_token is None else by_content[pad_token]
        self.fingerprint = _fingerprint(definition, tokens, ids)

        self._nfc = definition.nfc
        self._raw_ids = {t.content: t.id for t in definition.added if not t.normalized}
        self._normalized_ids = {self._normalize(t.content): t.id for t in definition.added if t.normalized}
        self._raw_pattern = _any_of(self._raw_ids)
        self._normalized_pattern = _any_of(self._normalized_ids)
        run = _SPACE_RUNS[definition.pattern]
        self._long_run = re.compile(f"(?<![{run}])[{run}]{{{_LONG_RUN},}}")

        ranks = dict(zip(tokens, ids.tolist(), strict=True))
        # No special tokens: of two that start alike tiktoken would take either, HF takes the longer.
        self._bpe = tiktoken.Encoding(
            "titan_mi100", pat_str=definition.pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self._bytes = dict(zip(ranks.values(), tokens, strict=True))
        self._bytes.update((token.id, token.content.encode()) for token in definition.added)
        self.n_vocab = max(self._bytes) + 1
        # What a token takes up in the normalised text. An unused id keeps 0; no text encodes to it.
        self._byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        self._byte_lengths[list(self._bytes)] = [len(token) for token in self._bytes.values()]
        for content, token_id in self._normalized_ids.items():
            self._byte_lengths[token_id] = len(content.encode())

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read `tokenizer.json`, or `vocab.json` with `merges.txt`, and the special tokens of `tokenizer_config.json`.

        Args:
            path: a local folder as `save_pretrained` or a download of a Qwen3 checkpoint leaves it.

        Returns:
            A tokenizer whose ids equal those of the `tokenizers` library on any text.

        Raises:
            UserError: a file is missing or malformed, or says something that tiktoken cannot reproduce exactly.
        """
        folder = Path(path)
        config_file = folder / "tokenizer_config.json"
        config = _read_json(config_file)
        file = folder / "tokenizer.json"
        try:
            if file.is_file():
                definition = _from_tokenizer_json(file, _read_json(file))
            else:
                file = folder / "vocab.json"
                definition = _from_vocab_and_merges(folder, config, config_file)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{file}: not laid out as a tokenizer file ({error!r}); download it again") from error
        eos_token = _token_name(config.get("eos_token"))
        if eos_token is None:
            raise UserError(f"{config_file}: eos_token is missing; name the token that ends a turn, such as <|im_end|>")
        return cls(definition, eos_token, _token_name(config.get("pad_token")))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, added tokens in it recognised, nothing added.

        Args:
            text: any text.

        Returns:
            The ids that `tokenizers` gives.

        Raises:
            UserError: the text holds a lone surrogate, which no UTF-8 text can.
        """
        ids: list[int] = []
        for token_id, segment in self._segments(text):
            if token_id is None:
                ids += self._encode_ordinary(segment)
            else:
                ids.append(token_id)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and where each token ends.

        Args:
            text: any text.

        Returns:
            ids, int32, and ends, int64, both `(tokens,)`: token i ends before byte `ends[i]` of the UTF-8 of
            `normalize(text)`. A token can end inside a character.

        Raises:
            UserError: as `encode`.
        """
        ids = np.array(self.encode(text), dtype=np.int32)
        return ids, np.cumsum(self._byte_lengths[ids])

    def normalize(self, text: str) -> str:
        """The text that the tokens spell: in NFC where the folder asks for it, between added tokens.

        Args:
            text: any text.

        Returns:
            The normalised text; an added token never composes with what follows it.

        Raises:
            UserError: as `encode`.
        """
        return "".join(segment for _, segment in self._segments(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, added tokens included.

        Args:
            ids: token ids.

        Returns:
            The text; bytes that are not UTF-8, as a cut inside a character leaves, become U+FFFD.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        try:
            return b"".join([self._bytes[token_id] for token_id in ids]).decode("utf-8", errors="replace")
        except KeyError as error:
            raise UserError(f"token id {error} is not in the tokenizer's vocabulary; is this its own data?") from error

    def _segments(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Added tokens (id, text) and, between them, what is left to BPE (None, normalised text): HF's two passes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start} of the text is a lone surrogate ({text[error.start]!r}), which UTF-8 "
                f"cannot hold; remove it or replace it by U+FFFD"
            ) from error
        for raw_id, segment in _cut(text, self._raw_pattern, self._raw_ids):
            if raw_id is not None:
                yield raw_id, segment
            else:
                yield from _cut(self._normalize(segment), self._normalized_pattern, self._normalized_ids)

    def _normalize(self, text: str) -> str:
        # Text that is NFC by newer tables is NFC by older ones (Unicode's stability policy), so most text returns here.
        if not self._nfc or unicodedata.is_normalized("NFC", text):
            return text
        # To HF's older tables a code point they do not know is inert: nothing moves across it or composes with it.
        return "".join(unicodedata.normalize("NFC", part) for part in _HF_NFC_BARRIER.split(text))

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) < _LONG_RUN:
            return self._bpe.encode_ordinary(text)
        # Long runs of spaces go around the regex. What `\s+(?!\S)` makes of a run is known: one piece, less the last
        # space where a visible character follows, which may belong to that one's piece. No piece crosses the run's
        # start: a run begins the text or follows a visible character or, in Qwen2's pattern, a line break.
        ids: list[int] = []
        done = 0
        for run in self._long_run.finditer(text):
            start, end = run.span()
            if end < len(text):
                if text[end] in "\r\n":
                    continue  # `\s*[\r\n]+` takes the run, without backtracking
                end -= 1
            ids += self._bpe.encode_ordinary(text[done:start])
            # Private, but the only way to hand tiktoken a piece; it has kept its name since the first release.
            ids += self._bpe._encode_single_piece(text[start:end])
            done = end
        return ids + self._bpe.encode_ordinary(text[done:])


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


def _check_vocabulary(definition: _Definition) -> tuple[list[bytes], np.ndarray]:
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


def _from_tokenizer_json(file: Path, data: dict[str, Any]) -> _Definition:
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
    return _Definition(file, model["vocab"], merges, added, pattern, bool(normalizers))


def _from_vocab_and_merges(folder: Path, config: dict[str, Any], config_file: Path) -> _Definition:
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    for file in (vocab_file, merges_file):
        if not file.is_file():
            raise UserError(
                f"{folder}: neither tokenizer.json nor {file.name} is there; copy the checkpoint's tokenizer files"
            )
    name = config.get("tokenizer_class")
    if name not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        # These two files do not say how to split and normalise a text; the class does, and this one is known.
        raise _refusal(config_file, f"without tokenizer.json, tokenizer_class {name!r} (not Qwen2Tokenizer) is unknown")
    if config.get("add_prefix_space"):
        raise _refusal(config_file, "add_prefix_space is set")
    vocab = _read_json(vocab_file)
    lines = _read_text(merges_file).rstrip("\n").split("\n")
    merges = [line.rstrip("\r").split(" ") for line in lines if not line.startswith("#version")]
    _check_merges_are_pairs(merges_file, merges)
    added = [
        _added_token(config_file, int(token_id), token)
        for token_id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    ]
    _check_added(config_file, vocab, added, ignore_merges=False)
    return _Definition(vocab_file, vocab, merges, added, _QWEN2_PATTERN, nfc=True)


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
        return _GPT2_PATTERN
    split = steps[0]
    if split["behavior"] != "Isolated" or split["invert"]:
        raise _refusal(file, f"the pre_tokenizer's Split has behavior {split['behavior']}, invert {split['invert']}")
    pattern = split["pattern"].get("Regex")
    if pattern not in _SPACE_RUNS:
        raise _refusal(file, f"the pre_tokenizer's pattern {split['pattern']} is neither Qwen2's nor GPT-2's")
    return pattern


def _added_token(file: Path, token_id: int, token: dict[str, Any]) -> _AddedToken:
    content = token["content"]
    for flag in ("lstrip", "rstrip", "single_word"):
        if token[flag]:
            raise _refusal(file, f"the added token {content!r} has {flag}")
    return _AddedToken(token_id, content, token["normalized"], token["special"])


def _check_merges_are_pairs(file: Path, merges: list[list[str]]) -> None:
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise UserError(f"{file}: merge {number} is {' '.join(merge)!r}, not two tokens; download the file again")


def _check_added(file: Path, vocab: dict[str, int], added: list[_AddedToken], ignore_merges: bool) -> None:
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


def _cut(text: str, pattern: re.Pattern[str], ids: dict[str, int]) -> Iterator[tuple[int | None, str]]:
    done = 0
    for match in pattern.finditer(text):
        if match.start() > done:
            yield None, text[done : match.start()]
        yield ids[match.group()], match.group()
        done = match.end()
    if done < len(text):
        yield None, text[done:]


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest; without words, a pattern that never matches."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)")


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


def _fingerprint(definition: _Definition, tokens: list[bytes], ids: np.ndarray) -> str:
    digest = hashlib.sha256(ids.astype("<i8").tobytes())
    digest.update(np.array([len(token) for token in tokens], dtype="<i8").tobytes())
    digest.update(b"".join(tokens))
    added = sorted(astuple(token) for token in definition.added)
    digest.update(json.dumps([added, definition.pattern, definition.nfc]).encode())
    return digest.hexdigest()


def _token_name(token: str | dict[str, Any] | None) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; copy the checkpoint's tokenizer files to that folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}); download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds a {type(data).__name__} instead of an object; download it again")
    return data


def _refusal(file: Path, what: str) -> UserError:
    return UserError(
        f"{file}: {what}; tiktoken could not give the same ids as HF. Use the tokenizer files of a Qwen3 checkpoint"
    )
