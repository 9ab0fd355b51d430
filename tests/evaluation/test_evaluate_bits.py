"""Bits per byte against a slow reference: ids fed one by one, as generation does, a log-softmax at each step."""

import math
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text, llama

from mlx_zip.codec import Codebook
from mlx_zip.engine.mlx import scoring
from mlx_zip.engine.mlx.scoring import compress_row, score_rows
from mlx_zip.errors import DataError, ModelError
from mlx_zip.evaluation.bits import BitsResult, ScoredWindow, Windows, compare_bits, measure_bits, ratio_standard_error
from mlx_zip.packs.pack import Pack
from support import tiny
from support.evaluating import BOS, windows
from support.slow_cases import slow_but

START = (tuple(tiny.base_ids(2)), tuple(tiny.base_ids(3, 1)))  # what the first two windows begin with


def slow_logprobs(model, window):
    """Log-probability of each id after the bos: one id a call, the codebook's own canonical choice each time."""
    book = Codebook(model.config.codec_params)
    book.push(BOS)
    targets = book.compress(window.base_ids).tolist()
    cache, feed, out = model.make_cache(), BOS, []
    for target in targets:
        logits = tiny.last_logits(model, [feed], cache).astype(np.float64)
        out.append(logits[target] - np.logaddexp.reduce(logits))
        feed = target
    return out


def slow_bits(model, found):
    return [-sum(slow_logprobs(model, window)) / math.log(2) for window in found.windows]


def assert_equal_bits(measured, expected):
    """Per byte, as they are reported."""
    np.testing.assert_allclose(measured.bits / measured.n_bytes, expected / measured.n_bytes, rtol=0, atol=2e-5)


def plain_llama():
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict({**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40}))


def plain_gemma3():
    mx.random.seed(0)
    config = {**tiny.tiny_config("gemma3_text"), "model_type": "gemma3_text", "vocab_size": 40}
    return gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))


LLAMA = tiny.tiny_model()


# ---- equal to the slow reference


CELLS = list(product(["llama", "mistral", "gemma2", "qwen3"], ["averaging", "transformer"]))


@pytest.mark.parametrize(("family", "encoder"), slow_but(CELLS, ("llama", "averaging"), ("gemma2", "transformer")))
def test_bits_equal_those_of_ids_fed_one_by_one(family, encoder):
    model, found = tiny.tiny_model(family, encoder), windows(40, 25, 33)
    measured = measure_bits(model, found, batch_size=2)
    assert measured.hypertokens > 0
    assert_equal_bits(measured, slow_bits(model, found))


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "base_token_end"))
def test_bits_equal_those_of_ids_fed_one_by_one_across_longropes_border(mode):
    model, found = tiny.tiny_model("phi3", position_mode=mode), windows(70, 20, 45)
    measured = measure_bits(model, found, batch_size=3)
    assert_equal_bits(measured, slow_bits(model, found))


def test_bits_equal_the_reference_in_base_token_end_positions():
    model, found = tiny.tiny_model(position_mode="base_token_end"), windows(40, 25)
    assert_equal_bits(measure_bits(model, found), slow_bits(model, found))


def test_a_models_own_starting_codebook_counts_from_the_first_id_on():
    model, found = tiny.tiny_model(start=START), windows(30, 40)
    measured = measure_bits(model, found)
    assert_equal_bits(measured, slow_bits(model, found))


def test_a_starting_codebook_can_be_given_in_place_of_the_models_own():
    with_own, found = tiny.tiny_model(start=START), windows(30, 40)
    given = measure_bits(LLAMA, found, pack=Pack(START))
    assert_equal_bits(given, measure_bits(with_own, found).bits)
    assert given.ids < measure_bits(LLAMA, found).ids


def test_a_starting_codebook_that_does_not_fit_is_an_error():
    with pytest.raises(DataError, match=r"--pack.*entry 0"):
        measure_bits(LLAMA, windows(5), pack=Pack(((5, 99),)))


@pytest.mark.parametrize("make", [plain_llama, plain_gemma3])
def test_a_plain_models_bits_are_those_of_its_own_forward(make):
    model, found, expected = make(), windows(40, 25, 33), []
    for window in found.windows:
        ids = np.concatenate([[BOS], window.base_ids]).astype(np.int64)
        logits = np.array(model(mx.array(ids[None, :-1])))[0].astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        expected.append(-logprobs[np.arange(len(ids) - 1), ids[1:]].sum() / math.log(2))
    measured = measure_bits(model, found, batch_size=2)
    assert_equal_bits(measured, expected)
    assert (measured.ids, measured.base_ids, measured.hypertokens, measured.hyper_mass) == (98, 98, 0, 0)


