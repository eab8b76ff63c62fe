"""Mixtures of experts: the router, and matrix products of rows that are grouped by expert.

Each token goes to its k most probable experts. Its k copies ("rows") are sorted by expert, multiplied with their
expert's matrices and summed again: a permutation and its inverse, without atomic additions, so the bits do not depend
on a device's timing. Sorting is stable: of equal probabilities the lower expert's counts first, on every device.

Rows are multiplied expert by expert, which the host must know the counts for: it waits for the device once per layer.
Where a trial shows that torch's grouped product computes the same, forward and backward, that is used, without waiting;
else our kernels (fused/experts_kernels.py), if theirs does. With our kernels experts in 4 bits are grouped, too: all of
a projection are restored at once, into memory that the plan counts.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from titan_mi100.device.shards import local_of
from titan_mi100.log import log
from titan_mi100.model.elementwise import at_least_fp32, swiglu
from titan_mi100.model.fused.running import difference, runs
from titan_mi100.model.layers import Linear, Operands, grouped, local_weight
from titan_mi100.model.nf4 import BLOCK, NF4Linear, codes_per_value, dequantize, restored, whole
from titan_mi100.model.pieces import in_pieces
from titan_mi100.wording import shortened

# With fewer rows than a quarter of the experts a loop over those that have rows is faster than to restore all: 64
# launches for 32 of 128 take the host about as long as a card needs to write and read all of a projection of 30B-A3B.
# By assumed rates of host and card, not measured.
_EXPERTS_PER_ROW = 4


class Routes:
    """Assignment of a forward's rows to experts.

    Attributes:
        index: (tokens, k), the experts of each token, most probable first.
        order: (tokens x k,), original row (token x k + slot) of each sorted row; inverse: the inverse permutation.
        token: (tokens x k,), the token of each sorted row; starts: (tokens,), its first row before rows are sorted.
        ends: (experts,) int32, where each expert's rows end.
    """

    def __init__(self, index: Tensor, experts: int) -> None:
        self.index, self.slots = index, index.shape[1]
        sorted_experts, self.order = index.flatten().sort(stable=True)
        self.inverse, self.token = self.order.argsort(), self.order // self.slots
        self.starts = torch.arange(0, len(self.order), self.slots, device=index.device)
        numbers = torch.arange(experts, device=index.device)
        self.ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert, on the host, which waits for the device."""
        # the memory counter's tensors have no values
        ends = [len(self.order)] * len(self.ends) if isinstance(self.ends, FakeTensor) else self.ends.tolist()
        return [end - start for start, end in zip((0, *ends), ends, strict=False)]

    def spread(self, x: Tensor) -> Tensor:
        """The sorted rows, (tokens x k, width), of (tokens, width)."""
        return _Permuted.apply(x, self.token, self.inverse, self.starts, False)  # type: ignore[no-any-return]

    def sum(self, rows: Tensor) -> Tensor:
        """Sums of each token's rows, (tokens, width), from sorted rows."""
        return _Permuted.apply(rows, self.token, self.inverse, self.starts, True)  # type: ignore[no-any-return]

    def sort(self, x: Tensor) -> Tensor:
        """Sorts values of the rows as the rows are: (tokens, k) -> (tokens x k, 1)."""
        return _Permuted.apply(x.reshape(-1, 1), self.order, self.inverse, None, False)  # type: ignore[no-any-return]


