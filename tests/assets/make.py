"""Writes tests/assets: a small tokenizer of Qwen3's kind and three small data sets. All text in them is written here.

Usage: python tests/assets/make.py [output folder]

The same files come out byte for byte on every run (with the pinned `tokenizers`); a test compares them with those in
the repository.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Qwen3's own split into words; the tokenizer must be refused or represented exactly, so the debug one has it too.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BASE_VOCAB_SIZE = 700  # 256 bytes and 444 merges
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# ChatML. The reasoning of earlier answers is dropped; the answer that ends the conversation always shows a
# <think> block, empty if it has no reasoning; enable_thinking=false closes the block in the generation prompt.
CHAT_TEMPLATE = r"""
{%- set ns = namespace(last_user=(messages | length) - 1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = message.content | default('', true) -%}
    {%- if message.role == 'system' or message.role == 'user' -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ text ~ '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' ~ text ~ '\n</tool_response><|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set thought = message.reasoning_content | default('', true) -%}
        {%- if not thought and '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}
            {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' -}}
        {%- if loop.index0 > ns.last_user and (loop.last or thought) -%}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' -}}
        {%- endif -%}
        {{- text -}}
        {%- for call in message.tool_calls | default([], true) -%}
            {%- set call = call.function | default(call) -%}
            {%- if text or not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n' ~ ({'name': call.name, 'arguments': call.arguments} | tojson) ~ '\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- else -%}
        {{- raise_exception("role '" ~ message.role ~ "' is not system, user, assistant or tool") -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
""".strip()

# fmt: off
NAMES = (
    "Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kamal", "Lena",
    "Mira", "Nils", "Olga", "Pablo", "Quinn", "Rosa", "Sven", "Tara",
)
THINGS = (
    "apples", "pencils", "marbles", "stamps", "shells", "beads", "books", "cards",
    "buttons", "candles", "walnuts", "postcards",
)
# fmt: on
GAINS = (
    ("finds {n} more", "Finding {n} makes it {a} + {n} = {b}."),
    ("buys {n} more", "Buying {n} more gives {a} + {n} = {b}."),
    ("gets {n} from a friend", "With the friend's {n} there are {a} + {n} = {b}."),
)
LOSSES = (
    ("gives away {n}", "Giving away {n} leaves {a} - {n} = {b}."),
    ("loses {n}", "After losing {n} there are {a} - {n} = {b}."),
    ("sells {n} at the market", "The sale takes {n}, so {a} - {n} = {b} remain."),
)


def story_of_a_collection(rng: random.Random) -> tuple[str, list[str], int]:
    """A start and one to six changes, each one sentence of the answer."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    start = total = rng.randint(5, 60)
    events, answer = [], []
    for i in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 6))):
        before, change = total, rng.randint(2, 20)
        if change < total and rng.random() < 0.5:
            event, sentence = rng.choice(LOSSES)
            total -= change
        else:
            event, sentence = rng.choice(GAINS)
            total += change
        events.append(f"{('Then', 'Later', 'After that')[i % 3]} {name} {event.format(n=change)}.")
        answer.append(sentence.format(n=change, a=before, b=total))
    return f"{name} has {start} {things}. {' '.join(events)} How many {things} does {name} have now?", answer, total


def story_of_a_purchase(rng: random.Random) -> tuple[str, list[str], int]:
    name, (first, second) = rng.choice(NAMES), rng.sample(THINGS, 2)
    n, price, m, other_price = rng.randint(2, 9), rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 12)
    cost, other_cost = n * price, m * other_price
    total = cost + other_cost
    question = f"{name} buys {n} {first} at {price} euros each and {m} {second} at {other_price} euros each."
    answer = [
        f"The {first} cost {n} * {price} = {cost} euros.",
        f"The {second} cost {m} * {other_price} = {other_cost} euros.",
        f"Together that is {cost} + {other_cost} = {total} euros.",
    ]
    if rng.random() < 0.5:
        paid = (total // 50 + 1) * 50
        answer.append(f"The change is {paid} - {total} = {paid - total} euros.")
        return f"{question} {name} pays with {paid} euros. How much change is due?", answer, paid - total
    return f"{question} How much does everything cost?", answer, total


def story_of_sharing(rng: random.Random) -> tuple[str, list[str], int]:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    friends, each, kept = rng.randint(2, 9), rng.randint(2, 15), rng.randint(0, 10)
    total = friends * each + kept
    if kept == 0:
        question = f"{name} shares {total} {things} equally among {friends} friends. How many does each friend get?"
        return question, [f"Each friend gets {total} / {friends} = {each}."], each
    question = (
        f"{name} has {total} {things}, keeps {kept} and shares the rest equally among {friends} friends. "
        "How many does each friend get?"
    )
    rest = total - kept
    return question, [f"There are {total} - {kept} = {rest} to share.", f"Each gets {rest} / {friends} = {each}."], each


def story_of_a_trip(rng: random.Random) -> tuple[str, list[str], int]:
    name, vehicle = rng.choice(NAMES), rng.choice(("bicycle", "tractor", "bus", "train", "canoe"))
    speeds = [rng.randint(4, 40) for _ in range(rng.randint(1, 3))]
    hours = [rng.randint(1, 6) for _ in speeds]
    parts = [f"{h} hour{'s' * (h > 1)} at {speed} km per hour" for h, speed in zip(hours, speeds, strict=True)]
    question = f"{name} travels by {vehicle}: {', then '.join(parts)}. How many kilometres is that?"
    distances = [h * speed for h, speed in zip(hours, speeds, strict=True)]
    if len(parts) == 1:
        return question, [f"{hours[0]} * {speeds[0]} = {distances[0]} km."], distances[0]
    answer = [
        f"Part {i} is {h} * {speed} = {distance} km."
        for i, (h, speed, distance) in enumerate(zip(hours, speeds, distances, strict=True), start=1)
    ]
    return question, [*answer, f"In all {' + '.join(map(str, distances))} = {sum(distances)} km."], sum(distances)


STORIES = (story_of_a_collection, story_of_a_collection, story_of_a_purchase, story_of_sharing, story_of_a_trip)


def arithmetic_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Word problems, no question twice; the answer's sentences, then `#### N`."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        question, sentences, result = rng.choice(STORIES)(rng)
        rows[question] = " ".join(sentences) + f"\n#### {result}"
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a patient teacher of arithmetic. Explain each step.",
    "Réponds en une phrase, même si la question est longue.",
)
DIALOGUES = (
    ("What colour is the sky at noon?", "On a clear day it is blue.", "And at sunset?", "Often red or orange."),
    ("Name three fruits.", "Apple, pear and plum.", "One more, please.", "Cherry."),
    ("How many days has a week?", "Seven.", "And two weeks?", "Two weeks have 2 * 7 = 14 days."),
    ("Wie heißt die Hauptstadt von Österreich?", "Wien.", "Und die von Ungarn?", "Budapest."),
    ("Écris un mot avec un accent.", "Par exemple « été ».", "Encore un ?", "« Forêt »."),
    ("用中文说你好。", "你好！", "再见怎么说?", "再见！"),
    ("Write a line of Python that prints 3.", "```python\nprint(3)\n```", "Without a number?", "print(len('abc'))"),
    ("What is 12 * 12?", "12 * 12 = 144.", "Minus 44?", "144 - 44 = 100."),
    ("Give me a list of two colours.", "- red\n- green", "Add one.", "- red\n- green\n- blue"),
    ("Is seven even?", "No, seven is odd.", "Why?", "Because 7 = 2 * 3 + 1, so one is left over."),
    ("Say something kind 🙂", "I am glad that you are here 🌻", "Thank you!", "You're welcome."),
    ("What does a kilogram have to do with grams?", "A kilogram is 1,000 grams.", "And a tonne?", "1,000 kilograms."),
    ("I'm tired.", "Then rest a little; it'll wait.", "But I've work to do!", "A short pause helps more than haste."),
)
REASONING = ("The question is short, so the answer can be.", "I check it once more: it is right.")


def chat_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Conversations of one to three questions, some with a system prompt, some with reasoning, one with a tool."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for index in range(count - 1):
        messages: list[dict[str, Any]] = []
        if index % 3 == 0:
            messages.append({"role": "system", "content": SYSTEM_PROMPTS[index // 3 % len(SYSTEM_PROMPTS)]})
        dialogue = list(DIALOGUES[index % len(DIALOGUES)])
        dialogue = dialogue[: rng.choice((2, 4, 4))]
        if rng.random() < 0.3:
            dialogue += rng.choice(DIALOGUES)[:2]
        for user, assistant in zip(dialogue[::2], dialogue[1::2], strict=True):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        if index % 5 == 4:
            messages[-1]["content"] = f"<think>\n{rng.choice(REASONING)}\n</think>\n\n{messages[-1]['content']}"
        rows.append({"messages": messages})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
    with_tool = [
        {"role": "user", "content": "Use the tool: what is 17 + 25?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "17 + 25 = 42."},
    ]
    return [*rows, {"messages": with_tool}]


def train_bpe(texts: list[str]) -> tuple[dict[str, int], list[list[str]]]:
    """A byte-level vocabulary (bytes first, then merges by rank) and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return dict(sorted(model["vocab"].items(), key=lambda item: item[1])), [list(pair) for pair in model["merges"]]


def tokenizer_files(texts: list[str]) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json, in the shape of Qwen3's."""
    vocab, merges = train_bpe(texts)
    added = [
        {
            "id": len(vocab) + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL_TOKENS,
        }
        for i, token in enumerate((*SPECIAL_TOKENS, *ADDED_TOKENS))
    ]
    # Qwen3's flags; with use_regex false in the pre-tokenizer, the others change offsets only, never ids or text
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {**decoder, "trim_offsets": False},
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    arithmetic, chat = arithmetic_rows(600), chat_rows(40)
    texts = [f"{row['question']}\n{row['answer']}" for row in arithmetic]
    # the conversations are few, so they count four times: their words get merges too
    texts += [message["content"] for row in chat for message in row["messages"]] * 4
    texts += ["system\n", "user\n", "assistant\n"] * 100
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(texts).items():
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / "tokenizer" / name).write_text(text + "\n", encoding="utf-8")
    write_jsonl(folder / "arithmetic.jsonl", arithmetic)
    write_jsonl(folder / "chat.jsonl", chat)
    (folder / "eval").mkdir(exist_ok=True)
    trained = {row["question"] for row in arithmetic}
    unseen = [row for row in arithmetic_rows(40, seed=2) if row["question"] not in trained]
    write_jsonl(folder / "eval" / "word_problems.jsonl", unseen[:20])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
