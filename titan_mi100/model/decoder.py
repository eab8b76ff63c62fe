"""The part that model families share: embedding, layers, final norm, head. A family brings its layer (see qwen3.py).

The model knows nothing of parallelism, except that a rank may hold a subset of the layers (a pipeline stage) and a
shard of each weight (tensor parallel). Parameters carry HF's full names, so that a checkpoint's bytes move without
mapping.

Legend: activations are (batch, seq, ...); hidden = spec.hidden_size.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.attention.torch_backends import Eager, cached
from titan_mi100.config.layout import IGNORE, Stage
from titan_mi100.model.draft_head import Drafted, DraftHead
from titan_mi100.model.elementwise import rotary_tables
from titan_mi100.model.layers import RMSNorm, local_weight, multiply
from titan_mi100.model.loss import HeadMemory, SharedTokens, Targets, head_loss, likeliest, token_losses
from titan_mi100.model.token_rows import rows_of
from titan_mi100.shapes.base import LayerShape, ModelSpec


def whole_rows(mix: Callable[..., Tensor], parts: Sequence[Tensor], by_channel: Sequence[Tensor] = ()) -> Tensor:
    """Mix the tokens of rows that this rank has whole. Context parallel replaces it, see parallel/context_parallel.py.

    Args:
        mix: a function of the parts, and of weights with a row for each channel of a part.
        parts: (batch, seq, heads, size) or (batch, seq, heads) each.
        by_channel: (channels, ...) each.

    Returns:
        (batch, seq, heads, size).
    """
    return mix(*parts, *by_channel)


class Layer(nn.Module):
    """One layer in three parts: `project`, `mix` and `output`. Wrappers assume no more than this.

    The parts are separate because the mixing depends on the documents of each microbatch: torch.compile can include it
    only if the backend takes the documents as tensors (see build.apply_compile).

    Attributes:
        shape: the layer as data; its parameters say how tensor parallel splits them.
        sequence_gathered_after: modules after which tensor parallel gathers the sequence: what follows reads all of it.
        sequence_scattered_after: modules whose outputs are partial sums under tensor parallel: they are summed over the
            ranks, and each keeps a part of the sequence.
        in_fp32: modules whose weights are fp32 in every computation; each is called as a module.
        routers: modules that are not trained unless training.train_router is set.
        compiled: methods that torch.compile can compile, each as one graph.
        recompute_contexts: torch.utils.checkpoint's context_fn.
        mix_rows: calls what mixes the tokens of a row, see whole_rows.
    """

    in_fp32: ClassVar[Collection[str]] = ()
    routers: ClassVar[Collection[str]] = ()
    compiled: ClassVar[Collection[str]] = ("forward", "project", "output")
    recompute_contexts: Callable[[], Any] = staticmethod(noop_context_fn)
    mix_rows: Callable[..., Tensor] = staticmethod(whole_rows)
    is_dynamic: ClassVar[bool | None] = None  # torch.compile's `dynamic`; False: a graph for each batch and length
    sequence_gathered_after: ClassVar[Collection[str]]
    sequence_scattered_after: ClassVar[Collection[str]]

    def __init__(self, spec: Any, shape: LayerShape, backend: Backend) -> None:
        super().__init__()
        self.shape, self.backend = shape, backend

    @staticmethod
    def rotary_tables(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, ...]:
        """Rotary tables of the positions, (batch, seq), or (); computed once per forward for all layers of a kind."""
        raise NotImplementedError

    @staticmethod
    def prepare(backend: Backend, documents: Documents, device: torch.device) -> Any:
        """A microbatch's documents as `mix` reads them; computed once per forward for all layers of a kind."""
        raise NotImplementedError

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], prepared: Any) -> Tensor:
        return self.output(x, self.mix(self.project(x, tables), prepared))

    def project(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tensors to mix, each (batch, seq, ...); for attention queries, keys and values."""
        raise NotImplementedError

    def mix(self, parts: tuple[Tensor, ...], prepared: Any) -> Any:
        """Mix the tokens inside each document; returns the input of `output`."""
        raise NotImplementedError

    def output(self, x: Tensor, mixed: Any) -> Tensor:
        """The layer's output, (batch, seq, hidden), from its input and the mixing's output."""
        raise NotImplementedError

    def new_decode_state(self, spec: ModelSpec, batch: int, seq: int, dtype: torch.dtype, device: torch.device) -> Any:
        """An empty KV cache or recurrent state for rows of up to `seq` tokens."""
        raise NotImplementedError

    def decode_step(self, parts: tuple[Tensor, ...], prepared: Any, state: Any, used: int, visible: Tensor) -> Any:
        """Mix the next tokens of each row while decoding, and keep them in the state.

        Args:
            prepared: as in `mix`, of the first tokens; read only by the first call (used = 0). No document starts after
                them.
            used: tokens that the state has already.
            visible: (batch, used + new), False for padding on the left.
        """
        raise NotImplementedError

    def fp32_parameters(self) -> list[nn.Parameter]:
        """The parameters of the modules in `in_fp32`."""
        return [parameter for name in self.in_fp32 for parameter in self.get_submodule(name).parameters()]


class AttentionLayer(Layer):
    """A layer that mixes tokens by attention: its parts are queries, keys and values, (batch, seq, heads, size)."""

    @staticmethod
    def rotary_tables(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, ...]:
        return rotary_tables(positions, spec.rotated, spec.rope_theta, spec.rope_scaling)

    @staticmethod
    def prepare(backend: Backend, documents: Documents, device: torch.device) -> Any:
        return backend.prepare(documents, device)

    def mix(self, parts: tuple[Tensor, ...], prepared: Any) -> Any:
        return self.mix_rows(lambda q, k, v: self.backend(q, k, v, prepared), parts)

    def new_decode_state(self, spec: ModelSpec, batch: int, seq: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Keys and values, (2, batch, kv_heads, seq, size)."""
        shape = spec.attention
        return torch.empty(2, batch, shape.kv_heads, seq, shape.head_dim, dtype=dtype, device=device)

    def decode_step(self, parts: tuple[Tensor, ...], prepared: Any, state: Any, used: int, visible: Tensor) -> Any:
        q, k, v = parts
        stored = state[:, :, :, : visible.shape[1]]
        stored[:, :, :, used:] = torch.stack((k, v)).transpose(2, 3)
        return cached(q, stored[0], stored[1], visible) if used else self.backend(q, k, v, prepared)


class Decoder(nn.Module):
    """The embedding, the layers and the final norm, or a pipeline stage's share of them. The head is not included."""

    def __init__(
        self,
        kinds: Mapping[str, type[Layer]],
        norm: type[nn.Module],
        spec: ModelSpec,
        backend: Backend,
        stage: Stage,
    ) -> None:
        super().__init__()
        self.spec, self.backend, self.stage = spec, backend, stage
        shapes = {number: spec.layers[number] for number in stage.layers}
        drafts = [spec.draft_layer] if stage.last and spec.has_draft_head and spec.draft_layer else []
        self.kinds = {shape.kind: kinds[shape.kind] for shape in (*shapes.values(), *drafts)}
        self.dtype: torch.dtype | None = None  # dtype of the activations; None: the dtype of the embedding
        # With tied embeddings the last stage holds a copy of the embedding too: it is the head's weight. A draft head
        # reads it there, too.
        embeds = stage.first or (stage.last and (spec.tie_word_embeddings or spec.has_draft_head))
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, spec.pad_token_id) if embeds else None
        # A dict with the model's layer numbers as keys: a pipeline stage's parameters keep their HF names.
        self.layers = nn.ModuleDict(
            {str(number): self.kinds[shape.kind](spec, shape, backend) for number, shape in shapes.items()}
        )
        self.norm = norm(spec.hidden_size, spec.rms_norm_eps) if stage.last else None

    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers.values() if isinstance(layer, Layer)]

    def prepare(self, documents: Documents, device: torch.device) -> dict[str, Any]:
        """A microbatch's documents as each kind of layer reads them."""
        return {name: kind.prepare(self.backend, documents, device) for name, kind in self.kinds.items()}

    def rotary_tables(self, positions: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """The rotary tables of each kind of layer for these positions, (batch, seq)."""
        return {name: kind.rotary_tables(self.spec, positions) for name, kind in self.kinds.items()}

    def forward(self, x: Tensor, positions: Tensor, documents: Mapping[str, Any]) -> Tensor:
        tables = self.rotary_tables(positions)
        if self.stage.first:
            x = self.embed(x)
        for layer in self.blocks():
            x = layer(x, tables[layer.shape.kind], documents[layer.shape.kind])
        return x if self.norm is None else self.norm(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeds the tokens: (batch, seq) -> (batch, seq, hidden)."""
        assert self.embed_tokens is not None
        x = self.embed_tokens(input_ids)
        return x if self.dtype is None else x.to(self.dtype)


_OF_DRAFT_HEAD = "next_ids", "draft_labels", "draft_supervised"
_CAST_ROWS = 1 << 14  # rows of the head (tokens of the vocabulary) that are cast at a time

# (hidden, head's weight, labels, index of the supervised tokens, further columns) -> (1 + measures,); see objectives/
HeadLoss = Callable[..., Tensor]
Columns = Mapping[str, Tensor]
Supervised = Tensor | SharedTokens | None  # the index of the supervised tokens, see CausalLM.forward


class Head(nn.Module):
    """The output matrix of an untied model. It is a module with a forward, because FSDP2 gathers its weight in a
    forward hook.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))

    def forward(self, hidden: Tensor, *others: Any) -> Tensor:
        """Args: as of logits_or_loss."""
        return logits_or_loss(self, hidden, *others)


