"""What a start and a checkpoint of thousands of ranks exchange, timed on this machine, with its memory.

    python scripts/bench/start_at_scale.py [--ranks 5120] [--writers 256] [--only store|plan|load] [--json]

store: so many clients on one TCPStore do what our start does, phase by phase; requests, seconds, the server's memory.
plan:  what rank 0 does to write DCP's metadata of Qwen3-8B with AdamW, FSDP2 over the writers: stock, where each rank
       plans all that it holds; and ours, where each plans what it alone writes. Then what it takes to read it.
load:  what Checkpointer.load exchanged before (each rank's names, on each rank) and now.

There are as many clients as ranks, in a few processes on one machine, so there is no network; requests are counted as
gloo and NCCL make them (counted on jobs of 4 and 8 ranks). "scaled" marks what was measured on a part and multiplied.
"""

import argparse
import json
import math
import multiprocessing
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from titan_mi100.cli import exit_code
from titan_mi100.files import child
from titan_mi100.files.stored import open_dcp
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.qwen3 import Qwen3Spec

SPEC = Qwen3Spec(151936, 4096, 12288, 36, 32, 8, 128, False, rope_theta=1e6, max_position_embeddings=40_960)  # 8B
ADDRESS, PER_PEER = 154, 8  # bytes of a rank's gloo address, and of what it adds for each peer if it connects to all
AXES = (20, 32, 8)  # ranks of a group along dp_replicate, dp_shard, tp
MOMENTS = ("exp_avg", "exp_avg_sq")
POLLS = 8  # by wait_for_all in the first 2.5 seconds of waiting
SAMPLED = 8  # clients that connect to all

Found = dict[str, Any]


