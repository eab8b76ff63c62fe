"""Deliberate breaks: each is one wrong line in the product, and names the one test that must go red.

    python tests/breaks/run.py [--only WORDS ...] [--jobs 2] [--list]

Every break of breaks.toml is applied to a copy of the tree, where its test is run. Prints a table; exit code 1 if a
break survives (its test stays green, or only an error stops it: a test that cannot be collected or set up has noticed
nothing), or if a break's text is not in the product exactly once.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# the folder that holds the package `breaks`, in place of this script's own
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from breaks.copies import REPO, Verdict, copy_tree, run_tests

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEARCHED = ("titan_mi100/**/*.py", "checkpoint_tools/*.py", "scripts/*.sh", "run_train.sh")
TIME_LIMIT = 420  # seconds a test


@dataclass(frozen=True)
class Break:
    """Text of the product, what stands there instead, and the test that must notice."""

    what: str
    old: str
    new: str
    test: str
    full: bool = False  # the test needs --full

    def place(self, tree: Path) -> Path:
        """The one file whose text holds `old`, once: breaks name no file, so that files can move.

        Raises:
            LookupError: there is none, or there are several places.
        """
        found = [(path, path.read_text(encoding="utf-8").count(self.old)) for path in product(tree)]
        places = [(path, count) for path, count in found if count]
        if [count for _, count in places] != [1]:
            names = ", ".join(f"{path.relative_to(tree)} ({count}x)" for path, count in places)
            raise LookupError(f"its text must be in one place, but is in: {names or 'no file'}")
        return places[0][0]


def product(tree: Path) -> list[Path]:
    return sorted(path for pattern in SEARCHED for path in tree.glob(pattern))


def read_breaks() -> list[Break]:
    text = Path(__file__).with_name("breaks.toml").read_text(encoding="utf-8")
    return [Break(**entry) for entry in tomllib.loads(text)["break"]]


class Copies:
    """A copy of the tree for each worker thread, made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._local = folder, threading.local()

    def mine(self) -> Path:
        if not hasattr(self._local, "copy"):
            self._local.copy = Path(tempfile.mkdtemp(dir=self._folder))
            copy_tree(self._local.copy)
        return self._local.copy


def attempt(broken: Break, copies: Copies) -> Verdict:
    """Break a copy, run the test, mend the copy."""
    copy = copies.mine()
    try:
        place = broken.place(copy)
    except LookupError as error:
        return Verdict("not applied", 0.0, str(error))
    text = place.read_text(encoding="utf-8")
    place.write_text(text.replace(broken.old, broken.new), encoding="utf-8")
    try:
        if place.suffix == ".py":
            compile(place.read_text(encoding="utf-8"), str(place), "exec")
        return run_tests(copy, [*(["--full"] if broken.full else []), broken.test], TIME_LIMIT)
    except SyntaxError as error:
        return Verdict("not applied", 0.0, f"is no Python: {error}")
    finally:
        place.write_text(text, encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="breaks whose description holds them")
    parser.add_argument("--jobs", type=int, default=2, help="breaks at a time")
    parser.add_argument("--list", action="store_true", help="only say where each would be applied")
    options = parser.parse_args(given)
    breaks = [broken for broken in read_breaks() if any(words in broken.what for words in options.only)]
    survived = 0
    if options.list:
        for broken in breaks:
            try:
                print(f"{broken.what}: {broken.place(REPO).relative_to(REPO)}, {broken.test}")
            except LookupError as error:
                survived += 1
                print(f"{broken.what}: NOT APPLIED, {error}")
        return int(survived > 0)
    print("| break | noticed by | verdict | seconds | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = Copies(Path(folder))
        verdicts = pool.map(lambda broken: attempt(broken, copies), breaks)
        for broken, verdict in zip(breaks, verdicts, strict=True):
            survived += verdict.kind != "red"
            words = (verdict.words.splitlines() or [""])[-1].replace("|", "\\|")[:120]
            kind = verdict.kind if verdict.kind == "red" else f"**{verdict.kind}**"
            test = broken.test.partition("::")[2]
            print(f"| {broken.what} | {test} | {kind} | {verdict.seconds:.0f} | {words} |", flush=True)
    print(f"\n{len(breaks)} breaks, {survived} not red")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
