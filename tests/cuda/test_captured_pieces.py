"""The pieces of a step that a CUDA graph holds: what they do on PyTorch never makes the host wait for the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.bench.engines.random_folder import random_folder  # noqa: E402
from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.graphs import CudaGraphs  # noqa: E402
from mlx_zip.cuda.kernels.dispatch import force_implementation  # noqa: E402
from mlx_zip.cuda.model import CudaModel  # noqa: E402
from support.kernel_launches import counting_launches  # noqa: E402

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount"}
COPIES = {"_to_copy", "lift_fresh_copy"}  # from the host, if they are no change of dtype
WIDTH, VOCAB = 32, 40


def model_of(position_mode: str) -> CudaModel:
    """Returns a small model with random weights."""
    encoder = {"hidden_size": WIDTH, "num_heads": 4, "num_hidden_layers": 1, "position_encoding": "learnable"}
    codec = {"initial_vocab_size": VOCAB, "max_codebook_size": 6, "max_subtokens": 3, "disabled_ids": [0]}
    section = {"base_model_type": "llama", "encoder_type": "transformer", "encoder": encoder, "compression": codec}
    config = {
        "model_type": "zip2zip",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": VOCAB + 4,
        "max_position_embeddings": 8192,
        "zip2zip": {**section, "pad_token_id": 0, "position_mode": position_mode},
    }
    folder = random_folder(config, "cpu", torch.float32)
    return CudaModel(folder, folder.zip)


@pytest.mark.slow
@pytest.mark.parametrize("position_mode", ["compressed", "base_token_end"])
def test_a_captured_piece_has_no_operation_that_waits_for_the_device(position_mode, monkeypatch):
    batch, pieces = Batch(model_of(position_mode), 2, 20), {}
    for ids in ([3, 4, 5], [6, 7]):
        batch.read(batch.add(), ids)

    def note(graphs, key, work, keep=()):
        with force_implementation("triton"), counting_launches() as found:
            result = work()
        pieces.setdefault(key[0], set()).update(found.names)
        return result

    monkeypatch.setattr(CudaGraphs, "run", note)
    for _ in range(3):
        batch.choose_ids()
        batch.start_body()
        assert not batch.update_codebooks(batch.wait_for_ids())
    assert set(pieces) == {"head", "body", "encode", "install"}
    for piece, names in pieces.items():
        assert not names & (WAITS | COPIES), piece
        assert any(name.startswith("triton.") for name in names) or piece == "install"
