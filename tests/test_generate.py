"""Generation against transformers' own, and the command as its users meet it."""

import io
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ASSETS
from safetensors.torch import load_file, save_file
from test_model import ours
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from titan_mi100.attention import torch_backends
from titan_mi100.data.prompts import asked_of
from titan_mi100.errors import UserError
from titan_mi100.generation import engine as inference
from titan_mi100.generation.batch import read_rows
from titan_mi100.model import decode
from titan_mi100.model.decode import Cache, Generated, Sampling, check_lengths
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.tools import exact_match, generate
from titan_mi100.weights import convert
from titan_mi100.weights.source import open_source
from titan_mi100.wording import printable

SPECS = {
    "tied": Qwen3Spec(720, 64, 96, 3, 4, 2, 16, True, rope_theta=1e4, max_position_embeddings=512),
    "untied": Qwen3Spec(720, 48, 80, 2, 6, 1, 8, False, rope_theta=1e6, max_position_embeddings=512),
    "files": Qwen3Spec(709, 64, 96, 3, 4, 2, 16, True, rope_theta=1e4, max_position_embeddings=512),  # the tokenizer's
}
LENGTHS = [1, 2, 5, 13, 34, 55, 8, 21, 3, 89, 144, 7, 1, 30, 64, 11, 17, 100, 4, 42]


def reference(spec: ModelSpec) -> Qwen3ForCausalLM:
    """transformers' model with weights so large that what it says varies."""
    settings = {k: v for k, v in to_hf_config(spec).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**settings, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim == 2 else parameter.uniform_(0.5, 1.5)
    return model


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 720, (length,), generator=generator).tolist() for length in lengths]


def said_by_transformers(
    hf: Qwen3ForCausalLM, prompt: list[int], new: int, stop: int | list[int] | None = None
) -> list[int]:
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "eos_token_id": stop}
    return hf.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def write_folder(path: Path) -> Path:
    """An HF folder as transformers writes it, with the debug tokenizer."""
    reference(SPECS["files"]).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tokenizer" / name, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf"))


# --- the library ---