@pytest.mark.parametrize("model", [LLAMA, plain_llama(), plain_gemma3()], ids=["zip", "llama", "gemma3"])
@pytest.mark.parametrize("logits", slow_but([1, 500, 3000], 500))
def test_calls_small_enough_for_the_memory_give_the_same_bits(monkeypatch, model, logits):
    found = windows(40, 25, 33)
    expected = measure_bits(model, found).bits
    monkeypatch.setattr(scoring, "LOGITS", logits)
    assert_equal_bits(measure_bits(model, found), expected)


@pytest.mark.parametrize("model", [LLAMA, tiny.tiny_model("phi3"), plain_llama()], ids=["llama", "phi3", "plain"])
@pytest.mark.parametrize("batch_size", slow_but([1, 2, 5, 16], 2, 16))
def test_neither_batch_size_nor_order_changes_a_windows_bits(model, batch_size):
    found = windows(40, 7, 33, 33, 1, 50)
    turned = Windows(found.windows[::-1], BOS, 0)
    expected = measure_bits(model, found, batch_size=3).bits
    assert_equal_bits(measure_bits(model, found, batch_size), expected)
    assert_equal_bits(measure_bits(model, turned, batch_size), expected[::-1])


# ---- strictness


def test_probabilities_of_base_ids_and_installed_entries_add_up_to_one():
    row = compress_row(LLAMA, np.array(tiny.base_ids(40), np.uint32))
    book, layout = Codebook(LLAMA.config.codec_params), LLAMA.layout
    logits = np.array(LLAMA(mx.array(row.ids[None].astype(np.int32)), causal=True))[0].astype(np.float64)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    for position, token in enumerate(row.ids.tolist()):
        book.push(token)
        installed = layout.vocab_size + len(book)
        assert probabilities[position, :installed].sum() == pytest.approx(1)
        assert (probabilities[position, :installed] > 0).all()
        assert (probabilities[position, installed:] == 0).all()


def test_hyper_mass_is_the_probability_of_all_hypertokens_together():
    found = windows(40)
    expected, cache, book = [], LLAMA.make_cache(), Codebook(LLAMA.config.codec_params)
    book.push(BOS)
    for token in [BOS, *book.compress(found.windows[0].base_ids).tolist()[:-1]]:
        logits = tiny.last_logits(LLAMA, [token], cache).astype(np.float64)
        expected.append(np.exp(logits[tiny.VOCAB : tiny.VOCAB + tiny.SLOTS] - np.logaddexp.reduce(logits)).sum())
    assert measure_bits(LLAMA, found).hyper_mass == pytest.approx(np.mean(expected), abs=1e-5)


def test_legacy_availability_costs_more_for_it_shares_probability_with_entries_to_come():
    found = windows(40, 50)
    causal, legacy = (measure_bits(LLAMA, found, availability=name) for name in ("causal", "legacy"))
    assert (legacy.bits > causal.bits).all()
    assert (legacy.availability, legacy.ids) == ("legacy", causal.ids)


def test_legacy_availability_is_that_of_one_call_over_the_whole_row(monkeypatch):
    found = windows(40)
    monkeypatch.setattr(scoring, "LOGITS", 1)
    row = compress_row(LLAMA, np.array([BOS], np.uint32), found.windows[0].base_ids)
    logits = np.array(LLAMA(mx.array(row.ids[None, :-1].astype(np.int32))))[0].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = -logprobs[np.arange(len(row.ids) - 1), row.ids[1:]].sum() / math.log(2)
    assert measure_bits(LLAMA, found, availability="legacy").bits[0] == pytest.approx(expected, abs=1e-4)


def test_no_id_is_used_before_an_id_has_created_it():
    book, params = Codebook(LLAMA.config.codec_params), LLAMA.config.codec_params
    for token in compress_row(LLAMA, np.array([5, 6] * 20, np.uint32)).ids.tolist():  # where LZW would use one at once
        assert token < params.vocab_size + len(book)
        book.push(token)


def test_ids_between_documents_are_read_but_cost_nothing():
    base_ids = np.array([*tiny.base_ids(20), 1, *tiny.base_ids(20, 5)], np.uint32)
    scored = np.arange(41) != 20
    packed = Windows((ScoredWindow(base_ids, scored, 40),), BOS, 0)
    costs = slow_logprobs(LLAMA, packed.windows[0])
    ends = compress_row(LLAMA, np.array([BOS], np.uint32), base_ids).ends[1:] - 1
    expected = -sum(cost for cost, end in zip(costs, ends, strict=True) if end != 21) / math.log(2)
    assert measure_bits(LLAMA, packed).bits[0] == pytest.approx(expected, abs=1e-4)


