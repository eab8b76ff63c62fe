"""Rows of documents that a test chose, as preparation packs them; random rows are in workshop/made_up.py."""

from collections.abc import Sequence

import numpy as np

from titan_mi100.data.encode import document_values
from titan_mi100.data.packing import pack_together
from titan_mi100.data.prepared import DocumentTable, PackedDataset


def packed(
    documents: Sequence[tuple[np.ndarray, np.ndarray]], seq_len: int, pad_id: int = 0, together: int = 1
) -> PackedDataset:
    """Pack documents into rows, as preparation does.

    Args:
        documents: each (ids, supervised), two (tokens,) arrays.
        together: documents of a record, see packing.pack_together.
    """
    encoded = [document_values(ids, supervised) for ids, supervised in documents]
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    packing = pack_together(lengths, seq_len, together)
    return PackedDataset(DocumentTable(np.concatenate(encoded), starts), packing, seq_len, pad_id)
