"""Ids that the compressor would not have written: found exactly, and given no probability."""

import json
import math
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from mlx_zip import cli
from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.config import ZipConfig
from mlx_zip.engine.mlx.generate import batch_generate, load
from mlx_zip.engine.mlx.scoring import compress_row, score_rows
from mlx_zip.engine.sampling.canonical import CanonicalDecoding, exclude_ids, restore_likely_ids
from mlx_zip.engine.sampling.exclusions import CanonicalIds, find_excluded_ids
from mlx_zip.errors import ConfigError
from mlx_zip.evaluation.bits import measure_bits
from support import tiny, tiny_text
from support.checkpoints import write_checkpoint
from support.converting import convert
from support.evaluating import BOS, windows
from support.exporting import export
from support.generating import ENDLESS, ids, run, text
from support.slow_cases import slow_but


def canonical_model(**changes):
    return tiny.tiny_model(canonical=True, **changes)


# ---- what is excluded

STARTS = (None, ((1, 2), (1, 2, 3)), ((4, 5),), ((1, 2, 3),), ((1, 2, 3), (2, 3)), ((1, 2, 1), (2, 1), (2, 2, 2)))


@st.composite
def codecs(draw):
    """Codecs of five ids that merge and one that does not, some with entries from the start."""
    start = draw(st.sampled_from(STARTS))
    size, merge_size = draw(st.integers(len(start) if start else 0, 40)), draw(st.integers(3 if start else 1, 4))
    return CodecParams(6, size, merge_size, (0,), 0, start)


few = st.lists(st.integers(0, 5), min_size=2, max_size=60)


@given(codecs(), few)
def test_no_id_of_canonical_text_is_excluded(params, base_ids):
    book = Codebook(params)
    written = book.compress(base_ids)
    at, excluded = find_excluded_ids(book, written[:-1])
    assert [i for i, one in zip(at, excluded, strict=True) if written[i + 1] == one] == []


@given(codecs(), st.lists(few, min_size=1, max_size=3))
def test_excluded_are_exactly_the_ids_that_would_have_been_merged(params, texts):
    """By brute force: y may stand after x1 .. xn of its part if compressing all of it anew writes x1 .. xn first."""
    book, written, ends = Codebook(params), [], []
    for base_ids in texts:
        part = book.compress(base_ids)
        book.push(part)
        written += part.tolist()
        ends.append(len(written) - 1)
    at, excluded = find_excluded_ids(Codebook(params), np.array(written, np.uint32), ends[:-1])
    running, begin = Codebook(params), 0
    before = running.copy()
    for i, one in enumerate(written):
        running.push(one)
        every = [*range(params.vocab_size), *range(params.vocab_size, params.vocab_size + len(running))]
        part = written[begin : i + 1]
        base = running.expand(part).tolist()
        merged = {
            y for y in every if before.compress([*base, *running.expand([y]).tolist()])[: len(part)].tolist() != part
        }
        if i in ends[:-1]:
            merged, begin, before = set(), i + 1, running.copy()
        assert set(excluded[at == i].tolist()) == merged


def test_an_entry_that_is_installed_by_the_id_itself_excludes_nothing_behind_it():
    book = Codebook(CodecParams(10, 8, 3, (0,), 0))
    book.push([5])
    canonical = CanonicalIds(book)
    assert canonical.excluded() == []
    installed = len(book)
    book.push([5])  # installs 5 5
    assert (len(book), canonical.excluded(), canonical.forbidden_after((5,), installed)) == (1, [], [])
    assert set(canonical.forbidden_after((5,), len(book))) == {5, 10}


def test_an_id_that_ends_a_part_excludes_nothing():
    book = Codebook(CodecParams(10, 8, 3, (0,), 0))
    ids = np.array([5, 6, 7, 5], np.uint32)
    assert set(find_excluded_ids(book, ids)[0].tolist()) == {3}
    assert find_excluded_ids(book, ids, ends=(3,))[0].tolist() == []
    assert len(book) == 0


