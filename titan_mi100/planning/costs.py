"""Cost of training a model: FLOPs of a step, and the balance between pipeline stages. Imports no torch."""

import math
from collections.abc import Callable, Iterable
from functools import partial

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.shapes.base import ROWS, LayerShape, ModelSpec

_FLOP_PER_BYTE = 40  # bf16 FLOPs that a GPU computes in the time of moving one byte, roughly
_BYTES_PER_LOGIT = 60  # moved by the head's loss, forward and backward, besides its matrix products: see loss.py


def stage_costs(
    spec: ModelSpec, local_batch_size: int, seq_len: int, supervised_share: float, recompute: bool,
    frozen: bool = False, draft: str = "no",
) -> tuple[list[float], float, float]:  # fmt: skip
    """Cost of each layer, of the embedding and of the head for one microbatch, in units of the dearest layer's cost.

    A layer costs its matrix products over all tokens (one forward, two backward, one more if recomputed) and attention
    over rows of one document. The head costs the same for its (vocab, hidden) weight over the supervised tokens, is
    always recomputed, and moves its logits through memory several times. Embedding and head each write a gradient of
    the weight's size and add it to the fp32 sum.

    Args:
        supervised_share: supervised tokens per token.
        frozen: the weights have no gradients: one matrix product less, and no gradients to move.
        draft: draft_head.train. A draft head costs its own and the head once more, which it does not train; "after":
            nothing else has a backward.
    """
    tokens = local_batch_size * seq_len
    pairs = tokens * (seq_len + 1) // 2
    frozen, passes = (True, 1) if draft == "after" else (frozen, 3 + recompute - frozen)
    costs = [(2 * tokens * layer.products + layer.pair_flops * pairs) * passes for layer in spec.layers]
    block = max(costs)
    weight = spec.vocab_size * spec.hidden_size
    moved = 0 if frozen else 12 * weight * _FLOP_PER_BYTE  # bf16 gradient written and read, fp32 sum read and written
    supervised = tokens * supervised_share
    logits = _BYTES_PER_LOGIT * _FLOP_PER_BYTE * spec.vocab_size * supervised
    head = 0.0 if draft == "after" else (4 - frozen) * 2 * weight * supervised + logits
    if draft != "no":
        head += (3 + recompute) * _of_draft_head(spec, tokens, pairs) + 3 * 2 * weight * supervised + logits
    return [cost / block for cost in costs], moved / block, (moved + head) / block


def train_flops(
    spec: ModelSpec, tokens: int, supervised_tokens: int, attention_pairs: int, adapter_values: int = 0,
    draft: str = "no",
) -> int:  # fmt: skip
    """FLOPs that one forward and backward need, for model FLOPs utilisation (MFU).

    Counted: real tokens (no padding), the head on supervised tokens, attention inside documents below the diagonal.
    Not counted: recomputation of activations. So MFU is lower here, at the same speed, than by the usual formula
    6 x parameters x tokens.

    Args:
        tokens: real tokens.
        supervised_tokens: tokens with a label.
        attention_pairs: (query, key) pairs inside documents with key <= query: n * (n + 1) / 2 for one of n tokens.
        adapter_values: number of values in LoRA's matrices, if only they are trained; 0: all weights are trained.
        draft: draft_head.train. A draft head is taken to learn as many slots as tokens have a label; in fact it learns
            one fewer of each answer. "after": nothing else has a backward, or needs the vocabulary.

    A matrix product of a weight with one token is 2 FLOPs per weight; backward costs twice the forward, and once
    where the weight is frozen; attention is two products (scores, values) of 2 * head_dim FLOPs per pair and head.
    """
    blocks, attention = _forward_flops(spec.layers, tokens, attention_pairs)
    head = 2 * spec.vocab_size * spec.hidden_size * supervised_tokens
    flops = (2 if adapter_values else 3) * (blocks + head) + 3 * (2 * adapter_values * tokens + attention)
    if draft == "no":
        return flops
    trunk = blocks + attention if draft == "after" else flops
    return trunk + 3 * _of_draft_head(spec, tokens, attention_pairs) + 2 * head


def flops_of_steps(spec: ModelSpec, lora: LoRAConfig, draft: str) -> Callable[[int, int, int], int]:
    """A function (tokens, supervised tokens, attention pairs) -> train_flops of this model and LoRA config.

    Args: draft: draft_head.train.
    """
    adapters = lora.shapes(spec).items()  # without LoRA of no elements
    sizes = (math.prod(shape) for name, shape in adapters if not name.endswith(ROWS))
    return partial(train_flops, spec, adapter_values=sum(sizes), draft=draft)


def recomputed_flops(
    spec: ModelSpec, tokens: int, attention_pairs: int, mode: str, in_pieces: bool = False, draft: str = "no"
) -> int:
    """FLOPs of recomputing the blocks in backward, by activation_checkpoint.mode.

    A block's last matrix product is not recomputed: no backward needs its result. Pieces are recomputed in any mode,
    those of experts whole; a block that is recomputed does not compute them once more, but for a shared expert's.
    """
    layers = [*spec.layers] if draft != "after" else []
    layers += [spec.draft_layer] if draft != "no" and spec.draft_layer else []
    blocks, attention = _forward_flops(layers, tokens, attention_pairs)
    blocks -= 2 * sum(layer.last_product for layer in layers) * tokens
    if in_pieces:
        of_shared = [sum(p.size for n, p in x.parameters.items() if ".shared_expert." in n) // 3 for x in layers]
        pairs = zip(layers, of_shared, strict=True)
        blocks += 4 * sum(of_shared) * tokens
        cut = 2 * sum(3 * x.last_product - (s if x.slots else x.last_product) for x, s in pairs) * tokens
    return {"none": cut if in_pieces else 0, "selective": blocks, "full": blocks + attention}[mode]


def _forward_flops(layers: Iterable[LayerShape], tokens: int, attention_pairs: int) -> tuple[int, int]:
    """Forward FLOPs of layers: of their weight matrices, and of attention."""
    each = [(layer.products, layer.pair_flops) for layer in layers]
    return 2 * sum(products for products, _ in each) * tokens, sum(flops for _, flops in each) * attention_pairs


def _of_draft_head(spec: ModelSpec, tokens: int, attention_pairs: int) -> int:
    """Forward FLOPs of a draft head, without the vocabulary: of its layer and fc."""
    assert spec.draft_layer is not None
    return sum(_forward_flops([spec.draft_layer], tokens, attention_pairs)) + 4 * spec.hidden_size**2 * tokens
