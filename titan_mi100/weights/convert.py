"""Converts between HF safetensors, DCP and `torch.save`.

Works tensor by tensor, so that memory holds few of them. The output is read again and compared with the input, and
appears under its name only when it is complete.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_mi100 import cli as tool
from titan_mi100.checkpoint import sealed
from titan_mi100.checkpoint.hashed_files import HashedFiles
from titan_mi100.config.settings import LoRAConfig, lora_identity
from titan_mi100.errors import SaveError, UserError
from titan_mi100.files.durable import atomic_output_folder, sync
from titan_mi100.files.model import DRAFT_FILE
from titan_mi100.log import ByteProgress, log
from titan_mi100.parallel.distributed import raise_together, wait_for_all
from titan_mi100.shapes.base import EXPERTS, ModelSpec, differences, draft_shapes, modules_of
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.text import assets as asset_files
from titan_mi100.text.assets import CONFIG, GENERATION, Assets, config_dtype, export_assets, naming_dtype, read_assets
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.base import Kind, Kinds, Weights, dtype_name, raw_bytes
from titan_mi100.weights.dcp import MODEL_FILE, DCPWeights, read_torch_weights, write_dcp, write_torch
from titan_mi100.weights.draft_head import kinds_in_base, open_head
from titan_mi100.weights.experts import in_files
from titan_mi100.weights.hf import is_hf_folder, write_hf
from titan_mi100.weights.pieces import joined
from titan_mi100.weights.source import ModelSource, open_source, verify_files, warn_of_missing_draft
from titan_mi100.wording import some

DTYPES = ("keep", "bfloat16", "float16", "float32")
VERIFY = ("bytes", "off")
VERIFY_HELP = "how to check the output. bytes (default): read every tensor again and compare"
_DTYPE_HELP = (
    "dtype of the written weights (default: %(default)s). keep: unchanged; auto (dcp_to_hf): for a run's checkpoint "
    "the dtype that its config.json names, otherwise unchanged"
)
SHARD_BYTES = 5_000_000_000  # bytes of a safetensors file, as transformers writes them
_VERIFIED = {"off": "not verified", "bytes": "every tensor read again and equal"}


class Digest(NamedTuple):
    """Identifies a tensor's content: the written one must have the same digest as the original."""

    kind: Kind
    crc: int  # CRC-32 of the bytes; SHA-256 would take longer than the copy
    finite: bool


Digests = dict[str, Digest]


def to_dcp(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "bytes") -> None:
    """Write the weights as a DCP folder with the model's other files, sealed by a manifest.

    Args:
        output: folder to make.
        dtype: one of DTYPES.
        verify: one of VERIFY.

    Raises:
        UserError: the output exists.
        SaveError: the written tensors differ from the source.
    """
    kinds = _output_kinds(source, dtype)
    with _new_folder(source, output, kinds, verify) as aside:
        files, digests = HashedFiles(), Digests()
        write_dcp(files, aside, in_files(source.spec, _tensors_to_write(source, kinds, digests)))
        for name, content in naming_dtype(source.assets, dtype).items():
            files.write(aside / name, content)
        _compare(DCPWeights(aside), digests, verify, source.spec)
        # Step 0: the trainer starts from it, but does not resume from it (see resume.check_is_run_checkpoint).
        sealed.write_manifest(aside, files.written, {"step": 0, "torch": torch.__version__})


