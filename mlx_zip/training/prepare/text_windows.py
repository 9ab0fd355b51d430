"""Reads texts, cuts them into windows and compresses them in memory, for training on at most a few million base ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from mlx_zip.codec import CodecParams
from mlx_zip.errors import DataError
from mlx_zip.text.sources import Skipped, Source, SourceReader, parse_item
from mlx_zip.training.prepare.encoding import (
    EncodedRecord,
    RecordEncoder,
    compress_window,
    cut_training_windows,
)
from mlx_zip.training.prepare.shards import Sample


def encode_sources(
    sources: Sequence[Source], tokenizer: Any, most_ids: int, skipped: Callable[[str], object]
) -> Iterator[EncodedRecord]:
    """Yields encoded records with a total of at most `most_ids` base ids; the loss counts all ids.

    Each source gives at most its share of `most_ids`, even if other sources have too few ids. skipped: called with a
    line for every invalid record.
    """
    largest = max(source.share for source in sources)  # divided first, because a sum of large shares could overflow
    ends = np.cumsum([source.share / largest for source in sources])
    counts = np.diff(np.rint(min(most_ids, 1 << 62) * ends / ends[-1]).astype(np.int64), prepend=0).tolist()
    encoder = RecordEncoder(tokenizer, "all")
    for source, left in zip(sources, counts, strict=True):
        for item in SourceReader(source) if left else ():
            encoded = encoder.encode([parse_item(item, source.columns)])[0]
            if isinstance(encoded, Skipped):
                if not encoded.empty:
                    skipped(f"skipped {encoded.where}: {encoded.reason}")
                continue
            part = slice(left)
            yield replace(encoded, ids=encoded.ids[part], counted=encoded.counted[part], n_bytes=encoded.n_bytes[part])
            left -= len(encoded.ids)
            if left <= 0:
                break


def cut_record_windows(encoded_records: Sequence[EncodedRecord], tokenizer: Any, context: int) -> list[Sample]:
    """Returns windows of at most `context` base ids, each with text of only one record.

    If the tokenizer puts no id before a text, each window begins with bos or else eos, so that the text's first id can
    be predicted.
    """
    first = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
    lead = () if first is None else (int(first),)
    with_leads = [encoded if encoded.lead else replace(encoded, lead=lead) for encoded in encoded_records]
    return list(cut_training_windows(with_leads, context, False, ()))


class CompressedTexts:
    """Compressed windows as samples for a `Trainer`. params: the codec. name: name of the texts, for messages.

    lengths, base_ids: number of ids and of base ids in every sample. starts: number of entries in the codec's starting
    codebook, repeated for every sample. These arrays are int64 [len(self)].
    """

    def __init__(self, params: CodecParams, samples: Sequence[Sample], name: str) -> None:
        self.params, self.samples, self.name = params, samples, name
        self.lengths = np.array([len(sample.ids) for sample in samples], np.int64)
        self.base_ids = np.array([sample.base_ids for sample in samples], np.int64)
        self.starts = np.full(len(samples), len(params.start or ()), np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Sample:
        return self.samples[i]

    def __str__(self) -> str:
        return self.name

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the codec, the ids and the loss masks."""
        digest = sha256(self.params.to_bytes())
        for sample in self.samples:
            digest.update(len(sample.ids).to_bytes(8, "little") + sample.ids.tobytes() + sample.mask.tobytes())
        return digest.hexdigest()


def compress_windows(params: CodecParams, windows: Sequence[Sample], name: str) -> CompressedTexts:
    """Compresses windows with the codec `params`. name: name of the texts, for messages.

    Raises `DataError` if there are no windows, or if an id is not a base id of the codec.
    """
    if not windows:
        raise DataError(f"{name}: there is no text")
    return CompressedTexts(params, [compress_window(params, one) for one in windows], name)
