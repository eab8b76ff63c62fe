"""The settings of a run: one dataclass per TOML section. Imports no torch."""

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_mi100.config.hub import no_such_model
from titan_mi100.config.kernels import AUTO, KERNELS
from titan_mi100.config.layout import AXES, SCHEDULES, Batch, Layout, resolve_batch, resolve_layout
from titan_mi100.config.problem import ConfigError, Problem
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.files.hub_files import ADAPTER, MODEL, TOKENIZER, TRAIN, VALIDATION
from titan_mi100.files.plain import read_object
from titan_mi100.losses import LOSSES, Loss, LossSettings
from titan_mi100.shapes import families
from titan_mi100.shapes.base import ALL_LINEAR, EXPERTS, ModelSpec, adapter_shapes, differences, row_shapes
from titan_mi100.shapes.rope import YARN, RopeScaling
from titan_mi100.text import assets

# what must not change on resume
FINGERPRINTS = ("model", "tokenizer", "data", "seed", "global_batch_size", "lora", "base", "objective", "draft_head")


def _key(
    default: Any, doc: str, *, low: float = 0, high: float = 0, below: float = 1e100, path: bool = False, hub: str = ""
) -> Any:
    """A key. low, high: limits of a number (high: 0: of a whole one 2**31 - 1). below: of a fraction: it must be less.
    path: in a TOML file it is relative to the file. hub: what a name on the Hugging Face hub is fetched for, see
    files/hub_files.py.
    """
    rules = {"doc": doc, "choices": (), "low": low, "high": high, "below": below, "hub": hub}
    return field(default=default, metadata={**rules, "path": path or bool(hub)})


def _choice(choices: Iterable[str], doc: str, default: str | tuple[str, ...] | None = None) -> Any:
    """A key that takes one of some texts, or several. Args: default: None: the first."""
    key = _key(next(iter(choices)) if default is None else default, doc)
    return field(default=key.default, metadata={**key.metadata, "choices": tuple(choices)})


@dataclass(frozen=True)
class JobConfig:
    config_file: str = _key("", "TOML file to read (command line only)")
    description: str = _key("", "free text, kept with the run")
    dump_folder: str = _key("outputs", "folder for runs without job.run_folder", path=True)
    run_folder: str = _key(
        "", "folder of this run, which resumes if it holds a checkpoint; empty: a new one", path=True
    )


@dataclass(frozen=True)
class ModelConfig:
    flavor: str = _key("", f"{', '.join(families.PRESETS)}; empty: config.json beside checkpoint.initial_load_path")
    tokenizer_path: str = _key("", "HF folder or name, or .model file; empty: that of initial_load_path", hub=TOKENIZER)
    allow_other_tokenizer: bool = _key(False, "allow another tokenizer_path than checkpoint.initial_load_path's")
    chat_template: str = _key("", "Jinja file to use instead of the tokenizer's own chat template", path=True)
    yarn_factor: float = _key(0.0, "YaRN: times that documents may be longer than trained; 0: as config.json says")
    yarn_original_max_position_embeddings: int = _key(0, "positions before YaRN; 0: config.json's", high=10**8)
    attention_backend: str = _choice(
        (AUTO, *KERNELS), "attention kernel; auto: the fastest that works here; eager: the reference"
    )

    def extended(self, spec: ModelSpec) -> ModelSpec:
        """The shape with the YaRN that the keys add, if they do. Raises ConfigError: it cannot be added."""
        if not self.yarn_factor:
            return spec
        before, most = spec.rope_scaling, spec.max_position_embeddings
        original = before.original_max_position_embeddings if before else most
        made = RopeScaling(YARN, self.yarn_factor, self.yarn_original_max_position_embeddings or original)
        if before == made:  # a folder that such a run has exported
            return spec
        problems = made.problems(most, spec.rope_theta)
        if before:
            problems = [f"the model's config.json has {before.written()} already; leave yarn_factor out"]
        if problems:
            named = [f"= {self.yarn_factor}: {problem}" for problem in problems]
            raise ConfigError([Problem("model.yarn_factor", text, ("checkpoint.initial_load_path",)) for text in named])
        return replace(spec, rope_scaling=made, max_position_embeddings=max(most, made.reach))  # type: ignore[type-var]


_SWITCH = ("", "true", "false")
_FORMATS = ("auto", "messages", "sharegpt", "alpaca", "prompt_completion", "columns", "text", "tokens")


