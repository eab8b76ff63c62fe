"""The scaling model beside published figures: steps of runs that cannot be started here, by rehearsal and arithmetic.

    python scripts/bench/scaling.py fit          the one efficiency, from one published figure
    python scripts/bench/scaling.py published    the other figures, predicted
    python scripts/bench/scaling.py curves       weak and strong scaling
    python scripts/bench/scaling.py strong       published strong scaling beside what the bubble alone gives

Llama-3 8B is no preset of ours: its shape below stands for it, with Qwen3's norms of queries and keys, which are no
matrix products. Selective recomputation is ours: each block but its attention. Every token is learned.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_mi100.config.layout import AXES, DATA_PARALLEL, Batch, Layout
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.planning.cards import DEVICES, Gpu
from titan_mi100.planning.scaling import bubble_share, exposed_seconds, reached
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import ModelSpec, parameter_shapes
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.rehearsal.session import rehearse
from titan_mi100.workshop.rehearsal.traffic import WORLD, Traffic, Work

CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
LLAMA_3_8B = Qwen3Spec(128_256, 4096, 14_336, 32, 32, 8, 128, False, rope_theta=500_000.0)


# Share of a device's peak rate that a step reaches while it computes. Fitted so that the modelled step of Llama-3 8B
# (FSDP2 over 64 MI250X GCDs, one row of 8,192 tokens each, selective recomputation) takes the published time: 1,333
# tokens/s per GCD. It is the only fitted number; `fit` computes it again.
EFFICIENCY = 0.4293


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go.

    Attributes:
        computing: matrix products and attention.
        bubble: waiting for other stages of a pipeline.
        sending: seconds of all transfers by axis, overlapped or not.
        exposed: seconds that are not overlapped, by axis; both data-parallel axes together are "dp".
    """

    computing: float
    bubble: float
    sending: Mapping[str, float]
    exposed: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.computing + self.bubble + sum(self.exposed.values())


def step_time(
    work: Work, gpu: Gpu, dtype: str, microbatches: int, bubble: float, efficiency: float = EFFICIENCY
) -> StepTime:
    """Time of one rank. Tensor and pipeline parallel wait for their transfers; FSDP2 overlaps them.

    Args:
        dtype: dtype of the computation; gpu.tflops must have it.
        bubble: see bubble_share.
        efficiency: see EFFICIENCY.
    """
    computing = work.flops / (gpu.tflops[dtype] * 1e12 * efficiency)
    sending, spread = _by_axis(work.traffic, gpu), _by_axis(work.by_microbatch, gpu)
    all_spread = microbatches * sum(spread[axis] for axis in DATA_PARALLEL)
    once = sum(sending[axis] for axis in DATA_PARALLEL) - all_spread
    waiting = computing * bubble / (1 - bubble)
    exposed = {axis: sending[axis] for axis in (*AXES, WORLD) if axis not in DATA_PARALLEL}
    exposed["dp"] = exposed_seconds(once, all_spread, computing + waiting, microbatches)
    return StepTime(computing, waiting, sending, exposed)


def step_of(
    schedule: str, layout: Layout, batch: Batch, dtype: str, works: Sequence[Work], gpu: Gpu,
    efficiency: float = EFFICIENCY,
) -> StepTime:  # fmt: skip
    """Time of a run's step: that of its slowest rank. Args: works: one for each pipeline stage."""
    microbatches = batch.gradient_accumulation_steps
    bubble = bubble_share(schedule, layout.pp, microbatches)
    times = [step_time(work, gpu, dtype, microbatches, bubble, efficiency) for work in works]
    return max(times, key=lambda time: time.seconds)


def _by_axis(traffic: Traffic, gpu: Gpu) -> dict[str, float]:
    found = dict.fromkeys((*AXES, WORLD), 0.0)
    for transfer, count in traffic.items():
        found[transfer.axis] += count * (transfer.ring_bytes / reached(transfer.group, gpu))
    return found


@dataclass(frozen=True)
class Run:
    """A run that is modelled.

    Attributes:
        config: a shipped one.
        settings: that replace its own, as on the command line.
        spec: the model's shape; None: the config's.
        published: tokens/s per device; 0: nothing is.
    """

    name: str
    config: str
    ranks: int
    device: str
    settings: tuple[str, ...] = ()
    spec: ModelSpec | None = None
    published: float = 0.0

    @functools.cached_property
    def loaded(self) -> Config:
        file = str(CONFIGS / f"{self.config}.toml")
        return load_config(["--job.config_file", file, *self.settings], self.ranks, with_files=False)

    @functools.cached_property
    def work(self) -> Work:
        """Of rank 0, for a pipeline of its first stage: its stages are balanced."""
        card = int(DEVICES[self.device].memory_gib) << 30
        return rehearse(Workload(self.loaded, self.ranks, self.spec), 0, card).work

    @property
    def tokens(self) -> float:
        """Of a step, for each device."""
        return self.loaded.batch(self.ranks).global_batch_size * self.loaded.training.seq_len / self.ranks

    def step(self, efficiency: float = EFFICIENCY) -> StepTime:
        config, schedule = self.loaded, self.loaded.parallelism.pipeline_parallel_schedule
        where = config.layout(self.ranks), config.batch(self.ranks), config.training.mixed_precision_param
        return step_of(schedule, *where, [self.work], DEVICES[self.device], efficiency)

    def mfu(self, rate: float) -> float:
        """6 FLOPs per token and parameter but the embedding's, attention uncut: as the 40% of the fitted figure."""
        spec, training = self.spec or self.loaded.spec(), self.loaded.training
        weights = sum(map(math.prod, parameter_shapes(spec).values())) - spec.vocab_size * spec.hidden_size
        attention = 12 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * training.seq_len
        peak = DEVICES[self.device].tflops[training.mixed_precision_param] * 1e12
        return rate * (6 * weights + attention) / peak


