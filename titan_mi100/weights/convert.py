"""HF safetensors <-> DCP <-> `torch.save`: tensor by tensor, read again and compared, complete or not there at all."""

import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from titan_mi100 import cli as tool
from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.hashed_files import HashedFiles
from titan_mi100.config.assets import (
    CONFIG,
    GENERATION,
    Assets,
    config_dtype,
    export_assets,
    read_assets,
)
from titan_mi100.config.model_spec import ModelSpec, parameter_count
from titan_mi100.config.settings import LoRAConfig, lora_identity
from titan_mi100.errors import SaveError, UserError
from titan_mi100.files.durable import atomic_output_folder, sync
from titan_mi100.logging import ByteProgress, log
from titan_mi100.parallel.distributed import raise_together, wait_for_all
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import hub
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.adapter import merged
from titan_mi100.weights.base import Kind, Kinds, Weights, dtype_name, raw_bytes
from titan_mi100.weights.dcp import MODEL_FILE, DCPWeights, read_torch_weights, write_dcp, write_torch
from titan_mi100.weights.hf import HFWeights, is_hf_folder, write_hf
from titan_mi100.weights.source import ModelSource, open_source, verify_files
from titan_mi100.wording import some

DTYPES = ("keep", "bfloat16", "float16", "float32")
VERIFY = ("auto", "logits", "bytes", "off")
VERIFY_HELP = (
    "bytes: read every tensor again and compare; logits: also load the HF folder with transformers and compare what it "
    "computes; auto: logits below 4 GB where transformers is installed, else bytes"
)
_DTYPE_HELP = (
    "of the written weights (default: %(default)s); keep: as they are; auto (dcp_to_hf): of a run's checkpoint the "
    "dtype that its config.json names, of everything else as they are"
)
SHARD_BYTES = 5_000_000_000
_LOGITS_BELOW = 4_000_000_000  # bytes of weights; they are held in fp32
_VERIFIED = {
    "off": "not verified",
    "bytes": "every tensor read again and equal",
    "logits": "every tensor read again and equal, and the same logits from transformers",
}


class Digest(NamedTuple):
    """What a tensor must be after a conversion."""

    kind: Kind
    crc: int  # CRC-32 of the bytes; SHA-256 would take longer than the copying
    finite: bool


Digests = dict[str, Digest]


def to_dcp(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "auto") -> None:
    """Write the weights as a DCP folder, sealed by a manifest, with the model's other files in it.

    Raises:
        UserError: the output exists, or what --verify needs is missing.
        SaveError: what was written is not the source.
    """
    kinds = _kinds(source, dtype)
    comparable = isinstance(source.weights, HFWeights) and source.spec is not None
    verify = _resolve_verify(verify, _total(kinds), "" if comparable else "an HF folder to compare with")
    with _new_folder(source, output, kinds, verify) as aside:
        files, digests = HashedFiles(), Digests()
        write_dcp(files, aside, _originals(source, kinds, digests))
        for name, content in source.assets.items():
            files.write(aside / name, content)
        written = DCPWeights(aside)
        _compare(written, digests, verify)
        if verify == "logits":
            _compare_logits(source.path, written, source.spec)
        sealed.write_manifest(aside, files.written, {"step": 0, "torch": torch.__version__})


def to_hf(source: ModelSource, output: Path, dtype: str = "auto", verify: str = "auto") -> None:
    """Write the weights as an HF folder that transformers and vLLM load; a LoRA run's checkpoint as a PEFT folder.

    Args:
        dtype: one of DTYPES; or auto: the dtype that config.json names for a run's checkpoint, whose weights are in
            fp32; as stored for everything else.

    Raises:
        UserError, SaveError: as to_dcp; or nothing says the model's shape.
    """
    if source.lora is not None:
        _to_peft(source, source.lora, output, "keep" if dtype == "auto" else dtype, verify)
        return
    if source.spec is None:
        raise UserError(f"{source.path}: needs a config.json; name a folder with one by --hf_assets_path")
    if dtype == "auto":
        named = config_dtype(source.assets) if "fingerprints" in source.manifest else None
        dtype = named if named in DTYPES else "keep"
    kinds = _kinds(source, dtype)
    verify = _resolve_verify(verify, _total(kinds))
    with _new_folder(source, output, kinds, verify) as aside:
        _write_assets(aside, _assets_of_export(source, source.spec, kinds))
        digests = Digests()
        write_hf(aside, kinds, _originals(source, kinds, digests), SHARD_BYTES)
        for file in aside.glob("*.safetensors"):
            safe_open(file, framework="pt")  # what others read it by also finds it whole
        written = HFWeights(aside)
        _compare(written, digests, verify)
        if verify == "logits":
            _compare_logits(aside, written, source.spec, texts=True)


