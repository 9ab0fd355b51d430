"""`mlx_zip chat`: talks with a model in a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from mlx_zip import named
from mlx_zip.arguments import parse_json_map
from mlx_zip.cli import colours
from mlx_zip.cli.generation_flags import (
    SAMPLING_FLAGS,
    RefusedFlag,
    add_color_flag,
    add_engine_flags,
    add_eos_flag,
    add_kv_size_flag,
    add_prefill_flag,
    add_sampling_flags,
    check_kv_size,
    read_sampling_flags,
)
from mlx_zip.cli.serving.serving_flags import add_model_flags, add_session_flags, check_serving_flags
from mlx_zip.errors import GenerationError, import_or_explain
from mlx_zip.packs.chosen import choose_request_pack, read_packs

MAX_TOKENS = 256
_DUMB = ("", "dumb", "unknown")  # values of TERM for terminals without control sequences
_LIBRARIES = ("prompt_toolkit", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; those of mlx_lm.chat keep their names and defaults."""
    add = parser.add_argument
    add_model_flags(add, "model to chat with")
    add_eos_flag(add)
    add("--system-prompt", help="system message of the conversation; /system changes it (default: none)")
    add(
        "--max-tokens",
        "-m",
        type=int,
        help=f"maximum number of base tokens of an answer (default: {MAX_TOKENS}, or {named.MAX_TOKENS} for the "
        "default model)",
    )
    add_sampling_flags(add, (name for name in SAMPLING_FLAGS if name != "seed"))
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the first answer's random numbers; each further answer has the next one (default: 0)",
    )
    add_prefill_flag(add)
    add("--plain", action="store_true", help="print answers as they are, without rendering Markdown (default: off)")
    add_color_flag(add)
    add("--no-history", action="store_true", help="neither read nor keep what is typed (default: kept in a file)")
    add_session_flags(add)
    add_kv_size_flag(add)
    add_engine_flags(add)
    add(
        "--pipeline",
        action=RefusedFlag,
        nargs=0,
        const="a chat runs on one machine; `mlx_zip serve` runs on several",
    )
    parser.set_defaults(decode_concurrency=1, max_waiting=1, max_prompt_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Chats until the user ends the chat; returns 0, or 1 if the engine stopped. Raises `MlxZipError`."""
    check_serving_flags(args)
    front, chosen = _choose_chat_front(args), read_packs(args.pack)
    check_kv_size(args, args.model)

    from mlx_zip.cli.chat.commands import run_chat_loop
    from mlx_zip.cli.chat.conversation import Conversation
    from mlx_zip.cli.chat.program import Program, Settings
    from mlx_zip.cli.serving.opening import open_engine_from_flags
    from mlx_zip.text.tokenizers import add_eos_tokens

    sampling = read_sampling_flags(args)
    settings = Settings(
        max_tokens=args.max_tokens or (named.MAX_TOKENS if args.model == named.DEFAULT else MAX_TOKENS),
        seed=sampling.pop("seed"),
        sampling=sampling,
        template_options=parse_json_map("--chat-template-args", args.chat_template_args),
    )
    with open_engine_from_flags(args, chosen) as engine:
        if not engine.tokenizer.has_chat_template:
            raise GenerationError(f"{args.model}: its tokenizer has no chat template; give one with --chat-template")
        add_eos_tokens(engine.tokenizer, args.extra_eos_token)
        pack, files = choose_request_pack(chosen, engine), () if chosen is None else tuple(chosen.by_name)
        program = Program(engine, settings, front, Conversation(args.system_prompt), pack, files)
        program.check_system_prompt(args.system_prompt)
        with front:
            front.show_model(args.model, engine.info)
            return run_chat_loop(program)


def _choose_chat_front(args: argparse.Namespace) -> Any:
    """Returns a `TerminalFront`, or a `Front` if standard input or output is not a terminal or TERM is dumb."""
    terminal = import_or_explain(  # for both fronts, so that they need the same libraries
        "mlx_zip.cli.chat.terminal", "mlx_zip chat", *_LIBRARIES, extra="chat", implied=("markdown_it", "pygments")
    )
    if sys.stdin is None:
        raise GenerationError("standard input is closed; a chat reads messages from it")
    for out in (sys.stdout, sys.stderr):
        if out is not None:
            out.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    coloured = colours.should_colour(args.color, sys.stdout)
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "") in _DUMB:
        from mlx_zip.cli.chat.front import Front

        return Front(coloured)

    from mlx_zip.files import data_folder

    history = None if args.no_history else data_folder() / terminal.HISTORY_FILE
    return terminal.TerminalFront(history, args.plain, coloured)
