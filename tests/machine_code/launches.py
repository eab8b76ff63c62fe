"""Compiles launches, and executes them as the package would: attention against fp64, the optimizer's kernel."""

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: the interpreter compiles nothing

import numpy as np
import torch
from compile_report import GROUP, Tile, compiled_kernel, compiled_update, set_linker

from machine_code.assembly import Program, parse
from machine_code.instructions import build
from machine_code.machine import Memory, Wave, Workgroup
from titan_mi100.attention.base import Documents, boundaries

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_BITS = {torch.bfloat16: torch.int16}
_random = random.Random(1)
ORDERS: dict[str, Callable[[list[Wave]], list[Wave]]] = {
    "in turn": list,
    "reversed": lambda waves: waves[::-1],
    "at random": lambda waves: _random.sample(waves, len(waves)),
}


class Attention(NamedTuple):
    """A launch of one of the three kernels."""

    arch: str
    kernel: str  # forward, queries_gradient, keys_gradient
    dtype: str
    head_dim: int
    tile: str
    kpack: int = 0  # 0: as the package asks for

    def __str__(self) -> str:
        return " ".join(map(str, self[:5])) + (f" kpack {self.kpack}" if self.kpack else "")


class Update(NamedTuple):
    """A launch of the optimizer's kernel."""

    arch: str
    state: str
    master: str

    def __str__(self) -> str:
        return " ".join(("update", *self))


@dataclass(frozen=True)
class Compiled:
    text: str
    shared: int  # bytes of LDS
    waves: int


def compile_all(launches: Sequence[Attention | Update]) -> list[Compiled]:
    """In a process of its own, as this one has imported Triton for its interpreter."""
    command = [sys.executable, "-m", "machine_code.launches"]
    done = subprocess.run(command, input=json.dumps(launches), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Compiled(*fields) for fields in json.loads(done.stdout)]


def _compile(fields: list[Any]) -> list[Any]:
    from titan_mi100.attention import kernels

    if len(fields) == len(Update._fields):
        compiled = compiled_update(*fields)
    else:
        arch, name, dtype, head_dim, tile, kpack = fields
        part = {"KEYS": True, "VALUES": True} if name == "keys_gradient" else {}
        kernel, changed = getattr(kernels, f"{name}_kernel"), {"kpack": kpack} if kpack else {}
        compiled = compiled_kernel(kernel, arch, dtype, head_dim, Tile(*map(int, tile.split("."))), part, **changed)
    return [compiled.asm["amdgcn"], compiled.metadata.shared, compiled.metadata.num_warps]


