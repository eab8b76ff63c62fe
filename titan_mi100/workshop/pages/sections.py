"""The report's sections. A section without content is left out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_mi100.wording import bytes_in_words, last_question
from titan_mi100.workshop.pages.document import text
from titan_mi100.workshop.pages.verdict import BAD, Finding

Cell = str | tuple[str, str]  # a text; or (our own HTML, a text after it)


def section(title: str, inside: str) -> str:
    return f"<section><h2><bdi>{text(title)}</bdi></h2>{inside}</section>\n" if inside else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], numeric: Iterable[int] = ()) -> str:
    """An HTML table that scrolls if it is wider than the page.

    Args:
        numeric: indices of the columns that are aligned to the right.
    """
    right = set(numeric)

    def cell(tag: str, place: int, value: Cell) -> str:
        ours, shown = value if isinstance(value, tuple) else ("", value)
        kind = ' class="n"' if place in right else ' class="t"' if tag == "td" and len(shown) > 30 else ""
        return f"<{tag}{kind}>{ours}<bdi>{text(shown)}</bdi></{tag}>"

    def line(tag: str, values: Sequence[Cell]) -> str:
        return f"<tr>{''.join(cell(tag, place, value) for place, value in enumerate(values))}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", heads)}</thead><tbody>{body}</tbody></table></div>'


def tiles(figures: Mapping[str, tuple[str, str] | None]) -> str:
    """Key figures as tiles. Args: figures: name -> (figure, remark); None: not known, and left out."""
    shown = (
        f"<div><dt>{text(name)}</dt><dd>{text(tile[0])}</dd><small>{text(tile[1])}</small></div>"
        for name, tile in figures.items()
        if tile
    )
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def finding_list(found: Sequence[Finding]) -> str:
    """A list of things to look at."""
    lines = (
        f'<li class="{each.level}"><b>{"✖" if each.level == BAD else "!"}</b><bdi>{text(each.text)}</bdi></li>'
        for each in found
    )
    return f'<ul class="findings">{"".join(lines)}</ul>' if found else ""


def details_of(run: dict[str, Any]) -> str:
    """All sections about one run."""
    return "".join(
        (
            section("How it ended", _end(run["state"])),
            section("Restarts", _restarts(run["restarts"])),
            section("Checkpoints", _checkpoints(run["checkpoints"])),
            section("Sample answers", _samples(run["samples"])),
            section("Warnings and errors in train.log", _log(run["log"])),
            section(
                "Versions and hardware", _pairs({name: fact or "none" for name, fact in run["environment"].items()})
            ),
            section("All settings", _folded_pairs(run["config"], "config.toml, resolved")),
        )
    )


def shown_time(iso: str) -> str:
    """An ISO 8601 time in UTC as readable text."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)$", r"\1 \2 UTC", iso)


def _end(state: dict[str, Any]) -> str:
    """How the run ended; "" if it is done and has no message."""
    if not state["state"] or (state["state"] == "done" and not state["message"]):
        return ""
    code = f", exit code {state['exit_code']}" if state["exit_code"] is not None else ""
    step = f", this start reached step {state['step']:,}" if state["step"] is not None else ""
    message = f"<pre>{text(state['message'])}</pre>" if state["message"] else ""
    following = f"<p>Next: <bdi>{text(state['next'])}</bdi></p>" if state["next"] else ""
    return f"<p><code>{text(state['state'])}</code>{code}{step}</p>{message}{following}"


def _restarts(restarts: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            _or_none(restart["attempt"]), shown_time(restart["time"]), restart["state"], _or_none(restart["exit_code"]),
            "before the first" if restart["step"] is None else f"{restart['step']:,}", _folded(restart["message"]),
        )
        for restart in restarts
    ]  # fmt: skip
    heads = ("Attempt", "Time", "How the start before ended", "Exit code", "After step", "Message")
    return table(heads, rows, numeric=(0, 3, 4)) if rows else ""


def _folded(message: str) -> Cell:
    """The first line of a message; the others are folded."""
    first, _, others = message.partition("\n")
    folded = f"<details><summary><bdi>{text(first)}</bdi></summary><pre>{text(others)}</pre></details>"
    return (folded, "") if others else first


def _or_none(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _note(words: str) -> str:
    return f'<p class="soft">{text(words)}</p>'


def _checkpoints(checkpoints: dict[str, Any]) -> str:
    rows = []
    for each in reversed(checkpoints.get("listed", [])):
        marks = ["lowest validation loss"] if each["is_best"] else []
        marks += [f"suspect: {each['why_suspect']}"] if each["is_suspect"] else []
        marks += [each["problem"]] if each["problem"] else []
        rows.append((each["name"], bytes_in_words(each["bytes"]), shown_time(each["saved"]), "; ".join(marks)))
    if not rows:
        return ""
    left_out = f"<p>{checkpoints['left_out']:,} older ones are not listed.</p>" if checkpoints["left_out"] else ""
    note = _note("Manifests were checked; the content of the other files was not read.")
    return table(("Folder", "Size", "Written", "Marks"), rows, numeric=(1,)) + left_out + note


def _samples(samples: dict[str, Any]) -> str:
    shown = []
    for number, prompt in enumerate(samples.get("prompts", []), 1):
        messages = "".join(_said(each["role"] or "prompt", each["content"]) for each in prompt["messages"])
        reference = _said("reference", prompt["reference"]) if prompt["reference"] else ""
        newest, *earlier = reversed(prompt["answers"])
        answer = _said(f"answer at step {newest['step']:,}", newest["answer"])
        older = "".join(_said(f"answer at step {each['step']:,}", each["answer"]) for each in earlier)
        left_out = prompt["answers_left_out"]
        note = f"<p>{left_out:,} answers in between are left out.</p>" if left_out else ""
        folded = f"<details><summary>earlier answers: {len(earlier)}</summary>{older}{note}</details>" if older else ""
        first = "" if number > 1 else " open"
        name = text(last_question(prompt["messages"][-1]["content"], 80)) if prompt["messages"] else ""
        expected = prompt["reference"] and newest["answer"] == prompt["reference"]
        verdict = " (answered as expected)" if expected else ""
        head = f"<summary>Prompt {number}: <bdi>{name}</bdi>{verdict}</summary>"
        shown.append(f"<details{first}>{head}{messages}{reference}{answer}{folded}</details>")
    if samples.get("prompts_left_out"):
        shown.append(f"<p>{samples['prompts_left_out']:,} more prompts are in samples.jsonl.</p>")
    return "".join(shown)


def _said(who: str, what: str) -> str:
    return f'<span class="soft">{text(who)}</span><pre>{text(what)}</pre>'


def different_settings(configs: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    """One row per setting that differs between the configs: its name and the values."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    rows = [(name, *(config.get(name, "not set") for config in configs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _log(log: dict[str, Any]) -> str:
    rows = [(m["level"], f"{m['count']:,}", m["first"], m["message"]) for m in log.get("messages", [])]
    return table(("Level", "Times", "First at", "Message"), rows, numeric=(1,)) if rows else ""


def _pairs(pairs: dict[str, str]) -> str:
    return table(("", ""), list(pairs.items())) if pairs else ""


def _folded_pairs(pairs: dict[str, str], name: str) -> str:
    return f"<details><summary>{text(name)}</summary>{_pairs(pairs)}</details>" if pairs else ""
