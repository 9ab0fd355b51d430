"""Gradients of the joint loss: those of a float64 reference, and exactly none for what is not available."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, Trainee, sum_joint_nats
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support.float64_reference import Reference
from support.slow_cases import slow_but
from support.tiny import tiny_model
from support.tiny_training import make_sample, random_model

VOCAB, ROWS, PAD = 12, 14, 1
WEIGHTS = LossWeights(reconstruction=0.3, token_type=0.2)
ENCODERS = {
    "transformer": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_heads": 2,
        "intermediate_size": 10,
        "position_encoding": "learnable",
    },
    "res_latent_attn": {
        "hidden_size": 6,
        "model_hidden_size": 8,
        "num_hidden_layers": 1,
        "num_heads": 2,
        "intermediate_size": 7,
    },
}
CASES = [  # encoder, encoders tied, embeddings tied, availability
    ("transformer", False, False, "causal"),
    ("transformer", True, True, "legacy"),
    ("res_latent_attn", False, True, "causal"),
    ("res_latent_attn", True, False, "causal"),
]


def toy(encoder: str, tie_encoders: bool, tie_embeddings: bool) -> Trainee:
    config = {
        "model_type": "zip2zip",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie_embeddings,
        "zip2zip": {
            "base_model_type": "llama",
            "position_mode": "compressed",
            "encoder_type": encoder,
            "encoder": {**ENCODERS[encoder], "tie_encoders": tie_encoders},
            "pad_token_id": PAD,
            "compression": {
                "initial_vocab_size": VOCAB,
                "max_codebook_size": 20,
                "max_subtokens": 3,
                "disabled_ids": [0, PAD],
            },
        },
    }
    mx.random.seed(0)
    return Trainee(random_model(config), WEIGHTS)


def weights_of(trainee: Trainee) -> dict[str, np.ndarray]:
    """By the reference's names, float64."""
    flat = tree_flatten(trainee.parameters())
    return {name.removeprefix("model."): np.array(value).astype(np.float64) for name, value in flat}


def samples(trainee: Trainee) -> list[Any]:
    params, rng = trainee.model.config.codec_params, np.random.default_rng(4)
    runs = [rng.integers(2, VOCAB, 4).tolist() for _ in range(2)]
    ids = [np.concatenate([runs[k] for k in rng.integers(0, 2, n)]).tolist() for n in (3, 6)]
    starts = [None, ((5, 6), (7, 8, 9))]
    return [make_sample(params, i, s, masked=[3]) for i, s in zip(ids, starts, strict=True)]


def objective(trainee: Trainee, arrays: dict[str, mx.array]) -> mx.array:
    sums = trainee.losses(arrays)
    return trainee.loss_weights.total_loss(sums) / sums["count"]


@pytest.mark.parametrize(("encoder", "tie_encoders", "tie_embeddings", "availability"), slow_but(CASES, CASES[1]))
def test_loss_and_gradients_are_those_of_the_float64_reference(encoder, tie_encoders, tie_embeddings, availability):
    trainee = toy(encoder, tie_encoders, tie_embeddings)
    some, codec = samples(trainee), trainee.model.config.codec_params
    reference = Reference(trainee.model.args.config, some, codec, availability, 0.3, 0.2)
    arrays = to_mlx_arrays(make_batch(some, codec, availability=availability))
    loss, tree = nn.value_and_grad(trainee, lambda: objective(trainee, arrays))()
    weights = weights_of(trainee)
    assert loss.item() == pytest.approx(reference.loss(weights), rel=1e-5)
    gradients = {name.removeprefix("model."): np.array(g).astype(np.float64) for name, g in tree_flatten(tree)}
    assert gradients.keys() == weights.keys()
    rng = np.random.default_rng(0)
    for name in weights:
        assert_slope(reference, weights, gradients, {name: rng.normal(size=weights[name].shape)}, name)
    for _ in range(3):
        direction = {name: rng.normal(size=w.shape) for name, w in weights.items()}
        assert_slope(reference, weights, gradients, direction, "all at once")


def assert_slope(reference: Reference, weights: Any, gradients: Any, direction: Any, name: str) -> None:
    """The derivative along a direction, by central differences in float64."""
    step = 1e-6
    there, back = (
        reference.loss({**weights, **{n: weights[n] + sign * step * d for n, d in direction.items()}})
        for sign in (1, -1)
    )
    found = sum(float((gradients[n] * d).sum()) for n, d in direction.items())
    assert found == pytest.approx((there - back) / (2 * step), rel=2e-3, abs=2e-5), name


def test_logits_of_entries_that_are_not_available_have_no_gradient_at_all():
    rng = np.random.default_rng(0)
    base, hyper = mx.array(rng.normal(size=(2, 3, 5)).astype(np.float32)), mx.array(np.zeros((2, 3, 4), np.float32))
    available = np.array([[0, 1, 2], [4, 4, 4]], np.int32)
    arrays = {"targets": mx.array([[1, 2, 6], [8, 5, 3]]), "weights": mx.ones((2, 3)), "available": mx.array(available)}
    gradient = np.array(mx.grad(lambda h: sum_joint_nats(base, h, arrays)["nats"])(hyper))
    is_open = np.arange(4) < available[..., None]
    assert (gradient[~is_open] == 0).all()
    assert (gradient[is_open] != 0).all()


def test_rows_that_no_position_can_choose_have_no_gradient_at_all():
    model = tiny_model()
    model.lm_head.weight = model.lm_head.weight * 0.05  # no probability so small that it is 0 in float32
    model.output_encoder.layers[-1].post_mlp_layernorm.weight *= 0.05
    sample = make_sample(model.config.codec_params, [5, 6, 7, 8, 9, 10])
    sample.mask[-3:] = False  # positions 3 to 5 do not count, so the entries that they open are never offered
    arrays = to_mlx_arrays(make_batch([sample], model.config.codec_params))
    gradient = row_gradient(model, arrays)
    opened = int(arrays["available"][0, 1].item())  # before the last id that counts, which is at 2
    assert 0 < opened < 4
    slots = np.array(arrays["slots"][0, :4])
    assert (np.abs(gradient[slots[:opened]]).max(axis=1) > 0).all()
    assert (gradient[slots[opened:]] == 0).all()
    assert (gradient[4:] == 0).all()


def row_gradient(model: Any, arrays: dict[str, mx.array]) -> np.ndarray:
    """Gradient of the loss to the output rows [U, D]."""
    import mlx_zip.training.steps.forward_pass as whole

    def nats(extra: mx.array) -> mx.array:
        plain = whole.encode_entries
        whole.encode_entries = lambda *given: plain(*given) + (extra if given[0] is model.row_encoder else 0)
        try:
            return Trainee(model, LossWeights()).losses(arrays)["nats"]
        finally:
            whole.encode_entries = plain

    return np.array(mx.grad(nats)(mx.zeros((arrays["entries"].shape[0], 64))))


def test_weights_of_positions_that_do_not_count_move_nothing():
    model = tiny_model()
    sample = make_sample(model.config.codec_params, [5, 6, 7, 5, 6, 7, 5, 6, 7])
    sample.mask[:] = False
    arrays = to_mlx_arrays(make_batch([sample], model.config.codec_params))
    trainee = Trainee(model, LossWeights())
    _, tree = nn.value_and_grad(trainee, lambda: trainee.losses(arrays)["nats"])()
    assert all((np.array(gradient) == 0).all() for _, gradient in tree_flatten(tree))
