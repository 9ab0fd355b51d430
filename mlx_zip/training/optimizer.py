"""Optimizers and schedule: mlx's own, put together."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import build_schedule

from mlx_zip.training.settings import TrainSettings


def make_optimizer(settings: TrainSettings) -> optim.Optimizer:
    """The optimizer of a run. "muon" trains the blocks' and encoders' matrices with Muon, all else with AdamW."""
    rate = _schedule(settings, settings.learning_rate)
    decay = settings.weight_decay
    if settings.optimizer == "muon":
        muon = optim.Muon(_schedule(settings, settings.muon_learning_rate), weight_decay=0.0)
        adamw = optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True)
        return optim.MultiOptimizer([muon, adamw], [_is_hidden_matrix])
    if settings.optimizer == "adamw":
        return optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True)
    if settings.optimizer == "adafactor":  # by default it takes a rate of its own making
        return optim.Adafactor(rate, relative_step=False, scale_parameter=False)
    if settings.optimizer == "adam":
        return optim.Adam(rate, bias_correction=True)
    return optim.SGD(rate)


def _schedule(settings: TrainSettings, peak: float) -> Any:
    """Linear warm-up to `peak`, then a cosine that ends where the run does, at the same fraction for every peak."""
    end = peak * (settings.min_learning_rate / settings.learning_rate if settings.learning_rate else 0.0)
    arguments = [peak, max(1, settings.iters - settings.warmup), end]
    return build_schedule({"name": "cosine_decay", "arguments": arguments, "warmup": settings.warmup})


def _is_hidden_matrix(path: str, value: mx.array) -> bool:
    """Whether Muon is for it: a matrix, but neither an embedding nor a head."""
    return value.ndim == 2 and not any(name in path for name in ("embed", "lm_head", "type_head", "decoder"))


def learning_rate(optimizer: optim.Optimizer) -> float:
    """The rate of the last step (of AdamW's part, when there are two)."""
    if isinstance(optimizer, optim.MultiOptimizer):
        optimizer = optimizer.optimizers[-1]
    rate: Any = optimizer.learning_rate.item()
    return float(rate)


def clip(gradients: Any, limit: float) -> tuple[Any, mx.array]:
    """Gradients scaled to a norm of at most `limit` (0: as they are), and their norm before."""
    leaves: Any = tree_flatten(gradients)
    norm = mx.sqrt(sum((g.astype(mx.float32).square().sum() for _, g in leaves), mx.array(0.0)))
    if not limit:
        return gradients, norm
    factor = mx.minimum(limit / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor.astype(g.dtype), gradients), norm
