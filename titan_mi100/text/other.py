"""Tokenizers that are not HF's byte-level BPE as Qwen's, through their own libraries; and tiktoken's rank files."""

import base64
import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_plain
from titan_mi100.text.base import AddedToken, Tokenizer, TokenizerConfig
from titan_mi100.text.bpe import BpeTokenizer, byte_characters

Spans = list[tuple[int, int]]  # of each token the bytes [begin, end) of the text that it stands for

# The tokens behind a rank file's ranks where no config says it: the first three, or all if the ranks are Qwen3's.
_QWEN3_RANKS, _QWEN3_SPECIAL = 151_643, 14  # the number of ranks, and how many of the added tokens are special
_QWEN3_ADDED = re.findall(
    r"\S+",
    """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>""",
)
_NEVER_IN_UTF8 = [bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
_BASE64 = b"[A-Za-z0-9+/]"
_RANK_LINE = re.compile(rb"((?:%b{4})*(?:%b{2}==|%b{3}=)?)[ \t]+([0-9]{1,10})[ \t\r]*" % (_BASE64, _BASE64, _BASE64))


class _WithSpans(Tokenizer):
    """A tokenizer whose library says for which bytes of a text each token stands."""

    @abstractmethod
    def _encode_with_spans(self, segment: str) -> tuple[list[int], Spans]: ...

    def _encode_segment(self, segment: str) -> list[int]:
        return self._encode_with_spans(segment)[0]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As for every tokenizer. Text that leaves no token, such as spaces that are dropped, goes to the next token of
        its segment, or to its last one; a segment that leaves none goes to the added token behind it."""
        ids: list[int] = []
        ends: list[int] = []
        done = 0
        for token_id, segment in self._segments(text):
            size = len(segment.encode())
            new, spans = self._encode_with_spans(segment) if token_id is None else ([token_id], [(0, size)])
            ids += new
            ends += [done + end for end in _ends(spans, size)]
            done += size
        return np.array(ids, dtype=np.int32), np.array([*ends[:-1], done][: len(ends)], dtype=np.int64)


def _ends(spans: Spans, size: int) -> list[int]:
    """Where each token of a segment of `size` bytes ends, so that a mask of bytes picks the right tokens.

    Several tokens can stand for one character (its bytes, or letters that it is normalised to), and one for nothing (an
    added leading space), which is taken as standing for the next one's text. A token that ended where it starts would
    be in no mask, so those that share a character get a byte of it each. Where these do not suffice, the first end
    behind its first byte, inside of the character, where a mask that has the character has them too.
    """
    ends = [size] * len(spans)
    for i in range(len(spans) - 2, -1, -1):
        if spans[i][0] == spans[i][1]:
            spans[i] = spans[i + 1]
        end, begin = spans[i][1], spans[i + 1][0]
        ends[i] = max(begin + 1, min(end, ends[i + 1] - 1)) if begin < end else end
    return ends


class HfTokenizer(_WithSpans):
    """Any other `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, file: Path, definition: dict[str, Any], config: TokenizerConfig) -> None:
        try:
            import tokenizers  # an extra: only these files need it
        except ImportError:
            raise UserError(
                f"{file}: is not byte-level BPE as Qwen's, so it needs the tokenizers library, which is not installed; "
                f"run: pip install 'titan_mi100[tokenizers]'"
            ) from None
        if definition["model"].get("dropout"):
            raise UserError(f"{file}: model.dropout draws the ids of a text at random; set it to null")
        # Nothing is to be added to a text, or trimmed off its offsets.
        definition = {**definition, "truncation": None, "padding": None, "post_processor": None}
        try:
            self._library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises no class of its own
            raise UserError(f"{file}: the tokenizers library cannot read it ({error}); download it again") from error
        vocab = self._library.get_vocab(with_added_tokens=True)
        added = {entry["content"]: entry["id"] for entry in definition.get("added_tokens", [])}
        if len(set(vocab.values())) != len(vocab) or not added.items() <= vocab.items():
            odd = sorted(added.items() - vocab.items()) or "two tokens"
            raise UserError(f"{file}: {odd} cannot have the id that the file says; download it again")
        parts = [definition.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
        decoder = json.dumps(definition.get("decoder"))
        self._added = set(added.values())
        fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        super().__init__(self._spell(file, vocab, added, decoder), {}, config.ends(added), fingerprint)

    def _spell(self, file: Path, vocab: dict[str, int], added: dict[str, int], decoder: str) -> dict[int, bytes]:
        if '"ByteLevel"' in decoder:
            byte_of = {character: bytes([byte]) for byte, character in enumerate(byte_characters())}
            if missing := [b for c, b in byte_of.items() if c not in vocab and b not in _NEVER_IN_UTF8]:
                raise UserError(f"{file}: no token is the byte {missing[0]!r}, so text would be lost; use a whole file")
            spelled = {i: b"".join(byte_of.get(c, c.encode()) for c in token) for token, i in vocab.items()}
        else:
            # By the library; behind itself, because many decoders take a space from a text's beginning.
            once = self._library.decode_batch([[i] for i in vocab.values()], skip_special_tokens=False)
            twice = self._library.decode_batch([[i, i] for i in vocab.values()], skip_special_tokens=False)
            spelled = {i: b.removeprefix(a).encode() for i, a, b in zip(vocab.values(), once, twice, strict=True)}
        if '"ByteFallback"' in decoder:
            bytes_of = ((f"<0x{byte:02X}>", bytes([byte])) for byte in range(256))
            spelled |= {vocab[token]: byte for token, byte in bytes_of if token in vocab}
        return spelled | {token_id: content.encode() for content, token_id in added.items()}

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(map(int, ids))
        for token_id in ids:
            self.token_bytes(token_id)  # refuses what the library would pass over
        return self._library.decode(ids, skip_special_tokens=False)

    def _encode_segment(self, segment: str) -> list[int]:
        return self._run(segment, with_offsets=False).ids  # on long pieces the offsets take quadratic time

    def _run(self, segment: str, with_offsets: bool) -> Any:
        try:
            return self._library.encode(segment) if with_offsets else self._library.encode_batch_fast([segment])[0]
        except Exception as error:  # a character that is not in the vocabulary of a model without unknown token
            raise UserError(f"the tokenizers library cannot encode a text: {error}") from error

    def _encode_with_spans(self, segment: str) -> tuple[list[int], Spans]:
        encoding = self._run(segment, with_offsets=True)
        code_points = np.frombuffer(segment.encode("utf-32-le"), dtype="<u4")
        sizes = np.searchsorted([0x80, 0x800, 0x10000], code_points, side="right") + 1  # of the characters in UTF-8
        bounds = np.concatenate(([0], np.cumsum(sizes))).tolist()
        spans = [(bounds[begin], bounds[end]) for begin, end in encoding.offsets]
        for i in range(1, len(spans)):  # dropped spaces in front of an added token are not its own
            if encoding.ids[i] in self._added and encoding.ids[i - 1] not in self._added:
                spans[i - 1] = (spans[i - 1][0], max(spans[i - 1][1], spans[i][0]))
        return encoding.ids, spans


class SentencePieceTokenizer(_WithSpans):
    """Special tokens are cut out of the text first, the longest first; each segment between them is encoded by itself.

    Special are the model's control and user-defined pieces, and the `added_tokens_decoder` of the config, by the ids
    that it states. Nothing is added to a text but what the model adds to each segment, such as its leading space.
    """

    def __init__(self, file: Path, config: TokenizerConfig) -> None:
        from sentencepiece import SentencePieceProcessor  # only these files need it

        if not hasattr(SentencePieceProcessor, "encode_as_offset_mapping"):
            raise UserError(f"{file}: needs a newer sentencepiece; run: pip install 'sentencepiece>=0.2.3'")
        model, library = read_plain(file), SentencePieceProcessor()
        try:
            library.load_from_serialized_proto(model)
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(
                f"{file}: neither a sentencepiece model nor a tiktoken rank file ({error}); download it again"
            ) from error
        pieces = {library.id_to_piece(i): i for i in range(library.piece_size())}
        user_defined = set(_user_defined(model))
        special = {i: piece for piece, i in pieces.items() if i in user_defined or library.is_control(i)}
        free = {i for i in pieces.values() if i in special or library.is_unused(i)}
        special |= {token.id: token.content for token in config.added(pieces, free)}
        spelled = {
            i: bytes.fromhex(piece[3:5]) if library.is_byte(i) else piece.replace("▁", " ").encode()
            for piece, i in pieces.items()
        }
        spelled |= {token_id: content.encode() for token_id, content in special.items()}
        ids = {content: token_id for token_id, content in special.items()}
        self._library, self._contents = library, special
        digest = hashlib.sha256(model + json.dumps(sorted(ids.items())).encode())
        ends = config.ends(ids, special.get(library.eos_id(), ""), special.get(library.pad_id(), ""))
        super().__init__(spelled, ids, ends, digest.hexdigest())

    def decode(self, ids: Iterable[int]) -> str:
        """As for every tokenizer; the text is as sentencepiece normalises it, and unknown pieces are its " ⁇ "."""
        parts: list[str] = []
        segment: list[int] = []
        for token_id in map(int, ids):
            self.token_bytes(token_id)  # refuses unknown ids
            if token_id in self._contents:
                parts += [self._library.decode(segment), self._contents[token_id]]
                segment = []
            else:
                segment.append(token_id)
        return "".join([*parts, self._library.decode(segment)])

    def _encode_with_spans(self, segment: str) -> tuple[list[int], Spans]:
        mapping = self._library.encode(segment, return_type="offset_mapping", return_bytes=True)
        return mapping["ids"], list(mapping["offsets"])


def _user_defined(model: bytes) -> Iterator[int]:
    """Ids of the user-defined pieces, read from the protobuf: the processor does not tell, and the generated code that
    comes with sentencepiece runs under the newest protobuf library only."""

    def number(at: int) -> tuple[int, int]:
        """The varint that begins at `at`, and the position behind it."""
        more, behind = number(at + 1) if model[at] >= 0x80 else (0, at + 1)
        return (model[at] & 0x7F) + (more << 7), behind

    token_id = at = 0
    while at < len(model):  # fields of ModelProto, each a tag, a length and so many bytes
        size, begin = number(at + 1)
        if model[at] == 0x0A:  # field 1, a piece: text, then score (5 bytes, may be missing), then type
            length, text = number(begin + 1)
            rest = model[text + length : begin + size]
            if len(rest) in (2, 7) and rest[-2:] == b"\x18\x04":  # USER_DEFINED
                yield token_id
            token_id += 1
        at = begin + size


def is_rank_file(file: Path) -> bool:
    """Whether a file begins as a rank file does, whatever its name: Llama 3 calls its own `tokenizer.model`."""
    return _RANK_LINE.fullmatch(read_plain(file).split(b"\n", 1)[0]) is not None


def read_rank_file(file: Path, config: TokenizerConfig) -> BpeTokenizer:
    """A tiktoken rank file: lines of a token in base64 and its rank, which is its id.

    The file says neither how text is split nor what else there is. What the config leaves open is as Qwen has it:
    Qwen2's pattern, the tokens of a chat, eos <|im_end|>, pad <|endoftext|>. Rank files know no normaliser, so text
    stays as it is, unless the config says `tokenizer_class` Qwen2Tokenizer, which puts it in NFC.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_plain(file).split(b"\n"), start=1):
        match = _RANK_LINE.fullmatch(line)
        token = base64.b64decode(match[1]) if match else b""
        if line.strip() and (not match or not token or token in ranks):
            shown = line[:60].decode(errors="replace")
            raise UserError(f"{file}:{number}: {shown!r} is not a new token in base64 and its rank; download it again")
        if match:
            ranks[token] = int(match[2])
    odd = [f"no token is the byte 0x{byte:02X}" for byte in range(256) if bytes([byte]) not in ranks]
    odd += [f"rank {i} is missing or there twice" for i, rank in enumerate(sorted(ranks.values())) if i != rank]
    if odd:
        raise UserError(f"{file}: {odd[0]}, so the file is not whole; download it again")
    if digits := [token for token in ranks if re.search(rb"[0-9]{2}", token)]:
        raise UserError(
            f"{file}: has the token {digits[0].decode(errors='replace')!r}, but Qwen splits numbers into digits: "
            f"these are the ranks of another model family, which splits text otherwise; use a Qwen tokenizer's files"
        )
    added = config.added({token.decode(errors="backslashreplace"): rank for token, rank in ranks.items()})
    behind = [token.id for token in added if token.id >= len(ranks)]
    if behind and behind[0] != len(ranks):  # a rank file that is cut off at a line's end looks whole otherwise
        where = f"the added tokens begin at id {behind[0]}, but {file.name} has {len(ranks)} ranks"
        raise UserError(f"{config.file}: {where}; download both files again")
    eos, pad = ("", "") if added else ("<|im_end|>", "<|endoftext|>")
    for i, content in enumerate([] if added else _QWEN3_ADDED[: None if len(ranks) == _QWEN3_RANKS else 3], len(ranks)):
        added.append(AddedToken(i, content, normalized=False, special=i < len(ranks) + _QWEN3_SPECIAL))
    ends = config.ends({token.content: token.id for token in added}, eos, pad)
    single = {bytes([byte]): ranks[bytes([byte])] for byte in range(256)}
    by_rank = {token: rank for token, rank in sorted(ranks.items(), key=lambda item: item[1]) if len(token) > 1}
    return BpeTokenizer(single | by_rank, added, config.is_qwen2(), ends)
