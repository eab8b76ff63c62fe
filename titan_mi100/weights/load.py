"""Fills a run's model with weights: from files, at random, or from a LoRA adapter."""

import json
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from os.path import lexists
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mi100.config.hub import cached_model
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.device.shards import local_of, offset_of
from titan_mi100.errors import UserError
from titan_mi100.files.model import DRAFT_FILE
from titan_mi100.log import log
from titan_mi100.model.init import Read, initial_values
from titan_mi100.model.lora import base_fingerprint, is_adapter, lora_values
from titan_mi100.model.nf4 import NF4Linear, codes_per_value, quantize
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import raise_together
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import (
    DRAFT,
    ROWS,
    ModelSpec,
    draft_shapes,
    parameter_count,
    parameter_shapes,
    stored_shapes,
)
from titan_mi100.text.assets import folder_of, read_assets
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights.base import EMBEDDING, HEAD, Weights
from titan_mi100.weights.draft_head import open_head
from titan_mi100.weights.experts import in_files
from titan_mi100.weights.peft import open_adapter
from titan_mi100.weights.pieces import joined, read_pieces
from titan_mi100.weights.source import open_weights, verify_files, warn_of_missing_draft
from titan_mi100.wording import plural

_PARTS, _SAMPLE = 8, 256  # places in the embedding, and rows read at each, for its mean
_NEAR, _HIGHEST = 0.1, 256  # of the usual distance; ids that are looked at: tokens are added behind the others
_INSTEAD = "train the whole model (lora.rank = 0), or take a base whose tokens are trained, such as the Instruct model"
_QUANTIZED_ROWS = 1 << 14  # of a matrix at once: experts are one matrix of many rows


def load_weights(
    model: ParallelModel, optimizer: NamedState, workload: Workload, checkpoint: Path | None,
    tokens: Callable[[], Collection[int]] = tuple,
) -> None:  # fmt: skip
    """Fill the model, each rank its own shards, with the weights that the config names, or at random.

    Args:
        optimizer: keeps what the parameters cannot hold of the values.
        checkpoint: the checkpoint that the run resumes from. Nothing is filled then, because the checkpoint will do it.
            Except if the model is frozen: such checkpoints hold adapters or a draft head only, so the base is filled
            here.
        tokens: returns ids in the data; under LoRA, a warning names those whose frozen rows look untrained.

    Raises:
        UserError: on all ranks; the weights cannot be read, or belong to another model.
    """
    config, spec = workload.config, workload.spec
    source, is_frozen = config.checkpoint.initial_load_path, config.lora.rank > 0 or model.draft == "after"
    origin = f"resumed from {checkpoint}"
    if checkpoint is None or is_frozen:
        read: Read = partial(initial_values, spec, config.training.seed)
        origin = f"random weights, seed {config.training.seed}"
        log.info(f"loading the weights from {source} ..." if source else "drawing random weights ...")
        with raise_together():
            is_new = config.draft_head.fresh or checkpoint is not None  # which fills it later
            head = _head_elsewhere(spec, read if is_new else None, config.lora.initial_load_path)
        if source:
            with raise_together():
                base = _open_base(source, spec if head is None else spec.with_draft_head(False))
                if dist.get_rank() == 0 and checkpoint is None:
                    if head is None:
                        warn_of_missing_draft(Path(source), read_assets(folder_of(source)), base.kinds)
                    elif any(name.startswith(DRAFT) for name in base.kinds):
                        log.info(f"{source}: its draft head is not read: {DRAFT_FILE} of the adapter, or fresh = true")
                    if config.lora.rank and (odd := untrained_rows(base, {*tokens()} - {*config.lora.token_ids})):
                        spelt, remedy = ", ".join(map(str, odd[:8])), "[lora] trainable_tokens"
                        with suppress(UserError):  # a corpus is trained without its tokenizer
                            decode = load_tokenizer(config.tokenizer_path()).decode
                            spelt = ", ".join(json.dumps(decode([token]), ensure_ascii=False) for token in odd[:8])
                            remedy = f"lora.trainable_tokens = [{spelt}{', ...' if odd[8:] else ''}]"
                        message = f"rows of {plural(len(odd), 'token')} in the data look untrained, such as {spelt}"
                        log.warning(f"{source}: {message}; LoRA does not train them: set {remedy}, or {_INSTEAD}")
                # A frozen base is identified by its 16 bits, and masters of 16 bits start from the same ones.
                is_narrow, origin = config.optimizer.master == "bf16_sr", f"weights from {source}"
                read = partial(base.read, exactly=not (is_frozen or is_narrow))
                if spec.has_draft_head and head is None:
                    head = partial(base.read, exactly=not is_narrow)
                # each rank hashes a share of a sealed checkpoint's files
                verify_files(Path(source), dist.get_rank(), dist.get_world_size())
                if dist.get_rank() == 0 and not is_frozen:
                    # experts of a draft head in a run's checkpoint have our form, and go out in that of files
                    shape = spec.with_draft_head(spec.draft_layer is not None)
                    names = filter(spec.passes_through, base.kinds)
                    carried = ((name, base.tensor(name, base.kinds[name].dtype)) for name in names)
                    model.passed_through = dict(in_files(shape, carried))
        if (own := head) is not None:
            trunk = read
            read = lambda name, *place: (own if name.startswith(DRAFT) else trunk)(name, *place)  # noqa: E731
        fill_base(model, optimizer.keep_residuals(read_pieces(spec, read)))
        base_read = read
    elif dist.get_rank() == 0:
        saved = {name: kind for name, kind in open_weights(checkpoint).kinds.items() if spec.passes_through(name)}
        model.passed_through = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in saved.items()}
    name = config.model.flavor or cached_model(source)[0] or Path(source).name
    log.info(f"model {name}: {parameter_count(spec):,} parameters, {origin}")
    if config.lora.rank:
        seed = config.training.seed
        fresh = None if checkpoint else _fresh_adapter(config.lora, seed, base_read, spec)
        origin = f"resumed from {checkpoint}" if checkpoint else f"fresh, seed {seed}"
        _load_adapter(model, optimizer, config.lora, spec, fresh, origin)


