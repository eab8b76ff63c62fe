"""The files of an HF folder besides its weights: config, tokenizer and chat template, unchanged. Imports no torch.

A checkpoint holds the same files: it is a complete model, with its weights in another format.
"""

import glob
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan_mi100.errors import UserError, read_or_refuse
from titan_mi100.files.plain import LARGEST_CONFIG, LARGEST_TABLE, parse_object, read_plain
from titan_mi100.files.templates import TEMPLATE
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import read_hf_config, to_hf_config
from titan_mi100.shapes.hf_config import ROPES, rope_of
from titan_mi100.shapes.rope import TYPES, YARN
from titan_mi100.text.classes import QWEN_CLASSES, class_of
from titan_mi100.wording import shown

CONFIG, GENERATION = "config.json", "generation_config.json"
CORPUS, PLAN = "corpus.json", "plan.json"  # in a folder of prepare_corpus: complete; begun
PROMPTS = "titan_mi100.json"  # our file: how to prompt the model as it was trained
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TOKENIZER = (
    *("tokenizer.json", _TOKENIZER_CONFIG, "vocab.json", "merges.txt", _SPECIAL_TOKENS),
    *("added_tokens.json", TEMPLATE),
)
# How images become tokens. Carried along: servers load no model that reads images without them.
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_OF_MODEL = (CONFIG, GENERATION, PROMPTS, *PROCESSORS)
_IN_VERSION_4 = ("qwen3", "qwen3_moe")  # model types that transformers 4 has
DRAFT_LAYERS = "mtp_num_hidden_layers"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # the key in transformers 5 and later, and the key before

# Keys of generation_config.json that transformers accepts with any value.
_REMEDY = "correct it, or remove it"
VARIABLES = {"enable_thinking": bool, "preserve_thinking": bool, "reasoning_effort": str}  # of chat templates
_DEFAULT = "{{%- if {0} is not defined %}}{{%- set {0} = {1} %}}{{%- endif %}}"

Assets = dict[str, bytes]  # file name -> content


def folder_of(path: str | Path) -> Path:
    """The folder of a model that is named by its folder, or by a file in it."""
    return Path(path) if os.path.isdir(path) else Path(path).parent


def read_assets(folder: Path) -> Assets:
    """The model's files besides its weights, as far as the folder has them.

    Raises:
        UserError: one is no regular file, or too large.
    """
    return _read_files(folder, _OF_MODEL) | tokenizer_files(folder)


def has_tokenizer(folder: str | Path) -> bool:
    known = ("tokenizer.json", "*.model")
    return any(glob.glob(os.path.join(glob.escape(str(folder)), name)) for name in known)


def is_corpus(path: str | os.PathLike[str]) -> bool:
    """Whether it is a folder that prepare_corpus has completed."""
    return os.path.lexists(os.path.join(path, CORPUS))


def tokenizer_files(path: Path) -> Assets:
    """The files of a tokenizer. `path` is its folder, or a sentencepiece file."""
    if not path.is_dir():
        return _read_files(path.parent, (path.name, _TOKENIZER_CONFIG, TEMPLATE))
    own = [file.name for file in sorted(path.glob("*.model"))]
    return _read_files(path, (*_TOKENIZER, *own))


def _read_files(folder: Path, names: tuple[str, ...]) -> Assets:
    assets = {}
    for name in names:
        with read_or_refuse(folder / name), suppress(FileNotFoundError):
            assets[name] = read_plain(folder / name, LARGEST_TABLE)
    return assets