@pytest.mark.parametrize(("count", "new"), [(8, 32), pytest.param(20, 64, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [pytest.param("tied", marks=pytest.mark.full), "untied"])
def test_greedy_is_transformers_token_for_token_alone_and_in_a_batch(name: str, count: int, new: int) -> None:
    hf = reference(SPECS[name])
    model = ours(SPECS[name], hf, "sdpa")
    prompts = random_prompts(LENGTHS[:count])
    expected = [Generated(said_by_transformers(hf, prompt, new), False) for prompt in prompts]
    assert sum(len(set(said.ids)) for said in expected) > count * 10, "what the model says varies"
    assert decode.generate(model, prompts, Sampling(), (), new) == expected
    assert [decode.generate(model, [prompt], Sampling(), (), new)[0] for prompt in prompts] == expected
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.merge()
    assert decode.generate(model, prompts, Sampling(), (), new) == expected
    for (now, parameter), (then, value) in zip(model.named_parameters(), before.items(), strict=True):
        assert now == then and torch.equal(parameter, value)
    for block in model.model.blocks():
        block.self_attn.q_proj.weight.data.zero_()  # views: nothing is held twice
        assert block.self_attn.merged is not None and not block.self_attn.merged[: block.self_attn.head_dim].any()


@pytest.mark.parametrize(
    ("dtype", "bar", "backend"),
    [(torch.float32, 1e-5, "eager"), (torch.float32, 1e-5, "chunked"), (torch.float32, 1e-5, "sdpa"),
     (torch.float64, 1e-12, "chunked"), (torch.float64, 1e-12, "sdpa")],
)  # fmt: skip
@torch.no_grad()
def test_cached_logits_are_those_of_an_uncached_forward(dtype: torch.dtype, bar: float, backend: str) -> None:
    for spec in (SPECS["tied"], SPECS["untied"]):
        hf = reference(spec)
        for parameter in hf.parameters():
            parameter.mul_(0.5)  # logits of about 1, where an absolute bar means something
        model = ours(spec, hf, backend).to(dtype)
        rows = random_prompts([31, 12, 20])
        prompts = [row[:-10] for row in rows]
        cache = Cache(model, prompts, 10)
        logits = [decode.forward(model, cache.prompts, cache)]
        for place in range(-10, 0):
            logits.append(decode.forward(model, torch.tensor([[row[place]] for row in rows]), cache))
        for number, row in enumerate(rows):
            whole = model(torch.tensor([row]))[0, -11:]
            torch.testing.assert_close(torch.stack(logits)[:, number], whole, atol=bar, rtol=0)


def test_the_head_runs_on_one_token_per_row_and_keys_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, seen, read = SPECS["tied"], [], []
    model = ours(spec, reference(spec), "sdpa")
    head, sdpa = Qwen3.head, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(Qwen3, "head", lambda *a: seen.append(tuple(a[1].shape)) or head(*a))
    prompts = random_prompts([9, 4])
    cache = Cache(model, prompts, 2)
    decode.forward(model, cache.prompts, cache)

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> torch.Tensor:
        read.extend((tensor.shape[1], tensor.untyped_storage().data_ptr(), 0 in tensor.stride()) for tensor in (k, v))
        return sdpa(q, k, v, **mask)

    monkeypatch.setattr(torch_backends.F, "scaled_dot_product_attention", recorded)
    decode.forward(model, torch.tensor([[1], [2]]), cache)
    assert seen == [(2, 1, 64)] * 2
    assert read == [(2, state.untyped_storage().data_ptr(), False) for state in cache.states for _ in range(2)]


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, 5), Sampling(1.0, 0, 0.9), Sampling(0.8, 20, 0.5), Sampling(2.0, 0, 1e-9)]
)
def test_sampling_is_from_transformers_filtered_distribution(sampling: Sampling) -> None:
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(3)) * 3
    logits[3::2] = logits[3::2].round()  # ties, also where top-k and top-p cut
    filters = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    expected = filters(torch.zeros(400, 1, dtype=torch.long), logits).softmax(-1)
    torch.testing.assert_close(decode.probabilities(logits, sampling), expected, atol=1e-7, rtol=0)
    # evenly spread draws meet each token as often as it is probable
    count = 20_000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for row in range(4):
        found = decode.choose(logits[row].expand(count, -1), sampling, draws).bincount(minlength=50) / count
        torch.testing.assert_close(found, expected[row], atol=2 / count, rtol=0)
    last = decode.choose(logits, sampling, torch.ones(400, dtype=torch.float64))  # as a draw may be rounded to
    assert (expected.gather(1, last[:, None]) > 0).all()


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    spec = SPECS["tied"]
    model, prompts = ours(spec, reference(spec), "sdpa"), random_prompts([9, 4, 9])
    prompts[2] = prompts[0]
    hot = Sampling(1.0, 50)
    first = decode.generate(model, prompts, hot, (), 24, ["a", "b", "c"])
    assert decode.generate(model, prompts, hot, (), 24, ["a", "b", "c"]) == first
    assert decode.generate(model, prompts[1:2], hot, (), 24, ["b"]) == first[1:2]  # whatever the batch
    assert first[0] != first[2]  # the same prompt under another seed
    assert decode.generate(model, prompts, hot, (), 24, ["d", "e", "f"])[0] != first[0]
    capped = decode.generate(model, prompts, Sampling(5.0, vocabulary=30), (), 24)
    assert max(token for row in capped for token in row.ids) < 30


