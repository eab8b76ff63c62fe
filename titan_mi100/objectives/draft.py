"""Training of a draft head alone: cross-entropy of the token after next, a mean over the slots that are learned."""

from titan_mi100.data.microbatch import Microbatch, drafted
from titan_mi100.objectives.sft import Sft


class Draft(Sft):
    """The objective of draft_head.train = "after"; the model gives it the draft head's states and labels."""

    def count(self, microbatch: Microbatch) -> int:
        return drafted(microbatch)
