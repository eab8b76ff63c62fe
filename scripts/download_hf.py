"""Downloads a Qwen3 from the Hugging Face hub into a folder to train from, or uploads a folder that was exported.

  python scripts/download_hf.py REPO_ID --output_dir DIR [--revision R] [--tokenizer_only]
  python scripts/download_hf.py REPO_ID --push FOLDER [--private]

Only safetensors, their index, configs, tokenizer and chat template are moved. A connection that is cut is resumed; the
same command again keeps the files that had arrived whole and fetches the others. The token is that of HF_TOKEN, of
`hf auth login` or of --token_file. Exit codes: 0 done and checked, 1 failed (network, disk), 2 the repository, the
folder or the token is not right.
"""

import argparse
import errno
import glob
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_mi100 import tool
from titan_mi100.assets import CONFIG, is_asset, is_tokenizer_file
from titan_mi100.errors import UserError
from titan_mi100.logging import log
from titan_mi100.model_spec import parameter_count, read_hf_config
from titan_mi100.text.load import load_tokenizer

try:
    import huggingface_hub
    from huggingface_hub import HfApi, constants, errors
except ImportError:
    huggingface_hub = None  # type: ignore[assignment]

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_TOKEN_HELP = "set HF_TOKEN, or name a file with it by --token_file"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", help="such as Qwen/Qwen3-0.6B")
    parser.add_argument("--token_file", type=Path, help="file that holds the hub's token, instead of HF_TOKEN")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output_dir", type=Path, help="folder to download into")
    what.add_argument("--push", type=Path, metavar="FOLDER", help="HF folder to upload into REPO_ID, made if needed")
    parser.add_argument("--revision", help="branch, tag or commit to download (default: main)")
    parser.add_argument("--tokenizer_only", action="store_true", help="download no weights and no config.json")
    parser.add_argument("--private", action="store_true", help="with --push: nobody else may see REPO_ID")
    options = parser.parse_args()
    if options.push and (options.revision or options.tokenizer_only):
        parser.error("--revision and --tokenizer_only go with --output_dir")
    if options.private and not options.push:
        parser.error("--private goes with --push")
    tool.run(lambda: _run(options), "the same command again keeps what has arrived")


def _run(options: argparse.Namespace) -> None:
    if huggingface_hub is None:
        raise UserError("huggingface_hub is not installed; pip install 'titan_mi100[hub]'")
    api = HfApi(token=_read_token(options.token_file))
    if options.push:
        push(api, options.repo_id, options.push, options.private)
    else:
        download(api, options.repo_id, options.revision, options.output_dir, options.tokenizer_only)


def _read_token(file: Path | None) -> str | None:
    """None: the library finds one itself, or asks without."""
    if file is None:
        return None
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no token can be read from it: {error}") from None
    if not token or len(token.split()) != 1:
        raise UserError(f"{file}: must hold the token and nothing else")
    return token


def is_model_file(name: str) -> bool:
    """Whether a repository's file is moved: no pickles, no code, no other formats, nothing of a subfolder."""
    return "/" not in name and (name.endswith(_WEIGHTS) or is_asset(name))


def download(api: "HfApi", repo_id: str, revision: str | None, output: Path, tokenizer_only: bool) -> None:
    """Fetch the files of one commit that are not there yet, then look whether they are a whole model.

    Raises:
        UserError: the repository does not exist, may not be read or holds no dense Qwen3, or the folder something else.
        OSError, RuntimeError: the network or the disk.
    """
    with _explained(repo_id):
        info = api.model_info(repo_id, revision=revision, files_metadata=True)
    wanted = is_tokenizer_file if tokenizer_only else is_model_file
    files = {each.rfilename: each.size or 0 for each in info.siblings or [] if wanted(each.rfilename)}
    if not tokenizer_only:
        _check_config(api, repo_id, info.sha, files)
    elif not files:
        raise UserError(f"{repo_id}: holds no tokenizer files")
    _check_folder(output, repo_id, files)
    log.info(f"{repo_id}, commit {info.sha}: {len(files)} files, {sum(files.values()) / 1e6:,.1f} MB into {output}")
    with _explained(repo_id):
        # the names themselves as patterns: the library's * also matches what lies in subfolders
        patterns = [glob.escape(name) for name in files]
        api.snapshot_download(repo_id, revision=info.sha, local_dir=output, allow_patterns=patterns)
    # where the library cannot list the commit, it is content with what lies in the folder
    if lacking := [name for name, size in files.items() if not _has(output / name, size)]:
        raise RuntimeError(f"{output}: did not arrive whole: {', '.join(lacking)}")
    for left in output.glob(".cache/huggingface/download/*.incomplete"):  # by a kill; the library goes on with none
        left.unlink(missing_ok=True)
    if tokenizer_only:
        tokenizer = load_tokenizer(output)
        log.info(f"{output}: a tokenizer of {tokenizer.n_vocab:,} tokens; train with --model.tokenizer_path {output}")
    else:
        log.info(f"{output}: {_checked(output)}; train with --checkpoint.initial_load_path {output}")


