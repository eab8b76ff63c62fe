"""Mutated config files, command lines and model folders for the loader: `python tests/config_fuzz.py [CASES] [SEED]`.

Each case must end in a config, which to_toml and load_config carry around unchanged, or in a UserError about a key, an
option or a file. Anything else, a case of more than 5 seconds included, is printed and kept.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_origin

from titan_mi100.config.as_text import keys_of, to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, SourceConfig
from titan_mi100.errors import UserError
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.wording import printable
from titan_mi100.workshop.other_trainers import entries

REPO = Path(__file__).parents[1]
ASSETS = REPO / "tests" / "assets"
SECONDS = 5.0

KEYS = {
    f"{section.name}.{key.name}": key
    for section in fields(Config)
    if section.name not in ("notes", "commits")
    for key in keys_of(section.default_factory)  # type: ignore[misc, arg-type]
}
FOREIGN = sorted({name for entry in entries() for name in entry.names if not name.endswith("*")})
NUMBERS = (
    *(
        "0",
        "-0",
        "1",
        "2",
        "3",
        "7",
        "-1",
        "-2",
        "64",
        "1e9",
        "1.5",
        "-0.0",
        "5e-324",
        "1e308",
        "1e309",
        "-1e309",
        "nan",
    ),
    *("inf", "-inf", "+inf", str(2**31), str(2**31 - 1), str(2**63), str(2**64), str(2**70), str(-(2**63)), "1_000"),
    *("9" * 401, "-" + "9" * 401, "9" * 4301, "0x" + "f" * 5000, "0b1", "0o7", "01", "1.", ".5", "1e", "１２", "٣"),
)
TEXTS = (
    *("", " ", "\t", "\n", "\r\n", "\0", "a\0b", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\ud800"),
    *(
        "\udcff",
        "x" * 255,
        "x" * 256,
        "x" * 300,
        "é" * 200,
        "x/" * 3000,
        "y" * 100_000,
        "~",
        "~nobody",
        "~/x",
        "~\0",
        "/",
    ),
    *(
        ".",
        "..",
        "/dev/null",
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/mem",
        "*",
        "**",
        "[",
        "]",
        "[]",
        "[a",
        "[!]",
        "{a,b}",
    ),
    *("?", "a,b", ",", ",,", "[a,b]", "'", '"', '"""', "\\", "\\x", "%s", "{0}", "$HOME", "`ls`", "--", "-", "=", "#"),
    *(
        "true",
        "True",
        "false",
        "none",
        "None",
        "null",
        "auto",
        "debug",
        "0.6B",
        "text",
        "tokens",
        "float64",
        "constant",
    ),
    *(
        "async",
        "GPipe",
        "Interleaved1F1B",
        "q_proj",
        "full",
        "split",
        "skip",
        "drop",
        "1F1B",
        "bfloat16",
        "eager",
        "tokenizer",
    ),
)
TOML_VALUES = (
    *(
        "1979-05-27",
        "1979-05-27T07:32:00Z",
        "07:32:00",
        "{}",
        "{a = 1}",
        "[]",
        "[[]]",
        "[1, 'a']",
        "[[[[1]]]]",
        "''",
        '""',
    ),
    *(
        "'''a\nb'''",
        "[1, 2",
        "{",
        "tru",
        "[" * 2000,
        "[" * 2000 + "]" * 2000,
        '"\\ud800"',
        '"\\u0000"',
        '"\\x41"',
        "'\x7f'",
    ),
)


