"""A run's metrics: printed lines, `metrics.jsonl`, the progress bar, and the sinks (TensorBoard, W&B) of sinks.py."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from tqdm import tqdm

from titan_mi100.config.settings import MetricsConfig
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.files.plain import open_plain
from titan_mi100.files.schema import if_finite, validated
from titan_mi100.log import log
from titan_mi100.run.sinks import Sink
from titan_mi100.trainer import StepResult
from titan_mi100.wording import last_question, shortened, shown, utc_now

SAMPLES = "samples.jsonl"
_LONGEST_LINE = 1 << 16  # bytes of metrics.jsonl; ours have 400
_LONGEST_SAMPLE = 1 << 24  # bytes of a line of samples.jsonl, which holds a document
_LARGEST_EXPONENT = 700  # exp of 710 is more than a float holds
_SHOWN = 200  # characters of a prompt or an answer in the log
_LOGGED = 20  # samples in the log and in TensorBoard


def _shown(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def in_words(measure: str) -> str:
    return measure.replace("_", " ")


def sample_line(number: int, entry: dict[str, Any]) -> str:
    """What was asked, the model's answer and, where it differs, the data's. `entry`: of samples.jsonl."""
    answer, reference = entry["answer"], entry["reference"]
    asked = last_question(entry["prompt"][-1]["content"], _SHOWN)
    verdict = "as expected" if answer == reference else f"expected: {shortened(repr(reference), _SHOWN)}"
    return f"prompt {number}: {asked!r}  answer: {shortened(repr(answer), _SHOWN)}  ({verdict})"


@dataclass(frozen=True)
class RunFigures:
    """What a run's reports are computed from.

    Attributes:
        steps: the run's last step.
        rows_per_epoch: None: a stream without epochs.
        mfu: of a step, see Forecast.mfu.
        dtype: the compute dtype, for the printed line.
        printed: measures of the objective that the step's line shows.
    """

    steps: int
    rows_per_epoch: int | None
    mfu: Callable[[StepResult], float | None]
    dtype: str
    printed: Sequence[str] = ()


class Reporter:
    """Reports the run's metrics, on rank 0: `metrics.jsonl`, sinks, printed lines, and a bar on a terminal."""

    def __init__(
        self,
        folder: Path,
        config: MetricsConfig,
        figures: RunFigures,
        last_step: int = 0,
        validation_due: bool = False,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """Open the files. Lines that an earlier start wrote after its last checkpoint are removed.

        Args:
            last_step: step of the checkpoint that the run resumes from; 0: none.
            validation_due: the validation of that step is still to be done.
            sinks: receive the same values.
        """
        self._config, self._figures, self._steps = config, figures, figures.steps
        path, self._samples = folder / "metrics.jsonl", folder / SAMPLES
        is_kept = partial(_is_before, last_step=last_step, validation_due=validation_due)
        drop_lines(path, is_kept)
        drop_lines(self._samples, is_kept, _LONGEST_SAMPLE)
        self._file = path.open("a", encoding="utf-8")
        self._writes = True
        self._sinks, self._step, self._first, self._printed = sinks, last_step, last_step + 1, figures.printed
        self._bar = tqdm(
            total=figures.steps, initial=last_step, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True
        )

    def after_step(self, step: int, result: StepResult) -> None:
        seconds, figures = result.seconds, self._figures
        record: dict[str, Any] = {
            "step": step,
            "time": utc_now(),
            "epoch": result.next_row / figures.rows_per_epoch if figures.rows_per_epoch else None,
            "loss": if_finite(result.loss),
            **{name: if_finite(measure) for name, measure in result.measures.items()},
            "grad_norm": if_finite(result.grad_norm),
            "lr": result.lr,
            "seconds": seconds,
            "step_ms": 1000 * seconds,
            "tokens": result.tokens,
            "supervised_tokens": result.supervised,
            "tokens_per_second": result.tokens / seconds,
            "supervised_tokens_per_second": result.supervised / seconds,
            "mfu": figures.mfu(result),
            "peak_memory_gib": result.peak_memory_gib,
            "data_wait": result.waited / seconds,
            "gradient_bytes": result.gradient_bytes,
            "skipped": result.skipped,
            **({} if result.spike_above is None else {"spike": True}),
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
        }
        self._write(step, record, prefix="train/")
        if step % self._config.log_freq == 0 or step in (self._first, self._steps):
            mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
            measures = "".join(f"{in_words(name)} {_shown(record[name], 4)}  " for name in self._printed)
            log.info(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {_shown(record['loss'], 4)}  {measures}"
                f"grad_norm {_shown(record['grad_norm'], 3)}  lr {result.lr:.2e}  "
                f"tok/s {record['tokens_per_second']:,.0f}  supervised tok/s "
                f"{record['supervised_tokens_per_second']:,.0f}  mfu({figures.dtype}) {mfu}  "
                f"mem {result.peak_memory_gib:.2f} GiB  data wait {record['data_wait']:.1%}"
            )
        self._bar.update(1)
        self._step = step

    def validation(
        self, step: int, values: dict[str, float], bits_per_byte: float | None, sources: dict[str, float],
        exact_match: float | None = None,
    ) -> None:  # fmt: skip
        """Args: values: the loss and the objective's measures; bits_per_byte: None: unknown, or the tokens spell
        nothing; sources: the loss of each of several; exact_match: None: it is not measured.
        """
        loss, drafts = values["loss"], {name: each for name, each in values.items() if name.startswith("draft_")}
        measures = {name: measure for name, measure in values.items() if name not in ("loss", *drafts)}
        record = {"step": step, "time": utc_now(), "validation_loss": if_finite(loss)}
        words = f"validation loss {loss:.4f}"
        if measures:
            record |= {f"validation_{name}": if_finite(measure) for name, measure in measures.items()}
            shown = (name for name in self._printed if name in measures)
            words += "".join(f"  {in_words(name)} {measures[name]:.4f}" for name in shown)
        else:  # the loss of a token's label
            perplexity = math.exp(min(loss, _LARGEST_EXPONENT))
            record |= {"perplexity": if_finite(perplexity), "bits_per_byte": if_finite(bits_per_byte)}
            bits = "n/a" if bits_per_byte is None else f"{bits_per_byte:.4f}"
            words += f"  perplexity {perplexity:.3f}  bits/byte {bits}"
        if drafts:
            record |= {f"validation_{name}": if_finite(each) for name, each in drafts.items()}
            words += f"  draft acceptance {drafts['draft_acceptance']:.1%}"
        if exact_match is not None:
            record["validation_exact_match"] = exact_match
            words += f"  exact match {exact_match:.1%}"
        record |= {f"validation_loss/{name}": if_finite(own) for name, own in sources.items()}
        self._write(step, record, prefix="validation/")
        log.info(f"step {step}  {words}" + "".join(f"  {name} {own:.4f}" for name, own in sources.items()))

    def add(self, step: int, **values: float) -> None:
        """Report further values of a step, beside those of `after_step`."""
        self._write(step, {"step": step, "time": utc_now(), **values}, prefix="train/")

    def samples(self, step: int, answered: Sequence[dict[str, Any]]) -> None:
        """Args: answered: entries of samples.jsonl without their step."""
        lines = [json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in answered]
        with self.warn_once_on_disk_error(self._samples), self._samples.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        for number, sample in enumerate(answered[:_LOGGED], 1):
            log.info(f"step {step}  {sample_line(number, sample)}")
            prompt = sample["prompt"][-1]["content"]
            parts = {"prompt": prompt, "reference": sample["reference"], "answer": sample["answer"]}
            with self.warn_once_on_disk_error("tensorboard"):  # an indented block is shown as it is
                text = "\n\n".join(f"{name}\n\n{indent(part, '    ')}" for name, part in parts.items())
                for sink in self._sinks:
                    sink.text(f"samples/{number}", text, step)
        equal = sum(sample["answer"] == sample["reference"] for sample in answered)
        log.info(f"step {step}  {equal} of {len(answered)} held-out prompts are answered exactly as expected")

    def _write(self, step: int, values: dict[str, Any], prefix: str) -> None:
        with self.warn_once_on_disk_error(self._file.name):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            named = {prefix + name.removeprefix("validation_"): value for name, value in values.items()}
            shown = {tag: float(value) for tag, value in named.items() if isinstance(value, bool | int | float)}
            del shown[f"{prefix}step"]  # the axis of every curve
            for sink in self._sinks:
                sink.scalars(shown, step)

    @contextmanager
    def warn_once_on_disk_error(self, path: Path | str) -> Iterator[None]:
        """Warn once about a full disk, and continue. The next save fails and ends the run on all ranks together."""
        try:
            yield
        except OSError as error:
            if self._writes:
                log.warning(f"{path}: cannot be written to: {error.strerror}")
            self._writes = False

    def close(self, stopped_early: bool = False) -> None:
        """Args: stopped_early: the run is done before its last step."""
        self._bar.close()
        with self.warn_once_on_disk_error(self._file.name):  # it tries once more to write what it could not
            self._file.close()
        for sink in self._sinks:
            with self.warn_once_on_disk_error("tensorboard"):
                sink.close(is_done=stopped_early or self._step == self._steps)


def drop_lines(path: Path, is_kept: Callable[[bytes], bool], longest: int = _LONGEST_LINE) -> None:
    """Remove lines from a file of the run, if it is there.

    Args:
        is_kept: raises ValueError: the line was not written by us.
        longest: bytes of a line.

    Raises:
        UserError: it is no regular file, or has such a line.
    """
    kept = list[bytes]()
    if not os.path.lexists(path):
        return
    with open_plain(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(longest), b""), 1):
            try:
                kept += [line.rstrip(b"\n") + b"\n"] if is_kept(line) else []
            except ValueError as error:
                raise UserError(f"{path}: line {number}: {error}; remove it") from None
    replace(path, b"".join(kept))


def _is_before(line: bytes, last_step: int, validation_due: bool) -> bool:
    """Whether a line is of a step that will not be repeated. Raises ValueError: it is none of ours."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):  # a kill can cut off the last one
        log.warning(f"a line of the run's metrics or samples cannot be read; it is left out: {shown(line)}")
        return False
    record: dict[str, Any] = validated(content, dict[str, Any])
    step = validated(record.get("step"), int, "step")
    is_validations = "validation_loss" in record or "answer" in record
    return bool(step < last_step or (step == last_step and not (validation_due and is_validations)))
