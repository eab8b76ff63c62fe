"""Sampled answers: log p as the trainer has it, parts with the same bits after any kill, hostile servers."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import ASSETS
from test_convert import with_tokenizer
from test_generate import write_folder
from test_qwen3_5_files import TEXT
from test_qwen3_5_files import opened as opened_run
from test_qwen3_moe_files import SETTINGS
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from titan_mi100.attention.base import Documents
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.data import prompts as prompt_rows
from titan_mi100.data.samples import GroupStore, Sampled, check_sealed
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import UserError
from titan_mi100.generation.engine import Model, PromptBuilder
from titan_mi100.model.decode import Generated, Sampling, generate
from titan_mi100.model.loss import of_labels, token_losses
from titan_mi100.model.token_rows import rows_of
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.tools import sample, score
from titan_mi100.weights import peft as peft_io
from titan_mi100.workshop import answer_server as server

CPU = torch.device("cpu")
LORA = LoRAConfig(4, 6.0, 0.5)
LORAS = {
    "qwen3": dataclasses.replace(LORA, scaling="sqrt_rank", token_ids=(0, 7, 200, 702)),
    "qwen3_moe": dataclasses.replace(LORA, target_modules=(*LORA.target_modules, "experts"), expert_rank=2),
    "qwen3_5": LORA,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each family a model with ids that the tokenizer lacks, and an adapter that changes it."""
    folder, draw = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(5)
    torch.manual_seed(0)
    write_folder(folder / "qwen3")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SETTINGS)).save_pretrained(folder / "qwen3_moe")
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT)).save_pretrained(folder / "qwen3_5")
    found = {}
    for name, lora in LORAS.items():
        base, adapter = folder / name, folder / f"{name}-adapter"
        spec = read_hf_config(with_tokenizer(base))
        shapes = lora.shapes(spec)
        peft_io.write_adapter(adapter, {n: 0.2 * torch.randn(s, generator=draw) for n, s in shapes.items()}, lora, "")
        found[name] = base, adapter
    return found


def of_trainer(network: Any, prompts: list[list[int]], answers: list[Generated]) -> list[float]:
    """Log p of all sampled ids, by the trainer's loss on a row with all documents."""
    rows = [prompt + [token for token, _ in each.sampled] for prompt, each in zip(prompts, answers, strict=True)]
    lengths = tuple(map(len, rows))
    ids, positions = torch.tensor([[i for row in rows for i in row]]), torch.cat([*map(torch.arange, lengths)])[None]
    learned = torch.cat([torch.arange(n) >= len(p) for n, p in zip(lengths, prompts, strict=True)]).nonzero()[:, 0] - 1
    documents = network.model.prepare(Documents(1, sum(lengths), lengths), ids.device)
    table = network.lm_head or network.model.embed_tokens
    with torch.no_grad():
        hidden = network.model(ids, positions, documents)
        targets = of_labels(ids.roll(-1, 1), learned)
        return (-token_losses(hidden, table.weight, targets, rows=rows_of(table)).losses[:, 0]).tolist()


@pytest.mark.parametrize("has_adapter", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("family", LORAS)
def test_log_p_is_that_of_the_trainer(family: str, has_adapter: bool, folders: Any, world: World) -> None:
    (base, adapter), lora = folders[family], LORAS[family]
    model = Model(str(base), str(adapter) if has_adapter else "", "", CPU, torch.float32)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 700, (length,), generator=draw).tolist() for length in (70, 1, 13, 64)]
    stops, network = {*range(0, 700, 15)}, model.load(as_trained=True)
    sampling = Sampling(1.0, vocabulary=650, with_log_p=True)  # the head has 709 columns, which all count
    answers = generate(network, prompts, sampling, stops, [24, 24, 24, 3])
    assert any(each.stopped for each in answers)
    for each in answers:
        sampled = [token for token, _ in each.sampled]
        assert sampled[: len(each.ids)] == each.ids and len(sampled) == len(each.ids) + each.stopped
        assert max(sampled) < 650 and (not each.stopped or sampled[-1] in stops)
    tokens = tuple(model.tokenizer.decode([token]) for token in lora.token_ids)
    own = dataclasses.asdict(lora) | {"initial_load_path": str(adapter), "trainable_tokens": tokens, "token_ids": ()}
    split = {"lora": own} if has_adapter else {}
    trained = opened_run(base, world, **split).model.parts[0].eval()
    expected = of_trainer(trained, prompts, answers)
    found = [log_p for each in answers for _, log_p in each.sampled]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
    if has_adapter:  # in 16 bits, too: beside its base, as the trainer has it
        rounded = opened_run(base, world, param="bfloat16", **split).model.parts[0].eval()
        narrow, ids = Model(str(base), str(adapter), "", CPU, torch.bfloat16), torch.tensor([prompts[0]])
        with torch.no_grad():
            logits = rounded(ids)
            assert [torch.equal(narrow.load(beside)(ids), logits) for beside in (True, False)] == [True, False]


