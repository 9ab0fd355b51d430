"""Decoders against transformers, run live on random weights: rotary scalings, windows, soft caps, both config styles.

Source of the expected numbers: transformers 5, eager attention, float32. A prompt without hypertokens is compared
with `input_ids`, one with hypertokens with `inputs_embeds` made of the embedding and of our own rows.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity with transformers needs torch")
pytest.importorskip("transformers", reason="parity with transformers needs transformers")

import mlx.core as mx
import torch

from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.models.zip_model import Model
from support import upstream

TOLERANCE = 2e-4
VOCAB = 320
LONG = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.01, 1.02, 1.02, 1.03, 1.03, 1.05, 1.05],
    "long_factor": [1.0, 1.2, 1.9, 4.0, 9.5, 24.0, 48.0, 64.0],
}
LONG_PHI3 = {"rope_parameters": LONG, "original_max_position_embeddings": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """A decoder's config, and what an older release wrote instead of keys that it did not know."""

    arch: str
    config: dict[str, Any] = field(default_factory=dict)
    old: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama", {"rope_parameters": {**DEFAULT, "rope_theta": 500.0}}),
    "llama-llama3-rope": Case(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear-rope": Case("llama", {"rope_parameters": {**DEFAULT, "rope_type": "linear", "factor": 4.0}}),
    "llama-yarn-rope": Case("llama", {"rope_parameters": YARN}),
    "llama-yarn-rope-all-options": Case(
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "truncate": False,
            }
        },
    ),
    "llama-biases-tied-wide-heads": Case(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24}
    ),
    "mistral-window": Case("mistral", {"sliding_window": 16}, {"head_dim": None}),
    "mistral-no-window": Case("mistral", {"sliding_window": None}),
    "phi3": Case("phi3", {"rope_parameters": {**DEFAULT, "rope_theta": 700.0}}),
    "phi3-window": Case("phi3", {"sliding_window": 16}),
    "phi3-partial-rotary": Case("phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "phi3-longrope": Case("phi3", LONG_PHI3),
    "qwen2": Case("qwen2", {"rope_parameters": {**DEFAULT, "rope_theta": 1e6}}),
    "qwen2-window-off": Case("qwen2", {"use_sliding_window": False}, {"sliding_window": 16, "max_window_layers": 1}),
    "qwen2-window-on": Case("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-window-on": Case(
        "qwen3", {"head_dim": 16, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "gemma": Case("gemma", {"head_dim": 16}, {"hidden_act": "gelu"}),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-final-cap-no-groups": Case(
        "gemma2",
        {
            "head_dim": 16,
            "final_logit_softcapping": None,
            "num_key_value_heads": 4,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 3},
    ),
    "gemma3-linear-rope": Case(
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": DEFAULT,
            },
        },
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


def old_style(config: dict[str, Any], case: Case) -> dict[str, Any]:
    """The config as releases before transformers 5 wrote it: no `rope_parameters`, no `layer_types`."""
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    rope = dict(case.config.get("rope_parameters", DEFAULT))
    plain = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return {**kept, **plain, "rope_scaling": None if rope == {"rope_type": "default"} else rope, **case.old}


def sparse(config: dict[str, Any], decoder: Any) -> dict[str, Any]:
    """The config without the keys that say what transformers assumes anyway."""
    assumed = type(decoder.config)().to_dict()
    return {key: value for key, value in config.items() if key == "model_type" or assumed.get(key, ...) != value}


def zip_model(decoder: Any, config: dict[str, Any], codebook_size: int = 8, mode: str = "compressed") -> Model:
    """Ours with the decoder's weights, an encoder without parameters, and the config as given."""
    section = {
        "base_model_type": config["model_type"],
        "position_mode": mode,
        "encoder_type": "averaging",
        "encoder": {"hidden_size": config["hidden_size"], "tie_encoders": True},
        "compression": {
            "initial_vocab_size": VOCAB,
            "max_codebook_size": codebook_size,
            "max_subtokens": 3,
            "disabled_ids": [upstream.BOS, upstream.EOS, upstream.PAD],
        },
        "pad_token_id": upstream.PAD,
    }
    model = Model(ModelArgs.from_dict({**config, "model_type": "zip2zip", "zip2zip": section}))
    weights = {name: mx.array(value.numpy()) for name, value in decoder.state_dict().items()}
    model.load_weights(list(model.sanitize(weights).items()))
    return model


def as_written(decoder: Any) -> dict[str, Any]:
    """config.json as transformers 5 saves it."""
    return json.loads(decoder.config.to_json_string())


def build(case: Case, style: str = "new", **options: Any) -> tuple[Any, Model]:
    """transformers' model and ours with the same weights."""
    decoder = upstream.base_model(case.arch, seed=7, **case.config)
    config = as_written(decoder)
    if style == "sparse":
        config = sparse(config, decoder)
    elif style == "old":
        config = old_style(config, case)
    return decoder, zip_model(decoder, config, **options)


@functools.cache
def built(name: str) -> tuple[Any, Model]:
    """The pair of a case with the config as transformers 5 writes it."""
    return build(CASES[name])


def draw(length: int, batch: int = 1, seed: int = 0) -> np.ndarray:
    """Base ids [batch, length] without specials."""
    return np.random.default_rng(seed).integers(3, VOCAB, size=(batch, length))


@torch.no_grad()
def fresh(decoder: Any, ids: np.ndarray, **inputs: Any) -> np.ndarray:
    """transformers' logits [B, L, V] of one full forward without a cache."""
    return decoder(input_ids=torch.from_numpy(ids), use_cache=False, **inputs).logits.numpy()


def ours(model: Model, ids: np.ndarray, cache: Any = None) -> np.ndarray:
    """Our logits of the base ids [B, L, V]."""
    return np.array(model(mx.array(ids), cache=cache)[..., :VOCAB])


def worst(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("style", ["new", "sparse", "old"])
@pytest.mark.parametrize("name", CASES)
def test_a_full_forward_equals_transformers(name: str, style: str) -> None:
    decoder, model = build(CASES[name], style)
    ids = draw(48)
    assert worst(ours(model, ids), fresh(decoder, ids)) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_steps_equal_one_full_forward_of_transformers(name: str) -> None:
    decoder, model = built(name)
    ids, cache = draw(48), model.make_cache()
    pieces = np.split(ids, [11, 12, 30, *range(31, 48)], axis=1)
    got = np.concatenate([ours(model, piece, cache) for piece in pieces], axis=1)
    assert worst(got, fresh(decoder, ids)) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_left_padded_rows_equal_the_same_rows_alone(name: str) -> None:
    decoder, model = built(name)
    lengths = (40, 23)
    rows = [draw(n, seed=n) for n in lengths]
    padded = np.concatenate([np.pad(row, ((0, 0), (40 - row.shape[1], 0)), constant_values=2) for row in rows])
    cache = model.make_cache(left_padding=[40 - n for n in lengths])
    got = np.concatenate([ours(model, piece, cache) for piece in np.split(padded, [25, 39], axis=1)], axis=1)
    errors = [worst(got[b : b + 1, 40 - n :], fresh(decoder, rows[b])) for b, n in enumerate(lengths)]
    assert max(errors) < TOLERANCE


CONTEXT = 64
LONG_CASES = {
    "phi3": Case("phi3", LONG_PHI3),
    "phi3-partial-rotary": Case(
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.5,
                "attention_factor": 1.3,
                "short_factor": LONG["short_factor"][::2],
                "long_factor": LONG["long_factor"][::2],
            },
            "original_max_position_embeddings": CONTEXT,
        },
    ),
    "llama": Case("llama", {"rope_parameters": {**LONG, "factor": 4.0, "original_max_position_embeddings": CONTEXT}}),
}


@pytest.fixture(scope="module", params=LONG_CASES)
def longrope(request: pytest.FixtureRequest) -> tuple[Any, Model]:
    return build(LONG_CASES[request.param])


@pytest.mark.parametrize("length", [40, CONTEXT, CONTEXT + 1, 150])
def test_longrope_equals_transformers_in_one_call(longrope: tuple[Any, Model], length: int) -> None:
    decoder, model = longrope
    ids = draw(length, seed=length)
    assert worst(ours(model, ids), fresh(decoder, ids)) < TOLERANCE


CUTS = {
    "crossing inside a chunk": [30, 90, 120],
    "crossing at a chunk's end": [40, CONTEXT, 100],
    "crossing by steps": [50, *range(60, 70)],
    "long from the first call": [100, *range(101, 106)],
    "steps from the start": list(range(1, 70)),
}


@pytest.mark.parametrize("name", CUTS)
def test_each_longrope_call_equals_a_fresh_forward_over_all_ids_so_far(longrope: tuple[Any, Model], name: str) -> None:
    decoder, model = longrope
    ids, cache, begin, errors = draw(130), model.make_cache(), 0, []
    for end in CUTS[name]:
        got = ours(model, ids[:, begin:end], cache)
        errors.append(worst(got, fresh(decoder, ids[:, :end])[:, begin:]))
        begin = end
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize(("first", "kept"), [(100, 40), (100, CONTEXT), (100, 80), (60, 50)])
def test_longrope_after_a_trim_equals_a_fresh_forward(longrope: tuple[Any, Model], first: int, kept: int) -> None:
    from mlx_lm.models.cache import trim_prompt_cache

    decoder, model = longrope
    ids, cache = draw(130), model.make_cache()
    ours(model, ids[:, :first], cache)
    trim_prompt_cache(cache, first - kept)
    errors = []
    for begin, end in [(kept, kept + 1), (kept + 1, kept + 9), (kept + 9, 120)]:
        got = ours(model, ids[:, begin:end], cache)
        errors.append(worst(got, fresh(decoder, ids[:, :end])[:, begin:]))
    assert max(errors) < TOLERANCE


def test_longrope_of_a_left_padded_batch_follows_its_longest_row_as_in_transformers(
    longrope: tuple[Any, Model],
) -> None:
    decoder, model = longrope
    ids = draw(80, batch=2)
    ids[1, :45] = upstream.PAD
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, :45] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = model.make_cache(left_padding=[0, 45])
    got = np.concatenate([ours(model, piece, cache) for piece in np.split(ids, [60, 79], axis=1)], axis=1)
    # what the calls before the crossing returned was right then; the last call sees everything with long factors
    want = fresh(decoder, ids, attention_mask=mask, position_ids=positions)
    assert worst(got[:, 60:], want[:, 60:]) < TOLERANCE


