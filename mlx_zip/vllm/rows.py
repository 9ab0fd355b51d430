"""`RowTable`: the hyper rows of all requests of one worker, by the base ids of their entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch


class RowTable:
    """Rows of entries on the device: one tensor [places, D] per side that this worker needs.

    sides: 0 to 2. places: initial number of places. An entry with users is never evicted; of the other entries, the
    least recently used is evicted first. If more places are needed, the tensors grow by half; their addresses may
    change, because the tensors are read outside of vLLM's graphs. Place 0 holds no entry.
    """

    def __init__(self, sides: int, places: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = [torch.zeros((1 + places, width), dtype=dtype, device=device) for _ in range(sides)]
        self._places: dict[bytes, int] = {}
        self._keys: list[bytes] = [b""]  # by place, for places used so far
        self._users = [1]  # number of users, by place
        self._unused: OrderedDict[int, None] = OrderedDict()  # places of entries without users, oldest first

    @property
    def used_places(self) -> int:
        """Number of places used so far, place 0 included."""
        return len(self._keys)

    @property
    def users(self) -> int:
        """Number of users of all entries: calls of `acquire` that were not followed by `release`, per entry."""
        return sum(self._users) - 1

    def acquire(self, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Returns the place of each entry, and the indices of the entries whose rows the caller must write there.

        Adds one user to each entry, until `release`. keys: the entries' keys in this table.
        """
        places, missing = list[int](), list[int]()
        for index, key in enumerate(keys):
            place = self._places.get(key)
            if place is None:
                place = self._new_place(key)
                missing.append(index)
            elif not self._users[place]:
                del self._unused[place]
            self._users[place] += 1
            places.append(place)
        return places, missing

    def release(self, places: Sequence[int]) -> None:
        """Removes one user from the entry at each place."""
        for place in places:
            self._users[place] -= 1
            if not self._users[place]:
                self._unused[place] = None

    def write(self, places: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Writes rows [N, D], one tensor per side, to places [N] int64."""
        for table, made in zip(self.tensors, rows, strict=True):
            table[places] = made.to(table.dtype)

    def _new_place(self, key: bytes) -> int:
        if len(self._keys) <= self._capacity:
            place = len(self._keys)
            self._keys.append(key)
            self._users.append(0)
        elif self._unused:
            place, _ = self._unused.popitem(last=False)
            del self._places[self._keys[place]]
            self._keys[place] = key
        else:
            self.tensors = [
                torch.cat([table, torch.zeros_like(table[: 1 + self._capacity // 2])]) for table in self.tensors
            ]
            return self._new_place(key)
        self._places[key] = place
        return place

    @property
    def _capacity(self) -> int:
        return len(self.tensors[0]) - 1 if self.tensors else 1 << 62
