"""Acceptance of drafts: the figure of one forward against servers' loops that draft and verify token by token."""

import copy
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ASSETS
from lifted import lifting
from safetensors.torch import load_file, save_file
from test_convert import with_tokenizer
from test_draft_head import KINDS, Reference
from test_generate import write_folder
from test_qwen3_5 import HEADS
from test_qwen3_moe import Tensors
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from titan_mi100.attention.backends import make_backend
from titan_mi100.config.load import load_config
from titan_mi100.generation.batch import read_rows
from titan_mi100.generation.engine import Model, PromptBuilder
from titan_mi100.log import log
from titan_mi100.model import acceptance as of_drafts
from titan_mi100.model.acceptance import DraftMeter, rates
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.families import MODELS
from titan_mi100.open_run.summary import log_summary
from titan_mi100.parallel.distributed import fill_parameters
from titan_mi100.run.progress import Progress
from titan_mi100.shapes.base import DRAFT
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3_5 import FULL, LINEAR, Qwen3_5Spec
from titan_mi100.tools import acceptance
from titan_mi100.weights.pieces import joined, read_pieces

SMALL = Qwen3_5Spec(48, 64, 96, 3, 4, 2, 2, 4, False, (LINEAR, FULL, FULL), **HEADS)


def made(kind: str, spec: Qwen3_5Spec | None = None) -> tuple[Any, Reference]:
    """transformers' model, and a head of transformers' parts, with random weights."""
    of_kind, make, module, prefix = KINDS[kind]
    hf = make(spec or of_kind).requires_grad_(False)
    return hf, Reference(hf, module, prefix).requires_grad_(False)


def ours(spec: Qwen3_5Spec, hf: Any, head: Reference, backend: str = "sdpa") -> Any:
    """Our model with their weights, in fp64."""
    spec = replace(spec, has_draft_head=True)
    model = MODELS[spec.model_type](spec, make_backend(backend, "cpu")).double().requires_grad_(False)
    stored = {**hf.state_dict(), **{DRAFT + name: tensor for name, tensor in head.state_dict().items()}}
    fill_parameters(model.named_parameters(), read_pieces(spec, joined(Tensors(stored), spec).read))
    return model


def agreeing(noise: float, spec: Qwen3_5Spec = SMALL) -> tuple[Any, Reference]:
    """A model and a head that both look the next token up by the newest one. Their layers, and for the head the hidden
    state, disturb it: the more noise, the fewer drafts hold.
    """
    hf, head = made("untied", spec)
    draw = torch.Generator().manual_seed(9)
    for name, parameter in [*hf.named_parameters(), *head.named_parameters()]:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            parameter.mul_(4)
    table, size = hf.model.embed_tokens.weight, spec.hidden_size
    table.normal_(0, 1, generator=draw)
    hf.lm_head.weight[torch.randperm(spec.vocab_size, generator=draw)] = table.clone()
    head.fc.weight.copy_(torch.cat((torch.eye(size), torch.empty(size, size).normal_(0, noise, generator=draw)), dim=1))
    return hf, head


def head_output(hf: Any, head: Reference, hidden: Tensor, embedded: Tensor) -> Tensor:
    """The head's output after its norm, (batch, n, hidden), of plain causal attention over all inputs."""
    x = head.fc(torch.cat((head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)), dim=-1))
    positions = torch.arange(x.shape[1])[None]
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    tables = hf.model.rotary_emb(x, positions[None].expand(3, 1, -1))
    return head.norm(head.layers[0](x, position_embeddings=tables, attention_mask=mask, position_ids=positions))


