"""Times training steps of both engines on one model, and the machine's own matrix products beside them, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_zip.codec import CodecParams
from mlx_zip.training.batches import Batch, make_batch
from mlx_zip.training.objective import LossWeights, Trainee
from mlx_zip.training.optimizer import make_optimizer
from mlx_zip.training.prepare.shards import Sample
from mlx_zip.training.run import make_stepper
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.starting_model import freeze

from .record import summary

PRODUCT = 2048  # rows and columns of the matrices whose product tells the machine's rate
PASSES = 4  # operations per weight and id of LoRA training: 2 in the forward pass, 2 for gradients of activations


def measure_engines(
    make: Callable[[], tuple[Any, dict[str, Any]]],
    samples: list[list[Sample]],
    params: CodecParams,
    settings: TrainSettings,
    trials: int,
) -> dict[str, Any]:
    """Returns the record: base tokens/s of each engine, the machine's rates, and the share that PyTorch's steps reach.

    make: returns the model to train, anew, and its config.json. samples: those of each batch. MLX's trainer reads one
    sample per step, because on a processor a whole batch may take many minutes; its first step is not counted. The
    share counts the decoder's products only: 4 operations per weight and id.
    """
    batches = [make_batch(some, params) for some in samples]
    single = make_batch(samples[0][:1], params)
    model, config = make()
    weights = _weights(model)
    torch_step = _stepper("torch", model, config, settings)
    mlx_step = _stepper("mlx", *make(), settings)
    rates: dict[str, list[float]] = {"torch": [], "mlx": [], "float32": [], "bfloat16": []}
    ids_per_s = []
    for trial in range(-1, trials):
        batch = batches[trial % len(batches)]
        seconds = _seconds(torch_step, batch)
        slow = _seconds(mlx_step, single) if trial < 2 else None  # once to warm up, and twice
        products = {name: product_rate(name) for name in ("float32", "bfloat16")}
        if trial < 0:
            continue
        rates["torch"].append(batch.base_ids / seconds)
        ids_per_s.append(batch.ids / seconds)
        for name, rate in products.items():
            rates[name].append(rate)
        if slow is not None:
            rates["mlx"].append(single.base_ids / slow)
    reached = PASSES * weights * float(np.median(ids_per_s)) / 1e9
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    return {
        "unit": "base tokens/s; GFLOP/s of products",
        "base_tokens_per_s": {name: summary(rates[name]) for name in ("torch", "mlx")},
        "torch_over_mlx": round(medians["torch"] / medians["mlx"], 1),
        "target_over_mlx": 50,
        "product_gflops": {name: summary(rates[name]) for name in ("float32", "bfloat16")},
        "step_gflops": round(reached, 1),
        "share_of_bfloat16": round(reached / medians["bfloat16"], 3),
        "share_of_float32": round(reached / medians["float32"], 3),
        "target_share_of_bfloat16": 0.25,
        "batch": {"samples": len(batches[0].samples) or len(samples[0]), "base_ids": batches[0].base_ids},
        "mlx_batch": {"samples": 1, "base_ids": single.base_ids},
    }


def product_rate(dtype: str, trials: int = 2) -> float:
    """Returns the rate of PyTorch's product of two square matrices on this machine's processor or card, GFLOP/s."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(PRODUCT, PRODUCT, device=device).to(getattr(torch, dtype)) for _ in range(2))

    def multiply() -> None:
        torch.nn.functional.linear(a, b)[0, 0].item()  # waits for the card; as a layer multiplies

    multiply()
    began = time.perf_counter()
    for _ in range(trials):
        multiply()
    return 2 * PRODUCT**3 * trials / (time.perf_counter() - began) / 1e9


def _stepper(engine: str, model: Any, config: dict[str, Any], settings: TrainSettings) -> Any:
    """Returns what takes the steps of a run on an engine, with adapters and a new optimizer."""
    freeze(model, settings)
    trainee = Trainee(model, LossWeights())
    optimizer = make_optimizer(settings)
    optimizer.init(trainee.trainable_parameters())
    return make_stepper(engine, config)(trainee, optimizer, settings, mx.distributed.init())


def _weights(model: Any) -> int:
    """Returns the number of weights that the decoder multiplies by for each id: its matrices, the head included."""
    named: Any = tree_flatten(model.parameters())
    matrices = {name: value.size for name, value in named if value.ndim == 2 and "encoder" not in name}
    embedding = matrices.get("model.embed_tokens.weight", 0)
    return sum(matrices.values()) - (embedding if "lm_head.weight" in matrices else 0)


def _seconds(stepper: Any, batch: Batch) -> float:
    """Returns the seconds of one step on a batch."""
    began = time.perf_counter()
    stepper.step([batch], [False])
    return time.perf_counter() - began
