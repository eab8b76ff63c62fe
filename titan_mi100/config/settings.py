"""What a run can be told: one dataclass per TOML section, and which combinations make sense. Imports no torch."""

import glob
import os
from dataclasses import dataclass, field, fields
from typing import Any

from titan_mi100.config import assets, model_spec
from titan_mi100.config.layout import SCHEDULES, Batch, Layout, check_schedule, resolve_batch, resolve_layout
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.files.patterns import matching_files

FINGERPRINTS = ("model", "tokenizer", "data", "seed", "global_batch_size", "lora", "base")  # what a run stays


def _key(default: Any, doc: str, *, choices: tuple[str, ...] = (), low: float = 0, path: bool = False) -> Any:
    """A config key. `low` is the least allowed number; `path` values in a TOML file are relative to that file."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "path": path})


@dataclass(frozen=True)
class JobConfig:
    config_file: str = _key("", "TOML file to read (command line only)")
    description: str = _key("", "free text, kept with the run")
    dump_folder: str = _key("outputs", "where run folders are made that have no name", path=True)
    run_folder: str = _key("", "this run's folder, resumed if it holds a checkpoint; empty: a new one", path=True)


@dataclass(frozen=True)
class ModelConfig:
    flavor: str = _key("", f"{', '.join(model_spec.PRESETS)}; empty: config.json beside checkpoint.initial_load_path")
    tokenizer_path: str = _key(
        "", "HF folder, .tiktoken or sentencepiece .model file; empty: checkpoint.initial_load_path", path=True
    )
    chat_template: str = _key("", "Jinja file to use instead of the tokenizer's own chat template", path=True)
    attention_backend: str = _key("sdpa", "attention implementation; eager is the reference", choices=("sdpa", "eager"))


@dataclass(frozen=True)
class DataConfig:
    path: tuple[str, ...] = _key((), "training data: files or globs of JSONL, JSON or parquet, also .gz", path=True)
    weights: tuple[float, ...] = _key(
        (),
        "share of each path in an epoch's tokens, e.g. [3, 1]: what is abundant is read once, what is scarce repeats",
    )
    repeats: tuple[float, ...] = _key((), "how often an epoch reads each path, e.g. [1, 2.5]; default: once")
    format: str = _key(
        "auto",
        "what a row looks like (docs/DATA.md); auto: by the keys of each file's first row",
        choices=("auto", "messages", "sharegpt", "alpaca", "prompt_completion", "columns", "text", "tokens"),
    )
    prompt_column: str = _key("", "column with the user's text, for format columns")
    response_column: str = _key("", "column with the assistant's text, for format columns")
    system_column: str = _key("", "column with the system message, for format columns; empty: none")
    text_column: str = _key("text", "column with the text, for format text")
    loss: str = _key(
        "assistant",
        "which turns are learned: the assistant's, its last one, the whole text, or messages that say weight = 1",
        choices=("assistant", "last", "all", "weight"),
    )
    empty_think: str = _key(
        "masked",
        "the empty think block that the template puts before an answer: not learned, or learned",
        choices=("masked", "supervised"),
    )
    earlier_thinking: str = _key(
        "template",
        "turns whose reasoning the template leaves out: learned as it writes them, not learned, or the conversation "
        "is unrolled into one document per round, each with its reasoning",
        choices=("template", "mask", "unroll"),
    )
    overlong: str = _key(
        "drop",
        "more tokens than seq_len: leave the row out, keep its beginning, cut it into pieces, or stop",
        choices=("drop", "truncate", "split", "error"),
    )
    duplicates: str = _key(
        "keep", "rows with the content of an earlier row: train on them, or leave them out", choices=("keep", "drop")
    )
    on_bad_row: str = _key("error", "a row that cannot be read: stop, or leave it out", choices=("error", "skip"))
    max_bad_rows: int = _key(100, "with on_bad_row = skip: more of them than this stop the run")
    validation_path: tuple[str, ...] = _key((), "files or globs to validate on", path=True)
    validation_fraction: float = _key(0.0, "share of data.path kept for validation, chosen by a hash of the content")
    cache_folder: str = _key("", "where prepared data is kept; empty: ~/.cache/titan_mi100", path=True)
    workers: int = _key(0, "processes that tokenise; 0: one per core")


@dataclass(frozen=True)
class TrainingConfig:
    seq_len: int = _key(1024, "tokens per packed row (S)", low=2)
    local_batch_size: int = _key(1, "rows per data-parallel rank and forward (B_micro)", low=1)
    gradient_accumulation_steps: int = _key(0, "forwards per optimizer step (GA); 0: one, or by the token target")
    target_tokens_per_step: int = _key(0, "tokens per optimizer step over all ranks, from which GA is derived; 0: off")
    steps: int = _key(0, "optimizer steps in all; 0: by epochs")
    epochs: int = _key(0, "passes over the data; 0 with steps = 0: one")
    max_norm: float = _key(1.0, "clip the gradient's global norm to this; 0: off")
    max_nonfinite_steps: int = _key(
        3, "steps in a row without a finite loss and gradient norm, which are skipped, before the run ends", low=1
    )
    seed: int = _key(42, "seed of initial weights and row order")
    mixed_precision_param: str = _key(
        "bfloat16",
        "dtype of the computation; master weights are float32 (float64: they too, to compare layouts digit by digit)",
        choices=("bfloat16", "float32", "float64"),
    )
    mixed_precision_reduce: str = _key(
        "float32", "dtype in which gradients are reduced", choices=("float32", "bfloat16")
    )


@dataclass(frozen=True)
class ValidationConfig:
    freq: int = _key(0, "optimizer steps between validations; 0: only after the last step")


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = _key(2e-5, "peak learning rate of AdamW")
    beta1: float = _key(0.9, "decay of the first moment")
    beta2: float = _key(0.95, "decay of the second moment")
    eps: float = _key(1e-8, "added to the denominator")
    weight_decay: float = _key(0.1, "decoupled weight decay of matrices; norms have none")


@dataclass(frozen=True)
class LRSchedulerConfig:
    warmup_steps: int = _key(-1, "steps of linear warmup; -1: 3% of the steps", low=-1)
    decay_type: str = _key("cosine", "shape of the decay", choices=("cosine", "linear", "sqrt", "constant"))
    decay_ratio: float = _key(1.0, "share of the steps that decay, at the end; under 1: warmup-stable-decay (WSD)")
    min_lr_factor: float = _key(0.0, "final learning rate as a share of lr")


@dataclass(frozen=True)
class ParallelismConfig:
    data_parallel_shard_degree: int = _key(
        -1, "FSDP2 ranks that share weights; -1: all processes that the others leave", low=-1
    )
    data_parallel_replicate_degree: int = _key(
        1, "HSDP: replicas, each of data_parallel_shard_degree ranks; with 1 of them each: DDP", low=1
    )
    tensor_parallel_degree: int = _key(1, "ranks that share each layer's heads and matrices; inside a node", low=1)
    pipeline_parallel_degree: int = _key(
        1, "ranks that share the layers; a step's gradient_accumulation_steps forwards are its microbatches", low=1
    )
    pipeline_parallel_schedule: str = _key("1F1B", "order of forwards and backwards", choices=tuple(SCHEDULES))
    pipeline_parallel_layers_per_stage: tuple[int, ...] = _key(
        (), "e.g. [16, 12]; two stages per rank under Interleaved and ZB schedules; default: balanced by cost"
    )
    zero_stage: int = _key(
        -1,
        "what the FSDP2 ranks share: 3 weights, gradients and optimizer state; 2 all but weights, gathered once per "
        "step; 1 optimizer state only, gradients reduced once per step; 0 nothing (DDP); -1: 3, with a pipeline 1, "
        "with replicas of one rank 0",
        low=-1,
    )
    powersgd_rank: int = _key(0, "DDP: send gradient matrices as products of this rank (PowerSGD, lossy); 0: off")
    powersgd_start_step: int = _key(10, "first step that is compressed; those before are exact", low=2)
    powersgd_warm_start: bool = _key(True, "begin each compression from the step before's")
    powersgd_error_feedback: bool = _key(True, "add what a compression lost to the next step's gradient")


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    mode: str = _key(
        "selective",
        "recompute in backward: nothing, each block but its attention, or each block whole",
        choices=("none", "selective", "full"),
    )


@dataclass(frozen=True)
class CompileConfig:
    enable: bool = _key(False, "torch.compile each block, but for its attention")
    backend: str = _key("inductor", "torch.compile's backend", choices=("inductor", "aot_eager"))


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = _key(0, "train only adapters, W + alpha / rank * B A with A and B of this rank (LoRA); 0: all weights")
    alpha: float = _key(16.0, "scale of the adapters, times rank")
    dropout: float = _key(0.0, "share of the adapters' inputs that training leaves out")
    target_modules: tuple[str, ...] = _key(model_spec.LINEARS, "linear layers of each block that get an adapter")
    initial_load_path: str = _key("", "PEFT adapter folder to start from; empty: a fresh adapter", path=True)


@dataclass(frozen=True)
class CheckpointConfig:
    initial_load_path: str = _key(
        "",
        "weights to start from: an HF folder, a DCP folder such as another run's checkpoint/step-500, or a file of "
        "torch.save; empty: random weights",
        path=True,
    )
    interval: int = _key(500, "optimizer steps between checkpoints; 0: only after the last step")
    async_mode: str = _key(
        "disabled",
        "async: a thread writes a copy, in the host's memory, while training goes on",
        choices=("disabled", "async"),
    )
    keep_latest_k: int = _key(2, "verified checkpoints to keep; 0: all")
    keep_best: bool = _key(False, "also save after each validation with the lowest loss so far, and keep that one")
    allow_changed: tuple[str, ...] = _key(
        (), f"what may differ from the run so far: {', '.join(FINGERPRINTS)}; or a field, model.rope_theta"
    )
    export_hf: bool = _key(False, "after the last step, also write a verified HF folder, hf-step-N/ in the run folder")
    export_dtype: str = _key(
        "auto",
        "of the exported weights; auto: what config.json beside initial_load_path names, else float32",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    fresh: bool = _key(False, "start over in a new folder beside job.run_folder instead of resuming")


@dataclass(frozen=True)
class MetricsConfig:
    log_freq: int = _key(1, "optimizer steps between printed lines", low=1)
    enable_tensorboard: bool = _key(True, "write TensorBoard events")


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked. `spec`, `layout` and `batch` are what follows from them."""

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def spec(self) -> model_spec.ModelSpec:
        """The model's shape: the preset, or the `config.json` beside the weights that are loaded.

        Raises:
            UserError: unknown preset, unreadable config.json, or the two disagree.
        """
        flavor, folder = self.model.flavor, self.checkpoint.initial_load_path
        if flavor and flavor not in model_spec.PRESETS:
            raise UserError(f"[model] flavor = {flavor!r} is not known{did_you_mean(flavor, model_spec.PRESETS)}")
        if not flavor and not folder:
            raise UserError("[model] flavor is not set; name a preset, or an HF folder in checkpoint.initial_load_path")
        if not folder:
            return model_spec.PRESETS[flavor]
        folder = str(assets.folder_of(folder))
        if flavor and not os.path.exists(os.path.join(folder, assets.CONFIG)):
            return model_spec.PRESETS[flavor]
        spec = model_spec.read_hf_config(folder)
        if flavor and (differing := model_spec.differences(model_spec.PRESETS[flavor], spec)):
            raise UserError(
                f"[model] flavor = {flavor!r} is not the model in {folder} (preset, folder: {'; '.join(differing)}); "
                "leave flavor out to take the folder's"
            )
        return spec

    def tokenizer_path(self) -> str:
        load = self.checkpoint.initial_load_path
        return self.model.tokenizer_path or (str(assets.folder_of(load)) if load else "")

    def layout(self, world_size: int) -> Layout:
        p = self.parallelism
        return resolve_layout(
            world_size,
            dp_shard=p.data_parallel_shard_degree,
            dp_replicate=p.data_parallel_replicate_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            zero_stage=p.zero_stage,
        )

    def batch(self, world_size: int) -> Batch:
        t = self.training
        return resolve_batch(
            t.local_batch_size,
            t.gradient_accumulation_steps,
            t.target_tokens_per_step,
            t.seq_len,
            self.layout(world_size).dp_degree,
        )


