"""`mlx_zip vocab pack`: learns, tunes, shows, merges and checks packs, the entries that a codebook begins with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.cli.actions import (
    add_held_out_flag,
    add_json_flag,
    add_show_flag,
    add_tokenizer_flag,
    checked_output_path,
    format_record,
)
from mlx_zip.cli.preparation import add_codec_flags, add_source_flags, make_prepare_options, make_similar_source
from mlx_zip.cli.vocab import pack_tuning
from mlx_zip.cli.vocab.plots import add_plot_flag, checked_plot_path, draw_curves
from mlx_zip.errors import DataError, errors_as
from mlx_zip.progress import ProgressBar, pluralize

EXAMPLES = """example:
  mlx_zip vocab pack learn --model stories --data train.txt --separator '<|endofstory|>' --size 1024 --out my.npz
  mlx_zip vocab pack learn --model stories --data src --held-out tests --out code.npz --plot code.svg
  mlx_zip generate --model stories --pack my.npz --prompt "..."
"""
_SIZE, _SAMPLE_IDS = 1024, 5_000_000


# ---- learn


def _add_pack_learn_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source_flags(parser)
    add_codec_flags(parser)
    add("--out", required=True, type=Path, help="file to write the pack to (.npz)")
    add_held_out_flag(add, "finished pack", "NAME")
    add("--size", type=int, default=_SIZE, help=f"maximum number of entries in the pack (default: {_SIZE})")
    add(
        "--head-cost",
        metavar="COST",
        help="cost that each entry adds to a decoding step, as a fraction of the step, or `model` to compute it from "
        "--model; entries that cost more than they save are left out (default: 0)",
    )
    add(
        "--window",
        type=int,
        help="length, in base ids, of the texts that the pack shall shorten, at least 2 (default: 256)",
    )
    add(
        "--most-ids",
        type=int,
        default=_SAMPLE_IDS,
        metavar="N",
        help=f"maximum number of base ids to learn from, of a mixture in its shares (default: {_SAMPLE_IDS})",
    )
    add_plot_flag(add, "base ids per id against the number of entries")
    add_json_flag(add)


def _run_pack_learn(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.packs.learner import WINDOW, learn_pack, measure_pack
    from mlx_zip.packs.pack import SUFFIX, Pack, save_pack
    from mlx_zip.training.prepare.plan import make_preparation_plan
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    args.window = WINDOW if args.window is None else args.window
    check_flags_at_least(args, 1, "size", "most_ids")
    check_flags_at_least(args, 2, "window")
    args.out = checked_output_path("--out", args.out, "a pack", SUFFIX)
    plot = checked_plot_path(args.plot, [args.out])
    options = make_prepare_options(args, train_on="all", empty_start=True)
    held_out_texts = (make_similar_source(args.held_out, options.sources[0]),) if args.held_out else ()
    plan, tokenizer = make_preparation_plan(options, pads=False)
    texts = _encode_texts_to_learn(args, options.sources, tokenizer)
    held_out = _encode_texts_to_learn(args, held_out_texts, tokenizer) if held_out_texts else []
    if held_out_texts and not any(map(len, held_out)):
        raise DataError(f"--held-out {', '.join(args.held_out)}: no text to measure on")
    cost = _parse_head_cost(args)
    with ProgressBar(None, "round", "Learning") as count:
        found = learn_pack(
            plan.params, texts, args.size, window=args.window, head_cost=cost, progress=_make_learn_progress(count)
        )
    about: dict[str, Any] = {
        "learned_from": [name for source in options.sources for name in source.data],
        "window": args.window,
        "merge_size": plan.params.merge_size,
        **_pack_rates_record(found),
        "uses": list(found.uses),
        "texts": [tokenizer.decode(list(entry)) for entry in found.entries],
    }
    if cost:
        about |= {"head_cost": cost, "steps_cost": found.cost(cost)}
    if held_out:
        held = measure_pack(plan.params, found.entries, held_out, args.window)
        about["held_out"] = {"texts": args.held_out, **_pack_rates_record(held)}
    pack = Pack(found.entries, tokenizer_fingerprint(tokenizer), about)
    save_pack(args.out, pack)
    if plot is not None:
        _draw_pack_rates(
            plot, found.entries, lambda part, of: measure_pack(plan.params, part, of, args.window), texts, held_out
        )
    if len(found.entries) < args.size and not cost and not args.json:
        shortfall = f"the texts repeat enough for {len(found.entries):,} of the {args.size:,} entries of --size"
        print(f"{shortfall}; give more text for more entries", file=sys.stderr)
    return _describe_pack(args.out, pack)


def _encode_texts_to_learn(args: argparse.Namespace, texts: Any, tokenizer: Any) -> list[Any]:
    """Returns the base ids of each text, together at most --most-ids; shows a progress bar."""
    from mlx_zip.training.prepare.text_windows import encode_sources

    found = []
    with ProgressBar(args.most_ids, "id", "Reading") as count:
        for piece in encode_sources(texts, tokenizer, args.most_ids, count.say):
            found.append(piece.ids)
            count(len(piece.ids))
    return found


def _pack_rates_record(found: Any) -> dict[str, int]:
    """Returns the counts of a `learner.LearnedPack` as a record: base ids, ids without the pack, ids with it."""
    return {"base_ids": found.base_ids, "ids_without": found.ids_without, "ids": found.ids}


def _draw_pack_rates(path: Path, entries: Any, measure: Any, texts: list[Any], held_out: list[Any]) -> None:
    """Draws base ids per id against the number of entries: none, the first 1/8, 1/4 and 1/2, and all.

    measure: function from entries and texts to a `learner.LearnedPack`. texts, held_out: base ids, one array per text.
    """
    sizes = sorted({0, *(len(entries) // part for part in (8, 4, 2, 1))})
    curves = {}
    for name, ids in (("texts learned from", texts), ("held-out texts", held_out)):
        if ids:
            found = [(size, measure(entries[:size], ids)) for size in sizes]
            curves[name] = [(size, one.base_ids / one.ids) for size, one in found]
    draw_curves(path, curves, ("entries of the pack", "base ids per id"))


def _parse_head_cost(args: argparse.Namespace) -> float:
    """Returns --head-cost as a fraction of a step: 0 without the flag, computed from --model if the value is `model`.

    Raises `DataError` if the value is neither a number nor `model`, or is `model` and --model is missing.
    """
    if args.head_cost is None:
        return 0.0
    if args.head_cost == "model":
        if args.model is None:
            raise DataError("--head-cost model needs --model: a step reads the model's weights")
        from mlx_zip.models.loading import output_row_share_of_step
        from mlx_zip.models.model_folder import find_model_folder

        return output_row_share_of_step(find_model_folder(args.model))
    try:
        return float(args.head_cost)
    except ValueError as error:
        raise DataError(f"--head-cost {args.head_cost!r} is neither a number nor model") from error


def _make_learn_progress(count: ProgressBar) -> Any:
    """Returns a function for `learn_pack` to call after each round; it shows the round's counts in the progress bar."""

    def show(stage: str, entries: int, ids: int) -> None:
        count.show_figures(
            f"{stage}: {pluralize(entries, 'entry')}" + (f", {pluralize(ids, 'id')}" if ids >= 0 else "")
        )
        count()

    return show


