"""Finds the checkpoint to resume from, and checks that it belongs to the same run."""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.checkpoint import sealed
from titan_mi100.errors import UserError
from titan_mi100.files import plain
from titan_mi100.log import log
from titan_mi100.parallel.distributed import World, first_found, from_rank_zero, raise_together
from titan_mi100.wording import shortened, some

NEWEST = -1
TRAINER = "trainer.json"  # a checkpoint's file with the trainer's state: step, consumed rows, best loss ...
REMEDY = "move this checkpoint elsewhere to resume from the one before"
_OF_A_RUN = ("layout", "data", "rows", "fingerprints")  # keys of a manifest that only a run writes, not a converter
_FP32 = {"state": "fp32", "master": "fp32"}  # what an older manifest does not say about its optimizer
# Counts in a manifest's top level, layout and fingerprints that must be above 0: resuming divides by them.
_COUNTS = ("rows", "global_batch_size", "local_batch_size", "gradient_accumulation_steps", "dp_degree")


class FoundCheckpoint(NamedTuple):
    """An intact checkpoint."""

    path: Path
    manifest: dict[str, Any]
    trainer_state: dict[str, Any]


def find_checkpoint(folder: Path, world: World, step: int = NEWEST) -> FoundCheckpoint | None:
    """Find the newest intact checkpoint. A collective.

    Each rank verifies a share of the files against the manifest. A damaged checkpoint is renamed, and the one before it
    is tried.

    Args:
        step: the step to resume from, even if that checkpoint is suspect; NEWEST: the newest one that is not suspect.

    Returns:
        None if the run has no checkpoint yet.

    Raises:
        UserError: no checkpoint of `step` exists; all checkpoints are damaged or suspect (starting over silently would
            lose the work); or a file cannot be read, so that it may be intact.
    """
    while True:
        # Rank 0 decides for all: on a network file system, ranks may see a renamed folder at different times.
        paths: list[Path] = from_rank_zero(partial(_candidates, folder, step))
        if not paths:
            return None
        newest = paths[-1]
        log.info(f"checking {newest} for damage ...")
        with raise_together():  # an unreadable file on one rank ends all ranks with its message
            problem = _problem(newest, world.rank, world.size)
        first_problem = first_found(problem)
        if not first_problem:
            with raise_together():
                return open_checkpoint(newest)
        # If rank 0 can read the file, it is not damaged: the other rank's node sees another file system.
        problem = from_rank_zero(partial(_problem, newest, 0, 1))
        if not problem:
            raise UserError(f"{first_problem}, but rank 0 finds it intact; all nodes must see the same file system")
        if len(paths) == 1:
            remedy = "has no other checkpoint" if step == NEWEST else "name another step in checkpoint.load_step"
            raise UserError(f"damaged checkpoint: {problem}\n{folder}: {remedy}; {_START_OVER}")
        aside = from_rank_zero(partial(sealed.set_aside, newest, "damaged"))
        log.warning(f"DAMAGED CHECKPOINT: {problem}. It is now {aside}; the run resumes from the one before it")


def _candidates(folder: Path, step: int) -> list[Path]:
    """The checkpoints to try, the best choice last; empty if the run has none yet."""
    if odd := sealed.blocking_entries(folder):
        problem = "has the name of a checkpoint, but is a link or not a folder"
        raise UserError(f"{odd[0]}: {problem}; put the folder itself there, or move it away")
    if step != NEWEST:
        every = sealed.all_checkpoints(folder)
        if chosen := [path for path in every if sealed.step_of(path) == step]:
            return chosen
        there = ", ".join(path.name for path in every) or "no checkpoint at all"
        raise UserError(f"[checkpoint] load_step = {step}: {folder} has no step-{step}; it has {there}")
    if paths := sealed.list_checkpoints(folder):
        return paths
    if suspect := sealed.list_checkpoints(folder, suspect=True):
        raise UserError(
            f"{folder}: has only suspect checkpoints, up to {suspect[-1].name} (why: see {suspect[-1].name}.suspect); "
            f"resume from it with --checkpoint.load_step {sealed.step_of(suspect[-1])}, or {_START_OVER}"
        )
    if left := ", ".join(map(str, sealed.damaged(folder))):
        raise UserError(f"{folder}: has only damaged checkpoints: {left}; {_START_OVER}")
    return []


def rename_later_checkpoints(resumed: Path) -> None:
    """Rename the checkpoints that are later than the one a run resumes from, because the run will write those steps
    again. Also removes a suspect mark from the chosen checkpoint: the user has decided to trust it.
    """
    sealed.unmark_suspect(resumed)
    for path in sealed.all_checkpoints(resumed.parent):
        if sealed.step_of(path) > sealed.step_of(resumed):
            log.warning(f"{path}: is later than {resumed.name}; renamed to {sealed.set_aside(path, 'later').name}")


def open_checkpoint(path: Path) -> FoundCheckpoint:
    """Read the manifest and the trainer state of a checkpoint that was verified before."""
    manifest = sealed.read_manifest(path)
    return FoundCheckpoint(path, manifest, plain.read_object(listed(path, TRAINER, manifest), REMEDY))


