"""What inspect_data shows is what training reads; it is readable, harmless, and says what the options did."""

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS, REPO, SHARED_DATA, qwen3_tokenizer
from test_report import Reading
from test_sentencepiece_tokenizer import train

from titan_mi100.config.layout import IGNORE, Batch
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.files import RecordReader
from titan_mi100.data.loader import RowStream, ShuffledEpochs
from titan_mi100.data.prepare import prepare_data
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools.inspect_data import main
from titan_mi100.tools.prepared import report as inspect_report
from titan_mi100.tools.prepared.report import token_texts, visible
from titan_mi100.workshop.pages import data_page, reasons

HOSTILE = "<script>alert(1)</script> </mark><img src=x onerror=alert(2)> & \x1b[31m \x07 \u202e\u00a0 ⟧ ↵ é😀"


def chat(*turns: str, **last: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    messages: list[dict[str, Any]] = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]
    messages[-1].update(last)
    return {"messages": messages}


class Inspect:
    """Runs the program in this process on rows written to data.jsonl."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self._capsys = folder / "data.jsonl", capsys
        self.page = folder / "page.html"

    def write(self, *rows: dict[str, Any] | str) -> None:
        self.file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def __call__(self, *arguments: str, seq_len: int = 256, code: int = 0) -> str:
        settings = {"model.flavor": "0.6B", "model.tokenizer_path": ASSETS / "tokenizer", "data.path": self.file}
        settings["training.seq_len"] = str(seq_len)
        argv = [
            text for key, value in settings.items() if f"--{key}" not in arguments for text in (f"--{key}", str(value))
        ]
        assert main([*argv, *arguments]) == code
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        assert err == "" if code == 0 else out == ""
        return err if code else out

    def report(self, *arguments: str, **how: Any) -> dict[str, Any]:
        return json.loads(self(*arguments, "--json", **how))

    def html(self, *arguments: str, **how: Any) -> str:
        said = self(*arguments, "--html", str(self.page), **how)
        # the terminal, too, says what was left out
        assert "\nledger: " in said and said.endswith(" bytes; open it in a browser\n")
        return self.page.read_text(encoding="utf-8")


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Inspect:
    return Inspect(tmp_path, capsys)


@pytest.mark.parametrize("overlong", ["drop", "split"])
def test_all_rows_of_an_epoch_are_those_that_the_loader_yields(overlong: str, inspect: Inspect) -> None:
    rows = (ASSETS / "arithmetic.jsonl").read_text(encoding="utf-8").splitlines()[:100]
    inspect.write(
        *(chat(*json.loads(row).values()) for row in rows), chat("long", "word " * 300), chat(HOSTILE, HOSTILE)
    )
    config = DataConfig(path=(str(inspect.file),), overlong=overlong)
    dataset = prepare_data(config, str(ASSETS / "tokenizer"), "", 256).train
    shown = inspect.report("--row", f"0-{len(dataset) - 1}", "--data.overlong", overlong)["shown"]
    source = ShuffledEpochs(dataset, 7, 1)
    loader = RowStream(source, Batch(1, 1, 1), 0)
    for number in range(len(dataset)):
        (microbatch,) = loader.step(number)
        batch = {name: value[0].tolist() for name, value in microbatch.items()}
        row = shown[source.index(number)]
        labels = [token if seen else IGNORE for token, seen in zip(row["id"], row["supervised"], strict=True)]
        assert (row["id"], row["position"], row["document"]) == (
            batch["input_ids"], batch["positions"], batch["document_ids"]
        )  # fmt: skip
        assert labels[1:] == batch["labels"][:-1] and not row["supervised"][0] and batch["labels"][-1] == IGNORE


def test_invisible_characters_and_parts_of_characters_are_readable() -> None:
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    ids = tokenizer.encode("\n\té😀\u00a0\u202e⟧")
    shown = r"↵⇥é\xf0\x9f\x98\x80\xc2\xa0\xe2\x80\xae\xe2\x9f\xa7"
    assert "".join(token_texts(tokenizer, ids)) == shown
    assert visible("a b\u00a0\u202e⟧") == "a b⟨U+00A0⟩⟨U+202E⟩⟨U+27E7⟩"


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real data is not beside this checkout")
def test_a_token_of_whole_characters_and_a_part_shows_both() -> None:
    tokenizer = qwen3_tokenizer()
    assert token_texts(tokenizer, tokenizer.encode("Köln ☀️")) == ["K", "ö", "ln", r" \xe2\x98", r"\x80", "️"]


def test_brackets_hold_what_is_supervised(inspect: Inspect) -> None:
    inspect.write(chat("one", "ONE two", "two", HOSTILE))
    plain = inspect()
    assert "⟦ONE two<|im_end|>⟧" in plain and "\x1b" not in plain and "\x07" not in plain


def tokens_of_page(text: str) -> list[tuple[str, int, int, bool]]:
    """Text, id and position of the rows' tokens, and whether they are marked."""
    found, marked = [], False
    for tag, token_id, position, token in re.findall(
        r'(</?mark>)|<b title="id (\d+), position (\d+)">([^<]*)</b>', text, re.S
    ):
        marked = tag == "<mark>" if tag else marked
        found += [] if tag else [(unescape(token).replace("↵\n", "↵"), int(token_id), int(position), marked)]
    return found


