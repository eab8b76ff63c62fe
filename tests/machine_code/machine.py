"""A workgroup that executes a program on numpy, and faults where the hardware might do something else.

A memory operation takes effect in two steps: addresses and data are taken when it is issued; a register is loaded when
an s_waitcnt has waited for it, the latest moment that the hardware may choose, and is not to be used before. Waves run
one after the other from barrier to barrier, in an order that the caller gives. So a race cannot show in the results of
every order, and Memory remembers who touched what.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from machine_code.assembly import EXEC, SCC, Instruction, Program, Unknown
from machine_code.operations import LOW32, LOW64, i64, u32
from machine_code.wait_states import WaitStates

LANES = 64
ALL = np.ones(LANES, bool)
NAN = 0x7FC0DEAD  # in what nobody wrote
_SEVERAL_WAVES = 0xFFFF << 32
_SEVERAL_GROUPS = 0x7FFF << 48


class Fault(Exception):
    """The program does what it must not."""


def _conflicts(before: np.ndarray, who: int) -> np.ndarray:
    """Is that another workgroup, or another wave of this one that has not met it at a barrier since?"""
    difference = before ^ who
    is_unordered = (difference & 0xFFFF_FFFF == 0) & (difference != 0)
    return (before != 0) & ((difference >= 1 << 48) | is_unordered)


class Memory:
    """Bytes with gaps between the arrays, and who last wrote and read each.

    Two waves must not touch the same byte unless both only read it, or write the same value, or a barrier of their
    workgroup lies between. Who is 0, or a number whose bits are: workgroup, wave (16 bits), barriers so far (32 bits).
    """

    def __init__(self, size: int, base: int, alignment: int) -> None:
        self.bytes = np.full(size, 0xA5, np.uint8)
        self._base, self._alignment = base, alignment
        self._exists = np.zeros(size, bool)
        self._writer, self._reader = np.zeros(size, i64), np.zeros(size, i64)
        self._next = 0

    def place(self, array: np.ndarray, gap: int = 4096) -> int:
        """-> the address of a copy of an array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start, end = self._next, self._next + raw.size
        self.bytes[start:end] = raw
        self._exists[start:end] = True
        self._next = (end + gap + 255) // 256 * 256
        return self._base + start

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        start = address - self._base
        return self.bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    def load(self, addresses: np.ndarray, size: int, who: int) -> np.ndarray:
        """-> (addresses, size) bytes"""
        index = self._index(addresses, size)
        if _conflicts(self._writer[index], who).any():
            raise Fault("a race: it reads what another wave has written, without a barrier between")
        reader = self._reader[index]
        self._reader[index] = np.where(_conflicts(reader, who), who | _SEVERAL_WAVES, who)
        self._reader[index[(reader != 0) & (reader ^ who >= 1 << 48)]] = _SEVERAL_GROUPS
        return self.bytes[index]

    def store(self, addresses: np.ndarray, values: np.ndarray, who: int) -> None:
        index = self._index(addresses, values.shape[1])
        if _conflicts(self._reader[index], who).any():
            raise Fault("a race: it writes what another wave has read, without a barrier between")
        if (_conflicts(self._writer[index], who) & (self.bytes[index] != values)).any():
            raise Fault("a race: it writes another value than another wave, without a barrier between")
        self._writer[index] = who
        self.bytes[index] = values
        if (self.bytes[index] != values).any():
            raise Fault("two lanes write different values to one address")

    def is_written(self, address: int, array: np.ndarray) -> bool:
        """All of an array, or nothing."""
        written = self._writer[address - self._base : address - self._base + array.nbytes] != 0
        if written.any() and not written.all():
            raise Fault("the launch writes only a part of a tensor")
        return bool(written.any())

    def _index(self, addresses: np.ndarray, size: int) -> np.ndarray:
        start = addresses.astype(i64) - self._base
        if (start % min(size, self._alignment)).any():
            raise Fault("an address that is not aligned")
        index = start[:, None] + np.arange(size)
        if index.size and (index.min() < 0 or index.max() >= self.bytes.size or not self._exists[index].all()):
            raise Fault("an address outside of every array")
        return index


