"""Corpora: preparation against `datasets.map` with the same tiktoken encoder, and rows read from a cold cache.

    python scripts/bench/corpus.py --input corpus.jsonl --tokenizer Qwen3-0.6B/ [--pairs 3]
    python scripts/bench/corpus.py --corpus prepared/ --seq_len 8192 [--ranks 8]

The first needs `datasets`. Both sides are whole processes with as many workers, in turn; memory is the largest sum of
proportional set sizes of a process and its workers. The second drops the corpus from the page cache and reads the
beginning of an epoch as rank 0 of so many would: bytes that came from the disk against those that were used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data import memory

from titan_mi100.cli import exit_code
from titan_mi100.data.corpus import CorpusRows, read_corpus

OTHER = """
import sys
import datasets, numpy as np
from titan_mi100.text.load import load_tokenizer
path, tokenizer, out, workers = sys.argv[1:]
encoder, end = load_tokenizer(tokenizer)._bpe, 0

def tokenise(batch):
    ids = [[*encoded, end] for encoded in encoder.encode_ordinary_batch(batch["text"], num_threads=1)]
    return {"ids": ids, "len": list(map(len, ids))}

rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=out)
done = rows.map(tokenise, batched=True, remove_columns=rows.column_names, num_proc=int(workers))
values = np.memmap(f"{out}/train.bin", dtype=np.uint32, mode="w+", shape=(sum(done["len"]),))
place = 0
for shard in range(64):
    batch = done.shard(num_shards=64, index=shard, contiguous=True).with_format("numpy")
    joined = np.concatenate(batch["ids"])
    values[place : place + len(joined)] = joined
    place += len(joined)
values.flush()
"""


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds, and the most memory in MiB."""
    started, most = time.perf_counter(), 0.0
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            most = max(most, memory(process.pid)[0])
            time.sleep(0.3)
        seconds = time.perf_counter() - started
        assert process.returncode == 0, process.stderr.read() if process.stderr else ""
    return seconds, most


def against_datasets(options: argparse.Namespace) -> None:
    size, ratios = os.path.getsize(options.input) / 1e6, []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            ours = ["-m", "titan_mi100.prepare_corpus", "--input", options.input, "--tokenizer", options.tokenizer]
            ours += ["--output_dir", f"{folder}/ours", "--workers", str(options.workers)]
            other = ["-c", OTHER, options.input, options.tokenizer, f"{folder}/other", str(options.workers)]
            sides = {"ours": ours, "datasets.map": other}
            found = {name: timed([sys.executable, *sides[name]]) for name in (sides if pair % 2 else reversed(sides))}
        ratios.append(found["datasets.map"][0] / found["ours"][0])
        words = [f"{name} {size / seconds:.2f} MB/s, {most:,.0f} MiB" for name, (seconds, most) in found.items()]
        print(f"{'; '.join(words)}; ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} over {options.pairs} pairs, {size:.0f} MB")


def cold(options: argparse.Namespace) -> None:
    folder = Path(options.corpus)
    corpus, _ = read_corpus(folder)
    rows = CorpusRows(folder, corpus, options.seq_len, CorpusRows.split(corpus, options.seq_len, 0)[0], False)
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def from_disk() -> int:
        return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])

    count, before, started = min(options.rows, len(rows) // options.ranks), from_disk(), time.perf_counter()
    for place in range(count):
        rows.row(rows.shuffled((1,), 0, place * options.ranks))
    seconds, used = time.perf_counter() - started, count * options.seq_len * 4
    print(json.dumps({
        "rows": count, "seq_len": options.seq_len, "ranks": options.ranks,
        "tokens_per_second": round(count * options.seq_len / seconds),
        "bytes_used": used, "bytes_read": (read := from_disk() - before), "ratio": round(read / used, 3),
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default="", help="a JSONL file with a column text")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--corpus", default="", help="a prepared corpus, to read from a cold cache")
    parser.add_argument("--seq_len", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=5000)
    options = parser.parse_args()
    if options.corpus:
        cold(options)
    else:
        against_datasets(options)


if __name__ == "__main__":
    sys.exit(exit_code(main))
