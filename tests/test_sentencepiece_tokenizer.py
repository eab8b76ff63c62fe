"""Independent reference: sentencepiece itself, on each stretch of text between special tokens."""

import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from conftest import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.bpe import BpeTokenizer
from titan_mi100.text.load import load_tokenizer, tokenizer_files
from titan_mi100.text.other import SentencePieceTokenizer

USER_DEFINED = ["<|im_start|>", "<|im_end|>", "<|im", "<|im_end|>!"]
SPECIALS = [*USER_DEFINED, "<s>", "</s>", "<added>", "<added>>"]
CONFIG = {"added_tokens_decoder": {"1000": {"content": "<added>"}, "1003": {"content": "<added>>"}}}

# spaces that are dropped or joined, what NFKC changes to less or to more, what it deletes, bytes and unknown characters
ODD = (
    " \t\n\u3000\xa0\u2581aabbtheo.,<>|_s!é\u0301\ufb01\ufdfa\u2460½Å\u212bㄱ가\u3042漢\U0001f600"
    "\u200d\u200b\x00\x01\x7f\xad\ufeff"
)
plain_text = st.lists(
    st.one_of(
        st.sampled_from(ODD),
        st.sampled_from(["the ", "  ", " cat", "hello world", "\n\n", "</", "été"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=20,
).map(lambda parts: without_specials("".join(parts)))
fuzz = settings(deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])


def without_specials(text: str) -> str:
    for special in sorted(SPECIALS, key=len):  # the shorter are parts of the longer
        text = text.replace(special, "")
    return text if not any(special in text for special in SPECIALS) else without_specials(text)


def train(**options: Any) -> bytes:
    """A tiny model, trained by sentencepiece."""
    rng = random.Random(0)
    text = "the cat sat on a mat and said hello world to every other été 子供 of this town while it rained"
    words = text.split()
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"user_defined_symbols": USER_DEFINED, "vocab_size": 350 if options.get("byte_fallback") else 90, **options},
    )
    return model.getvalue()


KEEP_ALL = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe"},
    "bpe with bytes": {"model_type": "bpe", "byte_fallback": True},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True},
    "bpe that keeps all": {"model_type": "bpe", "byte_fallback": True, **KEEP_ALL},
    "unigram that keeps spaces": {"model_type": "unigram", "byte_fallback": True, "remove_extra_whitespaces": False},
}


Load = Callable[..., Tokenizer]


def write(folder: Path, model: bytes, config: dict[str, Any] | None = None) -> Path:
    file = folder / "tokenizer.model"
    file.write_bytes(model)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def models() -> dict[str, bytes]:
    return {name: train(**options) for name, options in MODELS.items()}


@pytest.fixture
def load(models: dict[str, bytes], tmp_path: Path) -> Load:
    """Loads the model of a name, beside a config."""
    return lambda name, config=None: load_tokenizer(write(tmp_path, models[name], config))


@pytest.fixture(scope="module", params=MODELS)
def both(
    request: pytest.FixtureRequest, models: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SentencePieceTokenizer, sentencepiece.SentencePieceProcessor]:
    file = write(tmp_path_factory.mktemp("model"), models[request.param], CONFIG)
    ours = load_tokenizer(file)
    assert isinstance(ours, SentencePieceTokenizer)
    return ours, sentencepiece.SentencePieceProcessor(model_file=str(file))


def special_id(theirs: sentencepiece.SentencePieceProcessor, content: str) -> int:
    return {"<added>": 1000, "<added>>": 1003}.get(content) or theirs.piece_to_id(content)


# -- the same ids --


def test_the_bytes_of_tokens_spell_the_text(both: Any) -> None:
    ours, theirs = both
    text = "hello world <|im_end|>"
    assert b"".join(map(ours.token_bytes, ours.encode(text))).decode().replace(" ", "") == text.replace(" ", "")
    emoji = ours.encode("\U0001f600")
    if not any(map(theirs.is_unknown, emoji)):  # with byte fallback
        assert b"".join(map(ours.token_bytes, emoji)).decode().strip() == "\U0001f600"


@fuzz
@given(text=plain_text)
def test_ordinary_text_gets_the_ids_of_sentencepiece(both: Any, text: str) -> None:
    ours, theirs = both
    ids, _ = ours.encode_with_offsets(text)
    assert ours.encode(text) == ids.tolist() == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(theirs.encode(text))
    assert ours.normalize(text) == text


