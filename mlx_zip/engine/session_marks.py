"""`Marks`: what a session's file must agree with, before an engine goes on from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_zip.codec import CodecParams
from mlx_zip.codec.params_json import params_to_json
from mlx_zip.engine.session_positions import is_as_trained
from mlx_zip.engine.sessions.format import BadFileError

MLX, TORCH = "mlx_zip session 1", "mlx_zip torch session 1"
_WRITERS = {MLX: "--engine mlx", TORCH: "--engine torch"}
_WORDS = {
    "model_fingerprint": "model",
    "tokenizer_fingerprint": "tokenizer",
    "codec": "codec parameters",
    "dtype": "type of numbers",
    "positions": "position mode, rotary setting or attention window",
}


@dataclass(frozen=True)
class Marks:
    """Fingerprints of the model, its tokenizer and its codec ("" for none), and what the file is like.

    positions: what `positions_mark` returns. dtype: what the model computes in, "" where the KV cache's arrays say it.
    format: one of this module's.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    codec: str
    positions: str
    dtype: str = ""
    format: str = MLX

    @property
    def facts(self) -> dict[str, str]:
        """The marks as a file's facts."""
        found = {"format": self.format, **{name: getattr(self, name) for name in _WORDS}}
        return {name: text for name, text in found.items() if text or name != "dtype"}

    def check(self, facts: Mapping[str, str]) -> None:
        """Raises `BadFileError` if a file's facts name another format, model, tokenizer, codec, type or positions.

        Older files do not name positions. They are taken to have this model's if its weights are trained with those.
        """
        found = facts.get("format", "unknown")
        if found in _WRITERS and found != self.format:
            raise BadFileError(f"{_WRITERS[found]} wrote it, and {_WRITERS[self.format]} cannot go on from it")
        if found != self.format:
            raise BadFileError(f"its format is {found!r:.60}, this version of mlx_zip reads {self.format!r}")
        if "positions" not in facts and not is_as_trained(self.positions):
            raise BadFileError("it is of an older version, which did not note how the model's positions were set")
        usual = {"dtype": "", "positions": self.positions}
        for name, word in _WORDS.items():
            if facts.get(name, usual.get(name)) != getattr(self, name):
                raise BadFileError(f"it was made with another {word} than the one that is loaded")


def codec_mark(params: CodecParams | None) -> str:
    """Returns the parameters of a codec, without what a codebook begins with, as text; "" without a codec."""
    if params is None:
        return ""
    fields = json.loads(params_to_json([params]))
    return json.dumps({name: value for name, value in fields.items() if name != "start"}, sort_keys=True)


def own_pack_key(start: Any, tuned: str | None) -> str:
    """Returns the key of what a model's codebooks begin with by default; "" for nothing.

    start: the entries, None for none. tuned: the fingerprint of the rows tuned for them, None for none.
    """
    if not (start or tuned):
        return ""
    return hashlib.sha256(json.dumps([start, tuned]).encode()).hexdigest()
