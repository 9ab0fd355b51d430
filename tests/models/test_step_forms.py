"""Norm and rotation of a step on the CPU against MLX's own, which a GPU runs, and a whole model with either."""

import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_zip.errors import ConfigError
from mlx_zip.models import decoder
from mlx_zip.models.decoder import Positions, RMSNorm, make_rope
from support import tiny
from support.slow_cases import slow_but

CONFIG = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
KINDS = {
    "default": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "partial": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0},
    "longrope": {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
}


@pytest.fixture(autouse=True)
def on_cpu():
    """Where a GPU is the default device, too: else a form would be held against itself."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def rope_of(kind):
    given = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": kind, **KINDS[kind]}
    return make_rope(given, 16, CONFIG).eval()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_is_mlxs_own(kind, long, monkeypatch):
    made, x = rope_of(kind), mx.random.normal((2, 3, 1, 16))
    places = [{"start": 0}, {"start": 1999}, {"start": mx.array([7, 300])}, {"index": mx.array([[5], [901]])}]
    for place in places:
        found = made(x, Positions(**place, long=long))
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "is_step_on_cpu", lambda x: False)
            expected = made(x, Positions(**place, long=long))
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-5)
    assert not np.allclose(np.array(found), np.array(x), atol=0.01)


def test_layers_of_one_call_share_their_rotation_and_calls_do_not():
    made, x = rope_of("default"), mx.ones((1, 1, 1, 16))
    first, second = Positions(start=3), Positions(start=4)
    same = [made(x, first), made(x, first)]
    assert len(first.shared) == 1
    assert not second.shared
    np.testing.assert_array_equal(np.array(same[0]), np.array(same[1]))
    assert not np.allclose(np.array(made(x, second)), np.array(same[0]))


def test_a_rope_whose_wavelengths_are_changed_rotates_by_the_new_ones(monkeypatch):
    made, x = rope_of("default"), mx.random.normal((1, 2, 1, 16))
    made(x, Positions(start=9))
    made.magnitude, made._short = 1.5, 3 * made._short
    found = made(x, Positions(start=9))
    monkeypatch.setattr(decoder, "is_step_on_cpu", lambda x: False)
    np.testing.assert_allclose(np.array(found), np.array(made(x, Positions(start=9))), atol=2e-5)


def test_an_odd_number_of_rotated_dimensions_is_refused():
    with pytest.raises(ConfigError, match="rotates 5 of 16"):
        make_rope({"rope_theta": 10000.0, "partial_rotary_factor": 0.33, "rope_type": "default"}, 16, CONFIG)


def test_a_value_that_is_not_finite_affects_its_pair_only():
    x = np.ones((1, 1, 1, 16), np.float32)
    x[..., 3] = np.inf
    found = np.array(rope_of("default")(mx.array(x), Positions(start=5)))
    assert np.flatnonzero(~np.isfinite(found)).tolist() == [3, 11]


def test_a_step_abandoned_in_one_thread_does_not_disturb_another_thread():
    model, failed = tiny.tiny_model().eval(), []
    mx.eval(model.parameters())

    def drop():
        with mx.stream(mx.new_stream(mx.cpu)):
            model(mx.array([[5]]), cache=model.make_cache())  # never evaluated

    def step():
        try:
            drop()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert not failed
    assert np.isfinite(tiny.last_logits(model, [5], model.make_cache())[: tiny.VOCAB]).all()


def test_while_gradients_are_taken_layers_share_nothing():
    made, positions = rope_of("default"), Positions(start=3)
    made.train()
    made(mx.ones((1, 1, 1, 16)), positions)
    assert not positions.shared


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (3, 1, 24), (2, 4, 1, 24), (2, 5, 24)])
def test_a_norm_is_mlxs_own(shape, dtype):
    quick, plain = RMSNorm(24, eps=1e-5), nn.RMSNorm(24, eps=1e-5)
    quick.weight = plain.weight = mx.random.normal((24,)).astype(dtype)
    x = (3 * mx.random.normal(shape)).astype(dtype)
    found, expected = quick(x), plain(x)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape) == (dtype, shape)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5 if dtype == mx.float32 else 0)


def steps(model):
    """Logits [L, W] of ids read one by one."""
    cache = model.make_cache()
    return np.stack([tiny.last_logits(model, [one], cache) for one in tiny.base_ids(40)])


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "base_token_end"))
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_models_steps_are_the_same_in_either_form(family, mode, monkeypatch):
    model = tiny.tiny_model(family, position_mode=mode).eval()
    ids, quick = tiny.base_ids(40), steps(model)
    asked = []
    monkeypatch.setattr(decoder, "is_step_on_cpu", lambda x: asked.append(x.shape) or False)
    np.testing.assert_allclose(steps(model), quick, atol=1e-4)
    assert asked
    np.testing.assert_allclose(tiny.last_logits(model, ids, model.make_cache()), quick[-1], atol=1e-4)
