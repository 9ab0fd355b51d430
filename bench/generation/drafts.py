"""Measures drafts on texts of five kinds: base tokens per pass, the host's work, and time, in alternating paired
trials.

A model writes the text's own answer (replay) or its own greedy answer (free), plain and with hypertokens, with each way
to draft. Passes replayed without a model give the host's work.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.engines.interface import Run
from mlx_zip.bench.engines.mlx_engines import ForcedIdSampler, MlxEngine, installed_row_bytes, with_memory_row_store
from mlx_zip.bench.engines.model_making import models_from_folders
from mlx_zip.bench.engines.shape_table import Models
from mlx_zip.bench.engines.workloads import Turn, Workload
from mlx_zip.bench.recording import load_before_bench, print_header
from mlx_zip.bench.tables.drafts import time_table
from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import as_ids
from mlx_zip.engine.interface import Emitted, Event, Submission
from mlx_zip.engine.mlx.group import Reading
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.pass_costs import PassCosts
from mlx_zip.engine.request import Inline, Request
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.engine.sessions.store import Checkout, NoSessions
from mlx_zip.engine.submissions import Checked
from mlx_zip.models.rows.zip_state import find_zip_state, kv_caches
from mlx_zip.named import PARTNERS
from mlx_zip.progress import ProgressBar

from .draft_replay import KINDS, ROW_BY_ROW, force_text, read_workloads, replay
from .generate import EngineComparison

DRAFTS: dict[str, dict[str, Any]] = {  # way to draft -> fields of `RunOptions`
    "off": {},
    "lookup": {"draft": "lookup"},
    "auto": {"draft": "auto"},
}
HEAD, DRAFT_MODEL = "head", "draft model"  # further ways to draft in --mode greedy; the plain model is the draft model
HOST_ROUNDS = 7  # number of replays, of which the fastest counts
PREFILL = 512  # ids of a prompt in one prefill pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench drafts`."""
    add = parser.add_argument
    flag = default_flags(add)
    flag(
        "--models",
        ["smollm2"],
        "models with hypertokens: smollm2, stories, or folders and hub ids, whose plain model is their decoder",
        metavar="MODEL",
    )
    add("--float32", action="store_true", help="turn quantized weights into float32 first")
    flag(
        "--mode",
        "replay",
        "passes: run no model, count passes and measure the host's work; greedy: count the passes of the model's "
        "greedy answer, at most as long as the text's, also with the model's draft head and with the plain model as "
        "draft model; replay: time the text's own answer; free: time the greedy one",
        choices=("passes", "greedy", "replay", "free"),
    )
    add("--texts", type=int, help="maximum number of texts per kind (default: all)")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="kinds of text to write (default: all)")
    add("--drafts", nargs="+", choices=tuple(DRAFTS), default=list(DRAFTS), help="ways to draft (default: all)")
    add(
        "--rows",
        nargs="+",
        choices=("warm", "cold"),
        default=["cold", "warm"],
        help="what a run may reuse of earlier ones: hyper rows, and what passes cost. cold: neither (default: both "
        "ways, in turns)",
    )
    flag("--trials", 5, "number of timed runs of each way on each text")
    add("--tokens", type=int, help="maximum base tokens that a timed run writes (default: the whole answer)")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per model, text and way to draft. Raises `MlxZipError` if a model cannot be used."""
    check_flags_at_least(args, 1, "trials")
    if args.tokens is not None:
        check_flags_at_least(args, 2, "tokens")
    if args.texts is not None:
        check_flags_at_least(args, 1, "texts")
    args.warmup, args.shape = int("warm" in args.rows), None  # for the records
    load_before_bench()
    for name in args.models:
        models = models_from_folders(name, PARTNERS.get(name), args.float32)
        workloads = list(fitting_workloads(models, args))
        if args.mode in ("passes", "greedy"):
            yield from (replay_records if args.mode == "passes" else greedy_records)(models, workloads)
        else:
            yield from time_drafts(models, workloads, args)


def fitting_workloads(models: Models, args: argparse.Namespace) -> Iterator[Workload]:
    """Yields the workloads of --kinds and --texts that fit the model's context; reports others on standard error."""
    for workload in read_workloads(args.kinds, models.tokenizer, "free" if args.mode == "greedy" else args.mode):
        if args.texts is not None and workload.window >= args.texts:
            continue
        if models.context is None or workload.positions <= models.context:
            yield workload
        else:
            why = f"it needs {workload.positions} positions, {models.name} has {models.context}"
            print(f"{workload.data} is left out: {why}", file=sys.stderr)


