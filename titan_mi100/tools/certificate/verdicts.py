"""The verdicts of a certificate: a pure function of its raw numbers. All limits are here. Imports no torch."""

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from titan_mi100.planning.hardware import find_gpu
from titan_mi100.tools.certificate.form import (
    NOT_RUN,
    UNAVAILABLE,
    Bandwidth,
    Collective,
    Gemm,
    Losses,
    Machine,
    MeasuredAttention,
    Parity,
    Part,
    Steps,
    Verdict,
)
from titan_mi100.wording import bytes_in_words

PASS, FAIL = "pass", "fail"
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
# Limits for errors relative to the largest element. The error of an attention backend may be _SLACK times the error of
# explicit attention in the same dtype. That error counts as at most _ROUNDINGS roundings; otherwise a device with wrong
# matrix products would raise its own limit.
_SLACK, _ROUNDINGS = 4.0, 8.0
_PARITY = 1e-5  # relative difference of the losses of two layouts in fp32; ten times as much for gradient norms
_ABOVE_PEAK = 1.05  # a rate above the data sheet's by this factor means that the time is wrong
_WIDER = 1.1  # a wider dtype is recommended if it is slower by at most this factor
_IN_ORDER = ("float32", "bfloat16", "float16")  # order of preference: fp32 needs no master weights, bf16 no loss scale


def verdicts(machine: Machine, parts: Sequence[Part]) -> list[Verdict]:
    """One verdict per part, then the conclusions."""
    return [*(_of_part(machine, part) for part in parts), *_conclusions(parts)]


def all_pass(found: Sequence[Verdict]) -> bool:
    """Whether no part failed, and none was skipped because the time ended."""
    return not {verdict.verdict for verdict in found} & {FAIL, NOT_RUN}


def _of_part(machine: Machine, part: Part) -> Verdict:
    found = part.found
    if part.status in (UNAVAILABLE, NOT_RUN):
        return Verdict(part.name, part.status, part.said)
    if found is None:
        return Verdict(part.name, FAIL, f"{part.status}: {part.said}")
    problem, said = {
        MeasuredAttention: _attention,
        Gemm: lambda found: _gemm(found, _peak(machine, found.dtype)),
        Bandwidth: _bandwidth,
        Collective: _collective,
        Parity: lambda found: _parity(found.runs),
        Steps: lambda found: _steps(machine, found),
    }[type(found)](found)
    return Verdict(part.name, FAIL if problem else PASS, "; ".join(filter(None, (problem, said))))


Judged = tuple[str, str]  # (the problem, or ""; the numbers as text)


def _attention(found: MeasuredAttention) -> Judged:
    epsilon, problems = EPSILON[found.dtype], []
    worst: dict[str, tuple[float, float, float]] = {}  # tensor -> (error / limit, error, limit)
    for layout in found.layouts:
        for one in layout.errors:
            usual = _ROUNDINGS * epsilon if one.usual is None else one.usual / one.scale
            limit = _SLACK * min(max(usual, epsilon), _ROUNDINGS * epsilon)
            error = math.inf if one.error is None else one.error / one.scale
            worst[one.tensor] = max(worst.get(one.tensor, (0.0, 0.0, 0.0)), (error / limit, error, limit))
        if layout.others is None or layout.others > (0.0 if found.repeatable else _SLACK * epsilon):
            problems = ["what another document holds changes the results"]
    for tensor, (share, error, limit) in worst.items():
        if share > 1:
            problems.append(f"{tensor} is wrong by {error:.1e} of its largest element (at most {limit:.1e})")
    _, error, limit = max(worst.values())
    time = statistics.median(found.ms)
    said = f"error {error:.1e} (at most {limit:.1e}), {time:.3g} ms forward and backward, {found.kernel}"
    repeated = "" if found.repeatable else "; equal calls give other bits, so auto does not take it"
    return "; ".join(problems), said + repeated