ZIPPED = {
    "llama": Case("llama", {"tie_word_embeddings": True}),
    "phi3-longrope": LONG_CASES["phi3"],
    "qwen3": CASES["qwen3"],
    "mistral-window": CASES["mistral-window"],
    "gemma": CASES["gemma"],
    "gemma2": CASES["gemma2"],
    "gemma3": CASES["gemma3"],
}


@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
@pytest.mark.parametrize("name", ZIPPED)
def test_logits_with_hypertokens_equal_transformers_on_the_same_vectors(name: str, mode: str) -> None:
    """120 base ids in about 50: in `base_token_end` the last stand beyond LongRoPE's original context of 64."""
    decoder, model = build(ZIPPED[name], codebook_size=80, mode=mode)
    ids = compressed(upstream.prompt(3, 120, high=VOCAB), codebook_size=80)
    cache = model.make_cache()
    got = np.concatenate(
        [np.array(model(mx.array(piece), cache=cache)) for piece in np.split(ids, [9, 10, 44], axis=1)], axis=1
    )
    entries = [base_ids for _, base_ids in find_zip_state(cache).books[0].entries]
    want = zipped_forward(decoder, ids, entries, mode)
    live = VOCAB + len(entries)
    assert worst(got[0, -1, :live], want[0, -1]) < TOLERANCE
    assert np.all(got[0, -1, live:] == -np.inf)