# ---- show


def _add_pack_show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="pack file to show (.npz, .json or .npy)")
    default = " (default: show the texts in the pack, else base ids)"
    add_tokenizer_flag(add, "tokenizer that shows entries as text", default)
    add_show_flag(add, "entries to list, best first")
    add_plot_flag(add, "how often each entry was used in the texts learned from")
    add_json_flag(add)


def _run_pack_show(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.packs.pack import load_pack
    from mlx_zip.text.tokenizers import load_tokenizer

    check_flags_at_least(args, 0, "show")
    plot, pack = checked_plot_path(args.plot, [args.file]), load_pack(args.file)
    entries = pack.entries[: args.show]
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer)
        pack.check_made_for(tokenizer, args.file)
        if wrong := [i for entry in entries for i in entry if i >= len(tokenizer)]:
            raise DataError(f"{args.file} holds the id {wrong[0]}, and {args.tokenizer} has only {len(tokenizer)} ids")
        texts = [tokenizer.decode(list(entry)) for entry in entries]
    else:
        stored = _read_values_by_entry(pack, "texts", lambda one: isinstance(one, str))
        texts = stored[: args.show] or [" ".join(map(str, entry)) for entry in entries]
    if plot is not None:
        if not (uses := _entry_uses_in_pack(pack)):
            raise DataError(f"{args.file} does not say how often its entries were used, so there is nothing to draw")
        points = [(rank, n) for rank, n in enumerate(sorted(uses, reverse=True), 1) if n]
        draw_curves(plot, {"uses": points}, ("rank of the entry", "uses in the texts learned from"), "log")
    return _describe_pack(args.file, pack, texts)


def _read_values_by_entry(pack: Any, name: str, is_valid: Callable[[Any], bool]) -> list[Any]:
    """Returns the list in the pack's record `name`, [] unless it has one valid value for each entry."""
    values = pack.about.get(name)
    valid = isinstance(values, list) and len(values) == len(pack.entries) and all(map(is_valid, values))
    return values if valid else []


def _entry_uses_in_pack(pack: Any) -> list[int]:
    """Returns how often each entry was used in the texts learned from, [] if the pack does not hold these counts."""
    return _read_values_by_entry(pack, "uses", lambda n: type(n) is int and n >= 0)


# ---- merge