def test_the_processor_follows_a_codebook_id_by_id():
    book, read = Codebook(CodecParams(10, 30, 3, (0,), 0)), [5, 6, 7, 5, 10, 7, 5, 8, 10]
    book.push(read[:3])
    only, found = CanonicalDecoding(book), []
    for one in [None, *read[3:]]:
        if one is not None:
            book.push(one)
        logits = only(mx.array([0]), mx.zeros((1, 40)))
        found.append(np.flatnonzero(np.isinf(np.array(logits[0]))).tolist())
    at, excluded = find_excluded_ids(Codebook(book.params), np.array(read, np.uint32), ends=range(3))
    assert found == [[], *(sorted(set(excluded[at == i].tolist())) for i in range(3, len(read)))]
    assert any(found)


def test_after_another_prompt_and_after_a_rewind_it_starts_anew():
    book = Codebook(CodecParams(10, 30, 3, (0,), 0))
    book.push([5, 6, 7])
    decoding, gone = CanonicalDecoding(book), []
    for pushed in ([], [5], [8, 9, 6, 7, 5], [5]):
        book.push(pushed)
        gone.append(np.flatnonzero(np.isinf(np.array(decoding(mx.array([0]), mx.zeros((1, 40)))[0]))).tolist())
    book.rewind(3)
    gone.append(np.flatnonzero(np.isinf(np.array(decoding(mx.array([0]), mx.zeros((1, 40)))[0]))).tolist())
    book.rewind(0)
    book.push([5] * 8)
    gone.append(np.flatnonzero(np.isinf(np.array(decoding(mx.array([0]), mx.zeros((1, 40)))[0]))).tolist())
    assert [bool(excluded) for excluded in gone] == [False, True, False, True, False, False]


@pytest.mark.parametrize(("logit", "stays"), [(0.0, False), (3.6, False), (3.7, True), (60.0, True)])
def test_an_id_stays_where_excluded_ids_hold_most_of_the_probability(logit, stays):
    """Two columns of 41 are excluded, e^logit and 1; the others hold 39."""
    book = Codebook(CodecParams(11, 30, 3, (0,), 0))
    book.push([5, 6, 7])
    decoding = CanonicalDecoding(book)
    decoding(mx.array([0]), mx.zeros((1, 41)))
    book.push(5)
    logits = mx.zeros((1, 41))
    logits[0, 6] = logit  # 5 6 is an entry, 6 7 begins with 6
    gone = np.flatnonzero(np.isinf(np.array(decoding(mx.array([0]), logits)[0])))
    assert gone.tolist() == ([] if stays else [6, 12])


def test_after_an_id_that_was_excluded_only_what_it_begins_itself_counts():
    book = Codebook(CodecParams(10, 8, 3, (0,), 0, ((5, 6), (5, 6, 7))))
    apart, together = find_excluded_ids(book, np.array([5, 6, 4], np.uint32)), np.array([10, 4], np.uint32)
    assert {6, 10, 11} & set(apart[1][apart[0] == 0].tolist()) == {6}
    assert 7 not in apart[1][apart[0] == 1]
    at, excluded = find_excluded_ids(book, together)
    assert 7 in excluded[at == 0]


# ---- generation


@pytest.mark.parametrize("temp", slow_but([0.0, 1.0], 1.0))
def test_generated_ids_are_those_of_the_compressor_but_where_the_model_is_set_on_others(temp):
    def generated(model):
        """Ids, and the least probability that excluded ids had where one of them was taken."""
        found = ids(run(model, max_tokens=250, temp=temp, seed=1))
        book = Codebook(model.config.codec_params)
        prompt = book.compress(tiny.base_ids(50))
        book.push(prompt)
        at, excluded = find_excluded_ids(book, np.array(found, np.uint32))
        cache, feed, least = model.make_cache(), prompt.tolist(), 1.0
        for i, one in enumerate(found):
            logits = tiny.last_logits(model, feed, cache).astype(np.float64)
            gone = excluded[at == i - 1]
            if one in gone:
                share = np.exp(np.logaddexp.reduce(logits[np.unique(gone)]) - np.logaddexp.reduce(logits))
                least = min(least, share)
            feed = [one]
        return found, least

    found, least = generated(canonical_model())
    assert max(found) >= tiny.VOCAB
    assert least > 0.5
    assert generated(tiny.tiny_model())[1] < 0.5  # or the test could not fail


