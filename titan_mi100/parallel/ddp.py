"""DDP: every rank holds the full model; gradients are summed once per step, uncompressed or with PowerSGD."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.log import log
from titan_mi100.model.decoder import CausalLM
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.dtypes import reduce_dtype
from titan_mi100.shapes.base import DRAFT


class ReplicatedModel(ParallelModel):
    """DDP with fp32 weights, which are cast where they are used (layers.local_weight), and fp32 gradients.

    Frozen weights are kept in the compute dtype.

    Attributes:
        ddp: torch's wrapper around the model.
    """

    def __init__(
        self,
        model: CausalLM,
        mesh: DeviceMesh,
        training: TrainingConfig,
        parallelism: ParallelismConfig,
        device: torch.device,
    ) -> None:
        """Args: model: on `device`, see build.parallelize."""
        self.parts, self.device, self._tp = [model], device, mesh["tp"]
        self.is_whole = self._tp.size() == 1
        self._replica, self._step = mesh["dp_replicate"].get_local_rank(), 0
        self.loss_factor = mesh.size()  # DDP always averages over its ranks; multiplying by their number gives the sum
        group = self._group = mesh["dp_replicate"].get_group()
        # A draft head that is trained along is no part of DDP's buckets, so that the model's own are as without it.
        along = model.draft == "along" and model.mtp is not None
        self._drafting = [*model.mtp.parameters()] if along and model.mtp else []
        if along:
            names = [name for name, _ in model.named_parameters() if name.startswith(DRAFT)]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        self.ddp = self.wrapped = DistributedDataParallel(
            model,
            process_group=group,
            init_sync=False,  # the weights are filled in later, with equal values on all ranks
            gradient_as_bucket_view=True,
        )
        self._compression: PowerSGD | None = None
        if parallelism.powersgd_rank:
            self.extra_state_name = "powersgd"
            own = ((name, p) for name, p in self.trained_parameters() if not (along and name.startswith(DRAFT)))
            self._compression = PowerSGD(own, group, parallelism)
        self._sent_in = reduce_dtype(training)
        # DDP reduces in the gradients' dtype; a hook is needed for another dtype, for PowerSGD, and to send nothing.
        gradients = {parameter.dtype for _, parameter in self.trained_parameters()}
        if self._compression is not None or gradients != {self._sent_in} or self.loss_factor == 1:
            self.ddp.register_comm_hook(group, self._reduce)
        # An uncompressed step sends each gradient once.
        self.gradient_bytes = sum(self._sent_in.itemsize * p.numel() for _, p in self.trained_parameters())

    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float, draft_weight: float = 0.0) -> Tensor:
        self._step += 1
        return super().forward_backward(microbatches, weight, draft_weight)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        with nullcontext() if is_last else self.ddp.no_sync():
            yield

    def _after_backward(self) -> None:
        for parameter in self._drafting:
            if parameter.grad is not None:
                sent = parameter.grad.to(self._sent_in).div_(self.loss_factor)
                dist.all_reduce(sent, group=self._group)
                parameter.grad.copy_(sent)
        if self._compression is not None and self._compression.is_on(self._step):
            self.gradient_bytes = self._compression.reduce(self._step)
            self.gradient_bytes += sum(self._sent_in.itemsize * parameter.numel() for parameter in self._drafting)

    def _reduce(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: average a bucket in the reduction dtype. In a compressed step it does nothing:
        PowerSGD reduces all gradients after backward.
        """
        if self._compression is not None and self._compression.is_on(self._step):
            return noop_hook(group, bucket)
        buffer = bucket.buffer()
        sent = buffer.to(self._sent_in).div_(self.loss_factor)
        if self.loss_factor == 1:  # there is no other rank
            buffer.copy_(sent)
            return noop_hook(group, bucket)
        reduced = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return reduced.then(lambda _: buffer.copy_(sent))

    def replicated_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.saved_parameters()] if self._replica else []

    def extra_state(self) -> dict[str, Tensor]:
        return {} if self._compression is None else self._compression.memory()

    def restore_extra_state(self, step: int, state: dict[str, Tensor]) -> None:
        self._step = step
        if self._compression is not None and self._compression.is_on(step):
            self._compression.restore(state)


_MIN_RATE = 2  # a matrix is compressed only if that sends less than 1/2 of its values


