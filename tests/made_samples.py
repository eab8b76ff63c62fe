"""Groups of sampled answers with scores, as titan-mi100 score writes them, of random tokens."""

from pathlib import Path

import numpy as np

from titan_mi100.data.prepared import Origins
from titan_mi100.data.samples import Answer, Group, Kept


def groups(vocabulary: int, count: int = 9, longest: int = 12, seed: int = 0) -> list[Group]:
    """Random prompts with 2 to 5 answers each. Some answers are cut off, some have no score, one group is dead."""
    random, made = np.random.default_rng(seed), list[Group]()
    for number in range(count):
        answers = []
        for index in range(2 + (number + seed) % 4):
            length = longest if (is_cut := random.random() < 0.2) else int(random.integers(1, longest))
            ids = random.integers(0, vocabulary, length).tolist()
            score = 0.5 if number == 1 else round(random.random(), 3)
            score = None if index == 2 and number == 2 else score
            log_p = (-random.random(length) * 8).tolist()
            answers.append(Answer(ids, log_p, "length" if is_cut else "stop", "", score, {"made up": score}))
        prompt = random.integers(0, vocabulary, int(random.integers(2, 9))).tolist()
        made.append(Group(number, f"made up:{number + 1}", {"answer": "#### 1"}, prompt, answers))
    return made


def write(path: Path, made: list[Group]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(group.line() for group in made))
    return path


def case_of(path: Path, made: list[Group], words: str) -> dict:
    """Documents, labels and origins of the answers that are learned. Args: words: ObjectiveConfig.answers."""
    documents, labels, lines = [], [], []
    for line, group in enumerate(made):
        for index in Kept.of(words).learned(group)[0]:
            ids = np.array(group.prompt_ids + group.answers[index].ids)
            documents.append((ids, np.arange(len(ids)) >= len(group.prompt_ids)))
            labels.append(index + 1)
            lines.append(line)
    origins = Origins([str(path)], np.array([[0, n + 1, 0] for n in range(len(made))]), np.array(lines))
    return {"documents": documents, "labels": np.array(labels, np.int8), "origins": origins, "together": 1}
