"""Rehearse a run of many ranks on this machine: its memory, FLOPs and collectives, without GPUs, weights or data."""

import argparse
import json
import math
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import settings_parser
from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.load import load_config
from titan_mi100.errors import UserError
from titan_mi100.log import log, setup_logging
from titan_mi100.planning.cards import Gpu
from titan_mi100.planning.device import NAMES, find_card, positive, size_gib
from titan_mi100.planning.memory import CATEGORIES, with_overhead
from titan_mi100.planning.plan import GIB, make_plan, remedy
from titan_mi100.planning.workload import Workload
from titan_mi100.wording import bytes_in_words, plural
from titan_mi100.workshop.rehearsal.traffic import by_axis

if TYPE_CHECKING:
    from titan_mi100.workshop.rehearsal.session import Rehearsed

_OF_THE_PLAN = ("--gpus", "--search", "--write", "--tokens")  # options of `plan` alone
_OUT_OF_MEMORY = 6  # exit code, see docs/DESIGN.md


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):  # also if the number of ranks is missing
        arguments = ["--help"]
    return tool.exit_code(lambda: _rehearse(*_parser().parse_known_args(arguments)))


def _rehearse(options: argparse.Namespace, settings: Sequence[str]) -> int:
    setup_logging(0)
    log.setLevel("WARNING")  # otherwise each rehearsed rank logs the run's layout
    started, ranks = time.perf_counter(), options.rehearse
    if other := next((word for word in settings if word.partition("=")[0] in _OF_THE_PLAN), ""):
        raise UserError(f"{other} does not go with --rehearse N, which gives the devices; leave one of them out")
    gpu, card = find_card(options.device, options.memory, "mi250x")
    try:
        config = load_config(settings, ranks, with_files=False)
    except UserError as error:
        raise UserError(re.sub(r"(\./run_train\.sh )?--nproc_per_node", "--rehearse", str(error))) from None
    # what would be counted wrongly
    if config.compile.enable:
        raise UserError("compiled code cannot be rehearsed; add --compile.enable false (the collectives are the same)")
    if config.parallelism.powersgd_rank:
        raise UserError("PowerSGD's compressed steps cannot be rehearsed; set parallelism.powersgd_rank to 0")
    if outside := [rank for rank in options.ranks if rank >= ranks]:
        raise UserError(f"--ranks {outside[0]} does not exist; the ranks are 0 to {ranks - 1}")
    from titan_mi100.workshop.rehearsal.counter import ranks_of_stages  # imported after the checks: torch takes seconds
    from titan_mi100.workshop.rehearsal.saved import as_code, saved_by_kind
    from titan_mi100.workshop.rehearsal.session import rehearse

    if options.saved:
        by_kind = saved_by_kind(config.spec())
        as_dicts = {kind: [tensor._asdict() for tensor in tensors] for kind, tensors in by_kind.items()}
        print(json.dumps(as_dicts) if options.json else "\n".join(as_code(config.spec(), by_kind)))
        return 0
    workload = Workload.of(config, ranks)
    rehearsals = [rehearse(workload, rank, card) for rank in options.ranks or ranks_of_stages(workload.layout)]
    most = with_overhead(max(rehearsed.memory.peak for rehearsed in rehearsals))
    if options.json:
        print(json.dumps(_as_json(rehearsals, gpu, card, most)))
    else:
        lines = _lines(workload.layout, workload.batch, config.training.seq_len, rehearsals, gpu, card, most)
        print("\n".join(lines))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(f"\nrehearsed in {time.perf_counter() - started:.0f} s and {peak / GIB:.1f} GiB of this machine's memory")
    if most <= card:
        return 0
    advice = remedy(make_plan(workload, card, gpu))
    tool.say(f"a step needs {most / GIB:.1f} GiB, {gpu.name} has {card / GIB:.1f}; what helps most: {advice}")
    return _OUT_OF_MEMORY


