"""`mlx_zip app`: serves the chat app, a page for the browser, on this machine."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import closing
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_zip import named
from mlx_zip.arguments import check_flags_at_least, parse_json_map
from mlx_zip.cli.engine_choice import choose_engine
from mlx_zip.cli.generation_flags import add_engine_flags, add_sampling_flags, read_sampling_flags
from mlx_zip.cli.serving.opening import (
    SERVER_LIBRARIES,
    open_chosen_engine,
    open_engine_from_flags,
    report_engine_fault,
    server_pack_options,
)
from mlx_zip.cli.serving.serving_flags import DEFAULT_SAMPLING_FLAGS, add_model_flags, check_serving_flags
from mlx_zip.errors import GenerationError, MlxZipError, errors_as, import_or_explain, missing_library_error
from mlx_zip.files import data_folder, expand_home, make_private
from mlx_zip.models.model_folder import is_plain_model
from mlx_zip.packs.chosen import read_packs
from mlx_zip.progress import pluralize

_SERVE_DEFAULTS = {  # values for flags that only mlx_zip serve has; session_cache: None for $MLX_ZIP_SESSION_CACHE
    "decode_concurrency": 4,
    "max_waiting": 16,
    "max_prompt_tokens": None,
    "prefill_step_size": None,
    "prompt_cache_bytes": 4 << 30,
    "session_cache": None,
    "session_disk_bytes": 16 << 30,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; `mlx_zip serve` has the model's flags too."""
    add = parser.add_argument
    add_model_flags(add, "model to chat with")
    _add_page_flags(add)
    add(
        "--race-against",
        metavar="MODEL",
        help="a further model to choose and to race against: folder, hub id or bundled model (default: the bundled "
        "model's baseline, if it is the bundled model)",
    )
    add("--system-prompt", metavar="TEXT", default="", help="system prompt of new conversations (default: none)")
    add("--max-tokens", type=int, default=1024, help="maximum number of base tokens per answer (default: 1024)")
    add_sampling_flags(add, DEFAULT_SAMPLING_FLAGS)
    add_engine_flags(add)
    parser.set_defaults(**_SERVE_DEFAULTS)


def _add_page_flags(add: Any) -> None:
    add("--port", type=int, help="port of this machine for the page; 0 for a free one (default: 7437, or a free one)")
    add("--no-open", action="store_true", help="print the page's address only, do not open a browser")
    add("--window", action="store_true", help="show the page in a window of its own (needs pywebview)")
    add(
        "--data",
        metavar="FILE",
        help="file of the conversations, which only you can read (default: conversations.db in your data folder, "
        "on a Mac ~/Library/Application Support/mlx_zip)",
    )
    add("--no-history", action="store_true", help="keep conversations in memory only, until the app ends")
    add("--purge", action="store_true", help="delete all kept conversations, and do nothing else")


def run(args: argparse.Namespace) -> int:
    """Serves the app until a signal; returns 0, or 1 if an exception ended the engine. Raises `MlxZipError`."""
    _check_app_flags(args)
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    running, kept = _import_chat_app_module("running"), _import_chat_app_module("store")
    file = None if args.no_history else expand_home(args.data) if args.data else kept.default_file()
    if args.purge:
        return _purge_conversations(kept, file)
    with errors_as(GenerationError, f"--port {args.port}", OSError, end="; choose another --port"):
        page = running.open_listener(args.port)
    with page as listener, closing(_open_conversation_store(kept, file)) as store:
        if store.database.note:
            print(f"note: {store.database.note}", file=sys.stderr)
        fault = _open_model_and_serve_app(args, running, listener, store)
    return report_engine_fault(fault)


