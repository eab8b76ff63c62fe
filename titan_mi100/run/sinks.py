"""Sinks for a run's values besides metrics.jsonl: TensorBoard and trackers (W&B and others), under the same tags.

Only rank 0 has sinks. When a resumed run repeats a step, TensorBoard drops the earlier values. Trackers cannot delete
values: the step appears twice, and the later value is the valid one.
"""

import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from time import time
from typing import Any, Protocol

from titan_mi100.config.settings import MetricsConfig
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain
from titan_mi100.log import log

_PROJECT = "titan_mi100"
_INIT_SECONDS, _FINISH_SECONDS = 10.0, 60.0  # W&B tries to connect for about twice the first
_LONGEST = 6000  # characters of a parameter that MLflow takes
_WAITING = 10_000  # calls that a slow tracker may be behind; each holds a step's values
_STEP = "step"  # W&B's x axis: its own counter only rises, ours falls back to the checkpoint after a restart

Settings = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Explanation:
    """Context for a reader of the values: settings, layout, environment.

    Attributes:
        settings: config and layout, "section.key" to a value that trackers can hold.
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


class Tracker:
    """A run in a service. A thread makes all calls, one after the other: a slow network costs no step. No error ends
    the run: the first one is a warning, the others are silent.

    Attributes:
        name: for messages.
    """

    name = ""
    _run: Any

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._calls: Queue[Callable[[], object] | None] = Queue(_WAITING)
        self._works = True
        self._thread = threading.Thread(target=self._make_calls, daemon=True)
        self._thread.start()
        self._later(partial(self._start, folder, settings))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._later(partial(self._send, dict(values), step))

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Not sent: a tracker shows curves."""

    def close(self, is_done: bool) -> None:
        """Wait until everything is sent, for a minute at most."""
        self._later(partial(self._finish, is_done))
        self._later(None)
        self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            log.warning(f"{self.name} has not taken everything within {_FINISH_SECONDS:.0f} s; metrics.jsonl has it")

    def _start(self, folder: Path, settings: Settings) -> None:
        """Begin a run, or continue that of this run folder."""
        raise NotImplementedError

    def _send(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def _finish(self, is_done: bool) -> None:
        self._run.finish()

    def _later(self, call: Callable[[], object] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._warn(f"{_WAITING} steps and validations wait to be sent; those that follow are left out")

    def _make_calls(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                call()
            except BaseException as error:  # some clients end with SystemExit
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        if self._works:
            log.warning(f"{self.name}: {problem}; the run goes on, metrics.jsonl has everything")
        self._works = False


class WandB(Tracker):
    """A run in Weights & Biases. Its id is kept in the run folder, so that a resumed run continues it.

    Without a network at the start the W&B run is offline; if the network fails later, wandb keeps the values itself.
    wandb's environment variables are respected (WANDB_PROJECT, WANDB_NAME, WANDB_DIR, WANDB_MODE ...).
    """

    name = "W&B"

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Raises UserError: wandb is not installed, or nobody has logged in."""
        try:
            import wandb
            from wandb.errors import AuthenticationError, UsageError
        except ImportError as error:
            raise UserError(f"[metrics] enable_wandb = true: {error}; pip install wandb") from None
        own = {"project": _PROJECT, "name": folder.name, "dir": str(folder)}
        options: dict[str, Any] = {
            **{key: value for key, value in own.items() if not os.environ.get(f"WANDB_{key.upper()}")},
            "id": _run_id(folder, "wandb_id"),
            "resume": "allow",  # offline, or where nothing was sent yet, the server does not know the id
            "config": dict(settings),
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
        super().__init__(folder, settings)

    def _start(self, folder: Path, settings: Settings) -> None:
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def _send(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, _STEP: step})

    def _finish(self, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)  # 1: "failed", until the run is resumed


class MLflow(Tracker):
    """A run of MLflow, in the store that its own variables name (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME ...)."""

    name = "MLflow"

    def _start(self, folder: Path, settings: Settings) -> None:
        mlflow = import_module("mlflow")
        self._client, self._entities = mlflow.MlflowClient(), import_module("mlflow.entities")

        def create() -> str:
            own = {name: os.environ.get(f"MLFLOW_{name}") for name in ("EXPERIMENT_ID", "EXPERIMENT_NAME", "RUN_NAME")}
            number = own["EXPERIMENT_ID"] or mlflow.set_experiment(own["EXPERIMENT_NAME"] or _PROJECT).experiment_id
            return str(self._client.create_run(number, run_name=own["RUN_NAME"] or folder.name).info.run_id)

        self._id = _run_id(folder, "mlflow_id", create)
        self._client.update_run(self._id, status="RUNNING")
        params, before = {name: str(own)[:_LONGEST] for name, own in settings.items()}, self._client.get_run(self._id)
        known = before.data.params  # MLflow refuses to change one: what a resumed run has changed becomes a tag
        new = [self._entities.Param(name, own) for name, own in params.items() if name not in known]
        changed = [self._entities.RunTag(name, own) for name, own in params.items() if known.get(name, own) != own]
        self._client.log_batch(self._id, params=new, tags=changed)

    def _send(self, values: dict[str, float], step: int) -> None:
        now, metric = int(1000 * time()), self._entities.Metric
        # it refuses other characters
        shown = {re.sub(r"[^\w./: -]", "_", tag): scalar for tag, scalar in values.items()}
        self._client.log_batch(self._id, [metric(tag, scalar, now, step) for tag, scalar in shown.items()])

    def _finish(self, is_done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_done else "KILLED")


class Trackio(Tracker):
    """A run of Trackio: on this machine (TRACKIO_DIR), a server or a Space (TRACKIO_SERVER_URL, TRACKIO_SPACE_ID)."""

    name = "Trackio"

    def _start(self, folder: Path, settings: Settings) -> None:
        name = "-".join((folder.name, _run_id(folder, "trackio_id")))  # its name is what it is resumed by
        options = {"config": dict(settings), "resume": "allow", "embed": False}
        self._run = import_module("trackio").init(_PROJECT, name, auto_log_cpu=False, auto_log_gpu=False, **options)


class SwanLab(Tracker):
    """A run of SwanLab; its own variables are respected (SWANLAB_MODE, SWANLAB_API_KEY ...). It asks for no login."""

    name = "SwanLab"

    def _start(self, folder: Path, settings: Settings) -> None:
        swanlab, own = import_module("swanlab"), {"project": _PROJECT, "name": folder.name, "config": dict(settings)}
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}, probe={"monitor": False})
        kept = {"log_dir": str(folder / "swanlog"), "id": _run_id(folder, "swanlab_id"), "resume": "allow"}
        self._run = swanlab.init(**own, **kept, settings=quiet)

    def _finish(self, is_done: bool) -> None:
        self._run.finish("success" if is_done else "aborted")


def _run_id(folder: Path, file: str, create: Callable[[], str] = lambda: secrets.token_hex(4)) -> str:
    """The id of the run in a tracker; the first start keeps it in a file of the run folder."""
    path = folder / file
    if not path.exists():
        replace(path, create() + "\n")
    run_id = read_plain(path, LARGEST_CONFIG).decode(errors="replace").strip()
    if not (run_id.isascii() and run_id.isalnum() and len(run_id) <= 64):
        raise UserError(f"{path}: holds no id of a run; remove it, and the run gets a new one")
    return run_id


TRACKERS: dict[str, type[Tracker]] = {"mlflow": MLflow, "trackio": Trackio, "swanlab": SwanLab}


def open_sinks(folder: Path, config: MetricsConfig, about: Explanation, last_step: int) -> Sequence[Sink]:
    """The sinks that the config enables. W&B is opened first: if it fails, no TensorBoard events are left behind."""
    kinds = ([WandB] if config.enable_wandb else []) + [TRACKERS[name] for name in dict.fromkeys(config.report_to)]
    sinks: list[Sink] = [kind(folder, about.settings) for kind in kinds]
    return [*sinks, TensorBoard(folder / "tensorboard", about, last_step)] if config.enable_tensorboard else sinks
