"""The delta rule in chunks against the recurrence, which is checked against a loop of its own; documents; costs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from titan_mi100.attention.base import Documents
from titan_mi100.model.delta_rule import _Chunks, causal_convolution, delta_rule, document_ids, recurrence
from titan_mi100.shapes import delta_rule as costs
from titan_mi100.shapes.delta_rule import products_of_chunk, tokens_at_once

ROWS = {  # lengths of documents; chunks end at 64, 128, ...
    "one token": [1],
    "a chunk and one": [65],
    "one document": [300],
    "at, before and behind the ends of chunks": [63, 2, 62, 1, 65, 3],
    "shorter than the convolution": [1, 2, 3, 1, 1, 2, 54, 64, 2],
}
KEYS, BETAS = ("random", "alike", "equal"), ("0", "random", "1 - 1e-6")


class Case(NamedTuple):
    """Arguments of `delta_rule` in fp64, and gradients of its results."""

    inputs: list[Tensor]  # q, k, v, g, beta, state
    grads: list[Tensor]
    ids: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        """In a dtype; g and the state in at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        inputs = [x.to(wide if n in (3, 5) else dtype) for n, x in enumerate(self.inputs)]
        return self._replace(inputs=inputs, grads=[self.grads[0].to(dtype), self.grads[1].to(wide)])

    def run(self, rule: Callable[..., tuple[Tensor, Tensor]], **more: Any) -> list[Tensor]:
        """The two results, and the gradients of the inputs."""
        *inputs, state = leaves = [x.detach().clone().requires_grad_() for x in self.inputs]
        results = rule(*inputs, self.ids, state, **more)
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, self.grads)]


def ids_of(lengths: Sequence[int], rows: int = 1) -> Tensor:
    return document_ids(Documents(rows, sum(lengths), (*lengths,) * rows), torch.device("cpu"))


