"""Times engines on the same texts: first id, decoding, memory, energy, and the share of the memory bandwidth used.

Engines run in turns within each trial and take turns in going first, so that a machine that slows down slows all of
them. Bad requests are refused before any model is made.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from mlx_zip.errors import MlxZipError

from .engine_choice import ONE_REQUEST, check_engines, make_engine
from .engines import ENGINES, Engine, Run
from .generate_record import SCHEMA, ceiling, ceiling_record, counts, figures
from .lookup import DRAFT
from .machine import EnergyMeter, used
from .progress import Progress, header
from .record import load_before, surroundings
from .report import seen
from .shapes import ENCODERS, PRECISIONS, SHAPES, Models, ZipOptions, from_folders, from_shape
from .workloads import DOMAINS, Workload, chats, cut, read_requests, read_tokenizer, sources

MODES = ("replay", "free", "chat")
SIZES = ("256+256", "512+256", "1024+256", "2048+256")  # of the paper's table 6
PACKAGES = ("mlx", "mlx-lm", "transformers", "torch", "zip2zip")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model is timed."""
    add = parser.add_argument_group("model").add_argument
    add("--model", help="model with hypertokens: a folder, a hub id or a bundled model")
    add("--base", help="plain model to compare with (default: the decoder of --model without hypertokens)")
    add(
        "--shape",
        choices=tuple(SHAPES),
        help="measure random weights of this shape instead of --model; needs --mode replay",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="precision of --shape: float32, or bits per weight (default: float32)",
    )
    add("--tokenizer", default="stories", help="tokenizer of --shape: a folder or a hub id (default: stories)")
    add("--encoder", choices=ENCODERS, default="transformer", help="hyper-encoder of --shape (default: transformer)")
    add("--encoder-layers", type=int, default=2, help="layers of the hyper-encoder of --shape (default: 2)")
    add("--merge-size", type=int, default=3, help="largest number of base ids in a hypertoken of --shape (default: 3)")
    add("--codebook-size", type=int, default=2048, help="largest number of hypertokens of --shape (default: 2048)")


