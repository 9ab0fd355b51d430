"""What every test of the experiments begins with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_watching() -> Iterator[None]:
    """Records are made without watching the machine for two seconds first."""
    from mlx_zip.bench import recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "IDLE_S", 0.0)
        yield
