"""`mlx_zip vocab pack`: learns the entries that a codebook begins with, tunes, shows, merges and checks them."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mlx_zip.cli import pack_tuning
from mlx_zip.cli.actions import TOKENIZER, add_actions, add_json, printable, progress, writable
from mlx_zip.cli.preparation import add_codec_flags, add_source_flags, disabled_ids, sources
from mlx_zip.errors import DataError

EXAMPLE = """example:
  mlx_zip vocab pack learn --model stories --data train.txt --separator '<|endofstory|>' --size 1024 --out my.npz
  mlx_zip generate --model stories --pack my.npz --prompt "..."
"""
SIZE, SAMPLE_IDS = 1024, 5_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their flags."""
    add_actions(parser, ACTIONS, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Runs one action; its exit status. Raises `MlxZipError`."""
    return args.do(args)


# ---- learn


def _learn_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source_flags(parser)
    add_codec_flags(parser)
    add("--out", required=True, type=Path, help="the pack to write, a .npz file")
    add("--size", type=int, default=SIZE, help=f"entries at most (default: {SIZE})")
    add(
        "--head-cost",
        metavar="COST",
        help="what a row more of the head costs, as a fraction of a step; model: as much as it costs --model. The pack "
        "ends where an entry more would cost more than it saves (default: 0)",
    )
    add(
        "--window",
        type=int,
        help="base ids compressed on their own: the length of the texts that it is for (default: 256)",
    )
    add(
        "--most-ids",
        type=int,
        default=SAMPLE_IDS,
        metavar="N",
        help=f"base ids to learn from at most, the first ones (default: {SAMPLE_IDS})",
    )
    add_json(add)


def _learn(args: argparse.Namespace) -> int:
    from mlx_zip.training.planning import make_plan
    from mlx_zip.training.prepare_options import PrepareOptions
    from mlx_zip.training.texts import read_pieces
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.learner import WINDOW, learn
    from mlx_zip.vocab.packs import SUFFIX, Pack, save_pack

    window = WINDOW if args.window is None else args.window
    for name, value in (("size", args.size), ("window", window), ("most-ids", args.most_ids)):
        if value < 1:
            raise DataError(f"--{name} must be at least 1, got {value}")
    args.out = writable("--out", args.out, "a pack", SUFFIX)
    options = PrepareOptions(
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
    plan, tokenizer, _ = make_plan(options)
    texts = []
    with progress("Reading", "id", args.most_ids, unit_scale=True) as bar:
        for piece in read_pieces(options.sources, tokenizer, args.most_ids, partial(bar.write, file=sys.stderr)):
            texts.append(piece.ids)
            bar.update(len(piece.ids))
    cost = _head_cost(args)
    found = learn(plan.params, texts, args.size, window=window, head_cost=cost, progress=_progress)
    about: dict[str, Any] = {
        "learned_from": [name for source in options.sources for name in source.data],
        "window": window,
        "merge_size": plan.params.merge_size,
        "base_ids": found.base_ids,
        "ids_without": found.ids_without,
        "ids": found.ids,
        "uses": list(found.uses),
    }
    if cost:
        about |= {"head_cost": cost, "steps_cost": found.cost(cost)}
    pack = Pack(found.entries, tokenizer_fingerprint(tokenizer), about)
    save_pack(args.out, pack)
    _tell(args, args.out, pack)
    return 0


def _head_cost(args: argparse.Namespace) -> float:
    """What --head-cost says. Raises `DataError` for what is neither a number nor `model` beside --model."""
    if args.head_cost is None:
        return 0.0
    if args.head_cost == "model":
        if args.model is None:
            raise DataError("--head-cost model needs --model, whose weights tell what a step reads")
        from mlx_zip.loading import model_folder
        from mlx_zip.models.step_bytes import head_cost

        return head_cost(model_folder(args.model))
    try:
        return float(args.head_cost)
    except ValueError as error:
        raise DataError(f"--head-cost {args.head_cost!r} is neither a number nor model") from error


def _progress(stage: str, entries: int, ids: int) -> None:
    if sys.stderr.isatty():
        told = f", {ids:,} ids" if ids >= 0 else ""
        print(f"\r\x1b[K{stage}: {entries:,} entries{told}", end="\n" if ids >= 0 else "", file=sys.stderr, flush=True)


# ---- show, merge, check


def _show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="a pack")
    add("--tokenizer", metavar="NAME", help=f"show entries as text: {TOKENIZER}")
    add(
        "--show",
        "--entries",
        dest="show",
        type=int,
        default=20,
        metavar="N",
        help="entries to list, the best first (default: 20)",
    )
    add_json(add)


def _show(args: argparse.Namespace) -> int:
    from mlx_zip.vocab.packs import load_pack

    if args.show < 0:
        raise DataError(f"--show must be at least 0, got {args.show}")
    pack, texts = load_pack(args.file), None
    if args.tokenizer is not None:
        tokenizer = _tokenizer(args.tokenizer)
        _check_tokenizer(pack, tokenizer, args.file)
        texts = [tokenizer.decode(list(entry)) for entry in pack.entries[: args.show]]
    _tell(args, Path(args.file), pack, texts)
    return 0


def _merge_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="packs of one tokenizer")
    add("--out", required=True, type=Path, help="the pack to write, a .npz file")
    add("--size", type=int, help="entries at most: the best of each in turn (default: all)")
    add(
        "--drop-rows",
        action="store_true",
        help="leave tuned rows behind: then packs that are not all tuned for one model can be merged",
    )
    add_json(add)


def _merge(args: argparse.Namespace) -> int:
    from mlx_zip.vocab.packs import SUFFIX, load_pack, merge_packs, save_pack

    if args.size is not None and args.size < 1:
        raise DataError(f"--size must be at least 1, got {args.size}")
    args.out = writable("--out", args.out, "a pack", SUFFIX)
    pack = merge_packs([load_pack(file) for file in args.files], args.size, args.drop_rows)
    save_pack(args.out, pack)
    _tell(args, args.out, pack)
    return 0


def _check_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="a pack")
    add("--model", required=True, help="model folder, bundled model or hub id that is to take it")
    add_json(add)


def _check(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from mlx_zip.errors import CodecError
    from mlx_zip.loading import read_config
    from mlx_zip.text.tokenizers import tokenizer_folder
    from mlx_zip.training.planning import own_codec
    from mlx_zip.vocab.packs import load_pack

    pack, folder = load_pack(args.file), tokenizer_folder(args.model)
    codec = own_codec(read_config(folder))
    if codec is None and pack.rows is None:
        raise DataError(f"{args.model} has no hypertokens, so it can take no pack but one that was tuned for it")
    _check_tokenizer(pack, _tokenizer(args.model), args.file)
    try:
        if codec is not None:
            replace(codec, start=pack.entries)
    except CodecError as error:
        raise DataError(f"{args.file} does not fit {args.model}: {error}") from error
    if pack.rows is not None:
        _check_rows(args, pack)
    _tell(args, Path(args.file), pack)
    return 0


def _check_rows(args: argparse.Namespace, pack: Any) -> None:
    """The model is loaded with the pack. Raises `DataError` when its rows were tuned for another one."""
    from mlx_zip.errors import MlxZipError
    from mlx_zip.loading import load

    try:
        load(args.model, pack=pack)
    except MlxZipError as error:
        raise DataError(f"{args.file} does not fit {args.model}: {error}") from error


def _tokenizer(name: str) -> Any:
    from mlx_zip.text.tokenizers import load_tokenizer, tokenizer_folder

    return load_tokenizer(tokenizer_folder(name))


def _check_tokenizer(pack: Any, tokenizer: Any, name: str) -> None:
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    pack.check_tokenizer(tokenizer_fingerprint(tokenizer), name)


def _tell(args: argparse.Namespace, path: Path, pack: Any, texts: list[str] | None = None) -> None:
    """What a pack is: one JSON object, or a few lines, with its first entries when there are texts of them."""
    uses = pack.about.get("uses")
    uses = uses if isinstance(uses, list) else []
    about = {key: value for key, value in pack.about.items() if key != "uses"}
    told = {
        **about,
        "file": str(path),
        "entries": len(pack.entries),
        "longest": pack.merge_size,
        "tokenizer": pack.tokenizer,
        "fingerprint": pack.fingerprint,
        "rows_of": pack.rows and pack.rows.model,
    }
    if texts is not None:
        rows = zip(texts, pack.entries, [*uses, *[None] * len(texts)], strict=False)
        told["best"] = [{"text": text, "base_ids": entry, "uses": n} for text, entry, n in rows]
    if args.json:
        print(json.dumps(told, ensure_ascii=False))
        return
    print(f"{path}: {len(pack.entries):,} entries of 2 to {pack.merge_size} base ids, {pack.fingerprint[:12]}")
    if _tells(about, "base_ids", "ids", "ids_without", "window"):
        base, ids, without = about["base_ids"], about["ids"], about["ids_without"]
        print(
            f"learned from {base:,} base ids in windows of {about['window']}: {base / ids:.3f} base ids per id, "
            f"{base / without:.3f} without it"
        )
    if _tells(about, "head_cost", "steps_cost", "ids_without"):
        cost, total = about["head_cost"], about["steps_cost"]
        print(f"a row costs {cost:.2e} of a step: {about['ids_without'] / total:.3f} times as fast as without it")
    if pack.rows is not None:
        shape, model = list(pack.rows.output.shape), printable(pack.rows.model[:12])
        print(f"rows tuned for model {model}: {pack.rows.output.dtype} {shape}")
    for row in told["best"] if texts is not None else []:
        print(f"{'' if row['uses'] is None else str(row['uses']):>8.8} {row['text']!r}")


def _tells(about: dict[str, Any], *names: str) -> bool:
    """Whether a pack, which may be made by anything, says these numbers."""
    return all(type(about.get(name)) in (int, float) and about[name] > 0 for name in names)


ACTIONS = {
    "learn": (_learn_flags, "learn the entries that shorten a corpus most", _learn),
    "tune": (pack_tuning.add_arguments, "train the rows of a pack's entries for one model", pack_tuning.run),
    "show": (_show_flags, "show what a pack holds", _show),
    "merge": (_merge_flags, "make one pack of several", _merge),
    "check": (_check_flags, "check that a model can take a pack", _check),
}
