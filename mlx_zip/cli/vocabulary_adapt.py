"""`mlx_zip vocab adapt`: a tokenizer's merge list cut down and adapted to texts; what came of it; its ids of a text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from mlx_zip.bundled import here_or_bundled
from mlx_zip.cli.actions import FIRST_STAGE, add_actions, add_by_place, add_json, printable, progress, settle, writable
from mlx_zip.errors import DataError, GenerationError

_EXAMPLE = """examples:
  mlx_zip vocab adapt learn --tokenizer model-folder --data notes.txt papers.jsonl --merges 15000 --out adapted.json
  mlx_zip vocab adapt show adapted.json --tokenizer model-folder --data held-out.txt
  mlx_zip vocab adapt encode adapted.json --data letter.txt > ids.txt
  mlx_zip vocab adapt encode adapted.json --data ids.txt --decode
  mlx_zip vocab adapt convert adapted.json --model model-folder --out smaller-model
"""
_SWAPS = {"margin": 0, "max_swaps": None, "tie": "high", "counting": "overlapping"}  # settings, and what they are


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their flags."""
    add_actions(parser, ACTIONS, _EXAMPLE)


def _learn_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokenizer", metavar="NAME", help=f"what to adapt: {FIRST_STAGE}")
    add(
        "--data",
        "--text",
        dest="data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts to adapt to: .txt or .jsonl, also with .gz",
    )
    add(
        "--merges",
        type=int,
        required=True,
        metavar="N",
        help="merges that stay in the vocabulary; the 256 bytes and added tokens come on top",
    )
    add("--out", required=True, metavar="FILE", help="file to write")
    add(
        "--method",
        choices=("adapt", "first-k", "top-k"),
        default="adapt",
        help="adapt: swap merges for more useful ones; first-k: the first N; top-k: the N most frequent "
        "(default: adapt)",
    )
    add(
        "--rule",
        choices=("replay", "final"),
        help="how new texts are encoded: the swaps again, in order, or virtual tokens split once at the end "
        "(default: replay; top-k: final)",
    )
    add("--margin", type=int, metavar="N", help="a swap must gain more than this (default: 0)")
    add("--max-swaps", type=int, metavar="N", help="swaps at most (default: as many as pay)")
    add("--tie", choices=("high", "low"), help="rank that goes first of equally rare (default: high)")
    add(
        "--counting",
        choices=("overlapping", "firing"),
        help="pairs where they stand, or as many as would merge (default: overlapping)",
    )
    add(
        "--pieces",
        choices=("gpt2", "cl100k", "digits", "whole"),
        help="how text is cut before merging, where the tokenizer does not say (default: by its name, or gpt2)",
    )
    add(
        "--tokenizer-json",
        metavar="FILE",
        help="also write a tokenizer.json, which is possible when no merge is virtual",
    )
    _common(add)
    add_by_place(add)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="what `learn` wrote")
    add("--tokenizer", "--base", dest="tokenizer", metavar="NAME", help="check that it was adapted from this one")
    add(
        "--data",
        "--text",
        dest="data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts to count its tokens in, beside the tokenizer's own",
    )
    _common(add)


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="what `learn` wrote")
    add("--data", metavar="FILE", help="UTF-8 text, or ids with --decode; - reads standard input")
    add("--decode", action="store_true", help="print the text of ids")
    add("--base-ids", action="store_true", help="ids of the base vocabulary in place of the adapted one's")
    add_json(add)
    add_by_place(add)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="what `learn` wrote")
    add("--model", metavar="DIR", help="folder of a plain or a zip2zip model, quantized or not, whose tokenizer it was")
    add("--out", "--mlx-path", dest="out", required=True, metavar="DIR", help="folder to write; it must not exist")
    add_by_place(add)


def _common(add: Any) -> None:
    add("--columns", nargs="+", default=[], metavar="KEY=NAME", help="what .jsonl records call text, as text=content")
    add("--limit-bytes", type=int, metavar="N", help="bytes of text at most")
    add_json(add)


