"""What watching a run costs: the observers' own time over many steps, and the launcher's looks during them.

    python scripts/bench/watching.py [--steps 1000] [--json]

Two gloo processes train the debug model in steps as short as they get; longer steps make the share smaller. Timed are
the calls themselves: heartbeat, loss spikes, stragglers with their probe. The CPU time of a look of the launcher is
measured apart, at as many processes, and its share of one core is added.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_mi100.run.watchdog import LOOK

PROCESSES = 2
SPENT = dict[str, float]()
_inside = [False]  # a timed call: what it calls is part of it


def timed(owner: Any, name: str) -> None:
    """Add a method's seconds to SPENT."""
    whole: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if _inside[0]:
            return whole(*arguments, **options)
        began, _inside[0] = time.perf_counter(), True
        try:
            return whole(*arguments, **options)
        finally:
            _inside[0] = False
            key = f"{owner.__name__}.{name}"
            SPENT[key] = SPENT.get(key, 0.0) + time.perf_counter() - began

    setattr(owner, name, wrapped)


def train(steps: int, folder: Path) -> None:
    """One rank's steps; rank 0 prints what it found."""
    from titan_mi100.config.load import load_config
    from titan_mi100.data.made_up import made_up, random_rows
    from titan_mi100.open_run.start import open_run
    from titan_mi100.parallel import distributed
    from titan_mi100.run.heartbeat import Heartbeat
    from titan_mi100.run.progress import Progress
    from titan_mi100.run.stragglers import Stragglers

    timed(Heartbeat, "begin_step")
    timed(Heartbeat, "note")
    timed(Stragglers, "after_step")
    timed(Progress, "spike_above")
    world = distributed.init_distributed()
    arguments = ["--model.flavor", "debug", "--training.seq_len", "128", "--training.steps", str(steps)]
    arguments += ["--training.local_batch_size", "4", "--training.gradient_accumulation_steps", "1"]
    arguments += ["--metrics.enable_tensorboard", "false", "--data.path", __file__]
    config = load_config(arguments, world.size, with_files=False)
    spec = config.spec()
    data = made_up(random_rows(256, 128, spec.vocab_size, supervised_share=0.5))
    run = open_run(
        config, world, folder, spec=spec, data=data, heartbeat=Heartbeat(config.watchdog, folder, world.rank)
    )
    for _ in range(5):
        run.step()
    SPENT.clear()
    began = time.perf_counter()
    for _ in range(steps - 5):
        run.step()
    seconds = time.perf_counter() - began
    if world.rank == 0:
        print(json.dumps({"steps": steps - 5, "seconds": seconds, "spent": SPENT}))
    distributed.leave(0)


def looks(processes: int) -> float:
    """CPU seconds of one look at the records of running processes."""
    from titan_mi100.config.settings import WatchdogConfig
    from titan_mi100.run.heartbeat import Heartbeat
    from titan_mi100.run.watchdog import Watch

    with tempfile.TemporaryDirectory() as folder:
        beats = [Heartbeat(WatchdogConfig(), Path(folder), rank) for rank in range(processes)]
        watch, began = Watch(Path(folder), len(beats)), time.process_time()
        for _ in range(1000):
            assert not watch.look()
        return (time.process_time() - began) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.steps, Path(os.environ["WATCHING_FOLDER"]))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WATCHING_FOLDER": folder}
        given = [*command, __file__, "--steps", str(options.steps)]
        said = subprocess.run(given, env=environment, capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    found["look_seconds"] = looks(PROCESSES)
    found["spent"]["Watch.look"] = found["look_seconds"] / LOOK * found["seconds"]
    found["share"] = sum(found["spent"].values()) / found["seconds"]
    if options.json:
        print(json.dumps(found))
        return 0
    per_step = found["seconds"] / found["steps"]
    print(f"{found['steps']} steps of {1e3 * per_step:.1f} ms")
    for name, seconds in found["spent"].items():
        print(f"  {name:<24} {1e6 * seconds / found['steps']:>8.1f} us a step  {seconds / found['seconds']:.3%}")
    print(f"  {'all':<24} {1e6 * found['share'] * per_step:>8.1f} us a step  {found['share']:.3%}")
    look = f"{1e6 * found['look_seconds']:.0f} us, every {LOOK:g} s"
    print(f"Watch.look: one look of the launcher at {PROCESSES} processes takes {look}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
