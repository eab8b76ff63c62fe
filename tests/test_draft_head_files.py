"""A trained draft head: from folders into checkpoints and back, bit for bit; beside adapters; what is refused."""

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import ASSETS
from gloo.job_parity import config_of
from safetensors.torch import load_file, save_file
from test_convert import same, tensors, tool, with_tokenizer
from test_qwen3_5_files import TEXT
from test_qwen3_5_moe import TEXT as MIXTURE
from test_start import arguments
from torch import Tensor
from transformers import Qwen3_5ForConditionalGeneration

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.check import check_start
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import DraftHeadConfig
from titan_mi100.errors import UserError
from titan_mi100.files.model import DRAFT_FILE
from titan_mi100.generation.engine import Model
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import DRAFT
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.text.assets import run_assets
from titan_mi100.text.bpe import PATTERNS, QWEN3_5
from titan_mi100.weights import convert
from titan_mi100.weights.source import open_source
from titan_mi100.workshop.made_up import made_up, random_rows

FULL = pytest.mark.full
# the draft head's experts in the form that the others have not, or in the same
KINDS = ("experts", pytest.param("dense", marks=FULL), pytest.param("experts, head fused", marks=FULL))
EXPERTS = (MIXTURE["num_experts"], MIXTURE["moe_intermediate_size"], MIXTURE["hidden_size"])
LORA = {"rank": 3, "target_modules": ("q_proj", "in_proj_qkv")}
MODES: dict[str, dict[str, Any]] = {"along": {}, "after": {"train": "after"}, "adapters": {"lora": LORA}}


