"""Tiny random models of mlx-lm with every kind of cache that mlx-lm can batch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.utils
import numpy as np

WINDOW = 12
_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN3_NEXT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
_MAMBA2 = {
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": (0.0, 100.0),
    "time_step_rank": "auto",
    "intermediate_size": 64,
}
_FALCON_H1 = {
    "mamba_d_ssm": 64,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # mlx-lm's module, and what is special
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "llama with windows": (
        "llama",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW},
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16, "num_key_value_heads": 1},
    ),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT),
    "mamba2": ("mamba2", _MAMBA2),
    "falcon_h1": ("falcon_h1", _FALCON_H1),
}
WINDOWS = ("llama with windows", "gemma3")
STATES = ("qwen3_next", "mamba2", "falcon_h1")


def plain_family(name: str, seed: int = 0) -> Any:
    """A model of a family, with weights wide enough that logits differ clearly."""
    module, special = FAMILIES[name]
    kind = import_module(f"mlx_lm.models.{module}")
    model = kind.Model(kind.ModelArgs.from_dict({**_COMMON, "model_type": module, **special}))
    rng = np.random.default_rng(seed)
    weights = [
        (path, mx.array(rng.normal(0, 0.3, value.shape).astype(np.float32)) + ("norm" in path))
        for path, value in mlx.utils.tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    return model.eval()
