"""The attention kernels: each tile's values against fp64, and times beside other backends."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents, Shape
from titan_mi100.attention.choice import choose
from titan_mi100.attention.launches import Candidates, Launch, Tile, candidates
from titan_mi100.attention.torch_backends import Chunked
from titan_mi100.attention.trial import Reference, difference, forward_backward, in_dtype, inputs, random_documents
from titan_mi100.config.kernels import AUTO, KERNELS, OWN
from titan_mi100.config.settings import Config
from titan_mi100.data.prepare import cache_folder
from titan_mi100.device import accelerator
from titan_mi100.device.accelerator import kind
from titan_mi100.errors import UserError
from titan_mi100.parallel.distributed import device_name
from titan_mi100.workshop.measure.products import samples

# Tiles that compile for the architecture without spilled registers, and that no table has yet: (architecture, head
# size) -> for the output, for the gradient of q, for those of k and v. Those that win belong into launches.TABLES.
UNTRIED = {
    ("sm90", 128): "128.128.8.2 64.128.4.2 | 128.64.8.3 128.32.8.3 | 32.128.8.2 32.128.8.3 64.128.8.1",
    ("sm90", 256): " | 64.64.8.2 | 32.64.8.1 64.64.8.1",
}
_SHORT = 400  # tokens of a document, about as in chats
_FUSED = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}  # of PyTorch


def device_and_arch() -> tuple[torch.device, str]:
    device = torch.device(kind())
    return device, device_name(device)[1].split(":")[0]


def tiles_of(dim: int, dtype: str) -> Candidates:
    """The tiles of the table, and those that are untried. Raises UserError: there is no Triton, or no tile."""
    try:
        import triton  # noqa: F401  # the kernels need it
    except ImportError as error:
        raise UserError(str(error)) from None
    arch, size = device_and_arch()[1], getattr(torch, dtype).itemsize
    if not (accelerator.count() or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError("Triton's kernels need a GPU, or TRITON_INTERPRET=1")
    known = candidates(arch, dim, size)
    texts = UNTRIED.get((arch, dim), " | | ").split("|") if size == 2 else [""] * 3
    more = [[Tile(*map(int, tile.split("."))) for tile in text.split()] for text in texts]
    return Candidates(*((*table, *tiles) for table, tiles in zip(known, more, strict=True)))


def launches_of(tiles: Candidates) -> Iterator[tuple[str, Tile, Launch]]:
    """Each kernel's each tile, with the others' first: kernel, tile, launch."""
    for kernel, some in tiles._asdict().items():
        for tile in some:
            yield kernel, tile, tiles.first()._replace(**{kernel: tile})


def warm_up(values: list[list[Any]]) -> dict[str, Any]:
    """Compile the launches that the check uses into Triton's cache, in many processes at once.

    Args:
        values: heads, key heads, head size, dtype.
    """
    if not accelerator.count():
        raise UserError("no GPU: nothing is compiled")
    jobs = [(heads // kv_heads, dim, dtype, str(launch)) for heads, kv_heads, dim, dtype in values
            for launch in {launch for *_, launch in launches_of(tiles_of(dim, dtype))}]  # fmt: skip
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=get_context("spawn")) as pool:
        refused = list(filter(None, pool.map(_compile, jobs)))
    return {"lines": refused, "problem": "", "said": f"{len(jobs)} launches of three kernels, {len(refused)} refused"}


def _compile(job: tuple[int, int, str, str]) -> str:
    """Compile a launch; "" or why it is refused."""
    group, dim, dtype, launch = job
    try:
        shape = Shape(1, 256, group, 1, dim, dtype)
        backend = make_backend(OWN, "", "", launch)
        forward_backward(backend, inputs(shape, torch.device(kind())), Documents(1, 256, (100, 156)))
    except Exception as error:
        return f"head size {dim}, {dtype}, {launch}: {(str(error).splitlines() or [type(error).__name__])[0][:150]}"
    return ""


def values(heads: int, kv_heads: int, dim: int, dtype: str, seq: int) -> dict[str, Any]:
    """Every launch as the product's trial judges it, and its errors against explicit attention in fp64."""
    device, _ = device_and_arch()
    tiles, shape = tiles_of(dim, dtype), Shape(1, seq, heads, kv_heads, dim, dtype)
    documents, tensors = random_documents(shape), inputs(shape, device)
    exact = forward_backward(Chunked(), in_dtype(tensors, torch.float64), documents)
    explicit = [*map(difference, forward_backward(Chunked(), tensors, documents), exact)]
    reference, errors, problems = Reference(tensors, documents), dict[str, list[float]](), []
    launches = sorted({str(launch) for *_, launch in launches_of(tiles)})
    for launch in launches:
        try:
            backend = make_backend(OWN, "", "", launch)
            trial = reference.judge(backend)
            errors[launch] = [*map(difference, forward_backward(backend, tensors, documents), exact)]
            problem = trial.refused or ("" if trial.repeatable else "equal calls give other bits")
        except Exception as error:
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        problems += [f"{launch}: {problem}"] if problem else []
    worst = [max(column) for column in zip(*errors.values(), strict=True)]
    words = f"{len(launches) - len(problems)} of {len(launches)} launches are right; largest error of output and "
    words += f"gradients of q, k, v {_numbers(worst)} (explicit attention: {_numbers(explicit)})"
    first = problems[0] if problems else ""
    return {"errors": errors, "explicit": explicit, "lines": problems, "problem": first, "said": words}