def fingerprint(lora: LoRAConfig) -> dict[str, Any]:
    """What of the adapters a run stays, from start to end, as JSON has it."""
    targets = [name for name in model_spec.LINEARS if name in lora.target_modules]
    return {"rank": lora.rank, "alpha": lora.alpha, "target_modules": targets, "dropout": lora.dropout}


def check(config: Config, world_size: int | None) -> list[str]:
    """All that is wrong with the combination of settings, one message each; None: for any number of processes."""
    errors = _check_paths(config)
    training, data, schedule = config.training, config.data, config.lr_scheduler
    if training.steps and training.epochs:
        errors.append("[training] steps and epochs are both set; set one of them to 0")
    if training.gradient_accumulation_steps and training.target_tokens_per_step:
        errors.append("[training] gradient_accumulation_steps and target_tokens_per_step are both set; set one to 0")
    if training.steps and schedule.warmup_steps > training.steps:
        errors.append(
            f"[lr_scheduler] warmup_steps = {schedule.warmup_steps} is more than [training] steps = "
            f"{training.steps}; lower it, or use -1 for 3%"
        )
    if config.optimizer.eps == 0:
        errors.append("[optimizer] eps = 0 divides by zero for rows that were never seen; the usual is 1e-8")
    for section, key in (
        ("lr_scheduler", "decay_ratio"),
        ("lr_scheduler", "min_lr_factor"),
        ("optimizer", "beta1"),
        ("optimizer", "beta2"),
        ("data", "validation_fraction"),
        ("lora", "dropout"),
    ):
        value = getattr(getattr(config, section), key)
        below_one = key not in ("decay_ratio", "min_lr_factor")
        if value > 1 or (below_one and value == 1):
            errors.append(f"[{section}] {key} = {value} must be {'less than' if below_one else 'at most'} 1")
    errors += _check_data(data) + _check_lora(config.lora)
    if config.validation.freq and not (data.validation_path or data.validation_fraction):
        errors.append(
            f"[validation] freq = {config.validation.freq} needs [data] validation_path or validation_fraction"
        )
    if config.checkpoint.keep_best and not (data.validation_path or data.validation_fraction):
        errors.append("[checkpoint] keep_best needs [data] validation_path or validation_fraction")
    known = [*FINGERPRINTS, *(f"model.{f.name}" for f in fields(model_spec.ModelSpec))]
    known += [f"lora.{name}" for name in fingerprint(config.lora)]
    for name in config.checkpoint.allow_changed:
        if name not in known:
            errors.append(
                f"[checkpoint] allow_changed names {name!r}, which is none of {', '.join(FINGERPRINTS)}"
                f"{did_you_mean(name, known)}"
            )
    if config.checkpoint.fresh and not config.job.run_folder:
        errors.append("[checkpoint] fresh needs job.run_folder: a run without a name always starts over")
    if config.parallelism.zero_stage > 3:
        errors.append(f"[parallelism] zero_stage = {config.parallelism.zero_stage} must be -1, 0, 1, 2 or 3")
    elif world_size is not None:
        errors += _check_layout(config, world_size)
    try:
        spec = config.spec()
        errors += _check_model_split(config, spec)
        if training.seq_len > spec.max_position_embeddings:
            errors.append(
                f"[training] seq_len = {training.seq_len} is more than the model's max_position_embeddings = "
                f"{spec.max_position_embeddings}"
            )
    except UserError as error:
        errors.extend(str(error).splitlines())
    return errors


