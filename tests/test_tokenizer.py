import json
import pickle
import random
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from conftest import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sentencepiece_tokenizer import train as train_pieces
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from titan_mi100.errors import UserError
from titan_mi100.text import base
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.bpe import BpeTokenizer, merges_are_exact, nfc
from titan_mi100.text.load import load_tokenizer, tokenizer_files
from titan_mi100.text.other import HfTokenizer, SentencePieceTokenizer

DATA = Path(__file__).parents[2] / "shared" / "data"
QWEN3 = DATA / "qwen3_tokenizer"
ASSET = Path(__file__).parent / "assets" / "tokenizer"
QWEN3_5 = DATA / "qwen35_tokenizer"
needs_qwen3 = pytest.mark.skipif(not QWEN3.exists(), reason="the real Qwen3 tokenizer is not on this machine")
needs_qwen3_5 = pytest.mark.skipif(not QWEN3_5.exists(), reason="the real Qwen3.5 tokenizer is not on this machine")

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
QWEN2_STEPS: list[dict[str, Any]] = [
    {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False},
    {**GPT2_SPLIT, "use_regex": False},
]
QWEN2_SPLIT = {"type": "Sequence", "pretokenizers": QWEN2_STEPS}
QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_SPLIT = {
    "type": "Sequence",
    "pretokenizers": [{**QWEN2_STEPS[0], "pattern": {"Regex": QWEN3_5_PATTERN}}, QWEN2_STEPS[1]],
}
Both = tuple[Tokenizer, tokenizers.Tokenizer]  # ours and theirs
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# What has divided regex engines or Unicode versions before: spaces, case folding, combining marks of several classes,
# composition exclusions, Hangul, marks that only newer Unicode knows, the characters that special tokens are made of.
ODD = (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u200b\u2028\u2029\u202f\u205f\u3000\ufeff'sStTrReEvVmMlLdD"
    "\u017f\u212a\u212b\u00e9e\u0301\u0316\u0327\u0338\u0345\u0334\u0958\u2126\u1100\u1161\u11a8\uac00\u3042\u3099"
    "\u08ca\u1df6\u0898\U00011935\U00011930\U000105d2\u0307\U00010d69\U0001e4ec\U0001f600\U0001f1e6\u200d\ufb06"
    "<|>/_aim12!?.-\u0663\u00b2\u2167\u4e00\U00020000\U000e0100\x00\x7f\u07fd"
)
SCRIPTS = [
    "हिन्दी में नमस्ते।",
    "สวัสดี กำลังเรียน",
    "السَّلَامُ عَلَيْكُمْ",
    "שָׁלוֹם",
    "తెలుగు",
    "မြန်မာ",
    "👩‍👩‍👧‍👦❤️",
    "def f(x):\n    return x\n",
]
odd_text = st.lists(
    st.one_of(
        st.sampled_from(ODD),
        st.sampled_from([*SPECIALS, "<|im_", "'ll", "'S", "\r\n", "    ", "\n\n", "the ", " of", "thinking", "1234"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
).map("".join)
fuzz = settings(deadline=None, max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
OWN, OTHERS = {ord(character): character for character in ALPHABET}, iter(ALPHABET[-68:])
# The stand-in of each byte: a visible one's own character, else the next from U+0100.
BYTES = {byte: OWN.get(byte) or next(OTHERS) for byte in range(256)}


def definition(merges: list[tuple[str, str]], **changes: Any) -> dict[str, Any]:
    """A minimal tokenizer.json: all bytes, these merges of ASCII letters, Qwen2's splitting, no normalizer."""
    vocab = {character: byte for byte, character in BYTES.items()}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    model = {"type": "BPE", "vocab": vocab, "merges": [list(merge) for merge in merges], **changes.pop("model", {})}
    added = [added_token(len(vocab), "<eos>", special=True)]
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": added,
        "pre_tokenizer": QWEN2_SPLIT,
        "decoder": {**GPT2_SPLIT, "add_prefix_space": True},
        "model": model,
        **changes,
    }


def added_token(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content, **plain, **flags}


def write(folder: Path, data: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def both(folder: Path) -> Both:
    return load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def ends_of(tokenizer: Tokenizer) -> tuple[str, int, int, int]:
    return tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.n_vocab


def assert_same_ids(ours: Tokenizer, theirs: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text, expected in zip(texts, theirs.encode_batch_fast(texts), strict=True):
        assert ours.encode(text) == expected.ids, ascii(text[:500])


def invented_lines() -> list[str]:
    rng = random.Random(0)
    subjects = ["The engineer", "A cat", "Nobody", "Ein Mädchen", "Le garçon", "子供", "Кошка", "I'll say he", "We've"]
    verbs = ["reads", "doesn't read", "wrote", "liest", "écrit", "読む", "читает", "was thinking of", "RAN"]
    objects = ["12 books.", "the  manual!\n", "nothing;\t\tnothing", "3.14 * (x + y)", "été", "本を 2 冊"]
    objects += ["книгу", "\n\n    pass"]
    return [f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}" for _ in range(400)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer built as Qwen3's is, and trained by the library."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, to_bytes])
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(invented_lines(), trainer)
    tokenizer.add_tokens([AddedToken(content, special=True, normalized=False) for content in SPECIALS])
    folder = tmp_path_factory.mktemp("trained")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained_both(trained: Path) -> Both:
    return both(trained)


@pytest.fixture(scope="module")
def qwen3_both() -> Both:
    return both(QWEN3)


# -- the same ids --


@fuzz
@given(text=odd_text)
def test_any_text_gets_the_ids_that_hf_gives(trained_both: Both, text: str) -> None:
    ours, theirs = trained_both
    ids, ends = ours.encode_with_offsets(text)
    assert ours.encode(text) == ids.tolist() == theirs.encode(text).ids
    assert ids.dtype == np.int32 and ends.dtype == np.int64
    normalized = ours.normalize(text)
    assert ours.decode(ids) == normalized
    assert not ids.size or ends[-1] == len(normalized.encode())
    boundaries = [int(end) for end in ends]
    for token_id, start, end in zip(ids, [0, *boundaries], boundaries, strict=False):
        spelled = normalized.encode()[start:end]
        assert ours.decode([token_id]) == spelled.decode(errors="replace")


@pytest.mark.full
@needs_qwen3
@settings(fuzz, max_examples=examples(1000))
@given(text=odd_text)
def test_any_text_gets_the_ids_that_hf_gives_with_qwen3(qwen3_both: Both, text: str) -> None:
    ours, theirs = qwen3_both
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.fixture(scope="module")
def qwen3_5_both() -> Both:
    return both(QWEN3_5)


@pytest.mark.full
@needs_qwen3_5
@settings(fuzz, max_examples=examples(1000))
@given(text=st.lists(st.one_of(odd_text, st.sampled_from(SCRIPTS))).map("".join))
def test_any_text_gets_the_ids_that_hf_gives_with_qwen3_5(qwen3_5_both: Both, text: str) -> None:
    ours, theirs = qwen3_5_both
    assert isinstance(ours, BpeTokenizer)  # at tiktoken's speed
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.full
@needs_qwen3_5
def test_the_tokens_that_no_merge_makes_have_their_text(qwen3_5_both: Both) -> None:
    ours, theirs = qwen3_5_both
    assert [ours.decode([i]) for i in range(ours.n_vocab)] == theirs.decode_batch(
        [[i] for i in range(ours.n_vocab)], False
    )


def test_invented_prose_gets_the_ids_that_hf_gives(trained_both: Both) -> None:
    assert_same_ids(*trained_both, [*invented_lines(), "".join(invented_lines()), "".join(SPECIALS), ""])


@needs_qwen3
@pytest.mark.full
def test_all_shared_data_gets_the_ids_that_hf_gives(qwen3_both: Both) -> None:
    rows = [json.loads(line) for line in (DATA / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    files = sorted(file for file in DATA.rglob("*") if file.is_file() and file.suffix != ".jsonl")
    assert len(files) >= 6
    texts = [f"<|im_start|>user\n{row['question']}<|im_end|>\n{row['answer']}" for row in rows]
    texts += [file.read_text(encoding="utf-8")[: 2_000_000 if file.suffix == ".txt" else 200_000] for file in files]
    assert_same_ids(*qwen3_both, texts)


CLASS_RANGES = [(0x80, 0x3400, 1), (0xA000, 0xAC00, 1), (0xF900, 0x10000, 3), (0x10000, 0x12600, 1)]
CLASS_RANGES += [(0x16A00, 0x17000, 1), (0x1CC00, 0x1F000, 2), (0x31000, 0x34000, 64)]
CLASS_SAMPLES = [code for limits in CLASS_RANGES for code in range(*limits)]


@pytest.mark.parametrize("split", [QWEN2_SPLIT, QWEN3_5_SPLIT, GPT2_SPLIT], ids=["qwen2", "qwen3.5", "gpt2"])
@pytest.mark.parametrize("before", ["a", "!", " "])
def test_both_regex_engines_see_the_same_letters_numbers_and_spaces(
    tmp_path: Path, split: Any, before: str, full: bool
) -> None:
    samples = CLASS_SAMPLES if full else CLASS_SAMPLES[::5]
    # A vocabulary in which `before` and the character after it are one token, if and only if they are in one piece.
    first = BYTES[ord(before)]
    merges: dict[tuple[str, str], None] = {}
    for code in samples:
        so_far = first
        for byte in chr(code).encode():
            merges[so_far, BYTES[byte]] = None
            so_far += BYTES[byte]
    data = definition(sorted(merges, key=lambda merge: len(merge[0])), pre_tokenizer=split)
    ours, theirs = both(write(tmp_path, data))
    assert_same_ids(ours, theirs, [before + chr(code) for code in samples])


@pytest.fixture(
    scope="module",
    params=[
        *((QWEN2_SPLIT, None), (QWEN2_SPLIT, "NFC"), (GPT2_SPLIT, None), (GPT2_SPLIT, "NFC")),
        *((QWEN3_5_SPLIT, None), (QWEN3_5_SPLIT, "NFC")),
    ],
)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    split, form = request.param
    space = BYTES[32]
    merges = [("'", "s"), ("t", "h"), (space, "a"), (space, space), ("1", "2"), ("a", "'"), ("!", "!"), ("Ċ", "Ċ")]
    merges += [(left, BYTES[right]) for left in "aA!\u0120\u010a" for right in (0xC3, 0xC5, 0xCC, 0xE2)]
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFC"}]} if form else None
    data = definition(merges, pre_tokenizer=split, normalizer=normalizer)
    return both(write(tmp_path_factory.mktemp("variant"), data))


@settings(fuzz, max_examples=examples(300))
@given(text=odd_text)
def test_each_accepted_splitting_and_normalizer_gets_the_ids_that_hf_gives(variant: Both, text: str) -> None:
    assert_same_ids(*variant, [text, text * 2])


def test_text_is_normalized_by_hfs_older_unicode_tables(trained_both: Both) -> None:
    ours, theirs = trained_both
    assert theirs.normalizer is not None
    marks = "\u0301\u0316\u0334\u0345\u0307\u3099"
    for code in range(0xA0, 0x1F000):
        character = chr(code)
        if not 0xD800 <= code < 0xE000 and unicodedata.category(character) in ("Mn", "Mc", "Cn", "Lo"):
            text = "e" + character + marks + character + "a" + character
            assert ours.normalize(text) == theirs.normalizer.normalize_str(text), hex(code)
    for text in ("\U00011935\U00011930", "\U000105d2\u0307", "\U00016d67\U00016d67"):  # newer compositions
        assert ours.normalize(text) == text


def test_runs_of_combining_marks_are_normalized_as_hf_and_python_do(trained_both: Both) -> None:
    ours, theirs = trained_both
    assert theirs.normalizer is not None
    draw = random.Random(1)
    marks = [c for c in map(chr, range(0x1F000)) if unicodedata.combining(c)]
    odd = ["\u0f73", "\u0f75", "\u0f81", "\u0344"]  # decompose into two marks, and most of these are none themselves
    for length in (1, 99, 100, 101, 300):
        for _ in range(10):
            kinds = draw.sample(marks, draw.choice((2, 10, 200))) + odd * draw.randrange(2)
            text = "".join(
                letter + "".join(draw.choices(kinds, k=length)) for letter in ("e", "\u1eaf", "\uac00", "字", "")
            )
            assert nfc(text) == unicodedata.normalize("NFC", text)
            assert ours.normalize(text) == theirs.normalizer.normalize_str(text)


def test_hundreds_of_thousands_of_marks_are_put_into_order(trained_both: Both) -> None:
    """Python alone needs minutes for them."""
    pairs = 60_000
    for marks in ("\u0301\u0316", "\u0f73\u0f71"):  # U+0F73 itself has no combining class
        ordered = sorted(unicodedata.normalize("NFD", marks), key=unicodedata.combining)
        text = trained_both[0].normalize("x" + marks * pairs)
        assert text == "x" + "".join(mark * pairs for mark in ordered)


def test_an_added_token_does_not_compose_with_the_mark_behind_it(trained_both: Both) -> None:
    ours, theirs = trained_both
    text = "e\u0301<|im_end|>\u0338e\u0301"  # '>' and U+0338 are a letter of their own in NFC
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.eos_token_id in ours.encode(text)
    assert ours.normalize(text) == "é<|im_end|>\u0338é"


@pytest.fixture(scope="module", params=[None, {"type": "NFC"}], ids=["raw", "nfc"])
def overlapping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    data = definition([("a", "b"), ("b", "c")], normalizer=request.param)
    vocab = data["model"]["vocab"]
    normalized = ["c\u212a", "e\u0301>"]
    contents = ["<eos>", "abc", "bca", "<K", "<Ka", *normalized, "é>>"]
    data["added_tokens"] = [
        added_token(vocab["ab"], "ab", normalized=True),  # in the vocabulary as well, and keeps its id there
        *[added_token(len(vocab) + i, text, normalized=text in normalized) for i, text in enumerate(contents)],
    ]
    return both(write(tmp_path_factory.mktemp("overlapping"), data))


@settings(fuzz, max_examples=examples(400))
@given(text=st.text(alphabet="abcK\u212ae\u0301é<>", max_size=12))
def test_overlapping_and_normalized_added_tokens_are_found_as_hf_finds_them(overlapping: Both, text: str) -> None:
    ours, theirs = overlapping
    ids, ends = ours.encode_with_offsets(text)
    assert ids.tolist() == theirs.encode(text).ids
    assert not ids.size or ends[-1] == len(ours.normalize(text).encode())


MEGABYTE = 1_000_000


@needs_qwen3
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" " * MEGABYTE, id="spaces"),
        pytest.param("x" + " " * MEGABYTE + "x", id="spaces between letters", marks=pytest.mark.full),
        pytest.param("\n" * MEGABYTE, id="newlines", marks=pytest.mark.full),
        pytest.param("!\n" + "\t" * MEGABYTE + "\n" + "\xa0" * 70_000 + "!", id="tabs and no-break spaces"),
        pytest.param("\r\n" + " " * MEGABYTE + "1", id="newline and spaces", marks=pytest.mark.full),
        pytest.param("a" * MEGABYTE, id="letters", marks=pytest.mark.full),
    ],
)
def test_a_megabyte_of_one_character_neither_panics_nor_changes_ids(qwen3_both: Both, text: str) -> None:
    ours, theirs = qwen3_both
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("split", [QWEN2_SPLIT, GPT2_SPLIT], ids=["qwen2", "gpt2"])
def test_long_runs_of_spaces_are_cut_where_hf_cuts_them(tmp_path: Path, split: Any) -> None:
    space, newline = BYTES[32], BYTES[10]
    merges = [(newline, space), (space, space), (space * 2, space * 2), (newline, newline), ("!", newline)]
    merges += [(space, "a"), (space, "!"), (space, "1"), (space * 4, space * 4)]
    ours, theirs = both(write(tmp_path, definition(merges, pre_tokenizer=split)))
    run = 70_000  # a multiple of the longest token: one space more or less in a piece shows
    texts = [left + " " * run + "a" for left in ["", "a", "1", "\n", "!\n", "a\n", "!\n \n", "\u3000\n"]]
    texts += ["!" + " " * run + right for right in ["", "1", "!", "\n", "\n a", "\x1c", "\u3042"]]
    texts += ["a" + " " * run + "!" + " " * run + "\n" + " " * run + "1", ("\n " * run) + "a", "\u2003" * run + "\x85!"]
    assert_same_ids(ours, theirs, texts)


# -- which merges tiktoken can represent --


def plain_bpe(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    tokens = list(text)
    while True:
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in ranks]
        if not found:
            return tokens
        i = min(found)[1]
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]


def random_merges(rng: random.Random) -> list[tuple[str, str]]:
    tokens = list("abc")
    merges: list[tuple[str, str]] = []
    for _ in range(rng.randrange(1, 9)):
        left, right = rng.choice(tokens), rng.choice(tokens)
        if left + right not in tokens:
            merges.append((left, right))
            tokens.append(left + right)
    return merges


def test_merges_are_accepted_exactly_when_each_token_is_built_as_listed(tmp_path: Path) -> None:
    rng = random.Random(0)
    accepted = refused = 0
    for _ in range(3000):
        merges = random_merges(rng)
        rank = {"a": 97, "b": 98, "c": 99, **{left + right: 256 + i for i, (left, right) in enumerate(merges)}}
        as_listed = all(
            plain_bpe(left + right, {merge: j for j, merge in enumerate(merges[:i])}) == [left, right]
            for i, (left, right) in enumerate(merges)
        )
        sides = np.array([[rank[left], rank[right]] for left, right in merges], dtype=np.int64).reshape(-1, 2)
        assert merges_are_exact(sides[:, 0], sides[:, 1]) == as_listed, merges
        accepted, refused = accepted + as_listed, refused + (not as_listed)
    assert accepted > 300 and refused > 300


@pytest.mark.full
def test_merges_that_tiktoken_can_and_cannot_do_encode_as_hf_does(tmp_path: Path) -> None:
    rng = random.Random(1)
    others = 0
    for _ in range(150):
        ours, theirs = both(write(tmp_path, definition(random_merges(rng))))
        others += isinstance(ours, HfTokenizer)
        assert_same_ids(ours, theirs, ["".join(rng.choices("abc", k=rng.randrange(1, 24))) for _ in range(60)])
    assert 10 < others < 140


def vocabulary_with(*products: str) -> dict[str, int]:
    return {character: byte for byte, character in BYTES.items()} | {p: 256 + i for i, p in enumerate(products)}


UNMADE = {"vocab": vocabulary_with("ab", "ca", "cab")}  # no merge makes "ca"


def with_its_special_token_in_the_vocabulary() -> dict[str, Any]:
    data = definition([("a", "b"), ("c", "a")], pre_tokenizer=GPT2_SPLIT)
    data["model"]["vocab"]["<eos>"] = 258
    return data


@pytest.mark.parametrize(
    "data",
    [
        with_its_special_token_in_the_vocabulary(),
        definition([("a", "b"), ("c", "a"), ("ab", "ab"), ("b", "c")], model={"ignore_merges": True}),
        definition([("a", "b"), ("ca", "b")], model=UNMADE, added_tokens=[added_token(259, "<eos>")]),
        definition(
            [("a", "b"), ("ca", "b")],
            model={**UNMADE, "ignore_merges": True},
            added_tokens=[added_token(259, "<eos>")],
        ),
    ],
    ids=[
        "special token in the vocabulary, as GPT-2",
        "ignore_merges, which changes nothing",
        "a token that no merge can make",
        "the same with ignore_merges, which makes it",
    ],
)
def test_more_definitions_are_accepted(tmp_path: Path, data: dict[str, Any]) -> None:
    rng = random.Random(2)
    texts = ["".join(rng.choices("abc", k=rng.randrange(1, 12))) for _ in range(500)]
    assert_same_ids(*both(write(tmp_path, data)), [*texts, "ab<eos>ab", "<eos", "<eos>"])


# -- refusals --


AB, BC = ("a", "b"), ("b", "c")


def made(*merges: tuple[str, str], **changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: definition(list(merges), **changes)


def vocabulary_edit(edit: Callable[[dict[str, int]], object], merges: Any = (("a", "b"), ("c", "d"))) -> Any:
    def build() -> dict[str, Any]:
        data = definition(list(merges))
        edit(data["model"]["vocab"])
        data["added_tokens"][0]["id"] = len(data["model"]["vocab"])
        return data

    return build


def split_edit(part: int, **changes: Any) -> Callable[[], dict[str, Any]]:
    def build() -> dict[str, Any]:
        steps = [dict(step) for step in QWEN2_STEPS]
        steps[part].update(changes)
        return definition([], pre_tokenizer={"type": "Sequence", "pretokenizers": steps})

    return build


def added_edit(**changes: Any) -> Callable[[], dict[str, Any]]:
    return made(added_tokens=[{**added_token(256, "<eos>"), **changes}])


TEMPLATE_WITH_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<eos>": {"id": "<eos>", "ids": [256], "tokens": ["<eos>"]}},
}
LETTERS = ["a", "b", "c", "▁", "▁a", "ab", "b</w>", "##b", "[UNK]", "<eos>"]
UNK = {"unk_token": "[UNK]"}
WORDS = {token: number for number, token in enumerate(LETTERS)}
BYTES_BEHIND = {**WORDS, **{f"<0x{byte:02X}>": len(WORDS) + byte for byte in range(256)}}
DECODERS = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
DECODERS += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # as Llama's
WORD_PIECE = {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, **UNK}
PAD = {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def other_kind(model: dict[str, Any], **changes: Any) -> Callable[[], dict[str, Any]]:
    """A tokenizer.json whose vocabulary holds its eos token."""
    return lambda: definition([], added_tokens=[added_token(WORDS["<eos>"], "<eos>")], **changes) | {"model": model}


# What tiktoken does not do exactly, or is not known to: the ids must then be those of `tokenizers`.
OTHER_KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "wordpiece": other_kind(
        {**WORD_PIECE, "vocab": WORDS},
        pre_tokenizer={"type": "Whitespace"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": False},
    ),
    "unigram": other_kind(
        {"type": "Unigram", "unk_id": 8, "vocab": [[token, -1.0 - i / 8] for i, token in enumerate(LETTERS)]},
        pre_tokenizer=METASPACE,
        decoder=METASPACE,
    ),
    "bpe of characters with bytes behind, as Llama 2": other_kind(
        {"type": "BPE", "vocab": BYTES_BEHIND, "merges": [["a", "b"], ["▁", "a"]], "byte_fallback": True, **UNK},
        pre_tokenizer=None,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        decoder={"type": "Sequence", "decoders": DECODERS},
    ),
    "unk_token": made(AB, model={"unk_token": "<eos>"}),
    "end of word": made(AB, model={"end_of_word_suffix": "</w>"}),
    "nfkc": made(AB, normalizer={"type": "NFKC"}),
    "lowercase in a sequence": made(
        AB, normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    ),
    "no pre_tokenizer": made(AB, pre_tokenizer=None),
    "prefix space": made(pre_tokenizer={**GPT2_SPLIT, "add_prefix_space": True}),
    "prefix space in the sequence": split_edit(1, add_prefix_space=True),
    "no splitting": made(pre_tokenizer={**GPT2_SPLIT, "use_regex": False}),
    "split twice": split_edit(1, use_regex=True),
    "split removes": split_edit(0, behavior="Removed"),
    "split inverted": split_edit(0, invert=True),
    "other pattern": split_edit(0, pattern={"Regex": r"\p{N}{1,3}|\s+|\S+"}),
    "string pattern": split_edit(0, pattern={"String": " "}),
    "bos added, which a text leaves out": made(post_processor=TEMPLATE_WITH_BOS, pre_tokenizer=GPT2_SPLIT),
    "truncated and padded": made(
        pre_tokenizer=GPT2_SPLIT,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, **PAD},
    ),
    "other decoder": made(decoder={"type": "Fuse"}),
    "lstrip": added_edit(lstrip=True),
    "rstrip": added_edit(rstrip=True),
    "single word": added_edit(single_word=True),
    "added token listed twice": made(added_tokens=[added_token(256, "<eos>")] * 2),
    "falling ids": vocabulary_edit(lambda vocab: vocab.update(ab=257, cd=256)),
    "product listed twice": made(AB, BC, ("ab", "c"), ("a", "bc")),
    "parts made later": made(
        *(("ab", "c"), AB), model={"vocab": vocabulary_with("ab", "abc")}, added_tokens=[added_token(258, "<eos>")]
    ),
    "seam taken by an earlier merge": made(AB, BC, ("a", "bc")),
    "equal merges, left first": made(("a", "a"), ("a", "aa")),
    "ignore_merges and an added token of the vocabulary": made(
        AB,
        model={"ignore_merges": True},
        added_tokens=[added_token(256, "ab", normalized=True), added_token(257, "<eos>")],
    ),
}
SOME_TEXTS = ["", "a", " ", "ab<eos>ba  abc", " é\n\nAB abc ", "123 <eos> !", "x<eos>ab 漢\U0001f600 aaaa", "xyz\t cd "]


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_other_kinds_get_the_ids_of_tokenizers(tmp_path: Path, name: str) -> None:
    data = OTHER_KINDS[name]()
    ours, theirs = both(write(tmp_path, data))
    theirs.no_truncation()
    theirs.no_padding()
    rng = random.Random(0)
    texts = [*SOME_TEXTS, *("".join(rng.choices("aabbc  é<eos>漢", k=rng.randrange(30))) for _ in range(50))]
    assert isinstance(ours, HfTokenizer)
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False)
        ids, ends = ours.encode_with_offsets(text)
        assert ours.encode(text) == ids.tolist() == expected.ids, text
        assert ours.decode(ids) == theirs.decode(expected.ids, skip_special_tokens=False)
        assert ours.normalize(text) == text
        assert (np.diff(ends) >= 0).all() and (not ids.size or ends[-1] == len(text.encode()))
        assert ours.eos_token_id in ids or "<eos>" not in text or "single" in name
    assert pickle.loads(pickle.dumps(ours)).encode(SOME_TEXTS[3]) == ours.encode(SOME_TEXTS[3])


