"""Rows for the row store without a model: each row is computed from its entry's base ids, so a wrong row is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip import RowStore
from mlx_zip.models.rows.row_folder import RowSet, list_row_files

WORDS, WIDTH = 3, 16
N = 200  # entries that a test stores


def kind(name: int = 1, width: int = WIDTH, dtype: mx.Dtype = mx.float32, durable: bool = True) -> RowSet:
    return RowSet(bytes([name] * 32), WORDS, width * dtype.size, dtype, durable)


def entries(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n different entries, base_ids [n, 3] padded with 2, and lengths [n]."""
    lengths = np.random.default_rng(seed).integers(2, WORDS + 1, n)
    base_ids = np.stack([np.arange(n) + 7, np.arange(n) * 5 % 1009 + seed, np.arange(n) % 31], axis=1)
    base_ids[lengths == 2, 2] = 2
    return base_ids.astype(np.uint32), lengths


def true_rows(base_ids: np.ndarray, lengths: np.ndarray, width: int = WIDTH) -> np.ndarray:
    """The rows that `encode` below makes: [N, width] float32."""
    text = np.where(np.arange(WORDS) < lengths[:, None], base_ids + 1.0, 0.0)
    return np.sin(text @ np.arange(1, WORDS * width + 1).reshape(WORDS, width) * 0.37).astype(np.float32)


class Encoder:
    """An encoder that counts the entries it is asked for."""

    def __init__(self, width: int = WIDTH, dtype: mx.Dtype = mx.float32) -> None:
        self.calls: list[int] = []
        self.width, self.dtype = width, dtype

    def __call__(self, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
        self.calls.append(len(base_ids))
        return mx.array(true_rows(base_ids, lengths, self.width)).astype(self.dtype)


def fill(folder: Path, n: int = N, seed: int = 0, folder_bytes: int = 1 << 20) -> None:
    """Stores n entries."""
    with RowStore(folder, folder_bytes=folder_bytes) as store:
        ids, lengths = entries(n, seed)
        store.find_or_encode_rows(kind(), ids, lengths, Encoder())


def check(folder: Path, n: int = N, seed: int = 0, which: RowSet | None = None, folder_bytes: int = 1 << 20) -> int:
    """Reads n entries, checks their rows, stores the missing ones, and returns how many were missing."""
    encoder, (ids, lengths) = Encoder(), entries(n, seed)
    with RowStore(folder, folder_bytes=folder_bytes) as store:
        rows = store.find_or_encode_rows(which or kind(), ids, lengths, encoder)
        np.testing.assert_array_equal(np.array(rows), true_rows(ids, lengths))
    return sum(encoder.calls)


def file_of(folder: Path) -> Path:
    """The path of the only file of rows in a folder."""
    (path,) = list_row_files(folder)
    return path


def warnings(caplog: Any) -> list[str]:
    """The warnings that the store has printed."""
    return [record.getMessage() for record in caplog.records if record.name == "mlx_zip"]
