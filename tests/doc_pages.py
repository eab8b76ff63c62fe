"""What README.md and docs/ show: fenced blocks, the commands in them, links and headings.

The rules for a block: `sh` holds commands, `toml` a config or a part of one, `jsonl` rows of data; `text` or no
language is output; `python` and `yaml` are files of other trainers. A block is not run if the line above it is
`<!-- not run by our tests: what it needs -->`, which a reader of the page does not see. Output that begins with `$ `
and a command, and has lines with ERROR, shows a mistake: the command must be refused with these messages.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

REPO = Path(__file__).parents[1]
LANGUAGES = ("sh", "toml", "jsonl", "text", "", "python", "yaml")
MARK = "not run by our tests"

_FENCE = re.compile(
    rf"^(?P<mark> *<!-- {MARK}: \w[^\n]* -->\n)?(?P<indent> *)(?P<ticks>```)(?P<language>\S*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.S | re.M,
)
_OURS = re.compile(
    r"(titan-mi100|(\./)?run_train\.sh|python -m titan_mi100\S*|(python (scripts|tests)|(\./)?scripts)/\S+\.(py|sh)) "
)
_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_MACHINE = re.compile(r"(?<![\w.~])/(?:work|tmp|home|root|Users|models)/[^\s`)\"]*")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of the opening fence
    is_marked: bool = False  # not run by our tests


@dataclass(frozen=True)
class Command:
    """One command of a `sh` block.

    Attributes:
        words: program and arguments.
        variables: those that are set before the program, NAME=value.
        output: the file that standard output is redirected to; "": none.
        is_marked: not run by our tests.
    """

    where: str
    words: list[str]
    variables: dict[str, str]
    output: str
    is_marked: bool


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return os.path.relpath(self.path, REPO)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for fence in _FENCE.finditer(self.text):
            text = re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.M)  # in a list it is indented
            line = self.text.count("\n", 0, fence.start("ticks")) + 1
            found.append(Block(fence["language"], text, line, bool(fence["mark"])))
        return found

    @cached_property
    def prose(self) -> str:
        """The text without fenced blocks and code spans, in which brackets are no links."""
        return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", _FENCE.sub("", self.text), flags=re.S)

    def inline_commands(self) -> list[Command]:
        """Commands of ours in code spans, with words that stand for others (N, HOST:PORT, ...) as they are written."""
        text, found = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), self.text), []
        for span in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", text):
            if _OURS.match(span[1]):
                where = f"{self.name}:{text.count(chr(10), 0, span.start()) + 1}: {span[1]}"
                found.append(Command(where, shlex.split(span[1]), {}, "", True))
        return found

    def links(self) -> list[str]:
        return [markdown or html for markdown, html in _LINK.findall(self.prose)]

    def anchors(self) -> set[str]:
        """Of the headings, as GitHub makes them."""
        found: set[str] = set()
        for heading in re.findall(r"^#{1,6} (.+)$", _FENCE.sub("", self.text), re.M):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
            base = name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            number = 0
            while name in found:
                number += 1
                name = f"{base}-{number}"
            found.add(name)
        return found

    def broken_links(self) -> list[str]:
        wrong = []
        for link in self.links():
            path, _, anchor = unquote(link).partition("#")
            target = Page(Path(os.path.normpath(self.path.parent / path)) if path else self.path)
            if re.match(r"[a-z]+:", link):
                continue
            if not target.path.exists():
                wrong.append(f"{link}: {target.name} does not exist")
            elif anchor and target.path.suffix == ".md" and anchor not in target.anchors():
                wrong.append(f"{link}: {target.name} has no such heading")
        return wrong

    def machine_paths(self) -> list[str]:
        """Absolute paths that exist on somebody's machine only."""
        return [found[0] for found in _MACHINE.finditer(re.sub(r"https?://\S+", "", self.text))]

    def mistakes(self) -> Iterator[tuple[Command, list[str]]]:
        """Commands that are refused, and the messages."""
        for block in self.blocks:
            first, _, rest = block.text.partition("\n")
            errors = [line.partition("ERROR ")[2] for line in rest.splitlines() if "ERROR " in line]
            if block.language in ("", "text") and first.startswith("$ ") and errors:
                [command] = _commands(self.name, Block("sh", first.removeprefix("$ "), block.line))
                yield command, errors

    def commands(self) -> Iterator[Command]:
        """Raises ValueError: a line is no command that a shell reads."""
        for block in self.blocks:
            if block.language == "sh":
                yield from _commands(self.name, block)


def pages() -> list[Page]:
    found = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
    found.append(REPO / "train_configs" / "README.md")
    return [Page(path) for path in found]


def _commands(page: str, block: Block) -> Iterator[Command]:
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            continue
        where = f"{page}:{block.line}: {line.strip()}"
        for words in _simple_commands(where, line):
            yield _command(where, words, block.is_marked)


def _simple_commands(where: str, line: str) -> Iterator[list[str]]:
    """The words of each command of a line, without what a pipe leads to."""
    line = re.sub(r"\s2>&1(?=\s|$)", "", re.sub(r"\s#\s.*$", "", line))
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    is_piped = False
    try:
        for word in [*lexer, ";"]:
            if word not in (";", "&&", "|", "&"):
                words.append(word)
                continue
            if words and not is_piped:
                yield words
            words, is_piped = [], word == "|"
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _command(where: str, words: list[str], is_marked: bool) -> Command:
    variables = {}
    while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.S)):
        variables[found[1]] = found[2]
        words = words[1:]
    output = ""
    if ">" in words:
        at = words.index(">")
        output, words = words[at + 1], words[:at] + words[at + 2 :]
    return Command(where, words, variables, output, is_marked)
