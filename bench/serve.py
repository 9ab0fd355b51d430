"""Times `mlx_zip serve` over HTTP, and compares it with `generate` and with mlx-lm's server on the base model.

Servers run as separate processes for the whole run. Each trial asks every server in every way, in changing order. The
client talks to servers on this machine, one request per connection, in the dialect of chat completions, and records
when each event of a streamed answer arrives.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.errors import MlxZipError
from mlx_zip.models.loading import load
from mlx_zip.named import resolve_model_name

from .engines.mlx_engines import MlxLm, wait_and_free_memory
from .engines.model_making import models_from_folders
from .engines.workloads import REQUESTS
from .recording import load_before_bench, print_header, run_in_turns, summarize_samples
from .tables.performance import serving_table

START_S, END_S = 180.0, 30.0  # most seconds for a server to start and to end
END = "[DONE]"  # the last event of a streamed answer
STORY = "Once upon a time there was a {} who wanted to find {}. "  # the sentence of long prompts
THINGS = ("the sea", "a red kite", "the old bridge", "some honey", "a quiet place", "the moon", "a green door", "home")


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


def long_prompt(words: int, number: int) -> str:
    begin = f"Here are {number + 100} stories. "
    names = ("dog", "cat", "girl", "boy", "bird", "bear", "fox", "frog")
    pieces = (STORY.format(names[(i + number) % 8], THINGS[(i // 8 + i * number) % 8]) for i in range(words))
    return " ".join((begin + "".join(pieces)).split()[:words])


# ---- the client


@dataclass
class Reply:
    """A server's answer.

    events: for a streamed answer, (seconds after the request was sent, content of a `data:` line). body: content of any
    other answer. JSON is parsed; anything else is kept as text. seconds: time until the last byte.
    """

    status: int
    body: Any = None
    events: list[tuple[float, Any]] = field(default_factory=list)
    seconds: float = 0.0


def send_request(port: int, path: str, body: Any = None, *, timeout_s: float = 120.0) -> Reply:
    """Sends a request to 127.0.0.1 and returns the reply: a POST of `body` as JSON, or a GET if there is no body.

    Raises `MlxZipError` if the server sends nothing for timeout_s seconds, or the answer's end is missing.
    """
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
            connection.connect()
            sent = time.perf_counter()
            connection.request(method, path, content, {"Content-Type": "application/json", "Connection": "close"})
            answer = connection.getresponse()
            reply = Reply(answer.status)
            if answer.headers.get_content_type() == "text/event-stream":
                for line in answer:
                    if line.startswith(b"data:"):
                        reply.events.append((time.perf_counter() - sent, parse_json_or_text(line[5:].strip())))
                is_whole = bool(reply.events) and reply.events[-1][1] == END
            else:
                found = answer.read()
                reply.body, is_whole = parse_json_or_text(found), bool(found)
            reply.seconds = time.perf_counter() - sent
    except (OSError, HTTPException) as error:
        raise MlxZipError(f"{path} on port {port}: no whole answer ({type(error).__name__}: {error})") from error
    if not is_whole:
        raise MlxZipError(f"{path} on port {port}: no whole answer (its end is missing)")
    return reply


def parse_json_or_text(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")


def chat_text(reply: Reply) -> str:
    """Returns the text of a streamed chat completion."""
    choices = [choice for _, event in reply.events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def answered_tokens(reply: Reply) -> int:
    """Returns the base tokens of a streamed chat completion, as the server counts them."""
    found = next(
        event["usage"] for _, event in reversed(reply.events) if isinstance(event, dict) and event.get("usage")
    )
    return found["completion_tokens"]


def served_model_name(port: int) -> str:
    """Returns the name of the first model that a server lists. Raises `MlxZipError` if it lists none."""
    reply = send_request(port, "/v1/models")
    try:
        return reply.body["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise MlxZipError(f"the server on port {port} lists no model (/v1/models, status {reply.status})") from error


@dataclass(frozen=True)
class AskedServer:
    """A server to send requests to. model: the server's name for its model."""

    port: int
    model: str

    def answer(self, content: str, max_tokens: int) -> Reply:
        """Returns the greedy streamed answer to one message."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return send_request(self.port, "/v1/chat/completions", body)


def first_text_s(reply: Reply) -> float:
    """Returns the seconds from the request to a streamed chat completion's first text; without text, to its end."""
    for seconds, event in reply.events:
        if isinstance(event, dict) and any(one["delta"].get("content") for one in event.get("choices") or ()):
            return seconds
    return reply.seconds


# ---- the servers' processes


@contextmanager
def running_server(words: Sequence[str]) -> Iterator[int]:
    """Context manager: runs a server in a separate process and yields its port, when the server answers.

    words: the command after `python -m`, without host and port. Raises `MlxZipError` if the server does not answer.
    """
    port = free_port()
    command = [sys.executable, "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    with TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until_ready(process, port, f"the server {' '.join(words)}", log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, name: str, log: IO[bytes]) -> None:
    """Waits until the server answers. Raises `MlxZipError` if it ends first or needs over `START_S` seconds."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MlxZipError(f"{name} ended at once: {last_line(log)}")
        try:
            if send_request(port, "/health", timeout_s=5).status == 200:
                return
        except MlxZipError:  # the server does not listen yet
            time.sleep(0.1)
    raise MlxZipError(f"{name} does not answer after {START_S:.0f} s")


def last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "nothing printed")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def serve_command(model: str, folder: Path) -> list[str]:
    """Returns the command, after `python -m`, that serves a model.

    folder: for sessions, so that the server neither reads nor leaves any in the user's folder.
    """
    return ["mlx_zip", "serve", "--model", model, "--session-cache", str(folder)]
