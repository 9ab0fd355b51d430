"""Hyper-encoders (entry -> row) and the rows a request keeps."""

from mlx_zip.hyper.encoders import make_encoder
from mlx_zip.hyper.fingerprint import Fingerprints, host_bytes
from mlx_zip.hyper.rows import RowTable, encode_entries, matrix_rows

__all__ = ["Fingerprints", "RowTable", "encode_entries", "host_bytes", "make_encoder", "matrix_rows"]