@dataclass(frozen=True)
class SourceConfig:
    """A `[[data.source]]`. Those of a config are in `DataConfig.sources`."""

    path: tuple[str, ...] = _key((), "as data.path, or one folder of titan-mi100 prepare", hub=TRAIN)
    name: str = _key("", "of the source, in logs, metrics and checkpoints; default: that of its first file or folder")
    weight: float = _key(0.0, "share of the rows, relative to the other sources' weights; 0 in all: by their size")
    epochs: float = _key(1.0, "how often it is read until it is exhausted; see data.on_exhausted")
    format: str = _choice(_FORMATS, "as data.format; auto for a folder of titan-mi100 prepare")

    @property
    def stem(self) -> str:
        """The name of its first file or folder, without an ending; of a data set of the hub the data set's."""
        if of_hub := re.search(r"/datasets--[\w.-]+--([\w.-]+)/snapshots/", self.path[0] if self.path else ""):
            return of_hub[1]
        return (os.path.basename(self.path[0]).split(".")[0] if self.path else "") or "source"


@dataclass(frozen=True)
class DataConfig:
    path: tuple[str, ...] = _key(
        (), "training data: files or globs of JSONL, JSON, parquet (.gz, .zst), or OWNER/NAME:CONFIG[SPLIT]", hub=TRAIN
    )
    weights: tuple[float, ...] = _key((), "makes each path a source of a mixture with this weight, e.g. [3, 1]")
    repeats: tuple[float, ...] = _key((), "makes each path a source, read this often in an epoch, e.g. [1, 2.5]")
    source: tuple[SourceConfig, ...] = _key((), "the sources of a mixture, each a table [[data.source]]")
    weights_in: str = _choice(
        ("tokens", "documents"),
        "whether weights are shares of tokens or of documents (converted by each source's mean length)",
    )
    on_exhausted: str = _choice(
        ("repeat", "drop", "stop"),
        "what happens to a source that was read `epochs` times: it is read again until all were, it drops out and the "
        "others share its weight, or the run stops",
    )
    concatenate: bool = _key(False, "let attention cross documents in the rows of a corpus; false: they are isolated")
    format: str = _choice(_FORMATS, "a row's form (docs/DATA.md); auto: by each file's first row")
    prompt_column: str = _key("", "column with the user's text, for format columns")
    response_column: str = _key("", "column with the assistant's text, for format columns")
    system_column: str = _key("", "column with the system message, for format columns; empty: none")
    chosen_column: str = _key("", "column with the better answer, for pairs; empty: chosen")
    rejected_column: str = _key("", "column with the worse answer, for pairs; empty: rejected")
    label_column: str = _key("", "column that says if the answer is wanted; empty: label or kto_tag")
    special_in_content: str = _choice(("", "text"), "special tokens in a message; empty: a bad row")
    system_prompt: str = _key("", "system message of conversations without one, also at inference; empty: none")
    text_column: str = _key("text", "column with the text, for format text")
    loss: str = _choice(
        ("assistant", "last", "last_round", "all", "weight"),
        "what is learned: the assistant's turns, its last turn, its turns after the last user message, the whole "
        "text, or messages with weight = 1",
    )
    empty_think: str = _choice(("masked", "supervised"), "if an answer's empty think block is learned")
    earlier_thinking: str = _choice(
        ("template", "mask", "unroll", "context"),
        "turns whose reasoning the template removes: learned without it, not learned, or unrolled into one document "
        "per round, each with its reasoning; context: as mask, and reasoning that it shows there is not learned",
    )
    enable_thinking: str = _choice(_SWITCH, "template variable, also at inference; empty: as most rows")
    preserve_thinking: str = _choice(_SWITCH, "template variable: earlier reasoning stays; empty: its default")
    reasoning_effort: str = _key("", "template variable, such as low; empty: its default")
    overlong: str = _choice(
        ("drop", "truncate", "split", "error"),
        "what to do with more than seq_len tokens: drop, keep the beginning, cut into pieces, stop",
    )
    max_lost_share: float = _key(0.5, "stop if more than this share of a path's rows is overlong; 1: never", high=1)
    max_cut_share: float = _key(
        1.0, "with overlong = truncate: stop if more than this share of a path's tokens is cut off; 1: never", high=1
    )
    ignored_keys: tuple[str, ...] = _key(
        (), "keys of rows and messages to ignore, besides id, timestamp and others that are harmless (docs/DATA.md)"
    )
    null_arguments: str = _choice(("", "keep", "drop"), "nulls in calls; empty: JSON keeps, parquet drops them")
    duplicates: str = _choice(("keep", "drop"), "what to do with rows that repeat an earlier row")
    on_bad_row: str = _choice(("error", "skip"), "a row that cannot be read: stop, or leave it out")
    max_bad_rows: int = _key(100, "with on_bad_row = skip: stop the run after more bad rows than this")
    validation_path: tuple[str, ...] = _key((), "files, globs or names to validate on", hub=VALIDATION)
    validation_fraction: float = _key(0.0, "share of data.path for validation, by a hash of the content", below=1)
    cache_folder: str = _key("", "where prepared data is kept; empty: ~/.cache/titan_mi100", path=True)
    workers: int = _key(0, "processes that tokenise; 0: one per core", high=4096)

    @property
    def variables(self) -> dict[str, Any]:
        """The chat template's variables that are set."""
        meant = {"true": True, "false": False}
        return {name: meant.get(value, value) for name in assets.VARIABLES if (value := getattr(self, name))}

    @property
    def is_mixture(self) -> bool:
        """Whether each row is from one of several sources; else an epoch is all rows in random order."""
        return bool(self.source or self.weights or self.repeats)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """All sources, with names; `path` is short for one, or with weights or repeats for one per path."""
        configs = self.source
        if not configs and not self.is_mixture:
            return (SourceConfig(self.path, "train", format=self.format),)
        if not configs:
            weights, repeats = self.weights or [0.0] * len(self.path), self.repeats or [1.0] * len(self.path)
            pairs = zip(self.path, weights, repeats, strict=False)  # config.check refuses other numbers of them
            configs = tuple(SourceConfig((path,), "", weight, epochs, self.format) for path, weight, epochs in pairs)
        taken, named = {source.name for source in configs}, []
        for source in configs:
            name = source.name
            if not name:
                names = (source.stem if i == 1 else f"{source.stem}-{i}" for i in range(1, len(configs) + 2))
                taken.add(name := next(name for name in names if name not in taken))
            named.append(replace(source, name=name))
        return tuple(named)


