"""Streams and events of a card that is pretended, and the order of their work. See `support.pretend_card`.

All work is done in the order of the calls. On a real card, work of two streams may run at the same time, unless one
waits for the other or the host waits between them. So memory must not be used by both without such a wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from support.card_tensor import CardError

if TYPE_CHECKING:
    from support.pretend_card import Card


class Stream:
    """A stream of the card. last: number of its newest work. known: the newest work of others that is done before."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.last = 0
        self.known: dict[Stream, int] = {}
        card.streams.append(self)

    @property
    def seen(self) -> dict[Stream, int]:
        """The newest work of each stream that is done before anything that follows in this one."""
        return {**self.known, self: self.last}

    def wait_stream(self, other: Stream) -> None:
        """Has what follows in this stream wait for what the other was given so far."""
        merge(self.known, other.seen)

    def synchronize(self) -> None:
        self._card.wait()
        merge(self._card.awaited, self.seen)


class Event:
    """A point in a stream."""

    def __init__(self, card: Card) -> None:
        self._card, self._at = card, 0
        self._seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._card.stream
        self._at, self._seen = self._card.queued, stream.seen

    def synchronize(self) -> None:
        self._card.wait(self._at)
        merge(self._card.awaited, self._seen)

    def elapsed_time(self, end: Event) -> float:
        """Returns milliseconds between two points that the card has reached: a thousandth for each piece of work."""
        if not self._card.reached(self._at) or not self._card.reached(end._at):
            raise CardError("the time between two events is asked for before the card has reached them")
        return 1e-3 * (1 + end._at - self._at)


class Uses:
    """Who has used which memory last. Places are addresses of memory."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, dict[Stream, int]] = {}

    def forget(self, place: int) -> None:
        """Notes that memory is new."""
        self._written.pop(place, None)
        self._read.pop(place, None)

    def note(self, card: Card, name: str, read: Iterable[int], written: Iterable[int]) -> None:
        """Notes the card's newest work, in its current stream. Raises `CardError` if another stream may be at it."""
        stream, written = card.stream, set(written)
        for place in {*read} | written:
            before = [self._written[place]] if place in self._written else []
            if place in written:
                before += self._read.pop(place, {}).items()
                self._written[place] = stream, card.queued
            else:
                self._read.setdefault(place, {})[stream] = card.queued
            for other, number in before:
                if other is not stream and max(stream.known.get(other, 0), card.awaited.get(other, 0)) < number:
                    raise CardError(f"{name} uses memory that another stream may be at: neither waits for the other")
        stream.last = card.queued


def merge(known: dict[Stream, int], more: dict[Stream, int]) -> None:
    """Adds what another one knows."""
    for stream, number in more.items():
        known[stream] = max(known.get(stream, 0), number)