def to_hf(source: ModelSource, output: Path, dtype: str = "auto", verify: str = "bytes") -> None:
    """Write the weights as an HF folder that transformers and vLLM load. A LoRA run's checkpoint becomes a PEFT folder.

    Args:
        output, verify: see to_dcp.
        dtype: one of DTYPES, or "auto". auto: a run's checkpoint (fp32) gets the dtype that its config.json names;
            everything else stays as stored.

    Raises:
        UserError, SaveError: as to_dcp; or the model's shape is unknown.
    """
    if source.lora is not None:
        _to_peft(source, source.lora, output, "keep" if dtype == "auto" else dtype, verify)
        return
    if source.spec is None:
        raise UserError(f"{source.path}: needs a config.json; name a folder that has one with --hf_assets_path")
    if dtype == "auto":
        named = config_dtype(source.assets) if "fingerprints" in source.manifest else None
        dtype = named if named in DTYPES else "keep"  # config.json may name a dtype that we do not write
    kinds = _output_kinds(source, dtype)
    warn_of_missing_draft(output, source.assets, kinds)
    with _new_folder(source, output, kinds, verify) as aside:
        _write_assets(aside, asset_files.for_all_versions(_assets_of_export(source, source.spec, kinds)))
        digests = Digests()
        stored, tensors = source.spec.stored_name, in_files(source.spec, _tensors_to_write(source, kinds, digests))
        there = {stored(name): kind for name, kind in source.spec.in_files(kinds).items()}
        write_hf(aside, there, ((stored(name), tensor) for name, tensor in tensors), SHARD_BYTES)
        for file in aside.glob("*.safetensors"):
            safe_open(file, framework="pt")  # the reader that other programs use accepts the file as well
        if verify != "off":
            try:
                written = open_source(aside)
            except UserError as error:
                raise SaveError(f"what was written cannot be read again: {error}") from None
            assert written.spec is not None
            if differing := differences(written.spec, source.spec):
                raise SaveError(f"the export's config.json describes another model: {'; '.join(differing)}")
            _compare(written.weights, digests, verify, source.spec)


def to_torch(source: ModelSource, output: Path, dtype: str = "keep", verify: str = "bytes") -> None:
    """Write the weights as a dict of tensors in `output/model.pt`, with the model's other files. Args: see to_dcp.

    Raises:
        UserError, SaveError: as to_dcp.
    """
    kinds = _output_kinds(source, dtype)
    with _new_folder(source, output, kinds, verify) as aside:
        digests, spec = Digests(), source.spec
        tensors = in_files(spec, _tensors_to_write(source, kinds, digests))
        write_torch(aside, ((spec.stored_name(name) if spec else name, tensor) for name, tensor in tensors))
        _compare(read_torch_weights(aside / MODEL_FILE), digests, verify, spec)
        _write_assets(aside, naming_dtype(source.assets, dtype))


def _to_peft(source: ModelSource, lora: LoRAConfig, output: Path, dtype: str, verify: str) -> None:
    """Write an adapter as a PEFT folder, with the tokenizer's files."""
    assert source.spec is not None
    spec, base, kinds = source.spec, source.manifest["lora"]["base"], _output_kinds(source, dtype)
    heads = draft_shapes(spec)
    if heads and dtype == "keep" and lexists(base):
        kinds = kinds | kinds_in_base(kinds, open_source(base).weights.kinds, spec)
    name = source.manifest["lora"].get("base_model_name_or_path", "")
    if base and not name and not is_hf_folder(base):
        log.warning(
            f"{output}: peft cannot load its base: {base} is not an HF folder; export that, and name the export"
        )
    if scaling := source.spec.rope_scaling:
        problem = f"an adapter has no config.json: its base's must have rope_scaling = {scaling.written()}"
        log.warning(f"{output}: {problem}; or merge {source.path} (titan-mi100 convert merge-lora)")
    with _new_folder(source, output, kinds, verify) as aside:
        digests = Digests()
        tensors = dict(_tensors_to_write(source, kinds, digests))
        if heads:
            beside = dict(in_files(spec, ((own, tensors.pop(own)) for own in heads)))
            save_file(beside, aside / DRAFT_FILE, {"format": "pt"})
        peft_io.write_adapter(aside, {spec.stored_name(own): x for own, x in tensors.items()}, lora, name or base)
        if any(spec.stored_name(own) != own for own in tensors):
            kind = to_hf_config(spec)["architectures"][0]
            log.info(f"{output}: its names are those of {kind}: load the base with that class, then the adapter")
        again, written = peft_io.read_adapter(aside)
        modules = modules_of(tensors)
        lora = replace(lora, dropout=again.dropout) if EXPERTS in modules else lora
        if verify != "off" and lora_identity(again, modules) != lora_identity(lora, modules):
            raise SaveError("the adapter's settings differ from those that were written")
        _compare(written, Digests({own: digests[own] for own in tensors}), verify)
        if (head := open_head(aside, spec)) is not None:
            _compare(head, Digests({own: digests[own] for own in heads}), verify)
        of_base = (CONFIG, GENERATION, *asset_files.PROCESSORS)
        kept = {name: content for name, content in source.assets.items() if name not in of_base}
        _write_assets(aside, asset_files.for_all_versions(asset_files.naming_class(kept, source.assets)))


