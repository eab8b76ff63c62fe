"""The tensors that a layer saves for its backward, by name. Imports no torch."""

from collections.abc import Iterable
from typing import NamedTuple

COMPUTE, FP32 = "compute", "fp32"  # dtype of a saved tensor: the computation's, or 4 bytes
PROJECT, MIX, OUTPUT = "project", "mix", "output"  # the parts of a layer, see model/decoder.py


class Saved(NamedTuple):
    """A tensor that a layer saves for its backward; `titan-mi100 plan --rehearse N --saved` lists those of a family.

    Attributes:
        name: for readers; "mlp.X" if experts replace the tensor together with the MLP.
        values: per token, of all tensor-parallel ranks together. An fp32 copy of a tensor in 16 bits may be written as
            twice as many values of 16 bits.
        part: "selective" checkpointing keeps what MIX saves and what OUTPUT reads of it; all of OUTPUT is there again
            at its peak.
        is_for_norm: only the gradient of a norm's weight needs it, so it is not saved if the weight is frozen.
        left: values in the computation's dtype that are saved of each token in its stead if the layer computes in
            pieces, of which backward computes each again; None: it is saved all the same.
    """

    name: str
    values: int
    part: str = OUTPUT
    dtype: str = COMPUTE
    is_for_norm: bool = False
    left: int | None = None

    @property
    def in_pieces(self) -> "Saved":
        return self if self.left is None else self._replace(values=self.left, dtype=COMPUTE, is_for_norm=False)


class ValuesPerToken(NamedTuple):
    """Values per token, of all tensor-parallel ranks together: in the computation's dtype, and in fp32."""

    compute: int
    fp32: int = 0

    @classmethod
    def of(cls, tensors: Iterable[Saved]) -> "ValuesPerToken":
        """The sum of the tensors."""
        sizes = [(tensor.values, tensor.dtype) for tensor in tensors]
        return cls(*(sum(count for count, dtype in sizes if dtype == wanted) for wanted in (COMPUTE, FP32)))


NOTHING = ValuesPerToken(0)
