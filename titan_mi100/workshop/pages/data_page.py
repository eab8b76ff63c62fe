"""The report of `inspect_data` as an HTML page. Imports no torch."""

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

from titan_mi100.config.settings import Config
from titan_mi100.files.durable import check_output, write_output
from titan_mi100.tools.score import in_words, table_of
from titan_mi100.wording import plural, printable
from titan_mi100.workshop.pages.charts import bars
from titan_mi100.workshop.pages.data_report import MOST_TOKENS, page_report
from titan_mi100.workshop.pages.document import finding_list, html_document, is_page, section, table, text
from titan_mi100.workshop.pages.reasons import Kind
from titan_mi100.workshop.pages.verdict import WARN, Finding

_LEGEND = (
    "Green and underlined: learned, the model is trained to predict it. The rest is only read. Beside each part stands "
    "what it is and, if that alone does not say it, why it is not learned. For ids and positions point at a token."
)

_TITLE = "Data as training sees it: "


def write_page(options: argparse.Namespace, load: Callable[[], Config]) -> None:
    """Write the page that --html names, over pages of its kind only, and print what was read.

    Raises:
        UserError: something else is there, or the page cannot be written; or as `page_report` does.
    """
    path = Path(options.html)
    check_output(path, "--html", is_page(_TITLE))
    with redirect_stdout(sys.stderr):
        report = page_report(load(), options)
    html = page(f"{_TITLE}{report['set']}", report)
    write_output(path, [html], "--html", is_page(_TITLE))
    print(printable("\n".join([*report["read"], *(f"WARNING {line}" for line in report["warnings"])])))
    print(f"{path}: {len(html.encode(errors='backslashreplace')):,} bytes; open it in a browser")


