"""Reads and writes PEFT folders: `adapter_config.json` and `adapter_model.safetensors`. Does not import peft.

The format is that of peft 0.21; tests/test_lora.py compares with it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from titan_mi100.config.hub import cached_model
from titan_mi100.config.settings import LoRAConfig, lora_identity
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object, refuse_code
from titan_mi100.files.stored import open_safetensors
from titan_mi100.shapes.base import EXPERTS, ROWS, modules_of
from titan_mi100.shapes.families import ADAPTED, LINEARS, own_name
from titan_mi100.weights.base import StoredWeights, Weights
from titan_mi100.weights.experts import TARGET_PARAMETERS, AdapterOfExperts, as_peft_has_experts
from titan_mi100.wording import shortened, some

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT puts it before the model's own names
_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?:\w+\.)+layers\.\d+\.\w+\.({'|'.join(ADAPTED)})(?:\.base_layer)?\.lora_[AB]\.weight"
)
_ROWS = re.compile(rf"{re.escape(_PREFIX)}(?:\w+\.)*(embed_tokens|lm_head){re.escape(ROWS)}")
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
# Keys of adapter_config.json that do not change the result of an adapter with given tensors. Any other key that is set
# is refused: the adapter would compute something else here than in peft.
_HARMLESS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights", "megatron_core", "qalora_group_size",
    "runtime_config", "eva_config", "use_rslora", "trainable_token_indices",
}  # fmt: skip
_LONGEST_NAME = 4095  # bytes of a path
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # other initialisations also change the base's weights


def write_adapter(folder: str | Path, tensors: Mapping[str, Tensor], lora: LoRAConfig, base_model_name: str) -> None:
    """Write an adapter that `peft.PeftModel.from_pretrained` loads.

    Args:
        folder: created if it does not exist; files in it are overwritten.
        tensors: all matrices by the names of the base's folder, such as
            `model.layers.0.self_attn.q_proj.lora_A.weight`: A is (rank, in), B is (out, rank).
        lora: the settings that the adapter was trained with.
        base_model_name: path or hub name of the base, or empty. Of a path in the hub's cache the name is written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = as_peft_has_experts(tensors, lora.of_experts.rank)
    contiguous = {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
    named, tables = modules_of(tensors), sorted(_tables(contiguous))
    identity = lora_identity(lora, named)
    # peft's names for ranks and alphas of single modules
    patterns = {"rank_pattern": "expert_rank", "alpha_pattern": "expert_alpha"}
    hub_name, commit = cached_model(base_model_name) if base_model_name else ("", "")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_name or base_model_name or None,
        "revision": commit or None,
        "inference_mode": True,
        "r": lora.rank,
        # a whole number as an int, as peft itself writes it
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0 if EXPERTS in named else lora.dropout,  # peft loads experts without only
        "target_modules": [name for name in identity["target_modules"] if name != EXPERTS],
        **({"target_parameters": [*TARGET_PARAMETERS]} if EXPERTS in named else {}),
        **{key: dict.fromkeys(TARGET_PARAMETERS, identity[own]) for key, own in patterns.items() if own in identity},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": lora.scaling == "sqrt_rank",
        **({"trainable_token_indices": {key: [*lora.token_ids] for key in tables}} if lora.token_ids else {}),
        "use_dora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def base_of(folder: str | Path) -> str:
    """The base named by an adapter folder: a path, a hub name, or empty. Raises UserError as read_adapter."""
    return _read_config(Path(folder) / CONFIG).get("base_model_name_or_path") or ""


def read_adapter(folder: str | Path) -> tuple[LoRAConfig, Weights]:
    """Read an adapter's settings, and its matrices by our names. The folder is treated as untrusted.

    The caller must compare names and shapes with the model (`Weights.check`).

    Raises:
        UserError: it is not a LoRA adapter, it has features that we do not support, or it cannot be read.
    """
    raw, path = _read_config(Path(folder) / CONFIG), Path(folder) / WEIGHTS
    pickled = path.with_name("adapter_model.bin")
    if not os.path.lexists(path) and os.path.lexists(pickled):
        remedy = "save it with save_pretrained of peft 0.8 or later"
        raise UserError(f"{pickled}: is a pickle, which is never read; {remedy}")
    stored = open_safetensors(path)
    if not stored.kinds:
        raise UserError(f"{path}: has no tensors; copy it again")
    tables = _tables(stored.kinds)
    matches = {name: _NAME.fullmatch(name) for name in stored.kinds if not _ROWS.fullmatch(name)}
    if tables != {*(raw.get("trainable_token_indices") or {})}:
        problem = (
            f"has rows of tokens of {some(sorted(tables)) or 'no table'}, unlike trainable_token_indices in {CONFIG}"
        )
        raise UserError(f"{path}: {problem}; save it again with peft's save_pretrained")
    if odd := sorted(name for name, match in matches.items() if match is None):
        if single := [name for name in odd if _OF_ONE_EXPERT.search(name)]:
            problem = f"has {some(single, 1)}: adapters of single experts are not supported, only of all in one tensor"
            raise UserError(f"{path}: {problem}; merge it with peft: PeftModel.merge_and_unload()")
        raise UserError(
            f"{path}: has {some(odd, 1)}, which is not a LoRA matrix of a linear layer as peft names it, "
            f"{_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight; rename it, or train the adapter on "
            f"{', '.join(LINEARS)} only, without modules_to_save"
        )
    named = {match[1] for match in matches.values() if match}
    targets = raw.get("target_modules")
    # The file's tensors tell the targets. But peft drops matrices that target_modules lacks, so that would be another
    # adapter there than here. A text is a regular expression, which is not evaluated; peft never saves null.
    if isinstance(targets, list):
        of_experts = [f".{EXPERTS}", f".{EXPERTS}.base_layer"] if raw.get("target_parameters") else []
        ends = (*(f".{target}" for target in targets), *of_experts)
        modules = {name.rsplit(".", 2)[0] for name in matches}
        if left_out := sorted(module for module in modules if not module.endswith(ends)):
            problem = f"target_modules lacks {some(left_out)}, so peft would ignore their matrices in {WEIGHTS}"
            raise UserError(f"{path.with_name(CONFIG)}: {problem}; name them there, or save the adapter without them")
    lora = LoRAConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        dropout=float(raw["lora_dropout"]),
        target_modules=tuple(name for name in ADAPTED if name in named),
        expert_rank=raw.get("rank_pattern") or 0,
        expert_alpha=float(raw.get("alpha_pattern") or 0),
        scaling="sqrt_rank" if raw.get("use_rslora") else "rank",
        token_ids=tuple(next(iter((raw.get("trainable_token_indices") or {"": ()}).values()))),
    )
    names = {own_name(name.removeprefix(_PREFIX)): name for name in stored.kinds}
    weights: Weights = StoredWeights(path, stored, names)
    return lora, AdapterOfExperts(weights, lora.of_experts.rank) if EXPERTS in named else weights


