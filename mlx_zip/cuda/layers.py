"""The weights of a decoder's layers, taken out of a model's folder and joined for few launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlx_zip.cuda.decoder_config import DecoderConfig
from mlx_zip.cuda.folder import Folder
from mlx_zip.cuda.linear import Linear, joined
from mlx_zip.errors import ModelError


@dataclass(frozen=True)
class Layer:
    """The weights of one layer.

    norm, mlp_norm [D]. qkv: D -> (H + 2K) E, queries, keys, values. q_norm, k_norm [E], None without. output: H E -> D.
    gate_up: D -> 2F, gate, then up. down: F -> D. window: sliding window in ids, or None.
    """

    norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


def take_layers(folder: Folder) -> list[Layer]:
    """Removes the layers' tensors from the folder and returns them. Raises `ModelError` naming file and tensor."""
    layers = [_layer(folder, folder.decoder, index) for index in range(folder.decoder.layers)]
    if rest := sorted(name for name in folder.tensors if name.startswith("model.layers.")):
        raise ModelError(
            f"{folder.path / folder.files[rest[0]]}: {rest[0]} belongs to no layer of a {folder.decoder.kind}"
        )
    return layers


def _layer(folder: Folder, config: DecoderConfig, index: int) -> Layer:
    """Returns the layer of this index."""
    at, width, inner = f"model.layers.{index}.", config.width, config.inner
    normed, biased = config.qk_norm, config.mlp_bias
    names = ["gate_up_proj"] if config.joined else ["gate_proj", "up_proj"]
    rows = 2 * inner // len(names)
    gate_up = [_linear(folder, f"{at}mlp.{name}", rows, width, biased) for name in names]
    return Layer(
        norm=folder.take_dense(f"{at}input_layernorm.weight", width),
        qkv=_qkv(folder, config, f"{at}self_attn."),
        q_norm=folder.take_dense(f"{at}self_attn.q_norm.weight", config.head_width) if normed else None,
        k_norm=folder.take_dense(f"{at}self_attn.k_norm.weight", config.head_width) if normed else None,
        output=_made(folder, _linear(folder, f"{at}self_attn.o_proj", width, config.query_columns, config.output_bias)),
        mlp_norm=folder.take_dense(f"{at}post_attention_layernorm.weight", width),
        gate_up=_made(folder, *gate_up),
        down=_made(folder, _linear(folder, f"{at}mlp.down_proj", width, inner, biased)),
        window=config.windows[index],
    )


def _qkv(folder: Folder, config: DecoderConfig, at: str) -> Linear:
    """Returns the product that makes queries, keys and values."""
    queries, keys = config.query_columns, config.key_columns
    rows = {"qkv_proj": queries + 2 * keys} if config.joined else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return _made(folder, *(_linear(folder, at + name, n, config.width, config.qkv_bias) for name, n in rows.items()))


def _made(folder: Folder, *parts: Linear) -> Linear:
    """Returns the product whose rows are those of all parts, as the folder's device takes it."""
    whole = joined(parts)
    return whole if folder.kernels else whole.keep(folder.dtype)


def _linear(folder: Folder, name: str, rows: int, columns: int, biased: bool) -> Linear:
    """Returns the product of this name."""
    bias = folder.take_dense(f"{name}.bias", rows) if biased else None
    return Linear(folder.take(f"{name}.weight", rows, columns), bias)
