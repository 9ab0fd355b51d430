"""What hierarchical BPE is measured by: FLOPs of a forward pass, fertility, bits per byte.

Source: arXiv 2510.15517, §2.3 and §3.2 (equations 4 and 10 to 12); a transformer's FLOPs are those of Hoffmann et al.,
arXiv 2203.15556, appendix F, with the embedding look-up free. Its feed-forward part has two matrices, which gives the
paper's 562 billion for plain BPE; the paper's parameter counts need three, so its models are dearer than it says.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass


@dataclass(frozen=True)
class Tower:
    """A stack of transformer layers: width D, feed-forward width, heads."""

    layers: int
    width: int
    ffn: int
    heads: int


def read_tower(text: str) -> Tower:
    """A tower as flags name it, LAYERS,WIDTH,FFN,HEADS. Raises `argparse.ArgumentTypeError` for what is none."""
    try:
        layers, width, ffn, heads = map(int, text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not LAYERS,WIDTH,FFN,HEADS") from None
    return Tower(layers, width, ffn, heads)


SMALL = Tower(12, 768, 2048, 12)  # table 1
MEDIUM = Tower(24, 1024, 2816, 16)
LOCAL = Tower(3, 512, 512, 8)  # encoder and decoder, each
FIT_LATENT, FIT_LOCAL = Tower(4, 256, 704, 4), Tower(2, 128, 128, 2)  # what `vocab hbpe fit` trains unless told


def transformer_flops(length: float, tower: Tower, vocabulary: int) -> float:
    """Tr(length, tower, V): a forward pass over `length` positions, with a softmax over `vocabulary` (0: none)."""
    d, n = tower.width, length
    attention = 2 * n * 3 * d * d + 2 * n * n * d + 3 * tower.heads * n * n + 2 * n * n * d + 2 * n * d * d
    ffn = 2 * n * 2 * d * tower.ffn
    return tower.layers * (attention + ffn) + 2 * n * d * vocabulary


def plain_flops(n_bytes: float, bytes_per_token: float, tower: Tower, vocabulary: int) -> float:
    """A plain model over a text of `n_bytes` bytes."""
    return transformer_flops(n_bytes / bytes_per_token, tower, vocabulary)


def hierarchical_flops(
    n_bytes: float, bytes_per_patch: float, latent: Tower, local: Tower, symbols: int, patch_length: float | None = None
) -> float:
    """Equations 10 to 12: local encoder, local decoder with V' `symbols`, latent model, over `n_bytes` bytes.

    patch_length: symbols per patch that the local models read; the paper takes the bytes per patch (None).
    """
    patches, length = n_bytes / bytes_per_patch, bytes_per_patch if patch_length is None else patch_length
    local_flops = transformer_flops(length, local, 0) + transformer_flops(length, local, symbols)
    return patches * local_flops + transformer_flops(patches, latent, 0)


def fertility(tokens: float, words: float) -> float:
    """Tokens (or patches) that the latent model reads, per word (§2.3)."""
    return tokens / words


def words_of(text: str) -> int:
    """Words of a text: what white space parts. The paper does not say what it counts."""
    return len(text.split())


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Equation 4: the negative log-likelihood of a text, end marks and all, in bits, over its bytes in UTF-8."""
    return nats / math.log(2) / n_bytes
