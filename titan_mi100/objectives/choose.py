"""The objective that a config names."""

from titan_mi100.config.settings import ObjectiveConfig
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.distill import Distill
from titan_mi100.objectives.draft import Draft
from titan_mi100.objectives.policy import Policy
from titan_mi100.objectives.preference import Preference
from titan_mi100.objectives.sft import SFT


def choose(wanted: ObjectiveConfig, draft: str = "no") -> Objective:
    if draft == "after":
        return Draft()
    if wanted.name == "preference":
        return Preference(wanted.preference, wanted.factors, wanted.sft_weight)
    if wanted.name == "policy":
        divisor, longest = wanted.divisor, wanted.longest_answer
        return Policy(wanted.ratio, wanted.clip, divisor, longest, wanted.kl, wanted.kl_weight)
    if wanted.name == "distill":
        return Distill(wanted.teacher_weight, wanted.rest == "renormalise")
    return SFT
