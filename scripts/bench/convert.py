"""HF -> DCP -> HF of a random model of a real size, beside `cp -r` of the same folder: bytes, time and peak memory.

Usage: python scripts/bench/convert.py [--flavor 8B] [--folder F] [--verify bytes]

The folder needs three times the model's size; everything made there is removed as soon as it has been used. Each
command begins with the source out of the page cache; times are given without and with what `sync` then takes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from titan_mi100.cli import exit_code
from titan_mi100.config.assets import CONFIG, _json
from titan_mi100.shapes.base import ModelSpec, parameter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.weights.base import Kind
from titan_mi100.weights.hf import write_hf

TOOLS = Path(__file__).resolve().parents[2] / "checkpoint_tools"
SHARD_BYTES = 4_000_000_000


def make_model(folder: Path, spec: ModelSpec) -> None:
    """A folder of random bf16 weights, sharded as published ones are."""
    folder.mkdir()
    kinds = {name: Kind(tuple(shape), torch.bfloat16) for name, shape in parameter_shapes(spec).items()}
    (folder / CONFIG).write_bytes(_json({**to_hf_config(spec), "torch_dtype": "bfloat16"}))
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(spec.initializer_range).bfloat16()

    def pieces() -> Iterator[tuple[str, torch.Tensor]]:
        for name, kind in kinds.items():
            rolled = noise.roll(zlib.crc32(name.encode()) % len(noise))
            times, rest = divmod(torch.Size(kind.shape).numel(), len(noise))
            yield from ((name, rolled) for _ in range(times))
            yield name, rolled[:rest]

    write_hf(folder, kinds, pieces(), SHARD_BYTES)


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache, so that each command reads them from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(command: Sequence[str], source: Path) -> tuple[float, float, float, float]:
    """Seconds of a command, seconds until the disk has all, seconds of CPU, and its peak memory in GiB."""
    os.sync()
    forget(source)
    started = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    ended = time.perf_counter()
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    os.sync()
    cpu = usage.ru_utime + usage.ru_stime
    return ended - started, time.perf_counter() - started, cpu, usage.ru_maxrss / 2**20


def places(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by the safetensors library alone."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found |= dict.fromkeys(handle.keys(), file)
    return found


def compare(before: Path, after: Path) -> int:
    """How many tensors are bit-identical; exits if one is not."""
    left, right = places(before), places(after)
    if left.keys() != right.keys():
        sys.exit(f"other tensors than before: {sorted(left.keys() ^ right.keys())}")
    for name in left:  # opened anew for each: a map's pages stay in memory
        a, b = (safe_open(files[name], framework="pt").get_tensor(name) for files in (left, right))
        if a.dtype != b.dtype or not torch.equal(a.view(torch.int16), b.view(torch.int16)):
            sys.exit(f"{name} is not what it was")
    return len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", choices=list(PRESETS), default="0.6B", help="the model's size")
    parser.add_argument(
        "--folder", default=None, help="where to work (default: the system's folder for temporary files)"
    )
    parser.add_argument("--verify", default="bytes", help="as of the converters")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        source, copy, dcp, back = (work / name for name in ("hf", "copy", "dcp", "back"))
        make_model(source, PRESETS[options.flavor])
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e9
        shards = len(list(source.glob("*.safetensors")))
        tied = "tied" if PRESETS[options.flavor].tie_word_embeddings else "untied"
        print(f"{options.flavor}: {size:.2f} GB in {shards} file(s), {tied}", flush=True)
        rows = [("cp -r", *timed(["cp", "-r", str(source), str(copy)], source))]
        shutil.rmtree(copy)
        for name, begin, end in (("hf_to_dcp", source, dcp), ("dcp_to_hf", dcp, back)):
            command = [sys.executable, str(TOOLS / f"{name}.py"), "--input_dir", str(begin), "--output_dir", str(end)]
            rows.append((f"{name} --verify {options.verify}", *timed([*command, "--verify", options.verify], begin)))
        shutil.rmtree(dcp)
        print(
            f"{'command':<28} {'s':>7} {'synced':>7} {'CPU s':>6} {'GB/s':>6} {'of cp -r':>9} {'synced':>7} {'GiB':>6}"
        )
        for name, *times, peak in rows:
            seconds, synced, cpu = times
            shares = f"{rows[0][1] / seconds:9.2f} {rows[0][2] / synced:7.2f}"
            print(f"{name:<28} {seconds:7.1f} {synced:7.1f} {cpu:6.1f} {size / seconds:6.2f} {shares} {peak:6.2f}")
        print(f"{compare(source, back)} tensors bit-identical")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(exit_code(main))