def logits_or_loss(
    table: nn.Module,
    hidden: Tensor,
    labels: Tensor | None,
    supervised: Supervised,
    columns: Columns,
    loss: HeadLoss,
    drafted: Drafted | None,
) -> Tensor:
    """Logits of all tokens, logits of the `supervised` tokens (no labels), or the loss; see CausalLM.forward.

    Args:
        table: the head, or the embedding: its weight is (V, hidden), or this rank's shard of the vocabulary.
        hidden: (batch, seq, hidden).
    """
    weight, rows = cast(Tensor, table.weight), rows_of(table)
    if labels is None and rows is not None:
        rows.write(rows.rows(weight.dtype).detach(), local_weight(weight, weight.dtype))
    if labels is None and supervised is None:
        return multiply(hidden, local_weight(weight, hidden.dtype))
    if labels is None:  # few tokens of a model in training: cast its fp32 head in blocks, never the full (V, hidden)
        shared, own = (supervised, supervised.own) if isinstance(supervised, SharedTokens) else (None, supervised)
        few = hidden.flatten(0, 1)[own]
        blocks = local_weight(weight, weight.dtype).split(_CAST_ROWS)
        logits = torch.cat([multiply(few, block.to(few.dtype)) for block in blocks], dim=-1)
        return logits if shared is None else shared.gathered(logits)
    assert supervised is not None, "labels need the index of the supervised tokens"
    weight = local_weight(weight, weight.dtype)
    options: dict[str, Any] = {"rows": rows} if rows else {}
    if isinstance(supervised, SharedTokens):
        options["shared"], supervised = supervised, supervised.every
    main = loss(hidden, weight, labels, supervised, columns, **options)  # it casts the weight in blocks
    if drafted is None:
        return main
    # No logits are kept of it, so the objective's are kept as without it. Trained rows of tokens are in the table now.
    memory = replace(getattr(loss, "keywords", {}).get("memory", HeadMemory()), kept_elements=0)
    options = {**getattr(loss, "keywords", {}), "memory": memory}
    if not drafted.is_learned_alone:
        of_draft = head_loss(drafted.hidden, weight.detach(), drafted.labels, drafted.tokens, **options)
        main = torch.cat((main, of_draft))
    held = main.new_zeros(1) if torch.is_grad_enabled() else accepted(drafted, weight, **options).to(main.dtype)
    return torch.cat((main, held))


