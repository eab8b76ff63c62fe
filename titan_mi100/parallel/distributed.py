"""Distributed basics: process groups, the mesh, small collectives, gradient norms, filling a sharded model, exit."""

import ctypes
import hashlib
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from titan_mi100.config.layout import DATA_PARALLEL, PIPELINE, Layout
from titan_mi100.config.srun import device_index
from titan_mi100.device import accelerator
from titan_mi100.device.accelerator import to_device
from titan_mi100.device.compiler import architecture
from titan_mi100.device.shards import local_of, offset_of
from titan_mi100.errors import SaveError, UserError
from titan_mi100.model.init import Read
from titan_mi100.planning.cards import Gpu
from titan_mi100.planning.hardware import count_gpus, find_gpu

# The names of torch 2.13, which deprecates the older names.
all_gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Up to this many ranks gloo connects every rank to every other at start. The addresses are exchanged through the store:
# with 5,120 ranks each rank would read 210 MB there. Larger jobs connect lazily, on first use. Small jobs do not,
# because torch 2.8 then prints the ranks that are not connected.
_FULL_MESH = 64
_START = timedelta(hours=3)  # time-out of collectives: starting takes long; the watchdog's limits are shorter
_WAITING = timedelta(days=30)  # time-out of the group of wait_for_all; the watchdog's limits are shorter
_LOST = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)  # another process died or is unreachable
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from glibc's malloc.h


_waiting: dist.ProcessGroup | None = None  # the group of wait_for_all; None: the default group


@dataclass(frozen=True)
class World:
    """This process's rank, the number of processes, and this process's device."""

    rank: int
    size: int
    device: torch.device


def init_distributed(has_own_collectives: bool = False) -> World:
    """Initialise torch.distributed from the launcher's environment (RANK, WORLD_SIZE, ...), or as a single process.

    Collectives on GPU tensors use nccl (RCCL on ROCm), those on CPU tensors gloo. A single process needs no network and
    no nccl: nothing here sends its device's tensors.

    Args:
        has_own_collectives: also a single process gathers and reduces its device's tensors by torch's code: FSDP2 of
            torch 2.8, PowerSGD.

    Raises:
        UserError: there are more processes than GPUs, or GPUs that this torch cannot use. Falling back to the CPU would
            make the run extremely slow without a message. Every process of a node raises the same.
    """
    global _waiting
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    present = count_gpus(is_rocm=accelerator.is_rocm())
    usable = accelerator.count()
    if present and not usable:
        raise UserError(
            f"this machine has GPUs ({present}), but torch {torch.__version__} cannot use them; install "
            "a torch built for them, check that you may open /dev/kfd or /dev/nvidia0, or hide them with "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cpu")
    if usable:
        device = accelerator.select(device_index(os.environ, usable))
    else:
        _keep_freed_memory()
    if size > _FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = accelerator.group_backend() if size > 1 or has_own_collectives else "gloo"
    if size > 1:
        dist.init_process_group(backend, timeout=_START)
        _waiting = dist.new_group(backend="gloo", timeout=_WAITING)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # srun can give each task one visible GPU. If several tasks got the same one, they would run out of memory later.
    if usable == 1 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        card = accelerator.properties(device)
        _refuse_shared(f"{socket.gethostname()}/{getattr(card, 'uuid', card.name)}", rank)
    return World(rank, size, device)


def _refuse_shared(device: str, rank: int) -> None:
    """Refuse a GPU that another process uses too. A collective.

    Args:
        device: a name of the GPU that is unique among all nodes.
    """
    holders = dist.distributed_c10d._get_default_store().add(f"titan_mi100/holders/{device}", 1)
    with raise_together():
        if holders > 1:
            raise UserError(
                f"rank {rank}: another process uses the same GPU ({device}); under srun give each task its own GPU "
                "(--gpus-per-task=1), or let each task see all GPUs of its node (--gpus-per-node, --gpu-bind=none)"
            )


def is_about_a_lost_process(error: BaseException) -> bool:
    """Whether the error only says that another process died or does not answer. The cause is in that process's log."""
    return isinstance(error, _LOST) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse. For the CPU only.

    By default glibc returns the memory of each large tensor to the system, and the system fills new memory with zeros:
    a tenth of a step's time on a CPU. Blocks of 32 MiB or more (the largest limit that glibc accepts) are still
    returned: if they were kept, fragmentation would waste memory, 2 GiB in a run of 5.7 GiB.
    """
    with suppress(OSError, AttributeError):  # a C library other than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, -1)


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Build the mesh of all ranks."""
    axes = layout.mesh()
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def new_groups(ranks: list[list[int]]) -> Any:
    """This rank's group of several; None: it is in none of them. A collective."""
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=_START)
    return group


