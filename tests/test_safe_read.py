"""Checkpoints, HF folders and tokenizers of somebody else: refused where hostile, read as ever where not."""

import collections
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from chaos import hostile
from chaos import hostile_pickles as pickles
from conftest import REPO, SHARED_DATA, job_environment
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from titan_mi100.errors import UserError
from titan_mi100.files import tables
from titan_mi100.files.plain import read_plain
from titan_mi100.files.stored import open_dcp, open_torch
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer, tokenizer_files
from titan_mi100.weights.source import open_weights

NAMES = [name for name, _ in hostile.hostile_cases()]


EVERY = 6  # by default


@pytest.fixture(scope="module")
def outcomes(full: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hostile.run_all(tmp_path_factory.mktemp("hostile"), 1 if full else EVERY)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (place % EVERY > 0)) for place, name in enumerate(NAMES)]
)
def test_what_is_hostile_is_refused_by_name_and_nothing_else_happens(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ""


def test_every_way_in_is_tried_by_many_cases() -> None:
    kinds = collections.Counter(name.split(":")[0] for name in NAMES)
    assert len({*NAMES}) == len(NAMES) and min(kinds.values()) >= 25 and set(kinds) == set(hostile._KINDS)


@pytest.mark.full
def test_the_watch_sees_code_that_runs_and_what_is_read_outside(tmp_path: Path) -> None:
    """The same cases, opened as DCP and everybody else opens them."""
    code = """if True:
        import json, pickle, sys
        from pathlib import Path
        import torch, chaos.hostile as hostile
        import torch.distributed.checkpoint as dcp

        def stock(folder):
            metadata = dcp.FileSystemReader(folder / "ck").read_metadata()
            dcp.load({"model": {"a": torch.empty(3, 4)}}, storage_reader=dcp.FileSystemReader(folder / "ck"))

        hostile._KINDS["dcp"] = (hostile.dcp_cases, stock)
        watch, found = hostile.Watch(), {}
        for number, name in enumerate(sys.argv[2:]):
            (folder := Path(sys.argv[1]) / str(number)).mkdir()
            found[name] = hostile.run_case(name, folder, watch)
        print(json.dumps(found))"""
    names = ["metadata, STACK_GLOBAL posix.system", "metadata calls eval", "path above", "path above by a link"]
    names = [f"dcp: {name}" for name in names]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), *names],
        env=job_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert all("its code was run" in found[name] for name in names[:2]), found
    assert all("opened " in found[name] and "outside/__0_0.distcp" in found[name] for name in names[2:]), found


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole_state(seed: int) -> dict:
    """As torchtitan saves: FSDP2's DTensors, AdamW's state and groups, a train state, a data loader's as bytes."""
    torch.manual_seed(seed)
    model, optimizer = get_state_dict(*trained())
    return {
        "model": model,
        "optimizer": optimizer,
        "train_state": {"step": seed, "losses": [seed, 0.5], "none": None, "dtype": torch.bfloat16},
        "dataloader": {"dp_rank_0": bytes([seed, 255]), "set": {1, 2}},
        "last": torch.full((2, 1, 3), seed, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "nothing": torch.empty(0, 4),
        "number": torch.tensor(seed),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.full
def test_a_genuine_checkpoint_is_read_as_with_the_stock_reader(world, tmp_path: Path) -> None:
    saved, stock = whole_state(1), whole_state(2)
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path))
    found = open_dcp(tmp_path, {".metadata", "__0_0.distcp"})
    tensors = {name: whole(value) for name, value in flatten_state_dict(stock)[0].items() if torch.is_tensor(value)}
    read = hostile.read_all(found)
    assert read.keys() == tensors.keys() and len(read) == 20
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in read)
    assert read["turned"].stride() == (1, 3)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {*found.others} == metadata.keys() - tensors.keys() and "dataloader.dp_rank_0" in found.others


