"""`mlx_zip vocab multitok`: learns dictionaries of phrases, encodes texts with them, shows them, exports packs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.arguments import add_separator_flag, check_flags_at_least
from mlx_zip.cli.actions import (
    add_data_flag,
    add_held_out_flag,
    add_json_flag,
    add_show_flag,
    add_tokenizer_flag,
    checked_output_path,
    format_record,
    iterate_with_progress,
    read_texts,
)
from mlx_zip.cli.compression import model_codec_params
from mlx_zip.cli.vocab.plots import add_plot_flag, checked_plot_path, draw_curves
from mlx_zip.errors import DataError, GenerationError, errors_as

EXAMPLES = """\
examples:
  mlx_zip vocab multitok train --data reviews.jsonl --window 2 --prune 1 --held-out more.jsonl --out reviews.mtok
  mlx_zip vocab multitok train --tokenizer stories --data reviews.jsonl --fraction 50 --out ids.mtok
  mlx_zip vocab multitok encode reviews.mtok --data more.jsonl --unk-id 0 --out ids.jsonl
  mlx_zip vocab multitok stats ids.mtok --tokenizer stories --show 10 --plot uses.svg
  mlx_zip vocab multitok export ids.mtok --tokenizer stories --size 1024 --out pack.npz
"""
_DICTIONARY = "dictionary, as written by `mlx_zip vocab multitok train`"
_SIZE, _MERGE_SIZE = 1024, 3  # defaults of --size and --merge-size
_SETTINGS = ("window", "first_id", "limit", "unk_id")


# ---- texts, and the ids that they become


def _add_text_flags(add: Any, unk_id: str) -> None:
    """Declares the flags of `train` and `encode` that name texts and define their units and samples.

    unk_id: the default of --unk-id, for its help line.
    """
    add_tokenizer_flag(add, "tokenizer whose ids are the units", " (default: the units are words between blanks)")
    add_data_flag(add, "texts to read", "; each record and each .txt file is one sample", required=True)
    add_separator_flag(add)
    add("--lines", action="store_true", help="take each line of a text as one sample (default: off)")
    add("--window", type=int, metavar="N", help="maximum number of units in a phrase; 0: no maximum (default: 0)")
    add(
        "--unk-id",
        type=int,
        metavar="ID",
        help=f"id that stands for every unit that the dictionary does not have (default: {unk_id})",
    )


def _read_samples(args: argparse.Namespace, files: Sequence[str]) -> list[str]:
    """Returns the texts of the samples in `files`, split as --separator and --lines say. Raises `DataError`."""
    texts = read_texts(files, args.separator)
    return [line for text in texts for line in text.splitlines() if line.strip()] if args.lines else texts


def _split_samples(texts: list[str], tokenizer: Any) -> Iterator[Sequence[Any]]:
    """Yields each sample as its words, or as the ids of `tokenizer` if it is not None; shows a progress bar."""
    for text in iterate_with_progress("Encoding", texts):
        yield text.split() if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)


def _read_tokenizer_units(name: str | None) -> tuple[Any, Any]:
    """Returns the tokenizer `name` and its ids as units; (None, None) if `name` is None, so that units are words."""
    if name is None:
        return None, None
    from mlx_zip.text.tokenizers import load_tokenizer
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Tokens

    tokenizer = load_tokenizer(name)
    return tokenizer, Tokens(1 + max(tokenizer.get_vocab().values()), tokenizer_fingerprint(tokenizer))


def _read_dictionary_tokenizer(units: Any, args: argparse.Namespace) -> Any:
    """Returns the tokenizer of --tokenizer, None for a dictionary over words. units: units of the dictionary.

    Raises `DataError` if the dictionary was trained on another tokenizer's ids, or on ids and --tokenizer is missing,
    or on words and --tokenizer is given.
    """
    from mlx_zip.vocab.multitok import Words

    if isinstance(units, Words) != (args.tokenizer is None):
        said = "words: leave --tokenizer out" if args.tokenizer else "a tokenizer's ids: name it with --tokenizer"
        raise DataError(f"{args.dictionary} was trained on {said}")
    tokenizer, own = _read_tokenizer_units(args.tokenizer)
    if own is not None and not own.may_equal(units):
        raise DataError(f"{args.dictionary} was trained on the ids of another tokenizer than {args.tokenizer}")
    return tokenizer


def _encode_samples(
    dictionary: Any, texts: list[str], tokenizer: Any, window: int, matching: str = "longest"
) -> tuple[Any, dict[str, Any]]:
    """Returns the ids of the samples, and their counts as a record; `ratio` is tokens divided by units.

    With an unk_id the record has the number and the share of unknown units too.
    """
    from mlx_zip.vocab.multitok import Totals

    units = dictionary.number_units(_split_samples(texts, tokenizer))
    ids, totals = dictionary.encode_all(units, window, matching), Totals()
    totals.add(units, ids)
    record = {**vars(totals), "ratio": totals.ratio}
    if dictionary.settings.unk_id is not None:
        unknown = int((units.ids >= dictionary.settings.units.size).sum())
        record |= {"unknown_units": unknown, "unknown_share": unknown / totals.units if totals.units else 0.0}
    return ids, record


def _write_ids(path: Path, samples: Any) -> None:
    """Writes samples of ids to a file, one JSON list per line. Raises `DataError` if the file cannot be written."""
    from mlx_zip.files import atomic_file

    with (
        errors_as(DataError, str(path), OSError),
        atomic_file(path) as partial,
        open(partial, "w", encoding="ascii") as file,
    ):
        file.writelines(f"{json.dumps(ids.tolist())}\n" for ids in samples)


# ---- train


def _add_multitok_train_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_text_flags(add, "none; such a unit is an error")
    add_held_out_flag(add, "finished dictionary")
    add("--out", required=True, metavar="DICTIONARY", help="file to write the dictionary to")
    add(
        "--fraction",
        type=float,
        metavar="P",
        help="learn phrases from the first P percent of the samples; the others are encoded without phrases "
        "(default: 100)",
    )
    add(
        "--words-of",
        nargs="+",
        metavar="FILE",
        help="further texts whose words become units; no phrase is learned from them",
    )
    add("--first-id", type=int, metavar="ID", help="id of the first unit (default: 1, which keeps 0 for padding)")
    add("--limit", type=int, metavar="N", help="maximum number of phrases to learn (default: as many as ids allow)")
    add(
        "--prune",
        type=int,
        metavar="K",
        help="after training, remove phrases that training used at most K times (default: keep all)",
    )
    add(
        "--prune-mode",
        choices=("published", "single", "parent", "reencode"),
        help="what replaces a removed phrase in the samples. single: its units; published: its units, but phrases that "
        "were never used are kept; parent: the longest kept phrase that it begins with, then units; reencode: the "
        "samples are encoded again (default: reencode)",
    )
    add(
        "--encoded",
        metavar="FILE",
        help="also write the ids of the samples in --data to FILE, one JSON list per sample and line",
    )
    add_plot_flag(add, "how often training used each phrase")
    add_json_flag(add)


def _run_multitok_train(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Words, count_leading_samples, prune, rewrite_ids
    from mlx_zip.vocab.multitok.units import Pruning

    out, encoded, plot = _check_train_flags(args)
    pruning = None if args.prune is None else Pruning(args.prune, args.prune_mode or "reencode")
    share = 100.0 if args.fraction is None else args.fraction
    count_leading_samples(0, share)  # fails now rather than after the texts are read
    tokenizer, units = _read_tokenizer_units(args.tokenizer)
    texts = _read_samples(args, args.data)
    if units is None:
        units = Words.from_samples(map(str.split, [*texts, *_read_samples(args, args.words_of or [])]))
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    dictionary = result = Dictionary(Settings(units, **given))
    samples = dictionary.number_units(_split_samples(texts, tokenizer))
    first, rest = samples.split_at(count_leading_samples(len(samples), share))
    learned, others = dictionary.train(first), dictionary.encode_as_single_units(rest)
    record: dict[str, Any] = {"trained": dictionary.stats()}
    if pruning is not None:
        result = prune(dictionary, pruning.at_most, pruning.mode)
        learned = rewrite_ids(dictionary, result, learned)
        for part, ids in ((first, learned), (rest, others)):
            result.totals.add(part, ids)
        record["pruned"] = {"at_most": pruning.at_most, "mode": pruning.mode, **result.stats()}
    if args.held_out:
        unknown_too = result if result.settings.unk_id is not None else result.with_unk_id(result.settings.first_id)
        held_out = _read_samples(args, args.held_out)
        record["held_out"] = _encode_samples(unknown_too, held_out, tokenizer, result.settings.window)[1]
    if encoded is not None:
        _write_ids(encoded, Samples.join([learned, others]))
    with errors_as(DataError, str(out), OSError):
        result.save(out)
    if plot is not None:
        _draw_phrase_uses(plot, result)
    record["file_bytes"] = out.stat().st_size
    hint = "these rates are of the texts that were learned from: --held-out FILE measures others"
    return record, [*format_record(record), *([] if args.held_out else ["", hint])]


def _check_train_flags(args: argparse.Namespace) -> tuple[Path, Path | None, Path | None]:
    """Returns the paths of --out, --encoded and --plot (None without the flag).

    Raises `MlxZipError` if a file cannot be written or flags exclude each other.
    """
    check_flags_at_least(args, 0, "window", "prune")
    if args.prune_mode and args.prune is None:
        raise GenerationError("--prune-mode needs --prune K")
    if args.words_of and args.tokenizer:
        raise GenerationError("--words-of cannot be used with --tokenizer: all ids of a tokenizer are units already")
    read = [*args.data, *(args.words_of or ()), *args.held_out, args.tokenizer]
    out, encoded = checked_output_path("--out", args.out, read=read), None
    if args.encoded is not None:
        encoded = checked_output_path("--encoded", args.encoded, read=[*read, out])
    return out, encoded, checked_plot_path(args.plot, read=[*read, out, encoded])


def _draw_phrase_uses(path: Path, dictionary: Any) -> None:
    """Draws how often training used each phrase, most used first. Raises `DataError` if training used none."""
    uses = sorted((n for _, n in dictionary.most_saving_phrases(len(dictionary)) if n), reverse=True)
    if not uses:
        raise DataError("--plot: training used no phrase, so there is nothing to draw")
    points = [(rank, n) for rank, n in enumerate(uses, 1)]
    draw_curves(path, {"uses": points}, ("rank of the phrase", "uses in training"), "log")


# ---- encode


def _add_multitok_encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=_DICTIONARY)
    _add_text_flags(add, "the one that the dictionary was trained with, if any; otherwise such a unit is an error")
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


def _run_multitok_encode(args: argparse.Namespace) -> Any:
    from mlx_zip.vocab.multitok import Dictionary

    check_flags_at_least(args, 0, "window")
    if args.out is not None:
        args.out = checked_output_path("--out", args.out, read=[*args.data, args.dictionary, args.tokenizer])
    dictionary = Dictionary.load(args.dictionary)
    if args.unk_id is not None:
        dictionary = dictionary.with_unk_id(args.unk_id)
    tokenizer = _read_dictionary_tokenizer(dictionary.settings.units, args)
    texts = _read_samples(args, args.data)
    ids, record = _encode_samples(dictionary, texts, tokenizer, args.window or 0, args.matching)
    if dictionary.settings.unk_id is not None:
        unknown = f"{record['unknown_units']} of {record['units']} units are unknown ({record['unknown_share']:.2%})"
        print(f"{unknown} and became the --unk-id", file=sys.stderr)
    if args.out is not None:
        _write_ids(args.out, ids)
        return record
    return {**record, "ids": ids.to_lists()}, [json.dumps(one.tolist()) for one in ids]


# ---- stats


def _add_multitok_stats_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=_DICTIONARY)
    add_tokenizer_flag(add, "tokenizer that shows phrases of ids as text", " (default: show the ids)")
    add_show_flag(add, "phrases to list, those that save most units first")
    add_plot_flag(add, "how often training used each phrase")
    add_json_flag(add)


def _run_multitok_stats(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary

    check_flags_at_least(args, 0, "show")
    plot = checked_plot_path(args.plot, read=[args.dictionary])
    dictionary = Dictionary.load(args.dictionary)
    units = dictionary.settings.units
    spell = units.show_units if args.tokenizer is None else _read_dictionary_tokenizer(units, args).decode
    shown = [
        {"id": id, "uses": uses, "units": (run := dictionary.expand([id]).tolist()), "text": spell(run)}
        for id, uses in dictionary.most_saving_phrases(args.show)
    ]
    if plot is not None:
        _draw_phrase_uses(plot, dictionary)
    settings, pruning = dictionary.settings, dictionary.pruning
    record = dictionary.stats() | {
        "window": settings.window,
        "first_id": settings.first_id,
        "unk_id": settings.unk_id,
        "of": settings.units.to_dict()["kind"],
        "pruning": pruning and {"at_most": pruning.at_most, "mode": pruning.mode},
        "shown": shown,
    }
    hint = [] if record["of"] == "words" or args.tokenizer else ["", "--tokenizer NAME shows these ids as text"]
    return record, [*format_record(record), *hint]


# ---- export


def _add_multitok_export_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help=f"{_DICTIONARY} with --tokenizer")
    add_tokenizer_flag(add, "tokenizer that the dictionary was trained with")
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


def _run_multitok_export(args: argparse.Namespace) -> dict[str, Any]:
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
    tokenizer = _read_dictionary_tokenizer(dictionary.settings.units, args)
    codec = model_codec_params(args.tokenizer)
    merge_size = args.merge_size or (codec.merge_size if codec else _MERGE_SIZE)
    disabled = codec.disabled_ids if codec else special_ids(tokenizer)
    mark = tokenizer_fingerprint(tokenizer)
    pack = pack_of_phrases(dictionary, args.size, merge_size, mark, disabled)
    save_pack(out, pack)
    return {
        "file": str(out),
        "entries": len(pack.entries),
        "longest": pack.merge_size,
        "tokenizer": mark,
        "fingerprint": pack.fingerprint,
        "of_phrases": len(dictionary),
    }


ACTIONS = {
    "train": (_add_multitok_train_flags, "learn a dictionary of phrases from texts", _run_multitok_train),
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