@dataclass
class Run:
    """Executes one launch; `place` its tensors first."""

    compiled: Compiled
    order: str = "in turn"
    steps: int = 0  # instructions that were executed
    lines: set[int] = field(default_factory=set)  # those that were
    memory: Memory = field(default_factory=lambda: Memory(1 << 23, 0x7F3A_5000_0000, 4))

    def place(self, tensor: torch.Tensor) -> int:
        return self.memory.place(tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy())

    def read(self, address: int, like: torch.Tensor) -> torch.Tensor:
        bits = self.memory.read(address, like.view(_BITS.get(like.dtype, like.dtype)).numpy())
        return torch.from_numpy(bits.copy()).view(like.dtype)

    def launch(self, values: Sequence[int | float], grid: tuple[int, int]) -> None:
        """Args: values: of the arguments; integers are addresses or i32, floats fp32."""
        program = build(parse(self.compiled.text))
        arguments = self.memory.place(_arguments(program, values, grid))
        for number in range(grid[0] * grid[1]):
            group = Workgroup(program, self.memory, number, self.compiled.waves, self.compiled.shared, self.lines)
            self.steps += group.run(arguments, (number % grid[0], number // grid[0]), ORDERS[self.order])


def _arguments(program: Program, values: Sequence[int | float], grid: tuple[int, int]) -> np.ndarray:
    """Bytes as the runtime lays them out. The hidden arguments say how large the grid is."""
    raw = bytearray(program.header["kernarg_size"])
    left = list(values)
    hidden = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", (*grid, 1), strict=True)}
    for offset, size, kind in program.arguments:
        value = hidden.get(kind, 0) if kind.startswith("hidden") else left.pop(0) if left else 0
        letter = "f" if isinstance(value, float) else {2: "H", 4: "i", 8: "Q"}[size]
        struct.pack_into(f"<{letter}", raw, offset, value)
    assert not left
    return np.frombuffer(bytes(raw), np.uint8)


class Case:
    """Two query heads on one key head, and what all kernels must find, in fp64 from the rounded inputs."""

    def __init__(self, dtype: str, head_dim: int, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens, self.dim, self.dtype = sum(lengths), head_dim, DTYPES[dtype]
        heads = {"q": GROUP, "k": 1, "v": 1, "grad": GROUP}
        shapes = {name: (self.tokens, count, head_dim) for name, count in heads.items()}
        self.given = {n: torch.randn(s, generator=generator).to(self.dtype) for n, s in shapes.items()}
        self.boundaries = torch.from_numpy(boundaries(Documents(1, self.tokens, lengths)).reshape(2, self.tokens))
        q, k, v, grad = (x.double().requires_grad_() for x in self.given.values())
        places = torch.arange(self.tokens)
        seen = (places <= places[:, None]) & (places >= self.boundaries[0][:, None])
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]).mul(head_dim**-0.5).masked_fill(~seen, -torch.inf)
        out = torch.einsum("hqk,kd->qhd", scores.softmax(2), v[:, 0])
        found = torch.autograd.grad(out, (q, k, v), grad)
        self.expected = dict(zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *found), strict=True))
        self.expected["lse"] = scores.detach().logsumexp(2) / np.log(2)
        self.expected["delta"] = (out * grad).sum(2).T.detach()

    def errors(self, launch: Attention, run: Run) -> dict[str, float]:
        """The largest error of each result, relative to its largest element."""
        tile = Tile(*map(int, launch.tile.split(".")))
        known = {name: self.expected[name].to(self.dtype) for name in ("out", "grad_q", "grad_k", "grad_v")}
        known |= {name: self.expected[name].float() for name in ("lse", "delta")}
        names = {
            "forward": "q k v out* lse* boundaries",
            "queries_gradient": "q k v out grad grad_q* lse delta* boundaries",
            "keys_gradient": "q k v grad grad_k* grad_v* lse delta boundaries",
        }[launch.kernel].split()
        results: dict[str, int] = {}
        values: list[int | float] = []
        for name in names:
            bare = name.removesuffix("*")
            tensor = self.boundaries if name == "boundaries" else (self.given | known)[bare]
            values.append(run.place(torch.full_like(tensor, torch.nan) if name != bare else tensor.contiguous()))
            results |= {bare: int(values[-1])} if name != bare else {}
        strides = {"q": GROUP, "k": 1, "v": 1, "out": GROUP, "grad": GROUP, "grad_k": 1}
        counts = [strides[name.removesuffix("*")] for name in names if name.removesuffix("*") in strides]
        values += [self.dim**-0.5, self.tokens, *(count * self.dim for count in counts)]
        by_keys = launch.kernel == "keys_gradient"
        programs = -(-self.tokens // (tile.block_k if by_keys else tile.block_q))
        run.launch(values, (programs, 1 if by_keys else GROUP))
        errors = {}
        for name, address in results.items():
            exact = self.expected[name]
            difference = (run.read(address, known[name]).double() - exact).abs().max() / exact.abs().max()
            errors[name] = torch.nan_to_num(difference, nan=torch.inf).item()
        return errors


if __name__ == "__main__":
    set_linker()
    print(json.dumps([_compile(fields) for fields in json.load(sys.stdin)]))
