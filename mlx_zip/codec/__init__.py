"""The codec: base ids to ids with hypertokens and back, over the C library in `native/`.

`mlx_zip.codec.twin` holds the same rules in plain Python; it is the oracle of the tests and nothing else imports it.
"""

from mlx_zip.codec.batch import pad_batch
from mlx_zip.codec.codebook import Codebook, compress
from mlx_zip.codec.entries import Entries, Installed
from mlx_zip.codec.params import CodecParams

__all__ = ["Codebook", "CodecParams", "Entries", "Installed", "compress", "pad_batch"]
