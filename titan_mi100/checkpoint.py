"""Checkpoints of a run: DCP folders keyed by HF name whatever the layout, written aside and renamed when complete.

A folder `step-N` holds DCP's files (parameters under their HF names, AdamW's state under `optimizer.<name>.<state>`,
tensors only; what a rank's reduction of gradients carries on, under `powersgd.rank-<rank>.`), `trainer.json`, and each
rank's random state in `rng-<rank>.json`.
"""

import base64
import json
import os
import random
import re
import shutil
import warnings
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_mi100.distributed import World, from_rank_zero, raise_together
from titan_mi100.errors import UserError
from titan_mi100.optimizer import named_state
from titan_mi100.parallelize import ParallelModel

_COMMUNICATION = "powersgd."  # begins the names of what each rank keeps of its own


class Checkpointer:
    """Saves a run's checkpoints into one folder and restores from them."""

    def __init__(
        self, folder: Path, keep_latest_k: int, model: ParallelModel, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        self.folder, self.keep_latest_k, self.world = folder, keep_latest_k, world
        self._model, self._optimizer = model, optimizer

    def save(self, step: int, trainer_state: dict[str, Any]) -> Path:
        """Write the checkpoint of this step; afterwards remove the oldest beyond keep_latest_k. A collective.

        Args:
            trainer_state: what JSON can hold; the same on every rank.
        """
        final = self.folder / f"step-{step}"
        aside = self.folder / f".step-{step}.incomplete"
        from_rank_zero(lambda: _fresh_folder(aside))
        # more than one writer thread would swallow a full disk
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.8's own use, for nobody here
        writer = dcp.FileSystemWriter(aside, single_file_per_rank=True, sync_files=True, thread_count=1)
        try:
            dcp.save(dict(self._tensors()) | self._communication_state(), storage_writer=writer)
        except CheckpointException as error:  # a BaseException, which nobody up there expects
            raise OSError(f"{aside}: the checkpoint could not be written: {_first_cause(error)}") from None
        _write_synced(aside / f"rng-{self.world.rank}.json", json.dumps(_random_state(self.world.device)))
        dist.barrier()
        from_rank_zero(lambda: self._seal(aside, final, trainer_state))
        return final

    def _seal(self, aside: Path, final: Path, trainer_state: dict[str, Any]) -> None:
        _write_synced(aside / "trainer.json", json.dumps(trainer_state, indent=1))
        lacking = [rank for rank in range(self.world.size) if not (aside / f"rng-{rank}.json").exists()]
        if lacking:
            raise UserError(
                f"{aside}: the files of ranks {lacking} are not here; on several nodes job.run_folder must be on a "
                "file system that they share"
            )
        aside.rename(final)
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        if self.keep_latest_k:
            for old in list_checkpoints(self.folder)[: -self.keep_latest_k]:
                gone = old.with_name(f".{old.name}.incomplete")  # a kill between the files must not leave a step-N
                old.rename(gone)
                shutil.rmtree(gone)

    def load(self, path: Path, identity: dict[str, Any]) -> dict[str, Any]:
        """Restore model, optimizer and random state in place; returns the trainer state. A collective.

        Args:
            identity: what must be as it was when the checkpoint was made, compared with the trainer state's.

        Raises:
            UserError: the checkpoint is of another run or another model, or cannot be read.
        """
        everything = list(self._tensors())
        tensors = dict(everything)
        everyone: list[dict[str, torch.Size]] = [{}] * self.world.size
        dist.all_gather_object(everyone, {name: tensor.shape for name, tensor in tensors.items()})
        with raise_together():
            trainer_state = _read_json(path / "trainer.json")
            _check_identity(path, trainer_state.get("identity", {}), identity)
            saved = _saved_tensors(path)
            _check_names(path, saved, dict(ChainMap(*everyone)))
        communication = self._empty_communication_state(saved)
        try:
            dcp.load(tensors | communication, storage_reader=dcp.FileSystemReader(path))
        except CheckpointException as error:  # on all ranks, with the failures of all
            raise UserError(_unreadable(path, _first_cause(error))) from None
        for name, tensor in everything:
            if tensor is not tensors[name]:  # a tied weight of which this rank holds both copies
                tensor.copy_(tensors[name])
        prefix = self._prefix(self.world.rank)
        self._model.resume(
            trainer_state["step"], {name.removeprefix(prefix): tensor for name, tensor in communication.items()}
        )
        rng = path / f"rng-{self.world.rank}.json"
        if rng.exists():  # a run on more ranks than the one that saved has none; nothing in training draws numbers
            _set_random_state(_read_json(rng), self.world.device)
        return trainer_state

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that this rank holds, by its name in the checkpoint, which is the same in every layout."""
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()
        for name, tensor in named_state(self._model.named_parameters(), self._optimizer):
            yield f"optimizer.{name}", tensor

    def _communication_state(self) -> dict[str, Tensor]:
        prefix = self._prefix(self.world.rank)
        return {prefix + name: tensor for name, tensor in self._model.communication_state().items()}

    def _empty_communication_state(self, saved: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """To load this rank's into; nothing unless the model wants it and as many ranks as now have saved theirs."""
        ranks = {name.split(".")[1] for name in saved if name.startswith(_COMMUNICATION)}
        if not self._model.has_memory or ranks != {f"rank-{rank}" for rank in range(self.world.size)}:
            return {}
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device=self.world.device)
            for name, entry in saved.items()
            if name.startswith(self._prefix(self.world.rank))
        }

    @staticmethod
    def _prefix(rank: int) -> str:
        return f"{_COMMUNICATION}rank-{rank}."


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _fresh_folder(path: Path) -> None:
    for stale in path.parent.glob(".step-*.incomplete"):  # of a save that was killed
        shutil.rmtree(stale)
    path.mkdir(parents=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(_unreadable(path, error)) from None


def _unreadable(path: Path, why: object) -> str:
    return f"{path}: cannot be read: {why}; remove this checkpoint to resume from the one before"


def _first_cause(error: CheckpointException) -> BaseException:
    return next(cause for cause, _ in error.failures.values())


def _check_identity(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on where the rows, their order or the model would be others."""
    hashed = {"data": "data (its files, the chat template or a [data] setting changed)", "tokenizer": "tokenizer"}
    differing = [
        hashed.get(name) or f"{name} ({_short(saved.get(name))}, now {_short(now[name])})"
        for name in now
        if saved.get(name) != now[name]
    ]
    if differing:
        raise UserError(
            f"{path}: was made with another {', '.join(differing)}; go on with what it was made with, or start "
            "over beside it with --checkpoint.fresh"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."


def _saved_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a cut file leads to
        raise UserError(_unreadable(path / ".metadata", error)) from None
    return {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}


def _check_names(path: Path, saved: dict[str, TensorStorageMetadata], wanted: dict[str, torch.Size]) -> None:
    """DCP would ignore extra tensors in silence; names and shapes must be exactly the run's, over all ranks. Only what
    ranks keep of their own may be there or not: another layout goes on without it.
    """
    shapes = {name: entry.size for name, entry in saved.items() if not name.startswith(_COMMUNICATION)}
    if shapes != wanted:
        odd = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
        raise UserError(
            f"{path}: not a checkpoint of this model: {len(odd)} tensors are missing, unexpected or mis-shaped, "
            f"the first {odd[0]} (checkpoint: {shapes.get(odd[0])}, model: {wanted.get(odd[0])}); "
            "use another job.run_folder, or --checkpoint.fresh"
        )


def _random_state(device: torch.device) -> dict[str, Any]:
    python = random.getstate()
    numpy = np.random.get_state(legacy=True)
    state = {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]],  # type: ignore[index, union-attr]
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    if device.type == "cuda":
        state["cuda"] = base64.b64encode(torch.cuda.get_rng_state(device).numpy().tobytes()).decode()
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((state["numpy"][0], np.array(state["numpy"][1], dtype=np.uint32), *state["numpy"][2:]))

    def tensor(key: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(state[key])), dtype=torch.uint8)

    torch.set_rng_state(tensor("torch"))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(tensor("cuda"), device)
