"""Layouts of data repositories on the hub: which files a name stands for, or why it is refused.

`python tests/hub_layouts.py` compares them with the package datasets, where it is installed: what we accept, it reads
in the same way; where we refuse, it may guess.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Layout(NamedTuple):
    """A data repository.

    Attributes:
        title: what is special about it.
        card: YAML of the card; "": there is no card.
        paths: its files besides the card.
        name: what follows OWNER/NAME.
        expected: the files, or a part of the refusal.
        is_converted: named at refs/convert/parquet, which datasets cannot be asked for in a folder.
    """

    title: str
    card: str
    paths: tuple[str, ...]
    name: str
    expected: tuple[str, ...] | str
    is_converted: bool = False


def configs(*entries: str) -> str:
    return "configs:\n" + "".join(f"- config_name: {entry}\n" for entry in entries)


TWO = ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet")
MAIN = "main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*"
SOCRATIC = "socratic\n  data_files:\n  - split: train\n    path: socratic/train-*"
SHARDS = tuple(f"data/train-0000{i}-of-00003.parquet" for i in range(3))
PUSHED = configs("default\n  data_files:\n  - split: train\n    path: data/train-*")
DEEP = configs("a\n  data_files: '**/*.jsonl'")

LAYOUTS = [
    Layout("two configs, one named", configs(MAIN, SOCRATIC), TWO, ":main", (TWO[0],)),
    Layout("two configs, none named", configs(MAIN, SOCRATIC), TWO, "", "has several configs; name one of main, s"),
    Layout("two configs, a split", configs(MAIN, SOCRATIC), TWO, ":main[test]", (TWO[1],)),
    Layout("two configs, another split", configs(MAIN, SOCRATIC), TWO, ":main[dev]", "has no split 'dev', but tr"),
    Layout("an unknown config", configs(MAIN, SOCRATIC), TWO, ":mian", "has no config 'mian'; name one"),
    Layout("default: true", configs(MAIN, SOCRATIC + "\n  default: true"), TWO, "", (TWO[2],)),
    Layout("a config called default", configs(SOCRATIC, MAIN.replace("main\n", "default\n", 1)), TWO, "", (TWO[0],)),
    Layout(
        "two defaults", configs(MAIN + "\n  default: true", SOCRATIC + "\n  default: true"), TWO, "",
          "has several configs"
    ),
    Layout("one config, not named", configs(SOCRATIC), TWO, "", (TWO[2],)),
    Layout("pushed by datasets", PUSHED, SHARDS, "", SHARDS),
    Layout("data_files as a text", configs("a\n  data_files: rows.jsonl"), ("rows.jsonl", "x.jsonl"),
        "", ("rows.jsonl",)),
    Layout(
        "data_files as a list",
        configs("a\n  data_files:\n  - b.jsonl\n  - a.jsonl"),
        ("a.jsonl", "b.jsonl", "c.jsonl"), "", ("b.jsonl", "a.jsonl"),
    ),
    Layout(
        "a split with several paths",
        configs("a\n  data_files:\n  - split: train\n    path:\n    - x/*.jsonl\n    - y.jsonl"),
        ("x/1.jsonl", "x/2.jsonl", "x/z/3.jsonl", "y.jsonl"), "", ("x/1.jsonl", "x/2.jsonl", "y.jsonl"),
    ),
    Layout("any folders", DEEP, ("r.jsonl", "x/1.jsonl", "x/z/3.jsonl", "n.csv"), "", ("r.jsonl", "x/1.jsonl",
        "x/z/3.jsonl")),
    Layout("hidden files", DEEP, ("r.jsonl", ".git/1.jsonl", "__x__/3.jsonl"), "", ("r.jsonl",)),
    Layout("a class of characters", configs("a\n  data_files: 'x[12].jsonl'"), ("x1.jsonl", "x2.jsonl", "x3.jsonl"),
        "", ("x1.jsonl", "x2.jsonl")),
    Layout("data_dir", configs("a\n  data_dir: en", "b\n  data_dir: de"), ("en/train.jsonl", "de/train.jsonl"),
        ":b", ("de/train.jsonl",)),
    Layout(
        "data_dir and data_files", configs("a\n  data_dir: en\n  data_files: '*.jsonl'"), ("1.jsonl", "en/2.jsonl"), "",
        ("en/2.jsonl",),
    ),
    Layout("a card without configs", "license: mit\n", ("train.jsonl", "test.jsonl"), "", ("train.jsonl",)),
    Layout("no card", "", ("train.jsonl", "validation.jsonl"), "[validation]", ("validation.jsonl",)),
    Layout("no card, in data/", "", ("data/train.parquet", "data/test.parquet"), "[test]", ("data/test.parquet",)),
    Layout("no card, shards", "", (*SHARDS, "README.txt"), "", SHARDS),
    Layout("no card, folders", "", ("train/b.jsonl", "train/a.jsonl", "test/a.jsonl"), "", ("train/a.jsonl",
        "train/b.jsonl")),
    Layout("packed", "", ("train.jsonl.gz", "test.jsonl.zst"), "", ("train.jsonl.gz",)),
    Layout("no such split", "", ("train.jsonl",), "[test]", "has no split 'test', but train; write"),
    Layout("a shard is missing", "", SHARDS[:2], "", "has files that are not called train, validation, test"),
    Layout("other words for splits", "", ("train.jsonl", "dev.jsonl"), "", "each complete: dev.jsonl; fetch it"),
    Layout("a word in the name", "", ("train_large.jsonl", "train.jsonl"), "", ": train_large.jsonl; fetch it"),
    Layout("any name", "", ("rows.jsonl",), "", ": rows.jsonl; fetch it"),
    Layout("two formats", "", ("train.jsonl", "train.parquet"), "", ": train.jsonl, train.parquet; fetch it"),
    Layout("two configs without a card", "", TWO, "", "main/test-00000-of-00001.parquet"),
    Layout("hashes in names", "", ("data/train-00000-of-00001-0123456789abcdef.parquet",), "", "are not called"),
    Layout("csv", "", ("train.csv", "test.csv"), "", "[train] is train.csv, which is neither JSON nor parquet"),
    Layout("csv by the card", configs("a\n  data_files: x.csv"), ("x.csv",), "", "[train] is x.csv, which is neither"),
    Layout("a script", "", ("rows.py", "train.jsonl"), "", "OWNER/rows:CONFIG@refs/convert/parquet"),
    Layout("out of the repository", configs("a\n  data_files: ../x/*.jsonl"), ("a.jsonl",), "",
        "outside the repository"),
    Layout("an absolute path", configs("a\n  data_files: /etc/x.jsonl"), ("a.jsonl",), "", "outside the repository"),
    Layout("a URL", configs("a\n  data_files: https://h/x.jsonl"), ("a.jsonl",), "", "outside the repository"),
    Layout("data_dir leaves it", configs("a\n  data_dir: ../../x"), ("a.jsonl",), "", "outside the repository"),
    Layout("a pattern without a file", configs("a\n  data_files: y*.jsonl"), ("a.jsonl",), "",
        "matches no file; it has a.jsonl"),
    Layout("no list of configs", "configs: main\n", ("train.jsonl",), "", "are no list of entries"),
    Layout("data_files as a number", configs("a\n  data_files: 3"), ("train.jsonl",), "", "are not understood: 3"),
    Layout("a split twice",
        configs("a\n  data_files:\n  - split: train\n    path: a.jsonl\n  - split: train\n    path: b.jsonl"),
           ("a.jsonl", "b.jsonl"), "", "are not understood"),
    Layout("converted", "", ("default/train/0000.parquet", "default/train/0001.parquet"), "@refs/convert/parquet",
           ("default/train/0000.parquet", "default/train/0001.parquet"), True),
    Layout("converted, a config", "", ("main/train/0000.parquet", "b/train/0000.parquet"), ":main@refs/convert/parquet",
           ("main/train/0000.parquet",), True),
    Layout("converted in part", "", ("default/partial-train/0000.parquet",), "@refs/convert/parquet",
        "are not called", True),
]  # fmt: skip


def by_datasets(layout: Layout, config: str, split: str) -> tuple[str, ...] | str:
    """The files that datasets reads, or its refusal."""
    import datasets

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "rows")
        for path in (*layout.paths, *(["README.md"] if layout.card else [])):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(f"---\n{layout.card}---\n" if path == "README.md" else "{}\n")
        try:
            builder = datasets.load_dataset_builder(
                str(folder), name=config or None, cache_dir=str(Path(root, "cache"))
            )
            files = builder.config.data_files[split]
            return tuple(str(Path(file).relative_to(folder.resolve())) for file in files)
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


if __name__ == "__main__":
    differ = 0
    for layout in LAYOUTS:
        config, split = layout.name.partition("[")[0].lstrip(":"), layout.name.partition("[")[2].rstrip("]") or "train"
        if layout.is_converted:
            continue
        theirs = by_datasets(layout, config, split)
        is_refused = isinstance(layout.expected, str)
        if not is_refused and theirs != layout.expected:
            differ += 1
            print(f"DIFFERS {layout.title}: {layout.expected} here, {theirs} by datasets")
        elif is_refused:
            print(
                f"{layout.title}: refused here; datasets {'refuses, ' if isinstance(theirs, str) else 'reads '}{theirs}"
            )
    sys.exit(differ > 0)
