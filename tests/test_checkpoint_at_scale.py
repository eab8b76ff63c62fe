"""Under HSDP the first replica alone plans and writes, a load exchanges no names, and what is wrong on one rank is
refused on all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from conftest import REPO, torchrun

from titan_mi100.checkpoint import sealed
from titan_mi100.config.layout import Layout

RANKS, WRITERS, OTHERS = range(4), (0, 1), (2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hsdp")
    torchrun(str(REPO / "tests/gloo/job_checkpoint.py"), str(path), processes=4)
    return path


@pytest.fixture(scope="module")
def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.full
def test_the_files_of_a_checkpoint_are_the_first_replicas(folder: Path) -> None:
    path = folder / "layers-2" / "step-1"
    files = sealed.verify(path)["files"]
    assert {name for name in files if name[0] == "_"} == {"__0_0.distcp", "__1_0.distcp"}
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert {info.relative_path for info in metadata.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}
    for name in ("__0_0.distcp", "__1_0.distcp"):  # nothing is written that is not read
        entries = [info for info in metadata.storage_data.values() if info.relative_path == name]
        assert (path / name).read_bytes().count(b"PK\x05\x06") == len(entries) > 0
    # both halves of a matrix; what each rank holds whole, once
    assert len(metadata.state_dict_metadata["model.embed_tokens.weight"].chunks) == 2
    assert len(metadata.state_dict_metadata["optimizer.model.embed_tokens.weight.step"].chunks) == 1


@pytest.mark.full
def test_replicas_that_do_not_write_send_nothing(records: list[dict[str, Any]]) -> None:
    for rank in RANKS:
        sent = records[rank]["2 layers"]["save"]
        assert bool(sent) == (rank in WRITERS), (rank, sent)
    assert len(records[1]["2 layers"]["save"]) == 1  # what it wrote, for .metadata and the manifest


@pytest.mark.full
def test_the_bytes_that_a_checkpoint_needs_are_counted_once(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert record["2 layers"]["planned"] == record["2 layers"]["whole"]


@pytest.mark.full
def test_a_load_exchanges_no_names(records: list[dict[str, Any]]) -> None:
    """Whatever the number of tensors, and nothing that every rank would have to hold from every other."""
    for record in records:
        assert record["2 layers"]["load"] == record["4 layers"]["load"] == []
    grown = [record["4 layers"]["save"] for record in records]
    assert grown[1][0] > 1.3 * records[1]["2 layers"]["save"][0]  # the counter does see names where they are sent


REFUSED = {
    "a tensor more": "1 missing, the first model.extra.weight (checkpoint: none, model: (2,) torch.float32)",
    "another shape": "1 mis-shaped, the first model.norm.weight (checkpoint: (16,) torch.float32, model: (4,) torch",
    "another dtype": "1 mis-typed, the first model.norm.weight (checkpoint: (16,) torch.float32, model: (16,) torch",
    "no rank has it": "1 unexpected, the first model.norm.weight (checkpoint: (16,) torch.float32, model: none)",
    "another folder": "not the same on all ranks; all nodes must see the same file system",
    "damaged for one": "__0_0.distcp: damaged, but rank 0 finds it intact; all nodes must see the same file system",
    "nothing wrong": "nothing",
}


@pytest.mark.full
@pytest.mark.parametrize("here", [1, 3])
def test_what_is_wrong_on_one_rank_is_refused_on_all_alike(here: int, records: list[dict[str, Any]]) -> None:
    for what, words in REFUSED.items():
        (found,) = {record[f"wrong on {here}"][what] for record in records}
        assert words in found and found.startswith(("UserError", "nothing")), (what, found)


@pytest.mark.full
@pytest.mark.parametrize("in_background", [False, True])
def test_a_writer_that_fails_is_known_to_the_replicas_that_wait(
    in_background: bool, records: list[dict[str, Any]]
) -> None:
    for rank, record in enumerate(records):
        found = record[f"failing, {in_background}"]
        assert found["first"] == found["left"] == ["step-1"]
        assert found["said"].startswith("SaveError")
        assert "step 2 could not be written: the disk is full" in found["said"]
        assert found["failed here"] == (in_background and rank in WRITERS)
        assert found.get("thread", False) == (in_background and rank in WRITERS)
        assert found["again"] == (found["said"] if in_background else "nothing")


@pytest.mark.parametrize("layout", [Layout(4, 3, 2, 5), Layout(2, 2), Layout(1, 4, zero_stage=0), Layout(1, 1, 2, 3)])
def test_twins_hold_the_same_place_of_the_first_replica(layout: Layout) -> None:
    places = [
        (stage, replica, shard, part)
        for stage in range(layout.pp)
        for replica in range(layout.dp_replicate)
        for shard in range(layout.dp_shard)
        for part in range(layout.tp)
    ]
    for rank, (stage, _, shard, part) in enumerate(places):
        assert places[layout.twin(rank)] == (stage, 0, shard, part)
