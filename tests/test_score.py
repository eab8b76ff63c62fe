"""`titan-mi100 score`: what pays and what never does, whose code runs and how it is bounded, and what is kept."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from test_corpus import TOKENIZER

from titan_mi100.config.load import load_config
from titan_mi100.data.encode import Encoder, encode_records
from titan_mi100.data.files import read_records
from titan_mi100.data.formats import choose_format
from titan_mi100.data.samples import LENGTH, PART_PROMPTS, STOP, Answer, Group, GroupStore, Sampled, Scored
from titan_mi100.errors import UserError
from titan_mi100.files import user_code
from titan_mi100.text.load import load_tokenizer
from titan_mi100.text.scorers import Judged, calls_of, gold_of, scorer_of, without_thinking
from titan_mi100.tools import score

ROW = {"question": "1 + 1?", "answer": "so\n#### 2"}


def samples(folder: Path, texts: list[list[str]], rows: list[dict[str, Any]] | None = None, parts: int = -1) -> Path:
    """A store with a group for each list of texts; an answer that ends with ~ is cut off."""
    about = Sampled("samples", "s", "p", "t", len(texts), len(texts[0]), 0, 9, [2], "float32", 8)
    store = GroupStore(folder, about)
    store.begin()
    groups = [
        Group(number, f"data.jsonl:{number + 1}", rows[number] if rows else ROW, [5, 6], [
            Answer(ids := [*(3 + ord(c) % 90 for c in text), 2], [-0.5] * len(ids), (STOP, LENGTH)["~" in text], text)
            for text in own
        ])
        for number, own in enumerate(texts)
    ]  # fmt: skip
    for number in range(store.count if parts < 0 else parts):
        store.write(number, [groups[prompt] for prompt in store.prompts_of(number)])
    return folder


def run(*words: object) -> int:
    return score.main([*map(str, words)])


def scores(folder: Path) -> list[list[float | None]]:
    store = GroupStore.open(folder, Scored)
    return [[answer.score for answer in group.answers] for part in range(store.count) for group in store.read(part)]


@pytest.mark.parametrize(
    ("scorer", "gold", "right", "wrong"),
    [
        ("number", "1234", ["$1,234.00", "it is 1234.", "1.234e3", "2468/2"], ["12345", "1234, 5", "−$1,234", ""]),
        ("number", "-5", ["−5", "-$5", "-€5", "#### -5 and 6"], ["5", "10 - 5"]),
        ("number", "3/4", ["0.75", "6/8", r"so \dfrac{3}{4}", ".75"], ["3", "4", "3/0", "75%", "3/4/2026"]),
        ("number", 5, ["5.0", "<think>6</think>5"], ["5 1/2", "<think>5", "x"]),
        ("number", "9" * 5000, ["9" * 5000], ["9" * 4999, "1e999"]),
        ("number", "0", ["-0.0"], ["3/0"]),
        ("text", "Paris", [" Paris\n"], ["paris", "Paris.", "in Paris", ""]),
        (r"regex:is (\w+)", "Paris", ["is Rome, is Paris"], ["is Paris, is Rome", "Paris", "is Parisian"]),
        ("regex:[A-D]", "so B", ["A or B"], ["B or A", "", "b"]),
        ("length:4", "", [], ["x" * 8]),
    ],
)  # fmt: skip
def test_what_is_right(scorer: str, gold: Any, right: list[str], wrong: list[str]) -> None:
    judge = scorer_of(scorer)
    for texts, expected in ((right, 1.0), (wrong, 0.0)):
        for text in texts:
            assert judge(Judged(without_thinking(text), len(text), gold, {})) == expected, text


@pytest.mark.parametrize("gold", [None, "", " ", "no number", [1], {"a": 1}, True])
def test_a_missing_gold_answer_never_pays(gold: Any) -> None:
    for name in ("number", "text", "regex:x*"):
        if name == "number" or not isinstance(gold, str) or not gold.strip():
            for text in ("", " ", "None", "0", "1", "True"):
                assert scorer_of(name)(Judged(text, 1, gold, {})) is None


CALLS = [{"function": {"name": "f", "arguments": '{"n": 1, "s": "5", "b": true}'}}, {"name": "g", "arguments": {}}]
QWEN3 = '<tool_call>\n{"name": "f", "arguments": {"s": "5", "n": 1.0, "b": true}}\n</tool_call>'
QWEN3_5 = (
    "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\n5\n</parameter>\n<parameter=b>\nTrue\n"
    "</parameter>\n</function>\n</tool_call>"
)
LAST = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


def test_tool_calls_are_compared_by_name_and_arguments_in_their_order() -> None:
    judge, answered = scorer_of("tool_calls"), [{"role": "user"}, {"role": "assistant", "tool_calls": CALLS}]
    for row in ({"messages": answered}, {"tool_calls": CALLS}, {"tool_calls": json.dumps(CALLS)}):
        for call in (QWEN3, QWEN3_5):
            assert judge(Judged(f"I look.{call}\n{LAST}", 1, None, row)) == 1
            wrong = [LAST + call, call, call + LAST + LAST, call.replace("1", "2") + LAST, f"{call}{LAST}<tool_call>"]
            wrong += [call.replace("1", "true") + LAST, call.replace('"b": t', '"b": f').replace("True", "x") + LAST]
            wrong += [call.replace('{"s"', '{"n": 2, "s"').replace("n>\n1", "n>\n2") + LAST]
            for text in [*wrong, "", "<tool_call>[</tool_call>" * 2, LAST.replace("}", ', "x": 1}', 1) * 2]:
                assert judge(Judged(text, 1, None, row)) == 0, text
    for row in ({}, {"tool_calls": []}, {"messages": [*answered, {"role": "tool"}]}):
        assert judge(Judged(LAST, 1, None, row)) is None
    for calls in ([{"name": "f"}], ["f"], {"name": "f"}, "[", [{"name": "f", "arguments": "1"}]):
        with pytest.raises(ValueError, match="must be a list of calls"):
            calls_of({"tool_calls": calls})


def test_a_schema_decides_about_json_and_fetches_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "s.json").write_text('{"type": "object", "required": ["a"]}')
    if not importlib.util.find_spec("jsonschema"):
        with pytest.raises(UserError, match=r"needs jsonschema: pip install 'titan-mi100\[schema\]'"):
            scorer_of(f"schema:{path}")
    pytest.importorskip("jsonschema")
    judge = scorer_of(f"schema:{path}")
    for text in ('{"a": 1}', 'x\n```json\n{"a": 1}\n```\n'):
        assert judge(Judged(text, 1, None, {})) == 1
    for text in ("", "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', 'x {"a": 1}', "[" * 100_000, '{"b": 1}'):
        assert judge(Judged(text, 1, None, {})) == 0
    path.write_text('{"$ref": "http://127.0.0.1:1/x"}')
    with pytest.raises(Exception, match="Unresolvable"):
        scorer_of(f"schema:{path}")(Judged("{}", 1, None, {}))
    path.write_text('{"type": "nothing"}')
    with pytest.raises(UserError, match="is no JSON schema"):
        scorer_of(f"schema:{path}")


def test_the_gold_answer_is_found_or_refused() -> None:
    answered = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<think>3</think>\n#### 2"}]
    for row in (ROW, {"solution": "2"}, {"reward_model": {"ground_truth": 2}}, {"messages": answered, "answer": "2"}):
        assert str(gold_of(row)) == "2"
    assert gold_of({"messages": [*answered, answered[0]]}) is None  # then the last answer is a part of the prompt
    assert gold_of({"answer": "", "solution": None, "ground_truth": []}) is None
    assert gold_of({"a": {"b": "5"}, "answer": "6"}, "a.b") == "5" and gold_of(ROW, "a.b") is None
    with pytest.raises(ValueError, match=r"answer = '5', solution = '6': these differ; name .* such as --gold answer"):
        gold_of({"answer": "5", "solution": "6"})


def test_what_is_judged_is_behind_the_thinking() -> None:
    for text in ("<think>2</think>3", "2</think>3", "3<think>2", "1</think>2</think>3"):
        assert without_thinking(text) == "3"
    assert without_thinking("3", is_open=True) == ""


def test_scores_are_a_store_that_a_second_start_leaves_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thinks = [["2</think>2", "2~"], ["2</think>3", "3</think>2"]]  # the prompt begins the thinking; one is cut in it
    folder = samples(tmp_path / "s", [["2", "it is 3"], ["2\x1b", "2"], *thinks], [ROW, {"question": "?"}, ROW, ROW])
    words = (folder, "--by", "number=2", "--by", "length:2=0.5")
    assert run(*words, "--show", 1) == 0
    assert scores(folder / "scored") == [[2.5, 0], [None, None], [2, 0.25], [0, 2]]
    out = capsys.readouterr().out
    assert "number                                 2    0.500    37.5%       25.0%" in out and "12.5% cut off" in out
    assert "are equal teach nothing: 1;" in out and "best: 2.5  data.jsonl:1, answer 1: ...1 + 1? -> 2" in out
    assert out.endswith(f'[data]\npath = "{folder}/scored/part-*.jsonl"\n[objective]\nname = "policy"\n')
    made = {path: path.stat().st_mtime_ns for path in (folder / "scored").iterdir()}
    assert run(*words, "--json") == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "scored").iterdir()} == made
    said = capsys.readouterr()
    assert json.loads(said.out)["scorers"]["score"]["not_scored"] == 0.25 and "is complete; nothing is" in said.err
    [part] = GroupStore.open(folder / "scored", Scored).parts.values()
    part.write_bytes(part.read_bytes().replace(b"null", b"1.0"))
    assert run(*words) == 2 and "is damaged; delete it, and run titan-mi100 score again" in capsys.readouterr().err


FUNCTIONS = """
import ctypes, os, sys, threading, time
def own(prompt, answer, row): print("noise"); return prompt == row["question"] and answer == "2" if answer else None
def trl(prompts, completions, answer, **others): return [float(c == a[-1]) for c, a in zip(completions, answer)]
def compute_score(data_source, solution_str, ground_truth, extra_info=1): return {"score": solution_str == ground_truth}
def reads(prompt, answer, row): return len(sys.stdin.read())
def sleeps(prompt, answer, row): threading.Thread(target=time.sleep, args=(999,)).start(); return 1
def nan(prompt, answer, row): return float("nan") if answer else 1
def text(prompt, answer, row): return "1.0"
def few(completions, **columns): return [1.0]
def lacks(completions, nothing): return [1.0] * len(completions)
def other(a, b): return 1
def fails(prompt, answer, row): print("\\x1b[31m" + "x" * 9**6); raise ValueError("broken")
def leaves(prompt, answer, row): os._exit(0)
def crashes(prompt, answer, row): ctypes.string_at(0)
def closes(prompt, answer, row): os.closerange(0, 99); return 1
def replies(prompt, answer, row): [os.write(fd, b'["", [[9, 9, 9]]]') for fd in range(1, 9) if fd != 3]; return 1
def large(prompt, answer, row): return len(bytearray(10 << 30))
def loops(prompt, answer, row): [print("spam") for _ in iter(int, 1)]
def swallows(prompt, answer, row):
    while True:
        try: time.sleep(9)
        except BaseException: pass