def _check_layout(config: Config, world_size: int) -> list[str]:
    """What only the number of processes decides."""
    p, training, errors = config.parallelism, config.training, []
    accumulation = 0 if training.target_tokens_per_step else max(1, training.gradient_accumulation_steps)
    pp, is_ddp = p.pipeline_parallel_degree, p.zero_stage == 0
    try:
        layout = config.layout(world_size)
        is_ddp = layout.zero_stage == 0
        accumulation = config.batch(world_size).gradient_accumulation_steps
    except ValueError as error:
        errors.append(str(error))
    if p.powersgd_rank and not is_ddp:
        errors.append(f"[parallelism] powersgd_rank = {p.powersgd_rank} needs DDP; set zero_stage = 0")
    if p.powersgd_rank and config.training.mixed_precision_reduce == "bfloat16":
        errors.append(
            f"[parallelism] powersgd_rank = {p.powersgd_rank} compresses float32; set [training] "
            'mixed_precision_reduce = "float32"'
        )
    if pp > 1 and accumulation and (refused := check_schedule(p.pipeline_parallel_schedule, pp, accumulation)):
        errors.append(refused)
    return errors


def _check_model_split(config: Config, spec: model_spec.ModelSpec) -> list[str]:
    """What of the model does not divide over tensor-parallel ranks or pipeline stages."""
    p, errors = config.parallelism, []
    tp, pp = p.tensor_parallel_degree, p.pipeline_parallel_degree
    named = {
        name: getattr(spec, name)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    }
    odd = [f"{name} = {n}" for name, n in {**named, "seq_len": config.training.seq_len}.items() if n % tp]
    if odd:
        fit = [str(n) for n in range(1, tp + 1) if not any(value % n for value in named.values())]
        errors.append(
            f"[parallelism] tensor_parallel_degree = {tp} does not divide {', '.join(odd)}; this model can be split "
            f"over {', '.join(fit)}, and seq_len must be a multiple"
        )
    if pp == 1:
        return errors
    schedule, counts = SCHEDULES[p.pipeline_parallel_schedule], p.pipeline_parallel_layers_per_stage
    layers, stages = spec.num_hidden_layers, pp * schedule.stages_per_rank
    if counts:
        fits = len(counts) == stages or (schedule.looped and len(counts) > stages and len(counts) % pp == 0)
        if not fits or sum(counts) != layers or 0 in counts:
            errors.append(
                f"[parallelism] pipeline_parallel_layers_per_stage = {list(counts)} must be {stages} numbers "
                f"{f'or more, a multiple of {pp}, ' if schedule.looped else ''}above 0 that sum to the model's "
                f"{layers} layers"
            )
    elif stages > layers:
        errors.append(
            f"[parallelism] pipeline_parallel_degree = {pp} makes {stages} stages of {layers} layers; lower it"
        )
    return errors


