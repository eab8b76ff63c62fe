"""How evenly the experts are used: two curves."""

import torch

from titan_mi100.model.experts import Mixture
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import sum_in_place
from titan_mi100.run.metrics import Reporter
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.trainer import StepResult


class ExpertLoad:
    """An observer of steps. On those that are logged it sums the counts of all ranks: a collective."""

    def __init__(
        self, reporter: Reporter | None, model: ParallelModel, spec: ModelSpec, log_freq: int, last: int
    ) -> None:
        """Args: last: the run's last step."""
        self._reporter, self._model, self._freq, self._last = reporter, model, log_freq, last
        self._experts = [max(p.experts for p in layer.parameters.values()) for layer in spec.layers]

    def after_step(self, step: int, result: StepResult) -> None:
        if step % self._freq and step != self._last:
            return
        rows = torch.zeros(len(self._experts), max(self._experts), dtype=torch.float64, device=self._model.device)
        for number, layer in ((n, layer) for part in self._model.parts for n, layer in part.model.layers.items()):
            if isinstance(layer.mlp, Mixture) and layer.mlp.load is not None:
                rows[int(number)] = layer.mlp.load.double()
                layer.mlp.load = None
        sum_in_place(rows)
        if self._reporter is not None:
            # without the layers that have no experts; tensor-parallel ranks count the same rows
            rows = rows.cpu()[torch.tensor(self._experts) > 0] / self._model.tp_degree
            busiest = (rows / rows.mean(1, keepdim=True).clamp_min(1)).max().item()
            self._reporter.add(step, busiest_expert=busiest, idle_experts=int((rows == 0).sum()))
