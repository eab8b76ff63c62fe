"""Say what an option of torchtitan, TRL, axolotl or LLaMA-Factory is here; or list all options of one of them.

    titan-mi100 coming-from NAME [VALUE]

Imports no torch.
"""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from titan_mi100 import cli
from titan_mi100.config.as_text import our_keys
from titan_mi100.errors import UserError
from titan_mi100.workshop.other_trainers import Entry, advise, entries, find


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    # an option as it was typed
    words = [word if word in ("-h", "--help", "--version") else word.lstrip("-") for word in arguments]
    return cli.exit_code(lambda: print("\n".join(_lines(_parser().parse_args(words)))))


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="titan-mi100 coming-from", description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="an option, such as bf16; or a trainer")
    parser.add_argument("value", metavar="VALUE", nargs="*", help="the option's value: what to write here for it")
    return parser


def _lines(options: argparse.Namespace) -> Iterator[str]:
    name, _, value = options.name.partition("=")
    values, plain_name = options.value or [value] * bool(value), _plain(name)
    trainers = dict.fromkeys(entry.trainer for entry in entries())
    best = find(plain_name) if name else None
    matching = [entry for entry in entries() if entry == best or plain_name in _names(entry)]
    ours = [key for key in our_keys() if plain_name in (key, _last(key))]
    if not name:
        yield from (f"titan-mi100 coming-from {trainer!r}" for trainer in trainers if " and " not in trainer)
    elif not (matching or ours):
        near = difflib.get_close_matches(plain_name, [each for entry in entries() for each in entry.names], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; trainers: {'; '.join(trainers)}"
        raise UserError(f"{name}: no option that is known{hint}")
    if ours and name:
        yield f"{name} is a name here: {' or '.join(ours)}"
    if values and (advice := advise(plain_name, values if len(values) > 1 else values[0], None)):
        yield f"--{name} {' '.join(values)} {advice.text}"
    for trainer in trainers:
        if own_entries := [entry for entry in matching if entry.trainer == trainer]:
            yield f"# {trainer}"
            yield from (line for entry in own_entries for line in described(entry))


def _names(entry: Entry) -> set[str]:
    """What an entry is listed for: the option, also without its section; its trainers."""
    trainers = [entry.trainer, *re.split(", | and ", entry.trainer)]
    return {*entry.names, *map(_last, entry.names), *map(_plain, trainers)}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def described(entry: Entry) -> list[str]:
    """An option's names, and below them what they are here."""
    here = [entry.key] if entry.key else []
    for setting in dict.fromkeys(entry.settings.values()):
        values = ", ".join(value for value, mapped in entry.settings.items() if mapped == setting)
        here.append(f"{values}: {setting or 'leave it out'}")
    if not entry.exists:
        here.append("does not exist here" if not here else "else it does not exist here")
    texts = [*here, f"({entry.note})"] if entry.note else here
    inside = [
        textwrap.wrap(text, cli.WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
        for text in texts
    ]
    return [", ".join(entry.names), *(line for lines in inside for line in lines)]
