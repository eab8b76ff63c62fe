"""What a run's checkpoints say about it: layout, data, and the fingerprints that must not change on resume.

checkpoint/resume.py compares them; config.settings.FINGERPRINTS names them.
"""

import hashlib
from dataclasses import asdict
from typing import Any

from titan_mi100.config.settings import lora_identity
from titan_mi100.data.answer_store import ByLearnedToken
from titan_mi100.data.answers import ADVANTAGE, SAMPLER, TEACHER
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.shapes.families import fingerprint
from titan_mi100.weights.load import base_identity


def about_run(inputs: RunInputs, of_rows: str) -> dict[str, Any]:
    """Layout, data and fingerprints of the run, for the manifests of its checkpoints. A collective."""
    config, spec, data, layout, batch = inputs.config, inputs.spec, inputs.data, inputs.layout, inputs.batch
    lora, load = dict[str, Any](), config.checkpoint.initial_load_path
    identity = lora_identity(config.lora, spec.adapted)
    for column in (ADVANTAGE, SAMPLER, TEACHER):  # scores can change without the tokens
        if isinstance(own := inputs.columns.get(column), ByLearnedToken):
            of_rows = hashlib.sha256(of_rows.encode() + own.values.tobytes()).hexdigest()
    head, is_after = config.draft_head.identity, config.draft_head.train == "after"
    if config.lora.rank:
        form = {"base": config.lora.base} if config.lora.base != "whole" else {}
        lora = {"lora": {**identity, **form}}
    if config.lora.rank or is_after:
        lora["base"] = base_identity(load, config.training.seed, spec)
    base = {"base": load}
    if config.lora.base_model_name_or_path:
        base["base_model_name_or_path"] = config.lora.base_model_name_or_path
    return {
        **({"lora": {**identity, **base}} if config.lora.rank else {}),
        **({"draft_head": {"base": load}} if is_after else {}),
        "layout": {**asdict(layout), **asdict(batch)},
        "data": data.facts.made_of,
        "rows": data.train_counts.rows,
        "optimizer": {"state": config.optimizer.state, "master": config.optimizer.master},
        "fingerprints": {
            "model": fingerprint(spec),
            "tokenizer": data.facts.tokenizer,
            "data": of_rows,
            "seed": config.training.seed,
            "global_batch_size": batch.global_batch_size,
            **lora,
            **({"objective": config.objective.identity} if config.objective.identity else {}),
            **({"draft_head": head} if head else {}),
        },
    }
