"""`mlx_zip vocab multitok`: learns dictionaries of phrases, encodes texts with them, shows them, exports packs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.cli.actions import TOKENIZER_HELP, add_json_flag, add_show_flag, checked_output_path
from mlx_zip.cli.vocab.multitok_texts import (
    DICTIONARY,
    TRAINED,
    add_text_flags,
    format_tokens_per_unit,
    ids_writer,
    make_sample_texts,
    read_dictionary_tokenizer,
    tokens_per_unit_record,
)
from mlx_zip.cli.vocab.multitok_training import add_multitok_train_flags, draw_phrase_uses, run_multitok_train
from mlx_zip.cli.vocab.plots import add_plot_flag, checked_plot_path
from mlx_zip.errors import DataError

EXAMPLES = """\
examples:
  mlx_zip vocab multitok train --data reviews.jsonl --window 2 --prune 1 --held-out more.jsonl --out reviews.mtok
  mlx_zip vocab multitok train --tokenizer stories --data reviews.jsonl --fraction 50 --out ids.mtok
  mlx_zip vocab multitok encode reviews.mtok --data more.jsonl --unk-id 0 --out ids.jsonl
  mlx_zip vocab multitok stats ids.mtok --tokenizer stories --show 10 --plot uses.svg
  mlx_zip vocab multitok export ids.mtok --tokenizer stories --size 1024 --out pack.npz
