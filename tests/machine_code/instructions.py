"""Makes of each instruction a function of a wave. What is left of its options then is unknown, and an error."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from machine_code import operations
from machine_code.assembly import EXEC, NULL, SCC, VCC, Instruction, Operand, Program, Unknown, V, half_of
from machine_code.machine import Fault, Wave
from machine_code.operations import LOGIC, LOW32, LOW64, PACKED, SCALAR, VECTOR, f16, f32, f64, fma, i32, i64, u32, u64

Fetch = Callable[[Wave], Any]
Run = Callable[[Wave], bool | None]
Make = Callable[[Instruction, Program], Run]


def build(program: Program, special: Mapping[str, Make] = MappingProxyType({})) -> Program:
    """Give each instruction its function, and the registers that it reads and writes.

    Args: special: how to make those that CDNA does not have.
    """
    for instruction in program.instructions:
        try:
            instruction.run = (special.get(instruction.name) or make)(instruction, program)
            instruction.touched = frozenset(instruction.reads | instruction.writes)
            if instruction.options:
                raise Unknown(f"unknown options {instruction.options}")
            if NULL in instruction.reads:
                raise Unknown("null as a source")
        except (Unknown, ValueError, KeyError) as error:  # too many operands, a text that is no number, no such key
            raise Unknown(f"{instruction}: {error!r}") from None
    return program


def make(instruction: Instruction, program: Program) -> Run:
    name = instruction.name
    maker = _SPECIAL.get(name) or next((maker for start, maker in _BY_START if name.startswith(start)), None)
    if maker is None:
        raise Unknown("no such instruction here")
    return maker(instruction, program)


# --- operands


def _constant(text: str, kind: str) -> Any:
    if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text):
        if kind not in "fu":
            raise Unknown(f"a constant {text} as {kind}")
        bits = f32(float(text)).view(u32)
    else:
        value = int(text, 0)
        if kind in "UI":
            return u64(value & LOW64).view(i64 if kind == "I" else u64)
        if kind == "d" and value == 0:
            return f64(0)
        bits = u32(value & LOW32)
    return _as(bits, kind)


def _as(bits: Any, kind: str) -> Any:
    if kind == "h":
        return operations.half(bits)
    return bits if kind == "u" else bits.view({"i": i32, "f": f32}[kind])


def _bits_of(register: int, kind: str = "u") -> Fetch:
    if register < V:
        return lambda wave: _as(wave.s[register], kind)
    if kind == "u":
        return lambda wave: wave.u[register]
    return (lambda wave: wave.f[register]) if kind == "f" else lambda wave: wave.i[register]


def vector_source(instruction: Instruction, operand: Operand, kind: str, part: str = "DWORD") -> Fetch:
    """-> function that fetches an operand of a vector instruction. part: of the 32 bits, as SDWA names it."""
    register = operand.register
    instruction.reads.update(operand.registers)
    signed = operand.negative or operand.absolute
    fits = operand.count == (2 if kind in "UIBd" else 1) or (register is None and kind not in "Bb")
    if not fits or (signed and kind not in "fhd"):
        raise Unknown(f"{operand.text} as {kind}")
    if register is None:
        value = _constant(operand.text, kind)
        return lambda wave: value
    if kind in "Bb":
        return lambda wave: wave.flags(register)
    if kind in "UI":
        low, high = _bits_of(register), _bits_of(register + 1)
        both = lambda wave: operations.wide(low(wave)) | operations.wide(high(wave)) << u64(32)  # noqa: E731
        return both if kind == "U" else lambda wave: both(wave).view(i64)
    if kind == "d":
        low, high = _bits_of(register), _bits_of(register + 1)
        fetch = lambda wave: (operations.wide(low(wave)) | operations.wide(high(wave)) << u64(32)).view(f64)  # noqa: E731
        return _signed(operand, fetch)
    part = part if operand.half is None else f"WORD_{operand.half}"
    if part == "DWORD" and kind != "h":
        fetch = _bits_of(register, kind)
    else:
        whole, (shift, mask) = _bits_of(register), _place(part)
        fetch = lambda wave: _as((whole(wave) >> shift) & mask, kind)  # noqa: E731
    return _signed(operand, fetch)


def _signed(operand: Operand, fetch: Fetch) -> Fetch:
    if not (operand.negative or operand.absolute):
        return fetch
    size = np.abs if operand.absolute else np.positive
    sign = np.negative if operand.negative else np.positive
    return lambda wave: sign(size(fetch(wave)))


def _place(part: str) -> tuple[Any, Any]:
    unit, _, number = part.partition("_")
    bits = {"BYTE": 8, "WORD": 16, "DWORD": 32}[unit]
    return u32(bits * int(number or 0)), u32((1 << bits) - 1)


def _integers(options: dict[str, str], key: str, default: list[int]) -> list[int]:
    return [int(x) for x in options.pop(key).strip("[]").split(",")] if key in options else default


# --- vector instructions


def vector(instruction: Instruction, program: Program) -> Run:
    signature, compute = VECTOR[instruction.name]
    kinds, results = (signature if program.lanes == 64 else signature.replace("B", "b")).split(">")
    options = instruction.options
    targets, sources = instruction.operands[: len(results)], instruction.operands[len(results) :]
    if "D" in kinds:
        sources, kinds = [*sources, targets[0]], kinds.replace("D", "f")
    if instruction.name == "v_div_fmas_f32":
        sources = [*sources, Operand("vcc", VCC, program.lanes // 32)]
    parts = [options.pop(f"src{n}_sel", "DWORD") for n in range(2)] + ["DWORD"] * 2
    fetch = [
        vector_source(instruction, operand, kind, part)
        for (operand, kind), part in zip(zip(sources, kinds, strict=True), parts, strict=False)
    ]
    for target in targets:
        instruction.writes.update(target.registers)
    first = targets[0].register
    if "row_mask" in options:
        return _across_lanes(instruction, np.arange(program.lanes), fetch, compute, first, _PUT[results])
    result = _composed(compute, fetch)
    if results in "Bb":
        return lambda wave: wave.set_flags(first, result(wave))
    put = _PUT[results[0]]
    if len(results) == 2:
        second = targets[1].register

        def run_two(wave: Wave) -> None:
            value, flags = result(wave)
            put(wave, first, value)
            wave.set_flags(second, flags)

        return run_two
    if options.pop("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise Unknown("bits around the result that are kept")
    if targets[0].half is not None:
        return _put_half(instruction, first, targets[0].half, result)
    part = options.pop("dst_sel", "DWORD")
    if part != "DWORD":
        shift, mask = _place(part)
        return lambda wave: wave.put(first, (result(wave).view(u32) & mask) << shift)
    return lambda wave: put(wave, first, result(wave))


def _put_half(instruction: Instruction, register: int, half: int, result: Fetch) -> Run:
    """What was in the other half stays."""
    instruction.reads.add(register)
    shift, kept = u32(16 * half), u32(0xFFFF0000 >> 16 * half)
    return lambda wave: wave.put(register, (wave.u[register] & kept) | (result(wave) & u32(0xFFFF)) << shift)


def _composed(compute: Callable, fetch: list[Fetch]) -> Fetch:
    if len(fetch) == 2:  # the usual case, faster
        a, b = fetch
        return lambda wave: compute(a(wave), b(wave))
    return lambda wave: compute(*[each(wave) for each in fetch])


def _put_pair(wave: Wave, register: int, value: Any) -> None:
    wave.put(register, (value & u64(LOW32)).astype(u32))
    wave.put(register + 1, (value >> u64(32)).astype(u32))


_PUT: dict[str, Callable[[Wave, int, Any], None]] = {
    "u": Wave.put,
    "i": lambda wave, register, value: wave.put(register, value.view(u32)),
    "f": Wave.put_floats,
    "U": _put_pair,
    "d": lambda wave, register, value: _put_pair(wave, register, value.view(u64)),
}


def _across_lanes(
    instruction: Instruction, lane: Any, fetch: list[Fetch], compute: Callable, target: int, put: Callable[..., None]
) -> Run:
    """DPP: the first source comes from another lane, and only some lanes are written."""
    options = instruction.options
    rows, banks = int(options.pop("row_mask"), 0), int(options.pop("bank_mask"), 0)
    zero = options.pop("bound_ctrl", "") == "1"  # in place of a lane that does not exist; else nothing is written
    (kind,) = options
    how = options.pop(kind)
    row, place, everywhere = lane // 16, lane % 16, lane >= 0
    if kind == "quad_perm":
        other, exists = lane // 4 * 4 + np.array([int(x) for x in how[1:-1].split(",")])[lane % 4], everywhere
    elif kind == "row_shl":
        other, exists = lane + int(how), place + int(how) < 16
    elif kind == "row_shr":
        other, exists = lane - int(how), place >= int(how)
    elif kind == "row_bcast":
        other, exists = {"15": (row * 16 - 1, row > 0), "31": (lane * 0 + 31, lane >= 32)}[how]
    else:
        raise Unknown(kind)
    other = np.where(exists, other, 0)
    allowed = (rows >> row & 1 == 1) & (banks >> place // 4 & 1 == 1)
    instruction.reads.add(target)

    def run(wave: Wave) -> None:
        first = np.broadcast_to(fetch[0](wave), len(lane))
        there = exists & wave.active[other]
        value = compute(np.where(there, first[other], first.dtype.type(0)), *[f(wave) for f in fetch[1:]])
        active = wave.active
        wave.active = active & allowed & (everywhere if zero else there)
        put(wave, target, value)
        wave.active = active

    return run


def _mixed(instruction: Instruction, _: Any) -> Run:
    """Fused multiply-add in which each source is fp32, or (op_sel_hi) half of a register (op_sel says which)."""
    target, *sources = instruction.operands
    options = instruction.options
    upper, is_half = (_integers(options, key, [0, 0, 0]) for key in ("op_sel", "op_sel_hi"))
    fetch = []
    for operand, place, halved in zip(sources, upper, is_half, strict=True):
        fetch.append(
            vector_source(instruction, operand, "h" if halved else "f", f"WORD_{place}" if halved else "DWORD")
        )
    register = target.register
    instruction.writes.add(register)
    if instruction.name == "v_fma_mix_f32":
        return lambda wave: wave.put_floats(register, fma(*[f(wave) for f in fetch]))
    half = int(instruction.name == "v_fma_mixhi_f16")
    return _put_half(instruction, register, half, lambda wave: operations.from_half(fma(*[f(wave) for f in fetch])))


def _packed(instruction: Instruction, _: Any) -> Run:
    """Two operations on pairs of registers; op_sel and op_sel_hi say which of a pair is the source of each."""
    target, *sources = instruction.operands
    options, count = instruction.options, len(instruction.operands) - 1

    def halves(which: str, sign: str, default: int, kind: str) -> list[Fetch]:
        chosen, negative = _integers(options, which, [default] * count), _integers(options, sign, [0] * count)
        found = []
        for operand, part, minus in zip(sources, chosen, negative, strict=True):
            if operand.register is None and part:
                raise Unknown("the upper half of a constant")
            register = None if operand.register is None else operand.register + part
            found.append(vector_source(instruction, Operand(operand.text, register, 1, bool(minus)), kind))
        return found

    register = target.register
    instruction.writes.update(target.registers)
    compute: Callable
    if instruction.name == "v_pk_mov_b32":  # op_sel has one part of each source, and op_sel_hi says nothing
        options.pop("op_sel_hi", None)
        compute, put, (lower, upper) = np.array, Wave.put, ([each] for each in halves("op_sel", "none", 0, "u"))
    else:
        compute, put = PACKED[instruction.name], Wave.put_floats
        lower, upper = halves("op_sel", "neg_lo", 0, "f"), halves("op_sel_hi", "neg_hi", 1, "f")

    def run(wave: Wave) -> None:
        first, second = compute(*[f(wave) for f in lower]), compute(*[f(wave) for f in upper])
        put(wave, register, first)
        put(wave, register + 1, second)

    return run


def _matrix(instruction: Instruction, _: Any) -> Run:
    """Lane l has row l % 16 of A and column l % 16 of B; lanes l // 16 have successive values of k. The registers of D
    have rows l // 16 * 4, + 1, + 2, + 3. Source: AMD's matrix instruction calculator
    (ROCm/amd_matrix_instruction_calculator)."""
    k, kind = operations.matrix_shape(instruction.name)
    size = k * (4 if kind == "f32" else 2) // 16
    return multiply(
        instruction, k, kind, (4, size), lambda raw: raw, lambda raw: raw.reshape(4, 4, 16).transpose(1, 0, 2)
    )


def multiply(
    instruction: Instruction, k: int, kind: str, counts: tuple[int, int], factor: Callable, square: Callable
) -> Run:
    """D = A B + C, 16 x 16, a sum in fp64; the order of successive values of k changes nothing.

    Args:
        counts: registers of D and of a factor.
        factor: the registers of a factor -> those that are used, 16 lanes for each value of k or two of them.
        square: the registers of D or C -> its rows.
    """
    target, a, b, c = instruction.operands
    if (target.count, a.count, b.count) != (counts[0], counts[1], counts[1]):
        raise Unknown("registers that do not fit the shape")
    for operand in (a, b, c):
        instruction.reads.update(operand.registers)
    instruction.writes.update(target.registers)

    def values(operand: Operand) -> Fetch:  # -> (k, rows or columns)
        first, end = operand.registers[0], operand.registers[-1] + 1

        def fetch(wave: Wave) -> Any:
            raw = factor(wave.v[first:end])
            if kind == "f32":
                return raw.view(f32).reshape(k, 16).astype(f64)
            if kind == "f16":
                return raw.view(f16).reshape(k // 2, 16, 2).transpose(0, 2, 1).astype(f64, "C").reshape(k, 16)
            parts = np.empty((2, *raw.shape), u32)
            parts[0], parts[1] = raw << u32(16), raw & u32(0xFFFF0000)
            return parts.view(f32).reshape(k, 16).astype(f64)

        return fetch

    def sums(operand: Operand) -> Fetch:
        first, end = operand.registers[0], operand.registers[-1] + 1
        return lambda wave: square(wave.v[first:end].view(f32))

    rows_of, columns_of, result = values(a), values(b), sums(target)
    start = _constant(c.text, "f") if c.register is None else None
    added = (lambda wave: start) if c.register is None else sums(c)

    def run(wave: Wave) -> None:
        if wave.active is not wave.all:
            raise Fault("a matrix instruction while some lanes are off, which the documents leave open")
        into = result(wave)
        into[...] = (rows_of(wave).T @ columns_of(wave)).reshape(into.shape) + added(wave)

    return run


def _read_lane(instruction: Instruction, _: Any) -> Run:
    target, source, *lanes = instruction.operands
    fetch = vector_source(instruction, source, "u")
    lane = scalar_source(instruction, lanes[0], "u") if lanes else lambda wave: int(np.argmax(wave.active))
    instruction.writes.update(target.registers)
    return lambda wave: wave.s.__setitem__(target.register, fetch(wave)[lane(wave) % len(wave.all)])


def _write_lane(instruction: Instruction, _: Any) -> Run:
    target, source, lane_operand = instruction.operands
    value, lane = scalar_source(instruction, source, "u"), scalar_source(instruction, lane_operand, "u")
    instruction.writes.update(target.registers)
    instruction.reads.update(target.registers)
    return lambda wave: wave.v[target.register].__setitem__(lane(wave) % len(wave.all), value(wave))


# --- scalar instructions


def scalar_source(instruction: Instruction, operand: Operand, kind: str) -> Fetch:
    """-> function that fetches an operand of a scalar instruction, as an integer of Python."""
    register = operand.register
    instruction.reads.update(operand.registers)
    if register is None:
        value = int(_constant(operand.text, kind))
        return lambda wave: value
    if operand.count != (2 if kind in "UI" else 1) or operand.negative or operand.absolute or register >= V:
        raise Unknown(f"{operand.text} as {kind}")
    if kind in "UI":
        sign = 1 << 63 if kind == "I" else 0
        return lambda wave: (wave.pair(register) ^ sign) - sign
    if kind == "u":
        return lambda wave: int(wave.s[register])
    return lambda wave: int(wave.s[register].view(i32))


def scalar(instruction: Instruction, program: Program) -> Run:
    signature, compute = SCALAR[instruction.name]
    kinds, results = signature.split(">")
    sources = instruction.operands[len(results.removesuffix("s")) :]
    if "D" in kinds:
        sources, kinds = [instruction.operands[0], *sources], kinds.replace("D", "i")
    if "s" in kinds:
        sources = [*sources, Operand("scc", SCC)]
    fetch = [scalar_source(instruction, o, kind.replace("s", "u")) for o, kind in zip(sources, kinds, strict=True)]
    if "s" in results:
        instruction.writes.add(SCC)
    if results == "s":
        return lambda wave: wave.s.__setitem__(SCC, bool(compute(*[f(wave) for f in fetch])))
    target = instruction.operands[0]
    register = target.register
    instruction.writes.update(target.registers)
    is_exec = register == EXEC
    if target.count != (2 if results[0] == "U" else 1) or (is_exec and target.count * 32 != program.lanes):
        raise Unknown(target.text)

    def run(wave: Wave) -> None:
        value = compute(*[f(wave) for f in fetch])
        if results[-1] == "s":
            value, wave.s[SCC] = value
        if results[0] == "U" or is_exec:
            (wave.set_mask if is_exec else wave.set_pair)(register, value)
        else:
            wave.s[register] = value & LOW32

    return run


def save_exec(instruction: Instruction, program: Program) -> Run:
    target, source = instruction.operands
    compute = LOGIC[instruction.name.split("_")[1]]
    if target.count * 32 != program.lanes:
        raise Unknown(target.text)
    fetch = scalar_source(instruction, source, "U" if program.lanes == 64 else "u")
    instruction.reads.update((EXEC, EXEC + 1))
    instruction.writes.update((EXEC, EXEC + 1, SCC, *target.registers))

    def run(wave: Wave) -> None:
        old = wave.mask(EXEC)
        new = compute(fetch(wave), old)
        wave.set_mask(target.register, old)
        wave.set_mask(EXEC, new)
        wave.s[SCC] = new != 0

    return run


_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.s[SCC],
    "s_cbranch_scc1": lambda wave: bool(wave.s[SCC]),
    "s_cbranch_vccz": lambda wave: wave.mask(VCC) == 0,
    "s_cbranch_vccnz": lambda wave: wave.mask(VCC) != 0,
    "s_cbranch_execz": lambda wave: wave.mask(EXEC) == 0,
    "s_cbranch_execnz": lambda wave: wave.mask(EXEC) != 0,
}


def _branch(instruction: Instruction, program: Program) -> Run:
    (label,) = instruction.operands
    target, is_taken = program.labels[label.text], _CONDITIONS[instruction.name]

    def run(wave: Wave) -> None:
        if is_taken(wave):
            wave.next = target

    return run


def _wait(instruction: Instruction, program: Program) -> Run:
    counts = [(key, int(instruction.options.pop(key))) for key in program.wave.counters if key in instruction.options]
    if not counts:
        raise Unknown("a wait for nothing")

    def run(wave: Wave) -> None:
        for counter, count in counts:
            wave.wait(counter, count)

    return run


def _barrier(instruction: Instruction, _: Any) -> Run:
    def run(wave: Wave) -> bool:
        wave.is_done = instruction.name == "s_endpgm"
        if not wave.is_done and any(kind == "shared" for kind, *_ in wave.queues["lgkmcnt"]):
            raise Fault("an access to LDS may still be under way at this barrier")
        return True

    return run


# --- memory


def _scalar_load(instruction: Instruction, _: Any) -> Run:
    target, base, offset = instruction.operands
    size = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}[instruction.name.removeprefix("s_load_dword")]
    address, distance = scalar_source(instruction, base, "U"), int(offset.text, 0)
    if target.count != size:
        raise Unknown(target.text)
    instruction.writes.update(target.registers)
    rows = slice(target.registers[0], target.registers[-1] + 1)

    def run(wave: Wave) -> None:
        values = wave.memory.load(np.array([address(wave) + distance]), 4 * size, wave.who)[0].view(u32)
        wave.issue("lgkmcnt", "scalar", target.registers, lambda: wave.s.__setitem__(rows, values))

    return run


_SIZES = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _global(instruction: Instruction, _: Any) -> Run:
    _, direction, kind, *half = instruction.name.split("_")  # half: d16, d16 hi
    size, offset = _SIZES[kind], int(instruction.options.pop("offset", "0"))
    is_load = direction == "load"
    first, second, base = instruction.operands
    data, address = (first, second) if is_load else (second, first)
    fetch = vector_source(instruction, address, "U" if base.text == "off" else "u")
    start = (lambda wave: 0) if base.text == "off" else scalar_source(instruction, base, "U")

    def addresses(wave: Wave) -> Any:
        return _active(wave, fetch(wave)).astype(i64) + (start(wave) + offset)

    if is_load:
        load = lambda wave: wave.memory.load(addresses(wave), size, wave.who)  # noqa: E731
        return _load(instruction, data, size, "vmcnt", load, len(half) - 1 if half else None)
    if half:
        raise Unknown("a store of half a register")
    instruction.reads.update(data.registers)

    def store(wave: Wave) -> None:
        wave.memory.store(addresses(wave), _lane_bytes(wave, data, size), wave.who)
        wave.issue(wave.counters[-1] if len(wave.counters) > 2 else "vmcnt", "store", (), None)

    return store


def _buffer(instruction: Instruction, _: Any) -> Run:
    """Global memory by way of a descriptor: a lane whose offset lies behind the end reads zeros, and writes nothing."""
    _, direction, kind = instruction.name.split("_")
    size, offset, options = _SIZES[kind], int(instruction.options.pop("offset", "0")), instruction.options
    data, address, descriptor, start = instruction.operands
    if options.pop("offen", None) is None or start.text != "0" or descriptor.count != 4 or descriptor.register is None:
        raise Unknown("no such access to a buffer here")
    fetch, first = vector_source(instruction, address, "u"), descriptor.register
    instruction.reads.update(descriptor.registers)

    def lanes_and_addresses(wave: Wave) -> tuple[Any, Any]:
        low, high, end, _ = map(int, wave.s[first : first + 4])
        at = _active(wave, fetch(wave)).astype(i64) + offset
        inside = at < end
        if high >> 16 or (inside != (at + size <= end)).any():
            raise Unknown("a buffer of records, or an access that its end divides")
        return inside, at[inside] + (high << 32 | low)

    def load(wave: Wave) -> np.ndarray:
        inside, addresses = lanes_and_addresses(wave)
        values = np.zeros((len(inside), size), np.uint8)
        values[inside] = wave.memory.load(addresses, size, wave.who).view(np.uint8)
        return values

    if direction == "load":
        return _load(instruction, data, size, "vmcnt", load)
    instruction.reads.update(data.registers)

    def store(wave: Wave) -> None:
        inside, addresses = lanes_and_addresses(wave)
        wave.memory.store(addresses, _lane_bytes(wave, data, size)[inside], wave.who)
        wave.issue(wave.counters[-1] if len(wave.counters) > 2 else "vmcnt", "store", (), None)

    return store


def _load(
    instruction: Instruction, target: Operand, size: int, counter: str, load: Fetch, half: int | None = None
) -> Run:
    """Lanes x bytes become registers x lanes. half: of a register, the other one stays."""
    if target.count != max(1, size // 4):
        raise Unknown(target.text)
    dtype = {1: np.uint8, 2: np.uint16}.get(size, u32)
    kind = "shared" if counter == "lgkmcnt" else "load"
    rows = slice(target.registers[0], target.registers[-1] + 1)

    def run_half(wave: Wave) -> None:
        values, active = load(wave).view(dtype)[:, 0], wave.active

        def write() -> None:
            wave.v[rows].view(np.uint16)[0, half::2][active] = values

        wave.issue(counter, kind, (half_of(rows.start, half),), write)

    if half is not None:
        if target.half != half:
            raise Unknown("a load of half a register")
        return run_half
    instruction.writes.update(target.registers)

    def run(wave: Wave) -> None:
        values, lanes = load(wave).view(dtype).T, slice(None) if wave.active is wave.all else wave.active
        wave.issue(counter, kind, target.registers, lambda: wave.v.__setitem__((rows, lanes), values))

    return run


def _active(wave: Wave, values: Any) -> Any:
    """Of the last dimension, the lanes that are on."""
    return values if wave.active is wave.all else values[..., wave.active]


def _lane_bytes(wave: Wave, data: Operand, size: int, shift: int = 0) -> np.ndarray:
    """-> (active lanes, size) of registers x lanes"""
    if data.count != max(1, size // 4):
        raise Unknown(data.text)
    values = _active(wave, wave.v[data.register : data.register + data.count]).T
    return np.ascontiguousarray(values >> u32(shift) if shift else values).view(np.uint8)[:, :size]


def _shared(instruction: Instruction, _: Any) -> Run:
    found = re.fullmatch(r"ds_(read|write)(2)?(st64)?_[bu](8|16|32|64|128)(_d16)?(_hi)?", instruction.name)
    if found is None:
        raise Unknown("no such access to LDS here")
    direction, two, far, bits, in_half, upper = found.groups()
    size = int(bits) // 8
    unit = size * (64 if far else 1) if two else 1
    options = instruction.options
    keys = ("offset0", "offset1") if two else ("offset",)
    offsets = [int(options.pop(key, "0")) * unit for key in keys]
    if direction == "read":
        target, address = instruction.operands
        at = vector_source(instruction, address, "u")

        def load(wave: Wave) -> Any:
            base = _active(wave, at(wave)).astype(i64)
            parts = [wave.shared.load(base + offset, size, wave.who) for offset in offsets]
            return np.concatenate(parts, 1) if len(parts) > 1 else parts[0]

        return _load(instruction, target, size * len(offsets), "lgkmcnt", load, int(bool(upper)) if in_half else None)
    address, *data = instruction.operands
    at = vector_source(instruction, address, "u")
    for operand in data:
        instruction.reads.update(operand.registers)

    def write(wave: Wave) -> None:
        base = _active(wave, at(wave)).astype(i64)
        for operand, offset in zip(data, offsets, strict=True):
            values = _lane_bytes(wave, operand, size, 16 if upper else 0)
            wave.shared.store(base + offset, values, wave.who)
        wave.issue("lgkmcnt", "shared", (), None)

    return write


def _exchange(instruction: Instruction, program: Program) -> Run:
    """Values of other lanes by way of LDS's crossbar, without its memory."""
    target = instruction.operands[0].register
    if instruction.name == "ds_swizzle_b32":
        (distance,) = re.fullmatch(r"swizzle\(SWAP,(1|2|4|8|16)\)", instruction.options.pop("offset")).groups()  # type: ignore[union-attr]
        (data,), other = instruction.operands[1:], np.arange(program.lanes) ^ int(distance)
        lane = lambda wave: other  # noqa: E731
    else:
        address, data = instruction.operands[1:]
        at = vector_source(instruction, address, "u")
        lane = lambda wave: (at(wave) >> u32(2)) % u32(program.lanes)  # noqa: E731
    fetch = vector_source(instruction, data, "u")
    instruction.writes.add(target)

    def run(wave: Wave) -> None:
        lanes, active = lane(wave), np.flatnonzero(wave.active)
        values = np.where(wave.active[lanes], fetch(wave)[lanes], u32(0))[active]
        wave.issue("lgkmcnt", "exchange", (target,), lambda: wave.v.__setitem__((target, active), values))

    return run


_SPECIAL: dict[str, Make] = {
    **dict.fromkeys(VECTOR, vector),
    **dict.fromkeys(SCALAR, scalar),
    **dict.fromkeys(_CONDITIONS, _branch),
    **dict.fromkeys([*PACKED, "v_pk_mov_b32"], _packed),
    **dict.fromkeys(["v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"], _mixed),
    **dict.fromkeys([f"s_{name}_saveexec_b64" for name in LOGIC], save_exec),
    **dict.fromkeys(["v_readlane_b32", "v_readfirstlane_b32"], _read_lane),
    **dict.fromkeys(["s_barrier", "s_endpgm"], _barrier),
    **dict.fromkeys(["ds_swizzle_b32", "ds_bpermute_b32"], _exchange),
    "v_writelane_b32": _write_lane,
    "s_waitcnt": _wait,
    "s_nop": lambda instruction, _: lambda wave: None,
}
_BY_START = (
    ("v_mfma_", _matrix), ("s_load_dword", _scalar_load), ("global_", _global), ("buffer_", _buffer), ("ds_", _shared)
)  # fmt: skip
