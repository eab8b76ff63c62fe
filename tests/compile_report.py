"""What the compilers make of our kernels, without a GPU: registers, memory, matrix instructions.

    python tests/compile_report.py [--arch gfx908 gfx90a ...] [--head_dim 64 128] [--first] [--json]

Every launch that titan_mi100/attention/triton_backend.py offers an architecture is compiled, for fp16 and bf16. Exit
code 1, and a line each, if one spills registers into scratch memory, needs more shared memory (LDS) than there is, or
uses no matrix instructions (MFMA, MMA). Then the optimizer's kernel for each kind of state; its last column counts
products and sums that became one operation, of which there must be none. AMD's kernels need a linker, lld 16 or later:
`apt-get install lld-16`, or TRITON_HIP_LLD_PATH.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: the interpreter compiles nothing

from titan_mi100.attention.triton_backend import CANDIDATES, Tile, launch_options
from titan_mi100.cli import exit_code
from titan_mi100.errors import UserError

SHARED_BYTES = {"gfx908": 65_536, "gfx90a": 65_536, "gfx942": 65_536, "sm80": 166_912, "sm90": 232_448}
DTYPES = ("fp16", "bf16")
GROUP = 2  # query heads per key head; it changes no kernel but the loop around one


@dataclass(frozen=True)
class Report:
    """One compiled kernel. Spills are bytes per thread, on AMD too."""

    arch: str
    kernel: str
    dtype: str
    head_dim: int
    tile: Tile
    registers: str
    spilled: int
    shared: int
    matrix_instructions: int

    def problems(self) -> Iterator[str]:
        what = f"{self.arch} {self.kernel} {self.dtype} D {self.head_dim} {'.'.join(map(str, self.tile))}"
        if self.spilled:
            yield f"{what}: {self.spilled} bytes of registers per thread are kept in memory"
        if self.shared > SHARED_BYTES[self.arch]:
            yield f"{what}: {self.shared:,} bytes of shared memory of {SHARED_BYTES[self.arch]:,}"
        if not self.matrix_instructions:
            yield f"{what}: no matrix instructions"


def compile_kernel(kernel: Any, arch: str, dtype: str, head_dim: int, tile: Tile) -> Report:
    fixed = {"GROUP": GROUP, "HEAD_DIM": head_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k}
    kinds = {"lse": "*fp32", "delta": "*fp32", "boundaries": "*i32", "scale": "fp32", "tokens": "i32"}
    signature, constants, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        of_stride = "i32" if name.endswith("stride") else f"*{dtype}"
        signature[name] = "constexpr" if name in fixed else kinds.get(name, of_stride)
        if name in fixed:
            constants[(place,)] = fixed[name]
        elif name not in ("scale", "tokens"):  # as at run time, where all of these are multiples of 16
            divisible[(place,)] = [["tt.divisibility", 16]]
    compiled = _compile(kernel, arch, signature, constants, divisible, launch_options(tile, arch.startswith("gfx")))
    name = kernel.fn.__name__.removesuffix("_kernel")
    return Report(arch, name, dtype, head_dim, tile, *_read(compiled, arch))


def _compile(kernel: Any, arch: str, signature: Any, constants: Any, divisible: Any, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[2:]), 32)
    return triton.compile(ASTSource(kernel, signature, constants, divisible), target=target, options=options)


@dataclass(frozen=True)
class UpdateReport:
    """The optimizer's kernel, compiled. fused: sums that became one operation with a product."""

    arch: str
    state: str
    master: str
    registers: str
    spilled: int
    shared: int
    fused: int

    def problems(self) -> Iterator[str]:
        what = f"{self.arch} update, state {self.state}, weights {self.master}"
        if self.spilled:
            yield f"{what}: {self.spilled} bytes of registers per thread are kept in memory"
        if self.fused:
            yield f"{what}: {self.fused} sums of a thread are no operations of their own"


def compile_update(arch: str, state: str, master: str) -> UpdateReport:
    from titan_mi100.optim import fused, kernels

    kernel, moment = kernels.update_kernel, {"fp32": "*fp32", "bf16": "*i16", "8bit": "*u8"}[state]
    weight = "*fp32" if master == "fp32" else "*i16"
    fixed = {"MASTER": master, "CODED": state == "8bit", "BLOCK": 256, "BLOCKS": 4}
    kinds = {"weight": weight, "gradient": weight, "first": moment, "second": moment, "residual": "*i8"}
    kinds |= {f"{name}_exponent": "*u8" for name in ("first", "second")}
    kinds |= dict.fromkeys(("rows", "columns", "number", "whole", "key"), "i32") | dict.fromkeys(fixed, "constexpr")
    signature = {name: kinds.get(name, "fp32") for name in kernel.arg_names}
    constants = {(place,): fixed[name] for place, name in enumerate(kernel.arg_names) if name in fixed}
    aligned = [place for place, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name == "columns"]
    divisible = {(place,): [["tt.divisibility", 16]] for place in aligned}
    compiled = _compile(kernel, arch, signature, constants, divisible, dict(fused.LAUNCH))
    registers, spilled, shared, _ = _read(compiled, arch)
    threads = fused.LAUNCH["num_warps"] * (64 if arch.startswith("gfx") else 32)
    alone = _SUMS[master == "24bit"] * 4 * 256 // threads - _count_sums(compiled.asm)
    return UpdateReport(arch, state, master, registers, spilled, shared, alone)


