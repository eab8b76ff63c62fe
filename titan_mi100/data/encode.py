"""From records to documents: read an example, render it with the model's own template, tokenise, mark, fit.

From the top: records of a file (`encode_records`), one record (`Encoder.encode`), which text is learned (`supervise`).

A document is the tokens of one conversation, text or piece of one; attention never crosses its boundary. It is kept as
the values that `marked` makes, (tokens,) uint32.

Two settings decide which characters of a conversation are learned: `loss` says whose text counts, `earlier_thinking`
what becomes of a turn whose reasoning the template leaves out once it is history, as Qwen3's does: the model would have
thought first, and the text hides it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.conversation import with_system_prompt
from titan_mi100.data.files import Record
from titan_mi100.data.formats import BadRecord, Example, Format, content_hash, parse_record
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.chat_template import ChatTemplate, Rendered, Turn

STATUSES = ("kept", "split", "truncated", "dropped", "duplicate", "rejected")
KEPT, SPLIT, TRUNCATED, DROPPED, DUPLICATE, REJECTED = range(len(STATUSES))
OVERLONG = "longer than seq_len"  # kinds of reasons
LOST_REASONING = "earlier reasoning left out"

Span = tuple[int, int]  # characters [start, stop)
Messages = Sequence[Mapping[str, Any]]

# What became of a record.
RECORD = np.dtype(
    [
        ("file", np.int32),  # its place among the sources
        ("line", np.int64),
        ("element", np.int64),  # of a JSON array, from 1; else 0
        ("status", np.uint8),  # of STATUSES
        ("set", np.uint8),  # of ledger._SETS: where its documents are used; decided when all records are known
        ("tokens", np.int64),  # before anything was cut off
        ("lost", np.int64),  # of them, to seq_len
        ("supervised", np.int64),  # tokens of its documents
        ("documents", np.int64),  # how many it gave
        ("thinking", np.int8),  # what its answers are learned behind, see `Encoded`
        ("kind", np.uint16),  # of the reason, among the ledger's kinds; 0: there is none
        ("hash", np.uint64, 2),  # of the content
    ]
)


class Source(NamedTuple):
    """A file of input."""

    path: str
    pattern: int  # which of `sets.patterns` it is from
    format: Format
    bytes: int
    passed_over: dict[str, tuple[int, int]]  # of its reader


class Chunk(NamedTuple):
    """Consecutive records of one file, and the tokens of their documents."""

    records: np.ndarray  # (records,) RECORD
    reasons: dict[int, tuple[str, str]]  # record in the chunk -> kind and detail, where there is something to say
    lengths: np.ndarray  # (documents,) int64
    values: np.ndarray  # (tokens of all documents,) uint32: of `marked`
    ignored: Counter[str]  # keys, in how many rows or messages


def encode_records(encoder: "Encoder", form: Format, file: int, records: list[Record]) -> Chunk:
    """Read and encode consecutive records of file number `file`, which has this format."""
    found, reasons, documents, ignored = [], {}, [], Counter[str]()
    for place, record in enumerate(records):
        digest, made = bytes(16), Encoded(REJECTED, [], 0)
        try:
            example = form.read_row(parse_record(record), encoder.ignored_keys, ignored)
            digest = content_hash(example)
            made = encoder.encode(example)
        except BadRecord as bad:
            made = made._replace(kind=bad.kind, detail=str(bad))
        if made.kind:
            reasons[place] = (made.kind, made.detail)
        supervised = sum(map(supervised_tokens, made.documents))
        line = (record.number, record.element, made.status, 0, made.tokens, made.lost, supervised)
        more = (len(made.documents), made.thinking, 0)
        found.append((file, *line, *more, (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))))
        documents += made.documents
    lengths = np.array(list(map(len, documents)), dtype=np.int64)
    values = np.concatenate([np.zeros(0, np.uint32), *documents])
    return Chunk(np.array(found, RECORD), reasons, lengths, values, ignored)


class Encoded(NamedTuple):
    """What became of a record."""

    status: int  # of STATUSES; whether it is a duplicate is not known yet
    documents: list[np.ndarray]
    tokens: int  # of the record, before anything was cut off
    kind: str = ""  # why it is not kept as it is: a short phrase to count by
    detail: str = ""  # the same for this record
    lost: int = 0  # tokens, to seq_len
    thinking: int = 0  # -1: its answer is learned behind the empty think block of a prompt; 1: its thinking is learned


class Encoder:
    """Records to documents of at most seq_len tokens. `template` is needed for conversations only."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, config: DataConfig, seq_len: int) -> None:
        self.tokenizer, self._template, self._config, self._seq_len = tokenizer, template, config, seq_len
        self.ignored_keys = frozenset(config.ignored_keys)

    def encode(self, example: Example) -> Encoded:
        """The record's documents.

        Raises:
            BadRecord: the template refuses the conversation, nothing in the record is supervised, or it is longer than
                seq_len under data.overlong = "error".
        """
        lost, thinking, why_nothing = 0, 0, "a row needs at least one supervised token behind its first"
        if example.messages is not None:
            documents, lost, thinking = self._conversation(example.messages, example.tools)
            why_nothing = f"no turn is learned with data.loss = {self._config.loss!r}, or it holds no text"
        elif example.text is not None:
            ids = self.tokenizer.encode(example.text)
            if not ids or ids[-1] != self.tokenizer.eos_token_id:
                ids.append(self.tokenizer.eos_token_id)
            documents = [marked(ids, np.ones(len(ids), dtype=bool))]
        else:
            assert example.input_ids is not None
            documents = [self._given_tokens(np.array(example.input_ids), example.labels)]
        if not any(map(supervised_tokens, documents)):
            raise BadRecord("nothing is supervised", why_nothing)
        encoded = self._fit(documents)._replace(thinking=thinking)
        if lost and not encoded.kind:
            return encoded._replace(kind=LOST_REASONING, detail=f"of {lost} turns, by the template")
        return encoded

    def _conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[list[np.ndarray], int, int]:
        """Its documents, how many turns stand without their reasoning in the last one, and `Encoded.thinking`."""
        assert self._template is not None
        variables: dict[str, Any] = {} if tools is None else {"tools": tools}
        config = self._config
        messages = with_system_prompt(messages, config.system_prompt)
        how = (config.loss, config.empty_think == "supervised", config.earlier_thinking)
        try:
            supervised = supervise(self._template, messages, *how, **variables)
        except UserError as error:
            raise BadRecord("the chat template refuses it", str(error)) from error
        lost = sum(turn.lost_reasoning for turn in supervised[-1][0].turns) if supervised else 0
        thinking = _thinking(*supervised[-1]) if supervised else 0
        return [self._rendered(rendered.text, spans) for rendered, spans in supervised], lost, thinking

    def _rendered(self, text: str, spans: list[Span]) -> np.ndarray:
        ids, ends = self.tokenizer.encode_with_offsets(text)
        starts = np.append(0, ends)[:-1]
        edges = np.array(_byte_offsets(text, [edge for span in spans for edge in span], self.tokenizer), np.int64)
        first, last = np.append(edges[::2], ends[-1:]), edges[1::2]
        # for each token the first span that ends behind its start: they overlap if it begins before the token's end
        return marked(ids, first[np.searchsorted(last, starts, side="right")] < ends)

    def _given_tokens(self, ids: np.ndarray, labels: list[int] | None) -> np.ndarray:
        known = self.tokenizer.n_vocab
        if ids.max() >= known:
            place = int(np.argmax(ids >= known))
            raise BadRecord(
                "unknown token id",
                f"input_ids[{place}] = {ids[place]}, the tokenizer has {known:,} tokens; was the file made with "
                "another tokenizer?",
            )
        return marked(ids, np.ones(len(ids), dtype=bool) if labels is None else np.array(labels) == ids)

    def _fit(self, documents: list[np.ndarray]) -> Encoded:
        """Documents as they fit into rows of seq_len tokens, by data.overlong."""
        tokens, seq_len, how = sum(map(len, documents)), self._seq_len, self._config.overlong
        overlong = [document for document in documents if len(document) > seq_len]
        whole = SPLIT if len(documents) > 1 else KEPT
        if not overlong:
            reason = ("unrolled", f"{len(documents)} rounds, a document each") if whole == SPLIT else ("", "")
            return Encoded(whole, list(filter(supervised_tokens, documents)), tokens, *reason)
        detail = f"{len(overlong[0]):,} tokens, seq_len is {seq_len:,}"
        if how == "error":
            raise BadRecord(OVERLONG, f"{detail}; raise it, or set data.overlong to drop, truncate or split")
        if len(documents) > 1:
            detail = f"{len(overlong)} of {len(documents)} rounds, one of {detail}"
        pieces = []
        for document in documents:
            fits_or_split = how == "split" or len(document) <= seq_len
            kept = len(document) if fits_or_split else seq_len if how == "truncate" else 0  # tokens
            pieces += [document[start : start + seq_len] for start in range(0, kept, seq_len)]
        left = list(filter(supervised_tokens, pieces))
        if how == "split" and (lost := len(pieces) - len(left)):
            detail += f"; {lost} of {len(pieces)} pieces have nothing supervised and are left out"
        if how == "truncate" and not left:
            detail += "; nothing supervised is in its beginning"
        cut = {"truncate": TRUNCATED, "split": SPLIT}.get(how, whole)
        lost = tokens - sum(map(len, pieces)) if left else tokens
        return Encoded(cut if left else DROPPED, left, tokens, OVERLONG, detail, lost)


