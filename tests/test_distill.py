"""Distillation: against a dense loop in fp64 in every layout; the teacher's pass, its folder, and what vLLM writes."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import ASSETS, random_documents, records_of
from gloo.job_answers import data_of, recorded
from gloo.job_parity import open_split, run_split
from test_model import reference as transformers_model
from torch import Tensor

from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, ObjectiveConfig
from titan_mi100.data.answer_store import LogprobStore, Wanted, tokens_hash
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import DocumentTable
from titan_mi100.errors import Preempted, UserError
from titan_mi100.launch import launcher
from titan_mi100.losses import log_of_rest
from titan_mi100.model.loss import HeadMemory, likeliest, of_labels, token_losses
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.open_run.columns import open_teacher
from titan_mi100.open_run.run import Supervision
from titan_mi100.open_run.start import open_run
from titan_mi100.open_run.teacher import write_teacher
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.tools import teach
from titan_mi100.workshop import vllm_answers

SPEC = Qwen3Spec(320, 32, 48, 4, 4, 2, 8, False, rope_theta=1e4)
SEQ_LEN, ROWS, VOCABULARY = 32, 8, 320
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
CP = {"context_parallel_degree": 2}


@cache
def make_case() -> dict[str, Any]:
    documents = []
    for row in range(ROWS):
        documents += random_documents(VOCABULARY, [[17, 15], [9, 7, 4, 12], [32], [5, 5, 11, 11]][row % 4], row, 0.6)
    weights = transformers_model(SPEC).double().state_dict()
    return {
        "spec": SPEC, "weights": weights, "documents": documents, "seq_len": SEQ_LEN, "together": 1, "labels": None,
    }  # fmt: skip


@cache
def teacher_logits() -> list[Tensor]:
    """Of the learned tokens of each document, (tokens, vocabulary); made up."""
    torch.manual_seed(3)
    return [2 * torch.randn(int(learned[1:].sum()), VOCABULARY).double() for _, learned in make_case()["documents"]]


def wanted() -> Wanted:
    """Of the case's rows, which are those of training and of validation."""
    data = data_of(make_case())
    return Wanted([source.rows for source in (*data.sources, *data.validation)], VOCABULARY)  # type: ignore[misc]


def arrays_of(documents: np.ndarray, k: int) -> dict[str, np.ndarray]:
    found = [teacher_logits()[number].log_softmax(-1).topk(k) for number in documents.tolist()]
    return {
        "documents": documents, "tokens": np.array([len(each.values) for each in found]),
        "ids": torch.cat([each.indices for each in found]).int().numpy(),
        "log_p": torch.cat([each.values for each in found]).float().numpy(),
    }  # fmt: skip


def write_store(folder: Path, k: int, **other: Any) -> LogprobStore:
    """All parts of a teacher's folder."""
    about = replace(wanted().about("made up", "none", k, "float64"), **other)
    store = LogprobStore(folder, about, "make it anew")
    store.begin()
    for number in range(about.parts):
        store.write(number, arrays_of(wanted().documents(about, number), k), wanted())
    return store


def opened(folder: Path) -> LogprobStore:
    data = data_of(make_case())
    return open_teacher(folder, data, tokens_hash([data.train]))  # type: ignore[list-item]


