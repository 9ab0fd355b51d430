"""Opens the engine of `mlx_zip serve`, `mlx_zip chat` and `mlx_zip app`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import parse_json_map
from mlx_zip.cli import engine_choice, row_cache
from mlx_zip.cli.serving.serving_flags import SESSIONS
from mlx_zip.errors import DataError, GenerationError, errors_as, first_message_line
from mlx_zip.files import check_regular_file, expand_home
from mlx_zip.models.model_folder import is_plain_model
from mlx_zip.packs.chosen import choose_request_pack, pack_load_options

if TYPE_CHECKING:
    from mlx_zip.packs.pack import Pack

_MLX_FLAGS = (  # flags that are options of `open_engine` alone, under the same name
    "adapter_path",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "draft_model",
    "num_draft_tokens",
    "draft_exact",
)
SERVER_LIBRARIES = ("starlette", "uvicorn", "sse_starlette", "pydantic", "prometheus_client", "llguidance")


@contextmanager
def open_engine_from_flags(args: argparse.Namespace, chosen: Pack | None, group: Any = None) -> Iterator[Any]:
    """Context manager: yields the engine that the flags in `args` ask for.

    chosen: the packs of --pack, or None. group: the machines of this run, None for one. Raises `MlxZipError`.
    """
    engine_choice.choose_engine(args, args.model, group=group)
    with (
        engine_choice.open_row_store(args) as store,
        open_chosen_engine(args, chosen, group, store) as engine,
    ):
        if args.chat_template is not None:
            _check_chat_template(engine.tokenizer)
        yield engine


def open_chosen_engine(
    args: argparse.Namespace,
    chosen: Pack | None,
    group: Any = None,
    row_cache: Any = None,
    keeps_sessions: bool = True,
) -> Any:
    """Returns the engine that the flags in `args` ask for; --engine auto must have been replaced.

    chosen: the packs of --pack, or None. group: the machines that the model is split over, None for one. row_cache: the
    row store, None for one of the engine's own. Raises `MlxZipError`.
    """
    from mlx_zip.engine.drafts import check_draft_options
    from mlx_zip.engine.sessions.store import SessionOptions

    engine_choice.check_engine_flags(args)
    check_draft_options(args.draft, args.num_draft_tokens)
    template = {} if args.chat_template is None else {"chat_template": _read_chat_template(args.chat_template)}
    options: dict[str, Any] = {
        "canonical": args.canonical,
        "tokenizer_config": template,
        "trust_remote_code": args.trust_remote_code,
        "max_running": args.decode_concurrency,
        "max_waiting": args.max_waiting,
        "max_prompt_tokens": args.max_prompt_tokens,
        **pack_options(chosen, args.codebook_size, args.model),
    }
    if args.engine == engine_choice.VLLM:
        vllm_args = parse_json_map("--vllm-args", args.vllm_args)
        return engine_choice.open_vllm_engine(args.model, vllm_args, keep_sessions=keeps_sessions, **options)
    sessions = (args.prompt_cache_bytes, session_folder(args), args.session_disk_bytes, args.model)
    options |= {
        "sessions": SessionOptions(*sessions) if keeps_sessions else None,
        "draft": args.draft,
        "prefill_step_size": args.prefill_step_size,
    }
    if args.engine != engine_choice.MLX:
        return engine_choice.open_torch_engine(args.model, args.engine, **options)
    options |= {flag: getattr(args, flag) for flag in _MLX_FLAGS}
    options |= {
        "max_kv_size": getattr(args, "max_kv_size", None),  # serve and app have no such flag
        "keep_wired_s": args.keep_wired,
        "row_cache": row_cache,
    }
    if group is None:
        from mlx_zip.engine.mlx.mlx_engine import open_engine

        return open_engine(args.model, **options)
    from mlx_zip.engine.mlx.split_engine import open_split_engine

    return open_split_engine(group, args.model, **options)


def report_engine_fault(fault: BaseException | None) -> int:
    """Prints the exception that ended the engine's thread and returns 1; returns 0 if `fault` is None."""
    if fault is None:
        return 0
    print(f"error: the engine has stopped: {type(fault).__name__}: {first_message_line(fault)}", file=sys.stderr)
    return 1


def pack_options(
    chosen: Pack | None, codebook_size: int | None, name: str, revision: str | None = None
) -> dict[str, Any]:
    """Returns the arguments `pack` and `codebook_size` for loading the model `name`. chosen: packs of --pack, or None.

    Raises `GenerationError` if `codebook_size` is given and the model is plain.
    """
    plain = (chosen is not None or codebook_size is not None) and is_plain_model(name, revision)
    if plain and codebook_size is not None:
        raise GenerationError(f"--codebook-size: {name} is a plain model, whose codebook is its pack or none")
    return pack_load_options(chosen, codebook_size, plain)


def session_folder(args: argparse.Namespace) -> Path | None:
    """Returns the folder that keeps conversations over restarts, None to keep no conversations on disk."""
    return row_cache.cache_folder_from_flag(args.session_cache, SESSIONS)


def _read_chat_template(given: str) -> str:
    if "{" in given:
        return given
    with errors_as(GenerationError, f"--chat-template {given}", OSError, UnicodeDecodeError, DataError):
        check_regular_file(expand_home(given))
        return expand_home(given).read_text(encoding="utf-8")


def _check_chat_template(tokenizer: Any) -> None:
    """Raises `GenerationError` if the tokenizer's chat template has an error of syntax, so that any request would fail.

    Other errors may depend on the request, for example on its system message.
    """
    from jinja2 import TemplateSyntaxError

    from mlx_zip.text.prompts import render_chat

    try:
        render_chat(tokenizer, [{"role": "user", "content": "Hello."}])
    except GenerationError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            raise GenerationError(f"--chat-template: {error}") from error


def server_pack_options(chosen: Pack | None, name: str, engine: Any) -> dict[str, Any]:
    """Returns the fields `packs` and `pack` of the server's `Options`. Raises `MlxZipError` if the packs do not fit."""
    pack = choose_request_pack(chosen, engine)
    if chosen is None or is_plain_model(name):
        return {}
    return {"packs": {Path(file).stem: one for file, one in chosen.by_name.items()}, "pack": pack}
