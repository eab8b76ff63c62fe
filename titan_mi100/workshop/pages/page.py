"""The report of a run as an HTML page: first whether it went well, then curves, then the details.

Of several runs: a table, their curves together, and the settings that differ.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from titan_mi100.config.layout import AXES, resolve_batch, resolve_layout
from titan_mi100.wording import duration_in_words
from titan_mi100.workshop.columns import SETTINGS, figures
from titan_mi100.workshop.pages.charts import charts
from titan_mi100.workshop.pages.document import html_document, text
from titan_mi100.workshop.pages.sections import (
    details_of,
    different_settings,
    finding_list,
    section,
    shown_time,
    table,
    tiles,
)
from titan_mi100.workshop.pages.verdict import BAD, GOOD, findings, state_of

_AS_COLUMNS = ("Tokens", "Tokens/s", "MFU", "Peak memory")  # of `headline`; a comparison has them as columns_of
_KEYS = {
    "B_micro": "training.local_batch_size",
    "ckpt": "activation_checkpoint.mode",
    "dtype": "training.mixed_precision_param",
}
_SIZES = ("local_batch_size", "gradient_accumulation_steps", "target_tokens_per_step", "seq_len")


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The complete page about a run, or the comparison of several. Args: runs: as `collect` returns them."""
    title = f"Report: {', '.join(run['name'] for run in runs)}"
    if len(runs) > 1:
        return html_document(title, _comparison(runs))
    [run] = runs
    body = [f"<header><h1><bdi>{text(run['name'])}</bdi></h1>{_about(run)}</header>", _first_screen(run)]
    body += [section("Curves", charts({run["name"]: run})), _numbers(run), details_of(run)]
    return html_document(title, "".join(body))


def _comparison(runs: Sequence[dict[str, Any]]) -> str:
    """The body of the page about several runs: a table, their curves together, and the settings that differ."""
    names = [run["name"] for run in runs]
    named = dict(zip(names if len({*names}) == len(names) else [run["folder"] for run in runs], runs, strict=True))
    cells = {
        name: {key: (tile or ("",))[0] for key, tile in headline(run).items() if key not in _AS_COLUMNS}
        | columns_of(run)
        for name, run in named.items()
    }
    columns = [key for key in next(iter(cells.values())) if any(each[key] for each in cells.values())]
    rows = [(name, state_of(named[name]).text, *(each[key] for key in columns)) for name, each in cells.items()]
    findings_by_run = {name: findings(run) for name, run in named.items()}
    looked = (f"<h3><bdi>{text(name)}</bdi></h3>{finding_list(each)}" for name, each in findings_by_run.items() if each)
    different = different_settings([run["config"] for run in runs])
    about = f"Report of {shown_time(runs[0]['collected'])}. All about one of them: titan-mi100 report RUN"
    parts = (
        f'<header><h1>{len(runs)} runs</h1><p class="soft">{text(about)}</p></header>',
        table(("Run", "State", *columns), rows, numeric=range(2, 2 + len(columns))),
        section("What to look at", "".join(looked)),
        section("Curves", charts(named)),
        section("Settings that differ", table(("Setting", *named), different) if different else ""),
    )
    return "".join(parts)


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
    return f"{head}{_tiles(run)}{finding_list(problems)}"


def _tiles(run: dict[str, Any]) -> str:
    figures = headline(run)
    del figures["Tokens"]  # the figure of tokens/s shows it too
    return tiles(figures)


