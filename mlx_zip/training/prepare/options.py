"""The options of `prepare`: one frozen record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_zip.errors import DataError
from mlx_zip.text.sources import Source
from mlx_zip.training.prepare.encoding import TRAIN_ON


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, from which texts.

    sources: one source, or those of a mixture. out: the folder to write. model: folder or hub id of a model, which
    gives the tokenizer and, if it is a zip2zip model, the codec; tokenizer: instead of it, a tokenizer.
    context: maximum base ids per window. merge_size, codebook_size: None: the model's, else 3 and 2048; merge size 1 or
    codebook size 0 leaves base ids uncompressed. disable: ids that never merge; None: the model's, else the special
    ids. protect: further such ids, "digits" or ids separated by commas.
    pack: file of the pack that codebooks begin with; None: the model's own. empty_start: begin without entries.
    start_draw: number of the pack's entries that are drawn at random for each sample; None: all entries, no drawing.
    fill_windows: put several records into one window; None: yes for documents, no for conversations.
    train_on: see `Encoder`. shard_samples: approximate samples per shard. seed: of the drawing. limit: maximum number
    of samples; None: no limit. max_skipped: maximum number of invalid records that are skipped.

    Raises `DataError` naming an option that is not allowed.
    """

    sources: tuple[Source, ...]
    out: Path
    model: str | None = None
    tokenizer: str | None = None
    context: int = 1024
    merge_size: int | None = None
    codebook_size: int | None = None
    disable: tuple[int, ...] | None = None
    protect: tuple[str, ...] = ()
    pack: Path | None = None
    empty_start: bool = False
    start_draw: int | None = None
    fill_windows: bool | None = None
    train_on: str = "answers"
    shard_samples: int = 1024
    seed: int = 0
    limit: int | None = None
    max_skipped: int = 100
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("no data: name files or data sets")
        if (self.model is None) == (self.tokenizer is None):
            raise DataError("name either a model or a tokenizer")
        if self.train_on not in TRAIN_ON:
            raise DataError(f"train_on {self.train_on!r} is not one of {', '.join(TRAIN_ON)}")
        if self.pack is not None and self.empty_start:
            raise DataError("pack (--pack) and empty_start (--empty-start) exclude each other")
        if self.start_draw is not None and self.pack is None:
            raise DataError("start_draw (--start-draw) draws from a pack: name it with pack (--pack)")
        for name, least in (
            ("context", 2),
            ("start_draw", 1),
            ("shard_samples", 1),
            ("seed", 0),
            ("limit", 1),
            ("max_skipped", 0),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise DataError(f"{name} must be an integer of {least} or more, got {value!r}")