def export(folder: Path, step: int, dtype: str, lora: LoRAConfig, rank: int) -> None:
    """Write a run's checkpoint as an HF folder `hf-step-N`, unless an earlier start has done so. A collective.

    Args:
        folder: the run folder.
        lora: the run's settings; its base_model_name_or_path may have changed since the checkpoint was saved.

    Raises:
        UserError: another folder or file has that name.
        SaveError: on all ranks; the export could not be written.
    """
    target = folder / f"hf-step-{step}"
    with raise_together():
        try:
            if rank == 0 and not is_exported(target, dtype, lora.rank > 0, lora.base_model_name_or_path):
                source = open_source(folder / "checkpoint" / f"step-{step}")
                if source.lora is not None:
                    source.manifest["lora"]["base_model_name_or_path"] = lora.base_model_name_or_path
                to_hf(source, target, dtype)
        except Exception as error:
            if isinstance(error, UserError | SaveError):
                raise
            reason = str(error) if isinstance(error, OSError) else tool.message_of(error)
            raise SaveError(f"{target}: could not be written: {reason}") from error
        finally:  # another collective would time out during a long export
            wait_for_all()


def is_exported(target: Path, dtype: str, is_adapter: bool, base_name: str = "") -> bool:
    """Whether an earlier start has written this export. Anything else under that name makes the export fail."""
    if is_adapter:
        return (target / peft_io.CONFIG).exists() and base_name in ("", peft_io.base_of(target))
    return (target / CONFIG).exists() and dtype in ("auto", config_dtype(read_assets(target)))


def _output_kinds(source: ModelSource, dtype: str) -> Kinds:
    """Shape and dtype of the tensors to write. Only floating-point tensors that the model uses are cast."""
    kinds, spec = source.weights.kinds, source.spec
    if dtype == "keep":
        return kinds
    target: torch.dtype = getattr(torch, dtype)
    wide = {name for name, parameter in spec.parameters.items() if parameter.in_fp32} if spec else set[str]()
    cast = {n for n, kind in kinds.items() if kind.dtype.is_floating_point and not (spec and spec.passes_through(n))}
    cast = {name for name in cast if name not in wide or kinds[name].dtype != torch.float32}
    return {name: Kind(kind.shape, target) if name in cast else kind for name, kind in kinds.items()}


@contextmanager
def _new_folder(source: ModelSource, output: Path, kinds: Kinds, verify: str) -> Iterator[Path]:
    """Yield a temporary folder for the output. It is synced and renamed at the end, or removed after an error."""
    if source.path.is_dir() and output.resolve().is_relative_to(source.path.resolve()):
        raise UserError(f"{output}: is inside {source.path}; name a folder elsewhere")
    with atomic_output_folder(output, _total(kinds)) as aside:
        yield aside
        for file in aside.iterdir():
            sync(file)
    dtypes = " and ".join(sorted({dtype_name(kind.dtype) for kind in kinds.values()}))
    log.info(f"{output}: {len(kinds)} tensors, {_total(kinds) / 1e6:,.1f} MB, {dtypes}, {_VERIFIED[verify]}")


def _total(kinds: Kinds) -> int:
    return sum(kind.nbytes for kind in kinds.values())


