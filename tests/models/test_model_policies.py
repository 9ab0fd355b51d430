"""Models whose codebooks evict entries: rows follow the slots, in steps, in one call, after a trim, from disk."""

import copy
import functools

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_zip import ZipState
from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.config import ZipConfig
from mlx_zip.errors import ConfigError, DataError, ModelError
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.training.steps.batches import make_batch
from support import codec_twin as twin
from support import tiny
from support.slow_cases import slow_but
from support.steps import decode_steps
from support.tiny import PAD, VOCAB, base_ids, last_logits, tiny_model

SIZE = 4
TURNS = ["lru", "use-count"]


def compression(policy, size=SIZE):
    sizes = {"initial_vocab_size": VOCAB, "max_codebook_size": size, "max_subtokens": tiny.MERGE}
    return {**sizes, "disabled_ids": [0, 1, PAD], "policy": policy}


def turning(policy="lru", family="llama", size=SIZE, **changes):
    return tiny_model(family, compression=compression(policy, size), **changes)


def sampled(model, seed=0, pushes=64):
    """Ids as a sampler may emit them, some of which stand for one entry here and for another there."""
    book, rng = Codebook(model.config.codec_params), np.random.default_rng(seed)
    for _ in range(pushes):
        hyper = len(book) and rng.random() < 0.6
        book.push(VOCAB + int(rng.integers(len(book))) if hyper else int(rng.integers(3, 12)))
    ids = book.ids.tolist()
    meanings = {(one, tuple(row)) for one, row in zip(ids, book.logged_base_ids()[0].tolist(), strict=True)}
    assert len(meanings) > len(set(ids)) + 3
    return ids


def steps(model, ids, cache):
    return np.stack([last_logits(model, [one], cache) for one in ids])


@functools.cache
def stepped(policy, family, changes):
    """The logits of single steps over `sampled` ids, each step once for all tests of a model."""
    model = turning(policy, family, **dict(changes))
    return steps(model, sampled(model), model.make_cache())


FORMS = [  # with input and output rows apart, and as one
    ("llama", {}),
    ("phi3", {}),
    ("phi3", {"position_mode": "base_token_end"}),
    ("gemma3_text", {"tie_encoders": True}),
    ("gemma2", {"tie_encoders": True, "position_mode": "base_token_end"}),
]


CASES = [(family, changes, policy) for family, changes in FORMS for policy in TURNS]


@pytest.mark.parametrize(("family", "changes", "policy"), slow_but(CASES, (*FORMS[0], "lru"), (*FORMS[4], "use-count")))
def test_a_causal_call_gives_what_single_steps_give(policy, family, changes):
    model = turning(policy, family, **changes)
    ids = sampled(model)
    whole = np.array(model(mx.array([ids]), cache=model.make_cache(), causal=True)[0])
    each = stepped(policy, family, tuple(changes.items()))
    same = slice(33 if family == "phi3" else 0, None)  # where LongRoPE has the factors that it has for the whole
    np.testing.assert_allclose(each[same], whole[same], atol=2e-4)


EACH_FORM = [(*form, TURNS[n % 2]) for n, form in enumerate(FORMS)]  # quick, with the policies in turn


@pytest.mark.parametrize(("family", "changes", "policy"), slow_but(CASES, *EACH_FORM, (*FORMS[4], "use-count")))
def test_a_prompt_in_pieces_gives_what_single_steps_give(policy, family, changes):
    model = turning(policy, family, **changes)
    ids = sampled(model)
    each, cache = stepped(policy, family, tuple(changes.items())), model.make_cache()
    for begin in range(0, len(ids), 17):
        piece = ids[begin : begin + 17]
        np.testing.assert_allclose(last_logits(model, piece, cache), each[begin + len(piece) - 1], atol=2e-4)


@pytest.mark.parametrize(("family", "changes"), slow_but(FORMS, FORMS[0], FORMS[3]))
def test_rows_are_those_of_the_entries_that_the_slots_have(family, changes):
    model = turning(family=family, **changes)
    cache, expected = model.make_cache(), twin.Codebook(model.config.codec_params)
    first, *ids = sampled(model)
    model(mx.array([[first]]), cache=cache)  # installs no entry yet
    expected.push([first])
    for one in ids:
        model(mx.array([[one]]), cache=cache)
        expected.push([one])
        runs = list(expected.entries.values())
        padded = np.array([[*run, *[PAD] * (tiny.MERGE - len(run))] for run in runs], np.uint32)
        rows = model.encode_rows(padded, np.array([len(run) for run in runs]))[1]
        np.testing.assert_allclose(np.array(cache[-1].outputs.rows)[0, : len(runs)], np.array(rows), atol=2e-5)


@pytest.mark.parametrize("policy", TURNS)
def test_a_batch_gives_what_its_sequences_give_alone(policy):
    model = turning(policy)
    texts = [sampled(model, seed, 90)[:n] for seed, n in ((0, 40), (1, 33))]
    padding = [0, 7]
    ids = mx.array([texts[0], [PAD] * 7 + texts[1]])
    for causal in (False, True):
        cache = model.make_cache(left_padding=padding)
        logits = np.array(model(ids, cache=cache, causal=causal))
        more = np.array(model(mx.array([[5], [6]]), cache=cache, causal=causal))
        for b, text in enumerate(texts):
            alone = model.make_cache()
            each = np.array(model(mx.array([text]), cache=alone, causal=causal)[0])
            np.testing.assert_allclose(logits[b, padding[b] :], each, atol=2e-4)
            np.testing.assert_allclose(more[b, 0], last_logits(model, [5 + b], alone), atol=2e-4)


