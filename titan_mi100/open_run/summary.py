"""The closing summary of a run in the log: how good it is, where its files are, what to do next."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from titan_mi100.checkpoint.sealed import list_checkpoints
from titan_mi100.config.settings import ValidationConfig
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.open_run.run import Run
from titan_mi100.run.faults import FILE, SPIKES
from titan_mi100.run.next_commands import after_run, shown_path, to_measure_drafts
from titan_mi100.run.progress import Progress
from titan_mi100.shapes.base import DRAFT
from titan_mi100.weights.source import open_weights
from titan_mi100.wording import plural

_CHANCE = 0.5  # share of answers on the right side
_FAR = 20.0  # nats that answers have become less likely


def step_to_use(folder: Path, validation: ValidationConfig, progress: Progress) -> int:
    """The step whose checkpoint is exported and named at the end: with early stopping the best one, else the last."""
    best = progress.best_step
    if not validation.patience or best in (None, progress.step):
        return progress.step
    assert best is not None
    if folder / "checkpoint" / f"step-{best}" in list_checkpoints(folder / "checkpoint"):
        log.info(f"the best checkpoint is step-{best}, {' '.join(progress.best)}: it is the one to use")
        return best
    log.warning(f"the best checkpoint, step-{best}, is not there any more or suspect: step-{progress.step} is used")
    return progress.step


def log_summary(run: Run, step: int) -> None:
    """Log the closing summary, and commands to continue with. Args: step: of the export."""
    folder, config, progress = run.folder, run.config, run.progress
    assert folder is not None
    if count := progress.skipped_steps - progress.skipped_spikes:
        log.warning(f"skipped {plural(count, 'step')}: loss or gradients not finite; rows: {folder / FILE}")
    if spikes := progress.skipped_spikes:
        log.warning(f"skipped {plural(spikes, 'step')}: the loss was a spike; rows: {folder / SPIKES}")
    files = [f"checkpoint/{path.name}" for path in list_checkpoints(folder / "checkpoint")]
    library = "peft" if config.lora.rank else "transformers"
    files += [f"hf-step-{step}/ for {library}, vLLM"] * config.checkpoint.export_hf
    good, to_try = _how_good(config.objective.name, progress, run.measured)
    log.info(f"done: learned {plural(progress.rows_consumed, 'packed row')} in {plural(progress.step, 'step')}")
    log.info(f"  how good   {good}")
    log.info(f"  where      {shown_path(folder)}: {', '.join(files)}; docs/RUN_FOLDER.md explains the other files")
    log.info(f"  try next   {to_try}")
    log.info("  how to use it:")
    for purpose, command in after_run(folder, config, step):
        log.info(f"  {purpose:<10} {command}")
    if _has_old_draft_head(run):
        command = to_measure_drafts(folder, config.lora, config.checkpoint.initial_load_path, step, "PROMPTS.jsonl")
        log.info(f"  the draft head (mtp.*) was not trained: fewer of its drafts may hold now. To measure: {command}")


def _has_old_draft_head(run: Run) -> bool:
    """Whether the model has a draft head that was carried along while the model changed."""
    names, base = run.model.passed_through.keys(), run.config.checkpoint.initial_load_path
    if run.config.lora.rank and base:  # then nothing of the base is carried
        with suppress(UserError):  # it is gone
            names = open_weights(base).kinds.keys()
    return run.model.draft == "no" and any(name.startswith(DRAFT) for name in names)


def _how_good(name: str, progress: Progress, measured: Mapping[str, float]) -> tuple[str, str]:
    """What the objective measures on the validation rows, and what it says to try next."""
    if name == "policy":
        return (
            "not measured: the loss of a policy has no level",
            "a further round: sample from this model, score, learn",
        )
    if progress.best_step is None:
        return "not measured on new rows", "--data.validation_fraction 0.05 --validation.freq 50, which measure it"
    quality = (
        f"{' '.join(progress.best).removeprefix('validation ')} on new rows at best, after step {progress.best_step}"
    )
    next_try = "fewer steps, or more data" if progress.validations_since_best else "more steps or epochs"
    if "accuracy" in measured:  # of preferences, whose loss says little
        quality = f"{measured['accuracy']:.0%} of the new answers on the right side (half is chance); {quality}"
        if measured["accuracy"] <= _CHANCE:
            next_try = "a lower optimizer.lr; look at pairs and labels with titan-mi100 inspect: nothing was learned"
        elif measured.get("below_reference", 0.0) > _FAR:
            next_try = "objective.sft_weight = 0.2 or a lower optimizer.lr: its answers have become unlikely as a whole"
    elif "agreement" in measured:
        quality = f"{measured['agreement']:.0%} of the teacher's likeliest ids, KL {measured['kl']:.4f} nats; {quality}"
    return quality, next_try
