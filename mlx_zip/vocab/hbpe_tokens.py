"""The tokens of a first-stage tokenizer as byte strings, by id; and its ids of a text.

Read are a byte-level tokenizer.json (itself or in a folder), a merge list as GPT-2's vocab.bpe or merges.txt (ids in
GPT-2's order: the bytes, then the merges), tiktoken ranks, and a .json list of tokens in hex; each also with .gz.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, bare_exceptions_as_value_errors

KINDS = "tokenizer.json or a folder with one, .bpe or merges.txt, .tiktoken, or a .json list of tokens in hex"

MAX_TOKENS = 1 << 24


def read_tokens(path: str | Path) -> list[bytes]:
    """The bytes of each id; special tokens, and ids without a token, stand for no bytes.

    Raises `DataError` naming the file, and the token or line at fault.
    """
    path = _file(path)
    plain, data = path.name.removesuffix(".gz"), _bytes(path)
    if plain.endswith(".tiktoken"):
        return _ranks(path, data)
    if plain.endswith((".bpe", ".txt")):
        return _listed(path, data)
    if not plain.endswith(".json"):
        raise DataError(f"{path}: tokens are read from {KINDS}")
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return _hex(path, state) if isinstance(state, list) else _tokenizer(path, state)


def text_encoder(path: str | Path) -> Callable[[str], Sequence[int]]:
    """Text to first-stage ids, nothing added. Errors as of `read_tokenizer`."""
    return encoder_of(read_tokenizer(path))


def encoder_of(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Text to the ids of a `tokenizers.Tokenizer`, nothing added."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def read_tokenizer(path: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json or a merge list.

    Raises `DataError` for the other kinds, which do not say how a text is split.
    """
    from tokenizers import Tokenizer

    path = _file(path)
    plain, data = path.name.removesuffix(".gz"), _bytes(path)
    try:
        with bare_exceptions_as_value_errors():
            if plain.endswith((".bpe", ".txt")):
                tokenizer = _byte_level_tokenizer(read_tokens(path), _merge_lines(data))
            elif plain.endswith("tokenizer.json"):
                tokenizer = Tokenizer.from_str(data.decode("utf-8"))
                tokenizer.no_truncation()
                tokenizer.no_padding()
            else:
                raise DataError(f"{path} does not say how a text is split: give a tokenizer.json or a merge list")
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} cannot be read as a tokenizer: {error}") from error
    return tokenizer


def learn_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE of at most `size` tokens, the 256 bytes among them, as a `tokenizers.Tokenizer`.

    Raises `DataError` for a size below 256.
    """
    from tokenizers import trainers

    if size < 256:
        raise DataError(f"a byte-level tokenizer has 256 tokens or more, got {size}")
    tokenizer = _byte_level_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=list(letters()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_of(tokenizer: Any) -> list[bytes]:
    """What `read_tokens` gives for a `tokenizers.Tokenizer` that is written down."""
    return _tokenizer(Path("tokenizer.json"), json.loads(tokenizer.to_str()))


def _byte_level_tokenizer(tokens: Sequence[bytes] = (), merge_lines: Sequence[str] = ()) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spell = {byte: letter for letter, byte in letters().items()}
    shown = ["".join(spell[byte] for byte in token) for token in tokens]
    pairs = [(left, right) for left, right in (line.split(" ") for line in merge_lines)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(shown)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def letters() -> dict[str, int]:
    """The printable letters that byte-level vocabularies are spelled with, in GPT-2's order, and their bytes.

    Printable Latin-1 stands for itself; the other bytes, in order, for the letters from 256 on.
    """
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _file(path: str | Path) -> Path:
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    return file


def _bytes(path: Path) -> bytes:
    try:
        stored = path.read_bytes()
        return gzip.decompress(stored) if path.name.endswith(".gz") else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _ranks(path: Path, data: bytes) -> list[bytes]:
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{path}, line {number}: not a token in base64 and its rank") from error
    if not ranks or sorted(ranks) != list(range(len(ranks))):
        raise DataError(f"{path}: the ranks are not 0, 1, 2 and so on")
    return [ranks[rank] for rank in range(len(ranks))]


def _merge_lines(data: bytes) -> list[str]:
    return [line for line in data.decode("utf-8").split("\n") if line and not line.startswith("#version")]


def _listed(path: Path, data: bytes) -> list[bytes]:
    known = letters()
    tokens = [bytes([byte]) for byte in known.values()]
    try:
        for line in _merge_lines(data):
            left, right = line.split(" ")
            tokens.append(bytes(known[letter] for letter in left + right))
    except (ValueError, KeyError) as error:
        at = len(tokens) - len(known)
        raise DataError(f"{path}: merge {at} is not two byte-level tokens with a blank between") from error
    return tokens


def _hex(path: Path, state: list[Any]) -> list[bytes]:
    try:
        return [bytes.fromhex(token) for token in state]
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: not a list of tokens in hex: {error}") from error


def _tokenizer(path: Path, state: Any) -> list[bytes]:
    model = state.get("model") if isinstance(state, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or not _byte_level(state):
        raise DataError(f"{path} is no byte-level tokenizer.json: give its tokens as a .json list in hex")
    try:
        added = {token["content"]: token for token in state.get("added_tokens") or ()}
        ids = {**vocabulary, **{content: token["id"] for content, token in added.items()}}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: added_tokens are not tokens with content and id") from error
    if not all(isinstance(i, int) and 0 <= i < MAX_TOKENS for i in ids.values()):
        raise DataError(f"{path}: the id of a token is no integer from 0 and below 2^24")
    tokens, known = [b""] * (max(ids.values(), default=-1) + 1), letters()
    for content, i in ids.items():
        if content in added:
            tokens[i] = b"" if added[content].get("special") else content.encode("utf-8")
            continue
        try:
            tokens[i] = bytes(known[letter] for letter in content)
        except KeyError as error:
            raise DataError(f"{path}: token {content!r:.40} has {error}, which is no byte-level letter") from error
    return tokens


def _byte_level(state: dict[str, Any]) -> bool:
    """Whether a ByteLevel part spells bytes as letters: in the pre-tokenizer, the decoder or a sequence there."""
    parts = [state.get("pre_tokenizer"), state.get("decoder")]
    for part in list(parts):
        if isinstance(part, dict):
            parts += part.get("pretokenizers") or part.get("decoders") or []
    return any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)
