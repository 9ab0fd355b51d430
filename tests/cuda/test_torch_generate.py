"""Greedy generation on PyTorch emits the ids that MLX emits: bundled, golden and tiny models, packs or not."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from support.mlx_greedy import greedy
from support.pairs import quick_pairs
from support.places import GOLDEN_MODELS
from support.tiny import VOCAB, base_ids, tiny_model
from support.torch_folders import pack, save

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

import mlx_zip  # noqa: E402
from mlx_zip.bench.engines.cuda_engines import generate_greedily  # noqa: E402
from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.graphs import CudaGraphs  # noqa: E402
from mlx_zip.cuda.model import CudaModel, open_model  # noqa: E402
from mlx_zip.errors import ConfigError, GenerationError, ModelError  # noqa: E402
from mlx_zip.packs.pack import Pack  # noqa: E402
from mlx_zip.packs.tuned import PlainCodec, TunedRows  # noqa: E402
from support.slow_cases import slow_but  # noqa: E402

NAMES = sorted(path.name for path in GOLDEN_MODELS.iterdir() if path.is_dir())
ENCODER = "res_latent_attn"  # one whose rows depend on the order of ids, so that no two logits are equal
SIZES = {"initial_vocab_size": 40, "max_codebook_size": 6, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
PROMPTS = {
    "story": "Tell me a story about a boy and his boat.",
    "code": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "repeats": "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
}


def ours(model: CudaModel, prompt, steps: int, **options) -> list[int]:
    """The first `steps` ids that PyTorch emits."""
    return [token for token, _ in islice(generate_greedily(model, prompt, 1000, **options), steps)]


@pytest.fixture
def captures(monkeypatch):
    """The pieces of work that a card would capture, in order."""
    captured, known = [], set()

    def run(graphs, key, work, keep=()):
        if (graphs, key) not in known:
            known.add((graphs, key))
            captured.append(key)
        return work()

    monkeypatch.setattr(CudaGraphs, "run", run)
    return captured


@pytest.fixture(scope="module")
def stories():
    mlx, tokenizer = mlx_zip.load("stories")
    return mlx, tokenizer, open_model("stories", "cpu", "float32")


def test_a_batch_that_is_given_again_captures_nothing_again(tmp_path, captures):
    model = open_model(save(tiny_model(position_mode="base_token_end"), tmp_path), "cpu")
    batch, prompts = Batch(model, 1, 200), [base_ids(30, seed) for seed in range(3)]
    expected = [ours(model, prompt, 20) for prompt in prompts]
    captures.clear()
    model.store.clear()
    assert ours(model, prompts[0], 20, batch=batch) == expected[0]
    assert {key[0] for key in captures} == {"head", "body", "encode", "install"}
    captures.clear()
    next(generate_greedily(model, prompts[1], 40, batch=batch))  # given up in the middle of a step
    assert [ours(model, prompt, 20, batch=batch) for prompt in prompts] == expected
    assert captures == []


def test_a_batch_with_a_sequence_or_of_another_model_is_refused(tmp_path):
    model = open_model(save(tiny_model(), tmp_path), "cpu")
    batch = Batch(model, 2, 50)
    with pytest.raises(ModelError, match="another model's"):
        next(generate_greedily(model.without_hypertokens(), [5, 6], 5, batch=batch))
    batch.add()
    with pytest.raises(ModelError, match="holds a sequence"):
        next(generate_greedily(model, [5, 6], 5, batch=batch))


@pytest.mark.parametrize("name", slow_but(PROMPTS, "story"))
def test_the_bundled_model_emits_the_ids_that_mlx_emits(stories, name):
    mlx, tokenizer, model = stories
    prompt = [*tokenizer.encode(PROMPTS[name])]
    assert ours(model, prompt, 30) == greedy(mlx, prompt, 30)


def test_the_bundled_model_emits_them_in_a_chat_with_rows_that_are_warm(stories):
    mlx, tokenizer, model = stories
    messages = [{"role": "user", "content": PROMPTS["story"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    expected = greedy(mlx, prompt, 20)
    model.store.clear()
    for _ in range(2):
        assert ours(model, prompt, 20) == expected


def test_the_bundled_model_begins_without_its_pack_where_a_request_says_so(stories):
    mlx, tokenizer, model = stories
    prompt = tokenizer.encode(PROMPTS["repeats"])
    assert ours(model, prompt, 20, pack=()) == greedy(mlx, prompt, 20, pack=())


def test_its_tokenizer_ends_and_pack_are_those_that_mlx_has(stories):
    mlx, tokenizer, model = stories
    assert model.fingerprint == mlx.fingerprint
    assert model.eos_ids == frozenset(tokenizer.eos_token_ids)
    assert model.pack.fingerprint == mlx.row_source.pack.fingerprint
    assert model.tokenizer.encode(PROMPTS["code"]) == tokenizer.encode(PROMPTS["code"])


# ---- the golden models


@pytest.fixture(scope="module", params=NAMES)
def golden(request, tmp_path_factory):
    from mlx_zip.converters import convert

    folder = tmp_path_factory.mktemp("golden") / request.param
    convert(str(GOLDEN_MODELS / request.param), str(folder), progress=False)
    expected = json.loads((GOLDEN_MODELS / request.param / "expected.json").read_text())
    return open_model(folder, "cpu", "float32"), expected


CHUNKS = [(chunk, index) for chunk in (3, 512) for index in range(3)]


@pytest.mark.parametrize(("chunk", "index"), slow_but(CHUNKS, (3, 0), (512, 1), (3, 2)))
def test_golden_prompts_give_the_published_ids(golden, index, chunk):
    model, expected = golden
    prompt = expected["prompts"][index]
    made = prompt["generated_ids"]
    emitted = list(islice(generate_greedily(model, prompt["base_ids"], 1000, chunk=chunk), len(made)))
    assert [token for token, _ in emitted] == made
    assert prompt["base_ids"] + [i for _, ids in emitted for i in ids] == prompt["decoded_base_ids"]


# ---- tiny models


KERNELS = {"cpu": False, "references": True}


@quick_pairs(
    {
        "family": ["llama", "mistral", "phi3", "qwen2", "qwen3"],
        "mode": ["compressed", "base_token_end"],
        "kernels": KERNELS,
    }
)
def test_tiny_models_emit_the_ids_that_mlx_emits(family, mode, kernels, tmp_path):
    mlx = tiny_model(family, ENCODER, position_mode=mode)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu", kernels=kernels), base_ids(20)
    assert ours(model, prompt, 35) == greedy(mlx, prompt, 35)


@pytest.mark.parametrize("changes", [{"tie_encoders": True}, {"canonical": True}, {"start": [[5, 6], [7, 8, 9]]}])
def test_settings_of_the_checkpoint_are_obeyed(changes, tmp_path):
    mlx = tiny_model(encoder=ENCODER, **changes)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(40)
    assert ours(model, prompt, 35) == greedy(mlx, prompt, 35)


@pytest.mark.parametrize("policy", ["lru", "use-count"])
def test_entries_are_evicted_as_in_mlx(policy, tmp_path):
    mlx = tiny_model(encoder=ENCODER, compression={**SIZES, "policy": policy})
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(60)
    assert ours(model, prompt, 35, chunk=16) == greedy(mlx, prompt, 35, chunk=16)


def test_start_entries_stay_where_others_are_evicted_and_longrope_reads_the_log_again(tmp_path):
    changes = {"position_mode": "base_token_end", "start": [[5, 6], [7, 8, 9]]}
    mlx = tiny_model("phi3", ENCODER, compression={**SIZES, "policy": "lru"}, **changes)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(100)
    assert ours(model, prompt, 40, chunk=7) == greedy(mlx, prompt, 40, chunk=7)


@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
def test_longrope_switches_within_a_prompt_as_in_mlx(mode, tmp_path):
    mlx = tiny_model("phi3", ENCODER, position_mode=mode)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(90)
    for chunk in (16, 512):
        assert ours(model, prompt, 20, chunk=chunk) == greedy(mlx, prompt, 20, chunk=chunk)


def test_an_empty_prompt_is_refused(stories):
    with pytest.raises(GenerationError, match="the prompt is empty"):
        next(generate_greedily(stories[2], [], 5))


def test_a_pack_that_a_request_names_is_used(tmp_path):
    mlx = tiny_model(encoder=ENCODER)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(30)
    pack = [[5, 6, 7], [8, 9], prompt[3:7]]
    assert ours(model, prompt, 40, pack=pack) == greedy(mlx, prompt, 40, pack=pack)


def test_without_hypertokens_the_decoder_alone_is_used(tmp_path):
    import mlx.core as mx

    from mlx_zip.engine.mlx.mlx_engine import WithoutHypertokens

    mlx, prompt = tiny_model(encoder=ENCODER), base_ids(20)
    base = WithoutHypertokens(mlx)
    cache, ids, expected = base.make_cache(), prompt, []
    for _ in range(30):
        expected.append(int(np.array(base(mx.array([ids]), cache=cache)[0, -1]).argmax()))
        ids = expected[-1:]
    model = open_model(save(mlx, tmp_path / "m"), "cpu", hypertokens=False)
    assert ours(model, prompt, 30) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("hypertokens", [True, False])  # families: test_models_of_kernels.py
def test_the_kernels_emit_what_their_references_emit(hypertokens, tmp_path):
    from mlx_zip.cuda.kernels.dispatch import force_implementation

    narrow = tiny_model("llama", ENCODER, hidden=32)  # the interpreter runs a program for every few rows of a matrix
    folder, prompt = save(narrow, tmp_path / "m"), base_ids(8)
    model = open_model(folder, "cpu", hypertokens=hypertokens, kernels=True)
    expected = ours(model, prompt, 4)
    assert (max(expected) >= VOCAB) == hypertokens
    if model.store is not None:
        model.store.clear()
    with force_implementation("triton"):
        assert ours(model, prompt, 4) == expected


EIGHT = {"bits": 8, "group_size": 32}


PACKED = {
    "8 bits": (8, {}),
    "4 bits, embedding and head 8": (4, {"embed_tokens": EIGHT, "lm_head": EIGHT}),
    "8 bits, embedding 4, head dense": (8, {"embed_tokens": {**EIGHT, "bits": 4}, "lm_head": False}),
}
CELLS = [(name, kernels) for kernels in (False, True) for name in PACKED]


@pytest.mark.parametrize(("name", "kernels"), slow_but(CELLS, CELLS[0], CELLS[4], CELLS[5]))
def test_a_packed_model_emits_the_ids_that_mlx_emits(name, kernels, tmp_path):
    mlx, (bits, own) = tiny_model(encoder=ENCODER), PACKED[name]
    record = pack(mlx, bits, 32, {"pos_embed": False, **own})
    folder, prompt = save(mlx, tmp_path / "m", quantization=record), base_ids(30)
    model = open_model(folder, "cpu", kernels=kernels)
    assert ours(model, prompt, 25) == greedy(mlx, prompt, 25)


# ---- packs


def tuned_pack(mlx, entries, plain=None) -> Pack:
    """A pack of these entries with random rows for this model."""
    rng = np.random.default_rng(3)
    one = mlx.sides_are_one
    rows = rng.normal(0, 0.3, (1 if one else 2, len(entries), 64)).astype(np.float32)
    return Pack(entries, rows=TunedRows(rows[-1] if not one else rows[0], rows[0], mlx.fingerprint, plain))


@pytest.mark.parametrize("tied", [False, True])
def test_tuned_rows_of_a_pack_are_used(tied, tmp_path):
    mlx = tiny_model("qwen3", ENCODER, tie_encoders=tied)
    model, prompt = open_model(save(mlx, tmp_path / "m"), "cpu"), base_ids(30)
    pack = tuned_pack(mlx, ((5, 6, 7), (8, 9), tuple(prompt[3:7])))
    expected = greedy(mlx, prompt, 30, pack=pack)
    assert ours(model, prompt, 30, pack=pack) == expected
    model.use_pack(pack)
    assert ours(model, prompt, 30) == expected
    assert model.pack is pack


def test_tuned_rows_of_another_model_are_refused(tmp_path):
    model = open_model(save(tiny_model(encoder=ENCODER), tmp_path / "m"), "cpu")
    pack = tuned_pack(tiny_model(encoder=ENCODER, seed=1), ((5, 6),))
    with pytest.raises(ModelError, match="tuned for another model"):
        next(generate_greedily(model, [5, 6, 7], 5, pack=pack))


def test_the_codebook_s_size_and_canonical_decoding_can_be_chosen(tmp_path):
    folder = save(tiny_model(encoder=ENCODER), tmp_path / "m")
    model = open_model(folder, "cpu", codebook_size=9, canonical=True, pack=[[5, 6]])
    assert (model.layout.codebook_size, model.config.canonical, model.config.start) == (9, True, ((5, 6),))
    prompt, sizes = base_ids(40), {**SIZES, "max_codebook_size": 9}
    mlx = tiny_model(encoder=ENCODER, canonical=True, compression=sizes, start=[[5, 6]])
    assert ours(model, prompt, 40) == greedy(mlx, prompt, 40)
    with pytest.raises(ConfigError):
        open_model(folder, "cpu", codebook_size=0, pack=[[5, 6]])


def test_a_plain_model_takes_a_pack_that_was_tuned_for_it(tmp_path):
    import mlx.core as mx
    import mlx.utils

    from mlx_zip.models.model_folder import ModelArgs, config_with_pack
    from mlx_zip.models.zip_model import Model

    hypertokens = tiny_model(encoder=ENCODER)
    section = hypertokens.args.config["zip2zip"]
    config = {key: value for key, value in hypertokens.args.config.items() if key != "zip2zip"} | {
        "model_type": "llama"
    }
    kept = {n: w for n, w in mlx.utils.tree_flatten(hypertokens.parameters()) if "encoder" not in n}
    folder = save(hypertokens, tmp_path / "m")
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    (folder / "config.json").write_text(json.dumps(config))
    entries, plain = ((5, 6, 7), (8, 9)), PlainCodec(40, (0, 1, 2), section["pad_token_id"])
    mlx = Model(ModelArgs.from_dict(config | config_with_pack(config, plain, entries)))
    mlx.load_weights(list(kept.items()))
    pack, prompt = tuned_pack(mlx, entries, plain), [5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9]
    assert ours(open_model(folder, "cpu", pack=pack), prompt, 30) == greedy(mlx, prompt, 30, pack=pack)
    with pytest.raises(ModelError, match="has no rows"):
        open_model(folder, "cpu", pack=entries)
    with pytest.raises(ModelError, match="no hypertokens"):
        next(generate_greedily(open_model(folder, "cpu"), prompt, 5, pack=entries))