class Fuzzer:
    """Makes cases from a seed in a folder of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.shipped = [path.read_text() for path in sorted((REPO / "train_configs").glob("*.toml"))]
        (folder / "rows.jsonl").write_bytes((ASSETS / "arithmetic.jsonl").read_bytes())
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to("loop")
        self.good = (
            *("--model.tokenizer_path", str(ASSETS / "tokenizer"), "--data.path", str(folder / "rows.jsonl")),
            *("--model.flavor", "debug"),
        )

    def text(self) -> str:
        pick = self.random.random()
        if pick < 0.5:
            return self.random.choice(TEXTS)
        if pick < 0.8:
            return self.random.choice(NUMBERS)
        kinds = (range(32), range(127, 160), range(32, 127), range(0xD7F0, 0xE010), range(0x1F600, 0x1F610))
        return "".join(chr(self.random.choice(self.random.choice(kinds))) for _ in range(self.random.randrange(1, 12)))

    def plausible(self, name: str) -> str:
        """A value that may be right, as a command line has it."""
        key = KEYS[name]
        if name == "data.source":
            return "x"
        kind = get_args(key.type)[0] if get_origin(key.type) is tuple else key.type
        if key.metadata["choices"]:
            return self.random.choice(key.metadata["choices"])
        choices = {
            bool: ("true", "false"),
            int: ("1", "2", "4", "0", "-1"),
            float: ("1", "0.5", "1e-3", "0"),
            str: ("", "q"),
        }
        return self.random.choice((*choices[kind], str(self.folder / "rows.jsonl")) if kind is str else choices[kind])

    def value(self) -> str:
        """As TOML writes it, well or not."""
        kinds: tuple[Callable[[], str], ...] = (
            lambda: self.random.choice(NUMBERS),
            lambda: self.random.choice(TOML_VALUES),
            lambda: json.dumps(self.text()),
            lambda: json.dumps(self.text(), ensure_ascii=False),
            lambda: self.random.choice(("true", "false", self.text())),
            lambda: f"[{', '.join(self.value() for _ in range(self.random.randrange(4)))}]",
        )
        return self.random.choice(kinds)()

    def lines(self) -> str:
        """Sections of random keys and values."""
        found: list[str] = []
        for _ in range(self.random.randrange(1, 5)):
            name = self.random.choice(list(KEYS))
            section, key = name.split(".")
            if name == "data.source":
                keys = [field.name for field in fields(SourceConfig)]
                path = json.dumps(str(self.folder / "rows.jsonl"))
                given = [f"path = {path}"] if self.random.random() < 0.7 else []
                given += [f"{k} = {self.value()}" for k in self.random.sample(keys[1:], self.random.randrange(3))]
                found.append("\n".join(["[[data.source]]", *given, ""]))
                continue
            if self.random.random() < 0.1:
                foreign = self.random.choice(FOREIGN)
                section, _, key = foreign.rpartition(".")
                found.insert(0, f"{json.dumps(key)} = {self.value()}\n") if not section else found.append(
                    f"[{section}]\n{json.dumps(key)} = {self.value()}\n"
                )
            if self.random.random() < 0.7:
                value = self.plausible(name)
                found.append(
                    f"[{section}]\n{key} = {value if KEYS[name].type in (bool, int, float) else json.dumps(value)}\n"
                )
                continue
            section = self.random.choice((section, section, section, json.dumps(self.text())))
            key = self.random.choice((key, key, key, key, json.dumps(self.text())))
            found.append(f"[{section}]\n{key} = {self.value()}\n")
        return "".join(found)

    def mutated(self, content: bytes) -> bytes:
        data = bytearray(content)
        for _ in range(self.random.choice((1, 1, 2, 5, 20))):
            place, size = self.random.randrange(len(data) + 1), self.random.randrange(1, 12)
            change = self.random.randrange(4)
            if change == 0:
                del data[place : place + size]
            elif change == 1:
                data[place:place] = self.random.randbytes(size)
            elif change == 2:
                data[place:place] = self.random.choice((*NUMBERS, *TEXTS)).encode("utf-8", "surrogatepass")
            else:
                data[place:place] = data[self.random.randrange(len(data) + 1) :][:200]
        return bytes(data)

    def file(self) -> list[str]:
        """A config file that was written or mutated, on top of one that is sound."""
        text = self.lines() if self.random.random() < 0.6 else self.random.choice(self.shipped)
        text = text.replace('"../tests/assets', f'"{ASSETS}')
        if self.random.random() < 0.2:
            text = f"base = {self.value()}\n" + text
        content = text.encode("utf-8", "surrogatepass")
        (self.folder / "x.toml").write_bytes(self.mutated(content) if self.random.random() < 0.3 else content)
        return ["--job.config_file", str(self.folder / "x.toml"), *self.good]

    def odd_file(self) -> list[str]:
        """A config file of another kind or name."""
        names = ("fifo", "loop", ".", "gone.toml", "/dev/null", "/dev/zero", "/dev/fd/0", *TEXTS)
        path = self.random.choice(names)
        return ["--job.config_file", os.path.join(self.folder, path), *self.good]

    def command_line(self) -> list[str]:
        """Options given well and badly, on top of a sound command line, which may lose some words."""
        words = list(self.good) if self.random.random() < 0.9 else []
        for _ in range(self.random.randrange(1, 5)):
            key = self.random.choice(list(KEYS))
            value = self.text() if self.random.random() < 0.25 else self.plausible(key)
            option = [f"--{key}={value}"] if self.random.random() < 0.5 else [f"--{key}", value]
            odd = (
                option * 2,
                [value],
                [f"-{key}", value],
                [key, value],
                [f"--{key}"],
                [f"--{value}"],
                [*option, value],
            )
            words += self.random.choice(odd) if self.random.random() < 0.25 else option
            if self.random.random() < 0.2:
                words += [f"--{self.random.choice(FOREIGN)}", *([self.text()] if self.random.random() < 0.8 else [])]
        if self.random.random() < 0.1:
            self.random.shuffle(words)
        return words

    def model(self) -> list[str]:
        """A folder of weights with a mutated config.json."""
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        config = to_hf_config(PRESETS["debug"])
        numbers = (
            *(10**400, -(10**400), 10**9, 10**12, 2**63, 0, -1, 1, 3, 1e308, float("nan"), float("inf")),
            "",
            None,
            [],
            {},
            True,
        )
        for _ in range(self.random.randrange(1, 4)):
            config[self.random.choice(list(config))] = self.random.choice(numbers)
        content = json.dumps(config).encode()
        (folder / "config.json").write_bytes(self.mutated(content) if self.random.random() < 0.3 else content)
        degree = self.random.choice(("1", "2", "100000000", str(2**31 - 1)))
        kind = self.random.choice(("tensor", "pipeline"))
        return [
            *self.good[:4],
            "--checkpoint.initial_load_path",
            str(folder),
            f"--parallelism.{kind}_parallel_degree",
            degree,
        ]

    def case(self) -> list[str]:
        kinds = (self.file, self.file, self.command_line, self.command_line, self.model, self.odd_file)
        return self.random.choices(kinds, (4, 4, 4, 4, 3, 1))[0]()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(argv: list[str], folder: Path, world_size: int | None) -> str:
    """ "accepted" or "refused"; raises AssertionError, or whatever else the loader raises."""
    try:
        config = load_config(argv, world_size)
    except UserError as error:
        shown = printable(str(error))
        assert len(shown) < 100_000 + 20 * sum(map(len, argv)), "a message without end"
        for line in shown.splitlines():
            assert re.search(r"\[\w+\] |--\w+\.\w+|command line: |: ", line), f"names no key: {shown!r:.400}"
        return "refused"
    again = folder / "again.toml"
    again.write_text(to_toml(config), encoding="utf-8")
    back = load_config(["--job.config_file", str(again)], world_size)
    assert to_toml(back) == to_toml(config), "another config when it is read back"
    return "accepted"


def run(cases: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How the cases ended, and the reports of those that failed."""
    ends, failures = Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        fuzzer, before = Fuzzer(Path(name), seed), os.getcwd()
        os.chdir(name)
        try:
            for number in range(cases):
                argv = fuzzer.case()
                world_size = fuzzer.random.choice((1, 1, 2, None))
                try:
                    with at_most(SECONDS):
                        ends[outcome(argv, Path(name), world_size)] += 1
                except Exception:
                    ends["failed"] += 1
                    file = Path(name, "x.toml")
                    content = file.read_bytes()[:500] if file.exists() else b""
                    failures.append(f"case {number}: {argv!r:.2000}\n{content!r}\n{traceback.format_exc()[-3000:]}")
        finally:
            os.chdir(before)
    return ends, failures


def main() -> int:
    cases, seed = map(int, (*sys.argv[1:3], *("4000", "0")[len(sys.argv) - 1 :]))
    ends, failures = run(cases, seed)
    for failure in failures[:20]:
        print(printable(failure).encode(errors="backslashreplace").decode())
    print(f"{cases} cases of seed {seed}: {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