def _gemm(found: Gemm, peak: float | None = None) -> Judged:
    """Args:
    peak: TFLOP/s of the data sheet; None: not known.
    """
    problems = []
    for product in found.products:
        # rounding of the result, and of fp32 sums of k products (random walk: sqrt(k))
        limit = 2 * (EPSILON[found.dtype] + EPSILON["float32"] * math.sqrt(product.k))
        error = math.inf if product.error is None else product.error / product.scale
        where = f"{product.name} ({product.m} x {product.k} x {product.n})"
        if error > limit:
            problems.append(f"{where} is wrong by {error:.1e} of its largest element (at most {limit:.1e})")
        rate = 2e-12 * product.m * product.k * product.n / statistics.median(product.seconds)
        if peak and rate > _ABOVE_PEAK * peak:
            problems.append(f"{where}: {rate:.0f} TFLOP/s, above the data sheet's {peak:g}: its time is wrong")
    rate = step_rate(found)
    share = f", {rate / peak:.0%} of the data sheet's {peak:g}" if peak else ""
    return "; ".join(problems), f"{rate:.3g} TFLOP/s for all products of a step{share}"


def step_rate(found: Gemm) -> float:
    """TFLOP/s over all products of a step."""
    flops = sum(2.0 * p.m * p.k * p.n * p.count for p in found.products)
    return flops / sum(statistics.median(p.seconds) * p.count for p in found.products) / 1e12


def _bandwidth(found: Bandwidth) -> Judged:
    copy, triad = (statistics.median(times) for times in (found.copy, found.triad))
    said = f"copy {2 * found.size / copy / 1e9:.4g} GB/s, triad {3 * found.size / triad / 1e9:.4g} GB/s"
    return _wrong(found.wrong), f"{said}, arrays of {bytes_in_words(found.size)}"


def _wrong(count: int) -> str:
    return f"{count:,} elements are wrong" if count else ""


def bus_gbs(operation: str, size: int, ranks: int, seconds: Sequence[float]) -> float:
    """Bus bandwidth in GB/s, by the formulas of nccl-tests' PERFORMANCE.md."""
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "send_recv": 1.0}.get(operation, (ranks - 1) / ranks)
    return share * size / statistics.median(seconds) / 1e9


def _collective(found: Collective) -> Judged:
    said = []
    for size, same in groupby(found.transfers, lambda transfer: transfer.size):
        rates = [bus_gbs(found.operation, size, len(t.ranks), t.seconds) for t in same]
        ends = sorted({f"{rate:.3g}" for rate in (min(rates), max(rates))}, key=float)
        said.append(f"{bytes_in_words(size)}: {' to '.join(ends)} GB/s")
    bad = [f"ranks {t.ranks}, {bytes_in_words(t.size)}: {_wrong(t.wrong)}" for t in found.transfers if t.wrong]
    return "; ".join(bad), "bus bandwidth " + ", ".join(said)


def _parity(runs: Sequence[Losses]) -> Judged:
    """Compare all runs with the first one."""
    first, problems, worst = runs[0], [], 0.0
    for run in runs:
        for what, ours, theirs, limit in (
            ("loss", run.losses, first.losses, _PARITY),
            ("gradient norm", run.norms, first.norms, 10 * _PARITY),
        ):
            pairs = [*zip(ours, theirs, strict=False)]
            apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs if a is not None and b is not None]
            off = max(apart) if len(apart) == len(ours) == len(theirs) else math.inf
            worst = max(worst, off)
            if off > limit:
                names = f"{run.layout} on {run.ranks} and {first.layout} on {first.ranks}"
                problems.append(f"{what} of {names} differs by {off:.1e} (at most {limit:.0e})")
    names = ", ".join(f"{run.layout} on {run.ranks}" for run in runs)
    return "; ".join(problems), f"{names}: {len(first.losses)} steps, largest difference {worst:.1e}"


