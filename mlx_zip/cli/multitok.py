"""`mlx_zip vocab multitok`: dictionaries of phrases: learned from a corpus, used on texts, looked at, made packs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_zip.cli.actions import TOKENIZER, add_actions, add_by_place, add_json, settle, writable
from mlx_zip.cli.multitok_export import export, export_flags
from mlx_zip.cli.multitok_texts import Texts, same_units, tokens_of, written
from mlx_zip.errors import CodecError, DataError, GenerationError

EXAMPLES = """\
examples:
  mlx_zip vocab multitok train --data reviews.jsonl --window 2 --prune 1 --out reviews.mtok
  mlx_zip vocab multitok train --tokenizer stories --data reviews.jsonl --fraction 50 --out ids.mtok
  mlx_zip vocab multitok encode reviews.mtok --data more.jsonl --window 1
  mlx_zip vocab multitok stats reviews.mtok --show 10
  mlx_zip vocab multitok export ids.mtok --tokenizer stories --size 1024 --out pack.npz
"""
DATA = ".txt or .jsonl files (or with .gz), .parquet files, folders or hub names of data sets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their flags."""
    add_actions(parser, ACTIONS, EXAMPLES, aliases={"train": ["learn"], "stats": ["show"]})


def _text_flags(add: Any) -> None:
    """Of `train` and `encode`."""
    add(
        "--tokenizer",
        metavar="NAME",
        help=f"the units are this tokenizer's ids: {TOKENIZER} (default: words between blanks)",
    )
    add("--data", nargs="+", metavar="FILE", help=f"texts: {DATA}; a record, or a .txt file, is a sample")
    add("--separator", metavar="LINE", help="a line that ends a sample within a .txt file")
    add("--lines", action="store_true", help="each line of a text is a sample")
    add("--window", type=int, metavar="N", help="units of a phrase at most; 0: any number (default: 0)")
    add("--unk-id", type=int, metavar="ID", help="stands for units that are none (default: such a unit is an error)")
    add_by_place(add)


def _train_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _text_flags(add)
    add("--out", metavar="DICTIONARY", help="file of the dictionary to write")
    add(
        "--fraction",
        type=float,
        metavar="P",
        help="the first P percent of the samples learn; the others stay as they are (default: 100)",
    )
    add(
        "--words-of",
        nargs="+",
        metavar="FILE",
        help="texts whose words are units too, and from which nothing is learnt",
    )
    add("--first-id", type=int, metavar="ID", help="id of the first unit (default: 1, which keeps 0 for padding)")
    add("--limit", type=int, metavar="N", help="phrases at most; what comes later is not learnt")
    add("--prune", type=int, metavar="K", help="give up phrases that training used at most K times")
    add(
        "--prune-mode",
        choices=("published", "single", "parent", "reencode"),
        help="what comes in their place: units (published: but phrases never used stay), the longest phrase left and "
        "units, or the texts encoded again (default: reencode)",
    )
    add("--encoded", metavar="FILE", help="also write the ids of the samples, a JSON list a line")
    add_json(add)


def _encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help="what `train` wrote")
    _text_flags(add)
    add(
        "--matching",
        choices=("longest", "walk"),
        default="longest",
        help="encode by the longest phrase, or as the published code, which ends where a longer run is none (default: "
        "longest)",
    )
    add(
        "--out",
        "--encoded",
        dest="encoded",
        metavar="FILE",
        help="write the ids of the samples, a JSON list a line (default: print them)",
    )
    add_json(add)


def _stats_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dictionary", metavar="DICTIONARY", help="what `train` wrote")
    add("--show", type=int, default=20, metavar="N", help="phrases to list, the most saving first (default: 20)")
    add_json(add)


def run(args: argparse.Namespace) -> int:
    """Does one action and prints; 0. Raises `MlxZipError`."""
    for flag in ("window", "show"):
        if (value := getattr(args, flag, None)) is not None and value < 0:
            raise GenerationError(f"--{flag} must be 0 or more, got {value}")
    record, lines = args.do(args)
    if args.json:
        print(json.dumps(record, ensure_ascii=False))
    elif lines:
        print("\n".join(lines))
    return 0


