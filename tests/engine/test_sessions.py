"""Kept sessions in memory: what a prompt finds of them, after growth, edits and branches, and what is evicted."""

import copy
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_zip.codec.ids import common_prefix_length
from mlx_zip.engine.sessions.mlx_caches import copy_prefix
from mlx_zip.engine.sessions.session_list import PrefixIndex
from mlx_zip.errors import EngineError
from mlx_zip.models.rows.zip_state import find_zip_state
from support import keeping, tiny
from support.keeping import OWN
from support.slow_cases import slow_but

NEXT = [7, 9, 11, 13, 7, 9, 11, 13, 5]
all_kinds = pytest.mark.parametrize("kind", keeping.KINDS)
trimmed_kinds = pytest.mark.parametrize("kind", keeping.TRIMMED)


def test_mlx_copies_an_array_on_write_if_another_array_shares_its_memory():
    array = mx.arange(1000)
    mx.eval(array)
    twin = copy.copy(array)
    mx.eval(twin)
    address = [np.array(one, copy=False).__array_interface__["data"][0] for one in (array, twin)]
    assert address[0] == address[1]
    twin[3] = -1
    assert (array[3].item(), twin[3].item()) == (3, -1)


def test_a_fork_of_a_kv_cache_never_changes_what_it_was_made_from():
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 10, 4)), mx.ones((1, 1, 10, 4)))
    before = np.array(cache.keys)
    for ids in (10, 6):
        (twin,) = copy_prefix([cache], ids, 10 - ids)
        twin.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
        mx.eval(twin.keys)
        assert np.array_equal(np.array(cache.keys), before)
        assert cache.offset == 10
        assert (twin.keys[0, 0, : twin.offset].sum(axis=-1) == 0).tolist() == [False] * ids + [True]


@all_kinds
def test_a_conversation_that_goes_on_reads_only_what_is_new(kind):
    store = keeping.store(kind)
    name, held = keeping.conversation(kind, store)
    found = store.checkout(held + NEXT, OWN)
    assert (found.name, found.base_tokens) == (name, len(held))
    assert store.sessions() == []  # it is with the request now


@all_kinds
def test_a_continued_session_gives_the_ids_of_one_that_was_never_kept(kind):
    store = keeping.store(kind)
    cache, prompt = keeping.new_cache(kind), tiny.base_ids(60)
    _, answer = keeping.greedy(kind, cache, prompt)
    wanted = keeping.greedy(kind, cache, NEXT)[0]
    _, held = keeping.conversation(kind, store)
    assert held == prompt + answer
    assert keeping.continued(kind, store.checkout(held + NEXT, OWN), held + NEXT) == wanted


@trimmed_kinds
@pytest.mark.parametrize("at", slow_but([3, 17, 40, 62], 17, 62))
def test_an_edited_conversation_uses_what_it_has_in_common_and_drops_nothing(kind, at):
    store = keeping.store(kind)
    _, held = keeping.conversation(kind, store)
    edited = [*held[:at], (held[at] - 3 + 1) % (tiny.VOCAB - 3) + 3, *NEXT]
    found = store.checkout(edited, OWN)
    if at < tiny.MERGE and kind not in keeping.PLAIN:  # even the first id might be another one
        assert found is None
        return
    assert at - tiny.MERGE < found.base_tokens <= at
    log = keeping.log(kind, found, edited)
    assert keeping.continued(kind, found, edited) == keeping.as_read_at_once(kind, log, edited)
    again = store.checkout(held + NEXT, OWN)
    assert again.base_tokens == len(held)
    assert again.name != found.name


@pytest.mark.parametrize("at", [2, 17, 40, 62])
def test_where_a_prompt_differs_from_the_best_session_is_told(at):
    store = keeping.store()
    _, held = keeping.conversation("zip", store)
    keeping.read("zip", short := keeping.new_cache("zip"), held[: at - 1])
    store.put(short, pack_key=OWN)
    edited = [*held[:at], (held[at] - 3 + 1) % (tiny.VOCAB - 3) + 3, *NEXT]
    found = store.find_difference(edited, OWN)
    assert (found.at, found.now) == (at, tuple(edited[at : at + 12]))
    assert 0 < len(found.kept) <= 12
    assert list(found.kept) == held[at : at + len(found.kept)]


