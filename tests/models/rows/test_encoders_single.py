"""The quick way to encode one entry: its rows are the encoders' own."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.rows import encoders as module
from mlx_zip.models.rows.encoders import SingleEncoder, can_encode_singly, encode_entries
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.zip_model import Model
from support import tiny


def model_with(encoder, quantized=False, **settings):
    config = tiny.tiny_config("llama", encoder)
    config["zip2zip"]["encoder"] |= settings
    model = Model(ModelArgs.from_dict(config)).eval()
    rng = np.random.default_rng(3)
    for part in (model.output_encoder, model.model):
        part.apply(lambda w: mx.array(rng.normal(0, 0.3, w.shape).astype(np.float32)))
    if quantized:
        tiny.quantize(model)
    mx.eval(model.parameters())
    return model


def single_of(model):
    return SingleEncoder(model.output_encoder, model.head_matrix, tiny.MERGE, tiny.PAD)


def entry(n, seed=0):
    """One entry of n base ids: padded as the encoders take it, and its length."""
    ids = np.full((1, tiny.MERGE), tiny.PAD, np.uint32)
    ids[0, :n] = np.random.default_rng(seed).integers(3, tiny.VOCAB, n)
    return ids, np.array([n])


LATENT = {"hidden_size": 32, "model_hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
KINDS = [
    ("averaging", {}),
    ("attention", {"num_heads": 4}),
    ("transformer", {"num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}),
    (
        "transformer",
        {"num_heads": 2, "num_hidden_layers": 1, "intermediate_size": 48, "position_encoding": "learnable"},
    ),
    ("res_latent_attn", LATENT),
    ("res_latent_attn", {**LATENT, "causal": True}),
    ("res_latent_attn", {**LATENT, "residual": False}),
]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("encoder", "settings"), KINDS)
def test_a_row_is_the_encoders_own(encoder, settings, n, quantized, monkeypatch):
    model = model_with(encoder, quantized, **settings)
    for float_bytes in (module.MOST_FLOAT_BYTES, -1):  # float copies of quantized matrices, and none
        monkeypatch.setattr(module, "MOST_FLOAT_BYTES", float_bytes)
        single = single_of(model)
        for seed in range(3):
            ids, lengths = entry(n, seed)
            expected = np.array(encode_entries(model.output_encoder, model.head_matrix, ids, lengths))
            np.testing.assert_allclose(np.array(single(mx.array(ids[:, :n]))), expected, atol=1e-5)
            assert np.abs(expected).max() > 0.01


def test_a_layer_that_is_not_known_is_left_to_the_encoder():
    model = model_with("transformer", num_heads=4)
    assert can_encode_singly(model.output_encoder)
    layer = model.output_encoder.layers[0]
    layer.mlp.fc1 = LoRALinear.from_base(layer.mlp.fc1)
    assert not can_encode_singly(model.output_encoder)
    source, (ids, lengths) = model.row_source, entry(3)
    expected = encode_entries(model.output_encoder, model.head_matrix, ids, lengths)
    np.testing.assert_array_equal(
        np.array(source.encode_rows_of_side(model.side_named("output"), ids, lengths)), np.array(expected)
    )


def test_a_replaced_weight_is_used_from_the_next_entry_on():
    model = model_with("transformer", num_heads=4)
    model.row_source.store = RowStore()
    side, (ids, lengths) = model.side_named("output"), entry(3)
    before = np.array(model.row_source.encode_rows_of_side(side, ids, lengths))
    model.output_encoder.layers[0].mlp.fc2.weight = 2 * model.output_encoder.layers[0].mlp.fc2.weight
    after = np.array(model.row_source.encode_rows_of_side(side, ids, lengths))
    expected = encode_entries(model.output_encoder, model.head_matrix, ids, lengths)
    np.testing.assert_allclose(after, np.array(expected), atol=1e-5)
    assert np.abs(after - before).max() > 0.01


def test_training_takes_the_encoder_itself(monkeypatch):
    model = model_with("transformer", num_heads=4).train()
    monkeypatch.setattr(module.SingleEncoder, "__call__", lambda *args: pytest.fail("the quick way has no gradients"))
    model.row_source.encode_rows_of_side(model.side_named("output"), *entry(2))
