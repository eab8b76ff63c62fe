"""scripts/download_hf.py against a hub of our own: a process that really runs, and HTTP that really breaks."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ASSETS, REPO

from titan_mi100.assets import read_assets
from titan_mi100.dcp_io import write_dcp
from titan_mi100.hf_io import write_hf
from titan_mi100.model_source import open_source
from titan_mi100.model_spec import PRESETS, ModelSpec, parameter_shapes, to_hf_config
from titan_mi100.weights import Kind

pytest.importorskip("huggingface_hub")

COMMIT = "c0ffee" + "0" * 34
SPEC = PRESETS["debug"]
KINDS = {name: Kind(shape, torch.float32) for name, shape in parameter_shapes(SPEC).items()}
CHUNK = 10 << 20  # what the library writes at once; a smaller part of a file is fetched again
TOKEN = "hf_secret"


class Hub:
    """Repositories in memory, served as the hub serves them.

    Attributes:
        requests: "METHOD path" of all, in order.
        cut: files whose transfer is cut after nine tenths, and whether the rest can be had.
        private, gated: repositories that need the token, and that need it for files only.
        uploaded: files that were pushed, by repository.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.cut: dict[str, bool] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.claimed: dict[str, int] = {}  # sizes that the listing says instead of the true ones
        self.uploaded: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, status: int, body: Any = b"", **headers: str) -> None:
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_GET(self) -> None:
                hub.get(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.post(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            do_PUT = do_POST

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, request: Any) -> None:
        path = request.path.split("?")[0].strip("/")
        self.requests.append(f"{request.command} {path}")
        repo = next((repo for repo in self.repos if f"{repo}/" in f"{path}/"), "")
        allowed = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not repo or (repo in self.private and not allowed):
            request.answer(401, X_Error_Code="RepoNotFound")
        elif path.startswith("api/"):
            self.describe(request, repo, path.removeprefix(f"api/models/{repo}").strip("/"))
        elif repo in self.gated and not allowed:
            request.answer(403, X_Error_Code="GatedRepo")
        else:
            self.send(request, repo, path.removeprefix(f"{repo}/resolve/{COMMIT}/"))

    def describe(self, request: Any, repo: str, rest: str) -> None:
        sizes = {name: self.claimed.get(name, len(data)) for name, data in self.repos[repo].items()}
        if rest not in ("", "revision/main", f"revision/{COMMIT}", f"tree/{COMMIT}"):
            request.answer(404, X_Error_Code="RevisionNotFound")
        elif rest.startswith("tree"):
            request.answer(200, [{"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in sizes.items()])
        else:
            siblings = [{"rfilename": name, "size": size, "blobId": "0" * 40} for name, size in sizes.items()]
            request.answer(200, {"id": repo, "sha": COMMIT, "private": repo in self.private, "siblings": siblings})

    def send(self, request: Any, repo: str, name: str) -> None:
        data = self.repos[repo][name]
        about = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        start = 0
        if request.command == "GET" and (asked := request.headers.get("Range")):
            self.ranges.append(f"{name} {asked}")
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            about["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if request.command == "GET" and name in self.cut and (not start or not self.cut[name]):
            if start:
                request.answer(503)
                return
            request.send_response(200)
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data[: len(data) * 9 // 10])
            request.wfile.flush()
            request.close_connection = True
            return
        request.answer(206 if start else 200, data[start:], **about)

    def post(self, request: Any, body: bytes) -> None:
        path = request.path.split("?")[0].strip("/")
        self.requests.append(f"{request.command} {path}")
        if request.command == "PUT":
            self.blobs[path.split("/")[-1]] = body
            request.answer(200)
        elif request.headers.get("Authorization") != f"Bearer {TOKEN}":
            request.answer(401)
        elif path == "api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            status = 409 if repo in self.repos else 200
            self.repos.setdefault(repo, {})
            if status == 200 and asked.get("visibility") == "private":
                self.private.add(repo)
            request.answer(status, {"url": f"{self.url}/{repo}"})
        elif "/preupload/" in path:
            modes = {True: "lfs", False: "regular"}
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = [{"path": n, "uploadMode": modes[n.endswith("tensors")], "shouldIgnore": False} for n in files]
            request.answer(200, {"files": answer})
        elif path.endswith("lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/blob/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            request.answer(200, {"transfer": "basic", "objects": objects}, Content_Type="application/json")
        else:
            repo = path.removeprefix("api/models/").split("/commit/")[0]
            files = self.uploaded.setdefault(repo, {})
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    files[line["value"]["path"]] = self.blobs[line["value"]["oid"]]
            url = f"{self.url}/{repo}/commit/{COMMIT}"
            request.answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    make_model(folder, SPEC)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def make_model(folder: Path, spec: ModelSpec) -> None:
    """An HF folder in several shards, with a tokenizer."""
    shutil.copytree(ASSETS / "tokenizer", folder)
    kinds = {name: Kind(shape, torch.float32) for name, shape in parameter_shapes(spec).items()}
    random = torch.Generator().manual_seed(0)
    blocks = ((name, 0, torch.randn(kind.shape, generator=random)) for name, kind in kinds.items())
    write_hf(folder, kinds, blocks, 1_000_000)
    (folder / "config.json").write_text(json.dumps(to_hf_config(spec)))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')


UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_qwen3.py": b"import os",
    "model.gguf": b"gguf",
    "README.md": b"words",
    "onnx/model.onnx": b"onnx",
    "original/model.safetensors": b"another",
    "sub/config.json": b"{}",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run(hub: Hub | None, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    hidden = ("HF_", "HUGGING_FACE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(REPO), "NO_PROXY": "*"}
    environ |= {"HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"}
    command = [sys.executable, str(REPO / "scripts" / "download_hf.py"), *map(str, arguments)]
    return subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=120)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    said = result.stderr if result.returncode else result.stdout  # the library's bars are on stderr
    return said.strip().splitlines()[-1]


def test_a_model_is_downloaded_and_nothing_else(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repos["own/model"] = files_of(model) | UNWANTED
    result = run(hub, "own/model", "--output_dir", tmp_path / "new")
    assert result.returncode == 0, result.stdout + result.stderr
    assert files_of(tmp_path / "new") == files_of(model)
    assert "--checkpoint.initial_load_path" in last_line(result)
    asked = " ".join(hub.requests)
    assert not [name for name in UNWANTED if f"/{name}" in asked]
    assert len(open_source(tmp_path / "new").names()) == len(KINDS)


def test_a_cut_connection_is_resumed_and_the_next_call_keeps_whole_files(hub: Hub, tmp_path: Path) -> None:
    make_model(tmp_path / "hf", replace(SPEC, vocab_size=24_000))
    hub.repos["own/model"] = files = files_of(tmp_path / "hf")
    shard = max(files, key=lambda name: len(files[name]))
    assert len(files[shard]) * 0.9 > CHUNK
    hub.cut = {shard: True}
    result = run(hub, "own/model", "--output_dir", tmp_path / "resumed")
    assert result.returncode == 0, result.stdout + result.stderr
    assert hub.ranges == [f"{shard} bytes={CHUNK}-"]
    assert files_of(tmp_path / "resumed") == files

    hub.cut = {shard: False}
    result = run(hub, "own/model", "--output_dir", tmp_path / "again")
    assert result.returncode == 1
    assert "503" in last_line(result) and "the same command again keeps what has arrived" in last_line(result)
    missing = files.keys() - files_of(tmp_path / "again").keys()
    assert shard in missing and len(missing) < len(files)
    left = tmp_path / "again" / ".cache" / "huggingface" / "download" / "killed.0badcafe.incomplete"
    left.touch()
    hub.cut, hub.requests = {}, []
    result = run(hub, "own/model", "--output_dir", tmp_path / "again")
    assert result.returncode == 0, result.stdout + result.stderr
    fetched = {request.split("/")[-1] for request in hub.requests if request.startswith("GET own")}
    assert fetched - {"config.json"} == missing - {"config.json"}
    assert files_of(tmp_path / "again") == files and not left.exists()


def test_another_model_is_refused_before_its_weights_are_asked_for(hub: Hub, model: Path, tmp_path: Path) -> None:
    config = json.dumps(to_hf_config(SPEC) | {"model_type": "qwen3_moe"})
    hub.repos["own/other"] = files_of(model) | {"config.json": config.encode()}
    result = run(hub, "own/other", "--output_dir", tmp_path / "new")
    assert result.returncode == 2
    assert "own/other/config.json: model_type = 'qwen3_moe'" in last_line(result)
    assert not (tmp_path / "new").exists()
    assert not [request for request in hub.requests if "safetensors" in request]


def test_what_arrives_and_is_no_whole_model_is_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    whole = files_of(model)
    shard = sorted(name for name in whole if name.endswith(".safetensors"))[-1]
    deeper = json.dumps(to_hf_config(SPEC) | {"num_hidden_layers": 9}).encode()
    for said, damage in (("download it again", {shard: whole[shard][:-100]}), ("missing: ", {"config.json": deeper})):
        hub.repos["own/model"] = whole | damage
        result = run(hub, "own/model", "--output_dir", tmp_path / said)
        assert result.returncode == 2, result.stdout + result.stderr
        assert said in last_line(result)
    hub.repos["own/model"] = {name: data for name, data in whole.items() if "safetensors" not in name} | UNWANTED
    result = run(hub, "own/model", "--output_dir", tmp_path / "pickled")
    assert result.returncode == 2 and "with safetensors beside it" in last_line(result)


def test_the_tokenizer_alone(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repos["own/model"] = files_of(model)
    assert run(hub, "own/model", "--output_dir", tmp_path / "new", "--tokenizer_only").returncode == 0
    assert files_of(tmp_path / "new") == files_of(ASSETS / "tokenizer")


def test_a_folder_with_another_models_files_is_left_alone(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repos["own/model"] = files_of(model)
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    result = run(hub, "own/model", "--output_dir", tmp_path)
    assert result.returncode == 2 and "name an empty folder" in last_line(result)
    assert files_of(tmp_path) == {"model.safetensors": b"precious"}


def test_without_room_nothing_is_begun(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repos["own/model"] = files_of(model)
    hub.claimed = dict.fromkeys((path.name for path in model.glob("*.safetensors")), 1 << 60)
    result = run(hub, "own/model", "--output_dir", tmp_path)
    assert result.returncode == 1
    assert "GiB are free; free some space; the same command again keeps what has arrived" in last_line(result)
    assert not [request for request in hub.requests if "safetensors" in request]


def test_a_token_opens_what_is_private_or_gated_and_is_never_shown(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repos = {"own/private": files_of(model), "own/gated": files_of(model)}
    hub.private, hub.gated = {"own/private"}, {"own/gated"}
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    for repo, said in (("own/private", "no such repository, or a private one"), ("own/gated", "accept its terms")):
        refused = run(hub, repo, "--output_dir", tmp_path / repo, HF_TOKEN="hf_wrong")
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert said in last_line(refused) and "hf_wrong" not in refused.stdout + refused.stderr
    by_variable = run(hub, "own/private", "--output_dir", tmp_path / "a", HF_TOKEN=TOKEN)
    by_file = run(hub, "own/gated", "--output_dir", tmp_path / "b", "--token_file", tmp_path / "token")
    for result in (by_variable, by_file):
        assert result.returncode == 0, result.stdout + result.stderr
        assert TOKEN not in result.stdout + result.stderr


def test_every_mistake_is_one_line_with_a_remedy(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.repos["own/model"] = files_of(model)
    (tmp_path / "empty").touch()
    library = tmp_path / "huggingface_hub"  # in front of the real one
    library.mkdir()
    (library / "__init__.py").write_text("raise ImportError('not there')")
    new, offline = tmp_path / "new", {"HF_HUB_OFFLINE": "1"}
    hidden = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    for hub_or_none, arguments, variables, code, said in (
        (hub, ("own/no-such", "--output_dir", new), {}, 2, "own/no-such: no such repository"),
        (hub, ("own/model", "--output_dir", new, "--revision", "v9"), {}, 2, "has no such revision"),
        (hub, ("own/a/b", "--output_dir", new), {}, 2, "OWNER/NAME"),
        (hub, ("own/model", "--output_dir", new), offline, 2, "HF_HUB_OFFLINE is set"),
        (hub, ("own/model", "--output_dir", new), hidden, 2, "pip install 'titan_mi100[hub]'"),
        (hub, ("own/model", "--output_dir", new, "--token_file", tmp_path / "empty"), {}, 2, "must hold the token"),
        (hub, ("own/model", "--output_dir", tmp_path / "empty"), {}, 2, "name another folder"),
        (hub, ("own/model", "--output_dir", new, "--private"), {}, 2, "--private goes with --push"),
        (None, ("own/model", "--output_dir", new), {}, 1, "127.0.0.1:9 cannot be reached"),
    ):
        result = run(hub_or_none, *arguments, **variables)
        assert result.returncode == code, (said, result.stdout + result.stderr)
        assert said in last_line(result)
        assert "Traceback" not in result.stderr


def test_an_export_is_pushed_after_the_same_check(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(model, folder)
    for name, data in UNWANTED.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "optimizer.pt").write_bytes(b"pickle")
    result = run(hub, "own/new", "--push", folder, "--private", HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stdout + result.stderr
    assert hub.uploaded == {"own/new": files_of(model)}
    assert hub.private == {"own/new"}

    hub.uploaded, hub.repos["own/public"] = {}, {}
    public = run(hub, "own/public", "--push", folder, "--private", HF_TOKEN=TOKEN)
    assert public.returncode == 2 and "public" in last_line(public)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-4])
    damaged = run(hub, "own/new", "--push", folder, HF_TOKEN=TOKEN)
    assert damaged.returncode == 2 and "not a whole safetensors file" in last_line(damaged)
    refused = run(hub, "own/new", "--push", model, HF_TOKEN="hf_wrong")
    assert refused.returncode == 2 and "HF_TOKEN" in last_line(refused)
    assert hub.uploaded == {}


def test_a_checkpoint_that_is_no_hf_folder_is_not_pushed(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    write_dcp(folder, KINDS, ((name, 0, torch.zeros(kind.shape)) for name, kind in KINDS.items()))
    for name, content in read_assets(model).items():
        (folder / name).write_bytes(content)
    result = run(hub, "own/new", "--push", folder, HF_TOKEN=TOKEN)
    assert result.returncode == 2 and "checkpoint_tools/dcp_to_hf.py" in last_line(result)
    assert hub.requests == []
