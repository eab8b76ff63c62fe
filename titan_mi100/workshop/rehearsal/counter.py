"""Counts the memory of a training step without allocating it: the run's own code on fake tensors (no values).

Model, layout, forward, backward and update are the run's own code. Only as many microbatches are run as can change the
peak. Not counted: workspaces inside kernels, memory of the driver and of communication libraries, and fragmentation in
the allocator.
"""

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed._tools.fake_collectives  # collectives on fake tensors, for torch 2.8
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.config.layout import SCHEDULES, Batch, Layout
from titan_mi100.config.settings import ObjectiveConfig, TrainingConfig
from titan_mi100.data.answers import COLUMNS, PER_ID
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.model import experts
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.loss import HeadMemory
from titan_mi100.model.nf4 import BLOCK
from titan_mi100.objectives.choose import choose
from titan_mi100.optim import lean
from titan_mi100.optim.lean import LeanAdamW, rows_at_a_time
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.parallel import base, distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.context_parallel import ContextRanks
from titan_mi100.parallel.ddp import ReplicatedModel
from titan_mi100.parallel.distributed import build_mesh
from titan_mi100.parallel.offload import HostGradients
from titan_mi100.parallel.pipeline import PipelinedModel
from titan_mi100.planning.memory import (
    ACTIVATIONS,
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    HEAD_LOSS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    layers_per_stage,
)
from titan_mi100.planning.workload import Workload
from titan_mi100.workshop.rehearsal import lone_group as no_others

CPU = torch.device("cpu")
_PIECE = sys.maxsize  # one piece per gradient: the norm's thousands of views take no memory, but fake tensors are slow
_ADD, _TO, _WITH_ROWS = HostGradients._add, Tensor.to, experts._with_rows  # the originals, which the patches below call
# Part of a source file's path -> category of what its code allocates. The stack is searched from the innermost call
# outwards, and the first match counts; so more specific paths come first.
_CALLERS = {
    "torch/distributed/tensor/_op_schema.py": None,  # DTensor infers shapes there; nothing is allocated in a run
    "titan_mi100/device/pinned.py": HOST,
    "titan_mi100/parallel/offload.py": GRADIENTS,
    "titan_mi100/model/loss.py": HEAD_LOSS,
    "titan_mi100/model/": ACTIVATIONS,
    "titan_mi100/attention/": ACTIVATIONS,
    "titan_mi100/optim/": OPTIMIZER,
    "torch/autograd/": ACTIVATIONS,
    "torch/distributed/": COMMUNICATION,
}


@dataclass(frozen=True)
class Count:
    """The memory of one rank in a step.

    Attributes:
        peak: the most bytes on the device at once.
        categories: category (see CATEGORIES) -> its bytes at the peak.
        host: the most bytes in host memory at once.
    """

    peak: int
    categories: dict[str, int]
    host: int


class _Block:
    """The memory of one storage. It has one category; a later label replaces an earlier one."""

    __slots__ = ("category", "size", "storage")

    def __init__(self, category: str) -> None:
        self.category, self.size = category, 0
        self.storage: Any = None


