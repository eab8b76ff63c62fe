"""What a row holds beside the keys that its format reads: masks are followed, what would change the row is refused."""

import re
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.strict_json import IF_IDLE, BadRecord, listed
from titan_mi100.wording import shortened

Row = dict[str, Any]

INSTEAD = dict[str, dict[str, str]]()  # kind of keys -> key -> what to do instead of ignoring it, see columns.txt
for _line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
    if _line and not _line.startswith("#"):
        _kinds, _keys, *_remedy = map(str.strip, _line.split(" | "))
        for _kind in _kinds.split() if _remedy else [_kinds]:
            INSTEAD.setdefault(_kind, {}).update(dict.fromkeys(_keys.split(), "".join(_remedy)))
PARTS, REASONING, WHOLE_PARTS, _MASK_WORDS, _FOLLOWED = (
    {*INSTEAD[kind]} for kind in ("part", "reasoning", "whole part", "mask word", "followed")
)
LISTS = {"messages": "messages", "sharegpt": "conversations"}  # format -> its key with the list of messages
# In the name of a number or a list of them, in any form: not "constraint", not "glossary".
_MASK_STEMS = re.compile("(?<!s)train|learn|(?<!g)loss|weigh|mask|supervis|froz|freez|grad(?![eu])|backprop")
_FLAG_STEMS = re.compile("skip|ignor|exclu|omit|discard|drop|target")  # of a list of flags only
HOLD_MESSAGES = frozenset({"messages", "conversations", "prompt", "completion", "chosen", "rejected", "system"})
_NOT_MASKS = {"role", "content", "from", "value", "weight", "tool_calls", "reasoning_content"}  # keys of messages
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
    followed: Counter[str] = field(default_factory=Counter)  # mask that was followed -> in how many rows
    unused: dict[str, Unused] = field(default_factory=dict)
    nulls: Counter[str] = field(default_factory=Counter)  # "kept" and "left out" -> tool calls with null arguments
    notes: dict[str, tuple[int, int]] = field(default_factory=dict)  # see columns.txt -> rows, the first of them
    record: int = 0  # number of the record that is read

    def note(self, found: Iterable[str]) -> None:
        """Count what was found in the record, each once."""
        for name in {*found}:
            rows, first = self.notes.get(name, (0, self.record))
            self.notes[name] = rows + 1, first

    def note_unused(self, key: str, unused: Unused) -> None:
        if before := self.unused.get(key):
            unused = before._replace(rows=before.rows + unused.rows, words=before.words + unused.words)
        self.unused[key] = unused

    def add(self, later: "Findings", first: int) -> None:
        """Add those of later records. Args: first: the number of the first of them."""
        self.ignored.update(later.ignored)
        self.followed.update(later.followed)
        self.nulls.update(later.nulls)
        for name, (rows, record) in later.notes.items():
            before, earliest = self.notes.get(name, (0, first + record))
            self.notes[name] = before + rows, earliest
        for key, unused in later.unused.items():
            self.note_unused(key, unused._replace(record=first + unused.record))


def check_keys(form: str, row: Row, unread: Set[str]) -> None:
    """Refuse a row with keys that change its meaning. Args: form: name of the format; unread: keys it does not read."""
    preferences = INSTEAD["preference"]
    if type(row.get("label")) is not bool:  # KTO rows have a boolean one; an integer is usual in classification data
        preferences = {key: remedy for key, remedy in preferences.items() if key != "label"}
    of_conversations = {**INSTEAD["conversation"], **preferences, **INSTEAD.get(form, {})}
    instead = {"text": {}, "tokens": INSTEAD["tokens"]}.get(form, of_conversations)
    for key in sorted(unread & instead.keys()):
        kind = "preference" if key in preferences else "unknown key"
        raise BadRecord(kind, f"{key} in a row of format {form}; {instead[key]}; {IF_IDLE}")


