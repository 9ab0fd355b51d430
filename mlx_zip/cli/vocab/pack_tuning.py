"""`mlx_zip vocab pack tune`: trains the embedding rows of a pack's entries for one model, whose weights stay frozen."""

from __future__ import annotations

import argparse
import signal
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.cli.actions import add_json_flag, checked_output_path
from mlx_zip.cli.preparation import add_text_flags, make_prepare_options, make_similar_source, make_sources
from mlx_zip.cli.training import add_training_flags, report_stop
from mlx_zip.errors import DataError
from mlx_zip.models.model_folder import is_plain_model
from mlx_zip.progress import pluralize

EXAMPLE = """example:
  mlx_zip vocab pack tune my.npz --model stories --data train.txt --separator '<|endofstory|>' --out tuned.npz
  mlx_zip generate --model stories --pack tuned.npz --prompt "..."
"""
HELD_OUT = 20  # without --valid, every 20th window of --data is held out
_DEFAULTS = {
    "iters": (300, "number of optimizer steps in the whole run"),
    "batch_size": (8, "number of windows per step"),
    "learning_rate": 2e-3,
    "min_learning_rate": 1e-4,
    "warmup": 0,
    "max_grad_norm": 1.0,
    "seed": (0, "random seed of the order of the windows"),
    "steps_per_report": 10,
    "steps_per_eval": 100,
    "save_every": 50,
    "keep": 2,
    "dtype": "float32",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `pack tune`."""
    parser.epilog, parser.formatter_class = EXAMPLE, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("file", metavar="FILE", help="pack file to tune, as written by `mlx_zip vocab pack learn`")
    add(
        "--model",
        required=True,
        help="model folder, bundled model or hub id to tune the pack for, zip2zip or plain",
    )
    add_text_flags(parser)
    add("--out", required=True, type=Path, help="file for the tuned pack, .npz")
    add(
        "--run",
        type=Path,
        metavar="DIR",
        help="folder for checkpoints and metrics.jsonl; a run found there is continued (default: OUT without .npz)",
    )
    add(
        "--valid",
        nargs="+",
        metavar="NAME",
        help=f"texts to validate on, named as for --data (default: one in {HELD_OUT} windows of --data is held out)",
    )
    add(
        "--most-ids",
        type=int,
        default=5_000_000,
        metavar="N",
        help="learn from the first N base ids of the texts, of a mixture in its shares (default: 5000000)",
    )
    add("--valid-ids", type=int, default=32768, metavar="N", help="validate on at most N base ids (default: 32768)")
    add("--context", type=int, default=512, help="maximum base ids per window (default: 512)")
    add(
        "--codebook-size",
        type=int,
        help="maximum number of hypertokens in a zip2zip model's codebook, the pack's entries included (default: the "
        "model's)",
    )
    add(
        "--position-mode",
        choices=("compressed", "base_token_end"),
        help="how a plain model counts positions; compressed: by id, base_token_end: by base id (default: compressed)",
    )
    add(
        "--dequantize",
        action="store_true",
        help="compute with a quantized model's weights as floats, which is faster and takes more memory (default: off)",
    )
    add(
        "--save-dtype",
        choices=("float32", "float16"),
        default="float32",
        help="floating-point type of the entries' rows in the written pack (default: float32)",
    )
    add_training_flags(add, _DEFAULTS)
    add("--plot", action="store_true", help="draw curves.png in the folder of --run; needs matplotlib (default: off)")
    add_json_flag(add)


def run(args: argparse.Namespace) -> Any:
    """Tunes the pack and writes it. Raises `MlxZipError`.

    Returns a record. If a signal ended the run, whose last step is then saved, returns the exit status 129, 130 or 143.
    """
    from mlx_zip.packs.pack import SUFFIX, load_pack
    from mlx_zip.training.pack_tuning import load_model_to_tune, tune_pack
    from mlx_zip.training.settings import TrainSettings
    from mlx_zip.training.starting_model import dequantize_all_weights

    check_flags_at_least(args, 1, "most_ids", "valid_ids")
    args.out = checked_output_path("--out", args.out, "a pack", SUFFIX, read=[args.file])
    place = args.run or args.out.with_suffix("")
    if args.out.resolve() in (place.resolve(), *place.resolve().parents):
        raise DataError(f"--run {place}: the tuned pack is to be a file at {args.out}; choose another --run")
    if args.plot:
        from mlx_zip.training.run_folder import load_matplotlib

        load_matplotlib()  # fails now rather than after the run
    chosen = {name: getattr(args, name) for name in _DEFAULTS}
    settings = TrainSettings(optimizer="adam", weight_decay=0.0, val_batches=0, **chosen)
    pack = load_pack(args.file)
    plan, tokenizer, plain = _make_tuning_plan(args, pack)
    data, valid = _read_tuning_windows(args, plan, tokenizer)
    model = load_model_to_tune(args.model, plan.params, args.position_mode or "compressed", args.trust_remote_code)
    name = model.fingerprint
    if args.dequantize:
        model = dequantize_all_weights(model, args.dtype)
    found = tune_pack(pack, model, data, valid, settings, place, plain=plain, name=name, save_dtype=args.save_dtype)
    if args.plot:
        from mlx_zip.training.run_folder import plot_training_curves

        plot_training_curves(place)
    if found.rows is None:
        return report_stop(found.outcome.progress.step, found.outcome.stopped_by or signal.SIGTERM)
    return _write_tuned_pack(args, pack, found, (data, valid), tokenizer)


def _make_tuning_plan(args: argparse.Namespace, pack: Any) -> tuple[Any, Any, bool]:
    """Returns the plan, which has the codec, the tokenizer, and whether the model is plain. Raises `DataError`."""
    from mlx_zip.training.prepare.plan import make_preparation_plan

    if not pack.entries:
        raise DataError(f"{args.file}: a pack without entries has no rows to tune")
    plain = is_plain_model(args.model)
    if plain and args.codebook_size is not None:
        raise DataError("--codebook-size: a plain model's codebook holds the pack's entries and never grows")
    if not plain and args.position_mode is not None:
        raise DataError("--position-mode is for plain models: a zip2zip model's config sets it")
    sizes = {"codebook_size": len(pack.entries), "merge_size": pack.merge_size} if plain else {}
    options = make_prepare_options(args, pack=Path(args.file), train_on="all", **sizes)
    return *make_preparation_plan(options), plain


def _read_tuning_windows(args: argparse.Namespace, plan: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns the compressed windows to train on and those to validate on. Raises `DataError` for too little text."""
    from mlx_zip.training.prepare.text_windows import compress_windows, cut_record_windows, encode_sources

    def windows(some: Any, most_ids: int) -> list[Any]:
        return cut_record_windows(list(encode_sources(some, tokenizer, most_ids, report)), tokenizer, args.context)

    report = lambda line: print(line, file=sys.stderr)
    own = make_sources(args)
    data = windows(own, args.most_ids)
    if args.valid is None:
        if len(data) < HELD_OUT:
            raise DataError(
                f"--data makes {pluralize(len(data), 'window')} (one text, or {args.context} base ids of one); to hold "
                f"one out for validation, at least {HELD_OUT} are needed: give more text, or name validation texts "
                "with --valid"
            )
        data, held = [one for i, one in enumerate(data, 1) if i % HELD_OUT], data[HELD_OUT - 1 :: HELD_OUT]
    else:
        held = windows((make_similar_source(args.valid, own[0]),), args.valid_ids)
        if not held:
            raise DataError(f"--valid {' '.join(args.valid)}: no text to validate on")
    read = accumulate(len(one.ids) for one in held)
    held = [one for one, ids in zip(held, read, strict=True) if ids <= args.valid_ids] or held[:1]
    return compress_windows(plan.params, data, "--data"), compress_windows(plan.params, held, "the held-out text")


def _write_tuned_pack(
    args: argparse.Namespace, pack: Any, found: Any, texts: tuple[Any, Any], tokenizer: Any
) -> dict[str, Any]:
    """Writes the tuned pack; returns figures as a record.

    found: result of `tune_pack`. texts: training and validation windows.
    """
    from mlx_zip.packs.pack import Pack, save_pack
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    data, valid = texts
    progress = found.outcome.progress
    about = {
        "model": Path(args.model).name,
        "iters": progress.step,
        "seen_base_ids": progress.seen_base_ids,
        "learning_rate": args.learning_rate,
        "batch_size": args.batch_size,
        "context": args.context,
        "seed": args.seed,
        "windows": len(data),
        "held_out_windows": len(valid),
        "held_out_bytes": sum(sample.n_bytes for sample in valid.samples),
        "bits_per_byte_before": found.before,
        "bits_per_byte": found.after,
    }
    tuned = Pack(pack.entries, tokenizer_fingerprint(tokenizer), {**pack.about, "tuned": about}, found.rows)
    save_pack(args.out, tuned)
    kept = {"file": str(args.out), "entries": len(pack.entries), "fingerprint": tuned.fingerprint}
    return kept | about
