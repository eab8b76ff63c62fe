"""Which attention backend is fastest on this device: forward and backward of one layer, side by side in one run.

    python scripts/bench/attention.py [--seq 1024 4096] [--document 200 1024] [--rounds 5] [--json]

Times are medians in ms over the rounds; the backends take turns within a round, so that drift hits all alike. The
ratio is to the first backend. The winner goes into FASTEST in titan_mi100/model/attention_choice.py, under the
architecture that the output names.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace

import torch

from titan_mi100.cli import exit_code
from titan_mi100.config.model_spec import PRESETS
from titan_mi100.model.attention import Backend, Documents, Eager, SdpaDocuments, SdpaMask
from titan_mi100.model.attention_choice import running_kernel
from titan_mi100.parallel.distributed import device_name

BACKENDS: tuple[Backend, ...] = (SdpaDocuments(), SdpaMask(), Eager())
NAMES = [backend.name for backend in BACKENDS]


def measure(seq: int, document: int, heads: tuple[int, int], dim: int, rounds: int, device: torch.device) -> dict:
    """Median milliseconds of forward plus backward for each backend; documents of the given length fill the row."""
    shape = (1, seq, heads[0], dim)
    q = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (
        torch.randn(1, seq, heads[1], dim, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
    )
    rest = seq % document
    documents = Documents(1, seq, (document,) * (seq // document) + (rest,) * (rest > 0))
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for round_number in range(rounds + 1):
        for backend in BACKENDS:
            started = time.perf_counter()
            backend(q, k, v, backend.prepare(documents, device)).backward(grad)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:  # the first is a warm-up
                times[backend.name].append(1000 * (time.perf_counter() - started))
    spec = replace(PRESETS["debug"], num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=dim)
    kernels = {b.name: running_kernel(b, spec, documents, torch.bfloat16, device) for b in BACKENDS}
    return {"seq": seq, "document": document, "ms": {n: statistics.median(t) for n, t in times.items()},
            "kernel": kernels}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[1024, 4096], help="tokens per row")
    parser.add_argument("--document", type=int, nargs="+", default=[200, 1024], help="tokens per document")
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 8], help="query heads, key heads (Qwen3-0.6B)")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words, arch, _ = device_name(device)
    results = [
        measure(seq, document, tuple(options.heads), options.head_dim, options.rounds, device)
        for seq in options.seq
        for document in options.document
    ]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "device": words, "arch": arch, "results": results}))
        return
    print(f"torch {torch.__version__}, {words} [{arch}], bf16, heads {options.heads}, D {options.head_dim}\n")
    print("| seq | document | " + " | ".join(f"{name} ms (ratio)" for name in NAMES) + " |")
    print("|---" * (2 + len(NAMES)) + "|")
    for result in results:
        first = result["ms"][NAMES[0]]
        cells = [f"{result['ms'][name]:.0f} ({result['ms'][name] / first:.2f})" for name in NAMES]
        print(f"| {result['seq']} | {result['document']} | " + " | ".join(cells) + " |")
    print("\nkernels:", "; ".join(f"{name}: {kernel}" for name, kernel in results[0]["kernel"].items()))


if __name__ == "__main__":
    sys.exit(exit_code(main))