def in_file(name: str, is_fused: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the experts' tensors in files, of one of our matrices."""
    (module, _, kind), (count, inner, hidden) = name.removesuffix(".weight").rpartition("."), EXPERTS
    module = module.replace("model.layers", "model.language_model.layers")
    if is_fused and kind == "up_proj":
        return []  # it is in gate's
    if is_fused:
        sizes = (hidden, inner) if kind == "down_proj" else (2 * inner, hidden)
        return [(f"{module}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}", (count, *sizes))]
    sizes = (hidden, inner) if kind == "down_proj" else (inner, hidden)
    return [(f"{module}.{expert}.{kind}.weight", sizes) for expert in range(count)]


def published(found: Path, kind: str = "dense", **head: Any) -> Path:
    """A folder as it is published: prefix of the text part, vision tower, two dtypes, the head in a file of its own.

    Args: head: keys of config.json about the head, in place of a head of one layer.
    """
    found.mkdir()
    text = {**(TEXT if kind == "dense" else MIXTURE), **(head or {"mtp_num_hidden_layers": 1})}
    family = "qwen3_5" if kind == "dense" else "qwen3_5_moe"
    text |= {"model_type": f"{family}_text", "dtype": "bfloat16"}
    config = {"architectures": ["Any"], "model_type": family, "tie_word_embeddings": False, "text_config": text}
    (found / "config.json").write_text(json.dumps(config))
    spec, draw, stored = read_hf_config(found).with_draft_head(), torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, parameter in spec.parameters.items():
        is_fused = kind.endswith("fused") or not name.startswith(DRAFT)
        for own, shape in in_file(name, is_fused) if parameter.experts else [(spec.stored_name(name), parameter.shape)]:
            tensor = 0.1 * torch.randn(shape, generator=draw)
            stored[own] = tensor if parameter.in_fp32 else tensor.bfloat16()
    stored["model.visual.a.weight"] = torch.randn(3, 4).half()
    names = {name: DRAFT_FILE if name.startswith(DRAFT) else "model-1.safetensors" for name in stored}
    for file in {*names.values()}:
        save_file({n: x for n, x in stored.items() if names[n] == file}, found / file, {"format": "pt"})
    (found / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    file = with_tokenizer(found) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[QWEN3_5]  # transformers takes its class
    file.write_text(json.dumps(content))
    return found


def without_head(folder: Path, found: Path, **keys: Any) -> Path:
    """The folder without its head. Args: keys: of config.json, about it."""
    shutil.copytree(folder, found)
    (found / DRAFT_FILE).unlink()
    file = found / "model.safetensors.index.json"
    names = json.loads(file.read_text())["weight_map"]
    file.write_text(json.dumps({"metadata": {}, "weight_map": {n: f for n, f in names.items() if f != DRAFT_FILE}}))
    config = json.loads((found / "config.json").read_text())
    config["text_config"].pop("mtp_num_hidden_layers", None)
    config["text_config"] |= keys
    (found / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("published") / "model", request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("published") / "model")


def opened(load: Path, world: World, train: str = "along", fresh: bool = False, lr: float = 0.0, **more: Any) -> Run:
    """A run on random rows. Args: more: options of the split, but for checkpoint and folder, which are open_run's."""
    of_run = {key: more.pop(key) for key in ("checkpoint", "folder") if key in more}
    config = config_of({"seq_len": 32}, {"local_batch_size": 2, "accumulation": 2, "load": str(load), **more})
    config = replace(config, draft_head=DraftHeadConfig(train, lr, 0.1, fresh))
    return open_run(config, world, data=made_up(random_rows(8, 32, 700, 0.5)), **of_run)


def saved(run: Run, folder: Path, steps: int = 0) -> Path:
    """A checkpoint as the trainer writes it, with the model's files."""
    for _ in range(steps):
        run.step()
    load, layout = run.config.checkpoint.initial_load_path, run.config.layout(1)
    assets = run_assets(run.model.parts[0].model.spec, load, load, "")
    checkpointer = Checkpointer(folder, run.model, run.optimizer, run.world, layout, assets=assets)
    checkpointer.save(run.progress.step, run.progress.trainer_state(), run.about)
    return folder / f"step-{run.progress.step}"


def state(run: Run) -> dict[str, Tensor]:
    kept = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    return kept | {f"of {name}": tensor.clone() for name, tensor in run.optimizer.named_state()}


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not same({"": before[name]}, {"": after[name]})}


def heads(names: Collection[str]) -> set[str]:
    return {name for name in names if name.startswith(DRAFT)}


@pytest.mark.parametrize("mode", ["along", "after"])
def test_an_export_has_each_tensor_as_it_was_but_for_what_was_trained(
    mode: str, folder: Path, tmp_path: Path, world: World
) -> None:
    run, before = opened(folder, world, mode), tensors(folder)
    untouched = saved(run, tmp_path / "0")
    for dtype in ("auto", "bfloat16"):
        convert.to_hf(open_source(untouched), tmp_path / dtype, dtype)
        assert same(before, tensors(tmp_path / dtype))
    written, read = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "auto", folder))
    assert written == {**read, "architectures": written["architectures"]}
    trained = saved(run, tmp_path / "1", 1)
    assert heads(open_source(trained).weights.kinds) == {*open_source(trained).spec.draft_head}  # type: ignore[union-attr]
    convert.to_hf(open_source(trained), tmp_path / "trained")
    after = tensors(tmp_path / "trained")
    changed = differing(before, after)
    fixed = {n for n in before if n.startswith("model.visual.") or n.endswith(".mlp.gate.weight")}
    assert changed == (heads(before) if mode == "after" else {*before}) - fixed
    assert {n: (x.dtype, x.shape) for n, x in after.items()} == {n: (x.dtype, x.shape) for n, x in before.items()}
    # to DCP and back, and to a file of torch.save
    convert.to_dcp(open_source(trained), tmp_path / "dcp", "bfloat16")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back")
    assert same(after, tensors(tmp_path / "back"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=FULL)])
def test_a_run_that_was_killed_goes_on_as_one_that_was_not(mode: str, kind: str, tmp_path: Path, world: World) -> None:
    folder, options = published(tmp_path / "model", kind), MODES[mode]
    run = opened(folder, world, **options)
    kept = saved(run, tmp_path / "kept", 2)
    for _ in range(2):
        run.step()
    again = opened(folder, world, **options, checkpoint=kept)
    assert again.progress.step == 2
    for _ in range(2):
        again.step()
    assert same(state(run), state(again))
    assert heads(differing(state(run), state(opened(folder, world, **options))))


