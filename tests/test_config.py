"""The config: what it reads, inherits and refuses, without importing torch."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ASSETS, REPO
from conftest import MINIMAL as START

from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config, make_run_folder
from titan_mi100.config.settings import Config, SourceConfig
from titan_mi100.errors import UserError

MINIMAL = f"""{START}seq_len = 256
"""


def run_folder_of(config: Config) -> Path:
    return make_run_folder(config.job, config.checkpoint.fresh)


def load(tmp_path: Path, text: str, *arguments: str, world_size: int = 1) -> Config:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return load_config(["--job.config_file", str(path), *arguments], world_size)


def errors(tmp_path: Path, text: str, *arguments: str, world_size: int = 1) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *arguments, world_size=world_size)
    return str(caught.value).splitlines()


def test_command_line_overrides_the_file_and_the_file_its_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(MINIMAL + "local_batch_size = 3\nsteps = 5\nmax_norm = 2\n")
    text = 'base = "base.toml"\n[training]\nsteps = 7\nmax_norm = 3.5\n'
    config = load(tmp_path, text, "--training.max_norm", "4", "--checkpoint.fresh", "--job.run_folder=x")
    large = load(tmp_path, MINIMAL + "target_tokens_per_step = 110_100_480")
    assert large.batch(1).gradient_accumulation_steps == 430_080
    assert (config.training.local_batch_size, config.training.steps, config.training.max_norm) == (3, 7, 4.0)
    assert config.checkpoint.fresh is True
    assert config.job.run_folder == str(Path("x").resolve())


def test_paths_in_a_file_are_relative_to_that_file(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "rows.jsonl").write_text("{}")
    (inner / "base.toml").write_text(MINIMAL.replace(str(ASSETS / "arithmetic.jsonl"), "rows.jsonl"))
    assert load(tmp_path, 'base = "inner/base.toml"').data.path == (str(inner / "rows.jsonl"),)


def test_lists_come_from_toml_and_the_command_line_and_go_back_to_toml(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    text = MINIMAL.replace(f'"{ASSETS / "arithmetic.jsonl"}"', '["a.jsonl", "*.jsonl"]\nrepeats = [1, 2.5]')
    config = load(tmp_path, text)
    assert config.data.path == (str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl"))
    assert config.data.repeats == (1.0, 2.5)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(["--job.config_file", str(tmp_path / "again.toml")]).data == config.data
    arguments = ["--data.path", f"{tmp_path}/b.jsonl,{tmp_path}/a.jsonl", "--data.repeats", "3,1"]
    config = load_config(["--job.config_file", str(tmp_path / "again.toml"), *arguments])
    assert config.data.path == (str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl"))
    assert config.data.repeats == (3.0, 1.0)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ('path = "no/*.jsonl"', "[data] path: {}/no/*.jsonl: matches no file"),
        ('path = ["no.jsonl", 3]', "[data] path = ['no.jsonl', 3] must be a text, or a list of such"),
        ('path = "a.jsonl"\nrepeats = [1, 2]', "[data] repeats has 2 values for 1 paths; give one for each path"),
        ('path = "a.jsonl"\nweights = 0.0', "[data] weights = [0.0] must all be above 0; leave a path out instead"),
        ('path = "a.jsonl"\nrepeats = 1\nweights = 1', "[data] weights and repeats are both set; keep one"),
        ('path = "a.jsonl"\nformat = "text"\nprompt_column = "q"', "[data] prompt_column and response_column go"),
        ('path = "a.jsonl"\nsystem_column = "q"', '[data] system_column = "q" needs data.prompt_column'),
        (
            'path = "a.jsonl"\nformat = "messages"\nprompt_column = "q"\nresponse_column = "a"',
            '[data] prompt_column is set, but format = "messages"; remove one of them',
        ),
        ('path = "."', "[data] path: {}: is a folder; name its files, e.g. {}/*.jsonl"),
        (
            'path = "a.jsonl"\nvalidation_path = "b.jsonl"',
            "[data] validation_path: {}/b.jsonl: cannot be read: ",
        ),
    ],
)
def test_what_is_wrong_about_data_is_said(data: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    text = MINIMAL.replace(f'path = "{ASSETS / "arithmetic.jsonl"}"', data)
    assert any(error.format(tmp_path, tmp_path) in line for line in errors(tmp_path, text)), errors(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("a.jsonl, b.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("[ab].jsonl", ["[ab].jsonl"]),
        ("a.jsonl,b.[12]", ["a.jsonl", "b.[12]"]),
    ],
)
def test_a_list_on_the_command_line_leaves_the_brackets_of_globs_alone(
    text: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--model.flavor", "debug", "--data.path", text], with_files=False)
    assert config.data.path == tuple(str(tmp_path / name) for name in expected)


def test_every_error_comes_at_once_with_file_key_and_remedy(tmp_path: Path) -> None:
    found = errors(
        tmp_path,
        """
