"""Models of each architecture that we run on vLLM choose the ids that they choose on MLX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("vllm")

from mlx_zip import stream_generate
from mlx_zip.engine.interface import Submission
from support import tiny
from support.on_vllm import answer_all, open_on_vllm
from support.serving import ENDLESS
from support.torch_folders import save

SMALL = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": 6, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
# no averaging encoder: an entry of one repeated id has that id's row there, and which of two equal logits wins is open
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one encoder": ("llama", {"encoder": "res_latent_attn", "tie_encoders": True}),
    "mistral, entries evicted": ("mistral", {"encoder": "transformer", "compression": {**SMALL, "policy": "lru"}}),
    "phi3, positions of base tokens": ("phi3", {"encoder": "res_latent_attn", "position_mode": "base_token_end"}),
    "qwen2, start entries": ("qwen2", {"encoder": "attention", "compression": SMALL, "start": [[5, 6], [7, 8, 9]]}),
    "qwen3, canonical": ("qwen3", {"encoder": "attention", "canonical": True}),
}


def made(case: str) -> Any:
    """Returns a random model of a case, whose heads are as wide as vLLM's attention on a CPU wants them."""
    family, changes = CASES[case]
    changes = dict(changes)
    config = tiny.tiny_config(family, changes.pop("encoder"), hidden=256, **changes)
    config["torch_dtype"] = "float32"  # else vLLM looks into the file, which MLX writes without metadata
    if family == "phi3":  # its heads are 128 wide, and so are its factors
        del config["rope_scaling"]
    else:
        config["head_dim"] = 64
    return tiny.random_model(config, 0, 0.1)


@pytest.mark.parametrize("case", CASES)
def test_a_model_chooses_the_ids_that_it_chooses_on_mlx(case, tmp_path, monkeypatch):
    model = made(case)
    monkeypatch.setattr("mlx_zip.vllm.engine.load_tokenizer", lambda *given, **options: ENDLESS)
    prompts = [tiny.base_ids(length, seed) for seed, length in enumerate((3, 20, 45))]
    expected = [list(stream_generate(model, ENDLESS, prompt, 16)) for prompt in prompts]
    with open_on_vllm(save(model, tmp_path / "m"), 4, {"max_num_batched_tokens": 32}) as engine:
        watches = answer_all(engine, [Submission(prompt, 16, top_logprobs=0) for prompt in prompts])
        for watch, responses in zip(watches, expected, strict=True):
            assert watch.ids == [one.token for one in responses]
            likely = [float(one.logprobs[one.token]) for one in responses]
            np.testing.assert_allclose([event.logprob for event in watch.emitted], likely, atol=1e-3)
        assert any(one >= tiny.VOCAB for watch in watches for one in watch.ids)
