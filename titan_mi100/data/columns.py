"""What a row holds beside the keys that its format reads: masks are followed, what would change the row is refused."""

import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.strict_json import TO_IGNORE, BadRecord, listed
from titan_mi100.wording import shortened

Row = dict[str, Any]

# Keys that change what a row means. A format that does not read such a key refuses the row: ignoring the key would
# train on something else than intended.
_MEANINGFUL = {
    *("system", "system_prompt", "system_message", "tools", "functions", "function_call", "documents", "history"),
    *("chat_template_kwargs", "enable_thinking", "images", "image", "videos", "video", "audios", "audio"),
}
# Keys of preference data (DPO, KTO): such rows hold answers that must not be learned.
_PREFERENCES = {"chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag"}
_BESIDE_TOKENS = {
    *("loss_mask", "assistant_masks", "completion_mask", "weights", "position_ids", "document_ids", "doc_ids"),
    *("seq_lengths", "seq_lens", "seqlens", "cu_seqlens", "cu_seq_lens", "seq_idx", "segment_ids", "sequence_ids"),
}
_LISTS = {"messages": "messages", "sharegpt": "conversations"}  # format -> its key with the list of messages
# A key with "mask" or one of the first words in its name says what is learned. One of the others may reverse it.
# Plurals count, too, here and below.
_MASK_WORDS = {"weight", "train", "trainable", "learn", "learnable", "loss", "supervised"}
_FLAG_WORDS = {"training", "learned", "supervise", "target", "ignore", "ignored", "skip", "exclude", "excluded"}
_REVERSING = {
    *("masked", "unmasked", "no", "not", "ignore", "ignored", "skip", "exclude", "excluded"),
    *("history", "input", "prompt", "user"),
}
# Keys that hold a part of the prompt or answer: those whose last word is in one of the first two sets, and those whose
# whole name is in the third. Beside a list of messages only the second counts.
PARTS = {
    *("context", "passage", "paragraph", "background", "evidence", "hint", "choice", "option", "distractor"),
    *("premise", "hypothesis", "document", "article", "table", "schema", "explanation"),
}
REASONING = {"reasoning", "thinking", "think", "thought", "rationale", "cot", "scratchpad"}
WHOLE_PARTS = {
    *("input", "instruction", "question", "query", "prompt", "problem"),
    *("a", "b", "c", "d", "e", "opa", "opb", "opc", "opd"),
}
MANY_WORDS = 8  # a column that is not used and has more of them on average is warned of
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a key in snake_case or camelCase
_NO_SPACES = re.compile("[\u3000-\u9fff\uac00-\ud7af]{2}")  # Chinese, Japanese, Korean: counted as a word


class Unused(NamedTuple):
    """The texts of a column that is not used, and is not contained in what is used."""

    rows: int
    words: int
    record: int  # the number of a record with such a text
    example: str


@dataclass
class Findings:
    """What is found in rows beside their examples."""

    ignored: Counter[str] = field(default_factory=Counter)  # ignored key -> in how many rows or messages
    unused: dict[str, Unused] = field(default_factory=dict)
    nulls: Counter[str] = field(default_factory=Counter)  # "kept" and "left out" -> tool calls with null arguments
    record: int = 0  # number of the record that is read

    def note_unused(self, key: str, found: Unused) -> None:
        if before := self.unused.get(key):
            found = before._replace(rows=before.rows + found.rows, words=before.words + found.words)
        self.unused[key] = found

    def add(self, later: "Findings", first: int) -> None:
        """Add those of later records. Args: first: the number of the first of them."""
        self.ignored.update(later.ignored)
        self.nulls.update(later.nulls)
        for key, found in later.unused.items():
            self.note_unused(key, found._replace(record=first + found.record))


def check_keys(form: str, row: Row, unread: Set[str]) -> None:
    """Refuse a row with keys that change its meaning. Args: form: name of the format; unread: keys it does not read."""
    # KTO rows have a boolean `label`; an integer one is the usual column of a classification data set.
    preferences = _PREFERENCES | {"label"} if type(row.get("label")) is bool else _PREFERENCES
    meaningful = {"text": set(), "tokens": _BESIDE_TOKENS}.get(form, _MEANINGFUL | preferences)
    if meant := unread & meaningful:
        where = f"{listed(meant)} in a row of format {form}"
        if meant & preferences:
            remedy = 'to train on preferences, set [objective] name = "preference"'
            if form == "pairs":
                remedy = (
                    "chosen and rejected are what is read; if the key does not matter, name it in data.ignored_keys"
                )
            raise BadRecord("preference", f"{where}; {remedy}")
        raise BadRecord("unknown key", f"{where}; {TO_IGNORE}")


