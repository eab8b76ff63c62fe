"""Text to token ids and back: an HF folder, a tiktoken rank file or a sentencepiece model behind one interface.

HF folders and rank files are run by tiktoken. Of HF folders the ids are those that the `tokenizers` library gives, or
there is a refusal that says why. Three things differ between the two libraries and are handled: which pairs may merge
(`tokenizer_definition.find_inexact_merge`), the Unicode version behind NFC (`_UNKNOWN_TO_HF_NFC`), and very long runs
of spaces (`BpeTokenizer._encode_ordinary`).
"""

import hashlib
import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np
import tiktoken

from titan_mi100.errors import UserError
from titan_mi100.plain_file import plain_path
from titan_mi100.rank_file import is_rank_file, read_rank_file
from titan_mi100.tokenizer_definition import GPT2_PATTERN, QWEN2_PATTERN, BpeDefinition, read_hf_folder

# Unicode's White_Space, which is what \s means to both regex engines; Python's own \s adds U+001C to U+001F.
_INLINE_SPACE = "\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

# Of each pattern, the characters of which `\s+(?!\S)` matches a long run: Qwen2's `\s*[\r\n]+` comes first and ends a
# piece after a run's last line break, so its run holds none.
_SPACE_RUNS = {QWEN2_PATTERN: _INLINE_SPACE, GPT2_PATTERN: _INLINE_SPACE + "\r\n"}
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

_FILE_KINDS = (".tiktoken", ".model")