def _thinking(rendered: Rendered, spans: list[Span]) -> int:
    """`Encoded.thinking` of a conversation: of its last turn that shows either."""
    for turn in reversed(rendered.turns):
        if turn.reasons or turn.answer > turn.start:
            if any(start <= turn.start < stop for start, stop in spans):
                return 1
            if any(start <= turn.answer < stop for start, stop in spans):
                return -1
    return 0


def marked(ids: np.ndarray | list[int], supervised: np.ndarray) -> np.ndarray:
    """A document: 2 * id + supervised, (tokens,) uint32.

    Args:
        supervised: (tokens,) bool: the token is learned, given those before it (a document's first never is).
    """
    return np.asarray(ids, dtype=np.uint32) * np.uint32(2) + supervised.astype(np.uint32)


def supervised_tokens(document: np.ndarray) -> int:
    return int(np.count_nonzero(document[1:] & 1))


def supervise(
    template: ChatTemplate,
    messages: Messages,
    loss: str = "assistant",
    empty_think: bool = False,
    earlier_thinking: str = "template",
    **variables: Any,
) -> list[tuple[Rendered, list[Span]]]:
    """The documents that a conversation is trained as, each with its supervised spans.

    Args:
        template, variables: see `ChatTemplate.render_turns`.
        messages, loss, empty_think: see `supervised_spans`.
        earlier_thinking: "unroll": one document per round (see `rounds`); else the whole conversation is the document.

    Returns:
        Only documents with something supervised: maybe none.

    Raises:
        UserError: the template refuses the conversation, or hides what has to be known.
    """
    whole = template.render_turns(messages, **variables)
    documents = []
    for length, first in rounds(messages, whole) if earlier_thinking == "unroll" else [(len(messages), 0)]:
        rendered = whole if length == len(messages) else template.render_turns(messages[:length], **variables)
        if spans := supervised_spans(rendered, messages, loss, empty_think, earlier_thinking, first):
            documents.append((rendered, spans))
    return documents


