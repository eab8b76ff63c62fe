"""A microbatch's way into the model: what moves to the device, and what the host reads before the forward.

The loader describes documents and supervised tokens in CPU tensors, (batch, seq) and padded, because a pipeline
schedule splits tensors on dim 0. The model wants Python integers and a flat index instead. The change between the two
happens in a forward pre-hook on the CPU, so that no forward waits for the device to learn a size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_mi100.model.attention import Backend, Documents, to_device
from titan_mi100.model.qwen3 import Qwen3

READ_ON_HOST = ("document_ends", "supervised_columns")
_NOT_FOR_THE_MODEL = ("document_ids",)  # only counted and shown


def model_inputs(microbatch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The model's arguments from a microbatch on the CPU; those that the host reads stay there."""
    return {
        name: tensor if name in READ_ON_HOST else to_device(tensor, device)
        for name, tensor in microbatch.items()
        if name not in _NOT_FOR_THE_MODEL
    }


def supervised_index(columns: Tensor) -> Tensor:
    """Positions of the supervised tokens in the flattened batch, (n,) int64 on the CPU; [0] if there are none.

    Args:
        columns: (batch, seq) integers on the CPU: the supervised columns of each row, then -1.

    The index is never empty, so every rank runs the head, and with it the same collectives. A token that stands in for
    none has the label IGNORE, which weighs zero.
    """
    assert columns.device.type == "cpu", "the supervised columns are read on the host"
    found = columns.numpy().astype(np.int64)
    flat = (found + found.shape[1] * np.arange(len(found))[:, None])[found >= 0]
    return torch.from_numpy(flat if len(flat) else np.zeros(1, dtype=np.int64))


def read_on_host(model: Qwen3, device: torch.device) -> None:
    """Let a model, or a pipeline stage, take a microbatch's host tensors. Call it after `fully_shard`.

    FSDP2's own pre-hook moves every tensor argument to the device, where reading it would make the host wait. A hook
    that is prepended later runs first. A pipeline calls the stage itself, so wrapping the call is no alternative.
    """

    def describe(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "document_ends" in kwargs:  # a loader's microbatch
            kwargs = describe_on_host(model.model.backend, kwargs, device)
        return args, kwargs

    model.register_forward_pre_hook(describe, prepend=True, with_kwargs=True)


def describe_on_host(backend: Backend, inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs with `documents` and `supervised`, as Qwen3.forward takes them, instead of the host's two tensors."""
    described = {name: value for name, value in inputs.items() if name not in READ_ON_HOST}
    described["documents"] = backend.prepare(Documents.from_ends(inputs["document_ends"]), device)
    described["supervised"] = to_device(supervised_index(inputs["supervised_columns"]), device)
    return described
