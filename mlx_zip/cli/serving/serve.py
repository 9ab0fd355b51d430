"""`mlx_zip serve`: an HTTP server for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
from ipaddress import ip_address
from typing import Any

from mlx_zip.arguments import check_flags_at_least, parse_json_map
from mlx_zip.cli import engine_choice
from mlx_zip.cli.generation_flags import read_sampling_flags
from mlx_zip.cli.serving.opening import (
    SERVER_LIBRARIES,
    open_engine_from_flags,
    report_engine_fault,
    server_pack_options,
    session_folder,
)
from mlx_zip.cli.serving.serving_flags import (
    API_KEY,
    MOST_S,
    add_arguments,
    check_serving_flags,
)
from mlx_zip.errors import GenerationError, import_or_explain
from mlx_zip.files import expand_home
from mlx_zip.packs.chosen import read_packs

__all__ = ["add_arguments", "run"]

log = logging.getLogger("mlx_zip.server")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns 0, or 1 if an exception ended the engine's thread. Raises `MlxZipError`."""
    _check_serve_flags(args)
    logging.basicConfig(level=args.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    running = _import_server_module("running")
    engine_choice.check_engine_flags(args)
    group = engine_choice.connect_machines_of_run(args)
    if group is None:
        return _serve_first_machine(args, None, running)

    from mlx_zip.models.machines import is_first_machine, watch_machines

    if args.session_files:
        raise GenerationError("--session-files cannot be used on several machines: each has a share of the model only")
    with watch_machines(group):
        if is_first_machine(group):
            return _serve_first_machine(args, group, running)
        return _follow_first_machine(args, group)


def _serve_first_machine(args: argparse.Namespace, group: Any, running: Any) -> int:
    """Serves on the first or only machine; returns the exit status. running: the module `mlx_zip.server.running`."""
    chosen, options = read_packs(args.pack), _make_serve_options(args)
    with (
        _bind_listener(running, args.host, args.port, options["api_key"]) as listener,
        open_engine_from_flags(args, chosen, group) as engine,
    ):
        options |= server_pack_options(chosen, args.model, engine)
        served = _import_server_module("options").Options(**options)
        fault = running.serve(engine, served, listener, args.log_level)
    return report_engine_fault(fault)


def _follow_first_machine(args: argparse.Namespace, group: Any) -> int:
    """Does the work that the first machine's engine sends; returns 0 when that engine closes.

    Ignores Ctrl-C, which a terminal sends to all machines, so that the first machine can end the answers in flight.
    Raises `MlxZipError` if the first machine is lost.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open_engine_from_flags(args, read_packs(args.pack), group) as engine:
        engine.follow()
    return 0


def _check_serve_flags(args: argparse.Namespace) -> None:
    """Raises `MlxZipError` if a value is out of range."""
    check_serving_flags(args)
    read_sampling_flags(args)
    check_flags_at_least(args, 1, "decode_concurrency", "max_prompt_tokens")
    check_flags_at_least(args, 0, "max_waiting")
    check_flags_at_least(args, 0, "port", below=1 << 16)
    check_flags_at_least(args, 0, "drain", below=MOST_S)


def _import_server_module(name: str) -> Any:
    return import_or_explain(f"mlx_zip.server.{name}", "mlx_zip serve", *SERVER_LIBRARIES, extra="serve")


def _bind_listener(running: Any, host: str, port: int, key: str | None) -> Any:
    """Returns a socket bound to the address. Raises `GenerationError` if that fails, before the model is loaded.

    Warns if other machines can reach the address and there is no key.
    """
    try:
        listener = running.bind_socket(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host name is too long
        why = getattr(error, "strerror", None) or error
        another = "; choose another --port" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise GenerationError(f"--host {host} --port {port}: {why}{another}") from error
    if key is None and not _is_loopback(host):
        log.warning("other machines can reach the server, and it asks for no key (--api-key)")
    return listener


def _make_serve_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the server's `Options` that are set by flags, except those for packs."""
    if args.api_key == "":  # it would let anybody in
        raise GenerationError(f"--api-key is empty; leave it away to let everybody in, or set {API_KEY}")
    files = None if args.session_files is None else expand_home(args.session_files)
    if files is not None and not files.is_dir():
        raise GenerationError(f"--session-files {args.session_files}: there is no such folder")
    return {
        "model": args.model,
        **({} if args.max_tokens is None else dict.fromkeys(("max_tokens", "max_tokens_with_tools"), args.max_tokens)),
        "sampling": read_sampling_flags(args),
        "template_options": parse_json_map("--chat-template-args", args.chat_template_args),
        "api_key": args.api_key or os.environ.get(API_KEY) or None,
        "allowed_origins": args.allowed_origins,
        "hosts": _allowed_hosts(args),
        "max_body_bytes": args.max_body_bytes,
        "responses_folder": None if (folder := session_folder(args)) is None else folder / "responses",
        "session_files": files,
        "drain_s": args.drain,
        "show_text": args.show_text,
    }


def _allowed_hosts(args: argparse.Namespace) -> frozenset[str] | None:
    if args.allowed_hosts is not None:
        return frozenset(args.allowed_hosts)
    if not _is_loopback(args.host):
        return None
    return _import_server_module("options").LOOPBACK | {args.host.lower()}


def _is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches the address to which `bind_socket` binds; False if there is none."""
    try:
        found = ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
