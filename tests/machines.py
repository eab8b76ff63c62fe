"""Machines that are not at hand: tests/fixtures/machines/*.json as folders with the kernel's files.

A file has: `synthetic` (always true: no such machine was read), `what` it is, the published `reports` that it is made
from, `files` and `links` below the root, the owning `groups` of device files, which of them are `closed` to the user,
`shm_free`, `environ`, what `torch` says, the `expected` state of each check, and which of them must stop a start
(`stops`). With `base`, another machine's, of which it states the differences only.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from conftest import REPO

from titan_mi100.files.schema import validated
from titan_mi100.launch.machine_facts import Facts, System, read
from titan_mi100.launch.torch_build import Torch

FOLDER = REPO / "tests" / "fixtures" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    machine = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if "base" not in machine:
        return {"stops": [], **machine}
    base = load(machine["base"])
    merged = {key: {**base[key], **machine.get(key, {})} for key in ("files", "environ", "expected")}
    return {**base, **machine, **merged}


def build(machine: dict[str, Any], root: Path) -> System:
    """Make the machine's files below `root`; a file whose content is None is left out."""
    for path, content in machine["files"].items():
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"{content}\n")
    for path, target in machine["links"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(root / target)

    def group_of(path: Path) -> str:
        path.stat()  # raises where there is no file
        return str(machine["groups"][str(path.relative_to(root))])

    def may_use(path: Path) -> bool:
        return str(path.relative_to(root)) not in machine["closed"]

    free_bytes, lacks = (lambda path: int(machine["shm_free"])), tuple(machine.get("cannot_compile", ("", "")))
    return System(root, machine["environ"], may_use, group_of, free_bytes, lambda environ: lacks)


def facts_of(machine: dict[str, Any], root: Path, processes: int | None = None) -> Facts:
    """What the doctor reads there, with what the machine's torch says."""
    return replace(read(build(machine, root), processes), torch=validated(machine["torch"], Torch))