def test_a_model_whose_numbers_are_none_is_an_error_that_names_the_id():
    model = tiny.tiny_model()
    model.lm_head.weight = model.lm_head.weight * mx.nan
    with pytest.raises(ModelError, match=r"row 0: the model gives id \d+ at index 1 the log-probability nan"):
        measure_bits(model, windows(5))


def test_ids_beyond_the_models_are_an_error():
    alien = Windows((ScoredWindow(np.array([3, 41], np.uint32), np.ones(2, bool), 2),), BOS, 0)
    for model in (LLAMA, plain_llama()):
        with pytest.raises(DataError, match="id 41, the model has base ids 0 to 39"):
            measure_bits(model, alien)


def test_a_window_may_fill_the_models_positions_and_no_more():
    model = tiny.tiny_model()
    model.args.config["max_position_embeddings"] = 20
    measure_bits(model, windows(20))
    with pytest.raises(DataError, match=r"21 base ids .* do not fit the model's 20 positions"):
        measure_bits(model, windows(21))


def test_bad_arguments_are_refused():
    rows = [compress_row(LLAMA, np.array([1, 5], np.uint32))]
    with pytest.raises(ModelError, match="--batch-size"):
        score_rows(LLAMA, rows, batch_size=0)
    with pytest.raises(ModelError, match="availability 'all'"):
        score_rows(LLAMA, rows, availability="all")


# ---- what is reported


def made(bits, n_bytes, **fields):
    counts = {"base_ids": 30, "ids": 20, "hypertokens": 5, "hyper_mass": 0.2, "seconds": 2.0, "peak_bytes": 1}
    return BitsResult(np.array(bits, float), np.array(n_bytes), **{**counts, "availability": "causal", **fields})


def test_bits_per_byte_is_a_ratio_of_sums_and_byte_perplexity_its_power_of_two():
    record = made([10, 20], [10, 30]).record()
    assert (record["bits_per_byte"], record["byte_perplexity"]) == (0.75, 2**0.75)


def test_rates_and_shares_are_ratios_of_counts():
    record = made([10, 20], [10, 30]).record()
    ratios = [record[k] for k in ("compression_rate", "base_ids_per_id", "hyper_share", "bytes_per_s", "ids_per_s")]
    assert ratios == [20 / 30, 1.5, 0.25, 20.0, 10.0]


def test_counts_are_those_of_the_windows_without_their_first_id():
    measured, found = measure_bits(LLAMA, windows(40, 25)), windows(40, 25)
    books = [Codebook(LLAMA.config.codec_params) for _ in found.windows]
    ids = [book.compress(window.base_ids) for book, window in zip(books, found.windows, strict=True)]
    hyper = sum((row >= tiny.VOCAB).sum() for row in ids)
    assert (measured.base_ids, measured.ids, measured.hypertokens) == (65, sum(map(len, ids)), hyper)


def test_with_equal_bytes_the_standard_error_is_that_of_a_mean():
    values = np.array([3.0, 5.0, 10.0, 2.0])
    expected = values.std(ddof=1) / 2 / 7
    assert ratio_standard_error(values, np.full(4, 7)) == pytest.approx(expected)


def test_the_standard_error_is_about_that_of_a_bootstrap():
    rng = np.random.default_rng(0)
    weights = rng.integers(50, 150, 400)
    values = weights * rng.normal(1.0, 0.2, 400)
    draws = rng.integers(0, 400, (2000, 400))
    bootstrap = (values[draws].sum(axis=1) / weights[draws].sum(axis=1)).std()
    assert ratio_standard_error(values, weights) == pytest.approx(bootstrap, rel=0.1)


def test_one_window_has_no_standard_error():
    assert made([10], [10]).standard_error is None


def test_a_comparison_is_paired_so_that_a_constant_difference_has_no_error():
    baseline = made([10, 40, 90], [10, 10, 10])
    compared = compare_bits(made([11, 41, 91], [10, 10, 10]), baseline)
    assert compared["bits_per_byte_difference"] == pytest.approx(0.1)
    assert compared["bits_per_byte_difference_standard_error"] == pytest.approx(0, abs=1e-9)
    assert compared["bits_per_byte_relative"] == pytest.approx(3 / 140)


def test_models_measured_on_other_windows_do_not_compare():
    with pytest.raises(DataError, match="same windows"):
        compare_bits(made([1], [10]), made([1], [11]))
