"""The tokenizer classes of transformers. Imports only the standard library: the launcher imports this."""

from collections.abc import Mapping
from typing import Any

QWEN2, QWEN3_5 = "Qwen2Tokenizer", "Qwen3_5Tokenizer"
QWEN_CLASSES = (QWEN2, QWEN3_5)  # they split text by their own patterns and put it in NFC, whatever tokenizer.json says
KEPT_CLASS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # models of which transformers ignores the class named


def class_of(config: Mapping[str, Any], model_type: Any = "") -> str:
    """The class that `transformers` uses for a tokenizer_config.json beside the config.json of such a model."""
    named = config.get("tokenizer_class") or (QWEN3_5 if model_type == "qwen3_5_text" else QWEN2)
    if isinstance(named, str) and named.removesuffix("Fast") in QWEN_CLASSES:
        named = named.removesuffix("Fast")
    return QWEN3_5 if model_type in KEPT_CLASS else named