def push(api: "HfApi", repo_id: str, folder: Path, private: bool) -> None:
    """Upload an HF folder in one commit.

    Raises:
        UserError: it is no whole dense Qwen3, the hub refuses it, or the repository is public and must not be.
        OSError, RuntimeError: the network.
    """
    found = _checked(folder)
    names = sorted(path.name for path in folder.iterdir() if is_model_file(path.name))
    with _explained(repo_id):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:  # it was there before
            raise UserError(f"{repo_id}: is there already and public; make it private first, or name another one")
        patterns = [glob.escape(name) for name in names]
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=patterns, commit_message=f"Upload {found}"
        )
    log.info(f"{constants.ENDPOINT}/{repo_id}: {len(names)} files, {found}")


def _checked(folder: Path) -> str:
    """What an HF folder holds, in words. Raises UserError: no whole dense Qwen3."""
    from titan_mi100.hf_io import HFWeights  # here: importing torch takes seconds, and most mistakes are found before
    from titan_mi100.model_source import open_source

    source = open_source(folder)
    if source.spec is None or not isinstance(source.weights, HFWeights):
        raise UserError(f"{folder}: is no HF folder; make one with checkpoint_tools/dcp_to_hf.py")
    tensors = len(source.names())
    return f"Qwen3 of {parameter_count(source.spec):,} parameters in {tensors} tensors"


def _check_config(api: "HfApi", repo_id: str, commit: str, files: dict[str, int]) -> None:
    """Refuse what is no dense Qwen3 before its weights are asked for."""
    if CONFIG not in files or not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"{repo_id}: holds no {CONFIG} with safetensors beside it; name a repository that does")
    with tempfile.TemporaryDirectory() as aside:
        with _explained(repo_id):
            api.hf_hub_download(repo_id, CONFIG, revision=commit, local_dir=aside)
        try:
            read_hf_config(aside)
        except UserError as error:
            raise UserError(str(error).replace(aside, repo_id)) from None


def _check_folder(output: Path, repo_id: str, files: dict[str, int]) -> None:
    """Refuse a folder with another model's files, which would be taken for this one's, or without room."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        strays = sorted(path.name for path in output.iterdir() if is_model_file(path.name) and path.name not in files)
        if strays:
            raise UserError(f"{output}: holds {', '.join(strays)}, which {repo_id} does not; name an empty folder")
        there = sum((output / name).stat().st_size for name in files if (output / name).is_file())
    except OSError as error:
        raise UserError(f"{output}: cannot be used ({error.strerror}); name another folder") from None
    needed, free = sum(files.values()) - there, shutil.disk_usage(output).free
    if free < needed:
        room = f"{output}: needs {needed / 2**30:,.2f} GiB more, {free / 2**30:,.2f} GiB are free"
        raise OSError(errno.ENOSPC, room)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """What a person can do about the library's errors: one line, a UserError where the same again would be refused."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            cause = error.__cause__  # "not in the folder either" is not what is wrong
        raise _explain(cause, repo_id) from error


def _explain(error: Exception, repo_id: str) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        terms = f"accept its terms at {constants.ENDPOINT}/{repo_id}, then give that account's token"
        return UserError(f"{repo_id}: is gated; {terms}: {_TOKEN_HELP}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"{repo_id}: no such repository, or a private one; mend the name, or {_TOKEN_HELP}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo_id}: has no such revision; name a branch, a tag or a commit by --revision")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{repo_id}: is no repository's name; write it as OWNER/NAME")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError("HF_HUB_OFFLINE is set, so the hub is not asked; unset it, or copy the folder by hand")
    if status in (401, 403):
        return UserError(
            f"{repo_id}: the hub refuses it ({status}): no token, or one without that right; {_TOKEN_HELP}"
        )
    if status is not None:
        return RuntimeError(f"{constants.ENDPOINT} answers {status} for {repo_id}; try again later")
    if isinstance(error, errors.HTTPError | ConnectionError | TimeoutError):
        return RuntimeError(
            f"{constants.ENDPOINT} cannot be reached ({error}); mend the network, the proxy or HF_ENDPOINT"
        )
    return RuntimeError(str(error)) if isinstance(error, ValueError) else error


if __name__ == "__main__":
    main()
