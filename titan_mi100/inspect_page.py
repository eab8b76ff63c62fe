"""The report of `inspect_data` as one self-contained HTML page: no network, and its text readable without script."""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from typing import Any

_CSS = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5b6470; --page: #fff; --box: #f4f6f8; --line: #d5dae0;
  --token: #e6eaef; --mark: #d3f3db; --mark2: #b4e6c1; --supervised: #1f9d55; --not: #a9b6c6; --pad: #e6e9ed;
  --over: #d9822b; --link: #0b5fc1 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ed; --soft: #a0abb8; --page: #14171b; --box: #1d2127;
  --line: #363d47; --token: #2a3039; --mark: #1a4228; --mark2: #28603c; --supervised: #3fbf74; --not: #5d6c80;
  --pad: #2e353f; --over: #e39a4a; --link: #7ab8ff } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1150px; padding: 0 20px 5em; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6em; margin: .8em 0 .2em } h2 { font-size: 1.25em; margin: 2em 0 .5em }
h3 { font-size: 1em; margin: 1.4em 0 .3em } p { margin: .4em 0 } ul { padding-left: 1.3em; margin: .3em 0 }
a { color: var(--link) } nav a { margin-right: 1em; display: inline-block; padding: 3px 0 }
.soft { color: var(--soft); font-size: .9em } .warning { border-left: 4px solid var(--over); padding-left: 10px }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 1em 0 }
.facts div { background: var(--box); border-radius: 6px; padding: 8px 12px }
.facts b { display: block; font-size: 1.3em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line) }
th, td:nth-child(1), td:nth-child(2) { white-space: nowrap } tr.supervised td { background: var(--mark) }
code, pre, .tokens, .tokens + table { font: 14px/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
pre, .tokens { white-space: pre-wrap; unicode-bidi: plaintext; background: var(--box); padding: 10px 12px;
  border-radius: 6px; margin: .3em 0 }
.tokens:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.tokens b { font-weight: 400; border-radius: 2px; padding-bottom: 1px }
.tokens b.here { outline: 2px solid var(--link) }
.tokens b:nth-child(even) { background: var(--token) }
.tokens mark { color: inherit; background: none }
.tokens mark b { background: var(--mark); border-bottom: 2px solid var(--supervised) }
.tokens mark b:nth-child(even) { background: var(--mark2) }
.bars { display: grid; grid-template-columns: auto 1fr auto; gap: 3px 10px; align-items: center; font-size: .85em }
.bars span { text-align: right; white-space: nowrap } .bars .end { border-bottom: 2px dashed var(--over) }
.bars i, .bars svg { display: block; height: 15px; width: 100%; background: var(--not); border-radius: 2px }
.bars i.over { background: var(--over) } .key { white-space: nowrap }
.key::before { content: ""; display: inline-block; width: 1em; height: .75em; margin: 0 .35em 0 .8em;
  background: var(--key) }
rect.supervised { fill: var(--supervised) } rect.pad { fill: var(--pad) } rect.edge { fill: var(--page) }
button { font: inherit; padding: 2px 12px; border: 1px solid var(--line); border-radius: 6px; background: var(--box);
  color: inherit } summary { cursor: pointer; padding: 3px 0 }
#here { position: fixed; inset: auto 0 0 0; background: var(--page); border-top: 1px solid var(--line);
  padding: 6px 20px; font-size: .9em } #here:empty { display: none }
