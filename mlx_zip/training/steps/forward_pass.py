"""Runs the forward pass of training: whole samples at once, with codebooks that are known beforehand.

A request builds its codebook id by id, but a training sample's codebook is known in full. So each distinct entry of a
batch is encoded once, and the decoder runs without KV caches. Every function here is plain MLX over given arrays, so
that the function can be differentiated and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.models.layers import Positions
from mlx_zip.models.rows.encoders import matrix_rows
from mlx_zip.models.zip_model import Model

Arrays = Mapping[str, mx.array]  # arrays of a `Batch`


@dataclass(frozen=True)
class ForwardOutputs:
    """The result of `run_forward_pass`.

    hidden [B, L, D]: output of the last layer. base [B, L, V], hyper [B, L, K]: logits of base ids and of slots.
    input_rows [R, D], output_rows [U, D]: the hyper rows that were used.
    """

    hidden: mx.array
    base: mx.array
    hyper: mx.array
    input_rows: mx.array
    output_rows: mx.array


class NoCache:
    """A KV cache that keeps nothing, for layers that expect one."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the given keys and values."""
        return keys, values

    def make_mask(self, length: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Returns the causal mask for `length` ids. Padding is on the right, so no real id attends to padding."""
        from mlx_lm.models.base import create_causal_mask

        if window_size is None and not return_array:
            return "causal"
        return create_causal_mask(length, window_size=window_size)


def run_forward_pass(
    model: Model, arrays: Arrays, rows: tuple[mx.array, mx.array], long: bool = False
) -> ForwardOutputs:
    """Runs whole samples through the model. Logits are soft-capped if the model has a cap, but not masked.

    rows: input rows [R, D] of the entries in `arrays["read"]` and output rows [U, D] of all entries, from
    `encode_hyper_rows`. long: use LongRoPE's long factors.

    Right padding needs no mask, because attention is causal. Logits of base ids, and of entries that are installed at a
    position, equal those of `model(ids, causal=True)` for each sample alone (tests).
    """
    input_rows, output_rows = rows
    is_hyper = (arrays["input_rows"] >= 0)[..., None]
    h = model.model.embed_tokens(arrays["inputs"])
    h = mx.where(is_hyper, input_rows[mx.maximum(arrays["input_rows"], 0)].astype(h.dtype), h)
    positions = Positions(index=arrays.get("index"), long=long)
    h = model.run_layers(model.scale_embeddings(h), [NoCache()] * len(model.layers), positions)
    base = model.base_logits(h)
    slots = output_rows[arrays["slots"]].astype(h.dtype)  # [B, K, D]
    hyper = model.soft_cap_logits(h @ slots.swapaxes(-1, -2))
    return ForwardOutputs(h, base[..., : model.layout.vocab_size], hyper, input_rows, output_rows)


def encode_hyper_rows(model: Model, arrays: Arrays) -> tuple[mx.array, mx.array]:
    """Returns input rows [R, D] of the entries in `arrays["read"]`, and output rows [U, D] of all entries.

    If encoders and matrices are tied, each entry is encoded once, and the input rows are a selection of output rows.
    """
    entries, lengths, read = arrays["entries"], arrays["lengths"], arrays["read"]
    output = encode_entries(model.row_encoder, model.head_matrix, entries, lengths)
    if model.sides_are_one:
        return output[read], output
    entries, lengths = entries[read], lengths[read]
    return encode_entries(model.input_encoder, model.model.embed_tokens, entries, lengths), output


def encode_entries(encoder: nn.Module, matrix: nn.Module, entries: mx.array, lengths: mx.array) -> mx.array:
    """Returns the hyper rows [N, D] of N entries. entries [N, S]: padded base ids. lengths [N]: base ids per entry.

    The encoder's activations are recomputed in the backward pass. Keeping them would take more memory than the
    decoder's activations, because every entry has several positions.
    """
    return call_with_recompute(encoder, lambda vectors: encoder(vectors, lengths), matrix_rows(matrix, entries))


def call_with_recompute(module: nn.Module, call: Callable[[mx.array], Any], x: mx.array) -> Any:
    """Returns `call(x)`, keeping only x and the module's weights for the backward pass, which runs `call` again.

    `call` must use no trained weights except the module's, and must draw no random numbers, because the second run
    would draw others. The second run uses all weights of the first run, also frozen weights. After it, the module gets
    back the weights that it had before the second run.
    """
    first = module.parameters()

    def again(parameters: Any, x: mx.array) -> Any:
        """Returns `call(x)`, run with the first run's weights and the trained weights `parameters`."""
        own = module.parameters()
        module.update(first)
        module.update(parameters)
        out = call(x)
        module.update(own)
        return out

    return mx.checkpoint(again)(module.trainable_parameters(), x)


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Makes `blocks` recompute their activations in the backward pass. Names and weights are unchanged.

    The blocks must not draw random numbers, because the second pass would draw others. Unlike mlx-lm's
    `grad_checkpoint`, which changes the class itself, this does not affect other blocks of the same class.
    """
    made: dict[type, type] = {}
    for block in blocks:
        kind = type(block)
        if kind not in made:
            made[kind] = type(kind.__name__, (kind,), {"__call__": _recomputing_call(kind.__call__)})
        block.__class__ = made[kind]


def _recomputing_call(call: Callable[..., Any]) -> Callable[..., Any]:

    def checkpointed(block: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return call_with_recompute(block, lambda x: call(block, x, *args, **kwargs), x)

    return checkpointed