def page(title: str, report: dict[str, Any]) -> str:
    """The page. All texts are escaped, because data may contain HTML.

    Args:
        report: as `page_report` makes it.
    """
    about = "".join(f"{text(name)}: <bdi>{text(origin)}</bdi><br>" for name, origin in report["from"].items())
    read = "".join(f"<li><bdi>{text(line)}</bdi></li>" for line in report["read"])
    body = [f'<header><h1><bdi>{text(title)}</bdi></h1><p class="soft">{about}</p></header>']
    body += [finding_list([Finding(WARN, warning) for warning in report["warnings"]])]
    body += [section("What was read", f"<ul>{read}</ul>")]
    if scores := report["scores"]:
        cells = ((name, *rest) for name, _, *rest in table_of(scores))
        told = "".join(
            f"<li>{name}: <bdi>{text(line)}</bdi></li>" for name in ("best", "worst") for line in scores[name]
        )
        heads = table(("Scorer", "Mean", "Above 0.5", "Not scored"), cells, range(1, 4))
        body.append(section("Scores", f"<p>{text(in_words(scores))}</p>{heads}<ul>{told}</ul>"))
    sets = report["sets"]
    for index, each in enumerate(sets):
        inside = section("Lengths", _lengths(each)) + section("How rows are filled", _map(each))
        inside += section("Documents, token by token", _documents(each, MOST_TOKENS // len(sets)))
        counts = f"{plural(each['documents'], 'document')}, {each['supervised'] / each['tokens']:.1%} learned"
        counts += f", {each['share']:.1%} of a run's rows" if each["share"] else ""
        head = f"<b>Source <bdi>{text(each['source'])}</bdi></b>: {counts}"
        folded = f"<details{'' if index else ' open'}><summary>{head}</summary>{inside}</details>"
        body.append(folded if len(sets) > 1 else inside)
    if left_out := report["sets_left_out"]:
        body.append(f"<p>{plural(left_out, 'more source')}: name one with --source.</p>")
    return html_document(title, "".join(body))


def _lengths(report: dict[str, Any]) -> str:
    lengths = report["lengths"]
    series = {"documents": lengths["documents"]}
    if any(lengths["overlong"]):
        series["rows of the files that did not fit, by their length"] = lengths["overlong"]
    note, edges = f"a row holds {report['seq_len']:,}", [f"{edge:,}" for edge in lengths["to"]]
    return f'<div class="charts">{bars("Documents by their number of tokens", note, edges, series)}</div>'


def _map(report: dict[str, Any]) -> str:
    """A drawing of some rows: their documents, and below them what is learned."""
    rows = ""
    for row in report["packing"]:
        boxes, learned = zip([0, *row["ends"]], row["ends"], strict=False), row["learned"]
        drawn = f'<path class="box" d="{_boxes(boxes, 0, 10)}"/>'
        drawn += f'<path class="learned" d="{_boxes(zip(learned[::2], learned[1::2], strict=True), 11, 5)}"/>'
        svg = f'<svg viewBox="0 0 1000 16" preserveAspectRatio="none">{drawn}</svg>'
        rows += f"<span>row {row['row']:,}</span>{svg}<span>{row['documents']:,}</span>"
    rows_shown = f"{plural(len(report['packing']), 'row')} of {report['rows']:,}, {report['seq_len']:,} tokens each"
    key = "Blue: documents, with their number on the right; green below them: what is learned; grey: padding."
    return f'<p class="soft">{rows_shown}. {key}</p><div class="map">{rows}</div>'


def _boxes(spans: Iterable[tuple[int, int]], top: int, height: int) -> str:
    return "".join(f"M{start},{top}h{stop - start}v{height}h-{stop - start}z" for start, stop in spans)


def _documents(report: dict[str, Any], most: int) -> str:
    """The documents of some rows, one at a time; the answers of a pair side by side. Args: most: tokens to show."""
    blocks, number = "", 0
    for number, document in enumerate(report["shown"], 1):  # read after the loop
        role = document["role"]
        if not most and role != "rejected":
            number -= 1
            break
        parts = _document(document, most)
        most -= min(most, document["tokens"])
        counts = f"{plural(document['tokens'], 'token')}, {document['supervised']:,} learned"
        where = f"row {document['row']:,}, {'pair' if role else 'document'} {document['place'] // (2 if role else 1):,}"
        head = f"<summary>{where}: <bdi>{text(document['where'])}</bdi>{'' if role else f': {counts}'}</summary>"
        head = f'<details name="document"{" open" if number == 1 else ""}>{head}'
        answer = f"<div><h3>{role}: {counts}</h3>{parts}</div>"
        blocks += {
            "": f"{head}{parts}</details>",
            "chosen": f'{head}<div class="pair">{answer}',
            "rejected": f"{answer}</div></details>",
        }[role]
    caption = f"Shown: {number:,} of {plural(report['documents'], 'document')}. For others use --row or --where."
    if (left_out := report["wanted"] - number) > 0:
        caption += f" {plural(left_out, 'more document')} of these rows are left out: a page holds only so many."
    lines = "".join(f"<p><bdi>{text(line['says'])}</bdi></p>" for line in report["where"])
    return f'<p class="soft">{caption} {_LEGEND}</p>{lines}{blocks}'


def _document(document: dict[str, Any], most: int) -> str:
    """A document, part by part. Args: most: tokens to show."""
    kinds = document["kinds"] or [None] * document["tokens"]
    every = [(*token, kind) for token, kind in zip(document["each"], kinds, strict=True)][:most]
    shown = ""
    for (learned, kind), tokens in groupby(every, lambda token: token[3:]):
        meaning, inside = _what(learned, kind), ""
        for spelled, token_id, position, *_ in tokens:
            lines = text(spelled).replace("↵", "↵\n")
            inside += f'<b title="id {token_id}, position {position}">{lines}</b>'
        mark, label = ("mark", " class=l") if learned else ("span", "")
        shown += f'<small{label}>{text(meaning)}</small><div class="tokens"><{mark}>{inside}</{mark}></div>'
    cut = f"<p>{document['tokens'] - most:,} more tokens are not shown.</p>" if document["tokens"] > most else ""
    return f'<div class="parts">{shown}</div>{cut}'


def _what(learned: bool, kind: Kind | None) -> str:
    """Whether tokens are learned; and if that is known, what they are, and why they are not learned."""
    if kind is None:
        return "learned" if learned else "only read"
    return f"learned: {kind.what}" if learned else ": ".join(filter(None, kind))
