"""Tokens per second of generation, ours and transformers' `generate`: the same weights and prompts, greedy, in turn.

    python scripts/bench/generation.py [--model 103m 281m] [--batch 1 8] [--dtype float32] [--rounds 3]

`equal` counts the rows in which both chose the same tokens; in 16 bits two kernels may round a near tie to either side.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from step import MODELS

from titan_mi100.attention.base import Shape
from titan_mi100.attention.choice import without_trial
from titan_mi100.cli import exit_code
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.init import initial_values
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.distributed import device_name, fill_parameters
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import to_hf_config

Answers = Callable[[], list[list[int]]]


def sides(spec: ModelSpec, options: argparse.Namespace, batch: int, device: torch.device) -> tuple[Answers, Answers]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    dtype = getattr(torch, options.dtype)
    with torch.device("meta"):
        ours = Qwen3(spec, without_trial(Shape(1, 128, *spec.attention, options.dtype), device)).to(dtype)
    ours = ours.to_empty(device=device).requires_grad_(False)
    # weights three times as large as a new model's: else all tokens are as probable, and every choice is a near tie
    fill_parameters(
        ours.named_parameters(), lambda name, *part: (1 + 2 * (len(part[0]) > 1)) * initial_values(spec, 7, name, *part)
    )
    theirs = Qwen3ForCausalLM(Qwen3Config(**to_hf_config(spec))).to(device, dtype).eval()
    theirs.load_state_dict(dict(ours.named_parameters()), strict=False)  # a tied head is not in ours
    ours.merge()
    prompts = torch.randint(0, spec.vocab_size, (batch, options.prompt), generator=torch.Generator().manual_seed(0))
    inputs, rows = prompts.to(device), prompts.tolist()

    def answer() -> list[list[int]]:
        return [found.ids for found in generate(ours, rows, Sampling(), (), options.new)]

    def answer_of_transformers() -> list[list[int]]:
        limits = {"max_new_tokens": options.new, "eos_token_id": None, "pad_token_id": 0}
        found = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, **limits)
        return found[:, options.prompt :].tolist()

    return answer, answer_of_transformers


def seconds(answers: Answers) -> float:
    started = time.perf_counter()
    answers()  # ends with the tokens on the host, so a device has finished
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["103m", "281m"], choices=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--prompt", type=int, default=100, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {device_name(device)[0]}, {options.dtype}\n")
    print("| model | batch | ours tok/s | transformers | ratio (range) | equal |\n" + "|---" * 6 + "|", flush=True)
    for name in options.model:
        for batch in options.batch:
            ours, theirs = sides(MODELS[name], options, batch, device)
            equal = sum(a == b for a, b in zip(ours(), theirs(), strict=True))  # a warm-up as well
            pairs = [(seconds(ours), seconds(theirs)) for _ in range(options.rounds)]
            speeds = [batch * options.new / statistics.median(side) for side in zip(*pairs, strict=True)]
            ratios = [other / own for own, other in pairs]
            words = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(
                f"| {name} | {batch} | {speeds[0]:.1f} | {speeds[1]:.1f} | {words} | {equal} of {batch} |", flush=True
            )


if __name__ == "__main__":
    sys.exit(exit_code(main))
