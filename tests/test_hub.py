"""Names on the hub against a server on loopback: what is fetched, kept, hashed and refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import REPO, job_environment, torchrun
from hub_server import Hub, files_below, git_oid, serving, sleep

from titan_mi100.config.hub import COMMITS, COMMITS_FILE, local_path, one_at_a_node
from titan_mi100.config.load import load_config
from titan_mi100.errors import UserError
from titan_mi100.files.hub import fetch
from titan_mi100.files.hub_files import MODEL, TOKENIZER, TRAIN, VALIDATION, parse_name
from titan_mi100.shapes.families import PRESETS, to_hf_config

MODEL_NAME, ROWS_NAME = "me/tiny", "me/sums"
ROWS = (REPO / "train_configs/debug/additions.jsonl").read_bytes()
CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/*.jsonl\n---\n"
FULL = pytest.mark.full


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model and a data set, and an empty cache."""
    from huggingface_hub import close_session, constants

    weights = bytes(range(256)) * 300
    model = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": weights, "pytorch_model.bin": weights}
    rows = {"README.md": CARD, "main/a.jsonl": ROWS, "main/b.jsonl": b"{}\n", "other.jsonl": b"{}"}
    with serving(Hub({f"models/{MODEL_NAME}": model, f"datasets/{ROWS_NAME}": rows})) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library waits before it tries again
        close_session()
        yield hub
        close_session()


def fetched(text: str, kind: str = MODEL, commits: dict[str, str] | None = None) -> list[str]:
    name = parse_name(text)
    assert name is not None
    return fetch(name, kind, {} if commits is None else commits)