def named_group(name: str) -> tuple[dist.ProcessGroup, int]:
    """The process group with this name, and its size. Custom operators take strings, not groups."""
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    return group, dist.get_world_size(group)


def data_parallel_rank(mesh: DeviceMesh, layout: Layout) -> int:
    """The data-parallel rank, which decides which rows a rank reads. The ranks of a pipeline, of a tensor-parallel and
    of a context-parallel group have the same one.
    """
    rank = 0
    for name in DATA_PARALLEL:
        rank = rank * mesh[name].size() + mesh.get_local_rank(name)
    return rank // layout.context_ranks


def device_name(device: torch.device) -> tuple[str, str, int]:
    """A description of the device, its architecture and its number of compute units; see hardware.find_gpu."""
    if not accelerator.is_gpu(device):
        return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} of them per process", "cpu", 0
    card, arch = accelerator.properties(device), architecture(device)
    return f"{card.name or arch} ({arch}, {card.total_memory / 2**30:.0f} GiB)", arch, card.multi_processor_count


def data_sheet(device: torch.device) -> Gpu | None:
    """The device's data sheet; None: a CPU, or it is not known."""
    if not accelerator.is_gpu(device):
        return None
    return find_gpu(*device_name(device)[1:], accelerator.properties(device).total_memory)


def seed_dropout(seed: int, step: int, dp_rank: int, mesh: DeviceMesh) -> None:
    """Seed torch for a step's dropout, the one thing in training that draws random numbers without a generator.

    Data-parallel ranks and pipeline ranks draw different numbers, ranks that share a row's tokens or heads the
    same. The seed is a pure function of these and the step, so a resumed run draws what an uninterrupted run would.
    """
    where = f"{seed}/dropout/{step}/{dp_rank}/{mesh.get_local_rank(PIPELINE)}"
    torch.manual_seed(zlib.crc32(where.encode()))


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Sum each value over all ranks, in fp64. A collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    sum_in_place(tensor)
    return tensor.tolist()


def sum_in_place(tensor: Tensor) -> None:
    """Sum a tensor over all ranks. A collective."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def gather_values(mine: Tensor, device: torch.device) -> Tensor:
    """Gather (values,) of each rank -> (ranks, values) fp64 on the host, the same on every rank. A collective.

    One gather replaces several reductions if some values are to be summed and others need the maximum.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return mine.to("cpu", torch.float64)[None]
    gathered = torch.empty(ranks * len(mine), dtype=torch.float64, device=device)
    all_gather_tensor(gathered, mine.to(device, torch.float64))
    return gathered.cpu().view(ranks, -1)


def any_rank(mine: object, device: torch.device) -> bool:
    """Whether `mine` is true on any rank. A collective."""
    return sum_over_ranks([float(bool(mine))], device)[0] > 0


