"""What a Checkpointer saves is what it restores, in the background too; what does not fit is refused by name."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from titan_mi100.checkpoint import checkpointer as checkpoint
from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.checkpoint.resume import FoundCheckpoint, check_same_run, find_checkpoint
from titan_mi100.config.layout import Layout
from titan_mi100.config.settings import Config, TrainingConfig
from titan_mi100.errors import SaveError, UserError
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World, local_part, measure_gradients
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, random_rows

SPEC = Qwen3Spec(64, 16, 32, 2, 2, 1, 8, True, rope_theta=10_000.0)


class Job:
    """A small model with an optimizer that has some state."""

    def __init__(
        self,
        world: World,
        folder: Path,
        spec: ModelSpec = SPEC,
        seed: int = 0,
        precision: str = "bfloat16",
        **options: Any,
    ) -> None:
        config = Config(training=TrainingConfig(seq_len=8, seed=seed, mixed_precision_param=precision))
        data = made_up(random_rows(2, 8, spec.vocab_size, supervised_share=1.0))
        self.run = open_run(config, world, spec=spec, data=data)
        self.model, self.optimizer = self.run.model, self.run.optimizer
        self.checkpointer = Checkpointer(folder, self.model, self.optimizer, world, Layout(), 2, **options)
        self.step()

    def step(self) -> None:
        for number, (_, parameter) in enumerate(self.model.named_parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
            for name, tensor in self.checkpointer._tensors()
        }

    def save(self, step: int, **options: Any) -> None:
        self.checkpointer.save(step, {"step": step, "more": [1, None]}, about={"layout": {}}, **options)
        self.checkpointer.judge("")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("in_background", [False, True])
def test_what_was_saved_is_restored_whatever_happened_since(world: World, tmp_path: Path, in_background: bool) -> None:
    job = Job(world, tmp_path, in_background=in_background)
    saved = job.tensors()
    job.save(3)
    job.step()  # in the background, the save may still be under way
    job.checkpointer.wait()
    other = Job(world, tmp_path, seed=1)
    assert not same(other.tensors(), saved)
    found = find_checkpoint(tmp_path, world)
    assert found is not None and found[0].name == "step-3" and found[1]["layout"] == {}
    assert other.checkpointer.load(found[0]) == {"step": 3, "more": [1, None]}
    assert same(other.tensors(), saved)


def test_one_save_is_in_flight_and_the_copy_is_of_its_step(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, turns, real = Job(world, tmp_path, in_background=True), threading.Semaphore(0), sealed.seal

    def slow(*arguments: Any) -> Path:
        assert turns.acquire(timeout=30)
        return real(*arguments)

    monkeypatch.setattr(sealed, "seal", slow)
    expected = [job.tensors()]
    job.save(1)
    assert not sealed.list_checkpoints(tmp_path)
    job.step()
    expected.append(job.tensors())
    threading.Timer(0.3, turns.release).start()
    job.save(2)  # which waits for the first one
    assert [path.name for path in sealed.list_checkpoints(tmp_path)] == ["step-1"]
    job.step()
    turns.release()
    job.checkpointer.wait()
    for step in (1, 2):
        job.checkpointer.load(tmp_path / f"step-{step}")
        assert same(job.tensors(), expected[step - 1])


def test_a_save_in_the_background_writes_a_copy_and_not_the_weight_itself(world: World, tmp_path: Path) -> None:
    mesh, checkpointer = torch.distributed.init_device_mesh("cpu", (1,)), Job(world, tmp_path).checkpointer
    for weight in (torch.ones(4, 3), DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])):
        copy = checkpointer._host_copies({"a": weight})["a"]
        weight.mul_(2)  # the next step
        assert type(copy) is type(weight) and torch.equal(local_part(copy)[0], torch.ones(4, 3))
        other = checkpointer._host_copies({"a": weight, "b": torch.ones(2)})  # the memory of the first copy
        assert local_part(other["a"])[0].data_ptr() == local_part(copy)[0].data_ptr()
        assert torch.equal(local_part(other["a"])[0], torch.full((4, 3), 2.0)) and other["b"].shape == (2,)


@pytest.mark.parametrize("error", [MemoryError("cannot lock"), RuntimeError("no driver"), AssertionError("no CUDA")])
def test_memory_that_cannot_be_locked_makes_a_save_slower_and_is_said_once(
    error: Exception, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint.pinned, "page_locked_zeros", fail)
    copies = Job(world, tmp_path).checkpointer._host_copies({"a": torch.ones(3), "b": torch.ones(2)})
    assert torch.equal(copies["a"], torch.ones(3)) and caplog.text.count(f"is not locked: {error}") == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_said_and_leaves_what_was_there(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    job = Job(world, tmp_path, in_background=in_background)
    job.save(1)
    job.checkpointer.wait()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    def save() -> None:
        job.save(2)
        job.checkpointer.wait()

    with pytest.raises(SaveError, match=r"step 2 could not be written: the disk is full"):
        save()
    assert job.checkpointer.has_failed() == in_background
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    sealed.verify(tmp_path / "step-1")


def test_a_disk_that_will_not_do_is_told_before_anything_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(world, tmp_path)
    size = sum(tensor.nbytes for tensor in job.tensors().values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(SaveError, match=r"the disk is full: it needs 0\.00 GiB"):
        job.save(1)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    job.save(1)


def stock_save(folder: Path, job: Job, change: dict[str, torch.Tensor | None]) -> Path:
    """A checkpoint whose tensors are not quite the job's, sealed as one should be."""
    tensors = {**job.tensors(), **change}
    aside = sealed.begin(folder, 1)
    dcp.save({n: t for n, t in tensors.items() if t is not None}, storage_writer=dcp.FileSystemWriter(aside))
    (aside / "trainer.json").write_text(json.dumps({"step": 1}))
    written = {path.name: (path.stat().st_size, checkpoint.sealed.sha256_of(path)) for path in aside.iterdir()}
    return sealed.seal(aside, written, {"step": 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, "1 missing, the first model.norm.weight"),
        ({"model.extra.weight": torch.zeros(2)}, "1 unexpected, the first model.extra.weight"),
        ({"model.norm.weight": torch.zeros(4)}, r"1 mis-shaped, the first model.norm.weight \(checkpoint: \(4,\)"),
        ({"model.norm.weight": torch.zeros(16).bfloat16()}, "1 mis-typed, the first model.norm.weight"),
    ],
)
def test_tensors_that_are_not_the_runs_are_named(
    world: World, tmp_path: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    job = Job(world, tmp_path)
    path = stock_save(tmp_path, job, change)
    before = job.tensors()
    with pytest.raises(UserError, match=words):
        job.checkpointer.load(path)
    assert same(job.tensors(), before)


def test_entries_that_are_no_tensors_are_refused(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path)
    path = stock_save(tmp_path, job, {"more": {1, 2}})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="more"):
        job.checkpointer.load(path)


