"""Writes small vocabularies of bytes and a few merges in every kind of file that `bench tokens` reads."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MERGES = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"1", b"2"), (b"12", b"3")]
SIZE = 256 + len(MERGES)
TEXT = "the cat and the dog and the cat: 123 the 12, the cat and the dog.\n"


def letters() -> list[str]:
    """GPT-2's letter for each byte: printable Latin-1 bytes are their own letter, the others are 256 and up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    shown = {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]


def tokens() -> list[bytes]:
    """The bytes of each id: single bytes in order, then the merges."""
    return [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in MERGES)]


def write_ranks(folder: Path, name: str = "mini-llama3.tiktoken") -> Path:
    path = folder / name
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens())]
    path.write_bytes(gzip.compress(b"".join(lines)) if name.endswith(".gz") else b"".join(lines))
    return path


def _spelled() -> tuple[dict[str, int], list[tuple[str, str]]]:
    shown = letters()
    spell = lambda token: "".join(shown[byte] for byte in token)
    return {spell(token): i for i, token in enumerate(tokens())}, [(spell(a), spell(b)) for a, b in MERGES]


def write_pair(folder: Path, names: tuple[str, str] = ("encoder.json", "vocab.bpe")) -> Path:
    vocabulary, merges = _spelled()
    (folder / names[0]).write_text(json.dumps(vocabulary))
    (folder / names[1]).write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder / names[0]


def write_folder(folder: Path) -> Path:
    """Writes a folder with tokenizer.json: this vocabulary followed by one special token."""
    vocabulary, merges = _spelled()
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
