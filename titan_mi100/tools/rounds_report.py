"""What rounds have brought: a summary of each, when to end, and one report over all."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_mi100.config.settings import RoundsConfig
from titan_mi100.files import durable
from titan_mi100.wording import duration_in_words, plural

_STEPS = 20  # the last of a round, over which its drift is a mean
_LONGER = 2.0  # times the first round's answers
_MOST_DEAD = 0.9
_PARTS = ("sample", "score", "teach", "train", "sample_held_out", "held_out")
_COLUMNS = (  # of the table: keys of a summary
    *("round", "held_out", "standard_error", "score", "length", "cut_off", "dead", "log_ratio", "kl", "clipped"),
    *("entropy", "apart"),
)


def drift(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over the end of a round of what tells how far it has moved. Args: steps: lines of metrics.jsonl."""
    last = [step for step in steps if not step.get("skipped")][-_STEPS:]
    return {key: fmean(abs(step[key]) for step in last) for key in ("log_ratio", "kl", "clipped", "entropy")}


def summary_of(number: int, parts: dict[str, Any]) -> dict[str, Any]:
    """The figures of a round. Args: number: 0: the model before the rounds. parts: what each part has said."""
    held_out, trained, scored = parts["held_out"], parts.get("train", {}), parts.get("score", {})
    told = {"round": number, "held_out": held_out["scorers"]["score"]["mean"]}
    told |= {"standard_error": held_out["standard_error"], "held_out_length": held_out["mean_length"]}
    if scored:
        told |= {"score": scored["scorers"]["score"]["mean"], "length": scored["mean_length"]}
        told |= {"cut_off": scored["cut_off"], "dead": scored["dead_prompts"] / scored["prompts"]}
        told |= {"resting": parts["prompts"]["resting"]}
        told |= {key: trained[key] for key in ("log_ratio", "kl", "clipped", "entropy", "apart", "step")}
    told["seconds"] = {name: parts[name]["seconds"] for name in _PARTS if name in parts}
    sampled = {name: parts[name] for name in ("sample", "sample_held_out") if name in parts}
    told["tokens"] = {name: round(own["answers"] * own["mean_length"]) for name, own in sampled.items()}
    told["tokens"] |= {"train": trained["tokens"]} if trained else {}
    return {**told, "best": held_out["best"], "worst": held_out["worst"]}


def best_of(summaries: Sequence[dict[str, Any]]) -> int:
    """The first round with the highest held-out score."""
    return max(range(len(summaries)), key=lambda n: (summaries[n]["held_out"], -n))


def why_over(summaries: Sequence[dict[str, Any]], of: RoundsConfig) -> str:
    """Why the rounds end after the last one; "": they go on."""
    last, best = summaries[-1], best_of(summaries)
    far = max(last.get("log_ratio", 0.0), last.get("kl", 0.0))
    if of.most_drift and far > of.most_drift:
        return f"round {last['round']} has moved {far:.2f} nats per token from its sampler (rounds.most_drift)"
    if of.patience and len(summaries) - 1 - best >= of.patience:
        return f"the held-out score has not risen for {plural(of.patience, 'round')} (rounds.patience)"
    return ""


def warnings(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What looks wrong."""
    told, rounds = list[str](), summaries[1:]
    if not rounds:
        return told
    first, last = rounds[0], rounds[-1]
    if last["length"] > _LONGER * first["length"]:
        told.append(f"answers have grown from {first['length']:.0f} to {last['length']:.0f} tokens: score length, too")
    base, error = summaries[0]["held_out"], summaries[0]["standard_error"] or 0.0
    is_known = None not in (first["score"], last["score"])  # a teacher needs no scores
    if is_known and last["score"] > first["score"] + 2 * error and last["held_out"] <= base + error:
        reason = "the score of the training prompts rises, the held-out score does not"
        told.append(f"{reason}: prompts are memorised, or the scorer is deceived; look at the best answers")
    if last["dead"] > _MOST_DEAD:
        told.append(f"{last['dead']:.0%} of the prompts have equal scores: take others, or set rounds.rest")
    return told


def finished(summaries: Sequence[dict[str, Any]]) -> str:
    """A line about the last round."""
    last = summaries[-1]
    error = f" +- {last['standard_error']:.3f}" if last["standard_error"] is not None else ""
    took = duration_in_words(sum(last["seconds"].values()))
    best = f", best {summaries[best]['held_out']:.3f} in round {best}" if (best := best_of(summaries)) else ""
    return f"round {last['round']}: held-out score {last['held_out']:.3f}{error}{best}; {took}"


def report(folder: Path, summaries: Sequence[dict[str, Any]], why: str) -> dict[str, Any]:
    """Write report.md, and return its content. Args: why: the rounds have ended; "": they have not."""
    told: dict[str, Any] = {"rounds": [*summaries], "why": why, "warnings": warnings(summaries)}
    lines = [f"# Rounds in {folder}", "", *_table(summaries), ""]
    if summaries:
        best = told["best"] = best_of(summaries)
        run = folder / f"round-{best}" / "run"
        told["model"] = str(run / f"hf-step-{summaries[best]['step']}") if best else ""
        where = f": {told['model']}" if best else ", the model before them"
        lines += [f"best: round {best}, held-out score {summaries[best]['held_out']:.3f}{where}"]
    lines += [*[f"ended: {why}"] * bool(why), *(f"WARNING {text}" for text in told["warnings"])]
    for name in ("best", "worst") if summaries else ():
        last = summaries[-1]
        lines += ["", f"{name} held-out answers of round {last['round']}", "", *(f"    {text}" for text in last[name])]
    durable.replace(folder / "report.md", "\n".join(lines) + "\n")
    return told


def _table(summaries: Sequence[dict[str, Any]]) -> list[str]:
    parts = [name for name in _PARTS if any(name in each["seconds"] for each in summaries)]
    rows = [[*_COLUMNS, *(f"{name}: s, tokens" for name in parts)]]
    for each in summaries:
        cells = ["" if (own := each.get(key)) is None else f"{own:{'.3g' if own < 1e3 else '.0f'}}" for key in _COLUMNS]
        seconds, tokens = each["seconds"], each["tokens"]
        times = [f"{seconds[name]:.0f}, {tokens.get(name, '')}" if name in seconds else "" for name in parts]
        rows.append([*cells, *(time.rstrip(", ") for time in times)])
    rows.insert(1, ["---"] * len(rows[0]))
    return [f"| {' | '.join(row)} |".replace("_", " ") for row in rows]