def memory_mb(field: str = "VmRSS", pid: int | str = "self") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def in_a_process(work: Callable[..., Found], *arguments: Any) -> Found:
    """What it finds in a fresh process, and that process's peak memory beyond what the imports take."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs, work, *arguments))
    process.start()
    theirs.close()
    found: Found = ours.recv()
    process.join()
    return found


def _work(pipe: Any, work: Callable[..., Found], *arguments: Any) -> None:
    before = memory_mb()
    found = work(*arguments)
    pipe.send(found | {"peak MB": round(memory_mb("VmHWM") - before)})


# ---- the store


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def phase(name: str, rank: int, store: dist.TCPStore, ranks: int) -> int:
    """What one rank does in a phase; returns its requests."""
    hops = [math.ceil(math.log2(size)) for size in (ranks, *AXES)]  # whom a group's ranks talk to, each
    if name == "count in":  # of init_process_group
        store.add("init", 1)
        store.wait(["init"])
        return 2
    if name == "publish addresses":  # of gloo, in the default group and in each axis
        for group in range(len(hops)):
            store.set(f"{group}/{rank}", "a" * ADDRESS)
        return len(hops)
    if name == "connect on demand":
        for group, peers in enumerate(hops):
            for hop in range(peers):
                _fetch(store, f"{group}/{(rank + (1 << hop)) % ranks}")
        return 2 * sum(hops)
    if name == "NCCL ids":  # of the world and of each axis
        for _ in hops:
            _fetch(store, "init")
        return 2 * len(hops)
    if name == "wait_for_all":
        for _ in range(POLLS):
            store.add("met", 0)
        return POLLS
    if name == "publish for all":
        store.set(f"all/{rank}", "a" * (ADDRESS + PER_PEER * ranks))
        return 1
    assert name == "connect to all"
    for peer in range(ranks):
        _fetch(store, f"all/{peer}")
    return 2 * ranks


def _fetch(store: dist.TCPStore, key: str) -> None:
    store.wait([key])
    store.get(key)


# whether only SAMPLED ranks do it
PHASES = {
    "count in": False,
    "publish addresses": False,
    "connect on demand": False,
    "NCCL ids": False,
    "wait_for_all": False,
    "publish for all": False,
    "connect to all": True,
}


def clients(pipe: Any, port: int, first: int, last: int, ranks: int) -> None:
    """Some of the clients, in one process: each phase when it is told to, answered by the number of requests."""
    numbers = range(first, last)
    torch.set_num_threads(1)
    pipe.send(0)
    pipe.recv()
    connect = partial(dist.TCPStore, "127.0.0.1", port, is_master=False, wait_for_workers=False)
    with ThreadPoolExecutor(64) as pool:  # each connection looks names up, and a slow DNS holds it up
        stores = list(pool.map(lambda _: connect(), numbers))
    pipe.send(len(stores))
    while (name := pipe.recv()) is not None:
        acting = [(r, store) for r, store in zip(numbers, stores, strict=True) if not PHASES[name] or r < SAMPLED]
        pipe.send(sum(phase(name, rank, store, ranks) for rank, store in acting))


def time_store(ranks: int, workers: int) -> Found:
    # torch looks up a name for each connection; one that has none waits for the DNS, and is warned of
    os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    context = multiprocessing.get_context("spawn")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    assert ranks + 100 < limit, f"ulimit -n is {limit}; {ranks} clients need more"
    server_end, pipe = context.Pipe()
    server = context.Process(target=serve, args=(pipe,))
    server.start()
    port, idle, ends = server_end.recv(), memory_mb(pid=server.pid or 0), []
    for number in range(workers):
        ours, theirs = context.Pipe()
        share = [ranks * i // workers for i in (number, number + 1)]
        context.Process(target=clients, args=(theirs, port, *share, ranks)).start()
        ends.append(ours)
    for end in ends:
        end.recv()
    found: Found = {}
    for name in ("connect", *PHASES):
        started = time.perf_counter()
        for end in ends:
            end.send(name)
        requests, seconds = sum(end.recv() for end in ends), time.perf_counter() - started
        factor = ranks / SAMPLED if PHASES.get(name) else 1
        found[name + " (scaled)" * (factor > 1)] = {
            "requests": round(requests * factor),
            "seconds": round(seconds * factor, 2),
            "server MB": round(memory_mb(pid=server.pid or 0) - idle),
        }
    for end in (*ends, server_end):
        end.send(None)
    server.join()
    return found


# ---- DCP's plan and metadata


def local_plan(rank: int, writers: int, holds_all: bool) -> SavePlan:
    """Of one rank, as DefaultSavePlanner makes it: rows in equal parts; each parameter's `step` is on every rank."""
    items, names = [], {}
    for name, shape in parameter_shapes(SPEC).items():
        rows = -(-shape[0] // writers)
        first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        part = torch.Size([first] + [0] * (len(shape) - 1)), torch.Size([last - first, *shape[1:]])
        boxes = {own: (*part, torch.Size(shape)) for own in (name, *(f"optimizer.{name}.{m}" for m in MOMENTS))}
        if holds_all or not rank:
            boxes[f"optimizer.{name}.step"] = (torch.Size([]),) * 3
        for own, (offset, size, whole) in boxes.items():
            kind = WriteItemType.SHARD if whole else WriteItemType.TENSOR
            chunk = ChunkStorageMetadata(offset, size)
            data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), whole)
            items.append(WriteItem(MetadataIndex(own, offset), kind, tensor_data=data))
            names[own] = (own,)
    return SavePlan(items, planner_data=names)


def results_of(plan: SavePlan, rank: int) -> list[WriteResult]:
    """Where its values lie in the rank's file."""
    found, begin = [], 0
    for item in plan.items:
        assert item.tensor_data is not None and item.tensor_data.chunk is not None
        size = math.prod(item.tensor_data.chunk.sizes) * 4 + 1500  # and the zip around them
        found.append(WriteResult(item.index, size, _StorageInfo(f"__{rank}_0.distcp", begin, size)))
        begin += size
    return found


