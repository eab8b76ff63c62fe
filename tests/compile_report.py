"""What the compilers make of our kernels, without a GPU: registers, memory, matrix instructions.

    python tests/compile_report.py [--arch gfx908 gfx90a ...] [--head_dim 64 128 256] [--first] [--json | --store]

Every launch that titan_mi100/attention/launches.py offers an architecture is compiled, for fp16 and bf16, and at head
size 128 for fp32. Exit code 1, and a line each, if one spills registers into scratch memory, needs more shared memory
(LDS) than there is, or uses no matrix instructions in 16 bits (MFMA, WMMA, MMA). Then the optimizer's kernel for each
kind of state; its last column counts products and sums that became one operation, of which there must be none. Then the
kernels of the head's loss, those between products, those of experts, and the delta rule's. AMD's kernels need a linker,
lld 16 or later: `apt-get install lld-16`, or TRITON_HIP_LLD_PATH.

--store writes tests/assets/compiled-VERSION.csv, which the tests compare with the tables; do so after each change of a
launch or of kernels.py, with both versions of Triton (they install without torch).
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: the interpreter compiles nothing

from titan_mi100.attention.launches import TABLES, Tile, candidates, options
from titan_mi100.cli import exit_code
from titan_mi100.errors import UserError

ARCHITECTURES = list(dict.fromkeys(arch for arch, _, _ in TABLES if arch != "cpu"))
# of a block: CUDA's programming guide, less the KiB that it keeps; the rest has AMD's 64 KiB of LDS
_SHARED = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm120": 101_376, "sm90": 232_448, "sm100": 232_448}
_LDS = {"gfx950": 163_840}
DTYPES = {"fp16": 2, "bf16": 2, "fp32": 4}
KERNELS = ("forward_kernel", "queries_gradient_kernel", "keys_gradient_kernel")
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
        what = f"{self.arch} {self.kernel} {self.dtype} D {self.head_dim} {self.tile}"
        if self.spilled:  # tests/test_launches.py says where that is allowed
            yield f"{what}: {self.spilled} bytes of registers per thread are kept in memory"
        if self.shared > shared_bytes(self.arch):
            yield f"{what}: {self.shared:,} bytes of shared memory of {shared_bytes(self.arch):,}"
        if not self.matrix_instructions and self.dtype != "fp32":
            yield f"{what}: no matrix instructions"


def shared_bytes(arch: str) -> int:
    return (_SHARED | _LDS).get(arch, 65_536)


def compile_kernel(name: str, arch: str, dtype: str, head_dim: int, tile: Tile) -> Report:
    """The report of one kernel; of two launches the worse figures."""
    from titan_mi100.attention import kernels

    parts = [{"KEYS": True, "VALUES": True}] if tile.parts == 1 else [{"KEYS": True, "VALUES": False}]
    parts += [{"KEYS": False, "VALUES": True}] if tile.parts == 2 else []
    parts = parts if name == "keys_gradient_kernel" else [{}]
    found = [_read(compiled_kernel(getattr(kernels, name), arch, dtype, head_dim, tile, part), arch) for part in parts]
    registers, spilled, shared, products = zip(*found, strict=True)
    worst = (max(registers, key=lambda text: int(text.split()[0])), max(spilled), max(shared), min(products))
    return Report(arch, name.removesuffix("_kernel"), dtype, head_dim, tile, *worst)


def compiled_kernel(
    kernel: Any, arch: str, dtype: str, head_dim: int, tile: Tile, part: dict[str, bool], **changed: int
) -> Any:
    """Args: part: which gradients a launch for keys and values makes. changed: options of the compiler."""
    fixed = {"GROUP": GROUP, "HEAD_DIM": head_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, **part}
    kinds = {"lse": "*fp32", "delta": "*fp32", "boundaries": "*i32", "scale": "fp32", "tokens": "i32"}
    signature, constants, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        of_stride = "i32" if name.endswith("stride") else f"*{dtype}"
        signature[name] = "constexpr" if name in fixed else kinds.get(name, of_stride)
        if name in fixed:
            constants[(place,)] = fixed[name]
        elif name not in ("scale", "tokens"):  # as at run time, where all of these are multiples of 16
            divisible[(place,)] = [["tt.divisibility", 16]]
    return _compile(kernel, arch, signature, constants, divisible, options(tile, arch) | changed)


def wave(arch: str) -> int:
    """Threads of a wave or warp."""
    return 64 if arch.startswith("gfx9") else 32


def _compile(kernel: Any, arch: str, signature: Any, constants: Any, divisible: Any, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind = ("hip", arch) if arch.startswith("gfx") else ("cuda", int(arch[2:]))
    target = GPUTarget(*kind, wave(arch))
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
        if self.spilled:  # tests/test_launches.py says where that is allowed
            yield f"{what}: {self.spilled} bytes of registers per thread are kept in memory"
        if self.fused:
            yield f"{what}: {self.fused} sums of a thread are no operations of their own"


def compile_update(arch: str, state: str, master: str) -> UpdateReport:
    from titan_mi100.optim import triton_update

    compiled = compiled_update(arch, state, master)
    registers, spilled, shared, _ = _read(compiled, arch)
    threads = triton_update.LAUNCH["num_warps"] * wave(arch)
    alone = _SUMS[master == "24bit"] * 4 * 256 // threads - _count_sums(compiled.asm)
    return UpdateReport(arch, state, master, registers, spilled, shared, alone)


def compiled_update(arch: str, state: str, master: str) -> Any:
    from titan_mi100.optim import kernels, triton_update

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
    return _compile(kernel, arch, signature, constants, divisible, dict(triton_update.LAUNCH))


@dataclass(frozen=True)
class HeadReport:
    """A kernel of the head's loss, compiled; `ids` of a token."""

    arch: str
    kernel: str
    dtype: str
    ids: int
    registers: str
    spilled: int
    shared: int

    def problems(self) -> Iterator[str]:
        if self.spilled:
            name = f"{self.arch} {self.kernel} {self.dtype}, {self.ids} ids"
            yield f"{name}: {self.spilled} bytes of registers per thread are kept in memory"


