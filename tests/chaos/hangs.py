"""The rows of run.py about runs that hang, are restarted, or are only slow."""

import itertools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.case import Case
from chaos.runs import ASYNC, LAYOUTS, Trial, case, checkpoints, sha_of, steps_of, uninterrupted

LIMITS = {"start": 30, "compile": 15, "step": 5, "save": 6, "validation": 6}  # seconds; steps take a tenth of one
WATCH = tuple(
    word for phase, seconds in LIMITS.items()
    for word in (f"--watchdog.{'seconds' if phase == 'step' else phase + '_seconds'}", str(seconds))
)  # fmt: skip
OFTEN = ("--checkpoint.interval", "2", "--data.validation_fraction", "0.1", "--validation.freq", "3")
NAMES = {"first steps": "compile"}  # phase as the watcher names it -> its limit
ENDS = 10.0  # seconds after the limit
# event, its number, what is done, whose limit counts
PLACES = {
    "stopped in a step": ("step", 5, "STOP", "step"),
    "stopped in a save": ("write", 2, "STOP", "save"),
    "stopped in a validation": ("validate", 1, "STOP", "validation"),
    "stopped while torch is imported": ("import", 1, "STOP", "start"),
    "stopped while the model is built": ("build", 1, "STOP", "start"),
    "asleep over its rows": ("row", 9, "sleep", "step"),
    "holds the GIL in a step": ("row", 8, "hold the GIL", "step"),
    "waits for a message that no rank sends": ("stepped", 5, "wait for nobody", "step"),
    "asleep in a save": ("write", 1, "sleep", "save"),
}


def hangs(quick: bool) -> Iterator[Case]:
    layouts = itertools.cycle(("FSDP2 x2", "DDP x2", "PP2 1F1B", "TP2", "HSDP 2x2"))
    where = itertools.cycle(PLACES)
    told: list[tuple[str, str, str]] = [(next(layouts), next(where), "script") for _ in range(24)]
    alone = itertools.product(("stopped in a step", "asleep in a save"), ("script", "bare"))
    told += [("one process", place, how) for place, how in alone]
    told += [("FSDP2 x2", place, "torchrun") for place in ("stopped in a step", "stopped in a validation")]
    if quick:
        told = [("FSDP2 x2", "asleep over its rows", "script"), ("one process", "stopped in a step", "bare")]
    for number, (layout, place, how) in enumerate(told):
        yield case(f"{number:>2} {layout}, {how}: {place}", hung, layout, place, how, random.Random(number))


def hung(trial: Trial, layout: str, place: str, how: str, dice: random.Random) -> None:
    """One rank hangs."""
    at, number, does, phase = PLACES[place]
    rank = dice.randrange(LAYOUTS[layout][0])
    arguments = [*WATCH, *OFTEN, "--training.steps", "200", *(ASYNC if dice.random() < 0.3 and "save" in place else ())]
    action = {"at": at, "number": number, "do": does, "rank": rank, "to": rank}
    job = trial.start(layout, *arguments, by_script=how == "script", actions=[action])
    trial.tried += 1
    until = time.monotonic() + 120
    while not any(name == "does" for _, name, _ in job.events()):
        if time.monotonic() > until or job.launcher.poll() is not None:
            raise TimeoutError(f"it did not hang: {job.said()}")
        time.sleep(0.1)
    began = time.monotonic()
    code = job.launcher.wait(LIMITS["start"] + 60)
    seconds, state, written = (
        time.monotonic() - began,
        job.state(),
        "".join(path.read_text() for path in sorted((trial.run_folder / "logs").glob("hang-*.txt"))),
    )
    job.end()
    said = state.get("message", "") if state else job.output()
    # The limit in force is that of the phase the watcher names: rows are read ahead, in the first steps too, and a save
    # in the background is waited for in a step. A slow machine's limit of a step is 10 median steps.
    found = re.search(r"(\d+) are allowed in this phase \(([a-z ]+)\)", said)
    named_phase = NAMES.get(found[2], found[2]) if found else phase
    trial.check(named_phase in {phase, "step", "compile"}, f"hangs in {named_phase}, not in {phase}: {said}")
    limit = max(LIMITS[named_phase], int(found[1]) if found and named_phase == "step" else 0)
    trial.check(seconds < limit + ENDS, f"ended after {seconds:.1f} s, {limit + ENDS} are allowed")
    trial.figures.update(seconds_to_end=round(seconds, 1), limit=limit)
    trial.check(code == (1 if how == "torchrun" else 5), f"exit code {code}: {job.said()}")
    trial.check(state.get("exit_code", 5) == 5, f"run_state.json: {state}")
    named = re.findall(r"rank (\d+) on \S+ is behind", said)
    trial.check(named == [str(rank)], f"rank {rank} hangs, but named are {named}: {said}")
    if does == "STOP":
        trial.check("stopped by a signal (state T)" in said, said)
    expected = LAYOUTS[layout][0] - (does == "STOP")
    trial.check(written.count("Current thread") == expected or not state, f"{written.count('Current thread')} stacks")