def _add_pack_merge_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="pack files to merge (.npz, .json or .npy), all of the same tokenizer")
    add("--out", required=True, type=Path, help="file to write the pack to (.npz)")
    add(
        "--size",
        type=int,
        help="maximum number of entries in the pack; the best of each file are taken in turn (default: all)",
    )
    add(
        "--drop-rows",
        action="store_true",
        help="drop tuned rows, as is necessary unless all packs are tuned for the same model (default: keep them)",
    )
    add_json_flag(add)


def _run_pack_merge(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.packs.pack import SUFFIX, load_pack, merge_packs, save_pack

    check_flags_at_least(args, 1, "size")
    args.out = checked_output_path("--out", args.out, "a pack", SUFFIX)
    pack = merge_packs([load_pack(file) for file in args.files], args.size, args.drop_rows)
    save_pack(args.out, pack)
    return _describe_pack(args.out, pack)


# ---- check


def _add_pack_check_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="pack file to check (.npz, .json or .npy)")
    add("--model", required=True, help="model that shall use the pack: model folder, bundled model or hub id")
    add_json_flag(add)


def _run_pack_check(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Returns the result of `_describe_pack`. Raises `DataError` if the model cannot use the pack."""
    from mlx_zip.errors import CodecError, MlxZipError
    from mlx_zip.models.model_folder import read_model_codec, read_model_config
    from mlx_zip.packs.pack import load_pack
    from mlx_zip.text.tokenizers import load_tokenizer, tokenizer_folder

    pack, folder = load_pack(args.file), tokenizer_folder(args.model)
    codec = read_model_codec(read_model_config(folder))
    if codec is None and pack.rows is None:
        raise DataError(f"{args.model} has no hypertokens, so it can only take a pack that was tuned for it")
    pack.check_made_for(load_tokenizer(args.model), args.file)
    with errors_as(DataError, f"{args.file} does not fit {args.model}", CodecError):
        if codec is not None:
            codec.with_start(pack)
    if pack.rows is not None:
        from mlx_zip.models.loading import load

        with errors_as(DataError, f"{args.file} does not fit {args.model}", MlxZipError):
            load(args.model, pack=pack)
    record, lines = _describe_pack(args.file, pack)
    return record, [*lines, f"{args.model} can use this pack"]


# ---- description of a pack


def _describe_pack(path: str | Path, pack: Any, texts: list[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns the contents of a pack as a record for --json and as lines to print.

    texts: texts of the pack's first entries, which are then listed; None to list no entries.
    """
    about = {key: value for key, value in pack.about.items() if key not in ("uses", "texts")}
    record = {
        **_add_rates(about),
        "file": str(path),
        "entries": len(pack.entries),
        "longest": pack.merge_size,
        "tokenizer": pack.tokenizer,
        "fingerprint": pack.fingerprint,
        "rows_of": pack.rows and pack.rows.model,
    }
    held_out = about.get("held_out")
    if isinstance(held_out, dict):
        record["held_out"] = _add_rates(held_out)
    if texts is not None:
        rows = zip(texts, pack.entries, [*_entry_uses_in_pack(pack), *[None] * len(texts)], strict=False)
        record["best"] = [{"uses": n, "base_ids": entry, "text": text} for text, entry, n in rows]
    lines = format_record(record)
    if "base_ids_per_id" in record and not held_out:
        lines += ["", "this rate is of the texts learned from: learn with --held-out FILE to measure others"]
    return record, lines


def _add_rates(about: dict[str, Any]) -> dict[str, Any]:
    """Returns what a pack says of texts, with base ids per id, and speed with --head-cost, in addition."""
    rates = {}
    if _has_positive_numbers(about, "base_ids", "ids", "ids_without"):
        base_ids = about["base_ids"]
        rates = {"base_ids_per_id": base_ids / about["ids"], "base_ids_per_id_without": base_ids / about["ids_without"]}
    if _has_positive_numbers(about, "steps_cost", "ids_without"):
        rates["speedup"] = about["ids_without"] / about["steps_cost"]
    return {**about, **rates}


def _has_positive_numbers(about: dict[str, Any], *names: str) -> bool:
    """Returns whether `about` holds a positive number, no larger than a float can be, under each name."""
    return all(type(about.get(name)) in (int, float) and 0 < about[name] <= sys.float_info.max for name in names)


ACTIONS = {
    "learn": (
        _add_pack_learn_flags,
        "learn the entries that shorten texts most, and write them as a pack",
        _run_pack_learn,
    ),
    "tune": (pack_tuning.add_arguments, "train the rows of a pack's entries for one model", pack_tuning.run),
    "show": (_add_pack_show_flags, "show the entries of a pack as text, with their uses and rates", _run_pack_show),
    "merge": (_add_pack_merge_flags, "merge several packs into one", _run_pack_merge),
    "check": (_add_pack_check_flags, "check that a model can use a pack", _run_pack_check),
}
