"""HF safetensors <-> DCP <-> `torch.save`: streamed, read again and compared, and whole or not there at all."""

import argparse
import importlib.util
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from titan_mi100 import peft_io, sealed, tool
from titan_mi100.adapter import adapter_tensors, lora_of, merged
from titan_mi100.assets import CONFIG, GENERATION, Assets, config_dtype, export_assets
from titan_mi100.dcp_io import DCPWeights, HashedFiles, TorchWeights, write_dcp, write_torch
from titan_mi100.durable import appearing_folder, sync
from titan_mi100.errors import SaveError, UserError
from titan_mi100.hf_io import HFWeights, is_hf_folder, write_hf
from titan_mi100.logging import ByteProgress, log
from titan_mi100.model_source import ModelSource, open_source, verify_files
from titan_mi100.model_spec import ModelSpec, parameter_count
from titan_mi100.settings import LoRAConfig, fingerprint
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import Kind, Weights, in_words, row_blocks, some

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
MODEL_FILE = "model.pt"
SHARD_BYTES = 5_000_000_000
_THREADS = 2  # that read and hash blocks, which is more work than writing them
_LOGITS_BELOW = 4_000_000_000  # bytes of weights; they are held in fp32

Kinds = dict[str, Kind]
Digests = dict[str, list[int]]
Block = tuple[str, int, Tensor]  # name, first row, rows


class VerificationError(SaveError):
    """What was written is not what was to be written; nothing of it is left."""


def to_dcp(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "auto") -> None:
    """Write the weights as a DCP folder, sealed by a manifest, with the model's other files in it.

    Raises:
        UserError: the source is no model, the output is there, or transformers is needed and missing.
        VerificationError: what was written is not the source.
    """
    kinds = _kinds(source, dtype)
    _check_place(source, output)
    verify = _resolve_verify(verify, source, kinds, can_compare=isinstance(source.weights, HFWeights))
    with appearing_folder(output, _total(kinds)) as aside:
        intact = _Meanwhile(verify_files, source.path)  # the disk is busy with writing
        digests: Digests = {}
        with ByteProgress("writing", _total(kinds)) as progress:
            written = write_dcp(aside, kinds, _stream(source.weights, kinds, digests, progress.advance))
        written |= _write_assets(aside, source.assets)
        intact.result()
        _verify_bytes(verify, DCPWeights(aside), kinds, digests)
        if verify == "logits":
            _compare_logits(source.path, DCPWeights(aside), kinds, source.spec, texts=False)
        sealed.write_manifest(aside, written, {"step": 0, "torch": torch.__version__})
    log.info(f"{output}: {_words(kinds)}, {_VERIFIED[verify]}")


def to_hf(source: ModelSource, output: Path, dtype: str = "auto", verify: str = "auto") -> None:
    """Write the weights as an HF folder that transformers and vLLM load; of a LoRA run's checkpoint, as a PEFT folder.

    Args:
        dtype: of DTYPES; or auto: of a run's checkpoint, whose weights are in fp32, the dtype that its config.json
            names; everything else as it is.

    Raises:
        UserError, VerificationError: as to_dcp; or nothing says the model's shape.
    """
    _check_place(source, output)
    if (lora := lora_of(source)) is not None:
        _to_peft(source, lora, output, dtype, verify)
        return
    if source.spec is None:
        raise UserError(
            f"{source.path}: has no config.json, which an HF folder needs; name a folder with one by --hf_assets_path"
        )
    if dtype == "auto":
        named = config_dtype(source.assets) if source.is_run else None
        dtype = named if named in DTYPES else "keep"
    kinds = _kinds(source, dtype)
    verify = _resolve_verify(verify, source, kinds)
    with appearing_folder(output, _total(kinds)) as aside:
        intact = _Meanwhile(verify_files, source.path)
        _write_assets(aside, source.assets)
        _write_assets(aside, _assets_of_export(source, kinds))
        digests: Digests = {}
        with ByteProgress("writing", _total(kinds)) as progress:
            write_hf(aside, kinds, _stream(source.weights, kinds, digests, progress.advance), SHARD_BYTES)
        intact.result()
        _verify_bytes(verify, HFWeights(aside), kinds, digests)
        if verify == "logits":
            _compare_logits(aside, source.weights, kinds, source.spec, texts=True)
    log.info(f"{output}: {_words(kinds)}, {_VERIFIED[verify]}")