def _check_paths(config: Config) -> list[str]:
    errors = []
    if not config.data.path:
        errors.append("[data] path is not set; name a file or a glob, or several")
    for key in ("path", "validation_path"):
        for pattern in getattr(config.data, key):
            errors += [f"[data] {key}: {problem}" for problem in matching_files(pattern)[1]]
    template = config.model.chat_template
    if template and not os.path.isfile(template):
        errors.append(f"[model] chat_template = {template!r} is not a file")
    load = config.checkpoint.initial_load_path
    if load and not os.path.exists(load):
        errors.append(f"[checkpoint] initial_load_path = {load!r} is no folder and no file")
    path = config.tokenizer_path()
    key = "[model] tokenizer_path" if config.model.tokenizer_path else "[checkpoint] initial_load_path"
    known = ("tokenizer.json", "vocab.json", "*.tiktoken", "*.model")
    if not path:
        errors.append("[model] tokenizer_path is not set, nor is checkpoint.initial_load_path; name an HF folder")
    elif not os.path.exists(path):
        errors.append(f"{key} = {path!r} does not exist")
    elif not os.path.isfile(path) and not any(glob.glob(os.path.join(glob.escape(path), name)) for name in known):
        errors.append(
            f"{key} = {path!r} holds neither tokenizer.json nor vocab.json with merges.txt, a .tiktoken or a .model "
            "file; set model.tokenizer_path to a folder that does, or to such a file"
        )
    return errors


