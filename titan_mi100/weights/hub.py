"""Uploading a finished folder to the Hugging Face hub, with huggingface_hub (the extra `hub`)."""

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
    parser.add_argument("--public", action="store_true", help="with --push_to_hub: everybody may see the repository")


def run(convert: Callable[[], object], options: argparse.Namespace) -> None:
    """Convert to `options.output_dir` and upload it if the options say so; exits as tool.run does.

    What would make the upload fail is looked for first, as far as that goes without network.
    """
    name = options.push_to_hub

    def prepared() -> None:
        if name is not None:
            check(name)
        elif options.public:
            raise UserError("--public: goes with --push_to_hub NAME; add that, or leave it out")
        convert()

    tool.run(prepared)
    if name is not None:
        tool.run(lambda: push(options.output_dir, name, options.public), "what has arrived is not sent again")


def check(name: str) -> None:
    """Look for what stands in the way of an upload, without network.

    Raises:
        UserError: the library is missing, the name is no repository's, or there is no token or no network.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors, utils
    except ImportError:
        raise UserError("--push_to_hub: huggingface_hub is not installed; pip install 'titan_mi100[hub]'") from None
    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError:
        raise UserError(f"--push_to_hub {name}: is no name of a repository; write it as OWNER/NAME") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push_to_hub: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push_to_hub: there is no token of the hub; {_TOKEN}")


def push(folder: Path, name: str, public: bool) -> None:
    """Upload a folder in one commit, to a repository that is made if it is not there.

    Args:
        public: everybody may see it. Otherwise it is made private, and one that is public already is refused.

    Raises:
        UserError: the hub refuses it, or the repository is public.
        RuntimeError: the hub cannot be reached, or answers with an error.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repository = api.create_repo(name, private=not public, exist_ok=True).repo_id
        if not public and not api.model_info(repository).private:  # it was there before
            raise UserError(f"{name}: is there already and public; name another one, or add --public")
        about = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}")
    except Exception as error:
        remedy = f"{folder} is complete; upload it with: hf upload {name} {folder}{'' if public else ' --private'}"
        kind, problem = _explained(error, name)
        raise kind(f"{problem}; {remedy}") from error
    log.info(f"{folder}: uploaded, {about}")


def _explained(error: Exception, name: str) -> tuple[type[Exception], str]:
    """What a person can do about the library's error: UserError where the same again would be refused again."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, UserError):
        return UserError, str(error)
    if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
        return UserError, f"{name}: the hub refuses the upload: no token, or one that may not write there; {_TOKEN}"
    if status is not None:
        return RuntimeError, f"{constants.ENDPOINT} answers {status} for {name}; try again later"
    if isinstance(error, errors.HTTPError | ConnectionError | TimeoutError):
        problem = f"{constants.ENDPOINT} cannot be reached ({error})"
        return RuntimeError, f"{problem}; check the network, the proxy or HF_ENDPOINT"
    return RuntimeError, f"{name}: could not be uploaded: {error}"
