"""From records to documents: read an example, render it with the model's chat template, tokenise it, mark the
supervised tokens, and cut it to seq_len.

In this order below: the records of a file (`encode_records`), one record (`Encoder.encode`), and which characters of a
conversation are supervised (`supervise`).

A document holds the tokens of one conversation or text, or of a piece of one; attention never crosses its boundary. It
is stored as the values that `document_values` makes, (tokens,) uint32.

Two settings decide which characters of a conversation are supervised. `loss` selects whose messages count.
`earlier_thinking` handles turns whose reasoning the template omits in later rounds, as Qwen3's template does: such a
turn would teach the model to answer without the reasoning that produced the answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.answers import EARLIER, PROMPT_AGAIN, SAME, differs_early, repeats_prompt
from titan_mi100.data.columns import Findings
from titan_mi100.data.conversation import check_answer, last_of, with_system_prompt
from titan_mi100.data.files import Record
from titan_mi100.data.formats import BadRecord, Example, Format, example_hash, parse_record
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.chat_template import ChatTemplate, Rendered
from titan_mi100.text.turns import Turn

STATUSES = ("kept", "split", "truncated", "dropped", "duplicate", "rejected")
KEPT, SPLIT, TRUNCATED, DROPPED, DUPLICATE, REJECTED = range(len(STATUSES))
OVERLONG = "longer than seq_len"  # this and the next: kinds of reasons that other modules test for
LOST_REASONING, LOST_LAST = "earlier reasoning left out", "reasoning of the last turn left out"
JOINED = "an answer begins inside a token of the prompt"
_RESULT = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)
# What ends a turn or a document in the forms of well-known models, whatever the tokenizer's end token is.
_OTHER_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>")

Span = tuple[int, int]  # characters [start, stop)
Messages = Sequence[Mapping[str, Any]]

# The outcome of a record. A structured array holds millions of them in little memory.
RECORD = np.dtype(
    [
        ("file", np.int32),  # index in the list of `Source`s
        ("line", np.int64),
        ("element", np.int64),  # number in a JSON array, from 1; else 0
        ("status", np.uint8),  # index in STATUSES
        ("set", np.uint8),  # index in ledger._SETS; decided when all records are known
        ("tokens", np.int64),  # before truncation
        ("lost", np.int64),  # how many of these seq_len cut off
        ("supervised", np.int64),  # supervised tokens of its documents
        ("documents", np.int64),  # number of documents made of it
        ("thinking", np.int8),  # whether its last answer is learned with thinking, see `Encoded.thinking`
        ("kind", np.uint16),  # index of the reason in the ledger's kinds; 0: no reason
        ("hash", np.uint64, 2),  # hash of the content
    ]
)


class Source(NamedTuple):
    """An input file."""

    path: str
    pattern: int  # index of its path or glob in `sets.patterns`
    format: Format
    bytes: int


class Chunk(NamedTuple):
    """Consecutive records of one file, and the tokens of their documents."""

    records: np.ndarray  # (records,) RECORD
    reasons: dict[int, tuple[str, str]]  # index in the chunk -> kind and detail, for records that have a reason
    lengths: np.ndarray  # (documents,) int64: tokens
    labels: np.ndarray  # (documents,) int8: of an answer 1 (wanted) or -1; 0: of no preference
    values: np.ndarray  # (tokens of all documents,) uint32, as made by `document_values`
    findings: Findings


def encode_records(encoder: "Encoder", form: Format, file: int, records: list[Record]) -> Chunk:
    """Read and encode consecutive records of one file.

    Args:
        form: the file's format.
        file: the file's index in the list of `Source`s.

    A record that is refused becomes REJECTED with its reason; nothing is raised, so that all are reported at once.
    """
    rows, documents, labels = [], list[np.ndarray](), list[int]()
    reasons, findings = dict[int, tuple[str, str]](), Findings()
    for index, record in enumerate(records):
        digest, made = bytes(16), Encoded(REJECTED, [], 0)
        findings.record = index
        try:
            nulls = encoder.null_arguments or record.nulls
            example = form.read_row(parse_record(record), encoder.ignored_keys, findings, nulls)
            digest = example_hash(example)
            made = encoder.encode(example)
            findings.note([*example.notes, *made.notes])
        except BadRecord as bad:
            made = made._replace(kind=bad.kind, detail=str(bad))
        if made.kind:
            reasons[index] = (made.kind, made.detail)
        supervised = sum(map(supervised_tokens, made.documents))
        # In the order of RECORD's fields. "set" and "kind" are 0 here; the ledger fills them in.
        line = (record.number, record.element, made.status, 0, made.tokens, made.lost, supervised)
        rest = (len(made.documents), made.thinking, 0)
        rows.append((file, *line, *rest, (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))))
        documents += made.documents
        labels += made.labels or (0,) * len(made.documents)
    lengths = np.array(list(map(len, documents)), dtype=np.int64)
    values = np.concatenate([np.zeros(0, np.uint32), *documents])
    return Chunk(np.array(rows, RECORD), reasons, lengths, np.array(labels, np.int8), values, findings)


class Encoded(NamedTuple):
    """The documents of a record, and its outcome."""

    status: int  # index in STATUSES; DUPLICATE is found later, by the ledger
    documents: list[np.ndarray]  # each (tokens,) uint32, as made by `document_values`
    tokens: int  # tokens of the record, before truncation
    kind: str = ""  # why it is not kept unchanged: a short constant phrase, for counting
    detail: str = ""  # the reason for this record
    lost: int = 0  # tokens that seq_len cut off
    thinking: int = 0  # 1: thinking is supervised; -1: the answer is, after an empty think block; 0: neither
    labels: tuple[int, ...] = ()  # of the documents, see Chunk.labels
    notes: tuple[str, ...] = ()  # see Findings.notes


class Encoder:
    """Turns examples into documents of at most seq_len tokens. Only conversations need `template`."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, config: DataConfig, seq_len: int) -> None:
        self.tokenizer, self._template, self._config, self._seq_len = tokenizer, template, config, seq_len
        self.ignored_keys, self.null_arguments = frozenset(config.ignored_keys), config.null_arguments
        self.end_of_turn = "" if template is None else template.end_of_turn
        marks = tokenizer.marks.pattern
        self._dialogue = re.compile(rf"\s*(?:{marks})\s*(?:system|user|assistant)\s*\n")
        self._special = [tokenizer.id_of(token) for token in tokenizer.special]

    def encode(self, example: Example) -> Encoded:
        """Tokenise one example, mark its supervised tokens and fit it into rows.

        Raises:
            BadRecord: the template refuses the conversation, nothing in the record is supervised, or the record is
                longer than seq_len under data.overlong = "error".
        """
        if example.rejected or example.label:
            return self._answers(example)
        if example.samples or example.idle:
            return self._samples(example)
        made, why_nothing = Encoded(KEPT, [], 0), "a row needs at least one supervised token after its first"
        if example.messages is not None:
            made = self._conversation(example.messages, example.tools)
            documents = made.documents
            why_nothing = f"data.loss = {self._config.loss!r} selects no turn, or the selected turns have no text"
        elif example.text is not None:
            ids = with_one_end(self.tokenizer, example.text, self.end_of_turn)
            documents = [document_values(ids, np.ones(len(ids), dtype=bool))]
        else:
            documents = [self._pretokenised(*map(np.array, example.tokens()))]
        if not any(map(supervised_tokens, documents)):
            raise BadRecord("nothing is supervised", why_nothing)
        encoded = self._fit_to_rows(documents)._replace(thinking=made.thinking, notes=made.notes)
        return encoded if encoded.kind else encoded._replace(kind=made.kind, detail=made.detail)

    def _answers(self, example: Example) -> Encoded:
        """A pair of answers or an answer with a label: a document each, never cut."""
        conversations = [messages for messages in (example.messages, example.rejected) if messages]
        if len(conversations) != 1 + (example.rejected is not None):
            raise BadRecord("not a conversation", "preferences are of answers to prompts, not of texts or tokens")
        encoded = [self._conversation(messages, example.tools) for messages in conversations]
        thinking = [each.thinking for each in encoded]
        if {*thinking} == {1, -1}:  # one thinks: that the other does not is a part of its answer, too
            encoded = [self._conversation(messages, example.tools, empty_think=True) for messages in conversations]
        documents = [document for each in encoded for document in each.documents]
        if len(documents) != len(conversations) or not all(map(supervised_tokens, documents)):
            raise BadRecord("nothing is supervised", "an answer has no text that the template shows")
        lengths = list(map(len, documents))
        if example.rejected and not example.idle and np.array_equal(documents[0], documents[1]):
            example = example._replace(idle=SAME)
        notes = tuple(note for each in encoded for note in each.notes)
        made = Encoded(DROPPED, [], sum(lengths), example.idle, thinking=thinking[0], notes=notes)
        if example.idle:
            return made
        if sum(lengths) > self._seq_len:
            detail = f"{' + '.join(map(str, lengths))} tokens, seq_len is {self._seq_len:,}"
            if self._config.overlong == "error":
                raise BadRecord(OVERLONG, f"{detail}; raise it, or set data.overlong to drop")
            return made._replace(kind=OVERLONG, detail=detail, lost=sum(lengths))
        kind = next((each.kind for each in encoded if each.kind not in ("", JOINED)), encoded[0].kind)
        if pair := (example.messages or [], example.rejected) if example.rejected else None:
            kind = PROMPT_AGAIN if repeats_prompt(*pair) else EARLIER if differs_early(*pair) else kind
        labels = (1, -1) if example.rejected else (example.label,)
        return made._replace(status=KEPT, documents=documents, kind=kind, labels=labels)

    def _samples(self, example: Example) -> Encoded:
        """A group of sampled answers: a document for each that is learned, never cut; its label is its number + 1."""
        prompt, documents = example.input_ids or [], list[np.ndarray]()
        for _, ids in example.samples:
            learned = np.arange(len(prompt) + len(ids)) >= len(prompt)
            documents.append(self._pretokenised(np.array(prompt + ids), learned))
        tokens = sum(map(len, documents))
        if example.idle:
            return Encoded(DROPPED, [], len(prompt), example.idle)
        if (longest := max(map(len, documents))) > self._seq_len:
            detail = f"{longest:,} tokens, seq_len is {self._seq_len:,}"
            if self._config.overlong == "error":
                raise BadRecord(OVERLONG, f"{detail}; raise it, or set data.overlong to drop")
            return Encoded(DROPPED, [], tokens, OVERLONG, detail, tokens)
        return Encoded(KEPT, documents, tokens, labels=tuple(number + 1 for number, _ in example.samples))

    def _conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, empty_think: bool = False
    ) -> Encoded:
        """Render, supervise and tokenise a conversation: its documents, kind, thinking and notes."""
        assert self._template is not None
        config = self._config
        messages, tools, notes = self._without_marks(with_system_prompt(messages, config.system_prompt), tools)
        variables: dict[str, Any] = config.variables | ({} if tools is None else {"tools": tools})
        calls = (call.get("function") or call for message in messages for call in message.get("tool_calls", ()))
        texts = [call["arguments"] for call in calls if isinstance(call["arguments"], str)]
        learns_empty = empty_think or config.empty_think == "supervised"
        try:
            supervised = supervise(
                self._template, messages, config.loss, learns_empty, config.earlier_thinking, **variables
            )
        except UserError as error:
            raise BadRecord("the chat template refuses it", str(error)) from error
        quoted = [f'": {json.dumps(text, ensure_ascii=False)}' for text in texts]
        if any(text in rendered.text for rendered, _ in supervised for text in quoted):
            problem = "it writes the arguments of a tool call, which are JSON text, in quotes; make them an object"
            raise BadRecord("the chat template changes it", problem)
        for turn in (turn for rendered, _ in supervised for turn in rendered.turns):
            if turn.problem:
                raise BadRecord("the chat template changes it", f"message {turn.message + 1}: {turn.problem}")
        thinking = _thinking_mode(*supervised[-1]) if supervised else 0
        made = [self._rendered(rendered, spans) for rendered, spans in supervised]
        turns = supervised[-1][0].turns if supervised else []
        if any(turn.trimmed and messages[turn.message].get("weight") != 0 for turn in turns):
            notes.append("trimmed")
        kind = detail = ""
        if lost := [turn.message for turn in turns if turn.lost_reasoning]:
            kind = LOST_LAST if lost[-1] > max(0, last_of("user", messages)) else LOST_REASONING
            detail = f"of {len(lost)} turns, by the template"
        elif any(joined for _, joined in made):
            kind, detail = JOINED, "its first line breaks or spaces join those before it"
        return Encoded(KEPT, [values for values, _ in made], 0, kind, detail, thinking=thinking, notes=tuple(notes))

    def _without_marks(self, messages: list[Any], tools: list[Any] | None) -> tuple[list[Any], Any, list[str]]:
        """Remove what the template itself writes from the messages: end tokens behind answers, tags around the results
        of tools. Returns the messages, the tools, and notes.

        Raises:
            BadRecord: another special token is in a text.
        """
        assert self._template is not None
        cleaned, notes, as_text = [], list[str](), self._config.special_in_content == "text"
        for message in messages:
            content, role = message["content"], message["role"]
            if role == "assistant":
                begin, end = _end_run(self.tokenizer, content, self.end_of_turn, "" if as_text else "remove it")
                if end is not None:
                    message = {**message, "content": content[:begin]}
                    notes.append("ends")
                    check_answer(message, "content, without its end token,")
            elif role == "tool" and self._template.wraps_results and (inside := _RESULT.fullmatch(content)):
                message = {**message, "content": inside[1]}
                notes.append("tags")
            cleaned.append(message)
        quoted = list[Any]()
        for number, value in enumerate([*cleaned, tools], 1):
            is_plain = value is not tools and len(value) == 2
            text = value["content"] if is_plain else json.dumps(value, ensure_ascii=False)
            if mark := self.tokenizer.marks.search(text):
                where = f"message {number}" if number <= len(cleaned) else "tools"
                remedy = 'remove it, or set data.special_in_content = "text" to learn its letters'
                is_rendered = value is not tools and self._dialogue.match(value["content"])
                if is_rendered or not as_text:
                    remedy = "write the rendered dialogue as messages" if is_rendered else remedy
                    raise BadRecord("special token", f"{where} holds {mark[0]}, which a template writes; {remedy}")
                value = json.loads(self.tokenizer.quoted(json.dumps(value, ensure_ascii=False)))
            quoted.append(value)
        return quoted[:-1], quoted[-1], notes

    def _rendered(self, rendered: Rendered, spans: list[Span]) -> tuple[np.ndarray, bool]:
        """Tokenise a rendered text and mark every token that overlaps a supervised span (characters).

        Returns:
            The document, and whether a span begins inside a token: generation would get that token in two.
        """
        text = rendered.text
        ids, ends = self.tokenizer.encode_with_offsets(text)  # ends: (tokens,) in bytes
        marks = self.tokenizer.marks.findall(text) if self._config.special_in_content else ()
        if marks and len(marks) != np.isin(ids, self._special).sum():
            raise BadRecord("special token", "this tokenizer takes none as text; remove it from the messages")
        starts = np.append(0, ends)[:-1]
        edges = np.array(byte_offsets(text, [edge for span in spans for edge in span], self.tokenizer), np.int64)
        first, last = np.append(edges[::2], ends[-1:]), edges[1::2]
        # searchsorted finds, for each token, the first span that ends after the token's start. The two overlap if that
        # span also begins before the token's end. Tokens after the last span get the sentinel appended to `first`.
        values = document_values(ids, first[np.searchsorted(last, starts, side="right")] < ends)
        return values, not np.isin(edges[::2], starts).all()

    def _pretokenised(self, ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
        """A document of a record that is tokenised already. Raises BadRecord: the tokenizer lacks one of the ids."""
        known = self.tokenizer.n_vocab
        if ids.max() >= known:
            index = int(np.argmax(ids >= known))
            problem = f"the tokenizer has {known:,} tokens; was the file made with another tokenizer?"
            raise BadRecord("unknown token id", f"input_ids[{index}] = {ids[index]}, {problem}")
        return document_values(ids, learned)

    def _fit_to_rows(self, documents: list[np.ndarray]) -> Encoded:
        """Fit a record's documents into rows of seq_len tokens; data.overlong says what happens to longer ones."""
        tokens, seq_len, how = sum(map(len, documents)), self._seq_len, self._config.overlong
        overlong = [document for document in documents if len(document) > seq_len]
        status = SPLIT if len(documents) > 1 else KEPT
        if not overlong:
            reason = ("unrolled", f"{len(documents)} rounds, one document each") if status == SPLIT else ("", "")
            return Encoded(status, list(filter(supervised_tokens, documents)), tokens, *reason)
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
        left = list(filter(supervised_tokens, pieces))  # a piece without supervision would train nothing
        if how == "split" and (lost := len(pieces) - len(left)):
            detail += f"; {lost} of {len(pieces)} pieces have no supervised token and are left out"
        if how == "truncate" and not left:
            detail += "; its beginning has no supervised token"
        cut = {"truncate": TRUNCATED, "split": SPLIT}.get(how, status)
        # Tokens of a split record's unsupervised pieces do not count as lost: seq_len did not cut them off.
        lost = tokens - sum(map(len, pieces)) if left else tokens
        return Encoded(cut if left else DROPPED, left, tokens, OVERLONG, detail, lost)


def _thinking_mode(rendered: Rendered, spans: list[Span]) -> int:
    """`Encoded.thinking` of a conversation. The last turn that shows reasoning or an empty think block decides."""
    for turn in reversed(rendered.turns):
        # turn.answer > turn.start: the template wrote an empty think block between the two
        if turn.reasons or turn.answer > turn.start:
            if any(start <= turn.start < stop for start, stop in spans):
                return 1
            if any(start <= turn.answer < stop for start, stop in spans):
                return -1
    return 0


def with_one_end(tokenizer: Tokenizer, text: str, end_of_turn: str) -> list[int]:
    """The ids of a plain text and one end token: of those that the text ends with the first, else the tokenizer's own.

    Raises:
        BadRecord: the text ends with the end token of another form, which nothing stops at here.
    """
    begin, end = _end_run(tokenizer, text, end_of_turn, f"end it with {tokenizer.eos_token}, or write messages")
    return [*tokenizer.encode(text[:begin]), tokenizer.eos_token_id if end is None else end]


def _end_run(tokenizer: Tokenizer, text: str, end_of_turn: str, remedy: str = "") -> tuple[int, int | None]:
    """Where the end tokens behind a text begin, and the id of the first of them; None if there are none.

    Raises:
        BadRecord: one is that of another form, and there is a remedy.
    """
    if not text.rstrip().endswith((">", tokenizer.eos_token, end_of_turn or tokenizer.eos_token)):
        return len(text), None
    ends = {end: token for token in tokenizer.end_ids(end_of_turn) if (end := tokenizer.decode([token]))}
    known = (*ends, *_OTHER_ENDS) if remedy else ends
    one = "|".join(map(re.escape, known))
    run = re.search(rf"(?:{one})(?:\s*(?:{one}))*\s*\Z", text)
    run_ends = re.findall(one, run[0]) if run else []
    if other := [end for end in run_ends if end not in ends]:
        detail = f"the text ends with {other[0]}, but the end token is {tokenizer.eos_token}"
        raise BadRecord("other end token", f"{detail}; {remedy}")
    return (run.start(), ends[run_ends[0]]) if run else (len(text), None)


def document_values(ids: np.ndarray | list[int], supervised: np.ndarray) -> np.ndarray:
    """The stored values of a document: 2 * id + supervised, (tokens,) uint32.

    Args:
        ids: (tokens,) token ids.
        supervised: (tokens,) bool: the token is predicted and counts in the loss. A document's first token is never
            predicted, whatever its bit says.
    """
    return np.asarray(ids, dtype=np.uint32) * np.uint32(2) + supervised.astype(np.uint32)


def supervised_tokens(document: np.ndarray) -> int:
    """How many tokens of a document (values of `document_values`) have a loss."""
    return int(np.count_nonzero(document[1:] & 1))


def supervise(
    template: ChatTemplate,
    messages: Messages,
    loss: str = "assistant",
    empty_think: bool = False,
    earlier_thinking: str = "template",
    **variables: Any,
) -> list[tuple[Rendered, list[Span]]]:
    """Render a conversation as one or several documents, and find the supervised characters of each.

    Args:
        template, variables: see `ChatTemplate.render_turns`.
        messages, loss, empty_think: see `supervised_spans`.
        earlier_thinking: "unroll": one document per round (see `rounds`); otherwise one document for all.

    Returns:
        The documents that have at least one supervised span; possibly none.

    Raises:
        UserError: the template refuses the conversation, or it hides which text comes from which message.
    """
    conversation = template.render_turns(messages, **variables)
    documents = []
    for length, first in rounds(messages, conversation) if earlier_thinking == "unroll" else [(len(messages), 0)]:
        rendered = conversation if length == len(messages) else template.render_turns(messages[:length], **variables)
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
    """The supervised spans of a rendered conversation, sorted and disjoint.

    Args:
        rendered: the conversation, or its first messages.
        messages: the whole conversation. A message may have a `weight`: 0 is not learned, 1 is.
        loss: "assistant": every assistant turn except those of weight 0; "last": the conversation's last assistant
            turn, unless its weight is 0; "last_round": the assistant turns after the last user message except those of
            weight 0; "all": the whole text except messages of weight 0; "weight": exactly the messages of weight 1, of
            any role.
        empty_think: whether an empty think block that the template wrote before an answer is supervised too.
        earlier_thinking: "template": supervise what the template renders; otherwise turns that lack their reasoning
            are masked; "context": and also the reasoning of turns before the last user message.
        first: messages before this index are context only.

    Raises:
        UserError: a message's weight matters, but the template hides which text comes from that message.
    """
    # This also masks turns of an unrolled round that still lack their reasoning: the template never shows it.
    masked = {turn.message for turn in rendered.turns if turn.lost_reasoning and earlier_thinking != "template"}
    weights = [message.get("weight") for message in messages]
    turns, asked = rendered.turns[first:], last_of("user", messages)
    # One flag per character, with an unset one before and after the text, so that every span has two edges.
    padded = np.zeros(len(rendered.text) + 2, dtype=bool)
    learned = padded[1:-1]
    if loss == "all":
        learned[rendered.turns[first - 1].stop if first else 0 :] = True
        silent = [turn for turn in turns if weights[turn.message] == 0]
        _check_visible(silent, messages)
        for turn in turns:
            if weights[turn.message] == 0 or turn.message in masked:
                learned[turn.start : turn.stop] = False
    else:
        if loss == "weight":
            chosen = [turn for turn in turns if weights[turn.message] == 1]
            _check_visible(chosen, messages)
        else:
            begin = {"last": last_of("assistant", messages), "last_round": asked + 1}.get(loss, 0)
            answers = (turn for turn in turns if turn.role == "assistant" and turn.message >= begin)
            chosen = [turn for turn in answers if weights[turn.message] != 0]
        for turn in chosen:
            if turn.message not in masked:
                learned[turn.start if empty_think else turn.answer : turn.stop] = True
    for turn in turns if earlier_thinking == "context" else ():
        if turn.reasons and turn.message < asked:
            learned[turn.start : turn.thought] = False
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def rounds(messages: Messages, rendered: Rendered) -> list[tuple[int, int]]:
    """Cut a conversation into documents in which every supervised turn looks as when the model generated it.

    A round is a user message and everything that answers it, up to the last assistant turn before the next user
    message. Tool results (role `tool`) do not begin a round. A round's document is the conversation up to its end: its
    own turns are the latest there, so the template shows their reasoning.

    Args:
        rendered: the whole conversation.

    Returns:
        Per round: (number of messages in the document, index of the first message that is learned in it). Together
        the documents learn every message once; the last document is the whole conversation. If no turn lost its
        reasoning, the whole conversation is the only document.
    """
    if not any(turn.lost_reasoning for turn in rendered.turns):
        return [(len(messages), 0)]
    ends: list[int] = []
    last_assistant = None  # index of the current round's last assistant message
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            last_assistant = i
        elif message["role"] == "user" and last_assistant is not None:
            ends.append(last_assistant + 1)
            last_assistant = None
    return list(zip([*ends, len(messages)], [0, *ends], strict=True))


def _check_visible(turns: list[Turn], messages: Messages) -> None:
    """Refuse a weight on a message whose text cannot be found in the rendered conversation."""
    for turn in turns:
        content = messages[turn.message].get("content")
        if turn.start == turn.stop and (content.strip() if isinstance(content, str) else content):
            raise UserError(
                f"message {turn.message} ({turn.role}) has weight {messages[turn.message]['weight']}, but the chat "
                "template drops or rewrites its content; remove the weight, or use a template that shows the message"
            )


def byte_offsets(text: str, edges: list[int], tokenizer: Tokenizer) -> list[int]:
    """Convert ascending offsets in characters to offsets in bytes of the normalised UTF-8 text.

    The tokenizer's offsets count bytes of the normalised text (NFC for Qwen3).

    Raises:
        BadRecord: normalisation joins characters across one of the edges, which then has no counterpart.
    """
    if text.isascii():  # normalisation keeps ASCII, and each character is one byte
        return edges
    cuts = [0, *edges, len(text)]
    parts = [text[start:stop] for start, stop in pairwise(cuts)]
    normalized = tokenizer.normalize(text)
    if normalized != text:
        parts = [tokenizer.normalize(part) for part in parts]
        if "".join(parts) != normalized:
            problem = "a message begins with a combining character that joins the text before"
            raise BadRecord("the chat template refuses it", problem)
    return list(accumulate(len(part.encode()) for part in parts[:-1]))
