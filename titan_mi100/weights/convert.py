"""HF safetensors <-> DCP <-> `torch.save`: tensor by tensor, read again and compared, complete or not there at all."""

import argparse
import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from titan_mi100 import cli as tool
from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.hashed_files import HashedFiles
from titan_mi100.config.assets import CONFIG, GENERATION, Assets, config_dtype, export_assets
from titan_mi100.config.model_spec import ModelSpec, parameter_count
from titan_mi100.config.settings import LoRAConfig, fingerprint
from titan_mi100.errors import SaveError, UserError
from titan_mi100.files.durable import appearing_folder, sync
from titan_mi100.logging import ByteProgress, log
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import hub
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.adapter import adapter_tensors, lora_of, merged
from titan_mi100.weights.base import Kind, Piece, Weights, dtype_name, raw_bytes
from titan_mi100.weights.dcp import MODEL_FILE, DCPWeights, TorchWeights, write_dcp, write_torch
from titan_mi100.weights.hf import HFWeights, is_hf_folder, write_hf
from titan_mi100.weights.source import ModelSource, open_source, verify_files
from titan_mi100.wording import some

DTYPES = ("keep", "bfloat16", "float16", "float32")
VERIFY = ("auto", "logits", "bytes", "off")
VERIFY_HELP = (
    "bytes: read every tensor again and compare; logits: also load the HF folder with transformers and compare what it "
    "computes; auto: logits below 4 GB where transformers is installed, else bytes"
)
_DTYPE_HELP = {
    "keep": "of the written weights; keep, the default: as they are",
    "auto": "of the written weights; auto, the default: of a run's checkpoint the dtype that its config.json names, of "
    "everything else as they are",
}
SHARD_BYTES = 5_000_000_000
_PIECE_BYTES = 16 << 20  # malloc would return larger memory to the kernel, which clears it, each time
_LOGITS_BELOW = 4_000_000_000  # bytes of weights; they are held in fp32
_VERIFIED = {
    "off": "not verified",
    "bytes": "every tensor read again and equal",
    "logits": "every tensor read again and equal, and the same logits from transformers",
}

Kinds = dict[str, Kind]
Result = TypeVar("Result")


class Digest(NamedTuple):
    """What a tensor must be after a conversion."""

    kind: Kind
    crc: int  # CRC-32 of the bytes; SHA-256 would take longer than the copying
    finite: bool


Digests = dict[str, Digest]


class VerificationError(SaveError):
    """What was written is not what was meant; nothing of it is left."""


def to_dcp(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "auto") -> None:
    """Write the weights as a DCP folder, sealed by a manifest, with the model's other files in it.

    Raises:
        UserError: the source is no model, the output exists, or transformers is needed and missing.
        VerificationError: what was written is not the source.
    """
    kinds, verify = _plan(source, output, dtype, verify, comparable=isinstance(source.weights, HFWeights))
    with appearing_folder(output, _total(kinds)) as aside:
        written = _copy(source, kinds, verify, aside, write_dcp, DCPWeights)
        written |= _write_assets(aside, source.assets)
        if verify == "logits":
            _compare_logits(source.path, DCPWeights(aside), kinds, source.spec, texts=False)
        sealed.write_manifest(aside, written, {"step": 0, "torch": torch.__version__})
    _log_result(output, kinds, verify)


def to_hf(source: ModelSource, output: Path, dtype: str = "auto", verify: str = "auto") -> None:
    """Write the weights as an HF folder that transformers and vLLM load; a LoRA run's checkpoint as a PEFT folder.

    Args:
        dtype: one of DTYPES; or auto: the dtype that config.json names for a run's checkpoint, whose weights are in
            fp32; as stored for everything else.

    Raises:
        UserError, VerificationError: as to_dcp; or nothing says the model's shape.
    """
    if (lora := lora_of(source)) is not None:
        _check_place(source, output)
        _to_peft(source, lora, output, dtype, verify)
        return
    if source.spec is None:
        raise UserError(
            f"{source.path}: has no config.json, which an HF folder needs; name a folder with one by --hf_assets_path"
        )
    if dtype == "auto":
        named = config_dtype(source.assets) if source.is_run else None
        dtype = named if named in DTYPES else "keep"
    kinds, verify = _plan(source, output, dtype, verify)
    with appearing_folder(output, _total(kinds)) as aside:
        _write_assets(aside, source.assets | _assets_of_export(source, kinds))
        _copy(source, kinds, verify, aside, partial(write_hf, shard_bytes=SHARD_BYTES), HFWeights)
        if verify == "logits":
            _compare_logits(aside, source.weights, kinds, source.spec, texts=True)
    _log_result(output, kinds, verify)