# --- the command ---


QUESTIONS = [f"{n} and {n * n}?" for n in range(8)]


@pytest.fixture
def words(folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a command that makes three parts."""
    monkeypatch.setattr("titan_mi100.data.samples.PART_PROMPTS", 3)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": f"#### {q}"}) + "\n" for q in QUESTIONS))
    return f"--model {folders['qwen3'][0]} --data {data} --k 3 --max_new_tokens 6".split()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def code_when_killed(calls: int, words: list[str]) -> int:
    """The exit code of a process that dies when it generates a further batch."""
    real, left = sample.generate, iter(range(calls))
    if (process := os.fork()) == 0:
        sample.generate = lambda *given, **more: os._exit(9) if next(left, None) is None else real(*given, **more)
        os._exit(sample.main(words))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_parts_have_the_same_bits_after_any_kill(words: list[str], tmp_path: Path, capfd: Any) -> None:
    whole, killed, shared = (tmp_path / name for name in ("whole", "killed", "shared"))
    words += ["--batch_size", "4", "--device", "cpu"]
    assert sample.main([*words, "--out", str(whole), "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert (summary["prompts"], summary["answers"]) == (8, 24) and len(files(whole)) == 4
    for calls in (2, 3, 0):  # inside the first part, after it, inside the second, between
        assert code_when_killed(calls, [*words, "--out", str(killed)]) == 9
        (killed / ".part-00001-x.jsonl.left").write_bytes(b"half")
    assert len(files(killed)) == 3
    assert sample.main([*words, "--out", str(killed)]) == 0 and files(killed) == files(whole)
    before = {path: path.stat().st_mtime_ns for path in killed.iterdir() if path.name != ".lock"}
    assert sample.main([*words, "--out", str(killed)]) == 0 and "was complete" in capfd.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "forked_pool", lambda count, *_, **__: ThreadPoolExecutor(count))
        assert sample.main([*words, "--out", str(shared), "--processes", "2"]) == 0 and files(shared) == files(whole)
    for changed, named in ((["--seed", "1"], "seed"), (["--dtype", "float64"], "dtype"), (["--limit", "5"], "count")):
        assert sample.main([*words, "--out", str(whole), *changed]) == 2
        assert f"was made with another {named}" in capfd.readouterr().err
    groups = [group for part in range(3) for group in GroupStore.open(whole, Sampled).read(part)]
    assert [group.row["question"] for group in groups] == QUESTIONS and groups[4].where == "data.jsonl:5"
    assert len({tuple(answer.ids) for group in groups for answer in group.answers}) > 20


@pytest.mark.full
def test_processes_make_the_same_bits(folders: Any, tmp_path: Path) -> None:
    words = ["--model", str(folders["qwen3_5"][0]), "--data", str(ASSETS / "arithmetic.jsonl"), "--limit", "80"]
    for count in ("1", "2"):
        more = ["--device", "cpu", "--max_new_tokens", "9", "--processes", count, "--out", str(tmp_path / count)]
        assert sample.main([*words, *more]) == 0
    assert files(tmp_path / "1") == files(tmp_path / "2") and len(files(tmp_path / "1")) == 4


def test_a_prompt_is_what_stands_before_the_answer(folders: Any, tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    system = {"role": "system", "content": "s"}
    rows = {  # a row -> what `generate` would be asked
        json.dumps(row): asked
        for row, asked in (
            ({"question": "a", "answer": "4", "solution": "2 + 2"}, [user]),
            ({"prompt": "a", "gold": 4, "label": True}, [user]),
            ({"prompt": [system, user], "solution": "b"}, [system, user]),
            ({"prompt": "a", "completion": [said, user, said]}, [user, said, user]),
            ({"messages": [system, user, said]}, [system, user]),
            ({"messages": [user, said, user]}, [user, said, user]),
            ({"messages": [user, said, user, said], "system": "s"}, [system, user, said, user]),
            ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [user]),
            ({"conversations": [{"from": "human", "value": "a"}]}, [user]),
            ({"instruction": "a", "input": "", "output": "b", "system": "s"}, [system, user]),
            ({"input": "a", "output": "b"}, [user]),
            ({"prompt": "a", "chosen": "b", "rejected": "c"}, [user]),
        )
    }
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{row}\n" for row in rows))
    out, base = tmp_path / "out", str(folders["qwen3"][0])
    few = ["--k", "1", "--max_new_tokens", "1", "--device", "cpu"]
    assert sample.main(["--model", base, "--data", str(data), "--out", str(out), *few]) == 0
    build = PromptBuilder(Model(base, "", "", CPU, torch.float32), None, None)
    for group, (row, asked) in zip(GroupStore.open(out, Sampled).read(0), rows.items(), strict=True):
        prompt, tools = prompt_rows.asked_of({"messages": asked})
        assert group.row == json.loads(row) and group.prompt_ids == build("x", prompt, tools).ids, row
    wrong: list[Any] = [{"answer": "4"}, {"prompt": "a", "question": "a"}, {"messages": "x"}, {"prompt": 4}]
    wrong += [{"text": "a"}, *({"messages": given} for given in ([said], [user, said, said], [system]))]
    wrong += [{"question": " ", "answer": "4"}]
    for row in [*wrong, {"prompt": [user, said]}]:
        with pytest.raises(BadRecord):
            prompt_rows.asked_of(row)


# --- servers ---


Behave = Callable[[Any, dict[str, Any]], None]


class Stub(ThreadingHTTPServer):
    """A server that behaves as it is told; it keeps what it was asked."""

    daemon_threads = True
    behave: Behave

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sent, self.url = 0, f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Print nothing where a client went away: the words would land in the middle of its message."""


class Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # see hub_server.py
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.server.behave(self, body)

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, content: Any, status: int = 200, length: int = -1, **headers: str) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(length if length >= 0 else len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def answer(kind: str, ids: Any = (10, 11, 700), log_p: Any = (-0.5, -1.25, -0.125), end: str = "stop") -> Any:
    """As these servers' own, without what is not read."""
    ids, log_p = list(ids), list(log_p)
    if kind == "llamacpp":
        pairs = zip(ids, log_p, strict=True)
        tokens = [{"id": i, "token": "x", "bytes": [120], "logprob": x, "top_logprobs": []} for i, x in pairs]
        stop_type = {"stop": "eos", "length": "limit"}.get(end, end)
        return {"content": "x", "tokens": ids, "model": "m", "stop_type": stop_type, "completion_probabilities": tokens}
    logprobs = {"text_offset": [0], "token_logprobs": log_p, "tokens": ["x"], "top_logprobs": [{"x": -0.5}]}
    choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": end, "token_ids": ids}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": {}}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(server, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Stub() as found:
        Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


@pytest.mark.parametrize("kind", server.KINDS)
def test_answers_of_a_server_are_kept_as_they_are(kind: str, stub: Stub, words: list[str], tmp_path: Path) -> None:
    stub.behave = lambda handler, body: handler.send(answer(kind))
    asked = f"--server {stub.url}/v1/ --served_model m --server_kind {kind} --out {tmp_path}/out".split()
    assert sample.main([*words, *asked]) == 0
    [first, *_] = groups = [g for part in range(3) for g in GroupStore.open(tmp_path / "out", Sampled).read(part)]
    assert [a.ids for g in groups for a in g.answers] == [[10, 11, 700]] * 24
    assert first.answers[0].log_p == [-0.5, -1.25, -0.125] and first.answers[0].text == "+," and len(stub.asked) == 24
    paths, bodies = zip(*stub.asked, strict=True)
    assert {*paths} == {"/completion" if kind == "llamacpp" else "/v1/completions"}
    assert len({body["seed"] for body in bodies}) == 24
    expected = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": {"sglang": -1}.get(kind, 0), "model": "m"}
    expected |= {"stream": False, "stop_token_ids": [700, 702]}
    openai = {"n": 1, "max_tokens": 6, "repetition_penalty": 1.0, "return_token_ids": True, "logprobs": 1}
    expected |= {"n_predict": 6, "repeat_penalty": 1.0, "return_tokens": True} if kind == "llamacpp" else openai
    assert all(expected.items() <= body.items() for body in bodies)
    assert [body["prompt"] for body in bodies if body["prompt"] == first.prompt_ids] == [first.prompt_ids] * 3


def drip(handler: Any, *_: Any) -> None:
    handler.send(b"", length=100)
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.02)


