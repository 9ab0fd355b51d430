"""Requests of a group and their rows, with stand-ins for the batch and the requests: who leaves when, and is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.group import CudaGroup  # noqa: E402
from mlx_zip.cuda.sequence import SequenceState  # noqa: E402
from mlx_zip.errors import CodecError  # noqa: E402


class NotedBatch(Batch):
    """Notes what is asked of a batch without a model. errors: what `update_codebooks` returns, by row."""

    def __init__(self) -> None:
        self.sequences, self.rows_locked = [], False
        self.kv: Any = SimpleNamespace(copy_row=lambda *rows: None, trim_row=lambda *row: None)
        self.tables: Any = self.kv
        self._outputs, self._positions_used = torch.arange(4.0), torch.arange(10, 14)
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[int, Exception] = {}

    @property
    def rows(self) -> list[Any]:
        """The names of the sequences, by row."""
        return [sequence.start for sequence in self.sequences]

    def add(self, name: Any = None) -> int:
        book: Any = SimpleNamespace(mark=lambda: 9)
        self.sequences.append(SequenceState(len(self.sequences), name, book))
        return len(self.sequences) - 1

    def room_left(self, row: int) -> int:
        return 50

    def wait_for_ids(self) -> list[int]:
        return [7] * len(self)

    def update_codebooks(self, ids: Any, drafts: Any = None) -> dict[int, Exception]:
        return self.errors

    def snapshot(self, row: int) -> Any:
        return f"snapshot of {self.rows[row]}"

    def trim_sequence(self, row: int, length: int) -> None:
        self.calls.append(("trim", self.rows[row], length))

    def choose_ids(self, chooser: Any = None, logits: bool = True) -> None:
        self.calls.append(("choose_ids", *self.rows))

    def start_body(self, wait: bool = False) -> None:
        pass

    def draft(self, row: int) -> None:
        pass


class Request:
    """A request that goes on until it is told otherwise. fails: what counting its id raises."""

    def __init__(self, batch: NotedBatch, name: str, fails: Exception | None = None) -> None:
        self.cache, self.fails = batch.sequences[batch.add(name)], fails
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
def batch() -> Any:
    return NotedBatch()


@pytest.fixture
def group(batch):
    return CudaGroup(batch, 0)


def test_a_sequence_that_moves_to_another_row_takes_its_output_and_position_along(batch):
    for name in "abc":
        batch.add(name)
    batch.remove(0)
    assert batch.rows == ["c", "b"]
    assert batch._outputs[:2].tolist() == [2, 1]
    assert batch._positions_used[:2].tolist() == [12, 11]


def test_a_request_cancelled_before_its_first_id_leaves_at_once_with_its_whole_prompt(batch, group):
    first, late = Request(batch, "first"), Request(batch, "late")
    group.take_in(first)
    group.take_in(late)  # in the middle of the first one's step
    late.cancelled = True
    group.hand_ids_to_requests()
    assert group.remove_ended() == [late]
    assert (late.reason, late.cache.kept) == ("cancelled", "snapshot of late")
    assert [call for call in batch.calls if call[0] == "trim"] == []
    assert batch.rows == ["first"]


def test_a_request_cancelled_in_a_step_is_kept_without_the_id_that_was_not_delivered(batch, group):
    one = Request(batch, "one")
    group.take_in(one)
    one.cancelled = True
    group.hand_ids_to_requests()
    assert group.remove_ended() == [one]
    assert batch.calls[1:] == [("trim", "one", 8)]
    assert one.cache.kept == "snapshot of one"


def test_a_request_whose_id_cannot_be_read_is_kept_as_it_was_before_the_id(batch, group):
    one, other = Request(batch, "one"), Request(batch, "other")
    group.take_in(one)
    group.remove_ended()
    group.take_in(other)
    batch.errors = {0: CodecError("no such id")}
    group.hand_ids_to_requests()
    assert group.remove_ended() == [one]
    assert (str(one.error), one.cache.kept) == ("no such id", "snapshot of one")
    assert [call for call in batch.calls if call[0] == "trim"] == []
    assert batch.rows == ["other"]


@pytest.mark.parametrize("part", ["read", "follow"])
def test_a_request_that_fails_for_another_reason_is_not_kept(batch, group, part):
    one = Request(batch, "one", RuntimeError("out of memory") if part == "read" else None)
    group.take_in(one)
    if part == "follow":
        batch.errors = {0: RuntimeError("out of memory")}
    group.hand_ids_to_requests()
    assert group.remove_ended() == [one]
    assert (str(one.error), one.whole, one.cache.kept) == ("out of memory", False, None)
    assert batch.rows == []


def test_a_request_of_which_no_snapshot_can_be_taken_is_not_kept_from_another_row(batch, group):
    requests = [Request(batch, name) for name in ("one", "other")]
    for request in requests:
        group.take_in(request)
    group.remove_ended()
    group.launch_pass()
    requests[0].cancelled = True
    batch.snapshot = lambda row: [][row]
    group.hand_ids_to_requests()
    assert group.remove_ended() == requests[:1]
    assert (requests[0].whole, requests[0].cache.row, requests[1].whole) == (False, -1, True)


def test_a_step_that_fails_gives_all_rows_back(batch, group):
    requests = [Request(batch, name) for name in ("a", "b")]
    for request in requests:
        group.take_in(request)
    group.drop_requests()
    assert (batch.rows, group.requests, [request.cache.row for request in requests]) == ([], [], [-1, -1])


def test_a_row_that_is_released_twice_in_the_middle_of_a_step_is_given_up_once(batch):
    one, other = (batch.sequences[batch.add(name)] for name in ("one", "other"))
    batch.rows_locked = True
    for _ in range(2):
        batch.release(one)
    assert batch.rows == ["one", "other"]
    batch.unlock_rows()
    assert (batch.rows, one.row, other.row) == (["other"], -1, 0)
    batch.release(one)
    assert batch.rows == ["other"]
