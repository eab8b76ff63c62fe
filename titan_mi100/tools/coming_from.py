"""Say what an option of torchtitan, TRL, axolotl or LLaMA-Factory is here; or list all options of one of them.

    titan-mi100 coming-from NAME

Imports no torch.
"""

import argparse
import difflib
import sys
import textwrap
from collections.abc import Iterator, Sequence

from titan_mi100 import cli
from titan_mi100.config.other_trainers import Entry, entries, our_keys
from titan_mi100.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    ours = ("-h", "--help", "--version")
    names = [word if word in ours else word.lstrip("-") for word in given]  # an option as it was typed
    return cli.exit_code(lambda: print("\n".join(_lines(_parser().parse_args(names).name))))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="titan-mi100 coming-from", description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="an option, such as bf16; or a trainer")
    return parser


def _lines(name: str) -> Iterator[str]:
    wanted = name.replace("-", "_").lower()
    trainers = dict.fromkeys(entry.trainer for entry in entries())
    named = [entry for entry in entries() if name and name.lower() in entry.trainer.lower()]
    of_option = [entry for entry in entries() if wanted in map(_last, entry.names) or wanted in entry.names]
    if not name:
        yield from (f"titan-mi100 coming-from {trainer!r}" for trainer in trainers)
    elif ours := [key for key in our_keys() if wanted in (key, _last(key))] if not of_option else []:
        yield f"{name} has the same name here: {' or '.join(ours)}"
    elif not (found := of_option or named):
        near = difflib.get_close_matches(wanted, [each for entry in entries() for each in entry.names], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; trainers: {'; '.join(trainers)}"
        raise UserError(f"{name}: no option that is known{hint}")
    else:
        for trainer in trainers:
            if mine := [entry for entry in found if entry.trainer == trainer]:
                yield f"# {trainer}"
                yield from (line for entry in mine for line in described(entry))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def described(entry: Entry) -> list[str]:
    """An option's names, and below them what they are here."""
    here = [entry.key] if entry.key else []
    for setting in dict.fromkeys(entry.settings.values()):
        values = ", ".join(value for value, given in entry.settings.items() if given == setting)
        here.append(f"{values}: {setting or 'leave it out'}")
    if not entry.exists:
        here.append("does not exist here" if not here else "else it does not exist here")
    texts = [*here, f"({entry.note})"] if entry.note else here
    inside = [
        textwrap.wrap(text, cli.WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
        for text in texts
    ]
    return [", ".join(entry.names), *(line for lines in inside for line in lines)]


if __name__ == "__main__":
    sys.exit(main())
