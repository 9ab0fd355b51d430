"""The decode loop of batches: the ids of a loop that waits for each step, wherever bodies run ahead."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.sample_utils import make_sampler

from mlx_zip.codec import compress
from mlx_zip.generation.canonical import CanonicalDecoding
from mlx_zip.generation.decode_batch import BatchLoop
from mlx_zip.generation.sampling import Sampling, make_processors
from mlx_zip.models.ahead import Ahead
from mlx_zip.models.launches import launches
from mlx_zip.models.zip_model import Model
from support import tiny
from support.early_reads import steps_without_row
from support.slow_cases import slow_but

STEPS, LENGTHS = 30, (40, 25, 33)


def prompts_of(model):
    return [compress(model.config.codec_params, tiny.base_ids(n, seed))[0] for seed, n in enumerate(LENGTHS)]


def loop_of(model, ahead, canonical=False, processors=None, chunk=64):
    prompts = prompts_of(model)
    width = max(map(len, prompts))
    ids = np.full((len(prompts), width), tiny.PAD, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
    cache = model.make_cache(left_padding=[width - len(prompt) for prompt in prompts])
    chains = processors or [[CanonicalDecoding(book)] if canonical else [] for book in cache[-1].books]
    loop = BatchLoop(
        model,
        cache,
        ids,
        sampler=make_sampler(0),
        processors=chains,
        prompts=[prompt.tolist() for prompt in prompts],
        pad_id=tiny.PAD,
        chunk=chunk,
        ahead=ahead,
    )
    return loop, cache


def emitted(loop, end=()):
    """The ids of all steps [STEPS, B]. end: (step, row) at which a row ends."""
    out = []
    for _, (tokens, _) in zip(range(STEPS), loop, strict=False):
        out.append(tokens)
        for row in [row for step, row in end if step == len(out)]:
            loop.end(row)
    return np.array(out)


def waiting(model):
    """The ids of a loop that waits for every step."""
    prompts = prompts_of(model)
    out = []
    for prompt in prompts:
        cache, ids = model.make_cache(), mx.array(prompt.astype(np.int32))[None]
        row = []
        for _ in range(STEPS):
            ids = mx.argmax(model(ids, cache=cache)[:, -1], axis=-1)[:, None]
            row.append(ids.item())
        out.append(row)
    return np.array(out).T


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
@pytest.mark.parametrize("family", slow_but(["llama", "phi3", "gemma2"], "gemma2"))
def test_ids_are_those_of_each_prompt_alone(family, mode, ahead):
    model = tiny.tiny_model(family, position_mode=mode)
    if family == "phi3":
        model.traits = type(model.traits)(**{**vars(model.traits), "long_context": None})
    loop, cache = loop_of(model, ahead)
    expected = waiting(model)
    np.testing.assert_array_equal(emitted(loop), expected)
    assert expected.max() >= tiny.VOCAB
    assert cache[-1].second_bodies == (steps_without_row(model, prompts_of(model), expected.tolist()) if ahead else 0)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
def test_at_longropes_switch_the_batch_is_read_again_in_chunks(mode, ahead, monkeypatch):
    model, columns, run = tiny.tiny_model("phi3", position_mode=mode), [], Model.run_layers
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": 50})
    whole = emitted(loop_of(model, ahead)[0])
    monkeypatch.setattr(Model, "run_layers", lambda self, h, *args: columns.append(h.shape[1]) or run(self, h, *args))
    loop, cache = loop_of(model, ahead, chunk=8)
    np.testing.assert_array_equal(emitted(loop), whole)
    assert cache[-1].long_rope
    assert max(columns) == 8
    assert sum(columns) > cache[-1].offset  # something was read again


@pytest.mark.parametrize("ahead", [True, False])
def test_a_row_that_ends_leaves_the_others_as_they_are(ahead):
    model = tiny.tiny_model()
    whole = emitted(loop_of(model, ahead)[0])
    loop, cache = loop_of(model, ahead)
    found = emitted(loop, end=[(4, 1), (9, 0)])
    np.testing.assert_array_equal(found[:, 2], whole[:, 2])
    np.testing.assert_array_equal(found[:9, 0], whole[:9, 0])
    assert (found[4:, 1] == tiny.PAD).all()
    assert len(cache[-1].books) == cache[0].keys.shape[0] == 1


@pytest.mark.parametrize("ahead", slow_but([True, False], True))
def test_processors_follow_their_sequences_when_others_leave(ahead):
    model, option = tiny.tiny_model(), Sampling(repetition_penalty=1.5, presence_penalty=0.5)

    def loop_with_penalties():
        loop, cache = loop_of(model, ahead)
        canonical = [[CanonicalDecoding(book)] for book in cache[-1].books]
        loop.processors = [[*make_processors(option, tiny.VOCAB, cache[-1], b), *canonical[b]] for b in range(3)]
        return loop

    whole = emitted(loop_with_penalties())
    found = emitted(loop_with_penalties(), end=[(4, 0), (9, 1)])
    np.testing.assert_array_equal(found[:, 2], whole[:, 2])
    np.testing.assert_array_equal(found[:9, 1], whole[:9, 1])


def test_a_loop_ends_with_its_last_sequence():
    loop, cache = loop_of(tiny.tiny_model(), False)
    assert len(emitted(loop, end=[(3, 0), (5, 1), (5, 2)])) == 5
    assert len(cache[-1].books) == 2  # those that were there in the last step


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_while_a_sequence_leaves_changes_nothing(at, monkeypatch):
    loop, cache = loop_of(tiny.tiny_model(), False)
    steps, calls, leave = iter(loop), iter(range(9)), BatchKVCache.filter
    for _ in range(3):
        next(steps)
    loop.end(1)

    def interrupted(self, indices):
        if next(calls) == at:
            raise KeyboardInterrupt
        leave(self, indices)
        if next(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchKVCache, "filter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert len(cache[-1].books) == len(cache[-1].places.index) == 3
    assert {(entry.keys.shape[0], entry._idx) for entry in cache[:-1]} == {(3, cache[-1].offset)}


@pytest.mark.parametrize("ahead", slow_but([True, False], True))
def test_canonical_rows_are_those_of_a_processor_per_row(ahead):
    model = tiny.tiny_model(seed=2)
    together = emitted(loop_of(model, ahead, canonical=True)[0])
    loop, cache = loop_of(model, ahead)
    loop.processors = [[CanonicalDecoding(book), lambda tokens, logits: logits] for book in cache[-1].books]
    np.testing.assert_array_equal(together, emitted(loop))
    assert (together != emitted(loop_of(model, ahead)[0])).any()


@pytest.mark.parametrize("ahead", [True, False])
def test_processors_get_the_ids_that_their_row_has_read(ahead):
    model, seen = tiny.tiny_model(), [[], [], []]
    chains = [[lambda tokens, logits, own=own: own.append(tokens.tolist()) or logits] for own in seen]
    out = emitted(loop_of(model, ahead, processors=chains)[0])
    for row, prompt in enumerate(prompts_of(model)):
        assert seen[row][0] == prompt.tolist()
        assert seen[row][-1] == [*prompt.tolist(), *out[:, row].tolist()]


@pytest.mark.parametrize("ahead", [True, False])
def test_offsets_of_kv_caches_are_plain_arrays_after_every_step(ahead):
    loop, cache = loop_of(tiny.tiny_model(), ahead)
    emitted(loop)
    assert [sum(launches(entry.offset).values()) for entry in cache[:-1]] == [0] * (len(cache) - 1)
    assert cache[0].offset.tolist() == [cache[0]._idx - n for n in cache[-1].left_padding]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("where", ["run_layers", "joint_head"])
def test_an_interrupt_leaves_the_cache_at_the_last_ids_that_were_yielded(where, ahead, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    loop, cache = loop_of(tiny.tiny_model(), ahead)
    steps = iter(loop)
    out = np.array([next(steps)[0] for _ in range(5)])
    monkeypatch.setattr(Model, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    for row, book in enumerate(cache[-1].books):
        assert book.ids.tolist() == [*prompts_of(loop.model)[row].tolist(), *out[:, row].tolist()]
    assert {entry._idx for entry in cache[:-1]} == {cache[-1].offset}


def test_a_closed_loop_leaves_nothing_for_the_device_to_begin_with():
    loop, cache = loop_of(tiny.tiny_model(), False)
    default, steps = cache[-1].submit, iter(loop)
    next(steps)
    assert cache[-1].submit is mx.async_eval
    steps.close()
    assert cache[-1].submit is default


def test_ids_of_rows_that_have_ended_are_no_part_of_the_bodys_graph(monkeypatch):
    """An array of that graph would be on the host only when the body has ended."""
    loop, _ = loop_of(tiny.tiny_model(), True)
    steps, waiting_for, run = iter(loop), [], Ahead.run
    next(steps)
    loop.end(1)
    monkeypatch.setattr(Ahead, "run", lambda self, ids: waiting_for.append(launches(ids)) or run(self, ids))
    next(steps)
    assert [sum(one.values()) for one in waiting_for] == [0]
