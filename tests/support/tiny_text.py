"""Hand-made tokenizers of every kind of decoder that mlx-lm distinguishes, and golden checkpoints converted once."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_zip.converters import convert
from support.places import GOLDEN_MODELS

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2
EMOJI = "😀"  # four bytes in UTF-8, so four tokens below


def wrapped(tokenizer: Tokenizer, detokenizer_class) -> TokenizerWrapper:
    tokenizer.add_special_tokens(list(SPECIALS))
    bos, eos, pad = SPECIALS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    return TokenizerWrapper(fast, detokenizer_class)


def byte_level(letters: str = " \nabcdefghijklmnopqrstuvwxyz.,") -> TokenizerWrapper:
    """One token per byte of `letters` and of the emoji: 37 ids with the specials."""
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = letters + EMOJI
    tokens = dict.fromkeys([*SPECIALS, *(c for piece, _ in shown.pre_tokenize_str(text) for c in piece)])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = shown
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, BPEStreamingDetokenizer)


def _sentencepiece() -> Tokenizer:
    words = ["▁", "▁once", "▁upon", "▁a", "time", "s", "\n", "."]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def sentencepiece(trim: bool = True) -> TokenizerWrapper:
    """Word pieces and byte fallback. trim: the decoder drops the text's leading space, as Llama 2's does."""
    tokenizer = _sentencepiece()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if trim else parts)
    return wrapped(tokenizer, partial(SPMStreamingDetokenizer, trim_space=trim))


def naive() -> TokenizerWrapper:
    """The tokenizer of `sentencepiece` with mlx-lm's detokenizer for unknown decoders."""
    tokenizer = _sentencepiece()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return wrapped(tokenizer, NaiveStreamingDetokenizer)


@cache
def converted(name: str) -> Path:
    """The model folder of a golden checkpoint; each is converted once per process."""
    return convert(str(GOLDEN_MODELS / name), str(Path(mkdtemp()) / name), progress=False)
