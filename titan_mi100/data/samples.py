"""Sampled answers: `titan-mi100 sample` writes them, `score` adds scores, [objective] name = "policy" learns from them.

A row is a group: one prompt and the answers that were sampled for it. All of them are token ids; texts are for people
and for scores. Imports no torch.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.data.strict_json import BadRecord, expect, listed, parse, shown
from titan_mi100.errors import UserError
from titan_mi100.files.parts import STORE, SealedParts
from titan_mi100.files.plain import read_checked, read_object, read_plain

FORMAT = 1  # of both stores
SAMPLES = "samples"  # begins the kind of rows, see ObjectiveConfig.answers
STOP, LENGTH = "stop", "length"  # how an answer ended: with a stop token, which is its last id, or cut off
MOST = 100  # answers to a prompt
PART_PROMPTS = 32  # prompts of a part
LARGEST = 1 << 30  # bytes of a part
GREEDY = " greedy"  # behind the sampler's digest
_KEYS = {"ids", "log_p", "finish", "text", "score", "scores"}
_ROUNDING = 1e-3  # of a log probability above 0


@dataclass(frozen=True)
class Sampled:
    """What a store of samples was made of.

    Attributes:
        sampler: digest of the weights and adapter; of a server its address and the name of its model.
        prompts: hash of the prompts' token ids, of the rows and of the files' names.
    """

    kind: str  # "samples"
    sampler: str
    prompts: str
    tokenizer: str
    count: int  # prompts
    k: int
    seed: int
    max_new_tokens: int
    stop_ids: list[int]
    dtype: str
    batch: int  # answers at a time, which change roundings; of a server 0
    format: int = FORMAT


@dataclass(frozen=True)
class Scored:
    """What a store of scores was made of: samples, and what gives the scores."""

    kind: str  # "scores"
    samples: str  # hash of the samples' store.json
    count: int  # prompts
    scorers: list[str]  # each with its weight; of a function the hash of its file
    format: int = FORMAT


@dataclass(frozen=True)
class Answer:
    """A sampled answer.

    Attributes:
        ids: the tokens that were sampled; the last one of an answer that ended by itself is a stop token.
        log_p: of each id at temperature 1, as the sampler said.
        score: None: it has not been scored, or cannot be.
        scores: of each scorer, by name.
    """

    ids: list[int]
    log_p: list[float]
    finish: str
    text: str = ""
    score: float | None = None
    scores: dict[str, float | None] = field(default_factory=dict)

    @property
    def is_cut(self) -> bool:
        return self.finish == LENGTH


class Group(NamedTuple):
    """A prompt and its answers. `row` is the row that the prompt was read from."""

    prompt: int  # its number, from 0
    where: str  # file:line
    row: dict[str, Any]
    prompt_ids: list[int]
    answers: list[Answer]

    def line(self) -> str:
        """The row of a part, with the line's end."""
        answers = [{key: own for key, own in vars(answer).items() if key != "scores" or own} for answer in self.answers]
        return json.dumps({**self._asdict(), "answers": answers}, ensure_ascii=False, allow_nan=False) + "\n"


class Kept(NamedTuple):
    """Which answers of a group are learned, as ObjectiveConfig.answers says it."""

    cut_off: str  # of answers that were cut off: mask, shape or keep
    longest: int  # the longest allowed answer; 0: not said
    last: int  # with shape: its last tokens, in which the score falls by up to 1
    with_dead: bool  # groups whose scores are all equal stay, for the KL or a teacher
    by_teacher: bool = False  # scores are not needed

    @classmethod
    def of(cls, words: str) -> "Kept":
        _, cut_off, longest, last, with_dead = words.split()
        return cls(cut_off, int(longest), int(last), with_dead != "0", with_dead == "teacher")

    def scores(self, group: Group) -> list[float | None]:
        """The answers' scores; shaped as DAPO does (2503.14476, equation 13)."""
        if self.cut_off != "shape":
            return [answer.score for answer in group.answers]
        over = (max(0, len(answer.ids) - (self.longest - self.last)) for answer in group.answers)
        each = zip(group.answers, over, strict=True)
        return [None if answer.score is None else answer.score - min(1, by / self.last) for answer, by in each]

    def learned(self, group: Group) -> tuple[list[int], str]:
        """The indices of the answers that are learned, and why there is none.

        Raises:
            BadRecord: no answer has a score at all.
        """
        if self.longest and (longest := max(len(answer.ids) for answer in group.answers)) > self.longest:
            raise BadRecord("longer than longest_answer", f"{longest} tokens; set objective.longest_answer to as many")
        scores = self.scores(group)
        known = [score for score in scores if score is not None]
        if not known and not self.by_teacher:
            if not any(answer.scores for answer in group.answers):
                raise BadRecord("no score", "no answer has a score; run titan-mi100 score first, and name its folder")
            return [], "no answer could be scored"
        if not self.with_dead and max(known) == min(known):
            return [], "all answers have the same score"
        learned = [(score is not None or self.by_teacher) and not (self.cut_off == "mask" and answer.is_cut)
                   for score, answer in zip(scores, group.answers, strict=True)]  # fmt: skip
        return [i for i, is_learned in enumerate(learned) if is_learned], "all answers with a score were cut off"


