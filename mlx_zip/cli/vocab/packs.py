"""`mlx_zip vocab pack`: learns, tunes, shows, merges and checks packs, the entries that a codebook begins with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mlx_zip.arguments import check_at_least
from mlx_zip.cli.actions import add_actions, add_json, writable
from mlx_zip.cli.preparation import add_codec_flags, add_source_flags, disabled_ids, sources
from mlx_zip.cli.vocab import pack_files, pack_tuning
from mlx_zip.cli.vocab.plots import add_plot, draw_curves, plot_file
from mlx_zip.errors import DataError
from mlx_zip.progress import ProgressBar, counted

EXAMPLE = """example:
  mlx_zip vocab pack learn --model stories --data train.txt --separator '<|endofstory|>' --size 1024 --out my.npz
  mlx_zip vocab pack learn --model stories --data src --held-out tests --out code.npz --plot code.svg
  mlx_zip generate --model stories --pack my.npz --prompt "..."
"""
SIZE, SAMPLE_IDS = 1024, 5_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their flags."""
    add_actions(parser, ACTIONS, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Runs one action and returns its exit status. Raises `MlxZipError`."""
    return args.do(args)


# ---- learn


def _learn_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `learn`."""
    add = parser.add_argument
    add_source_flags(parser)
    add_codec_flags(parser)
    add("--out", required=True, type=Path, help="file to write the pack to (.npz)")
    add(
        "--held-out",
        nargs="+",
        metavar="NAME",
        help="texts to measure the finished pack on; nothing is learned from them",
    )
    add("--size", type=int, default=SIZE, help=f"maximum number of entries in the pack (default: {SIZE})")
    add(
        "--head-cost",
        metavar="COST",
        help="cost that each entry adds to a decoding step, as a fraction of the step, or `model` to compute it from "
        "--model; entries that cost more than they save are left out (default: 0)",
    )
    add(
        "--window",
        type=int,
        help="length, in base ids, of the texts that the pack shall shorten (default: 256)",
    )
    add(
        "--most-ids",
        type=int,
        default=SAMPLE_IDS,
        metavar="N",
        help=f"maximum number of base ids to learn from; reading stops there (default: {SAMPLE_IDS})",
    )
    add_plot(add, "base ids per id against the number of entries")
    add_json(add)


def _learn(args: argparse.Namespace) -> int:
    """Learns a pack, writes it and prints its rates; returns the exit status 0."""
    from mlx_zip.training.planning import make_plan
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.learner import WINDOW, learn, measured
    from mlx_zip.vocab.packs import SUFFIX, Pack, save_pack

    args.window = WINDOW if args.window is None else args.window
    check_at_least(args, 1, "size", "window", "most_ids")
    args.out = writable("--out", args.out, "a pack", SUFFIX)
    plot, options = plot_file(args.plot, [args.out]), _options(args)
    held_out_texts = _held_out_source(args, options.sources[0])
    plan, tokenizer, _ = make_plan(options, pads=False)
    texts = _read(args, options.sources, tokenizer)
    held_out = _read(args, held_out_texts, tokenizer) if held_out_texts else []
    if held_out_texts and not any(map(len, held_out)):
        raise DataError(f"--held-out {', '.join(args.held_out)}: no text to measure on")
    cost = _head_cost(args)
    with ProgressBar(None, "round", "Learning") as count:
        found = learn(plan.params, texts, args.size, window=args.window, head_cost=cost, progress=_shown_in(count))
    about: dict[str, Any] = {
        "learned_from": [name for source in options.sources for name in source.data],
        "window": args.window,
        "merge_size": plan.params.merge_size,
        **_rates(found),
        "uses": list(found.uses),
        "texts": [tokenizer.decode(list(entry)) for entry in found.entries],
    }
    if cost:
        about |= {"head_cost": cost, "steps_cost": found.cost(cost)}
    if held_out:
        held = measured(plan.params, found.entries, held_out, args.window)
        about["held_out"] = {"texts": args.held_out, **_rates(held)}
    pack = Pack(found.entries, tokenizer_fingerprint(tokenizer), about)
    save_pack(args.out, pack)
    if plot is not None:
        _plot(plot, found.entries, lambda part, of: measured(plan.params, part, of, args.window), texts, held_out)
    if len(found.entries) < args.size and not cost and not args.json:
        shortfall = f"the texts repeat enough for {len(found.entries):,} of the {args.size:,} entries of --size"
        print(f"{shortfall}; give more text for more entries", file=sys.stderr)
    pack_files.show_pack(args, args.out, pack)
    return 0


def _options(args: argparse.Namespace) -> Any:
    """Returns the flags as `PrepareOptions`, with which `make_plan` reads tokenizer and codec."""
    from mlx_zip.training.prepare import PrepareOptions

    return PrepareOptions(
        sources=sources(args),
        out=args.out,
        model=args.model,
        tokenizer=args.tokenizer,
        merge_size=args.merge_size,
        codebook_size=args.codebook_size,
        disable=disabled_ids(args),
        protect=tuple(args.protect),
        train_on="all",
        empty_start=True,
        trust_remote_code=args.trust_remote_code,
    )


def _held_out_source(args: argparse.Namespace, like: Any) -> tuple[Any, ...]:
    """Returns the texts of --held-out as one source; () without the flag.

    like: the first source of --data, whose separator, columns, subsets and split are used.
    """
    from mlx_zip.text.sources import Source

    if args.held_out is None:
        return ()
    source = Source(tuple(args.held_out), 1.0, like.separator, like.columns, like.subsets, like.split)
    source.check()
    return (source,)


def _read(args: argparse.Namespace, texts: Any, tokenizer: Any) -> list[Any]:
    """Returns the base ids of each text, together at most --most-ids; shows a progress bar."""
    from mlx_zip.training.texts import read_pieces

    found = []
    with ProgressBar(args.most_ids, "id", "Reading") as count:
        for piece in read_pieces(texts, tokenizer, args.most_ids, count.say):
            found.append(piece.ids)
            count(len(piece.ids))
    return found


def _rates(found: Any) -> dict[str, int]:
    """Returns the counts of a `learner.Learned` as a record: base ids, ids without the pack, ids with it."""
    return {"base_ids": found.base_ids, "ids_without": found.ids_without, "ids": found.ids}


def _plot(path: Path, entries: Any, measure: Any, texts: list[Any], held_out: list[Any]) -> None:
    """Draws base ids per id with none, the first 1/8, 1/4, 1/2 and all of the entries.

    measure: function from entries and texts to a `learner.Learned`. texts, held_out: base ids, one array per text.
    """
    sizes = sorted({0, *(len(entries) // part for part in (8, 4, 2, 1))})
    curves = {}
    for name, ids in (("texts learned from", texts), ("held-out texts", held_out)):
        if ids:
            found = [(size, measure(entries[:size], ids)) for size in sizes]
            curves[name] = [(size, one.base_ids / one.ids) for size, one in found]
    draw_curves(path, curves, ("entries of the pack", "base ids per id"))


def _head_cost(args: argparse.Namespace) -> float:
    """Returns --head-cost as a fraction of a step, 0 without the flag; computes it from --model for `model`.

    Raises `DataError` for a value that is neither a number nor `model`, and for `model` without --model.
    """
    if args.head_cost is None:
        return 0.0
    if args.head_cost == "model":
        if args.model is None:
            raise DataError("--head-cost model needs --model: a step reads the model's weights")
        from mlx_zip.loading import model_folder
        from mlx_zip.models.step_bytes import head_cost

        return head_cost(model_folder(args.model))
    try:
        return float(args.head_cost)
    except ValueError as error:
        raise DataError(f"--head-cost {args.head_cost!r} is neither a number nor model") from error


def _shown_in(count: ProgressBar) -> Any:
    """Returns the function that `learn` calls after each round, which shows the stage and its figures in a bar."""

    def show(stage: str, entries: int, ids: int) -> None:
        count.note(f"{stage}: {counted(entries, 'entry')}" + (f", {counted(ids, 'id')}" if ids >= 0 else ""))
        count()

    return show


ACTIONS = {
    "learn": (_learn_flags, "learn the entries that shorten texts most, and write them as a pack", _learn),
    "tune": (pack_tuning.add_arguments, "train the rows of a pack's entries for one model", pack_tuning.run),
    "show": (pack_files.show_flags, "show the entries of a pack as text, with their uses and rates", pack_files.show),
    "merge": (pack_files.merge_flags, "merge several packs into one", pack_files.merge),
    "check": (pack_files.check_flags, "check that a model can use a pack", pack_files.check),
}
