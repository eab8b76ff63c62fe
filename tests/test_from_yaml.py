"""`titan-mi100 config new --from X.yaml`: configs of axolotl, LLaMA-Factory and TRL become the TOML that a user who
knows both would write, and what cannot be carried over is listed.
"""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.data.survey import Survey, survey
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.tools import new_config as new
from titan_mi100.workshop.other_trainers import meaning

pytest.importorskip("yaml")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command for a YAML in a folder with a model and data, of 640 documents of 64 tokens each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["titan-mi100 config new"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    counted = Survey(np.full(640, 64), np.linspace(0, 1, 640, endpoint=False), 1.0, 0)
    monkeypatch.setattr(new, "survey", lambda *_: counted)
    model(tmp_path / "Qwen3-0.6B")
    for name, row in {"train": {"messages": []}, "alpaca": {"instruction": "a"}, "sums": {"text": "1"}}.items():
        Path(f"{name}.jsonl").write_text(json.dumps(row))
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"}))

    def command(text: str | bytes, *options: str) -> tuple[int, str, str]:
        Path("x.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        usual = {"--gpus": "2", "--memory": "32GB", "--output": "x.toml"}
        given = [word for name, value in usual.items() if name not in options for word in (name, value)]
        code = new.main(["--from", "x.yaml", *given, *options])
        found = capsys.readouterr()
        return code, found.out, found.err

    return command


def model(folder: Path) -> None:
    shutil.copytree(REPO / "train_configs/debug/tokenizer", folder)
    (folder / "config.json").write_text(json.dumps(to_hf_config(PRESETS["0.6B"])))
    (folder / "model.safetensors").write_bytes(b"")


def read(file: str) -> Config:
    config = load_config(["--job.config_file", file], 2, with_files=False)
    return replace(config, job=replace(config.job, config_file=""), notes=())


def not_carried(out: str) -> dict[str, str]:
    """Their key -> its line and the reason."""
    found = re.findall(
        r"^  x\.yaml:(?:(\d+): | )?([\w\[\].]+) (?:= (?:{.*}|[^{].*?): |is refused: )(.*)$", out, re.MULTILINE
    )
    return {name: f"{line} {reason}" for line, name, reason in found}


AXOLOTL_QLORA = (
    """
base_model: Qwen/Qwen3-0.6B
load_in_8bit: false
load_in_4bit: true
chat_template: chatml
datasets:
  - path: train.jsonl
    type: chat_template
    split: train[:50%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
val_set_size: 0.05
output_dir: ./out
sequence_len: 2048
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
lora_target_linear: true
wandb_project: sums
wandb_entity:
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.01
fsdp: [full_shard, auto_wrap]
special_tokens:
""",
    # a step: 2 cards x 2 rows; an epoch: 608 documents in 19 rows, 5 steps
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
interval = 5
[job]
run_folder = "out"
[data]
path = "train.jsonl"
validation_fraction = 0.05
[training]
seq_len = 2048
local_batch_size = 1
gradient_accumulation_steps = 2
epochs = 3
[validation]
freq = 1
[optimizer]
lr = 2e-4
weight_decay = 0.01
beta2 = 0.999
state = "8bit"
[lr_scheduler]
warmup_steps = 2
[lora]
rank = 32
alpha = 64.0
dropout = 0.05
base = "nf4"
[parallelism]
zero_stage = 3
[metrics]
enable_wandb = true
""",
    {
        "chat_template": "5 the chat template is the model folder's; model.chat_template names another Jinja file",
        "datasets[0].split": "6 no setting for it; files are read whole, and the form of their rows is recognised",
        "wandb_project": "22 W&B is on; the environment variable WANDB_PROJECT names the project",
        "fsdp": "38 FSDP2 is the default; parallelism.zero_stage = 3 is full_shard, 2 shard_grad_op; "
        'memory.offload = "weights" is CPU offload',
    },
)
ALPACA = 'its own prompt, "Below is an instruction ...", is not written: rows have the model\'s chat template'
AXOLOTL_FULL = (
    """
base_model: Qwen3-0.6B
datasets:
  - {path: json, data_files: [alpaca.jsonl], ds_type: json, type: alpaca}
test_datasets: [{path: train.jsonl, type: alpaca, split: train}]
sequence_len: 512
sample_packing: false
excess_length_strategy: truncate
lora_r: 16
lora_target_linear: true
micro_batch_size: 4
gradient_accumulation_steps: 4
num_epochs: 2.5
optimizer: adamw_torch_fused
adam_beta1: 0.8
adam_beta2: 0.98
adam_epsilon: 1e-7
max_grad_norm: 0.5
lr_scheduler: constant
learning_rate: 0.00001
warmup_steps: 10
bf16: false
fp16: true
seed: 7
train_on_inputs: true
eval_strategy: steps
eval_steps: 20
save_steps: 0.5
save_total_limit: 3
tensor_parallel_size: 4
early_stopping_patience: 2
xformers_attention: true
deepspeed: deepspeed_configs/zero3.json
made_up: {a: 1}
eval_sample_packing: true
""",
    # a step: 2 cards x 16 examples of 64 tokens; an epoch: 80 rows, 20 steps
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
interval = 30
keep_latest_k = 3
[data]
path = "alpaca.jsonl"
format = "alpaca"
validation_path = "train.jsonl"
loss = "all"
overlong = "truncate"
[training]
seq_len = 512
local_batch_size = 1
target_tokens_per_step = 2048
epochs = 3
max_norm = 0.5
seed = 7
mixed_precision_param = "float16"
[validation]
freq = 20
patience = 2
[optimizer]
lr = 1e-5
weight_decay = 0.0
beta1 = 0.8
beta2 = 0.98
eps = 1e-7
[lr_scheduler]
decay_type = "constant"
""",
    {
        "datasets[0].type": "3 " + ALPACA,
        "test_datasets[0].type": "5 " + ALPACA,
        "lora_r": "9 all weights are trained: adapter asks for no adapters",
        "lora_target_linear": "10 all weights are trained: adapter asks for no adapters",
        "warmup_steps": "21 the schedule `constant` has no warmup there",
        "tensor_parallel_size": "30 parallelism.tensor_parallel_degree = 4 does not divide the 2 started processes; "
        "start with ./run_train.sh --nproc_per_node 4 or a multiple of it, or lower a degree",
        "xformers_attention": '32 model.attention_backend = "auto" takes the fastest that works here',
        "deepspeed": "33 FSDP2 shards the run; parallelism.zero_stage is 1, 2 or 3",
        "made_up": "34 not a key that is known here",
    },
)
AXOLOTL_DPO = (
    """
base_model: Qwen3-0.6B
rl: simpo
rl_beta: 2.5
datasets: [{path: pairs.jsonl, type: chatml.intel}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.1
sequence_len: 512
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 5.0e-7
lr_scheduler: cosine_with_restarts
cosine_min_lr_ratio: 0.1
report_to: tensorboard
""",
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
[data]
path = "pairs.jsonl"
[training]
seq_len = 512
local_batch_size = 2
gradient_accumulation_steps = 2
epochs = 1
[optimizer]
lr = 5e-7
weight_decay = 0.0
beta2 = 0.999
[lr_scheduler]
min_lr_factor = 0.1
[lora]
rank = 8
alpha = 16.0
target_modules = ["q_proj", "v_proj"]
[objective]
name = "preference"
loss = "simpo"
beta = 2.5
gamma = 0.5
""",
    {
        "datasets[0].type": "5 no setting for it; files are read whole, and the form of their rows is recognised",
        "lora_dropout": "9 lora.dropout = 0.1 disturbs the sums of log p that are compared; set it to 0",
    },
)
FACTORY_LORA = (
    """
### model
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
quantization_bit: 4
### dataset
dataset: sums,alpaca_en
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
### output
output_dir: saves/mine
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
""",
    """
[checkpoint]
initial_load_path = "Qwen3-4B"
interval = 500
fresh = true
[job]
run_folder = "saves/mine"
[data]
path = ["sums", "alpaca_en"]
workers = 16
overlong = "truncate"
max_cut_share = 0.5
[training]
seq_len = 2048
local_batch_size = 1
gradient_accumulation_steps = 8
epochs = 3
[optimizer]
lr = 1e-4
weight_decay = 0.0
beta2 = 0.999
[lora]
rank = 8
alpha = 16.0
base = "nf4"
[metrics]
log_freq = 10
enable_tensorboard = false
""",
    {
        "trust_remote_code": "4 nothing in a model folder is ever run",
        "do_train": "7 the command trains, and validates where there is validation data",
        "template": "14 the chat template is the model folder's; model.chat_template names another Jinja file",
        "max_samples": "16 name a smaller file in data.path, or set training.steps",
        "plot_loss": "22 TensorBoard draws the curves",
        "warmup_ratio": "31 lr_scheduler.warmup_steps counts steps, which are known when model and data are here",
        "ddp_timeout": "33 watchdog.seconds limits a step, watchdog.start_seconds the start",
    },
)
FACTORY_FULL = (
    """
model_name_or_path: Qwen3-0.6B
stage: sft
finetuning_type: full
dataset: train.jsonl
template: qwen3
cutoff_len: 4096
neat_packing: true
val_size: 0.2
mask_history: true
output_dir: saves/full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 2
lr_scheduler_type: linear
warmup_ratio: 0.4
weight_decay: 0.1
bf16: true
pure_bf16: true
flash_attn: fa2
disable_gradient_checkpointing: true
eval_strategy: steps
eval_steps: 2
save_strategy: no
report_to: [wandb, swanlab]
use_galore: false
neftune_noise_alpha: 5
""",
    # a step: 2 cards x 2 rows; an epoch: 512 documents in 8 rows, 2 steps
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
interval = 0
[job]
run_folder = "saves/full"
[data]
path = "train.jsonl"
validation_fraction = 0.2
overlong = "truncate"
max_cut_share = 0.5
loss = "last"
[training]
seq_len = 4096
local_batch_size = 1
gradient_accumulation_steps = 2
epochs = 2
[validation]
freq = 2
[optimizer]
lr = 1e-5
beta2 = 0.999
master = "bf16_sr"
[lr_scheduler]
decay_type = "linear"
warmup_steps = 2
[activation_checkpoint]
mode = "none"
[metrics]
enable_wandb = true
""",
    {
        "template": "6 the chat template is the model folder's; model.chat_template names another Jinja file",
        "report_to": "26 metrics.enable_tensorboard, metrics.enable_wandb, metrics.report_to",
        "neftune_noise_alpha": "28 no noise is added to embeddings",
    },
)
FACTORY_DPO = (
    """
model_name_or_path: Qwen3-0.6B
stage: dpo
finetuning_type: lora
lora_target: q_proj,v_proj
lora_alpha: 32
pref_beta: 0.2
pref_loss: sigmoid
pref_ftx: 0.5
dpo_label_smoothing: 0.2
dataset: pairs.jsonl
template: qwen3
cutoff_len: 1024
packing: true
per_device_train_batch_size: 2
learning_rate: 5.0e-6
max_steps: 40
num_train_epochs: 3
lr_scheduler_type: cosine
warmup_ratio: 0.1
""",
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
[data]
path = "pairs.jsonl"
[training]
seq_len = 1024
local_batch_size = 2
gradient_accumulation_steps = 1
steps = 40
[optimizer]
lr = 5e-6
weight_decay = 0.0
beta2 = 0.999
[lr_scheduler]
warmup_steps = 4
[lora]
rank = 8
alpha = 32.0
target_modules = ["q_proj", "v_proj"]
[objective]
name = "preference"
loss = "cdpo"
beta = 0.2
label_smoothing = 0.2
sft_weight = 0.5
""",
    {
        "template": "12 the chat template is the model folder's; model.chat_template names another Jinja file",
        "num_train_epochs": "18 max_steps counts, as there",
    },
)
TRL_SHORT = (
    """
# the environment is set by TRL itself
env:
  CUDA_VISIBLE_DEVICES: 0
model_name_or_path:
  Qwen3-0.6B
dataset_name:
  somebody/sums
report_to:
  none
learning_rate:
  0.0001
lr_scheduler_type:
  cosine
save_strategy: epoch
save_steps: 50
""",
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
interval = 50
[data]
path = "sums/data/train-*.parquet"
overlong = "truncate"
max_cut_share = 0.5
loss = "all"
[training]
seq_len = 1024
local_batch_size = 8
gradient_accumulation_steps = 1
epochs = 3
[optimizer]
lr = 1e-4
weight_decay = 0.0
beta2 = 0.999
[lr_scheduler]
warmup_steps = 0
[metrics]
enable_tensorboard = false
""",
    {
        "env": "3 set the variables in the shell",
        "save_strategy": "15 checkpoint.interval is set by save_steps already",
    },
)
TRL_QLORA = (
    """
model_name_or_path: Qwen3-0.6B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
use_peft: true
load_in_4bit: true
lora_r: 64
lora_alpha: 16
lora_target_modules: all-linear
dataset_name: sums.jsonl
max_length: 1024
packing: true
assistant_only_loss: false
do_eval: true
eval_strategy: epoch
gradient_accumulation_steps: 4
per_device_train_batch_size: 1
gradient_checkpointing: false
learning_rate: 2.0e-04
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.2, num_cycles: 1}
logging_steps: 5
max_steps: -1
num_train_epochs: 1
output_dir: data/out
save_strategy: steps
save_steps: 100
seed: 42
data_seed: 43
warmup_ratio: 0.03
push_to_hub: false
report_to: [tensorboard, wandb]
""",
    # a step: 2 cards x 4 rows; an epoch: 608 documents in 38 rows, 5 steps
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
interval = 100
[job]
run_folder = "data/out"
[data]
path = "sums.jsonl"
validation_fraction = 0.05
overlong = "truncate"
max_cut_share = 0.5
loss = "all"
[training]
seq_len = 1024
local_batch_size = 1
gradient_accumulation_steps = 4
epochs = 1
[validation]
freq = 5
[optimizer]
lr = 2e-4
weight_decay = 0.0
beta2 = 0.999
[lr_scheduler]
min_lr_factor = 0.2
[activation_checkpoint]
mode = "none"
[lora]
rank = 64
alpha = 16.0
dropout = 0.05
base = "nf4"
[metrics]
log_freq = 5
enable_wandb = true
""",
    {
        "model_revision": "3 hf download --revision REVISION fetches it",
        "torch_dtype": "4 weights are kept in optimizer.master, fp32 by default; the computation is in "
        "training.mixed_precision_param, bfloat16 by default",
        "do_eval": "15 the command trains, and validates where there is validation data",
        "lr_scheduler_kwargs.num_cycles": "22 not a key that is known here",
        "data_seed": "30 training.seed is set by seed already",
    },
)
TRL_FULL = (
    """
defaults: &defaults
  max_grad_norm: 0.3
  weight_decay: 0.02
<<: *defaults
model_name_or_path: Qwen3-0.6B
dataset_name: train.jsonl
assistant_only_loss: true
max_length: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1e-5
lr_scheduler_type: warmup_stable_decay
max_steps: 50
warmup_steps: 5
bf16: false
optim: adafactor
use_peft: false
lora_r: 8
eval_strategy: "no"
save_steps: 0.2
adam_beta2: 2
chat_template_path: mine.jinja
""",
    # a step: 2 cards x 8 examples of 64 tokens; rows of 512, so that each card has one
    """
[checkpoint]
initial_load_path = "Qwen3-0.6B"
interval = 10
[model]
chat_template = "mine.jinja"
[data]
path = "train.jsonl"
overlong = "truncate"
max_cut_share = 0.5
[training]
seq_len = 512
local_batch_size = 1
target_tokens_per_step = 1024
steps = 50
max_norm = 0.3
mixed_precision_param = "float32"
[optimizer]
lr = 1e-5
weight_decay = 0.02
[lr_scheduler]
decay_type = "linear"
decay_ratio = 0.1
warmup_steps = 5
""",
    {
        "defaults": "2 not a key that is known here",
        "optim": "17 the optimizer is AdamW; optimizer.state has fp32, bf16 and 8bit",
        "lora_r": "19 all weights are trained: use_peft asks for no adapters",
        "adam_beta2": "22 optimizer.beta2 = '2' must be a finite number of at least 0, below 1",
    },
)
FILES = {name: case for name, case in globals().items() if re.match("(AXOLOTL|FACTORY|TRL)_", name)}


@pytest.mark.parametrize("name", FILES)
def test_a_yaml_becomes_the_config_that_was_written_by_hand(name: str, run: Run) -> None:
    text, by_hand, expected = FILES[name]
    code, out, err = run(text)
    assert (code, err) == (0, "")
    if not Path("Qwen3-4B").exists():  # it is fetched only now
        model(Path("Qwen3-4B"))
    Path("hand.toml").write_text(f'base = "finetune.toml"\n{by_hand}')
    hand = read("hand.toml")
    folder = str(Path(hand.job.run_folder or "outputs/x").absolute())
    saved = replace(hand.checkpoint, export_hf=True, fresh=False)  # the same command resumes
    assert read("x.toml") == replace(hand, job=replace(hand.job, run_folder=folder), checkpoint=saved)
    assert not_carried(out) == expected
    for word in ("inspect", "plan", "train"):
        assert f" {word} --job.config_file x.toml" in out


def test_model_and_data_of_the_hub_are_fetched_first_and_options_take_their_place(run: Run) -> None:
    text, _, _ = FACTORY_LORA
    code, out, _ = run(text)
    assert code == 0 and "\n  hf download Qwen/Qwen3-4B --local-dir Qwen3-4B\n" in out.partition("\nnext:")[2]
    assert "dataset: 'sums': no such file; name the JSONL, JSON or parquet files with --data" in out
    assert "] # dataset; not here yet" in Path("x.toml").read_text().replace("  #", " #")
    assert "the memory is not predicted" in out and "WARNING a step: 16 examples there" in out
    code, out, _ = run(text, "--output", "y.toml", "--model", "Qwen3-0.6B", "--data", "alpaca.jsonl")
    config = read("y.toml")
    assert code == 0 and "hf download" not in out and "no such file" not in out and "predicted peak" in out
    assert config.data.path == (str(Path("alpaca.jsonl").absolute()),)
    assert config.checkpoint.initial_load_path == str(Path("Qwen3-0.6B").absolute())
    assert (
        config.lr_scheduler.warmup_steps == 12
    )  # 16 examples are 1,024 tokens; an epoch 40 steps of a row on each card
    assert not_carried(out)["model_name_or_path"] == "3 checkpoint.initial_load_path is set by --model already"
    code, out, _ = run("stage: pt\nmodel_name_or_path: Qwen3-0.6B\ndataset: sums.jsonl\n", "--output", "p.toml")
    assert code == 0 and "a step: 16 packed rows of 2,048 tokens, as there" in out  # pretraining packs by itself
    assert read("p.toml").data.format == "text" and read("p.toml").lora.alpha == 16.0
    code, out, _ = run(TRL_SHORT[0], "--output", "z.toml")
    command = "hf download somebody/sums --repo-type dataset --local-dir sums"
    assert code == 0 and f"of the hub, fetch it: {command}; then name its JSONL" in out and f"\n  {command}\n" in out


PT = "stage: pt\nmodel_name_or_path: Qwen3-0.6B\ndataset: sums.jsonl\n"
COMPLETION = "base_model: Qwen3-0.6B\ndatasets: [{path: sums.jsonl, type: completion}]\n"
TEXTS = "model_name_or_path: Qwen3-0.6B\ndataset_name: sums.jsonl\n"


@pytest.mark.parametrize(
    ("text", "overlong", "most"),
    [
        (PT, "split", 1.0),
        (COMPLETION, "split", 1.0),
        (COMPLETION + "excess_length_strategy: truncate\n", "truncate", 1.0),  # as the user says
        (PT.replace("pt", "sft"), "truncate", 0.5),
        (TEXTS, "truncate", 0.5),
        (TEXTS + "packing: true\npacking_strategy: wrapped\n", "split", 1.0),
        (COMPLETION.replace("completion", "chat_template"), "drop", 1.0),
    ],
)
def test_long_texts_of_pretraining_are_split_and_a_default_that_cuts_has_a_limit(
    text: str, overlong: str, most: float, run: Run
) -> None:
    code, out, err = run(text)
    assert code == 0, out + err
    assert (read("x.toml").data.overlong, read("x.toml").data.max_cut_share) == (overlong, most)


def test_a_config_that_could_not_start_is_not_written_and_bad_rows_that_were_counted_are_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Survey(np.full(64, 64), np.linspace(0, 1, 64, endpoint=False), 1.0, 3)
    monkeypatch.setattr(new, "survey", lambda *_: counted)
    code, out, _ = run(AXOLOTL_QLORA[0].replace("warmup_ratio: 0.1", "warmup_steps: 100"))
    assert code == 0 and read("x.toml").lr_scheduler.warmup_steps == -1
    assert not_carried(out)["warmup_steps"].endswith("the run has 3 steps, so the warmup is 3% of them")
    assert "WARNING refused: 3 rows; titan-mi100 inspect names them" in out
    assert Path("x.toml").read_text().count(f'run_folder = "{Path("out").absolute()}"') == 1  # output_dir
    Path("out").mkdir()
    code, out, err = run(AXOLOTL_QLORA[0], "--output", "y.toml")
    assert code == 2 and f"{Path('out').absolute()}: exists already" in err and not Path("y.toml").exists()


def test_aliases_are_followed_and_what_differs_is_listed(run: Run) -> None:
    text = "a: &a {max_grad_norm: 0.3}\n<<: *a\nb: *a\nmodel_name_or_path: &m Qwen3-0.6B\ntemplate: *m\n"
    text += "dataset: train.jsonl\nnum_train_epochs: 0.5\neval_strategy: steps\non: 1\n"
    text += "lr_scheduler_type: cosine_with_restarts\nlora_target: all\n"
    code, out, _ = run(text, "--trainer", "llama-factory")
    assert code == 0 and read("x.toml").training.max_norm == 0.3 and read("x.toml").training.epochs == 1
    for line in (
        "num_train_epochs = 0.5: 1 whole epochs here",
        "eval_strategy: no data for it are named: 5% of the rows are held out",
        "  x.yaml:9: on = 1: not a key that is known here",
        "lr_scheduler_type = cosine_with_restarts: lr_scheduler.decay_type has cosine, linear, sqrt and constant, none "
        "with restarts; decay_ratio below 1 is warmup-stable-decay",
    ):
        assert f"\n{line}\n" in out
    assert '\ntarget_modules = ["all-linear"]  # lora_target\n' in Path("x.toml").read_text()
    code, out, _ = run("base_model: meta-llama/Llama-3.2-1B\n", "--data", "train.jsonl", "--output", "y.toml")
    assert code == 0 and "\nbase_model: only Qwen3 and Qwen3.5 are trained here" in out
    Path("train.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    assert run(TRL, "--output", "z.toml")[0] == 0 and read("z.toml").data.loss == "assistant"


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 10}]\n" for a, b in ("ab", "bc", "cd", "de"))
MERGES = re.sub(r"\[x.*\]", "{x: 1}", BOMB).replace("[*", "{<<: [*").replace(",]", "]}")
TRL = "model_name_or_path: Qwen3-0.6B\ndataset_name: train.jsonl\n"


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a: 1\nb: !!python/object/apply:os.mkdir [made]\n",
            "",
            "x.yaml:2: b: the tag !!python/object/apply:os.mkdir is not followed",
        ),
        (
            f"{TRL}? !!python/name:os.mkdir\n: 1\n",
            "",
            "x.yaml:3: a key of the file: the tag !!python/name:os.mkdir is not followed",
        ),
        (BOMB, "", "x.yaml: has more than 10,000 values, with those that its aliases repeat"),
        (MERGES, "", "x.yaml: has more than 10,000 values, with those that its aliases repeat"),
        ("a: &a [*a]", "", "x.yaml: cannot be read as YAML: maximum recursion depth exceeded"),
        (f"a: {'[' * 2000}", "", "x.yaml: cannot be read as YAML: maximum recursion depth exceeded"),
        (f"a: {'x' * 200_000}", "", "x.yaml: is larger than 131,072 bytes, which no config is"),
        (f"b: 1\na: {'9' * 5000}", "", f"x.yaml:2: a = {'9' * 60}... cannot be read as !!int: Exceeds the limit"),
        (f"a: 0x{'f' * 5000}", "", f"x.yaml:1: a = 0x{'f' * 58}... cannot be read as !!int: Exceeds the limit"),
        (f"a: 0x{'f' * 1000}", "", "x.yaml:1: a is a number that no setting has"),
        (f"a: 1{':59' * 300}.5", "", f"x.yaml:1: a = 1{':59' * 19}:5... cannot be read as !!float: "),
        ("a: 2026-02-30", "", "x.yaml:1: a = 2026-02-30 cannot be read as !!timestamp: day is out of range for month;"),
        ("a: [1, !!timestamp x]", "", "x.yaml:1: a[1] = x cannot be read as !!timestamp: "),
        ("a: !!bool x", "", "x.yaml:1: a = x cannot be read as !!bool: 'x'"),
        ('a: "\\ud800"', "", "x.yaml:1: a is not UTF-8"),
        ("a: \x01", "", "x.yaml: cannot be read as YAML: unacceptable character #x0001: special characters are not"),
        (b"a: \xff", "", "x.yaml: cannot be read as YAML: 'utf-8' codec can't decode"),
        ("- a\n- b\n", "", "x.yaml:1: has no keys at its top level"),
        ("", "", "x.yaml:1: has no keys at its top level"),
        ("a: 1\nb: 2\na: 3\n", "", "x.yaml:3: a is given twice"),
        ("a:\n\t- 1\n", "", "x.yaml:2: cannot be read as YAML: found character"),
        ("a: 1\n---\nb: 1\n", "", "x.yaml:2: cannot be read as YAML: but found another document"),
        (
            "learning_rate: 1\n",
            "",
            "x.yaml: has no key that tells its trainer; name it with --trainer: axolotl, LLaMA-Fac",
        ),
        (
            f"{TRL}stage: sft\n",
            "",
            "x.yaml: has keys of LLaMA-Factory and of TRL; name it with --trainer: axolotl, LLaMA-F",
        ),
        (TRL, "--trainer unsloth", "--trainer unsloth: is none of axolotl, LLaMA-Factory, TRL"),
        (TRL, "--method lora", "--method: the YAML of --from says what is trained; leave --method out"),
        (
            "base_model: gone/with/it\ndatasets: [{path: a}]\n",
            "",
            "x.yaml:1: base_model = 'gone/with/it': no such folder",
        ),
        ("dataset_name: train.jsonl\n", "", "x.yaml: names no model; give it with --model"),
        ("base_model: Qwen3-0.6B\n", "", "x.yaml: names no data; give it with --data"),
        ("base_model: Qwen3-0.6B\nrl: grpo\n", "", "x.yaml:2: rl = 'grpo': there is no reinforcement learning"),
        ("stage: ppo\n", "", "x.yaml:1: stage = 'ppo': there is no reinforcement learning"),
        ("finetuning_type: freeze\n", "", "x.yaml:1: finetuning_type = 'freeze': a rank above 0 trains adapters"),
        (TRL, "--from y.yaml", "--from is given twice; keep one of them"),
    ],
)
def test_what_cannot_be_read_or_is_not_known_is_one_message_and_no_config(
    text: str | bytes, options: str, said: str, run: Run
) -> None:
    code, _, err = run(text, *options.split())
    assert code == 2 and err.startswith(f"ERROR {said}") and err.count("\n") == 1, err
    assert not Path("x.toml").exists() and not Path("made").exists()


def test_without_pyyaml_or_a_yaml_one_line_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new.main(["--trainer", "TRL"]) == 2
    assert capsys.readouterr().err == "ERROR --trainer is for --from X.yaml; leave it out\n"
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert run(TRL)[::2] == (2, "ERROR x.yaml: YAML needs PyYAML: pip install pyyaml (it is the extra yaml)\n")


def test_settings_change_until_a_run_fits_but_not_those_of_the_yaml(run: Run) -> None:
    code, out, _ = run(TRL, "--memory", "6GB")
    assert code == 0 and "changed so that it fits: optimizer state in 8 bits" in out
    assert read("x.toml").optimizer.state == "8bit" and read("x.toml").optimizer.lr == 2e-5
    code, out, _ = run(f"{TRL}optim: adamw_torch\n", "--memory", "1GB", "--output", "y.toml")
    assert code == 0 and "WARNING that is too much; " in out and read("y.toml").optimizer.state == "fp32"


def test_the_tokens_of_real_data_are_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "survey", survey)
    row = {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}
    Path("train.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    code, out, _ = run(f"{TRL}warmup_ratio: 0.5\nmax_length: 64\npacking: true\nper_device_train_batch_size: 1\n")
    assert code == 0 and "a step: 2 packed rows of 64 tokens, as there" in out
    tokens = survey(read("x.toml"), 10.0).lengths
    assert len(tokens) == 40 and read("x.toml").lr_scheduler.warmup_steps == math.ceil(
        1.5 * math.ceil(40 / (64 // tokens[0]) / 2)  # 3 epochs, 2 rows in a step
    )
    monkeypatch.setattr(new, "survey", lambda *_: Survey(np.zeros(0, np.int64), np.zeros(0), 1.0, 3))
    code, out, _ = run(TRL, "--output", "z.toml")
    assert code == 0 and "WARNING no row can be learned" in out and "WARNING a step: 16 examples there" in out
    monkeypatch.setattr(new, "survey", survey)
    Path("train.jsonl").write_text('{"a": 1}\n')
    code, out, _ = run(f"{TRL}warmup_ratio: 0.5\n", "--output", "y.toml")
    assert code == 0 and "WARNING the tokens were not counted: " in out and "warmup_ratio" in not_carried(out)


FACTORY_PAIRS = "model_name_or_path: Qwen3-0.6B\nstage: dpo\ndataset: pairs.jsonl\nmax_steps: 9\n"
PAIRS_OF_TRL = "model_name_or_path: Qwen3-0.6B\ndataset_name: pairs.jsonl\nmax_steps: 9\nlearning_rate: 1e-6\n"


@pytest.mark.parametrize(
    ("text", "loss", "sft_weight", "lost"),
    [
        ("loss_type: sigmoid\n", "dpo", 0.0, {}),
        ("loss_type: [sigmoid]\n", "dpo", 0.0, {}),
        ("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\n", "dpo", 0.2, {}),
        ("loss_type: [sft, ipo]\nloss_weights: [1.0, 2.0]\n", "ipo", 0.5, {}),
        ("loss_type: [sigmoid, sft]\n", "dpo", 1.0, {}),
        ("rpo_alpha: 0.3\n", "dpo", 0.3, {}),
        ("loss_type: [sigmoid, bco_pair]\n", "dpo", 0.0, {"loss_type": "only one loss of pairs can be carried over"}),
        ("loss_type: [sigmoid, sigmoid]\n", "dpo", 0.0, {"loss_type": "only one loss of pairs can be carried over"}),
        ("loss_type: [[a], sft]\n", "dpo", 0.0, {"loss_type": "only one loss of pairs can be carried over"}),
        ("loss_type: [sigmoid, sft]\nloss_weights: [a, b]\n", "dpo", 0.0, {"loss_type": "only one loss of pairs"}),
        ("loss_type: apo_zero_unpaired\n", "apo_zero_unpaired", 0.0, {}),
        ("loss_type: bco_pair\n", "dpo", 0.0, {"loss_type": "of SFT cross-entropy, of pairs objective.loss"}),
        ("loss_type: kto\n", "dpo", 0.0, {"loss_type": "KTO subtracts a mean over the batch"}),
        ("desirable_weight: 2.0\n", "dpo", 0.0, {"desirable_weight": "KTO is not here; nearest"}),
    ],
)
def test_losses_of_preferences(text: str, loss: str, sft_weight: float, lost: dict[str, str], run: Run) -> None:
    code, out, err = run(PAIRS_OF_TRL + text)
    assert code == 0, err
    objective = read("x.toml").objective
    assert (objective.name, objective.loss, objective.sft_weight) == ("preference", loss, sft_weight)
    found = not_carried(out)
    assert found.keys() == lost.keys() and all(words in found[name] for name, words in lost.items()), out


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "simpo", "hinge", "kto_pair", "kto", "rpo", "sft", "apo_zero"])
def test_a_name_of_a_loss_means_the_same_under_every_key(name: str, run: Run) -> None:
    ours = meaning("objective.loss", name).removeprefix("; ")  # as with --objective.loss of ours
    loss = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo"}.get(name, "dpo")
    for key, text in (("loss_type", PAIRS_OF_TRL), ("pref_loss", f"{FACTORY_PAIRS}pref_beta: 0.2\n")):
        code, out, err = run(f"{text}{key}: {name}\n", "--output", f"{key}.toml")
        assert code == 0 and read(f"{key}.toml").objective.loss == loss, err
        lost = not_carried(out).get(key, "")
        assert ours in lost if key in not_carried(out) else ours in ("", f'here it is "{loss}"'), (key, out)


@pytest.mark.parametrize("key", ["rl", "stage"])
def test_kto_says_what_is_nearest(key: str, run: Run) -> None:
    start = {"rl": "base_model: Qwen3-0.6B\n", "stage": "model_name_or_path: Qwen3-0.6B\ndataset: pairs.jsonl\n"}[key]
    code, _, err = run(f"{start}{key}: kto\n")
    assert code == 2 and "KTO subtracts a mean over the batch" in err and '"apo_zero_unpaired"' in err


def test_what_is_not_carried_over_is_in_two_lists(run: Run) -> None:
    text = "neftune_noise_alpha: 5\ndataloader_num_workers: 4\nnum_train_epochs: 3\nwarmup_steps: 1\nmade_up: 1\n"
    code, out, _ = run(PAIRS_OF_TRL + text)
    first, second = (out.index(f"not carried over, {words}") for words in ("which changes", "without effect"))
    idle = {"neftune_noise_alpha": False, "made_up": False, "num_train_epochs": True, "dataloader_num_workers": True}
    for name, is_idle in idle.items():
        place = out.index(f": {name} = ")
        assert code == 0 and first < place and (place > second) == is_idle, name


def test_datasets_beside_dataset_name_and_names_of_dataset_info(run: Run) -> None:
    code, out, _ = run(f"{PAIRS_OF_TRL}datasets: [{{path: json, data_files: [train.jsonl]}}]\n")
    assert code == 0 and [Path(path).name for path in read("x.toml").data.path] == ["train.jsonl"]
    assert "datasets counts, as there" in not_carried(out)["dataset_name"]
    Path("data").mkdir()
    shutil.copy("alpaca.jsonl", "data/mine.jsonl")
    info = {"mine": {"file_name": "mine.jsonl", "columns": {"prompt": "question"}}, "x": {"hf_hub_url": "a/b"}}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    code, out, err = run("model_name_or_path: Qwen3-0.6B\nstage: sft\ndataset: mine\n", "--output", "y.toml")
    assert code == 0, err
    assert [Path(path).name for path in read("y.toml").data.path] == ["mine.jsonl"]
    assert "in data/dataset_info.json; the form of the rows is recognised" in not_carried(out)["dataset.mine.columns"]
    Path("data/dataset_info.json").write_text("{")
    code, _, err = run("model_name_or_path: Qwen3-0.6B\nstage: sft\ndataset: mine\n", "--output", "z.toml")
    assert code == 2 and "data/dataset_info.json: cannot be read as JSON" in err
