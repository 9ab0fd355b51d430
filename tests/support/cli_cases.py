"""The model and prompt of command-line tests, and `mlx_zip generate` with them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from mlx_zip import cli
from mlx_zip.engine.mlx.generate import load, stream_generate

MODEL = "llama_transformer_tied_lora"

PROMPT = "The cat sat on the mat. The cat sat on the mat."


def generate_command(capsys: Any, model: str) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs `mlx_zip generate` with a model and returns (status, stdout, stderr)."""

    def generate(*flags: Any, command: str = "generate", name: str | None = model) -> tuple[int, str, str]:
        with_model = ["--model", name] if command == "generate" and name else []
        status = cli.main([command, *with_model, *map(str, flags)])
        return (status, *capsys.readouterr())

    return generate


def raw(*flags: Any) -> tuple[Any, ...]:
    """Returns flags for a plain continuation of PROMPT, without the chat template."""
    return ("--prompt", PROMPT, "--ignore-chat-template", "--max-tokens", 30, *flags)


def expected(model: str, **options: Any) -> str:
    """Returns the text that the library writes after PROMPT."""
    loaded, tokenizer = load(model)
    return "".join(r.text for r in stream_generate(loaded, tokenizer, PROMPT, **{"max_tokens": 30, **options}))


def stdin(monkeypatch: Any, data: bytes) -> None:
    """Gives the process `data` to read from standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