def _open_model_and_serve_app(
    args: argparse.Namespace, running: Any, listener: Any, store: Any
) -> BaseException | None:
    """Opens the model and serves the app; returns the exception that ended the engine's thread, None after a signal."""
    chosen = read_packs(args.pack)
    asked = argparse.Namespace(**vars(args))  # for further models, each of which may get another engine
    with open_engine_from_flags(args, chosen) as engine:
        from mlx_zip.engine.engines import Engines, make_other_models

        rival, open_model = args.race_against, partial(_open_other_model, asked)
        options = import_module("mlx_zip.server.options").Options(
            model=args.model,
            max_tokens=args.max_tokens,
            sampling=read_sampling_flags(args),
            template_options=parse_json_map("--chat-template-args", args.chat_template_args),
            api_key=running.new_token(),
            drain_s=2.0,
            **server_pack_options(chosen, args.model, engine),
        )
        ceiling = engine.ceiling()
        settings = _import_chat_app_module("state").Settings(args.system_prompt, ceiling and asdict(ceiling))
        storage = None if args.no_history or not args.window else _window_folder()
        showing = running.PageDisplay(browser=not args.no_open, window=args.window, storage_folder=storage)
        hypertokens = {} if rival is None else {rival: not is_plain_model(rival)}
        engines = Engines(engine, make_other_models(engine, open_model, rival, _choose_offered_models(args.model)))
        return running.run_app(engines, options, listener, store, settings, showing, open_model, hypertokens)


def _window_folder() -> Path | None:
    """Returns the folder for the window's data, such as unsent text; if unusable prints a note and returns None."""
    folder = data_folder() / "window"
    problem = make_private(folder)
    if problem is not None:
        print(f"note: {folder} {problem}", file=sys.stderr)
    return folder if problem is None else None


def _choose_offered_models(main: str) -> dict[str, str]:
    """Returns the models to offer besides a bundled `main`, none of which needs a download: name -> description."""
    if main not in named.KNOWN:
        return {}
    offered = [named.DEFAULT, named.ZIP] if named.ZIP in named.offline_model_names() else [named.DEFAULT]
    return {name: named.KNOWN[name] for name in offered}


def _open_other_model(args: argparse.Namespace, name: str) -> Any:
    """Returns the engine of a model other than the main one; the engine keeps no sessions. Raises `MlxZipError`.

    args: the flags as the user gave them, with --engine auto not yet replaced.
    """
    own = ("adapter_path", "pack", "codebook_size", "canonical", "chat_template", "draft_model")  # of the main model
    changed = argparse.Namespace(**{**vars(args), **dict.fromkeys(own), "model": name})
    choose_engine(changed, name)
    return open_chosen_engine(changed, None, keeps_sessions=False)


def _check_app_flags(args: argparse.Namespace) -> None:
    """Raises `GenerationError` if a flag cannot be used, `InstallationError` if --window is given without pywebview."""
    check_serving_flags(args)
    check_flags_at_least(args, 0, "port", below=1 << 16)
    read_sampling_flags(args)
    if args.no_history and (args.data or args.purge):
        raise GenerationError("--no-history keeps nothing, so --data and --purge have no meaning with it")
    if args.window and find_spec("webview") is None:
        raise missing_library_error("mlx_zip app --window", "pywebview", extra="window")


def _import_chat_app_module(name: str) -> Any:
    """Imports a module of `mlx_zip.apps.chat`; if a library is missing, the error says how to install it."""
    return import_or_explain(f"mlx_zip.apps.chat.{name}", "mlx_zip app", *SERVER_LIBRARIES, extra="serve")


def _open_conversation_store(kept: Any, file: Any) -> Any:
    """Returns the store of conversations in `file`, None for memory. Raises `GenerationError` for an unusable file."""
    try:
        return kept.Store(file)
    except MlxZipError as error:
        raise GenerationError(f"{error} (--data FILE names another file, --no-history keeps none)") from error


def _purge_conversations(kept: Any, file: Any) -> int:
    """Deletes all kept conversations and prints how many there were; returns 0. Raises `GenerationError`."""
    count = 0
    if file.exists():
        with closing(_open_conversation_store(kept, file)) as store:
            count = store.purge()
    print(f"deleted: {pluralize(count, 'conversation')}")
    return 0
