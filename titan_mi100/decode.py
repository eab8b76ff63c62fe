"""Generation: one token after another, with the keys and values of those before it kept.

The model's own parts run: a block's two halves around an attention that reads the cache. Tested against transformers'
`generate` and its logits processors in tests/test_generate.py.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.loss import at_least_fp32
from titan_mi100.model import attention
from titan_mi100.model.qwen3 import Qwen3, rotary_tables
from titan_mi100.model_spec import ModelSpec


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The filters apply in this order, as in transformers."""

    temperature: float = 0.0  # 0: the most probable token, always
    top_k: int = 0  # only the k most probable tokens; 0: all
    top_p: float = 1.0  # only the most probable tokens that together have this probability

    def problems(self) -> list[str]:
        """What is wrong with the values, one clause each."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature = {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            found.append(f"top_k = {self.top_k} must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p = {self.top_p} must be above 0 and at most 1 (off)")
        if not found and self.temperature == 0 and (self.top_k, self.top_p) != (0, 1.0):
            found.append("top_k and top_p change nothing at temperature 0; set a temperature, such as 0.7")
        return found


class Generated(NamedTuple):
    """What the model said to one prompt."""

    ids: list[int]  # without the stop token
    stopped: bool  # by a stop token; else the number of new tokens was the end


def generate(
    model: Qwen3,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    stop_ids: Collection[int],
    max_new_tokens: int,
    seeds: Sequence[str] | None = None,
    vocabulary: int | None = None,
) -> list[Generated]:
    """Go on with the prompts, all in one batch; see `stream`, which it collects."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, sampling, stop_ids, max_new_tokens, seeds, vocabulary):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return [Generated(row, len(row) < max_new_tokens) for row in rows]


