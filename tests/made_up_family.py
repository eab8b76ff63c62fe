"""A family of models that nobody publishes, with everything that a family may have and Qwen3 has not.

Layers of two kinds: attention without positions, and a gated linear recurrence behind a causal convolution (a parameter
of three dimensions), whose state must not cross documents. One projection has queries, keys and values of unequal sizes
in one tensor, which tensor parallel splits each by itself. Two projections have a bias: one is split by its outputs,
the other by its inputs. Two experts are stacked in one tensor; every token uses both. Norms are zero-centred. A tensor
is carried along and not used. Importing this module registers the family; no file of the package names it.

`logits_of` computes the same in plain loops, document by document, from the tensors as they are in files.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.model.decoder import AttentionLayer, CausalLM, Layer
from titan_mi100.model.families import MODELS
from titan_mi100.model.layers import Linear, local_weight
from titan_mi100.shapes.base import (
    INPUTS,
    OUTPUTS,
    WHOLE,
    AttentionShape,
    LayerShape,
    ModelSpec,
    Parameter,
    Split,
)
from titan_mi100.shapes.families import FAMILIES, Family
from titan_mi100.shapes.saved import FP32, MIX, PROJECT, Saved

KERNEL, EXPERTS, CARRIED = 3, 2, "mtp.extra.weight"


@dataclass(frozen=True)
class MadeUpSpec(ModelSpec):
    model_type: ClassVar[str] = "made_up"
    norm_start: ClassVar[str] = "zeros"
    vocab_size: int = 320
    hidden_size: int = 32
    num_hidden_layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    channels: int = 16  # of queries and keys of the recurrence; its values have twice as many
    inner: int = 64  # of each expert
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    initializer_range: float = 0.2
    pad_token_id: int | None = None

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        hidden, c = self.hidden_size, self.channels
        norm, stacked = Parameter((hidden,), WHOLE, "norm", "zeros"), (self.inner,) * EXPERTS
        common = {
            "norm.weight": norm,
            "second_norm.weight": norm,
            "experts.router.weight": Parameter((EXPERTS, hidden), WHOLE),
            "experts.up.weight": Parameter((EXPERTS, self.inner, hidden), Split(0, stacked)),
            "experts.down.weight": Parameter((EXPERTS, hidden, self.inner), Split(1, (hidden,) * EXPERTS)),
        }
        q, k, parts = self.heads * self.head_size, self.kv_heads * self.head_size, (c, c, 2 * c)
        attention = {
            "q_proj.weight": Parameter((q, hidden), OUTPUTS),
            "k_proj.weight": Parameter((k, hidden), OUTPUTS),
            "v_proj.weight": Parameter((k, hidden), OUTPUTS),
            "o_proj.weight": Parameter((hidden, q), INPUTS),
            "q_proj.bias": Parameter((q,), OUTPUTS, "other", "zeros"),
            "o_proj.bias": Parameter((hidden,), WHOLE, "other", "zeros"),
        }
        delta = {
            "in_proj.weight": Parameter((sum(parts), hidden), Split(0, parts)),
            "conv.weight": Parameter((sum(parts), 1, KERNEL), Split(0, parts), "other"),
            "o_proj.weight": Parameter((hidden, 2 * c), INPUTS),
        }
        # as `titan-mi100 plan --rehearse N --saved` lists it
        before = (*[Saved("norm", hidden, PROJECT, FP32)] * 2, Saved("projections", hidden, PROJECT))
        by_attention = Saved("q", q, MIX), Saved("k", k, MIX), Saved("v", k, MIX), Saved("output", q, MIX)
        by_delta = (*[Saved("mix", c, MIX)] * 11, *[Saved("mix", 2 * c, MIX)] * 2, *[Saved("mix", hidden, MIX)] * 4)
        after = (
            *[Saved("second_norm", hidden, dtype=FP32)] * 2,
            Saved("experts.router", hidden),
            *[Saved("experts", self.inner), Saved("experts.down", self.inner), Saved("experts", hidden)] * EXPERTS,
        )
        kinds = {
            kind: LayerShape(
                kind=kind,
                parameters=parameters | common,
                adapted=adapted,
                products=sum(p.size for p in (parameters | common).values() if p.role == "matrix"),
                last_product=EXPERTS * hidden * self.inner,
                pair_flops=4 * q if kind == "attention" else 0,
                input=hidden,
                saved=(*before, *mixing, *after),
                temporaries=(Saved("gradients of two hidden states", 2 * hidden),),
            )
            for kind, parameters, mixing, adapted in (
                ("attention", attention, by_attention, ("q_proj", "k_proj", "v_proj", "o_proj")),
                ("delta", delta, by_delta, ("o_proj",)),
            )
        }
        return tuple(kinds["attention" if number % 2 else "delta"] for number in range(self.num_hidden_layers))

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_size)

    def passes_through(self, name: str) -> bool:
        return name == CARRIED

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("heads", "kv_heads", "channels", "inner", "vocab_size")}

    def input_sizes(self) -> dict[str, tuple[int, bool]]:
        return {name: (getattr(self, name), name != "hidden_size") for name in ("hidden_size", "inner")}

    def problems(self) -> list[str]:
        return []


class Norm(nn.Module):
    """Zero-centred: the weight is added to one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, 1 + local_weight(self.weight, x.dtype), self.eps)


