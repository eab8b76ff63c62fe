"""Opens the sources of a run in the order of its config: prepared files and corpora."""

import hashlib
from dataclasses import replace
from pathlib import Path

from titan_mi100.config.settings import DataConfig, SourceConfig
from titan_mi100.data.corpus import Corpus, CorpusRows, read_corpus
from titan_mi100.data.prepared import DataFacts, Prepared, SetFacts, SourceRows
from titan_mi100.data.sets import HELD_OUT, file_sources, set_name
from titan_mi100.errors import UserError
from titan_mi100.wording import plural


def open_sources(config: DataConfig, files: Prepared | None, tokenizer: str, seq_len: int) -> Prepared:
    """Open all sources of a run.

    Args:
        files: the prepared files; None: all sources are corpora, and there are no validation files.
        tokenizer: fingerprint of the model's tokenizer.
        seq_len: tokens per row.

    Raises:
        UserError: a corpus is incomplete, or was made with another tokenizer.
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
            corpus, fingerprint = read_corpus(Path(source.path[0]))
            if corpus.tokenizer != tokenizer:
                problem = "was not tokenised with the model's tokenizer"
                raise UserError(f"{source.path[0]}: {problem}; prepare it again with model.tokenizer_path")
            (opened, *own_validation), own_facts = _open_corpus(source, corpus, fingerprint, config, seq_len)
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


def _open_corpus(
    source: SourceConfig, corpus: Corpus, fingerprint: str, config: DataConfig, seq_len: int
) -> tuple[list[SourceRows], DataFacts]:
    """Open a corpus.

    Returns:
        Its rows to train on, then those to validate on, if any; and its facts.
    """
    folder = Path(source.path[0])
    kept, held_out = CorpusRows.split(corpus, seq_len, config.validation_fraction)
    if not kept:
        raise UserError(f"{folder}: no row is left to train on; lower [data] validation_fraction")
    form = "concatenated" if config.concatenate else "isolated"
    # Everything that decides the content of row number n belongs into this fingerprint.
    own = hashlib.sha256(f"{fingerprint} {seq_len} {len(kept)} {form}".encode()).hexdigest()
    all_documents, all_tokens = sum(corpus.documents), sum(corpus.tokens)
    row_sets = list[SourceRows]()
    line = f"{source.name}: corpus of {plural(all_documents, 'document')}, {all_tokens:,} tokens"
    for rows, words in ((kept, "to train on"), (held_out, "to validate on")):
        if rows:
            view = CorpusRows(folder, corpus, seq_len, rows, config.concatenate)
            # Estimates: exact counts would need a pass over the corpus. The first token of each document and of each
            # row is not predicted; a row that begins with a document is subtracted twice.
            documents = max(1, round(all_documents * view.tokens / all_tokens))
            supervised = max(0, view.tokens - documents - len(rows))
            counts = SetFacts(documents, view.tokens, supervised, supervised_bytes=0, rows=len(rows))
            row_sets.append(SourceRows(source.name, view, counts, own))
            line += f", {plural(len(rows), 'row')} of {seq_len:,} {words}"
    made_of = {f"corpus {source.name}": own}
    facts = DataFacts(seq_len, corpus.pad_id, corpus.n_vocab, corpus.tokenizer, [], own, [], made_of, {}, [line], [])
    return row_sets, facts


def _merged_facts(facts: DataFacts, more: DataFacts) -> DataFacts:
    """Merge the facts of two sources. tokenizer, seq_len and pad_id are the same in both."""
    return replace(
        facts,
        plan=hashlib.sha256(f"{facts.plan} {more.plan}".encode()).hexdigest(),
        made_of={**facts.made_of, **more.made_of},
        summary=[*facts.summary, *more.summary],
    )
