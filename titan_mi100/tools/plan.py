"""Estimate before a run whether it fits its cards, how long it takes and which layout is fastest.

With --rehearse N the run's own code counts it instead, see rehearse.py.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import settings_parser, to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import LoRAConfig, MemoryConfig, OptimizerConfig
from titan_mi100.doors import door
from titan_mi100.errors import UserError
from titan_mi100.files.durable import check_output, write_output
from titan_mi100.log import setup_logging
from titan_mi100.planning.cards import Gpu
from titan_mi100.planning.device import NAMES, find_card, positive, positive_float, size_gib
from titan_mi100.planning.longest import CARD_SIZES, METHODS, UNIT, longest
from titan_mi100.planning.memory import ABOVE, BELOW, CATEGORIES, piece_tokens
from titan_mi100.planning.plan import EFFICIENCY, GIB, Plan, make_plan, remedy, search
from titan_mi100.planning.workload import Workload
from titan_mi100.wording import bytes_in_words, duration_in_words, plural

_SHOWN = 10  # layouts that --search prints
_HEADING = "k = 1,024 tokens of the longest row; behind the comma with inputs in the host's memory [GiB of that]"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if any(argument.partition("=")[0] == "--rehearse" for argument in arguments):
        return tool.exit_code(lambda: door("plan --rehearse")(arguments))
    return tool.exit_code(lambda: _plan(*_parser().parse_known_args(arguments)))


def _plan(options: argparse.Namespace, settings: Sequence[str]) -> int:
    setup_logging(0)
    if options.write and not options.search:
        raise UserError("--write needs --search, which finds what is written; add it")
    if options.write:
        check_output(Path(options.write), "--write")
    if options.search and options.tokens:
        raise UserError("--tokens is for one config, not for --search; leave it out")
    gpu, card = find_card(options.device, options.memory, "mi100")
    if options.longest and (options.search or options.tokens):
        raise UserError("--longest plans memory alone, of methods of its own; leave --search and --tokens out")
    if (options.search or options.tokens) and not gpu.tflops:
        raise UserError(f"--search and --tokens need the speed of the card, too; add --device: {NAMES}")
    options.gpus = options.gpus or (1 if options.longest else 2)
    config = load_config(settings, None if options.search or options.longest else options.gpus, with_files=False)
    workload = Workload.of(config, options.gpus)
    if options.longest:
        return _longest(
            options, workload, [card] if options.device or options.memory else [n * GIB for n in CARD_SIZES]
        )
    if options.search:
        return _search(options, workload, card, gpu)
    plan = make_plan(workload, card, gpu)
    print(json.dumps(_as_json(plan)) if options.json else "\n".join(_lines(plan, gpu, options.tokens)))
    return 0 if plan.fits else 1


def _lines(plan: Plan, gpu: Gpu, tokens: float) -> list[str]:
    """The plan as text lines. Args: tokens: tokens of the data, for the duration; 0: do not print it."""
    layout, batch = plan.config.layout(plan.ranks), plan.config.batch(plan.ranks)
    sent = ", ".join(f"{bytes_in_words(round(size))} ({name})" for name, size in plan.sent.items() if size)
    lines = [
        f"{plan.ranks} x {gpu.name}, {plan.card / GIB:.1f} GiB each: {layout.describe()}",
        f"a step: {plural(batch.global_batch_size, 'row')} of {plan.config.training.seq_len} tokens, "
        f"{plan.tokens:,} tokens; {plural(batch.gradient_accumulation_steps, 'forward')} of "
        f"{plural(batch.local_batch_size, 'row')}",
        "",
        f"{'GiB at the peak':<22}" + "".join(f"{_column(plan, n):>12}" for n in range(len(plan.memory))),
    ]
    for name in CATEGORIES:
        lines.append(f"  {name:<20}" + "".join(f"{memory.categories[name] / GIB:>12.2f}" for memory in plan.memory))
    lines.append(f"  {'all':<20}" + "".join(f"{memory.peak / GIB:>12.2f}" for memory in plan.memory))
    if size := piece_tokens(plan.workload, plan.card):
        lines.append(f"  MLPs and norms compute {size:,} tokens at a time (memory.piece_tokens)")
    lines += [
        f"  when: {'; '.join(memory.moment for memory in plan.memory)}",
        f"  differs from the memory counter by {-BELOW:+.0%} to {ABOVE:+.0%}; with an assumed share for driver and "
        f"fragmentation: {plan.least / GIB:.1f} to {plan.most / GIB:.1f} GiB",
        "",
        f"{'fits' if plan.fits else 'does not fit'}: {plan.most / GIB:.1f} of {plan.card / GIB:.1f} GiB",
        *([] if plan.fits else [f"what helps most: {remedy(plan)}"]),
        "",
        f"{plan.flops / 1e12:,.0f} TFLOP per step" + (f"; a card sends {sent}" if sent else ""),
    ]
    if host := plan.host:
        lines.append(f"host memory: {host / GIB:.1f} GiB for each card, plus what its process takes")
    forward = batch.local_batch_size * plan.config.training.seq_len
    if forward < plan.enough:
        lines.append(
            f"the host limits: it launches longer than the card computes, below about {plan.enough:,.0f} tokens per "
            f"forward (here {forward:,}; assumed, not measured); raise training.local_batch_size"
        )
    if plan.hidden_from:
        lines.append(
            f"transfers between host and card overlap with computation from {plan.hidden_from:,.0f} tokens per forward "
            f"on (here {forward:,}); the update takes {plan.update:.1f} s of a step"
        )
    if plan.bubble:
        lines.append(f"the pipeline's bubble is {plan.bubble:.0%} of a step")
    if plan.step:
        lines.append(
            f"about {plan.step:.1f} s per step, {plan.tokens / plan.step:,.0f} tokens/s, if a card reaches "
            f"{EFFICIENCY:.0%} of its data sheet's rate and half of its link's rate (assumed, not measured)"
        )
        if tokens:
            lines.append(f"{tokens:,.0f} tokens take {duration_in_words(tokens / plan.tokens * plan.step)}")
    elif not gpu.tflops:
        lines.append("no time: it needs the speed of the card; name it with --device")
    return lines


def _column(plan: Plan, number: int) -> str:
    return f"stage {number}" if len(plan.memory) > 1 else "each card"


def _as_json(plan: Plan) -> dict[str, Any]:
    layout, batch = plan.config.layout(plan.ranks), plan.config.batch(plan.ranks)
    memory = [{"peak": m.peak, "moment": m.moment, "categories": m.categories, "host": m.host} for m in plan.memory]
    return {
        "layout": {**asdict(layout), **asdict(batch)}, "memory": memory, "card": plan.card, "least": plan.least,
        "most": plan.most, "fits": plan.fits, "flops": plan.flops, "sent": plan.sent, "bubble": plan.bubble,
        "step_seconds": plan.step, "tokens": plan.tokens, "hidden_from": plan.hidden_from, "update": plan.update,
        "enough": plan.enough, "efficiency": EFFICIENCY,
    }  # fmt: skip


def _search(options: argparse.Namespace, workload: Workload, card: int, gpu: Gpu) -> int:
    """Print the ten fastest layouts that fit; with --write also write the first as TOML.

    Raises:
        UserError: no layout fits.
    """
    counts, rows = {options.gpus, 1}, workload.batch.global_batch_size
    # one card can be faster than several with a slow link
    plans = [plan for ranks in counts for plan in search(replace(workload, ranks=ranks), rows, card, gpu)]
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: (plan.seconds, plan.most))
    if options.json:
        print(json.dumps([{**_as_json(plan), "ranks": plan.ranks} for plan in fitting[:_SHOWN]]))
    elif fitting:
        share = f"{EFFICIENCY:.0%} of the card's rate (assumed)"
        print(f"{len(fitting)} of {len(plans)} fit {card / GIB:.1f} GiB; the fastest at {share}:\n")
        print(f"{'s/step':>8}{'GiB':>7}  cards, layout, rows x forwards, recomputation, optimizer, reduction")
        for plan in fitting[:_SHOWN]:
            print(f"{plan.seconds:>8.1f}{plan.most / GIB:>7.1f}  {_words(plan)}")
    if not fitting:
        best = min(plans, key=lambda plan: plan.most, default=None)
        least = f"; the smallest needs {best.most / GIB:.1f} GiB: {_words(best)}" if best else ""
        change = remedy(best) if best else "train adapters only (--lora.rank 16)"
        raise UserError(f"no layout fits {card / GIB:.1f} GiB{least}; {change}")
    if options.write:
        first = fitting[0]
        heading = f"# For {plural(first.ranks, 'card')} of {first.card / GIB:.1f} GiB, by titan-mi100 plan --search\n\n"
        write_output(Path(options.write), [heading, to_toml(first.config)], "--write")
        print(f"\n{options.write}: written, with the fastest layout", file=sys.stderr)
    return 0


def _longest(options: argparse.Namespace, workload: Workload, cards: Sequence[int]) -> int:
    """Print the longest rows that fit, by method and bytes of a card. A method sets the parts of the config that are
    its own.
    """
    parts: dict[str, Any] = {"lora": LoRAConfig(), "optimizer": OptimizerConfig(), "memory": MemoryConfig()}
    workload, entries = replace(workload, config=replace(workload.config, **parts)), list[dict[str, Any]]()
    lines = [f"{'':<20}" + "".join(f"{f'{card / GIB:g} GB':>23}" for card in cards)]
    is_head_alone = workload.config.draft_head.train == "after"
    for name, change in METHODS.items():
        if is_head_alone and "lora" in change:
            continue
        method = name.replace("all weights", "draft head") if is_head_alone else name
        alone = workload.changed(change)
        moved = alone.changed({"memory": {"offload_activations": True}})
        pairs = [(longest(alone, card), longest(moved, card)) for card in cards]
        lines.append(f"{method:<20}" + "".join(f"{_cell(*pair):>23}" for pair in pairs))
        entries += [
            {"method": method, "card": plan.card, "seq_len": plan.config.training.seq_len, "most": plan.most}
            | {"host": plan.host, "inputs_on_host": plan.config.memory.offload_activations}
            for plan in itertools.chain(*pairs)
            if plan
        ]
    note = f"*: beyond the {workload.spec.reach:,} positions that the model is made for, see model.yarn_factor"
    print(json.dumps(entries) if options.json else "\n".join([_HEADING, *lines, note]))
    return 0 if entries else 1


def _cell(plan: Plan | None, on_host: Plan | None) -> str:
    """The lengths of two plans, and the host's memory of the second."""
    lengths = [(x.config.training.seq_len, x.workload.spec.reach) if x else (0, 0) for x in (plan, on_host)]
    words = [f"{count // UNIT}k{'*' * (count > reach)}" if count else "-" for count, reach in lengths]
    return f"{words[0]}, {words[1]} [{on_host.host / GIB:.0f}]" if on_host else words[0]


