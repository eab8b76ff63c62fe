"""The parity table: every layout against one process, in fp64 and in fp32, on real processes over gloo.

    python tests/parity/table.py [--precision float64] [--layout "PP2 1F1B" ...] [--backend chunked] [--clip 0.05]
                                  [--output FOLDER]
    python tests/parity/table.py --resume

Each cell trains the same small model on the same packed rows for 8 steps with the trainer's own step, and is compared
with one process: every gradient of step 1, the loss and the norm before clipping of each step, the weights at the end
and the validation loss with them (in the column of losses), and the greedy answers to held-out prompts, token by token
(the share of prompts that are answered otherwise). Clipping is off and AdamW's eps large, because both hide a
wrong gradient scale. Rows hold several documents, and what is supervised in them is very uneven. With --resume each
layout saves a checkpoint after 4 steps and every layout goes on from each: the rest must be as if nothing had happened.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

# the folder that holds conftest, in place of this script's own
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conftest import torchrun
from gloo.job_parity import CONSTANT, keep_gradients, save, whole
from packed_rows import packed

from titan_mi100.config.layout import SCHEDULES, check_schedule
from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    Config,
    DraftHeadConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.data.prompts import held_out_prompts
from titan_mi100.model.fused.running import use
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.run.samples import answer_greedily
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.shapes.qwen3_5 import Qwen3_5Spec, every_fourth
from titan_mi100.shapes.qwen3_5_moe import Qwen3_5MoeSpec
from titan_mi100.shapes.qwen3_moe import Qwen3MoeSpec
from titan_mi100.trainer import StepResult
from titan_mi100.workshop.made_up import made_up

STEPS, ROWS, SEQ_LEN = 8, 16, 32  # ROWS per step
CHUNK = 8  # tokens that the delta rule computes at once: a row has several
LONG_ROW, LONG_CHUNK = 160, 64  # chunks of the published length, of which a row has two and a half
PROMPTS, ANSWER = 5, 6  # held-out prompts, and tokens of an answer
KINDS = ("gradients", "loss", "norm", "weights", "answers")
BARS = {"float64": {"gradients": 1e-9, "loss": 1e-9, "norm": 1e-9, "weights": 1e-8, "answers": 0.0}}
BARS["float32"] = {**dict.fromkeys(KINDS, 1e-5), "answers": 0.0}
# gradients are bf16 where weights are, and summed over microbatches and DDP's ranks in that; weights that differ so
# much may answer otherwise
LEAN_BARS = {"gradients": 1e-2, "loss": 1e-3, "norm": 3e-3, "weights": 1e-2, "answers": 1.0}
BARS["float16"] = {"gradients": 1e-2, "loss": 1e-3, "norm": 1e-2, "weights": 1e-3, "answers": 1.0}


@dataclass(frozen=True)
class Cell:
    """One run: a layout of so many processes, a model, the microbatches per step, the numbers' dtype."""

    layout: str
    processes: int
    parallelism: dict[str, Any]
    tied: bool
    accumulation: int
    precision: str = "float64"
    max_norm: float = 0.0
    steps: int = STEPS
    layers: int = 4
    save_to: str = ""  # run only the first half of the steps, then save a checkpoint there
    backend: str = "auto"  # of attention
    fused: tuple[str, ...] = ()  # kinds of fused kernels that run
    state: str = "fp32"  # of the optimizer
    master: str = "fp32"
    offload: str = "nothing"  # to the host's memory
    load_from: str = ""  # a checkpoint to go on from, for the second half
    family: str = "qwen3"
    seq_len: int = SEQ_LEN  # or LONG_ROW, with LONG_CHUNK
    pieces: int = 0  # tokens of a piece
    draft: str = "no"  # draft_head.train
    kv_heads: int = 2

    @property
    def is_lean(self) -> bool:
        return (self.state, self.master) != ("fp32", "fp32")

    @property
    def schedule(self) -> str:
        return self.parallelism.get("pipeline_parallel_schedule", "1F1B")


