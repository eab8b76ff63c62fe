"""Exact match by generation: `titan-mi100 evaluate exact-match --model PATH --data FILE.jsonl`, in GSM8K's format.

A row has a `question`, and an `answer` with the correct number after `####`. The model answers greedily. Its number is
the first one after its last `####`, or its last number if it writes no `####`. It is correct if the two are equal.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial

from titan_mi100 import cli as tool
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import UserError
from titan_mi100.generation.batch import Row, command_parser, generate_all, open_model, read_rows, template_variables
from titan_mi100.generation.engine import PromptBuilder, full_memory_is_an_error, load_answer
from titan_mi100.model.decode import Sampling
from titan_mi100.text.judge import extract


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("evaluate exact-match", __doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", metavar="FILE.jsonl", required=True, help="rows with question and answer (ends with #### N)")
    add("--limit", type=int, default=0, metavar="N", help="use only the first N rows; 0: all")
    add("--json", action="store_true", help="print the summary as one JSON object")
    return parser


@full_memory_is_an_error()
def _run(options: argparse.Namespace) -> None:
    if options.limit < 0:
        raise UserError(f"--limit {options.limit}: must be 0 (all) or more")
    rows = read_rows(options.data, _question_and_gold)[: options.limit or None]
    model = open_model(options)
    build = PromptBuilder(model, options.system, template_variables(options))
    requests = [build(where, question) for where, (question, _) in rows]
    load = partial(load_answer, model, Sampling(), 0, options.max_new_tokens)

    def judge(index: int, output: str) -> Row:
        (_, (question, gold)), extracted = rows[index], extract(output)
        return {"question": question, "gold": gold, "extracted": extracted, "correct": extracted == gold}

    summary = summarise(generate_all(options, model, requests, load, {}, judge))
    text = (
        f"{options.data}: {summary['correct']} of {summary['n']} correct, exact match {summary['score']:.1%}; "
        f"{summary['no_answer']:.1%} without an answer, {summary['stopped_by_length']} stopped by length "
        f"(--max_new_tokens {options.max_new_tokens})"
    )
    print(json.dumps({"data": options.data, **summary}) if options.json else text)


def _question_and_gold(row: Row) -> tuple[str, str]:
    """The question of a row, and its correct number. Raises BadRecord: the row is not in GSM8K's format."""
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise BadRecord("wrong row", f"{key} must be a text")
    gold = extract(row["answer"]) if "####" in row["answer"] else None
    if gold is None:
        raise BadRecord("no gold answer", "the answer must end with #### and a number")
    return row["question"], gold


def summarise(rows: Sequence[Row]) -> Row:
    """Counts of judged rows: n, correct, score (a share), no_answer (a share), stopped_by_length."""
    n, correct = len(rows), sum(row["correct"] for row in rows)
    without = sum(row["extracted"] is None for row in rows)
    cut = sum(row["finish"] == "length" for row in rows)
    return {"n": n, "correct": correct, "score": correct / n, "no_answer": without / n, "stopped_by_length": cut}