def refusal(text: str, kind: str = MODEL, commits: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as error:
        fetched(text, kind, commits)
    return str(error.value)


def content(folder: str) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def test_a_model_is_fetched_once_and_then_found_without_a_request(hub: Hub) -> None:
    commits: dict[str, str] = {}
    [folder] = fetched(MODEL_NAME, commits=commits)
    files = hub.repositories[f"models/{MODEL_NAME}"]
    assert content(folder) == {name: files[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
    assert commits == {f"models/{MODEL_NAME}@main": hub.commit(f"models/{MODEL_NAME}")}
    hub.requests.clear()
    assert fetched(MODEL_NAME) == [folder] and len(hub.requests) == 1  # the commit of main
    files["config.json"] = b"{ }"  # main moves
    assert fetched(MODEL_NAME, commits=commits) == [folder] and len(hub.requests) == 1
    assert fetched(f"{MODEL_NAME}@{next(iter(commits.values()))}") == [folder] and len(hub.requests) == 1
    assert fetched(MODEL_NAME) != [folder]


def test_the_path_of_a_relative_cache_is_absolute(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache")
    assert fetched(MODEL_NAME)[0].startswith(f"{tmp_path}/cache/")


def test_a_split_is_a_pattern_of_its_files(hub: Hub) -> None:
    [pattern] = fetched(ROWS_NAME, TRAIN)
    assert pattern.endswith("/main/*.jsonl")
    assert {*content(pattern.removesuffix("main/*.jsonl"))} == {"README.md", "main/a.jsonl", "main/b.jsonl"}
    assert "has no split 'validation', but train" in refusal(ROWS_NAME, VALIDATION)
    assert "names a model; :CONFIG and [SPLIT]" in refusal(f"{MODEL_NAME}:main")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("configs: [a: b: c", "has a card whose metadata cannot be read: while parsing a flow sequence"),
        (
            "configs: !!python/object/apply:os.getcwd []",
            "has a card whose metadata cannot be read: could not determine",
        ),
        (CARD.decode().replace("main/*", "main/[z-a]*")[4:-5], "names 'main/[z-a]*.jsonl', which is no pattern"),
        (CARD.decode().replace("main/*.jsonl", "[]")[4:-5], "has a card whose data_files are not understood"),
    ],
)
def test_a_card_without_sense_is_refused(hub: Hub, card: str, said: str) -> None:
    hub.repositories[f"datasets/{ROWS_NAME}"]["README.md"] = f"---\n{card}\n---\n".encode()
    assert said in refusal(ROWS_NAME, TRAIN)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_wrong_bytes_of_the_right_size_are_fetched_again_once(hub: Hub, file: str, capsys) -> None:
    hub.broken[file] = 1
    [folder] = fetched(MODEL_NAME)
    assert content(folder)[file] == hub.repositories[f"models/{MODEL_NAME}"][file]
    assert f"WARNING {file} has other bytes than in the commit" in capsys.readouterr().err
    hub.repositories[f"models/{MODEL_NAME}"][file] += b" "
    hub.broken[file] = 2
    assert "was sent with other bytes than its commit" in refusal(MODEL_NAME)
    assert len(list(Path(folder).parent.glob(f"*/{file}"))) == 1  # that of the commit before
    assert len(fetched(MODEL_NAME)) == 1


def test_a_file_that_has_changed_in_the_cache_is_fetched_again(hub: Hub) -> None:
    commits: dict[str, str] = {}
    [folder] = fetched(MODEL_NAME, commits=commits)
    weights = Path(folder, "model.safetensors")
    right = weights.read_bytes()
    os.utime(weights, ns=(0, 0))  # only touched: hashed again, and kept
    hub.requests.clear()
    assert fetched(MODEL_NAME, commits=commits) == [folder] and not hub.requests
    weights.write_bytes(right[:-1] + b"x")
    assert fetched(MODEL_NAME, commits=commits) == [folder]
    assert weights.read_bytes() == right and len([r for r in hub.requests if r.startswith("GET")]) == 1


def test_a_download_that_is_cut_off_goes_on_or_starts_again(hub: Hub) -> None:
    hub.cut["model.safetensors"] = 1
    [folder] = fetched(MODEL_NAME)
    assert content(folder)["model.safetensors"] == hub.repositories[f"models/{MODEL_NAME}"]["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "GatedRepo", "is gated; accept its terms at {hub}/me/tiny, then log in: hf auth login, or set HF_TOKEN"),
        (403, "GatedRepo", "is gated; accept its terms at {hub}/me/tiny, then log in"),
        (401, "RepoNotFound", "is no model, or a private one; check the name, or log in"),
        (401, "", "is no model, or a private one; check the name, or log in"),
        (404, "RepoNotFound", "is no model, or a private one; check the name, or log in"),
        (403, "", "cannot be fetched: your token does not allow it; log in"),
        (429, "", "cannot be fetched: too many requests (429); wait a few hundred s, or log in"),
        (429, "Limited", "cannot be fetched: too many requests (429); wait 60 s, or log in"),
        (503, "", "cannot be fetched: the answer of {hub}/me/tiny is 503; try again later"),
    ],
)
@pytest.mark.parametrize("place", ["/revision/", *(pytest.param(p, marks=FULL) for p in ("/tree/", "/resolve/"))])
def test_a_refusal_of_the_hub_says_what_to_do(hub: Hub, status: int, code: str, said: str, place: str) -> None:
    hub.refusals[place] = status, code
    assert refusal(MODEL_NAME).startswith(said.format(hub=hub.endpoint))


def test_the_hubs_own_token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_mine"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert refusal(MODEL_NAME) == "cannot be fetched: your token is refused; log in: hf auth login, or set HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert fetched(MODEL_NAME)


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal(MODEL_NAME) == "is not looked for without huggingface_hub: pip install huggingface_hub"


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert refusal(MODEL_NAME).startswith("cannot be kept in ")


def test_an_index_cannot_name_files_outside_the_repository(hub: Hub, tmp_path: Path) -> None:
    model = hub.repositories[f"models/{MODEL_NAME}"]
    for file in ("../../../../mine", "gone.safetensors"):
        model["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": file}}).encode()
        assert f"has no {file}, only model.safetensors" in refusal(MODEL_NAME)


