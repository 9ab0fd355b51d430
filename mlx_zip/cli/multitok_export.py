"""`mlx_zip vocab multitok export`: a dictionary over a tokenizer's ids as a codebook pack."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip.cli.actions import TOKENIZER, add_json, writable
from mlx_zip.cli.multitok_texts import same_units
from mlx_zip.errors import DataError, GenerationError

SIZE, MERGE_SIZE = 1024, 3  # entries, and base ids of one, where neither flag nor model tells


def export_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help="what `train` wrote, over a tokenizer's ids")
    add("--tokenizer", metavar="NAME", help=f"whose ids they are: {TOKENIZER}")
    add("--out", metavar="PACK", help="pack to write, a .npz file")
    add(
        "--size",
        type=int,
        default=SIZE,
        metavar="N",
        help=f"entries of the pack at most, the most used phrases (default: {SIZE})",
    )
    add(
        "--merge-size",
        type=int,
        metavar="N",
        help=f"base ids of an entry at most (default: the model's, or {MERGE_SIZE})",
    )
    add_json(add)


def export(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Writes the pack; a record and lines of it. Raises `MlxZipError`, before anything is read where it can be."""
    from mlx_zip.loading import read_config
    from mlx_zip.text.token_facts import special_ids
    from mlx_zip.text.tokenizers import tokenizer_folder
    from mlx_zip.training.planning import own_codec
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Dictionary, Words
    from mlx_zip.vocab.multitok.export import as_pack
    from mlx_zip.vocab.packs import SUFFIX, save_pack

    if args.out is None:
        raise GenerationError("export needs --out PACK, a .npz file")
    for name, least in (("size", 1), ("merge_size", 2)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise GenerationError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    out = writable("--out", args.out, "a pack", SUFFIX)
    dictionary = Dictionary.load(args.dictionary)
    if isinstance(dictionary.settings.units, Words):
        raise DataError(
            f"{args.dictionary} was trained on words, and a codebook holds a tokenizer's ids: train with --tokenizer"
        )
    tokenizer, folder = same_units(dictionary.settings.units, args), tokenizer_folder(args.tokenizer)
    codec = own_codec(read_config(folder)) if (folder / "config.json").is_file() else None
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
    told = f"{len(pack.entries):,} of {len(dictionary):,} phrases as entries of 2 to {pack.merge_size} base ids: {out}"
    return record, [told]
