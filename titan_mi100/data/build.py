"""Builds a prepared folder: reads, checks, tokenises and packs the files. Imports no torch."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.cli import version_of
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.answers import LABELS, PAIRS
from titan_mi100.data.cache import Stamp, content_hash
from titan_mi100.data.encode import Chunk, Encoder, Source
from titan_mi100.data.formats import choose_format
from titan_mi100.data.ledger import Ledger
from titan_mi100.data.packing import Packing, pack_together
from titan_mi100.data.prepared import DataFacts, SetFacts, write_meta
from titan_mi100.data.sets import HELD_OUT, choose_sets, file_sources, patterns, set_name
from titan_mi100.data.tokenise import tokenise
from titan_mi100.errors import UserError, read_or_refuse
from titan_mi100.files.patterns import unusable
from titan_mi100.files.templates import TEMPLATE
from titan_mi100.log import ByteProgress, log
from titan_mi100.text.assets import VARIABLES
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer, tokenizer_files
from titan_mi100.wording import plural, shortened, some

_PACKAGE = Path(__file__).parents[1]
_CODE = ("data/[!.]*.py", "data/[!.]*.txt", "text/[!.]*.py", "files/templates.py", "wording.py")
# A prepared folder's content depends on this code, too. Hashed at import: the files may be edited during the run.
CODE_HASH = hashlib.sha256(
    b"".join(file.read_bytes() for pattern in _CODE for file in sorted(_PACKAGE.glob(pattern)))
).hexdigest()
# Raised when a version reads some rows differently from the one before: a resumed run whose rows differ names it.
# 2: masks, parts of a row in other columns, and several end tokens of a text are no longer ignored.
# 3: an answer and its calls in two messages are one turn; messages as JSON text are read; end tokens behind an answer
#    and the tags around a tool's result are no longer repeated.
# 4: a tool's input_schema is rendered as its parameters.
_READING = 4
LIBRARIES = ("tiktoken", "sentencepiece", "jinja2", "tokenizers")
_MANY_DOCUMENTS = 100_000  # packing more takes a while, so a log line announces it


class Inputs(NamedTuple):
    """The state of everything that a prepared folder depends on."""

    key: str  # a hash of the files' contents and names (the ledger shows the names), of the options and the code
    made_of: dict[str, Any]  # name -> setting or hash, so that a resumed run can say what has changed
    stamps: dict[str, Stamp]  # by file name


@dataclass(frozen=True)
class DataRequest:
    """The files to prepare, and how."""

    config: DataConfig
    files: list[list[str]]  # per entry of `sets.patterns`
    tokenizer_path: str
    chat_template: str
    seq_len: int
    answers: str = ""  # see ObjectiveConfig.answers

    def inputs(self, cache: Path) -> Inputs:
        """Hash the files. Raises UserError: one cannot be read, or it changes while it is hashed."""
        settings = tokenizer_files(self.tokenizer_path) + ([Path(self.chat_template)] if self.chat_template else [])
        names = [file for files in self.files for file in files] + list(map(str, settings))
        stamps = {}
        for name in names:
            if problem := unusable(name, TEMPLATE):
                raise UserError(f"{name}: {problem}")
            with read_or_refuse(name):
                stamps[name] = content_hash(Path(name), cache)
        # cache_folder and workers do not change the result, so they are not part of the key
        options = {**asdict(self.config), "cache_folder": "", "workers": 0, "seq_len": self.seq_len}
        options |= {"answers": self.answers} if self.answers else {}
        code = [CODE_HASH, *map(version_of, LIBRARIES), sys.version_info[:2]]  # Python's version: its Unicode tables
        hashes = [stamps[name][0] for name in names]
        follows_from = [options, hashes, self.files, [file.name for file in settings], code]
        key = hashlib.sha256(json.dumps(follows_from, sort_keys=True).encode()).hexdigest()[:32]
        # Runs of earlier versions, which lack some settings, read rows as with their defaults.
        newer = ("null_arguments", "chosen_column", "rejected_column", "label_column", "special_in_content", *VARIABLES)
        others = ("source", "max_cut_share")
        made_of = {k: v for k, v in options.items() if k not in others and not (k in newer and v == "")}
        made_of["version of the row reader"] = _READING
        made_of |= {f"file {name}": sha256 for name, sha256 in zip(names, hashes, strict=True)}
        return Inputs(key, made_of, stamps)


def make_folder(folder: Path, request: DataRequest, inputs: Inputs) -> None:
    """Write all files of a prepared folder. If the data are refused: only the ledger and meta.json, with the reason.

    Args:
        inputs: the result of `request.inputs`.

    Raises:
        UserError: a file cannot be read, or the template or a setting does not fit.
    """
    started = time.perf_counter()
    config = request.config
    sources, encoder = open_files(request)
    tokenizer = encoder.tokenizer
    ledger, tokens = _tokenise_all(folder / "tokens.bin", sources, encoder, config, not request.answers)
    records, sets = ledger.records, choose_sets(ledger, config)

    facts = None
    refusal = ledger.refusal(config) or _empty_set_problem(request, ledger, sets) or _lost_share_problem(ledger, config)
    if not refusal:
        shape, together = (request.seq_len, tokenizer.pad_token_id), 2 if request.answers == PAIRS else 1
        counts, fingerprints, plan = _pack_sets(folder, sets, tokens, ledger, shape, together)
        np.save(folder / "documents.npy", tokens.starts)
        np.save(folder / "document_lines.npy", tokens.records)
        if request.answers:
            np.save(folder / "labels.npy", tokens.labels)
        np.save(folder / "lines.npy", np.column_stack([records[name] for name in ("file", "line", "element")]))
        in_sets = [f"{name}: {_describe(count, request.seq_len)}" for name, count in counts.items()]
        chosen = np.any([mask for name, mask in sets.items() if name.startswith("train")], axis=0)
        enable_thinking, thinking_lines = _thinking_default(ledger, chosen, config.variables.get("enable_thinking"))
        facts = DataFacts(
            seq_len=request.seq_len,
            pad_id=tokenizer.pad_token_id,
            n_vocab=tokenizer.n_vocab,
            tokenizer=tokenizer.fingerprint,
            fingerprints=fingerprints,
            plan=plan,
            files=[source.path for source in sources],
            made_of=inputs.made_of,
            sets=counts,
            summary=[*_format_lines(sources, config), *ledger.summary(), *in_sets, *thinking_lines],
            warnings=[
                *filter(None, [tokenizer.warning, _one_sided(tokens.labels) if request.answers == LABELS else ""]),
                *ledger.warnings(config),
            ],
            enable_thinking=enable_thinking,
            variables={name: value for name, value in config.variables.items() if name != "enable_thinking"},
            system_prompt=config.system_prompt if encoder.end_of_turn else None,
            end_of_turn=encoder.end_of_turn,
            answers=request.answers,
            end_of_turn_id=tokenizer.id_of(encoder.end_of_turn) if encoder.end_of_turn else None,
        )
    ledger.write(folder / "ledger.csv")
    write_meta(folder, inputs.key, facts, refusal, round(time.perf_counter() - started, 3))


def open_files(request: DataRequest) -> tuple[list[Source], Encoder]:
    """The files with their formats, and what encodes their records. Raises UserError: a file or a setting is wrong."""
    config, tokenizer, answers = request.config, load_tokenizer(request.tokenizer_path), request.answers
    sources = []
    for number, (pattern, files) in enumerate(zip(patterns(config), request.files, strict=True)):
        own = replace(config, format=pattern.format)
        sources += [Source(file, number, choose_format(file, own, answers), os.path.getsize(file)) for file in files]
    template = _load_template(request, sources, tokenizer)
    return sources, Encoder(tokenizer, template, config, request.seq_len)


def _pack_sets(
    folder: Path, sets: dict[str, np.ndarray], tokens: "_Tokens", ledger: Ledger, shape: tuple[int, int], together: int
) -> tuple[dict[str, SetFacts], list[str], str]:
    """Pack each set into rows of its own, and write the packing plans.

    Args:
        shape: (seq_len, token id of the padding).
        together: documents of a record that share a row.

    Returns:
        The sets' counts; per training source the fingerprint of its rows; the fingerprint of all rows.
    """
    counts, fingerprints, plan = dict[str, SetFacts](), list[str](), hashlib.sha256()
    for name, chosen in sets.items():
        packing = _pack(tokens, chosen, shape[0], together)
        np.save(folder / f"{name}_starts.npy", packing.starts)
        np.save(folder / f"{name}_documents.npy", packing.documents)
        counts[name] = _count(packing, tokens, ledger, chosen)
        packed = packing.starts.tobytes() + packing.documents.tobytes()
        if name.startswith("train"):
            own = tokens.digests[len(fingerprints)]  # it already includes the source's token values
            own.update(f"{shape[0]} {shape[1]}".encode() + packed)
            fingerprints.append(own.hexdigest())
            plan = own if len(fingerprints) == 1 else hashlib.sha256("".join(fingerprints).encode())
        else:
            plan.update(tokens.digests[HELD_OUT].digest() + packed)
    return counts, fingerprints, plan.hexdigest()


def _load_template(request: DataRequest, sources: Sequence[Source], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template; None if no file holds conversations."""
    if all(source.format.name in ("text", "tokens", "samples") for source in sources):
        if idle := [name for name in ("system_prompt", *VARIABLES) if getattr(request.config, name)]:
            raise UserError(f"[data] {idle[0]} is for conversations, and no data file holds any; leave it out")
        return None
    template = ChatTemplate.from_folder(request.tokenizer_path, request.chat_template, tokenizer)
    if template.is_dated:
        raise UserError(
            "the chat template writes the date (strftime_now), so rows would change from day to day; set "
            "model.chat_template to a copy with a fixed date"
        )
    template.require(request.config.variables)
    return template