def _tensors_to_write(source: ModelSource, kinds: Kinds, digests: Digests) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, see `_tensors`. A thread reads the next tensor while the caller writes this one."""
    verify_files(source.path)  # a sealed checkpoint with damage is refused before anything is written
    tensors = _tensors(source.weights, kinds, digests, "writing")
    with ThreadPoolExecutor(1) as pool:  # one thread: at most two tensors are in memory
        coming = pool.submit(next, tensors, None)
        while (pair := coming.result()) is not None:
            coming = pool.submit(next, tensors, None)
            yield pair
    if odd := [name for name, digest in digests.items() if not digest.finite]:
        log.warning(f"{source.weights.source}: {len(odd)} tensors have NaN or infinite values: {some(odd)}")


def _tensors(weights: Weights, kinds: Kinds, digests: Digests, what: str) -> Iterator[tuple[str, Tensor]]:
    """Read all tensors in order, contiguous and cast to the dtypes of `kinds`.

    Args:
        digests: receives the digest of each tensor.
        what: label of the progress bar.

    Raises:
        UserError: the dtype cannot hold a value of the tensor.
    """
    with ByteProgress(what, _total(kinds)) as progress:
        for name, kind in kinds.items():
            tensor = weights.tensor(name, kind.dtype).contiguous()
            finite = _is_finite(tensor)
            if not finite and _is_finite(weights.tensor(name)):  # finite as stored, so the cast overflowed
                problem = f"{name} has values that {dtype_name(kind.dtype)} cannot hold"
                raise UserError(f"{weights.source}: {problem}; use bfloat16 or float32")
            digests[name] = Digest(kind, zlib.crc32(raw_bytes(tensor).numpy().data), finite)
            yield name, tensor
            del tensor  # otherwise it would stay in memory while the next one is read
            progress.advance(kind.nbytes)


def _is_finite(values: Tensor) -> bool:
    if not values.numel() or not values.dtype.is_floating_point:
        return True
    wide = values.float() if values.itemsize == 1 else values  # torch has no aminmax for float8
    # One pass without a temporary tensor: if there is a NaN, both extremes are NaN.
    return all(torch.isfinite(extreme).item() for extreme in torch.aminmax(wide))


def _compare(written: Weights, digests: Digests, verify: str, spec: ModelSpec | None = None) -> None:
    """Read the written tensors again and compare their digests, unless --verify is off. Raises SaveError.

    Args:
        spec: by whose names the digests are; None: by those of the files.
    """
    if verify == "off":
        return
    written = joined(written, spec) if spec else written
    read_digests = Digests()
    deque(_tensors(written, written.kinds, read_digests, "verifying"), maxlen=0)  # runs the iterator, keeps no tensor
    if wrong := [name for name in {**digests, **read_digests} if digests.get(name) != read_digests.get(name)]:
        raise SaveError(f"{len(wrong)} written tensors differ from the source: {some(wrong)}")


def _write_assets(folder: Path, assets: Assets) -> None:
    for name, content in assets.items():
        (folder / name).write_bytes(content)


def _assets_of_export(source: ModelSource, spec: ModelSpec, kinds: Kinds) -> Assets:
    few = {name for name, parameter in spec.parameters.items() if parameter.in_fp32}
    dtypes = {kind.dtype for name, kind in kinds.items() if name not in few and not spec.passes_through(name)}
    dtype = dtype_name(dtypes.pop()) if len(dtypes) == 1 else None
    # generation_config.json of the export must stop at all of these, or other programs generate on after an answer
    ends = load_tokenizer(source.assets_folder).end_ids() if "tokenizer.json" in source.assets else []
    return export_assets(source.assets_folder, source.assets, spec, dtype, ends)


def command(
    description: str, input_help: str, output_help: str, convert: Callable[..., None], dtype: str = "keep",
    find: Callable[[Path], Path] = Path,
) -> None:  # fmt: skip
    """Run a converter's command line.

    Args:
        convert: to_dcp, to_hf or to_torch.
        dtype: default of --dtype.
        find: turns --input_dir into the path to open.
    """
    parser = tool.Parser(description=description)
    parser.add_argument("--input_dir", type=Path, required=True, help=input_help)
    parser.add_argument("--output_dir", type=Path, required=True, help=output_help)
    dtypes = DTYPES if dtype == "keep" else (dtype, *DTYPES)
    parser.add_argument("--dtype", choices=dtypes, default=dtype, help=_DTYPE_HELP)
    parser.add_argument("--verify", choices=VERIFY, default="bytes", help=VERIFY_HELP)
    parser.add_argument(
        "--hf_assets_path", default="", help="folder with config.json and tokenizer, if not the input's"
    )
    options = parser.parse_args()

    def main() -> None:
        source = open_source(find(options.input_dir), options.hf_assets_path)
        convert(source, options.output_dir, options.dtype, options.verify)

    tool.run(main)