def _bucket(name: str, flat: Tensor, views: list[Tensor]) -> Any:
    """An object with the interface of DDP's GradBucket, for torch's PowerSGD hook.

    DDP's own buckets are not usable: DDP rebuilds them after the first backward of every start, so PowerSGD's state,
    which is kept per bucket, would not fit after a resume. `find_unused_parameters` avoids the rebuild, but prints a
    warning from C++ that cannot be filtered.

    Args:
        flat: the gradients of the bucket, (elements,). views: the same memory, in the parameters' shapes.
    """

    # is_last is always False: on a last bucket torch increments its own iteration counter, which `reduce` sets itself.
    return SimpleNamespace(index=lambda: name, buffer=lambda: flat, gradients=lambda: views, is_last=lambda: False)


class PowerSGD:
    """Torch's PowerSGD (Vogels et al., 2019): each matrix is sent as the factors P and Q of P Q^T; the error of this
    approximation is added to the next step's gradient (error feedback).

    A bucket holds the parameters of one layer, or one parameter outside the layers. So the buckets are the same in
    every start of a run.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup, config: ParallelismConfig
    ) -> None:
        self._config = config
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
            orthogonalization_epsilon=1e-8,  # avoids 0 / 0: a step without supervised tokens has gradients of zero
        )

    def is_on(self, step: int) -> bool:
        """Whether this step of the run (counted from 1) is compressed."""
        return step >= self._config.powersgd_start_step

    @torch.no_grad()
    def reduce(self, step: int) -> int:
        """Replace the gradients by their approximate average over the ranks. A collective.

        Returns:
            The bytes that this rank sent.
        """
        every = [parameter.grad for parameters in self._buckets.values() for parameter in parameters]
        total = torch.stack(torch._foreach_norm([gradient for gradient in every if gradient is not None])).sum()
        dist.all_reduce(total, group=self._state.process_group)
        if not total.isfinite():  # the trainer will skip this step; NaN must not enter the errors and Q
            return 0
        self._state.iter = step
        # The generator draws Q: in the first step, or in each step without warm start. Q must be the same on all ranks
        # and after a resume.
        self._state.rng.seed(step)
        sent = 0
        for name, parameters in self._buckets.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            flat = gradients[0].view(-1)  # a single parameter, such as a large embedding, needs no copy
            if len(gradients) > 1:
                flat = torch.cat([gradient.view(-1) for gradient in gradients])
            parts = flat.split([gradient.numel() for gradient in gradients])
            views = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
            before = self._state.compression_stats()[2]
            # Wait for each bucket: torch's callbacks block gloo's few threads, and two of them at once deadlock.
            powerSGD_hook(self._state, _bucket(name, flat, views)).wait()
            sent += (self._state.compression_stats()[2] - before) * flat.element_size()
            torch._foreach_copy_(gradients, views)
        return sent

    def memory(self) -> dict[str, Tensor]:
        """The state that the next step needs: errors (different on each rank), P and Q. Empty before the first step."""
        kinds = self._memory_by_kind()
        return {f"{kind}.{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Restore what `memory` returned. If it does not fit these buckets and settings, warn and start without it."""
        sizes = self._memory_sizes()
        if {key: saved[key].numel() for key in sizes if key in saved} != sizes:
            log.warning(
                "PowerSGD: the checkpoint has no PowerSGD state for this layout, number of processes and powersgd "
                "settings; the error feedback is lost, and Q starts with random values"
            )
            return
        for key in sizes:
            kind, name = key.split(".", 1)
            self._memory_by_kind()[kind][name] = saved[key]

    def _memory_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Torch's own dictionaries: kind -> bucket -> tensor.

        P is overwritten before it is read, but torch needs P and Q to exist together.
        """
        state: Any = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def _memory_sizes(self) -> dict[str, int]:
        """Elements of each tensor that `memory` returns after a compressed step."""
        sizes = {}
        for name, parameters in self._buckets.items():
            p = q = 0
            for n, m in (parameter.shape for parameter in parameters if parameter.ndim == 2):
                # the rule of torch's powerSGD_hook: P is (n, rank), Q is (m, rank)
                rank = min(n, m, self._config.powersgd_rank)
                if (n + m) * rank * _MIN_RATE < n * m:
                    p, q = p + n * rank, q + m * rank
            if self._config.powersgd_error_feedback:
                sizes[f"error.{name}"] = sum(parameter.numel() for parameter in parameters)
            if self._config.powersgd_warm_start:
                sizes |= {f"p.{name}": p, f"q.{name}": q}
        return sizes