def compressed(base_ids: list[int], codebook_size: int) -> np.ndarray:
    from mlx_zip.codec import CodecParams, compress

    specials = (upstream.BOS, upstream.EOS, upstream.PAD)
    params = CodecParams(VOCAB, codebook_size, 3, specials, upstream.PAD)
    return np.asarray(compress(params, base_ids)[0]).astype(np.int64)[None]


@torch.no_grad()
def zipped_forward(decoder: Any, ids: np.ndarray, entries: list[tuple[int, ...]], mode: str) -> np.ndarray:
    """transformers' body on the mean vectors of the entries, then the head with the entries' rows below it."""

    def with_entries(matrix: torch.Tensor) -> torch.Tensor:
        return torch.cat([matrix, *(matrix[list(entry)].mean(0, keepdim=True) for entry in entries)])

    scale = decoder.config.hidden_size**0.5 if decoder.config.model_type.startswith("gemma") else 1.0
    spans = torch.tensor([1] * VOCAB + [len(entry) for entry in entries])[torch.from_numpy(ids)]
    positions = spans.cumsum(-1) - 1 if mode == "base_token_end" else torch.arange(ids.shape[1])[None]
    hidden = decoder.model(
        inputs_embeds=scale * with_entries(decoder.get_input_embeddings().weight)[torch.from_numpy(ids)],
        attention_mask=torch.ones(ids.shape, dtype=torch.long),
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    logits = hidden @ with_entries(decoder.get_output_embeddings().weight).T
    cap = getattr(decoder.config, "final_logit_softcapping", None)
    return (logits if cap is None else cap * torch.tanh(logits / cap)).numpy()
