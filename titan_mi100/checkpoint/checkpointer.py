"""Saves and loads a run's checkpoints: DCP folders with HF names in every layout, sealed by a manifest (sealed.py).

A folder `step-N` holds: DCP's files with tensors only (parameters under their HF names, AdamW's state under
`optimizer.<name>.<state>`, per-rank state of a layout under `<kind>.rank-<rank>.`); `trainer.json`; and the
manifest, which names all files, the layout and the fingerprints. Random state is not saved: see seed_dropout.

Only the ranks of the first replica write, and each tensor is written by the first rank that holds it. So nothing is
planned twice, and other replicas send nothing. Traffic does not grow with ranks x tensors, except that rank 0 receives
each entry of `.metadata` once, from the rank that wrote it.
"""

import errno
import json
import shutil
import threading
import time
import warnings
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.hashed_files import HashedFiles
from titan_mi100.checkpoint.keys import OPTIMIZER, parameter_of, rank_of, rank_prefix
from titan_mi100.checkpoint.resume import TRAINER, open_checkpoint
from titan_mi100.config.layout import Layout
from titan_mi100.device import accelerator, pinned
from titan_mi100.device.shards import local_of
from titan_mi100.errors import NumericalError, SaveError, UserError
from titan_mi100.files.durable import sync
from titan_mi100.files.stored import open_dcp
from titan_mi100.log import log
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import (
    World,
    fill_parameters,
    first_found,
    from_rank_zero,
    local_part,
    raise_together,
    same_on_all_ranks,
    sum_over_ranks,
    wait_for_all,
)
from titan_mi100.wording import some

Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype
_PATIENCE = timedelta(hours=2)  # how long a background writer waits for the other ranks' writers


@dataclass(frozen=True)
class _Pending:
    """The last checkpoint that was saved or loaded: it waits until it is complete, and then judged.

    Attributes:
        path: of rank 0, once it is complete; None: it is not, or nothing is left to do.
        verdict: "" sound, else why it is suspect; None: not judged yet.
        is_saved: by this process, so that `best` is known and older ones may be removed.
        best: the best checkpoint, which is kept; None: there is none.
    """

    path: Path | None = None
    verdict: str | None = None
    is_saved: bool = False
    best: Path | None = None


