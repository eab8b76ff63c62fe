"""The configs that come with the package. `titan-mi100 configs` lists them, with a NAME prints one.

They are in train_configs/: inside an installed package; in a checkout beside the package, which links to them.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from titan_mi100 import cli
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.files.patterns import nearby

FOLDER = (Path(__file__).parents[1] / "train_configs").resolve()


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def or_bundled(path: str, folder: str = "") -> str:
    """The path in the folder, or the bundled config of that name where no such file is there.

    A name without a folder may be the name of a bundled config, with or without `.toml`. An existing file has
    precedence; an existing folder has not: a folder called `debug` is most likely a run's.
    """
    full_path = os.path.join(folder, path)
    if os.path.dirname(path) or (os.path.lexists(full_path) and not os.path.isdir(full_path)):
        return full_path
    name = path.removesuffix(".toml")
    return str(FOLDER / f"{name}.toml") if name in names() else full_path


def no_such_file(path: str) -> str:
    """The message about a config file that does not exist."""
    otherwise = f"{nearby(path)}; titan-mi100 config new writes one"
    stem = os.path.basename(path).removesuffix(".toml")
    return f"no such file{did_you_mean(stem, names(), 'the bundled ', otherwise, cutoff=0.8)}"


def main(argv: Sequence[str] | None = None) -> int:
    return cli.exit_code(lambda: _show(_parser().parse_args(argv).name))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        description="List the bundled configs, or print one: to read it, or to make your own of it. A config of yours "
        'can inherit from it with base = "NAME.toml".'
    )
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="print this one")
    return parser


def _show(name: str) -> None:
    if name:
        stem = name.removesuffix(".toml")
        if stem not in names():
            raise UserError(f"{name}: {no_such_file(name)}; without a name all are listed")
        print((FOLDER / f"{stem}.toml").read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, names()))
    for stem in names():
        first_line = (FOLDER / f"{stem}.toml").read_text(encoding="utf-8").partition("\n")[0]
        print(f"{stem:<{width}}  {first_line.removeprefix('#').strip()}")
    print(f"\nin {FOLDER}; train on one: --job.config_file NAME")