def _one_sided(labels: np.ndarray) -> str:
    """A warning of single answers that all have the same label; pairs have both, other data none (0)."""
    if not len(labels) or labels.min() != labels.max() or not labels[0]:
        return ""
    word = "true" if labels[0] > 0 else "false"
    return (
        f"every label is {word}: nothing is compared; add answers of the other kind, or train on the good ones as sft"
    )


class _Tokens(NamedTuple):
    """Facts of the documents in tokens.bin."""

    starts: np.ndarray  # (documents + 1,) int64: index of each document's first token, then the number of tokens
    records: np.ndarray  # (documents,) int64: the line of the ledger that each document comes from
    supervised_bytes: np.ndarray  # (documents,) int64: UTF-8 bytes of its supervised tokens
    labels: np.ndarray  # (documents,) int8, see Chunk.labels
    # per source a hashlib object over the token values of its training files; the last one: of the held-out files
    digests: list[Any]


def _tokenise_all(
    path: Path, sources: Sequence[Source], encoder: Encoder, config: DataConfig, can_split: bool
) -> tuple[Ledger, _Tokens]:
    """Write the token values of all documents to `path`, and enter every record in a ledger."""
    all_patterns, token_sizes = patterns(config), _token_sizes(encoder.tokenizer, encoder.end_of_turn)
    ledger = Ledger(sources, [pattern.path for pattern in all_patterns], can_split)
    digests = [hashlib.sha256() for _ in [*file_sources(config), HELD_OUT]]  # index -1 is HELD_OUT
    lengths, supervised_bytes = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    labels = [np.zeros(0, dtype=np.int8)]
    size = sum(source.bytes for source in sources)
    with path.open("wb") as file, ByteProgress("preparing data", size) as progress:
        for chunk in tokenise(sources, encoder, config.workers, progress.advance):
            ledger.add(chunk)
            lengths.append(chunk.lengths)
            supervised_bytes.append(_supervised_bytes(chunk, token_sizes))
            labels.append(chunk.labels)
            content = chunk.values.tobytes()
            file.write(content)
            digests[all_patterns[sources[chunk.records["file"][0]].pattern].source].update(content)
    ledger.close()
    records = np.repeat(np.arange(len(ledger.records)), ledger.records["documents"])
    starts, of_documents = np.cumsum(np.concatenate(lengths)), np.concatenate(supervised_bytes)
    return ledger, _Tokens(starts, records, of_documents, np.concatenate(labels), digests)


