"""What every tokenizer offers, and what a `tokenizer_config.json` says. Knows none of the engines."""

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.errors import UserError

Segments = Iterator[tuple[int | None, str]]  # added tokens (id, text) and the text between them (None, text)
Ends = tuple[str, int, int]  # the eos token, its id, and the id of the pad token


class Tokenizer(ABC):
    """Text to token ids and back. `text.load.load_tokenizer` builds the right kind. Instances can be pickled.

    Methods raise UserError for a text with a lone surrogate, which no UTF-8 can hold, and for an unknown id.
    """

    warning = ""  # what a user of these files should know

    def __init__(self, spelled: dict[int, bytes], cut: Mapping[str, int], ends: Ends, fingerprint: str) -> None:
        """`spelled`: what each token of the model spells; `cut`: the added tokens, which are cut out of a text first,
        the leftmost first and of several there the longest; `fingerprint`: of everything that decides the ids of a
        text, which the eos and pad tokens do not."""
        self._bytes, self._cut, self.fingerprint = spelled | {i: t.encode() for t, i in cut.items()}, cut, fingerprint
        longest_first = map(re.escape, sorted(cut, key=len, reverse=True))
        self._cut_pattern = re.compile(f"({'|'.join(longest_first) or '(?!)'})")
        self.eos_token, self.eos_token_id, self.pad_token_id = ends
        self.n_vocab = max(self._bytes) + 1  # one more than the highest id

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

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, added tokens included; bytes that are not UTF-8, as of a cut character, become U+FFFD."""
        ids = list(map(int, ids))
        return self._decode(ids, b"".join(map(self.token_bytes, ids)))

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
        """The parts of a text that are encoded each by itself; none is empty."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = "a lone surrogate, which UTF-8 cannot hold; remove it or replace it by U+FFFD"
            raise UserError(f"character {error.start} of the text is {what}") from error
        for i, part in enumerate(self._cut_pattern.split(text)):  # every second part is an added token
            if part:
                yield self._cut[part] if i % 2 else None, part

    @abstractmethod
    def _encode_segment(self, segment: str) -> list[int]: ...

    def _decode(self, ids: list[int], spelled: bytes) -> str:
        """The text of known ids, which spell these bytes."""
        return spelled.decode("utf-8", errors="replace")


QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")  # they split text by Qwen2's pattern and put it in NFC


def class_of(config: Mapping[str, Any]) -> str:
    """The class that a tokenizer_config.json names; Qwen3's own where it names none, as in `transformers`."""
    return config.get("tokenizer_class") or QWEN2_CLASSES[0]


def spelling(token: Any) -> Any:
    """Of a token as configs have it, a text or an object with its flags."""
    return token["content"] if isinstance(token, dict) else token


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens with a name of their own in a tokenizer_config.json, which are variables of its chat template."""
    own = dict.fromkeys(("unk_token", "pad_token"), "<|endoftext|>") if class_of(config) in QWEN2_CLASSES else {}
    named = {key: value for key, value in {**own, **config}.items() if key.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        named |= config[key] if isinstance(config.get(key), dict) else {}
    return {key: spelling(value) for key, value in named.items() if isinstance(value, str | dict)}


class AddedToken(NamedTuple):
    """A token that is cut out of the text first; `normalized` ones are looked for after the normaliser."""

    id: int
    content: str
    normalized: bool
    special: bool
    plain: bool = True  # it is a text that is not empty, and has no flag that only the `tokenizers` library knows

    @staticmethod
    def read(entry: dict[str, Any]) -> "AddedToken":
        """An entry of a tokenizer.json's `added_tokens`, with HF's own defaults."""
        content, special = entry["content"], bool(entry.get("special", False))
        plain = isinstance(content, str) and content and not any(map(entry.get, ("lstrip", "rstrip", "single_word")))
        return AddedToken(entry["id"], content, bool(entry.get("normalized", not special)), special, bool(plain))


class TokenizerConfig(NamedTuple):
    """A `tokenizer_config.json`; one that is not there is empty."""

    file: Path
    content: dict[str, Any]

    def ends(self, ids: Mapping[str, int], eos: str = "", pad: str = "") -> Ends:
        """The eos token, its id, and the id of the pad token, which is the eos token's where there is none. `ids`: the
        tokens that these can be; `eos`, `pad`: the model's own, where the config names none."""
        names = [""]
        for key, default in (("eos_token", eos), ("pad_token", pad)):
            names.append(spelling(self.content.get(key)) or default or names[-1])
            if names[-1] not in list(ids):  # a list, because a name can be anything
                raise UserError(f"{self.file}: {key} {names[-1]!r} is no added or special token; name one")
        return names[1], ids[names[1]], ids[names[2]]

    def entries(self) -> list[dict[str, Any]]:
        """`added_tokens_decoder` as a tokenizer.json has it, by rising id."""
        decoder = self.content.get("added_tokens_decoder", {})
        return sorted(({**entry, "id": int(key)} for key, entry in decoder.items()), key=lambda entry: entry["id"])

    def added(self, names: Mapping[str, int], free: Container[int] = ()) -> list[AddedToken]:
        """`added_tokens_decoder`, checked against the model's own tokens, of which `free` ones may get another name."""
        ids, name_of = dict(names), {token_id: name for name, token_id in names.items() if token_id not in free}
        added = list(map(AddedToken.read, self.entries()))
        for token in added:
            fits = ids.setdefault(token.content, token.id) == token.id and 0 <= token.id < 2**31
            if not fits or not token.plain or name_of.setdefault(token.id, token.content) != token.content:
                what = f"the added token {token.content!r}: it or its id {token.id} is another's or out of range, or it"
                what += " is empty or has lstrip, rstrip or single_word, which need a tokenizer.json"
                raise UserError(f"{self.file}: {what}; use the config that came with the model")
        return added
