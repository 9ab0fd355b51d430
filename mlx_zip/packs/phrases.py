"""Makes packs of the phrases that MultiTok learned over a tokenizer's ids."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mlx_zip.errors import DataError
from mlx_zip.packs.pack import Pack
from mlx_zip.vocab.multitok.dictionary import Dictionary
from mlx_zip.vocab.multitok.units import NO_ID, Samples, Words


def pack_of_phrases(
    dictionary: Dictionary, size: int, merge_size: int, tokenizer: str | None, disabled: Collection[int] = ()
) -> Pack:
    """Returns a pack of at most `size` phrases of 2 to `merge_size` ids: those that training used most, best first.

    tokenizer: fingerprint of the dictionary's tokenizer (`first_stage.tokenizer_fingerprint`), None if unknown.
    disabled: ids that never merge. Phrases with a disabled id and phrases that training never used are left out. Raises
    `DataError` for a dictionary over words, and if no phrase is left.
    """
    units = dictionary.settings.units
    if isinstance(units, Words):
        raise DataError(
            "a dictionary over words cannot become a pack, which holds a tokenizer's ids: train with --tokenizer"
        )
    ids, lengths = dictionary.ids, dictionary.lengths[units.size :]
    uses = dictionary.uses[units.size :].astype(np.int64)
    rows = np.flatnonzero((ids != NO_ID) & (uses > 0) & (lengths <= merge_size))
    rows = rows[np.argsort(-uses[rows], kind="stable")]
    runs = dictionary.expand_all(Samples(ids[rows], np.arange(1, len(rows) + 1, dtype=np.uint64))).to_lists()
    never = set(disabled)
    kept = [(tuple(run), int(uses[row])) for run, row in zip(runs, rows, strict=True) if never.isdisjoint(run)][:size]
    if not kept:
        raise DataError(f"the dictionary holds no phrase of 2 to {merge_size} ids that training used")
    entries, used = zip(*kept, strict=True)
    about = {"made_of": "multitok", "window": dictionary.settings.window, "merge_size": merge_size, "uses": list(used)}
    return Pack(entries, tokenizer, about)
