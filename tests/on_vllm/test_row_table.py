"""The table of rows that the requests of a worker share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mlx_zip.vllm.rows import RowTable  # noqa: E402


def table(places: int) -> RowTable:
    return RowTable(2, places, 3, torch.float32, torch.device("cpu"))


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_an_entry_has_one_place_however_many_requests_have_it():
    rows = table(4)
    first, missing = rows.acquire(names(1, 2))
    again, nothing = rows.acquire(names(2, 1, 3))
    assert again[:2] == first[::-1]
    assert (missing, nothing) == ([0, 1], [2])
    assert 0 not in (*first, *again)
    assert rows.users == 5


def test_the_entry_that_nobody_has_used_for_longest_gives_its_place_away():
    rows = table(3)
    places, _ = rows.acquire(names(1, 2, 3))
    rows.release(places[1:])
    rows.release(rows.acquire(names(2))[0])  # 3 has been unused for longer than 2 now
    new, missing = rows.acquire(names(4))
    assert (new, missing) == ([places[2]], [0])
    assert rows.acquire(names(2)) == ([places[1]], [])


def test_a_table_grows_when_requests_need_more_places_than_it_has():
    rows = table(2)
    places, _ = rows.acquire(names(1, 2))
    rows.write(torch.tensor(places), [torch.ones(2, 3), torch.full((2, 3), 2.0)])
    more, _ = rows.acquire(names(3, 4, 5))
    assert len({*places, *more}) == 5
    assert [side[places].unique().tolist() for side in rows.tensors] == [[1.0], [2.0]]
    rows.release([*places, *more])
    assert rows.users == 0


def test_a_worker_that_needs_no_rows_keeps_names_only():
    rows = RowTable(0, 2, 3, torch.float32, torch.device("cpu"))
    places, _ = rows.acquire(names(1, 2, 3))
    assert len(set(places)) == 3
