"""Measures of hierarchical BPE: FLOPs of a forward pass, fertility, bits per byte.

Source: arXiv 2510.15517, §2.3 and §3.2 (equations 4 and 10 to 12). A transformer's FLOPs are those of Hoffmann et al.,
arXiv 2203.15556, appendix F, but the embedding lookup costs nothing. The feed-forward part counts two matrices, which
gives the paper's 562 billion FLOPs for plain BPE. The paper's parameter counts need three matrices, so its models cost
more FLOPs than it says.
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


def parse_tower(text: str) -> Tower:
    """Returns the tower in a text LAYERS,WIDTH,FFN,HEADS. Raises `argparse.ArgumentTypeError` for any other text."""
    try:
        layers, width, ffn, heads = map(int, text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not LAYERS,WIDTH,FFN,HEADS") from None
    return Tower(layers, width, ffn, heads)


FIT_LATENT, FIT_LOCAL = Tower(4, 256, 704, 4), Tower(2, 128, 128, 2)  # defaults of `vocab hbpe fit`


def transformer_flops(length: float, tower: Tower, vocabulary: int) -> float:
    """Returns the FLOPs of a forward pass over `length` positions, with a softmax over `vocabulary` ids (0: none)."""
    d, n = tower.width, length
    attention = 2 * n * 3 * d * d + 2 * n * n * d + 3 * tower.heads * n * n + 2 * n * n * d + 2 * n * d * d
    ffn = 2 * n * 2 * d * tower.ffn
    return tower.layers * (attention + ffn) + 2 * n * d * vocabulary


def hierarchical_flops(
    n_bytes: float, bytes_per_patch: float, latent: Tower, local: Tower, symbols: int, patch_length: float | None = None
) -> float:
    """Returns the FLOPs of local encoder, local decoder and latent model on `n_bytes` bytes (equations 10 to 12).

    symbols: V', the size of the local decoder's softmax. patch_length: symbols per patch that the local models read;
    None takes `bytes_per_patch`, as the paper does.
    """
    patches, length = n_bytes / bytes_per_patch, bytes_per_patch if patch_length is None else patch_length
    local_flops = transformer_flops(length, local, 0) + transformer_flops(length, local, symbols)
    return patches * local_flops + transformer_flops(patches, latent, 0)


def fertility(tokens: float, words: float) -> float:
    """Returns the fertility of a tokenization: its number of tokens (or patches) per word (§2.3)."""
    return tokens / words


def word_count(text: str) -> int:
    """Returns the number of words in a text, separated by white space. The paper does not define its words."""
    return len(text.split())


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Returns the bits per byte of a text (equation 4).

    nats: negative log-likelihood of the text, end marks included. n_bytes: length of the text in UTF-8.
    """
    return nats / math.log(2) / n_bytes
