"""What training a model costs: FLOPs of a step, and the balance between pipeline stages. Imports no torch."""

import math
from collections.abc import Callable
from functools import partial

from titan_mi100.config.model_spec import ModelSpec, adapter_shapes, parameter_shapes
from titan_mi100.config.settings import LoRAConfig

_FLOP_PER_BYTE = 40  # what a GPU computes in bf16 in the time in which it moves a byte, about
_BYTES_PER_LOGIT = 60  # moved by the head's loss, forward and backward, besides its matrix products: see loss.py


def end_costs(
    spec: ModelSpec,
    local_batch_size: int,
    seq_len: int,
    supervised_share: float,
    recompute: bool,
    frozen: bool = False,
) -> tuple[float, float]:
    """What a microbatch costs in the embedding and in the head, in blocks' costs; each has a (vocab, hidden) weight.

    A block: matrix products over all tokens, forward once and backward twice, once more where activations are
    recomputed, and attention over rows of one document. The head: the same over supervised tokens, always recomputed,
    and its logits pass through memory several times. Both ends make a gradient as large as the weight and add it to
    the sum in fp32.

    Args:
        supervised_share: supervised tokens per token.
        frozen: no gradients of these weights: one product less for each, and no traffic at the ends.
    """
    tokens = local_batch_size * seq_len
    shapes = [shape for name, shape in parameter_shapes(spec).items() if name.startswith("model.layers.0.")]
    block = 2 * tokens * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    block += 4 * spec.num_attention_heads * spec.head_dim * tokens * (seq_len + 1) // 2
    block *= 3 + recompute - frozen
    weight = spec.vocab_size * spec.hidden_size
    moved = 0 if frozen else 12 * weight * _FLOP_PER_BYTE  # bf16 gradient written and read, fp32 sum read and written
    supervised = tokens * supervised_share
    head = (4 - frozen) * 2 * weight * supervised + _BYTES_PER_LOGIT * _FLOP_PER_BYTE * spec.vocab_size * supervised
    return moved / block, (moved + head) / block


def train_flops(
    spec: ModelSpec, tokens: int, supervised_tokens: int, attention_pairs: int, adapter_values: int = 0
) -> int:
    """FLOPs that one forward and backward need, for model FLOPs utilisation (MFU).

    Only work that the loss depends on is counted: real tokens (no padding), the head on supervised tokens, attention
    inside documents below the diagonal; recomputation of activations is not. So the figure is lower, for the same
    speed, than one by the usual 6 x parameters x tokens.

    Args:
        tokens: real tokens.
        supervised_tokens: tokens with a label.
        attention_pairs: (query, key) pairs inside documents with key <= query: n * (n + 1) / 2 for one of n tokens.
        adapter_values: of LoRA's matrices, which alone are trained; 0: the whole model is.

    A matrix product of a weight with one token is 2 FLOPs per weight; backward costs twice the forward, and once
    where the weight is frozen; attention is two products (scores, values) of 2 * head_dim FLOPs per pair and head.
    """
    blocks, attention = _forward_flops(spec, tokens, attention_pairs)
    products = blocks + 2 * spec.vocab_size * spec.hidden_size * supervised_tokens
    return (2 if adapter_values else 3) * products + 3 * (2 * adapter_values * tokens + attention)


def flops_of_steps(spec: ModelSpec, lora: LoRAConfig) -> Callable[[int, int, int], int]:
    """train_flops of tokens, supervised tokens and attention pairs."""
    adapters = adapter_shapes(spec, lora.rank, lora.target_modules)  # without LoRA of no elements
    return partial(train_flops, spec, adapter_values=sum(map(math.prod, adapters.values())))


def recomputed_flops(spec: ModelSpec, tokens: int, attention_pairs: int, mode: str) -> int:
    """FLOPs of the blocks' second forward, see activation_checkpoint.mode. It ends before a block's last matrix
    product, whose result no backward needs.
    """
    blocks, attention = _forward_flops(spec, tokens, attention_pairs)
    blocks -= 2 * spec.num_hidden_layers * spec.hidden_size * spec.intermediate_size * tokens
    return {"none": 0, "selective": blocks, "full": blocks + attention}[mode]


def _forward_flops(spec: ModelSpec, tokens: int, attention_pairs: int) -> tuple[int, int]:
    """Of the blocks' matrices, and of their attention."""
    matrices = sum(
        math.prod(shape)
        for name, shape in parameter_shapes(spec).items()
        if len(shape) == 2 and name.startswith("model.layers.")
    )
    attention = 4 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim * attention_pairs
    return 2 * matrices * tokens, attention
