"""`mlx_zip vocab pack show`, `merge` and `check`: what is in pack files, and which models can use them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mlx_zip.arguments import check_at_least
from mlx_zip.cli.actions import TOKENIZER, add_json, printable, writable
from mlx_zip.cli.vocab.plots import add_plot, draw_curves, plot_file
from mlx_zip.errors import DataError
from mlx_zip.progress import counted


def show_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `show`."""
    add = parser.add_argument
    add("file", metavar="FILE", help="pack file to show (.npz, .json or .npy)")
    add(
        "--tokenizer",
        metavar="NAME",
        help=f"tokenizer that shows entries as text: {TOKENIZER} (default: show the texts in the pack, else base ids)",
    )
    add(
        "--show",
        "--entries",
        dest="show",
        type=int,
        default=20,
        metavar="N",
        help="number of entries to list, best first (default: 20)",
    )
    add_plot(add, "how often each entry was used in the texts learned from")
    add_json(add)


def show(args: argparse.Namespace) -> int:
    """Prints what a pack holds and its best entries; returns the exit status 0."""
    from mlx_zip.vocab.packs import load_pack

    check_at_least(args, 0, "show")
    plot, pack = plot_file(args.plot, [args.file]), load_pack(args.file)
    entries = pack.entries[: args.show]
    if args.tokenizer is not None:
        tokenizer = _tokenizer(args.tokenizer)
        _check_tokenizer(pack, tokenizer, args.file)
        if wrong := [i for entry in entries for i in entry if i >= len(tokenizer)]:
            raise DataError(f"{args.file} holds the id {wrong[0]}, and {args.tokenizer} has only {len(tokenizer)} ids")
        texts = [tokenizer.decode(list(entry)) for entry in entries]
    else:
        texts = _own_texts(pack)[: args.show] or [" ".join(map(str, entry)) for entry in entries]
    if plot is not None:
        if not (uses := _uses(pack)):
            raise DataError(f"{args.file} does not say how often its entries were used, so there is nothing to draw")
        points = [(rank, n) for rank, n in enumerate(sorted(uses, reverse=True), 1) if n]
        draw_curves(plot, {"uses": points}, ("rank of the entry", "uses in the texts learned from"), "log")
    show_pack(args, Path(args.file), pack, texts)
    return 0


def _own_texts(pack: Any) -> list[str]:
    """Returns the text of each entry from the pack's file, or [] if the file does not hold texts."""
    texts = pack.about.get("texts")
    fit = isinstance(texts, list) and len(texts) == len(pack.entries) and all(isinstance(one, str) for one in texts)
    return texts if fit else []


def _uses(pack: Any) -> list[int]:
    """Returns how often each entry was used in the texts learned from, or [] if the pack's file does not hold that."""
    uses = pack.about.get("uses")
    fit = isinstance(uses, list) and len(uses) == len(pack.entries) and all(type(n) is int and n >= 0 for n in uses)
    return uses if fit else []


def merge_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `merge`."""
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
    add_json(add)


def merge(args: argparse.Namespace) -> int:
    """Merges packs, writes the result and prints what it holds; returns the exit status 0."""
    from mlx_zip.vocab.packs import SUFFIX, load_pack, merge_packs, save_pack

    check_at_least(args, 1, "size")
    args.out = writable("--out", args.out, "a pack", SUFFIX)
    pack = merge_packs([load_pack(file) for file in args.files], args.size, args.drop_rows)
    save_pack(args.out, pack)
    show_pack(args, args.out, pack)
    return 0


def check_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `check`."""
    add = parser.add_argument
    add("file", metavar="FILE", help="pack file to check (.npz, .json or .npy)")
    add("--model", required=True, help="model that shall use the pack: model folder, bundled model or hub id")
    add_json(add)


def check(args: argparse.Namespace) -> int:
    """Prints what a pack holds if the model can use it; returns the exit status 0. Raises `DataError` if it cannot."""
    from dataclasses import replace

    from mlx_zip.errors import CodecError
    from mlx_zip.loading import read_config
    from mlx_zip.text.tokenizers import tokenizer_folder
    from mlx_zip.training.planning import own_codec
    from mlx_zip.vocab.packs import load_pack

    pack, folder = load_pack(args.file), tokenizer_folder(args.model)
    codec = own_codec(read_config(folder))
    if codec is None and pack.rows is None:
        raise DataError(f"{args.model} has no hypertokens, so it can only take a pack that was tuned for it")
    _check_tokenizer(pack, _tokenizer(args.model), args.file)
    try:
        if codec is not None:
            replace(codec, start=pack.entries)
    except CodecError as error:
        raise DataError(f"{args.file} does not fit {args.model}: {error}") from error
    if pack.rows is not None:
        _check_rows(args, pack)
    show_pack(args, Path(args.file), pack)
    if not args.json:
        print(f"{args.model} can use this pack")
    return 0