def open_adapter(lora: LoRAConfig, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Open the adapter that a run starts from (lora.initial_load_path).

    Args:
        shapes: HF name -> shape, of the run's adapter; the folder's must be equal.

    Raises:
        UserError: from read_adapter; or the settings differ, or the adapter belongs to another model.
    """
    folder = lora.initial_load_path
    stored, weights = read_adapter(folder)
    modules = modules_of(shapes)
    ours, theirs = lora_identity(lora, modules), lora_identity(stored, {*ADAPTED})
    for one, other in ((ours, theirs), (theirs, ours)):  # what is usual is left out, as are ranks of experts
        usual = {"scaling": "rank", "token_ids": [], **{f"expert_{key}": one[key] for key in ("rank", "alpha")}}
        one |= {key: usual[key] for key in other if key not in one}
    words = {"token_ids": "trainable_tokens with the ids"}
    if differing := [
        f"{words.get(key, f'{key} =')} {theirs[key]}, not {ours[key]}"
        for key in ours
        if key != "dropout" and ours[key] != theirs[key]
    ]:
        raise UserError(f"[lora] initial_load_path = {folder!r} has {'; '.join(differing)}; set [lora] to its values")
    weights.check(shapes)
    return weights


def _read_config(path: Path) -> dict[str, Any]:
    """Read and check adapter_config.json. Raises UserError: all problems at once."""
    raw = read_object(path, "name a folder that peft's save_pretrained wrote")
    refuse_code(path, raw)
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type = {shortened(repr(raw.get('peft_type')))}; only LORA is supported")
    raw = {"lora_alpha": 8, "lora_dropout": 0.0, **raw}  # peft's own defaults
    problems = []
    if type(raw.get("r")) is not int or not 1 <= raw["r"] <= 1 << 20:  # type(): True is an int for isinstance
        problems.append(f"r = {shortened(repr(raw.get('r')))} is not a rank, a whole number above 0")
    for key, is_good in (("lora_alpha", lambda x: 0 < x < 1e9), ("lora_dropout", lambda x: 0 <= x < 1)):
        if type(raw[key]) not in (int, float) or not is_good(raw[key]):
            problems.append(f"{key} = {shortened(repr(raw[key]))} is not a valid number for this key")
    if (start := raw.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        remedy = "convert it with peft's path_initial_model_for_weight_conversion"
        problems.append(f"init_lora_weights = {shortened(repr(start))} changes the base's weights too; {remedy}")
    base = raw.get("base_model_name_or_path") or ""
    if not isinstance(base, str) or len(base) > _LONGEST_NAME:
        problems.append(f"base_model_name_or_path = {shortened(repr(base))} is neither a name nor a path")
    is_known = _names_experts(raw.get("target_parameters"))
    harmless = _HARMLESS | ({"target_parameters"} if is_known else set())
    limits = {"rank_pattern": ((int,), 1 << 20), "alpha_pattern": ((int, float), 1e9)}
    for key, (types, most) in limits.items():  # ours have one value for all experts
        if is_known and isinstance(raw.get(key), dict) and _names_experts([*raw[key]]):
            number, other = raw[key].values()
            if type(number) in types and 0 < number <= most and number == other:
                raw[key] = number
                harmless.add(key)
    for key in sorted(raw.keys() - harmless):
        if raw[key] and raw[key] != "none":
            remedy = "merge the adapter into its base, or train without it"
            problems.append(f"{shortened(key)} = {shortened(repr(raw[key]))} is not supported; {remedy}")
    if type(raw.get("use_rslora", False)) is not bool:
        problems.append(f"use_rslora = {shortened(repr(raw['use_rslora']))} is neither true nor false")
    if (indices := raw.get("trainable_token_indices")) and (wrong := _token_problem(indices)):
        problems.append(f"trainable_token_indices {wrong}; merge the adapter into its base with peft")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return raw


def _tables(names: Iterable[str]) -> set[str]:
    """The tables with trained rows of tokens: "embed_tokens", "lm_head"."""
    return {match[1] for name in names if (match := _ROWS.fullmatch(name))}


def _token_problem(indices: Any) -> str:
    """What is wrong with trainable_token_indices; "": nothing. Ours are the same tokens in ascending order for all."""
    if not isinstance(indices, dict) or not {*indices} <= {"embed_tokens", "lm_head"}:
        return 'is none of {"embed_tokens": [...]} and {"embed_tokens": [...], "lm_head": [...]}'
    lists = [*indices.values()]
    is_sound = all(isinstance(ids, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in ids) for ids in lists)
    if not is_sound or any(ids != lists[0] or ids != sorted({*ids}) for ids in lists):
        return "has other ids than ascending ones, the same for embedding and head"
    return ""


def _names_experts(targets: Any) -> bool:
    """Whether a list has both tensors of experts once each, by their names or ends of these, as peft allows."""
    if not isinstance(targets, list) or len(targets) != 2:
        return False
    return all(sum(f".{name}".endswith(f".{target}") for target in targets) == 1 for name in TARGET_PARAMETERS)
