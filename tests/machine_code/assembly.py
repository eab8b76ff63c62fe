"""Reads the assembly text of one kernel: its instructions, labels, and the header that says how a wave starts.

Registers are numbered: SGPRs as the hardware does (vcc is 106, m0 124, exec 126), scc, then VGPRs and AGPRs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VCC, M0, NULL, EXEC, SCC, V, A = 106, 124, 125, 126, 128, 256, 512
_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1), "null": (NULL, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1),
}  # fmt: skip
_FILES = {"s": 0, "v": V, "a": A}


class Unknown(Exception):
    """The emulator does not know this instruction, option or header: it must be taught, never skipped."""


@dataclass(frozen=True)
class Operand:
    text: str  # without its signs
    register: int | None = None  # the first one; None: a constant, a label, "off"
    count: int = 1
    negative: bool = False
    absolute: bool = False
    half: int | None = None  # 0, 1: the lower or upper half of a register, v1.l or v1.h

    @property
    def registers(self) -> range:
        return range(0) if self.register is None else range(self.register, self.register + self.count)


@dataclass
class Instruction:
    line: int
    text: str
    name: str  # without its encoding (_e32, _e64, _sdwa, _dpp)
    operands: list[Operand]
    options: dict[str, str]  # each is taken out by what understands it
    run: Callable[[Any], bool | None] = lambda wave: None  # -> does it wait for other waves, or end?
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    touched: frozenset[int] = frozenset()  # both
    rules: Any = None  # see wait_states.py

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass
class Program:
    arch: str
    instructions: list[Instruction]
    labels: dict[str, int]
    header: dict[str, int]
    arguments: list[tuple[int, int, str]]  # offset, bytes, kind
    cell: int  # bytes of its smallest access to memory, 2 if that is larger
    shared_cell: int  # the same of LDS, up to 4
    wave: Any = None  # the class of its waves, and of what watches the distances between a wave's instructions
    hazards: Any = None
    events: list[tuple[str, int]] = field(default_factory=list)  # that something must wait for; see wait_states.py

    @property
    def lanes(self) -> int:
        """Of a wave."""
        return len(self.wave.all)


def half_of(register: int, half: int) -> int:
    """A number of its own for half of a register, which a load may write alone."""
    return register + 1024 * (half + 1)


def parse_operand(text: str) -> Operand:
    sign, bars, body = re.fullmatch(r"(-(?=[|vsa]))?(\|)?(.+?)\|?", text).groups()  # type: ignore[union-attr]
    modifiers = {"negative": bool(sign), "absolute": bool(bars)}
    if body in _NAMED:
        return Operand(body, *_NAMED[body], **modifiers)
    if found := re.fullmatch(r"([sva])(\d+)(?:\.([lh]))?", body):
        half = found[3] and "lh".index(found[3])
        return Operand(body, _FILES[found[1]] + int(found[2]), half=half, **modifiers)
    if found := re.fullmatch(r"([sva])\[(\d+):(\d+)\]", body):
        first, last = int(found[2]), int(found[3])
        return Operand(body, _FILES[found[1]] + first, last - first + 1, **modifiers)
    return Operand(text)


def parse_instruction(line: int, text: str) -> Instruction:
    mnemonic, _, rest = text.partition(" ")
    name = re.sub(r"_(e32|e64|sdwa|dpp)$", "", mnemonic)
    if name == "s_waitcnt":
        counts = re.findall(r"(\w+)\((\d+)\)", rest)
        return Instruction(line, text, name, [], dict(counts))
    parts = re.split(r",\s*(?![^\[(]*[\])])", rest) if rest else []
    options: dict[str, str] = {}
    if parts:
        parts[-1], *words = parts[-1].split()
        options = {key: value for key, _, value in (word.partition(":") for word in words)}
    return Instruction(line, text, name, [parse_operand(part) for part in parts], options)


def parse(text: str) -> Program:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    header: dict[str, int] = {}
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(";")[0].rstrip()
        if found := re.fullmatch(r"([\w.$]+):", line):
            labels[found[1]] = len(instructions)
            is_code = is_code or not found[1].startswith(".")
        elif found := re.fullmatch(r"\s+\.amdhsa_(\w+) (\d+)", line):
            header[found[1]] = int(found[2])
        elif line.strip().startswith(".section"):
            is_code = False
        elif is_code and (found := re.fullmatch(r"\t([a-z].*)", line)):
            instructions.append(parse_instruction(number, found[1]))
    arch = re.search(r'amdgcn_target "amdgcn-amd-amdhsa--(\w+)', text)[1]  # type: ignore[index]
    found_arguments = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", text)
    arguments = [(int(offset), int(size), kind) for offset, size, kind in found_arguments]
    names = [each.name for each in instructions]
    cell = 1 if any(re.search(r"^(?:global|buffer)_.*(byte|u8|b8)", name) for name in names) else 2
    sizes = [
        int(found[1]) // 8 for name in names if (found := re.search(r"^ds_(?:read|write|load|store).*_[bu](\d+)", name))
    ]
    return Program(arch, instructions, labels, header, arguments, cell, min([4, *sizes]))
