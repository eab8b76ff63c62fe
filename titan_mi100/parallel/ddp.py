"""DDP: every rank holds the whole model; gradients are summed once per step, whole or compressed (PowerSGD)."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from titan_mi100.config.settings import ParallelismConfig, TrainingConfig
from titan_mi100.data.loader import Microbatch
from titan_mi100.logging import log
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.dtypes import reduce_dtype
from titan_mi100.wording import bytes_in_words


class ReplicatedModel(ParallelModel):
    """DDP with its own mixed precision: fp32 weights, cast where they are used (layers.local_weight); fp32 gradients.

    Frozen weights are in the compute dtype.

    Attributes:
        ddp: torch's wrapper around the model.
    """

    def __init__(
        self,
        model: Qwen3,
        mesh: DeviceMesh,
        training: TrainingConfig,
        parallelism: ParallelismConfig,
        device: torch.device,
    ) -> None:
        """Args: model: on `device`, see build.parallelize."""
        self.parts, self.device, self._tp = [model], device, mesh["tp"]
        self._world_size, self._replica, self._step = mesh.size(), mesh["dp_replicate"].get_local_rank(), 0
        group = mesh["dp_replicate"].get_group()
        self.ddp = DistributedDataParallel(
            model,
            process_group=group,
            init_sync=False,  # the weights are filled in later, alike on all ranks
            gradient_as_bucket_view=True,
        )
        self._compression: PowerSGD | None = None
        if parallelism.powersgd_rank:
            self.extra_state_name = "powersgd"
            self._compression = PowerSGD(self.trained_parameters(), group, parallelism)
        self._sent_in = reduce_dtype(training)
        gradients = {parameter.dtype for _, parameter in self.trained_parameters()}
        if self._compression is not None or gradients != {self._sent_in}:
            self.ddp.register_comm_hook(group, self._reduce)
        # until a step is compressed, each gradient is sent once
        self.gradient_bytes = sum(self._sent_in.itemsize * p.numel() for _, p in self.trained_parameters())

    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float) -> Tensor:
        self._step += 1
        losses = []
        for number, microbatch in enumerate(microbatches, start=1):
            is_last = number == len(microbatches)
            with nullcontext() if is_last else self.ddp.no_sync():
                loss = self.ddp(**self._on_device(microbatch))
                # DDP averages over its ranks by construction; the weight asks for the sum
                (loss * (self._world_size * weight)).sum().backward()
            losses.append(loss.detach().double())
        if self._compression is not None and self._compression.is_on(self._step):
            self.gradient_bytes = self._compression.reduce(self._step)
        return torch.cat(losses)

    def _reduce(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: the average in the dtype of reduction. In a compressed step it leaves this rank's gradients as
        they are, for after backward.
        """
        if self._compression is not None and self._compression.is_on(self._step):
            return noop_hook(group, bucket)
        buffer = bucket.buffer()
        sent = buffer.to(self._sent_in).div_(self._world_size)
        reduced = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return reduced.then(lambda _: buffer.copy_(sent))

    def copies(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.trained_parameters()] if self._replica else []

    def extra_state(self) -> dict[str, Tensor]:
        return {} if self._compression is None else self._compression.memory()

    def restore_extra_state(self, step: int, state: dict[str, Tensor]) -> None:
        self._step = step
        if self._compression is not None and self._compression.is_on(step):
            self._compression.restore(state)


_MIN_RATE = 2  # a matrix is compressed if that sends less than a half of it


def _bucket(name: str, flat: Tensor, views: list[Tensor]) -> Any:
    """Gradients that are compressed together, with what torch's hook asks of DDP's buckets.

    DDP's own will not do: it makes others after the first backward of every start, so memory kept by them does not fit
    after a resume; `find_unused_parameters` would keep them, but warns of itself from C++, where nothing filters it.
    """

    # is_last: at a last one torch would count an iteration; here the run's steps are counted
    return SimpleNamespace(index=lambda: name, buffer=lambda: flat, gradients=lambda: views, is_last=lambda: False)


