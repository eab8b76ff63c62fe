"""Sinks for a run's values besides metrics.jsonl: TensorBoard and Weights & Biases, under the same tags.

Only rank 0 has sinks. When a resumed run repeats a step, TensorBoard drops the earlier values. W&B cannot delete
values: the step appears twice, and the later value is the valid one.
"""

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain
from titan_mi100.log import log

_WANDB_ID = "wandb_id"  # file in the run folder
_INIT_SECONDS, _FINISH_SECONDS = 10.0, 60.0  # W&B tries to connect for about twice the first
_STEP = "step"  # W&B's x axis: its own counter only rises, ours falls back to the checkpoint after a restart


Settings = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Explanation:
    """Context for a reader of the values: settings, layout, environment.

    Attributes:
        settings: config and layout, "section.key" to a value that W&B can hold.
        texts: name -> content: the config as TOML, the layout, versions and hardware.
        is_known: an earlier start of the run has written the same texts.
    """

    settings: Settings
    texts: Mapping[str, str]
    is_known: bool = False


class Sink(Protocol):
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Args: values: by tag. Raises OSError: the disk is full."""

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Raises OSError: the disk is full."""

    def close(self, is_done: bool) -> None:
        """Args: is_done: the run's last step was reached."""


class TensorBoard:
    """Events in the run folder; texts are written once, not by every start of the run."""

    def __init__(self, folder: Path, about: Explanation, last_step: int) -> None:
        """Args: last_step: step of the checkpoint that the run resumes from; what was written after it is taken out."""
        from torch.utils.tensorboard import SummaryWriter  # here: importing it takes seconds

        is_new = not any(folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)
        # Its file is opened by its name for each event: in another folder, if this one was renamed meanwhile.
        events: Any = self._writer._get_file_writer().event_writer
        events._async_writer._writer._writer = open(events._file_name, "ab", buffering=0)  # noqa: SIM115
        if is_new or not about.is_known:
            for name, text in about.texts.items():
                self.text(f"about/{name}", f"```\n{text}\n```", last_step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, scalar in values.items():
            self._writer.add_scalar(tag, scalar, step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        self._writer.add_text(tag, markdown, step)

    def close(self, is_done: bool) -> None:
        self._writer.close()


class WandB:
    """A run in Weights & Biases. Its id is kept in the run folder, so that a resumed run continues it.

    wandb sends from a process of its own, so a slow network does not slow down training. Without a network at the start
    the W&B run is offline; if the network fails later, wandb keeps the values itself. wandb's environment variables
    are respected (WANDB_PROJECT, WANDB_NAME, WANDB_DIR, WANDB_MODE ...).
    """

    def __init__(self, folder: Path, about: Explanation) -> None:
        """Raises UserError: wandb is not installed, or nobody has logged in."""
        try:
            import wandb
            from wandb.errors import AuthenticationError, UsageError
        except ImportError as error:
            raise UserError(f"[metrics] enable_wandb = true: {error}; pip install wandb") from None
        own = {"project": "titan_mi100", "name": folder.name, "dir": str(folder)}
        options: dict[str, Any] = {
            **{key: value for key, value in own.items() if not os.environ.get(f"WANDB_{key.upper()}")},
            "id": _run_id(folder),
            "resume": "allow",  # offline, or where nothing was sent yet, the server does not know the id
            "config": dict(about.settings),
            "allow_val_change": True,  # a resumed run may have other settings
            # the log is in the run folder, and wandb would put itself between us and the terminal
            "settings": wandb.Settings(console="off", init_timeout=_INIT_SECONDS),
        }
        key = "[metrics] enable_wandb = true"
        log.info("connecting to Weights & Biases ...")
        try:
            self._run = wandb.init(**options)
        except (UsageError, AuthenticationError) as error:
            remedy = "log in with `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            raise UserError(f"{key}: {str(error).rstrip('.')}; {remedy}") from None
        except Exception as error:
            log.warning(f"W&B cannot be reached, so the run is kept offline (wandb sync sends it later): {error}")
            wandb.teardown()  # its process still has the id in use
            try:
                self._run = wandb.init(**options, mode="offline")
            except Exception as again:
                raise UserError(f"{key}: wandb cannot start: {again}; set it to false") from None
        self._works = True
        self._try(lambda: self._run.define_metric(_STEP))
        self._try(lambda: self._run.define_metric("*", step_metric=_STEP))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._try(lambda: self._run.log({**values, _STEP: step}))

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Not sent: W&B shows no texts beside its curves."""

    def close(self, is_done: bool) -> None:
        """Wait until wandb has sent everything, for a minute at most."""
        finish = partial(self._run.finish, exit_code=0 if is_done else 1)  # 1: "failed", until the run is resumed
        thread = threading.Thread(target=self._try, args=(finish,), daemon=True)
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            log.warning(f"W&B has not taken everything within {_FINISH_SECONDS:.0f} s; wandb sync sends the rest")

    def _try(self, call: Callable[[], object]) -> None:
        """Call it. An error does not end the run; a warning is logged once."""
        try:
            call()
        except Exception as error:
            if self._works:
                log.warning(f"W&B: {type(error).__name__}: {error}; the run goes on, metrics.jsonl has everything")
            self._works = False


def _run_id(folder: Path) -> str:
    """The W&B run id of this run folder; created at the first start."""
    path = folder / _WANDB_ID
    if not path.exists():
        replace(path, secrets.token_hex(4) + "\n")
    run_id = read_plain(path, LARGEST_CONFIG).decode(errors="replace").strip()
    if not (run_id.isascii() and run_id.isalnum() and len(run_id) <= 64):
        raise UserError(f"{path}: holds no id of a W&B run; remove it, and the run gets a new one")
    return run_id


def open_sinks(
    folder: Path, enable_tensorboard: bool, enable_wandb: bool, about: Explanation, last_step: int
) -> Sequence[Sink]:
    """The sinks that the config enables. W&B is opened first: if it fails, no TensorBoard events are left behind."""
    sinks: list[Sink] = [WandB(folder, about)] if enable_wandb else []
    return [*sinks, TensorBoard(folder / "tensorboard", about, last_step)] if enable_tensorboard else sinks