def note(): open(__file__ + ".pids", "a").write(os.readlink("/proc/self") + " "); time.sleep(999)
def forks(prompt, answer, row): [os.fork() for _ in range(6)]; note()
def noted(): return os.path.exists(__file__ + ".pids")
def daemon(prompt, answer, row): os.fork() or (os.setsid(), note()); return len([*iter(noted, True)]) * 0 + 1
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own", [1, 0, None]), ("trl", [1, 0, 0]), ("compute_score", [1, 0, 0]), ("compute_score", [None] * 3),
        ("reads", [0, 0, 0]), ("sleeps", [1, 1, 1]), ("daemon", [1, 1, 1]),
        ("nan", r"data.jsonl:1, answer 1: returned nan; expected None, or a finite number"),
        ("text", r"answer 1: returned '1.0'"), ("few", r"returned \[1.0\]; expected a list of 3 scores"),
        ("lacks", r"raised TypeError\(.* missing 1 required positional argument: 'nothing'"),
        ("other", r"has the parameters a, b; expected score\(prompt, answer, row\), f\(prompts, .* as in TRL, or comp"),
        ("fails", r"(?s)answer 1: raised ValueError\('broken'\); correct it, .*; it has printed:.*xxx.*, in fails"),
        ("gone", "is no function of this file"), ("leaves", "ended without scores: exit code 0"),
        ("crashes", "ended without scores: SIGSEGV"), ("closes", "ended without scores: exit code"),
        ("replies", "ended without scores"), ("large", r"needs more than 4 GiB \(--memory\)"),
        ("loops", r"(?s)answer 1: took longer than 0.2 s an answer \(--timeout\).*spam"),
        ("swallows", "ended without scores: took longer"), ("forks", "took longer"),
    ],
)  # fmt: skip
def test_a_function_scores_or_is_refused_and_nothing_of_it_survives(
    name: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_late = name in ("loops", "swallows", "forks")  # the others have all the time that a busy machine needs
    if name == "daemon" and not user_code.namespaces(False):
        pytest.skip("without a space of processes a daemon survives")
    (path := tmp_path / "f.py").write_text(FUNCTIONS)
    row = {"question": "1 + 1?"} if expected == [None] * 3 else {**ROW, "answer": "2"}
    folder, before = samples(tmp_path / "s", [["2", "it is 3", ""]], [row]), time.monotonic()
    for loading in (3.0, 12.0, 48.0) if is_late else (60.0,):  # on a busy machine its process may begin later
        monkeypatch.setattr(user_code, "LOADING", loading)
        code = run(folder, "--function", f"{path}:{name}", "--timeout", 0.2 if is_late else 60)
        said = capsys.readouterr().err
        if name != "forks" or Path(f"{path}.pids").exists():
            break
    assert time.monotonic() - before < 240  # it waits for nothing that the function has left
    if isinstance(expected, list):
        assert code == 0, said
        assert scores(folder / "scored") == [expected] and "noise" not in said
    else:
        assert code == 2 and re.search(expected, said) and len(said) < 6000 and "\x1b" not in said, said
        assert os.listdir(folder / "scored") == ["store.json"]
    pids = Path(f"{path}.pids").read_text().split() if Path(f"{path}.pids").exists() else []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == [] and bool(pids) == (name in ("forks", "daemon"))


KILLED = """
import os, time
def f(prompt, answer, row):
    if answer == "40" and not os.path.lexists("PID"): os.symlink(os.readlink("/proc/self"), "PID"), time.sleep(99)
    return len(answer)
"""


def test_a_killed_start_goes_on_with_the_same_bytes_and_leaves_no_process(tmp_path: Path) -> None:
    folder = samples(tmp_path / "s", [["2", str(n)] for n in range(2 * PART_PROMPTS + 1)])
    (path := tmp_path / "f.py").write_text(KILLED.replace("PID", str(tmp_path / "pid")))
    words = [folder, "--by", "number", "--function", f"{path}:f=-0.1"]
    command = [sys.executable, "-m", "titan_mi100", "score", *map(str, words)]
    process = subprocess.Popen(command, cwd=REPO)
    while not os.path.lexists(tmp_path / "pid"):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    store = GroupStore.open(folder / "scored", Scored)
    assert len(store.parts) == 1 and not store.is_complete
    first = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in store.parts.values()}
    until = time.monotonic() + 60
    while Path("/proc", os.readlink(tmp_path / "pid")).exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert run(*words) == 0 == run(*words, "--out", tmp_path / "whole")
    parts = {path.name: path for path in GroupStore.open(folder / "scored", Scored).parts.values()}
    assert {name: (parts[name].stat().st_mtime_ns, parts[name].read_bytes()) for name in first} == first
    whole = GroupStore.open(tmp_path / "whole", Scored).parts.values()
    assert {path.name: path.read_bytes() for path in whole} == {n: path.read_bytes() for n, path in parts.items()}
    assert scores(tmp_path / "whole")[2][:2] == [0.9, 0.9] and len(parts) == 3


