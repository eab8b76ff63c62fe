"""This rank's part of a tensor that several ranks hold (a DTensor); any other tensor is a part of its own."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offset_of(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole tensor, in every dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])
