"""The state of one request beyond its KV caches."""

from mlx_zip.state.evictions import Evicted
from mlx_zip.state.zip_state import Advance, HostIds, ZipState, find_state, submitting

__all__ = [
    "Advance",
    "Evicted",
    "HostIds",
    "ZipState",
    "find_state",
    "submitting",
]
