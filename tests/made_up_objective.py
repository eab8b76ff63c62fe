"""An objective that the product does not have: pairs of answers, of which the first should be the likelier one.

The loss of a pair is -log sigmoid(beta (a - b)), where a and b are the sums of log p - reference over the supervised
tokens of its two documents (Rafailov et al., 2023). `reference` is a further column of the rows, one value per token.
Here log p is that of two tokens, the label with SHARES[0] and its successor with SHARES[1], as a teacher may want it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from packed_rows import packed
from torch import Tensor

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.data.rows import Row
from titan_mi100.model.loss import Predicted, Targets, of_labels
from titan_mi100.objectives.base import Objective

BETA, SEQ_LEN, SHARES = 0.3, 32, (0.9, 0.1)


class PairLoss(Objective):
    columns = ("document_ids", "reference")

    def count(self, microbatch: Microbatch) -> int:
        return int(((microbatch["document_ids"].amax(1) + 1) // 2).sum())

    def targets(self, labels: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Targets:
        (tokens, ids), known = of_labels(labels, tokens), labels.flatten()[tokens] != IGNORE
        ids = torch.cat((ids, torch.where(known[:, None], (ids + 1) % 320, IGNORE)), 1)
        return Targets(tokens, ids)

    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        losses = predicted.losses @ predicted.losses.new_tensor(SHARES)
        documents, seq = columns["document_ids"], columns["document_ids"].shape[1]
        place = tokens // seq * seq + documents.flatten()[tokens].clamp(min=0)  # a slot for each document of each row
        ratios = -losses - columns["reference"].flatten()[tokens].to(losses.dtype)
        sums = losses.new_zeros(documents.numel()).index_add(0, place, ratios).view(len(documents), seq // 2, 2)
        is_pair = 2 * torch.arange(seq // 2, device=losses.device) < documents.amax(1, keepdim=True)
        return torch.where(is_pair, F.softplus(-BETA * (sums[..., 0] - sums[..., 1])), 0.0).sum().view(1)


def reference(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Made-up log probabilities of the next token where it is learned, else 0; of one document."""
    return np.append(np.where(learned[1:], -1.0 - (ids[1:] % 7) / 2, 0.0), 0.0)


class Pairs(PackedDataset):
    def row(self, index: int) -> Row:
        row = super().row(index)
        values = [reference(*document) for document in row.documents()]
        column = np.zeros(self.seq_len)
        column[: sum(map(len, values))] = np.concatenate([*values, []])
        return row._replace(more={"reference": column})


def pairs(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> Pairs:
    rows = packed(documents, SEQ_LEN, together=2)
    return Pairs(rows.documents, rows.packing, rows.seq_len, rows.pad_id)
