"""Times engines on the same texts: time to first id, decoding, memory, energy, and share of the memory bandwidth.

Each trial runs all engines, starting with a different one, so that a machine that slows down affects all of them. Bad
arguments are refused before any model is made.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from mlx_zip.arguments import check_flags_at_least, default_flags, parse_json_map
from mlx_zip.bench.engines.choice import CHOOSING, ENGINES, check_engine_names, engines_need_mlx, make_engine
from mlx_zip.bench.engines.interface import Engine, Run
from mlx_zip.bench.engines.shape_table import ENCODERS, PRECISIONS, SHAPES, Models, ZipOptions
from mlx_zip.bench.engines.workloads import (
    Workload,
    cut_text,
    domain_files,
    make_conversations,
    read_requests,
    read_tokenizer,
)
from mlx_zip.bench.machine import EnergyMeter, joules_between
from mlx_zip.bench.recording import load_before_bench, print_header
from mlx_zip.errors import MlxZipError
from mlx_zip.progress import ProgressBar

from .generate_record import (
    SCHEMA,
    average_step_bytes,
    ceiling_record,
    sum_counts,
    summarize_figures,
    summary_table,
)

MODES = ("replay", "free", "chat")
SIZES = ("256+256", "512+256", "1024+256", "2048+256")  # as in the paper's table 6


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that choose the model to time."""
    add = parser.add_argument_group("model").add_argument
    flag = default_flags(add)
    add("--model", help="model with hypertokens to time: model folder, hub id or bundled model")
    add(
        "--base",
        help="plain model to compare with: model folder, hub id or bundled model (default: the decoder of --model)",
    )
    add(
        "--shape",
        choices=tuple(SHAPES),
        help="time random weights with the layer sizes of this shape, instead of --model; needs --mode replay",
    )
    flag(
        "--precision", "float32", "precision of the weights of --shape: float32, or bits per weight", choices=PRECISIONS
    )
    add("--tokenizer", default="stories", help="tokenizer for --shape: folder or hub id (default: stories, bundled)")
    flag("--encoder", "transformer", "kind of hyper-encoder of --shape", choices=ENCODERS)
    flag("--encoder-layers", 2, "number of layers of the hyper-encoder of --shape")
    flag("--merge-size", 3, "maximum base ids per hypertoken of --shape")
    flag("--codebook-size", 2048, "maximum number of hypertokens of --shape")


