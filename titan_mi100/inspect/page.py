"""The report of `inspect_data` as one self-contained HTML page."""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from typing import Any

from titan_mi100.inspect.html_page import bars, bullets, facts, legend, page, table, tag
from titan_mi100.inspect.report import documents_in

_STYLE = """
:root { --token: #e6eaef; --mark: #d3f3db; --mark2: #b4e6c1; --supervised: #1f9d55; --pad: #e6e9ed }
@media (prefers-color-scheme: dark) { :root { --token: #2a3039; --mark: #1a4228; --mark2: #28603c;
  --supervised: #3fbf74; --pad: #2e353f } }
pre, .tokens { font: 14px/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  unicode-bidi: plaintext; background: var(--box); padding: 10px 12px; border-radius: 6px; margin: .3em 0 }
.tokens:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.tokens b { font-weight: 400; border-radius: 2px; padding-bottom: 1px }
.tokens b.here { outline: 2px solid var(--link) }
.tokens b:nth-child(even) { background: var(--token) }
.tokens mark { color: inherit; background: none }
.tokens mark b { background: var(--mark); border-bottom: 2px solid var(--supervised) }
.tokens mark b:nth-child(even) { background: var(--mark2) }
rect.supervised { fill: var(--supervised) } rect.pad { fill: var(--pad) } rect.edge { fill: var(--page) }
summary { cursor: pointer; padding: 3px 0 }
#here { position: fixed; inset: auto 0 0 0; background: var(--page); border-top: 1px solid var(--line);
  padding: 6px 20px; font-size: .9em } #here:empty { display: none }
"""

_SCRIPT = """
const here = document.getElementById("here");
const tokens = box => [...box.querySelectorAll("b")];
function show(token) {
  const box = token.closest(".tokens"), i = tokens(box).indexOf(token);
  document.querySelectorAll(".here").forEach(old => old.classList.remove("here"));
  token.classList.add("here");
  here.textContent = [token.textContent.trimEnd() || "space", "id " + box.dataset.ids.split(",")[i],
    `position ${i} of document ${box.dataset.document}`, token.closest("mark") ? "supervised" : "not supervised",
  ].join("  ·  ");
}
for (const kind of ["mouseover", "click"]) document.addEventListener(kind, event => {
  const token = event.target.closest("[data-ids] b");
  if (token) show(token);
});
document.addEventListener("keydown", event => {
  const box = event.target.closest("[data-ids]"), step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!box || !step) return;
  const next = tokens(box)[tokens(box).findIndex(token => token.className) + step];
  if (next) { show(next); next.scrollIntoView({block: "nearest"}); }
  event.preventDefault();
});
"""


def report_page(report: dict[str, Any]) -> str:
    """The whole page. Everything that comes from the data or from file names is escaped."""
    has_summary = "read" in report
    sections = {name: "".join(parts) for name, parts in _summary(report)} if has_summary else {}
    sections |= {f"row-{row['row']}": "".join(_row(row)) for row in report["shown"]}
    intro = "".join(tag("p", line, "warning") for line in report.get("warnings", []))
    intro += bullets(line["says"] for line in report.get("where", []))
    intro += '<output id="here" aria-live="polite"></output>'
    title = f"What trains: the {'training' if report['set'] == 'train' else 'validation'} set"
    return page(title, sections, (_facts(report) if has_summary else "") + intro, _STYLE, _SCRIPT)


def _facts(report: dict[str, Any]) -> str:
    values = {
        "documents": f"{report['documents']:,}",
        "tokens": f"{report['tokens']:,}",
        "supervised": f"{report['supervised'] / report['tokens']:.1%}",
        f"rows of {report['seq_len']:,}": f"{report['rows']:,}",
        "of the rows is real": f"{report['tokens'] / (report['rows'] * report['seq_len']):.1%}",
    }
    return facts(values)