def follow_masks(form: str, row: Row, unread: Set[str]) -> Row:
    """Turn a mask beside the messages into their weights: 0 is not learned.

    Raises:
        BadRecord: a key that says what is learned is not a list of 0 and 1 (or booleans), one for each message.
    """
    name = _LISTS.get(form, "")
    for key in sorted(filter(lambda key: _is_mask(key, row[key]), unread)):
        mask, messages = row[key], row.get(name)
        is_mask = isinstance(mask, list) and all(isinstance(flag, int | float) and flag in (0, 1) for flag in mask)
        if not is_mask or not isinstance(messages, list) or len(mask) != len(messages) or _names(key) & _REVERSING:
            wanted = "only a list of 0 and 1, one for each message," if name else "no mask"
            raise BadRecord("bad mask", f"{key} in a row of format {form}: {wanted} is followed; {TO_IGNORE}")
        pairs = [(m, int(flag)) for m, flag in zip(messages, mask, strict=True)]
        # What a message may be other than an object is refused when it is read.
        if any(isinstance(m, dict) and m.get("weight") not in (None, weight) for m, weight in pairs):
            raise BadRecord("contradiction", f"{key} differs from the weight of a message")
        row = row | {name: [m | {"weight": weight} if isinstance(m, dict) else m for m, weight in pairs]}
    return row


def _is_mask(key: str, value: Any) -> bool:
    if key == "labels":  # of tokens, although the row is read as something else
        return isinstance(value, list) and IGNORE in value
    is_list_of_flags = isinstance(value, list) and all(flag in (0, 1) for flag in value)
    words = _MASK_WORDS | _FLAG_WORDS if is_list_of_flags else _MASK_WORDS
    return key != "attention_mask" and ("mask" in key.lower() or bool(_names(key) & words))


def _names(key: str, last: bool = False) -> set[str]:
    """The words of a key, and their singulars. Args: last: of the last word of several letters only."""
    words = [word.lower() for word in _WORD.findall(key)]
    words = [word for word in words if len(word) > 1][-1:] if last else words
    return {*words, *(word.removesuffix("s") for word in words)}


def check_unused(form: str, row: Row, read: Set[str], unread: Set[str], findings: Findings) -> None:
    """Refuse a row with a part of its prompt or answer in a column that is not read; note its other unused texts.

    Args:
        read, unread: keys that the format reads, and others.
    """
    used: list[str] = []
    for key in sorted(unread):
        is_part = form != "text" and _is_part(key, form)
        texts = _texts(row[key], is_part)
        words = sum(len(text.split()) + (0 if text.isascii() else len(_NO_SPACES.findall(text))) for text in texts)
        if is_part or words > MANY_WORDS:
            used = used or [text for name in sorted(read & row.keys()) for text in _texts(row[name], True)]
            if all(_is_inside(text, " ".join(used)) for text in texts):
                continue
        if is_part and not all(text in " ".join(texts) for text in used):  # else: the whole row, rendered
            where = "reasoning_content of its message" if form in _LISTS else "the text it is for"
            where += ", name it in data.system_column" * (form == "columns")
            what = f"{key} in a row of format {form} holds a part of the prompt or answer, but is not read"
            raise BadRecord("part not read", f"{what}; put it into {where}, or name it in data.ignored_keys")
        if texts:
            findings.note_unused(key, Unused(1, words, findings.record, shortened(repr(" ".join(texts)[:100]))))


def _is_part(key: str, form: str) -> bool:
    if form in _LISTS:
        return bool(_names(key, last=True) & REASONING) or key.lower() == "reasoning_content"
    whole = re.sub(r"_?\d+$", "", key.lower()).removesuffix("s")  # question_2 is a further question
    return bool(_names(key, last=True) & (PARTS | REASONING)) or whole in WHOLE_PARTS


def _texts(value: Any, with_numbers: bool) -> list[str]:
    """The texts in a value, with single spaces between words. Args: with_numbers: numbers in lists and objects, too."""
    if isinstance(value, str):
        return [text] if (text := " ".join(value.split())) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    numbers = {int, float} if with_numbers else {}
    return [text for item in items for text in ([str(item)] if type(item) in numbers else _texts(item, with_numbers))]


def _is_inside(text: str, whole: str) -> bool:
    """Whether a text is in another one; a short one as whole words."""
    if len(text) > 40 or text not in whole:
        return text in whole
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", whole, re.ASCII) is not None