def flood(handler: Any, *_: Any) -> None:
    handler.send(b"", length=10 << 30)
    while True:
        handler.server.sent += handler.wfile.write(bytes(1 << 16))


def of_vllm(**changes: Any) -> Behave:
    return lambda handler, _: handler.send(answer("vllm", **changes))


def changed(**fields: Any) -> Behave:
    whole = answer("vllm")
    return lambda handler, _: handler.send({**whole, "choices": [{**whole["choices"][0], **fields}]})


HOSTILE: dict[str, tuple[str, Behave]] = {
    "text only": ("a text is not encoded again", changed(token_ids=None)),
    "no stop token": ('finish is "stop", but the last id, 12, is no stop token', of_vllm(ids=(10, 11, 12))),
    "stop token, cut": ('finish is "length", but the last id, 700, is a stop token', of_vllm(end="length")),
    "goes on": ("goes on after a stop token", of_vllm(ids=(10, 702, 700))),
    "too long": ("7 ids; --max_new_tokens is 6", of_vllm(ids=[10] * 7, log_p=[-1.0] * 7, end="length")),
    "short": ("cut off after 3 of 6 ids", of_vllm(ids=(10, 11, 12), end="length")),
    "unknown id": ("the id 709; the tokenizer has", of_vllm(ids=(10, 709, 700))),
    "no log p": ("expected one choice", changed(logprobs=None)),
    "NaN": ("not a number: NaN", of_vllm(log_p=(-1.0, float("nan"), -1.0))),
    "above 0": ("expected a finite number up to 0", of_vllm(log_p=(-1.0, 0.5, -1.0))),
    "very low": ("a log p is below -10,000", of_vllm(log_p=(-1.0, -3.4e38, -1.0))),
    "one log p less": ("2 log p for 3 ids", of_vllm(log_p=(-1.0, -1.0))),
    "two choices": ("expected one choice", lambda h, _: h.send({"choices": answer("vllm")["choices"] * 2})),
    "not JSON": ("not JSON", lambda h, _: h.send(b"<html>")),
    "twice": ("more text after the value", lambda h, _: h.send(json.dumps(answer("vllm")).encode() * 2)),
    "another model": ("it is of 'x'; correct --served_model", lambda h, _: h.send({**answer("vllm"), "model": "x"})),
    "HTTP 400": ("HTTP 400: no \\x1b[31mway", lambda h, _: h.send(b"no \x1b[31mway", 400)),
    "HTTP 500": ("HTTP 500", lambda h, _: h.send(b"", 500)),
    "redirect": ("HTTP 302", lambda h, _: h.send(b"", 302, Location="http://127.0.0.1:9/")),
    "busy": ("HTTP 503: later; when that is corrected, start again: it goes on", lambda h, _: h.send(b"later", 503)),
    "cut off": ("the answer was cut off; when", lambda h, _: h.send(b"{", length=100)),
    "slow": ("no whole answer in 0.3 s; with another --server_timeout", drip),
    "10 GB": ("too large: more than 1,073,152 bytes", flood),
}  # fmt: skip


