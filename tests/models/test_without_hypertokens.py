"""A model with its hypertokens switched off says what it says with them, where no hypertoken is read."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.engine.mlx.mlx_engine import WithoutHypertokens
from support import tiny


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_logits_of_base_ids_are_those_of_the_model_with_hypertokens(family):
    model = tiny.tiny_model(family).eval()
    ids = mx.array([tiny.base_ids(20)])
    plain, kv = WithoutHypertokens(model), WithoutHypertokens(model).make_cache()
    expected = model(ids, causal=True)[..., : model.layout.vocab_size]
    parts = [plain(ids[:, :13], cache=kv), *(plain(ids[:, i : i + 1], cache=kv) for i in range(13, 20))]
    np.testing.assert_allclose(mx.concatenate(parts, axis=1), expected, atol=2e-5)


def test_the_weights_are_the_same_arrays():
    model = tiny.tiny_model()
    assert WithoutHypertokens(model).model.model.embed_tokens.weight is model.model.embed_tokens.weight


def test_longrope_is_used_up_to_its_long_factors():
    model = tiny.tiny_model("phi3")
    assert WithoutHypertokens(model).args.max_position_embeddings == model.traits.long_context


def test_its_fingerprint_is_its_own():
    model = tiny.tiny_model()
    assert WithoutHypertokens(model).fingerprint != model.fingerprint
