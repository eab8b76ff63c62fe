"""The console command, the configs by name, and what a wheel holds: all that works outside of the checkout."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ASSETS, REPO

from titan_mi100 import __main__ as console
from titan_mi100.config import bundled
from titan_mi100.config.load import load_config
from titan_mi100.doors import COMMANDS, WORKSHOP, door
from titan_mi100.errors import UserError

WORDS = list(console.COMMANDS)


def test_a_limit_of_memory_that_is_too_low_for_torch_is_one_message() -> None:
    command = [sys.executable, "-m", "titan_mi100", "generate", "--help"]

    def ends(mebibytes: int) -> subprocess.CompletedProcess[str]:
        limits = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({mebibytes << 20},) * 2)"
        program = f"{limits}; os.execv(sys.executable, sys.argv[1:])"
        return subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)

    low = ends(250)
    assert low.returncode == 6, low.stderr
    assert low.stderr.startswith("ERROR out of memory, which is limited to 250 MiB here; raise the limit: ulimit -v (")
    assert low.stderr.count("\n") == 1
    assert ends(1 << 14).stdout.startswith("usage: titan-mi100 generate")  # the remedy


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    found = subprocess.run([sys.executable, "-m", "titan_mi100", *arguments], capture_output=True, text=True)
    assert found.returncode == code, found.stderr
    return found


def test_every_word_is_a_module_with_a_main_and_pyproject_installs_the_command() -> None:
    for name, (module, what) in COMMANDS.items():
        assert find_spec(f"titan_mi100.{module.partition(':')[0]}"), module
        assert what and len(f"{name:<20}{what}") < 110
    text = (REPO / "pyproject.toml").read_text()
    assert 'titan-mi100 = "titan_mi100.__main__:console"' in text and callable(console.console)


@pytest.mark.parametrize("name", [name for name in WORDS if name != "train"])
def test_a_word_s_help_is_its_module_s_under_the_word_s_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["titan-mi100", *name.split(), "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code = console.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr().out
    assert code == 0 and f"titan-mi100 {name}" in " ".join(said.split())
    assert len(said.splitlines()) <= 40 and f"\nexample:\n  titan-mi100 {name} " in said


def test_help_versions_and_unknown_words() -> None:
    said = run().stdout
    assert all(f"  {name} " in said for name in console.COMMANDS) and said == run("--help").stdout
    assert "hf-to-dcp" in run("convert").stdout and "generate" not in run("convert").stdout
    versions = run("--version").stdout
    assert f"torch {version('torch')}" in versions and f"Python {sys.version.split()[0]}" in versions
    assert run("trian", code=2).stderr == "ERROR titan-mi100: 'trian' is not a command; did you mean train?\n"
    assert "did you mean convert dcp-to-hf?" in run("convert", "dcp_to_hf", code=2).stderr
    assert "--help lists them" in run("\x1b[31m", code=2).stderr


def test_train_is_the_launcher_with_signals_blocked_before_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import signal, sys, types\n"
        "from titan_mi100 import __main__ as console\n"
        "def main(arguments):\n"
        "    print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), arguments, sys.argv[0])\n"
        "    return 7\n"
        "sys.modules['titan_mi100.launch.launcher'] = types.SimpleNamespace(main=main)\n"
        "sys.argv = ['titan-mi100', 'train', '--a.b', 'c']\n"
        "sys.exit(console.console())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    blocked = sorted(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)))
    assert (found.returncode, found.stdout) == (7, f"{blocked} ['--a.b', 'c'] titan-mi100 train\n"), found.stderr
    said = run("train", "--help").stdout
    assert said.startswith("usage: ./run_train.sh") and len(said.splitlines()) <= 40
    assert "\nexample:\n  titan-mi100 train " in said and "--lora.rank" not in said
    of_lora = run("train", "--help", "lora").stdout
    assert "\n[lora]\n  --lora.rank" in of_lora and of_lora.count("\n[") == 1
    assert "no such section; use all, job" in run("train", "--help", "loar", code=2).stderr
    refused = run("train", "--job.dump_folder", str(tmp_path), "--training.stepps", "1", code=2)
    assert "did you mean --training.steps?" in refused.stderr and "run_train" not in refused.stderr


def test_a_bundled_config_is_found_by_its_name_where_no_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled.FOLDER == REPO / "train_configs"  # not by the link: messages name the place to edit
    (tmp_path / "debug").mkdir()  # such as a run's folder: it hides nothing
    for name in ("debug", "debug.toml"):
        config = load_config(["--job.config_file", name])
        assert config.training.steps == 1000 and config.data.path == (str(bundled.FOLDER / "debug/additions.jsonl"),)
        assert config.job.dump_folder == str(tmp_path / "outputs")
        assert config.notes == (f"no {name} is here: settings from the bundled {bundled.FOLDER / 'debug.toml'}",)
    (tmp_path / "mine.toml").write_text('base = "debug.toml"\n[training]\nseed = 7\n')
    training = load_config(["--job.config_file", "mine.toml"]).training
    assert (training.seed, training.steps) == (7, 1000)
    (tmp_path / "debug.toml").write_text('base = "finetune.toml"\n[training]\nepochs = 5\n[model]\nflavor = "debug"\n')
    for name, epochs in (("debug.toml", 5), ("debug", 0), ("mine.toml", 5)):  # a file that is here comes first
        assert load_config(["--job.config_file", name], with_files=False).training.epochs == epochs
    for name, said in (
        ("train_configs/debug.toml", "no such file; did you mean the bundled debug?"),
        ("qwen3_0.6b_stf", "no such file; did you mean the bundled qwen3_0.6b_sft?"),
        ("nowhere.toml", "no such file"),
    ):
        with pytest.raises(UserError) as error:
            load_config(["--job.config_file", name])
        assert str(error.value).startswith(f"{name}: {said}")


def test_configs_lists_and_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert bundled.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in bundled.names()) and "two cards, FSDP2: the baseline" in listed
    for name in ("debug", "debug.toml"):
        assert bundled.main([name]) == 0
        assert capsys.readouterr().out == (REPO / "train_configs" / "debug.toml").read_text()
    assert bundled.main(["../debug"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.fixture(scope="module")
def without_workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package, but for its workshop."""
    folder = tmp_path_factory.mktemp("trainer")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # torch and all else from here, but not this checkout: a folder that a .pth names has its own .pth files unread
    (packages / "here.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    ignored = shutil.ignore_patterns("__pycache__", "workshop")
    shutil.copytree(REPO / "titan_mi100", packages / "titan_mi100", ignore=ignored)
    return folder


def call_without_workshop(folder: Path, *words: str, code: int = 0) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TITAN_"))}
    command = [str(folder / "venv" / "bin" / "python"), "-m", "titan_mi100", *words]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == code, found.stderr
    return found.stdout + found.stderr


STUDENT = ("--job.config_file", "debug")


@pytest.mark.parametrize(
    "words",
    [
        *([*name.split(), "x"] for name, (module, _) in COMMANDS.items() if module.startswith("workshop")),
        ["config", "new", "--from", "README.md", "--data", "x"], ["inspect", *STUDENT, "--html", "x.html"],
        ["plan", *STUDENT, "--rehearse", "2"],
        ["teach", *STUDENT, "--ids", "x.jsonl"], ["teach", *STUDENT, "--from_vllm", "x.jsonl", "--out", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_needs_the_workshop_says_so_where_it_is_missing(words: list[str], without_workshop: Path) -> None:
    said = call_without_workshop(without_workshop, *words, code=2)
    assert "needs titan_mi100/workshop, which is missing; install the whole package" in said
    assert said.count("\n") == 1


def test_messages_about_names_of_other_trainers_do_without_the_workshop(without_workshop: Path) -> None:
    words = ("plan", *STUDENT, "--num_train_epochs", "3", "--lr_scheduler.decay_type", "cosine_with_restarts")
    said = call_without_workshop(without_workshop, *words, code=2)
    assert "'--num_train_epochs' is not an option" in said and "must be one of: cosine, linear, sqrt" in said
    assert "TRL" not in said and said.count("\n") == 2


def test_every_door_leads_to_a_function() -> None:
    for words in (*COMMANDS, *WORKSHOP):
        assert callable(door(words)), words


@pytest.mark.full
def test_the_trainer_trains_generates_converts_and_plans_without_the_workshop(without_workshop: Path) -> None:
    def call(*words: str) -> str:
        return call_without_workshop(without_workshop, *words)

    run = ("--job.run_folder", "run", "--training.steps", "2", "--checkpoint.export_hf", "true")
    assert "step 2/2" in call("train", "--nproc_per_node", "2", *STUDENT, *run, "--profiling.enable_profiling", "true")
    assert call("generate", "--model", "run/hf-step-2", "--prompt", "1 + 1?", "--max_new_tokens", "4")
    call("convert", "dcp-to-hf", "--input_dir", "run/checkpoint/step-2", "--output_dir", "hf")
    assert "fits" in call("plan", *STUDENT) and "document" in call("inspect", *STUDENT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("titan_mi100", "train_configs", "tests/assets"):
        shutil.copytree(REPO / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(REPO / name, folder)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "-w", folder / "dist", folder], check=True, capture_output=True, timeout=120)
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_holds_every_module_every_config_and_the_data_of_debug_toml(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(REPO)) for path in (REPO / "titan_mi100").rglob("*.py")}
    configs = {f"titan_mi100/train_configs/{path.name}" for path in (REPO / "train_configs").glob("*.[tj]*")}
    data = {"additions.jsonl", "forgetful.jsonl", "pairs.jsonl"}
    data |= {*(f"tokenizer/{path.name}" for path in (ASSETS / "tokenizer").iterdir())}
    modules |= {"titan_mi100/config/examples.txt", "titan_mi100/data/columns.txt"}
    modules |= {f"titan_mi100/workshop/other_trainers.{ending}" for ending in ("txt", "toml")}
    modules |= {"titan_mi100/workshop/pages/style.css"}
    assert packed == modules | configs | {f"titan_mi100/train_configs/debug/{name}" for name in data}


@pytest.mark.full
def test_an_installed_wheel_trains_plans_and_converts_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # torch and all else from here, but not this checkout: a folder that a .pth names has its own .pth files unread
    (packages / "here.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    python, empty = tmp_path / "venv" / "bin" / "python", tmp_path / "empty"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([python, *install], check=True, capture_output=True)
    empty.mkdir()
    (empty / "titan_mi100").mkdir()  # a folder of that name is not the package
    if sys.version_info >= (3, 11):  # before, -m looks into the current folder first
        (empty / "titan_mi100" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TITAN_"))}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    before = {path for path in (packages / "titan_mi100").rglob("*") if "__pycache__" not in path.parts}

    def call(*words: str) -> str:
        command = [str(tmp_path / "venv" / "bin" / "titan-mi100"), *words]
        found = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr
        return found.stdout + found.stderr

    assert str(packages / "titan_mi100") in call("--version")
    train = ("train", "--nproc_per_node", "2", "--job.run_folder", "mine", "--checkpoint.export_hf", "true")
    said = call(*train, "--training.steps", "2")
    assert f"settings from {packages}/titan_mi100/train_configs/debug.toml" in said and "step 2/2" in said
    said = call(*train, "--training.steps", "3", "--job.config_file", "debug")
    assert "resumed from" in said and "step 3/3" in said
    assert json.loads((empty / "mine" / "run_state.json").read_text())["exit_code"] == 0
    assert "fits:" in call("plan", "--job.config_file", "qwen3_0.6b_fsdp2")
    assert "fits:" in call("plan", "--rehearse", "2", "--job.config_file", "debug")
    assert "rows of 256" in call("inspect")
    call("convert", "dcp-to-hf", "--input_dir", "mine/checkpoint/step-3", "--output_dir", "hf", "--verify", "bytes")
    call("convert", "hf-to-dcp", "--input_dir", "hf", "--output_dir", "dcp")
    assert "model_values: 886144" in call("convert", "inspect-dcp", "dcp")
    assert "qwen3_0.6b_sft" in call("configs")
    assert call("generate", "--model", "hf", "--prompt", "1 + 1?", "--max_new_tokens", "2")
    after = {path for path in (packages / "titan_mi100").rglob("*") if "__pycache__" not in path.parts}
    assert before == after and {path.name for path in empty.iterdir()} == {"titan_mi100", "mine", "hf", "dcp"}
