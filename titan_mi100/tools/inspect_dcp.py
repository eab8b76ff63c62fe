"""Lists the content of a checkpoint. Reads DCP folders, HF folders and files of torch.save.

Exit codes: 0 done, 2 it cannot be read.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from titan_mi100 import cli as tool
from titan_mi100.checkpoint.keys import is_weight
from titan_mi100.config.layout import Layout
from titan_mi100.log import setup_logging
from titan_mi100.weights.base import dtype_name
from titan_mi100.weights.source import open_weights, read_manifest, verify_files
from titan_mi100.wording import printable


def main() -> None:
    parser = tool.Parser(description=__doc__, formatter_class=tool.RawHelp)
    parser.add_argument("checkpoint", type=Path, help="such as RUN/checkpoint/step-500")
    parser.add_argument("--verify", action="store_true", help="read all files and compare them with the manifest")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args()
    setup_logging(0)
    sys.exit(tool.exit_code(lambda: show(options)))


def show(options: argparse.Namespace) -> None:
    """Print the facts, fingerprints and tensors of one checkpoint."""
    description = describe(options.checkpoint, options.verify)
    if options.json:
        print(json.dumps(description))
        return
    tensors, fingerprints = description.pop("tensors"), description.pop("fingerprints")
    for name, fact in {**description, **fingerprints}.items():
        print(printable(f"{name}: {fact if isinstance(fact, str) else json.dumps(fact)}"))
    width = max(len(name) for name in tensors)
    for name, tensor in tensors.items():
        print(printable(f"{name:<{width}}  {tensor['dtype']:<9} {tuple(tensor['shape'])}"))


def describe(path: Path, verify: bool) -> dict[str, Any]:
    """What is known of a checkpoint without reading tensor values, as JSON values.

    Args:
        verify: also compare its files with the manifest.

    Raises:
        UserError: it cannot be read, or it is damaged.
    """
    weights = open_weights(path, only_weights=False)
    manifest = read_manifest(path)
    if verify:
        verify_files(path)
    # A checkpoint of another version may have further keys, which are ignored here.
    layout = {key: value for key, value in manifest.get("layout", {}).items() if key in Layout.__dataclass_fields__}
    tensors = {name: {"shape": kind.shape, "dtype": dtype_name(kind.dtype)} for name, kind in weights.kinds.items()}
    return {
        "step": manifest.get("step"),
        "layout": Layout(**layout).describe() if layout else None,
        "processes": manifest.get("processes"),
        "torch": manifest.get("torch"),
        "sealed": bool(manifest),
        "verified": verify and bool(manifest),
        "fingerprints": manifest.get("fingerprints", {}),
        "model_values": sum(torch.Size(k.shape).numel() for n, k in weights.kinds.items() if is_weight(n)),
        "bytes": sum(kind.nbytes for kind in weights.kinds.values()),
        "tensors": tensors,
    }
