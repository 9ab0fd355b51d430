"""The state of one request beyond its KV caches, and the packs that it begins with."""

from mlx_zip.packs.starts import split_packs, start_of, with_starts
from mlx_zip.state.evictions import Evicted
from mlx_zip.state.zip_state import Advance, HostIds, ZipState, find_state, submitting

__all__ = [
    "Advance",
    "Evicted",
    "HostIds",
    "ZipState",
    "find_state",
    "split_packs",
    "start_of",
    "submitting",
    "with_starts",
]
