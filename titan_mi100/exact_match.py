"""Exact match by generation: `python -m titan_mi100.exact_match --model PATH --data FILE.jsonl`, in GSM8K's format.

A row has a `question`, and an `answer` whose number stands after `####`. The model answers greedily; its answer is the
number after its last `####`, or else its last number; right is what is the same number.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_mi100.answers import Answer, RowFile, answer_all, read_rows
from titan_mi100.data.strict_json import BadRow
from titan_mi100.decode import Generated, Sampling
from titan_mi100.generate import (
    Model,
    Speaker,
    add_options,
    check_options,
    check_requests,
    device_and_dtype,
    exit_code,
    load_answer,
    load_model,
    made_with,
)
from titan_mi100.hf_io import is_hf_folder

# 1,234.5 is one number and 1,2 are two; in 5-3 and 5 - 3 the minus is an operator.
_NUMBER = re.compile(r"(?<![0-9.])-?\$?-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m titan_mi100.exact_match", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add_options(parser)
    parser.add_argument("--data", metavar="FILE.jsonl", required=True, help="rows with question and answer (#### N)")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N rows; 0: all")
    parser.add_argument(
        "--engine", choices=("titan", "transformers"), default="titan", help="what generates; transformers: to compare"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    return parser


def _run(options: argparse.Namespace) -> None:
    problems = [f"limit = {options.limit} must be 0 (all) or more"] if options.limit < 0 else []
    if options.engine == "transformers" and (options.adapter or not is_hf_folder(options.model)):
        problems.append("--engine transformers reads HF folders only; export or merge first")
    check_options(options, problems)
    device, dtype = device_and_dtype(options)
    rows = read_rows(options.data, _question_and_gold)[: options.limit or None]
    model = load_model(options.model, options.adapter, options.tokenizer_path, device, dtype)
    speak = Speaker(model, False, options.system, options.enable_thinking)
    requests = [speak(where, question) for where, (question, _) in rows]
    check_requests(model.spec, requests, options.max_new_tokens)
    file = RowFile(options.output, requests, {**made_with(options, model, dtype), "engine": options.engine})
    load = partial(load_answer, model, Sampling(), 0, options.max_new_tokens)
    if options.engine == "transformers":
        load = partial(load_transformers, options.model, model, device, dtype, options.max_new_tokens)

    def judged(number: int, output: str) -> dict[str, Any]:
        question, gold = rows[number][1]
        found = extract(output)
        return {"question": question, "gold": gold, "extracted": found, "correct": found == gold}

    done = answer_all(requests, load, model.tokenizer, options.batch_size, file, judged)
    summary = summarise(done)
    if options.json:
        print(json.dumps({"data": options.data, **summary}))
        return
    print(
        f"{options.data}: {summary['correct']} of {summary['n']} correct, exact match {summary['score']:.1%}; "
        f"{summary['no_answer']:.1%} without an answer, {summary['stopped_by_length']} stopped by length "
        f"(--max_new_tokens {options.max_new_tokens})"
    )


def _question_and_gold(row: dict[str, Any]) -> tuple[str, str]:
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise BadRow("wrong row", f"{key} must be a text")
    gold = extract(row["answer"]) if "####" in row["answer"] else None
    if gold is None:
        raise BadRow("no gold answer", "the answer must end with #### and a number")
    return row["question"], gold


def extract(text: str) -> str | None:
    """The number that a text answers with, normalised: the first after its last `####`, else the last; None: none."""
    _, marker, behind = text.rpartition("####")
    numbers = _NUMBER.findall(behind if marker else text)
    return normalise(numbers[0 if marker else -1]) if numbers else None


def normalise(number: str) -> str:
    """One spelling of a number: no commas, currency, leading zeros, nor zeros behind the point.

    Args:
        number: such as "-$01,234.50", as `extract` finds it.
    """
    value = Decimal(re.sub(r"[,$]", "", number))
    text = f"{value:f}"
    text = (text.rstrip("0").rstrip(".") if "." in text else text).lstrip("-")
    return f"-{text}" if value < 0 else text


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """n, correct, score, no_answer (a share) and stopped_by_length of judged rows."""
    correct = sum(row["correct"] for row in rows)
    return {
        "n": len(rows),
        "correct": correct,
        "score": correct / len(rows),
        "no_answer": sum(row["extracted"] is None for row in rows) / len(rows),
        "stopped_by_length": sum(row["finish"] == "length" for row in rows),
    }


def load_transformers(path: str, model: Model, device: torch.device, dtype: torch.dtype, max_new_tokens: int) -> Answer:
    """The same by transformers' model and its `generate`, to compare with. It needs an HF folder."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(Path(path))
    network = network.to(device, dtype).eval()
    stop_ids, pad = sorted(model.stop_ids), model.tokenizer.pad_token_id

    def answer(prompts: Sequence[list[int]], numbers: Sequence[int]) -> list[Generated]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        said = network.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=pad,
        )
        found = []
        for row in said[:, longest:].tolist():
            stop = next((place for place, token in enumerate(row) if token in model.stop_ids), None)
            found.append(Generated(row[:stop], stop is not None))
        return found

    return answer


if __name__ == "__main__":
    sys.exit(main())
