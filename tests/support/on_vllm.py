"""Engines on vLLM as tests open them, folders that vLLM can read, and the same requests on MLX."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_zip.bench.recording import environment_fields
from mlx_zip.cuda.network.checkpoint import folder_fingerprint
from mlx_zip.engine.interface import Engine, Submission
from mlx_zip.packs.pack import IN_FOLDER, load_pack, save_pack
from support.serving import Watch
from support.torch_folders import save_weights

# the share of memory that must be free is low, so that two engines start beside each other
CPU_ARGS = {"enforce_eager": True, "block_size": 32, "max_model_len": 512, "gpu_memory_utilization": 0.3}
TEXTS = ("Once upon a time there was a little girl. The little girl", "One day, a big dog", "Tim and Tim and Tim and")


def open_on_vllm(folder: Any, max_running: int = 16, vllm_args: dict[str, Any] | None = None, **options: Any) -> Any:
    """Returns an engine on vLLM in float32. vllm_args: added to `CPU_ARGS`."""
    from mlx_zip.vllm.engine import open_vllm_engine

    args = {**CPU_ARGS, **(vllm_args or {})}
    return open_vllm_engine(folder, dtype="float32", max_running=max_running, vllm_args=args, **options)


def record(what: str, **figures: Any) -> None:
    """Appends what a test has just found to be right to the file that MLX_ZIP_VLLM_RECORD names, if it names one."""
    if file := os.environ.get("MLX_ZIP_VLLM_RECORD"):
        line = {"bench": "vllm-requests", "what": what, **figures, **environment_fields()}
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


def worker_state(engine: Any) -> Any:
    """Returns the `Zip2ZipState` of an engine whose worker runs in this process."""
    return engine._llm.model_executor.driver_worker.worker.model_runner.model_state


def dequantized(name: str, folder: Path) -> Path:
    """Writes a bundled model in float32, with its tokenizer, and its pack bound to the new weights."""
    from mlx_lm.utils import dequantize_model

    from mlx_zip import load
    from mlx_zip.named import resolve_model_name

    source = resolve_model_name(name)
    model, _ = load(str(source))
    config = {key: value for key, value in model.args.config.items() if not key.startswith("quantization")}
    save_weights(dequantize_model(model), folder, config)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors", "draft_head.safetensors", IN_FOLDER):
            shutil.copy(file, folder)
    pack = load_pack(source / IN_FOLDER)
    assert pack.rows is not None
    rows = replace(pack.rows, model=folder_fingerprint(folder, config["tie_word_embeddings"]))
    save_pack(folder / IN_FOLDER, replace(pack, rows=rows))
    return folder


class Leaving(Watch):
    """Receives the events of a request that is given up after its second id. ticket: set after it was submitted."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self.ticket = engine, None

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if self.ticket is not None and len(self.emitted) >= 2:
            self._engine.cancel(self.ticket)


def answer_all(
    engine: Engine, submissions: Sequence[Submission], concurrency: int = 16, cancelled: Sequence[int] = ()
) -> list[Watch]:
    """Returns what requests got of which so many are under way at a time.

    cancelled: indices of requests that are given up, every second one at once, the others in their answer's middle.
    """
    watches = list[Watch]()
    for index, submission in enumerate(submissions):
        if index >= concurrency:
            _wait(watches[index - concurrency])
        leaving = index in cancelled and list(cancelled).index(index) % 2 == 0
        watches.append(Leaving(engine) if leaving else Watch())
        ticket = engine.submit(submission, watches[-1])
        if isinstance(watches[-1], Leaving):
            watches[-1].ticket = ticket
        elif index in cancelled:
            engine.cancel(ticket)
    return [_wait(watch) for watch in watches]


def _wait(watch: Watch) -> Watch:
    """Waits for the end of a request; interpreted kernels take their time."""
    assert watch._done.wait(900), "the request did not end"
    return watch
