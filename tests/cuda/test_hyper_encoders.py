"""Hyper rows made by PyTorch equal those that MLX makes, for every kind of encoder, tied or not, dense or packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.pairs import quick_pairs
from support.tiny import MERGE, PAD, VOCAB, tiny_config
from support.torch_folders import pack, save

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

import mlx.utils  # noqa: E402

from mlx_zip.cuda.hyper_rows import RowStore  # noqa: E402
from mlx_zip.cuda.model import open_model  # noqa: E402
from mlx_zip.models.model_folder import ModelArgs  # noqa: E402
from mlx_zip.models.zip_model import Model  # noqa: E402

ROWS_ATOL = 2e-5
LATENT = {"num_heads": 4, "num_hidden_layers": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "averaging": {},
    "attention": {"num_heads": 4},
    "transformer": {"num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96},
    "transformer positions": {"num_heads": 4, "num_hidden_layers": 2, "position_encoding": "learnable"},
    "res_latent_attn": LATENT,
    "res_latent_attn causal": {**LATENT, "causal": True, "residual": False},
    "res_latent_attn narrow": {**LATENT, "hidden_size": 32, "model_hidden_size": 64},
}


def model_with(name: str, tied: bool, words: bool = False) -> Model:
    """Returns a tiny random MLX model; tied: encoders; words: whether the head is the embedding."""
    encoder = {"hidden_size": 64, "tie_encoders": tied, **ENCODERS[name]}
    config = {**tiny_config("llama", "averaging"), "tie_word_embeddings": words}
    config["zip2zip"] |= {"encoder_type": name.split()[0], "encoder": encoder}
    model = Model(ModelArgs.from_dict(config))
    rng = np.random.default_rng(5)
    weights = [
        (name, mx.array(rng.normal(0, 0.3, value.shape).astype(np.float32)) + ("norm" in name and "bias" not in name))
        for name, value in mlx.utils.tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    return model


def entries(count: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Returns entries of every length, padded."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, MERGE + 1, count)
    ids = rng.integers(3, VOCAB, (count, MERGE)).astype(np.uint32)
    ids[np.arange(MERGE) >= lengths[:, None]] = PAD
    return ids, lengths


def check(model: Model, folder: Any, kernels: bool) -> None:
    ids, lengths = entries()
    inputs, outputs = (np.array(rows) for rows in model.encode_rows(ids, lengths))
    ours = open_model(folder, "cpu", kernels=kernels)
    made = ours.encode_entries(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(lengths))
    assert made.shape == (len(ids), ours.sides, 64)
    np.testing.assert_allclose(made[:, 0].numpy(), outputs, atol=ROWS_ATOL, rtol=0)
    np.testing.assert_allclose(made[:, -1].numpy(), inputs, atol=ROWS_ATOL, rtol=0)
    assert ours.fingerprint == model.fingerprint


KERNELS = {"cpu": False, "references": True}


@quick_pairs(
    {
        "name": list(ENCODERS),
        "tied": {"untied": False, "tied": True},
        "words": {"own head": False, "tied head": True},
        "kernels": KERNELS,
    }
)
def test_rows_equal_mlx_s(name, tied, words, kernels, tmp_path):
    model = model_with(name, tied, words)
    check(model, save(model, tmp_path / "model"), kernels)


@quick_pairs({"name": list(ENCODERS), "bits": [4, 8], "kernels": KERNELS})
def test_rows_of_packed_weights_equal_mlx_s(name, bits, kernels, tmp_path):
    model = model_with(name, tied=False)
    record = pack(model, bits, 32, {"pos_embed": False})
    check(model, save(model, tmp_path / "model", quantization=record), kernels)


# ---- the store


def counting(calls: list[int]):
    def encode(ids, lengths):
        calls.append(len(ids))
        return (ids.sum(1).float() + 100 * lengths)[:, None, None].expand(-1, 2, 8)

    return encode


def test_the_store_encodes_each_entry_once_and_forgets_the_least_recently_used():
    store, calls = RowStore(2, 8, torch.float32, torch.device("cpu"), limit=0), []
    many = np.arange(700 * MERGE, dtype=np.uint32).reshape(700, MERGE)
    lengths = np.full(700, MERGE)
    for part in (slice(0, 9), slice(0, 9), slice(5, 12)):
        rows = store.find_or_encode(many[part], lengths[part], counting(calls))
        assert rows[:, 1, 3].tolist() == (many[part].sum(1) + 100.0 * MERGE).tolist()
    assert calls == [9, 3]
    rows = store.find_or_encode(many, lengths, counting(calls))  # more than the store holds
    assert rows[:, 0, 0].tolist() == (many.sum(1) + 100.0 * MERGE).tolist()
    assert len(store) == store.places == 512
    assert store.find_or_claim_places([many[699].tobytes()])[1] == []
    assert store.find_or_claim_places([many[100].tobytes()])[1] == [0]


def test_rows_that_could_not_be_encoded_are_not_in_the_store():
    store, (ids, lengths) = RowStore(2, 8, torch.float32, torch.device("cpu")), entries()

    def fails(ids, lengths):
        raise MemoryError

    with pytest.raises(MemoryError):
        store.find_or_encode(ids, lengths, fails)
    calls: list[int] = []
    store.find_or_encode(ids, lengths, counting(calls))
    assert calls == [len(ids)]


def test_the_row_that_was_used_last_stays_longest():
    store = RowStore(1, 1, torch.float32, torch.device("cpu"), limit=0)
    keys = [bytes([one % 256, one // 256]) for one in range(store.places)]
    places, _ = store.find_or_claim_places(keys)
    assert store.find_or_claim_places(keys[:1]) == (places[:1], [])
    assert store.find_or_claim_places([b"new"]) == (
        places[1:2],
        [0],
    )  # in the place of the one that was not asked for again
    assert store.find_or_claim_places([keys[0], keys[1]])[1] == [1]