HEAD_KERNELS = (("sum", 1), ("gradient", 1), ("pick", 32), ("ids_gradient", 32), ("ids_gradient", 1024))


def compile_head(arch: str, kernel: str, dtype: str, ids: int) -> HeadReport:
    return HeadReport(arch, kernel, dtype, ids, *_read(compiled_head(arch, kernel, dtype, ids), arch)[:3])


def head_constants(ids: int) -> dict[str, int]:
    from titan_mi100.model.fused import head_launch

    shape = {"DEPTH": head_launch.DEPTH, "LANES": head_launch.LANES, "COLUMNS": head_launch.COLUMNS}
    return {"ONE": ids == 1, "IDS": ids, **shape}


def compiled_head(arch: str, name: str, dtype: str, ids: int) -> Any:
    """As at run time: rows that lie at multiples of 16, and other integers of any kind."""
    from titan_mi100.model.fused import head_kernel, head_launch

    kernel, fixed = getattr(head_kernel, f"{name}_kernel"), head_constants(ids)
    kinds = {
        "logits": f"*{dtype}",
        "delta": f"*{dtype}",
        "ids": "*i64",
        **dict.fromkeys(("width", "start", "k"), "i32"),
    }
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*fp32") for name in kernel.arg_names}
    constants = {(place,): fixed[name] for place, name in enumerate(kernel.arg_names) if name in fixed}
    aligned = [place for place, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name == "width"]
    divisible = {(place,): [["tt.divisibility", 16]] for place in aligned}
    return _compile(kernel, arch, signature, constants, divisible, {"num_warps": head_launch.WARPS})


FUSED = {"bf16": (1024, 5120), "fp16": (2560,), "fp32": (1024,)}  # sizes of hidden states


@dataclass(frozen=True)
class FusedReport:
    """A kernel between products, compiled as the package launches it."""

    arch: str
    kernel: str
    dtype: str
    constants: str
    registers: str
    spilled: int
    shared: int

    def problems(self) -> Iterator[str]:
        what = f"{self.arch} {self.kernel} {self.dtype} {self.constants}"
        if self.spilled:
            yield f"{what}: {self.spilled} bytes of registers per thread are kept in memory"
        if self.shared > shared_bytes(self.arch):
            yield f"{what}: {self.shared:,} bytes of shared memory of {shared_bytes(self.arch):,}"


