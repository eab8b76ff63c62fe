"""Damages, mixes and misuses stores of answers, and lets the real commands open them.

    python tests/damage_stores.py --work WORK [--only WORDS]     # WORK: what tests/kill_teach.py --folder has left

Each case copies a sound teacher's folder (or a run with its reference), changes it, and starts `titan-mi100 train` or
`teach`. A refusal is exit code 2 with one message that says what to do, and no traceback. Where the remedy is to make a
part again, that is tried, and must give the sound folder. Half an hour on two busy cores.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from kill_teach import CONFIG, PROGRAM, ROWS, content, environment, teach

STUDENT = [
    "--objective.name",
    "distill",
    "--training.steps",
    "1",
    "--checkpoint.export_hf",
    "false",
    "--validation.freq",
    "0",
]
STUDENT += ["--nproc_per_node", "1", "--validation.prompts", "0", "--lr_scheduler.warmup_steps", "-1"]
PAIRS = [
    *CONFIG,
    "--data.path",
    "train_configs/debug/pairs.jsonl",
    "--objective.name",
    "preference",
    "--training.seq_len",
    "128",
]
PAIRS += [*STUDENT[4:], "--checkpoint.initial_load_path", "model/checkpoint/step-3"]
Change = Callable[[Path], object]


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.safetensors"))


def forge(change: Callable[[dict[str, np.ndarray]], object], number: int = 0, **metadata: str) -> Change:
    """Change a part's arrays and give it the name and the metadata of a sound one."""

    def damage(folder: Path) -> None:
        path = parts(folder)[number]
        with safetensors.safe_open(path, "np") as file:
            arrays, about = {name: file.get_tensor(name).copy() for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
        change(arrays)
        data = safetensors.numpy.save(arrays, about | metadata)
        path.unlink()
        path.with_name(f"{path.name[:11]}{hashlib.sha256(data).hexdigest()[:16]}.safetensors").write_bytes(data)

    return damage


def told(**change: Any) -> Change:
    def damage(folder: Path) -> None:
        path = folder / "store.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return damage


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def at(name: str, place: Any, value: Any) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays[name].__setitem__(place, value)


def made(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays.update({name: make(arrays[name])})


def swapped_rows(arrays: dict[str, np.ndarray]) -> None:
    """Two documents of equal length change places, with all that is theirs but the log p."""
    tokens = arrays["tokens"].tolist()
    one, other = next((i, j) for i in range(len(tokens)) for j in range(i) if tokens[i] == tokens[j])
    arrays["documents"][[one, other]] = arrays["documents"][[other, one]]


def truncated(folder: Path) -> None:
    os.truncate(parts(folder)[0], parts(folder)[0].stat().st_size // 2)


def named_by_content(data: bytes, folder: Path) -> None:
    path = parts(folder)[0]
    path.unlink()
    path.with_name(f"part-00000-{hashlib.sha256(data).hexdigest()[:16]}.safetensors").write_bytes(data)


def copied(name: str) -> Change:
    return lambda folder: shutil.copy(parts(folder)[0], folder / name)


def renumbered(folder: Path) -> None:
    first, second, *_ = parts(folder)
    first.rename(folder / "aside")
    second.rename(folder / second.name.replace("00001", "00000"))
    (folder / "aside").rename(folder / first.name.replace("00000", "00001"))


def old_format(folder: Path) -> None:
    told()(folder)
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(
        json.dumps({key: value for key, value in about.items() if key not in ("format", "packing")})
    )


LINK = Path("elsewhere")
TEACHER: dict[str, Change] = {  # what becomes of a complete teacher's folder, which a student then opens
    "an id of the head's padding": forge(at("ids", (5, 0), 100_000)),
    "an id of int32's end": forge(at("ids", (5, 7), 2**31 - 1)),
    "a negative id": forge(at("ids", (5, 0), -1)),
    "the last id of a row twice": forge(lambda a: at("ids", (9, 6), a["ids"][9, 7])(a)),
    "all ids zero": forge(made("ids", np.zeros_like)),
    "log p in base 2": forge(made("log_p", lambda x: x * np.float32(0.3))),
    "probabilities, not logarithms": forge(made("log_p", np.exp)),
    "negative zero and up": forge(at("log_p", (2, 0), 0.01)),
    "NaN in the last token of the last part": forge(at("log_p", (-1, -1), np.nan), -1),
    "minus infinity": forge(at("log_p", (3, 7), -np.inf)),
    "ids sorted, log p not": forge(made("log_p", lambda x: np.sort(x, 1))),
    "one token less": forge(lambda a: a.update(ids=a["ids"][1:], log_p=a["log_p"][1:])),
    "Fortran's order of ids": forge(made("ids", lambda x: x.T.copy())),
    "uint32 ids": forge(made("ids", lambda x: x.astype(np.uint32))),
    "double log p": forge(made("log_p", lambda x: x.astype(np.float64))),
    "bool documents": forge(made("documents", lambda x: x > 0)),
    "no documents at all": forge(lambda a: a.update({n: a[n][:0] for n in a})),
    "twice the documents": forge(lambda a: a.update({n: np.concatenate([a[n], a[n]]) for n in a})),
    "two documents of one length swapped": forge(swapped_rows),
    "documents of the next part": forge(made("documents", lambda x: x + 7)),
    "a document beyond": forge(at("documents", -1, 10**9)),
    "tokens negative": forge(at("tokens", 0, -5)),
    "tokens of 2^62": forge(at("tokens", 0, 2**62)),
    "a zero-dimensional array": forge(made("tokens", lambda x: np.array(3))),
    "another array more": forge(lambda a: a.update(hidden=np.zeros((4, 4), np.float32))),
    "the sums of a reference": forge(lambda a: (a.pop("ids"), a.pop("log_p"), a.update(sums=-1.0 * a["tokens"]))),
    "cut in the middle": truncated,
    "an empty part": lambda folder: parts(folder)[0].write_bytes(b""),
    "a header of gigabytes": lambda folder: named_by_content((1 << 40).to_bytes(8, "little") + b"{}", folder),
    "a header that is no JSON": lambda folder: named_by_content((4).to_bytes(8, "little") + b"abcd", folder),
    "no metadata": lambda folder: named_by_content(safetensors.numpy.save({"a": np.zeros(1)}), folder),
    "text in the place of a part": lambda folder: named_by_content(b"not a tensor at all", folder),
    "parts renumbered": renumbered,
    "a part missing": lambda folder: parts(folder)[1].unlink(),
    "all parts missing": lambda folder: [path.unlink() for path in parts(folder)],
    "a part more": copied(f"part-00099-{'0' * 16}.safetensors"),
    "a part of a name in capitals": copied(f"part-00000-{'A' * 16}.safetensors"),
    "a link to the same part": lambda folder: (folder / "part-00000-0000000000000000.safetensors").symlink_to(
        parts(folder)[0]
    ),
    "store.json of more rows": told(rows=10_000),
    "store.json of 2^62 rows": told(rows=2**62),
    "store.json with k as a text": told(k="8"),
    "store.json with another k": told(k=4),
    "store.json with k of 2^40": told(k=2**40),
    "store.json of other weights": told(weights="another"),
    "store.json of another dtype": told(dtype="bfloat16"),
    "store.json as a list": lambda folder: (folder / "store.json").write_text("[]"),
    "store.json with NaN": lambda folder: (folder / "store.json").write_text('{"format": NaN}'),
    "store.json empty": lambda folder: (folder / "store.json").write_text(""),
    "store.json a folder": lambda folder: ((folder / "store.json").unlink(), (folder / "store.json").mkdir()),
    "store.json a pipe": lambda folder: ((folder / "store.json").unlink(), os.mkfifo(folder / "store.json")),
    "store.json gone": lambda folder: (folder / "store.json").unlink(),
    "the format of before": old_format,
    "a format to come": told(format=99),
    "a format that is a text": told(format="2"),
}  # fmt: skip


REFERENCE: dict[str, Change] = {  # what becomes of the reference of a run, which is then resumed
    "a sum of NaN": forge(at("sums", 0, np.nan)),
    "a sum above zero": forge(at("sums", 3, 1.5)),
    "sums of single precision": forge(made("sums", lambda x: x.astype(np.float32))),
    "documents in another order": forge(made("documents", lambda x: x[::-1].copy())),
    "sums of half of the documents": forge(lambda a: a.update({n: a[n][: len(a[n]) // 2] for n in a})),
    "a part of a teacher": forge(lambda a: a.update(ids=np.zeros((9, 1), np.int32))),
    "a part cut": truncated,
    "store.json gone": lambda folder: (folder / "store.json").unlink(),
    "store.json of other weights": told(weights="another"),
    "the format of before": old_format,
}


def ends(work: Path, *words: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [PROGRAM, *words], cwd=work, env=environment(work), capture_output=True, text=True, timeout=300
        )
    except subprocess.TimeoutExpired:
        return 99, "HANGS"
    return done.returncode, done.stdout + done.stderr


def verdict(code: int, text: str) -> str:
    if "Traceback" in text or "unexpected error" in text:
        return "RAW ERROR"
    lines = [line for line in text.splitlines() if "ERROR" in line]
    return {2: "refused" if lines else "NO MESSAGE", 0: "ACCEPTED", 99: "HANGS"}.get(code, f"CODE {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases with these words in their name")
    parser.add_argument("--resume", action="store_true", help="open them with teach, which goes on, not with a student")
    options = parser.parse_args()
    work, sound = options.work.absolute(), options.work.absolute() / "undisturbed"
    if not (work / "train_configs").exists():
        (work / "train_configs").symlink_to(Path(__file__).parents[1] / "train_configs")
    counts: dict[str, int] = {}

    def note(what: str, got: str, text: str, fine: bool) -> None:
        counts["fine" if fine else "WRONG"] = counts.get("fine" if fine else "WRONG", 0) + 1
        errors = [line.partition("ERROR ")[2] for line in text.splitlines() if "ERROR " in line]
        print(f"{'ok   ' if fine else 'WRONG'} {what}: {got}: {(errors or [''])[0][:230]}", flush=True)

    out, run = work / "damaged", work / "student"
    for what, change in TEACHER.items():
        if options.only not in what:
            continue
        for folder in (out, run):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, out, ignore=shutil.ignore_patterns("checkpoint", "*.log", ".lock", "tensorboard"))
        change(out)
        if options.resume:
            code, text = ends(work, *teach(out))
            got, is_gap = verdict(code, text), what.endswith(("part missing", "parts missing"))
            note(f"teach: {what}", got, text, content(out) == content(sound) if is_gap else got == "refused")
            continue
        words = ["train", *CONFIG, *ROWS, *STUDENT, "--objective.teacher", str(out), "--job.run_folder", str(run)]
        code, text = ends(work, *words)
        got = verdict(code, text)
        note(what, got, text, got == "refused" and not list(run.glob("checkpoint/step-*")))
        if "; delete it, and make it again: titan-mi100 teach" in text and what.startswith(
            ("cut", "an id of", "a link")
        ):
            Path(
                next(line for line in text.splitlines() if "; delete it" in line)
                .partition("ERROR ")[2]
                .partition(": ")[0]
            ).unlink()
            code, text = ends(work, *teach(out))  # the remedy
            note(f"{what}, its remedy", f"code {code}", text, code == 0 and content(out) == content(sound))
    words = ["train", *PAIRS, "--job.run_folder"]
    if not ((work / "preferred").exists() or options.resume):
        code, text = ends(work, *words, str(work / "preferred"), "--training.steps", "1")
        assert code == 0, text
        code, text = ends(work, *words, str(run), "--training.steps", "2")
    for what, change in REFERENCE.items():
        if options.only not in what or options.resume:
            continue
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(work / "preferred", run)
        change(run / "reference")
        code, text = ends(work, *words, str(run), "--training.steps", "2")
        note(
            f"reference: {what}",
            verdict(code, text),
            text,
            verdict(code, text) == "refused" and not (run / "checkpoint" / "step-2").exists(),
        )
    print(counts)
    return 1 if "WRONG" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
