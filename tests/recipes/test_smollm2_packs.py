"""The mixed pack of the SmolLM2 recipe: which entries cost few bits."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.codec import CodecParams
from mlx_zip.vocab.learner import learn_pack
from support.chat_toy import chat_model

pytest.importorskip("torch", reason="needs PyTorch (pip install -e '.[torch]')")
pytest.importorskip("transformers", reason="needs transformers")

from recipes.smollm2 import mixed_pack

A, B, C, D = 10, 11, 12, 13


def cost_of(windows, chance):
    """Bits per saved id of each entry, when the base gives every id the same chance."""
    windows = np.array(windows)
    logs = np.full(windows.shape, np.log(chance), np.float32)
    return mixed_pack.compute_entry_costs(windows, windows, logs, 2, (), least=2, least_in_sample=2)


def test_an_entry_whose_rest_always_follows_costs_nothing():
    assert cost_of([[A, B, C, A, B, D]] * 10, 1.0)[A, B] == pytest.approx(0, abs=1e-9)


def test_an_entry_costs_the_bits_of_what_the_context_decides():
    windows = [[A, B, C, C], [A, C, D, D]] * 10
    assert cost_of(windows, 1.0)[A, B] == pytest.approx(2, abs=1e-6)  # 1 bit at each of 20 A, for 10 saved ids


def test_an_entry_that_no_context_decides_costs_nothing():
    windows = [[A, B, C, C], [A, C, D, D]] * 10
    assert cost_of(windows, 0.5)[A, B] == pytest.approx(0, abs=1e-6)


def test_rare_entries_and_those_with_a_disabled_id_have_no_cost():
    windows = np.array([[A, B, C, D], [A, B, D, C], [B, C, A, D]])
    found = mixed_pack.compute_entry_costs(
        windows, windows, np.zeros(windows.shape, np.float32), 3, (D,), least=2, least_in_sample=2
    )
    assert found.keys() == {(A, B), (B, C)}


def test_log_probabilities_are_the_bases(tmp_path, monkeypatch):
    monkeypatch.setattr(mixed_pack, "multiplies_bfloat16", lambda: False)
    folder, model = chat_model(tmp_path / "base")
    windows = np.random.default_rng(0).integers(3, 90, (6, 11))
    found = mixed_pack.compute_log_probabilities(folder, windows)
    logits = np.array(model(mx.array(windows))).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(logs[:, :-1], windows[:, 1:, None], -1)[..., 0]
    assert not found[:, 0].any()
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-4)


def test_a_pack_holds_allowed_entries_alone():
    params = CodecParams(20, 8, 3, disabled_ids=(), pad_id=0)
    texts = [np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 6, 5, 6, 7, 5, 6])] * 4
    assert (1, 2, 3) in learn_pack(params, texts, 4).entries
    allowed = {(1, 2), (5, 6), (5, 6, 7)}
    found = learn_pack(params, texts, 4, allowed=allowed.__contains__).entries
    assert found
    assert allowed.issuperset(found)
