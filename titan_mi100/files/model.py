"""Checks a model's weights by their tables of tensors, before a run prepares its data. Imports no torch.

weights/ opens the same files later, to read values.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from os.path import lexists
from pathlib import Path
from types import MappingProxyType

from titan_mi100.errors import UserError
from titan_mi100.files.child import call_in_child
from titan_mi100.files.tables import HF_DTYPES, INDEX, SINGLE
from titan_mi100.wording import some

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DRAFT_FILE = "mtp.safetensors"  # beside an adapter: the draft head that was trained with it
HF, DCP, TORCH = "HF folder", "DCP folder", "file of torch.save"
_READERS = {HF: "read_hf", DCP: "read_dcp", TORCH: "read_torch"}
_OLD_BUFFER = ".rotary_emb.inv_freq"  # old programs stored this buffer; it is computed from the config instead


def weights_format(path: Path) -> str:
    """HF, DCP or TORCH.

    Raises:
        UserError: the path names something else; the remedy names what to take instead.
    """
    if lexists(path / "adapter_config.json"):
        raise UserError(f"{path}: is a PEFT adapter; name its base model here, and this folder as the adapter")
    # lexists: a link is found even if it is broken, and refused by the reader with a message of its own
    if lexists(path / ".metadata"):
        return DCP
    if path.is_file() and path.suffix in (".safetensors", ".gguf"):
        is_gguf = path.suffix == ".gguf"
        raise UserError(f"{path}: {_NO_GGUF if is_gguf else 'name its folder, which must have a config.json as well'}")
    if path.is_file():
        return TORCH
    saved = [*path.glob("checkpoint/step-*"), *path.glob("step-*")]
    if checkpoints := sorted((f for f in saved if f.name[5:].isdecimal()), key=lambda f: int(f.name[5:])):
        exports = sorted(path.glob("hf-step-*"), key=lambda folder: folder.stat().st_mtime)
        newest = [*checkpoints, *exports][-1]
        raise UserError(f"{path}: is a run folder; name one of its checkpoints or exports, such as {newest}")
    if not any(lexists(path / name) for name in (SINGLE, INDEX)):
        raise UserError(f"{path}: has no model: neither {SINGLE} nor {INDEX} nor DCP's .metadata{_instead(path)}")
    return HF


def torch_file(path: Path) -> Path:
    """The file of torch.save that a path names: itself, or the only one in a folder without another form of weights.

    Raises:
        UserError: there are several.
    """
    others = any(lexists(path / name) for name in (".metadata", SINGLE, INDEX))
    names = [] if others else _pickles(path)
    if len(names) > 1:
        shards = f"if they are shards of one model, {_REWRITE}"
        raise UserError(f"{path}: has several files of torch.save, {some(names, 8)}; name one of them, or {shards}")
    return path / names[0] if names else path


def _pickles(folder: Path) -> list[str]:
    names = sorted(file.name for kind in ("bin", "pt", "pth") for file in folder.glob(f"*.{kind}"))
    return [name for name in names if name != "training_args.bin"]  # Trainer's


_REWRITE = "write it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
_NO_GGUF = "GGUF cannot be trained; download the model's safetensors files"


def _instead(folder: Path) -> str:
    """The end of a message: what a folder has instead of safetensors, and the remedy."""
    names = sorted(file.name for kind in ("bin", "pt", "pth", "gguf") for file in folder.glob(f"*.{kind}"))
    pickles = _pickles(folder)
    remedy = _REWRITE
    if len(pickles) == 1:
        remedy = "name that file itself instead of its folder; its pickle's code is not run"
    files, remedy = (pickles, remedy) if pickles else (names, _NO_GGUF)
    return f", only {some(files, 2)}; {remedy}" if names else "; download the whole folder again"


def tensor_problems(
    tensors: Mapping[str, tuple[Sequence[int], str]],
    shapes: Mapping[str, Sequence[int]],
    named: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """What differs between stored tensors (name -> shape and dtype) and those of a model (name -> shape).

    A tied model has no head in `shapes`; its folder may have one. Old buffers of the rotary embedding are ignored, as
    in transformers.

    Args:
        named: our names of the stored tensors -> those in the folder, for messages.
    """
    expected = {HEAD: shapes[EMBEDDING], **shapes} if HEAD in tensors and EMBEDDING in shapes else shapes
    unexpected = sorted(n for n in tensors.keys() - expected.keys() if not n.endswith(_OLD_BUFFER))
    if EMBEDDING in shapes and any(".lora_A." in name for name in unexpected):
        # replaces the other problems, which follow from this one
        return ["is a LoRA adapter; name its base and merge it, or continue it with lora.initial_load_path"]
    if before := next((name.removesuffix(EMBEDDING) for name in unexpected if name.endswith(EMBEDDING)), ""):
        return [f"names begin with {before!r}, as wrappers leave them; save the model itself, or rename its tensors"]
    if EMBEDDING.removeprefix("model.") in unexpected:
        problem = "names lack 'model.' at their beginning: it was saved without a head, as an embedding model"
        return [f"{problem}; {_REWRITE}"]
    prefix = named.get(EMBEDDING, EMBEDDING).removesuffix(EMBEDDING.removeprefix("model."))

    def there(name: str) -> str:
        return named.get(name) or (name.replace("model.", prefix, 1) if name.startswith("model.") else name)

    missing = sorted(expected.keys() - tensors.keys())
    tied = "; if the head is tied to the embedding, set tie_word_embeddings to true in config.json"
    is_lost = EMBEDDING in shapes and all(name.startswith("mtp.") for name in missing)
    lost = "; with draft_head.fresh = true the draft head starts with random weights" * is_lost
    problems = [f"missing: {some(map(there, missing))}{tied * (missing == [HEAD])}{lost}"] if missing else []
    odd = "; rename them to begin with 'model.visual.', or remove them" * any(".visual." in f".{n}" for n in unexpected)
    problems += [f"not part of this model: {some(map(there, unexpected))}{odd}"] if unexpected else []
    for name in sorted(expected.keys() & tensors.keys()):
        shape, dtype = tensors[name]
        if tuple(shape) != tuple(expected[name]):
            problems.append(f"{there(name)} has shape {tuple(shape)}, but the model needs {tuple(expected[name])}")
        if dtype not in HF_DTYPES.values():
            problems.append(f"{there(name)} has dtype {dtype}, which cannot be trained; use floating point")
    return problems


def check_weights(
    path: Path,
    shapes: Callable[[Collection[str]], Mapping[str, Sequence[int]]],
    own_name: Callable[[str], str],
    carries: Callable[[str], bool],
) -> None:
    """Check that weights are complete and, for an HF folder, those of the model.

    Args:
        shapes: names of tensors -> the model's tensors in the form of files that these have.
        own_name, carries: see ModelSpec.

    Raises:
        UserError: they are not; one line per problem.
    """
    kind = weights_format(path)
    file, arguments = (path / ".metadata", [None]) if kind == DCP else (path, [])
    table = call_in_child(f"files.tables:{_READERS[kind]}", file, *arguments)
    if kind == HF:  # else what is in there, and under which names, is known when it is opened
        named = {own: name for name in table if not carries(own := own_name(name))}
        tensors = {own: (table[name][1], table[name][0]) for own, name in named.items()}
        if problems := tensor_problems(tensors, shapes(tensors), named):
            raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
