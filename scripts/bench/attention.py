"""Which attention backend is fastest on this device: forward and backward of one layer, side by side in one run.

    python scripts/bench/attention.py [--seq 1024 4096] [--document 200 1024 0] [--backend sdpa triton ...] [--json]

Times are medians in ms over the rounds; the backends take turns within a round, so that drift hits all alike. The
ratio is to the first backend that works. A row is filled with documents of one length; 0 is one document per row. A
backend that does not work here is named with the reason. The winner goes into FASTEST in
titan_mi100/attention/choice.py, under the architecture that the output names.
"""

import argparse
import json
import statistics
import sys

import torch

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Backend, Documents, Shape
from titan_mi100.attention.running import running_kernel
from titan_mi100.attention.trial import inputs, milliseconds
from titan_mi100.cli import exit_code
from titan_mi100.config.kernels import KERNELS
from titan_mi100.parallel.distributed import device_name
from titan_mi100.wording import shortened

NAMES = tuple(KERNELS)


def documents_of(batch: int, seq: int, length: int) -> Documents:
    """Rows of documents of this length; the last of a row is what is left. 0: a row is one document."""
    length = min(length or seq, seq)
    row = (length,) * (seq // length) + (seq % length,) * (seq % length > 0)
    return Documents(batch, seq, row * batch)


def measure(shape: Shape, length: int, names: list[str], rounds: int, device: torch.device, arch: str) -> dict:
    """Median milliseconds and the kernel by backend, or why there are none."""
    documents = documents_of(shape.batch, shape.seq, length)
    tensors = inputs(shape, device)
    backends: dict[str, Backend] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            backend = make_backend(name, "", arch)
            milliseconds(backend, tensors, documents)  # a warm-up, which compiles too
            backends[name] = backend
        except Exception as error:  # whatever a library raises where it does not work
            refused[name] = f"{type(error).__name__}: {shortened(str(error), 160)}"
    times: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(rounds):
        for name, backend in backends.items():
            times[name] += milliseconds(backend, tensors, documents)
    return {
        "seq": shape.seq,
        "document": length,
        "ms": {name: statistics.median(found) for name, found in times.items()},
        "kernel": {name: running_kernel(backend, shape, documents, device) for name, backend in backends.items()},
        "refused": refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[1024, 4096], help="tokens per row")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument(
        "--document", type=int, nargs="+", default=[200, 1024], help="tokens per document; 0: the row's"
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 8], help="query heads, key heads (Qwen3-0.6B)")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backend", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words, arch, _ = device_name(device)
    arch = arch.split(":")[0]
    results = []
    for seq in options.seq:
        shape = Shape(options.batch, seq, *options.heads, options.head_dim, options.dtype)
        for length in options.document:
            results.append(measure(shape, length, options.backend, options.rounds, device, arch))
    if options.json:
        print(json.dumps({"torch": torch.__version__, "device": words, "arch": arch, "results": results}))
        return
    shape_words = f"batch {options.batch}, heads {options.heads}, D {options.head_dim}"
    print(f"torch {torch.__version__}, {words} [{arch}], {options.dtype}, {shape_words}\n")
    names = [name for name in options.backend if any(name in result["ms"] for result in results)]
    print("| seq | document | " + " | ".join(f"{name} ms (ratio)" for name in names) + " |")
    print("|---" * (2 + len(names)) + "|")
    for result in results:
        ms = result["ms"]
        first = next(iter(ms.values()))
        cells = [f"{ms[name]:.1f} ({ms[name] / first:.2f})" if name in ms else "-" for name in names]
        print(f"| {result['seq']} | {result['document'] or 'row'} | " + " | ".join(cells) + " |")
    print("\nkernels:", "; ".join(f"{name}: {kernel}" for name, kernel in results[0]["kernel"].items()))
    for name, why in results[0]["refused"].items():
        print(f"{name} does not work here: {why}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