def advantages(scores: Sequence[float | None], how: str) -> list[float]:
    """The advantage of each answer of a group over the others; of an answer without a score 0, and it is left out of
    the means.

    Args:
        how: mean: score - mean; std: that / (sample standard deviation + 1e-4), as GRPO (2402.03300); leave_one_out:
            score - mean of the others (RLOO, 2402.14740); whitened: as mean, the caller whitens.
    """
    known = [score for score in scores if score is not None]
    if len(known) < 2 or max(known) == min(known):
        return [0.0] * len(scores)
    mean, scale = math.fsum(known) / len(known), 1.0
    if how == "std":
        variance = math.fsum((score - mean) ** 2 for score in known) / (len(known) - 1)
        scale = 1 / (math.sqrt(variance) + 1e-4)
    elif how == "leave_one_out":
        scale = len(known) / (len(known) - 1)
    return [0.0 if score is None else (score - mean) * scale for score in scores]


KEYS = frozenset({"prompt_ids", "answers"})  # of a row that must be there
OPTIONAL = frozenset({"prompt", "where", "row"})


def read_group(row: dict[str, Any]) -> Group:
    """Check a row of samples. Raises BadRecord: what is wrong with it."""
    if unknown := row.keys() - KEYS - OPTIONAL:
        raise BadRecord("unknown key", f"{listed(unknown)} in a row of samples; it has {listed(KEYS | OPTIONAL)}")
    if missing := KEYS - row.keys():
        raise BadRecord("missing key", f"a row of samples has {listed(missing)}; was it written by titan-mi100 sample?")
    prompt_ids, answers = _ids(row["prompt_ids"], "prompt_ids"), expect(row["answers"], list, "answers must be a list")
    if not 0 < len(answers) <= MOST:
        raise BadRecord("wrong number", f"{len(answers)} answers; expected 1 to {MOST}")
    own = expect(row.get("row", {}), dict, "row must be an object")
    number, where = row.get("prompt", 0), row.get("where", "")
    if type(number) is not int or number < 0 or type(where) is not str:
        raise BadRecord("wrong type", "prompt must be a whole number, and where a text")
    return Group(number, where, own, prompt_ids, [_answer(answer, i) for i, answer in enumerate(answers, 1)])


def _answer(given: Any, number: int) -> Answer:
    name = f"answer {number}"
    if not isinstance(given, dict) or (odd := given.keys() ^ _KEYS) - {"text", "score", "scores"}:
        wrong = listed(odd - {"text", "score", "scores"}) if isinstance(given, dict) else "no object"
        raise BadRecord("bad answer", f"{name}: {wrong} is missing or unknown; an answer has ids, log_p and finish")
    ids, log_p = _ids(given["ids"], f"{name}, ids"), expect(given["log_p"], list, f"{name}: log_p must be a list")
    if len(log_p) != len(ids):
        raise BadRecord("bad log p", f"{name}: {len(log_p)} log p for {len(ids)} ids; expected one for each")
    for index, each in enumerate(log_p):
        if type(each) not in (int, float) or not math.isfinite(each) or each > _ROUNDING:
            raise BadRecord("bad log p", f"{name}: log_p[{index}] is {shown(each)}; expected a finite number up to 0")
    if given["finish"] not in (STOP, LENGTH):
        raise BadRecord("bad answer", f'{name}: finish is {shown(given["finish"])}; expected "{STOP}" or "{LENGTH}"')
    scores = expect(given.get("scores", {}), dict, f"{name}: scores must be an object")
    for key, score in [("score", given.get("score")), *scores.items()]:
        if score is not None and (type(score) not in (int, float) or not math.isfinite(score)):
            raise BadRecord("bad score", f"{name}: {shown(key)} is {shown(score)}; expected a finite number or null")
    text = expect(given.get("text", ""), str, f"{name}: text must be a text")
    return Answer(ids, [*map(float, log_p)], given["finish"], text, given.get("score"), scores)