class Checkpointer:
    """Saves a run's checkpoints into one folder and restores from them."""

    def __init__(
        self, folder: Path, model: ParallelModel, optimizer: NamedState, world: World, layout: Layout,
        keep_latest_k: int = 0, in_background: bool = False, assets: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """A collective.

        Args:
            folder: the folder of the checkpoints.
            layout: the model's layout; it determines which ranks write.
            keep_latest_k: how many intact checkpoints to keep; 0: all.
            in_background: copy the tensors to host memory, and let a thread write them while training continues.
            assets: rank 0's; files to put into each checkpoint (config, tokenizer), so that it is usable as a model.
        """
        self.folder, self.world, self._assets = folder, world, assets
        self._model, self._optimizer = model, optimizer
        self._retention = sealed.Retention(folder, keep_latest_k)
        self._lock = threading.Lock()  # guards the next line, which the writer thread uses, too
        self._pending = _Pending()
        self._first_of_stage = world.rank % layout.ranks_per_stage == 0
        # If ranks have state of their own (extra_state), all of them write.
        writers = [rank for rank in range(world.size) if model.extra_state_name or layout.twin(rank) == rank]
        self._writes, self._in_background, self._group = world.rank in writers, in_background, None
        if in_background or len(writers) < world.size:
            # A group of its own, so that collectives of the writer thread never interleave with those of training.
            self._group = dist.new_group(writers, backend="gloo", timeout=_PATIENCE)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._staged: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}  # host memory for copies
        self._is_slow = False  # some of it could not be page-locked
        self._bytes, self.longest_save = 0, 0.0  # a checkpoint over all ranks; longest save, seconds

    def save(
        self,
        step: int,
        trainer_state: dict[str, Any],
        about: dict[str, Any],
        best: int | None = None,
        suspicion: str = "",
    ) -> None:
        """Write the checkpoint of a step. Old ones are removed when this one has been judged. A collective.

        Args:
            trainer_state: JSON values; the same on every rank.
            about: entries of the manifest: `layout`, `fingerprints`, `data`, `rows`.
            best: the step with the best validation loss; its checkpoint is kept, with a link named `best`.
            suspicion: why the weights may be ruined; then the checkpoint is marked as suspect.

        Raises:
            NumericalError: on all ranks; weights or optimizer state are not finite, and nothing was saved.
            SaveError: on all ranks; this save failed, or the previous one in the background.
        """
        self.wait()
        extra = self._extra_state()
        if broken := first_found(_not_finite(dict(self._tensors()) | extra, self._model.passed_through)):
            raise NumericalError(f"step {step}: {broken} is not finite; no checkpoint was made of it")
        tensors = self._written_here() | extra
        size = sum(local_of(tensor).nbytes for tensor in tensors.values())
        self._bytes = self._bytes or round(sum_over_ranks([size], self.world.device)[0])
        record = {"step": step, "torch": torch.__version__, "processes": self.world.size, **about}
        state = json.dumps(trainer_state, indent=1)
        aside = Path(from_rank_zero(lambda: str(self._begin(step))))
        self._pending = _Pending(verdict=suspicion or None)
        staged: dict[str, Tensor] = {}
        with raise_together():
            if self._in_background:  # inside raise_together, because host memory may not suffice on one rank
                staged = self._host_copies(tensors)
            elif self._writes:
                self._write(aside, tensors, state, record, best)
        if not (self._in_background and self._writes):
            return

        def in_background() -> None:
            try:
                self._write(aside, staged, state, record, best)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=in_background, name=f"save-{step}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of a save in the background. A collective.

        Raises:
            SaveError: on all ranks; the save failed.
        """
        if not self._in_background:
            return
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        wait_for_all()  # a collective of training would time out
        with raise_together():
            if self._error is not None:
                raise self._error

    def has_failed(self) -> bool:
        """Whether a save in the background failed. Ranks learn it at different times: first agree, then call `wait`."""
        return self._error is not None

    def judge(self, suspicion: str) -> None:
        """Judge the last saved or loaded checkpoint by the first step after it (its loss uses those weights).

        A suspect checkpoint is marked; a sound one allows the removal of older ones. If the background save has not
        finished, that is done when it has.

        Args:
            suspicion: why the weights may be ruined; empty: they are sound.
        """
        with self._lock:
            if self._pending.verdict is None:
                self._act_on_verdict(replace(self._pending, verdict=suspicion))

    def _act_on_verdict(self, pending: _Pending) -> None:
        """Mark or remove, once checkpoint and verdict are known; else it waits on. Call it with the lock held.

        An error is logged only and does not end the run, because the checkpoint itself is complete.
        """
        self._pending = pending
        path, verdict = pending.path, pending.verdict
        if path is None or verdict is None:
            return
        try:
            if verdict:
                log.warning(f"{path}: is suspect, and a run does not resume from it: {verdict}")
                sealed.mark_suspect(path, verdict)
            elif pending.is_saved:
                self._retention.remove_old(keep_also=pending.best)
        except OSError as error:
            log.warning(
                f"{self.folder}: cannot remove old checkpoints, or mark one as suspect: {error}; the disk will fill up"
            )
        self._pending = replace(pending, path=None)

    def _begin(self, step: int) -> Path:
        """Make the temporary folder of a save. Checks the free space first, by the size of the checkpoint before."""
        with _as_save_error(self.folder, step):
            self.folder.mkdir(exist_ok=True)  # never the run folder itself: it may just have been renamed
            if (free := shutil.disk_usage(self.folder).free) < self._bytes:
                raise OSError(
                    errno.ENOSPC, f"it needs {self._bytes / 2**30:,.2f} GiB, {free / 2**30:,.2f} GiB are free"
                )
            return sealed.begin(self.folder, step)

    def _write(
        self, aside: Path, tensors: dict[str, Tensor], state: str, record: dict[str, Any], best: int | None
    ) -> None:
        """Write and seal all files; the same code in the foreground and in the thread. A collective of the writers."""
        rank, files, began = self.world.rank, HashedFiles(), time.monotonic()
        # One thread: with several, DCP loses the error of a full disk.
        writer = dcp.FileSystemWriter(aside, single_file_per_rank=True, sync_files=False, thread_count=1)
        if self._in_background:
            # The tensors are in host memory already; DCP's copy-ahead would create a context on GPU 0 in this thread.
            writer.per_thread_copy_ahead = 0
        writer.fs, planner = files, DefaultSavePlanner()
        try:
            with raise_together(self._group), _as_save_error(self.folder, record["step"]):
                part = self._write_part(writer, planner, tensors), files.written  # gathered below
                sync(aside)
            everyone: list[Any] | None = [None] * dist.get_world_size(self._group) if rank == 0 else None
            dist.gather_object(part, everyone, dst=0, group=self._group)
            with raise_together(self._group), _as_save_error(self.folder, record["step"]):
                if everyone is not None:
                    parts, written = zip(*everyone, strict=True)
                    plans, results = zip(*parts, strict=True)
                    writer.finish(planner.create_global_plan(list(plans))[1], list(results))
                    self._seal(aside, files, dict(ChainMap(*written)), state, record, best)
            self.longest_save = max(self.longest_save, time.monotonic() - began)
        except Exception:
            if rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _write_part(
        self, writer: dcp.FileSystemWriter, planner: DefaultSavePlanner, tensors: dict[str, Tensor]
    ) -> tuple[SavePlan, list[WriteResult]]:
        """Write this rank's DCP file; returns its plan and results, for DCP's metadata.

        dcp.save would send all plans to rank 0 and back, to find duplicates. Here none exist, because each tensor is
        planned by one rank only, so a rank writes without that exchange.
        """
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.8 causes it itself
        rank = self.world.rank
        planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        numbered = writer.prepare_global_plan([plan] * (rank + 1))[rank]  # entry r writes the file __r_0.distcp
        return plan, writer.write_data(planner.finish_plan(numbered), planner).wait()

    def _seal(
        self,
        aside: Path,
        files: HashedFiles,
        written: sealed.Written,
        state: str,
        record: dict[str, Any],
        best: int | None,
    ) -> None:
        """Rank 0: add the remaining files, write the manifest and rename the folder. `written`: all ranks' files."""
        lacking = [name for name in written if not (aside / name).is_file()]
        if lacking:
            raise UserError(
                f"{aside}: does not have {', '.join(lacking)}, which other ranks wrote; on several nodes "
                "job.run_folder must be on a file system that they share"
            )
        for name, content in self._assets.items():
            files.write(aside / name, content)
        files.write(aside / TRAINER, state.encode())
        with self._lock:
            if verdict := self._pending.verdict:  # before the rename: a kill in between must not leave it unmarked
                sealed.mark_suspect(self.folder / f"step-{record['step']}", verdict)
            path, kept = sealed.seal(aside, written | files.written, record), None
            log.info(f"checkpoint {path}")
            try:
                self._retention.note(path)
                kept = self._mark_best(best)
            except OSError as error:  # the checkpoint itself is complete
                log.warning(f"{self.folder}: cannot mark the best checkpoint: {error}")
            self._act_on_verdict(_Pending(path, verdict, is_saved=True, best=kept))

    def _mark_best(self, step: int | None) -> Path | None:
        path = self.folder / f"step-{step}"
        if step is None or not path.is_dir():
            return None
        sealed.mark_best(path)
        return path

    def mark_best(self, step: int) -> None:
        """Mark an existing checkpoint as the best. A collective."""
        from_rank_zero(lambda: self._mark_best(step) and None)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore model and optimizer in place. Returns the trainer state. A collective.

        Args:
            path: a checkpoint that find_checkpoint has verified.

        Raises:
            UserError: the checkpoint belongs to another model, or it cannot be read.
        """
        tensors = dict(self._tensors())
        with raise_together():
            _, manifest, trainer_state = open_checkpoint(path)
            saved = open_dcp(path, manifest["files"])
        saved_kinds = {name: kind for name, kind in saved.kinds.items() if rank_of(name) is None}
        names = sorted(saved_kinds)
        same_on_all_ranks("\n".join(names), f"{path}: not the same on all ranks; {_SHARED}")
        held = torch.tensor([name in tensors for name in names], dtype=torch.uint8)
        # Names that no rank holds are unexpected. A bit per name is enough; no rank has to send its names.
        dist.all_reduce(held, dist.ReduceOp.MAX)
        with raise_together():
            unexpected = [name for name, is_held in zip(names, held.tolist(), strict=True) if not is_held]
            own_kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            saved_kinds |= self._wider(path, saved_kinds, own_kinds)
            _check_names(path, saved.others, saved_kinds, own_kinds, unexpected)
            extra = self._empty_extra_state(saved.kinds)
            fill_parameters((tensors | extra).items(), lambda name, _, offset, size: saved.read(name, offset, size))
        prefix = rank_prefix(self._model.extra_state_name, self.world.rank)
        self._model.restore_extra_state(
            manifest["step"], {name.removeprefix(prefix): tensor for name, tensor in extra.items()}
        )
        if self.world.rank == 0:
            self._retention.note(path)
            self._pending = _Pending(path if path.parent == self.folder else None)
        return trainer_state

    def _wider(self, path: Path, found: Kinds, wanted: Kinds) -> Kinds:
        """Tensors that are not trained, and that older versions have rounded to 16 bits: they stay as rounded."""
        fixed = (name for name, parameter in self._model.saved_parameters() if not parameter.requires_grad)
        narrow = [n for n in fixed if n in found and found[n][1] == torch.bfloat16 != wanted[n][1]]
        if narrow:
            note = "tensors that are not trained are rounded to bfloat16, as older versions did; they stay as they are"
            log.warning(f"{path}: {len(narrow)} {note}: {some(narrow)}")
        return {name: (found[name][0], wanted[name][1]) for name in narrow}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors that this rank holds, by their names, which are the same in every layout."""
        for name, parameter in self._model.saved_parameters():
            yield name, parameter.detach()
        yield from self._model.passed_through.items()
        for name, tensor in self._optimizer.named_state():
            yield OPTIMIZER + name, tensor

    def _written_here(self) -> dict[str, Tensor]:
        """The tensors that this rank writes: those of which it is the first holder."""
        replicas = set(map(id, self._model.replicated_parameters()))
        owned = {name for name, parameter in self._model.saved_parameters() if id(parameter) not in replicas}
        owned |= self._model.passed_through.keys()

        def is_first(tensor: Tensor) -> bool:
            return local_part(tensor)[1] if isinstance(tensor, DTensor) else self._first_of_stage

        return {name: t for name, t in self._tensors() if parameter_of(name) in owned and is_first(t)}

    def _host_copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, page-locked for a GPU's tensors. The memory is kept for the next save: a copy into new
        memory takes longer."""
        copies = {}
        for name, tensor in tensors.items():
            local = local_of(tensor).detach()
            key = (name, local.shape, local.dtype)
            if key not in self._staged:
                self._staged[key] = self._host_memory(local)
            copy = self._staged[key].copy_(local, non_blocking=True)
            copies[name] = DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy
        accelerator.synchronize(self.world.device)
        return copies

    def _host_memory(self, like: Tensor) -> Tensor:
        try:
            return pinned.page_locked_zeros(like.shape, like.dtype, like.device)
        except (MemoryError, RuntimeError, AssertionError) as error:  # the last two: torch has no such driver
            if not self._is_slow:
                log.warning(f"saves in the background copy more slowly, from memory that is not locked: {error}")
            self._is_slow = True
            return torch.empty(like.shape, dtype=like.dtype)

    def _extra_state(self) -> dict[str, Tensor]:
        prefix = rank_prefix(self._model.extra_state_name, self.world.rank)
        return {prefix + name: tensor for name, tensor in self._model.extra_state().items()}

    def _empty_extra_state(self, saved: Kinds) -> dict[str, Tensor]:
        """Empty tensors to load this rank's extra state into. None unless the same number of ranks has saved it."""
        kind = self._model.extra_state_name
        saved_by = {owner[1] for owner in map(rank_of, saved) if owner and owner[0] == kind}
        if not kind or saved_by != set(range(self.world.size)):
            return {}
        return {
            name: torch.empty(shape, dtype=dtype, device=self.world.device)
            for name, (shape, dtype) in saved.items()
            if name.startswith(rank_prefix(kind, self.world.rank))
        }


