"""Reading the `config.json` of an HF folder: what all families share. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from titan_mi100.errors import UserError
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.rope import TYPES, read_scaling
from titan_mi100.wording import as_key, first_of, shortened, shown

Spec = TypeVar("Spec", bound=ModelSpec)
LARGEST_SIZE, LARGEST_HEADS, MOST_LAYERS = 10**8, 10_000, 1_024
_LARGEST = {"num_hidden_layers": MOST_LAYERS, "num_experts": 4_096, "num_experts_per_tok": 4_096}
_LARGEST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), LARGEST_HEADS)

# type of a field -> the types of JSON values that it accepts, and their name in messages
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"), int: ((int,), "an int"), float: ((int, float), "a finite float"),
    int | None: ((int, type(None)), "an int or null"),
}  # fmt: skip

# Other keys of config.json. transformers computes the same as our models only with these values (with router logits a
# mixture of experts adds an auxiliary loss, which depends on how rows are grouped into microbatches):
ONLY: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "is_causal": True,
    "attention_dropout": 0.0, "is_decoder": False, "is_encoder_decoder": False, "tie_encoder_decoder": False,
    "add_cross_attention": False, "chunk_size_feed_forward": 0, "pretraining_tp": 1, "pruned_heads": {},
    "output_router_logits": False,
}  # fmt: skip
# These keys change neither forward nor backward: bookkeeping, return values, classification, generation.
WITHOUT_EFFECT = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version name_or_path _name_or_path _commit_hash
    tokenizer_class unsloth_version unsloth_fixed attn_implementation _attn_implementation _attn_implementation_autoset
    use_cache torchscript return_dict output_hidden_states output_attentions sliding_window max_window_layers
    bos_token_id eos_token_id sep_token_id decoder_start_token_id prefix finetuning_task task_specific_params
    problem_type num_labels id2label label2id
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens epsilon_cutoff eta_cutoff router_aux_loss_coef
    """.split()  # noqa: SIM905 (a list of that many strings hides the names)
)
ROPES = ("rope_scaling", "rope_parameters")  # the rotary embedding's dict, as transformers 4 and 5 write it


def build(path: Path, kind: type[Spec], values: Mapping[str, Any], found: list[str]) -> Spec:
    """Make a shape of a file's values.

    Args:
        path: of the file, for messages.
        values: by the names of the shape's fields, and other keys; defaults included.
        found: what is wrong with the file already.

    Raises:
        UserError: all problems of the file.
    """
    for field in fields(kind):
        setting = values.get(field.name, field.default)
        types, words = _TYPES.get(field.type, ((), ""))
        if setting is MISSING:
            found.append(f"{field.name} is missing")
        elif types and (type(setting) not in types or (field.type is float and not abs(setting) < 1e300)):
            found.append(f"{field.name} = {shown(setting)} is not {words}")
    if not found:
        spec = kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
        found = problems_of(spec)
    if found:
        raise UserError(first_of([f"{path}: {problem}" for problem in found], str(path)))
    return spec


def problems_of(spec: ModelSpec) -> list[str]:
    """Problems of the values of a file. Larger counts would make loops endless, larger sizes would overflow."""
    problems = []
    for name, size in asdict(spec).items():  # type: ignore[call-overload]  # of a dataclass
        count, most = size, _LARGEST.get(name, LARGEST_SIZE)
        if isinstance(size, tuple):
            count, most, name = len(size), MOST_LAYERS, f"the length of {name}"
        if type(count) is int and count > most:
            problems.append(f"{name} = {shortened(str(count))} is more than any model has")
    return problems or spec.problems()


def unsupported(raw: Mapping[str, Any], known: Collection[str], only: Mapping[str, Any]) -> list[str]:
    """Keys that are unknown, or have values that our model does not compute. Args: only: key -> its only value."""
    problems = unknown(raw, {*known, *only, *WITHOUT_EFFECT, *ROPES, "layer_types", "quantization_config"})
    if (quantized := raw.get("quantization_config")) is not None:
        method = shown(quantized.get("quant_method") if isinstance(quantized, dict) else quantized)
        problem = f"quantization_config ({method}): quantized weights are not supported"
        problems.append(f"{problem}; use the model's unquantized folder")
    for key, allowed in only.items():
        if raw.get(key, allowed) != allowed:
            problems.append(f"{key} = {shortened(repr(raw[key]))} is not supported; only {allowed!r}")
    return problems


def rope_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's dict; {} if there is none, or something else."""
    return next((raw[key] for key in ROPES if raw.get(key) and isinstance(raw[key], dict)), {})


def read_rope(
    raw: Mapping[str, Any], values: Collection[str], found: list[str], harmless: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of a shape that the rotary embedding's dict gives: `values`, and `rope_scaling`.

    Args:
        values: keys that may also stand outside of it, where they must not contradict. found: receives problems.
        harmless: others.
    """
    scaling, ropes = None, {key: raw[key] for key in ROPES if raw.get(key) not in (None, {})}
    if len(ropes) > 1:
        found.append(f"{' and '.join(ROPES)} are both set, and programs read either; remove one")
    for key, rope in ropes.items():
        if not isinstance(rope, dict):
            found.append(f"{key} = {shortened(repr(rope))} is not a JSON object")
            continue
        kinds = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
        if kinds[0] != kinds[-1]:
            found.append(f"{key}: rope_type is {shown(kinds[0])}, and type is {shown(kinds[1])}; remove one")
        elif kinds[0] not in [*TYPES]:
            only = ", ".join(map(repr, TYPES))
            found.append(f"{key}: rope type {shown(kinds[0])} is not supported; only {only}")
        else:
            known = {"rope_type", "type", *values, *harmless, *TYPES[kinds[0]]}
            found += [f"{key}: {problem}" for problem in unknown(rope, known)]
            for name in values:
                if name in rope and rope[name] != raw.get(name, rope[name]):
                    found.append(f"{name} is {raw[name]!r}, and {rope[name]!r} in {key}; remove one")
            positions = raw.get("max_position_embeddings", 32_768)  # the default of all families
            try:
                scaling = read_scaling(rope, kinds[0], positions if type(positions) is int else 1)
            except (ValueError, ZeroDivisionError) as error:
                found.append(f"{key}: {error}")
    return {name: value for name, value in rope_of(raw).items() if name in values} | {"rope_scaling": scaling}


def unknown(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [
        f"{as_key(key)} = {shown(given[key])} is not known here; remove it if the model is the same without it"
        for key in sorted(given.keys() - known)
        if given[key] is not None
    ]
