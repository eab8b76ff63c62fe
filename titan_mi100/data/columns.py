"""What a row holds beside the keys that its format reads: masks are followed, what would change the row is refused."""

import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.strict_json import TO_IGNORE, BadRecord, listed

Row = dict[str, Any]

# Keys that change what a row means. A format that does not read such a key refuses the row: ignoring the key would
# train on something else than intended.
_MEANINGFUL = {
    *("system", "system_prompt", "system_message", "tools", "functions", "function_call", "documents", "history"),
    *("chat_template_kwargs", "enable_thinking", "images", "image", "videos", "video", "audios", "audio"),
}
# Keys of preference data (DPO, KTO): such rows hold answers that must not be learned.
_PREFERENCES = {"chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag"}
_MEANINGFUL_BESIDE_TOKENS = {
    *("loss_mask", "assistant_masks", "completion_mask", "weights", "position_ids", "seq_lengths"),
}
_LISTS = {"messages": "messages", "sharegpt": "conversations"}  # format -> its key with the list of messages
# A key that has one of the first words in its name says what is learned. One of the others may reverse the meaning.
_MASK_WORDS = {
    *("mask", "masks", "lossmask", "weight", "weights", "train", "trainable", "learn", "learnable", "loss"),
    *("supervise", "supervised", "masked", "unmasked", "untrainable"),
}
_REVERSING = {
    *("masked", "unmasked", "untrainable", "no", "not", "dont", "ignore", "ignored", "skip", "exclude", "excluded"),
    *("history", "input", "inputs", "prompt", "user", "system"),
}
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a key in snake_case or camelCase


@dataclass
class Findings:
    """What is found in rows beside their examples."""

    ignored: Counter[str] = field(default_factory=Counter)  # ignored key -> in how many rows or messages


def words_of(key: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(key)]


def check_keys(form: str, row: Row, unread: Set[str]) -> None:
    """Refuse a row with keys that change its meaning. Args: form: name of the format; unread: keys it does not read."""
    # KTO rows have a boolean `label`; an integer one is the usual column of a classification data set.
    meaningful = {"text": set(), "tokens": _MEANINGFUL_BESIDE_TOKENS}.get(form, _MEANINGFUL | _PREFERENCES)
    if type(row.get("label")) is bool and meaningful >= _PREFERENCES:
        meaningful |= {"label"}
    if meant := unread & meaningful:
        where = f"{listed(meant)} in a row of format {form}"
        if meant & (_PREFERENCES | {"label"}):
            raise BadRecord("preference", f"{where}; keep only the answers to learn, then delete the key")
        raise BadRecord("unknown key", f"{where}; {TO_IGNORE}")


def follow_masks(form: str, row: Row, unread: Set[str]) -> Row:
    """Turn a mask beside the messages into their weights: 0 is not learned.

    Raises:
        BadRecord: a key that says what is learned is not a list of 0 and 1 (or booleans), one for each message.
    """
    name = _LISTS.get(form, "")
    for key in sorted(filter(lambda key: _is_mask(key, row[key]), unread)):
        mask, messages = row[key], row.get(name)
        if (
            not (isinstance(mask, list) and isinstance(messages, list) and len(mask) == len(messages))
            or not all(isinstance(flag, int | float) and flag in (0, 1) for flag in mask)
            or not _REVERSING.isdisjoint(words_of(key))
        ):
            wanted = "only a list of 0 and 1, one for each message," if name else "no mask"
            raise BadRecord("bad mask", f"{key} in a row of format {form}: {wanted} is followed; {TO_IGNORE}")
        weighted = []
        for number, (message, flag) in enumerate(zip(messages, mask, strict=True), 1):
            if isinstance(message, dict):  # what else it may be is refused when it is read
                if message.get("weight") not in (None, flag):
                    raise BadRecord("contradiction", f"message {number}: its weight is not what {key} says")
                message = message | {"weight": int(flag)}
            weighted.append(message)
        row = row | {name: weighted}
    return row


def _is_mask(key: str, value: Any) -> bool:
    if key == "labels":  # of tokens, although the row is read as something else
        return isinstance(value, list) and IGNORE in value
    return key != "attention_mask" and not _MASK_WORDS.isdisjoint(words_of(key))
