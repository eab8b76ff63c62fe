"""Finds the messages of a conversation in its rendered text, by the sources of the text's characters (`Traced`)."""

import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from titan_mi100.text.traced import MIXED, Origin, runs_of
from titan_mi100.wording import shortened

REASONING = "reasoning_content"  # `Origin.field` of all reasoning, also of think blocks in the content


@dataclass(frozen=True)
class Turn:
    """The characters `[start, stop)` of one message in the text; empty if the template shows nothing of it."""

    message: int  # index
    role: str
    start: int  # assistant: after the turn's header; others: their first own character (not that of the role)
    stop: int  # assistant: after the turn's end token; others: after their last own character and an end token there
    answer: int  # `start`, or the end of an empty think block that the template itself wrote there
    lost_reasoning: bool  # the assistant's message has reasoning, but the template left it out of the text
    reasons: bool = False  # the text shows reasoning of the assistant's message
    thought: int = 0  # the end of that reasoning and of the tag behind it
    trimmed: bool = False  # the template removes white space at the beginning or end of the answer
    problem: str = ""  # why it must not be learned as it stands, with a remedy: the template hides or repeats text ...


@dataclass(frozen=True)
class Prompt:
    header: str  # begins an assistant's turn
    empty_think: str  # follows the header if enable_thinking is False; "" if the template does not know the variable
    all: tuple[str, ...] = ()  # the prompts without enable_thinking, with True and with False
    changes_text: bool = False  # enable_thinking also changes the text before the prompt


def reasoning_spans(message: dict[str, Any]) -> list[tuple[int, int]]:
    """Spans of reasoning in an assistant's content: its think blocks that are not blank.

    None if the message has a reasoning field. The first block may lack its opening tag, because the prompts of some
    models end with that tag.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or _has_text(message.get(REASONING)):
        return []
    thoughts, position = [], 0
    for before in content.split("</think>")[:-1]:
        opened, stop = before.rfind("<think>"), position + len(before)
        if opened >= 0 or (position == 0 and not isinstance(message.get(REASONING), str)):
            start = position + opened + len("<think>") if opened >= 0 else 0
            if _has_text(content[start:stop]):
                thoughts.append((start, stop))
        position = stop + len("</think>")
    return thoughts


def has_reasoning(message: dict[str, Any]) -> bool:
    """Whether an assistant's message has reasoning, in a field of its own or in its content."""
    return _has_text(message.get(REASONING)) or bool(reasoning_spans(message))


