"""Acceptance of drafts: the figure of one forward against servers' loops that draft and verify token by token."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from lifted import lifting
from test_draft_head import KINDS, Reference
from test_qwen3_5 import HEADS
from test_qwen3_moe import Tensors
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from titan_mi100.attention.backends import make_backend
from titan_mi100.model.acceptance import DraftMeter, rates
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.families import MODELS
from titan_mi100.parallel.distributed import fill_parameters
from titan_mi100.shapes.base import DRAFT
from titan_mi100.shapes.qwen3_5 import FULL, LINEAR, Qwen3_5Spec
from titan_mi100.weights.pieces import joined, read_pieces

SMALL = Qwen3_5Spec(48, 64, 96, 3, 4, 2, 2, 4, False, (LINEAR, FULL, FULL), **HEADS)


def made(kind: str, spec: Qwen3_5Spec | None = None) -> tuple[Any, Reference]:
    """transformers' model, and a head of transformers' parts, with random weights."""
    of_kind, make, module, prefix = KINDS[kind]
    hf = make(spec or of_kind).requires_grad_(False)
    return hf, Reference(hf, module, prefix).requires_grad_(False)


def ours(spec: Qwen3_5Spec, hf: Any, head: Reference, backend: str = "sdpa") -> Any:
    """Our model with their weights, in fp64."""
    spec = replace(spec, has_draft_head=True)
    model = MODELS[spec.model_type](spec, make_backend(backend, "", "cpu")).double().requires_grad_(False)
    stored = {**hf.state_dict(), **{DRAFT + name: tensor for name, tensor in head.state_dict().items()}}
    fill_parameters(model.named_parameters(), read_pieces(spec, joined(Tensors(stored), spec).read))
    return model


def agreeing(noise: float) -> tuple[Any, Reference]:
    """A model and a head that both look the next token up by the newest one. Their layers, and for the head the hidden
    state, disturb it: the more noise, the fewer drafts hold.
    """
    hf, head = made("untied", SMALL)
    draw = torch.Generator().manual_seed(9)
    for name, parameter in [*hf.named_parameters(), *head.named_parameters()]:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            parameter.mul_(4)
    table, size = hf.model.embed_tokens.weight, SMALL.hidden_size
    table.normal_(0, 1, generator=draw)
    hf.lm_head.weight[torch.randperm(SMALL.vocab_size, generator=draw)] = table.clone()
    head.fc.weight.copy_(torch.cat((torch.eye(size), torch.empty(size, size).normal_(0, noise, generator=draw)), dim=1))
    return hf, head


def head_output(hf: Any, head: Reference, hidden: Tensor, embedded: Tensor) -> Tensor:
    """The head's output after its norm, (batch, n, hidden), of plain causal attention over all inputs."""
    x = head.fc(torch.cat((head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)), dim=-1))
    positions = torch.arange(x.shape[1])[None]
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    tables = hf.model.rotary_emb(x, positions[None].expand(3, 1, -1))
    return head.norm(head.layers[0](x, position_embeddings=tables, attention_mask=mask, position_ids=positions))


