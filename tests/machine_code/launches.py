"""Compiles launches as the package asks for them, and stands in for Triton's launcher: kernel[grid](arguments)."""

import functools
import gc
import json
import os
import random
import re
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
from compile_report import (
    GROUP,
    Launched,
    Tile,
    compiled_head,
    compiled_kernel,
    compiled_launch,
    compiled_update,
    head_constants,
    set_linker,
)
from machine_code import rdna, wait_states
from machine_code.assembly import Program, parse
from machine_code.instructions import build
from machine_code.machine import Memory, Wave, Workgroup

_random = random.Random(1)
ORDERS: dict[str, Callable[[list[Wave]], list[Wave]]] = {
    "in turn": list,
    "reversed": lambda waves: waves[::-1],
    "at random": lambda waves: _random.sample(waves, len(waves)),
}


class Attention(NamedTuple):
    """A launch of one of the three kernels."""

    arch: str
    kernel: str  # as kernels.py names it
    dtype: str
    head_dim: int
    tile: Tile
    kpack: int = 0  # 0: as the package asks for
    parts: tuple[str, ...] = ("KEYS", "VALUES")  # whose gradients it makes, of the kernel for both


class Update(NamedTuple):
    """A launch of the optimizer's kernel, with blocks of 256."""

    arch: str
    state: str
    master: str


class Head(NamedTuple):
    """A launch of a kernel of the head's loss, as compile_report.HEAD_KERNELS names it."""

    arch: str
    kernel: str
    dtype: str
    ids: int


class Fused(NamedTuple):
    """A launch of a kernel between products."""

    arch: str
    launched: Launched


@dataclass(frozen=True)
class Compiled:
    text: str
    shared: int  # bytes of LDS
    waves: int
    constants: dict[str, Any]  # arguments that the code was compiled for


@functools.cache
def _compiler() -> subprocess.Popen:
    """A process of its own, as this one has imported Triton for its interpreter. It ends with this one."""
    command, paths = [sys.executable, "-m", "machine_code.launches"], os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def compile_all(launches: Sequence[Attention | Update | Head | Fused]) -> list[Compiled]:
    compiler = _compiler()
    assert compiler.stdin is not None and compiler.stdout is not None
    print(json.dumps(launches), file=compiler.stdin, flush=True)
    answer = compiler.stdout.readline()
    assert answer, "the compiler has ended, see what it said on stderr"
    return [Compiled(*fields) for fields in json.loads(answer)]


def _compile(fields: list[Any]) -> list[Any]:
    constants: dict[str, Any]
    if len(fields) == len(Fused._fields):
        arch, launched = fields[0], Launched(*fields[1])
        compiled, constants = compiled_launch(launched, arch), launched.constants
    elif len(fields) == len(Update._fields):
        arch, state, master = fields
        compiled = compiled_update(arch, state, master)
        constants = {"MASTER": master, "CODED": state == "8bit", "BLOCK": 256}
    elif len(fields) == len(Head._fields):
        compiled = compiled_head(*fields)
        names = {"sum": ("ONE", "DEPTH", "LANES"), "gradient": ("ONE", "COLUMNS")}.get(fields[1], ("IDS",))
        constants = {name: head_constants(fields[3])[name] for name in names}
    else:
        from titan_mi100.attention import kernels

        arch, name, dtype, head_dim, tile, kpack, parts = fields
        tile = Tile(*tile)
        part = {each: each in parts for each in ("KEYS", "VALUES") if name == "keys_gradient_kernel"}
        changed = {"kpack": kpack} if kpack else {}
        compiled = compiled_kernel(getattr(kernels, name), arch, dtype, head_dim, tile, part, **changed)
        constants = {"GROUP": GROUP, "HEAD_DIM": head_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, **part}
    return [compiled.asm["amdgcn"], compiled.metadata.shared, compiled.metadata.num_warps, constants]


def load(text: str) -> Program:
    """Raises: Unknown: something in the text."""
    program = parse(text)
    if program.arch.startswith("gfx11"):
        return rdna.build(program)
    program.wave, program.hazards = Wave, wait_states.WaitStates
    return wait_states.add_rules(build(program))


class Call(NamedTuple):
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@dataclass
class Emulated:
    """In place of a kernel of kernels.py: its compiled code is executed."""

    compiled: Compiled
    order: str = "in turn"
    may_be_part: bool = False  # it need not write the whole of a tensor
    known: str = "-"  # a pattern of problems with wait states that are passed over
    passed_over: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)  # those that were
    call: Call | None = None  # the last, as it was before
    other: "Emulated | None" = None  # of the gradients of k and v in a launch each, that of v

    @functools.cached_property
    def _program(self) -> Program:
        gc.freeze()  # else a hundred thousand small objects make it visit those of torch again and again
        return load(self.compiled.text)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
        if self.other is not None and settings["KEYS"] != self.compiled.constants["KEYS"]:
            self.other[grid](*arguments, **settings)
            return
        for name, value in self.compiled.constants.items():
            assert settings[name] == value, f"launched with {name} {settings[name]}, compiled for {value}"
        self.call = Call(grid, tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
        self.run(Call(grid, arguments))

    def run(self, call: Call) -> None:
        """Execute; the tensors of the arguments are changed."""
        memory = Memory(1 << 22, 0x7F3A_5000_0000, 4, self._program.cell)
        addresses: dict[int, tuple[int, np.ndarray]] = {}  # by that of torch
        values = []
        for value in call.arguments:
            if isinstance(value, torch.Tensor):
                if value.data_ptr() not in addresses:
                    array = _as_array(value)
                    addresses[value.data_ptr()] = memory.place(array), array
                value = addresses[value.data_ptr()][0]
            values.append(value)
        grid = (*call.grid, 1)[:2]
        start = memory.place(_arguments(self._program, values, grid))
        for number in range(grid[0] * grid[1]):
            waves, shared = self.compiled.waves, self.compiled.shared
            group = Workgroup(self._program, memory, number, waves, shared, self.lines, self._is_known)
            group.run(start, (number % grid[0], number // grid[0]), ORDERS[self.order])
        for address, array in addresses.values():
            if (found := memory.read(address, array, self.may_be_part)) is not None:
                array[...] = found

    def _is_known(self, problem: str) -> bool:
        is_known = re.fullmatch(self.known, problem) is not None
        self.passed_over.update([problem] * is_known)
        return is_known


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor, in bytes."""
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _arguments(program: Program, values: list[int | float], grid: tuple[int, int]) -> np.ndarray:
    """Bytes as the runtime lays them out. The hidden arguments say how large the grid is."""
    raw = bytearray(program.header["kernarg_size"])
    hidden = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", (*grid, 1), strict=True)}
    left = list(values)
    for offset, size, kind in program.arguments:
        value = hidden.get(kind, 0) if kind.startswith("hidden") else left.pop(0) if left else 0
        if isinstance(value, float):
            struct.pack_into("<f", raw, offset, value)
        else:
            raw[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    assert not left, "more arguments than the kernel has"
    return np.frombuffer(bytes(raw), np.uint8)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    set_linker()
    for line in sys.stdin:
        print(json.dumps([_compile(fields) for fields in json.loads(line)]), file=answers, flush=True)
