"""Small models whose tokenizer AdaptBPE changes."""

import mlx.core as mx
import numpy as np

from mlx_zip.layout import has_hypertokens


def quantized(folder, out):
    """Quantizes the plain model of a folder with mlx-lm; returns `out`."""
    from mlx_lm.convert import convert as mlx_convert

    mlx_convert(str(folder), str(out), quantize=True, q_group_size=32, q_bits=4)
    return out


def logits_of(model, ids):
    return np.array(model(mx.array(ids)[None], cache=model.make_cache() if has_hypertokens(model) else None))[0]
