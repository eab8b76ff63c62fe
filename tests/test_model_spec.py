"""Presets, config.json, counts; GPUs; layouts; the learning rate: pure functions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from titan_mi100.config.settings import LRSchedulerConfig
from titan_mi100.errors import UserError
from titan_mi100.optim.optimizer import lr_factor
from titan_mi100.planning.cards import CARDS, DEVICES, Gpu
from titan_mi100.planning.costs import train_flops
from titan_mi100.planning.hardware import count_gpus, dtype_advice, find_gpu, is_amd_cpu
from titan_mi100.shapes.base import parameter_count
from titan_mi100.shapes.families import PRESETS, read_hf_config, to_hf_config


@pytest.mark.parametrize("name", PRESETS)
def test_both_forms_of_the_rotary_fields_are_read(name: str, tmp_path: Path) -> None:
    spec = PRESETS[name]
    flat = to_hf_config(spec)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert read_hf_config(tmp_path) == spec
    nested = {key: value for key, value in flat.items() if key != "rope_theta"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    nested["rope_scaling"] = None
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_hf_config(tmp_path) == spec


def test_a_config_written_by_transformers_is_read(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    settings = {k: v for k, v in to_hf_config(PRESETS["1.7B"]).items() if k not in ("architectures", "model_type")}
    Qwen3Config(**settings).save_pretrained(tmp_path)
    assert read_hf_config(tmp_path) == PRESETS["1.7B"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'; only 'qwen3'"),
        ({"model_type": "qwen2_moe"}, "only 'qwen3'"),
        ({"hidden_size": None}, "hidden_size = None is not an int"),
        ({"hidden_size": "1024"}, "hidden_size = '1024' is not an int"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True is not a finite float"),
        ({"rms_norm_eps": float("nan")}, "NaN is not a finite number"),
        ({"rope_theta": 10**400}, "000... is not a finite float"),
        ({"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads = 5"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be positive"),
    ],
)
def test_a_config_that_is_another_model_is_refused(change: dict, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**to_hf_config(PRESETS["0.6B"]), **change}))
    with pytest.raises(UserError) as caught:
        read_hf_config(tmp_path)
    assert expected in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


def test_presets_have_the_parameters_of_the_published_models() -> None:
    published = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360,
                 "14B": 14_768_307_200, "32B": 32_762_123_264}  # fmt: skip
    published |= {"qwen3.5-0.8B": 752_393_024, "qwen3.5-2B": 1_881_825_088, "qwen3.5-4B": 4_205_751_296,
                  "qwen3.5-9B": 8_953_803_264}  # fmt: skip  # as transformers counts
    published |= dict.fromkeys(("qwen3.5-27B", "qwen3.6-27B", "qwen3.8-27B"), 26_895_998_464)
    published |= dict.fromkeys(("30B-A3B", "30B-A3B-2507", "Coder-30B-A3B"), 30_532_122_624)
    published |= dict.fromkeys(("qwen3.5-35B-A3B", "qwen3.6-35B-A3B"), 34_660_610_688)  # as transformers counts
    small = {"debug": 886_144, "qwen3.5-debug": 957_752, "moe-debug": 1_086_848}
    assert {name: parameter_count(spec) for name, spec in PRESETS.items()} == small | published


def test_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    spec = PRESETS["0.6B"]
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    matrices = parameter_count(spec) - norms  # tied: the embedding is the head
    assert train_flops(spec, 1000, 1000, 0) == 6 * matrices * 1000
    assert train_flops(spec, 0, 0, 1) == 3 * 28 * 16 * (2 * 128 + 2 * 128)


@pytest.mark.parametrize(
    ("arch", "units", "gib", "name"),
    [
        ("gfx908:sramecc+:xnack-", 120, 0, "MI100"),
        ("gfx908", 64, 0, None),  # half of its units are no card that is known
        ("gfx1100", 96, 0, "RX 7900 XTX"),  # as KFD counts
        ("gfx1100", 48, 23.98, "RX 7900 XTX"),  # as HIP counts
        ("gfx1100", 48, 44.98, "Radeon PRO W7900"),
        ("gfx1100", 42, 19.98, "RX 7900 XT"),
        ("gfx1151", 20, 62.5, "Strix Halo"),  # its share of the memory is the owner's choice
        ("gfx1201", 32, 31.86, "Radeon AI PRO R9700"),
        ("sm80", 108, 39.5, "A100 40 GB"),
        ("sm90", 132, 79.1, "H100 SXM"),
        ("sm90", 132, 93.1, "H100 NVL"),
        ("sm90", 132, 139.8, "H200"),
        ("sm90", 132, 95.6, "GH200"),
        ("sm90", 66, 79.1, None),  # only RDNA is counted in two ways
        ("sm89", 128, 23.5, "RTX 4090"),
    ],
)
def test_gpus_are_known_by_architecture_size_and_memory(arch: str, units: int, gib: float, name: str | None) -> None:
    found = find_gpu(arch, units, gib * 2**30)
    assert (found and found.name) == name


def test_a_dtype_that_the_hardware_lacks_is_advised_against(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: bf16\nflags\t\t: fpu avx2 f16c\n")
    assert "no bfloat16 instructions" in dtype_advice("bfloat16", None, True, cpuinfo)
    assert "no float16 instructions" in dtype_advice("float16", None, True, cpuinfo)
    assert not dtype_advice("float32", None, True, cpuinfo)
    assert not dtype_advice("bfloat16", None, False, cpuinfo)
    cpuinfo.write_text("flags : avx512f avx512_bf16\n")
    assert not dtype_advice("bfloat16", None, True, cpuinfo) and dtype_advice("float16", None, True, cpuinfo)
    cpuinfo.write_text("Features : fp asimd bf16 asimdhp\n")
    assert not dtype_advice("bfloat16", None, True, cpuinfo) and not dtype_advice("float16", None, True, cpuinfo)
    assert not dtype_advice("bfloat16", None, True, tmp_path / "none")
    assert "2.0 times" in dtype_advice("bfloat16", find_gpu("gfx908", 120), False)
    assert not dtype_advice("float16", find_gpu("gfx908", 120), False)
    assert not dtype_advice("bfloat16", find_gpu("sm90", 132), False)
    for card in CARDS:  # each is asked for every dtype
        said = [dtype_advice(dtype, card.gpu, False) for dtype in ("float16", "bfloat16", "float32")]
        assert (
            said == ["", "MI50 has no bfloat16 instructions; take float16", ""] if card.key == "mi50" else not said[0]
        )
    half_more = Gpu("mine", {"float16": 3.0, "bfloat16": 2.0}, 32, 32)
    assert not dtype_advice("bfloat16", half_more, False)
    assert "1.6 times" in dtype_advice("bfloat16", replace(half_more, tflops={"float16": 3.2, "bfloat16": 2.0}), False)


def test_a_cpu_of_amd_is_known_by_its_vendor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx512f avx512_bf16\n")
    assert not is_amd_cpu(cpuinfo) and not is_amd_cpu(tmp_path / "none")
    cpuinfo.write_text("vendor_id : AuthenticAMD\nflags : amx_bf16\n")
    assert is_amd_cpu(cpuinfo)


def test_peak_rates_are_units_times_clock() -> None:
    # GHz at the peak, FLOP per clock and unit in float16, bfloat16 and float32: the vendors' architecture papers. Of
    # L40S, H100 and B200 float32 runs at another clock.
    made_of = {
        "mi50": (1.725, 256, 0, 128), "mi100": (1.502, 1024, 512, 256), "mi210": (1.7, 1024, 1024, 256),
        "mi250x": (1.7, 1024, 1024, 256), "mi300x": (2.1, 2048, 2048, 256), "mi355x": (2.4, 4096, 4096, 256),
        "7900xtx": (2.5, 512, 512, 256), "7900xt": (2.4, 512, 512, 256), "w7900": (2.495, 512, 512, 256),
        "strix-halo": (2.9, 512, 512, 256), "9070xt": (2.97, 1024, 1024, 256), "r9700": (2.92, 1024, 1024, 256),
        "a100": (1.41, 2048, 2048, 128), "a100-40gb": (1.41, 2048, 2048, 128), "a10": (1.695, 1024, 1024, 256),
        "3090": (1.695, 512, 512, 256), "l4": (2.04, 1024, 1024, 256), "4090": (2.52, 512, 512, 256),
        "l40s": (2.49, 1024, 1024, 256 * 2.52 / 2.49), "h100": (1.83, 4096, 4096, 256 * 1.98 / 1.83),
        "h200": (1.83, 4096, 4096, 256 * 1.98 / 1.83), "h100-nvl": (1.545, 4096, 4096, 256 * 1.785 / 1.545),
        "gh200": (1.83, 4096, 4096, 256 * 1.98 / 1.83),
        "h100-pcie": (1.62, 4096, 4096, 256 * 1.755 / 1.62), "b200": (1.856, 8192, 8192, 256 * 1.98 / 1.856),
        "5090": (2.407, 512, 512, 256), "rtx-pro-6000": (2.617, 1024, 1024, 256),
    }  # fmt: skip
    assert list(made_of) == [card.key for card in CARDS] == list(DEVICES)
    for card in CARDS:
        ghz, *per_clock = made_of[card.key]
        found = [card.gpu.tflops.get(dtype, 0) for dtype in ("float16", "bfloat16", "float32")]
        assert found == pytest.approx([card.units * ghz * flop / 1000 for flop in per_clock], rel=0.003), card.key


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    assert count_gpus(tmp_path, {}) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(tmp_path, {}) == 2
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0


def factors(steps: int, **settings: object) -> list[float]:
    config = LRSchedulerConfig(**{"warmup_steps": 0, **settings})  # type: ignore[arg-type]
    return [lr_factor(config, step, steps) for step in range(1, steps + 1)]


def test_learning_rates() -> None:
    assert factors(4, decay_type="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(4, decay_type="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors(4, decay_type="cosine") == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )
    # warmup-stable-decay: 2 steps up, 4 stable, 4 down towards 0.2
    assert factors(10, decay_type="linear", warmup_steps=2, decay_ratio=0.4, min_lr_factor=0.2) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]
    )
    assert factors(4, decay_type="sqrt", decay_ratio=0.5) == pytest.approx([1, 1, 1, 1 - math.sqrt(0.5)])
    assert factors(3, decay_type="linear", decay_ratio=0.0) == [1, 1, 1]
    assert factors(100, warmup_steps=-1)[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert factors(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_of_many_unknown_keys_the_first_are_named(tmp_path: Path) -> None:
    config = to_hf_config(PRESETS["debug"]) | {f"k{number}": 1 for number in range(10_000)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        read_hf_config(tmp_path)
    lines = str(refused.value).splitlines()
    assert len(lines) == 51 and lines[-1].endswith("config.json: 9,950 more problems")
