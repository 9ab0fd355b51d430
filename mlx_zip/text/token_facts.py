"""Facts about a tokenizer's ids: special ids, ids with digits, ids added before a text, and the bytes of each id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.text.tokenizers import REPLACEMENT
from mlx_zip.vocab.first_stage import BYTE_OF

_COMPOSING = {"NFC", "NFKC"}
_KEEPING = {"Sequence", "Prepend", "NFD", *_COMPOSING, "ByteLevel", "Metaspace", "Split", "Punctuation", "Digits"}
_MOST_SHRINKING = 4  # maximum factor by which NFC or NFKC shortens a text


def special_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of special tokens, such as bos, which do not stand for text."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def digit_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of all tokens whose text contains a digit."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[i] for i in ids], skip_special_tokens=False)
    return {i for i, text in zip(ids, texts, strict=True) if any(map(str.isdigit, text))}


def leading_special_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the special ids that the tokenizer adds before every text, for example bos."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return next((tuple(whole[:i]) for i in range(len(whole)) if whole[i : i + len(bare)] == bare), ())


def encode_with_bytes(tokenizer: Any, text: str) -> tuple[Uint32s, NDArray[np.int64]]:
    """Returns a text's base ids, uint32 [n], without special tokens, and the UTF-8 bytes of each id, int64 [n].

    An id gets the bytes from its first character up to the next id's first character. If several ids begin at the same
    character, the last of these ids gets the bytes. If the tokenizer has no offsets, bytes are spread evenly. The bytes
    always sum to the text's bytes.
    """
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    encoded = inner(text, add_special_tokens=False, return_offsets_mapping=inner.is_fast, verbose=False)
    ids = np.array(encoded["input_ids"], dtype=np.int64).astype(np.uint32)
    before = bytes_before_characters(text)
    if not inner.is_fast:
        return ids, np.diff(np.linspace(0, before[-1], len(ids) + 1).round().astype(np.int64))
    starts = np.maximum.accumulate(np.array([start for start, _ in encoded["offset_mapping"]], np.int64))
    if len(starts):
        starts[0] = 0
    return ids, np.diff(before[starts], append=before[-1])


def bytes_before_characters(text: str) -> NDArray[np.int64]:
    """Returns the number of UTF-8 bytes before each of n characters, and before the end of the text, int64 [n + 1]."""
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (characters >= 0x80).astype(np.int64) + (characters >= 0x800) + (characters >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)])


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Returns an upper bound on the bytes of text per token, None if there is no bound.

    A tokenizer that leaves out or replaces parts of a text, for example white space, has no bound.
    """
    backend = getattr(getattr(tokenizer, "_tokenizer", tokenizer), "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    steps = [step for name in ("normalizer", "pre_tokenizer") for step in _iterate_steps(parts.get(name))]
    kinds = {step["type"] for step in _iterate_steps(parts.get("decoder"))}
    if not kinds & {"ByteLevel", "ByteFallback"} or not all(map(_keeps_whole_text, steps)):
        return None
    shrinks = any(step["type"] in _COMPOSING for step in steps)
    return (_MOST_SHRINKING if shrinks else 1) * max(map(len, bytes_by_id(tokenizer)))


def _keeps_whole_text(step: Any) -> bool:
    """Returns whether a step of a normalizer or pre-tokenizer keeps all of a text."""
    if step["type"] == "Replace":
        return step["pattern"] == {"String": " "}
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def bytes_by_id(tokenizer: Any) -> list[bytes]:
    """Returns the bytes that each id adds to a text: b"" for ids without a token, the name for an added token.

    tokenizer: our `Tokenizer`, mlx-lm's wrapper, or a tokenizer of transformers. A leading space counts, although a
    decoder may drop it at the beginning of a text. For vocabularies that are neither byte-level nor SentencePiece, each
    id is decoded after a fixed text.
    """
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    vocabulary = inner.get_vocab()
    names: list[str | None] = [None] * (1 + max(vocabulary.values(), default=-1))
    for name, i in vocabulary.items():
        names[i] = name
    added = {i: str(token) for i, token in inner.added_tokens_decoder.items()}
    spell = _token_bytes_function(inner, names)
    return [b"" if name is None else added[i].encode() if i in added else spell(i) for i, name in enumerate(names)]


def _token_bytes_function(tokenizer: Any, names: list[str | None]) -> Any:
    """Returns a function from an id, not of an added token, to the id's bytes. names: id -> the token's name."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = [] if backend is None else list(_iterate_steps(json.loads(backend.to_str()).get("decoder")))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        letters = str.maketrans({letter: chr(byte) for letter, byte in BYTE_OF.items()})
        return lambda i: str(names[i]).translate(letters).encode("latin-1", "ignore")
    if "ByteFallback" in kinds:
        return lambda i: _sentencepiece_bytes(str(names[i]))
    before = tokenizer.encode("a", add_special_tokens=False)
    lead = tokenizer.decode(before)
    return lambda i: tokenizer.decode([*before, i]).removeprefix(lead).encode()


def _iterate_steps(part: Any) -> Iterator[Any]:
    """Yields the steps of a normalizer, pre-tokenizer or decoder. part: nested maps from tokenizer.json, or None."""
    if part is not None:
        yield part
        for step in (inner for name in ("normalizers", "pretokenizers", "decoders") for inner in part.get(name, ())):
            yield from _iterate_steps(step)


def _sentencepiece_bytes(name: str) -> bytes:
    """Returns the bytes of a SentencePiece token: a piece with "▁" for spaces, or a single byte such as "<0x0A>"."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    return name.replace("▁", " ").encode()


# ---- the texts and bytes of single tokens, for log-probabilities and for the parts of hypertokens

_MOST = 1 << 16  # maximum number of cached tokens


class TokenTexts:
    """Maps a token's base ids to the token's text and UTF-8 bytes: `tokens[base_ids] -> (text, bytes)`.

    If a token holds only part of a character, the text has replacement characters, but the bytes are exact.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], tuple[str, bytes]] = {}
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]

    def __getitem__(self, base_ids: Sequence[int]) -> tuple[str, bytes]:
        key = tuple(base_ids)
        if (found := self._known.get(key)) is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            text = self._decode_text(key)
            found = self._known[key] = (text, text.encode() if REPLACEMENT not in text else self._bytes(key))
        return found

    def _decode_text(self, base_ids: tuple[int, ...]) -> str:
        """Returns the text that the base ids add after other text (a decoder may drop a space at the beginning)."""
        return self.decode([*self._before, *base_ids])[len(self.decode(self._before)) :]

    def decode(self, base_ids: Sequence[int]) -> str:
        """Returns the text of base ids, including special tokens; ids without a token are ignored."""
        known = [i for i in base_ids if i < len(self._tokenizer)]
        return self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _bytes(self, base_ids: tuple[int, ...]) -> bytes:
        return b"".join(self._bytes_by_id[i] for i in base_ids if i < len(self._bytes_by_id))

    @cached_property
    def _bytes_by_id(self) -> list[bytes]:
        """The bytes of all base ids, computed on first use, because most answers do not need them."""
        return bytes_by_id(self._tokenizer)


def count_characters(data: bytes) -> int:
    """Returns the number of characters that begin in `data`, a part of a UTF-8 text."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