@fuzz
@given(texts=st.lists(plain_text, min_size=2, max_size=5), specials=st.lists(st.sampled_from(SPECIALS), min_size=4))
@example(texts=[""] * 8, specials=["<|im_end|>!", "<|im_end|>", "<|im", "<|im_start|>", "<added>>", "<added>", "</s>"])
def test_special_tokens_are_cut_out_and_the_rest_is_encoded_by_itself(
    both: Any, texts: list[str], specials: list[str]
) -> None:
    ours, theirs = both
    # a "!" or ">" would make a longer special token of the one before it
    texts = [texts[0], *(text.lstrip("!>") for text in texts[1:])]
    whole, expected, decoded = texts[0], theirs.encode(texts[0]), theirs.decode(theirs.encode(texts[0]))
    for special, text in zip(specials, texts[1:], strict=False):
        whole += special + text
        expected += [special_id(theirs, special), *theirs.encode(text)]
        decoded += special + theirs.decode(theirs.encode(text))
    ids, ends = ours.encode_with_offsets(whole)
    assert ours.encode(whole) == ids.tolist() == expected
    assert ours.decode(ids) == decoded
    assert ids.dtype == np.int32 and ends.dtype == np.int64


@fuzz
@given(text=plain_text)
def test_a_model_that_keeps_all_gives_any_text_back(load: Load, text: str) -> None:
    ours = load("bpe that keeps all", CONFIG)
    text = f"{text}<|im_end|>{text}<s>"
    text = text.replace("\u2581", " ")  # sentencepiece's own stand-in for a space
    assert ours.decode(ours.encode(text)) == text


# -- ends --


@fuzz
@given(text=plain_text)
def test_each_token_with_text_ends_where_sentencepiece_says(both: Any, text: str) -> None:
    ours, theirs = both
    _, ends = ours.encode_with_offsets(text)
    assert (np.diff(ends) >= 0).all()
    assert not ends.size or (ends[-1] == len(text.encode()) and ends[0] > 0)
    # asked in characters here, which are then turned into bytes
    characters = theirs.encode(text, return_type="offset_mapping", return_bytes=False)["offsets"]
    assert len(characters) == len(ends)
    for (begin, stop), end in list(zip(characters, ends, strict=True))[:-1]:
        if begin < stop:
            assert end == len(text[:stop].encode())
        else:  # it shares the text of a later token and does not end behind that
            following = [other for _, other in characters if other > stop]
            assert len(text[:stop].encode()) <= end
            assert not following or end <= len(text[: following[0]].encode())


@fuzz
@given(before=plain_text, answer=plain_text, after=plain_text)
def test_a_mask_of_the_answers_bytes_is_exactly_the_answers_tokens(
    both: Any, before: str, answer: str, after: str
) -> None:
    ours, theirs = both
    answer, after = answer.lstrip("!>"), after.lstrip("!>")
    head, turn = f"{before}<|im_start|>", f"{answer}<|im_end|>"
    ids, ends = ours.encode_with_offsets(head + turn + after)
    starts = np.concatenate(([0], ends[:-1]))
    first, last = len(head.encode()), len((head + turn).encode())
    supervised = (starts < last) & (ends > first)
    assert ids[supervised].tolist() == [*theirs.encode(answer), theirs.piece_to_id("<|im_end|>")]
    assert ends[np.flatnonzero(supervised)[-1]] == last or not theirs.encode(after)


@pytest.mark.parametrize("name", ["bpe with bytes", "unigram with bytes", "bpe that keeps all"])
def test_bytes_of_a_character_end_one_by_one(load: Load, name: str) -> None:
    ours = load(name)
    ids, ends = ours.encode_with_offsets("<|im_start|>a漢\U0001f600<|im_end|>")
    assert ends.tolist()[-9:] == [13, 14, 15, 16, 17, 18, 19, 20, 30]
    assert ours.decode(ids) == "<|im_start|>a漢\U0001f600<|im_end|>"


def test_a_character_that_stands_for_many_is_supervised_whole(load: Load) -> None:
    ours = load("bpe with bytes")
    ids, ends = ours.encode_with_offsets("a\ufdfab")  # U+FDFA is 18 letters in NFKC
    starts = np.concatenate(([0], ends[:-1]))
    inside = (starts < 4) & (ends > 1)
    assert inside.sum() > 18 and ours.decode(ids[inside]).startswith("صلى")
    assert starts[inside][0] == 1 and ends[inside][-1] == 4


