"""Sample answers during training: the sharded model answers held-out prompts, in every layout."""

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from titan_mi100.config.settings import ValidationConfig
from titan_mi100.data.loader import RowStream
from titan_mi100.data.microbatch import of_prompts
from titan_mi100.data.prepared import Prepared
from titan_mi100.data.prompts import Prompt, held_out_prompts
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.decoder import CausalLM
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import from_rank_zero, gather, sum_in_place
from titan_mi100.text.assets import GENERATION, folder_of, read_assets, stop_ids
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.judge import judge_of
from titan_mi100.text.load import load_tokenizer
from titan_mi100.wording import plural

_ROUNDED_TO = 64  # tokens: rows of few different lengths


@dataclass(frozen=True)
class Sampler:
    """The same prompts, answered at each validation.

    Attributes:
        tokenizer: None on all ranks but the first, which only take part in the forwards.
        stop_ids: tokens that end an answer.
        vocabulary: only token ids below this are chosen; the tokenizer may have fewer ids than the model.
        most: maximum number of tokens of an answer.
        seq_len: maximum number of tokens of a prompt and its answer together.
        judge: what of an answer and its reference must be equal, see judge_of; None: nothing is judged.
    """

    prompts: Sequence[Prompt]
    tokenizer: Tokenizer | None
    stop_ids: Collection[int]
    vocabulary: int
    most: int
    seq_len: int
    judge: Callable[[str], str | None] | None = None

    def answer(self, model: ParallelModel, stream: RowStream, stop: Callable[[], bool]) -> list[dict[str, Any]] | None:
        """Answer all prompts. A collective.

        Args:
            stop: whether this process was told to stop.

        Returns:
            Entries of samples.jsonl without their step; empty where there is no tokenizer. None, on all ranks:
            interrupted, because a process was told to stop.
        """
        prompts = [prompt.ids for prompt in self.prompts]
        limits = [min(self.most, self.seq_len - len(prompt)) for prompt in prompts]
        answers = answer_greedily(model, prompts, limits, self.stop_ids, stream, self.vocabulary, stop)
        if answers is None or self.tokenizer is None:
            return None if answers is None else []
        return [
            {
                # rendered text cannot be split into messages again, so it is recorded as one
                "prompt": [{"role": "prompt", "content": self.tokenizer.decode(prompt.ids)}],
                "reference": self.tokenizer.decode(until_stop(prompt.reference, self.stop_ids)),
                "answer": self.tokenizer.decode(answer),
            }
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]

    def exact_match(self, answered: Sequence[dict[str, Any]]) -> float | None:
        """The share of right answers, the same on every rank; None: they are not judged. A collective.

        Args:
            answered: what `answer` has returned.
        """
        if (judge := self.judge) is None:
            return None
        right = [judge(each["answer"]) == judge(each["reference"]) for each in answered]
        return float(from_rank_zero(lambda: sum(right) / len(right)))


def open_sampler(
    config: ValidationConfig, seq_len: int, data: Prepared, tokenizer_path: str, base: str
) -> Sampler | None:
    """The sampler that the config asks for. A collective.

    Args:
        base: checkpoint.initial_load_path.

    Raises:
        UserError: on all ranks: there is no usable prompt, or the tokenizer cannot be read.
    """
    count, tokenizer = config.prompts, None
    if not count:
        return None
    prompts = held_out_prompts([source.rows for source in data.validation], count)
    if not prompts:
        raise UserError(f"[validation] prompts = {count}: no validation document has two tokens; set it to 0")
    if len(prompts) < count:
        log.warning(f"[validation] prompts = {count}: the validation set has only {len(prompts)} documents to ask from")

    judge = judge_of(config.judge) if config.metric == "exact_match" else None

    def read_stops() -> tuple[list[int], int, list[Prompt]]:
        nonlocal tokenizer
        tokenizer, folder = load_tokenizer(tokenizer_path), folder_of(base)
        named = stop_ids(read_assets(folder), folder / GENERATION) if base else []
        stops, kept = [*tokenizer.end_ids(data.facts.end_of_turn), *named], prompts
        if judge is not None:
            references = [tokenizer.decode(until_stop(prompt.reference, stops)) for prompt in prompts]
            kept = [p for p, text in zip(prompts, references, strict=True) if judge(text) is not None]
        return stops, tokenizer.n_vocab, kept

    stops, vocabulary, kept = from_rank_zero(read_stops)
    if judge is not None:
        key = '[validation] metric = "exact_match"'
        if not (data.facts.end_of_turn and kept):
            lacking = f'held-out answer has what judge = "{config.judge}" compares; set another judge'
            lacking = lacking if data.facts.end_of_turn else "held-out row is a conversation; hold out others"
            raise UserError(f'{key}: no {lacking}, or metric = "loss"')
        if without := len(prompts) - len(kept):
            log.warning(
                f"{key}: {without} of {len(prompts)} prompts are left out: the judge finds nothing in the answer"
            )
        lengths = [len(until_stop(prompt.reference, stops)) for prompt in kept]
        if too_long := sum(length > config.prompt_tokens for length in lengths):
            text = f"{too_long} of {len(kept)} right answers are longer than prompt_tokens = {config.prompt_tokens}"
            log.warning(f"{key}: {text}, so answers like them count as wrong; the longest has {max(lengths)} tokens")
        cost = f"{plural(len(kept), 'prompt')} x {config.prompt_tokens} = {len(kept) * config.prompt_tokens:,} tokens"
        log.info(f"{key}: each validation generates up to {cost}")
    return Sampler(kept, tokenizer, stops, vocabulary, config.prompt_tokens, seq_len, judge)


