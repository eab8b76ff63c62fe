"""Every command and config that README.md, docs/ and train_configs/README.md show, and every link in them.

By default each command is parsed by its own parser and each config is loaded and checked. With --full each command
that is not marked as not run is run, in a folder with the names that all pages use (see `prepared`).
"""

import ast
import dataclasses
import functools
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ASSETS, job_environment
from doc_commands import SHELL, check, program_of
from doc_pages import LANGUAGES, MARK, REPO, Command, Page, pages
from forked import ForkServer

from titan_mi100 import __main__ as console
from titan_mi100.config.as_text import our_keys
from titan_mi100.config.check import ALTERNATIVES
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import DataConfig
from titan_mi100.config.toml_file import tomllib
from titan_mi100.config.unknown import LAUNCHER_OPTIONS
from titan_mi100.data.answers import PAIRS
from titan_mi100.data.columns import Findings
from titan_mi100.data.files import read_records
from titan_mi100.data.formats import choose_format, parse_record
from titan_mi100.errors import UserError
from titan_mi100.launch import launcher as launch
from titan_mi100.shapes.families import PRESETS, to_hf_config

PAGES = pages()
every_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])

# What a `toml` block that is a part of a config stands in.
BASE = {
    "model": {"flavor": "debug", "tokenizer_path": "Qwen3-0.6B"},
    "data": {"path": "train.jsonl", "validation_fraction": 0.05},
    "training": {"seq_len": 128, "steps": 10},
}
# What a command that trains gets besides its own options, so that it ends soon and fits the tiny model.
SMALL = {
    "training.steps": "2", "training.seq_len": "512", "training.local_batch_size": "1",
    "training.gradient_accumulation_steps": "1", "lr_scheduler.warmup_steps": "-1", "model.flavor": "",
}  # fmt: skip
_INSTEAD = ("training.epochs", "training.target_tokens_per_step")  # that SMALL replaces
_CHECKOUT = ("run_train.sh", "scripts", "checkpoint_tools", "certificates", "tests", "docs")