def test_what_is_refused_once_a_checkpoint_is_sealed_is_said_and_ends_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    job = Job(world, tmp_path)
    monkeypatch.setattr(sealed, "remove", refuse)
    for step in range(1, 5):
        job.save(step)
    assert [sealed.step_of(path) for path in sealed.list_checkpoints(tmp_path)] == [1, 2, 3, 4]
    assert "cannot remove old checkpoints" in caplog.text


def test_what_this_node_cannot_read_is_left_alone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(world, tmp_path)
    job.save(1)
    job.save(2)

    def refuse(_: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sealed, "sha256_of", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Input/output error\); fix that, or rename .*step-2"):
        find_checkpoint(tmp_path, world)
    monkeypatch.undo()
    found = find_checkpoint(tmp_path, world)
    assert found is not None and found.path.name == "step-2" and found.trainer_state["step"] == 2
    # as seen by a second rank on a node that does not have the file
    views = iter([f"{tmp_path / 'step-2' / 'trainer.json'}: is missing, or not a regular file", ""])

    def view(*_: object) -> None:
        if problem := next(views):
            raise sealed.DamagedError(problem)

    monkeypatch.setattr(sealed, "verify", view)
    with pytest.raises(UserError, match="but rank 0 finds it intact; all nodes must see the same file system"):
        find_checkpoint(tmp_path, world)
    assert len(sealed.list_checkpoints(tmp_path)) == 2


def test_the_best_one_is_kept_under_its_name(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path)
    for step in range(1, 7):
        job.save(step, best=2 if step >= 2 else None)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-2", "step-5", "step-6", "best"} and (tmp_path / "best").readlink() == Path("step-2")
    job.save(7, best=7)
    assert (tmp_path / "best").resolve().name == "step-7"
    assert {path.name for path in tmp_path.iterdir()} == {"step-6", "step-7", "best"}


