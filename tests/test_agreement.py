"""A folder's tokenizer gives the ids and the chat that transformers gives, or the folder is refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS

from titan_mi100.errors import UserError
from titan_mi100.shapes.families import PRESETS
from titan_mi100.text.assets import naming_class, run_assets
from titan_mi100.text.bpe import QWEN2_PATTERN
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer

Json = dict[str, Any]
SOURCE = ASSETS / "tokenizer"
END, TEXT = "<|im_end|>", "हिन्दी DON'T é e\u0301 <s> Hello <extra> <img> 12345  <|im_end|> x <|im_start|> <think> İ"
GENERIC, QWEN3_5 = {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "Qwen3_5Tokenizer"}
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LOWERCASE = {"type": "Lowercase"}
PATTERN = QWEN2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
STEPS = [{"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}]
MARKS = {"type": "Sequence", "pretokenizers": [*STEPS, {**GPT2_SPLIT, "use_regex": False}]}  # Qwen3.5's splitting


def added(content: str, token_id: int = 0, **flags: bool) -> Json:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **({"id": token_id} if token_id else {}), **plain, **flags}


def config(**changes: Any) -> Callable[[Json, Json], Json]:
    return lambda tokenizer, settings: settings.update(changes) or {}


def without(*keys: str, beside: Json | None = None, **changes: Any) -> Callable[[Json, Json], Json]:
    def change(tokenizer: Json, settings: Json) -> Json:
        for key in keys:
            del settings[key]
        settings.update(changes)
        return beside or {}

    return change


def defined(settings_too: Json | None = None, model: str = "", **changes: Any) -> Callable[[Json, Json], Json]:
    beside = {"config.json": {"model_type": model}} if model else {}
    return lambda tokenizer, settings: tokenizer.update(changes) or settings.update(settings_too or {}) or beside


def flagged(number: int, in_both: bool, settings_too: Json, **flags: bool) -> Callable[[Json, Json], Json]:
    def change(tokenizer: Json, settings: Json) -> Json:
        tokenizer["added_tokens"][number].update(flags)
        if in_both:
            settings["added_tokens_decoder"][str(700 + number)].update(flags)
        settings.update(settings_too)
        return {}

    return change


def decoder(token_id: int, entry: Json | None) -> Callable[[Json, Json], Json]:
    def change(tokenizer: Json, settings: Json) -> Json:
        if entry is None:
            del settings["added_tokens_decoder"][str(token_id)]
        else:
            settings["added_tokens_decoder"][str(token_id)] = entry
        return {}

    return change


def with_variables(*names: str) -> str:
    """The template, and what the variables of these names hold."""
    own: str = json.loads((SOURCE / "tokenizer_config.json").read_text())["chat_template"]
    return own + "".join(f"[{{{{ {name} }}}}]" for name in names)


LEGACY = "added_tokens_decoder"  # transformers reads the files beside the config where this is not in it
OTHER = "added_tokens_decoder has other tokens or flags"
# the change of tokenizer.json and tokenizer_config.json, and what the refusal says; empty: as transformers
CASES: dict[str, tuple[Callable[[Json, Json], Json], str]] = {
    "as it is": (config(), ""),
    "no class": (without("tokenizer_class"), ""),
    "a generic class": (config(**GENERIC), ""),
    "a byte-level Llama": (config(tokenizer_class="LlamaTokenizerFast"), ""),
    "no added_tokens_decoder": (without(LEGACY), ""),
    "keys without effect": (
        config(add_bos_token=True, add_eos_token=True, model_max_length=5, do_lower_case=True, legacy=False),
        "",
    ),
    "truncation and padding": (
        defined(truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}),
        "",
    ),
    "generic, another normaliser and splitting": (
        defined(GENERIC, normalizer=LOWERCASE, pre_tokenizer=GPT2_SPLIT),
        "",
    ),
    "generic, a flag in both": (flagged(2, True, GENERIC, lstrip=True), ""),
    "variables of the class": (
        without("unk_token", "pad_token", chat_template=with_variables("unk_token", "pad_token", "bos_token")),
        "",
    ),
    "variables of the model": (
        config(
            image_token="<think>",
            extra_special_tokens={"boi": "</think>"},
            chat_template=with_variables("image_token", "boi"),
        ),
        "",
    ),
    "the old files agree": (
        without(LEGACY, beside={"special_tokens_map.json": {"eos_token": END}, "added_tokens.json": {"<think>": 707}}),
        "",
    ),
    "old files that are not read": (without(beside={"special_tokens_map.json": {"bos_token": "<s>"}}), ""),
    "Qwen3.5's class": (defined(QWEN3_5, pre_tokenizer=MARKS), ""),
    "Qwen3.5's class, fast": (defined({"tokenizer_class": "Qwen3_5TokenizerFast"}, pre_tokenizer=MARKS), ""),
    "Qwen2's class in a folder of Qwen3.5, as published": (defined(model="qwen3_5", pre_tokenizer=MARKS), ""),
    "a generic class in it": (defined(GENERIC, model="qwen3_5", pre_tokenizer=MARKS), ""),
    "no class in a folder of its text part": (
        defined({"tokenizer_class": None}, model="qwen3_5_text", pre_tokenizer=MARKS),
        "",
    ),
    # -- refused
    "Qwen2's class for its text part": (
        defined(model="qwen3_5_text", pre_tokenizer=MARKS),
        "if tokenizer.json is right, set tokenizer_class to Qwen3_5Tokenizer",
    ),
    "Qwen3.5's class for Qwen3's splitting": (
        defined(QWEN3_5),
        "tokenizer_class Qwen3_5Tokenizer splits and normalises text differently",
    ),
    "Qwen3's splitting in a folder of Qwen3.5": (
        defined(GENERIC, model="qwen3_5"),
        "Qwen3_5Tokenizer (which transformers always uses for model_type qwen3_5) splits",
    ),
    "a new bos": (config(bos_token="<s>"), "names the token '<s>', which is not among tokenizer.json's added_tokens"),
    "a word as bos": (config(bos_token="Hello"), "names the token 'Hello'"),
    "a new extra token": (config(extra_special_tokens=["<extra>"]), "names the token '<extra>'"),
    "a new additional token": (config(additional_special_tokens=[added("<extra>")]), "names the token '<extra>'"),
    "a new token of the model": (config(image_token="<img>"), "names the token '<img>'"),
    "split specials": (config(split_special_tokens=True), "split_special_tokens = True is not supported"),
    "a prefix space": (config(add_prefix_space=True), "add_prefix_space = True is not supported"),
    "a file by version": (config(fast_tokenizer_files=["tokenizer.4.0.json"]), "fast_tokenizer_files = ['tokenizer"),
    "another class": (config(tokenizer_class="GPT2Tokenizer"), "tokenizer_class 'GPT2Tokenizer' may split text"),
    "another splitting": (defined(pre_tokenizer=GPT2_SPLIT), "tokenizer_class Qwen2Tokenizer (the default) splits"),
    "no normaliser": (defined(normalizer=None), "tokenizer_class Qwen2Tokenizer (the default) splits"),
    "another normaliser, no class": (
        defined({"tokenizer_class": None}, normalizer=LOWERCASE),
        "tokenizer_class Qwen2Tokenizer (the default) splits",
    ),
    "an empty decoder": (config(added_tokens_decoder={}), OTHER),
    "a token more": (decoder(709, added("<extra>")), OTHER),
    "a token less": (decoder(707, None), OTHER),
    "another token": (decoder(707, added("<thonk>", special=False)), OTHER),
    "a flag in the config": (decoder(702, added(END, lstrip=True)), OTHER),
    "a flag in the file": (flagged(2, False, GENERIC, lstrip=True), OTHER),
    "a flag that the class drops": (flagged(2, True, {}, lstrip=True), "Qwen2Tokenizer drops the flags of the token"),
    "another eos in the old file": (
        without(LEGACY, beside={"special_tokens_map.json": {"eos_token": "<|endoftext|>"}}),
        "names other tokens than special_tokens_map.json",
    ),
    "a new token in the old file": (
        without(LEGACY, beside={"added_tokens.json": {"<extra>": 709}}),
        "added_tokens.json has '<extra>'",
    ),
}


def folder_of(path: Path, change: Callable[[Json, Json], Json]) -> Path:
    tokenizer, settings = (
        json.loads((SOURCE / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")
    )
    files = {**change(tokenizer, settings), "tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    files.setdefault("config.json", {"model_type": "qwen3"})
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_as_transformers_reads_it_or_refused(name: str, tmp_path: Path) -> None:
    change, refused = CASES[name]
    folder = folder_of(tmp_path, change)
    if refused:
        with pytest.raises(UserError) as caught:
            load_tokenizer(folder)
        assert refused in str(caught.value) and str(folder / "tokenizer_config.json") in str(caught.value)
        return
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if type(theirs).__name__ == "LlamaTokenizer":
        pytest.skip("this transformers splits text in Llama's way, whatever tokenizer.json says; 5.23 does not")
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
    text = ChatTemplate.from_folder(folder).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False)
    assert load_tokenizer(folder).encode(text) == theirs.apply_chat_template(messages)["input_ids"]


def test_the_class_is_named_where_the_published_config_is_not(tmp_path: Path) -> None:
    published = folder_of(tmp_path, defined(model="qwen3_5", pre_tokenizer=MARKS))  # it names Qwen2Tokenizer
    as_it_is = run_assets(PRESETS["qwen3.5-debug"], str(published), str(published), "")
    assert as_it_is["tokenizer_config.json"] == (published / "tokenizer_config.json").read_bytes()
    made_anew = [run_assets(PRESETS[flavor], "", str(published), "") for flavor in ("qwen3.5-debug", "debug")]
    adapter = {name: content for name, content in as_it_is.items() if name != "config.json"}
    for assets in (*made_anew, naming_class(adapter, as_it_is)):
        assert json.loads(assets["tokenizer_config.json"])["tokenizer_class"] == "Qwen3_5Tokenizer"
