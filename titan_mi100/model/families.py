"""The class of each family's model, by its name in shapes/families.py."""

from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.qwen3 import Qwen3

MODELS: dict[str, type[CausalLM]] = {"qwen3": Qwen3}
