"""The policy objective against a dense loop over answers alone in fp64: every form, split, order and layout; what the
trainer's own log p add to the advantages: a teacher's opinion, a correction.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import made_samples
import numpy as np
import pytest
import torch
from conftest import records_of
from gloo.job_answers import data_of
from gloo.job_parity import open_split, run_split
from test_model import reference as transformers_model
from test_preferences import CP, PP, TP, log_p
from torch import Tensor

from titan_mi100.config.settings import KL_FORMS, ObjectiveConfig
from titan_mi100.data.answer_store import SAMPLED, ByLearnedToken, LogprobStore, Wanted
from titan_mi100.data.answers import ADVANTAGE, SAMPLER, TEACHER
from titan_mi100.data.samples import Group
from titan_mi100.model.init import initial_values
from titan_mi100.model.loss import Predicted
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.objectives.policy import Policy
from titan_mi100.open_run.reference import finish_advantages
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec

SPEC = Qwen3Spec(320, 32, 48, 4, 4, 2, 8, False, rope_theta=1e4)
SEQ_LEN, LONGEST = 32, 12
SHAPED = {"cut_off": "shape", "longest_answer": LONGEST, "cut_off_tokens": 5}
FORMS: dict[str, dict[str, Any]] = {
    "dapo": {"advantage": "std"},
    "grpo": {"advantage": "std", "divisor": "sequences", "clip_low": 0.1, "clip_high": 0.1},
    "dr_grpo": {"divisor": "length", "longest_answer": LONGEST},
    "gspo": {"ratio": "sequence", "divisor": "sequences", "advantage": "std"},
    "cispo": {"ratio": "cispo", "clip_high": 0.3, "advantage": "whitened"},
    "k2": {"kl_weight": 0.3, "advantage": "leave_one_out", "cut_off": "keep"},
    "ratio_k3": {"kl_weight": 0.3, "kl": "ratio_k3", "divisor": "sequences"},
    "shaped": SHAPED,
    "teacher": {"advantage": "teacher"},
    "truncate": {"correction": "truncate", "correction_cap": 1.5, "divisor": "sequences"},
    "leave_out": {"correction": "leave_out", "correction_cap": 1e4, "kl_weight": 0.3},
}


def objective_of(form: str) -> ObjectiveConfig:
    return ObjectiveConfig(name="policy", most_apart=100.0, **FORMS[form])


def opinion(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Made-up log p of a teacher, which follow from the answer's text."""
    return -4 * np.random.default_rng(ids).random(int(learned.sum())).astype(np.float32)


def write_opinions(folder: Path, case: dict[str, Any]) -> str:
    """A teacher's folder, complete."""
    data = data_of(case)
    wanted = Wanted([source.rows for source in (*data.sources, *data.validation)], SPEC.vocab_size)  # type: ignore[misc]
    store = LogprobStore(folder, replace(wanted.about("made up", "none", 1, "float64"), kind=SAMPLED), "make it anew")
    store.begin()
    for number in range(store.about.parts):
        documents = wanted.documents(store.about, number)
        own = [case["documents"][document] for document in documents]
        store.write(number, {
            "documents": documents, "tokens": np.array([int(learned.sum()) for _, learned in own]),
            "ids": np.concatenate([ids[learned] for ids, learned in own])[:, None].astype(np.int32),
            "log_p": np.concatenate([opinion(*each) for each in own])[:, None],
        }, wanted)  # fmt: skip
    return str(folder)


@cache
def weights() -> dict[str, Tensor]:
    return transformers_model(SPEC).double().state_dict()  # type: ignore[no-any-return]


def make_case(form: str, folder: Path, made: list[Group] | None = None) -> dict[str, Any]:
    made = made_samples.groups(320) if made is None else made
    own = made_samples.case_of(made_samples.write(folder / "samples.jsonl", made), made, objective_of(form).answers)
    case = {"spec": SPEC, "weights": weights(), "seq_len": SEQ_LEN, **own}
    if form == "teacher":
        case["teacher"] = write_opinions(folder / "opinions", case)
    return case


def by_hand(scores: list[float], how: str) -> list[float]:
    mean = np.mean(scores)
    if how == "std":
        return list((scores - mean) / (np.std(scores, ddof=1) + 1e-4))
    if how == "leave_one_out":
        return [score - np.mean(scores[:i] + scores[i + 1 :]) for i, score in enumerate(scores)]
    return list(scores - mean)


