"""Opens the sources of a run in the order of its config: prepared files and corpora."""

import hashlib
from dataclasses import replace
from pathlib import Path

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.corpora.opening import open_corpus
from titan_mi100.data.prepared import DataFacts, Prepared, SourceRows
from titan_mi100.data.sets import HELD_OUT, file_sources, set_name


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
    cached = files.cached if files else True
    return Prepared(
        files.folder if files else Path(),
        train,
        validation,
        replace(facts, fingerprints=fingerprints, made_of={**facts.made_of, **weights}),
        cached,
    )


def _merged_facts(facts: DataFacts, more: DataFacts) -> DataFacts:
    """Merge the facts of two sources. tokenizer, seq_len and pad_id are the same in both."""
    return replace(
        facts,
        plan=hashlib.sha256(f"{facts.plan} {more.plan}".encode()).hexdigest(),
        made_of={**facts.made_of, **more.made_of},
        summary=[*facts.summary, *more.summary],
    )