# Of an element: both moments, the divisor, the weight. 24-bit weights have three more: decay, noise, both together.
_SUMS = (4, 7)


def _count_sums(code: Mapping[str, str]) -> int:
    """Sums of fp32 that are operations of their own, in a thread."""
    found = re.findall(r"v_(pk_)?(?:add|sub)_f32|(?:add|sub)\.rn\.f32", code.get("amdgcn") or code["ptx"])
    return sum(2 if packed else 1 for packed in found)


def _read(compiled: Any, arch: str) -> tuple[str, int, int, int]:
    return (_read_amd if arch.startswith("gfx") else _read_nvidia)(compiled, arch)


def _read_amd(compiled: Any, arch: str) -> tuple[str, int, int, int]:
    code = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s*(\d+)", code)[0])

    registers = f"{number('vgpr_count')} vector, of these {number('agpr_count')} accumulation"
    if arch == "gfx908":  # the two files are apart there, and counted apart
        registers = f"{number('vgpr_count')} vector, {number('agpr_count')} accumulation"
    return registers, number("private_segment_fixed_size"), compiled.metadata.shared, code.count("v_mfma")


def _read_nvidia(compiled: Any, arch: str) -> tuple[str, int, int, int]:
    import triton

    found = Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        suffix = "a" if arch == "sm90" else ""
        command = [next(found), "-v", f"-arch=sm_{arch[2:]}{suffix}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill", said)))
    products = len(re.findall(r"mma\.sync|wgmma\.mma_async", compiled.asm["ptx"]))
    return registers, spilled, compiled.metadata.shared, products


def set_linker() -> None:
    """Triton asks for AMD's own linker in /opt/rocm; any lld of LLVM 16 or later does."""
    names = ("ld.lld", *(f"ld.lld-{version}" for version in range(22, 15, -1)))
    found = os.environ.get("TRITON_HIP_LLD_PATH") or next(filter(None, map(shutil.which, names)), None)
    if found is None and not Path("/opt/rocm/llvm/bin/ld.lld").exists():
        raise UserError("no ld.lld for AMD's kernels; apt-get install lld-16, or set TRITON_HIP_LLD_PATH")
    if found is not None:
        os.environ["TRITON_HIP_LLD_PATH"] = found


def main() -> int:
    architectures = list(SHARED_BYTES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=architectures, choices=architectures)
    parser.add_argument("--head_dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--first", action="store_true", help="only the likeliest launch of each kernel")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    options = parser.parse_args()
    if any(arch.startswith("gfx") for arch in options.arch):
        set_linker()
    if not options.json:
        print("| arch | kernel | dtype | D | queries x keys, warps, stages | registers | spilled | shared | MFMA |")
        print("|---" * 9 + "|")
    problems: list[str] = []
    for arch in options.arch:
        for kernel, tiles in CANDIDATES[arch].kernels():
            for tile in tiles[:1] if options.first else tiles:
                for dtype in DTYPES:
                    for head_dim in options.head_dim:
                        report = compile_kernel(kernel, arch, dtype, head_dim, tile)
                        problems += report.problems()
                        print(json.dumps(asdict(report)) if options.json else _cells(report), flush=True)
    if not options.json:
        print("\n| arch | state | weights | registers | spilled | shared | fused |\n" + "|---" * 7 + "|")
    for arch in options.arch:
        for state, master in (("8bit", "bf16_sr"), ("8bit", "24bit"), ("bf16", "bf16_sr"), ("fp32", "bf16_sr")):
            update = compile_update(arch, state, master)
            problems += update.problems()
            print(json.dumps(asdict(update)) if options.json else _row(asdict(update).values()), flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _cells(report: Report) -> str:
    q, k, warps, stages = report.tile
    launch = f"{q} x {k}, {warps}, {stages}"
    cells = (report.arch, report.kernel, report.dtype, report.head_dim, launch, report.registers, report.spilled,
             report.shared, report.matrix_instructions)  # fmt: skip
    return _row(cells)


if __name__ == "__main__":
    sys.exit(exit_code(main))