def to_torch(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "auto") -> None:
    """Write the weights as a dict of tensors in `output/model.pt`, with the model's other files beside it.

    Raises:
        UserError, VerificationError: as to_dcp.
    """
    kinds, verify = _plan(source, output, dtype, verify, comparable=False)
    with appearing_folder(output, 2 * _total(kinds)) as aside:
        _copy(source, kinds, verify, aside, write_torch, lambda folder: TorchWeights(folder / MODEL_FILE))
        _write_assets(aside, source.assets)
    _log_result(output / MODEL_FILE, kinds, verify)


def _to_peft(source: ModelSource, lora: LoRAConfig, output: Path, dtype: str, verify: str) -> None:
    """Write an adapter that peft loads, with the tokenizer's files, in fp32 unless told otherwise.

    It is read again and compared; with verify = logits also loaded by peft onto its base, and compared with our merge.
    """
    assert source.manifest is not None and source.spec is not None
    base, tensors = source.manifest["lora"]["base"], adapter_tensors(source, lora)
    if dtype not in ("auto", "keep"):
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    tokenizer = {name: content for name, content in source.assets.items() if name not in (CONFIG, GENERATION)}
    can_compare = bool(base) and is_hf_folder(base) and _installed("transformers", "peft")
    needed = f"transformers, peft and the HF folder that the adapter was trained on ({base or 'none'})"
    verify = _resolve_verify(verify, 2 * parameter_count(source.spec), "" if can_compare else needed)  # as in bf16
    if base and not is_hf_folder(base):
        log.warning(f"{output}: peft will not find its base: {base} is no HF folder; export that, and name the export")
    with appearing_folder(output, sum(tensor.nbytes for tensor in tensors.values())) as aside:
        peft_io.write_adapter(aside, tensors, lora, base)
        for file in aside.iterdir():
            sync(file)
        _write_assets(aside, tokenizer)
        if verify != "off":
            again, found = peft_io.read_adapter(aside)
            if fingerprint(again) != fingerprint(lora) or found.keys() != tensors.keys():
                raise VerificationError("the adapter's settings or names are not what was written")
            same = {n: t.dtype == found[n].dtype and torch.equal(t, found[n]) for n, t in tensors.items()}
            _refuse([name for name in tensors if not same[name]])
        if verify == "logits":
            whole = merged(open_source(base), aside)
            kinds = {name: Kind(whole.weights.kinds[name].shape, torch.float32) for name in whole.names()}
            _compare_logits(Path(base), whole.weights, kinds, source.spec, texts=False, adapter=aside)
    log.info(f"{output}: LoRA adapter of rank {lora.rank}, {len(tensors)} tensors, {_VERIFIED[verify]}")


def _plan(source: ModelSource, output: Path, dtype: str, verify: str, comparable: bool = True) -> tuple[Kinds, str]:
    """What will be written, and how it will be verified.

    Args:
        comparable: there will be an HF folder whose logits can be compared.
    """
    _check_place(source, output)
    kinds = {name: source.weights.kinds[name] for name in source.names()}
    if dtype != "keep":
        target: torch.dtype = getattr(torch, dtype)
        kinds = {n: Kind(shape, target if own.is_floating_point else own) for n, (shape, own) in kinds.items()}
    needed = "" if _installed("transformers") else "transformers: pip install 'titan_mi100[eval]'"
    if not comparable or source.spec is None:
        needed = "an HF folder to compare with"
    return kinds, _resolve_verify(verify, _total(kinds), needed)


def _resolve_verify(verify: str, nbytes: int, needed: str) -> str:
    """What `auto` stands for.

    Args:
        nbytes: of the weights.
        needed: what a comparison of logits lacks; empty: nothing.
    """
    if verify == "auto":
        return "logits" if nbytes < _LOGITS_BELOW and not needed else "bytes"
    if verify == "logits" and needed:
        raise UserError(f"--verify logits needs {needed}; or use --verify bytes")
    return verify


def _check_place(source: ModelSource, output: Path) -> None:
    """Refuse an output inside of the input."""
    if source.path.is_dir() and output.resolve().is_relative_to(source.path.resolve()):
        raise UserError(f"{output}: is inside of {source.path}; name a folder elsewhere")


def _total(kinds: Mapping[str, Kind]) -> int:
    return sum(kind.nbytes for kind in kinds.values())