# ---- train


def _train(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary, Settings, leading, prune
    from mlx_zip.vocab.multitok.settings import Pruning

    settle(args, out="one", data="many")
    if args.prune_mode and args.prune is None:
        raise GenerationError("--prune-mode goes with --prune K")
    if args.words_of and args.tokenizer:
        raise GenerationError("--words-of goes with words, not with a tokenizer, whose ids are all units")
    read = [*args.data, *(args.words_of or ()), args.tokenizer]
    out = writable("--out", args.out, read=read)
    if args.encoded is not None:
        args.encoded = writable("--encoded", args.encoded, read=[*read, out])
    fraction, samples = 100.0 if args.fraction is None else args.fraction, 0
    leading(0, fraction)
    pruning = Pruning(args.prune or 0, args.prune_mode or "reencode")
    tokenizer, units = tokens_of(args.tokenizer)
    texts = _texts(args, args.data, tokenizer)
    if units is None or fraction < 100:
        units, samples = _first_look(args, texts, units)
    names = ("window", "first_id", "limit", "unk_id")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    dictionary = Dictionary(Settings(units, **given))
    learn = leading(samples, fraction) if fraction < 100 else None
    kept = None if args.prune is not None else args.encoded
    with written(kept) as write:
        for learned, passed in _teach(dictionary, texts, learn):
            write(learned)
            write(passed)
    if not dictionary.totals.samples:
        raise DataError(f"{', '.join(args.data)}: no text to learn from")
    record: dict[str, Any] = {"trained": dictionary.stats()}
    result = dictionary
    if args.prune is not None:
        result = prune(dictionary, pruning.at_most, pruning.mode)
        _rewrite(args, dictionary, result, texts, learn)
        record["pruned"] = {"at_most": pruning.at_most, "mode": pruning.mode, **result.stats()}
    try:
        result.save(out)
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}") from error
    record["file_bytes"] = out.stat().st_size
    return record, _told(record, str(out))


def _texts(args: argparse.Namespace, files: Sequence[str], tokenizer: Any = None) -> Texts:
    return Texts(files, args.separator, args.lines, tokenizer)


def _first_look(args: argparse.Namespace, texts: Texts, units: Any) -> tuple[Any, int]:
    """The units, and how many samples there are: words are numbered before any phrase is."""
    from mlx_zip.vocab.multitok import Words

    samples, words = 0, {}
    for sample in texts:
        samples += 1
        if units is None:
            words.update(dict.fromkeys(sample))
    for sample in _texts(args, args.words_of) if args.words_of else ():
        words.update(dict.fromkeys(sample))
    if units is None and not words:
        raise DataError(f"{', '.join(args.data)}: no text to learn from")
    return units or Words(tuple(words)), samples


def _teach(dictionary: Any, texts: Texts, learn: int | None) -> Iterator[tuple[Any, Any]]:
    """Feeds the corpus; gives the ids of the first `learn` samples (None: all), learnt from, and of the others."""
    for batch in texts.batches():
        left = len(batch) if learn is None else max(0, min(len(batch), learn - dictionary.totals.samples))
        try:
            first, rest = dictionary.number(batch).cut(left)
        except CodecError as error:  # a word that was not there when words were numbered
            raise texts.changed() from error
        yield dictionary.train(first), dictionary.pass_by(rest)


def _rewrite(args: argparse.Namespace, dictionary: Any, pruned: Any, texts: Texts, learn: int | None) -> None:
    """Reads the corpus once more, as training wrote it, for what it becomes; counted in the pruned one's totals.

    What was not learnt from stays in units.
    """
    from mlx_zip.vocab.multitok import Dictionary, Rewriter

    rewriter, again = Rewriter(dictionary, pruned), Dictionary(dictionary.settings)
    with written(args.encoded) as write:
        for learned, passed in _teach(again, texts, learn):
            for ids in (rewriter(learned), passed):
                pruned.totals.tokens += len(ids.ids)
                write(ids)
    pruned.totals.samples, pruned.totals.units = again.totals.samples, again.totals.units


