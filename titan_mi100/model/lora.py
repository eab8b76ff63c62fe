"""LoRA (Hu et al., 2021): two small trained matrices per frozen matrix W: y = W x + scale B A dropout(x).

The scale is alpha / rank, or alpha / sqrt(rank) (rsLoRA; Kalajdzievski, 2023).

Parameter names are HF's with PEFT's suffixes: `<module>.lora_A.weight` is A, (rank, inputs); `<module>.lora_B.weight`
is B, (outputs, rank). W keeps its name. Parts of a weight (see shapes.base.Parameter) share one A,
`<module>.0.lora_A.weight`.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.experts import ExpertLinear, NF4ExpertLinear, Routes
from titan_mi100.model.init import Read, draw
from titan_mi100.model.layers import Linear, Operands, local_weight
from titan_mi100.model.nf4 import NF4Linear, restored
from titan_mi100.model.pieces import uncomputed
from titan_mi100.model.token_rows import RowsEmbedding, TokenRows
from titan_mi100.shapes.base import ROWS

_SAMPLE = 4096  # bytes per tensor that enter the fingerprint of the base weights


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + scale (d A^T) B^T, where d is x, or x after dropout. Both sums are added inside a product, forward and in
    the gradient of x: no pass over the outputs for the scale, none for the addition. In 16 bits the adapter's part is
    not rounded before it is added.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, a: Tensor, b: Tensor, scale: float, is_read: bool, *stored: Tensor
    ) -> Tensor:  # (..., inputs), (..., inputs), (rank, inputs), (outputs, rank) -> (..., outputs)
        read = (x if dropped is None else dropped).flatten(0, -2)
        inner = read @ a.t()
        if is_read:
            product = F.linear(x, restored(stored))
            product.view(-1, len(b)).addmm_(inner, b.t(), alpha=scale)
        else:
            product = uncomputed(x, (*x.shape[:-1], len(b)))
        ctx.save_for_backward(read, inner, a, b, *stored)
        ctx.scale, ctx.shape = scale, x.shape
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        read, inner, a, b, *stored = ctx.saved_tensors
        rows, of_x, of_dropped = grad.flatten(0, -2), None, None
        grad_inner = torch.empty_like(inner).addmm_(rows, b, beta=0, alpha=ctx.scale)
        if ctx.needs_input_grad[0]:
            of_x = rows @ restored(stored)
        if ctx.needs_input_grad[1]:  # after dropout
            of_dropped = (grad_inner @ a).view(ctx.shape)
        elif of_x is not None:
            of_x.addmm_(grad_inner, a)
        of_b = torch.empty_like(b).addmm_(rows.t(), inner, beta=0, alpha=ctx.scale)
        of_x = None if of_x is None else of_x.view(ctx.shape)
        return of_x, of_dropped, grad_inner.t() @ read, of_b, *[None] * (2 + len(stored))


class _AdaptedRows(torch.autograd.Function):
    """The same of rows that are grouped by expert, by our kernels. The adapters' parts are added in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, a: Tensor, b: Tensor, of: Any, *stored: Tensor
    ) -> Tensor:  # of: the layer, and where each expert's rows end
        from titan_mi100.model.fused.experts_launch import products

        (layer, ends), read = of, x if dropped is None else dropped
        inner = products(read, a, ends, False)
        ctx.save_for_backward(read, inner, a, b, ends, *stored)
        ctx.layer = layer
        return products(inner, b, ends, True, layer.scale, layer.multiplied(x, ends, stored))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from titan_mi100.model.fused.experts_launch import products, sums

        (read, inner, a, b, ends, *stored), layer, of_x, of_dropped = ctx.saved_tensors, ctx.layer, None, None
        grad_inner = products(grad, b, ends, False, layer.scale)
        if ctx.needs_input_grad[0]:
            of_x = layer.multiplied(grad, ends, stored, is_backward=True)
        if ctx.needs_input_grad[1]:  # after dropout
            of_dropped = products(grad_inner, a, ends, True)
        elif of_x is not None:
            of_x = products(grad_inner, a, ends, True, 1.0, of_x)
        of_b = sums(inner, grad, ends, layer.scale)
        return of_x, of_dropped, sums(grad_inner, read, ends), of_b, *[None] * (1 + len(stored))