def _ids(value: Any, name: str) -> list[int]:
    ids = expect(value, list, f"{name} must be a list of token ids")
    if not ids or any(type(number) is not int or not 0 <= number < 2**31 for number in ids):
        raise BadRecord("bad token id", f"{name} must be token ids, at least one")
    return ids


def check_sealed(path: Path, by_teacher: bool = False) -> None:
    """Compare a file with the store that it is a part of, if it is of one. Args: by_teacher: scores are not needed.

    Raises:
        UserError: damaged, or parts lack.
    """
    if (path.parent / STORE).is_file():
        is_raw = by_teacher and read_object(path.parent / STORE, "make it again").get("kind") == "samples"
        store = GroupStore.open(path.parent, Sampled if is_raw else Scored)
        if isinstance(store.about, Sampled) and store.about.sampler.endswith(GREEDY):
            raise UserError(f"{path.parent}: was written with --greedy, so it has no samples; sample without it")
        again = f"run titan-mi100 {'sample' if is_raw else 'score'} again: it"
        if not store.is_complete:
            raise UserError(f"{path.parent}: some parts are missing; {again} goes on")
        for number in (number for number, part in store.parts.items() if part.name == path.name):
            store.check_hash(number, f"delete it, and {again} is made anew")


class GroupStore(SealedParts):
    """A store of samples or of scores: parts of PART_PROMPTS groups, in the order of the prompts, a JSON line each."""

    def __init__(self, folder: Path, about: Sampled | Scored) -> None:
        """Raises UserError: the folder is of something else, or cannot be read."""
        super().__init__(folder, about, "jsonl")
        if self.about != about and not self.parts:  # nothing was made yet
            self.about, self.is_begun = about, False
        if differing := [key for key, own in vars(about).items() if getattr(self.about, key) != own]:
            remedy = "start with the same options, or name another folder with --out"
            raise UserError(f"{folder}: was made with another {listed(differing)}; {remedy}")

    @classmethod
    def open(cls, folder: Path, kind: type[Sampled] | type[Scored]) -> "GroupStore":
        """Open one that is there. Raises UserError: there is none, or it is of another kind or format."""
        word = {Sampled: "samples", Scored: "scores"}[kind]
        if not (folder / STORE).is_file():
            raise UserError(f"{folder}: holds no {STORE}; name a folder that titan-mi100 sample or score has written")
        about = read_checked(folder / STORE, kind, f"name a folder with {word}")
        if (about.kind, about.format) != (word, FORMAT):
            raise UserError(f"{folder}: kind = {about.kind!r}, format = {about.format}; name a folder with {word}")
        return cls(folder, about)

    @property
    def count(self) -> int:
        """The number of parts: of a folder that is begun its own, whatever is asked for."""
        return -(-int(self.about.count) // PART_PROMPTS)

    @property
    def digest(self) -> str:
        """Identifies the store with its parts."""
        return hashlib.sha256(
            json.dumps([vars(self.about), sorted(p.name for p in self.parts.values())]).encode()
        ).hexdigest()

    def prompts_of(self, number: int) -> range:
        """The numbers of a part's prompts."""
        return range(number * PART_PROMPTS, min((number + 1) * PART_PROMPTS, self.about.count))

    def write(self, number: int, groups: Sequence[Group]) -> None:
        """Seal a part. Raises UserError: it cannot be written."""
        assert [group.prompt for group in groups] == [*self.prompts_of(number)]
        self.seal(number, "".join(group.line() for group in groups).encode())

    def groups(self) -> Iterator[Group]:
        """All groups. Raises as `read` does."""
        return (group for number in range(self.count) for group in self.read(number))

    def read(self, number: int) -> list[Group]:
        """The groups of a part. Raises UserError: it is damaged, or not of this store."""
        command = "sample" if self.about.kind == "samples" else "score"
        remedy = f"delete it, and run titan-mi100 {command} again: it is made anew"
        self.check_hash(number, remedy)
        groups, path = list[Group](), self.parts[number]
        for line, content in enumerate(read_plain(path, LARGEST).splitlines(), 1):
            try:
                groups.append(read_group(parse(content)))
            except BadRecord as bad:
                raise UserError(f"{path}:{line}: {bad}; {remedy}") from None
        if [group.prompt for group in groups] != [*self.prompts_of(number)]:
            raise UserError(f"{path}: has other prompts than part {number} of {self.about.count:,} has; {remedy}")
        return groups