def test_a_stop_token_ends_its_row_alone_and_is_not_part_of_it() -> None:
    hf = reference(SPECS["tied"])
    model, prompts = ours(SPECS["tied"], hf, "sdpa"), random_prompts([5, 9, 3])
    whole = decode.generate(model, prompts, Sampling(), (), 60)
    others = {*whole[0].ids, *whole[2].ids}
    said = whole[1].ids
    place, stop = next((at, t) for at, t in enumerate(said) if at > 2 and t not in others and t not in said[:at])
    steps: list[list[int | None]] = []
    stopped = decode.generate(model, prompts, Sampling(), {stop}, 60, on_step=steps.append)
    streamed = [[token for token in row if token is not None] for row in zip(*steps, strict=True)]
    assert streamed == [row.ids for row in stopped]
    assert steps[place][1] is None and len(steps) == 60
    assert stopped == [whole[0], Generated(said[:place], True), whole[2]]
    assert said_by_transformers(hf, prompts[1], 60, stop) == [*stopped[1].ids, stop]
    # as the last of the tokens allowed it still counts as a stop; one token fewer, and the length was the end
    assert decode.generate(model, prompts[1:2], Sampling(), {stop}, place + 1) == stopped[1:2]
    assert decode.generate(model, prompts[1:2], Sampling(), {stop}, place) == [Generated(said[:place], False)]


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    spec = SPECS["tied"]
    model = ours(spec, reference(spec), "eager")
    assert len(decode.generate(model, [[1] * 510], Sampling(), (), 2)[0].ids) == 2
    with pytest.raises(UserError, match=r"prompt 2: 511 tokens .* 512 positions .* lower max_new_tokens to 1"):
        decode.generate(model, [[1], [1] * 511], Sampling(), (), 2)
    with pytest.raises(UserError, match="prompt 1: is empty"):
        decode.generate(model, [[]], Sampling(), (), 2)
    for length, end in ((512, "shorten the prompt"), (511, "shorten the prompt, or lower max_new_tokens to 1")):
        with pytest.raises(UserError) as caught:
            check_lengths(spec, {"p": length}, 2)
        assert str(caught.value).endswith(end)


# --- the command ---