def test_right_answers_become_rows_that_are_trained_on_with_their_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept = samples(tmp_path / "s", [["2", "2", "3", "2~", "is 2"]]), tmp_path / "k.jsonl"
    words = (folder, "--by", "number", "--keep", "right", "--to")
    assert run(*words, kept) == 0 == run(*words, kept)
    store = GroupStore.open(folder / "scored", Scored)
    answers = [store.read(0)[0].answers[place].ids for place in (0, 4)]
    config = load_config(["--model.flavor", "debug", "--model.tokenizer_path", TOKENIZER, "--data.path", str(kept)], 1)
    tokenizer, form = load_tokenizer(TOKENIZER), choose_format(str(kept), config.data)
    chunk = encode_records(Encoder(tokenizer, None, config.data, 99), form, 0, [*read_records(str(kept))])
    assert form.name == "tokens" and not chunk.reasons and chunk.lengths.tolist() == [len(ids) + 2 for ids in answers]
    assert chunk.values.tolist() == [v for ids in answers for v in (10, 12, *(2 * token + 1 for token in ids))]
    assert run(*words, kept, "--above", 1) == 2 and "--above 1: no complete answer" in capsys.readouterr().err
    (other := tmp_path / "other.jsonl").write_text('{"input_ids": [1], "labels": [1]}\n')
    assert run(*words, other) == 2 and "exists already, and is not overwritten" in capsys.readouterr().err
    assert run(*words, folder / "k.jsonl") == 2 and len(other.read_text()) < 40 and len(os.listdir(folder)) == 3


