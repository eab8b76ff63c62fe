"""What scripts/evaluate.sh and workshop/harness.py promise, with stand-ins for Python, the export and lm_eval."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from test_scripts import REPO, STUB, Checkout, write_executable

LM_EVAL = (
    f"""\
elif argv[1] == "titan_mi100.workshop.harness":  # the real one, but what it starts is the stub
    sys.path += {[str(REPO), *(path for path in sys.path if path.endswith("-packages"))]!r}
    sys.path.append(os.environ["STUB_PACKAGES"])
    sys.executable, sys.argv = sys.argv[0], argv[1:]
    runpy.run_module("titan_mi100.workshop.harness", run_name="__main__", alter_sys=True)
"""
    + """\
elif argv[0] == "-I":  # the child in which transformers would read the folder's files: nothing is wrong with them
    for question in sys.stdin:
        print('{"found": "", "refused": "", "full": false}', flush=True)
elif argv[1:4] == ["titan_mi100", "convert", "dcp-to-hf"]:
    log("export", argv[3:])
    if code := int(os.environ.get("STUB_EXPORT_CODE", "0")):
        sys.exit(code)
    output = argv[argv.index("--output_dir") + 1]
    os.mkdir(output)
    open(os.path.join(output, "config.json"), "w").close()
elif argv[1] == "lm_eval":
    log("lm_eval", [*argv[2:], os.getcwd(), os.environ.get("HF_HUB_OFFLINE"), os.environ.get("HF_DATASETS_OFFLINE")])
    print("|Tasks|Value|")
    print(os.environ.get("STUB_LM_EVAL_SAYS", ""), file=sys.stderr)
    sys.exit(int(os.environ.get("STUB_LM_EVAL_CODE", "0")))