def add_text_arguments(parser: argparse.ArgumentParser, sizes: Sequence[str]) -> None:
    """Flags that say what is read and written. sizes: the default of --sizes."""
    add = parser.add_argument_group("text").add_argument
    add("--data", type=Path, metavar="DIR", help="folder with a folder of texts per domain (default: a made-up text)")
    add("--domains", nargs="+", default=list(DOMAINS), help=f"domains of --data to read (default: {' '.join(DOMAINS)})")
    add(
        "--text",
        nargs="+",
        default=[],
        metavar="DOMAIN=FILE",
        help="text files (.txt, .jsonl) to read instead of --data",
    )
    add(
        "--sizes",
        nargs="+",
        default=list(sizes),
        metavar="P+G",
        help=f"base tokens to read and to write (default: {' '.join(sizes)})",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench generate`."""
    add = parser.add_argument
    add(
        "--engines",
        nargs="+",
        default=["mlx-lm", "mlx-zip"],
        metavar="ENGINE",
        help=f"engines to compare: {', '.join(ENGINES)} (default: mlx-lm mlx-zip)",
    )
    add(
        "--mode",
        choices=MODES,
        default="replay",
        help="replay: emit the text's own continuation; free: greedy decoding; chat: conversations (default: replay)",
    )
    add("--trials", type=int, default=5, help="timed runs of each engine on each text (default: 5)")
    add("--warmup", type=int, default=1, help="untimed runs of each engine on each text before the trials (default: 1)")
    add(
        "--rows",
        nargs="+",
        choices=("warm", "cold"),
        default=["warm"],
        help="warm: a run may use hyper rows that earlier runs encoded; cold: every run begins with none; both words "
        "measure both, in turns (default: warm)",
    )
    add(
        "--draft", type=int, default=DRAFT, help=f"largest number of ids that prompt lookup proposes (default: {DRAFT})"
    )
    add("--published", metavar="DIR", help="checkpoint folder for the engine zip2zip, written by `mlx_zip export`")
    add_model_arguments(parser)
    add_text_arguments(parser, SIZES)
    add("--windows", type=int, default=1, help="number of consecutive parts of each text to run (default: 1)")
    add(
        "--requests",
        type=Path,
        metavar="FILE",
        help="requests of --mode chat, one per line (default: 64 requests for stories)",
    )
    add("--turns", type=int, default=3, help="requests in each conversation of --mode chat (default: 3)")
    add(
        "--conversations",
        type=int,
        default=1,
        metavar="N",
        help="conversations of --mode chat, each with requests of its own; one record holds them all, a sample per "
        "conversation and trial (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per engine and workload, or turn of one, as soon as it is measured. Raises `MlxZipError`."""
    args.rows = list(dict.fromkeys(args.rows))
    for name in ("trials", "windows", "draft", "turns", "conversations"):
        if getattr(args, name) < 1:
            raise MlxZipError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.warmup < 0:
        raise MlxZipError(f"--warmup must be at least 0, got {args.warmup}")
    check_engines(args.engines)
    load_before()
    models, workloads = prepare(args)
    check_fit(args.engines, workloads)
    engines = [(make_engine(name, models, args), rows) for rows in args.rows for name in args.engines]
    comparison = EngineComparison(args, engines, models)
    header("generate", models.name, comparison.devices[args.engines[0]], _plan(args, workloads))
    for conversations in together(workloads):
        records = []
        for record in comparison.measure(conversations):
            records.append(record)
            print(json.dumps(record), flush=True)
        print(seen(records), file=sys.stderr)
    return 0


def _plan(args: argparse.Namespace, workloads: Sequence[Workload]) -> str:
    trials = f"{args.trials} trials after {args.warmup} warm-up, rows {' and '.join(args.rows)}"
    return f"{', '.join(args.engines)}: {len(workloads)} {args.mode} x {trials}"


def together(workloads: Sequence[Workload]) -> list[list[Workload]]:
    """The workloads that one record is about: all conversations of a chat, else each by itself."""
    chats = [one for one in workloads if one.mode == "chat"]
    return [[one] for one in workloads if one.mode != "chat"] + ([chats] if chats else [])


# ---- what is run


def prepare(args: argparse.Namespace) -> tuple[Models, list[Workload]]:
    """Models and workloads as the flags say; a shape's weights are made last. Raises `MlxZipError`."""
    if (args.shape is None) == (args.model is None and args.base is None):
        raise MlxZipError("name a model with --model (and --base), or random weights with --shape")
    if args.shape is None:
        models = from_folders(args.model, args.base)
        return models, workloads_of(args, models.tokenizer, models.context)
    if args.mode != "replay":
        raise MlxZipError(f"--shape has random weights, which write no text: --mode replay, not {args.mode}")
    tokenizer = read_tokenizer(args.tokenizer)
    workloads = workloads_of(args, tokenizer, SHAPES[args.shape]["max_position_embeddings"])
    options = ZipOptions(args.encoder, args.encoder_layers, args.merge_size, args.codebook_size)
    return from_shape(args.shape, args.precision, tokenizer, options), workloads


def workloads_of(args: argparse.Namespace, tokenizer: Any, context: int | None) -> list[Workload]:
    """What the flags ask for. Raises `MlxZipError`, also where the model's `context` has too few positions."""
    sizes = [parse_size(text) for text in args.sizes]
    if args.mode == "chat":
        found = chats(tokenizer, read_requests(args.requests), args.conversations, args.turns, sizes[0][1])
    else:
        files = sources(args.text, args.data, args.domains)
        found = [
            workload
            for prompt, tokens in sizes
            for domain, paths in files.items()
            for workload in cut(domain, paths, tokenizer, prompt, tokens, args.windows, args.mode)
        ]
    for workload in found:
        if context is not None and workload.positions > context:
            raise MlxZipError(
                f"{workload.domain} needs {workload.positions} positions, the model's context has {context}; "
                "choose smaller --sizes, or fewer --turns"
            )
    return found


def parse_size(text: str) -> tuple[int, int]:
    """`512+128` as (512, 128). Raises `MlxZipError`."""
    head, _, rest = text.partition("+")
    if not (head.isdecimal() and rest.isdecimal() and int(head) >= 1 and int(rest) >= 2):
        raise MlxZipError(f"--sizes {text}: expected P+G, base tokens to read (1 or more) and to write (2 or more)")
    return int(head), int(rest)


def check_fit(engines: Sequence[str], workloads: Sequence[Workload]) -> None:
    """Raises `MlxZipError` for a workload that an engine cannot run."""
    for name in engines:
        if name in ONE_REQUEST and any(len(workload.turns) > 1 for workload in workloads):
            raise MlxZipError(f"{name} cannot go on with a conversation: leave it out, or --turns 1")


# ---- measuring


@dataclass
class Trial:
    """One engine's run of a conversation: a `Run` and joules (None where unknown) per turn."""

    runs: list[Run]
    joules: list[float | None]


@dataclass
class Entrant:
    """One engine with warm or cold rows, and its trials: [conversations x trials]."""

    engine: Engine
    rows: str
    trials: list[list[Trial]] = field(default_factory=list)


class EngineComparison:
    """Runs engines in turns on the same conversations and makes their records."""

    def __init__(self, args: argparse.Namespace, engines: Sequence[tuple[Engine, str]], models: Models) -> None:
        """engines: each with "warm" or "cold". The memory bandwidth of every chip is measured here, once."""
        self.args, self.engines, self.models = args, engines, models
        self.meter = EnergyMeter()
        self.devices = {engine.name: engine.device for engine, _ in engines}
        chips = {self.devices[engine.name]["chip"]: engine for engine, _ in engines}
        measured = {chip: engine.bandwidth() for chip, engine in chips.items()}
        self.bytes_per_s = {name: measured[found["chip"]] for name, found in self.devices.items()}
        self.run_id = uuid.uuid4().hex[:12]

    def measure(self, conversations: Sequence[Workload]) -> Iterator[dict[str, Any]]:
        """Runs warm-up and trials of every engine on every conversation, then yields a record per engine and turn.

        Engines take turns within a conversation, and in which of them goes first.
        """
        entrants = [Entrant(engine, rows, [[] for _ in conversations]) for engine, rows in self.engines]
        rounds = range(-self.args.warmup, self.args.trials)
        with Progress("trial", len(rounds) * len(conversations) * len(entrants)) as progress:
            for trial in rounds:
                for at, conversation in enumerate(conversations):
                    first = (trial + at) % len(entrants)
                    for entrant in [*entrants[first:], *entrants[:first]]:
                        done = self._trial(entrant, conversation)
                        if trial >= 0:
                            entrant.trials[at].append(done)
                        progress.step()
        for entrant in entrants:
            for turn in range(len(conversations[0].turns)):
                yield self._record(entrant, conversations, turn)

    def _trial(self, entrant: Entrant, conversation: Workload) -> Trial:
        engine = entrant.engine
        if entrant.rows == "cold":
            engine.fresh()
        held = engine.start() if len(conversation.turns) > 1 else None
        runs, joules = [], []
        for turn in conversation.turns:
            before = self.meter.read()
            runs.append(engine.run(turn.prompt, turn.tokens, turn.text, held))
            joules.append(used(before, self.meter.read()))
        return Trial(runs, joules)

    def _record(self, entrant: Entrant, conversations: Sequence[Workload], turn: int) -> dict[str, Any]:
        """One record; samples are ordered by conversation, then by trial."""
        engine, first = entrant.engine, conversations[0]
        prompts = [len(one.turns[turn].prompt) for one in conversations]
        trials = [trial for of_one in entrant.trials for trial in of_one]
        runs, joules = [trial.runs[turn] for trial in trials], [trial.joules[turn] for trial in trials]
        read = [prompt for prompt in prompts for _ in range(self.args.trials)]
        top = ceiling(self.bytes_per_s[engine.name], engine.weight_bytes, engine.kv_bytes, runs[0])
        several = {"conversations": len(conversations)} if len(conversations) > 1 else {}
        setting = {name: getattr(self.args, name) for name in ("trials", "warmup", "draft")}
        return {
            "bench": "generate",
            "schema": SCHEMA,
            "run": self.run_id,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "engine": engine.name,
            "mode": first.mode,
            "model": self._model(),
            "workload": {
                "domain": first.domain,
                "data": first.data,
                "window": first.window,
                "turn": turn,
                "turns": len(first.turns),
                "prompt_tokens": round(mean(prompts)),
                "tokens": first.turns[turn].tokens,
                **several,
            },
            "setting": {**setting, "rows": entrant.rows},
            "counts": counts(prompts, [of_one[0].runs[turn] for of_one in entrant.trials]),
            "figures": figures(read, runs, joules, top),
            "ceiling": ceiling_record(top),
            "energy_source": self.meter.source,
            "device": self.devices[engine.name],
            **surroundings(*PACKAGES),
        }

    def _model(self) -> dict[str, Any]:
        """The record's section on the model; of random weights, their hypertokens too."""
        models, args = self.models, self.args
        found = {"name": models.name, "precision": models.precision, "weights": models.weights}
        names = ("encoder", "encoder_layers", "merge_size", "codebook_size") if args.shape else ()
        return {**found, **{name: getattr(args, name) for name in names}}