class LoRALinear(Linear):
    """A frozen linear layer with an adapter."""

    part = 0, 1  # its part of the inputs, of how many: tensor parallel splits those of some layers
    tokens = 0, 1  # its part of a row's tokens, of how many: context parallel

    def __init__(self, base: Linear, config: LoRAConfig) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias  # they stay this module's own: their HF names do not change
        self.lora_A = Linear(base.in_features, config.rank)
        self.lora_B = Linear(config.rank, base.out_features)
        self.scale, self.dropout = config.scale, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        a, b = local_weight(self.lora_A.weight, x.dtype), local_weight(self.lora_B.weight, x.dtype)
        dropped = _dropped(x, self) if self.dropout and self.training else None
        return self.with_bias(_AdaptedProduct.apply(x, dropped, a, b, self.scale, True, *self.stored(x.dtype)))

    def mask(self, x: Tensor) -> Tensor | None:
        if not (self.dropout and self.training):
            return None
        return _factors(x.new_ones(()).expand(*x.shape[:-1], self.in_features // self.part[1]), self) != 0

    def compute(self, x: Tensor, mask: Tensor | None, operands: Operands, is_read: bool = True) -> Tensor:
        # as dropout itself multiplies
        dropped = None if mask is None else torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - self.dropout))
        weight, a, b = operands.weight, operands.a, operands.b
        product = _AdaptedProduct.apply(x, dropped, a, b, self.scale, is_read, weight)
        return product if operands.bias is None else product + operands.bias  # type: ignore[no-any-return]


class NF4LoRALinear(LoRALinear, NF4Linear):
    """A frozen NF4 linear layer with an adapter."""


class LoRAExpertLinear(ExpertLinear):
    """Frozen experts with an adapter each: all A below each other, (experts x rank, inputs), and all B, transposed,
    (experts x rank, outputs).
    """

    part = tokens = 0, 1

    def __init__(self, base: ExpertLinear, config: LoRAConfig) -> None:
        super().__init__(*base.sizes)
        config = config.of_experts
        self.weight = base.weight
        sizes = base.in_features, base.out_features // base.experts
        inputs, outputs = sizes[::-1] if base.is_transposed else sizes
        self.lora_A = ExpertLinear(inputs, base.experts * config.rank, base.experts, False)
        self.lora_B = ExpertLinear(outputs, base.experts * config.rank, base.experts, True)
        self.scale = config.scale
        self.dropout = config.dropout

    def forward(self, x: Tensor, routes: Routes, operands: Operands | None = None) -> Tensor:  # type: ignore[override]
        own = operands or self.operands(x.dtype)
        assert own.a is not None and own.b is not None
        if self.is_grouped(x, own.stored):
            dropped = _dropped(x, self) if self.dropout and self.training else None
            return _AdaptedRows.apply(x, dropped, own.a, own.b, (self, routes.ends), *own.stored)  # type: ignore[no-any-return]
        inner = self.lora_A.forward(_dropped(x, self), routes, Operands(own.a))
        adapted = self.lora_B.forward(inner, routes, Operands(own.b))
        return torch.add(super().forward(x, routes, own), adapted, alpha=self.scale)


class NF4LoRAExpertLinear(LoRAExpertLinear, NF4ExpertLinear):  # type: ignore[misc]  # as NF4ExpertLinear
    """The same with experts in 4 bits."""


def _dropped(x: Tensor, layer: LoRALinear | LoRAExpertLinear) -> Tensor:
    """An adapter's input after dropout. A rank with some of the columns or tokens draws for all: it drops what one rank
    would.
    """
    if not (layer.dropout and layer.training):
        return x
    return F.dropout(x, layer.dropout) if layer.part[1] * layer.tokens[1] == 1 else x * _factors(x, layer)


def _factors(x: Tensor, layer: LoRALinear | LoRAExpertLinear) -> Tensor:
    """What dropout multiplies inputs like x with. A rank with some of them draws for all, as `_dropped` says."""
    (number, parts), (first, step), (*batch, tokens, columns) = layer.part, layer.tokens, x.shape
    factors = F.dropout(x.new_ones(*batch, step * tokens, parts * columns), layer.dropout)
    return factors[..., first::step, number * columns : (number + 1) * columns].contiguous()


