"""A plain training loop around transformers, as most people write it: equal losses, and its speed."""

from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check.attention import device_and_arch
from gpu_check.sections import Training
from gpu_check.steps import attention_without_trial, changes_of, pooled_weights
from titan_mi100.config.layout import IGNORE
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.workshop.measure.parts import parity
from titan_mi100.workshop.measure.products import samples
from titan_mi100.workshop.measure.training import on_random_rows

_STEPS = 3


def _model(name: str, dtype: torch.dtype) -> Any:
    """The same shape in transformers, with random weights."""
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed") from None
    config = {key: value for key, value in to_hf_config(PRESETS[name]).items() if key != "architectures"}
    with device_and_arch()[0]:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), attn_implementation="sdpa", dtype=dtype
        )
    return model.train()


def losses(tiny: bool) -> dict[str, Any]:
    """Losses and gradient norms of three steps of 0.6B in fp32, each document computed by itself in the plain loop.

    Without clipping and with a large eps: clipping, and Adam with a small eps, would hide a wrong gradient scale.
    """
    name = "debug" if tiny else "0.6B"
    training = Training(name, "full", 64 if tiny else 1024, 1, 2, "none", attention="chunked", dtype="float32")
    optimizer = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0}
    changes = [*changes_of(training), {"optimizer": optimizer, "training": {"max_norm": 0.0}}]
    with pooled_weights(), attention_without_trial(training.attention):
        run = on_random_rows(changes, init_distributed(), 1)
    theirs = _model(name, torch.float32)
    weights = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    missing = theirs.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    rows = run.stream.step(0)
    results = [run.step() for _ in range(_STEPS)]
    runs = [{"name": "the trainer", "losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}]
    run.close()
    adam = torch.optim.AdamW(
        theirs.parameters(), **optimizer, betas=(run.config.optimizer.beta1, run.config.optimizer.beta2)
    )
    runs.append({"name": "the plain loop", "losses": [], "norms": []})
    for _ in range(_STEPS):
        loss, norm = _step(theirs, rows, adam)
        runs[1]["losses"].append(loss)
        runs[1]["norms"].append(norm)
    problem, said = parity(runs)
    return {"runs": runs, "problem": problem, "said": said}


def _step(model: Any, rows: list[dict[str, Tensor]], adam: torch.optim.Optimizer) -> tuple[float, float]:
    """Loss and gradient norm of a step."""
    documents = [document for microbatch in rows for document in _documents(microbatch)]
    count, total = sum(int((labels != IGNORE).sum()) for _, labels in documents), 0.0
    for ids, labels in documents:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / count
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    adam.step()
    adam.zero_grad()
    return total, norm


def _documents(microbatch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document."""
    device, pairs = device_and_arch()[0], []
    for ids, labels, ends in zip(*(microbatch[key] for key in ("input_ids", "labels", "document_ends")), strict=True):
        start = 0
        for end in ends[ends >= 0].tolist():
            pairs.append((ids[start:end].to(device), labels[start:end].to(device)))
            start = end
    return pairs


def speed(seq: int, batch: int, tiny: bool) -> dict[str, Any]:
    """Tokens per second of transformers: bf16 autocast, fp32 weights, fused AdamW, one document a row."""
    device, seq = device_and_arch()[0], 64 if tiny else seq
    model = _model("debug" if tiny else "0.6B", torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (batch, seq), device=device)

    def step() -> None:
        for _ in range(2):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    seconds = median(samples(step, device))
    peak = accelerator.peak_memory(device) / 2**30 if accelerator.is_gpu(device) else 0.0
    rate = 2 * batch * seq / seconds
    said = f"{rate:,.0f} tokens/s, {1000 * seconds:,.0f} ms a step, {peak:.1f} GiB; every token is learned (ours: 65%)"
    return {"tokens_per_second": rate, "seconds": seconds, "peak_memory_gib": peak, "problem": "", "said": said}