def _steps(machine: Machine, found: Steps) -> Judged:
    problems, peak = [], _peak(machine, found.dtype)
    if None in found.losses:
        problems.append("the loss is not finite")
    seconds = statistics.median(found.seconds)
    said = [f"{1000 * seconds:,.0f} ms a step, {found.tokens / seconds:,.0f} tokens/s"]
    if found.plan.seconds:
        said.append(f"planned {1000 * found.plan.seconds:,.0f} ms ({seconds / found.plan.seconds - 1:+.0%})")
    if peak:
        utilisation = found.flops / seconds / (peak * 1e12 * found.ranks)
        said.append(f"mfu {utilisation:.1%}")
        if utilisation > 1:
            problems.append("faster than the data sheet allows: its time is wrong")
    low, high = found.plan.least / 2**30, found.plan.most / 2**30
    memory = f"{found.peak_memory_gib:.2f} GiB at the peak"
    if machine.memory:
        memory += f", planned {low:.2f} to {high:.2f}"
        if found.peak_memory_gib > high:
            problems.append(f"takes {found.peak_memory_gib:.2f} GiB, more than the {high:.2f} that were planned")
    said += [memory, f"{max(found.comm_ms):,.0f} ms in collectives, {max(found.exposed_ms):,.0f} exposed"]
    return "; ".join(problems), ", ".join(said)


def _peak(machine: Machine, dtype: str) -> float | None:
    """TFLOP/s of the data sheet; None: not known."""
    gpu = find_gpu(machine.arch, machine.compute_units)
    return gpu.tflops.get(dtype) if gpu else None


def ranking(parts: Sequence[Part], dtype: str, head_dim: int = 0) -> list[MeasuredAttention]:
    """The attention backends that a run may use in a dtype, the fastest first.

    A backend must be correct, repeatable, and must not compute the full (seq, seq) scores.

    Args:
        head_dim: the model's head size; 0: any. If several shapes fit, the first measured one counts.
    """
    found = [
        part.found
        for part in parts
        if isinstance(part.found, MeasuredAttention) and part.found.dtype == dtype and not _attention(part.found)[0]
    ]
    found = [one for one in found if one.repeatable and not one.explicit]
    shapes = [one for one in found if head_dim in (0, one.head_dim)]
    same = [one for one in shapes if (one.heads, one.head_dim) == (shapes[0].heads, shapes[0].head_dim)]
    return sorted(same, key=lambda one: statistics.median(one.ms))


def rates(parts: Sequence[Part]) -> dict[str, float]:
    """Dtype -> TFLOP/s of the first model's products, in order of preference, without dtypes with wrong products."""
    gemms = [part.found for part in parts if isinstance(part.found, Gemm) and not part.is_of_one_card]
    first = [one for one in gemms if one.model == gemms[0].model]
    right = {one.dtype: step_rate(one) for one in first if not _gemm(one)[0]}
    return {dtype: right[dtype] for dtype in _IN_ORDER if dtype in right}


def best_dtype(parts: Sequence[Part]) -> str:
    """The first dtype in order of preference that is at most 10% slower than the fastest; "": none was measured."""
    found = rates(parts)
    return next((dtype for dtype, rate in found.items() if rate * _WIDER >= max(found.values())), "")


def _conclusions(parts: Sequence[Part]) -> list[Verdict]:
    found = []
    names = [part.name.split("/") for part in parts if part.kind == "attention" and part.status != NOT_RUN]
    for dtype in dict.fromkeys(name[-1] for name in names):
        ranked = ranking(parts, dtype)
        times = ", ".join(f"{one.backend} {statistics.median(one.ms):.3g} ms" for one in ranked)
        said = f"the fastest that is right: {times}" if ranked else "no backend is right"
        found.append(Verdict(f"conclusion/attention/{dtype}", PASS if ranked else FAIL, said))
    if dtype := best_dtype(parts):
        measured = ", ".join(f"{name} {rate:.3g} TFLOP/s" for name, rate in rates(parts).items())
        said = f'training.mixed_precision_param = "{dtype}" is recommended; measured: {measured}'
        found.append(Verdict("conclusion/dtype", PASS, said))
    runs = [run for part in parts if isinstance(part.found, Parity) for run in part.found.runs]
    if len({run.ranks for run in runs}) > 1:
        problem, said = _parity(runs)
        found.append(Verdict("conclusion/parity", FAIL if problem else PASS, problem or said))
    return found