def run_assets(
    spec: ModelSpec,
    base: str,
    tokenizer: str,
    chat_template: str,
    enable_thinking: bool | None = None,
    system_prompt: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Assets:
    """The files of the model that a run trains.

    Args:
        base: folder or file of the initial weights; empty: random weights.
        tokenizer, chat_template: as the config names them.
        enable_thinking, system_prompt: as in the run's data; None: as in the base's titan_mi100.json. "": no system
            prompt.
        variables: other variables of the template that the data were rendered with.
    """
    own = _read_files(folder_of(base), _OF_MODEL) if base else {}
    assets = {CONFIG: _json(to_hf_config(spec)), **own, **tokenizer_files(Path(tokenizer))}
    if spec.rope_scaling or spec.has_draft_head:
        assets[CONFIG] = _json(_as_trained(parse_object(assets[CONFIG], folder_of(base) / CONFIG, _REMEDY), spec))
    assets = naming_class(assets, _read_files(folder_of(tokenizer), (CONFIG,)))
    if chat_template:
        assets[TEMPLATE] = read_plain(Path(os.path.realpath(chat_template)), LARGEST_CONFIG)
    settings = {**(variables or {}), "enable_thinking": enable_thinking, "system_prompt": system_prompt}
    in_data = {key: value for key, value in settings.items() if value is not None}
    prompts = asdict(prompt_settings(own, folder_of(base))) | in_data
    prompts = {key: value for key, value in prompts.items() if value not in (None, "")}
    assets.pop(PROMPTS, None)
    assets = prompting_by_default(assets, PromptSettings(**in_data).variables)
    return assets | ({PROMPTS: _json(prompts)} if prompts else {})


def naming_class(assets: Assets, beside: Assets) -> Assets:
    """The files with the tokenizer's class that transformers takes beside the config.json in `beside`.

    Qwen3.5's folders name another one, which transformers ignores there. Elsewhere it would give other ids.
    """
    config = parse_object(assets.get(_TOKENIZER_CONFIG, b"{}"), _TOKENIZER_CONFIG, _REMEDY)
    kinds = [parse_object(files.get(CONFIG, b"{}"), CONFIG, _REMEDY).get("model_type") for files in (beside, assets)]
    before, after = (class_of(config, kind) for kind in kinds)
    if not config or before == after or before not in QWEN_CLASSES:
        return assets
    return {**assets, _TOKENIZER_CONFIG: _json({**config, "tokenizer_class": before})}


def prompting_by_default(assets: Assets, variables: Mapping[str, Any]) -> Assets:
    """The files with a chat template whose prompts are those of training, also in programs that do not know our file.

    Such programs can still set the variables. A template that does not read one stays as it is.
    """

    def changed(template: Any) -> Any:
        for name, value in variables.items():
            before = re.escape(_DEFAULT.format(name, "@")).replace("@", "[^%]*")
            own = re.sub(before, "", template)
            template = _DEFAULT.format(name, json.dumps(value)) + own if name in own else template
        return template

    if TEMPLATE in assets and variables:
        return {**assets, TEMPLATE: changed(assets[TEMPLATE].decode()).encode()}
    config = parse_object(assets.get(_TOKENIZER_CONFIG, b"{}"), _TOKENIZER_CONFIG, _REMEDY)
    template = config.get("chat_template")
    if not template or changed(template) == template:
        return assets
    return {**assets, _TOKENIZER_CONFIG: _json({**config, "chat_template": changed(template)})}


def ending_turns(assets: Assets, token: str, token_id: int) -> Assets:
    """The files of a model whose answers end with a token, so that other programs stop there.

    Unchanged where the tokenizer's eos_token is that token. Otherwise, as for a base model that learned conversations:
    the token becomes the eos_token, while the pad token stays; configs name its id first, then those that they had.

    Args:
        token, token_id: the end of a turn, see `ChatTemplate.end_of_turn`.
    """
    before = eos_token(assets)
    if before in (token, ""):  # "": the class or the file of the tokenizer decides
        return assets
    made, tokenizer = dict(assets), parse_object(assets[_TOKENIZER_CONFIG], _TOKENIZER_CONFIG, _REMEDY)
    pad = tokenizer.get("pad_token") or before  # without a pad token, the eos token is used for it
    made[_TOKENIZER_CONFIG] = _json({**tokenizer, "eos_token": token, "pad_token": pad})
    if _SPECIAL_TOKENS in assets:
        special = parse_object(assets[_SPECIAL_TOKENS], _SPECIAL_TOKENS, _REMEDY)
        made[_SPECIAL_TOKENS] = _json({**special, "eos_token": token} if "eos_token" in special else special)
    config = parse_object(assets.get(CONFIG, b"{}"), CONFIG, _REMEDY)
    generation = parse_object(assets.get(GENERATION, b"{}"), GENERATION, _REMEDY)
    stops = stop_ids(assets) or stop_ids({GENERATION: _json(text_part(config))}, CONFIG)
    generation["eos_token_id"] = [token_id, *(stop for stop in stops if stop != token_id)]
    text_part(config)["eos_token_id"] = token_id
    return made | {CONFIG: _json(config), GENERATION: _json(generation)}


def eos_token(assets: Assets) -> str:
    """The end token that tokenizer_config.json names, as a text or as an object with flags; "": none."""
    token = parse_object(assets.get(_TOKENIZER_CONFIG, b"{}"), _TOKENIZER_CONFIG, _REMEDY).get("eos_token")
    return str((token.get("content") if isinstance(token, dict) else token) or "")


@dataclass(frozen=True)
class PromptSettings:
    """How to prompt a model as it was trained: the content of titan_mi100.json. None: as the chat template does.

    Attributes:
        system_prompt: system message of conversations that have none.
        Others: the template's variables.
    """

    enable_thinking: bool | None = None
    system_prompt: str | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: str | None = None

    @property
    def variables(self) -> dict[str, Any]:
        return {name: value for name in VARIABLES if (value := getattr(self, name)) is not None}


def prompt_settings(assets: Assets, folder: Path) -> PromptSettings:
    """Read titan_mi100.json. Raises UserError: it is not valid; the message names `folder`."""
    if PROMPTS not in assets:
        return PromptSettings()
    settings = parse_object(assets[PROMPTS], folder / PROMPTS, _REMEDY)
    kinds = {**VARIABLES, "system_prompt": str}
    if not settings or any(type(value) is not kinds.get(key) for key, value in settings.items()):
        text = "must hold enable_thinking or preserve_thinking (true or false), system_prompt or reasoning_effort (a "
        text += "text), and nothing else"
        raise UserError(f"{folder / PROMPTS}: {text}; {_REMEDY}")
    return PromptSettings(**settings)


def config_dtype(assets: Assets) -> str | None:
    """The dtype that config.json names, such as `bfloat16`."""
    config = parse_object(assets.get(CONFIG, b"{}"), CONFIG, _REMEDY)
    named = (part[key] for part in (config, text_part(config)) for key in _DTYPE_KEYS if part.get(key))
    return next((str(dtype).removeprefix("torch.") for dtype in named), None)


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the text model; models that read images, too, have it inside."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def naming_dtype(assets: Assets, dtype: str) -> Assets:
    """The files with a config.json that names this dtype of the weights. "keep", or no config.json: unchanged."""
    if CONFIG not in assets or dtype in ("keep", config_dtype(assets)):
        return assets
    config = parse_object(assets[CONFIG], CONFIG, _REMEDY)
    parts = {id(part): part for part in (config, text_part(config))}.values()
    if not any(key in part for part in parts for key in _DTYPE_KEYS):
        config["torch_dtype"] = dtype
    for part in parts:
        part |= dict.fromkeys([key for key in _DTYPE_KEYS if key in part], dtype)
    return assets | {CONFIG: _json(config)}


def stop_ids(assets: Assets, file: str | Path = GENERATION) -> list[int]:
    """The stop tokens that generation_config.json names. Raises UserError, about `file`: they are no token ids."""
    named = parse_object(assets.get(GENERATION, b"{}"), file, _REMEDY).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise UserError(f"{file}: eos_token_id = {shown(named)} must be a token id or a list of such; {_REMEDY}")
    return ids


def check_generation(folder: Path) -> None:
    """Check the generation_config.json that a run's checkpoints and exports get.

    Raises:
        UserError: an export would refuse it.
    """
    assets = _read_files(folder, (CONFIG, GENERATION))
    stop_ids(assets, folder / GENERATION)
    config = parse_object(assets.get(CONFIG, b"{}"), folder / CONFIG, _REMEDY)
    stop_ids({GENERATION: _json(text_part(config))}, folder / CONFIG)


def check_draft_keys(folder: Path, instead: str, is_new: bool) -> None:
    """Check what a config.json says of the draft head. Args: instead: a remedy. is_new: the folder may have none.

    Raises:
        UserError: another head than the one that is computed here.
    """
    config = parse_object(_read_files(folder, (CONFIG,)).get(CONFIG, b"{}"), folder / CONFIG, _REMEDY)
    part, wrong = text_part(config), []
    layers = part.get(DRAFT_LAYERS)
    if config and not (layers == 1 or (is_new and layers is None)):
        remedy = instead if layers else f'if it has a draft head, write "{DRAFT_LAYERS}": 1 into it'
        number = "is missing" if layers is None else f"= {shown(layers)}"
        wrong.append(f"{DRAFT_LAYERS} {number}: only draft heads of one layer are supported; {remedy}")
    if part.get("mtp_use_dedicated_embeddings"):
        wrong.append(f"mtp_use_dedicated_embeddings = true: only heads that use the model's are supported; {instead}")
    if wrong:
        raise UserError("\n".join(f"{folder / CONFIG}: {problem}" for problem in wrong))


def check_export(spec: ModelSpec, base: str, tokenizer: str, chat_template: str) -> None:
    """Assemble the files of a run's export, and read them as the export will. Args: as run_assets.

    Raises:
        UserError: the export would refuse them.
    """
    from titan_mi100.text.load import load_tokenizer  # here, because it imports the tokenizers' libraries

    with TemporaryDirectory() as scratch:
        folder, made = Path(scratch), run_assets(spec, base, tokenizer, chat_template)
        try:
            for name, content in made.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            problem = f"cannot be tried in {folder.parent}: {error.strerror}; free some space there, or set TMPDIR"
            raise UserError(f"[checkpoint] export_hf = true: the export's files {problem}") from None
        try:
            read_hf_config(folder)
            if "tokenizer.json" in made:
                load_tokenizer(folder)
            export_assets(folder, made, spec, None, [])
        except UserError as error:
            problem = str(error).replace(f"{scratch}/", "")
            remedy = "set model.tokenizer_path to the tokenizer of this model, or checkpoint.export_hf = false"
            raise UserError(f"[checkpoint] export_hf = true: of the export's files {problem}; {remedy}") from None


def export_assets(folder: Path, assets: Assets, spec: ModelSpec, dtype: str | None, ends: list[int]) -> Assets:
    """The files of an export: a config.json that matches the weights, a generation_config.json with the stop tokens.

    Args:
        folder: where the assets come from, for messages.
        dtype: dtype of the exported weights; None: they have several.
        ends: ids of the tokens that end a text, the end of a turn first; empty: unknown.
    """
    config = parse_object(assets.get(CONFIG, b"{}"), folder / CONFIG, _REMEDY) or to_hf_config(spec)
    config = {**_as_trained(config, spec), "architectures": to_hf_config(spec)["architectures"]}
    generation = parse_object(assets.get(GENERATION, b"{}"), folder / GENERATION, _REMEDY)
    stops = stop_ids(assets, folder / GENERATION)
    if ends:
        if (part := text_part(config)).get("eos_token_id") is None:
            part["eos_token_id"] = ends[0]
        if ends[0] not in stops:
            generation["eos_token_id"] = [*ends, *(stop for stop in stops if stop not in ends)]
    kept = {name: content for name, content in assets.items() if name != GENERATION}
    kept |= {name: _json(made) for name, made in ((CONFIG, config), (GENERATION, generation)) if made}
    return naming_dtype(kept, dtype or "keep")


def _as_trained(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The config.json with the key by which servers look for a draft head that was trained, and with the shape's rope
    scaling under the one key that all versions read, with all that vLLM needs of it: transformers 4 knows only
    rope_scaling, and rope_theta outside of it.
    """
    part = text_part(config)
    if spec.has_draft_head:
        part[DRAFT_LAYERS] = part.get(DRAFT_LAYERS) or 1
    if spec.rope_scaling:
        name = ROPES[config.get("model_type") not in _IN_VERSION_4]
        others = {key: x for key, x in rope_of(part).items() if key not in ("rope_type", "type", *TYPES[YARN])}
        for key in ROPES:
            part.pop(key, None)
        part |= {name: spec.rope_scaling.written() | others, "max_position_embeddings": spec.max_position_embeddings}
    return config


def for_all_versions(assets: Assets) -> Assets:
    """The files with what transformers 4 reads beside what 5 writes. Without rope_theta at its old place, 4 would take
    its default in silence; it knows no class TokenizersBackend, and extra_special_tokens as an object only.
    """
    made = dict(assets)
    config = parse_object(assets.get(CONFIG, b"{}"), CONFIG, _REMEDY)
    if config.get("model_type") in _IN_VERSION_4:
        old_keys = {"rope_theta": rope_of(config).get("rope_theta"), "torch_dtype": config.get("dtype")}
        old_keys["num_experts"] = config.get("num_local_experts")
        lacking = {key: value for key, value in old_keys.items() if value is not None and config.get(key) is None}
        made |= {CONFIG: _json(config | lacking)} if lacking else {}
    tokenizer = parse_object(assets.get(_TOKENIZER_CONFIG, b"{}"), _TOKENIZER_CONFIG, _REMEDY)
    changed = dict(tokenizer)
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"  # 5 reads it as the same
    if isinstance(extra := tokenizer.get("extra_special_tokens"), list):
        del changed["extra_special_tokens"]
        named = list(changed.get("additional_special_tokens") or [])
        changed["additional_special_tokens"] = [*named, *(token for token in extra if token not in named)]
    return made if changed == tokenizer else made | {_TOKENIZER_CONFIG: _json(changed)}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()  # ASCII: a text of JSON may be no valid UTF-8
