"""`mlx_zip vocab multitok export`: writes the phrases of a dictionary over a tokenizer's ids as a pack."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip.arguments import check_at_least
from mlx_zip.cli.actions import TOKENIZER, add_json, writable
from mlx_zip.cli.vocab.multitok_texts import DICTIONARY, tokenizer_for
from mlx_zip.errors import DataError

SIZE, MERGE_SIZE = 1024, 3  # defaults: entries of a pack, base ids of an entry


def export_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=f"{DICTIONARY} with --tokenizer")
    add("--tokenizer", metavar="NAME", help=f"tokenizer that the dictionary was trained with: {TOKENIZER}")
    add("--out", required=True, metavar="PACK", help="file to write the pack to (.npz)")
    add(
        "--size",
        type=int,
        default=SIZE,
        metavar="N",
        help=f"maximum number of entries in the pack; the most used phrases are taken (default: {SIZE})",
    )
    add(
        "--merge-size",
        type=int,
        metavar="N",
        help="maximum number of base ids in an entry (default: that of the zip2zip model that --tokenizer names, or "
        f"{MERGE_SIZE})",
    )
    add_json(add)


def export(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Writes the pack; returns what it holds as a record for --json and as lines to print. Raises `MlxZipError`."""
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
    tokenizer = tokenizer_for(dictionary.settings.units, args)
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
    """Returns the codec settings of the zip2zip model that `name` names; None if it names a tokenizer alone."""
    from mlx_zip.bundled import here_or_bundled
    from mlx_zip.loading import read_config
    from mlx_zip.text.tokenizers import tokenizer_folder
    from mlx_zip.training.planning import own_codec

    path = here_or_bundled(name)
    if path.is_file() and path.name != "tokenizer.json":
        return None
    folder = tokenizer_folder(name)
    return own_codec(read_config(folder)) if (folder / "config.json").is_file() else None
