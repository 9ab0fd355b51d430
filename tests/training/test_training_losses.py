"""The losses of a batch: equal to a slow reference, position by position, and to what generation sees."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import Codebook, CodecParams
from mlx_zip.engine.mlx.scoring import score_rows
from mlx_zip.engine.sampling.exclusions import find_excluded_ids
from mlx_zip.engine.scored import Compressed
from mlx_zip.errors import DataError
from mlx_zip.packs.pack import Pack
from mlx_zip.training.prepare.shards import Sample
from mlx_zip.training.steps.batches import make_batch, round_up_size
from mlx_zip.training.steps.forward_pass import encode_hyper_rows, run_forward_pass
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import to_mlx_arrays
from mlx_zip.training.trainer import Trainer
from support.slow_cases import slow_but
from support.tiny import ENCODERS, base_ids, tiny_config, tiny_model
from support.tiny_training import make_sample, random_model

START = ((5, 6), (6, 7, 8), (9, 9), (30, 31, 32, 33))
FAMILIES = ["llama", "gemma2", "phi3"]
MODES = ["compressed", "base_token_end"]


def samples_for(model: Any, lengths: tuple[int, ...] = (22, 40, 19, 9)) -> list[Sample]:
    """Samples of different lengths; some begin with a codebook of their own, some positions do not count."""
    params = model.config.codec_params
    made = []
    for i, length in enumerate(lengths):
        start = START[: 1 + i] if i % 2 else None
        made.append(make_sample(params, base_ids(length, seed=i), start, masked=[2, 3 + i]))
    return made


def reference(model: Any, sample: Sample, availability: str) -> tuple[float, float]:
    """(nats, count) of one sample, one id at a time through the cache, normalised in float64."""
    params = sample.params(model.config.codec_params)
    whole = Codebook(params)
    whole.push(sample.ids[:-1])
    rows = np.array(model.encode_rows(*whole.padded_entries(0, len(whole)))[1]) if len(whole) else np.zeros((0, 1))
    cache = model.make_cache(pack=params.start)
    nats, count = 0.0, 0.0
    for i, target in enumerate(sample.ids[1:].tolist()):
        logits = legacy_logits if availability == "legacy" else causal_logits
        row = logits(model, int(sample.ids[i]), cache, rows).astype(np.float64)
        row -= row.max()
        weight = float(sample.mask[i + 1])
        nats += weight * float(np.log(np.exp(row).sum()) - row[target])
        count += weight
    return nats, count


def causal_logits(model: Any, token: int, cache: Any, rows: np.ndarray) -> np.ndarray:
    """What generation sees: the public call."""
    return np.array(model(mx.array([[token]]), cache=cache)[0, -1])


def legacy_logits(model: Any, token: int, cache: Any, rows: np.ndarray) -> np.ndarray:
    """The same hidden state against every entry of the whole sample."""
    kv, state = model.split_cache(cache)
    ids = np.array([[token]], np.uint32)
    state.advance(ids)
    hidden = model.run_body(kv, state, ids)
    base = model.model.embed_tokens.as_linear(hidden) if model.traits.tied else model.lm_head(hidden)
    parts = [model.soft_cap_logits(base)[..., : model.layout.vocab_size]]
    if len(rows):
        parts.append(model.soft_cap_logits(hidden @ mx.array(rows).T))
    return np.array(mx.concatenate(parts, axis=-1)[0, -1])


def sums(model: Any, samples: list[Sample], availability: str = "causal", long: bool = False) -> dict[str, float]:
    by_base = model.config.position_mode == "base_token_end"
    batch = make_batch(samples, model.config.codec_params, availability=availability, base_positions=by_base)
    found = Trainee(model, LossWeights()).losses(to_mlx_arrays(batch), long)
    return {name: float(value.item()) for name, value in found.items()}


def assert_like_the_reference(model: Any, samples: list[Sample], availability: str, long: bool = False) -> None:
    found = sums(model, samples, availability, long)
    if long:  # from the first id on, as a whole sample that ends beyond the original context
        model.traits = replace(model.traits, long_context=0)
    expected = np.sum([reference(model, sample, availability) for sample in samples], axis=0)
    assert found["count"] == expected[1]
    assert found["nats"] == pytest.approx(expected[0], rel=2e-5)


@pytest.mark.parametrize("availability", slow_but(["causal", "legacy"], "causal"))
@pytest.mark.parametrize("tie_encoders", slow_but([False, True], False))
@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_loss_equals_the_reference_for_every_encoder(encoder, tie_encoders, availability):
    model = random_model(tiny_config("llama", encoder), tie_encoders=tie_encoders)
    assert_like_the_reference(model, samples_for(model), availability)


CELLS = list(product(FAMILIES, MODES, ["causal", "legacy"]))
QUICK = [("llama", "compressed", "legacy"), ("llama", "base_token_end", "causal")]  # and every encoder, with the rest


@pytest.mark.parametrize(("family", "mode", "availability"), slow_but(CELLS, *QUICK))
def test_the_loss_equals_the_reference_for_every_family_and_position_mode(family, mode, availability):
    model = tiny_model(family, "transformer", position_mode=mode)
    lengths = (26, 30, 21, 9) if family == "phi3" else (22, 40, 19, 9)  # within LongRoPE's original context
    assert_like_the_reference(model, samples_for(model, lengths), availability)


@pytest.mark.parametrize("tie_encoders", slow_but([False, True], True))
@pytest.mark.parametrize("encoder", slow_but(["transformer", "res_latent_attn"], "transformer"))
def test_the_loss_equals_the_reference_with_tied_embeddings(encoder, tie_encoders):
    model = random_model(tiny_config("gemma2", encoder), tie_encoders=tie_encoders)
    assert model.traits.tied
    assert_like_the_reference(model, samples_for(model), "causal")


@pytest.mark.parametrize("mode", slow_but(MODES, "base_token_end"))
def test_longrope_uses_its_long_factors_for_samples_that_leave_the_original_context(mode):
    model = tiny_model("phi3", position_mode=mode)
    samples = samples_for(model, (90, 20))
    short = sums(model, samples)["nats"]
    assert abs(sums(model, samples, long=True)["nats"] - short) > 1e-2
    assert_like_the_reference(model, samples, "causal", long=True)


def test_a_models_own_starting_codebook_is_open_from_the_first_position():
    model = tiny_model("llama", "transformer", start=[list(entry) for entry in START])
    samples = [make_sample(model.config.codec_params, [5, 6, 6, 7, 8, 9, 9, 5, 6, 30, 31, 32, 33])]
    assert samples[0].ids[0] == model.config.vocab_size
    assert_like_the_reference(model, samples, "causal")


def test_protected_ids_stay_single_and_cost_what_the_reference_says():
    section = tiny_config()["zip2zip"]["compression"]
    protected = {**section, "disabled_ids": [0, 1, 2, *range(10, 20)]}
    model = tiny_model("llama", "transformer", compression=protected)
    ids = [5, 12, 13, 5, 12, 13, 5, 6, 5, 6, 5, 6, 12, 12, 12, 12, 0, 5, 6]
    sample = make_sample(model.config.codec_params, ids)
    assert sample.ids.tolist().count(12) == ids.count(12)
    assert max(sample.ids) >= model.config.vocab_size
    assert_like_the_reference(model, [sample], "causal")


@pytest.mark.parametrize("availability", ["causal", "legacy"])
def test_a_batch_costs_the_sum_of_its_samples(availability):
    model = tiny_model("llama", "res_latent_attn")
    samples = samples_for(model)
    together = sums(model, samples, availability)
    alone = [sums(model, [sample], availability) for sample in samples]
    assert together["count"] == sum(found["count"] for found in alone)
    assert together["nats"] == pytest.approx(sum(found["nats"] for found in alone), rel=1e-5)


def test_entries_that_samples_have_in_common_are_encoded_once_and_cost_the_same():
    model = tiny_model()
    sample = samples_for(model)[0]
    batch = make_batch([sample, sample, sample], model.config.codec_params)
    assert batch.installed == 3 * batch.distinct
    assert sums(model, [sample] * 3)["nats"] == pytest.approx(3 * sums(model, [sample])["nats"], rel=1e-5)


def test_padding_changes_nothing():
    model = tiny_model()
    batch = make_batch(samples_for(model), model.config.codec_params)
    arrays = dict(batch.arrays)
    tail = {
        "entries": 7,
        "lengths": 7,
        "read": 5,
        "slots": 9,
        "available": 6,
        "inputs": 6,
        "targets": 6,
        "weights": 6,
        "input_rows": 6,
    }
    filler = {"lengths": 1, "input_rows": -1}
    for name, more in tail.items():
        axis = 0 if name in ("entries", "lengths", "read") else 1
        widths = [(0, more if i == axis else 0) for i in range(arrays[name].ndim)]
        arrays[name] = np.pad(arrays[name], widths, constant_values=filler.get(name, 0))
    trainee = Trainee(model, LossWeights())
    before = trainee.losses(to_mlx_arrays(batch))
    after = trainee.losses(to_mlx_arrays(replace(batch, arrays=arrays)))
    assert {k: v.item() for k, v in after.items()} == pytest.approx({k: v.item() for k, v in before.items()}, rel=1e-6)


def test_positions_that_do_not_count_are_left_out():
    model = tiny_model()
    params = model.config.codec_params
    ids = base_ids(24, seed=3)
    whole, none = make_sample(params, ids), make_sample(params, ids)
    none.mask[:] = False
    assert sums(model, [none]) == {"nats": 0.0, "count": 0.0}
    parts = []
    for i in range(1, len(whole.ids)):
        only = make_sample(params, ids)
        only.mask[:] = np.arange(len(only.ids)) == i
        parts.append(sums(model, [only])["nats"])
    assert sum(parts) == pytest.approx(sums(model, [whole])["nats"], rel=1e-5)


def test_legacy_opens_more_and_so_costs_more():
    model = tiny_model()
    samples = samples_for(model)
    assert sums(model, samples, "legacy")["nats"] > sums(model, samples, "causal")["nats"] + 1


def test_a_target_that_is_not_open_yet_is_refused():
    model = tiny_model()
    ids = np.array([5, model.config.vocab_size, 6], np.uint32)  # KwKwK: it would create itself
    with pytest.raises(DataError, match="prepare the data again"):
        make_batch([Sample(ids, np.ones(3, np.bool_), 4, 4)], model.config.codec_params)


def test_a_codec_without_codebook_makes_plain_batches():
    params = replace(tiny_model().config.codec_params, codebook_size=0)
    batch = make_batch([make_sample(params, [5, 6, 5, 6, 5])], params)
    assert batch.arrays.keys() == {"inputs", "targets", "weights"}
    assert batch.arrays["inputs"][0, :4].tolist() == [5, 6, 5, 6]


@pytest.mark.parametrize("n", [1, 8, 9, 64, 65, 100, 1000, 1025, 5000])
def test_padded_sizes_recur_and_are_at_most_an_eighth_or_seven_too_long(n):
    assert n <= round_up_size(n) <= max(n + 7, 1.125 * n)
    assert round_up_size(round_up_size(n)) == round_up_size(n)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [20, 33, 34, 45, 90])
def test_the_loop_chooses_longrope_factors_as_generation_does_for_the_whole_sample(length, mode):
    model = tiny_model("phi3", position_mode=mode)
    sample = make_sample(model.config.codec_params, base_ids(length, seed=1))
    cache = model.make_cache()
    model(mx.array(sample.ids[None, :-1]), cache=cache)
    batch = make_batch([sample], model.config.codec_params, base_positions=mode == "base_token_end")
    trainer = SimpleNamespace(trainee=Trainee(model, LossWeights()))
    assert Trainer.needs_long_factors(trainer, batch) == cache[-1].long_rope


CANONICAL = [(start, most) for start in (None, START) for most in (0.5, 0.05)]


@pytest.mark.parametrize(("start", "most"), slow_but(CANONICAL, (None, 0.05), (START, 0.5)))
def test_a_canonical_model_is_trained_on_the_probabilities_it_is_scored_with(start, most, monkeypatch):
    monkeypatch.setattr("mlx_zip.engine.sampling.canonical.MAX_EXCLUDED_SHARE", most)
    base = random_model(tiny_config("llama", "res_latent_attn"))
    model = random_model(
        {**(config := tiny_config("llama", "res_latent_attn")), "zip2zip": {**config["zip2zip"], "canonical": True}}
    )
    samples = [make_sample(model.config.codec_params, base_ids(n, seed=i), start) for i, n in enumerate((60, 41, 50))]
    batch = make_batch(samples, model.config.codec_params, canonical=True)
    found = Trainee(model, LossWeights()).losses(to_mlx_arrays(batch))
    rows = [Compressed(sample.ids, np.ones(len(sample.ids), np.int64), start and Pack(start)) for sample in samples]
    nats, free = (-sum(float(one.logprobs.sum()) for one in score_rows(m, rows)) for m in (model, base))
    assert float(found["nats"].item()) == pytest.approx(nats, rel=2e-5)
    assert nats < free
    without = to_mlx_arrays(make_batch(samples, model.config.codec_params))
    assert float(Trainee(model, LossWeights()).losses(without)["nats"].item()) == pytest.approx(free, rel=2e-5)
    held = held_by_excluded(model, to_mlx_arrays(batch))
    assert ((held > most).sum(), (held > 0).sum()) > (0, 0)


def held_by_excluded(model: Any, arrays: dict[str, mx.array]) -> np.ndarray:
    """The probability of all that is excluded at each position, added up one pair at a time."""
    out = run_forward_pass(model, arrays, encode_hyper_rows(model, arrays))
    is_open = np.arange(out.hyper.shape[-1]) < np.array(arrays["available"])[..., None]
    logits = np.concatenate([np.array(out.base), np.where(is_open, np.array(out.hyper), -np.inf)], axis=-1)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    held = np.zeros(shares.shape[0] * shares.shape[1])
    for at, column in zip(arrays["excluded_at"].tolist(), arrays["excluded"].tolist(), strict=True):
        if at < len(held):
            held[at] += shares.reshape(len(held), -1)[at, column]
    return held


def test_what_the_loss_leaves_out_and_a_broken_run_exclude_nothing():
    params = CodecParams(40, 20, 3)
    ids = Codebook(params).compress(np.array([1, 2, 1, 2, 1, 2, 5, 1, 2, 3], np.uint32))
    broken = np.concatenate([ids, [1, 2, 4]]).astype(np.uint32)  # a part that was compressed for itself
    sample = Sample(broken, np.arange(len(broken)) != 4, 13, 13)
    arrays = make_batch([sample], params, canonical=True).arrays
    pairs = set(zip(arrays["excluded_at"].tolist(), arrays["excluded"].tolist(), strict=True))
    at, column = find_excluded_ids(Codebook(params), broken[:-1])
    every = set(zip(at.tolist(), column.tolist(), strict=True))
    real = {(i, c) for i, c in pairs if i < arrays["inputs"].size}
    wrong = {i for i, c in every if broken[i + 1] == c}
    assert wrong
    assert real == {(i, c) for i, c in every if i != 3 and i not in wrong}


def test_a_codebook_that_is_open_everywhere_excludes_nothing():
    sample = make_sample(CodecParams(40, 20, 3), [1, 2] * 9)
    arrays = make_batch([sample], CodecParams(40, 20, 3), availability="legacy", canonical=True).arrays
    assert "excluded" not in arrays