"""
_SIZE, _MERGE_SIZE = 1024, 3  # defaults of --size and --merge-size


# ---- encode


def _add_multitok_encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=DICTIONARY)
    add_text_flags(add, "the one that the dictionary was trained with, if any; otherwise such a unit is an error")
    add(
        "--matching",
        choices=("longest", "walk"),
        default="longest",
        help="how the next phrase is found. longest: take the longest phrase that fits; walk: add unit after unit and "
        "stop at the first run that is no phrase, as the published code does (default: longest)",
    )
    add(
        "--out",
        metavar="FILE",
        help="file to write the ids to, one JSON list per sample and line (default: print them)",
    )
    add_json_flag(add)


def _run_multitok_encode(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary, Totals

    check_flags_at_least(args, 0, "window")
    if args.out is not None:
        args.out = checked_output_path("--out", args.out, read=[*args.data, args.dictionary, args.tokenizer])
    dictionary = Dictionary.load(args.dictionary)
    if args.unk_id is not None:
        dictionary = dictionary.with_unk_id(args.unk_id)
    tokenizer = read_dictionary_tokenizer(dictionary.settings.units, args)
    totals, shown, unknown = Totals(), list[list[int]](), 0
    with ids_writer(args.out) as write:
        for batch in make_sample_texts(args, args.data, tokenizer).batches():
            units = dictionary.number_units(batch)
            ids = dictionary.encode_all(units, args.window or 0, args.matching)
            totals.add(units, ids)
            unknown += int((units.ids >= dictionary.settings.units.size).sum())
            write(ids)
            if args.out is None and args.json:
                shown += ids.to_lists()
            elif args.out is None:
                print("\n".join(map(json.dumps, ids.to_lists())))
    record = tokens_per_unit_record(totals)
    if dictionary.settings.unk_id is not None:
        record |= {"unknown_units": unknown, "unknown_share": unknown / totals.units if totals.units else 0.0}
        line = f"{unknown} of {totals.units} units are unknown ({record['unknown_share']:.2%}) and became the --unk-id"
        print(line, file=sys.stderr)
    if args.out is None:
        return {**record, "ids": shown}, []
    return record, [format_tokens_per_unit(record)]


# ---- stats


def _add_multitok_stats_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=DICTIONARY)
    add(
        "--tokenizer",
        metavar="NAME",
        help=f"tokenizer that shows phrases of ids as text: {TOKENIZER_HELP} (default: show the ids)",
    )
    add_show_flag(add, "phrases to list, those that save most units first")
    add_plot_flag(add, "how often training used each phrase")
    add_json_flag(add)


def _run_multitok_stats(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary

    check_flags_at_least(args, 0, "show")
    plot = checked_plot_path(args.plot, read=[args.dictionary])
    dictionary = Dictionary.load(args.dictionary)
    spell = _unit_decoder(dictionary.settings.units, args)
    shown = [
        {"id": id, "uses": uses, "units": (run := dictionary.expand([id]).tolist()), "text": spell(run)}
        for id, uses in dictionary.most_saving_phrases(args.show)
    ]
    if plot is not None:
        draw_phrase_uses(plot, dictionary)
    settings, pruning = dictionary.settings, dictionary.pruning
    record = dictionary.stats() | {
        "window": settings.window,
        "first_id": settings.first_id,
        "unk_id": settings.unk_id,
        "of": settings.units.to_dict()["kind"],
        "pruning": pruning and {"at_most": pruning.at_most, "mode": pruning.mode},
        "shown": shown,
    }
    hint = [] if record["of"] == "words" or args.tokenizer else ["--tokenizer NAME shows these ids as text"]
    return record, [*_format_phrase_stats(record), *hint]


def _unit_decoder(units: Any, args: argparse.Namespace) -> Callable[[list[int]], str]:
    """Returns a function from a list of units to their text. Without --tokenizer, ids are shown as numbers."""
    if args.tokenizer is None:
        return units.show_units
    tokenizer = read_dictionary_tokenizer(units, args)
    return lambda run: tokenizer.decode(run)


def _format_phrase_stats(record: dict[str, Any]) -> list[str]:
    lengths = ", ".join(f"{count} of {n}" for n, count in list(record["phrases_by_length"].items())[:8])
    pruned = record["pruning"]
    lines = [
        f"{record['units']} {record['of']}, {record['phrases']} phrases: {record['never_used']} never used, "
        f"{record['used_once']} once" + (f"; pruned ({pruned['mode']}, at most {pruned['at_most']})" if pruned else ""),
        format_tokens_per_unit({name: record[key] for name, key in TRAINED.items()}) + ", in training",
        f"window {record['window'] or 'of any size'}; phrases by number of units: {lengths or 'none'}",
        f"{record['memory_bytes']} bytes in memory",
    ]
    if record["shown"]:
        lines += ["", f"{'id':>9} {'uses':>8} {'units':>6}  text"]
    lines += [f"{row['id']:>9} {row['uses']:>8} {len(row['units']):>6}  {row['text']!r}" for row in record["shown"]]
    return lines


# ---- export


def _add_multitok_export_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=f"{DICTIONARY} with --tokenizer")
    add("--tokenizer", metavar="NAME", help=f"tokenizer that the dictionary was trained with: {TOKENIZER_HELP}")
    add("--out", required=True, metavar="PACK", help="file to write the pack to (.npz)")
    add(
        "--size",
        type=int,
        default=_SIZE,
        metavar="N",
        help=f"maximum number of entries in the pack; the most used phrases are taken (default: {_SIZE})",
    )
    add(
        "--merge-size",
        type=int,
        metavar="N",
        help="maximum number of base ids in an entry (default: that of the zip2zip model that --tokenizer names, or "
        f"{_MERGE_SIZE})",
    )
    add_json_flag(add)


def _run_multitok_export(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.packs.pack import SUFFIX, save_pack
    from mlx_zip.packs.phrases import pack_of_phrases
    from mlx_zip.text.token_facts import special_ids
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Dictionary, Words

    check_flags_at_least(args, 1, "size")
    check_flags_at_least(args, 2, "merge_size")
    out = checked_output_path("--out", args.out, "a pack", SUFFIX)
    dictionary = Dictionary.load(args.dictionary)
    if isinstance(dictionary.settings.units, Words):
        raise DataError(
            f"{args.dictionary} was trained on words, and a codebook holds a tokenizer's ids: train with --tokenizer"
        )
    tokenizer = read_dictionary_tokenizer(dictionary.settings.units, args)
    codec = _model_codec(args.tokenizer)
    merge_size = args.merge_size or (codec.merge_size if codec else _MERGE_SIZE)
    disabled = codec.disabled_ids if codec else special_ids(tokenizer)
    mark = tokenizer_fingerprint(tokenizer)
    pack = pack_of_phrases(dictionary, args.size, merge_size, mark, disabled)
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


def _model_codec(name: str) -> Any:
    """Returns the codec settings of the zip2zip model `name`; None if `name` is a plain model or only a tokenizer."""
    from mlx_zip.models.model_folder import read_model_codec, read_model_config
    from mlx_zip.named import resolve_model_name
    from mlx_zip.text.tokenizers import tokenizer_folder

    path = resolve_model_name(name)
    if path.is_file() and path.name != "tokenizer.json":
        return None
    folder = tokenizer_folder(name)
    return read_model_codec(read_model_config(folder)) if (folder / "config.json").is_file() else None


ACTIONS = {
    "train": (add_multitok_train_flags, "learn a dictionary of phrases from texts", run_multitok_train),
    "encode": (_add_multitok_encode_flags, "turn texts into ids of units and phrases", _run_multitok_encode),
    "stats": (
        _add_multitok_stats_flags,
        "show the phrases of a dictionary, their uses and lengths",
        _run_multitok_stats,
    ),
    "export": (
        _add_multitok_export_flags,
        "write the phrases of a dictionary over a tokenizer's ids as a pack",
        _run_multitok_export,
    ),
}
