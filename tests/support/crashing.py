"""Ends a training run at a given step."""

from __future__ import annotations

import pytest

from mlx_zip.training.trainer import Trainer


def crash_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process dies, so to speak, once so many steps are done and told."""
    whole = Trainer.report

    def report(self: Trainer) -> str:
        figures = whole(self)
        if self.progress.step == step:
            raise RuntimeError("crashed")
        return figures

    monkeypatch.setattr(Trainer, "report", report)
