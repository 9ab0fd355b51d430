"""`mlx_zip chat`: talks with a model in a terminal."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from mlx_zip import bundled
from mlx_zip.arguments import check_at_least
from mlx_zip.cli import colours, engines, packs
from mlx_zip.cli.chat.flags import MAX_TOKENS, REFUSED, add_arguments
from mlx_zip.cli.generation_flags import NUMBERS, check_kv_size
from mlx_zip.cli.serving_flags import check_wired
from mlx_zip.errors import GenerationError, missing_library

__all__ = ["REFUSED", "add_arguments", "run"]

LIBRARIES = ("prompt_toolkit", "rich")
COUNTS = ("max_tokens", "prefill_step_size")


def run(args: argparse.Namespace) -> int:
    """Chats until the user ends it; returns 0. Raises `MlxZipError`."""
    _check(args)
    front = _front(args)
    name, chosen = bundled.DEFAULT if args.model is None else args.model, packs.read(args)
    check_kv_size(args, name)

    from mlx_zip.cli.opening import engine_options, opened, request_pack
    from mlx_zip.text.tokenizer import add_eos_tokens

    settings = _settings(args)
    engines.choose(args, name)
    with (
        engines.open_row_store(args) as store,
        opened(None, name, **engine_options(args, name, chosen), row_cache=store) as engine,
    ):
        if not engine.tokenizer.has_chat_template:
            raise GenerationError(f"{name}: its tokenizer has no chat template; give one with --chat-template")
        add_eos_tokens(engine.tokenizer, args.extra_eos_token)
        program = _module("program").Program(
            engine, settings, front, _module("conversation").Conversation(args.system_prompt)
        )
        program.check_system(args.system_prompt)
        if chosen is not None:
            program.pack, program.pack_names = request_pack(chosen, packs.is_plain(name), engine), list(chosen.files)
            program.own_pack = program.pack is None
        with front:
            front.greet(name, engine.info)
            return _module("loop").run(program)


def _check(args: argparse.Namespace) -> None:
    """Raises `GenerationError` for flags that cannot be used here, and for values out of range."""
    for name, why in REFUSED.items():
        if getattr(args, name) is not None:
            raise GenerationError(f"--{name.replace('_', '-')} cannot be used: {why}; mlx_lm.chat has it")
    if args.model == "":
        raise GenerationError("no model: --model is empty")
    check_at_least(args, 1, *COUNTS)
    check_wired(args.keep_wired)


def _settings(args: argparse.Namespace) -> Any:
    """Returns what answers are asked for with. Raises `GenerationError` for sampling flags out of range."""
    from mlx_zip.cli.opening import json_map
    from mlx_zip.sampling_options import Sampling

    sampling = {name: getattr(args, name) for name in NUMBERS if name != "seed"}
    Sampling.of({**sampling, "seed": args.seed})
    default = MAX_TOKENS if args.model is not None else bundled.MAX_TOKENS
    return _module("program").Settings(
        max_tokens=args.max_tokens or default,
        sampling=sampling,
        seed=args.seed,
        template_options=json_map("--chat-template-args", args.chat_template_args),
    )


def _front(args: argparse.Namespace) -> Any:
    """Returns the terminal, or what reads and prints lines if standard input or output is no terminal."""
    _module("markdown")  # so that both kinds of front need the same libraries
    terminal = _module("terminal")
    for out in (sys.stdout, sys.stderr):
        if out is not None:
            out.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    coloured = colours.coloured(args.color, sys.stdout)
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()) or terminal.is_dumb():
        return _module("lines").LineFront(coloured)

    from mlx_zip.files import data_folder

    history = None if args.no_history else data_folder() / _module("history").FILE
    return terminal.TerminalFront(history, args.plain, coloured)


def _module(name: str) -> Any:
    """Returns a module of the chat. Raises `InstallationError` if the libraries that it needs are not installed."""
    try:
        return import_module(f"mlx_zip.cli.chat.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (*LIBRARIES, "markdown_it", "pygments"):
            raise
        raise missing_library("mlx_zip chat", *LIBRARIES, extra="chat") from error
