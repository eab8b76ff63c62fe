"""Processes and tensors that are spread over them: start, mesh, sums, clipping, filling a sharded model, clean exit."""

import ctypes
import hashlib
import os
import random
import socket
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_mi100.config.hardware import count_gpus
from titan_mi100.config.layout import Layout
from titan_mi100.config.scheduler import device_index
from titan_mi100.errors import SaveError, UserError
from titan_mi100.model.init import Read

# the names of torch 2.13, which warns of those before
all_gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Gloo connects every rank to every other one at start, through the store: of 5,120 ranks each reads 210 MB there. In
# larger jobs than this each connects to those it talks to, when it does (torch 2.8 then prints which it is not
# connected to, so not in small ones).
_FULL_MESH = 64
# time-outs of collectives: before the first step and where run/watchdog.py watches, whose limits come first; else
_START, _RUNNING = timedelta(hours=3), timedelta(minutes=10)
_LOST = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True)
class World:
    """This process's place."""

    rank: int
    size: int
    device: torch.device


def init_distributed() -> World:
    """Join the job that the launcher's environment describes, or be a job of one process.

    nccl (RCCL on ROCm) for tensors on GPUs, gloo for those on CPU.

    Raises:
        UserError: more processes than GPUs, or GPUs that this torch cannot use: a run that was meant for them must
            not crawl on the CPU instead. Every process of a node finds the same.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    present, usable = count_gpus(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present and not usable:
        raise UserError(
            f"{present} GPU(s) are here, but torch {torch.__version__} cannot use them; install a torch built for them "
            "(check that you may open /dev/kfd or /dev/nvidia0), or hide them with CUDA_VISIBLE_DEVICES= to run on CPU"
        )
    device = torch.device("cpu")
    if usable:
        device = torch.device("cuda", device_index(os.environ, usable))
        torch.cuda.set_device(device)
    else:
        _keep_freed_memory()
    if size > _FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "cpu:gloo,cuda:nccl" if usable else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_START)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if usable == 1 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        found = torch.cuda.get_device_properties(device)
        _refuse_shared(f"{socket.gethostname()}/{getattr(found, 'uuid', found.name)}", rank)
    return World(rank, size, device)


def _refuse_shared(device: str, rank: int) -> None:
    """Refuse a device that another process has too. A collective.

    Args:
        device: its name, not found a second time among all nodes.
    """
    holders = dist.distributed_c10d._get_default_store().add(f"titan_mi100/holders/{device}", 1)
    with raise_together():
        if holders > 1:
            raise UserError(
                f"rank {rank}: another process has its GPU too ({device}); under srun give each task a GPU of its own "
                "(--gpus-per-task=1), or let each see all GPUs of its node (--gpus-per-node, --gpu-bind=none)"
            )


class Patience:
    """Long time-outs while a job starts, shorter ones from the first step on, so that a hang is noticed. An observer.

    The default group keeps its long one: ranks wait in it for files that others write.
    """

    def __init__(self, mesh: DeviceMesh, is_watched: bool) -> None:
        default = dist.distributed_c10d._get_default_group()
        self._groups = [] if is_watched else [group for group in mesh.get_all_groups() if group is not default]

    def after_step(self, step: int, result: object) -> None:
        while self._groups:
            dist.distributed_c10d._set_pg_timeout(_RUNNING, self._groups.pop())


def is_about_a_lost_process(error: BaseException) -> bool:
    """Whether the error is that another process is gone or does not answer; that one knows why, if any."""
    return isinstance(error, _LOST) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _keep_freed_memory() -> None:
    """Let this process use freed memory again. The C library would give each large tensor's back to the system, which
    fills it with zeros before it hands it out: a tenth of a step's time on a CPU. Not tensors from 32 MiB on, the most
    that the library allows: kept, they would leave holes, 2 GiB of them in a run of 5.7.
    """
    with suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, -1)


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks, axes pp, dp_replicate, dp_shard, tp: ranks that communicate most are neighbours.

    A pipeline sends least, so its neighbours may be on different nodes; tensor parallel sends most.
    """
    shape = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """Which rows this rank reads: the same ones as the other ranks of its pipeline and tensor-parallel group."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")


def device_name(device: torch.device) -> tuple[str, str, int]:
    """The device in words, its architecture and its number of compute units, as hardware.find_gpu wants them."""
    if device.type != "cuda":
        return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} of them per process", "cpu", 0
    found = torch.cuda.get_device_properties(device)
    arch = getattr(found, "gcnArchName", "") or f"sm{found.major}{found.minor}"
    return f"{found.name or arch} ({arch}, {found.total_memory / 2**30:.0f} GiB)", arch, found.multi_processor_count


def seed_everything(seed: int) -> None:
    """Seed all generators alike on every rank, so that draws inside libraries are repeatable. Training itself draws
    random numbers only for dropout; see seed_dropout.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_dropout(seed: int, step: int, mesh: DeviceMesh) -> None:
    """Seed torch for a step's dropout: each data-parallel rank and pipeline stage draws its own, tensor-parallel ranks
    the same. A pure function of these, so that a resumed run draws what an uninterrupted one would.
    """
    where = f"{seed}/dropout/{step}/{data_parallel_rank(mesh)}/{mesh.get_local_rank('pp')}"
    torch.manual_seed(zlib.crc32(where.encode()))


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over all ranks, in double precision. A collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def gather_values(mine: Tensor, device: torch.device) -> Tensor:
    """(values,) of each rank -> (ranks, values) fp64 on the host, the same on every rank. A collective.

    Gathered, not summed, for values of which some are to be summed and others need the maximum.
    """
    ranks = dist.get_world_size()
    found = torch.empty(ranks * len(mine), dtype=torch.float64, device=device)
    all_gather_tensor(found, mine.to(device, torch.float64))
    return found.cpu().view(ranks, -1)


