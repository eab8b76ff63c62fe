"""Which checkpoint a run resumes from, and whether the run is still the one that made it."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.checkpoint import sealed
from titan_mi100.errors import UserError
from titan_mi100.files import plain
from titan_mi100.logging import log
from titan_mi100.parallel.distributed import World, first_found, from_rank_zero, raise_together
from titan_mi100.wording import shortened, some

NEWEST = -1
TRAINER = "trainer.json"  # the file of a checkpoint that says how far the run had come
REMEDY = "remove this checkpoint to resume from the one before"
_OF_A_RUN = ("layout", "data", "rows", "fingerprints")  # what a manifest says of the run
_FP32 = {"state": "fp32", "master": "fp32"}  # the optimizer's, where a manifest names none
_COUNTS = ("rows", "global_batch_size", "local_batch_size", "gradient_accumulation_steps", "dp_degree")  # in these


class Found(NamedTuple):
    """An intact checkpoint."""

    path: Path
    manifest: dict[str, Any]
    trainer_state: dict[str, Any]


def find_checkpoint(folder: Path, world: World, step: int = NEWEST) -> Found | None:
    """A checkpoint that is what its manifest says; None: there never was one. A collective.

    Each rank reads a share of the files. A damaged one is renamed, so that it is not taken for a checkpoint, and
    the one before is taken.

    Args:
        step: of the one to take, suspect or not; NEWEST: the newest that is not suspect.

    Raises:
        UserError: there are some, but none is intact: starting over in silence would lose the work. Or one cannot be
            read, which says nothing of what is in it. Or there is none of that step.
    """
    while True:
        paths: list[Path] = from_rank_zero(partial(_candidates, folder, step))
        if not paths:
            return None
        newest = paths[-1]
        with raise_together():
            problem = _problem(newest, world.rank, world.size)
        found = first_found(problem)
        if not found:
            with raise_together():
                return open_checkpoint(newest)
        # A file that only another rank misses is no damage: that node sees another file system.
        problem = from_rank_zero(partial(_problem, newest, 0, 1))
        if not problem:
            raise UserError(f"{found}, but rank 0 finds it intact; all nodes must see the same file system")
        if len(paths) == 1:
            more = "holds no other" if step == NEWEST else "name another step in checkpoint.load_step"
            raise UserError(f"damaged checkpoint: {problem}\n{folder}: {more}; {_AGAIN}")
        aside = from_rank_zero(partial(sealed.set_aside, newest, "damaged"))
        log.warning(f"DAMAGED CHECKPOINT: {problem}. It is now {aside}; the run resumes from the one before it")


def _candidates(folder: Path, step: int) -> list[Path]:
    """The checkpoints to choose from, the best choice last; none: the run has none yet."""
    if odd := sealed.in_the_way(folder):
        what = "is a link or no folder, so no checkpoint"
        raise UserError(f"{odd[0]}: {what}; put the folder itself there, or move it away")
    if step != NEWEST:
        every = sealed.all_checkpoints(folder)
        if chosen := [path for path in every if sealed.step_of(path) == step]:
            return chosen
        there = ", ".join(path.name for path in every) or "no checkpoint at all"
        raise UserError(f"[checkpoint] load_step = {step}: {folder} holds no step-{step}; there is {there}")
    if paths := sealed.list_checkpoints(folder):
        return paths
    if suspect := sealed.list_checkpoints(folder, suspect=True):
        raise UserError(
            f"{folder}: holds only suspect checkpoints, up to {suspect[-1].name} (why: {suspect[-1].name}.suspect); "
            f"resume from it with --checkpoint.load_step {sealed.step_of(suspect[-1])}, or {_AGAIN}"
        )
    if left := ", ".join(map(str, sealed.damaged(folder))):
        raise UserError(f"{folder}: of this run only damaged checkpoints are left: {left}; {_AGAIN}")
    return []


def set_later_aside(resumed: Path) -> None:
    """Rename what is later than the checkpoint that a run goes on from: it would be in the way of the run's next ones.
    The checkpoint itself is not suspect any more: somebody has chosen it.
    """
    sealed.unmark_suspect(resumed)
    for path in sealed.all_checkpoints(resumed.parent):
        if sealed.step_of(path) > sealed.step_of(resumed):
            log.warning(f"{path}: later than {resumed.name}; it is now {sealed.set_aside(path, 'later').name}")


def open_checkpoint(path: Path) -> Found:
    """A checkpoint that is known to be intact."""
    manifest = sealed.read_manifest(path)
    return Found(path, manifest, plain.read_object(listed(path, TRAINER, manifest), REMEDY))


def listed(path: Path, name: str, manifest: dict[str, Any]) -> Path:
    """A file of a checkpoint that its manifest names; no other is read. Raises UserError: it names none."""
    if name not in manifest["files"]:
        raise UserError(f"{path / sealed.MANIFEST}: names no {name}; {REMEDY}")
    return path / name


def _problem(path: Path, share: int, shares: int) -> str:
    """What is damaged in a share of a checkpoint's files."""
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