def follow_masks(form: str, row: Row, unread: Set[str], holds: Set[str], findings: Findings) -> Row:
    """Turn masks into weights of messages (0 is not learned): those in the messages, and those beside them, which the
    returned row lacks.

    Args:
        holds: keys whose values may be messages.

    Raises:
        BadRecord: a key may say what is learned, but it is none of those that are followed, or not a list of 0 and 1
            (or booleans) with one for each message.
    """
    row, name = {**row}, LISTS.get(form, "")
    for key in holds & row.keys():
        messages = row[key]
        if isinstance(messages, list):
            row[key] = [_follow_inside(message, f"message {i}", findings) for i, message in enumerate(messages, 1)]
        elif isinstance(messages, dict):
            row[key] = _follow_inside(messages, key, findings)
    for key in sorted(filter(lambda key: _is_mask(key, row[key]), unread)):
        mask, messages, problem = row[key], row.get(name), ""
        if not name:
            problem = "no mask is followed; leave out rows that must not be learned, and name it in data.ignored_keys"
        elif _spelled(key) not in _FOLLOWED:
            problem = f"it may say what is learned; if 1 is learned there, rename it to loss_mask; {IF_IDLE}"
        elif not is_flags(mask) or not isinstance(messages, list) or len(mask) != len(messages):
            problem = f"only a list of 0 and 1, one for each message, is followed; write such a list; {IF_IDLE}"
        if problem:
            raise BadRecord("bad mask", f"{listed([key])} in a row of format {form}: {problem}")
        row[name] = [_weighted(one, int(flag), key) for one, flag in zip(messages or (), mask, strict=True)]
        findings.followed[key] += 1
        del row[key]
    return row


def _follow_inside(message: Any, where: str, findings: Findings) -> Any:
    """A message with its mask as weight."""
    odd = message.keys() - _NOT_MASKS if isinstance(message, dict) else ()
    for key in sorted(key for key in odd if _spelled(key) in _FOLLOWED or _MASK_STEMS.search(key.lower())):
        flag, reverses = message[key], _spelled(key) in ("masked", "is_masked")
        if flag is not None and not (is_flags([flag]) and (reverses or _spelled(key) in _FOLLOWED)):
            remedy = f"write weight instead: 0 is not learned, 1 is; {IF_IDLE}"
            raise BadRecord("bad mask", f"{where}: {listed([key])} may say what is learned; {remedy}")
        message = {name: value for name, value in message.items() if name != key}
        if flag is not None:
            message = _weighted(message, int(flag) ^ reverses, key)
            findings.followed[f"{key} in messages"] += 1
    return message


def _weighted(message: Any, weight: int, key: str) -> Any:
    if not isinstance(message, dict):  # refused when it is read
        return message
    if message.get("weight") not in (None, weight):
        raise BadRecord("contradiction", f"{key} differs from the weight of a message; keep one of them")
    return message | {"weight": weight}


def _spelled(key: str) -> str:
    return re.sub("(?<=[a-z])(?=[A-Z])|[- ]", "_", key).lower()


def is_flags(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(flag, int | float) and flag in (0, 1) for flag in value)


def _is_mask(key: str, value: Any) -> bool:
    if key == "labels":  # of tokens, although the row is read as something else
        return isinstance(value, list) and IGNORE in value
    low, numbers = key.lower(), value if isinstance(value, list) else [value]
    if "mask" in low or _names(key) & _MASK_WORDS:
        return key != "attention_mask"
    largest = float("inf") if isinstance(value, list) else 1  # of a row's own number: 3 is a count
    is_numeric = all(number is None or (isinstance(number, int | float) and number <= largest) for number in numbers)
    return bool((is_numeric and _MASK_STEMS.search(low)) or (is_flags(value) and _FLAG_STEMS.search(low)))


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
            where = "put it into the text it is for" + ", or name it in data.system_column" * (form == "columns")
            if form in LISTS:
                where = "put it into reasoning_content of its message"
            elif _names(key, last=True) & REASONING:
                where = "write the row as messages, with reasoning_content"
            detail = f"{key} in a row of format {form} holds a part of the prompt or answer, but is not read"
            raise BadRecord("part not read", f"{detail}; {where}; {IF_IDLE}")
        if texts:
            findings.note_unused(key, Unused(1, words, findings.record, shortened(repr(" ".join(texts)[:100]))))


def _is_part(key: str, form: str) -> bool:
    if form in LISTS:
        return bool(_names(key, last=True) & REASONING) or key.lower() == "reasoning_content"
    stem = re.sub(r"_?\d+$", "", key.lower()).removesuffix("s")  # question_2 is a further question
    return bool(_names(key, last=True) & (PARTS | REASONING)) or stem in WHOLE_PARTS


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
