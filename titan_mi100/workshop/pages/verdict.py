"""Judges a run: its state as text, and the findings that the user should look at. Imports no torch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from titan_mi100.wording import duration_in_words, plural, some

GOOD, NEUTRAL, WARN, BAD = "good", "neutral", "warn", "bad"
_LEVELS = {"done": GOOD, "running": NEUTRAL, "preempted": WARN, "interrupted": WARN}  # of a state; others: BAD
# Limits of the findings: last / lowest validation loss; share of the time spent waiting for data; share of the memory.
_RISE, _WAIT, _FULL = 1.02, 0.05, 0.95


class Finding(NamedTuple):
    """Something to look at. Attributes: level: GOOD, NEUTRAL, WARN or BAD. text: plain text."""

    level: str
    text: str


def state_of(run: dict[str, Any]) -> Finding:
    """The run's state as text, with its level."""
    state = run["state"]["state"]
    if not state:
        return Finding(WARN, "How it ended is not known")
    return Finding(_LEVELS.get(state, BAD), state.replace("_", " ").capitalize())


def findings(run: dict[str, Any]) -> list[Finding]:
    """The problems and possible problems of a run, bad ones first."""
    return sorted((*_of_state(run), *_of_metrics(run), *_of_files(run)), key=lambda finding: finding.level != BAD)


def _of_state(run: dict[str, Any]) -> Iterator[Finding]:
    state = run["state"]
    if state["state"] == "running":
        age = "missing" if run["metrics_age"] is None else f"{duration_in_words(max(0.0, run['metrics_age']))} old"
        yield Finding(WARN, f"The state is still `running`, and metrics.jsonl is {age}. {state['message']}")
    elif state["message"] or state["exit_code"] or state["state"] not in ("", "done"):
        code = "" if state["exit_code"] is None else f" (exit code {state['exit_code']})"
        following = f"\nnext: {state['next']}" if state["next"] else ""
        yield Finding(state_of(run).level, f"{state['message'] or state_of(run).text}{code}{following}")
    if restarts := run["restarts"]:
        why = [each["message"].partition("\n")[0] or each["state"] for each in restarts]
        yield Finding(WARN, f"{plural(len(why), 'restart')}; train.log has all about them: {some(why)}")


def _of_metrics(run: dict[str, Any]) -> Iterator[Finding]:
    metrics = run["metrics"]
    if not metrics.get("steps"):
        yield Finding(WARN, "No step is in metrics.jsonl")
        return
    series = metrics["series"]
    if skipped := metrics["skipped"]:
        steps = f"{skipped:,} step{'s were' if skipped > 1 else ' was'} skipped"
        spikes, overflow = metrics["skipped_spikes"], ", or overflowed fp16" if "loss_scale" in series else ""
        why = [f"loss or gradients were not finite{overflow}"] if skipped > spikes else []
        why += [f"of loss spikes ({spikes:,})"] if spikes else []
        yield Finding(WARN, f"{steps} because {', or because '.join(why)}: {some(metrics['skipped_steps'])}")
    if (loss := series.get("loss")) and loss["count"] > 20 and loss["recent"][0] >= loss["first"][1]:
        yield Finding(BAD, f"The loss did not fall: {loss['first'][1]:.4g} at first, now {loss['recent'][0]:.4g}")
    if broken := metrics["validations_not_finite"]:
        yield Finding(BAD, f"Validation losses that were not finite: {broken:,}")
    validation = series.get("validation_loss")
    if validation and validation["last"][1] > _RISE * validation["lowest"][1]:
        (step, lowest), (_, last) = validation["lowest"], validation["last"]
        rise = f"{last:.4f} at the end, {last / lowest - 1:+.1%}" if lowest > 0 else f"{last:.4f} at the end"
        yield Finding(WARN, f"Validation loss was lowest at step {step:,} ({lowest:.4f}; {rise}): overfitting?")
    if (waited := series.get("data_wait")) and waited["mean"] > _WAIT:
        yield Finding(WARN, f"{waited['mean']:.1%} of the time was spent waiting for data")
    card, memory = run["card"], series.get("peak_memory_gib")
    if card and memory and memory["highest"][1] * 2**30 > _FULL * card:
        yield Finding(WARN, f"Memory was nearly full: {memory['highest'][1]:.1f} of {card / 2**30:.1f} GiB")


def _of_files(run: dict[str, Any]) -> Iterator[Finding]:
    checkpoints = run["checkpoints"]
    listed = checkpoints.get("listed", [])
    for state, names in (
        ("suspect: a run resumes from them only if asked to", [each["name"] for each in listed if each["suspect"]]),
        ("not as written", [each["name"] for each in listed if each["problem"]]),
        ("set aside as damaged", checkpoints.get("damaged", [])),
    ):
        if names:
            yield Finding(WARN, f"Checkpoints {state}: {some(names)}")
    for level in ("error", "warning"):
        if count := run["log"].get(f"{level}s"):
            yield Finding(WARN, f"{plural(count, level)} in train.log")
    if unreadable := run["metrics"].get("unreadable"):
        yield Finding(WARN, f"metrics.jsonl: lines that could not be read and are left out: {unreadable:,}")
    yield from (Finding(WARN, problem) for problem in run["problems"])
