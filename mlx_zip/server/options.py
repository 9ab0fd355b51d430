"""The settings that a server starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Options:
    """Settings of a server.

    model: name of the model in answers, "" for the engine's own name. max_tokens: maximum base tokens of an answer
    whose request sets no maximum. max_tokens_with_tools: like `max_tokens`, for requests with tools and for OpenAI's
    Responses; -1: the rest of the context. sampling: defaults for fields of `Sampling`. template_options: default
    arguments of the chat template. pack: pack that codebooks begin with unless a request names one, None for the
    model's own. packs: name -> pack that requests can choose. api_key: key that requests must have, None for none.
    open_paths: paths that need no key; a path that ends in * stands for all paths with this prefix. allowed_origins:
    web origins that browsers may call from besides the server's own, "*" for all. hosts: allowed names in the Host
    header, None for any. max_body_bytes: maximum size of a request's body. session_files: folder for saved sessions,
    None for none. drain_s: time that answers in flight have to end when the server stops. responses_folder: folder that
    keeps stored OpenAI Responses over restarts, None to keep them in memory only. show_text: whether reports of where a
    prompt differs from a kept conversation show the text; if not, letters and digits are masked.
    """

    model: str = ""
    max_tokens: int = 512
    max_tokens_with_tools: int = -1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    pack: Any = None
    packs: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    open_paths: Sequence[str] = ("/health",)
    allowed_origins: Sequence[str] = ()
    hosts: frozenset[str] | None = LOOPBACK
    max_body_bytes: int = 32 << 20
    session_files: Path | None = None
    drain_s: float = 10.0
    responses_folder: Path | None = None
    show_text: bool = False
