"""`mlx_zip serve`: an HTTP server that OpenAI's and Anthropic's clients know."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_zip import named
from mlx_zip.arguments import check_at_least
from mlx_zip.cli import engine_choice
from mlx_zip.cli.serving.opening import engine_options, json_map, opened, server_packs, session_folder
from mlx_zip.cli.serving.serving_flags import API_KEY, MOST_S, REFUSED, SAMPLING, add_arguments, check_wired
from mlx_zip.errors import GenerationError, first_message_line, missing_library_error
from mlx_zip.files import expand_home
from mlx_zip.models.folders import is_plain
from mlx_zip.packs.chosen import read_packs

__all__ = ["REFUSED", "add_arguments", "run"]

log = logging.getLogger("mlx_zip.server")
LIBRARIES = ("starlette", "uvicorn", "sse_starlette", "pydantic", "prometheus_client", "llguidance")
COUNTS = ("max_tokens", "decode_concurrency", "max_prompt_tokens", "prefill_step_size")
LOOPBACK = ("127.", "::1", "localhost")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal comes; returns 1 if the engine's thread ends by a fault. Raises `MlxZipError`."""
    _check(args)
    logging.basicConfig(level=args.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    running = _server_module("running")
    engine_choice.check_flags(args)
    group = engine_choice.machines_of(args)
    if group is None:
        return _lead(args, None, running)

    from mlx_zip.cli.machine_watch import watched
    from mlx_zip.models.machines import is_first

    _check_machines(args)
    with watched(group):
        return _lead(args, group, running) if is_first(group) else _follow(args, group)


def _lead(args: argparse.Namespace, group: Any, running: Any) -> int:
    """Serves, on the first or only machine; returns what `run` returns. running: the server's module of that name."""
    name, chosen = named.DEFAULT if args.model is None else args.model, read_packs(args.pack)
    options = _options(args, name)
    with _bound(running, args.host, args.port, options["api_key"]) as listener:
        engine_choice.choose(args, name, group=group)
        with (
            engine_choice.open_row_store(args) as store,
            opened(group, name, **engine_options(args, name, chosen), row_cache=store) as engine,
        ):
            options |= server_packs(chosen, is_plain(name), engine)
            served = _server_module("options").Options(**options)
            fault = running.serve(engine, served, listener, args.log_level)
    if fault is not None:
        print(f"error: the engine has stopped: {type(fault).__name__}: {first_message_line(fault)}", file=sys.stderr)
    return 0 if fault is None else 1


def _follow(args: argparse.Namespace, group: Any) -> int:
    """Does what the first machine's engine sends until that ends; returns 0. Raises `MlxZipError` if it is lost.

    Ctrl-C in a terminal reaches all machines; only the first one acts on it, so that answers under way can end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, chosen = named.DEFAULT if args.model is None else args.model, read_packs(args.pack)
    engine_choice.choose(args, name, group=group)
    with (
        engine_choice.open_row_store(args) as store,
        opened(group, name, **engine_options(args, name, chosen), row_cache=store) as engine,
    ):
        engine.follow()
    return 0


def _check_machines(args: argparse.Namespace) -> None:
    if args.session_files:
        raise GenerationError("--session-files cannot be used on several machines: each has a share of the model only")


def _check(args: argparse.Namespace) -> None:
    """Raises `GenerationError` for flags that cannot be used here, and for values out of range."""
    for name, why in REFUSED.items():
        if getattr(args, name) is not None:
            raise GenerationError(f"--{name.replace('_', '-')} cannot be used: {why}; mlx_lm.server has it")
    if args.model == "":
        raise GenerationError("no model: --model is empty")
    check_at_least(args, 1, *COUNTS)
    check_at_least(args, 0, "max_waiting", "drain", "temp", "top_k", "port")
    if args.port > 65535:
        raise GenerationError(f"--port must be at most 65535, got {args.port}")
    if not args.drain < MOST_S:
        raise GenerationError(f"--drain must be below {MOST_S}, got {args.drain}")
    check_wired(args.keep_wired)

    from mlx_zip.sampling.options import Sampling

    Sampling(**{name: getattr(args, name) for name in SAMPLING})


def _server_module(name: str) -> Any:
    try:
        return import_module(f"mlx_zip.server.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        raise missing_library_error("mlx_zip serve", *LIBRARIES, extra="serve") from error


def _bound(running: Any, host: str, port: int, key: str | None) -> Any:
    """Returns a socket of the address, bound before minutes go into loading. Raises `GenerationError`.

    Warns if other machines can reach it and there is no key.
    """
    try:
        listener = running.bound(host, port)
    except (OSError, UnicodeError) as error:  # the latter for a name that is too long
        why = getattr(error, "strerror", None) or error
        another = "; choose another --port" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise GenerationError(f"--host {host} --port {port}: {why}{another}") from error
    if key is None and not host.startswith(LOOPBACK):
        log.warning("other machines can reach the server, and it asks for no key (--api-key)")
    return listener


def _options(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns the fields of the server's `Options` that flags set, but packs."""
    key, hosts = _api_key(args), _hosts(args)
    return {
        "model": name,
        **({} if args.max_tokens is None else dict.fromkeys(("max_tokens", "max_tokens_with_tools"), args.max_tokens)),
        "sampling": {flag: getattr(args, flag) for flag in SAMPLING},
        "template_options": json_map("--chat-template-args", args.chat_template_args),
        "api_key": key,
        "allowed_origins": args.allowed_origins,
        "hosts": hosts,
        "max_body_bytes": args.max_body_bytes,
        "responses_folder": None if (folder := session_folder(args)) is None else folder / "responses",
        "session_files": None if args.session_files is None else _folder("--session-files", args.session_files),
        "drain_s": args.drain,
        "show_text": args.show_text,
    }


def _api_key(args: argparse.Namespace) -> str | None:
    """Returns the API key, None for none. Raises `GenerationError` for an empty one, which would let anybody in."""
    if args.api_key == "":
        raise GenerationError(f"--api-key is empty; leave it away to let everybody in, or set {API_KEY}")
    return args.api_key or os.environ.get(API_KEY) or None


def _hosts(args: argparse.Namespace) -> frozenset[str] | None:
    if args.allowed_hosts is not None:
        return frozenset(args.allowed_hosts)
    if not args.host.startswith(LOOPBACK):
        return None
    return _server_module("options").LOOPBACK | {args.host.lower()}


def _folder(flag: str, given: str) -> Path:
    if not (path := expand_home(given)).is_dir():
        raise GenerationError(f"{flag} {given}: there is no such folder")
    return path