@dataclass(frozen=True)
class TrainingConfig:
    seq_len: int = _key(1024, "tokens per packed row (S)", low=2)
    local_batch_size: int = _key(1, "rows per data-parallel rank and forward (B_micro)", low=1, high=2**16)
    gradient_accumulation_steps: int = _key(0, "forwards per step (GA); 0: one, or by the token target", high=2**16)
    target_tokens_per_step: int = _key(0, "tokens per step over all ranks, which gives GA; 0: off", high=2**32)
    steps: int = _key(0, "optimizer steps in all; 0: by epochs")
    epochs: int = _key(0, "passes over the data; 0 with steps = 0: one")
    max_norm: float = _key(1.0, "clip the gradient's global norm to this; 0: off")
    max_nonfinite_steps: int = _key(3, "steps in a row without finite loss and gradients that end the run", low=1)
    loss_spike_sigmas: float = _key(6.0, "log a step's rows if its loss is so many deviations above the mean; 0: off")
    skip_loss_spikes: bool = _key(False, "do not update the weights in a step whose loss is a spike")
    seed: int = _key(42, "seed of initial weights and row order", high=2**63 - 1)
    train_router: bool = _key(False, "train what chooses experts, too; it stays as it is in most fine-tuning")
    mixed_precision_param: str = _choice(
        ("bfloat16", "float16", "float32", "float64"),
        "dtype of the computation; master weights are float32 (float64: they too, to compare layouts digit by digit); "
        "float16 scales the loss",
    )
    mixed_precision_reduce: str = _choice(("float32", "bfloat16"), "dtype of the gradient reduction")


@dataclass(frozen=True)
class ValidationConfig:
    freq: int = _key(0, "optimizer steps between validations; the first comes at 5% at the latest; 0: only at the end")
    metric: str = _choice(
        ("loss", "exact_match"),
        "what the best checkpoint and early stopping go by: the lowest loss, or the most right answers to `prompts`",
    )
    judge: str = _key("number", "what must equal the reference's: the last number, the whole text, or regex:PATTERN")
    patience: int = _key(0, "stop after this many validations in a row without a better metric; 0: never")
    prompts: int = _key(0, "number of held-out prompts that the model answers at each validation", high=1024)
    prompt_tokens: int = _key(128, "maximum tokens of each answer; each token costs a forward", low=1)


_STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 2 / 256}  # of AdamW's two moments
_MASTER_BYTES = {"fp32": (4, 0), "bf16_sr": (2, 0), "24bit": (2, 1)}


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = _key(2e-5, "peak learning rate of AdamW")
    beta1: float = _key(0.9, "decay of the first moment", below=1)
    beta2: float = _key(0.95, "decay of the second moment", below=1)
    eps: float = _key(1e-8, "added to the denominator")
    weight_decay: float = _key(0.1, "decoupled weight decay of matrices; norms have none")
    state: str = _choice(
        ("fp32", "bf16", "8bit"),
        "dtype of AdamW's two moments: fp32, bf16 with stochastic rounding, or 8 bits with an exponent per block",
    )
    master: str = _choice(
        ("fp32", "bf16_sr", "24bit"),
        "format of the master weights: fp32; bf16_sr: bf16 with stochastic rounding; 24bit: bf16 and 8 more bits",
    )

    @property
    def state_bytes(self) -> float:
        """Bytes of state per trained weight."""
        return _STATE_BYTES[self.state]

    @property
    def master_bytes(self) -> tuple[int, int]:
        """Bytes per trained weight, and of its extra bits."""
        return _MASTER_BYTES[self.master]

    @property
    def is_lean(self) -> bool:
        """Whether the optimizer state or the weights are kept in fewer than 32 bits."""
        return (self.state, self.master) != ("fp32", "fp32")


