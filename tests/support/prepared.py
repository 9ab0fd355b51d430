"""Helpers for tests of prepared data: tokenizer folders, data files, and samples read back to base ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tokenizers.processors import TemplateProcessing

from mlx_zip.codec import Codebook
from mlx_zip.text.sources import Source
from mlx_zip.training.prepare.plan import PrepareOptions
from mlx_zip.training.prepare.preparation import prepare_data
from mlx_zip.training.prepare.shards import PreparedShards
from support import tiny_text

BOS, EOS, PAD = 0, 1, 2
LETTERS = " \nabcdefghijklmnopqrstuvwxyz.,!?<>|0123456789"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)

PACK = ("the", "cat", "dog", "mat", "on ", "sat", "and", "sto")


@cache
def tokenizer_folder(kind: str = "byte level", bos: bool = True, template: str | None = TEMPLATE) -> Path:
    """Writes a tokenizer's folder. bos: whether the tokenizer puts its bos token in front of a text."""
    wrapped = {
        "byte level": lambda: tiny_text.byte_level(LETTERS),
        "sentencepiece": tiny_text.sentencepiece,
        "sentencepiece, space kept": lambda: tiny_text.sentencepiece(trim=False),
    }[kind]()
    tokenizer = wrapped._tokenizer
    if bos:
        first = tiny_text.SPECIALS[0]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, BOS)]
        )
    tokenizer.chat_template = template
    folder = Path(mkdtemp())
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, records: Iterable[Any]) -> str:
    """Writes records as JSON lines; strings and bytes are written unchanged."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in records]
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def texts(path: Path, documents: Iterable[str]) -> str:
    """Writes documents as JSON lines."""
    return write_lines(path, [{"text": text} for text in documents])


def prepared(out: Path, *data: str, workers: int = 1, **options: Any) -> PreparedShards:
    """Prepares data; by default with a small context and the byte-level tokenizer."""
    of_source = {key: options.pop(key) for key in ("separator", "columns", "subsets", "split") if key in options}
    options = {"context": 32, "codebook_size": 64, **options}
    if "model" not in options:
        options.setdefault("tokenizer", str(tokenizer_folder()))
    if "sources" not in options:
        options["sources"] = (Source(data, **of_source),)
    prepare_data(PrepareOptions(out=out, **options), workers=workers)
    return PreparedShards(out)


def expanded(shards: PreparedShards) -> list[list[int]]:
    """The base ids of every sample, expanded by a codebook."""
    found = []
    for i in range(len(shards)):
        book = Codebook(shards[i].params(shards.params))
        book.push(shards[i].ids)
        found.append(book.expand(shards[i].ids).tolist())
    return found


def tree(folder: Path) -> dict[str, bytes]:
    """Name and content of every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def ids_of(text: str, folder: Path | None = None) -> list[int]:
    """The base ids of a text, without special ids."""
    return _tokenizer(folder or tokenizer_folder()).encode(text, add_special_tokens=False)


@cache
def _tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, loaded once: tests ask for the ids of many short texts."""
    from mlx_zip.text.tokenizers import load_tokenizer

    return load_tokenizer(folder)


def stories(n: int, words: int = 30) -> list[str]:
    """Different texts, each of which repeats itself."""
    return [f"story {i}. " + "the cat and the dog sat on the mat. " * (1 + (i * 7) % words // 6) for i in range(n)]


def stream_of(documents: Iterable[str]) -> list[int]:
    """Returns the base ids of documents, each followed by the id that ends a document."""
    return [x for text in documents for x in [*ids_of(text), EOS]]


def entries_of(*words: str) -> tuple[tuple[int, ...], ...]:
    """Returns the base ids of each word, as the entries of a pack."""
    return tuple(tuple(ids_of(word)) for word in words)
