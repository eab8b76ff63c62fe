"""The draft head of Qwen3.5 (`mtp.*`): it predicts the token after next, and servers draft with it.

x = fc([norm(embedding of token t + 1), norm(hidden state of slot t)]), one layer with full attention, a norm; the
trunk's own head then gives the logits of token t + 2. The hidden state is the one after the trunk's final norm, which
the head reads, too. Source: vLLM's and SGLang's qwen3_5_mtp.py; tests/test_draft_head.py builds it of transformers'
layer, norms and linear.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_mi100.model.layers import Linear


class Drafted(NamedTuple):
    """What the draft head's loss is computed of.

    Attributes:
        hidden: (batch, seq, hidden): the head's output of each slot.
        labels: (batch, seq): two tokens ahead; IGNORE where nothing is learned.
        tokens: (n,), n > 0: index of the slots that have a label in the flattened batch.
        trunk: (batch, seq, hidden): the trunk's hidden state.
        is_learned_alone: the trunk is frozen.
    """

    hidden: Tensor
    labels: Tensor
    tokens: Tensor
    trunk: Tensor
    is_learned_alone: bool


class DraftHead(nn.Module):
    """The parts of the head that are its own. It reads embedding and head of the trunk, and changes neither.

    Attributes:
        part: this rank's part of the sequence and their number, under tensor parallel.
    """

    part = (0, 1)

    def __init__(self, layer: nn.Module, norm: Callable[[], nn.Module], hidden: int) -> None:
        super().__init__()
        self.fc = Linear(2 * hidden, hidden)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.layers = nn.ModuleList([layer])

    def forward(self, hidden: Tensor, embedded: Tensor, tables: tuple[Tensor, ...], documents: Any) -> Tensor:
        """The state whose logits are those of the token after next, (batch, seq, hidden).

        Args:
            hidden: (batch, seq, hidden), after the trunk's final norm.
            embedded: of the next tokens; under tensor parallel this rank's part of the sequence.
            tables, documents: as the layer reads them.
        """
        x = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(self.own_part(hidden))), dim=-1)
        return self.norm(self.layers[0](self.fc(x), tables, documents))  # type: ignore[no-any-return]

    def own_part(self, hidden: Tensor) -> Tensor:
        """This rank's part of the sequence, (batch, seq / parts, hidden)."""
        number, parts = self.part
        return hidden.chunk(parts, dim=1)[number]
