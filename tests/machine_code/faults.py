"""Plants faults into the assembly text of a launch, one at a time, and says what notices each."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from machine_code.assembly import Unknown
from machine_code.launches import Call, Emulated
from machine_code.machine import Fault


def _swap_factors(line: str) -> str:
    return re.sub(r"(v_\w?m\S+ \S+, )(\S+), (\S+),", r"\1\3, \2,", line)


def _other_accumulator(line: str) -> str:
    """What it adds to, if that is its result, too; else the result: what it adds to then may be zeros, as the other."""
    start, target, factors, added = re.findall(r"(v_\S+ )(\S+), (.*), (\S+)", line)[0]
    first, last = map(int, re.findall(r"\d+", target))
    first, count = first ^ last - first + 1, last - first
    other = f"{target[0]}[{first}:{first + count}]"
    return f"{start}{target}, {factors}, {other}" if added == target else f"{start}{other}, {factors}, {added}"


def _wait_for_less(line: str) -> str:
    return re.sub(r"cnt\((\d+)\)", lambda m: f"cnt({int(m[1]) + 1})", line)


def _move_16_bytes(line: str) -> str:
    return re.sub(r"offset:(\d+)", lambda m: f"offset:{int(m[1]) ^ 16}", line)


def _other_pair(line: str) -> str:
    return re.sub(r"offset1:(\d+)", lambda m: f"offset1:{int(m[1]) ^ 1}", line)


KINDS: dict[str, tuple[str, Callable[[str], str]]] = {  # the lines, and what becomes of one
    "s_waitcnt removed": (r"s_waitcnt ", lambda line: ""),
    "s_waitcnt for one operation less": (r"s_waitcnt ", _wait_for_less),
    "s_waitcnt_depctr removed": (r"s_waitcnt_depctr", lambda line: ""),
    "s_barrier removed": (r"s_barrier", lambda line: ""),
    "s_nop removed": (r"s_nop", lambda line: ""),
    "matrix instruction: A and B exchanged": (r"v_(mfma|wmma)", _swap_factors),
    "matrix instruction: another accumulator": (r"v_(mfma|wmma)", _other_accumulator),
    "LDS: another offset": (r"ds_(read|write|load|store)_\w+ .*offset:\d+", _move_16_bytes),
    "LDS: another second offset": (r"ds_(read2|write2|load_2|store_2)\w+ .*offset1:\d+", _other_pair),
}


class Outcome(NamedTuple):
    kind: str
    line: int
    text: str
    noticed: str  # the message of a checker, "result", or "" for nothing


def plant(kernel: Emulated, bar: float, most: int) -> Iterator[Outcome]:
    """Faults in lines that the last call of a kernel executed, at most `most` of each kind, drawn at random.

    Args: bar: the largest error of a result, relative to its largest element, that counts as none.
    """
    assert kernel.call is not None
    expected = _results(kernel, kernel.call)
    text = kernel.compiled.text.splitlines()
    bare = [line.split(";")[0].strip() for line in text]
    for kind, (pattern, edit) in KINDS.items():
        lines = [n for n in sorted(kernel.lines) if re.match(pattern, bare[n - 1]) and edit(bare[n - 1]) != bare[n - 1]]
        for n in sorted(random.Random(0).sample(lines, min(most, len(lines)))):
            changed = "\n".join([*text[: n - 1], "\t" + edit(bare[n - 1]), *text[n:]])
            broken = Emulated(replace(kernel.compiled, text=changed), kernel.order)
            yield Outcome(kind, n, bare[n - 1], _notice(broken, kernel.call, expected, bar))


def _results(kernel: Emulated, call: Call) -> list[torch.Tensor]:
    """The tensors of the arguments after the call, which leaves those of `call` as they are."""
    arguments = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in call.arguments)
    kernel.run(Call(call.grid, arguments))
    return [x for x in arguments if isinstance(x, torch.Tensor)]


def _notice(broken: Emulated, call: Call, expected: list[torch.Tensor], bar: float) -> str:
    try:
        found = _results(broken, call)
    except (Fault, Unknown) as error:
        return str(error)
    for ours, right in zip(found, expected, strict=True):
        with np.errstate(all="ignore"):
            difference = (ours.double() - right.double()).abs().max() / right.double().abs().max()
        if not difference <= bar:
            return "result"
    return ""
