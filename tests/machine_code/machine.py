"""A workgroup that executes a program on numpy, and faults where the hardware might do something else.

A memory operation takes effect in two steps: addresses and data are taken when it is issued; a register is loaded when
an s_waitcnt has waited for it, the latest moment that the hardware may choose, and is not to be used before. Waves run
one after the other from barrier to barrier, in an order that the caller gives. So a race cannot show in the results of
every order, and Memory remembers who touched what.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from machine_code.assembly import EXEC, SCC, Program, Unknown
from machine_code.operations import LOW32, LOW64, f32, i32, i64, u32

NAN = 0x7FC0DEAD  # in what nobody wrote
_WAVES, _EPOCHS = 32, 8192  # more than a workgroup has; an epoch is the time between two barriers
_NOTHING, _OTHER_GROUP = 2**32 - 1, 1  # numbers of no wave: no cell of an array; read by another workgroup


class Fault(Exception):
    """The program does what it must not."""


class Who(NamedTuple):
    """A wave between two barriers, as numbers that grow with time."""

    wave: int
    epoch: int  # the least of all waves of this workgroup in this epoch
    group: int  # the least of this workgroup

    @classmethod
    def of(cls, group: int, epoch: int, wave: int) -> "Who":
        start = (group + 1) * _EPOCHS * _WAVES
        return cls(start + epoch * _WAVES + wave, start + epoch * _WAVES, start)

    def conflicts(self, before: np.ndarray) -> np.ndarray | None:
        """Is that another workgroup, or another wave of this one that has not met it at a barrier since? None: nowhere.

        Args: before: the numbers of waves, as u32; 0: none.
        """
        is_other = (before - u32(self.group)) >= u32(
            self.epoch - self.group
        )  # this group's, before this epoch, are not
        if not is_other.any():
            return None
        is_other &= (before != self.wave) & (before != 0)
        return is_other if is_other.any() else None


class Memory:
    """Cells with gaps between the arrays, and who last wrote and read each.

    Two waves must not touch the same cell unless both only read it, or write the same value, or a barrier of their
    workgroup lies between.

    Args: cell: bytes of the smallest access.
    """

    def __init__(self, size: int, base: int, alignment: int, cell: int) -> None:
        self._base, self._alignment, self._cell, self._next = base, alignment, cell, 0
        self._cells = np.full(size // cell, 0xA5A5A5A5 >> 32 - 8 * cell, {1: np.uint8, 2: np.uint16, 4: u32}[cell])
        self._writers = np.full(size // cell, _NOTHING, u32)  # who wrote a cell last
        self._readers = self._writers.copy()  # and who read it

    def place(self, array: np.ndarray, gap: int = 4096) -> int:
        """-> the address of a copy of an array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(self._cells.dtype)
        start, self._next = self._next, (self._next + array.nbytes + gap + 255) // 256 * 256
        cells = slice(start // self._cell, start // self._cell + raw.size)
        self._cells[cells], self._writers[cells], self._readers[cells] = raw, 0, 0
        return self._base + start

    def read(self, address: int, like: np.ndarray, may_be_part: bool = False) -> np.ndarray | None:
        """-> an array that was written, None if it was not. may_be_part: what was not written is as it was."""
        start = (address - self._base) // self._cell
        cells = slice(start, start + like.nbytes // self._cell)
        written = self._writers[cells] != 0
        if written.any() and not (written.all() or may_be_part):
            raise Fault("the launch writes only a part of a tensor")
        return self._cells[cells].view(like.dtype).reshape(like.shape) if written.any() else None

    def load(self, addresses: np.ndarray, size: int, who: Who) -> np.ndarray:
        """-> (addresses, cells of an access)"""
        index, writers = self._at(addresses, size)
        if who.conflicts(writers) is not None:
            raise Fault("a race: it reads what another wave has written, without a barrier between")
        readers = self._readers[index]
        others, now = who.conflicts(readers), np.full(readers.shape, who.wave, u32)
        if others is not None:
            now[others] = np.where(readers[others] < who.group, _OTHER_GROUP, who.epoch + _WAVES - 1)
        self._readers[index] = now
        return self._cells[index]

    def store(self, addresses: np.ndarray, values: np.ndarray, who: Who) -> None:
        """Args: values: (addresses, bytes)"""
        index, writers = self._at(addresses, values.shape[1])
        values = values.view(self._cells.dtype)
        if who.conflicts(self._readers[index]) is not None:
            raise Fault("a race: it writes what another wave has read, without a barrier between")
        others = who.conflicts(writers)
        if others is not None and (others & (self._cells[index] != values)).any():
            raise Fault("a race: it writes another value than another wave, without a barrier between")
        self._writers[index] = who.wave
        self._cells[index] = values
        if (self._cells[index] != values).any():
            raise Fault("two lanes write different values to one address")

    def _at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """-> the cells, and who wrote them"""
        start = addresses.astype(i64) - self._base
        if (start & min(size, self._alignment) - 1).any():
            raise Fault("an address that is not aligned")
        index = (start // self._cell)[:, None] + np.arange(size // self._cell)
        try:  # a negative index means the end, where no array is
            writers = self._writers[index]
        except IndexError:
            raise Fault("an address outside of every array") from None
        if (writers == _NOTHING).any():
            raise Fault("an address outside of every array")
        return index, writers


class Wave:
    """Of CDNA: 64 lanes, whose flags are in a pair of SGPRs."""

    who: Who  # since the last barrier
    all, words = np.ones(64, bool), 2  # the lanes, all on; registers for a flag of each
    counters: tuple[str, ...] = ("vmcnt", "lgkmcnt")

    def __init__(self, number: int, memory: Memory, shared: Memory) -> None:
        self.number, self.memory, self.shared = number, memory, shared
        self.s = np.full(SCC + 1, NAN, u32)
        self.v = np.full((768, len(self.all)), NAN, u32)  # rows by the numbers of assembly.py; 256 are not used
        self.u, self.i, self.f = list(self.v), list(self.v.view(i32)), list(self.v.view(f32))  # the same rows
        self.s[SCC] = 0
        self.next = 0
        self.is_done = False
        self.queues: dict[str, deque] = {counter: deque() for counter in self.counters}
        self.pending: set[int] = set()  # registers that a load will write
        self.active = self.all
        self.set_mask(EXEC, LOW64)

    def pair(self, register: int) -> int:
        return int(self.s[register]) | int(self.s[register + 1]) << 32

    def set_pair(self, register: int, value: int) -> None:
        self.s[register], self.s[register + 1] = value & LOW32, value >> 32 & LOW32
        if register == EXEC:
            self.active = self.all if value & LOW64 == LOW64 else self.flags(EXEC)

    mask, set_mask = pair, set_pair  # flags of the lanes as an integer

    def flags(self, register: int) -> np.ndarray:
        return np.unpackbits(self.s[register : register + self.words].view(np.uint8), bitorder="little").view(bool)

    def set_flags(self, register: int, flags: Any) -> None:
        flags = flags & self.active
        self.s[register : register + self.words] = np.packbits(flags, bitorder="little").view(u32)
        if register == EXEC:
            self.active = self.all if flags.all() else flags

    def put(self, register: int, values: Any) -> None:
        """Write a vector register in the active lanes."""
        np.copyto(self.u[register], values, "equiv", self.active)

    def put_floats(self, register: int, values: Any) -> None:
        np.copyto(self.f[register], values, "equiv", self.active)

    def issue(self, counter: str, kind: str, registers: Iterable[int], write: Callable[[], None] | None) -> None:
        self.queues[counter].append((kind, registers, write))
        self.pending.update(registers)

    def wait(self, counter: str, count: int) -> None:
        queue = self.queues[counter]
        if count and any(kind == "scalar" for kind, _, _ in queue):
            return  # scalar loads end in any order: only a wait for all of them says something
        while len(queue) > count:
            if write := queue.popleft()[2]:
                write()
                self.pending = {number for left in self.queues.values() for _, numbers, _ in left for number in numbers}


class Workgroup:
    """Args:
    number: of the workgroup in the launch; it tells its waves from those of others.
    shared: bytes of LDS that the launch asks for.
    lines: where the lines that were executed are noted.
    is_known: is a problem with wait states one to pass over?
    """

    def __init__(
        self, program: Program, memory: Memory, number: int, waves: int, shared: int,
        lines: set[int], is_known: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._program, self._memory, self._number, self._lines = program, memory, number, lines
        self._is_known = is_known
        self._shared = Memory(65_536 + 4096, 0, 8, program.shared_cell)
        self._shared.place(np.full(-shared // 4 * -4, 0xA5, np.uint8))
        self._waves = [program.wave(n, memory, self._shared) for n in range(waves)]
        self._hazards = [program.hazards(program) for _ in range(waves)]

    def run(self, arguments: int, place: Sequence[int], order: Callable[[list[Wave]], list[Wave]]) -> None:
        """Args:
        arguments: their address.
        place: of the workgroup in the grid.
        order: of the waves that run to the next barrier.
        """
        running = self._waves
        with np.errstate(all="ignore"):
            for epoch in range(_EPOCHS):
                for wave in running:
                    wave.who = Who.of(self._number, epoch, wave.number)
                    if not epoch:
                        self._start(wave, arguments, place)
                for wave in order(running):
                    self._run_to_barrier(wave)
                left = [wave for wave in running if not wave.is_done]
                if not left:
                    return
                if len(left) < len(running):
                    raise Fault("some waves have ended, others wait at a barrier")
        raise Fault("too many barriers")

    def _start(self, wave: Wave, arguments: int, place: Sequence[int]) -> None:
        """The registers of a new wave, as "Initial Kernel Execution State" in LLVM's AMDGPU guide describes them."""
        header = self._program.header
        known = {"private_segment_buffer", "kernarg_segment_ptr", "kernarg_preload_length", "count"}
        for key, value in header.items():
            if key.startswith("user_sgpr_") and key.removeprefix("user_sgpr_") not in known and value:
                raise Unknown(f".amdhsa_{key} {value}")
        for key, value in {"float_denorm_mode_32": 3, "float_round_mode_32": 0, "system_vgpr_workitem_id": 0}.items():
            if header[key] != value:
                raise Unknown(f".amdhsa_{key} {header[key]}")
        first = 4 * header.get("user_sgpr_private_segment_buffer", 0)
        wave.set_pair(first, arguments)
        preloaded = header.get("user_sgpr_kernarg_preload_length", 0)
        if preloaded:
            values = self._memory.load(np.array([arguments]), 4 * preloaded, wave.who)[0].view(u32)
            wave.s[first + 2 : first + 2 + preloaded] = values
        register = header["user_sgpr_count"]
        for axis, position in zip("xyz", (*place, 0), strict=True):
            if header[f"system_sgpr_workgroup_id_{axis}"]:
                wave.s[register] = position
                register += 1
        wave.v[256] = np.arange(len(wave.all)) + len(wave.all) * wave.number

    def _run_to_barrier(self, wave: Wave) -> None:
        instructions, lines, late = self._program.instructions, self._lines, self._hazards[wave.number].late
        for _ in range(1_000_000):
            instruction = instructions[wave.next]
            wave.next += 1
            lines.add(instruction.line)
            try:
                if wave.pending and not wave.pending.isdisjoint(instruction.touched):
                    raise Fault("it uses a register before the load of it was waited for")
                if (problem := late(instruction)) and not self._is_known(f"{instruction}: {problem}"):
                    raise Fault(problem)
                if instruction.run(wave):
                    return
            except Fault as fault:
                raise Fault(f"wave {wave.number}, {instruction}: {fault}") from None
        raise Fault("too many instructions")
