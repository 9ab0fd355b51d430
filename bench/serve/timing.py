"""Times `mlx_zip serve` over HTTP, and compares it with `generate` and with mlx-lm's server on the base model.

Servers run as separate processes for the whole run. Each trial asks every server in every way, in changing order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.engines.mlx_engines import MlxLm, wait_and_free_memory
from mlx_zip.bench.engines.model_making import models_from_folders
from mlx_zip.bench.engines.workloads import REQUESTS
from mlx_zip.bench.recording import load_before_bench, print_header, run_in_turns, summarize_samples
from mlx_zip.bench.tables.performance import serving_table
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.models.loading import load
from mlx_zip.named import resolve_model_name

from .client import AskedServer, Reply, answered_tokens, chat_text, first_text_s, served_model_name
from .server_process import running_server, serve_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench serve`."""
    add = parser.add_argument
    flag = default_flags(add)
    flag("--model", "stories", "chat model to serve: folder, hub id or bundled model")
    flag("--base", "stories-base", "plain model to compare with")
    flag("--streams", 8, "number of requests at a time", metavar="N")
    flag("--max-tokens", 256, "maximum number of base tokens per answer")
    flag("--trials", 5, "number of timed runs of each way")
    flag("--prompt-words", 900, "words of the long prompts")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures and yields one record. Raises `MlxZipError` if a flag or model cannot be used."""
    check_flags_at_least(args, 1, "trials", "prompt_words")
    check_flags_at_least(args, 2, "streams", "max_tokens")
    load_before_bench()
    models = models_from_folders(args.model, args.base)
    device = MlxLm(models).device
    print_header("serve", models.name, device, f"{args.streams} streams, trials: {args.trials} after 1 warm-up")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        commands = {
            "zip": serve_command(args.model, folder / "zip"),
            "base": serve_command(args.base, folder / "base"),
            "mlx-lm": ["mlx_lm", "server", "--model", str(resolve_model_name(args.base))],
        }
        ports = {name: stack.enter_context(running_server(words)) for name, words in commands.items()}
        asked = {
            name: AskedServer(port, "default_model" if name == "mlx-lm" else served_model_name(port))
            for name, port in ports.items()
        }
        figures = {
            "one_stream": measure_one_stream(asked["zip"], *load(args.model), args),
            "streams": measure_many_streams(asked, args),
            "two_prompts": measure_two_prompts(asked["zip"], args),
        }
    record = {
        "bench": "serve",
        "model": {"zip": models.name, "base": Path(args.base).name, "precision": models.precision},
        "setting": {"streams": args.streams, "max_tokens": args.max_tokens, "trials": args.trials, "warmup": 1},
        "figures": figures,
        "device": device,
    }
    yield record
    print(serving_table(record), file=sys.stderr)


# ---- one stream


def measure_one_stream(asked: AskedServer, model: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Returns base tokens/s from the server and from `stream_generate` here, and the delay of the first text.

    overhead: time that the server adds, divided by the time of `stream_generate`. first_byte_ms: from the engine's
    first id to the arrival of the first text.
    """

    def ask(trial: int) -> Reply:
        wait_and_free_memory()
        return asked.answer(request_of_trial(trial), args.max_tokens)

    def generate_here(trial: int) -> float:
        wait_and_free_memory()
        begun, chat = time.perf_counter(), [{"role": "user", "content": request_of_trial(trial)}]
        last = list(stream_generate(model, tokenizer, chat, max_tokens=args.max_tokens))[-1]
        return last.generation_tokens / (time.perf_counter() - begun)

    found = run_in_turns({"served": ask, "here": generate_here}, args.trials, "One stream")
    replies, here = found["served"], found["here"]
    served = [answered_tokens(reply) / reply.seconds for reply in replies]
    late = [1000 * (first_text_s(reply) - server_reported_figures(reply)["first_id_s"]) for reply in replies]
    overhead = [b / a - 1 for a, b in zip(served, here, strict=True)]
    return {
        "served": {"unit": "base tokens/s", **summarize_samples(served)},
        "generate": {"unit": "base tokens/s", **summarize_samples(here)},
        "overhead": {"unit": "share of generate's time", **summarize_samples(overhead)},
        "first_byte_ms": summarize_samples(late),
    }


