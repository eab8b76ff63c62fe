"""RDNA3 (gfx1100, gfx1151) beside CDNA: waves of 32 lanes, whose flags are in one SGPR; the same operations by other
names, two in one instruction (VOPD), halves of registers as operands, a counter for stores, other matrix instructions.

Sources: AMD's "RDNA3 Instruction Set Architecture" (chapters 3, 5, 7, 16) and "RDNA3.5" of it; for the layout of matrix
instructions "How to accelerate AI applications on RDNA 3 using WMMA" on GPUOpen; for hazards LLVM's
GCNHazardRecognizer.cpp (fixVALUTransUse-, fixWMMA- and fixVcmpxPermlaneHazards; the others need 64 lanes, or
instructions that no kernel here has) and SIInsertWaitcnts.cpp (s_nop before registers are given back).
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from machine_code import instructions
from machine_code.assembly import EXEC, VCC, Instruction, Operand, Program, Unknown, V, half_of, parse_instruction
from machine_code.instructions import Run
from machine_code.machine import NAN, Fault, Memory, Wave
from machine_code.operations import LOGIC, LOW32, SCALAR, VECTOR, f32, fma, u32
from machine_code.wait_states import TRANSCENDENTAL


class Wave32(Wave):
    all, words = np.ones(32, bool), 1
    counters = ("vmcnt", "lgkmcnt", "vscnt")

    def __init__(self, number: int, memory: Memory, shared: Memory) -> None:
        super().__init__(number, memory, shared)
        self.scratch = np.full((256, 32), NAN, u32)  # registers that do not fit are kept there

    def mask(self, register: int) -> int:
        return int(self.s[register])

    def set_mask(self, register: int, value: int) -> None:
        self.s[register] = value & LOW32
        if register == EXEC:
            self.active = self.all if value & LOW32 == LOW32 else self.flags(EXEC)


# --- the names that CDNA has

_WORDS = {"32": "dword", "64": "dwordx2", "96": "dwordx3", "128": "dwordx4", "256": "dwordx8", "512": "dwordx16"}
_WORDS |= {"b8": "byte", "b16": "short", "u8": "ubyte", "u16": "ushort"}
_NAMES = (
    (r"v_dual_(\w+)", r"v_\1"),
    (r"v_dot2acc_(\w+)", r"v_dot2c_\1"),
    (r"v_(add|sub|subrev)_nc_u32", r"v_\1_u32"),
    (r"v_add_co_ci_u32", "v_addc_co_u32"),
    (r"v_sub(rev)?_co_ci_u32", r"v_subb\1_co_u32"),
    (r"s_and_not1_(\w+)", r"s_andn2_\1"),
    (r"s_load_b(\d+)", lambda m: f"s_load_{_WORDS[m[1]]}"),
    (
        r"(global|buffer)_(load|store)(_d16)?(_hi)?_(?:([bu](?:8|16))|b(\d+))",
        lambda m: f"{m[1]}_{m[2]}_{_WORDS[m[5] or m[6]]}{m[3] or ''}{m[4] or ''}",
    ),
    (r"ds_load(\w+)", r"ds_read\1"),
    (r"ds_store(\w+)", r"ds_write\1"),
    (r"ds_(read|write)_2addr(_stride64)?_b(\d+)", lambda m: f"ds_{m[1]}2{'st64' * bool(m[2])}_b{m[3]}"),
)
# They are about speed, or about caches that the emulator does not have.
_NO_EFFECT = ("s_delay_alu", "s_clause", "s_waitcnt_depctr", "buffer_gl0_inv", "s_sendmsg")
_WHOLE_RESULTS_WAITED_FOR = ("0xfff", "depctr_va_vdst(0)")  # of s_waitcnt_depctr
_VCC = Operand("vcc_lo", VCC)


def _rename(instruction: Instruction) -> Instruction:
    name, text = instruction.name, instruction.text.partition(" ")[2]
    if name in _NO_EFFECT:
        if (name == "s_sendmsg" and text != "sendmsg(MSG_DEALLOC_VGPRS)") or (
            name == "s_waitcnt_depctr" and text not in _WHOLE_RESULTS_WAITED_FOR
        ):
            raise Unknown(f"{instruction}")
        instruction.operands, instruction.options = [], {}
    if name == "s_waitcnt_vscnt":
        instruction.name, instruction.operands = "s_waitcnt", []
        instruction.options["vscnt"] = str(int(text.removeprefix("null, "), 0))
    if name.startswith("v_cmpx_"):
        instruction.name = name.replace("cmpx", "cmp")
        instruction.operands.insert(0, Operand("exec_lo", EXEC))
    if name == "v_dual_cndmask_b32":
        instruction.operands.append(_VCC)
    if name in ("s_fmac_f32", "s_bitset1_b32"):  # what was there is a source, too
        instruction.operands.append(instruction.operands[0])
    for pattern, replacement in _NAMES:
        instruction.name = re.sub(f"^{pattern}$", replacement, instruction.name)
    if name in _16_BIT and instruction.operands[0].half is None:  # the upper half stays
        instruction.operands[0] = replace(instruction.operands[0], half=0)
    if "_d16" in name or re.fullmatch(r"ds_store_b(8|16)", name):
        place = 1 if name.startswith(("ds_store", "global_store")) else 0
        instruction.operands[place] = replace(instruction.operands[place], half=int("_hi" in name))
    return instruction


# --- what CDNA has not


def _of_floats(compute: Any) -> Any:
    return lambda *bits: int(f32(compute(*(u32(each).view(f32) for each in bits))).view(u32))


VECTOR |= {
    "v_maxmin_i32": ("iii>i", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "v_xor3_b32": ("uuu>u", lambda a, b, c: a ^ b ^ c),
    "v_mov_b16": ("u>u", lambda a: a),
    "v_and_b16": ("uu>u", lambda a, b: a & b),
    "v_or_b16": ("uu>u", lambda a, b: a | b),
    "v_lshrrev_b16": ("uu>u", lambda a, b: (b & u32(0xFFFF)) >> (a & u32(15))),
    "v_cndmask_b16": VECTOR["v_cndmask_b32"],
}
_16_BIT = {name for name in VECTOR if name.endswith("_b16")} | {"v_cvt_f16_f32"}
SCALAR |= {
    "s_bitset1_b32": ("uu>u", lambda bit, old: old | 1 << (bit & 31)),
    "s_cvt_f32_u32": ("u>u", lambda a: int(f32(a).view(u32))),
    "s_cvt_u32_f32": ("u>u", lambda a: int(VECTOR["v_cvt_u32_f32"][1](u32(a).view(f32)))),
    "s_mul_f32": ("uu>u", _of_floats(lambda a, b: a * b)),
    "s_fmac_f32": ("uuu>u", _of_floats(fma)),
    "s_trunc_f32": ("u>u", _of_floats(np.trunc)),
}


def _two(instruction: Instruction, program: Program) -> Run:
    """VOPD: both read before one of them writes."""
    parts = [_rename(parse_instruction(instruction.line, text)) for text in instruction.text.split(" :: ")]
    first, second = (instructions.make(part, program) for part in parts)
    if any(part.options for part in parts):
        raise Unknown("options")
    for part in parts:
        instruction.reads |= part.reads
        instruction.writes |= part.writes
    instruction.options = {}
    (register,) = parts[0].writes
    if register not in parts[1].reads:

        def run(wave: Wave) -> None:
            first(wave)
            second(wave)

        return run

    def run_with_old(wave: Wave) -> None:
        old = wave.u[register].copy()
        first(wave)
        new = wave.u[register].copy()
        wave.u[register][:] = old
        second(wave)
        wave.u[register][:] = new

    return run_with_old


def _matrix(instruction: Instruction, _: Program) -> Run:
    """Lanes l and l + 16 have both row l of A and column l of B, and each register two successive values of k. Register
    r of D has row 2 r in the lower lanes and 2 r + 1 in the upper."""
    kind = instruction.name.rpartition("_")[2]
    return instructions.multiply(instruction, 16, kind, (8, 8), _one_half, lambda raw: raw.reshape(16, 16))


def _one_half(raw: np.ndarray) -> np.ndarray:
    if (raw[:, :16] != raw[:, 16:]).any():
        raise Fault("a factor of which both halves of the wave do not hold the same")
    return np.ascontiguousarray(raw[:, :16])


def _scratch(instruction: Instruction, program: Program) -> Run:
    is_load = instruction.name.startswith("scratch_load")
    data, *places = instruction.operands if is_load else [instruction.operands[1], *instruction.operands[::2]]
    first, size = int(instruction.options.pop("offset", "0")), data.count * 4
    if [each.text for each in places] != ["off", "off"] or int(instruction.name.rpartition("b")[2]) != 8 * size:
        raise Unknown("no such access to scratch memory here")
    if first + size > program.header["private_segment_fixed_size"]:
        raise Unknown("an address outside of scratch memory")
    (instruction.writes if is_load else instruction.reads).update(data.registers)
    registers, kept = slice(data.registers[0], data.registers[-1] + 1), slice(first // 4, (first + size) // 4)

    def store(wave: Wave32) -> None:
        np.copyto(wave.scratch[kept], wave.v[registers], where=wave.active)
        wave.issue("vscnt", "store", (), None)

    def load(wave: Wave32) -> None:
        values, active = wave.scratch[kept].copy(), wave.active
        wave.issue("vmcnt", "load", data.registers, lambda: np.copyto(wave.v[registers], values, where=active))

    return load if is_load else store


def _permute_rows(instruction: Instruction, program: Program) -> Run:
    """v_permlanex16_b32: each lane takes that of the other 16 lanes which its 4 bits of two numbers say."""
    target, data, low, high = instruction.operands
    if instruction.options.pop("op_sel", "") != "[1,0]":
        raise Unknown("values of lanes that are off, which are not fetched")
    fetch = instructions.vector_source(instruction, data, "u")
    choices = [instructions.scalar_source(instruction, operand, "u") for operand in (low, high)]
    register, lane = target.registers[0], np.arange(program.lanes)
    instruction.writes.add(register)

    def run(wave: Wave) -> None:
        chosen = choices[0](wave) | choices[1](wave) << 32
        other = np.array([chosen >> 4 * place & 15 for place in range(16)])
        wave.put(register, fetch(wave)[(lane ^ 16) // 16 * 16 + other[lane % 16]])

    return run


SPECIAL: dict[str, instructions.Make] = {
    **dict.fromkeys(_NO_EFFECT, lambda instruction, program: lambda wave: None),
    **dict.fromkeys([f"s_{name}_saveexec_b32" for name in LOGIC], instructions.save_exec),
    **dict.fromkeys(VECTOR, instructions.vector),
    **dict.fromkeys(SCALAR, instructions.scalar),
    **dict.fromkeys(["v_wmma_f32_16x16x16_f16", "v_wmma_f32_16x16x16_bf16"], _matrix),
    **dict.fromkeys([f"scratch_{each}_b{bits}" for each in ("load", "store") for bits in (32, 64, 128)], _scratch),
    "v_permlanex16_b32": _permute_rows,
    "two": _two,
}


# --- hazards


class Rules(NamedTuple):
    is_vector: bool
    is_transcendental: bool
    ends_all: bool  # it waits for the results of vector instructions
    factors: frozenset[int]  # of a matrix instruction
    results: frozenset[int]
    sources: frozenset[int]  # vector registers
    permutes: bool
    writes_exec: bool


def _rules(instruction: Instruction) -> Rules:
    name, text = instruction.name, instruction.text
    matrix = instruction.operands if name.startswith("v_wmma") else None
    waits = name == "s_waitcnt_depctr" or name.startswith(("global_", "buffer_load", "buffer_store", "ds_", "scratch_"))
    return Rules(
        is_vector=text.startswith("v_"),
        is_transcendental=name.startswith(TRANSCENDENTAL),
        ends_all=waits,
        factors=frozenset([*matrix[1].registers, *matrix[2].registers] if matrix else ()),
        results=frozenset(instruction.writes),
        sources=frozenset(register for register in instruction.reads if register >= V),
        permutes=name.startswith("v_permlane"),
        writes_exec=text.startswith("v_cmpx"),
    )


class Hazards:
    """What the hardware does not hold back, of the instructions of one wave."""

    def __init__(self, program: Program) -> None:
        self._has_late_results = program.arch.startswith("gfx110")  # of transcendentals; RDNA3.5 waits for them
        self._vector, self._transcendental = 0, 0  # instructions so far
        self._written: dict[int, tuple[int, int]] = {}  # by transcendentals, after how many of both
        self._products: frozenset[int] = frozenset()  # of the last vector instruction, if it is a matrix instruction
        self._has_written_exec, self._before = False, ""

    def late(self, instruction: Instruction) -> str:
        """What is wrong with the place of the next instruction, or ""."""
        rules, before, self._before = instruction.rules, self._before, instruction.name
        if rules.ends_all:
            self._written.clear()
        if not rules.is_vector:
            return "s_nop must come right before it" * (instruction.name == "s_sendmsg" and before != "s_nop")
        problem = ""
        for register in self._written.keys() & rules.sources:
            vector, transcendental = self._written[register]
            if self._vector - vector <= 5 and self._transcendental - transcendental <= 1:
                problem = "it reads the result of a transcendental that s_waitcnt_depctr must wait for"
        if rules.factors & self._products:
            problem = "another vector instruction must be between it and the matrix instruction that made its factor"
        if rules.permutes and self._has_written_exec:
            problem = "another vector instruction must be between it and v_cmpx"
        self._vector += 1
        self._transcendental += rules.is_transcendental
        for register in rules.results:
            self._written.pop(register, None)
        if rules.is_transcendental and self._has_late_results:
            self._written.update(dict.fromkeys(rules.results, (self._vector, self._transcendental)))
        self._products = rules.results if rules.factors else frozenset()
        self._has_written_exec = rules.writes_exec
        return problem


def build(program: Program) -> Program:
    if program.header.get("wavefront_size32") == 0:
        raise Unknown(".amdhsa_wavefront_size32 0")
    program.wave, program.hazards = Wave32, Hazards
    for instruction in program.instructions:
        if " :: " in instruction.text:
            instruction.name = "two"
        else:
            _rename(instruction)
    instructions.build(program, SPECIAL)
    for instruction in program.instructions:
        instruction.rules = _rules(instruction)
        halves = {(each.register, each.half) for each in instruction.operands if each.half is not None}
        whole = instruction.touched - {register for register, _ in halves}
        numbers = halves | {(register, half) for register in whole if register >= V for half in (0, 1)}
        # a load of half a register waits for one of the whole, as LLVM's code does; LDS would answer in order
        instruction.touched |= {half_of(*each) for each in numbers} | {register for register, _ in halves}
    return program