def test_no_such_repository_revision_or_server(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("me/nothing").startswith("is no model, or a private one; check the name")
    assert refusal("me/nothing", TRAIN).startswith("is no dataset, or a private one; check the name")
    assert refusal(f"{MODEL_NAME}@gone") == f"has no revision 'gone'; {hub.endpoint}/{MODEL_NAME} lists them"
    assert fetched(f"{MODEL_NAME}@v1") == fetched(MODEL_NAME)
    gone = "0" * 40  # the repository's history was rewritten
    assert f"has no revision '{gone}'" in refusal(MODEL_NAME, commits={f"models/{MODEL_NAME}@main": gone})
    [record] = Path(fetched(MODEL_NAME)[0]).parents[1].glob("titan_mi100/*.json")
    for damaged in ("[]", '{"files": null, "hashed": null}', "{"):
        record.write_text(damaged)
        assert fetched(MODEL_NAME) and json.loads(record.read_text())["hashed"]
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = refusal(MODEL_NAME)
    assert said.startswith("cannot be fetched: http://127.0.0.1:9 gave no complete answer")
    assert said.endswith("HF_HUB_OFFLINE=1 takes what is in the cache")


def test_offline_a_complete_cache_is_enough(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, snapshot_download

    assert fetched(ROWS_NAME, TRAIN)
    snapshot_download(MODEL_NAME, endpoint=hub.endpoint, ignore_patterns=["*.bin"])  # as hf download does: no record
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    [folder] = fetched(MODEL_NAME)
    assert "model.safetensors" in content(folder) and fetched(ROWS_NAME, TRAIN) and not hub.requests
    weights = Path(folder, "model.safetensors")
    weights.write_bytes(bytes(weights.stat().st_size))
    command = f"hf download {MODEL_NAME} --revision {Path(folder).name}"
    for _ in range(2):  # the damaged file is deleted, and then missing
        assert refusal(MODEL_NAME).endswith(f"HF_HUB_OFFLINE is set; unset it, or fetch it: {command}")
    assert refusal("me/other").endswith("unset it, or fetch it: hf download me/other --revision main")


def test_what_the_cache_has_offline_is_not_taken_for_the_commit_later(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants, snapshot_download

    some = {"endpoint": hub.endpoint, "allow_patterns": ["README.md", "main/a.jsonl", "*.json"]}
    snapshot_download(ROWS_NAME, repo_type="dataset", **some)
    snapshot_download(MODEL_NAME, **some)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched(ROWS_NAME, TRAIN)[0].endswith("/main/a.jsonl") and fetched(MODEL_NAME, TOKENIZER)
    assert "me/sums: WARNING HF_HUB_OFFLINE is set, and its files are taken to be those that" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert fetched(ROWS_NAME, TRAIN)[0].endswith("/main/*.jsonl")
    assert "model.safetensors" in content(fetched(MODEL_NAME)[0])


def test_strays_of_killed_downloads_are_removed_and_those_of_running_ones_stay(hub: Hub, tmp_path: Path) -> None:
    import fcntl

    repository = tmp_path / "cache/models--me--tiny"
    (repository / "blobs").mkdir(parents=True)
    locks = tmp_path / "cache/.locks/models--me--tiny"
    locks.mkdir(parents=True)
    strays = [repository / "blobs" / f"{name}.01234567.incomplete" for name in ("a" * 40, "b" * 64)]
    for stray in strays:
        stray.write_bytes(b"x")
    with (locks / f"{'b' * 64}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fetched(MODEL_NAME)
    assert [stray.exists() for stray in strays] == [False, True]


def has_begun(hub: Hub) -> bool:
    """Whether the weights' own request has come. One that is still on its way when its sender is killed would be taken
    for the next start's.
    """
    return any(request.startswith("GET") and request.endswith(".safetensors") for request in list(hub.requests))


def test_a_killed_download_keeps_finished_files_and_starts_the_broken_one_again(hub: Hub, tmp_path: Path) -> None:
    model = hub.repositories[f"models/{MODEL_NAME}"]
    model["model.safetensors"] = os.urandom(4 << 20)
    hub.held.add("model.safetensors")
    command = [sys.executable, "-m", "titan_mi100.config.load", "--checkpoint.initial_load_path", MODEL_NAME]
    environment = {**job_environment(), "HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    blobs = tmp_path / "cache/models--me--tiny/blobs"
    with subprocess.Popen([*command, "--data.path", ROWS_NAME], env=environment, stderr=subprocess.PIPE) as job:
        until = time.monotonic() + 300
        finished = [blobs / git_oid(model[name]) for name in ("config.json", "tokenizer.json")]
        while not (all(blob.exists() for blob in finished) and list(blobs.glob("*.incomplete")) and has_begun(hub)):
            assert time.monotonic() < until and job.poll() is None
            sleep(0.01)
        job.send_signal(signal.SIGKILL)
        job.communicate()
    assert list(blobs.glob("*.incomplete"))
    hub.requests.clear()
    hub.held.clear()
    [folder] = fetched(MODEL_NAME)
    assert content(folder)["model.safetensors"] == model["model.safetensors"] and not list(blobs.glob("*.incomplete"))
    assert [r.rpartition("/")[2] for r in hub.requests if "resolve" in r and "GET" in r] == ["model.safetensors"]


RUN = """[checkpoint]
initial_load_path = "me/model"
export_hf = true
[data]
path = "me/sums:main"
validation_path = "me/sums:main[test]"
[training]
seq_len = 256
steps = 2
mixed_precision_param = "float32"
"""


@pytest.mark.full
@pytest.mark.parametrize("is_launched", [True, False], ids=["launcher", "torchrun"])
def test_two_names_to_an_export_killed_in_the_download_and_resumed_without_the_hub(
    is_launched: bool, hub: Hub, tmp_path: Path
) -> None:
    seed = ["--job.run_folder", str(tmp_path / "seed"), "--training.steps", "2", "--validation.prompts", "0"]
    torchrun("-m", "titan_mi100.train", "--job.config_file", "debug", *seed, processes=1)
    hub.repositories["models/me/model"] = files_below(tmp_path / "seed/hf-step-2")
    rows = {"main/train.jsonl": ROWS, "main/test.jsonl": ROWS[:2000].rpartition(b"\n")[0]}
    card = CARD.replace(b"main/*.jsonl", b"main/train.jsonl\n  - split: test\n    path: main/test.jsonl")
    hub.repositories["datasets/me/sums"] = {**rows, "README.md": card}
    (tmp_path / "my.toml").write_text(RUN)
    environment = {**job_environment(), "HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "0", "TMPDIR": str(tmp_path)}
    program = ["-m", "titan_mi100.launch.launcher"] if is_launched else ["-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc_per_node", "2", *(["-m", "titan_mi100.train"] * (not is_launched))]
    command = [sys.executable, *program, "--job.config_file", str(tmp_path / "my.toml"), "--job.run_folder"]
    command += [str(tmp_path / "run")]
    hub.held.add("model.safetensors")
    with subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL) as job:
        until = time.monotonic() + 300
        while not has_begun(hub):
            assert time.monotonic() < until and job.poll() is None
            sleep(0.01)
        kill_all(environment["HF_ENDPOINT"])
        job.wait()
    hub.held.clear()
    hub.requests.clear()

    def start(*more: str) -> subprocess.CompletedProcess:
        if is_launched:
            return subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
        return torchrun(*command[command.index("titan_mi100.train") - 1 :], *more, check=False, **environment)

    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "upload     hf upload run " in done.stdout and (tmp_path / "run/hf-step-2/model.safetensors").exists()
    assert len([r for r in hub.requests if "/revision/" in r]) == 2  # one process of two asks for each name
    assert len([r for r in hub.requests if r.startswith("GET") and r.endswith(".safetensors")]) == 1
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    commits = json.loads((tmp_path / "run" / COMMITS_FILE).read_text())
    assert commits == {f"{kind}@main": hub.commit(kind) for kind in ("models/me/model", "datasets/me/sums")}
    hub.repositories["datasets/me/sums"]["main/train.jsonl"] += ROWS[:200]  # main moves
    hub.requests.clear()
    resumed = start("--training.steps", "4")
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stdout + resumed.stderr
    assert not hub.requests and json.loads((tmp_path / "run" / COMMITS_FILE).read_text()) == commits


def kill_all(endpoint: str) -> None:
    """SIGKILL for every process of this test's job, which its environment names."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HF_ENDPOINT={endpoint}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def errors_of(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(arguments)
    return str(error.value).splitlines()


def test_a_refused_name_is_said_with_its_key_and_hides_what_follows(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(f'[checkpoint]\ninitial_load_path = "me/gone"\n[data]\npath = "{ROWS_NAME}:x"')
    where = f"{tmp_path}/my.toml: "
    assert errors_of("--job.config_file", f"{tmp_path}/my.toml") == [
        f"{where}[data] path = '{ROWS_NAME}:x' is no path here, and on the hub it has no config 'x'; "
        f"name one of main, such as {ROWS_NAME}:main",
        f"{where}[checkpoint] initial_load_path = 'me/gone' is no path here, and on the hub it is no model, or a "
        "private one; check the name, or log in: hf auth login, or set HF_TOKEN",
    ]
    hub.requests.clear()  # nothing is fetched for a config that is refused anyway
    [line] = errors_of("--job.config_file", f"{tmp_path}/my.toml", "--training.steps", "x")
    assert "training.steps" in line and not hub.requests


def test_the_runs_commit_is_used_and_a_local_folder_wins(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = {f.name: f.read_bytes() for f in (REPO / "train_configs/debug/tokenizer").iterdir()}
    hub.repositories["models/me/words"] = tokenizer
    arguments = ["--job.config_file", "debug", "--model.tokenizer_path", "me/words", "--data.path", ROWS_NAME]
    before = load_config(arguments)
    assert {*before.commits} == {"models/me/words@main", f"datasets/{ROWS_NAME}@main"}
    assert Path(before.model.tokenizer_path, "tokenizer.json").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / COMMITS_FILE).write_text(json.dumps(dict(before.commits)))
    tokenizer["tokenizer_config.json"] += b"\n"
    hub.requests.clear()
    assert load_config([*arguments, "--job.run_folder", "run"]).model == before.model and not hub.requests
    again = [*arguments, "--job.run_folder", "run", "--checkpoint.fresh"]
    assert load_config(again).model != before.model
    monkeypatch.setenv(COMMITS, json.dumps(dict(before.commits)))
    hub.requests.clear()
    assert load_config(again).model == before.model and not hub.requests
    shutil.copytree(before.model.tokenizer_path, tmp_path / "me/words")
    local = load_config(arguments)
    assert local.model.tokenizer_path == str(tmp_path / "me/words")


def test_the_other_processes_of_a_node_wait_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    with one_at_a_node({}, first) as commits:
        commits["models/a/b@main"] = "c"
    with one_at_a_node({}, {**first, "LOCAL_RANK": "1"}) as commits:
        assert commits == {"models/a/b@main": "c"}
    with pytest.raises(UserError), one_at_a_node({}, first):
        raise UserError("said by the first")
    with pytest.raises(SystemExit) as ended, one_at_a_node({}, {**first, "LOCAL_RANK": "1"}):
        pass
    assert ended.value.code == 2
    with one_at_a_node({"x": "y"}, {**first, "LOCAL_RANK": "1", COMMITS: "{}"}) as commits:
        assert commits == {"x": "y"}


def test_without_a_name_nothing_of_the_hub_is_imported() -> None:
    check = "import sys; from titan_mi100.config.load import load_config; load_config([]); "
    check += "sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], env=job_environment(), cwd=REPO).returncode == 0


def test_the_pages_example_is_loaded(hub: Hub, tmp_path: Path) -> None:
    page = (REPO / "docs/HF.md").read_text(encoding="utf-8")
    [config] = re.findall(r"tests/test_hub\.py loads it .*?```toml\n(.+?)```", page, re.DOTALL)
    (tmp_path / "my.toml").write_text(config)
    tiny = {f.name: f.read_bytes() for f in (REPO / "train_configs/debug/tokenizer").iterdir()}
    shape = json.dumps(to_hf_config(PRESETS["debug"])).encode()
    hub.repositories["models/Qwen/Qwen3-0.6B"] = {**tiny, "config.json": shape, "model.safetensors": b"not read"}
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
        f"  - split: test\n    path: {name}/test-*\n"
        for name in ("main", "socratic")
    )
    rows = {f"{c}/{s}-00000-of-00001.parquet": b"PAR1" for c in ("main", "socratic") for s in ("train", "test")}
    hub.repositories["datasets/openai/gsm8k"] = {**rows, "README.md": f"{card}---\n".encode()}
    loaded = load_config(["--job.config_file", str(tmp_path / "my.toml"), "--training.seq_len", "128"])
    assert [Path(path).name for path in loaded.data.path] == ["train-00000-of-00001.parquet"]
    assert [Path(path).parent.name for path in loaded.data.validation_path] == ["main"]
    assert loaded.spec() == PRESETS["debug"]


def test_sources_of_a_mixture_options_of_commands_and_plans_take_names(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = '[[data.source]]\npath = "me/sums"\nweight = 2\n[[data.source]]\npath = ["me/sums:main@v1"]\nname = "b"\n'
    shape = json.dumps(to_hf_config(PRESETS["debug"])).encode()
    hub.repositories[f"models/{MODEL_NAME}"]["config.json"] = shape
    (tmp_path / "my.toml").write_text(f'base = "debug"\n[data]\nvalidation_fraction = 0\n{text}weight = 1\n')
    options = ["--validation.freq", "0", "--validation.prompts", "0"]
    config = load_config(["--job.config_file", str(tmp_path / "my.toml"), *options])
    assert [source.name for source in config.data.sources] == ["sums", "b"]
    assert all(source.path[0].endswith("/main/*.jsonl") for source in config.data.source)
    planned = load_config(["--checkpoint.initial_load_path", MODEL_NAME, "--data.path", "me/none"], 1, with_files=False)
    folder = planned.checkpoint.initial_load_path
    assert {*content(folder)} == {"config.json"} and planned.spec() == PRESETS["debug"]
    assert local_path(MODEL_NAME) == folder and "model.safetensors" in content(folder)
    assert local_path("some/where/else") == "some/where/else" and local_path(str(tmp_path)) == str(tmp_path)
    with pytest.raises(UserError, match=r"^me/none is no path here, and on the hub it is no model"):
        local_path("me/none")
