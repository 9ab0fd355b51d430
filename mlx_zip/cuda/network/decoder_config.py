"""The sizes and options of a decoder that this engine runs, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_zip.cuda.network.frequencies import Rope, make_rope
from mlx_zip.errors import ConfigError
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.decoder_options import (
    TORCH_FAMILIES,
    has_tied_head,
    head_width,
    layer_rope_parameters,
    layer_types,
    norm_eps,
    raise_if_options_unsupported,
    sliding_window,
)
from mlx_zip.models.model_folder import ModelArgs


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    layers, heads, kv_heads: counts. width: D of the residual stream. head_width: E. inner: width F of the MLP. rows:
    rows of the embedding. eps: of RMS norms. qkv_bias, output_bias, mlp_bias: which products have biases. qk_norm:
    whether queries and keys are normed. joined: whether the checkpoint stores q, k and v as one matrix, and gate and up
    as one matrix. windows: per layer, the sliding window in ids, or None. tied: whether the head is the embedding.
    rope: rotation of queries and keys. positions: number of positions that the model was made for.
    """

    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    rows: int
    eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    joined: bool
    windows: tuple[int | None, ...]
    tied: bool
    rope: Rope
    positions: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Reads the contents of config.json, of a converted or a plain model.

        Raises `ConfigError` naming the architecture or option if it is not supported.
        """
        if config.get("model_type") == MODEL_TYPE:
            config = ModelArgs.from_dict(dict(config)).decoder_config
        kind = config.get("model_type")
        if kind not in TORCH_FAMILIES:
            known = ", ".join(TORCH_FAMILIES)
            raise ConfigError(f"model_type {kind!r} is not supported on PyTorch; supported: {known}")
        raise_if_options_unsupported(config)
        types = layer_types(config)
        ropes = [layer_rope_parameters(config, one) for one in sorted(set(types))]
        if any(rope != ropes[0] for rope in ropes):
            raise ConfigError("config.json: rope_parameters that differ between layers are not supported on PyTorch")
        window, has_options = sliding_window(config), kind in ("llama", "mistral")
        heads, width = config["num_attention_heads"], head_width(config)
        return cls(
            kind=kind,
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_width=width,
            inner=config["intermediate_size"],
            rows=config["vocab_size"],
            eps=norm_eps(config),
            qkv_bias=kind == "qwen2" or (has_options and bool(config.get("attention_bias"))),
            output_bias=has_options and bool(config.get("attention_bias")),
            mlp_bias=has_options and bool(config.get("mlp_bias")),
            qk_norm=kind == "qwen3",
            joined=kind == "phi3",
            windows=tuple(window if one == "sliding_attention" else None for one in types),
            tied=has_tied_head(config),
            rope=make_rope(ropes[0], width, config),
            positions=config.get("max_position_embeddings") or 32768,
        )

    @property
    def query_columns(self) -> int:
        """Columns of all queries: H E."""
        return self.heads * self.head_width

    @property
    def key_columns(self) -> int:
        """Columns of all keys, which are also the columns of all values: K E."""
        return self.kv_heads * self.head_width
