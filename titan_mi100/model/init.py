"""Random initial weights: a pure function of (seed, parameter name), so that every layout starts from the same ones."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from titan_mi100.config.model_spec import ModelSpec

# Reads a part of a parameter: (name, whole shape, offset, size) -> that part, on CPU, in any dtype
Read = Callable[[str, torch.Size, tuple[int, ...], tuple[int, ...]], Tensor]
_INIT_ROWS = 1024  # rows drawn from one seed


def initial_values(
    spec: ModelSpec, seed: int, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]
) -> Tensor:
    """A part of a parameter's random initial value: normal(0, initializer_range), ones for norms; fp32, on CPU.

    Args:
        name, shape: the whole parameter, a vector or a matrix. offset, size: the part, per dimension.

    Each 1024 rows have their own seed, so a rank draws little more than its shard.
    """
    if len(shape) == 1:
        return torch.ones(size)
    std = spec.initializer_range
    return draw(seed, name, shape, offset, size, lambda rows, by: rows.normal_(0.0, std, generator=by))


def draw(
    seed: int,
    name: str,
    shape: torch.Size,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    fill: Callable[[Tensor, torch.Generator], Tensor],
) -> Tensor:
    """A part of a random matrix, as initial_values; `fill(rows, generator)` draws whole rows in place."""
    values = torch.empty(size)
    row, stop = offset[0], offset[0] + size[0]
    while row < stop:
        block = row // _INIT_ROWS
        rows = torch.empty(min(_INIT_ROWS, shape[0] - block * _INIT_ROWS), shape[1])
        # hashed into 32 bits: torch's CPU generator ignores the seed's upper half
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        fill(rows, generator)
        end = min(stop, (block + 1) * _INIT_ROWS)
        columns = slice(offset[1], offset[1] + size[1])
        values[row - offset[0] : end - offset[0]] = rows[row - block * _INIT_ROWS : end - block * _INIT_ROWS, columns]
        row = end
    return values
