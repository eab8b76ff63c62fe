"""Names that people bring from other trainers, and names of the Hugging Face hub: each is answered with our words."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import REPO

from titan_mi100.config.as_text import our_keys
from titan_mi100.config.check import check_start
from titan_mi100.config.hub import hub_name
from titan_mi100.config.load import load_config
from titan_mi100.errors import UserError
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.workshop import coming_from, other_trainers
from titan_mi100.workshop.other_trainers import advise, entries

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

TOKENIZER = str(REPO / "train_configs/debug/tokenizer")
DATA = REPO / "train_configs/debug/additions.jsonl"
# the sections and keys of torchtitan's configuration of Qwen3-0.6B, with values of our own
TORCHTITAN = """
[job]
dump_folder = "out"
description = "a trial"
[profiling]
enable_profiling = false
save_traces_folder = "traces"
profile_freq = 50
[metrics]
log_freq = 5
enable_tensorboard = false
save_tb_folder = "events"
[model]
name = "qwen3"
flavor = "0.6B"
hf_assets_path = "./assets/hf/Qwen3-0.6B"
[optimizer]
name = "AdamW"
lr = 1e-4
eps = 1e-7
[lr_scheduler]
warmup_steps = 3
[training]
local_batch_size = 2
seq_len = 2048
max_norm = 0.5
steps = 30
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable = false
folder = "saved"
interval = 10
last_save_model_only = false
export_dtype = "bfloat16"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
"""


def errors_of(*arguments: str, world_size: int = 1) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(arguments, world_size)
    return str(error.value).splitlines()


def written(tmp_path: Path, text: str) -> tuple[str, str]:
    (tmp_path / "my.toml").write_text(text)
    return "--job.config_file", str(tmp_path / "my.toml")


def folder_of_the_hub(tmp_path: Path) -> None:
    """Qwen3-0.6B without its weights."""
    shutil.copytree(TOKENIZER, tmp_path / "Qwen3-0.6B")
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text(json.dumps(to_hf_config(PRESETS["0.6B"])))


def test_every_target_of_the_table_is_a_key_and_its_value_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    assert len({name for entry in entries() for name in entry.names}) > 250
    for entry in entries():
        assert entry.key in {"", *our_keys()}, entry
        assert entry.exists or entry.note, entry
        for name in re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", entry.note):
            assert name in our_keys() or name in ("e.g", "run_train.sh",
                *("train.jsonl", "held_out.jsonl", "text.jsonl", "a.jsonl", "metrics.jsonl", "config.json"),
                *("config.toml", "dataset_info.json", "dcp_to_hf.py")), entry  # fmt: skip
        for setting in filter(None, " and ".join(entry.settings.values()).split(" and ")):
            name, _, value = setting.partition(" = ")
            [parsed] = tomllib.loads(f"x = {value}").values()
            given = str(parsed).lower() if isinstance(parsed, bool) else str(parsed)
            section, key = name.split(".")
            file.write_text(f"[{section}]\n{key} = {value}\n")
            for options, where in (
                (["--model.flavor", "debug", f"--{name}", given], f"--{name} = "),
                (["--job.config_file", str(file)], f"{file}: [{section}] {key} = "),
            ):
                said = ""
                try:
                    load_config(options, None, with_files=False)
                except UserError as error:  # also about other settings, which are missing
                    said = str(error)
                assert not re.search(rf"{re.escape(where)}.*? (must be|has an|is not|holds) ", said), said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--learning_rate 1e-5", "--optimizer.lr 1e-5"),
        ("--bf16", "--training.mixed_precision_param bfloat16"),
        ("--fp16 true", "--training.mixed_precision_param float16"),
        ("--per-device-train-batch-size 4", "--training.local_batch_size 4"),
        ("--training.max_seq_len 512", "--training.seq_len 512"),
        ("--num_train_epochs=3.0", "--training.epochs 3"),
        ("--lora_target_modules q_proj,v_proj", "--lora.target_modules q_proj v_proj"),
        ("--lora_target_modules q_proj v_proj", "--lora.target_modules q_proj v_proj"),
        ("--optim paged_adamw_8bit", "--optimizer.state 8bit"),
        ("--warmup_ratio 0.03", "--lr_scheduler.warmup_steps -1"),
        ("--checkpoint.enable false", "--checkpoint.interval 0"),
        ("--output_dir 'my run'", "--job.run_folder 'my run'"),
        ("--gradient_checkpointing", "--activation_checkpoint.mode full"),
        ("--run_name '$(x); y'", "--job.description '$(x); y'"),
        ("--profiling", "--profiling.enable_profiling true"),
        ("--weights_path x", "--checkpoint.initial_load_path x"),
        ("--bf16 False", "--training.mixed_precision_param float32"),
        ("--adapter lora", "--lora.rank 16"),
        ("--use_peft", "--lora.rank 16"),
        ("--warmup_ratio 0.1", "--lr_scheduler.warmup_steps 100"),
        ("--save_steps 0.1", "--checkpoint.interval 100"),
        ("--warmup_steps 0.03", "--lr_scheduler.warmup_steps -1"),
        ("--num_train_epochs 0.5", "--training.epochs 1"),
        ("--datasets a.jsonl", "--data.path a.jsonl"),
        ("--dataset mine", "--data.path mine.jsonl"),
        ("--dataset_name openai/gsm8k", "--data.path 'gsm8k/main/train-*.parquet'"),
        ("--save_strategy epoch", "--checkpoint.interval 100"),
        ("--eval_strategy steps", "--data.validation_fraction 0.05"),
        ("--fsdp 'full_shard auto_wrap'", "--parallelism.zero_stage 3"),
        ("--lr_scheduler_type cosine_with_restarts", "--lr_scheduler.decay_type cosine"),
        ("--val_set_size 100", "--data.validation_fraction 0.05"),
        ("--optimizer.learning_rate 1", "--optimizer.lr 1"),
        ("--seq_len 512", "--training.seq_len 512"),
        ("-lr 1e-5", "--optimizer.lr 1e-5"),
        ("--interleave_probs .7,.3", "--data.weights 0.7 0.3"),
        ("--torch_compile True", "--compile.enable true"),
        ("--train_file 'my data/x.jsonl'", "--data.path 'my data/x.jsonl'"),
        ("--train_json x.jsonl", "--data.path x.jsonl"),
        ("--use_powersgd", "--parallelism.zero_stage 0 --parallelism.powersgd_rank 1"),
        ("--train_file a.jsonl b.jsonl", "--data.path a.jsonl b.jsonl"),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_ours_to_paste(arguments: str, expected: str) -> None:
    [message] = errors_of(*shlex.split(arguments))
    assert f" {expected} " in f"{message} " and message.startswith("command line: ")
    name = expected.partition(" ")[0]
    refused: list[str] = []
    try:
        load_config(shlex.split(expected), with_files=False)
    except UserError as error:  # for want of other settings
        refused = [line for line in str(error).splitlines() if re.match(f"command line|{name} = .* must ", line)]
    assert refused == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--parallelism.expert_parallel_degree 2", "does not exist here: its experts are divided as all weights are"),
        ("--parallelism.expert_parallel_degree 1", "leave it out here"),
        ("--checkpoint.enable", "leave it out here: checkpoints are always on"),
        ("--deepspeed ds.json", "does not exist here: FSDP2 shards the run"),
        ("--float8.recipe_name rowwise", "is an option of torchtitan and does not exist here: no float8"),
        ("--packing", "does not exist here: documents are always packed"),
        ("--sequence_parallel_degree 2", "here: --parallelism.context_parallel_degree 2"),
        ("--save_steps 0.1", "0.1 is a share of the steps; write a number of steps"),
        ("--val_size 100", "100 is a number of rows, which cannot be given here; write a share"),
        ("--gradient_accumulation_steps auto", "leave it out here"),
        ("--learning_rate auto", "optimizer.lr must be a number here, not 'auto'; leave it out for the default, 2e-05"),
        ("--adapter qlora", "here: --lora.rank 16 --lora.base nf4"),
        ("--neftune_noise_alpha 5", "no noise is added to embeddings; leave it out"),
        ("--trainable_layers 2", "is not an option; --help lists them"),
        ("--trainer sft", "is not an option; did you mean --draft_head.train?"),
        ("--max_step 3", "is not an option; did you mean --training.steps?"),
        ("--optimizer.learningrate 1", "is not an option; did you mean --optimizer.lr?"),
        ("--max_steps -1", "-1 means by epochs"),
        ("--torch_compile=", "compile.enable must be true or false here; leave it out for the default, false"),
        ("--torch_compile_backend cudagraphs", "compile.backend has inductor, aot_eager here, not 'cudagraphs'"),
        ("--save_total_limit -1", "checkpoint.keep_latest_k must be at least 0 here"),
        ("--interleave_probs abc", "data.weights must be a number here, not 'abc'"),
        ("-training.steps 5", "'-training.steps' is not an option; write --training.steps 5"),
        ("--source a", "it is a list of tables: write [[data.source]] in a TOML file"),
        ("--path a.jsonl b.jsonl", "write --data.path a.jsonl b.jsonl"),
        ("--trainning.steps 3", "is not an option; write --training.steps 3"),
        ("--frobnicate 3", "is not an option; --help lists them"),
        ("my.toml", "--job.config_file names a TOML file"),
    ],
)
def test_what_does_not_exist_here_is_said_once(arguments: str, expected: str) -> None:
    [message] = errors_of(*shlex.split(arguments))
    assert expected in message


def test_in_a_file_values_are_written_as_toml_has_them(tmp_path: Path) -> None:
    text = 'torch_compile = "True"\nweight_decay = "0."\nconfig = "x.toml"\nmax_steps = nan\nnum_train_epochs = true\n'
    said = "\n".join(errors_of(*written(tmp_path, f"{text}use_tensorboard = []\n")))
    for expected in (
        "under [compile] write enable = true",
        "under [optimizer] write weight_decay = 0.0 ",
        'here, at the top of the file: base = "x.toml"',
        "training.steps must be a number here, not nan",
        "training.epochs must be a number here, not True",
        "metrics.enable_tensorboard takes one value here, not []",
    ):
        assert expected in said


def test_a_config_of_torchtitan_gets_messages_that_lead_to_one_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = errors_of(*written(tmp_path, TORCHTITAN), world_size=2)
    start = f"{tmp_path / 'my.toml'}: "
    assert all(line.startswith(start) for line in found)
    said = {line.removeprefix(start).partition(" is ")[0].partition(" = ")[0]: line for line in found}
    assert said.keys() == {
        *("[metrics] save_tb_folder", "[model] name", "[model] hf_assets_path", "[optimizer] name"),
        *("[training] dataset", "[parallelism] fsdp_reshard_after_forward"),
        *("[checkpoint] enable", "[checkpoint] folder", "[checkpoint] last_save_model_only", "[quantize]"),
        *("[activation_checkpoint] selective_ac_option", "[compile] components"),
        *("[profiling] profile_freq", "[profiling] save_traces_folder", "[checkpoint] export_dtype"),
    }
    assert len(found) == len(said)
    # what the messages say leads to a config that is accepted
    mended = TORCHTITAN
    for line in found:
        mended = as_the_message_says(mended, line.removeprefix(start))
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA, tmp_path / "c4.jsonl")
    [left] = errors_of(*written(tmp_path, mended), world_size=2)
    assert "assets/hf/Qwen3-0.6B': no such folder or file; " in left and left.endswith(
        "is no folder, or may not be entered"
    )
    shutil.copytree(TOKENIZER, tmp_path / "assets/hf/Qwen3-0.6B")
    assert load_config(written(tmp_path, mended), 2).checkpoint.interval == 0


def as_the_message_says(text: str, message: str) -> str:
    """The TOML text after the remedy of one message: the key or the section is deleted, another is written."""
    section, key = re.match(r"\[(\w+)\](?: (?!is )(\w+))?", message).groups()
    if key is None:
        return re.sub(rf"(?ms)^\[{section}\b[^\n]*\n.*?(?=^\[|\Z)", "", text)
    head, table, rest = re.split(rf"(?m)^(\[{section}\]\n)", text, maxsplit=1)
    text = head + table + re.sub(rf"(?m)^{key} = .*\n", "", rest, count=1)
    if change := re.search(r"here: under \[(\w+)\] change (\w+) to (\S+)", message):
        head, table, rest = re.split(rf"(?m)^(\[{change[1]}\]\n)", text)
        return head + table + re.sub(rf"(?m)^{change[2]} = .*$", f"{change[2]} = {change[3]}", rest, count=1)
    if new := re.search(r"here: under \[(\w+)\] write (.+?)(?: \(|$)", message):
        has = f"[{new[1]}]\n" in text
        return text.replace(f"[{new[1]}]\n", f"[{new[1]}]\n{new[2]}\n") if has else f"{text}[{new[1]}]\n{new[2]}\n"
    assert "leave it out" in message or message.endswith("delete it"), message
    return text


def test_options_at_the_top_of_a_file_and_sections_of_others(tmp_path: Path) -> None:
    text = 'learning_rate = 1e-5\nbf16 = true\nseq_len = 9\nmodel = "x"\ndatasets = [{ path = "a" }]\nodd = 1\n'
    text += "[deepspeed]\nstage = 2\n[comm]\ntrain_timeout_seconds = 9\n"
    found = "\n".join(errors_of(*written(tmp_path, text)))
    shared = "is an option of TRL, axolotl and LLaMA-Factory"
    for expected in (
        f"my.toml: learning_rate {shared}; here: under [optimizer] write lr = 1e-05",
        f'my.toml: bf16 {shared}; here: under [training] write mixed_precision_param = "bfloat16"',
        "my.toml: seq_len = 9 is outside of any section; write [training] seq_len",
        'under [checkpoint] write initial_load_path = "x"',
        'my.toml: datasets is an option of axolotl; here: under [data] write path = ["a.jsonl"]',
        "my.toml: odd = 1 is outside of any section",
        f"my.toml: [deepspeed] {shared} and does not exist here",
        "my.toml: [comm] train_timeout_seconds is an option of torchtitan; here: under [watchdog] write seconds = 9",
        "my.toml: [comm] is a section of torchtitan and does not exist here",
    ):
        assert expected in found, expected
    assert len(found.splitlines()) == 9, found


MODEL = f"[model]\nflavor = 'debug'\ntokenizer_path = '{TOKENIZER}'\n"
BASE = "base = 'base.toml'\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[dta]\npath = 'x'\n{MODEL}", "[dta] is not a section"),
        (f"[frob]\nodd = 'x'\n{MODEL}", "[frob] is not a section"),
        ("[training\nsteps = 3", ": [training; write [section] or key = value, with texts in quotes and lists in [ ]"),
        (
            f"{BASE}[parallelism]\ntensor_parallel_degree = '2'\ndata_parallel_shard_degree = 1",
            "tensor_parallel_degree = '2' must",
        ),
        (f"{BASE}[data]\nvalidation_pth = 'x'\n[validation]\nfreq = 5", "validation_pth is not a key"),
        (f"{BASE}[lora]\nr = 8\nalpha = 32.0", "under [lora] write rank = 8"),
        (
            f"{BASE}[data]\npath = '{DATA}'\n[training]\nsteps = 'ten'\n[lr_scheduler]\nwarmup_steps = 3",
            "steps = 'ten' must be a whole",
        ),
    ],
)
def test_what_could_not_be_read_brings_no_second_message(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "base.toml").write_text(f"{MODEL}allow_other_tokenizer = true\n[data]\npath = '{DATA}'")
    [found] = errors_of(*written(tmp_path, text), world_size=2)
    assert expected in found


def test_a_name_of_the_hub_names_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
    for key in ("checkpoint.initial_load_path", "model.tokenizer_path", "lora.initial_load_path"):
        found = [line for line in errors_of(f"--{key}", "Qwen/Qwen3-0.6B") if "Qwen3-0.6B" in line]
        assert len(found) == 1 and "hf download Qwen/Qwen3-0.6B --revision main" in found[0], found
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my.toml").write_text('[checkpoint]\ninitial_load_path = "Qwen/Qwen3-0.6B"')
    assert "hf download Qwen/Qwen3-0.6B" in "\n".join(errors_of("--job.config_file", "configs/my.toml"))
    fetch = "hf download me/rows --revision main --repo-type dataset"
    assert fetch in "\n".join(errors_of("--data.path", "me/rows"))
    assert advise("model_name_or_path", "Qwen/Qwen3-0.6B", document=None).text.endswith(f"fetch it first: {command}")
    folder_of_the_hub(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"has no model: .*; download the whole folder again$"):
        check_start(load_config(["--checkpoint.initial_load_path", "Qwen3-0.6B", "--data.path", "rows.jsonl"]))
    (tmp_path / "data").mkdir()
    for path in ("data/train", "data/train.jsonl", "a/b/c", "../b/c", "/a/b", "gone/x.jsonl", "gone", "./a b/c"):
        assert hub_name(path) is None, path
    assert other_trainers.advise("no_such_name", "1", document=None) is None


@pytest.mark.parametrize("trainer", dict.fromkeys(entry.trainer for entry in entries()))
def test_all_options_of_a_trainer_are_listed(trainer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert coming_from.main([trainer]) == 0
    listed = capsys.readouterr().out
    assert f"# {trainer}" in listed
    for entry in entries():
        if entry.trainer == trainer:
            assert ", ".join(entry.names) in listed


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("--bf16", 0, "bf16, bfloat16\n    true, auto, full: training.mixed_precision_param"),
        ("mixed_precision_param", 0, "training.mixed_precision_param"),
        ("float8.recipe_name", 0, "# torchtitan\nmodel.converters"),
        ("optim.learning_rate", 0, "learning_rate\n    optimizer.lr\n"),
        ("--learning_rate=1e-5", 0, "1e-5 is an option of TRL, axolotl and LLaMA-Factory; here: --optimizer.lr 1e-5"),
        ("LLAMA_factory", 0, "# LLaMA-Factory\n"),
        ("t", 2, "no option that is known"),
        ("learning_rat", 2, "no option that is known; did you mean learning_rate"),
        ("zzz", 2, "no option that is known; trainers: "),
    ],
)
def test_an_option_is_answered(name: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert coming_from.main([name]) == code
    assert said in "".join(capsys.readouterr())


def test_the_page_and_its_configs_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPO / "docs/COMING_FROM.md").read_text(encoding="utf-8")
    trainers = {entry.trainer for entry in entries()}
    assert trainers == {name.strip("'") for name in re.findall(r"All of them: `titan-mi100 coming-from (.+?)`", page)}
    # the errors at its top are those that the command prints
    [shown] = re.findall(r"(?s)^\$ ./run_train.sh (.+?)\n```", page, re.MULTILINE)
    command, *messages = shown.splitlines()
    assert [f"ERROR {line}" for line in errors_of(*shlex.split(command))] == messages
    monkeypatch.chdir(tmp_path)
    folder_of_the_hub(tmp_path)
    (tmp_path / "Qwen3-0.6B" / "model.safetensors").touch()
    shutil.copy(DATA, tmp_path / "train.jsonl")
    configs = re.findall(r"(?s)```toml\n(.+?)```", page)
    assert len(configs) == 2
    for text in configs:
        load_config(written(tmp_path, text), 2)