def _summary(report: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Name and html of each section about the whole set."""
    sample = "" if report["sampled"] == 1 else _soft(f"Examined: one document in {report['sampled']}.")
    read = [*report["read"], *(f"{name}: {value}" for name, value in report["from"].items())]
    yield "read", [tag("h2", "What was read"), bullets(read)]
    options = table(("option", "value", "effect"), (list(line.values()) for line in report["options"]))
    yield "options", [tag("h2", "Options and their effects"), sample, options]
    ledger = [tag("h2", "Ledger"), _soft("Every row: " + report["ledger"]["path"])]
    for status, rows in report["ledger"]["statuses"].items():
        more = f", the first {len(rows['first'])}" if 0 < len(rows["first"]) < rows["rows"] else ""
        ledger.append(tag("h3", f"{status}: {rows['rows']:,}{more}"))
        ledger.append(bullets(f"{first['where']}: {first['reason']}" for first in rows["first"]))
    yield "ledger", ledger
    keys = legend({"bar": "documents", "over": "rows that did not fit, with their length before"})
    lengths = [tag("h2", "Documents by length"), _soft("In tokens; the dashed line is seq_len."), keys]
    lengths += [_histogram(report["lengths"], report["seq_len"]), tag("h2", "Documents by supervised share"), sample]
    yield "lengths", [*lengths, _histogram(report["shares"], 0, "%")]
    shown = f"{len(report['packing'])} of {report['rows']:,} rows, with a gap between documents."
    keys = legend({"supervised": "supervised", "bar": "not supervised", "pad": "padding"})
    yield "packing", [tag("h2", "Packing"), _soft(shown), keys, bars(map(_picture, report["packing"]))]
    oddest = [tag("h2", "The oddest documents"), sample]
    for odd in report["oddest"]:
        oddest += [tag("h3", "; ".join(odd["kinds"])), _soft(f"row {odd['row']:,}, {odd['where']}")]
        oddest.append(f'<div class="tokens">{_tokens(odd["excerpt"])}</div>')
    yield "oddest", oddest


def _soft(text: str) -> str:
    return tag("p", text, "soft")


def _histogram(bins: list[dict[str, int]], seq_len: int, unit: str = "") -> str:
    lines = []
    most = max(max(entry["documents"], entry["overlong"]) for entry in bins)
    for entry in bins:
        number, kind = (entry["overlong"], "over") if entry["overlong"] else (entry["documents"], "")
        end = ' class="end"' if entry["to"] == seq_len else ""
        bar = f'<div{end}><i class="{kind}" style="width:{100 * number / most:.2f}%"></i></div>'
        lines.append((f"{entry['from']:,}–{entry['to']:,}{unit}", bar, f"{number:,}"))
    return bars(lines)


def _picture(row: dict[str, Any]) -> tuple[str, str, str]:
    """A packed row as a line of `bars`."""
    x, before, shapes = 0, 0, []
    for width, document, supervised in row["runs"]:
        if document < 0 or supervised:
            kind = "pad" if document < 0 else "supervised"
            shapes.append(f'<rect class="{kind}" x="{x}" width="{width}" height="1"/>')
        if document != before:
            shapes.append(f'<rect class="edge" x="{x - 0.3:.1f}" width=".6" height="1"/>')
        x, before = x + width, document
    what = f"{row['documents']} documents, {row['tokens']:,} tokens, {row['supervised']:,} supervised"
    svg = f'<svg role="img" viewBox="0 0 {x} 1" preserveAspectRatio="none">{tag("title", what)}{"".join(shapes)}</svg>'
    return f"row {row['row']:,}", svg, str(row["documents"])


def _row(row: dict[str, Any]) -> Iterator[str]:
    yield tag("h2", f"Row {row['row']:,}")
    yield _soft("Green and underlined: supervised. Point at a token, tap it, or use the arrow keys, for its position.")
    for place, document, inside in documents_in(row):
        ids = ",".join(str(row["id"][i]) for i in inside)
        tokens = [(row["text"][i].replace("↵", "↵\n"), row["supervised"][i]) for i in inside]
        rendered = "".join(c if c >= " " or c in "\n\t" else f"⟨U+{ord(c):04X}⟩" for c in document["text"])
        yield tag("h3", f"document {place}: {document['where']}")
        yield _soft(f"{document['tokens']:,} tokens, {document['supervised']:,} supervised")
        yield f'<div class="tokens" tabindex="0" role="group" aria-label="tokens of document {place}" '
        yield f'data-document="{place}" data-ids="{ids}">{_tokens(tokens)}</div>'
        yield f"<details><summary>rendered text</summary>{tag('pre', rendered)}</details>"
    if row["padding"]:
        yield tag("p", f"padding: {row['padding']:,} tokens, id {row['id'][-1]}, never supervised")


def _tokens(tokens: Iterable[tuple[str, bool]]) -> str:
    parts = []
    for supervised, group in groupby(tokens, lambda token: token[1]):
        text = "".join(f"<b>{escape(text, quote=False)}</b>" for text, _ in group)
        parts.append(f"<mark>{text}</mark>" if supervised else text)
    return "".join(parts)
