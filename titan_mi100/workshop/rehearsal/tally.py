"""Counts the collectives of a step, and the FLOPs of its matrix products."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from titan_mi100.config.layout import Layout
from titan_mi100.workshop.rehearsal.traffic import WORLD, Transfer, axis_of

# Name of an operator -> (the operation, the index of its argument that is the payload).
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "c10d::barrier": ("barrier", 0),
    # custom operators of tensor and context parallel: a dispatch mode does not see the collectives inside them
    "titan_mi100::gather_sequence": ("all-gather", 0),
    "titan_mi100::scatter_sequence": ("reduce-scatter", 0),
    "titan_mi100::exchange_tokens_for_heads": ("all-to-all", 0),
}
_FLOPS = {str(operator).replace(".", "::"): formula for operator, formula in flop_registry.items()}
_NO_TRAFFIC = ("c10d::wait_tensor", "_c10d_functional::wait_tensor")


class Tally(TorchDispatchMode):
    """A dispatch mode that counts the operations of this rank.

    Attributes:
        traffic: transfer -> how often this rank took part in it.
        flops: FLOPs of matrix products.
        is_beside_mesh: the trainer's own collectives over all ranks run now. Their group can be the same object as the
            group of a mesh axis, so the group does not tell them apart.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.traffic: Counter[Transfer] = Counter()
        self.flops, self.is_beside_mesh = 0, False
        self._layout = layout

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs the operation on local tensors, which come here again
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket._qualified_op_name
        if name in _COLLECTIVES:
            self._note(name, args)
        elif function.namespace in ("c10d", "_c10d_functional") and name not in _NO_TRAFFIC:
            raise NotImplementedError(f"{name}: a collective that the rehearsal does not know")
        elif (formula := _FLOPS.get(name.removesuffix("_"))) is not None:  # "_": the in-place variant
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        return output

    def _note(self, name: str, args: Any) -> None:
        operation, index = _COLLECTIVES[name]
        payload = sum(tensor.nbytes for tensor in tree_leaves(args[index]) if isinstance(tensor, Tensor))
        if isinstance(args[-1], str):
            group = _resolve_process_group(args[-1])  # type: ignore[arg-type]
        else:
            boxed = (arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
            group = dist.ProcessGroup.unbox(next(boxed))
        members = dist.get_process_group_ranks(group)
        if len(members) == 1:
            return  # a group of one rank sends nothing
        ranks = _as_range(members)
        if name == "titan_mi100::gather_sequence":
            payload *= len(ranks)  # the argument is this rank's part; the payload is the full tensor
        axis = WORLD if self.is_beside_mesh else axis_of(ranks, self._layout, operation)
        self.traffic[Transfer(axis, operation, ranks, payload if operation != "barrier" else 0)] += 1


def _as_range(ranks: list[int]) -> range:
    span = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
    assert list(span) == ranks, "a group that lies along no axis of the mesh"
    return span