def _head_elsewhere(spec: ModelSpec, drawn: Read | None, adapter: str) -> Read | None:
    """Reads the first values of a draft head that is not the model's own; None: it is, or is not trained.

    Args:
        drawn: random values, if the head starts with these.
        adapter: that the run starts from; "": none.
    """
    if spec.has_draft_head:
        head = None if drawn else open_head(adapter, spec)
        return drawn if head is None else partial(head.read, exactly=True)
    if adapter and lexists(Path(adapter, DRAFT_FILE)):
        log.warning(f'{adapter}: its {DRAFT_FILE} is not read, nor exported again: draft_head.train = "no"')
    return None


def untrained_rows(base: Weights, tokens: Collection[int]) -> list[int]:
    """Those of some tokens whose rows of the embedding or the head look as if no training had changed them: near zero,
    or near the mean of all rows, where transformers puts the rows of tokens that were added.
    """
    untrained = set[int]()
    for name in {EMBEDDING, HEAD} & base.kinds.keys():
        rows, columns = shape = torch.Size(base.kinds[name].shape)
        size = min(_SAMPLE, rows // _PARTS), columns
        read = [base.read(name, shape, (rows // _PARTS * part, 0), size) for part in range(_PARTS)]
        sample = torch.cat(read).float()
        mean, zero = sample.mean(0), torch.zeros(columns)
        middles = [(middle, _NEAR * (sample - middle).norm(dim=1).median()) for middle in (zero, mean)]
        for token in sorted(tokens)[-_HIGHEST:]:
            row = base.read(name, shape, (token, 0), (1, columns)).float()
            untrained |= {token for middle, least in middles if (row - middle).norm() < least}
    return sorted(untrained)


def fill_base(model: ParallelModel, read: Read) -> None:
    """Set all weights except LoRA's matrices, on each rank its own shards. Layers in 4 bits are quantized.

    Args:
        read: returns a box of a tensor, see model.init.Read.
    """
    layers = [(f"{name}.", m) for part in model.parts for name, m in part.named_modules() if isinstance(m, NF4Linear)]
    small = {name + parameter for name, _ in layers for parameter in ("weight", "largest")}
    # A generator: one parameter at a time, so that no rank holds more than its shards and one part that is read.
    parameters = ((n, p) for n, p in model.named_parameters() if not is_adapter(n) and n not in small)
    distributed.fill_parameters(parameters, read)
    for name, layer in layers:
        _fill_in_4_bits(f"{name}weight", layer, read)


def _fill_in_4_bits(name: str, layer: NF4Linear, read: Read) -> None:
    """Read this rank's shard of a matrix and quantize it.

    Codes are packed, `per_value` weights in each stored value, so the shard's offset and size are scaled by it.
    """
    local, dtype = [local_of(layer.weight), local_of(layer.largest)], layer.weight.dtype
    (row, column), (every, columns) = offset_of(layer.weight), local[0].shape
    shape, per_value = torch.Size((layer.out_features, layer.in_features)), codes_per_value(dtype)
    for first in range(0, every, _QUANTIZED_ROWS):
        rows = min(_QUANTIZED_ROWS, every - first)
        part = read(name, shape, (row + first, column * per_value), (rows, columns * per_value))
        with torch.no_grad():
            for tensor, quantized in zip(local, quantize(part, dtype), strict=True):
                tensor[first : first + rows].copy_(quantized)


def _fresh_adapter(lora: LoRAConfig, seed: int, base: Read, spec: ModelSpec) -> Read:
    """Reads an adapter's first values: matrices at random, rows of tokens as the base's."""
    table_shape = torch.Size((spec.vocab_size, spec.hidden_size))

    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if not name.endswith(ROWS):
            return lora_values(seed, name, shape, offset, size)
        tokens, table = lora.token_ids[offset[0] : offset[0] + size[0]], name.removesuffix(ROWS) + ".weight"
        rows = [base(table, table_shape, (token, offset[1]), (1, size[1])) for token in tokens]
        return torch.cat(rows) if rows else torch.empty(size)

    return read


def _load_adapter(
    model: ParallelModel, optimizer: NamedState, lora: LoRAConfig, spec: ModelSpec, fresh: Read | None, origin: str
) -> None:
    """As load_weights, for what LoRA trains. Args: fresh: its first values; None: the run's checkpoint fills them."""
    shapes = lora.shapes(spec)
    if fresh is not None:
        if lora.initial_load_path:
            with raise_together():
                adapter = open_adapter(lora, shapes)
                fresh, origin = partial(adapter.read, exactly=True), f"from {lora.initial_load_path}"
        read = optimizer.keep_residuals(read_pieces(spec, fresh, lora.rank))
        distributed.fill_parameters(((n, p) for n, p in model.trained_parameters() if is_adapter(n)), read)
    added = sum(map(math.prod, shapes.values()))
    trained, everything = added + sum(map(math.prod, draft_shapes(spec).values())), parameter_count(spec) + added
    root = "sqrt(rank)" if lora.scaling == "sqrt_rank" else "rank"
    log.info(
        f"LoRA: {trained:,} of {everything:,} parameters are trained ({trained / everything:.2%}), with rank "
        f"{lora.rank} and alpha {lora.alpha:g} (B A times alpha / {root}); {origin}"
    )


def base_identity(source: str, seed: int, spec: ModelSpec) -> str:
    """Identifies the frozen weights of a run, which its checkpoints do not hold. A collective.

    Returns:
        A fingerprint of the values, or the seed of random weights.
    """
    if not source:
        return f"random weights, seed {seed}"
    spec = spec.with_draft_head(False)  # the checkpoints hold the head
    return distributed.from_rank_zero(lambda: base_fingerprint(_open_base(source, spec).read, parameter_shapes(spec)))


def _open_base(source: str, spec: ModelSpec) -> Weights:
    weights = joined(open_weights(source), spec)
    # Comparing the values of a tied head reads two large matrices; rank 0 does it for all.
    weights.check(stored_shapes(spec, weights.kinds), with_values=dist.get_rank() == 0)
    return weights
