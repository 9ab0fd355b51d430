"""New ids of answers, their items and requests."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Returns a new id, as "resp_5f3a..."."""
    return f"{prefix}_{secrets.token_hex(24)}"