[trainning]
steps = 3
[training]
seq_lenn = 3
steps = "ten"
epochs = 1.5
local_batch_size = 0
[optimizer]
decay_ratio = 0.5
lr = true
[parallelism]
data_parallel_shard_degree = 3
[activation_checkpoint]
mode = "some"
""",
        "--training.sed=4",
        "--training.seed",
        "--model.flavor",
        "0.7B",
        world_size=2,
    )
    file = tmp_path / "my.toml"
    for expected in (
        f"{file}: [trainning] is not a section; did you mean training?",
        f"{file}: [training] seq_lenn is not a key; did you mean [training] seq_len?",
        f"{file}: [training] steps = 'ten' must be a whole number",
        f"{file}: [training] epochs = 1.5 must be a whole number",
        f"{file}: [training] local_batch_size = 0 must be at least 1",
        f"{file}: [optimizer] decay_ratio is not a key; write [lr_scheduler] decay_ratio",
        f"{file}: [optimizer] lr = True must be a number",
        f"{file}: [activation_checkpoint] mode = 'some' must be one of: none, selective, full",
        f"{file}: [parallelism] data_parallel_shard_degree = 3 does not fill the 2 started processes; "
        "use -1 (all that the others leave) or start with ./run_train.sh --nproc_per_node 3",
        f"{file}: [data] path is not set; name a file or a glob, or several, or [[data.source]]",
        "command line: '--training.sed=4' is not an option; did you mean --training.seed?",
        "command line: --training.seed needs a value",
        "--model.flavor = '0.7B' is not known; did you mean 1.7B?",
    ):
        assert expected in found, expected
    assert len(found) == 14  # and the tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps = 3\nepochs = 2", "[training] steps and epochs are both set"),
        ("gradient_accumulation_steps = 2\ntarget_tokens_per_step = 9", "[training] gradient_accumulation_steps and"),
        ("steps = 3\n[lr_scheduler]\nwarmup_steps = 4", "[lr_scheduler] warmup_steps = 4 is more than"),
        ("[lr_scheduler]\ndecay_ratio = 1.5", "[lr_scheduler] decay_ratio = 1.5 must be at most 1"),
        ("[data]\nmax_lost_share = 1.5", "[data] max_lost_share = 1.5 must be at most 1"),
        ("[optimizer]\nbeta1 = 1.0", "[optimizer] beta1 = 1.0 must be a finite number of at least 0, below 1"),
        ("[optimizer]\nlr = nan", "[optimizer] lr = nan must be a finite number of at least 0"),
        ("[optimizer]\neps = 0", "[optimizer] eps = 0 divides by zero"),
        ("[data]\nvalidation_path = '" + "x" * 300 + "'", "File name too long"),
        ("[data]\nvalidation_path = '~nobody-here/x'", "[data] validation_path: "),
        ("[data]\nprompt_column = 'q'", "[data] prompt_column and response_column go together"),
        (
            "[data]\nprompt_column = 'q'\nresponse_column = 'a'\nsystem_column = 'q'",
            "[data] prompt_column = 'q' is another text's column, too; name one for each",
        ),
        ("[data]\nvalidation_path = 'nowhere'", "[data] validation_path: "),
        ("[model]\nchat_template = 'nowhere'", "is not a file"),
        ("[validation]\nfreq = 5", "[validation] freq = 5 needs data.validation_path or data.validation_fraction"),
        ("[checkpoint]\nkeep_best = true", "[checkpoint] keep_best = true needs data.validation_path or"),
        ("[checkpoint]\nfresh = true", "[checkpoint] fresh = true needs job.run_folder"),
        ("[checkpoint]\ninitial_load_path = 'nowhere'", "[checkpoint] initial_load_path = "),
        ("[model]\ntokenizer_path = '.'", "[model] tokenizer_path = "),
        ("[lora]\nrank = 1_000_000", "[lora] rank = 1000000 is more than hidden_size = "),
        (
            "[lora]\nrank = 4\nbase_model_name_or_path = 'Qwen3-0.6B'",
            "[lora] base_model_name_or_path = 'Qwen3-0.6B' is neither",
        ),
        ("[lora]\nbase_model_name_or_path = 'Qwen/Qwen3-0.6B'", "has no effect with rank = 0"),
    ],
)
def test_impossible_combinations_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "base.toml").write_text(MINIMAL)
    if not text.startswith("["):
        text = "[training]\n" + text
    found = errors(tmp_path, 'base = "base.toml"\n' + text)
    assert len([line for line in found if expected in line and str(tmp_path / "my.toml") in line]) == 1, found


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert errors(tmp_path, "[training\n")[0].startswith(f"{tmp_path / 'my.toml'}: cannot be read as TOML")
    assert errors(tmp_path, 'base = "gone.toml"\n' + MINIMAL) == [
        f"{tmp_path / 'my.toml'}: base = 'gone.toml': {tmp_path / 'gone.toml'}: no such file; "
        "titan-mi100 config new writes one"
    ]
    assert "forms a cycle" in errors(tmp_path, 'base = "my.toml"\n' + MINIMAL)[0]
    with pytest.raises(UserError, match=r"nowhere.toml: no such file"):
        load_config(["--job.config_file", "nowhere.toml"])


def test_the_folder_of_weights_gives_the_model_and_must_agree_with_a_preset(tmp_path: Path) -> None:
    from titan_mi100.shapes.families import PRESETS, to_hf_config

    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(PRESETS["8B"])))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "base.toml").write_text(MINIMAL)
    text = f'base = "base.toml"\n[checkpoint]\ninitial_load_path = "{tmp_path}"\n[model]\nflavor = '
    assert load(tmp_path, text + '""').spec() == PRESETS["8B"]
    assert load(tmp_path, text + '"8B"').spec() == PRESETS["8B"]
    found = errors(tmp_path, text + '"4B"')
    assert "[model] flavor = '4B' is not the model in" in found[0]
    assert "num_attention_heads" not in found[0]
    assert "hidden_size: 2560, 4096" in found[0]
    # weights without a config.json beside them: the preset says what they are
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "model.pt").touch()
    text = text.replace(str(tmp_path), str(alone / "model.pt"))
    assert load(tmp_path, text + '"4B"').spec() == PRESETS["4B"]


def test_the_resolved_config_reads_back_to_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + 'steps = 9\n[job]\ndescription = "a \\"quoted\\" ü\\n"')
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(config))
    again = load_config(["--job.config_file", str(path)])
    assert to_toml(again) == to_toml(config)
    assert again.training == config.training and again.job.description == config.job.description


def test_run_folders_are_named_by_the_user_or_by_config_and_time(tmp_path: Path) -> None:
    dump = ("--job.dump_folder", str(tmp_path / "out"))
    unnamed = load(tmp_path, MINIMAL, *dump)
    # in one second, at once: a sweep, a job array
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(run_folder_of, [unnamed] * 16))
    assert len(set(folders)) == 16 and all(folder.is_dir() for folder in folders)
    assert {folder.parent for folder in folders} == {tmp_path / "out"}
    assert all(re.fullmatch(r"my-\d{8}-\d{6}(-\d+)?", folder.name) for folder in folders)
    named = tmp_path / "run"
    for _ in range(2):
        assert run_folder_of(load(tmp_path, MINIMAL, "--job.run_folder", str(named))) == named
    fresh = load(tmp_path, MINIMAL, "--job.run_folder", str(named), "--checkpoint.fresh")
    assert [run_folder_of(fresh) for _ in range(2)] == [tmp_path / "run-2", tmp_path / "run-3"]


CLUSTER = {  # rows a step
    "qwen3_0.6b_1node": 128, "qwen3_8b_8nodes": 256, "qwen3_8b_64nodes": 1344, "qwen3_32b_64nodes": 512,
    "qwen3_32b_pp4_tp8_16nodes": 256, "qwen3_8b_mixture_64nodes": 1344,
}  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([""], "[data] source, table 1: path is not set; name files, globs or a folder of titan-mi100 prepare"),
        (['path = "a.jsonl"\nweigth = 1'], "[data] source, table 1: weigth is not a key; did you mean weight?"),
        (['path = "a.jsonl"\nweight = 1', 'path = "b.jsonl"'], "table 2: weight = 0.0: either all sources have one"),
        (['path = "a.jsonl"\nname = "x"', 'path = "b.jsonl"\nname = "x"'], "name = 'x' is another's too"),
        (['path = "a.jsonl"', 'path = "sub/a.jsonl"'], "it would be called 'a' like another; give it a name"),
        (['path = "half"'], "half: is a corpus that is not complete; finish titan-mi100 prepare"),
        (['path = "a.jsonl"\nepochs = 0'], "epochs = 0: it would never be read; leave the source out"),
        (['path = "a.jsonl"\nepochs = "x"'], "table 1: epochs = 'x' must be a number"),
    ],
)
def test_what_is_wrong_about_sources_is_said(tables: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "plan.json").touch()
    for name in ("a", "b", "sub/a"):
        (tmp_path / f"{name}.jsonl").touch()
    text = MINIMAL.replace(f'path = "{ASSETS / "arithmetic.jsonl"}"', "")
    with pytest.raises(UserError, match=re.escape(said)):
        load(tmp_path, text + "".join(f"\n[[data.source]]\n{table}\n" for table in tables))


def test_sources_go_back_to_toml(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    text = MINIMAL.replace(f'path = "{ASSETS / "arithmetic.jsonl"}"', "")
    config = load(tmp_path, text + '\n[[data.source]]\npath = "a.jsonl"\nweight = 2\nname = "x"\n')
    assert config.data.source == (SourceConfig((str(tmp_path / "a.jsonl"),), "x", 2.0),)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(["--job.config_file", str(tmp_path / "again.toml")], 1).data == config.data
    replaced = load(tmp_path, text + '\n[[data.source]]\npath = "a.jsonl"\n', "--data.path", str(tmp_path / "a.jsonl"))
    assert replaced.data.source == () and len(replaced.data.path) == 1
    with pytest.raises(UserError, match=r"'--data.source=1' is not an option; it is a list of tables: write \[\["):
        load(tmp_path, text, "--data.source=1")


def test_the_shipped_configs_are_sound(tmp_path: Path) -> None:
    given = ["--model.tokenizer_path", str(ASSETS / "tokenizer"), "--data.path", str(ASSETS / "arithmetic.jsonl")]
    table = (REPO / "train_configs" / "README.md").read_text()
    rates: list[set[float]] = [set(), set(), set(), set()]  # fine-tuning all weights, LoRA; preferences; pretraining
    for path in sorted((REPO / "train_configs").glob("*.toml")):
        nodes = re.search(r"_(\d+)nodes?$", path.stem)
        cards = (
            8 * int(nodes[1])
            if nodes
            else int(path.stem[-4])
            if path.stem.endswith("gpu")
            else 1
            if "gb_" in path.stem
            else 2
        )
        model = ["--model.flavor", "0.6B"] if path.stem == "finetune" else []
        has_files = "[[data.source]]" not in path.read_text()
        arguments = ["--job.config_file", str(path), *(given if has_files else given[:2]), *model]
        config = load_config(arguments, world_size=cards, with_files=has_files)
        rows = config.batch(cards).global_batch_size
        others = {"debug": 2, "debug_rounds": 16, "finetune": 32, "qwen3_0.6b_ddp_powersgd": 100, **CLUSTER}
        others |= dict.fromkeys(("qwen3_8b_qlora_32k_1gpu", "qwen3_4b_lora_64k_1gpu", "qwen3.5_9b_lora_64k_cp2"), 4)
        others |= dict.fromkeys(("qwen3_8b_32k_cp8_8gpu", "qwen3_4b_128k_cp8_8gpu"), 4) | {"8gb_draft_head": 16}
        usual = (
            96 if not path.stem.startswith(("qwen3.5", "qwen3.6", "qwen3_30b")) else 8 * config.layout(cards).dp_degree
        )
        assert rows == others.get(path.stem, usual)
        assert len(path.read_text().splitlines()) < 40
        is_named = f"`{path.stem}` | {cards}" in table
        assert is_named or path.stem in ("debug", "debug_rounds", "finetune") or "_sft" in path.stem
        kind = 2 if config.objective.name in ("preference", "policy") else 3 if nodes else int(config.lora.rank > 0)
        rates[kind] |= set() if path.stem.startswith("debug") else {config.optimizer.lr}
    page = (REPO / "docs" / "TRAIN.md").read_text().partition("## Learning rate")[2].partition("These are usual")[0]
    cells = [re.findall(r"\d\S*e-\d", line) for line in page.splitlines() if line.startswith("| ")][1:]
    assert [set(map(float, row)) for row in cells] == rates


@pytest.mark.parametrize(
    ("parallelism", "world_size", "expected"),
    [
        ("tensor_parallel_degree = 4", 4, "degree = 4 does not divide num_key_value_heads = 2; this model can be split "
         "over 1, 2, and seq_len must be a multiple"),
        ("tensor_parallel_degree = 3", 3, "does not divide num_attention_heads = 4, num_key_value_heads = 2, seq_len"),
        ("pipeline_parallel_degree = 8", 8, "pipeline_parallel_degree = 8 makes 8 stages of 4 layers; lower it"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [3, 2]", 2, "[3, 2] must be 2 numbers "
         "above 0 that sum to the model's 4 layers"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [1, 1, 1, 1]", 2, "[1, 1, 1, 1] must be 2 "
         "numbers above 0 that sum to the model's 4 layers"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
         "pipeline_parallel_layers_per_stage = [2, 2]", 2, "[2, 2] must be 4 numbers or more, a multiple of 2, "),
        ("pipeline_parallel_degree = 2", 2, 'needs at least 2 microbatches, but gets 1: the forwards '
         'of a step, gradient_accumulation_steps, are its microbatches; raise it, or use "GPipe"'),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"', 2, "needs at least 2 micro"),
        ("zero_stage = 0\ndata_parallel_replicate_degree = 4", 2, "leave it out, or start"),
        ("zero_stage = 3\npipeline_parallel_degree = 2\npowersgd_rank = 1", 2, "powersgd_rank = 1 needs DDP"),
        ("zero_stage = 3\npipeline_parallel_degree = 2\npowersgd_rank = 1", 2, "needs at least 2 microbatches"),
        ("powersgd_rank = 1", 2, "powersgd_rank = 1 needs DDP; set [parallelism] zero_stage = 0"),
        ("zero_stage = 4", 2, "zero_stage = 4 must be at most 3"),
        ("zero_stage = 2\npipeline_parallel_degree = 2", 2, "zero_stage = 2 does not go with a pipeline"),
        ("zero_stage = 0\ncontext_parallel_degree = 2", 2, "(DDP) does not go with context_parallel_degree = 2; leave"),
        ("context_parallel_degree = 3", 3, "context_parallel_degree = 3 does not fit num_attention_heads = 4, "
         "num_key_value_heads = 2; possible: 1, 2, 4"),
        ("context_parallel_degree = 4\ntensor_parallel_degree = 2", 8, "with tensor_parallel_degree = 2; possible: 1"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_say_what_would(
    parallelism: str, world_size: int, expected: str, tmp_path: Path
) -> None:
    found = errors(tmp_path, f"{MINIMAL}\n[parallelism]\n{parallelism}\n", world_size=world_size)
    assert any(expected in line for line in found), found


def test_configuration_imports_no_torch(tmp_path: Path) -> None:
    folder = REPO / "titan_mi100" / "config"
    modules = ", ".join(f"titan_mi100.config.{file.stem}" for file in folder.glob("[!_]*.py"))
    assert modules.count(",") >= 6
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
    # a module of that name that fails stands in for torch: the trainer must come to its answer without it
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    for module in ("titan_mi100.train", "titan_mi100.config.load"):
        command = [sys.executable, "-m", module]
        shown = subprocess.run(
            [*command, "--help", "all"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert shown.returncode == 0
        for key in ("--training.seq_len", "--checkpoint.initial_load_path", "int = 1024", "tokens per packed row",
                    "(disabled | async)"):  # fmt: skip
            assert key in shown.stdout
        wrong = subprocess.run(
            [*command, "--training.stepz", "1"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert wrong.returncode == 2
        assert "did you mean --training.steps?" in wrong.stderr and "Traceback" not in wrong.stderr