@contextmanager
def _as_save_error(folder: Path, step: int) -> Iterator[None]:
    """Turn an error of the file system into a SaveError, whose message every rank raises."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"the disk is full: {why}; free some space, or lower checkpoint.keep_latest_k"
        where = f" ({error.filename})" if error.filename else ""
        raise SaveError(f"{folder}: the checkpoint of step {step} could not be written: {why}{where}") from error


def _not_finite(tensors: dict[str, Tensor], unused: Collection[str]) -> str:
    """The name of the first tensor with infinity or NaN on this rank; empty if there is none."""
    local = {name: local_of(tensor) for name, tensor in tensors.items() if name not in unused}
    local = {name: tensor for name, tensor in local.items() if tensor.is_floating_point() and tensor.numel()}
    sums = [tensor.sum() for tensor in local.values()]  # a fast pass: infinity and NaN survive a sum
    if not sums:  # a pipeline stage of which nothing is trained
        return ""
    device = sums[0].device  # with offloading, some tensors are on the CPU
    if torch.stack([total.to(device, torch.float64) for total in sums]).isfinite().all():
        return ""
    # A sum of finite values can overflow, so look at the tensors themselves.
    return next((name for name, tensor in local.items() if not tensor.isfinite().all()), "")


_OTHER = "use another job.run_folder, or --checkpoint.fresh"
_SHARED = "all nodes must see the same file system"


def _check_names(path: Path, others: list[str], found: Kinds, wanted: Kinds, unexpected: list[str]) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes differ from the run's. Per-rank extra state is not compared:
    another layout resumes without it.

    Args:
        others: entries of the checkpoint that are not tensors.
        found, wanted: the checkpoint's tensors; those that this rank holds.
        unexpected: the checkpoint's tensors that no rank holds.

    Raises:
        UserError: all differences.
    """
    if others:
        raise UserError(f"{path}: has {len(others)} entries that are not tensors, such as {others[0]}; {_OTHER}")
    problems = []
    for label, names in (
        ("missing", wanted.keys() - found.keys()),
        ("unexpected", set(unexpected)),
        ("mis-shaped", {name for name in found.keys() & wanted.keys() if found[name][0] != wanted[name][0]}),
        ("mis-typed", {name for name in found.keys() & wanted.keys() if found[name][1] != wanted[name][1]}),
    ):
        for name in sorted(names)[:1]:
            here, there = (
                f"{tuple(kinds[name][0])} {kinds[name][1]}" if name in kinds else "none" for kinds in (wanted, found)
            )
            problems.append(f"{len(names)} {label}, the first {name} (checkpoint: {there}, model: {here})")
    if problems:
        raise UserError(f"{path}: not a checkpoint of this model: {'; '.join(problems)}; {_OTHER}")
