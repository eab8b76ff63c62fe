"""What the policy objective reads of sampled answers beside their tokens: read again from the files of the rows."""

import math
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from titan_mi100.data.answer_store import ByLearnedToken, Column
from titan_mi100.data.answers import ADVANTAGE, SAMPLER, SCORE, SHARE
from titan_mi100.data.files import RecordReader
from titan_mi100.data.formats import parse_record
from titan_mi100.data.prepared import DocumentTable
from titan_mi100.data.samples import KEYS, OPTIONAL, Group, Kept, advantages, read_group
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import UserError
from titan_mi100.log import log

_ALMOST_ZERO = 1e-8  # added to the deviation of whitened advantages


def sample_columns(table: DocumentTable, kept: Kept, how: str) -> dict[str, Column]:
    """The columns of prepared groups of answers; an answer without a score has 0 (where a teacher judges them).

    Args:
        how: see samples.advantages.

    Raises:
        UserError: a file is no longer what it was when it was prepared.
    """
    count = len(table.starts) - 1
    by_answer, sampler = np.zeros((3, count)), [np.zeros(0)] * count  # advantage, 1 / tokens, score
    groups = answers = scored = cut = dead = 0
    total, every = 0.0, list[float]()
    for group, documents in _groups(table):
        scores = kept.scores(group)
        known = [score for score in scores if score is not None]
        groups, answers, scored = groups + 1, answers + len(scores), scored + len(known)
        total, cut = total + sum(known), cut + sum(answer.is_cut for answer in group.answers)
        dead += max(known) == min(known) if known else 0
        each = advantages(scores, how)
        every += [own for own, score in zip(each, scores, strict=True) if score is not None] if any(each) else []
        for document, number in documents:
            answer = group.answers[number]
            by_answer[:, document] = each[number], 1 / len(answer.ids), answer.score or 0.0
            sampler[document] = np.array(answer.log_p)
    if how == "whitened":  # the mean of each group, and so of all, is zero
        by_answer[0] /= math.sqrt(math.fsum(own**2 for own in every) / max(1, len(every))) + _ALMOST_ZERO
    counts = np.array([*map(len, sampler)])
    starts = np.cumsum(np.append(0, counts))
    log.info(
        f"samples: {groups:,} groups that are learned from, {answers:,} answers, {cut / max(1, answers):.1%} cut off, "
        f"{answers - scored:,} without a score; mean score {total / max(1, scored):.3f}"
        + f"; {dead:,} groups with equal scores"
        * bool(dead)
    )
    flat = {name: np.repeat(own, counts) for name, own in zip((ADVANTAGE, SHARE, SCORE), by_answer, strict=True)}
    flat[SAMPLER] = np.concatenate([np.zeros(0), *sampler])
    return {name: ByLearnedToken(own, starts) for name, own in flat.items()}


def _groups(table: DocumentTable) -> Iterator[tuple[Group, list[tuple[int, int]]]]:
    """Each group with its documents: their numbers, and those of their answers."""
    origins, labels = table.origins, table.labels
    assert origins is not None and labels is not None
    lines = origins.lines[origins.document_lines]  # of each document: file, line, element
    for file, own in groupby(range(len(lines)), key=lambda document: int(lines[document, 0])):
        path, numbers = origins.files[file], list(own)
        by_line = {key: list(some) for key, some in groupby(numbers, key=lambda document: tuple(lines[document, 1:]))}
        for record in RecordReader(path):
            documents = by_line.pop((record.number, record.element), [])
            if not documents:
                continue
            try:
                row = parse_record(record)
                group = read_group({key: row[key] for key in row.keys() & (KEYS | OPTIONAL)})  # others were ignored
            except BadRecord as bad:
                raise UserError(f"{path}:{record.number}: {bad}; it has changed since it was prepared") from None
            numbered = [(document, int(labels[document]) - 1) for document in documents]
            for document, number in numbered:
                ids = group.prompt_ids + group.answers[number].ids if number < len(group.answers) else []
                if not np.array_equal(table[document] >> 1, ids):
                    raise UserError(f"{path}:{record.number}: has changed since it was prepared; start again")
            yield group, numbered
        if by_line:
            raise UserError(f"{path}: has fewer rows than when it was prepared; start again")
