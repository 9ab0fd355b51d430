"""Starting codebooks at work: in the model, its caches, generation and the command line."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_zip import CodecError, DataError, GenerationError, ModelError, ZipState, cli
from mlx_zip.codec import CodecParams
from mlx_zip.engine.mlx.generate import batch_generate, load, stream_batch
from mlx_zip.models.decoder import Positions
from mlx_zip.packs.entries import write_entries
from support import codec_twin as twin
from support import tiny_text
from support.generating import ENDLESS, plain_model
from support.starting import MODEL, OTHER, START, TEXT, assert_close, codec, compressed, run
from support.tiny import MERGE, PAD, SLOTS, VOCAB, base_ids, last_logits, tiny_model

MODES = ["compressed", "base_token_end"]


def slow_logits(model, ids, start):
    """Logits [L, W] by hand: rows from `model.encode_rows`, availability from the plain-Python codec."""
    book, installed = twin.Codebook(codec(start)), []
    for i in ids:
        book.push([i])
        installed.append(len(book.entries))
    padded = [[*run, *[PAD] * (MERGE - len(run))] for run in book.entries.values()]
    lengths = np.array([len(run) for run in book.entries.values()])
    inputs, outputs = model.encode_rows(np.array(padded, np.uint32), lengths)
    h = mx.stack([inputs[i - VOCAB] if i >= VOCAB else model.model.embed_tokens.weight[i] for i in ids])[None]
    spans = [len(book.entries[i]) if i >= VOCAB else 1 for i in ids]
    where = np.cumsum(spans) - 1 if model.config.position_mode == "base_token_end" else np.arange(len(ids))
    h = model.run_layers(h, [KVCache() for _ in model.layers], Positions(index=mx.array(where)[None]))[0]
    logits = np.full((len(ids), model.layout.width), -np.inf, np.float32)
    logits[:, :VOCAB] = np.array(h @ model.lm_head.weight.T)[:, :VOCAB]
    for at, n in enumerate(installed):
        for slot in range(n):
            logits[at, VOCAB + slot] = float(mx.sum(h[at] * outputs[slot]))
    return logits


# ---- the model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("encoder", ["transformer", "res_latent_attn"])
def test_logits_equal_a_slow_reference_at_every_position(mode, encoder):
    model = tiny_model(encoder=encoder, position_mode=mode)
    ids = compressed(START)
    assert min(i for i in ids if i >= VOCAB) < VOCAB + len(START)  # start entries are read
    assert max(ids) >= VOCAB + len(START)  # and grown ones
    got = model(mx.array([ids]), cache=model.make_cache(pack=START), causal=True)[0]
    assert_close(got, slow_logits(model, ids, START), atol=1e-4)


def test_start_entries_are_open_before_the_first_logits_and_their_output_rows_encoded():
    cache = MODEL.make_cache(pack=START)
    logits = np.array(MODEL(mx.array([[5, 6, 7]]), cache=cache, causal=True)[0])
    opened = [int(np.isfinite(row[VOCAB : VOCAB + SLOTS]).sum()) for row in logits]
    assert opened == [len(START), len(START) + 1, len(START) + 2]
    assert cache[-1].encoded_outputs == [len(START) + 2]
    assert not cache[-1].encoded_inputs.any()


def test_an_input_row_of_a_start_entry_is_encoded_when_it_is_read():
    cache = MODEL.make_cache(pack=START)
    MODEL(mx.array([[VOCAB + 3, 5, VOCAB + 1]]), cache=cache)
    assert np.flatnonzero(cache[-1].encoded_inputs).tolist() == [1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_uses_start_entries_may_be_cut_anywhere(mode):
    model = tiny_model("phi3", position_mode=mode)
    ids = compressed(START)
    whole = last_logits(model, ids, model.make_cache(pack=START))
    for cuts in ([1], [len(ids) // 2], range(1, len(ids))):
        cache = model.make_cache(pack=START)
        for part in np.split(ids, cuts):
            pieces = last_logits(model, part.tolist(), cache)
        assert_close(pieces, whole)


def test_the_models_own_pack_is_the_default_and_an_empty_one_replaces_it():
    own = tiny_model(start=[list(entry) for entry in START])
    ids = compressed(START)
    expected = last_logits(MODEL, ids, MODEL.make_cache(pack=START))
    np.testing.assert_array_equal(last_logits(own, ids, own.make_cache()), expected)
    np.testing.assert_array_equal(np.array(own(mx.array([ids]))[0, -1]), expected)
    none = own.make_cache(pack=())
    assert len(none[-1].books[0]) == 0
    np.testing.assert_array_equal(last_logits(own, [5, 6], none), last_logits(MODEL, [5, 6], MODEL.make_cache()))


# ---- caches


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_batch_with_different_starts_equal_the_same_rows_alone(mode):
    model = tiny_model(position_mode=mode)
    starts = [START, OTHER, (), START]
    rows = [compressed(start, n, seed=n) for start, n in zip(starts, (70, 40, 69, 33), strict=True)]
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    cache = model.make_cache(left_padding=padding, pack=starts)
    batch = mx.array([[PAD] * pad + row for pad, row in zip(padding, rows, strict=True)])
    together = [model(part, cache=cache)[:, -1] for part in (batch[:, :4], batch[:, 4:])][-1]
    for row, start, got in zip(rows, starts, together, strict=True):
        assert_close(got, last_logits(model, row, model.make_cache(pack=start)), atol=3e-5)


def test_none_in_a_batchs_starts_means_the_models_own():
    own = tiny_model(start=[list(entry) for entry in START])
    state = own.make_cache(left_padding=[0, 0, 0], pack=[None, OTHER, ()])[-1]
    assert [book.params.start for book in state.books] == [START, OTHER, None]


def test_a_state_with_different_starts_has_no_one_codec():
    state = MODEL.make_cache(left_padding=[0, 0], pack=[START, OTHER])[-1]
    with pytest.raises(ModelError, match="different packs"):
        _ = state.params
    assert MODEL.make_cache(left_padding=[0, 0], pack=START)[-1].params == codec(START)


@pytest.mark.parametrize("starts", [START, [START, OTHER, ()]], ids=["one", "one per row"])
def test_a_saved_batch_goes_on_where_it_was_with_its_starts(starts, tmp_path):
    cache = MODEL.make_cache(left_padding=[0, 0, 0], pack=starts)
    MODEL(mx.array([[5, 6, 7], [8, 9, 8], [5, 6, 5]]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [book.params for book in loaded[-1].books] == [book.params for book in cache[-1].books]
    following = mx.array([[VOCAB], [9], [7]])
    assert_close(MODEL(following, cache=loaded), MODEL(following, cache=cache))


def test_a_saved_conversation_goes_on_where_it_was_with_its_start(tmp_path):
    ids, cache = compressed(START), MODEL.make_cache(pack=START)
    MODEL(mx.array([ids[:-5]]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert_close(last_logits(MODEL, ids[-5:], loaded), last_logits(MODEL, ids[-5:], cache))


def test_start_entries_outlive_a_trim_and_a_copy():
    ids, cache = compressed(START), MODEL.make_cache(pack=START)
    MODEL(mx.array([ids]), cache=cache)
    twin_cache = copy.deepcopy(cache)
    trim_prompt_cache(cache, len(ids))
    assert [run for _, run in cache[-1].books[0].entries] == list(START)
    fresh = MODEL.make_cache(pack=START)
    assert_close(last_logits(MODEL, ids[:9], cache), last_logits(MODEL, ids[:9], fresh))
    assert twin_cache[-1].params == codec(START)
    assert_close(last_logits(MODEL, [5], twin_cache), last_logits(MODEL, [*ids, 5], MODEL.make_cache(pack=START)))


def test_a_cache_may_differ_from_the_model_in_its_start_and_in_nothing_else():
    cache = MODEL.make_cache(pack=START)
    assert MODEL.split_cache(cache)[1] is cache[-1]
    others = [CodecParams(VOCAB, SLOTS, MERGE, (0, 1, 5), PAD), CodecParams(VOCAB, SLOTS - 1, MERGE, (0, 1), PAD)]
    for other in others:
        with pytest.raises(ModelError, match="other codec parameters"):
            MODEL.split_cache([*cache[:-1], ZipState(other)])
    with pytest.raises(ModelError, match="start entries only"):
        ZipState([codec(None), CodecParams(VOCAB, SLOTS, MERGE - 1, (0, 1), PAD)], [0, 0])


@pytest.mark.parametrize(
    ("start", "error", "culprit"),
    [
        ([(5, 6), (5, PAD)], CodecError, r"start entry 1 \(5, 2\)"),
        ([(5, 6), (5,)], CodecError, "start entry 1 has 1 ids"),
        ([(5, 6), ()], CodecError, "start entry 1 has 0 ids"),
        ([(5, 6), None], CodecError, "a sequence of entries"),
        ([5, 6], CodecError, "a sequence of entries"),
        ("ab", DataError, "ab"),
        (["ab", None], DataError, "ab"),
        (5, ModelError, "pack must be a path.*not int"),
        ([(5, "ab")], CodecError, "start entry id must be an integer"),
        ([[(5, 6)], [(5, 6)]], ModelError, "2 packs for 1 sequence"),
        ([(3 + i % 30, 3 + i // 30) for i in range(SLOTS + 1)], CodecError, "65 start entries do not fit"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(start, error, culprit):
    sequences = [0, 0] if start in ([5, 6], "ab", ["ab", None]) else None
    with pytest.raises(error, match=culprit):
        MODEL.make_cache(left_padding=sequences, pack=start)


# ---- generation


def favour(column, at_step=0):
    """A logits processor that makes one column win, at one step."""
    steps = iter(range(1 << 30))

    def processor(tokens, logits):
        return logits.at[:, column].add(1e4) if next(steps) == at_step else logits

    return processor


def test_the_prompt_is_compressed_with_the_requests_start_entries():
    with_start, without = run(pack=START, max_tokens=1)[0], run(max_tokens=1)[0]
    assert (with_start.prompt_tokens, with_start.prompt_ids) == (len(TEXT), len(compressed(START)))
    assert with_start.prompt_ids < without.prompt_ids


def test_greedy_ids_are_the_largest_logits_of_the_model_itself_under_the_start():
    cache, feed, expected = MODEL.make_cache(pack=START), compressed(START), []
    for _ in range(12):
        feed = [int(np.argmax(last_logits(MODEL, feed, cache)))]
        expected += feed
    made = [r.token for r in run(pack=START)]
    assert made[:12] == expected[: len(made)]
    assert len(made) > 5


def test_the_first_emitted_id_may_be_a_start_entry_and_expands_to_its_base_ids():
    responses = run(prompt=[5], pack=START, logits_processors=[favour(VOCAB + 4)])
    assert (responses[0].token, responses[0].base_ids) == (VOCAB + 4, START[4])
    assert "".join(r.text for r in responses).startswith(ENDLESS.decode(list(START[4])))
    assert responses[0].hypertokens == 1


def test_a_second_turn_goes_on_with_start_and_grown_entries():
    cache = MODEL.make_cache(pack=START)
    first = run(prompt_cache=cache, max_tokens=10)
    size = len(cache[-1].books[0])
    second = run(prompt=list(START[0] + START[1]), prompt_cache=cache, max_tokens=5)
    assert second[0].prompt_ids < len(START[0] + START[1])
    assert len(cache[-1].books[0]) >= size >= len(START)
    assert first[-1].finish_reason == second[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.5, "logit_bias": {7: 3.0}}], ids=["plain", "penalties"]
)
def test_batched_prompts_with_starts_of_their_own_equal_the_same_prompts_alone(options):
    prompts, starts = [TEXT, base_ids(20, seed=3), [5, 6, 7]], [START, OTHER, None]
    together = batch_generate(MODEL, ENDLESS, prompts, max_tokens=20, pack=starts, **options)
    for prompt, start, text in zip(prompts, starts, together, strict=True):
        alone = run(prompt=prompt, pack=start, max_tokens=20, **options)
        assert text == "".join(r.text for r in alone)


def test_one_start_serves_all_prompts_of_a_batch():
    responses = list(stream_batch(MODEL, ENDLESS, [TEXT, TEXT], max_tokens=3, pack=START))
    assert {r.prompt_ids for _, r in responses} == {len(compressed(START))}


def test_another_pack_than_the_prompt_caches_and_one_for_a_plain_model_are_refused():
    with pytest.raises(ModelError, match="begun with another pack"):
        run(pack=START, prompt_cache=MODEL.make_cache())
    with pytest.raises(GenerationError, match="no hypertokens"):
        run(model=plain_model(), pack=START)
    with pytest.raises(GenerationError, match="no hypertokens"):
        batch_generate(plain_model(), ENDLESS, [[5]], pack=START)
    with pytest.raises(ModelError, match="1 packs for 2"):
        batch_generate(MODEL, ENDLESS, [[5], [6]], pack=[START])


# ---- the command


def command(capsys, pack, *flags):
    model = str(tiny_text.converted("llama_transformer_tied_lora"))
    base = ("--prompt", "The cat sat on the mat.", "--ignore-chat-template", "-m", "5", "--json")
    status = cli.main(["generate", "--model", model, *base, "--pack", str(pack), *flags])
    return (status, *capsys.readouterr())


def test_the_command_generates_with_a_pack(capsys, tmp_path):
    model, tokenizer = load(tiny_text.converted("llama_transformer_tied_lora"))
    ids = tokenizer.encode("The cat sat on the mat.")
    write_entries(tmp_path / "pack.json", [ids[-4:-2], ids[-2:]], model.config.merge_size)
    status, out, _ = command(capsys, tmp_path / "pack.json")
    assert (status, json.loads(out)["prompt_ids"]) == (0, json.loads(out)["prompt_tokens"] - 2)


def test_a_pack_that_cannot_be_used_is_one_line_that_names_it(capsys, tmp_path):
    (tmp_path / "torn.json").write_text("[[4, ")
    write_entries(tmp_path / "foreign.json", [(40, 41), (100_000, 40)], 2)
    for name, culprit in (("none.json", "No such file"), ("torn.json", "cannot be read"), ("foreign.json", "entry 1")):
        status, out, err = command(capsys, tmp_path / name)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert name in err
        assert culprit in err
