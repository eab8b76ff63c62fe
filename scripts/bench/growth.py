"""How a step's cost grows with rows, their length, their documents and the layers, on this machine.

    python scripts/bench/growth.py [--dtype float32] [--rounds 3] [--json]

A model of 4M parameters takes the trainer's own steps, of 8,192 tokens at least. All cases of a group take theirs in
turn, so that a machine whose speed drifts treats them alike. Of each group the cost per token, or per counted FLOP,
relative to its first case: 1.00 is no growth. Documents of 200 tokens are to cost the same per token in any batch,
within 10%; all else is to follow the FLOPs that planning/costs.py counts within 15%; 100 documents in a row are never
to be slower than one.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from step import open_bench

from titan_mi100.cli import exit_code
from titan_mi100.parallel import distributed
from titan_mi100.planning.costs import train_flops
from titan_mi100.shapes.qwen3 import Qwen3Spec

SPEC = Qwen3Spec(4096, 256, 768, 4, 4, 2, 64, True, rope_theta=1e6, max_position_embeddings=40_960)
SHORT = 200
_TOKENS = 8192  # of a step, at least: else what a step costs once is most of it


class Case(NamedTuple):
    batch: int
    seq: int
    document: int
    layers: int = SPEC.num_hidden_layers


GROUPS: dict[str, tuple[str, list[Case]]] = {  # name -> what the cost is divided by, the cases
    "documents of 200": (
        "token",
        [Case(b, s, SHORT) for s in (512, 2048, 8192) for b in (1, 4, 16)],
    ),
    "one document": ("flop", [Case(1, s, s) for s in (1024, 2048, 4096, 8192)]),
    "layers": ("flop", [Case(4, 1024, SHORT, n) for n in (2, 4, 8, 16)]),
    "100 documents and one": ("token", [Case(1, 8192, 8192), Case(1, 8192, 82)]),
}


def measure(
    options: argparse.Namespace, cases: list[Case], per: str, world: distributed.World
) -> Iterator[dict[str, Any]]:
    runs = []
    for case in cases:
        given = argparse.Namespace(**vars(options), batch=case.batch, seq=case.seq, document=case.document)
        given.accumulation = max(1, _TOKENS // (case.batch * case.seq))
        runs.append(open_bench(given, replace(SPEC, num_hidden_layers=case.layers), world))
    costs: list[list[float]] = [[] for _ in cases]
    for number in range(options.rounds + 1):
        for run, case, cost in zip(runs, cases, costs, strict=True):
            took = run.step()
            spec = replace(SPEC, num_hidden_layers=case.layers)
            flops = train_flops(spec, took.tokens, took.supervised, took.attention_pairs)
            if number:  # the first is a warm-up
                cost.append(took.seconds / (took.tokens if per == "token" else flops))
    # pair by pair, as the machine's speed drifts
    ratios = [statistics.median(own / first for own, first in zip(cost, costs[0], strict=True)) for cost in costs]
    for case, cost, ratio in zip(cases, costs, ratios, strict=True):
        yield {**case._asdict(), "per": per, "cost": statistics.median(cost), "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backend", default="auto", help="of attention")
    parser.add_argument("--checkpointing", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="a JSON object per case instead of a table")
    options = parser.parse_args()
    options.supervised, options.zero_stage, options.compile = 0.65, 3, False
    world = distributed.init_distributed()
    if not options.json:
        print("| group | batch | seq | document | layers | cost | relative |\n" + "|---" * 7 + "|")
    for name in options.group:
        per, cases = GROUPS[name]
        for found in measure(options, cases, per, world):
            cost = f"{1e6 * found['cost']:.0f} us/token" if per == "token" else f"{1e12 * found['cost']:.2f} s/TFLOP"
            cells = (name, *(found[key] for key in Case._fields), cost, f"{found['ratio']:.2f}")
            line = " | ".join(map(str, cells))
            print(json.dumps({"group": name, **found}) if options.json else f"| {line} |", flush=True)
    distributed.leave(0)


if __name__ == "__main__":
    sys.exit(exit_code(main))
