"""The CUDA graphs of a card that is pretended. See `support.pretend_card`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from support.card_tensor import CardError, place, poison, tensors_in, whole

if TYPE_CHECKING:
    from support.pretend_card import Card


class Graph:
    """A CUDA graph: the work that was captured, at the addresses that it had.

    What is computed while capturing is taken back afterwards. Memory of the graph that nobody holds may be used by
    other graphs, so it is poisoned before and after each replay.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._work: list[Callable[[], None]] = []
        self._read: dict[int, str] = {}  # memory that is not the graph's own, by address, and what reads it
        self._own: dict[int, torch.Tensor] = {}  # memory that was allocated while it was captured
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory that captured work changed, and its values
        self._kept: set[int] = set()

    def replay(self) -> None:
        """Does the work again. Raises `CardError` if a tensor that it reads is not there any more."""
        if self._card.capturing is not None:
            raise CardError("a graph is replayed while another one is captured")
        for at, name in self._read.items():
            if not self._card.lives(at):
                raise CardError(f"{name} in a graph uses memory that has been given back")
        self._card.replays += 1
        self._card.use("a graph", [], [*self._read, *self._own])
        with _disable_current_modes():
            self._poison(self._own)
            for one in self._work:
                one()
            self._poison(at for at in self._own if not self._card.lives(at))

    def note_before(self, name: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Notes what work is about to use. read, written: values."""
        for one in read:
            if place(one) not in self._own:
                self._read.setdefault(place(one), name)
        for one in written:
            if place(one) not in self._own and place(one) not in self._kept:
                self._kept.add(place(one))
                self._before.append((whole(one), whole(one).clone()))

    def note(self, run: Callable[[], Any], found: Any, fresh: Iterable[torch.Tensor]) -> None:
        """Adds work that gave `found`, of which `fresh` was allocated by it."""
        self._own |= {place(one): whole(one) for one in fresh}
        targets = list(tensors_in(found))

        def again() -> None:
            for target, value in zip(targets, tensors_in(run()), strict=True):
                if place(target) != place(value):
                    target.copy_(value)

        self._work.append(again)

    def note_memory(self, fresh: Iterable[torch.Tensor]) -> None:
        """Adds memory that nothing is written to yet."""
        self._own |= {place(one): whole(one) for one in fresh}

    def take_back(self) -> None:
        """Undoes what was computed while capturing."""
        for target, values in self._before:
            target.copy_(values)
        self._poison(self._own)

    def _poison(self, places: Iterable[int]) -> None:
        for at in places:
            poison(self._own[at])