@dataclass(frozen=True)
class LRSchedulerConfig:
    warmup_steps: int = _key(-1, "steps of linear warmup; -1: 3% of the steps", low=-1)
    decay_type: str = _choice(("cosine", "linear", "sqrt", "constant"), "shape of the decay")
    decay_ratio: float = _key(1.0, "share of steps with decay, at the end; below 1: warmup-stable-decay", high=1)
    min_lr_factor: float = _key(0.0, "final learning rate as a share of lr", high=1)


@dataclass(frozen=True)
class ParallelismConfig:
    data_parallel_shard_degree: int = _key(-1, "FSDP2 ranks that share weights; -1: all remaining processes", low=-1)
    data_parallel_replicate_degree: int = _key(
        1, "replicas (HSDP), each of data_parallel_shard_degree ranks; with shard degree 1: DDP", low=1
    )
    tensor_parallel_degree: int = _key(1, "ranks that share each layer's heads and matrices; inside a node", low=1)
    context_parallel_degree: int = _key(
        1, "ranks that share the tokens of each row (Ulysses), and the weights as FSDP2's ranks do", low=1
    )
    pipeline_parallel_degree: int = _key(
        1, "ranks that share the layers; a step's gradient_accumulation_steps forwards are its microbatches", low=1
    )
    pipeline_parallel_schedule: str = _choice(SCHEDULES, "order of forwards and backwards")
    pipeline_parallel_layers_per_stage: tuple[int, ...] = _key(
        (),
        "e.g. [16, 12]; two stages per rank under an interleaved schedule; default: balanced by "
        "cost, or by memory where that would almost fill a card",
    )
    zero_stage: int = _key(
        -1,
        "what FSDP2 shards: 3: weights, gradients, optimizer state; 2: all but weights, which are gathered once per "
        "step; 1: optimizer state, gradients reduced once per step; 0: nothing (DDP); -1: 3, or 1 with a pipeline, or "
        "0 with replicas of one rank",
        low=-1,
        high=3,
    )
    powersgd_rank: int = _key(0, "with DDP: compress gradients to matrices of this rank (PowerSGD, lossy); 0: off")
    powersgd_start_step: int = _key(10, "first step with compression; steps before it are exact", low=2)
    powersgd_warm_start: bool = _key(True, "start each compression from the previous step's factors")
    powersgd_error_feedback: bool = _key(True, "add the compression error to the next step's gradient")

    @property
    def is_pipeline(self) -> bool:
        return self.pipeline_parallel_degree > 1


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    mode: str = _choice(
        ("none", "selective", "full"),
        "what is recomputed in backward: nothing, each block except its attention, or whole blocks",
        "selective",
    )


@dataclass(frozen=True)
class MemoryConfig:
    limit_gib: float = _key(0.0, "memory that the run may use on each device; 0: all of a GPU; on a CPU no limit")
    offload: str = _choice(
        ("nothing", "optimizer", "weights"),
        "what is in the host's memory: optimizer: accumulated gradients and optimizer state; weights: the weights "
        "too, fetched block by block (FSDP2's CPU offload)",
    )
    offload_activations: bool = _key(
        False, "keep blocks' inputs in the host's memory until backward; with activation_checkpoint.mode = 'full'"
    )
    piece_tokens: int = _key(
        -1,
        "tokens that MLPs and norms compute at a time, and again in backward; 0: all of a forward; -1: all where a "
        "step then fits a GPU, else as many as hardly raise its peak",
        low=-1,
    )
    on_overflow: str = _choice(("refuse", "warn"), "if a step is predicted not to fit: refuse, or warn")


@dataclass(frozen=True)
class CompileConfig:
    enable: bool = _key(False, "torch.compile each block except its attention")
    backend: str = _choice(("inductor", "aot_eager"), "torch.compile's backend")


