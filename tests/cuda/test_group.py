"""Requests of a group and their rows, with stand-ins for the batch and the requests: who leaves when, and is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from mlx_zip.cuda.batch import RowHandles
from mlx_zip.cuda.group import CudaGroup
from mlx_zip.errors import CodecError


class Batch:
    """Notes what is asked of a batch. errors: what `update_codebooks` returns, by row. rows: names of the sequences."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[int, Exception] = {}

    def add(self, start: str) -> int:
        self.rows.append(start)
        return len(self.rows) - 1

    def remove(self, row: int) -> None:
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def book(self, row: int) -> Any:
        return SimpleNamespace(mark=lambda: 9)

    def room_left(self, row: int) -> int:
        return 50

    def wait_for_ids(self) -> list[int]:
        return [7] * len(self.rows)

    def update_codebooks(self, ids: list[int], drafts: object) -> dict[int, Exception]:
        return self.errors

    def snapshot(self, row: int) -> str:
        return f"snapshot of {self.rows[row]}"

    def trim_sequence(self, row: int, length: int) -> None:
        self.calls.append(("trim", self.rows[row], length))

    def choose_ids(self, chooser: object) -> None:
        self.calls.append(("choose_ids", *self.rows))

    def start_body(self, wait: bool) -> None:
        pass

    def draft(self, row: int) -> None:
        pass


class Request:
    """A request that goes on until it is told otherwise. fails: what counting its id raises."""

    def __init__(self, row_handles: RowHandles, name: str, fails: Exception | None = None) -> None:
        self.cache, self.fails = row_handles.add(name), fails
        self.cancelled = False
        self.submission = SimpleNamespace(constraint=None, top_logprobs=None)
        self.drafter = None
        self.takes_best_id = True
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.outgrown, self.keep, self.whole = False, True, True

    def count_chosen(self, chosen: object) -> None:
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def row_handles() -> Any:
    return RowHandles(Batch())  # type: ignore[arg-type]


@pytest.fixture
def group(row_handles):
    return CudaGroup(row_handles, 0)


def test_a_request_cancelled_before_its_first_id_leaves_at_once_with_its_whole_prompt(row_handles, group):
    first, late = Request(row_handles, "first"), Request(row_handles, "late")
    group.take_in(first)
    group.take_in(late)  # in the middle of the first one's step
    late.cancelled = True
    group.hand_ids_to_requests()
    assert group.remove_ended() == [late]
    assert (late.reason, late.cache.snapshot) == ("cancelled", "snapshot of late")
    assert [call for call in row_handles.batch.calls if call[0] == "trim"] == []
    assert row_handles.batch.rows == ["first"]


def test_a_request_cancelled_in_a_step_is_kept_without_the_id_that_was_not_delivered(row_handles, group):
    one = Request(row_handles, "one")
    group.take_in(one)
    one.cancelled = True
    group.hand_ids_to_requests()
    assert group.remove_ended() == [one]
    assert row_handles.batch.calls[1:] == [("trim", "one", 8)]
    assert one.cache.snapshot == "snapshot of one"


def test_a_request_whose_id_cannot_be_read_is_kept_as_it_was_before_the_id(row_handles, group):
    one, other = Request(row_handles, "one"), Request(row_handles, "other")
    group.take_in(one)
    group.remove_ended()
    group.take_in(other)
    row_handles.batch.errors = {0: CodecError("no such id")}
    group.hand_ids_to_requests()
    assert group.remove_ended() == [one]
    assert (str(one.error), one.cache.snapshot) == ("no such id", "snapshot of one")
    assert [call for call in row_handles.batch.calls if call[0] == "trim"] == []
    assert row_handles.batch.rows == ["other"]


@pytest.mark.parametrize("part", ["read", "follow"])
def test_a_request_that_fails_for_another_reason_is_not_kept(row_handles, group, part):
    one = Request(row_handles, "one", RuntimeError("out of memory") if part == "read" else None)
    group.take_in(one)
    if part == "follow":
        row_handles.batch.errors = {0: RuntimeError("out of memory")}
    group.hand_ids_to_requests()
    assert group.remove_ended() == [one]
    assert (str(one.error), one.whole, one.cache.snapshot) == ("out of memory", False, None)
    assert row_handles.batch.rows == []


def test_a_request_of_which_no_snapshot_can_be_taken_is_not_kept_from_another_row(row_handles, group):
    requests = [Request(row_handles, name) for name in ("one", "other")]
    for request in requests:
        group.take_in(request)
    group.remove_ended()
    group.launch_pass()
    requests[0].cancelled = True
    row_handles.batch.snapshot = lambda row: [][row]
    group.hand_ids_to_requests()
    assert group.remove_ended() == requests[:1]
    assert (requests[0].whole, requests[0].cache.row, requests[1].whole) == (False, -1, True)


def test_a_step_that_fails_gives_all_rows_back(row_handles, group):
    requests = [Request(row_handles, name) for name in ("a", "b")]
    for request in requests:
        group.take_in(request)
    group.drop_requests()
    assert (row_handles.batch.rows, group.requests, [request.cache.row for request in requests]) == ([], [], [-1, -1])


def test_a_row_that_is_released_twice_in_the_middle_of_a_step_is_given_up_once(row_handles):
    one, other = row_handles.add("one"), row_handles.add("other")
    row_handles.rows_locked = True
    for _ in range(2):
        row_handles.release(one)
    assert row_handles.batch.rows == ["one", "other"]
    row_handles.release_postponed()
    assert (row_handles.batch.rows, one.row, other.row) == (["other"], -1, 0)
    row_handles.release(one)
    assert row_handles.batch.rows == ["other"]
