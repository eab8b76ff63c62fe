"""Writes additions.jsonl, the data of debug.toml: sums of two numbers of two digits, with the steps of the addition;
pairs.jsonl: some of them with a right and a wrong answer; and forgetful.jsonl: the same sums, most without their carry.

    python train_configs/debug/make_additions.py [output folder]

No two rows have the same two numbers, in either order. So a sum that is held out for validation is not in the training
data in other words.
"""

import json
import random
import sys
from pathlib import Path

QUESTIONS = ("What is {a} + {b}?", "How much is {a} + {b}?", "Add {a} and {b}.", "How many are {a} and {b}?")
ROWS, PAIRS = 2000, 500


def answer(a: int, b: int) -> str:
    """The sum in steps of two numbers each: the ones, the tens, and the carry where there is one."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    steps = [f"{a % 10} + {b % 10} = {ones}", f"{a // 10} + {b // 10} = {tens}"]
    if ones > 9:
        steps.append(f"{tens} + 1 = {tens + 1}")
    return f"{', '.join(steps)}, so {a + b}."


def rows(seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    found = []
    for pair in rng.sample(pairs, ROWS):
        a, b = rng.sample(pair, 2)
        found.append({"question": rng.choice(QUESTIONS).format(a=a, b=b), "answer": answer(a, b)})
    return found


def pairs(seed: int = 0) -> list[dict[str, str]]:
    """Rows of preferences. The wrong answer has another sum than its steps."""
    rng, found = random.Random(seed), []
    for row in rows()[:PAIRS]:
        steps, right = row["answer"].removesuffix(".").rsplit(" ", 1)
        wrong = abs(int(right) + rng.choice((-10, -1, 1, 10)))
        found.append({"prompt": row["question"], "chosen": row["answer"], "rejected": f"{steps} {wrong}."})
    return found


def forgetful(seed: int = 0) -> list[dict[str, str]]:
    """The rows, of which 60% of those with a carry forget it: a model learns both ways, and does the worse one."""
    rng, found = random.Random(seed), rows()
    for row in found:
        ones, tens, *carry, _ = row["answer"].split(", ")
        if carry and rng.random() < 0.6:
            row["answer"] = f"{ones}, {tens}, so {tens.split()[-1]}{int(ones.split()[-1]) % 10}."
    return found


def main(folder: Path) -> None:
    for name, made in (("additions", rows()), ("pairs", pairs()), ("forgetful", forgetful())):
        text = "".join(json.dumps(row) + "\n" for row in made)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
