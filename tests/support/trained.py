"""What tests of training check of a finished run: its logits, and that its folder gives what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip import Codebook, load
from mlx_zip.training.run import RunOptions
from support.checkpoints import BASE, write_json, write_tokenizer
from support.tiny_training import (
    CODEC,
    ENCODER,
    SMALL,
    TOKENS,
    text_ids,
    write_shards,
)

IDS = [int(i) for i in Codebook(CODEC).compress(np.array(text_ids(40, 77), np.uint32))]


def logits(model: Any) -> np.ndarray:
    """Returns the logits of `IDS`, a fixed sequence with hypertokens."""
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


def assert_saved_as_trained(out: Path, seen: dict[str, Any], atol: float = 2e-5) -> None:
    """Asserts that the folder of a run gives the logits that the model had in memory. seen: see `in_memory`."""
    model, tokenizer = load(out / "model")
    assert len(tokenizer) == TOKENS
    found, expected = logits(model), seen["logits"]
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    np.testing.assert_allclose(found, expected, atol=atol)


def scratch(home: Path, **changes: Any) -> RunOptions:
    """Returns the options of a run from random weights, with what it reads in `home`."""
    write_json(home / "new.json", {**BASE, **SMALL})
    (home / "tokenizer").mkdir()
    write_tokenizer(home / "tokenizer", TOKENS)
    write_shards(home / "data", changes.pop("codec", CODEC))
    return RunOptions(
        data=[home / "data"],
        out=home / "run",
        scratch=home / "new.json",
        tokenizer=home / "tokenizer",
        encoder=ENCODER,
        **changes,
    )