def test_dropped_spaces_go_to_the_next_token_and_at_the_end_to_the_last(load: Load) -> None:
    ours = load("bpe", {})
    for text, expected in (
        ("  <|im_end|>", [12]),
        ("<|im_end|>\n", [11]),
        ("<|im_end|>\n<|im_start|>", [10, 23]),
        ("the  <|im_end|>", [5, 15]),
        ("  ", []),
        ("", []),
    ):
        assert ours.encode_with_offsets(text)[1].tolist() == expected, text


# -- eos, pad, vocabulary --


def test_eos_and_pad_come_from_the_config_else_from_the_model(models: dict[str, bytes], tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path, models["bpe"]))
    assert (ours.eos_token, ours.eos_token_id, ours.pad_token_id) == ("</s>", 2, 2)
    assert ours.n_vocab == sentencepiece.SentencePieceProcessor(model_proto=models["bpe"]).piece_size()
    padded = train(model_type="bpe", pad_id=3)
    assert load_tokenizer(write(tmp_path, padded)).pad_token_id == 3
    config = {**CONFIG, "eos_token": {"content": "<|im_end|>"}, "pad_token": "<added>"}
    ours = load_tokenizer(write(tmp_path, padded, config))
    assert (ours.eos_token, ours.eos_token_id, ours.pad_token_id) == ("<|im_end|>", ours.encode("<|im_end|>")[0], 1000)
    assert ours.n_vocab == 1004
    without_eos = train(model_type="bpe", eos_id=-1)
    with pytest.raises(UserError, match="eos_token ''"):
        load_tokenizer(write(tmp_path, without_eos, {}))
    assert load_tokenizer(write(tmp_path, without_eos, {"eos_token": "<|im_end|>"})).eos_token == "<|im_end|>"


def test_an_added_token_can_take_the_place_of_a_reserved_piece(models: dict[str, bytes], tmp_path: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=models["bpe"])
    reserved = theirs.piece_to_id("<|im")
    names = {reserved: "<tool>", 0: "<unk>", 2: "<end>"}
    config = {"added_tokens_decoder": {str(token_id): {"content": name} for token_id, name in names.items()}}
    ours = load_tokenizer(write(tmp_path, models["bpe"], config))
    assert ours.encode("<tool><unk><end>") == [reserved, 0, 2]
    assert ours.decode([reserved, 2]) == "<tool><end>" and ours.eos_token == "<end>"
    assert ours.encode("</s>") == theirs.encode("</s>") != [2]  # the old name is ordinary text


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