class Tokenizer(ABC):
    """Text to token ids and back. `load_tokenizer` builds the right kind.

    Instances can be pickled, so that data loader workers can have one.
    """

    eos_token: str
    eos_token_id: int
    pad_token_id: int
    n_vocab: int  # one more than the highest id
    fingerprint: str  # of all that decides the ids of a text; eos and pad token are not in it

    @staticmethod
    def from_folder(path: str | Path) -> "Tokenizer":
        """The tokenizer of an HF folder, by `tokenizer.json`, or `vocab.json` with `merges.txt`.

        Args:
            path: a local folder as `save_pretrained` or a download of a Qwen3 checkpoint leaves it.

        Returns:
            A tokenizer whose ids equal those of the `tokenizers` library on any text.

        Raises:
            UserError: a file is missing or malformed, or says something that tiktoken cannot reproduce exactly.
        """
        return BpeTokenizer(read_hf_folder(Path(path)))

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, added tokens in it recognised, nothing added.

        Args:
            text: any text.

        Returns:
            The ids that the tokenizer's own library gives.

        Raises:
            UserError: the text holds a lone surrogate, which no UTF-8 text can.
        """

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and where each token ends.

        Args:
            text: any text.

        Returns:
            ids, int32, and ends, int64, both `(tokens,)`: token i ends before byte `ends[i]` of the UTF-8 of
            `normalize(text)`. Ends never fall and the last is the text's; a token can end inside a character.

        Raises:
            UserError: as `encode`.
        """

    @abstractmethod
    def normalize(self, text: str) -> str:
        """The text in which `encode_with_offsets` counts.

        Args:
            text: any text.

        Returns:
            BPE: the text that the tokens spell, in NFC where the files ask for it, between added tokens; an added token
            never composes with what follows it. Sentencepiece: the text itself.

        Raises:
            UserError: as `encode`.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, added tokens included.

        Args:
            ids: token ids.

        Returns:
            The text; bytes that are not UTF-8, as a cut inside a character leaves, become U+FFFD.

        Raises:
            UserError: an id is not in the vocabulary.
        """

    def end_ids(self) -> list[int]:
        """Ids that end what a model says: of a turn, and `<|endoftext|>` where that is one token."""
        text_end = self.encode("<|endoftext|>")
        return list(dict.fromkeys([self.eos_token_id, *(text_end if len(text_end) == 1 else [])]))

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What a token spells, maybe a part of a character. Raises UserError: the id is not in the vocabulary."""


class BpeTokenizer(Tokenizer):
    """Byte-level BPE, run by tiktoken."""

    def __init__(self, definition: BpeDefinition) -> None:
        by_content = {token.content: token.id for token in definition.added}
        for key, name in (("eos_token", definition.eos_token), ("pad_token", definition.pad_token)):
            if name is not None and name not in by_content:
                raise UserError(
                    f"{definition.file}: {key} {name!r} of tokenizer_config.json is not among the added tokens; "
                    f"add it there, or name one that is"
                )
        self.eos_token = definition.eos_token
        self.eos_token_id = by_content[definition.eos_token]
        self.pad_token_id = self.eos_token_id if definition.pad_token is None else by_content[definition.pad_token]
        self.fingerprint = _fingerprint(definition)

        self._nfc = definition.nfc
        self._raw_ids = {t.content: t.id for t in definition.added if not t.normalized}
        self._normalized_ids = {self._normalize(t.content): t.id for t in definition.added if t.normalized}
        self._raw_pattern = any_of(self._raw_ids)
        self._normalized_pattern = any_of(self._normalized_ids)
        run = _SPACE_RUNS[definition.pattern]
        self._long_run = re.compile(f"(?<![{run}])[{run}]{{{_LONG_RUN},}}")

        ranks = dict(zip(definition.tokens, definition.ids.tolist(), strict=True))
        # No special tokens: of two that start alike tiktoken would take either, HF takes the longer.
        self._bpe = tiktoken.Encoding(
            "titan_mi100", pat_str=definition.pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self._bytes = dict(zip(ranks.values(), definition.tokens, strict=True))
        self._bytes.update((token.id, token.content.encode()) for token in definition.added)
        self.n_vocab = max(self._bytes) + 1
        # What a token takes up in the normalised text. An unused id keeps 0; no text encodes to it.
        self._byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        self._byte_lengths[list(self._bytes)] = [len(token) for token in self._bytes.values()]
        for content, token_id in self._normalized_ids.items():
            self._byte_lengths[token_id] = len(content.encode())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for token_id, segment in self._segments(text):
            if token_id is None:
                ids += self._encode_ordinary(segment)
            else:
                ids.append(token_id)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(self.encode(text), dtype=np.int32)
        return ids, np.cumsum(self._byte_lengths[ids])

    def normalize(self, text: str) -> str:
        return "".join(segment for _, segment in self._segments(text))

    def decode(self, ids: Iterable[int]) -> str:
        try:
            return b"".join([self._bytes[token_id] for token_id in ids]).decode("utf-8", errors="replace")
        except KeyError as error:
            raise unknown_id(error) from error

    def token_bytes(self, token_id: int) -> bytes:
        if token_id not in self._bytes:
            raise unknown_id(token_id)
        return self._bytes[token_id]

    def _segments(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Added tokens (id, text) and, between them, what is left to BPE (None, normalised text): HF's two passes."""
        check_utf8(text)
        for raw_id, segment in cut_out(text, self._raw_pattern, self._raw_ids):
            if raw_id is not None:
                yield raw_id, segment
            else:
                yield from cut_out(self._normalize(segment), self._normalized_pattern, self._normalized_ids)

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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder or a file, told apart by name and content.

    Args:
        path: an HF folder, with `tokenizer.json` or with `vocab.json` and `merges.txt`; or a folder with exactly one
            `.tiktoken` or `.model` file instead; or such a file. A `.model` file is a sentencepiece model or, as
            Llama 3 has it, a tiktoken rank file. The `tokenizer_config.json` beside a file goes with it.

    Returns:
        A `BpeTokenizer` (see `read_hf_folder` and `read_rank_file`) or a `SentencePieceTokenizer`.

    Raises:
        UserError: there is no such tokenizer, or a file of it is malformed or cannot be reproduced exactly.
    """
    file = _definition_file(Path(path))
    if file.suffix not in _FILE_KINDS:
        return Tokenizer.from_folder(file.parent)
    if file.suffix == ".tiktoken" or is_rank_file(file):
        return BpeTokenizer(read_rank_file(file))
    from titan_mi100.sentencepiece_tokenizer import SentencePieceTokenizer  # needs a library that nothing else does

    return SentencePieceTokenizer(file)


def tokenizer_files(path: str | Path) -> list[Path]:
    """The files whose content decides what `load_tokenizer(path)` and the chat template there do. None is read.

    Args:
        path: as for `load_tokenizer`.

    Returns:
        Those that exist: what defines the tokenizer first, then `tokenizer_config.json` and `chat_template.jinja`.

    Raises:
        UserError: there is no tokenizer, or a file of it is a link out of the folder.
    """
    file = _definition_file(Path(path))
    names = [file.name, *(["merges.txt"] if file.name == "vocab.json" else [])]
    files = [file.with_name(name) for name in (*names, "tokenizer_config.json", "chat_template.jinja")]
    found = [file for file in files if file.is_file()]
    for file in found:
        plain_path(file)  # who hashes them must not be led elsewhere
    return found


def _definition_file(path: Path) -> Path:
    """tokenizer.json, else vocab.json, else the only rank file or model of a folder; a rank file or model itself."""
    if path.is_file():
        if path.suffix not in _FILE_KINDS:
            raise UserError(
                f"{path}: not a tokenizer; name a folder with tokenizer.json, or a .tiktoken or .model file"
            )
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; name a tokenizer's folder, or a .tiktoken or .model file")
    for name in ("tokenizer.json", "vocab.json"):
        if (path / name).is_file():
            return path / name
    found = sorted(file for file in path.iterdir() if file.suffix in _FILE_KINDS and file.is_file())
    if len(found) != 1:
        several = f"has {', '.join(file.name for file in found)}; name one of these files instead"
        nothing = (
            "holds no tokenizer: no tokenizer.json, vocab.json with merges.txt, .tiktoken or .model file; copy the "
            "checkpoint's tokenizer files there"
        )
        raise UserError(f"{path}: {several if found else nothing}")
    return found[0]


def check_utf8(text: str) -> None:
    """Refuse a text with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"character {error.start} of the text is a lone surrogate ({text[error.start]!r}), which UTF-8 "
            f"cannot hold; remove it or replace it by U+FFFD"
        ) from error


def unknown_id(token_id: object) -> UserError:
    """What to raise for an id that is not in the vocabulary."""
    return UserError(f"token id {token_id} is not in the tokenizer's vocabulary; is this its own data?")


def cut_out(text: str, pattern: re.Pattern[str], ids: dict[str, int]) -> Iterator[tuple[int | None, str]]:
    """The words that `pattern` finds, with their ids, and what lies between them, with None; nothing empty."""
    done = 0
    for match in pattern.finditer(text):
        if match.start() > done:
            yield None, text[done : match.start()]
        yield ids[match.group()], match.group()
        done = match.end()
    if done < len(text):
        yield None, text[done:]


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest; without words, a pattern that never matches."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)")


def _fingerprint(definition: BpeDefinition) -> str:
    digest = hashlib.sha256(definition.ids.astype("<i8").tobytes())
    digest.update(np.array([len(token) for token in definition.tokens], dtype="<i8").tobytes())
    digest.update(b"".join(definition.tokens))
    added = sorted(astuple(token) for token in definition.added)
    digest.update(json.dumps([added, definition.pattern, definition.nfc]).encode())
    return digest.hexdigest()