def from_rank_zero(make: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Run `make` on rank 0 and return its result on every rank. A collective.

    Args:
        make: returns an object that can be pickled.
        group: a group of all ranks; None: the default group.

    Raises:
        Whatever `make` raises, on every rank (see raise_together).
    """
    box = [None]
    with raise_together(group):
        if dist.get_rank() == 0:
            box = [make()]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def gather(mine: Any) -> list[Any]:
    """Gather every rank's object, ordered by rank. A collective. Its cost grows with the number of ranks: use it for
    rare and small objects.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def first_found(mine: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the object of the lowest rank that has one, on every rank; None if no rank has one. A collective.

    It reduces one number, and broadcasts an object only if there is one. So the usual case is cheap, also with
    thousands of ranks.

    Args:
        mine: this rank's object; None or empty: it has none.
        group: the ranks that take part; None: the default group.
    """
    size = dist.get_world_size(group)
    first = torch.tensor(dist.get_rank(group) if mine else size)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if first == size:
        return None
    box = [mine]
    dist.broadcast_object_list(box, group=group, group_src=int(first))
    return box[0]


_EXPECTED = (UserError, SaveError)  # reported by their message alone, on every rank


@contextmanager
def raise_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context: if any rank raises inside, all ranks raise; otherwise the others would wait forever. A collective.

    A UserError or SaveError is raised again on all ranks with its message. For any other error, the failing rank raises
    its own error with the traceback, and the other ranks raise a RuntimeError that names the rank.

    Args:
        group: the ranks that take part; None: the default group.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    expected = next((number for number, kind in enumerate(_EXPECTED) if isinstance(failure, kind)), None)
    first = first_found(None if failure is None else (dist.get_rank(), expected, str(failure) or repr(failure)), group)
    if failure is not None and expected is None:
        raise failure
    if first is not None:
        rank, number, message = first
        raise RuntimeError(f"rank {rank} failed: {message}") if number is None else _EXPECTED[number](message)


def wait_for_all() -> None:
    """A barrier for long waits. It fails at once if another process has ended, and handles signals while it waits.

    The time-outs of other collectives do not apply: the group is its own. Gloo notices a process that was killed by its
    closed connections; no other rank has to tell it.
    """
    work = dist.all_reduce(torch.zeros(1), group=_waiting, async_op=True)
    pause = 0.01
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, 2.0)
    work.wait()


def same_on_all_ranks(value: str, otherwise: str) -> None:
    """Compare a value over all ranks by its SHA-256. A collective of 64 numbers.

    Raises:
        UserError: the values differ; raised on every rank, with the message `otherwise`.
    """
    digest = torch.tensor([*hashlib.sha256(value.encode()).digest()])
    extremes = torch.cat([digest, -digest])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if not extremes[:32].equal(-extremes[32:]):  # the maximum over the ranks is not the minimum
        raise UserError(otherwise)


@dataclass(frozen=True)
class Gradients:
    """This rank's contribution to the gradient norm and to the finite check.

    Attributes:
        squares: 0-dim fp64: sum of squares over the gradient values this rank owns; replicas are not counted twice.
        finite: 0-dim bool: whether all gradient values on this rank are finite, replicas included.
    """

    squares: Tensor
    finite: Tensor


PIECE = 1 << 16  # elements whose squares a CPU sums at a time


@torch.no_grad()
def measure_gradients(parameters: Iterable[nn.Parameter], copies: Collection[nn.Parameter] = ()) -> Gradients:
    """Measure this rank's gradients, before clipping.

    Args:
        parameters: each with a gradient.
        copies: parameters whose gradients another rank counts.
    """
    counted_elsewhere = {id(parameter) for parameter in copies}
    local: list[Tensor] = []
    counted: list[bool] = []
    for parameter in parameters:
        assert parameter.grad is not None, "a parameter has no gradient"
        gradient, first = local_part(parameter.grad)
        pieces = _pieces(gradient)
        local.extend(pieces)
        counted.extend([first and id(parameter) not in counted_elsewhere] * len(pieces))
    if not local:
        return Gradients(torch.zeros((), dtype=torch.float64), torch.tensor(True))
    squares = _squares(local)
    mask = to_device(torch.tensor(counted), squares.device)
    # The sum over all gradients, replicas included, is finite iff all values are.
    return Gradients(squares.where(mask, 0.0).sum(), squares.sum().isfinite())


def sum_of_squares(values: Tensor) -> Tensor:
    """The sum of squares, 0-dim fp64."""
    return _squares(_pieces(values)).sum()


def _pieces(values: Tensor) -> list[Tensor]:
    # On a CPU torch adds the squares one after the other: with 67M values rounding loses 0.5% of the sum.
    return list(values.reshape(-1).split(PIECE)) if values.device.type == "cpu" else [values]


def _squares(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)).double().square()


def local_part(tensor: Tensor) -> tuple[Tensor, bool]:
    """This rank's shard of a tensor, and whether this rank is the first of those that hold the same shard."""
    if not isinstance(tensor, DTensor):
        return tensor, True
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    first = all(coordinate == 0 or not p.is_replicate() for coordinate, p in zip(where, tensor.placements, strict=True))
    return tensor.to_local(), first


@torch.no_grad()
def fill_parameters(parameters: Iterable[tuple[str, Tensor]], read: Read) -> None:
    """Fill tensors in place. Each rank reads and writes only its own shard.

    Args:
        parameters: (name, parameter or other tensor).
        read: (name, full shape, offset, size) -> that slice of the parameter, on CPU, in any dtype.
    """
    for name, parameter in parameters:
        local = local_of(parameter)
        if local.numel():
            local.copy_(read(name, parameter.shape, offset_of(parameter), tuple(local.shape)))


def exit_process(code: int, together: bool = True) -> NoReturn:
    """End the process by os._exit, without the interpreter's teardown, in which some gloo jobs abort.

    Args:
        code: the exit code.
        together: first wait for all ranks. When one rank ends, the launcher kills the others, possibly before rank 0
            has written how the run ended. False after a crash: some ranks never arrive.
    """
    if together and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # torch creates a temporary folder when it imports this module, and os._exit skips its removal.
    if "torch.distributed.nn.jit.instantiator" in sys.modules:
        with suppress(OSError, AttributeError):
            sys.modules["torch.distributed.nn.jit.instantiator"]._TEMP_DIR.cleanup()
    os._exit(code)