def test_the_page_holds_the_tokens_escaped_and_needs_no_other_file(inspect: Inspect) -> None:
    inspect.write(chat("one", "ONE"), chat(HOSTILE, HOSTILE))
    text, [row] = inspect.html(), inspect.report("--row", "0")["shown"]
    columns = (row[name][: len(row["id"]) - row["padding"]] for name in ("text", "id", "position", "supervised"))
    assert tokens_of_page(text) == list(zip(*columns, strict=True))
    assert not re.search("<(script|img|link|base)|\x1b|url\\(|://|src=|href=", re.sub("<b [^<]*|&lt;", "", text))
    page = Reading(text)
    assert not page.scripts and not [name for name, _ in page.attributes if name.startswith("on")]
    elements = "html meta title style header section h1 h2 p br ul li bdi b div small span mark details"
    elements += " summary figure figcaption svg path"
    assert page.tags == {*elements.split()}  # nothing of the data is an element
    # No wider than a phone, as far as elements show it: tables scroll, drawings have no width of their own.
    assert text.count("<table>") == text.count('<div class="scroll"><table>')
    drawings = re.findall("<svg v[^>]*>", text)
    assert drawings and all("width" not in each and "preserveAspectRatio" in each for each in drawings)
    assert {*re.findall(r"[^-]width: (\d[^; ]+)", text)} == {"1.5em", "2em", "100%"}


def test_a_page_of_long_rows_stays_small_and_says_how_much_it_shows(inspect: Inspect) -> None:
    ids = [65 + i % 50 for i in range(32768)]
    labels = [token if i % 2 else -100 for i, token in enumerate(ids)]
    inspect.write(*({"input_ids": ids[: 32768 - i], "labels": labels[: 32768 - i]} for i in range(8)))
    text = inspect.html(seq_len=32768)
    assert len(text) < 2_500_000 and "Shown: 1 of 8 documents" in text and "16,384 more tokens are not shown" in text
    inspect.write(*(chat(f"{i}", "x") for i in range(200)))
    for rows in ((), ("--row", "0-9")):
        text = inspect.html(*rows)
        [shown] = map(int, re.findall(r"Shown: (\d+) of 200 documents", text))
        assert 20 <= shown == text.count('<details name="document"') <= 30
        assert ("more documents of these rows are left out" in text) == bool(rows)
        assert {*re.findall(r"<summary>row (\d)", text)} >= {"0", "8"}