def test_nothing_differs_where_a_prompt_goes_on_from_a_session_or_nothing_is_in_common():
    store = keeping.store()
    assert store.find_difference(NEXT, OWN) is None
    _, held = keeping.conversation("zip", store)
    other = (held[0] - 3 + 1) % (tiny.VOCAB - 3) + 3
    for prompt, pack in (
        (held + NEXT, OWN),
        (held, OWN),
        (held[:20], OWN),
        ([other, *held], OWN),
        (held[:9] + NEXT, "x"),
    ):
        assert store.find_difference(prompt, pack) is None


@trimmed_kinds
def test_the_same_prompt_asked_again_leaves_one_base_id_to_be_read_at_least(kind):
    store = keeping.store(kind)
    _, held = keeping.conversation(kind, store)
    found = store.checkout(held, OWN)
    assert len(held) - tiny.MERGE <= found.base_tokens < len(held)


def test_a_cache_that_cannot_be_trimmed_is_found_only_by_a_prompt_that_it_begins():
    kind, store = "sliding window", keeping.store("sliding window")
    _, held = keeping.conversation(kind, store)
    assert store.checkout(held[:30] + NEXT, OWN) is None
    assert store.checkout(held + NEXT, OWN).base_tokens == len(held)


def test_a_growing_conversation_is_one_session():
    store = keeping.store()
    name, held = keeping.conversation("zip", store)
    for turn in range(4):
        prompt = held + tiny.base_ids(9, seed=turn)
        found = store.checkout(prompt, OWN)
        assert found.base_tokens >= 0.95 * len(held)
        assert found.name == name
        held = prompt + keeping.greedy("zip", found.cache, prompt[found.base_tokens :])[1]
        assert store.put(found.cache, pack_key=OWN, name=found.name) == name
    (info,) = store.sessions()
    assert (info.name, info.base_tokens) == (name, len(held))


def test_two_branches_of_a_conversation_are_both_kept():
    store = keeping.store()
    name, held = keeping.conversation("zip", store)
    found = [store.checkout([*held, 3 + branch], OWN, share=True) for branch in range(2)]
    for branch, one in enumerate(found):
        keeping.read("zip", one.cache, [3 + branch])
        store.put(one.cache, pack_key=OWN, name=one.name)
    assert len(store.sessions()) == 3
    assert [store.checkout([*held, 3 + branch, 8], OWN).name for branch in range(2)] == [one.name for one in found]
    assert store.checkout(held + NEXT, OWN).name == name


def test_the_same_conversation_held_twice_is_one_session():
    store = keeping.store()
    name, _ = keeping.conversation("zip", store)
    assert keeping.conversation("zip", store)[0] == name
    assert len(store.sessions()) == 1


def test_sessions_of_another_pack_are_not_found():
    store = keeping.store()
    _, held = keeping.conversation("zip", store)
    assert store.checkout(held + NEXT, "another") is None


def test_a_kept_session_has_no_rows():
    store = keeping.store()
    _, held = keeping.conversation("zip", store)
    state = find_zip_state(store.checkout(held + NEXT, OWN).cache)
    assert state.inputs.nbytes == state.outputs.nbytes == 0
    assert len(state.books[0]) > 0


