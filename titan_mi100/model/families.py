"""The class of each family's model, by the model_type of its shape."""

from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.model.qwen3_5 import Qwen3_5
from titan_mi100.model.qwen3_5_moe import Qwen3_5Moe
from titan_mi100.model.qwen3_moe import Qwen3Moe

MODELS: dict[str, type[CausalLM]] = {
    "qwen3": Qwen3, "qwen3_moe": Qwen3Moe, "qwen3_5": Qwen3_5, "qwen3_5_moe": Qwen3_5Moe,
}  # fmt: skip
