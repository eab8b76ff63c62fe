"""Exports are read alike by transformers 4 and 5: the keys. By hand, in environments of other versions: `python FILE`.

python tests/test_transformers_versions.py make FOLDER     # here: folders as transformers 5 writes them, and exports
OTHER/bin/python tests/test_transformers_versions.py read FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
else:
    from titan_mi100.shapes.families import PRESETS, read_hf_config, to_hf_config
    from titan_mi100.text.assets import for_all_versions


def test_an_export_has_what_transformers_4_reads_and_what_5_reads() -> None:
    """docs/TESTING.md says which versions read such folders alike; here are the keys."""
    rope = {"rope_type": "default", "rope_theta": 123456.0}
    config = {"model_type": "qwen3_moe", "rope_parameters": rope, "dtype": "bfloat16", "num_local_experts": 5}
    tokenizer = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>", "<b>"], "eos_token": "<a>"}
    given = {"config.json": config, "tokenizer_config.json": tokenizer, "merges.txt": {}}
    written = for_all_versions({name: json.dumps(content).encode() for name, content in given.items()})
    assert json.loads(written["config.json"]) == {
        **config, "rope_theta": 123456.0, "num_experts": 5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert json.loads(written["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>", "<b>"], "eos_token": "<a>",
    }  # fmt: skip
    assert for_all_versions(written) == written
    # transformers 4 has no Qwen3.5, and an object of named tokens is read by both
    kept = {"config.json": {**config, "model_type": "qwen3_5"}, "tokenizer_config.json": {"extra_special_tokens": {}}}
    assets = {name: json.dumps(content).encode() for name, content in kept.items()}
    assert for_all_versions(assets) == assets


def test_a_folder_of_transformers_5_is_read_alike_after_its_export(tmp_path: Path) -> None:
    config = to_hf_config(PRESETS["debug"])
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    written = for_all_versions({"config.json": json.dumps(config).encode()})
    assert json.loads(written["config.json"])["rope_theta"] == theta
    (tmp_path / "config.json").write_bytes(written["config.json"])
    assert read_hf_config(tmp_path) == PRESETS["debug"]


IDS = torch.arange(40)[None] * 7 % 600
ROPE = {"rope_type": "default", "rope_theta": 123456.0}  # not the default of any version
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SIZES = {
    "vocab_size": 709, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1, "rope_parameters": ROPE,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
OF_FOUR_LAYERS = {"num_hidden_layers": 4, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}


def make(folder: Path) -> None:
    """Write models with random weights, their exports, and the logits of both."""
    import transformers as t

    from titan_mi100.text.bpe import PATTERNS, QWEN3_5
    from titan_mi100.weights import convert
    from titan_mi100.weights.source import open_source

    torch.manual_seed(0)
    models = {
        "qwen3": t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES)),
        "qwen3-yarn": t.Qwen3ForCausalLM(t.Qwen3Config(**{**SIZES, "rope_parameters": {**ROPE, **YARN}})),
        "qwen3_moe": t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **EXPERTS)),
        "qwen3_5": t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**{**SIZES, **OF_FOUR_LAYERS})),
    }
    for name, model in models.items():
        source = folder / name
        model.save_pretrained(source)
        for file in (HERE / "assets" / "tokenizer").iterdir():
            shutil.copy(file, source)
        config = json.loads((source / "tokenizer_config.json").read_text())
        config |= {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        if name == "qwen3_5":
            text = (source / "tokenizer.json").read_text()
            content = json.loads(text)
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[QWEN3_5]
            (source / "tokenizer.json").write_text(json.dumps(content))
        convert.to_hf(open_source(source), folder / f"{name}-export", verify="bytes")
        with torch.no_grad():
            torch.save(model.eval()(IDS).logits, folder / f"{name}.pt")


def read(folder: Path) -> None:
    """Print what this version of transformers makes of each folder."""
    import transformers

    for file in sorted(folder.glob("*.pt")):
        for source in (folder / file.stem, folder / f"{file.stem}-export"):
            said = [transformers.__version__, source.name]
            try:
                kind = getattr(transformers, json.loads((source / "config.json").read_text())["architectures"][0])
                model, loading = kind.from_pretrained(source, output_loading_info=True, attn_implementation="eager")
                with torch.no_grad():
                    difference = (model.float().eval()(IDS).logits - torch.load(file)).abs().max().item()
                said.append(f"logits differ by {difference:.1e}, {len(loading['missing_keys'])} tensors missing")
            except Exception as error:  # of any type
                said.append(f"no model: {str(error)[:80]}")
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(source)
                said.append(f"{type(tokenizer).__name__}, {len(tokenizer('<|im_start|>user Hi')['input_ids'])} tokens")
            except Exception as error:
                said.append(f"no tokenizer: {str(error)[:80]}")
            print("; ".join(said).replace("\n", " "))


if __name__ == "__main__":
    {"make": make, "read": read}[sys.argv[1]](Path(sys.argv[2]))
