"""`mlx_zip evaluate`: compares models by bits per byte, rates of generation and benchmark tasks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlx_zip.cli import packs, rows
from mlx_zip.cli.actions import writable
from mlx_zip.cli.progress import Progress

AVAILABILITY = ("causal", "legacy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add(
        "--model",
        action="append",
        required=True,
        help="model to evaluate: folder, hub id or bundled model; repeat the flag to compare, the baseline first",
    )
    add("--out", metavar="FILE", help="JSON file to write with all figures, settings and versions (default: none)")
    add("--json", dest="out", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # --out's old name
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the tokenizer")
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="forbid ids that the compressor would never write, unless together they hold over half the probability "
        "(default: as each model's config says)",
    )
    add("--batch-size", type=int, default=8, help="windows, conversations or requests per model call (default: 8)")
    packs.add_flags(add, filled_windows=True)
    rows.add_flags(add)
    add("--seed", type=int, default=0, help="random seed of sampling and of few-shot examples (default: 0)")
    _add_text(parser.add_argument_group("bits per byte").add_argument)
    _add_rates(parser.add_argument_group("rates of generation").add_argument)
    _add_tasks(parser.add_argument_group("benchmark tasks (lm-evaluation-harness)").add_argument)


def _add_text(add: Any) -> None:
    add(
        "--data",
        nargs="+",
        default=(),
        metavar="FILE",
        help="texts to score: .txt or .jsonl files, also with .gz, or a data set (default: none are scored)",
    )
    add("--separator", help="line that ends a document of a .txt file (default: each file is one document)")
    add(
        "--fill-windows",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="fill windows with several documents, an eos between them (default: one document per window)",
    )
    add(
        "--context",
        type=int,
        help="base ids per window (default: as many as the first model can read, at most 1024) and per request of a "
        "task (default: as many as the first model can read)",
    )
    add("--limit-bytes", type=int, help="stop after this many UTF-8 bytes of text (default: all of it)")
    add(
        "--availability",
        choices=AVAILABILITY,
        default="causal",
        help="legacy scores hypertokens before they exist, as upstream does; not comparable (default: causal)",
    )


def _add_rates(add: Any) -> None:
    add(
        "--generate",
        type=int,
        metavar="N",
        help="number of conversations to generate, to measure base tokens per step (default: none)",
    )
    add("--prompts", metavar="FILE", help=".jsonl file with prompt or messages (default: the openings of --data)")
    add("--opening", type=int, default=8, help="base ids of each document that serve as its prompt (default: 8)")
    add("--turns", type=int, default=1, help="requests per conversation; the last one is measured (default: 1)")
    add("--keep-cache", action="store_true", help="continue each turn from the cache, as in a chat (default: anew)")
    add("--max-tokens", "-m", type=int, default=256, help="maximum number of base tokens per turn (default: 256)")
    add("--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling: probability that is kept (default: 1)")
    add("--stop", nargs="+", default=(), help="strings that end a turn (default: none)")


def _add_tasks(add: Any) -> None:
    add("--tasks", nargs="+", default=(), help="names of tasks, separated by spaces or commas (default: none)")
    add("--include-path", metavar="DIR", help="folder with further task files (default: none)")
    add("--num-shots", type=int, help="examples before each question (default: the task's)")
    add("--limit", type=int, help="maximum number of questions per task (default: all)")
    add(
        "--border",
        choices=("whole", "split"),
        default="whole",
        help="compress a question and its answer as one text, or separately (default: whole)",
    )
    add("--apply-chat-template", action="store_true", help="render questions with the chat template")
    add("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run the model's answers as code")


def run(args: argparse.Namespace) -> int:
    """Measures the models, prints the table and writes the record; returns 0. Raises `MlxZipError`."""
    from dataclasses import fields

    from mlx_zip.evaluation import report
    from mlx_zip.evaluation.evaluate import Evaluation, evaluate
    from mlx_zip.files import write_json

    args.tasks = [name for part in args.tasks for name in part.split(",") if name]
    what = Evaluation(**{field.name: getattr(args, field.name) for field in fields(Evaluation)})
    out = None if args.out is None else writable("--out", args.out, read=[*args.data, args.prompts])
    with rows.open_store(args) as store:
        record = evaluate(
            args.model,
            what,
            pack=args.pack,
            codebook_size=args.codebook_size,
            row_store=store,
            progress=Progress,
            announce=lambda line: print(line, file=sys.stderr),
        )
    print(report.table(record))
    if out is not None:  # last: the table has been printed if this fails
        write_json(out, record)
    return 0