# ---- passes without a model


def replay_records(models: Models, workloads: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    """Yields two records per text: for the plain model and for the model with hypertokens."""
    assert models.zipped is not None
    books = {"plain": None, "zip": make_prompt_cache(models.zipped())[-1].books[0]}
    for workload, (kind, book) in product(workloads, books.items()):
        yield make_count_record("passes", kind, models, workload, replay_figures(workload.turns[0], book))


def make_count_record(
    mode: str, engine: str, models: Models, workload: Workload, found: dict[str, Any]
) -> dict[str, Any]:
    """Returns a record for a model and a text. found: the record's own fields."""
    return {
        "bench": "drafts",
        "mode": mode,
        "engine": engine,
        "model": {"name": models.name, "precision": models.precision},
        "workload": {"domain": workload.domain, "data": workload.data},
        **found,
    }


def replay_figures(turn: Turn, book: Codebook | None) -> dict[str, Any]:
    """Returns counts of what is written after the first id, and the host's time per id.

    host_us: microseconds per emitted id in the fastest replay, with "lookup", and with "auto" at the costs
    `ROW_BY_ROW`, at which drafts cannot gain. row_by_row: the gain of "auto" at these costs, the cost without drafts
    divided by the cost with drafts; below 1 is a loss.
    """
    forced, ahead = force_text(turn, book), book is None
    found, ids = replay(turn, book, ahead), len(forced.ids) - 1
    host_s = {
        draft: min(replay(turn, book, ahead, curve).host_s for _ in range(HOST_ROUNDS))
        for draft, curve in (("lookup", None), ("auto", ROW_BY_ROW))
    }
    return {
        "counts": {
            "prompt_tokens": len(turn.prompt),
            "base_tokens": sum(map(len, forced.pieces[1:])),
            "ids": ids,
            "passes": len(found.widths),
            "proposed": sum(found.widths) - len(found.widths),
        },
        "host_us": {draft: round(1e6 * seconds / ids, 2) for draft, seconds in host_s.items()},
        "row_by_row": round(ids / replay(turn, book, ahead, ROW_BY_ROW).cost, 4),
    }


# ---- passes of a model


def greedy_records(models: Models, workloads: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    """Yields a record per text, model and way to draft that the model supports: counts of the greedy answer."""
    read: dict[Any, list[Any]] = {}
    engines = [DraftedEngine(models, kind, draft, read) for kind in ("plain", "zip") for draft in ("off", "lookup")]
    engines += [
        DraftedEngine(models, kind, HEAD, read)
        for kind, make in (("plain", models.plain), ("zip", models.zipped))
        if make is not None and hasattr(make(), "draft_head")
    ]
    engines.append(DraftedEngine(models, "zip", DRAFT_MODEL, read))
    for workload, engine in product(workloads, engines):
        turn = workload.turns[0]
        run = engine.run(turn.prompt, turn.tokens)
        counts = {"base_tokens": len(run.base_ids) - run.first_base, "passes": len(run.ids) - 1}
        yield make_count_record("greedy", engine.name, models, workload, {"counts": counts})


# ---- time


def time_drafts(models: Models, workloads: Sequence[Workload], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times each text with every way to draft, alternating; yields a record per text, way and rows (warm or cold)."""
    read: dict[Any, list[Any]] = {}
    engines = [DraftedEngine(models, kind, draft, read) for kind, draft in product(("plain", "zip"), args.drafts)]
    comparison = EngineComparison(args, list(product(engines, args.rows)), models)
    plan = f"{len(workloads)} texts, {args.mode}, {args.trials} trials after {args.warmup} warm-up"
    print_header("drafts", f"{models.name}, {models.precision}", engines[0].device, plan)
    for workload in workloads:
        measured = comparison.measure([shorten_workload(workload, args.tokens)])
        records = [{**record, "bench": "drafts"} for record in measured]
        yield from records
        print(time_table(records), file=sys.stderr)
        read.clear()


def shorten_workload(workload: Workload, tokens: int | None) -> Workload:
    """Returns the workload with at most `tokens` base ids to write; None keeps all."""
    turn = workload.turns[0]
    text = None if turn.text is None else turn.text[:tokens]
    return replace(workload, turns=(Turn(turn.prompt, min(turn.tokens, tokens or turn.tokens), text),))


class DraftedEngine(MlxEngine):
    """Runs a model on mlx_zip's scheduler with one way to draft. A step of its `Run` is a pass of the model.

    kind: "plain" or "zip". draft: a key of `DRAFTS`, `HEAD` or `DRAFT_MODEL`. read: (kind, prompt) -> caches that have
    read all of the prompt except its last id. Engines share `read`, so that a long prompt is read once; each run
    continues a copy of the caches.
    """

    def __init__(self, models: Models, kind: str, draft: str, read: dict[Any, list[Any]]) -> None:
        zipped = models.zipped
        assert zipped is not None
        super().__init__(models, models.plain if kind == "plain" else lambda: with_memory_row_store(zipped()))
        self.name, self._kind, self._read = f"{kind} {draft}", kind, read
        self._draft = DRAFTS.get(draft, {"draft": HEAD} if draft == HEAD else {})
        self._draft_model = models.plain() if draft == DRAFT_MODEL else None
        self._is_cold = False  # whether the next run must reuse nothing from earlier runs
        self._warm_costs = PassCosts()  # costs of passes, measured in all warm runs

    def forget_encoded_rows(self) -> None:
        """Drops encoded rows; the next run also forgets the measured costs of passes."""
        super().forget_encoded_rows()
        self._is_cold = True

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the caches of a new conversation."""
        state, eos = find_zip_state(held), frozenset(self.tokenizer.eos_token_ids) if replay is None else frozenset()
        forced = force_text(
            Turn(tuple(prompt), tokens, None if replay is None else tuple(replay)), state and state.books[0]
        )
        cache = self._copy_prompt_caches(tuple(prompt), forced.prompt[:-1], held)
        ahead = True if state is None else None  # as in `stream_generate`
        served = Served(self.model, self.tokenizer, RunOptions(ahead=ahead, **self._draft), self._draft_model)
        served.pass_costs = PassCosts() if self._is_cold else self._warm_costs
        self._is_cold = False
        checked = Checked(Submission(prompt, tokens, eos, keep=False), as_ids(prompt), Sampling())
        own = find_zip_state(cache)
        held = len(prompt) - 1 if own is None else own.books[0].base_length
        inline = Inline(
            None if replay is None else ForcedIdSampler(forced.ids),
            ids=as_ids(forced.prompt[-1:]),
            checkout=Checkout(cache, cache[0].offset, held, ""),
        )
        run = Run(len(forced.prompt))
        scheduler = Scheduler(served, NoSessions(), 1, None, lambda _: None, partial(Reading, served), raises=True)
        scheduler.add_request(Request(checked, PassNotes(run, time.perf_counter()), inline))
        while scheduler.busy:
            scheduler.run_round()
        run.text_bytes = len(self.tokenizer.decode(run.base_ids).encode())
        run.kv_ids = cache[0].offset
        run.row_bytes = 0 if state is None else installed_row_bytes(cache[-1])
        return run

    def _copy_prompt_caches(self, prompt: tuple[int, ...], ids: Sequence[int], held: list[Any]) -> list[Any]:
        """Returns a copy of the caches that have read the prompt's `ids`; the first call reads them into `held`."""
        if (key := (self._kind, prompt)) not in self._read:
            with ProgressBar(len(ids), "id", "Reading a prompt") as count, mx.stream(generation_stream):
                for at in range(0, len(ids), PREFILL):
                    self.model(mx.array([ids[at : at + PREFILL]]), cache=held)
                    mx.eval([entry.state for entry in kv_caches(held)])
                    count(len(ids[at : at + PREFILL]))
            self._read[key] = held
        return copy.deepcopy(self._read[key])


class PassNotes:
    """Receives a request's events and records passes in a `Run`. begun: when the request began, by `time.perf_counter`.

    A pass ends with its first emitted id that was not a draft.
    """

    def __init__(self, run: Run, begun: float) -> None:
        self._run, self._begun, self._goes_on = run, begun, False

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Emitted):
            return
        run, now = self._run, time.perf_counter() - self._begun
        if self._goes_on:
            run.times[-1] = now
            run.ids[-1].append(event.id)
            run.base_ids += event.base_ids
        else:
            run.step(now, [event.id], event.base_ids)
        self._goes_on = event.from_draft
