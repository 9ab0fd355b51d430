"""Greedy generation on PyTorch emits the ids that MLX emits: bundled, golden and tiny models, packs or not."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from support.mlx_greedy import greedy
from support.places import GOLDEN_MODELS
from support.tiny import base_ids, tiny_model
from support.torch_folders import save

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

import mlx_zip  # noqa: E402
from mlx_zip.cuda.generate import generate  # noqa: E402
from mlx_zip.cuda.model import CudaModel, open_model  # noqa: E402

NAMES = sorted(path.name for path in GOLDEN_MODELS.iterdir() if path.is_dir())
ENCODER = "res_latent_attn"  # one whose rows depend on the order of ids, so that no two logits are equal
PROMPTS = {
    "story": "Tell me a story about a boy and his boat.",
    "code": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "repeats": "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
}


def ours(model: CudaModel, prompt, steps: int, **options) -> list[int]:
    """The first `steps` ids that PyTorch emits."""
    return [token for token, _ in islice(generate(model, prompt, 1000, **options), steps)]


@pytest.fixture(scope="module")
def stories():
    mlx, tokenizer = mlx_zip.load("stories")
    return mlx, tokenizer, open_model("stories", "cpu", "float32")


@pytest.mark.parametrize("name", PROMPTS)
def test_the_bundled_model_emits_the_ids_that_mlx_emits(stories, name):
    mlx, tokenizer, model = stories
    prompt = [*tokenizer.encode(PROMPTS[name])]
    assert ours(model, prompt, 50) == greedy(mlx, prompt, 50)


def test_the_bundled_model_emits_them_in_a_chat_with_rows_that_are_warm(stories):
    mlx, tokenizer, model = stories
    messages = [{"role": "user", "content": PROMPTS["story"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    expected = greedy(mlx, prompt, 30)
    model.store.forget()
    for _ in range(2):
        assert ours(model, prompt, 30) == expected


def test_the_bundled_model_begins_without_its_pack_where_a_request_says_so(stories):
    mlx, tokenizer, model = stories
    prompt = tokenizer.encode(PROMPTS["repeats"])
    assert ours(model, prompt, 20, pack=()) == greedy(mlx, prompt, 20, pack=())


def test_its_tokenizer_ends_and_pack_are_those_that_mlx_has(stories):
    mlx, tokenizer, model = stories
    assert model.fingerprint == mlx.fingerprint
    assert model.eos_ids == frozenset(tokenizer.eos_token_ids)
    assert model.pack.fingerprint == mlx.session.pack.fingerprint
    assert model.tokenizer.encode(PROMPTS["code"]) == tokenizer.encode(PROMPTS["code"])


# ---- the golden models


@pytest.fixture(scope="module", params=NAMES)
def golden(request, tmp_path_factory):
    from mlx_zip.converters import convert

    folder = tmp_path_factory.mktemp("golden") / request.param
    convert(str(GOLDEN_MODELS / request.param), str(folder), progress=False)
    expected = json.loads((GOLDEN_MODELS / request.param / "expected.json").read_text())
    return open_model(folder, "cpu", "float32"), expected


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("chunk", [3, 512])
def test_golden_prompts_give_the_published_ids(golden, index, chunk):
    model, expected = golden
    prompt = expected["prompts"][index]
    made = prompt["generated_ids"]
    emitted = list(islice(generate(model, prompt["base_ids"], 1000, chunk=chunk), len(made)))
    assert [token for token, _ in emitted] == made
    assert prompt["base_ids"] + [i for _, ids in emitted for i in ids] == prompt["decoded_base_ids"]


# ---- tiny models


@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "qwen2", "qwen3"])
def test_tiny_models_emit_the_ids_that_mlx_emits(family, mode, tmp_path):
    mlx = tiny_model(family, ENCODER, position_mode=mode)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(20)
    assert ours(model, prompt, 50) == greedy(mlx, prompt, 50)


@pytest.mark.parametrize("changes", [{"tie_encoders": True}, {"canonical": True}, {"start": [[5, 6], [7, 8, 9]]}])
def test_settings_of_the_checkpoint_are_obeyed(changes, tmp_path):
    mlx = tiny_model(encoder=ENCODER, **changes)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(40)
    assert ours(model, prompt, 60) == greedy(mlx, prompt, 60)


@pytest.mark.parametrize("policy", ["lru", "use-count"])
def test_entries_are_evicted_as_in_mlx(policy, tmp_path):
    sizes = {"initial_vocab_size": 40, "max_codebook_size": 6, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
    mlx = tiny_model(encoder=ENCODER, compression={**sizes, "policy": policy})
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(60)
    assert ours(model, prompt, 60, chunk=16) == greedy(mlx, prompt, 60, chunk=16)


def test_a_pack_that_a_request_names_is_used(tmp_path):
    mlx = tiny_model(encoder=ENCODER)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(30)
    pack = [[5, 6, 7], [8, 9], prompt[3:7]]
    assert ours(model, prompt, 40, pack=pack) == greedy(mlx, prompt, 40, pack=pack)


def test_without_hypertokens_the_decoder_alone_is_used(tmp_path):
    import mlx.core as mx

    from mlx_zip.models.base_only import BaseOnly

    mlx, prompt = tiny_model(encoder=ENCODER), base_ids(20)
    base = BaseOnly(mlx)
    cache, ids, expected = base.make_cache(), prompt, []
    for _ in range(30):
        expected.append(int(np.array(base(mx.array([ids]), cache=cache)[0, -1]).argmax()))
        ids = expected[-1:]
    model = open_model(save(mlx, tmp_path / "m"), "cpu", hypertokens=False)
    assert ours(model, prompt, 30) == expected
