"""The report of a run as an HTML page: first whether it went well, then its metrics and checkpoints.

Of several runs: tables for the terminal, and what to look at in each.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from titan_mi100.config.layout import AXES, resolve_batch, resolve_layout
from titan_mi100.wording import duration_in_words
from titan_mi100.workshop.columns import SETTINGS, figures, markdown_table
from titan_mi100.workshop.pages.document import html_document, text
from titan_mi100.workshop.pages.sections import checkpoint_list, finding_list, section, shown_time, table, tiles
from titan_mi100.workshop.pages.verdict import BAD, GOOD, findings, state_of

_KEYS = {
    "B_micro": "training.local_batch_size",
    "ckpt": "activation_checkpoint.mode",
    "dtype": "training.mixed_precision_param",
}
_SIZES = ("local_batch_size", "gradient_accumulation_steps", "target_tokens_per_step", "seq_len")


def page(run: dict[str, Any]) -> str:
    """The complete page about a run. Args: run: as `collect` returns it."""
    about = f"{text(run['folder'])}, report of {shown_time(run['collected'])}"
    header = f'<header><h1><bdi>{text(run["name"])}</bdi></h1><p class="soft"><bdi>{about}</bdi></p></header>'
    body = [header, _first_screen(run)]
    body += [section("Metrics", _numbers(run)), section("Checkpoints", checkpoint_list(run["checkpoints"]))]
    return html_document(f"Report: {run['name']}", "".join(body))


def comparison(runs: Sequence[dict[str, Any]]) -> str:
    """Several runs as text: a table with a line for each, what to look at, and a table of the settings that differ."""
    names = [run["name"] for run in runs]
    names = names if len({*names}) == len(names) else [run["folder"] for run in runs]
    rows = [
        {"Run": name, "State": state_of(run).text, **key_figures(run)} for name, run in zip(names, runs, strict=True)
    ]
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    parts = [markdown_table(columns, [[row[column] for column in columns] for row in rows])]
    parts += [f"{name}: {each.text}" for name, run in zip(names, runs, strict=True) for each in findings(run)]
    keys = dict.fromkeys(key for run in runs for key in run["config"])
    settings = [(key, *(run["config"].get(key, "not set") for run in runs)) for key in keys]
    if different := [setting for setting in settings if len({*setting[1:]}) > 1]:
        parts.append(markdown_table(["setting", *names], different))
    return "\n\n".join(parts)


def _first_screen(run: dict[str, Any]) -> str:
    """The top of the page: state, findings and key figures."""
    state, problems = state_of(run), findings(run)
    steps = run["metrics"].get("last_step")
    until = f" after step {steps:,}" if steps else ""
    level = state.level if state.level != GOOD or not any(each.level == BAD for each in problems) else BAD
    looked = f", {len(problems)} thing{'s' * (len(problems) > 1)} to look at" if problems else ", nothing to report"
    head = f'<div class="state {level}"><b>{text(state.text)}</b>{until}{looked}</div>'
    return f"{head}{tiles(key_figures(run))}{finding_list(problems)}"


def key_figures(run: dict[str, Any]) -> dict[str, str]:
    """The key figures and the columns of all tables about steps; "": not known."""
    series, last = run["metrics"].get("series", {}), run["metrics"].get("last_step")
    loss, validation, seconds = (series.get(key) for key in ("loss", "validation_loss", "seconds"))
    figures = {
        "Loss": f"{loss['recent'][0]:.4f}" if loss else "",  # the mean of the last steps
        "Lowest validation": f"{validation['lowest'][1]:.4f}" if validation else "",
        "Steps": f"{last:,}" if last else "",
        "Time": duration_in_words(seconds["sum"]) if seconds else "",  # in all steps
        "Restarts": f"{len(run['restarts']):,}",
    }
    return figures | columns_of(run)


def columns_of(run: dict[str, Any]) -> dict[str, str]:
    """The run's cells of all tables about steps, see workshop/columns.py; "": the run does not say it."""
    config, environment, series = run["config"], run["environment"], run["metrics"].get("series", {})
    known = {"layout": environment.get("layout", ""), "N": environment.get("processes", ""), "GA": "", "T_eff": ""}
    known |= {column: config.get(key, "") for column, key in _KEYS.items()}
    # a hostile file can hold any number
    with suppress(KeyError, ValueError, ArithmeticError):
        degrees = {name: int(config[f"parallelism.{axis.key}"]) for name, axis in AXES.items()}
        layout = resolve_layout(int(known["N"]), zero_stage=int(config["parallelism.zero_stage"]), **degrees)
        sizes = {key: int(config[f"training.{key}"]) for key in _SIZES}
        batch = resolve_batch(dp_degree=layout.dp_degree, **sizes)
        known["GA"] = f"{batch.gradient_accumulation_steps:,}"
        known["T_eff"] = f"{batch.global_batch_size * sizes['seq_len']:,}"
    means = {key: series[key]["mean"] for key in ("comm_ms", "comm_exposed_ms", "mfu") if key in series}
    if "seconds" in series:  # older runs have no step_ms
        means["step_ms"] = 1000 * series["seconds"]["mean"]
        if "tokens" in series and series["seconds"]["sum"]:
            means["tokens_per_second"] = series["tokens"]["sum"] / series["seconds"]["sum"]
    if "peak_memory_gib" in series:
        means["peak_memory_gib"] = series["peak_memory_gib"]["highest"][1]
    return {column: known[column] for column in SETTINGS} | figures(means)


def _numbers(run: dict[str, Any]) -> str:
    """A table with the first, last and extreme values of the metrics."""
    rows = []
    for key, summary in run["metrics"].get("series", {}).items():
        numbers = [summary[name][1] for name in ("first", "last", "lowest", "highest")] + [summary["mean"]]
        rows.append([key, f"{summary['count']:,}", *map(_number, numbers)])
    heads = ("Key in metrics.jsonl", "Values", "First", "Last", "Lowest", "Highest", "Mean")
    return table(heads, rows, numeric=range(1, 7)) if rows else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"