class Wave:
    def __init__(self, number: int, group: int, memory: Memory, shared: Memory) -> None:
        self.number, self.memory, self.shared = number, memory, shared
        self.who = (group + 1) << 48 | number << 32  # see Memory
        self.s = np.full(SCC + 1, NAN, u32)
        self.v = np.full((768, LANES), NAN, u32)  # rows by the numbers of assembly.py; 256 are not used
        self.s[SCC] = 0
        self.next = 0
        self.is_done = False
        self.queues: dict[str, deque] = {"vmcnt": deque(), "lgkmcnt": deque()}
        self.pending: Counter[int] = Counter()  # registers that a load will write
        self.active = ALL
        self.set_pair(EXEC, LOW64)

    def pair(self, register: int) -> int:
        return int(self.s[register]) | int(self.s[register + 1]) << 32

    def set_pair(self, register: int, value: int) -> None:
        self.s[register], self.s[register + 1] = value & LOW32, value >> 32 & LOW32
        if register == EXEC:
            self.active = ALL if value & LOW64 == LOW64 else self.flags(EXEC)

    def flags(self, register: int) -> np.ndarray:
        return np.unpackbits(self.s[register : register + 2].view(np.uint8), bitorder="little").view(bool)

    def set_flags(self, register: int, flags: Any) -> None:
        if register == EXEC:
            raise Unknown("a vector operation that writes exec")
        self.s[register : register + 2] = np.packbits(flags & self.active, bitorder="little").view(u32)

    def put(self, register: int, values: Any) -> None:
        """Write a vector register in the active lanes."""
        bits = values if values.dtype == u32 else values.view(u32)
        if self.active is ALL:
            self.v[register] = bits
        else:
            np.copyto(self.v[register], bits, where=self.active)

    def issue(self, counter: str, kind: str, registers: Sequence[int], write: Callable[[], None] | None) -> None:
        self.queues[counter].append((kind, registers, write))
        self.pending.update(registers)

    def wait(self, counter: str, count: int) -> None:
        queue = self.queues[counter]
        if count and any(kind == "scalar" for kind, _, _ in queue):
            return  # scalar loads end in any order: only a wait for all of them says something
        while len(queue) > count:
            _, registers, write = queue.popleft()
            if write:
                write()
            self.pending.subtract(registers)
        self.pending = +self.pending


class Workgroup:
    """Args:
    number: of the workgroup in the launch; it tells its waves from those of others.
    shared: bytes of LDS that the launch asks for.
    lines: where the lines that were executed are noted.
    """

    def __init__(self, program: Program, memory: Memory, number: int, waves: int, shared: int, lines: set[int]) -> None:
        self._program, self._memory, self._lines = program, memory, lines
        self._shared = Memory(65_536, 0, 8)
        self._shared.place(np.full(shared, 0xA5, np.uint8))
        self._waves = [Wave(n, number, memory, self._shared) for n in range(waves)]
        self._wait_states = [WaitStates() for _ in range(waves)]
        self._steps = 0

    def run(self, arguments: int, place: Sequence[int], order: Callable[[list[Wave]], list[Wave]]) -> int:
        """-> instructions that were executed

        Args:
            arguments: their address.
            place: of the workgroup in the grid.
            order: of the waves that run to the next barrier.
        """
        for wave in self._waves:
            self._start(wave, arguments, place)
        running = self._waves
        with np.errstate(all="ignore"):
            while running:
                for wave in order(running):
                    self._run_to_barrier(wave)
                for wave in running:
                    wave.who += 1
                left = [wave for wave in running if not wave.is_done]
                if left and len(left) < len(running):
                    raise Fault("some waves have ended, others wait at a barrier")
                running = left
        return self._steps

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
        wave.v[256] = np.arange(LANES) + LANES * wave.number

    def _run_to_barrier(self, wave: Wave) -> None:
        instructions, wait_states = self._program.instructions, self._wait_states[wave.number]
        while True:
            instruction = instructions[wave.next]
            wave.next += 1
            self._steps += 1
            self._lines.add(instruction.line)
            try:
                if self._steps > 1_000_000:
                    raise Fault("too many instructions")
                self._check(wave, instruction)
                if late := wait_states.missing(instruction):
                    raise Fault(late)
                instruction.run(wave)
            except Fault as fault:
                raise Fault(f"wave {wave.number}, {instruction}: {fault}") from None
            if instruction.name in ("s_barrier", "s_endpgm"):
                wave.is_done = instruction.name == "s_endpgm"
                return

    def _check(self, wave: Wave, instruction: Instruction) -> None:
        if wave.pending and not wave.pending.keys().isdisjoint(instruction.reads | instruction.writes):
            raise Fault("it uses a register before the load of it was waited for")
        if instruction.name == "s_barrier" and any(kind == "shared" for kind, *_ in wave.queues["lgkmcnt"]):
            raise Fault("an access to LDS may still be under way at this barrier")