def test_greedy_takes_the_likeliest_of_the_ids_that_are_left():
    model, book = canonical_model(), Codebook(tiny.tiny_model().config.codec_params)
    book.push(book.compress(tiny.base_ids(50)))
    cache, feed = model.make_cache(), book.ids.tolist()
    only = CanonicalDecoding(cache[-1].books[0])
    for token in ids(run(model, max_tokens=60)):
        logits = only(mx.array(feed), mx.array(tiny.last_logits(model, feed, cache))[None])
        assert int(mx.argmax(logits)) == token
        feed = [token]


@pytest.mark.slow
def test_in_mlx_lms_own_loop_it_is_a_logits_processor():
    model = canonical_model()
    cache = model.make_cache()
    prompt = Codebook(model.config.codec_params).compress(tiny.base_ids(50))
    steps = generate_step(
        mx.array(prompt.astype(np.int32)),
        model,
        max_tokens=60,
        prompt_cache=cache,
        logits_processors=[CanonicalDecoding(cache[-1].books[0])],
    )
    found = [token for token, _ in steps]
    assert ids(run(model, max_tokens=500))[:60] == found
    assert ids(run(tiny.tiny_model(), max_tokens=500))[:60] != found


def test_where_nothing_but_an_excluded_id_may_be_chosen_it_is_chosen():
    def one_id_alone(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) == 7, logits, -mx.inf)

    responses = run(canonical_model(), max_tokens=12, logits_processors=[one_id_alone])
    assert ids(responses) == [7] * 12
    assert all(np.isfinite(float(response.logprobs[7])) for response in responses)


def test_a_batch_gives_the_same_texts():
    model, prompts = canonical_model(), [tiny.base_ids(50), tiny.base_ids(20, 3)]
    one_by_one = [text(run(model, prompt=prompt)) for prompt in prompts]
    assert batch_generate(model, ENDLESS, prompts, 40) == one_by_one


# ---- scoring


@pytest.mark.parametrize("most", [0.5, 0.002])
def test_excluded_ids_have_no_probability_and_the_others_share_it(most, monkeypatch):
    """Against one id a call, its logits masked by brute force unless those hold most; at 0.002 some do."""
    monkeypatch.setattr("mlx_zip.engine.sampling.canonical.MAX_EXCLUDED_SHARE", most)
    model, window = canonical_model(), windows(60).windows[0]
    row = compress_row(model, np.array([BOS], np.uint32), window.base_ids)
    book, cache, expected = Codebook(model.config.codec_params), model.make_cache(), []
    for i, target in enumerate(row.ids[1:].tolist()):
        x = int(row.ids[i])
        before = book.copy()
        book.push(x)
        logits = tiny.last_logits(model, [x], cache).astype(np.float64)
        every = [*range(tiny.VOCAB), *range(tiny.VOCAB, tiny.VOCAB + len(book))]
        base = book.expand([x]).tolist()
        gone = [y for y in every if i and before.compress([*base, *book.expand([y]).tolist()])[0] != x]  # bos: a part
        p = np.exp(logits - np.logaddexp.reduce(logits))
        logits[gone] = -math.inf if p[gone].sum() <= most else logits[gone]
        expected.append(logits[target] - np.logaddexp.reduce(logits))
    np.testing.assert_allclose(score_rows(model, [row])[0].logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_canonical_text_never_gets_less_likely(batch_size, monkeypatch):
    found, limited, free = windows(60, 41, 52), canonical_model(), tiny.tiny_model()
    better, before = (measure_bits(model, found, batch_size).bits for model in (limited, free))
    assert (better <= before).all()
    assert better.sum() < before.sum()
    monkeypatch.setattr("mlx_zip.engine.mlx.scoring.LOGITS", 1 << 8)  # a few columns per call
    np.testing.assert_allclose(measure_bits(limited, found, batch_size).bits, better, rtol=1e-5)


def test_after_the_end_of_a_part_every_id_may_stand():
    model = canonical_model()
    part = np.array([5, 6, 7, 5], np.uint32)
    parts = compress_row(model, part, np.array([6, 9], np.uint32))
    assert parts.breaks == (3,)
    assert np.isfinite(score_rows(model, [parts])[0].logprobs).all()


# ---- config


def test_the_config_says_so_and_reads_it_back():
    config = canonical_model().config
    assert config.to_dict()["canonical"] is True
    assert ZipConfig.from_dict(config.to_dict()) == config
    assert "canonical" not in tiny.tiny_model().config.to_dict()
    with pytest.raises(ConfigError, match="canonical must be true or false, got 'yes'"):
        ZipConfig.from_dict({**config.to_dict(), "canonical": "yes"})


def test_loading_may_choose_otherwise_than_the_config():
    folder = tiny_text.converted("llama_transformer_tied_lora")
    assert [load(str(folder), canonical=chosen)[0].config.canonical for chosen in (None, True, False)] == [
        False,
        True,
        False,
    ]


def test_a_converted_model_keeps_what_its_config_says_until_it_is_converted_otherwise(tmp_path):
    write_checkpoint(tmp_path / "src")
    first = convert(tmp_path / "src", tmp_path / "first", canonical=True)
    second = convert(first, tmp_path / "second")
    third = convert(second, tmp_path / "third", canonical=False)
    assert [load(str(folder))[0].config.canonical for folder in (first, second, third)] == [True, True, False]


def test_exporting_leaves_it_out_with_a_warning(tmp_path):
    write_checkpoint(tmp_path / "src")
    model = convert(tmp_path / "src", tmp_path / "model", canonical=True)
    with pytest.warns(UserWarning, match="not canonical too"):
        out = export(model, tmp_path / "out")
    assert "canonical" not in json.loads((out / "zip2zip_config.json").read_text())


# ---- commands


@pytest.mark.parametrize("flag", ["--canonical", "--no-canonical"])
def test_generate_and_evaluate_take_the_flag(flag, tmp_path, capsys, monkeypatch):
    folder = tiny_text.converted("llama_transformer_tied_lora")
    chosen, loading = [], load
    noting = lambda *a, canonical, **k: chosen.append(canonical) or loading(*a, **k)
    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "load", noting)
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", noting)
    assert cli.main(["generate", "--model", str(folder), "-m", "2"]) == 0
    assert cli.main(["generate", "--model", str(folder), "-m", "2", flag]) == 0
    (tmp_path / "text.txt").write_text("The cat sat on the mat.")
    data = ["--data", str(tmp_path / "text.txt")]
    assert cli.main(["evaluate", "--model", str(folder), *data, flag]) == 0
    assert chosen == [None, flag == "--canonical", flag == "--canonical"]