elif argv[1] == "venv":
"""
)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    shutil.copy(REPO / "scripts" / "evaluate.sh", checkout.folder / "scripts")
    (checkout.folder / "titan_mi100/workshop").mkdir()
    shutil.copy(REPO / "titan_mi100/workshop/harness.py", checkout.folder / "titan_mi100/workshop")
    write_executable(tmp_path / "packages" / "lm_eval.py", "")
    checkout.environ["STUB_PACKAGES"] = str(tmp_path / "packages")
    stub = STUB.replace('elif argv[1] == "venv":\n', LM_EVAL)
    assert stub != STUB
    for name in ("python3", "python"):
        write_executable(tmp_path / "bin" / name, stub)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        checkout.environ.pop(name, None)
    return checkout


def folder_with(checkout: Checkout, name: str, *files: str) -> Path:
    (folder := checkout.elsewhere / name).mkdir()
    for file in ("config.json", *files):
        (folder / file).touch()
    return folder


@pytest.fixture
def hf_folder(checkout: Checkout) -> Path:
    return folder_with(checkout, "a model", "model.safetensors")


@pytest.fixture
def dcp_folder(checkout: Checkout) -> Path:
    return folder_with(checkout, "step-5", ".metadata")


def evaluate(checkout: Checkout, *arguments: object, **variables: str):
    return checkout.run(str(checkout.folder / "scripts" / "evaluate.sh"), *map(str, arguments), **variables)


def the_evaluation(checkout: Checkout) -> tuple[list[str], str, str | None, str | None]:
    """Arguments of lm_eval in the one call that happened, its folder, and whether it was told to stay offline."""
    (([*arguments, folder, offline, data_offline], _),) = checkout.calls("lm_eval")
    return arguments, str(folder), offline, data_offline


def test_an_hf_folder_is_evaluated_as_it_is_and_the_results_are_kept(checkout: Checkout, hf_folder: Path) -> None:
    result = evaluate(checkout, hf_folder.name, "gsm8k,hellaswag", "--limit", "9")
    assert result.returncode == 0, result.stderr
    arguments, folder, *offline = the_evaluation(checkout)
    assert arguments == [
        *("--model", "hf", "--model_args", f"pretrained={hf_folder}", "--tasks", "gsm8k,hellaswag"),
        *("--output_path", f"{hf_folder}-eval", "--limit", "9"),
    ]
    assert folder == str(checkout.elsewhere) and offline == [None, None]
    assert "|Tasks|Value|" in result.stdout
    assert f"{hf_folder}-eval" in result.stderr
    assert checkout.calls("export") == []


def test_a_checkpoint_is_exported_once_and_again_refused_when_it_has_changed(
    checkout: Checkout, dcp_folder: Path
) -> None:
    for _ in range(2):
        assert evaluate(checkout, dcp_folder, "gsm8k").returncode == 0
    (arguments, _) = checkout.calls("export")[0]
    assert len(checkout.calls("export")) == 1
    assert arguments[1:] == ["--input_dir", str(dcp_folder), "--output_dir", f"{dcp_folder}-hf"]
    assert {call[0][3] for call in checkout.calls("lm_eval")} == {f"pretrained={dcp_folder}-hf"}
    for file, seconds in ((dcp_folder, 1), (f"{dcp_folder}-hf/config.json", 2), (dcp_folder / ".metadata", 3)):
        os.utime(file, (seconds, seconds))
    result = evaluate(checkout, dcp_folder, "gsm8k")
    assert result.returncode == 2
    assert "remove it" in result.stderr


@pytest.mark.parametrize("code", ["1", "2"])
def test_an_export_that_fails_ends_it_with_its_code(checkout: Checkout, dcp_folder: Path, code: str) -> None:
    result = evaluate(checkout, dcp_folder, "gsm8k", STUB_EXPORT_CODE=code)
    assert result.returncode == int(code)
    assert checkout.calls("lm_eval") == []


@pytest.mark.parametrize("name", ["tasks", "tasks/own.yaml"])
def test_local_tasks_are_read_from_their_folder_and_offline(checkout: Checkout, hf_folder: Path, name: str) -> None:
    tasks = checkout.elsewhere / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").touch()
    result = evaluate(checkout, hf_folder.name, name, "--output_path", "kept", "--model_args", "a=1", "b=2", "-w")
    assert result.returncode == 0, result.stderr
    arguments, folder, *offline = the_evaluation(checkout)
    assert arguments == [
        *("--model", "hf", "--model_args", f"pretrained={hf_folder},a=1,b=2"),
        *("--tasks", str(checkout.elsewhere / name), "--output_path", str(checkout.elsewhere / "kept")),
        *("--include_path", str(tasks), "-w"),
    ]
    assert folder == str(tasks) and offline == ["1", "1"]


def test_lm_evals_failures_have_codes(checkout: Checkout, hf_folder: Path) -> None:
    for own, code in (("1", 1), ("2", 2), ("3", 1)):
        result = evaluate(checkout, hf_folder, "no_such", STUB_LM_EVAL_CODE=own, STUB_LM_EVAL_SAYS="out of memory")
        assert result.returncode == code
        *_, said, last = result.stderr.splitlines()
        assert "out of memory" in said and f"exit code {own}" in last


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--help"),
        (["model"], "--help"),
        (["model", "--limit", "3"], "--help"),
        (["model", "no/such.yaml"], "no/such.yaml: no such file"),
        (["a,b", "gsm8k"], "comma"),
        (["model", "gsm8k", "--output_path"], "--output_path: expected one argument"),
    ],
)
def test_mistakes_in_the_arguments_start_nothing(checkout: Checkout, arguments: list[str], said: str) -> None:
    result = evaluate(checkout, *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert checkout.calls("lm_eval") == checkout.calls("export") == []


def test_help_needs_nothing(checkout: Checkout) -> None:
    result = evaluate(checkout, "--help", STUB_VERDICT="no torch")
    assert result.returncode == 0
    assert "scripts/evaluate.sh CKPT TASKS" in result.stdout and "import os" not in result.stdout


def test_an_environment_without_lm_eval_gets_the_remedy(checkout: Checkout, hf_folder: Path) -> None:
    result = evaluate(checkout, hf_folder, "gsm8k", STUB_VERDICT="missing lm_eval")
    assert result.returncode == 1
    assert "[eval]" in result.stderr


def test_an_adapter_is_refused_with_the_way_to_merge_it(checkout: Checkout, dcp_folder: Path) -> None:
    (dcp_folder / "manifest.json").write_text('{"lora": {"rank": 4}}')
    result = evaluate(checkout, dcp_folder, "gsm8k")
    assert result.returncode == 2
    assert "titan-mi100 convert merge-lora" in result.stderr and checkout.calls("export") == []


def test_an_installed_package_without_lm_eval_names_the_extra(checkout: Checkout, hf_folder: Path) -> None:
    (Path(checkout.environ["STUB_PACKAGES"]) / "lm_eval.py").unlink()
    (checkout.elsewhere / "lm_eval").mkdir()  # a folder of that name is no package
    result = evaluate(checkout, hf_folder, "gsm8k")
    assert result.returncode == 2
    assert "pip install 'lm-eval[hf]'" in result.stderr
