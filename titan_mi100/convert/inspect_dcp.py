"""Lists the content of a checkpoint, or compares two. Reads DCP folders, HF folders and files of torch.save.

Exit codes: 0 done, 2 it cannot be read. With two checkpoints, as `diff`: 0 equal, 1 different, 2 one cannot be read.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from titan_mi100 import cli as tool
from titan_mi100.checkpoint.keys import is_weight
from titan_mi100.checkpoint.resume import differing
from titan_mi100.config.layout import Layout
from titan_mi100.logging import setup_logging
from titan_mi100.weights.base import Weights, dtype_name, raw_bytes
from titan_mi100.weights.source import open_weights, read_manifest, verify_files
from titan_mi100.wording import printable

_AT_ONCE = 1 << 22  # values compared in fp64 at a time, to bound memory


def main() -> None:
    parser = tool.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="such as RUN/checkpoint/step-500")
    parser.add_argument("other", type=Path, nargs="?", help="a second one, to compare with")
    parser.add_argument("--verify", action="store_true", help="read all files and compare them with the manifest")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args()
    setup_logging(0)
    # exit_code turns a UserError into code 2; `diff` exits with 1 itself
    sys.exit(tool.exit_code(lambda: diff(options) if options.other else show(options)))


def show(options: argparse.Namespace) -> None:
    """Print the facts, fingerprints and tensors of one checkpoint."""
    found = describe(options.checkpoint, options.verify)
    if options.json:
        print(json.dumps(found))
        return
    print(printable(f"{options.checkpoint}: {facts(found)}"))
    for name, value in found["fingerprints"].items():
        print(printable(f"  {name}: {json.dumps(value) if isinstance(value, dict) else value}"))
    width = max(len(name) for name in found["tensors"])
    for name, tensor in found["tensors"].items():
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


def facts(found: dict[str, Any]) -> str:
    """The result of `describe` in one line, without fingerprints and tensors."""
    parts = [f"step {found['step']}" if found["sealed"] else "no manifest"]
    parts += [f"{found['layout']}, {found['processes']} process(es)"] if found["layout"] else []
    parts += [f"torch {found['torch']}"] if found["torch"] else []
    weights = sum(map(is_weight, found["tensors"]))
    parts.append(f"{weights} weights with {found['model_values']:,} values")
    parts.append(f"{len(found['tensors']) - weights} other tensors, {found['bytes'] / 1e6:,.1f} MB in total")
    return "; ".join(parts + (["files verified"] if found["verified"] else []))


def diff(options: argparse.Namespace) -> None:
    """Print the differences between two checkpoints. Exits with 1 if there are any (the manifest does not count)."""
    paths = options.checkpoint, options.other
    found = compare(*paths)  # reads all values of both, tensor by tensor
    if options.json:
        print(json.dumps(found))
    else:
        for side, path in zip(("only_first", "only_second"), paths, strict=True):
            for name in found[side]:
                print(printable(f"only in {path}: {name}"))
        for name, words in found["kinds"].items():
            print(printable(f"{name}: {words}"))
        for name, largest in found["values"].items():
            print(printable(f"{name}: values differ by up to {largest:.3g}"))
        for words in found["manifest"]:
            print(printable(f"manifest: {words}"))
        print(f"{found['equal']} tensors are bit-identical, {len(found['values'])} have different values")
    if any(found[key] for key in ("only_first", "only_second", "kinds", "values")):
        sys.exit(1)


def compare(first: Path, second: Path) -> dict[str, Any]:
    """The differences between two checkpoints, as JSON values.

    Returns:
        only_first, only_second: names of tensors; kinds: name -> both shapes and dtypes, where they differ; values:
        name -> largest absolute difference (NaN if only one of the values is NaN); equal: number of bit-identical
        tensors; manifest: differing entries.
    """
    a, b = (open_weights(path, only_weights=False) for path in (first, second))
    manifests = [read_manifest(path) for path in (first, second)]
    facts = [{key: m.get(key) for key in ("step", "layout", "processes", "fingerprints")} for m in manifests]
    found: dict[str, Any] = {
        "only_first": [name for name in a.kinds if name not in b.kinds],
        "only_second": [name for name in b.kinds if name not in a.kinds],
        "kinds": {},
        "values": {},
        "equal": 0,
        "manifest": list(differing(*facts).values()) if all(manifests) else [],
    }
    for name in a.kinds:
        if name not in b.kinds:
            continue
        if a.kinds[name] != b.kinds[name]:
            words = [f"{tuple(kind.shape)} {dtype_name(kind.dtype)}" for kind in (a.kinds[name], b.kinds[name])]
            found["kinds"][name] = ", ".join(words)
        elif (largest := largest_difference(a, b, name)) is None:
            found["equal"] += 1
        else:
            found["values"][name] = largest
    return found


def largest_difference(a: Weights, b: Weights, name: str) -> float | None:
    """The largest absolute difference between two tensors of one shape and dtype; None if they are bit-identical."""
    left, right = a.tensor(name).flatten(), b.tensor(name).flatten()
    if torch.equal(raw_bytes(left), raw_bytes(right)):  # bytes, because NaN is not equal to itself
        return None
    pairs = zip(left.split(_AT_ONCE), right.split(_AT_ONCE), strict=True)
    return torch.stack([(x.double() - y.double()).abs().max() for x, y in pairs]).max().item()


if __name__ == "__main__":
    main()
