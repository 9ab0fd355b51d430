"""The objective of `mlx_zip.training.objective` on PyTorch: the same sums, chunk by chunk.

Logits over tens of thousands of base ids are never laid out for a whole batch. Each chunk of positions gets its logits,
its loss and the loss's gradient at once, in the forward pass; the backward pass only scales these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from mlx_zip.config import SIDES
from mlx_zip.generation.exclusions import MOST
from mlx_zip.training.objective import LossWeights
from mlx_zip.training.pytorch.model import TorchModel

CHUNK = 256  # positions whose logits are there together
Arrays = Mapping[str, torch.Tensor]


def losses(model: TorchModel, weights: LossWeights, arrays: Arrays, longest: int) -> dict[str, torch.Tensor]:
    """Returns sums over the positions that count, float32 scalars: `nats`, `count`, and each loss with a weight.

    arrays: those of a `Batch`; longest: inputs of its longest sample.
    """
    if model.zip is None:
        return plain_losses(model, arrays, longest)
    if "entries" not in arrays:
        raise ValueError("a zip model is trained on samples with a codebook")
    read, written = model.rows(arrays)
    h = model.hidden(arrays, longest, read)
    sums = _sums(model, h, written, arrays)
    if weights.reconstruction:
        sums["reconstruction"] = _reconstruction(model, weights, written, arrays) * sums["count"]
    if weights.token_type:
        sums["token_type"] = _token_type(model, h, arrays)
    return sums


def plain_losses(model: TorchModel, arrays: Arrays, longest: int) -> dict[str, torch.Tensor]:
    """Returns `nats` and `count` of a batch of base ids, read without hypertokens."""
    return _sums(model, model.hidden(arrays, longest, None), None, arrays)


def _sums(model: TorchModel, h: torch.Tensor, rows: torch.Tensor | None, arrays: Arrays) -> dict[str, torch.Tensor]:
    """Returns `nats` and `count` for the body's output h [B, L, D]. rows [U, D]: output rows of all entries."""
    vocab = len(model.head) if model.zip is None else model.zip.vocab_size
    rows = h.new_zeros(0, h.shape[-1]) if rows is None else rows
    nats = JointNats.apply(h, model.head[:vocab], rows, arrays, model.cap)
    return {"nats": nats, "count": arrays["weights"].sum()}


@dataclass(frozen=True)
class _Chunk:
    """Some positions of one sample. h [N, D]; targets, available [N]; weights [N]; excluded: row and id, [X] each."""

    h: torch.Tensor
    targets: torch.Tensor
    available: torch.Tensor | None
    weights: torch.Tensor
    excluded: tuple[torch.Tensor, torch.Tensor] | None


class JointNats(torch.autograd.Function):
    """The summed cross entropy over base ids and available entries together (arXiv 2506.01084 eq. 2)."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, head: torch.Tensor, rows: torch.Tensor, arrays: Arrays, cap: float | None):
        """Returns nats, a float32 scalar, of h [B, L, D], head [V, D] and the output rows [U, D] of all entries."""
        wanted = any(ctx.needs_input_grad)  # false in validation
        grad_h, grad_rows = torch.zeros_like(h), torch.zeros_like(rows, dtype=torch.float32)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        total = h.new_zeros((), dtype=torch.float32)
        for b in range(len(h)):
            held = arrays["slots"][b] if len(rows) else None
            table = rows.new_zeros(0, rows.shape[1]) if held is None else rows[held].to(h.dtype)
            for at, chunk in _chunks(h, arrays, b):
                nats, by_base, by_slot = _loss_and_gradient(chunk, head.to(h.dtype), table, cap)
                total += nats
                if not wanted:
                    continue
                grad_h[b, at] = by_base @ head.to(h.dtype) + by_slot @ table
                if held is not None:
                    grad_rows.index_add_(0, held, (by_slot.mT @ chunk.h).float())
                if grad_head is not None:
                    grad_head += by_base.mT @ chunk.h
        ctx.save_for_backward(grad_h, grad_rows, grad_head)
        ctx.dtypes = rows.dtype, head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        grad_h, grad_rows, grad_head = ctx.saved_tensors
        of_rows, of_head = ctx.dtypes
        by_head = None if grad_head is None else (grad_head * outer[0]).to(of_head)
        return (grad_h * outer[0]).to(grad_h.dtype), by_head, (grad_rows * outer[0]).to(of_rows), None, None


def _chunks(h: torch.Tensor, arrays: Arrays, b: int) -> Any:
    """Yields (positions [N], chunk) of sample b; positions that do not count are left out."""
    counting = torch.nonzero(arrays["weights"][b] > 0)[:, 0]
    pairs = None
    if "excluded_at" in arrays:
        mine = torch.div(arrays["excluded_at"], h.shape[1], rounding_mode="floor") == b
        pairs = arrays["excluded_at"][mine] % h.shape[1], arrays["excluded"][mine]
    for at in counting.split(CHUNK):
        excluded = None
        if pairs is not None:
            inside = torch.isin(pairs[0], at)
            excluded = torch.searchsorted(at, pairs[0][inside]), pairs[1][inside]
        available = arrays["available"][b, at] if "available" in arrays else None
        yield at, _Chunk(h[b, at], arrays["targets"][b, at], available, arrays["weights"][b, at], excluded)


def _loss_and_gradient(
    chunk: _Chunk, head: torch.Tensor, table: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the nats of a chunk, and their gradient by the logits of base ids [N, V] and of slots [N, K].

    table [K, D]: output rows of the sample's slots. Logits are float32; their gradient has h's dtype.
    """
    vocab = len(head)
    logits = torch.cat([chunk.h @ head.mT, chunk.h @ table.mT], 1).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
        slope = 1 - (logits / cap).square()
    if chunk.available is not None:
        slots = torch.arange(len(table), device=logits.device)
        logits[:, vocab:].masked_fill_(slots >= chunk.available[:, None], -torch.inf)
    normaliser = logits.logsumexp(1)
    nats = normaliser - logits.gather(1, chunk.targets[:, None])[:, 0]
    share = logits.sub_(normaliser[:, None]).exp_()
    if chunk.excluded is not None:
        nats = nats + _exclude(share, *chunk.excluded)
    share.scatter_add_(1, chunk.targets[:, None], share.new_full((len(share), 1), -1.0))
    share *= chunk.weights[:, None]
    if cap is not None:
        share *= slope
    gradient = share.to(chunk.h.dtype)
    return (nats * chunk.weights).sum(), gradient[:, :vocab], gradient[:, vocab:]


