"""A run's last checkpoint as an HF folder."""

from pathlib import Path

from titan_mi100.config.assets import config_dtype, read_assets
from titan_mi100.errors import SaveError, UserError
from titan_mi100.parallel.distributed import raise_together, wait_for_all
from titan_mi100.weights.convert import to_hf
from titan_mi100.weights.source import open_source


def export(folder: Path, step: int, dtype: str, is_adapter: bool, rank: int) -> None:
    """Write a run's checkpoint as an HF folder, `hf-step-N`, unless an earlier start has. A collective.

    Raises:
        UserError: something else has that name.
        SaveError: on all ranks.
    """
    target = folder / f"hf-step-{step}"
    with raise_together():
        try:
            if rank == 0 and not is_exported(target, dtype, is_adapter):
                to_hf(open_source(folder / "checkpoint" / f"step-{step}"), target, dtype)
        except OSError as error:
            raise SaveError(f"{target}: could not be written: {error}") from error
        finally:
            wait_for_all("exported")


def is_exported(target: Path, dtype: str, is_adapter: bool) -> bool:
    """Whether an earlier start has left what this one would; raises UserError if it is something else."""
    if not target.exists():
        return False
    name = "adapter_config.json" if is_adapter else "config.json"
    if not (target / name).exists() or (not is_adapter and dtype not in ("auto", config_dtype(read_assets(target)))):
        raise UserError(f"{target}: is there, but is no export in {dtype}; remove it")
    return True
