"""`mlx_zip vocab multitok train`: learns a dictionary of phrases; measures tokens per unit in training and held out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.cli.actions import add_held_out_flag, add_json_flag, checked_output_path
from mlx_zip.cli.vocab.multitok_texts import (
    TRAINED,
    Texts,
    add_text_flags,
    format_tokens_per_unit,
    ids_writer,
    make_sample_texts,
    read_tokenizer_units,
    tokens_per_unit_record,
)
from mlx_zip.cli.vocab.plots import add_plot_flag, checked_plot_path, draw_curves
from mlx_zip.errors import CodecError, DataError, GenerationError, errors_as

_SETTINGS = ("window", "first_id", "limit", "unk_id")


def add_multitok_train_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `train`."""
    add = parser.add_argument
    add_text_flags(add, "none; such a unit is an error")
    add_held_out_flag(add, "finished dictionary")
    add("--out", required=True, metavar="DICTIONARY", help="file to write the dictionary to")
    add(
        "--fraction",
        type=float,
        metavar="P",
        help="learn from the first P percent of the samples, and encode the others as single units (default: 100)",
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


def run_multitok_train(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Learns a dictionary and writes it; returns its counts as a record for --json and as lines to print.

    Raises `MlxZipError`.
    """
    from mlx_zip.vocab.multitok import prune
    from mlx_zip.vocab.multitok.units import Pruning

    check_flags_at_least(args, 0, "window")
    out, plot = _check_output_paths(args)
    pruning = Pruning(args.prune or 0, args.prune_mode or "reencode")
    dictionary, texts, learn = _make_dictionary(args)
    with ids_writer(None if args.prune is not None else args.encoded) as write:
        for learned, passed in _train_dictionary(dictionary, texts, learn):
            write(learned)
            write(passed)
    if not dictionary.totals.samples:
        raise DataError(f"{', '.join(args.data)}: no text to learn from")
    record: dict[str, Any] = {"trained": dictionary.stats()}
    result = dictionary
    if args.prune is not None:
        result = prune(dictionary, pruning.at_most, pruning.mode)
        _write_pruned_ids(args, dictionary, result, texts, learn)
        record["pruned"] = {"at_most": pruning.at_most, "mode": pruning.mode, **result.stats()}
    if args.held_out:
        record["held_out"] = _measure_held_out(args, result, texts.tokenizer)
    with errors_as(DataError, str(out), OSError):
        result.save(out)
    if plot is not None:
        draw_phrase_uses(plot, result)
    record["file_bytes"] = out.stat().st_size
    return record, _format_trained_dictionary(record, str(out))


def _check_output_paths(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Returns the paths of --out and --plot (None without the flag).

    Sets `args.encoded` to a path and `args.fraction` to a number. Raises `MlxZipError` if a file cannot be written or
    flags exclude each other.
    """
    from mlx_zip.vocab.multitok import count_leading_samples

    if args.prune_mode and args.prune is None:
        raise GenerationError("--prune-mode needs --prune K")
    if args.words_of and args.tokenizer:
        raise GenerationError("--words-of cannot be used with --tokenizer: all ids of a tokenizer are units already")
    read = [*args.data, *(args.words_of or ()), *args.held_out, args.tokenizer]
    out = checked_output_path("--out", args.out, read=read)
    if args.encoded is not None:
        args.encoded = checked_output_path("--encoded", args.encoded, read=[*read, out])
    args.fraction = 100.0 if args.fraction is None else args.fraction
    count_leading_samples(0, args.fraction)
    return out, checked_plot_path(args.plot, read=[*read, out, args.encoded])


def _make_dictionary(args: argparse.Namespace) -> tuple[Any, Texts, int | None]:
    """Returns an empty dictionary, the texts of --data, and the number of samples to learn from (None: all)."""
    from mlx_zip.vocab.multitok import Dictionary, Settings, count_leading_samples

    tokenizer, units = read_tokenizer_units(args.tokenizer)
    texts, samples = make_sample_texts(args, args.data, tokenizer), 0
    if units is None or args.fraction < 100:
        units, samples = _collect_units(args, texts, units)
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    return (
        Dictionary(Settings(units, **given)),
        texts,
        count_leading_samples(samples, args.fraction) if args.fraction < 100 else None,
    )


def _collect_units(args: argparse.Namespace, texts: Texts, units: Any) -> tuple[Any, int]:
    """Reads all texts once; returns the units and the number of samples.

    units: ids of --tokenizer, which are returned unchanged; None to make the words of the texts the units. Words must
    be read first, because every word gets its id before phrases are learned.
    """
    from mlx_zip.vocab.multitok import Words

    samples, words = 0, {}
    for sample in texts:
        samples += 1
        if units is None:
            words.update(dict.fromkeys(sample))
    for sample in make_sample_texts(args, args.words_of) if args.words_of else ():
        words.update(dict.fromkeys(sample))
    if units is None and not words:
        raise DataError(f"{', '.join(args.data)}: no text to learn from")
    return units or Words(tuple(words)), samples


def _train_dictionary(dictionary: Any, texts: Texts, learn: int | None) -> Iterator[tuple[Any, Any]]:
    """Trains the dictionary on the first `learn` samples (None: all).

    Yields per batch (ids of the samples learned from, ids of the other samples, one id per unit).
    """
    for batch in texts.batches():
        n_learned = len(batch) if learn is None else max(0, min(len(batch), learn - dictionary.totals.samples))
        try:
            first, rest = dictionary.number_units(batch).split_at(n_learned)
        except CodecError as error:  # a word that was not in the files at the first reading
            raise texts.changed_texts_error() from error
        yield dictionary.train(first), dictionary.encode_as_single_units(rest)


def _write_pruned_ids(args: argparse.Namespace, dictionary: Any, pruned: Any, texts: Texts, learn: int | None) -> None:
    """Encodes the texts again with `pruned`, writes the ids to --encoded, and sets the totals of `pruned`.

    dictionary: the dictionary before pruning. learn: number of samples that it learned from, None for all.
    """
    from mlx_zip.vocab.multitok import Dictionary, Rewriter

    rewriter, again = Rewriter(dictionary, pruned), Dictionary(dictionary.settings)
    with ids_writer(args.encoded) as write:
        for learned, passed in _train_dictionary(again, texts, learn):
            for ids in (rewriter(learned), passed):
                pruned.totals.tokens += len(ids.ids)
                write(ids)
    pruned.totals.samples, pruned.totals.units = again.totals.samples, again.totals.units


def _measure_held_out(args: argparse.Namespace, dictionary: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns counts and tokens per unit on --held-out as a record; a word that is not a unit counts as one token."""
    from mlx_zip.vocab.multitok import Totals

    settings, totals, unknown = dictionary.settings, Totals(), 0
    counted = dictionary if settings.unk_id is not None else dictionary.with_unk_id(settings.first_id)
    for batch in make_sample_texts(args, args.held_out, tokenizer).batches():
        units = counted.number_units(batch)
        totals.add(units, counted.encode_all(units, settings.window))
        unknown += int((units.ids >= settings.units.size).sum())
    if not totals.samples:
        raise DataError(f"--held-out {', '.join(args.held_out)}: no text to measure on")
    return tokens_per_unit_record(totals) | {"unknown_units": unknown, "unknown_share": unknown / totals.units}


def draw_phrase_uses(path: Path, dictionary: Any) -> None:
    """Draws how often training used each phrase, most used first. Raises `DataError` if training used none."""
    uses = sorted((n for _, n in dictionary.most_saving_phrases(len(dictionary)) if n), reverse=True)
    if not uses:
        raise DataError("--plot: training used no phrase, so there is nothing to draw")
    points = [(rank, n) for rank, n in enumerate(uses, 1)]
    draw_curves(path, {"uses": points}, ("rank of the phrase", "uses in training"), "log")


def _format_trained_dictionary(record: dict[str, Any], path: str) -> list[str]:
    """Returns a record of `train` as lines to print. path: file of the dictionary."""
    trained, pruned, held_out = record["trained"], record.get("pruned"), record.get("held_out")
    lines = [
        format_tokens_per_unit({name: trained[key] for name, key in TRAINED.items()}) + ", in training",
        f"{trained['units']} units, {trained['phrases']} phrases, of which {trained['never_used']} were never used and "
        f"{trained['used_once']} once; the longest has {trained['longest']} units",
    ]
    if pruned:
        lines.append(
            f"pruned ({pruned['mode']}, used at most {pruned['at_most']}): {pruned['phrases']} phrases, "
            f"{pruned['corpus_tokens']} tokens ({pruned['ratio']:.3f} per unit)"
        )
    if held_out:
        lines.append(
            f"{format_tokens_per_unit(held_out)}, held out; {held_out['unknown_share']:.2%} of the units are unknown"
        )
    else:
        lines.append("these rates are of the texts that were learned from: --held-out FILE measures others")
    return [*lines, f"{record['file_bytes']} bytes: {path}"]