def until_stop(ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """The ids before the first stop token."""
    return ids[: next((index for index, token in enumerate(ids) if token in stop_ids), len(ids))]


def answer_greedily(
    model: ParallelModel,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    stop_ids: Collection[int],
    stream: RowStream,
    vocabulary: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[list[int]] | None:
    """Continue each prompt with the most probable tokens, the same result on every rank. A collective.

    The prompts are distributed over the data-parallel ranks, at most local_batch_size at a time, so that a forward
    needs no more memory than in training.

    Args:
        limits: maximum number of new tokens for each prompt.
        stop_ids: tokens that end an answer; they are not returned.
        stream: the run's, which knows how rows are shared out.
        vocabulary: only token ids below this are chosen; None: all.
        stop: whether this process was told to stop.

    Returns:
        None: given up, because a process was told to stop.
    """
    with model.evaluating(), _not_compiled():
        if model.is_whole:
            return _answer_with_cache(model.parts[0], prompts, limits, stop_ids, stream, vocabulary, stop)
        return _answer_by_forwards(model, prompts, limits, stop_ids, stream, vocabulary, stop)


def _answer_with_cache(
    network: CausalLM, prompts: Sequence[list[int]], limits: Sequence[int], stop_ids: Collection[int],
    stream: RowStream, vocabulary: int | None, stop: Callable[[], bool],
) -> list[list[int]] | None:  # fmt: skip
    """Each rank generates by itself. Args, Returns: as of answer_greedily."""

    def end_if_told(_: object) -> None:
        if stop():
            raise _Told

    own, size = range(stream.dp_rank, len(prompts), stream.batch.dp_degree), stream.batch.local_batch_size
    answers, told = dict[int, list[int]](), False
    try:
        for numbers in (own[first : first + size] for first in range(0, len(own), size)):
            asked, most = [prompts[number] for number in numbers], [limits[number] for number in numbers]
            sampling = Sampling(vocabulary=vocabulary)
            generated = generate(network, asked, sampling, stop_ids, most, on_step=end_if_told)
            answers |= {number: answer.ids for number, answer in zip(numbers, generated, strict=True)}
    except _Told:
        told = True
    everyone = gather((told, answers))
    if any(told for told, _ in everyone):
        return None
    by_number = {number: answer for _, each in everyone for number, answer in each.items()}
    return [by_number[number] for number in range(len(prompts))]


class _Told(Exception):
    """This process was told to stop."""


def _answer_by_forwards(
    model: ParallelModel, prompts: Sequence[list[int]], limits: Sequence[int], stop_ids: Collection[int],
    stream: RowStream, vocabulary: int | None, stop: Callable[[], bool],
) -> list[list[int]] | None:  # fmt: skip
    """Each token costs a forward of the whole row on all ranks: a KV cache would need code of its own in every layout.
    Args, Returns: as of answer_greedily.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    batch, dp_rank = stream.batch, stream.dp_rank
    together = batch.dp_degree * batch.local_batch_size
    for first in range(0, len(prompts), together):
        open_ = {number: limits[number] for number in range(first, min(first + together, len(prompts)))}
        while open_:
            own_numbers = [number for number in open_ if number % batch.dp_degree == dp_rank]
            rows = [prompts[number] + answers[number] for number in own_numbers]
            # without rows: to join the collectives
            logits = model.logits(of_prompts(rows or [[0]], _ROUNDED_TO * model.row_multiple))
            # The rank that chose a token sends its id + 1, all others send 0: the sum tells every rank. The last
            # element counts the ranks that were told to stop.
            chosen = torch.zeros(len(prompts) + 1, dtype=torch.long, device=model.device)
            if logits is not None and model.counts_loss and own_numbers:
                chosen[torch.tensor(own_numbers, device=model.device)] = logits[:, :vocabulary].argmax(-1) + 1
            chosen[-1] = stop()
            sum_in_place(chosen)
            *tokens, stopping = chosen.tolist()
            if stopping:
                return None
            for number in list(open_):
                token = tokens[number] - 1
                assert token >= 0, "no rank has chosen a token"
                if token not in stop_ids:
                    answers[number].append(token)
                if token in stop_ids or len(answers[number]) == limits[number]:
                    del open_[number]
    return answers


def _not_compiled() -> AbstractContextManager[object]:
    """Run compiled modules eagerly. Rows of other lengths would trigger a recompilation with dynamic shapes; the next
    training step would then run other kernels, which round differently.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing dynamo takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