def any_rank(mine: object, device: torch.device) -> bool:
    """Whether it is true on any rank. A collective."""
    return sum_over_ranks([float(bool(mine))], device)[0] > 0


def from_rank_zero(make: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What `make` returns on rank 0, on every rank; it runs there only. A collective.

    Args:
        group: of all ranks; None: the default one.
    """
    box = [None]
    with raise_together(group):
        if dist.get_rank() == 0:
            box = [make()]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def gather(mine: Any) -> list[Any]:
    """Every rank's object, by rank. A collective whose cost grows with ranks x objects: for what is rare and small."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def first_found(mine: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The object of the lowest rank that has one, on every rank; None: no rank has. A collective.

    One number is reduced; the object follows only where there is one. So it costs the same whatever a rank has to say,
    and hardly more on thousands of ranks.

    Args:
        mine: None or empty: this rank has nothing.
        group: whose ranks take part; None: the default one.
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
    """Raise on all ranks what any rank raised inside, so that none waits for a rank that has given up. A collective.

    Args:
        group: whose ranks take part; None: the default one.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    expected = next((number for number, kind in enumerate(_EXPECTED) if isinstance(mine, kind)), None)
    first = first_found(None if mine is None else (dist.get_rank(), expected, str(mine) or repr(mine)), group)
    if mine is not None and expected is None:
        raise mine
    if first is not None:
        rank, number, message = first
        raise RuntimeError(f"rank {rank} failed: {message}") if number is None else _EXPECTED[number](message)


def wait_for_all(what: str) -> None:
    """Meet the other ranks, however long they take: unlike in a collective, no timeout of the process group counts."""
    store = dist.distributed_c10d._get_default_store()
    key = f"titan_mi100/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"
    size = dist.get_world_size()
    meeting = -(-store.add(key, 1) // size)  # number of this meeting under this name
    pause = 0.01
    while store.add(key, 0) < meeting * size:
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def same_on_all_ranks(value: str, otherwise: str) -> None:
    """Raise a UserError on every rank if they do not all hold the same value. A collective of 64 numbers."""
    digest = torch.tensor([*hashlib.sha256(value.encode()).digest()])
    extremes = torch.cat([digest, -digest])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if not extremes[:32].equal(-extremes[32:]):  # the largest is not the smallest
        raise UserError(otherwise)


@dataclass(frozen=True)
class Gradients:
    """This rank's part of the gradients, and what it adds to the norm of all.

    Attributes:
        squares: 0-dim fp64: sum of squares over the gradient values this rank owns; replicas are not counted twice.
        finite: 0-dim bool: whether all values are finite that this rank holds, replicas included.
    """

    squares: Tensor
    finite: Tensor


PIECE = 1 << 16


@torch.no_grad()
def measure_gradients(parameters: Iterable[nn.Parameter], copies: Collection[nn.Parameter] = ()) -> Gradients:
    """What a step's gradients are, before they are used.

    Args:
        copies: parameters that this rank holds but another one counts.
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
    squares = _squares(local)
    mask = torch.tensor(counted, device=squares.device)
    # a sum of squares is finite if all of them are
    return Gradients(squares.where(mask, 0.0).sum(), squares.sum().isfinite())


def sum_of_squares(values: Tensor) -> Tensor:
    """0-dim fp64."""
    return _squares(_pieces(values)).sum()


def _pieces(values: Tensor) -> list[Tensor]:
    # On a CPU torch sums squares one after the other: of 67M values 0.5% are lost to rounding.
    return list(values.reshape(-1).split(PIECE)) if values.device.type == "cpu" else [values]


def _squares(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)).double().square()


def local_part(tensor: Tensor) -> tuple[Tensor, bool]:
    """This rank's part of a tensor, and whether it is the first of those that hold it by its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor, True
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    first = all(place == 0 or not p.is_replicate() for place, p in zip(where, tensor.placements, strict=True))
    return tensor.to_local(), first


@torch.no_grad()
def fill_parameters(parameters: Iterable[tuple[str, Tensor]], read: Read) -> None:
    """Set every parameter or other tensor, each rank its own part only.

    Args:
        parameters: with their names.
        read: (name, whole shape, offset, size) -> that part of the parameter, on CPU, in any dtype.
    """
    for name, parameter in parameters:
        local: Tensor = parameter
        offset, size = (0,) * parameter.ndim, tuple(parameter.shape)
        if isinstance(parameter, DTensor):
            size, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            local = parameter.to_local()
        assert tuple(local.shape) == tuple(size), name
        if local.numel():
            local.copy_(read(name, parameter.shape, tuple(offset), tuple(size)))


def leave(code: int, together: bool = True) -> NoReturn:
    """End the process. After finished work some gloo jobs abort in the interpreter's teardown, so there is none.

    Args:
        together: wait for the other ranks, which all come here: the launcher kills those that are left when one is
            gone, maybe before rank 0 has written how the run ended. Not after a crash, where some never come.
    """
    if together and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    if "torch.distributed.nn.jit.instantiator" in sys.modules:  # makes a temporary folder when it is imported
        with suppress(OSError, AttributeError):
            sys.modules["torch.distributed.nn.jit.instantiator"]._TEMP_DIR.cleanup()
    os._exit(code)
