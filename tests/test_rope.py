"""Scaled rotary embeddings against transformers', and the way of a scaling through a run to its exports."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ASSETS
from same_logits import assert_same_logits
from test_adapter import logits as by_transformers
from test_convert import with_tokenizer
from test_qwen3_5 import SPECS as SPECS_3_5
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.load import load_config
from titan_mi100.data.prepare import prepare_run
from titan_mi100.errors import UserError
from titan_mi100.generation.engine import Model
from titan_mi100.model.decode import check_lengths
from titan_mi100.model.elementwise import rotary_tables
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import PRESETS, fingerprint, of_fingerprint, read_hf_config, to_hf_config
from titan_mi100.text.assets import run_assets
from titan_mi100.weights import convert
from titan_mi100.weights.adapter import merged_source
from titan_mi100.weights.source import open_source
from titan_mi100.workshop.made_up import made_up, random_rows

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear, an int": {"type": "linear", "factor": 8},
    "yarn": YARN,
    "yarn by its old name": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096},
    "yarn of the whole length": {"rope_type": "yarn", "factor": 2.5},
    "no factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 10000},
    "attention_factor": {**YARN, "attention_factor": 0.7},
    "both mscales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "one mscale": {**YARN, "mscale": 0.5},
    "mscale beside 0": {**YARN, "mscale": 0.5, "mscale_all_dim": 0},
    "attention_factor before mscale": {**YARN, "attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 0.5},
    "no truncation": {**YARN, "truncate": False},
    "betas": {**YARN, "beta_fast": 16, "beta_slow": 2.5, "truncate": False},
    "one border": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "betas of null": {**YARN, "beta_fast": None, "beta_slow": None},
    "short": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4},
    "factor of one": {**YARN, "factor": 1.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
POSITIONS = torch.cat([torch.arange(3000), torch.arange(39_000, 40_960)])[None]


def folder_with(path: Path, spec: Any, rope: dict[str, Any], new_form: bool) -> Path:
    """A config.json of the spec: rope_scaling beside rope_theta, or rope_parameters."""
    config = {**to_hf_config(dataclasses.replace(spec, rope_scaling=None)), "dtype": "float32"}
    own = config.pop("rope_parameters", {"rope_theta": config.pop("rope_theta", None)})
    if new_form:
        config["rope_parameters"] = {**own, "rope_type": "default", **rope}
        if "type" in rope:
            config["rope_parameters"].pop("rope_type")
    else:
        outside = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
        config |= {**outside, "rope_scaling": rope or None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("new_form", [False, True], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", ["0.6B", "qwen3.5-0.8B"])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers_to_the_last_bit(
    name: str, family: str, new_form: bool, tmp_path: Path
) -> None:
    published = dataclasses.replace(PRESETS[family], max_position_embeddings=40_960)
    folder = folder_with(tmp_path, published, SCALINGS[name], new_form)
    kind = Qwen3RotaryEmbedding if family == "0.6B" else Qwen3_5TextRotaryEmbedding
    expected = kind(AutoConfig.from_pretrained(folder))(torch.zeros(1), POSITIONS)
    spec: Any = read_hf_config(folder)
    dim = spec.head_dim if family == "0.6B" else spec.rotated
    cos, sin = rotary_tables(POSITIONS, dim, spec.rope_theta, spec.rope_scaling)
    first = sin.shape[-1] // 2
    assert torch.equal(cos[:, :, 0], expected[0]) and cos.shape[-1] == dim
    assert torch.equal(torch.cat((-sin[..., :first], sin[..., first:]), dim=-1)[:, :, 0], expected[1])
    plain = rotary_tables(POSITIONS, dim, spec.rope_theta)
    assert torch.equal(cos, plain[0]) == (name in ("none", "dynamic", "factor of one"))
    # what is written again, and what a checkpoint records, is the same
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(spec)))
    assert read_hf_config(tmp_path) == spec == of_fingerprint(json.loads(json.dumps(fingerprint(spec))))


TINY = {
    "qwen3": dataclasses.replace(PRESETS["debug"], vocab_size=709),
    "qwen3_moe": dataclasses.replace(PRESETS["moe-debug"], vocab_size=709),
    "qwen3_5": dataclasses.replace(SPECS_3_5["tied"], vocab_size=709, max_position_embeddings=4096),
}
IDS = torch.arange(90)[None] * 7 % 311
SHORT = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def model_folder(path: Path, family: str, rope: dict[str, Any], new_form: bool = False) -> Path:
    """An HF folder with a tokenizer, and random weights that make positions count."""
    folder_with(path, TINY[family], rope, new_form)
    text = (path / "config.json").read_text()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "v_proj" in name:
                parameter.mul_(4)
    model.save_pretrained(path)
    (path / "config.json").write_text(text)
    return with_tokenizer(path)


def by_us(folder: Path, adapter: str = "") -> torch.Tensor:
    with torch.no_grad():
        return Model(str(folder), adapter, "", torch.device("cpu"), torch.float32).load()(IDS)


@pytest.mark.parametrize("rope", [SHORT, {"rope_type": "linear", "factor": 4.0}], ids=["yarn", "linear"])
@pytest.mark.parametrize("family", TINY)
def test_logits_are_those_of_transformers(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "scaled", family, rope)
    expected = by_transformers(folder, ids=IDS)
    assert (by_us(folder) - expected).abs().max() < 1e-6
    folder_with(folder, TINY[family], {}, False)
    assert (by_us(folder) - expected).abs().max() > 1e-4  # without the scaling


REFUSED = {
    "llama3": ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling: rope type 'llama3' is not supported; only"),
    "longrope": ({"type": "longrope", "short_factor": [1.0]}, "rope type 'longrope' is not supported; only 'default'"),
    "two types": ({**YARN, "type": "linear"}, "rope_scaling: rope_type is 'yarn', and type is 'linear'; remove one"),
    "a list for a type": ({"rope_type": ["yarn"]}, "rope type ['yarn'] is not supported"),
    "an unknown key": ({**YARN, "attn_factor": 1.0}, "rope_scaling: attn_factor = 1.0 is not known here; remove it"),
    "yarn's key": ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "rope_scaling: beta_fast = 3 is not known"),
    "linear without a factor": ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
    "dynamic without a factor": ({"rope_type": "dynamic"}, "rope_scaling: factor is missing"),
    "yarn without both": ({"rope_type": "yarn"}, "rope_scaling: factor is missing"),
    "a text": ({**YARN, "factor": "4"}, "rope_scaling: factor = '4' must be a finite number"),
    "a bool": ({**YARN, "factor": True}, "rope_scaling: factor = True must be a finite number"),
    "below 1": ({**YARN, "factor": 0.5}, "factor = 0.5 must be from 1 to 256"),
    "0": ({**YARN, "factor": 0}, "factor = 0.0 must be from 1 to 256"),
    "a huge factor": ({"rope_type": "linear", "factor": 1e30}, "factor = 1e+30 must be from 1 to 256"),
    "betas": ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast = 1.0 and beta_slow = 2.0 must fall, from 1e6"),
    "a beta beyond all": ({**YARN, "beta_fast": 1e300}, "beta_fast = 1e+300 and beta_slow = 1.0 must fall"),
    "a beta of 0": ({**YARN, "beta_slow": 0}, "beta_fast = 32.0 and beta_slow = 0.0 must fall"),
    "attention": ({**YARN, "attention_factor": 0}, "attention_factor = 0.0 must be above 0"),
    "mscale": ({**YARN, "mscale": -9.0, "mscale_all_dim": 1.0}, "attention_factor = -0.2"),
    "truncate": ({**YARN, "truncate": 1}, "rope_scaling: truncate = 1 must be true or false"),
    "truncate of null": ({**YARN, "truncate": None}, "rope_scaling: truncate = None must be true or false"),
    "an original of 0": (
        {**YARN, "original_max_position_embeddings": 0},
        "original_max_position_embeddings = 0 must be above 0 and at most max_position_embeddings = 40960",
    ),
    "a longer original": ({**YARN, "original_max_position_embeddings": 50_000}, "at most max_position_embeddings = 40"),
    "half of one": ({**YARN, "original_max_position_embeddings": 4.5}, "original_max_position_embeddings = 4.5 must"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_scalings_are_refused_by_key(name: str, tmp_path: Path) -> None:
    rope, expected = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read_hf_config(folder_with(tmp_path, PRESETS["0.6B"], rope, False))
    assert expected in str(caught.value) and "config.json" in str(caught.value)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    spec = dataclasses.replace(PRESETS["0.6B"], rope_theta=1.0)
    folder_with(tmp_path, spec, {**YARN, "factor": 0.5, "beta_slow": 40}, False)
    with pytest.raises(UserError, match=r"(?s)factor = 0\.5 .*beta_slow = 40\.0.*rope_theta = 1\.0 must be above 1"):
        read_hf_config(tmp_path)


def as_vllm_reads(config: dict[str, Any], dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines in fp64, by what vLLM takes from a config.json: rope_scaling or rope_parameters, rope_theta
    from outside first; factor and original_max_position_embeddings must be there. Read in its source, not run.
    """
    rope = config.get("rope_scaling") or config["rope_parameters"]
    theta, factor, original = config.get("rope_theta") or rope["rope_theta"], rope["factor"], 0
    assert rope["rope_type"] == "yarn"
    original = rope["original_max_position_embeddings"]
    assert config["max_position_embeddings"] >= original * factor
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    low, high = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1)
    )  # the pairs that turn so often in the original positions
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    share = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    angles = positions[:, None] * (plain / factor * share + plain * (1 - share))
    size = 0.1 * math.log(factor) + 1
    return np.cos(angles) * size, np.sin(angles) * size