def run(args: argparse.Namespace) -> int:
    """Does one action; 0. Raises `MlxZipError` before anything is written."""
    return args.do(args)


def _learn(args: argparse.Namespace) -> int:
    from mlx_zip.files import write_json
    from mlx_zip.vocab.adaptbpe.adapted import adapted, words_of
    from mlx_zip.vocab.adaptbpe.base import read_base
    from mlx_zip.vocab.adaptbpe.plain import tokenizer_json

    settle(args, tokenizer="one")
    settings = _settings(args)
    read = [*args.data, args.tokenizer]
    out, plain = writable("--out", args.out, read=read), None
    if args.tokenizer_json is not None:
        plain = writable("--tokenizer-json", args.tokenizer_json, read=[*read, out])
    base = read_base(args.tokenizer, args.pieces)
    texts = _texts(args)
    begun = time.perf_counter()
    words = words_of(base.front, _counted("Counting", texts))
    with progress("Adapting", "swap") as bar:
        vocabulary = adapted(
            base, words, args.merges, method=args.method, progress=lambda swap: bar.update(), **settings
        )
    took_s = time.perf_counter() - begun
    exact = None if plain is None else tokenizer_json(vocabulary, base.source)
    vocabulary.save(out)
    if plain is not None:
        write_json(plain, exact)
    record = _record(vocabulary, base) | _counts(vocabulary, base, texts)
    record |= {"seconds": round(took_s, 3), "file": str(out)}
    _print(args, record)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What is chosen of the method's settings. Raises `GenerationError` for a flag that it has no use for."""
    chosen = {name: value for name in (*_SWAPS, "rule") if (value := getattr(args, name)) is not None}
    if args.method != "adapt" and (lost := [name for name in chosen if name in _SWAPS]):
        raise GenerationError(f"--{lost[0].replace('_', '-')} goes with --method adapt, which swaps merges")
    if args.method == "top-k" and args.rule == "replay":
        raise GenerationError("--rule replay has no swaps to replay with --method top-k, whose rule is final")
    return _SWAPS | chosen if args.method == "adapt" else chosen


def _show(args: argparse.Namespace) -> int:
    from mlx_zip.vocab.adaptbpe.adapted import read_adapted
    from mlx_zip.vocab.adaptbpe.base import read_base

    vocabulary = read_adapted(args.file)
    base = None
    if args.tokenizer is not None:
        base = read_base(args.tokenizer, _own_pieces(vocabulary))
        vocabulary.check_base(base)
    record = _record(vocabulary, base)
    if args.data:
        record |= _counts(vocabulary, base, _texts(args))
    _print(args, record)
    return 0


def _encode(args: argparse.Namespace) -> int:
    from mlx_zip.cli.compression import read_text
    from mlx_zip.vocab.adaptbpe.adapted import read_adapted

    settle(args, data="one")
    vocabulary = read_adapted(args.file)
    text = read_text(args.data)
    if args.decode:
        ids = _ids(args.data, text)
        data = vocabulary.decode(vocabulary.ids_of(ids) if args.base_ids else ids)
        if args.json:
            print(json.dumps({"text": data.decode("utf-8", "replace"), "bytes": len(data)}, ensure_ascii=False))
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
        return 0
    ids = vocabulary.encode(text)
    shown = (vocabulary.ids[ids] if args.base_ids else ids).tolist()
    print(json.dumps({"ids": shown, "bytes": len(text.encode("utf-8"))}) if args.json else " ".join(map(str, shown)))
    return 0


def _convert(args: argparse.Namespace) -> int:
    if args.by_place and args.model is None:  # the model was once named first
        args.by_place, args.model, args.file = args.by_place[1:], args.file, args.by_place[0]
    settle(args, model="none")
    converters: Any = import_module("mlx_zip.converters.adapt")
    with import_module("mlx_zip.converters.cli").warnings_on_stderr():
        print(converters.adapt(str(here_or_bundled(args.model)), args.file, args.out))
    return 0