def test_a_head_beside_an_adapter_is_shipped_with_it_and_merged(folder: Path, tmp_path: Path, world: World) -> None:
    before = tensors(folder)
    kept = saved(opened(folder, world, lora=LORA), tmp_path / "kept", 2)
    convert.to_hf(open_source(kept), tmp_path / "adapter")
    head = load_file(tmp_path / "adapter" / DRAFT_FILE)
    assert differing({n: before[n] for n in heads(before)}, head) == {n for n in head if ".mlp.gate." not in n}
    assert {n: (x.dtype, x.shape) for n, x in head.items()} == {n: (before[n].dtype, before[n].shape) for n in head}
    for name, adapter in (("by checkpoint", kept), ("by peft", tmp_path / "adapter")):
        given = ("--base", folder, "--adapter", adapter, "--output_dir", tmp_path / name)
        tool("merge_lora", *given)
    merged = tensors(tmp_path / "by peft")
    assert same(merged, tensors(tmp_path / "by checkpoint")) and same({n: merged[n] for n in head}, head)
    alone = saved(opened(folder, world, "no", lora=LORA), tmp_path / "alone", 2)
    convert.to_hf(open_source(alone), tmp_path / "alone" / "adapter")
    assert not (tmp_path / "alone" / "adapter" / DRAFT_FILE).exists()
    adapters = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "alone")]
    assert same(*adapters)
    # a run starts from it, and takes the head if that is trained
    start = {"lora": {**LORA, "initial_load_path": str(tmp_path / "adapter")}}
    convert.to_hf(open_source(saved(opened(folder, world, **start), tmp_path / "next")), tmp_path / "same")
    assert same(head, load_file(tmp_path / "same" / DRAFT_FILE))
    lost = without_head(folder, tmp_path / "lost")
    checked = ("--lora.rank", "3", "--lora.target_modules", *LORA["target_modules"], "--draft_head.train", "along")
    checked = (*checked, "--lora.initial_load_path", str(tmp_path / "adapter"))
    check_start(load_config(arguments(lost, *checked), 1))
    opened(lost, world, **start)


def test_peft_loads_an_adapter_with_a_head_beside_it(dense: Path, tmp_path: Path, world: World) -> None:
    run = opened(dense, world, lora=LORA)
    convert.to_hf(open_source(saved(run, tmp_path / "kept", 2)), tmp_path / "adapter")
    config = json.loads((dense / "config.json").read_text())
    base = Qwen3_5ForConditionalGeneration.from_pretrained(dense, dtype=torch.float32)
    theirs, ids = peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), torch.arange(24)[None]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        assert (expected - run.model.parts[0](ids)).abs().max() < 2e-5 * expected.abs().max()
    assert config["model_type"] == "qwen3_5"