def _lines(
    layout: Layout, batch: Batch, seq_len: int, found: "Sequence[Rehearsed]", gpu: Gpu, card: int, most: float
) -> list[str]:
    """The rehearsal as text lines.

    Args:
        card: bytes of a device's memory.
        most: bytes of the rank that needs most, with the assumed share for driver and fragmentation.
    """
    ranks = math.prod(layout.shape())
    heading = "".join(f"{f'rank {rehearsed.rank}':>14}" for rehearsed in found)
    lines = [
        f"{ranks} x {gpu.name}, {card / GIB:.1f} GiB each, {gpu.per_node} a node: {layout.describe()}",
        f"a step: {plural(batch.global_batch_size, 'row')}, {batch.global_batch_size * seq_len:,} tokens; "
        f"{plural(batch.gradient_accumulation_steps, 'forward')} of "
        f"{plural(batch.local_batch_size, 'row')} of {seq_len:,}",
        "",
        f"{'GiB at the peak':<22}{heading}",
    ]
    for name in CATEGORIES:
        lines.append(f"  {name:<20}" + "".join(f"{r.memory.categories[name] / GIB:>14.2f}" for r in found))
    lines.append(f"  {'all':<20}" + "".join(f"{r.memory.peak / GIB:>14.2f}" for r in found))
    if any(rehearsed.memory.host for rehearsed in found):
        lines.append(f"  {'of the host':<20}" + "".join(f"{r.memory.host / GIB:>14.2f}" for r in found))
    lines += [
        f"{'fits' if most <= card else 'does not fit'}: {most / GIB:.1f} of {card / GIB:.1f} GiB, with an assumed "
        "share for driver and fragmentation",
        f"{'TFLOP in a step':<22}" + "".join(f"{r.work.flops / 1e12:>14,.1f}" for r in found),
    ]
    for rehearsed in found:
        lines += [
            "",
            f"rank {rehearsed.rank}, in a step:",
            f"{'axis':<13}{'collective':<15}{'ranks':>6}{'count':>8}{'payload':>12}{'ring sends':>12}  over",
        ]
        for row in _collectives(rehearsed, gpu):
            sizes = (bytes_in_words(round(row[name])) for name in ("payload", "ring_bytes"))
            lines.append("{axis:<13}{operation:<15}{ranks:>6}{count:>8,}{:>12}{:>12}  {link}".format(*sizes, **row))
    if layout.inside_a_node > gpu.per_node:
        lines += ["", "tensor parallel spans several nodes: every layer waits for the network; keep it inside a node"]
    return lines


def _as_json(found: "Sequence[Rehearsed]", gpu: Gpu, card: int, most: float) -> dict[str, Any]:
    ranks = []
    for rehearsed in found:
        about = {"rank": rehearsed.rank, "memory": asdict(rehearsed.memory), "flops": rehearsed.work.flops}
        ranks.append({**about, "collectives": _collectives(rehearsed, gpu)})
    return {"ranks": ranks, "card": card, "most": most, "fits": most <= card}


def _collectives(rehearsed: "Rehearsed", gpu: Gpu) -> list[dict[str, Any]]:
    return [
        {
            "axis": transfer.axis, "operation": transfer.operation, "ranks": len(transfer.group), "count": count,
            "payload": payload, "ring_bytes": ring, "link": transfer.link(gpu.per_node),
        }
        for transfer, count, payload, ring in by_axis(rehearsed.work.traffic)
    ]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    epilog = (
        "Exit code: 0 it fits, 2 a mistake, 6 out of memory (`plan` alone: 1). Settings are those of training; "
        "data, weights and tokenizer need not exist. docs/MEMORY.md explains the tables."
    )
    parser = settings_parser("titan-mi100 plan", __doc__.splitlines()[0], epilog)
    add = parser.add_argument
    add("--rehearse", type=positive, required=True, metavar="N", help="number of ranks of the run, one per device")
    add("--device", default="", metavar="NAME", help=f"{NAMES}; default mi250x, with --memory none")
    add("--memory", type=size_gib, default=0, metavar="32GB", help="memory of a device, in GiB; default: the device's")
    add("--ranks", type=_ranks, default=(), metavar="0,8", help="ranks to rehearse; default: one per pipeline stage")
    add("--saved", action="store_true", help="print what a layer saves for its backward instead, for shapes/")
    add("--json", action="store_true", help="print JSON, with sizes in bytes")
    return parser


def _ranks(text: str) -> list[int]:
    if not all(part.isdecimal() and len(part) < 8 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks; write for example 0,8")
    return sorted({int(part) for part in text.split(",")})
