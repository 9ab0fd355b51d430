"""Ends a training run at a given step."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_zip.training.trainer import Trainer


def crash_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ends the run, as a crash would, once `step` steps are done and reported."""
    whole = Trainer._report

    def report(self: Trainer, *args: Any) -> None:
        whole(self, *args)
        if self.progress.step == step:
            raise RuntimeError("crashed")

    monkeypatch.setattr(Trainer, "_report", report)
