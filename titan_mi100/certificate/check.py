"""Checks certificates: recomputes the verdicts from the raw numbers, and the Markdown page from the certificate."""

from collections.abc import Sequence
from pathlib import Path

from titan_mi100.certificate.form import Certificate, read
from titan_mi100.certificate.page import page
from titan_mi100.certificate.verdicts import problems_of
from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain


def check(paths: Sequence[Path]) -> list[tuple[Path, Certificate]]:
    """Read and check the certificates in folders and files.

    Raises:
        UserError: all problems, one line each; or no certificate was found.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"{', '.join(map(str, paths))}: has no certificate (*.json); name a folder that has one")
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
    """Read a certificate and check that its verdicts follow from its numbers, and that a page beside it matches.

    Raises:
        UserError: they do not.
    """
    certificate = read(file)
    problems = problems_of(certificate, str(file))
    beside = file.with_suffix(".md")
    if beside.exists() and read_plain(beside, LARGEST_CONFIG) != page(certificate).encode():
        problems.append(f"{beside}: is not the page of {file.name}; make both again, or remove it")
    if problems:
        raise UserError("\n".join(problems))
    return certificate