def _check_rows(args: argparse.Namespace, pack: Any) -> None:
    """Loads the model with the pack. Raises `DataError` if the pack's rows were tuned for another model."""
    from mlx_zip.errors import MlxZipError
    from mlx_zip.loading import load

    try:
        load(args.model, pack=pack)
    except MlxZipError as error:
        raise DataError(f"{args.file} does not fit {args.model}: {error}") from error


def _tokenizer(name: str) -> Any:
    from mlx_zip.text.tokenizers import load_tokenizer

    return load_tokenizer(name)


def _check_tokenizer(pack: Any, tokenizer: Any, name: str) -> None:
    """Raises `DataError` if the pack was learned with another tokenizer. name: the pack's file, for the message."""
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    pack.check_tokenizer(tokenizer_fingerprint(tokenizer), name)


def show_pack(args: argparse.Namespace, path: Path, pack: Any, texts: list[str] | None = None) -> None:
    """Prints what a pack holds, as one JSON object or as lines.

    texts: the texts of its first entries, which are listed; None lists no entries.
    """
    about = {key: value for key, value in pack.about.items() if key not in ("uses", "texts")}
    record = {
        **about,
        "file": str(path),
        "entries": len(pack.entries),
        "longest": pack.merge_size,
        "tokenizer": pack.tokenizer,
        "fingerprint": pack.fingerprint,
        "rows_of": pack.rows and pack.rows.model,
    }
    if texts is not None:
        rows = zip(texts, pack.entries, [*_uses(pack), *[None] * len(texts)], strict=False)
        record["best"] = [{"text": text, "base_ids": entry, "uses": n} for text, entry, n in rows]
    if args.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        print("\n".join(_lines(path, pack, about, record.get("best", []))))


def _lines(path: Path, pack: Any, about: dict[str, Any], best: list[dict[str, Any]]) -> list[str]:
    """Returns what a pack holds as lines to print. about: facts from its file. best: entries to list."""
    entries = f"{counted(len(pack.entries), 'entry')} of 2 to {pack.merge_size} base ids"
    lines = [f"{path}: {entries}, fingerprint {pack.fingerprint[:12]}"]
    if _has_numbers(about, "base_ids", "ids", "ids_without", "window"):
        lines.append(f"learned from {_rate(about)}, in windows of {about['window']}")
        held_out = about.get("held_out")
        if isinstance(held_out, dict) and _has_numbers(held_out, "base_ids", "ids", "ids_without"):
            lines.append(f"held out: {_rate(held_out)}")
        else:
            lines.append("this rate is of the texts learned from: learn with --held-out FILE to measure others")
    if _has_numbers(about, "head_cost", "steps_cost", "ids_without"):
        speedup = about["ids_without"] / about["steps_cost"]
        lines.append(f"a row costs {about['head_cost']:.2e} of a step: {speedup:.3f} times as fast as without the pack")
    if pack.rows is not None:
        shape, model = list(pack.rows.output.shape), printable(pack.rows.model[:12])
        lines.append(f"rows tuned for model {model}: {pack.rows.output.dtype} {shape}")
    return lines + [f"{'' if row['uses'] is None else str(row['uses']):>8.8} {row['text']!r}" for row in best]


def _rate(about: dict[str, Any]) -> str:
    """Returns the rates with and without a pack as text. about: counts as `_rates` returns them."""
    base, ids, without = about["base_ids"], about["ids"], about["ids_without"]
    return f"{base:,} base ids: {base / ids:.3f} base ids per id, {base / without:.3f} without the pack"


def _has_numbers(about: dict[str, Any], *names: str) -> bool:
    """Returns whether `about` holds a positive number under each name; a pack's file may hold anything."""
    return all(type(about.get(name)) in (int, float) and about[name] > 0 for name in names)
