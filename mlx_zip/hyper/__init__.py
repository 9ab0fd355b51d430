"""Hyper-encoders, which make rows of entries; a request's row tables; the store that keeps rows between requests."""

from mlx_zip.hyper.encoders import make_encoder
from mlx_zip.hyper.fingerprint import Fingerprints, host_bytes
from mlx_zip.hyper.model_fingerprint import ModelName, fingerprint_of, model_fingerprint, sampled
from mlx_zip.hyper.row_kinds import RowKinds
from mlx_zip.hyper.rows import CAPACITY_STEP, HeadTable, RowTable, TurningTable, encode_entries, matrix_rows
from mlx_zip.hyper.store import RowKind, RowStore

__all__ = [
    "CAPACITY_STEP",
    "Fingerprints",
    "HeadTable",
    "ModelName",
    "RowKind",
    "RowKinds",
    "RowStore",
    "RowTable",
    "TurningTable",
    "encode_entries",
    "fingerprint_of",
    "host_bytes",
    "make_encoder",
    "matrix_rows",
    "model_fingerprint",
    "sampled",
]