def _exclude(share: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Takes excluded ids out of the probabilities `share` [N, V + K], in place; returns the nats [N] that this saves.

    row, column [X]: which id is excluded where. Nothing is excluded where such ids hold more than `MOST` together.
    """
    theirs = share[row, column]
    held = share.new_zeros(len(share)).index_add_(0, row, theirs)
    held = torch.where(held <= MOST, held, 0.0)
    share[row, column] = torch.where(held[row] > 0, 0.0, theirs)
    share /= (1 - held)[:, None]
    return torch.log1p(-held)


def _token_type(model: TorchModel, h: torch.Tensor, arrays: Arrays) -> torch.Tensor:
    """Returns the summed binary cross entropy of "the next id is a hypertoken"."""
    assert model.zip is not None
    weight, bias = (model.parts[f"type_head.{name}"].to(h.dtype) for name in ("weight", "bias"))
    logits = functional.linear(h, weight, bias)[..., 0].float()
    is_hyper = (arrays["targets"] >= model.zip.vocab_size).float()
    loss = functional.binary_cross_entropy_with_logits(logits, is_hyper, reduction="none")
    return (loss * arrays["weights"]).sum()


def _reconstruction(model: TorchModel, weights: LossWeights, written: torch.Tensor, arrays: Arrays) -> torch.Tensor:
    """Returns the mean cross entropy of entries' base ids, predicted from their input and output rows (eq. 3)."""
    assert model.zip is not None
    size = len(arrays["entries"])
    n = min(weights.reconstruct_entries, size)
    chosen = torch.arange(n, device=written.device) * size // n
    entries, lengths = arrays["entries"][chosen], arrays["lengths"][chosen]
    real = (torch.arange(entries.shape[1], device=written.device) < lengths[:, None]) & (lengths[:, None] > 1)
    matrix = model.body.embed_tokens.weight
    read = model.encode(SIDES[0], matrix, entries, lengths)
    both = [_reconstructed(model, written[chosen], model.head, entries), _reconstructed(model, read, matrix, entries)]
    return sum((nats * real).sum() for nats in both) / (2 * real.sum().clamp(min=1))


def _reconstructed(model: TorchModel, rows: torch.Tensor, matrix: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Returns nats [N, S] of the base ids of `entries` [N, S], predicted from their rows [N, D] through `matrix`."""
    weight, bias = (model.parts[f"decoder.{name}"].to(rows.dtype) for name in ("weight", "bias"))
    guesses = functional.linear(rows, weight, bias).view(*entries.shape, -1)
    logits = (guesses @ matrix.to(rows.dtype).mT).float()
    return functional.cross_entropy(logits.flatten(0, 1), entries.flatten(), reduction="none").view(entries.shape)