class Launched(NamedTuple):
    """A launch as the package asks for it, with what compiling it takes."""

    kernel: str
    types: list[str]  # of the arguments; those that end in "/16" are multiples of 16, as Triton sees when it launches
    constants: dict[str, Any]

    @classmethod
    def of(cls, kernel: Any, arguments: Iterable[Any], constants: dict[str, Any]) -> "Launched":
        return cls(kernel.__name__, [*map(_type_of, arguments)], constants)


def _type_of(argument: Any) -> str:
    if hasattr(argument, "dtype"):
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
        return f"*{short[str(argument.dtype).removeprefix('torch.')]}/16"
    return "fp32" if isinstance(argument, float) else "i32" if argument % 16 else "i32/16"


def fused_launches(dtype: str) -> list[Launched]:
    """The launches of elementwise_launch.py and convolution_launch.py, forward and backward, each kind once."""
    import torch

    from titan_mi100.model.fused import convolution_launch, elementwise_launch

    launched = list[Launched]()
    dtype_of = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

    def note(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(Launched.of(kernel, arguments, constants))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype_of[dtype], requires_grad=True)

    with patch.object(elementwise_launch, "launch", note), patch.object(convolution_launch, "launch", note):
        outputs = [elementwise_launch.SwiGLU.apply(drawn(1, 32, 3072), drawn(1, 32, 3072))]
        for size, kinds in [(128, ("gate",)), *((size, ("", "sum")) for size in FUSED[dtype])]:
            for kind in kinds:
                constants = {"KIND": kind, "CENTRED": kind == "", "ROUNDED": kind == "sum"}
                x, y, gain = drawn(1, 32, size), drawn(1, 32, size), torch.ones(size, requires_grad=True)
                outputs += _tuple(elementwise_launch.Norm.apply(x, y if kind else None, gain, 1e-6, constants))
        for size, turned in ((64, 64), (128, 128), (256, 64)):
            q, k, gains = drawn(1, 32, 16, size), drawn(1, 32, 8, size), [torch.ones(size, requires_grad=True)] * 2
            tables = torch.zeros(1, 32, 1, turned), torch.zeros(1, 32, 1, turned)
            outputs += elementwise_launch.Turn.apply(q, k, *gains, *tables, 1e-6, size == 256)
        parts, weights = [drawn(1, 32, size) for size in (64, 64, 128)], [drawn(size, 4) for size in (64, 64, 128)]
        outputs += convolution_launch.Convolution.apply(torch.zeros(1, 32, dtype=torch.int32), *parts, *weights)
        torch.autograd.backward(outputs, outputs)
    return launched


@contextmanager
def as_on(arch: str) -> Iterator[None]:
    """The package chooses launches as on such a card inside."""
    from titan_mi100.device import accelerator

    with (
        patch.object(accelerator, "is_cuda", lambda _: True),
        patch.object(accelerator, "is_rocm", lambda: arch.startswith("gfx")),
        patch.object(accelerator, "properties", lambda _: SimpleNamespace(gcnArchName=arch)),
    ):
        yield


