"""The longest documents that fit a card, by method. No torch."""

from titan_mi100.planning.memory import HEAD_BYTES_PER_LOGIT
from titan_mi100.planning.plan import EIGHT_BITS, Change, Plan, make_plan
from titan_mi100.planning.workload import Workload

CARD_SIZES = (8, 12, 16, 24, 32, 64, 80)  # GiB
UNIT = 1024  # lengths are multiples of it
_ADAPTERS: Change = {
    "lora": {"rank": 16, "alpha": 32.0, "dropout": 0.05},
    "optimizer": {"lr": 2e-4, "weight_decay": 0.0},
}
METHODS: dict[str, Change] = {  # ways to train
    "all weights": {},
    "8-bit": {"optimizer": EIGHT_BITS},
    "8-bit, on the host": {"optimizer": EIGHT_BITS, "memory": {"offload": "optimizer"}},
    "LoRA": _ADAPTERS,
    "QLoRA": {**_ADAPTERS, "lora": {**_ADAPTERS["lora"], "base": "nf4"}},
}


def longest(workload: Workload, card: int) -> Plan | None:
    """The plan of the longest rows that fit, in multiples of UNIT tokens, one a forward, two a step, with full
    recomputation; None: not even the shortest fit.

    Args: card: bytes of a card's memory.
    """
    one = {"local_batch_size": 1, "gradient_accumulation_steps": 2, "target_tokens_per_step": 0}
    workload = workload.changed({"training": one, "activation_checkpoint": {"mode": "full"}})

    def plan(count: int) -> Plan:
        return make_plan(workload.changed({"training": {"seq_len": count * UNIT}}), card)

    # From here on a card does not keep its logits, so a step may need less; on either side longer rows need more.
    turn = card // HEAD_BYTES_PER_LOGIT * workload.layout.matrix_parts // workload.spec.vocab_size // UNIT + 1
    low, high = 0, turn
    while plan(high).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle).fits else (low, middle)
    return plan(low) if low else None