def chained(hf: Any, head: Reference, text: list[int], drafts: Sequence[int]) -> Tensor:
    """The head's logits, (V,), after drafts behind a text whose last token the trunk has chosen."""
    ids = torch.tensor([text])
    hidden, embedded = hf.model(ids).last_hidden_state[:, :-1], hf.model.embed_tokens(ids[:, 1:])
    for draft in drafts:
        hidden = torch.cat((hidden, head_output(hf, head, hidden, embedded)[:, -1:]), dim=1)
        embedded = torch.cat((embedded, hf.model.embed_tokens(torch.tensor([[draft]]))), dim=1)
    return hf.lm_head(head_output(hf, head, hidden, embedded)[0, -1])  # type: ignore[no-any-return]


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """On the right, where causal models do not see it."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)


def served(
    hf: Any, head: Reference, prompts: Sequence[list[int]], k: int, new: int
) -> tuple[list[list[int]], list[list[tuple[list[int], int]]]]:
    """A server's loop over prompts: k drafts, verified by the trunk, and one token of its own. Each step computes all
    texts again from their beginning.

    Returns:
        The new tokens of each prompt; and of each step whose drafts are all of `new` tokens: the drafts, and how many
        were accepted.
    """
    every = range(len(prompts))
    best = hf(padded(prompts)).logits.argmax(-1)
    texts = [[*prompt, int(best[i, len(prompt) - 1])] for i, prompt in enumerate(prompts)]
    steps: list[list[tuple[list[int], int]]] = [[] for _ in prompts]
    while goes_on := [i for i in every if len(texts[i]) - len(prompts[i]) + k <= new]:
        own = [texts[i] for i in goes_on]
        ids = padded(own)
        hidden, embedded = hf.model(ids).last_hidden_state, hf.model.embed_tokens(ids.roll(-1, 1))
        hidden, embedded = (torch.cat((x, torch.zeros_like(x[:, :k])), dim=1) for x in (hidden, embedded))
        drafts: list[list[int]] = [[] for _ in own]
        rows = torch.arange(len(own))
        for number in range(k):
            places = torch.tensor([len(text) - 2 + number for text in own])
            outputs = head_output(hf, head, hidden, embedded)[rows, places]
            tokens = hf.lm_head(outputs).argmax(-1)
            hidden[rows, places + 1], embedded[rows, places + 1] = outputs, hf.model.embed_tokens(tokens)
            for draft, token in zip(drafts, tokens.tolist(), strict=True):
                draft.append(token)
        best = hf(padded([text + draft for text, draft in zip(own, drafts, strict=True)])).logits.argmax(-1)
        for row, (i, draft) in enumerate(zip(goes_on, drafts, strict=True)):
            said = best[row, len(texts[i]) - 1 :].tolist()
            count = next((number for number in range(k) if draft[number] != said[number]), k)
            texts[i] += said[: count + 1]
            steps[i].append((draft, count))
    return [text[len(prompt) : len(prompt) + new] for text, prompt in zip(texts, prompts, strict=True)], steps


def measured(
    model: Any, k: int, sampling: Sampling, prompt: list[int], answer: list[int], is_own: bool = True
) -> Tensor:
    ids = torch.tensor(prompt + answer)
    return DraftMeter(model, k, sampling, is_own)(ids, torch.arange(len(ids)) >= len(prompt))


def counts_of(steps: Sequence[tuple[list[int], int]], k: int) -> list[int]:
    return [sum(count >= least for _, count in steps) for least in range(k + 1)]


def prompts_of(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(0, SMALL.vocab_size, (1 + i % 9,), generator=draw).tolist() for i in range(count)]


@pytest.fixture(scope="module", params=[0.1, pytest.param(0.3, marks=pytest.mark.full)])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Reference]:
    return agreeing(request.param)


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_one_forward_gives_what_a_server_counts(pair: tuple[Any, Reference], k: int, full: bool) -> None:
    """In fp32, as the command computes, against a loop in fp64."""
    hf, head = pair
    model, prompts, new = ours(SMALL, hf, head).float(), prompts_of(200 if full or k == 3 else 40), 16
    with lifting(modeling_qwen3_5, "Qwen3_5TextRotaryEmbedding"):
        texts, steps = served(hf, head, prompts, k, new)
    answers = generate(model, prompts, Sampling(with_log_p=True), (), new)
    ties, sums = 0, []
    for prompt, text, own, answer in zip(prompts, texts, steps, answers, strict=True):
        found = measured(model, k, Sampling(), prompt, [token for token, _ in answer.sampled])
        sums.append(found)
        if found[-1] or answer.ids[: len(text)] != text:
            ties += 1
            continue
        assert found[:-1].tolist() == counts_of(own, k)
    assert ties <= len(prompts) / 50
    every = counts_of([step for own in steps for step in own], k)
    assert all(0.25 < above / below < 0.75 for below, above in pairwise(every))  # a figure that could be otherwise
    length, *positions = rates(torch.stack(sums))
    expected = [sum(every) / every[0], *(above / below for below, above in pairwise(every))]
    assert [rate["value"] for rate in (length, *positions)] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(("kind", "backend"), [("tied", "sdpa"), ("untied", "chunked"), ("experts", "eager")])
@torch.no_grad()
def test_every_draft_of_a_chain_has_the_logits_of_a_computation_from_the_beginning(kind: str, backend: str) -> None:
    (spec, _, module, prefix), temperature = KINDS[kind], 2.0
    hf, head = made(kind)
    text = torch.randint(0, 200, (13,), generator=torch.Generator().manual_seed(8)).tolist()
    expected = torch.zeros(4, dtype=torch.float64)
    with lifting(module, f"{prefix}TextRotaryEmbedding"):
        p = (hf(torch.tensor([text])).logits[0] / temperature).softmax(-1)
        for slot in range(4, len(text) - 4):  # of a prompt of five tokens
            weight, row = 1.0, [1.0]
            for number in range(3):
                drafts = text[slot + 2 : slot + 2 + number]
                q = (chained(hf, head, text[: slot + 2], drafts) / temperature).softmax(-1)
                of_trunk, token = p[slot + 1 + number], text[slot + 2 + number]
                row.append(weight * float(torch.minimum(of_trunk, q).sum()))
                weight *= min(1.0, float(q[token] / of_trunk[token]))
            expected += torch.tensor(row, dtype=torch.float64)
    model = ours(spec, hf, head, backend)
    for _ in range(2):  # nothing is left of the call before
        found = measured(model, 3, Sampling(temperature), text[:5], text[5:], is_own=False)
        assert found[0] == 5 and found[-1] == 0
        assert (found[:-1] - expected).abs().max() < 1e-10


@torch.no_grad()
def test_drawn_texts_give_the_expectation_of_every_course_of_a_server() -> None:
    """All texts of three tokens of a vocabulary, weighted, against all drafts, acceptances and corrections."""
    spec, temperature, k, new = replace(SMALL, vocab_size=3), 0.5, 2, 5
    hf, head = made("untied", spec)
    prompt, vocabulary = [0, 2, 1, 1], range(3)

    @cache
    def p(text: tuple[int, ...]) -> list[float]:
        return (hf(torch.tensor([text])).logits[0, -1] / temperature).softmax(-1).tolist()  # type: ignore[no-any-return]

    @cache
    def q(text: tuple[int, ...], drafts: tuple[int, ...]) -> list[float]:
        return (chained(hf, head, [*text], drafts) / temperature).softmax(-1).tolist()  # type: ignore[no-any-return]

    @cache
    def expected(text: tuple[int, ...]) -> Tensor:
        """Steps, and those with one and two accepted drafts, from here on."""
        if len(text) - len(prompt) + k > new:
            return torch.zeros(k + 1, dtype=torch.float64)
        return torch.tensor([1.0, 0, 0], dtype=torch.float64) + drafting(text, ())

    @cache
    def drafting(text: tuple[int, ...], drafts: tuple[int, ...]) -> Tensor:
        """The same, after these drafts were accepted."""
        trunk = p(text + drafts)
        if len(drafts) == k:
            return sum(share * expected((*text, *drafts, token)) for token, share in enumerate(trunk))  # type: ignore[return-value]
        drafted, total = q(text, drafts), torch.zeros(k + 1, dtype=torch.float64)
        left = [max(0.0, a - b) for a, b in zip(trunk, drafted, strict=True)]
        for token in vocabulary:
            accepted = drafted[token] * min(1.0, trunk[token] / drafted[token])
            held = torch.tensor([0.0, len(drafts) == 0, len(drafts) == 1], dtype=torch.float64)
            total += accepted * (held + drafting(text, (*drafts, token)))
            rejected = drafted[token] - accepted
            for other in vocabulary if rejected > 0 else ():
                total += rejected * left[other] / sum(left) * expected((*text, *drafts, other))
        return total

    with lifting(modeling_qwen3_5, "Qwen3_5TextRotaryEmbedding"):
        wanted = sum(share * expected((*prompt, token)) for token, share in enumerate(p(tuple(prompt))))
        found, model = torch.zeros(k + 2, dtype=torch.float64), ours(spec, hf, head)
        for answer in product(vocabulary, repeat=new):
            chances = (p((*prompt, *answer[:number]))[token] for number, token in enumerate(answer))
            found += math.prod(chances) * measured(model, k, Sampling(temperature), prompt, [*answer])
    assert isinstance(wanted, Tensor) and 0.2 < wanted[1] / wanted[0] < 0.9 and 1.2 < wanted[0] < 3
    assert (found[:-1] - wanted).abs().max() < 1e-8


@torch.no_grad()
def test_steps_that_a_near_tie_decides_are_counted_and_left_out(pair: tuple[Any, Reference]) -> None:
    hf, head = copy.deepcopy(pair)
    prompts, new = prompts_of(30), 16
    twin, other = 7, 39
    hf.lm_head.weight[other] = hf.lm_head.weight[twin]
    texts, steps = served(hf, head, prompts, 1, new)
    model, ties = ours(SMALL, hf, head), 0
    for prompt, text, own in zip(prompts, texts, steps, strict=True):
        found, place, near = measured(model, 1, Sampling(), prompt, text), 1, 0
        for draft, count in own:
            near += bool({draft[0], text[place]} & {twin, other})
            place += count + 1
        assert found[-1] == near and found[0] == len(own) - near
        ties += near
    assert ties > 5


def test_rates_have_the_error_of_a_ratio_over_texts() -> None:
    sums = torch.tensor([[10.0, 6, 3, 1], [20, 8, 5, 0], [0, 0, 0, 0], [12, 9, 9, 0]], dtype=torch.float64)
    length, first, second = rates(sums)
    assert [rate["n"] for rate in (length, first, second)] == [42, 42, 23]
    assert [rate["value"] for rate in (length, first, second)] == pytest.approx(
        [1 + 23 / 42 + 17 / 42, 23 / 42, 17 / 23]
    )
    # drawing texts again and again gives the same error
    draw = np.random.default_rng(1)
    drawn = sums.numpy()[draw.integers(0, 4, (20_000, 4))].sum(1)
    drawn = drawn[drawn[:, 0] > 0]
    assert first["error"] == pytest.approx(np.std(drawn[:, 1] / drawn[:, 0]) * (4 / 3) ** 0.5, rel=0.25)
    assert rates(sums[:1])[1] == {"value": 0.6, "error": None, "n": 10}
    assert rates(sums[2:3])[0] == {"value": None, "error": None, "n": 0}