FINGERPRINTS = {"model": {"hidden_size": 64, "rope_theta": 1e4}, "data": "ab", "seed": 1}


@pytest.mark.parametrize(
    ("now", "allowed", "words"),
    [
        ({}, (), ""),
        ({"seed": 2}, (), r"differs from it: seed \(1, now 2\);"),
        ({"seed": 2}, ("data",), "differs from it: seed"),
        ({"seed": 2}, ("seed",), ""),
        ({"model": {"hidden_size": 64, "rope_theta": 1e6}}, (), r"model\.rope_theta \(10000\.0, now 1000000\.0\)"),
        ({"model": {"hidden_size": 32, "rope_theta": 1e6}}, ("model.rope_theta",), r"it: model\.hidden_size \(64"),
        ({"model": {"hidden_size": 32, "rope_theta": 1e6}}, ("model",), ""),
        ({"data": "cd"}, (), r"differs from it: seq_len \(8, now 16\), file a\.jsonl \(None, now 12\)"),
        ({"data": "cd"}, ("data",), ""),
    ],
)  # fmt: skip
def test_a_run_goes_on_as_what_it_was_unless_a_difference_is_allowed_by_name(
    now: dict[str, Any], allowed: tuple[str, ...], words: str
) -> None:
    found = FoundCheckpoint(Path("step-1"), {"fingerprints": FINGERPRINTS, "data": {"seq_len": 8}}, {})
    about = {"fingerprints": {**FINGERPRINTS, **now}, "data": {"seq_len": 16, "file a.jsonl": 12}}
    if not words:
        return check_same_run(found, about, allowed)
    with pytest.raises(UserError, match=words):
        check_same_run(found, about, allowed)
    return None


def test_a_run_does_not_go_on_with_another_kind_of_optimizer_state() -> None:
    found = FoundCheckpoint(Path("step-1"), {"fingerprints": FINGERPRINTS, "data": {}}, {})
    about = {"fingerprints": FINGERPRINTS, "data": {}, "optimizer": {"state": "8bit", "master": "fp32"}}
    with pytest.raises(UserError, match=r"optimizer\.state \(fp32, now 8bit\).*initial_load_path"):
        check_same_run(found, about, ())
    # a manifest from before a field was added: the field had its default
    check_same_run(found._replace(manifest={**found.manifest, "optimizer": {"state": "8bit"}}), about, ())


def test_a_step_that_is_not_finite_changes_nothing(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path, precision="float32")
    trainer = job.run.trainer
    before = job.tensors()
    weight = dict(job.model.named_parameters())["model.norm.weight"]
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    kept = local[0].item()
    with torch.no_grad():
        local[0] = float("nan")
    result = trainer.step()
    assert result.skipped and list(result.nonfinite_microbatches) == [0] and result.loss != result.loss
    with torch.no_grad():
        local[0] = kept
    assert same(job.tensors(), before)
    result = trainer.step()
    assert not result.skipped and not list(result.nonfinite_microbatches) and not same(job.tensors(), before)


def test_a_copy_that_does_not_count_in_the_norm_must_be_finite(world: World) -> None:
    """A pipeline's second copy of a tied weight is updated too, so a NaN in it is one in the model."""
    counted, copy = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    counted.grad, copy.grad = torch.tensor([3.0, 4.0]), torch.tensor([1.0, float("nan")])
    measured = measure_gradients([counted, copy], [copy])
    assert (measured.squares, measured.finite) == (25.0, False)
    copy.grad = torch.ones(2)
    measured = measure_gradients([counted, copy], [copy])
    assert (measured.squares, measured.finite) == (25.0, True)


def test_what_has_a_checkpoints_name_and_is_none_is_refused_before_a_save_meets_it(
    world: World, tmp_path: Path
) -> None:
    job = Job(world, tmp_path)
    job.save(1)
    (tmp_path / "elsewhere").mkdir()
    for make in ("symlink_to", "touch"):
        path = tmp_path / "step-2"
        getattr(path, make)(*(["elsewhere"] if make == "symlink_to" else []))
        with pytest.raises(
            UserError,
            match="step-2: has the name of a checkpoint, but is a link or not a folder; put the folder itself",
        ):
            find_checkpoint(tmp_path, world)
        path.unlink()
    found = find_checkpoint(tmp_path, world)
    assert found is not None and found.path.name == "step-1"