def accepted(drafted: Drafted, weight: Tensor, **options: Any) -> Tensor:
    """How many of the draft head's likeliest ids are the trunk's for the same place, (1,). Args: options: of
    token_losses.
    """
    labels, group = drafted.labels.flatten()[drafted.tokens], options.get("group")
    vocabulary, ids = len(weight) * (1 if group is None else group.size()), []
    for states, tokens in ((drafted.hidden, drafted.tokens), (drafted.trunk, drafted.tokens + 1)):
        best = token_losses(states, weight, Targets(tokens, labels[:, None]), **options).best
        ids.append(likeliest(states.flatten(0, 1)[tokens], weight, best, 1, vocabulary, **options)[0][:, 0])
    return ((ids[0] == ids[1]) & (labels != IGNORE)).sum(dim=0, keepdim=True)


class CausalLM(nn.Module):
    """A causal language model, or the part of it that a pipeline stage holds. A family is a subclass.

    Args:
        backend: the attention backend; default: Eager, the reference.
        stage: the layers to build; default: the whole model.

    Attributes:
        kinds: the family's layers, by their kind (LayerShape.kind).
        norm: the class of the final norm, made of the hidden size and eps.
        columns: arrays of a row that the objective reads, besides the labels.
        draft: as draft_head.train; "no": the model has no draft head, or only to draft with.

    Build it under `torch.device("meta")`, shard it, call `to_empty`, then fill every parameter from a checkpoint or
    with `init.initial_values`. There are no buffers.
    """

    kinds: ClassVar[Mapping[str, type[Layer]]]
    norm: ClassVar[type[nn.Module]] = RMSNorm
    columns: Collection[str] = ()
    draft = "no"

    def __init__(self, spec: ModelSpec, backend: Backend | None = None, stage: Stage | None = None) -> None:
        super().__init__()
        stage, backend = stage or Stage(range(spec.num_hidden_layers)), backend or Eager()
        self.model = Decoder(self.kinds, self.norm, spec, backend, stage)
        self.lm_head = Head(spec) if stage.last and not spec.tie_word_embeddings else None
        self.mtp: DraftHead | None = None
        if stage.last and spec.has_draft_head and (shape := spec.draft_layer):
            norm = partial(self.norm, spec.hidden_size, spec.rms_norm_eps)
            self.mtp = DraftHead(self.kinds[shape.kind](spec, shape, backend), norm, spec.hidden_size)
        self.head_loss: HeadLoss = head_loss  # build_model replaces it by the objective

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Any = None,
        labels: Tensor | None = None,
        supervised: Supervised = None,
        **columns: Tensor,
    ) -> Tensor:
        """Compute the logits, or the summed loss if labels are given.

        Args:
            input_ids: (batch, seq). A later pipeline stage gets the hidden states of the stage before it instead,
                (batch, seq, hidden).
            positions: (batch, seq), restarting per document; default: 0, 1, ...
            documents: what `Decoder.prepare` returned for this microbatch; default: one document per row.
            labels: (batch, seq), already shifted; IGNORE for unsupervised tokens.
            supervised: (n,), on the device: index of the supervised tokens in the flattened batch; SharedTokens under
                context parallel. Without labels: the tokens whose logits are wanted; default: all.
            columns: (batch, seq) each, that the objective reads; next_ids, draft_labels and draft_supervised (n,): as
                input_ids, labels and supervised, of the draft head, see data.microbatch.with_draft. Without them it is
                not computed.

        A microbatch of the loader has `document_ends` and `supervised_columns` instead of `documents` and `supervised`;
        the hook of parallel.base.read_on_host, which build_model adds, converts them.

        Returns:
            With labels the loss and measures, (1 + measures,), in fp32 or fp64; if a draft head is trained along, then
            its loss (if it is trained alone, that is the loss), and how many drafts are accepted, 0 in training.
            Without labels the logits, (batch, seq, vocab_size) or (n, vocab_size), in the activations' dtype. A stage
            that is not the last returns hidden states.
        """
        next_ids, labels_ahead, slots = (columns.pop(name, None) for name in _OF_DRAFT_HEAD)
        if unread := sorted(columns.keys() - {*self.columns}):
            raise TypeError(f"neither the model nor its objective reads {', '.join(unread)}")
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if documents is None:
            documents = self.model.prepare(Documents.one_per_row(*positions.shape), positions.device)
        hidden = self.model(input_ids, positions, documents)
        if not self.model.stage.last:
            return hidden
        if self.mtp is None or next_ids is None:
            return self.head(hidden, labels, supervised, columns)
        assert labels_ahead is not None and slots is not None
        states, alone = self.draft_states(hidden, next_ids, positions, documents), self.draft == "after"
        drafted = Drafted(states, labels_ahead, slots, hidden, alone)
        if alone:
            hidden, labels, supervised = drafted.hidden, drafted.labels, drafted.tokens
        return self.head(hidden, labels, supervised, columns, drafted)

    def blocks(self) -> list[Layer]:
        """The layers, with the draft head's."""
        of_draft = self.mtp.layers if self.mtp is not None else ()
        return self.model.blocks() + [layer for layer in of_draft if isinstance(layer, Layer)]

    def draft_states(self, hidden: Tensor, next_ids: Tensor, positions: Tensor, documents: Mapping[str, Any]) -> Tensor:
        """The draft head's output, (batch, seq, hidden), detached from the trunk. Args: as of forward and DraftHead."""
        assert self.mtp is not None
        layer = next(layer for layer in self.mtp.layers if isinstance(layer, Layer))
        tables = layer.rotary_tables(self.model.spec, positions)
        with torch.no_grad():
            embedded = self.model.embed(next_ids)
        # FSDP2 reduces a part's gradients when its input has one; else it would keep them until the trunk has its own.
        hidden = hidden.detach().requires_grad_(self.draft == "along")
        return self.mtp(hidden, embedded, tables, documents[layer.shape.kind])  # type: ignore[no-any-return]

    def merge(self) -> None:
        """Merge weights that have the same input, so that one product replaces several. Faster for text generation. Not
        for training: the weights become views of the merged tensors.
        """
        for module in self.model.layers.modules():
            if (merge := getattr(module, "merge", None)) is not None:
                merge()

    def head(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        supervised: Supervised = None,
        columns: Columns = MappingProxyType({}),
        drafted: Drafted | None = None,
    ) -> Tensor:
        """Logits of the last stage's hidden states, (batch, seq, hidden), or the summed loss if labels are given, with
        the draft head's behind it.
        """
        if self.lm_head is not None:
            return self.lm_head(hidden, labels, supervised, columns, self.head_loss, drafted)
        assert self.model.embed_tokens is not None
        return logits_or_loss(self.model.embed_tokens, hidden, labels, supervised, columns, self.head_loss, drafted)
