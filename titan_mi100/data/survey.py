"""Counts the tokens of a run's files before they are prepared: all of them, or those that some seconds suffice for."""

import time
from contextlib import closing
from typing import NamedTuple

import numpy as np

from titan_mi100.config.settings import Config
from titan_mi100.data.answers import PAIRS
from titan_mi100.data.build import DataRequest, open_files
from titan_mi100.data.encode import REJECTED
from titan_mi100.data.files import expand_patterns
from titan_mi100.data.sets import patterns
from titan_mi100.data.tokenise import tokenise


class Survey(NamedTuple):
    lengths: np.ndarray  # (documents,) int64: tokens
    places: np.ndarray  # (documents,) float64 in [0, 1): those below data.validation_fraction are held out
    share: float  # of the files that was read
    refused: int  # rows
    own_end: str = ""  # the token that ends a turn, if it is not the eos_token, as of a base model


def survey(config: Config, seconds: float) -> Survey:
    """Read a run's files as its preparation will, for about so many seconds.

    Raises:
        UserError: a file cannot be read, or the template or a setting does not fit.
    """
    files = expand_patterns([pattern.path for pattern in patterns(config.data)])
    tokenizer, template, answers = config.tokenizer_path(), config.model.chat_template, config.objective.answers
    request = DataRequest(config.data, files, tokenizer, template, config.training.seq_len, answers)
    sources, encoder = open_files(request)
    chunks, sizes, until, share = [], list[int](), time.monotonic() + seconds, 1.0
    with closing(tokenise(sources, encoder, config.data.workers, sizes.append)) as reading:
        for chunk in reading:
            chunks.append(chunk)
            if time.monotonic() > until:
                # A chunk's bytes are reported when the next one is read. More are read than have arrived.
                share = sum(sizes[: len(chunks)]) / max(1, sum(source.bytes for source in sources))
                break
    records, lengths = (np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("records", "lengths"))
    places = np.repeat(records["hash"][:, 0] / 2.0**64, records["documents"])
    if config.objective.answers == PAIRS:  # both answers share a row
        lengths, places = lengths.reshape(-1, 2).sum(1), places[::2]
    own_end = encoder.end_of_turn if encoder.end_of_turn != encoder.tokenizer.eos_token else ""
    return Survey(lengths, places, min(share, 1.0), int((records["status"] == REJECTED).sum()), own_end)