def _check_data(data: DataConfig) -> list[str]:
    errors = []
    if bool(data.prompt_column) != bool(data.response_column):
        errors.append("[data] prompt_column and response_column go together; set both or neither")
    if data.prompt_column and data.format not in ("auto", "columns"):
        errors.append(f'[data] prompt_column is set, but format = "{data.format}"; remove one of them')
    if data.system_column and not data.prompt_column:
        errors.append("[data] system_column needs prompt_column and response_column")
    for key in ("weights", "repeats"):
        values = getattr(data, key)
        if values and len(values) != len(data.path):
            errors.append(f"[data] {key} has {len(values)} values for {len(data.path)} paths; give one for each path")
        if any(value <= 0 for value in values):
            errors.append(f"[data] {key} = {list(values)} must all be above 0; leave a path out instead")
    if data.weights and data.repeats:
        errors.append("[data] weights and repeats are both set; keep one")
    if data.validation_path and data.validation_fraction:
        errors.append("[data] validation_path and validation_fraction are both set; keep one")
    return errors


def _check_lora(lora: LoRAConfig) -> list[str]:
    errors = []
    for name in lora.target_modules:
        if name not in model_spec.LINEARS:
            errors.append(
                f"[lora] target_modules names {name!r}, which is none of {', '.join(model_spec.LINEARS)}"
                f"{did_you_mean(name, model_spec.LINEARS)}"
            )
    if lora.rank and not lora.target_modules:
        errors.append(f"[lora] target_modules is empty, but rank = {lora.rank}; name some, or set rank to 0")
    if lora.rank and not lora.alpha:
        errors.append("[lora] alpha = 0 switches the adapters off: nothing would be learned; the usual is 2 x rank")
    if lora.initial_load_path and not lora.rank:
        errors.append("[lora] initial_load_path needs rank; set it to the adapter's")
    if lora.initial_load_path and not os.path.isdir(lora.initial_load_path):
        errors.append(f"[lora] initial_load_path = {lora.initial_load_path!r} is not a folder")
    return errors