def test_the_least_recently_used_sessions_are_evicted():
    one = keeping.store()
    keeping.conversation("zip", one)
    size = one.figures()["session_bytes"]
    store = keeping.store(max_bytes=3 * size + size // 2)
    held = [keeping.conversation("zip", store, seed)[1] for seed in range(3)]
    first = store.checkout(held[0] + NEXT, OWN)
    store.put(first.cache, pack_key=OWN, name=first.name)
    held.append(keeping.conversation("zip", store, 3)[1])
    found = [store.checkout(ids + NEXT, OWN, share=True) for ids in held]
    assert [one is not None and one.base_tokens == len(ids) for one, ids in zip(found, held, strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    assert store.figures()["session_bytes"] <= 3 * size + size // 2


def test_answers_are_found_in_all_sessions_also_while_a_request_has_them():
    store = keeping.store()
    name, held = keeping.conversation("zip", store, answers={"one": [3, 4]})
    store.note_answer(name, "two", held[5:9])
    other, _ = keeping.conversation("zip", store, seed=1, answers={"three": [5]})
    assert dict(store.answers()) == {"one": (3, 4), "two": tuple(held[5:9]), "three": (5,)}
    found = store.checkout(held + NEXT, OWN)
    assert store.answers()["two"] == tuple(held[5:9])
    store.put(found.cache, pack_key=OWN, name=found.name)
    store.drop(other)
    assert set(store.answers()) == {"one", "two"}
    branch = store.checkout(held[: 9 + tiny.MERGE] + NEXT, OWN)
    store.drop(name)
    assert set(store.answers()) == {"two"}  # the one that the branch holds
    store.release(branch.name)
    assert len(store.answers()) == 0


def test_an_unknown_session_cannot_be_dropped_and_a_purge_forgets_all():
    store = keeping.store()
    with pytest.raises(EngineError, match="there is no session 'x'"):
        store.drop("x")
    for seed in range(3):
        _, held = keeping.conversation("zip", store, seed)
    assert store.purge() == 3
    assert store.sessions() == []
    assert store.figures()["session_bytes"] == 0
    assert store.checkout(held + NEXT, OWN) is None


def test_a_plain_models_cache_must_come_with_all_its_base_ids():
    store, cache = keeping.store("plain"), keeping.new_cache("plain")
    keeping.read("plain", cache, [3, 4, 5])
    with pytest.raises(EngineError, match="the cache holds 3 ids, and 2 base ids were given"):
        store.put(cache, pack_key=OWN, base_ids=[3, 4])


def test_an_empty_cache_is_not_kept():
    store = keeping.store()
    store.put(keeping.new_cache("zip"), pack_key=OWN)
    assert store.sessions() == []


def test_a_quantized_cache_goes_on_as_if_it_had_not_been_kept():
    store, cache, prompt = keeping.store("wide heads"), keeping.new_cache("wide heads"), tiny.base_ids(60)
    _, answer = keeping.greedy("wide heads", cache, prompt, bits=8)
    twin = copy.deepcopy(cache)
    store.put(cache, pack_key=OWN)
    for whole in (True, False):
        ids = prompt + answer + NEXT if whole else [*prompt[:20], *NEXT]
        found = store.checkout(ids, OWN, share=True)
        other = copy.deepcopy(twin)
        for entry in other:
            entry.trim(entry.offset - found.ids)
        rest = ids[found.base_tokens :]
        assert keeping.greedy("wide heads", found.cache, rest) == keeping.greedy("wide heads", other, rest)


# ---- the index


def longest_common(ids, others):
    return max((sum(1 for _ in _same(ids, other)) for other in others), default=0)


def _same(some, others):
    for one, other in zip(some, others, strict=False):
        if one != other:
            return
        yield one


@pytest.mark.slow
def test_the_index_finds_what_a_scan_finds_while_sequences_come_and_go():
    rng, index, held = random.Random(0), PrefixIndex(), {}
    for step in range(2000):
        ids = tuple(rng.choices((1, 2, 3), k=rng.randrange(12)))
        array = np.array(ids, np.uint32)
        depth = index.common_prefix_length(array)
        assert depth == longest_common(ids, held.values())
        prefixes = [(name, tuple(x)) for name, x in index.prefixes_of(array)]
        assert dict(prefixes) == {name: x for name, x in held.items() if ids[: len(x)] == x}
        assert [len(x) for _, x in prefixes] == sorted((len(x) for _, x in prefixes), reverse=True)
        beginning = {name: tuple(x) for name, x in index.beginning_with(array[:depth])}
        assert beginning == {name: x for name, x in held.items() if x[:depth] == ids[:depth]}
        if held and rng.random() < 0.4:
            name = rng.choice(sorted(held))
            index.remove(name, np.array(held.pop(name), np.uint32))
        else:
            held[f"{step}"] = ids
            index.add(f"{step}", np.array(ids, np.uint32))


def test_a_search_among_a_thousand_long_sessions_compares_few_of_them(monkeypatch):
    rng = np.random.default_rng(0)
    system, index, sessions = rng.integers(0, 30000, 500), PrefixIndex(), []
    for number in range(1000):
        sessions.append(np.concatenate([system, rng.integers(0, 30000, 1500)]).astype(np.uint32))
        index.add(str(number), sessions[-1])
    compared = []
    compare = lambda held, ids: compared.append(held) or common_prefix_length(held, ids)
    monkeypatch.setattr("mlx_zip.engine.sessions.session_list.common_prefix_length", compare)
    assert index.common_prefix_length(sessions[700][:1990]) == 1990
    assert [name for name, _ in index.beginning_with(sessions[700][:1990])] == ["700"]
    assert len(compared) <= 4
