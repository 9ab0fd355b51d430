"""Times the parts of a training step separately, on the same batches.

A step with hypertokens is compared with its unavoidable work: a step of the same decoder without hypertokens on as many
ids, and the encoders' forward and backward pass over the batch's distinct entries. All else is overhead: moving rows
into the embedding and the head, more columns in the loss, padding, and the encoders' second forward pass, which saves
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_zip.codec import CodecParams
from mlx_zip.models.layers import Positions
from mlx_zip.models.rows.encoders import matrix_rows
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.training.prepare.shards import Sample
from mlx_zip.training.run import choose_stepper
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.starting_model import freeze_and_add_lora
from mlx_zip.training.steps.batches import Batch, make_batch
from mlx_zip.training.steps.forward_pass import NoCache, Samples
from mlx_zip.training.steps.objective import LossWeights, Trainee, make_samples, sum_joint_nats
from mlx_zip.training.steps.stepper import (
    LOW_PRECISION,
    Stepper,
    clip_gradients,
    is_compiled,
    make_optimizer,
    to_mlx_arrays,
)

from .recording import summarize_samples


@dataclass
class StepMeasurements:
    """Seconds of each part, one value per trial, and the measured batches."""

    seconds: dict[str, list[float]]
    batches: list[Batch]

    def record(self) -> dict[str, Any]:
        """Returns the record: times in ms, ratio of a step to its unavoidable work, and counts of ids and entries."""
        parts = {name: summarize_samples([1e3 * s for s in samples]) for name, samples in self.seconds.items()}
        least = np.add(self.seconds["plain step"], self.seconds["encoders"])
        ratios = np.divide(self.seconds["zip step"], least)
        distinct, installed = (sum(getattr(b, name) for b in self.batches) for name in ("distinct", "installed"))
        ids, base_ids = (sum(getattr(b, name) for b in self.batches) for name in ("ids", "base_ids"))
        return {
            "unit": "ms",
            "parts": parts,
            "ratio": summarize_samples(ratios.tolist()),
            "ids": ids,
            "base_ids": base_ids,
            "distinct_entries": distinct,
            "installed_entries": installed,
            "distinct_of_installed": round(distinct / installed, 3) if installed else None,
            "installed_per_id": round(installed / ids, 3),
            "entries_read": sum(map(entries_read_as_inputs, self.batches)),
        }


def measure_steps(
    zip_model: nn.Module,
    plain_model: nn.Module,
    samples: list[list[Sample]],
    params: CodecParams,
    settings: TrainSettings,
    trials: int,
) -> StepMeasurements:
    """Times every part `trials` times, on the batches in turn, after one warm-up of every part per batch.

    samples: the samples of each batch. params: the codec that compressed the samples.
    """
    batches = [make_batch(some, params) for some in samples]
    whole, plain = TrainedModel(zip_model, settings), TrainedModel(plain_model, settings)
    calls = [parts_to_time(whole, plain, some, batch, params) for some, batch in zip(samples, batches, strict=True)]
    seconds: dict[str, list[float]] = {name: [] for name in calls[0]}
    for trial in range(-len(batches), trials):
        for name, call in calls[trial % len(batches)].items():
            took = time_call(call)
            if trial >= 0:
                seconds[name].append(took)
    return StepMeasurements(seconds, batches)


def parts_to_time(
    whole: TrainedModel, plain: TrainedModel, samples: list[Sample], batch: Batch, params: CodecParams
) -> dict[str, Callable[[], Any]]:
    parts, without = StepParts(whole, batch), plain_batch_of_same_size(batch, params.vocab_size)
    return {
        "zip step": lambda: whole.step(batch),
        "plain step": lambda: plain.step(without),
        "encoders": parts.encoders(),
        "body": parts.body(),
        "head and loss": parts.head(),
        "optimizer": parts.optimizer(),
        "host": lambda: to_mlx_arrays(make_batch(samples, params)),
    }


def plain_batch_of_same_size(batch: Batch, vocab_size: int) -> Batch:
    """Returns a batch of as many ids and targets for the plain decoder; hypertoken targets become base id 0."""
    targets = batch.arrays["targets"]
    arrays = {**batch.arrays, "targets": np.where(targets < vocab_size, targets, 0)}
    kept = ("inputs", "targets", "weights")
    return replace(batch, arrays={name: arrays[name] for name in kept}, distinct=0, installed=0)


def entries_read_as_inputs(batch: Batch) -> int:
    rows = batch.arrays["input_rows"]
    return len(np.unique(rows[rows >= 0]))


def time_call(call: Callable[[], Any]) -> float:
    mx.synchronize()
    began = time.perf_counter()
    mx.eval(call())
    mx.synchronize()
    return time.perf_counter() - began


class TrainedModel:
    """A model with its optimizer, set up as in a training run."""

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        freeze_and_add_lora(model, settings)
        self.model: Any = model
        self.settings, self.trainee = settings, Trainee(model, LossWeights())
        self.trainee.train()
        self.optimizer = make_optimizer(settings)
        self.optimizer.init(self.trainee.trainable_parameters())
        self.stepper = Stepper(self.trainee, self.optimizer, settings, mx.distributed.init())

    def step(self, batch: Batch) -> list[mx.array]:
        """Trains one step; returns no arrays, because all are already evaluated."""
        self.stepper.step([batch], [False])
        return []


def encode_rows_at_once(model: Any, samples: Samples) -> list[mx.array]:
    """Returns the rows that training's `encode_rows` returns, from one forward pass that keeps its activations.

    This is the minimum cost of the encoders.
    """
    output = model.row_encoder(matrix_rows(model.head_matrix, samples.entries), samples.lengths)
    if model.config.encoder.tie_encoders and model.traits.tied:
        return [output[samples.read], output]
    entries, lengths = samples.entries[samples.read], samples.lengths[samples.read]
    return [model.input_encoder(matrix_rows(model.model.embed_tokens, entries), lengths), output]


class TrainablePart(nn.Module):
    """A module that holds the parameters whose gradients are computed: modules of the model, and further arrays."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class StepParts:
    """The parts of a step on one batch; each method returns a call that computes a part's value and gradients."""

    def __init__(self, whole: TrainedModel, batch: Batch) -> None:
        self.whole, self.model = whole, whole.model
        self.arrays = to_mlx_arrays(batch)
        self.samples: Samples = make_samples(self.arrays)
        mx.eval(self.arrays)

    @cached_property
    def dtype(self) -> mx.Dtype:
        """The dtype of the forward pass."""
        return LOW_PRECISION[self.whole.settings.dtype] or mx.float32

    def encoders(self) -> Callable[[], Any]:
        """Returns a call that encodes input rows of entries that occur in inputs, and output rows of all entries."""
        names = ("input_encoder", "output_encoder")
        part = TrainablePart(**{name: self.model[name] for name in names if name in self.model})

        def loss() -> mx.array:
            rows = encode_rows_at_once(self.model, self.samples)
            return sum((r.astype(mx.float32).square().sum() for r in rows), mx.array(0.0))

        return self._compiled_gradient_call(part, loss)

    def body(self) -> Callable[[], Any]:
        """Returns a call that runs the decoder's layers on random embeddings."""
        model = self.model
        h = self._random_normal(*self.samples.inputs.shape, model.config.encoder.model_size)
        part: Any = TrainablePart(layers=model.model.layers, norm=model.model.norm, h=h)
        positions = Positions(index=self.samples.index)

        def loss() -> mx.array:
            out = model.run_layers(part.h, [NoCache()] * len(model.layers), positions)
            return out.astype(mx.float32).square().sum()

        return self._compiled_gradient_call(part, loss)

    def head(self) -> Callable[[], Any]:
        """Returns a call that computes logits and the cross entropy from random hidden states and rows."""
        model, width = self.model, self.model.config.encoder.model_size
        tied = model.traits.tied
        part: Any = TrainablePart(
            matrix=model.model.embed_tokens if tied else model.lm_head,
            h=self._random_normal(*self.samples.inputs.shape, width),
            rows=self._random_normal(len(self.samples.entries), width),
        )

        def loss() -> mx.array:
            base = model.cap(part.matrix.as_linear(part.h) if tied else part.matrix(part.h))
            rows = part.rows[self.samples.slots].astype(part.h.dtype)
            hyper = model.cap(part.h @ rows.swapaxes(-1, -2))
            return sum_joint_nats(base[..., : model.layout.vocab_size], hyper, self.arrays)["nats"]

        return self._compiled_gradient_call(part, loss)

    def optimizer(self) -> Callable[[], Any]:
        """Returns a call that clips constant gradients and updates the weights with them."""
        trainee, optimizer = self.whole.trainee, self.whole.optimizer
        gradients = tree_map(lambda value: 1e-3 * mx.ones_like(value), trainee.trainable_parameters())
        mx.eval(gradients)

        def call() -> Any:
            clipped, norm = clip_gradients(gradients, self.whole.settings.max_grad_norm)
            optimizer.update(trainee, clipped)
            return norm, trainee.state, optimizer.state

        return call

    def _compiled_gradient_call(self, part: nn.Module, loss: Callable[[], mx.array]) -> Callable[[], Any]:
        """Returns a call that computes a part's loss and gradients, in the step's dtype and compiled like the step."""
        settings = self.whole.settings

        def lowered() -> mx.array:
            full = part.trainable_parameters()
            part.update(tree_map(lambda value: value.astype(self.dtype), full))
            value = loss()
            part.update(full)
            return value

        compute = nn.value_and_grad(part, loss if self.dtype == mx.float32 else lowered)
        return mx.compile(compute, inputs=[part.state], outputs=[part.state]) if is_compiled(settings) else compute

    def _random_normal(self, *shape: int) -> mx.array:
        values = mx.random.normal(shape).astype(self.dtype)
        mx.eval(values)
        return values