def expert_launches(dtype: str, arch: str) -> list[Launched]:
    """The launches of experts_launch.py on such a card: of experts, of adapters of rank 8, and of both gradients."""
    import torch

    from titan_mi100.model.fused import experts_launch

    launched = list[Launched]()
    dtype_of = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    ends = torch.zeros(128, dtype=torch.int32)

    def note(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(Launched.of(kernel, arguments, constants))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype_of[dtype], device="meta")

    with (
        patch.object(experts_launch, "launch", note),
        as_on(arch),
    ):
        experts_launch.products(drawn(256, 2048), drawn(128 * 2048, 768), ends, True)
        for columns in (768, 8):
            experts_launch.products(drawn(256, 2048), drawn(128 * columns, 2048), ends, False)
        experts_launch.products(drawn(256, 8), drawn(128 * 8, 768), ends, True, 2.0, drawn(256, 768))
        for height in (2048, 8):
            experts_launch.sums(drawn(256, height), drawn(256, 768), ends)
    return launched


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def delta_launches(arch: str, head: int = 128, tokens: int = 64) -> list[Launched]:
    """The launches of delta_launch.py on this architecture, of a head's size and a chunk."""
    import torch

    from titan_mi100.model.fused import delta_launch, elementwise_launch

    launched = list[Launched]()

    def note(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(Launched.of(kernel, arguments, constants))

    ids, state = torch.zeros(1, 150, dtype=torch.int32), torch.zeros(1, 4, head, head)
    q, k, v = (torch.zeros(1, 150, n, head, dtype=torch.bfloat16, requires_grad=True) for n in (2, 2, 4))
    gates = [torch.zeros(1, 150, 4, requires_grad=True) for _ in range(2)]
    with (
        patch.object(delta_launch, "launch", note),
        patch.object(elementwise_launch, "launch", note),
        patch.object(delta_launch, "tile_of", lambda _: delta_launch.tile(arch)),
    ):
        outputs = delta_launch.DeltaRule.apply(tokens, ids, state, q, k, v, *gates)
        outputs += delta_launch.Gates.apply(
            *(torch.zeros(*sizes, 32, requires_grad=True) for sizes in ((1, 9), (1, 9), (), ()))
        )
        torch.autograd.backward(outputs, outputs)
    return launched


def compiled_launch(launched: Launched, arch: str) -> Any:
    from titan_mi100.model.fused import convolution_kernels, delta_kernels, elementwise_kernels, experts_kernels

    kernels = vars(elementwise_kernels) | vars(experts_kernels) | vars(delta_kernels) | vars(convolution_kernels)
    fixed = dict(launched.constants)
    kernel = kernels[launched.kernel]
    settings = {name: fixed.pop(name) for name in [*fixed] if name not in kernel.arg_names}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= zip(kernel.arg_names, (text.removesuffix("/16") for text in launched.types), strict=False)
    constants = {(place,): fixed[name] for place, name in enumerate(kernel.arg_names) if name in fixed}
    divisible = {(p,): [["tt.divisibility", 16]] for p, text in enumerate(launched.types) if text.endswith("/16")}
    return _compile(kernel, arch, signature, constants, divisible, settings)


def fused_reports(arch: str, dtypes: Iterable[str]) -> Iterator[FusedReport]:
    launches = [
        (dtype, launched) for dtype in dtypes for launched in [*fused_launches(dtype), *expert_launches(dtype, arch)]
    ]
    for dtype, launched in (*launches, *(("fp32", launched) for launched in delta_launches(arch))):
        registers, spilled, shared, _ = _read(compiled_launch(launched, arch), arch)
        shown = " ".join(f"{name}={constant}" for name, constant in launched.constants.items())
        yield FusedReport(arch, launched.kernel, dtype, shown, registers, spilled, shared)


# Of an element: both moments, the divisor, the weight. 24-bit weights have three more: decay, noise, both together.
_SUMS = (4, 7)


def _count_sums(code: Mapping[str, str]) -> int:
    """Sums of fp32 that are operations of their own, in a thread."""
    text = code.get("amdgcn") or code["ptx"]
    found = re.findall(r"v_(pk_)?(?:dual_)?(?:add|sub)_f32|(?:add|sub)\.rn\.f32(x2)?", text)
    return sum(2 if any(packed) else 1 for packed in found)


def _read(compiled: Any, arch: str) -> tuple[str, int, int, int]:
    return (_read_amd if arch.startswith("gfx") else _read_nvidia)(compiled, arch)


def _read_amd(compiled: Any, arch: str) -> tuple[str, int, int, int]:
    code = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s*(\d+)", code)[0]) if key in code else 0  # RDNA has no accumulation

    registers = f"{number('vgpr_count')} vector, of these {number('agpr_count')} accumulation"
    if arch == "gfx908":  # the two files are apart there, and counted apart
        registers = f"{number('vgpr_count')} vector, {number('agpr_count')} accumulation"
    return (
        registers,
        number("private_segment_fixed_size"),
        compiled.metadata.shared,
        len(re.findall("v_mfma|v_wmma", code)),
    )


def _read_nvidia(compiled: Any, arch: str) -> tuple[str, int, int, int]:
    import triton

    number = int(arch[2:])
    folder_of_ptxas = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = folder_of_ptxas / ("ptxas-blackwell" if number >= 100 else "ptxas")
    ptxas = ptxas if ptxas.exists() else folder_of_ptxas / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        suffix = "a" if number >= 90 else ""
        command = [ptxas, "-v", f"-arch=sm_{number}{suffix}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill", said)))
    products = len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", compiled.asm["ptx"]))
    return registers, spilled, compiled.metadata.shared, products