def to_torch(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "auto") -> None:
    """Write the weights as a dict of tensors in `output/model.pt`, with the model's other files beside it.

    Raises:
        UserError, SaveError: as to_dcp.
    """
    kinds = _kinds(source, dtype)
    verify = _resolve_verify(verify, _total(kinds), "an HF folder to compare with")
    with _new_folder(source, output, kinds, verify) as aside:
        digests = Digests()
        write_torch(aside, _originals(source, kinds, digests))
        _compare(read_torch_weights(aside / MODEL_FILE), digests, verify)
        _write_assets(aside, source.assets)


def _to_peft(source: ModelSource, lora: LoRAConfig, output: Path, dtype: str, verify: str) -> None:
    """Write an adapter that peft loads, with the tokenizer's files.

    With verify = logits it is also loaded by peft onto its base, and compared with our merge.
    """
    assert source.spec is not None
    base, kinds = source.manifest["lora"]["base"], _kinds(source, dtype)
    comparable = bool(base) and is_hf_folder(base) and find_spec("peft") is not None
    needed = f"peft and the HF folder that the adapter was trained on ({base or 'none'})"
    verify = _resolve_verify(verify, 2 * parameter_count(source.spec), "" if comparable else needed)  # as in bf16
    if base and not is_hf_folder(base):
        log.warning(f"{output}: peft will not find its base: {base} is no HF folder; export that, and name the export")
    with _new_folder(source, output, kinds, verify) as aside:
        digests = Digests()
        peft_io.write_adapter(aside, dict(_originals(source, kinds, digests)), lora, base)
        again, written = peft_io.read_adapter(aside)
        if verify != "off" and lora_identity(again) != lora_identity(lora):
            raise SaveError("the adapter's settings are not what was written")
        _compare(written, digests, verify)
        _write_assets(aside, {n: content for n, content in source.assets.items() if n not in (CONFIG, GENERATION)})
        if verify == "logits":
            _compare_logits(Path(base), merged(open_source(base), aside).weights, source.spec, adapter=aside)


def export(folder: Path, step: int, dtype: str, is_adapter: bool, rank: int) -> None:
    """Write a run's checkpoint as an HF folder, `hf-step-N`, unless an earlier start has. A collective.

    Raises:
        UserError: something else has that name.
        SaveError: on all ranks.
    """
    target = folder / f"hf-step-{step}"
    with raise_together():
        try:
            if rank == 0 and not is_exported(target, dtype, is_adapter):
                to_hf(open_source(folder / "checkpoint" / f"step-{step}"), target, dtype)
        except OSError as error:
            raise SaveError(f"{target}: could not be written: {error}") from error
        finally:
            wait_for_all("exported")


def is_exported(target: Path, dtype: str, is_adapter: bool) -> bool:
    """Whether an earlier start has left what this one would. Writing refuses anything else that has its name."""
    if is_adapter:
        return (target / peft_io.CONFIG).exists()
    return (target / CONFIG).exists() and dtype in ("auto", config_dtype(read_assets(target)))


def _kinds(source: ModelSource, dtype: str) -> Kinds:
    """Of the tensors to write."""
    kinds = source.weights.kinds
    if dtype == "keep":
        return kinds
    target: torch.dtype = getattr(torch, dtype)
    return {n: Kind(shape, target if own.is_floating_point else own) for n, (shape, own) in kinds.items()}


def _resolve_verify(verify: str, nbytes: int, needed: str = "") -> str:
    """What `auto` stands for.

    Args:
        nbytes: of the weights.
        needed: what a comparison of logits lacks, besides transformers; empty: nothing.
    """
    if not needed and find_spec("transformers") is None:
        needed = "transformers: pip install 'titan_mi100[eval]'"
    if verify == "auto":
        return "logits" if nbytes < _LOGITS_BELOW and not needed else "bytes"
    if verify == "logits" and needed:
        raise UserError(f"--verify logits needs {needed}; or use --verify bytes")
    return verify


@contextmanager
def _new_folder(source: ModelSource, output: Path, kinds: Kinds, verify: str) -> Iterator[Path]:
    """A folder to fill with tensors of these kinds; it appears at the end, complete and synced, or not at all."""
    if source.path.is_dir() and output.resolve().is_relative_to(source.path.resolve()):
        raise UserError(f"{output}: is inside of {source.path}; name a folder elsewhere")
    with atomic_output_folder(output, _total(kinds)) as aside:
        yield aside
        for file in aside.iterdir():
            sync(file)
    dtypes = " and ".join(sorted({dtype_name(kind.dtype) for kind in kinds.values()}))
    log.info(f"{output}: {len(kinds)} tensors, {_total(kinds) / 1e6:,.1f} MB, {dtypes}, {_VERIFIED[verify]}")