_WITH_ADAPTER: dict[tuple[type[Linear], bool], Callable[[Any, LoRAConfig], Linear]] = {  # (layer, is it in 4 bits)
    (Linear, False): LoRALinear, (Linear, True): NF4LoRALinear,
    (ExpertLinear, False): LoRAExpertLinear, (ExpertLinear, True): NF4LoRAExpertLinear,
}  # fmt: skip


def apply_lora(model: CausalLM, config: LoRAConfig, dtype: torch.dtype) -> None:
    """Freeze a model (or a pipeline stage), add adapters to its linear layers and trained rows for tokens, in place.

    Args:
        model: on the meta device.
        dtype: the compute dtype; NF4 weights are packed into it.
    """
    model.requires_grad_(False)
    embedding = model.model.embed_tokens
    for table in (embedding, model.lm_head) if config.token_ids else ():
        if table is not None:
            with torch.device("meta"):
                table.token_adapter = TokenRows(config.token_ids, table.weight.shape[1])
    if embedding is not None and config.token_ids:
        embedding.__class__ = RowsEmbedding
    for layer in model.model.blocks():
        for path, parent in list(layer.named_modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, Linear):
                    continue
                kind, in_4_bits = type(child), config.base == "nf4"
                of_parts = isinstance(parent, nn.ModuleList)  # a part of a weight, see shapes.base.Parameter
                with torch.device("meta"):
                    target = path.rpartition(".")[2] if of_parts or kind is ExpertLinear else name
                    if target in config.target_modules and target in layer.shape.adapted:
                        child = _WITH_ADAPTER[kind, in_4_bits](child, config)
                    elif isinstance(child, ExpertLinear) and in_4_bits:
                        child = NF4ExpertLinear(*child.sizes)
                    elif in_4_bits:  # layers without an adapter are quantised too
                        bias, child = child.bias, NF4Linear(child.in_features, child.out_features)
                        child.bias = bias
                if isinstance(child, NF4Linear):
                    child.shrink(dtype)
                setattr(parent, name, child)
                first = parent[0] if of_parts else getattr(parent, "gate_proj", child)  # type: ignore[index]
                is_later = of_parts or (isinstance(child, LoRAExpertLinear) and name == "up_proj")
                if isinstance(child, LoRALinear | LoRAExpertLinear) and is_later and first is not child:
                    # One A for all parts, as for one weight; peft sees gate and up as one, too. It is no module of this
                    # layer, as modules that have two parents are moved twice, which fake tensors do not always bear.
                    del child.lora_A
                    child.__dict__["lora_A"] = first.lora_A


def is_adapter(name: str) -> bool:
    """Whether a parameter with this name is a LoRA matrix, or trained rows of tokens."""
    return name.endswith((".lora_A.weight", ".lora_B.weight", ROWS))


def lora_values(seed: int, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """The initial values of a slice of an adapter; arguments and result as in `init.initial_values`.

    As in PEFT: A is kaiming_uniform with a = sqrt(5), that is uniform in +-1 / sqrt(inputs). B is zero, so the adapter
    changes nothing before the first step.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(size)
    bound = 1 / math.sqrt(shape[1])
    return draw(seed, name, shape, offset, size, lambda rows, by: rows.uniform_(-bound, bound, generator=by))


def base_fingerprint(read: Read, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """SHA-256 over the name, shape, dtype and first 4096 bytes of each base tensor.

    An adapter records it, so that a resume with other base weights is refused.

    Args:
        read: see init.Read.
        shapes: HF name -> full shape of every base parameter.
    """
    digest = hashlib.sha256()
    for name, shape in sorted(shapes.items()):
        rows = min(shape[0], -(-_SAMPLE // math.prod(shape[1:])))  # enough rows even at one byte per value
        part = read(name, torch.Size(shape), (0,) * len(shape), (rows, *shape[1:])).contiguous()
        sample = part.flatten().view(torch.uint8)[:_SAMPLE].numpy().tobytes()
        digest.update(f"{name} {tuple(shape)} {part.dtype} {hashlib.sha256(sample).hexdigest()}\n".encode())
    return digest.hexdigest()