def _log_result(output: Path, kinds: Kinds, verify: str) -> None:
    dtypes = " and ".join(sorted({dtype_name(kind.dtype) for kind in kinds.values()}))
    log.info(f"{output}: {len(kinds)} tensors, {_total(kinds) / 1e6:,.1f} MB, {dtypes}, {_VERIFIED[verify]}")


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def _copy(
    source: ModelSource,
    kinds: Kinds,
    verify: str,
    folder: Path,
    write: Callable[[Path, Kinds, Iterator[Piece]], Result],
    read: Callable[[Path], Weights],
) -> Result:
    """Write all tensors to a folder, then read them again and compare.

    Args:
        write: into the folder.
        read: what it wrote, with the reader that a user's program has.

    Returns:
        What `write` returns.
    """
    verify_files(source.path)
    digests: Digests = {}
    result = write(folder, kinds, _one_ahead(_pieces(source.weights, kinds, digests, "writing")))
    if odd := [name for name, digest in digests.items() if not digest.finite]:
        log.warning(f"{source.weights.source}: NaN or infinite values in {len(odd)} tensors: {some(odd)}")
    if verify != "off":
        written, found = read(folder), Digests()
        for _ in _pieces(written, written.kinds, found, "verifying"):
            pass
        _refuse([name for name in {**digests, **found} if digests.get(name) != found.get(name)])
    return result


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise VerificationError(f"{len(wrong)} tensors are not what was read from the source: {some(wrong)}")


def _pieces(weights: Weights, kinds: Kinds, digests: Digests, what: str) -> Iterator[Piece]:
    """Every tensor in order, some rows at a time, in the dtype of `kinds`, each piece in memory of its own.

    Args:
        digests: receives each tensor's digest.
        what: the progress bar's label.

    Raises:
        UserError: a value that the dtype cannot hold.
    """
    with ByteProgress(what, _total(kinds)) as progress:
        for name, kind in kinds.items():
            crc, finite = 0, True
            for part in weights.parts(name):
                rows = max(1, _PIECE_BYTES * len(part) // max(part.nbytes, 1)) if part.ndim else 0
                for stored in part.split(rows) if rows else (part,):
                    piece = torch.empty(stored.shape, dtype=kind.dtype).copy_(stored)
                    if not _is_finite(piece):
                        finite = False
                        if _is_finite(stored):
                            problem = f"{name} has values that {dtype_name(kind.dtype)} cannot hold"
                            raise UserError(f"{weights.source}: {problem}; use bfloat16 or float32")
                    crc = zlib.crc32(raw_bytes(piece).numpy().data, crc)
                    yield name, piece
                    progress.advance(piece.nbytes)
                del part, stored  # or this part stays in memory while the next one is read
            digests[name] = Digest(kind, crc, finite)


def _is_finite(values: Tensor) -> bool:
    if not values.numel() or not values.dtype.is_floating_point:
        return True
    wide = values.float() if values.itemsize == 1 else values  # float8 has no minimum
    return all(torch.isfinite(extreme).item() for extreme in torch.aminmax(wide))  # NaN is both


def _one_ahead(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same pieces; a thread reads the next one while one is written."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = pool.submit(next, pieces, None)
            yield piece


def _compare_logits(
    folder: Path, weights: Weights, kinds: Kinds, spec: ModelSpec | None, texts: bool, adapter: Path | None = None
) -> None:
    from titan_mi100.weights.verify_logits import compare  # here: importing transformers takes seconds

    assert spec is not None
    with warnings.catch_warnings():  # transformers and peft warn each other of what will be renamed
        warnings.simplefilter("ignore")
        problems, difference = compare(folder, weights, kinds, spec, texts, adapter)
    if problems:
        raise VerificationError("\n".join(f"transformers, reading {folder.name}: {problem}" for problem in problems))
    log.info(f"logits of transformers and ours, in fp32: largest difference {difference:.1e}")


def _write_assets(folder: Path, assets: Assets) -> sealed.Written:
    files = HashedFiles()
    for name, content in assets.items():
        files.write(folder / name, content)
    return files.written


def _assets_of_export(source: ModelSource, kinds: Kinds) -> Assets:
    assert source.spec is not None
    dtypes = {kind.dtype for kind in kinds.values()}
    dtype = dtype_name(dtypes.pop()) if len(dtypes) == 1 else None
    ends: list[int] = []
    if "tokenizer.json" in source.assets or "vocab.json" in source.assets:
        ends = load_tokenizer(source.assets_folder).end_ids()
    else:
        log.info(f"{source.path}: no tokenizer files beside it, so the export has none")
    try:
        return export_assets(source.assets, source.spec, dtype, ends)
    except UserError as error:
        raise UserError(f"{source.assets_folder}/{error}") from None


def command(
    description: str, input_help: str, output_help: str, convert: Callable[..., None], dtype: str = "keep"
) -> None:
    """A converter's command line.

    Args:
        convert: to_dcp, to_hf or to_torch.
        dtype: the default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input_dir", type=Path, required=True, help=input_help)
    parser.add_argument("--output_dir", type=Path, required=True, help=output_help)
    dtypes = DTYPES if dtype == "keep" else (dtype, *DTYPES)
    parser.add_argument("--dtype", choices=dtypes, default=dtype, help=_DTYPE_HELP[dtype])
    checks = [check for check in VERIFY if convert is not to_torch or check != "logits"]
    parser.add_argument("--verify", choices=checks, default="auto", help=VERIFY_HELP)
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