def test_a_hostile_server_gives_one_message_and_leaves_whole_parts(
    stub: Stub, words: list[str], tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out"
    asked = ["--server", stub.url, "--served_model", "m", "--out", str(out), "--server_timeout", "0.3"]
    stub.behave = lambda handler, body: (of_vllm() if len(stub.asked) <= 9 else HOSTILE["HTTP 500"][1])(handler, body)
    assert sample.main([*words, *asked[:-2], "--concurrency", "1"]) == 2
    kept = files(out)
    assert len(kept) == 2
    capfd.readouterr()
    for name, (expected, behave) in HOSTILE.items():
        stub.behave = behave
        timely = asked if name == "slow" else asked[:-2]  # the others fail in their own way, however long it takes
        assert sample.main([*words, *timely, "--concurrency", "2"]) == 2, name
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ERROR")]
        assert len(lines) == 1 and lines[0].startswith(f"ERROR {stub.url}: ") and expected in lines[0], (name, lines)
        assert files(out) == kept, name
    assert stub.sent < 1 << 25
    busy = iter([True, True, False] * 99)  # later it answers
    stub.behave = lambda handler, body: (HOSTILE["busy"][1] if next(busy) else of_vllm())(handler, body)
    assert sample.main([*words, *asked[:-2], "--concurrency", "1"]) == 0 and kept.items() < files(out).items()
    for url in ("localhost:1", "ftp://x", "http://", "http://a:x", "http://u:p@h", "http://h?x=1", "http://["):
        assert sample.main([*words, *asked[2:], "--server", url]) == 2 and "expected http" in capfd.readouterr().err


def test_greedy_answers_become_rows_and_are_no_samples(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, rows = tmp_path / "greedy", tmp_path / "rows.jsonl"
    greedy = [word if word != "3" else "1" for word in words]
    assert sample.main([*words, "--greedy", "--out", str(store)]) == 2 and "--k 1" in capfd.readouterr().err
    assert sample.main([*greedy, "--greedy", "--out", str(store)]) == 0
    assert score.main([str(store), "--keep", "all", "--to", str(rows)]) == 0
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    parts = GroupStore.open(store, Sampled)
    groups = [group for part in range(parts.count) for group in parts.read(part)]
    assert [row["input_ids"] for row in made] == [[*group.prompt_ids, *group.answers[0].ids] for group in groups]
    assert [sum(label >= 0 for label in row["labels"]) for row in made] == [len(g.answers[0].ids) for g in groups]
    assert score.main([str(store), "--keep", "all", "--by", "number", "--to", str(rows)]) == 2
    with pytest.raises(UserError, match="--greedy, so it has no samples"):
        check_sealed(next(store.glob("*.jsonl")), by_teacher=True)