NF4_BLOCK = 64  # weights of a row that share one scale


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = _key(0, "train only LoRA adapters of this rank: W + alpha / rank * B A; 0: train all weights")
    alpha: float = _key(16.0, "the adapters are scaled by alpha / rank")
    dropout: float = _key(0.0, "dropout of the adapters' inputs", below=1)
    target_modules: tuple[str, ...] = _key(
        families.LINEARS, "linear layers that get adapters; all-linear: all but experts"
    )
    base: str = _choice(("whole", "nf4"), "frozen weights: whole: the computation's dtype; nf4: 4 bits (QLoRA)")
    initial_load_path: str = _key("", "PEFT adapter to start from: folder or name; empty: a fresh one", hub=ADAPTER)
    base_model_name_or_path: str = _key("", "the base that an export names, e.g. Qwen/Qwen3-0.6B (docs/LORA.md)")
    expert_rank: int = _key(0, "rank of the adapters of experts; 0: rank")
    expert_alpha: float = _key(0.0, "they are scaled by expert_alpha / expert_rank; 0: alpha")
    scaling: str = _choice(("rank", "sqrt_rank"), "sqrt_rank: by alpha / sqrt(rank), as rsLoRA")
    b_lr_ratio: float = _key(1.0, "learning rate of B, in units of optimizer.lr; LoRA+ recommends 16")
    trainable_tokens: tuple[str, ...] = _key((), 'tokens whose rows are trained too, such as "<|im_end|>" of a Base')
    token_ids: tuple[int, ...] = ()  # theirs in ascending order, once the tokenizer is read; no key

    def __post_init__(self) -> None:
        if self.target_modules == (ALL_LINEAR,):  # everything else sees the names of the layers
            object.__setattr__(self, "target_modules", families.LINEARS)

    @property
    def of_experts(self) -> "LoRAConfig":
        """The same with the experts' rank and alpha."""
        return replace(self, rank=self.expert_rank or self.rank, alpha=self.expert_alpha or self.alpha)

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "sqrt_rank" else self.rank)

    def shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Name and shape of every trained tensor: the adapters' matrices and the rows of tokens."""
        rows = row_shapes(spec, len(self.token_ids or self.trainable_tokens))
        return adapter_shapes(spec, self.rank, self.target_modules, self.of_experts.rank) | rows


