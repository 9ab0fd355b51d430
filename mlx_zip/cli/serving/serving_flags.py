"""The flags of `mlx_zip serve`: those of mlx_lm.server with their names, and a few more."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip import named
from mlx_zip.arguments import add_trust_remote_code_flag, check_flags_at_least
from mlx_zip.cli import engine_choice, row_cache
from mlx_zip.cli.generation_flags import (
    RefusedFlag,
    add_adapter_flag,
    add_canonical_flag,
    add_default_template_flag,
    add_engine_flags,
    add_sampling_flags,
)

SESSIONS = "MLX_ZIP_SESSION_CACHE"
API_KEY = "MLX_ZIP_API_KEY"
MOST_S = 1_000_000  # upper bound of times: a thread can wait that long
DEFAULT_SAMPLING_FLAGS = ("temp", "top_p", "top_k", "min_p")  # sampling flags that set a default for requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; those of mlx_lm.server keep their names."""
    add = parser.add_argument
    add_model_flags(add)
    _add_network_flags(add)
    add(
        "--max-tokens",
        type=int,
        help="maximum base tokens of an answer whose request sets none (default: 512, but what is left of the context "
        "for requests with tools and for Responses)",
    )
    add_sampling_flags(add, DEFAULT_SAMPLING_FLAGS, "; for requests without this field")
    _add_limit_flags(add)
    add_session_flags(add)
    add("--session-files", metavar="DIR", help="folder in which requests may save and load sessions (default: none)")
    add_engine_flags(add)
    add(
        "--prompt-concurrency",
        action=RefusedFlag,
        const="prompts are read in turns, between the steps of the answers under way",
    )
    add(
        "--prompt-cache-size",
        action=RefusedFlag,
        const="kept conversations are bounded in bytes, with --prompt-cache-bytes",
    )
    add(
        "--pipeline",
        action=RefusedFlag,
        nargs=0,
        const="a model on several machines is split inside its layers, not between them",
    )


def add_model_flags(add: Any, purpose: str = "model to serve") -> None:
    """Declares the flags of the model and of its chat template. purpose: text that begins the help of --model."""
    add(
        "--model",
        default=named.DEFAULT,
        help=f"{purpose}: folder, hub id or bundled model (default: stories, which tells children's stories)",
    )
    engine_choice.add_engine_flag(add, engine_choice.SERVING_NAMES)
    add(
        "--vllm-args",
        metavar="JSON",
        help="JSON map of further arguments of vLLM's EngineArgs, with --engine vllm, for example "
        "'{\"tensor_parallel_size\": 2}' (default: none)",
    )
    add_adapter_flag(add)
    add_trust_remote_code_flag(add)
    add("--chat-template", metavar="TEXT|FILE", help="chat template in Jinja's language (default: the model's own)")
    add_default_template_flag(add)
    add("--chat-template-args", help="JSON map of further arguments for the chat template (default: none)")
    add_canonical_flag(add)
    add(
        "--keep-wired",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="on a Mac, time without requests after which the system may move the model out of the GPU's memory, so "
        "that the next answer begins later; 0: after each answer (default: 600)",
    )


def check_serving_flags(args: argparse.Namespace) -> None:
    """Raises `DataError` if a flag that serve, chat and app have is out of range."""
    check_flags_at_least(args, 1, "max_tokens", "prefill_step_size")
    check_flags_at_least(args, 0, "keep_wired", below=MOST_S)


def _add_network_flags(add: Any) -> None:
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: 127.0.0.1)")
    add("--port", type=int, default=8080, help="port to listen on; 0 for a free one (default: 8080)")
    add(
        "--allowed-origins",
        metavar="ORIGINS",
        type=lambda text: [one.strip() for one in text.split(",") if one.strip()],
        default=[],
        help="web origins that browsers may call from, separated by commas, or * for all (default: none)",
    )
    add(
        "--allowed-hosts",
        metavar="NAMES",
        type=lambda text: [one.strip().lower() for one in text.split(",") if one.strip()],
        help="names that the Host header may have, separated by commas (default: on a loopback address localhost, "
        "127.0.0.1, ::1 and the address itself, else any)",
    )
    add("--api-key", metavar="KEY", help=f"key that requests must have (default: ${API_KEY}, else none)")
    add(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        default="WARNING",
        help="least important messages to print on standard error; INFO prints each request (default: WARNING)",
    )
    add(
        "--show-text",
        action="store_true",
        help="where a prompt differs from a kept conversation, show in the log and in answers what was written there; "
        "all clients can read it (default: letters and digits are hidden)",
    )
    add(
        "--drain",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="time that running answers get to end when the server stops (default: 10)",
    )


def _add_limit_flags(add: Any) -> None:
    add(
        "--decode-concurrency",
        metavar="N",
        type=int,
        default=8,
        help="maximum number of answers at a time (default: 8)",
    )
    add(
        "--max-waiting",
        metavar="N",
        type=int,
        default=64,
        help="maximum number of waiting requests; a further one gets status 429 (default: 64)",
    )
    add(
        "--max-prompt-tokens",
        metavar="N",
        type=int,
        help="maximum number of base tokens in a prompt (default: the model's context)",
    )
    add(
        "--max-body-bytes",
        metavar="N",
        type=row_cache.parse_size,
        default=32 << 20,
        help="maximum size of a request body (default: 32 MiB)",
    )
    add(
        "--prefill-step-size",
        type=int,
        help="maximum number of prompt ids that one model call reads, between steps of other answers (default: 512, "
        "and 2048 while a request is alone)",
    )


def add_session_flags(add: Any) -> None:
    """Declares the flags that say where and in how many bytes conversations are kept."""
    add(
        "--prompt-cache-bytes",
        metavar="N",
        type=row_cache.parse_size,
        default=4 << 30,
        help="memory for kept conversations, for example 500M or 2G (default: 4 GiB)",
    )
    add(
        "--session-cache",
        metavar="DIR|off",
        help="folder that keeps conversations over restarts, or off for none; it holds what was written and only you "
        f"can read it (default: ${SESSIONS}, else off)",
    )
    add(
        "--session-disk-bytes",
        metavar="N",
        type=row_cache.parse_size,
        default=16 << 30,
        help="maximum size of the --session-cache folder (default: 16 GiB)",
    )
