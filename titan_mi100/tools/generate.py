"""Generate text: `titan-mi100 generate --model PATH` with --prompt or --input.

Invalid options and prompts are reported before any weights are loaded.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

from titan_mi100 import cli as tool
from titan_mi100.data.prompts import asked_of
from titan_mi100.generation.batch import command_parser, generate_all, open_model, read_rows, template_variables
from titan_mi100.generation.engine import PromptBuilder, full_memory_is_an_error, load_answer
from titan_mi100.model.decode import Sampling
from titan_mi100.wording import printable


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__.splitlines()[0])
    prompts, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    prompts.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    prompts.add_argument("--input", metavar="FILE.jsonl", help="rows with a prompt, or rows of training data")
    add("--json", action="store_true", help="print the rows as JSON, a line each, instead of text")
    add("--raw", action="store_true", help="continue the text itself, without the chat template")
    add("--temperature", type=float, default=0.0, help="0, the default: always the most probable token")
    add("--top_k", type=int, default=0, metavar="K", help="sample from the K most probable tokens; 0: all")
    add("--top_p", type=float, default=1.0, metavar="P", help="from the fewest tokens with this total probability")
    add("--seed", type=int, default=42, help="for sampling; a row's draws depend on the seed and the row's index only")
    return parser


@full_memory_is_an_error()
def _run(options: argparse.Namespace) -> None:
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    model = open_model(options)
    build = PromptBuilder(model, options.system, template_variables(options), options.raw)
    load = partial(load_answer, model, sampling, options.seed, options.max_new_tokens)
    if options.prompt is not None:
        requests = [build(f"prompt {number}", text) for number, text in enumerate(options.prompt, 1)]
    else:
        requests = [build(where, *asked) for where, asked in read_rows(options.input, asked_of)]
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    rows = generate_all(options, model, requests, load, settings | {"seed": options.seed})
    if options.json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
        return
    cut = f"stopped by length, after --max_new_tokens {options.max_new_tokens}"
    if options.output:
        print(f"{options.output}: {len(rows)} rows; {sum(row['finish'] == 'length' for row in rows)} {cut}")
        return
    for request, row in zip(requests, rows, strict=True):
        print(f"--- {request.where} ---\n" * (len(rows) > 1) + printable(row["output"]))
        if row["finish"] == "length":
            print(f"({request.where}: {cut})", file=sys.stderr)