def headline(run: dict[str, Any]) -> dict[str, tuple[str, str] | None]:
    """The key figures: name -> (the figure, a remark); None: not known."""
    metrics, series = run["metrics"], run["metrics"].get("series", {})
    total, last = metrics.get("total", {}), metrics.get("last_step")
    tokens, seconds = total.get("tokens"), total.get("seconds")
    loss, validation, mfu, memory = (series.get(key) for key in ("loss", "validation_loss", "mfu", "peak_memory_gib"))
    restarts = len(run["restarts"])
    figures: dict[str, tuple[str, str] | None] = {
        "Loss": (f"{loss['recent'][0]:.4f}", f"mean of the last {loss['recent'][1]}") if loss else None,
        "Lowest validation": _lowest(validation) if validation else None,
        "Steps": (f"{last:,}", _of_all(run)) if last else None,
        "Time": (duration_in_words(seconds), "in all steps") if seconds else None,
        "Tokens": (f"{tokens:,.0f}", "") if tokens else None,
    }
    if tokens and seconds:
        share = f"{tokens:,.0f} tokens, {total['supervised_tokens'] / tokens:.0%} supervised"
        figures["Tokens/s"] = (f"{tokens / seconds:,.0f}", share)
    else:
        figures["Tokens/s"] = None
    figures["MFU"] = (f"{mfu['mean']:.1%}", "mean of all steps") if mfu else None
    figures["Peak memory"] = (f"{memory['max']:.2f} GiB", "of the fullest rank") if memory else None
    figures["Restarts"] = (f"{restarts:,}", "by the launcher")
    return figures


def columns_of(run: dict[str, Any]) -> dict[str, str]:
    """The run's cells of all tables about steps, see workshop/columns.py; "": the run does not say it."""
    config, environment, metrics = run["config"], run["environment"], run["metrics"]
    series, total = metrics.get("series", {}), metrics.get("total", {})
    known = {"layout": environment.get("layout", ""), "N": environment.get("processes", ""), "GA": "", "T_eff": ""}
    known |= {column: config.get(key, "") for column, key in _KEYS.items()}
    # a hostile file can hold any number
    with suppress(KeyError, ValueError, ArithmeticError):
        degrees = {name: int(config[f"parallelism.{axis.key}"]) for name, axis in AXES.items()}
        layout = resolve_layout(int(known["N"]), zero_stage=int(config["parallelism.zero_stage"]), **degrees)
        sizes = {key: int(config[f"training.{key}"]) for key in _SIZES}
        batch = resolve_batch(dp_degree=layout.dp_degree, **sizes)
        known |= {
            "GA": f"{batch.gradient_accumulation_steps:,}",
            "T_eff": f"{batch.global_batch_size * sizes['seq_len']:,}",
        }
    means = {key: series[key]["mean"] for key in ("comm_ms", "comm_exposed_ms", "mfu") if key in series}
    if total.get("tokens") and total.get("seconds"):
        means["tokens_per_second"] = total["tokens"] / total["seconds"]
    if "seconds" in series:  # older runs have no step_ms
        means["step_ms"] = 1000 * series["seconds"]["mean"]
    if "peak_memory_gib" in series:
        means["peak_memory_gib"] = series["peak_memory_gib"]["max"]
    return {column: known[column] for column in SETTINGS} | figures(means)


def _lowest(validation: dict[str, Any]) -> tuple[str, str]:
    (step, lowest), (last_step, last) = validation["lowest"], validation["last"]
    remark = f"the last finite one, step {step:,}" if step == last_step else f"step {step:,}; the last: {last:.4f}"
    return f"{lowest:.4f}", remark


def _of_all(run: dict[str, Any]) -> str:
    planned, epoch = run["config"].get("training.steps", ""), run["metrics"].get("epoch")
    is_known = re.fullmatch("[1-9][0-9]{0,17}", planned)
    parts = [f"of {int(planned):,}"] if is_known else []
    return ", ".join([*parts, f"{epoch:.2f} epochs"] if epoch else parts)


def _numbers(run: dict[str, Any]) -> str:
    """A table with the first, last and extreme values of the metrics."""
    rows = []
    for key, summary in run["metrics"].get("series", {}).items():
        numbers = (summary["first"][1], summary["last"][1], summary["min"], summary["mean"], summary["max"])
        rows.append([key, f"{summary['count']:,}", *map(_number, numbers)])
    heads = ("Key in metrics.jsonl", "Values", "First", "Last", "Min", "Mean", "Max")
    inside = table(heads, rows, numeric=range(1, 7))
    return f"<details><summary>The same in numbers</summary>{inside}</details>" if rows else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"