def request_of_trial(trial: int) -> str:
    return REQUESTS[trial % len(REQUESTS)]


def server_reported_figures(reply: Reply) -> dict[str, Any]:
    return next(
        event["mlx_zip"] for _, event in reversed(reply.events) if isinstance(event, dict) and "mlx_zip" in event
    )


# ---- many streams


def measure_many_streams(asked: Mapping[str, AskedServer], args: argparse.Namespace) -> dict[str, Any]:
    """Returns, for each server, base tokens/s with requests one by one and all at once, the gain and the unfairness.

    gain: base tokens/s all at once divided by base tokens/s one by one. unfairness: see `unfairness_ratio`.
    """

    def run(name: str, way: str, trial: int) -> tuple[float, float]:
        """Returns base tokens/s and the unfairness."""
        wait_and_free_memory()
        texts = [request_of_trial(trial * args.streams + i) for i in range(args.streams)]
        replies, seconds = ask_all(asked[name], texts, args.max_tokens, way == "streams")
        return sum(answered_tokens(reply) for reply in replies) / seconds, unfairness_ratio(replies)

    pairs = product(asked, ("one_stream", "streams"))
    runs = run_in_turns({pair: partial(run, *pair) for pair in pairs}, args.trials, "Streams")
    found = {}
    for name in asked:
        one, many = ([rate for rate, _ in runs[name, way]] for way in ("one_stream", "streams"))
        found[name] = {
            "one_stream": {"unit": "base tokens/s", **summarize_samples(one)},
            "streams": {"unit": "base tokens/s", **summarize_samples(many)},
            "gain": summarize_samples([b / a for a, b in zip(one, many, strict=True)]),
            "unfairness": summarize_samples([unfair for _, unfair in runs[name, "streams"]]),
        }
    return found


def ask_all(asked: AskedServer, texts: Sequence[str], max_tokens: int, together: bool) -> tuple[list[Reply], float]:
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(texts) if together else 1) as pool:
        replies = list(pool.map(lambda text: asked.answer(text, max_tokens), texts))
    return replies, time.perf_counter() - begun


def unfairness_ratio(replies: Sequence[Reply]) -> float:
    """Returns the most characters of a stream divided by the fewest, both at the time when the first stream ended."""
    ended = min(reply.seconds for reply in replies)
    lengths = []
    for reply in replies:
        until = [pair for pair in reply.events if pair[0] <= ended]
        lengths.append(len(chat_text(Reply(200, events=until))) if until else 0)
    return max(lengths) / max(min(lengths), 1)


# ---- two prompts


def measure_two_prompts(asked: AskedServer, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds to the first text of one long prompt, and of the slower of two long prompts sent together."""

    def run(prompts: Sequence[int], trial: int) -> float:
        texts = [long_prompt(args.prompt_words, 3 * trial + i) for i in prompts]
        return max(map(first_text_s, ask_all(asked, texts, 4, True)[0]))

    found = run_in_turns({"alone": partial(run, [0]), "together": partial(run, [1, 2])}, args.trials, "Two prompts")
    ratios = [b / a for a, b in zip(found["alone"], found["together"], strict=True)]
    return {f"{name}_s": summarize_samples(s) for name, s in found.items()} | {"ratio": summarize_samples(ratios)}


STORY = "Once upon a time there was a {} who wanted to find {}. "  # the sentence of long prompts
THINGS = ("the sea", "a red kite", "the old bridge", "some honey", "a quiet place", "the moon", "a green door", "home")


def long_prompt(words: int, number: int) -> str:
    begin = f"Here are {number + 100} stories. "
    names = ("dog", "cat", "girl", "boy", "bird", "bear", "fox", "frog")
    pieces = (STORY.format(names[(i + number) % 8], THINGS[(i // 8 + i * number) % 8]) for i in range(words))
    return " ".join((begin + "".join(pieces)).split()[:words])
