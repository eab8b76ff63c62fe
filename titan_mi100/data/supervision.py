"""Which characters of a rendered conversation are learned. Pure decisions, no torch.

Two settings meet here: `loss` says whose text counts, `earlier_thinking` what becomes of a turn whose reasoning the
template leaves out once it is history, as Qwen3's does: the model would have thought first, and the text hides it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.text.chat_template import ChatTemplate, Rendered, Turn

Span = tuple[int, int]  # characters [start, stop)
Messages = Sequence[Mapping[str, Any]]


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
        empty_think: whether an empty think block that the template wrote before an answer is part of the turn.
        earlier_thinking: "template": learn what the template renders; else turns without their reasoning are not.
        first: messages before this one are context only.

    Raises:
        UserError: the weight of a message counts, but the template hides which text is that message's.
    """
    # An unrolled turn that still lacks its reasoning was never going to show it, so it is masked too.
    masked = {turn.message for turn in rendered.turns if turn.lost_reasoning and earlier_thinking != "template"}
    weights = [message.get("weight") for message in messages]
    turns = rendered.turns[first:]
    if loss == "all":
        begin = rendered.turns[first - 1].stop if first else 0
        silent = [turn for turn in turns if weights[turn.message] == 0]
        _check_they_show(silent, messages)
        silent += [turn for turn in turns if turn.message in masked]
        return _complement(_union([(turn.start, turn.stop) for turn in silent]), begin, len(rendered.text))
    if loss == "weight":
        chosen = [turn for turn in turns if weights[turn.message] == 1]
        _check_they_show(chosen, messages)
    else:
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = {"assistant": assistants, "last": assistants[-1:]}[loss]
        chosen = [turn for turn in turns if turn.message in learned and weights[turn.message] != 0]
    return _union(
        [(turn.start if empty_think else turn.answer, turn.stop) for turn in chosen if turn.message not in masked]
    )


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


def _union(spans: list[Span]) -> list[Span]:
    """Sorted and disjoint, empty ones left out."""
    union: list[Span] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        elif start < stop:
            union.append((start, stop))
    return union


def _complement(spans: list[Span], begin: int, end: int) -> list[Span]:
    """What of `[begin, end)` lies outside of the spans."""
    edges = [begin, *(edge for span in spans for edge in span), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