def chained(hf: Any, head: Reference, text: list[int], drafts: Sequence[int]) -> Tensor:
    """The head's logits, (V,), after drafts behind a text whose last token the trunk has chosen."""
    ids = torch.tensor([text])
    hidden, embedded = hf.model(ids).last_hidden_state[:, :-1], hf.model.embed_tokens(ids[:, 1:])
    for draft in drafts:
        hidden = torch.cat((hidden, head_output(hf, head, hidden, embedded)[:, -1:]), dim=1)
        embedded = torch.cat((embedded, hf.model.embed_tokens(torch.tensor([[draft]]))), dim=1)
    return hf.lm_head(head_output(hf, head, hidden, embedded)[0, -1])  # type: ignore[no-any-return]


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """On the right, where causal models do not see it."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)


def served(
    hf: Any, head: Reference, prompts: Sequence[list[int]], k: int, new: int
) -> tuple[list[list[int]], list[list[tuple[list[int], int]]]]:
    """A server's loop over prompts: k drafts, verified by the trunk, and one token of its own. Each step computes all
    texts again from their beginning.

    Returns:
        The new tokens of each prompt; and of each step whose drafts are all of `new` tokens: the drafts, and how many
        were accepted.
    """
    every = range(len(prompts))
    best = hf(padded(prompts)).logits.argmax(-1)
    texts = [[*prompt, int(best[i, len(prompt) - 1])] for i, prompt in enumerate(prompts)]
    steps: list[list[tuple[list[int], int]]] = [[] for _ in prompts]
    while goes_on := [i for i in every if len(texts[i]) - len(prompts[i]) + k <= new]:
        own = [texts[i] for i in goes_on]
        ids = padded(own)
        hidden, embedded = hf.model(ids).last_hidden_state, hf.model.embed_tokens(ids.roll(-1, 1))
        hidden, embedded = (torch.cat((x, torch.zeros_like(x[:, :k])), dim=1) for x in (hidden, embedded))
        drafts: list[list[int]] = [[] for _ in own]
        rows = torch.arange(len(own))
        for number in range(k):
            places = torch.tensor([len(text) - 2 + number for text in own])
            outputs = head_output(hf, head, hidden, embedded)[rows, places]
            tokens = hf.lm_head(outputs).argmax(-1)
            hidden[rows, places + 1], embedded[rows, places + 1] = outputs, hf.model.embed_tokens(tokens)
            for draft, token in zip(drafts, tokens.tolist(), strict=True):
                draft.append(token)
        best = hf(padded([text + draft for text, draft in zip(own, drafts, strict=True)])).logits.argmax(-1)
        for row, (i, draft) in enumerate(zip(goes_on, drafts, strict=True)):
            said = best[row, len(texts[i]) - 1 :].tolist()
            count = next((number for number in range(k) if draft[number] != said[number]), k)
            texts[i] += said[: count + 1]
            steps[i].append((draft, count))
    return [text[len(prompt) : len(prompt) + new] for text, prompt in zip(texts, prompts, strict=True)], steps


def measured(model: Any, k: int, sampling: Sampling, prompt: list[int], answer: list[int]) -> Tensor:
    ids = torch.tensor(prompt + answer)
    return DraftMeter(model, k, sampling)(ids, torch.arange(len(ids)) >= len(prompt))


def counts_of(steps: Sequence[tuple[list[int], int]], k: int) -> list[int]:
    return [sum(count >= least for _, count in steps) for least in range(k + 1)]


def prompts_of(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(0, SMALL.vocab_size, (1 + i % 9,), generator=draw).tolist() for i in range(count)]


@pytest.fixture(scope="module", params=[0.1, pytest.param(0.3, marks=pytest.mark.full)])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Reference]:
    return agreeing(request.param)


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_one_forward_gives_what_a_server_counts(pair: tuple[Any, Reference], k: int, full: bool) -> None:
    """In fp32, as the command computes, against a loop in fp64."""
    hf, head = pair
    model, prompts, new = ours(SMALL, hf, head).float(), prompts_of(200 if full or k == 3 else 40), 16
    with lifting(modeling_qwen3_5, "Qwen3_5TextRotaryEmbedding"):
        texts, steps = served(hf, head, prompts, k, new)
    answers = generate(model, prompts, Sampling(with_log_p=True), (), new)
    ties, sums = 0, []
    for prompt, text, own, answer in zip(prompts, texts, steps, answers, strict=True):
        found = measured(model, k, Sampling(), prompt, [token for token, _ in answer.sampled])
        sums.append(found)
        if found[-1] or answer.ids[: len(text)] != text:
            ties += 1
            continue
        assert found[:-1].tolist() == counts_of(own, k)
    assert ties <= len(prompts) / 50
    every = counts_of([step for own in steps for step in own], k)
    assert all(0.25 < above / below < 0.75 for below, above in pairwise(every))  # a figure that could be otherwise
    length, *positions = rates(torch.stack(sums))
    expected = [sum(every) / every[0], *(above / below for below, above in pairwise(every))]
    assert [rate["value"] for rate in (length, *positions)] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(("kind", "backend"), [("tied", "sdpa"), ("untied", "chunked"), ("experts", "eager")])
@torch.no_grad()
def test_every_draft_of_a_chain_has_the_logits_of_a_computation_from_the_beginning(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec, _, module, prefix), temperature = KINDS[kind], 2.0
    hf, head = made(kind)
    text = torch.randint(0, 200, (13,), generator=torch.Generator().manual_seed(8)).tolist()
    expected = torch.zeros(4, dtype=torch.float64)
    with lifting(module, f"{prefix}TextRotaryEmbedding"):
        p = (hf(torch.tensor([text])).logits[0] / temperature).softmax(-1)
        for slot in range(4, len(text) - 4):  # of a prompt of five tokens
            weight, row = 1.0, [1.0]
            for number in range(3):
                drafts = text[slot + 2 : slot + 2 + number]
                q = (chained(hf, head, text[: slot + 2], drafts) / temperature).softmax(-1)
                of_trunk, token = p[slot + 1 + number], text[slot + 2 + number]
                row.append(weight * float(torch.minimum(of_trunk, q).sum()))
                weight *= min(1.0, float(q[token] / of_trunk[token]))
            expected += torch.tensor(row, dtype=torch.float64)
    model = ours(spec, hf, head, backend)
    monkeypatch.setattr(of_drafts, "step_starts", lambda before: torch.ones(len(before), dtype=torch.float64))
    for _ in range(2):  # nothing is left of the call before; slots one by one are as together
        found = measured(model, 3, Sampling(temperature), text[:5], text[5:])
        assert found[0] == 5 and found[-1] == 0
        assert (found[:-1] - expected).abs().max() < 1e-10
        monkeypatch.setattr(of_drafts, "VALUES_AT_ONCE", 1)


@torch.no_grad()
def test_drawn_texts_give_the_expectation_of_every_course_of_a_server() -> None:
    """All texts of three tokens of a vocabulary, weighted, against all drafts, acceptances and corrections."""
    spec, temperature, k, new = replace(SMALL, vocab_size=3), 0.5, 2, 5
    hf, head = made("untied", spec)
    prompt, vocabulary = [0, 2, 1, 1], range(3)

    @cache
    def p(text: tuple[int, ...]) -> list[float]:
        return (hf(torch.tensor([text])).logits[0, -1] / temperature).softmax(-1).tolist()  # type: ignore[no-any-return]

    @cache
    def q(text: tuple[int, ...], drafts: tuple[int, ...]) -> list[float]:
        return (chained(hf, head, [*text], drafts) / temperature).softmax(-1).tolist()  # type: ignore[no-any-return]

    @cache
    def expected(text: tuple[int, ...]) -> Tensor:
        """Steps, and those with one and two accepted drafts, from here on."""
        if len(text) - len(prompt) + k > new:
            return torch.zeros(k + 1, dtype=torch.float64)
        return torch.tensor([1.0, 0, 0], dtype=torch.float64) + drafting(text, ())

    @cache
    def drafting(text: tuple[int, ...], drafts: tuple[int, ...]) -> Tensor:
        """The same, after these drafts were accepted."""
        trunk = p(text + drafts)
        if len(drafts) == k:
            return sum(share * expected((*text, *drafts, token)) for token, share in enumerate(trunk))  # type: ignore[return-value]
        drafted, total = q(text, drafts), torch.zeros(k + 1, dtype=torch.float64)
        left = [max(0.0, a - b) for a, b in zip(trunk, drafted, strict=True)]
        for token in vocabulary:
            accepted = drafted[token] * min(1.0, trunk[token] / drafted[token])
            held = torch.tensor([0.0, len(drafts) == 0, len(drafts) == 1], dtype=torch.float64)
            total += accepted * (held + drafting(text, (*drafts, token)))
            rejected = drafted[token] - accepted
            for other in vocabulary if rejected > 0 else ():
                total += rejected * left[other] / sum(left) * expected((*text, *drafts, other))
        return total

    with lifting(modeling_qwen3_5, "Qwen3_5TextRotaryEmbedding"):
        wanted = sum(share * expected((*prompt, token)) for token, share in enumerate(p(tuple(prompt))))
        found, model = torch.zeros(k + 2, dtype=torch.float64), ours(spec, hf, head)
        for answer in product(vocabulary, repeat=new):
            chances = (p((*prompt, *answer[:number]))[token] for number, token in enumerate(answer))
            found += math.prod(chances) * measured(model, k, Sampling(temperature), prompt, [*answer])
    assert isinstance(wanted, Tensor) and 0.2 < wanted[1] / wanted[0] < 0.9 and 1.2 < wanted[0] < 3
    assert (found[:-1] - wanted).abs().max() < 1e-8


@torch.no_grad()
def test_steps_that_a_near_tie_decides_are_counted_and_left_out(pair: tuple[Any, Reference]) -> None:
    hf, head = copy.deepcopy(pair)
    prompts, new = prompts_of(30), 16
    twin, other = 7, 39
    hf.lm_head.weight[other] = hf.lm_head.weight[twin]
    texts, steps = served(hf, head, prompts, 1, new)
    model, ties = ours(SMALL, hf, head), 0
    for prompt, text, own in zip(prompts, texts, steps, strict=True):
        found, place, near = measured(model, 1, Sampling(), prompt, text), 1, 0
        for draft, count in own:
            near += bool({draft[0], text[place]} & {twin, other})
            place += count + 1
        assert found[-1] == near and found[0] == len(own) - near
        ties += near
    assert ties > 5


def test_rates_have_the_error_of_a_ratio_over_texts() -> None:
    sums = torch.tensor([[10.0, 6, 3, 1], [20, 8, 5, 0], [0, 0, 0, 0], [12, 9, 9, 0]], dtype=torch.float64)
    length, first, second = rates(sums)
    assert [rate["n"] for rate in (length, first, second)] == [42, 42, 23]
    expected = [1 + 23 / 42 + 17 / 42, 23 / 42, 17 / 23]
    assert [rate["value"] for rate in (length, first, second)] == pytest.approx(expected)
    assert rates(sums[:1])[1] == {"value": 0.6, "error": None, "n": 10}
    assert rates(sums[2:3])[0] == {"value": None, "error": None, "n": 0}
    # texts of which some are easy and some are hard, drawn again and again
    draw = np.random.default_rng(1)
    steps = draw.integers(5, 15, (2000, 60))
    held = draw.binomial(steps, draw.choice([0.2, 0.9], steps.shape))
    spread = np.std(held.sum(1) / steps.sum(1))
    of_some = [
        rates(torch.tensor(np.stack((*pair, 0 * pair[0]), 1)).double())[1] for pair in zip(steps, held, strict=True)
    ]
    assert np.mean([rate["error"] for rate in of_some]) == pytest.approx(spread, rel=0.05)


# --- the command ---

READ = replace(SMALL, vocab_size=709)  # the tokenizer's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder with a draft head, whose drafts hold now and then."""
    return written(with_tokenizer(tmp_path_factory.mktemp("hf")), *agreeing(0.1, READ))