_AGAIN = "put back a copy, or start over beside it with --checkpoint.fresh"


def check_is_a_runs(found: Found) -> None:
    """Refuse a checkpoint that a converter wrote, which says nothing of a run."""
    said, file = found.manifest, found.path / sealed.MANIFEST
    if lacking := [key for key in _OF_A_RUN if key not in said]:
        raise UserError(f"{file}: lacks {', '.join(lacking)}: no run made it; {REMEDY}")
    counts = {**said, **said["layout"], **said["fingerprints"]}
    if wrong := [key for key in _COUNTS if not counts.get(key)]:
        raise UserError(f"{file}: {', '.join(wrong)} must be there, and above 0; {REMEDY}")
    if said["step"] != found.trainer_state.get("step"):
        raise UserError(f"{file}: its step = {said['step']} is not that of {TRAINER}; {REMEDY}")


def check_same_run(found: Found, about: dict[str, Any], allowed: Collection[str]) -> None:
    """Refuse to resume with other rows, another order of them or another model; log what was allowed to differ.

    Args:
        about: of the run as it is now; as for Checkpointer.save.
        allowed: names that may differ, of a fingerprint or of a field: `model`, `model.rope_theta`.

    Raises:
        UserError: what differs, field by field.
    """
    refused: list[str] = []
    permitted: list[str] = []
    for name, words in differing(found.manifest["fingerprints"], about["fingerprints"]).items():
        more = differing(found.manifest["data"], about["data"]).values() if name == "data" else ()
        (permitted if {name, name.split(".")[0]} & set(allowed) else refused).extend([words, *more])
    if permitted:
        log.warning(f"checkpoint.allow_changed: the run resumes with another {some(permitted, 30)}")
    before, now = found.manifest.get("optimizer", _FP32), about.get("optimizer", _FP32)
    if different := differing({"optimizer": before}, {"optimizer": now}).values():
        raise UserError(
            f"{found.path}: was saved with another {some(list(different), 30)}; resume with what it was saved with, or "
            "begin with its weights and a new optimizer: checkpoint.initial_load_path, and another job.run_folder"
        )
    if refused:
        remedy = "name what may differ in checkpoint.allow_changed, or start over beside it with --checkpoint.fresh"
        what = f"was made with another {some(refused, 30)}; resume with what it was made with"
        raise UserError(f"{found.path}: {what}, {remedy}")


def differing(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The values that differ, by name, each in words.

    Args:
        saved, now: values, or one level of fields with values.
    """
    before, after = _flat(saved), _flat(now)
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return {name: f"{name} ({_short(before.get(name))}, now {_short(after.get(name))})" for name in names}


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and not prefix else {prefix + name: value}
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else shortened(text, 12) + (text[-40:] if "/" in text else "")
