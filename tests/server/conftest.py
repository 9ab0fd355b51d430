"""Fixtures of several files about the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fake_engine import FakeEngine, Told
from support.http_server import Served, serving, until


@pytest.fixture(scope="module")
def server_of_the_file() -> Iterator[Served]:
    with serving(FakeEngine()) as server:
        yield server


@pytest.fixture
def served(server_of_the_file: Served) -> Iterator[Served]:
    """A server with an engine that replays one answer and was told nothing yet; started once for a file.

    A test may put another `answers` in place of the core's.
    """
    engine = server_of_the_file.core.engine
    assert isinstance(engine, FakeEngine)
    assert until(lambda: not engine.figures().running)
    engine.told = Told()
    yield server_of_the_file
    vars(server_of_the_file.core).pop("answers", None)
