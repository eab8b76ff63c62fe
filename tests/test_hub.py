"""--push_to_hub: what is wrong is said before any work, and a folder that is written stays, with the way to send it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_adapter import random_adapter
from test_convert import Result, folder_of, nothing_in, same, tensors, tool

from titan_mi100.config.settings import LoRAConfig

huggingface_hub = pytest.importorskip("huggingface_hub")
TOKEN = "hf_secret"


class Hub:
    """What the hub holds, in place of huggingface_hub.HfApi.

    Attributes:
        private: of each repository.
        uploaded: the files of each repository.
        error: raised by an upload, if there is one.
    """

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.uploaded: dict[str, dict[str, bytes]] = {}
        self.error: Exception | None = None
        self.calls = 0

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> SimpleNamespace:
        assert exist_ok
        self.calls += 1
        repository = name if "/" in name else f"me/{name}"
        self.private.setdefault(repository, private)
        return SimpleNamespace(repo_id=repository)

    def model_info(self, repository: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.private[repository])

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> str:
        if self.error is not None:
            raise self.error
        self.uploaded[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        return f"https://hub/{repo_id}/commit/1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def export(folder: Path, *options: str) -> Result:
    """An HF folder through the command that writes HF folders."""
    source = folder / "hf"
    if not source.exists():
        folder_of(source)
    (folder / "out").mkdir(exist_ok=True)
    where = ("--input_dir", source, "--output_dir", folder / "out" / "new", "--verify", "bytes")
    return tool("dcp_to_hf", *where, *options, check=False)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", [("me/new",), ("new",), ("me/new", "--public")])
def test_what_was_written_is_uploaded_and_private_unless_told_otherwise(
    options: tuple[str, ...], hub: Hub, tmp_path: Path
) -> None:
    result = export(tmp_path, "--push_to_hub", *options)
    assert result.returncode == 0 and "https://hub/me/new/commit/1" in result.stdout
    assert hub.uploaded == {"me/new": files_of(tmp_path / "out" / "new")}
    assert "model.safetensors" in hub.uploaded["me/new"] and "config.json" in hub.uploaded["me/new"]
    assert hub.private == {"me/new": "--public" not in options}


def test_without_the_option_nothing_is_sent(hub: Hub, tmp_path: Path) -> None:
    assert export(tmp_path).returncode == 0
    assert hub.calls == 0


def test_merging_uploads_too(hub: Hub, tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base")
    adapter = random_adapter(tmp_path / "adapter", LoRAConfig(4, 12.0, 0.0, ("q_proj",)), base)
    where = ("--base", base, "--adapter", adapter, "--output_dir", tmp_path / "new", "--verify", "bytes")
    tool("merge_lora", *where, "--push_to_hub", "me/merged")
    assert hub.uploaded == {"me/merged": files_of(tmp_path / "new")}


def hide_the_library(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "huggingface_hub", None)


def go_offline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def forget_the_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(huggingface_hub, "get_token", lambda: None)


@pytest.mark.parametrize(
    ("spoil", "options", "said"),
    [
        (hide_the_library, ("--push_to_hub", "me/new"), "pip install huggingface_hub"),
        (
            None,
            ("--push_to_hub", "me/a/new"),
            "--push_to_hub me/a/new: is not a valid repository name; write it as OWNER/",
        ),
        (None, ("--push_to_hub", ""), "is not a valid repository name"),
        (go_offline, ("--push_to_hub", "me/new"), "HF_HUB_OFFLINE is set"),
        (forget_the_token, ("--push_to_hub", "me/new"), "no token for the hub was found; log in with `hf auth login`"),
        (None, ("--public",), "needs --push_to_hub"),
    ],
)
def test_what_will_fail_is_said_before_any_work(
    spoil: Any, options: tuple[str, ...], said: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spoil is not None:
        spoil(monkeypatch)
    result = export(tmp_path, *options)
    assert result.returncode == 2 and said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and TOKEN not in result.stderr
    assert hub.calls == 0 and nothing_in(tmp_path / "out")


def refused(status: int) -> Exception:
    error = huggingface_hub.errors.HfHubHTTPError.__new__(huggingface_hub.errors.HfHubHTTPError)
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (refused(401), 2, "me/new: the hub refuses the upload: no token, or it may not write there; log in"),
        (refused(403), 2, "the hub refuses the upload"),
        (refused(503), 1, "answered with HTTP status 503 for me/new; try again later"),
        (huggingface_hub.errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), 1, "HF_HUB_OFFLINE is set"),
        (ConnectionError("no route"), 1, "cannot be reached (no route); check the network"),
        (ValueError("something else"), 1, "me/new: could not be uploaded: something else"),
    ],
)
def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_send_it(
    error: Exception, code: int, said: str, hub: Hub, tmp_path: Path
) -> None:
    hub.error = error
    result = export(tmp_path, "--push_to_hub", "me/new")
    folder = tmp_path / "out" / "new"
    assert result.returncode == code and said in result.stderr
    assert f"{folder} is complete; upload it with: hf upload me/new {folder} --private" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "nothing was left behind" not in result.stderr
    assert same(tensors(folder), tensors(tmp_path / "hf"))


def test_nothing_becomes_public_unasked(hub: Hub, tmp_path: Path) -> None:
    hub.private["me/open"] = False
    result = export(tmp_path, "--push_to_hub", "me/open")
    assert result.returncode == 2 and "me/open: exists already and is public" in result.stderr
    assert hub.uploaded == {} and (tmp_path / "out" / "new").exists()
