"""Token generation with a cache of keys and values (KV cache).

It runs the model's own modules: `Layer.project` and `output`, with `decode_step` between them, which
reads the cache. tests/test_generate.py compares it with transformers' `generate` and logits processors.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from titan_mi100.attention.base import Documents
from titan_mi100.errors import UserError
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.elementwise import at_least_fp32
from titan_mi100.shapes.base import ModelSpec


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token. The filters apply in this order, as in transformers.

    Raises:
        UserError: values out of range, or filters with greedy decoding, where they have no effect; one line each.
    """

    temperature: float = 0.0  # 0: greedy, always the most probable token
    top_k: int = 0  # only the k most probable tokens; 0: all
    top_p: float = 1.0  # only the smallest set of most probable tokens whose probabilities sum to at least top_p
    vocabulary: int | None = None  # only ids below this, if the tokenizer has fewer than the model; None: all
    with_log_p: bool = False  # fill in Generated.sampled

    def __post_init__(self) -> None:
        t = self.temperature
        greedy_with_filters = t == 0 and (self.top_k, self.top_p) != (0, 1.0)
        rules = {
            f"temperature = {t} must be 0 (greedy) or at least 1e-6": t == 0 or 1e-6 <= t < inf,
            f"top_k = {self.top_k} must be 0 (off) or more": self.top_k >= 0,
            f"top_p = {self.top_p} must be above 0 and at most 1 (off)": 0 < self.top_p <= 1,
            "top_k and top_p change nothing at temperature 0; set a temperature, such as 0.7": not greedy_with_filters,
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise UserError("\n".join(broken))


class Generated(NamedTuple):
    """The continuation of one prompt."""

    ids: list[int]  # the new tokens, without the stop token
    stopped: bool  # True: it ended with a stop token; False: it reached max_new_tokens
    # If Sampling.with_log_p: each new token, the stop token too, and its log p. That is at temperature 1, without
    # filters, over all columns of the head, as in the loss.
    sampled: Sequence[tuple[int, float]] = ()


@torch.no_grad()
def generate(
    model: CausalLM,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    stop_ids: Collection[int],
    max_new_tokens: int | Sequence[int],
    seeds: Sequence[str] | None = None,
    on_step: Callable[[list[int | None]], None] | None = None,
) -> list[Generated]:
    """Continue the prompts in one batch. The continuation of a prompt does not depend on the other prompts.

    Args:
        prompts: token ids, of any lengths.
        stop_ids: tokens that end a continuation.
        max_new_tokens: the most tokens to add to each prompt; or a number per prompt.
        seeds: one per prompt, seeds its random draws; default: the prompt's index.
        on_step: called after each step with one token per prompt; None for prompts that have ended.

    Returns:
        One continuation per prompt, in order.

    Raises:
        UserError: a prompt is empty, or too long for the model.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), 1):
        check_lengths(model.model.spec, {f"prompt {number}": len(prompt)}, limit)
    seeds = seeds or [str(index) for index in range(len(prompts))]
    generators = [torch.Generator().manual_seed(zlib.crc32(seed.encode())) for seed in seeds]
    rows: list[list[int]] = [[] for _ in prompts]
    sampled: list[list[tuple[int, float]]] = [[] for _ in prompts]
    new: list[int | None] = [0] * len(prompts)  # the newest token of each prompt; None: the continuation has ended
    cache = Cache(model, prompts, max(limits))
    tokens = cache.prompts
    # A continuation that has ended stays in the batch, so shapes stay fixed; its further tokens are dropped.
    for _ in range(max(limits)):
        logits = forward(model, tokens, cache)
        draws = torch.tensor([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
        tokens = choose(logits[:, : sampling.vocabulary], sampling, draws.to(logits.device))[:, None]
        if sampling.with_log_p:
            log_p = at_least_fp32(logits).log_softmax(-1).gather(1, tokens)
            for i, pair in enumerate(zip(tokens[:, 0].tolist(), log_p[:, 0].tolist(), strict=True)):
                sampled[i] += [pair] if new[i] is not None and len(rows[i]) < limits[i] else []
        chosen = zip(new, tokens[:, 0].tolist(), rows, limits, strict=True)
        new = [
            None if last is None or token in stop_ids or len(row) == limit else token
            for last, token, row, limit in chosen
        ]
        if new.count(None) == len(new):
            break
        for row, kept in zip(rows, new, strict=True):
            row += [] if kept is None else [kept]
        if on_step is not None:
            on_step(new)
    ended = zip(rows, limits, map(tuple, sampled), strict=True)
    return [Generated(row, len(row) < limit, pairs) for row, limit, pairs in ended]


def check_lengths(spec: ModelSpec, lengths: Mapping[str, int], max_new_tokens: int) -> None:
    """Refuse an empty prompt, and a prompt that with its new tokens exceeds the model's positions.

    Args:
        lengths: name of each prompt, for the message -> its number of tokens.

    Raises:
        UserError: for the first such prompt.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    limit = spec.reach
    for name, length in lengths.items():
        if not length:
            raise UserError(f"{name}: is empty; the model needs at least one token to continue")
        if length + max_new_tokens > limit:
            lower = f", or lower max_new_tokens to {limit - length}" if length < limit else ""
            raise UserError(
                f"{name}: {length:,} tokens plus max_new_tokens = {max_new_tokens:,} exceed the {limit:,} "
                f"positions of the model (max_position_embeddings); shorten the prompt{lower}"
            )


class Cache:
    """KV caches and recurrent states of all layers. Prompts are padded on the left, so that the newest token of every
    row is in the last used column.
    """

    def __init__(self, model: CausalLM, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
        """Allocate the cache for the prompts and the new tokens. Padding is a document of its own, so no prompt attends
        to it.
        """
        decoder, weight = model.model, next(model.parameters())
        padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        batch, longest = padded.shape
        padding = [longest - len(prompt) for prompt in prompts]
        lengths = (length for pad in padding for length in (pad, longest - pad) if length)
        documents = Documents(batch, longest, tuple(lengths))
        self.documents = decoder.prepare(documents, weight.device)
        self.prompts = padded.to(weight.device)  # (batch, longest)
        self.padding = torch.tensor(padding, device=weight.device)[:, None]
        self.used = 0  # positions filled so far, padding included
        dtype, seq, device = decoder.dtype or weight.dtype, longest + max_new_tokens, weight.device
        self.states = [layer.new_decode_state(decoder.spec, batch, seq, dtype, device) for layer in decoder.blocks()]


def forward(model: CausalLM, ids: Tensor, cache: Cache) -> Tensor:
    """Run the model on new tokens and append them to the cache: first `cache.prompts`, then one token per row.

    Args:
        ids: (batch, new).

    Returns:
        The logits of each row's last token, (batch, vocab).
    """
    decoder, until = model.model, cache.used + ids.shape[1]
    assert decoder.norm is not None
    columns = torch.arange(until, device=ids.device)
    tables, visible = decoder.rotary_tables(columns[cache.used :] - cache.padding), columns >= cache.padding
    x = decoder.embed(ids)
    for layer, state in zip(decoder.blocks(), cache.states, strict=True):
        kind = layer.shape.kind
        parts, prepared = layer.project(x, tables[kind]), cache.documents[kind]
        x = layer.output(x, layer.decode_step(parts, prepared, state, cache.used, visible))
    cache.used = until
    last = decoder.norm(x[:, -1:])  # logits of the last token only: the head is large
    if next(model.parameters()).dtype == last.dtype:
        return model.head(last)[:, 0]
    return model.head(last, supervised=torch.arange(len(last), device=last.device))  # fp32 weights, cast in blocks


def choose(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Choose the next token of each row.

    Args:
        logits: (batch, vocab).
        draws: (batch,), uniform in [0, 1), fp64; unused at temperature 0.

    Returns:
        (batch,) token ids: the most probable one at temperature 0, else inverse transform sampling with the draw.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cumulative = probabilities(logits, sampling).double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    # Rounding can make draw * total equal to total. Then take the last token whose probability is above 0.
    return torch.minimum(chosen, torch.searchsorted(cumulative, total))[:, 0]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution to sample from: (batch, vocab) -> (batch, vocab), in fp32 or fp64, 0 for filtered tokens.

    Equals transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper in this order, ties included.
    """
    scores = at_least_fp32(logits) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        unlikely[:, -1] = False  # the most probable token is always kept
        scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
    return scores.softmax(-1)
