"""Pipeline parallel on torch.distributed.pipelining: this rank's stages, a step of the schedule, tied weights.

FSDP2 within a stage works as ZeRO-1: the gathered weights, and the unsharded gradients in the reduction dtype, stay
until the schedule's last backward; then the gradients are reduced once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titan_mi100.config.layout import SCHEDULES, Stage, received_per_microbatch, stages_on
from titan_mi100.data.microbatch import TOKENS, Microbatch
from titan_mi100.device.shards import local_of
from titan_mi100.log import log
from titan_mi100.model.decoder import CausalLM
from titan_mi100.objectives.base import Objective
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import new_groups
from titan_mi100.parallel.dtypes import compute_dtype
from titan_mi100.parallel.fsdp import begin_microbatch, free_gathered
from titan_mi100.planning.workload import Workload


class PipelinedModel(ParallelModel):
    """This rank's pipeline stages and their schedule."""

    def __init__(
        self, part: Callable[[Stage], CausalLM], workload: Workload, cuts: Sequence[Stage], mesh: DeviceMesh,
        device: torch.device, objective: Objective,
    ) -> None:  # fmt: skip
        """Build this rank's stages.

        Args:
            part: builds a stage of the model on `device`, see build.parallelize.
            cuts: the layers of each stage of the pipeline.
            objective: what is learned.
        """
        config, spec, batch = workload.config, workload.spec, workload.batch
        schedule, microbatches = config.parallelism.pipeline_parallel_schedule, batch.gradient_accumulation_steps
        counts = ", ".join(str(len(cut.layers)) for cut in cuts)
        log.info(f"pipeline: {schedule}, {microbatches} microbatches, layers per stage {counts}")
        self.objective, self.draft = objective, config.draft_head.train
        # Copies of a tied weight need a common gradient only if it is trained; LoRA freezes all but rows of tokens.
        is_trained = self.draft != "after" and bool(not config.lora.rank or config.lora.token_ids)
        self._tied = spec.tie_word_embeddings and is_trained
        # after each update the last stage copies the embedding, for its draft head
        self._is_copied = spec.has_draft_head and not self._tied and is_trained and not config.lora.rank
        self.device, self._pp, self._tp = device, mesh["pp"], mesh["tp"]
        self._stages = len(cuts)
        self._mine = stages_on(self._pp.get_local_rank(), self._pp.size(), len(cuts))
        self.parts = [part(cuts[index]) for index in self._mine]
        # The two ranks that hold the embedding, with this rank's data- and tensor-parallel position; None: it has none.
        columns = mesh.size() // self._pp.size()  # the pipeline is the mesh's outermost axis
        ends = [[column, mesh.size() - columns + column] for column in range(columns)]
        self._ends_group = new_groups(ends) if self._tied or self._is_copied else None

        # Shapes and dtypes of what the stages receive and return; see _stage.
        dtype, tokens = compute_dtype(config.training), config.training.seq_len // workload.layout.row_parts
        self._ids = torch.empty(batch.local_batch_size, tokens * self._tp.size(), dtype=torch.long, device="meta")
        boundary = batch.local_batch_size, tokens, spec.hidden_size
        self._hidden = torch.empty(boundary, dtype=dtype, device="meta", requires_grad=True)
        wide = torch.promote_types(dtype, torch.float32)
        self._loss = torch.empty(self.outputs, dtype=wide, device="meta", requires_grad=True)
        stages = [self._stage(index, part) for index, part in zip(self._mine, self.parts, strict=True)]
        self._weights, self._losses = (1.0, 0.0), list[Tensor]()
        kind = get_schedule_class(schedule)
        self._schedule = kind(
            stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,  # type: ignore[arg-type]
            n_microbatches=max(microbatches, self._stages) if SCHEDULES[schedule].forwards_first else microbatches,
            loss_fn=self._weighted_loss,
            scale_grads=False,  # torch would divide by the number of microbatches; the loss is weighted already
        )
        # The constructor of torch 2.8 demands as many microbatches as stages for GPipe too; the step needs fewer.
        self._schedule._n_microbatches = microbatches
        # Every stage and every tensor-parallel rank reads the same rows. Only the last stage knows the loss.
        first_of_tp = self._tp.get_local_rank() == 0
        self.counts_rows = first_of_tp and self._pp.get_local_rank() == 0
        self.counts_loss = first_of_tp and self._stages - 1 in self._mine

    @property
    def receiving_bytes(self) -> int:
        """Bytes of the receive buffers that torch's schedule keeps per microbatch of a step."""
        if self.draft == "after":
            return 0
        stages = [part.model.stage for part in self.parts]
        return received_per_microbatch(stages) * self._hidden.numel() * self._hidden.itemsize

    def _stage(self, index: int, part: CausalLM) -> PipelineStage:
        """Wrap a stage for torch. Shapes of inputs and outputs are given; otherwise torch would run a forward first."""
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

    def _weighted_loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """The schedule's loss function. It returns the weighted loss for backward, and keeps the unweighted loss."""
        self._losses.append(loss.detach().double())
        return self.weighted(loss, *self._weights)

    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float, draft_weight: float = 0.0) -> Tensor:
        self._weights, self._losses = (weight, draft_weight), []
        if self.draft == "after":  # the schedules of torch demand that every stage has gradients
            for number, microbatch in enumerate(microbatches, start=1):
                begin_microbatch(self.parts, number == len(microbatches), zero_stage=1)
                if (loss := self.forward(microbatch)) is not None:
                    self._weighted_loss(loss, loss).backward()
            free_gathered(self.parts)
            return self._after_schedule(len(microbatches))
        # The schedule splits the tensors along dim 0 into microbatches again, also those that stay on the CPU.
        batch = self._on_device({name: torch.cat([m[name] for m in microbatches]) for name in microbatches[0]})
        ids = batch.pop(TOKENS)
        inputs = (ids,) if 0 in self._mine else ()
        # _weighted_loss ignores the target, but torch demands one on the last stage.
        self._schedule.step(*inputs, target=ids if self._stages - 1 in self._mine else None, **batch)
        self._sum_tied_gradients()
        return self._after_schedule(len(microbatches))

    def _after_schedule(self, microbatches: int) -> Tensor:
        """The losses of a step, see forward_backward."""
        self._after_backward()
        if not self.counts_loss:
            return torch.zeros(microbatches, len(self._loss), dtype=torch.float64, device=self.device)
        return torch.stack(self._losses)

    def _tied_weights(self) -> list[nn.Parameter]:
        trained = self.trained_parameters() if self._tied else ()
        return [p for name, p in trained if name.startswith("model.embed_tokens.")]

    def _sum_tied_gradients(self) -> None:
        """Give both copies of a tied weight the sum of the embedding's and the head's gradient."""
        for weight in self._tied_weights():
            assert weight.grad is not None, "a tied weight has no gradient"
            dist.all_reduce(local_of(weight.grad), group=self._ends_group)

    def after_update(self) -> None:
        """Copy what the draft head reads of the embedding from the first stage to the last."""
        for parameter in self._embedding() if self._is_copied else ():
            dist.broadcast(local_of(parameter.detach()), group=self._ends_group, group_src=0)

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The last stage's copy of the embedding: the norm counts it once, and it is saved once."""
        if self._stages - 1 not in self._mine:
            return []
        return self._embedding() if self._is_copied else self._tied_weights()

    def _embedding(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if name == "model.embed_tokens.weight"]

    def _forward(self, inputs: Microbatch) -> Tensor | None:
        """Run a forward without backward through all stages, with point-to-point transfers between ranks.

        A rank returns as soon as its stages are done, so several microbatches can be in the pipeline at once.
        """
        group, pp = self._pp.get_group(), self._pp.size()
        ranks = dist.get_process_group_ranks(group)
        rest = {name: tensor for name, tensor in inputs.items() if name != TOKENS}
        ids = inputs[TOKENS]
        boundary = (len(ids), ids.shape[1] // self._tp.size(), self._hidden.shape[2])
        x: Tensor | None = ids
        for index, part in zip(self._mine, self.parts, strict=True):
            if index > 0:
                x = torch.empty(boundary, dtype=self._hidden.dtype, device=self.device)
                _send_or_receive(dist.irecv, x, ranks[(index - 1) % pp], group)
            x = part(x, **rest)
            if index < self._stages - 1:
                _send_or_receive(dist.isend, x.contiguous(), ranks[(index + 1) % pp], group)
                x = None
        return x

    def _after_evaluation(self) -> None:
        free_gathered(self.parts)


def _send_or_receive(operation: Callable[..., Any], tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Send or receive as the schedule does, batched: alone it would make a second communicator for each pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()
