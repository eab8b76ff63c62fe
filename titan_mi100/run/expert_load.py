"""How many rows each expert computes: `experts.json`, two curves, and a warning about experts that get none."""

import json
from pathlib import Path

import torch

from titan_mi100.files.durable import replace
from titan_mi100.log import log
from titan_mi100.model.experts import Mixture
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import sum_in_place
from titan_mi100.run.metrics import Reporter
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.trainer import StepResult
from titan_mi100.wording import some

FILE = "experts.json"
_LONG = 100  # steps without a row after which an expert is named


class ExpertLoad:
    """An observer of steps. On those that are logged it sums the counts of all ranks: a collective."""

    def __init__(
        self, folder: Path, reporter: Reporter | None, model: ParallelModel, spec: ModelSpec, log_freq: int,
        steps: range,
    ) -> None:  # fmt: skip
        """Args: steps: from the last step that is done to the run's last one."""
        self._folder, self._reporter, self._model, self._freq, self._steps = folder, reporter, model, log_freq, steps
        experts = {n: max(p.experts for p in layer.parameters.values()) for n, layer in enumerate(spec.layers)}
        self._layers = [number for number, count in experts.items() if count]
        self._rows = torch.zeros(len(self._layers), max(experts.values()), dtype=torch.float64)
        self._last = torch.full_like(self._rows, steps.start)  # the last step with a row of each
        self._seen = steps.start

    def after_step(self, step: int, result: StepResult) -> None:
        if step % self._freq and step != self._steps.stop:
            return
        rows = torch.zeros_like(self._rows).to(self._model.device)
        for number, layer in ((n, layer) for part in self._model.parts for n, layer in part.model.layers.items()):
            if isinstance(layer.mlp, Mixture) and layer.mlp.load is not None:
                rows[self._layers.index(int(number))] = layer.mlp.load.double()
                layer.mlp.load = None
        sum_in_place(rows)
        if self._reporter is None:
            return
        rows = rows.cpu() / self._model.tp_degree  # tensor-parallel ranks count the same rows
        self._rows += rows
        self._last[rows > 0] = step
        busiest = (rows / rows.mean(1, keepdim=True).clamp_min(1)).max().item()
        self._reporter.experts(step, busiest, int((rows == 0).sum()))
        table = {str(number): own.long().tolist() for number, own in zip(self._layers, self._rows, strict=True)}
        with self._reporter.warn_once_on_disk_error(self._folder / FILE):
            replace(self._folder / FILE, json.dumps({"last_step": step, "rows_of_layers": table}))
        is_new = (step - self._last >= _LONG) & (self._seen - self._last < _LONG)
        self._seen = step
        if names := [f"{self._layers[n]}.{expert}" for n, expert in is_new.nonzero().tolist()]:
            message = f"experts that no token has chosen for {_LONG} steps (layer.expert): {some(names)}"
            log.warning(f"{message}; they learn nothing, and weight decay shrinks them if they are trained")