def listed(path: Path, name: str, manifest: dict[str, Any]) -> Path:
    """The path of a checkpoint's file. Raises UserError: the manifest does not list it, so it is not verified."""
    if name not in manifest["files"]:
        raise UserError(f"{path / sealed.MANIFEST}: does not list {name}; {REMEDY}")
    return path / name


def _problem(path: Path, share: int, shares: int) -> str:
    """Verify a share of a checkpoint's files. Returns what is damaged, "" if nothing is.

    Raises:
        UserError: a file cannot be read, or a newer version has written it. That is not damage.
    """
    try:
        sealed.verify(path, share, shares)
    except sealed.DamagedError as error:
        return str(error)
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror}); fix that, or rename {path} to resume "
            "from the checkpoint before it"
        ) from None
    return ""


_START_OVER = "restore a copy, or start over beside it with --checkpoint.fresh"


def check_is_run_checkpoint(found: FoundCheckpoint) -> None:
    """Refuse to resume from a converter's output: it has weights, but no state of a run. Raises UserError."""
    manifest, file = found.manifest, found.path / sealed.MANIFEST
    if lacking := [key for key in _OF_A_RUN if key not in manifest]:
        raise UserError(f"{file}: lacks {', '.join(lacking)}, so it is not a run's checkpoint; {REMEDY}")
    counts = {**manifest, **manifest["layout"], **manifest["fingerprints"]}
    if wrong := [key for key in _COUNTS if not counts.get(key)]:
        raise UserError(f"{file}: {', '.join(wrong)} must exist and be above 0; {REMEDY}")
    if manifest["step"] != found.trainer_state.get("step"):
        raise UserError(f"{file}: step = {manifest['step']} differs from the step in {TRAINER}; {REMEDY}")


def check_same_run(found: FoundCheckpoint, about: dict[str, Any], allowed: Collection[str]) -> None:
    """Refuse to resume with other data, another order of rows, another model or optimizer. Logs allowed differences.

    Args:
        about: the run as it is configured now; see Checkpointer.save.
        allowed: checkpoint.allow_changed: fingerprints or fields that may differ, such as `model`, `model.rope_theta`.

    Raises:
        UserError: lists the differences, field by field.
    """
    before, now = (of["fingerprints"].get("draft_head", {}).get("train", "no") for of in (found.manifest, about))
    if before != now:  # other tensors
        problem = f'was saved with draft_head.train = "{before}", now "{now}"; keep it, or start from its weights: set'
        raise UserError(f"{found.path}: {problem} checkpoint.initial_load_path, and another job.run_folder")
    refused: list[str] = []
    permitted: list[str] = []
    changed: list[str] = []
    for name, words in differing(found.manifest["fingerprints"], about["fingerprints"]).items():
        # "data" is one hash; the manifest's `data` tells which files or settings have changed
        details = list(differing(found.manifest["data"], about["data"]).values()) if name == "data" else []
        is_allowed = bool({name, name.split(".")[0]} & set(allowed))
        (permitted if is_allowed else refused).extend(details or [words])
        changed += [] if is_allowed else [name]
    # Nor can the tokens whose rows are trained: a row would become another token's.
    before, now = (of["fingerprints"].get("lora", {}).get("token_ids", []) for of in (found.manifest, about))
    if before != now and "lora" in about["fingerprints"]:
        problem = f"has trained the rows of the tokens {before}, now {now}; keep lora.trainable_tokens"
        raise UserError(f"{found.path}: {problem}; or start over beside it: --checkpoint.fresh")
    if permitted:
        log.warning(f"checkpoint.allow_changed: the run resumes with changes: {some(permitted, 30)}")
    # The optimizer's number format cannot be allowed to change: its state has other dtypes.
    before, now = ({**_FP32, **of.get("optimizer", {})} for of in (found.manifest, about))
    if different := differing({"optimizer": before}, {"optimizer": now}).values():
        raise UserError(
            f"{found.path}: was saved with another {some(list(different), 30)}; resume with the same setting, or start "
            "from its weights with a new optimizer: set checkpoint.initial_load_path, and another job.run_folder"
        )
    if refused:
        remedy = (
            f"allow it: --checkpoint.allow_changed {' '.join(changed)}; or start over beside it: --checkpoint.fresh"
        )
        message = f"the run now differs from it: {some(refused, 30)}; resume with the same settings and data"
        raise UserError(f"{found.path}: {message}; or {remedy}")


def differing(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The values that differ: name -> a text such as "seed (1, now 2)".

    Args:
        saved, now: name -> value, or name -> {field: value}; fields are compared one by one, as `name.field`.
    """
    before, after = _flat(saved), _flat(now)
    # In the order of `now`, then names that only `saved` has.
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    pairs = {name: (_short(before.get(name)), _short(after.get(name))) for name in names}
    return {name: f"{name} ({f'{was}, now {now}' if was and now else 'changed'})" for name, (was, now) in pairs.items()}


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, field in fields.items():
        flat |= _flat(field, f"{prefix}{name}.") if isinstance(field, dict) and not prefix else {prefix + name: field}
    return flat


def _short(value: Any) -> str:
    text = str(value)
    if re.fullmatch("[0-9a-f]{32,64}", text):  # a hash says nothing to a reader
        return ""
    # A path is recognised by its end.
    is_short = len(text) <= (60 if isinstance(value, str) else 80)
    return text if is_short else shortened(text, 12) + (text[-40:] if "/" in text else "")
