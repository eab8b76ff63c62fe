"""Which compute dtype suits this device: the model's own matrix products in each, and a recommendation.

    python scripts/bench/gemm.py [--model 0.6B] [--tokens 1024] [--dtypes float16 bfloat16 float32] [--json]

Times every product of a step: each matrix of a layer and the head, forward and both gradients, on `tokens` tokens. A
step is their sum over the layers. The widest dtype is recommended that is at most a tenth slower than the fastest: fp32
needs no master weights, and bf16 no loss scale.
"""

import argparse
import json
import statistics
import sys
from functools import partial

import torch
from step import MODELS

from titan_mi100.cli import exit_code
from titan_mi100.measure.device import samples
from titan_mi100.measure.products import weights_of
from titan_mi100.parallel.distributed import device_name
from titan_mi100.shapes.base import ModelSpec

DTYPES = ("float32", "bfloat16", "float16")  # in the order of preference
_SLOWER = 1.1


def measure(spec: ModelSpec, tokens: int, dtype: str, device: torch.device) -> dict[str, list[float]]:
    """Matrix -> TFLOP/s of the product, of the gradient of its input and of its weight; "step" -> of all of them."""
    rates, flops, spent = {}, 0.0, 0.0
    for name, (outputs, inputs, count) in weights_of(spec).items():
        x, w, grad = (
            torch.randn(shape, device=device).to(getattr(torch, dtype))
            for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        pairs = ((x, w.t()), (grad, w), (grad.t(), x))
        took = [statistics.median(samples(partial(torch.matmul, a, b), device, most=100)) for a, b in pairs]
        each = 2.0 * tokens * outputs * inputs
        rates[name] = [each / one / 1e12 for one in took]
        flops, spent = flops + 3 * count * each, spent + count * sum(took)
    return {**rates, "step": [flops / spent / 1e12]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=1024, help="of a microbatch: local_batch_size x seq_len")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {dtype: measure(MODELS[options.model], options.tokens, dtype, device) for dtype in options.dtypes}
    fastest = max(rates["step"][0] for rates in found.values())
    best = next(dtype for dtype in DTYPES if dtype in found and found[dtype]["step"][0] * _SLOWER >= fastest)
    if options.json:
        print(json.dumps({"tflops": found, "recommended": best}))
        return
    print(
        f"{options.model}, {options.tokens} tokens, {device_name(device)[0]}, torch {torch.__version__}; TFLOP/s of the"
    )
    print("product, of its input's gradient and of its weight's\n")
    print("| matrix | " + " | ".join(found) + " |\n" + "|---" * (1 + len(found)) + "|")
    for name in found[best]:
        print(
            f"| {name} | " + " | ".join(", ".join(f"{r:.3g}" for r in rates[name]) for rates in found.values()) + " |"
        )
    print(f'\nrecommended: training.mixed_precision_param = "{best}"')


if __name__ == "__main__":
    sys.exit(exit_code(main))
