"""Fetch a corpus from the hub; an interrupted download resumes. --dry_run only shows its revision, files and size.

    python scripts/corpora/fetch.py dclm --dry_run
    python scripts/corpora/fetch.py finemath --output_dir raw/finemath
    titan-mi100 prepare --input raw/finemath --include '*.parquet' --tokenizer Qwen3-8B --output_dir corpora/finemath

Needs huggingface_hub: pip install huggingface_hub. The recipes are in recipes.toml. Without a network, --dry_run shows
the recipe alone.
"""

import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_mi100 import cli
from titan_mi100.config.toml_file import read_toml
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.wording import bytes_in_words

RECIPES = Path(__file__).with_name("recipes.toml")


def main() -> int:
    recipes = read_toml(RECIPES)
    parser = cli.Parser(description=__doc__, formatter_class=cli.RawHelp)
    parser.add_argument("name", help=f"one of {', '.join(recipes)}")
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="PATTERN", help="files to fetch, instead of the recipe's"
    )
    parser.add_argument("--revision", default="main", help="a commit or branch of the repository; default: main")
    parser.add_argument("--output_dir", default="", help="folder to write the files to")
    parser.add_argument("--dry_run", action="store_true", help="only list what would be fetched")
    options = parser.parse_args()
    if options.name not in recipes:
        raise UserError(
            f"{options.name}: is not a recipe{did_you_mean(options.name, recipes)}; there are {', '.join(recipes)}"
        )
    if not (options.dry_run or options.output_dir):
        raise UserError("name a folder with --output_dir, or add --dry_run")
    recipe = recipes[options.name]
    patterns = options.files or recipe["files"]
    try:
        import huggingface_hub

        found = huggingface_hub.HfApi().dataset_info(
            recipe["repository"], revision=options.revision, files_metadata=True
        )
        chosen = [file for file in found.siblings or [] if any(fnmatch(file.rfilename, name) for name in patterns)]
        report(found, chosen, patterns)
        if not chosen:
            raise UserError(f"{recipe['repository']}: has no file {', '.join(patterns)}; name others with --files")
        if not options.dry_run:
            # The commit that was listed above, even if the branch moves during the download.
            huggingface_hub.snapshot_download(
                recipe["repository"], repo_type="dataset", revision=found.sha, allow_patterns=patterns,
                local_dir=options.output_dir,
            )  # fmt: skip
    except UserError:
        raise
    except Exception as error:  # from huggingface_hub, or from its HTTP library
        what = f"{recipe['repository']}: {type(error).__name__}: {' '.join(str(error).split())[:300]}; {remedy(error)}"
        if not options.dry_run or status_of(error):
            raise UserError(what) from None
        print(f"{', '.join(patterns)} of {what}")
        print("so revision, number and size of the files are not known")
    print(f"column for --text_column: {recipe['text_column']}{recipe.get('note', '')}")
    return 0


def status_of(error: Exception) -> int | None:
    """The status of the hub's answer; None: it did not answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def remedy(error: Exception) -> str:
    """What helps."""
    status = status_of(error)
    if isinstance(error, ImportError):
        return "pip install huggingface_hub"
    if status in (401, 403):  # without a login the hub also answers 401 for a repository that does not exist
        return "accept the repository's terms on its page, and log in: hf auth login"
    if status == 404:
        return "check the repository's id in recipes.toml, --revision and --files"
    why = f"the hub answered {status}" if status else "the hub did not answer; check the network"
    return f"{why}; try again, fetched files are kept"


def report(found: Any, chosen: list[Any], patterns: list[str]) -> None:
    """Print the repository's revision, and number and size of the chosen files per folder.

    Args:
        found: the hub's DatasetInfo.
        chosen: its files that match `patterns`.
    """
    print(f"{found.id}, revision {found.sha}, last modified {found.last_modified}, gated: {found.gated or 'no'}")
    folders, bytes_of = Counter[str](), Counter[str]()
    for file in chosen:
        folder = file.rfilename.rpartition("/")[0] or "."
        folders[folder] += 1
        bytes_of[folder] += file.size or 0
    for folder in sorted(folders)[:40]:  # the first 40 give an impression; the total follows
        print(f"  {folder}: {folders[folder]:,} files, {bytes_in_words(bytes_of[folder])}")
    whole, everything = bytes_in_words(sum(bytes_of.values())), len(found.siblings or [])
    print(f"{', '.join(patterns)}: {len(chosen):,} of {everything:,} files, {whole}")


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
