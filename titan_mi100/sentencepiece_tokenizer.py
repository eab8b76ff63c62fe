"""A sentencepiece model as a tokenizer: the ids of sentencepiece itself, and offsets that masks can rely on."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor

from titan_mi100.errors import UserError
from titan_mi100.tokenizer import Tokenizer, any_of, check_utf8, cut_out, unknown_id
from titan_mi100.tokenizer_definition import AddedToken, added_tokens, end_and_padding, read_bytes, read_config

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_VARINT, _EIGHT_BYTES, _LENGTH_DELIMITED, _FOUR_BYTES = 0, 1, 2, 5  # protobuf's wire types

_Piece = tuple[str, int]  # its text and its type


class SentencePieceTokenizer(Tokenizer):
    """Special tokens are cut out of the text first, the longest first; each segment between them is encoded by itself.

    Special are the model's control and user-defined pieces, and the `added_tokens_decoder` of the
    `tokenizer_config.json` beside it, by the ids that it states. Nothing is added to a text but what the model adds to
    each segment, such as its leading space.
    """

    def __init__(self, file: Path) -> None:
        """Read a model and the `tokenizer_config.json` beside it, if there is one.

        Args:
            file: the model, a protobuf as sentencepiece's trainer leaves it.

        Raises:
            UserError: the model is broken, the config does not go with it, or neither names an eos token.
        """
        model = read_bytes(file)
        self._processor = _load(file, model)
        pieces = _read_pieces(file, model)
        config_file = file.with_name("tokenizer_config.json")
        config = read_config(config_file) if config_file.is_file() else {}
        self._special_ids = _special_ids(config_file, pieces, added_tokens(config_file, config))
        self._special_pattern = any_of(self._special_ids)
        self._contents = {token_id: content for content, token_id in self._special_ids.items()}
        self._n_pieces = len(pieces)
        self.n_vocab = max([len(pieces), *(token_id + 1 for token_id in self._contents)])

        eos_token, pad_token = end_and_padding(config_file, config)
        self.eos_token = eos_token or self._contents.get(self._processor.eos_id(), "")
        if not self.eos_token:
            raise UserError(
                f"{file}: the model has no eos piece; name the token that ends a turn as eos_token in {config_file}"
            )
        for key, name in (("eos_token", self.eos_token), ("pad_token", pad_token)):
            if name and name not in self._special_ids:
                raise UserError(
                    f"{config_file}: {key} {name!r} is neither a control or user-defined piece of {file.name} nor in "
                    f"added_tokens_decoder; add it there with its id, or name one that is"
                )
        self.eos_token_id = self._special_ids[self.eos_token]
        model_pad = self._processor.pad_id()
        self.pad_token_id = (
            self._special_ids[pad_token] if pad_token else model_pad if model_pad >= 0 else self.eos_token_id
        )
        digest = hashlib.sha256(model)
        digest.update(json.dumps(sorted(self._special_ids.items())).encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for token_id, segment in self._segments(text):
            if token_id is None:
                ids += self._processor.encode(segment)
            else:
                ids.append(token_id)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As for every tokenizer; the ends are of the text as it is, not as sentencepiece normalises it.

        What leaves no token, such as spaces that the model drops, goes to the next token of its segment, or to the last
        one. A segment that leaves none at all goes to the special token behind it, or to the text's last.
        """
        ids: list[int] = []
        ends: list[int] = []
        done = 0
        for token_id, segment in self._segments(text):
            size = len(segment.encode())
            if token_id is None:
                mapping = self._processor.encode(segment, return_type="offset_mapping", return_bytes=True)
                ids += mapping["ids"]
                ends += [done + end for end in _ends(mapping["offsets"], size)]
            else:
                ids.append(token_id)
                ends.append(done + size)
            done += size
        if ends:
            ends[-1] = done
        return np.array(ids, dtype=np.int32), np.array(ends, dtype=np.int64)

    def normalize(self, text: str) -> str:
        """The text itself: what sentencepiece makes of a text cannot be put together from its parts, as masks need."""
        check_utf8(text)
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """As for every tokenizer; the text is as sentencepiece normalises it, and unknown pieces are its " ⁇ "."""
        parts: list[str] = []
        segment: list[int] = []
        for token_id in map(int, ids):
            if token_id in self._contents:
                parts += [self._processor.decode(segment), self._contents[token_id]]
                segment = []
            elif 0 <= token_id < self._n_pieces:
                segment.append(token_id)
            else:
                raise unknown_id(token_id)
        return "".join([*parts, self._processor.decode(segment)])

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._contents:
            return self._contents[token_id].encode()
        if not 0 <= token_id < self._n_pieces:
            raise unknown_id(token_id)
        if self._processor.is_byte(token_id):
            return bytes.fromhex(self._processor.id_to_piece(token_id)[3:5])  # <0xE2>
        return self._processor.id_to_piece(token_id).replace("▁", " ").encode()

    def _segments(self, text: str) -> Iterator[tuple[int | None, str]]:
        check_utf8(text)
        return cut_out(text, self._special_pattern, self._special_ids)