class _Permuted(torch.autograd.Function):
    """Tokens to sorted rows, or rows to sums of each token's. Each is the other's backward. starts: None: one row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor, starts: Tensor | None, is_sum: bool) -> Tensor:
        ctx.save_for_backward(token, inverse, starts)
        ctx.is_sum = is_sum
        if not is_sum:
            return x[token]
        return F.embedding_bag(inverse if starts is not None else inverse[:, None], x, offsets=starts, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return _Permuted.apply(grad, *ctx.saved_tensors, not ctx.is_sum), None, None, None, None


class _Loop(torch.autograd.Function):
    """Rows times their expert's matrix, expert by expert. A 4-bit matrix is dequantised for each of its products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], is_transposed: bool, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(x, *stored)
        ctx.counts, ctx.is_transposed = counts, is_transposed
        columns = stored[0].shape[1] if len(stored) == 1 else stored[1].shape[1] * BLOCK
        y = x.new_empty(len(x), columns if is_transposed else len(stored[0]) // len(counts))
        for _, rows, matrix in _with_rows(counts, stored):
            torch.mm(x[rows], matrix if is_transposed else matrix.t(), out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *stored = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(stored[0]) if ctx.needs_input_grad[3] else None
        grad, parts = grad.contiguous(), () if of_weight is None else of_weight.chunk(len(ctx.counts))
        for part in (part for part, count in zip(parts, ctx.counts, strict=False) if not count):
            part.zero_()
        for expert, rows, matrix in _with_rows(ctx.counts, stored):
            if of_x is not None:
                torch.mm(grad[rows], matrix.t() if ctx.is_transposed else matrix, out=of_x[rows])
            if parts:
                left, right = (x, grad) if ctx.is_transposed else (grad, x)
                torch.mm(left[rows].t(), right[rows], out=parts[expert])
        return of_x, None, None, of_weight, *(None for _ in stored[1:])


def _with_rows(counts: list[int], stored: Sequence[Tensor]) -> Iterator[tuple[int, slice, Tensor]]:
    """Each expert that has rows, its rows, and its matrix."""
    start, parts = 0, [tensor.chunk(len(counts)) for tensor in stored[:2]]
    for expert, count in enumerate(counts):
        if count:
            codes, *scales = (part[expert] for part in parts)
            matrix = dequantize(codes, scales[0], stored[2]) if scales else codes
            yield expert, slice(start, start + count), matrix
        start += count


class _Grouped(torch.autograd.Function):
    """What _Loop computes, as one product each. Matrices in 4 bits are all restored at once, for backward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, layer: "ExpertLinear", *stored: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, ends, *stored)
        ctx.layer = layer
        return layer.multiplied(x, ends, stored)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, ends, *stored), of_x, of_weight = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            of_x = ctx.layer.multiplied(grad, ends, stored, is_backward=True)
        if x is not None:
            from titan_mi100.model.fused.experts_launch import sums

            of_weight = sums(x, grad, ends) if ctx.layer.is_transposed else sums(grad, x, ends)
        return of_x, None, None, of_weight, *(None for _ in stored[1:])


class ExpertLinear(Linear):
    """One projection of all experts, whose matrices are below each other in `weight`.

    Attributes:
        is_transposed: the rows of an expert's matrix are its inputs, not its outputs.
        by_kernel: torch's grouped product computes it, see `choose_products`.
    """

    by_kernel = False

    def __init__(self, columns: int, rows: int, experts: int, is_transposed: bool) -> None:
        super().__init__(columns, rows)
        self.experts, self.is_transposed = experts, is_transposed
        self.sizes = columns, rows, experts, is_transposed

    def is_grouped(self, x: Tensor, stored: Sequence[Tensor]) -> bool:
        """Whether our kernels group these rows, of matrices in 4 bits if they are enough."""
        is_worth_it = len(stored) == 1 or (runs("nf4", stored[1]) and _EXPERTS_PER_ROW * len(x) >= self.experts)
        return is_worth_it and runs("experts", x)

    def multiplied(self, x: Tensor, ends: Tensor, stored: Sequence[Tensor], is_backward: bool = False) -> Tensor:
        """Rows times their expert's matrix by one product, torch's or ours. Args: is_backward: times its transpose."""
        weight, is_transposed = restored(stored), self.is_transposed != is_backward
        if self.by_kernel:
            return _by_kernel(x.contiguous(), weight, ends, is_transposed)
        from titan_mi100.model.fused.experts_launch import products

        return products(x, weight, ends, is_transposed)

    def forward(self, x: Tensor, routes: Routes, operands: Operands | None = None) -> Tensor:  # type: ignore[override]
        """Multiply sorted rows. Args: operands: None: the layer's own."""
        stored = (operands or self.operands(x.dtype)).stored
        if self.by_kernel and len(stored) == 1:
            return _by_kernel(x, stored[0], routes.ends, self.is_transposed)
        if self.is_grouped(x, stored):
            return _Grouped.apply(x, routes.ends, self, *stored)  # type: ignore[no-any-return]
        return _Loop.apply(x, routes.counts, self.is_transposed, *stored)  # type: ignore[no-any-return]


class NF4ExpertLinear(ExpertLinear, NF4Linear):  # type: ignore[misc]  # forward also takes routes
    """ExpertLinear with NF4 weights."""


def _by_kernel(x: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
    """Computes what _Loop does by torch's grouped product, for which the host does not wait."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    matrices = weight.view(len(ends), -1, weight.shape[1])
    return product(x, matrices if is_transposed else matrices.mT, offs=ends)  # type: ignore[no-any-return]


def choose_products(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let torch's grouped product compute where it works, by a trial. Call it when the model is on its device and our
    kernels are chosen.
    """
    layers = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    problems, probe = dict[tuple[Any, ...], str](), torch.empty(0, dtype=dtype, device=device)
    is_ours, restores_all = runs("experts", probe), runs("experts", probe) and runs("nf4", probe)
    for layer in layers:
        rows, columns = layer.out_features // layer.experts, local_of(layer.weight).shape[1]
        if isinstance(layer, NF4Linear):
            if not restores_all:
                problems["nf4"] = "weights in 4 bits"
                continue
            columns *= codes_per_value(dtype)
        key = (rows, columns, layer.is_transposed)
        if key not in problems:
            problems[key] = _trial(rows, columns, layer.is_transposed, dtype, device)
        layer.by_kernel = not problems[key]
    if layers:
        reasons = ", ".join(dict.fromkeys(filter(None, problems.values())))
        form = f"a loop, for which the host waits for the device once per layer ({reasons})"
        if is_ours and "nf4" not in problems:
            form = f"grouped by our kernels ({reasons})"
        log.info(f"products of experts: {form if reasons else 'grouped by torch, as a trial showed'}")


def _trial(rows: int, columns: int, is_transposed: bool, dtype: torch.dtype, device: torch.device) -> str:
    """Why torch's grouped product cannot compute such matrices here; "": it can, forward and backward."""
    counts, by = [23, 0, 41], torch.Generator().manual_seed(0)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    sizes = [(64, rows if is_transposed else columns), (3 * rows, columns), (64, columns if is_transposed else rows)]
    x, weight, grad = (torch.randn(size, generator=by).to(device, dtype) for size in sizes)
    computed = []
    for product in (
        lambda a, b: _Loop.apply(a, counts, is_transposed, b),
        lambda a, b: _by_kernel(a, b, ends, is_transposed),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        try:
            y = product(*inputs)
            computed.append([y.detach(), *torch.autograd.grad(y, inputs, grad)])
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return f"torch's grouped product fails: {shortened(str(error).splitlines()[0])}"
    bar = max(8 * torch.finfo(dtype).eps, 1e-5)
    errors = [((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*computed, strict=True)]
    worst = [error for error in errors if not error < bar]  # not a number, too
    return f"torch's grouped product differs by {worst[0]:.0e}" if worst else ""


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with our kernels on this device: against the loop in fp64, also where an expert has no rows, where
    one has all, and with many experts. See running.Trial.
    """
    draw, bar = torch.Generator().manual_seed(1), max(torch.finfo(dtype).eps, 2e-6)
    several, one, many = [130, 0, 1, 69], [0, 200, 0, 0], [0] * 100 + [33] + [2] * 39
    for counts, rows, columns, is_transposed in (
        (several, 144, 24, True),
        (one, 144, 160, False),
        (many, 24, 16, True),
    ):
        experts, total = len(counts), sum(counts)
        index = torch.arange(experts).repeat_interleave(torch.tensor(counts))[:, None]
        routes, layer = Routes(index.to(device), experts), ExpertLinear(columns, experts * rows, experts, is_transposed)
        sizes = (total, rows if is_transposed else columns), (total, columns if is_transposed else rows)
        x, grad, weight = (
            torch.randn(size, generator=draw).to(device, dtype) for size in (*sizes, (experts * rows, columns))
        )
        compute = partial(_trial_products, layer, routes)
        if problem := difference("experts", compute, (x, weight, grad), (torch.float64, dtype), bar):
            return f"the grouped product {problem}"
    return ""


def _trial_products(layer: ExpertLinear, routes: Routes, x: Tensor, weight: Tensor, base: Tensor) -> Sequence[Tensor]:
    """The layer's product, and half of it added to `base`, without gradients."""
    from titan_mi100.model.fused.experts_launch import products

    y, base = functional_call(layer, {"weight": weight}, (x, routes)), base.detach().clone()
    if not runs("experts", x):
        return y, base + 0.5 * y.detach()
    return y, products(x.detach(), weight.detach(), routes.ends, layer.is_transposed, 0.5, base)


class Router(nn.Module):
    """The probabilities of the experts, and which of them a token goes to."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities, (tokens, experts), of (tokens, hidden), in fp32 or fp64."""
        return at_least_fp32(F.linear(x, local_weight(self.weight, x.dtype))).softmax(-1)


class Experts(nn.Module):
    """SwiGLU by each row's expert, times the row's weight."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (ExpertLinear(inner, experts * hidden, experts, True) for _ in range(2))
        self.down_proj = ExpertLinear(inner, experts * hidden, experts, False)

    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        inside = swiglu(self.gate_proj(rows, routes), self.up_proj(rows, routes))
        return self.down_proj(inside * weights, routes)  # type: ignore[no-any-return]  # narrower than its outputs

    def piece(self, x: Tensor, weights: Tensor, index: Tensor, *operands: Any) -> Tensor:
        """The outputs for a piece of the tokens. Args: weights, index: (1, tokens, k), of each token's experts."""
        (gate, up, down), routes = grouped(operands), Routes(index[0], self.gate_proj.experts)
        rows = routes.spread(x[0])
        # by their methods: hooks of modules are for the whole row
        inside = swiglu(self.gate_proj.forward(rows, routes, gate), self.up_proj.forward(rows, routes, up))
        return routes.sum(self.down_proj.forward(inside * routes.sort(weights[0]), routes, down)).view_as(x)


class Mixture(nn.Module):
    """A router and its experts, in place of an MLP.

    Attributes:
        load: rows that each expert has computed in training, on the device; None: none yet.
        piece_tokens: see pieces.in_pieces.
    """

    piece_tokens = 0

    def __init__(self, hidden: int, inner: int, experts: int, slots: int, is_normalised: bool) -> None:
        super().__init__()
        self.gate, self.experts = Router(hidden, experts), Experts(hidden, inner, experts)
        self.slots, self.is_normalised = slots, is_normalised
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        probabilities = self.gate(flat)
        routes = self._routes(probabilities.detach())
        weights = probabilities.gather(1, routes.index)
        if self.is_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        if 0 < self.piece_tokens < len(flat):
            cut = [x, *(tensor.view(*x.shape[:2], -1) for tensor in (weights, routes.index))]
            operands = [layer.operands(x.dtype) for layer in self.experts.children()]  # type: ignore[operator]
            return in_pieces(self.experts.piece, self.piece_tokens, cut, list(chain(*operands)), whole)
        weights = routes.sort(weights)
        return routes.sum(self.experts(routes.spread(flat), weights, routes)).view_as(x)

    def _routes(self, probabilities: Tensor) -> Routes:
        kept = _KEPT.get()
        if kept is not None and kept.is_again:
            return next(kept.left)
        order = probabilities.sort(dim=-1, descending=True, stable=True).indices
        routes = Routes(order[:, : self.slots].contiguous(), probabilities.shape[1])
        if kept is not None:
            kept.routes.append(routes)
        if self.training and torch.is_grad_enabled():
            counts = routes.ends.long()
            counts[1:].sub_(routes.ends[:-1])
            self.load = counts if self.load is None else self.load + counts
        return routes


class _RouteCache:
    """Context of a forward that keeps its routes, or of its recomputation, which takes them instead of computing them:
    a rounding that differs would otherwise send a row elsewhere. It also avoids a second wait of the host.
    """

    def __init__(self, routes: list[Routes], is_again: bool) -> None:
        self.routes, self.is_again = routes, is_again

    def __enter__(self) -> None:
        self.left = iter(self.routes)
        self._token = _KEPT.set(self)

    def __exit__(self, *_: object) -> None:
        _KEPT.reset(self._token)


_KEPT: ContextVar[_RouteCache | None] = ContextVar("kept routes", default=None)


def keeping_routes() -> tuple[_RouteCache, _RouteCache]:
    """The contexts of a part of a layer, and of its recomputation; see torch.utils.checkpoint's context_fn."""
    routes: list[Routes] = []
    return _RouteCache(routes, False), _RouteCache(routes, True)
