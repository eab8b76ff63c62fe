"""Instructions that the hardware does not hold back until a result is there: the compiler must put others, or s_nop,
between.

Sources: what the hazard recognizer of LLVM's AMDGPU target asks for (GCNHazardRecognizer.cpp of LLVM 21: checkVMEM-,
checkVALU-, checkDPP-, checkDivFMas-, checkRWLane-, checkMAI-, checkMAILdSt-, checkMAIVALU- and checkSoftClauseHazards),
and for matrix instructions the tables in AMD's rocRoller (Scheduling/Observers/WaitState), which agree. Rules for what
no kernel here has are left out: f64 and 32 x 32 matrix instructions, v_cmpx, scratch memory, s_setreg.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from machine_code.assembly import VCC, A, Instruction, Program, Unknown, V
from machine_code.operations import matrix_shape

TRANSCENDENTAL = ("v_rcp_", "v_rsq_", "v_sqrt_", "v_exp_", "v_log_")
_GLOBAL = ("global_", "buffer_")  # two ways to the same memory
_ACCUMULATION = ("v_accvgpr_read_b32", "v_accvgpr_write_b32")


class Rules(NamedTuple):
    needs: list[tuple[Any, int, Any]]  # event, wait states, the detail that is no hazard
    events: list[tuple[Any, Any]]  # event, detail
    states: int  # that the instruction itself is
    clause: str  # of which memory operations it can be one; "": it ends each


class WaitStates:
    """What one wave has done, and when."""

    def __init__(self, program: Program) -> None:
        self._clock, self._names = 0, program.events
        self._seen: list[tuple[int, Any]] = [(-100, None)] * len(program.events)
        self._clause, self._read, self._written = "", set[int](), set[int]()

    def late(self, instruction: Instruction) -> str:
        """What is wrong with the place of the next instruction, or ""."""
        needs, events, states, clause = instruction.rules
        problem = ""
        for event, least, harmless in needs:
            since, detail = self._seen[event]
            passed = self._clock - since
            if passed < least and (detail is None or detail != harmless):
                problem = f"{least} wait states must be between it and: {self._names[event][0]}; there are {passed}"
        self._clock += states
        for event, detail in events:
            self._seen[event] = self._clock, detail
        if clause or self._clause:
            return self._extend(instruction, clause) or problem
        return problem

    def _extend(self, instruction: Instruction, clause: str) -> str:
        """With XNACK, memory operations one after the other may be done again from the first: none may write what the
        others read, and a store after a load starts anew. Code for a target of any XNACK mode obeys."""
        before = self._written
        if clause != self._clause:
            self._clause, self._read, self._written, before = clause, set(), set(), set()
        if clause:
            self._read, self._written = self._read | instruction.reads, self._written | instruction.writes
            if before and (not instruction.writes or self._read & self._written):
                return "it must not follow the loads before it at once: with XNACK they may be done again"
        return ""


def add_rules(program: Program) -> Program:
    types = {matrix_shape(i.name)[1] for i in program.instructions if i.name.startswith("v_mfma_")}
    if len(types) > 1:
        raise Unknown(f"wait states of {types}")
    found = [_rules(instruction, program.arch, "f32" not in types) for instruction in program.instructions]
    for (before, _), (instruction, rules) in pairwise(zip(program.instructions, found, strict=True)):
        if instruction.name in _ACCUMULATION and before.name.startswith("v_") and "accvgpr" not in before.name:
            rules.events.extend((("v_accvgpr after a write", register), None) for register in before.writes)
    needed = {event for rules in found for event, *_ in rules.needs}
    program.events = sorted({event for rules in found for event, _ in rules.events} & needed)
    numbers = {event: number for number, event in enumerate(program.events)}
    for instruction, (needs, events, states, clause) in zip(program.instructions, found, strict=True):
        needs = [(numbers[event], least, harmless) for event, least, harmless in needs if event in numbers]
        instruction.rules = Rules(needs, [(numbers[e], detail) for e, detail in events if e in numbers], states, clause)
    return program


def _rules(instruction: Instruction, arch: str, is_16_bit: bool) -> Rules:
    clause = "global_" * instruction.name.startswith(_GLOBAL) or "s_load_" * instruction.name.startswith("s_load_")
    rules = Rules([], [], 1 + (int(instruction.operands[0].text) if instruction.name == "s_nop" else 0), clause)

    def need(event: str, registers: Iterable[int], states: int, harmless: Any = None) -> None:
        rules.needs.extend(((event, register), states, harmless) for register in registers)

    def note(event: str, registers: Iterable[int], detail: Any = None) -> None:
        rules.events.extend(((event, register), detail) for register in registers)

    name, operands = instruction.name, instruction.operands
    is_vector, is_memory = name.startswith("v_"), name.startswith((*_GLOBAL, "ds_"))
    if not is_vector and not is_memory:
        return rules
    read = {register for register in instruction.reads if register >= V}
    flags = instruction.reads - read
    written = {register for register in instruction.writes if register >= V}
    if name.startswith(_GLOBAL):
        need("a vector instruction writes an SGPR", flags, 5)
        stored = operands[name.startswith("global_")]
        if "_store_" in name and stored.count > 2:
            note("a store reads more than 8 bytes", stored.registers)
    if is_vector:
        need("a store reads more than 8 bytes", written, 2 if arch == "gfx942" else 1)
        if name == "v_div_fmas_f32":
            need("a vector instruction writes an SGPR", (VCC,), 4)
        if name in ("v_readlane_b32", "v_writelane_b32"):
            need("a vector instruction writes an SGPR", operands[2].registers, 4)
        if "_dpp " in instruction.text:
            need("a vector instruction writes a VGPR", operands[1].registers, 2)
        note("a vector instruction writes an SGPR", instruction.writes - written)
    (_gfx908 if arch == "gfx908" else _later)(instruction, need, note, read, written, is_16_bit, arch == "gfx942")
    return rules


def _gfx908(instruction: Instruction, need: Any, note: Any, read: set[int], written: set[int], *_: bool) -> None:
    """The accumulation registers are apart: only matrix instructions and v_accvgpr_* reach them. 16 x 16: 8 passes."""
    name, operands = instruction.name, instruction.operands
    is_matrix, is_write = name.startswith("v_mfma_"), name == "v_accvgpr_write_b32"
    if name.startswith((*_GLOBAL, "ds_")):
        need("v_accvgpr_read", read, 2)
        need("v_accvgpr after a write", read, 1)
        return
    if is_matrix or is_write:
        need("a vector instruction writes a VGPR", (register for register in read if register < A), 2)
    if is_matrix:
        target, *factors, added = operands
        for factor in factors:
            need("MFMA writes an AGPR", factor.registers, 4, (factor.register, factor.count))
            need("v_accvgpr_write", factor.registers, 3)
        need("MFMA writes an AGPR", added.registers, 2, (added.register, added.count))
        need("v_accvgpr_write", added.registers, 1)
        note("MFMA writes an AGPR", target.registers, (target.register, target.count))
        note("MFMA reads its accumulator", added.registers)
    elif is_write:
        need("MFMA writes an AGPR", written, 7)
        need("MFMA reads its accumulator", written, 5)
        note("v_accvgpr_write", written)
    else:
        if name == "v_accvgpr_read_b32":
            need("MFMA writes an AGPR", read, 10)
            need("v_accvgpr_write", read, 3)
            note("v_accvgpr_read", written)
        note("a vector instruction writes a VGPR", written)


def _later(
    instruction: Instruction, need: Any, note: Any, read: set[int], written: set[int], is_16_bit: bool, is_gfx942: bool
) -> None:
    """gfx90a and gfx942: one file of registers, which all instructions reach."""
    name, operands = instruction.name, instruction.operands
    passes = 4 if is_gfx942 and is_16_bit else 8
    use = passes + (2 if is_gfx942 and not is_16_bit else 3)
    if name.startswith("v_mfma_"):
        target, *factors, added = operands
        for factor in factors:
            need("MFMA writes a register", factor.registers, use)
        partly = passes + (1 if is_gfx942 and is_16_bit else 0)
        need("MFMA writes a register", added.registers, partly, (added.register, added.count))
        need("a vector instruction writes a VGPR", read, 2)
        note("MFMA writes a register", target.registers, (target.register, target.count))
        if is_16_bit or not is_gfx942:
            note("MFMA reads its accumulator", added.registers)
        return
    need("MFMA writes a register", read, use)
    if not name.startswith("v_"):
        return
    need("MFMA writes a register", written, use)
    need("MFMA reads its accumulator", written, passes - 1)
    if name.startswith("v_dot"):
        need("v_dot", operands[1].registers, 3)
        need("v_dot", operands[2].registers, 3)
        note("v_dot", written)
    else:
        need("v_dot", read | written, 3)
        note("a vector instruction writes a VGPR", written)
    if is_gfx942:
        need("a vector instruction writes an SGPR", instruction.reads - read, 2)
        need("SDWA writes part of a register", read | written, 1)
        if _writes_part(instruction.text):
            note("SDWA writes part of a register", written)
        if name.startswith(TRANSCENDENTAL):
            note("a transcendental", written)
        else:
            need("a transcendental", read, 1)
        if name in ("v_readlane_b32", "v_readfirstlane_b32"):
            need("a vector instruction writes a VGPR", read, 1)


def _writes_part(text: str) -> bool:
    return "dst_sel:" in text and "dst_sel:DWORD" not in text