def learned_answers(form: str, made: list[Group]) -> list[tuple[Group, int, float]]:
    """(group, answer, advantage) of each, as the papers say it."""
    chosen, every, option = list[tuple[Group, int, float]](), list[float](), FORMS[form]
    for group in made:
        scores = {i: a.score for i, a in enumerate(group.answers) if a.score is not None}
        if form == "teacher":
            chosen += [(group, i, 0.0) for i, a in enumerate(group.answers) if a.finish != "length"]
            continue
        if option.get("cut_off") == "shape":
            over = {i: max(-1, min(0, ((LONGEST - 5) - len(group.answers[i].ids)) / 5)) for i in scores}
            scores = {i: score + over[i] for i, score in scores.items()}
        if len({*scores.values()}) < 2 and not option.get("kl_weight"):
            continue
        each = dict(zip(scores, by_hand([*scores.values()], option.get("advantage", "mean")), strict=True))
        masked = option.get("cut_off", "mask") == "mask"
        own = [(group, i, a) for i, a in each.items() if not (masked and group.answers[i].finish == "length")]
        every += each.values() if own else []
        chosen += own
    if option.get("advantage") == "whitened":  # over all answers with a score, also those that are cut off
        chosen = [(g, i, a / (np.std(every) + 1e-8)) for g, i, a in chosen]
    return chosen


def expected(form: str, made: list[Group], policy: Qwen3, old: Qwen3) -> tuple[float, dict[str, float]]:
    """Loss and measures of a step, answer by answer; `policy` has the gradients then."""
    option, answers, tokens, logs = FORMS[form], 0, 0, dict[str, float]()
    total, kl_weight = torch.zeros((), dtype=torch.float64), option.get("kl_weight", 0.0)
    low, high = objective_of(form).clip
    for group, index, advantage in learned_answers(form, made):
        answer = group.answers[index]
        ids = np.array(group.prompt_ids + answer.ids)
        learned = np.arange(len(ids)) >= len(group.prompt_ids)
        now = log_p(policy, ids, learned)
        with torch.no_grad():
            before = log_p(old, ids, learned).float().double()
        if form == "teacher":
            advantage = torch.from_numpy(opinion(ids, learned)).double() - before
        elif "correction" in option:
            apart, cap = before - torch.tensor(answer.log_p, dtype=torch.float64), option["correction_cap"]
            is_near = abs(apart.sum().item()) <= np.log(cap)
            advantage = advantage * (apart.exp().clamp(max=cap) if form == "truncate" else float(is_near))
        ratio = torch.exp(now - before)
        if option.get("ratio") == "sequence":
            ratio = torch.exp((now - before).mean()).expand(len(now))
        if option.get("ratio") == "cispo":
            each = -ratio.detach().clamp(max=1 + high) * advantage * now
        else:
            each = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        d = now - before
        if kl_weight:
            form_of_kl = option.get("kl", "k2")
            each = each + kl_weight * (d**2 / 2 if form_of_kl == "k2" else d.exp() * (torch.exp(-d) + d - 1))
        total = total + (each.mean() if option.get("divisor") == "sequences" else each.sum())
        answers, tokens = answers + 1, tokens + len(now)
        measured = {"score": float(answer.score or 0), "log_ratio": d.sum().item(), "entropy": -now.sum().item()}
        logs = {name: logs.get(name, 0.0) + value for name, value in measured.items()}
    divisor = {"tokens": tokens, "sequences": answers, "length": answers * LONGEST}[option.get("divisor", "tokens")]
    (total / divisor).backward()
    means = {name: value / (answers if name == "score" else tokens) for name, value in logs.items()}
    return (total / divisor).item(), {**means, "answer_length": tokens / answers}