TEXT, SCORE, KIND = field(1, b"<x>"), b"\x15\0\0\0\0", b"\x18\x04"  # 4: user-defined
SPELLINGS = {
    "usual": field(1, TEXT + SCORE + KIND),
    "another order": field(1, KIND + SCORE + TEXT),
    "type before score": field(1, TEXT + KIND + SCORE),
    "type twice, the last one counts": field(1, TEXT + b"\x18\x01" + SCORE + KIND),
    "unknown type last, which does not count": field(1, TEXT + SCORE + KIND + b"\x18\x63"),
    "text twice": field(1, field(1, b"other") + TEXT + SCORE + KIND),
    "unknown fields": field(1, TEXT + field(9, b"\x18\x01") + b"\x50\x01\x59" + bytes(8) + SCORE + KIND),
    "type in two bytes": field(1, TEXT + SCORE + b"\x18\x84\x00"),
    "type of 64 bits": field(1, TEXT + SCORE + b"\x18\x84\x80\x80\x80\x80\x01"),
    "longer size": b"\x0a\x8c\x00" + TEXT + SCORE + KIND,
    "no score": field(1, TEXT + KIND),
    "behind another field": field(9, b"\x0a\x01a") + field(1, TEXT + SCORE + KIND),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_user_defined_piece_is_known_however_protobuf_spells_it(tmp_path: Path, name: str) -> None:
    named = [(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3), (b"a", 1), ("▁".encode(), 1)]
    others = b"".join(field(1, field(1, text) + SCORE + bytes([0x18, kind])) for text, kind in named)
    tokenizer = load_tokenizer(write(tmp_path, others + SPELLINGS[name], {"eos_token": "</s>"}))
    assert tokenizer.encode("a<x>a") == [4, 3, 5, 4, 3]  # cut out, the rest with the leading space of each segment


def test_unknown_ids_and_lone_surrogates_are_refused(both: Any) -> None:
    ours, _ = both
    for token_id in (-1, 999, 1001, 1004):
        for function in (ours.token_bytes, lambda token_id: ours.decode([token_id])):
            with pytest.raises(UserError, match=f"token id {token_id} "):
                function(token_id)
    for function in (ours.encode, ours.encode_with_offsets, ours.normalize):
        with pytest.raises(UserError, match=r"character 2 .* surrogate"):
            function("ab\ud800c")


def test_a_pickled_tokenizer_encodes_alike(both: Any) -> None:
    copy = pickle.loads(pickle.dumps(both[0]))
    text = "the cat, été <|im_end|><added> \U0001f600"
    assert copy.encode(text) == both[0].encode(text) and copy.decode(copy.encode(text))
    assert copy.fingerprint == both[0].fingerprint


def test_the_fingerprint_follows_the_model_and_the_added_tokens(load: Load) -> None:
    base = load("bpe", CONFIG).fingerprint
    assert base == load("bpe", {**CONFIG, "chat_template": "other", "eos_token": "<added>"}).fingerprint
    moved = {"added_tokens_decoder": {"1001": {"content": "<added>"}}}
    others = {load(*each).fingerprint for each in (("bpe", {}), ("bpe", moved), ("unigram", CONFIG))}
    assert len(others - {base}) == 3


# -- files --


def test_a_model_is_found_by_its_folder_or_its_name(models: dict[str, bytes], tmp_path: Path) -> None:
    file = write(tmp_path, models["unigram"], {}).rename(tmp_path / "spiece.model")
    for path in (tmp_path, file, str(file)):
        assert load_tokenizer(path).encode("hello world") == load_tokenizer(file).encode("hello world")
        assert tokenizer_files(path) == [file, tmp_path / "tokenizer_config.json"]
    assert not isinstance(load_tokenizer(file), BpeTokenizer)
    assert load_tokenizer(file).warning.startswith(f"{file}: transformers converts this file and gives other ids")


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "text": lambda data: b"this is no model\n",
    "json": lambda data: b'{"version": "1.0"}',
    "cut inside of the pieces": lambda data: data[:300],
    "cut at the end": lambda data: data[:-3],
    "zeros": lambda data: bytes(1000),
    "no pieces": lambda data: b"\x12\x00",
    "an empty piece": lambda data: b"\x0a\x00" + data,
    "a piece that is not UTF-8": lambda data: data.replace("▁".encode(), b"\xff\xfe\xfd"),
    "ranks behind a bad first line": lambda data: b"YQ 0\nYg== 1\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused(models: dict[str, bytes], tmp_path: Path, name: str) -> None:
    file = write(tmp_path, BROKEN[name](models["unigram"]))
    with pytest.raises(UserError) as error:
        load_tokenizer(file)
    assert str(file) in str(error.value)


# What is wrong with the tokens themselves is refused by the same code as beside a rank file: see test_tokenizer.
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"eos_token": "<nope>"}, "eos_token '<nope>'"),
    ({"pad_token": "▁the"}, "pad_token '▁the'"),
    ({"added_tokens_decoder": {"20": {"content": "<tool>"}}}, "its id 20 is used twice"),
    ({"added_tokens_decoder": {"1000": {"content": "<|im_end|>"}}}, "'<|im_end|>': its text or its id 1000 is used"),
    ({"added_tokens_decoder": {"1000": "<a>"}}, "is missing or malformed"),
]


@pytest.mark.parametrize(("config", "told"), BAD_CONFIGS, ids=[told for _, told in BAD_CONFIGS])
def test_a_config_that_does_not_go_with_the_model_is_refused(
    load: Load, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as error:
        load("bpe", config)
    assert told in str(error.value) and str(tmp_path / "tokenizer_config.json") in str(error.value)


def test_an_older_sentencepiece_is_refused_with_the_remedy(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sentencepiece.SentencePieceProcessor, "encode_as_offset_mapping")
    with pytest.raises(UserError, match="pip install"):
        load("bpe")
