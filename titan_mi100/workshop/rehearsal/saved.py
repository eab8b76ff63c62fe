"""Lists what a layer saves for its backward, in the form in which shapes/ has it: a new family pastes the list."""

import re
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from titan_mi100.attention.base import Documents
from titan_mi100.model.families import MODELS
from titan_mi100.shapes.base import LayerShape, ModelSpec
from titan_mi100.shapes.saved import COMPUTE, FP32, MIX, OUTPUT, PROJECT, Saved, ValuesPerToken
from titan_mi100.workshop.rehearsal.counter import CPU, FusedKernel, storages

_TOKENS = 63 * 64  # no size of a weight


def saved_tensors(spec: ModelSpec, shape: LayerShape, dtype: torch.dtype = torch.bfloat16) -> list[Saved]:
    """What autograd saves in a layer's forward besides weights, each named by the module that runs. Bytes of dtypes
    other than the computation's are counted as values of 4 bytes.
    """
    tensors, running, mixed = WeakKeyDictionary[torch.UntypedStorage, Saved](), [PROJECT], None
    with torch.device("meta"):
        layer = MODELS[spec.model_type].kinds[shape.kind](spec, shape, FusedKernel()).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.to_empty(device=CPU)
        x = torch.empty(1, _TOKENS, spec.hidden_size, dtype=dtype, requires_grad=True)
        tables = layer.rotary_tables(spec, torch.arange(_TOKENS)[None])
        prepared = layer.prepare(layer.backend, Documents.one_per_row(1, _TOKENS), CPU)
        others = [*storages(([*layer.parameters()], tables, prepared))]

        def note(tensor: Tensor) -> Tensor:
            storage, each = tensor.untyped_storage(), dtype.itemsize if tensor.dtype == dtype else 4
            per_token = round(storage.nbytes() / each / _TOKENS)
            if per_token > 1 and storage not in (*others, *tensors):
                part = MIX if storage in [*storages(mixed)] else running[0]  # "selective" keeps what OUTPUT reads of it
                tensors[storage] = Saved(running[-1], per_token, part, COMPUTE if tensor.dtype == dtype else FP32)
            return tensor

        for name, module in [*layer.named_modules()][1:]:
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            module.register_forward_hook(lambda *_: running.__delitem__(-1))
        with saved_tensors_hooks(note, lambda tensor: tensor):
            parts = layer.project(x, tables)
            running[:] = [MIX]
            mixed = layer.mix(parts, prepared)
            running[:] = [OUTPUT]
            x = layer.output(x, mixed)  # as long as it is here, so is what it needs
        return [*tensors.values()]


def saved_by_kind(spec: ModelSpec) -> dict[str, list[Saved]]:
    """What each kind of layer saves, computing in bf16."""
    return {kind: saved_tensors(spec, shape) for kind, shape in {layer.kind: layer for layer in spec.layers}.items()}


def as_code(spec: ModelSpec, by_kind: Mapping[str, Sequence[Saved]]) -> Iterator[str]:
    """Lines of a family's `layers`. Values are written as small multiples of the spec's sizes where they are such."""
    sizes = {name.replace(" x ", " * "): size for name, (size, _) in spec.input_sizes().items()}
    sizes["attention.kv_heads * attention.head_dim"] = spec.attention.kv_heads * spec.attention.head_dim
    words = {
        factor * size: re.sub(r"[a-z]\S+", r"self.\g<0>", f"{factor} * {name}").removeprefix("1 * ")
        for factor in range(16, 0, -1)  # the last of several stays
        for name, size in [*sizes.items()][::-1]
    }
    for kind, tensors in by_kind.items():
        shape = next(layer for layer in spec.layers if layer.kind == kind)
        counted, planned = (2 * v.compute + 4 * v.fp32 for v in (ValuesPerToken.of(tensors), shape.kept["none"]))
        yield f"# {kind}: {counted:,} bytes per token in bf16; by its list in shapes/ {planned:,}"
        for tensor in tensors:
            dtype = ", FP32" if tensor.dtype == FP32 else ""
            yield f'Saved("{tensor.name}", {words.get(tensor.values, tensor.values)}, {tensor.part.upper()}{dtype}),'