def set_linker() -> None:
    """Triton asks for AMD's own linker in /opt/rocm; any lld of LLVM 16 or later does."""
    names = ("ld.lld", *(f"ld.lld-{version}" for version in range(22, 15, -1)))
    found = os.environ.get("TRITON_HIP_LLD_PATH") or next(filter(None, map(shutil.which, names)), None)
    if found is None and not Path("/opt/rocm/llvm/bin/ld.lld").exists():
        raise UserError("no ld.lld for AMD's kernels; apt-get install lld-16, or set TRITON_HIP_LLD_PATH")
    if found is not None:
        os.environ["TRITON_HIP_LLD_PATH"] = found


def reports(architectures: Iterable[str], head_dims: Iterable[int], only_first: bool) -> Iterator[Report]:
    for arch, dtype, dim in itertools.product(architectures, DTYPES, head_dims):
        if (arch, 128 if dim <= 128 else 256, DTYPES[dtype]) in TABLES and (dtype != "fp32" or dim == 128):
            for kernel, tiles in zip(KERNELS, candidates(arch, dim, DTYPES[dtype]), strict=True):
                for tile in tiles[:1] if only_first else tiles:
                    yield compile_kernel(kernel, arch, dtype, dim, tile)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--head_dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--first", action="store_true", help="only the likeliest launch of each kernel, in 16 bits")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--store", action="store_true", help="write tests/assets/compiled-VERSION.csv")
    given = parser.parse_args()
    if any(arch.startswith("gfx") for arch in given.arch):
        set_linker()
    if not given.json:
        print("| arch | kernel | dtype | D | queries x keys, warps, stages | registers | spilled | shared | MFMA |")
        print("|---" * 9 + "|")
    problems, stored = [], []
    for report in reports(given.arch, given.head_dim, given.first):
        problems += report.problems()
        stored.append(report)
        print(json.dumps(asdict(report)) if given.json else _cells(report), flush=True)
    if given.store:
        _store(stored)
    if not given.json:
        print("\n| arch | state | weights | registers | spilled | shared | fused |\n" + "|---" * 7 + "|")
    for arch in given.arch:
        for state, master in (("8bit", "bf16_sr"), ("8bit", "24bit"), ("bf16", "bf16_sr"), ("fp32", "bf16_sr")):
            update = compile_update(arch, state, master)
            problems += update.problems()
            print(json.dumps(asdict(update)) if given.json else _row(asdict(update).values()), flush=True)
    if not given.json:
        print("\n| arch | kernel | dtype | ids | registers | spilled | shared |\n" + "|---" * 7 + "|")
    for arch, dtype, kernel in itertools.product(given.arch, ("bf16",) if given.first else DTYPES, HEAD_KERNELS):
        head = compile_head(arch, kernel[0], dtype, kernel[1])
        problems += head.problems()
        print(json.dumps(asdict(head)) if given.json else _row(asdict(head).values()), flush=True)
    if not given.json:
        print("\n| arch | kernel | dtype | constants | registers | spilled | shared |\n" + "|---" * 7 + "|")
    for arch in given.arch:
        for fused in fused_reports(arch, ["bf16"] if given.first else FUSED):
            problems += fused.problems()
            print(json.dumps(asdict(fused)) if given.json else _row(asdict(fused).values()), flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _store(found: Iterable[Report]) -> None:
    import triton

    header = f"arch,kernel,dtype,head_dim,tile,registers,spilled,shared,matrix_instructions,{date.today()}"
    lines = [
        f"{r.arch},{r.kernel},{r.dtype},{r.head_dim},{r.tile},{r.registers.replace(',', ' +')},{r.spilled},{r.shared},"
        f"{r.matrix_instructions}"
        for r in found
    ]
    path = Path(__file__).parent / f"assets/compiled-{triton.__version__}.csv"
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _cells(report: Report) -> str:
    q, k, warps, stages, parts = report.tile
    launch = f"{q} x {k}, {warps}, {stages}" + (", in two" if parts == 2 else "")
    cells = (report.arch, report.kernel, report.dtype, report.head_dim, launch, report.registers, report.spilled,
             report.shared, report.matrix_instructions)  # fmt: skip
    return _row(cells)


if __name__ == "__main__":
    sys.exit(exit_code(main))
