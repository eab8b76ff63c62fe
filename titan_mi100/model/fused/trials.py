"""The trials of our fused kernels against the plain forms, by kind."""

from collections.abc import Mapping

from titan_mi100.model import delta_rule, elementwise, experts, loss, nf4
from titan_mi100.model.fused.running import Trial

TRIALS: Mapping[str, Trial] = {
    "delta": delta_rule.trial, "elementwise": elementwise.trial, "experts": experts.trial, "head": loss.trial,
    "nf4": nf4.trial,
}  # fmt: skip
OF_FAMILIES = frozenset({"delta"})  # which of them ModelSpec.kernels says
SAME_BITS = frozenset({"nf4"})  # these give the bits of plain operations, so a resumed run may change them
