"""The report of a run as an HTML page: first whether it went well, then its metrics and checkpoints.

Of several runs: tables for the terminal, and what to look at in each.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from titan_mi100.config.layout import AXES, resolve_batch, resolve_layout
from titan_mi100.wording import bytes_in_words, duration_in_words, plural
from titan_mi100.workshop.columns import SETTINGS, figures, markdown_table
from titan_mi100.workshop.pages.document import finding_list, html_document, section, table, text, tiles
from titan_mi100.workshop.pages.verdict import BAD, GOOD, findings, state_of

_KEYS = {
    "B_micro": "training.local_batch_size",
    "ckpt": "activation_checkpoint.mode",
    "dtype": "training.mixed_precision_param",
}
_SIZES = ("local_batch_size", "gradient_accumulation_steps", "target_tokens_per_step", "seq_len")


def page(run: dict[str, Any]) -> str:
    """The complete page about a run. Args: run: as `collect` returns it."""
    about = f"{text(run['folder'])}, report of {run['collected']}"
    header = f'<header><h1><bdi>{text(run["name"])}</bdi></h1><p class="soft"><bdi>{about}</bdi></p></header>'
    state, problems, steps = state_of(run), findings(run), run["metrics"].get("last_step")
    level = state.level if state.level != GOOD or not any(each.level == BAD for each in problems) else BAD
    until = f" after step {steps:,}" if steps else ""
    looked = f", {plural(len(problems), 'thing')} to look at" if problems else ", nothing to report"
    head = f'<div class="state {level}"><b>{text(state.text)}</b>{until}{looked}</div>'
    body = [header, head, tiles(key_figures(run)), finding_list(problems)]
    body += [section("Metrics", _numbers(run)), section("Checkpoints", _checkpoints(run["checkpoints"]))]
    return html_document(f"Report: {run['name']}", "".join(body))


def comparison(runs: Sequence[dict[str, Any]]) -> str:
    """Several runs as text: a table with a line for each, what to look at, and a table of the settings that differ."""
    names = [run["name"] for run in runs]
    names = names if len({*names}) == len(names) else [run["folder"] for run in runs]
    named = list(zip(names, runs, strict=True))
    rows = [{"Run": name, "State": state_of(run).text, **key_figures(run)} for name, run in named]
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    parts = [markdown_table(columns, [[row[column] for column in columns] for row in rows])]
    parts += [f"{name}: {each.text}" for name, run in named for each in findings(run)]
    keys = dict.fromkeys(key for run in runs for key in run["config"])
    settings = [(key, *(run["config"].get(key, "not set") for run in runs)) for key in keys]
    if different := [setting for setting in settings if len({*setting[1:]}) > 1]:
        parts.append(markdown_table(["setting", *names], different))
    return "\n\n".join(parts)


def key_figures(run: dict[str, Any]) -> dict[str, str]:
    """The key figures, and the cells of all tables about steps (workshop/columns.py); "": the run does not say it."""
    config, environment, series = run["config"], run["environment"], run["metrics"].get("series", {})
    loss, validation, seconds, tokens, memory = (
        series.get(key) for key in ("loss", "validation_loss", "seconds", "tokens", "peak_memory_gib")
    )
    known = {
        "Loss": f"{loss['recent'][0]:.4f}" if loss else "",  # the mean of the last steps
        "Lowest validation": f"{validation['lowest'][1]:.4f}" if validation else "",
        "Steps": f"{run['metrics']['last_step']:,}" if run["metrics"].get("last_step") else "",
        "Time": duration_in_words(seconds["sum"]) if seconds else "",  # in all steps
        "Restarts": f"{len(run['restarts']):,}",
        **dict.fromkeys(SETTINGS, ""),
        "layout": environment.get("layout", ""),
        "N": environment.get("processes", ""),
        **{column: config.get(key, "") for column, key in _KEYS.items()},
    }
    # a hostile file can hold any number
    with suppress(KeyError, ValueError, ArithmeticError):
        degrees = {name: int(config.get(f"parallelism.{axis.key}", 1)) for name, axis in AXES.items()}
        layout = resolve_layout(int(known["N"]), zero_stage=int(config["parallelism.zero_stage"]), **degrees)
        sizes = {key: int(config[f"training.{key}"]) for key in _SIZES}
        batch = resolve_batch(dp_degree=layout.dp_degree, **sizes)
        known["GA"] = f"{batch.gradient_accumulation_steps:,}"
        known["T_eff"] = f"{batch.global_batch_size * sizes['seq_len']:,}"
    means = {key: series[key]["mean"] for key in ("comm_ms", "comm_exposed_ms", "mfu") if key in series}
    if seconds:  # older runs have no step_ms
        means["step_ms"] = 1000 * seconds["mean"]
        if tokens and seconds["sum"]:
            means["tokens_per_second"] = tokens["sum"] / seconds["sum"]
    if memory:
        means["peak_memory_gib"] = memory["highest"][1]
    return known | figures(means)


def _numbers(run: dict[str, Any]) -> str:
    """A table with the first, last and extreme values of the metrics."""
    rows = []
    for key, summary in run["metrics"].get("series", {}).items():
        numbers = [summary[name][1] for name in ("first", "last", "lowest", "highest")] + [summary["mean"]]
        rows.append([key, f"{summary['count']:,}", *(f"{n:,.0f}" if abs(n) >= 1e4 else f"{n:.6g}" for n in numbers)])
    heads = ("Key in metrics.jsonl", "Values", "First", "Last", "Lowest", "Highest", "Mean")
    return table(heads, rows, numeric=range(1, 7)) if rows else ""


def _checkpoints(checkpoints: dict[str, Any]) -> str:
    """The checkpoints, newest first; "": there are none."""
    rows = []
    for each in reversed(checkpoints.get("listed", [])):
        marks = ["best validation"] if each["is_best"] else []
        marks += [f"suspect: {each['suspect']}"] if each["suspect"] else []
        marks += [each["problem"]] if each["problem"] else []
        rows.append((each["name"], bytes_in_words(each["bytes"]), each["saved"], "; ".join(marks)))
    note = '<p class="soft">Manifests were checked; the content of the other files was not read.</p>'
    return table(("Folder", "Size", "Written", "Marks"), rows, numeric=(1,)) + note if rows else ""