@media (max-width: 600px) { body { padding: 0 12px 5em } .facts { grid-template-columns: 1fr 1fr }
  #options tr, #options td { display: block; border: 0; padding: 0 } #options th { display: none }
  #options tr { border-bottom: 1px solid var(--line); padding: 6px 0 }
  #options td:nth-child(-n+2) { display: inline; margin-right: .7em } }
"""

_JS = """
const here = document.getElementById("here");
const tokens = box => [...box.querySelectorAll("b")];
function about(token) {
  const box = token.closest(".tokens"), i = tokens(box).indexOf(token);
  return [token.textContent.trimEnd() || "space", "id " + box.dataset.ids.split(",")[i],
    `position ${i} of document ${box.dataset.document}`, token.closest("mark") ? "supervised" : "not supervised",
  ].join("  ·  ");
}
function show(token) {
  document.querySelectorAll(".here").forEach(old => old.classList.remove("here"));
  token.classList.add("here");
  here.textContent = about(token);
}
function table(box) {
  const made = document.createElement("table"), ids = box.dataset.ids.split(",");
  const line = (cells, kind, style) => {
    const row = made.insertRow();
    row.className = style;
    cells.forEach(text => row.appendChild(document.createElement(kind)).textContent = text);
  };
  line(["pos", "id", "text", "doc", "supervised"], "th", "");
  tokens(box).forEach((token, i) => {
    const text = token.textContent.replaceAll("\\n", "").replaceAll(" ", "·"), supervised = token.closest("mark");
    line([i, ids[i], text, box.dataset.document, supervised ? "yes" : "–"], "td", supervised ? "supervised" : "");
  });
  return made;
}
document.addEventListener("mouseover", event => {
  const token = event.target.closest("[data-ids] b");
  if (token) token.title = about(token);
});
document.addEventListener("click", event => {
  const token = event.target.closest("[data-ids] b"), button = event.target.closest("button");
  if (token) show(token);
  if (!button) return;
  const on = button.ariaPressed !== "true";
  button.ariaPressed = on;
  button.closest("section").querySelectorAll("[data-ids]").forEach(box => {
    if (on) box.after(table(box)); else box.nextElementSibling.remove();
    box.hidden = on;
  });
});
document.addEventListener("keydown", event => {
  const box = event.target.closest("[data-ids]"), step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!box || !step) return;
  const next = tokens(box)[tokens(box).findIndex(token => token.className) + step];
  if (next) { show(next); next.scrollIntoView({block: "nearest"}); }
  event.preventDefault();
});
"""


def page(report: dict[str, Any]) -> str:
    """The whole page. Everything that comes from the data or from file names is escaped."""
    title = f"What trains: the {'training' if report['set'] == 'train' else 'validation'} set"
    sections = ("read", "options", "ledger", "lengths", "packing", "oddest") if "read" in report else ()
    names = [*sections, *(f"row-{row['row']}" for row in report["shown"])]
    links = "".join(f'<a href="#{name}">{name.replace("-", " ")}</a>' for name in names)
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS}</style><h1>{title}</h1>"
        f"<nav>{links}</nav>{''.join(_summary(report)) if sections else ''}"
        f"{_list(line['says'] for line in report.get('where', []))}{''.join(map(_row, report['shown']))}"
        f'<output id="here" aria-live="polite"></output><script>{_JS}</script></html>\n'
    )


def _summary(report: dict[str, Any]) -> Iterator[str]:
    facts = {
        "documents": f"{report['documents']:,}",
        "tokens": f"{report['tokens']:,}",
        "supervised": f"{report['supervised'] / report['tokens']:.1%}",
        f"rows of {report['seq_len']:,}": f"{report['rows']:,}",
        "of the rows is real": f"{report['tokens'] / (report['rows'] * report['seq_len']):.1%}",
    }
    sample = "" if report["sampled"] == 1 else _soft(f"Looked at: one document in {report['sampled']}.")
    yield f'<div class="facts">{"".join(f"<div><b>{value}</b>{name}</div>" for name, value in facts.items())}</div>'
    yield from (f'<p class="warning">{escape(line)}</p>' for line in report["warnings"])
    yield '<section id="read"><h2>What was read</h2>'
    yield _list([*report["read"], *(f"{name}: {value}" for name, value in report["from"].items())])
    yield f'</section><section id="options"><h2>Options, and what they do</h2>{sample}<table>'
    yield "<tr><th>option<th>value<th>effect"
    for line in report["options"]:
        yield f"<tr><td><code>{line['option']}</code><td>{line['value']}<td>{line['effect']}"
    yield f'</table></section><section id="ledger"><h2>Ledger</h2>{_soft("Every row: " + report["ledger"]["path"])}'
    for status, rows in report["ledger"]["statuses"].items():
        more = f", the first {len(rows['first'])}" if 0 < len(rows["first"]) < rows["rows"] else ""
        yield f"<h3>{status}: {rows['rows']:,}{more}</h3>"
        yield _list([f"{first['where']}: {first['reason']}" for first in rows["first"]])
    yield '</section><section id="lengths"><h2>Documents by length</h2><p class="soft">In tokens; the dashed line is '
    yield f"seq_len.{_key('not', 'documents')}{_key('over', 'rows that did not fit, as they were')}</p>"
    yield _bars(report["lengths"], report["seq_len"])
    yield f"<h2>Documents by supervised share</h2>{sample}{_bars(report['shares'], 0, '%')}</section>"
    yield from _packing(report)
    yield f'<section id="oddest"><h2>The oddest documents</h2>{sample}'
    for odd in report["oddest"]:
        yield f"<h3>{'<br>'.join(odd['kinds'])}</h3>" + _soft(f"row {odd['row']:,}, {odd['where']}")
        yield f'<div class="tokens">{_tokens(odd["excerpt"])}</div>'
    yield "</section>"


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}' for line in lines)}</ul>"


def _key(color: str, name: str) -> str:
    return f'<span class="key" style="--key:var(--{color})">{name}</span>'


def _bars(bins: Iterable[dict[str, int]], seq_len: int, unit: str = "") -> str:
    bins, lines = list(bins), []
    most = max(max(entry["documents"], entry["overlong"]) for entry in bins)
    for entry in bins:
        number, kind = (entry["overlong"], "over") if entry["overlong"] else (entry["documents"], "")
        bar = f'<i class="{kind}" style="width:{100 * number / most:.2f}%"></i>'
        end = ' class="end"' if entry["to"] == seq_len else ""
        name = f"{entry['from']:,}–{entry['to']:,}{unit}"
        lines.append(f"<span>{name}</span><div{end}>{bar}</div><span>{number:,}</span>")
    return f'<div class="bars">{"".join(lines)}</div>'


def _packing(report: dict[str, Any]) -> Iterator[str]:
    keys = _key("supervised", "supervised") + _key("not", "not supervised") + _key("pad", "padding")
    yield '<section id="packing"><h2>Packing</h2><p class="soft">'
    yield f"{len(report['packing'])} of {report['rows']:,} rows, with a gap between documents.{keys}</p>"
    yield '<div class="bars">'
    for row in report["packing"]:
        x, before, shapes = 0, 0, []
        for width, document, supervised in row["runs"]:
            if document < 0 or supervised:
                kind = "pad" if document < 0 else "supervised"
                shapes.append(f'<rect class="{kind}" x="{x}" width="{width}" height="1"/>')
            if document != before:
                shapes.append(f'<rect class="edge" x="{x - 0.3:.1f}" width=".6" height="1"/>')
            x, before = x + width, document
        what = f"{row['documents']} documents, {row['tokens']:,} tokens, {row['supervised']:,} supervised"
        yield f'<span>row {row["row"]:,}</span><svg role="img" viewBox="0 0 {x} 1" preserveAspectRatio="none">'
        yield f"<title>{what}</title>{''.join(shapes)}</svg><span>{row['documents']}</span>"
    yield "</div></section>"


def _row(row: dict[str, Any]) -> str:
    parts, start = [], 0
    for place, document in enumerate(row["documents"]):
        inside = range(start, start := start + document["tokens"])
        ids = ",".join(str(row["id"][i]) for i in inside)
        tokens = [(row["text"][i].replace("↵", "↵\n"), row["supervised"][i]) for i in inside]
        rendered = "".join(c if c >= " " or c in "\n\t" else f"⟨U+{ord(c):04X}⟩" for c in document["text"])
        parts += [
            f"<h3>document {place}: {escape(document['where'])}</h3>",
            _soft(f"{document['tokens']:,} tokens, {document['supervised']:,} supervised"),
            f'<div class="tokens" tabindex="0" role="group" aria-label="tokens of document {place}" ',
            f'data-document="{place}" data-ids="{ids}">{_tokens(tokens)}</div>',
            f"<details><summary>rendered text</summary><pre>{escape(rendered)}</pre></details>",
        ]
    if row["padding"]:
        parts.append(f"<p>padding: {row['padding']:,} tokens, id {row['id'][-1]}, never supervised</p>")
    return (
        f'<section id="row-{row["row"]}"><h2>Row {row["row"]:,}</h2><p><button aria-pressed="false">table of tokens'
        '</button></p><p class="soft">Green and underlined: supervised. Point at a token, tap it, or step with the '
        f"arrow keys, for its id and position.</p>{''.join(parts)}</section>"
    )


def _tokens(tokens: Iterable[tuple[str, bool]]) -> str:
    parts = []
    for supervised, group in groupby(tokens, lambda token: token[1]):
        text = "".join(f"<b>{escape(text, quote=False)}</b>" for text, _ in group)
        parts.append(f"<mark>{text}</mark>" if supervised else text)
    return "".join(parts)