@pytest.fixture(scope="module", params=["other pattern", "nfkc", "bpe of characters with bytes behind, as Llama 2"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return both(write(tmp_path_factory.mktemp("other"), OTHER_KINDS[request.param]()))


@settings(fuzz, max_examples=examples(100))
@given(parts=st.lists(st.text(alphabet="ab <>é漢\U0001f600ﬁ\n", max_size=8), min_size=3, max_size=3))
def test_a_mask_picks_the_tokens_that_stand_for_its_characters(other: Any, parts: list[str]) -> None:
    ours, theirs = other
    before, inside, behind = parts
    text = f"{before}{inside}<eos>{behind}"
    first, last = len(before), len(before) + len(inside) + len("<eos>")
    offsets = theirs.encode(text, add_special_tokens=False).offsets
    _, ends = ours.encode_with_offsets(text)
    starts = np.concatenate(([0], ends[:-1]))
    picked = (starts < len(text[:last].encode())) & (ends > len(text[:first].encode()))
    assert picked.tolist() == [begin < last and end > first for begin, end in offsets]


def test_a_text_that_the_library_cannot_encode_is_refused(tmp_path: Path) -> None:
    model = {"type": "Unigram", "unk_id": None, "vocab": [[token, -1.0] for token in LETTERS]}
    ours = load_tokenizer(write(tmp_path, other_kind(model)() | {"pre_tokenizer": None, "decoder": None}))
    with pytest.raises(UserError, match="cannot encode"):
        ours.encode("z")


def test_the_bytes_of_other_kinds_are_those_of_their_text(tmp_path: Path) -> None:
    expected = {
        "wordpiece": {"a": b" a", "##b": b"b"},
        "unigram": {"▁a": b" a", "ab": b"ab"},
        "bpe of characters with bytes behind, as Llama 2": {"▁a": b" a", "▁": b" ", "<0xE2>": b"\xe2", "ab": b"ab"},
        "other pattern": {BYTES[0xE2]: b"\xe2", BYTES[32]: b" "},
    }
    for name, spelled in expected.items():
        data = OTHER_KINDS[name]()
        ours, theirs = both(write(tmp_path, data))
        assert {token: ours.token_bytes(theirs.token_to_id(token)) for token in spelled} == spelled, name
        with pytest.raises(UserError, match="vocabulary"):
            ours.decode([ours.n_vocab])


REFUSALS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "dropout": (made(AB, model={"dropout": 0.1}), "dropout"),
    "added id skipped": (added_edit(id=300), "('<eos>', 300)"),
    "added id of another": (added_edit(id=7), "('<eos>', 7)"),
    "a byte missing": (vocabulary_edit(lambda vocab: vocab.update(cd=vocab.pop("z"))), "z is missing"),
    "product missing": (vocabulary_edit(lambda vocab: vocab.pop("cd")), "`cd` out of vocabulary"),
    "ids used twice": (vocabulary_edit(lambda vocab: vocab.update(ab=257)), "an id is missing or occurs twice"),
    "fractional id": (vocabulary_edit(lambda vocab: vocab.update(cd=257.5)), "257.5"),
    "merge of three": (made(model={"merges": ["a b c"]}), "is missing or malformed"),
    "no model": (lambda: {"version": "1.0"}, "is missing or malformed"),
    "unknown model": (made(AB, model={"type": "Other"}), "is missing or malformed"),
    "added token that is no text": (added_edit(content=3), "is missing or malformed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_no_engine_can_run_is_refused_by_name(tmp_path: Path, name: str) -> None:
    build, told = REFUSALS[name]
    with pytest.raises(UserError) as error:
        load_tokenizer(write(tmp_path, build()))
    assert told in str(error.value) and str(tmp_path / "tokenizer.json") in str(error.value)


NO_TOKENS = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
BESIDE = {  # parts of the file that no engine of ours looks at
    "version": ({"version": "99"}, "Unknown tokenizer version"),
    "unknown key": ({"more": 1}, "is missing or malformed"),
    "truncation": ({"truncation": {"more": 1}}, "max_length"),
    "decoder": ({"decoder": []}, "untagged enum"),
    "unknown post_processor": ({"post_processor": {"type": "Other"}}, "untagged enum"),
    "post_processor that drops": ({"post_processor": NO_TOKENS}, "post_processor"),
    "not a number": ({"more": float("nan")}, "NaN is not a finite number"),
    "a text for ignore_merges": ({"model": {"ignore_merges": "yes"}}, "expected a boolean"),
    "a text for fuse_unk": ({"model": {"fuse_unk": "yes"}}, "expected a boolean"),
}


@pytest.mark.parametrize("engine", [{}, {"normalizer": {"type": "NFKC"}}], ids=["tiktoken", "tokenizers"])
@pytest.mark.parametrize("name", BESIDE)
def test_what_the_tokenizers_library_refuses_is_refused_whichever_engine_runs_the_file(
    tmp_path: Path, name: str, engine: dict[str, Any]
) -> None:
    change, told = BESIDE[name]
    load_tokenizer(write(tmp_path, definition([AB], **engine)))
    with pytest.raises(UserError, match=told):
        load_tokenizer(write(tmp_path, definition([AB], **engine, **change)))


def test_missing_and_unreadable_files_of_a_folder_are_named(tmp_path: Path) -> None:
    whole, no_json = json.dumps(definition([])), r"tokenizer\.json: cannot be read as JSON"
    for name, content, told in (
        ("tokenizer.json", b"{", r"tokenizer_config\.json: no such file"),
        ("tokenizer_config.json", b'{"eos_token": "<eos>"}', no_json),
        ("tokenizer.json", b"\xff", no_json),
        ("tokenizer.json", whole.encode("utf-8-sig"), no_json),  # as by the tokenizers library
        ("tokenizer.json", whole.encode("utf-16"), no_json),
        ("tokenizer_config.json", b'{"tokenizer_class": "Qwen2Tokenizer"}', no_json),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=told):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"has no tokenizer; name a folder with tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_or_unknown_eos_or_pad_token_is_refused(tmp_path: Path) -> None:
    for key, value, told in (("eos", None, "''"), ("eos", "<nope>", "'<nope>'"), ("pad", "<nope>", "'<nope>'")):
        with pytest.raises(UserError, match=f"{key}_token {told}"):
            load_tokenizer(write(tmp_path, definition([]), **{f"{key}_token": value}))


# -- the rest of the interface --


def test_eos_and_pad_come_from_the_config_as_a_string_or_an_object(tmp_path: Path) -> None:
    data = definition([])
    data["added_tokens"].append(added_token(257, "<pad>"))
    ours = load_tokenizer(write(tmp_path, data, eos_token={"content": "<eos>"}, pad_token="<pad>"))
    assert ends_of(ours) == ("<eos>", 256, 257, 258)
    assert load_tokenizer(write(tmp_path, data)).pad_token_id == 256


def test_the_fingerprint_follows_whatever_changes_ids_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(data: dict[str, Any], **config: Any) -> str:
        return load_tokenizer(write(tmp_path, data, **config)).fingerprint

    base = fingerprint(definition([AB]))
    assert base == fingerprint(definition([AB]), chat_template="other")
    other_flags = definition([AB])
    other_flags["added_tokens"][0]["normalized"] = True
    changes = [
        definition([("a", "c")]),
        definition([AB, BC]),
        definition([AB], normalizer={"type": "NFC"}),
        definition([AB], pre_tokenizer=GPT2_SPLIT),
        other_flags,
    ]
    assert len({base, *map(fingerprint, changes)}) == 1 + len(changes)


def test_decoding_replaces_cut_characters_and_refuses_unknown_ids(trained_both: Both) -> None:
    ours, _ = trained_both
    ids = ours.encode("\U0001f600")
    assert ours.decode(ids) == "\U0001f600" and ours.decode(np.array(ids)) == "\U0001f600"
    assert ours.decode(ids[:-1]) == "\ufffd"
    assert b"".join(map(ours.token_bytes, ids)).decode() == "\U0001f600"
    assert ours.token_bytes(ours.eos_token_id) == ours.eos_token.encode()
    for read in (ours.token_bytes, lambda token_id: ours.decode([token_id])):
        with pytest.raises(UserError, match=str(ours.n_vocab)):
            read(ours.n_vocab)


def test_a_lone_surrogate_is_refused_and_an_empty_text_is_empty(trained_both: Both) -> None:
    ours, _ = trained_both
    with pytest.raises(UserError, match=r"character 2 .* surrogate"):
        ours.encode("ab\ud800c")
    ids, ends = ours.encode_with_offsets("")
    assert ours.encode("") == [] and ids.shape == ends.shape == (0,)


def test_a_fingerprint_stays_what_prepared_data_and_runs_have_recorded() -> None:
    digest = "2b15fc9feea2a707ae63aedf58c74614891b7b9c4e8b0b06791d267d38746e89"
    assert load_tokenizer(Path(__file__).parent / "assets" / "tokenizer").fingerprint == digest


def test_what_an_added_token_does_not_say_is_as_in_hf() -> None:
    def read(**entry: Any) -> tuple[bool, ...]:
        return base.AddedToken.read({"id": 7, "content": "a", **entry})[2:]

    assert [read(), read(special=True), read(special=True, normalized=True), read(normalized=False)] == [
        (True, False, True), (False, True, True), (True, True, True), (False, False, True),
    ]  # fmt: skip
    assert not any(read(**{flag: True})[2] for flag in ("lstrip", "rstrip", "single_word")) and not read(content="")[2]


# -- which files are a tokenizer --


def test_load_tokenizer_finds_what_a_path_means(tmp_path: Path, trained: Path) -> None:
    expected = load_tokenizer(trained).encode("it's thinking<|im_end|>")
    assert load_tokenizer(str(trained)).encode("it's thinking<|im_end|>") == expected
    folder = tmp_path / "pieces"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(train_pieces())
    for path in (folder / "tokenizer.model", folder):
        assert isinstance(load_tokenizer(path), SentencePieceTokenizer)
    write(folder, definition([]))
    assert load_tokenizer(folder).encode("a") == [97]  # tokenizer.json comes first


def test_what_is_no_tokenizer_is_refused_with_path_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    refused = {"nowhere": "no such file or folder", "notes.txt": "has no tokenizer", "": "has no tokenizer"}
    for path, told in refused.items():
        for function in (load_tokenizer, tokenizer_files):
            with pytest.raises(UserError, match=told) as error:
                function(tmp_path / path)
            assert str(tmp_path / path) in str(error.value) and ".model" in str(error.value)
    for name in ("a.model", "b.model"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"has a\.model, b\.model; name a"):
        load_tokenizer(tmp_path)


def test_tokenizer_files_are_those_that_are_read(tmp_path: Path) -> None:
    def names(path: Path) -> list[str]:
        files = tokenizer_files(path)
        assert all(file.parent == tmp_path for file in files)
        return [file.name for file in files]

    (tmp_path / "tokenizer.model").touch()
    assert names(tmp_path) == names(tmp_path / "tokenizer.model") == ["tokenizer.model"]
    for name in ("tokenizer_config.json", "chat_template.jinja", "merges.txt", "config.json"):
        (tmp_path / name).write_text("", encoding="utf-8")
    beside = ["tokenizer_config.json", "chat_template.jinja"]
    assert names(tmp_path) == names(tmp_path / "tokenizer.model") == ["tokenizer.model", *beside]
    (tmp_path / "tokenizer.json").write_text("", encoding="utf-8")
    assert names(tmp_path) == ["tokenizer.json", *beside]
    assert names(tmp_path / "tokenizer.model") == ["tokenizer.model", *beside]