class Channels(nn.Module):
    """The convolution's weight of some channels; DeltaLayer reads it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, KERNEL))


class Experts(nn.Module):
    def __init__(self, spec: MadeUpSpec) -> None:
        super().__init__()
        self.router = Linear(spec.hidden_size, EXPERTS)
        self.up = nn.ModuleList(Linear(spec.hidden_size, spec.inner) for _ in range(EXPERTS))
        self.down = nn.ModuleList(Linear(spec.inner, spec.hidden_size) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1).unbind(-1)
        outputs = [down(F.silu(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return sum(share[..., None] * y for share, y in zip(shares, outputs, strict=True))  # type: ignore[return-value]


class Common(Layer):
    """The second half of both kinds of layers. Under tensor parallel o_proj and the experts give partial sums."""

    sequence_gathered_after = ("norm", "second_norm")
    sequence_scattered_after = ("o_proj", "experts")

    def __init__(self, spec: MadeUpSpec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.norm, self.second_norm = (Norm(spec.hidden_size, spec.rms_norm_eps) for _ in range(2))
        inputs = shape.parameters["o_proj.weight"].shape[1]
        self.o_proj = Linear(inputs, spec.hidden_size, bias="o_proj.bias" in shape.parameters)
        self.experts = Experts(spec)

    @staticmethod
    def rotary_tables(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, ...]:
        return ()

    def output(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.o_proj(mixed.flatten(2))
        return x + self.experts(self.second_norm(x))


class Attention(Common, AttentionLayer):
    def __init__(self, spec: MadeUpSpec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.head_size = spec.head_size
        self.q_proj = Linear(spec.hidden_size, spec.heads * spec.head_size, bias=True)
        self.k_proj, self.v_proj = (Linear(spec.hidden_size, spec.kv_heads * spec.head_size) for _ in range(2))

    def project(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = self.norm(x)
        return tuple(p(x).unflatten(-1, (-1, self.head_size)) for p in (self.q_proj, self.k_proj, self.v_proj))


class DeltaLayer(Common):
    """state = a * state + (1 - a) * v with a = sigmoid(k); the output is q * state."""

    def __init__(self, spec: MadeUpSpec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        parts = shape.parameters["in_proj.weight"].split.parts
        self.in_proj = nn.ModuleList(Linear(spec.hidden_size, rows) for rows in parts)
        self.conv = nn.ModuleList(Channels(rows) for rows in parts)

    @staticmethod
    def prepare(backend: Backend, documents: Documents, device: torch.device) -> Tensor:
        """The position of each token in its document, (batch, seq)."""
        positions = np.concatenate([np.arange(length) for length in documents.lengths])
        return torch.from_numpy(positions.reshape(documents.batch, documents.seq)).to(device)

    def project(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = self.norm(x)
        return tuple(projection(x) for projection in self.in_proj)

    def mix(self, parts: tuple[Tensor, ...], prepared: Any) -> Tensor:
        found = []
        for x, conv in zip(parts, self.conv, strict=True):
            weight, y = local_weight(conv.weight, x.dtype), torch.zeros_like(x)
            for back in range(KERNEL):
                earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
                y = y + weight[:, KERNEL - 1 - back] * earlier * (prepared >= back)[..., None]
            found.append(F.silu(y))
        return self.recurrence(*found, prepared == 0)[0]

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, state: Any = 0.0) -> tuple[Tensor, Tensor]:
        a, v = k.sigmoid()[..., None], v.unflatten(-1, (-1, 2))
        outputs = []
        for t in range(q.shape[1]):
            kept = torch.where(starts[:, t, None, None], 0.0, a[:, t])
            state = kept * state + (1 - a[:, t]) * v[:, t]
            outputs.append(q[:, t, :, None] * state)
        return torch.stack(outputs, 1).flatten(2), state

    def new_decode_state(self, spec: ModelSpec, batch: int, seq: int, dtype: torch.dtype, device: torch.device) -> dict:
        return {}

    def decode_step(self, parts: tuple[Tensor, ...], prepared: Any, state: Any, used: int, visible: Tensor) -> Tensor:
        """The state: the convolution's last inputs, which are zero before a prompt begins, and the recurrence's."""
        seen, new = visible[:, used:, None], parts[0].shape[1]
        inputs = [torch.cat((before, x * seen), 1) for before, x in zip(
            state.get("inputs", [x[:, :0].new_zeros(len(x), KERNEL - 1, x.shape[2]) for x in parts]), parts, strict=True
        )]  # fmt: skip
        found = []
        for x, conv in zip(inputs, self.conv, strict=True):
            y = sum(conv.weight[:, at] * x[:, at : at + new] for at in range(KERNEL))
            found.append(F.silu(y))  # type: ignore[arg-type]
        starts = prepared == 0 if used == 0 else torch.zeros_like(visible[:, used:])
        mixed, after = self.recurrence(*found, starts, state.get("recurrence", 0.0))
        state |= {"inputs": [x[:, 1 - KERNEL :] for x in inputs], "recurrence": after}
        return mixed


class MadeUp(CausalLM):
    kinds: ClassVar[Mapping[str, type[Layer]]] = {"attention": Attention, "delta": DeltaLayer}
    norm = Norm


def read(path: Path, raw: Mapping[str, Any]) -> MadeUpSpec:
    return MadeUpSpec(**{name: raw[name] for name in (field.name for field in fields(MadeUpSpec)) if name in raw})


def to_hf(spec: MadeUpSpec) -> dict[str, Any]:
    return {"architectures": ["MadeUpForCausalLM"], "model_type": spec.model_type, **asdict(spec)}


FAMILIES["made_up"] = Family(MadeUpSpec, {}, ("q_proj", "k_proj", "v_proj", "o_proj"), read, to_hf)
MODELS["made_up"] = MadeUp


def logits_of(spec: MadeUpSpec, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of one document, (length, vocab_size). Args: weights: by their names in files."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * (1 + weight)

    x, length = weights["model.embed_tokens.weight"][ids], len(ids)
    for number, layer in enumerate(spec.layers):
        w = {name: weights[f"model.layers.{number}.{name}"] for name in layer.parameters}
        y = norm(x, w["norm.weight"])
        if layer.kind == "attention":
            products = (y @ w["q_proj.weight"].T + w["q_proj.bias"], y @ w["k_proj.weight"].T, y @ w["v_proj.weight"].T)
            q, k, v = (product.view(length, -1, spec.head_size).transpose(0, 1) for product in products)
            k, v = (each.repeat_interleave(spec.heads // spec.kv_heads, 0) for each in (k, v))
            scores = (q @ k.transpose(1, 2) / spec.head_size**0.5).masked_fill(
                torch.ones(length, length).triu(1).bool(), -torch.inf
            )
            mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        else:
            merged, conv, c = y @ w["in_proj.weight"].T, w["conv.weight"][:, 0], spec.channels
            rows = []
            for t in range(length):
                terms = [merged[t - back] * conv[:, KERNEL - 1 - back] for back in range(min(t + 1, KERNEL))]
                rows.append(F.silu(torch.stack(terms).sum(0)))
            state, outputs = torch.zeros(c, 2, dtype=x.dtype), []
            for row in rows:
                a = row[c : 2 * c].sigmoid()[:, None]
                state = a * state + (1 - a) * row[2 * c :].view(c, 2)
                outputs.append((row[:c, None] * state).flatten())
            mixed = torch.stack(outputs)
        x = x + mixed @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)
        y = norm(x, w["second_norm.weight"])
        shares = (y @ w["experts.router.weight"].T).softmax(-1)
        up, down = w["experts.up.weight"], w["experts.down.weight"]
        for expert in range(EXPERTS):
            x = x + shares[:, expert, None] * (F.silu(y @ up[expert].T) @ down[expert].T)
    head = weights["model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]
    return norm(x, weights["model.norm.weight"]) @ head.T