def make_checkout(folder: Path) -> None:
    """The checkout's files, as links, and the data files and the config that all pages name; fewer rows of debug's."""
    for name in _CHECKOUT:
        (folder / name).symlink_to(REPO / name)
    (folder / "train_configs" / "debug").mkdir(parents=True)
    for path in [*(REPO / "train_configs").glob("*.*"), *(REPO / "train_configs" / "debug").iterdir()]:
        copy = folder / path.relative_to(REPO)
        if path.suffix == ".jsonl":
            copy.write_text("".join(path.read_text().splitlines(keepends=True)[::10]))
        else:
            copy.symlink_to(path)
    rows = (ASSETS / "arithmetic.jsonl").read_text().splitlines(keepends=True)
    (folder / "test.jsonl").write_text("".join(rows[:4]))
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in map(json.loads, rows)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    start, data = 'initial_load_path = "Qwen3-0.6B"', 'path = "train.jsonl"'
    (folder / "X.toml").write_text(
        f'base = "train_configs/finetune.toml"\n[checkpoint]\n{start}\n[data]\n{data}\nvalidation_fraction = 0.1\n'
    )


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands are parsed: models' folders have the real shapes, and no weights."""
    folder = tmp_path_factory.mktemp("parsing")
    make_checkout(folder)
    for name, spec in {
        **{f"Qwen3-{flavor}": spec for flavor, spec in PRESETS.items()},
        "tiny-8b": PRESETS["8B"],
    }.items():
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(to_hf_config(spec)))
    (folder / "outputs" / "mine").mkdir(parents=True)
    for copy in ("outputs/mine/config.toml", "mine.toml"):  # a run leaves the one, `config new` the other
        shutil.copy(folder / "X.toml", folder / copy)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands are run.

    `Qwen3-0.6B` and `my-model` are tiny models of random weights with a chat template; `outputs/mine` is a run of two
    steps with a checkpoint and `hf-step-2`. They stand for those of any step that a page names.
    """
    folder = tmp_path_factory.mktemp("prepared")
    make_checkout(folder)
    end = ["--checkpoint.export_hf", "true", "--job.run_folder", "random"]
    assert run_command(Command("a model", ["./run_train.sh", *end], {}, "", False), folder) == ""
    (folder / "random" / "hf-step-2").rename(folder / "Qwen3-0.6B")
    shutil.rmtree(folder / "random")
    words = ["./run_train.sh", "--checkpoint.initial_load_path", "Qwen3-0.6B", "--data.path", "train.jsonl"]
    words += ["--job.run_folder", "outputs/mine"]
    assert run_command(Command("the prepared run", words, {}, "", False), folder) == ""
    for export in ("my-model", "outputs/mine/hf-step-2"):
        shutil.copytree(folder / "Qwen3-0.6B", folder / export)
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text("Some text.")
    (folder / "corpus.jsonl").write_text('{"text": "A text."}\n' * 200)
    return folder


@functools.cache
def _server() -> ForkServer:
    """One that has also imported what compares an export with its source."""
    return ForkServer(job_environment(), "transformers.models.qwen3.modeling_qwen3", "peft")


def run_command(command: Command, folder: Path) -> str:
    """Run it as the page shows it, tiny; what went wrong, or "".

    The launcher's own work is left out: its arguments are parsed, and the trainer's processes are forked from one that
    has imported torch; one process where the command names no number.
    """
    words = [_with_its_step(word, folder) for word in command.words]
    if words[1:3] == ["config", "new"]:  # its run folder must be new
        shutil.rmtree(folder / "outputs/mine", ignore_errors=True)
    if words[0] in SHELL or (words[0].endswith(".sh") and "run_train.sh" not in words[0]):
        done = subprocess.run(words, cwd=folder, env=job_environment(), capture_output=True, text=True, timeout=600)
        code, output, errors = done.returncode, done.stdout, done.stderr
    else:
        kind, name, arguments = program_of(words)
        processes, environment = 1, {**job_environment(), **command.variables}
        if kind == "launch" and {"--help", "-h"} & set(arguments):
            name = "config.load"
        elif kind == "launch" and any(word.partition("=")[0] == "--rehearse" for word in arguments):
            name = "workshop.rehearse"
        elif kind == "launch":
            processes, settings, _ = launch.parse(arguments, command.variables.get("NGPU", "1"))
            name, arguments = "train", _small(settings)
        start = [name] if kind == "script" else ["-m", f"titan_mi100.{name}"]
        if words[0] == "titan-mi100" and kind == "module":
            start, arguments = ["-m", "titan_mi100"], words[1:]
        code, output, errors = _server().run([*start, *arguments], processes, environment, folder, 600)
    if command.output:
        (folder / command.output).write_text(output)
    return f"{command.where}\nended with {code}:\n{output[-1500:]}{errors[-3000:]}" if code else ""


def _with_its_step(word: str, folder: Path) -> str:
    """A path with step N, or a step that the tiny run does not reach, with its last step instead."""
    if not re.search(r"\bstep-(\d+|N\b)", word) or (folder / word).exists():
        return word
    found = [path.relative_to(folder).as_posix() for path in folder.glob(re.sub(r"\bstep-(\d+|N\b)", "step-*", word))]
    steps = {int(step[1]): path for path in found if (step := re.search(r"\bstep-(\d+)(?:/|$)", path))}
    return steps[max(steps)] if steps else word


def _small(settings: list[str]) -> list[str]:
    """The settings of a training command, with SMALL in the place of its own. A few steps may stay."""
    few = re.search(r"--training\.steps[ =](\d)(?: |$)", " ".join(settings))
    small = {**SMALL, **({"training.steps": few[1]} if few else {})}
    small |= {"model.flavor": "qwen3.5-debug"} if "qwen3.5-debug" in settings else {}  # it has a draft head
    kept, is_ours = [], False
    for word in settings:
        if word.startswith("--"):
            is_ours = word.removeprefix("--").partition("=")[0] in (*small, *_INSTEAD)
        if not is_ours:
            kept.append(word)
    named, own = {word.partition("=")[0] for word in kept}, {"--job.config_file", "--data.path"}
    if "train_configs/debug.toml" in kept or not named & {*own, "--checkpoint.initial_load_path"}:
        small["validation.prompt_tokens"] = "8"  # debug.toml's three answers are long otherwise
    starts = "--checkpoint.initial_load_path" in named
    return [*kept, *(f"--{key}={value}" for key, value in small.items() if value or starts)]


@every_page
def test_every_block_has_a_form_that_is_checked(page: Page) -> None:
    for block in page.blocks:
        assert block.language in LANGUAGES, f"{page.name}:{block.line}: a block of {block.language}; see doc_pages.py"
    fences = len(re.findall(r"^\s*(?:```|~~~)", page.text, re.M))
    assert fences == 2 * len(page.blocks), f"{page.name}: a fence is not closed, or is not ```"
    marked = [block for block in page.blocks if block.is_marked]
    assert page.text.count(MARK) == len(marked), f"{page.name}: a mark is not <!-- {MARK}: WHY --> above a block"
    assert {block.language for block in marked} <= {"sh", "toml"}


# how a line begins that shows a command, also behind a prompt and variables
_STARTS = re.compile(
    r"^(?:\w*\$ )?(?:\w+=\S+ )*(?:\./)?"
    r"(?:python3? |titan-mi100 |run_train\.sh|scripts/\S+\.sh|pip install|hf |torchrun |srun |sbatch )",
    re.M,
)


@every_page
def test_commands_stand_in_sh_blocks(page: Page) -> None:
    shown = [block for block in page.blocks if block.language in ("", "text") and "\nERROR " not in block.text]
    found = [block.line for block in shown if _STARTS.search(block.text)]
    assert not found, f"{page.name}: commands in the blocks of output at lines {found}; put them into sh blocks"


@every_page
def test_each_command_is_taken_by_its_own_parser(
    page: Page, parsing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(parsing)
    wrong = [
        f"{command.where}\n{problem}" for command in page.commands() if (problem := check(command, monkeypatch, capsys))
    ]
    assert not wrong, "\n\n".join(wrong)


_STANDS_FOR_ANOTHER = re.compile(r"[A-Z]{1,8}(_[A-Z]+)*(:[A-Z]+)?|\.\.\.|\[.*|.*\]|step-N|.*-N\b")
_NO_WHOLE = ("required", "expected ", "names no checkpoint", "needs a value", "is not set")


def whole(command: Command) -> bool:
    """Whether it can be typed as it stands."""
    return not any(_STANDS_FOR_ANOTHER.fullmatch(word.rpartition("/")[2]) for word in command.words)


@every_page
def test_each_command_inside_a_sentence_has_options_that_exist(
    page: Page, parsing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence may name a command with some of its words; those that it has are taken."""
    monkeypatch.chdir(parsing)
    for command in page.inline_commands():
        program = program_of(command.words)
        if program.kind == "script":
            text = (parsing / program.name.removeprefix("./")).read_text()
            assert all(word in text for word in program.arguments if word.startswith("--")), command.where
        elif whole(command) and program.name != "__main__":
            problem = check(command, monkeypatch, capsys)
            assert not problem or any(words in problem for words in _NO_WHOLE), f"{command.where}\n{problem}"
        for word in program.arguments:
            known = [*LAUNCHER_OPTIONS, *our_keys(), "help", "rehearse"] if program.kind == "launch" else []
            assert not known or not word.startswith("--") or word[2:].partition("=")[0] in known, command.where


