"""Lets mlx_lm load converted models and their saved caches, and turn hypertokens into text; does not import mlx_lm.

mlx_lm looks up a model class in the module `mlx_lm.models.<model_type>`, and the class of a saved cache entry in
`mlx_lm.models.cache`. So a small module is registered as `mlx_lm.models.zip2zip`, which imports its classes on first
use, and `ZipState` is added to `mlx_lm.models.cache` when that module is imported. mlx_lm's `stream_generate` turns ids
into text without a codebook, so `generate_step` is replaced by a function that yields the base ids of hypertokens.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_zip.errors import GenerationError
from mlx_zip.layout import MODEL_TYPE

_MODEL_MODULE = f"mlx_lm.models.{MODEL_TYPE}"
_CACHE_MODULE = "mlx_lm.models.cache"
_GENERATE_MODULE = "mlx_lm.generate"


class _ModelModule(ModuleType):
    """The module `mlx_lm.models.zip2zip`: imports `Model` and `ModelArgs` on first use."""

    def __getattr__(self, name: str) -> Any:
        if name in ("Model", "ModelArgs"):
            return getattr(import_module("mlx_zip.models.zip_model"), name)
        raise AttributeError(name)


class _HookingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `_IMPORT_HOOKS` as Python does, and runs a module's hook after the module's own code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _IMPORT_HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run_code = spec.loader.exec_module

        def run_code_and_hook(module: ModuleType) -> None:
            run_code(module)
            _IMPORT_HOOKS[name](module)

        spec.loader.exec_module = run_code_and_hook  # type: ignore[method-assign]
        return spec


def _register_zip_state(cache_module: Any) -> None:
    """Adds `ZipState` to mlx_lm's cache module, where mlx_lm looks for the classes of saved cache entries."""
    cache_module.ZipState = import_module("mlx_zip.models.rows.zip_state").ZipState


def _replace_generation_functions(generate_module: Any) -> None:
    """Replaces `generate_step` by one that yields base ids to `stream_generate`, and ids as they are to other callers.

    mlx_lm's functions look up `generate_step` whenever they are called. So a `stream_generate` that was imported before
    this replacement, and `generate`, which calls it, get base ids too. `batch_generate` and draft models are refused.
    """
    steps, texts = generate_module.generate_step, generate_module.stream_generate.__code__
    drafted = generate_module.speculative_generate_step
    batch_texts = generate_module.batch_generate.__code__

    @wraps(steps)
    def generate_step(prompt: Any, model: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        if sys._getframe(1).f_code is not texts or not _is_zip_model(model):
            return steps(prompt, model, *args, **kwargs)
        if kwargs.get("prompt_cache") is None:
            kwargs["prompt_cache"] = model.make_cache()
        return _yield_base_ids(steps, prompt, model, *args, **kwargs)

    @wraps(drafted)
    def speculative_generate_step(
        prompt: Any, model: Any, draft_model: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        if _is_zip_model(model) or _is_zip_model(draft_model):
            raise GenerationError(
                "draft_model: mlx_lm cannot check ids of one model with another one's hypertokens: use "
                "mlx_zip.stream_generate, which takes draft_model too"
            )
        return drafted(prompt, model, draft_model, *args, **kwargs)

    class BatchGenerator(generate_module.BatchGenerator):
        def __new__(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code is batch_texts and _is_zip_model(model):
                raise GenerationError(
                    "mlx_lm.batch_generate turns ids into text without the codebook, so hypertokens would be left out: "
                    "use mlx_zip.batch_generate"
                )
            return super().__new__(cls)

    generate_module.generate_step, generate_module.BatchGenerator = generate_step, BatchGenerator
    generate_module.speculative_generate_step = speculative_generate_step


def _is_zip_model(model: Any) -> bool:
    models = sys.modules.get("mlx_zip.models.zip_model")
    return models is not None and isinstance(model, models.Model)


def _yield_base_ids(steps: Any, prompt: Any, model: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (base id, log-probabilities of the step) for all base ids of each step's id. prompt: base ids [L]."""
    state = import_module("mlx_zip.models.rows.zip_state").find_zip_state(kwargs["prompt_cache"])
    if state is None:
        yield from steps(prompt, model, *args, **kwargs)
        return
    book = state.books[0]
    read = type(prompt)(book.compress(prompt.tolist()))
    for emitted_id, logprobs in steps(read, model, *args, **kwargs):
        for base_id in book.expand([emitted_id]).tolist():
            yield base_id, logprobs


_IMPORT_HOOKS: dict[str, Callable[[Any], None]] = {
    _CACHE_MODULE: _register_zip_state,
    _GENERATE_MODULE: _replace_generation_functions,
}


def register() -> None:
    """Registers the model module and `ZipState` with mlx_lm. `import mlx_zip` calls this; further calls do nothing."""
    if _MODEL_MODULE in sys.modules:
        return
    module = _ModelModule(_MODEL_MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(_MODEL_MODULE, None)
    sys.modules[_MODEL_MODULE] = module
    sys.meta_path.insert(0, _HookingFinder())
    for name, change in _IMPORT_HOOKS.items():
        if name in sys.modules:
            change(sys.modules[name])