def supervised_spans(
    rendered: Rendered,
    messages: Messages,
    loss: str = "assistant",
    empty_think: bool = False,
    earlier_thinking: str = "template",
    first: int = 0,
) -> list[Span]:
    """The characters that are learned, sorted and disjoint.

    Args:
        rendered: the conversation, or a beginning of it.
        messages: the whole conversation. A message may have a `weight`: 0 is not learned, 1 is.
        loss: "assistant": every assistant turn but those of weight 0; "last": the conversation's last assistant turn,
            unless of weight 0; "all": the whole text but messages of weight 0; "weight": exactly the messages, of
            whatever role, of weight 1.
        empty_think: whether an empty think block that the template wrote before an answer is part of the turn. Where
            the template marks what is generated, its marks say.
        earlier_thinking: "template": learn what the template renders; else turns without their reasoning are not.
        first: messages before this one are context only.

    Raises:
        UserError: the weight of a message counts, but the template hides which text is that message's.
    """
    # An unrolled turn that still lacks its reasoning was never going to show it, so it is masked too.
    masked = {turn.message for turn in rendered.turns if turn.lost_reasoning and earlier_thinking != "template"}
    weights = [message.get("weight") for message in messages]
    turns = rendered.turns[first:]
    padded = np.zeros(len(rendered.text) + 2, dtype=bool)  # an unlearned character before the text and one behind
    learned = padded[1:-1]
    if loss == "all":
        learned[rendered.turns[first - 1].stop if first else 0 :] = True
        silent = [turn for turn in turns if weights[turn.message] == 0]
        _check_they_show(silent, messages)
        for turn in turns:
            if weights[turn.message] == 0 or turn.message in masked:
                learned[turn.start : turn.stop] = False
    else:
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if loss == "weight":
            chosen = [turn for turn in turns if weights[turn.message] == 1]
            _check_they_show(chosen, messages)
        else:
            candidates = {*(assistants[-1:] if loss == "last" else assistants)}
            chosen = [turn for turn in turns if turn.message in candidates and weights[turn.message] != 0]
        for turn in chosen:
            own = [(turn.start if empty_think else turn.answer, turn.stop)] if turn.marked is None else turn.marked
            for start, stop in own if turn.message not in masked else ():
                learned[start:stop] = True
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def rounds(messages: Messages, rendered: Rendered) -> list[tuple[int, int]]:
    """How to cut a conversation into documents in which every turn stands as when the model generated it.

    A round is what answers one user: it ends behind its last assistant turn, the next one's user comes later. Its
    document is the conversation up to there, in which its own turns are the latest and show their reasoning. Results
    of tools, of role `tool`, do not begin a round.

    Args:
        rendered: the whole conversation.

    Returns:
        (messages in the document, index of the first one that is learned in it) per round; together they learn every
        message once, and the last document is the whole conversation. Only that, where no turn lost its reasoning.
    """
    if not any(turn.lost_reasoning for turn in rendered.turns):
        return [(len(messages), 0)]
    ends: list[int] = []
    last_assistant = None  # of the round
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            last_assistant = i
        elif message["role"] == "user" and last_assistant is not None:
            ends.append(last_assistant + 1)
            last_assistant = None
    return list(zip([*ends, len(messages)], [0, *ends], strict=True))


def _check_they_show(turns: list[Turn], messages: Messages) -> None:
    for turn in turns:
        content = messages[turn.message].get("content")
        if turn.start == turn.stop and (content.strip() if isinstance(content, str) else content):
            raise UserError(
                f"message {turn.message} ({turn.role}) has weight {messages[turn.message]['weight']}, but the chat "
                "template drops or rewrites its content; remove the weight, or use a template that shows the message"
            )


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
            raise BadRecord(
                "the chat template refuses it", "a message begins with a combining character that joins the text before"
            )
    return list(accumulate(len(part.encode()) for part in parts[:-1]))