def plan_globally(writers: int, holds_all: bool) -> Found:
    """On rank 0, from what the ranks sent; stock DCP sends plans back, and the metadata to every rank."""
    sent, plans, results = 0, [], list[list[WriteResult]]()
    for rank in range(writers):
        plan = local_plan(rank, writers, holds_all)
        blob = pickle.dumps((plan, results_of(plan, rank)))
        sent += len(blob)
        plan, result = pickle.loads(blob)  # as they arrive: no object is shared
        plans.append(plan)
        results.append(result)
    started = time.process_time()
    _, metadata = DefaultSavePlanner().create_global_plan(plans)
    planned = time.process_time() - started
    metadata.storage_data = {result.index: result.storage_data for found in results for result in found}
    size = len(pickle.dumps(metadata))
    return {
        "rank 0 receives MB": round(sent / 1e6, 1),
        "global plan, CPU s": round(planned, 1),
        ".metadata MB": round(size / 1e6, 1),
        "ranks receive of .metadata MB": round(size / 1e6, 1) if holds_all else 0,
    }


def write_metadata(folder: Path, writers: int) -> Found:
    plans = [local_plan(rank, writers, False) for rank in range(writers)]
    _, metadata = DefaultSavePlanner().create_global_plan(plans)
    metadata.storage_data, largest = {}, 0
    for rank, plan in enumerate(plans):
        for result in results_of(plan, rank):
            metadata.storage_data[result.index] = result.storage_data
            largest = max(largest, result.storage_data.offset + result.storage_data.length)
    for rank in range(writers):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(largest)  # a hole: no bytes on the disk
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return {}


def read_metadata(folder: Path) -> Found:
    """What each rank of a run that resumes does before it reads values."""
    started = time.perf_counter()
    stored = open_dcp(folder)
    seconds = time.perf_counter() - started
    child.end()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "tensors": len(stored.kinds),
        "seconds": round(seconds, 1),
        "child's CPU s": round(used.ru_utime + used.ru_stime, 1),
        "child's peak MB": round(used.ru_maxrss / 1024),
    }


# ---- a load's exchange


def time_load(ranks: int) -> Found:
    items = local_plan(0, 1, True).items
    kinds = {item.index.fqn: (item.tensor_data.size, torch.float32) for item in items if item.tensor_data is not None}
    blob = pickle.dumps(kinds)
    started = time.perf_counter()
    for _ in range(100):
        pickle.loads(blob)
    return {
        "names": len(kinds),
        "gathered before, MB on each rank": round(len(blob) * ranks / 1e6, 1),
        "unpickled before, s on each rank (scaled)": round((time.perf_counter() - started) / 100 * ranks, 1),
        "reduced now, bytes": len(kinds) + 64 * 8 + 8 * 4,  # a mask, a digest's extremes, who has failed
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=5120)
    parser.add_argument("--writers", type=int, default=256, help="ranks of one replica")
    parser.add_argument("--workers", type=int, default=8, help="processes that hold the clients")
    parser.add_argument("--only", choices=("store", "plan", "load"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: Found = {}

    def note(part: str, figures: Found) -> None:
        found[part] = figures
        if not options.json:
            print(part, *(f"  {name:<44}{value}" for name, value in figures.items()), sep="\n", flush=True)

    note("machine", {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0]})
    if options.only in (None, "store"):
        note("store", time_store(options.ranks, options.workers))
    if options.only in (None, "plan"):
        note("plan, stock", in_a_process(plan_globally, options.writers, True))
        note("plan, ours", in_a_process(plan_globally, options.writers, False))
        with tempfile.TemporaryDirectory() as folder:
            in_a_process(write_metadata, Path(folder), options.writers)
            note("reading .metadata", in_a_process(read_metadata, Path(folder)))
    if options.only in (None, "load"):
        note("load", time_load(options.ranks))
    if options.json:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
