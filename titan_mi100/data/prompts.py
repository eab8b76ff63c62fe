"""Prompts: what stands before the answer of a row; and those of held-out documents, with the answers that follow."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.conversation import Message, drop_keys, last_of, tool_list
from titan_mi100.data.formats import choose_format
from titan_mi100.data.prepared import PackedDataset, RowSet
from titan_mi100.data.strict_json import BadRecord, listed

_TURNS = {"messages": {"role": "assistant", "content": "."}, "conversations": {"from": "gpt", "value": "."}}
_ANSWERS = {"prompt": "completion", "question": "answer", "instruction": "output", "input": "output"}
_FORMATS = {"messages": "messages", "conversations": "sharegpt", "prompt": "prompt_completion", "instruction": "alpaca"}


class Prompt(NamedTuple):
    ids: list[int]
    reference: list[int]  # the token ids that follow it in the data


def held_out_prompts(sets: Sequence[RowSet], count: int) -> list[Prompt]:
    """Prompts of the first documents, taken from the sets in turn, each in the order of its input. Same on every rank.

    Returns:
        `count` prompts; fewer if the sets have fewer documents of at least two tokens.
    """
    in_turn = (prompt for prompts in zip_longest(*map(_prompts, sets)) for prompt in prompts if prompt is not None)
    return list(islice(in_turn, count))


def prompt_of(ids: np.ndarray, supervised: np.ndarray) -> Prompt:
    """Split a document before its first supervised turn: the prompt is the text before it, the reference is the turn.

    A document that is supervised from its beginning (plain text) has no such turn. Its first half is the prompt, its
    second half the reference.

    Args:
        ids: (tokens,), at least two.
        supervised: (tokens,) bool; the first entry is ignored, because nothing predicts the first token.
    """
    tokens = ids.tolist()
    learned = np.flatnonzero(supervised[1:]) + 1
    if not len(learned) or learned[0] == 1:
        return Prompt(tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])
    start = int(learned[0])
    behind = np.flatnonzero(~supervised[start:])
    return Prompt(tokens[:start], tokens[start : start + int(behind[0]) if len(behind) else None])


def _prompts(rows: RowSet) -> Iterator[Prompt]:
    return (prompt_of(ids, supervised) for ids, supervised in _documents(rows) if len(ids) > 1)


def _documents(rows: RowSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, supervised) of each document, in the order of the input."""
    if isinstance(rows, PackedDataset):  # packing reorders documents; their numbers keep the order of the input
        for number in np.sort(rows.packing.documents):
            labels, values = rows.documents.labels, rows.documents[number]
            if labels is not None and labels[number] < 0:
                continue  # an answer that is not wanted
            yield values >> 1, (values & 1).astype(bool)
        return
    for row in map(rows.row, range(len(rows))):
        yield from row.documents()


def asked_of(row: dict[str, Any]) -> tuple[list[Message], list[Any] | None]:
    """What stands before the answer of a row, if it has one, else all of it; and its tools.

    Raises:
        BadRecord: the row has no prompt.
    """
    fields = drop_keys(row, frozenset(), Counter())
    lists, texts = ([key for key in keys if fields.get(key) is not None] for keys in (_TURNS, _ANSWERS))
    keys = lists[:1] or ([key for key in texts if key != "input"] or texts)
    if len(keys) != 1:
        every = listed([*_TURNS, *_ANSWERS])
        raise BadRecord("not one prompt", f"a row has one of {every}; this one has {listed(keys or row)}")
    [key] = keys
    system = "system" * ("system" in fields)
    columns = DataConfig(prompt_column=key, response_column=_ANSWERS.get(key, ""), system_column=system)
    if lists:  # an answer to a question that has none; behind another answer it is the second one
        fields[key] = [*fields[key], _TURNS[key]] if isinstance(fields[key], list) else fields[key]
    elif key != "prompt" or not isinstance(fields.get("completion"), list):
        fields[_ANSWERS[key]] = "."
    form = choose_format("", DataConfig(format=_FORMATS[key]) if key in _FORMATS else columns)
    example = form.read(fields)
    before = (example.messages or [])[: last_of("assistant", example.messages or [])]
    if lists and before and before[-1]["role"] == "assistant":
        del before[-1]
    last = before[-1] if before else {"role": "system"}
    if last["role"] in ("assistant", "system") or (last["role"] == "user" and not last["content"].strip()):
        raise BadRecord(
            "nothing to answer", "before the answer there is no message of the user, or a blank one; add it"
        )
    return before, example.tools or tool_list(fields.get("tools"))
