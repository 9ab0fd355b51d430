"""Times training steps on the same batches: with hypertokens, plain, the encoders alone; and in both engines.

A step with hypertokens is compared with its unavoidable work: a step of the same decoder without hypertokens on as many
ids, and the encoders' forward and backward pass over the batch's distinct entries. All else is overhead: moving rows
into the embedding and the head, more columns in the loss, padding, and the encoders' second forward pass, which saves
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_zip.codec import CodecParams
from mlx_zip.models.rows.encoders import matrix_rows
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.training.prepare.shards import Sample
from mlx_zip.training.run import choose_stepper
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.starting_model import freeze_and_add_lora
from mlx_zip.training.steps.batches import Batch, make_batch
from mlx_zip.training.steps.forward_pass import Arrays
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import LOW_PRECISION, is_compiled, make_optimizer, to_mlx_arrays

from .recording import run_in_turns, summarize_samples


def measure_steps(
    zip_model: nn.Module,
    plain_model: nn.Module,
    samples: list[list[Sample]],
    params: CodecParams,
    settings: TrainSettings,
    trials: int,
) -> dict[str, Any]:
    """Times a step and its unavoidable work `trials` times, on the batches in turn, after one warm-up per batch.

    samples: the samples of each batch. params: the codec that compressed the samples. Returns the record: times in ms,
    ratio of a step to its unavoidable work, and counts of ids and entries of all batches.
    """
    batches = [make_batch(some, params) for some in samples]
    whole, plain = (make_trained_stepper("mlx", model, {}, settings) for model in (zip_model, plain_model))
    calls = [make_timed_calls(whole, plain, batch, params) for batch in batches]
    ways = {name: lambda trial, name=name: time_call(calls[trial % len(batches)][name]) for name in calls[0]}
    seconds = run_in_turns(ways, trials, warmup=len(batches))
    ratios = np.divide(seconds["zip step"], np.add(seconds["plain step"], seconds["encoders"]))
    counts = {name: sum(getattr(batch, name) for batch in batches) for name in ("ids", "base_ids")}
    entries = {f"{name}_entries": sum(getattr(one, name) for one in batches) for name in ("distinct", "installed")}
    return {
        "unit": "ms",
        "parts": {name: summarize_samples([1e3 * s for s in values]) for name, values in seconds.items()},
        "ratio": summarize_samples(ratios.tolist()),
        **counts,
        **entries,
    }


def make_timed_calls(whole: Any, plain: Any, batch: Batch, params: CodecParams) -> dict[str, Callable[[], Any]]:
    without = plain_batch_of_same_size(batch, params.vocab_size)
    encode = encoders_call(whole.trainee.model, whole.settings, batch)
    return {
        "zip step": lambda: whole.step([batch], [False]),
        "plain step": lambda: plain.step([without], [False]),
        "encoders": lambda: mx.eval(encode()),
    }


def plain_batch_of_same_size(batch: Batch, vocab_size: int) -> Batch:
    """Returns a batch of as many ids and targets for the plain decoder; hypertoken targets become base id 0."""
    targets = batch.arrays["targets"]
    arrays = {**batch.arrays, "targets": np.where(targets < vocab_size, targets, 0)}
    kept = ("inputs", "targets", "weights")
    return replace(batch, arrays={name: arrays[name] for name in kept}, distinct=0, installed=0)


def time_call(call: Callable[[], Any]) -> float:
    mx.synchronize()
    began = time.perf_counter()
    call()
    mx.synchronize()
    return time.perf_counter() - began


# ---- the encoders alone


class TrainablePart(nn.Module):
    """A module that holds the parts of a model whose gradients are computed."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def encoders_call(model: Any, settings: TrainSettings, batch: Batch) -> Callable[[], Any]:
    """Returns a call that computes value and gradients of the rows that a step on `batch` encodes, lazily.

    These are input rows of entries that occur in inputs, and output rows of all entries. The call has the dtype of a
    step and is compiled like a step.
    """
    arrays = to_mlx_arrays(batch)
    part = TrainablePart({name: model[name] for name in ("input_encoder", "output_encoder") if name in model})
    low = LOW_PRECISION[settings.dtype]

    def loss() -> mx.array:
        rows = encode_rows_at_once(model, arrays)
        return sum((r.astype(mx.float32).square().sum() for r in rows), mx.array(0.0))

    def lowered() -> mx.array:
        full = part.trainable_parameters()
        part.update(tree_map(lambda value: value.astype(low), full))
        value = loss()
        part.update(full)
        return value

    compute = nn.value_and_grad(part, loss if low is None else lowered)
    return mx.compile(compute, inputs=[part.state], outputs=[part.state]) if is_compiled(settings) else compute


def encode_rows_at_once(model: Any, arrays: Arrays) -> list[mx.array]:
    """Returns the rows that training's `encode_hyper_rows` returns, from one forward pass that keeps its activations.

    This is the minimum cost of the encoders.
    """
    entries, lengths, read = arrays["entries"], arrays["lengths"], arrays["read"]
    output = model.row_encoder(matrix_rows(model.head_matrix, entries), lengths)
    if model.config.encoder.tie_encoders and model.traits.tied:
        return [output[read], output]
    entries, lengths = entries[read], lengths[read]
    return [model.input_encoder(matrix_rows(model.model.embed_tokens, entries), lengths), output]


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
        seconds = time_call(lambda batch=batch: torch_step.step([batch], [False]))
        slow = time_call(lambda: mlx_step.step([single], [False])) if trial < 2 else None  # one warm-up, two timed
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
    """Returns a stepper of an engine, set up as in a training run. config: the model's config.json, for torch."""
    freeze_and_add_lora(model, settings)
    trainee = Trainee(model, LossWeights())
    trainee.train()
    optimizer = make_optimizer(settings)
    optimizer.init(trainee.trainable_parameters())
    return choose_stepper(engine, config)(trainee, optimizer, settings, mx.distributed.init())


def count_matrix_weights(model: Any) -> int:
    """Returns the number of weights that the decoder multiplies by for each id: its matrices and the head."""
    named = named_arrays(model.parameters())
    matrices = {name: value.size for name, value in named if value.ndim == 2 and "encoder" not in name}
    embedding = matrices.get("model.embed_tokens.weight", 0)
    return sum(matrices.values()) - (embedding if "lm_head.weight" in matrices else 0)
