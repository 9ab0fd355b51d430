"""What a `SessionStore` is given, and what it gives to a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SessionOptions:
    """Bounds of a store. max_bytes: of all sessions in memory. folder: where sessions are kept on disk too, None for
    nowhere. max_disk_bytes: of all sessions of this model in the folder. model_name: as the model was asked for, None
    if unknown; tokenizer_config: how its tokenizer was loaded. Both are noted in the files, for `mlx_zip generate`.
    share: name of the part of the model that is here, "" for a whole model; files of another part are not read.
    """

    max_bytes: int = 4 << 30
    folder: Path | None = None
    max_disk_bytes: int = 16 << 30
    model_name: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    share: str = ""

    @property
    def about(self) -> dict[str, str]:
        """What files say of the model, beside its fingerprint."""
        named = {} if self.model_name is None else {"model": self.model_name}
        return {"tokenizer_config": json.dumps(dict(self.tokenizer_config)), **named}


@dataclass(frozen=True)
class Checkout:
    """A cache to go on with. ids, base_tokens: what it holds. name: to be given to `put` or `release` at the end.

    random_state: the sampler's random state that the session was put with; None if there was none, or if the session
    stays, because its copies must not all draw the same numbers.
    """

    cache: Any
    ids: int
    base_tokens: int
    name: str
    random_state: Any = None
