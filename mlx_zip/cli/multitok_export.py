"""`mlx_zip vocab multitok export`: writes a dictionary over a tokenizer's ids as a codebook pack."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip.cli.actions import TOKENIZER, add_json, check_at_least, writable
from mlx_zip.cli.multitok_texts import same_units
from mlx_zip.errors import DataError

SIZE, MERGE_SIZE = 1024, 3  # defaults: entries of a pack, base ids of an entry


def export_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help="file that `train --tokenizer` wrote")
    add("--tokenizer", metavar="NAME", help=f"tokenizer that the dictionary was trained with: {TOKENIZER}")
    add("--out", required=True, metavar="PACK", help="pack to write, a .npz file")
    add(
        "--size",
        type=int,
        default=SIZE,
        metavar="N",
        help=f"maximum number of entries, the most used phrases (default: {SIZE})",
    )
    add(
        "--merge-size",
        type=int,
        metavar="N",
        help=f"maximum base ids of an entry (default: the model's, or {MERGE_SIZE})",
    )
    add_json(add)


def export(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Writes the pack; returns a record and its lines. Raises `MlxZipError`."""
    from mlx_zip.text.token_facts import special_ids
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Dictionary, Words
    from mlx_zip.vocab.multitok.export import as_pack
    from mlx_zip.vocab.packs import SUFFIX, save_pack

    check_at_least(args, 1, "size")
    check_at_least(args, 2, "merge_size")
    out = writable("--out", args.out, "a pack", SUFFIX)
    dictionary = Dictionary.load(args.dictionary)
    if isinstance(dictionary.settings.units, Words):
        raise DataError(
            f"{args.dictionary} was trained on words, and a codebook holds a tokenizer's ids: train with --tokenizer"
        )
    tokenizer = same_units(dictionary.settings.units, args)
    codec = _codec_of(args.tokenizer)
    merge_size = args.merge_size or (codec.merge_size if codec else MERGE_SIZE)
    disabled = codec.disabled_ids if codec else special_ids(tokenizer)
    mark = tokenizer_fingerprint(tokenizer)
    pack = as_pack(dictionary, args.size, merge_size, mark, disabled)
    save_pack(out, pack)
    record = {
        "file": str(out),
        "entries": len(pack.entries),
        "longest": pack.merge_size,
        "tokenizer": mark,
        "fingerprint": pack.fingerprint,
        "of_phrases": len(dictionary),
    }
    line = f"{len(pack.entries):,} of {len(dictionary):,} phrases as entries of 2 to {pack.merge_size} base ids: {out}"
    return record, [line]


def _codec_of(name: str) -> Any:
    """Returns the codec of the zip2zip model whose folder holds the tokenizer, None for any other tokenizer."""
    from mlx_zip.bundled import here_or_bundled
    from mlx_zip.loading import read_config
    from mlx_zip.text.tokenizers import tokenizer_folder
    from mlx_zip.training.planning import own_codec

    path = here_or_bundled(name)
    if path.is_file() and path.name != "tokenizer.json":
        return None
    folder = tokenizer_folder(name)
    return own_codec(read_config(folder)) if (folder / "config.json").is_file() else None
