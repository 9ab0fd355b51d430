"""The engines `vllm-zip` and `vllm-base`: vLLM with and without hypertokens, one request at a time.

vLLM emits the ids that it chooses, so these engines cannot replay a text.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mlx_zip.engine.interface import Emitted, Failed, Finished, Started, Submission
from mlx_zip.errors import MlxZipError
from mlx_zip.text.stream import TextStream
from mlx_zip.vllm.engine import open_vllm_engine

from .device_clock import EngineOnTorch
from .interface import Run
from .shape_table import Models
from .torch_engines import weight_bytes_per_step


class VllmBenchEngine(EngineOnTorch):
    """An engine on vLLM. Each new request or conversation begins with an empty prefix cache."""

    def __init__(self, name: str, models: Models, vllm_args: Mapping[str, Any]) -> None:
        """Raises `MlxZipError` if these models cannot run on vLLM."""
        folder = models.zip_folder if name == "vllm-zip" else models.folder
        if folder is None:
            raise MlxZipError(f"{name} needs a model as a folder: {'--model' if name == 'vllm-zip' else '--base'}")
        self.name = name
        self.engine = open_vllm_engine(folder, max_running=1, vllm_args=vllm_args)
        self.tokenizer = self.engine.tokenizer
        llm: Any = self.engine._llm
        vllm_config = llm.vllm_config
        config, self.torch_device = vllm_config.model_config, torch.device(vllm_config.device_config.device_type)
        self.dtype: torch.dtype = config.dtype
        self.width: int = config.hf_config.hidden_size
        plain = config.hf_config.decoder_config() if name == "vllm-zip" else config.hf_config
        self.weight_bytes = _step_weight_bytes(plain, self.dtype)
        values = 2 * config.hf_config.num_hidden_layers * config.get_total_num_kv_heads() * config.get_head_size()
        self.kv_bytes = values * self.dtype.itemsize
        self.kv_dtype = str(self.dtype).removeprefix("torch.")

    def start_conversation(self) -> list[int]:
        """Empties the prefix cache and returns the ids of a new conversation: []."""
        self.engine.purge_sessions()
        return []

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. Raises `MlxZipError` if `replay` is given."""
        if replay is not None:
            raise MlxZipError(f"{self.name} emits the ids that vLLM chooses, not given ones")
        if held is None:
            held = self.start_conversation()
        asked = Submission([*held, *prompt], tokens, frozenset(self.tokenizer.eos_token_ids))
        arrived = queue.SimpleQueue[tuple[float, Any]]()
        begun = time.perf_counter()
        self.engine.submit(asked, lambda event: arrived.put((time.perf_counter() - begun, event)))
        run, ended = Run(0), False
        while not ended:
            seconds, event = arrived.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Started):
                run.prompt_ids = event.prompt_ids
            elif isinstance(event, Emitted):
                run.step(seconds, [event.id], event.base_ids)
            elif isinstance(event, Finished):
                entries = event.counts.entries
                run.row_bytes, ended = entries * self.width * self.dtype.itemsize, True
        held += [*prompt, *run.base_ids]
        run.kv_ids = self.engine.sessions()[-1].ids
        run.text_bytes = len(TextStream(self.tokenizer).feed(run.base_ids, last=True).text.encode())
        return run


def _step_weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes of weights that a step of a plain decoder reads. config: its transformers config."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return weight_bytes_per_step(AutoModelForCausalLM.from_config(config, dtype=dtype))