def _total(kinds: Kinds) -> int:
    return sum(kind.nbytes for kind in kinds.values())


def _originals(source: ModelSource, kinds: Kinds, digests: Digests) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, as `_tensors` gives them; a thread reads the next one while one is written."""
    verify_files(source.path)
    tensors = _tensors(source.weights, kinds, digests, "writing")
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, tensors, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, tensors, None)
            yield item
    if odd := [name for name, digest in digests.items() if not digest.finite]:
        log.warning(f"{source.weights.source}: NaN or infinite values in {len(odd)} tensors: {some(odd)}")


def _tensors(weights: Weights, kinds: Kinds, digests: Digests, what: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in order, contiguous and in the dtype of `kinds`.

    Args:
        digests: receives each tensor's digest.
        what: the progress bar's label.

    Raises:
        UserError: a value that the dtype cannot hold.
    """
    with ByteProgress(what, _total(kinds)) as progress:
        for name, kind in kinds.items():
            tensor = weights.tensor(name, kind.dtype).contiguous()
            finite = _is_finite(tensor)
            if not finite and _is_finite(weights.tensor(name)):
                problem = f"{name} has values that {dtype_name(kind.dtype)} cannot hold"
                raise UserError(f"{weights.source}: {problem}; use bfloat16 or float32")
            digests[name] = Digest(kind, zlib.crc32(raw_bytes(tensor).numpy().data), finite)
            yield name, tensor
            del tensor  # or it stays in memory while the next one is read
            progress.advance(kind.nbytes)


def _is_finite(values: Tensor) -> bool:
    if not values.numel() or not values.dtype.is_floating_point:
        return True
    wide = values.float() if values.itemsize == 1 else values  # float8 has no minimum
    return all(torch.isfinite(extreme).item() for extreme in torch.aminmax(wide))  # NaN is both


def _compare(written: Weights, digests: Digests, verify: str) -> None:
    """Read again what was written, unless verify is off."""
    if verify == "off":
        return
    found = Digests()
    deque(_tensors(written, written.kinds, found, "verifying"), maxlen=0)  # keeps none
    if wrong := [name for name in {**digests, **found} if digests.get(name) != found.get(name)]:
        raise SaveError(f"{len(wrong)} tensors are not what was read from the source: {some(wrong)}")


def _compare_logits(
    folder: Path, weights: Weights, spec: ModelSpec | None, texts: bool = False, adapter: Path | None = None
) -> None:
    from titan_mi100.weights.verify_logits import compare  # here: importing transformers takes seconds

    assert spec is not None
    with warnings.catch_warnings():  # transformers and peft warn each other of what will be renamed
        warnings.simplefilter("ignore")
        problems, difference = compare(folder, weights, spec, texts, adapter)
    if problems:
        raise SaveError("\n".join(f"transformers, reading {folder.name}: {problem}" for problem in problems))
    log.info(f"logits of transformers and ours, in fp32: largest difference {difference:.1e}")


def _write_assets(folder: Path, assets: Assets) -> None:
    for name, content in assets.items():
        (folder / name).write_bytes(content)


def _assets_of_export(source: ModelSource, spec: ModelSpec, kinds: Kinds) -> Assets:
    dtypes = {kind.dtype for kind in kinds.values()}
    dtype = dtype_name(dtypes.pop()) if len(dtypes) == 1 else None
    has_tokenizer = "tokenizer.json" in source.assets or "vocab.json" in source.assets
    ends = load_tokenizer(source.assets_folder).end_ids() if has_tokenizer else []
    return export_assets(source.assets_folder, source.assets, spec, dtype, ends)


def command(
    description: str, input_help: str, output_help: str, convert: Callable[..., None], dtype: str = "keep"
) -> None:
    """A converter's command line.

    Args:
        convert: to_dcp, to_hf or to_torch.
        dtype: the default.
    """
    parser = tool.Parser(description=description)
    parser.add_argument("--input_dir", type=Path, required=True, help=input_help)
    parser.add_argument("--output_dir", type=Path, required=True, help=output_help)
    dtypes = DTYPES if dtype == "keep" else (dtype, *DTYPES)
    parser.add_argument("--dtype", choices=dtypes, default=dtype, help=_DTYPE_HELP)
    parser.add_argument("--verify", choices=VERIFY, default="auto", help=VERIFY_HELP)
    parser.add_argument("--hf_assets_path", default="", help="folder of config.json and tokenizer, if not the input's")
    if convert is to_hf:
        hub.add_options(parser)
    options = parser.parse_args()

    def main() -> None:
        source = open_source(options.input_dir, options.hf_assets_path)
        convert(source, options.output_dir, options.dtype, options.verify)

    if convert is to_hf:
        hub.run(main, options)
    else:
        tool.run(main)
