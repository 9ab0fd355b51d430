"""Exported checkpoints in the published package, run live: it reads them and emits the ids that our model emits."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="running an export in the published package needs torch")
pytest.importorskip("transformers", reason="running an export in the published package needs transformers")

import mlx.core as mx

from mlx_zip.converters.export import export
from support import upstream
from support.published import LEAST_MARGIN, LOGITS_TOLERANCE, LONGROPE, NARROW, STEPS, greedy, load, worst
from support.slow_cases import slow_but
from support.upstream import Checkpoint

MISSING = [name for name in ("peft", "zip2zip") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"running an export in the published package needs {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.*:FutureWarning"),  # peft's own
]

CASES = {
    "llama": Checkpoint(),
    "qwen2": Checkpoint(
        "qwen2", {"tie_word_embeddings": True}, kind="res_latent_attn", encoder={**NARROW, "causal": True}, merge_size=5
    ),
    "gemma2": Checkpoint(
        "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}, kind="res_latent_attn", seed=1
    ),
    "phi3": Checkpoint(
        "phi3", LONGROPE, kind="res_latent_attn", position_mode="base_token_end", merge_size=4, boundary=305
    ),
    "llama with an adapter": Checkpoint(lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}, seed=2),
}


class Exported(upstream.Published):
    """The package with an exported checkpoint."""

    def __init__(self, folder: Path, made: Checkpoint) -> None:
        super().__init__(folder, made)
        if made.arch.startswith("gemma"):
            # transformers 5 scales Gemma's embeddings inside the layer that zip2zip 0.2.0 replaces; transformers 4
            # did so after it. Here the scale is put back, or there would be no Gemma to compare with.
            scale = self.model.base_model.config.hidden_size**0.5
            self.model.base_model.get_input_embeddings().register_forward_hook(lambda _, __, out: out * scale)


@pytest.fixture(scope="module", params=slow_but(CASES, "gemma2", "phi3", "llama with an adapter"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Any, Exported]:
    """Our model of a random checkpoint, and its export loaded by the package."""
    made, home = CASES[request.param], tmp_path_factory.mktemp("exported")
    model = load(upstream.write_checkpoint(home / "src", made), made)
    with pytest.warns(UserWarning, match="scale") if made.arch.startswith("gemma") else nullcontext():
        out = export(str(home / "src" / "converted"), home / "out", progress=False)
    return made, model, Exported(out, made)


def prompts(made: Checkpoint, published: Exported) -> list[list[int]]:
    return [published.compress(upstream.prompt(made.seed + i, length)) for i, length in enumerate((56, 45))]


def test_the_package_gives_our_logits(pair: tuple[Checkpoint, Any, Exported]) -> None:
    made, model, published = pair
    end = made.boundary + made.codebook_size
    for ids in prompts(made, published):
        got, want = np.array(model(mx.array([ids])))[0, :, :end], published.forward([ids])[0][:, :end]
        if (cap := model.traits.soft_cap) is not None:  # the package caps after it has masked
            want = np.where(want == -cap, -np.inf, want)
        assert worst(got, want) < LOGITS_TOLERANCE


def test_the_package_emits_our_greedy_ids(pair: tuple[Checkpoint, Any, Exported]) -> None:
    made, model, published = pair
    for ids in prompts(made, published):
        want, margin = published.generate([ids], STEPS)
        assert margin > LEAST_MARGIN
        assert np.array_equal(greedy(model, made, np.array([ids]), [0]), want)


def test_the_package_reads_the_exported_tokenizer(pair: tuple[Checkpoint, Any, Exported]) -> None:
    from transformers import AutoTokenizer

    folder = pair[2].model.base_model.config._name_or_path
    text = "once more, the same thing"
    assert AutoTokenizer.from_pretrained(folder).encode(text) == upstream.tokenizer().encode(text)
