"""Requests that take their steps together: the ids of a loop that waits for each step, wherever bodies run ahead."""

import functools

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from mlx_zip.codec import compress
from mlx_zip.models.batching import filter_cache
from mlx_zip.models.two_part_step import TwoPartStep
from mlx_zip.models.zip_model import Model
from support import tiny
from support.early_reads import steps_without_row
from support.launches import count_launches
from support.slow_cases import slow_but
from support.steps import Together

STEPS, LENGTHS = 20, (40, 25, 33)
BEYOND = 30  # steps until all contexts are longer than 50 ids


def prompts_of(model):
    return [compress(model.config.codec_params, tiny.base_ids(n, seed))[0] for seed, n in enumerate(LENGTHS)]


def together(model, ahead, **options):
    return Together(model, prompts_of(model), ahead, **options)


def waiting(model, steps=STEPS):
    """The ids of a loop that waits for every step."""
    prompts = prompts_of(model)
    out = []
    for prompt in prompts:
        cache, ids = model.make_cache(), mx.array(prompt.astype(np.int32))[None]
        row = []
        for _ in range(steps):
            ids = mx.argmax(model(ids, cache=cache)[:, -1], axis=-1)[:, None]
            row.append(ids.item())
        out.append(row)
    return out


def without_border(family, mode):
    """A model whose LongRoPE factors, if it has any, never change."""
    model = tiny.tiny_model(family, position_mode=mode)
    if family == "phi3":
        model.traits = type(model.traits)(**{**vars(model.traits), "long_context": None})
    return model


@functools.cache
def waited(family, mode):
    """What the loop that waits gives, once for both ways to decode it."""
    return waiting(without_border(family, mode))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
@pytest.mark.parametrize("family", slow_but(["llama", "phi3", "gemma2"], "gemma2"))
def test_ids_are_those_of_each_prompt_alone(family, mode, ahead):
    model, expected = without_border(family, mode), waited(family, mode)
    requests = together(model, ahead)
    assert requests.run(STEPS) == expected
    assert max(map(max, expected)) >= tiny.VOCAB
    assert len(requests.cache[-1].books) == len(LENGTHS)
    together_from_the_start = steps_without_row(model, prompts_of(model), np.array(expected).T.tolist())
    joins = len(LENGTHS) - 1  # a row that joins later may need one more
    assert requests.cache[-1].second_bodies <= (together_from_the_start + joins if ahead else 0)


@pytest.mark.parametrize("ahead", slow_but([True, False], True))
@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
def test_at_longropes_switch_each_context_is_read_again_in_chunks(mode, ahead, monkeypatch):
    model, columns, run = tiny.tiny_model("phi3", position_mode=mode), [], Model.run_layers
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": 50})
    whole = together(model, ahead).run(BEYOND)
    assert whole == waiting(model, BEYOND)
    monkeypatch.setattr(Model, "run_layers", lambda self, h, *args: columns.append(h.shape[1]) or run(self, h, *args))
    requests = together(model, ahead, chunk=8)
    assert requests.run(BEYOND) == whole
    assert requests.cache[-1].long_rope
    assert max(columns) == 8
    assert sum(columns) > sum(map(len, prompts_of(model))) + BEYOND  # something was read again


@pytest.mark.parametrize("ahead", [True, False])
def test_a_row_that_ends_leaves_the_others_as_they_are(ahead):
    model = tiny.tiny_model()
    whole, requests = together(model, ahead).run(STEPS), together(model, ahead)
    found = requests.run(STEPS, end=[(4, 1), (9, 0)])
    assert found == [whole[0][:9], whole[1][:4], whole[2]]
    assert len(requests.cache[-1].books) == requests.cache[0].keys.shape[0] == 1


@pytest.mark.parametrize("ahead", slow_but([True, False], True))
def test_processors_follow_their_sequences_when_others_leave(ahead):
    model, options = tiny.tiny_model(canonical=True), {"repetition_penalty": 1.5, "presence_penalty": 0.5}
    whole = together(model, ahead, **options).run(STEPS)
    found = together(model, ahead, **options).run(STEPS, end=[(4, 0), (9, 1)])
    assert found == [whole[0][:4], whole[1][:9], whole[2]]


