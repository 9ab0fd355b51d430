"""What every test of the experiments begins with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder slow: they train models and measure them."""
    for item in items:
        if item.path.parent.name == "papers":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def no_watching() -> Iterator[None]:
    """Records are made without watching the machine for two seconds first."""
    from mlx_zip.bench import recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "IDLE_S", 0.0)
        yield