def _to_peft(source: ModelSource, lora: LoRAConfig, output: Path, dtype: str, verify: str) -> None:
    """Write an adapter that peft loads, with the tokenizer's files, in fp32 unless told otherwise.

    It is compared as it is read again; and, on its base, by peft with what our merge computes.
    """
    assert source.manifest is not None and source.spec is not None
    base, tensors = source.manifest["lora"]["base"], adapter_tensors(source, lora)
    if dtype not in ("auto", "keep"):
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    tokenizer = {name: content for name, content in source.assets.items() if name not in (CONFIG, GENERATION)}
    can_compare = bool(base) and is_hf_folder(base) and _installed("transformers", "peft")
    if verify == "auto":
        small = 2 * parameter_count(source.spec) < _LOGITS_BELOW  # as in bf16
        verify = "logits" if can_compare and small else "bytes"
    if verify == "logits" and not can_compare:
        raise UserError(
            f"--verify logits needs transformers, peft and the HF folder that the adapter was trained on "
            f"({base or 'none'}); use --verify bytes"
        )
    if base and not is_hf_folder(base):
        log.warning(f"{output}: peft will not find its base, {base} is no HF folder; export that, and name the export")
    with appearing_folder(output, sum(tensor.nbytes for tensor in tensors.values())) as aside:
        peft_io.write_adapter(aside, tensors, lora, base)
        for file in aside.iterdir():
            sync(file)
        _write_assets(aside, tokenizer)
        if verify != "off":
            again, found = peft_io.read_adapter(aside)
            if fingerprint(again) != fingerprint(lora) or found.keys() != tensors.keys():
                raise VerificationError("the adapter's settings or names are not what was written")
            kept = {name: tensor.dtype == found[name].dtype for name, tensor in tensors.items()}
            if wrong := [n for n, tensor in tensors.items() if not kept[n] or not torch.equal(tensor, found[n])]:
                raise VerificationError(f"{len(wrong)} tensors are not what was written: {some(wrong)}")
        if verify == "logits":
            whole = merged(open_source(base), aside)
            kinds = {name: Kind(whole.weights.kinds[name].shape, torch.float32) for name in whole.names()}
            _compare_logits(Path(base), whole.weights, kinds, source.spec, texts=False, adapter=aside)
    log.info(f"{output}: LoRA adapter of rank {lora.rank}, {len(tensors)} tensors, {_VERIFIED[verify]}")


def to_torch(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "auto") -> None:
    """Write the weights as a dict of tensors in `output/model.pt`, with the model's other files beside it.

    Raises:
        UserError, VerificationError: as to_dcp.
    """
    kinds = _kinds(source, dtype)
    _check_place(source, output)
    verify = _resolve_verify(verify, source, kinds, can_compare=False)
    with appearing_folder(output, 2 * _total(kinds)) as aside:
        intact = _Meanwhile(verify_files, source.path)
        digests: Digests = {}
        with ByteProgress("writing", _total(kinds)) as progress:
            write_torch(aside / MODEL_FILE, kinds, _stream(source.weights, kinds, digests, progress.advance))
        _write_assets(aside, source.assets)
        intact.result()
        _verify_bytes(verify, TorchWeights(aside / MODEL_FILE), kinds, digests)
    log.info(f"{output / MODEL_FILE}: {_words(kinds)}, {_VERIFIED[verify]}")


class _Meanwhile:
    """A function in a thread; nobody waits for it where something else has failed."""

    def __init__(self, function: Callable[[Path], None], path: Path) -> None:
        self._error: Exception | None = None

        def run() -> None:
            try:
                function(path)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for it; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _kinds(source: ModelSource, dtype: str) -> Kinds:
    """What is to be written."""
    own = {name: source.weights.kinds[name] for name in source.names()}
    if dtype == "keep":
        return own
    target = getattr(torch, dtype)
    return {
        name: Kind(kind.shape, target if kind.dtype.is_floating_point else kind.dtype) for name, kind in own.items()
    }


def _check_place(source: ModelSource, output: Path) -> None:
    """Refuse an output inside of the input."""
    if source.path.is_dir() and output.resolve().is_relative_to(source.path.resolve()):
        raise UserError(f"{output}: is inside of {source.path}; name a folder elsewhere")


def _total(kinds: Mapping[str, Kind]) -> int:
    return sum(kind.nbytes for kind in kinds.values())


def _words(kinds: Kinds) -> str:
    dtypes = sorted({in_words(kind.dtype) for kind in kinds.values()})
    return f"{len(kinds)} tensors, {_total(kinds) / 1e6:,.1f} MB, {' and '.join(dtypes)}"


_VERIFIED = {
    "off": "not verified",
    "bytes": "every tensor read again and equal",
    "logits": "every tensor read again and equal, and the same logits from transformers",
}


