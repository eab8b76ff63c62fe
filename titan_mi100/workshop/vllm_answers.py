"""A teacher's folder from what vLLM says: `prompt_logprobs` of the rows' token ids, checked position by position."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.settings import Config
from titan_mi100.data.answer_store import ROUNDING, VLLM, LogprobStore, Wanted
from titan_mi100.data.files import read_records
from titan_mi100.data.formats import parse_record
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import UserError
from titan_mi100.files.durable import atomic_output_folder, check_output, write_output
from titan_mi100.log import ByteProgress, log

_KEYS = ("prompt_token_ids", "prompt_logprobs")
_PADDED = 0.9  # a head has at most so many rows that the tokenizer has ids for, see data.prepare
_ID = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)


def _rows(config: Config) -> tuple[Wanted, str]:
    """What the answers must fit, and the tokenizer's fingerprint."""
    if config.objective.answers:
        raise UserError('[objective] name = "preference": a teacher is for rows of sft and distill')
    prepared = prepare_run(config, None)
    every = [source.rows for source in (*prepared.sources, *prepared.validation)]
    if len(sets := [rows for rows in every if isinstance(rows, PackedDataset)]) < len(every):
        raise UserError(
            "a source is a corpus of titan-mi100 prepare, which has no rows to ask about; name its files instead"
        )
    return Wanted(sets, prepared.facts.n_vocab), prepared.facts.tokenizer


def write_ids(config: Config, path: Path) -> None:
    """A line {"prompt_token_ids": [...]} for each document, in order. Raises UserError: the file exists."""
    check_output(path, "--ids")
    table = _rows(config)[0].sets[0].documents
    numbers = range(len(table.starts) - 1)
    lines = (json.dumps({_KEYS[0]: (table[number] >> 1).tolist()}) + "\n" for number in numbers)
    write_output(path, lines, "--ids")
    log.info(f"{path}: {len(numbers):,} documents; ask vLLM for prompt_logprobs of each")


def read_answers(config: Config, path: Path, out: Path, k: int) -> None:
    """Read a line {"prompt_token_ids": [...], "prompt_logprobs": [null, {ID: {"logprob": x}}, ...]} per document.

    Raises:
        UserError: a line is not of its document, or has fewer than k ids, or log probabilities that are none; nothing
            is left of the folder.
    """
    expected, tokenizer = _rows(config)
    if k > expected.vocabulary:
        raise UserError(f"--top_k {k}: the tokenizer has {expected.vocabulary:,} ids; the usual is 32")
    lines, about = _Lines(path, expected), expected.about(f"vLLM: {path.name}", tokenizer, k, VLLM)
    with atomic_output_folder(out) as aside, ByteProgress("reading vLLM's answers", expected.count) as progress:
        store = LogprobStore(aside, about, "")
        store.begin()
        for part in range(about.parts):
            numbers = expected.documents(about, part)
            answers = [lines.next_document(number, k) for number in numbers.tolist()]
            arrays: dict[str, np.ndarray] = {
                "documents": numbers,
                "tokens": np.array([len(ids) for ids, _ in answers], np.int64),
                "ids": np.concatenate([ids for ids, _ in answers]),
                "log_p": np.concatenate([log_p for _, log_p in answers]),
            }
            store.write(part, arrays, expected)
            progress.advance(len(numbers))
        lines.end()
        store.warn_of_mass()
    log.info(f"{out}: the answers to {expected.count:,} documents")
    if lines.padding:
        log.info(f"{out}: {lines.padding:,} ids of the head's padding, which no token has, are left out")


