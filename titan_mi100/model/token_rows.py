"""Trained rows of a frozen embedding and head, for a few tokens: a Base model's end of a turn, tokens that were added.

As peft's `trainable_token_indices`: they stand for the table's own rows, which stay as they are. A tied model has one
set of them; else embedding and head have each their own.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_mi100.model.layers import local_weight


class TokenRows(nn.Module):
    """Rows of tokens, part of an embedding or a head.

    Attributes:
        ids: (n,), of each row its token.
        first: the first id of this rank's shard of the vocabulary.
    """

    first = 0

    def __init__(self, ids: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.ids = tuple(ids)
        self.trainable_tokens_delta = nn.Parameter(torch.empty(len(ids), hidden))  # peft's name: the rows themselves

    def columns(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(column, row) of the tokens in a block of this rank's shard."""
        columns = ((token - self.first - start, row) for row, token in enumerate(self.ids))
        return [(column, row) for column, row in columns if 0 <= column < stop - start]

    def rows(self, dtype: torch.dtype) -> Tensor:
        """(n, hidden)."""
        return local_weight(self.trainable_tokens_delta, dtype)

    def put(self, x: Tensor, ids: Tensor, factor: int = 1) -> Tensor:
        """Embeddings with these rows at their tokens.

        Args:
            x: (batch, seq, hidden). ids: (batch, seq).
            factor: 0: zeros instead, where another rank adds the rows.
        """
        number = torch.zeros_like(ids)  # 0: no row
        for row, token in enumerate(self.ids, start=1):
            number += row * (ids == token)
        rows = self.rows(x.dtype)
        own = F.embedding(number, torch.cat((rows.new_zeros(1, rows.shape[1]), rows)), padding_idx=0)
        return torch.where((number > 0)[..., None], own * factor, x)

    def write(self, rows: Tensor, weight: Tensor) -> None:
        """Write the rows into the memory of the table, whose own nobody reads: products with the table then have them.

        Call it before each use: FSDP2 gathers the table anew.

        Args:
            rows: (n, hidden). weight: (V, hidden), frozen; this rank's shard.
        """
        for column, row in self.columns(0, len(weight)):
            weight.data[column].copy_(rows[row])  # .data: autograd need not know, as the table has no gradient


class RowsEmbedding(nn.Embedding):
    """A frozen embedding with rows of its own for some tokens."""

    token_adapter: TokenRows

    def forward(self, input: Tensor) -> Tensor:
        return self.token_adapter.put(super().forward(input), input)


def rows_of(table: nn.Module | None) -> TokenRows | None:
    """The trained rows of an embedding or a head, if it has some."""
    return getattr(table, "token_adapter", None)
