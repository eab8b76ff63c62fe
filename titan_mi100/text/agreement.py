"""Checks that tokenizer_config.json and tokenizer.json agree.

transformers builds its tokenizer from both files; the `tokenizers` library and we use tokenizer.json alone. A folder is
refused if the two would give different ids.
"""

import json
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object
from titan_mi100.text.base import AddedToken, TokenizerConfig, named_tokens, spelling
from titan_mi100.text.classes import KEPT_CLASS, QWEN2, QWEN_CLASSES, class_of
from titan_mi100.wording import shown

_AS_DEFINED = ("PreTrainedTokenizerFast", "TokenizersBackend")
_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")  # follow tokenizer.json only if it is byte-level
# Keys of tokenizer_config.json that change the ids of a text, or the file that is read.
_UNSUPPORTED = ("split_special_tokens", "add_prefix_space", "fast_tokenizer_files", "init_inputs", "gguf_file")
_FLAGS = ("lstrip", "rstrip", "single_word")
_REMEDY = "programs differ in which file they read, so correct it, or use the files that came with the model"


def check_agreement(config: TokenizerConfig, definition: dict[str, Any], splits_as: str) -> None:
    """Compare the two files.

    Args:
        config: tokenizer_config.json.
        definition: tokenizer.json.
        splits_as: the class of transformers that splits and normalises text as the definition does; "": none.

    Raises:
        UserError: the first disagreement found.
    """
    content, model_type = config.content, _read_beside(config, "config.json").get("model_type")
    kind = class_of(content, model_type)
    added = {token.content: token for token in map(AddedToken.read, definition.get("added_tokens", []))}
    named, problem = named_tokens(content), ""
    if unsupported := [key for key in _UNSUPPORTED if content.get(key)]:
        problem = f"{unsupported[0]} = {shown(content[unsupported[0]])} is not supported"
    elif kind in QWEN_CLASSES and kind != splits_as:
        fixed = model_type in KEPT_CLASS
        note = " (the default)" * (kind == QWEN2)
        note = f" (which transformers always uses for model_type {model_type})" if fixed else note
        problem = f"tokenizer_class {kind}{note} splits and normalises text differently than tokenizer.json"
        other = splits_as or _AS_DEFINED[0]
        problem += "" if fixed else f"; if tokenizer.json is right, set tokenizer_class to {other}"
    elif kind not in QWEN_CLASSES + _AS_DEFINED and not (kind in _LLAMA and '"ByteLevel"' in json.dumps(definition)):
        problem = f"tokenizer_class {shown(kind)} may split text in its own way; set it to {_AS_DEFINED[0]}"
    elif "added_tokens_decoder" in content:
        if _id_properties(config.entries()) != _id_properties(definition.get("added_tokens", [])):
            problem = "added_tokens_decoder has other tokens or flags than tokenizer.json's added_tokens"
    else:  # without added_tokens_decoder, transformers reads two files of its older format
        content = {**content, **_read_beside(config, "special_tokens_map.json")}
        if named != named_tokens(content):
            problem = "names other tokens than special_tokens_map.json"
        for token, token_id in _read_beside(config, "added_tokens.json").items():
            if token not in added or added[token].id != token_id:
                problem = f"added_tokens.json has {shown(token)}, tokenizer.json's added_tokens do not"
    extra = content.get("extra_special_tokens") or content.get("additional_special_tokens") or []
    for token in [*named.values(), *(map(spelling, extra) if isinstance(extra, list) else ())]:
        if token not in added:
            problem = problem or f"names the token {shown(token)}, which is not among tokenizer.json's added_tokens"
        elif kind == QWEN2 and (added[token].normalized or not added[token].plain):
            problem = problem or f"tokenizer_class {kind} drops the flags of the token {shown(token)}"
    if problem:
        raise UserError(f"{config.file}: {problem}; {_REMEDY}")


def _id_properties(entries: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """The properties of added tokens that influence the ids of a text."""
    return {(*AddedToken.read(entry)[:3], *(bool(entry.get(flag)) for flag in _FLAGS)) for entry in entries}


def _read_beside(config: TokenizerConfig, name: str) -> dict[str, Any]:
    file = config.file.with_name(name)
    return read_object(file, _REMEDY) if file.is_file() else {}
