"""Opens the prepared data of a run, and lets build.py make them first if they are missing.

`python -m titan_mi100.data.prepare` with the arguments of a run only prepares its data, without importing torch.
"""

import hashlib
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from titan_mi100.cli import exit_code
from titan_mi100.config.load import config_from_command_line, make_run_folder
from titan_mi100.config.settings import Config, DataConfig, ModelConfig
from titan_mi100.config.srun import RUN_FOLDER
from titan_mi100.data.build import DataRequest, make_folder
from titan_mi100.data.cache import open_or_build_folder
from titan_mi100.data.corpora.opening import open_corpus
from titan_mi100.data.files import expand_patterns
from titan_mi100.data.ledger import LEDGER, REFUSED_LEDGER, copy_ledger, has_trained
from titan_mi100.data.prepared import DataFacts, PackedDataset, Prepared, RefusedData, SourceRows, open_prepared
from titan_mi100.data.sets import HELD_OUT, file_sources, patterns, set_name
from titan_mi100.errors import UserError
from titan_mi100.files.durable import FolderLock
from titan_mi100.files.plain import read_plain
from titan_mi100.log import log, setup_logging
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.rope import DYNAMIC
from titan_mi100.text.assets import folder_of, has_tokenizer
from titan_mi100.text.load import load_tokenizer, tokenizer_files
from titan_mi100.wording import some

# Share of vocab_size below which the tokenizer is probably another model's: models pad by a few hundred tokens only.
_FEW_TOKENS = 0.9


def prepare_run(config: Config, folder: Path | None) -> Prepared:
    """Prepare a run's files (see `prepare_data`), open its corpora, and check all against its model.

    Args:
        folder: the run folder, which gets the ledger of refused data. None: another rank does that.

    Raises:
        UserError: from `prepare_data`, or a corpus cannot be read, or the tokenizer is not the model's.
    """
    _check_own_tokenizer(config.model, config.checkpoint.initial_load_path)
    path, seq_len, prepared = config.tokenizer_path(), config.training.seq_len, None
    try:
        if patterns(config.data):
            template, answers = config.model.chat_template, config.objective.answers
            prepared = prepare_data(config.data, path, template, seq_len, answers)
    except RefusedData as error:
        if folder is None:
            raise
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / (REFUSED_LEDGER if has_trained(folder) else LEDGER)
        copy_ledger(error.ledger, target)
        raise UserError(f"{error}\nevery row: {target}") from None
    fingerprint = prepared.facts.tokenizer if prepared else load_tokenizer(path).fingerprint
    prepared = open_sources(config.data, prepared, fingerprint, seq_len)
    spec = config.spec()
    count, size = f"{path}: has {prepared.facts.n_vocab:,} tokens", spec.vocab_size
    if prepared.facts.n_vocab > size:
        problem = f"{count}, more than the model's vocab_size = {size:,}"
        raise UserError(f"{problem}; name the model's own tokenizer in model.tokenizer_path, or another model")
    if prepared.facts.n_vocab < _FEW_TOKENS * size:
        prepared.facts.warnings.append(f"{count}, but the model's vocab_size is {size:,}: is it the model's tokenizer?")
    prepared.facts.warnings.extend(_beyond_trained(spec, prepared))
    return prepared


def _beyond_trained(spec: ModelSpec, prepared: Prepared) -> list[str]:
    """A warning if documents have more positions than the model is made for. Raises UserError: it computes none."""
    longest = 0
    for source in (*prepared.sources, *prepared.validation):
        of_corpus = [prepared.facts.seq_len]  # it keeps no lengths
        lengths = np.diff(source.rows.documents.starts) if isinstance(source.rows, PackedDataset) else of_corpus
        longest = max(longest, np.max(lengths, initial=0))
    if longest <= spec.reach:
        return []
    text = f"documents have up to {longest:,} tokens, and the model is made for {spec.reach:,} positions"
    if spec.rope_scaling and spec.rope_scaling.rope_type == DYNAMIC:
        reason = "beyond them its rope type 'dynamic' makes each document depend on the others of its batch"
        raise UserError(f"{text}: {reason}; set training.seq_len = {spec.reach}, or give config.json another rope type")
    return [f"{text} (max_position_embeddings): it was not trained beyond; see model.yarn_factor"]


def open_sources(config: DataConfig, files: Prepared | None, tokenizer: str, seq_len: int) -> Prepared:
    """Open all sources of a run.

    Args:
        files: the prepared files; None: all sources are corpora, and there are no validation files.
        tokenizer: fingerprint of the model's tokenizer.
        seq_len: tokens per row.

    Raises:
        UserError: from `open_corpus`.
    """
    # Prepared files are indexed by their position among the sources of files; see sets.set_name.
    of_files, sources = file_sources(config), config.sources
    train, validation, facts = list[SourceRows](), list[SourceRows](), files.facts if files else None
    held_out = {source.name: source for source in files.validation} if files else {}
    for source in sources:
        if source in of_files:
            assert files is not None
            index = of_files.index(source)
            opened = files.sources[index]
            if config.validation_fraction:
                own = held_out[set_name("validation", index, len(of_files))]
                validation.append(replace(own, name=source.name))
        else:
            (opened, *own_validation), own_facts = open_corpus(source, tokenizer, config, seq_len)
            validation += own_validation
            facts = own_facts if facts is None else _merged_facts(facts, own_facts)
        train.append(replace(opened, name=source.name, weight=source.weight, epochs=source.epochs))
    if config.validation_path:
        validation.append(held_out[set_name("validation", HELD_OUT, len(of_files))])
    assert facts is not None
    fingerprints = [source.fingerprint for source in train]
    weights = {f"weight of {s.name}": s.weight for s in train} if config.is_mixture else {}
    facts = replace(facts, fingerprints=fingerprints, made_of={**facts.made_of, **weights})
    folder, cached = (files.folder, files.cached) if files else (Path(), True)
    return Prepared(folder, train, validation, facts, cached)


