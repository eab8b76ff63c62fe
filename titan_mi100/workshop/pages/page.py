"""The report of a run as an HTML page: first whether it went well, then its metrics and checkpoints.

Of several runs: tables for the terminal, and what to look at in each.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from titan_mi100.config.layout import AXES, resolve_batch, resolve_layout
from titan_mi100.wording import duration_in_words
from titan_mi100.workshop.columns import SETTINGS, figures, markdown_table
from titan_mi100.workshop.pages.document import html_document, text
from titan_mi100.workshop.pages.sections import checkpoint_list, finding_list, section, shown_time, table, tiles
from titan_mi100.workshop.pages.verdict import BAD, GOOD, findings, state_of

_COMPARED = ("Loss", "Lowest validation", "Steps", "Time", "Restarts")  # of `headline`; the others are columns of steps
_KEYS = {
    "B_micro": "training.local_batch_size",
    "ckpt": "activation_checkpoint.mode",
    "dtype": "training.mixed_precision_param",
}
_SIZES = ("local_batch_size", "gradient_accumulation_steps", "target_tokens_per_step", "seq_len")


def page(run: dict[str, Any]) -> str:
    """The complete page about a run. Args: run: as `collect` returns it."""
    body = [f"<header><h1><bdi>{text(run['name'])}</bdi></h1>{_about(run)}</header>", _first_screen(run)]
    body += [section("Metrics", _numbers(run)), section("Checkpoints", checkpoint_list(run["checkpoints"]))]
    return html_document(f"Report: {run['name']}", "".join(body))


def comparison(runs: Sequence[dict[str, Any]]) -> str:
    """Several runs as text: a table with a line for each, what to look at, and a table of the settings that differ."""
    names = [run["name"] for run in runs]
    names = names if len({*names}) == len(names) else [run["folder"] for run in runs]
    rows = [{"Run": name, "State": state_of(run).text, **_compared(run)} for name, run in zip(names, runs, strict=True)]
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    parts = [markdown_table(columns, [[row[column] for column in columns] for row in rows])]
    parts += [f"{name}: {each.text}" for name, run in zip(names, runs, strict=True) for each in findings(run)]
    keys = dict.fromkeys(key for run in runs for key in run["config"])
    settings = [(key, *(run["config"].get(key, "not set") for run in runs)) for key in keys]
    if different := [setting for setting in settings if len({*setting[1:]}) > 1]:
        parts.append(markdown_table(["setting", *names], different))
    return "\n\n".join(parts)


def _compared(run: dict[str, Any]) -> dict[str, str]:
    return {key: tile[0] for key in _COMPARED if (tile := headline(run).get(key, ("",)))} | columns_of(run)


def _about(run: dict[str, Any]) -> str:
    """The run's folder, and the times of its log."""
    log = run["log"]
    lines = [f"Report of {shown_time(run['collected'])}"]
    lines.append(run["folder"] + (f", log from {log['began']} to {log['ended']}" if log.get("began") else ""))
    return f'<p class="soft">{"<br>".join(f"<bdi>{text(line)}</bdi>" for line in lines)}</p>'


def _first_screen(run: dict[str, Any]) -> str:
    """The top of the page: state, findings and key figures."""
    state, problems = state_of(run), findings(run)
    steps = run["metrics"].get("last_step")
    until = f" after step {steps:,}" if steps else ""
    level = state.level if state.level != GOOD or not any(each.level == BAD for each in problems) else BAD
    looked = f", {len(problems)} thing{'s' * (len(problems) > 1)} to look at" if problems else ", nothing to report"
    head = f'<div class="state {level}"><b>{text(state.text)}</b>{until}{looked}</div>'
    return f"{head}{tiles(headline(run))}{finding_list(problems)}"


def headline(run: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The key figures that are known: name -> (the figure, a remark)."""
    series, last = run["metrics"].get("series", {}), run["metrics"].get("last_step")
    tokens, seconds, supervised = (series.get(key, {}).get("sum") for key in ("tokens", "seconds", "supervised_tokens"))
    loss, validation, mfu, memory = (series.get(key) for key in ("loss", "validation_loss", "mfu", "peak_memory_gib"))
    learned = f"{tokens:,.0f} tokens, {(supervised or 0) / tokens:.0%} supervised" if tokens else ""
    figures: dict[str, tuple[str, str] | None] = {
        "Loss": (f"{loss['recent'][0]:.4f}", f"mean of the last {loss['recent'][1]}") if loss else None,
        "Lowest validation": _lowest(validation) if validation else None,
        "Steps": (f"{last:,}", _of_all(run)) if last else None,
        "Time": (duration_in_words(seconds), "in all steps") if seconds else None,
        "Tokens/s": (f"{tokens / seconds:,.0f}", learned) if tokens and seconds else None,
        "MFU": (f"{mfu['mean']:.1%}", "mean of all steps") if mfu else None,
        "Peak memory": (f"{memory['highest'][1]:.2f} GiB", "of the fullest rank") if memory else None,
        "Restarts": (f"{len(run['restarts']):,}", "by the launcher"),
    }
    return {name: figure for name, figure in figures.items() if figure}


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


def _lowest(validation: dict[str, Any]) -> tuple[str, str]:
    (step, lowest), (last_step, last) = validation["lowest"], validation["last"]
    remark = f"the last finite one, step {step:,}" if step == last_step else f"step {step:,}; the last: {last:.4f}"
    return f"{lowest:.4f}", remark


def _of_all(run: dict[str, Any]) -> str:
    planned, epoch = run["config"].get("training.steps", ""), run["metrics"]["series"].get("epoch")
    parts = [f"of {int(planned):,}"] if re.fullmatch("[1-9][0-9]{0,17}", planned) else []
    return ", ".join([*parts, f"{epoch['last'][1]:.2f} epochs"] if epoch else parts)


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
