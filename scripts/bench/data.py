"""Preparing data: cold, warm, on a file larger than is comfortable, and killed. Prints one line of figures for each.

    python scripts/bench/data.py --data.path train.jsonl --model.tokenizer_path Qwen3-0.6B/
    python scripts/bench/data.py --gigabytes 2 --model.tokenizer_path Qwen3-0.6B/
    python scripts/bench/data.py --data.path train.jsonl --model.tokenizer_path Qwen3-0.6B/ --kills 50

Every measurement is a process of its own, watched from outside: seconds of the data stage, and memory as the largest
sum of proportional set sizes over the process and its workers, and of resident set sizes (which count pages that
workers share with their parent once for each). --kills kills as many builds at random moments; each time the next start
must end with the same plan.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_mi100.cli import exit_code

STAGE = """
import json, os, sys, time
from dataclasses import asdict
from titan_mi100.data.prepare import prepare_data
from titan_mi100.config.settings import DataConfig
path, cache, tokenizer, seq_len, workers = sys.argv[1:]
started = time.perf_counter()
data = prepare_data(DataConfig(path=(path,), cache_folder=cache, workers=int(workers)), tokenizer, "", int(seq_len))
print(json.dumps({"seconds": time.perf_counter() - started, **asdict(data.train_counts),
                  "plan": data.facts.plan, "cached": data.cached}))
"""
WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they"


def synthetic(path: Path, gigabytes: float) -> None:
    """Question and answer of made-up words, about 500 bytes a row."""
    draw = random.Random(0)
    words = [
        *WORDS.split(),
        *("".join(draw.choices("abcdefghiklmnoprstuvwy", k=draw.randint(3, 11))) for _ in range(4000)),
    ]
    with path.open("w", encoding="utf-8") as file:
        size, number = 0, 0
        while size < gigabytes * 1e9:
            lines = []
            for _ in range(1000):
                question, answer = (" ".join(draw.choices(words, k=draw.randint(10, 60))) for _ in range(2))
                lines.append(json.dumps({"question": f"{number}: {question}?", "answer": answer}) + "\n")
                number += 1
            block = "".join(lines)
            file.write(block)
            size += len(block)


def memory(session: int) -> tuple[float, float]:
    """MiB of all processes of a session: proportional, resident."""
    pss = rss = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            for line in (process / "smaps_rollup").read_text().splitlines():
                pss += int(line.split()[1]) if line.startswith("Pss:") else 0
                rss += int(line.split()[1]) if line.startswith("Rss:") else 0
        except (OSError, IndexError, ValueError):
            continue
    return pss / 1024, rss / 1024


def start(options: argparse.Namespace, cache: str) -> subprocess.Popen[str]:
    stage = [options.path, cache, options.tokenizer, str(options.seq_len), str(options.workers)]
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, *stage], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output = process.communicate()[0]
    assert process.returncode == 0
    return json.loads(output)


def measure(options: argparse.Namespace, cache: str) -> dict[str, Any]:
    process = start(options, cache)
    pss = rss = 0.0
    while process.poll() is None:
        now = memory(process.pid)
        pss, rss = max(pss, now[0]), max(rss, now[1])
        time.sleep(0.5)  # looking costs time, too
    return {**result(process), "pss": pss, "rss": rss}


def print_figures(name: str, found: dict[str, Any], megabytes: float, options: argparse.Namespace) -> None:
    seconds, tokens = found["seconds"], found["tokens"]
    speed = f", {megabytes / seconds:.2f} MB/s, {tokens / seconds:,.0f} tok/s"
    speed += f" ({megabytes / seconds / options.workers:.2f} and {tokens / seconds / options.workers:,.0f} per worker)"
    print(
        f"{name}: {seconds:.2f} s{speed if name == 'cold' else ''}, {found['documents']:,} documents, {tokens:,} tokens"
        f", {tokens / (found['rows'] * options.seq_len):.2%} real, memory {found['pss']:,.0f} MiB proportional, "
        f"{found['rss']:,.0f} MiB resident summed",
        flush=True,
    )


def kill(options: argparse.Namespace, folder: str) -> bool:
    """Whether all starts after a kill ended with the plan of an undisturbed build."""
    draw, whole = random.Random(0), result(start(options, f"{folder}/whole"))
    same = writing = late = 0
    for number in range(options.kills):
        cache = Path(folder) / f"killed{number}"
        process = start(options, str(cache))
        while not list(cache.glob(".*.incomplete")):  # the build has not begun
            time.sleep(0.01)
        time.sleep(draw.uniform(0, whole["seconds"]))
        writing += bool(list(cache.glob(".*.incomplete")))
        late += process.poll() is not None
        process.kill()
        process.wait()
        same += result(start(options, str(cache)))["plan"] == whole["plan"]
    print(
        f"{same} of {options.kills} starts after a kill ended with the same plan; an undisturbed build takes "
        f"{whole['seconds']:.1f} s; {writing} kills fell into it, {late} came after the process's end"
    )
    return same == options.kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.path", dest="path", default="")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="make a file of this size instead")
    parser.add_argument("--model.tokenizer_path", dest="tokenizer", required=True)
    parser.add_argument("--training.seq_len", dest="seq_len", type=int, default=1024)
    parser.add_argument("--data.workers", dest="workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=3, help="cold and warm starts")
    parser.add_argument("--kills", type=int, default=0, help="kill this many builds instead of timing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.gigabytes:
            options.path = str(Path(folder) / "synthetic.jsonl")
            synthetic(Path(options.path), options.gigabytes)
        megabytes = os.path.getsize(options.path) / 1e6
        print(f"{options.path}: {megabytes:,.1f} MB, {options.workers} workers, seq_len {options.seq_len}")
        if options.kills:
            sys.exit(not kill(options, folder))
        for run in range(options.runs):
            for name in ("cold", "warm"):
                print_figures(name, measure(options, f"{folder}/cache{run}"), megabytes, options)


if __name__ == "__main__":
    sys.exit(exit_code(main))
