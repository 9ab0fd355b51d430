"""`mlx_zip evaluate`: bits per byte, rates of generation and benchmark tasks of models beside one another."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from mlx_zip.cli import packs, rows
from mlx_zip.errors import DataError

CONTEXT = 1024
AVAILABILITY = ("causal", "legacy")
_SETTINGS = (
    "pack",
    "codebook_size",
    "separator",
    "fill_windows",
    "limit_bytes",
    "batch_size",
    "availability",
    "generate",
    "prompts",
    "opening",
    "turns",
    "keep_cache",
    "max_tokens",
    "temp",
    "top_p",
    "stop",
    "seed",
    "tasks",
    "include_path",
    "num_shots",
    "limit",
    "border",
    "apply_chat_template",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add("--model", action="append", required=True, help="folder or hub id; repeat to compare, the baseline first")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code of its own")
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="zip2zip models give ids that the compressor would not have written no probability, unless they hold most "
        "of it (default: as each model's config says)",
    )
    add("--batch-size", type=int, default=8, help="windows, stories or requests per model call (default: 8)")
    add("--json", metavar="FILE", help="also write all figures, settings and versions to FILE")
    packs.add_flags(add, filled_windows=True)
    rows.add_flags(add)
    add("--seed", type=int, default=0, help="seed of sampling and of few-shot examples (default: 0)")
    text = parser.add_argument_group("bits per byte").add_argument
    text("--data", nargs="+", default=(), metavar="FILE", help=".txt or .jsonl with text, .gz of both, or a data set")
    text("--separator", help="line that ends a document of a .txt file (default: each file is one document)")
    text(
        "--fill-windows",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="fill windows with several documents, an eos after each (default: one document each)",
    )
    text(
        "--context",
        type=int,
        help=f"base ids per window (default: the first model's positions, at most {CONTEXT}) "
        "and per request of a task (default: all of them)",
    )
    text("--limit-bytes", type=int, help="stop after so many bytes of text")
    text("--availability", choices=AVAILABILITY, default="causal", help="legacy is not comparable, see the docs")
    rate = parser.add_argument_group("rates of generation").add_argument
    rate("--generate", type=int, metavar="N", help="generate N stories and measure their base tokens per step")
    rate("--prompts", metavar="FILE", help=".jsonl with prompt or messages (default: the openings of --data)")
    rate("--opening", type=int, default=8, help="base ids of a document's opening (default: 8)")
    rate("--turns", type=int, default=1, help="requests in a row per conversation; the last is measured (default: 1)")
    rate("--keep-cache", action="store_true", help="turns go on from the cache, as in a chat (default: anew)")
    rate("--max-tokens", "-m", type=int, default=256, help="base tokens per turn at most (default: 256)")
    rate("--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    rate("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1)")
    rate("--stop", nargs="+", default=(), help="strings that end a turn")
    task = parser.add_argument_group("benchmark tasks (lm-evaluation-harness)").add_argument
    task("--tasks", nargs="+", default=(), help="names, with spaces or commas between")
    task("--include-path", metavar="DIR", help="folder with task files of your own")
    task("--num-shots", type=int, help="examples before each question (default: the task's)")
    task("--limit", type=int, help="questions per task at most")
    task("--border", choices=("whole", "split"), default="whole", help="compress context and answer as one, or apart")
    task("--apply-chat-template", action="store_true", help="questions go through the chat template")
    task("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run the model's answers as code")


def run(args: argparse.Namespace) -> int:
    """Measures model after model and prints the table; 0. Raises `MlxZipError`."""
    from mlx_zip.evaluation import report
    from mlx_zip.text.documents import read_corpus

    args.tasks = [name for part in args.tasks for name in part.split(",") if name]
    _check(args)
    corpus = read_corpus(args.data, args.separator, args.limit_bytes) if args.data else None
    chosen = packs.read(args)
    with rows.open_store(args) as store:
        evaluation = Evaluation(args, corpus, chosen, store)
        for name in args.model:
            evaluation.add(name)
            gc.collect()
    settings = {name: getattr(args, name) for name in _SETTINGS} | {"context": args.context}
    settings["codebook_fingerprint"] = None if chosen is None else chosen.merged.fingerprint
    data = corpus and {**corpus.record(), "altered_documents": evaluation.altered}
    record = report.make_record(evaluation.models, settings, data)
    print(report.table(record))
    if args.json is not None:  # last: should it fail, the table has been seen
        _write(Path(args.json), record)
    return 0


def _check(args: argparse.Namespace) -> None:
    if not (args.data or args.generate is not None or args.tasks):
        raise DataError("nothing to evaluate: give text (--data), a number of stories (--generate) or --tasks")
    if args.generate is not None and not args.data and args.prompts is None:
        raise DataError("--generate needs --prompts, or --data whose openings are continued")
    if args.prompts is not None and args.generate is None:
        raise DataError("--prompts needs --generate N")
    if args.json is not None:
        file = Path(args.json)
        if not file.resolve().parent.is_dir():
            raise DataError(f"--json {args.json}: no such folder")
        if file.exists() and not file.is_file():
            raise DataError(f"--json {args.json or repr('')}: is a folder or device, not a file")


class Evaluation:
    """What has been measured so far. models: a record per model. altered: see `cut_windows`."""

    def __init__(self, args: argparse.Namespace, corpus: Any, chosen: packs.Packs | None, store: Any = None) -> None:
        self.args, self.corpus, self.packs, self.store = args, corpus, chosen, store
        self.start = None if chosen is None else chosen.merged.start
        self.models: list[dict[str, Any]] = []
        self.altered = 0
        self.task_context: int | None = args.context
        self._windows: Any = None
        self._baseline: Any = None

    def add(self, name: str) -> None:
        """Loads a model, measures all that was asked for, and lets go of it."""
        from mlx_zip.evaluation.scoring import context_limit
        from mlx_zip.layout import is_zip

        model, tokenizer = self._load(name)
        if self.packs is not None and is_zip(model):
            packs.check(self.packs, model, tokenizer)
        if self.args.context is None:
            self.task_context = context_limit(model) or CONTEXT
            self.args.context = min(CONTEXT, self.task_context)
        record: dict[str, Any] = {"model": name, "kind": "zip2zip" if is_zip(model) else "plain"}
        if is_zip(model):
            record |= {"canonical": model.config.canonical, **packs.record(self.packs, model)}
            record["kind"] = "plain with a pack" if model.is_plain else "zip2zip"
        if self.corpus:
            record["text"] = self._text(name, model, tokenizer)
        if self.args.generate is not None:
            record["generation"] = self._generation(model, tokenizer)
        if self.args.tasks:
            record["tasks"] = self._tasks(model, tokenizer)
        self.models.append(record)

    def _load(self, name: str) -> tuple[Any, Any]:
        """A model and its tokenizer; a plain one with the pack only if that was tuned for it."""
        from mlx_zip.generate import load
        from mlx_zip.hyper import model_fingerprint

        options = {
            "trust_remote_code": self.args.trust_remote_code,
            "canonical": self.args.canonical,
            "row_store": self.store,
        }
        plain = packs.is_plain(name)
        chosen = packs.load_options(self.args, self.packs, plain)
        if not plain:
            return load(name, **options, **chosen)
        loaded = load(name, **options)
        rows = None if chosen["pack"] is None else chosen["pack"].rows
        if rows is None or rows.plain is None or rows.model != model_fingerprint(loaded[0]):
            return loaded
        return load(name, **options, **chosen)

    def _text(self, name: str, model: Any, tokenizer: Any) -> dict[str, Any]:
        from mlx_zip.evaluation.bits import compare_bits, measure_bits
        from mlx_zip.evaluation.windows import cut_windows

        args = self.args
        windows = cut_windows(tokenizer, self.corpus.documents, args.context, args.fill_windows)
        if self._windows is not None and not windows.same_as(self._windows):
            raise DataError(
                f"{name} has another tokenizer than {args.model[0]}, so their windows are not the same text; "
                "evaluate them one by one: bits per byte of whole documents still compare"
            )
        with Progress(len(windows.windows), "windows", name) as progress:
            bits = measure_bits(model, windows, args.batch_size, args.availability, self.start, progress)
        compared = {} if self._baseline is None else compare_bits(bits, self._baseline)
        if self._baseline is None:
            self._windows, self._baseline, self.altered = windows, bits, windows.altered
        return bits.record() | compared

    def _generation(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        from mlx_zip.evaluation.rates import Settings, measure_rates
        from mlx_zip.text.conversations import make_conversations, openings, read_prompts

        args = self.args
        names = ("max_tokens", "temp", "top_p", "seed", "batch_size", "keep_cache")
        options = {name: getattr(args, name) for name in names}
        settings = Settings(**options, stop=tuple(args.stop), start=self.start)
        if args.prompts is not None:
            prompts = read_prompts(args.prompts)
        else:
            prompts = openings(tokenizer, self.corpus.documents, args.opening)
        conversations = make_conversations(prompts, args.generate, args.turns, repeat=args.temp > 0)
        with Progress(args.generate * args.turns, "turns", "") as progress:
            return measure_rates(model, tokenizer, conversations, settings, progress).record()

    def _tasks(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        from mlx_zip.evaluation.tasks import run_tasks

        names = ("include_path", "num_shots", "limit", "apply_chat_template", "seed", "confirm_run_unsafe_code")
        options = {name: getattr(self.args, name) for name in (*names, "batch_size", "border")}
        return run_tasks(model, tokenizer, self.args.tasks, start=self.start, context=self.task_context, **options)


class Progress:
    """A bar on a terminal's stderr, nothing elsewhere; called with how many more are done."""

    def __init__(self, total: int, unit: str, name: str) -> None:
        from tqdm import tqdm

        shown = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit=f" {unit}", desc=name.rsplit("/", 1)[-1], disable=not shown, leave=False)

    def __call__(self, done: int) -> None:
        self._bar.update(done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _write(path: Path, record: dict[str, Any]) -> None:
    from mlx_zip.files import write_json

    try:
        write_json(path, record)
    except OSError as error:
        raise DataError(f"--json {path}: {error.strerror or error}") from error
