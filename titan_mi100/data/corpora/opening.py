"""Opens a corpus as a source of a run."""

import hashlib
from pathlib import Path

from titan_mi100.config.settings import DataConfig, SourceConfig
from titan_mi100.data.corpora.corpus import CorpusRows, read_corpus
from titan_mi100.data.prepared import DataFacts, SetFacts, SourceRows
from titan_mi100.errors import UserError
from titan_mi100.wording import plural


def open_corpus(
    source: SourceConfig, tokenizer: str, config: DataConfig, seq_len: int
) -> tuple[list[SourceRows], DataFacts]:
    """Open a corpus.

    Args:
        tokenizer: fingerprint of the model's.

    Returns:
        Its rows to train on, then those to validate on, if any; and its facts.

    Raises:
        UserError: it is incomplete, was made with another tokenizer, or leaves no row to train on.
    """
    folder = Path(source.path[0])
    corpus, fingerprint = read_corpus(folder)
    if corpus.tokenizer != tokenizer:
        problem = "was not tokenised with the model's tokenizer"
        raise UserError(f"{folder}: {problem}; prepare it again with model.tokenizer_path")
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
