"""Tokenizers other than Qwen's byte-level BPE, run by their own libraries."""

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_plain
from titan_mi100.text.base import Tokenizer, TokenizerConfig
from titan_mi100.text.bpe import BYTE_OF

Spans = list[tuple[int, int]]  # per token the bytes [begin, end) of the text that it represents

# The protobuf of a sentencepiece model: the tags of a piece and of a piece's type; all types, and the user-defined one.
_PIECE, _TYPE, _TYPES, _USER_DEFINED = 0x0A, 0x18, range(1, 7), 4
_FIXED_SIZES = {1: 8, 5: 4}  # protobuf's wire type -> bytes of a value of fixed size
_ANY = "\ue000"  # a private-use character: the only token of the tiny vocabulary in check_definition
_NEVER_IN_UTF8 = b"\xc0\xc1" + bytes(range(0xF5, 0x100))


class _WithSpans(Tokenizer):
    """A tokenizer whose library reports the bytes of the text that each token represents."""

    @abstractmethod
    def _encode_with_spans(self, segment: str) -> tuple[list[int], Spans]: ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As for every tokenizer. The bytes of text without a token (such as dropped spaces) count for the next token
        of their segment, or for its last one. A segment without any token counts for the added token after it."""
        ids: list[int] = []
        ends: list[int] = []
        done = 0  # bytes of the segments so far
        for token_id, segment in self._segments(text):
            size = len(segment.encode())
            new, spans = self._encode_with_spans(segment) if token_id is None else ([token_id], [(0, size)])
            ids += new
            ends += [done + end for end in _ends(spans, size)]
            done += size
        return np.array(ids, dtype=np.int32), np.array([*ends[:-1], done][: len(ends)], dtype=np.int64)


def _ends(spans: Spans, size: int) -> list[int]:
    """The end of each token in a segment of `size` bytes, such that a mask of bytes selects the right tokens.

    Several tokens can represent one character: its bytes, or the letters that it is normalised to. A token with an
    empty range would be in no mask, so each of these tokens gets one byte of the character. If the character has too
    few bytes, the first tokens all end after its first byte; so a mask with the character includes them, too. A token
    can also represent nothing (an added leading space). It is treated as part of the next token's text.
    """
    ends = [size] * len(spans)
    for i in range(len(spans) - 2, -1, -1):
        if spans[i][0] == spans[i][1]:
            spans[i] = spans[i + 1]
        end, begin = spans[i][1], spans[i + 1][0]
        ends[i] = max(begin + 1, min(end, ends[i + 1] - 1)) if begin < end else end
    return ends


def check_definition(file: Path, definition: dict[str, Any], exact: bool) -> None:
    """Refuse a tokenizer.json that the `tokenizers` library refuses, or with which it would change a text's own ids.

    The library gets the file with a vocabulary of one token, so that loading takes no time.

    Args:
        exact: tiktoken will run the tokenizer. It never sees the options of the model, so the library checks them here.

    Raises:
        UserError: the post_processor drops or repeats tokens. (The library's own exceptions pass through.)
    """
    options = definition["model"] if exact else {}
    model = {**options, "type": "BPE", "vocab": {_ANY: 0}, "merges": []}
    frame = {**definition, "model": model, "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    library = tokenizers.Tokenizer.from_str(json.dumps(frame))
    library.no_truncation()
    library.no_padding()
    if library.encode(_ANY, add_special_tokens=False).ids != [0]:
        raise UserError(f"{file}: post_processor drops or repeats a text's own tokens; use the model's own files")


class HfTokenizer(_WithSpans):
    """A tokenizer.json that tiktoken cannot run exactly, run by the `tokenizers` library."""

    def __init__(self, file: Path, definition: dict[str, Any], config: TokenizerConfig) -> None:
        if definition["model"].get("dropout"):
            raise UserError(f"{file}: model.dropout makes the ids of a text random; set it to null")
        # Remove everything that adds tokens to a text, or trims the offsets.
        definition = {**definition, "truncation": None, "padding": None, "post_processor": None}
        self._library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        vocab = self._library.get_vocab(with_added_tokens=True)
        added = {entry["content"]: entry["id"] for entry in definition.get("added_tokens", [])}
        decoder = json.dumps(definition.get("decoder"))
        byte_of = BYTE_OF if '"ByteLevel"' in decoder else {}
        lost = [c for c, byte in byte_of.items() if c not in vocab and byte not in _NEVER_IN_UTF8]
        odd = [*sorted(added.items() - vocab.items()), *lost]
        if odd or len({*vocab.values()}) != len(vocab):
            raise UserError(f"{file}: {odd[0] if odd else 'an id'} is missing or occurs twice; download it again")
        if byte_of:
            spelled = {i: b"".join(byte_of.get(c, c.encode()) for c in token) for token, i in vocab.items()}
        else:
            # Ask the library. A token is decoded twice in a row and the first copy removed, because many decoders strip
            # a space at the beginning of a text.
            ids = list(vocab.values())
            once, twice = (self._library.decode_batch([[i] * n for i in ids], False) for n in (1, 2))
            spelled = {i: b.removeprefix(a).encode() for i, a, b in zip(ids, once, twice, strict=True)}
        if '"ByteFallback"' in decoder:
            spelled |= {i: bytes.fromhex(t[3:5]) for t, i in vocab.items() if re.fullmatch("<0x[0-9A-F]{2}>", t)}
        spelled |= {token_id: content.encode() for content, token_id in added.items()}
        parts = [definition.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        self._added = set(added.values())
        special = [entry["content"] for entry in definition.get("added_tokens", []) if entry.get("special")]
        super().__init__(spelled, {}, config.ends(added), digest.hexdigest(), special)

    def _decode(self, ids: list[int], spelled: bytes) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def _encode_segment(self, segment: str) -> list[int]:
        return self._run(segment, with_offsets=False).ids  # offsets take quadratic time on long pieces

    def _run(self, segment: str, with_offsets: bool) -> Any:
        try:
            return self._library.encode(segment) if with_offsets else self._library.encode_batch_fast([segment])[0]
        except Exception as error:  # such as a character outside the vocabulary of a model without an unknown token
            raise UserError(f"the tokenizers library cannot encode a text: {error}") from error

    def _encode_with_spans(self, segment: str) -> tuple[list[int], Spans]:
        encoding = self._run(segment, with_offsets=True)
        utf8 = np.frombuffer(segment.encode(), dtype=np.uint8)
        # The library counts characters; bounds[c] is the byte where character c begins.
        bounds = [*np.flatnonzero(utf8 & 0xC0 != 0x80).tolist(), len(utf8)]
        spans = [(bounds[begin], bounds[end]) for begin, end in encoding.offsets]
        for i in range(1, len(spans)):  # dropped spaces before an added token count for the token before it
            if encoding.ids[i] in self._added and encoding.ids[i - 1] not in self._added:
                spans[i - 1] = (spans[i - 1][0], max(spans[i - 1][1], spans[i][0]))
        return encoding.ids, spans


class SentencePieceTokenizer(_WithSpans):
    """A sentencepiece model. Special tokens are cut out of the text first; the segments between are encoded separately.

    Special tokens are the model's control and user-defined pieces, and the config's `added_tokens_decoder` with the ids
    given there. Nothing is added to a text except what the model adds to each segment, such as a leading space.
    """

    def __init__(self, file: Path, config: TokenizerConfig) -> None:
        from sentencepiece import SentencePieceProcessor  # imported here, because only these files need it

        if not hasattr(SentencePieceProcessor, "encode_as_offset_mapping"):
            raise UserError(f"{file}: needs a newer sentencepiece; run: pip install 'sentencepiece>=0.2.3'")
        model, library = read_plain(file), SentencePieceProcessor()
        library.load_from_serialized_proto(model)
        pieces = {library.id_to_piece(i): i for i in range(library.piece_size())}
        reserved = {*_user_defined(model), *filter(library.is_control, pieces.values())}
        special = {i: piece for piece, i in pieces.items() if i in reserved}
        free = reserved.union(filter(library.is_unused, pieces.values()))
        added = config.added(pieces, free)
        named = [*filter(library.is_control, special), *(token.id for token in added if token.special)]
        special |= {token.id: token.content for token in added}
        spelled = {i: piece.replace("▁", " ").encode() for piece, i in pieces.items()}
        spelled |= {i: bytes.fromhex(piece[3:5]) for piece, i in pieces.items() if library.is_byte(i)}
        ids = {content: token_id for token_id, content in special.items()}
        self.warning = (
            f"{file}: transformers converts this file and gives other ids; use a tokenizer.json to avoid that"
        )
        self._library, self._contents = library, special
        digest = hashlib.sha256(model + json.dumps(sorted(ids.items())).encode())
        ends = config.ends(ids, special.get(library.eos_id(), ""), special.get(library.pad_id(), ""))
        super().__init__(spelled, ids, ends, digest.hexdigest(), [special[i] for i in named])

    def _decode(self, ids: list[int], spelled: bytes) -> str:
        """The text as normalised by sentencepiece; it writes unknown pieces as " ⁇ "."""
        runs = [(content, list(run)) for content, run in groupby(ids, self._contents.get)]
        return "".join(content * len(run) if content else self._library.decode(run) for content, run in runs)

    def _encode_segment(self, segment: str) -> list[int]:
        return self._library.encode(segment)

    def _encode_with_spans(self, segment: str) -> tuple[list[int], Spans]:
        mapping = self._library.encode(segment, return_type="offset_mapping", return_bytes=True)
        return mapping["ids"], list(mapping["offsets"])


def _user_defined(model: bytes) -> list[int]:
    """Ids of the user-defined pieces, read from the model's protobuf.

    The processor does not tell them, and sentencepiece's generated protobuf code needs the newest protobuf library.
    """
    pieces = [value for tag, value in _fields(model) if tag == _PIECE]
    kinds = ([value for tag, value in _fields(piece) if tag == _TYPE and value in _TYPES] for piece in pieces)
    return [i for i, types in enumerate(kinds) if types[-1:] == [_USER_DEFINED]]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: (tag, value). A tag is 8 * field number + wire type."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7  # wire type: 0 an integer, 2 a size and bytes, 1 and 5 fixed sizes
        number, at = _varint(message, at) if kind in (0, 2) else (_FIXED_SIZES[kind], at)  # the value, or its size
        yield tag, number & 0xFFFFFFFF if kind == 0 else message[at : (at := at + number)]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer, 7 bits per byte, the lowest first; and the position after it."""
    number, shift = message[at] & 127, 7
    while message[at] > 127:
        at += 1
        number, shift = number | (message[at] & 127) << shift, shift + 7
    return number, at + 1