@every_page
def test_each_mistake_has_the_message_that_is_shown(
    page: Page, parsing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(parsing)
    for command, errors in page.mistakes():
        said = check(command, monkeypatch, capsys)
        assert [error for error in errors if error not in said] == [], (
            f"{command.where}\nis answered: {said or 'nothing'}"
        )


@every_page
def test_each_config_is_loaded_and_checked(page: Page, parsing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(parsing)
    for block in page.blocks:
        if block.language == "toml" and not block.is_marked:
            where = f"{page.name}:{block.line}"
            try:
                load_config(["--job.config_file", str(_config_of(block.text, parsing))], None, with_files=False)
            except (UserError, tomllib.TOMLDecodeError) as error:
                pytest.fail(f"{where}: {error}")


def _config_of(text: str, folder: Path) -> Path:
    """A file with the block: whole if it names a base or a model, else over BASE without what it says otherwise."""
    values, file = tomllib.loads(text), folder / "block.toml"
    if "base" in values or values.get("model", {}).get("flavor") or "initial_load_path" in values.get("checkpoint", {}):
        file.write_text(text)
        return file
    base = {section: dict(keys) for section, keys in BASE.items()}
    for pair in ALTERNATIVES:
        for (section, key), (other_section, other) in (pair, pair[::-1]):
            if key in values.get(section, {}):
                base.get(other_section, {}).pop(other, None)
    lines = []
    for section, keys in base.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    (folder / "block_base.toml").write_text("\n".join(lines))
    file.write_text(f'base = "block_base.toml"\n{text}')
    return file


@every_page
def test_rows_of_data_can_be_read(page: Page, tmp_path: Path) -> None:
    for block in page.blocks:
        if block.language == "jsonl":
            (path := tmp_path / "rows.jsonl").write_text(block.text, encoding="utf-8")
            form = choose_format(str(path), DataConfig(), PAIRS if '"rejected"' in block.text else "")
            for record in read_records(str(path)):
                form.read_row(parse_record(record), frozenset(), Findings())


@every_page
def test_files_of_other_trainers_can_be_parsed(page: Page) -> None:
    for block in page.blocks:
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            pytest.importorskip("yaml").safe_load(block.text)


@every_page
def test_links_lead_somewhere(page: Page) -> None:
    assert not page.broken_links()


@every_page
def test_no_page_holds_a_path_of_one_machine(page: Page) -> None:
    found = page.machine_paths()
    assert not found, f"{page.name}: {found}"


def test_readme_is_short_and_its_table_is_the_planners() -> None:
    """One screen of text. No figure of the table is written by hand: scripts/what_fits.py prints it."""
    text, planned = (
        Page(REPO / "README.md").text,
        "\n".join(runpy.run_path(str(REPO / "scripts/what_fits.py"))["table"]()),
    )
    assert planned in text, "README.md: put in what scripts/what_fits.py prints"
    rest = text.replace(planned, "")
    assert (len(rest.splitlines()) <= 110, len(rest.encode()) <= 7000) == (True, True)


def test_the_index_names_every_page() -> None:
    index = Page(REPO / "docs" / "README.md")
    named = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links()}
    missed = {page.name for page in PAGES if page.path not in named} - {index.name}
    assert not missed, f"docs/README.md has no line for {missed}"


def test_the_examples_of_help_are_taken_by_their_parsers(
    parsing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(parsing)
    lines = (REPO / "titan_mi100" / "config" / "examples.txt").read_text().splitlines()
    (page := Page(parsing / "page.md")).path.write_text("\n".join(["```sh", *lines, "```\n"]))
    assert [check(command, monkeypatch, capsys) for command in page.commands()] == [""] * len(console.COMMANDS)


# Commands, and what their check must say.
WRONG = {
    "titan-mi100 generate --model my-model --prompt x --sed 1": "--sed",
    "titan-mi100 generate --prompt x": "--model",
    "python -m titan_mi100.nothing --help": "nothing",
    "python checkpoint_tools/nothing.py": "nothing.py",
    "titan-mi100 convert hf-to-nothing": "hf-to-nothing",
    "./run_train.sh --job.config_file train_configs/nothing.toml": "nothing.toml",
    "./run_train.sh --training.step 3": "--training.step",
    "./run_train.sh --nproc_per_node 3 --parallelism.pipeline_parallel_degree 2": "pipeline_parallel_degree",
    "NGPU=2 torchrun --nproc_per_node 2 -m titan_mi100.train --training.sequence_len 3": "sequence_len",
    "titan-mi100 plan --gpus 2 --job.config_file qwen3_0.6b_sft.toml --lora.ranks 3": "--lora.ranks",
    "titan-mi100 evaluate harness my-model": "names no checkpoint and tasks",
    "ls && runtrain.sh": "runtrain.sh",
    "pip install something": "pip",
    "cat 'unfinished": "No closing quotation",
}


@pytest.mark.parametrize(("line", "said"), WRONG.items(), ids=WRONG)
def test_a_wrong_command_is_found(
    line: str, said: str, parsing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(parsing)
    (tmp_path / "page.md").write_text(f"# Page\n```sh\n# a comment\n{line}  # and another | ' one\n```\n")
    try:
        problems = [check(command, monkeypatch, capsys) for command in Page(tmp_path / "page.md").commands()]
    except ValueError as error:
        problems = [str(error)]
    assert said in problems[-1] and not any(problems[:-1])


def test_wrong_links_paths_and_configs_are_found(parsing: Path, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("## A `b` (c): d-e\n## Twice\n## Twice\n")
    page = Page(tmp_path / "page.md")
    good = "[x](other.md#a-b-c-d-e) [y](other.md#twice-1) [z](#page) [w](https://a.b/c#d) `[v](code.md)` ![p](p.png)"
    bad = '[x](gone.md) [y](other.md#thrice) <img src="q.png">\n```\n[u](output.md)\n```\n'
    page.path.write_text(f"# Page\n{good}\n{bad}\nsee /home/me/x, ~/.cache and https://a.b/home/c\n")
    assert [wrong.partition(":")[0] for wrong in page.broken_links()] == [
        "p.png",
        "gone.md",
        "other.md#thrice",
        "q.png",
    ]
    assert page.machine_paths() == ["/home/me/x,"]
    for text in ("[training]\nseq_length = 3", "[data]\nweights = [1]\nrepeats = [1]", 'base = "nothing.toml"'):
        with pytest.raises(UserError):
            load_config(["--job.config_file", str(_config_of(text, parsing))], None, with_files=False)


def test_a_mark_is_for_the_block_below_it(tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md")
    page.path.write_text(
        f"<!-- {MARK}: GPUs -->\n```sh\na\nb \\\n  c\n```\n```sh\n# {MARK}: it is run\nb > f\nX=1 c | d\n```\n"
    )
    found = [(command.words, command.is_marked) for command in page.commands()]
    assert found == [(["a"], True), (["b", "c"], True), (["b"], False), (["c"], False)]
    assert [(command.variables, command.output) for command in page.commands()][-2:] == [({}, "f"), ({"X": "1"}, "")]


def test_a_mistake_with_another_message_is_found(
    parsing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(parsing)
    message = "command line: '--training.step' is not an option; did you mean --training.steps?"
    (tmp_path / "page.md").write_text(f"```\n$ ./run_train.sh --training.step 3\nERROR {message}\n```\n")
    [(command, errors)] = Page(tmp_path / "page.md").mistakes()
    assert errors == [message] and message in check(command, monkeypatch, capsys)
    other = Command(command.where, ["./run_train.sh", "--training.steps", "3"], {}, "", False)
    assert check(other, monkeypatch, capsys) == ""


def _to_run() -> Iterator[Page]:
    for page in PAGES:
        if any(not command.is_marked for command in page.commands()):
            yield page


@pytest.mark.full
def test_whole_commands_inside_sentences_run(prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.copytree(prepared, folder, symlinks=True)
    commands = {tuple(command.words): command for page in PAGES for command in page.inline_commands()}
    ran = 0
    for words, command in commands.items():
        is_ours = words[0] == "titan-mi100" and len(words) > 2 and words[1] not in ("doctor", "plan")
        if is_ours and whole(command) and " ".join(words[1:3]) not in console.COMMANDS:
            if words[1] == "sweep" and "--dry-run" not in words:  # it would train a model of billions of parameters
                dry_run = ["--dry-run", "--gpus", "2", "--device", "mi100"]
                command = dataclasses.replace(command, words=[*words, *dry_run])
            problem, ran = run_command(command, folder), ran + 1
            assert not problem, problem
    assert ran > 5


@pytest.mark.full
@pytest.mark.parametrize("page", [*_to_run()], ids=lambda page: page.name)
def test_the_commands_of_a_page_run_in_its_order(page: Page, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.copytree(prepared, folder, symlinks=True)
    started: set[str] = set()
    for command in page.commands():
        if command.is_marked or command.words[0].endswith("run_tests.sh"):  # that would run this test again
            continue
        # what a page makes itself begins as a new folder, not as the one that was prepared
        for made in re.findall(r"--(?:job\.run_folder|output_dir)[ =](\S+)", " ".join(command.words)):
            if made not in started and (folder / made).exists():
                shutil.rmtree(folder / made)
            started.add(made)
        problem = run_command(command, folder)
        assert not problem, problem