@torch.no_grad()
def stream(
    model: Qwen3,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    stop_ids: Collection[int],
    max_new_tokens: int,
    seeds: Sequence[str] | None = None,
    vocabulary: int | None = None,
) -> Iterator[list[int | None]]:
    """Go on with the prompts, all in one batch, and hand out each step's tokens at once.

    Args:
        prompts: token ids, of any lengths. What a row says does not depend on the others in its batch.
        stop_ids: tokens that end a row.
        seeds: one per prompt, of what is drawn for it; default: its number.
        vocabulary: only ids below it may come, where the tokenizer has fewer than the model; default: all.

    Yields:
        A token per prompt, None for a row that has ended. At most `max_new_tokens` times.

    Raises:
        UserError: a prompt that is empty, or too long for the model.
    """
    names = [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    check_lengths(model.model.spec, dict(zip(names, map(len, prompts), strict=True)), max_new_tokens)
    device = next(model.parameters()).device
    seeds = seeds or [str(number) for number in range(len(prompts))]
    generators = [torch.Generator().manual_seed(zlib.crc32(seed.encode())) for seed in seeds]
    going = [True] * len(prompts)
    cache = KVCache(model, prompts, max_new_tokens)
    logits = prefill(model, prompts, cache)
    for number in range(max_new_tokens):
        draws = torch.tensor([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
        tokens = choose(logits[:, :vocabulary], sampling, draws.to(device))
        chosen = tokens.tolist()
        going = [goes_on and token not in stop_ids for goes_on, token in zip(going, chosen, strict=True)]
        if not any(going):
            return
        yield [token if goes_on else None for goes_on, token in zip(going, chosen, strict=True)]
        if number + 1 < max_new_tokens:
            logits = step(model, tokens, cache)


def check_lengths(spec: ModelSpec, lengths: Mapping[str, int], max_new_tokens: int) -> None:
    """Refuse prompts that are empty, or that leave no room for the new tokens: UserError about the first.

    Args:
        lengths: tokens of each prompt, by what a message calls it.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens} must be at least 1")
    limit = spec.max_position_embeddings
    for name, length in lengths.items():
        if not length:
            raise UserError(f"{name}: is empty; the model needs at least one token to go on from")
        if length + max_new_tokens > limit:
            lower = f", or lower max_new_tokens to {limit - length}" if length < limit else ""
            raise UserError(
                f"{name}: {length:,} tokens and max_new_tokens = {max_new_tokens:,} are more than the {limit:,} "
                f"positions of the model (max_position_embeddings); shorten the prompt{lower}"
            )


class KVCache:
    """Keys and values of a batch, each (layers, batch, kv_heads, capacity, head_dim). Rows are padded on the left."""

    def __init__(self, model: Qwen3, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
        spec, weight = model.model.spec, next(model.parameters())
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=weight.device)  # of the rows so far
        self.used = 0  # of the capacity, padding included
        longest = max(map(len, prompts))
        capacity = longest + max_new_tokens
        self.visible = torch.arange(capacity, device=weight.device) >= (longest - self.lengths)[:, None]
        shape = (spec.num_hidden_layers, len(prompts), spec.num_key_value_heads, capacity, spec.head_dim)
        dtype = model.model.dtype or weight.dtype
        self._keys = torch.empty(shape, dtype=dtype, device=weight.device)
        self._values = torch.empty(shape, dtype=dtype, device=weight.device)

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values, (batch, new, kv_heads, head_dim); all that it has, without a copy."""
        until = self.used + k.shape[1]
        self._keys[layer, :, :, self.used : until] = k.transpose(1, 2)
        self._values[layer, :, :, self.used : until] = v.transpose(1, 2)
        return self._keys[layer, :, :, :until], self._values[layer, :, :, :until]


def prefill(model: Qwen3, prompts: Sequence[list[int]], cache: KVCache) -> Tensor:
    """Run the prompts; logits of their last tokens, (batch, vocab). Padding is a document of its own."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=cache.lengths.device)
    positions = torch.arange(longest, device=ids.device) - (longest - cache.lengths)[:, None]
    backend = model.model.backend
    lengths = (length for prompt in prompts for length in (longest - len(prompt), len(prompt)) if length)
    documents = backend.prepare(attention.Documents(len(prompts), longest, tuple(lengths)), ids.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.put(layer, k, v)
        return backend(q, k, v, documents)

    logits = _run(model, ids, positions, attend)
    cache.used = longest
    return logits


def step(model: Qwen3, tokens: Tensor, cache: KVCache) -> Tensor:
    """Run one more token of each row, (batch,); logits, (batch, vocab)."""
    visible = cache.visible[:, : cache.used + 1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.cached(q, *cache.put(layer, k, v), visible)

    logits = _run(model, tokens[:, None], cache.lengths[:, None], attend)
    cache.used += 1
    cache.lengths += 1
    return logits


def _run(
    model: Qwen3, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    decoder = model.model
    assert decoder.norm is not None
    cos, sin = rotary_tables(positions, decoder.spec.head_dim, decoder.spec.rope_theta)
    x = decoder.embed(ids)
    for layer, block in enumerate(decoder.blocks()):
        x = block.after_attention(x, attend(layer, *block.before_attention(x, cos, sin)))
    return model.head(decoder.norm(x[:, -1:]))[:, 0]  # the head on the last token only


def choose(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """The next token of each row.

    Args:
        logits: (batch, vocab). draws: (batch,), uniform in [0, 1), fp64; unused at temperature 0.

    Returns:
        (batch,): the most probable, or by inverting the cumulative distribution at the draw.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cumulative = probabilities(logits, sampling).double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    # rounding may take the draw to the total: then the last token that has a probability
    return torch.minimum(found, torch.searchsorted(cumulative, total))[:, 0]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """(batch, vocab) -> (batch, vocab) in fp32 at least: what is sampled from, 0 for tokens that are filtered out.

    As transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper, ties included.
    """
    scores = at_least_fp32(logits) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        unlikely[:, -1] = False  # the most probable stays, whatever top_p
        scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
    return scores.softmax(-1)