SETTINGS = (
    "--model.tokenizer_path", str(ASSETS / "tokenizer"), "--data.path", str(ASSETS / "tokenizer/tokenizer.json"),
    "--training.mixed_precision_param", "float32", "--model.attention_backend", "eager",
)  # fmt: skip
KEY = ("--model.yarn_factor", "4", "--model.yarn_original_max_position_embeddings", "1024")


def opened(base: Path, world: World, *more: str) -> Any:
    config = load_config(["--checkpoint.initial_load_path", str(base), *SETTINGS, *more], 1)
    return open_run(config, world, data=made_up(random_rows(1, config.training.seq_len, 300, 0.5)))


def saved(run: Any, base: Path, folder: Path, world: World) -> Path:
    """A checkpoint of a run, as the run saves it."""
    assets = run_assets(run.config.spec(), str(base), run.config.tokenizer_path(), "")
    at = Checkpointer(folder, run.model, run.optimizer, world, run.config.layout(1), assets=assets)
    at.save(run.progress.step, run.progress.trainer_state(), run.about)
    return folder / f"step-{run.progress.step}"


@pytest.mark.parametrize("new_form", [False, True], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", TINY)
def test_a_key_adds_yarn_which_the_exports_carry(
    family: str, new_form: bool, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = model_folder(tmp_path / "base", family, {}, new_form)
    run = opened(base, world, *KEY)
    made: Any = run.config.spec()
    assert made.max_position_embeddings == 4096 and made.rope_scaling.original_max_position_embeddings == 1024
    checkpoint = saved(run, base, tmp_path / "run", world)
    convert.to_hf(open_source(checkpoint), tmp_path / "hf")
    again = read_hf_config(tmp_path / "hf")
    assert again.rope_scaling == made.rope_scaling and again.reach == 4096
    assert_same_logits(tmp_path / "hf")
    assert (by_us(tmp_path / "hf") - by_transformers(base, ids=IDS)).abs().max() > 1e-4
    with torch.no_grad():
        assert (run.model.parts[0](IDS) - by_us(tmp_path / "hf")).abs().max() < 1e-5
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    is_old = family != "qwen3_5"  # which transformers 4 knows
    assert ("rope_scaling" in config, "rope_parameters" in config) == (is_old, not is_old)
    assert "rope_theta" in config or not is_old
    spec: Any = again
    dim = spec.rotated if family == "qwen3_5" else spec.head_dim
    for ours, theirs in zip(
        rotary_tables(torch.arange(2000)[None], dim, spec.rope_theta, spec.rope_scaling),
        as_vllm_reads(config, dim, np.arange(2000)),
        strict=True,
    ):
        assert np.abs(ours[0, :, 0, dim // 2 :].numpy() - theirs).max() < 1e-3
    # the same key on what it has made, and on the other converters' folders; another one is refused
    convert.to_dcp(open_source(tmp_path / "hf"), tmp_path / "dcp")
    for folder in (checkpoint, tmp_path / "hf", tmp_path / "dcp"):
        for more in (KEY, KEY[:2], ()):
            settings = ["--checkpoint.initial_load_path", str(folder), *SETTINGS, *more]
            assert load_config(settings, 1).spec().rope_scaling == made.rope_scaling
        with pytest.raises(
            UserError,
            match=r"model.yarn_factor = 8.0: the model.s config.json has \{'rope_type': 'yarn', 'factor': 4.0",
        ):
            load_config(["--checkpoint.initial_load_path", str(folder), *SETTINGS, "--model.yarn_factor", "8"], 1)


def test_a_folder_with_images_keeps_its_form(tmp_path: Path) -> None:
    spec = dataclasses.replace(TINY["qwen3_5"], is_wrapped=True)
    content = to_hf_config(spec)
    content["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    (tmp_path / "config.json").write_text(json.dumps(content))
    made = load_config(["--checkpoint.initial_load_path", str(tmp_path), *SETTINGS, *KEY], 1).spec()
    (tmp_path / "config.json").write_bytes(
        run_assets(made, str(tmp_path), str(ASSETS / "tokenizer"), "")["config.json"]
    )
    assert read_hf_config(tmp_path) == made
    written = json.loads((tmp_path / "config.json").read_text())
    rope = {**content["text_config"]["rope_parameters"], "rope_type": "yarn", "factor": 4.0}
    assert written["text_config"]["rope_parameters"] == {**rope, "original_max_position_embeddings": 1024}
    assert written["text_config"]["max_position_embeddings"] == 4096 and "rope_parameters" not in written


def test_a_resume_with_another_factor_is_refused(world: World, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", "qwen3", {})
    checkpoint = saved(opened(base, world, *KEY), base, tmp_path / "run", world)
    for key, said in (
        (("--model.yarn_factor", "2", *KEY[2:]), r"\{'rope_type': 'yarn', 'factor': 4.0.*now .*'factor': 2.0"),
        ((), ".*now None"),
    ):
        with pytest.raises(UserError, match=rf"differs from it: model.rope_scaling \({said}"):
            resume(base, world, checkpoint, *key)
    resume(base, world, checkpoint, *KEY)


def resume(base: Path, world: World, checkpoint: Path, *more: str) -> Any:
    config = load_config(["--checkpoint.initial_load_path", str(base), *SETTINGS, *more], 1)
    data = made_up(random_rows(1, config.training.seq_len, 300, 0.5))
    return open_run(config, world, data=data, checkpoint=checkpoint)


def test_an_adapter_alone_says_that_it_cannot_carry_yarn_and_the_merge_carries_it(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = model_folder(tmp_path / "base", "qwen3", {})
    checkpoint = saved(opened(base, world, *KEY, "--lora.rank", "4"), base, tmp_path / "run", world)
    convert.to_hf(open_source(checkpoint), tmp_path / "peft")
    assert "has no config.json: its base's must have rope_scaling = {'rope_type': 'yarn', 'factor': 4.0" in caplog.text
    convert.to_hf(merged_source(open_source(base), checkpoint), tmp_path / "merged")
    merged, key = read_hf_config(tmp_path / "merged"), opened(base, world, *KEY).config.spec()
    assert merged.rope_scaling == key.rope_scaling and merged.max_position_embeddings == 4096
    assert_same_logits(tmp_path / "merged")
    expected = by_transformers(tmp_path / "merged", ids=IDS)
    assert (by_us(base, str(checkpoint)) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--model.yarn_factor", "0.5"), "--model.yarn_factor = 0.5: factor = 0.5 must be from 1 to 256"),
        (("--model.yarn_factor", "-1"), "--model.yarn_factor = '-1' must be a finite number of at least 0"),
        (
            (*KEY[:3], "5000"),
            "--model.yarn_factor = 4.0: original_max_position_embeddings = 5000 must be above 0 and at most max_pos",
        ),
        (KEY[2:], "yarn_original_max_position_embeddings = 1024 has no effect with yarn_factor = 0.0; delete it"),
    ],
)
def test_a_key_that_cannot_be_is_refused(more: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(["--model.flavor", "debug", *SETTINGS, *more], 1)
    assert expected in str(caught.value)


def test_documents_beyond_the_trained_length_are_warned_of_and_with_dynamic_refused(tmp_path: Path) -> None:
    spec = dataclasses.replace(TINY["qwen3"], max_position_embeddings=200)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "one two three " * 100}))
    data = ("--data.cache_folder", str(tmp_path / "cache"), "--data.overlong", "truncate")
    settings = [*data, *(str(tmp_path / "data.jsonl") if "tokenizer.json" in word else word for word in SETTINGS)]

    def prepared(rope: dict[str, Any], *more: str, seq_len: str = "1024") -> str:
        folder_with(tmp_path / "model", spec, rope, False)
        with_tokenizer(tmp_path / "model")
        base = ("--checkpoint.initial_load_path", str(tmp_path / "model"))
        return " ".join(
            prepare_run(
                load_config([*base, *settings, "--training.seq_len", seq_len, *more], 1), tmp_path
            ).facts.warnings
        )

    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    said = prepared({})
    assert "tokens, and the model is made for 200 positions (max_position_embeddings): it was not trained bey" in said
    assert "see model.yarn_factor" in said
    assert "made for 200 positions" in prepared({"rope_type": "linear", "factor": 2.0})
    assert "made for" not in prepared({**YARN, "original_max_position_embeddings": 200})
    assert "made for" not in prepared({}, "--model.yarn_factor", "4")
    with pytest.raises(
        UserError, match=r"for 200 positions: beyond them its rope type 'dynamic' .*set training.seq_len = 200"
    ):
        prepared(dynamic)
    assert "made for" not in prepared(dynamic, seq_len="200")
    lengths = {"a prompt": 700}
    check_lengths(dataclasses.replace(spec, rope_scaling=None, max_position_embeddings=800), lengths, 100)
    with pytest.raises(UserError, match=r"exceed the 200 positions"):
        check_lengths(spec, lengths, 100)
