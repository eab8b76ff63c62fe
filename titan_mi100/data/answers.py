"""Rows of preference data: pairs of answers, or single answers with a label, in the forms that people have.

| source | row |
|---|---|
| TRL | prompt, chosen, rejected: texts or messages; or no prompt: both hold the conversation |
| UltraFeedback | prompt, and the whole conversation in chosen and rejected; score_chosen, score_rejected |
| LLaMA-Factory | conversations or instruction, input, system, history; chosen and rejected: a message or a text |
| axolotl | messages, chosen, rejected |
| TRL's KTO, LLaMA-Factory's | any of the formats of formats.py, and label or kto_tag: true or false |
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from titan_mi100.data.conversation import Message, message_list, tool_list
from titan_mi100.data.strict_json import BadRecord, expect, kind_of, listed

# Further arrays of a row, see data.rows: per document of the row the sum of log p under the reference, and 1 (wanted)
# or -1 (not); per token the ids that the teacher thinks likeliest to follow, and their log p, (seq, k).
REFERENCE, LABEL, TEACHER_IDS, TEACHER_LOG_P = "reference", "label", "teacher_ids", "teacher_log_p"
# Of sampled answers, at each token that predicts a learned one: its advantage, 1 / the answer's tokens, the answer's
# score; log p of the learned token before training, under the reference, as the sampler said, and under a teacher.
ADVANTAGE, SHARE, SCORE = "advantage", "share", "score"
OLD, BASE, SAMPLER, TEACHER = "old_log_p", "base_log_p", "sampler_log_p", "teacher_of_sampled_log_p"
COLUMNS = {REFERENCE: "float64", LABEL: "int8", TEACHER_IDS: "int32", TEACHER_LOG_P: "float32"}  # and their dtypes
COLUMNS |= dict.fromkeys((ADVANTAGE, SHARE, SCORE, OLD, BASE, SAMPLER, TEACHER), "float64")
PER_ID = (TEACHER_IDS, TEACHER_LOG_P)  # these have k values per token

PAIRS, LABELS = "pairs", "labels"  # kinds of rows, see ObjectiveConfig.answers
PAIR_KEYS = frozenset({"chosen", "rejected"})
LABEL_KEYS = ("label", "kto_tag")
PROMPTS = ("prompt", "question", "instruction", "messages", "conversations")
OPTIONAL = frozenset(
    {*PROMPTS, "input", "system", "history", "tools", "score_chosen", "score_rejected", "chat_template_kwargs"}
)
PROMPT_AGAIN = "the prompt is inside both answers"
SAME, TIE, EARLIER = "both answers are the same", "both answers have the same score", "differ before the last turn"

ReadMessages = Callable[[dict[str, Any]], list[Message]]  # a row without answers -> the messages of its prompt
ReadMessage = Callable[..., Message]  # of either form; with context=True it is not learned, so it may be blank


def read_pair(row: dict[str, Any], prompt_of: ReadMessages, message: ReadMessage) -> tuple[Any, ...]:
    """Args: prompt_of: reads the row's system, history, instruction and input. message: reads one of either form.

    Returns:
        The messages with the chosen answer, those with the rejected one (a prompt has weight 0), the tools, and why the
        pair teaches nothing ("": it does).

    Raises:
        BadRecord: what is wrong with the row.
    """
    if any(value is not None for value in (row.get("chat_template_kwargs") or {}).values()):
        text = "chat_template_kwargs of a row are not followed; name the key in data.ignored_keys, and set"
        raise BadRecord("unknown key", f"{text} data.enable_thinking for all rows")
    chosen, rejected = (_answer(row, name, message) for name in ("chosen", "rejected"))
    keys = [name for name in PROMPTS if row.get(name) not in (None, "", [])]
    if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
        shared = _shared(chosen, rejected)
        prompt, chosen_answer, rejected_answer = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt and chosen[0] == rejected[0]:
            raise BadRecord("no answer", "chosen or rejected holds the prompt alone; add its answer")
        if not prompt:
            raise BadRecord("other prompts", "chosen and rejected begin differently; begin both with the prompt")
        _check_prompt_again(row, keys, prompt, chosen, message)
        _check_no_more(row, "the conversation", "history", "input")
        prompt = prompt_of({"system": row.get("system")}) + prompt
    elif len(keys) != 1:
        text = f"it is given in {listed(keys)}; keep one" if keys else f"expected one of {listed(PROMPTS)}"
        raise BadRecord("no prompt" if not keys else "two prompts", text)
    else:
        prompt, chosen_answer, rejected_answer = _prompt(row, keys[0], prompt_of, message), chosen, rejected
    if sum(turn["role"] == "system" for turn in prompt) > 1:
        raise BadRecord("two system messages", "one is system, another is in the messages; delete one")
    for name, answer in (("chosen", chosen_answer), ("rejected", rejected_answer)):
        if not answer or answer[0]["role"] not in ("assistant", "user"):
            raise BadRecord("no answer", f"{name} has no answer behind the prompt that both share; add it")
        if not any(turn["role"] == "assistant" for turn in answer):
            raise BadRecord("no answer", f"{name} ends with the user; end it with the assistant's answer")
    if prompt[-1]["role"] == "assistant" and chosen_answer[0]["role"] == "assistant":
        raise BadRecord("two answers", "the prompt ends with an assistant message; end it with the user's")
    why = SAME if chosen_answer == rejected_answer else ""
    better, worse = row.get("score_chosen"), row.get("score_rejected")
    if isinstance(better, int | float) and isinstance(worse, int | float):
        if better < worse:
            text = f"score_chosen = {better} is below score_rejected = {worse}"
            raise BadRecord("contradiction", f"{text}; swap answers and scores, or name both keys in data.ignored_keys")
        why = why or TIE * (better == worse)
    prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]
    return prompt + chosen_answer, prompt + rejected_answer, tool_list(row.get("tools")), why


def differs_early(chosen: list[Message], rejected: list[Message]) -> bool:
    """Whether there is more than one turn in which the answers differ."""
    shared = _shared(chosen, rejected)
    return any(turn["role"] == "user" for turn in chosen[shared:] + rejected[shared:])


def repeats_prompt(chosen: list[Message], rejected: list[Message]) -> bool:
    """Whether both answers begin with the last question, as in rows that were written for another program."""
    shared = _shared(chosen, rejected)
    asked = " ".join((chosen[shared - 1].get("content") or "").split()) if shared else ""
    answers = (" ".join((messages[shared].get("content") or "").split()) for messages in (chosen, rejected))
    return bool(asked) and all(answer.startswith(asked) for answer in answers)


def label_of(row: dict[str, Any], names: Sequence[str] = LABEL_KEYS) -> tuple[int, str]:
    """1 or -1, and the key of `names` that says so. Raises BadRecord: none, or not true or false."""
    [*keys] = [key for key in names if row.get(key) is not None]
    if empty := [key for key in names if key in row and not keys]:
        raise BadRecord("no label", f"{empty[0]} is null; delete the row, or write true or false")
    if len(keys) != 1:
        remedy = "name its column in data.label_column" if names == LABEL_KEYS else "correct data.label_column"
        raise BadRecord("no label", f"expected {names[0]} (true or false), the row has {listed(row)}; {remedy}")
    if type(row[keys[0]]) is not bool:
        raise BadRecord("wrong type", f"{keys[0]} must be true or false, is {kind_of(row[keys[0]])}")
    return (1 if row[keys[0]] else -1), keys[0]


def _answer(row: dict[str, Any], name: str, message: ReadMessage) -> list[Message]:
    answer = row.get(name)
    if answer is None and name in row:
        raise BadRecord("nothing to learn", f"{name} is null; delete the row")
    if answer is None:
        remedy = f"name its column in data.{name}_column"
        raise BadRecord("missing key", f"the row has no {name}, only {listed(row)}; {remedy}")
    if isinstance(answer, str):
        if not answer.strip():
            raise BadRecord("nothing to learn", f"{name} is blank; delete the row")
        return [{"role": "assistant", "content": answer}]
    if isinstance(answer, dict):
        answer = [answer]
    if not isinstance(answer, list):
        raise BadRecord("wrong type", f"{name} must be a text, a message or a list of messages, is {kind_of(answer)}")
    try:
        return message_list(answer, name, message)
    except BadRecord as bad:
        raise BadRecord(bad.kind, f"{name}: {bad.detail}") from None


def _prompt(row: dict[str, Any], name: str, prompt_of: ReadMessages, message: ReadMessage) -> list[Message]:
    if isinstance(row[name], list):
        _check_no_more(row, name, "input")
        before = message_list(row[name], name, partial(message, context=True))
        return prompt_of({**row, name: None}) + before
    expect(row[name], str, f"{name} must be a text or a list of messages")
    return prompt_of(row)


def _check_no_more(row: dict[str, Any], where: str, *names: str) -> None:
    if extra := [name for name in names if row.get(name) not in (None, "", [])]:
        raise BadRecord("part not read", f"{listed(extra)} beside {where}, which is a list of messages; put it there")


def _check_prompt_again(
    row: dict[str, Any], given: list[str], prompt: list[Message], chosen: list[Message], message: ReadMessage
) -> None:
    """A prompt beside whole conversations must be theirs."""
    texts = [" ".join(turn["content"].split()) for turn in prompt]
    for name in given:
        if isinstance(row[name], str):
            is_same = " ".join(row[name].split()) in texts
        else:
            turns = [_plain(turn) for turn in message_list(row[name], name, partial(message, context=True))]
            is_same = turns == [_plain(turn) for turn in chosen[: len(turns)]]
        if not is_same:
            raise BadRecord("two prompts", f"{name} is not the prompt that chosen and rejected begin with; keep one")


def _plain(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "weight"}


def _shared(one: list[Message], other: list[Message]) -> int:
    """How many messages both begin with. The answer is at least the last message of each."""
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)