@cache
def expected(k: int, weight: float, renormalise: bool) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, measures and gradients, document by document, from the teacher's probabilities as they are stored."""
    model = Qwen3(SPEC).double()
    model.load_state_dict(make_case()["weights"])
    each, measures = [], list[list[float]]()
    for (ids, learned), logits in zip(make_case()["documents"], teacher_logits(), strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        mask = torch.from_numpy(learned[1:])
        log_q = model(tokens[None])[0, :-1].log_softmax(-1)[mask]
        for own, label, of_teacher in zip(log_q, tokens[1:][mask], logits.log_softmax(-1), strict=True):
            best = of_teacher.topk(k)
            p, q = best.values.float().double().exp(), own.exp()[best.indices]
            if renormalise:
                kl = (p / p.sum() * (p / p.sum() / q).log()).sum()
            else:
                kl = (p * (p / q).log()).sum()
                if k < VOCABULARY:
                    kl = kl + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
            each.append(weight * kl - (1 - weight) * own[label])
            agrees = float(own.argmax() == best.indices[0])
            measures.append([kl.item(), -own[label].item(), p.sum().item(), agrees])
    loss = torch.stack(each).mean()
    loss.backward()
    names = ("kl", "cross_entropy", "kept_mass", "agreement")
    means = dict(zip(names, np.mean(measures, axis=0).tolist(), strict=True))
    return loss.item(), means, {name: p.grad for name, p in model.named_parameters()}


def split(folder: Path, accumulation: int, ranks: int = 1, rest: str = "bucket", **options: Any) -> dict[str, Any]:
    objective = {"name": "distill", "teacher": str(folder), "teacher_weight": options.pop("weight", 0.7), "rest": rest}
    return {
        "param": "float64", "backend": "eager", "local_batch_size": ROWS // (accumulation * ranks),
        "accumulation": accumulation, "objective": objective, **options,
    }  # fmt: skip


def assert_equal(result: dict[str, Any], gradients: list[tuple[str, Tensor]], k: int, wanted: dict[str, Any]) -> None:
    objective = wanted["objective"]
    loss, measures, exact = expected(k, objective["teacher_weight"], objective["rest"] == "renormalise")
    assert result["loss"] == pytest.approx(loss, rel=1e-12)
    assert result["measures"] == pytest.approx(measures, rel=1e-12)
    assert {name for name, _ in gradients} == set(exact)
    for name, gradient in gradients:
        assert (gradient - exact[name]).norm() <= 1e-12 * exact[name].norm(), name


@pytest.mark.parametrize(("k", "rest", "weight"), [(5, "bucket", 0.7), (5, "renormalise", 1.0), (1, "bucket", 1.0)])
def test_loss_and_gradients_equal_a_dense_loop(
    k: int, rest: str, weight: float, full: bool, world: World, tmp_path: Path
) -> None:
    write_store(tmp_path, k)
    for accumulation in (1, 4) if full else (4,):
        wanted = split(tmp_path, accumulation, rest=rest, weight=weight)
        result = run_split(world, make_case(), wanted, data=data_of(make_case()))
        assert_equal(result, result["gradients"], k, wanted)


def test_all_ids_are_the_dense_divergence(world: World, tmp_path: Path) -> None:
    """The stored mass is one but for rounding: the bucket of the rest must be empty, with a finite gradient."""
    write_store(tmp_path, VOCABULARY)
    for rest in ("bucket", "renormalise"):
        wanted = split(tmp_path, 2, rest=rest, weight=1.0)
        result = run_split(world, make_case(), wanted, data=data_of(make_case()))
        loss, _, exact = expected(VOCABULARY, 1.0, False)
        assert result["loss"] == pytest.approx(loss, rel=1e-7)  # the stored log p are fp32
        for name, gradient in result["gradients"]:
            assert (gradient - exact[name]).norm() <= 1e-6 * exact[name].norm(), name


def run_job(processes: int, splits: list[dict], folder: Path, k: int) -> None:
    given = {"case": make_case(), "splits": splits}
    for each, of_ranks in records_of("job_answers", given, folder, processes):
        for record in of_ranks:
            assert_equal(record, record["gradients"], k, each)
        assert_recorded(of_ranks[0]["recorded"], each["k"])


def assert_recorded(arrays: dict[str, np.ndarray], k: int) -> None:
    """The k likeliest ids of transformers' model, of training and validation rows."""
    model: Any = Qwen3(SPEC).double()
    model.load_state_dict(make_case()["weights"])
    first, documents = 0, make_case()["documents"]
    assert sorted(arrays["documents"].tolist()) == sorted(2 * list(range(len(documents))))
    for number, count in zip(arrays["documents"].tolist(), arrays["tokens"].tolist(), strict=True):
        ids, learned = documents[number]
        with torch.no_grad():
            scores = model(torch.from_numpy(ids.astype(np.int64))[None])[0, :-1].log_softmax(-1)
        best = scores[torch.from_numpy(learned[1:])].topk(k)
        assert (arrays["ids"][first : first + count] == best.indices.numpy()).all()
        np.testing.assert_allclose(arrays["log_p"][first : first + count], best.values.numpy(), rtol=0, atol=1e-6)
        first += count


@pytest.mark.full
def test_distillation_and_the_pass_on_two_processes(full: bool, tmp_path: Path) -> None:
    write_store(tmp_path / "teacher", 5)
    teacher = tmp_path / "teacher"
    splits = [split(teacher, 2, parallelism=TP, k=7), split(teacher, 4, parallelism=PP, k=7)]
    splits.append(split(teacher, 2, parallelism=CP, k=7))
    if full:
        splits += [split(teacher, 2, 2, parallelism={"zero_stage": stage}, k=3) for stage in (0, 3)]
        splits += [
            split(teacher, 4, rest="renormalise", parallelism=PP, k=320),
            split(teacher, 2, 2, k=320, compile=True),
        ]
    run_job(2, splits, tmp_path, 5)


@pytest.mark.full
def test_distillation_and_the_pass_on_four_processes(tmp_path: Path) -> None:
    write_store(tmp_path / "teacher", 5)
    layouts = ((4, {"data_parallel_replicate_degree": 2}), (2, TP), (2, PP), (1, {**TP, **PP}))
    layouts += ((2, CP), (1, {**CP, **TP}), (1, {**CP, **PP}), (1, {"context_parallel_degree": 4}))
    run_job(4, [split(tmp_path / "teacher", 2, n, parallelism=each, k=7) for n, each in layouts], tmp_path, 5)


@pytest.mark.parametrize("memory", [HeadMemory(1), HeadMemory(1 << 25)])
def test_the_likeliest_ids_of_blocks_of_the_vocabulary(memory: HeadMemory) -> None:
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(1, 9, 16), torch.randn(2500, 16), torch.tensor([0, 3, 8])
    weight[2400] = weight[3]  # equal logits in different blocks: the least id comes first
    predicted = token_losses(hidden, weight, of_labels(torch.zeros(1, 9, dtype=torch.long), tokens), memory=memory)
    for k in (1, 20, 2500):
        ids, log_p = likeliest(hidden[0, tokens], weight, predicted.best, k, 2500, memory=memory)
        exact = (hidden[0, tokens] @ weight.T).log_softmax(-1)
        order = exact.argsort(stable=True, dim=1, descending=True)[:, :k]
        assert (ids == order).float().mean() > 0.99  # neighbours may differ by rounding
        torch.testing.assert_close(log_p, exact.gather(1, order), rtol=1e-5, atol=1e-5)
    ids, log_p = likeliest(hidden[0, tokens], weight, predicted.best, 100, 100, memory=memory)  # the others are padding
    assert ids.sort(1).values.tolist() == [list(range(100))] * 3
    torch.testing.assert_close(log_p, exact.gather(1, ids), rtol=1e-5, atol=1e-5)


def test_a_rest_of_nothing_has_a_finite_gradient() -> None:
    log_q = torch.zeros(3, dtype=torch.float32, requires_grad=True)
    log_of_rest(log_q).sum().backward()
    assert log_q.grad is not None and log_q.grad.isfinite().all()


def test_a_damaged_or_unfinished_folder_or_one_of_other_rows(world: World, tmp_path: Path, small_parts: None) -> None:
    store = write_store(tmp_path, 4)
    assert store.about.parts == 6 and store.is_complete
    [part] = tmp_path.glob("part-00000-*")
    whole = part.read_bytes()
    part.unlink()
    with pytest.raises(UserError, match="5 of 6 parts are there; run titan-mi100 teach again: it goes on"):
        opened(tmp_path)
    content = bytearray(whole)
    content[-1] ^= 1
    part.write_bytes(bytes(content))
    with pytest.raises(UserError, match="is damaged; delete it, and make it again: titan-mi100 teach"):
        open_split(world, make_case(), split(tmp_path, 1), data=data_of(make_case()))
    for change, words in (
        ({"tokenizer": "other"}, "another tokenizer"), ({"tokens": "other"}, "other rows, or other settings"),
        ({"kind": "reference", "k": 0}, "another purpose"), ({"format": 1}, "an older format"),
        ({"format": 3}, "a newer format"), ({"k": -1}, "k = -1 must be"), ({"more": 1}, "unknown key more"),
        ({"kind": "both"}, "do not fit each other"),
    ):  # fmt: skip
        about = json.loads((tmp_path / "store.json").read_text()) | change
        other = tmp_path / "other"
        other.mkdir()
        (other / "store.json").write_text(json.dumps(about))
        with pytest.raises(UserError, match=words):
            opened(other)
        shutil.rmtree(other)
    with pytest.raises(UserError, match="holds no teacher's answers; make it of this run's data"):
        open_split(world, make_case(), split(other, 1), data=data_of(make_case()))
    part.write_bytes(whole)
    opened(tmp_path).verify(wanted())


def forge(folder: Path, change: Callable[[dict[str, np.ndarray]], object], **metadata: str) -> None:
    """Change the first part's arrays, and give it the name and the metadata of a sound one."""
    [path] = folder.glob("part-00000-*")
    with safetensors.safe_open(path, "np") as file:
        arrays = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        about = file.metadata() | metadata
    change(arrays)
    content = safetensors.numpy.save(arrays, about)
    path.unlink()
    path.with_name(f"part-00000-{hashlib.sha256(content).hexdigest()[:16]}.safetensors").write_bytes(content)


def put(name: str, place: Any, value: Any) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays[name].__setitem__(place, value)


def other(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays.update({name: make(arrays[name])})


# What somebody, a disk or another program may have done to a part that is named and marked as a sound one.
_OF_BOTH: dict[str, Callable[[dict[str, np.ndarray]], object]] = {
    "an array is missing": lambda arrays: arrays.pop("tokens"),
    "an array more": lambda arrays: arrays.update(weights=np.zeros(3)),
    "another dtype": other("documents", lambda array: array.astype(np.int32)),
    "another shape": other("tokens", lambda array: array[:, None]),
    "a document too many": lambda arrays: arrays.update({n: np.append(arrays[n], 1) for n in ("documents", "tokens")}),
    "a document less": lambda arrays: arrays.update({n: arrays[n][1:] for n in ("documents", "tokens")}),
    "a document that is none": put("documents", 0, 10_000),
    "a negative document": put("documents", 0, -1),
    "documents of another order": other("documents", lambda array: array[::-1]),
    "other numbers of tokens": other("tokens", lambda array: array + 1),
    "tokens moved between documents": other("tokens", lambda array: np.roll(array, 1)),
}
_OF_TEACHERS = {
    "an id behind the vocabulary": put("ids", (0, 0), VOCABULARY),
    "an id that is ignored elsewhere": put("ids", (0, 0), -100),
    "an id twice": lambda arrays: put("ids", (0, 1), arrays["ids"][0, 0])(arrays),
    "a positive log p": put("log_p", (0, 0), 0.5),
    "no number": put("log_p", (0, 3), np.nan),
    "no probability": put("log_p", (0, 3), -np.inf),
    "probabilities of more than 1": put("log_p", 0, -0.5),
    "the likeliest is not first": other("log_p", lambda array: array[:, ::-1]),
    "other log p than ids": other("log_p", lambda array: array[:-1]),
    "less ids per token": lambda arrays: arrays.update({n: arrays[n][:, :2] for n in ("ids", "log_p")}),
    "logits in the place of log p": other("log_p", lambda array: array - array.min() + 1),
    "half precision": other("log_p", lambda array: array.astype(np.float16)),
    "ids of 64 bits": other("ids", lambda array: array.astype(np.int64)),
}
_OF_REFERENCES = {
    "no number": put("sums", 0, np.nan),
    "a positive sum": put("sums", 1, 2.0),
    "no probability": put("sums", 1, -np.inf),
    "a sum less": other("sums", lambda array: array[:-1]),
    "single precision": other("sums", lambda array: array.astype(np.float32)),
    "a teacher's arrays": lambda arrays: arrays.update(ids=np.zeros((3, 1), np.int32)),
}


@pytest.mark.parametrize("kind", ["teacher", "reference"])
def test_no_array_of_a_store_is_believed(kind: str, tmp_path: Path, small_parts: None) -> None:
    fits, k = wanted(), 4 if kind == "teacher" else 0
    about = fits.about("made up", "none", k, "float64")
    sound = LogprobStore(tmp_path / "sound", about, "make it anew")
    sound.begin()
    for number in range(about.parts):
        arrays = arrays_of(fits.documents(about, number), 4)
        if not k:
            arrays = {**{name: arrays[name] for name in ("documents", "tokens")}, "sums": -1.0 * arrays["tokens"]}
        sound.write(number, arrays, fits)
    damages = _OF_BOTH | (_OF_TEACHERS if k else _OF_REFERENCES)
    for what, change in damages.items():
        folder = tmp_path / what
        shutil.copytree(sound.folder, folder)
        forge(folder, change)
        with pytest.raises(UserError, match="; delete it, and"):
            LogprobStore(folder, about, "").verify(fits, tmp_path / "cache")
        arrays = {name: array.copy() for name, array in sound.load(0).items()}
        change(arrays)
        with pytest.raises(UserError, match="part 0 is not written, as it"):  # the writer asks the same
            sound.write(0, arrays, fits)
    for what, metadata in {
        "of another store": "part 0 of another",
        "another part": f"part 1 of {about.digest}",
    }.items():
        shutil.copytree(sound.folder, tmp_path / what)
        forge(tmp_path / what, lambda arrays: None, of=metadata)
        with pytest.raises(UserError, match="was written for another folder or as another part"):
            LogprobStore(tmp_path / what, about, "").verify(fits)
    for _ in range(2):  # the second time what was judged is remembered
        LogprobStore(sound.folder, about, "").verify(fits, tmp_path / "cache")


def test_parts_that_belong_to_no_store_are_refused(tmp_path: Path, small_parts: None) -> None:
    write_store(tmp_path / "sound", 4)
    [first, second, *_] = sorted(path.name for path in (tmp_path / "sound").glob("part-*"))

    def damage(what: str, words: str, change: Callable[[Path], object]) -> None:
        shutil.copytree(tmp_path / "sound", tmp_path / what)
        change(tmp_path / what)
        with pytest.raises(UserError, match=words):
            opened(tmp_path / what).verify(wanted())

    damage("without", "is without its store.json", lambda folder: (folder / "store.json").unlink())
    damage(
        "twice",
        "has the number of part-00000",
        lambda folder: shutil.copy(folder / first, folder / f"part-00000-{'0' * 16}.safetensors"),
    )
    damage(
        "beyond",
        "is no part of the teacher",
        lambda folder: (folder / first).rename(folder / first.replace("00000", "00006")),
    )
    damage("odd", "is no part of the teacher", lambda folder: shutil.copy(folder / first, folder / "copy.safetensors"))
    damage("folder", "is not a regular file", lambda folder: (folder / first).unlink() or (folder / first).mkdir())
    damage("pipe", "is not a regular file", lambda folder: (folder / first).unlink() or os.mkfifo(folder / first))
    damage(
        "link",
        "is a link to",
        lambda folder: (folder / first).unlink() or (folder / first).symlink_to(tmp_path / "sound" / first),
    )
    damage("swapped", "is damaged", lambda folder: (folder / second).write_bytes((folder / first).read_bytes()))
    damage(
        "store pipe",
        "is not a regular file",
        lambda folder: (folder / "store.json").unlink() or os.mkfifo(folder / "store.json"),
    )
    damage("no json", "cannot be read as JSON", lambda folder: (folder / "store.json").write_text("{"))
    about = json.loads((tmp_path / "sound" / "store.json").read_text())
    text = json.dumps(about | {"weights": "of another run"})
    damage("other weights", "was written for another folder", lambda folder: (folder / "store.json").write_text(text))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be read \\(Not a directory\\)"):
        opened(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written \\(Not a directory\\)"):
        LogprobStore(tmp_path / "file" / "teacher", wanted().about("", "", 4, ""), "").begin()
    left = tmp_path / "sound" / ".part-00003"  # of an earlier version that was killed: a link is not followed
    left.symlink_to(tmp_path / "file")
    opened(tmp_path / "sound").begin()
    assert not left.is_symlink() and (tmp_path / "file").exists()


def test_what_a_model_thinks_of_rows_on_one_process(world: World) -> None:
    assert_recorded(dict(recorded(world, make_case(), {**split(Path(), 2), "k": 6})), 6)


def student(folder: Path, **more: str) -> Config:
    rows = [{"prompt": f"{i} + 3?", "completion": str(i + 3)} for i in range(20)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "model.flavor": "debug", "model.tokenizer_path": str(ASSETS / "tokenizer"), "data.path": str(path),
        "data.cache_folder": str(folder / "cache"), "training.seq_len": "64", "training.steps": "2",
        "training.gradient_accumulation_steps": "1", "training.mixed_precision_param": "float32",
        "metrics.enable_tensorboard": "false", **more,
    }  # fmt: skip
    return load_config([word for key, value in given.items() for word in (f"--{key}", value)], 1)


def settings_of_a_pass(options: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that `titan-mi100 teach` starts the launcher with."""
    started: list[list[str]] = []
    monkeypatch.setattr(launcher, "main", lambda words, program: started.append(words) or 0)
    assert teach.main(options) == 0
    return started[0]


def test_a_teacher_writes_its_folder_and_a_student_learns_from_it(
    world: World, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the product's own config of a pass, whose adapter changes nothing; and the folder goes on after a stop."""
    config, out = student(tmp_path), tmp_path / "teacher"
    model = tmp_path / "run"
    model.mkdir()
    run = open_run(config, world, model)
    run.save()
    run.close()
    (tmp_path / "student.toml").write_text(to_toml(config))
    options = ["--job.config_file", str(tmp_path / "student.toml"), "--model", str(model / "checkpoint" / "step-0")]
    own = load_config(settings_of_a_pass([*options, "--out", str(out), "--top_k", "5"], monkeypatch), 1)
    stops = iter([False, False, True])  # two of the first part's forwards, one of the second's
    with pytest.raises(Preempted, match="the teacher is complete in 1 of"):
        write_teacher(own, world, out, Supervision(wants_to_stop=lambda: next(stops)))
    write_teacher(own, world, out)
    taught = {"objective.name": "distill", "objective.teacher": str(out)}
    learns = student(tmp_path, **taught, **{"checkpoint.initial_load_path": str(model / "checkpoint" / "step-0")})
    result = open_run(learns, world).step()  # the student is its own teacher
    assert result.measures["kl"] == pytest.approx(0, abs=1e-4) and result.measures["agreement"] == 1
    other = student(tmp_path, **taught, **{"data.loss": "all"})
    with pytest.raises(UserError, match="was made of other rows, or other settings"):
        open_run(other, world)


def test_what_vllm_says_is_checked_position_by_position(tmp_path: Path) -> None:
    config, out, ids = student(tmp_path), tmp_path / "teacher", tmp_path / "ids.jsonl"
    vllm_answers.write_ids(config, ids)
    lines = [json.loads(line) for line in ids.read_text().splitlines()]
    for line in lines:  # as vLLM does: the likeliest two and, if it is another one, the id that stands there
        best = {"7": {"logprob": -0.5}, "8": {"logprob": -1.5}}
        line["prompt_logprobs"] = [None, *({str(t): {"logprob": -3.0}, **best} for t in line["prompt_token_ids"][1:])]
    answers = tmp_path / "answers.jsonl"

    def write(given: list[dict[str, Any]]) -> Path:
        answers.write_text("".join(json.dumps(line) + "\n" for line in given))
        return answers

    vllm_answers.read_answers(config, write(lines), out, 2)
    learns = student(tmp_path, **{"objective.name": "distill", "objective.teacher": str(out)})
    data = prepare_run(learns, None)
    store = open_teacher(out, data, tokens_hash([data.train]))  # type: ignore[list-item]
    arrays = store.load(0)
    assert arrays["ids"].tolist() == [[7, 8]] * int(arrays["tokens"].sum())
    assert np.allclose(arrays["log_p"], [-0.5, -1.5])
    shifted = {**lines[0], "prompt_logprobs": [None, *lines[0]["prompt_logprobs"][:0:-1]]}
    place = next(i for i, entry in enumerate(table_of(config)[0] & 1) if entry and i)

    def told(**entries: Any) -> list[dict[str, Any]]:
        """The first document with another entry at its first learned token."""
        token = str(lines[0]["prompt_token_ids"][place])
        given = {token: {"logprob": -3.0}, **{name.strip("_"): value for name, value in entries.items()}}
        probabilities = lines[0]["prompt_logprobs"]
        return [
            {**lines[0], "prompt_logprobs": [*probabilities[:place], given, *probabilities[place + 1 :]]},
            *lines[1:],
        ]

    half, other = {"logprob": -0.7}, tmp_path / "other"
    for given, words in (
        (lines[:-1], "has 19 lines, the data have 20 documents"),
        ([*lines, lines[0]], "a line more than the data have documents"),
        ([lines[1], *lines[1:]], r"prompt_token_ids are not those of document 0: id \d+ is"),
        ([shifted, *lines[1:]], "lacks the id .* that stands there: the positions are not those of the ids"),
        ([{**lines[0], "prompt_logprobs": None}, *lines[1:]], "prompt_logprobs must be a list"),
        (told(_7=half, _8={"logprob": 0.5}), "above 0 or not finite"),
        (told(_7=half, _8={"logprob": -1e5}), "above 0 or not finite"),
        (told(_7=half, _8=half, _9=half), "sum to more than 1"),
        (told(_7=half, **{"-100": half}), "must be ID: {logprob: x}, with ids of the vocabulary"),
        (told(_7=half, **{str(2**31): half}), "must be ID: {logprob: x}, with ids of the vocabulary"),
        (told(_7=half, **{"07": {"logprob": -4.0}}), "must be ID: {logprob: x}, with ids of the vocabulary"),
        (told(_7=half, _8={"logprob": True}), "must be ID: {logprob: x}"),
        (told(_7=half, _99999999={"logprob": -4.0}), "names the id 99999999, which no head of .* tokens has"),
    ):
        with pytest.raises(UserError, match=words):
            vllm_answers.read_answers(config, write(given), other, 2)
        assert not [*tmp_path.glob("*other*")]  # the corrected try is not in anything's way
    vocabulary = prepare_run(config, None).facts.n_vocab
    padded = told(**{str(vocabulary + 5): {"logprob": -0.9}}, _7={"logprob": -1.0})
    vllm_answers.read_answers(config, write(padded), other, 2)  # a row of the head that no token has: as teach does
    assert open_teacher(other, data, tokens_hash([data.train])).load(0)["ids"][0].tolist()[0] == 7  # type: ignore[list-item]
    with pytest.raises(UserError, match="exists already, and is not overwritten"):
        vllm_answers.read_answers(config, write(lines), other, 2)
    with pytest.raises(UserError, match="a token has 3 ids; ask vLLM for prompt_logprobs = 4"):
        vllm_answers.read_answers(config, write(lines), tmp_path / "more", 4)
    with pytest.raises(UserError, match="--top_k 1000000: the tokenizer has"):
        vllm_answers.read_answers(config, answers, tmp_path / "more", 10**6)


def table_of(config: Config) -> DocumentTable:
    return prepare_run(config, None).train.documents  # type: ignore[attr-defined, no-any-return]


def test_a_config_is_a_value_whatever_happens_to_its_teachers_folder(tmp_path: Path) -> None:
    settings = ObjectiveConfig(name="distill", teacher=str(tmp_path))
    before = settings.ids_per_token, settings.identity
    (tmp_path / "store.json").write_text('{"k": 7, "weights": "w"}')
    assert (settings.ids_per_token, settings.identity) == before == (32, {**before[1], "k": 32})
    assert ObjectiveConfig(name="distill", teacher=str(tmp_path)).identity == {**before[1], "k": 7, "teacher": "w"}
