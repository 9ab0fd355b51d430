"""Ends a training run at a given step."""

from __future__ import annotations

import pytest

from mlx_zip.training.trainer import Trainer


def crash_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ends the run, as a crash would, once `step` steps are done and reported."""
    whole = Trainer.report

    def report(self: Trainer) -> str:
        figures = whole(self)
        if self.progress.step == step:
            raise RuntimeError("crashed")
        return figures

    monkeypatch.setattr(Trainer, "report", report)