def _pack(tokens: _Tokens, chosen: np.ndarray, seq_len: int, together: int) -> Packing:
    """Pack the documents of a set. Args: chosen: (records,) bool, the records in the set."""
    documents = np.flatnonzero(chosen[tokens.records])
    if len(documents) > _MANY_DOCUMENTS:
        log.info(f"packing {plural(len(documents), 'document')} into rows of {seq_len:,} tokens")
    packing = pack_together(np.diff(tokens.starts)[documents], seq_len, together)
    return Packing(packing.starts, documents[packing.documents])


def _count(packing: Packing, tokens: _Tokens, ledger: Ledger, chosen: np.ndarray) -> SetFacts:
    return SetFacts(
        documents=len(packing.documents),
        tokens=int(np.diff(tokens.starts)[packing.documents].sum()),
        supervised=int(ledger.records["supervised"][chosen].sum()),
        supervised_bytes=int(tokens.supervised_bytes[chosen[tokens.records]].sum()),
        rows=len(packing.starts) - 1,
    )


def _empty_set_problem(request: DataRequest, ledger: Ledger, sets: dict[str, np.ndarray]) -> str:
    config, sources = request.config, file_sources(request.config)
    empty = [name for name, chosen in sets.items() if not chosen.any()]
    for number, source in enumerate(sources):
        if set_name("train", number, len(sources)) in empty:
            lines = [f"{', '.join(source.path)}: no row is left to train on", *ledger.summary()]
            if config.overlong == "drop" and (longest := int(ledger.records["tokens"].max())) > request.seq_len:
                remedy = "raise training.seq_len" + ', or set data.overlong = "split"' * (not request.answers)
                lines.append(f"the longest row has {longest:,} tokens: {remedy}")
            return "\n".join(lines)
    if empty:
        paths = config.validation_path or [path for source in sources for path in source.path]
        return (
            f"{', '.join(paths)}: no row is left to validate on; "
            "raise [data] validation_fraction, or train without validation"
        )
    return ""