def settings(**values: int) -> tuple[str, ...]:
    keys = {
        "batch": "training.local_batch_size", "forwards": "training.gradient_accumulation_steps",
        "replicas": "parallelism.data_parallel_replicate_degree", "shards": "parallelism.data_parallel_shard_degree",
    }  # fmt: skip
    return tuple(word for name, value in values.items() for word in (f"--{keys[name]}", str(value)))


ONE_ROW = settings(batch=1, forwards=1)
FITTED = Run(
    "Llama-3 8B, FSDP2 over 64 MI250X GCDs, batch 1", "qwen3_8b_8nodes", 64, "mi250x", ONE_ROW, LLAMA_3_8B, 1333
)
PUBLISHED = (
    # 110M tokens in about 0.6 minutes
    Run(
        "8B, 20 x 32 x 8 GCDs, batch 21", "qwen3_8b_64nodes", 5120, "mi250x", settings(replicas=20),
        published=110_100_480 / 5120 / 36,
    ),
    Run("Llama-3 8B, FSDP2 over 64 A100s, batch 1", "qwen3_8b_8nodes", 64, "a100", ONE_ROW, LLAMA_3_8B, 2900),
)  # fmt: skip


def fitted_efficiency() -> float:
    """At which the modelled rate is the published one, by bisection."""
    low, high = 0.01, 1.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        too_slow = FITTED.tokens / FITTED.step(middle).seconds < FITTED.published
        low, high = (middle, high) if too_slow else (low, middle)
    return low


def lines_of(runs: tuple[Run, ...]) -> Iterator[str]:
    heads = f"{'s/step':>8}{'computing':>10}{'exposed':>9}{'tok/s':>8}{'MFU':>6}{'published':>10}{'MFU':>6}{'error':>7}"
    yield f"{'':<50}{heads}"
    for run in runs:
        step = run.step()
        rate = run.tokens / step.seconds
        line = (
            f"{run.name:<50}{step.seconds:>8.2f}{step.computing:>10.2f}{sum(step.exposed.values()):>9.2f}{rate:>8.0f}"
        )
        line += f"{run.mfu(rate):>6.1%}"
        if run.published:
            off = rate / run.published - 1
            line += f"{run.published:>10.0f}{run.mfu(run.published):>6.1%}{off:>+7.1%}"
        yield line


def curves() -> Iterator[str]:
    """Efficiencies against the smallest run of each series."""
    flat, piped = "qwen3_8b_64nodes", "qwen3_32b_pp4_tp8_16nodes"
    series = {  # of so many rows a step in all of "strong": 1,344 and 256
        "weak": [(256 * n, flat, settings(replicas=n)) for n in (1, 2, 10, 20)],
        "strong": [(256 * n, flat, settings(replicas=n, batch=3, forwards=14 // n)) for n in (1, 2, 7, 14)],
        "strong, PP4": [(32 * n, piped, settings(shards=n, forwards=256 // n)) for n in (2, 4, 16, 64)],
    }
    for name, runs in series.items():
        first = 0.0
        for ranks, config, changed in runs:
            run = Run(name, config, ranks, "mi250x", changed)
            step = run.step()
            rate = run.tokens / step.seconds
            first = first or rate
            exposed = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in step.exposed.items() if seconds > 0.005)
            yield (
                f"{name:<12}{ranks:>6} ranks{step.seconds:>9.2f} s/step{rate:>7.0f} tok/s{rate / first:>7.1%}  "
                f"bubble {step.bubble:.2f}, exposed: {exposed}"
            )


STRONG = (("175B", 175e9, 1024, 0.899), ("1T", 1e12, 3072, 0.8705))  # arXiv 2312.12705: parameters, ranks, efficiency
MICROBATCHES = (64, 256, 1024)  # of each pipeline in the largest run; not published


def strong() -> Iterator[str]:
    """Rows of a table: strong scaling from one pipeline to the published number of ranks.

    The layout is not published; assumed are tensor parallel over a node, and as many stages, a power of two, as keep
    AdamW's 16 bytes a parameter within half of a device. Of a fixed batch, each of `replicas` pipelines gets a part, so
    its bubble grows. Everything else of planning/scaling.py shrinks with the number of ranks.
    """
    card = DEVICES["mi250x"]
    yield f"| run | published | {' | '.join(f'{m:,} microbatches' for m in MICROBATCHES)} | published figure at |"
    for name, parameters, ranks, published in STRONG:
        half = card.memory_gib * 2**30 / 2
        stages = 1 << math.ceil(math.log2(16 * parameters / (card.per_node * half)))
        replicas = ranks // (card.per_node * stages)

        def efficiency(microbatches: int, stages: int = stages, replicas: int = replicas) -> float:
            one, all_ranks = (1 - bubble_share("1F1B", stages, m) for m in (microbatches * replicas, microbatches))
            return all_ranks / one

        least = next(m for m in itertools.count(stages) if efficiency(m) >= published)
        modelled = " | ".join(f"{efficiency(m):.1%}" for m in MICROBATCHES)
        run = f"{name}: {card.per_node * stages:,} to {ranks:,} ranks, PP{stages} x TP{card.per_node}"
        yield f"| {run} | {100 * published:.4g}% | {modelled} | {least:,} ({least * replicas:,} rows a step) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("fit", "published", "curves", "strong"))
    what = parser.parse_args().what
    if what == "fit":
        print(f"efficiency {fitted_efficiency():.4f}; planning/scaling.py has {EFFICIENCY}")
    lines = {"fit": lambda: lines_of((FITTED,)), "published": lambda: lines_of(PUBLISHED)}
    for line in (lines | {"curves": curves, "strong": strong})[what]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
