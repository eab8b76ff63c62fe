"""What all model families share: embedding, layers, final norm, head. A family brings its layer (see qwen3.py).

The model knows nothing of parallelism, except that a rank may hold a subset of the layers (a pipeline stage) and a
shard of each weight (tensor parallel). Parameters carry HF's full names, so that a checkpoint's bytes move without
mapping.

Legend: activations are (batch, seq, ...); hidden = spec.hidden_size.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.attention.plain import Eager
from titan_mi100.config.layout import Stage
from titan_mi100.config.model_spec import ModelSpec
from titan_mi100.model.layers import RMSNorm, local_weight, multiply
from titan_mi100.model.loss import head_loss


class Split(NamedTuple):
    """How tensor parallel splits the parameters of a module; see parallel/tensor_parallel.py."""

    dim: int | None  # None: every rank has them whole
    gathers: bool = False  # the output, a part of the sequence, is gathered: what follows reads all of it
    scatters: bool = False  # the output is summed over the ranks, and each keeps a part of the sequence


COLUMNS, ROWS, WHOLE, GATHERED = Split(0), Split(1, scatters=True), Split(None), Split(None, gathers=True)


class Layer(nn.Module):
    """One layer in three parts: before its positions mix, the mixing, after it. Wrappers assume no more than this.

    The parts are separate because the mixing depends on the documents of each microbatch: torch.compile can include it
    only if the backend takes the documents as tensors (see build.apply_compile).

    Attributes:
        splits: name of a module -> how tensor parallel splits it; all modules with parameters have an entry.
    """

    splits: ClassVar[Mapping[str, Split]]

    def __init__(self, spec: ModelSpec, backend: Backend) -> None:
        super().__init__()
        self.backend = backend

    @staticmethod
    def where(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, ...]:
        """What `before` reads of the positions, (batch, seq); computed once per forward for all layers."""
        raise NotImplementedError

    def forward(self, x: Tensor, where: tuple[Tensor, ...], documents: Any) -> Tensor:
        return self.after(x, self.backend(*self.before(x, where), documents))

    def before(self, x: Tensor, where: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, seq, heads, head_dim)."""
        raise NotImplementedError

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """(batch, seq, hidden), of the layer's input and the mixing's output."""
        raise NotImplementedError

    def merge(self) -> None:
        """See CausalLM.merge."""


