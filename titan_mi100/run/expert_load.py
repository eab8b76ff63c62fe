"""How many rows each expert computes: `experts.json`, two curves, and a warning about experts that get none."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from titan_mi100.files.durable import replace
from titan_mi100.log import log
from titan_mi100.model.experts import Mixture
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.run.metrics import Reporter
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.trainer import StepResult
from titan_mi100.wording import some

FILE = "experts.json"
_LONG = 100  # steps without a row after which an expert is named


class ExpertLoad:
    """An observer of steps. On those that are logged it sums the counts of all ranks: a collective."""

    def __init__(
        self, folder: Path, reporter: Reporter | None, model: ParallelModel, spec: ModelSpec, log_freq: int, steps: int
    ) -> None:
        self._folder, self._reporter, self._model, self._freq, self._steps = folder, reporter, model, log_freq, steps
        experts = [p.experts for name, p in spec.parameters.items() if name.endswith(".experts.down_proj.weight")]
        self._rows = torch.zeros(spec.num_hidden_layers, max(experts), dtype=torch.float64)
        self._sparse = [n for n, layer in enumerate(spec.layers) if any(p.experts for p in layer.parameters.values())]
        self._idle, self._named, self._counted = torch.zeros_like(self._rows), set[str](), 0

    def after_step(self, step: int, result: StepResult) -> None:
        self._counted += 1
        if step % self._freq and step != self._steps:
            return
        rows = torch.zeros_like(self._rows).to(self._model.device)
        for part in self._model.parts:
            for number, layer in part.model.layers.items():
                mixture = layer.mlp
                if isinstance(mixture, Mixture) and mixture.load is not None:
                    rows[int(number)] += mixture.load
                    mixture.load = None
        dist.all_reduce(rows)
        rows = rows.cpu() / self._model.tp_degree  # tensor-parallel ranks count the same rows
        self._rows += rows
        self._idle = (self._idle + self._counted).where(rows == 0, 0.0)
        self._counted = 0
        if self._reporter is None:
            return
        mine = rows[self._sparse]
        share = mine / mine.mean(1, keepdim=True).clamp_min(1)
        self._reporter.values(step, {"busiest_expert": share.max().item(), "idle_experts": int((mine == 0).sum())})
        self._warn()
        table = {str(number): self._rows[number].long().tolist() for number in self._sparse}
        with self._reporter.warn_once_on_disk_error(self._folder / FILE):
            replace(self._folder / FILE, json.dumps({"last_step": step, "rows_of_layers": table}))

    def _warn(self) -> None:
        long = self._idle[self._sparse] >= _LONG
        names = [f"{self._sparse[layer]}.{expert}" for layer, expert in long.nonzero().tolist()]
        if new := [name for name in names if name not in self._named]:
            self._named.update(new)
            what = f"experts that no token has chosen for {_LONG} steps (layer.expert): {some(new)}"
            log.warning(f"{what}; they learn nothing, and weight decay shrinks them if they are trained")
