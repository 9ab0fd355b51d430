"""Ends a training run at a given step."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_zip.training.trainer import Trainer


def crash_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process dies, so to speak, once so many steps are done and told."""
    whole = Trainer._report

    def report(self: Trainer, *args: Any) -> None:
        whole(self, *args)
        if self.progress.step == step:
            raise RuntimeError("crashed")

    monkeypatch.setattr(Trainer, "_report", report)
