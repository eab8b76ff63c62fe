"""Layers that the model, the LoRA adapters and tensor parallelism share."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_mi100.device.shards import local_of
from titan_mi100.model.fused.running import runs_unwatched
from titan_mi100.model.pieces import in_pieces, uncomputed
from titan_mi100.planning.hardware import is_amd_cpu

_FEW_ROWS, _LARGE = 32, 100_000  # rows of the input; elements of the weight
SMALL, TOGETHER = 1 << 20, 64  # elements of a weight; weights, as many as torch copies in one launch
# On an AMD CPU, MKL (torch's fp32 library) uses one core for a matrix-vector product and reads a right factor slowly.
_ON_AMD = is_amd_cpu()


def local_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor that this rank computes with: its shard under tensor parallel, in the dtype of the activations.

    The cast is needed under DDP and with one data-parallel rank, where the weights stay in fp32. FSDP2 gathers weights
    in the compute dtype already.
    """
    copies = getattr(weight, "copies", None)
    if copies is not None and weight.dtype != dtype and torch.is_grad_enabled():
        weight = copies.of(weight, dtype)
    return local_of(weight).to(dtype)


class StepCopies:
    """Copies of weights in the dtype of the computation, each made once a step, when `local_weight` first needs it.

    A copy is a leaf of autograd. Each microbatch's gradient is added to the weight's own, in the weight's dtype, so the
    bits are those of a cast in each forward. Small weights, such as LoRA's, are copied together, and their gradients
    are added together: a GPU needs one launch for dozens of them.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._small: dict[Tensor, None] = {}
        self._gradients: dict[Tensor, Tensor] = {}  # of small weights, to be added
        for weight in weights:
            weight.copies = self  # type: ignore[attr-defined]
            if weight.numel() < SMALL and not isinstance(weight, DTensor):
                self._small[weight] = None

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight not in self._copies and weight in self._small:
            copies = [torch.empty_like(small, dtype=dtype, requires_grad=False) for small in self._small]
            torch._foreach_copy_(copies, [small.detach() for small in self._small])
            self._copies.update(zip(self._small, map(self._leaf, self._small, copies), strict=True))
        elif weight not in self._copies:
            self._copies[weight] = self._leaf(weight, weight.detach().to(dtype))
        return self._copies[weight]

    def _leaf(self, weight: Tensor, copy: Tensor) -> Tensor:
        copy.requires_grad_().register_post_accumulate_grad_hook(partial(self._add_gradient, weight))
        return copy

    def _add_gradient(self, weight: Tensor, copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if weight in self._small:
            if weight in self._gradients or len(self._gradients) == TOGETHER:
                self._add_gradients()
            self._gradients[weight] = gradient
        elif weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad += gradient

    def _add_gradients(self) -> None:
        weights, gradients = list(self._gradients), list(self._gradients.values())
        cast = [torch.empty_like(weight, requires_grad=False) for weight in weights]
        if cast:
            torch._foreach_copy_(cast, gradients)
        sums, parts = list[Tensor](), list[Tensor]()
        for weight, part in zip(weights, cast, strict=True):
            if weight.grad is None:
                weight.grad = part
            else:
                sums, parts = [*sums, weight.grad], [*parts, part]
        if sums:
            torch._foreach_add_(sums, parts)
        self._gradients.clear()

    def finish(self) -> None:
        """Add what is left to the gradients and free the copies, after a step's last backward."""
        self._add_gradients()
        self._copies.clear()


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x @ weight.T: (..., inputs) and (outputs, inputs) -> (..., outputs).

    The special cases are for text generation on a CPU. There x has few rows, and reading the weight takes most of the
    time. With the weight as the left factor the product takes down to a third of the time, depending on dtype and CPU.
    Whole sequences are left out: a pass without gradients must give the bits of a training step.
    """
    rows, is_whole = x.numel() // x.shape[-1], x.dim() > 2 and x.shape[1] > 1
    if rows > _FEW_ROWS or is_whole or torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype == torch.float64:
        return F.linear(x, weight)
    flat, is_fp32 = x.reshape(rows, -1), x.dtype == torch.float32
    if is_fp32 and rows < 4 and not _ON_AMD:
        return F.linear(x, weight)
    cores = torch.get_num_threads()
    if is_fp32 and rows == 1 and len(weight) % cores == 0 and weight.numel() >= _LARGE:
        # MKL runs a matrix-vector product on one core; a batch with one part of the weight per core uses all cores.
        parts = weight.view(cores, -1, weight.shape[1])
        return torch.bmm(parts, flat.t().expand(cores, -1, 1)).view(*x.shape[:-1], -1)
    if rows == 1:
        return torch.mv(weight, flat[0]).view(*x.shape[:-1], -1)
    return (weight @ flat.t()).t().reshape(*x.shape[:-1], -1)


class Operands(NamedTuple):
    """What a linear layer multiplies with, in the dtype of the activations: its weight, as it is stored or restored.

    Attributes:
        weight: (outputs, inputs), or its codes; then with `largest` and `pairs`, see nf4.dequantize.
        bias: (outputs,). a, b: of an adapter, (rank, inputs) and (outputs, rank).
    """

    weight: Tensor
    largest: Tensor | None = None
    pairs: Tensor | None = None
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    @property
    def stored(self) -> list[Tensor]:
        """The weight, see nf4.restored."""
        return [tensor for tensor in self[:3] if tensor is not None]


def grouped(tensors: Sequence[Any]) -> list[Operands]:
    """The operands of each layer, from those of all layers."""
    size = len(Operands._fields)
    return [Operands(*tensors[start : start + size]) for start in range(0, len(tensors), size)]


class _Unread(torch.autograd.Function):
    """x @ weight.T for its gradients alone: the product is not computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return uncomputed(x, (*x.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        return of_x, grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None


class Linear(nn.Linear):
    """A linear layer. Tensor parallel lets one rank add the bias of a layer that is split by its inputs."""

    adds_bias = True

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.with_bias(multiply(x, local_weight(self.weight, x.dtype)))

    def stored(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The tensors that the weight is stored in, see nf4.restored."""
        return (local_weight(self.weight, dtype),)

    def with_bias(self, product: Tensor) -> Tensor:
        """The product (..., outputs) and the bias, if there is one and this rank adds it."""
        bias = self._bias(product.dtype)
        return product if bias is None else product + bias

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        if self.bias is None:
            return None
        # times zero: the rank takes part in the backward of a bias that another one adds
        bias = local_weight(self.bias, dtype)
        return bias if self.adds_bias else bias * 0

    def operands(self, dtype: torch.dtype) -> Operands:
        adapter = (getattr(self, name).stored(dtype)[0] for name in ("lora_A", "lora_B") if hasattr(self, name))
        return Operands(*self.stored(dtype))._replace(bias=self._bias(dtype), **dict(zip("ab", adapter, strict=False)))

    def mask(self, x: Tensor) -> Tensor | None:
        """What dropout keeps of the inputs, bool and as of x, (batch, seq, inputs); None: all."""
        return None

    def compute(self, x: Tensor, mask: Tensor | None, operands: Operands, is_read: bool = True) -> Tensor:
        """The outputs for a piece of the tokens. Args: operands: with a restored weight. is_read: else only their
        gradients count.
        """
        product = (F.linear if is_read else _Unread.apply)(x, operands.weight)
        return product if operands.bias is None else product + operands.bias


def outputs_of(layers: Sequence[Linear], x: Tensor, merged: Tensor | None) -> Sequence[Tensor]:
    """Apply several linear layers to the same input.

    Args:
        x: (batch, seq, inputs).
        merged: the layers' concatenated weights (see `merge_weights`): one product computes all; None: one each.
    """
    if merged is None:
        return [layer(x) for layer in layers]
    parts = multiply(x, merged).split([len(layer.weight) for layer in layers], dim=-1)
    return [layer.with_bias(part) for layer, part in zip(layers, parts, strict=True)]


def merge_weights(layers: Sequence[Linear]) -> Tensor:
    """Concatenate the layers' weights into one tensor, (sum of outputs, inputs); each weight becomes a view of it."""
    merged = torch.cat([layer.weight for layer in layers])
    for layer, part in zip(layers, merged.split([len(layer.weight) for layer in layers]), strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    return merged


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019).

    Attributes:
        is_centred: the gain is 1 + weight.
        piece_tokens: see pieces.in_pieces.
    """

    is_centred = False
    piece_tokens = 0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.zeros if self.is_centred else torch.ones)(size))
        self.eps = eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """The norm of x; or, with a tensor to add first, the norm of the sum, and the sum."""
        if runs_unwatched("elementwise", x):
            from titan_mi100.model.fused.elementwise_launch import Norm

            kind = {"KIND": "" if added is None else "sum", "CENTRED": self.is_centred, "ROUNDED": not self.is_centred}
            return Norm.apply(x, added, local_weight(self.weight, self.weight.dtype), self.eps, kind)
        if added is None:
            return in_pieces(self.plain, self.piece_tokens, [x], [self.operand(x.dtype)])
        x = x + added
        return in_pieces(self.plain, self.piece_tokens, [x], [self.operand(x.dtype)]), x

    def operand(self, dtype: torch.dtype) -> Tensor:
        """The weight as `plain` reads it for inputs of this dtype."""
        wide = torch.promote_types(dtype, torch.float32)  # in 16 bits, 1 + weight would lose most bits of the weight
        return local_weight(self.weight, wide if self.is_centred else dtype)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm by torch's operations."""
        return F.rms_norm(x, weight.shape, weight, self.eps)
