"""From conversations to packed rows: render with the model's own template, tokenise, mark what is supervised, pack.

Legend: document = one conversation's tokens; row = `seq_len` tokens of one or more whole documents, then padding.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from titan_mi100.chat_template import ChatTemplate
from titan_mi100.config import DataConfig
from titan_mi100.data.formats import BadRows, Conversation, choose_reader, read_conversations
from titan_mi100.data.packing import pack_rows
from titan_mi100.errors import UserError
from titan_mi100.loss import IGNORE
from titan_mi100.tokenizer import Tokenizer

Document = tuple[np.ndarray, np.ndarray]  # ids, supervised: (n,) int32, (n,) bool
PADDING_DOCUMENT = -1  # document_ids of the tokens that fill a row up


@dataclass(frozen=True)
class Row:
    """One packed row; each array is (seq_len,) int64."""

    input_ids: np.ndarray
    labels: np.ndarray  # the next token where that is supervised, else loss.IGNORE
    positions: np.ndarray  # from 0 in each document
    document_ids: np.ndarray  # 0, 1, ... along the row; PADDING_DOCUMENT


class PackedDataset:
    """Tokenised documents and the rows that they are packed into, by best-fit decreasing."""

    def __init__(self, documents: list[Document], seq_len: int, pad_id: int) -> None:
        """Pack the documents.

        Args:
            documents: (ids, supervised) of each, at most seq_len tokens.
        """
        self.seq_len, self.pad_id = seq_len, pad_id
        self._documents = documents
        self._rows = pack_rows([len(ids) for ids, _ in documents], seq_len)
        self.tokens = sum(len(ids) for ids, _ in documents)
        self.supervised = sum(int(mask[1:].sum()) for _, mask in documents)

    def __len__(self) -> int:
        return len(self._rows)

    def describe(self) -> str:
        """Its size, for the log."""
        return (
            f"{len(self._documents):,} conversations, {self.tokens:,} tokens, {self.supervised:,} supervised, "
            f"in {len(self):,} rows of {self.seq_len} ({self.tokens / (len(self) * self.seq_len):.1%} real)"
        )

    def fingerprint(self) -> str:
        """SHA-256 of all that training reads: a resume on other rows is another run."""
        digest = hashlib.sha256(f"{self.seq_len} {self.pad_id}".encode())
        for row in self._rows:
            for index in row:
                ids, supervised = self._documents[index]
                digest.update(ids.tobytes() + supervised.tobytes())
            digest.update(b"row")
        return digest.hexdigest()

    def row(self, index: int) -> Row:
        """The packed row; index -1 is a row of padding, which fills up the last batch of an epoch."""
        input_ids = np.full(self.seq_len, self.pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        positions = np.arange(self.seq_len, dtype=np.int64)
        document_ids = np.full(self.seq_len, PADDING_DOCUMENT, dtype=np.int64)
        start = 0
        for number, document in enumerate([] if index < 0 else self._rows[index]):
            ids, supervised = self._documents[document]
            stop = start + len(ids)
            input_ids[start:stop] = ids
            labels[start : stop - 1] = np.where(supervised[1:], ids[1:], IGNORE)
            positions[start:stop] = np.arange(len(ids))
            document_ids[start:stop] = number
            start = stop
        positions[start:] = np.arange(self.seq_len - start)
        return Row(input_ids, labels, positions, document_ids)


@dataclass(frozen=True)
class SFTData:
    train: PackedDataset
    validation: PackedDataset | None
    summary: list[str]  # what was read, for the log


def load_sft(config: DataConfig, tokenizer: Tokenizer, template: ChatTemplate, seq_len: int) -> SFTData:
    """Read, check, tokenise and pack the training and validation sets.

    Raises:
        UserError: every bad row with file:line and reason, or a set with nothing in it.
    """
    bad, forms = BadRows(), {}

    def conversations(path: str) -> Iterator[Conversation]:
        reader = choose_reader(path, config.format, config.prompt_column, config.response_column)
        forms[path] = reader.description
        return read_conversations(path, reader, bad)

    encoder = _Encoder(tokenizer, template, seq_len, config.overlong, bad)
    train: list[Document] = []
    held_out: list[Document] = []
    for conversation in conversations(config.path):
        if (document := encoder.encode(conversation)) is not None:
            (held_out if _held_out(conversation, config.validation_fraction) else train).append(document)
    for conversation in conversations(config.validation_path) if config.validation_path else ():
        if (document := encoder.encode(conversation)) is not None:
            held_out.append(document)
    bad.raise_if_any()

    summary = encoder.summary()
    if not train:
        raise UserError("; ".join([f"{config.path}: nothing is left to train on", *summary]))
    sets = {"train": PackedDataset(train, seq_len, tokenizer.pad_token_id)}
    if config.validation_path or config.validation_fraction:
        if not held_out:
            raise UserError(
                f"{config.validation_path or config.path}: no conversation is left to validate on; "
                "raise [data] validation_fraction, or leave validation out"
            )
        sets["validation"] = PackedDataset(held_out, seq_len, tokenizer.pad_token_id)
    summary += [f"read as {form}: {path}" for path, form in forms.items()]
    summary += [f"{name}: {rows.describe()}" for name, rows in sets.items()]
    return SFTData(sets["train"], sets.get("validation"), summary)


def _held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether it belongs to the validation set: by a hash of its content, so that duplicates go the same way."""
    if not fraction:
        return False
    content = json.dumps(conversation.messages, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") < fraction * 2**64


class _Encoder:
    """Conversations to (ids, supervised), with what cannot be used noted."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, seq_len: int, overlong: str, bad: BadRows) -> None:
        self.tokenizer, self.template, self.bad = tokenizer, template, bad
        self.seq_len, self.overlong = seq_len, overlong
        self.dropped: list[str] = []  # file:line of over-long conversations

    def encode(self, conversation: Conversation) -> Document | None:
        try:
            ids, supervised = encode_conversation(conversation.messages, self.tokenizer, self.template)
        except UserError as error:
            self.bad.add(conversation.where, str(error))
            return None
        if len(ids) > self.seq_len:
            if self.overlong == "error":
                reason = f"has {len(ids)} tokens, [training] seq_len is {self.seq_len}; raise it, or drop such rows"
                self.bad.add(conversation.where, reason)
            else:
                self.dropped.append(conversation.where)
            return None
        return ids, supervised

    def summary(self) -> list[str]:
        if not self.dropped:
            return []
        return [
            f"dropped {len(self.dropped):,} conversations of more than seq_len = {self.seq_len} tokens, "
            f"the first at {self.dropped[0]}"
        ]


def encode_conversation(
    messages: list[dict[str, str]], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the rendered conversation, and which of them the assistant itself generates.

    Returns:
        ids: (n,) int32. supervised: (n,) bool: a token that holds a supervised character.

    Raises:
        UserError: the template refuses the messages, or nothing in them is supervised.
    """
    rendered = template.render_supervised(messages)
    ids, ends = tokenizer.encode_with_offsets(rendered.text)
    starts = np.concatenate(([0], ends[:-1]))
    supervised = np.zeros(len(ids), dtype=bool)
    for span_start, span_stop in rendered.supervised:
        first, last = (_byte_offset(rendered.text, position, tokenizer) for position in (span_start, span_stop))
        supervised |= (starts < last) & (ends > first)
    if not supervised[1:].any():
        raise UserError("nothing is supervised: the template renders no assistant text")
    return ids, supervised


def _byte_offset(text: str, position: int, tokenizer: Tokenizer) -> int:
    """Where a character position lies in the UTF-8 of the normalised text, in which the tokenizer counts."""
    before = tokenizer.normalize(text[:position])
    if before + tokenizer.normalize(text[position:]) != tokenizer.normalize(text):
        raise UserError("a message begins with a combining character that joins the template's text before it")
    return len(before.encode())
