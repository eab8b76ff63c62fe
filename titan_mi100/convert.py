"""HF safetensors <-> DCP <-> `torch.save`: streamed, read again and compared, and whole or not there at all."""

import hashlib
import importlib.util
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from titan_mi100 import peft_io, sealed
from titan_mi100.adapter import adapter_tensors, lora_of, merged
from titan_mi100.assets import CONFIG, GENERATION, Assets, config_dtype, export_assets
from titan_mi100.dcp_io import DCPWeights, HashedFiles, TorchWeights, write_dcp, write_torch
from titan_mi100.durable import appearing_folder, sync
from titan_mi100.errors import SaveError, UserError
from titan_mi100.hf_io import HFWeights, write_hf
from titan_mi100.logging import ByteProgress, log
from titan_mi100.model_source import ModelSource, open_source, verify_files
from titan_mi100.model_spec import ModelSpec, parameter_count
from titan_mi100.settings import LoRAConfig, fingerprint
from titan_mi100.tokenizer import Tokenizer
from titan_mi100.weights import Kind, Weights, in_words, row_blocks, some

DTYPES = ("keep", "bfloat16", "float16", "float32")
VERIFY = ("auto", "logits", "bytes", "off")
VERIFY_HELP = (
    "bytes: read every tensor again and compare; logits: also load the HF folder with transformers and compare what it "
    "computes; auto: logits below 4 GB where transformers is installed, else bytes"
)
AUTO_DTYPE_HELP = (
    "of the written weights; auto: of a run's checkpoint the dtype that its config.json names, of everything else the "
    "one it has"
)
MODEL_FILE = "model.pt"
SHARD_BYTES = 5_000_000_000
_TEXT_END = "<|endoftext|>"  # ends a text that is no conversation; beside the token that ends a turn
_THREADS = 2  # that read and hash blocks, which is more work than writing them
_LOGITS_BELOW = 4_000_000_000  # bytes of weights; they are held in fp32

Kinds = dict[str, Kind]
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
    verify = _resolve_verify(verify, source, kinds, can_compare=isinstance(source.weights, HFWeights))
    with appearing_folder(output, _total(kinds)) as aside, ThreadPoolExecutor(1) as beside:
        intact = beside.submit(verify_files, source.path)  # meanwhile: the disk is busy with writing
        digests: dict[str, str] = {}
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
    if (lora := lora_of(source)) is not None:
        _to_peft(source, lora, output, verify)
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
    with appearing_folder(output, _total(kinds)) as aside, ThreadPoolExecutor(1) as beside:
        intact = beside.submit(verify_files, source.path)
        _write_assets(aside, source.assets)
        _write_assets(aside, _assets_of_export(source, kinds, aside))
        digests: dict[str, str] = {}
        with ByteProgress("writing", _total(kinds)) as progress:
            write_hf(aside, kinds, _stream(source.weights, kinds, digests, progress.advance), SHARD_BYTES)
        intact.result()
        _verify_bytes(verify, HFWeights(aside), kinds, digests)
        if verify == "logits":
            _compare_logits(aside, source.weights, kinds, source.spec, texts=True)
    log.info(f"{output}: {_words(kinds)}, {_VERIFIED[verify]}")


def _to_peft(source: ModelSource, lora: LoRAConfig, output: Path, verify: str) -> None:
    """Write an adapter that peft loads, with the tokenizer's files.

    It is compared as it is read again; and, on its base, by peft with what our merge computes.
    """
    assert source.manifest is not None and source.spec is not None
    base, tensors = source.manifest["lora"]["base"], adapter_tensors(source, lora)
    tokenizer = {name: content for name, content in source.assets.items() if name not in (CONFIG, GENERATION)}
    can_compare = bool(base) and (Path(base) / CONFIG).exists() and not (Path(base) / ".metadata").exists()
    if verify == "auto":
        small = 4 * parameter_count(source.spec) < 2 * _LOGITS_BELOW  # as in bf16
        verify = "logits" if can_compare and small and _installed("transformers", "peft") else "bytes"
    if verify == "logits" and not can_compare:
        raise UserError(f"--verify logits needs the HF folder that the adapter was trained on ({base or 'none'})")
    with appearing_folder(output, sum(tensor.nbytes for tensor in tensors.values())) as aside:
        peft_io.write_adapter(aside, tensors, lora, base)
        for file in aside.iterdir():
            sync(file)
        _write_assets(aside, tokenizer)
        if verify != "off":
            again, found = peft_io.read_adapter(aside)
            if fingerprint(again) != fingerprint(lora) or found.keys() != tensors.keys():
                raise VerificationError("the adapter's settings or names are not what was written")
            if wrong := [name for name, tensor in tensors.items() if not torch.equal(tensor, found[name])]:
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
    verify = _resolve_verify(verify, source, kinds, can_compare=False)
    with appearing_folder(output, 2 * _total(kinds)) as aside, ThreadPoolExecutor(1) as beside:
        intact = beside.submit(verify_files, source.path)
        digests: dict[str, str] = {}
        with ByteProgress("writing", _total(kinds)) as progress:
            write_torch(aside / MODEL_FILE, kinds, _stream(source.weights, kinds, digests, progress.advance))
        _write_assets(aside, source.assets)
        intact.result()
        _verify_bytes(verify, TorchWeights(aside / MODEL_FILE), kinds, digests)
    log.info(f"{output / MODEL_FILE}: {_words(kinds)}, {_VERIFIED[verify]}")


