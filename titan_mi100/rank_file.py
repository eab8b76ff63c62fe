"""A tiktoken rank file: lines of a token in base64 and its rank. What it leaves open is as Qwen has it."""

import base64
import binascii
import re
from pathlib import Path

import numpy as np

from titan_mi100.errors import UserError
from titan_mi100.tokenizer_definition import (
    QWEN2_CLASSES,
    QWEN2_PATTERN,
    AddedToken,
    BpeDefinition,
    added_tokens,
    end_and_padding,
    read_bytes,
    read_config,
)

# What follows a rank file's ranks where no file says it. Qwen3 has the same ranks as its forerunners, and these tokens.
_CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN3_RANKS = 151_643
_QWEN3_SPECIAL = (
    *_CHAT_TOKENS,
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_QWEN3_OTHERS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)

_BYTES = 256
_RANK_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2})[ \t]+([0-9]{1,10})[ \t\r]*")
_TWO_DIGITS = re.compile(rb"[0-9]{2}")


def read_rank_file(file: Path) -> BpeDefinition:
    """Read a tiktoken rank file: lines of a token in base64 and its rank, which is its id.

    The file says neither how text is split nor what else there is. A `tokenizer_config.json` beside it gives the added
    tokens (`added_tokens_decoder`), eos and pad token; whatever it leaves open is as Qwen has it: Qwen2's pattern;
    behind the ranks <|endoftext|>, <|im_start|> and <|im_end|>, or all 26 added tokens of Qwen3 if the ranks are its
    151,643; eos <|im_end|>, pad <|endoftext|>. Rank files know no normaliser, so text stays as it is, unless the config
    says `tokenizer_class` Qwen2Tokenizer, which puts it in NFC.

    Args:
        file: a local rank file, whatever its name.

    Returns:
        The tokenizer by which tiktoken gives its own ids.

    Raises:
        UserError: the file is broken or another model family's, or the config does not go with it.
    """
    ranks = _read_ranks(file)
    number = next((token for token in ranks if _TWO_DIGITS.search(token)), None)
    if number is not None:
        raise UserError(
            f"{file}: has the token {number.decode(errors='replace')!r}, but Qwen splits numbers into single digits: "
            f"these are the ranks of another model family, which splits text otherwise; use a Qwen tokenizer's files"
        )
    config_file = file.with_name("tokenizer_config.json")
    config = read_config(config_file) if config_file.is_file() else {}
    eos_token, pad_token = end_and_padding(config_file, config)
    added = added_tokens(config_file, config)
    if added:
        _check_added_behind_ranks(config_file, file, ranks, added)
        if eos_token is None:
            raise UserError(f"{config_file}: eos_token is missing; name the token that ends a turn, such as <|im_end|>")
    else:
        special, others = (_QWEN3_SPECIAL, _QWEN3_OTHERS) if len(ranks) == _QWEN3_RANKS else (_CHAT_TOKENS, ())
        added = [
            AddedToken(len(ranks) + i, content, normalized=False, special=content in special)
            for i, content in enumerate((*special, *others))
        ]
        eos_token, pad_token = eos_token or "<|im_end|>", pad_token or "<|endoftext|>"
    single = [bytes([byte]) for byte in range(_BYTES)]
    tokens = single + sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    ids = np.array([ranks[token] for token in tokens])
    nfc = config.get("tokenizer_class") in QWEN2_CLASSES
    return BpeDefinition(file, tokens, ids, added, QWEN2_PATTERN, nfc, eos_token, pad_token)


def is_rank_file(file: Path) -> bool:
    """Whether a file begins as a rank file does, whatever its name: Llama 3 calls its own `tokenizer.model`."""
    return _RANK_LINE.fullmatch(read_bytes(file).split(b"\n", 1)[0]) is not None


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Token to rank, which are 0 to their number less one, every single byte among them."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(read_bytes(file).split(b"\n"), start=1):
        if not line.strip():
            continue
        match = _RANK_LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1]) if match else b""
        except binascii.Error:
            token = b""
        if not match or not token:
            shown = line[:60].decode(errors="replace")
            raise UserError(
                f"{file}:{number}: {shown!r} is not a token in base64 and its rank; download the file again"
            )
        rank = int(match[2])
        if token in ranks or rank in taken:
            what = f"token {token.decode(errors='replace')!r}" if token in ranks else f"rank {rank}"
            raise UserError(f"{file}:{number}: the {what} is there a second time; download the file again")
        ranks[token] = rank
        taken.add(rank)
    if not ranks:
        raise UserError(f"{file}: holds no ranks, it is empty; download it again")
    if max(taken) != len(taken) - 1:
        gap = next(rank for rank in range(len(taken)) if rank not in taken)
        raise UserError(f"{file}: rank {gap} is missing, though there are higher ones; download it again")
    missing = [byte for byte in range(_BYTES) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(
            f"{file}: no token is the single byte 0x{missing[0]:02X} ({len(missing)} such bytes), so not every text "
            f"can be encoded; download it again"
        )
    return ranks


def _check_added_behind_ranks(config_file: Path, file: Path, ranks: dict[bytes, int], added: list[AddedToken]) -> None:
    contents: set[str] = set()
    for token in added:
        if not token.content or token.content in contents:
            raise UserError(f"{config_file}: the added token {token.content!r} is empty or listed twice; correct it")
        contents.add(token.content)
        if not 0 <= token.id < 2**31 or (token.id < len(ranks) and ranks.get(token.content.encode()) != token.id):
            raise UserError(
                f"{config_file}: the added token {token.content!r} has id {token.id}, which is negative, above "
                f"2^31 - 1 or another token's in {file.name}; use the config that came with that file"
            )
    behind = min((token.id for token in added if token.id >= len(ranks)), default=len(ranks))
    if behind != len(ranks):  # a rank file cut off at a line's end looks whole otherwise
        raise UserError(
            f"{config_file}: the added tokens begin at id {behind}, but {file.name} has {len(ranks)} ranks; download "
            f"both files again"
        )