def _told(record: dict[str, Any], path: str) -> list[str]:
    trained, pruned = record["trained"], record.get("pruned")
    lines = [
        f"{trained['samples']} samples: {trained['corpus_units']} units -> {trained['corpus_tokens']} tokens "
        f"(r = {trained['ratio']:.3f})",
        f"{trained['units']} units, {trained['phrases']} phrases, of which {trained['never_used']} were never used and "
        f"{trained['used_once']} once; the longest has {trained['longest']} units",
    ]
    if pruned:
        lines.append(
            f"pruned ({pruned['mode']}, used at most {pruned['at_most']}): {pruned['phrases']} phrases, "
            f"{pruned['corpus_tokens']} tokens (r = {pruned['ratio']:.3f})"
        )
    return [*lines, f"{record['file_bytes']} bytes: {path}"]


# ---- encode, stats, export


def _encode(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary, Totals

    settle(args, data="many")
    if args.encoded is not None:
        args.encoded = writable("--out", args.encoded, read=[*args.data, args.dictionary, args.tokenizer])
    dictionary = Dictionary.load(args.dictionary)
    if args.unk_id is not None:
        dictionary = dictionary.with_unk_id(args.unk_id)
    tokenizer = same_units(dictionary.settings.units, args)
    totals, shown = Totals(), []
    with written(args.encoded) as write:
        for batch in _texts(args, args.data, tokenizer).batches():
            units = dictionary.number(batch)
            ids = dictionary.encode_all(units, args.window or 0, args.matching)
            totals.add(units, ids)
            write(ids)
            if args.encoded is None:
                _show(ids, shown if args.json else None)
    record = {"samples": totals.samples, "units": totals.units, "tokens": totals.tokens, "ratio": totals.ratio}
    if args.encoded is None:
        return {**record, "ids": shown}, []
    told = f"{totals.samples} samples: {totals.units} units -> {totals.tokens} tokens (r = {totals.ratio:.3f})"
    return record, [told]


def _show(ids: Any, held: list[Any] | None) -> None:
    if held is not None:
        held += ids.lists()
        return
    for sample in ids.lists():
        print(json.dumps(sample))


def _stats(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.multitok import Dictionary

    dictionary = Dictionary.load(args.dictionary)
    units, pruning, stats = dictionary.settings.units, dictionary.pruning, dictionary.stats()
    shown = [
        {"id": id, "uses": uses, "units": (run := dictionary.expand([id]).tolist()), "text": units.shown(run)}
        for id, uses in dictionary.saving(args.show)
    ]
    made = {
        "window": dictionary.settings.window,
        "first_id": dictionary.settings.first_id,
        "unk_id": dictionary.settings.unk_id,
        "of": units.to_dict()["kind"],
        "pruning": pruning and {"at_most": pruning.at_most, "mode": pruning.mode},
    }
    lengths = ", ".join(f"{count} of {n}" for n, count in list(stats["phrases_by_length"].items())[:8])
    lines = [
        f"{stats['units']} {made['of']}, {stats['phrases']} phrases: {stats['never_used']} never used, "
        f"{stats['used_once']} once" + (f"; pruned ({pruning.mode}, at most {pruning.at_most})" if pruning else ""),
        f"{stats['samples']} samples: {stats['corpus_units']} units -> {stats['corpus_tokens']} tokens "
        f"(r = {stats['ratio']:.3f})",
        f"window {made['window'] or 'of any size'}; phrases by units: {lengths or 'none'}",
        f"{stats['memory_bytes']} bytes in memory",
    ]
    if shown:
        lines += ["", f"{'id':>9} {'uses':>8} {'units':>6}  text"]
    lines += [f"{line['id']:>9} {line['uses']:>8} {len(line['units']):>6}  {line['text']!r}" for line in shown]
    return {**stats, **made, "shown": shown}, lines


ACTIONS = {
    "train": (_train_flags, "learn a dictionary from texts", _train),
    "encode": (_encode_flags, "the ids of texts", _encode),
    "stats": (_stats_flags, "what a dictionary holds", _stats),
    "export": (export_flags, "the phrases of a dictionary over a tokenizer's ids as a codebook pack", export),
}
