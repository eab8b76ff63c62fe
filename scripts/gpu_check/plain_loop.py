"""A plain training loop around transformers, as most people write it: equal losses, and its speed."""

from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check.attention import DEVICE
from gpu_check.sections import Training
from gpu_check.steps import open_run
from titan_mi100.config.layout import IGNORE
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.workshop.measure.parts import parity
from titan_mi100.workshop.measure.products import samples

_STEPS = 3
# Without clipping and with a large eps: clipping, and Adam with a small eps, would hide a wrong gradient scale.
_ADAM: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0}


def _model(name: str) -> Any:
    """The same shape in transformers, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {key: value for key, value in to_hf_config(PRESETS[name]).items() if key != "architectures"}
    with DEVICE:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa").float()


def losses(tiny: bool) -> dict[str, Any]:
    """Losses and gradient norms of three steps in fp32; the plain loop computes each document by itself."""
    name, seq = ("debug", 64) if tiny else ("0.6B", 1024)
    training = Training(name, "full", seq, forwards=2, attention="chunked", dtype="float32")
    run, theirs = (
        open_run(training, {"optimizer": {**_ADAM, "beta2": 0.999}, "training": {"max_norm": 0.0}}),
        _model(name),
    )
    weights = {name: weight.detach() for name, weight in run.model.named_parameters()}
    missing = theirs.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    documents = [document for microbatch in run.stream.step(0) for document in _documents(microbatch)]
    results = [run.step() for _ in range(_STEPS)]
    runs = [{"name": "the trainer", "losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}]
    adam = torch.optim.AdamW(theirs.parameters(), **_ADAM)
    steps = [_step(theirs, documents, adam) for _ in range(_STEPS)]
    runs.append({"name": "the plain loop", **dict(zip(("losses", "norms"), zip(*steps, strict=True), strict=True))})
    run.close()
    problem, said = parity(runs)
    return {"runs": runs, "problem": problem, "said": said}


def _step(model: Any, documents: list[tuple[Tensor, Tensor]], adam: torch.optim.Optimizer) -> tuple[float, float]:
    """Loss and gradient norm of a step."""
    count, total = sum(int((labels != IGNORE).sum()) for _, labels in documents), torch.zeros((), device=DEVICE)
    for ids, labels in documents:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    adam.step()
    adam.zero_grad()
    return total.item(), norm.item()


def _documents(microbatch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document of a microbatch with one row."""
    ids, labels, ends = (microbatch[key][0] for key in ("input_ids", "labels", "document_ends"))
    lengths = ends[ends >= 0].diff(prepend=torch.zeros(1, dtype=ends.dtype)).tolist()
    return [*zip(ids.to(DEVICE).split(lengths), labels.to(DEVICE).split(lengths), strict=True)]


def speed(tiny: bool) -> dict[str, Any]:
    """Tokens per second on rows of one document: bf16 autocast, fp32 weights, fused AdamW."""
    name, seq = ("debug", 64) if tiny else ("0.6B", 8192)
    model, ids = _model(name), torch.randint(0, PRESETS[name].vocab_size, (seq,), device=DEVICE)
    adam = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        seconds = median(samples(lambda: _step(model, [(ids, ids)] * 2, adam), DEVICE))
    said = f"{2 * seq / seconds:,.0f} tokens/s; each row is a document, and every token is learned"
    return {"seconds": seconds, "problem": "", "said": said}
