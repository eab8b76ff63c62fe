"""Tensor parallel with sequence parallel (Megatron-LM; Shoeybi et al. 2019, Korthikanti et al. 2022).

In norms and residuals each rank holds 1 / tp of the sequence, (batch, seq / tp, hidden). In attention and MLP it holds
the full sequence, but 1 / tp of the heads or of the intermediate size. An all-gather before them and a reduce-scatter
after them change between the two. The embedding and the head are split by vocabulary.

Weights are DTensors on the mesh's tp axis, so that FSDP2 can shard them further and a checkpoint knows their place. The
computation itself uses local tensors (layers.local_weight); the collectives are in forward hooks.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_mi100.device.operators import custom_operator
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.layers import local_weight
from titan_mi100.model.lora import LoRAExpertLinear, LoRALinear
from titan_mi100.model.token_rows import rows_of
from titan_mi100.parallel.distributed import all_gather_tensor, named_group, reduce_scatter_tensor
from titan_mi100.shapes.base import DRAFT


def apply_tensor_parallel(model: CausalLM, mesh: DeviceMesh) -> None:
    """Split the weights over the ranks, and add the collectives as forward hooks, in place.

    Args:
        model: the model or a pipeline stage, on the meta device.
        mesh: the 1-D mesh of the tensor-parallel ranks.
    """
    group = mesh.get_group()

    def gather(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return gather_sequence(output, group.group_name)
        normed, total = output  # of the residual stream, which stays in parts
        return gather_sequence(normed, group.group_name), total

    def scatter(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return scatter_sequence(output, group.group_name)

    for layer in model.blocks():
        held = {name: p for stored_name, p in layer.shape.parameters.items() for name in p.held(stored_name)}
        for name, parameter in held.items():
            path, _, own_name = name.rpartition(".")
            module, dim = layer.get_submodule(path), parameter.split.dim
            split: Shard | Replicate = Replicate() if dim is None else Shard(dim)
            own = [own_name]
            if own_name == "weight":  # and what belongs to it: the scales of NF4's blocks
                own += [n for n, _ in module.named_parameters(recurse=False) if f"{path}.{n}" not in held]
            _distribute(module, own, mesh, split)
            if own_name == "bias" and dim is None:  # of a layer whose outputs are summed over the ranks
                module.adds_bias = mesh.get_local_rank() == 0  # type: ignore[assignment]
            # A reads the layer's input, B writes its output: split like the layer
            if own_name == "weight" and isinstance(module, LoRALinear | LoRAExpertLinear):
                by_output = dim == 0 or parameter.is_transposed
                _distribute(module.lora_A, ["weight"], mesh, Replicate() if by_output else Shard(1))
                _distribute(module.lora_B, ["weight"], mesh, split if by_output else Replicate())
                module.part = (0, 1) if by_output else (mesh.get_local_rank(), mesh.size())
        for names, hook in ((layer.sequence_gathered_after, gather), (layer.sequence_scattered_after, scatter)):
            for name in names:
                layer.get_submodule(name).register_forward_hook(hook)
    for table in (model.model.embed_tokens, model.lm_head):
        if table is not None and (rows := rows_of(table)) is not None:
            _distribute(rows, ["trainable_tokens_delta"], mesh, Replicate())
            rows.first = mesh.get_local_rank() * (len(table.weight) // mesh.size())
    if model.model.embed_tokens is not None:
        _distribute(model.model.embed_tokens, ["weight"], mesh, Shard(0))
        embed = functools.partial(_embed, model.model.embed_tokens, mesh)
        model.model.embed_tokens.forward = embed  # type: ignore[method-assign]
    if (head := model.mtp) is not None:
        for module in (head.fc, head.pre_fc_norm_embedding, head.pre_fc_norm_hidden, head.norm):
            _distribute(module, ["weight"], mesh, Replicate())
        head.norm.register_forward_hook(gather)
        head.part = (mesh.get_local_rank(), mesh.size())
    if model.model.norm is not None:
        _distribute(model.model.norm, ["weight"], mesh, Replicate())
        model.model.norm.register_forward_hook(gather)  # the head needs all tokens for its shard of the vocabulary
        if model.lm_head is not None:
            _distribute(model.lm_head, ["weight"], mesh, Shard(0))
        model.head_loss = functools.partial(model.head_loss, group=group)


def sum_replicated_gradients(parts: Sequence[CausalLM], mesh: DeviceMesh) -> None:
    """Sum the gradients of replicated weights over the tp axis, in place. Each rank has computed a partial sum.

    A norm's gradient covers this rank's part of the sequence or of the heads. The same holds for LoRA's A of a layer
    that is split by output, and for B of a layer that is split by input. Call it once per step, after the last
    backward: it is one collective, and one more for a draft head, so that the others' sums are as without it.
    """
    if mesh.size() == 1:
        return
    trained = [(name, p) for part in parts for name, p in part.named_parameters() if p.requires_grad]
    for is_draft in (False, True):
        _sum_replicated([p for name, p in trained if name.startswith(DRAFT) == is_draft], mesh)


def _sum_replicated(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    gradients = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names[-1] == "tp"  # type: ignore[index]
        if parameter.placements[-1].is_replicate():
            assert isinstance(parameter.grad, DTensor)
            gradients.append(parameter.grad.to_local())
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def gather_vocabulary(logits: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather logits: (n, vocabulary / ranks) of each rank -> (n, vocabulary) on all ranks. A collective."""
    if mesh.size() == 1:
        return logits
    parts = logits.new_empty(mesh.size() * len(logits), logits.shape[1])
    all_gather_tensor(parts, logits.contiguous(), mesh.get_group())
    return torch.cat(parts.chunk(mesh.size()), dim=1)


