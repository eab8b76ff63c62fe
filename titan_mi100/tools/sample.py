"""Sample answers: `titan-mi100 sample --model PATH --data FILE.jsonl --out FOLDER` writes k per prompt.

They are drawn at temperature 1 from the whole vocabulary. The folder keeps token ids and their log probabilities, in
parts that are complete or absent; started again, it goes on.
"""

import hashlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from titan_mi100 import cli as tool
from titan_mi100.data.prompts import asked_of
from titan_mi100.data.samples import (
    GREEDY,
    LARGEST,
    LENGTH,
    MOST,
    PART_PROMPTS,
    STOP,
    Answer,
    Group,
    GroupStore,
    Sampled,
)
from titan_mi100.device import accelerator
from titan_mi100.doors import door
from titan_mi100.errors import UserError
from titan_mi100.files.durable import FolderLock
from titan_mi100.files.pool import forked_pool
from titan_mi100.generation.batch import command_parser, open_model, read_rows, template_variables
from titan_mi100.generation.engine import Model, PromptBuilder, full_memory_is_an_error
from titan_mi100.model.decode import Sampling, check_lengths, generate
from titan_mi100.weights.base import dtype_name

_MOST_TOKENS = LARGEST // PART_PROMPTS // 32  # of the answers to a prompt; a part has up to 32 bytes for each
_DIGITS = 7  # of a log p, after the point
_OF_SERVER = {"served_model", "server_kind", "concurrency", "server_timeout"}
_OF_ENGINE = {"batch_size", "device", "dtype", "processes", "greedy"}
Asked = Sequence[tuple[Group, str]]  # of each answer: the prompt, and the seed
Ask = Callable[[Asked], Iterator[Answer]]


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(parser().parse_args(argv)))


def parser() -> tool.Parser:
    """Make the command's parser."""
    made = command_parser("sample", __doc__.split("\n", 1)[0].replace("`", ""), without=("output",))
    add = made.add_argument
    add("--data", metavar="FILE.jsonl", required=True, help="rows with a prompt, or rows of training data")
    add("--out", metavar="FOLDER", required=True, help="the store of answers; started again, it goes on")
    add("--k", type=int, default=8, metavar="N", help="answers to each prompt; default 8")
    add("--greedy", action="store_true", help="the likeliest tokens, for a draft head; with --k 1")
    add("--seed", type=int, default=42, help="what is drawn depends on it, and on the numbers of prompt and answer")
    add("--limit", type=int, default=0, metavar="N", help="use only the first N prompts; 0: all")
    add("--processes", type=int, default=1, metavar="N", help="share the prompts among N processes, a GPU for each")
    add("--server", metavar="URL", default="", help="ask this server, instead of loading the weights")
    add("--served_model", metavar="NAME", default="", help="the model, as the server calls it")
    programs = ("vllm", "sglang", "llamacpp")
    add("--server_kind", choices=programs, default="vllm", help="the server's program; default vllm")
    add("--concurrency", type=int, default=8, metavar="N", help="requests at a time; default 8")
    add("--server_timeout", type=float, default=600.0, metavar="S", help="seconds for an answer; default 600")
    add("--json", action="store_true", help="print the summary as one JSON object")
    made.set_defaults(is_quiet=False)
    return made


def _run(options: Namespace) -> None:
    check(options)
    rows = read_rows(options.data, lambda row: (row, *asked_of(row)))[: options.limit or None]
    options.device = "cpu" if options.server else options.device  # the server may be on the GPU
    model = open_model(options)
    build = PromptBuilder(model, options.system, template_variables(options))
    prompts = list[Group]()
    for number, (where, (row, messages, tools)) in enumerate(rows):
        ids = build(where, messages, tools).ids
        check_lengths(model.spec, {where: len(ids)}, options.max_new_tokens)
        prompts.append(Group(number, where.rpartition("/")[2], row, ids, []))
    n_vocab = model.tokenizer.n_vocab
    server = door("sample --server")(options, model.stop_ids, n_vocab) if options.server else None
    folder, about = Path(options.out), _about(options, model, prompts)
    GroupStore(folder, about)  # another store is refused before it is touched
    folder.mkdir(parents=True, exist_ok=True)
    _lock = FolderLock(folder, 0, "--out")
    store = GroupStore(folder, about)
    store.begin()
    if missing := store.missing:
        if server is not None:
            print(f"{options.server}: a server does not promise equal bits when it is asked again", file=sys.stderr)
        if options.processes == 1:
            _make(options, about, prompts, missing, model, server)
        else:
            _make_in_processes(options, store, prompts)
    _summarise(options, GroupStore(folder, about), is_old=not missing)


