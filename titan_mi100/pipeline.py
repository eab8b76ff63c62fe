"""Pipeline parallel on torch.distributed.pipelining: the stages' cut, the schedule's step, the weight that two hold.

Under a pipeline a stage's gathered weights and its gradients are kept whole, the latter summed in fp32 (the dtype of
reduction), until the schedule's last backward; then they are reduced once. That is ZeRO-1 within a stage.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from titan_mi100.data.loader import Microbatch
from titan_mi100.layout import SCHEDULES, Layout, split_layers, stages_of, stages_on
from titan_mi100.model.attention import Backend
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.model_spec import ModelSpec, end_costs
from titan_mi100.parallelize import ParallelModel, free_gathered, without_dropout, wrap
from titan_mi100.settings import Config
from titan_mi100.tensor_parallel import sum_replicated_gradients


def layers_per_stage(config: Config, spec: ModelSpec, pp: int, supervised_share: float) -> tuple[int, ...]:
    """As the config says, or balanced by what a microbatch costs in each stage.

    Args:
        supervised_share: supervised tokens per token of a row; the head runs on these only.
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_layers_per_stage:
        return parallelism.pipeline_parallel_layers_per_stage
    stages = pp * SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank
    recompute = config.activation_checkpoint.mode != "none"
    training = config.training
    first, last = end_costs(
        spec, training.local_batch_size, training.seq_len, supervised_share, recompute, config.lora.rank > 0
    )
    return tuple(split_layers(spec.num_hidden_layers, stages, first, last))


class PipelinedModel(ParallelModel):
    """This rank's stages and their schedule."""

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        layers: Sequence[int],
        mesh: DeviceMesh,
        config: Config,
        layout: Layout,
        microbatches: int,
        device: torch.device,
    ) -> None:
        """Build this rank's stages on `device`, wrapped.

        Args:
            backend: of attention, shared by the stages.
            layers: layers per stage.
            microbatches: per step; all are alike in shape.
        """
        name, training = config.parallelism.pipeline_parallel_schedule, config.training
        self.device, self._pp, self._tp = device, mesh["pp"], mesh["tp"]
        cuts = stages_of(layers)
        self._v_shaped, self._stages = SCHEDULES[name].v_shaped, len(cuts)
        self._mine = stages_on(self._pp.get_local_rank(), layout.pp, len(cuts), self._v_shaped)
        self.parts = []
        for index in self._mine:
            with torch.device("meta"):
                part = Qwen3(spec, backend, cuts[index])
            wrap(part, mesh, config, layout, device)
            self.parts.append(part.to_empty(device=device))
        self._tied = spec.tie_word_embeddings and not config.lora.rank  # a frozen copy stays as it is
        self._ends = self._make_ends(mesh) if self._tied else None

        dtype = getattr(torch, training.mixed_precision_param)
        rows, tokens = training.local_batch_size, training.seq_len
        self._ids = torch.empty(rows, tokens, dtype=torch.long, device="meta")
        shape = (rows, tokens // layout.tp, spec.hidden_size)
        self._hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        wide = torch.promote_types(dtype, torch.float32)
        self._loss = torch.empty(1, dtype=wide, device="meta", requires_grad=True)
        stages = [self._stage(index, part) for index, part in zip(self._mine, self.parts, strict=True)]
        self._divisor = 1
        kind = get_schedule_class(name)
        self._schedule = kind(
            stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,  # type: ignore[arg-type]
            n_microbatches=max(microbatches, self._stages) if name == "GPipe" else microbatches,
            loss_fn=lambda loss, target: loss.sum() / self._divisor,
            scale_grads=False,
        )
        # torch 2.8 wants as many microbatches as stages of GPipe too, when it is made; it runs with fewer
        self._schedule._n_microbatches = microbatches

    def _stage(self, index: int, part: Qwen3) -> PipelineStage:
        """With the shapes told, so that nothing is run to find them out."""
        is_first, is_last = index == 0, index == self._stages - 1
        return PipelineStage(
            part,
            index,
            self._stages,
            self.device,
            input_args=self._ids if is_first else self._hidden,
            output_args=self._loss if is_last else self._hidden,
            group=self._pp.get_group(),
        )

    def _rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        pp = self._pp.size()
        return min(stage, self._stages - 1 - stage) if self._v_shaped else stage % pp

    def _make_ends(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """The group of the two ranks that hold the tied weight, of this rank's column of the mesh."""
        ends = (self._rank_of(0), self._rank_of(self._stages - 1))
        if ends[0] == ends[1]:
            return None
        mine = None
        for column in mesh.mesh.reshape(len(mesh.mesh), -1).T.tolist():  # every rank makes every group
            pair = [column[end] for end in ends]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                mine = group
        return mine

    def forward_backward(self, microbatches: Sequence[Microbatch], supervised: int) -> Tensor:
        self._divisor = max(supervised, 1)
        # The schedule splits these along dim 0 again. What the host reads is split on the CPU and stays there.
        whole = self._on_device({name: torch.cat([m[name] for m in microbatches]) for name in microbatches[0]})
        ids = whole.pop("input_ids")
        inputs = (ids,) if 0 in self._mine else ()
        losses: list[Tensor] = []
        has_last = self._stages - 1 in self._mine
        # the loss needs no target, but the last stage's schedule does
        self._schedule.step(*inputs, target=ids if has_last else None, losses=losses if has_last else None, **whole)
        self._sum_tied_gradients()
        sum_replicated_gradients(self.parts, self._tp)
        if not losses:
            return torch.zeros(len(microbatches), dtype=torch.float64, device=self.device)
        return torch.stack([loss.detach().double() * self._divisor for loss in losses])

    def _tied_weights(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if self._tied and name == "model.embed_tokens.weight"]

    def _sum_tied_gradients(self) -> None:
        """Both copies of a tied weight get the sum of the embedding's and the head's gradient."""
        local = [_local(weight.grad) for weight in self._tied_weights()]
        if len(local) == 2:  # both ends are here
            local[0] += local[1]
            local[1].copy_(local[0])
        elif local:
            dist.all_reduce(local[0], group=self._ends)

    def copies(self) -> list[nn.Parameter]:
        """The head's copy of a tied weight: it is counted as the embedding."""
        return self._tied_weights()[-1:] if self._stages - 1 in self._mine else []

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch]) -> Tensor:
        """Each microbatch through the stages in turn; while it is in the next stage, this one has the next."""
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        ranks, group = dist.get_process_group_ranks(self._pp.get_group()), self._pp.get_group()
        with without_dropout(self.parts):
            for microbatch in map(self._on_device, microbatches):
                ids = microbatch.pop("input_ids")
                x = ids
                for index, part in zip(self._mine, self.parts, strict=True):
                    before, after = self._rank_of(index - 1), self._rank_of(index + 1)
                    here = self._pp.get_local_rank()
                    if index > 0 and before != here:
                        x = torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self.device)
                        dist.recv(x, ranks[before], group)
                    x = part(x, **microbatch)
                    if index == self._stages - 1:
                        loss_sum += x
                    elif after != here:
                        dist.send(x.contiguous(), ranks[after], group)
        free_gathered(self.parts)
        return loss_sum


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "a tied weight has no gradient"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
