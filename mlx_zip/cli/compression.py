"""`mlx_zip compress FILE --tokenizer T`: shows a text's hypertokens and the ids they save. No model is loaded."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.cli.actions import (
    add_json_flag,
    add_show_flag,
    add_tokenizer_flag,
    print_action_result,
    read_standard_input,
)
from mlx_zip.errors import DataError, GenerationError
from mlx_zip.named import resolve_model_name

if TYPE_CHECKING:
    from mlx_zip.text.vocabularies import Vocabulary

_NEVER_MERGED = ("specials", "digits")
_DEFAULTS = {"merge_size": 3, "codebook_size": 2048, "policy": "freeze"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add("file", metavar="FILE", help="UTF-8 text file to compress, or - for standard input")
    end = "; a converted model also gives the default codec settings"
    add_tokenizer_flag(add, "tokenizer of the text", end, required=True)
    add(
        "--merge-size",
        type=int,
        help="maximum number of base tokens per hypertoken (default: 3, or that of a converted model in --tokenizer)",
    )
    add(
        "--codebook-size",
        type=int,
        help="maximum number of hypertokens (default: 2048, or that of a converted model in --tokenizer)",
    )
    add(
        "--policy",
        choices=["freeze", "lru", "use-count"],
        help="what a full codebook does. freeze: stop adding entries; lru: evict the least recently used entry; "
        "use-count: evict the least often used one (default: freeze, or that of a converted model in "
        "--tokenizer)",
    )
    add(
        "--window",
        type=int,
        metavar="N",
        help="compress each N base tokens of the text separately (default: the whole text at once)",
    )
    add(
        "--disabled",
        nargs="*",
        choices=_NEVER_MERGED,
        help="kinds of tokens that never become part of a hypertoken, or nothing for none (default: specials, or the "
        "converted model's)",
    )
    add_show_flag(add, "hypertokens to list, those that save the most ids first")
    add_json_flag(add)


def run(args: argparse.Namespace) -> int:
    """Compresses the text and prints what its hypertokens save; returns 0. Raises `MlxZipError`."""
    from mlx_zip.codec.params import MAX_CODEBOOK, MAX_MERGE
    from mlx_zip.text.vocabularies import read_vocabulary

    check_flags_at_least(args, 0, "show")
    check_flags_at_least(args, 1, "window")
    check_flags_at_least(args, 1, "merge_size", below=MAX_MERGE + 1)
    check_flags_at_least(args, 0, "codebook_size", below=MAX_CODEBOOK + 1)
    text = read_file_or_standard_input(args.file)
    try:
        vocabulary = read_vocabulary(args.tokenizer)
    except DataError as error:
        raise GenerationError(f"--tokenizer {error}") from error
    params = choose_codec_params(vocabulary, model_codec_params(args.tokenizer), args)
    ids = vocabulary.encode(text)
    if not len(ids):
        raise GenerationError(f"{args.file} has no tokens")
    record = _make_compression_record(vocabulary, params, text, ids, args)
    return print_action_result(args, record)


def read_file_or_standard_input(file: str) -> str:
    """Returns the text of a file, or of standard input for "-".

    Raises `GenerationError` if the text cannot be read, is empty or is not UTF-8.
    """
    try:
        text = read_standard_input() if file == "-" else Path(file).read_bytes().decode("utf-8")
    except OSError as error:
        raise GenerationError(f"{file or 'the empty path'}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GenerationError(f"{file} is not valid UTF-8 at byte {error.start}") from error
    if not text:
        raise GenerationError(f"{file} is empty")
    return text


def model_codec_params(tokenizer: str) -> Any:
    """Returns the codec parameters of the zip2zip model whose tokenizer was named, None for any other tokenizer."""
    from mlx_zip.files import read_json_object
    from mlx_zip.models.model_folder import read_model_codec
    from mlx_zip.text.tokenizers import tokenizer_folder

    path = resolve_model_name(tokenizer)
    if path.is_file() and path.name != "tokenizer.json":
        return None
    config = tokenizer_folder(tokenizer) / "config.json"
    return read_model_codec(read_json_object(config, constants=True)) if config.is_file() else None


def choose_codec_params(vocabulary: Vocabulary, own: Any, args: argparse.Namespace) -> Any:
    """Returns the codec parameters: each from its flag, else from `own`, else the default.

    own: codec parameters of the converted model in --tokenizer, None if it is not a model.
    """
    from mlx_zip.codec import CodecParams

    chosen = {
        name: getattr(args, name) if getattr(args, name) is not None else getattr(own, name, default)
        for name, default in _DEFAULTS.items()
    }
    if own is not None and args.disabled is None:
        return replace(own, **chosen)
    disabled = set(vocabulary.special_ids) if args.disabled is None or "specials" in args.disabled else set()
    if "digits" in (args.disabled or ()):
        disabled |= {i for i in range(vocabulary.size) if vocabulary.decode([i]).strip().isdigit()}
    if own is not None:
        return replace(own, **chosen, disabled_ids=tuple(sorted(disabled)), pad_id=None)
    return CodecParams(vocabulary.size, disabled_ids=tuple(sorted(disabled)), **chosen)


def count_uses(params: Any, ids: Sequence[int], window: int) -> tuple[Counter[tuple[int, ...]], int, int]:
    """Compresses the base ids in windows of `window` ids, each with a new codebook.

    Returns the totals over all windows: entry -> number of times that its hypertoken was emitted, number of emitted
    ids, number of entries created, used or not.
    """
    from mlx_zip.codec import Codebook, compress

    uses: Counter[tuple[int, ...]] = Counter()
    n_ids = n_entries = 0
    for begin in range(0, len(ids), window):
        emitted, _ = compress(params, ids[begin : begin + window])
        book = Codebook(params)
        n_entries += len(book) + len(book.push(emitted))
        n_ids += len(emitted)
        rows, lengths = book.logged_base_ids()
        uses.update(tuple(row[:n]) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True) if n > 1)
    return uses, n_ids, n_entries


def _make_compression_record(
    vocabulary: Vocabulary, params: Any, text: str, ids: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    uses, n_ids, n_entries = count_uses(params, ids, args.window or len(ids))
    saved = {entry: n * (len(entry) - 1) for entry, n in uses.items()}  # ids saved by all uses of an entry's hypertoken
    best = sorted(uses, key=lambda entry: (-saved[entry], entry))[: args.show]
    text_bytes = len(text.encode("utf-8"))
    return {
        "text_bytes": text_bytes,
        "base_tokens": len(ids),
        "ids": n_ids,
        "base_tokens_per_id": len(ids) / n_ids,
        "bytes_per_token_before": text_bytes / len(ids),
        "bytes_per_token_after": text_bytes / n_ids,
        "hyper_share": uses.total() / n_ids,
        "entries": n_entries,
        "merge_size": params.merge_size,
        "codebook_size": params.codebook_size,
        "policy": params.policy,
        "hypertokens": [
            {"text": vocabulary.decode([*one]), "base_ids": [*one], "uses": uses[one], "saved_ids": saved[one]}
            for one in best
        ],
    }