def test_the_command_answers_as_transformers_does_through_the_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, hf = AutoTokenizer.from_pretrained(folder), Qwen3ForCausalLM.from_pretrained(folder)
    questions, expected = ["Grüße! Wie viele?", "2 + 2", "Why?"], []
    for question in questions:
        messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": question}]
        kind = {"add_generation_prompt": True, "enable_thinking": False}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **kind)
        ids = said_by_transformers(hf, tokenizer(text).input_ids, 12, [700, 702])
        finish = "stop" if ids[-1] in (700, 702) else "length"
        expected.append((text, tokenizer.decode(ids[:-1] if finish == "stop" else ids), finish))
    arguments = ["--model", str(folder), "--max_new_tokens", "12"]
    asked = [word for question in questions for word in ("--prompt", question)]
    templated = ["--no_thinking", "--system", "Answer briefly.", *asked, "--device", "cpu"]
    assert generate.main([*arguments, *templated, "--output", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert generate.main([*arguments, *templated, "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for found in (rows, printed):
        assert [(row["prompt"], row["output"], row["finish"]) for row in found] == expected
    assert generate.main([*arguments, *templated, "--json", "--output", str(tmp_path / "rows.jsonl")]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    (text, output, _) = next(row for row in expected if row[2] == "length")
    capsys.readouterr()
    assert generate.main([*arguments, *templated]) == 0
    shown = [f"--- prompt {i} ---\n{printable(row[1])}\n" for i, row in enumerate(expected, 1)]
    assert capsys.readouterr().out == "".join(shown)
    assert generate.main([*arguments, "--raw", "--prompt", text, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == printable(output) + "\n" and "prompt 1: stopped by length, after --max_new_tokens 12" in err


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def opened(folder: Path) -> inference.Model:
    return inference.Model(str(folder), "", "", torch.device("cpu"), torch.float32)


def test_the_settings_of_generation_say_what_stops_a_text(copy: Path) -> None:
    settings = copy / "generation_config.json"
    settings.unlink()
    assert opened(copy).stop_ids == {700, 702}
    for given, expected in ((5, {5, 700, 702}), ([5, 6], {5, 6, 700, 702}), (None, {700, 702})):
        settings.write_text(json.dumps({"eos_token_id": given}))
        assert opened(copy).stop_ids == expected
    settings.write_text('{"eos_token_id": "x"}')
    with pytest.raises(UserError, match=r"copy/generation_config\.json: eos_token_id"):
        opened(copy)


def test_prompts_are_as_in_training_unless_an_option_says_otherwise(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference.Model, "load", lambda self: None)
    monkeypatch.setattr(inference, "generate", lambda network, prompts, *_: [Generated([5], True) for _ in prompts])
    block, data = "<think>\n\n</think>\n\n", tmp_path / "data.jsonl"
    data.write_bytes(b'\xef\xbb\xbf{"question": "2 + 2", "answer": "#### 4"}\r\n')

    def asked(*options: str) -> tuple[bool, str]:
        """Whether the prompt of both commands ends with the empty block, and what they say of it."""
        found = set()
        for main, question in ((generate.main, ("--prompt", "2 + 2")), (exact_match.main, ("--data", str(data)))):
            output = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
            if "--raw" not in options or main is generate.main:
                words = ["--model", str(copy), "--device", "cpu", *question, *options, "--output", str(output)]
                words += ["--max_new_tokens", "9"]
                assert main(words) == 0
                said = [line for line in capsys.readouterr().err.splitlines() if "enable_thinking" in line]
                found.add((json.loads(output.read_text())["prompt"].endswith(block), "\n".join(said)))
        [one] = found
        return one

    assert asked() == (False, "")
    told = "enable_thinking = {}, as the model was trained (titan_mi100.json); {} overrides"
    (copy / "titan_mi100.json").write_text('{"enable_thinking": false}')
    assert asked() == (True, told.format("false", "--enable_thinking"))
    assert asked("--enable_thinking") == (False, "") and asked("--no_thinking") == (True, "")
    assert asked("--raw") == (False, "")
    (copy / "titan_mi100.json").write_text('{"enable_thinking": true}')
    assert asked() == (False, told.format("true", "--no_thinking"))
    for content in ('{"enable_thinking": 0}', "{}", '{"enable_thinking": true, "more": 1}', "[]", "", "[" * 9999):
        (copy / "titan_mi100.json").write_text(content)
        assert generate.main(["--model", str(copy), "--prompt", "x"]) == 2
        assert f"ERROR {copy}/titan_mi100.json: " in capsys.readouterr().err


def test_rows_to_answer_may_have_what_exports_have(tmp_path: Path) -> None:
    row = {"id": 1, "messages": [{"role": "user", "content": "a", "timestamp": 1, "id": 2}]}
    data = tmp_path / "rows.jsonl"
    data.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n\r\n")
    [(where, (messages, tools))] = read_rows(str(data), asked_of)
    assert (where, messages, tools) == (f"{data}:1", [{"role": "user", "content": "a"}], None)


def test_a_conversations_own_system_message_counts(folder: Path) -> None:
    build = inference.PromptBuilder(opened(folder), "From the command line.", None)
    asked = {"role": "user", "content": "x"}
    assert build("here", [asked]).text.startswith("<|im_start|>system\nFrom the command line.<|im_end|>")
    own = build("here", [{"role": "system", "content": "Its own."}, asked]).text
    assert own.startswith("<|im_start|>system\nIts own.<|im_end|>") and "command line" not in own
    with pytest.raises(UserError, match=r"here: .* refuses this conversation"):
        build("here", [{"role": "teacher", "content": "x"}])


def test_an_output_of_other_weights_under_the_same_path_is_refused(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a checkpoint all bytes count: weights that differ only behind the first ones of each tensor are others."""
    file, checkpoint = copy / "model.safetensors", tmp_path / "step-0"
    convert.to_dcp(open_source(copy), checkpoint)
    usual = ["--prompt", "one", "--max_new_tokens", "3", "--device", "cpu"]
    of_files = [*usual, "--model", str(copy), "--output", str(tmp_path / "files.jsonl")]
    of_checkpoint = [*usual, "--model", str(checkpoint), "--output", str(tmp_path / "checkpoint.jsonl")]
    for arguments in (of_files, of_files, of_checkpoint, of_checkpoint):
        assert generate.main(arguments) == 0
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + 2] ^= 1
    file.write_bytes(content)
    assert generate.main(of_files) == 2
    assert "name another --output" in capsys.readouterr().err
    content[start + 2] ^= 1
    file.write_bytes(content)
    weights = load_file(file)
    weights["model.embed_tokens.weight"][-1, -1] += 1
    save_file(weights, file, {"format": "pt"})
    shutil.rmtree(checkpoint)
    convert.to_dcp(open_source(copy), checkpoint)
    assert generate.main(of_checkpoint) == 2
    assert "made with another weights; name another --output" in capsys.readouterr().err


def test_an_interrupted_output_goes_on_where_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, whole, output = tmp_path / "prompts.jsonl", tmp_path / "whole.jsonl", tmp_path / "output.jsonl"
    lines = [{"question": "one"}, {"prompt": "two"}, {"messages": [{"role": "user", "content": "three"}]}]
    lines += [{"prompt": f"number {number}"} for number in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", str(folder), "--input", str(prompts), "--max_new_tokens", "6"]
    arguments += ["--temperature", "1", "--device", "cpu"]
    assert generate.main([*arguments, "--output", str(whole), "--batch_size", "2"]) == 0
    assert whole.read_text().count("\n") == 7

    calls, real = [], decode.generate

    def interrupted(*given: Any) -> list[Generated]:
        calls.append(len(given[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(inference, "generate", interrupted)
    assert generate.main([*arguments, "--output", str(output), "--batch_size", "2"]) == 130
    assert output.read_bytes() == b"".join(whole.read_bytes().splitlines(True)[:4])
    lines_there = whole.read_bytes().splitlines(True)
    output.write_bytes(b"".join(lines_there[:3]) + lines_there[3][:20])  # a line cut off, as a full disk may leave it
    assert generate.main([*arguments, "--output", str(output), "--batch_size", "3"]) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert calls == [2, 2, 2, 3, 1]  # what was there is not made again

    def never(*_: Any) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(inference, "fill_parameters", never)
    capsys.readouterr()
    assert generate.main([*arguments, "--output", str(whole)]) == 0
    cut = whole.read_text().count('"finish": "length"')
    assert cut and capsys.readouterr().out == f"{whole}: 7 rows; {cut} stopped by length, after --max_new_tokens 6\n"
    for changed, expected in (
        (["--seed", "1"], "whole.jsonl:1: was made with another seed"),
        (["--dtype", "float64", "--top_k", "3"], "whole.jsonl:1: was made with another dtype, top_k"),
        (["--system", "Be brief."], "whole.jsonl:1: answers another prompt"),
    ):
        assert generate.main([*arguments, "--output", str(whole), *changed]) == 2
        assert expected in capsys.readouterr().err
    first = json.loads(lines_there[0])
    for change in ({"output": 5}, {"tokens": "x"}, {"finish": [1]}, {"more": 1}, {"settings": []}):
        output.write_text(json.dumps({**first, **change}) + "\n")
        assert generate.main([*arguments, "--output", str(output)]) == 2
        assert "wanted.jsonl:1: was" in capsys.readouterr().err.replace(output.name, "wanted.jsonl")
    prompts.write_text(prompts.read_text().splitlines(True)[0])
    assert generate.main([*arguments, "--output", str(whole)]) == 2
    assert "whole.jsonl:2: answers another prompt" in capsys.readouterr().err
    assert generate.main([*arguments, "--output", str(prompts)]) == 2
    assert "prompts.jsonl:1: was not written by this command" in capsys.readouterr().err
    foreign = tmp_path / "notes.txt"
    for content in ("a line without an end", '{"a": 1}'):
        foreign.write_text(content)
        assert generate.main([*arguments, "--output", str(foreign)]) == 2
        assert "notes.txt:1: was not written by this command" in capsys.readouterr().err
        assert foreign.read_text() == content


BAD = {
    "no model": (["--model", "{tmp}/none", "--prompt", "x"], "none: no such folder"),
    "negative temperature": (["--prompt", "x", "--temperature", "-1"], "temperature = -1.0 must be 0"),
    "temperature near 0": (["--prompt", "x", "--temperature", "1e-40"], "must be 0 (greedy) or at least 1e-6"),
    "temperature nan": (["--prompt", "x", "--temperature", "nan"], "temperature = nan must be 0"),
    "top_p 0": (["--prompt", "x", "--temperature", "1", "--top_p", "0"], "top_p = 0.0 must be above 0"),
    "top_p 2": (["--prompt", "x", "--temperature", "1", "--top_p", "2"], "top_p = 2.0 must be above 0"),
    "top_k": (["--prompt", "x", "--temperature", "1", "--top_k", "-1"], "top_k = -1 must be 0 (off) or more"),
    "filters at 0": (["--prompt", "x", "--top_k", "5"], "top_k and top_p change nothing at temperature 0"),
    "no new tokens": (["--prompt", "x", "--max_new_tokens", "0"], "max_new_tokens = 0 must be at least 1"),
    "no batch": (["--prompt", "x", "--batch_size", "0"], "batch_size = 0 must be at least 1"),
    "no prompt": ([], "one of the arguments --prompt --input is required"),
    "empty raw prompt": (["--raw", "--prompt", ""], "prompt 1: is empty"),
    "long": (["--prompt", "x" * 600], "tokens plus max_new_tokens = 9 exceed the 512 positions"),
    "no file": (["--input", "{tmp}/none.jsonl"], "none.jsonl: cannot be read: No such file"),
    "no rows": (["--input", "{tmp}/prompts.txt"], "prompts.txt: is neither JSON nor parquet"),
    "empty prompt": (["--input", "{tmp}/empty.jsonl"], "empty.jsonl:1: nothing to answer"),
    "behind a blank line": (["--input", "{tmp}/blank.jsonl"], "blank.jsonl:3: nothing to answer"),
    "not UTF-8": (["--input", "{tmp}/latin.jsonl"], "latin.jsonl:1: not UTF-8: at byte 15"),
    "bad JSON": (["--input", "{tmp}/bad.jsonl"], "bad.jsonl:2: not JSON"),
    "no key": (["--input", "{tmp}/key.jsonl"], "key.jsonl:2: not one prompt"),
    "two keys": (["--input", "{tmp}/two.jsonl"], "two.jsonl:1: not one prompt"),
    "long element": (["--input", "{tmp}/array.json"], "array.json:1[1]: "),
    "long row": (["--input", "{tmp}/long.jsonl"], "long.jsonl:2: "),
    "raw messages": (["--raw", "--input", "{tmp}/messages.jsonl"], "messages.jsonl:1: a conversation needs a chat"),
    "raw system": (["--raw", "--system", "x", "--prompt", "x"], "--raw uses no chat template; leave out --system"),
    "no device": (["--prompt", "x", "--device", "cuda:99"], "--device cuda:99: cannot be used here"),
    "nonsense device": (["--prompt", "x", "--device", "gpu"], "--device gpu: cannot be used here"),
    "no output folder": (["--prompt", "x", "--output", "{tmp}/none/o.jsonl"], "o.jsonl: cannot be written (No such"),
    "tensors without values": (["--prompt", "x", "--device", "meta"], "--device meta: cannot be used here"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_the_weights_are_read(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hello, hi = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
    for name, content in {
        "prompts.txt": b"What is 2 + 2?\n",
        "empty.jsonl": b'{"prompt": ""}\n',
        "blank.jsonl": '{"prompt": "one\u2028still one"}\n\n{"prompt": ""}\n'.encode(),
        "latin.jsonl": b'{"prompt": "Gr\xfc"}\n',
        "bad.jsonl": b'{"prompt": "x"}\n{"prompt": \n',
        "key.jsonl": b'{"prompt": "x"}\n{"text": "x"}\n',
        "two.jsonl": b'{"prompt": "x", "question": "y"}\n',
        "long.jsonl": b'{"prompt": "x"}\n' + json.dumps({"prompt": "x" * 600}).encode() + b"\n",
        "array.json": json.dumps([{"prompt": "x" * 600}, {"prompt": "x"}]).encode(),
        "messages.jsonl": json.dumps({"messages": [hello, hi, hello]}).encode() + b"\n",
    }.items():
        (tmp_path / name).write_bytes(content)

    def never(*_: Any) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(inference, "fill_parameters", never)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    given, expected = BAD[case]
    usual = {"--model": str(folder), "--max_new_tokens": "9"}
    arguments = [word for option in usual.keys() - given for word in (option, usual[option])]
    assert generate.main([*arguments, *(word.format(tmp=tmp_path) for word in given)]) == 2
    out, err = capsys.readouterr()
    assert expected in err and not out


@pytest.mark.parametrize(("words", "data"), [("generate", "--prompt"), ("evaluate exact-match", "--data")])
def test_a_mistake_ends_the_process_with_code_2(words: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["titan-mi100", *words.split(), "--model", "/nowhere", data, "/nowhere"])
    monkeypatch.delitem(sys.modules, "titan_mi100.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("titan_mi100", run_name="__main__")
    assert ended.value.code == 2


def test_full_memory_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(inference, "generate", full)
    assert generate.main(["--model", str(folder), "--prompt", "x", "--max_new_tokens", "9"]) == 2
    assert "lower --batch_size or --max_new_tokens" in capsys.readouterr().err


def test_without_a_template_the_text_itself_goes_on_and_nothing_else_is_promised(
    folder: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    arguments = ["--prompt", "2 + 2", "--max_new_tokens", "5", "--device", "cpu"]
    assert generate.main(["--model", str(copy), *arguments]) == 0
    out, err = capsys.readouterr()
    assert "has no chat template: the model continues the text itself" in err
    assert generate.main(["--model", str(folder), *arguments, "--raw"]) == 0
    assert capsys.readouterr().out == out
    assert generate.main(["--model", str(copy), *arguments, "--system", "x"]) == 2
    assert "the tokenizer has no chat template; leave out --system" in capsys.readouterr().err


def test_a_full_disk_ends_with_the_files_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def full(_: int) -> None:
        if asked:
            raise OSError(28, "No space left on device")

    real = decode.generate
    monkeypatch.setattr(inference, "generate", lambda *given: asked.append(given) or real(*given))
    monkeypatch.setattr(os, "fsync", full)
    arguments = ["--model", str(folder), "--prompt", "x", "--max_new_tokens", "2", "--device", "cpu"]
    arguments += ["--output", str(tmp_path / "o.jsonl")]
    assert generate.main(arguments) == 2
    assert "o.jsonl: cannot be written (No space left on device)" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(copy: Path) -> None:
    reference(Qwen3Spec(700, 64, 96, 3, 4, 2, 16, True, rope_theta=1e4)).save_pretrained(copy)
    with pytest.raises(UserError, match=r"ids up to 708, the model only 700"):
        opened(copy)
