"""How often drafts of the draft head are accepted, from one forward over a text.

A server's step begins at a slot t, where the trunk has just chosen token t + 1. The head drafts tokens t + 2 to
t + k + 1: the first from the trunk's hidden state of slot t, each further one from its own output and the draft before
it. The trunk verifies them: leading ones that hold are kept, and behind them one token is its own. So where a draft
counts, those before it are the tokens of the text, and one forward over the text has all that is needed. Source of the
chain: vLLM's and SGLang's loops; tests/test_acceptance.py drafts and verifies token by token.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titan_mi100.attention.base import Documents
from titan_mi100.attention.torch_backends import cached
from titan_mi100.model.decode import Sampling, probabilities
from titan_mi100.model.decoder import CausalLM, Layer

NEAR = 1e-5  # if the two highest logits are no further apart, rounding decides
VALUES_AT_ONCE = 1 << 25  # of logits, or of keys, at a time


# Of drafts, (slots,) or (slots, k) each: the probability that a draft holds, given the text, and that those before it
# hold; the same before it is known which token the text has there; whether a near tie decides.
Drafts = tuple[Tensor, Tensor, Tensor]


class DraftMeter:
    """Measures drafts over texts that the model has written, in the dtype of the weights.

    Args:
        network: has a draft head.
        k: drafts of a step.
        sampling: at temperature 0 a draft is the head's likeliest token, and holds if it is the trunk's; else it is
            drawn from the head's distribution q, and holds with min(1, p / q), p the trunk's.
    """

    def __init__(self, network: CausalLM, k: int, sampling: Sampling) -> None:
        assert network.mtp is not None
        self._network, self._head, self._k, self._sampling = network, network.mtp, k, sampling
        self._layer = next(layer for layer in network.mtp.layers if isinstance(layer, Layer))
        self._layer.backend = self._attend  # type: ignore[assignment]
        self._entries = list[tuple[Tensor, Tensor]]()  # keys and values of the text, then of each further draft

    @torch.no_grad()
    def __call__(self, ids: Tensor, learned: Tensor) -> Tensor:
        """Measure one text.

        Args:
            ids: (n,). learned: (n,) bool: the tokens that steps choose. A step counts if they are all of its k + 1.

        Returns:
            (k + 2,), fp64: how many steps began; in how many of them drafts 1 to k held; how many others are left out,
            because a near tie decides. Expected numbers where drafts are drawn.
        """
        k = self._k
        slots = torch.nonzero(learned[1:].unfold(0, k + 1, 1).all(1))[:, 0] if len(ids) > k + 1 else ids[:0]
        if not len(slots):
            return torch.zeros(k + 2, dtype=torch.float64)
        held, mean, is_near = map(torch.cat, zip(*self._drafts(ids, slots), strict=True))
        before = torch.cat((torch.ones(len(slots), 1), held.cumprod(1)), dim=1)  # that all before it hold
        begins = step_starts(before)
        left_out = (is_near & (before[:, :-1] > 0)).any(1)
        counted = begins * ~left_out
        accepted = counted @ (before[:, :-1] * mean)
        return torch.cat((counted.sum()[None], accepted, begins[left_out].sum()[None]))

    def _drafts(self, ids: Tensor, slots: Tensor) -> Iterator[Drafts]:
        """Measure some slots after others."""
        network, decoder = self._network, self._network.model
        positions = torch.arange(len(ids), device=ids.device)[None]
        documents = decoder.prepare(Documents.one_per_row(*positions.shape), ids.device)
        hidden = decoder(ids[None], positions, documents)
        self._entries.clear()
        first = network.draft_states(hidden, ids[None].roll(-1, 1), positions, documents)
        largest = max(decoder.spec.vocab_size, self._entries[0][0].numel())
        for part in slots.split(max(1, VALUES_AT_ONCE // largest)):
            states, compared = first[:, part], list[Drafts]()
            del self._entries[1:]
            for ahead in range(1, self._k + 1):
                if ahead > 1:
                    tables = self._layer.rotary_tables(decoder.spec, (part + ahead - 1)[None])
                    states = self._head(states, decoder.embed(ids[None, part + ahead]), tables, part)
                both = torch.cat((hidden[:, part + ahead], states))
                logits = network.head(both)[..., : self._sampling.vocabulary]
                compared.append(self._compare(logits, ids[part + ahead + 1]))
            held, mean, is_near = (torch.stack(column, dim=1).cpu() for column in zip(*compared, strict=True))
            yield held, mean, is_near

    def _compare(self, logits: Tensor, tokens: Tensor) -> Drafts:
        """Compare logits of trunk and head for the same places, (2, slots, V). Args: tokens: (slots,), of the text."""
        if self._sampling.temperature:
            p, q = (probabilities(of_one, self._sampling).double() for of_one in logits)
            of_p, of_q = (x.gather(1, tokens[:, None])[:, 0] for x in (p, q))
            held = (of_q / of_p.clamp(min=1e-300)).clamp(max=1)
            return held, torch.minimum(p, q).sum(1), torch.zeros_like(tokens, dtype=torch.bool)
        (chosen, drafted), highest = logits.argmax(-1), logits.topk(2).values
        is_near = (highest[..., 0] - highest[..., 1] <= NEAR).any(0)
        held = (drafted == tokens).double()
        return held, held, is_near | (chosen != tokens)  # the text was written with a cache, which may round otherwise

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """Attention of the head's layer, see Backend. After the first call, which is of the whole text, each is of one
        more draft of the slots in `prepared`: it sees the text's keys up to its slot, and those of its own chain.
        """
        self._entries.append((k, v))
        if len(self._entries) == 1:
            return self._network.model.backend(q, k, v, prepared)
        seen = []
        for of_text, *own in zip(*self._entries, strict=True):
            every = of_text[0].transpose(0, 1).expand(len(prepared), -1, -1, -1)  # (slots, heads, n, size)
            seen.append(torch.cat((every, *(x[0, :, :, None] for x in own)), dim=2))
        columns = torch.arange(seen[0].shape[2], device=q.device)
        visible = (columns <= prepared[:, None]) | (columns >= self._entries[0][0].shape[1])
        return cached(q.transpose(0, 1), seen[0], seen[1], visible).transpose(0, 1)


def step_starts(before: Tensor) -> Tensor:
    """The probability that a step begins at each slot, (slots,): at the first; then accepted drafts + 1 slots on.

    Args: before: (slots, k + 1): that 0 to k leading drafts hold.
    """
    exactly = (before - torch.nn.functional.pad(before[:, 1:], (0, 1))).tolist()
    begins = [1.0] + [0.0] * (len(before) + before.shape[1])
    for slot, probabilities_here in enumerate(exactly):
        for accepted, probability in enumerate(probabilities_here):
            begins[slot + accepted + 1] += begins[slot] * probability
    return torch.tensor(begins[: len(before)], dtype=torch.float64)


def rates(sums: Tensor) -> list[dict[str, float | None]]:
    """Tokens for each step of the trunk; then the acceptance of each position, of steps in which those before it held.

    Each has its `value`, its standard `error` (None: of fewer than two texts), and of how many (`n`) it is. The error
    is that of a ratio of sums over texts, because the slots of a text are not independent (Cochran, Sampling
    Techniques, 1977, section 6.4).

    Args:
        sums: (texts, k + 2), as DraftMeter gives them.
    """
    columns, ratios = sums[:, :-1].T, list[dict[str, float | None]]()
    for below, above in ((columns[0], columns.sum(0)), *pairwise(columns)):
        n, texts = float(below.sum()), len(below)
        ratio = float(above.sum()) / n if n else None
        squares = float((above - (ratio or 0) * below).square().sum())
        error = math.sqrt(squares * texts / (texts - 1)) / n if texts > 1 and n else None
        ratios.append({"value": ratio, "error": error, "n": n})
    return ratios