def case(
    lengths: Sequence[int], keys: str = "random", beta: str = "random", rows: int = 1, heads: int = 2, group: int = 2,
    sizes: tuple[int, int] = (16, 8),
) -> Case:  # fmt: skip
    """-g is log-uniform from 1e-4 to 100. With equal keys one token is repeated. Args: sizes: of a key and a value."""
    generator = torch.Generator().manual_seed(len(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    (seq, values), (key, value) = (sum(lengths), heads * group), sizes
    q, k, v = (normal(rows, seq, n, size) for n, size in ((heads, key), (heads, key), (values, value)))
    powers = torch.rand(rows, seq, values, generator=generator, dtype=torch.float64) * 6 - 4
    k = k + 2 * normal(rows, 1, heads, key) if keys == "alike" else k  # their cosine is about 0.8
    if keys == "equal":
        q, k, v, powers = (x[:, :1].expand_as(x).clone() for x in (q, k, v, powers))
    strength = torch.rand(rows, seq, values, generator=generator, dtype=torch.float64)
    strength = {"0": torch.zeros_like(strength), "random": strength}.get(beta, torch.full_like(strength, 1 - 1e-6))
    inputs = q, k, v, -(10**powers), strength, normal(rows, values, value, key)
    grads = normal(*v.shape), normal(*inputs[-1].shape)
    return Case([x.float().double() for x in inputs], [*grads], ids_of(lengths, rows))  # fp32 has the same values


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Of the output, relative to its largest element, and of the state and the gradients, relative to the largest."""

    def error(part: slice) -> float:
        a, b = (torch.cat([x.double().flatten() for x in results[part]]) for results in (found, expected))
        return ((a - b).abs().max() / b.abs().max()).item()

    return error(slice(0, 1)), error(slice(1, None))


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_the_recurrence_is_the_definition_document_by_document() -> None:
    (q, k, v, g, beta, state), _, ids = case([3, 5, 1, 4], rows=2)
    found, last = recurrence(q, k, v, g, beta, ids, state)
    for row in range(2):
        for head in range(4):
            s = state[row, head].mT  # (dk, dv)
            for t in range(13):
                unit_q, unit_k = (x / (x @ x + 1e-6).sqrt() for x in (q[row, t, head // 2], k[row, t, head // 2]))
                s = s * g[row, t, head].exp() * (t not in (3, 8, 9))
                s = s + torch.outer(unit_k, beta[row, t, head] * (v[row, t, head] - s.mT @ unit_k))
                torch.testing.assert_close(found[row, t, head], s.mT @ unit_q / 4, atol=1e-14, rtol=0)
            torch.testing.assert_close(last[row, head], s.mT, atol=1e-14, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("keys", KEYS)
def test_chunks_equal_the_recurrence(keys: str, beta: str) -> None:
    for name, lengths in ROWS.items():
        some = case(lengths, keys, beta)
        expected = some.run(recurrence)
        assert max(errors(some.run(delta_rule), expected)) <= 1e-12, name
        assert max(errors(some.to(torch.float32).run(delta_rule), expected)) <= 2e-6, name


@pytest.mark.parametrize(("chunk", "heads", "group"), [(1, 1, 1), (8, 3, 1), (32, 1, 3), (128, 2, 2)])
def test_any_chunk_and_any_number_of_heads(chunk: int, heads: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    some = case([40, 90, 3], "alike", rows=2, heads=heads, group=group)
    whole = some.run(delta_rule, chunk=chunk)
    assert max(errors(whole, some.run(recurrence))) <= 1e-12
    monkeypatch.setattr(costs, "AT_ONCE", 1)  # every chunk is a part of its own
    assert max(errors(some.run(delta_rule, chunk=chunk), whole)) <= 1e-14
    assert all(map(torch.equal, some.run(delta_rule, chunk=chunk, divides=False), whole))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_16_bit_inputs_lose_no_more_than_the_rounding_of_the_results(dtype: torch.dtype, bound: float) -> None:
    some = case(ROWS["one document"], "alike")
    some.inputs[1].mul_(100)  # the sum of the squares is above the largest fp16
    low = some.to(dtype)
    found = low.run(delta_rule)
    assert [x.dtype for x in found] == [dtype, torch.float32, *(x.dtype for x in low.inputs)]
    assert max(errors(found, low.to(torch.float64).run(recurrence))) <= bound


def changed(some: Case, part: slice) -> Case:
    """With other values in a part of the row."""
    other = Case([x.clone() for x in some.inputs], [x.clone() for x in some.grads], some.ids)
    for x, factor in zip([*other.inputs[:5], other.grads[0]], (3, -2, 5, 0.1, 0.5, -7), strict=True):
        x[:, part] *= factor
    other.inputs[1][:, part] += 1
    return other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [name for name, lengths in ROWS.items() if len(lengths) > 1])
def test_documents_are_isolated(name: str, dtype: torch.dtype) -> None:
    """What the others hold changes no bit. Without the others, rounding differs."""
    some, start = case(ROWS[name], "alike").to(dtype), 0
    some.inputs[5].zero_()  # it is of the first document
    some.grads[1].zero_()  # it is of the last document

    def of_tokens(some: Case, part: slice) -> list[Tensor]:
        out, _, *grads, _ = some.run(delta_rule)
        return [x[:, part] for x in (out, *grads)]

    for length in ROWS[name]:
        own = slice(start, start + length)
        packed = of_tokens(some, own)
        for others in (slice(0, start), slice(start + length, None)):
            assert all(map(torch.equal, of_tokens(changed(some, others), own), packed))
        *inputs, state = some.inputs
        alone = Case([*(x[:, own] for x in inputs), state], [some.grads[0][:, own], some.grads[1]], some.ids[:, own])
        exact = 1e-12 if dtype == torch.float64 else 2e-6
        assert max(errors(packed, of_tokens(alone, slice(None)))) <= exact
        start += length


def convolved(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """The convolution of each document alone, by PyTorch."""
    parts = [torch.nn.functional.pad(part.mT, (3, 0)) for part in x.split(list(lengths), 1)]
    return torch.cat([torch.nn.functional.conv1d(part, weight[:, None], groups=len(weight)).mT for part in parts], 1)


@pytest.mark.parametrize("name", ROWS)
def test_the_convolution_equals_that_of_each_document_alone(name: str) -> None:
    lengths, generator = ROWS[name], torch.Generator().manual_seed(1)
    shapes = (2, sum(lengths), 6), (6, 4), (2, sum(lengths), 6)
    x, weight, grad = (torch.randn(*shape, generator=generator).bfloat16().double() for shape in shapes)
    leaves, ids = (x.requires_grad_(), weight.requires_grad_()), ids_of(lengths, 2)
    found, expected = causal_convolution(x, weight, ids)[0], convolved(x, weight, lengths)
    assert_near(*([y, *torch.autograd.grad(y, leaves, grad)] for y in (found, expected)))
    low = causal_convolution(x.bfloat16(), weight.bfloat16(), ids)[0]
    torch.testing.assert_close(low.double(), expected, atol=1e-6, rtol=2**-8)
    other = torch.cat((-3 * x[:, : lengths[0]], x[:, lengths[0] :]), 1)
    assert torch.equal(causal_convolution(other, weight, ids)[0][:, lengths[0] :], found[:, lengths[0] :])


def test_padding_gives_zeros() -> None:
    some = case([70, 30], rows=2)
    some.grads[1].zero_()
    for x in (*some.inputs[:5], some.grads[0]):
        x[:, 70:] = 0
    out, state, *grads, _ = some.run(delta_rule)
    assert all(x.isfinite().all() and not x[:, 70:].any() for x in (out, *grads)) and not state.any()


def test_a_prompt_in_pieces_and_token_by_token() -> None:
    """Left padding is a document of its own, and what it leaves does not reach the prompt."""
    (*inputs, _), _, ids = case([5, 150], "alike", rows=2)
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((2, 155, 6), (6, 4)))
    whole, after = delta_rule(*inputs, ids)
    smooth = causal_convolution(x, weight, ids)[0]
    for pieces in ((70, 80, 1, 4), (6, 149), (7, 64, 64, 20), (155,)):
        state = last = None
        outs, start = [], 0
        for number, length in enumerate(pieces):
            part, known = slice(start, start + length), None if number else ids[:, :length]
            rule = recurrence if length < 10 else delta_rule
            out, state = rule(*(y[:, part] for y in inputs), known, state)
            tap, last = causal_convolution(x[:, part], weight, known, last)
            outs.append((out, tap))
            start += length
        assert_near([*(torch.cat(y, 1) for y in zip(*outs, strict=True)), state], [whole, smooth, after])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fast_decays_leave_no_tiny_numbers(dtype: torch.dtype) -> None:
    """Products of them are denormal numbers, which take a CPU a hundred times as long."""
    (q, k, v, g, beta, _), _, ids = case([300], "alike").to(dtype)
    g = -torch.linspace(0.5, 30, 4).to(dtype).expand_as(g)
    chunks = _Chunks.of(64, ids[:, :1], ids, q, k, v, g, beta)
    for x in (chunks.decay, chunks.entry, chunks.inverse):
        assert not ((x != 0) & (x.abs() < torch.finfo(dtype).eps ** 2)).any()


def test_one_graph_for_any_documents() -> None:
    def layer(x: Tensor, weight: Tensor, ids: Tensor, *others: Tensor) -> Tensor:
        q, k, g, beta = others
        v = causal_convolution(x, weight, ids)[0].unflatten(2, (4, 8))
        return delta_rule(q, k, v, g, beta, ids, chunk=16)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    weight = torch.randn(32, 4, dtype=torch.float64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([40], [1, 39], [4] * 10):
            (q, k, v, g, beta, _), (grad, _), ids = case(lengths)
            leaves = [x.requires_grad_() for x in (v.flatten(2), weight, q, k, g, beta)]
            results = (f(*leaves[:2], ids, *leaves[2:]) for f in (compiled, layer))
            assert_near(*([y, *torch.autograd.grad(y, leaves, grad)] for y in results))


def test_chunks_that_are_kept_change_no_bit() -> None:
    example = case([70, 30]).to(torch.float32)
    found, expected = (example.run(delta_rule, chunk=16, keeps=keeps) for keeps in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    ("rows", "seq", "sizes", "chunk"), [(1, 512, (4, 8, 128, 128), 64), (2, 100, (1, 3, 16, 8), 8)]
)
def test_costs(
    rows: int, seq: int, sizes: tuple[int, ...], chunk: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLOPs of forward are exact; a state is kept for each chunk, and one for each part."""
    k_heads, v_heads, key, value = sizes
    monkeypatch.setattr(costs, "AT_ONCE", rows * seq // parts * v_heads)
    keys, values = (k_heads, key), (v_heads, value)
    leaves = [(-torch.rand(rows, seq, *size)).requires_grad_() for size in (keys, keys, values, values[:1], values[:1])]
    ids, kept = ids_of([seq], rows), {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), FlopCounterMode(display=False) as forward:
        delta_rule(*leaves, ids, chunk=chunk)[0]
    given = {x.untyped_storage().data_ptr() for x in (*leaves, ids)}
    chunks, at_once = rows * -(-seq // chunk), tokens_at_once(rows, v_heads, chunk)
    states = (chunks + rows * -(-seq // at_once)) * v_heads * key * value
    assert sum(size for place, size in kept.items() if place not in given) == 4 * states
    assert forward.get_total_flops() == 2 * chunks * products_of_chunk(*sizes, chunk)