def written(path: Path, hf: Any, head: Reference) -> Path:
    tensors = {**hf.state_dict(), **{DRAFT + name: tensor for name, tensor in head.state_dict().items()}}
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(to_hf_config(READ) | {"mtp_num_hidden_layers": 1}))
    return path


Told = Callable[..., Any]


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Told:
    """What the command prints as JSON."""

    def run(*arguments: object, data: Path = ASSETS / "arithmetic.jsonl") -> Any:
        options = ["--data", data, "--device", "cpu", "--limit", 9, "--max_new_tokens", 14, "--json", *arguments]
        assert acceptance.main(list(map(str, options))) == 0
        return json.loads(capfd.readouterr().out)

    return run


def test_the_command_measures_a_folder_as_a_server_would(
    folder: Path, told: Told, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Model(str(folder), "", "", torch.device("cpu"), torch.float32)
    build, asked = PromptBuilder(model, None, None), read_rows(str(ASSETS / "arithmetic.jsonl"), lambda row: row)[:9]
    prompts = [build(where, row["question"]).ids for where, row in asked]
    with torch.no_grad(), lifting(modeling_qwen3_5, "Qwen3_5TextRotaryEmbedding"):
        texts, steps = served(*agreeing(0.1, READ), prompts, 2, 14)
    kept, tokens = list[tuple[list[int], int]](), 0
    for text, own in zip(texts, steps, strict=True):
        place, most = 1, next((number for number, token in enumerate(text, 1) if token in model.stop_ids), 14)
        for step in own:
            kept += [step] * (place + 2 <= most)
            place += step[1] + 1
        tokens += most
    every = counts_of(kept, 2)
    found = told("--model", folder, "--k", 2)
    assert found["near_ties"] == 0 and found["texts"] == 9 and tokens < 9 * 14
    assert [rate["n"] for rate in (found["length"], *found["positions"])] == [every[0], *every[:2]]
    assert found["length"]["value"] == pytest.approx(sum(every) / every[0]) and found["length"]["error"] > 0
    assert [rate["value"] for rate in found["positions"]] == pytest.approx([b / a for a, b in pairwise(every)])
    assert told("--model", folder, "--k", 2, "--batch_size", 1) == found
    data = str(ASSETS / "arithmetic.jsonl")
    assert acceptance.main(["--model", str(folder), "--data", data, "--limit", "9", "--max_new_tokens", "14"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("9 texts, written by the model, greedily")
    assert [line.split()[0] for line in lines[1:]] == ["tokens", "draft", "draft", "draft", "left"]


def test_drawn_texts_are_drawn_from_the_seed(folder: Path, told: Told) -> None:
    drawn, again, other = (told("--model", folder, "--temperature", 0.8, "--seed", seed) for seed in (1, 1, 2))
    assert drawn == again != other and drawn["near_ties"] == 0
    assert drawn["length"]["value"] == pytest.approx(
        1 + sum(math.prod(rate["value"] for rate in drawn["positions"][:number]) for number in (1, 2, 3))
    )


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, ["--k", "4"], "--k 4: must be 1 to 3"),
        (None, ["--k", "0"], "--k 0: must be 1 to 3"),
        (None, ["--temperature", "-1"], "temperature = -1.0 must be 0 (greedy) or at least 1e-6"),
        (None, ["--temperature", "nan"], "temperature = nan must be 0 (greedy)"),
        (None, ["--max_new_tokens", "3"], "--max_new_tokens 3: must be more than --k 3"),
        (None, ["--limit", "-1"], "--limit -1: must be 0 (all) or more"),
        (None, ["--batch_size", "0"], "batch_size = 0 must be at least 1"),
        (None, ["--dtype", "bfloat16"], "unrecognized arguments: --dtype bfloat16"),
        (
            "tensors",
            [],
            'has no draft head (mtp.*); take a Qwen3.5 that has it, or train one: draft_head.train = "after"',
        ),
        ("some", [], "missing: mtp.norm.weight"),
        (
            {"mtp_num_hidden_layers": 2},
            [],
            "mtp_num_hidden_layers = 2: only draft heads of one layer are supported; take another model",
        ),
        ({"mtp_use_dedicated_embeddings": True}, [], "mtp_use_dedicated_embeddings = true: only heads that use"),
        ("family", [], "has no draft head (mtp.*); take a Qwen3.5 that has it, or train one"),
    ],
)
def test_refusals(
    change: Any, options: list[str], message: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    model = shutil.copytree(folder, tmp_path / "model")
    if change in ("tensors", "some"):
        gone = DRAFT if change == "tensors" else "mtp.norm."
        kept = {
            name: each for name, each in load_file(model / "model.safetensors").items() if not name.startswith(gone)
        }
        save_file(kept, model / "model.safetensors")
    elif change == "family":
        write_folder(model)
    elif change:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | change))
    data = [] if "--data" in options else ["--data", str(ASSETS / "arithmetic.jsonl")]
    assert acceptance.main(["--model", str(model), *data, *options]) == 2
    assert message in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("of_lora", [False, True])
