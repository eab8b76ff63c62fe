"""The interface of all tokenizers, and the content of `tokenizer_config.json`. Independent of the engines."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.errors import UserError
from titan_mi100.text.classes import QWEN_CLASSES, class_of

Segments = Iterator[tuple[int | None, str]]  # added tokens (id, text) and the text between them (None, text)
_QUOTE = "\ufdd0"  # a code point that stands for no character
# Tags that are part of what a message says, however the tokenizer marks them.
_OF_CONTENT = {f"<{end}{tag}>" for end in ("", "/") for tag in ("think", "tool_call", "tool_response")}
Ends = tuple[str, int, int]  # the eos token, its id, and the id of the pad token


class Tokenizer(ABC):
    """Converts text to token ids and back. Build it with `text.load.load_tokenizer`. Instances can be pickled.

    Methods raise UserError for a text with a lone surrogate, which UTF-8 cannot hold, and for an unknown id.
    """

    warning = ""  # shown to the user when the tokenizer is used

    def __init__(
        self, spelled: dict[int, bytes], cut: Mapping[str, int], ends: Ends, fingerprint: str, special: Collection[str]
    ) -> None:
        """
        Args:
            spelled: id -> bytes, of the model's own tokens.
            cut: text -> id, of the added tokens. They are cut out of a text before it is encoded: the leftmost first,
                and among several at one place the longest.
            ends: see `Ends`.
            fingerprint: a hash of everything that influences the ids of a text (eos and pad tokens do not).
            special: the added tokens that are marked as special: they structure a text and are no part of it.
        """
        self._bytes, self._cut, self.fingerprint = spelled | {i: t.encode() for t, i in cut.items()}, cut, fingerprint
        longest_first = map(re.escape, sorted(cut, key=len, reverse=True))
        self._cut_pattern = re.compile(f"({'|'.join(longest_first) or '(?!)'})")  # (?!) never matches
        self.eos_token, self.eos_token_id, self.pad_token_id = ends
        self.special = frozenset(special)
        structure = sorted(self.special - _OF_CONTENT, key=len, reverse=True)
        self.marks = re.compile("|".join(map(re.escape, structure)) or "(?!)")  # should not be in a message's text
        self._quoted = re.compile("|".join(map(re.escape, map(self.quoted, structure))) or "(?!)")
        self.n_vocab = max(self._bytes) + 1  # the highest id + 1; ids may have gaps

    def encode(self, text: str) -> list[int]:
        """Token ids, the same as from the tokenizer's own library. Added tokens in the text are recognised.

        No bos or eos token is added.
        """
        ids: list[int] = []
        for token_id, segment in self._segments(text):
            ids += self._encode_segment(segment) if token_id is None else (token_id,)
        return ids

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and the end of each token in the text.

        Returns:
            ids, int32, and ends, int64, both `(tokens,)`. Token i ends before byte `ends[i]` of the UTF-8 of
            `normalize(text)`. Ends never decrease, and the last one is the end of the text. A token can end inside a
            character.
        """

    def quoted(self, text: str) -> str:
        """The text with special tokens in it written such that `encode` takes them as text."""
        return self.marks.sub(lambda mark: mark[0][:1] + _QUOTE + mark[0][1:], text)

    def normalize(self, text: str) -> str:
        """The text whose bytes `encode_with_offsets` counts. BpeTokenizer converts it to NFC if its files say so."""
        return "".join(segment for _, segment in self._segments(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, including added tokens. Invalid UTF-8, such as half a character, becomes U+FFFD."""
        ids = list(map(int, ids))
        return self._decode(ids, b"".join(map(self.token_bytes, ids)))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, possibly a part of a character."""
        if token_id not in self._bytes:
            raise UserError(f"token id {token_id} is not in the vocabulary; were the data made with another tokenizer?")
        return self._bytes[token_id]

    def id_of(self, token: str) -> int:
        """The id of a text that is one token, such as a special token; -1 if it is not."""
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else -1

    def end_ids(self, end_of_turn: str = "") -> list[int]:
        """Ids that end an answer: the end of a turn (see `ChatTemplate.end_of_turn`) if given, the eos token, and
        `<|endoftext|>` if the tokenizer has it as one token.
        """
        ends = self.id_of(end_of_turn), self.eos_token_id, self.id_of("<|endoftext|>")
        return list(dict.fromkeys(token_id for token_id in ends if token_id >= 0))

    def _segments(self, text: str) -> Segments:
        """Split a text into added tokens and the segments between them, which are encoded separately. None is empty."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = "a lone surrogate, which UTF-8 cannot hold; remove it or replace it by U+FFFD"
            raise UserError(f"character {error.start} of the text is {problem}") from error
        for i, part in enumerate(self._cut_pattern.split(text)):  # every second part is an added token (re.split)
            if part:
                plain = self._quoted.sub(lambda mark: mark[0].replace(_QUOTE, ""), part) if _QUOTE in part else part
                yield self._cut[part] if i % 2 else None, plain

    @abstractmethod
    def _encode_segment(self, segment: str) -> list[int]: ...

    def _decode(self, ids: list[int], spelled: bytes) -> str:
        """The text of known ids. Args: spelled: their bytes, concatenated."""
        return spelled.decode("utf-8", errors="replace")


def spelling(token: Any) -> Any:
    """The text of a token in a config, where it is a text or an object with flags."""
    return token["content"] if isinstance(token, dict) else token


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the named tokens (eos_token ...) in tokenizer_config.json. They are variables of the template."""
    own = dict.fromkeys(("unk_token", "pad_token"), "<|endoftext|>") if class_of(config) in QWEN_CLASSES else {}
    named = {key: value for key, value in {**own, **config}.items() if key.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        named |= config[key] if isinstance(config.get(key), dict) else {}
    return {key: spelling(value) for key, value in named.items() if isinstance(value, str | dict)}


class AddedToken(NamedTuple):
    """A token that is cut out of a text before the text is encoded."""

    id: int
    content: str
    normalized: bool  # it is searched for after the normaliser, not before
    special: bool
    plain: bool = True  # a text that is not empty, without flags that only the `tokenizers` library implements

    @staticmethod
    def read(entry: dict[str, Any]) -> "AddedToken":
        """Read an entry of `added_tokens` in tokenizer.json, with HF's defaults."""
        content, special = entry["content"], bool(entry.get("special", False))
        plain = isinstance(content, str) and content and not any(map(entry.get, ("lstrip", "rstrip", "single_word")))
        return AddedToken(entry["id"], content, bool(entry.get("normalized", not special)), special, bool(plain))


class TokenizerConfig(NamedTuple):
    """The content of tokenizer_config.json; empty if the file does not exist."""

    file: Path
    content: dict[str, Any]

    def ends(self, ids: Mapping[str, int], eos: str = "", pad: str = "") -> Ends:
        """The eos token, its id, and the id of the pad token. Without a pad token, the eos token is used for it.

        Args:
            ids: text -> id, of the tokens that are allowed.
            eos, pad: defaults if the config names none.

        Raises:
            UserError: the config names another token.
        """
        names = [""]
        for key, default in (("eos_token", eos), ("pad_token", pad)):
            names.append(spelling(self.content.get(key)) or default or names[-1])
            if names[-1] not in list(ids):  # a list, because a name can be anything
                raise UserError(f"{self.file}: {key} {names[-1]!r} is not an added or special token; name one")
        return names[1], ids[names[1]], ids[names[2]]

    def entries(self) -> list[dict[str, Any]]:
        """`added_tokens_decoder` in the form of tokenizer.json's added_tokens, by ascending id."""
        decoder = self.content.get("added_tokens_decoder", {})
        return sorted(({**entry, "id": int(key)} for key, entry in decoder.items()), key=lambda entry: entry["id"])

    def added(self, names: Mapping[str, int], free: Container[int] = ()) -> list[AddedToken]:
        """`added_tokens_decoder`, checked against the model's own tokens.

        Args:
            names: text -> id, of the model's own tokens.
            free: ids of the model's own tokens that the config may rename (reserved ones).

        Raises:
            UserError: a token or its id conflicts with another one, or has unsupported flags.
        """
        ids, name_of = dict(names), {token_id: name for name, token_id in names.items() if token_id not in free}
        added = list(map(AddedToken.read, self.entries()))
        for token in added:
            fits = ids.setdefault(token.content, token.id) == token.id and 0 <= token.id < 2**31
            if not fits or not token.plain or name_of.setdefault(token.id, token.content) != token.content:
                twice = f"its text or its id {token.id} is used twice or out of range, or it is empty"
                problem = f"{twice}, or it has lstrip, rstrip or single_word, which need a tokenizer.json"
                remedy = "use the config that came with the model"
                raise UserError(f"{self.file}: the added token {token.content!r}: {problem}; {remedy}")
        return added
