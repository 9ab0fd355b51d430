"""A tiny random model with a long context and a chat template with tools, whose answers a test writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlx_zip.engine import Submission, Ticket
from mlx_zip.engine.interface import Deliver
from mlx_zip.engine.mlx.mlx_engine import MlxEngine, ServeOptions
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from support.tiny import random_model
from support.tool_templates import with_tools

CONTEXT = 131_072


class Scripted(MlxEngine):
    """An engine whose answers are written by `script`, which is called with the text of a prompt.

    All else is real: what is not in the script has no probability, and the engine chooses among the ids that are left.
    asked: the texts of the prompts.
    """

    def __init__(self, script: Callable[[str], str]) -> None:
        self._script, self._tokenizer = script, with_tools("tags")
        self.asked: list[str] = []

        def load() -> Any:
            model = random_model(_config(len(self._tokenizer)), 0, 0.3)
            model.eval()
            return model, self._tokenizer

        super().__init__(load, "scripted", ServeOptions(), lambda made: open_session_store(made.model, made.tokenizer))

    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        """Takes a request, and has its answer written by the script."""
        self.asked.append(self._tokenizer.decode(list(submission.base_ids)))
        text = self._script(self.asked[-1])
        answer = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        lead = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = [*answer[len(lead) :], self._tokenizer.eos_token_id]
        return super().submit(replace(submission, constraint=_Written(ids, len(self._tokenizer))), deliver)


class _Written:
    """Lets nothing come but these base ids, one after the other."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self._left, self._vocab_size = list(ids), vocab_size

    def mask(self) -> np.ndarray:
        found = np.zeros(self._vocab_size, bool)
        found[self._left[:1]] = True
        return found

    def accepts(self, base_ids: Sequence[int]) -> bool:
        return list(base_ids) == self._left[: len(base_ids)]

    def push(self, base_ids: Sequence[int]) -> None:
        del self._left[: len(base_ids)]


def _config(vocab_size: int) -> dict[str, Any]:
    """config.json of a model of one small layer, with all positions that an agent may ask for."""
    return {
        "model_type": "zip2zip",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "zip2zip": {
            "base_model_type": "llama",
            "position_mode": "compressed",
            "encoder_type": "averaging",
            "encoder": {"hidden_size": 16, "tie_encoders": True},
            "compression": {
                "initial_vocab_size": vocab_size,
                "max_codebook_size": 2048,
                "max_subtokens": 4,
                "disabled_ids": [0, 1, 2],
            },
            "pad_token_id": 0,
        },
    }
