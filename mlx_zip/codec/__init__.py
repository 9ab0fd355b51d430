"""The codec: turns base ids into ids with hypertokens and back. The work is done by the C library in `native/`.

`tests/support/codec_twin.py` has the same rules in plain Python.
"""

from mlx_zip.codec import ids  # noqa: F401  (first: its error says how to build a missing extension)
from mlx_zip.codec.codebook import Codebook, compress, compress_next
from mlx_zip.codec.entries import Entries, Installed
from mlx_zip.codec.params import CodecParams

__all__ = ["Codebook", "CodecParams", "Entries", "Installed", "compress", "compress_next"]