def test_an_enums_member_may_be_named_by_getattr_and_nothing_else(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11.2 writes it."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda kind, _: (getattr, (type(kind), kind.name)))
    dcp.save({"a": torch.arange(3.0)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    monkeypatch.undo()
    file = tmp_path / ".metadata"
    written = file.read_bytes()
    assert b"getattr" in written and torch.equal(open_dcp(tmp_path).read("a", (0,), (3,)), torch.arange(3.0))
    for old, new in ((b"TORCH_CONTIGUOUS", b"_ORCH_CONTIGUOUS"), (b"_MEM_FORMAT_ENCODING", b"BytesStorageMetadata")):
        file.write_bytes(written.replace(old, new))
        with pytest.raises(UserError, match=r"asks for builtins.getattr"):
            open_dcp(tmp_path)


def test_a_part_of_a_tensor_is_read_from_the_chunks_that_hold_it(world, tmp_path: Path) -> None:
    """Chunks of ranks that this process is not: 2 x 2 boxes of uneven size, some transposed, one empty."""
    whole = torch.arange(7 * 5, dtype=torch.float64).reshape(7, 5)
    boxes = [((0, 0), (4, 3)), ((4, 0), (3, 3)), ((0, 3), (4, 2)), ((4, 3), (3, 2)), ((7, 0), (0, 5))]
    pickles.in_chunks(tmp_path, "a", whole, boxes)
    stored = open_dcp(tmp_path)
    for rows in range(8):
        for first in range(8 - rows):
            assert torch.equal(stored.read("a", (first, 1), (rows, 3)), whole[first : first + rows, 1:4])
    assert stored.read("a", (3, 0), (2, 5), torch.float32).dtype == torch.float32
    for wrong in (boxes[:3], [*boxes, boxes[0]], [((0, 0), (4, 3)), ((4, 0), (4, 3)), *boxes[2:]]):
        pickles.in_chunks(tmp_path, "a", whole, wrong)
        with pytest.raises(UserError, match="the parts of 'a' overlap or leave gaps"):
            open_dcp(tmp_path)
    overlapping = [((0, 0), (4, 3)), ((2, 0), (4, 3)), ((6, 0), (1, 5)), ((0, 3), (3, 2))]
    assert sum(rows * columns for _, (rows, columns) in overlapping) == whole.numel()
    pickles.in_chunks(tmp_path, "a", whole, overlapping)
    with pytest.raises(UserError, match="the parts of 'a' overlap or leave gaps"):
        open_dcp(tmp_path)


def test_only_the_manifests_files_are_read(tmp_path: Path) -> None:
    pickles.genuine(tmp_path)
    with pytest.raises(UserError, match=r"ck/.metadata: cannot be read safely: names '__0_0.distcp', which is not one"):
        open_dcp(tmp_path / "ck", {".metadata"})
    with pytest.raises(UserError, match=r"ck/.metadata: cannot be read safely: the manifest does not name it"):
        open_dcp(tmp_path / "ck", {"__0_0.distcp"})


@pytest.mark.full
def test_what_is_no_tensor_is_never_read(tmp_path: Path) -> None:
    name = "optim.param_groups.0.lr"
    pickles.stored(name, lambda folder: pickles.saved(pickles.calls(folder)["eval"]))(tmp_path)
    stored = open_dcp(tmp_path / "ck")
    assert hostile.read_all(stored).keys() == {"model.a", "model.b"} and name in stored.others
    assert not (tmp_path / "canary").exists()


@pytest.mark.usefixtures("one_second")
def test_what_is_wrong_is_said_with_the_file_and_the_name(tmp_path: Path) -> None:
    raw = pickles.raw_pickles(tmp_path / "canary")
    for name, expected in {
        "GLOBAL posix.system": "asks for posix.system, which no checkpoint needs",
        "dotted name behind torch": "asks for torch.serialization.os.system, which",
        "INST": "asks for posix.system, which",
        "a memo of four billion": "needs more memory or time than a real file of its size",
        "a key whose hash takes for ever": "needs more memory or time than a real file of its size",
        "BUILD of a class": "missing 1 required positional argument",
        "BUILD of a function": "missing 1 required positional argument",
        "nested without end": "holds a list",
        "empty": "Ran out of input",
    }.items():
        folder = tmp_path / name
        (pickles.genuine(folder) / ".metadata").write_bytes(raw[name])
        with pytest.raises(UserError) as caught:
            open_dcp(folder / "ck")
        assert str(caught.value).startswith(f"{folder}/ck/.metadata: ") and expected in str(caught.value)
    for name, expected in {
        "offset a string": "'model.a' lies outside '__0_0.distcp'",
        "call in a field of no use": "asks for posix.system",
        "path above": "names '../outside/__0_0.distcp', which is not one of the checkpoint's files",
        "tensor of a petabyte": "'model.a' is larger than its stored bytes",
    }.items():
        (folder := tmp_path / name).mkdir()
        pickles.dcp_cases()[name](folder)
        with pytest.raises(UserError, match=re.escape(expected)):
            open_dcp(folder / "ck")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dcp: tensor calls os.system", "__0_0.distcp: cannot be read safely: asks for posix.system, which no"),
        ("dcp: tensor of the old format", "is not in the format (zip) that torch.save has written since"),
        ("dcp: tensor with a record of 2 GB", "claims more bytes than it has"),
        ("torch file: compressed", "model.pt: cannot be read safely: is compressed, which torch.save never does"),
        ("torch file: a pipe", "model.pt: is not a regular file"),
        (
            "hf: config with auto_map",
            "config.json: auto_map asks to run Python code, which is never run",
        ),
        (
            "hf: shard above",
            "model.safetensors.index.json: file name '../outside/shard.safetensors' is not inside the folder",
        ),
        ("hf: header of an exabyte", "claims a header of 1,152,921,504,606,846,976 bytes, more than any real"),
        ("hf: config of a gigabyte", "config.json: is larger than 16,777,216 bytes"),
    ],
)
def test_the_check_that_is_meant_is_the_one_that_refuses(name: str, expected: str, tmp_path: Path) -> None:
    dict(hostile.hostile_cases())[name](tmp_path)
    with pytest.raises(UserError, match=re.escape(expected)):
        hostile._KINDS[name.split(":")[0]][1](tmp_path)


def test_a_genuine_torch_file_is_read_as_torch_does(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4).bfloat16())
    model[1].weight = nn.Parameter(model[1].weight.T.detach())
    state = {
        "model": model.state_dict(),
        "weight": model[0].weight,
        "step": 3,
        "note": ["a", (1.5, None)],
        "b": b"\xff",
        "more": [{1, 2}, torch.device("cpu"), collections.Counter("ab"), torch.float16, 1j, bytearray(b"a")],
    }
    file = tmp_path / "model.pt"
    torch.save(state, file)
    expected = torch.load(file, weights_only=True)["model"]
    found = hostile.read_all(open_torch(file))
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype
        assert tensor.stride() == expected[name].stride()


