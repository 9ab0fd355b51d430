"""Plain models that begin with a pack tuned for them: the config that makes a plain model read the pack's hypertokens.

The model has no hyper-encoder; tuning the pack starts each entry's row from the mean of the rows of its base ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.codec import CodecParams
from mlx_zip.errors import ConfigError
from mlx_zip.models.register import MODEL_TYPE
from mlx_zip.packs.tuned import PlainCodec


def packed_config(base: Mapping[str, Any], plain: PlainCodec, entries: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the keys of config.json that change so that a plain model reads these entries as hypertokens.

    base: the plain model's config.json. plain: the codec's settings that the pack was tuned with. entries: base ids of
    each entry. Raises `ConfigError`.
    """
    width = base.get("hidden_size")
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ConfigError(f"config.json: hidden_size must be a positive integer, got {width!r}")
    config = plain.config(entries, width)
    section = {**config.to_dict(), "base_model_type": base["model_type"], "plain": True}
    return {"model_type": MODEL_TYPE, "zip2zip": section}


def plain_codec(params: CodecParams, position_mode: str) -> PlainCodec:
    """Returns the codec settings that a pack tuned for a plain model records, to be used again with that pack.

    position_mode: "compressed" or "base_token_end". Raises `ConfigError` for a codec without a pad id.
    """
    if params.pad_id is None:
        raise ConfigError("the tokenizer has neither a pad nor an eos token, and a codebook needs one of them")
    return PlainCodec(params.vocab_size, params.disabled_ids, params.pad_id, position_mode)
