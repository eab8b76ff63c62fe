"""What is wrong with a setting, as data: the message is made of it once, where it is printed. Imports no torch."""

from collections.abc import Sequence
from typing import NamedTuple

from titan_mi100.errors import UserError


class Problem(NamedTuple):
    """What is wrong with a setting.

    Attributes:
        key: "section.key"; "": a file's, or the whole config's.
        text: what is wrong and the remedy; it goes on behind the key.
        about: further keys that the check has read. If one of these was refused, this problem may only follow from it.
    """

    key: str
    text: str
    about: tuple[str, ...] = ()

    def at(self, where: str) -> str:
        """The message, with the place of the setting in front."""
        return where + self.text if self.text.startswith((":", ",")) else f"{where} {self.text}"

    def __str__(self) -> str:
        return self.at("[{}] {}".format(*self.key.split("."))) if self.key else self.text


class ConfigError(UserError):
    """Problems of settings. Its text has a line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)
