"""From a row of input to documents: render with the model's own template, tokenise, mark what is supervised, fit.

Legend: document = the tokens of one conversation, text or piece of one: what attention does not look out of.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.rows import BadRow, Example
from titan_mi100.data.supervision import Span, supervise
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.chat_template import ChatTemplate

STATUSES = ("kept", "split", "truncated", "dropped", "duplicate", "rejected")
KEPT, SPLIT, TRUNCATED, DROPPED, DUPLICATE, REJECTED = range(len(STATUSES))
OVERLONG = "longer than seq_len"  # kinds of reasons
LOST_REASONING = "earlier reasoning left out"


class Document(NamedTuple):
    ids: np.ndarray  # (n,) int32
    supervised: np.ndarray  # (n,) bool: the token is learned, given those before it (a document's first never is)

    def values(self) -> np.ndarray:
        """(n,) uint32: 2 * id + supervised, as documents are kept."""
        return self.ids.astype(np.uint32) * 2 + self.supervised


@dataclass(frozen=True)
class Encoded:
    """What became of a row."""

    status: int  # of STATUSES; whether it is a duplicate is not known yet
    documents: list[Document]
    tokens: int  # of the row, before anything was cut off
    kind: str = ""  # why it is not kept as it is: a short phrase to count by
    detail: str = ""  # the same for this row


class Encoder:
    """Rows to documents of at most seq_len tokens. `template` is needed for conversations only."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, config: DataConfig, seq_len: int) -> None:
        self.tokenizer, self._template, self._config, self._seq_len = tokenizer, template, config, seq_len

    def encode(self, example: Example) -> Encoded:
        """The row's documents.

        Raises:
            BadRow: the template refuses the conversation, nothing in the row is supervised, or it is longer than
                seq_len under data.overlong = "error".
        """
        lost = 0
        if example.messages is not None:
            documents, lost = self._conversation(example.messages, example.tools)
        elif example.text is not None:
            documents = [self._text(example.text)]
        else:
            assert example.input_ids is not None
            documents = [self._tokens(example.input_ids, example.labels)]
        if not any(document.supervised[1:].any() for document in documents):
            raise BadRow("nothing is supervised", self._why_nothing(example))
        encoded = self._fit(documents)
        if lost and not encoded.kind:
            return replace(encoded, kind=LOST_REASONING, detail=f"of {lost} turns, by the template")
        return encoded

    def _conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[list[Document], int]:
        """Its documents, and how many turns stand without their reasoning in the last one."""
        assert self._template is not None
        variables: dict[str, Any] = {} if tools is None else {"tools": tools}
        config = self._config
        how = (config.loss, config.empty_think == "supervised", config.earlier_thinking)
        try:
            supervised = supervise(self._template, messages, *how, **variables)
        except UserError as error:
            raise BadRow("the chat template refuses it", str(error)) from error
        lost = sum(turn.lost_reasoning for turn in supervised[-1][0].turns) if supervised else 0
        return [self._rendered(rendered.text, spans) for rendered, spans in supervised], lost

    def _rendered(self, text: str, spans: list[Span]) -> Document:
        ids, ends = self.tokenizer.encode_with_offsets(text)
        starts = np.concatenate(([0], ends[:-1]))
        supervised = np.zeros(len(ids), dtype=bool)
        edges = iter(_byte_offsets(text, [edge for span in spans for edge in span], self.tokenizer))
        for first, last in zip(edges, edges, strict=True):
            supervised |= (starts < last) & (ends > first)
        return Document(ids, supervised)

    def _text(self, text: str) -> Document:
        ids = self.tokenizer.encode(text)
        if not ids or ids[-1] != self.tokenizer.eos_token_id:
            ids.append(self.tokenizer.eos_token_id)
        return Document(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))

    def _tokens(self, input_ids: list[int], labels: list[int] | None) -> Document:
        if max(input_ids) >= self.tokenizer.n_vocab:
            place = int(np.argmax(np.array(input_ids) >= self.tokenizer.n_vocab))
            raise BadRow(
                "unknown token id",
                f"input_ids[{place}] = {input_ids[place]}, the tokenizer has {self.tokenizer.n_vocab:,} tokens; was "
                "the file made with another tokenizer?",
            )
        ids = np.array(input_ids, dtype=np.int32)
        return Document(ids, np.ones(len(ids), bool) if labels is None else np.array(labels) == ids)

    def _why_nothing(self, example: Example) -> str:
        if example.messages is None:
            return "a row needs at least one supervised token behind its first"
        return f"no turn is learned with data.loss = {self._config.loss!r}, or it holds no text"

    def _fit(self, documents: list[Document]) -> Encoded:
        """Documents as they fit into rows of seq_len tokens, by data.overlong."""
        tokens = sum(len(document.ids) for document in documents)
        overlong = [document for document in documents if len(document.ids) > self._seq_len]
        whole = SPLIT if len(documents) > 1 else KEPT
        if not overlong:
            reason = (f"{len(documents)} rounds, a document each",) if whole == SPLIT else ("",)
            return Encoded(whole, _learnable(documents), tokens, "unrolled" if whole == SPLIT else "", *reason)
        detail = f"{len(overlong[0].ids):,} tokens, seq_len is {self._seq_len:,}"
        if self._config.overlong == "error":
            raise BadRow(OVERLONG, f"{detail}; raise it, or set data.overlong to drop, truncate or split")
        if len(documents) > 1:
            detail = f"{len(overlong)} of {len(documents)} rounds, one of {detail}"
        fitted: list[Document] = []
        for document in documents:
            if len(document.ids) <= self._seq_len:
                fitted.append(document)
            elif self._config.overlong == "truncate":
                fitted.append(_slice(document, 0, self._seq_len))
            elif self._config.overlong == "split":
                steps = range(0, len(document.ids), self._seq_len)
                fitted += [_slice(document, start, start + self._seq_len) for start in steps]
        left = _learnable(fitted)
        if self._config.overlong == "split" and (lost := len(fitted) - len(left)):
            detail += f"; {lost} of {len(fitted)} pieces have nothing supervised and are left out"
        if not left and self._config.overlong == "truncate":
            detail += "; nothing supervised is in its beginning"
        cut = {"truncate": TRUNCATED, "split": SPLIT}.get(self._config.overlong, whole)
        return Encoded(cut if left else DROPPED, left, tokens, OVERLONG, detail)


def _slice(document: Document, start: int, stop: int) -> Document:
    return Document(document.ids[start:stop], document.supervised[start:stop])


def _learnable(documents: list[Document]) -> list[Document]:
    return [document for document in documents if document.supervised[1:].any()]


def _byte_offsets(text: str, positions: list[int], tokenizer: Tokenizer) -> list[int]:
    """Where rising character positions lie in the UTF-8 of the normalised text, in which the tokenizer counts."""
    if text.isascii():  # then nothing is normalised, and a character is a byte
        return positions
    cuts = [0, *positions, len(text)]
    parts = [text[start:stop] for start, stop in pairwise(cuts)]
    normalized = tokenizer.normalize(text)
    if normalized != text:
        parts = [tokenizer.normalize(part) for part in parts]
        if "".join(parts) != normalized:
            raise BadRow(
                "the chat template refuses it", "a message begins with a combining character that joins the text before"
            )
    return list(accumulate(len(part.encode()) for part in parts[:-1]))