class PowerSGD:
    """Torch's PowerSGD (Vogels et al., 2019): each matrix is sent as P Q^T, and what that lost is added next time.

    Buckets are a layer's parameters, or a single one outside the layers: alike in every start of a run.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup, config: ParallelismConfig
    ) -> None:
        self._config, self._announced = config, False
        self._buckets: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameters:
            parts = name.split(".")
            layer = ".".join(parts[:3]) if parts[1] == "layers" else name
            self._buckets.setdefault(layer, []).append(parameter)
        self._state = PowerSGDState(
            group,
            config.powersgd_rank,
            config.powersgd_start_step,
            min_compression_rate=_MIN_RATE,
            use_error_feedback=config.powersgd_error_feedback,
            warm_start=config.powersgd_warm_start,
            orthogonalization_epsilon=1e-8,  # a step without supervision has gradients of zero, and P is divided by
        )

    def is_on(self, step: int) -> bool:
        """Whether this step of the run, from 1, is compressed."""
        return step >= self._config.powersgd_start_step

    @torch.no_grad()
    def reduce(self, step: int) -> int:
        """Replace every rank's gradients by their approximate average; returns the bytes sent. A collective."""
        every = [parameter.grad for parameters in self._buckets.values() for parameter in parameters]
        total = torch.stack(torch._foreach_norm([gradient for gradient in every if gradient is not None])).sum()
        dist.all_reduce(total, group=self._state.process_group)
        if not total.isfinite():  # the step will be skipped: errors and Q stay those of the step before
            return 0
        self._state.iter = step
        # Seeds the first Q, of each step without warm start: the same on all ranks, and after a resume.
        self._state.rng.seed(step)
        sent = whole = 0
        for name, parameters in self._buckets.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            flat = gradients[0].view(-1)  # a single one, such as a large embedding, is compressed where it lies
            if len(gradients) > 1:
                flat = torch.cat([gradient.view(-1) for gradient in gradients])
            parts = flat.split([gradient.numel() for gradient in gradients])
            views = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
            before = self._state.compression_stats()[2]
            # One bucket after the other: torch's callbacks wait in gloo's few threads, and two of them block for ever.
            powerSGD_hook(self._state, _bucket(name, flat, views)).wait()
            sent += (self._state.compression_stats()[2] - before) * flat.element_size()
            whole += flat.nbytes
            torch._foreach_copy_(gradients, views)
        if not self._announced:
            log.info(
                f"PowerSGD rank {self._config.powersgd_rank} from step {step} on: {bytes_in_words(sent)} per step and "
                f"rank instead of {bytes_in_words(whole)}, {whole / sent:,.0f}x less"
            )
            self._announced = True
        return sent

    def memory(self) -> dict[str, Tensor]:
        """What the next step takes from those before, empty before the first: errors (this rank's own), P and Q."""
        kinds = self._memory_by_kind()
        return {f"{kind}.{name}": tensor for kind, found in kinds.items() for name, tensor in found.items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Restore what `memory` returned; if it does not fit these buckets and settings, warn and start without it."""
        wanted = self._memory_sizes()
        if {key: saved[key].numel() for key in wanted if key in saved} != wanted:
            log.warning(
                "PowerSGD: the checkpoint has no memory that fits this layout, number of processes and powersgd "
                "settings: what was not sent yet is lost, and Q starts at random"
            )
            return
        for key in wanted:
            kind, name = key.split(".", 1)
            self._memory_by_kind()[kind][name] = saved[key]

    def _memory_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Torch's own dictionaries, by bucket. P is overwritten before it is read, but torch asks for both or none."""
        state: Any = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def _memory_sizes(self) -> dict[str, int]:
        """Elements of each tensor in `memory` once a step was compressed."""
        sizes = {}
        for name, parameters in self._buckets.items():
            p = q = 0
            for n, m in (parameter.shape for parameter in parameters if parameter.ndim == 2):
                rank = min(n, m, self._config.powersgd_rank)
                if (n + m) * rank * _MIN_RATE < n * m:
                    p, q = p + n * rank, q + m * rank
            if self._config.powersgd_error_feedback:
                sizes[f"error.{name}"] = sum(parameter.numel() for parameter in parameters)
            if self._config.powersgd_warm_start:
                sizes |= {f"p.{name}": p, f"q.{name}": q}
        return sizes