NEVER, OTHER = "code beside data or from the hub is never run", "was made with another scorers; start with the same opt"
REFUSED = [
    ("s", "--by or --function is missing"), ("s --by numbers", "--by numbers: is no scorer; there are number, text"),
    ("s --by regex:(", "is no pattern of Python's re"), ("s --by length:0", "is no scorer"), ("s --by =1", "no scorer"),
    ("s --by number=nan", "its weight is too large"), ("s --by number --by number", "is given twice"),
    ("s --by schema:none.json", "none.json: no such file; name a JSON schema"), ("s --function s/f.py:f", NEVER),
    ("s --function f.py", "must be FILE.py:NAME"), ("s --function f.txt:f", "must be FILE.py:NAME"),
    ("s --function link.py:f", NEVER), ("s --function hub/snapshots/1/f.py:f", NEVER),
    ("s --function owner/f.py:f", "is no file here that can be read; a function never comes from the hub"),
    ("s --by text --timeout 0", "must be above 0"), ("s --by text --memory nan", "must be above 0"),
    ("s --by text --show -1", "--show -1: must be"), ("s --by text --keep right", "need each other"),
    ("s --by text --out s", "holds the samples"), ("part --by text", "are missing; run titan-mi100 sample again"),
    ("none --by text", "holds no store.json"), ("done --by text", "; name a folder with samples"),
    ("s --by text --out done", OTHER), ("s --by number --gold a --out done", OTHER),
    ("s --function f.py:f --out coded", OTHER), ("damaged --by text", "is damaged; delete it, and run titan-mi100 sam"),
    ("differ --by text", r"data.jsonl:1: answer = '2', solution = '3': these differ; .* --gold answer"),
    ("s --by regex:(a+)+$ --timeout 0.1", r"jsonl:2, answer 1: regex:.* fails \(TimeoutError\('took longer than --tim"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusing")
    samples(folder / "s", [["2"], ["a" * 40 + "b"]], [ROW, ROW])
    samples(folder / "part", [["2"]] * (PART_PROMPTS + 1), parts=1)
    samples(folder / "differ", [["2"]], [{"answer": "2", "solution": "3"}])
    [damaged] = GroupStore.open(samples(folder / "damaged", [["2"]]), Sampled).parts.values()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (folder / "hub/snapshots/1").mkdir(parents=True)
    for name in ("s/f.py", "hub/snapshots/1/f.py", "f.py", "f.txt"):
        (folder / name).write_text("def f(prompt, answer, row): return 1\n")
    (folder / "link.py").symlink_to("s/f.py")
    assert run(folder / "s", "--by", "number", "--out", folder / "done") == 0
    assert run(folder / "s", "--function", f"{folder}/f.py:f", "--out", folder / "coded") == 0
    (folder / "f.py").write_text("def f(prompt, answer, row): return 2\n")
    return folder


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_is_refused_has_one_message(
    words: str, message: str, refusing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(refusing)
    assert run(*words.split()) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1, said
