"""Every number of the recipe. `FULL` makes the bundled pair, `TINY` runs all of it in seconds, to test it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Flags = Mapping[str, Any]  # flags of a command, without dashes


@dataclass(frozen=True)
class Settings:
    """What the recipe does.

    vocab_size: entries of the tokenizer. model: config.json of the base. short, long: base ids of a window while the
    base learns words, and afterwards. repeats: how often each story of a file is in the training text (once where it
    is not named). asked, conversations: at most so many of one turn, for the base's first stage, and of several.
    requests: to test with. codec: of the zip2zip model; `test_turns`:
    the turn of a conversation that is measured beside the first. base, chat, extra: settings of `mlx_zip train` for
    the base's first stage, its second, and the one that both the zip2zip model and its control get; encoder: the
    hyper-encoder of the former. bits: of the bundled weights. validation: bits per byte while training are measured on
    so many stories. measure: of `mlx_zip evaluate`. workers: processes of `mlx_zip prepare`, None for its default.
    """

    vocab_size: int
    model: Flags
    short: int
    long: int
    repeats: Mapping[str, int]
    asked: int
    conversations: int
    requests: int
    test_turns: int
    codec: Flags
    base: Flags
    chat: Flags
    extra: Flags
    encoder: Flags
    bits: int
    validation: int
    measure: Flags
    seed: int = 0
    protect: str = "digits"
    shard_samples: int = 2048
    workers: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    bundled: Mapping[str, str] = field(default_factory=lambda: {"stories": "zip", "stories-base": "control"})

    def fingerprint(self) -> str:
        """A digest of all settings: runs of different ones do not share a folder."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


FULL = Settings(
    vocab_size=2048,
    model={
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "intermediate_size": 640,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    },
    short=256,
    long=1024,
    repeats={"t1.train": 3, "real.train": 3},
    asked=16_000,
    conversations=12_000,
    requests=200,
    test_turns=3,
    codec={"merge_size": 3, "codebook_size": 2048},
    base={
        "iters": 1100, "batch_size": 32, "fine_tune_type": "full",
        "optimizer": "muon", "muon_learning_rate": 0.02, "learning_rate": 3e-3, "min_learning_rate": 1.5e-4,
        "warmup": 50, "steps_per_eval": 100, "val_batches": 4, "save_every": 50,
    },
    chat={
        "iters": 350, "batch_size": 8, "fine_tune_type": "full",
        "optimizer": "muon", "muon_learning_rate": 0.014, "learning_rate": 2e-3, "min_learning_rate": 4e-5,
        "warmup": 10, "steps_per_eval": 100, "val_batches": 8, "save_every": 50,
    },
    extra={
        "iters": 600, "batch_size": 8, "fine_tune_type": "full",
        "optimizer": "muon", "muon_learning_rate": 0.01, "learning_rate": 1.8e-3, "min_learning_rate": 3.6e-5,
        "warmup": 10, "steps_per_eval": 100, "val_batches": 8, "save_every": 50,
    },
    encoder={"encoder": "res_latent_attn", "encoder_size": 128, "encoder_layers": 2, "encoder_heads": 4},
    bits=8,
    validation=200,
    measure={"batch_size": 16, "max_tokens": 320},
)  # fmt: skip

_FEW = {"iters": 4, "batch_size": 4, "warmup": 1, "steps_per_report": 2, "steps_per_eval": 4, "val_batches": 1}
TINY = replace(
    FULL,
    vocab_size=320,
    model={**FULL.model, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 16,
           "vocab_size": 320, "max_position_embeddings": 256},
    short=32, long=96, asked=8, conversations=12, requests=4, test_turns=2, validation=4, shard_samples=16, workers=1,
    codec={"merge_size": 3, "codebook_size": 64},
    base={**FULL.base, **_FEW},
    chat={**FULL.chat, **_FEW},
    extra={**FULL.extra, **_FEW},
    encoder={**FULL.encoder, "encoder_size": 32, "encoder_layers": 1},
    measure={"batch_size": 4, "max_tokens": 12},
)  # fmt: skip

SCALES = {"full": FULL, "tiny": TINY}