def test_nothing_is_left_when_the_last_sequence_has_ended():
    requests = together(tiny.tiny_model(), False)
    found = requests.run(STEPS, end=[(3, 0), (5, 1), (5, 2)])
    requests.scheduler.run_round()
    assert [len(ids) for ids in found] == [3, 5, 5]
    assert not requests.scheduler.busy


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_while_a_sequence_leaves_changes_nothing(at, monkeypatch):
    requests = together(tiny.tiny_model(), False)
    requests.run(3)
    cache, calls, leave = requests.cache, iter(range(9)), BatchKVCache.filter

    def interrupted(self, indices):
        if next(calls) == at:
            raise KeyboardInterrupt
        leave(self, indices)
        if next(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchKVCache, "filter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filter_cache(cache, [0, 2])
    assert len(cache[-1].books) == len(cache[-1].places.index) == 3
    assert {(entry.keys.shape[0], entry._idx) for entry in cache[:-1]} == {(3, cache[-1].offset)}


@pytest.mark.parametrize("ahead", slow_but([True, False], True))
def test_canonical_rows_are_those_of_each_row_alone(ahead):
    model = tiny.tiny_model(seed=2)
    free = together(model, ahead).run(STEPS)
    model = tiny.tiny_model(seed=2, canonical=True)
    found = together(model, ahead).run(STEPS)
    assert found == together(model, ahead, processors=[[lambda tokens, logits: logits]] * 3).run(STEPS)
    assert found == [Together(model, [prompt], ahead).run(STEPS)[0] for prompt in prompts_of(model)]
    assert found != free


@pytest.mark.parametrize("ahead", [True, False])
def test_processors_get_the_ids_that_their_row_has_read(ahead):
    model, seen = tiny.tiny_model(), [[], [], []]
    chains = [[lambda tokens, logits, own=own: own.append(tokens.tolist()) or logits] for own in seen]
    requests = together(model, ahead, processors=chains)
    requests.run(STEPS)
    for row, prompt in enumerate(prompts_of(model)):
        assert seen[row][0] == prompt.tolist()
        assert seen[row][-1] == [*prompt.tolist(), *requests.ids[row]]


@pytest.mark.parametrize("ahead", [True, False])
def test_offsets_of_kv_caches_are_plain_arrays_after_every_step(ahead):
    requests = together(tiny.tiny_model(), ahead)
    requests.run(STEPS)
    cache = requests.cache
    assert [sum(count_launches(entry.offset).values()) for entry in cache[:-1]] == [0] * (len(cache) - 1)
    assert cache[0].offset.tolist() == [cache[0]._idx - n for n in cache[-1].left_padding]


def test_outside_of_their_steps_nothing_is_left_for_the_device_to_begin_with(monkeypatch):
    requests, seen, run = together(tiny.tiny_model(), False), [], Model.run_layers
    requests.run(2)
    default = requests.cache[-1].submit
    note = lambda self, h, *args: seen.append(requests.cache[-1].submit) or run(self, h, *args)
    monkeypatch.setattr(Model, "run_layers", note)
    requests.run(4)
    assert set(seen) == {mx.async_eval}
    assert requests.cache[-1].submit is default


def test_ids_of_rows_that_have_ended_are_no_part_of_the_bodys_graph(monkeypatch):
    """An array of that graph would be on the host only when the body has ended."""
    requests, waiting_for, run = together(tiny.tiny_model(), True), [], TwoPartStep.run_body
    requests.run(2)
    requests.requests[1].cancelled = True
    monkeypatch.setattr(
        TwoPartStep, "run_body", lambda self, ids: waiting_for.append(count_launches(ids)) or run(self, ids)
    )
    for _ in range(3):
        requests.scheduler.run_round()
    assert [sum(one.values()) for one in waiting_for] == [0, 0, 0]
    assert len(requests.cache[-1].books) == 2