class TensorLedger(TorchDispatchMode):
    """Records every storage that operations create, resize or free. Sizes are those requested, without rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[_Block, int]] = []
        self._blocks: dict[int, _Block] = {}
        self._by_file: dict[str, str | None] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs the operation on local tensors, which come here again
        if function.namespace == "fsdp" and "chunk_cat" in function.name():
            self.label(tree_leaves(args), GRADIENTS)  # FSDP2 copies unsharded gradients into the buffer for reduction
        output = function(*args, **(kwargs or {}))
        for storage in storages(output):
            if storage._cdata not in self._blocks:
                self._note(storage, storage.nbytes())
        return output

    def __enter__(self) -> "TensorLedger":
        resize, ledger = torch.UntypedStorage.resize_, self

        # FSDP2 allocates and frees gathered weights by resizing their storage, which no dispatch mode sees.
        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            ledger._note(storage, size)
            return resized

        self._patch = patch.object(torch.UntypedStorage, "resize_", noted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def label(self, tensors: Iterable[Any], category: str) -> None:
        """Set the category of tensors, whichever code allocated them. Memory on the host stays HOST."""
        for storage in storages([t.to_local() if isinstance(t, DTensor) else t for t in tensors]):
            if storage._cdata not in self._blocks:
                self._note(storage, storage.nbytes())
            block = self._blocks[storage._cdata]
            block.category = HOST if block.category == HOST else category

    def is_on_host(self, tensor: Tensor) -> bool:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return block is not None and block.category == HOST

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            if (category := self._category()) is None:
                return
            block = self._blocks[key] = _Block(category)
            block.storage = weakref.ref(storage, lambda _: self._drop(key, block))
        if size != block.size:
            self.events.append((block, size - block.size))
            block.size = size

    def _drop(self, key: int, block: _Block) -> None:
        self.events.append((block, -block.size))
        block.size = 0
        if self._blocks.get(key) is block:
            del self._blocks[key]

    def _category(self) -> str | None:
        """The category by the code that is running, see _CALLERS; None: it allocates nothing in a real run."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._by_file:
                self._by_file[name] = next((part for part in _CALLERS if part in name), None)
            if (part := self._by_file[name]) is not None:
                return _CALLERS[part]
            frame = frame.f_back
        return ACTIVATIONS

    def peak(self, start: int) -> tuple[int, dict[str, int]]:
        """The peak on the device from an event on, in bytes, and the bytes per category at the peak.

        Args:
            start: index into `events`.
        """
        live, most, when = 0, -1, 0
        for number, (block, change) in enumerate(self.events):
            live += change if block.category != HOST else 0
            if number >= start and live > most:
                most, when = live, number
        categories = dict.fromkeys((*CATEGORIES, HOST), 0)
        for block, change in self.events[: when + 1]:
            categories[block.category] += change
        del categories[HOST]
        return most, categories

    def on_host(self) -> int:
        """The peak of host memory, in bytes."""
        changes = [change for block, change in self.events if block.category == HOST]
        return max(itertools.accumulate(changes), default=0)


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tree_leaves(tree):
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
            is_sparse = tensor.layout is torch.sparse_coo
            for part in (tensor._indices(), tensor._values()) if is_sparse else (tensor,):
                yield part.untyped_storage()


class FusedKernel(Backend):
    """Replaces a fused attention kernel. It saves for backward what such a kernel saves: q, k, v, the output, and one
    fp32 number per token and head (the log-sum-exp).
    """

    name = "counted"

    def prepare(self, documents: Documents, device: torch.device) -> None:
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: None) -> Tensor:
        return _KernelMemory.apply(q, k, v)


