"""Lists what a layer saves for its backward, in the form in which shapes/ has it: a new family pastes the list."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from titan_mi100.attention.base import Documents
from titan_mi100.model.families import MODELS
from titan_mi100.shapes.base import LayerShape, ModelSpec
from titan_mi100.shapes.saved import AFTER, BEFORE, COMPUTE, FP32, MIX, Saved
from titan_mi100.workshop.rehearsal.counter import CPU, FusedKernel

_TOKENS, _LARGEST_FACTOR = 63 * 64, 16  # no size of a weight


def saved_tensors(spec: ModelSpec, shape: LayerShape, dtype: torch.dtype = torch.bfloat16) -> list[Saved]:
    """What autograd saves in a layer's forward, without weights, in the order in which it is saved. Bytes of other
    dtypes than the computation's are counted in fp32 values. A tensor is named after the module that runs.
    """
    tensors, running = list[Saved](), [BEFORE]
    with torch.device("meta"):
        layer = MODELS[spec.model_type].kinds[shape.kind](spec, shape, FusedKernel()).to(dtype)
    for parameter in layer.fp32_parameters():
        parameter.data = parameter.data.float()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = layer.to_empty(device=CPU)
        where = layer.where(spec, torch.arange(_TOKENS)[None])
        prepared = layer.prepare(layer.backend, Documents.one_per_row(1, _TOKENS), CPU)
        parameters = [*layer.parameters()]
        known, shapes = _keys((parameters, where, prepared)), {parameter.shape for parameter in parameters}
        kept = set[int]()  # by "selective"
        alive = list[Tensor]()  # a storage that is freed gives its address to another

        def note(tensor: Tensor) -> Tensor:
            (key,), storage = _keys(tensor), tensor.untyped_storage()
            is_compute = tensor.dtype == dtype
            values = round(storage.nbytes() / (dtype.itemsize if is_compute else 4) / _TOKENS)
            if key not in known and tensor.shape not in shapes and values:
                part, name = (MIX if key in kept else running[0]), running[-1]
                tensors.append(Saved(name, values, part, COMPUTE if is_compute else FP32))
            known.add(key)
            alive.append(tensor)
            return tensor

        for name, module in layer.named_modules():
            if name:
                _follow(name, module, running)
        x = torch.empty(1, _TOKENS, spec.hidden_size, dtype=dtype, requires_grad=True)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            parts = layer.before(x, where)
            running[:] = [MIX]
            mixed = layer.mix(parts, prepared)
            running[:], kept = [AFTER], _keys(mixed)
            layer.after(x, mixed)
    return tensors


def _keys(tree: object) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _follow(name: str, module: nn.Module, running: list[str]) -> None:
    """Append the module's name to `running` while it runs."""
    module.register_forward_pre_hook(lambda *_: running.append(name))
    module.register_forward_hook(lambda *_: running.__delitem__(-1))


def as_code(spec: ModelSpec, tensors: Sequence[Saved]) -> Iterator[str]:
    """Lines of a family's `layers`. A number of values is written as a multiple of a size of the spec, where it is."""
    sizes = {name.replace(" x ", " * "): size for name, (size, _) in spec.input_sizes().items()}
    sizes["attention.kv_heads * attention.head_dim"] = spec.attention.kv_heads * spec.attention.head_dim
    for tensor in tensors:
        factors = ((tensor.values // size, name) for name, size in sizes.items() if tensor.values % size == 0)
        factor, name = min(factors, default=(tensor.values, ""))
        values = re.sub(r"[a-z]\S+", r"self.\g<0>", f"{factor} * {name}".removeprefix("1 * "))
        values = values if factor <= _LARGEST_FACTOR and name else str(tensor.values)
        dtype = f", {tensor.dtype.upper()}" * (tensor.dtype != COMPUTE)
        yield f'Saved("{tensor.name}", {values}, {tensor.part.upper()}{dtype}),'