# ---- steps of both engines on one model, and the machine's matrix products, in one run

PRODUCT = 2048  # rows and columns of the matrices whose product measures the machine's speed
PASSES = 4  # operations per weight and id of LoRA training: 2 in the forward pass, 2 for gradients of activations


def measure_engines(
    make: Callable[[], tuple[Any, dict[str, Any]]],
    samples: list[list[Sample]],
    params: CodecParams,
    settings: TrainSettings,
    trials: int,
) -> dict[str, Any]:
    """Times steps of both engines and the machine's matrix products; returns the record.

    The record has base tokens/s of each engine, GFLOP/s of the products, and the share of these GFLOP/s that PyTorch's
    steps reach in the decoder's products. MLX's trainer reads one sample per step, because on a CPU a batch may take
    many minutes; its first step is a warm-up. make: returns a new model and its config.json. samples: the samples of
    each batch.
    """
    batches = [make_batch(some, params) for some in samples]
    single = make_batch(samples[0][:1], params)
    model, config = make()
    weights = count_matrix_weights(model)
    torch_step = make_trained_stepper("torch", model, config, settings)
    mlx_step = make_trained_stepper("mlx", *make(), settings)
    rates: dict[str, list[float]] = {"torch": [], "mlx": [], "float32": [], "bfloat16": []}
    ids_per_s = []
    for trial in range(-1, trials):
        batch = batches[trial % len(batches)]
        seconds = time_step(torch_step, batch)
        slow = time_step(mlx_step, single) if trial < 2 else None  # one warm-up, two timed
        products = {name: matrix_product_gflops(name) for name in ("float32", "bfloat16")}
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
        "base_tokens_per_s": {name: summarize_samples(rates[name]) for name in ("torch", "mlx")},
        "torch_over_mlx": round(medians["torch"] / medians["mlx"], 1),
        "product_gflops": {name: summarize_samples(rates[name]) for name in ("float32", "bfloat16")},
        "step_gflops": round(reached, 1),
        "share_of_bfloat16": round(reached / medians["bfloat16"], 3),
        "share_of_float32": round(reached / medians["float32"], 3),
        "batch": {"samples": len(batches[0].samples) or len(samples[0]), "base_ids": batches[0].base_ids},
        "mlx_batch": {"samples": 1, "base_ids": single.base_ids},
    }