def _ids(name: str, text: str) -> list[int]:
    words = text.split()
    if wrong := next((word for word in words if not (word.isascii() and word.isdigit() and len(word) < 11)), None):
        raise DataError(f"{name}: {wrong!r:.40} is no id")
    return [int(word) for word in words]


def _own_pieces(vocabulary: Any) -> str | None:
    from mlx_zip.vocab.adaptbpe.encoder import PIECES

    return vocabulary.front.pieces if vocabulary.front.pieces in PIECES else None


def _texts(args: argparse.Namespace) -> list[str]:
    from mlx_zip.text.documents import read_corpus

    columns = dict(word.partition("=")[::2] for word in args.columns)
    return [document.text for document in read_corpus(args.data, None, args.limit_bytes, columns).documents]


def _counted(task: str, texts: list[str]) -> Iterator[str]:
    """Texts, with a bar."""
    with progress(task, "text", len(texts)) as bar:
        for text in texts:
            yield text
            bar.update()


def _record(vocabulary: Any, base: Any) -> dict[str, Any]:
    told = {} if base is None else {"unreachable": base.unreachable, "ignore_merges": base.ignore_merges}
    return {
        "base": vocabulary.name,
        "base_ids": vocabulary.base_ids,
        "ids": len(vocabulary),
        "method": vocabulary.method,
        "rule": vocabulary.rule,
        "merges": vocabulary.actual_merges,
        "virtual": len(vocabulary.virtual),
        "promoted": len(vocabulary.merges) - vocabulary.first,
        "added_tokens": len(vocabulary.front.added),
        "letters": vocabulary.letters,
        "settings": vocabulary.settings,
        "fingerprint": vocabulary.fingerprint,
        **told,
    }


def _counts(vocabulary: Any, base: Any, texts: list[str]) -> dict[str, Any]:
    """Bytes and tokens, and compression utility: bytes saved per byte (arXiv 2601.21665)."""
    n_bytes = sum(len(text.encode("utf-8")) for text in texts)
    tokens = sum(len(vocabulary.encode(text)) for text in _counted("Encoding", texts))
    counts = {"bytes": n_bytes, "tokens": tokens, "utility": round(1 - tokens / n_bytes, 4)}
    if base is not None:
        whole = base.encoder()
        base_tokens = sum(len(base.encode(text, whole)) for text in _counted("Encoding", texts))
        counts |= {"base_tokens": base_tokens, "base_utility": round(1 - base_tokens / n_bytes, 4)}
    return counts


def _print(args: argparse.Namespace, record: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(record, ensure_ascii=False))
        return
    letters = f"{record['letters']} characters of several bytes, " if record["letters"] else ""
    base = printable(record["base"])
    print(
        f"{record['ids']} ids of the {record['base_ids']} of {base}: {record['merges']} merges, 256 bytes, "
        f"{letters}{record['added_tokens']} added tokens"
    )
    print(
        f"{record['promoted']} merges promoted, {record['virtual']} virtual; method {record['method']}, "
        f"rule {record['rule']}"
    )
    if record.get("unreachable"):
        print(f"{record['unreachable']} tokens of {record['base']} are made by no merge and are left out")
    if record.get("ignore_merges"):
        print(f"{record['base']} takes a piece that is a token whole, whatever its merges say; here the merges decide")
    if "bytes" in record:
        print(f"{record['bytes']} bytes are {record['tokens']} tokens: {record['utility']:.4f} of them saved")
    if "base_tokens" in record:
        print(f"with all of {base}: {record['base_tokens']} tokens, {record['base_utility']:.4f} saved")
    if "seconds" in record:
        print(f"adapted in {record['seconds']} s; written to {record['file']}")


ACTIONS = {
    "learn": (_learn_arguments, "adapt a tokenizer to texts and write the adapted one", _learn),
    "show": (_show_arguments, "what an adapted tokenizer keeps, whether it fits a base, what it makes of texts", _show),
    "encode": (_encode_arguments, "the ids of a text, or the text of ids", _encode),
    "convert": (_convert_arguments, "a model folder with the rows and ids that an adapted tokenizer keeps", _convert),
}
