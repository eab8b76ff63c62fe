"""Which form of attention is fastest on this device: forward and backward of one layer, side by side in one run.

    python scripts/bench/attention.py [--seq 1024 4096] [--document 200 1024] [--rounds 5] [--json]

Times are medians in ms over the rounds; the backends take turns within a round, so that drift hits all alike. The
ratio is to the first backend. The winner for a device goes into SDPA_FORM in titan_mi100/model/attention.py.
"""

import argparse
import json
import statistics
import time

import torch

from titan_mi100.model import attention
from titan_mi100.parallel.distributed import device_name

BACKENDS = ("sdpa_documents", "sdpa_mask", "eager")


def measure(seq: int, document: int, heads: tuple[int, int], dim: int, rounds: int, device: torch.device) -> dict:
    """Median milliseconds of forward plus backward for each backend; documents of the given length fill the row."""
    shape = (1, seq, heads[0], dim)
    q = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (
        torch.randn(1, seq, heads[1], dim, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
    )
    ids = (torch.arange(seq, device=device) // document)[None]
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for round_number in range(rounds + 1):
        for name in BACKENDS:
            started = time.perf_counter()
            attention.attention(name, q, k, v, attention.prepare(name, ids)).backward(grad)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:  # the first is a warm-up
                times[name].append(1000 * (time.perf_counter() - started))
    kernels = {name: attention.kernel_name(name, q, k, v, attention.prepare(name, ids)) for name in BACKENDS}
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
    results = [
        measure(seq, document, tuple(options.heads), options.head_dim, options.rounds, device)
        for seq in options.seq
        for document in options.document
    ]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "device": device_name(device)[0], "results": results}))
        return
    print(f"torch {torch.__version__}, {device_name(device)[0]}, bf16, heads {options.heads}, D {options.head_dim}\n")
    print("| seq | document | " + " | ".join(f"{name} ms (ratio)" for name in BACKENDS) + " |")
    print("|---" * (2 + len(BACKENDS)) + "|")
    for result in results:
        first = result["ms"][BACKENDS[0]]
        cells = [f"{result['ms'][name]:.0f} ({result['ms'][name] / first:.2f})" for name in BACKENDS]
        print(f"| {result['seq']} | {result['document']} | " + " | ".join(cells) + " |")
    print("\nkernels:", "; ".join(f"{name}: {kernel}" for name, kernel in results[0]["kernel"].items()))


if __name__ == "__main__":
    main()