def test_an_evaluation_says_whether_other_ids_had_probability(tmp_path, capsys):
    folder = tiny_text.converted("llama_transformer_tied_lora")
    (tmp_path / "text.txt").write_text("The cat sat on the mat. The cat sat on the mat.")
    file = tmp_path / "record.json"
    flags = ["--model", str(folder), "--data", str(tmp_path / "text.txt"), "--out", str(file)]
    bits = {}
    for flag in ("--canonical", "--no-canonical"):
        assert cli.main(["evaluate", *flags, flag]) == 0
        (model,) = json.loads(file.read_text())["models"]
        assert model["canonical"] == (flag == "--canonical")
        bits[flag] = model["text"]["bits_per_byte"]
    assert bits["--canonical"] < bits["--no-canonical"]
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "canonical dec" in line] == [
        "yes",
        "no",
    ]


@pytest.mark.parametrize("excluded", [[3], [3, 3, 7], [0, 1, 2, 5, 9], list(range(12))])
def test_excluding_in_few_operations_equals_excluding_plainly(excluded):
    rng = np.random.default_rng(len(excluded))
    found, expected = [], []
    for scale in (0.1, 1.0, 5.0):
        logits = mx.array(rng.normal(0, scale, (1, 13)).astype(np.float32))
        closed = mx.array(logits)
        closed[:, mx.array(sorted(set(excluded)))] = -mx.inf
        found.append(np.array(exclude_ids(logits, [excluded])))
        expected.append(np.array(restore_likely_ids(closed, logits)))
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))


def test_rows_of_a_batch_exclude_what_each_would_alone():
    logits = mx.array(np.random.default_rng(1).normal(0, 2, (4, 13)).astype(np.float32))
    excluded = [[3, 5, 5], [], [2], [0, 1, 4, 6]]
    together = np.array(exclude_ids(logits, excluded, never=12))
    for row, own in enumerate(excluded):
        alone = exclude_ids(logits[row : row + 1], [own])
        np.testing.assert_array_equal(together[row], np.array(alone)[0])
    assert exclude_ids(logits, [[], [], [], []], never=12) is logits
