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

    model: name of the model in answers, "" for the engine's own name. max_tokens: base tokens of an answer that asks
    for no number. max_tokens_with_tools: likewise, for requests with tools and for Responses; -1 for what is left of
    the context. sampling: fields of `Sampling` that hold for requests that do not set them. template_options: arguments
    of the chat template, likewise. pack: what codebooks begin with unless a request says otherwise, None for the
    model's own. packs: packs that a request can choose, by name. api_key: None lets everybody in. open_paths: paths
    that need no key; one that ends in * stands for all that begin so. allowed_origins: web origins that browsers may
    call from besides the server's own, "*" for all. hosts: names that a Host header may have, None for any.
    max_body_bytes: bound of a request's body. max_depth: how deep its JSON may be nested. body_timeout_s: time in which
    a body must arrive. stall_timeout_s: time after which a client that reads nothing is dropped. ping_s: time between
    comments in a stream without other news. session_files: folder for saved sessions, None for none. drain_s: time that
    answers under way have when the server stops. max_responses, max_responses_bytes: how many of OpenAI's Responses are
    stored for later requests, and how many bytes of memory they may take. responses_folder: where they are kept over
    restarts, None for in memory only. show_text: whether reports show what was
    written where a prompt differs from a kept conversation; otherwise letters and digits are hidden.
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
    max_depth: int = 100
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    ping_s: float = 15.0
    session_files: Path | None = None
    drain_s: float = 10.0
    max_responses: int = 1000
    max_responses_bytes: int = 128 << 20
    responses_folder: Path | None = None
    show_text: bool = False
