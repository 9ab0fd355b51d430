"""zip2zip models on vLLM: a plugin through which vLLM's own scheduler runs models whose vocabulary grows.

vLLM finds the plugin, `mlx_zip.vllm.config.register`, by itself. `LLM` takes prompts and returns answers. Only the
commands that take `--engine vllm` and the bench import this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_zip.vllm.llm import LLM as LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from mlx_zip.vllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