def add_text_arguments(parser: argparse.ArgumentParser, sizes: Sequence[str]) -> None:
    """Declares the flags that choose the texts, and how much is read and written. sizes: default of --sizes."""
    add = parser.add_argument_group("text").add_argument
    flag = default_flags(add)
    add(
        "--text",
        nargs="+",
        default=[],
        metavar="DOMAIN=FILE",
        help="text file of a domain (.txt or .jsonl, each also .gz); more items add files (default: a made-up text)",
    )
    flag("--sizes", list(sizes), "P+G: base tokens to read and to write; every size given is measured", metavar="P+G")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench generate`."""
    add = parser.add_argument
    flag = default_flags(add)
    flag(
        "--engines", ["mlx-lm", "mlx-zip"], f"engines to time on the same texts: {', '.join(ENGINES)}", metavar="ENGINE"
    )
    flag(
        "--mode",
        "replay",
        "what engines write. replay: the text's own continuation; free: greedy decoding; chat: greedy answers in "
        "conversations",
        choices=MODES,
    )
    flag("--trials", 5, "number of timed runs of each engine on each text")
    flag("--warmup", 1, "number of untimed runs of each engine on each text, before the timed ones")
    flag(
        "--rows",
        ["warm"],
        "hyper rows that a run may reuse. warm: those that earlier runs encoded; cold: none; give both words to "
        "measure both in turns",
        choices=("warm", "cold"),
    )
    add(
        "--published",
        metavar="DIR",
        help="checkpoint folder that the engine zip2zip loads, as written by `mlx_zip export`",
    )
    add(
        "--vllm-args",
        metavar="JSON",
        help="JSON map of arguments of vLLM's EngineArgs, for the engines on vLLM, for example "
        "'{\"gpu_memory_utilization\": 0.4}' where two of them share a card (default: none)",
    )
    add_model_arguments(parser)
    add_text_arguments(parser, SIZES)
    add(
        "--requests",
        type=Path,
        metavar="FILE",
        help="file with the requests of --mode chat, one per line (default: 64 built-in requests for stories)",
    )
    flag("--turns", 3, "number of requests in each conversation of --mode chat")
    flag(
        "--conversations",
        1,
        "number of conversations of --mode chat, with different requests; a record has one sample per conversation "
        "and trial",
        metavar="N",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the engines; yields a record per engine and workload (of conversations, per engine and turn).

    Raises `MlxZipError` if the flags, models or texts cannot be used.
    """
    args.rows = list(dict.fromkeys(args.rows))
    args.vllm_args = parse_json_map("--vllm-args", args.vllm_args)
    check_flags_at_least(args, 1, "trials", "turns", "conversations")
    check_flags_at_least(args, 0, "warmup")
    check_engine_names(args.engines)
    check_engines_can_run_mode(args.engines, args.mode, args.rows)
    load_before_bench()
    models, workloads = prepare_models_and_workloads(args)
    engines = [(make_engine(name, models, args), rows) for rows in args.rows for name in args.engines]
    comparison = EngineComparison(args, engines, models)
    print_header("generate", models.name, comparison.devices[args.engines[0]], describe_plan(args, workloads))
    for conversations in group_workloads_by_record(workloads):
        records = []
        for record in comparison.measure(conversations):
            records.append(record)
            yield record
        print(summary_table(records), file=sys.stderr)


def describe_plan(args: argparse.Namespace, workloads: Sequence[Workload]) -> str:
    trials = f"{args.trials} trials after {args.warmup} warm-up, rows {' and '.join(args.rows)}"
    return f"{', '.join(args.engines)}: {len(workloads)} {args.mode} x {trials}"


def group_workloads_by_record(workloads: Sequence[Workload]) -> list[list[Workload]]:
    chats = [one for one in workloads if one.mode == "chat"]
    return [[one] for one in workloads if one.mode != "chat"] + ([chats] if chats else [])


# ---- what is run


def prepare_models_and_workloads(args: argparse.Namespace) -> tuple[Models, list[Workload]]:
    """Returns the models and workloads that the flags ask for; random weights are made last, after all checks.

    Raises `MlxZipError` if the flags, models or texts cannot be used.
    """
    if (args.shape is None) == (args.model is None and args.base is None):
        raise MlxZipError("name a model with --model (and --base), or random weights with --shape")
    if args.shape is not None and args.mode != "replay":
        raise MlxZipError(f"--shape has random weights, which write no text: --mode replay, not {args.mode}")
    if not engines_need_mlx(args.engines):
        from mlx_zip.bench.engines.cuda_engines import torch_models_from_flags  # torch is an extra

        models = torch_models_from_flags(
            args.shape, args.precision, args.model, args.base, args.tokenizer, zip_options_from_flags(args)
        )
        return models, workloads_from_flags(args, models.tokenizer, models.context)
    from mlx_zip.bench.engines.model_making import (  # MLX is not needed by every engine
        models_from_folders,
        models_from_shape,
    )

    if args.shape is None:
        models = models_from_folders(args.model, args.base)
        return models, workloads_from_flags(args, models.tokenizer, models.context)
    tokenizer = read_tokenizer(args.tokenizer)
    workloads = workloads_from_flags(args, tokenizer, SHAPES[args.shape]["max_position_embeddings"])
    return models_from_shape(args.shape, args.precision, tokenizer, zip_options_from_flags(args)), workloads


def zip_options_from_flags(args: argparse.Namespace) -> ZipOptions:
    return ZipOptions(args.encoder, args.encoder_layers, args.merge_size, args.codebook_size)


def workloads_from_flags(args: argparse.Namespace, tokenizer: Any, context: int | None) -> list[Workload]:
    """Returns the workloads that the flags ask for. context: the model's number of positions, None if unknown.

    Raises `MlxZipError` if a text cannot be used, or a workload exceeds the context.
    """
    sizes = [parse_size(text) for text in args.sizes]
    if args.mode == "chat":
        found = make_conversations(tokenizer, read_requests(args.requests), args.conversations, args.turns, sizes[0][1])
    else:
        files = domain_files(args.text)
        found = [
            cut_text(domain, paths, tokenizer, prompt, tokens, args.mode)
            for prompt, tokens in sizes
            for domain, paths in files.items()
        ]
    for workload in found:
        if context is not None and workload.positions > context:
            raise MlxZipError(
                f"{workload.domain} needs {workload.positions} positions, the model's context has {context}; "
                "choose smaller --sizes, or fewer --turns"
            )
    return found


def parse_size(text: str) -> tuple[int, int]:
    """Parses a size such as "512+128" to (512, 128). Raises `MlxZipError` if `text` has another form."""
    head, _, rest = text.partition("+")
    if not (head.isdecimal() and rest.isdecimal() and int(head) >= 1 and int(rest) >= 2):
        raise MlxZipError(f"--sizes {text}: expected P+G, base tokens to read (1 or more) and to write (2 or more)")
    return int(head), int(rest)


def check_engines_can_run_mode(engines: Sequence[str], mode: str, rows: Sequence[str]) -> None:
    for name in engines:
        if name in CHOOSING and mode == "replay":
            raise MlxZipError(f"{name} emits the ids that vLLM chooses and replays no text: --mode free or chat")
        if name == "vllm-zip" and "cold" in rows:
            raise MlxZipError("vllm-zip keeps its rows in vLLM's workers, where they cannot be dropped: --rows warm")


# ---- measuring


@dataclass
class ComparedEngine:
    """An engine to compare, with "warm" or "cold" rows, and its runs so far: [conversations][trials][turns]."""

    engine: Engine
    rows: str
    trials: list[list[list[Run]]]


class EngineComparison:
    """Runs engines alternately on the same conversations and makes their records."""

    def __init__(self, args: argparse.Namespace, engines: Sequence[tuple[Engine, str]], models: Models) -> None:
        """Measures the memory bandwidth of every chip. engines: each with "warm" or "cold" rows.

        If engines of several libraries measure the same chip, the highest bandwidth is used for all of them.
        """
        self.args, self.engines, self.models = args, engines, models
        self.meter = EnergyMeter()
        self.devices = {engine.name: engine.device for engine, _ in engines}
        self.bandwidths: dict[str, tuple[float, str]] = dict.fromkeys(self.devices, (0.0, ""))
        readers = {(self.devices[engine.name]["chip"], engine.yardstick): engine for engine, _ in engines}
        for (chip, yardstick), engine in readers.items():
            found = engine.bandwidth(), yardstick
            for name in [name for name, device in self.devices.items() if device["chip"] == chip]:
                self.bandwidths[name] = max(self.bandwidths[name], found)
        self.run_id = uuid.uuid4().hex[:12]

    def measure(self, conversations: Sequence[Workload]) -> Iterator[dict[str, Any]]:
        """Runs warm-up and trials of every engine on every conversation, then yields a record per engine and turn.

        In each round, all engines run a conversation one after the other, and a different engine starts.
        """
        entrants = [ComparedEngine(engine, rows, [[] for _ in conversations]) for engine, rows in self.engines]
        rounds = range(-self.args.warmup, self.args.trials)
        with ProgressBar(len(rounds) * len(conversations) * len(entrants), "trial", "Measuring") as count:
            for trial in rounds:
                for at, conversation in enumerate(conversations):
                    first = (trial + at) % len(entrants)
                    for entrant in [*entrants[first:], *entrants[:first]]:
                        done = self._run_conversation(entrant, conversation)
                        if trial >= 0:
                            entrant.trials[at].append(done)
                        count()
        for entrant in entrants:
            for turn in range(len(conversations[0].turns)):
                yield self._make_record(entrant, conversations, turn)

    def _run_conversation(self, entrant: ComparedEngine, conversation: Workload) -> list[Run]:
        engine = entrant.engine
        if entrant.rows == "cold":
            engine.forget_encoded_rows()
        held = engine.start_conversation() if len(conversation.turns) > 1 else None
        runs = []
        for turn in conversation.turns:
            before = self.meter.read()
            run = engine.run(turn.prompt, turn.tokens, turn.text, held)
            run.prompt_tokens, run.joules = len(turn.prompt), joules_between(before, self.meter.read())
            runs.append(run)
        return runs

    def _make_record(self, entrant: ComparedEngine, conversations: Sequence[Workload], turn: int) -> dict[str, Any]:
        engine, first = entrant.engine, conversations[0]
        runs = [trial[turn] for of_one in entrant.trials for trial in of_one]
        bandwidth, yardstick = self.bandwidths[engine.name]
        step_bytes = [average_step_bytes(engine.weight_bytes, engine.kv_bytes, run) for run in runs]
        several = {"conversations": len(conversations)} if len(conversations) > 1 else {}
        setting = {name: getattr(self.args, name) for name in ("trials", "warmup")}
        return {
            "bench": "generate",
            "schema": SCHEMA,
            "run": self.run_id,
            "engine": engine.name,
            "mode": first.mode,
            "model": record_model_section(self.models, self.args),
            "workload": {
                "domain": first.domain,
                "data": first.data,
                "window": first.window,
                "turn": turn,
                "turns": len(first.turns),
                "prompt_tokens": round(mean(run.prompt_tokens for run in runs)),
                "tokens": first.turns[turn].tokens,
                **several,
            },
            "setting": {**setting, "rows": entrant.rows},
            "counts": sum_counts([of_one[0][turn] for of_one in entrant.trials]),
            "figures": summarize_figures(runs, step_bytes, bandwidth),
            "ceiling": {**ceiling_record(step_bytes, bandwidth), "yardstick": yardstick},
            "kv_dtype": engine.kv_dtype,
            "energy_source": self.meter.source,
            "device": self.devices[engine.name],
        }


def record_model_section(models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """Returns a record's section `model`.

    It includes the name of a plain model that is not the decoder of the model with hypertokens; with --shape, the
    settings of hyper-encoder and codebook.
    """
    found = {"name": models.name, "precision": models.precision, "weights": models.weights}
    base = {"base": models.folder.name} if models.zip_folder and models.folder else {}
    names = ("encoder", "encoder_layers", "merge_size", "codebook_size") if args.shape else ()
    return {**found, **base, **{name: getattr(args, name) for name in names}}
