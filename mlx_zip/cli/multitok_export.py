"""`mlx_zip vocab multitok export`: a dictionary over a tokenizer's ids as a codebook pack."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_zip.cli.multitok_texts import same_units
from mlx_zip.errors import DataError, GenerationError

SIZE, MERGE_SIZE = 1024, 3  # entries, and base ids of one, where neither flag nor model tells


def export(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Writes the pack; a record and lines of it. Raises `MlxZipError`, before anything is read where it can be."""
    from mlx_zip.training.encoding import fingerprint, load_tokenizer
    from mlx_zip.training.planning import tokenizer_folder
    from mlx_zip.vocab.multitok import Dictionary, Words
    from mlx_zip.vocab.multitok.export import as_pack
    from mlx_zip.vocab.packs import check_out, save_pack

    out = _checked(args)
    check_out(out)
    dictionary = Dictionary.load(args.dictionary)
    if isinstance(dictionary.settings.units, Words):
        raise DataError(
            f"{args.dictionary} was trained on words, and a codebook holds a tokenizer's ids: train with --tokenizer"
        )
    vocabulary = same_units(dictionary.settings.units, args)
    codec = vocabulary.codec
    size = args.size or SIZE
    merge_size = args.merge_size or (codec.merge_size if codec else MERGE_SIZE)
    tokenizer = fingerprint(load_tokenizer(tokenizer_folder(args.tokenizer)))
    disabled = codec.disabled_ids if codec else vocabulary.special_ids
    pack = as_pack(dictionary, size, merge_size, tokenizer, disabled)
    save_pack(out, pack)
    record = {"file": str(out), "entries": len(pack.entries), "longest": pack.merge_size, "tokenizer": tokenizer,
              "fingerprint": pack.fingerprint, "of_phrases": len(dictionary)}  # fmt: skip
    told = f"{len(pack.entries):,} of {len(dictionary):,} phrases as entries of 2 to {pack.merge_size} base ids: {out}"
    return record, [told]


def _checked(args: argparse.Namespace) -> Path:
    if args.out is None:
        raise GenerationError("export needs --out PACK, a .npz file")
    for name, least in (("size", 1), ("merge_size", 2)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise GenerationError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    return Path(args.out)