def _resolve_verify(verify: str, source: ModelSource, kinds: Kinds, can_compare: bool = True) -> str:
    """What `auto` stands for."""
    installed = _installed("transformers")
    if verify == "auto":
        can_compare = can_compare and source.spec is not None and _total(kinds) < _LOGITS_BELOW
        if can_compare and not installed:
            log.info("transformers is not installed: logits are not compared (pip install 'titan_mi100[eval]')")
        return "logits" if can_compare and installed else "bytes"
    if verify == "logits":
        if not can_compare or source.spec is None:
            raise UserError("--verify logits needs an HF folder to compare with; use --verify bytes")
        if not installed:
            raise UserError(
                "--verify logits needs transformers: pip install 'titan_mi100[eval]'; or use --verify bytes"
            )
    return verify


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def _stream(weights: Weights, kinds: Kinds, digests: Digests, advance: Callable[[int], None]) -> Iterator[Block]:
    """Every tensor's rows, in the dtype of `kinds`.

    Args:
        digests: gets the CRC-32 of each tensor's blocks: SHA-256 would take longer than the copying.
    """
    odd: list[str] = []
    for block in _read(weights, kinds, digests, odd):
        yield block
        advance(block[2].nbytes)
    if odd:
        log.warning(f"{weights.source}: NaN or infinite values in {len(odd)} tensors: {some(odd)}")


def _read(weights: Weights, kinds: Kinds, digests: Digests, odd: list[str]) -> Iterator[Block]:
    """Blocks in order, read and hashed by two threads, of which each is a block or two ahead."""
    parts: Digests = {}

    def block(name: str, start: int, stop: int) -> tuple[Block, int, bool]:
        stored, dtype = weights.rows(name, start, stop), kinds[name].dtype
        rows = stored.to(dtype).contiguous()
        finite = _is_finite(rows)
        if not finite and _is_finite(stored):
            raise UserError(
                f"{weights.source}: {name} has values that {in_words(dtype)} cannot hold; use bfloat16 or float32"
            )
        return (name, start, rows), zlib.crc32(rows.flatten().view(torch.uint8).numpy().data), finite

    places = ((name, start, stop) for name, kind in kinds.items() for start, stop in row_blocks(kind))
    with ThreadPoolExecutor(_THREADS) as pool:
        ahead: deque[Future[tuple[Block, int, bool]]] = deque()
        try:
            for place in places:
                ahead.append(pool.submit(block, *place))
                if len(ahead) <= _THREADS:
                    continue
                yield _next(ahead, parts, odd)
            while ahead:
                yield _next(ahead, parts, odd)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    digests |= parts


def _is_finite(rows: Tensor) -> bool:
    if not rows.numel() or not rows.dtype.is_floating_point:
        return True
    wide = rows.float() if rows.itemsize == 1 else rows  # float8 has no minimum
    return all(torch.isfinite(extreme).item() for extreme in torch.aminmax(wide))  # NaN is both


def _next(ahead: "deque[Future[tuple[Block, int, bool]]]", parts: Digests, odd: list[str]) -> Block:
    block, digest, finite = ahead.popleft().result()
    parts.setdefault(block[0], []).append(digest)
    if not finite and block[0] not in odd:
        odd.append(block[0])
    return block


def _verify_bytes(verify: str, written: Weights, kinds: Kinds, digests: Digests) -> None:
    """Read everything again, with the reader that a user's program has, and compare."""
    if verify == "off":
        return
    if written.kinds != kinds:
        wrong = [name for name in {**kinds, **written.kinds} if kinds.get(name) != written.kinds.get(name)]
        raise VerificationError(
            f"{len(wrong)} tensors have other names, shapes or dtypes than was meant: {some(wrong)}"
        )
    again: Digests = {}
    with ByteProgress("verifying", _total(kinds)) as progress:
        for _, _, rows in _read(written, kinds, again, []):
            progress.advance(rows.nbytes)
    if wrong := [name for name in kinds if again[name] != digests[name]]:
        raise VerificationError(f"{len(wrong)} tensors are not what was read from the source: {some(wrong)}")


def _compare_logits(
    folder: Path, weights: Weights, kinds: Kinds, spec: ModelSpec | None, texts: bool, adapter: Path | None = None
) -> None:
    from titan_mi100.verify_logits import compare  # here: importing transformers takes seconds

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
    dtype = in_words(dtypes.pop()) if len(dtypes) == 1 else None
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
    options = parser.parse_args()

    def main() -> None:
        source = open_source(options.input_dir, options.hf_assets_path)
        convert(source, options.output_dir, options.dtype, options.verify)

    tool.run(main)
