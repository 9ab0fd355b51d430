"""zip2zip models on vLLM: a plugin through which vLLM's own scheduler runs models whose vocabulary grows.

`register` is the plugin: vLLM calls it in each of its processes (entry point group `vllm.general_plugins`). `LLM` takes
texts and gives texts. Nothing else of mlx_zip imports this package.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_zip.vllm.llm import LLM as LLM

ARCHITECTURE = "Zip2ZipForCausalLM"  # what vLLM calls our model


def register() -> None:
    """Tells transformers of our config and vLLM of our model; imports neither model nor weights."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from mlx_zip.layout import MODEL_TYPE
    from mlx_zip.vllm.config import Zip2ZipConfig

    AutoConfig.register(MODEL_TYPE, Zip2ZipConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "mlx_zip.vllm.model:Zip2ZipForCausalLM")


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from mlx_zip.vllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