def _numbers(errors: list[float]) -> str:
    return " ".join(f"{error:.1e}" for error in errors)


def speed(heads: int, kv_heads: int, dim: int, seq: int) -> dict[str, Any]:
    """Milliseconds of each tile, then of all backends, on one document and on short ones. The fastest launch is noted
    for the training steps.
    """
    device, arch = device_and_arch()
    shape = Shape(1, seq, heads, kv_heads, dim, "bfloat16" if accelerator.count() else "float32")
    tensors, lines, times = inputs(shape, device), list[str](), dict[str, list[float]]()
    long, short = Documents(1, seq, (seq,)), Documents(1, seq, _cut(seq, min(_SHORT, seq // 3)))
    launch = ""
    try:
        for kernel, tile, one in launches_of(tiles := tiles_of(dim, shape.dtype)):
            times[f"{kernel} {tile}"] = _passes(make_backend(OWN, "", arch, str(one)), tensors, long)
        best = [min(some, key=lambda tile: sum(times[f"{kernel} {tile}"])) for kernel, some in tiles._asdict().items()]
        launch = str(Launch(*best))
        (Path(os.environ["TITAN_GPU_CHECK"]) / f"{OWN}-{dim}").write_text(launch)
        lines.append("ms of forward + backward by tile: " + ", ".join(f"{n} {sum(t):.2f}" for n, t in times.items()))
    except UserError as error:
        lines.append(f"{OWN}: {error}")
    for words, documents in (("one document", long), (f"documents of {short.lengths[0]}", short)):
        measured = dict[str, list[float]]()
        for name in KERNELS:
            try:
                backend = make_backend(name, "", arch, launch if name == OWN else "")
                measured[name] = _passes(backend, tensors, documents)
            except Exception as error:
                lines.append(f"{words}, {name}: {(str(error).splitlines() or [type(error).__name__])[0][:120]}")
        if documents is long and accelerator.is_cuda(device):
            measured |= dict(_fused(tensors))
        products = 4 * heads * dim * sum(n * (n + 1) // 2 for n in documents.lengths) / 1e9  # forward's, in GFLOP
        each = ", ".join(f"{name} {a:.2f} + {b:.2f} ms ({products / a:.0f} and {2.5 * products / b:.0f} TFLOP/s)"
                         for name, (a, b) in measured.items())  # fmt: skip
        lines.append(f"{words}: {each}")
        times |= {f"{words}, {name}": both for name, both in measured.items()}
    return {"times": times, "launch": launch, "lines": lines, "problem": "", "said": f"fastest launch: {launch or '-'}"}


def _cut(seq: int, length: int) -> tuple[int, ...]:
    """Lengths of documents that fill a row."""
    return (*[length] * (seq // length), *([seq % length] if seq % length else []))


def _passes(backend: Any, tensors: list[torch.Tensor], documents: Documents) -> list[float]:
    """Median milliseconds of forward and of backward."""
    *leaves, grad = tensors
    prepared = backend.prepare(documents, grad.device)
    return _forward_backward(lambda: backend(*leaves, prepared), leaves, grad)


def _forward_backward(call: Any, leaves: list[torch.Tensor], grad: torch.Tensor) -> list[float]:
    output = call()
    forward = samples(call, grad.device)
    backward = samples(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True), grad.device)
    return [1000 * median(forward), 1000 * median(backward)]


def _fused(tensors: list[torch.Tensor]) -> Iterator[tuple[str, list[float]]]:
    """PyTorch's fused kernels as they are, on one document, whether their bits repeat or not."""
    *leaves, grad = (x.detach().transpose(1, 2).contiguous() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    for name, kernel in _FUSED.items():
        with sdpa_kernel(kernel):
            try:
                yield (
                    f"PyTorch's {name}",
                    _forward_backward(
                        lambda: F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True), leaves, grad
                    ),
                )
            except RuntimeError:  # it does not compute this shape here
                continue


def automatic(tiny: bool) -> dict[str, Any]:
    """What `attention_backend = "auto"` decides for Qwen3-0.6B, as a user's first run does."""
    device, arch = device_and_arch()
    shape = Shape(1, 128, 4, 2, 32, "float32") if tiny else Shape(1, 8192, 16, 8, 128, "bfloat16")
    choice, lines = choose(AUTO, shape, device, arch, cache_folder(Config().data))
    if choice.launch:
        (Path(os.environ["TITAN_GPU_CHECK"]) / f"{OWN}-{shape.head_dim}").write_text(choice.launch)
    said = f"{choice.name} ({choice.why}) {choice.launch}".rstrip()
    return {"choice": choice.name, "launch": choice.launch, "lines": lines, "problem": "", "said": said}
