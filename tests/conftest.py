"""Shared by the tests: a job of one process, small specs, random packed rows, and spawning real multi-process jobs."""

import functools
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forked import ForkServer, wait_for_no_disk

from titan_mi100.planning.hardware import count_gpus

REPO = Path(__file__).parents[1]
ASSETS = REPO / "tests" / "assets"
SHARED_DATA = REPO.parent / "shared" / "data"  # real input; the tests that use it are skipped where it is not

MINIMAL = f"""
[model]
flavor = "debug"
tokenizer_path = "{ASSETS / "tokenizer"}"
[data]
path = "{ASSETS / "arithmetic.jsonl"}"
[training]
"""
ASKED_FOR = "TITAN_TESTS_SIMGPU"  # the pretended device is built for a run of all tests only if it was built before
FULL = "TITAN_TESTS_FULL"  # set for the decorators of test modules, which see no options

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not count_gpus():  # read when triton is imported, see interpreted.py; on a card the kernels themselves are tested
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # inherited, where a script runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The order of the long files, the longest first: run_tests.sh deals whole files to its workers, two each and then one
# by one; the last ones are short.
ORDER = (
    "layouts", "docs", "simgpu", "compile_report", "machine_code", "machine_code_others", "generate", "prepare",
    "train", "scripts", "parity", "hub", "policy", "rounds", "corpus", "watchdog", "run_folder", "new_config",
    "tokenizer",
    "convert", "adapter", "safe_read", "rehearsal", "prompts_as_trained", "lean_optimizer", "offload", "lora",
    "ruined_weights",
    "convert_refusals", "inspect_data", "attention_choice", "measure", "samples", "trainer", "conformance", "child",
    "preemption", "made_up_family", "end_of_turn", "ddp", "mixed_run", "chaos", "start", "config_inputs",
    "distributed", "memory", "reference_run", "objectives", "checkpoint", "machine", "report", "files",
    "evaluate_script", "nf4", "profiling", "console", "followed", "delta_rule", "token_rows", "sweep", "judged",
    "sample", "score", "qwen3_5_files", "qwen3_moe_files", "preferences", "line_budgets", "names", "streams", "slurm",
    "troubleshooting",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`: the complete matrices")
    parser.addoption(
        "--full-of", action="append", default=[], metavar="FILE", help="the same, of one file: test_layouts"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of xdist: the order below, and not the files with the most tests first
    gc.disable()  # till all modules are imported: what they make stays, and looking through it takes seconds
    if config.getoption("--full"):
        os.environ[FULL] = "1"
    named = [*config.args, *config.getoption("--full-of")]
    os.environ[ASKED_FOR] = "1" if config.getoption("--full") or any("test_simgpu" in name for name in named) else ""


def examples(count: int) -> int:
    """How many examples a property test draws: with --full all of them, else a quarter."""
    return count if os.environ.get(FULL) else count // 4


def wants_full(config: pytest.Config, file: Path) -> bool:
    """Are the complete matrices of this test file asked for?"""
    return bool(config.getoption("--full")) or file.stem in config.getoption("--full-of")


@pytest.fixture(scope="module")
def full(request: pytest.FixtureRequest) -> bool:
    """For a test that makes a smaller selection by default."""
    return wants_full(request.config, request.path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") and not wants_full(config, item.path):
            item.add_marker(pytest.mark.skip(reason="only with --full"))
    if not hasattr(config, "workerinput"):  # one process: in the order of the command line
        return
    order = {f"test_{name}": place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is it looked through later: by this process, or by those that it forks
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data of the tests goes to their own folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> None:
    wait_for_no_disk()


@pytest.fixture(scope="session", autouse=True)
def _one_reading_of_the_tests_tokenizer() -> None:
    """What prepares data in this process reads tests/assets/tokenizer and its template once, not for each folder of
    rows; test_tokenizer.py and test_chat_template.py read theirs as it is done elsewhere."""
    from titan_mi100.data import build

    load, template = functools.cache(build.load_tokenizer), build.ChatTemplate
    of_template = functools.cache(lambda path: template.of(load(path), path))

    class Template(template):
        @classmethod
        def of(cls, tokenizer: Any, path: str | Path, template: str | Path = "") -> Any:
            if template or not _is_the_tests_own(path):
                return super().of(tokenizer, path, template)
            return of_template(str(path))

    read = build.load_tokenizer
    build.load_tokenizer = lambda path: (load if _is_the_tests_own(path) else read)(str(path))
    build.ChatTemplate = Template


def _is_the_tests_own(path: str | Path) -> bool:
    return Path(path) == ASSETS / "tokenizer"


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """The launcher blocks signals and handles some; what a later test forks would inherit that."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = signal.getsignal(signal.SIGCHLD)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGCHLD, child)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A test that sets up the package's log, as a program does, leaves it to the next one as it was."""
    from titan_mi100.log import log

    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)


@functools.cache
def qwen3_tokenizer():
    """Qwen3's own, for the tests that may share it: it takes seconds to read. Only where SHARED_DATA is."""
    from titan_mi100.text.load import load_tokenizer

    return load_tokenizer(SHARED_DATA / "qwen3_tokenizer")


def transformers_tokenizer(folder: Path) -> Any:
    """The tokenizer of transformers. Messages come to templates as the newest version shows them, see `as_shown`."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **options: render(as_shown(messages), **options)
    return tokenizer


def as_shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a version such as 5.17, which shows values that are None, and no reasoning of another name: as 5.23 does."""
    from transformers.utils import chat_template_utils

    if hasattr(chat_template_utils, "_alias_reasoning_fields"):
        return messages
    shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in shown:
        thoughts = [message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message]
        message.update({"reasoning_content": thoughts[0]} if thoughts else {})
    return shown


@pytest.fixture
def world():
    """This process as a job of one. The group stays for the next test: see no_process_group."""
    import torch

    from titan_mi100.parallel.distributed import World, init_distributed

    if torch.distributed.is_initialized():
        return World(0, 1, torch.device("cpu"))
    return init_distributed()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows in a part of a teacher's folder or a reference, instead of hundreds."""
    monkeypatch.setattr("titan_mi100.data.answer_store.Identity.part_rows", 3)


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The child process that reads untrusted files has a second of CPU time for a small file, instead of five."""
    from titan_mi100.files import child

    command, limit = child.command, "; from titan_mi100.files import child; child.SECONDS = 1; getattr("

    def limited(*words: Any, **more: Any) -> list[str]:
        return [word.replace("; getattr(", limit) for word in command(*words, **more)]

    monkeypatch.setattr(child, "command", limited)
    child.end()  # the next question starts another
    yield
    child.end()


def ending_of(error: BaseException, world: Any, folder: Path) -> dict[str, Any]:
    """The run_state.json of a run that this error ends while it is opened."""
    from titan_mi100 import process
    from titan_mi100.config.settings import Config, JobConfig

    def work(_: object) -> tuple[str, str]:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.distributed, "init_distributed", lambda **_: world)
        patch.setattr(process.distributed, "exit_process", lambda *_: None)
        heartbeat: Any = SimpleNamespace(note=lambda _: None, is_in=lambda _: None)
        preemption: Any = SimpleNamespace(reason="")
        process.run_process(Config(job=JobConfig(run_folder=str(folder))), preemption, heartbeat, work)
    state: dict[str, Any] = json.loads((folder / "run_state.json").read_text())
    return state


@pytest.fixture
def no_process_group():
    """This process in no job."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def job_environment() -> dict[str, str]:
    """For a subprocess: this checkout's package and the modules of tests/, one thread, and no rank of an outer job."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}


_PORTS = ExitStack()


def free_port() -> int:
    """Nobody else gets it until this process ends."""
    from titan_mi100.workshop.measure.children import reserved_port

    return _PORTS.enter_context(reserved_port())


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer(job_environment())


def torchrun(
    *arguments: str,
    processes: int = 2,
    check: bool = True,
    timeout: float = 300,
    launcher: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run a real job on gloo; its output is in the result, and in the failure.

    Args:
        launcher: start it with torchrun, as a user does; else its processes are forked, which is much faster.

    Raises:
        TimeoutError, subprocess.TimeoutExpired: it did not end in `timeout` seconds; its processes have been ended.
    """
    variables = {**job_environment(), **environment}
    if launcher:
        code, output, errors = _launch(list(arguments), processes, variables, timeout)
    else:
        code, output, errors = fork_server().run(list(arguments), processes, variables, REPO, timeout)
    if check:
        assert code == 0, output[-5000:] + errors[-5000:]
    return subprocess.CompletedProcess(arguments, code, output, errors)


def _launch(arguments: list[str], processes: int, variables: dict[str, str], timeout: float) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        cwd=REPO, env=variables,
    ) as job:  # fmt: skip
        try:
            output, errors = job.communicate(timeout=timeout)
        except BaseException:
            job.terminate()  # torchrun ends its workers, which a SIGKILL of it would leave running
            job.communicate(timeout=60)
            raise
    return job.returncode, output, errors


def random_documents(
    vocabulary: int, lengths: list[int], seed: int = 0, supervised_share: float = 0.5
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents of random tokens with random supervision."""
    random = np.random.default_rng(seed)
    return [(random.integers(0, vocabulary, n).astype(np.int32), random.random(n) < supervised_share) for n in lengths]


def documents_of(document_ids):
    """The documents of a microbatch from the id of each token, (batch, seq)."""
    import torch

    from titan_mi100.attention.base import Documents
    from titan_mi100.data.rows import document_ends

    return Documents.from_ends(torch.from_numpy(document_ends(document_ids.numpy())))


def supervised_of(labels):
    """Positions of the supervised tokens of (batch, seq) labels in the flattened batch."""
    import torch

    from titan_mi100.config.layout import IGNORE
    from titan_mi100.data.rows import columns_where
    from titan_mi100.parallel.base import supervised_index

    return torch.from_numpy(supervised_index(torch.from_numpy(columns_where((labels != IGNORE).numpy()))))


def records_of(job: str, given: dict, folder: Path, processes: int) -> Iterator[tuple[dict, list[dict]]]:
    """Run a job of tests/gloo; of each split what the ranks return, with the gradients of all stages of a pipeline."""
    import torch

    torch.save(given, folder / "job.pt")
    path = REPO / "tests" / "gloo" / f"{job}.py"
    torchrun(str(path), str(folder / "job.pt"), str(folder), processes=processes, timeout=900)
    records = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]
    for number, split in enumerate(given["splits"]):
        of_ranks = [record[number] for record in records]
        if "pipeline_parallel_degree" in split.get("parallelism", {}):
            every = [pair for record in of_ranks for pair in record["gradients"]]
            of_ranks = [{**record, "gradients": every} for record in of_ranks]
        yield split, of_ranks