def _lost_share_problem(ledger: Ledger, config: DataConfig) -> str:
    lost, is_cut = ledger.lost(), config.overlong == "truncate"
    over = {
        "max_lost_share": [text for rows, _, text in lost if rows > config.max_lost_share],
        "max_cut_share": [text for _, tokens, text in lost if is_cut and tokens > config.max_cut_share],
    }
    limits = (f"that is more than [data] {key} = {getattr(config, key)} allows; 1 allows any share" for key in over)
    return next(("\n".join([*lines, limit]) for lines, limit in zip(over.values(), limits, strict=True) if lines), "")


def _thinking_default(ledger: Ledger, chosen: np.ndarray, given: bool | None) -> tuple[bool | None, list[str]]:
    """`DataFacts.enable_thinking`: as set, else by the majority of the rows to train on; and the log's line on it."""
    votes = ledger.records["thinking"][chosen]
    without, with_it = int((votes < 0).sum()), int((votes > 0).sum())
    if not without + with_it:
        return given, []
    thinks = with_it >= without if given is None else given
    counts = f"rows that answer without thinking: {without:,}, with it: {with_it:,}"
    return thinks, [f"prompts: {counts}; generation and evaluation will set enable_thinking = {str(thinks).lower()}"]


def _token_sizes(tokenizer: Tokenizer, end_of_turn: str) -> np.ndarray:
    """UTF-8 bytes of each token, (n_vocab,) int64; 0 for the end and padding tokens and for unused ids."""
    sizes = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    ends = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.id_of(end_of_turn)
    for token in range(tokenizer.n_vocab):
        if token not in ends:
            with suppress(UserError):  # vocabularies may have gaps
                sizes[token] = len(tokenizer.token_bytes(token))
    return sizes


def _supervised_bytes(chunk: Chunk, token_sizes: np.ndarray) -> np.ndarray:
    """UTF-8 bytes of each document's supervised tokens, (documents,) int64, for bits per byte."""
    starts = np.cumsum(chunk.lengths) - chunk.lengths
    sizes = np.where(chunk.values & 1, token_sizes[chunk.values >> 1], 0)
    sizes[starts] = 0  # a document's first token is not predicted, so it has no loss
    return np.add.reduceat(sizes, starts) if len(starts) else sizes


def _format_lines(sources: Sequence[Source], config: DataConfig) -> list[str]:
    """Lines for the log: the files of each format, and the system prompt that is added."""
    by_format: dict[str, list[str]] = {}
    for source in sources:
        by_format.setdefault(f"{source.format.name} ({source.format.description})", []).append(source.path)
    added = [f"system message added: {shortened(repr(config.system_prompt), 200)}"] if config.system_prompt else []
    return [f"{some(files, 1)}: format {form}" for form, files in by_format.items()] + added


def _describe(count: SetFacts, seq_len: int) -> str:
    return (
        f"{plural(count.documents, 'document')}, {plural(count.tokens, 'token')}, {count.supervised:,} supervised, "
        f"in {plural(count.rows, 'row')} of {seq_len} ({count.tokens / (count.rows * seq_len):.1%} real)"
    )