CALL = {"function": {"name": "add", "arguments": {"a": 2}}}
TALK = [
    {"role": "system", "content": "Brief."}, {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"}, {"role": "assistant", "content": "Four.", "weight": 0},
    {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
]  # fmt: skip
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
TEXTS = {
    "system message": "Brief.<|im_end|>",
    "user message": "2 + 2?<|im_end|>Sure?<|im_end|>",
    "answer of a tool": "4",
}
LOST = "the template leaves out its reasoning"


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([{"messages": TALK}], [], {
            **TEXTS, "answer of a tool": "4", "learned: answer": f"{CALLED}Yes.<|im_end|>",
            "answer: weight 0": "Four.<|im_end|>", "learned: reasoning": "<think>\nhm\n</think>\n\n",
        }),
        ([{"messages": TALK}], ["--data.earlier_thinking", "mask"], {
            f"answer: {LOST}": CALLED, "answer: weight 0": "Four.<|im_end|>", "learned: answer": "Yes.<|im_end|>",
        }),
        ([{"messages": TALK}], ["--data.loss", "last"], {
            "answer: not the last answer: data.loss = last": CALLED, "answer: weight 0": "Four.<|im_end|>",
        }),
        ([{"messages": TALK}], ["--data.loss", "last_round"], {
            "answer: before the last user message: data.loss = last_round": CALLED,
            "answer: weight 0": "Four.<|im_end|>", "learned: answer": "Yes.<|im_end|>",
        }),
        ([{"messages": [*TALK[:2], {**TALK[6], "weight": 1}]}], ["--data.loss", "weight"], {
            "user message: no weight 1": "2 + 2?<|im_end|>", "learned: answer": "Yes.<|im_end|>",
        }),
        ([{"messages": [TALK[1], TALK[2], TALK[3], TALK[6]]}], ["--data.earlier_thinking", "unroll"], {
            "learned: reasoning": "<think>\nuse it\n</think>\n\n<think>\nhm\n</think>\n\n",
        }),
        ([chat("a", "b", "c", "d")], [], {
            "empty think block: the prompt ends with it: data.empty_think": "<think>\n\n</think>\n\n",
            "template": "<|im_start|>user\n\n<|im_start|>assistant\n\n<|im_start|>user\n\n<|im_start|>assistant\n\n",
        }),
        ([{"prompt": chat("a", "b", "c")["messages"], "completion": chat("a", "d")["messages"][1:]}], [], {
            "answer: it belongs to the prompt": "b<|im_end|>", "learned: answer": "d<|im_end|>",
        }),
        ([chat("a", "1 2 3 4 " * 65)], ["--data.overlong", "split"], {"answer: nothing comes before it": "  "}),
        ([{"text": " 1 2 3 4" * 65}], ["--data.overlong", "split"], {"text: nothing comes before it": "   "}),
        ([{"input_ids": [65, 66, 67], "labels": [-100, -100, 67]}], [], {"tokens: its label is -100": "bc"}),
    ],
)  # fmt: skip
def test_each_part_of_a_document_says_what_it_is_and_why_it_is_not_learned(
    rows: list[dict[str, Any]], options: list[str], expected: dict[str, str], inspect: Inspect
) -> None:
    inspect.write(*rows)
    found: dict[str, str] = {}
    part = r'<small[^>]*>([^<]*)</small><div class="tokens"><(mark|span)>(.*?)</\2>'
    for label, mark, inside in re.findall(part, inspect.html(*options), re.S):
        tokens = unescape(re.sub("<[^>]*>", "", inside)).replace("↵\n", "\n")
        found[unescape(label)] = found.get(unescape(label), "") + tokens
        assert (mark == "mark") == label.startswith("learned")
    assert found.items() >= expected.items()