def test_a_run_says_that_it_left_the_head_behind(
    of_lora: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = ["--lora.rank", "4"] * of_lora
    files = ["--checkpoint.initial_load_path", str(folder), "--data.path", str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text("{}")
    config = load_config([*files, *lora], 1)
    carried = {} if of_lora else {"mtp.fc.weight": torch.zeros(1)}
    logged: list[str] = []
    monkeypatch.setattr(log, "info", logged.append)
    for draft, says in (("no", True), ("along", False)):
        logged.clear()
        data = SimpleNamespace(facts=SimpleNamespace(files=[str(tmp_path / "rows.jsonl")]))
        model = SimpleNamespace(passed_through=carried, draft=draft)
        about = {"folder": tmp_path, "config": config, "progress": Progress(5), "measured": {}}
        log_summary(SimpleNamespace(**about, model=model, data=data), 5)  # type: ignore[arg-type]
        lines = [line for line in logged if "the draft head (mtp.*) was not trained" in line]
        named = f"--model {folder} --adapter {tmp_path}" if of_lora else f"--model {tmp_path}"
        ends = f"titan-mi100 evaluate acceptance {named}/checkpoint/step-5 --data PROMPTS.jsonl --limit 64"
        assert [line.endswith(ends) for line in lines] == [True] * says
