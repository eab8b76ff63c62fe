"""What every tokenizer offers, and what a `tokenizer_config.json` says. Knows none of the engines."""

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object

Segments = Iterator[tuple[int | None, str]]  # added tokens (id, text) and the text between them (None, text)


class Tokenizer(ABC):
    """Text to token ids and back. `text.load.load_tokenizer` builds the right kind. Instances can be pickled.

    Methods raise UserError for a text with a lone surrogate, which no UTF-8 can hold, and for an unknown id.
    """

    eos_token: str
    eos_token_id: int
    pad_token_id: int
    n_vocab: int  # one more than the highest id
    fingerprint: str  # of everything that decides the ids of a text; the eos and pad tokens are not in it

    def __init__(
        self, spelled: dict[int, bytes], cut: Mapping[str, int], ends: tuple[str, int, int], fingerprint: str
    ) -> None:
        """`spelled`: what each token spells; `cut`: tokens to cut out of texts; `ends`: see `TokenizerConfig.ends`."""
        self._bytes, self._words, self.fingerprint = spelled, Words(cut), fingerprint
        self.eos_token, self.eos_token_id, self.pad_token_id = ends
        self.n_vocab = max(spelled) + 1

    def encode(self, text: str) -> list[int]:
        """The ids that the tokenizer's own library gives: added tokens in the text recognised, nothing added to it."""
        ids: list[int] = []
        for token_id, segment in self._segments(text):
            ids += self._encode_segment(segment) if token_id is None else (token_id,)
        return ids

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and where each token ends.

        Returns:
            ids, int32, and ends, int64, both `(tokens,)`: token i ends before byte `ends[i]` of the UTF-8 of
            `normalize(text)`. Ends never decrease and the last is the text's; a token can end inside a character.
        """

    def normalize(self, text: str) -> str:
        """The text in which `encode_with_offsets` counts: put in NFC by tiktoken's kind where its files say so."""
        return "".join(segment for _, segment in self._segments(text))

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, added tokens included; bytes that are not UTF-8, as of a cut character, become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token spells, maybe a part of a character."""
        if token_id not in self._bytes:
            raise UserError(f"token id {token_id} is not in the tokenizer's vocabulary; is this its own data?")
        return self._bytes[token_id]

    def end_ids(self) -> list[int]:
        """Ids that end what a model says: the end of a turn, and `<|endoftext|>` where that is one token."""
        text_end = self.encode("<|endoftext|>")
        return list(dict.fromkeys([self.eos_token_id, *(text_end if len(text_end) == 1 else [])]))

    def _segments(self, text: str) -> Segments:
        """The parts of a text that are encoded each by itself."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start} of the text is a lone surrogate ({text[error.start]!r}), which UTF-8 "
                f"cannot hold; remove it or replace it by U+FFFD"
            ) from error
        return self._words.cut_out(text)

    @abstractmethod
    def _encode_segment(self, segment: str) -> list[int]: ...


class Words:
    """Words that are cut out of texts: the leftmost first, and of several there the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        longest_first = sorted(ids, key=len, reverse=True)
        self._ids, self._pattern = ids, re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def cut_out(self, text: str) -> Segments:
        """The words and what lies between them; nothing empty."""
        done = 0
        for match in self._pattern.finditer(text):
            if match.start() > done:
                yield None, text[done : match.start()]
            yield self._ids[match.group()], match.group()
            done = match.end()
        if done < len(text):
            yield None, text[done:]


@dataclass(frozen=True)
class AddedToken:
    """A token that is cut out of the text first; `normalized` ones are looked for after the normaliser."""

    id: int
    content: str
    normalized: bool
    special: bool
    flag: str = ""  # a flag that is set and that only the `tokenizers` library knows

    @staticmethod
    def read(entry: dict[str, Any]) -> "AddedToken":
        """An entry of a tokenizer.json's `added_tokens`, with HF's own defaults."""
        if not isinstance(entry["content"], str):
            raise TypeError(f"the added token {entry['id']} is {entry['content']!r}")
        special = bool(entry.get("special", False))
        flag = next((flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)), "")
        return AddedToken(entry["id"], entry["content"], bool(entry.get("normalized", not special)), special, flag)


@dataclass(frozen=True)
class TokenizerConfig:
    """A `tokenizer_config.json`; one that is not there is empty."""

    file: Path
    content: dict[str, Any]

    @staticmethod
    def read(file: Path, needed: bool) -> "TokenizerConfig":
        missing = "copy the checkpoint's tokenizer files to that folder"
        return TokenizerConfig(file, read_object(file, missing) if needed or file.is_file() else {})

    def ends(self, ids: Mapping[str, int], eos: str = "", pad: str = "") -> tuple[str, int, int]:
        """The eos token, its id, and the id of the pad token, which is the eos token's where there is none.

        Args:
            ids: the tokens that these can be.
            eos, pad: the model's own, where the config names none.
        """
        names = []
        for key, default in (("eos_token", eos), ("pad_token", pad)):
            token = self.content.get(key)
            name = (token.get("content") if isinstance(token, dict) else token) or default
            if not isinstance(name, str) or (name and name not in ids):
                raise UserError(f"{self.file}: {key} {name!r} is not the name of an added or special token; name one")
            names.append(name)
        if not names[0]:
            raise UserError(f"{self.file}: eos_token is missing; name the token that ends a turn, such as <|im_end|>")
        return names[0], ids[names[0]], ids[names[1] or names[0]]

    def added_entries(self) -> list[dict[str, Any]]:
        """`added_tokens_decoder` as a tokenizer.json has it, by rising id."""
        with laid_out(self.file):
            entries = [{**entry, "id": int(key)} for key, entry in self.content.get("added_tokens_decoder", {}).items()]
            return sorted(entries, key=lambda entry: entry["id"])

    def added(self, names: Mapping[str, int], free: Container[int] = ()) -> list[AddedToken]:
        """`added_tokens_decoder`, checked against the model's own tokens, of which `free` ones may get another name."""
        ids, name_of = dict(names), {token_id: name for name, token_id in names.items()}
        with laid_out(self.file):
            added = [AddedToken.read(entry) for entry in self.added_entries()]
        for token in added:
            number = ids.setdefault(token.content, token.id)
            name = token.content if token.id in free else name_of.get(token.id, token.content)
            wrong = (
                (not token.content and "is empty")
                or (token.flag and f"has {token.flag}, which needs a tokenizer.json")
                or (not 0 <= token.id < 2**31 and "is not numbered from 0 to 2^31 - 1")
                or (number != token.id and f"has also id {number}")
                or (name != token.content and f"takes the id of the model's {name!r}")
            )
            if wrong:
                what = f"the added token {token.content!r}, id {token.id}, {wrong}"
                raise UserError(f"{self.file}: {what}; use the config that came with the model")
        return added

    def is_qwen2(self) -> bool:
        """Whether it names the class that splits text by Qwen2's pattern and puts it in NFC."""
        return self.content.get("tokenizer_class") in ("Qwen2Tokenizer", "Qwen2TokenizerFast")


@contextmanager
def laid_out(file: Path) -> Iterator[None]:
    """Turn the errors of reading a file, or values of the wrong kind in it, into a `UserError` about it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: not there or not laid out as it should be ({what}); download it again") from error
