"""Counts how many files of the package know a thing that may get a sibling: so many files the sibling would touch.

    python scripts/count_seams.py [--files] [--json]

A file knows a thing if one of its words is a name, an attribute, a keyword or a whole text in its code. `--files` lists
the files behind each number. `config` counts functions with a parameter that is the whole Config; `classes` counts
names that several modules give to a class of theirs.
"""

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "titan_mi100"
WORDS = {
    "block": """q_proj k_proj v_proj o_proj gate_proj up_proj down_proj q_norm k_norm self_attn mlp input_layernorm
        post_attention_layernorm num_attention_heads num_key_value_heads head_dim intermediate_size before_attention
        after_attention""",
    "model class": "Qwen3",
    "row": "labels positions document_ids document_ends supervised_columns input_ids",
    "axis": """pp tp dp_shard dp_replicate pipeline_parallel_degree tensor_parallel_degree data_parallel_shard_degree
        data_parallel_replicate_degree""",
    "kernel": "triton varlen flash_attn sdpa chunked eager",
}


def words_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.Constant(value=str(word)) | ast.alias(name=word):
                yield word
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                yield word


def counted() -> dict[str, list[str]]:
    """Thing -> the files, functions or classes that know it."""
    found: dict[str, list[str]] = {thing: [] for thing in (*WORDS, "config", "classes")}
    classes = Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        words = set(words_of(tree))
        for thing, known in WORDS.items():
            found[thing] += [name] if words & set(known.split()) else []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                is_whole = any(ast.unparse(each.annotation) == "Config" for each in given if each.annotation)
                found["config"] += [f"{name}:{node.name}"] if is_whole else []
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    found["classes"] = sorted(name for name, times in classes.items() if times > 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list what is behind each number")
    parser.add_argument("--json", action="store_true", help="print the lists as JSON")
    options, found = parser.parse_args(), counted()
    if options.json:
        print(json.dumps(found))
        return
    for thing, known in found.items():
        print(f"{thing:<12} {len(known):>4}", f"  {', '.join(known)}" if options.files else "")


if __name__ == "__main__":
    main()