def restarts(quick: bool) -> Iterator[Case]:
    layouts = ("FSDP2 x2", "one process", "DDP x2", "PP2 1F1B", "TP2")
    for number, layout in enumerate(layouts[:1] if quick else layouts * 2):
        times = 2 if quick else 5
        yield case(f"{number} {layout}, {times} times", restarted, layout, times, random.Random(number))


def restarted(trial: Trial, layout: str, times: int, dice: random.Random) -> None:
    """A run whose ranks are killed or hang, one after the other; each time it is restarted."""
    arguments = [*OFTEN, "--training.steps", str(10 + 6 * times)]
    expected = uninterrupted(layout, *arguments)
    actions = []
    for turn in range(times):
        rank = dice.randrange(LAYOUTS[layout][0])
        does = ("KILL", "STOP", "sleep", "KILL", "hold the GIL")[turn % 5]
        at, number = dice.choice((("step", 4), ("stepped", 4), ("write", 2), ("row", 14)))
        actions.append({"at": at, "number": number, "do": does, "rank": rank, "to": rank, "turn": turn})
    mode = ASYNC if dice.random() < 0.5 else ()
    job = trial.start(
        layout, *WATCH, *arguments, *mode, "--max_restarts", str(times), by_script=True, actions=actions
    )  # fmt: skip
    code = job.end(60 * times + 120)
    done = sum(name == "does" for _, name, _ in job.events())
    trial.tried += times
    trial.check(code == 0, f"exit code {code}: {job.said()}")
    noted = [entry["state"] for entry in job.state().get("restarts", [])]
    trial.check(done == times == len(noted), f"{done} of {times} happened, {noted} are noted")
    trial.check(steps_of(trial.run_folder) == steps_of(expected), "metrics.jsonl is not as uninterrupted")
    last = max(checkpoints(expected))
    shas = [sha_of(checkpoints(folder)[last]) for folder in (trial.run_folder, expected)]
    trial.check(shas[0] == shas[1], f"final SHA {shas[0][:12]}, uninterrupted {shas[1][:12]}")
    trial.check(not list(trial.run_folder.glob("config-until*")), "a restart had another config")


def slow(quick: bool) -> Iterator[Case]:
    """Each of a run's phases takes long, but less than it may."""
    disk, validation = LIMITS["save"] - 2, LIMITS["validation"] - 2
    stories = {
        "disk": [{"at": "write", "number": n, "do": "slow", "seconds": disk} for n in (1, 2)],
        "compile": [{"at": "step", "number": 1, "do": "slow", "seconds": LIMITS["compile"] - 4}],
        "validation": [{"at": "validate", "number": n, "do": "slow", "seconds": validation} for n in (1, 2)],
        "rows": [{"at": "row", "number": n, "do": "slow", "seconds": LIMITS["step"] - 2} for n in (9, 11)],
        "start": [{"at": "build", "number": 1, "do": "slow", "seconds": LIMITS["start"] - 20}],
    }
    number = 1 if quick else 20
    for turn, (kind, actions) in itertools.product(range(number), stories.items()):
        layout = ("FSDP2 x2", "one process", "DDP x2", "PP2 1F1B")[turn % 4]
        yield case(f"{turn} {kind}, {layout}", only_slow, layout, actions, random.Random(turn))


def only_slow(trial: Trial, layout: str, actions: list[dict[str, object]], dice: random.Random) -> None:
    rank = dice.randrange(LAYOUTS[layout][0])
    job = trial.start(
        layout, *WATCH, *OFTEN, "--training.steps", "8", by_script=True, actions=[{**a, "rank": rank} for a in actions]
    )  # fmt: skip
    code = job.end()
    trial.tried += 1
    trial.check(code == 0, f"exit code {code}: {job.said()}")
    trial.check(not list(Path(trial.run_folder).glob("logs/hang*")), "an alarm")
    slept = sum(name == "does" for _, name, _ in job.events())
    trial.check(slept == len(actions), f"slow {slept} of {len(actions)} times")
