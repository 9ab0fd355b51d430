"""Stored responses: how many are kept, and which are forgotten."""

import pytest

from mlx_zip.server.errors import RequestError, json_bytes
from mlx_zip.server.responses_store import ResponseStore

ITEM = {"type": "message", "id": "msg_1", "role": "user", "content": "x" * 100}


def response(name):
    return {"id": name, "output": [{"type": "message", "id": f"out_{name}"}]}


def test_the_longest_unused_response_is_forgotten_first():
    store = ResponseStore(2, 10_000)
    store.add(response("a"), [ITEM])
    store.add(response("b"), [ITEM])
    store.get("a")
    store.add(response("c"), [ITEM])
    assert store.get("a").conversation == [ITEM, {"type": "message", "id": "out_a"}]
    assert store.get("c")
    with pytest.raises(RequestError):
        store.get("b")


def test_the_bytes_of_all_responses_stay_below_the_bound():
    one = len(json_bytes({"response": response("0"), "items": [ITEM]}))
    store = ResponseStore(100, 3 * one)
    for i in range(10):
        store.add(response(str(i)), [ITEM])
        assert store.bytes == len(store) * one <= 3 * one
    assert len(store) == 3
    store.drop("9")
    assert store.bytes == 2 * one


def test_a_response_larger_than_the_bound_is_not_kept_and_costs_no_other():
    store = ResponseStore(100, 400)
    store.add(response("a"), [ITEM])
    store.add(response("b"), [ITEM] * 5)
    assert len(store) == 1
    assert store.get("a")


def test_only_output_items_of_stored_responses_can_be_referred_to():
    store = ResponseStore(1, 10_000)
    references = [{"type": "item_reference", "id": "out_a"}, ITEM]
    store.add(response("a"), [ITEM])
    assert store.with_references(references) == [{"type": "message", "id": "out_a"}, ITEM]
    store.add(response("b"), [ITEM])
    with pytest.raises(RequestError) as refused:
        store.with_references(references)
    assert (refused.value.status, refused.value.param) == (404, "input.0.id")


def test_a_server_can_be_told_to_store_nothing():
    store = ResponseStore(0, 10_000)
    store.add(response("a"), [ITEM])
    assert (len(store), store.bytes) == (0, 0)