@pytest.mark.parametrize(("family", "changes", "policy"), slow_but(CASES, *EACH_FORM))
@pytest.mark.parametrize("forget", [1, 9, 30])
def test_after_a_trim_slots_have_their_former_rows(policy, family, changes, forget):
    model = turning(policy, family, **changes)
    ids = sampled(model)
    cache, fresh = model.make_cache(), model.make_cache()
    model(mx.array([ids]), cache=cache)
    trim_prompt_cache(cache, forget)
    model(mx.array([ids[:-forget]]), cache=fresh)
    more = [5, VOCAB, VOCAB + SIZE - 1, 6]
    np.testing.assert_allclose(steps(model, more, cache), steps(model, more, fresh), atol=2e-4)
    assert cache[-1].books[0].entries == fresh[-1].books[0].entries


@pytest.mark.parametrize("policy", TURNS)
def test_a_saved_cache_goes_on_where_it_was(policy, tmp_path):
    model = turning(policy)
    ids = sampled(model)
    cache = model.make_cache()
    model(mx.array([ids[:-3]]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert loaded[-1].params.policy == policy
    np.testing.assert_allclose(steps(model, ids[-3:], loaded), steps(model, ids[-3:], cache), atol=1e-5)


def test_a_state_of_policy_freeze_is_saved_in_the_form_of_older_versions():
    assert "policy" not in tiny_model().make_cache()[-1].state[1]


def test_a_copy_and_its_original_go_separate_ways():
    model = turning()
    cache = model.make_cache()
    model(mx.array([sampled(model)]), cache=cache)
    twin_cache, straight = copy.deepcopy(cache), copy.deepcopy(cache)
    steps(model, [7, 8, 9, 10, 11, 12, 13, 14], twin_cache)
    np.testing.assert_array_equal(last_logits(model, [VOCAB], cache), last_logits(model, [VOCAB], straight))


def test_an_illegal_id_in_one_sequence_of_a_batch_changes_no_row():
    model = turning()
    text = sampled(model)[:30]
    cache = model.make_cache(left_padding=[0, 0])
    model(mx.array([text, text]), cache=cache)
    unharmed = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="id"):
        model(mx.array([[7, 8, 9, 10], [7, 8, 9, VOCAB + SIZE]]), cache=cache)
    more = mx.array([[VOCAB, VOCAB + 1], [VOCAB + 2, 5]])
    np.testing.assert_array_equal(np.array(model(more, cache=cache)), np.array(model(more, cache=unharmed)))


@pytest.mark.parametrize("policy", TURNS)
@pytest.mark.parametrize(("family", "changes"), slow_but(FORMS, FORMS[0]))
def test_a_step_ahead_of_the_host_emits_the_same_ids(policy, family, changes):
    """At a high temperature, so that hypertokens are read that have changed hands meanwhile."""
    model, prompt = turning(policy, family, **changes), np.array(base_ids(20), np.uint32)
    made = []
    for ahead in (False, True):
        mx.random.seed(3)
        sampler, cache = make_sampler(temp=4.0), model.make_cache()
        emitted = decode_steps(model, prompt, cache, max_steps=60, sampler=sampler, prefill_step_size=8, ahead=ahead)
        made.append([token for token, _ in emitted])
    assert made[0] == made[1]
    assert sum(one >= VOCAB for one in made[0]) > 5


@pytest.mark.slow
def test_rows_from_a_store_change_nothing():
    model = turning()
    ids = sampled(model)
    without = steps(model, ids, model.make_cache())
    model.row_source.store = RowStore()
    for _ in range(2):
        np.testing.assert_allclose(steps(model, ids, model.make_cache()), without, atol=1e-5)
    np.testing.assert_allclose(last_logits(model, ids, model.make_cache()), without[-1], atol=2e-4)


# ---- who may have one


def section(policy="lru", **changes):
    made = dict(tiny.tiny_config(compression=compression(policy), **changes)["zip2zip"])
    del made["base_model_type"]
    return made


def test_the_config_records_a_policy_and_leaves_freeze_out():
    assert ZipConfig.from_dict(section()).codec_params.policy == "lru"
    assert ZipConfig.from_dict(section()).to_dict()["compression"]["policy"] == "lru"
    assert "policy" not in ZipConfig.from_dict(section("freeze")).to_dict()["compression"]
    with pytest.raises(ConfigError, match="'mru' is not one of freeze, lru, use-count"):
        ZipConfig.from_dict(section("mru"))


def test_canonical_decoding_and_training_refuse_policies_that_evict():
    from mlx_zip.engine.sampling.canonical import CanonicalDecoding

    with pytest.raises(ConfigError, match="needs policy freeze"):
        ZipConfig.from_dict(section(canonical=True))
    with pytest.raises(ConfigError, match="needs a codebook of policy freeze, not lru"):
        CanonicalDecoding(Codebook(CodecParams(10, 2, 2, policy="lru")))(mx.array([0]), mx.zeros((1, 12)))
    with pytest.raises(DataError, match="policy freeze, not lru"):
        make_batch([], CodecParams(10, 2, 2, policy="lru"))


def test_a_cache_of_another_policy_is_refused():
    with pytest.raises(ModelError, match="other codec parameters"):
        turning("lru")(mx.array([[5]]), cache=turning("use-count").make_cache())
    with pytest.raises(ModelError, match="may differ in their start entries only"):
        ZipState([CodecParams(10, 2, 2), CodecParams(10, 2, 2, policy="lru")], [0, 0])
