"""The workload of a run: a config on a number of processes, with its model's shape. Imports no torch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import Config
from titan_mi100.shapes.base import ModelSpec


@dataclass(frozen=True)
class Workload:
    """A training step of a config. Attributes: ranks: number of processes. spec: the model's shape."""

    config: Config
    ranks: int
    spec: ModelSpec

    @classmethod
    def of(cls, config: Config, ranks: int, spec: ModelSpec | None = None) -> "Workload":
        """Args: spec: None: the one that the config names."""
        return cls(config, ranks, spec or config.spec())

    @cached_property
    def layout(self) -> Layout:
        return self.config.layout(self.ranks)

    @cached_property
    def batch(self) -> Batch:
        return self.config.batch(self.ranks)

    def changed(self, change: dict[str, dict[str, Any]]) -> "Workload":
        """The same with other settings. Args: change: section -> key -> value."""
        return replace(self, config=with_settings(self.config, change))


def with_settings(config: Config, change: dict[str, dict[str, Any]]) -> Config:
    """The config with other settings. Args: change: section -> key -> value."""
    return replace(config, **{name: replace(getattr(config, name), **own) for name, own in change.items()})
