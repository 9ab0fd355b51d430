"""Stored responses: how many are kept, and which are forgotten."""

import logging
import os
import stat

import pytest

from mlx_zip.server.errors import RequestError, json_bytes
from mlx_zip.server.fields import new_prefixed_id
from mlx_zip.server.openai.responses_store import ResponseFiles, ResponseStore

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
    store.delete("9")
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
    assert store.resolve_references(references) == [{"type": "message", "id": "out_a"}, ITEM]
    store.add(response("b"), [ITEM])
    with pytest.raises(RequestError) as refused:
        store.resolve_references(references)
    assert (refused.value.status, refused.value.param) == (404, "input.0.id")


def test_a_server_can_be_told_to_store_nothing():
    store = ResponseStore(0, 10_000)
    store.add(response("a"), [ITEM])
    assert (len(store), store.bytes) == (0, 0)


# ---- on disk


def flush(files):
    """Waits until all writes and deletions so far are done."""
    files._thread.submit(lambda: None).result()


def opened(folder, most=100, most_bytes=10_000):
    """A store with files in a folder, and what writes them."""
    files = ResponseFiles(folder)
    return ResponseStore(most, most_bytes, files), files


def test_responses_are_there_after_a_restart_and_private(tmp_path):
    folder, names = tmp_path / "kept" / "responses", [new_prefixed_id("resp") for _ in range(3)]
    store, files = opened(folder)
    for name in names:
        store.add(response(name), [ITEM])
    store.delete(names[1])
    flush(files)
    assert {path.stem for path in folder.iterdir()} == {names[0], names[2]}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    again, _ = opened(folder)
    assert again.bytes == store.bytes
    assert again.get(names[0]).items == [ITEM]
    assert again.resolve_references([{"type": "item_reference", "id": f"out_{names[2]}"}])
    with pytest.raises(RequestError):
        again.get(names[1])


def test_the_bounds_hold_for_what_is_found_on_disk(tmp_path):
    names = [new_prefixed_id("resp") for _ in range(4)]
    store, files = opened(tmp_path / "r")
    for name in names:
        store.add(response(name), [ITEM])
        flush(files)
    again, files = opened(tmp_path / "r", most=2)
    flush(files)
    assert len(again) == 2
    assert {path.stem for path in (tmp_path / "r").iterdir()} == set(names[2:])


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"response": {"id": "resp_x", "output": []}, "items": []}', b"[" * 99999, b'{"response": 1}'],
)
def test_a_damaged_file_is_left_as_it_is_and_said(tmp_path, caplog, text):
    bad = tmp_path / f"{new_prefixed_id('resp')}.json"
    bad.write_bytes(text)
    (tmp_path / "other.json").write_bytes(b"{}")
    with caplog.at_level(logging.WARNING):
        store, _ = opened(tmp_path)
    assert len(store) == 0
    assert bad.read_bytes() == text
    assert [str(bad) in record.getMessage() for record in caplog.records] == [True]


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, caplog):
    tmp_path.chmod(0o777)
    store, files = opened(tmp_path)
    store.add(response(new_prefixed_id("resp")), [ITEM])
    flush(files)
    assert len(store) == 1
    assert list(tmp_path.iterdir()) == []
    assert "kept in memory only" in caplog.text


def test_a_pipe_in_the_folder_of_responses_is_named_and_not_read(tmp_path, caplog):
    name = new_prefixed_id("resp")
    os.mkfifo(tmp_path / f"{name}.json")
    with caplog.at_level(logging.WARNING):
        assert len(ResponseStore(9, 10_000, ResponseFiles(tmp_path))) == 0
    assert f"{name}.json is not used" in caplog.text


@pytest.mark.parametrize(
    ("items", "output"),
    [([1], []), ([], [1]), ([], {}), ([], [{"id": []}]), ([], [{"id": "a"}, {"id": "a"}]), ({}, [])],
)
def test_a_file_that_holds_no_list_of_items_is_named_and_not_used(tmp_path, caplog, items, output):
    name = new_prefixed_id("resp")
    value = {"response": {"id": name, "output": output}, "items": items}
    (tmp_path / f"{name}.json").write_bytes(json_bytes(value))
    with caplog.at_level(logging.WARNING):
        assert len(ResponseStore(9, 10_000, ResponseFiles(tmp_path))) == 0
    assert f"{name}.json is not used" in caplog.text


def test_all_responses_are_forgotten_at_once_in_memory_and_on_disk(tmp_path):
    files = ResponseFiles(tmp_path)
    store = ResponseStore(9, 10_000, files)
    for _ in range(3):
        store.add(response(new_prefixed_id("resp")), [ITEM])
    assert store.clear() == 3
    flush(files)
    assert (len(store), store.bytes, list(tmp_path.iterdir())) == (0, 0, [])


def test_a_file_that_is_too_large_is_named_with_its_limit_and_not_used(tmp_path, caplog):
    name = new_prefixed_id("resp")
    (tmp_path / f"{name}.json").write_bytes(b"[" + b"1," * 600 + b"1]")
    with caplog.at_level(logging.WARNING):
        assert len(ResponseStore(9, 1000, ResponseFiles(tmp_path))) == 0
    assert f"{name}.json is not used: it has more than 1,000 bytes" in caplog.text


@pytest.mark.parametrize("text", [b"{}", b"[]", b"1", b'{"response": 2}'])
def test_a_file_of_other_json_is_said_to_hold_no_stored_response(tmp_path, caplog, text):
    name = new_prefixed_id("resp")
    (tmp_path / f"{name}.json").write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert len(ResponseStore(9, 10_000, ResponseFiles(tmp_path))) == 0
    assert f"{name}.json is not used: it holds no stored response" in caplog.text
