"""The ceiling of a machine: bandwidth, measured once, over the bytes that a step reads."""

from mlx.utils import tree_flatten

from mlx_zip import device
from mlx_zip.engine.mlx import mlx_engine
from mlx_zip.models.loading import weight_bytes_per_step
from support import tiny
from support.serving import tiny_engine


def test_the_ceiling_is_the_bandwidth_over_the_bytes_of_a_step(monkeypatch):
    calls = []
    monkeypatch.setattr(mlx_engine, "_bandwidths", {})
    monkeypatch.setattr(mlx_engine, "measure_memory_bandwidth", lambda limit_s: calls.append(limit_s) or 1e9)
    with tiny_engine() as engine:
        found, again = engine.ceiling(), engine.ceiling()
        off = engine.without_hypertokens("off")
        without = off.ceiling()
        off.close()
    read = weight_bytes_per_step(dict(tree_flatten(tiny.tiny_model().parameters())))
    assert (found.bytes_per_s, found.bytes_per_step, found.steps_per_s) == (1e9, read, 1e9 / read)
    assert found == again == without
    assert len(calls) == 1
    assert calls[0] < 1


def test_a_step_reads_no_encoders_and_of_an_untied_embedding_nothing():
    weights = dict(tree_flatten(tiny.tiny_model().parameters()))
    unread = ("input_encoder.", "output_encoder.", "model.embed_tokens.")
    assert weight_bytes_per_step(weights) == sum(
        one.nbytes for name, one in weights.items() if not name.startswith(unread)
    )
    tied = dict(tree_flatten(tiny.tiny_model("gemma2").parameters()))
    assert weight_bytes_per_step(tied) == sum(
        one.nbytes for name, one in tied.items() if not name.startswith(unread[:2])
    )


def test_the_bandwidth_is_measured_on_this_device():
    assert device.measure_product_bandwidth(2, side=64) > 0
    assert device.measure_memory_bandwidth(0.1) > 0


def test_no_trial_begins_after_the_limit():
    calls = []
    device.time_fastest_call(lambda: calls.append(1), 0.0)
    assert len(calls) == 1
