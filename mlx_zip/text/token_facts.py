"""Facts about a tokenizer's ids: which are special, which hold digits, which begin a text, how many bytes each has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s


def special_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of special tokens, which mark something and are no text."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def digit_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of all tokens whose text has a digit in it."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[i] for i in ids], skip_special_tokens=False)
    return {i for i, text in zip(ids, texts, strict=True) if any(map(str.isdigit, text))}


def lead_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that the tokenizer adds before a text by itself, for example bos."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return next((tuple(whole[:i]) for i in range(len(whole)) if whole[i : i + len(bare)] == bare), ())


def encode_with_bytes(tokenizer: Any, text: str) -> tuple[Uint32s, NDArray[np.int64]]:
    """Returns a text's base ids, uint32 [n], without special tokens, and the UTF-8 bytes of each, int64 [n].

    An id has the bytes from its first character up to the next id's; of ids that begin at the same character the last
    one has them. If the tokenizer knows no offsets, the bytes are spread evenly. The sum is always the text's bytes.
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
