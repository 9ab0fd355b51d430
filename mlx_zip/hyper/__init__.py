"""Hyper-encoders (entry -> row) and the rows a request keeps."""

from mlx_zip.hyper.encoders import make_encoder
from mlx_zip.hyper.rows import RowTable, encode_entries, matrix_rows

__all__ = ["RowTable", "encode_entries", "make_encoder", "matrix_rows"]