def check(options: Namespace) -> None:
    """Raises UserError: an option is out of range, or has no effect."""
    why, unused = ("--server", _OF_ENGINE) if options.server else ("weights that are loaded here", _OF_SERVER)
    parser().check_used(options, why, vars(options).keys() - unused)
    gpus, most = accelerator.count() if options.device != "cpu" else 0, _MOST_TOKENS // max(1, options.k)
    counts = ("k", "processes", "concurrency", "batch_size", "max_new_tokens")
    fits = not gpus or options.processes == 1 or (options.processes <= gpus and not options.device)
    rules = {f"--{name} {getattr(options, name)}: must be 1 or more": getattr(options, name) > 0 for name in counts} | {
        f"--limit {options.limit}: must be 0 (all) or more": options.limit >= 0,
        f"--k {options.k}: must be at most {MOST}": options.k <= MOST,
        "--greedy writes one answer to a prompt; set --k 1": options.k == 1 or not options.greedy,
        f"--max_new_tokens must be at most {most:,} with this --k": options.max_new_tokens <= most,
        f"--server_timeout {options.server_timeout}: must be above 0": 0 < options.server_timeout < 1e6,
        "--served_model is missing: the model, as the server calls it": not options.server or options.served_model,
        f"--processes {options.processes}: each takes a GPU, of {gpus}; or name --device cpu": fits,
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise UserError("\n".join(broken))


def _about(options: Namespace, model: Model, prompts: Sequence[Group]) -> Sampled:
    digest = hashlib.sha256("".join(prompt.line() for prompt in prompts).encode()).hexdigest()
    sampler = f"server {options.served_model}" if options.server else model.fingerprint() + GREEDY * options.greedy
    return Sampled(
        "samples", sampler, digest, model.tokenizer.fingerprint, len(prompts), options.k, options.seed,
        options.max_new_tokens, sorted(model.stop_ids), "" if options.server else dtype_name(model.dtype),
        0 if options.server else options.batch_size,
    )  # fmt: skip


@full_memory_is_an_error()
def _make(
    options: Namespace, about: Sampled, prompts: Sequence[Group], parts: Sequence[int], model: Model | None = None,
    server: Any = None,
) -> None:  # fmt: skip
    """Make parts. What is in one does not depend on what was made before it."""
    model, store = model or open_model(options), GroupStore(Path(options.out), about)
    ask = partial(_by_server, options, server) if server else _by_engine(options, model)
    total = about.k * sum(len(store.prompts_of(part)) for part in parts)
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; a log gets few lines
    with tqdm(total=total, unit="answer", mininterval=interval, disable=options.is_quiet) as progress:
        for part in parts:
            groups = [prompts[number] for number in store.prompts_of(part)]
            asked = [(group, f"{about.seed}/{group.prompt}/{sample}") for group in groups for sample in range(about.k)]
            answers = list[Answer]()
            for made in ask(asked):
                text = model.tokenizer.decode(made.ids[: None if made.is_cut else -1])
                answers.append(Answer(made.ids, [round(x, _DIGITS) for x in made.log_p], made.finish, text))
                progress.update()
            rows = [group._replace(answers=answers[about.k * i :][: about.k]) for i, group in enumerate(groups)]
            store.write(part, rows)


def _make_in_processes(options: Namespace, store: GroupStore, prompts: Sequence[Group]) -> None:
    """Process r makes the parts r, r + processes, ...; the first shows its progress. If one fails, all end."""
    count, cpus, futures = options.processes, len(os.sched_getaffinity(0)), list[Future[None]]()
    threads, killed = max(1, cpus // count), "one of the processes was killed; start again: it goes on"
    with forked_pool(count, begin=partial(torch.set_num_threads, threads), method="spawn", killed=killed) as pool:
        for rank in range(count):
            device = options.device or f"{accelerator.kind()}:{rank}" * bool(accelerator.count())
            there = Namespace(**{**vars(options), "device": device, "is_quiet": rank > 0})
            parts = [part for part in store.missing if part % count == rank]
            futures.append(pool.submit(_make, there, store.about, prompts, parts))
        for future in as_completed(futures):
            future.result()


def _by_engine(options: Namespace, model: Model) -> Ask:
    """Load the weights. Batches depend on the part alone."""
    network = model.load(as_trained=True)
    sampling = Sampling(0.0 if options.greedy else 1.0, vocabulary=model.tokenizer.n_vocab, with_log_p=True)

    def ask(asked: Asked) -> Iterator[Answer]:
        for first in range(0, len(asked), options.batch_size):
            groups, seeds = zip(*asked[first : first + options.batch_size], strict=True)
            ids, most = [group.prompt_ids for group in groups], options.max_new_tokens
            for made in generate(network, ids, sampling, model.stop_ids, most, seeds):
                new, log_p = map(list, zip(*made.sampled, strict=True))
                yield Answer(new, log_p, STOP if made.stopped else LENGTH)

    return ask


def _by_server(options: Namespace, server: Any, asked: Asked) -> Iterator[Answer]:
    with ThreadPoolExecutor(options.concurrency) as pool:
        try:
            yield from pool.map(lambda each: server.ask(each[0].where, each[0].prompt_ids, each[1]), asked)
        except BaseException:
            server.end()  # else the pool waits for the requests under way
            raise


def _summarise(options: Namespace, store: GroupStore, is_old: bool) -> None:
    answers = [(len(answer.ids), answer.is_cut) for group in store.groups() for answer in group.answers]
    mean, share = (sum(each) / len(answers) for each in zip(*answers, strict=True))
    summary = {"prompts": store.about.count, "answers": len(answers), "mean_length": mean, "cut_off": share}
    text = f"{store.about.count:,} prompts, {len(answers):,} answers with {mean:.1f} tokens on average; {share:.1%} are"
    text = f"{options.out}: {'was complete; ' * is_old}{text} cut off after --max_new_tokens {options.max_new_tokens}"
    text += f"\nnext: titan-mi100 score {options.out}"
    print(json.dumps({"out": options.out, **summary}) if options.json else text)