def matrix_product_gflops(dtype: str, trials: int = 2) -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(PRODUCT, PRODUCT, device=device).to(getattr(torch, dtype)) for _ in range(2))

    def multiply() -> None:
        torch.nn.functional.linear(a, b)[0, 0].item()  # multiplies as a layer does, and waits for the GPU

    multiply()
    began = time.perf_counter()
    for _ in range(trials):
        multiply()
    return 2 * PRODUCT**3 * trials / (time.perf_counter() - began) / 1e9


def make_trained_stepper(engine: str, model: Any, config: dict[str, Any], settings: TrainSettings) -> Any:
    freeze_and_add_lora(model, settings)
    trainee = Trainee(model, LossWeights())
    optimizer = make_optimizer(settings)
    optimizer.init(trainee.trainable_parameters())
    return choose_stepper(engine, config)(trainee, optimizer, settings, mx.distributed.init())


def count_matrix_weights(model: Any) -> int:
    """Returns the number of weights that the decoder multiplies by for each id: its matrices and the head."""
    named = named_arrays(model.parameters())
    matrices = {name: value.size for name, value in named if value.ndim == 2 and "encoder" not in name}
    embedding = matrices.get("model.embed_tokens.weight", 0)
    return sum(matrices.values()) - (embedding if "lm_head.weight" in matrices else 0)


def time_step(stepper: Any, batch: Batch) -> float:
    began = time.perf_counter()
    stepper.step([batch], [False])
    return time.perf_counter() - began