def test_every_kind_of_tensor_is_read_as_torch_does(tmp_path: Path) -> None:
    numbers = torch.arange(12)
    kinds = (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
    )
    kinds += ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    state = {kind: numbers.to(getattr(torch, kind)).reshape(3, 4) for kind in kinds}
    state |= {
        "part": numbers[3:9:2],
        "turned": numbers.reshape(3, 4).T,
        "number": torch.tensor(3.5),
        "none": numbers[:0],
    }
    state |= {"weight": nn.Parameter(torch.ones(2))}
    torch.save(state, tmp_path / "model.pt")
    found = hostile.read_all(open_torch(tmp_path / "model.pt"))
    assert list(found) == list(state)
    for name, tensor in found.items():
        assert tensor.dtype == state[name].dtype
        assert tensor.tolist() == state[name].tolist()


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    hf = hostile.hf_folder(tmp_path, shards=2)
    tokenizer = hostile.tokenizer_folder(tmp_path)
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}")
    torch.save({"a": torch.ones(2)}, hf / "model.pt")
    snapshot, blobs = (tmp_path / "models--x" / name for name in ("snapshots/1f", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate([*hf.iterdir(), *tokenizer.iterdir()]):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (alias := tmp_path / "alias").symlink_to(snapshot)  # a folder that the user names may be a link
    for folder in (snapshot, alias):
        spec = read_hf_config(folder)
        weights = open_weights(folder)
        weights.check(parameter_shapes(spec))
        assert weights.read("model.norm.weight", torch.Size([8]), (2,), (3,)).tolist() == [1, 1, 1]
        assert torch.equal(hostile.read_all(open_torch(folder / "model.pt"))["a"], torch.ones(2))
        assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("hello")) == "hello"
        assert len(tokenizer_files(folder)) == 3
        assert ChatTemplate.from_folder(folder).render([{"role": "user", "content": "hi"}]) == "hi"
    (hf / "config.json").symlink_to(blobs / "0")  # the same file, but that folder is no snapshot
    with pytest.raises(UserError, match=r"config.json: is a link to .*blobs/0, outside its folder; copy the file"):
        read_hf_config(hf)


def test_parts_fill_a_tensor_if_each_of_its_values_is_in_one_of_them() -> None:
    draws, seen = random.Random(0), collections.Counter[bool]()
    for _ in range(4000):
        shape = tuple(draws.randint(1, 3) for _ in range(draws.randint(1, 2)))
        boxes = [
            (tuple(draws.randint(0, side) for side in shape), tuple(draws.randint(0, side) for side in shape))
            for _ in range(draws.randint(1, 3))
        ]
        places = [
            place
            for offset, size in boxes
            for place in itertools.product(*(range(a, a + n) for a, n in zip(offset, size, strict=True)))
        ]
        fills = sorted(places) == [*itertools.product(*map(range, shape))]
        inside = all(a + n <= side for box in boxes for a, n, side in zip(*box, shape, strict=True))
        assert tables._fills_exactly(list(boxes), shape) == (fills and inside), (boxes, shape)
        seen[fills and inside] += 1
    assert min(seen.values()) > 50
    assert tables._fills_exactly([((), ())], ()) and not tables._fills_exactly([], ())
    assert not tables._fills_exactly([((0,), (1,))], (1, 1))


def test_a_template_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_bytes(b"a\r\n{{ messages[0].content }}")
    (tmp_path / "link.jinja").symlink_to(tmp_path / "mine.jinja")
    template = ChatTemplate.from_folder(REPO / "tests" / "assets" / "tokenizer", tmp_path / "link.jinja")
    assert template.render([{"role": "user", "content": "hi"}]) == "a\nhi"


def test_a_file_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_plain(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="a: is larger than 4 bytes"):
        read_plain(tmp_path / "a", 4)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "none")


@pytest.mark.full
@pytest.mark.skipif(not (SHARED_DATA / "qwen3_tokenizer").is_dir(), reason="needs Qwen3's own tokenizer")
def test_the_real_tokenizer_is_within_the_limits() -> None:
    folder = SHARED_DATA / "qwen3_tokenizer"
    assert load_tokenizer(folder).encode("Hello") and ChatTemplate.from_folder(folder)
    assert tokenizer_files(folder)
