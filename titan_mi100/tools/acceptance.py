"""Acceptance of the draft head: `titan-mi100 evaluate acceptance --model PATH --data FILE.jsonl`, as a server has it.

The model writes an answer to each prompt. One forward over the text then gives the share of drafts that hold, of each
position, and the tokens for each step of the model. These depend on the text: greedy, or drawn at a temperature, where
drafts are drawn, too, and kept with probability min(1, p / q). All is computed in float32; the standard error is that
of other prompts.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from titan_mi100 import cli as tool
from titan_mi100.data.prompts import asked_of
from titan_mi100.errors import UserError
from titan_mi100.generation.batch import command_parser, generate_all, open_model, read_rows, template_variables
from titan_mi100.generation.engine import AnswerBatch, Model, PromptBuilder, full_memory_is_an_error
from titan_mi100.model.acceptance import DraftMeter, rates
from titan_mi100.model.decode import Generated, Sampling, generate

_MOST = 3  # drafts of a step


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(_parser().parse_args(argv)))


def _parser() -> tool.Parser:
    summary, _, epilog = __doc__.partition("\n\n")
    parser = command_parser("evaluate acceptance", summary.replace("`", ""), epilog, without=("output", "dtype"))
    add = parser.add_argument
    add("--data", metavar="FILE.jsonl", required=True, help="rows with a prompt, or rows of training data")
    add("--limit", type=int, default=0, metavar="N", help="use only the first N rows; 0: all")
    add("--k", type=int, default=_MOST, metavar="N", help=f"drafts of a step, at most {_MOST}; default {_MOST}")
    add("--temperature", type=float, default=0.0, help="of the text; 0, the default: always the most probable token")
    add("--seed", type=int, default=42, help="for sampling; a row's draws depend on the seed and the row's index only")
    add("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(output="", dtype="float32")
    return parser


@full_memory_is_an_error()
def _run(options: argparse.Namespace) -> None:
    k, temperature = options.k, options.temperature
    rules = {
        f"--k {k}: must be 1 to {_MOST}": 1 <= k <= _MOST,
        f"--limit {options.limit}: must be 0 (all) or more": options.limit >= 0,
        f"--max_new_tokens {options.max_new_tokens}: must be more than --k {k}": options.max_new_tokens > k,
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise UserError("\n".join(broken))
    model, sums = open_model(options, with_draft_head=True), list[Tensor]()
    sampling = Sampling(temperature, vocabulary=model.tokenizer.n_vocab, with_log_p=True)
    build = PromptBuilder(model, options.system, template_variables(options))
    rows = read_rows(options.data, asked_of)[: options.limit or None]
    requests = [build(where, *asked) for where, asked in rows]
    generate_all(options, model, requests, partial(_load, options, model, sampling, sums), {})
    summary, near = rates(torch.stack(sums)), sum(float(each[-1]) for each in sums)
    if not summary[0]["n"]:
        raise UserError(f"{options.data}: no answer has a step, {k + 1} tokens; take other rows, or a lower --k")
    if options.json:
        about = {name: getattr(options, name) for name in ("data", "temperature", "k")}
        print(
            json.dumps({**about, "texts": len(sums), "near_ties": near, "length": summary[0], "positions": summary[1:]})
        )
        return
    how = f"written by the model at temperature {temperature:g}" if temperature else "written by the model, greedily"
    print(f"{options.data}: {len(sums):,} texts, {how}")
    for number, rate in enumerate(summary):
        name, of = (f"draft {number} holds", "drafts") if number else ("tokens a step", "steps")
        mean, error = ("n/a" if rate[key] is None else f"{rate[key]:.3f}" for key in ("value", "error"))
        print(f"  {name:<15}{mean} +- {error} of {rate['n']:,.0f} {of}")
    print(f"  left out: {near:,.0f} steps that a near tie decides")


def _load(options: argparse.Namespace, model: Model, sampling: Sampling, sums: list[Tensor]) -> AnswerBatch:
    """Load the weights. Args: sums: receives what is measured of each answer."""
    network = model.load()
    meter = DraftMeter(network, options.k, sampling)

    def answer_batch(prompts: Sequence[list[int]], indices: Sequence[int]) -> list[Generated]:
        seeds = [f"{options.seed}/{index}" for index in indices]
        answers = generate(network, prompts, sampling, model.stop_ids, options.max_new_tokens, seeds)
        for prompt, answer in zip(prompts, answers, strict=True):  # the stop token is drafted, too
            ids = torch.tensor(prompt + [token for token, _ in answer.sampled], device=model.device)
            sums.append(meter(ids, torch.arange(len(ids), device=model.device) >= len(prompt)))
        return answers

    return answer_batch
