"""Are certificates what they say? Verdicts are computed again from the raw numbers, pages from the certificate."""

from collections.abc import Sequence
from pathlib import Path

from titan_mi100.certificate.form import Certificate, read
from titan_mi100.certificate.page import page
from titan_mi100.certificate.verdicts import problems_of
from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain


def check(paths: Sequence[Path]) -> list[tuple[Path, Certificate]]:
    """The certificates in folders and files.

    Raises:
        UserError: all that is wrong, a line each; or there is none.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"{', '.join(map(str, paths))}: no certificate (*.json) is there; name a folder that has one")
    found, problems = [], []
    for file in files:
        try:
            found.append((file, checked(file)))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return found


def checked(file: Path) -> Certificate:
    """A certificate whose verdicts are those of its numbers, and whose page, if one is beside it, is its own.

    Raises:
        UserError: it is not.
    """
    certificate = read(file)
    problems = problems_of(certificate, str(file))
    beside = file.with_suffix(".md")
    if beside.exists() and read_plain(beside, LARGEST_CONFIG) != page(certificate).encode():
        problems.append(f"{beside}: is not the page of {file.name}; make both again, or remove it")
    if problems:
        raise UserError("\n".join(problems))
    return certificate