class Decoder(nn.Module):
    """The embedding, the layers and the final norm, or a pipeline stage's share of them. The head is not included."""

    def __init__(self, kind: type[Layer], spec: ModelSpec, backend: Backend, stage: Stage) -> None:
        super().__init__()
        self.kind, self.spec, self.backend, self.stage = kind, spec, backend, stage
        self.dtype: torch.dtype | None = None  # dtype of the activations; None: the dtype of the embedding
        # With tied embeddings the last stage holds a copy of the embedding too: it is the head's weight.
        embeds = stage.first or (stage.last and spec.tie_word_embeddings)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, spec.pad_token_id) if embeds else None
        # A dict with the model's layer numbers as keys: a pipeline stage's parameters keep their HF names.
        self.layers = nn.ModuleDict({str(number): kind(spec, backend) for number in stage.layers})
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if stage.last else None

    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers.values() if isinstance(layer, Layer)]

    def forward(self, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
        where = self.kind.where(self.spec, positions)
        if self.stage.first:
            x = self.embed(x)
        for layer in self.blocks():
            x = layer(x, where, documents)
        return x if self.norm is None else self.norm(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """(batch, seq) -> (batch, seq, hidden)."""
        assert self.embed_tokens is not None
        x = self.embed_tokens(input_ids)
        return x if self.dtype is None else x.to(self.dtype)


_HEAD_BLOCK = 1 << 14  # rows of the head (tokens of the vocabulary) that are cast at a time

# (hidden states, the head's weight, labels, index of the supervised tokens) -> (1,); see loss.head_loss
HeadLoss = Callable[..., Tensor]


class Head(nn.Module):
    """The output matrix of an untied model. It is a module with a forward, because FSDP2 gathers its weight in a
    forward hook.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))

    def forward(self, hidden: Tensor, labels: Tensor | None, supervised: Tensor | None, loss: HeadLoss) -> Tensor:
        return logits_or_loss(hidden, self.weight, labels, supervised, loss)


def logits_or_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor | None, supervised: Tensor | None, loss: HeadLoss
) -> Tensor:
    """Logits of all tokens, logits of the `supervised` tokens (no labels), or the loss; see CausalLM.forward.

    Args:
        hidden: (batch, seq, hidden). weight: (V, hidden), or this rank's shard of the vocabulary.
    """
    if labels is None and supervised is None:
        return multiply(hidden, local_weight(weight, hidden.dtype))
    if labels is None:  # few tokens of a model in training: cast its fp32 head in blocks, never the full (V, hidden)
        few, blocks = hidden.flatten(0, 1)[supervised], local_weight(weight, weight.dtype).split(_HEAD_BLOCK)
        return torch.cat([multiply(few, block.to(few.dtype)) for block in blocks], dim=-1)
    assert supervised is not None, "labels need the index of the supervised tokens"
    return loss(hidden, local_weight(weight, weight.dtype), labels, supervised)  # the loss casts the weight in blocks


class CausalLM(nn.Module):
    """A causal language model, or the part of it that a pipeline stage holds. A family is a subclass.

    Args:
        backend: the attention backend; default: Eager, the reference.
        stage: the layers to build; default: the whole model.

    Attributes:
        layer: the family's layer.

    Build it under `torch.device("meta")`, shard it, call `to_empty`, then fill every parameter from a checkpoint or
    with `init.initial_values`. There are no buffers.
    """

    layer: ClassVar[type[Layer]]

    def __init__(self, spec: ModelSpec, backend: Backend | None = None, stage: Stage | None = None) -> None:
        super().__init__()
        stage = stage or Stage(range(spec.num_hidden_layers))
        self.model = Decoder(self.layer, spec, backend or Eager(), stage)
        self.lm_head = Head(spec) if stage.last and not spec.tie_word_embeddings else None
        self.head_loss: HeadLoss = head_loss

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Any = None,
        labels: Tensor | None = None,
        supervised: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits, or the summed loss if labels are given.

        Args:
            input_ids: (batch, seq). A later pipeline stage gets the hidden states of the stage before it instead,
                (batch, seq, hidden).
            positions: (batch, seq), restarting per document; default: 0, 1, ...
            documents: what `backend.prepare` returned for this microbatch; default: one document per row.
            labels: (batch, seq), already shifted; IGNORE for unsupervised tokens.
            supervised: (n,), on the device: index of the supervised tokens in the flattened batch. Without labels: the
                tokens whose logits are wanted; default: all.

        A microbatch of the loader has `document_ends` and `supervised_columns` instead of `documents` and `supervised`;
        the hook of parallel.base.read_on_host converts them.

        Returns:
            With labels the loss, (1,), in fp32 or fp64. Without labels the logits in the activations' dtype,
            (batch, seq, vocab_size) or (n, vocab_size). A stage that is not the last returns hidden states.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if documents is None:
            documents = self.model.backend.prepare(Documents.one_per_row(*positions.shape), positions.device)
        hidden = self.model(input_ids, positions, documents)
        return self.head(hidden, labels, supervised) if self.model.stage.last else hidden

    def merge(self) -> None:
        """Merge weights that have the same input, so that one product replaces several. Faster for text generation. Not
        for training: the weights become views of the merged tensors.
        """
        for block in self.model.blocks():
            block.merge()

    def head(self, hidden: Tensor, labels: Tensor | None = None, supervised: Tensor | None = None) -> Tensor:
        """Logits of the last stage's hidden states, (batch, seq, hidden), or the summed loss if labels are given."""
        if self.lm_head is not None:
            return self.lm_head(hidden, labels, supervised, self.head_loss)
        assert self.model.embed_tokens is not None
        return logits_or_loss(hidden, self.model.embed_tokens.weight, labels, supervised, self.head_loss)