class _Lines:
    """The lines of vLLM's answers, one per document. `padding`: ids that were left out."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path, self._wanted, self.padding = path, wanted, 0
        self._lines = self._read()

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for record in read_records(str(self._path)):
            where = f"{self._path}:{record.number}"
            try:
                line = parse_record(record)
            except BadRecord as bad:
                raise UserError(f"{where}: {bad}") from None
            if missing := [key for key in _KEYS if not isinstance(line.get(key), list)]:
                raise UserError(f"{where}: {missing[0]} must be a list; ask vLLM for prompt_logprobs with token ids")
            yield where, line

    def end(self) -> None:
        """Raises UserError: there is a further line."""
        if extra := next(self._lines, None):
            raise UserError(f"{extra[0]}: a line more than the data have documents; is it of other data?")

    def next_document(self, number: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and log p of a document's learned tokens, (t, k) each, the likeliest first."""
        where, line = next(self._lines, (str(self._path), None))
        if line is None:
            problem = f"has {number:,} lines, the data have {self._wanted.count:,} documents"
            raise UserError(f"{where}: {problem}; ask for the others, too")
        encoded = self._wanted.sets[0].documents[number]
        ids, learned = (encoded >> 1).tolist(), (encoded & 1).astype(bool).tolist()
        prompt_ids, answers = line["prompt_token_ids"], line["prompt_logprobs"]
        if prompt_ids != ids:
            index = next((i for i, pair in enumerate(zip(prompt_ids, ids, strict=False)) if pair[0] != pair[1]), None)
            problem = (
                f"{len(prompt_ids)} ids, the document has {len(ids)}"
                if index is None
                else f"id {index} is {prompt_ids[index]!r}"
            )
            problem = f"prompt_token_ids are not those of document {number}: {problem}"
            raise UserError(f"{where}: {problem}; is it of other data?")
        if len(answers) != len(ids):
            raise UserError(f"{where}: prompt_logprobs has {len(answers)} entries for {len(ids)} ids")
        positions = [index for index in range(1, len(ids)) if learned[index]]
        candidates = [self._position(f"{where}: prompt_logprobs[{i}]", answers[i], ids[i]) for i in positions]
        if short := next((len(pairs) for pairs in candidates if len(pairs) < k), 0):
            problem = f"a token has {short} ids; ask vLLM for prompt_logprobs = {k}, or set --top_k {short}"
            raise UserError(f"{where}: {problem}")
        kept = np.array([pairs[:k] for pairs in candidates], np.float64).reshape(-1, k, 2)
        return kept[:, :, 0].astype(np.int32), kept[:, :, 1].astype(np.float32)

    def _position(self, where: str, answer: Any, token: int) -> list[tuple[int, float]]:
        """The ids and their log p at a position whose own id is `token`."""
        pairs = list[tuple[int, float]]()
        for text, fields in answer.items() if isinstance(answer, dict) else [("", None)]:
            logprob = fields.get("logprob") if isinstance(fields, dict) else None
            if not _ID.fullmatch(text) or isinstance(logprob, bool) or not isinstance(logprob, int | float):
                raise UserError(f"{where} must be ID: {{logprob: x}}, with ids of the vocabulary")
            pairs.append((int(text), float(logprob)))
        if token not in dict(pairs):
            raise UserError(f"{where} lacks the id {token} that stands there: the positions are not those of the ids")
        if any(not -1e4 < log_p <= ROUNDING for _, log_p in pairs):
            raise UserError(f"{where} has a log probability above 0 or not finite")
        if sum(math.exp(log_p) for _, log_p in pairs) > 1 + ROUNDING:
            raise UserError(f"{where} has probabilities that sum to more than 1")
        if (most := max(pairs)[0]) * _PADDED >= self._wanted.vocabulary:
            raise UserError(f"{where} names the id {most}, which no head of {self._wanted.vocabulary:,} tokens has")
        real = [(number, min(log_p, 0.0)) for number, log_p in pairs if number < self._wanted.vocabulary]
        self.padding += len(pairs) - len(real)
        # vLLM adds the token itself to the likeliest ones: without it as many ids as everywhere
        return sorted(real, key=lambda pair: (-pair[1], pair[0]))
