"""Which files of the hub a name stands for: of data by the card and the names, of models by the names."""

from importlib.util import find_spec

import pytest
from hub_layouts import LAYOUTS, Layout, by_datasets

from titan_mi100.config.hub import hub_name
from titan_mi100.errors import UserError
from titan_mi100.files.hub_files import (
    ADAPTER,
    MODEL,
    TOKENIZER,
    TRAIN,
    model_files,
    one_pattern,
    parse_name,
    split_files,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.title)
def test_a_data_repository_is_read_as_its_card_says_or_refused(layout: Layout) -> None:
    import yaml

    name, card = parse_name(f"OWNER/rows{layout.name}"), (yaml.safe_load(layout.card or "{}") or {}).get("configs")
    paths = [*layout.paths, "README.md", ".gitattributes"]
    assert name is not None
    if isinstance(layout.expected, str):
        with pytest.raises(UserError) as refusal:
            split_files(name, card, paths, TRAIN)
        assert layout.expected in str(refusal.value)
    else:
        assert tuple(split_files(name, card, paths, TRAIN)) == layout.expected


@pytest.mark.skipif(not find_spec("datasets"), reason="datasets is not installed")
def test_what_is_accepted_is_read_by_datasets_in_the_same_way() -> None:
    for layout in LAYOUTS:
        if isinstance(layout.expected, tuple) and not layout.is_converted and (name := parse_name(f"O/r{layout.name}")):
            assert by_datasets(layout, name.config, name.split or TRAIN) == layout.expected, layout.title


QWEN = ("config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
OTHERS = ("README.md", "LICENSE", ".gitattributes", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "src/x.py")


def test_only_the_files_of_a_model_are_fetched() -> None:
    no_index = dict[str, object]
    one = model_files([*QWEN, *OTHERS, "model.safetensors", "chat_template.jinja"], MODEL, no_index)
    assert {*one} == {*QWEN, "model.safetensors", "chat_template.jinja"}
    paths = [*QWEN, *OTHERS, *SHARDS, INDEX, "consolidated.safetensors", "additional_chat_templates/tool.jinja"]
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
    assert {*model_files(paths, MODEL, lambda: index)} == {
        *QWEN,
        *SHARDS,
        INDEX,
        "additional_chat_templates/tool.jinja",
    }
    assert {*model_files(paths, TOKENIZER, no_index)} == {*QWEN, "additional_chat_templates/tool.jinja"} - {
        "generation_config.json"
    }
    adapter = [*OTHERS, "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert {*model_files(adapter, ADAPTER, no_index)} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }


def test_pickles_are_not_fetched() -> None:
    with pytest.raises(UserError, match=r"has no model.safetensors, only pytorch_model.bin, tf_model.h5; name a repo"):
        model_files([*QWEN, *OTHERS], MODEL, dict)
    with pytest.raises(UserError, match=r"has no adapter_model.safetensors, only adapter_model.bin; "):
        model_files(["adapter_config.json", "adapter_model.bin"], ADAPTER, dict)


def test_a_name_has_a_config_a_revision_and_a_split() -> None:
    assert parse_name("openai/gsm8k:main@v1.0[test]") == ("openai/gsm8k", "main", "v1.0", "test")
    assert parse_name("a/b@refs/convert/parquet") == ("a/b", "", "refs/convert/parquet", "")
    for text in (
        "a",
        "a/b/c",
        "/a/b",
        "./a/b",
        "../a/b",
        "a/b[",
        "a/b:",
        "a/b@",
        "a/b@..",
        "a/b@/x",
        "a/b@x/../y",
        "a b/c",
        "https://h/b",
        "a/*.jsonl",
    ):
        assert parse_name(text) is None, text


def test_many_shards_are_one_pattern_if_it_matches_no_other_file() -> None:
    shards = [f"d/train-{i:05}-of-00012.parquet" for i in range(12)]
    assert one_pattern(shards, [*shards, "d/test-00000-of-00001.parquet"]) == ["d/train-000*-of-00012.parquet"]
    assert one_pattern(shards[1:], shards) == shards[1:]
    assert one_pattern(["a/1.json", "b/1.json"], ["a/1.json", "b/1.json"]) == ["a/1.json", "b/1.json"]
    assert one_pattern(["a.json"], ["a.json", "b.json"]) == ["a.json"]
    assert one_pattern(["d/.a.json", "d/b.json"], ["d/.a.json", "d/b.json"]) == ["d/.a.json", "d/b.json"]


def test_what_exists_or_nearly_is_a_path(tmp_path) -> None:
    (tmp_path / "Qwen/Qwen3-4B").mkdir(parents=True)
    assert hub_name("Qwen/Qwen3-4B", tmp_path) is None
    assert hub_name("Qwen/Qwen3-4b", tmp_path) is None  # misspelt
    assert hub_name("Qwen/Llama-0.1B", tmp_path) is not None
    assert hub_name("Qwen/Qwen3-4B@v1", tmp_path) is not None
    for text in ("data/rows", "models/Qwen3-0.6B", "me/train.jsonl", "me/w.safetensors", "outputs/run"):
        assert hub_name(text, tmp_path) is None, text
