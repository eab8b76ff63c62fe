"""Kill the preparation of data at random moments; each time the next start must end with the same plan.

python scripts/bench/kill_builds.py --data.path train.jsonl --model.tokenizer_path Qwen3-0.6B/ --kills 50
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUILD = """
import sys
from titan_mi100.data.prepare import prepare_data
from titan_mi100.settings import DataConfig
data = prepare_data(DataConfig(path=(sys.argv[1],), cache_folder=sys.argv[2]), sys.argv[3], "", 1024)
print(data.facts["plan"], int(data.cached))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.path", dest="path", required=True)
    parser.add_argument("--model.tokenizer_path", dest="tokenizer", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)

    def start(cache: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILD, options.path, cache, options.tokenizer]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        plan = start(f"{folder}/whole").communicate()[0].split()[0]
        whole = time.perf_counter() - began
        print(f"an undisturbed build takes {whole:.1f} s: plan {plan}", flush=True)
        same = late = left_over = 0
        for kill in range(options.kills):
            cache = f"{folder}/killed{kill}"
            process = start(cache)
            moment = draw.uniform(0, whole)
            try:
                process.wait(moment)
                late += 1
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                left_over += bool(list(Path(cache).glob(".*-*")))
            found, cached = start(cache).communicate()[0].split()
            same += found == plan
            print(
                f"killed after {moment:5.2f} s: {'same' if found == plan else 'ANOTHER'} plan, cached {cached}",
                flush=True,
            )
        print(
            f"{same} of {options.kills} starts after a kill ended with the same plan; {left_over} kills fell into the "
            f"writing, {late} came too late"
        )
    sys.exit(same != options.kills)


if __name__ == "__main__":
    main()