Result = tuple[Cell, dict[str, float] | str]  # the greatest relative differences, or why its schedule cannot run


def _pp(schedule: str = "1F1B", **others: Any) -> dict[str, Any]:
    return {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule, **others}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "FSDP2 x2": (2, {}),
    "FSDP2 x2, ZeRO-2": (2, {"zero_stage": 2}),
    "FSDP2 x2, ZeRO-1": (2, {"zero_stage": 1}),
    "DDP x2": (2, {"zero_stage": 0}),
    "HSDP 2x2": (4, {"data_parallel_replicate_degree": 2}),
    **{f"PP2 {name}": (2, _pp(name)) for name in SCHEDULES},
    "PP4 1F1B": (4, {"pipeline_parallel_degree": 4}),
    "PP2 x FSDP2": (4, _pp()),
    "PP2 x 2 replicas": (4, _pp(data_parallel_replicate_degree=2)),
    "TP2": (2, {"tensor_parallel_degree": 2}),
    "TP2 x FSDP2": (4, {"tensor_parallel_degree": 2}),
    "TP2 x PP2": (4, _pp(tensor_parallel_degree=2)),
    "TP2 x PP2 x FSDP2": (8, _pp(tensor_parallel_degree=2)),
    "PP2 x HSDP 2x2": (8, _pp(data_parallel_replicate_degree=2)),
    "CP2": (2, {"context_parallel_degree": 2}),
    "CP4": (4, {"context_parallel_degree": 4}),
    "CP2 x FSDP2": (4, {"context_parallel_degree": 2}),
    "CP2 x HSDP": (4, {"context_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
    "CP2 x TP2": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "CP2 x PP2": (4, _pp(context_parallel_degree=2)),
}


def cells(
    precision: str,
    max_norm: float,
    layouts: Sequence[str],
    accumulations: tuple[int, ...] = (1, 2, 4),
    family: str = "qwen3",
) -> list[Cell]:
    """Every cell of the table that is asked for: a pipeline's from as many microbatches as ranks, GPipe's from one."""
    found = []
    for name in layouts:
        processes, parallelism = LAYOUTS[name]
        for tied in (True, False):
            for accumulation in accumulations:
                cell = Cell(name, processes, parallelism, tied, accumulation, precision, max_norm, family=family)
                if cell.schedule == "GPipe" or accumulation >= parallelism.get("pipeline_parallel_degree", 1):
                    found.append(cell)
    return found


def spec_of(cell: Cell) -> ModelSpec:
    """Grouped heads; initial weights large enough that attention is not uniform; documents hold the padding token."""
    rest = {"rope_theta": 10_000.0, "initializer_range": 0.1, "pad_token_id": 208}
    size = 2 if cell.is_lean else 1  # wide enough for blocks of the optimizer's state
    mixture = {"moe_intermediate_size": 32 * size**2, "num_experts": 5, "num_experts_per_tok": 2}
    if cell.family.startswith("qwen3.5"):
        kinds, heads = every_fourth(cell.layers, 2), (4, cell.kv_heads, 4, 8)
        sizes = {"head_dim": 16, "linear_key_head_dim": 8 * size, "linear_value_head_dim": 8}
        dims = (320, 64 * size, 128 * size if cell.is_lean else 96, cell.layers, *heads, cell.tied, kinds)
        if cell.family == "qwen3.5_moe":
            return Qwen3_5MoeSpec(*dims, **sizes, **rest, **mixture, has_draft_head=cell.draft != "no")
        return Qwen3_5Spec(*dims, **sizes, **rest, has_draft_head=cell.draft != "no")
    sizes = (320, 64 * size, 128 * size if cell.is_lean else 96, cell.layers, 4, 2, 16, cell.tied)
    if cell.family == "qwen3_moe":
        return Qwen3MoeSpec(*sizes, **mixture, norm_topk_prob=cell.tied, mlp_only_layers=(1,), **rest)
    return Qwen3Spec(*sizes, **rest)


def dataset(seq_len: int, rows: int) -> PackedDataset:
    """Rows of random documents, among them rows and documents without any supervision."""
    random = np.random.default_rng(7)
    documents = []
    for row in range(rows):
        share = (0.0, 0.0, 0.9, 0.5, 0.1, 1.0, 0.3, 0.05)[row % 8]
        for length in ([32], [17, 15], [20, 8, 4], [16, 13])[row % 4]:
            ids = random.integers(0, 320, length * seq_len // SEQ_LEN).astype(np.int32)
            documents.append((ids, random.random(len(ids)) < share))
    return packed(documents, seq_len)


def config_of(cell: Cell) -> Config:
    parallelism = ParallelismConfig(**cell.parallelism)
    dp = Config(parallelism=parallelism).layout(cell.processes).dp_degree
    training = TrainingConfig(
        seq_len=cell.seq_len,
        local_batch_size=ROWS // (cell.accumulation * dp),
        gradient_accumulation_steps=cell.accumulation,
        steps=cell.steps,
        max_norm=cell.max_norm,
        mixed_precision_param=cell.precision,
    )
    return Config(
        model=ModelConfig(attention_backend=cell.backend),
        training=training,
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-3, state=cell.state, master=cell.master),
        lr_scheduler=CONSTANT,
        parallelism=parallelism,
        activation_checkpoint=ActivationCheckpointConfig(mode="none" if cell.tied else "full"),
        memory=MemoryConfig(
            offload=cell.offload,
            offload_activations=cell.offload != "nothing" and not cell.tied,
            piece_tokens=cell.pieces,
        ),
        draft_head=DraftHeadConfig(train=cell.draft, lr=2e-3),
    )


def run_cell(cell: Cell, world: World) -> dict[str, Any]:
    """This rank's record of the run, tensors whole. A collective."""
    checkpoint = Path(cell.load_from) if cell.load_from else None
    Qwen3_5Spec.chunk = CHUNK if cell.seq_len == SEQ_LEN else LONG_CHUNK
    data = made_up(dataset(cell.seq_len, 2 * ROWS), validation=dataset(cell.seq_len, ROWS))  # two steps' rows
    run = open_run(config_of(cell), world, spec=spec_of(cell), data=data, checkpoint=checkpoint)
    use(cell.fused)  # chosen on GPUs only
    gradients = keep_gradients(run)
    prompts = [prompt.ids for prompt in held_out_prompts([data.validation[0].rows], PROMPTS)]
    steps = []
    # halves; validation between them must change nothing, and with tied weights answers, too
    for is_last in (True,) if cell.save_to or cell.load_from else (False, True):
        steps += [run.step() for _ in range(cell.steps // 2)]
        held_out = [value for name, value in run.validation_losses()[0].items() if name != "draft_acceptance"]
        if is_last or cell.tied:
            answers = answer_greedily(run.model, prompts, [ANSWER] * PROMPTS, (), run.stream)
    if cell.save_to:
        save(run, Path(cell.save_to))
    return {
        "loss": [*(loss for step in steps for loss in (step.loss, *of_draft(step, "loss"))), *held_out],
        "norm": [norm for step in steps for norm in (step.grad_norm, *of_draft(step, "grad_norm"))],
        "answers": answers,
        "gradients": gradients,
        "weights": [(name, whole(p)) for name, p in run.model.named_parameters()],
    }


def of_draft(step: StepResult, name: str) -> list[float]:
    """What a step measures of a draft head that is trained along."""
    return [step.measures[f"draft_{name}"]] if f"draft_{name}" in step.measures else []


def compare(records: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """The greatest relative difference over all ranks of each kind in the reference: scalars, and tensors by norm."""
    worst = {}
    for kind, expected in reference.items():
        if kind in ("loss", "norm"):
            pairs = [pair for record in records for pair in zip(record[kind], expected, strict=True)]
            differences = [abs(a - b) / abs(b) for a, b in pairs]
        elif kind == "answers":
            differences = [np.mean([a != b for a, b in zip(r[kind], expected, strict=True)]) for r in records]
        else:
            exact = {name: tensor.double() for name, tensor in expected}
            found = [pair for record in records for pair in record[kind]]
            assert {name for name, _ in found} == set(exact), "a parameter is missing"
            sizes = {name: tensor.norm() or 1.0 for name, tensor in exact.items()}  # norms that are frozen are zero
            differences = [((x.double() - exact[name]).norm() / sizes[name]).item() for name, x in found]
        worst[kind] = float(np.max(differences))  # unlike max(), not a number where one of them is none
    return worst


def reference_of(cell: Cell) -> Cell:
    """The same on one process, all rows in one forward."""
    one = replace(cell, layout="one process", processes=1, parallelism={}, accumulation=1)
    return replace(one, save_to="", load_from="", backend="auto", fused=(), offload="nothing", pieces=0)


def by_processes(jobs: Sequence[Cell]) -> list[list[Cell]]:
    return [[cell for cell in jobs if cell.processes == n] for n in sorted({cell.processes for cell in jobs})]


def launch(jobs: list[Cell], folder: Path) -> list[list[dict[str, Any]]]:
    """Run cells of equal process count in one job; each one's records by rank.

    Raises:
        RuntimeError: the job failed; its output is the message.
        TimeoutError: it did not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save([asdict(cell) for cell in jobs], folder / "cells.pt")
    arguments = (__file__, "--worker", str(folder))
    job = torchrun(*arguments, processes=jobs[0].processes, check=False, timeout=900)
    if job.returncode:
        raise RuntimeError(job.stderr)
    by_rank = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(jobs[0].processes)]
    return [list(records) for records in zip(*by_rank, strict=True)]


def worker(folder: Path) -> None:
    world = distributed.init_distributed()
    records = [run_cell(Cell(**cell), world) for cell in torch.load(folder / "cells.pt", weights_only=False)]
    torch.save(records, folder / f"rank-{world.rank}.pt")
    distributed.exit_process(0)


def measure(jobs: Sequence[Cell], folder: Path) -> list[Result]:
    """Each cell's differences from one process, by number of processes; then the cells whose schedule cannot run."""
    degrees = [cell.parallelism.get("pipeline_parallel_degree", 1) for cell in jobs]
    asked = [check_schedule(cell.schedule, pp, cell.accumulation) for cell, pp in zip(jobs, degrees, strict=True)]
    refusals = [refused and str(refused) for refused in asked]
    references = {str(reference_of(cell)): reference_of(cell) for cell in jobs}
    exact = dict(zip(references, launch(list(references.values()), folder), strict=True))
    results: list[Result] = []
    for group in by_processes([cell for cell, why in zip(jobs, refusals, strict=True) if why is None]):
        for cell, records in zip(group, launch(group, folder), strict=True):
            (reference,) = exact[str(reference_of(cell))]
            if cell.load_from:
                each = 1 + (cell.draft == "along")
                later = {kind: reference[kind][each * cell.steps // 2 :] for kind in ("loss", "norm")}
                at_the_end = {kind: reference[kind] for kind in ("weights", "answers")}
                reference = {**later, **at_the_end}  # step 1 and its gradients were before
            results.append((cell, compare(records, reference)))
    return results + [(cell, why) for cell, why in zip(jobs, refusals, strict=True) if why is not None]


RESUMED = ("FSDP2 x2", "PP2 1F1B", "PP2 x FSDP2", "TP2", "DDP x2")


EVERY_PAIR = tuple(itertools.product(RESUMED, RESUMED))


def resume(
    precision: str,
    folder: Path,
    *,
    pairs: Sequence[tuple[str, str]] = EVERY_PAIR,
    models: Sequence[bool] = (True, False),
    **changes: Any,
) -> list[Result]:
    """The second layout of each pair goes on from the first one's checkpoint; compared with one process that never
    stopped. `changes` are fields of the cells."""
    both = cells(precision, 0.0, list(dict.fromkeys(itertools.chain(*pairs))), accumulations=(2,))
    both = [replace(cell, **changes) for cell in both if cell.tied in models]
    saved_by = {first for first, _ in pairs}
    saving = [replace(c, save_to=str(folder / str(number))) for number, c in enumerate(both) if c.layout in saved_by]
    for group in by_processes(saving):
        launch(group, folder)
    loading = [
        replace(cell, layout=f"{saved.layout} -> {cell.layout}", load_from=f"{saved.save_to}/step-{saved.steps // 2}")
        for saved in saving
        for cell in both
        if cell.tied == saved.tied and (saved.layout, cell.layout) in pairs
    ]
    return measure(loading, folder)


def table(results: Sequence[Result]) -> str:
    lines = [
        "| layout | processes | tied | GA | dtype "
        "| gradients of step 1 | loss | norm | weights after 8 steps | answers | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, found in results:
        start = f"| {cell.layout} | {cell.processes} | {'yes' if cell.tied else 'no'} | {cell.accumulation} "
        kinds = [cell.precision, *([cell.state, cell.master] if cell.is_lean else [])]
        kinds += [f"{cell.offload} on the host"] if cell.offload != "nothing" else []
        start += f"| {', '.join(kinds)} | "
        if isinstance(found, str):
            lines.append(start + f"refused: {found} | | | | | |")
        else:
            values = " | ".join(f"{found[kind]:.1e}" if kind in found else "" for kind in KINDS)
            lines.append(start + values + f" | {'ok' if holds(cell, found) else '**OVER**'} |")
    return "\n".join(lines) + "\n"


def holds(cell: Cell, found: dict[str, float]) -> bool:
    bars = LEAN_BARS if cell.is_lean else BARS[cell.precision]
    return all(value <= bars[kind] for kind, value in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="*", default=["float64", "float32"], choices=list(BARS))
    parser.add_argument("--layout", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--backend", default="auto", help="of attention; the one process has its own")
    parser.add_argument("--state", default="fp32", help="of the optimizer")
    parser.add_argument("--master", default="fp32", help="weights of the optimizer")
    parser.add_argument("--offload", default="nothing", help="to the host's memory")
    parser.add_argument("--clip", type=float, default=0.0, help="max_norm; 0: off")
    parser.add_argument("--resume", action="store_true", help="every layout's checkpoint into every other")
    parser.add_argument("--output", type=Path, help="folder for parity.md and parity.json")
    parser.add_argument("--family", default="qwen3", choices=("qwen3", "qwen3.5", "qwen3_moe", "qwen3.5_moe"))
    parser.add_argument("--draft", default="no", help="draft_head.train, of qwen3.5 and qwen3.5_moe")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if arguments.resume:
            results = [
                result
                for name in arguments.precision
                for result in resume(name, Path(folder) / name, family=arguments.family, draft=arguments.draft)
            ]
        else:
            found = [
                (name, arguments.clip, arguments.layout, (1, 2, 4), arguments.family) for name in arguments.precision
            ]
            jobs = [cell for each in found for cell in cells(*each)]
            chosen = {"backend": arguments.backend, "state": arguments.state, "master": arguments.master}
            chosen |= {"offload": arguments.offload, "draft": arguments.draft}
            results = measure([replace(cell, **chosen) for cell in jobs], Path(folder))
    text = f"torch {torch.__version__}, clipping {arguments.clip or 'off'}\n\n{table(results)}"
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "parity.md").write_text(text, encoding="utf-8")
        record = [{**asdict(cell), "result": found} for cell, found in results]
        (arguments.output / "parity.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(isinstance(found, str) or holds(cell, found) for cell, found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
