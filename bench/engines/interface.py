"""The engines' interface, and the record of a timed request. Needs no MLX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_zip.bench import machine
from mlx_zip.codec import Codebook, compress_next
from mlx_zip.codec.ids import as_ids
from mlx_zip.errors import MlxZipError


@dataclass
class Run:
    """One timed request.

    prompt_ids: length of the prompt in the engine's ids. times: seconds from the request to the end of each step. ids:
    the ids that each step emitted (without drafts, one id). base_ids: base ids of all emitted ids, cut where the text
    ends. first_base: number of base ids that the first step emitted. text_bytes: UTF-8 bytes of the text. kv_ids: ids
    in the KV cache at the end. row_bytes: bytes of hyper rows that a step reads at the end. second_bodies: number of
    steps that ran the decoder's layers twice. peak_bytes: peak memory, None if unknown. The comparison of engines sets
    prompt_tokens, the length of the prompt in base ids, and joules, the energy used, None if unknown.
    """

    prompt_ids: int
    times: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    base_ids: list[int] = field(default_factory=list)
    first_base: int = 0
    text_bytes: int = 0
    kv_ids: int = 0
    row_bytes: int = 0
    second_bodies: int = 0
    peak_bytes: int | None = None
    prompt_tokens: int = 0
    joules: float | None = None

    def step(self, seconds: float, ids: Iterable[int], base_ids: Iterable[int]) -> None:
        """Records a step: seconds since the request began, the emitted ids, and the base ids that they stand for."""
        self.times.append(seconds)
        self.ids.append(list(ids))
        self.base_ids += base_ids
        if len(self.times) == 1:
            self.first_base = len(self.base_ids)


class Engine(ABC):
    """The interface of an engine.

    weight_bytes: bytes of weights that every step reads. kv_bytes: bytes of one id's keys and values in all layers.
    kv_dtype: dtype of keys and values.
    """

    name = ""
    weight_bytes = 0
    kv_bytes = 0
    kv_dtype = ""

    @property
    def device(self) -> dict[str, Any]:
        """A description of the engine's device, for the records' section `device`."""
        return machine.describe_mlx_device()

    @property
    def yardstick(self) -> str:
        """The name of the measurement that `bandwidth` makes."""
        return machine.yardstick_name("MLX", machine.BANDWIDTH_SIDE)

    def bandwidth(self) -> float:
        """Measures how many bytes per second matrix-vector products read on the engine's device."""
        return machine.mlx_read_bandwidth()

    def forget_encoded_rows(self) -> None:
        """Drops everything that earlier requests stored in the model, such as encoded hyper rows."""
        return

    def start_conversation(self) -> Any:
        """Returns the state of a new conversation, which `run` takes as `held`.

        Raises `MlxZipError` if the engine runs single requests only.
        """
        raise MlxZipError(f"{self.name} runs single requests only: leave it out, or --turns 1")

    @abstractmethod
    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """Reads prompt [n] base ids, emits at most `tokens` base ids, and returns the timed run.

        replay [m]: base ids to emit instead of the engine's choices. held: state of the conversation to continue, from
        `start_conversation`; None begins a new conversation.
        """


def compress_prompt_and_text(
    book: Codebook, prompt: Sequence[int], text: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (compressed ids of the prompt, compressed ids of the text after the prompt).

    book: codebook that the prompt continues; not changed. prompt, text: base ids.
    """
    prompt_ids = compress_next(book, as_ids(prompt))
    following = book.copy()
    following.push(prompt_ids)
    return prompt_ids, following.compress(as_ids(text))


def kv_bytes_per_id(config: Mapping[str, Any], itemsize: int) -> int:
    """Returns the bytes of an id's keys and values in all layers. config: config.json. itemsize: bytes per number."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width * itemsize