class _KernelMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, _, sums = ctx.saved_tensors
        _delta = torch.empty_like(sums)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def ranks_of_stages(layout: Layout) -> list[int]:
    """One rank per pipeline stage. The other ranks of a stage hold the same amount."""
    return [stage * layout.ranks_per_stage for stage in range(math.prod(layout.shape()) // layout.ranks_per_stage)]


@dataclass(frozen=True)
class FakeRank:
    """One rank of a run, with tensors without values and collectives that do nothing.

    Attributes:
        microbatches: per step.
        device_memory: bytes of the GPU's memory; 0: a CPU.
    """

    workload: Workload
    microbatches: int
    device_memory: int
    model: ParallelModel
    ledger: TensorLedger
    mode: FakeTensorMode

    def count_step(self) -> Count:
        """Run one step with a new optimizer and count its memory."""
        config, model, ledger = self.workload.config, self.model, self.ledger
        is_on_host = config.memory.offload == "weights"
        rows = inputs(config.training, config.objective, self.microbatches)  # live until the end, as in a run
        optimizer = build_optimizer(model.trained_parameters(), config.optimizer, 0, CPU, model.host_gradients)
        ledger.label((tensor for _, tensor in optimizer.named_state()), HOST if is_on_host else OPTIMIZER)
        trained = [parameter for _, parameter in model.trained_parameters()]
        start = len(ledger.events)
        model.forward_backward(rows, 1.0)
        ledger.label((parameter.grad for parameter in trained), HOST if is_on_host else GRADIENTS)
        model.measure_gradients()
        elements = {False: lean.ELEMENTS[self.device_memory > 0 and not is_on_host]}
        with patch.dict(lean.ELEMENTS, elements), first_rows_only():
            optimizer.update(0.5)
        peak, categories = ledger.peak(start)
        model.clear_gradients()
        # A pipeline's receive buffers grow with the microbatches; add those of the microbatches that were not run.
        missing = self.workload.batch.gradient_accumulation_steps - self.microbatches
        received = missing * model.receiving_bytes if isinstance(model, PipelinedModel) else 0
        categories[COMMUNICATION] += received
        return Count(peak + received, categories, ledger.on_host())


class _FakePlacement(Placement):
    """On the CPU, but as on a GPU if it has a memory. The model is built on the meta device, as in a run; only then it
    becomes fake.
    """

    is_gpu = property(lambda self: self.memory > 0)  # type: ignore[assignment]

    def put(self, build: Callable[[], CausalLM], weights: torch.device, dtype: torch.dtype) -> CausalLM:
        with unset_fake_temporarily():
            part = build()
        return part.to_empty(device=CPU)


@contextmanager
def as_rank(
    workload: Workload, rank: int, microbatches: int, device_memory: int = 0, backend: Backend | None = None
) -> Iterator[FakeRank]:
    """Build one rank of a run on fake tensors. This process must not be in a process group.

    Args:
        microbatches: per step.
        device_memory: bytes of memory of the GPU to count for; 0: a CPU.
        backend: the attention backend; None: a fused kernel.
    """
    config, ranks, layout = workload.config, workload.ranks, workload.layout
    change: dict[str, Any] = {"training": {"gradient_accumulation_steps": microbatches, "target_tokens_per_step": 0}}
    change["lora"] = {"token_ids": tuple(range(len(config.lora.trainable_tokens)))}  # any ids: no tokenizer is read
    head = HeadMemory.of_gpu(device_memory) if device_memory else HeadMemory()
    layers = layers_per_stage(workload, 1.0, device_memory) if layout.is_pipeline else ()
    with no_others.group(rank, ranks), TensorLedger() as ledger:
        mesh = build_mesh(layout, CPU)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            computation = Computation(backend or FusedKernel(), head, choose(config.objective, config.draft_head.train))
            model = build_model(workload.changed(change), computation, _FakePlacement(mesh, CPU, device_memory), layers)
            if model.context is not None:
                describe = partial(_describe_whole_rows, model.context)
                for part in model.parts:
                    part.register_forward_pre_hook(describe, prepend=True, with_kwargs=True)
            if isinstance(model, ReplicatedModel):
                no_others.patch_ddp(model.ddp)
            where = HOST if config.memory.offload == "weights" else PARAMETERS
            copying = partialmethod(_copy_between_devices, ledger)
            ledger.label((parameter for _, parameter in model.named_parameters()), where)
            with (
                patch.object(schedules._PipelineSchedule, "_warmup_p2p", no_others.agree, create=True),
                patch.object(HostGradients, "_add", partialmethod(_add_labelled, ledger)),
                patch.object(distributed, "PIECE", _PIECE),
                patch.object(base, "with_draft", _with_draft),
                patch.object(experts, "_with_rows", _restored_at_once) if device_memory else nullcontext(),
                patch.object(Tensor, "to", copying) if where == HOST else nullcontext(),
            ):
                yield FakeRank(workload, microbatches, device_memory, model, ledger, mode)


def _describe_whole_rows(context: ContextRanks, part: CausalLM, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """As parallel.base.read_on_host does it with the loader's columns, which `inputs` does not have."""
    batch, seq = kwargs["labels"].shape
    with unset_fake_temporarily():
        index = np.arange(batch * seq).reshape(batch, seq)[:, :-1].flatten()
        supervised = context.share(index, CPU)
    documents = part.model.prepare(Documents.one_per_row(batch, seq), CPU)
    return args, {**kwargs, "supervised": supervised, "documents": documents}


def _with_draft(microbatch: Microbatch) -> Microbatch:
    """Replace data.microbatch.with_draft: of a document in each row all slots but the last two are learned."""
    labels = microbatch["labels"]
    learned = torch.zeros(labels.shape[0] * (labels.shape[1] - 2), dtype=torch.long)
    return {**microbatch, "next_ids": labels, "draft_labels": labels, "draft_supervised": learned}


def first_rows_only() -> AbstractContextManager[object]:
    """Lean updates work on two pieces of each shape inside: the others take no more memory, and send nothing."""
    return patch.object(LeanAdamW, "_update", partialmethod(_update_first_rows, seen=set()))


def _update_first_rows(optimizer: LeanAdamW, parameter: nn.Parameter, numbers: Any, seen: set[Any]) -> None:
    """Replace LeanAdamW._update: update only the first two pieces of rows. The other pieces reuse their buffers.

    Args:
        seen: shapes that were updated before; another parameter of the same shape needs no more memory.
    """
    local, is_on_host = optimizer._rows_of(parameter), parameter in optimizer._on_host
    if (kind := (local["weight"].shape, is_on_host)) in seen:
        return
    seen.add(kind)
    size = 2 * rows_at_a_time(False, local["weight"].shape[1], is_on_host)
    first = {name: tensor[:size] for name, tensor in local.items()}
    optimizer._update_local(first, 0, parameter.shape[-1], numbers, is_on_host)


def _restored_at_once(counts: list[int], stored: Sequence[Tensor]) -> Iterator[tuple[int, slice, Tensor]]:
    """Replace experts._with_rows as our kernels would on a GPU: of matrices in 4 bits all are restored at once."""
    of_all = stored if len(stored) == 1 else [stored[1].new_empty(len(stored[1]), stored[1].shape[1] * BLOCK)]
    yield from _WITH_ROWS(counts, of_all)


def _copy_between_devices(
    tensor: Tensor, ledger: TensorLedger, *to: Any, non_blocking: bool | None = None, **others: Any
) -> Tensor:
    """Replace Tensor.to: FSDP2's copies between device and host. Both are CPU tensors here, so a copy is made
    explicitly and labelled by its destination.
    """
    if non_blocking is None:
        return _TO(tensor, *to, **others)
    copy = tensor.clone()
    ledger.label([copy], COMMUNICATION if ledger.is_on_host(tensor) else HOST)
    return copy


def _add_labelled(host: HostGradients, ledger: TensorLedger, gradient: Tensor, entry: Any) -> None:
    ledger.label([gradient], GRADIENTS)
    _ADD(host, gradient, entry)


def enough_microbatches(layout: Layout, batch: Batch, schedule: str) -> int:
    """How many microbatches of a step have to be run; more do not change the peak.

    Without a pipeline two: the second one adds to gradients that exist already. With a pipeline four per stage: it is
    full then. A schedule that keeps the activations of all microbatches runs all of them.
    """
    microbatches = batch.gradient_accumulation_steps
    if layout.is_pipeline and SCHEDULES[schedule].forwards_first:
        return microbatches
    return min(microbatches, 4 * layout.pipeline_ranks if layout.is_pipeline else 2)


def inputs(training: TrainingConfig, objective: ObjectiveConfig, microbatches: int) -> list[Microbatch]:
    """The microbatches that need most memory: each row is one document, and all tokens but the last are supervised."""
    shape, k = (training.local_batch_size, training.seq_len), objective.ids_per_token
    columns = {
        name: torch.ones(*shape, *[k] * (name in PER_ID), dtype=getattr(torch, COLUMNS[name]))
        for name in choose(objective).columns
        if name in COLUMNS
    }
    return [{**one_document_per_row(*shape), **columns}] * microbatches


def one_document_per_row(batch: int, seq: int) -> Microbatch:
    """Rows of one document of token 0, of which all tokens but the last are supervised: they need most memory."""
    ids = torch.zeros(batch, seq, dtype=torch.long)
    learned = torch.arange(ids.numel()).view(batch, seq)[:, :-1].flatten()
    positions = torch.arange(seq).expand(batch, seq)
    return {"input_ids": ids, "labels": ids, "positions": positions, "document_ids": ids, "supervised": learned}
