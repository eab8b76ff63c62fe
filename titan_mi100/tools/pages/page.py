"""The report of a run as an HTML page: first whether it went well, then curves, then the details."""

import re
from collections.abc import Sequence
from typing import Any

from titan_mi100.tools.pages.charts import STYLE, charts
from titan_mi100.tools.pages.document import html_document, text
from titan_mi100.tools.pages.sections import details_of, section, shown_time, table
from titan_mi100.tools.pages.verdict import BAD, GOOD, Finding, findings, state_of
from titan_mi100.wording import duration_in_words

_STYLE = (
    STYLE
    + """
body { font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2em 0 .6em }
h3 { font-size: 1rem; margin: 1em 0 .3em } p { margin: .3em 0 } .soft, dt, th { color: var(--soft) }
pre, code { font: .85em/1.5 ui-monospace, monospace }
pre { white-space: pre-wrap; unicode-bidi: plaintext; margin: .2em 0 .8em; padding: .6em .8em; border-radius: 6px;
  background: var(--card); max-height: 24em; overflow: auto }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9em, 1fr)); gap: .6em; margin: 1em 0;
  padding: 0 }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6em .7em;
  min-width: 0 }
.tiles dt, .tiles small { font-size: .8rem } .tiles small { color: var(--soft); display: block }
.tiles dd { margin: 0; font-size: 1.15rem; white-space: nowrap; font-weight: 600; line-height: 1.3;
  font-variant-numeric: tabular-nums }
.state { border-left: 5px solid var(--soft); padding: .2em 0 .2em .9em } .state b { font-size: 1.15rem }
.good { border-color: var(--good) } .warn { border-color: var(--warn) } .bad { border-color: var(--bad) }
.good b { color: var(--good) } .warn b { color: var(--warn) } .bad b { color: var(--bad) }
.findings { list-style: none; padding: 0; margin: .6em 0 }
.findings li { padding: .15em 0 .15em 1.5em; text-indent: -1.5em }
.findings b { display: inline-block; width: 1.5em; text-indent: 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th, td { text-align: left; padding: .25em 1.4em .25em 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap }
th { font-weight: normal } td.t { min-width: 14em; white-space: normal }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.line { width: 2em; height: .7em; margin-right: .4em }
.bar { display: inline-block; height: .7em; background: var(--c0); border-radius: 2px; min-width: 1px }
details { margin: .5em 0 } summary { cursor: pointer }
@media (max-width: 40em) { body { margin-top: 1em } .tiles { grid-template-columns: 1fr 1fr } }
"""
)


def page(run: dict[str, Any]) -> str:
    """The complete page. Args: run: as `collect` returns it."""
    body = [f"<header><h1><bdi>{text(run['name'])}</bdi></h1>{_about(run)}</header>", _first_screen(run)]
    body += [section("Curves", charts(run)), _numbers(run), details_of(run)]
    return html_document(f"Report: {run['name']}", _STYLE, "".join(body))


def _about(run: dict[str, Any]) -> str:
    """The run's folder, and the times of its log."""
    log = run["log"]
    lines = [f"Report of {shown_time(run['collected'])}"]
    lines.append(run["folder"] + (f", log from {log['began']} to {log['ended']}" if log.get("began") else ""))
    return f'<p class="soft">{"<br>".join(f"<bdi>{text(line)}</bdi>" for line in lines)}</p>'


def _first_screen(run: dict[str, Any]) -> str:
    """The top of the page: state, findings and key figures."""
    state, found = state_of(run), findings(run)
    steps = run["metrics"].get("last_step")
    until = f" after step {steps:,}" if steps else ""
    level = state.level if state.level != GOOD or not any(each.level == BAD for each in found) else BAD
    looked = f", {len(found)} thing{'s' * (len(found) > 1)} to look at" if found else ", nothing to report"
    head = f'<div class="state {level}"><b>{text(state.text)}</b>{until}{looked}</div>'
    return f"{head}{_tiles(run)}{_findings(found)}"


def _findings(found: Sequence[Finding]) -> str:
    symbols = {BAD: "✖"}
    lines = (
        f'<li class="{each.level}"><b>{symbols.get(each.level, "!")}</b><bdi>{text(each.text)}</bdi></li>'
        for each in found
    )
    return f'<ul class="findings">{"".join(lines)}</ul>' if found else ""


def _tiles(run: dict[str, Any]) -> str:
    found = headline(run)
    del found["Tokens"]  # the figure of tokens/s shows it too
    entries = ((name, *value) for name, value in found.items() if value)
    shown = (
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd><small>{text(more)}</small></div>"
        for name, value, more in entries
    )
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def headline(run: dict[str, Any]) -> dict[str, tuple[str, str] | None]:
    """The key figures: name -> (the figure, a remark); None: not known."""
    metrics, series = run["metrics"], run["metrics"].get("series", {})
    total, last = metrics.get("total", {}), metrics.get("last_step")
    tokens, seconds = total.get("tokens"), total.get("seconds")
    loss, validation, mfu, memory = (series.get(key) for key in ("loss", "validation_loss", "mfu", "peak_memory_gib"))
    restarts = len(run["restarts"])
    found: dict[str, tuple[str, str] | None] = {
        "Loss": (f"{loss['recent'][0]:.4f}", f"mean of the last {loss['recent'][1]}") if loss else None,
        "Lowest validation": _lowest(validation) if validation else None,
        "Steps": (f"{last:,}", _of_all(run)) if last else None,
        "Time": (duration_in_words(seconds), "in all steps") if seconds else None,
        "Tokens": (f"{tokens:,.0f}", "") if tokens else None,
    }
    if tokens and seconds:
        share = f"{tokens:,.0f} tokens, {total['supervised_tokens'] / tokens:.0%} supervised"
        found["Tokens/s"] = (f"{tokens / seconds:,.0f}", share)
    else:
        found["Tokens/s"] = None
    found["MFU"] = (f"{mfu['mean']:.1%}", "mean of all steps") if mfu else None
    found["Peak memory"] = (f"{memory['max']:.2f} GiB", "of the fullest rank") if memory else None
    found["Restarts"] = (f"{restarts:,}", "by the launcher")
    return found


def _lowest(validation: dict[str, Any]) -> tuple[str, str]:
    (step, lowest), (last_step, last) = validation["lowest"], validation["last"]
    more = f"the last finite one, step {step:,}" if step == last_step else f"step {step:,}; the last: {last:.4f}"
    return f"{lowest:.4f}", more


def _of_all(run: dict[str, Any]) -> str:
    planned, epoch = run["config"].get("training.steps", ""), run["metrics"].get("epoch")
    is_known = re.fullmatch("[1-9][0-9]{0,17}", planned)
    parts = [f"of {int(planned):,}"] if is_known else []
    return ", ".join([*parts, f"{epoch:.2f} epochs"] if epoch else parts)


def _numbers(run: dict[str, Any]) -> str:
    """A table with the first, last and extreme values of the metrics."""
    rows = []
    for key, values in run["metrics"].get("series", {}).items():
        numbers = (values["first"][1], values["last"][1], values["min"], values["mean"], values["max"])
        rows.append([key, f"{values['count']:,}", *map(_number, numbers)])
    heads = ("Key in metrics.jsonl", "Values", "First", "Last", "Min", "Mean", "Max")
    inside = table(heads, rows, numeric=range(1, 7))
    return f"<details><summary>The same in numbers</summary>{inside}</details>" if rows else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"
