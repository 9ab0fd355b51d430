"""One call of the model: layout of the logits, what is open when, positions, batches, bad input."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip import Codebook, CodecError, ConfigError, ModelError, compress
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.rows.encoders import matrix_rows
from mlx_zip.models.zip_model import Model
from support.tiny import ENCODERS, FAMILIES, MERGE, PAD, SLOTS, VOCAB, base_ids, last_logits, tiny_config, tiny_model

MODES = ["compressed", "base_token_end"]


def compressed(model, length, seed=0):
    ids, _ = compress(model.config.codec_params, base_ids(length, seed))
    return [int(i) for i in ids]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_the_prompt_may_be_cut_anywhere(family, mode):
    model = tiny_model(family, position_mode=mode)
    ids = compressed(model, 90)
    assert max(ids) >= VOCAB
    whole = last_logits(model, ids, model.make_cache())
    for cuts in ([1], [len(ids) // 2], [3, 11, len(ids) - 1]):
        cache = model.make_cache()
        for part in np.split(ids, cuts):
            pieces = last_logits(model, part.tolist(), cache)
        np.testing.assert_allclose(pieces, whole, atol=2e-5)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_steps_equal_one_call_for_every_encoder(encoder):
    model = tiny_model("llama", encoder)
    ids = compressed(model, 60)
    cache = model.make_cache()
    for token in ids:
        step = last_logits(model, [token], cache)
    np.testing.assert_allclose(step, last_logits(model, ids, model.make_cache()), atol=2e-5)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_entry_has_the_same_rows_alone_and_among_others(encoder):
    model = tiny_model("llama", encoder)
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, MERGE + 1, 700)
    entries = np.where(np.arange(MERGE) < lengths[:, None], rng.integers(3, VOCAB, (700, MERGE)), PAD).astype(np.uint32)
    together = model.encode_rows(entries, lengths)
    for i in (0, 511, 512, 699):
        alone = model.encode_rows(entries[i : i + 1], lengths[i : i + 1])
        for one, all_ in zip(alone, together, strict=True):
            np.testing.assert_allclose(np.array(one[0]), np.array(all_[i]), atol=1e-5, rtol=0)


def test_columns_of_missing_entries_and_of_the_base_tail_are_closed():
    model = tiny_model()
    ids = compressed(model, 40)
    book = Codebook(model.config.codec_params)
    book.push(ids)
    logits = last_logits(model, ids, model.make_cache())
    assert logits.shape == (model.layout.width,)
    assert np.isfinite(logits[: VOCAB + len(book)]).all()
    assert np.isneginf(logits[VOCAB + len(book) :]).all()


def test_an_entry_can_be_chosen_right_after_the_id_that_created_it():
    model = tiny_model()
    logits = np.array(model(mx.array([[5, 6, 7]]), causal=True)[0])
    assert [int(np.isfinite(row[VOCAB : VOCAB + SLOTS]).sum()) for row in logits] == [0, 1, 2]


def test_within_a_call_entries_are_open_at_every_position_unless_causal():
    model = tiny_model()
    ids = compressed(model, 50)
    whole = np.array(model(mx.array([ids]))[0])
    strict = np.array(model(mx.array([ids]), causal=True)[0])
    for position in (0, 7, len(ids) - 1):
        alone = last_logits(model, ids[: position + 1], model.make_cache())
        open_now = np.isfinite(alone)
        assert (np.isfinite(strict[position]) == open_now).all()
        np.testing.assert_allclose(strict[position][open_now], alone[open_now], atol=2e-5)
        np.testing.assert_array_equal(whole[position][open_now], strict[position][open_now])
    assert np.isfinite(whole[0]).sum() > np.isfinite(strict[0]).sum()


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "gemma2"])
@pytest.mark.parametrize("mode", MODES)
def test_left_padded_rows_equal_the_same_rows_alone(family, mode):
    model = tiny_model(family, position_mode=mode)
    rows = [compressed(model, n, seed=n) for n in (70, 40, 69)]
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    cache = model.make_cache(left_padding=padding)
    batch = mx.array([[PAD] * pad + row for pad, row in zip(padding, rows, strict=True)])
    together = [model(batch[:, :4], cache=cache), model(batch[:, 4:], cache=cache)][-1][:, -1]
    following = model(mx.array([[5], [6], [7]]), cache=cache)[:, -1]
    for row, first, second, nxt in zip(rows, together, following, (5, 6, 7), strict=True):
        if family == "phi3" and mode == "compressed" and len(row) + 1 < max(len(r) for r in rows):
            continue  # LongRoPE picks one factor set per batch, by its longest row, as transformers does
        alone = model.make_cache()
        np.testing.assert_allclose(np.array(first), last_logits(model, row, alone), atol=3e-5)
        np.testing.assert_allclose(np.array(second), last_logits(model, [nxt], alone), atol=3e-5)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("mode", MODES)
def test_a_padded_row_that_is_alone_may_be_read_id_by_id(family, mode):
    model = tiny_model(family, position_mode=mode).eval()
    row = compressed(model, 60)
    alone, padded = model.make_cache(), model.make_cache(left_padding=[3])
    for one in [PAD] * 3:
        model(mx.array([[one]]), cache=padded)
    assert (padded[-1].offset, len(padded[-1].books[0].ids)) == (3, 0)
    for one in row:
        np.testing.assert_allclose(last_logits(model, [one], padded), last_logits(model, [one], alone), atol=3e-5)


def test_two_interleaved_conversations_equal_two_separate_ones():
    model = tiny_model("phi3", "res_latent_attn")
    a, b = compressed(model, 60, seed=1), compressed(model, 60, seed=2)
    cache_a, cache_b = model.make_cache(), model.make_cache()
    for begin in range(0, min(len(a), len(b)) - 5, 5):
        mixed_a = last_logits(model, a[begin : begin + 5], cache_a)
        mixed_b = last_logits(model, b[begin : begin + 5], cache_b)
    np.testing.assert_allclose(mixed_a, last_logits(model, a[: begin + 5], model.make_cache()), atol=2e-5)
    np.testing.assert_allclose(mixed_b, last_logits(model, b[: begin + 5], model.make_cache()), atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_longrope_changes_its_factors_when_a_call_crosses_the_original_context(mode):
    model = tiny_model("phi3", position_mode=mode)
    ids = compressed(model, 200)[:60]
    cache = model.make_cache()
    for token in ids:
        step = last_logits(model, [token], cache)
    assert cache[-1].long_rope
    np.testing.assert_allclose(step, last_logits(model, ids, model.make_cache()), atol=2e-5)
    short, crossed = tiny_model("phi3", position_mode=mode), model
    short.traits = type(short.traits)(**{**vars(short.traits), "long_context": None})
    finite = np.isfinite(step)
    assert np.abs(last_logits(short, ids, short.make_cache())[finite] - step[finite]).max() > 1e-3
    assert crossed.traits.long_context == 32


def test_quantized_heads_give_the_rows_of_their_dequantized_matrix():
    linear = nn.Linear(64, 32, bias=False)
    quantized = linear.to_quantized(group_size=32, bits=4)
    whole = mx.dequantize(quantized.weight, quantized.scales, quantized.biases, group_size=32, bits=4)
    ids = mx.array([[3, 5], [31, 0]])
    np.testing.assert_array_equal(np.array(matrix_rows(quantized, ids)), np.array(whole[ids]))


def _fits(module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def test_a_quantized_model_still_steps_as_it_prefills():
    model = tiny_model("llama")
    nn.quantize(model, 32, 8, class_predicate=lambda path, m: model.quant_predicate(path, m) and _fits(m))
    assert "scales" in model.lm_head
    assert "scales" not in model.input_encoder.layers[0].attention.q_proj
    ids = compressed(model, 60)
    cache = model.make_cache()
    for token in ids:
        step = last_logits(model, [token], cache)
    np.testing.assert_allclose(step, last_logits(model, ids, model.make_cache()), atol=1e-4)


@pytest.mark.parametrize(
    "ids",
    [[VOCAB + 3], [5, 6, VOCAB + 7], [5, VOCAB + SLOTS], [5, VOCAB + SLOTS + 1], [5, 1 << 31]],
    ids=["beyond the next", "beyond, inside a chunk", "past the table", "base tail", "huge"],
)
def test_an_illegal_id_raises_and_changes_nothing(ids):
    model = tiny_model()
    cache, twin = model.make_cache(), model.make_cache()
    for c in (cache, twin):
        model(mx.array([[5, 6, 5]]), cache=c)
    with pytest.raises(CodecError):
        model(mx.array([ids]), cache=cache)
    assert cache[-1].offset == cache[0].offset == 3
    np.testing.assert_array_equal(last_logits(model, [6], cache), last_logits(model, [6], twin))


def test_an_illegal_id_in_one_row_of_a_batch_rewinds_the_others():
    model = tiny_model()
    cache = model.make_cache(left_padding=[0, 0])
    model(mx.array([[5, 6], [7, 8]]), cache=cache)
    with pytest.raises(CodecError):
        model(mx.array([[9, 9, 9], [9, 9, VOCAB + 30]]), cache=cache)
    assert [len(book.ids) for book in cache[-1].books] == [2, 2]


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (mx.array([5, 6]), r"\[B, L\]"),
        (mx.zeros((1, 0), mx.int32), r"\[B, L\]"),
        (mx.array([[0.5]]), r"integers"),
        (mx.array([[-1]]), "not all 32-bit"),
    ],
    ids=["one dimension", "empty", "floats", "negative"],
)
def test_malformed_ids_are_refused(ids, match):
    with pytest.raises(ModelError, match=match):
        tiny_model()(ids)


@pytest.mark.parametrize("padding", [[], [-1, 0]])
def test_wrong_left_padding_is_refused(padding):
    with pytest.raises(ModelError, match="left_padding"):
        tiny_model().make_cache(left_padding=padding)


@pytest.mark.parametrize(
    ("base_ids", "lengths"),
    [([[5, VOCAB, PAD, PAD]], [2]), ([[5, 6, PAD, PAD]], [0]), ([[5, 6, PAD, PAD]], [MERGE + 1]), ([[5, 6]], [2])],
    ids=["no base id", "length 0", "too long", "too narrow"],
)
def test_impossible_entries_get_no_rows(base_ids, lengths):
    with pytest.raises(ModelError, match="entries must"):
        tiny_model().encode_rows(np.array(base_ids, np.uint32), np.array(lengths))


@pytest.mark.parametrize("family", FAMILIES)
def test_null_in_a_config_means_the_default(family):
    config = tiny_config(family)
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps")
    absent = {key: value for key, value in config.items() if key not in names}
    made = [Model(ModelArgs.from_dict(one)) for one in (absent, {**absent, **dict.fromkeys(names)})]
    shapes = [{name: value.shape for name, value in tree_flatten(model.parameters())} for model in made]
    assert shapes[0] == shapes[1]


def test_a_foreign_or_uneven_cache_is_refused():
    model = tiny_model()
    with pytest.raises(ModelError, match="make_cache"):
        model(mx.array([[5]]), cache=model.make_cache()[:-1])
    other = tiny_model(compression={**tiny_config()["zip2zip"]["compression"], "max_subtokens": MERGE - 1})
    with pytest.raises(ModelError, match="codec parameters"):
        model(mx.array([[5]]), cache=other.make_cache())
    cache = model.make_cache()
    model(mx.array([[5, 6]]), cache=cache)
    for layer in (1, 0):
        cache[layer].trim(1)
        with pytest.raises(ModelError, match="trim all together"):
            model(mx.array([[5]]), cache=cache)
    with pytest.raises(ModelError, match="1 sequence"):
        model(mx.array([[5], [6]]), cache=model.make_cache())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"base_model_type": "mamba"}, "mamba"),
        ({"encoder_type": "gru"}, "gru"),
        ({"position_mode": "sideways"}, "sideways"),
        ({"surprise": 1}, "surprise"),
        (
            {"compression": {**tiny_config()["zip2zip"]["compression"], "disabled_ids": [0, 1, PAD, VOCAB + 5]}},
            f"disabled id {VOCAB + 5}",
        ),
        ({"encoder": {"hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1}}, "width 32"),
        ({"compression": {**tiny_config()["zip2zip"]["compression"], "initial_vocab_size": 49}}, "embedding's 48 rows"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(change, match):
    config = tiny_config()
    config["zip2zip"] |= change
    with pytest.raises(ConfigError, match=match):
        Model(ModelArgs.from_dict(config))


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "disagree"),
        ("llama", {"hidden_act": "relu"}, "relu"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("phi3", {"rope_scaling": {**FAMILIES["phi3"]["rope_scaling"], "short_factor": [1.0]}}, "short_factor"),
        ("mistral", {"sliding_window": -1}, "sliding_window"),
        ("llama", {"rope_scaling": "x"}, "rope_scaling must be an object"),
        ("llama", {"rope_theta": "x"}, "not a number"),
        ("llama", {"max_position_embeddings": "512"}, "max_position_embeddings"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_a_decoder_option_that_is_not_supported_is_refused(family, change, match):
    with pytest.raises(ConfigError, match=match):
        Model(ModelArgs.from_dict({**tiny_config(family), **change}))