def _has_text(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _bare(text: str, with_tags: bool) -> str:
    """The text without white space and empty think blocks, and optionally without think tags."""
    text = "".join(text.split()).replace("<think></think>", "")
    return text if with_tags else text.replace("<think>", "").replace("</think>", "")


def _calls_in(text: str) -> list[tuple[str, Any]] | None:
    """The calls in a generated text as servers read them: name and arguments. None: they are in an unknown form.

    Known are JSON (the hermes parser) and XML (Qwen3-Coder's), whose arguments stay texts.
    """
    calls = []
    for inside in re.findall("<tool_call>\\s*(.*?)\\s*</tool_call>", text, re.DOTALL):
        if xml := re.fullmatch("<function=([^>]*)>(.*?)</function>", inside, re.DOTALL):
            parameters = re.findall("<parameter=([^>]*)>\n?(.*?)\n?</parameter>", xml[2], re.DOTALL)
            calls.append((xml[1], dict(parameters)))
        elif not inside.startswith(("{", "<function=")):
            return None
        else:
            try:
                call = json.loads(inside)
            except ValueError:
                return []  # cut off at a tag in an argument
            if not {"name", "arguments"} <= call.keys():
                return None
            calls.append((call["name"], call["arguments"]))
    return calls


def _is_same(given: Any, read: Any) -> bool:
    """Whether a value of a call is read as it was given: JSON, or its text in XML. Arguments can be JSON text."""
    if isinstance(given, str) and isinstance(read, dict):
        given = json.loads(given)
    if isinstance(given, dict) and isinstance(read, dict):
        return given.keys() == read.keys() and all(_is_same(value, read[key]) for key, value in given.items())
    if isinstance(given, str) or not isinstance(read, str):
        return given == read
    return read in (str(given), json.dumps(given), json.dumps(given, ensure_ascii=False))


class Untraceable(Exception):
    """The sources of the characters do not determine where an assistant's turn begins or ends."""


class TurnFinder:
    """Finds the turns of a rendered text by the sources of its characters. Call it for the messages in order."""

    def __init__(self, text: str, end_of_turn: str) -> None:
        self.text, self.end_of_turn = str.__str__(text), end_of_turn
        self._spans: list[tuple[int, int, Origin]] = []  # (begin, end, source) of text from messages, in order
        self._of_message: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # message -> (begin, end, field)
        end = 0
        for length, source in runs_of(text):
            begin, end = end, end + length
            if source is not None:
                self._spans.append((begin, end, source))
                self._of_message[source.message].append((begin, end, source.field))
        self._begins = [begin for begin, _, _ in self._spans]
        self._ends = [end for _, end, _ in self._spans]
        self._last_stop = 0  # end of the last turn
        self._last_assistant_stop = 0  # end of the last assistant turn

    def behind(self, index: int) -> str:
        """The text between a message's last own character and the first one of a later message."""
        ends = [end for _, end, _ in self._of_message[index]]
        begins = [begin for begin, _, source in self._spans if source.message > index and source.field != "role"]
        return self.text[max(ends, default=len(self.text)) : min(begins, default=len(self.text))]

    def other(self, index: int, role: str, problem: str = "") -> Turn:
        """The turn of a message that is not the assistant's."""
        own = [(begin, end) for begin, end, field in self._of_message[index] if field != "role"]
        start, stop = (own[0][0], own[-1][1]) if own else (self._last_stop, self._last_stop)
        if own and self.end_of_turn and self._is_literal(stop, self.end_of_turn):
            stop += len(self.end_of_turn)
        self._last_stop = stop
        return Turn(index, role, start, stop, start, False, problem=problem)

    def assistant(self, index: int, message: dict[str, Any], prompt: Prompt, is_last: bool = False) -> Turn:
        """The turn of an assistant's message. Raises Untraceable. Args: is_last: no message follows it."""
        spans = self._of_message[index]
        fields = {field for _, _, field in spans}
        start = self._header_end(spans, message["role"], prompt.header)
        answer = start + len(prompt.empty_think) if self._is_literal(start, prompt.empty_think) else start
        content = message.get("content")
        answered = _has_text(content.split("</think>")[-1] if isinstance(content, str) else content)
        if answered and not fields & {"content", MIXED}:
            raise Untraceable("the template drops or rewrites its content")
        if _has_text(message.get("tool_calls")) and not fields & {"tool_calls", MIXED}:
            raise Untraceable("the template drops or rewrites its tool_calls")
        last = max([answer, *(end for _, end, _ in spans)])
        text_end = self.text.find(self.end_of_turn, last)
        if text_end < 0:
            raise Untraceable(f"no {self.end_of_turn!r} ends the turn")
        stop = text_end + len(self.end_of_turn)
        if not self.messages_between(start, stop) <= {index}:
            raise Untraceable("text of another message is inside its turn")
        reasoned = has_reasoning(message)
        lost = reasoned and not fields & {REASONING, MIXED}
        self._last_stop = self._last_assistant_stop = stop
        problem = self.difference(index, message, lost)
        if not problem and message.get("weight") != 0:
            problem = self._misread(start, text_end, message, lost)
        if reasoning_spans(message) and "</think>" in self.text[start : self._first_own(index)]:
            problem = "the template writes an empty think block before the content's; move that to reasoning_content"
        if is_last and not problem and not reasoned and not self._follows_prompt(index, start, prompt):
            problem = (
                "it has no reasoning, but the template's prompts open a think block, so none leads to this answer; "
                "add reasoning_content, or name the template of a model without thinking in model.chat_template"
            )
        thoughts = [end for _, end, field in spans if field == REASONING]
        behind = re.compile(r"\s*</think>\n*").match(self.text, thoughts[-1]) if thoughts else None
        thought = behind.end() if behind else max(thoughts, default=stop)
        trimmed = not problem and self._is_trimmed(index, message)
        shows = reasoned and not lost
        return Turn(index, message["role"], start, stop, answer, lost, shows, thought, trimmed, problem)

    def _misread(self, start: int, stop: int, message: dict[str, Any], lost: bool) -> str:
        """What a server would read differently in a generated turn, with a remedy; "": nothing.

        A server takes what is before the first </think> for reasoning, and the tags of calls behind it for calls.
        """
        text, content = self.text[start:stop], message.get("content")
        if not isinstance(content, str):
            return ""
        reasoning = message.get(REASONING)
        if text.lstrip().startswith("<think>") or self.text[:start].rstrip().endswith("<think>"):
            thought, tag, text = text.partition("</think>")
            if not isinstance(reasoning, str):
                before, own, behind = content.partition("</think>")
                reasoning, content = (before, behind) if own else ("", content)
            rest = _bare(text, True).removeprefix(_bare(content, True))
            is_same = _bare(thought, False) == ("" if lost else _bare(reasoning, False))
            if not tag or not is_same or rest.startswith("</think>"):
                problem = f"a server would read {shortened(repr(thought.strip()))} as its reasoning, which it is not"
                return f"{problem}; remove think tags from the text, or name another template in model.chat_template"
        given_calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
        calls = _calls_in(text) if given_calls and "<tool_call>" in text else None
        if calls is None:
            return ""
        if len(calls) == len(given_calls) and all(
            read[0] == call["name"] and _is_same(call.get("arguments"), read[1])
            for read, call in zip(calls, given_calls, strict=True)
        ):
            return ""
        return "a server would read other calls; remove tags such as </tool_call> and </parameter> from its text"

    def _is_trimmed(self, index: int, message: dict[str, Any]) -> bool:
        spans, content = self._of_message[index], message.get("content")
        if not isinstance(content, str) or any(field == MIXED for _, _, field in spans):
            return False
        shown = "".join(self.text[begin:end] for begin, end, field in spans if field == "content")
        if "</think>" in content and not isinstance(message.get(REASONING), str):
            content, shown = (text.rpartition("</think>")[2].lstrip("\n") for text in (content, shown))
        return bool(content.strip()) and content != shown

    def _follows_prompt(self, index: int, start: int, prompt: Prompt) -> bool:
        """Whether one of the prompts stands before a message's first own character, and no think block behind it.

        A model would have to close such a block at once. The last token of its prompt would not even occur in the row:
        in `<think>`, two line breaks and `</think>` both line breaks are one token.

        Args:
            start: end of the turn's header.
        """
        first = self._first_own(index)
        for text in sorted(prompt.all, key=len, reverse=True):
            begin = self.text.rfind(text, 0, first)
            if begin >= 0 and begin <= start <= begin + len(text):
                return "</think>" not in self.text[begin + len(text) : first]
        return False

    def _first_own(self, index: int) -> int:
        """Where the text shows a message's first character, besides its role; the end of the text: nowhere."""
        return min([begin for begin, _, field in self._of_message[index] if field != "role"], default=len(self.text))

    def difference(self, index: int, message: dict[str, Any], lost_reasoning: bool) -> str:
        """What the template leaves out of a message's own text, or repeats, with a remedy; "": nothing.

        White space, empty think blocks and reasoning that counts as lost are not compared. Text of others than the
        assistant may be rewritten.
        """
        content, spans = message.get("content"), self._of_message[index]
        if not isinstance(content, str) or any(field == MIXED for _, _, field in spans):
            return ""
        if lost_reasoning:
            for start, stop in reversed(reasoning_spans(message)):
                content = content[:start] + content[stop:]
        reasoning = message.get(REASONING) if message.get("role") == "assistant" else None
        texts = [content] if lost_reasoning or not isinstance(reasoning, str) else [reasoning, content]
        shown = [self.text[begin:end] for begin, end, field in spans if field in ("content", REASONING)]
        # A template takes the think blocks of an answer apart, and writes their tags itself.
        with_tags = message.get("role") != "assistant" or isinstance(message.get(REASONING), str)
        expected, pieces, cursor = _bare("".join(texts), with_tags), [_bare(text, with_tags) for text in shown], 0
        if "".join(pieces) == expected:
            return ""
        remedy = "change the message, or name a template that shows it once and whole in model.chat_template"
        if expected and "".join(pieces).count(expected) > 1:
            return f"the template shows its text more than once; {remedy}"
        for piece in pieces:
            begin = expected.find(piece, cursor)
            if begin < 0:
                return "" if message.get("role") != "assistant" else f"the template rewrites its text; {remedy}"
            if begin > cursor:
                break
            cursor = begin + len(piece)
        else:
            begin = len(expected)
        return f"the template leaves out {shortened(repr(expected[cursor:begin]))}; {remedy}" if begin > cursor else ""

    def _header_end(self, spans: list[tuple[int, int, str]], role: str, header: str) -> int:
        """The end of the turn's header, which the template wrote around this message's role.

        The header is the generation prompt, or the prompt up to the end of a line after the role: a prompt can open a
        think block in further lines, which turns without reasoning lack. The longest match counts.
        """
        readings = []  # ways to split the prompt: (text before the role, lines after it), the longest first
        for match in re.finditer(re.escape(role), header):
            lines = header[match.end() :].splitlines(keepends=True) or [""]
            readings += [(header[: match.start()], behind) for behind in reversed([*accumulate(lines)])]
        for begin, end, field in spans:
            if field == "role" and begin >= self._last_assistant_stop and self.text[begin:end] == role:
                for before, behind in readings:
                    if self._is_literal(begin - len(before), before) and self._is_literal(end, behind):
                        return end + len(behind)
        raise Untraceable("the template does not write its role between the lines of the generation prompt")

    def _is_literal(self, position: int, expected: str) -> bool:
        """Whether `expected` is at this position, written by the template itself and not by a message."""
        stop = position + len(expected)
        return position >= 0 and self.text[position:stop] == expected and not self.messages_between(position, stop)

    def messages_between(self, start: int, stop: int) -> set[int]:
        """Indices of the messages that characters in `[start, stop)` came from."""
        first, last = bisect_right(self._ends, start), bisect_left(self._begins, stop)
        return {source.message for _, _, source in self._spans[first:last]}
