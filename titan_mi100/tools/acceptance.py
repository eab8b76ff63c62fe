"""Acceptance of the draft head: `titan-mi100 evaluate acceptance --model PATH --data FILE.jsonl`, as a server has it.

The model writes an answer to each prompt. One forward over the text then gives the share of drafts that hold, of each
position, and the tokens for each step of the model. These depend on the text: greedy, or drawn at a temperature, where
drafts are drawn, too, and kept with probability min(1, p / q). All is computed in float32; the standard error is that
of other prompts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

from titan_mi100 import cli as tool
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.columns import Findings
from titan_mi100.data.encode import Encoder
from titan_mi100.data.formats import choose_format
from titan_mi100.data.prompts import asked_of
from titan_mi100.errors import UserError
from titan_mi100.generation.batch import Row, command_parser, open_model, read_rows, template_variables
from titan_mi100.generation.engine import Model, PromptBuilder, full_memory_is_an_error
from titan_mi100.model.acceptance import DraftMeter, rates
from titan_mi100.model.decode import Sampling, check_lengths, generate
from titan_mi100.model.decoder import CausalLM

_MOST = 3  # drafts of a step
Text = tuple[np.ndarray, np.ndarray]  # token ids, and which of them the steps choose


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
    kinds = "own, the default: the model writes it; given: the rows' answers, and a step begins at each of their tokens"
    add("--text", choices=("own", "given"), default="own", help=kinds)
    add("--seed", type=int, default=42, help="for sampling; a row's draws depend on the seed and the row's index only")
    add("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(dtype="float32")
    return parser


@full_memory_is_an_error()
def _run(options: argparse.Namespace) -> None:
    k, temperature, is_own = options.k, options.temperature, options.text == "own"
    rules = {
        f"--k {k}: must be 1 to {_MOST}": 1 <= k <= _MOST,
        f"--limit {options.limit}: must be 0 (all) or more": options.limit >= 0,
        f"--batch_size {options.batch_size}: must be 1 or more": options.batch_size > 0,
        f"--max_new_tokens {options.max_new_tokens}: must be more than --k {k}": options.max_new_tokens > k,
        "--text given is measured at temperature 0; leave out --temperature": is_own or not temperature,
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise UserError("\n".join(broken))
    sampling = Sampling(temperature, with_log_p=True)
    model = open_model(options, with_draft_head=True)
    build = PromptBuilder(model, options.system, template_variables(options))
    texts = list((_asked if is_own else _given)(options, model, build))
    network = model.load()
    sampling = replace(sampling, vocabulary=model.tokenizer.n_vocab)
    meter, sums, tokens = DraftMeter(network, k, sampling, is_own), list[torch.Tensor](), 0
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; a log gets few lines
    with tqdm(total=len(texts), unit="text", mininterval=interval, delay=interval) as progress:
        for ids, learned in _written(options, network, model, sampling, texts) if is_own else texts:
            sums.append(meter(*(torch.from_numpy(each).to(model.device) for each in (ids, learned))))
            tokens += int(learned[1:].sum())
            progress.update()
    near = sum(float(each[-1]) for each in sums)
    length, *positions = found = rates(torch.stack(sums))
    if not length["n"]:
        raise UserError(f"{options.data}: no answer has a step, {k + 1} tokens; take other rows, or a lower --k")
    if options.json:
        about = {name: getattr(options, name) for name in ("data", "text", "temperature", "k")}
        counts = {"texts": len(sums), "tokens": tokens, "near_ties": near}
        print(json.dumps({**about, **counts, "length": length, "positions": positions}))
        return
    how = f"drawn at temperature {temperature:g}" if temperature else "greedy"
    what = f"the model's own text, {how}" if is_own else "the rows' answers, which a server would not draft"
    print(f"{options.data}: {len(sums):,} texts, {tokens:,} tokens of {what}")
    names = ["tokens a step", *(f"draft {number} holds" for number in range(1, k + 1))]
    for name, rate in zip(names, found, strict=True):
        value, error = ("n/a" if rate[key] is None else f"{rate[key]:.3f}" for key in ("value", "error"))
        print(f"  {name:<15}{value} +- {error} of {rate['n']:,.0f}")
    print(f"  {near:,.0f} more steps are left out, because a near tie decides")


def _asked(options: argparse.Namespace, model: Model, build: PromptBuilder) -> Iterator[Text]:
    """The prompts."""
    for where, (messages, tools) in read_rows(options.data, asked_of)[: options.limit or None]:
        is_text = build.template is None and [message["role"] for message in messages] == ["user"]
        ids = build(where, messages[0]["content"] if is_text else messages, tools).ids
        check_lengths(model.spec, {where: len(ids)}, options.max_new_tokens)
        yield np.array(ids), np.zeros(len(ids), dtype=bool)


def _written(
    options: argparse.Namespace, network: CausalLM, model: Model, sampling: Sampling, prompts: Sequence[Text]
) -> Iterator[Text]:
    """The prompts with what the model answers, its stop token included."""
    for first in range(0, len(prompts), options.batch_size):
        asked = [ids.tolist() for ids, _ in prompts[first : first + options.batch_size]]
        seeds = [f"{options.seed}/{first + number}" for number in range(len(asked))]
        answers = generate(network, asked, sampling, model.stop_ids, options.max_new_tokens, seeds)
        for ids, answer in zip(asked, answers, strict=True):
            every = np.array(ids + [token for token, _ in answer.sampled])
            yield every, np.arange(len(every)) >= len(ids)


def _given(options: argparse.Namespace, model: Model, build: PromptBuilder) -> Iterator[Text]:
    """The rows as training reads them."""
    if build.template is None:
        raise UserError("--text given needs a chat template; name a folder that has one in --tokenizer_path")
    meant = {name: str(value).lower() for name, value in build.variables.items()}
    config = DataConfig(system_prompt=build.system, overlong="truncate", **meant)
    form = choose_format(options.data, config)
    encoder = Encoder(model.tokenizer, build.template, config, model.spec.reach)

    def read(row: Row) -> list[np.ndarray]:
        return encoder.encode(form.read_row(row, frozenset(), Findings())).documents

    for _, documents in read_rows(options.data, read)[: options.limit or None]:
        for values in documents:
            yield (values >> 1).astype(np.int64), (values & 1).astype(bool)


if __name__ == "__main__":
    sys.exit(main())
