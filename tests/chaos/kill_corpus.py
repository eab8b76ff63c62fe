"""Kills a preparation of a corpus at random moments, over and over, and compares what it leaves in the end.

python tests/chaos/kill_corpus.py [--kills 50]
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import job_environment
from test_corpus import hashes, in_small_units, kill_when, texts, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    kills, moments = parser.parse_args().kills, random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = write(folder / "in.jsonl", texts(20_000))
        started = time.monotonic()
        subprocess.run(in_small_units(path, folder / "whole"), env=job_environment(), check=True)
        seconds, complete, made = time.monotonic() - started, 0, []
        for number in range(kills):
            target = folder / f"killed-{complete}"
            until = time.monotonic() + moments.uniform(0.3, 1.0) * seconds
            kill_when(in_small_units(path, target), lambda until=until: time.monotonic() > until)  # type: ignore[misc]
            made.append(len(list(target.rglob("0*.json"))))
            print(f"kill {number + 1}: {made[-1]} shards are there", flush=True)
            if (target / "corpus.json").exists():
                assert hashes(target) == hashes(folder / "whole")
                complete += 1
        target = folder / f"killed-{complete}"
        subprocess.run(in_small_units(path, target), env=job_environment(), check=True)
        assert hashes(target) == hashes(folder / "whole")
        print(f"{kills} kills; {complete + 1} corpora became complete, each with the checksums of one never killed")


if __name__ == "__main__":
    main()