@dataclass(frozen=True)
class ObjectiveConfig:
    name: str = _choice(
        ("sft", "preference", "distill", "policy"), "what is learned (docs/PREFERENCES.md, docs/POLICY.md)"
    )
    loss: str = _choice(LOSSES, "of preferences")
    beta: float = _key(0.0, "strength of the preference loss; 0: that of its paper, for dpo 0.1")
    label_smoothing: float = _key(0.0, "cdpo: share of the pairs that are the wrong way round; 0: 0.1", below=0.5)
    gamma: float = _key(-1.0, "simpo: the margin that is aimed at; -1: 1.0", low=-1)
    sft_weight: float = _key(0.0, "of a further term: minus log p per token of the chosen answer")
    teacher: str = _key("", "distill, policy: the folder that titan-mi100 teach has written", path=True)
    top_k: int = _key(32, "distill: ids per learned token that titan-mi100 teach keeps", low=1, high=1 << 20)
    teacher_weight: float = _key(0.5, "share of KL(teacher || model) in the loss; the rest: cross-entropy", high=1)
    rest: str = _choice(
        ("bucket", "renormalise"),
        "ids that the teacher's folder lacks: one bucket of their probability; renormalise: left out",
    )

    advantage: str = _choice(
        ("mean", "std", "leave_one_out", "whitened", "teacher"),
        "policy: an answer's score minus its group's mean; std: over the group's deviation too; leave_one_out: minus "
        "the mean of the others; whitened: as mean, then over the whole store; teacher: of each token, the teacher's "
        "log p minus the model's own before training",
    )
    ratio: str = _choice(
        ("token", "sequence", "cispo"),
        "policy: what is clipped: the ratio of each token or of the sequence (GSPO); cispo: only its weight",
    )
    clip_low: float = _key(0.0, "policy: the ratio is clipped below 1 minus this; 0: 0.2, of a sequence 0.0003", high=1)
    clip_high: float = _key(0.0, "policy: and above 1 plus this; 0: 0.28, of a sequence 0.0004, of cispo 4")
    divisor: str = _choice(
        ("tokens", "sequences", "length"),
        "policy: the loss is a mean over learned tokens, or over answers, or over answers x longest_answer",
    )
    longest_answer: int = _key(0, "policy: --max_new_tokens of titan-mi100 sample", high=1 << 24)
    kl_weight: float = _key(0.0, "policy: of the KL to the weights that training starts from; 0: none")
    kl: str = _key("k2", "policy: form of the KL; ratio_k3: k3 times the ratio (docs/POLICY.md)")
    cut_off: str = _choice(
        ("mask", "shape", "keep"),
        "policy: answers that were cut off are not learned; or score less in their last cut_off_tokens (DAPO)",
    )
    cut_off_tokens: int = _key(0, "policy: with cut_off = shape: over how many tokens", high=1 << 24)
    most_apart: float = _key(0.1, "policy: mean difference of the sampler's log p and the trainer's that stops the run")
    correction: str = _choice(
        ("auto", "none", "truncate", "leave_out"),
        "policy: where sampler and trainer differ; truncate: a token weighs their ratio, at most correction_cap; "
        "leave_out: answers beyond it; auto: in titan-mi100 rounds with a server or nf4 truncate, else none",
    )
    correction_cap: float = _key(0.0, "policy: of the ratio; 0: 2, of leave_out 3")

    @property
    def preference(self) -> Loss:
        return LOSSES[self.loss]

    @property
    def clip(self) -> tuple[float, float]:
        """By how much the ratio may be below and above 1."""
        low, high = {"token": (0.2, 0.28), "sequence": (3e-4, 4e-4), "cispo": (1.0, 4.0)}[self.ratio]
        return self.clip_low or low, self.clip_high or high

    @property
    def cap(self) -> float:
        """Of the correction."""
        return self.correction_cap or (3.0 if self.correction == "leave_out" else 2.0)

    @property
    def is_corrected(self) -> bool:
        return self.correction in ("truncate", "leave_out")

    @property
    def factors(self) -> LossSettings:
        usual = self.preference.defaults
        gamma = usual.gamma if self.gamma == -1 else self.gamma
        return LossSettings(self.beta or usual.beta, gamma, self.label_smoothing or usual.e)

    @property
    def answers(self) -> str:
        """The kind of rows that it needs: "" conversations or texts, "pairs" of answers, "labels": answers with one,
        "samples", then what of them is learned, see data.samples.Kept.
        """
        if self.name == "policy":
            with_dead = "teacher" if self.advantage == "teacher" else int(self.kl_weight > 0)
            told = self.cut_off, self.longest_answer, self.cut_off_tokens, with_dead
            return " ".join(map(str, ("samples", *told)))
        return "" if self.name != "preference" else "pairs" if self.preference.is_paired else "labels"

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change on resume, as JSON values; empty for sft."""
        if self.name == "preference":
            return {"name": self.name, "loss": self.loss, **self.factors._asdict(), "sft_weight": self.sft_weight}
        if self.name == "policy":
            kept = {key: getattr(self, key) for key in _DECIDE_BITS}
            kept |= {"correction": [self.correction, self.cap]} if self.is_corrected else {}
            kept |= {"teacher": self._stored("weights", "")} if self.advantage == "teacher" else {}
            return {"name": self.name, **kept, "clip": [*self.clip]}
        kept = {"teacher": self._stored("weights", ""), "k": self.ids_per_token, "rest": self.rest}
        kept |= {"teacher_weight": self.teacher_weight}
        return {"name": self.name, **kept} if self.name == "distill" else {}

    @property
    def ids_per_token(self) -> int:
        """Ids that a teacher gives for each learned token; top_k where its folder is not there yet."""
        return self._stored("k", self.top_k) if self.name == "distill" else 0

    @cached_property
    def _store(self) -> dict[str, Any]:
        """What the teacher's folder says of itself; read once, so that the settings are values."""
        with suppress(UserError):  # it is read again, and checked, when the data are opened
            return read_object(Path(self.teacher, "store.json"), "")
        return {}

    def _stored(self, key: str, otherwise: Any) -> Any:
        value = self._store.get(key)
        return value if type(value) is type(otherwise) else otherwise

    @property
    def has_reference(self) -> bool:
        """Whether a pass before training reads what the model thinks of the answers."""
        return self.name == "policy" or (self.name == "preference" and self.preference.has_reference)


KL_FORMS = ("k2", "ratio_k3")  # whose gradient in the loss is that of the KL
_DECIDE_BITS = ("advantage", "ratio", "divisor", "longest_answer", "kl_weight", "kl", "cut_off", "cut_off_tokens")
OF_POLICY = (*_DECIDE_BITS, "clip_low", "clip_high", "most_apart", "correction", "correction_cap")