def _ends(offsets: list[tuple[int, int]], size: int) -> list[int]:
    """Where each token of a segment ends, so that a mask of bytes picks the right tokens.

    Args:
        offsets: (begin, end) of each token in bytes of the segment, as sentencepiece says. Tokens in which none of the
            text stands, such as the added leading space and all but the last byte of a character that is spelled in
            bytes, are empty and stand where the next token that is not begins.
        size: bytes of the segment.

    Returns:
        One end per token, none lower than the one before; the last is `size`.

    An empty token would be in no mask, so each takes a byte of the token that has the text: bytes of a character get
    one each. Where those do not suffice, as for a character that stands for many, several end at its last byte but one,
    inside of the character, where a mask that has the character has them too.
    """
    ends = [end for _, end in offsets]
    first = 0  # of the tokens since the last that has text
    for last, (begin, end) in enumerate(offsets):
        if begin < end:
            for i in range(first, last):
                ends[i] = begin + min(i - first + 1, max(end - begin - 1, 1))
            first = last + 1
    if ends:
        ends[-1] = size
    return ends


def _special_ids(config_file: Path, pieces: list[_Piece], added: list[AddedToken]) -> dict[str, int]:
    """Ids of all tokens that are cut out of a text."""
    special = {piece: i for i, (piece, kind) in enumerate(pieces) if kind in (_CONTROL, _USER_DEFINED)}
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    for token in added:
        if not token.content or not 0 <= token.id < 2**31 or ids.setdefault(token.content, token.id) != token.id:
            raise UserError(
                f"{config_file}: the added token {token.content!r} has id {token.id}: it is empty or listed twice, the "
                f"model has it under another id, or the id is not one of 0 to 2^31 - 1; use the config that came with "
                f"the model"
            )
        if token.id < len(pieces) and pieces[token.id][0] != token.content:
            replaced, kind = pieces[token.id]
            if kind not in (_CONTROL, _USER_DEFINED, _UNUSED):  # those are there to be given a meaning
                raise UserError(
                    f"{config_file}: the added token {token.content!r} has the id {token.id}, which is the model's "
                    f"piece {replaced!r}; use the config that came with the model"
                )
            special.pop(replaced, None)
        special[token.content] = token.id
    return special


def _load(file: Path, model: bytes) -> SentencePieceProcessor:
    if not hasattr(SentencePieceProcessor, "encode_as_offset_mapping"):
        raise UserError(f"{file}: needs a newer sentencepiece; run: pip install 'sentencepiece>=0.2.3'")
    processor = SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).strip() or type(error).__name__
        raise UserError(
            f"{file}: neither a sentencepiece model nor a tiktoken rank file ({reason}); download it again"
        ) from error
    return processor


def _read_pieces(file: Path, model: bytes) -> list[_Piece]:
    """Texts and types of all pieces, by id: sentencepiece tells which are user-defined only in the protobuf.

    The two fields are read here because the generated code that comes with sentencepiece runs under the newest protobuf
    library only.
    """
    pieces: list[_Piece] = []
    try:
        for field, value in _fields(model):
            if field == 1 and isinstance(value, bytes):  # ModelProto.pieces
                piece = dict(_fields(value))
                pieces.append((piece[1].decode(), piece.get(3, _NORMAL)))  # type: ignore[union-attr, arg-type]
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        raise UserError(f"{file}: not a sentencepiece model ({error!r}); download it again") from error
    return pieces


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protobuf message; fixed-size values are passed over."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield field, value
        elif kind == _LENGTH_DELIMITED:
            size, position = _varint(message, position)
            yield field, message[position : position + size]
            position += size
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            position += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"wire type {kind}")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number that begins at a position, seven bits a byte, and the position behind it."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