def _words(plan: Plan) -> str:
    """A plan's layout in one line; the columns are those of the heading in _search."""
    c, batch = plan.config, plan.config.batch(plan.ranks)
    forwards = f"{batch.local_batch_size} x {batch.gradient_accumulation_steps}"
    layout = plan.config.layout(plan.ranks).describe() if plan.ranks > 1 else "alone"
    where = "" if c.memory.offload == "nothing" else f", {c.memory.offload} on the host"
    return (
        f"{plan.ranks}, {layout}, {forwards}, {c.activation_checkpoint.mode}, {c.optimizer.state} + "
        f"{c.optimizer.master}, {c.training.mixed_precision_reduce}{where}"
    )


def _parser() -> argparse.ArgumentParser:
    epilog = "Exit code: 0 it fits, 1 it does not fit, 2 a mistake. Settings are those of training; data and tokenizer "
    parser = settings_parser("titan-mi100 plan", __doc__.splitlines()[0], f"{epilog}need not exist.")
    add = parser.add_argument
    add("--gpus", type=positive, metavar="N", help="number of cards, one process each (default 2; --longest: 1)")
    add("--device", default="", metavar="NAME", help=f"{NAMES}; default mi100, with --memory none")
    add("--memory", type=size_gib, default=0, metavar="32GB", help="memory of a card, in GiB; default: the device's")
    add("--tokens", type=positive_float, default=0, metavar="N", help="tokens of the data: print how long they take")
    add("--search", action="store_true", help="compare layouts, batch sizes, recomputation and optimizer state")
    add("--longest", action="store_true", help="the longest rows that fit, by method; without a card of several sizes")
    add("--write", default="", metavar="X.toml", help="with --search: write the fastest layout as a config")
    add("--json", action="store_true", help="print JSON, with sizes in bytes")
    text = "count memory and collectives of N devices by the run's own code on fake tensors, see --rehearse --help"
    add("--rehearse", metavar="N", help=f"{text}; default device mi250x")
    return parser
