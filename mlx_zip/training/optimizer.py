"""Makes a run's optimizer and learning-rate schedule from MLX's, and clips gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import build_schedule

from mlx_zip.config import SIDES
from mlx_zip.packs.pack import ROWS
from mlx_zip.training.settings import TrainSettings


def make_optimizer(settings: TrainSettings) -> optim.Optimizer:
    """Returns a run's optimizer. "muon" is Muon for the matrices of blocks and encoders, AdamW for the rest.

    Weights with a learning rate of their own have an optimizer of their own.
    """
    rest = _single(settings, settings.learning_rate)
    if settings.optimizer == "muon":
        muon = optim.Muon(schedule(settings, settings.muon_learning_rate), weight_decay=0.0)
        return optim.MultiOptimizer([muon, rest], [_is_hidden_matrix])
    if own := _own_rates(settings):
        return optim.MultiOptimizer([*(_single(settings, peak) for _, peak in own), rest], [which for which, _ in own])
    return rest


def _own_rates(settings: TrainSettings) -> list[tuple[Callable[[str, Any], bool], float]]:
    """Returns which weights have a peak learning rate of their own, and that rate."""
    rates = [(_is_encoders, settings.encoder_learning_rate), (_is_pack_row, settings.pack_learning_rate)]
    return [(which, peak) for which, peak in rates if peak]


def _single(settings: TrainSettings, peak: float) -> optim.Optimizer:
    """Returns one optimizer with the schedule that rises to `peak`; for "muon", the AdamW beside it."""
    rate, decay = schedule(settings, peak), settings.weight_decay
    if settings.optimizer == "adafactor":  # by default it would choose its own rate
        return optim.Adafactor(rate, relative_step=False, scale_parameter=False)
    if settings.optimizer == "adam":
        return optim.Adam(rate, bias_correction=True)
    if settings.optimizer == "sgd":
        return optim.SGD(rate)
    return optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True)


def single_of(optimizer: optim.Optimizer, settings: TrainSettings, name: str) -> optim.Optimizer:
    """Returns the optimizer that updates the weight of this name. Not for "muon"."""
    if not isinstance(optimizer, optim.MultiOptimizer):
        return optimizer
    found = (i for i, (which, _) in enumerate(_own_rates(settings)) if which(name, None))
    return optimizer.optimizers[next(found, -1)]


def peak_of(settings: TrainSettings, name: str) -> float:
    """Returns the peak learning rate of the weight of this name."""
    return next((peak for which, peak in _own_rates(settings) if which(name, None)), settings.learning_rate)


def schedule(settings: TrainSettings, peak: float) -> Any:
    """Returns a schedule: linear warm-up to `peak`, then a cosine until the run's end.

    Its final rate is the share of `peak` that `min_learning_rate` is of `learning_rate`.
    """
    end = peak * (settings.min_learning_rate / settings.learning_rate if settings.learning_rate else 0.0)
    arguments = [peak, max(1, settings.iters - settings.warmup), end]
    return build_schedule({"name": "cosine_decay", "arguments": arguments, "warmup": settings.warmup})


def _is_encoders(path: str, value: Any) -> bool:
    """Whether a weight of the trainee belongs to a hyper-encoder. path: the weight's name."""
    return path.removeprefix("model.").startswith(SIDES)


def _is_pack_row(path: str, value: Any) -> bool:
    """Whether a weight of the trainee holds a pack's rows. path: the weight's name."""
    return path in ROWS


def _is_hidden_matrix(path: str, value: mx.array) -> bool:
    """Whether Muon trains this weight: a matrix, but neither an embedding nor a head. path: the weight's name."""
    return value.ndim == 2 and not any(name in path for name in ("embed", "lm_head", "type_head", "decoder"))


def learning_rate(optimizer: optim.Optimizer) -> float:
    """Returns the last step's learning rate.

    With several, that of the weights without a rate of their own.
    """
    if isinstance(optimizer, optim.MultiOptimizer):
        optimizer = optimizer.optimizers[-1]
    rate: Any = optimizer.learning_rate.item()
    return float(rate)


def clip(gradients: Any, limit: float) -> tuple[Any, mx.array]:
    """Returns the gradients, scaled down to norm `limit` if theirs is larger (0: never), and their norm before that."""
    leaves: Any = tree_flatten(gradients)
    norm = mx.sqrt(sum((g.astype(mx.float32).square().sum() for _, g in leaves), mx.array(0.0)))
    if not limit:
        return gradients, norm
    factor = mx.minimum(limit / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor.astype(g.dtype), gradients), norm