@cache
def exact(form: str) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Of the policy's weights against those that the run's seed makes, which the pass before training reads."""
    policy, old = Qwen3(SPEC).double(), Qwen3(SPEC).double()
    policy.load_state_dict(weights())
    old.load_state_dict({n: initial_values(SPEC, 0, n, p.shape, (0,) * p.ndim, tuple(p.shape)).double()
                         for n, p in old.named_parameters()})  # fmt: skip
    loss, measures = expected(form, made_samples.groups(320), policy, old)
    return loss, measures, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def split(form: str, local: int, accumulation: int, teacher: str = "", **options: Any) -> dict[str, Any]:
    objective = {"name": "policy", "most_apart": 100.0, **FORMS[form], "teacher": teacher}
    return {"param": "float64", "backend": "eager", "local_batch_size": local, "accumulation": accumulation,
            "objective": objective, **options}  # fmt: skip


def assert_equal(result: dict[str, Any], form: str) -> None:
    loss, measures, gradients = exact(form)
    assert result["loss"] == pytest.approx(loss, rel=1e-11), form
    for name, measure in measures.items():
        assert result["measures"][name] == pytest.approx(measure, rel=1e-10), (form, name)
    assert {name for name, _ in result["gradients"]} == set(gradients)
    for name, gradient in result["gradients"]:
        assert (gradient - gradients[name]).norm() <= 1e-11 * gradients[name].norm(), (form, name)


def test_every_form_and_its_gradients_equal_a_loop_over_answers_alone(full: bool, tmp_path: Path, world: World) -> None:
    """By default in one microbatch only the first form: several have all that it has, and the sums over them."""
    for form in FORMS:
        case = make_case(form, tmp_path)
        for local, accumulation in ((16, 1), (2, 8)) if full or form == "dapo" else ((2, 8),):
            data = data_of(case)
            assert 4 < len(data.sources[0].rows) <= 16
            own = split(form, local, accumulation, case.get("teacher", ""))
            assert_equal(run_split(world, case, own, data=data), form)
    turned = [*reversed(made_samples.groups(320))]
    assert_equal(run_split(world, case := make_case("shaped", tmp_path, turned), split("shaped", 4, 4),
                           data=data_of(case)), "shaped")  # fmt: skip


def test_policy_on_two_processes(full: bool, tmp_path: Path) -> None:
    layouts = [("dapo", 4, 2, {}), ("gspo", 8, 2, TP), ("gspo", 8, 2, CP), ("grpo", 2, 8, PP)]
    if full:
        layouts += [(form, 4, 2, {}) for form in FORMS] + [(form, 2, 8, PP) for form in FORMS]
        layouts += [(form, 8, 2, CP) for form in FORMS]
        layouts += [("cispo", 4, 2, {"zero_stage": stage}) for stage in (0, 1, 2)]
    for form in dict.fromkeys(form for form, *_ in layouts):
        (folder := tmp_path / form).mkdir()
        case = make_case(form, folder)
        splits = [split(form, local, accumulation, case.get("teacher", ""), parallelism=parallelism)
                  for name, local, accumulation, parallelism in layouts if name == form]  # fmt: skip
        for _, of_ranks in records_of("job_answers", {"case": case, "splits": splits}, folder, 2):
            for record in of_ranks:
                assert_equal(record, form)


def test_a_ratio_of_one_is_reinforce(tmp_path: Path, world: World) -> None:
    """Before the first step the gradient is that of -A log p, whatever is clipped."""
    case, made = make_case("dapo", tmp_path), made_samples.groups(320)
    gradients = []
    for form in ("dapo", "cispo"):
        run = open_split(world, case, split("dapo", 16, 1), data=data_of(case))
        start = {
            n: initial_values(SPEC, 0, n, p.shape, (0,) * p.ndim, p.shape) for n, p in run.model.named_parameters()
        }
        result = run_split(world, {**case, "weights": start}, split(form, 16, 1) if form == "dapo" else
                           {**split("dapo", 16, 1), "objective": {"name": "policy", "most_apart": 100.0,
                                                                 "advantage": "std", "ratio": "cispo"}},
                           data=data_of(case))  # fmt: skip
        gradients.append(dict(result["gradients"]))
        assert abs(result["measures"]["log_ratio"]) < 1e-7 and result["measures"]["clipped"] == 0
    policy = Qwen3(SPEC).double()
    policy.load_state_dict({n: start[n].double() for n in start})
    tokens, total = 0, torch.zeros((), dtype=torch.float64)
    for group, index, advantage in learned_answers("dapo", made):
        ids = np.array(group.prompt_ids + group.answers[index].ids)
        own = log_p(policy, ids, np.arange(len(ids)) >= len(group.prompt_ids))
        total, tokens = total - advantage * own.sum(), tokens + len(own)
    (total / tokens).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        for own in gradients:  # the log p are stored in fp32, so the ratio is 1 to 1e-7
            assert (own[name] - parameter.grad).norm() <= 1e-6 * parameter.grad.norm(), name


@pytest.mark.parametrize("kl", ["k2", "ratio_k3", "k3", "k1"])
def test_the_bandit_has_the_known_optimum(kl: str) -> None:
    """One token, seven actions, all of them at once with their probabilities: pi* = ref exp(r / beta) / Z is reached by
    the forms that are allowed, and missed by those that are refused.
    """
    torch.manual_seed(0)
    beta, rewards = 0.7, torch.rand(7, dtype=torch.float64) * 2
    base = torch.randn(7, dtype=torch.float64).log_softmax(0)
    optimum = (base + rewards / beta).softmax(0)
    theta = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    # divided by sequences each token has the weight `share`: here its probability
    objective = Policy("token", (0.2, 0.28), "sequences", 0, "k2" if kl == "k1" else kl, beta)
    ids, known = torch.arange(7), torch.ones(7, 1, dtype=torch.bool)

    def expected_loss(now: Tensor) -> Tensor:
        """Of actions that are drawn from the policy itself; its probabilities have no gradient."""
        weight, apart = now.detach().exp(), now - base
        columns = {"document_ids": ids, "advantage": rewards - weight @ rewards, "share": weight, "score": rewards}
        columns = {name: own[None] for name, own in (columns | {"old_log_p": now.detach(), "base_log_p": base}).items()}
        total = objective.loss(Predicted(-now[:, None], now, known), ids, columns)[0]
        if kl == "k1":  # instead of k2
            total = total + beta * weight @ (apart - apart**2 / 2)
        elif kl == "k3":  # without the ratio, which "ratio_k3" has
            total = total + beta * weight @ ((torch.exp(-apart) + apart - 1) * (1 - torch.exp(now - now.detach())))
        return total

    for _ in range(300):
        [slope] = torch.autograd.grad(expected_loss(theta.log_softmax(0)), theta)
        theta.data -= 0.2 * slope / theta.softmax(0).detach().clamp(min=1e-6)  # the natural gradient
    apart = (theta.softmax(0) - optimum).abs().max().item()
    assert apart < 1e-9 if kl in KL_FORMS else apart > 0.01, (kl, apart)


def test_a_teachers_advantage_is_the_gradient_of_the_dense_reverse_kl() -> None:
    """All texts of two tokens over four words, each with its probability: the expected gradient is that of
    KL(student || teacher) of every position, whose context is given. Where the teacher agrees it is zero.
    """
    torch.manual_seed(1)
    words, objective = 4, ObjectiveConfig(name="policy", advantage="teacher")
    theta = torch.randn(
        1 + words, words, dtype=torch.float64, requires_grad=True
    )  # of the first, then behind each word
    teacher = torch.randn(1 + words, words, dtype=torch.float64).log_softmax(-1)
    teacher[2] = theta[2].detach().log_softmax(-1)  # it agrees behind the second word
    texts = torch.cartesian_prod(torch.arange(words), torch.arange(words))
    at = torch.stack([torch.zeros(len(texts), dtype=torch.long), 1 + texts[:, 0]], 1).flatten()
    log_p = theta.log_softmax(-1)
    now = log_p[at, texts.flatten()]
    own, starts = now.detach().numpy(), np.arange(0, 2 * len(texts) + 1, 2)
    of_teacher = teacher[at, texts.flatten()].numpy()
    values = {ADVANTAGE: np.full(len(own), 9.0), SAMPLER: own, TEACHER: of_teacher}
    columns: dict[str, Any] = {name: ByLearnedToken(each, starts) for name, each in values.items()}
    finish_advantages(columns, own, objective)
    advantage = torch.from_numpy(columns[ADVANTAGE].values)
    probability = now.detach().view(-1, 2).sum(1).exp().repeat_interleave(2)
    given = {"document_ids": torch.arange(2 * len(texts)), "advantage": advantage, "share": probability,
             "score": 0 * advantage, "old_log_p": now.detach()}  # fmt: skip
    form = Policy("token", (0.2, 0.28), "sequences", 0, "k2", 0.0)
    predicted = Predicted(-now[:, None], now, torch.ones(len(now), 1, dtype=torch.bool))
    loss = form.loss(predicted, torch.arange(len(now)), {name: each[None] for name, each in given.items()})[0]
    [gradient] = torch.autograd.grad(loss, theta, retain_graph=True)
    kl = (log_p.exp() * (log_p - teacher)).sum(1)
    reached = torch.cat([torch.ones(1, dtype=torch.float64), log_p[0].detach().exp()])  # how probable each context is
    [dense] = torch.autograd.grad(reached @ kl, theta, retain_graph=True)
    assert (gradient - dense).abs().max() < 1e-14 and gradient[2].abs().max() < 1e-15 < gradient.abs().max()
    zero = {**given, "advantage": 0 * advantage}
    nothing = form.loss(predicted, torch.arange(len(now)), {name: each[None] for name, each in zero.items()})[0]
    assert nothing == 0 and not torch.autograd.grad(nothing, theta)[0].any()
