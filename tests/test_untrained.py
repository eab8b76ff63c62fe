"""What a full run does not train is in its export as it was in the folder, whatever holds the trained weights."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, torchrun
from gloo.job_parity import config_of, save
from gloo.job_untrained import steps
from test_convert import tensors, with_tokenizer
from test_qwen3_5_files import IMAGES, VISION
from test_qwen3_5_moe import TEXT
from test_qwen3_moe_files import SETTINGS, rewritten
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3MoeConfig, Qwen3MoeForCausalLM

from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.text.bpe import PATTERNS, QWEN3_5
from titan_mi100.weights import convert
from titan_mi100.weights.source import open_source
from titan_mi100.workshop.made_up import made_up, random_rows

UNTRAINED = ("mlp.gate.weight", "visual.", "mtp.")
STATES = [("fp32", "fp32"), ("8bit", "24bit"), ("bf16", "bf16_sr"), ("fp32", "24bit"), ("8bit", "bf16_sr")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {}, "alone, weights on the host": {"memory": {"offload": "weights"}},
    "alone, optimizer on the host": {"memory": {"offload": "optimizer"}},
}  # fmt: skip
SEVERAL: dict[str, dict[str, Any]] = {
    "FSDP2": {}, "ZeRO-1": {"zero_stage": 1}, "DDP": {"zero_stage": 0},
    "TP": {"tensor_parallel_degree": 2}, "PP": {"pipeline_parallel_degree": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in fp32 whose values have more than the 8 bits of bf16."""
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(
        text_config={**TEXT, "vocab_size": 710}, vision_config=VISION, tie_word_embeddings=False, **IMAGES
    )
    models = {
        "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SETTINGS, "vocab_size": 710})),
        "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration(config),
    }
    found = {family: tmp_path_factory.mktemp("published") / family for family in models}
    for family, model in models.items():
        model.save_pretrained(found[family])
        if family == "qwen3_5_moe":
            draft = {"mtp.norm.weight": torch.randn(64)}
            rewritten(found[family], {name: x.clone() for name, x in model.state_dict().items()} | draft)
            file = with_tokenizer(found[family]) / "tokenizer.json"
            content = json.loads(file.read_text())
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[QWEN3_5]
            file.write_text(json.dumps(content))
        else:
            with_tokenizer(found[family])
    return found


def assert_untrained_as_in(folder: Path, checkpoint: Path, export: Path) -> None:
    before = tensors(folder)
    for dtype in ("float32", "bfloat16"):
        convert.to_hf(open_source(checkpoint, folder), export / dtype, dtype, verify="off")
        after = tensors(export / dtype)
        names = [name for name in after if any(part in name for part in UNTRAINED)]
        assert names and after.keys() == before.keys()
        for name in names:
            kept = before[name] if after[name].dtype == torch.float32 else before[name].to(torch.bfloat16)
            assert torch.equal(after[name], kept), (dtype, name)
    moved = [name for name in before if name not in names]
    assert not all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in moved)


def split_of(folder: Path, name: str, state: tuple[str, str], **split: Any) -> dict[str, Any]:
    optimizer = {"state": state[0], "master": state[1]}
    return {"name": name, "load": str(folder), "optimizer": optimizer, "param": "bfloat16", **split}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_alone_with_each_master_state_and_place(
    family: str, folders: dict[str, Path], world: World, tmp_path: Path, full: bool
) -> None:
    cells = list(itertools.product(STATES, LAYOUTS))
    for number, (state, layout) in enumerate(cells if full else [cells[4 if family == "qwen3_moe" else 6]]):
        split = split_of(folders[family], f"{number}", state, **LAYOUTS[layout])
        steps(world, [split], tmp_path)
        assert_untrained_as_in(folders[family], tmp_path / f"{number}" / "step-1", tmp_path / f"hf-{number}")


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_in_layouts_of_two_ranks(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    splits = [
        split_of(folders[family], f"{layout} {state[1]}", state, parallelism=SEVERAL[layout])
        for layout in SEVERAL for state in STATES[:3]
    ]  # fmt: skip
    torch.save({"splits": splits}, tmp_path / "job.pt")
    torchrun(str(REPO / "tests/gloo/job_untrained.py"), str(tmp_path / "job.pt"), str(tmp_path), timeout=900)
    for split in splits:
        assert_untrained_as_in(folders[family], tmp_path / split["name"] / "step-1", tmp_path / f"hf {split['name']}")


def test_a_checkpoint_that_has_them_rounded_resumes_with_its_own_bits(
    folders: dict[str, Path], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = split_of(folders["qwen3_moe"], "now", ("8bit", "24bit"))
    steps(world, [split], tmp_path)
    config = config_of({"seq_len": 32}, {"local_batch_size": 2, "accumulation": 2, **split})
    spec = read_hf_config(Path(split["load"]))

    def opened(checkpoint: Path | None = None) -> Any:
        return open_run(config, world, spec=spec, data=made_up(random_rows(16, 32, 700, 0.5)), checkpoint=checkpoint)

    run = opened(tmp_path / "now" / "step-1")
    routers = {name: p for name, p in run.model.named_parameters() if not p.requires_grad}
    for parameter in routers.values():
        assert parameter.dtype == torch.float32
        parameter.data = parameter.data.bfloat16()  # as it was held before
    save(run, tmp_path / "before")
    logging.getLogger("titan_mi100").propagate = True
    with caplog.at_level(logging.WARNING, "titan_mi100"):
        again = opened(tmp_path / "before" / "step-1")
    assert f"{len(routers)} tensors that are not trained are rounded to bfloat16" in caplog.text
    for name, parameter in again.model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.dtype == torch.float32 and torch.equal(parameter, routers[name].float())