def test_a_lost_head_is_refused_or_starts_fresh(
    folder: Path, tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lost = without_head(folder, tmp_path / "lost", mtp_num_hidden_layers=1)
    along, fresh = ("--draft_head.train", "along"), ("--draft_head.fresh", "true")
    message = r"missing: mtp\.fc\.weight.*; with draft_head.fresh = true the draft head starts with random weights"
    with pytest.raises(UserError, match=message):
        check_start(load_config(arguments(lost, *along), 1))
    with pytest.raises(UserError, match=message):
        opened(lost, world)
    check_start(load_config(arguments(lost, *along, *fresh), 1))
    without_key = without_head(folder, tmp_path / "without key")
    check_start(load_config(arguments(without_key, *along, *fresh), 1))
    before = tensors(folder)
    trunk = {name: tensor for name, tensor in before.items() if name not in heads(before)}
    drawn: dict[str, dict[str, Tensor]] = {}
    for base in (folder, lost, without_key):
        for mode in ("along", "after"):
            caplog.clear()
            run, name = opened(base, world, mode, fresh=True), f"{base.name} {mode}"
            assert ("its draft head is not read" in caplog.text) == (base == folder)
            assert "no draft head" not in caplog.text
            convert.to_hf(open_source(saved(run, tmp_path / f"of {name}")), tmp_path / name)
            exported = tensors(tmp_path / name)
            assert same(trunk, {n: exported[n] for n in exported if n not in heads(exported)})
            drawn[name] = {n: exported[n] for n in heads(exported)}
            text = json.loads((tmp_path / name / "config.json").read_text())["text_config"]
            assert text["mtp_num_hidden_layers"] == 1
            again = opened(base, world, mode, fresh=True, checkpoint=tmp_path / f"of {name}" / "step-0")
            assert same(state(run), state(again))
    ours = drawn["lost along"]
    assert {x.dtype for x in ours.values()} == {torch.bfloat16} and ours["mtp.fc.weight"].float().std() > 0.01
    assert same(drawn["lost after"], ours) and same(drawn["without key after"], ours)
    assert same(drawn[f"{folder.name} along"], drawn[f"{folder.name} after"])
    form = {name.rpartition("experts.")[2][:7] for name in ours if "experts" in name}
    assert form in (set(), {"gate_up", "down_pr"})  # as the trunk has them


@pytest.mark.parametrize("mode", ["along", "after"])
def test_routers_stay_as_they_are_but_that_of_a_fresh_head(mode: str, tmp_path: Path, world: World) -> None:
    base = published(tmp_path / "model", "experts")
    for fresh in (True, False):
        run = opened(base, world, mode, fresh, lr=0.01)
        before = state(run)
        routers = {name for name in before if name.endswith("mlp.gate.weight") and not name.startswith("of ")}
        assert len(routers) > 1 and len(heads(routers)) == 1
        run.step()
        after = state(run)
        moved = {name for name in routers if not torch.equal(before[name], after[name])}
        assert moved == heads(routers if fresh else ())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"mtp_num_hidden_layers": 2},
            "mtp_num_hidden_layers = 2: only draft heads of one layer are supported; instead",
        ),
        ({"mtp_num_hidden_layers": 0}, 'if it has a draft head, write "mtp_num_hidden_layers": 1 into it'),
        ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers is missing: only draft heads of one layer"),
        (
            {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True},
            "mtp_use_dedicated_embeddings = true: only heads that use the model's are supported; instead of",
        ),
    ],
)
def test_another_head_is_refused_before_the_data_are_prepared(
    keys: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = published(tmp_path / "model", **keys)
    check_start(load_config(arguments(folder), 1))
    config = load_config(arguments(folder, "--draft_head.train", "after"), 1)
    with pytest.raises(UserError) as refused:
        check_start(config)
    assert str(refused.value).startswith(f"{folder / 'config.json'}: ") and expected in str(refused.value)


WRONG = (
    (("along", "--objective.name", "preference"), ["would learn rejected answers"]),
    (("along", "--objective.name", "policy"), ["would learn rejected answers"]),
    (("after", "--objective.name", "distill"), ['learns from text alone: set name = "sft", not "distill"']),
    (("after", "--lora.rank", "2"), ["trains no adapter; merge yours first"]),
    (("after", "--draft_head.weight", "0.3"), ['weight = 0.3 has no effect with train = "after"; delete it']),
    (
        ("along", "--parallelism.context_parallel_degree", "2", "--draft_head.weight", "0"),
        ["is not supported with context_parallel_degree = 2", "weight = 0 would never train it"],
    ),
    (("along", "--rounds.count", "2", "--draft_head.lr", "-1"), ["is not for rounds", "lr = '-1' must"]),
    (("no", "--draft_head.fresh", "true"), ['fresh = true has no effect with train = "no"; delete it']),
    (("along", "--model.flavor", "debug"), ["a model of the family qwen3 has no draft head"]),
    (
        ("after", "--model.flavor", "qwen3.5-debug", "--model.tokenizer_path", str(ASSETS / "tokenizer")),
        ["name the head's model in checkpoint.initial_load_path"],
    ),
)


@pytest.mark.parametrize(("words", "expected"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_settings_that_do_not_fit_are_refused_at_once(words: tuple[str, ...], expected: list[str], dense: Path) -> None:
    given = arguments(dense, "--draft_head.train")
    given = given[2:] if "--model.flavor" in words else given
    with pytest.raises(UserError) as refused:
        check_start(load_config([*given, *words], 1))
    for text in expected:
        assert text in str(refused.value)


def test_what_a_run_learns_does_not_change_on_resume(dense: Path, tmp_path: Path, world: World) -> None:
    kept = {mode: saved(opened(dense, world, mode), tmp_path / mode) for mode in ("no", "along", "after")}
    assert "draft" not in (kept["no"] / "manifest.json").read_text()  # as before there was one
    for before, path in kept.items():
        for now in kept:
            if before == now:
                opened(dense, world, now, checkpoint=path)
                continue
            with pytest.raises(UserError) as refused:
                opened(dense, world, now, checkpoint=path)
            assert f'{path}: was saved with draft_head.train = "{before}", now "{now}"; keep it' in str(refused.value)
    config = opened(dense, world).config
    changed = replace(config, draft_head=replace(config.draft_head, weight=0.3))
    data = made_up(random_rows(8, 32, 700, 0.5))
    with pytest.raises(UserError, match=r"draft_head.weight \(0.1, now 0.3\).*allow_changed draft_head.weight"):
        open_run(changed, world, data=data, checkpoint=kept["along"])
    allowed = replace(config.checkpoint, allow_changed=("draft_head.weight",))
    open_run(replace(changed, checkpoint=allowed), world, data=data, checkpoint=kept["along"])


def test_a_checkpoint_of_a_head_alone_is_its_base_with_that_head(folder: Path, tmp_path: Path, world: World) -> None:
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    kept = saved(opened(base, world, "after"), tmp_path / "kept", 1)
    names = open_source(kept).spec.draft_head  # type: ignore[union-attr]
    written = json.loads((kept / "manifest.json").read_text())
    assert written["draft_head"] == {"base": str(base)} and written["fingerprints"]["draft_head"] == {"train": "after"}
    assert (
        sum(file.stat().st_size for file in kept.iterdir())
        < 14 * sum(map(torch.Size.numel, map(torch.Size, [p.shape for p in names.values()]))) + 60_000
    )  # weights and two moments
    answers = []
    for path in (base, kept):
        model = Model(str(path), "", str(base), torch.device("cpu"), torch.float32)
        answers.append(generate(model.load(), [[5, 6, 7, 8]], Sampling(), (), 5)[0].ids)
    assert answers[0] == answers[1]
    # training goes on from it, in any way
    convert.to_hf(open_source(kept), tmp_path / "export")
    exported = tensors(tmp_path / "export")
    for mode in ("no", "along", "after"):
        run = opened(kept, world, mode)
        convert.to_hf(open_source(saved(run, tmp_path / mode)), tmp_path / f"{mode} export", "auto")
        assert same(exported, tensors(tmp_path / f"{mode} export")), mode
    # the base is part of it
    file = base / "model-1.safetensors"
    held = load_file(file)
    held["model.language_model.norm.weight"][0] += 1
    save_file(held, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"its draft head was not trained on the weights in {base}; put back those"):
        open_source(kept)
    with pytest.raises(UserError, match="the run now differs from it: base"):
        opened(base, world, "after", checkpoint=kept)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=f"holds the draft head of {base}, which is not there; put it back"):
        open_source(kept)


def test_a_head_of_a_run_is_carried_by_one_that_does_not_train_it_and_trained_again_from_there(
    folder: Path, tmp_path: Path, world: World
) -> None:
    """Experts have another form in a run's checkpoint. With masters of 24 bits, what is trained keeps all of them."""
    optimizer = {"param": "bfloat16", "optimizer": {"master": "24bit", "state": "bf16"}}
    exported, checkpoint = list[dict[str, Tensor]](), saved(opened(folder, world, **optimizer), tmp_path / "first", 1)
    for mode in ("along", "no", "along", ""):
        convert.to_hf(open_source(checkpoint), tmp_path / str(len(exported)), "float32")
        exported.append({name: tensor.float() for name, tensor in tensors(tmp_path / str(len(exported))).items()})
        if mode:
            checkpoint = saved(opened(checkpoint, world, mode, **optimizer), tmp_path / f"after {len(exported)}")
    first, again, carried, trained = exported
    convert.to_hf(open_source(tmp_path / "first" / "step-1"), tmp_path / "upper", "keep")
    rounded = {name: tensor.float() for name, tensor in tensors(tmp_path / "upper").items() if name in heads(first)}
    assert same(first, again) and same(carried, trained)
    assert same(first | rounded, carried) and differing(first, carried) >= {"mtp.fc.weight"}