@dataclass(frozen=True)
class DraftHeadConfig:
    """Of the head that servers draft with (`mtp.*` of Qwen3.5), see docs/DRAFT_HEAD.md."""

    train: str = _choice(
        ("no", "along", "after"),
        "no: it is carried as it is; along: it is trained beside the model, which it does not change; after: it alone",
    )
    lr: float = _key(0.0, "its learning rate; 0: optimizer.lr")
    weight: float = _key(0.1, "along: of its loss")
    fresh: bool = _key(False, "start with random weights: for a folder that has lost it")

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change on resume, as JSON values; empty: it is not trained."""
        weight = {"weight": self.weight} if self.train == "along" else {}
        return {"train": self.train, **weight} if self.train != "no" else {}


@dataclass(frozen=True)
class RoundsConfig:
    """Of titan-mi100 rounds; then data.path has prompts, and data.validation_path those that are only scored."""

    count: int = _key(0, "titan-mi100 rounds: how often to sample, score and train")
    prompts: int = _key(0, "prompts of data.path that a round takes, in random order; 0: all")
    k: int = _key(8, "answers to each of them", low=2, high=100)
    held_out_k: int = _key(1, "answers to each prompt of data.validation_path, which are only scored", low=1, high=100)
    sample: str = _key("", 'further options of titan-mi100 sample, such as "--max_new_tokens 256 --batch_size 32"')
    score: str = _key("", 'options of titan-mi100 score, such as "--by number"')
    patience: int = _key(2, "rounds without a better held-out score after which to end; 0: never")
    most_drift: float = _key(
        0.5, "end after a round in which the log ratio or the KL to its sampler is above; 0: never"
    )
    rest: int = _key(0, "rounds for which a prompt rests if its last two groups had equal scores; 0: none rests")
    teacher: str = _key("", "model whose log p of the answers give the advantages (on-policy distillation)", hub=MODEL)
    teach: str = _key("", 'options of its pass, as of titan-mi100 teach, such as "--lora.base nf4"')
    server: str = _key("", "address of a server that samples; empty: our own engine")
    served_model: str = _key("", "the model that training starts from, as the server calls it")
    server_kind: str = _choice(("vllm", "sglang", "llamacpp"), "the server's program")
    restart: str = _key(
        "", "command that restarts the server in the background with the folder $MODEL, under the name $NAME"
    )
    keep_checkpoints: bool = _key(False, "keep the checkpoints of all rounds, not of the last one only")


@dataclass(frozen=True)
class CheckpointConfig:
    initial_load_path: str = _key(
        "",
        "weights to start from: a name on the Hugging Face hub, such as Qwen/Qwen3-0.6B or OWNER/NAME@REVISION; an HF "
        "folder; a DCP folder such as another run's checkpoint/step-500; a file of torch.save; empty: random weights",
        hub=MODEL,
    )
    interval: int = _key(500, "optimizer steps between checkpoints; 0: only after the last step")
    async_mode: str = _choice(
        ("disabled", "async"), "async: training goes on while a thread writes a copy in host memory"
    )
    keep_latest_k: int = _key(2, "verified checkpoints to keep; 0: all")
    keep_best: bool = _key(
        False, "also save after each validation with the best validation.metric so far, and keep that one"
    )
    allow_changed: tuple[str, ...] = _key(
        (), f"what may change on resume: {', '.join(FINGERPRINTS)}; or a field such as model.rope_theta"
    )
    export_hf: bool = _key(False, "after the last step, also write a verified HF folder, hf-step-N/ in the run folder")
    export_dtype: str = _choice(
        ("auto", "bfloat16", "float16", "float32"),
        "dtype of the exported weights; auto: that of initial_load_path's config.json, else float32",
    )
    load_step: int = _key(
        -1,
        "step of the checkpoint to resume from, even if it is suspect; later ones are renamed; -1: the newest that "
        "is not suspect",
        low=-1,
    )
    fresh: bool = _key(False, "start over in a new folder beside job.run_folder instead of resuming")


TRACKERS = ("mlflow", "trackio", "swanlab")


@dataclass(frozen=True)
class MetricsConfig:
    log_freq: int = _key(1, "optimizer steps between printed lines", low=1)
    enable_tensorboard: bool = _key(True, "write TensorBoard events")
    enable_wandb: bool = _key(False, "also log to Weights & Biases (extra wandb); its WANDB_... variables apply")
    report_to: tuple[str, ...] = _choice(TRACKERS, "trackers that get the same values, each an extra", ())


@dataclass(frozen=True)
class WatchdogConfig:
    seconds: float = _key(
        300.0, "a step longer than this and than 10 median steps is a hang: the run ends with code 5; 0: off"
    )
    start_seconds: float = _key(3600.0, "time limit of the start, up to the first step", low=1)
    compile_seconds: float = _key(1800.0, "time limit of the first two steps, which compile kernels", low=1)
    save_seconds: float = _key(3600.0, "time limit of a checkpoint or an export", low=1)
    validation_seconds: float = _key(600.0, "time limit of a microbatch of a validation", low=1)


TRACED_STEP = "titan_mi100 step "  # begins the name of the section around a traced step


@dataclass(frozen=True)
class ProfilingConfig:
    enable_profiling: bool = _key(False, "write Chrome traces of some steps (docs/REPORT.md)")
    profile_freq: int = _key(10, "optimizer steps between traced ones", low=1)
    profile_steps: tuple[int, ...] = _key((), "the steps to trace, e.g. [20, 21]; empty: every profile_freq", low=1)
    profile_ranks: tuple[int, ...] = _key((0,), "ranks that write traces and memory snapshots")
    save_traces_folder: str = _key("profile_traces", "folder for traces, inside the run folder")
    enable_memory_snapshot: bool = _key(
        False, "record allocations on GPUs; a snapshot is written after each traced step and when memory runs out"
    )
    save_memory_snapshot_folder: str = _key("memory_snapshot", "folder for snapshots, inside the run folder")


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked.

    Attributes:
        notes: lines for the log about what was decided while they were read.
        commits: of what names on the hub have named, see files/hub.py.
    """

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    draft_head: DraftHeadConfig = field(default_factory=DraftHeadConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    notes: tuple[str, ...] = ()
    commits: Mapping[str, str] = field(default_factory=dict, compare=False)

    def spec(self) -> ModelSpec:
        """The model's shape: the preset, or the `config.json` beside the weights that are loaded; with YaRN, if the
        config adds it.

        Raises:
            UserError: unknown preset, unreadable config.json, or the two disagree.
        """
        flavor, load = self.model.flavor, self.checkpoint.initial_load_path
        preset, folder = families.PRESETS.get(flavor), assets.folder_of(load)
        if flavor and not preset:
            text = f"= {flavor!r} is not known{did_you_mean(flavor, families.PRESETS)}"
            raise ConfigError([Problem("model.flavor", text)])
        if not flavor and not load:
            text = "is not set; name an HF folder in checkpoint.initial_load_path, or a preset"
            raise ConfigError([Problem("model.flavor", text, ("checkpoint.initial_load_path",))])
        if preset and not (load and os.path.exists(folder / assets.CONFIG)):
            return self.with_draft_head(self.model.extended(preset))
        if not os.path.exists(load):
            raise ConfigError([no_such_model(load)])
        spec = families.read_hf_config(folder)
        if preset and (differing := differences(preset, spec)):
            text = f"= {flavor!r} is not the model in {folder} (preset, folder: {'; '.join(differing)}); "
            text += "leave flavor out to take the folder's"
            raise ConfigError([Problem("model.flavor", text, ("checkpoint.initial_load_path",))])
        return self.with_draft_head(self.model.extended(spec))

    def with_draft_head(self, spec: ModelSpec) -> ModelSpec:
        """The shape with the draft head, if it is trained. Raises ConfigError: the family has none."""
        if self.draft_head.train == "no":
            return spec
        if spec.draft_layer is None:
            text = f'= "{self.draft_head.train}": a model of the family {spec.model_type} has no draft head; set "no"'
            raise ConfigError([Problem("draft_head.train", text)])
        return spec.with_draft_head()

    def tokenizer_path(self) -> str:
        load = self.checkpoint.initial_load_path
        return self.model.tokenizer_path or (str(assets.folder_of(load)) if load else "")

    def layout(self, world_size: int) -> Layout:
        p = self.parallelism
        degrees = {name: getattr(p, axis.key) for name, axis in AXES.items()}
        return resolve_layout(world_size, **degrees, zero_stage=p.zero_stage)

    def batch(self, world_size: int) -> Batch:
        t, ranks = self.training, self.layout(world_size).dp_degree
        accumulation, target = t.gradient_accumulation_steps, t.target_tokens_per_step
        return resolve_batch(t.local_batch_size, accumulation, target, t.seq_len, ranks)


def lora_identity(lora: LoRAConfig, modules: Collection[str]) -> dict[str, Any]:
    """The LoRA settings that must not change on resume, as JSON values.

    Args:
        modules: linear layers that the model has; other targets name none.
    """
    targets = [name for name in families.ADAPTED if name in lora.target_modules and name in modules]
    common = {"rank": lora.rank, "alpha": lora.alpha}
    own = {f"expert_{key}": getattr(lora.of_experts, key) for key in common}
    has_own = EXPERTS in targets and lora.of_experts != lora  # else as earlier versions wrote it
    new: dict[str, Any] = {"scaling": lora.scaling} if lora.scaling != "rank" else {}
    new |= {"token_ids": list(lora.token_ids)} if lora.token_ids else {}
    return {**common, "target_modules": targets, "dropout": lora.dropout, **(own if has_own else {}), **new}