def test_nothing_is_claimed_of_a_record_that_is_not_read_again_or_gives_other_tokens(
    inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect.write(chat("one", "ONE"), chat("two", "TWO"))

    def count(*labels: str) -> list[int]:
        return [text.count(f">{label}</small>") for text in [inspect.html()] for label in labels]

    labels = "learned: answer", "empty think block: the prompt ends with it: data.empty_think", "learned", "only read"
    assert count(*labels) == [2, 2, 0, 0]

    class Far(RecordReader):
        """Of a file so large that nobody waits for its end."""

        consumed = 1 << 40  # type: ignore[assignment]

    monkeypatch.setattr(reasons, "RecordReader", Far)
    assert count(*labels) == [1, 1, 1, 2]
    monkeypatch.setattr(reasons, "parse_record", lambda record: chat("other", "text"))
    assert count(*labels) == [0, 0, 2, 4]


def test_the_page_of_a_mixture_shows_each_source_and_its_share(inspect: Inspect, tmp_path: Path) -> None:
    inspect.write(chat("one", "ONE"), chat("two", "TWO"))
    (other := tmp_path / "<b>.jsonl").write_text(json.dumps({"text": "plain"}) + "\n")
    mixed = "--data.path", str(inspect.file), str(other), "--data.weights", "3", "1"
    text = inspect.html(*mixed)
    assert "</b>: 2 documents, " in text and ", 75.0% of a run's rows</summary>" in text
    assert "</b>: 1 document, " in text and ", 25.0% of a run's rows</summary>" in text
    assert re.findall("<b>Source <bdi>(.*?)</bdi>", text) == ["data", "&lt;b&gt;"]
    assert re.findall(r"Shown: \d+ of \d+ document", text) == ["Shown: 2 of 2 document", "Shown: 1 of 1 document"]
    assert "<b>Source " not in inspect.html(*mixed, "--source", "data") and "source" in inspect(*mixed, code=2)


def test_lengths_are_counted(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(65, 75))
    rows = [{"input_ids": ids[:n], "labels": [-100] * (n - 1) + ids[n - 1 : n]} for n in (2, 4, 10)]
    inspect.write(*rows, rows[0], {"input_ids": ids * 30, "labels": ids * 30}, {"input_ids": ids, "labels": ids})
    reports, make = list[dict[str, Any]](), data_page.page_report
    monkeypatch.setattr(data_page, "page_report", lambda *given: reports.append(make(*given)) or reports[0])
    inspect.html()
    [report] = reports[0]["sets"]
    assert report["lengths"]["documents"][0] == 5  # a row that repeats another one is counted, and trains
    assert report["lengths"]["overlong"][-1] == 1


def test_a_sentencepiece_model_that_spells_no_replacement_character(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train())
    inspect.write({"text": "the cat sat on a mat"}, {"text": "hello \ufffd world"})
    report = inspect.report("--model.tokenizer_path", str(tmp_path / "tokenizer.model"))
    texts = [document["text"].strip() for document in report["shown"][0]["documents"]]
    assert any(text.startswith("the cat sat") for text in texts)


def test_rows_of_a_json_array_are_found_by_their_element(inspect: Inspect) -> None:
    inspect.write(json.dumps([chat("a", "b"), chat("c", "d")]))
    report = inspect.report("--where", f"{inspect.file}:1[2]")
    assert report["where"][0]["where"] == f"{inspect.file}:1[2]" and report["where"][0]["rows"] == [0]


def test_ctrl_c_is_a_line_and_130(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_report, "prepare_run", interrupt)
    inspect.write(chat("a", "b"))
    assert inspect(code=130) == "ERROR interrupted\n"


def test_where_finds_a_lines_rows_or_the_reason_that_it_has_none(inspect: Inspect) -> None:
    inspect.write(chat("one", "ONE"), chat("two", "word " * 300), chat("three", "THREE"))
    [line] = inspect.report("--where", "data.jsonl:3")["where"]
    assert line["rows"] == [0] and line["status"] == "kept"
    first, second = re.findall(r"<summary>row 0, document \d: <bdi>.*?:(\d)<", inspect.html("--where", "data.jsonl:3"))
    assert (first, second) == ("3", "1")  # the line itself comes first
    assert "Shown: 0 of 2 documents" in inspect.html("--where", "data.jsonl:2")
    assert "data.jsonl:2: dropped; longer than seq_len: " in inspect("--where", f"{inspect.file}:2")
    assert "no such line" in inspect("--where", "data.jsonl:9", code=2)
    inspect.write(chat("one", "ONE"), "{broken")
    assert "data.jsonl:2: rejected: not JSON" in inspect("--where", "data.jsonl:2", code=2)
    assert "data.jsonl:2: not JSON" in inspect(code=2) and "ledger.csv" in inspect(code=2)


def test_mistakes_exit_with_2_and_a_message(inspect: Inspect) -> None:
    inspect.write(chat("one", "ONE"))
    assert "rows are numbered 0 to 0" in inspect("--row", "1", code=2)
    for rows in ("x", ",", "0,"):
        assert "is not a row number" in inspect("--row", rows, code=2)
    assert "no such set" in inspect("--validation", code=2)
    assert "/nowhere/x.html: cannot be written (No such file" in inspect("--html", "/nowhere/x.html", code=2)
    content = inspect.file.read_text()
    assert "exists already, and is not overwritten" in inspect("--html", str(inspect.file), code=2)
    assert inspect.file.read_text() == content
    assert "'--data.pth' is not an option; did you mean" in inspect("--data.pth", "x", code=2)


def test_a_closed_pipe_is_no_mistake() -> None:
    command = f"{sys.executable} -m titan_mi100 inspect --job.config_file train_configs/debug.toml | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=REPO)
    assert result.stderr == "" and result.stdout.count("\n") == 1
