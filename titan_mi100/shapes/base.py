"""A family of models as data: parameters, layers, what they cost and keep. Imports no torch.

A family is a module beside this one (see qwen3.py) and its layers in model/. Costs, memory, the plan, initial values,
LoRA, tensor parallel, pipeline stages, conversion and decoding read these data; none of them knows a family.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from titan_mi100.shapes.rope import RopeScaling
from titan_mi100.shapes.saved import MIX, NOTHING, OUTPUT, Saved, ValuesPerToken

ALL_LINEAR = "all-linear"  # peft's word for all linear layers that can have an adapter
DRAFT = "mtp."  # begins the names of a draft head's tensors
DRAFT_FIELDS = ("has_draft_head", "draft_experts_fused")
ROWS = ".token_adapter.trainable_tokens_delta"  # peft's name of trained rows of tokens, behind the table's
EXPERTS = "experts"  # all matrices of all experts of a layer, as a target of LoRA


class Split(NamedTuple):
    """Split of a parameter of two dimensions or less by tensor parallel.

    Attributes:
        dim: the dimension; None: every rank has it whole.
        parts: rows of the parts that are split each by itself; (): it is one part. Examples: queries, keys and values
            of a merged projection; experts that are stacked in one tensor.
    """

    dim: int | None
    parts: tuple[int, ...] = ()


OUTPUTS, INPUTS, WHOLE = Split(0), Split(1), Split(None)


class Parameter(NamedTuple):
    """A parameter of a layer, or outside of them.

    The model holds a tensor of more than two dimensions as a matrix of its last dimension, and each part of `split` as
    a parameter of its own: `X.0.weight`, `X.1.weight`, ... for `X.weight` (see ModelSpec.pieces). So all that trains
    has two dimensions or less and one split. Files have HF's tensor.

    Attributes:
        role: "matrix", "norm", "embedding", "head", "router" or "other". Only matrices have adapters, and 4 bits. A
            router is trained only if the config says so.
        start: its initial values: "normal" (mean 0, deviation `initializer_range`), "ones", "zeros", or "decay" (the
            logarithm of a value between 0.01 and 16).
        held_as: the last parts of its name in the model; "": as in files. It has no parts then.
        in_fp32: files keep it in fp32, also beside weights of 16 bits.
        experts: matrices of so many experts, one after the other in its rows; 0: it is one matrix. See experts.py.
        is_transposed: of each expert the rows are the inputs.
    """

    shape: tuple[int, ...]
    split: Split
    role: str = "matrix"
    start: str = "normal"
    held_as: str = ""
    in_fp32: bool = False
    experts: int = 0
    is_transposed: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def held(self, name: str) -> dict[str, tuple[int, ...]]:
        """The parameters that the model holds of it: name -> its shape, of two dimensions or less."""
        columns = self.shape[-1]
        if self.held_as:
            return {f"{name.rpartition('.')[0]}.{self.held_as}": self.shape}
        if not self.split.parts:
            return {name: (self.size // columns, columns)}
        module = name.removesuffix(".weight")
        return {f"{module}.{number}.weight": (rows, columns) for number, rows in enumerate(self.split.parts)}


class Piece(NamedTuple):
    """A matrix that the model holds of a tensor in files.

    Attributes:
        whole: the tensor's HF name.
        start: first row in the tensor, seen as a matrix of its last dimension.
        shape: rows and columns; of a tensor of one dimension, its own.
        whole_shape: of the tensor in files.
    """

    whole: str
    start: int
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]


class AttentionShape(NamedTuple):
    """Sizes that an attention backend has to support: query heads, heads of keys and values, size of a head."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerShape:
    """A layer.

    Attributes:
        kind: layers of a kind are built by one class, see model/families.py.
        parameters: by their names below `model.layers.N.`
        adapted: modules that LoRA can adapt, in the order of the computation: the last part of their names.
        products: weights that a token is multiplied with in forward.
        last_product: of these, the weights of the last product, which no backward recomputes.
        pair_flops: FLOPs in forward for each pair of a query and a key inside a document.
        input: values per token of the layer's input, from which a recomputation begins.
        saved: what it keeps for its backward if nothing is recomputed.
        temporaries: what its backward allocates besides.
        slots: experts that a token goes to.
        mixed: values per token that context parallel exchanges, there and back, besides those of attention.
        is_cut: it computes in pieces of the tokens, so norms save their inputs, the layer's own among them.
    """

    kind: str
    parameters: Mapping[str, Parameter]
    adapted: tuple[str, ...]
    products: int
    last_product: int
    pair_flops: int
    input: int
    saved: tuple[Saved, ...]
    temporaries: tuple[Saved, ...]
    slots: int = 0
    mixed: ValuesPerToken = NOTHING
    is_cut: bool = False

    @cached_property
    def kept(self) -> Mapping[str, ValuesPerToken]:
        """Values that the layer keeps from forward to backward, by activation_checkpoint.mode."""
        mixing, start = (tensor for tensor in self.saved if tensor.part == MIX), Saved("input", self.input)
        without = (start, *self.saved) if self.is_cut else self.saved
        kept = {"none": without, "selective": (start, *mixing), "full": (start,)}
        return {mode: ValuesPerToken.of(tensors) for mode, tensors in kept.items()}

    @cached_property
    def inside(self) -> Mapping[str, ValuesPerToken]:
        """Values that its backward needs besides, by activation_checkpoint.mode."""
        after = tuple(tensor for tensor in self.saved if tensor.part == OUTPUT)
        again = {"none": (), "selective": after, "full": self.saved}
        return {mode: ValuesPerToken.of((*tensors, *self.temporaries)) for mode, tensors in again.items()}

    @cached_property
    def in_pieces(self) -> "LayerShape":
        """The layer as far as it does not compute in pieces."""
        saved, temporaries = (tuple(each.in_pieces for each in of) for of in (self.saved, self.temporaries))
        return replace(self, saved=saved, temporaries=temporaries, is_cut=True)

    @property
    def size(self) -> int:
        """Number of values of its parameters."""
        return sum(parameter.size for parameter in self.parameters.values())

    def exchanged(self, attention: AttentionShape, ranks: int) -> ValuesPerToken:
        """Values per token that context parallel exchanges: the inputs of the mixing, and its output.

        Args: attention: of the model. ranks: that share the heads; each has a copy of a head of keys that are fewer.
        """
        if not self.pair_flops:
            return self.mixed
        heads = attention.heads + max(attention.kv_heads, ranks)
        return ValuesPerToken(2 * heads * attention.head_dim)

    @property
    def largest(self) -> int:
        """Number of values of its largest matrix; of experts each is one."""
        return max(p.size // max(p.experts, 1) for p in self.parameters.values() if p.role == "matrix")

    @property
    def largest_stack(self) -> int:
        """Number of values of all experts of a projection; 0: it has none."""
        return max((p.size for p in self.parameters.values() if p.experts), default=0)


class ModelSpec:
    """The shape of a model. A family's class is a frozen dataclass, whose fields have the names in HF's `config.json`.

    Attributes:
        pad_token_id: its row of the input embedding gets no gradient, as in transformers.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    model_type: ClassVar[str]
    norm_start: ClassVar[str] = "ones"  # of the final norm
    of_files: ClassVar[Collection[str]] = ()  # fields that say how files are written
    kernels: ClassVar[Collection[str]] = ()  # kinds of our fused kernels that only some families have
    experts_fused: bool = False  # see experts.py
    has_draft_head: bool = False  # beside the layers, as a part that trains
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    initializer_range: float
    pad_token_id: int | None
    rope_theta: float
    rope_scaling: RopeScaling | None = None

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        """The layers in the order of the computation."""
        raise NotImplementedError

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of the linear layers that LoRA can adapt in any layer."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.adapted))

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim

    @property
    def per_forward(self) -> ValuesPerToken:
        """Values that a forward computes once for all layers, such as rotary tables, and keeps until its backward."""
        return NOTHING

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Names and sizes that the tensor-parallel degree must divide."""
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        return {name: getattr(self, name) for name in names}

    def mixing_heads(self) -> dict[str, int]:
        """Names and numbers of the heads that context parallel shares out, besides those of keys and values."""
        return {"num_attention_heads": self.num_attention_heads}

    def input_sizes(self) -> dict[str, tuple[int, bool]]:
        """Names and input sizes of the matrices, which 4-bit blocks must divide; whether tensor parallel splits it."""
        heads = self.num_attention_heads * self.head_dim
        split = {"num_attention_heads x head_dim": (heads, True), "intermediate_size": (self.intermediate_size, True)}
        return {"hidden_size": (self.hidden_size, False), **split}

    def problems(self) -> list[str]:
        """Problems of this shape, one clause each; empty if there are none."""
        messages = [
            f"{name} = {number} must be positive"
            for name, number in asdict(self).items()  # type: ignore[call-overload]
            if name != "pad_token_id" and type(number) in (int, float) and number <= 0
        ]
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            messages.append(f"pad_token_id = {self.pad_token_id} is not in the vocabulary; set it to null")
        scaling, positions = self.rope_scaling, self.max_position_embeddings
        return messages + (scaling.problems(positions, self.rope_theta) if scaling else [])

    def as_dict(self) -> dict[str, Any]:
        """The fields; rope_scaling as in config.json, and only if there is one."""
        own: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # of a dataclass
        own.pop("rope_scaling", None)
        if not self.has_draft_head:
            own = {name: known for name, known in own.items() if name not in DRAFT_FIELDS}
        return own | ({"rope_scaling": self.rope_scaling.written()} if self.rope_scaling else {})

    @property
    def reach(self) -> int:
        """Positions that the model is made for, by what it was trained on and how they are scaled."""
        return max(self.max_position_embeddings, self.rope_scaling.reach if self.rope_scaling else 0)

    def uneven(self, more: str, fewer: str) -> list[str]:
        """A problem if a number of heads is not a multiple of another."""
        many, few = getattr(self, more), getattr(self, fewer)
        return [f"{more} = {many} is not a multiple of {fewer} = {few}"] if many % few else []

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by its HF name, a tied weight once."""
        shape = self.vocab_size, self.hidden_size
        by_name = {"model.embed_tokens.weight": Parameter(shape, OUTPUTS, "embedding")}
        for number, layer in enumerate(self.layers):
            by_name |= {f"model.layers.{number}.{name}": parameter for name, parameter in layer.parameters.items()}
        by_name["model.norm.weight"] = Parameter(shape[1:], WHOLE, "norm", self.norm_start)
        if not self.tie_word_embeddings:
            by_name["lm_head.weight"] = Parameter(shape, OUTPUTS, "head")
        return by_name | (self.draft_head if self.has_draft_head else {})

    @property
    def draft_layer(self) -> LayerShape | None:
        """The layer of a draft head, see model/draft_head.py; None: the family has none."""
        return None

    def with_draft_head(self, is_there: bool = True) -> "ModelSpec":
        """The shape with the draft head as a part that trains, or without."""
        return self if self.has_draft_head == is_there else replace(self, has_draft_head=is_there)

    @cached_property
    def draft_head(self) -> dict[str, Parameter]:
        """The parameters of the draft head by their HF names."""
        layer, hidden = self.draft_layer, self.hidden_size
        assert layer is not None
        norm = Parameter((hidden,), WHOLE, "norm", self.norm_start)
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        own = {
            "fc.weight": Parameter((hidden, 2 * hidden), WHOLE, "other"),
            **{f"{name}.weight": norm for name in names},
        }
        own |= {f"layers.0.{name}": parameter for name, parameter in layer.parameters.items()}
        return {DRAFT + name: parameter for name, parameter in own.items()}

    def passes_through(self, name: str) -> bool:
        """Whether a tensor of a folder, by its name there, is not used, such as a vision tower's, and passes through
        checkpoints and exports byte for byte.
        """
        return False

    @staticmethod
    def own_name(name: str) -> str:
        """Our name of a tensor of an HF folder: a parameter's begins with `model.` or is the head's."""
        return name

    def stored_name(self, name: str) -> str:
        """The name in an HF folder that is written, of our name."""
        return name

    def as_stored(self, names: Collection[str], saved: Mapping[str, Any]) -> "ModelSpec":
        """The shape with the form of experts in files of these names. Args: saved: a checkpoint's fingerprint, which
        says it if the names do not.
        """
        return self

    def in_files(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Shapes, or shapes and dtypes, by our names -> the same with experts in the form of files."""
        return dict(kinds)

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """The parameters that the model holds in another form than files do, by their names in the model."""
        by_name = {}
        for hf_name, parameter in self.parameters.items():
            if parameter.split.parts or len(parameter.shape) > 2 or parameter.held_as:
                start = 0
                for name, shape in parameter.held(hf_name).items():
                    by_name[name] = Piece(hf_name, start, shape, parameter.shape)
                    start += shape[0]
        return by_name


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter's HF name and shape, a tied weight once."""
    return {name: parameter.shape for name, parameter in spec.parameters.items()}


def draft_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The same of the draft head; empty: it is not trained."""
    return {name: parameter.shape for name, parameter in spec.draft_head.items()} if spec.has_draft_head else {}


def stored_shapes(spec: ModelSpec, stored: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of parameters and passed-through tensors. Args: stored: a folder's, name -> (shape, ...)."""
    return parameter_shapes(spec) | {name: kind[0] for name, kind in stored.items() if spec.passes_through(name)}


def parameter_count(spec: ModelSpec) -> int:
    """Number of trained values, a tied weight counted once."""
    return sum(parameter.size for parameter in spec.parameters.values())


def adapter_shapes(
    spec: ModelSpec, rank: int, targets: Collection[str], expert_rank: int = 0
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every LoRA matrix beside the linear layers of these names (of LayerShape.adapted).

    Args:
        expert_rank: of the experts' adapters; 0: the same rank.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in spec.parameters.items():
        module = name.removesuffix(".weight")
        if name.startswith(DRAFT):  # it is trained whole
            continue
        if parameter.experts:  # those of all experts are below each other; of gate and up there is one A
            sizes = parameter.shape[0] // parameter.experts, parameter.shape[1]
            outputs, inputs = sizes[::-1] if parameter.is_transposed else sizes
            for matrix, size in (("A", inputs), ("B", outputs)) if EXPERTS in targets else ():
                if not (matrix == "A" and module.endswith(".up_proj")):
                    shapes[f"{module}.lora_{matrix}.weight"] = (parameter.experts * (expert_rank or rank), size)
        elif parameter.role == "matrix" and (last := module.rsplit(".", 1)[-1]) in targets:
            if last not in spec.layers[int(module.split(".")[2])].adapted:
                continue
            shapes[f"{module}.lora_A.weight"] = (rank, parameter.shape[1])
            shapes[f"{module}.lora_B.weight"] = (parameter.shape[0], rank)
    return shapes


def row_shapes(spec: ModelSpec, tokens: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of the trained rows of so many tokens: of the embedding, and of the head of an untied model."""
    tables = ("model.embed_tokens", "lm_head")[: 1 if spec.tie_word_embeddings else 2] if tokens else ()
    return {table + ROWS: (tokens, spec.hidden_size) for table in tables}


def adapter_pieces(spec: ModelSpec, rank: int) -> dict[str, Piece]:
    """Pieces of LoRA matrices (see ModelSpec.pieces) beside tensors held in parts. Parts share A; each has its B."""
    by_name = {}
    for hf_name, parameter in spec.parameters.items():
        if rank and parameter.role == "matrix" and parameter.split.parts and len(parameter.shape) == 2:
            module, (rows, columns) = hf_name.removesuffix(".weight"), parameter.shape
            a, b, start = f"{module}.lora_A.weight", f"{module}.lora_B.weight", 0
            by_name[f"{module}.0.lora_A.weight"] = Piece(a, 0, (rank, columns), (rank, columns))
            for number, size in enumerate(parameter.split.parts):
                by_name[f"{module}.{number}.lora_B.weight"] = Piece(b, start, (size, rank), (rows, rank))
                start += size
    return by_name


def modules_of(adapter: Iterable[str]) -> set[str]:
    """The linear layers that LoRA matrices of these names are beside; the last part of their names, or EXPERTS."""
    modules = (name.rpartition(".lora_")[0] for name in adapter if not name.endswith(ROWS))
    return {EXPERTS if f".{EXPERTS}." in module else module.rpartition(".")[2] for module in modules}


def differences(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Differing fields that change the computation or the tensors' shapes, as `name: a's value, b's value`."""
    # none of these changes the computation of given weights
    same = {"initializer_range": 0.0, "max_position_embeddings": 0, "pad_token_id": None}
    left, right = (
        {"model_type": spec.model_type, **asdict(replace(spec, **same))}  # type: ignore[arg-type]
        for spec in (a, b)
    )
    every = [name for name in dict.fromkeys([*left, *right]) if name not in (*a.of_files, *b.of_files)]
    return [f"{name}: {left.get(name)}, {right.get(name)}" for name in every if left.get(name) != right.get(name)]