def _kinds(source: ModelSource, dtype: str) -> Kinds:
    """What is to be written."""
    own = {name: source.weights.kinds[name] for name in source.names()}
    if dtype == "keep":
        return own
    target = getattr(torch, dtype)
    return {
        name: Kind(kind.shape, target if kind.dtype.is_floating_point else kind.dtype) for name, kind in own.items()
    }


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


def _stream(weights: Weights, kinds: Kinds, digests: dict[str, str], advance: Callable[[int], None]) -> Iterator[Block]:
    """Every tensor's rows, in the dtype of `kinds`.

    Args:
        digests: gets the SHA-256 of each tensor's blocks.
    """
    odd: list[str] = []
    for block in _read(weights, kinds, digests, odd):
        yield block
        advance(block[2].nbytes)
    if odd:
        log.warning(f"{weights.source}: NaN or infinite values in {len(odd)} tensors: {some(odd)}")


def _read(weights: Weights, kinds: Kinds, digests: dict[str, str], odd: list[str]) -> Iterator[Block]:
    """Blocks in order, read and hashed by two threads, of which each is a block or two ahead."""
    parts: dict[str, list[str]] = {}

    def block(name: str, start: int, stop: int) -> tuple[Block, str, bool]:
        rows = weights.rows(name, start, stop).to(kinds[name].dtype).contiguous()
        finite = True
        if rows.numel() and rows.dtype.is_floating_point:
            finite = all(torch.isfinite(extreme).item() for extreme in torch.aminmax(rows))  # NaN is both
        return (name, start, rows), hashlib.sha256(rows.flatten().view(torch.uint8).numpy().data).hexdigest(), finite

    places = ((name, start, stop) for name, kind in kinds.items() for start, stop in row_blocks(kind))
    with ThreadPoolExecutor(_THREADS) as pool:
        ahead: deque[Future[tuple[Block, str, bool]]] = deque()
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
    digests |= {name: " ".join(hashes) for name, hashes in parts.items()}


def _next(ahead: "deque[Future[tuple[Block, str, bool]]]", parts: dict[str, list[str]], odd: list[str]) -> Block:
    block, digest, finite = ahead.popleft().result()
    parts.setdefault(block[0], []).append(digest)
    if not finite and block[0] not in odd:
        odd.append(block[0])
    return block


def _verify_bytes(verify: str, written: Weights, kinds: Kinds, digests: Mapping[str, str]) -> None:
    """Read everything again, with the reader that a user's program has, and compare."""
    if verify == "off":
        return
    if written.kinds != kinds:
        wrong = [name for name in {**kinds, **written.kinds} if kinds.get(name) != written.kinds.get(name)]
        raise VerificationError(
            f"{len(wrong)} tensors have other names, shapes or dtypes than was meant: {some(wrong)}"
        )
    again: dict[str, str] = {}
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


def _assets_of_export(source: ModelSource, kinds: Kinds, folder: Path) -> Assets:
    """Args: folder: with the source's tokenizer files."""
    assert source.spec is not None
    dtypes = {kind.dtype for kind in kinds.values()}
    dtype = in_words(dtypes.pop()) if len(dtypes) == 1 else None
    ends: list[int] = []
    if "tokenizer.json" in source.assets or "vocab.json" in source.assets:
        tokenizer = Tokenizer.from_folder(folder)
        text_end = tokenizer.encode(_TEXT_END)
        ends = [tokenizer.eos_token_id, *(text_end if len(text_end) == 1 else [])]
    else:
        log.info(f"{source.path}: no tokenizer files beside it, so the export has none")
    return export_assets(source.assets, source.spec, dtype, list(dict.fromkeys(ends)))
