"""The pass that reads a model's log probabilities of all rows: for a reference, and of a teacher.

It runs in the run's layout, part by part. Every rank makes the same calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import torch

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.data.answer_store import SAMPLED, Arrays, Identity, LogprobStore, Wanted
from titan_mi100.data.loader import validation_batches
from titan_mi100.data.prepared import PADDING_ROW, PackedDataset
from titan_mi100.data.rows import Row
from titan_mi100.errors import Preempted
from titan_mi100.files.durable import sha256_of
from titan_mi100.log import ByteProgress, log
from titan_mi100.objectives.record import Record, SampledLogp
from titan_mi100.open_run.columns import packed
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import from_rank_zero, gather_values, raise_together
from titan_mi100.weights.load import base_identity


class _ConcatenatedRows:
    """The rows of several sets, one after the other, or a part of them; what validation_batches reads of a RowSet."""

    def __init__(self, sets: Sequence[PackedDataset], part: range | None = None) -> None:
        self.sets = sets
        self._ends = list(accumulate(map(len, sets)))
        self.part = range(self._ends[-1]) if part is None else part

    def __len__(self) -> int:
        return len(self.part)

    def _place(self, index: int) -> tuple[PackedDataset, int]:
        number = self.part[index]
        which = next(i for i, end in enumerate(self._ends) if number < end)
        return self.sets[which], number - self._ends[which] + len(self.sets[which])

    def row(self, index: int) -> Row:
        rows, number = (self.sets[0], PADDING_ROW) if index == PADDING_ROW else self._place(index)
        return rows.row(number)

    def documents_of(self, index: int) -> np.ndarray:
        rows, number = self._place(index)
        return rows.documents_of(number)


def _adapters_of(lora: LoRAConfig) -> str:
    """Identifies the initial adapter of a LoRA run, beside its base: the base's format and the adapter's files."""
    if not lora.rank:
        return ""
    files = sorted(Path(lora.initial_load_path).glob("*.safetensors")) if lora.initial_load_path else []
    return " ".join(["", lora.base, *map(sha256_of, files)])


class LogprobPass:
    """Reads what the model thinks of all rows of the data."""

    def __init__(self, inputs: RunInputs, dp_rank: int) -> None:
        self._inputs, self._dp_rank = inputs, dp_rank
        self._rows = _ConcatenatedRows([*map(packed, (*inputs.data.sources, *inputs.data.validation))])
        self._vocabulary = inputs.data.facts.n_vocab or inputs.spec.vocab_size  # without the model's padding
        self.wanted = Wanted(self._rows.sets, self._vocabulary)

    def about(self, k: int, attention: str, kind: str = "") -> Identity:
        """Identify a store of this pass. A collective.

        Args:
            k: see Wanted.about.
            attention: backend.
            kind: SAMPLED: k = 1, the learned ids.
        """
        config, layout, make = self._inputs.config, self._inputs.layout.describe(), self.wanted.about
        adapters = from_rank_zero(partial(_adapters_of, config.lora))
        base = base_identity(config.checkpoint.initial_load_path, config.training.seed, self._inputs.spec)
        scaling = self._inputs.spec.rope_scaling  # changes what the same weights compute
        weights, dtype = base + adapters + (str(scaling) if scaling else ""), config.training.mixed_precision_param
        tokenizer = self._inputs.data.facts.tokenizer
        about: Identity = from_rank_zero(lambda: make(weights, tokenizer, k, dtype, attention, layout))
        return replace(about, kind=kind or about.kind)

    def fill(
        self, model: ParallelModel, store: LogprobStore, stop: Callable[[], bool], beat: Callable[[], None], cache: Path
    ) -> None:
        """Make the parts that the store lacks; rank 0 writes them. A collective.

        Args:
            stop: whether this process was told to. beat: called for each microbatch. cache: see LogprobStore.verify.

        Raises:
            Preempted: told to stop; the parts before are kept.
            UserError: the store cannot be written.
        """
        about = store.about
        missing: list[int] = from_rank_zero(lambda: [n for n in range(about.parts) if n not in store.parts])
        with raise_together():
            if self._inputs.world.rank == 0:
                store.begin()
                store.verify(self.wanted, cache)
        amount = f"{about.kind}: log probabilities of {len(self._rows):,} rows"
        log.info(f"{amount}, {len(missing)} of {about.parts} parts are to be made, in {store.folder}")
        with ByteProgress(about.kind, len(missing) * about.part_rows) as progress:
            for number in missing:
                first = number * about.part_rows
                part = range(first, min(first + about.part_rows, len(self._rows)))
                try:
                    arrays = self.read(model, part, about, beat, stop)
                except Preempted:
                    amount = f"{len(store.parts)} of {about.parts} parts, which are kept"
                    raise Preempted(f"stopped: the {about.kind} is complete in {amount}") from None
                with raise_together():
                    if self._inputs.world.rank == 0:
                        store.write(number, arrays, self.wanted)
                progress.advance(about.part_rows)

    def read(
        self,
        model: ParallelModel,
        part: range,
        about: Identity,
        beat: Callable[[], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> Arrays:
        """The arrays of a part of the rows, on rank 0; elsewhere empty. A collective.

        Raises:
            Preempted: a process was told to stop.
        """
        k, arrays, done = about.k, list[Arrays](), 0
        rows, width, record = _ConcatenatedRows(self._rows.sets, part), max(1, 2 * k), Record(k, self._vocabulary)
        record = SampledLogp() if about.kind == SAMPLED else record
        local, ranks = self._inputs.batch.local_batch_size, self._inputs.batch.dp_degree
        batches = validation_batches(rows, self._inputs.batch, self._dp_rank)  # type: ignore[arg-type]
        own = self._dp_rank if model.counts_loss else -1  # of each data-parallel rank one rank's values count
        with model.with_objective(record), model.evaluating():
            at_once = 2 * self._inputs.layout.pipeline_ranks  # as many as keep a pipeline busy
            while some := list(islice(batches, at_once)):
                tensors = [torch.tensor([own, stop()], dtype=torch.float64)]
                for microbatch in some:
                    beat()
                    output = model.forward(microbatch)
                    size = microbatch["labels"].numel() * width
                    tensors.append(torch.zeros(size, dtype=torch.float64) if output is None else output.cpu())
                gathered = gather_values(torch.cat(tensors), self._inputs.world.device)
                if gathered[:, 1].any():
                    raise Preempted("while log probabilities were read")
                if self._inputs.world.rank == 0:
                    # a microbatch of data-parallel rank r begins at row r x local of its round
                    of_rank = {int(each[0]): each[2:].view(len(some), local, -1, width) for each in gathered}
                    dense = torch.stack([of_rank[rank] for rank in range(ranks)], dim=1).flatten(0, 2)
                    arrays.append(self._arrays(rows, range(done, min(done + len(dense), len(rows))), dense.numpy(), k))
                done += len(some) * local * ranks
        return {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]} if arrays else {}

    def _arrays(self, rows: _ConcatenatedRows, indices: range, dense: np.ndarray, k: int) -> Arrays:
        """Args: dense: (rows, seq, width), as Record returns it, of these rows, then of padding."""
        numbers, tokens, sums, chosen = list[int](), list[int](), list[float](), [np.zeros((0, 2 * k))]
        for place_of_row, index in enumerate(indices):
            row = rows.row(index)
            learned = row.supervised()[1:]  # of the position before: it predicts the token
            for position, document in enumerate(rows.documents_of(index).tolist()):
                mask = learned & (row.document_ids[:-1] == position)
                numbers.append(document)
                tokens.append(int(mask.sum()))
                if k:
                    chosen.append(dense[place_of_row, :-1][mask])
                else:
                    sums.append(float(dense[place_of_row, position, 0]))
        arrays: dict[str, np.ndarray] = {"documents": np.array(numbers, np.int64), "tokens": np.array(tokens, np.int64)}
        if not k:
            return {**arrays, "sums": np.array(sums)}
        every = np.concatenate(chosen)
        return {**arrays, "ids": every[:, :k].astype(np.int32), "log_p": every[:, k:].astype(np.float32)}
