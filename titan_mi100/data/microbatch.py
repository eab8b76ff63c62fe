"""The tensors of a microbatch, made of rows: what each is, who reads it, and what is counted in them."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.rows import PADDING_DOCUMENT, Row, columns_where, document_ends

# The rows of one forward, on the CPU. All tensors are (local_batch_size, seq), so that a pipeline can split them along
# dim 0.
#   input_ids, labels, positions, document_ids: int64, as in Row; and its further arrays.
#   document_ends: int32, per document of the row the column after its last token, ascending, then -1 (padding counts as
#       a document).
#   supervised_columns: int32, the columns of the row whose label is not IGNORE, ascending, then -1.
# Tensor sizes in the model depend on the last two. They are read on the host (parallel/base.py), so that the forward
# never waits for the device.
Microbatch = dict[str, Tensor]
READ_ON_HOST = ENDS, SUPERVISED, DRAFTED = "document_ends", "supervised_columns", "draft_columns"
TOKENS = "input_ids"  # what the first stage of a pipeline reads; the later ones get hidden states instead
_OF_THE_DRAFT = ("next_ids", "draft_labels", "draft_supervised")
_OF_THE_MODEL = (TOKENS, "labels", "positions", "supervised", *_OF_THE_DRAFT, *READ_ON_HOST)


def for_the_model(microbatch: Microbatch, columns: Iterable[str]) -> Microbatch:
    """The tensors that the model reads; the others are for counting. Args: columns: that the objective reads, too."""
    names = {*_OF_THE_MODEL, *columns}
    return {name: tensor for name, tensor in microbatch.items() if name in names}


def drafted(microbatch: Microbatch) -> int:
    """Number of slots that a draft head learns."""
    return int((draft_labels(microbatch) != IGNORE).sum())


def draft_labels(microbatch: Microbatch) -> Tensor:
    """The labels of a draft head, (batch, seq): slot t has that of token t + 2, if tokens t + 1 and t + 2 are learned.
    A label is of the same document, and so is the next one. The microbatch keeps them: they are counted, then learned.
    """
    if "draft_labels" not in microbatch:
        labels = microbatch["labels"]
        after = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        microbatch["draft_labels"] = torch.where(labels != IGNORE, after, IGNORE)
    return microbatch["draft_labels"]


def with_draft(microbatch: Microbatch) -> Microbatch:
    """The microbatch with what a draft head reads: next_ids, draft_labels, and their columns as in SUPERVISED. The last
    token of a document has itself as the next.
    """
    ids, documents, labels = microbatch[TOKENS], microbatch["document_ids"], draft_labels(microbatch)
    has_next = F.pad(documents[:, 1:] == documents[:, :-1], (0, 1))
    next_ids = torch.where(has_next, F.pad(ids[:, 1:], (0, 1)), ids)
    columns = torch.from_numpy(columns_where((labels != IGNORE).numpy()))
    return {**microbatch, "next_ids": next_ids, "draft_labels": labels, DRAFTED: columns}


def supervised(microbatch: Microbatch) -> Tensor:
    """Whether each token has a label, (batch, seq) bool."""
    return microbatch["labels"] != IGNORE


def sizes(microbatch: Microbatch) -> Tensor:
    """Real tokens, supervised tokens, and (query, key) pairs inside documents with key <= query; (3,) fp64."""
    real = microbatch["document_ids"] != PADDING_DOCUMENT
    pairs = (microbatch["positions"] + 1)[real].sum()
    return torch.stack([real.sum(), supervised(microbatch).sum(), pairs]).double()


def of_prompts(rows: Sequence[Sequence[int]], multiple: int) -> Microbatch:
    """Rows of token ids for the logits of each one's last token: one document per row, padded behind that token, which
    attention, being causal, does not see. Args: multiple: to which the length of all rows is rounded up.
    """
    length = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    ends, columns = (torch.full((len(rows), length), -1, dtype=torch.int32) for _ in range(2))
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        columns[index, 0] = len(row) - 1
    ends[:, 0] = length
    positions = torch.arange(length).repeat(len(rows), 1)
    return {TOKENS: ids, "positions": positions, "document_ends": ends, "supervised_columns": columns}


def collate(rows: Sequence[Row]) -> Microbatch:
    """Stack rows into a `Microbatch`, and compute its `document_ends` and `supervised_columns`."""
    further = rows[0].more.keys()
    assert all(row.more.keys() == further for row in rows), "the rows of a microbatch have other arrays than its first"
    named = [{**row._asdict(), **row.more} for row in rows]
    arrays = {name: np.stack([row[name] for row in named]) for name in (*Row._fields[:-1], *further)}
    arrays["document_ends"] = document_ends(arrays["document_ids"])
    arrays["supervised_columns"] = columns_where(arrays["labels"] != IGNORE)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
