"""The policy objective beside TRL's GRPOTrainer, by hand: TRL is no dependency of ours.

    python tests/against_trl_grpo.py

Both get the ids of one batch of answers, and take five SGD steps on it in fp32: relative differences of loss and
gradient of each step. From the second step on ratios are clipped. Needs trl 1.16, datasets and accelerate.
"""

import tempfile
from pathlib import Path
from typing import Any

import made_samples
import torch
from against_trl_dpo import save_model, world
from datasets import Dataset
from gloo.job_answers import data_of
from gloo.job_parity import keep_gradients
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    Config,
    LRSchedulerConfig,
    ObjectiveConfig,
    TrainingConfig,
)
from titan_mi100.data.samples import Group
from titan_mi100.open_run.start import open_run
from titan_mi100.shapes.qwen3 import Qwen3Spec

SPEC = Qwen3Spec(512, 64, 128, 2, 4, 2, 16, True)
STEPS, LONGEST, GROUP = 5, 12, 4
LR = {"gspo": 0.05}  # else 0.5: a sequence is soon clipped as a whole
OURS: dict[str, dict[str, Any]] = {
    "dapo": {"advantage": "std"},
    "grpo": {"advantage": "std", "divisor": "sequences"},
    "dr_grpo": {"divisor": "length", "longest_answer": LONGEST},
    "cispo": {"advantage": "std", "ratio": "cispo", "clip_high": 0.1},
    "gspo": {"advantage": "std", "ratio": "sequence", "divisor": "sequences", "clip_low": 0.1, "clip_high": 0.12},
}
THEIRS: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "grpo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "none"},
    "cispo": {"epsilon_high": 1.1},
    "gspo": {"epsilon": 0.1, "epsilon_high": 0.12, "loss_type": "grpo", "importance_sampling_level": "sequence"},
}


def whole_groups() -> list[Group]:
    """Groups of GROUP answers, none cut off, all with scores that differ."""
    made = made_samples.groups(512, 12, LONGEST, 3)
    return [group._replace(answers=[vars_as(answer, i) for i, answer in enumerate(group.answers[:GROUP])], prompt=n)
            for n, group in enumerate(each for each in made if len(each.answers) >= GROUP)]  # fmt: skip


def vars_as(answer: Any, number: int) -> Any:
    score = (number * 0.37) % 1
    return type(answer)(answer.ids, answer.log_p, "stop", "", score, {"made up": score})


def ours(form: str, folder: Path, made: list[Group]) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    objective = ObjectiveConfig(name="policy", most_apart=100.0, **OURS[form])
    case = made_samples.case_of(made_samples.write(folder / "samples.jsonl", made), made, objective.answers)
    data = data_of({"seq_len": 64, **case})
    config = Config(
        training=TrainingConfig(seq_len=64, local_batch_size=len(data.sources[0].rows), max_norm=0.0,
                                mixed_precision_param="float32", epochs=STEPS),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        activation_checkpoint=ActivationCheckpointConfig("none"),
        checkpoint=CheckpointConfig(initial_load_path=str(folder)),
        objective=objective,
    )  # fmt: skip
    run, steps = open_run(config, world(), spec=SPEC, data=data), []

    def sgd(*_: float | None) -> None:
        for _, parameter in run.model.trained_parameters():
            parameter.data -= LR.get(form, 0.5) * parameter.grad

    for _ in range(STEPS):
        run.optimizer.update = sgd  # type: ignore[method-assign]
        kept = keep_gradients(run)
        result = run.step()
        steps.append((result.loss, result.measures["clipped"], dict(kept)))
    return steps


def theirs(form: str, folder: Path, made: list[Group]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    count, steps, losses = len(made) * GROUP, list[tuple[float, dict[str, torch.Tensor]]](), list[float]()
    word = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word, pad_token="a", eos_token="a")
    scores = {str(group.prompt): [answer.score for answer in group.answers] for group in made}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen, columns = dict[str, int](), {"prompt_ids": [], "completion_ids": [], "logprobs": [], "score": []}
        for prompt in prompts:
            index = seen[prompt] = seen.get(prompt, -1) + 1
            answer = made[int(prompt)].answers[index]
            own = [made[int(prompt)].prompt_ids, answer.ids, answer.log_p, scores[prompt][index]]
            for name, each in zip(columns, own, strict=True):
                columns[name].append(each)
        return columns

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            steps.append((sum(losses), gradients))
            losses.clear()

    class Trainer(GRPOTrainer):
        def _compute_loss(self, *given: Any) -> torch.Tensor:
            loss = super()._compute_loss(*given)
            losses.append(loss.item())
            return loss

    options = {"loss_type": form, "scale_rewards": "group", **THEIRS[form]}
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=GROUP, gradient_accumulation_steps=count // GROUP,
        steps_per_generation=count // GROUP, num_iterations=STEPS, num_generations=GROUP, beta=0.0, max_steps=STEPS,
        max_completion_length=LONGEST, learning_rate=LR.get(form, 0.5), lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=1e9, weight_decay=0.0, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=False, **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = Trainer(
        model, reward_funcs=[lambda completions, score, **_: score], args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(made))]), rollout_func=rollout,
        callbacks=[Keep()],
    )  # fmt: skip
    trainer.train()
    return steps


def main() -> None:
    made = whole_groups()
    for form in OURS:
        with tempfile.TemporaryDirectory() as name:
            save_model(SPEC, Path(name))
            own, other = ours(form, Path(name), made), theirs(form, Path(name), made)
        assert len(own) == len(other) == STEPS
        for number, ((loss, clipped, mine), (their_loss, gradients)) in enumerate(zip(own, other, strict=True), 1):
            apart = sum(float((mine[n] - gradients[n]).square().sum()) for n in mine) ** 0.5
            norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
            print(f"{form} step {number}: loss {loss:+.6f}, theirs {their_loss:+.6f} ({abs(loss - their_loss):.1e}); "
                  f"gradient {apart / norm:.1e} apart, norm {norm:.3g}; {clipped:.1%} clipped", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
