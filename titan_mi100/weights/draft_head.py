"""A draft head (`mtp.*`) beside the model that it belongs to: in a checkpoint that holds the head alone, or in a file
beside an adapter.
"""

from os.path import lexists
from pathlib import Path

import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.model import DRAFT_FILE
from titan_mi100.files.stored import open_safetensors
from titan_mi100.shapes.base import DRAFT, ModelSpec, draft_shapes, stored_shapes
from titan_mi100.weights.base import EMBEDDING, Box, Kinds, StoredWeights, Weights
from titan_mi100.weights.pieces import joined


class WithDraftHead(Weights):
    """A model's weights with another draft head, in the dtypes of the model's own, see `kinds_in_base`."""

    def __init__(self, base: Weights, head: Weights, spec: ModelSpec) -> None:
        """Args: base, head: by our names; others of the head are ignored. spec: with the head."""
        self.source, self.base, self.head = base.source, base, head
        kinds = {name: kind for name, kind in base.kinds.items() if not name.startswith(DRAFT)}
        kinds |= kinds_in_base(head.kinds, base.kinds, spec)
        self.kinds = {name: kinds[name] for name in stored_shapes(spec, kinds)}

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        if not name.startswith(DRAFT):
            return self.base.read(name, shape, offset, size, exactly)
        part = self.head.read(name, shape, offset, size, exactly)
        return part if exactly else part.to(self.kinds[name].dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return (self.head if name.startswith(DRAFT) else self.base).tensor(name, dtype)


def kinds_in_base(head: Kinds, base: Kinds, spec: ModelSpec) -> Kinds:
    """Shapes and dtypes of a draft head as its base has them; without a head there, in the dtype of its embedding.

    Args:
        head: of the head, by our names.
        base: of the model; empty: not known, so dtypes are the head's own.
        spec: with the head.
    """
    kinds = {}
    for name, shape in draft_shapes(spec).items():
        names = (name, *spec.in_files({name: shape}), EMBEDDING)
        dtype = next((base[other].dtype for other in names if other in base), head[name].dtype)
        kinds[name] = head[name]._replace(dtype=dtype)
    return kinds


def open_head(folder: str | Path, spec: ModelSpec) -> Weights | None:
    """The draft head beside an adapter, by our names; None: there is none. Raises UserError: it is another model's."""
    path = Path(folder) / DRAFT_FILE
    if not (folder and lexists(path)):
        return None
    if spec.draft_layer is None:
        raise UserError(f"{path}: is a draft head, which models of the family {spec.model_type} do not have; remove it")
    spec = spec.with_draft_head()
    head = joined(StoredWeights(path, open_safetensors(path)), spec)
    head.check(draft_shapes(spec))
    return head
