"""Facts about a tokenizer's ids: which are special, which hold digits, which begin a text, how many bytes each has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of tokens that mark something and are no text."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def digit_ids(tokenizer: Any) -> set[int]:
    """Ids of all tokens whose text has a digit in it."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[i] for i in ids], skip_special_tokens=False)
    return {i for i, text in zip(ids, texts, strict=True) if any(map(str.isdigit, text))}


def lead_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that the tokenizer puts in front of a text by itself, as a prompt gets them."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return next((tuple(whole[:i]) for i in range(len(whole)) if whole[i : i + len(bare)] == bare), ())


def encode_with_bytes(tokenizer: Any, text: str) -> tuple[Uint32s, NDArray[np.int64]]:
    """Text -> base ids uint32 [n], no special tokens added, and the UTF-8 bytes from each id's first character on.

    Of ids that begin at one character the last has its bytes. A tokenizer that knows no offsets gets the bytes
    spread evenly; the sum is the text's in every case.
    """
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    encoded = inner(text, add_special_tokens=False, return_offsets_mapping=inner.is_fast, verbose=False)
    ids = np.array(encoded["input_ids"], dtype=np.int64).astype(np.uint32)
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (characters >= 0x80).astype(np.int64) + (characters >= 0x800) + (characters >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])
    if not inner.is_fast:
        return ids, np.diff(np.linspace(0, before[-1], len(ids) + 1).round().astype(np.int64))
    starts = np.maximum.accumulate(np.array([start for start, _ in encoded["offset_mapping"]], np.int64))
    if len(starts):
        starts[0] = 0
    return ids, np.diff(before[starts], append=before[-1])