def _merged_facts(facts: DataFacts, more: DataFacts) -> DataFacts:
    """Merge the facts of two sources. tokenizer, seq_len and pad_id are the same in both."""
    plan = hashlib.sha256(f"{facts.plan} {more.plan}".encode()).hexdigest()
    made_of, summary = {**facts.made_of, **more.made_of}, [*facts.summary, *more.summary]
    return replace(facts, plan=plan, made_of=made_of, summary=summary)


def _check_own_tokenizer(model: ModelConfig, load: str) -> None:
    """Refuse a tokenizer other than that in the weights' folder: its ids would mean other tokens to the model."""
    if not (model.tokenizer_path and load) or model.allow_other_tokenizer or not has_tokenizer(own := folder_of(load)):
        return
    if not _gives_same_ids(own, Path(model.tokenizer_path)):
        raise UserError(
            f"[model] tokenizer_path = {model.tokenizer_path!r} is not the model's own tokenizer in "
            f"{own}; leave it out, or set model.allow_other_tokenizer = true"
        )


def check_teacher(load: str, tokenizer_path: str) -> None:
    """Refuse a teacher whose tokenizer is another one than the student's: its ids would mean other tokens.

    Args:
        load: the teacher's weights; a head that is longer than the vocabulary does not matter.
    """
    own = folder_of(load)
    if not has_tokenizer(own):
        problem = "holds no tokenizer, so nothing shows that its ids mean what the student's mean"
        raise UserError(f"{own}: {problem}; copy the teacher's tokenizer files into it")
    if not _gives_same_ids(own, Path(tokenizer_path)):
        problem = f"has another tokenizer than the student, {tokenizer_path}: its ids mean other tokens"
        raise UserError(f"{own}: {problem}; name a teacher with the student's tokenizer with --model")


def _gives_same_ids(*paths: Path) -> bool:
    contents = [[read_plain(file) for file in tokenizer_files(path)] for path in paths]
    if contents[0] == contents[1]:  # identical files: no need to load both tokenizers
        return True
    return len({load_tokenizer(path).fingerprint for path in paths}) == 1


def prepare_data(
    config: DataConfig, tokenizer_path: str, chat_template: str, seq_len: int, answers: str = ""
) -> Prepared:
    """Open the prepared folder of these settings and files; build it first if it is missing.

    Args:
        tokenizer_path: HF folder or tokenizer file.
        chat_template: a Jinja file that replaces the tokenizer's own template, or "".
        seq_len: tokens per row.
        answers: see ObjectiveConfig.answers.

    Raises:
        RefusedData: bad records, or nothing to train on. The refusal is stored until a file or a setting changes.
        UserError: a file cannot be read, or the cache cannot be written.
    """
    files = expand_patterns([pattern.path for pattern in patterns(config)])
    request = DataRequest(config, files, tokenizer_path, chat_template, seq_len, answers)
    cache = cache_folder(config)

    def make(aside: Path) -> None:
        make_folder(aside, request, before)
        now = request.inputs(cache).stamps  # hashed again: a file may have changed while it was tokenised
        if changed := [name for name in {**before.stamps, **now} if now.get(name) != before.stamps.get(name)]:
            raise UserError(f"{some(changed)}: changed while it was read; start again")

    try:
        cache.mkdir(parents=True, exist_ok=True)
        before = request.inputs(cache)
        opened, cached = open_or_build_folder(cache / before.key, partial(open_prepared, cache=cache), make)
        return replace(opened, cached=cached)
    except OSError as error:
        where = error.filename or cache
        raise UserError(f"{where}: {error.strerror or error}; set data.cache_folder to another folder") from error


def cache_folder(config: DataConfig) -> Path:
    if config.cache_folder:
        return Path(config.cache_folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan_mi100"
    except RuntimeError:
        raise UserError("no home folder is known for the prepared data; set data.cache_folder") from None


def main() -> int:
    config = config_from_command_line(for_this_job=False)
    setup_logging(0)
    log.info("preparing the data ...")
    return exit_code(lambda: _prepare(config))


def _prepare(config: Config) -> None:
    is_new = config.checkpoint.fresh or not os.path.isdir(config.job.run_folder)
    folder = make_run_folder(config.job, config.checkpoint.fresh)
    lock = FolderLock(folder) if any(folder.iterdir()) else None  # never overwrite the ledger of a running run
    if is_new and RUN_FOLDER not in os.environ:  # without a launcher no run follows: leave no empty folder
        folder.rmdir()  # a refusal makes it again, for its ledger
    prepared = prepare_run(config, folder)
    # Where a run has trained, the trainer copies the ledger, after it has accepted the data.
    if prepared.facts.files and folder.is_dir() and not has_trained(folder):
        copy_ledger(prepared.ledger(), folder / LEDGER)
    del lock


if __name__ == "__main__":
    sys.exit(main())
