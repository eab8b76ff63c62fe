"""The objective that a config names."""

from titan_mi100.config.settings import ObjectiveConfig
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.distill import Distill
from titan_mi100.objectives.policy import Policy
from titan_mi100.objectives.preference import Preference
from titan_mi100.objectives.sft import SFT


def choose(wanted: ObjectiveConfig) -> Objective:
    if wanted.name == "preference":
        return Preference(wanted.preference, wanted.factors, wanted.sft_weight)
    if wanted.name == "policy":
        w = wanted
        return Policy(w.ratio, w.clip, w.divisor, w.longest_answer, w.kl, w.kl_weight)
    if wanted.name == "distill":
        return Distill(wanted.teacher_weight, wanted.rest == "renormalise")
    return SFT
