"""Tokenizers with byte fallback (such as Llama 2's, from SentencePiece), expressed as byte-level merges.

Their base symbols are characters. A character of several bytes that is a token is called a letter: extra merges at the
front of the list make it from its bytes, and they do not count as merges. A character that is no token stays as bytes,
which all are tokens. A letter of three bytes needs a merge of its first two; if only these two occur, they are split
again at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.merges import BYTES, NO_ID, MergeList, Pair, is_text, live
from mlx_zip.vocab.adaptbpe.text import BLANK

_REPLACE = json.dumps({"type": "Replace", "pattern": {"String": BLANK}, "content": " "})
_BLANK_DECODERS = (_REPLACE, '"Metaspace"')


def check_blanks(data: Mapping[str, Any]) -> None:
    """Raises `DataError` for a tokenizer.json, here parsed, whose treatment of blanks is not supported.

    Its decoder must turn the blank's character into a blank; its pre-tokenizer must treat all places in a text alike.
    """
    steps = json.dumps(data.get("decoder"))
    if not any(form in steps for form in _BLANK_DECODERS):
        raise DataError(f"the decoder does not turn {BLANK!r} into a blank, as it must with byte fallback")
    if '"prepend_scheme": "first"' in json.dumps(data.get("pre_tokenizer")):
        raise DataError(
            "the pre_tokenizer treats the beginning of a text apart (prepend_scheme first), which is not supported here"
        )


def merges_of_characters(vocabulary: Mapping[str, int], merges: Any, added: Set[str]) -> tuple[MergeList, Uint32s]:
    """Expresses a vocabulary with byte fallback as merges of bytes -> (merges, the id of each token uint32 [256 + M]).

    The list begins with merges that join the UTF-8 bytes of each one-character token; a partial character on the way
    has no token of its own and gets the id `NO_ID`. vocabulary: tokens -> ids. merges: in the form of a
    tokenizer.json. added: names of added tokens, which are left out. Raises `DataError` for a malformed merge and for
    a complete token that the vocabulary lacks.
    """
    names = vocabulary.keys() - added
    letters: dict[bytes, Pair] = {}
    for data in sorted(name.encode("utf-8", "surrogatepass") for name in names if len(name) == 1):
        letters |= {data[: n + 1]: (data[:n], data[n : n + 1]) for n in range(1, len(data))}
    made = MergeList.of_bytes(live([*letters.values(), *map(_text_pair, merges)]), len(letters))
    own = {byte: chr(byte) for byte in range(128) if chr(byte) in names}
    spelled = [own.get(byte, f"<0x{byte:02X}>") for byte in range(BYTES)]
    spelled += [token.decode() if is_text(token) else "" for token in made.tokens[BYTES:]]
    unfinished = {BYTES + rank for rank in made.unfinished}
    found = [NO_ID if token in unfinished else vocabulary.get(name) for token, name in enumerate(spelled)]
    if None in found:
        raise DataError(f"{spelled[found.index(None)]!r} is not in the vocabulary, so not every text can be encoded")
    return made, np.array(found, np.uint32)


def _text_pair(merge: Any) -> Pair:
    """Returns a merge of a tokenizer.json, of two texts, as a pair of byte strings. Raises `DataError`."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
        raise DataError(f"merge {merge!r:.80} is not two tokens")
    left, right = (part.encode("utf-8") for part in parts)
    return left, right
