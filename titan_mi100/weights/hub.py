"""Uploads a finished folder to the Hugging Face hub, with huggingface_hub (the extra `hub`)."""

import argparse
from collections.abc import Callable
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.errors import UserError
from titan_mi100.logging import log

_TOKEN = "log in with `hf auth login`, or set HF_TOKEN"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--push_to_hub", metavar="NAME", help="then upload the folder to this model repository, such as me/my-model"
    )
    parser.add_argument("--public", action="store_true", help="with --push_to_hub: make a public repository")


def run(convert: Callable[[], object], options: argparse.Namespace) -> None:
    """Convert to `options.output_dir`, and upload it if the options say so. Exits as tool.run does.

    Whatever can be checked for the upload without network is checked before the conversion, which may take long.
    """
    name = options.push_to_hub

    def prepared() -> None:
        if name is not None:
            check(name)
        elif options.public:
            raise UserError("--public: needs --push_to_hub NAME; add that option, or remove --public")
        convert()

    tool.run(prepared)
    if name is not None:
        tool.run(lambda: push(options.output_dir, name, options.public), "files that were uploaded are not sent again")


def check(name: str) -> None:
    """Check, without network, whether an upload can succeed.

    Raises:
        UserError: the library is missing, the name is not valid for a repository, there is no token, or
            HF_HUB_OFFLINE is set.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors, utils
    except ImportError:
        raise UserError("--push_to_hub: huggingface_hub is not installed; pip install huggingface_hub") from None
    try:
        # validate_repo_id also accepts a name without an owner; the hub then uses the owner of the token
        utils.validate_repo_id(name)
    except errors.HFValidationError:
        raise UserError(f"--push_to_hub {name}: is not a valid repository name; write it as OWNER/NAME") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push_to_hub: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push_to_hub: no token for the hub was found; {_TOKEN}")


def push(folder: Path, name: str, public: bool) -> None:
    """Upload a folder in one commit. The repository is created if it does not exist.

    Args:
        public: create a public repository. Otherwise create a private one, and refuse an existing public one.

    Raises:
        UserError: the hub refuses the upload, or the repository is public.
        RuntimeError: the hub cannot be reached, or answers with an error.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repository = api.create_repo(name, private=not public, exist_ok=True).repo_id
        if not public and not api.model_info(repository).private:  # it existed before: exist_ok keeps its visibility
            raise UserError(f"{name}: exists already and is public; name another one, or add --public")
        about = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}")
    except Exception as error:
        remedy = f"{folder} is complete; upload it with: hf upload {name} {folder}{'' if public else ' --private'}"
        kind, problem = _explained(error, name)
        raise kind(f"{problem}; {remedy}") from error
    log.info(f"{folder}: uploaded, {about}")


def _explained(error: Exception, name: str) -> tuple[type[Exception], str]:
    """The exception type and message for an error of the library. UserError: trying again would not help."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)  # only an HTTP error has one
    if isinstance(error, UserError):
        return UserError, str(error)
    if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
        return UserError, f"{name}: the hub refuses the upload: no token, or it may not write there; {_TOKEN}"
    if status is not None:
        return RuntimeError, f"{constants.ENDPOINT} answered with HTTP status {status} for {name}; try again later"
    if isinstance(error, errors.HTTPError | ConnectionError | TimeoutError):
        problem = f"{constants.ENDPOINT} cannot be reached ({error})"
        return RuntimeError, f"{problem}; check the network, the proxy or HF_ENDPOINT"
    return RuntimeError, f"{name}: could not be uploaded: {error}"
