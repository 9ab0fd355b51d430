"""Tiny random models of every family, made in memory: no files, no torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import numpy as np

from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.zip_model import Model

VOCAB, ROWS, SLOTS, MERGE, PAD = 40, 48, 64, 4, 2
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(8)],
    "long_factor": [1.0 + 8.0 * i for i in range(8)],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "rope_theta": 10000.0},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 12},
    "phi3": {
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 512,
        "sliding_window": None,
    },
    "qwen2": {"num_key_value_heads": 2, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
}
ENCODERS: dict[str, dict[str, Any]] = {
    "averaging": {},
    "attention": {"num_heads": 4},
    "transformer": {"num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48},
    "res_latent_attn": {"num_heads": 4, "num_hidden_layers": 1},
}


def tiny_config(family: str = "llama", encoder: str = "transformer", **changes: Any) -> dict[str, Any]:
    """config.json of a converted model with a base tail of 8 rows; `changes` go to the zip2zip section.

    hidden: width of the model, 64 unless given (32 for phi3, so that its heads are 16 wide as LONGROPE's factors say).
    """
    hidden = changes.pop("hidden", 32 if family == "phi3" else 64)
    tied = changes.pop("tie_encoders", False)
    heads = {"head_dim": changes.pop("head_dim")} if "head_dim" in changes else {}
    return {
        "model_type": "zip2zip",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 if family == "phi3" else 4,
        "max_position_embeddings": 512,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": family.startswith("gemma"),
        **deepcopy(FAMILIES[family]),  # transformers writes into the objects of a config that it is given
        **heads,
        "zip2zip": {
            "base_model_type": family,
            "position_mode": "compressed",
            "encoder_type": encoder,
            "encoder": {"hidden_size": hidden, "tie_encoders": tied, **ENCODERS[encoder]},
            "compression": {
                "initial_vocab_size": VOCAB,
                "max_codebook_size": SLOTS,
                "max_subtokens": MERGE,
                "disabled_ids": [0, 1, PAD],
            },
            "pad_token_id": PAD,
            **changes,
        },
    }


def tiny_model(family: str = "llama", encoder: str = "transformer", seed: int = 0, **changes: Any) -> Model:
    """A model of `tiny_config` with weights wide enough that logits differ clearly."""
    return random_model(tiny_config(family, encoder, **changes), seed, 0.3)


def random_model(config: dict[str, Any], seed: int, width: float) -> Model:
    """A model with random weights; width: their standard deviation. A norm's weights are around 1."""
    model = Model(ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = [
        (name, mx.array(rng.normal(0, width, value.shape).astype(np.float32)) + ("norm" in name))
        for name, value in mlx.utils.tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    return model


def quantize(model: nn.Module) -> None:
    """Quantizes, to 8 bits, the layers of a tiny model that the converter quantizes and whose width allows it."""

    def fits(path: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and "pos_embed" not in path and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, 32, 8, class_predicate=fits)
    mx.eval(model.parameters())


def base_ids(length: int, seed: int = 0) -> list[int]:
    """Base ids with many repeats and a few disabled ids."""
    rng = np.random.default_rng(seed)
    runs = [rng.integers(3, VOCAB, 5).tolist() for _ in range(4)]
    out: list[int] = []
    while len(out) < length:
        out += runs[rng.integers(4)] if rng.random() < 0.9 else [1]
    return out[:length]


def last_logits(model: Model, ids: Any, cache: Any) -> np.ndarray:
    """Runs the model on ids [L] and returns the last position's logits [W]."""
    return np.array(model(mx.array([ids]), cache=cache)[0, -1])
