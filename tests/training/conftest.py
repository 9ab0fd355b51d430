"""Fixtures of several files about preparing data and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_zip.layout import has_hypertokens
from mlx_zip.training import run as run_module
from support.prepared import stories, texts
from support.tiny_training import arrays_of
from support.trained import logits


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `train` is about to save, before LoRA layers are folded in."""
    seen: dict[str, Any] = {}

    def look(write: Any, position: int) -> Any:
        def looking(*args: Any, **named: Any) -> Any:
            model = args[position]
            model.eval()
            seen["model"], seen["weights"] = model, arrays_of(model)
            if has_hypertokens(model):
                seen["logits"] = logits(model)
            return write(*args, **named)

        return looking

    monkeypatch.setattr(run_module, "save_model_folder", look(run_module.save_model_folder, 1))
    monkeypatch.setattr(run_module, "save_adapter_folder", look(run_module.save_adapter_folder, 1))
    return seen


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Forty stories as JSON lines."""
    return texts(tmp_path / "data.jsonl", stories(40))
