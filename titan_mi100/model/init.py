"""Random initial weights: a pure function of (seed, parameter name), so every layout starts from the same weights."""

import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from titan_mi100.shapes.base import ModelSpec

# Reads a slice of a parameter: (name, full shape, offset, size) -> that slice, on CPU, in any dtype
Read = Callable[[str, torch.Size, tuple[int, ...], tuple[int, ...]], Tensor]
# Rows drawn from one seed. A rank that holds a shard draws only the blocks of rows that its shard touches. Changing
# this number changes the initial weights of every run.
_INIT_ROWS = 1024


def initial_values(
    spec: ModelSpec, seed: int, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]
) -> Tensor:
    """The initial values of a slice of a parameter, see shapes.base.Parameter.start.

    Args:
        seed: `training.seed`.
        name, shape: HF name and full shape of the parameter.
        offset, size: where the slice starts and how large it is, per dimension; of a tensor of more than two
            dimensions it has all of the inner ones.

    Returns:
        A tensor of shape `size`, fp32, on CPU.

    Every 1024 rows have their own seed, so a rank draws little more than its shard.
    """
    if (start := spec.parameters[name].start) == "decay":

        def fill(x: Tensor, by: torch.Generator) -> Tensor:
            return x.uniform_(0.01, 16, generator=by).log_()

        return draw(seed, name, torch.Size((*shape, 1)), (*offset, 0), (*size, 1), fill).flatten()
    if start != "normal":
        return {"ones": torch.ones, "zeros": torch.zeros}[start](size)
    std, each = spec.initializer_range, math.prod(shape[1:-1])  # rows of the matrix for each index of the first
    matrix, here, rows = (each * shape[0], shape[-1]), (each * offset[0], offset[-1]), (each * size[0], size[-1])
    drawn = draw(seed, name, torch.Size(matrix), here, rows, lambda x, by: x.normal_(0.0, std, generator=by))
    return drawn.reshape(size)


def draw(
    seed: int,
    name: str,
    shape: torch.Size,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    fill: Callable[[Tensor, torch.Generator], Tensor],
) -> Tensor:
    """Draw a slice of a random matrix; the arguments are those of `initial_values`.

    Args:
        fill: `fill(rows, generator)` fills full rows, (up to 1024, columns), in place.

    Returns:
        A tensor of shape `size`, fp32, on CPU.
    """
    drawn = torch.empty(size)
    row, stop = offset[0], offset[0] + size[0]
    while row < stop:
        block = row // _INIT_ROWS
        # The full block, even if the slice needs one row or column of it: the values must not depend on the slice.
        rows = torch.empty(min(_INIT_ROWS, shape[0] - block * _INIT_ROWS), shape[1])
        # Hash to 32 bits: torch's CPU generator ignores the upper half of a 64-bit seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        fill(rows, generator)
        end = min(stop, (block + 1) * _INIT_ROWS)
        columns = slice(offset[1], offset[1] + size[1])
        drawn[row - offset[0] : end - offset[0]] = rows[row - block * _INIT_ROWS : end - block * _INIT_ROWS, columns]
        row = end
    return drawn