def _distribute(module: nn.Module, names: Sequence[str], mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    """Replace a module's own parameters of these names by DTensors."""
    for name in names:
        tensor = getattr(module, name)
        assert isinstance(placement, Replicate) or tensor.shape[placement.dim] % mesh.size() == 0, "uneven parts"
        parameter = nn.Parameter(distribute_tensor(tensor.detach(), mesh, [placement]), tensor.requires_grad)
        setattr(module, name, parameter)


def _embed(embedding: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    """Look up the tokens of this rank's part of the vocabulary, then reduce-scatter over the sequence.

    Args:
        ids: (batch, seq), the same on all ranks.

    Returns:
        (batch, seq / tp, hidden).
    """
    weight = local_weight(embedding.weight, embedding.weight.dtype)  # (V / tp, hidden)
    first, pad = mesh.get_local_rank() * len(weight), embedding.padding_idx
    local = ids - first
    outside = (local < 0) | (local >= len(weight))
    pad = pad - first if pad is not None and first <= pad < first + len(weight) else None
    x = F.embedding(local.masked_fill(outside, 0), weight, pad).masked_fill(outside[..., None], 0.0)
    if (rows := rows_of(embedding)) is not None:
        x = rows.put(x, ids, factor=int(mesh.get_local_rank() == 0))
    return scatter_sequence(x, mesh.get_group().group_name)


# These are custom operators because torch's functional collectives treat a non-contiguous gradient (from a compiled
# block) as contiguous: the embedding's gradient was wrong. torch.compile does not trace into custom operators.


@custom_operator("titan_mi100::gather_sequence")
def gather_sequence(x: Tensor, group_name: str) -> Tensor:
    """All-gather: (batch, seq / ranks, hidden) of each rank -> (batch, seq, hidden) on all ranks.

    Its backward is scatter_sequence.
    """
    group, ranks = named_group(group_name)
    # The collective concatenates along dim 0, (ranks x batch, ...); the sequence is dim 1.
    parts = x.new_empty(ranks * len(x), *x.shape[1:])
    all_gather_tensor(parts, x.contiguous(), group)
    return torch.cat(parts.chunk(ranks), dim=1)


@custom_operator("titan_mi100::scatter_sequence")
def scatter_sequence(x: Tensor, group_name: str) -> Tensor:
    """Reduce-scatter: the sum over ranks of (batch, seq, hidden) -> this rank's (batch, seq / ranks, hidden).

    Its backward is gather_sequence.
    """
    group, ranks = named_group(group_name)
    own = x.new_empty(len(x), x.shape[1] // ranks, x.shape[2])
    reduce_scatter_tensor(own, torch.cat(x.chunk(ranks, dim=1)), group=group)
    return own


@gather_sequence.operator.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(len(x), x.shape[1] * named_group(group_name)[1], x.shape[2])


@scatter_sequence.operator.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // named_group(group_name)[1], x.shape[2])


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


gather_sequence.differentiable(lambda ctx, gradient: (scatter_sequence(gradient, ctx.group_name), None), _keep_group)
scatter_sequence.differentiable(lambda ctx, gradient: (gather_sequence(gradient, ctx.group_name), None), _keep_group)
